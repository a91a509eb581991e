"""What the report of a fit says of its model, its data and its options, in words that a saved fit knows as well."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from lmfit_gpu.constraints import ConstrainedModel
from lmfit_gpu.models import ModuleModel, NumpyFunction, ResidualOf
from lmfit_gpu.parameter_constraints import default_arguments, given_arguments
from lmfit_gpu.preparation import Setup, has_network
from lmfit_gpu.report import Facts

__all__ = ["facts_of"]

SAID_ELSEWHERE = ("model", "residual", "predict_fn", "callback", "verbose")
LONGEST = 60  # characters of an option


def facts_of(estimator: Any) -> Facts:
    """Return the facts of a fitted estimator.

    Parameters
    ----------
    estimator : LMRegressor
    """
    setup: Setup = estimator._setup
    defaults = default_arguments(type(estimator))
    given = {
        name: _said(value)
        for name, value in given_arguments(estimator).items()
        if name not in SAID_ELSEWHERE and not (type(value) is type(defaults[name]) and value == defaults[name])
    }
    bounds = {}
    if setup.constraints is not None:
        lower, upper = setup.constraints.lower, setup.constraints.upper
        limited = (np.isfinite(lower) | np.isfinite(upper)) & setup.constraints.free
        bounds = {int(j): (float(lower[j]), float(upper[j])) for j in np.flatnonzero(limited)}
    return Facts(_model(estimator, setup), _data(estimator, setup), given, bounds)


def _model(estimator: Any, setup: Setup) -> str:
    model: Any = setup.model
    if isinstance(model, ConstrainedModel):
        model = model.model
    if isinstance(model, ResidualOf):
        return f"{_named(model.function)} of {_one(estimator, model.model)}"
    return _one(estimator, model)


def _one(estimator: Any, model: Any) -> str:
    if isinstance(model, ModuleModel):
        n = len(model.theta)
        if has_network(estimator):
            layers = [len(p) for name, p in model.module.named_parameters() if name.endswith("bias")]
            sizes = "-".join(map(str, [estimator.n_features_in_, *layers]))
            return f"tanh network {sizes}, {n} parameters"
        return f"module {type(model.module).__name__}, {n} parameters"
    kind = "numpy" if isinstance(model, NumpyFunction) else "torch"
    takes = {"residual": "theta, X, y", "theta": "X, theta"}.get(model.order, ", ".join(("x", *model.names[:8])))
    more = ", ..." if model.order == "params" and len(model.names) > 8 else ""
    what = "residual " if model.order == "residual" else ""
    return f"{what}{_named(model.function)}({takes}{more}), {kind}"


def _named(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "lambda" if name == "<lambda>" else name


def _data(estimator: Any, setup: Setup) -> str:
    result, n_outputs = estimator.result_, math.prod(setup.y_shape)
    features = f"{estimator.n_features_in_} feature{'s' if estimator.n_features_in_ != 1 else ''}"
    if setup.model.is_residual or result.n_residuals % max(n_outputs, 1):
        return f"{result.n_residuals} residuals, {features}"
    outputs = f", {n_outputs} outputs" if n_outputs > 1 else ""
    return f"{result.n_residuals // max(n_outputs, 1)} rows, {features}{outputs}"


def _said(value: Any) -> str:
    """Return an option as text without addresses, short."""
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{key!r}: {_said(entry)}" for key, entry in value.items()) + "}"
    elif isinstance(value, np.ndarray) or hasattr(value, "detach"):
        value = value.detach().cpu().numpy() if hasattr(value, "detach") else value
        text = f"array of shape {tuple(value.shape)}" if np.size(value) > 8 else str(np.asarray(value).tolist())
    elif inspect.isroutine(value) or isinstance(value, type):
        text = _named(value)
    else:
        text = repr(value)
        text = f"a {type(value).__name__}" if " at 0x" in text else text
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
