"""Blocks of parameters: which tensors share one Hessian approximation, and their flat vectors.

The Hessian of a network is approximated block by block. A block is one module's tensors (weight and bias), one tensor,
or all tensors. Its tensors lie one after the other in the flat vectors of the block, which have a view for each.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from lmfit_gpu.distributed import balanced_owners
from lmfit_gpu.optim.curvature_pairs import CurvaturePairs

__all__ = ["KINDS", "Averages", "Block", "Flat", "Layout", "Member", "check_layout", "grouped", "laid_out"]

KINDS = ("module", "tensor", "model")


@dataclass(frozen=True, eq=False)
class Member:
    """One tensor of a block: the parameter, its name if known, and its number among all parameters."""

    parameter: torch.nn.Parameter
    name: str | None
    number: int


@dataclass(frozen=True)
class Layout:
    """What the blocks of a param group were laid out for."""

    blocks: str
    history_size: int
    tensors: list[int]

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "Layout":
        """Return that of a param group as it is now."""
        return cls(group["blocks"], group["history_size"], [id(parameter) for parameter in group["params"]])


class Flat:
    """A flat vector of a block with a view for each tensor.

    Parameters
    ----------
    vector : Tensor, shape (n_params,)
    shapes : sequence of torch.Size
        Of the tensors, in order.
    """

    def __init__(self, vector: torch.Tensor, shapes: Sequence[torch.Size]) -> None:
        self.vector = vector
        parts = vector.split([math.prod(shape) for shape in shapes])
        self.views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@dataclass(eq=False)
class Averages:
    """Averages of the parameters and of their gradients, now and at the last pair."""

    parameter: Flat
    gradient: Flat
    parameter_before: Flat
    gradient_before: Flat


@dataclass(eq=False)
class Block:
    """One block: its tensors, who owns it, and, on its owner, what it remembers.

    Parameters
    ----------
    members : list of Member
    owner : int
        Rank that keeps the pairs.
    work : Flat or None
        The gradient; after it, unless momentum has it, the direction.
    direction : Flat or None
        `work` or `momentum`, by which the parameters move.
    averages : Averages or None
        None before the first gradient.
    momentum : Flat or None
        Running sum of directions.
    pairs : CurvaturePairs or None
    present : list of int
        Members that have a gradient in this step.
    n_pairs : int
        Pairs kept so far, those that have left the memory included.
    scale : float or None
        Running curvature scale κ.
    scale_sums : tuple of float or None
        Running sums of ⟨s,y⟩ and ⟨s,s⟩.
    curvature, tau : float or None
        ⟨s,y⟩/⟨s,s⟩ before damping and the damping of the newest pair.
    """

    members: list[Member]
    owner: int = 0
    work: Flat | None = None
    direction: Flat | None = None
    averages: Averages | None = None
    momentum: Flat | None = None
    pairs: CurvaturePairs | None = None
    present: list[int] = field(default_factory=list)
    n_pairs: int = 0
    scale: float | None = None
    scale_sums: tuple[float, float] | None = None
    curvature: float | None = None
    tau: float | None = None
    shapes: list[torch.Size] = field(init=False)
    n_params: int = field(init=False)

    def __post_init__(self) -> None:
        self.shapes = [member.parameter.shape for member in self.members]
        self.n_params = sum(member.parameter.numel() for member in self.members)

    @property
    def name(self) -> str:
        """Return the name of the module or the tensor, or the numbers of the tensors."""
        names = [member.name for member in self.members]
        if any(name is None for name in names):
            numbers = [member.number for member in self.members]
            return f"tensor {numbers[0]}" if len(numbers) == 1 else f"tensors {numbers[0]} to {numbers[-1]}"
        if len(names) == 1:
            return str(names[0])
        modules = {_module(str(name)) for name in names}
        return (modules.pop() if len(modules) == 1 else "") or f"{names[0]} to {names[-1]}"  # the root has no name

    @property
    def like(self) -> torch.Tensor:
        """Return a tensor with the dtype and the device of the block."""
        return self.members[0].parameter.detach()

    def flat(self, vector: torch.Tensor | None = None) -> Flat:
        """Return a vector of the block, of zeros if none is given."""
        return Flat(self.like.new_zeros(self.n_params) if vector is None else vector, self.shapes)


def grouped(members: Sequence[Member], kind: str) -> list[list[Member]]:
    """Return the members of each block.

    Parameters
    ----------
    members : sequence of Member
        Of one param group, in order.
    kind : {"module", "tensor", "model"}
        "module": by names, all tensors of one module. A tensor without a name joins the block before it when it has
        one axis and is as long as the first axis of the tensor that began the block, as a bias is. Tensors on other
        devices or of other dtypes are blocks of their own, always.
    """
    if kind == "tensor":
        return [[member] for member in members]
    blocks: dict[tuple[object, ...], list[Member]] = {}
    heads = _heads(members)
    for member, head in zip(members, heads, strict=True):
        of_kind = "model" if kind == "model" else head
        blocks.setdefault((of_kind, member.parameter.dtype, member.parameter.device), []).append(member)
    return list(blocks.values())


def check_layout(layout: Layout, group: Mapping[str, Any]) -> None:
    """Raise ValueError where a param group is not what its blocks were laid out for: the change would be ignored."""
    now = Layout.of(group)
    for name in ("blocks", "history_size"):
        given, expected = getattr(now, name), getattr(layout, name)
        if given != expected:
            raise ValueError(f"{name}: got {given!r}; {expected!r} is expected: it cannot change after the first step")
    if now.tensors != layout.tensors:
        raise ValueError(
            f"params: got other tensors ({len(now.tensors)}) than at the first step ({len(layout.tensors)}); the same "
            "are expected (add_param_group adds more)"
        )


def laid_out(blocks: Sequence[Block], n_ranks: int) -> list[list[torch.Tensor]]:
    """Give each block an owner and a place to work in; return one vector for each owner, for each device and dtype.

    The blocks of an owner lie one after the other in its vector, so that one message moves them.
    """
    owners = balanced_owners([block.n_params for block in blocks], n_ranks)
    kinds: dict[tuple[torch.dtype, torch.device], list[list[Block]]] = {}
    for block, owner in zip(blocks, owners, strict=True):
        block.owner = owner
        shares = kinds.setdefault((block.like.dtype, block.like.device), [[] for _ in range(n_ranks)])
        shares[owner].append(block)
    vectors = []
    for (dtype, device), shares in kinds.items():
        vectors.append([torch.zeros(sum(b.n_params for b in share), dtype=dtype, device=device) for share in shares])
        for vector, share in zip(vectors[-1], shares, strict=True):
            for block, part in zip(share, vector.split([block.n_params for block in share]), strict=True):
                block.work = block.flat(part)
    return vectors


def _heads(members: Sequence[Member]) -> list[object]:
    """Return for each member what its module is known by."""
    heads: list[object] = []
    first = None  # of the block of nameless tensors that is being filled
    for before, member in pairwise([None, *members]):
        assert member is not None
        if member.name is not None:
            heads.append(_module(member.name))
            continue
        shape = member.parameter.shape
        if before is None or first is None or not (len(shape) == 1 and shape[:1] == first.parameter.shape[:1]):
            first = member
        heads.append(first.number)
    return heads


def _module(name: str) -> str:
    return name.rpartition(".")[0]
