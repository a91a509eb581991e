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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.func import jacfwd, vmap

from lmfit_gpu.attempt import factors_of, tiny_curve_fit
from lmfit_gpu.constraints import ConstrainedModel, Constraints
from lmfit_gpu.damping import damping_policy
from lmfit_gpu.exceptions import NonFiniteError
from lmfit_gpu.fitting import problem_of
from lmfit_gpu.levenberg_marquardt import LevenbergMarquardt
from lmfit_gpu.models import CALL_ERRORS, NumpyFunction
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.solution import Solution
from lmfit_gpu.warning_filters import warnings_here

__all__ = ["HeldFits", "Point", "Request"]

MOST_NUMBERS = 4_000_000  # of the Jacobians of a batch: 32 MB
ITERATIONS = 60
START_DAMPING, LEAST_DAMPING = 1e-4, 1e-14
UP, DOWN = 10.0, 0.1
GAINED = 1e-14  # of the cost: what the step of a converged point still promises
AT_ROUNDING = 1e-10  # the same where rounding lets no step succeed


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
        unconstrained = setup.constraints is None and setup.penalty is None
        in_torch = problem.differentiable and not problem.coupled and problem.dtype == torch.float64
        one_device = len(problem.devices) == 1
        fits = problem.n_residuals * problem.n_params <= MOST_NUMBERS
        may = {
            "batched": unconstrained and in_torch and one_device and fits,
            "tiny": unconstrained
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
        self._batch = _Batch(problem) if self.route == "batched" else None

    def fit(self, requests: Sequence[Request]) -> list[Point]:
        """Return the points of requests, in their order."""
        if self._batch is not None:
            points = self._batch.fit(requests)
        elif self.route == "tiny":
            points = [self._tiny(request) for request in requests]
        else:
            points = [None] * len(requests)
        pairs = zip(points, requests, strict=True)
        return [self._by_engine(request) if point is None else point for point, request in pairs]

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
        try:
            with warnings_here("ignore"):
                result = engine.minimize(problem_of(options, setup), start)
        except (NonFiniteError, *CALL_ERRORS):
            return Point(request.theta, float("inf"), converged=False)
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


class _Batch:
    """Points fitted together.

    Parameters
    ----------
    problem : LeastSquaresProblem
        Plain but for weights, of independent rows, in torch.
    """

    def __init__(self, problem: LeastSquaresProblem) -> None:
        block = problem.read(0, slice(0, problem.rows.n_samples), 0)
        frequency, inverse_sigma = block.spread(torch.zeros(problem.n_residuals, dtype=torch.float64))
        self.factor = torch.ones((), dtype=torch.float64) if inverse_sigma is None else inverse_sigma
        self.factor = self.factor if frequency is None else self.factor * frequency**0.5

        def residual(theta: torch.Tensor) -> torch.Tensor:
            return block.residual(problem.values(theta, block)) * self.factor

        self.values: Callable[[torch.Tensor], torch.Tensor] = vmap(residual)
        self.jacobians: Callable[[torch.Tensor], torch.Tensor] = vmap(jacfwd(residual))
        self.most = max(1, MOST_NUMBERS // (problem.n_residuals * problem.n_params))
        self.device = problem.device

    def fit(self, requests: Sequence[Request]) -> list[Point | None]:
        """Return the points that converged, None for the others."""
        found: list[Point | None] = []
        for first in range(0, len(requests), self.most):
            some = requests[first : first + self.most]
            theta = torch.from_numpy(np.stack([request.theta for request in some])).to(self.device)
            free = torch.ones_like(theta)
            for i, request in enumerate(some):
                free[i, list(request.held)] = 0.0
            try:
                theta, cost, converged = self._minimized(theta, free)
            except CALL_ERRORS:  # vmap has no rule for something in the model
                found += [None] * len(some)
                continue
            ends: Any = (theta.cpu().numpy(), cost.tolist(), converged.tolist())
            found += [Point(end, value, True) if good else None for end, value, good in zip(*ends, strict=True)]
        return found

    def _minimized(self, theta: torch.Tensor, free: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return θ (B, n), costs (B,) and which have converged, by damped Gauss-Newton steps over free entries."""
        cost = self._cost(theta)
        damping = torch.full_like(cost, START_DAMPING)
        scale = torch.zeros_like(theta)
        done = ~torch.isfinite(cost)
        converged = torch.zeros_like(done)
        stale = torch.ones_like(done)  # whose J is not of their point
        gram, gradient = theta.new_zeros(*theta.shape, theta.shape[1]), torch.zeros_like(theta)
        for _ in range(ITERATIONS):
            moved = (stale & ~done).nonzero()[:, 0]
            if moved.numel():
                r, jacobian = self.values(theta[moved]), self.jacobians(theta[moved]) * free[moved][:, None, :]
                gram[moved] = jacobian.mT @ jacobian
                gradient[moved] = (jacobian.mT @ r[..., None])[..., 0]
                scale[moved] = torch.maximum(scale[moved], torch.linalg.vector_norm(jacobian, dim=1))
                stale[moved] = False
            at = (~done).nonzero()[:, 0]
            if not at.numel():
                break
            d = torch.where(scale[at] > 0, scale[at], torch.ones_like(scale[at]))
            scaled = gram[at] / d[:, :, None] / d[:, None, :]
            damped = scaled + torch.diag_embed(damping[at, None] + (1 - free[at]))
            g = gradient[at] / d
            chol, info = torch.linalg.cholesky_ex(damped)
            q = -torch.cholesky_solve(g[..., None], chol)[..., 0]
            q = torch.where((info == 0)[:, None] & torch.isfinite(q), q, torch.zeros_like(q))
            step = q / d * free[at]
            promised = -(g * q).sum(1) - 0.5 * (q * (scaled @ q[..., None])[..., 0]).sum(1)
            trial = theta[at] + step
            trial_cost = self._cost(trial)
            better = trial_cost < cost[at]
            small = promised <= GAINED * cost[at]
            ended = small & (damping[at] <= START_DAMPING) & (info == 0)
            hopeless = ~better & (promised <= AT_ROUNDING * cost[at]) & (info == 0)
            theta[at[better]], cost[at[better]] = trial[better], trial_cost[better]
            stale[at[better]] = True
            factor = torch.where(better, DOWN, UP).to(damping)
            damping[at] = (damping[at] * factor).clamp_min(LEAST_DAMPING)
            converged[at] |= ended | hopeless
            done[at] |= ended | hopeless | (damping[at] > 1e12)
        return theta, cost, converged

    def _cost(self, theta: torch.Tensor) -> torch.Tensor:
        cost = 0.5 * (self.values(theta) ** 2).sum(1)
        return torch.where(torch.isfinite(cost), cost, torch.full_like(cost, torch.inf))
