"""A fitted estimator as data: what :meth:`save` writes.

=============  ============================================================================================
part           holds
=============  ============================================================================================
class          the class of the estimator
library        the version of lmfit_gpu that wrote the file (for information)
options        what the constructor got; of code, ``{"code": what it was}``: it is given again when loading
attributes     n_features_in_, feature_names_in_, and what else is set beside the result
routing        what ``set_fit_request`` and its like have set
setup          kinds of the models, shape of y, start, constraints, penalty
result         theta, covariance, status, counts, history
module         names and shapes of the free parameters (its state is among the tensors, as ``module.NAME``)
probe          predictions of four made-up rows: a model that is given again must predict the same
=============  ============================================================================================
"""

import dataclasses
import functools
import inspect
import math
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from lmfit_gpu.constraints import ConstrainedModel, Constraints
from lmfit_gpu.models import CALL_ERRORS, Model, ModuleModel, NumpyFunction, ResidualOf, TorchFunction
from lmfit_gpu.persistence.encoding import NotDataError, Tensors, encoded
from lmfit_gpu.prediction import predicted
from lmfit_gpu.preparation import Setup, is_module
from lmfit_gpu.result import IterationRecord, Result
from lmfit_gpu.rows import ArrayRows

__all__ = ["HISTORY", "MODULE", "PROBE_ROWS", "document_of", "function_option", "probe_rows", "probed"]

MODULE, HISTORY = "module.", "history."  # beginnings of names of tensors
PROBE_ROWS = 4
FROM_RESULT = {  # attributes that follow from result and setup
    *(
        "result_",
        "theta_",
        "covariance_",
        "stderr_",
        "rank_",
        "n_iter_",
        "solver_",
        "backend_",
        "devices_",
        "_data",
        "_space",
    ),
    *("module_", "_setup", "_metadata_request"),
}
NAMES_SHOWN = 6
CODE_FIRST = ("model", "residual", "predict_fn")  # in the message that names what is missing


def document_of(estimator: Any) -> tuple[dict[str, Any], Tensors]:
    """Return a fitted estimator as JSON and named tensors.

    Raises
    ------
    ValueError
        If the model was changed after the fit, or a part of a module or an attribute is not data.
    """
    tensors: Tensors = {}
    setup: Setup = estimator._setup
    options = estimator.get_params(deep=False)
    _check_unchanged(estimator, setup)
    document: dict[str, Any] = {
        "class": type(estimator).__qualname__,
        "library": version("lmfit-gpu"),
        "options": _options(options, setup, tensors),
        "attributes": _attributes(estimator, options, tensors),
        "routing": _routing(estimator),
        "setup": _setup(setup, tensors),
        "result": _result(estimator.result_, setup, tensors),
    }
    if isinstance(setup.predictor, ModuleModel):
        document["module"] = _module(setup.predictor, tensors)
    if setup.predictor is not None:
        found = probed(setup, estimator.theta_)
        if found is not None and _same(found, probed(setup, estimator.theta_)):
            tensors["probe"] = found
    return document, tensors


def _same(first: torch.Tensor, second: torch.Tensor | None) -> bool:
    """Return whether a model that was called twice gave the same: one that draws numbers does not."""
    return second is not None and torch.equal(torch.nan_to_num(first), torch.nan_to_num(second))


def probe_rows(rows: ArrayRows) -> torch.Tensor:
    """Return rows like those of a fit, shape (PROBE_ROWS, ...): ascending from 0.5 to 1.5; of tokens, ones."""
    shape = (PROBE_ROWS, *rows.X.shape[1:])
    if not rows.cast_features:
        return torch.ones(shape, dtype=rows.X.dtype)
    return torch.linspace(0.5, 1.5, math.prod(shape), dtype=torch.float64).reshape(shape)


def probed(setup: Setup, theta: np.ndarray) -> torch.Tensor | None:
    """Return predictions of the probe rows on the CPU, or None where the model refuses these."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return predicted(setup, theta, probe_rows(setup.rows), None).cpu()
        except CALL_ERRORS:
            return None


# ---- options


def _options(options: Mapping[str, Any], setup: Setup, tensors: Tensors) -> dict[str, Any]:
    first = [name for name in CODE_FIRST if name in options]
    found = {name: _option(options[name], tensors, name) for name in [*first, *sorted(set(options) - set(first))]}
    if isinstance(found.get("model"), dict) and isinstance(setup.predictor, ModuleModel):
        parameters = setup.predictor.module.named_parameters()
        found["model"] = {"code": f"{found['model']['code']} with {_shapes(parameters)}"}
    return found


def _option(value: Any, tensors: Tensors, name: str) -> Any:
    aside: Tensors = {}
    try:
        found = encoded(value, aside, f"option.{name}")
    except NotDataError:
        return {"code": _named(value)}
    tensors |= aside
    return found


def _named(value: Any) -> str:
    """Return how a message refers to code: its name, its module, and what it takes."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_named(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, functools.partial):
        return f"a partial of {_named(value.func)}"
    if isinstance(value, torch.nn.Module):
        return f"a module {type(value).__qualname__} of {type(value).__module__}"
    if not callable(value):
        return f"an object of {type(value).__qualname__}"
    what = f"{getattr(value, '__qualname__', type(value).__qualname__)} of {getattr(value, '__module__', None)}"
    if isinstance(value, type):
        return f"the class {what}"
    try:
        return f"{what}, called with ({', '.join(inspect.signature(value).parameters)})"
    except (ValueError, TypeError):
        return what


def _shapes(parameters: Any) -> str:
    listed = [f"{name} {tuple(parameter.shape)}" for name, parameter in parameters]
    more = f" and {len(listed) - NAMES_SHOWN} more" if len(listed) > NAMES_SHOWN else ""
    return ", ".join(listed[:NAMES_SHOWN]) + more


# ---- attributes beside the result


def _attributes(estimator: Any, options: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    found = {}
    for name, value in vars(estimator).items():
        if name in options or name in FROM_RESULT:
            continue
        try:
            found[name] = encoded(value, tensors, f"attribute.{name}")
        except NotDataError as error:
            raise ValueError(f"save: the attribute {name} is no data ({error}); delete it, or pickle") from error
    return found


def _routing(estimator: Any) -> dict[str, Any]:
    """Return {method: requests} where a user has set some."""
    if "_metadata_request" not in vars(estimator):
        return {}
    routing = estimator.get_metadata_routing()
    methods = {name: getattr(routing, name, None) for name in ("fit", "predict", "score")}
    return {name: dict(method.requests) for name, method in methods.items() if method is not None}


# ---- setup


def function_option(order: str) -> str:
    """Return the option that a function of this order was given as."""
    return {"residual": "residual", "predict": "predict_fn"}.get(order, "model")


def _check_unchanged(estimator: Any, setup: Setup) -> None:
    for model in (setup.model, setup.predictor):
        for function, name in _functions(model):
            given = getattr(estimator, name)
            if function is not given and function != given:
                raise ValueError(f"save: {name} was changed since the fit; fit again")
    constraints = setup.constraints
    ties = {} if constraints is None else {constraints.names[tie.index]: tie.function for tie in constraints.ties}
    if ties and ties != estimator.tied:
        raise ValueError("save: tied was changed since the fit; fit again")
    if isinstance(setup.predictor, ModuleModel) != is_module(estimator):
        raise ValueError("save: model was changed since the fit; fit again")


def _functions(model: Model | None) -> list[tuple[Any, str]]:
    if isinstance(model, ConstrainedModel):
        return _functions(model.model)
    if isinstance(model, ResidualOf):
        return [(model.function, "residual"), *_functions(model.model)]
    if isinstance(model, (TorchFunction, NumpyFunction)):
        return [(model.function, function_option(model.order))]
    return []


def _kind(model: Model | None) -> Any:
    """Return how a model is put together again."""
    if isinstance(model, ConstrainedModel):
        return _kind(model.model)  # that there are constraints is known
    if isinstance(model, ResidualOf):
        return {"residual of": _kind(model.model)}
    if isinstance(model, (TorchFunction, NumpyFunction)):
        return {"torch" if isinstance(model, TorchFunction) else "numpy": model.order}
    return None if model is None else "module"


def _setup(setup: Setup, tensors: Tensors) -> dict[str, Any]:
    tensors["start"], tensors["rows"] = setup.theta, setup.rows.X  # no rows
    penalty = setup.penalty
    if penalty is not None:
        tensors["penalised"] = penalty.indices
    return {
        "model": _kind(setup.model),
        "predictor": _kind(setup.predictor),
        "y_shape": list(setup.y_shape),
        "squeeze": bool(setup.rows.squeeze),
        "cast_features": bool(setup.rows.cast_features),
        "predicts_whole": bool(setup.predicts_whole),
        "penalty": None if penalty is None else encoded(penalty.root, tensors, ""),
        "constraints": None if setup.constraints is None else _constraints(setup.constraints, tensors),
    }


def _constraints(constraints: Constraints, tensors: Tensors) -> dict[str, Any]:
    for name in ("start", "lower", "upper", "free"):
        tensors[f"constraints.{name}"] = torch.from_numpy(getattr(constraints, name))
    return {
        "n_model": constraints.n_model,
        "ties": [[tie.index, [int(i) for i in tie.arguments], tie.in_torch] for tie in constraints.ties],
    }


# ---- result


def _result(result: Result, setup: Setup, tensors: Tensors) -> dict[str, Any]:
    names = [str(name) for name in result.names]
    if isinstance(setup.predictor, ModuleModel):
        names = names[len(setup.predictor.names) :]  # those of a module follow from it
    own = {"names", "stop", "history", "used"}
    fields = [field.name for field in dataclasses.fields(Result) if field.name not in own]
    return {
        "names": names,
        "stop": {
            **{f.name: encoded(getattr(result.stop, f.name), tensors, "") for f in _after_status(result.stop)},
            "status": result.stop.status.name,
        },
        "history": _history(result, tensors),
        "used": {key: _used(value, tensors, f"used.{key}") for key, value in result.used.items()},
        **{name: encoded(getattr(result, name), tensors, name) for name in fields},
    }


def _after_status(stop: Any) -> list[Any]:
    return [field for field in dataclasses.fields(stop) if field.name != "status"]


def _used(value: Any, tensors: Tensors, name: str) -> Any:
    """Return an entry of the report; of a damping policy of the user's own its text."""
    try:
        return encoded(value, tensors, name)
    except NotDataError:
        return str(value)


def _history(result: Result, tensors: Tensors) -> dict[str, Any]:
    """Return how many records there are, and the columns that are words; numbers are tensors."""
    words = {}
    for field in dataclasses.fields(IterationRecord):
        column = [getattr(record, field.name) for record in result.history]
        if field.type in (int, float, bool):
            tensors[HISTORY + field.name] = torch.tensor(column, dtype=NUMBERS[field.type])
        else:
            words[field.name] = encoded(column, tensors, HISTORY + field.name)
    return {"n": len(result.history), "words": words}


NUMBERS: dict[Any, torch.dtype] = {int: torch.int64, float: torch.float64, bool: torch.bool}


# ---- module


def _module(model: ModuleModel, tensors: Tensors) -> dict[str, Any]:
    for name, value in model.module.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"save: {name!r} of the module's state is no tensor but {type(value).__name__}; pickle")
        tensors[MODULE + name] = value
    free = [name for name, parameter in model.module.named_parameters() if parameter.requires_grad]
    return {"class": type(model.module).__qualname__, "free": free}
