"""Whether a fit is one for :mod:`lmfit_gpu.compact`, and the attempt to make it there.

An attempt answers, or it leaves everything as it was and the general engine starts from the beginning: a fit is tried
here only if nothing was asked that the short path does not have, and believed only if it went cleanly to convergence.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lmfit_gpu.backends import backend_name
from lmfit_gpu.compact import Answer, Curve, Limits, UnusualError, has_size, minimize
from lmfit_gpu.compact.linear import MOST_PARAMS
from lmfit_gpu.models import NumpyFunction
from lmfit_gpu.preparation import CPU, Data, Setup, is_module, resolved_start, squeezes, start_given
from lmfit_gpu.result import Result
from lmfit_gpu.rows import LEAST_TARGET, ArrayRows, Weights, as_tensor
from lmfit_gpu.termination import Tolerances

__all__ = ["Attempt", "attempt", "tiny_curve_fit"]

SCHEMES = {"auto": "differences", "differences": "differences", "3-point": "3-point"}
USUAL = {  # options with the values that the short path knows
    "residual": (None,),
    "predict_fn": (None,),
    "solver": ("auto", "qr"),
    "devices": ("auto", "cpu", CPU),
    "dtype": (None,),
    "chunk_rows": ("auto",),
    "damping": ("trust-region",),
    "callback": (None,),
    "bounds": (None,),
    "fixed": ((), None),
    "tied": (None,),
    "loss": ("linear",),
    "covariance": ("classical",),
    "early_stopping": (None, False),
    "verbose": (0, False),
}
COMPARABLE = (str, int, torch.device, type(None), tuple)  # without asking an array what it equals
USUAL_LIMITS = Limits()
NAMES = tuple(f"p{j}" for j in range(MOST_PARAMS))
REAL = "fiub"  # kinds of dtype that are real numbers


@dataclass(frozen=True)
class Attempt:
    """A fit that may be made on the short path.

    Parameters
    ----------
    setup : Setup
        What an estimator keeps.
    curve : Curve
    theta : ndarray, shape (n_params,)
    limits : Limits
    n_observed : float
        Rows counted with their frequencies.
    """

    setup: Setup
    curve: Curve
    theta: np.ndarray
    limits: Limits
    n_observed: float

    def minimize(self) -> Result | None:
        """Return the result, or None when the general engine must fit."""
        names = self.setup.model.names
        try:
            result = minimize(self.curve, self.theta, self.limits, names).result(names)
        except UnusualError:
            return None
        return replace(result, n_observed=self.n_observed) if self.n_observed > result.rank else None


def attempt(options: Any, data: Data) -> Attempt | None:
    """Return the attempt that a fit allows, or None.

    Parameters
    ----------
    options : object with the attributes of an :class:`LMRegressor`
        Checked by it.
    data : Data
        Checked; tensors and more outputs than one are not for this path.

    Raises
    ------
    ValueError, TypeError
        As :func:`lmfit_gpu.parameters.resolve_start`.
    """
    X, y = data.X, data.y
    scheme = "user" if callable(options.jac) else SCHEMES.get(options.jac)
    if scheme is None or not _is_usual(options) or not _is_plain(X, 2) or not _is_plain(y, 1):
        return None
    p0 = start_given(options)
    if options.model is None or is_module(options) or p0 is None or isinstance(p0, str) or callable(p0):
        return None
    squeeze = squeezes(options, X, False)
    x = np.ascontiguousarray(X[:, 0], dtype=np.float64) if squeeze else np.asarray(X, dtype=np.float64)
    target = np.ascontiguousarray(y, dtype=np.float64)
    start = resolved_start(options, options.model, (x, target))
    theta, names, order = start.theta, start.names, start.order
    if order == "theta" or not has_size(len(target), len(theta)):
        return None
    limits = Tolerances.resolve(options.ftol, options.xtol, options.gtol, torch.float64)
    model = NumpyFunction(options.model, names)
    rows = ArrayRows(as_tensor(X[:0]), None, squeeze=squeeze)
    setup = Setup(model, model, rows, torch.from_numpy(theta.copy()), (CPU,), (), predicts_whole=False)
    curve = Curve(options.model, x, target, _factors(data.weights), options.jac if callable(options.jac) else None)
    frequency = None if data.weights is None else data.weights.frequency
    n_observed = len(target) if frequency is None else float(frequency.sum())
    allowed = Limits(limits.ftol, limits.xtol, limits.gtol, options.max_iter, scheme)
    return Attempt(setup, curve, theta, allowed, n_observed)


def _factors(weights: Weights | None) -> np.ndarray | None:
    """Return √w/σ, shape (n_samples,)."""
    if weights is None:
        return None
    if weights.frequency is None:
        return None if weights.sigma is None else 1 / weights.sigma.numpy()
    root: np.ndarray = weights.frequency.numpy() ** 0.5
    return root if weights.sigma is None else root / weights.sigma.numpy()


def _is_usual(options: Any) -> bool:
    given = ((getattr(options, name, values[0]), values) for name, values in USUAL.items())
    known = all(isinstance(value, COMPARABLE) and value in values for value, values in given)
    return known and backend_name(options.backend, CPU) == "scipy"


def _is_plain(array: Any, ndim: int) -> bool:
    return isinstance(array, np.ndarray) and array.ndim == ndim and array.dtype.kind in REAL


def tiny_curve_fit(  # noqa: PLR0913
    f: Callable[..., Any],
    xdata: Any,
    ydata: Any,
    p0: Sequence[float] | np.ndarray,
    *,
    weights: np.ndarray | None = None,
    jac: Callable[..., Any] | None = None,
    limits: Limits | None = None,
) -> Answer | None:
    r"""Fit without an estimator, or return None: not a case for the short path, or bad arguments.

    Parameters
    ----------
    f : callable
        f(xdata, \*params) in numpy.
    xdata : array_like
        Reaches `f` as float64, in the shape given, read-only.
    ydata : array_like, shape (m,)
    p0 : sequence of float
    weights : ndarray, shape (m,), optional
        Factors of the residuals, √w/σ.
    jac : callable, optional
        jac(xdata, \*params), shape (m, n).
    limits : Limits, optional
    """
    if not isinstance(p0, (list, tuple, np.ndarray)) or isinstance(xdata, torch.Tensor):
        return None
    x, y = np.asarray(xdata), np.asarray(ydata)
    if x.dtype.kind not in REAL or not _is_plain(y, 1) or not x.ndim:
        return None
    x, y = np.asarray(x, dtype=np.float64), np.ascontiguousarray(y, dtype=np.float64)
    try:
        theta = np.array(p0, dtype=np.float64)
    except (TypeError, ValueError):  # the general path says what is wrong
        return None
    if theta.ndim != 1 or not has_size(len(y), len(theta)) or len(y) not in (x.shape[0], x.shape[-1]):
        return None
    if not (y.max() >= LEAST_TARGET or y.min() <= -LEAST_TARGET):
        return None
    # In y and p0 what is not finite shows in the residuals; in x a function may hide it.
    if not math.isfinite(x.sum()) or backend_name("auto", CPU) != "scipy":
        return None
    try:
        return minimize(Curve(f, x, y, weights, jac), theta, limits or USUAL_LIMITS, NAMES[: len(theta)])
    except UnusualError:
        return None
