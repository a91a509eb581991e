r"""A filled block at one point, triangularised, and the steps it proposes.

.. math:: [J\ r] = Q \begin{bmatrix} R & z \\ 0 & \rho \end{bmatrix}, \qquad R\,p = -z

is the Gauss-Newton step p; only when it is too long is R D⁻¹ = U diag(s) Vᵀ needed, as in
:mod:`lmfit_gpu.linear.qr`. Vectors of n <= 20 entries are lists where loops over floats are faster than numpy calls.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from operator import mul, truediv
from typing import NamedTuple

import numpy as np
from scipy.linalg.lapack import dgeqrf, dgesdd, dpotrs

from lmfit_gpu.compact.curve import Block, Curve, Point, UnusualError
from lmfit_gpu.differences import MATTERS, NOISE, ORDER
from lmfit_gpu.linear.base import EPSILON, RADIUS_WITHIN, SECULAR_ITERATIONS
from lmfit_gpu.linear.covariance import Estimable
from lmfit_gpu.termination import TRUSTED_ERROR

__all__ = ["ETA", "MOST_PARAMS", "Linear", "Step"]

ETA = {scheme: EPSILON**order for scheme, order in ORDER.items()}  # difference steps over |θ_j|
ERROR = {scheme: EPSILON ** (2 * order) for scheme, order in ORDER.items()}  # of the columns of J, relative
MOST_PARAMS = 20
UPPER = np.triu(np.ones((MOST_PARAMS, MOST_PARAMS)))
CLEAR = 10.0  # singular values must be so far above what counts as zero
TINY = float(np.finfo(np.float64).tiny)


class Step(NamedTuple):
    """A step p; gain is its predicted reduction of the cost, norm is ‖D p‖."""

    p: np.ndarray
    gain: float
    norm: float
    damping: float


class Linear:
    """J and r at one point.

    Parameters
    ----------
    curve : Curve
    point : Point
    how : (scheme, steps)
        How J is computed.
    block : Block
        Is overwritten.
    last : Linear or None
        The point before: D is the running maximum of the norms of the columns.
    """

    def __init__(
        self, curve: Curve, point: Point, how: tuple[str, Sequence[float]], block: Block, last: "Linear | None"
    ) -> None:
        self.d: list[float]
        curve.fill(point, *how, block)
        self.block, self.point, self.how = block, point, how
        n = len(point.theta)
        self.top = top = dgeqrf(block.array, lwork=32 * n)[0][:n]  # below its diagonal are parts of Q
        rows = top.tolist()
        *columns, z = zip(*rows, strict=True)
        self.norms = norms = [math.hypot(*column[: j + 1]) for j, column in enumerate(columns)]
        if not sum(norms) < math.inf:
            raise UnusualError("J is not finite")
        self.d = d = norms if last is None else list(map(max, norms, last.d))
        self.gain = 0.5 * sum(map(mul, z, z))
        p: list[float] = []
        try:
            for i in range(n - 1, -1, -1):  # R p = -z
                row = rows[i]
                p.insert(0, -(z[i] + sum(map(mul, row[i + 1 : n], p))) / row[i])
        except ZeroDivisionError as error:
            raise UnusualError("J is singular") from error
        self.p = np.array(p)
        self.norm = math.hypot(*map(mul, d, p))
        self.r_norm = math.sqrt(2 * point.cost)
        self.s: list[float] = []

    @property
    def triangle(self) -> np.ndarray:
        """R, shape (n, n)."""
        n = len(self.d)
        return self.top[:, :n] * UPPER[:n, :n]

    def decompose(self) -> None:
        """Find s, s², s w with w = Uᵀz, and D⁻¹V."""
        d = np.array(self.d)
        u, s, vt, info = dgesdd(self.triangle / d)
        if info or not s[-1] > len(d) * EPSILON * s[0]:
            raise UnusualError("J is singular")
        self.turn = vt.T / d[:, None]
        self.s, self.s2 = s.tolist(), (s * s).tolist()
        self.sw = (self.top[:, -1].dot(u) * s).tolist()

    def within(self, radius: float, guess: float) -> Step:
        """Return the step within a radius (:func:`lmfit_gpu.linear.base.secular_step`)."""
        if self.norm <= (1 + RADIUS_WITHIN) * radius:
            return Step(self.p, self.gain, self.norm, 0.0)
        if not self.s:
            self.decompose()
        norm, slope = self._length(0.0)
        low = (norm - radius) / -slope
        high = math.hypot(*self.sw) / max(radius, TINY)
        damping = guess
        for _ in range(SECULAR_ITERATIONS):
            if not low < damping < high:
                damping = max(1e-3 * high, math.sqrt(low * high))
            norm, slope = self._length(damping)
            excess = norm - radius
            if abs(excess) <= RADIUS_WITHIN * radius or slope == 0:
                break
            low, high = (damping, high) if excess > 0 else (low, damping)
            damping -= norm / radius * excess / slope
        q = [sw / (s2 + damping) for sw, s2 in zip(self.sw, self.s2, strict=True)]
        gain = 0.5 * sum([a * (2 * sw - s2 * a) for a, sw, s2 in zip(q, self.sw, self.s2, strict=True)])
        return Step(-self.turn.dot(q), gain, math.hypot(*q), damping)

    def _length(self, damping: float) -> tuple[float, float]:
        """Return ‖D p(λ)‖ and its derivative by λ."""
        squares = slopes = 0.0
        for sw, s2 in zip(self.sw, self.s2, strict=True):
            shifted = s2 + damping
            q2 = (sw / shifted) ** 2
            squares += q2
            slopes += q2 / shifted
        norm = math.sqrt(squares)
        return norm, -slopes / norm if norm > 0 else 0.0

    def solve(self, damping: float, b: np.ndarray) -> np.ndarray:
        """Return (JᵀJ + λD²)⁻¹ b, shape (n,)."""
        if damping == 0:
            return dpotrs(self.top[:, :-1], b)[0]
        return self.turn.dot([a / (s2 + damping) for a, s2 in zip(b.dot(self.turn).tolist(), self.s2, strict=True)])

    def scaled(self, vector: np.ndarray) -> float:
        """Return ‖D v‖."""
        return math.hypot(*map(mul, self.d, vector.tolist()))

    def steps(self, curve: Curve, theta: np.ndarray, scheme: str) -> list[float]:
        """Return difference steps at a point near this one (:mod:`lmfit_gpu.differences`)."""
        r_norm, eta = self.r_norm, ETA[scheme]
        noise = min(EPSILON * (curve.target_norm + r_norm) / NOISE, MATTERS * r_norm)
        return [max(eta * (abs(at) or r_norm / a), noise / a) for at, a in zip(theta.tolist(), self.norms, strict=True)]

    def rounding(self, curve: Curve) -> float:
        """Return the size of ‖δr‖ by rounding (:func:`lmfit_gpu.termination.rounding_of_residual`)."""
        terms = math.hypot(*map(mul, self.norms, self.point.theta.tolist()))
        return EPSILON * (curve.target_norm + self.r_norm + terms)

    def error(self, curve: Curve) -> float:
        """Return the relative error of the columns of J."""
        scheme, steps = self.how
        if scheme == "user":
            return 0.0
        return max(ERROR[scheme], EPSILON * (curve.target_norm + self.r_norm) / min(map(mul, steps, self.norms)))

    def trusted(self, curve: Curve) -> bool:
        """Return whether the Gauss-Newton step is known well enough to stop on: κ of the column-scaled J says so."""
        s, _ = self.unscaled
        return bool(s[-1] > CLEAR * self.error(curve) * s[0] and EPSILON * s[0] <= TRUSTED_ERROR * s[-1])

    def cosine(self) -> float:
        """Return max_j |J_jᵀr| / (‖J_j‖‖r‖)."""
        gradient = self.top[:, -1].dot(self.triangle).tolist()
        return max(map(abs, map(truediv, gradient, self.norms))) / (self.r_norm or 1.0)

    @cached_property
    def unscaled(self) -> tuple[np.ndarray, np.ndarray]:
        """Singular values of the column-scaled R, and N⁻¹V with N the norms of the columns."""
        norms = np.array(self.norms)
        _, s, vt, info = dgesdd(self.triangle / norms)
        if info:
            raise UnusualError("no singular value decomposition")
        return s, vt.T / norms[:, None]

    def estimable(self) -> Estimable:
        """Return what the data determine: everything, J having full rank here."""
        s, turn = self.unscaled
        n = len(s)
        none, units = np.zeros(n, dtype=bool), 1 / np.array(self.norms)
        return Estimable(turn / s, np.zeros((n, 0)), units, float(s[0] / s[-1]), none)

    def covariance(self) -> np.ndarray:
        """Return (JᵀJ)⁻¹, shape (n, n)."""
        s, turn = self.unscaled
        half = turn / s
        return half.dot(half.T)
