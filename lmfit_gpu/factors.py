r"""The factors S between the Jacobian J of a model's values and that of the surrogate, J̃ = S J.

==================  =====================================  ==============================
S                   of                                     as a tensor
==================  =====================================  ==============================
identity            plain residuals                        None
diagonal            weights, robust losses                 (c,): one for each value
block diagonal      likelihoods of several outputs a row   (rows, k, q): a block for each row
==================  =====================================  ==============================

Values of a row stand together: value i q + j is output j of row i; surrogate residuals likewise, k to a row.
"""

import torch

__all__ = ["Factors", "back", "through"]

Factors = torch.Tensor | None


def through(factors: Factors, values: torch.Tensor) -> torch.Tensor:
    """Return S v of v (..., c)."""
    if factors is None:
        return values
    if factors.ndim == 1:
        return values * factors
    rows, k, q = factors.shape
    mixed = torch.einsum("rkq,...rq->...rk", factors, values.reshape(*values.shape[:-1], rows, q))
    return mixed.reshape(*values.shape[:-1], rows * k)


def back(factors: Factors, u: torch.Tensor) -> torch.Tensor:
    """Return Sᵀ u of u (e,), e the number of surrogate residuals."""
    if factors is None:
        return u
    if factors.ndim == 1:
        return u * factors
    rows, k, _ = factors.shape
    return torch.einsum("rkq,rk->rq", factors, u.reshape(rows, k)).reshape(-1)
