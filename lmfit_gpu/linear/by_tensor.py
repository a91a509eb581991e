r"""J known by its blocks of columns, one for each parameter tensor, and never held.

J = [J_1 J_2 ...], J_t (m, n_t). What :mod:`lmfit_gpu.linear.ghost` asks of a block is its Gram matrix J_t J_tᵀ and the
products J_t v and J_tᵀ u (:mod:`lmfit_gpu.layers` has them from a layer's inputs and output gradients). Here are also
the sums over the blocks, with the penalty ½ Σ α_t ‖θ_t‖² where there is one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from lmfit_gpu.layer_rows import OuterRows, TensorRows

__all__ = ["Point", "RowsJacobian", "inverse", "one_per_tensor"]


class LinearizedRows(Protocol):
    """What a Jacobian gives for this solver."""

    tensors: Sequence[TensorRows]
    residuals: torch.Tensor  # (m,)
    alphas: Sequence[float]


class RowsJacobian(Protocol):
    """A Jacobian that knows its rows tensor by tensor."""

    theta: torch.Tensor

    def tensor_rows(self) -> LinearizedRows:
        """Return J by tensors, and r."""
        ...


@dataclass(frozen=True)
class Point:
    """J by tensors, r, α and θ: what does not depend on D.

    Parameters
    ----------
    tensors : tuple of TensorRows
    residuals : Tensor, shape (m,)
        In the dtype of the model.
    alphas : tuple of float
        One for each tensor, >= 0.
    theta : Tensor, shape (n,), or None
        None only where every α is 0.
    """

    tensors: tuple[TensorRows, ...]
    residuals: torch.Tensor
    alphas: tuple[float, ...]
    theta: torch.Tensor | None

    def __post_init__(self) -> None:
        """Check the parameters."""
        if len(self.alphas) != len(self.tensors) or not all(0 <= alpha < math.inf for alpha in self.alphas):
            raise ValueError(f"alphas: got {self.alphas}; {len(self.tensors)} numbers >= 0, one a tensor, are expected")
        if self.theta is None and any(self.alphas):
            raise ValueError("theta: got None; with a penalty the parameters are needed")
        if self.theta is not None and self.theta.shape != (sum(self.sizes),):
            raise ValueError(f"theta: got shape {tuple(self.theta.shape)}; {(sum(self.sizes),)} is expected")

    @cached_property
    def sizes(self) -> list[int]:
        """n_t."""
        return [rows.size for rows in self.tensors]

    @cached_property
    def thetas(self) -> tuple[torch.Tensor, ...]:
        """θ_t; made up of zeros, without memory, where θ is not needed."""
        if self.theta is None:
            return tuple(self.residuals.new_zeros(1).expand(size) for size in self.sizes)
        return self.theta.split(self.sizes)

    @cached_property
    def r(self) -> torch.Tensor:
        """R in float64."""
        return self.residuals.double()

    @cached_property
    def grams(self) -> list[torch.Tensor]:
        """K_t, shape (m, m), in the dtype of the model."""
        return [rows.gram() for rows in self.tensors]

    @cached_property
    def along_theta(self) -> list[torch.Tensor | None]:
        """J_t θ_t, shape (m,), float64; None where α_t = 0."""
        parts = zip(self.tensors, self.thetas, self.alphas, strict=True)
        return [self._along_itself(rows, theta) if alpha else None for rows, theta, alpha in parts]

    def _along_itself(self, rows: TensorRows, theta: torch.Tensor) -> torch.Tensor:
        """Return J_t θ_t; what a layer has made on the way forward need not be made again."""
        known = rows.along_itself() if isinstance(rows, OuterRows) else None
        return (rows.along(theta.to(self.residuals)) if known is None else known).double()

    @cached_property
    def numbers(self) -> tuple[list[float], list[float], list[float], float]:
        """Traces of the K_t, ‖K_t‖, ‖θ_t‖² (0 where α_t = 0), and ‖r‖, read from the device by one wait."""
        drawn = [gram.diagonal().sum(dtype=torch.float64) for gram in self.grams]
        drawn += [torch.linalg.vector_norm(gram, dtype=torch.float64) for gram in self.grams]
        drawn += [
            torch.linalg.vector_norm(theta, dtype=torch.float64) ** 2 if alpha else drawn[0].new_zeros(())
            for theta, alpha in zip(self.thetas, self.alphas, strict=True)
        ]
        k, values = len(self.tensors), torch.stack([*drawn, torch.linalg.vector_norm(self.r)]).tolist()
        return values[:k], values[k : 2 * k], values[2 * k : 3 * k], values[-1]

    def transposed(self, v: torch.Tensor, divisors: Sequence[float]) -> torch.Tensor:
        """Return (J_tᵀ v + α_t θ_t) / divisor_t, shape (n,), in the dtype of the model; 0 where the divisor is."""
        v, whole = v.to(self.residuals), self.residuals.new_empty(sum(self.sizes))
        for t, part in enumerate(whole.split(self.sizes)):
            part.copy_(self.tensors[t].transposed(v))
            if self.alphas[t]:
                part.add_(self.thetas[t], alpha=self.alphas[t])
            if divisors[t] != 1:
                part.mul_(inverse(divisors[t]))
        return whole

    @cached_property
    def gradient(self) -> torch.Tensor:
        """J_tᵀ r + α_t θ_t, shape (n,)."""
        return self.transposed(self.r, [1.0] * len(self.tensors)).double()

    def expanded(self, values: Sequence[float]) -> torch.Tensor:
        """Return one number for each tensor as a vector (n,)."""
        return torch.cat([self.r.new_full((size,), value) for size, value in zip(self.sizes, values, strict=True)])


def inverse(value: float) -> float:
    """Return 1/value, 0 for 0: a tensor without rows or penalty, at λ = 0, does not move."""
    return 1 / value if value != 0 else 0.0


def one_per_tensor(scale: torch.Tensor, sizes: Sequence[int]) -> list[float]:
    """Return d_t from D as (n,) or (T,)."""
    if scale.shape == (len(sizes),):
        return scale.tolist()
    if scale.shape != (sum(sizes),):
        raise ValueError(f"scaling: got shape {tuple(scale.shape)}; {(sum(sizes),)} or {(len(sizes),)} is expected")
    ends = torch.stack([torch.stack(part.aminmax()) for part in scale.split(list(sizes))]).tolist()
    for t, (low, high) in enumerate(ends):
        if low != high:
            raise ValueError(
                f"scaling: with solver='ghost' one number per parameter tensor is expected; got {low:g} to {high:g} in "
                f"tensor {t} of {sizes[t]} parameters; allowed are 'jacobian', 'identity', or solver='dual'"
            )
    return [low for low, _ in ends]
