"""What a fit says of its start and of its end: rows, parameters and bounds by name."""

from dataclasses import replace

import torch

from lmfit_gpu.jacobian import Jacobian
from lmfit_gpu.problem import Problem
from lmfit_gpu.result import Stop

__all__ = ["derivative_not_finite", "explained", "on_bounds", "residuals_not_finite"]


def explained(stop: Stop, refusal: str, bound: list[str]) -> Stop:
    """Return a stop with the parameters on a bound and, without success, what the model raised at a trial."""
    notes = [stop.note] if stop.note else []
    notes += [f"on a bound: {', '.join(bound)}"] if bound else []
    if refusal and stop.status <= 0:
        notes.append(f"the model raised {refusal}")
    return replace(stop, note="; ".join(notes))


def on_bounds(problem: Problem, theta: torch.Tensor) -> dict[int, str]:
    """Return {index: "on its lower bound" or "on its upper bound"} of the parameters that are."""
    if problem.bounds is None:
        return {}
    lower, upper = (theta == bound for bound in problem.bounds)
    return {
        j: f"on its {side} bound"
        for side, at in (("lower", lower), ("upper", upper))
        for j in at.nonzero()[:, 0].tolist()
    }


def residuals_not_finite(problem: Problem, theta: torch.Tensor) -> str:
    """Return which rows have residuals that are not finite at a start."""
    with torch.no_grad():
        parts = problem.map_blocks(lambda block: ~torch.isfinite(block.residual(problem.values(theta, block))))
        broken = torch.cat([part.cpu() for part in parts]).nonzero()[:, 0]
    rows = sorted({int(i) // (problem.per_row or 1) for i in broken[:1000]})[:5]
    if not rows:
        return "residuals: their sum of squares overflows at the start; rescale the data or give another p0"
    return f"residuals are not finite at the start p0 in {len(broken)} places, first in rows {rows}; give another p0"


def derivative_not_finite(problem: Problem, jacobian: Jacobian) -> str:
    """Return which derivative is not finite at a start, and where."""
    found = jacobian.first_non_finite()
    if found is None:
        return "derivatives at the start p0 are so large that their squares overflow; rescale X or the parameters"
    row, j = found
    name = list(problem.names)[j]
    return f"derivative by {name!r} is not finite at the start p0, first in row {row}; give another p0 or another jac"
