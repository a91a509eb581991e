r"""Curve fitting with SciPy's calling convention, on this engine.

::

    start and bounds      p0, as SciPy guesses it where it is not given
    data                  curve_data: numbers, rows that count, errors of y
    keywords              scipy_keywords: SciPy's names for options of LMRegressor
    fit                   LMRegressor, of a model on rows or of a residual over all data (curve_functions)
    answers               popt, pcov; curve_output: infodict, mesg, ier

``docs/scipy.md`` lists each behaviour of SciPy's function beside the one here, and why some differ.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lmfit_gpu.arguments import SIZE_OF_SIGMA
from lmfit_gpu.attempt import tiny_curve_fit
from lmfit_gpu.curve_data import CurveData, read_data
from lmfit_gpu.curve_functions import WholeCurve, of_columns, stacked, with_stacked_output, with_stacked_rows
from lmfit_gpu.curve_output import evaluated, exit_code, jacobian, pivoted_qr, residual
from lmfit_gpu.estimator import LMRegressor
from lmfit_gpu.exceptions import CovarianceWarning, FitWarning
from lmfit_gpu.models import CALL_ERRORS
from lmfit_gpu.parameters import call_signature
from lmfit_gpu.report import not_estimated
from lmfit_gpu.result import Result
from lmfit_gpu.scipy_keywords import fit_options
from lmfit_gpu.warning_filters import warnings_here

__all__ = ["curve_fit"]

UNBOUNDED = (-np.inf, np.inf)
METHODS = (None, "lm", "trf", "dogbox")
NAN_POLICIES = (None, "raise", "omit")


def curve_fit(  # noqa: PLR0913
    f: Callable[..., Any],
    xdata: Any,
    ydata: Any,
    p0: Any = None,
    sigma: Any = None,
    absolute_sigma: bool = False,
    check_finite: bool | None = None,
    bounds: Any = UNBOUNDED,
    method: str | None = None,
    jac: str | Callable[..., Any] | None = None,
    *,
    full_output: bool = False,
    nan_policy: str | None = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    r"""Fit a function to data by nonlinear least squares, called as :func:`scipy.optimize.curve_fit` is.

    Minimises :math:`\chi^2 = r^T C^{-1} r`, r = f(x, θ) − y, C the covariance matrix of y.

    Parameters
    ----------
    f : callable
        ``f(x, a, b, ...)`` in numpy or torch, or ``f(x, theta)``.
    xdata : array_like of shape (M,) or (k, M), or any object
        `f` gets it as it is given, arrays and lists in float64; one column (M, 1) reaches it as (M,).
    ydata : array_like, shape (M,) or (M, 1), or a number
        A number stands for M equal ones. Complex values are fitted with their real and imaginary parts stacked.
    p0 : array_like of shape (n,), dict, "auto" or callable, optional
        Start values. Default: 1 for each parameter of the signature; between its bounds, or 1 inside the only one.
    sigma : float, array_like of shape (M,) or (M, M), optional
        Standard deviations of ydata, or their covariance matrix C.
    absolute_sigma : bool, default False
        Whether sigma has the unit of ydata; else pcov is scaled so that χ²/(M − n) = 1.
    check_finite : bool, optional
        Refuse data that are not finite. Default: True when nan_policy is None.
    bounds : (lower, upper), :class:`scipy.optimize.Bounds` or dict of name to (lower, upper)
        Numbers or arrays of shape (n,).
    method : {None, "lm", "trf", "dogbox"}
        The engine is the same; "lm" refuses bounds and M < n, and its numbers `ier` and entries of `infodict` are
        those of MINPACK. Default: "lm" without bounds, else "trf".
    jac : str or callable, optional
        ``jac(x, a, b, ...)`` → (M, n), or a name as in :class:`LMRegressor`; None is "auto".
    full_output : bool, default False
        Return infodict, mesg and ier as well.
    nan_policy : {None, "raise", "omit"}
        What to do about NaN: "omit" leaves rows out where x, y or sigma is not finite (masked entries too).
    **kwargs
        Options of :class:`LMRegressor` (solver, backend, devices, max_iter, fixed, tied, loss, ...) and keywords of
        ``leastsq`` and ``least_squares`` (:mod:`lmfit_gpu.scipy_keywords`).

    Returns
    -------
    popt : ndarray, shape (n,)
    pcov : ndarray, shape (n, n)
        (JᵀC⁻¹J)⁻¹, times χ²/(M − n) unless `absolute_sigma`; infinite on the diagonal for parameters that the data do
        not determine.
    infodict : dict, with full_output
        ``nfev``, evaluations of f over all data, differences included; ``fvec``, the residuals over sigma or L⁻¹r;
        with "lm" also ``fjac``, ``ipvt``, ``qtf``: the pivoted QR factors of ∂fvec/∂θ at popt.
    mesg : str, with full_output
    ier : int, with full_output
        1 to 4: which stop test was met.

    Raises
    ------
    RuntimeError
        If the fit has not converged; the message has the best point.
    ValueError
        For bad arguments or data.
    TypeError
        For keywords that are unknown or have no meaning here, and for fewer values than parameters with "lm".

    Warns
    -----
    CovarianceWarning
        A :class:`scipy.optimize.OptimizeWarning`: some standard errors cannot be estimated.
    FitWarning
        For `absolute_sigma` without sigma: standard deviations of 1 are taken.

    Examples
    --------
    >>> import numpy as np
    >>> from lmfit_gpu import curve_fit
    >>> x = np.linspace(0, 4, 25)
    >>> popt, pcov = curve_fit(lambda x, a, b: a * np.exp(-b * x), x, 2.5 * np.exp(-1.3 * x), p0=[1, 1])
    >>> popt.round(6).tolist()
    [2.5, 1.3]
    """
    usual = method in (None, "lm") and nan_policy in NAN_POLICIES and check_finite in (None, True, False)
    if usual and not (kwargs or full_output) and bounds is UNBOUNDED:
        tiny = _tiny(f, (xdata, ydata), p0, (sigma, absolute_sigma), jac)
        if tiny is not None:
            return tiny
    bounds = None if bounds is UNBOUNDED else _bounds(bounds)
    start, n_params = _start(p0, f, bounds)
    is_minpack = _is_minpack(method, bounds)
    policy = _finite_policy(check_finite, nan_policy)
    options: dict[str, Any] = {}
    if kwargs:
        options, jac = fit_options(kwargs, n_params, jac)
    if method == "lm" and options.get("loss", "linear") != "linear":
        raise ValueError("method='lm' supports only the linear loss; leave method out, or use 'trf' or 'dogbox'")
    data = read_data(xdata, ydata, sigma, policy, lambda x, m: _works(f, x, start, m))
    if method == "lm" and n_params is not None:
        _check_enough(data, n_params)
    if absolute_sigma and sigma is None:
        warnings.warn("absolute_sigma=True without sigma: standard deviations of 1 are taken", FitWarning, stacklevel=2)
    curve = _assembled(f, data, start, jac, n_params)
    est = CurveRegressor(**curve.model, bounds=bounds, absolute_sigma=bool(absolute_sigma), **options)
    est.fit(curve.X, curve.y, sigma=1.0 if absolute_sigma and curve.sigma is None else curve.sigma)
    if not est.result_.success:
        raise RuntimeError(f"Optimal parameters not found: {est.result_.message}. Best point: {est.theta_.tolist()}")
    popt, pcov = est.theta_, est.covariance_
    if pcov is None or not np.isfinite(pcov).all():
        missing = not_estimated(est.result_)
        if missing:
            message = f"Covariance of the parameters could not be estimated: {missing}"
            warnings.warn(message, CovarianceWarning, stacklevel=2)
    if pcov is None:
        pcov = np.full((len(popt), len(popt)), np.inf)
    if not full_output:
        return popt, pcov
    infodict = _infodict(est, curve, len(popt) if n_params is None else n_params, is_minpack)
    return popt, pcov, infodict, est.result_.message, exit_code(est.result_.status, is_minpack)


def _tiny(
    f: Callable[..., Any], data: tuple[Any, Any], p0: Any, noise: tuple[Any, bool], jac: Any
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return popt and pcov of a plain fit by the short path, or None: the general one checks and fits."""
    sigma, absolute = noise
    if (jac is not None and not callable(jac)) or (sigma is None and absolute):
        return None
    if any(isinstance(values, np.ma.MaskedArray) for values in (*data, sigma)):
        return None
    weights = None
    if sigma is not None:
        sigma = np.asarray(sigma)
        plain = sigma.dtype.kind in "fiu" and sigma.size and sigma.shape == np.shape(data[1])
        if not (plain and sigma.min() > 1 / SIZE_OF_SIGMA and sigma.max() < SIZE_OF_SIGMA):
            return None
        weights = 1.0 / sigma
    answer = tiny_curve_fit(f, *data, p0, weights=weights, jac=jac)
    if answer is None:
        return None
    factor = 1.0 if absolute else 2 * answer.cost / (len(data[1]) - len(answer.theta))
    return answer.theta, answer.covariance * factor


# ---- arguments


def _bounds(bounds: Any) -> Any:
    """Return bounds as LMRegressor takes them, None if all are infinite."""
    if bounds is None:
        return None
    if isinstance(bounds, Mapping):
        limits: Any = list(bounds.values())
    elif hasattr(bounds, "lb"):
        limits = bounds = (bounds.lb, bounds.ub)
    else:
        limits = bounds
        if isinstance(bounds, str) or not hasattr(bounds, "__len__") or len(bounds) != 2:
            raise ValueError(f"bounds: got {bounds!r}; (lower, upper) is expected")
    if any(np.size(limit) == 0 for limit in limits):
        raise ValueError(f"bounds: got {bounds!r}; (lower, upper) of numbers is expected")
    try:
        finite = any(
            np.isfinite(np.asarray(limit, dtype=float)).any() for pair in limits for limit in np.atleast_1d(pair)
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"bounds: got {bounds!r}; (lower, upper) of numbers is expected") from error
    return bounds if finite else None


def _start(p0: Any, f: Callable[..., Any], bounds: Any) -> tuple[Any, int | None]:
    """Return the start as LMRegressor takes it, and the number of parameters of the model if it is known."""
    if p0 is None:
        names = call_signature(f, None)[0] or ()
        return _between(bounds, names), len(names)
    if isinstance(p0, (str, Mapping)) or callable(p0):
        return p0, _count(p0, f) if isinstance(p0, Mapping) else None
    start = np.ravel(p0.detach().cpu().numpy() if isinstance(p0, torch.Tensor) else p0)
    if start.dtype.kind == "c":
        raise ValueError(f"p0: got {p0!r}; real numbers are expected")
    return start, start.size


def _count(p0: Mapping[str, float], f: Callable[..., Any]) -> int:
    """Return the number of parameters of f; ties may have brought further names."""
    try:
        return min(len(p0), len(call_signature(f, None)[0] or p0))
    except ValueError:  # its signature does not tell
        return len(p0)


def _between(bounds: Any, names: tuple[str, ...]) -> np.ndarray:
    """Return SciPy's start: 1; within two bounds their middle; with one bound 1 inside it."""
    n = len(names)
    if bounds is None:
        return np.ones(n)
    if isinstance(bounds, Mapping):
        pairs = [bounds.get(name) or UNBOUNDED for name in names]
        lower, upper = ([np.nan if v is None else v for v in side] for side in zip(*pairs, strict=True))
    else:
        lower, upper = bounds
    low, high = (np.asarray(side, dtype=float) for side in (lower, upper))
    if any(side.shape not in ((), (n,)) for side in (low, high)):
        raise ValueError(
            f"bounds: got shapes {low.shape} and {high.shape} for {n} parameters; () or ({n},) is expected"
        )
    low, high = (np.broadcast_to(side, n) for side in (low, high))
    has_low, has_high = np.isfinite(low), np.isfinite(high)
    start = np.where(has_low, low + 1, np.where(has_high, high - 1, 1.0))
    both = has_low & has_high
    start[both] = low[both] / 2 + high[both] / 2
    return start


def _is_minpack(method: str | None, bounds: Any) -> bool:
    """Return whether SciPy would call MINPACK."""
    if method not in METHODS:
        raise ValueError(f"method: got {method!r}; None, 'lm', 'trf' or 'dogbox' is expected")
    if method == "lm" and bounds is not None:
        raise ValueError(
            "method='lm' only works for unconstrained problems; leave method out, or use 'trf' or 'dogbox'"
        )
    return method == "lm" or (method is None and bounds is None)


def _finite_policy(check_finite: bool | None, nan_policy: str | None) -> str:
    if nan_policy == "propagate":
        raise ValueError("`nan_policy='propagate'` is not supported by this function.")
    if nan_policy not in NAN_POLICIES:
        raise ValueError(f"nan_policy must be one of {{None, 'raise', 'omit'}}; got {nan_policy!r}")
    if check_finite or (check_finite is None and nan_policy is None):
        return "check"
    return nan_policy or "ignore"


def _check_enough(data: CurveData, n_params: int) -> None:
    m = data.y.shape[0]
    m = 2 * m if _is_complex(data.y) else m
    if m != 1 and n_params > m:
        raise TypeError(f"The number of func parameters={n_params} must not exceed the number of data points={m}")


def _works(f: Callable[..., Any], x: Any, start: Any, m: int) -> bool:
    """Return whether f gives m values for an x that is no array, where the start is known to try it."""
    if not isinstance(start, (np.ndarray, Mapping)):
        return False
    try:
        names, order = call_signature(f, len(start))
        theta = [start[name] for name in names or start] if isinstance(start, Mapping) else start
        with warnings_here("ignore"), np.errstate(all="ignore"):
            values = f(x, np.asarray(theta)) if order == "theta" else f(x, *theta)
            return np.size(values) in (1, m) or m == 1
    except CALL_ERRORS:
        return False


def _is_complex(array: Any) -> bool:
    return array.is_complex() if isinstance(array, torch.Tensor) else array.dtype.kind == "c"


# ---- the fit


@dataclass(frozen=True)
class Curve:
    """What LMRegressor is made of and fitted to."""

    model: dict[str, Any]
    X: Any
    y: Any
    sigma: Any


def _assembled(f: Callable[..., Any], data: CurveData, start: Any, jac: Any, n_params: int | None) -> Curve:
    if data.layout == "whole":
        whole = WholeCurve(f, data, n_params)
        jac = whole.jacobian(jac) if callable(jac) else jac
        model = {"residual": whole, "p0": _named(start, whole), "jac": jac or "auto"}
        rows = np.arange(float(data.y.shape[0]))[:, None]  # the estimator counts them; the residual does not look
        X = torch.from_numpy(rows).to(data.x.device) if isinstance(data.x, torch.Tensor) else rows
        return Curve(model, X, None, None)
    y, X = data.y, data.x.reshape(-1, 1) if data.layout == "rows" else data.x.T
    if data.layout == "columns":
        f, jac = of_columns(f), of_columns(jac) if callable(jac) else jac
    if _is_complex(y):
        y, f = stacked(y), with_stacked_output(f)
        jac = with_stacked_rows(jac) if callable(jac) else jac
    return Curve({"model": f, "p0": start, "jac": "auto" if jac is None else jac}, X, y, data.sigma)


def _named(start: Any, whole: WholeCurve) -> Any:
    """Return the start of a residual callable, with the names that the signature of f gives."""
    if isinstance(start, str):
        raise ValueError(f"p0={start!r} needs xdata of shape (M,) or (k, M), and no covariance matrix; give numbers")
    start = start(whole.data.x, whole.data.y) if callable(start) else start
    names = whole.signature[0]
    if names is None:
        return start
    if not isinstance(start, Mapping):
        return dict(zip(names, np.ravel(start), strict=True))
    if set(start) != set(names):
        raise ValueError(f"p0: got names {tuple(start)}; the model has {names}")
    return {name: start[name] for name in names}


class CurveRegressor(LMRegressor):
    """An estimator that does not warn: curve_fit says it in SciPy's words."""

    _caller = "curve_fit"
    _errors_of_surrogate = True

    def _warn(self, result: Result) -> None:
        pass


def _infodict(est: LMRegressor, curve: Curve, n_params: int, is_minpack: bool) -> dict[str, Any]:
    problem, theta = evaluated(est, curve.X, curve.y, n_params)
    fvec = residual(problem, theta)
    per_row = None if curve.sigma is None else np.repeat(curve.sigma, len(fvec) // np.size(curve.sigma))
    fvec = fvec if per_row is None else fvec / per_row
    infodict = {"nfev": est.result_.nfev, "fvec": fvec}
    if is_minpack and len(fvec) >= n_params:
        J = jacobian(problem, theta, est.jac)
        infodict |= pivoted_qr(fvec, J if per_row is None else J / per_row[:, None])
    problem.close()
    return infodict
