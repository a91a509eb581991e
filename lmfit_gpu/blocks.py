"""Blocks of rows, and the threads that work on them: one for each device of the model."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from lmfit_gpu.models import Model
from lmfit_gpu.penalty import Penalty
from lmfit_gpu.rows import Weights, tensors_of

__all__ = ["Block", "Workers"]

IN_FLIGHT = 2  # blocks waiting per device: one is worked on while the next is ready

Part = TypeVar("Part")


@dataclass(frozen=True)
class Block:
    """Some rows on one device, with the replica of the model that lives there; or the penalty in place of rows.

    x is a tensor with the rows as its leading axis, or a tuple, list or dict of such.
    """

    index: int
    rows: slice
    x: Any
    y: Any
    model: Model
    weights: Weights | None = None
    penalty: Penalty | None = None
    group: int = 0  # which of several kinds of residuals

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return tensors_of(self.x)[0].shape[0]

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return tensors_of(self.x)[0].device

    def residual(self, values: torch.Tensor) -> torch.Tensor:
        """Return the residuals (c,) that belong to values (c,), in the units of the values."""
        return values if self.model.is_residual or self.y is None else values - self.y.reshape(-1)

    def spread(self, values: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return (frequency, 1/sigma) of values (c,), each (c,) or None."""
        if self.weights is None:
            return None, None
        return self.weights.read(self.rows, values.numel(), values.device, values.dtype)


class Workers:
    """One thread for each of several devices, none for a single one; threads start with the first work.

    Parameters
    ----------
    n_workers : int
    """

    def __init__(self, n_workers: int) -> None:
        self._n = n_workers
        self._pools: list[ThreadPoolExecutor] = []

    def map(self, function: Callable[[Part, int], Any], parts: Sequence[Part]) -> Iterator[Any]:
        """Yield ``function(part, worker)`` for every part in order; parts are dealt over the workers in turn."""
        if self._n == 1:
            for part in parts:
                yield function(part, 0)
            return
        pending: list[Future] = []
        for index, part in enumerate(parts):
            worker = index % self._n
            pending.append(self._pool(worker).submit(function, part, worker))
            if len(pending) >= IN_FLIGHT * self._n:
                yield pending.pop(0).result()
        while pending:
            yield pending.pop(0).result()

    def _pool(self, worker: int) -> ThreadPoolExecutor:
        while len(self._pools) < self._n:
            self._pools.append(ThreadPoolExecutor(max_workers=1, thread_name_prefix="lmfit_gpu"))
        return self._pools[worker]

    def close(self) -> None:
        """End the threads; later work starts new ones."""
        for pool in self._pools:
            pool.shutdown()
        self._pools = []
