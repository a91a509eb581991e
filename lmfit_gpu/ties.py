r"""Ties: one parameter as a function of others, with its derivatives.

A tie is written in torch, or with numbers (numpy, math). Derivatives are those of autograd where autograd sees the
whole function, else difference quotients within the bounds of the argument.
"""

import graphlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lmfit_gpu.models import CALL_ERRORS
from lmfit_gpu.parameters import indices_of
from lmfit_gpu.warning_filters import warnings_here

__all__ = ["Tie", "ordered_ties", "tie_arguments", "tie_slope", "tie_value", "tried_tie"]

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


def tie_value(tie: Tie, values: list[torch.Tensor]) -> torch.Tensor:
    """Return the value of a tied parameter, in torch or by numbers."""
    if tie.in_torch:
        result = tie.function(*values)
        return result if isinstance(result, torch.Tensor) else torch.tensor(result, dtype=torch.float64)
    with np.errstate(all="ignore"):  # plain numbers: math functions then refuse complex ones, as they should
        result = np.asarray(tie.function(*(value.item() for value in values)))
    return torch.from_numpy(result.astype(np.complex128 if np.iscomplexobj(result) else np.float64))


def tie_slope(tie: Tie, position: int, values: torch.Tensor, box: tuple[np.ndarray, np.ndarray]) -> float:
    """Return the derivative of a tie by one of its arguments.

    Parameters
    ----------
    tie : Tie
    position : int
        Of the argument.
    values : Tensor, shape (n_all,)
        All parameters.
    box : (lower, upper), each of shape (n_all,)
        Where the tie may be evaluated.
    """
    at = [values[i].clone() for i in tie.arguments]
    if tie.in_torch:
        return _autograd_slope(tie, at, position)
    lower, upper = (float(side[tie.arguments[position]]) for side in box)
    return _difference_slope(tie, at, position, (lower, upper))


def _autograd_slope(tie: Tie, at: list[torch.Tensor], position: int) -> float:
    with torch.enable_grad():  # callers may have switched it off
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


def ordered_ties(tied: Any, names: tuple[str, ...]) -> dict[int, tuple[Callable[..., Any], tuple[int, ...]]]:
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


def tried_tie(name: str, index: int, function: Callable[..., Any], at: tuple[tuple[int, ...], np.ndarray]) -> Tie:
    """Return a tie that works at the start, in torch where torch can differentiate it."""
    arguments, values = at
    start = [torch.tensor(value, dtype=torch.float64) for value in values]
    by_torch = Tie(index, arguments, function, in_torch=True)
    tie = by_torch if _is_whole(by_torch, start) else Tie(index, arguments, function, in_torch=False)
    try:
        number = float(tie_value(tie, start))
    except CALL_ERRORS as error:
        raise ValueError(f"tied: {name!r}: its function fails at the start: {error}") from error
    if not np.isfinite(number):
        raise ValueError(f"tied: {name!r} is {number} at the start; a finite number is expected")
    return tie


def _is_whole(tie: Tie, start: list[torch.Tensor]) -> bool:
    """Return whether torch evaluates a tie and its derivative by every argument is that of its values.

    It is not where an argument leaves the graph: math.exp(s), float(s), s.item(), s.detach().
    """
    try:
        with warnings_here("error"):
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
