"""One fit: from checked options and rows to a result that speaks of all parameters and options."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from lmfit_gpu.attempt import attempt
from lmfit_gpu.damping import DampingPolicy, TrustRegion, damping_policy
from lmfit_gpu.delta_method import of_all_parameters
from lmfit_gpu.early_stopping import EarlyStopping, HeldOut, resolve_early_stopping, split_rows
from lmfit_gpu.levenberg_marquardt import LevenbergMarquardt
from lmfit_gpu.linear import MANY_PARAMS
from lmfit_gpu.losses import resolve_loss
from lmfit_gpu.models import CALL_ERRORS
from lmfit_gpu.preparation import Data, Setup, has_network, is_module, is_warm, prepare, targets_of
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.progress import followed
from lmfit_gpu.result import Result
from lmfit_gpu.rows import as_tensor, total_sum
from lmfit_gpu.sandwich import jacobian_at, sandwiched
from lmfit_gpu.starts import find_start, seed_of
from lmfit_gpu.termination import OF_NETWORKS
from lmfit_gpu.threads import at_most

__all__ = ["problem_of", "run"]

# A network that has fitted the signal goes on to the noise, a little in each of thousands of trials.
LEAST_PROGRESS = (30, 1e-2)
# Below, a second thread made fits slower (two cores, 16,000 rows: 0.56 s and 0.62 s at 101 parameters).
MANY_NUMBERS = 1.5e6
SMALL_MATRIX = 500
SHORT = 0.01  # of the norm of the residuals: a few trials more
MUCH_WORK = 1e8  # multiplications of one reduction: some hundredths of a second


def run(options: Any, data: Data, keep: Callable[[Setup, Result, Data], None]) -> Result:
    """Fit.

    Parameters
    ----------
    options : LMRegressor
        Checked.
    data : Data
        Checked.
    keep : callable (setup, result, data)
        Called with the fit and the rows that were fitted; with the best point when the fit is interrupted, or the model
        or the callback fails, before that error goes on.

    Raises
    ------
    ValueError, TypeError
        If an option does not fit the data, or the model cannot be evaluated at the start.
    KeyboardInterrupt, what the callback raised, or the model while it was linearised
    """
    tiny = attempt(options, data)
    if tiny is not None:
        result = _guarded(options, data, tiny.setup, tiny.minimize, keep)
        if result is not None:
            return result
    damping = damping_policy(options.damping)
    stopping = resolve_early_stopping(options.early_stopping)
    data, held = (data, None) if stopping is None else _split(data, stopping, options.random_state)
    setup = prepare(options, data)
    problem = problem_of(options, setup)
    engine = LevenbergMarquardt(
        jac=options.jac,
        solver=_solver(options, problem),
        backend=options.backend,
        damping=_careful(options, setup, problem, damping),
        tolerances=(_ftol(options, setup), options.xtol, options.gtol),
        max_iter=options.max_iter,
        within_reach=has_network(options) or setup.penalty is not None,
        least_progress=LEAST_PROGRESS if has_network(options) and isinstance(options.ftol, str) else None,
    )
    if problem.n_residuals == 1 and problem.n_params > 1 and setup.model.is_residual:
        raise ValueError(
            f"residual: returned 1 value for {problem.n_params} parameters; a vector of residuals is expected, "
            "not their sum or mean (squares are taken here)"
        )
    held_out = None if stopping is None or held is None else _held_out(options, problem, setup, (held, stopping))
    minimize = functools.partial(_minimized, options, setup, engine, problem, held_out)
    with _threads(options, problem):
        return cast(Result, _guarded(options, data, setup, minimize, keep))


def _threads(options: Any, problem: LeastSquaresProblem) -> AbstractContextManager[None]:
    """Return a context with no more threads than help. A function may want many for itself: it keeps them."""
    if not is_module(options):
        return nullcontext()
    few_numbers = problem.n_equations * problem.n_params < MANY_NUMBERS
    return at_most(1 if few_numbers else None, 1 if problem.n_params <= SMALL_MATRIX else None)


def _solver(options: Any, problem: LeastSquaresProblem) -> str:
    """Return the solver; for the default network on many rows cholesky, half the work of qr for digits of no use."""
    automatic = options.solver == "auto" and has_network(options) and problem.n_params <= MANY_PARAMS
    return "cholesky" if automatic and problem.n_equations * problem.n_params**2 > MUCH_WORK else options.solver


def _careful(options: Any, setup: Setup, problem: LeastSquaresProblem, damping: DampingPolicy) -> DampingPolicy:
    """Return the policy; in the usual one a penalised network begins with short steps.

    Zero weights minimise the penalty, and are a minimum of the cost with more than one hidden layer: the usual first
    step, as long as the weights themselves, may end there.
    """
    usual = isinstance(options.damping, str) and options.damping == "trust-region"
    if not (usual and has_network(options) and setup.penalty is not None):
        return damping
    radius = SHORT * (2 * problem.cost(setup.theta)) ** 0.5
    return TrustRegion(radius=radius) if 0 < radius < np.inf else damping


def _ftol(options: Any, setup: Setup) -> Any:
    """Return the limit of the cost test; the default network is not followed into the rounding of its cost."""
    automatic = isinstance(options.ftol, str) and has_network(options)
    return OF_NETWORKS[setup.theta.dtype] if automatic else options.ftol


def _split(data: Data, stopping: EarlyStopping, random_state: Any) -> tuple[Data, Data]:
    """Return the rows to fit and the rows to hold out."""
    fitted, held = split_rows(len(data.X), stopping.fraction, random_state)
    return data.some(fitted), data.some(held)


def _held_out(
    options: Any, problem: LeastSquaresProblem, setup: Setup, held_out: tuple[Data, EarlyStopping]
) -> HeldOut:
    held, stopping = held_out
    rows = replace(setup.rows, X=as_tensor(held.X), y=targets_of(held.y), weights=held.weights)
    others = problem_of(options, replace(setup, rows=rows, penalty=None))
    if problem.coupled or others.coupled:
        raise ValueError("early_stopping: the model couples rows; none can be held out")
    return HeldOut(others.cost, stopping.patience, len(held.X), others.close)


def problem_of(options: Any, setup: Setup, plain: bool = False) -> LeastSquaresProblem:
    """Return the problem of a fit; `plain`: without its loss.

    Parameters
    ----------
    options : LMRegressor
    setup : Setup
        With rows; the row check is made at its theta.
    plain : bool
    """
    return LeastSquaresProblem(
        setup.model,
        setup.rows,
        setup.theta,
        devices=setup.devices,
        chunk_rows=options.chunk_rows,
        bounds=setup.bounds,
        loss=None if plain else resolve_loss(options.loss, options.f_scale),
        penalty=setup.penalty,
    )


def _minimized(
    options: Any, setup: Setup, engine: LevenbergMarquardt, problem: LeastSquaresProblem, held_out: HeldOut | None
) -> Result:
    """Return the fit with the covariance that is asked for."""
    result = _searched(options, engine, problem, setup.theta, held_out)
    if result.factor is None or not np.isfinite(result.theta).all() or not result.rank:
        return result
    if options.covariance == "classical" and (problem.loss is None or options._errors_of_surrogate):
        return result
    theta = torch.from_numpy(result.theta).to(setup.theta)
    plain = None
    try:
        plain = problem_of(options, replace(setup, theta=theta), plain=True)
        jacobian = jacobian_at(plain, options.jac, theta)
        return sandwiched(result, plain, jacobian, problem.loss, options.covariance)
    except CALL_ERRORS as error:
        reason = f"covariance={options.covariance!r}: the Jacobian at the solution failed: {error}"
        nothing = np.full((result.rank, result.rank), np.nan)
        return replace(result, sandwich=nothing, used={**result.used, "no covariance": reason})
    except BaseException as interrupt:
        interrupt.result = result  # type: ignore[attr-defined]
        raise
    finally:
        if plain is not None:
            plain.close()


def _searched(
    options: Any,
    engine: LevenbergMarquardt,
    problem: LeastSquaresProblem,
    theta: torch.Tensor,
    held_out: HeldOut | None,
) -> Result:
    """Return the fit from theta, or with ``p0="auto"`` from the best start that a search from theta finds."""
    used: dict[str, Any] = {}
    search = None
    if held_out is not None:
        used["held out"] = f"{held_out.n_rows} rows, patience {held_out.patience}"
    if isinstance(options.p0, str) and not is_warm(options):  # "auto"
        theta, search = find_start(problem, theta, engine, seed=seed_of(options.random_state))
        used["start"] = str(search)
    minimize = functools.partial(engine.minimize, problem, theta, held_out=held_out)
    try:
        result = followed(minimize, options.callback, options.verbose, options.max_iter)
    except BaseException as interrupt:
        if search is not None and not hasattr(interrupt, "result"):  # not linearised yet: the search has the end
            interrupt.result = search.end  # type: ignore[attr-defined]
        raise
    return replace(result, used=result.used | used)


def _guarded(
    options: Any,
    data: Data,
    setup: Setup,
    minimize: Callable[[], Result | None],
    keep: Callable[[Setup, Result, Data], None],
) -> Result | None:
    """Return what `minimize` returns, told in full, and keep it; keep the best point when it is interrupted."""
    try:
        result = minimize()
    except BaseException as interrupt:
        if hasattr(interrupt, "result"):  # Ctrl-C, or an error of the model or the callback
            keep(setup, _told(options, data, setup, interrupt.result), data)
        raise
    if result is None:
        return None
    result = _told(options, data, setup, result)
    keep(setup, result, data)
    return result


def _told(options: Any, data: Data, setup: Setup, result: Result) -> Result:
    """Return the result of the engine as one of all parameters, with the options that it does not know."""
    loss = options.loss if isinstance(options.loss, str) else getattr(options.loss, "__name__", "callable")
    used = {**result.used, "loss": loss if loss == "linear" else f"{loss}, f_scale {options.f_scale:g}"}
    weights = data.weights
    if weights is not None and weights.sigma is not None:
        used["sigma"] = "absolute" if options.absolute_sigma else "relative"
    if weights is not None and weights.frequency is not None:
        used["sample_weight"] = f"frequencies, their sum {float(weights.frequency.sum()):g}"
    if data.n_left_out:
        used["rows left out"] = data.n_left_out
    sums: dict[str, Any] = {}
    if data.y is not None and not setup.model.is_residual:
        y = as_tensor(data.y)
        sums = {"total_sum": total_sum(y, weights)}
    if weights is not None:
        sums["log_sigma"] = weights.log_sigma(result.n_residuals)
        if weights.sigma is not None:
            low, high = (float(end) for end in torch.aminmax(weights.sigma))
            sums["common_sigma"] = low if low == high else float("nan")
    result = replace(result, absolute_sigma=bool(options.absolute_sigma), used=used, **sums)
    return result if setup.constraints is None else of_all_parameters(result, setup.constraints)
