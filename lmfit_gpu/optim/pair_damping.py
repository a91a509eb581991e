"""Damping of curvature pairs: what makes a noisy gradient difference safe for an L-BFGS update.

A pair is a step s and the change y of the gradient along it. The L-BFGS inverse Hessian is positive definite if and
only if every pair has ⟨s, y⟩ > 0, and its condition is bounded if the curvature μ = ⟨s, y⟩/⟨s, s⟩ and the length of y
are. Noise and negative curvature break that; damping mends it by mixing in a multiple of s::

    ŷ = τ y + shift · s

Three rules, each a function of the numbers ⟨s,s⟩, ⟨s,y⟩, ⟨y,y⟩ alone, so that they cost nothing beyond these.

`window` (the paper of mL-BFGS): the curvature of ŷ stays in [σ_L κ, σ_H κ], σ_L < 1 < σ_H. With μ' = μ/κ,

    τ = min((1 − σ_L)/(1 − μ'), τ₀)   if μ' ≤ σ_L
        min((σ_H − 1)/(μ' − 1), τ₀)   if μ' ≥ σ_H
        τ₀                            otherwise,        shift = (1 − τ) κ,

    ⟨s,ŷ⟩/⟨s,s⟩ = κ (1 − τ (1 − μ')), which lies in the window by the choice of τ.

In the paper κ = 1: curvatures are taken to be near 1. κ as a running scale of the curvatures is ours.

`powell` (SdLBFGS): with B₀ = clip(⟨y,y⟩/⟨s,y⟩, lowest, highest), and lowest where ⟨s,y⟩ ≤ 0,

    τ = 0.75 B₀⟨s,s⟩/(B₀⟨s,s⟩ − ⟨s,y⟩)  if ⟨s,y⟩ < 0.25 B₀⟨s,s⟩, else 1,        shift = (1 − τ) B₀,

and 1/B₀ is the initial inverse Hessian. The upper bound is ours.

None: plain stochastic L-BFGS. A pair is used as it is, and left out where ⟨s,y⟩ is not positive.

The curvature along s does not bound H: noise makes y longer than ⟨s,y⟩/‖s‖, and H grows with the square of their
ratio. So τ is halved, `weakened`, until the eigenvalues of H are within bounds as well; that is ours. As τ → 0 the pair
says no more than that the curvature along s is κ.

References
----------
Niu, Fabian, Lee, Soltanolkotabi, Avestimehr (2023), "mL-BFGS: A Momentum-based L-BFGS for Distributed Large-Scale
Neural Network Optimization", TMLR, arXiv 2307.13744.
Wang, Ma, Goldfarb, Liu (2017), "Stochastic quasi-Newton methods for nonconvex stochastic optimization",
SIAM J. Optim. 27(2), DOI 10.1137/15M1053141.
Powell (1978), "Algorithms for nonlinear constraints that use Lagrangian functions", DOI 10.1007/BF01588967.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["RULES", "DampedPair", "PairProducts", "damped_pair", "weakened"]

RULES = ("window", "powell", None)
POWELL = 0.25  # least share of B₀ that the damped curvature keeps (Powell, 1978, has 0.2; SdLBFGS 0.25)
LEAST_COSINE = 1e-10  # below it the sign of ⟨s, y⟩ is rounding


@dataclass(frozen=True)
class PairProducts:
    """⟨s,s⟩, ⟨s,y⟩ and ⟨y,y⟩ of a step and the change of the gradient along it."""

    ss: float
    sy: float
    yy: float

    @property
    def curvature(self) -> float:
        """Return μ = ⟨s,y⟩/⟨s,s⟩."""
        return self.sy / self.ss


@dataclass(frozen=True)
class DampedPair:
    """ŷ = tau · y + shift · s, and the initial inverse Hessian gamma · I that goes with it.

    `prior` is the curvature that damping pulls to, shift = (1 − tau) prior; None where there is no damping.
    """

    tau: float
    shift: float
    gamma: float
    prior: float | None

    def curvature(self, products: PairProducts) -> float:
        """Return ⟨s,ŷ⟩/⟨s,s⟩."""
        return self.tau * products.curvature + self.shift


def damped_pair(products: PairProducts, options: Mapping[str, Any], scale: float) -> DampedPair | None:
    """Return the damped pair, or None where the pair is to be left out.

    Parameters
    ----------
    products : PairProducts
        Finite, with ⟨s,s⟩ > 0.
    options : mapping
        `damping`, and for it `curvature_window` and `tau`.
    scale : float
        κ, the curvature that the window is relative to.
    """
    rule = options["damping"]
    if rule == "window":
        tau = _window(products.curvature / scale, options["curvature_window"], options["tau"])
        return _with_gamma(products, tau, scale)
    if rule == "powell":
        return _powell(products, options["curvature_window"])
    if products.sy <= LEAST_COSINE * (products.ss * products.yy) ** 0.5:
        return None
    return _with_gamma(products, 1.0, None)


def weakened(pair: DampedPair, products: PairProducts) -> DampedPair | None:
    """Return the pair with half its tau; None where there is nothing that damping pulls to."""
    if pair.prior is None:
        return None
    return _with_gamma(products, pair.tau / 2, pair.prior)


def _window(curvature: float, window: tuple[float, float], tau: float) -> float:
    low, high = window
    if curvature <= low:
        tau = min((1 - low) / (1 - curvature), tau)
    elif curvature >= high:
        tau = min((high - 1) / (curvature - 1), tau)
    return tau


def _with_gamma(products: PairProducts, tau: float, prior: float | None) -> DampedPair:
    """Return the pair with H₀ = ⟨s,ŷ⟩/⟨ŷ,ŷ⟩."""
    shift = 0.0 if prior is None else (1 - tau) * prior
    along = tau * products.sy + shift * products.ss
    square = tau**2 * products.yy + 2 * tau * shift * products.sy + shift**2 * products.ss
    return DampedPair(tau, shift, along / square, prior)


def _powell(products: PairProducts, bounds: tuple[float, float]) -> DampedPair:
    lowest, highest = bounds
    initial = lowest if products.sy <= 0 else min(max(products.yy / products.sy, lowest), highest)
    along = initial * products.ss
    tau = 1.0
    if products.sy < POWELL * along:
        tau = (1 - POWELL) * along / (along - products.sy)
    return DampedPair(tau, (1 - tau) * initial, 1 / initial, initial)
