r"""What the user gave, as one function of (theta, x, y).

Four kinds of model reach the engine:

===================  ===========================  ===========================================
given                called as                    class
===================  ===========================  ===========================================
torch callable       f(x, \*params), f(X, theta)  :class:`TorchFunction`
numpy callable       f(x, \*params), f(X, theta)  :class:`NumpyFunction`
torch.nn.Module      module(X)                    :class:`ModuleModel`
residual callable    residual(theta, X, y)        one of the first two with ``order="residual"``
===================  ===========================  ===========================================

Every one is called as ``model(theta, x, y)`` with torch tensors and returns a torch tensor. What it returns
are *values*: predictions, from which the engine subtracts y, or residuals (``is_residual``). Derivatives are
taken of the values, so that differences are not spoiled by the rounding of ``prediction - y``.
Whether a callable is written in numpy or in torch is found out by trying (:func:`adapt_callable`).
"""

import copy
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.func import functional_call

from lmfit_gpu.box import Bounds, inside, rooms
from lmfit_gpu.warning_filters import warnings_here

__all__ = [
    "CALL_ERRORS",
    "Model",
    "ModuleModel",
    "NumpyFunction",
    "ResidualOf",
    "TorchFunction",
    "adapt_callable",
    "gradient_is_whole",
]

# What user code may raise when it is tried in a form it was not written for.
CALL_ERRORS = (
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
)

COUNTS_REFERENCES = sys.version_info < (3, 14)  # later interpreters borrow references: there it is always copied
OWN_REFERENCES = 3  # the caller's name, the argument, and getrefcount's own
GRADIENT_RTOL = 1e-2  # a parameter lost from the graph misses its whole share; kinks in a model, far less
SHORTER = (1.0, 0.1, 0.01)
AGREE_RTOL = 1e-6  # numpy and torch forms of one function differ by rounding; std(ddof) by far more


class Model(Protocol):
    """One function of (theta, x, y) on tensors."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the parameters."""
        ...

    @property
    def is_residual(self) -> bool:
        """Whether the values are residuals, not predictions."""
        ...

    @property
    def differentiable(self) -> bool:
        """Whether torch can differentiate the values."""
        ...

    def __call__(self, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        """Return values, shape (rows,) or (rows, n_outputs)."""
        ...

    def replicate(self, device: torch.device) -> "Model":
        """Return a copy that another thread may call on `device`."""
        ...


@dataclass(frozen=True)
class TorchFunction:
    """A callable written in torch; theta is float64."""

    function: Callable[..., torch.Tensor]
    names: tuple[str, ...]
    order: str = "params"  # f(x, *params); "theta": f(x, theta); "residual": f(theta, x, y); "predict": f(theta, x)
    differentiable = True

    @property
    def is_residual(self) -> bool:
        """Whether the values are residuals."""
        return self.order == "residual"

    def __call__(self, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        """Return the function's values, shape (rows,) or (rows, n_outputs)."""
        return _call(self.function, self.order, theta.unbind() if self.order == "params" else theta, x, y)

    def replicate(self, device: torch.device) -> "TorchFunction":
        """Return itself: a function holds no state."""
        return self


@dataclass(frozen=True)
class NumpyFunction:
    """A callable written in numpy: it sees float64 arrays and is differentiated by differences."""

    function: Callable[..., Any]
    names: tuple[str, ...]
    order: str = "params"
    differentiable = False

    @property
    def is_residual(self) -> bool:
        """Whether the values are residuals."""
        return self.order == "residual"

    def __call__(self, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        """Return the function's values; overflow and invalid operations are silent: the engine judges them."""
        arrays = theta.numpy().copy(), _read_only(x), None if y is None else _read_only(y)
        with np.errstate(all="ignore"):
            values = _as_array(_call(self.function, self.order, *arrays))
        if values.dtype == object or not np.issubdtype(values.dtype, np.number):
            raise TypeError(f"model: returned {values.dtype} values; numbers are expected")
        return _owned(values)

    def replicate(self, device: torch.device) -> "NumpyFunction":
        """Return itself: a function holds no state."""
        if device.type != "cpu":
            raise ValueError(f"devices: a model written in numpy runs on the CPU, not on {device}")
        return self


def _as_array(values: Any) -> np.ndarray:
    """Return what a function returned as an array; what it masks is NaN there."""
    if isinstance(values, np.ma.MaskedArray):
        return np.ma.filled(values * 1.0, np.nan)
    return np.asarray(values)


def _owned(values: np.ndarray) -> torch.Tensor:
    """Return values in float64 (complex128) on memory that the model does not use again.

    An array that only this call and its caller refer to is nobody else's; any other is copied.
    """
    kind = np.complex128 if np.iscomplexobj(values) else np.float64
    owned = COUNTS_REFERENCES and values.flags.owndata and sys.getrefcount(values) <= OWN_REFERENCES
    if owned and values.dtype == kind and values.ndim:
        return torch.from_numpy(values)
    return torch.from_numpy(np.array(values, dtype=kind))


def _read_only(tensor: torch.Tensor) -> np.ndarray:
    """Return the user's data as an array that a model cannot overwrite."""
    view = tensor.numpy().view()
    view.flags.writeable = False
    return view


def _call(function: Callable[..., Any], order: str, theta: Any, x: Any, y: Any) -> Any:
    if order == "params":
        return function(x, *theta)
    if order == "theta":
        return function(x, theta)
    return function(theta, x) if order == "predict" else function(theta, x, y)


class ModuleModel:
    """A torch module as a function of its free parameters.

    Parameters
    ----------
    module : torch.nn.Module
        Not copied here. Parameters with ``requires_grad=False`` keep their values.
    evaluates : bool
        Put it in evaluation mode, so that BatchNorm and Dropout are the same function at every evaluation of one fit.
    """

    is_residual = False
    differentiable = True

    def __init__(self, module: torch.nn.Module, evaluates: bool = True) -> None:
        self.module = module.eval() if evaluates else module
        free = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._shapes = {name: p.shape for name, p in free.items()}
        self._sizes = [p.numel() for p in free.values()]

    @property
    def names(self) -> list[str]:
        """``slope`` for a scalar parameter, ``lin.weight[0,1]`` for an entry of a larger one."""
        return [entry for name, shape in self._shapes.items() for entry in _entry_names(name, shape)]

    @property
    def slices(self) -> dict[str, slice]:
        """Where in theta each tensor of free parameters is."""
        ends = itertools.accumulate(self._sizes)
        return {name: slice(end - size, end) for name, size, end in zip(self._shapes, self._sizes, ends, strict=True)}

    @property
    def sizes(self) -> list[int]:
        """Number of entries of each tensor of free parameters."""
        return self._sizes

    @property
    def are_weights(self) -> list[bool]:
        """Which free parameters are entries of weights, tensors with two or more axes; biases and gains are not."""
        return [
            is_weight for is_weight, size in zip(self.weight_tensors, self._sizes, strict=True) for _ in range(size)
        ]

    @property
    def weight_tensors(self) -> list[bool]:
        """Which tensors are weights."""
        return [len(shape) >= 2 for shape in self._shapes.values()]

    @property
    def dtype(self) -> torch.dtype:
        """Of the free parameters."""
        return next(p.dtype for p in self.module.parameters() if p.requires_grad)

    @property
    def theta(self) -> torch.Tensor:
        """The free parameters as one vector, shape (n_params,), in the module's dtype."""
        parameters = dict(self.module.named_parameters())
        return torch.cat([parameters[name].detach().reshape(-1) for name in self._shapes])

    def split(self, theta: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return theta as the module's named parameters (views)."""
        parts = theta.split(self._sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def load(self, theta: torch.Tensor) -> None:
        """Write theta into the module's parameters."""
        parameters = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, value in self.split(theta).items():
                parameters[name].copy_(value)

    def __call__(self, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        """Return the module's output at theta, shape (rows, ...)."""
        return functional_call(self.module, self.split(theta), (x,))

    def replicate(self, device: torch.device) -> "ModuleModel":
        """Return the same function on `device` with a module of its own (functional_call is not thread-safe)."""
        return ModuleModel(copy.deepcopy(self.module).to(device))


def _entry_names(name: str, shape: torch.Size) -> list[str]:
    if len(shape) == 0:
        return [name]
    return [f"{name}[{','.join(map(str, index))}]" for index in np.ndindex(*shape)]


@dataclass(frozen=True)
class ResidualOf:
    """residual(prediction, target) of another model."""

    model: Model
    function: Callable[..., Any]
    is_residual = True

    @property
    def names(self) -> Sequence[str]:
        """Names of the parameters of the model."""
        return self.model.names

    @property
    def differentiable(self) -> bool:
        """Whether autograd sees through the model and the residual."""
        return self.model.differentiable

    def __call__(self, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        """Return residuals, shape (rows,) or (rows, n_outputs)."""
        prediction = self.model(theta, x, y)
        if y is not None and prediction.shape != y.shape and prediction.numel() == y.numel():
            if {prediction.ndim, y.ndim} != {1, 2}:
                raise ValueError(f"model: returned shape {tuple(prediction.shape)}; y has {tuple(y.shape)}")
            prediction = prediction.reshape(y.shape)  # (n, 1) against (n,) would broadcast to (n, n)
        if self.model.differentiable:
            residual = self.function(prediction, y)
            if not isinstance(residual, torch.Tensor):
                raise TypeError(
                    f"residual: returned {type(residual).__name__} for a model in torch; write it in torch operations"
                )
            return residual
        with np.errstate(all="ignore"):
            values = _as_array(self.function(prediction.numpy(), None if y is None else _read_only(y)))
        return _owned(values)

    def replicate(self, device: torch.device) -> "ResidualOf":
        """Return the same function with a replica of its model."""
        return ResidualOf(self.model.replicate(device), self.function)


def adapt_callable(
    function: Callable[..., Any],
    names: tuple[str, ...],
    order: str,
    sample: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    prefer_torch: bool,
    bounds: Bounds | None = None,
) -> TorchFunction | NumpyFunction:
    """Find out by trying whether a callable is written in numpy or in torch, and how it takes its parameters.

    Parameters
    ----------
    function : callable
    names : tuple of str
    order : {"params", "theta", "either", "residual", "predict"}
    sample : (theta, x, y)
        A point and some rows, float64, to call it with.
    prefer_torch : bool
        The data are torch tensors: numpy is not tried.
    bounds : (lower, upper), optional
        The box in which the callable may be evaluated.

    Returns
    -------
    TorchFunction or NumpyFunction
        The torch form where the output is connected to theta and, for numpy data, equals the numpy form: a
        function of both worlds (``a * x + b``) then has exact derivatives.

    Raises
    ------
    ValueError
        If neither form can be called; the message has both errors.
    """
    failures = []
    for form in ("params", "theta") if order == "either" else (order,):
        in_numpy, numpy_error = (None, None) if prefer_torch else _try_numpy(function, form, sample)
        in_torch, torch_error = _try_torch(function, form, sample)
        if in_torch is not None and (prefer_torch or numpy_error is not None or _agree(in_torch, in_numpy)):
            adapted = TorchFunction(function, names, form)
            if in_numpy is None or gradient_is_whole(adapted, *sample, bounds):
                return adapted
        if in_numpy is not None:
            return NumpyFunction(function, names, form)
        failures.append((numpy_error, torch_error))
    numpy_error, torch_error = failures[0]
    tried = [
        f"{kind}: {error}" for kind, error in (("numpy", numpy_error), ("torch", torch_error)) if error is not None
    ]
    cause = numpy_error if isinstance(numpy_error, BaseException) else None
    raise ValueError(f"model: the call at the start values failed ({'; '.join(tried)})") from cause


def _try_numpy(function: Callable[..., Any], order: str, sample: tuple) -> tuple[np.ndarray | None, Any]:
    theta, x, y = sample
    arrays = theta.cpu().numpy().copy(), _read_only(x.cpu()), None if y is None else _read_only(y.cpu())
    try:
        with np.errstate(all="ignore"):
            values = _as_array(_call(function, order, *arrays))
    except CALL_ERRORS as error:
        return None, error
    if values.dtype == object or not np.issubdtype(values.dtype, np.number):
        return None, f"returned {values.dtype} values; numbers are expected"
    return values, None


def _try_torch(function: Callable[..., Any], order: str, sample: tuple) -> tuple[torch.Tensor | None, Any]:
    """Return the values at theta, detached, when they depend on every parameter as autograd says."""
    theta, x, y = sample
    leaf = theta.clone().requires_grad_()
    try:
        with warnings_here("error"):  # numpy functions on tensors warn, and will fail one day
            values = _call(function, order, leaf, x, y)
    except (*CALL_ERRORS, Warning) as error:
        return None, error
    if not isinstance(values, torch.Tensor):
        return None, f"returned {type(values).__name__}, not a tensor"
    if values.is_complex():
        return None, "returned complex values"
    if not values.requires_grad:
        return None, "the output is not connected to the parameters by torch operations"
    return values.detach(), None


def gradient_is_whole(
    function: Callable[..., torch.Tensor],
    theta: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor | None,
    bounds: Bounds | None = None,
) -> bool:
    """Return whether autograd's derivative along one direction is that of the values, by central differences.

    In a box where these do not fit, by (-3 f(θ) + 4 f(θ + hd) - f(θ + 2hd)) / 2h towards the longer rooms.

    It is not where a parameter leaves the graph: through ``float(b)``, ``math.exp(b)``, ``b.item()``, ``detach``.
    Rows where either is not finite do not count. Where they disagree shorter steps are tried, down to a hundredth,
    while rounding allows them: a peak at 574 may be as narrow as the first step.
    """
    return any(_agrees_with_differences(function, theta, (x, y), bounds, shorter) for shorter in SHORTER)


def _agrees_with_differences(
    function: Callable[..., torch.Tensor],
    theta: torch.Tensor,
    data: tuple[torch.Tensor, torch.Tensor | None],
    bounds: Bounds | None,
    shorter: float,
) -> bool:
    x, y = data
    generator = torch.Generator().manual_seed(0)
    direction = torch.rand(theta.shape, generator=generator, dtype=torch.float64).add_(0.5).to(theta)
    direction = direction * torch.where(theta == 0, torch.ones_like(theta), theta.abs())
    h = shorter * torch.finfo(theta.dtype).eps ** (1 / 3)
    up, down = rooms(theta, bounds)
    central = bool((torch.minimum(up, down) >= h * direction).all())
    if not central:
        direction = torch.where(up >= down, 1.0, -1.0).to(theta) * direction.minimum(torch.maximum(up, down) / (2 * h))
    leaf = theta.clone().requires_grad_()
    values = function(leaf, x, y).reshape(-1)
    with torch.no_grad():
        points = [inside(theta + factor * h * direction, bounds) for factor in ((1, -1) if central else (1, 2))]
        first, second = (function(point, x, y).reshape(-1) for point in points)
        change = first - second if central else 4 * first - second - 3 * values
    difference = (change / (2 * h)).double()
    rounding = torch.finfo(theta.dtype).eps * values.detach().abs().double() / h * (1 if central else 4)
    finite = torch.isfinite(difference) & torch.isfinite(rounding)
    u = finite.to(theta) if bool(finite.all()) else torch.where(finite, 1.0, 0.0).to(theta)
    (gradient,) = torch.autograd.grad(values, leaf, u, materialize_grads=True)
    if not bool(torch.isfinite(gradient).all()):
        return True  # judged where the derivative is finite; a broken one is repaired or refused later
    along = float(gradient.double() @ direction.double())
    measured = float(difference[finite].sum())
    size = float(difference[finite].abs().sum()) + float((gradient.abs() * direction.abs()).sum())
    noise = 10 * float(rounding[finite].sum())
    return abs(along - measured) <= GRADIENT_RTOL * size + noise and (shorter == 1 or noise <= GRADIENT_RTOL * size)


def _agree(in_torch: torch.Tensor, in_numpy: np.ndarray | None) -> bool:
    if in_numpy is None:
        return True
    values = in_torch.cpu().numpy()
    if values.shape != in_numpy.shape:
        return False
    largest = np.max(np.abs(in_numpy), initial=0.0, where=np.isfinite(in_numpy))
    return np.allclose(values, in_numpy, rtol=0, atol=AGREE_RTOL * largest, equal_nan=True)
