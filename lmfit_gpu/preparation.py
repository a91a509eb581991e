"""From what the user gave to what the engine takes: model, rows and start, on their devices.

Nothing here changes the estimator: :func:`prepare` returns one :class:`Setup`, and a fit that fails leaves the
estimator as it was.
"""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from sklearn.exceptions import DataConversionWarning

from lmfit_gpu.box import inside
from lmfit_gpu.constraints import ConstrainedModel, Constraints, resolve_constraints
from lmfit_gpu.devices import resolve_devices
from lmfit_gpu.factories import arithmetic, is_factory, made_by
from lmfit_gpu.models import (
    CALL_ERRORS,
    Model,
    ModuleModel,
    NumpyFunction,
    ResidualOf,
    TorchFunction,
    adapt_callable,
)
from lmfit_gpu.network import TanhNetwork, hidden_sizes, standardise
from lmfit_gpu.parameters import NAMES_SHOWN, Start, resolve_start
from lmfit_gpu.penalty import Penalty, penalty_on
from lmfit_gpu.rows import ArrayRows, Weights, as_tensor
from lmfit_gpu.ties import tie_arguments
from lmfit_gpu.warning_filters import warnings_here

__all__ = [
    "CPU",
    "Data",
    "Setup",
    "gives_module",
    "has_network",
    "is_module",
    "is_warm",
    "prepare",
    "squeezes",
    "start_given",
    "targets_of",
]

CPU = torch.device("cpu")
SAMPLE_ROWS = 64  # enough rows to tell numpy from torch by trying


@dataclass(frozen=True)
class Data:
    """The rows of a fit.

    Parameters
    ----------
    X : ndarray or Tensor, shape (n_samples, ...)
    y : ndarray or Tensor, shape (n_samples,) or (n_samples, n_outputs), or None
    weights : Weights or None
    n_left_out : int
        Rows that were given and do not take part.
    """

    X: Any
    y: Any
    weights: Weights | None = None
    n_left_out: int = 0

    def some(self, rows: torch.Tensor) -> "Data":
        """Return some of the rows."""

        def taken(values: Any) -> Any:
            return values[rows.to(values.device) if isinstance(values, torch.Tensor) else rows.numpy()]

        weights = None if self.weights is None else self.weights.some(rows)
        return replace(self, X=taken(self.X), y=None if self.y is None else taken(self.y), weights=weights)


@dataclass(frozen=True)
class Setup:
    """What a fit works on and what predict needs.

    Parameters
    ----------
    model : Model
        What is fitted: predictions or residuals.
    predictor : Model or None
        What predicts; None for a residual callable without ``predict_fn``.
    rows : ArrayRows
    theta : Tensor, shape (n_free,)
        The start of the free parameters, in the arithmetic of the model, on the first device.
    devices : tuple of torch.device
    y_shape : tuple of int
        Shape of y after its first axis.
    predicts_whole : bool
        ``predict_fn`` gets all rows at once: whether it couples them is not known.
    constraints : Constraints or None
        None: all parameters are free.
    penalty : Penalty or None
    """

    model: Model
    predictor: Model | None
    rows: ArrayRows
    theta: torch.Tensor
    devices: tuple[torch.device, ...]
    y_shape: tuple[int, ...]
    predicts_whole: bool
    constraints: Constraints | None = None
    penalty: Penalty | None = None

    @property
    def bounds(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(lower, upper) of the free parameters."""
        return None if self.constraints is None else self.constraints.bounds(self.theta)


def is_module(options: Any) -> bool:
    """Return whether what is fitted is a torch module: given, made by a factory, or the default network."""
    return has_network(options) or gives_module(options.model)


def gives_module(model: Any) -> bool:
    """Return whether a model is a torch module or makes one."""
    return isinstance(model, torch.nn.Module) or is_factory(model)


def has_network(options: Any) -> bool:
    """Return whether the default network is fitted."""
    return options.model is None and options.residual is None


def start_given(options: Any) -> Any:
    """Return what p0 means in this fit: with ``warm_start`` after a fit its parameters by name, or their vector."""
    if not is_warm(options):
        return options.p0
    setup = options._setup
    if setup.constraints is not None and setup.constraints.ties:
        return options.params_
    return options.theta_ if setup.constraints is None else options.theta_[: setup.constraints.n_model]


def resolved_start(
    options: Any,
    function: Callable[..., Any],
    data: tuple[Any, Any],
    order: str | None = None,
    ties: Mapping[str, Sequence[str]] | None = None,
) -> Start:
    """Return the start of a function; see :func:`lmfit_gpu.parameters.resolve_start`."""
    if not is_warm(options):
        return resolve_start(options.p0, function, data, order, ties)
    last = tuple(options.result_.names)
    try:
        start = resolve_start(start_given(options), function, data, order, ties)
    except ValueError as error:
        raise ValueError(f"warm_start: the last fit was of another model, with {_listed(last)}: {error}") from error
    if start.names != last:
        raise ValueError(f"warm_start: the last fit was of {_listed(last)}, this model has {_listed(start.names)}")
    return start


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")


def is_warm(options: Any) -> bool:
    """Return whether a fit starts where the one before has ended."""
    return bool(options.warm_start) and hasattr(options, "result_")


def prepare(options: Any, data: Data) -> Setup:
    """Build the setup of a fit.

    Parameters
    ----------
    options : LMRegressor
        Of which model, residual, predict_fn, p0, bounds, fixed, tied, x_format, devices, dtype, hidden_layer_sizes,
        alpha, random_state and warm_start are read.
    data : Data

    Raises
    ------
    ValueError, TypeError
        If the model cannot be called at the start, or an option does not fit the data.
    """
    X, y = data.X, data.y
    of_module = is_module(options)
    targets = targets_of(y)
    squeeze = squeezes(options, X, of_module)
    rows = ArrayRows(as_tensor(X), targets, squeeze, weights=data.weights)
    y_shape = () if y is None else tuple(y.shape[1:])
    if of_module:
        module, devices = _module(options, data)
        theta = module.theta
        rows = _rows_of_module(module, rows, prefer_whole=isinstance(X, torch.Tensor))
        model: Model = module if options.residual is None else ResidualOf(module, options.residual)
        constraints = None
        if options.bounds is not None or np.size(options.fixed) or options.tied:
            start = Start(theta.double().cpu().numpy(), tuple(module.names), "module", theta.numel())
            constraints = _constraints(options, start)
        setup = _constrained(Setup(model, module, rows, theta, devices, y_shape, predicts_whole=False), constraints)
        return replace(setup, penalty=_penalty(options, module, rows, constraints))
    dtype = arithmetic(options.dtype, torch.float64)
    devices = resolve_devices(options.devices, X.device if isinstance(X, torch.Tensor) else CPU)
    where, prefer_torch = (devices[0], dtype), isinstance(X, torch.Tensor)
    model, predictor, theta, constraints = _functions(options, rows, where, prefer_torch)
    if not model.differentiable and any(device.type != "cpu" for device in devices):
        raise ValueError(f"devices: a model written in numpy runs on the CPU, not on {devices}")
    if y_shape == (1,) and options.model is not None:
        _warn_of_column(cast(Model, predictor), theta, rows)
    whole = options.predict_fn is not None
    return _constrained(Setup(model, predictor, rows, theta, devices, y_shape, predicts_whole=whole), constraints)


def _warn_of_column(model: Model, theta: torch.Tensor, rows: ArrayRows) -> None:
    """Warn, in scikit-learn's words, of targets (n, 1) for a function that returns (n,)."""
    x, y = rows.read(slice(None), theta.device, theta.dtype)
    with torch.no_grad():
        returned = model(theta, x.clone(), y).ndim
    if returned == 1:
        message = (
            "A column-vector y was passed when a 1d array was expected. Please change the shape of y to (n_samples,), "
            "for example using ravel(). The model returns 1d arrays; predict will return a column."
        )
        warnings.warn(message, DataConversionWarning, stacklevel=6)


def _constraints(options: Any, start: Start) -> Constraints | None:
    return resolve_constraints(
        start.names, start.n_model, start.theta, start.given, options.bounds, options.fixed, options.tied
    )


def _constrained(setup: Setup, constraints: Constraints | None) -> Setup:
    """Return a setup whose model takes the free parameters only."""
    if constraints is None:
        return setup
    theta = torch.from_numpy(constraints.theta()).to(setup.theta)
    theta = inside(theta, constraints.bounds(theta))  # rounding to float32 may leave them
    return replace(setup, model=ConstrainedModel(setup.model, constraints), theta=theta, constraints=constraints)


def squeezes(options: Any, X: Any, of_module: bool) -> bool:
    """Return whether a function gets the one column of X as 1-D x."""
    one_column = X.ndim == 2 and X.shape[1] == 1
    if options.x_format == "1d" and not one_column:
        raise ValueError(f"x_format='1d': X has shape {tuple(X.shape)}; one column is expected")
    return one_column and not of_module and options.x_format != "columns"


def _rows_of_module(module: ModuleModel, rows: ArrayRows, prefer_whole: bool) -> ArrayRows:
    """Return the rows with features in the arithmetic of a module, or whole numbers where it asks for them (tokens).

    Raises
    ------
    ValueError
        If the module cannot be called on them.
    """
    whole = not (rows.X.is_floating_point() or rows.X.is_complex() or rows.X.dtype == torch.bool)
    first = not (prefer_whole and rows.X.dtype in (torch.int64, torch.int32))
    forms = [replace(rows, cast_features=casts) for casts in ([first, not first] if whole else [True])]
    errors: list[BaseException] = []
    for form in forms:
        x, _ = form.read(slice(0, 1), module.theta.device, module.theta.dtype)
        try:
            with torch.no_grad():
                module(module.theta, x, None)
        except CALL_ERRORS as error:
            errors.append(error)
        else:
            return form
    raise ValueError(
        f"model: the module cannot be called on X of shape {tuple(rows.X.shape)}: {errors[0]}"
    ) from errors[0]


def targets_of(y: Any) -> torch.Tensor | None:
    """Return targets as a tensor of floating-point numbers."""
    targets = None if y is None else as_tensor(y)
    return targets.double() if targets is not None and not targets.is_floating_point() else targets


def _module(options: Any, data: Data) -> tuple[ModuleModel, tuple[torch.device, ...]]:
    module = _new_module(options, data)
    own = next(iter(module.parameters()), None)
    if own is None or not any(p.requires_grad for p in module.parameters()):
        raise ValueError("model: the module has no parameter to fit (requires_grad is False for all)")
    where = data.X.device if has_network(options) and isinstance(data.X, torch.Tensor) else own.device
    devices = resolve_devices(options.devices, where)
    model = ModuleModel(module.to(device=devices[0], dtype=arithmetic(options.dtype, own.dtype)))
    if is_warm(options):
        _load_last(module, options)
    elif options.p0 is not None and not (isinstance(options.p0, str) and options.p0 == "auto"):
        model.load(_module_start(options.p0, model, (data.X, data.y)).to(model.theta))
    return model, devices


def _new_module(options: Any, data: Data) -> torch.nn.Module:
    if isinstance(options.model, torch.nn.Module):
        return copy.deepcopy(options.model)
    X, y = data.X, data.y
    n_outputs = 1 if y is None or y.ndim == 1 else y.shape[1]
    if not has_network(options):
        return made_by(options.model, X.shape[1], n_outputs, options.random_state)
    if X.ndim != 2:
        raise ValueError(f"X: got shape {tuple(X.shape)}; the default network takes (n_samples, n_features)")
    sizes = hidden_sizes(options.hidden_layer_sizes)
    network = made_by(lambda: TanhNetwork(X.shape[1], n_outputs, sizes), X.shape[1], n_outputs, options.random_state)
    standardise(cast(TanhNetwork, network), as_tensor(X), cast(torch.Tensor, targets_of(y)), data.weights)
    return network


def _load_last(module: torch.nn.Module, options: Any) -> None:
    """Start a module where the last fit has ended; the default network keeps its units as well."""
    if not hasattr(options, "module_"):
        raise ValueError("warm_start: the last fit was not of a module")
    try:
        module.load_state_dict(options.module_.state_dict())
    except RuntimeError as error:
        raise ValueError(f"warm_start: the last fit was of another model, or of other data: {error}") from error


def _penalty(options: Any, module: ModuleModel, rows: ArrayRows, constraints: Constraints | None) -> Penalty | None:
    if options.alpha == 0:
        return None
    unit = (
        _unit(module.module, rows.weights) if isinstance(module.module, TanhNetwork) and has_network(options) else 1.0
    )
    return penalty_on(module.are_weights, float(options.alpha) * unit, constraints)


def _unit(network: TanhNetwork, weights: Weights | None) -> float:
    """Return the variance of the targets in units of sigma, by the network's scales (of its first fit, when warm)."""
    variance = float((network.y_scale.double() ** 2).mean())
    if weights is None or weights.sigma is None:
        return variance
    precision = (1 / weights.sigma**2).reshape(len(weights.sigma), -1).mean(1)
    share = torch.ones_like(precision) if weights.frequency is None else weights.frequency
    return variance * float((share * precision).sum() / share.sum())


def _module_start(p0: Any, model: ModuleModel, data: tuple[Any, Any]) -> torch.Tensor:
    found = resolve_start(p0, model, data, "module")
    start, names, own = found.theta, found.names, model.names
    if len(start) != len(own):
        raise ValueError(f"p0: got {len(start)} values; the module has {len(own)} free parameters")
    given = p0(*data) if callable(p0) else p0
    if isinstance(given, Mapping):
        if set(names) != set(own):
            raise ValueError(f"p0: got names {names}; the module has {tuple(own)}")
        start = np.array([given[name] for name in own], dtype=float)
    return torch.from_numpy(start)


def _functions(
    options: Any, rows: ArrayRows, where: tuple[torch.device, torch.dtype], prefer_torch: bool
) -> tuple[Model, Model | None, torch.Tensor, Constraints | None]:
    """Return what is fitted, what predicts, the start, and the constraints, of a model or a residual callable."""
    alone = options.model is None
    function = options.residual if alone else options.model
    x, y = rows.read(slice(None), *where)
    host = x.cpu().numpy(), None if y is None else y.cpu().numpy()
    if options.tied is not None and not isinstance(options.tied, Mapping):
        raise TypeError(f"tied: got {options.tied!r}; a dict of name to callable is expected")
    ties = {name: tie_arguments(name, tie) for name, tie in (options.tied or {}).items()}
    start = resolved_start(options, function, host, "residual" if alone else None, ties)
    constraints = _constraints(options, start)
    names, order = start.names[: start.n_model], start.order
    theta = torch.from_numpy(start.theta if constraints is None else constraints.start[: start.n_model]).to(*where)
    box = None if constraints is None else constraints.box_of_model(theta)
    sample = _sample(theta, x, y, slice(None) if alone else slice(0, SAMPLE_ROWS))
    try:
        model = adapt_callable(function, names, order, sample, prefer_torch, box)
    except ValueError:
        if alone or len(x) <= SAMPLE_ROWS:
            raise
        # Known arrays in a closure fit all rows only.
        sample = _sample(theta, x, y, slice(None))
        model = adapt_callable(function, names, order, sample, prefer_torch, box)
    if alone:
        if options.predict_fn is None:
            return model, None, theta, constraints
        return model, adapt_callable(options.predict_fn, names, "predict", sample, prefer_torch), theta, constraints
    if options.residual is None:
        return model, model, theta, constraints
    return *_with_residual(model, options.residual, sample, prefer_torch), theta, constraints


def _sample(theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor | None, rows: slice) -> tuple:
    """Return (theta, x, y) of some rows as copies: a model that writes to them is found out later."""
    return theta, x[rows].clone(), None if y is None else y[rows].clone()


def _with_residual(
    model: TorchFunction | NumpyFunction, residual: Callable[..., Any], sample: tuple, prefer_torch: bool
) -> tuple[Model, Model]:
    """Return residual(prediction, target) of a model, both in one array library, and the model.

    A model that works in both libraries was taken for torch; a residual written in numpy decides otherwise.
    """
    theta, x, y = sample
    composed = ResidualOf(model, residual)
    if isinstance(model, TorchFunction) and not prefer_torch:
        try:
            with warnings_here("error"):
                composed(theta.clone().requires_grad_(), x, y)
        except (*CALL_ERRORS, Warning):
            in_numpy = NumpyFunction(model.function, model.names, model.order)
            if _works(ResidualOf(in_numpy, residual), sample):
                return ResidualOf(in_numpy, residual), in_numpy
    return composed, model


def _works(model: Model, sample: tuple) -> bool:
    try:
        model(*sample)
    except CALL_ERRORS:
        return False
    return True
