"""Torch modules made by the estimator: factories, seeds and arithmetic."""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_random_state

__all__ = ["arithmetic", "factory_parameters", "is_factory", "made_by", "with_parameters"]

SIZES = ("n_features_in_", "n_outputs")  # what a factory is told of the data
NO_VALUE = inspect.Parameter.empty

DRAWING = threading.RLock()  # a module may be made of modules that are made here


def is_factory(model: Any) -> bool:
    """Return whether a model is a subclass of torch.nn.Module, or a partial of one, rather than an instance."""
    made = model.func if isinstance(model, functools.partial) else model
    return inspect.isclass(made) and issubclass(made, torch.nn.Module)


def made_by(factory: Callable[..., torch.nn.Module], n_features: int, n_outputs: int, seed: Any) -> torch.nn.Module:
    """Return a factory's module, its weights drawn from `seed`; torch's global state is left as it was.

    Sizes that a partial already has are the user's. One thread at a time: modules draw from the generator that all
    threads share.
    """
    wanted = inspect.signature(factory).parameters
    given = _keywords(factory)
    sizes = {
        name: size
        for name, size in zip(SIZES, (n_features, n_outputs), strict=True)
        if name in wanted and name not in given
    }
    on_gpu = torch.cuda.is_initialized()  # else it is not initialised for the sake of its seeds
    number = int(check_random_state(seed).randint(2**31 - 1))
    with DRAWING, torch.random.fork_rng(range(torch.cuda.device_count()) if on_gpu else []):
        torch.default_generator.manual_seed(number)
        if on_gpu:
            torch.cuda.manual_seed_all(number)
        return factory(**sizes)


def _keywords(factory: Any) -> dict[str, Any]:
    return factory.keywords if isinstance(factory, functools.partial) else {}


def factory_parameters(factory: Callable[..., torch.nn.Module]) -> dict[str, Any]:
    """Return the parameters of a factory that a user may set, with their values.

    Returns
    -------
    dict of name to value
        :data:`NO_VALUE` for one that is needed and has none. Without ``n_features_in_`` and ``n_outputs``, which the
        estimator gives, unless a partial has them.

    Examples
    --------
    >>> factory_parameters(functools.partial(torch.nn.Bilinear, 3, 4, out_features=1))
    {'out_features': 1, 'bias': True, 'device': None, 'dtype': None}
    """
    given = _keywords(factory)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    settable = [p for p in inspect.signature(factory).parameters.values() if p.kind in by_name]
    own = {p.name: p.default for p in settable if p.name not in SIZES or p.name in given}
    return own | given  # those that only **kwargs take


def with_parameters(factory: Callable[..., torch.nn.Module], changes: dict[str, Any]) -> Any:
    """Return a partial of a factory with some parameters changed; the factory itself if none is.

    Raises
    ------
    ValueError
        For names that the factory does not take.
    """
    known = factory_parameters(factory)
    signature = inspect.signature(factory).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature)
    settable = {*known, *(p.name for p in signature if p.name in SIZES)}
    for name in changes:
        if not (takes_any or name in settable):
            raise ValueError(
                f"Invalid parameter {name!r} for model {factory!r}. Valid parameters are: {sorted(settable)!r}."
            )
    changes = {name: value for name, value in changes.items() if value is not known.get(name, NO_VALUE)}
    return functools.partial(factory, **changes) if changes else factory


def arithmetic(dtype: Any, own: torch.dtype) -> torch.dtype:
    """Return the torch dtype that the ``dtype`` argument means; None is the model's own.

    Raises
    ------
    ValueError
        For another dtype than float64 or float32, asked for or the module's own.
    """
    if dtype is None:
        if own not in (torch.float64, torch.float32):
            raise ValueError(f"model: its parameters are {own}; float64 or float32 is expected, or give dtype")
        return own
    if isinstance(dtype, (type, np.dtype)) and dtype in (np.float64, np.float32):
        dtype = str(np.dtype(dtype))
    known = {"float64": torch.float64, "float32": torch.float32}
    if dtype in (torch.float64, torch.float32):
        return dtype
    if not isinstance(dtype, str) or dtype not in known:
        raise ValueError(f"dtype: got {dtype!r}; torch.float64, torch.float32 or None is expected")
    return known[dtype]
