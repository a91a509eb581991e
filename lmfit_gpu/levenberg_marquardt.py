r"""The loop: linearise, propose, try, judge.

::

    init                 cost and linearisation at θ₀
    step, once a trial   policy proposes p  ->  perhaps p + ½a  ->  cost(θ + p)  ->  gain ratio ρ
                         ρ >= 1e-4: accept, linearise there, stop tests;  else: reject, a shorter step next time
    minimize             step until a stop test, max_iter, the callback or Ctrl-C says stop

A trial that is not finite, a failed factorisation and a predicted reduction that is not positive are rejected
trials, never exceptions; the best point is always kept. No linear algebra and no printing here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch

from lmfit_gpu.backends import Backend, get_backend
from lmfit_gpu.certificate import newton_gain
from lmfit_gpu.damping import DampingPolicy, TrustRegion, updated_scale
from lmfit_gpu.early_stopping import HeldOut
from lmfit_gpu.exceptions import NonFiniteError
from lmfit_gpu.jacobian import Derivatives
from lmfit_gpu.linear import MOST_DENSE, BoundedLinearization, Linearization, Step, choose, linearize
from lmfit_gpu.messages import derivative_not_finite, residuals_not_finite
from lmfit_gpu.models import CALL_ERRORS
from lmfit_gpu.outcome import result_of
from lmfit_gpu.problem import Problem
from lmfit_gpu.result import IterationRecord, Result, Status, Stop
from lmfit_gpu.saddle import below_saddle
from lmfit_gpu.state import State
from lmfit_gpu.termination import (
    AT_ROUNDING,
    REACH_AT_ROUNDING,
    Tolerances,
    check,
    check_stalled,
    rounding_of_residual,
)
from lmfit_gpu.trial import Trial, attempted

__all__ = ["LevenbergMarquardt", "State"]

FAR = 1e-3  # relative fall of the cost above which no stop is near
FINER_BELOW = 100 * float(np.sqrt(np.finfo(np.float64).eps))  # relative fall of the cost


@dataclass(frozen=True)
class LevenbergMarquardt:
    """Minimise ½‖r(θ)‖².

    Parameters
    ----------
    jac : str or callable, default "auto"
        See :meth:`lmfit_gpu.jacobian.Derivatives.choose`.
    solver : {"auto", "qr", "cholesky"}
    backend : {"auto", "scipy", "torch"}
    damping : DampingPolicy
    tolerances : tuple of (ftol, xtol, gtol), each a float or "auto"
    max_iter : int, default 1000
        Most trials.
    within_reach : bool
        The stop tests look at the best step with ‖D p‖ ≤ max(‖D θ‖, ‖r‖) instead of the undamped one. Networks have
        units that the data or a penalty switch off; along their parameters the undamped step is endless, and gains
        nothing.
    least_progress : (n, share), optional
        Stop, without success, when the last n trials have lowered the cost by less than that share of it.
    decay : float
        Of D from one linearisation to the next; below 1 where they are of different rows.

    Examples
    --------
    >>> import torch
    >>> from lmfit_gpu.levenberg_marquardt import LevenbergMarquardt
    >>> from lmfit_gpu.models import TorchFunction
    >>> from lmfit_gpu.problem import LeastSquaresProblem
    >>> from lmfit_gpu.rows import ArrayRows
    >>> x = torch.linspace(0, 4, 30, dtype=torch.float64)
    >>> model = TorchFunction(lambda x, a, b: a * torch.exp(-b * x), ("a", "b"))
    >>> start = torch.tensor([1.0, 1.0], dtype=torch.float64)
    >>> problem = LeastSquaresProblem(model, ArrayRows(x, 2.5 * torch.exp(-1.3 * x)), start)
    >>> result = LevenbergMarquardt().minimize(problem, start)
    >>> result.success, result.theta.round(9).tolist()
    (True, [2.5, 1.3])
    """

    jac: str | Callable[..., Any] = "auto"
    solver: str = "auto"
    backend: str = "auto"
    damping: DampingPolicy = field(default_factory=TrustRegion)
    tolerances: tuple[float | str, float | str, float | str] = ("auto", "auto", "auto")
    max_iter: int = 1000
    within_reach: bool = False
    least_progress: tuple[int, float] | None = None
    decay: float = 1.0

    def init(self, problem: Problem, theta: torch.Tensor) -> State:
        """Return the state at the start, linearised and tested.

        Raises
        ------
        NonFiniteError
            If residuals or derivatives at the start are not finite; the message names rows and parameters.
        """
        cost = problem.cost(theta)
        if not np.isfinite(cost):
            raise NonFiniteError(residuals_not_finite(problem, theta))
        if self._solver(problem) == "ghost":
            derivatives = Derivatives.by_tensor(problem, theta)
        else:
            derivatives = Derivatives.choose(problem, self.jac, theta)
        state = self.linearized(problem, theta, cost, derivatives, None)
        if not state.lin.finite:
            raise NonFiniteError(derivative_not_finite(problem, state.jacobian))
        rounding = rounding_of_residual(state.lin, theta, problem.target_norm)
        state = replace(state, nfev=state.nfev + 1, policy=self.damping.start(state.lin, theta), rounding=rounding)
        return self.tested(problem, state)

    def step(self, problem: Problem, state: State) -> State:
        """Make exactly one trial and return the state after it."""
        state, trial = attempted(self.damping, problem, state)
        return self._accepted(problem, state, trial) if trial.accepted else self._rejected(problem, state, trial)

    def _accepted(self, problem: Problem, state: State, trial: Trial) -> State:
        record = trial.record(state)
        policy = self.damping.accept(state.policy, trial.step, record.gain_ratio)
        derivatives = _adapted(state, problem, trial.theta)
        if (state.cost - trial.cost) < FINER_BELOW * state.cost:
            derivatives = derivatives.refined() or derivatives
        moved = self.linearized(problem, trial.theta, trial.cost, derivatives, state)
        moved = replace(moved, policy=policy, n_iter=state.n_iter + 1, record=record, refusal=state.refusal)
        if not moved.lin.finite:
            stop = Stop(Status.NON_FINITE_JACOBIAN, float("nan"), float("inf"))
            return replace(moved, stop=stop)
        return self.tested(problem, moved)

    def _rejected(self, problem: Problem, state: State, trial: Trial) -> State:
        state = self.after_rejection(problem, state, trial)
        if state.stop is None:
            return state
        refined = self._refined(problem, state)
        return self._certified(problem, replace(state, stop=None), state.stop) if refined is None else refined

    def after_rejection(self, problem: Problem, state: State, trial: Trial) -> State:
        """Return the state after a rejected trial, with its stop when shorter steps cannot help."""
        policy = self.damping.reject(state.policy, trial.step)
        rejected = state.rejected + 1
        record = trial.record(state)
        state = replace(state, policy=policy, n_iter=state.n_iter + 1, rejected=rejected, record=record)
        rounding = _rounding(problem, state)
        least = REACH_AT_ROUNDING if self.within_reach else 0.0
        stop = check_stalled(state.lin, self.longest(state), state.theta, trial.step, rounding, state.cost, least)
        if stop is None and self.damping.attempts is not None and rejected >= self.damping.attempts:
            stop = Stop(Status.STALLED, trial.step.scaled_norm, float("inf"))
        return replace(state, stop=stop)

    def _certified(self, problem: Problem, state: State, stop: Stop) -> State:
        """Return the state with a stop without success, or with success where the true Hessian shows a minimum."""
        if stop.status > 0:
            return replace(state, stop=stop)
        nfev = 0

        def gradient(theta: torch.Tensor) -> torch.Tensor:
            nonlocal nfev
            jacobian = state.derivatives.at(theta)
            lin = linearize(jacobian, self._solver(problem), self._backend(problem))
            nfev += jacobian.nfev
            return lin.gradient

        free, held_rightly = None, True
        if problem.bounds is not None:
            free = (state.theta > problem.bounds[0]) & (state.theta < problem.bounds[1])
            held_rightly = not bool(state.lin.gradient[~free].any())
        gain = None
        try:
            if state.jacobian.keeps and held_rightly:  # 2n passes: if cheap
                gain = newton_gain(gradient, state.lin, state.theta, free, problem.bounds)
        except CALL_ERRORS:  # the model refuses a neighbour: no certificate
            gain = None
        limit = AT_ROUNDING[problem.dtype][0]
        if gain is not None:
            gain *= 0.5 * state.lin.residual_norm**2 / state.cost  # with a loss ½‖r̃‖² is not the cost
        if gain is not None and gain <= limit:
            stop = Stop(Status.CONVERGED_CURVATURE, gain, limit)
        return replace(state, stop=stop, nfev=state.nfev + nfev)

    def tested(self, problem: Problem, state: State) -> State:
        """Return the state with its stop, if a test is met on the finest derivatives there are."""
        rounding = _rounding(problem, state)
        tolerances = Tolerances.resolve(*self.tolerances, problem.dtype)
        undamped = None if _far(state, tolerances) else self.longest(state)
        stop = check(state.lin, undamped, state.theta, rounding, tolerances, state.cost)
        if stop is None:
            return state
        refined = self._refined(problem, state)
        return replace(state, stop=stop) if refined is None else refined

    def _refined(self, problem: Problem, state: State) -> State | None:
        """Return the state linearised again with finer derivatives, or None when there are none."""
        derivatives = state.derivatives.refined() or state.derivatives.renewed_at(state.theta)
        if derivatives is None:
            return None
        if derivatives.is_renewed:  # D remembers the norms that are not believed
            state = replace(state, scale=None)
        finer = self.linearized(problem, state.theta, state.cost, derivatives, state)
        finer = replace(finer, policy=state.policy, n_iter=state.n_iter, record=state.record, refusal=state.refusal)
        return self.tested(problem, finer) if finer.lin.finite else None

    def linearized(
        self,
        problem: Problem,
        theta: torch.Tensor,
        cost: float,
        derivatives: Derivatives,
        previous: State | None,
    ) -> State:
        """Return the state at a point, linearised there; `previous` is the one before, None at a start."""
        solver, backend = self._solver(problem), self._backend(problem)
        jacobian = derivatives.at(theta)
        full = linearize(jacobian, solver, backend)
        if (
            not full.finite and derivatives.is_autograd and problem.n_params <= MOST_DENSE
        ):  # a repaired J makes no products
            jacobian = jacobian.repaired()
            full = linearize(jacobian, solver, backend)
        scale = updated_scale(self.damping.scaling, full, None if previous is None else previous.scale, self.decay)
        value_norm = problem.target_norm + full.residual_norm
        full = full.with_scale(scale.d, derivatives.relative_error(full.column_norms, value_norm))
        lin: Linearization = full
        if problem.bounds is not None:
            below, above = ((bound - theta).double() for bound in problem.bounds)
            lin = BoundedLinearization(full, below, above)
        if previous is None:
            return State(theta, cost, derivatives, jacobian, lin, scale, None, njev=1)
        nfev, njev, rounding = previous.evaluations, previous.njev + 1, previous.rounding
        return State(theta, cost, derivatives, jacobian, lin, scale, None, rounding, nfev=nfev, njev=njev)

    def _if_worth_it(self, state: State, history: Sequence[IterationRecord]) -> State:
        """Return the state, stopped when the last trials have gained too little."""
        if state.stop is not None or self.least_progress is None or len(history) <= self.least_progress[0]:
            return state
        n, share = self.least_progress
        before = history[-n - 1].cost
        fall = (before - state.cost) / before
        stop = Stop(Status.SLOW_PROGRESS, fall, share, f"relative fall of the cost in the last {n} trials")
        return replace(state, stop=stop) if fall < share else state

    def _off_saddle(self, problem: Problem, state: State) -> State:
        """Return the state, or one at a lower point beside it where a network seems to have converged at a saddle."""
        stopped = state.stop is not None and state.stop.status > 0 and state.stop.status != Status.CONVERGED_RESIDUAL
        if not (stopped and self.within_reach and state.derivatives.is_autograd) or problem.bounds is not None:
            return state
        theta = below_saddle(problem, state.derivatives, state.theta)
        if theta is None:
            return state
        moved = self.linearized(problem, theta, problem.cost(theta), state.derivatives, replace(state, scale=None))
        if not moved.lin.finite:
            return state
        policy = self.damping.start(moved.lin, theta)
        moved = replace(moved, policy=policy, n_iter=state.n_iter, record=state.record, refusal=state.refusal)
        return self.tested(problem, moved)

    def longest(self, state: State) -> Step:
        """Return the step that says what is still to gain."""
        if not (self.within_reach and state.lin.direct):  # cg finds a step within a radius too loosely
            return state.lin.undamped()
        size = float(torch.linalg.vector_norm(state.lin.scale * state.theta.double()))
        return state.lin.within(max(size, state.lin.residual_norm), state.lin.least_damping)

    def _solver(self, problem: Problem) -> str:
        return choose(self.solver, problem.n_equations, problem.n_params)

    def _backend(self, problem: Problem) -> Backend:
        return get_backend(self.backend, problem.device)

    def _result(self, problem: Problem, state: State, history: list[IterationRecord]) -> Result:
        engine = {
            "solver": self._solver(problem),
            "backend": self._backend(problem).name,
            "damping": self.damping,
        }
        return result_of(problem, state, history, engine)

    def minimize(
        self,
        problem: Problem,
        theta: torch.Tensor,
        *,
        callback: Callable[[IterationRecord], Any] | None = None,
        held_out: HeldOut | None = None,
    ) -> Result:
        """Minimise from a start.

        Parameters
        ----------
        problem : Problem
        theta : Tensor, shape (n_params,)
            The start, on the problem's first device.
        callback : callable, optional
            Called with the record of every trial; a true return value stops the fit.
        held_out : HeldOut, optional
            Rows whose cost ends the fit and says which point is the best.

        Returns
        -------
        Result
            The best point, however the fit ended.

        Raises
        ------
        NonFiniteError
            If residuals or derivatives at the start are not finite.
        KeyboardInterrupt, what the callback raised, or the model while it was linearised
            Passed on, with the result so far as its attribute ``result``. At a trial point an error of the model is a
            rejected trial; the message of a fit that does not converge repeats it.
        """
        began = perf_counter()
        try:
            state = self.init(problem, theta)
        except BaseException:
            problem.close()
            raise
        history: list[IterationRecord] = []
        watch = None
        try:
            watch = None if held_out is None else held_out.watch(state)
            while state.stop is None:
                if state.n_iter >= self.max_iter:
                    state = replace(state, stop=Stop(Status.MAX_ITER, state.n_iter, self.max_iter))
                    break
                moved = self.step(problem, state)
                state, watch = (moved, None) if watch is None else watch.after(moved)
                record = replace(cast(IterationRecord, state.record), seconds=perf_counter() - began)
                history.append(record)
                state = self._off_saddle(problem, self._if_worth_it(state, history))
                if callback is not None and callback(record) and state.stop is None:
                    state = replace(state, stop=Stop(Status.STOPPED_BY_CALLBACK, state.n_iter, float("inf")))
        except BaseException as interrupt:  # Ctrl-C, or the model or the callback failed: the best point is not lost
            state = replace(state, stop=Stop(Status.INTERRUPTED, state.n_iter, float("inf")))
            state = state if watch is None else watch.restored(state)
            interrupt.result = self._result(problem, state, history)  # type: ignore[attr-defined]
            raise
        finally:
            problem.close()
            if held_out is not None:
                held_out.close()
        return self._result(problem, state if watch is None else watch.restored(state), history)


def _far(state: State, tolerances: Tolerances) -> bool:
    """Return whether the undamped step need not be known yet: it is an iteration, and the last trial gained much.

    A test that is not made costs at most one more trial.
    """
    if state.lin.direct or state.record is None or not state.record.accepted or not bool(state.lin.gradient.any()):
        return False
    gained = state.record.gain_ratio * state.record.predicted_reduction
    return gained > max(FAR, tolerances.ftol) * (state.cost + gained)


def _rounding(problem: Problem, state: State) -> float:
    """Return the rounding of ‖r‖; without targets, at most that of the start.

    Without targets the estimate rests on J, and difference steps too long for a steep model make columns so large
    that any ‖r‖ would pass for rounding (Chebyquad, n = 10, from 10 x0, 3-point).
    """
    rounding = rounding_of_residual(state.lin, state.theta, problem.target_norm)
    return rounding if problem.target_norm > 0 else min(state.rounding, rounding)


def _adapted(state: State, problem: Problem, theta: torch.Tensor) -> Derivatives:
    value_norm = problem.target_norm + state.lin.residual_norm
    return state.derivatives.adapted(theta, value_norm, state.lin.residual_norm, state.lin.column_norms)
