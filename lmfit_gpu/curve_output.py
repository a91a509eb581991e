r"""What curve_fit returns beside popt and pcov: SciPy's infodict and ier, of the point where the fit stopped.

MINPACK leaves a QR factorisation with column pivoting of the weighted Jacobian J = ∂r/∂θ there,

.. math:: J P = Q R, \qquad |R_{11}| \ge |R_{22}| \ge \dots

It is computed here once more at popt: ``fjac[j, :j+1]`` is column j of R, ``J[:, ipvt]`` is J P, ``qtf`` is Qᵀr.
"""

from typing import Any

import numpy as np
import torch
from scipy.linalg import qr

from lmfit_gpu.estimator import LMRegressor
from lmfit_gpu.jacobian import Derivatives
from lmfit_gpu.preparation import Data, prepare
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.result import Status

__all__ = ["evaluated", "exit_code", "jacobian", "pivoted_qr", "residual"]

EXIT_CODES = {  # (leastsq's info, least_squares' status); an exact fit has no gradient
    Status.CONVERGED_COST: (1, 2),
    Status.CONVERGED_CURVATURE: (1, 2),
    Status.CONVERGED_STEP: (2, 3),
    Status.CONVERGED_GRADIENT: (4, 1),
    Status.CONVERGED_RESIDUAL: (4, 1),
}
FINEST = {"auto": "3-point", "differences": "3-point", "2-point": "3-point"}


def exit_code(status: Status, is_minpack: bool) -> int:
    """Return SciPy's number, 1 to 4, for a status of success; its meaning depends on the method.

    Examples
    --------
    >>> exit_code(Status.CONVERGED_STEP, True), exit_code(Status.CONVERGED_STEP, False)
    (2, 3)
    """
    return EXIT_CODES[status][0 if is_minpack else 1]


def evaluated(est: LMRegressor, X: Any, y: Any, n_params: int) -> tuple[LeastSquaresProblem, torch.Tensor]:
    """Return the problem of a fitted curve without weights, bounds and ties, and its parameters there.

    Parameters
    ----------
    est : LMRegressor
    X, y : what it was fitted to
    n_params : int
        Parameters of the model: the first of ``est.theta_``.
    """
    theta = est.theta_[:n_params]
    plain = LMRegressor(est.model, residual=est.residual, p0=theta, x_format=est.x_format, dtype=est.dtype)
    setup = prepare(plain, Data(X, y))
    return LeastSquaresProblem(setup.model, setup.rows, setup.theta, devices=setup.devices), setup.theta


def residual(problem: LeastSquaresProblem, theta: torch.Tensor) -> np.ndarray:
    """Return prediction − target, shape (m,)."""
    with torch.no_grad():
        parts = [problem.residual(theta, rows).double().cpu() for rows in problem.row_blocks()]
    return torch.cat(parts).numpy()


def jacobian(problem: LeastSquaresProblem, theta: torch.Tensor, jac: Any) -> np.ndarray:
    """Return J, shape (m, n), by autograd, the user's function or 3-point differences."""
    if isinstance(jac, str) and not (jac == "auto" and problem.differentiable):
        jac = FINEST.get(jac, jac)
    return Derivatives.choose(problem, jac, theta).at(theta).whole()[:-1].T.double().cpu().numpy()


def pivoted_qr(r: np.ndarray, J: np.ndarray) -> dict[str, np.ndarray]:
    """Return fjac (n, m), ipvt (n,) and qtf (n,) of J (m, n), m ≥ n, and r (m,)."""
    m, n = J.shape
    q, triangle, pivots = qr(J, mode="economic", pivoting=True)
    fjac = np.zeros((n, m))
    fjac[:, :n] = triangle.T
    return {"fjac": fjac, "ipvt": pivots, "qtf": q.T @ r}
