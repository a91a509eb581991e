r"""Bounds, fixed and tied parameters: between the parameters of a model and the vector θ that is fitted.

Of the parameters of a model some are *fixed* at their start, some *tied* to others by a function, the rest, θ, is
*free* within its bounds:

.. math:: \text{all} = F(\theta), \qquad \ell \le \theta \le u, \qquad G = \partial F / \partial \theta .

The engine sees θ alone, through :class:`ConstrainedModel`. Estimates and their covariance go back the same way, the
covariance by the delta method, :math:`\mathrm{cov}(F(\hat\theta)) = G\, \mathrm{cov}(\hat\theta)\, G^T`
(Casella and Berger, Statistical Inference, 2nd ed., section 5.5.4).
"""

import graphlib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from lmfit_gpu.models import CALL_ERRORS, Model

__all__ = ["ConstrainedModel", "Constraints", "Tie", "resolve_constraints", "tie_arguments"]

NAMES_SHOWN = 8
EPSILON = float(np.finfo(np.float64).eps)
DIFFERENCE = EPSILON ** (1 / 3)
SLOPE_RTOL = 1e-2  # a tie's derivative by autograd against differences: what left the graph is missing whole


@dataclass(frozen=True)
class Tie:
    """One parameter as a function of others."""

    index: int
    arguments: tuple[int, ...]
    function: Callable[..., Any]
    in_torch: bool


@dataclass(frozen=True)
class Constraints:
    """Which parameters are free, within which bounds, and how the others follow.

    Parameters
    ----------
    names : tuple of str
        All parameters: those of the model in its order, then those that only occur in `tied`.
    n_model : int
        How many of them the model takes.
    start : ndarray, shape (n_all,)
        Tied entries are what their functions give.
    lower, upper : ndarray, shape (n_all,)
        ±inf: no bound.
    free : ndarray of bool, shape (n_all,)
    ties : tuple of Tie
        Each depends on free and fixed parameters and on ties before it.
    """

    names: tuple[str, ...]
    n_model: int
    start: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    free: np.ndarray
    ties: tuple[Tie, ...] = ()

    @cached_property
    def free_names(self) -> tuple[str, ...]:
        """Names of the free parameters."""
        return tuple(np.array(self.names, dtype=object)[self.free])

    @property
    def in_torch(self) -> bool:
        """Whether torch can differentiate the ties."""
        return all(tie.in_torch for tie in self.ties)

    def theta(self) -> np.ndarray:
        """Return the start of the free parameters, shape (n_free,)."""
        return self.start[self.free]

    def bounds(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (lower, upper) of the free parameters in the dtype and on the device of `like`; None without any."""
        lower, upper = (torch.from_numpy(side[self.free]) for side in (self.lower, self.upper))
        if not bool(torch.isfinite(torch.cat((lower, upper))).any()):
            return None
        low, high = lower.to(like.dtype), upper.to(like.dtype)  # rounded, where that is outside, inwards
        low = torch.where(low.double() < lower, torch.nextafter(low, torch.full_like(low, torch.inf)), low)
        high = torch.where(high.double() > upper, torch.nextafter(high, torch.full_like(high, -torch.inf)), high)
        return low.to(like.device), high.to(like.device)

    @cached_property
    def _order(self) -> tuple[np.ndarray, np.ndarray]:
        """Return where every parameter stands in (free, fixed, ties), and the indices of the fixed."""
        tied = [tie.index for tie in self.ties]
        fixed = np.setdiff1d(np.flatnonzero(~self.free), tied)
        order = np.empty(len(self.names), dtype=np.int64)
        order[np.concatenate((np.flatnonzero(self.free), fixed, np.array(tied, dtype=np.int64)))] = np.arange(
            len(self.names)
        )
        return order, fixed

    def full(self, theta: torch.Tensor) -> torch.Tensor:
        """Return all parameters, shape (n_all, ...), of free ones, shape (n_free, ...)."""
        order, fixed = self._order
        constant = torch.from_numpy(self.start[fixed]).to(theta)
        constant = constant.reshape(-1, *(1,) * (theta.ndim - 1)).expand(-1, *theta.shape[1:])
        parts = torch.cat((theta, constant))
        for tie in self.ties:
            value = tie_value(tie, [parts[order[index]] for index in tie.arguments])
            value = value.to(parts)
            value = value.reshape(theta.shape[1:]) if value.numel() == parts[0].numel() else value.expand_as(parts[0])
            parts = torch.cat((parts, value[None]))
        return parts[torch.from_numpy(order).to(theta.device)]

    def derivative(self, theta: torch.Tensor) -> torch.Tensor:
        """Return G = ∂F/∂θ, shape (n_all, n_free), in float64 on the CPU, by the chain rule through the ties."""
        values = self.full(theta.detach().double().cpu())
        slopes = torch.zeros(len(self.names), theta.numel(), dtype=torch.float64)
        slopes[torch.from_numpy(np.flatnonzero(self.free)), torch.arange(theta.numel())] = 1.0
        for tie in self.ties:
            for position, i in enumerate(tie.arguments):
                depends = slopes[i] != 0
                if bool(depends.any()):  # not on fixed parameters alone
                    slopes[tie.index, depends] += self._partial(tie, position, values) * slopes[i, depends]
        return slopes

    def _partial(self, tie: Tie, position: int, values: torch.Tensor) -> float:
        """Return the derivative of a tie by one of its arguments: by autograd, or by differences within its bounds."""
        at = [values[i].clone() for i in tie.arguments]
        if tie.in_torch:
            return _autograd_slope(tie, at, position)
        i = tie.arguments[position]
        return _difference_slope(tie, at, position, (float(self.lower[i]), float(self.upper[i])))


def _autograd_slope(tie: Tie, at: list[torch.Tensor], position: int) -> float:
    leaf = at[position].detach().clone().requires_grad_()
    value = tie_value(tie, [*at[:position], leaf, *at[position + 1 :]])
    if not value.requires_grad:
        return 0.0
    return float(torch.autograd.grad(value.reshape(()), leaf, materialize_grads=True)[0])


def _difference_slope(tie: Tie, at: list[torch.Tensor], position: int, bounds: tuple[float, float]) -> float:
    """Return the difference quotient of the step whose rounding and truncation are least; NaN where there is none.

    The step is relative to the argument at first, and at last to 1: near 1e-9 a tie 1 − x needs the longer ones.
    """
    x = float(at[position])

    def value(moved: float) -> float:
        moved_at = [*at[:position], torch.tensor(moved, dtype=torch.float64), *at[position + 1 :]]
        try:
            return float(tie_value(tie, moved_at))
        except CALL_ERRORS:
            return float("nan")

    def quotient(h: float) -> float:
        ahead, behind = min(x + h, bounds[1]), max(x - h, bounds[0])
        return (value(ahead) - value(behind)) / (ahead - behind) if ahead > behind else float("nan")

    best, least = float("nan"), float("inf")
    size, longest = abs(x) or DIFFERENCE, max(abs(x), 1.0)
    while size <= longest:
        h = DIFFERENCE * size
        found, wider = quotient(h), quotient(2 * h)
        error = abs(found - wider) + 2 * EPSILON * (abs(value(x)) + abs(found * x)) / h
        if error < least:
            best, least = found, error
        size *= 10
    return best


def tie_value(tie: Tie, values: list[torch.Tensor]) -> torch.Tensor:
    """Return the value of a tied parameter, in torch or by numbers."""
    if tie.in_torch:
        result = tie.function(*values)
        return result if isinstance(result, torch.Tensor) else torch.tensor(result, dtype=torch.float64)
    with np.errstate(all="ignore"):  # plain numbers: math functions then refuse complex ones, as they should
        result = np.asarray(tie.function(*(value.item() for value in values)))
    return torch.from_numpy(result.astype(np.complex128 if np.iscomplexobj(result) else np.float64))


@dataclass(frozen=True)
class ConstrainedModel:
    """A model as a function of its free parameters."""

    model: Model
    constraints: Constraints
    names: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        """Name the free parameters."""
        object.__setattr__(self, "names", self.constraints.free_names)

    @property
    def is_residual(self) -> bool:
        """Whether the values are residuals."""
        return self.model.is_residual

    @property
    def differentiable(self) -> bool:
        """Whether torch can differentiate the model and the ties."""
        return self.model.differentiable and self.constraints.in_torch

    @property
    def order(self) -> str | None:
        """How the model is called; what a user's Jacobian is called like."""
        return getattr(self.model, "order", None)

    def all_parameters(self, theta: torch.Tensor) -> torch.Tensor:
        """Return what the model takes, shape (n_model,)."""
        return self.constraints.full(theta)[: self.constraints.n_model]

    def __call__(self, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        """Return the values of the model."""
        return self.model(self.all_parameters(theta), x, y)

    def replicate(self, device: torch.device) -> "ConstrainedModel":
        """Return the same function with a replica of its model."""
        return ConstrainedModel(self.model.replicate(device), self.constraints)


def resolve_constraints(  # noqa: PLR0913
    names: Sequence[str],
    n_model: int,
    start: np.ndarray,
    given_start: bool,
    bounds: Any = None,
    fixed: Any = (),
    tied: Mapping[str, Callable[..., Any]] | None = None,
) -> Constraints | None:
    """Return the constraints of a fit, or None when there are none.

    Parameters
    ----------
    names : sequence of str
        All parameters: of the model in its order, then those that only ties use.
    n_model : int
        How many of them the model takes.
    start : ndarray, shape (n_all,)
    given_start : bool
        Whether the start was given; else it is moved between the bounds, as SciPy does.
    bounds : pair of scalars or array_like of shape (n_model,), Mapping of name to (low, high), or Bounds
        None or ±inf: no bound. Equal bounds fix a parameter.
    fixed : sequence of names, or of bool of shape (n_model,)
    tied : Mapping of name to callable
        Whose argument names are those of other parameters.

    Raises
    ------
    ValueError, TypeError
        For names that do not exist, bounds that cross or leave out the start, ties in a circle.
    """
    if bounds is None and not tied and _is_empty(fixed):
        return None
    names, n_all = tuple(names), len(names)
    lower, upper = _resolved_bounds(bounds, names, n_model)
    is_fixed = _resolved_fixed(fixed, names, n_model)
    ties = _ordered_ties(tied or {}, names)
    start = np.array(start, dtype=np.float64)
    is_tied = np.zeros(n_all, dtype=bool)
    is_tied[list(ties)] = True
    for i in np.flatnonzero(is_tied & (np.isfinite(lower) | np.isfinite(upper))):
        raise ValueError(f"bounds: {names[i]!r} is tied; only free parameters have bounds")
    for i in np.flatnonzero(is_tied & is_fixed):
        raise ValueError(f"fixed: {names[i]!r} is tied as well")
    if not given_start:
        start = np.where(is_tied, start, between(lower, upper, start))
    for i in np.flatnonzero(~is_tied & ((start < lower) | (start > upper))):
        raise ValueError(f"p0: {names[i]!r} starts at {start[i]:g}, outside its bounds ({lower[i]:g}, {upper[i]:g})")
    free = ~(is_fixed | is_tied | (lower == upper))
    if not free.any():
        raise ValueError("fixed, tied, bounds: no parameter is left free; nothing is to be fitted")
    found: list[Tie] = []
    for index, (function, arguments) in ties.items():
        tie = _tried(names, index, function, (arguments, start[list(arguments)]))
        start[index] = float(tie_value(tie, [torch.tensor(start[i], dtype=torch.float64) for i in arguments]))
        found.append(tie)
    return Constraints(names, n_model, start, lower, upper, free, tuple(found))


def _is_empty(fixed: Any) -> bool:
    return fixed is None or (not isinstance(fixed, str) and np.size(fixed) == 0)


def between(lower: np.ndarray, upper: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Return a start within bounds: the middle of two, 1 from a single one, else `start`."""
    has_low, has_high = np.isfinite(lower), np.isfinite(upper)
    with np.errstate(invalid="ignore", over="ignore"):
        middle = 0.5 * lower + 0.5 * upper
        one_sided = np.where(has_low, lower + 1, np.where(has_high, upper - 1, start))
    return np.where(has_low & has_high, middle, one_sided)


def indices_of(name: Any, names: tuple[str, ...], argument: str) -> list[int]:
    """Return the positions of a parameter, or of all entries of a module's tensor.

    Raises
    ------
    ValueError
        If there is none; the message names `argument`.
    """
    if name in names:
        return [names.index(name)]
    entries = [i for i, other in enumerate(names) if isinstance(name, str) and other.startswith(name + "[")]
    if not entries:
        more = ", ..." if len(names) > NAMES_SHOWN else ""
        raise ValueError(f"{argument}: no parameter {name!r}; there are {', '.join(names[:NAMES_SHOWN])}{more}")
    return entries


def _resolved_bounds(bounds: Any, names: tuple[str, ...], n_model: int) -> tuple[np.ndarray, np.ndarray]:
    lower, upper = np.full(len(names), -np.inf), np.full(len(names), np.inf)
    if isinstance(bounds, Mapping):
        for name, pair in bounds.items():
            low, high = _pair(pair, f"of {name!r} ")
            at = indices_of(name, names, "bounds")
            lower[at], upper[at] = _sides(low, high, 1, f"of {name!r} ")
    elif bounds is not None:
        low, high = (bounds.lb, bounds.ub) if hasattr(bounds, "lb") and hasattr(bounds, "ub") else _pair(bounds, "")
        lower[:n_model], upper[:n_model] = _sides(low, high, n_model, "")
    for i in np.flatnonzero(~((lower <= upper) & (lower < np.inf) & (upper > -np.inf))):
        raise ValueError(f"bounds: of {names[i]!r}: lower {lower[i]:g}, upper {upper[i]:g}; lower <= upper is expected")
    return lower, upper


def _pair(bounds: Any, whose: str) -> tuple[Any, Any]:
    if not isinstance(bounds, (Sequence, np.ndarray, torch.Tensor)) or isinstance(bounds, str) or len(bounds) != 2:
        raise ValueError(f"bounds: got {bounds!r} {whose}; a pair (lower, upper), or a dict of them, is expected")
    return bounds[0], bounds[1]


def _sides(low: Any, high: Any, n: int, whose: str) -> tuple[np.ndarray, np.ndarray]:
    return _one_side(low, n, whose, -np.inf), _one_side(high, n, whose, np.inf)


def _one_side(side: Any, n: int, whose: str, unbounded: float) -> np.ndarray:
    """Return one side of the bounds, shape (n,), `unbounded` where it is None."""
    if isinstance(side, torch.Tensor):
        side = side.detach().cpu().numpy()
    try:
        if np.iscomplexobj(side):
            raise TypeError("complex numbers")
        values = np.array(side, dtype=np.float64)
        missing = np.vectorize(lambda entry: entry is None, otypes=[bool])(np.array(side, dtype=object))
    except (TypeError, ValueError) as error:
        raise ValueError(f"bounds: got {side!r} {whose}; numbers are expected") from error
    if values.ndim > 1 or values.size not in (1, n):
        raise ValueError(f"bounds: {whose}got shape {values.shape}; a scalar or ({n},) is expected")
    if bool((np.isnan(values) & ~missing).any()):
        raise ValueError(f"bounds: got NaN {whose}; numbers, ±inf or None are expected")
    return np.broadcast_to(np.where(missing, unbounded, values).reshape(-1), (n,))


def _resolved_fixed(fixed: Any, names: tuple[str, ...], n_model: int) -> np.ndarray:
    mask = np.zeros(len(names), dtype=bool)
    if _is_empty(fixed):
        return mask
    if isinstance(fixed, torch.Tensor):
        fixed = fixed.cpu().numpy()
    if not isinstance(fixed, (str, Sequence, np.ndarray, set, frozenset)):
        raise TypeError(f"fixed: got {fixed!r}; names of parameters, or a mask of bool, are expected")
    entries = [fixed] if isinstance(fixed, str) else list(fixed)
    if all(isinstance(entry, (bool, np.bool_)) for entry in entries):
        if len(entries) != n_model:
            raise ValueError(f"fixed: got a mask of {len(entries)} entries for {n_model} parameters")
        mask[:n_model] = entries
        return mask
    for name in entries:
        if not isinstance(name, str):
            raise ValueError(f"fixed: got {fixed!r}; names of parameters, or a mask of bool, are expected")
        mask[indices_of(name, names, "fixed")] = True
    return mask


def tie_arguments(name: str, function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters that a tie takes.

    Raises
    ------
    TypeError, ValueError
        If it is not callable, or takes anything but named parameters.
    """
    if not callable(function):
        raise TypeError(f"tied: {name!r}: got {function!r}; a callable of other parameters is expected")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError) as error:
        raise ValueError(f"tied: {name!r}: the signature of its function cannot be read; use a lambda") from error
    wanted = [p for p in parameters if p.default is inspect.Parameter.empty or p.kind is p.POSITIONAL_ONLY]
    if any(p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in wanted):
        raise ValueError(f"tied: {name!r}: its function takes *args or keywords; name the parameters it depends on")
    return tuple(p.name for p in wanted)


def _ordered_ties(tied: Any, names: tuple[str, ...]) -> dict[int, tuple[Callable[..., Any], tuple[int, ...]]]:
    """Return {index: (function, indices of its arguments)}, each after those it depends on."""
    if not isinstance(tied, Mapping):
        raise TypeError(f"tied: got {tied!r}; a dict of name to callable is expected")
    ties = {}
    for name, function in tied.items():
        (index, *more) = indices_of(name, names, "tied")
        if more:
            raise ValueError(f"tied: {name!r} is a tensor of {1 + len(more)} parameters; tie its entries one by one")
        arguments = [(other, indices_of(other, names, f"tied: {name!r}")) for other in tie_arguments(name, function)]
        for other, found in arguments:
            if len(found) > 1:
                raise ValueError(f"tied: {name!r} depends on {other!r}, which is a tensor of {len(found)} parameters")
        ties[index] = function, tuple(found[0] for _, found in arguments)
    graph = {index: set(arguments) & ties.keys() for index, (_, arguments) in ties.items()}
    try:
        order = list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        circle = " -> ".join(names[i] for i in error.args[1])
        raise ValueError(f"tied: parameters depend on each other in a circle: {circle}") from error
    return {index: ties[index] for index in order}


def _tried(
    names: tuple[str, ...], index: int, function: Callable[..., Any], at: tuple[tuple[int, ...], np.ndarray]
) -> Tie:
    """Return a tie that works at the start, in torch where torch can differentiate it."""
    arguments, values = at
    start = [torch.tensor(value, dtype=torch.float64) for value in values]
    by_torch = Tie(index, arguments, function, in_torch=True)
    tie = by_torch if _is_whole(by_torch, start) else Tie(index, arguments, function, in_torch=False)
    try:
        number = float(tie_value(tie, start))
    except CALL_ERRORS as error:
        raise ValueError(f"tied: {names[index]!r}: its function fails at the start: {error}") from error
    if not np.isfinite(number):
        raise ValueError(f"tied: {names[index]!r} is {number} at the start; a finite number is expected")
    return tie


def _is_whole(tie: Tie, start: list[torch.Tensor]) -> bool:
    """Return whether torch evaluates a tie and its derivative by every argument is that of its values.

    It is not where an argument leaves the graph: math.exp(s), float(s), s.item(), s.detach().
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if start and not isinstance(tie.function(*start), torch.Tensor):
                return False
            for position in range(len(start)):
                by_autograd = _autograd_slope(tie, start, position)
                measured = _difference_slope(tie, start, position, (-np.inf, np.inf))
                if abs(by_autograd - measured) > SLOPE_RTOL * max(abs(by_autograd), abs(measured)):
                    return False
    except (*CALL_ERRORS, Warning):
        return False
    return True
