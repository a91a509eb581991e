r"""Parameters that a model is linear in: found by evaluating it, and solved for exactly.

With the other parameters :math:`\beta` fixed, residuals of a model that is jointly affine in parameters
:math:`\alpha` are

.. math:: r(\alpha, \beta) = r_0(\beta) + C(\beta)\,\alpha, \qquad
          \hat\alpha(\beta) = \arg\min_\alpha \|r_0 + C \alpha\|

(variable projection: Golub and Pereyra, SIAM J. Numer. Anal. 10 (1973), doi:10.1137/0710036). A search for a start
then only has to guess :math:`\beta`: an amplitude that does not fit the guess of a frequency no longer hides that the
frequency is right. One point costs one evaluation and one more for each linear parameter, none outside the bounds.
"""

from collections.abc import Callable

import torch

__all__ = ["linear_parameters", "projected"]

AFFINE_RTOL = 1e-6  # of the change that is compared; rounding of the values adds
ROUNDING = 1e-12  # of the largest residual
CUTOFF = 1e-12  # eigenvalues of CᵀC with columns of unit norm, relative to the largest: a guess needs no digits
MOST_TESTED = 24  # parameters: n²/2 evaluations a point

Residuals = Callable[[torch.Tensor], torch.Tensor]


def linear_parameters(residuals: Residuals, points: torch.Tensor) -> list[int]:
    """Return parameters that the residuals are jointly affine in.

    Parameters
    ----------
    residuals : callable (B, n_params) -> (B, c)
    points : Tensor, shape (3p, n_params)
        p triples; coordinates of one are exchanged for those of another, so no point outside their box is evaluated.
        A parameter counts where every triple with finite residuals says so, and at least one does.

    Returns
    -------
    list of int
        Indices, ascending; greedy from the first, so of two that multiply each other the first.
    """
    n = points.shape[1]
    if n > MOST_TESTED:
        return []
    base, second, third = points.view(-1, 3, n).unbind(1)  # (p, n)
    at_base = residuals(base)
    changed = [residuals(_exchanged(base, second, [j])) - at_base for j in range(n)]
    found: list[int] = []
    for j in range(n):
        further = residuals(_exchanged(base, third, [j])) - at_base
        ratio = (third[:, j] - base[:, j]) / (second[:, j] - base[:, j])
        expected = ratio[:, None] * changed[j]
        rounding = (1 + ratio.abs()) * torch.linalg.vector_norm(at_base, dim=1)
        alone = _same(further, expected, rounding, further.abs() + expected.abs())
        if alone and all(_additive(residuals, (base, second), (i, j), changed, at_base) for i in found):
            found.append(j)
    return found


def _additive(
    residuals: Residuals,
    ends: tuple[torch.Tensor, torch.Tensor],
    pair: tuple[int, int],
    changed: list[torch.Tensor],
    at_base: torch.Tensor,
) -> bool:
    both = residuals(_exchanged(*ends, list(pair))) - at_base
    expected = changed[pair[0]] + changed[pair[1]]
    size = both.abs() + changed[pair[0]].abs() + changed[pair[1]].abs()
    return _same(both, expected, torch.linalg.vector_norm(at_base, dim=1), size)


def _same(found: torch.Tensor, expected: torch.Tensor, values: torch.Tensor, size: torch.Tensor) -> bool:
    """Return whether every triple whose numbers are finite has the same vectors, and one of them at least changes."""
    finite = torch.isfinite(found + expected).all(1)
    off = torch.linalg.vector_norm(found - expected, dim=1)[finite]
    change = torch.linalg.vector_norm(size, dim=1)[finite]
    rounding = ROUNDING * values[finite]
    return bool((off <= AFFINE_RTOL * change + rounding).all()) and bool((change > 1e3 * rounding).any())


def _exchanged(points: torch.Tensor, others: torch.Tensor, columns: list[int]) -> torch.Tensor:
    mixed = points.clone()
    mixed[:, columns] = others[:, columns]
    return mixed


def projected(
    residuals: Residuals, points: torch.Tensor, linear: list[int], bounds: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points with their linear parameters solved for, and half the sum of squares there.

    Parameters
    ----------
    residuals : callable (B, n_params) -> (B, c)
    points : Tensor, shape (B, n_params), float64
    linear : list of int
    bounds : (lower, upper), each (n_params,), with ±inf for none
        A solution outside is moved to the nearest bound.

    Returns
    -------
    points : Tensor, shape (B, n_params)
    costs : Tensor, shape (B,)
        inf where the residuals, or the linear parameters, are not finite.
    """
    if not linear:
        return points, _half_squares(residuals(points))
    lower, upper = (bound[linear] for bound in bounds)
    first = torch.zeros_like(lower).clamp(lower, upper)
    second = _another(first, lower, upper)
    points = points.clone()
    points[:, linear] = first
    r = residuals(points)  # (B, c)
    columns = []
    for k, j in enumerate(linear):
        moved = points.clone()
        moved[:, j] = second[k]
        columns.append((residuals(moved) - r) / (second[k] - first[k]))
    C = torch.stack(columns, dim=2)  # (B, c, l)
    usable = torch.isfinite(r).all(1) & torch.isfinite(C).all(2).all(1)
    C, r = torch.where(usable[:, None, None], C, 0.0), torch.where(usable[:, None], r, 0.0)
    shift = _least_squares(C, -r)
    solved = (first + shift).clamp(lower, upper)
    costs = _half_squares(r + torch.einsum("bcl,bl->bc", C, solved - first))
    points[:, linear] = solved
    fine = usable & torch.isfinite(points).all(1)
    return points, torch.where(fine, costs, torch.inf)


def _another(first: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """Return values beside `first` within the bounds: one more, or half of the wider side of a box."""
    room_above, room_below = upper - first, first - lower
    above = first + torch.minimum(torch.ones_like(first), room_above / 2)
    below = first - torch.minimum(torch.ones_like(first), room_below / 2)
    return torch.where(room_above >= room_below, above, below)


def _least_squares(C: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return argmin ‖C x − b‖ for each of a batch, by the eigenvectors of CᵀC with columns of unit norm."""
    norms = torch.linalg.vector_norm(C, dim=1)  # (B, l)
    weights = torch.where((norms > 0) & torch.isfinite(norms), 1 / norms, 0.0)
    unit = C * weights[:, None, :]
    gram = torch.nan_to_num(unit.transpose(1, 2) @ unit)
    values, vectors = torch.linalg.eigh(gram)
    kept = values > CUTOFF * values[:, -1:]
    projection = torch.einsum("bcl,bc->bl", unit, b)
    coefficients = torch.einsum("blk,bl->bk", vectors, torch.nan_to_num(projection))
    inverse = torch.where(kept & (values > 0), 1 / values, 0.0)
    return weights * torch.einsum("blk,bk->bl", vectors, coefficients * inverse)


def _half_squares(r: torch.Tensor) -> torch.Tensor:
    costs = 0.5 * r.square().sum(1)
    return torch.where(torch.isfinite(costs), costs, torch.inf)
