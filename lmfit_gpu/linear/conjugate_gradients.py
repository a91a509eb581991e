r"""Conjugate gradients on backend arrays, truncated at a radius (Steihaug and Toint).

For a symmetric positive semidefinite B the iterates from x = 0 lower the model ½xᵀBx − bᵀx with every step, and their
norms grow; the first step that would leave ‖x‖ ≤ Δ is cut there (Steihaug, SIAM J. Numer. Anal. 20 (1983) 626,
doi:10.1137/0720042; Nocedal and Wright, 2nd ed., algorithms 5.2 and 7.2).

Every look at a scalar waits for the device. The scalars of ``check_every`` iterations are therefore drawn together;
where one of them says that the iteration should have ended earlier, the iterations since the last look are made again
up to that point. At the end the true residual b − Bx is formed, and the iteration goes on from there while it is
larger than the recurrence said.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import eigvalsh_tridiagonal

from lmfit_gpu.backends import Backend

__all__ = ["Limits", "Solution", "conjugate_gradients"]

RESTARTS = 3  # from the true residual
ATTAINABLE = 2.0  # times ε (‖B‖‖x‖ + ‖b‖): no residual of a computed x is smaller (Higham, 2nd ed., section 17.2)


@dataclass(frozen=True)
class Limits:
    """When to end.

    Parameters
    ----------
    radius : float
        Of ‖x‖.
    rtol : float
        Of ‖b − Bx‖ / ‖b‖.
    max_iter : int
    epsilon : float
        Rounding of the products.
    """

    radius: float = np.inf
    rtol: float = 0.0
    max_iter: int = 1000
    epsilon: float = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Solution:
    """Where the iteration ended.

    Parameters
    ----------
    x, residual : backend arrays, shape (n,)
        And b − Bx.
    norm : float
        ‖x‖.
    along, remaining : float
        bᵀx and residualᵀx.
    n_inner : int
        Products with B.
    converged, at_radius : bool
    condition : float
        Of B on the directions that b excites, by the eigenvalues of the Lanczos matrix (a lower bound); infinite when
        b is zero and nothing is known.
    """

    x: Any
    residual: Any
    norm: float
    along: float
    remaining: float
    n_inner: int
    converged: bool
    at_radius: bool
    condition: float


@dataclass(frozen=True)
class Point:
    """The vectors of the iteration, and ‖residual‖² as a scalar of the backend."""

    x: Any
    residual: Any
    direction: Any
    squares: Any


class Lanczos:
    """The tridiagonal matrix of the iteration, whose eigenvalues are those of B, roughly, and within their range."""

    def __init__(self) -> None:
        self.size = 0.0  # largest diagonal entry: ‖B‖ or a little less
        self._diagonal: list[float] = []
        self._beside: list[float] = []
        self._last = (1.0, 0.0)

    def add(self, alpha: float, beta: float) -> None:
        """Append an iteration: x moved by alpha, and beta makes the next direction."""
        last_alpha, last_beta = self._last
        self._diagonal.append(1 / alpha + last_beta / last_alpha)
        self._beside.append(beta**0.5 / alpha)
        self._last = alpha, beta
        self.size = max(self.size, self._diagonal[-1])

    def condition(self) -> float:
        """Return the ratio of the extreme eigenvalues."""
        if not self._diagonal:
            return 1.0
        values = eigvalsh_tridiagonal(np.array(self._diagonal), np.array(self._beside[:-1]))
        return float(values[-1] / values[0]) if values[0] > 0 else np.inf


def conjugate_gradients(product: Callable[[Any], Any], b: Any, backend: Backend, limits: Limits) -> Solution:
    """Solve B x = b.

    Parameters
    ----------
    product : callable (v) -> B v
        On backend arrays of shape (n,).
    b : backend array, shape (n,)
    backend : Backend
    limits : Limits
    """
    point = Point(0 * b, b, b, b @ b)
    (size,) = backend.draw(point.squares)
    if not (0 < size < np.inf):
        return Solution(point.x, b, 0.0, 0.0, 0.0, 0, size == 0, False, np.inf)
    n_inner, condition = 0, 1.0
    converged = at_radius = False
    for _ in range(1 + RESTARTS):
        lanczos = Lanczos()
        point, products, ended, at_radius = _run(product, point, backend, limits, (size**0.5, n_inner, lanczos))
        n_inner += products
        condition = max(condition, lanczos.condition())
        if at_radius or not ended:
            break
        residual = b - product(point.x)
        n_inner += 1
        point = Point(point.x, residual, residual, residual @ residual)
        squares, xx = backend.draw(point.squares, point.x @ point.x)
        if squares**0.5 <= 2 * _limit(limits, size**0.5, lanczos.size, xx**0.5):
            converged = True
            break
    xx, along, remaining = backend.draw(point.x @ point.x, b @ point.x, point.residual @ point.x)
    return Solution(point.x, point.residual, xx**0.5, along, remaining, n_inner, converged, at_radius, condition)


def _limit(limits: Limits, b_norm: float, matrix_norm: float, x_norm: float) -> float:
    return max(limits.rtol * b_norm, ATTAINABLE * limits.epsilon * (matrix_norm * x_norm + b_norm))


def _run(
    product: Callable[[Any], Any], point: Point, backend: Backend, limits: Limits, so_far: tuple[float, int, Lanczos]
) -> tuple[Point, int, bool, bool]:
    """Iterate from a point; return the last point, products made, whether it ended by itself, and at the radius."""
    b_norm, n_before, lanczos = so_far
    n_inner = 0
    while n_before + n_inner < limits.max_iter:
        start, scalars = point, []
        for _ in range(min(backend.check_every, limits.max_iter - n_before - n_inner)):
            point, looked = _advance(product, point)
            scalars += looked
        n_inner += len(scalars) // 4
        drawn = np.array(backend.draw(*scalars)).reshape(-1, 4)
        for done, (before, curvature, squares, xx) in enumerate(drawn):
            if before == 0 or not curvature > 0 or not np.isfinite(squares + xx):  # a null direction, or rounding only
                return _again(product, start, done), n_inner + done, True, False
            if xx**0.5 > limits.radius:
                last = _again(product, start, done)
                return _cut(product, last, backend, limits.radius), n_inner + done + 1, True, True
            lanczos.add(before / curvature, squares / before)
            if squares**0.5 <= _limit(limits, b_norm, lanczos.size, xx**0.5):
                if done + 1 == len(drawn):
                    return point, n_inner, True, False
                return _again(product, start, done + 1), n_inner + done + 1, True, False
    return point, n_inner, False, False


def _advance(product: Callable[[Any], Any], point: Point) -> tuple[Point, list[Any]]:
    """Return the next point and, not yet drawn: ‖residual‖² before, dᵀBd, ‖residual‖² after, ‖x‖² after."""
    bd = product(point.direction)
    curvature = point.direction @ bd
    alpha = point.squares / (curvature + (curvature == 0))
    x = point.x + alpha * point.direction
    residual = point.residual - alpha * bd
    squares = residual @ residual
    beta = squares / (point.squares + (point.squares == 0))
    return Point(x, residual, residual + beta * point.direction, squares), [point.squares, curvature, squares, x @ x]


def _again(product: Callable[[Any], Any], point: Point, iterations: int) -> Point:
    for _ in range(iterations):
        point = _advance(product, point)[0]
    return point


def _cut(product: Callable[[Any], Any], point: Point, backend: Backend, radius: float) -> Point:
    """Return the point where the line from x along the direction meets ‖x‖ = radius."""
    d = point.direction
    xx, xd, dd = backend.draw(point.x @ point.x, point.x @ d, d @ d)
    tau = (radius**2 - xx) / (xd + (xd**2 + dd * (radius**2 - xx)) ** 0.5)  # the positive root, without cancellation
    residual = point.residual - tau * product(d)
    return Point(point.x + tau * d, residual, d, residual @ residual)
