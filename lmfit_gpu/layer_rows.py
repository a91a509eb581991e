r"""The m rows of J that belong to one tensor of parameters, kept as what they are products of.

A value v_i of a row of data has, for a weight used once, z = W a, the row

.. math:: J_i = \delta_i a^T, \qquad (J J^T)_{ik} = (\delta_i \cdot \delta_k)(a_i \cdot a_k),

a the inputs of the layer, δ = ∂v_i/∂z: JJᵀ = (δδᵀ) ∘ (aaᵀ), m² products instead of m² n_t. The index of a value is
i = row · k + j, j < k, with k values (or k combinations of values) a row; a is the same for all of these. Weights used
at several positions of a row are in :mod:`lmfit_gpu.layer_positions`.

All arithmetic is in the dtype and on the device of the tensors given, and nothing here waits for a device.

References: Goodfellow, "Efficient per-example gradient computations", 2015, arXiv 1510.01799 (the norms of the rows).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

__all__ = ["ExplicitRows", "Factor", "OuterRows", "SummedRows", "TensorRows", "weighted", "written"]


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
        return written(self.rows.matrix.T, out)


@dataclass(frozen=True, eq=False)
class OuterRows:
    """The weight of a linear layer used once a row: J_i = δ_i aᵀ."""

    delta: Factor  # (m, out)
    a: Factor  # (rows, in)
    moved: torch.Tensor | None = None  # W a (rows, out) with the weight W of the point, where it is known

    def along_itself(self) -> torch.Tensor | None:
        """Return J_t θ_t, shape (m,), from W a; None where that is not known."""
        return None if self.moved is None else torch.einsum("rko,ro->rk", self._delta, self.moved).reshape(-1)

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
        return (weighted(self._delta, u).T @ self.a.matrix).view(-1)

    def along(self, v: torch.Tensor) -> torch.Tensor:
        """Return δ_i · (V a), shape (m,)."""
        moved = self.a.matrix @ v.view(self.delta.matrix.shape[1], -1).T  # (rows, out)
        return torch.einsum("rko,ro->rk", self._delta, moved).reshape(-1)

    def columns(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return J_tᵀ, shape (n_t, m): every number is one product, written once."""
        delta, a = self._delta.permute(2, 0, 1), self.a.matrix.T  # (out, rows, k), (in, rows)
        if len(a) > 1:  # numbers of δ are read more than once: side by side that takes a third of the time
            delta, a = delta.contiguous(), a.contiguous()
        if out is None:
            out = delta.new_empty(self.size, self.delta.matrix.shape[0])
        torch.mul(delta[:, None], a[None, :, :, None], out=out.view(len(delta), len(a), *delta.shape[1:]))
        return out


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


def weighted(delta: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return Σ_j u_j δ_j over the k values of every row: (rows, k, ...) and (m,) to (rows, ...)."""
    rows, k = delta.shape[:2]
    weights = u.view(rows, k, *[1] * (delta.ndim - 2))
    return delta[:, 0] * weights[:, 0] if k == 1 else (delta * weights).sum(1)


def written(columns: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Return columns in memory of their own, or written into `out`."""
    return columns.contiguous() if out is None else out.copy_(columns)
