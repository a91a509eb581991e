r"""Rows of J of a weight that is used at several positions of a row of data: sequences, convolutions, embeddings.

.. math:: J_i = \sum_t \delta_{it} a_{it}^T, \qquad
    (J J^T)_{ik} = \sum_{ts} (\delta_{it} \cdot \delta_{ks})(a_{it} \cdot a_{ks}),

symbols as in :mod:`lmfit_gpu.layer_rows`, t and s positions. JJᵀ by pairs of positions costs m² T² of them;
where forming the rows costs less, they are formed, some channels at a time.

Reference: Rochette, Manoel and Tramel, "Efficient per-example gradient computations in convolutional neural networks",
2019, arXiv 1912.06015.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lmfit_gpu.layer_rows import ExplicitRows, Factor, OuterRows, SummedRows, TensorRows, weighted, written

__all__ = ["EmbeddingRows", "PositionRows", "summed"]

CHUNK = 2**23  # numbers of one intermediate product: 32 MiB in float32
PASS_PRICE = 4  # a number written and read again costs as much as this many multiplications of a matrix product


@dataclass(frozen=True, eq=False)
class PositionRows:
    """A weight used at T positions a row, in G groups (convolutions): J_i = Σ_t δ_it a_itᵀ in every group."""

    delta: torch.Tensor  # (rows, k, G, T, O)
    a: torch.Tensor  # (rows, G, T, I)

    @property
    def size(self) -> int:
        """n_t."""
        return self.delta.shape[2] * self.delta.shape[4] * self.a.shape[3]

    @property
    def m(self) -> int:
        """Values."""
        return self.delta.shape[0] * self.delta.shape[1]

    def _rows(self, delta: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """Return the rows of J_t in some groups, output channels or rows of data, shape (their m, their n_t)."""
        rows = torch.einsum("rkgto,rgti->rkgoi", delta, a)
        return rows.reshape(delta.shape[0] * delta.shape[1], -1)

    def squares(self) -> torch.Tensor:
        """Return ‖Σ_t δ_it a_itᵀ‖², shape (m,), from the products of T × T positions or of out × in, whichever is less.

        Notes
        -----
        T²(out + in) or T · out · in multiplications a value.
        """
        _, k, g, t, o = self.delta.shape
        i = self.a.shape[3]
        by_pairs = t * (o + i + PASS_PRICE) < o * i
        found = []
        for block in _blocks(len(self.a), k * g * (t * t if by_pairs else o * i)):
            delta, a = self.delta[block], self.a[block]
            if by_pairs:
                pairs = torch.einsum("rkgto,rkgso->rkgts", delta, delta)
                pairs = pairs * torch.einsum("rgti,rgsi->rgts", a, a)[:, None]
                found.append(pairs.sum((2, 3, 4)).view(-1))
            else:
                found.append(self._rows(delta, a).square_().sum(1))
        return torch.cat(found)

    def gram(self) -> torch.Tensor:
        """Return J_t J_tᵀ, shape (m, m), by pairs of positions or from the rows, whichever is less.

        Notes
        -----
        m² T² (out + in) or m² out · in + m T out · in multiplications a group, with at most CHUNK numbers (or one row,
        one output channel) at a time.
        """
        _, _, g, t, o = self.delta.shape
        i = self.a.shape[3]
        if _pairs_are_less(self.m, t, o, i, g * o * i):
            return _pair_gram(self.delta, self._a_pairs)
        total: Any = 0
        for groups in _blocks(g, self.m * o * i):
            delta, a = self.delta[:, :, groups], self.a[:, groups]
            for channels in _blocks(o, self.m * delta.shape[2] * i):
                rows = self._rows(delta[..., channels], a)
                total = rows @ rows.T if isinstance(total, int) else total.addmm_(rows, rows.T)
        return total

    def _a_pairs(self, block: slice) -> torch.Tensor:  # (G, block, T, rows, T)
        return torch.einsum("agti,bgsi->gatbs", self.a[block], self.a)

    def transposed(self, u: torch.Tensor) -> torch.Tensor:
        """Return J_tᵀ u, shape (n_t,): one product, as a weight's gradient."""
        return torch.einsum("rgto,rgti->goi", weighted(self.delta, u), self.a).reshape(-1)

    def along(self, v: torch.Tensor) -> torch.Tensor:
        """Return Σ_t δ_it · (V a_it), shape (m,)."""
        moved = torch.einsum("rgti,goi->rgto", self.a, v.view(self.delta.shape[2], self.delta.shape[4], -1))
        return torch.einsum("rkgto,rgto->rk", self.delta, moved).reshape(-1)

    def columns(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return J_tᵀ, shape (n_t, m)."""
        return written(self._rows(self.delta, self.a).T, out)


@dataclass(frozen=True, eq=False)
class EmbeddingRows:
    """The table of an embedding: J_i is Σ_t of δ_it in the line of the token at t, a one-hot vector for a.

    On a GPU equal tokens are summed in no fixed order, unless torch is told to be deterministic.
    """

    delta: torch.Tensor  # (rows, k, T, d)
    tokens: torch.Tensor  # (rows, T), whole numbers
    n_tokens: int

    @property
    def size(self) -> int:
        """n_t."""
        return self.n_tokens * self.delta.shape[3]

    @property
    def m(self) -> int:
        """Values."""
        return self.delta.shape[0] * self.delta.shape[1]

    def _rows(self, delta: torch.Tensor) -> torch.Tensor:
        """Return the rows of J_t for some of the d columns of the table, shape (m, n_tokens · columns)."""
        rows, k, _, d = delta.shape
        first = self.n_tokens * torch.arange(self.m, device=delta.device).view(rows, k, 1)
        lines = (first + self.tokens[:, None]).reshape(-1)
        table = delta.new_zeros(self.m * self.n_tokens, d).index_add_(0, lines, delta.reshape(-1, d))
        return table.view(self.m, -1)

    def _a_pairs(self, block: slice) -> torch.Tensor:  # (1, block, T, rows, T)
        return (self.tokens[block][None, :, :, None, None] == self.tokens).to(self.delta.dtype)

    def squares(self) -> torch.Tensor:
        """Return Σ_ts (δ_it · δ_is) over equal tokens, shape (m,)."""
        found = []
        for block in _blocks(len(self.tokens), self.delta.shape[1] * self.delta.shape[2] ** 2):
            delta, tokens = self.delta[block], self.tokens[block]
            same = (tokens[:, None, :, None] == tokens[:, None, None, :]).to(delta.dtype)
            found.append((torch.einsum("rkto,rkso->rkts", delta, delta) * same).sum((2, 3)).view(-1))
        return torch.cat(found)

    def gram(self) -> torch.Tensor:
        """Return J_t J_tᵀ, shape (m, m), by pairs of equal tokens or from the rows, whichever is less."""
        t, d = self.delta.shape[2:]
        if _pairs_are_less(self.m, t, d, 1, self.size):
            return _pair_gram(self.delta[:, :, None], self._a_pairs)
        total: Any = 0
        for channels in _blocks(d, self.m * self.n_tokens):
            rows = self._rows(self.delta[..., channels])
            total = rows @ rows.T if isinstance(total, int) else total.addmm_(rows, rows.T)
        return total

    def transposed(self, u: torch.Tensor) -> torch.Tensor:
        """Return J_tᵀ u, shape (n_t,)."""
        d = self.delta.shape[3]
        summed = weighted(self.delta, u).reshape(-1, d)
        return summed.new_zeros(self.n_tokens, d).index_add_(0, self.tokens.reshape(-1), summed).view(-1)

    def along(self, v: torch.Tensor) -> torch.Tensor:
        """Return Σ_t δ_it · V[token], shape (m,)."""
        moved = v.view(self.n_tokens, -1)[self.tokens]
        return torch.einsum("rkto,rto->rk", self.delta, moved).reshape(-1)

    def columns(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return J_tᵀ, shape (n_t, m)."""
        return written(self._rows(self.delta).T, out)


def summed(uses: Sequence[TensorRows]) -> TensorRows:
    """Return the rows of a tensor with several uses: each use of a weight is a further position."""
    if len(uses) == 1:
        return uses[0]
    explicit = [use.rows.matrix for use in uses if isinstance(use, ExplicitRows)]
    if len(explicit) == len(uses):
        return ExplicitRows(Factor(torch.stack(explicit).sum(0)))
    positions = [_positions(use) for use in uses if isinstance(use, OuterRows | PositionRows)]
    shapes = {(*use.delta.shape[:3], use.delta.shape[4]) for use in positions}
    if len(positions) == len(uses) and len(shapes) == 1:
        return PositionRows(torch.cat([use.delta for use in positions], 3), torch.cat([use.a for use in positions], 2))
    return SummedRows(tuple(uses))


def _positions(use: OuterRows | PositionRows) -> PositionRows:
    if isinstance(use, PositionRows):
        return use
    delta, a = use.delta.matrix, use.a.matrix
    return PositionRows(delta.view(len(a), -1, 1, 1, delta.shape[1]), a[:, None, None])


def _pairs_are_less(m: int, t: int, o: int, i: int, n_t: int) -> bool:
    """Return whether m² T² pairs of positions cost less than the rows (m, n_t) and their Gram matrix."""
    by_pairs = m * t * t * (o + i + PASS_PRICE) * (n_t / (o * i))
    return by_pairs < n_t * (m + t + PASS_PRICE)


def _pair_gram(delta: torch.Tensor, a_pairs: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """Return Σ_ts (δ_it · δ_ks)(a_it · a_ks), shape (m, m), a block of rows at a time; delta (rows, k, G, T, O)."""
    rows, k, g, t, _ = delta.shape
    m = rows * k
    found = []
    for block in _blocks(rows, g * k * t * m * t):
        pairs = torch.einsum("ajgto,blgso->gajtbls", delta[block], delta)
        pairs = pairs * a_pairs(block)[:, :, None, :, :, None]
        found.append(pairs.sum((0, 3, 6)).view(-1, m))
    return torch.cat(found)


def _blocks(n: int, numbers_each: int) -> Iterator[slice]:
    """Yield slices of n things that take that many numbers each, CHUNK numbers at a time."""
    step = max(1, CHUNK // max(numbers_each, 1))
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))
