r"""Maps of two parameters: the least cost over all others, and the joint region of a level.

.. math:: \zeta^2(a, b) = \frac{S(a, b) - \hat S}{s^2} \le 2\, F(\text{level}; 2, \text{dof})

(χ² of two degrees of freedom with absolute sigma) is the joint region (Bates and Watts (1988), section 6.1.2). Its
extent along one parameter is where the profile of that parameter reaches the same threshold: the default limits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import chdtri, fdtri

from lmfit_gpu.held_fits import HeldFits, Point, Request
from lmfit_gpu.profiles import check_profile, error_on_bound, followed, profiled_names
from lmfit_gpu.result import t_quantile
from lmfit_gpu.solution import Solution

__all__ = ["ProfileMap", "profile_map"]

ROOM = 1.15  # of the extent of the largest region
WALD = 3.0  # standard errors, where a profile has no end


@dataclass(frozen=True)
class ProfileMap:
    """The least cost over all other parameters, on a grid of two.

    Parameters
    ----------
    name_x, name_y : str
    x : ndarray, shape (p,)
    y : ndarray, shape (q,)
    cost, zeta2 : ndarray, shape (q, p)
        NaN where the fit did not converge.
    levels : dict of float to float
        Level to threshold of ζ².
    estimate : ndarray, shape (2,)
    covariance : ndarray, shape (2, 2)
        Of the two estimates: what the ellipse of a linear model is made of.
    theta : ndarray, shape (q, p, n_params)
        All parameters of each fit.
    """

    name_x: str
    name_y: str
    x: np.ndarray = field(repr=False)
    y: np.ndarray = field(repr=False)
    cost: np.ndarray = field(repr=False)
    zeta2: np.ndarray = field(repr=False)
    levels: Mapping[float, float]
    estimate: np.ndarray
    covariance: np.ndarray = field(repr=False)
    theta: np.ndarray = field(repr=False)

    def plot(self, ax: Any = None, **kwargs: Any) -> Any:
        """Draw the regions (:class:`lmfit_gpu.plotting.ProfileDisplay`)."""
        from lmfit_gpu.plotting import ProfileDisplay

        return ProfileDisplay.from_profile(self, ax=ax, **kwargs)


def profile_map(
    solution: Solution,
    names: tuple[str, str],
    levels: Sequence[float],
    shape: tuple[int, int],
    limits: Any = None,
) -> ProfileMap:
    """Return the map of two parameters.

    Parameters
    ----------
    solution : Solution
    names : (name_x, name_y)
    levels : sequence of float
    shape : (p, q)
        Points along x and y.
    limits : ((low, high), (low, high)), optional

    Raises
    ------
    ValueError
        For names, levels, shapes and limits that make no map.
    """
    check_profile(solution)
    result = solution.result
    i, j = profiled_names(result, names)
    if i == j:
        raise ValueError(f"name_y: got {names[1]!r} twice; two parameters are expected")
    dof = np.inf if result.absolute_sigma else float(result.dof)
    thresholds = {float(level): threshold_of(level, dof) for level in levels}
    if not thresholds:
        raise ValueError("levels: got none; at least one number between 0 and 1 is expected")
    sizes = list(shape)
    if len(sizes) != 2 or any(not isinstance(k, (int, np.integer)) or k < 3 for k in sizes):
        raise ValueError(f"shape: got {shape!r}; two whole numbers >= 3 are expected")
    fits = HeldFits(solution)
    if limits is None:
        ranges = _default_limits(fits, (i, j), max(thresholds.values()))
    else:
        ranges = _checked(solution, (i, j), limits)
    x, y = (np.linspace(*ends, size) for ends, size in zip(ranges, sizes, strict=True))
    points = _fitted(fits, (i, j), x, y)
    fits.warn_of_better(3)
    cost = np.array([[point.cost if point.converged else np.nan for point in row] for row in points])
    factor = result.factor
    covariance = np.full((2, 2), np.nan)
    if factor is not None:
        pair = factor[[i, j]] * result.s2**0.5
        covariance = pair @ pair.T
    return ProfileMap(
        name_x=names[0],
        name_y=names[1],
        x=x,
        y=y,
        cost=cost,
        zeta2=np.maximum(2 * (cost - result.cost), 0.0) / result.s2,
        levels=thresholds,
        estimate=result.theta[[i, j]].copy(),
        covariance=covariance,
        theta=np.array([[point.theta for point in row] for row in points]),
    )


def threshold_of(level: float, dof: float) -> float:
    """Return the threshold of ζ² for two parameters together.

    Examples
    --------
    >>> round(threshold_of(0.95, float("inf")), 3), round(threshold_of(0.95, 10), 3)
    (5.991, 8.206)
    """
    t_quantile(level, 1.0)  # checks the level
    return float(chdtri(2, 1 - level)) if dof == np.inf else 2 * float(fdtri(2, dof, level))


def _checked(solution: Solution, pair: tuple[int, int], limits: Any) -> list[tuple[float, float]]:
    found = np.asarray(limits, dtype=float)
    if found.shape != (2, 2) or not np.isfinite(found).all() or not (found[:, 0] < found[:, 1]).all():
        raise ValueError(f"limits: got {limits!r}; ((low, high), (low, high)) of x and y are expected")
    constraints = solution.setup.constraints
    for (low, high), index in zip(found, pair, strict=True):
        if constraints is not None and (low < constraints.lower[index] or high > constraints.upper[index]):
            raise ValueError(
                f"limits: got ({low:g}, {high:g}) of {solution.result.names[index]!r}, outside its bounds "
                f"({constraints.lower[index]:g}, {constraints.upper[index]:g})"
            )
    return [(float(low), float(high)) for low, high in found]


def _default_limits(fits: HeldFits, pair: tuple[int, int], threshold: float) -> list[tuple[float, float]]:
    found = []
    solution = fits.solution
    result, constraints = solution.result, solution.setup.constraints
    for profile, index in zip(followed(fits, pair, threshold**0.5, np.nan), pair, strict=True):
        ends = []
        error = error_on_bound(solution, index) if np.isnan(profile.stderr) else profile.stderr
        error = error if np.isfinite(error) else abs(profile.estimate) or 1.0
        for end, sign in zip(profile.interval, (-1, 1), strict=True):
            end = end if np.isfinite(end) else profile.estimate + sign * WALD * threshold**0.5 * error
            end = profile.estimate + ROOM * (end - profile.estimate)
            if constraints is not None:
                end = float(np.clip(end, constraints.lower[index], constraints.upper[index]))
            ends.append(end)
        found.append((ends[0], ends[1]))
        if not ends[0] < ends[1]:
            raise ValueError(f"limits: {result.names[index]!r} has no room between its bounds; give limits")
    return found


def _fitted(fits: HeldFits, pair: tuple[int, int], x: np.ndarray, y: np.ndarray) -> list[list[Point]]:
    """Return the points of a grid, ring by ring from the estimate; each starts from its neighbour further in."""
    result = fits.solution.result
    centre = [int(np.abs(axis - result.theta[k]).argmin()) for axis, k in zip((x, y), pair, strict=True)]
    found: dict[tuple[int, int], Point] = {}
    cells = [(row, column) for row in range(len(y)) for column in range(len(x))]
    rings = {cell: max(abs(cell[0] - centre[1]), abs(cell[1] - centre[0])) for cell in cells}
    for ring in range(max(rings.values()) + 1):
        some = [cell for cell in cells if rings[cell] == ring]
        points = fits.fit([Request(pair, _start(found, cell, centre, result.theta, (pair, x, y))) for cell in some])
        found |= dict(zip(some, points, strict=True))
    return [[found[row, column] for column in range(len(x))] for row in range(len(y))]


def _start(
    found: Mapping[tuple[int, int], Point],
    cell: tuple[int, int],
    centre: Sequence[int],
    estimate: np.ndarray,
    grid: tuple[tuple[int, int], np.ndarray, np.ndarray],
) -> np.ndarray:
    """Return where the fit of a cell starts: the neighbour towards the centre, extrapolated from the one before it."""
    (i, j), x, y = grid
    row, column = cell
    step = (int(np.sign(centre[1] - row)), int(np.sign(centre[0] - column)))
    inner, before = (found.get((row + k * step[0], column + k * step[1])) for k in (1, 2))
    theta = estimate.copy() if inner is None or not inner.converged else inner.theta.copy()
    if inner is not None and before is not None and inner.converged and before.converged:
        theta = 2 * inner.theta - before.theta
    theta[i], theta[j] = x[column], y[row]
    return theta
