r"""Which combinations of the parameters the data determine, and which they do not, by name.

Where J is rank-deficient, moving the parameters along a null direction v (J v = 0) changes no residual, to first order.
Of the parameters with a part in such directions only the combinations cᵀθ with c ⟂ v are determined:

.. math:: \mathrm{var}(c^T\hat\theta) = \|R^T c\|^2, \qquad R R^T = \mathrm{cov}(\hat\theta) \ \text{on the rest}.

Null directions come in any basis. They are sorted into groups of parameters that no direction joins (the blocks of the
projector on the null space), and the combinations of each group are brought to reduced echelon form, so that each is
told in as few parameters as possible. (Estimable functions: Searle, Linear Models (1971), section 5.4.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.sparse.csgraph import connected_components

from lmfit_gpu.linear.covariance import UNDETERMINED

__all__ = ["Unseen", "unseen_directions"]

JOINED = 1e-6  # entries of the projector below it are rounding, or a difference quotient's error
NEGLIGIBLE = 1e-4  # of the largest coefficient of a combination, in units of the parameters
PIVOT = 0.1  # of the largest: smaller ones would be divided by
NAMES_SHOWN = 6


@dataclass(frozen=True)
class Unseen:
    """A group of parameters that the data determine only in part.

    Parameters
    ----------
    names : tuple of str
    n_directions : int
        Null directions among them.
    combinations : ndarray, shape (len(names) - n_directions, len(names))
        Coefficients of the combinations that are determined.
    values, stderr : ndarray, shape (len(names) - n_directions,)
        Of those combinations.
    """

    names: tuple[str, ...]
    n_directions: int
    combinations: np.ndarray = field(repr=False)
    values: np.ndarray
    stderr: np.ndarray

    @property
    def expressions(self) -> list[str]:
        """The combinations as text.

        Examples
        --------
        >>> Unseen(("a", "b"), 1, np.array([[2.0, 1.0]]), np.array([3.0]), np.array([0.1])).expressions
        ['2.00·a + b']
        """
        return [_expression(row, self.names) for row in self.combinations]

    @property
    def text(self) -> str:
        """One line: which parameters, and what of them is determined.

        Examples
        --------
        >>> Unseen(("a", "b"), 1, np.array([[2.0, 1.0]]), np.array([3.0]), np.array([0.1])).text
        'a and b: only 2.00·a + b is determined'
        """
        who, n, d = _listed(self.names), len(self.names), self.n_directions
        if n == d:
            return f"{who}: not determined at all" if n == 1 else f"{who}: nothing of them is determined"
        if n > NAMES_SHOWN:
            return f"{who}: {d} direction{'s' if d > 1 else ''} of these {n} parameters not determined"
        return f"{who}: only {' and '.join(self.expressions)} {'is' if n - d == 1 else 'are'} determined"


def unseen_directions(
    names: Sequence[str], theta: np.ndarray, null: np.ndarray, units: np.ndarray, root: np.ndarray
) -> tuple[Unseen, ...]:
    """Return the groups of parameters that take part in null directions, in the order of the parameters.

    Parameters
    ----------
    names : sequence of str
    theta : ndarray, shape (n,)
    null : ndarray, shape (n, q)
        Null directions, orthonormal over `units`.
    units : ndarray, shape (n,)
    root : ndarray, shape (n, k)
        R of the covariance R Rᵀ on what is determined.
    """
    scaled = null / units[:, None]
    involved = np.flatnonzero(np.linalg.norm(scaled, axis=1) > UNDETERMINED)
    part = scaled[involved]
    projector = part @ part.T
    n_groups, labels = connected_components(np.abs(projector) > JOINED, directed=False)
    found = []
    for group in range(n_groups):
        members = labels == group
        at = involved[members]
        values, vectors = np.linalg.eigh(projector[np.ix_(members, members)])
        n_null = max(round(float(values.sum())), 1)
        seen = vectors[:, : len(at) - n_null].T  # cᵀ in units: orthogonal to the null directions
        combinations = _echelon(seen, units[at])
        with np.errstate(invalid="ignore"):
            stderr = np.linalg.norm(combinations @ root[at], axis=1)
        found.append(Unseen(tuple(names[i] for i in at), n_null, combinations, combinations @ theta[at], stderr))
    return tuple(sorted(found, key=lambda group: names.index(group.names[0])))


def _echelon(rows: np.ndarray, units: np.ndarray) -> np.ndarray:
    """Return combinations (d, n) of the rows in reduced echelon form from the last parameter, over their units.

    Parameters
    ----------
    rows : ndarray, shape (d, n)
        Orthonormal.
    units : ndarray, shape (n,)
        A coefficient c of the row belongs to θ/unit.
    """
    rows = rows.copy()
    free, pivots = list(range(len(rows))), {}
    for column in reversed(range(rows.shape[1])):
        if not free:
            break
        sizes = np.abs(rows[free, column])
        if sizes.max() < PIVOT * np.abs(rows[free]).max():
            continue
        row = free.pop(int(sizes.argmax()))
        pivots[row] = column
        rows[row] /= rows[row, column]
        for other in range(len(rows)):
            if other != row:
                rows[other] -= rows[other, column] * rows[row]
    rows[np.abs(rows) < NEGLIGIBLE * np.abs(rows).max(axis=1, keepdims=True)] = 0.0
    order = sorted(range(len(rows)), key=lambda row: pivots.get(row, 0))
    combinations = rows / units
    scale = [combinations[row, pivots[row]] if row in pivots else 1.0 for row in range(len(rows))]
    return (combinations / np.array(scale)[:, None])[order] if len(rows) else combinations


def _expression(row: np.ndarray, names: Sequence[str]) -> str:
    """Return a combination as text, such as ``2.00·a − b``."""
    text = ""
    for coefficient, name in zip(row, names, strict=True):
        if coefficient == 0:
            continue
        size = "" if abs(abs(coefficient) - 1) < NEGLIGIBLE else f"{abs(coefficient):#.3g}·"
        sign = (" − " if coefficient < 0 else " + ") if text else ("−" if coefficient < 0 else "")
        text += f"{sign}{size}{name}"
    return text


def _listed(names: Sequence[str]) -> str:
    if len(names) > NAMES_SHOWN:
        return f"{', '.join(names[:NAMES_SHOWN])} and {len(names) - NAMES_SHOWN} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else list(names))
