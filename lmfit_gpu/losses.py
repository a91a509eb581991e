r"""Robust losses: large residuals count for less.

With f = r/σ the residual in standard deviations, c = ``f_scale`` and z = (f/c)², the cost and its surrogate are

.. math:: \text{cost} = \tfrac12 c^2 \sum_i w_i\,\rho(z_i), \qquad
          \tilde J = \mathrm{diag}(s)\,\partial f/\partial\theta, \quad \tilde r = w \rho' f / s, \qquad
          s_i^2 = w_i \max(\rho' + 2 z \rho'',\ \kappa\rho'),

so that J̃ᵀr̃ is the gradient exactly, and J̃ᵀJ̃ the curvature along the residuals (Triggs, McLauchlan, Hartley and
Fitzgibbon, Bundle Adjustment - A Modern Synthesis (2000), section 4.3, doi:10.1007/3-540-44480-7_21). Where ρ'+2zρ''
falls below κρ' the residual lies on the concave part of its loss: the exact curvature is zero or negative there, r̃
would grow without bound, and a share κ of the curvature of reweighted least squares stands in for it.

============  =========================  ==================
loss          ρ(z)                       source
============  =========================  ==================
linear        z
soft_l1       2((1 + z)^½ − 1)           Charbonnier
huber         z for z ≤ 1, 2z^½ − 1      Huber (1964)
cauchy        ln(1 + z)                  Lorentz
arctan        arctan z
============  =========================  ==================

(the names and scalings of :func:`scipy.optimize.least_squares`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["LOSSES", "Loss", "resolve_loss"]

CONCAVE = 0.1  # κ: r̃ is at most κ^-½ = 3.2 times its reweighted value, so no digit of J̃ᵀr̃ is lost

LARGEST = 1e150  # |f|/c beyond which z would overflow: the loss is constant there, and finite

Terms = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # ρ, ρ', ρ'' at z, each of its shape


def _soft_l1(z: torch.Tensor) -> Terms:
    t = 1 + z
    root = t**0.5
    return 2 * z / (1 + root), 1 / root, -0.5 / (t * root)


def _huber(z: torch.Tensor) -> Terms:
    outside = z > 1
    root = torch.where(outside, z, torch.ones_like(z)) ** 0.5
    return (
        torch.where(outside, 2 * root - 1, z),
        1 / root,
        torch.where(outside, -0.5 / root**3, torch.zeros_like(z)),
    )


def _cauchy(z: torch.Tensor) -> Terms:
    t = 1 + z
    return torch.log1p(z), 1 / t, -1 / t**2


def _arctan(z: torch.Tensor) -> Terms:
    t = 1 + z**2
    return torch.arctan(z), 1 / t, -2 * z / t**2


LOSSES: dict[str, Callable[[torch.Tensor], Terms] | None] = {
    "linear": None,
    "soft_l1": _soft_l1,
    "huber": _huber,
    "cauchy": _cauchy,
    "arctan": _arctan,
}


@dataclass(frozen=True)
class Loss:
    """A loss ρ and the scale c of the residuals at which it bends.

    Parameters
    ----------
    rho : callable (z) -> (ρ, ρ', ρ'')
        On float64 tensors of any shape.
    f_scale : float
        c, in the units of f.
    name : str
    """

    rho: Callable[[torch.Tensor], Terms]
    f_scale: float
    name: str

    def value(self, f: torch.Tensor) -> torch.Tensor:
        """Return c²ρ((f/c)²), of the shape of f: twice the cost of each residual."""
        return self.f_scale**2 * self.rho(self._z(f))[0]

    def influence(self, f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ψ = ρ'f and ψ' = ρ' + 2zρ'', the first two derivatives of half the value, each of the shape of f."""
        z = self._z(f)
        _, first, second = self.rho(z)
        return first * f, first + 2 * z * second

    def _z(self, f: torch.Tensor) -> torch.Tensor:
        return (f / self.f_scale).clamp(-LARGEST, LARGEST) ** 2

    def surrogate(self, f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (r̃, s) for weights 1, each of the shape of f: s r̃ = ρ' f."""
        z = self._z(f)
        _, first, second = self.rho(z)
        s = torch.maximum(first + 2 * z * second, CONCAVE * first).clamp_min(0) ** 0.5
        r = torch.where(s > 0, first * f / torch.where(s > 0, s, torch.ones_like(s)), torch.zeros_like(f))
        return r, s


def resolve_loss(loss: str | Callable[[np.ndarray], Any], f_scale: float) -> Loss | None:
    """Return a loss from its name or function; None for "linear".

    Parameters
    ----------
    loss : {"linear", "soft_l1", "huber", "cauchy", "arctan"} or callable
        ``loss(z)`` of an array (m,) returns an array (3, m): ρ, ρ' and ρ''.
    f_scale : float
        Residual, in units of sigma where it is given, at which the loss begins to bend.

    Raises
    ------
    ValueError, TypeError
        For another name, a scale that is not positive, or a function that does not return (3, m) finite real numbers
        that are ρ and its derivatives, or whose slope is negative.
    """
    number = isinstance(f_scale, (int, float, np.integer, np.floating)) and not isinstance(f_scale, bool)
    if not number or not 0 < f_scale < np.inf:
        raise ValueError(f"f_scale: got {f_scale!r}; a positive number is expected")
    if callable(loss):
        rho = _of_arrays(loss)
        _check_slopes(rho)
        return Loss(rho, float(f_scale), getattr(loss, "__name__", "callable"))
    if not isinstance(loss, str) or loss not in LOSSES:
        raise ValueError(f"loss: got {loss!r}; allowed are {', '.join(map(repr, LOSSES))} or a callable rho(z)")
    known = LOSSES[loss]
    return None if known is None else Loss(known, float(f_scale), loss)


def _of_arrays(loss: Callable[[np.ndarray], Any]) -> Callable[[torch.Tensor], Terms]:
    def rho(z: torch.Tensor) -> Terms:
        flat = z.detach().cpu().double().reshape(-1).numpy()
        with np.errstate(all="ignore"):
            found = loss(flat.copy())
        try:
            terms = np.array(found)
            if np.iscomplexobj(terms):
                raise TypeError("complex numbers")
            terms = terms.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"loss: its function returned no array of numbers: {error}") from error
        if terms.shape != (3, flat.size):
            raise ValueError(f"loss: its function returned shape {terms.shape}; (3, {flat.size}) is expected")
        first, second, third = (torch.from_numpy(term).reshape(z.shape).to(z) for term in terms)
        return first, second, third

    return rho


def _check_slopes(rho: Callable[[torch.Tensor], Terms]) -> None:
    """Hold ρ' and ρ'' against differences, and see that ρ does not fall."""
    z = torch.tensor([1e-3, 0.03, 0.3, 0.7, 3.0, 30.0, 900.0], dtype=torch.float64)
    value, first, second = rho(z)
    everywhere = torch.cat((*rho(torch.zeros(1, dtype=torch.float64))[:2], value, first, second))
    if not bool(torch.isfinite(everywhere).all()) or bool((first < 0).any()):
        raise ValueError("loss: its function must give finite values and a slope >= 0 for z >= 0")
    h = 1e-5 * z
    (above, slope_above, _), (below, slope_below, _) = rho(z + h), rho(z - h)
    for what, given, found, size in (
        ("first", first, (above - below) / (2 * h), value.abs() / z),
        ("second", second, (slope_above - slope_below) / (2 * h), first / z),
    ):
        if bool(((given - found).abs() > 1e-3 * size.clamp_min(1e-12)).sum() > 1):  # one kink may lie near
            raise ValueError(f"loss: the {what} derivative its function returns is not that of its values")
