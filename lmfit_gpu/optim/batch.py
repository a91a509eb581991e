"""One batch of a training loop as a least-squares problem: groups of residuals of a network on rows.

The engine sees equations, blocks and a cost. Blocks are slices of the rows of one group; the values of a block are the
network's outputs (or, where the residual function calls the network itself, the residuals), and the surrogate mixes the
outputs of a row into its residuals (:mod:`lmfit_gpu.factors`). Everything is in sums over the batch.
"""

import copy
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from lmfit_gpu.blocks import Block, Workers
from lmfit_gpu.factors import Factors
from lmfit_gpu.optim.network import Network, on_device, random_numbers
from lmfit_gpu.optim.residuals import Residuals
from lmfit_gpu.optim.row_kinds import Rows, picked_rows, residuals_of_network
from lmfit_gpu.penalty import Penalty, penalty_on
from lmfit_gpu.problem import Problem
from lmfit_gpu.row_check import PROBE_ROWS
from lmfit_gpu.rows import LEAF_ROWS, chunk_slices, each_tensor

__all__ = ["BatchProblem", "Group", "Randomness"]

BLOCK_BYTES = 64 * 2**20  # of one block's Jacobian
SEEDS_APART = 1_000_003  # a prime: seeds of blocks of one step are not those of another


@dataclass(frozen=True)
class Group:
    """The rows of one group in a batch.

    Parameters
    ----------
    residuals : Residuals
    x, y : tensor, or tuple, list or dict of tensors
        With the rows in front; y may be None.
    n_rows : int
    rows : Rows
    n_residuals : int
    row_weights : Tensor, shape (n_rows,), optional
        Factors of the residuals.
    """

    residuals: Residuals
    x: Any
    y: Any
    n_rows: int
    rows: Rows
    n_residuals: int
    row_weights: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether r̃ is the difference or residual itself."""
        of_outputs = self.residuals.form in ("outputs", "likelihood") and not self.rows.whole
        return not of_outputs and self.residuals.weight == 1.0 and self.row_weights is None

    def multipliers(self, part: slice, like: torch.Tensor) -> torch.Tensor | None:
        """Return √w times the weight of each row of a part, shape (rows,); None for ones."""
        if self.residuals.weight == 1.0 and self.row_weights is None:
            return None
        factor = like.new_full((part.stop - part.start,), self.residuals.weight**0.5)
        return factor if self.row_weights is None else factor * self.row_weights[part].to(like)


@dataclass(frozen=True)
class Randomness:
    """The seed of a step, None where nothing is random."""

    seed: int | None = None

    def of_block(self, block: Block) -> AbstractContextManager[None]:
        """Return a context in which a block draws its own numbers, the same every time."""
        seed = None if self.seed is None else self.seed * SEEDS_APART + block.index + 1
        return random_numbers(seed, block.device)


class BatchProblem(Problem):
    """Residuals of a network on one batch.

    Parameters
    ----------
    networks : sequence of Network
        One for each device.
    groups : sequence of Group
    theta : Tensor, shape (n_params,)
    devices : sequence of torch.device
    slice_size : int, optional
        Rows of a block; None: what suits caches and devices.
    penalty : Penalty, optional
        As a block of equations of its own.
    alphas : sequence of float
        The same penalty for each tensor, for solvers that take it so.
    randomness : Randomness
    workers : Workers
    """

    def __init__(  # noqa: PLR0913
        self,
        networks: Sequence[Network],
        groups: Sequence[Group],
        theta: torch.Tensor,
        *,
        devices: Sequence[torch.device],
        workers: Workers,
        slice_size: int | None = None,
        penalty: Penalty | None = None,
        alphas: Sequence[float] = (),
        randomness: Randomness = Randomness(),
    ) -> None:
        super().__init__(networks, theta, devices=devices, penalty=penalty, workers=workers)
        self.groups = tuple(groups)
        self._alphas = tuple(alphas)
        self._randomness = randomness
        self._slice_size = slice_size
        self.coupled = any(group.rows.coupled for group in groups)
        self.per_row = groups[0].rows.k if len(groups) == 1 else 0
        self.n_residuals = sum(group.n_residuals for group in groups)
        self.n_rows = sum(group.n_rows for group in groups)
        self.chunk_rows = max(self._rows_per_block(group) for group in groups)
        ends = [0]
        for group in groups:
            ends.append(ends[-1] + group.n_residuals)
        self._starts = ends

    @property
    def alphas(self) -> tuple[float, ...]:
        """α_t of each tensor."""
        return self._alphas

    @property
    def n_counted(self) -> int:
        """What a mean is over: residuals, or the rows of a likelihood."""
        return sum(g.n_rows if g.residuals.form == "likelihood" else g.n_residuals for g in self.groups)

    def mean_loss(self, cost: float, theta: torch.Tensor) -> float:
        """Return the mean of squares, or of negative log-likelihoods, that belongs to a cost at theta."""
        cost -= self.penalty_of(theta)
        of_rows = all(group.residuals.form == "likelihood" for group in self.groups)
        return (cost if of_rows else 2 * cost) / self.n_counted

    def penalty_of(self, theta: torch.Tensor) -> float:
        """Return the part of the cost that is not of the data."""
        if self.penalty is None:
            return self.penalty_cost(theta)
        return 0.5 * float((self.penalty.residual(theta).double() ** 2).sum())

    def penalised(self, alpha: float, by_tensor: bool) -> "BatchProblem":
        """Return the problem with ½ α n ‖weights‖² added to the cost, n what a mean is over.

        Parameters
        ----------
        alpha : float
        by_tensor : bool
            The solver takes it tensor by tensor; else it is a block of equations.

        Raises
        ------
        ValueError
            If the network has no weights to penalise.
        """
        if alpha == 0:
            return self
        network: Any = self.replicas[0]
        amount = alpha * self.n_counted
        penalised = copy.copy(self)
        if by_tensor:
            penalised._alphas = tuple(amount if is_weight else 0.0 for is_weight in network.weight_tensors)
        else:
            penalised.penalty = penalty_on(network.are_weights, amount, None)
        return penalised

    def weighted(self, row_weights: Iterable[torch.Tensor]) -> "BatchProblem":
        """Return the problem with other weights of the rows of each group."""
        weighted = copy.copy(self)
        pairs = zip(self.groups, row_weights, strict=True)
        weighted.groups = tuple(replace(group, row_weights=weights) for group, weights in pairs)
        return weighted

    def only(self, index: int) -> "BatchProblem":
        """Return the problem of one group."""
        return BatchProblem(
            self.replicas,  # type: ignore[arg-type]
            [self.groups[index]],
            torch.empty(self.n_params, dtype=self.dtype, device=self.device),
            devices=self.devices,
            workers=self._workers,
            slice_size=self._slice_size,
            randomness=self._randomness,
        )

    def row_blocks(self) -> list[tuple[int, slice]]:
        """Return (group, slice of rows) for every block."""
        return [
            (index, part)
            for index, group in enumerate(self.groups)
            for part in chunk_slices(group.n_rows, self._rows_per_block(group))
        ]

    def read(self, index: int, part: tuple[int, slice], worker: int) -> Block:
        """Return some rows of a group on the device of a worker."""
        group, rows = self.groups[part[0]], part[1]
        every = rows == slice(0, group.n_rows)
        x, y = (t if every else each_tensor(lambda tensor: tensor[rows], t) for t in (group.x, group.y))
        device = self.devices[worker]
        x, y = (on_device(t, device, self.dtype) for t in (x, y))
        return Block(index, rows, x, y, self.replicas[worker], group=part[0])

    def equations_of_rows(self, block: Block) -> slice:
        """Return which of all residuals are those of a block of rows."""
        start, k = self._starts[block.group], self.groups[block.group].rows.k
        if k == 0:
            return slice(start, self._starts[block.group + 1])
        return slice(start + block.rows.start * k, start + block.rows.stop * k)

    def n_values(self, block: Block) -> int:
        """Return how many values a block has."""
        rows = self.groups[block.group].rows
        if block.penalty is not None or rows.k == 0:
            return super().n_values(block)
        return (block.rows.stop - block.rows.start) * rows.q

    def values_of_rows(self, theta: torch.Tensor, block: Block) -> torch.Tensor:
        """Return outputs, or residuals where they are differentiated themselves, shape (c,)."""
        group = self.groups[block.group]
        network: Any = block.model
        with self._randomness.of_block(block):
            if group.residuals.form == "network":
                return residuals_of_network(group.residuals, network, theta, block)
            outputs = network(theta, block.x)
            if group.rows.whole:
                outputs = group.residuals.of_outputs(outputs, block.y)
            return outputs.reshape(-1)

    def _linearized(self, block: Block, values: torch.Tensor) -> tuple[torch.Tensor, Factors]:
        """Return r̃ (rows, k) or (c,), and S, without the weights of groups and rows."""
        group = self.groups[block.group]
        if group.residuals.form == "network" or group.rows.whole:
            return values, None
        outputs = values.reshape(block.n_rows, *group.rows.outputs)
        if group.residuals.likelihood is not None:
            r, S = group.residuals.likelihood.surrogate(outputs.reshape(block.n_rows, -1), block.y)
            return r.to(values), S.to(values)
        return group.residuals.linearized(outputs, block.y)

    def surrogate(self, block: Block, values: torch.Tensor) -> tuple[torch.Tensor, Factors]:
        """Return r̃ (e,) and S."""
        if block.penalty is not None:
            return values, None
        r, S = self._linearized(block, values)
        multipliers = self.groups[block.group].multipliers(block.rows, values)
        if multipliers is None:
            return r.reshape(-1), S
        per_residual = _spread(multipliers, r.numel())
        r = r.reshape(-1) * per_residual
        return r, per_residual if S is None else S * multipliers[:, None, None]

    def cost_terms(self, block: Block, values: torch.Tensor) -> torch.Tensor:
        """Return twice the cost of each residual, or of each row of a likelihood, in float64."""
        group = self.groups[block.group]
        if group.residuals.likelihood is not None:
            outputs = values.reshape(block.n_rows, -1)
            terms = 2 * group.residuals.likelihood.value(outputs, block.y)
        elif group.residuals.form == "network" or group.rows.whole:
            terms = values.double() ** 2
        else:
            outputs = values.reshape(block.n_rows, *group.rows.outputs)
            terms = group.residuals.of_outputs(outputs, block.y).reshape(-1).double() ** 2
        multipliers = group.multipliers(block.rows, terms)
        return terms if multipliers is None else terms * _spread(multipliers, terms.numel()) ** 2

    def cost(self, theta: torch.Tensor) -> float:
        """Return what is minimised, by one forward pass."""
        return super().cost(theta) + self.penalty_cost(theta)

    def penalty_cost(self, theta: torch.Tensor) -> float:
        """Return ½ Σ α_t ‖θ_t‖² of a penalty that is no block of equations."""
        if not self._alphas:
            return 0.0
        network: Any = self.replicas[0]
        parts = zip(self._alphas, theta.split(network.sizes), strict=True)
        norms = [alpha * torch.linalg.vector_norm(part, dtype=torch.float64) ** 2 for alpha, part in parts if alpha > 0]
        return 0.5 * float(torch.stack(norms).sum()) if norms else 0.0

    def row_costs(self, theta: torch.Tensor) -> torch.Tensor:
        """Return the cost of each row (of each residual where they belong to none), float64, on the first device."""

        def of_block(block: Block) -> torch.Tensor:
            if block.penalty is not None:
                return torch.empty(0, dtype=torch.float64, device=self.device)
            with torch.no_grad():
                values = self.values(theta.to(block.device), block)
                terms = 0.5 * self.cost_terms(block, values)
            per_row = terms if terms.numel() % block.n_rows else terms.reshape(block.n_rows, -1).sum(1)
            return per_row.to(self.device)

        return torch.cat(list(self.map_blocks(of_block)))

    def residuals_by_group(self, theta: torch.Tensor) -> list[torch.Tensor]:
        """Return the residuals of each group, (rows, k) or (c,), without any weights, detached, on the first device."""
        parts: list[list[torch.Tensor]] = [[] for _ in self.groups]

        def of_block(block: Block) -> tuple[int, torch.Tensor] | None:
            if block.penalty is not None:
                return None
            with torch.no_grad():
                values = self.values(theta.to(block.device), block)
            return block.group, self._linearized(block, values)[0].detach().to(self.device)

        for found in self.map_blocks(of_block):
            if found is not None:
                parts[found[0]].append(found[1])
        whole = [torch.cat(part) for part in parts]
        pairs = zip(whole, self.groups, strict=True)
        return [r.reshape(group.n_rows, -1) if r.numel() % group.n_rows == 0 else r for r, group in pairs]

    @property
    def is_plain(self) -> bool:
        """Whether r̃ is the difference or residual itself in all groups."""
        return all(group.is_plain for group in self.groups)

    @property
    def curves(self) -> bool:
        """Whether r̃ is not what the network curves."""
        return any(group.residuals.likelihood is not None for group in self.groups)

    def probe(self, n_rows: int = PROBE_ROWS) -> Block:
        """Return a block of at most `n_rows` rows of the first group."""
        group = self.groups[0]
        if group.rows.coupled or group.n_rows <= n_rows:
            return self.read(0, (0, slice(0, group.n_rows)), 0)
        some = torch.linspace(0, group.n_rows - 1, n_rows, dtype=torch.float64).long()
        x, y = (picked_rows(t, some, self.device, self.dtype) for t in (group.x, group.y))
        return Block(-1, slice(0, n_rows), x, y, self.replicas[0])

    def _rows_per_block(self, group: Group) -> int:
        if group.rows.coupled:
            return group.n_rows
        if self._slice_size is not None:
            whole_leaves = self._slice_size - self._slice_size % LEAF_ROWS  # the same sums whatever the slices
            return min(whole_leaves or self._slice_size, group.n_rows)
        row_bytes = torch.finfo(self.dtype).bits // 8 * (self.n_params + 1) * max(group.rows.k, 1)
        fitting = max(1, BLOCK_BYTES // row_bytes) if self.n_params <= group.n_residuals else LEAF_ROWS
        shared = -(-group.n_rows // len(self.devices))
        return max(1, min(LEAF_ROWS, fitting, shared))


def _spread(multipliers: torch.Tensor, n: int) -> torch.Tensor:
    """Return a factor of each row as one of each of n residuals."""
    if n % len(multipliers):
        return multipliers.new_full((n,), 1.0) * multipliers[0]
    return multipliers if n == len(multipliers) else multipliers.repeat_interleave(n // len(multipliers))
