"""What a backend offers, in two parts: reducing blocks of rows where the model is, and solving what is left."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

__all__ = ["Backend", "Leaves", "starts_of"]


class Leaves(Protocol):
    """Reductions of one leaf of rows, on a device of the model; ``Array`` is the library's own array type."""

    def leaf_threads(self) -> AbstractContextManager[Any]:
        """Return a context for reductions leaf by leaf: matrices too small to share between threads."""
        ...

    def asarray(self, tensor: torch.Tensor) -> Any:
        """Return a float64 array (on the same memory where dtype and device allow)."""
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


class Backend(Protocol):
    """Dense linear algebra of matrices without rows; ``Array`` is the backend's own array type."""

    name: str
    check_every: int  # iterations of a recurrence between two looks at its scalars: each look waits for the device

    def leaves(self, device: torch.device) -> Leaves:
        """Return what reduces blocks of rows on a device of the model."""
        ...

    def reserve(self, n_bytes: int, purpose: str) -> None:
        """Refuse work that this backend has no memory for, before anything is allocated.

        Parameters
        ----------
        n_bytes : int
            What arrays of the backend take at most, together.
        purpose : str
            For the message.

        Raises
        ------
        BackendUnavailableError
            If it is more than the backend may use; the message says what to set.
        """
        ...

    def asarray(self, tensor: torch.Tensor) -> Any:
        """Return a float64 array of the backend (on the same memory where dtype and device allow)."""
        ...

    def to_tensor(self, array: Any, device: torch.device) -> torch.Tensor:
        """Return a float64 tensor on a device."""
        ...

    def draw(self, *scalars: Any) -> tuple[float, ...]:
        """Return scalars of the backend as floats, all by one wait: the one place where a loop waits for a device."""
        ...

    def stacked(self, blocks: Iterable[torch.Tensor], shape: tuple[int, int]) -> Any:
        """Return blocks of rows as one array of a shape (m, n), its rows spread over the backend's processors."""
        ...

    def svd(self, matrix: Any) -> tuple[Any, Any, Any]:
        """Return U, s, Vᵀ of a square matrix; NaN throughout when the matrix is not finite."""
        ...

    def eigh(self, matrix: Any) -> tuple[Any, Any]:
        """Return eigenvalues, rising, and eigenvectors of a symmetric matrix."""
        ...

    def cholesky(self, matrix: Any, damping: float = 0.0) -> Any | None:
        """Return a factor of matrix + damping I, None when that is not positive definite."""
        ...

    def cholesky_solve(self, factor: Any, b: Any) -> Any:
        """Solve with a factor made by :meth:`cholesky`; `b` is (n,)."""
        ...


def starts_of(blocks: Iterable[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, block) of consecutive blocks of rows."""
    start = 0
    for block in blocks:
        yield start, block
        start += len(block)
