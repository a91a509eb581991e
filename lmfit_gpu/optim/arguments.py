"""What the arguments of a training loop must be, checked before any work."""

import numbers
from typing import Any

import torch

from lmfit_gpu.devices import resolve_devices
from lmfit_gpu.linear import SOLVERS

__all__ = [
    "ARITHMETIC",
    "check_dtype",
    "checked_attention",
    "checked_number",
    "checked_solver",
    "checked_whole",
    "devices_of",
    "first_parameter",
]

ARITHMETIC = (torch.float64, torch.float32)


def checked_number(name: str, value: Any, low: float, high: float, expected: str) -> float:
    """Return a number with low < value <= high, or raise ValueError."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not low < value <= high:
        raise ValueError(f"{name}: got {value!r}; {expected} is expected")
    return float(value)


def checked_whole(name: str, value: Any, least: int) -> int:
    """Return a whole number >= least, or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{name}: got {value!r}; a whole number >= {least} is expected")
    return int(value)


def first_parameter(model: Any) -> torch.Tensor:
    """Return a parameter that is trained: all have its dtype and device."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; a torch.nn.Module is expected")
    if any(isinstance(parameter, torch.nn.parameter.UninitializedParameter) for parameter in model.parameters()):
        raise ValueError("model: a lazy layer has no weights yet; call the model once on some rows")
    free = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not free:
        raise ValueError("model: has no parameters to train (requires_grad is False for all)")
    kinds = {(parameter.dtype, parameter.device) for parameter in free}
    if len(kinds) > 1 or free[0].dtype not in ARITHMETIC:
        given = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(f"model: its parameters are {given}; all float32 or all float64, on one device, are expected")
    return free[0]


def check_dtype(dtype: Any, own: torch.dtype) -> None:
    """Raise ValueError for a dtype, of torch or numpy, that is not that of the model."""
    if dtype is None:
        return
    names = {str(dtype), getattr(dtype, "__name__", ""), getattr(dtype, "name", "")}
    name = str(own).removeprefix("torch.")
    if not names & {name, f"torch.{name}"}:
        raise ValueError(f"dtype: got {dtype!r}; the model, and J with it, is in {name}: model.to(dtype) changes it")


def devices_of(devices: Any, own: torch.device) -> tuple[torch.device, ...]:
    """Return the devices, that of the model first."""
    listed = resolve_devices("auto" if devices is None else devices, own)
    home = own if own.type != "cuda" else torch.device("cuda", own.index or 0)
    if home not in listed:
        raise ValueError(
            f"model: is on {home}, devices are {[*map(str, listed)]}: model.to({str(listed[0])!r}) moves it"
        )
    first = listed.index(home)
    return (listed[first], *listed[:first], *listed[first + 1 :])


def checked_solver(solver: Any) -> str:
    """Return the name of a solver."""
    if not isinstance(solver, str) or solver not in ("auto", *SOLVERS):
        allowed = ", ".join(map(repr, ("auto", *SOLVERS)))
        raise ValueError(f"solver: got {solver!r}; allowed are {allowed} (not a callable, as in LeMA)")
    return solver


def checked_attention(attention: Any) -> Any:
    """Return an object with a method `updated`, or None, or raise TypeError."""
    if attention is not None and (isinstance(attention, type) or not callable(getattr(attention, "updated", None))):
        raise TypeError(f"attention: got {attention!r}; a ResidualAttention or None is expected")
    return attention
