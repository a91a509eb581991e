"""What the rows of the next batch say of the last step.

With c_i the cost of row i before and after the step, the sum of the falls d_i over rows that the step was not made for
is an unbiased estimate of what it has gained, with the standard error s_d √N. The model of the batch and the batch
itself are not: a step that fits few rows exactly gains on them whatever it does to others.

==================  =========================================  ====================================
fall < −2 s_d √N    worse by more than chance                  undone, and the next step is shorter
fall > s_d √N       better by more than chance                 as its own rows say: it may be longer
else                nothing is certain                         as long as it was
==================  =========================================  ====================================

How much less is gained than was predicted does not count: with fewer residuals than parameters the gain on other rows
is a small share of that on the own ones however short the step, and a rule for that share ends with no step at all
(digits, batches of 128: the radius fell to 1e-6 within two passes).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from lmfit_gpu.damping import DampingPolicy, rescaled
from lmfit_gpu.linear import Step
from lmfit_gpu.optim.batch import BatchProblem
from lmfit_gpu.optim.memory import Memory

__all__ = ["SAME_ROWS", "Judgement", "judged"]

SAME_ROWS = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative difference of the costs of the same rows in any order
FAILED = 2.0  # standard errors of a rise that is beyond chance: at 1, one harmless step in six would be undone
GAINED = 1.0  # standard errors of a fall that lets steps grow
HALF = 0.5  # of the radius; noise decides often, so it is not MINPACK's fraction


@dataclass(frozen=True)
class Judgement:
    """Where to go on from, what is remembered, and whether the rows are those of the last step.

    Parameters
    ----------
    theta : Tensor, shape (n_params,)
        The point before the last step where that has failed.
    memory : Memory
    same_rows : bool
    noise : float
        Standard error over |mean| of the fall; NaN where nothing was judged.
    """

    theta: torch.Tensor
    memory: Memory
    same_rows: bool
    noise: float = float("nan")


def shorter(policy: DampingPolicy, state: Any, step: Step) -> Any:
    """Return the state of a policy for a shorter step: half the radius, or one more factor on λ."""
    changed = rescaled(state, HALF)
    return policy.reject(state, step) if changed is state else changed


def judged(problem: BatchProblem, theta: torch.Tensor, memory: Memory, policy: DampingPolicy) -> Judgement:
    """Judge the last step on the rows of a problem, at one forward pass, two where they are other rows.

    Parameters
    ----------
    problem : BatchProblem
    theta : Tensor, shape (n_params,)
        Where the last step ended.
    memory : Memory
    policy : DampingPolicy
    """
    after, count, known = problem.row_costs(theta), problem.n_counted, memory.cost or 0.0
    same = abs(float(after.sum() + problem.penalty_of(theta)) / count - known) <= SAME_ROWS[problem.dtype] * known
    last = memory.last
    if same or last is None:
        return Judgement(theta, memory, same)
    falls = problem.row_costs(last.theta) - after
    fall = float(falls.sum()) + problem.penalty_of(last.theta) - problem.penalty_of(theta)
    error = float(falls.std() * len(falls) ** 0.5) if len(falls) > 1 else math.inf
    step = last.step(count**0.5)
    before, scale = replace(memory, policy=last.policy).in_units_of(count)
    failed = fall < -FAILED * error
    if failed:
        state = shorter(policy, before, step)
    else:
        state = policy.accept(before, step, last.gain_ratio) if fall > GAINED * error else before
    displacement = None if failed else memory.displacement
    memory = replace(memory.with_units_of(count, state, scale), last=None, displacement=displacement)
    noise = error / abs(fall) if fall != 0 else math.inf
    return Judgement(last.theta if failed else theta, memory, False, noise)
