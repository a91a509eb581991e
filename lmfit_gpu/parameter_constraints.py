"""What each constructor argument of the estimator may be, in scikit-learn's terms.

scikit-learn checks arguments when ``fit`` is called, against a dict of name to allowed kinds, and words the error: "The
'alpha' parameter of LMRegressor must be a float in the range [0.0, inf). Got -1 instead." What depends on two
arguments, on the data or on the model is checked in :mod:`lmfit_gpu.arguments` and where it is used.
"""

import functools
import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds
from sklearn.utils._param_validation import Interval, Options, StrOptions

from lmfit_gpu.backends import BACKENDS
from lmfit_gpu.damping import POLICIES
from lmfit_gpu.jacobian import JACOBIANS
from lmfit_gpu.linear import SOLVERS
from lmfit_gpu.losses import LOSSES
from lmfit_gpu.sandwich import COVARIANCES

__all__ = ["PARAMETER_CONSTRAINTS", "default_arguments", "given_arguments"]

POLICY_METHODS = ("start", "propose", "accept", "reject")
EARLY_STOPPING = "an EarlyStopping with fraction between 0 and 1, patience >= 1"
DTYPES = (torch.float64, torch.float32, "float64", "float32", np.float64, np.float32)


class Number(Interval):
    """A range of numbers, to which True and False do not belong."""

    def is_satisfied_by(self, val: Any) -> bool:
        """Return whether a value is a number in the range."""
        if not isinstance(val, self.type) or isinstance(val, bool):
            return False
        return (val if self.type is numbers.Integral else float(val)) in self  # numpy has no isnan of a Fraction


class Described(Options):
    """What a predicate accepts, with the words for it."""

    def __init__(self, accepts: Callable[[Any], bool], words: str) -> None:
        super().__init__(object, set())
        self.accepts, self.words = accepts, words

    def is_satisfied_by(self, val: Any) -> bool:
        """Return what the predicate says."""
        return self.accepts(val)

    def __str__(self) -> str:
        return self.words


def _names(*allowed: Iterable[str]) -> StrOptions:
    """Return names that are allowed, listed in this order."""
    return StrOptions({name: None for group in allowed for name in group}.keys())


AUTO = _names(["auto"])
WHOLE_FROM_0 = Number(numbers.Integral, 0, None, closed="left")
WHOLE_FROM_1 = Number(numbers.Integral, 1, None, closed="left")
SHARE = Number(numbers.Real, 0, 1, closed="neither")
LIMIT = Number(numbers.Real, 0, None, closed="both")


def _are_layer_sizes(value: Any) -> bool:
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim == 1):
        return len(value) > 0 and all(WHOLE_FROM_1.is_satisfied_by(size) for size in value)
    return WHOLE_FROM_1.is_satisfied_by(value)


def _is_policy(value: Any) -> bool:
    methods = all(callable(getattr(value, name, None)) for name in POLICY_METHODS)
    return methods and not isinstance(value, type)


def _stops_early(value: Any) -> bool:
    if isinstance(value, type) or not (hasattr(value, "fraction") and hasattr(value, "patience")):
        return False
    return SHARE.is_satisfied_by(value.fraction) and WHOLE_FROM_1.is_satisfied_by(value.patience)


def _is_dtype(value: Any) -> bool:
    known = isinstance(value, (str, type, np.dtype, torch.dtype))  # comparing an array would give an array
    return known and any(value == dtype for dtype in DTYPES)


PARAMETER_CONSTRAINTS: dict[str, list[Any]] = {
    "model": [callable, None],
    "residual": [callable, None],
    "predict_fn": [callable, None],
    "p0": ["array-like", Mapping, Number(numbers.Real, None, None, closed="neither"), AUTO, callable, None],
    "bounds": ["array-like", Mapping, Bounds, None],
    "fixed": ["array-like", str, None],
    "tied": [Mapping, None],
    "x_format": [_names(["auto", "columns", "1d"])],
    "loss": [_names(LOSSES), callable],
    "f_scale": [Number(numbers.Real, 0, None, closed="neither")],
    "absolute_sigma": ["boolean"],
    "covariance": [_names(COVARIANCES)],
    "nan_policy": [_names(["raise", "omit"])],
    "jac": [_names(JACOBIANS), callable],
    "solver": [_names(["auto"], SOLVERS)],
    "backend": [_names(["auto"], BACKENDS)],
    "devices": [str, torch.device, "array-like"],
    "dtype": [Described(_is_dtype, "torch.float64, torch.float32, the name of one"), None],
    "chunk_rows": [WHOLE_FROM_1, AUTO],
    "damping": [_names(POLICIES), Described(_is_policy, "a policy object such as TrustRegion(grow=2)")],
    "ftol": [LIMIT, AUTO],
    "xtol": [LIMIT, AUTO],
    "gtol": [LIMIT, AUTO],
    "max_iter": [WHOLE_FROM_0],
    "hidden_layer_sizes": [Described(_are_layer_sizes, "an int >= 1, a sequence of them that is not empty"), None],
    "alpha": [Number(numbers.Real, 0, None, closed="left")],
    "early_stopping": ["boolean", Described(_stops_early, EARLY_STOPPING), None],
    "random_state": ["random_state"],
    "warm_start": ["boolean"],
    "callback": [callable, None],
    "verbose": ["verbose"],
}


@functools.cache
def _defaults(constructor: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(constructor).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)  # not **options of a subclass
    return {p.name: p.default for p in parameters if p.name != "self" and p.kind in kinds}


def default_arguments(cls: Any) -> dict[str, Any]:
    """Return the defaults of the arguments of an estimator's class."""
    return _defaults(cls.__init__)


def given_arguments(estimator: Any) -> dict[str, Any]:
    """Return the arguments of an estimator that are not their defaults.

    Only those need a check: to check all takes as long as a tiny fit's tenth.
    """
    defaults, attributes = _defaults(type(estimator).__init__), vars(estimator)
    return {name: attributes[name] for name, default in defaults.items() if attributes[name] is not default}
