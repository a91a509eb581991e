"""Ranks of a process group: who owns what, and how numbers travel between them.

Work is divided by giving every piece (a block of parameters) to one rank. Sums go to the owner of a piece only, results
come from it: with R ranks and n numbers each rank sends and receives about 2n numbers for a sum and the result, where
an all-reduce of the sums followed by an all-gather of the results would take 3n.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Ranks", "balanced_owners", "ranks_of"]


@dataclass(frozen=True)
class _Tensor:
    """What must be known of a tensor before it arrives."""

    shape: torch.Size
    dtype: torch.dtype


class Ranks:
    """The ranks of an initialised process group, this one among them.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup

    Attributes
    ----------
    rank, size : int
        This rank within the group, and how many there are.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def sum_to_owners(self, pieces: Sequence[torch.Tensor]) -> None:
        """Sum piece r of all ranks on rank r, in place; elsewhere piece r is left undefined. Collective."""
        waiting = [
            dist.reduce(piece, dst=self._global(owner), group=self.group, async_op=True)
            for owner, piece in enumerate(pieces)
            if piece.numel()
        ]
        _wait(waiting)

    def send_from_owners(self, pieces: Sequence[torch.Tensor]) -> None:
        """Replace piece r by that of rank r, to the bit. Collective."""
        waiting = [
            dist.broadcast(piece, src=self._global(owner), group=self.group, async_op=True)
            for owner, piece in enumerate(pieces)
            if piece.numel()
        ]
        _wait(waiting)

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, the same bits on all. Collective."""
        total = numbers.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def send_tensors(self, values: Mapping[str, Any], owner: int, device: torch.device) -> dict[str, Any]:
        """Return the tensors, on the CPU, and the plain objects in the dict of rank `owner`. Collective.

        Parameters
        ----------
        values : mapping of str to Tensor or object
            Looked at on the owner only.
        owner : int
        device : torch.device
            One that the group can send from.
        """
        plain = {key: _Tensor(v.shape, v.dtype) if isinstance(v, torch.Tensor) else v for key, v in values.items()}
        box = [plain]
        dist.broadcast_object_list(box, src=self._global(owner), group=self.group)
        received: dict[str, Any] = dict(box[0])
        for key, value in received.items():
            if isinstance(value, _Tensor):
                mine = values[key] if owner == self.rank else torch.empty(value.shape, dtype=value.dtype, device=device)
                tensor = mine.contiguous()
                dist.broadcast(tensor, src=self._global(owner), group=self.group)
                received[key] = tensor.cpu().clone()
        return received

    def gathered(self, value: Any) -> list[Any]:
        """Return the objects of all ranks. Collective."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)


def ranks_of(process_group: Any) -> Ranks | None:
    """Return the ranks of a process group; None for None.

    Raises
    ------
    TypeError
        If it is not a process group.
    ValueError
        If torch.distributed has not been initialised, or this process is not in the group.
    """
    if process_group is None:
        return None
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("process_group: torch.distributed is not initialised; call init_process_group first")
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("process_group: this process is not in it")
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"process_group: got {process_group!r}; a torch.distributed.ProcessGroup "
            "(torch.distributed.group.WORLD is the one of all ranks) or None is expected"
        )
    return Ranks(process_group)


def balanced_owners(sizes: Sequence[int], n_ranks: int) -> list[int]:
    """Return the owner of each piece: the largest first, each to the rank with the least so far.

    No rank holds more than 4/3 of the best possible largest share (Graham, 1969, "Bounds on multiprocessing timing
    anomalies", DOI 10.1137/0117039). All ranks compute the same owners.

    Examples
    --------
    >>> balanced_owners([5, 1, 4, 3, 3], 2)
    [0, 1, 1, 1, 0]
    """
    held = [0] * n_ranks
    owners = [0] * len(sizes)
    for piece in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owners[piece] = min(range(n_ranks), key=lambda rank: (held[rank], rank))
        held[owners[piece]] += sizes[piece]
    return owners


def _wait(waiting: Sequence[Any]) -> None:
    for work in waiting:
        work.wait()
