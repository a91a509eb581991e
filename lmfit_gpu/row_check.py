"""Whether rows are independent: the value of a row depends on that row alone.

Some rows, spread over the data, are evaluated together and each alone. Equal: independent, and a fit may work in
blocks of rows; unequal, or an error: coupled (a convolution, a running sum, an ODE over x).
"""

from collections.abc import Callable

import torch

from lmfit_gpu.box import Bounds, inside, rooms
from lmfit_gpu.models import CALL_ERRORS, Model
from lmfit_gpu.rows import ArrayRows
from lmfit_gpu.warning_filters import warnings_here

__all__ = ["PROBE_ROWS", "examine", "flat", "nearby", "rows_stand_alone", "telling_rows"]

PROBE_ROWS = 64
EXTREME_FEATURES = 4  # features whose extreme rows take part in the row check
# A row alone and among others differ by rounding (vector and scalar kernels), not by more.
ROW_RTOL = {torch.float64: 1e-8, torch.float32: 1e-4}
NEARBY = 0.1  # the second point of the row check: a tenth of the size of each parameter, or of 1


def flat(values: torch.Tensor, y: torch.Tensor | None, is_residual: bool, n_rows: int) -> torch.Tensor:
    """Return values as (c,) in y's order, or say what is wrong with their shape."""
    if is_residual or y is None:
        return values.reshape(-1)
    if values.shape == y.shape:
        return values.reshape(-1)
    if values.ndim == 0:  # a constant model
        return values.expand(y.numel())
    shapes = {tuple(y.shape), (n_rows,), (n_rows, 1)} if y.numel() == n_rows else {tuple(y.shape)}
    if tuple(values.shape) not in shapes:
        expected = " or ".join(str(shape) for shape in sorted(shapes))
        raise ValueError(f"model: returned shape {tuple(values.shape)} for {n_rows} rows; y asks for {expected}")
    return values.reshape(-1)


def examine(model: Model, rows: ArrayRows, theta: torch.Tensor, bounds: Bounds | None = None) -> tuple[int, int, bool]:
    """Return (residuals per row or 0, n_residuals, coupled), by evaluating some rows together and each alone.

    The rows are spread over the data and hold the extremes of the features, where branches on data differ. They are
    tried at theta and near it: at a zero start a coupled term may be switched off.
    """
    n = rows.n_samples
    some = telling_rows(rows.X)
    values = _values_of_rows(model, rows, theta)
    x, y = rows.read(some, theta.device, theta.dtype)  # a copy: the user's data are safe from this call
    given = x.clone()
    try:
        with torch.no_grad():
            together = flat(model(theta, x, y), y, model.is_residual, len(some)).numel()
    except CALL_ERRORS:  # a model that knows arrays of its own takes all rows or none
        together = -1
    if not bool(((x == given) | (given != given)).all()):
        raise ValueError("model: it writes to its input x in place; work on a copy of it")
    if together == 0:
        raise ValueError("model: returned no values")
    per_row, rest = divmod(together, len(some))
    alone = together > 0 and not rest
    if alone and all(rows_stand_alone(values, point, some, per_row) for point in (theta, nearby(theta, bounds))):
        return per_row, per_row * n, False
    whole = values(theta, slice(0, n)).numel()
    if whole == 0:
        raise ValueError("model: returned no values")
    per_row, rest = divmod(whole, n)
    return (0 if rest else per_row), whole, True


def _values_of_rows(
    model: Model, rows: ArrayRows, theta: torch.Tensor
) -> Callable[[torch.Tensor, slice | torch.Tensor], torch.Tensor]:
    def values(point: torch.Tensor, part: slice | torch.Tensor) -> torch.Tensor:
        x, y = rows.read(part, theta.device, theta.dtype)
        with torch.no_grad():
            found = flat(model(point, x, y), y, model.is_residual, x.shape[0])
        if found.is_complex():
            raise ValueError("model: returned complex values; real ones are expected (curve_fit takes complex data)")
        return found

    return values


def nearby(theta: torch.Tensor, bounds: Bounds | None = None) -> torch.Tensor:
    """Return a point near theta, the same for the same theta, where checks that pass at a zero may fail.

    In a box a parameter without room for its move goes the other way, or else to the middle of its longer room.
    """
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(theta.shape, generator=generator, dtype=torch.float64).to(theta)
    move = NEARBY * (1 + theta.abs()) * u
    if bounds is None:
        return theta + move
    up, down = rooms(theta, bounds)
    up_first = (up >= move) | ((down < move) & (up >= down))
    side, room = torch.where(up_first, 1.0, -1.0).to(theta), torch.where(up_first, up, down)
    point = theta + side * torch.where(room >= move, move, room / 2)
    return inside(torch.where(point == theta, theta + side * room, point), bounds)  # half of one ulp is no move


def rows_stand_alone(
    values: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    theta: torch.Tensor,
    some: torch.Tensor,
    per_row: int,
) -> bool:
    """Return whether some rows have the same values together and each alone.

    Parameters
    ----------
    values : callable (theta, rows) -> Tensor
        Values of rows given by their numbers, those of a row together.
    theta : Tensor, shape (n_params,)
    some : Tensor of int
        Numbers of rows; the first, the middle and the last of them, and those of the extreme values, are tried.
    per_row : int
        Values of a row.
    """
    with warnings_here("ignore"):  # x.std() of one row warns; it is not the user's doing
        try:
            together = values(theta, some).view(-1, per_row)
            picked = sorted({0, len(some) // 2, len(some) - 1} | set(_extremes(together)))
            alone = torch.stack([values(theta, some[[i]]).view(-1) for i in picked])
        except CALL_ERRORS:
            return False
    together = together[picked]
    if alone.shape != together.shape:
        return False
    rtol = ROW_RTOL[theta.dtype]
    scale = float(torch.nan_to_num(together.abs(), nan=0.0, posinf=0.0).max())
    return torch.allclose(alone, together, rtol=rtol, atol=rtol * scale, equal_nan=True)


def _extremes(values: torch.Tensor) -> list[int]:
    first = torch.nan_to_num(values[:, 0].double())
    return [int(first.argmin()), int(first.argmax())]


def telling_rows(X: torch.Tensor) -> torch.Tensor:
    """Return at most PROBE_ROWS rows: spread over the data, with the extremes of its first few features."""
    n = X.shape[0]
    if n <= PROBE_ROWS:
        return torch.arange(n)
    features = X.reshape(n, -1)
    chosen = set(torch.linspace(0, n - 1, PROBE_ROWS - 2 * EXTREME_FEATURES, dtype=torch.float64).long().tolist())
    for j in range(min(features.shape[1], EXTREME_FEATURES)):
        column = features[:, j]
        column = column.to(torch.float64) if column.dtype not in (torch.float64, torch.float32) else column
        chosen |= {int(column.argmin()), int(column.argmax())}
    return torch.tensor(sorted(chosen))
