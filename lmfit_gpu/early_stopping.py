"""Early stopping: rows that take no part in the fit say when to end it, and where.

A flexible model goes on to lower its cost after it has begun to fit the noise; the cost of rows that it has not seen
rises then (Prechelt, "Early stopping, but when?" (1998), doi:10.1007/3-540-49430-8_3). The point of their least cost is
the one that is kept.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_random_state

from lmfit_gpu.exceptions import NonFiniteError
from lmfit_gpu.models import CALL_ERRORS
from lmfit_gpu.result import Status, Stop
from lmfit_gpu.state import State

__all__ = ["EarlyStopping", "HeldOut", "Watch", "resolve_early_stopping", "split_rows"]


@dataclass(frozen=True)
class EarlyStopping:
    """Which share of the rows is held out, and how long their cost may fail to fall.

    Parameters
    ----------
    fraction : float
        Between 0 and 1; at least one row is held out, and one is not.
    patience : int
        The fit stops after so many accepted trials without a lower cost of the held-out rows.
    """

    fraction: float = 0.1
    patience: int = 10


def resolve_early_stopping(early_stopping: Any) -> EarlyStopping | None:
    """Return what the argument of that name means; True is the default share and patience."""
    if early_stopping is None:
        return None
    if isinstance(early_stopping, (bool, np.bool_)):  # from a grid, numpy's
        return EarlyStopping() if early_stopping else None
    return early_stopping


def split_rows(n_rows: int, fraction: float, random_state: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows to fit and those to hold out, each in ascending order.

    Raises
    ------
    ValueError
        If there are not two rows.
    """
    if n_rows < 2:
        raise ValueError(f"early_stopping: got {n_rows} row; at least one to fit and one to hold out are expected")
    n_held = min(max(1, round(fraction * n_rows)), n_rows - 1)
    order = torch.from_numpy(check_random_state(random_state).permutation(n_rows))
    return order[n_held:].sort().values, order[:n_held].sort().values


@dataclass(frozen=True)
class HeldOut:
    """The cost of the held-out rows.

    Parameters
    ----------
    cost : callable (theta) -> float
    patience : int
    n_rows : int
    close : callable ()
        Called at the end of the fit.
    """

    cost: Callable[[torch.Tensor], float]
    patience: int
    n_rows: int = 0
    close: Callable[[], None] = lambda: None

    def watch(self, state: State) -> "Watch":
        """Return the watch at the start of a fit."""
        cost = self.cost(state.theta)
        if not math.isfinite(cost):
            raise NonFiniteError("early_stopping: residuals of the held-out rows are not finite at the start p0")
        return Watch(self, state, cost, cost)


@dataclass(frozen=True)
class Watch:
    """The state with the least cost of the held-out rows so far; immutable.

    Parameters
    ----------
    held_out : HeldOut
    best : State
    least : float
        Their cost there.
    last : float
        Their cost at the last accepted point.
    n_waited : int
        Accepted trials since.
    """

    held_out: HeldOut
    best: State
    least: float
    last: float
    n_waited: int = 0

    def after(self, state: State) -> tuple[State, "Watch"]:
        """Return the state after a trial with the held-out cost in its record, stopped if it is time; and the watch."""
        if state.record is None or not state.record.accepted:
            return _with_cost(state, self.last), self
        try:
            cost = self.held_out.cost(state.theta)
        except CALL_ERRORS:  # the model refuses these rows there
            cost = math.inf
        state = _with_cost(state, cost)
        if cost < self.least:
            return state, replace(self, best=state, least=cost, last=cost, n_waited=0)
        watch = replace(self, last=cost, n_waited=self.n_waited + 1)
        if state.stop is None and watch.n_waited >= self.held_out.patience:
            state = replace(state, stop=watch._stop())
        return state, watch

    def restored(self, state: State) -> State:
        """Return the state to keep of a fit that ended in `state`: a stop that is not at the best point is no success.

        Counts are those of the whole fit.
        """
        if torch.equal(self.best.theta, state.theta):
            return state
        stop = self._stop() if state.stop is None or state.stop.status > 0 else state.stop
        nfev = state.evaluations - self.best.jacobian.nfev
        return replace(self.best, stop=stop, n_iter=state.n_iter, nfev=nfev, njev=state.njev, refusal=state.refusal)

    def _stop(self) -> Stop:
        return Stop(Status.STOPPED_EARLY, self.least, float("inf"), note=f"at iteration {self.best.n_iter}")


def _with_cost(state: State, cost: float) -> State:
    return state if state.record is None else replace(state, record=replace(state.record, held_out_cost=cost))
