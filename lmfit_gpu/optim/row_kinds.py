"""What the rows of a batch are like: how many values and residuals each has, and whether it stands alone.

A few rows are evaluated together and each alone, in evaluation mode: Dropout and BatchNorm in training mode would make
every row depend on its company.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from lmfit_gpu.blocks import Block
from lmfit_gpu.models import CALL_ERRORS
from lmfit_gpu.optim.network import Network, evaluating, n_rows_of, on_device
from lmfit_gpu.optim.residuals import Residuals
from lmfit_gpu.row_check import ROW_RTOL, nearby
from lmfit_gpu.rows import each_tensor
from lmfit_gpu.warning_filters import warnings_here

__all__ = ["Rows", "counted", "examined", "picked_rows", "residuals_of_network"]

CHECKED_ROWS = 8


@dataclass(frozen=True)
class Rows:
    """What was found of the rows of one group.

    Parameters
    ----------
    q : int
        Values of a row.
    k : int
        Residuals of a row; 0: they belong to no row.
    outputs : tuple of int
        Shape of the outputs of a row.
    coupled : bool
        The values of a row depend on other rows.
    whole : bool
        The residuals are differentiated themselves, not the outputs.
    """

    q: int
    k: int
    outputs: tuple[int, ...] = ()
    coupled: bool = False
    whole: bool = False


def residuals_of_network(residuals: Residuals, network: Network, theta: torch.Tensor, block: Block) -> torch.Tensor:
    """Return the residuals of a function that calls the network; it may differentiate it, whatever mode torch is in."""
    tracked = torch.is_grad_enabled()
    with torch.enable_grad():
        x = each_tensor(lambda tensor: tensor.detach(), block.x)  # the function may write requires_grad
        r = network.evaluated(theta, lambda module: residuals.of_network(module, x, block.y, block.n_rows)).reshape(-1)
    return r if tracked else r.detach()


def picked_rows(tree: Any, some: torch.Tensor, device: torch.device, dtype: torch.dtype) -> Any:
    """Return some rows of x or y on a device, in the arithmetic of the network."""
    return on_device(each_tensor(lambda tensor: tensor[some.to(tensor.device)], tree), device, dtype)


def examined(network: Network, residuals: Residuals, x: Any, y: Any, theta: torch.Tensor) -> Rows:
    """Return what the rows of a group are like, from a few of them together and each alone, in evaluation mode.

    Raises
    ------
    ValueError, TypeError
        If outputs and targets do not fit each other or the residual function.
    """
    n, device = n_rows_of(x, "x"), theta.device
    some = torch.linspace(0, n - 1, min(n, CHECKED_ROWS), dtype=torch.float64).long()
    with evaluating([network.module]):
        together = _measured(network, residuals, picked_rows((x, y), some, device, theta.dtype), theta)
        rows = replace(together[0])
        if len(some) == 1:
            return rows
        for point in (theta, nearby(theta)):
            values = _measured(network, residuals, picked_rows((x, y), some, device, theta.dtype), point)
            picked = sorted({0, len(some) // 2, len(some) - 1})
            with warnings_here("ignore"):
                try:
                    alone = [
                        _measured(network, residuals, picked_rows((x, y), some[[i]], device, theta.dtype), point)
                        for i in picked
                    ]
                except CALL_ERRORS:
                    alone = []
            if not _agree(values[1], [a[1] for a in alone], picked, theta.dtype):
                rows = replace(rows, coupled=True)
            elif not _agree(values[2], [a[2] for a in alone], picked, theta.dtype):
                rows = replace(rows, coupled=True, whole=True)
    return rows


def _measured(
    network: Network, residuals: Residuals, data: tuple[Any, Any], theta: torch.Tensor
) -> tuple[Rows, torch.Tensor, torch.Tensor]:
    """Return the sizes, the values and the residuals of some rows, each with the rows in front."""
    x, y = data
    n = n_rows_of(x, "x")
    if residuals.form == "network":
        block = Block(0, slice(0, n), x, y, network)
        with torch.no_grad():
            r = residuals_of_network(residuals, network, theta, block)
        per_row = r.numel() // n if r.numel() % n == 0 else 0
        r = r.reshape(n, -1) if per_row else r[None]
        return Rows(per_row, per_row, whole=True, coupled=not per_row), r, r
    with torch.no_grad():
        outputs = network(theta, x)
    if outputs.ndim == 0 or outputs.shape[0] != n:
        raise ValueError(f"model: returned shape {tuple(outputs.shape)} for {n} rows; the rows are expected in front")
    flat = outputs.reshape(n, -1)
    if residuals.likelihood is not None:
        if not isinstance(y, torch.Tensor):
            raise ValueError(f"y: got {type(y).__name__}; {residuals.likelihood.name!r} needs a tensor of targets")
        residuals.likelihood.checked(flat, y)
        k = residuals.likelihood.surrogate(flat, y)[1].shape[1]
        return Rows(flat.shape[1], k, tuple(outputs.shape[1:])), flat, flat
    _check_targets(residuals, outputs, y)
    r = residuals.of_outputs(outputs, y)
    if r.ndim == 1:
        return Rows(0, 0, tuple(outputs.shape[1:]), coupled=True, whole=True), flat, r[None]
    return Rows(flat.shape[1], r.shape[1], tuple(outputs.shape[1:])), flat, r


def _squeezed(part: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of rows without axes of length 1, which pair the same numbers with and without."""
    return part.shape[0], *(size for size in part.shape[1:] if size != 1)


def _check_targets(residuals: Residuals, outputs: torch.Tensor, y: Any) -> None:
    shape = tuple(outputs.shape)
    if residuals.function is None:
        if not isinstance(y, torch.Tensor) or _squeezed(y) != _squeezed(outputs):
            given = f"rows of shape {tuple(y.shape[1:])}" if isinstance(y, torch.Tensor) else type(y).__name__
            raise ValueError(f"y: got {given}; the model's outputs have rows of shape {shape[1:]}")
        return
    if isinstance(y, torch.Tensor) and {y.ndim, outputs.ndim} == {1, 2} and y.numel() == outputs.numel() > 1:
        r = residuals.of_outputs(outputs, y)
        if r.numel() == outputs.numel() ** 2:
            raise ValueError(
                f"residual_fn: outputs {shape} and targets {tuple(y.shape)} broadcast to every pair of rows; "
                "give y and the outputs the same shape"
            )


def _agree(together: torch.Tensor, alone: list[torch.Tensor], picked: list[int], dtype: torch.dtype) -> bool:
    if not alone or together.shape[0] <= max(picked) or any(a.shape[1:] != together.shape[1:] for a in alone):
        return False
    rtol = ROW_RTOL[dtype]
    scale = float(torch.nan_to_num(together.abs(), nan=0.0, posinf=0.0).max())
    return torch.allclose(torch.cat(alone), together[picked], rtol=rtol, atol=rtol * scale, equal_nan=True)


def counted(network: Network, residuals: Residuals, data: tuple[Any, Any], theta: torch.Tensor) -> int:
    """Return the number of residuals of coupled rows, by evaluating all of them."""
    x, y = (on_device(part, theta.device, theta.dtype) for part in data)
    with evaluating([network.module]):
        return _measured(network, residuals, (x, y), theta)[2].numel()
