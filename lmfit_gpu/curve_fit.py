"""Curve fitting with SciPy's calling convention, on this engine."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning

from lmfit_gpu.attempt import tiny_curve_fit
from lmfit_gpu.estimator import LMRegressor
from lmfit_gpu.parameters import call_signature

__all__ = ["curve_fit"]


def curve_fit(
    f: Callable[..., Any],
    xdata: Any,
    ydata: Any,
    p0: Any = None,
    *,
    jac: str | Callable[..., Any] | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Fit a function to data by nonlinear least squares.

    Parameters
    ----------
    f : callable
        ``f(x, a, b, ...)`` in numpy or torch.
    xdata : array_like, shape (M,), (M, 1) or (k, M)
        As in SciPy, `f` gets what is given: (M,) or (k, M); one column (M, 1) reaches it as (M,).
    ydata : array_like, shape (M,) or (M, 1)
        Complex values are fitted with their real and imaginary parts stacked.
    p0 : array_like of shape (n,), or dict, optional
        Start values, default 1 for each parameter of the signature.
    jac : str or callable, optional
        As in :class:`LMRegressor`; None is "auto".
    **options
        Further options of :class:`LMRegressor`, such as ``solver`` or ``max_iter``.

    Returns
    -------
    popt : ndarray, shape (n,)
    pcov : ndarray, shape (n, n)
        s²(JᵀJ)⁻¹; infinite on the diagonal for parameters that the data do not determine.

    Raises
    ------
    RuntimeError
        If the fit has not converged; the message has the best point.
    ValueError
        For bad arguments or data.

    Warns
    -----
    CovarianceWarning
        A :class:`scipy.optimize.OptimizeWarning`: some standard errors cannot be estimated.

    Examples
    --------
    >>> import numpy as np
    >>> from lmfit_gpu import curve_fit
    >>> x = np.linspace(0, 4, 25)
    >>> popt, pcov = curve_fit(lambda x, a, b: a * np.exp(-b * x), x, 2.5 * np.exp(-1.3 * x), p0=[1, 1])
    >>> popt.round(6).tolist()
    [2.5, 1.3]
    """
    if not options and (jac is None or callable(jac)):
        answer = tiny_curve_fit(f, xdata, ydata, p0, jac=jac)
        if answer is not None:
            return answer.theta, answer.covariance * (2 * answer.cost / (len(ydata) - len(answer.theta)))
    y = _array(ydata)
    if y.ndim not in (1, 2) or (y.ndim == 2 and y.shape[1] != 1):
        raise ValueError(f"ydata: got shape {tuple(y.shape)}; (M,) is expected")
    y = y.reshape(-1)
    X, (model, jac) = _rows_first(_array(xdata), (f, jac), len(y))
    if _is_complex(y):
        y, model = _stacked(y), _with_stacked_output(model)
        jac = _with_stacked_rows(jac) if callable(jac) else jac
    if p0 is None:
        p0 = np.ones(len(call_signature(f, None)[0] or ()))
    est = LMRegressor(model, p0=p0, jac="auto" if jac is None else jac, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # raised as an error below, as SciPy does
        est.fit(X, y)
    if not est.result_.success:
        raise RuntimeError(f"Optimal parameters not found: {est.result_.message}. Best point: {est.theta_.tolist()}")
    n = len(est.theta_)
    return est.theta_, np.broadcast_to(
        np.inf, (n, n)
    ) if est.covariance_ is None else est.covariance_  # inf as in SciPy


def _array(data: Any) -> Any:
    return data if isinstance(data, torch.Tensor) else np.asarray(data)


def _is_complex(array: Any) -> bool:
    return array.is_complex() if isinstance(array, torch.Tensor) else np.iscomplexobj(array)


def _rows_first(x: Any, functions: tuple[Any, Any], n_rows: int) -> tuple[Any, tuple[Any, Any]]:
    """Return x as (n_rows, k), and the functions (f, jac) taking such rows."""
    if tuple(x.shape) in ((n_rows,), (n_rows, 1)):
        return x.reshape(-1, 1), functions
    if x.ndim != 2 or x.shape[1] != n_rows:
        expected = f"({n_rows},) or (k, {n_rows})"
        raise ValueError(f"xdata: got shape {tuple(x.shape)} for {n_rows} values of ydata; {expected} is expected")
    f, jac = functions
    return x.T, (_of_columns(f), _of_columns(jac) if callable(jac) else jac)


def _of_columns(f: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(f)
    def of_columns(rows: Any, *params: Any) -> Any:
        return f(rows[None] if rows.ndim == 1 else rows.T, *params)

    return of_columns


def _with_stacked_rows(jac: Callable[..., Any]) -> Callable[..., Any]:
    """Return jac (M, n) as (2M, n): the rows of the real and imaginary part of a value together."""

    @functools.wraps(jac)
    def stacked(x: Any, *params: Any) -> Any:
        rows = jac(x, *params)
        parts = (rows.real, rows.imag) if hasattr(rows, "imag") else (np.real(rows), np.imag(rows))
        stack = torch.stack(parts, dim=1) if isinstance(rows, torch.Tensor) else np.stack(parts, axis=1)
        return stack.reshape(-1, stack.shape[-1])

    return stacked


def _stacked(values: Any) -> Any:
    """Return complex values (M,) as (M, 2): real and imaginary parts of a row together."""
    if isinstance(values, torch.Tensor):
        return torch.stack((values.real, values.imag), dim=-1)
    return np.stack((np.real(values), np.imag(values)), axis=-1)


def _with_stacked_output(f: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(f)
    def stacked(x: Any, *params: Any) -> Any:
        return _stacked(f(x, *params))

    return stacked
