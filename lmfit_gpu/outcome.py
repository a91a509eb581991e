"""From the state in which a fit ends to its result: what the data determine, and what "auto" options became."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from lmfit_gpu.linear import MANY_PARAMS, Estimable
from lmfit_gpu.messages import explained, on_bounds
from lmfit_gpu.problem import Problem
from lmfit_gpu.result import IterationRecord, Result, Stop
from lmfit_gpu.state import State

__all__ = ["arithmetic_error", "result_of", "what_is_known"]

ROUNDINGS = 10  # of one entry of J, in float32: singular values below 1e-6 are not seen


def result_of(problem: Problem, state: State, history: Sequence[IterationRecord], engine: Mapping[str, Any]) -> Result:
    """Return the result of a fit.

    Parameters
    ----------
    problem : Problem
    state : State
        With its stop.
    history : sequence of IterationRecord
    engine : mapping
        Names of solver, backend and damping, for the report.
    """
    roles = on_bounds(problem, state.theta)
    bound = [f"{problem.names[j]} ({role})" for j, role in roles.items()]
    used: dict[str, Any] = {
        "jac": state.derivatives.name,
        **engine,
        "devices": [str(device) for device in problem.devices],
        "chunk_rows": None if problem.coupled else problem.chunk_rows,
        "rows": "coupled: evaluated all together" if problem.coupled else "independent",
    }
    if state.jacobian.n_repaired:
        used["not finite"] = f"{state.jacobian.n_repaired} derivatives at the end, taken by differences"
    penalty = problem.penalty
    return Result(
        theta=state.theta.detach().double().cpu().numpy().copy(),
        names=problem.names,
        cost=state.cost,
        stop=explained(cast(Stop, state.stop), state.refusal, bound),
        n_iter=state.n_iter,
        nfev=state.evaluations,
        njev=state.njev,
        n_residuals=problem.n_residuals,
        n_observed=problem.n_observed,
        history=history,
        used=used,
        roles=roles,
        penalty=0.0 if penalty is None else 0.5 * float((penalty.residual(state.theta).double() ** 2).sum()),
        **what_is_known(_estimable(problem, state), problem, state.theta),
    )


def what_is_known(found: Estimable | None, problem: Problem, theta: torch.Tensor) -> dict[str, Any]:
    """Return the entries of a result that say what the data determine.

    Parameters
    ----------
    found : Estimable or None
        None: no dense matrix; full rank is taken for granted.
    problem : Problem
    theta : Tensor, shape (n_params,)
    """
    n, nobody = problem.n_params, np.zeros(problem.n_params, dtype=bool)
    if found is None:
        rank = min(n, problem.n_residuals)
        empty = {"null": np.zeros((n, 0)), "units": np.ones(n), "condition": float("nan")}
        return {"factor": None, **empty, "rank": rank, "undetermined": nobody, "held": nobody}
    penalty = problem.penalty
    return {
        "factor": found.factor,
        "null": found.null,
        "units": found.units,
        "condition": found.condition,
        "rank": found.rank,
        "undetermined": found.undetermined,
        "held": found.held,
        "shrinkage": 0.0 if penalty is None else penalty.shrinkage(found.factor, theta.cpu()),
    }


def arithmetic_error(dtype: torch.dtype) -> float:
    """Return the relative error of the columns of a J that is computed in a dtype; 0 in float64, as solvers know it."""
    return 0.0 if dtype == torch.float64 else ROUNDINGS * torch.finfo(dtype).eps


def _estimable(problem: Problem, state: State) -> Estimable | None:
    n = problem.n_params
    if state.lin.finite:
        return state.lin.estimable(error=arithmetic_error(problem.dtype))
    if n > MANY_PARAMS:
        return None
    nothing = np.zeros((n, 0))
    return Estimable(nothing, nothing, np.ones(n), float("inf"), held=np.ones(n, dtype=bool))  # no error is known
