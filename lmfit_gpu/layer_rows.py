r"""The m rows of J that belong to one tensor of parameters, kept as what they are products of.

A value i of a row of data has, for a tensor used as z = W a at positions t,

.. math:: J_i = \sum_t \delta_{it} a_{it}^T, \qquad (J J^T)_{ik} = \sum_{ts} (\delta_{it} \cdot \delta_{ks})
    (a_{it} \cdot a_{ks}),

a the inputs of the layer, δ = ∂v_i/∂z. With one position JJᵀ = (δδᵀ) ∘ (aaᵀ): m² products instead of m² n_t. The index
of a value is i = row · k + j, j < k, with k values (or k combinations of values) a row; a is the same for all of
these.

All arithmetic is in the dtype and on the device of the tensors given, and nothing here waits for a device.

References: Goodfellow, "Efficient per-example gradient computations", 2015, arXiv 1510.01799 (the norms);
Rochette, Manoel and Tramel, "Efficient per-example gradient computations in convolutional neural networks", 2019,
arXiv 1912.06015 (convolutions).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

__all__ = ["EmbeddingRows", "ExplicitRows", "Factor", "OuterRows", "PositionRows", "SummedRows", "TensorRows", "joined"]

CHUNK = 2**23  # numbers of one intermediate product: 32 MiB in float32
PASS_PRICE = 4  # a number written and read again costs as much as this many multiplications of a matrix product


class TensorRows(Protocol):
    """J_t, shape (m, n_t): the rows of J that belong to one tensor of n_t parameters; m = rows · k, k innermost.

    Vectors are given and returned in the dtype and on the device of the rows.
    """

    @property
    def size(self) -> int:
        """n_t."""

    def squares(self) -> torch.Tensor:
        """Return the squared norms of the rows, shape (m,)."""

    def gram(self) -> torch.Tensor:
        """Return J_t J_tᵀ, shape (m, m), the caller's own."""

    def transposed(self, u: torch.Tensor) -> torch.Tensor:
        """Return J_tᵀ u, shape (n_t,), for u (m,)."""

    def along(self, v: torch.Tensor) -> torch.Tensor:
        """Return J_t v, shape (m,), for v (n_t,)."""

    def columns(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return J_tᵀ, shape (n_t, m), written into `out` if given."""


@dataclass(frozen=True, eq=False)
class Factor:
    """One matrix, shape (rows, w), whose Gram matrix several tensors share: δ of a layer's weight and its bias."""

    matrix: torch.Tensor

    @cached_property
    def gram(self) -> torch.Tensor:
        """Shape (rows, rows), made once: not to be written to."""
        return self.matrix @ self.matrix.T

    @cached_property
    def squares(self) -> torch.Tensor:
        """Squared norms of the rows, shape (rows,)."""
        return self.matrix.square().sum(1)


@dataclass(frozen=True, eq=False)
class ExplicitRows:
    """J_t itself: a bias, the scale of a normalisation."""

    rows: Factor  # (m, n_t)

    @property
    def size(self) -> int:
        """n_t."""
        return self.rows.matrix.shape[1]

    def squares(self) -> torch.Tensor:
        """Return the squared norms of the rows, shape (m,)."""
        return self.rows.squares.clone()

    def gram(self) -> torch.Tensor:
        """Return J_t J_tᵀ, shape (m, m)."""
        return self.rows.gram.clone()

    def transposed(self, u: torch.Tensor) -> torch.Tensor:
        """Return J_tᵀ u, shape (n_t,), for u (m,)."""
        return self.rows.matrix.T @ u

    def along(self, v: torch.Tensor) -> torch.Tensor:
        """Return J_t v, shape (m,), for v (n_t,)."""
        return self.rows.matrix @ v

    def columns(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return J_tᵀ, shape (n_t, m)."""
        return _written(self.rows.matrix.T, out)


@dataclass(frozen=True, eq=False)
class OuterRows:
    """The weight of a linear layer used once a row: J_i = δ_i aᵀ."""

    delta: Factor  # (m, out)
    a: Factor  # (rows, in)

    @property
    def size(self) -> int:
        """n_t."""
        return self.delta.matrix.shape[1] * self.a.matrix.shape[1]

    @property
    def _delta(self) -> torch.Tensor:  # (rows, k, out)
        rows = self.a.matrix.shape[0]
        return self.delta.matrix.view(rows, -1, self.delta.matrix.shape[1])

    def squares(self) -> torch.Tensor:
        """Return ‖δ_i‖² ‖a‖², shape (m,)."""
        rows = self.a.matrix.shape[0]
        return (self.delta.squares.view(rows, -1) * self.a.squares[:, None]).view(-1)

    def gram(self) -> torch.Tensor:
        """Return (δδᵀ) ∘ (aaᵀ), shape (m, m), aaᵀ spread over the k values of a row."""
        m, rows = self.delta.matrix.shape[0], self.a.matrix.shape[0]
        k = m // rows
        return (self.delta.gram.view(rows, k, rows, k) * self.a.gram[:, None, :, None]).view(m, m)

    def transposed(self, u: torch.Tensor) -> torch.Tensor:
        """Return (Σ_j u_j δ_j)ᵀ a, shape (n_t,): one product, as a weight's gradient."""
        weighted = _weighted(self._delta, u)
        return (weighted.T @ self.a.matrix).view(-1)

    def along(self, v: torch.Tensor) -> torch.Tensor:
        """Return δ_i · (V a), shape (m,)."""
        moved = self.a.matrix @ v.view(self.delta.matrix.shape[1], -1).T  # (rows, out)
        return torch.einsum("rko,ro->rk", self._delta, moved).reshape(-1)

    def columns(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return J_tᵀ, shape (n_t, m): every number is one product, written once."""
        delta = self._delta.permute(2, 0, 1).contiguous()  # (out, rows, k)
        a = self.a.matrix.T.contiguous()  # (in, rows)
        if out is None:
            out = delta.new_empty(self.size, self.delta.matrix.shape[0])
        torch.mul(delta[:, None], a[None, :, :, None], out=out.view(len(delta), len(a), *delta.shape[1:]))
        return out


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
        return torch.einsum("rgto,rgti->goi", _weighted(self.delta, u), self.a).reshape(-1)

    def along(self, v: torch.Tensor) -> torch.Tensor:
        """Return Σ_t δ_it · (V a_it), shape (m,)."""
        moved = torch.einsum("rgti,goi->rgto", self.a, v.view(self.delta.shape[2], self.delta.shape[4], -1))
        return torch.einsum("rkgto,rgto->rk", self.delta, moved).reshape(-1)

    def columns(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return J_tᵀ, shape (n_t, m)."""
        return _written(self._rows(self.delta, self.a).T, out)


@dataclass(frozen=True, eq=False)
class EmbeddingRows:
    """The table of an embedding: J_i is Σ_t of δ_it in the line of the token at t, a one-hot vector for a."""

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
        weighted = _weighted(self.delta, u).reshape(-1, d)
        return weighted.new_zeros(self.n_tokens, d).index_add_(0, self.tokens.reshape(-1), weighted).view(-1)

    def along(self, v: torch.Tensor) -> torch.Tensor:
        """Return Σ_t δ_it · V[token], shape (m,)."""
        moved = v.view(self.n_tokens, -1)[self.tokens]
        return torch.einsum("rkto,rto->rk", self.delta, moved).reshape(-1)

    def columns(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return J_tᵀ, shape (n_t, m)."""
        return _written(self._rows(self.delta).T, out)


@dataclass(frozen=True, eq=False)
class SummedRows:
    """A tensor that is used several times: the sum of the rows of its uses, cross terms by forming it."""

    uses: tuple[TensorRows, ...]

    @property
    def size(self) -> int:
        """n_t."""
        return self.uses[0].size

    @cached_property
    def _whole(self) -> ExplicitRows:
        return ExplicitRows(Factor(self.columns().T))

    def squares(self) -> torch.Tensor:
        """Return the squared norms of the rows, shape (m,)."""
        return self._whole.squares()

    def gram(self) -> torch.Tensor:
        """Return J_t J_tᵀ, shape (m, m), of the whole rows."""
        return self._whole.gram()

    def transposed(self, u: torch.Tensor) -> torch.Tensor:
        """Return J_tᵀ u, shape (n_t,)."""
        return torch.stack([use.transposed(u) for use in self.uses]).sum(0)

    def along(self, v: torch.Tensor) -> torch.Tensor:
        """Return J_t v, shape (m,)."""
        return torch.stack([use.along(v) for use in self.uses]).sum(0)

    def columns(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return J_tᵀ, shape (n_t, m)."""
        out = self.uses[0].columns(out)
        for use in self.uses[1:]:
            out += use.columns()
        return out


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
        return OuterRows(_joined_factor(delta, shared), _joined_factor(a, shared))
    if isinstance(first, PositionRows):
        return PositionRows(torch.cat([part.delta for part in parts]), torch.cat([part.a for part in parts]))
    if isinstance(first, EmbeddingRows):
        tokens = torch.cat([part.tokens for part in parts])
        return EmbeddingRows(torch.cat([part.delta for part in parts]), tokens, first.n_tokens)
    if isinstance(first, SummedRows):
        return SummedRows(tuple(joined(uses, shared) for uses in zip(*(part.uses for part in parts), strict=True)))
    return ExplicitRows(Factor(torch.cat([block.columns().T for block in blocks])))


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


def _weighted(delta: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return Σ_j u_j δ_j over the k values of every row: (rows, k, ...) and (m,) to (rows, ...)."""
    rows, k = delta.shape[:2]
    weights = u.view(rows, k, *[1] * (delta.ndim - 2))
    return delta[:, 0] * weights[:, 0] if k == 1 else (delta * weights).sum(1)


def _written(columns: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return columns.contiguous() if out is None else out.copy_(columns)


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
