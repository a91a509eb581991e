"""Values as JSON: what has no place there is tagged, and arrays are put aside as tensors.

===========================  =========================================
value                        JSON
===========================  =========================================
None, bool, int, str, list   themselves
finite float                 itself (every bit is kept)
NaN, inf, -inf               ``{"float": "nan"}``
tuple, set                   ``{"tuple": [...]}``, ``{"set": [...]}``
dict                         ``{"dict": [[key, value], ...]}``
array, tensor of numbers     ``{"array": name}``, ``{"tensor": name}``
array of words               ``{"words": [...]}``
torch device, dtype          ``{"device": "cpu"}``, ``{"dtype": "float64"}``
NumPy dtype or its class     ``{"numpy": "float64"}``
scipy.optimize.Bounds        ``{"Bounds": [lower, upper]}``
numpy RandomState            ``{"RandomState": [...]}``
an object of OBJECTS         ``{its class: {field: value}}``
===========================  =========================================

Nothing else is data: an object of another class, a function or a module raises :class:`NotDataError`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds

from lmfit_gpu.damping import MarquardtDamping, NielsenDamping, ProximalDamping, TrustRegion
from lmfit_gpu.early_stopping import EarlyStopping

__all__ = ["NotDataError", "decoded", "encoded"]

KINDS: tuple[Any, ...] = (TrustRegion, NielsenDamping, MarquardtDamping, ProximalDamping, EarlyStopping)
OBJECTS = {kind.__name__: kind for kind in KINDS}
DTYPES = {"float64": torch.float64, "float32": torch.float32}  # that ``dtype`` may be
NUMBERS = "fiub"  # kinds of NumPy dtype that torch has too
Tensors = dict[str, torch.Tensor]


class NotDataError(TypeError):
    """A value is code, or an object of a class that is not known here."""


def encoded(value: Any, tensors: Tensors, name: str) -> Any:
    """Return a value as JSON; put its arrays into `tensors` under names that begin with `name`.

    Raises
    ------
    NotDataError
        If it, or a part of it, is not data.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, (float, np.generic)):
        return _number(value)
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().cpu()
        return {"tensor": name}
    if type(value) is np.ndarray:
        return _array(value, tensors, name)
    if isinstance(value, Mapping):
        pairs = [[key, value[key]] for key in value]
        return {"dict": encoded(pairs, tensors, name)}
    for tag, kind in (("tuple", tuple), ("set", (set, frozenset)), ("list", list)):
        if isinstance(value, kind):
            entries = [encoded(entry, tensors, f"{name}.{number}") for number, entry in enumerate(value)]
            return entries if tag == "list" else {tag: entries}
    if isinstance(value, Bounds):
        return {"Bounds": encoded([value.lb, value.ub], tensors, name)}
    return _object(value, tensors, name)


def _number(value: Any) -> Any:
    if isinstance(value, (np.bool_, np.integer, np.str_)):
        return value.item()
    if not isinstance(value, (float, np.floating)):
        raise NotDataError(type(value).__name__)
    number = float(value)
    return number if math.isfinite(number) else {"float": str(number)}


def _array(value: np.ndarray, tensors: Tensors, name: str) -> Any:
    if value.dtype.kind in NUMBERS and value.dtype != np.longdouble:
        tensors[name] = torch.from_numpy(np.array(value, order="C", dtype=value.dtype.newbyteorder("=")))
        return {"array": name}
    if value.dtype.kind in "UO" and value.ndim == 1 and all(isinstance(entry, str) for entry in value):
        return {"words": [str(entry) for entry in value], "object": value.dtype.kind == "O"}
    raise NotDataError(f"array of {value.dtype}")


def _object(value: Any, tensors: Tensors, name: str) -> Any:
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.dtype) and value in DTYPES.values():
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.number)):
        return {"numpy": np.dtype(value).name, "class": isinstance(value, type)}
    if isinstance(value, np.random.RandomState):
        return {"RandomState": encoded(list(value.get_state(legacy=True)), tensors, name)}
    kind = type(value)
    if kind not in KINDS:
        raise NotDataError(kind.__name__)
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(kind)}
    return {kind.__name__: {field: encoded(part, tensors, f"{name}.{field}") for field, part in fields.items()}}


def decoded(value: Any, tensors: Tensors) -> Any:
    """Return the value that :func:`encoded` was given."""
    if isinstance(value, list):
        return [decoded(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    tag, content = next(iter(value.items()))
    if tag in OBJECTS:
        return OBJECTS[tag](**{field: decoded(part, tensors) for field, part in content.items()})
    if tag == "numpy":
        return np.dtype(content).type if value["class"] else np.dtype(content)
    if tag == "words":
        return np.array(content, dtype=object if value["object"] else str)
    if tag in ("tensor", "array"):
        return tensors[content] if tag == "tensor" else tensors[content].numpy()
    return _made(tag, decoded(content, tensors))


def _made(tag: str, content: Any) -> Any:
    if tag == "RandomState":
        random = np.random.RandomState()  # the kind that scikit-learn takes
        random.set_state(tuple(content))
        return random
    if tag == "Bounds":
        return Bounds(*content)
    if tag == "dtype":
        return DTYPES[content]
    simple = {"float": float, "tuple": tuple, "set": set, "dict": dict, "device": torch.device}
    return simple[tag](content)
