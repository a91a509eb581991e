"""What a backend offers."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

__all__ = ["Backend"]


class Backend(Protocol):
    """Nine primitives; ``Array`` is the backend's own array type."""

    name: str

    def leaf_threads(self) -> AbstractContextManager[Any]:
        """Return a context for reductions leaf by leaf: matrices too small to share between threads."""
        ...

    def asarray(self, tensor: torch.Tensor) -> Any:
        """Return a float64 array of the backend (on the same memory where dtype and device allow)."""
        ...

    def to_tensor(self, array: Any, device: torch.device) -> torch.Tensor:
        """Return a float64 tensor on a device."""
        ...

    def triangle(self, columns: Any) -> Any:
        """Return the (k, k) triangle R of a QR factorisation of columnsᵀ; `columns` is (k, l)."""
        ...

    def join_triangles(self, upper: Any, lower: Any) -> Any:
        """Return the triangle of two (k, k) triangles stacked."""
        ...

    def gram(self, columns: Any) -> Any:
        """Return columns columnsᵀ, shape (k, k)."""
        ...

    def svd(self, matrix: Any) -> tuple[Any, Any, Any]:
        """Return U, s, Vᵀ of a square matrix."""
        ...

    def eigh(self, matrix: Any) -> tuple[Any, Any]:
        """Return eigenvalues, rising, and eigenvectors of a symmetric matrix."""
        ...

    def cholesky(self, matrix: Any) -> Any | None:
        """Return a factor of a positive definite matrix, None when it is not."""
        ...

    def cholesky_solve(self, factor: Any, b: Any) -> Any:
        """Solve with a factor made by :meth:`cholesky`; `b` is (n,)."""
        ...
