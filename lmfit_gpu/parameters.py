"""Names and start values of the parameters of a model."""

import inspect
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmfit_gpu.exceptions import FitWarning

__all__ = ["Start", "call_signature", "indices_of", "resolve_start"]

NAMES_SHOWN = 8


@dataclass(frozen=True)
class Start:
    """Names and start values.

    Parameters
    ----------
    theta : ndarray, shape (n_all,), float64
        NaN for a tied parameter without a value.
    names : tuple of str
        From the signature or the dict, else ``p0, p1, ...``; those of the model first.
    order : {"params", "theta", "either", "residual", ...}
        How the model is called.
    n_model : int
        How many the model takes; the others occur in ties only.
    given : bool
        Whether values were given; else they are 1.
    """

    theta: np.ndarray
    names: tuple[str, ...]
    order: str
    n_model: int
    given: bool = True


def resolve_start(
    p0: Any,
    function: Callable[..., Any],
    data: tuple[Any, Any],
    order: str | None = None,
    ties: Mapping[str, Sequence[str]] | None = None,
) -> Start:
    """Return start values, names and calling order of a model function.

    Parameters
    ----------
    p0 : sequence, dict of name to value, callable (x, y) -> either, "auto", or None
        None is 1 for every parameter, with a :class:`FitWarning`; "auto" without one: a search follows.
    function : callable
        f(x, *params) or f(X, theta); with order "residual" residual(theta, X, y).
    data : (x, y)
        What a callable p0 is called with.
    order : {"residual", "module"}, optional
        Known beforehand for residual callables and modules: names then come from p0 alone.
    ties : dict of name to names, optional
        Tied parameters, which need no start, and what they depend on: parameters of the model, or new ones.

    Raises
    ------
    ValueError
        If p0 is not finite numbers, has names or a length that the model does not, or is needed and missing.
    TypeError
        If p0 is a number where a sequence is expected.
    """
    ties = ties or {}
    start = p0(*data) if callable(p0) else p0
    if isinstance(start, numbers.Real):
        start = [start]
    if isinstance(start, str) and start != "auto":
        raise ValueError(f"p0: got {start!r}; a sequence, a dict, a callable (x, y), 'auto' or None is expected")
    if start is None or isinstance(start, str):
        return _ones(function, order, ties, searched=start is not None)
    if isinstance(start, Mapping):
        return _from_names(start, function, order, ties)
    theta = _vector(start)
    names, found = (None, order) if order is not None else call_signature(function, len(theta))
    names = names or _numbered(len(theta))
    theta = _finite(np.array([1.0 if name in ties else value for name, value in zip(names, theta, strict=True)]))
    for name in _new_names(names, ties):
        raise ValueError(f"p0: {name!r}, which a tie depends on, has no start value; give p0 as a dict")
    return Start(theta, names, str(found), len(names))


def _new_names(names: Sequence[str], ties: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the names that only ties use, each once."""
    used = dict.fromkeys(argument for arguments in ties.values() for argument in arguments)
    return tuple(name for name in used if name not in names)


def _ones(function: Callable[..., Any], order: str | None, ties: Mapping[str, Sequence[str]], searched: bool) -> Start:
    if order is not None:
        raise ValueError("p0: a residual callable takes all parameters as one vector; give p0 to tell how many")
    of_model, order = call_signature(function, None)
    assert of_model is not None  # call_signature(f, None) raises when the signature names none
    names = of_model + _new_names(of_model, ties)
    if not searched:
        guessed = ", ".join(name for name in names if name not in ties)
        message = f"p0: no start values given, 1 is used for {guessed}; a good start decides what a fit finds"
        warnings.warn(message, FitWarning, stacklevel=4)
    return Start(np.ones(len(names)), names, order, len(of_model), given=False)


def _from_names(
    start: Mapping[str, float], function: Callable[..., Any], order: str | None, ties: Mapping[str, Sequence[str]]
) -> Start:
    given = tuple(start)
    of_model: tuple[str, ...] | None = given
    if order is None:
        signature = _signature_names(function)
        named = bool(set(given) & set(signature))
        new = _new_names(signature, ties) if named else ()
        unknown = set(given).difference(signature, ties, new) if named else ()
        if unknown and ties:
            raise ValueError(f"p0: no parameter {', '.join(map(repr, sorted(unknown)))}; there are {signature + new}")
        of_model, order = call_signature(function, len(set(given).union(ties).difference(new)) if named else len(given))
    names = (of_model or given) + _new_names(of_model or given, ties)
    wanted = {name for name in names if name not in ties}
    if set(given) - set(ties) != wanted or not set(given) <= set(names):
        raise ValueError(f"p0: got names {given}; the model{' with its ties' if ties else ''} has {names}")
    values = _finite(_vector([1.0 if name in ties else start[name] for name in names]))
    return Start(values, names, order, len(of_model or given))


def _signature_names(function: Callable[..., Any]) -> tuple[str, ...]:
    arguments, _ = _positional_arguments(function)
    return () if arguments is None else tuple(argument.name for argument in arguments[1:])


def _vector(values: Any) -> np.ndarray:
    try:
        return np.array([float(value) for value in values])
    except (TypeError, ValueError) as error:
        raise TypeError(f"p0: got {values!r}; a sequence of numbers is expected") from error


def _finite(theta: np.ndarray) -> np.ndarray:
    if theta.size == 0 or not np.isfinite(theta).all():
        raise ValueError(f"p0: got {theta.tolist()}; at least one value, all finite, is expected")
    return theta


def _numbered(n: int) -> tuple[str, ...]:
    return tuple(f"p{i}" for i in range(n))


def call_signature(function: Callable[..., Any], n_params: int | None) -> tuple[tuple[str, ...] | None, str]:
    """Read from the signature of f(x, ...) the parameter names and how they are passed.

    Parameters
    ----------
    function : callable
    n_params : int or None
        Number of start values, None when not known.

    Returns
    -------
    names : tuple of str, or None
        None when the signature does not name them (``*params``, ``theta``, no signature).
    order : {"params", "theta", "either"}
        "either" when only a trial call can tell.

    Raises
    ------
    ValueError
        If the number of start values does not fit the signature, or neither tells the number of parameters.

    Examples
    --------
    >>> call_signature(lambda x, a, b: a + b * x, 2)
    (('a', 'b'), 'params')
    >>> call_signature(lambda X, theta: X @ theta, 3)
    (None, 'theta')
    """
    arguments, variadic = _positional_arguments(function)
    if arguments is None or variadic:
        if n_params is None:
            raise ValueError("p0: the signature of the model does not tell the number of parameters; give p0")
        return None, "params" if variadic else "either"
    names = tuple(argument.name for argument in arguments[1:])
    if n_params is None:
        if not names:
            raise ValueError("model: its signature has no parameter after x")
        if names in (("theta",), ("params",)):
            raise ValueError(f"p0: the model takes all parameters as one vector {names[0]!r}; give p0 to tell how many")
        return names, "params"
    if not names:
        raise ValueError("model: its signature has no parameter after x")
    required = sum(argument.default is inspect.Parameter.empty for argument in arguments[1:])
    if names[0] == "theta" and (len(names) == 1 or required == 1):
        return None, "theta"
    if len(names) == 1 and n_params == 1:
        return names, "either"
    if required <= n_params <= len(names):
        return names[:n_params], "params"
    if len(names) == 1:
        return None, "theta"
    raise ValueError(f"p0: got {n_params} values, but the model takes {len(names)} parameters {names}")


def _positional_arguments(function: Callable[..., Any]) -> tuple[list[inspect.Parameter] | None, bool]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # builtins and compiled callables have none
        return None, False
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)], variadic


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
