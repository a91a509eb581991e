r"""A numpy function on all rows at once, and blocks of [J r] filled by differences of it.

The differences are those of :mod:`lmfit_gpu.differences`. What they must show is checked where it costs little: at the
start every 2-point column changes in at least half of its rows; in every 3-point column f(θ + h) − 2 f(θ) + f(θ − h)
is small beside f(θ + h) − f(θ − h). Curvature gives a ratio of h, 1e-5; a value rounded to δ gives δ/h: a model that
rounds (float32 inside, a table, an inner solver) does not pass.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lmfit_gpu.models import CALL_ERRORS

__all__ = ["Block", "Curve", "Point", "RefusedError", "UnusualError"]

SHOWS = 0.5  # share of the rows whose value a difference step must change
STRAIGHT = 1e-3  # most ‖second difference‖ over ‖first‖ of a 3-point column
FLOAT64 = np.dtype(np.float64)


class UnusualError(Exception):
    """What this path does not decide; the general engine does."""


class RefusedError(Exception):
    """What f or jac raised is the cause of this."""


class Point(NamedTuple):
    """A place where f was evaluated."""

    theta: np.ndarray  # (n,)
    values: np.ndarray  # (m,)
    r: np.ndarray  # (m,) weighted
    cost: float


class Block:
    """Memory of [J r], shape (m, n + 1), by columns."""

    __slots__ = ("array", "columns", "jacobian", "r")

    def __init__(self, m: int, n: int) -> None:
        self.array = np.empty((m, n + 1), order="F")
        self.jacobian = self.array[:, :n]
        *self.columns, self.r = self.array.T


class Curve:
    r"""A numpy function f(x, \*params) and the data it is fitted to.

    Parameters
    ----------
    f : callable
    x : ndarray
        f gets a read-only view.
    y : ndarray, shape (m,), float64
    weights : ndarray, shape (m,), or None
        Factors of the residuals, √w/σ.
    jac : callable or None
        jac(x, \*params), shape (m, n).
    """

    __slots__ = ("f", "jac", "nfev", "shape", "target_norm", "weights", "x", "y")

    def __init__(self, f: Callable, x: np.ndarray, y: np.ndarray, weights: Any = None, jac: Any = None) -> None:
        self.f, self.jac, self.y, self.weights, self.shape = f, jac, y, weights, y.shape
        self.x = x.view()
        self.x.flags.writeable = False
        scaled = y if weights is None else weights * y
        self.target_norm = math.sqrt(scaled.dot(scaled))
        self.nfev = 0

    def at(self, theta: np.ndarray, r: np.ndarray) -> Point:
        """Evaluate f, whose values may stand on memory that f uses again, and write the residuals into `r`."""
        self.nfev += 1
        try:
            values = self.f(self.x, *theta)
        except CALL_ERRORS as error:
            raise RefusedError from error
        if type(values) is not np.ndarray or values.dtype != FLOAT64 or values.shape != self.shape:
            raise UnusualError("f does not return float64 values (m,)")
        np.subtract(values, self.y, r)
        if self.weights is not None:
            r *= self.weights
        return Point(theta, values, r, 0.5 * float(r.dot(r)))

    def change(self, theta: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return the weighted change of f from `values`, shape (m,)."""
        self.nfev += 1
        try:
            moved = self.f(self.x, *theta)
        except CALL_ERRORS as error:
            raise RefusedError from error
        difference = moved - values
        return difference if self.weights is None else difference * self.weights

    def fill(self, point: Point, scheme: str, steps: Sequence[float], block: Block) -> None:
        """Write J at a point by the user's function or by differences with the given steps, and r."""
        if scheme == "2-point":
            self._forward(point, steps, block.columns)
        elif scheme == "3-point":
            self._central(point, steps, block.columns)
        else:
            self._user(point.theta, block.jacobian)
        if self.weights is not None:
            for column in block.columns:
                column *= self.weights
        if point.r is not block.r:
            block.r[...] = point.r

    def _user(self, theta: np.ndarray, jacobian: np.ndarray) -> None:
        try:
            found = self.jac(self.x, *theta)
        except CALL_ERRORS as error:
            raise RefusedError from error
        if type(found) is not np.ndarray or found.dtype != FLOAT64 or found.shape != jacobian.shape:
            raise UnusualError("jac does not return float64 values (m, n)")
        jacobian[...] = found

    def _forward(self, point: Point, steps: Sequence[float], columns: list[np.ndarray]) -> None:
        f, x, values, subtract = self.f, self.x, point.values, np.subtract
        moved = list(point.theta)
        for j, at in enumerate(moved):
            column = columns[j]
            moved[j] = above = at + steps[j]
            try:
                changed = f(x, *moved)
            except CALL_ERRORS as error:
                raise RefusedError from error
            subtract(changed, values, column)
            column /= above - at
            moved[j] = at
        self.nfev += len(moved)

    def _central(self, point: Point, steps: Sequence[float], columns: list[np.ndarray]) -> None:
        f, x, values, subtract = self.f, self.x, point.values, np.subtract
        moved = list(point.theta)
        for j, at in enumerate(moved):
            column = columns[j]
            moved[j] = above = at + steps[j]
            try:
                subtract(f(x, *moved), values, column)
                moved[j] = below = at - steps[j]
                behind = values - f(x, *moved)
            except CALL_ERRORS as error:
                raise RefusedError from error
            moved[j] = at
            second = column - behind
            column += behind
            if not second.dot(second) <= (STRAIGHT / 2) ** 2 * column.dot(column) or not shows(column):
                raise UnusualError("first and second differences do not go together")
            column /= above - below
        self.nfev += 2 * len(moved)


def shows(column: np.ndarray) -> bool:
    """Return whether a difference step changed most of the values."""
    return bool(np.count_nonzero(column) >= SHOWS * len(column))
