"""Torch modules made by the estimator: factories, seeds and arithmetic."""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_random_state

__all__ = ["arithmetic", "is_factory", "made_by"]

DRAWING = threading.RLock()  # a module may be made of modules that are made here


def is_factory(model: Any) -> bool:
    """Return whether a model is a subclass of torch.nn.Module, or a partial of one, rather than an instance."""
    made = model.func if isinstance(model, functools.partial) else model
    return inspect.isclass(made) and issubclass(made, torch.nn.Module)


def made_by(factory: Callable[..., torch.nn.Module], n_features: int, n_outputs: int, seed: Any) -> torch.nn.Module:
    """Return a factory's module, its weights drawn from `seed`; torch's global state is left as it was.

    One thread at a time: modules draw from the generator that all threads share.
    """
    wanted = inspect.signature(factory).parameters
    sizes = {"n_features_in_": n_features, "n_outputs": n_outputs}
    devices = range(torch.cuda.device_count())  # all, as fork_rng takes with a warning
    with DRAWING, torch.random.fork_rng(devices):
        torch.manual_seed(int(check_random_state(seed).randint(2**31 - 1)))
        return factory(**{name: value for name, value in sizes.items() if name in wanted})


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
