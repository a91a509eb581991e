r"""Tiny fits: the same algorithm on numpy arrays, for a numpy function of few rows and parameters.

A fit of 100 points and 3 parameters costs 40 evaluations of 4 microseconds; the general engine spends a hundred times
that on tensors, probes and immutable states. Here is its usual path alone: Moré's trust region in the D-norm with
geodesic acceleration, [J r] = Q R and one SVD of R D⁻¹ a point, 2-point differences that become 3-point near the
solution, and the stop tests of :mod:`lmfit_gpu.termination` on the undamped step, believed on a 3-point J only.

Everything off that path raises :class:`Unusual`: values that are not finite float64 (rows,), a step that does not show
or shows rounding, a singular J, a stall, no degree of freedom, too many trials. The caller then lets the general engine
fit from the start, so statuses, messages and remedies are those of the engine. A trial that overflows is a rejected
trial here too.

State is mutable here (:class:`_Loop`), and sums over n <= 20 parameters are loops over floats: numpy takes a microsecond
a call. docs/tiny_fits.md says where the time goes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg.lapack import dgeqrf, dgesdd

from lmfit_gpu.acceleration import ALPHA, AS_PREDICTED
from lmfit_gpu.damping import FIRST_RADIUS_SHARE, GROW_ABOVE, SHRINK, SHRINK_BELOW, TrustRegion
from lmfit_gpu.differences import MATTERS, NOISE, ORDER
from lmfit_gpu.jacobian import CURVATURE_STEP
from lmfit_gpu.levenberg_marquardt import ACCEPT_RATIO, FINER_BELOW
from lmfit_gpu.linear.base import EPSILON, RADIUS_WITHIN, SECULAR_ITERATIONS
from lmfit_gpu.models import CALL_ERRORS
from lmfit_gpu.result import IterationRecord, Result, Status, Stop
from lmfit_gpu.termination import AT_ROUNDING, AUTO, EXACT_FIT, HOPELESS, TRUSTED_ERROR, torch

__all__ = ["Answer", "Curve", "Limits", "Unusual", "applies_to", "minimize"]

MOST_PARAMS = 20
MOST_ENTRIES = 200_000  # of J
MOST_TRIALS = 250  # a fit that needs more is left to the engine: what is lost with it stays small
SHOWS = 0.5  # share of the rows whose value a difference step must change
STRAIGHT = 1e-3  # most ‖second difference‖/‖first‖ of a 3-point column: beyond, rounding or a kink, not curvature
STEP_WITHIN = (0.1, 1e3)  # first difference steps over those that the norms of the first J ask for
CLEAR = 10.0  # singular values must be so far above what counts as zero
USER_RTOL = 5e-3  # a user's J against a central difference along one direction; 5 % a column in the engine
FLOAT64 = np.dtype(np.float64)
GROW = TrustRegion().grow
ETA = {scheme: EPSILON**order for scheme, order in ORDER.items()}
STOP_FTOL, STOP_XTOL = AT_ROUNDING[torch.float64]
TINY = float(np.finfo(np.float64).tiny)


class Unusual(Exception):
    """What this path does not decide; the general engine does."""


class Limits(NamedTuple):
    """Limits of a fit, "auto" resolved; scheme is "differences" (2-point, then 3-point) or "3-point"."""

    ftol: float = AUTO[torch.float64][0]
    xtol: float = AUTO[torch.float64][1]
    gtol: float = AUTO[torch.float64][2]
    max_iter: int = 1000
    scheme: str = "differences"


def applies_to(n_residuals: int, n_params: int) -> bool:
    """Return whether a fit has the size that this path is for."""
    return 0 < n_params <= MOST_PARAMS and n_params < n_residuals and n_residuals * n_params <= MOST_ENTRIES


class Curve:
    """A numpy function f(x, \\*params) and the data it is fitted to.

    Parameters
    ----------
    f : callable
    x : ndarray
        f gets a read-only view.
    y : ndarray, shape (m,), float64
    weights : ndarray, shape (m,), or None
        Factors of the residuals, 1/σ √w.
    jac : callable or None
        jac(x, \\*params), shape (m, n).
    """

    __slots__ = ("f", "jac", "nfev", "shape", "target_norm", "weights", "x", "y")

    def __init__(self, f: Callable, x: np.ndarray, y: np.ndarray, weights: Any = None, jac: Any = None) -> None:
        self.f, self.jac, self.y, self.weights, self.shape = f, jac, y, weights, y.shape
        self.x = x.view()
        self.x.flags.writeable = False
        scaled = y if weights is None else weights * y
        self.target_norm = math.sqrt(scaled.dot(scaled))
        self.nfev = 0

    def values(self, theta: Sequence[float]) -> np.ndarray:
        """Return f, shape (m,), on memory that f may use again."""
        values = self.f(self.x, *theta)
        self.nfev += 1
        if type(values) is not np.ndarray or values.dtype != FLOAT64 or values.shape != self.shape:
            raise Unusual("f does not return float64 values (m,)")
        return values

    def residual(self, values: np.ndarray) -> np.ndarray:
        """Return the weighted residuals, shape (m,), on memory of their own."""
        r = values - self.y
        return r if self.weights is None else self.weights * r

    def fill(self, point: "_Point", how: tuple[str, list[float]], block: "_Block") -> None:
        """Write [J r] at a point, J by the user's function or by differences with the given steps."""
        scheme, steps = how
        columns = block.columns
        if scheme == "user":
            self._user(point.theta, block)
        else:
            (self._forward if scheme == "2-point" else self._central)(point, steps, columns)
        if self.weights is not None:
            for column in columns[:-1]:
                column *= self.weights
        columns[-1][...] = point.r

    def _user(self, theta: np.ndarray, block: "_Block") -> None:
        jacobian = self.jac(self.x, *theta)
        expected = block.array[:, :-1]
        if type(jacobian) is not np.ndarray or jacobian.dtype != FLOAT64 or jacobian.shape != expected.shape:
            raise Unusual("jac does not return float64 values (m, n)")
        expected[...] = jacobian

    def _forward(self, point: "_Point", steps: list[float], columns: list[np.ndarray]) -> None:
        values, moved = point.values, list(point.theta)
        least = SHOWS * len(values)
        for j, at in enumerate(moved):
            moved[j] = above = at + steps[j]
            column = np.subtract(self.values(moved), values, columns[j])
            moved[j] = at
            if np.count_nonzero(column) < least:
                raise Unusual("a difference step does not show")
            column /= above - at

    def _central(self, point: "_Point", steps: list[float], columns: list[np.ndarray]) -> None:
        values, moved = point.values, list(point.theta)
        least = SHOWS * len(values)
        for j, at in enumerate(moved):
            moved[j] = above = at + steps[j]
            column = np.subtract(self.values(moved), values, columns[j])
            moved[j] = below = at - steps[j]
            behind = values - self.values(moved)
            moved[j] = at
            second = column - behind
            column += behind
            straight = second.dot(second) <= (STRAIGHT / 2) ** 2 * column.dot(column)
            if not straight or np.count_nonzero(column) < least:
                raise Unusual("first and second differences do not go together")
            column /= above - below


class _Block:
    """Memory of [J r], shape (m, n + 1), by columns."""

    __slots__ = ("array", "columns")

    def __init__(self, m: int, n: int) -> None:
        self.array = np.empty((m, n + 1), order="F")
        self.columns = list(self.array.T)


class _Point(NamedTuple):
    theta: np.ndarray
    values: np.ndarray
    r: np.ndarray
    cost: float


class _Step(NamedTuple):
    p: np.ndarray
    gain: float  # predicted reduction
    norm: float  # ‖D p‖
    damping: float


class _Linear:
    """A filled block at one point, decomposed; vectors of n entries are lists.

    R D⁻¹ = U diag(s) Vᵀ, w = Uᵀz, q = w/s, where [J r] = Q [R z; 0 ρ].
    """

    __slots__ = ("block", "cosine", "d", "error", "norms", "point", "q", "r_norm", "rounding", "s", "s2", "scheme")
    __slots__ += ("sw", "theta", "triangle", "turn", "w")

    def __init__(self, curve: Curve, point: _Point, how: tuple[str, list[float]], block: _Block, last: Any) -> None:
        curve.fill(point, how, block)
        self.block, self.point, (self.scheme, steps) = block, point, how
        self.theta = theta = point.theta.tolist()
        self.norms = norms = [math.sqrt(column.dot(column)) for column in block.columns[:-1]]
        if not (sum(norms) < math.inf and min(norms) > 0):
            raise Unusual("J is not finite, or has a zero column")
        self.d = norms if last is None else [a if a > b else b for a, b in zip(norms, last.d, strict=True)]
        n = len(norms)
        top = dgeqrf(block.array, lwork=32 * (n + 1))[0]
        self.triangle = top[:n, :n] * UPPER[:n, :n]
        u, s, vt, info = dgesdd(self.triangle / self.d)
        if info or not s[-1] > n * EPSILON * s[0]:
            raise Unusual("J is singular")
        self.turn = vt.T / np.array(self.d)[:, None]  # D⁻¹V
        self.s, self.w = s.tolist(), top[:n, n].dot(u).tolist()
        self._sums()
        self.r_norm = r_norm = math.sqrt(2 * point.cost)
        gradient = block.columns[-1].dot(block.array)[:n].tolist()
        self.cosine = max(abs(g) / a for g, a in zip(gradient, norms, strict=True)) / (r_norm or 1.0)
        noise = EPSILON * (curve.target_norm + r_norm)
        self.rounding = noise + EPSILON * math.hypot(*[a * at for a, at in zip(norms, theta, strict=True)])
        self.error = 0.0
        if self.scheme != "user":
            change = min(a * b for a, b in zip(steps, norms, strict=True))
            self.error = max(EPSILON ** (2 * ORDER[self.scheme]), noise / change)

    def _sums(self) -> None:
        self.s2 = [a * a for a in self.s]
        self.sw = [a * b for a, b in zip(self.s, self.w, strict=True)]
        self.q = [b / a for a, b in zip(self.s, self.w, strict=True)]

    def trusted(self) -> bool:
        """Return whether the Gauss-Newton step is known well enough to stop on."""
        s = self.s
        return s[-1] > self.error * s[0] and EPSILON * s[0] <= TRUSTED_ERROR * s[-1]

    def undamped(self) -> _Step:
        """Return the Gauss-Newton step."""
        return _Step(-self.turn.dot(self.q), 0.5 * sum([w * w for w in self.w]), math.hypot(*self.q), 0.0)

    def length(self, damping: float) -> tuple[float, float]:
        """Return ‖D p(λ)‖ and its derivative by λ."""
        squares = slopes = 0.0
        for sw, s2 in zip(self.sw, self.s2, strict=True):
            q2 = (sw / (s2 + damping)) ** 2
            squares += q2
            slopes += q2 / (s2 + damping)
        norm = math.sqrt(squares)
        return norm, -slopes / norm if norm > 0 else 0.0

    def within(self, radius: float, guess: float) -> _Step:
        """Return the step within a radius (:func:`lmfit_gpu.linear.base.secular_step`)."""
        norm, slope = self.length(0.0)
        if not norm > (1 + RADIUS_WITHIN) * radius:
            return self.undamped()
        low = (norm - radius) / -slope
        high = math.hypot(*self.sw) / max(radius, TINY)
        damping = guess
        for _ in range(SECULAR_ITERATIONS):
            if not low < damping < high:
                damping = max(1e-3 * high, math.sqrt(low * high))
            norm, slope = self.length(damping)
            excess = norm - radius
            if abs(excess) <= RADIUS_WITHIN * radius or slope == 0:
                break
            low, high = (damping, high) if excess > 0 else (low, damping)
            damping -= norm / radius * excess / slope
        q = [sw / (s2 + damping) for sw, s2 in zip(self.sw, self.s2, strict=True)]
        gain = 0.5 * sum([a * (2 * sw - s2 * a) for a, sw, s2 in zip(q, self.sw, self.s2, strict=True)])
        return _Step(-self.turn.dot(q), gain, math.hypot(*q), damping)

    def steps(self, curve: Curve, theta: list[float], scheme: str) -> list[float]:
        """Return difference steps at a point near this one (:mod:`lmfit_gpu.differences`)."""
        noise, eta, r_norm = EPSILON * (curve.target_norm + self.r_norm) / NOISE, ETA[scheme], self.r_norm
        return [
            max(eta * (abs(at) or r_norm / size), min(noise / size, MATTERS * r_norm / size))
            for at, size in zip(theta, self.norms, strict=True)
        ]


class _Trial(NamedTuple):
    """The fields of an IterationRecord in its order, without the number."""

    cost: float
    trial_cost: float
    gain_ratio: float
    damping: float
    scaled_norm: float
    gradient_cosine: float
    accepted: bool
    accelerated: bool
    jac: str
    predicted_reduction: float


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished fit; :meth:`result` makes the full account of it."""

    theta: np.ndarray
    cost: float
    stop: Stop
    trials: list[_Trial]
    counts: tuple[int, int, int]  # nfev, njev, n_residuals
    jac: str
    covariance: np.ndarray  # (JᵀJ)⁻¹, shape (n, n)

    def result(self, names: Sequence[str]) -> Result:
        """Return the :class:`~lmfit_gpu.result.Result` of the fit."""
        nfev, njev, n_residuals = self.counts
        n = len(self.theta)
        used = {
            "path": "compact",
            "jac": self.jac,
            "solver": "qr",
            "backend": "scipy",
            "damping": TrustRegion(),
            "devices": ["cpu"],
            "chunk_rows": None,
            "rows": "evaluated all together",
        }
        return Result(
            theta=self.theta,
            names=names,
            cost=self.cost,
            stop=self.stop,
            n_iter=len(self.trials),
            nfev=nfev,
            njev=njev,
            n_residuals=n_residuals,
            history=[IterationRecord(i, *trial) for i, trial in enumerate(self.trials, 1)],
            used=used,
            covariance=self.covariance,
            rank=n,
            undetermined=np.zeros(n, dtype=bool),
        )


def minimize(curve: Curve, theta: np.ndarray, limits: Limits, names: Sequence[str]) -> Answer:
    """Minimise ½‖r‖² from a start.

    Parameters
    ----------
    curve : Curve
    theta : ndarray, shape (n,), float64
    limits : Limits
    names : sequence of str
        For the result that an interrupt carries.

    Raises
    ------
    Unusual
        If the fit does not go cleanly to convergence.
    KeyboardInterrupt
        With the result so far as its attribute ``result``.
    """
    loop = _Loop(curve, limits)
    try:
        with np.errstate(all="ignore"):
            stop = loop.run(theta)
        return loop.answer(stop)
    except CALL_ERRORS as error:
        raise Unusual(f"{type(error).__name__}: {error}") from error
    except KeyboardInterrupt as interrupt:
        if loop.lin is not None:
            stop = Stop(Status.INTERRUPTED, len(loop.trials), math.inf)
            interrupt.result = loop.answer(stop).result(names)  # type: ignore[attr-defined]
        raise


class _Loop:
    """Where a fit stands."""

    def __init__(self, curve: Curve, limits: Limits) -> None:
        self.curve, self.limits = curve, limits
        self.lin: _Linear | None = None
        self.trials: list[_Trial] = []
        self.njev = 0
        self.radius = self.damping = 0.0
        self.gain_ratio = math.nan
        self.bend = math.inf  # ‖D a‖/‖D p‖ of the last correction
        self.previous: tuple[np.ndarray, np.ndarray] | None = None  # Gauss-Newton step, and the point it started from
        self.scheme = "user" if curve.jac is not None else "2-point" if limits.scheme == "differences" else "3-point"
        self.spare: list[_Block] = []

    def run(self, theta: np.ndarray) -> Stop:
        """Return why the fit converged."""
        self.spare = [_Block(len(self.curve.y), len(theta)) for _ in range(2)]
        self.start(theta)
        stop = self.tested()
        most = min(self.limits.max_iter, MOST_TRIALS)
        while stop is None:
            if len(self.trials) >= most:
                raise Unusual("too many trials")
            stop = self.trial()
        return stop

    def linearize(self, point: _Point, steps: list[float]) -> _Linear:
        """Make a point the current one."""
        last = self.lin
        lin = _Linear(self.curve, point, (self.scheme, steps), self.spare[-1], last)
        self.spare[-1:] = [] if last is None else [last.block]
        self.lin = lin
        self.njev += 1
        return lin

    def start(self, theta: np.ndarray) -> None:
        """Linearise at the start, with difference steps that suit the norms found there."""
        point = self.evaluated(theta)
        if not point.cost < math.inf:
            raise Unusual("f is not finite at the start")
        user = self.scheme == "user"
        at = theta.tolist()
        steps = [] if user else [ETA[self.scheme] * (abs(a) or 1.0) for a in at]
        lin = self.linearize(point._replace(values=point.values.copy()), steps)
        if user:
            self.check_user(lin)
        else:
            low, high = STEP_WITHIN
            wanted = lin.steps(self.curve, at, self.scheme)
            if not all(low * b <= a <= high * b for a, b in zip(steps, wanted, strict=True)):
                self.lin, self.spare = None, [*self.spare, lin.block]
                lin = self.linearize(lin.point, wanted)
        size = math.hypot(*[a * b for a, b in zip(lin.d, at, strict=True)])
        self.radius = max(size, FIRST_RADIUS_SHARE * lin.r_norm) if size > 0 else lin.r_norm

    def check_user(self, lin: _Linear) -> None:
        """Hold the user's J against a central difference along one direction, in which every column counts alike."""
        theta, norms = lin.point.theta, np.array(lin.norms)
        n = len(theta)
        v = np.linspace(1.0, 2.0, n) * np.where(np.arange(n) % 2, -1.0, 1.0) / norms
        v *= ETA["3-point"] / np.abs(v / np.where(theta == 0, lin.r_norm / norms, theta)).max()
        ahead = self.curve.values(theta + v).copy()
        difference = 0.5 * (ahead - self.curve.values(theta - v))
        if self.curve.weights is not None:
            difference *= self.curve.weights
        expected = lin.block.array[:, :n].dot(v)
        off = expected - difference
        if not off.dot(off) <= USER_RTOL**2 * expected.dot(expected) / n:
            raise Unusual("jac is not the derivative of f")

    def evaluated(self, theta: np.ndarray) -> _Point:
        values = self.curve.values(theta)
        r = self.curve.residual(values)
        return _Point(theta, values, r, 0.5 * float(r.dot(r)))

    def trial(self) -> Stop | None:
        """Make one trial, and return why the fit ends with it."""
        lin = self.lin
        step = lin.within(self.radius, self.damping)
        self.damping = step.damping
        if not 0 < step.gain < math.inf:
            raise Unusual("no step")
        corrected = self.corrected(step)
        point = self.evaluated(lin.point.theta + (step.p if corrected is None else corrected))
        cost = lin.point.cost
        accepted = point.cost < cost - ACCEPT_RATIO * step.gain
        self.gain_ratio = (cost - point.cost) / step.gain
        record = (point.cost if accepted else cost, point.cost, self.gain_ratio, step.damping, step.norm, lin.cosine)
        self.trials.append(_Trial(*record, accepted, corrected is not None, lin.scheme, step.gain))
        return self.accept(point, step) if accepted else self.reject(step)

    def corrected(self, step: _Step) -> np.ndarray | None:
        """Return the step extrapolated or bent, or None."""
        if step.damping > 0:
            self.previous = None
            return self.accelerated(step)
        previous, self.previous = self.previous, (step.p, self.lin.point.theta)
        if previous is not None:
            return self.extrapolated(step, *previous)
        return None if abs(self.gain_ratio - 1) <= AS_PREDICTED else self.accelerated(step)

    def extrapolated(self, step: _Step, p: np.ndarray, theta: np.ndarray) -> np.ndarray | None:
        """Return where a sequence of Gauss-Newton steps that shrink by the same factor ends.

        Their factor is that of Σ r_i ∇²r_i against JᵀJ, and no smaller near the minimum. Anderson's method with one
        former step (J. ACM 12 (1965), doi:10.1145/321296.321305), in the D-norm.
        """
        d = np.array(self.lin.d)
        change = step.p - p
        scaled = d * change
        factor = float((d * step.p).dot(scaled) / scaled.dot(scaled))
        correction = factor * (self.lin.point.theta - theta + change)
        scaled = d * correction
        return step.p - correction if math.sqrt(scaled.dot(scaled)) <= ALPHA * step.norm else None

    def accelerated(self, step: _Step) -> np.ndarray | None:
        """Return p + ½a (:mod:`lmfit_gpu.acceleration`), or None."""
        lin, h = self.lin, CURVATURE_STEP
        v, block = h * step.p, lin.block
        curved = self.curve.residual(self.curve.values(lin.point.theta + v))
        curved -= block.array.dot(np.append(v, 1.0))
        along = curved.dot(block.array[:, : len(v)]).dot(lin.turn).tolist()
        a = [-(2 / h**2) * b / (s2 + step.damping) for b, s2 in zip(along, lin.s2, strict=True)]
        if not 2 * math.hypot(*a) <= ALPHA * step.norm:
            return None
        return step.p + 0.5 * lin.turn.dot(a)

    def accept(self, point: _Point, step: _Step) -> Stop | None:
        """Move to a better point."""
        last = self.lin
        if self.gain_ratio < SHRINK_BELOW:
            self.shrink(step)
        elif self.gain_ratio > GROW_ABOVE or step.damping == 0:
            self.radius = max(self.radius, GROW * step.norm)
        if self.scheme == "2-point" and last.point.cost - point.cost < FINER_BELOW * last.point.cost:
            self.scheme = "3-point"
        theta, values, r, cost = point
        steps = [] if self.scheme == "user" else last.steps(self.curve, theta.tolist(), self.scheme)
        self.linearize(_Point(theta, values.copy(), r, cost), steps)
        return self.tested()

    def reject(self, step: _Step) -> Stop | None:
        """Try a shorter step next, unless rounding decides (:func:`lmfit_gpu.termination.check_stalled`)."""
        self.shrink(step)
        self.previous = None
        lin = self.lin
        noise = lin.rounding * lin.r_norm
        theta = lin.point.theta
        moves = bool((theta + step.p != theta).any())
        if moves and step.gain > noise:
            return None
        stop = self.converged(STOP_FTOL, STOP_XTOL, 0.0)
        if stop is None and moves and step.gain > HOPELESS * noise:
            return None
        if self.scheme == "2-point":
            return self.refined()
        if stop is None:
            raise Unusual("stalled")
        return stop

    def shrink(self, step: _Step) -> None:
        self.radius = SHRINK * min(self.radius, step.norm)
        self.damping /= SHRINK

    def tested(self) -> Stop | None:
        """Return the stop that is met at the point, if it is on the finest J (:func:`lmfit_gpu.termination.check`)."""
        lin = self.lin
        if lin.r_norm <= EXACT_FIT * lin.rounding:
            stop: Stop | None = Stop(Status.CONVERGED_RESIDUAL, lin.r_norm, EXACT_FIT * lin.rounding)
        else:
            stop = self.converged(*self.limits[:3])
        return self.refined() if stop is not None and self.scheme == "2-point" else stop

    def refined(self) -> Stop | None:
        """Linearise the same point again with 3-point differences, and test there."""
        lin = self.lin
        self.scheme = "3-point"
        self.linearize(lin.point, lin.steps(self.curve, lin.theta, "3-point"))
        return self.tested()

    def converged(self, ftol: float, xtol: float, gtol: float) -> Stop | None:
        """Return which of the three tests on the Gauss-Newton step is met."""
        lin = self.lin
        if not lin.trusted():
            return None
        if lin.cosine <= gtol:
            return Stop(Status.CONVERGED_GRADIENT, lin.cosine, gtol)
        step = lin.undamped()
        gain = step.gain / lin.point.cost
        if gain <= ftol:
            return Stop(Status.CONVERGED_COST, gain, ftol)
        sizes = zip(step.p.tolist(), lin.theta, strict=True)
        change = max((abs(a) / abs(at) if at else math.inf) if a else 0.0 for a, at in sizes)
        return Stop(Status.CONVERGED_STEP, change, xtol) if change <= xtol else None

    def answer(self, stop: Stop) -> Answer:
        """Return the fit with (JᵀJ)⁻¹ from the SVD of the column-scaled J.

        Raises
        ------
        Unusual
            If J is nearly singular.
        """
        lin = self.lin
        n = len(lin.theta)
        norms = np.array(lin.norms)
        _, s, vt, info = dgesdd(lin.triangle / norms)
        if info or not s[-1] > CLEAR * max(lin.error, n * EPSILON) * s[0]:
            raise Unusual("J is nearly singular")
        half = vt.T / s / norms[:, None]
        counts = (self.curve.nfev, self.njev, len(self.curve.y))
        return Answer(lin.point.theta, lin.point.cost, stop, self.trials, counts, lin.scheme, half.dot(half.T))


UPPER = np.triu(np.ones((MOST_PARAMS + 1, MOST_PARAMS + 1)))
