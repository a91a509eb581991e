"""The loop of a tiny fit.

The rules are those of :mod:`lmfit_gpu.levenberg_marquardt`, :mod:`~lmfit_gpu.damping`, :mod:`~lmfit_gpu.acceleration`
and :mod:`~lmfit_gpu.termination`, on floats.

One rule is its own: in a row of Gauss-Newton steps each shrinks by the same factor, that of Σ r_i ∇²r_i against JᵀJ,
and the second and later ones are extrapolated to where the row ends (Anderson, J. ACM 12 (1965),
doi:10.1145/321296.321305). They replace the geodesic correction there: it vanishes with the square of the step.
"""

import math
from time import perf_counter
from typing import NamedTuple

import numpy as np

from lmfit_gpu.acceleration import ALPHA, AS_PREDICTED
from lmfit_gpu.compact.curve import Block, Curve, Point, RefusedError, UnusualError, shows
from lmfit_gpu.compact.linear import ETA, Linear, Step
from lmfit_gpu.damping import FIRST_RADIUS_SHARE, GROW_ABOVE, SHRINK, SHRINK_BELOW, TrustRegion
from lmfit_gpu.jacobian import CURVATURE_STEP
from lmfit_gpu.levenberg_marquardt import FAR, FINER_BELOW
from lmfit_gpu.result import Status, Stop
from lmfit_gpu.termination import EXACT_FIT, HOPELESS, STOP_AT_ROUNDING, USUAL
from lmfit_gpu.trial import ACCEPT_RATIO

__all__ = ["Limits", "Loop", "Trial"]

MOST_TRIALS = 250  # a fit that needs more is left to the engine: what is lost with it stays small
STEP_WITHIN = (0.1, 1e3)  # first difference steps over those that the norms of the first J ask for
USER_RTOL = 5e-3  # a user's J against a central difference along one direction; 5 % a column in the engine
STRAIGHT_TRIALS = 3  # first damped steps without correction: most tiny fits need no more of them
NEARLY_EXACT = 1e-6  # ‖r‖/‖y‖ above which a residual is not compared with rounding
GROW = TrustRegion().grow


class Limits(NamedTuple):
    """Limits of a fit, "auto" resolved; scheme is "differences" (2-point, then 3-point) or "3-point"."""

    ftol: float = USUAL[0]
    xtol: float = USUAL[1]
    gtol: float = USUAL[2]
    max_iter: int = 1000
    scheme: str = "differences"


class Trial(NamedTuple):
    """What a record of the history is made of."""

    lin: Linear  # where the step started
    step: Step
    cost: float
    gain_ratio: float
    accepted: bool
    corrected: bool
    seconds: float  # since the start


class Loop:
    """Where a fit stands.

    Parameters
    ----------
    curve : Curve
    limits : Limits
    """

    def __init__(self, curve: Curve, limits: Limits) -> None:
        self.curve, self.limits = curve, limits
        self.lin: Linear
        self.trials: list[Trial] = []
        self.njev = 0  # and no lin
        self.radius = self.damping = 0.0
        self.gain_ratio = math.nan
        self.previous: tuple[np.ndarray, np.ndarray] | None = None  # Gauss-Newton step, and the point it started from
        self.scheme = "user" if curve.jac is not None else "2-point" if limits.scheme == "differences" else "3-point"
        self.nearly_exact = NEARLY_EXACT * curve.target_norm
        self.far = max(FAR, limits.ftol)  # a relative gain above which nothing else is small either
        self.refused = False  # whether f raised at a trial
        self.began = perf_counter()
        self.spare: Block

    def run(self, theta: np.ndarray) -> Stop:
        """Return why the fit converged.

        Raises
        ------
        UnusualError
            If it is not a case for this path.
        """
        self.start(theta)
        stop = self.tested()
        most = min(self.limits.max_iter, MOST_TRIALS)
        while stop is None:
            if len(self.trials) >= most:
                raise UnusualError("too many trials")
            stop = self.trial()
        if self.scheme == "user":  # right at the start, and here?
            self.check_user(self.lin)
        return stop

    def start(self, theta: np.ndarray) -> None:
        """Linearise at the start, with difference steps that suit the norms found there."""
        curve, scheme = self.curve, self.scheme
        shape = len(curve.y), len(theta)
        block, self.spare = Block(*shape), Block(*shape)
        point = self.owned(curve.at(theta, block.r))
        if not point.cost < math.inf:
            raise UnusualError("f is not finite at the start")
        steps = [] if scheme == "user" else [ETA[scheme] * (abs(a) or 1.0) for a in theta.tolist()]
        self.lin = lin = Linear(curve, point, (scheme, steps), block, None)
        if scheme == "user":
            self.check_user(lin)
        else:
            low, high = STEP_WITHIN
            wanted = lin.steps(curve, theta, scheme)
            if steps != wanted and not all(low * b <= a <= high * b for a, b in zip(steps, wanted, strict=True)):
                self.lin = lin = Linear(curve, point, (scheme, wanted), block, None)
            if not (block.jacobian.all() or all(map(shows, block.columns))):
                raise UnusualError("a difference step does not show")
        self.njev = 1
        size = lin.scaled(theta)
        self.radius = max(size, FIRST_RADIUS_SHARE * lin.r_norm) if size > 0 else lin.r_norm

    @staticmethod
    def owned(point: Point) -> Point:
        """Return a point whose values f cannot overwrite."""
        theta, values, r, cost = point
        return Point(theta, values.copy(), r, cost)

    def check_user(self, lin: Linear) -> None:
        """Hold the user's J against a central difference along one direction, in which every column counts alike."""
        theta, norms = lin.point.theta, np.array(lin.norms)
        n = len(theta)
        v = np.linspace(1.0, 2.0, n) * np.where(np.arange(n) % 2, -1.0, 1.0) / norms
        v *= ETA["3-point"] / np.abs(v / np.where(theta == 0, lin.r_norm / norms, theta)).max()
        difference = self.curve.change(theta + v, lin.point.values)
        difference -= self.curve.change(theta - v, lin.point.values)
        expected = 2 * lin.block.jacobian.dot(v)
        off = expected - difference
        if not off.dot(off) <= USER_RTOL**2 * expected.dot(expected) / n:
            raise UnusualError("jac is not the derivative of f")

    def move(self, lin: Linear) -> None:
        """Make a linearisation in the spare block the current one."""
        self.spare = self.lin.block
        self.lin = lin
        self.njev += 1

    def trial(self) -> Stop | None:
        """Make one trial, and return why the fit ends with it."""
        lin = self.lin
        step = lin.within(self.radius, self.damping)
        self.damping = step.damping
        if not 0 < step.gain < math.inf:
            raise UnusualError("no step")
        corrected = None
        try:
            corrected = self.corrected(step)
            point = self.curve.at(lin.point.theta + (step.p if corrected is None else corrected), self.spare.r)
        except RefusedError:
            self.refused = True
            point = lin.point._replace(cost=math.nan)
        fall = lin.point.cost - point.cost
        accepted = fall > ACCEPT_RATIO * step.gain  # not for NaN
        self.gain_ratio = fall / step.gain
        spent = perf_counter() - self.began
        self.trials.append(Trial(lin, step, point.cost, self.gain_ratio, accepted, corrected is not None, spent))
        return self.accept(point, step) if accepted else self.reject(step)

    def corrected(self, step: Step) -> np.ndarray | None:
        """Return the step extrapolated or bent, or None."""
        if step.damping > 0:
            self.previous = None
            return self.accelerated(step) if len(self.trials) >= STRAIGHT_TRIALS else None
        previous, self.previous = self.previous, (step.p, self.lin.point.theta)
        if previous is not None:
            return self.extrapolated(step, *previous)
        return None if abs(self.gain_ratio - 1) <= AS_PREDICTED else self.accelerated(step)

    def extrapolated(self, step: Step, p: np.ndarray, theta: np.ndarray) -> np.ndarray | None:
        """Return where a row of Gauss-Newton steps ends, from one former step p at theta, or None when that is far."""
        lin = self.lin
        d = np.array(lin.d)
        change = step.p - p
        scaled = change * d * d
        correction = (lin.point.theta - theta + change) * (step.p.dot(scaled) / change.dot(scaled))
        return step.p - correction if lin.scaled(correction) <= ALPHA * step.norm else None

    def accelerated(self, step: Step) -> np.ndarray | None:
        """Return p + ½a, or None."""
        lin, h = self.lin, CURVATURE_STEP
        v = h * step.p
        curved = self.curve.change(lin.point.theta + v, lin.point.values)
        curved -= lin.block.jacobian.dot(v)
        a = lin.solve(step.damping, curved.dot(lin.block.jacobian)) * (-2 / h**2)
        return step.p + 0.5 * a if 2 * lin.scaled(a) <= ALPHA * step.norm else None

    def accept(self, point: Point, step: Step) -> Stop | None:
        """Move to a better point."""
        last = self.lin
        if self.gain_ratio < SHRINK_BELOW:
            self.shrink(step)
        elif self.gain_ratio > GROW_ABOVE or step.damping == 0:
            self.radius = max(self.radius, GROW * step.norm)
        if self.scheme == "2-point" and last.point.cost - point.cost < FINER_BELOW * last.point.cost:
            self.scheme = "3-point"
        steps = [] if self.scheme == "user" else last.steps(self.curve, point.theta, self.scheme)
        self.move(Linear(self.curve, self.owned(point), (self.scheme, steps), self.spare, last))
        return self.tested()

    def reject(self, step: Step) -> Stop | None:
        """Try a shorter step next, unless rounding decides (:func:`lmfit_gpu.termination.check_stalled`)."""
        self.shrink(step)
        self.previous = None
        lin = self.lin
        noise = lin.rounding(self.curve) * lin.r_norm
        theta = lin.point.theta
        moves = bool((theta + step.p != theta).any())
        if moves and step.gain > noise:
            return None
        stop = self.converged(*STOP_AT_ROUNDING, 0.0)
        if stop is None and moves and step.gain > HOPELESS * noise:
            return None
        if self.scheme == "2-point":
            return self.refined()
        if stop is None:
            raise UnusualError("stalled")
        return stop

    def shrink(self, step: Step) -> None:
        """Shrink the radius to a fraction of the step."""
        self.radius = SHRINK * min(self.radius, step.norm)
        self.damping /= SHRINK

    def tested(self) -> Stop | None:
        """Return the stop that is met at the point, if it is on the finest J (:func:`lmfit_gpu.termination.check`)."""
        lin = self.lin
        stop = None
        if lin.r_norm > self.nearly_exact and lin.gain > self.far * lin.point.cost:
            return None
        if lin.r_norm <= self.nearly_exact:
            limit = EXACT_FIT * lin.rounding(self.curve)
            stop = Stop(Status.CONVERGED_RESIDUAL, lin.r_norm, limit) if lin.r_norm <= limit else None
        if stop is None:
            stop = self.converged(*self.limits[:3])
        return self.refined() if stop is not None and self.scheme == "2-point" else stop

    def refined(self) -> Stop | None:
        """Linearise the same point again with 3-point differences, and test there."""
        lin = self.lin
        self.scheme = "3-point"
        steps = lin.steps(self.curve, lin.point.theta, self.scheme)
        self.move(Linear(self.curve, lin.point, (self.scheme, steps), self.spare, lin))
        return self.tested()

    def converged(self, ftol: float, xtol: float, gtol: float) -> Stop | None:
        """Return which of the three tests on the Gauss-Newton step is met."""
        lin = self.lin
        gain = lin.gain / lin.point.cost
        if gain > self.far:
            return None
        if gain <= ftol:
            stop = Stop(Status.CONVERGED_COST, gain, ftol)
        elif (cosine := lin.cosine()) <= gtol:
            stop = Stop(Status.CONVERGED_GRADIENT, cosine, gtol)
        else:
            sizes = zip(lin.p.tolist(), lin.point.theta.tolist(), strict=True)
            change = max((abs(a) / abs(at) if at else math.inf) if a else 0.0 for a, at in sizes)
            if change > xtol:
                return None
            stop = Stop(Status.CONVERGED_STEP, change, xtol)
        return stop if lin.trusted(self.curve) else None
