r"""The data of a curve as :func:`curve_fit` takes them: what they are, which rows count, and how sure y is.

Three layouts of xdata, for M values of ydata:

=========  ===================================  =======================================================
layout     xdata                                the model sees
=========  ===================================  =======================================================
rows       (M,) or (M, 1)                       (c,): blocks of rows
columns    (k, M)                               (k, c): blocks of columns
whole      anything else, such as an object     all of it at once, as it was given
=========  ===================================  =======================================================

A covariance matrix C = L Lᵀ of y makes :math:`\chi^2 = r^T C^{-1} r = \|L^{-1} r\|^2`: it couples all rows, so the
layout is whole; a diagonal C is the same as standard deviations.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lmfit_gpu.arguments import SIZE_OF_SIGMA

__all__ = ["CurveData", "as_numbers", "read_data"]

SYMMETRIC_RTOL = 1e-8
ROWS_SHOWN = 5


@dataclass(frozen=True)
class CurveData:
    """Clean data.

    Parameters
    ----------
    x : ndarray or Tensor of any shape, or object
    y : ndarray or Tensor, shape (M,)
    layout : {"rows", "columns", "whole"}
    sigma : float or ndarray (M,), or None
        Standard deviations.
    cholesky : ndarray, shape (M, M), or None
        L of the covariance matrix of y.
    keep : ndarray of bool, shape (M_given,), or None
        Which values of the model count, where its x could not be cut to the rows that do.
    """

    x: Any
    y: Any
    layout: str
    sigma: Any = None
    cholesky: np.ndarray | None = None
    keep: np.ndarray | None = None


def read_data(xdata: Any, ydata: Any, sigma: Any, policy: str, works: Callable[[Any, int], bool]) -> CurveData:
    """Read the data of a curve.

    Parameters
    ----------
    xdata : array_like or object
    ydata : array_like, shape (M,), (M, 1) or ()
    sigma : None, float, array_like of shape (M,) or (M, M)
    policy : {"check", "raise", "omit", "ignore"}
        For what is not finite: an error; an error for NaN; leave the row out; let the model see x.
    works : callable (x, M) -> bool
        Whether the model gives M values for an x; asked only where x is no array.

    Raises
    ------
    ValueError
        For data that are no numbers, do not fit each other, or are not finite.
    """
    y = as_numbers("ydata", ydata)
    if y.ndim > 2 or (y.ndim == 2 and y.shape[1] != 1):
        raise ValueError(f"ydata: got shape {tuple(y.shape)}; (M,) is expected")
    if y.ndim != 1:
        y = y.reshape(-1)
    m = y.shape[0]
    if m == 0:
        raise ValueError("ydata: got no values; it must not be empty")
    x = _read_x(xdata, m, works)
    data = CurveData(x, y, _layout(x, m))
    if sigma is not None:
        data = _with_errors(data, sigma, drops=policy == "omit")
    if not (_is_finite(y) and _is_finite(x) and (data.sigma is None or policy != "omit" or _is_finite(data.sigma))):
        data = _without_rows(data, policy)
    return data if data.cholesky is None else _factored(data)


def as_numbers(name: str, data: Any) -> Any:
    """Return data as an array in float64 (complex128), masked values as NaN; a tensor stays what it is.

    Raises
    ------
    ValueError
        If they are no numbers.
    """
    if type(data) is np.ndarray and data.dtype == np.float64:
        return data
    if isinstance(data, torch.Tensor):
        return data if data.is_floating_point() or data.is_complex() else data.double()
    try:
        if isinstance(data, np.ma.MaskedArray):
            kind = complex if data.dtype.kind == "c" else float
            return np.ma.filled(data.astype(kind), np.nan)
        array = np.asarray(data)
        return array.astype(complex if array.dtype.kind == "c" else float, copy=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: got {type(data).__name__} that is no array of numbers: {error}") from error


def _read_x(xdata: Any, m: int, works: Callable[[Any, int], bool]) -> Any:
    if isinstance(xdata, np.ndarray | torch.Tensor | list | tuple):
        return as_numbers("xdata", xdata)
    array = _array_or_none(xdata)
    if array is None:
        return xdata
    if array.shape in ((m,), (m, 1)):  # a Series, a table of one column, a range: the model may want more of it
        return array if works(array, m) or not works(xdata, m) else xdata
    return xdata if works(xdata, m) else array


def _array_or_none(data: Any) -> np.ndarray | None:
    if data is None:
        return None
    try:
        array = as_numbers("xdata", data)
    except ValueError:
        return None
    return array if array.ndim else None


def _layout(x: Any, m: int) -> str:
    if not isinstance(x, np.ndarray | torch.Tensor) or _is_complex(x):
        return "whole"
    shape = tuple(x.shape)
    if shape in ((m,), (m, 1)):
        return "rows"
    return "columns" if len(shape) == 2 and shape[1] == m and shape[0] > 0 else "whole"


def _is_complex(array: Any) -> bool:
    return array.is_complex() if isinstance(array, torch.Tensor) else array.dtype.kind == "c"


def _is_finite(values: Any) -> bool:
    if isinstance(values, np.ndarray):
        squares = np.vdot(values, values).real  # one product tells, unless it overflows
        return math.isfinite(squares) or bool(np.isfinite(values).all())
    return not isinstance(values, torch.Tensor) or bool(torch.isfinite(values).all())


def _with_errors(data: CurveData, sigma: Any, drops: bool) -> CurveData:
    """Return data with standard deviations (`sigma`), or a covariance matrix still to be factored (both fields)."""
    if isinstance(sigma, torch.Tensor):
        sigma = sigma.detach().cpu().numpy()
    errors = as_numbers("sigma", sigma)
    m = data.y.shape[0]
    if errors.dtype.kind == "c":
        raise ValueError("sigma: got complex numbers; standard deviations or their covariance matrix are real")
    if errors.size == 1:
        return replace(data, sigma=float(_positive(errors.reshape(1), False)[0]))
    if errors.shape in ((m,), (m, 1)):
        return replace(data, sigma=_positive(errors.reshape(-1), drops))
    if errors.shape != (m, m):
        raise ValueError(f"sigma: has incorrect shape {errors.shape}; (), ({m},) or ({m}, {m}) is expected")
    if _is_complex(data.y):
        raise ValueError("sigma: a covariance matrix goes with real ydata; fit real and imaginary parts as one vector")
    return replace(data, sigma=errors, cholesky=errors)


def _positive(sigma: np.ndarray, drops: bool) -> np.ndarray:
    right = (sigma > 1 / SIZE_OF_SIGMA) & (sigma < SIZE_OF_SIGMA)
    if drops:
        right |= ~np.isfinite(sigma)
    if not right.all():
        rows = np.flatnonzero(~right)[:ROWS_SHOWN].tolist()
        raise ValueError(f"sigma: got {sigma[rows].tolist()} in rows {rows}; numbers in (1e-100, 1e100) are expected")
    return sigma


def _without_rows(data: CurveData, policy: str) -> CurveData:
    """Return data without the rows that are not finite, or raise; "ignore" leaves them for the model to see."""
    only_nan = policy == "raise"
    bad_y, bad_x = _broken(data.y, only_nan), _broken_rows(data, only_nan)
    if policy == "raise" and (bad_y.any() or (bad_x is not None and bad_x.any())):
        raise ValueError(f"The input contains nan values: {_places(bad_x, bad_y)}; nan_policy='omit' leaves rows out")
    if policy == "check":
        places = _places(bad_x, bad_y)
        raise ValueError(f"{places}: NaN, inf or masked values; nan_policy='omit' leaves such rows out")
    if policy != "omit":
        return data if bad_x is None or not bad_x.any() else replace(data, layout="whole")
    keep = ~bad_y
    if bad_x is not None:
        if bad_x.shape != keep.shape:
            raise ValueError(f"xdata: has NaN or inf, and its shape {tuple(data.x.shape)} has no axis of rows to omit")
        keep &= ~bad_x
    if isinstance(data.sigma, np.ndarray) and data.cholesky is None:
        keep &= np.isfinite(data.sigma)
    if not keep.any():
        raise ValueError("xdata, ydata: no row is finite")
    return _cut(data, keep)


def _broken(values: Any, only_nan: bool) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        return (torch.isnan(values) if only_nan else ~torch.isfinite(values)).cpu().numpy()
    return np.isnan(values) if only_nan else ~np.isfinite(values)


def _broken_rows(data: CurveData, only_nan: bool) -> np.ndarray | None:
    """Return which rows of x are broken, one entry if x has no axis of rows, or None when x is no array."""
    if not isinstance(data.x, np.ndarray | torch.Tensor):
        return None
    broken, m = _broken(data.x, only_nan), data.y.shape[0]
    if data.layout == "rows":
        return broken.reshape(m)
    if broken.ndim and broken.shape[-1] == m:
        return np.any(broken, axis=tuple(range(broken.ndim - 1)), keepdims=False).reshape(m)
    return np.array([broken.any()])


def _places(bad_x: np.ndarray | None, bad_y: np.ndarray) -> str:
    found = []
    for name, bad in (("xdata", bad_x), ("ydata", bad_y)):
        if bad is not None and bad.any():
            rows = np.flatnonzero(bad)
            found.append(f"{name} in {len(rows)} places, first in rows {rows[:ROWS_SHOWN].tolist()}")
    return ", ".join(found)


def _cut(data: CurveData, keep: np.ndarray) -> CurveData:
    """Return the rows to keep; where x cannot be cut, the mask is left for the model's values."""
    sigma, cholesky = data.sigma, data.cholesky
    if cholesky is not None:
        sigma = cholesky = cholesky[np.ix_(keep, keep)]
    elif isinstance(sigma, np.ndarray):
        sigma = sigma[keep]
    data = replace(data, y=_taken(data.y, keep), sigma=sigma, cholesky=cholesky)
    if data.layout == "rows":
        return replace(data, x=_taken(data.x.reshape(-1), keep))
    if isinstance(data.x, np.ndarray | torch.Tensor) and data.x.shape[-1:] == keep.shape:
        return replace(data, x=_taken(data.x, keep))
    return replace(data, keep=keep)


def _taken(array: Any, keep: np.ndarray) -> Any:
    return array[..., torch.from_numpy(keep) if isinstance(array, torch.Tensor) else keep]


def _factored(data: CurveData) -> CurveData:
    """Return data with the Cholesky factor of their covariance matrix, or with sigma when it is diagonal."""
    covariance, variances = data.sigma, np.diagonal(data.sigma)
    size = np.abs(covariance).max()
    if not size < np.inf or np.abs(covariance - covariance.T).max() > SYMMETRIC_RTOL * size:
        raise ValueError("sigma: the covariance matrix of ydata must be finite and symmetric")
    try:
        cholesky = np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError as error:
        raise ValueError("`sigma` must be positive definite: it is read as the covariance matrix of ydata") from error
    if np.count_nonzero(covariance) == np.count_nonzero(variances):
        return replace(data, sigma=np.sqrt(variances), cholesky=None)
    return replace(data, sigma=None, cholesky=cholesky, layout="whole")
