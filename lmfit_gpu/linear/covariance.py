r"""Covariance from a decomposition of the column-scaled J: (JᵀJ)⁻¹ on the directions that the data determine.

With J N⁻¹ = U diag(s) Vᵀ, N the column norms, and the kept singular values those that are not zero to rounding,

.. math:: (J^T J)^+ = N^{-1} V_k\, \mathrm{diag}(s_k^{-2})\, V_k^T N^{-1} .

The columns are scaled first, so that the rank does not depend on units.
"""

import numpy as np
import torch

from lmfit_gpu.linear.base import EPSILON

__all__ = ["MANY_PARAMS", "RANK_ROUNDING", "covariance_from", "covariance_of_columns", "covariance_of_gram"]

UNDETERMINED = 1e-4  # share of a parameter in the null directions above which the data do not determine it
RANK_ROUNDING = 10 * EPSILON  # per column: eigenvalues of a Gram matrix summed over many rows are known to that
MANY_PARAMS = 1000  # beyond, solvers that keep no n x n matrix make none for the covariance either


def covariance_from(
    s: np.ndarray, vt: np.ndarray, kept: np.ndarray, norms: np.ndarray
) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Return covariance, rank and undetermined mask from the decomposition of the column-scaled J.

    Parameters
    ----------
    s, vt : ndarray, shapes (n,), (n, n)
        Singular values and right singular vectors of J diag(norms)⁻¹.
    kept : ndarray of bool, shape (n,)
        Singular values that are not zero to rounding.
    norms : ndarray, shape (n,)
    """
    half = vt[kept].T / s[kept]
    with np.errstate(over="ignore", invalid="ignore"):  # of columns below 1e-150: nothing is known of their parameters
        covariance = (half @ half.T) / norms / norms[:, None]
    undetermined = (np.linalg.norm(vt[~kept], axis=0) > UNDETERMINED) | ~np.isfinite(np.diag(covariance))
    covariance[undetermined] = np.nan
    covariance[:, undetermined] = np.nan
    covariance[undetermined, undetermined] = np.inf
    return torch.from_numpy(covariance), int(kept.sum()), torch.from_numpy(undetermined)


def covariance_of_columns(matrix: np.ndarray, error: float) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Return covariance, rank and undetermined mask of a matrix (k, n) with the singular values of J (J, or R).

    Parameters
    ----------
    matrix : ndarray, shape (k, n)
    error : float
        Relative error of J: smaller singular values count as zero.
    """
    n = matrix.shape[1]
    norms = _nonzero(np.linalg.norm(matrix, axis=0))
    _, found, vt = np.linalg.svd(matrix / norms)
    s = np.zeros(n)
    s[: len(found)] = found
    return covariance_from(s, vt, s > max(error, n * EPSILON) * s[0], norms)


def covariance_of_gram(gram: np.ndarray, error: float) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Return covariance, rank and undetermined mask from JᵀJ (n, n).

    Parameters
    ----------
    gram : ndarray, shape (n, n)
    error : float
        Relative error of J: singular values below it count as zero.
    """
    norms = np.sqrt(_nonzero(gram.diagonal()))
    values, vectors = np.linalg.eigh(gram / np.outer(norms, norms))
    kept = values > max(error**2, len(gram) * RANK_ROUNDING) * values[-1]
    return covariance_from(np.sqrt(np.where(kept, values, 0.0)), vectors.T, kept, norms)


def _nonzero(norms: np.ndarray) -> np.ndarray:
    return np.where(norms > 0, norms, 1.0)
