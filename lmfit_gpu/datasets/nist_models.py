"""The 27 NIST nonlinear regression models, each written once for numpy and for torch.

A *body* is ``f(xp, x, b1, ..., bk)``: `xp` is the array namespace (it must have ``exp``, ``cos``, ``sin``,
``arctan`` and ``pi``), `x` the predictor, 1-D of shape (n_obs,) or, with two predictors (Nelson),
(n_obs, 2), and ``b1 ... bk`` the scalar parameters; it returns the prediction, shape (n_obs,). `NistModel`
closes a body over a namespace, which gives the callable ``f(x, b1, ..., bk)`` that `LMRegressor` and
`scipy.optimize.curve_fit` take. The formulas are NIST's, in NIST's order of operations.

Outside their domain the bodies return what the namespace returns (nan or inf, in numpy with a
RuntimeWarning): Bennett5 for ``b2 + x < 0``, the exponentials where they overflow.

The bodies are private and without annotations: every argument after `xp` is an array or a number of whatever
namespace `xp` is.

References
----------
NIST/ITL Statistical Reference Datasets, nonlinear regression,
https://www.itl.nist.gov/div898/strd/nls/nls_main.shtml
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy
import torch

__all__ = ["BODIES", "NistModel"]

_NAMESPACES = {"numpy": numpy, "torch": torch}


class NistModel:
    """Evaluate one NIST model with one array library, as ``f(x, b1, ..., bk)``.

    An object and not ``functools.partial(body, numpy)``, because a module can be neither pickled nor
    deep-copied, and `sklearn.base.clone` deep-copies the model of an estimator.

    Parameters
    ----------
    body : callable
        ``f(xp, x, b1, ..., bk)``, a function at the top level of its module.
    namespace : {"numpy", "torch"}
        The array library of `x`.

    Examples
    --------
    >>> import inspect
    >>> import numpy as np
    >>> model = NistModel(BODIES["BoxBOD"], "numpy")
    >>> str(inspect.signature(model))
    '(x, b1, b2)'
    >>> model(np.array([0.0, 1.0]), 200.0, 0.5).round(6).tolist()
    [0.0, 78.693868]
    """

    def __init__(self, body: Callable[..., Any], namespace: str) -> None:
        self.body = body
        self.namespace = namespace
        without_xp = list(inspect.signature(body).parameters.values())[1:]
        self.__signature__ = inspect.Signature(without_xp)

    def __call__(self, x: Any, *params: Any) -> Any:
        """Return the prediction at `x`, shape (n_obs,)."""
        return self.body(_NAMESPACES[self.namespace], x, *params)

    def __repr__(self) -> str:
        return f"<NIST model {self.body.__name__.lstrip('_')}{self.__signature__} for {self.namespace}>"


def _exponential_rise(xp, x, b1, b2):
    return b1 * (1 - xp.exp(-b2 * x))


def _exponential_over_linear(xp, x, b1, b2, b3):
    return xp.exp(-b1 * x) / (b2 + b3 * x)


def _three_exponentials(xp, x, b1, b2, b3, b4, b5, b6):
    return b1 * xp.exp(-b2 * x) + b3 * xp.exp(-b4 * x) + b5 * xp.exp(-b6 * x)


def _two_gaussians_on_decay(xp, x, b1, b2, b3, b4, b5, b6, b7, b8):
    baseline = b1 * xp.exp(-b2 * x)
    return baseline + b3 * xp.exp(-((x - b4) ** 2) / b5**2) + b6 * xp.exp(-((x - b7) ** 2) / b8**2)


def _power(xp, x, b1, b2):
    return b1 * x**b2


def _misra1b(xp, x, b1, b2):
    return b1 * (1 - (1 + b2 * x / 2) ** (-2))


def _misra1c(xp, x, b1, b2):
    return b1 * (1 - (1 + 2 * b2 * x) ** (-0.5))


def _misra1d(xp, x, b1, b2):
    return b1 * b2 * x * ((1 + b2 * x) ** (-1))


def _quadratic_over_quadratic(xp, x, b1, b2, b3, b4, b5):
    return (b1 + b2 * x + b3 * x**2) / (1 + b4 * x + b5 * x**2)


def _cubic_over_cubic(xp, x, b1, b2, b3, b4, b5, b6, b7):
    return (b1 + b2 * x + b3 * x**2 + b4 * x**3) / (1 + b5 * x + b6 * x**2 + b7 * x**3)


def _nelson(xp, x, b1, b2, b3):
    time, temperature = x[:, 0], x[:, 1]
    return b1 - b2 * time * xp.exp(-b3 * temperature)


def _two_exponentials_and_constant(xp, x, b1, b2, b3, b4, b5):
    return b1 + b2 * xp.exp(-x * b4) + b3 * xp.exp(-x * b5)


def _roszman1(xp, x, b1, b2, b3, b4):
    return b1 - b2 * x - xp.arctan(b3 / (x - b4)) / xp.pi


def _enso(xp, x, b1, b2, b3, b4, b5, b6, b7, b8, b9):
    year, second, third = 2 * xp.pi * x / 12, 2 * xp.pi * x / b4, 2 * xp.pi * x / b7
    annual = b1 + b2 * xp.cos(year) + b3 * xp.sin(year)
    return annual + b5 * xp.cos(second) + b6 * xp.sin(second) + b8 * xp.cos(third) + b9 * xp.sin(third)


def _mgh09(xp, x, b1, b2, b3, b4):
    return b1 * (x**2 + x * b2) / (x**2 + x * b3 + b4)


def _mgh10(xp, x, b1, b2, b3):
    return b1 * xp.exp(b2 / (x + b3))


def _gaussian_peak(xp, x, b1, b2, b3):
    return (b1 / b2) * xp.exp(-0.5 * ((x - b3) / b2) ** 2)


def _logistic(xp, x, b1, b2, b3):
    return b1 / (1 + xp.exp(b2 - b3 * x))


def _generalised_logistic(xp, x, b1, b2, b3, b4):
    return b1 / ((1 + xp.exp(b2 - b3 * x)) ** (1 / b4))


def _bennett5(xp, x, b1, b2, b3):
    return b1 * (b2 + x) ** (-1 / b3)


#: The body of each problem, in NIST's order: by level of difficulty, and within a level as NIST's page lists it.
BODIES: dict[str, Callable[..., Any]] = {
    "Misra1a": _exponential_rise,
    "Chwirut2": _exponential_over_linear,
    "Chwirut1": _exponential_over_linear,
    "Lanczos3": _three_exponentials,
    "Gauss1": _two_gaussians_on_decay,
    "Gauss2": _two_gaussians_on_decay,
    "DanWood": _power,
    "Misra1b": _misra1b,
    "Kirby2": _quadratic_over_quadratic,
    "Hahn1": _cubic_over_cubic,
    "Nelson": _nelson,
    "MGH17": _two_exponentials_and_constant,
    "Lanczos1": _three_exponentials,
    "Lanczos2": _three_exponentials,
    "Gauss3": _two_gaussians_on_decay,
    "Misra1c": _misra1c,
    "Misra1d": _misra1d,
    "Roszman1": _roszman1,
    "ENSO": _enso,
    "MGH09": _mgh09,
    "Thurber": _cubic_over_cubic,
    "BoxBOD": _exponential_rise,
    "Rat42": _logistic,
    "MGH10": _mgh10,
    "Eckerle4": _gaussian_peak,
    "Rat43": _generalised_logistic,
    "Bennett5": _bennett5,
}
