"""Confidence regions of two parameters: contours of a map of the cost, ellipses, and traces."""

from typing import Any

import numpy as np
from scipy.interpolate import RectBivariateSpline

from lmfit_gpu.plotting.axes import BLUE, percent

__all__ = ["draw_regions", "ellipse", "traces_of"]

EDGE_POINTS = 181
FINE = 200  # points along each side of a map that is drawn


def draw_regions(ax: Any, found: Any, line: dict[str, Any]) -> Any:
    """Draw the contours of a map at its levels, the regions within them shaded, and return the contour set.

    Parameters
    ----------
    ax : Axes
    found : ProfileMap
    line : dict
        Keywords of a line; those that contours have.
    """
    by_height = sorted(found.levels.items(), key=lambda pair: pair[1])
    heights = [float(np.sqrt(threshold)) for _, threshold in by_height]
    grid = _finer(*(np.asarray(part, dtype=float) for part in (found.x, found.y, found.zeta2)))
    style = {"color": BLUE, "linewidth": 1.6, **line}
    colour = style.pop("color")
    for height in heights:
        ax.contourf(*grid, levels=[-1.0, height], colors=[colour], alpha=0.5 / (1 + len(heights)))
    contours = ax.contour(*grid, levels=heights, colors=[colour], alpha=style.pop("alpha", None))
    contours.set(**style)
    texts = {height: percent(level) for height, (level, _) in zip(heights, by_height, strict=True)}
    ax.clabel(contours, fmt=texts, fontsize="small")
    return contours


def _finer(x: np.ndarray, y: np.ndarray, zeta2: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a map of √ζ² on a grid fine enough for straight edges between its points.

    By bicubic splines through ln(1 + ζ²): smooth at the minimum, where √ζ² has a point, and tame far from it. As it is,
    where places are missing, or too few for a cubic.
    """
    if np.isfinite(zeta2).all() and min(zeta2.shape) > 3:
        spline = RectBivariateSpline(y, x, np.log1p(np.clip(zeta2, 0.0, None)))
        x, y = (np.linspace(part[0], part[-1], FINE) for part in (x, y))
        zeta2 = np.expm1(spline(y, x))
    return x, y, np.ma.masked_invalid(np.sqrt(np.clip(zeta2, 0.0, None)))


def ellipse(centre: np.ndarray, covariance: np.ndarray, threshold: float) -> np.ndarray:
    """Return the edge of (b − centre)ᵀ C⁻¹ (b − centre) ≤ threshold, shape (2, k).

    Parameters
    ----------
    centre : ndarray, shape (2,)
    covariance : ndarray, shape (2, 2)
        C; may be singular.
    threshold : float

    Examples
    --------
    >>> edge = ellipse(np.zeros(2), np.diag([4.0, 1.0]), 9.0)
    >>> edge.max(axis=1)
    array([6., 3.])
    """
    angle = np.linspace(0, 2 * np.pi, EDGE_POINTS)
    scale = np.sqrt(np.diag(covariance))
    safe = np.where(scale > 0, scale, 1.0)
    values, vectors = np.linalg.eigh(covariance / np.outer(safe, safe))  # of numbers near 1, whatever the units
    root = safe[:, None] * vectors * np.sqrt(np.clip(values, 0.0, None))
    edge: np.ndarray = centre[:, None] + np.sqrt(threshold) * root @ np.array([np.cos(angle), np.sin(angle)])
    return edge


def traces_of(found: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return where y is best for each x of the map, and where x is best for each y, each of shape (2, k).

    Between the points of the grid by the parabola through the three lowest; places whose lowest point is on the edge
    of the map are left out.
    """
    x, y, zeta2 = (np.asarray(part, dtype=float) for part in (found.x, found.y, found.zeta2))
    first = [(x[j], best) for j in range(len(x)) if (best := _lowest(y, zeta2[:, j])) is not None]
    second = [(best, y[i]) for i in range(len(y)) if (best := _lowest(x, zeta2[i])) is not None]
    return tuple(np.array(part, dtype=float).reshape(-1, 2).T for part in (first, second))  # type: ignore[return-value]


def _lowest(at: np.ndarray, heights: np.ndarray) -> float | None:
    if not np.isfinite(heights).any():
        return None
    k = int(np.nanargmin(heights))
    if k in (0, len(at) - 1) or not np.isfinite(heights[k - 1 : k + 2]).all():
        return None
    bend, slope, _ = np.polyfit(at[k - 1 : k + 2] - at[k], heights[k - 1 : k + 2], 2)
    return float(at[k] - slope / (2 * bend)) if bend > 0 else float(at[k])
