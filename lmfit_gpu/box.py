r"""The box lower ≤ θ ≤ upper in which a model may be evaluated.

Bounds are None (everywhere) or a pair of tensors (n_params,) with entries of ±inf where there is no bound. A model may
fail outside (``log`` of a scale that must be positive), so no probe, difference or check may leave the box, not even
by rounding: θ + (upper − θ) can exceed upper. :func:`inside` is applied to every point that was computed.
"""

from collections.abc import Sequence

import torch

__all__ = ["Bounds", "checked", "inside", "nearly_on", "rooms"]

NEARLY = 1e-8

Bounds = tuple[torch.Tensor, torch.Tensor]


def inside(theta: torch.Tensor, bounds: Bounds | None) -> torch.Tensor:
    """Return theta, shape (..., n_params), clamped into the box; itself where there are no bounds."""
    if bounds is None:
        return theta
    lower, upper = bounds
    return theta.clamp(lower.to(theta), upper.to(theta))


def rooms(theta: torch.Tensor, bounds: Bounds | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distances (up, down) from theta to the upper and the lower bounds, (n_params,) each, ≥ 0 or inf."""
    if bounds is None:
        free = torch.full_like(theta, torch.inf)
        return free, free
    lower, upper = bounds
    return (upper.to(theta) - theta).clamp(min=0), (theta - lower.to(theta)).clamp(min=0)


def nearly_on(theta: torch.Tensor, bounds: Bounds | None) -> bool:
    """Return whether a parameter is close to a bound (1e-8 of the box, or of the size of the bound) and not on it."""
    if bounds is None:
        return False
    lower, upper = bounds
    width = upper - lower
    for room, bound in zip(rooms(theta, bounds), (upper, lower), strict=True):
        size = torch.where(torch.isfinite(width), width, bound.abs().clamp(min=1.0))
        if bool(((room > 0) & (room < NEARLY * size)).any()):
            return True
    return False


def checked(bounds: Bounds | None, theta: torch.Tensor, names: Sequence[str]) -> Bounds | None:
    """Return bounds in theta's dtype on its device.

    Raises
    ------
    ValueError
        If a bound has another shape than theta or is NaN, a lower bound is above the upper one, or theta is outside.
    """
    if bounds is None:
        return None
    lower, upper = (torch.as_tensor(side).to(theta) for side in bounds)
    for name, side in (("lower", lower), ("upper", upper)):
        if side.shape != theta.shape:
            raise ValueError(f"bounds: {name} has shape {tuple(side.shape)}; expected {tuple(theta.shape)}")
    wrong = ~((lower <= theta) & (theta <= upper))
    if bool(wrong.any()):
        j = int(wrong.nonzero()[0, 0])
        name = names[j] if j < len(names) else f"parameter {j}"
        raise ValueError(
            f"bounds: {name!r} is {float(theta[j]):.6g} at the start; "
            f"lower <= start <= upper is expected, got {float(lower[j]):.6g} and {float(upper[j]):.6g}"
        )
    return lower, upper
