"""From what a user calls a batch to groups of rows, each examined once for its kind."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from lmfit_gpu.optim.batch import Group
from lmfit_gpu.optim.network import Network, n_rows_of
from lmfit_gpu.optim.residuals import ONLY, Residuals
from lmfit_gpu.optim.row_kinds import counted, examined

__all__ = ["Recent", "batch_groups"]

REMEMBERED = 32  # kinds of batches: sequences of every length would else fill the memory


class Recent(dict[Any, Any]):
    """What was found out of the last few kinds of batches; the oldest are forgotten."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set an entry, and drop the oldest where there are too many."""
        super().__setitem__(key, value)
        while len(self) > REMEMBERED:
            del self[next(iter(self))]


def batch_groups(  # noqa: PLR0913
    residuals: Mapping[str, Residuals],
    x: Any,
    y: Any,
    network: Network,
    theta: torch.Tensor,
    *,
    known: Recent,
    row_weights: Mapping[str, torch.Tensor],
) -> tuple[list[Group], tuple[Any, ...]]:
    """Return the groups of a batch, and the kinds of their rows; what is found out of a new kind goes into `known`.

    Raises
    ------
    ValueError, TypeError
        If x and y are not the rows that the groups need.
    """
    several = set(residuals) != {ONLY}
    groups, keys = [], []
    for name, residual in residuals.items():
        part_x, part_y = (
            _of_group(tree, name, residuals, label) if several else tree for tree, label in ((x, "x"), (y, "y"))
        )
        where = f"x[{name!r}]" if several else "x"
        n = n_rows_of(part_x, where)
        if part_y is not None and n_rows_of(part_y, where.replace("x", "y", 1)) != n:
            raise ValueError(f"y: has {n_rows_of(part_y, 'y')} rows; {where} has {n}")
        key = (name, _kind(part_x), _kind(part_y), n == 1)  # of one row nothing is known but its sizes
        if key not in known or known[key].coupled:
            known[key] = examined(network, residual, part_x, part_y, theta)
        elif residual.likelihood is not None and isinstance(part_y, torch.Tensor):
            residual.likelihood.checked(torch.zeros(n, known[key].q), part_y)
        rows = known[key]
        count = n * rows.k
        if rows.coupled and (rows.whole or rows.k == 0):
            count = counted(network, residual, (part_x, part_y), theta)
            rows = replace(rows, k=count // n if count % n == 0 else 0, q=count // n if count % n == 0 else 0)
        groups.append(Group(residual, part_x, part_y, n, rows, count, row_weights.get(name)))
        keys.append(key)
    return groups, tuple(keys)


def _of_group(tree: Any, name: str, residuals: Mapping[str, Residuals], label: str) -> Any:
    if label == "y" and tree is None:
        return None
    if not isinstance(tree, Mapping) or not set(residuals) <= set(tree):
        given = sorted(map(str, tree)) if isinstance(tree, Mapping) else type(tree).__name__
        raise ValueError(f"{label}: got {given}; a dict with the groups of residual_fn is expected: {list(residuals)}")
    return tree[name]


def _kind(tree: Any) -> Any:
    """Return the structure of a tree of tensors, and the kind and width of each: what rows like these are known by."""
    if isinstance(tree, torch.Tensor):
        return tree.shape[1:], tree.dtype
    if isinstance(tree, dict):
        return tuple((key, _kind(part)) for key, part in tree.items())
    return tuple(_kind(part) for part in tree) if isinstance(tree, (tuple, list)) else type(tree)
