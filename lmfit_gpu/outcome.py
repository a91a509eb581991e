"""From the state in which a fit ends to its result: covariance, rank, and what "auto" options became."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from lmfit_gpu.linear import MANY_PARAMS
from lmfit_gpu.messages import explained, on_bounds
from lmfit_gpu.problem import Problem
from lmfit_gpu.result import IterationRecord, Result, Stop
from lmfit_gpu.state import State

__all__ = ["result_of"]


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
    covariance, rank, undetermined = _covariance(problem, state)
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
        covariance=None if covariance is None else covariance.numpy(),
        rank=rank,
        undetermined=undetermined,
        roles=roles,
        penalty=0.0 if penalty is None else 0.5 * float((penalty.residual(state.theta).double() ** 2).sum()),
        shrinkage=0.0 if penalty is None or covariance is None else penalty.shrinkage(covariance, state.theta.cpu()),
    )


def _covariance(problem: Problem, state: State) -> tuple[torch.Tensor | None, int, np.ndarray]:
    """Return (JᵀJ)⁻¹, rank and undetermined mask; without a dense matrix None, and full rank taken for granted."""
    n = problem.n_params
    if not state.lin.finite:
        nothing = torch.full((n, n), torch.nan, dtype=torch.float64)
        return nothing if n <= MANY_PARAMS else None, 0, np.ones(n, dtype=bool)
    found = state.lin.covariance()
    if found is None:
        return None, min(n, problem.n_residuals), np.zeros(n, dtype=bool)
    covariance, rank, undetermined = found
    return covariance, rank, undetermined.numpy()
