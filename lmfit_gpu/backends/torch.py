"""Backend on torch tensors: LAPACK on the CPU, cuSOLVER on a GPU, without leaving the device."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lmfit_gpu.backends.base import starts_of

__all__ = ["TorchBackend"]

Array = torch.Tensor
GPU_CHECK_EVERY = 10  # a look at a scalar waits for the queue of kernels


class TorchBackend:
    """The primitives by torch.linalg.

    Parameters
    ----------
    device : torch.device
        Where reductions end and systems are solved.
    """

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.check_every = 1 if device.type == "cpu" else GPU_CHECK_EVERY

    def leaves(self, device: torch.device) -> "TorchBackend":
        """Return torch on that device."""
        return self if device == self.device else TorchBackend(device)

    def reserve(self, n_bytes: int, purpose: str) -> None:
        """Refuse nothing: torch raises OutOfMemoryError, and the process lives."""

    def leaf_threads(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing: torch shares small matrices well."""
        return nullcontext()

    def asarray(self, tensor: torch.Tensor) -> Array:
        """Return a float64 tensor, itself where dtype and device agree."""
        return tensor.detach().to(device=self.device, dtype=torch.float64)

    def to_tensor(self, array: Array, device: torch.device) -> torch.Tensor:
        """Return a float64 tensor on a device."""
        return array.to(device)

    def draw(self, *scalars: Any) -> tuple[float, ...]:
        """Return scalars as floats by one transfer."""
        return tuple(torch.stack([torch.as_tensor(scalar) for scalar in scalars]).tolist())

    def triangle(self, columns: Array) -> Array:
        """Return the triangle R of columnsᵀ by Householder QR, on the device of `columns`."""
        k, length = columns.shape
        triangle = torch.linalg.qr(columns.T, mode="r")[1]
        if length >= k:
            return triangle
        return torch.cat((triangle, triangle.new_zeros(k - length, k)))

    def join_triangles(self, upper: Array, lower: Array) -> Array:
        """Return the triangle of two triangles stacked."""
        return torch.linalg.qr(torch.cat((upper, lower.to(upper.device))), mode="r")[1]

    def gram(self, columns: Array) -> Array:
        """Return columns columnsᵀ."""
        columns = columns.contiguous()  # the product of a part of a longer block has other rounding
        return columns @ columns.T

    def stacked(self, blocks: Iterable[torch.Tensor], shape: tuple[int, int]) -> Array:
        """Return blocks of rows as one tensor."""
        rows = torch.empty(shape, dtype=torch.float64, device=self.device)
        for start, block in starts_of(blocks):
            rows[start : start + len(block)] = block
        return rows

    def svd(self, matrix: Array) -> tuple[Array, Array, Array]:
        """Return U, s, Vᵀ; NaN throughout when the matrix is not finite."""
        if not bool(torch.isfinite(matrix).all()):
            bad = torch.full_like(matrix, torch.nan)
            return bad, bad[0], bad
        return torch.linalg.svd(matrix)

    def eigh(self, matrix: Array) -> tuple[Array, Array]:
        """Return eigenvalues, rising, and eigenvectors."""
        return torch.linalg.eigh(matrix)

    def cholesky(self, matrix: Array, damping: float = 0.0) -> Array | None:
        """Return the lower factor of matrix + damping I, None when it is not positive definite."""
        shifted = matrix.clone()
        shifted.diagonal().add_(damping)
        factor, info = torch.linalg.cholesky_ex(shifted)
        return factor if int(info) == 0 else None

    def cholesky_solve(self, factor: Array, b: Array) -> Array:
        """Solve with the factor."""
        return torch.cholesky_solve(b[:, None], factor)[:, 0]
