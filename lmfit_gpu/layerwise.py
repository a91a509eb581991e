r"""Jacobian of a network of linear layers by outer products, the cheapest route there is.

For a layer z = W a + b that is used once a row, with δ = ∂v/∂z of a value v of that row,

.. math:: \frac{\partial v}{\partial W} = \delta\, a^T, \qquad \frac{\partial v}{\partial b} = \delta .

One forward pass shows a, one backward pass for each output of a row gives the δ of all rows, and J is written once:
for m values and n parameters m n products, where ``vmap`` makes the same numbers and then copies them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lmfit_gpu.models import ModuleModel, ResidualOf
from lmfit_gpu.problem import Block, Problem

__all__ = ["Layerwise"]


PROBE_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3}  # of sums over a block


@dataclass(frozen=True)
class Use:
    """What one pass showed of a layer: its name, its input a (rows, in) and its output z (rows, out)."""

    name: str
    a: torch.Tensor
    z: torch.Tensor


class Layerwise:
    """Outer products of layer inputs and output gradients; for modules with all free parameters in linear layers.

    Parameters
    ----------
    otherwise : callable (problem, theta) -> Route, optional
        What to use from the first block on for which a layer is not used once a row: a module may choose by its data.
    """

    name = "layerwise"

    def __init__(self, otherwise: Callable[[Problem, torch.Tensor], Any] | None = None) -> None:
        self._otherwise = otherwise
        self._other: Any = None

    def __call__(self, problem: Problem, theta: torch.Tensor, block: Block, columns: torch.Tensor) -> torch.Tensor:
        """Write ∂values/∂theta into `columns`, shape (n, c), and return the values, shape (c,).

        Raises
        ------
        ValueError
            If the module is not of that kind, or a layer is not used exactly once with rows of features, and there is
            no other route.
        """
        if self._other is None:
            try:
                return self._by_layers(problem, theta, block, columns)
            except ValueError:
                if self._otherwise is None:
                    raise
                self._other = self._otherwise(problem, theta)
        return self._other(problem, theta, block, columns)

    def _by_layers(self, problem: Problem, theta: torch.Tensor, block: Block, columns: torch.Tensor) -> torch.Tensor:
        model = block.model.model if isinstance(block.model, ResidualOf) else block.model
        if not isinstance(model, ModuleModel):
            raise ValueError("layerwise: only for a module")
        leaf = theta.detach().requires_grad_()
        uses, values = _observed(problem, model, leaf, block)
        rows = block.n_rows
        targets = columns.view(columns.shape[0], rows, -1)
        values = values.view(rows, -1)
        zs = [use.z for use in uses]
        for q in range(values.shape[1]):
            keep = q + 1 < values.shape[1]
            *deltas, total = torch.autograd.grad(
                values[:, q].sum(), [*zs, leaf], retain_graph=keep, materialize_grads=True
            )
            _check(model, uses, deltas, total)
            _write(model, uses, deltas, targets[:, :, q])
        return values.detach().reshape(-1)

    def passes(self, n_params: int) -> int:
        """Return the number of forward evaluations."""
        return 1


def _observed(problem: Problem, model: ModuleModel, leaf: torch.Tensor, block: Block) -> tuple[list[Use], torch.Tensor]:
    """Return what the layers did in one forward pass, and the values, connected to the layers' outputs."""
    layers = _layers(model)
    uses: list[Use] = []

    def seen(name: str) -> Any:
        def hook(module: torch.nn.Module, inputs: tuple[Any, ...], z: torch.Tensor) -> torch.Tensor:
            uses.append(Use(name, inputs[0].detach().clone(), z))
            return z.clone()  # what comes after may write into it, as into the input

        return hook

    hooks = [layer.register_forward_hook(seen(name)) for name, layer in layers.items()]
    try:
        with torch.enable_grad():
            values = problem.values(leaf, block)
    finally:
        for hook in hooks:
            hook.remove()
    rows = block.n_rows
    if sorted(use.name for use in uses) != sorted(layers) or any(use.a.ndim != 2 or len(use.a) != rows for use in uses):
        raise ValueError("layerwise: a layer is not used exactly once with rows of features")
    return uses, values


def _layers(model: ModuleModel) -> dict[str, torch.nn.Linear]:
    """Return the linear layers that hold the free parameters, by name."""
    found: dict[str, torch.nn.Linear] = {}
    for name in model.slices:
        owner, _, kind = name.rpartition(".")
        layer = model.module.get_submodule(owner)
        if type(layer) is not torch.nn.Linear or kind not in ("weight", "bias"):
            raise ValueError(f"layerwise: {name} is not of a linear layer")
        found[owner] = layer
    return found


def _check(model: ModuleModel, uses: list[Use], deltas: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """Check that the layers are all that the parameters do: Σ δ aᵀ and Σ δ are the whole gradient of the sum."""
    slices, rounding = model.slices, PROBE_ROUNDING[total.dtype]
    for use, delta in zip(uses, deltas, strict=True):
        prefix = f"{use.name}." if use.name else ""
        parts = {"weight": (delta.T @ use.a, delta.abs().T @ use.a.abs()), "bias": (delta.sum(0), delta.abs().sum(0))}
        for kind, (found, size) in parts.items():
            if prefix + kind in slices:
                off = (found.reshape(-1) - total[slices[prefix + kind]]).abs() - rounding * size.reshape(-1)
                if bool((off > 0).any()):
                    raise ValueError(f"layerwise: {prefix}{kind} is used besides its layer")


def _write(model: ModuleModel, uses: list[Use], deltas: Sequence[torch.Tensor], columns: torch.Tensor) -> None:
    """Write δ aᵀ and δ of every layer into columns, shape (n, rows)."""
    slices = model.slices
    for use, delta in zip(uses, deltas, strict=True):
        prefix = f"{use.name}." if use.name else ""
        if f"{prefix}weight" in slices:
            part = columns[slices[f"{prefix}weight"]].view(delta.shape[1], use.a.shape[1], -1)
            torch.mul(delta.T[:, None, :], use.a.T[None, :, :], out=part)
        if f"{prefix}bias" in slices:
            columns[slices[f"{prefix}bias"]] = delta.T
