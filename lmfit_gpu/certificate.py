r"""Second-order certificate: whether the point where a fit stalled is a minimum after all.

Where residuals are large and J is nearly singular, the Gauss-Newton step promises a gain that curvature of the
residuals takes away, and none of the first-order stop tests can be met at the minimum itself. There the true Hessian
decides,

.. math:: H = J^T J + \sum_i r_i \nabla^2 r_i, \qquad \text{Newton decrement } \tfrac12 g^T H^{-1} g,

(Nocedal and Wright, 2nd ed., theorem 2.4 and section 10.3). H comes from central differences of the gradient, 2n
linearisations; it is computed only when a fit would otherwise end without success. In a box it is taken over the
parameters that are not held by a bound.
"""

from collections.abc import Callable

import numpy as np
import torch

from lmfit_gpu.box import Bounds
from lmfit_gpu.linear import Linearization

__all__ = ["newton_gain"]

MANY_PARAMS = 100  # 2n linearisations
DEFINITE = 1e-7  # least over largest eigenvalue of D⁻¹HD⁻¹: differences of the gradient leave about 1e-10


def newton_gain(
    gradient: Callable[[torch.Tensor], torch.Tensor],
    lin: Linearization,
    theta: torch.Tensor,
    free: torch.Tensor | None = None,
    bounds: Bounds | None = None,
) -> float | None:
    """Return the reduction that Newton's step promises, over the cost; None where the point is no strict minimum.

    Parameters
    ----------
    gradient : callable (theta (n,)) -> g (n,)
        Gradient of the cost, float64.
    lin : Linearization
        At theta; its column norms are the scale.
    theta : Tensor, shape (n_params,), float64
    free : Tensor of bool, shape (n_params,), optional
        The parameters that may move; the others are held where they are. None: all.
    bounds : (lower, upper), optional
        The box in which the gradient may be evaluated.

    Returns
    -------
    float or None
        None when H is not positive definite by a margin, not finite, n is above 100, or a central difference would
        leave the box. 0 when no parameter is free.
    """
    free = torch.ones_like(theta, dtype=torch.bool) if free is None else free.to(theta.device)
    moving = free.nonzero()[:, 0]
    scale = lin.column_norms[moving]
    if moving.numel() > MANY_PARAMS or theta.dtype != torch.float64 or not bool((scale > 0).all()):
        return None
    if moving.numel() == 0:
        return 0.0
    sizes = torch.where(theta[moving] == 0, lin.residual_norm / scale, theta[moving].abs())
    steps = torch.finfo(theta.dtype).eps ** (1 / 3) * sizes
    if bounds is not None:
        lower, upper = (side.to(theta)[moving] for side in bounds)
        if bool(((theta[moving] - steps < lower) | (theta[moving] + steps > upper)).any()):
            return None
    rows = []
    for j, step in zip(moving.tolist(), steps, strict=True):
        move = torch.zeros_like(theta)
        move[j] = step
        rows.append(((gradient(theta + move) - gradient(theta - move)) / (2 * step))[moving])
    hessian = (torch.stack(rows) / scale / scale[:, None]).cpu().numpy()
    if not np.isfinite(hessian).all():
        return None
    values, vectors = np.linalg.eigh((hessian + hessian.T) / 2)
    if values[0] <= DEFINITE * values[-1]:
        return None
    along = vectors.T @ (lin.gradient[moving] / scale).cpu().numpy()
    return float(0.5 * np.sum(along**2 / values)) / (0.5 * lin.residual_norm**2)
