r"""Rows of data: where they live, how they are cut into blocks, and in which order sums are taken.

A fit reads its data in *blocks* of consecutive rows, and every reduction over rows is taken in *leaves* of
:data:`LEAF_ROWS` rows that are combined pairwise in a fixed binary tree::

    leaf 0   leaf 1   leaf 2   leaf 3   leaf 4
       \      /          \      /         |
        \    /            \    /          |
         0..1              2..3           |
            \              /              |
               0 .. 3                     |
                    \                    /
                          0 .. 4

The tree depends on the leaves alone, so the sum has the same rounding whatever the size of the blocks and
however many devices share them; and its error grows with the logarithm of the number of rows
(Higham, "The accuracy of floating point summation", SIAM J. Sci. Comput. 14 (1993), section 3).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

__all__ = [
    "LEAF_ROWS",
    "LEAST_TARGET",
    "ArrayRows",
    "PairwiseTree",
    "Weights",
    "as_tensor",
    "chunk_slices",
    "each_tensor",
    "tensors_of",
    "total_sum",
]

LEAST_TARGET = 1e-140  # largest |y| below which squares of residuals vanish in float64, and with them the cost
LEAF_ROWS = 4096  # 1 MB for 30 float64 columns: a leaf's Jacobian stays in a core's second-level cache


def as_tensor(array: Any) -> torch.Tensor:
    """Return `array` as a torch tensor that shares its memory where it can.

    Parameters
    ----------
    array : tensor or array_like of numbers

    Returns
    -------
    Tensor
        The tensor itself, or one on the same memory; read-only arrays (memory maps) are not copied:
        nothing in this package writes to data.
    """
    if isinstance(array, torch.Tensor):
        return array.detach()
    array = np.asarray(array)
    if array.dtype.byteorder not in "=|" or any(step < 0 for step in array.strides):
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")  # a copy: of no rows, too
    if array.dtype == np.longdouble:
        array = array.astype(np.float64)
    if not array.flags.writeable:
        array = np.asarray(_Memory(array))
    return torch.from_numpy(array)


class _Memory:
    """The memory of a read-only array, said to be writable: torch warns of what is not, and it is only read here.

    Filtering the warning would change the filters of all threads.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.owner = array  # lives as long as what is made of it
        interface = array.__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tuple, list or dict of tensors (of any depth), or of one tensor."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [tensor for part in tree for tensor in tensors_of(part)] if isinstance(tree, (tuple, list)) else []


def each_tensor(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return the same tuple, list or dict with `function` of every tensor; what is no tensor stays."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: each_tensor(function, part) for key, part in tree.items()}
    if isinstance(tree, (tuple, list)):
        parts = [each_tensor(function, part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def total_sum(y: torch.Tensor, weights: "Weights | None") -> float:
    """Return Σ w ((y − ȳ)/σ)² of targets (n_samples, ...), ȳ the mean of each output with weights w/σ²."""
    values = y.double().cpu().reshape(len(y), -1)
    share = torch.ones((), dtype=torch.float64)
    if weights is not None:
        frequency, inverse = weights.read(slice(None), values.numel(), values.device, values.dtype)
        share = (share if frequency is None else frequency) * (1.0 if inverse is None else inverse**2)
    share = share.expand(values.numel()).reshape(values.shape)
    mean = (share * values).sum(0) / share.sum(0)
    return float((share * (values - mean) ** 2).sum())


def chunk_slices(n_rows: int, chunk_rows: int) -> list[slice]:
    """Cut ``range(n_rows)`` into consecutive slices of at most `chunk_rows` rows.

    Examples
    --------
    >>> chunk_slices(10, 4)
    [slice(0, 4, None), slice(4, 8, None), slice(8, 10, None)]
    """
    return [slice(start, min(start + chunk_rows, n_rows)) for start in range(0, n_rows, chunk_rows)]


@dataclass(frozen=True)
class Weights:
    """What the rows count for.

    Parameters
    ----------
    frequency : Tensor, shape (n_samples,), float64, optional
        How often a row was observed.
    sigma : Tensor, shape (n_samples,) or that of y, float64, optional
        Standard deviations, in the units of the residuals.
    """

    frequency: torch.Tensor | None = None
    sigma: torch.Tensor | None = None

    def read(
        self, rows: slice | torch.Tensor, n_values: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return (frequency, 1/sigma) of `n_values` residuals of some rows, each of shape (n_values,) or None."""
        return self._spread(self.frequency, rows, n_values, device, dtype), (
            None if self.sigma is None else self._spread(1 / self.sigma, rows, n_values, device, dtype)
        )

    def some(self, rows: torch.Tensor) -> "Weights":
        """Return the weights of some rows."""
        frequency, sigma = (
            None if part is None else part[rows.to(part.device)] for part in (self.frequency, self.sigma)
        )
        return Weights(frequency, sigma)

    def log_sigma(self, n_values: int) -> float:
        """Return Σ w ln σ over `n_values` residuals of all rows."""
        frequency, inverse = self.read(slice(None), n_values, torch.device("cpu"), torch.float64)
        if inverse is None:
            return 0.0
        logarithms = -torch.log(inverse)
        return float((logarithms if frequency is None else frequency * logarithms).sum())

    @staticmethod
    def _spread(
        values: torch.Tensor | None, rows: slice | torch.Tensor, n_values: int, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor | None:
        if values is None:
            return None
        part = values[rows if isinstance(rows, slice) else rows.to(values.device)]
        if part.numel() != n_values:
            part = part.reshape(len(part), -1).expand(-1, n_values // max(len(part), 1))
        return part.reshape(-1).to(device=device, dtype=dtype)


@dataclass(frozen=True)
class ArrayRows:
    """Rows held in memory: features ``X`` and targets ``y``, each with one leading row axis.

    Parameters
    ----------
    X : Tensor, shape (n_samples, ...)
    y : Tensor, shape (n_samples,) or (n_samples, n_outputs), or None
    squeeze : bool
        Hand a single feature column to the model as 1-D ``x``.
    cast_features : bool
        Cast X to the arithmetic of the model (y always is); False for the token numbers of an embedding.
    weights : Weights, optional
    """

    X: torch.Tensor
    y: torch.Tensor | None
    squeeze: bool = False
    cast_features: bool = True
    weights: Weights | None = None

    @property
    def n_samples(self) -> int:
        """Number of rows of X."""
        return self.X.shape[0]

    def read(
        self, rows: slice | torch.Tensor, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (x, y) of some rows on a device in the arithmetic of the model; casts only those rows."""
        x = self.X[rows] if isinstance(rows, slice) else _taken(self.X, rows)
        # A frame's array is in Fortran order: sums over its columns would have another rounding.
        x = (self._cast(x, device, dtype) if self.cast_features else _tokens(x).to(device)).contiguous()
        x = x.reshape(x.shape[0]) if self.squeeze else x
        return x, None if self.y is None else self._cast(
            self.y[rows if isinstance(rows, slice) else rows.to(self.y.device)], device, dtype
        )

    def some(self, rows: torch.Tensor) -> "ArrayRows":
        """Return some of the rows, with their weights."""
        y = None if self.y is None else self.y[rows.to(self.y.device)]
        weights = None if self.weights is None else self.weights.some(rows)
        return replace(self, X=_taken(self.X, rows), y=y, weights=weights)

    @staticmethod
    def _cast(part: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        if part.is_complex():
            return part.to(device)
        return part.to(device=device, dtype=dtype)


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """Return whole numbers in a type that torch takes for an index."""
    return x if x.dtype in (torch.int64, torch.int32) else x.long()


def _taken(X: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return some rows; torch does not index unsigned integers wider than a byte."""
    if X.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return torch.stack([X[int(row)] for row in rows])
    return X[rows.to(X.device)]


class PairwiseTree:
    """Combine a stream of leaf results in a fixed binary tree, holding only the logarithm of their number.

    Parameters
    ----------
    combine : callable (left, right) -> combined
        Associative in exact arithmetic.

    Examples
    --------
    >>> tree = PairwiseTree(lambda left, right: f"({left}{right})")
    >>> for leaf in "abcde":
    ...     tree.push(leaf)
    >>> tree.result()
    '(((ab)(cd))e)'
    """

    def __init__(self, combine: Callable[[Any, Any], Any]) -> None:
        self._combine = combine
        self._partial: list[tuple[int, Any]] = []  # (height, result), heights falling strictly

    def push(self, leaf: Any) -> None:
        """Add the next leaf."""
        height = 0
        while self._partial and self._partial[-1][0] == height:
            leaf = self._combine(self._partial.pop()[1], leaf)
            height += 1
        self._partial.append((height, leaf))

    def result(self) -> Any:
        """Return the combination of all leaves pushed so far, or None when there were none."""
        parts = [part for _, part in self._partial]
        if not parts:
            return None
        total = parts.pop()
        while parts:
            total = self._combine(parts.pop(), total)
        return total


def leaf_slices(n_residuals: int, per_row: int) -> Iterator[slice]:
    """Yield the slices of a block's residuals that make up its leaves (`per_row` residuals to a row)."""
    yield from chunk_slices(n_residuals, LEAF_ROWS * per_row)
