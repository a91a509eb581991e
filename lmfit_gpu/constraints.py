r"""Bounds, fixed and tied parameters: between the parameters of a model and the vector θ that is fitted.

Of the parameters of a model some are *fixed* at their start, some *tied* to others by a function, the rest, θ, is
*free* within its bounds:

.. math:: \text{all} = F(\theta), \qquad \ell \le \theta \le u, \qquad G = \partial F / \partial \theta .

The engine sees θ alone, through :class:`ConstrainedModel`. Estimates and their covariance go back the same way, the
covariance by the delta method, :math:`\mathrm{cov}(F(\hat\theta)) = G\, \mathrm{cov}(\hat\theta)\, G^T`
(Casella and Berger, Statistical Inference, 2nd ed., section 5.5.4).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from lmfit_gpu.box import Bounds
from lmfit_gpu.models import Model
from lmfit_gpu.parameters import indices_of
from lmfit_gpu.ties import Tie, ordered_ties, tie_slope, tie_value, tried_tie

__all__ = ["ConstrainedModel", "Constraints", "resolve_constraints"]

NO_ROOM = 64 * float(np.finfo(np.float64).eps)  # of the larger bound: no difference fits between them


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

    def bounds(self, like: torch.Tensor) -> Bounds | None:
        """Return (lower, upper) of the free parameters in the dtype and on the device of `like`; None without any."""
        lower, upper = (torch.from_numpy(side[self.free]) for side in (self.lower, self.upper))
        if not bool(torch.isfinite(torch.cat((lower, upper))).any()):
            return None
        low, high = lower.to(like.dtype), upper.to(like.dtype)  # rounded, where that is outside, inwards
        low = torch.where(low.double() < lower, torch.nextafter(low, torch.full_like(low, torch.inf)), low)
        high = torch.where(high.double() > upper, torch.nextafter(high, torch.full_like(high, -torch.inf)), high)
        return low.to(like.device), high.to(like.device)

    def box_of_model(self, like: torch.Tensor) -> Bounds:
        """Return (lower, upper) of what the model takes: where it may be tried."""
        lower, upper = (torch.from_numpy(side[: self.n_model]).to(like) for side in (self.lower, self.upper))
        return lower, upper

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
                    slopes[tie.index, depends] += (
                        tie_slope(tie, position, values, (self.lower, self.upper)) * slopes[i, depends]
                    )
        return slopes


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
        None or ±inf: no bound. Bounds that are equal, or nearly so (64 ε), fix a parameter.
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
    ties = ordered_ties(tied or {}, names)
    start = np.array(start, dtype=np.float64)
    is_tied = np.zeros(n_all, dtype=bool)
    is_tied[list(ties)] = True
    for i in np.flatnonzero(is_tied & (np.isfinite(lower) | np.isfinite(upper))):
        raise ValueError(f"bounds: {names[i]!r} is tied; only free parameters have bounds")
    for i in np.flatnonzero(is_tied & is_fixed):
        raise ValueError(f"fixed: {names[i]!r} is tied as well")
    for i in np.flatnonzero(is_fixed & (not given_start)):
        raise ValueError(f"fixed: {names[i]!r} keeps its start, but p0 gives none (equal bounds fix it with a value)")
    if not given_start:
        start = np.where(is_tied, start, between(lower, upper, start))
    for i in np.flatnonzero(~is_tied & ((start < lower) | (start > upper))):
        raise ValueError(f"p0: {names[i]!r} starts at {start[i]:g}, outside its bounds ({lower[i]:g}, {upper[i]:g})")
    with np.errstate(invalid="ignore"):
        narrow = upper - lower <= NO_ROOM * np.maximum(np.abs(lower), np.abs(upper))
    shut = narrow & np.isfinite(lower) & np.isfinite(upper)
    free = ~(is_fixed | is_tied | shut)
    if not free.any():
        raise ValueError("fixed, tied, bounds: no parameter is left free; nothing is to be fitted")
    found: list[Tie] = []
    for index, (function, arguments) in ties.items():
        tie = tried_tie(names[index], index, function, (arguments, start[list(arguments)]))
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
