"""Backend on torch tensors: LAPACK on the CPU, cuSOLVER on a GPU, without leaving the device."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["TorchBackend"]

Array = torch.Tensor


class TorchBackend:
    """Nine primitives of dense linear algebra by torch.linalg.

    Parameters
    ----------
    device : torch.device
        Where reductions end and systems are solved.
    """

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def leaf_threads(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing: torch shares small matrices well."""
        return nullcontext()

    def asarray(self, tensor: torch.Tensor) -> Array:
        """Return a float64 tensor, itself where dtype and device agree."""
        return tensor.detach().to(device=self.device, dtype=torch.float64)

    def to_tensor(self, array: Array, device: torch.device) -> torch.Tensor:
        """Return a float64 tensor on a device."""
        return array.to(device)

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

    def svd(self, matrix: Array) -> tuple[Array, Array, Array]:
        """Return U, s, Vᵀ; NaN throughout when the matrix is not finite."""
        if not bool(torch.isfinite(matrix).all()):
            bad = torch.full_like(matrix, torch.nan)
            return bad, bad[0], bad
        return torch.linalg.svd(matrix)

    def eigh(self, matrix: Array) -> tuple[Array, Array]:
        """Return eigenvalues, rising, and eigenvectors."""
        return torch.linalg.eigh(matrix)

    def cholesky(self, matrix: Array) -> Array | None:
        """Return the lower factor, None when the matrix is not positive definite."""
        factor, info = torch.linalg.cholesky_ex(matrix)
        return factor if int(info) == 0 else None

    def cholesky_solve(self, factor: Array, b: Array) -> Array:
        """Solve with the factor."""
        return torch.cholesky_solve(b[:, None], factor)[:, 0]
