r"""The least-squares problem: residuals of a model on rows, and the cost that is minimised.

.. math:: \min_\theta \tfrac12 \|r(\theta)\|^2, \qquad r = \text{prediction} - \text{target}

in the plain case; with standard deviations σ, frequencies w and a loss ρ the cost of :mod:`lmfit_gpu.losses`, for
which the engine works on a surrogate (J̃, r̃) whose J̃ᵀr̃ is the gradient.

A problem knows its blocks of rows, and the devices that hold replicas of the model. :class:`Problem` is what the engine
needs of one; :class:`LeastSquaresProblem` is that of one model on one set of rows, which it finds to be *independent*
(the value of a row depends on that row alone: evaluated block by block) or *coupled* (a convolution, a running sum, an
ODE over x: always all together).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch

from lmfit_gpu.blocks import Block, Workers
from lmfit_gpu.box import Bounds, checked, inside
from lmfit_gpu.factors import Factors
from lmfit_gpu.losses import Loss
from lmfit_gpu.models import Model
from lmfit_gpu.penalty import Penalty
from lmfit_gpu.row_check import PROBE_ROWS, examine, flat, telling_rows
from lmfit_gpu.rows import LEAF_ROWS, ArrayRows, chunk_slices, leaf_slices

__all__ = ["Block", "LeastSquaresProblem", "Problem"]

BLOCK_BYTES = 16 * 2**20  # columns of one block's Jacobian: larger blocks leave the cache, smaller ones cost calls


class Problem(ABC):
    """What the engine needs to know: blocks of residuals r(theta), and the cost.

    Parameters
    ----------
    replicas : sequence of Model
        One for each device, each on its own.
    theta : Tensor, shape (n_params,), on the first device
        A point; its dtype is that of the arithmetic.
    devices : sequence of torch.device
        Blocks are dealt over them in turn.
    bounds : (lower, upper), optional
        Each (n_params,), ±inf where there is no bound: the model is evaluated nowhere else.
    penalty : Penalty, optional
        Further equations, in a block of their own after those of the rows; neither weights nor loss touch them.
    workers : Workers, optional
        Threads that serve other problems as well.
    """

    loss: Loss | None = None
    per_row: int  # surrogate residuals of a row; 0 where no row owns them
    n_residuals: int
    coupled: bool
    chunk_rows: int

    def __init__(
        self,
        replicas: Sequence[Model],
        theta: torch.Tensor,
        *,
        devices: Sequence[torch.device],
        bounds: Bounds | None = None,
        penalty: Penalty | None = None,
        workers: Workers | None = None,
    ) -> None:
        model = replicas[0]
        self.replicas = list(replicas)
        self.devices = tuple(devices)
        self.penalty = penalty
        self.dtype = theta.dtype
        self.is_residual = model.is_residual
        self.differentiable = model.differentiable
        self.n_params = theta.numel()
        self.bounds = None if bounds is None else checked(bounds, theta, model.names)
        self._workers = Workers(len(self.devices)) if workers is None else workers

    @abstractmethod
    def row_blocks(self) -> list[Any]:
        """Return what says which rows every block of rows has."""

    @abstractmethod
    def read(self, index: int, part: Any, worker: int) -> Block:
        """Return a block of rows on the device of a worker."""

    @abstractmethod
    def equations_of_rows(self, block: Block) -> slice:
        """Return which of all residuals are those of a block of rows."""

    def n_values(self, block: Block) -> int:
        """Return how many values a block has; as many as equations, unless outputs of a row are mixed."""
        part = self.equations(block)
        return part.stop - part.start

    @abstractmethod
    def values_of_rows(self, theta: torch.Tensor, block: Block) -> torch.Tensor:
        """Return the model's values on a block of rows, shape (c,)."""

    @abstractmethod
    def surrogate(self, block: Block, values: torch.Tensor) -> tuple[torch.Tensor, Factors]:
        """Return r̃ (e,) and the factors S of J̃ = S J that belong to values (c,) (:mod:`lmfit_gpu.factors`)."""

    @abstractmethod
    def cost_terms(self, block: Block, values: torch.Tensor) -> torch.Tensor:
        """Return twice the cost of each of values (c,), or of each row, in float64."""

    @abstractmethod
    def probe(self, n_rows: int = PROBE_ROWS) -> Block:
        """Return a block of at most `n_rows` rows spread over the data (all rows when they are coupled)."""

    @property
    @abstractmethod
    def is_plain(self) -> bool:
        """Whether r̃ is the residual itself: no weights, no loss."""

    @property
    def curves(self) -> bool:
        """Whether r̃ is not what the model curves: a loss or a likelihood."""
        return self.loss is not None

    @property
    def target_norm(self) -> float:
        """Weighted norm of y, 0 for residual callables: what rounding in r̃ is measured by."""
        return 0.0

    @property
    def n_observed(self) -> float:
        """Residuals counted with their frequencies: what the degrees of freedom start from."""
        return self.n_residuals

    @property
    def names(self) -> Sequence[str]:
        """Names of the parameters; a million of them take seconds."""
        return self.replicas[0].names

    @property
    def alphas(self) -> tuple[float, ...]:
        """α_t of each tensor of a module's parameters, where a solver takes the penalty tensor by tensor."""
        return ()

    @property
    def device(self) -> torch.device:
        """The first device: where theta lives and reductions end."""
        return self.devices[0]

    @property
    def n_equations(self) -> int:
        """Rows of J̃: residuals, and a penalty's."""
        return self.n_residuals + (0 if self.penalty is None else self.penalty.size)

    @property
    def leaf_per_row(self) -> int:
        """Residuals a row contributes to a leaf (coupled residual vectors are cut by residuals)."""
        return self.per_row or 1

    def inside(self, theta: torch.Tensor) -> torch.Tensor:
        """Return theta, shape (..., n_params), clamped into the box; itself without bounds."""
        return inside(theta, self.bounds)

    def leads_outside(self, theta: torch.Tensor, p: torch.Tensor) -> bool:
        """Return whether theta + p is beyond a bound, not by rounding."""
        if self.bounds is None:
            return False
        lower, upper = self.bounds
        return bool(((p < (lower - theta).double()) | (p > (upper - theta).double())).any())

    def moved(self, theta: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Return theta + p, exactly on a bound where p reaches it: θ + (u − θ) may round to something else."""
        if self.bounds is None:
            return theta + p.to(theta)
        lower, upper = self.bounds
        moved = torch.where(p <= (lower - theta).double(), lower, self.inside(theta + p.to(theta)))
        return torch.where(p >= (upper - theta).double(), upper, moved)

    def blocks(self) -> list[Any]:
        """Return what says which equations every block has; None is the penalty."""
        return [*self.row_blocks(), *([] if self.penalty is None else [None])]

    def equations(self, block: Block) -> slice:
        """Return which equations, of all, are those of a block."""
        if block.penalty is not None:
            return slice(self.n_residuals, self.n_equations)
        return self.equations_of_rows(block)

    def values(self, theta: torch.Tensor, block: Block) -> torch.Tensor:
        """Return the model's values on a block, shape (c,): row by row, outputs of a row together."""
        if block.penalty is not None:
            return block.penalty.residual(theta)
        return self.values_of_rows(theta, block)

    def cost(self, theta: torch.Tensor) -> float:
        """Return what is minimised, in float64, by one forward pass; the leaf sums are added without rounding."""

        def leaf_sums(block: Block) -> torch.Tensor:
            with torch.no_grad():
                values = self.values(theta.to(block.device), block)
                if self.is_plain or block.penalty is not None:
                    r = self.surrogate(block, values)[0].double()
                    return torch.stack([r[leaf].dot(r[leaf]) for leaf in leaf_slices(r.numel(), self.leaf_per_row)])
                terms = self.cost_terms(block, values)
                return torch.stack([terms[leaf].sum() for leaf in leaf_slices(terms.numel(), self.leaf_per_row)])

        try:
            return 0.5 * math.fsum(value for sums in self.map_blocks(leaf_sums) for value in sums.tolist())
        except (OverflowError, ValueError):  # the sum overflows, or holds both infinities
            return math.inf

    def map_blocks(self, function: Callable[[Block], Any]) -> Iterator[Any]:
        """Yield ``function(block)`` for every block in order; with several devices in one thread each."""

        def work(part: tuple[int, Any], worker: int) -> Any:
            return function(self._block(*part, worker))

        return self._workers.map(work, list(enumerate(self.blocks())))

    def _block(self, index: int, part: Any, worker: int) -> Block:
        if part is None:
            nothing = torch.empty(0, dtype=self.dtype, device=self.devices[worker])
            return Block(index, slice(0, 0), nothing, None, self.replicas[worker], penalty=self.penalty)
        return self.read(index, part, worker)

    def close(self) -> None:
        """End the worker threads."""
        self._workers.close()


class LeastSquaresProblem(Problem):
    """Residuals r(theta), shape (n_residuals,), of a model on rows.

    Parameters
    ----------
    model : Model
        On the first device; the other devices get replicas.
    rows : ArrayRows
    theta : Tensor, shape (n_params,), on the first device
        A point where the model can be evaluated (the start): the row check is made there.
    devices : sequence of torch.device
        Blocks are dealt over them in turn; each entry has a replica of the model and a thread.
    chunk_rows : int or "auto"
        Rows per block.
    bounds, penalty
        See :class:`Problem`.
    loss : Loss, optional
        None: half the sum of squares.

    Raises
    ------
    ValueError
        If the model's output does not fit y, or is empty, or has residuals that no row's weight belongs to; if theta is
        outside the bounds.
    """

    def __init__(  # noqa: PLR0913
        self,
        model: Model,
        rows: ArrayRows,
        theta: torch.Tensor,
        *,
        devices: Sequence[torch.device] = (torch.device("cpu"),),
        chunk_rows: int | str = "auto",
        bounds: Bounds | None = None,
        loss: Loss | None = None,
        penalty: Penalty | None = None,
    ) -> None:
        replicas = [model, *(model.replicate(device) for device in tuple(devices)[1:])]
        super().__init__(replicas, theta, devices=devices, bounds=bounds, penalty=penalty)
        self.rows = rows
        self.loss = loss
        self.per_row, self.n_residuals, self.coupled = examine(model, rows, theta, self.bounds)
        of_user = getattr(model, "order", None) == "residual"
        _check_weights(rows, self.n_residuals, self.per_row, self.coupled and of_user)
        self.chunk_rows = rows.n_samples if self.coupled else self._rows_per_block(chunk_rows)

    @property
    def alphas(self) -> tuple[float, ...]:
        """α of each tensor that is penalised, where the parameters are those of a module."""
        network: Any = getattr(self.replicas[0], "model", self.replicas[0])
        if self.penalty is None or not hasattr(network, "weight_tensors"):
            return ()
        return tuple(self.penalty.root**2 if is_weight else 0.0 for is_weight in network.weight_tensors)

    def row_blocks(self) -> list[slice]:
        """Return the slices of rows that are evaluated together."""
        return chunk_slices(self.rows.n_samples, self.chunk_rows)

    def read(self, index: int, part: slice, worker: int) -> Block:
        """Return some rows on the device of a worker."""
        x, y = self.rows.read(part, self.devices[worker], self.dtype)
        return Block(index, part, x, y, self.replicas[worker], self.rows.weights)

    def equations_of_rows(self, block: Block) -> slice:
        """Return which of all residuals are those of a block of rows."""
        per_row = self.per_row
        return slice(block.rows.start * per_row, block.rows.stop * per_row) if per_row else slice(0, self.n_residuals)

    def values_of_rows(self, theta: torch.Tensor, block: Block) -> torch.Tensor:
        """Return the model's values on a block of rows, shape (c,)."""
        return flat(block.model(theta, block.x, block.y), block.y, block.model.is_residual, block.n_rows)

    @property
    def is_plain(self) -> bool:
        """Whether r̃ is the residual itself: no weights, no loss."""
        return self.loss is None and self.rows.weights is None

    def residual(self, theta: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return r̃ of some rows, shape (c,), on the first device: the residuals themselves in the plain case."""
        block = self.read(0, rows, 0)
        return self.surrogate(block, self.values(theta, block))[0]

    def surrogate(self, block: Block, values: torch.Tensor) -> tuple[torch.Tensor, Factors]:
        """Return r̃ (c,) and the factors s (c,) of the rows of J̃ that belong to values (c,); None for all ones."""
        r = block.residual(values)
        if self.is_plain or block.penalty is not None:
            return r, None
        frequency, inverse_sigma = block.spread(values)
        s: torch.Tensor | None = None
        if inverse_sigma is not None:
            r, s = r * inverse_sigma, inverse_sigma
        if self.loss is not None:
            r, factor = (part.to(values) for part in self.loss.surrogate(r.double()))
            s = factor if s is None else s * factor
        if frequency is not None:
            root = frequency**0.5
            r, s = r * root, root if s is None else s * root
        return r, s

    def cost_terms(self, block: Block, values: torch.Tensor) -> torch.Tensor:
        """Return twice the cost of each of values (c,), in float64."""
        r = block.residual(values).double()
        frequency, inverse_sigma = block.spread(r)
        r = r if inverse_sigma is None else r * inverse_sigma
        squares = r**2 if self.loss is None else self.loss.value(r)
        return squares if frequency is None else frequency * squares

    @cached_property
    def target_norm(self) -> float:
        """Weighted norm of y, 0 for residual callables: what rounding in r̃ is measured by."""
        if self.is_residual or self.rows.y is None:
            return 0.0
        y = self.rows.y.double()
        if self.rows.weights is not None:
            frequency, inverse_sigma = self.rows.weights.read(slice(None), y.numel(), y.device, y.dtype)
            y = y.reshape(-1) * (1.0 if inverse_sigma is None else inverse_sigma)
            y = y * (1.0 if frequency is None else frequency**0.5)
        return float(torch.linalg.vector_norm(y))

    @property
    def n_observed(self) -> float:
        """Residuals counted with their frequencies: what the degrees of freedom start from."""
        weights = self.rows.weights
        if weights is None or weights.frequency is None:
            return self.n_residuals
        return float(weights.frequency.sum()) * self.n_residuals / self.rows.n_samples

    def probe(self, n_rows: int = PROBE_ROWS) -> Block:
        """Return a block of at most `n_rows` rows spread over the data (all rows when they are coupled)."""
        n = self.rows.n_samples
        if self.coupled or n <= n_rows:
            return self.read(0, slice(0, n), 0)
        some = telling_rows(self.rows.X)[:n_rows]
        x, y = self.rows.read(some, self.device, self.dtype)
        return Block(-1, slice(0, len(some)), x, y, self.replicas[0])

    def _rows_per_block(self, chunk_rows: int | str) -> int:
        if chunk_rows != "auto":
            if int(chunk_rows) < 1:
                raise ValueError(f"chunk_rows: got {chunk_rows!r}; 'auto' or a whole number >= 1 is expected")
            return int(chunk_rows)
        rows = LEAF_ROWS
        row_bytes = 8 * (self.n_params + 1) * max(self.per_row, 1)
        while 2 * rows * row_bytes <= BLOCK_BYTES:
            rows *= 2
        return rows


def _check_weights(rows: ArrayRows, n_residuals: int, per_row: int, unordered: bool) -> None:
    """Check that every residual belongs to a row, which of a user's vector that couples rows is not known."""
    weights = rows.weights
    if weights is None:
        return
    for name, given in (("sample_weight", weights.frequency), ("sigma", weights.sigma)):
        if given is None or (per_row and bool((given == given.flatten()[0]).all())):
            continue
        if not per_row or unordered:
            raise ValueError(
                f"{name}: the residual callable returns {n_residuals} values that depend on all {len(given)} rows; "
                "weight them inside it"
            )
        if given.ndim > 1 and given.numel() != n_residuals:
            raise ValueError(f"{name}: got shape {tuple(given.shape)} for {n_residuals} residuals")
