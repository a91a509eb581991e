r"""Steps within bounds: any linearisation, with its damped model minimised over a box.

At a feasible point θ the trial steps are those with ℓ − θ ≤ p ≤ u − θ, and for every λ

.. math:: p(\lambda) = \arg\min_{\ell-\theta \le p \le u-\theta}\; g^Tp + \tfrac12\|Jp\|^2 + \tfrac12\lambda\|Dp\|^2 .

This is the trust-region step of the bounded problem: ‖D p(λ)‖ falls from that of the bounded Gauss-Newton step to 0
and never exceeds ‖D⁻¹g_P‖/λ, with g_P the projected gradient (0 where a parameter lies on a bound and g pushes
outwards); so every policy, the secular equation and the stop tests work as without bounds. θ is stationary (Karush,
Kuhn, Tucker) exactly where g_P = 0.

The minimiser is characterised by its *face*: which parameters lie on which bound. On a face the rest solves an
unconstrained system, a linearisation with the columns of J on the face set to zero and r moved along them. Direct
solvers find the face by block principal pivoting, which ends for a positive definite model (Júdice and Pires, Comput.
Oper. Res. 21 (1994) 587, doi:10.1016/0305-0548(94)90106-6): all parameters on the wrong side change sides at once; one
at a time when that stops helping. cg searches along its truncated steps, bent at the bounds, from face to face
(Lin and Moré, SIAM J. Optim. 9 (1999) 1100, doi:10.1137/S1052623498345075).
"""

from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from lmfit_gpu.linear.base import EPSILON, FullLinearization, Step, no_step, secular_step, shortened
from lmfit_gpu.linear.covariance import Estimable

__all__ = ["BoundedLinearization"]

TRIES = 3  # exchanges of all wrong sides that may fail to lower their number (Júdice and Pires)
MOST_EXCHANGES = 50  # and 3 n more
ROUNDING = 16 * EPSILON  # relative: a multiplier or a violation as small as this has no sign
FACES = 20  # most faces cg visits for one step
SHORT = 0.1  # a region nearly used up: the rest is not worth another face
HALVINGS = 10
SUFFICIENT = 0.01  # share of the slope that a bent step must gain (Lin and Moré)


class BoundedLinearization:
    """A linearisation whose steps stay between gaps to the bounds.

    Parameters
    ----------
    inner : FullLinearization
        With D set.
    below, above : Tensor, shape (n,), float64
        ℓ − θ ≤ 0 and u − θ ≥ 0.
    """

    def __init__(self, inner: FullLinearization, below: torch.Tensor, above: torch.Tensor) -> None:
        self._inner, self._below, self._above = inner, below, above
        self.scale, self.column_norms, self.residual_norm = inner.scale, inner.column_norms, inner.residual_norm
        self.direct, self.accelerates, self.has_gradient = inner.direct, inner.accelerates, inner.has_gradient
        self.condition_limit, self.finite = inner.condition_limit, inner.finite
        self._full = inner.gradient
        outward = ((below == 0) & (self._full > 0)) | ((above == 0) & (self._full < 0))
        self.gradient = torch.where(outward, torch.zeros_like(self._full), self._full)
        self._start = torch.where(outward, torch.where(below == 0, -1, 1), 0)
        self._face = self._start
        self._faces: dict[bytes, FullLinearization] = {}

    @property
    def least_damping(self) -> float:
        """The least λ that the solver resolves."""
        return self._inner.least_damping

    def _gaps(self, face: torch.Tensor) -> torch.Tensor:
        """Return p on a face, 0 where it is free."""
        return torch.where(face < 0, self._below, torch.where(face > 0, self._above, torch.zeros_like(self._below)))

    def _on(self, face: torch.Tensor) -> FullLinearization:
        """Return the unconstrained linearisation on a face; the last two are kept, each of the size of J or JᵀJ."""
        if not bool(face.any()):
            return self._inner
        key = face.to(torch.int8).cpu().numpy().tobytes()
        if key not in self._faces:
            self._faces = dict(list(self._faces.items())[-1:])
            self._faces[key] = self._inner.restricted(face == 0, self._gaps(face))
        return self._faces[key]

    def _step(self, p: torch.Tensor, on_face: Step, moved: bool) -> Step:
        """Return a step that is not the free one: its norm, and its reduction by the whole model where r was moved."""
        norm = float(torch.linalg.vector_norm(self.scale * p))
        if not moved:
            return replace(on_face, p=p, scaled_norm=norm)
        gain = -float(self._full @ p) - 0.5 * float(p @ self._inner.product(p))
        return replace(on_face, p=p, scaled_norm=norm, predicted_reduction=gain)

    def _pivot(self, damping: float | None) -> Step:
        """Return the bounded step for λ, the undamped one for None; sets the face it lies on."""
        face, fewest, tries = self._face, len(self.scale) + 1, TRIES
        for _ in range(MOST_EXCHANGES + 3 * len(self.scale)):
            on_face = self._on(face)
            step = on_face.undamped() if damping is None else on_face.solve(damping)
            if not step.valid:
                return no_step(self.scale, step.damping)
            gaps = self._gaps(face)
            p = torch.where(face == 0, step.p, gaps)
            wrong = self._wrong(face, p, step.damping)
            found = int((wrong != face).sum())
            if found == 0:
                self._face = face
                inside = torch.minimum(torch.maximum(p, self._below), self._above)
                if on_face is self._inner and torch.equal(inside, step.p):
                    return step
                return self._step(inside, step, moved=bool(gaps.any()))
            if found < fewest:
                fewest, tries = found, TRIES
            elif tries > 0:
                tries -= 1
            else:  # Murty's rule: the last of them alone
                last = (wrong != face).nonzero()[-1]
                wrong = torch.where(torch.arange(len(face), device=face.device) == last, wrong, face)
            face = wrong
        return self._clipped(p, step) if damping is not None else no_step(self.scale, self.least_damping)

    def _clipped(self, p: torch.Tensor, step: Step) -> Step:
        """Return what rounding has left undecided, clipped to the box: a trial, where it lowers the model."""
        self._face = self._start
        clipped = self._step(torch.minimum(torch.maximum(p, self._below), self._above), step, moved=True)
        return clipped if clipped.predicted_reduction > 0 else no_step(self.scale, step.damping)

    def _wrong(self, face: torch.Tensor, p: torch.Tensor, damping: float) -> torch.Tensor:
        """Return the face after every parameter that is outside, or held against its will, has changed sides."""
        ahead = self._inner.product(p)
        force = self._full + ahead + damping * self.scale**2 * p
        curved = float(torch.clamp(p @ ahead, min=0.0)) ** 0.5
        no_sign = (
            ROUNDING * len(p) * (self.column_norms * (self.residual_norm + curved) + damping * self.scale**2 * p.abs())
        )
        slack = ROUNDING * p.abs()
        low = (face == 0) & (p < self._below - slack)
        high = (face == 0) & (p > self._above + slack)
        freed = ((face < 0) & (force < -no_sign)) | ((face > 0) & (force > no_sign))
        moved = torch.where(low, -1, torch.where(high, 1, face))
        return torch.where(freed, 0, moved)

    def solve(self, damping: float) -> Step:
        """Return the bounded step for λ = `damping`."""
        return self._pivot(damping)

    def scaled_norm(self, damping: float) -> tuple[float, float]:
        """Return ‖D p(λ)‖ and its derivative by λ on the face of p(λ); infinite and 0 where there is no step."""
        step = self._pivot(damping)
        if not step.valid:
            return float("inf"), 0.0
        free_norm, slope = self._on(self._face).scaled_norm(damping)  # dual adds what rounding may hide
        held = torch.where(self._face == 0, torch.zeros_like(step.p), self.scale * step.p)
        norm = float(torch.linalg.vector_norm(held) ** 2 + free_norm**2) ** 0.5
        return norm, free_norm * slope / norm if norm > 0 else 0.0

    def within(self, radius: float, guess: float) -> Step:
        """Return the bounded step within a radius."""
        if not self.direct:
            return self._searched(radius) if self.finite else no_step(self.scale, 0.0)
        return shortened(self, secular_step(self, radius, guess, smooth=False), radius)

    def _searched(self, radius: float) -> Step:
        """Return the truncated step of cg, bent at the bounds, from face to face."""
        p, face = torch.zeros_like(self.scale), self._start
        n_inner, damping = 0, 0.0
        for _ in range(FACES):
            room = radius - float(torch.linalg.vector_norm(self.scale * p))
            if room <= SHORT * radius:
                break
            step = self._inner.restricted(face == 0, p).within(room, 0.0)
            n_inner, damping = n_inner + step.n_inner, max(damping, step.damping)
            if not (step.valid and step.predicted_reduction > 0):
                break
            p = self._bent(p, step.p)
            reached = torch.where(face == 0, self._reached(p), face)
            if torch.equal(reached, face):  # the step stayed on its face: is a parameter held against its will?
                reached = torch.where(face == 0, face, self._wrong(face, p, damping))
                if torch.equal(reached, face):
                    break
            face = reached
        self._face = self._reached(p)
        gain = -float(self._full @ p) - 0.5 * float(p @ self._inner.product(p))
        norm = float(torch.linalg.vector_norm(self.scale * p))
        return Step(p, gain, norm, damping, bool(np.isfinite(gain)), n_inner)

    def _reached(self, p: torch.Tensor) -> torch.Tensor:
        """Return the face that p lies on."""
        return torch.where(p <= self._below, -1, torch.where(p >= self._above, 1, 0))

    def _bent(self, p: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        """Return p + t d bent at the bounds, t halved until the model gains; at least up to the first bound."""
        slope = self._full + self._inner.product(p)
        t = 1.0
        for _ in range(HALVINGS):
            bent = torch.minimum(torch.maximum(p + t * d, self._below), self._above)
            move = bent - p
            along = float(slope @ move)
            if along + 0.5 * float(move @ self._inner.product(move)) <= SUFFICIENT * along:
                return bent
            t /= 2
        infinite = torch.full_like(d, torch.inf)
        reach = torch.where(d < 0, (self._below - p) / d, torch.where(d > 0, (self._above - p) / d, infinite))
        t = min(1.0, float(reach.min()))
        bent = torch.where(reach <= t, torch.where(d < 0, self._below, self._above), p + t * d)
        return torch.minimum(torch.maximum(bent, self._below), self._above)

    def undamped(self) -> Step:
        """Return the bounded Gauss-Newton step on the directions that J resolves: what the stop tests look at."""
        return self._undamped[0]

    @cached_property
    def _undamped(self) -> tuple[Step, torch.Tensor]:
        before = self._face
        step = self._pivot(None)
        face, self._face = self._face, before
        return step, face

    def solve_rhs(self, damping: float, b: torch.Tensor) -> torch.Tensor:
        """Return (JᵀJ + λD²)⁻¹ b on the face of the last step, 0 on its bounds."""
        free = self._face == 0
        return torch.where(
            free, self._on(self._face).solve_rhs(damping, torch.where(free, b, torch.zeros_like(b))), 0.0
        )

    def condition(self) -> float:
        """Return the condition number of J D⁻¹ on the face of the undamped step; 1 where no parameter is free on it."""
        face = self._undamped[1]
        return self._on(face).condition() if bool((face == 0).any()) else 1.0

    def product(self, p: torch.Tensor) -> torch.Tensor:
        """Return JᵀJ p, shape (n,)."""
        return self._inner.product(p)

    def estimable(self, held: np.ndarray | None = None, error: float = 0.0) -> Estimable | None:
        """Return what the data determine of the parameters, those on a bound held there."""
        bound = ((self._below == 0) | (self._above == 0)).cpu().numpy()
        return self._inner.estimable(bound if held is None else bound | held, error)
