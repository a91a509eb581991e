r"""Whether a stationary point is a saddle, and a lower point beside it if it is.

A network with a penalty has a stationary point at zero weights, where J of the inner weights vanishes and a
Gauss-Newton step sees nothing to gain, although the cost curves downwards along a joint change of two layers. The true
Hessian H of the cost, by differences of its gradient, shows it: its lowest eigenvalue from a few Lanczos iterations
(Nocedal and Wright, 2nd ed., section 7.1) is negative, and along ± its eigenvector the cost falls.
"""

import numpy as np
import torch

from lmfit_gpu.jacobian import Derivatives
from lmfit_gpu.models import CALL_ERRORS
from lmfit_gpu.problem import Problem

__all__ = ["below_saddle"]

ITERATIONS = 12  # each two gradients: extreme eigenvalues come first
STEP = 1e-4  # of the differences, in units of parameters of size 1
NEGATIVE = 1e-6  # share of the largest eigenvalue by which the lowest must be below zero
LENGTHS = 10.0 ** -np.arange(0, 4, 0.5)  # of the moves that are tried, in both directions
GAIN = 1e-8  # share of the cost by which the lower point must be lower


def below_saddle(problem: Problem, derivatives: Derivatives, theta: torch.Tensor) -> torch.Tensor | None:
    """Return a point with a lower cost along a direction of negative curvature, or None where there is none.

    Parameters
    ----------
    problem : Problem
        Without bounds, its model in torch.
    derivatives : Derivatives
        By automatic differentiation.
    theta : Tensor, shape (n_params,)
        A stationary point. Costs 2 × 12 gradients, and some forward passes at a saddle.
    """
    lowest, largest, direction = _lowest(problem, derivatives, theta)
    if not lowest < -NEGATIVE * max(largest, 0.0):
        return None
    limit = problem.cost(theta) * (1 - GAIN)
    moves = [theta + float(sign * length) * direction for length in LENGTHS for sign in (1, -1)]
    costs = [_cost(problem, moved) for moved in moves]
    best = int(np.argmin(costs))
    return moves[best] if costs[best] < limit else None


def _cost(problem: Problem, theta: torch.Tensor) -> float:
    """Return the cost, infinite where the model refuses the point."""
    try:
        cost = problem.cost(theta)
    except CALL_ERRORS:
        return float("inf")
    return cost if np.isfinite(cost) else float("inf")


def _lowest(problem: Problem, derivatives: Derivatives, theta: torch.Tensor) -> tuple[float, float, torch.Tensor]:
    """Return the lowest and the largest eigenvalue of H that Lanczos sees, and the eigenvector (n,) of the lowest."""

    def curved(v: torch.Tensor) -> torch.Tensor:
        ahead, behind = (derivatives.at(theta + sign * STEP * v.to(theta)).gradient()[0] for sign in (1, -1))
        return ((ahead - behind) / (2 * STEP)).cpu()

    n = theta.numel()
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(n, generator=generator, dtype=torch.float64)
    basis, diagonal, beside = [v / torch.linalg.vector_norm(v)], [], []
    for k in range(min(ITERATIONS, n)):
        w = curved(basis[k].to(theta.device))
        diagonal.append(float(w @ basis[k]))
        for _ in range(2):  # orthogonal to all before, to rounding
            for q in basis:
                w = w - (w @ q) * q
        beside.append(float(torch.linalg.vector_norm(w)))
        if beside[-1] <= 1e-10 * max(map(abs, diagonal)):
            break
        basis.append(w / beside[-1])
    tridiagonal = np.diag(diagonal) + np.diag(beside[: len(diagonal) - 1], 1) + np.diag(beside[: len(diagonal) - 1], -1)
    if not np.isfinite(tridiagonal).all():
        return 0.0, 0.0, torch.zeros_like(theta)
    values, vectors = np.linalg.eigh(tridiagonal)
    combined = sum(float(c) * q for c, q in zip(vectors[:, 0], basis, strict=False))
    return float(values[0]), float(values[-1]), torch.as_tensor(combined).to(theta)
