"""The damping of a training loop: from its arguments to a policy, and steps that are shortened or carry momentum."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from lmfit_gpu.damping import DampingPolicy, MarquardtDamping, TrustRegion, damping_policy
from lmfit_gpu.linear import Linearization, Step

__all__ = ["Carried", "resolve_policy"]

SHRINK = 0.5  # after 100 steps of 1-20-1 on sinc(10x) the loss is 2.5e-6 (mean of six), with the 0.15 of fits 7.9e-5
LEMA = {"damping_start": "start_damping", "damping_up": "up", "damping_down": "down"}


def resolve_policy(damping: Any, scaling: Any, given: dict[str, Any]) -> DampingPolicy:
    """Return the policy.

    Parameters
    ----------
    damping : str or DampingPolicy
        "auto": trust region, or "lema" where one of LeMA's keywords is given.
    scaling : optional
        D, in place of the policy's own.
    given : dict
        damping_start, damping_up, damping_down, each None where it was not given.

    Raises
    ------
    ValueError, TypeError
        For another name, or LeMA's keywords with a policy that has no such thing.
    """
    wanted = {LEMA[name]: value for name, value in given.items() if value is not None}
    if isinstance(damping, str) and damping == "auto":
        damping = "lema" if wanted else TrustRegion(shrink=SHRINK)
    policy: Any = damping_policy(damping)
    if wanted and not isinstance(policy, MarquardtDamping):
        name = next(name for name, value in given.items() if value is not None)
        raise ValueError(f"{name}: got {given[name]!r} with damping={damping!r}; only for 'lema' and 'marquardt'")
    if wanted:
        try:
            policy = replace(policy, **wanted)
        except (ValueError, TypeError) as error:
            raise ValueError(f"damping_start, damping_up, damping_down: got {given}; {error}") from error
    return policy if scaling is None else replace(policy, scaling=scaling)


@dataclass(frozen=True)
class Carried:
    """A policy whose step p becomes η p + β v: a share of it, and momentum.

    Parameters
    ----------
    policy : DampingPolicy
    share : float
        η, LeMA's learning rate.
    momentum : float
        β.
    before : Tensor, shape (n_params,), optional
        v, the last accepted displacement.
    """

    policy: DampingPolicy
    share: float = 1.0
    momentum: float = 0.0
    before: torch.Tensor | None = None

    @property
    def scaling(self) -> Any:
        """Which D."""
        return self.policy.scaling

    @property
    def accelerate(self) -> str | bool:
        """No: the correction belongs to the whole step."""
        return self.policy.accelerate if self.share == 1.0 and self.before is None else False

    @property
    def attempts(self) -> int | None:
        """Rejections in a row that end a step."""
        return self.policy.attempts

    def start(self, lin: Linearization, theta: torch.Tensor) -> Any:
        """Return the first state."""
        return self.policy.start(lin, theta)

    def propose(self, lin: Linearization, state: Any) -> tuple[Step, Any]:
        """Return η p + β v with its own predicted reduction; η p where that is not positive."""
        step, state = self.policy.propose(lin, state)
        if not step.valid:
            return step, state
        if self.share != 1.0:
            slope = -float(lin.gradient @ step.p.double())
            half_square = slope - step.predicted_reduction  # ½‖J p‖²
            gain = self.share * slope - self.share**2 * half_square
            step = replace(step, p=self.share * step.p, predicted_reduction=gain)  # its length stays: the radius is its
        if self.momentum == 0 or self.before is None:
            return step, state
        p = (step.p + self.momentum * self.before.to(step.p)).double()
        gain = -float(lin.gradient @ p) - 0.5 * float(p @ lin.product(p))
        return (replace(step, p=p, predicted_reduction=gain) if gain > 0 else step), state

    def accept(self, state: Any, step: Step, gain_ratio: float) -> Any:
        """Return the state after a trial that lowered the cost."""
        return self.policy.accept(state, step, gain_ratio)

    def reject(self, state: Any, step: Step) -> Any:
        """Return the state after a trial that did not."""
        return self.policy.reject(state, step)
