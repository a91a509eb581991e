"""What of an estimator goes into a pickle: tensors on the CPU, and functions that pickle has no name for by value.

Python's pickle stores a function as the name of its module and its own. A lambda, a function in a function and
whatever ``__main__`` defines (a script, a notebook) have no name that another process can look up. Where a state has
such a part, or a tensor on a GPU, the whole state becomes one *packet* of bytes, written by cloudpickle: it stores the
code itself, with the variables that the code uses, and the packet holds for one minor version of Python. Every other
state stays as it is.

A part that even cloudpickle cannot store (an open file, a lock) is named in the error, with the argument it belongs to.
"""

import functools
import io
import os
import pickle
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import cloudpickle
import torch
from sklearn.exceptions import InconsistentVersionWarning

from lmfit_gpu.preparation import CPU

__all__ = ["described", "packed", "unpacked"]

PACKET, PYTHON, BY_VALUE, VERSION = "_packet", "_python", "_by_value", "_lmfit_gpu_version"
OWNER = "owner"  # how a packet refers to the estimator that it is the state of
# What pickling raises for objects that it cannot store: a lock TypeError, ctypes ValueError, a queue RuntimeError, ...
PICKLE_ERRORS = (pickle.PickleError, TypeError, AttributeError, ValueError, RuntimeError)
MOST_NESTED = 8  # parts of parts that an error names
SHOWN = 3


class _Nothing(io.RawIOBase):
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


class _NotPlainError(pickle.PicklingError):
    """A state has a part that must not go into a plain pickle."""


class _Plain(pickle.Pickler):
    """Python's pickler, which refuses tensors on other devices and what ``__main__`` defines."""

    def __init__(self, owner: Any) -> None:
        super().__init__(_Nothing(), protocol=pickle.HIGHEST_PROTOCOL)
        self.owner = owner

    def persistent_id(self, obj: Any) -> str | None:
        return OWNER if obj is self.owner else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            raise _NotPlainError("a tensor on another device")
        if isinstance(obj, (types.FunctionType, type)) and obj.__module__ == "__main__":
            raise _NotPlainError("only this process knows it")
        return NotImplemented


class _ByValue(cloudpickle.Pickler):
    """Cloudpickle's pickler, which moves tensors to the CPU and notes whose code it stores."""

    def __init__(self, file: io.BytesIO, owner: Any) -> None:
        super().__init__(file)
        self.owner = owner
        self.stored: list[str] = []

    def persistent_id(self, obj: Any) -> str | None:
        return OWNER if obj is self.owner else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            return _on_cpu(obj).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        reduced = super().reducer_override(obj)
        if reduced is not NotImplemented and isinstance(obj, (types.FunctionType, type)):
            self.stored.append(obj.__qualname__)
        return reduced


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, owner: Any) -> None:
        super().__init__(file)
        self.owner = owner

    def persistent_load(self, pid: Any) -> Any:
        return self.owner


def packed(owner: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an estimator as a pickle may hold it; `state` and what is in it stay untouched.

    Raises
    ------
    pickle.PicklingError
        If a part cannot be stored; the message names the argument, the part and what to do.
    """
    state = _on_host(state)
    if _is_plain(owner, state):
        return {**state, VERSION: version("lmfit-gpu")}
    try:
        data, stored = _by_value(owner, state)
    except PICKLE_ERRORS as error:
        raise _refusal(owner, state, error) from error
    packet: dict[str, Any] = {PACKET: data, VERSION: version("lmfit-gpu")}
    if stored:
        packet |= {PYTHON: tuple(sys.version_info[:2]), BY_VALUE: tuple(dict.fromkeys(stored))}
    return packet


def unpacked(owner: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that :func:`packed` was given.

    Raises
    ------
    pickle.UnpicklingError
        If it holds code of another minor version of Python.

    Warns
    -----
    InconsistentVersionWarning
        scikit-learn's: another version of lmfit_gpu wrote it.
    """
    state = dict(state)
    written, here = state.pop(VERSION, None), version("lmfit-gpu")
    if written not in (None, here):
        warnings.warn(
            InconsistentVersionWarning(
                estimator_name=type(owner).__name__, current_sklearn_version=here, original_sklearn_version=written
            ),
            stacklevel=3,
        )
    if PACKET not in state:
        return state
    python, running = state.get(PYTHON), tuple(sys.version_info[:2])
    if python not in (None, running):
        names = ", ".join(state[BY_VALUE][:SHOWN])
        raise pickle.UnpicklingError(
            f"{type(owner).__name__}: pickled under Python {python[0]}.{python[1]} with the code of {names}, which "
            f"only that version reads; this is Python {running[0]}.{running[1]}. Load it there and keep it by "
            "est.save(path), or write the functions (def) in a module that both can import, and pickle again"
        )
    found: dict[str, Any] = _Unpickler(io.BytesIO(state[PACKET]), owner).load()
    return found


def _is_plain(owner: Any, state: Mapping[str, Any]) -> bool:
    try:
        _Plain(owner).dump(state)
    except PICKLE_ERRORS:  # what it is about is found out by storing it
        return False
    return True


def _by_value(owner: Any, part: Any) -> tuple[bytes, list[str]]:
    """Return a part pickled by value, and the names of the functions and classes whose code is in it."""
    file = io.BytesIO()
    pickler = _ByValue(file, owner)
    pickler.dump(part)
    return file.getvalue(), pickler.stored


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    moved = tensor.detach().cpu()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
    return moved.requires_grad_(tensor.requires_grad)


def _on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an estimator that predicts on the CPU; the option ``devices`` is kept."""
    devices = state.get("devices_", ())
    if all(device.type == "cpu" for device in devices):
        return dict(state)
    return {**state, "devices_": (CPU,), "_setup": replace(state["_setup"], devices=(CPU,))}


# ---- errors


def _refusal(owner: Any, state: Mapping[str, Any], error: BaseException) -> pickle.PicklingError:
    """Return the error that names what cannot be pickled."""
    for name, value in state.items():
        reason = _failure(owner, value)
        if reason is not None:
            trail, culprit, reason = _culprit(owner, value, reason)
            inside = f"{described(value)}, of which {' of '.join(reversed(trail))} is" if trail else "it is"
            return pickle.PicklingError(
                f"{name}: cannot be pickled, not even by value: {inside} {described(culprit)} "
                f"({type(reason).__name__}: {reason}). Write {name} at the top level of a module (def, or class) so "
                "that it makes or opens such objects itself when it is called; or keep the fitted estimator by "
                "est.save(path), which stores no code. (With n_jobs, workers get pickles.)"
            )
    return pickle.PicklingError(f"{type(owner).__name__}: cannot be pickled: {type(error).__name__}: {error}")


def _failure(owner: Any, part: Any) -> BaseException | None:
    try:
        _by_value(owner, part)
    except PICKLE_ERRORS as error:
        return error
    return None


def _culprit(owner: Any, part: Any, reason: BaseException) -> tuple[list[str], Any, BaseException]:
    """Return the way to the innermost part that cannot be pickled, that part, and why."""
    trail: list[str] = []
    while len(trail) < MOST_NESTED:
        failures = ((name, inner, _failure(owner, inner)) for name, inner in _parts(part))
        name, inner, why = next((found for found in failures if found[2] is not None), ("", None, None))
        if why is None:
            break
        trail.append(name)
        part, reason = inner, why
    return trail, part, reason


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object is made of, with names for a message."""
    if isinstance(value, Mapping):
        yield from ((f"entry {key!r}", entry) for key, entry in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"entry {number}", entry) for number, entry in enumerate(value))
    elif isinstance(value, functools.partial):
        yield "the function", value.func
        yield from ((f"argument {number}", entry) for number, entry in enumerate(value.args))
        yield from ((f"argument {name!r}", entry) for name, entry in value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield "the object", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from ((f"the variable {name!r}", entry) for name, entry in _variables(value).items())
        yield from ((f"default {number}", entry) for number, entry in enumerate(value.__defaults__ or ()))
    elif not isinstance(value, type):
        yield from ((f"the attribute {name!r}", entry) for name, entry in getattr(value, "__dict__", {}).items())


def _variables(function: types.FunctionType) -> dict[str, Any]:
    """Return the variables of its surroundings that a function uses."""
    found = {name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found


def described(value: Any) -> str:
    """Return what an object is, for a message: no address, no contents."""
    if isinstance(value, functools.partial):
        return f"a partial of {described(value.func)}"
    if isinstance(value, types.MethodType):
        return f"the method {value.__func__.__qualname__}"
    if isinstance(value, types.FunctionType):
        code = value.__code__
        return f"the function {value.__qualname__} ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})"
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    kind = type(value)
    if isinstance(value, types.BuiltinFunctionType) or hasattr(value, "__name__"):
        return f"{value.__name__} ({kind.__name__})"
    return f"a {kind.__name__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"
