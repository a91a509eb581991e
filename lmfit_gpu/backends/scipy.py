"""Backend on numpy arrays and LAPACK through SciPy: the reference, on the CPU."""

import functools
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from scipy import linalg
from scipy.linalg import lapack
from threadpoolctl import ThreadpoolController

__all__ = ["ScipyBackend"]

BLOCK_COLUMNS = 32  # LAPACK's usual block of Householder vectors (ilaenv for dgeqrf)

Array = np.ndarray


class ScipyBackend:
    """Nine primitives of dense linear algebra by LAPACK."""

    name = "scipy"

    def leaf_threads(self) -> AbstractContextManager[Any]:
        """Return a context with one BLAS thread.

        OpenBLAS and torch keep a pool of threads each that spin while they wait; on two cores 4,096 x 31 leaves took
        ten times longer with both pools awake.
        """
        return _blas().limit(limits=1, user_api="blas")

    def asarray(self, tensor: torch.Tensor) -> Array:
        """Return a float64 numpy array, on the same memory when the tensor is float64 on the CPU."""
        return tensor.detach().to(device="cpu", dtype=torch.float64).numpy()

    def to_tensor(self, array: Array, device: torch.device) -> torch.Tensor:
        """Return a float64 tensor on a device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    def triangle(self, columns: Array) -> Array:
        """Return the triangle R of columnsᵀ by Householder QR (dgeqrf)."""
        return _triangle(columns.T)

    def join_triangles(self, upper: Array, lower: Array) -> Array:
        """Return the triangle of two triangles stacked."""
        return _triangle(np.concatenate((upper, lower)))

    def gram(self, columns: Array) -> Array:
        """Return columns columnsᵀ."""
        return columns @ columns.T

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

    def cholesky(self, matrix: Array) -> Array | None:
        """Return the lower factor (dpotrf), None when the matrix is not positive definite."""
        factor, info = lapack.dpotrf(matrix, lower=1)
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


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()


@functools.lru_cache(maxsize=8)
def _upper(k: int) -> Array:
    return np.tri(k, dtype=bool).T
