r"""Where a parameter may lie: points of parameter space drawn from the bounds and from scales of the data.

A parameter with two finite bounds is drawn from its box, evenly, or evenly in its logarithm where the box has one
sign and spans decades. Of any other nothing is known but what a model could do with it, and that the columns of X and
y tell:

=============  ====================================================  =======================================
it could be    drawn                                                 from
=============  ====================================================  =======================================
a rate         ± log-uniform, and uniform                            0.1/range .. π/spacing of a column of X
a coefficient  ± log-uniform                                         range⁻³ .. range⁻²
a position     uniform                                               least .. largest of a column
a width        log-uniform                                           spacing/2 .. 2 range
a level        ± log-uniform                                         range of y, its extremes, a decade more
a number       ± log-uniform                                         0.01 .. 100
nothing new    normal                                                the given start, its size or 1 as σ
=============  ====================================================  =======================================

Which of these a parameter is taken for is drawn as well: two coordinates of one scrambled Sobol sequence a parameter,
one for the kind and one for the value. A single bound is respected by reflection: l − d becomes l + d.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import ndtri
from scipy.stats import qmc

from lmfit_gpu.warning_filters import warnings_here

__all__ = ["Scales", "draw"]

MOST_COLUMNS = 8  # columns of X whose scales are used, spread over all
MOST_SOBOL = 1000  # coordinates; beyond, plain random numbers (SciPy's sequence ends at 21,201)
DECADES = 2.0  # a box of one sign and this ratio of its ends, in decades, is drawn in the logarithm
INSIDE = 1e-12  # Sobol coordinates 0 and 1 have no normal quantile

# Kinds with the share of the candidates each gets.
KINDS = {
    "rate": 0.22,
    "negative rate": 0.08,
    "frequency": 0.12,
    "coefficient": 0.04,
    "negative coefficient": 0.04,
    "position": 0.17,
    "width": 0.12,
    "level": 0.03,
    "negative level": 0.02,
    "number": 0.06,
    "negative number": 0.02,
    "near": 0.08,
}


@dataclass(frozen=True)
class Scales:
    """Sizes that the data suggest.

    Parameters
    ----------
    columns : ndarray, shape (k, 3)
        Least value, range and mean spacing of the columns of X that vary.
    levels : tuple of (low, high)
        Sizes of y, a decade wider; (0.01, 100) without y.
    """

    columns: np.ndarray
    levels: tuple[float, float]

    @classmethod
    def of(cls, X: torch.Tensor, y: torch.Tensor | None) -> "Scales":
        """Read the scales from data.

        Parameters
        ----------
        X : Tensor, shape (n_samples, ...)
        y : Tensor, shape (n_samples,) or (n_samples, n_outputs), or None
        """
        features = X.reshape(X.shape[0], -1)
        chosen = np.unique(np.linspace(0, features.shape[1] - 1, MOST_COLUMNS).round().astype(int))
        columns = [_column(features[:, int(j)]) for j in chosen]
        varying = [column for column in columns if column is not None] or [(0.0, 1.0, 0.1)]
        return cls(np.array(varying), (0.01, 100.0) if y is None else _levels(y))


def _column(values: torch.Tensor) -> tuple[float, float, float] | None:
    distinct = np.unique(values.double().cpu().numpy())
    distinct = distinct[np.isfinite(distinct)]
    width = float(np.ptp(distinct)) if len(distinct) else 0.0
    if not 0 < width < math.inf:
        return None
    return float(distinct[0]), width, width / (len(distinct) - 1)


def _levels(y: torch.Tensor) -> tuple[float, float]:
    values = y.double().cpu().numpy().ravel()
    values = values[np.isfinite(values)]
    if values.size == 0:
        return 0.01, 100.0
    sizes = np.abs([np.ptp(values), values.min(), values.max(), values.mean()])
    sizes = sizes[(sizes > 0) & np.isfinite(sizes)]
    return (0.1 * float(sizes.min()), 10 * float(sizes.max())) if sizes.size else (0.01, 100.0)


def draw(
    given: np.ndarray, bounds: tuple[np.ndarray, np.ndarray] | None, scales: Scales, n_points: int, seed: int
) -> np.ndarray:
    """Return candidate starts, the same for the same arguments.

    Parameters
    ----------
    given : ndarray, shape (n_params,)
        The start the user gave.
    bounds : (lower, upper), each ndarray (n_params,), or None
        ±inf: no bound.
    scales : Scales
    n_points : int
        A power of two keeps the sequence balanced.
    seed : int

    Returns
    -------
    ndarray, shape (n_points, n_params)
        All within the bounds.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> scales = Scales.of(torch.linspace(0, 10, 11), None)
    >>> points = draw(np.ones(2), (np.array([2.0, -np.inf]), np.array([3.0, 0.0])), scales, 8, seed=0)
    >>> points.shape, bool(((points[:, 0] >= 2) & (points[:, 0] <= 3)).all()), bool((points[:, 1] <= 0).all())
    ((8, 2), True, True)
    """
    n = len(given)
    u = _unit_points(2 * n, n_points, seed)
    kinds, values = u[:, :n], u[:, n:]
    lower, upper = bounds if bounds is not None else (np.full(n, -np.inf), np.full(n, np.inf))
    points = np.empty((n_points, n))
    for j in range(n):
        if np.isfinite(lower[j]) and np.isfinite(upper[j]):
            points[:, j] = _in_box(values[:, j], lower[j], upper[j])
        else:
            guesses = _guessed(kinds[:, j], values[:, j], float(given[j]), scales)
            guesses = np.where(guesses < lower[j], 2 * lower[j] - guesses, guesses)
            points[:, j] = np.where(guesses > upper[j], 2 * upper[j] - guesses, guesses)
    return np.clip(points, lower, upper)  # rounding of the box transforms


def _unit_points(n_coordinates: int, n_points: int, seed: int) -> np.ndarray:
    if n_coordinates > MOST_SOBOL:
        return np.random.default_rng(seed).random((n_points, n_coordinates))
    with warnings_here("ignore", UserWarning):  # a number of points that is no power of two is less balanced
        return qmc.Sobol(n_coordinates, seed=seed).random(n_points)


def _in_box(u: np.ndarray, lower: float, upper: float) -> np.ndarray:
    if lower > 0 and math.log10(upper) - math.log10(lower) >= DECADES:
        return np.exp(math.log(lower) + u * (math.log(upper) - math.log(lower)))
    if upper < 0 and math.log10(-lower) - math.log10(-upper) >= DECADES:
        return -_in_box(u, -upper, -lower)
    return lower * (1 - u) + upper * u


def _guessed(kind: np.ndarray, u: np.ndarray, given: float, scales: Scales) -> np.ndarray:
    """Return a parameter's guesses: each candidate's kind, then its column of X, then its value."""
    edges = np.cumsum(list(KINDS.values()))
    which = np.minimum(np.searchsorted(edges, kind * edges[-1], side="right"), len(KINDS) - 1)
    within = (kind * edges[-1] - (edges - list(KINDS.values()))[which]) / np.array(list(KINDS.values()))[which]
    column = np.minimum((within * len(scales.columns)).astype(int), len(scales.columns) - 1)
    least, width, spacing = scales.columns[column].T
    with np.errstate(all="ignore"):  # a range near the ends of float64: what overflows is no candidate
        of_kind = {
            "rate": _log_uniform(u, 0.1 / width, np.pi / spacing),
            "frequency": u * np.pi / spacing,
            "coefficient": _log_uniform(u, width**-3 / 3, 3 * width**-2),
            "position": least + u * width,
            "width": _log_uniform(u, spacing / 2, 2 * width),
            "level": _log_uniform(u, *scales.levels),
            "number": _log_uniform(u, 0.01, 100.0),
            "near": given + max(abs(given), 1.0) * ndtri(np.clip(u, INSIDE, 1 - INSIDE)),
        }
    guesses = np.empty_like(u)
    for i, name in enumerate(KINDS):
        sign = -1 if name.startswith("negative") else 1
        guesses[which == i] = sign * of_kind[name.removeprefix("negative ")][which == i]
    return np.where(np.isfinite(guesses), guesses, given)


def _log_uniform(u: np.ndarray, low: float | np.ndarray, high: float | np.ndarray) -> np.ndarray:
    return np.exp(np.log(low) + u * (np.log(high) - np.log(low)))
