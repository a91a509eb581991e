"""Blocks of rows of J brought to one device and put together, tensor by tensor, as what they are products of."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from lmfit_gpu.layer_positions import EmbeddingRows, PositionRows
from lmfit_gpu.layer_rows import ExplicitRows, Factor, OuterRows, SummedRows, TensorRows

__all__ = ["joined", "on_device"]


def joined(blocks: Sequence[TensorRows], shared: dict[tuple[int, ...], Factor] | None = None) -> TensorRows:
    """Return the rows of one tensor in consecutive blocks of rows as those of all of them.

    Parameters
    ----------
    blocks : sequence of TensorRows
        Of one tensor. Where they are of one kind their δ and a are put together, else the rows themselves.
    shared : dict, optional
        The same for all tensors of the same blocks, empty at first: the δ of a layer stays one for weight and bias.
    """
    shared = {} if shared is None else shared
    first = blocks[0]
    if len(blocks) == 1:
        return first
    if all(isinstance(block, ExplicitRows) for block in blocks):
        return ExplicitRows(_joined_factor([block.rows for block in blocks], shared))  # type: ignore[attr-defined]
    if len({_shape_of(block) for block in blocks}) > 1:
        return ExplicitRows(Factor(torch.cat([block.columns().T for block in blocks])))
    parts: Any = blocks
    if isinstance(first, OuterRows):
        delta, a = ([getattr(part, name) for part in parts] for name in ("delta", "a"))
        known = [part.moved for part in parts if part.moved is not None]
        moved = torch.cat(known) if len(known) == len(parts) else None
        return OuterRows(_joined_factor(delta, shared), _joined_factor(a, shared), moved)
    if isinstance(first, PositionRows):
        return PositionRows(torch.cat([part.delta for part in parts]), torch.cat([part.a for part in parts]))
    if isinstance(first, EmbeddingRows):
        tokens = torch.cat([part.tokens for part in parts])
        return EmbeddingRows(torch.cat([part.delta for part in parts]), tokens, first.n_tokens)
    if isinstance(first, SummedRows):
        return SummedRows(tuple(joined(uses, shared) for uses in zip(*(part.uses for part in parts), strict=True)))
    return ExplicitRows(Factor(torch.cat([block.columns().T for block in blocks])))


def on_device(rows: dict[str, TensorRows], device: torch.device) -> dict[str, TensorRows]:
    """Return the rows of every tensor of a block on a device: δ and a travel, not J; what tensors share is sent once.

    Parameters
    ----------
    rows : dict of str to TensorRows
    device : torch.device
    """
    sent: dict[int, Any] = {}

    def moved(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.to(device, non_blocking=True)
        if isinstance(part, tuple):
            return tuple(moved(each) for each in part)
        if not dataclasses.is_dataclass(part):
            return part
        if id(part) not in sent:
            fields = {field.name: moved(getattr(part, field.name)) for field in dataclasses.fields(part)}
            sent[id(part)] = dataclasses.replace(part, **fields)  # type: ignore[type-var]
        return sent[id(part)]

    return {name: moved(part) for name, part in rows.items()}


def _shape_of(rows: Any) -> tuple[Any, ...]:
    """Return what must be the same for blocks to be put together: the kind, values a row, positions."""
    if isinstance(rows, OuterRows):
        return OuterRows, rows.delta.matrix.shape[0] // rows.a.matrix.shape[0]
    if isinstance(rows, PositionRows | EmbeddingRows):
        return type(rows), *rows.delta.shape[1:]
    if isinstance(rows, SummedRows):
        return SummedRows, *map(_shape_of, rows.uses)
    return (type(rows),)


def _joined_factor(factors: Sequence[Factor], shared: dict[tuple[int, ...], Factor]) -> Factor:
    key = tuple(map(id, factors))
    if key not in shared:
        shared[key] = Factor(torch.cat([factor.matrix for factor in factors]))
    return shared[key]
