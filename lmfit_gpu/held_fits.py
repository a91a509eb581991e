r"""Fits with some parameters held at given values, many at a time: what profiles and maps are made of.

Each *point* is the minimum of the cost over the other parameters. Three routes, the first that applies:

=========  ====================================================  ==============================================
route      idea                                                  for
=========  ====================================================  ==============================================
batched    all points together, values and J by ``vmap`` over    torch models of independent rows, in float64,
           θ, a damped Gauss-Newton step with a λ for each       without constraints, J of all points small
tiny       :mod:`lmfit_gpu.compact`, one after the other         numpy functions of few rows and parameters,
                                                                 without constraints
engine     :class:`~lmfit_gpu.levenberg_marquardt.               all others, and points that do not converge on
           LevenbergMarquardt`, one after the other              the other routes
=========  ====================================================  ==============================================
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lmfit_gpu.attempt import factors_of, tiny_curve_fit
from lmfit_gpu.batch import Batch
from lmfit_gpu.constraints import ConstrainedModel, Constraints
from lmfit_gpu.damping import damping_policy
from lmfit_gpu.exceptions import FitWarning, NonFiniteError
from lmfit_gpu.fitting import problem_of
from lmfit_gpu.levenberg_marquardt import LevenbergMarquardt
from lmfit_gpu.models import CALL_ERRORS, NumpyFunction
from lmfit_gpu.solution import Solution
from lmfit_gpu.warning_filters import warnings_here

__all__ = ["HeldFits", "Point", "Request"]

BETTER = 1e-8  # relative fall of the cost below that of the fit which is not rounding


@dataclass(frozen=True)
class Request:
    """Where a point is wanted.

    Parameters
    ----------
    held : tuple of int
        Parameters that are held, among all.
    theta : ndarray, shape (n_all,)
        The held ones at their values, the others at a start.
    """

    held: tuple[int, ...]
    theta: np.ndarray


@dataclass(frozen=True)
class Point:
    """A minimum over the parameters that are not held.

    Parameters
    ----------
    theta : ndarray, shape (n_all,)
    cost : float
    converged : bool
    """

    theta: np.ndarray
    cost: float
    converged: bool


class HeldFits:
    """Fits of a solution with parameters held.

    Parameters
    ----------
    solution : Solution
    route : {"auto", "batched", "tiny", "engine"}
        The first to try.
    """

    def __init__(self, solution: Solution, route: str = "auto") -> None:
        self.solution = solution
        problem, setup, data = solution.problem, solution.setup, solution.data
        may = {
            "batched": Batch.takes(solution),
            "tiny": setup.constraints is None
            and setup.penalty is None
            and problem.loss is None
            and problem.dtype == torch.float64
            and isinstance(setup.model, NumpyFunction)
            and setup.model.order == "params"
            and isinstance(data.X, np.ndarray)
            and isinstance(data.y, np.ndarray)
            and data.y.ndim == 1,
            "engine": True,
        }
        self.route = next(name for name in may if may[name]) if route == "auto" else route
        if not may[self.route]:
            raise ValueError(f"route: {route!r} is not for this fit")
        self._batch = Batch(problem) if self.route == "batched" else None
        self.best = Point(solution.result.theta, solution.result.cost, True)

    def fit(self, requests: Sequence[Request]) -> list[Point]:
        """Return the points of requests, in their order; `best` is the one of least cost so far."""
        points: list[Point | None] = [None] * len(requests)
        if self._batch is not None:
            points = self._together(requests)
        elif self.route == "tiny":
            points = [self._tiny(request) for request in requests]
        pairs = zip(points, requests, strict=True)
        found = [self._by_engine(request) if point is None else point for point, request in pairs]
        self.best = min(self.best, *found, key=lambda point: point.cost)
        return found

    def warn_of_better(self, stacklevel: int) -> None:
        """Warn if a lower cost has been met than that of the fit: it was not at the minimum."""
        result = self.solution.result
        if self.best.cost < (1 - BETTER) * result.cost:
            names = ", ".join(f"{n}={v:.6g}" for n, v in zip(result.names, self.best.theta, strict=True))
            warnings.warn(
                f"a better fit was found, cost {self.best.cost:.6g} instead of {result.cost:.6g}, at {names}; "
                "what follows from the old one does not hold: fit again with p0 there",
                FitWarning,
                stacklevel=stacklevel + 1,
            )

    def _together(self, requests: Sequence[Request]) -> list[Point | None]:
        assert self._batch is not None
        theta = torch.from_numpy(np.stack([request.theta for request in requests]))
        free = torch.ones_like(theta)
        for i, request in enumerate(requests):
            free[i, list(request.held)] = 0.0
        ends = self._batch.fit(theta, free)
        return [Point(end, cost, True) if good else None for end, cost, good in ends]

    def _tiny(self, request: Request) -> Point | None:
        setup, data = self.solution.setup, self.solution.data
        model: Any = setup.model
        full = request.theta.copy()
        free = np.setdiff1d(np.arange(len(full)), request.held)
        if not free.size:
            return None

        def held(x: Any, *theta: float) -> Any:
            full[free] = theta
            return model.function(x, *full)

        x = data.X[:, 0] if setup.rows.squeeze else data.X
        answer = tiny_curve_fit(held, x, data.y, request.theta[free], weights=factors_of(data.weights))
        if answer is None:
            return None
        theta = request.theta.copy()
        theta[free] = answer.theta
        return Point(theta, answer.cost, converged=True)

    def _by_engine(self, request: Request) -> Point:
        solution, options = self.solution, self.solution.options
        constraints = _with_held(solution, request)
        if not constraints.free.any():
            theta = torch.from_numpy(request.theta[solution.free]).to(solution.theta)
            return Point(request.theta, solution.problem.cost(theta), converged=True)
        setup = solution.setup
        inner = setup.model.model if isinstance(setup.model, ConstrainedModel) else setup.model
        start = torch.from_numpy(constraints.theta()).to(setup.theta)
        penalty = None if setup.penalty is None else replace(setup.penalty, constraints=constraints)
        setup = replace(
            setup,
            model=ConstrainedModel(inner, constraints),
            theta=start,
            constraints=constraints,
            penalty=penalty,
        )
        engine = LevenbergMarquardt(
            jac=options.jac,
            solver=options.solver if options.solver != "ghost" else "auto",
            backend=options.backend,
            damping=damping_policy(options.damping),
            within_reach=penalty is not None,
        )
        problem = None
        try:
            with warnings_here("ignore"):
                problem = problem_of(options, setup)
                result = engine.minimize(problem, start)
        except (NonFiniteError, *CALL_ERRORS):
            return Point(request.theta, float("inf"), converged=False)
        finally:
            if problem is not None:
                problem.close()
        found = constraints.full(torch.from_numpy(result.theta)).numpy()
        return Point(found, result.cost, result.success)


def _with_held(solution: Solution, request: Request) -> Constraints:
    """Return the constraints of the fit with more parameters fixed, started where the request says, within bounds."""
    known, names = solution.setup.constraints, tuple(solution.result.names)
    n = len(names)
    if known is None:
        known = Constraints(names, n, request.theta, np.full(n, -np.inf), np.full(n, np.inf), np.ones(n, dtype=bool))
    free = known.free.copy()
    free[list(request.held)] = False
    start = np.where(free, np.clip(request.theta, known.lower, known.upper), request.theta)
    return Constraints(known.names, known.n_model, start, known.lower, known.upper, free, known.ties)
