"""Reductions of (J, r) that give a step for every damping: one solver a file."""

from typing import Any

import torch

from lmfit_gpu.backends import Backend
from lmfit_gpu.jacobian import Jacobian
from lmfit_gpu.linear.base import FullLinearization, Linearization, Step
from lmfit_gpu.linear.bounded import BoundedLinearization
from lmfit_gpu.linear.cg import CGLinearization
from lmfit_gpu.linear.cholesky import CholeskyLinearization
from lmfit_gpu.linear.covariance import Estimable
from lmfit_gpu.linear.dual import DualLinearization
from lmfit_gpu.linear.ghost import GhostLinearization
from lmfit_gpu.linear.qr import QRLinearization

__all__ = [
    "MANY_PARAMS",
    "MOST_DENSE",
    "SOLVERS",
    "BoundedLinearization",
    "CGLinearization",
    "CholeskyLinearization",
    "DualLinearization",
    "Estimable",
    "FullLinearization",
    "GhostLinearization",
    "Linearization",
    "QRLinearization",
    "Step",
    "choose",
    "linearize",
]

SOLVERS: dict[str, Any] = {
    "qr": QRLinearization,
    "cholesky": CholeskyLinearization,
    "dual": DualLinearization,
    "ghost": GhostLinearization,
    "cg": CGLinearization,
}
MANY_PARAMS = 1000  # beyond, the singular value decomposition (20 n³ flops) outweighs its accuracy
MOST_DENSE = 20_000  # side of a square matrix: 3.2 GB, and a factorisation holds three of them
MOST_JACOBIAN = 2**29  # entries of J that dual keeps: 4 GB, twice while the next point is linearised


def choose(solver: str, n_residuals: int, n_params: int) -> str:
    """Return the solver to use.

    Parameters
    ----------
    solver : {"auto", "qr", "cholesky", "dual", "cg"}
        "auto" works in the smaller dimension: qr up to 1,000 parameters; beyond, dual where there are fewer residuals
        than parameters (and J has at most 2²⁹ entries), else cholesky; cg where a side of 20,000 is exceeded.
    n_residuals, n_params : int

    Raises
    ------
    ValueError
        For a name that is not a solver.
    """
    if solver == "auto":
        return _automatic(n_residuals, n_params)
    if solver not in SOLVERS:
        raise ValueError(f"solver: got {solver!r}; allowed are 'auto', {', '.join(map(repr, SOLVERS))}")
    return solver


def _automatic(n_residuals: int, n_params: int) -> str:
    if n_params <= MANY_PARAMS:
        return "qr"
    if n_residuals < n_params and n_residuals <= MOST_DENSE and n_residuals * n_params <= MOST_JACOBIAN:
        return "dual"
    return "cholesky" if n_params <= MOST_DENSE else "cg"


def linearize(jacobian: Jacobian, solver: str, backend: Backend) -> FullLinearization:
    """Reduce (J, r) by one pass over the data.

    Parameters
    ----------
    jacobian : Jacobian
    solver : {"qr", "cholesky", "dual", "cg"}
    backend : Backend

    Returns
    -------
    FullLinearization
        With D = 1; :meth:`FullLinearization.with_scale` sets D.

    Raises
    ------
    BackendUnavailableError
        If the backend has no room for the matrices of the solver, before anything is computed.
    """
    problem = jacobian.problem  # ghost has no equations for the penalty
    m, n = problem.n_residuals if solver == "ghost" else problem.n_equations, problem.n_params
    purpose = f"solver={solver!r} with {m} residuals and {n} parameters"
    if solver == "dual" and m * n > 4 * MOST_JACOBIAN:
        gigabytes = m * n * torch.finfo(jacobian.theta.dtype).bits / 8e9
        raise ValueError(
            f"solver='dual': J of {m} equations (one for each penalised weight among them) and {n} parameters takes "
            f"{gigabytes:.0f} GB; solver='ghost' does not form it, 'cholesky' and 'cg' keep no rows"
        )
    faces = 1 if problem.bounds is None else 3  # a step within bounds keeps two faces besides
    backend.reserve(faces * SOLVERS[solver].room(m, n), purpose)
    return SOLVERS[solver].reduce(jacobian, backend)
