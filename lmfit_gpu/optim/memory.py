"""What a training loop remembers from one batch to the next, and how that is written down."""

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lmfit_gpu.damping import Lambda, Region, Scale, rescaled
from lmfit_gpu.linear import Step
from lmfit_gpu.rows import tensors_of

__all__ = ["Last", "Memory", "fitting_scale", "is_seen", "references"]


@dataclass(frozen=True)
class Last:
    """The last accepted step, for the judgement on other rows.

    Parameters
    ----------
    theta : Tensor, shape (n_params,)
        Where it started.
    policy : object
        State of the policy before its verdict.
    predicted : float
        Predicted fall of the cost for each counted residual.
    gain_ratio : float
        On the rows it was made for.
    scaled_norm, damping : float
        Of the step; the former for each square root of a counted residual.
    """

    theta: torch.Tensor
    policy: Any
    predicted: float
    gain_ratio: float
    scaled_norm: float
    damping: float

    def step(self, factor: float) -> Step:
        """Return the step without its p, in the units of a batch with factor² residuals."""
        return Step(torch.empty(0), self.predicted * factor**2, self.scaled_norm * factor, self.damping)


@dataclass(frozen=True)
class Memory:
    """State of a training loop between two steps; immutable.

    Lengths and costs are for each square root of a counted residual, and each counted residual: batches of any size
    share them.

    Parameters
    ----------
    n_steps : int
    policy : object or None
        State of the damping policy.
    scale : Scale or None
        D, one number for each parameter or each tensor.
    cost : float or None
        After the last step, on its own rows.
    fall : float
        Relative fall of the cost in the last step.
    stopped : bool
        The last step met a stop test.
    last : Last or None
        The last step while it may be judged again.
    displacement : Tensor or None
        Of the last accepted step, for momentum.
    row_weights : dict of str to Tensor
        Attention of each group.
    """

    n_steps: int = 0
    policy: Any = None
    scale: Scale | None = None
    cost: float | None = None
    fall: float = 1.0
    stopped: bool = False
    last: Last | None = None
    displacement: torch.Tensor | None = None
    row_weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def in_units_of(self, n_counted: int) -> tuple[Any, Scale | None]:
        """Return the state of the policy and D for a batch of so many residuals."""
        root = n_counted**0.5
        scale = None if self.scale is None else Scale(self.scale.d * root, self.scale.placeholder)
        return rescaled(self.policy, root), scale

    def with_units_of(self, n_counted: int, policy: Any, scale: Scale | None) -> "Memory":
        """Return the memory with the state of the policy and D of a batch."""
        root = n_counted**0.5
        scale = None if scale is None else Scale(scale.d / root, scale.placeholder)
        return replace(self, policy=rescaled(policy, 1 / root), scale=scale)

    def cast(self, dtype: torch.dtype) -> "Memory":
        """Return the memory with points and displacements in an arithmetic."""
        last = None if self.last is None else replace(self.last, theta=self.last.theta.to(dtype))
        displacement = None if self.displacement is None else self.displacement.to(dtype)
        return replace(self, last=last, displacement=displacement)

    def written(self) -> dict[str, Any]:
        """Return plain numbers, strings, tensors, and dicts of them."""
        return {name: _written(getattr(self, name)) for name in (f.name for f in dataclasses.fields(self))}

    @classmethod
    def read(cls, state: Mapping[str, Any], device: torch.device) -> "Memory":
        """Return the memory that was written.

        Raises
        ------
        ValueError
            If it is not one.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(state, Mapping) or set(state) != names:
            given = sorted(state) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"state_dict: memory holds {given}; {sorted(names)} is expected")
        return cls(**{name: _read(value, device) for name, value in state.items()})


def fitting_scale(scale: Any, norms: torch.Tensor, sizes: Sequence[int]) -> Any:
    """Return D of the last batch with one number for each of `norms`; for a tensor the root of its mean square."""
    if scale is None or scale.d.numel() == norms.numel():
        return scale
    counts = torch.tensor(sizes, device=norms.device)
    if scale.d.numel() == len(sizes):
        return replace(
            scale, d=scale.d.repeat_interleave(counts), placeholder=scale.placeholder.repeat_interleave(counts)
        )
    squares = torch.stack([(part**2).mean() for part in scale.d.split(list(sizes))])
    placeholder = torch.stack([part.all() for part in scale.placeholder.split(list(sizes))])
    return replace(scale, d=squares**0.5, placeholder=placeholder)


def references(batch: Any) -> list[tuple[Callable[[], Any], int]]:
    """Return what the tensors of a batch are recognised by, without keeping them."""
    return [(weakref.ref(tensor), tensor._version) for tensor in tensors_of(batch)]


def is_seen(seen: Any, batch: Any) -> bool:
    """Return whether these are the tensors seen before, unchanged."""
    tensors = tensors_of(batch)
    return (
        seen is not None
        and len(seen) == len(tensors)
        and all(
            ref() is tensor and version == tensor._version for (ref, version), tensor in zip(seen, tensors, strict=True)
        )
    )


CLASSES = {c.__name__: c for c in (Region, Lambda, Scale, Last)}


def _written(value: Any) -> Any:
    if type(value).__name__ in CLASSES:
        parts = {f.name: _written(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"is": type(value).__name__, **parts}
    if isinstance(value, dict):
        return {key: _written(part) for key, part in value.items()}
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _read(value: Any, device: torch.device) -> Any:
    if isinstance(value, Mapping) and "is" in value:
        if value["is"] not in CLASSES:
            raise ValueError(f"state_dict: got a {value['is']!r}; {sorted(CLASSES)} are known")
        return CLASSES[value["is"]](**{key: _read(part, device) for key, part in value.items() if key != "is"})
    if isinstance(value, Mapping):
        return {key: _read(part, device) for key, part in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value
