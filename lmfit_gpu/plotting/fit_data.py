"""What a curve is drawn through: the data of a fit or of a user, points between them, sigma there."""

from typing import Any

import numpy as np

from lmfit_gpu.plotting.axes import plain_array

__all__ = ["columns_of", "data_of", "fine_grid", "had_sigma", "knows_noise", "sigma_between", "spread_sigma"]

DECADES = 100.0  # positive x that span a factor beyond this are drawn evenly on a logarithmic axis too


def columns_of(values: np.ndarray) -> np.ndarray:
    """Return values (n,) or (n, n_outputs) as (n, n_outputs)."""
    return values if values.ndim == 2 else values.reshape(-1, 1)


def fine_grid(x: np.ndarray, n_points: int) -> np.ndarray:
    """Return points that cover the range of x evenly, on a linear axis and, where it makes sense, on a logarithmic one.

    Parameters
    ----------
    x : ndarray, shape (n,)
    n_points : int
        >= 2.

    Returns
    -------
    ndarray, shape (n_points,)
        Evenly spaced, ends included. Half of them in the logarithm, where all x are positive and span more than two
        decades.

    Examples
    --------
    >>> fine_grid(np.array([0.0, 4.0]), 5)
    array([0., 1., 2., 3., 4.])
    """
    known = x[np.isfinite(x)]
    if not len(known):
        raise ValueError("X: got no finite number; a curve needs a range to be drawn over")
    low, high = float(np.min(known)), float(np.max(known))
    if low == high:  # one place: a curve a little to both sides
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    if not (low > 0 and high > DECADES * low):
        return np.linspace(low, high, n_points)
    in_logarithm = np.geomspace(low, high, n_points // 2 + 1)
    evenly = np.linspace(low, high, n_points - n_points // 2 + 1)
    return np.sort(np.concatenate([in_logarithm[:-1], evenly[1:]]))


def data_of(estimator: Any, X: Any, y: Any, sigma: Any) -> dict[str, Any]:
    """Return what is drawn of the data: range (of the curve), x, y, sigma, and the name of x."""
    names = getattr(estimator, "feature_names_in_", None)
    name = str(names[0]) if names is not None and len(names) == 1 else "x"
    kept = getattr(estimator, "_data", None)
    if y is not None and X is None:
        raise ValueError("X: y is given without it")
    if sigma is not None and y is None:
        raise ValueError("sigma: given without X and y; that of the fit is drawn by itself")
    given = None if X is None else _one_column(X)
    if y is not None:
        if sigma is not None:
            sigma = spread_sigma(sigma, plain_array(y, "y"))
        return {"range": given, "x": given, "y": y, "sigma": sigma, "x_name": name}
    if kept is None and given is None:
        raise ValueError(
            "X: the estimator holds no data (a pickle or a saved file has none); give X and y, "
            "or X for a curve without data"
        )
    if kept is None:
        return {"range": given, "x": None, "y": None, "sigma": None, "x_name": name}
    x = _one_column(kept.X)
    sigma = None if kept.weights is None or kept.weights.sigma is None else plain_array(kept.weights.sigma, "sigma")
    if kept.y is None:
        raise ValueError("y: the fit had none, so there are no data to draw; ConvergenceDisplay needs none")
    return {"range": x if given is None else given, "x": x, "y": kept.y, "sigma": sigma, "x_name": name}


def knows_noise(estimator: Any) -> bool:
    """Return whether a fit tells the size of the noise of an observation: one s² for all residuals."""
    result = estimator.result_
    linear = str(result.used.get("loss", "linear")).startswith("linear")
    return linear and result.sandwich is None and (result.factor is None or bool(np.isfinite(result.s2)))


def had_sigma(estimator: Any) -> bool:
    """Return whether a fit was given standard deviations."""
    return "sigma" in estimator.result_.used


def _one_column(X: Any) -> np.ndarray:
    X = plain_array(X, "X")
    if X.ndim != 2 or X.shape[1] != 1:
        many = f"{X.shape[1]} features" if X.ndim == 2 else f"an array of shape {X.shape}"
        raise ValueError(
            f"X: got {many}; a curve is drawn over one, (n_samples, 1). ResidualDisplay shows fits of several features"
        )
    return X[:, 0]


def spread_sigma(sigma: Any, y: np.ndarray) -> np.ndarray:
    """Return sigma in the shape of y: one for all, one a row, or one a value."""
    sigma = plain_array(sigma, "sigma")
    if sigma.shape not in {(), y.shape[:1], y.shape}:
        raise ValueError(f"sigma: got shape {sigma.shape}; {y.shape[:1]} or {y.shape} is expected")
    return np.broadcast_to(sigma[:, None] if sigma.ndim == 1 and y.ndim == 2 else sigma, y.shape)


def sigma_between(grid: np.ndarray, x: np.ndarray, sigma: np.ndarray) -> np.ndarray:
    """Return sigma on the grid: linear between the rows, their mean where several share x."""
    sigma = columns_of(sigma)
    places, which = np.unique(x, return_inverse=True)
    counts = np.bincount(which)
    found = np.column_stack([np.interp(grid, places, np.bincount(which, s) / counts) for s in sigma.T])
    return found if found.shape[1] > 1 else found[:, 0]
