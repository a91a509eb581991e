r"""What the data determine of the parameters, from a decomposition of the column-scaled J.

With J N⁻¹ = U diag(s) Vᵀ, N the column norms, V_k the right singular vectors whose singular value is not zero to
rounding and V_0 the others,

.. math:: F = N^{-1} V_k\, \mathrm{diag}(1/s_k), \qquad F F^T = (J^T J)^+, \qquad J N^{-1} V_0 = 0 .

F is all that a covariance needs: variances are sums of squares of its rows, and J F has orthonormal columns. The
columns of N⁻¹V₀ are the directions in which the parameters may be moved without any effect on the data. The columns
of J are scaled first, so that the rank does not depend on units.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

__all__ = [
    "MANY_PARAMS",
    "RANK_ROUNDING",
    "UNDETERMINED",
    "Estimable",
    "estimable_of_columns",
    "estimable_of_gram",
    "marked_covariance",
]

EPSILON = float(np.finfo(np.float64).eps)
UNDETERMINED = 1e-4  # share of a parameter in the null directions above which the data do not determine it
RANK_ROUNDING = 10 * EPSILON  # per column: eigenvalues of a Gram matrix summed over many rows are known to that
MANY_PARAMS = 1000  # beyond, solvers that keep no n x n matrix make none for the covariance either


@dataclass(frozen=True)
class Estimable:
    """What the data determine, and what they do not.

    Parameters
    ----------
    factor : ndarray, shape (n, k)
        F; its rows are 0 for parameters that are held.
    null : ndarray, shape (n, n - k - held)
        N⁻¹V₀: directions that J does not see. Orthonormal over `units`.
    units : ndarray, shape (n,)
        1/N: the change of each parameter alone that moves the residuals by 1; 1 where J does not depend on it.
    condition : float
        s_max/s_min of the singular values that count.
    held : ndarray of bool, shape (n,)
        Parameters that are kept where they are, such as those on a bound.
    """

    factor: np.ndarray
    null: np.ndarray
    units: np.ndarray
    condition: float
    held: np.ndarray

    @property
    def rank(self) -> int:
        """Numerical rank of J on the parameters that are not held."""
        return self.factor.shape[1]

    @cached_property
    def undetermined(self) -> np.ndarray:
        """Mask of the parameters that take part in a null direction, shape (n,)."""
        with np.errstate(over="ignore"):  # of columns below 1e-150: nothing is known of their parameters
            unknown = ~np.isfinite((self.factor**2).sum(1))
        return (np.linalg.norm(self.null / self.units[:, None], axis=1) > UNDETERMINED) | unknown


def marked_covariance(root: np.ndarray, undetermined: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Return R Rᵀ, shape (n, n), with inf on the diagonal for undetermined parameters and NaN for held ones.

    NaN in the rest of their rows and columns.

    Parameters
    ----------
    root : ndarray, shape (n, k)
    undetermined, held : ndarray of bool, shape (n,)
    """
    with np.errstate(over="ignore", invalid="ignore"):
        covariance: np.ndarray = root @ root.T
    unknown = held | undetermined
    covariance[unknown], covariance[:, unknown] = np.nan, np.nan
    covariance[undetermined, undetermined] = np.inf
    return covariance


def estimable_of_columns(matrix: np.ndarray, error: float, held: np.ndarray | None = None) -> Estimable:
    """Return what a matrix (k, n) with the singular values of J (J, or R) determines.

    Parameters
    ----------
    matrix : ndarray, shape (k, n)
    error : float
        Relative error of J: smaller singular values count as zero.
    held : ndarray of bool, shape (n,), optional
        Columns to leave out.
    """
    matrix, held = _free_columns(matrix, held)
    n = matrix.shape[1]
    norms = _nonzero(np.linalg.norm(matrix, axis=0))
    _, found, vt = np.linalg.svd(matrix / norms)
    s = np.zeros(n)
    s[: len(found)] = found
    kept = s > max(error, n * EPSILON) * s[:1]
    return _estimable(s, vt, kept, norms, held)


def estimable_of_gram(gram: np.ndarray, error: float, held: np.ndarray | None = None) -> Estimable:
    """Return what JᵀJ (n, n) says.

    Parameters
    ----------
    gram : ndarray, shape (n, n)
    error : float
        Relative error of J: singular values below it count as zero.
    held : ndarray of bool, shape (n,), optional
        Parameters to leave out.
    """
    gram, held = _free_columns(gram, held)
    gram = gram[~held] if held.any() else gram
    norms = np.sqrt(_nonzero(gram.diagonal()))
    values, vectors = np.linalg.eigh(gram / np.outer(norms, norms))
    kept = values > max(error**2, len(gram) * RANK_ROUNDING) * values[-1:]
    return _estimable(np.sqrt(np.where(kept, values, 0.0)), vectors.T, kept, norms, held)


def _estimable(s: np.ndarray, vt: np.ndarray, kept: np.ndarray, norms: np.ndarray, held: np.ndarray) -> Estimable:
    """Return F, N⁻¹V₀ and N of all parameters from the decomposition for those that are not held."""
    factor, null, units = np.zeros((len(held), kept.sum())), np.zeros((len(held), (~kept).sum())), np.ones(len(held))
    with np.errstate(over="ignore"):
        factor[~held] = vt[kept].T / s[kept] / norms[:, None]
        null[~held] = vt[~kept].T / norms[:, None]
        units[~held] = 1 / norms
    used = s[kept]
    return Estimable(factor, null, units, float(used.max() / used.min()) if used.size else np.inf, held)


def _free_columns(matrix: np.ndarray, held: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    held = np.zeros(matrix.shape[1], dtype=bool) if held is None else held
    return (matrix[:, ~held] if held.any() else matrix), held


def _nonzero(norms: np.ndarray) -> np.ndarray:
    return np.where(norms > 0, norms, 1.0)
