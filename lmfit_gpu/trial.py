"""One trial: propose a step, perhaps bend it, look at the cost there, and judge."""

from dataclasses import dataclass, replace

import torch

from lmfit_gpu.acceleration import accelerated, accelerates
from lmfit_gpu.damping import DampingPolicy
from lmfit_gpu.linear import Step
from lmfit_gpu.models import CALL_ERRORS
from lmfit_gpu.problem import Problem
from lmfit_gpu.result import IterationRecord
from lmfit_gpu.state import State
from lmfit_gpu.termination import gradient_cosine

__all__ = ["ACCEPT_RATIO", "Trial", "attempted"]

ACCEPT_RATIO = 1e-4  # MINPACK lmder


@dataclass(frozen=True)
class Trial:
    """A trial point and what became of it.

    Parameters
    ----------
    step : Step
        As proposed, before any correction.
    theta : Tensor, shape (n_params,)
        The trial point; where the fit stands when there is none.
    cost : float
        There; NaN where the step was invalid or the model refused the point.
    accepted, accelerated : bool
    """

    step: Step
    theta: torch.Tensor
    cost: float
    accepted: bool
    accelerated: bool = False

    def gain_ratio(self, cost: float) -> float:
        """Return the actual over the predicted fall of `cost`."""
        predicted = self.step.predicted_reduction
        return (cost - self.cost) / predicted if predicted > 0 else float("nan")

    def record(self, state: State) -> IterationRecord:
        """Return the record of the trial made from a state."""
        return IterationRecord(
            n_iter=state.n_iter + 1,
            cost=self.cost if self.accepted else state.cost,
            trial_cost=self.cost,
            gain_ratio=self.gain_ratio(state.cost),
            damping=self.step.damping,
            scaled_norm=self.step.scaled_norm,
            gradient_cosine=gradient_cosine(state.lin) if state.lin.has_gradient else float("nan"),
            accepted=self.accepted,
            accelerated=self.accelerated,
            jac=state.derivatives.name,
            predicted_reduction=self.step.predicted_reduction,
            n_inner=self.step.n_inner,
        )


def attempted(damping: DampingPolicy, problem: Problem, state: State) -> tuple[State, Trial]:
    """Return the state with what finding the step has taught and cost, and the trial.

    Parameters
    ----------
    damping : DampingPolicy
    problem : Problem
    state : State
        Its theta, cost and record stay: the caller moves it.
    """
    step, policy = damping.propose(state.lin, state.policy)
    state = replace(state, policy=policy)
    if not (step.valid and step.predicted_reduction > 0):
        return state, Trial(step, state.theta, float("nan"), accepted=False)
    gain_ratio = float("nan") if state.record is None else state.record.gain_ratio
    corrects = accelerates(damping, state.lin, state.jacobian, step, gain_ratio)
    correction = None
    theta = problem.moved(state.theta, step.p)
    try:
        correction = accelerated(state.lin, state.jacobian, step) if corrects else None
        if correction is not None and problem.leads_outside(state.theta, correction):
            correction = None
        theta = theta if correction is None else problem.moved(state.theta, correction)
        cost = problem.cost(theta)
    except CALL_ERRORS as error:  # the model refuses a trial point: not finite there
        cost = float("nan")
        state = replace(state, refusal=f"{type(error).__name__}: {error}")
    state = replace(state, nfev=state.nfev + 1)
    accepted = cost < state.cost - ACCEPT_RATIO * step.predicted_reduction  # also false for NaN
    return state, Trial(step, theta, cost, accepted, correction is not None)
