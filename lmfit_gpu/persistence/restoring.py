"""From the data of a file, and the code that is given again, to a fitted estimator."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from lmfit_gpu.constraints import ConstrainedModel, Constraints
from lmfit_gpu.factories import is_factory, made_by
from lmfit_gpu.models import CALL_ERRORS, Model, ModuleModel, NumpyFunction, ResidualOf, TorchFunction
from lmfit_gpu.network import default_network
from lmfit_gpu.parameters import call_signature
from lmfit_gpu.penalty import Penalty
from lmfit_gpu.persistence.document import HISTORY, MODULE, function_option, probed
from lmfit_gpu.persistence.encoding import Tensors, decoded
from lmfit_gpu.preparation import CPU, Setup
from lmfit_gpu.result import IterationRecord, Result, Status, Stop
from lmfit_gpu.rows import ArrayRows
from lmfit_gpu.ties import Tie, tie_arguments

__all__ = ["restored"]

FUNCTIONS = ("model", "residual", "predict_fn")
SHOWN = 6
SAME = {torch.float64: 1e-6, torch.float32: 1e-3}  # of the largest prediction: other machines round otherwise


def restored(cls: type, document: Mapping[str, Any], tensors: Tensors, given: Mapping[str, Any]) -> Any:
    """Return the fitted estimator.

    Parameters
    ----------
    cls : subclass of Persistent
    document, tensors
        See :mod:`lmfit_gpu.persistence.document`.
    given : dict
        By option, what the file does not hold.

    Raises
    ------
    ValueError, TypeError
        If code is missing, or is not that of the saved estimator.
    """
    if document["class"] != cls.__qualname__:
        raise ValueError(f"load: the file is of {document['class']}; use {document['class']}.load, not {cls.__name__}")
    _check_known(cls, document, tensors)
    options = _options(document["options"], tensors, given)
    estimator: Any = cls(**options)
    setup, names = _setup(document, tensors, options)
    result = _result(document["result"], tensors, names)
    _check_ties(setup, result)
    if "probe" in tensors:
        _check_predictions(setup, result.theta, tensors["probe"])
    for name, value in document["attributes"].items():
        setattr(estimator, name, decoded(value, tensors))
    estimator._keep(setup, result)
    if document["routing"]:
        routing = estimator.get_metadata_routing()
        for method, requests in document["routing"].items():
            for parameter, alias in requests.items():
                getattr(routing, method).add_request(param=parameter, alias=alias)
        estimator._metadata_request = routing
    return estimator


def _check_known(cls: Any, document: Mapping[str, Any], tensors: Tensors) -> None:
    """Refuse a file with more in it than this version of the package knows."""
    result = document["result"]
    columns = [*result["history"]["words"], *(n.removeprefix(HISTORY) for n in tensors if n.startswith(HISTORY))]
    for what, names, known in (
        ("option", document["options"], cls._get_param_names()),
        ("entry of the result", result, _fields(Result)),
        ("entry of a stop", result["stop"], _fields(Stop)),
        ("status", [result["stop"]["status"]], Status.__members__),
        ("column of the history", columns, _fields(IterationRecord)),
    ):
        unknown = sorted(set(names) - set(known))
        if unknown:
            raise ValueError(
                f"load: the file is of lmfit_gpu {document['library']}; this one does not know the {what} "
                f"{_some(unknown)}"
            )


def _fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _options(saved: Mapping[str, Any], tensors: Tensors, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the constructor: data from the file, code as it is given."""
    code = {name: value["code"] for name, value in saved.items() if isinstance(value, dict) and "code" in value}
    for name in given:
        if name not in saved:
            raise TypeError(f"load: got {name}, which is no option of the estimator")
        if name == "model" and name not in code:
            raise TypeError("load: got model, but the file needs none: what it holds was fitted without")
        if name not in code:
            raise TypeError(f"load: got {name}, which the file holds as data; set_params changes it afterwards")
    missing = [f"{name} ({what})" for name, what in code.items() if name not in given]
    if missing:
        more = "; callback=None leaves it out" if "callback" in code and "callback" not in given else ""
        raise ValueError(f"load: the file holds no code. Give what was saved as {'; '.join(missing)}{more}")
    for name in FUNCTIONS:
        if name in given and not callable(given[name]):
            raise TypeError(f"load: {name}: got {given[name]!r}; {code[name]} is expected")
    return {name: given[name] if name in given else decoded(value, tensors) for name, value in saved.items()}


# ---- setup


def _setup(document: Mapping[str, Any], tensors: Tensors, options: Mapping[str, Any]) -> tuple[Setup, tuple[str, ...]]:
    """Return the setup on the CPU, and the names of all parameters."""
    saved, names = document["setup"], tuple(document["result"]["names"])
    module: ModuleModel | None = None
    if "module" in document:
        module = _module(document, tensors, options)
        names = (*module.names, *names)
    n_model = len(names) if saved["constraints"] is None else saved["constraints"]["n_model"]
    built: dict[Any, Model] = {}

    def model_of(kind: Any) -> Any:
        """Return a model; where it is also a part of another one, the same object."""
        key = str(kind)
        if kind is not None and key not in built:
            built[key] = _model(kind, options, names[:n_model], module, model_of)
        return built.get(key)

    predictor, model = model_of(saved["predictor"]), model_of(saved["model"])
    constraints = None
    if saved["constraints"] is not None:
        constraints = _constraints(saved["constraints"], tensors, names, options.get("tied"))
        model = ConstrainedModel(model, constraints)
    penalty = None
    if saved["penalty"] is not None:
        penalty = Penalty(tensors["penalised"], decoded(saved["penalty"], tensors), constraints)
    rows = ArrayRows(tensors["rows"], None, squeeze=saved["squeeze"], cast_features=saved["cast_features"])
    setup = Setup(
        model,
        predictor,
        rows,
        tensors["start"],
        (CPU,),
        tuple(saved["y_shape"]),
        predicts_whole=saved["predicts_whole"],
        constraints=constraints,
        penalty=penalty,
    )
    return setup, names


def _model(
    kind: Any,
    options: Mapping[str, Any],
    names: tuple[str, ...],
    module: ModuleModel | None,
    model_of: Callable[[Any], Any],
) -> Model:
    if kind == "module":
        assert module is not None  # the document has one: it was written with the kind
        return module
    (what, content), *_ = kind.items()
    if what == "residual of":
        return ResidualOf(model_of(content), options["residual"])
    name = function_option(content)
    if name == "model":
        _check_signature(options[name], names, content)
    return (TorchFunction if what == "torch" else NumpyFunction)(options[name], names, content)


def _check_signature(function: Callable[..., Any], names: tuple[str, ...], order: str) -> None:
    try:
        found, found_order = call_signature(function, len(names))
    except ValueError as error:
        raise ValueError(f"load: model: the saved one takes {', '.join(names)}: {error}") from error
    if found_order not in (order, "either") or (order == "params" and found not in (None, names)):
        takes = "one vector theta" if found_order == "theta" else ", ".join(found or ("any number",))
        wanted = "one vector theta" if order == "theta" else ", ".join(names)
        raise ValueError(f"load: model: it takes {takes}; the saved one takes {wanted}")


def _constraints(saved: Mapping[str, Any], tensors: Tensors, names: tuple[str, ...], tied: Any) -> Constraints:
    wanted = {names[index]: tuple(names[i] for i in arguments) for index, arguments, _ in saved["ties"]}
    if wanted and not (isinstance(tied, Mapping) and set(tied) == set(wanted)):
        raise ValueError(f"load: tied: a dict with functions for {', '.join(map(repr, wanted))} is expected")
    for name, arguments in wanted.items():
        if tie_arguments(name, tied[name]) != arguments:
            raise ValueError(f"load: tied: {name!r} is to be a function of {', '.join(arguments)}, as it was saved")
    start, lower, upper, free = (tensors[f"constraints.{part}"].numpy() for part in ("start", "lower", "upper", "free"))
    ties = (Tie(index, tuple(args), tied[names[index]], in_torch) for index, args, in_torch in saved["ties"])
    return Constraints(names, saved["n_model"], start, lower, upper, free, tuple(ties))


# ---- module


def _module(document: Mapping[str, Any], tensors: Tensors, options: Mapping[str, Any]) -> ModuleModel:
    """Return the saved module: a copy of the one that is given, or a new one, with the saved state."""
    saved, state = document["module"], {n.removeprefix(MODULE): t for n, t in tensors.items() if n.startswith(MODULE)}
    module = _fresh(document, tensors, options).cpu()
    own = module.state_dict()
    lacking, more = sorted(set(state) - set(own)), sorted(set(own) - set(state))
    if lacking or more:
        differs = f"it has no {_some(lacking)}" if lacking else f"it has also {_some(more)}"
        raise ValueError(f"load: model: another architecture than the saved {saved['class']}: {differs}")
    for name, value in own.items():
        lazy = torch.nn.parameter.is_lazy(value)
        if not lazy and value.shape != state[name].shape:
            raise ValueError(
                f"load: model: another architecture than the saved {saved['class']}: {name!r} has shape "
                f"{tuple(value.shape)}, the saved one {tuple(state[name].shape)}"
            )
    module.load_state_dict(state)  # gives a lazy module its tensors
    module = module.to(tensors["start"].dtype)
    module.load_state_dict(state)  # a fresh module in float32 has rounded them
    free = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    if free != saved["free"]:
        changed = sorted(set(free) ^ set(saved["free"]))
        raise ValueError(f"load: model: requires_grad of {_some(changed)} is not what it was when saved")
    return ModuleModel(module)


def _fresh(document: Mapping[str, Any], tensors: Tensors, options: Mapping[str, Any]) -> torch.nn.Module:
    X, y_shape, model = tensors["rows"], document["setup"]["y_shape"], options.get("model")
    n_outputs = y_shape[0] if y_shape else 1
    if model is None:
        # The layers that were fitted: hidden_layer_sizes may have been set since.
        names = (f"{MODULE}layers.{i}.bias" for i in itertools.count())
        sizes = [len(tensors[name]) for name in itertools.takewhile(tensors.__contains__, names)]
        return made_by(lambda: default_network(X.shape[1], n_outputs, sizes[:-1]), X.shape[1], n_outputs, 0)
    if isinstance(model, torch.nn.Module):
        return copy.deepcopy(model)
    if is_factory(model):
        seed = options.get("random_state")
        return made_by(model, X.shape[1], n_outputs, copy.deepcopy(seed))
    raise ValueError(f"load: model: got {model!r}; a module like the saved {document['module']['class']} is expected")


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:SHOWN])) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


# ---- result


def _result(saved: Mapping[str, Any], tensors: Tensors, names: tuple[str, ...]) -> Result:
    stop = {name: decoded(value, tensors) for name, value in saved["stop"].items() if name != "status"}
    own = {"names", "stop", "history", "used"}
    return Result(
        names=names,
        stop=Stop(Status[saved["stop"]["status"]], **stop),
        history=_history(saved["history"], tensors),
        used={key: decoded(value, tensors) for key, value in saved["used"].items()},
        **{name: decoded(value, tensors) for name, value in saved.items() if name not in own},
    )


def _history(saved: Mapping[str, Any], tensors: Tensors) -> list[IterationRecord]:
    columns = {name: decoded(column, tensors) for name, column in saved["words"].items()}
    columns |= {n.removeprefix(HISTORY): t.tolist() for n, t in tensors.items() if n.startswith(HISTORY)}
    return [IterationRecord(**{name: column[i] for name, column in columns.items()}) for i in range(saved["n"])]


# ---- is it the same code?


def _check_ties(setup: Setup, result: Result) -> None:
    constraints = setup.constraints
    if constraints is None or not constraints.ties:
        return
    try:
        found = constraints.full(torch.from_numpy(result.theta[constraints.free])).numpy()
    except CALL_ERRORS as error:
        raise ValueError(f"load: tied: a function fails at the saved parameters: {error}") from error
    for tie in constraints.ties:
        if not np.isclose(found[tie.index], result.theta[tie.index], rtol=1e-6, atol=0, equal_nan=True):
            name = constraints.names[tie.index]
            raise ValueError(
                f"load: tied: another function: it makes {name!r} {found[tie.index]:g}; it was "
                f"{result.theta[tie.index]:g}"
            )


def _check_predictions(setup: Setup, theta: np.ndarray, expected: torch.Tensor) -> None:
    what = function_option(getattr(setup.predictor, "order", "params"))
    found = probed(setup, theta)
    if found is None:
        raise ValueError(f"load: {what}: it fails where the saved one predicts; it is another one")
    finite = expected[torch.isfinite(expected)]
    atol = SAME[setup.theta.dtype] * float(finite.abs().max()) if finite.numel() else 0.0
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=0, atol=atol, equal_nan=True):
        raise ValueError(f"load: {what}: it predicts otherwise than the saved one; it is another one")
