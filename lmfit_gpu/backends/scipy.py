"""Backend on numpy arrays and LAPACK through SciPy: the reference, on the CPU."""

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from scipy import linalg
from scipy.linalg import lapack

from lmfit_gpu.backends.base import starts_of
from lmfit_gpu.backends.torch import TorchBackend
from lmfit_gpu.threads import blas_threads

__all__ = ["ScipyBackend"]

BLOCK_COLUMNS = 32  # LAPACK's usual block of Householder vectors (ilaenv for dgeqrf)

Array = np.ndarray


class ScipyBackend:
    """The primitives by LAPACK."""

    name = "scipy"
    check_every = 1

    def leaves(self, device: torch.device) -> "ScipyBackend | TorchBackend":
        """Return LAPACK for blocks on the CPU, torch for those on a GPU."""
        return self if device.type == "cpu" else TorchBackend(device)

    def reserve(self, n_bytes: int, purpose: str) -> None:
        """Refuse nothing: an array that does not fit raises MemoryError."""

    def leaf_threads(self) -> AbstractContextManager[Any]:
        """Return a context with one BLAS thread.

        OpenBLAS and torch keep a pool of threads each that spin while they wait; on two cores 4,096 x 31 leaves took
        ten times longer with both pools awake.
        """
        return blas_threads(1)

    def asarray(self, tensor: torch.Tensor) -> Array:
        """Return a float64 numpy array, on the same memory when the tensor is float64 on the CPU."""
        return tensor.detach().to(device="cpu", dtype=torch.float64).numpy()

    def to_tensor(self, array: Array, device: torch.device) -> torch.Tensor:
        """Return a float64 tensor on a device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    def draw(self, *scalars: Any) -> tuple[float, ...]:
        """Return scalars as floats."""
        return tuple(map(float, scalars))

    def triangle(self, columns: Array) -> Array:
        """Return the triangle R of columnsᵀ by Householder QR (dgeqrf)."""
        return _triangle(columns.T)

    def join_triangles(self, upper: Array, lower: Array) -> Array:
        """Return the triangle of two triangles stacked."""
        return _triangle(np.concatenate((upper, lower)))

    def gram(self, columns: Array) -> Array:
        """Return columns columnsᵀ."""
        return columns @ columns.T

    def stacked(self, blocks: Iterable[torch.Tensor], shape: tuple[int, int]) -> Array:
        """Return blocks of rows as one array."""
        rows = np.empty(shape)
        for start, block in starts_of(blocks):
            rows[start : start + len(block)] = self.asarray(block)
        return rows

    def svd(self, matrix: Array) -> tuple[Array, Array, Array]:
        """Return U, s, Vᵀ; NaN throughout when the matrix is not finite."""
        if not np.isfinite(matrix).all():
            bad = np.full_like(matrix, np.nan)
            return bad, bad[0], bad
        try:
            return linalg.svd(matrix, check_finite=False)
        except linalg.LinAlgError:  # divide and conquer (gesdd) can fail where QR iteration does not
            return linalg.svd(matrix, check_finite=False, lapack_driver="gesvd")

    def eigh(self, matrix: Array) -> tuple[Array, Array]:
        """Return eigenvalues, rising, and eigenvectors."""
        return linalg.eigh(matrix, check_finite=False)

    def cholesky(self, matrix: Array, damping: float = 0.0) -> Array | None:
        """Return the lower factor of matrix + damping I (dpotrf, in place of the one copy), None when there is none."""
        shifted = np.array(matrix.T, order="F")  # of a C array a plain copy, in LAPACK's order
        shifted.reshape(-1, order="F")[:: len(matrix) + 1] += damping
        factor, info = lapack.dpotrf(shifted, lower=1, overwrite_a=1, clean=0)
        return factor if info == 0 else None

    def cholesky_solve(self, factor: Array, b: Array) -> Array:
        """Solve with the factor (dpotrs)."""
        return lapack.dpotrs(factor, b, lower=1)[0]


def _triangle(matrix: Array) -> Array:
    rows, k = matrix.shape
    factored = lapack.dgeqrf(matrix, lwork=max(1, BLOCK_COLUMNS * k))[0]
    if rows < k:
        factored = np.concatenate((factored, np.zeros((k - rows, k))))
    return np.where(_upper(k), factored[:k], 0.0)


@functools.lru_cache(maxsize=8)
def _upper(k: int) -> Array:
    return np.tri(k, dtype=bool).T
