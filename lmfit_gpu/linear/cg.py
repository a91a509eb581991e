r"""Linearisation by conjugate gradients: for more parameters than a dense matrix has room for.

Only products JᵀJ v are needed (:mod:`lmfit_gpu.linear.products`). In q = D p the system is

.. math:: B = D^{-1} J^T J D^{-1}, \qquad (B + \lambda I)\, q = -D^{-1} g, \qquad p = D^{-1} q,

which is conjugate gradients in p preconditioned by D². In the trust region λ = 0 and the iteration is truncated at
‖q‖ = Δ (Steihaug, Toint) or when the residual has fallen enough for a step of Newton's kind: to min(0.1, c^½) of
itself, c the cosine between r and its part that J can take away (Dembo, Eisenstat and Steihaug, SIAM J. Numer. Anal.
19 (1982) 400, doi:10.1137/0719025). For a given λ it is run to rounding, with the diagonal as preconditioner where D
leaves the columns badly scaled.

With t = −D⁻¹g − (B + λI)q what is left, the predicted reduction is ½(−gᵀp + λ‖q‖² + qᵀt), exact however early the
iteration ends. Attainable error: that of cholesky, ε κ². Cost: one product with JᵀJ (2 passes over the data, or 2 m n
or 2 n² flops) an inner iteration, about κ(J D⁻¹) log(1/error) of them.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from lmfit_gpu.backends import Backend
from lmfit_gpu.jacobian import Jacobian
from lmfit_gpu.linear.base import Step, no_step
from lmfit_gpu.linear.conjugate_gradients import Limits, Solution, conjugate_gradients
from lmfit_gpu.linear.covariance import MANY_PARAMS, RANK_ROUNDING, Estimable, estimable_of_gram
from lmfit_gpu.linear.products import Reduction, reduce_for_products, stored_bytes

__all__ = ["CGLinearization"]

FORCING = 0.1  # most of the residual that may remain in a step within a region
# Ratio of diagonal entries above which the diagonal preconditions. Below, it would only spread the eigenvalues that
# are equal to λ (n − m of them in a wide J), each of which then costs an iteration.
BADLY_SCALED = 100.0
VISIBLE = 0.3  # of ε^-½: larger condition numbers drown in the rounding of products with JᵀJ
MOST_INNER = 10_000
MOST_INNER_WITHIN = 500


class CGLinearization:
    """Products with JᵀJ, and Jᵀr.

    Parameters
    ----------
    reduction : Reduction
    scale : Tensor, shape (n,)
        D.
    error : float
        Relative error of J; directions with less of it are damped in :meth:`undamped`.
    """

    direct = accelerates = False
    has_gradient = True
    least_damping = 0.0

    def __init__(self, reduction: Reduction, scale: torch.Tensor, error: float = 0.0) -> None:
        self._reduction, self._backend, self._error = reduction, reduction.backend, error
        self.scale = scale
        self.gradient = reduction.gradient
        self.column_norms = reduction.column_norms
        self.residual_norm = reduction.residual_norm
        total = self.gradient.abs().sum() + self.column_norms.sum()
        self.finite = bool(np.isfinite(float(total) + self.residual_norm))
        self.condition_limit = (scale.numel() * RANK_ROUNDING) ** -0.5

    @classmethod
    def reduce(cls, jacobian: Jacobian, backend: Backend) -> "CGLinearization":
        """Make one pass over the data; D is 1 until :meth:`with_scale`."""
        reduction = reduce_for_products(jacobian, backend)
        return cls(reduction, torch.ones_like(jacobian.theta, dtype=torch.float64))

    @classmethod
    def room(cls, n_residuals: int, n_params: int) -> int:
        """Return five times the bytes of the smaller of JᵀJ and J: this, that before, a copy, fragments; and vectors.

        With 3.25 the third fit in a process has waited for memory for ever (JᵀJ, two CPUs, cuPyNumeric 26.6).
        """
        return 5 * stored_bytes(n_residuals, n_params) + 200 * (n_residuals + n_params)

    def with_scale(self, scale: torch.Tensor, error: float = 0.0) -> "CGLinearization":
        """Return the same reduction with another D."""
        return CGLinearization(self._reduction, scale, error)

    def product(self, p: torch.Tensor) -> torch.Tensor:
        """Return JᵀJ p, shape (n,)."""
        return self._backend.to_tensor(self._reduction.product(self._backend.asarray(p)), self.scale.device)

    def restricted(self, free: torch.Tensor, shift: torch.Tensor) -> "CGLinearization":
        """Return (J, r) with only the free columns, and r + J shift; r is known by its norm alone."""
        whole, along = self._reduction, self.product(shift)
        mask = self._backend.asarray(free.to(self.scale))
        squares = self.residual_norm**2 + float(shift @ (2 * self.gradient + along))
        reduction = replace(
            whole,
            product=lambda v: mask * whole.product(mask * v),
            gradient=torch.where(free, self.gradient + along, torch.zeros_like(along)),
            column_norms=torch.where(free, self.column_norms, torch.zeros_like(along)),
            residual_norm=max(squares, 0.0) ** 0.5,
            gram=lambda: whole.gram() * free * free[:, None],
        )
        return CGLinearization(reduction, self.scale, self._error)

    @cached_property
    def _inverse(self) -> Any:
        """D⁻¹ as a backend array."""
        return self._backend.asarray(1 / self.scale)

    def _limits(self, rtol: float = 0.0, radius: float = np.inf) -> Limits:
        most = min(MOST_INNER, 100 + 20 * self.scale.numel())
        return Limits(radius, rtol, most, self._reduction.epsilon)

    def within(self, radius: float, guess: float) -> Step:
        """Return the truncated step; its `damping` is the λ for which a step of that length would be exact."""
        if not self.finite:
            return no_step(self.scale, 0.0)
        b = self._backend.asarray(-self.gradient / self.scale)
        size = float(torch.linalg.vector_norm(self.gradient / self.scale))
        cosine = size / self.residual_norm if self.residual_norm > 0 else 0.0
        limits = replace(self._limits(min(FORCING, cosine**0.5), radius), max_iter=MOST_INNER_WITHIN)
        inverse, product = self._inverse, self._reduction.product
        found = conjugate_gradients(lambda q: inverse * product(inverse * q), b, self._backend, limits)
        damping = max(found.remaining, 0.0) / found.norm**2 if found.at_radius else 0.0
        p = self._backend.to_tensor(inverse * found.x, self.scale.device)
        gain = 0.5 * (found.along + found.remaining)
        return Step(p, gain, found.norm, damping, valid=bool(np.isfinite(gain)), n_inner=found.n_inner)

    def _solved(self, damping: float, b: torch.Tensor) -> "Damped | None":
        """Return D (JᵀJ + λD²)⁻¹ b to rounding, None when anything is not finite."""
        if not self.finite or not bool(torch.isfinite(b).all()) or not np.isfinite(damping):
            return None
        diagonal = (self.column_norms / self.scale) ** 2 + damping  # of B + λI
        if not bool((diagonal >= 0).all()):
            return None
        diagonal = torch.where(diagonal > 0, diagonal, torch.ones_like(diagonal))
        badly_scaled = float(diagonal.max()) > BADLY_SCALED * float(diagonal.min())
        weights = diagonal**-0.5 if badly_scaled else torch.ones_like(diagonal)
        outer = self._backend.asarray(weights / self.scale)
        shift = self._backend.asarray(damping * weights**2)
        product = self._reduction.product
        found = conjugate_gradients(
            lambda v: outer * product(outer * v) + shift * v,
            self._backend.asarray(b / self.scale * weights),
            self._backend,
            self._limits(),
        )
        q = self._backend.to_tensor(found.x, self.scale.device) * weights
        return Damped(q, found)

    def solve(self, damping: float) -> Step:
        """Return the step for λ = `damping`, as exact as conjugate gradients can be."""
        return self._step(damping, self._solved(damping, -self.gradient))

    def _step(self, damping: float, damped: "Damped | None") -> Step:
        if damped is None:
            return no_step(self.scale, damping)
        norm, found = damped.norm, damped.found
        gain = 0.5 * (found.along + found.remaining + damping * norm**2)
        valid = bool(np.isfinite(gain)) and found.converged
        return Step(damped.q / self.scale, gain, norm, damping, valid, found.n_inner)

    def undamped(self) -> Step:
        """Return the Gauss-Newton step on the directions that J resolves; invalid where the iteration does not end."""
        return self._undamped[0]

    @cached_property
    def _undamped(self) -> tuple[Step, float]:
        """The undamped step, and the condition number that finding it showed."""
        size = float(((self.column_norms / self.scale) ** 2).sum()) if self._error > 0 else 0.0
        damping = self._error**2 * size
        damped = self._solved(damping, -self.gradient)
        return self._step(damping, damped), float("inf") if damped is None else damped.found.condition**0.5

    def scaled_norm(self, damping: float) -> tuple[float, float]:
        """Return ‖D p(λ)‖ and its derivative by λ, by two solves; infinite and 0 where they fail."""
        damped = self._solved(damping, -self.gradient)
        if damped is None:
            return float("inf"), 0.0
        norm = damped.norm
        again = self._solved(damping, damped.q * self.scale)
        if again is None or norm == 0:
            return norm, 0.0
        return norm, -float(damped.q @ again.q) / norm

    def solve_rhs(self, damping: float, b: torch.Tensor) -> torch.Tensor:
        """Return (JᵀJ + λD²)⁻¹ b, shape (n,); NaN where anything is not finite."""
        damped = self._solved(damping, b)
        return torch.full_like(self.scale, torch.nan) if damped is None else damped.q / self.scale

    def condition(self) -> float:
        """Return the condition number of J D⁻¹ (of J with unit columns where D is far from their norms).

        On the directions that r excites, by Lanczos: a lower bound. Infinite where it is near what the rounding of the
        products lets be seen, ε^-½, or where nothing was seen.
        """
        found = self._undamped[1]
        return found if found <= VISIBLE * self._reduction.epsilon**-0.5 else float("inf")

    def estimable(self, held: np.ndarray | None = None, error: float = 0.0) -> Estimable | None:
        """Return what the data determine of the parameters that are not `held`; None beyond 1,000 parameters."""
        if self.scale.numel() > MANY_PARAMS:
            return None
        return estimable_of_gram(self._reduction.gram().cpu().numpy(), max(self._error, error), held)


@dataclass(frozen=True)
class Damped:
    """q = D p on the model's device, and how the iteration ended."""

    q: torch.Tensor
    found: Solution

    @property
    def norm(self) -> float:
        """‖q‖."""
        return float(torch.linalg.vector_norm(self.q))
