"""Reductions of (J, r) that give a step for every damping: one solver a file."""

from typing import Any

from lmfit_gpu.backends import Backend
from lmfit_gpu.jacobian import Jacobian
from lmfit_gpu.linear.base import Linearization, Step
from lmfit_gpu.linear.cholesky import CholeskyLinearization
from lmfit_gpu.linear.qr import QRLinearization

__all__ = [
    "SOLVERS",
    "CholeskyLinearization",
    "Linearization",
    "QRLinearization",
    "Step",
    "choose",
    "linearize",
]

SOLVERS: dict[str, Any] = {"qr": QRLinearization, "cholesky": CholeskyLinearization}
MANY_PARAMS = 1000  # beyond, the singular value decomposition (20 n³ flops) outweighs its accuracy


def choose(solver: str, n_params: int) -> str:
    """Return the solver to use.

    Parameters
    ----------
    solver : {"auto", "qr", "cholesky"}
        "auto" is qr up to 1,000 parameters, cholesky beyond.
    n_params : int

    Raises
    ------
    ValueError
        For a name that is not a solver.
    """
    if solver == "auto":
        return "qr" if n_params <= MANY_PARAMS else "cholesky"
    if solver not in SOLVERS:
        raise ValueError(f"solver: got {solver!r}; allowed are 'auto', {', '.join(map(repr, SOLVERS))}")
    return solver


def linearize(jacobian: Jacobian, solver: str, backend: Backend) -> Linearization:
    """Reduce (J, r) by one pass over the data.

    Parameters
    ----------
    jacobian : Jacobian
    solver : {"qr", "cholesky"}
    backend : Backend

    Returns
    -------
    Linearization
        With D = 1; :meth:`Linearization.with_scale` sets D.
    """
    return SOLVERS[solver].reduce(jacobian, backend)
