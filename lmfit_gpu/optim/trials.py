"""The trials of one step: whether any is needed, and damped steps until one lowers the cost."""

from dataclasses import dataclass, replace

import torch

from lmfit_gpu.damping import DampingPolicy
from lmfit_gpu.levenberg_marquardt import LevenbergMarquardt
from lmfit_gpu.optim.batch import BatchProblem
from lmfit_gpu.optim.memory import Memory
from lmfit_gpu.optim.policies import Carried
from lmfit_gpu.result import Status, Stop
from lmfit_gpu.state import State
from lmfit_gpu.termination import OF_NETWORKS, Tolerances, check, rounding_of_residual
from lmfit_gpu.trial import Trial, attempted

__all__ = ["Trials"]

NEAR = 1e-3  # relative fall of the cost in the last step below which stop tests are made


@dataclass(frozen=True)
class Trials:
    """How a step is tried.

    Parameters
    ----------
    engine : LevenbergMarquardt
    share : float
        Of the damped step that is tried.
    momentum : float
        Share of the last displacement that is added to the first trial.
    attempts : int
        Most trials, where the policy does not say.
    """

    engine: LevenbergMarquardt
    share: float
    momentum: float
    attempts: int

    def tested(self, problem: BatchProblem, state: State, memory: Memory, repeats: bool) -> Stop | None:
        """Return why no step is needed: tests are made where the last step has gained little, or there is no slope."""
        near = repeats and memory.fall < NEAR
        if not near and memory.cost is not None and state.lin.residual_norm > 0:
            return None
        flat = state.lin.has_gradient and not bool(state.lin.gradient.any())
        return self._checked(problem, state, near or flat)

    def _checked(self, problem: BatchProblem, state: State, is_near: bool) -> Stop | None:
        """Return the stop test that is met, or None; away from the end only that of a residual of zero is made."""
        undamped = self.engine.longest(state) if is_near else None
        rounding = rounding_of_residual(state.lin, state.theta, 0.0)
        tolerances = Tolerances.resolve(OF_NETWORKS[problem.dtype], "auto", "auto", problem.dtype)
        return check(state.lin, undamped, state.theta, rounding, tolerances, state.cost)

    def tried(
        self, problem: BatchProblem, state: State, displacement: torch.Tensor | None
    ) -> tuple[State, Trial | None, Stop | None]:
        """Return the state with the record of the last trial, the accepted trial or None, and why there is none."""
        policy: DampingPolicy = self.engine.damping
        attempts = policy.attempts or self.attempts
        for attempt in range(attempts):
            carried = Carried(policy, self.share, self.momentum, displacement if attempt == 0 else None)
            plain = self.share == 1.0 and carried.before is None
            state, trial = attempted(policy if plain else carried, problem, state)
            if trial.accepted:
                return replace(state, record=trial.record(state)), trial, None
            state = self.engine.after_rejection(problem, state, trial)
            if state.stop is not None:
                return state, None, self._checked(problem, state, is_near=True) or state.stop
        return state, None, Stop(Status.STALLED, trial.step.scaled_norm, float("inf"), f"{attempts} trials; last step")
