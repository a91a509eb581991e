"""What MLBFGS remembers of a block, in the form of a torch optimizer's state: a dict of tensors for each parameter.

Each tensor of a block has views of the block's flat vectors and of its pairs, in the shape of the parameter. Numbers of
the block (its Gram matrix, counters) are written as plain numbers under "block" of its first tensor: torch casts the
tensors of a state to the dtype of the parameter, which float64 numbers would not survive.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from lmfit_gpu.optim.curvature_pairs import CurvaturePairs
from lmfit_gpu.optim.parameter_blocks import Averages, Block, Flat

__all__ = ["read_block", "write_block"]

AVERAGES = {
    "parameter_average": "parameter",
    "gradient_average": "gradient",
    "parameter_average_before": "parameter_before",
    "gradient_average_before": "gradient_before",
}
NUMBERS = ("n_pairs", "scale", "scale_sums", "curvature", "tau")


def write_block(block: Block, state: MutableMapping[torch.Tensor, dict[str, Any]]) -> None:
    """Write what an owner remembers of a block; the tensors are views, not copies."""
    parts: list[dict[str, Any]] = [{} for _ in block.members]
    if block.averages is not None:
        for key, name in AVERAGES.items():
            _spread(parts, key, getattr(block.averages, name))
    if block.momentum is not None:
        _spread(parts, "momentum_buffer", block.momentum)
    pairs = block.pairs
    assert pairs is not None  # an owner has them
    if pairs.storage is not None:
        split = pairs.storage.split([shape.numel() for shape in block.shapes], dim=2)
        for part, values, shape in zip(parts, split, block.shapes, strict=True):
            part["pairs"] = values.view(*values.shape[:2], *shape)
    if any(parts):
        numbers = {name: getattr(block, name) for name in NUMBERS}
        parts[0]["block"] = {"n_members": len(block.members), **numbers, **pairs.written()}
    for member, part in zip(block.members, parts, strict=True):
        if part:
            state[member.parameter] = part
        else:
            state.pop(member.parameter, None)  # nothing is left of what was written before


def read_block(block: Block, state: Mapping[torch.Tensor, dict[str, Any]], options: Mapping[str, Any]) -> None:
    """Fill a block from a state that was written; a block that is not in it starts afresh.

    Raises
    ------
    ValueError
        If the state is of other blocks.
    """
    block.pairs = CurvaturePairs(block.n_params, options["history_size"], block.like, options["initial_scale"])
    parts = [state.get(member.parameter, {}) for member in block.members]
    if not any(parts):
        return
    _check(block, parts)
    if "parameter_average" in parts[0]:
        block.averages = Averages(**{name: _joined(block, parts, key) for key, name in AVERAGES.items()})
    if "momentum_buffer" in parts[0]:
        block.momentum = _joined(block, parts, "momentum_buffer")
    written = dict(parts[0]["block"])
    for name in NUMBERS:
        setattr(block, name, written[name])
    storage = None
    if "pairs" in parts[0]:
        kept = [part["pairs"] for part in parts]
        flat = [p.reshape(*p.shape[:2], shape.numel()) for p, shape in zip(kept, block.shapes, strict=True)]
        storage = torch.cat(flat, dim=2).to(block.like)
    block.pairs.read(written, storage)


def _check(block: Block, parts: list[dict[str, Any]]) -> None:
    keys = set(parts[0]) - {"block"}
    numbers = parts[0].get("block", {})
    whole = {*NUMBERS, "slots", "gamma", "gram"} <= set(numbers) and numbers.get("n_members") == len(parts)
    alike = all(set(part) - {"block"} == keys for part in parts) and not any("block" in part for part in parts[1:])
    shapes = all(
        part[key].shape[2 if key == "pairs" else 0 :] == shape
        for part, shape in zip(parts, block.shapes, strict=True)
        for key in keys & set(part)
    )
    if not (whole and alike and shapes):
        raise ValueError(f"state_dict: its blocks are not those of this optimizer (block {block.name!r} differs)")


def _spread(parts: list[dict[str, Any]], key: str, flat: Flat) -> None:
    for part, view in zip(parts, flat.views, strict=True):
        part[key] = view


def _joined(block: Block, parts: list[dict[str, Any]], key: str) -> Flat:
    return block.flat(torch.cat([part[key].flatten() for part in parts]).to(block.like))
