r"""Globalisation: how far the linear model is trusted.

Four policies with one interface; states are immutable.

===================  =====================================================  =====================================
policy               controls                                               source
===================  =====================================================  =====================================
TrustRegion          radius Δ of ‖D p‖; λ from the secular equation          Moré (1978), doi:10.1007/BFb0067700
NielsenDamping       λ by a smooth function of the gain ratio               Nielsen, IMM-REP-1999-05 (1999)
MarquardtDamping     λ times a factor up or down                            Marquardt (1963), doi:10.1137/0111030
ProximalDamping      h = 1/λ, a time step of the gradient flow              Kelley and Keyes (1998),
                                                                            doi:10.1137/S0036142996304796
===================  =====================================================  =====================================

How a linearisation finds the step within a radius is its own affair: direct solvers by the secular equation
:math:`\|D p(\lambda)\| = \Delta`, cg by truncation (:meth:`lmfit_gpu.linear.Linearization.within`).

D is by default the running maximum of the column norms of J: invariant under a change of units, and it cannot
forget a direction that was once steep. A column that has been zero so far carries ‖r₀‖ as a placeholder, which
its first non-zero norm replaces.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from lmfit_gpu.linear import Linearization, Step

__all__ = [
    "DampingPolicy",
    "MarquardtDamping",
    "NielsenDamping",
    "ProximalDamping",
    "Scale",
    "TrustRegion",
    "damping_policy",
    "rescaled",
    "updated_scale",
]

SHRINK_BELOW, GROW_ABOVE = 0.25, 0.75  # MINPACK lmder
SHRINK = 0.15  # with grow = 3 the best of twelve rules on starts near the six hardest of NIST's
FIRST_RADIUS_SHARE = 1e-3
DAMPING_RANGE = (1e-20, 1e20)  # beyond, p is the Gauss-Newton step or zero to rounding


class DampingPolicy(Protocol):
    """Chooses λ from what earlier trials taught."""

    @property
    def scaling(self) -> Any:
        """Which D."""
        ...

    @property
    def accelerate(self) -> str | bool:
        """Whether steps are corrected along the geodesic."""
        ...

    @property
    def attempts(self) -> int | None:
        """Rejections in a row that end a fit; None: no limit."""
        ...

    def start(self, lin: Linearization, theta: torch.Tensor) -> Any:
        """Return the first state."""
        ...

    def propose(self, lin: Linearization, state: Any) -> tuple[Step, Any]:
        """Return the step to try, and the state with what was learnt in finding it."""
        ...

    def accept(self, state: Any, step: Step, gain_ratio: float) -> Any:
        """Return the state after a trial that lowered the cost."""
        ...

    def reject(self, state: Any, step: Step) -> Any:
        """Return the state after a trial that did not."""
        ...


@dataclass(frozen=True)
class Region:
    """State of :class:`TrustRegion`: radius of ‖D p‖ in units of the residual, and the last λ."""

    radius: float
    damping: float = 0.0


@dataclass(frozen=True)
class TrustRegion:
    """Keep ‖D p‖ within a radius that follows the agreement of model and cost.

    Parameters
    ----------
    radius : float, optional
        First radius, in units of the residual. Default: max(‖D θ₀‖, 1e-3 ‖r₀‖), and ‖r₀‖ when θ₀ = 0.
    grow : float, default 3.0
        Radius over ‖D p‖ after a very good step.
    shrink : float, default 0.15
        Radius over ‖D p‖ after a poor or rejected one.
    scaling : {"jacobian", "identity", "diagonal"} or array of shape (n_params,)
        D: running maximum of the column norms, ones, current column norms, or given.
    accelerate : bool or "auto"
        Second-order correction along the geodesic (:mod:`lmfit_gpu.acceleration`).
    """

    radius: float | None = None
    grow: float = 3.0
    scaling: Any = "jacobian"
    accelerate: str | bool = "auto"
    shrink: float = SHRINK
    attempts = None

    def __post_init__(self) -> None:
        """Check the parameters."""
        if self.radius is not None and not self.radius > 0:
            raise ValueError(f"radius: got {self.radius!r}; a positive number or None is expected")
        if not (isinstance(self.accelerate, bool) or self.accelerate == "auto"):
            raise ValueError(f"accelerate: got {self.accelerate!r}; True, False or 'auto' is expected")
        if not self.grow > 1:
            raise ValueError(f"grow: got {self.grow!r}; a number > 1 is expected")
        if not 0 < self.shrink < 1:
            raise ValueError(f"shrink: got {self.shrink!r}; a number between 0 and 1 is expected")

    def start(self, lin: Linearization, theta: torch.Tensor) -> Region:
        """Return the first region."""
        if self.radius is not None:
            return Region(self.radius)
        size = float(torch.linalg.vector_norm(lin.scale * theta.double()))
        return Region(max(size, FIRST_RADIUS_SHARE * lin.residual_norm) if size > 0 else lin.residual_norm)

    def propose(self, lin: Linearization, state: Region) -> tuple[Step, Region]:
        """Return the step of length Δ, or the Gauss-Newton step when it is shorter."""
        step = lin.within(state.radius, state.damping)
        return step, replace(state, damping=step.damping)

    def accept(self, state: Region, step: Step, gain_ratio: float) -> Region:
        """Shrink after a poor step, grow after a very good one."""
        if gain_ratio < SHRINK_BELOW:
            return self.reject(state, step)
        if gain_ratio > GROW_ABOVE or step.damping == 0:
            return replace(state, radius=max(state.radius, self.grow * step.scaled_norm))
        return state

    def reject(self, state: Region, step: Step) -> Region:
        """Shrink the radius to a fraction of the step."""
        length = min(state.radius, step.scaled_norm) if step.valid and step.scaled_norm > 0 else state.radius
        return Region(self.shrink * length, state.damping / self.shrink)


@dataclass(frozen=True)
class Lambda:
    """State of the λ schedules: λ and the factor that the next rejection applies."""

    damping: float
    factor: float


@dataclass(frozen=True)
class NielsenDamping:
    """Follow the gain ratio smoothly: λ ← λ max(1/3, 1 − (2ρ − 1)³); λ ← λν, ν ← 2ν after a rejection.

    Parameters
    ----------
    start_damping : float, default 1e-3
        First λ; relative to 1, the largest diagonal entry of D⁻¹JᵀJD⁻¹.
    scaling, accelerate
        As in :class:`TrustRegion`.
    """

    start_damping: float = 1e-3
    scaling: Any = "jacobian"
    accelerate: str | bool = False
    attempts = None

    def __post_init__(self) -> None:
        """Check the parameters."""
        if not self.start_damping > 0:
            raise ValueError(f"start_damping: got {self.start_damping!r}; a positive number is expected")

    def start(self, lin: Linearization, theta: torch.Tensor) -> Lambda:
        """Return the first λ."""
        return Lambda(self.start_damping, 2.0)

    def propose(self, lin: Linearization, state: Lambda) -> tuple[Step, Lambda]:
        """Return the step for λ."""
        return lin.solve(max(state.damping, lin.least_damping)), state

    def accept(self, state: Lambda, step: Step, gain_ratio: float) -> Lambda:
        """Lower λ after a good step, raise it after a poor one."""
        return Lambda(_bounded(state.damping * max(1 / 3, 1 - (2 * gain_ratio - 1) ** 3)), 2.0)

    def reject(self, state: Lambda, step: Step) -> Lambda:
        """Raise λ, faster each time."""
        return Lambda(_bounded(state.damping * state.factor), 2 * state.factor)


@dataclass(frozen=True)
class MarquardtDamping:
    """Multiply λ by `down` after a success and by `up` after a failure.

    Parameters
    ----------
    start_damping : float, default 1e-3
    up, down : float, default 10 and 0.1
    attempts : int, optional
        Rejections in a row after which the fit stops; default: no limit but the step's size.
    scaling, accelerate
        As in :class:`TrustRegion`.
    """

    start_damping: float = 1e-3
    up: float = 10.0
    down: float = 0.1
    attempts: int | None = None
    scaling: Any = "jacobian"
    accelerate: str | bool = False

    def __post_init__(self) -> None:
        """Check the parameters."""
        if not (self.start_damping > 0 and self.up > 1 and 0 < self.down < 1):
            raise ValueError(
                f"MarquardtDamping: got start_damping={self.start_damping!r}, up={self.up!r}, down={self.down!r}; "
                "start_damping > 0, up > 1 and 0 < down < 1 are expected"
            )

    def start(self, lin: Linearization, theta: torch.Tensor) -> Lambda:
        """Return the first λ."""
        return Lambda(self.start_damping, self.up)

    def propose(self, lin: Linearization, state: Lambda) -> tuple[Step, Lambda]:
        """Return the step for λ."""
        return lin.solve(max(state.damping, lin.least_damping)), state

    def accept(self, state: Lambda, step: Step, gain_ratio: float) -> Lambda:
        """Lower λ."""
        return replace(state, damping=_bounded(state.damping * self.down))

    def reject(self, state: Lambda, step: Step) -> Lambda:
        """Raise λ."""
        return replace(state, damping=_bounded(state.damping * self.up))


@dataclass(frozen=True)
class ProximalDamping:
    r"""Take implicit Euler steps, of length h, of the gradient flow :math:`D^2 \dot\theta = -\nabla\,\text{cost}`.

    An implicit step is the proximal point :math:`\theta^+ = \arg\min\ \text{cost}(\theta) + \frac{1}{2h} \|D
    (\theta - \theta_k)\|^2`, which is stable for any h where the flow is stiff, as that of a network in a differential
    equation is. With r linearised at :math:`\theta_k` it is the damped step with λ = 1/h. As h grows, it goes over from
    gradient descent to Gauss-Newton (pseudo-transient continuation).

    In two things it is not :class:`MarquardtDamping`: D is the identity, so that the steps follow the path of steepest
    descent in θ itself, not one in units of the columns of J; and h changes by how well a step was predicted, not by
    whether it was accepted: one predicted neither well nor badly leaves it as it is.

    The cost in the flow is ½‖r‖² for a fit; in :class:`lmfit_gpu.LMA` it is that divided by the number of residuals (of
    rows of a likelihood), so that h means the same for every batch size.

    Parameters
    ----------
    step_size : float, default 1.0
        First h.
    grow, shrink : float, default 3.0 and 0.3
        Factors of h after a gain ratio above 0.75, and below 0.25 or a rejection.
    scaling, accelerate
        As in :class:`TrustRegion`; scaling="identity" is the flow of steepest descent.

    References
    ----------
    Kelley and Keyes (1998), doi:10.1137/S0036142996304796: pseudo-transient continuation. Rockafellar (1976),
    doi:10.1137/0314056: the proximal point algorithm. Li, Chen and Huang (2023), arXiv:2303.01767: implicit steps for
    physics-informed networks.
    """

    step_size: float = 1.0
    grow: float = 3.0
    shrink: float = 0.3
    scaling: Any = "identity"
    accelerate: str | bool = False
    attempts = None

    def __post_init__(self) -> None:
        """Check the parameters."""
        if not (self.step_size > 0 and self.grow > 1 and 0 < self.shrink < 1):
            raise ValueError(
                f"ProximalDamping: got step_size={self.step_size!r}, grow={self.grow!r}, shrink={self.shrink!r}; "
                "step_size > 0, grow > 1 and 0 < shrink < 1 are expected"
            )

    def start(self, lin: Linearization, theta: torch.Tensor) -> Lambda:
        """Return the first 1/h."""
        return Lambda(1 / self.step_size, 1 / self.shrink)

    def propose(self, lin: Linearization, state: Lambda) -> tuple[Step, Lambda]:
        """Return the proximal step of the linearised cost."""
        return lin.solve(max(state.damping, lin.least_damping)), state

    def accept(self, state: Lambda, step: Step, gain_ratio: float) -> Lambda:
        """Lengthen h after a step that was predicted well, shorten it after one that was not."""
        if gain_ratio < SHRINK_BELOW:
            return self.reject(state, step)
        return replace(state, damping=_bounded(state.damping / self.grow)) if gain_ratio > GROW_ABOVE else state

    def reject(self, state: Lambda, step: Step) -> Lambda:
        """Shorten h."""
        return replace(state, damping=_bounded(state.damping / self.shrink))


def _bounded(damping: float) -> float:
    return min(max(damping, DAMPING_RANGE[0]), DAMPING_RANGE[1])


POLICIES: dict[str, DampingPolicy] = {
    "trust-region": TrustRegion(),
    "nielsen": NielsenDamping(),
    "marquardt": MarquardtDamping(),
    "lema": MarquardtDamping(attempts=10, scaling="diagonal"),  # LeMA: 1e-3, ×0.1, ×10, ten attempts
    "proximal": ProximalDamping(),
}


def damping_policy(damping: str | DampingPolicy) -> DampingPolicy:
    """Return a policy from its name, or itself.

    Raises
    ------
    ValueError
        For a name that is not a policy.
    TypeError
        For an object without the policy's methods.
    """
    if isinstance(damping, str):
        if damping not in POLICIES:
            raise ValueError(
                f"damping: got {damping!r}; allowed are {', '.join(map(repr, POLICIES))} or a policy object"
            )
        return POLICIES[damping]
    if not all(callable(getattr(damping, verb, None)) for verb in ("start", "propose", "accept", "reject")):
        raise TypeError(f"damping: got {damping!r}; a name or an object with start, propose, accept and reject")
    return damping


@dataclass(frozen=True)
class Scale:
    """D and which of its entries are still placeholders."""

    d: torch.Tensor
    placeholder: torch.Tensor


def updated_scale(
    scaling: Any,
    lin: Linearization,
    previous: Scale | None,
    decay: float = 1.0,
    norms: torch.Tensor | None = None,
) -> Scale:
    """Return D for a linearisation.

    Parameters
    ----------
    scaling : {"jacobian", "identity", "diagonal"} or array of shape (n_params,)
    lin : Linearization
    previous : Scale or None
        D of the point before; None at the start.
    decay : float
        What is left of it: below 1 the running maximum forgets, as one over batches of rows must.
    norms : Tensor, optional
        What D follows in place of the column norms: one number for each tensor of parameters.

    Raises
    ------
    ValueError
        For another name, or an array that is not n_params positive numbers.
    """
    norms = lin.column_norms if norms is None else norms
    if not isinstance(scaling, str):
        return _given_scale(scaling, norms)
    if scaling == "identity":
        return Scale(torch.ones_like(norms), torch.zeros_like(norms, dtype=torch.bool))
    if scaling not in ("jacobian", "diagonal"):
        raise ValueError(f"scaling: got {scaling!r}; allowed are 'jacobian', 'identity', 'diagonal' or an array")
    zero = norms == 0
    fallback = lin.residual_norm if lin.residual_norm > 0 else 1.0
    current = torch.where(zero, torch.full_like(norms, fallback), norms)
    if previous is None:
        return Scale(current, zero)
    if scaling == "diagonal":
        return Scale(torch.where(zero, previous.d, norms), zero)
    kept = torch.where(previous.placeholder, current, torch.maximum(decay * previous.d, norms))
    return Scale(torch.where(previous.placeholder & zero, previous.d, kept), previous.placeholder & zero)


def rescaled(state: Any, factor: float) -> Any:
    """Return the state of a policy for residuals that are `factor` times as long: a radius is, λ has no unit."""
    return replace(state, radius=state.radius * factor) if isinstance(state, Region) else state


def _given_scale(scaling: Any, norms: torch.Tensor) -> Scale:
    d = torch.as_tensor(scaling, dtype=torch.float64, device=norms.device)
    if d.shape != norms.shape or not bool(torch.all((d > 0) & torch.isfinite(d))):
        raise ValueError(f"scaling: an array must hold {norms.numel()} positive numbers, got {scaling!r}")
    return Scale(d, torch.zeros_like(norms, dtype=torch.bool))
