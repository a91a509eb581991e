r"""Linearisation in the space of residuals without J: one m × m Gram matrix for each parameter tensor.

For more parameters than residuals, as :mod:`lmfit_gpu.linear.dual`, but J is known only by its blocks J_t of columns,
one for each tensor θ_t, through K_t = J_t J_tᵀ, J_t v and J_tᵀ u (for a layer of a network from its inputs and output
gradients, :mod:`lmfit_gpu.layers`). Each tensor has one number d_t in D and a penalty ½ α_t ‖θ_t‖². The step minimises

.. math:: \tfrac12 \|r + J p\|^2 + \tfrac12 \sum_t \alpha_t \|\theta_t + p_t\|^2
          + \tfrac12 \lambda \sum_t d_t^2 \|p_t\|^2 .

Let q_t = d_t p_t, κ_t = α_t/d_t², s_t = κ_t + λ. Where the derivative by q_t is zero, with v = r + J p,

.. math:: q_t = -\frac{\kappa_t d_t \theta_t + J_t^T v / d_t}{s_t}, \qquad
          \Bigl(I + \sum_t \frac{K_t}{d_t^2 s_t}\Bigr) v = b = r - \sum_t \frac{\kappa_t}{s_t} J_t \theta_t .

Tensors with the same κ (all without a penalty, say) share s: they are one *group* g, with K_g = Σ K_t/d_t²,
y_g = Σ J_t θ_t, τ_g² = Σ d_t² ‖θ_t‖². The system is multiplied by μ = κ_0 + λ, κ_0 the least of the κ_g, so that small
numbers are not differences of large ones; with u = v/μ and w_g = μ/s_g ≤ 1 it is

.. math:: N u = b, \qquad N = \mu I + \sum_g w_g K_g ,

K + λI and u of :mod:`~lmfit_gpu.linear.dual` without a penalty. The secular equation is solved with m-vectors alone:

.. math:: \|q\|^2 = \sum_g \frac{\kappa_g^2 \tau_g^2}{s_g^2} + 2 \frac{\kappa_g}{s_g} w_g\, y_g^T u + w_g^2\, u^T K_g u,

and with ' for the derivative by λ, w_g' = (κ_g − κ_0)/s_g²,

.. math:: N u' &= \sum_g \frac{\kappa_g}{s_g^2} y_g - u - \sum_g w_g' K_g u, \\
          q^T q' &= \sum_g -\frac{\kappa_g^2 \tau_g^2}{s_g^3}
            + \frac{\kappa_g}{s_g}\, y_g^T \Bigl(w_g' u + w_g u' - \frac{w_g}{s_g} u\Bigr)
            + w_g\, (K_g u)^T (w_g' u + w_g u') .

Only a step takes J_tᵀ v. Its predicted reduction, of a cost with the penalty, is ½(−gᵀp + λ‖q‖²), a sum of two
positive terms; g_t = J_tᵀ r + α_t θ_t is not needed for it,

.. math:: -g^T p = \sum_g \frac{1}{s_g} \bigl(\kappa_g^2 \tau_g^2 + \kappa_g\, y_g^T (r + v) + r^T K_g v\bigr) .

Near the minimum of a penalised cost this is a difference, known to the rounding of the cost itself.

K_t is summed in the dtype of the model, and everything after in float64. A λ that leaves N within the rounding of the
K_g, of size η‖K_g‖, is not resolved. In ‖q‖² as much is added to K_g, with its part in the derivative: where rows are
dependent u is large in directions that J takes to zero, and rounding of K_g would pass for a part of the step.

Cost: K_t once; m³/3 + m² flops per λ and group; J_tᵀ v per step. No vector of n numbers is made but p, and what is
asked for. Memory 8 m² bytes per group and those of the K_t.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from lmfit_gpu.backends import Backend
from lmfit_gpu.layer_rows import TensorRows
from lmfit_gpu.linear.base import EPSILON, Step, no_step, secular_step, shortened
from lmfit_gpu.linear.by_tensor import Point, RowsJacobian, inverse, one_per_tensor

__all__ = ["GhostLinearization"]

CLEAN = 0.01  # of the predicted reduction of the undamped step: what rounding of K may make of it
LOW_PRECISION = 2  # η/ε in float32: K̃ − K is 0.1 to 0.4 ε‖K‖ in ‖·‖₂, up to 2.1 in ‖·‖_F (layers, 100 to 1,000 rows)
NEWTON_ITERATIONS = 50  # for the least λ: convex, from the left, a few are usual


@dataclass(frozen=True)
class Groups:
    """Tensors with the same κ, the reference first; index g.

    Parameters
    ----------
    kappas : tuple of float
    grams : Tensor, shape (G, m, m)
        K_g.
    along : Tensor, shape (G, m)
        y_g.
    squares, sizes : tuple of float
        τ_g², and a bound on ‖K_g‖.
    """

    kappas: tuple[float, ...]
    grams: torch.Tensor
    along: torch.Tensor
    squares: tuple[float, ...]
    sizes: tuple[float, ...]


@dataclass(frozen=True)
class Solved:
    """The m-vectors for one λ: a factor of N, s_g, w_g, w_g', u and K_g u (G, m)."""

    factor: Any
    s: list[float]
    w: list[float]
    slopes: list[float]
    u: torch.Tensor
    ku: torch.Tensor


class GhostLinearization:
    """One Gram matrix for each tensor, r, and the penalty.

    Parameters
    ----------
    tensors : sequence of TensorRows
    residuals : Tensor, shape (m,)
        In the dtype of the model, on the first device.
    backend : Backend
        Factors N.
    scale : Tensor, shape (n,), constant within each tensor, or shape (T,)
        D.
    alphas : sequence of T floats, optional
        α_t >= 0; default 0.
    theta : Tensor, shape (n,), optional
        Needed where an α_t is positive.

    Raises
    ------
    ValueError
        For a scale that is not one number per tensor, or penalties that do not fit the tensors.
    """

    direct = True
    has_gradient = False
    accelerates = False

    def __init__(
        self,
        tensors: Sequence[TensorRows],
        residuals: torch.Tensor,
        backend: Backend,
        scale: torch.Tensor,
        *,
        alphas: Sequence[float] | None = None,
        theta: torch.Tensor | None = None,
    ) -> None:
        weights = (0.0,) * len(tensors) if alphas is None else tuple(map(float, alphas))
        self._set(Point(tuple(tensors), residuals, weights, theta), backend, scale, 0.0)

    def _set(self, point: Point, backend: Backend, scale: torch.Tensor, error: float) -> None:
        self._point, self._backend, self._error = point, backend, error
        self._d = one_per_tensor(scale, point.sizes)
        self._traces, self._gram_norms, self._theta_squares, self.residual_norm = point.numbers
        self._m = len(point.residuals)
        self._rounding = max(self._m * EPSILON, LOW_PRECISION * _low_epsilon(point.residuals.dtype))  # of K, relative
        self.condition_limit = (10 * self._rounding) ** -0.5
        self._last: dict[float, Solved | None] = {}

    @classmethod
    def reduce(cls, jacobian: RowsJacobian, backend: Backend) -> "GhostLinearization":
        """Make one pass over the data; D is 1 until :meth:`with_scale`."""
        rows = jacobian.tensor_rows()
        ones = torch.ones(len(rows.tensors), dtype=torch.float64)
        return cls(rows.tensors, rows.residuals, backend, ones, alphas=rows.alphas, theta=jacobian.theta)

    @classmethod
    def room(cls, n_residuals: int, n_params: int) -> int:
        """Return 40 m² bytes: N, its copy in the factor's layout, the factor, and N and factor of the point before."""
        return 40 * n_residuals**2

    def with_scale(self, scale: torch.Tensor, error: float = 0.0) -> "GhostLinearization":
        """Return the same reduction with another D: one number per tensor, as (n,) or as (T,)."""
        other = object.__new__(GhostLinearization)
        other._set(self._point, self._backend, scale, error)
        return other

    def restricted(self, free: torch.Tensor, shift: torch.Tensor) -> "GhostLinearization":
        """Refuse: there are no single columns here, so no bounds.

        Raises
        ------
        ValueError
        """
        raise ValueError("bounds: got some with solver='ghost', which has none; allowed with 'qr', 'cholesky', 'dual'")

    @cached_property
    def scale(self) -> torch.Tensor:
        """D, shape (n,)."""
        return self._point.expanded(self._d)

    @property
    def gradient(self) -> torch.Tensor:
        """J_tᵀ r + α_t θ_t, shape (n,)."""
        return self._point.gradient

    @property
    def tensor_norms(self) -> torch.Tensor:
        """‖J_t‖_F/√n_t, shape (T,): the root mean square of the column norms of each tensor."""
        norms = [(trace / size) ** 0.5 for trace, size in zip(self._traces, self._point.sizes, strict=True)]
        return torch.tensor(norms, dtype=torch.float64, device=self._point.r.device)

    @cached_property
    def column_norms(self) -> torch.Tensor:
        """:attr:`tensor_norms` for each column, shape (n,): so that D is one number per tensor."""
        return self._point.expanded(self.tensor_norms.tolist())

    @property
    def finite(self) -> bool:
        """Whether J and r are, and their squares."""
        point = (*self._traces, *self._gram_norms, *self._theta_squares, self.residual_norm)
        return math.isfinite(math.fsum(map(abs, point))) if all(map(math.isfinite, point)) else False

    def product(self, p: torch.Tensor) -> torch.Tensor:
        """Return (JᵀJ + A) p, shape (n,), A the diagonal matrix of the α."""
        point, parts = self._point, p.split(self._point.sizes)
        ahead = self._along(parts)
        return torch.cat(
            [
                rows.transposed(ahead.to(point.residuals)).double() + alpha * part
                for rows, alpha, part in zip(point.tensors, point.alphas, parts, strict=True)
            ]
        )

    def _along(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return Σ J_t v_t, shape (m,), float64."""
        products = zip(self._point.tensors, parts, strict=True)
        return torch.stack([rows.along(part.to(self._point.residuals)).double() for rows, part in products]).sum(0)

    @cached_property
    def _force(self) -> float:
        """A bound on ‖D⁻¹g‖, larger by rounding: Σ κ_g² τ_g² + 2 κ_g y_gᵀ r + rᵀ K_g r; 0 where g is."""
        groups, r = self._groups, self._point.r
        drawn = torch.cat((groups.along @ r, (groups.grams @ r) @ r)).tolist()
        square = 0.0
        for g, kappa in enumerate(groups.kappas):
            fixed, noise = kappa**2 * groups.squares[g], groups.sizes[g] * self.residual_norm**2
            square += fixed + 2 * kappa * drawn[g] + drawn[len(groups.kappas) + g] + self._rounding * (fixed + noise)
        return math.sqrt(max(square, 0.0))

    @cached_property
    def _groups(self) -> Groups:
        point = self._point
        members: dict[float, list[int]] = {}
        for t, (alpha, d) in enumerate(zip(point.alphas, self._d, strict=True)):
            members.setdefault(alpha / d**2, []).append(t)
        sizes = {k: sum(self._gram_norms[t] / self._d[t] ** 2 for t in ts) for k, ts in members.items()}
        # The reference: the least κ of those that have a Gram matrix at all; where none has, N must not be zero.
        first = min((k for k in members if sizes[k] > 0), default=max(members))
        kappas = (first, *(k for k in members if k != first))
        grams, along = point.r.new_empty(len(kappas), self._m, self._m), point.r.new_zeros(len(kappas), self._m)
        for g, kappa in enumerate(kappas):
            torch.mul(point.grams[members[kappa][0]], self._d[members[kappa][0]] ** -2, out=grams[g])
            for t in members[kappa][1:]:
                grams[g].add_(point.grams[t], alpha=self._d[t] ** -2)
            for t in members[kappa]:
                if (moved := point.along_theta[t]) is not None:
                    along[g].add_(moved)
        squares = (sum(self._d[t] ** 2 * self._theta_squares[t] for t in members[kappa]) for kappa in kappas)
        return Groups(kappas, grams, along, tuple(squares), tuple(sizes[kappa] for kappa in kappas))

    @cached_property
    def least_damping(self) -> float:
        """The λ for which the rounding of the K_g is as large as N may get small: Σ ε‖K_g‖/(κ_g + λ) = 1; 0 if less."""
        groups = self._groups
        noise = [self._rounding * size for size in groups.sizes]
        damping = max(0.0, *(e - kappa for e, kappa in zip(noise, groups.kappas, strict=True)))
        if damping == 0 and min(groups.kappas) == 0:
            return 0.0  # no K without a penalty
        for _ in range(NEWTON_ITERATIONS):
            shares = [(e / (kappa + damping), kappa + damping) for e, kappa in zip(noise, groups.kappas, strict=True)]
            excess = sum(share for share, _ in shares) - 1
            if excess <= EPSILON:
                break
            damping += excess / sum(share / s for share, s in shares)
        return damping

    def _solved(self, damping: float) -> Solved | None:
        if damping not in self._last:
            self._last = {}  # only the last: m² memory each
            self._last = {damping: self._solve(damping)}
        return self._last[damping]

    def _solve(self, damping: float) -> Solved | None:
        groups = self._groups
        mu = groups.kappas[0] + damping
        s = [kappa + damping for kappa in groups.kappas]
        w = [mu * inverse(each) for each in s]
        factor = self._backend.cholesky(self._weighted(w), mu)
        if factor is None:
            return None
        slopes = [(kappa - groups.kappas[0]) * inverse(each) ** 2 for kappa, each in zip(groups.kappas, s, strict=True)]
        b = self._point.r
        if any(groups.kappas):
            b = b - _mixed([k * inverse(each) for k, each in zip(groups.kappas, s, strict=True)], groups.along)
        u = self._back(factor, b)
        return Solved(factor, s, w, slopes, u, groups.grams @ u)

    def _weighted(self, w: Sequence[float]) -> Any:
        """Return Σ w_g K_g of the backend; K itself where there is one group."""
        return self._only if len(w) == 1 else self._backend.asarray(_mixed(w, self._groups.grams))

    @cached_property
    def _only(self) -> Any:
        return self._backend.asarray(self._groups.grams[0])

    def _back(self, factor: Any, b: torch.Tensor) -> torch.Tensor:
        """Return N⁻¹ b, shape (m,): the only vectors that go to the backend and back."""
        return self._backend.to_tensor(self._backend.cholesky_solve(factor, self._backend.asarray(b)), b.device)

    def solve(self, damping: float) -> Step:
        """Return the step for λ = `damping`; a λ below :attr:`least_damping` gives an invalid step."""
        if not self.finite or damping < self.least_damping:
            return self._no_step(damping)
        if self._force == 0:  # no λ moves anything
            return Step(torch.zeros_like(self.gradient), 0.0, 0.0, damping)
        solved = self._solved(damping)
        return self._no_step(damping) if solved is None else self._step(solved.u, solved.ku, damping)

    def _no_step(self, damping: float) -> Step:
        return no_step(self._point.r.new_empty(sum(self._point.sizes)), damping)

    def _step(self, u: torch.Tensor, ku: torch.Tensor, damping: float) -> Step:
        point, groups = self._point, self._groups
        mu, count = groups.kappas[0] + damping, len(point.sizes)
        p = point.transposed(u * mu, [-(a + damping * d**2) for a, d in zip(point.alphas, self._d, strict=True)])
        norms = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in p.split(point.sizes)])
        drawn = torch.cat((norms, groups.along @ torch.add(point.r, u, alpha=mu), ku @ point.r)).tolist()
        norm = math.hypot(*(d * each for d, each in zip(self._d, drawn[:count], strict=True)))
        fall = 0.0  # −gᵀp
        for g, kappa in enumerate(groups.kappas):
            y, k = drawn[count + g], drawn[count + len(groups.kappas) + g]
            fall += (kappa**2 * groups.squares[g] + kappa * y + mu * k) * inverse(kappa + damping)
        fall = max(fall, damping * norm**2)  # it is pᵀ(JᵀJ + A + λD²)p, however it is rounded
        return Step(p, 0.5 * (fall + damping * norm**2), norm, damping, valid=math.isfinite(norm))

    def within(self, radius: float, guess: float) -> Step:
        """Return the step within a radius, by the secular equation; λ grows while the step made with J is longer."""
        if not self.finite:
            return self._no_step(guess)
        return shortened(self, secular_step(self, radius, guess, force=self._force), radius)

    def scaled_norm(self, damping: float) -> tuple[float, float]:
        """Return ‖D p(λ)‖ and its derivative by λ, from the K_g alone; infinite and 0 where the factorisation fails."""
        solved, groups = self._solved(damping), self._groups
        if solved is None:
            return math.inf, 0.0
        u, ku, w, slopes = solved.u, solved.ku, solved.w, solved.slopes
        forced = -u - _mixed(slopes, ku)
        inverses = [inverse(s) for s in solved.s]
        if any(groups.kappas):
            forced += _mixed([k * i**2 for k, i in zip(groups.kappas, inverses, strict=True)], groups.along)
        pair = torch.stack((u, self._back(solved.factor, forced)))
        products = pair @ torch.cat((groups.along, ku, u[None])).T  # with y_g, with K_g u, with u
        (*of_u, uu), (*of_slope, u_slope) = products.tolist()
        square = half = 0.0
        count = len(w)
        for g, (kappa, i) in enumerate(zip(groups.kappas, inverses, strict=True)):
            fixed, noise = (kappa * i) ** 2 * groups.squares[g], self._rounding * groups.sizes[g]
            uku, ku_slope = of_u[count + g] + noise * uu, of_slope[count + g] + noise * u_slope
            square += fixed + 2 * kappa * i * w[g] * of_u[g] + w[g] ** 2 * uku
            half += kappa * i * ((slopes[g] - w[g] * i) * of_u[g] + w[g] * of_slope[g]) - fixed * i
            half += w[g] * (slopes[g] * uku + w[g] * ku_slope)
        norm = math.sqrt(max(square, 0.0)) if not math.isnan(square) else math.inf
        return norm, half / norm if norm > 0 else 0.0

    def undamped(self) -> Step:
        """Return the Gauss-Newton step on the directions that J and the solver resolve.

        It is the one for the least λ, unless a residual that J cannot take away makes u so large that the rounding of
        K shows (dependent rows); then that of the eigenvectors of N that are not zero to rounding, at 9 m³ flops.
        """
        return self._undamped

    @cached_property
    def _undamped(self) -> Step:
        damping = max(self.least_damping, self._error**2 * self._groups.sizes[0] - self._groups.kappas[0])
        step = self.solve(damping)
        if not self.finite or (step.valid and self._force == 0):
            return step
        solved = self._solved(damping)
        if solved is not None and step.valid:
            noise = _low_epsilon(self._point.residuals.dtype) * self._size(damping) * float(solved.u.norm())
            if 0.5 * noise**2 <= CLEAN * step.predicted_reduction:
                return step
        u = self._projected(damping)
        return self._step(u, self._groups.grams @ u, damping)

    def _size(self, damping: float) -> float:
        """Return a bound on ‖Σ w_g K_g‖."""
        groups = self._groups
        mu = groups.kappas[0] + damping
        return sum(mu * inverse(k + damping) * size for k, size in zip(groups.kappas, groups.sizes, strict=True))

    def _decomposed(self, damping: float) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Return eigenvalues and eigenvectors of Σ w_g K_g, and μ."""
        mu = self._groups.kappas[0] + damping
        matrix = self._weighted([mu * inverse(kappa + damping) for kappa in self._groups.kappas])
        values, vectors = (self._backend.to_tensor(part, self._point.r.device) for part in self._backend.eigh(matrix))
        return values, vectors, mu

    def _projected(self, damping: float) -> torch.Tensor:
        """Return u on the eigenvectors of Σ w_g K_g that are not zero to rounding: J takes the others to zero."""
        values, vectors, mu = self._decomposed(damping)
        groups = self._groups
        b = self._point.r - _mixed([k * inverse(k + damping) for k in groups.kappas], groups.along)
        kept = values > max(self._error**2, self._rounding) * values[-1]
        return vectors @ torch.where(kept, vectors.T @ b / (values.clamp_min(0.0) + mu), 0.0)

    def solve_rhs(self, damping: float, b: torch.Tensor) -> torch.Tensor:
        """Return (JᵀJ + S)⁻¹ b, S = A + λD², as S⁻¹(b − Jᵀ(I + JS⁻¹Jᵀ)⁻¹JS⁻¹b), shape (n,); NaN where there is none."""
        point = self._point
        inverses = [inverse(a + damping * d**2) for a, d in zip(point.alphas, self._d, strict=True)]
        solved = self._solved(damping) if all(inverses) else None
        if solved is None:
            return torch.full_like(b, torch.nan)
        parts = [part * inverse for part, inverse in zip(b.split(point.sizes), inverses, strict=True)]
        back = (self._groups.kappas[0] + damping) * self._back(solved.factor, self._along(parts))
        back = back.to(point.residuals)
        return torch.cat(
            [
                part - inverse * rows.transposed(back).double()
                for rows, part, inverse in zip(point.tensors, parts, inverses, strict=True)
            ]
        )

    def condition(self) -> float:
        """Return the condition number of [J; √A] D⁻¹ on the directions where J is not zero to rounding."""
        if not self.finite:
            return math.inf
        values, _, mu = self._decomposed(self.least_damping)
        kept = values[values > self._rounding * values[-1]]
        extra = mu - self.least_damping
        return float(((values[-1] + extra) / (kept[0] + extra)) ** 0.5) if len(kept) else math.inf

    def estimable(self, held: np.ndarray | None = None, error: float = 0.0) -> None:
        """Return None: n is beyond dense matrices."""
        return


def _mixed(weights: Sequence[float], each: torch.Tensor) -> torch.Tensor:
    """Return Σ weight_g each_g of vectors (G, m) or matrices (G, m, m)."""
    mixed = torch.tensor(weights, dtype=torch.float64, device=each.device) @ each.view(len(each), -1)
    return mixed.view(each.shape[1:])


def _low_epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
