r"""Linearisation by normal equations: fastest, and half the digits.

Blocks are reduced to Gram matrices, summed in float64:

.. math:: [J\ r]^T [J\ r] = \begin{bmatrix} J^TJ & g \\ g^T & \|r\|^2 \end{bmatrix}, \qquad
          A = D^{-1} J^T J D^{-1}, \qquad (A + \lambda I)\, q = -D^{-1} g, \qquad p = D^{-1} q .

The predicted reduction is ½(−gᵀp + λ‖Dp‖²), a sum of positive terms. Squaring J loses what lies below
n ε ‖A‖: a smaller λ gives an invalid step. Error of a valid step: about ε(‖A‖ + λ)/(λ + σ_min²).
Cost: m n² flops for the Gram matrix, n³/3 per λ; memory 8 (n + 1)² bytes per leaf in flight.
"""

from functools import cached_property
from typing import Any

import numpy as np
import torch

from lmfit_gpu.backends import Backend
from lmfit_gpu.jacobian import Jacobian
from lmfit_gpu.linear.base import EPSILON, Step, no_step, reduce_with, secular_step
from lmfit_gpu.linear.covariance import RANK_ROUNDING, Estimable, estimable_of_gram

__all__ = ["CholeskyLinearization", "condition_from"]

UNDAMPED_TRIES = 5


class CholeskyLinearization:
    """JᵀJ and Jᵀr.

    Parameters
    ----------
    gram : Tensor, shape (n + 1, n + 1)
        [J r]ᵀ[J r], on the first device.
    backend : Backend
        Factors A + λI.
    scale : Tensor, shape (n,)
        D.
    error : float
        Relative error of J, for the rank.
    """

    direct = accelerates = True
    has_gradient = True

    def __init__(self, gram: torch.Tensor, backend: Backend, scale: torch.Tensor, error: float = 0.0) -> None:
        self._gram, self._backend, self._error = gram, backend, error
        n = scale.numel()
        self.scale = scale
        self.gradient = gram[:n, n]
        self.column_norms = gram.diagonal()[:n] ** 0.5
        self.residual_norm = float(gram[n, n]) ** 0.5
        self.finite = bool(np.isfinite(float(gram.abs().sum())))
        self.condition_limit = (n * RANK_ROUNDING) ** -0.5
        self._factors: dict[float, Any] = {}

    @classmethod
    def reduce(cls, jacobian: Jacobian, backend: Backend) -> "CholeskyLinearization":
        """Make one pass over the data; D is 1 until :meth:`with_scale`."""
        gram = reduce_with(jacobian, backend, "gram")
        return cls(gram, backend, torch.ones_like(jacobian.theta, dtype=torch.float64))

    @classmethod
    def room(cls, n_residuals: int, n_params: int) -> int:
        """Return 40 n² bytes: A, its copy in the factor's layout, the factor, and A and factor of the point before."""
        return 40 * n_params**2

    def with_scale(self, scale: torch.Tensor, error: float = 0.0) -> "CholeskyLinearization":
        """Return the same reduction with another D."""
        return CholeskyLinearization(self._gram, self._backend, scale, error)

    def product(self, p: torch.Tensor) -> torch.Tensor:
        """Return JᵀJ p, shape (n,)."""
        n = len(p)
        return self._gram[:n, :n] @ p

    def restricted(self, free: torch.Tensor, shift: torch.Tensor) -> "CholeskyLinearization":
        """Return (J, r) with only the free columns, and r + J shift."""
        n, along = len(free), self.product(shift)
        gram = self._gram.clone()
        gram[:n, n] += along
        gram[n, :n] += along
        gram[n, n] += float(shift @ (2 * self.gradient + along))
        gram[:n] *= free[:, None]
        gram[:, :n] *= free
        return CholeskyLinearization(gram, self._backend, self.scale, self._error)

    @cached_property
    def _scaled(self) -> torch.Tensor:
        n = self.scale.numel()
        return self._gram[:n, :n] / self.scale / self.scale[:, None]

    @cached_property
    def _a(self) -> Any:
        return self._backend.asarray(self._scaled)

    @cached_property
    def _b(self) -> torch.Tensor:
        return self.gradient / self.scale

    @cached_property
    def least_damping(self) -> float:
        """N ε ‖A‖: below it A + λI is A to rounding."""
        return self.scale.numel() * EPSILON * float(torch.linalg.matrix_norm(self._scaled))

    def _factor(self, damping: float) -> Any | None:
        if damping not in self._factors:
            self._factors = {}  # only the last: n² memory each
            self._factors = {damping: self._backend.cholesky(self._a, damping)}
        return self._factors[damping]

    def _solved(self, factor: Any, b: torch.Tensor) -> torch.Tensor:
        """Return (A + λI)⁻¹ b, shape (n,): the only vectors that go to the backend and back."""
        solved = self._backend.cholesky_solve(factor, self._backend.asarray(b))
        return self._backend.to_tensor(solved, self.scale.device)

    def solve(self, damping: float) -> Step:
        """Return the step for λ = `damping`; a λ below :attr:`least_damping` gives an invalid step."""
        factor = self._factor(damping) if self.finite and damping >= self.least_damping else None
        if factor is None:
            return no_step(self.scale, damping)
        q = -self._solved(factor, self._b)
        norm = float(torch.linalg.vector_norm(q))
        gain = 0.5 * (damping * norm**2 - float(self._b @ q))
        return Step(q / self.scale, gain, norm, damping, valid=bool(np.isfinite(norm)))

    def within(self, radius: float, guess: float) -> Step:
        """Return the step within a radius, by the secular equation."""
        return secular_step(self, radius, guess)

    def undamped(self) -> Step:
        """Return the step for the least λ that the solver resolves."""
        return self._undamped

    @cached_property
    def _undamped(self) -> Step:
        damping = self.least_damping
        step = self.solve(damping)
        for _ in range(UNDAMPED_TRIES):
            if step.valid or not self.finite:
                break
            damping *= 10
            step = self.solve(damping)
        return step

    def scaled_norm(self, damping: float) -> tuple[float, float]:
        """Return ‖D p(λ)‖ and its derivative by λ; infinite and 0 where the factorisation fails."""
        factor = self._factor(damping)
        if factor is None:
            return float("inf"), 0.0
        q = self._solved(factor, self._b)
        norm = float(torch.linalg.vector_norm(q))
        return norm, -float(q @ self._solved(factor, q)) / norm if norm > 0 else 0.0

    def solve_rhs(self, damping: float, b: torch.Tensor) -> torch.Tensor:
        """Return (JᵀJ + λD²)⁻¹ b, shape (n,); NaN where the factorisation fails."""
        factor = self._factor(damping)
        if factor is None:
            return torch.full_like(self.scale, torch.nan)
        return self._solved(factor, b / self.scale) / self.scale

    def condition(self) -> float:
        """Return the condition number of J D⁻¹ on the directions that are not zero to rounding."""
        return condition_from(self._backend, self._a) if self.finite else float("inf")

    def estimable(self, held: np.ndarray | None = None, error: float = 0.0) -> Estimable:
        """Return what the data determine of the parameters, with `held` ones (n,) kept where they are."""
        n = self.scale.numel()
        return estimable_of_gram(self._gram[:n, :n].cpu().numpy(), max(self._error, error), held)


def condition_from(backend: Backend, squared: Any) -> float:
    """Return the condition number of A from a backend's AᵀA or AAᵀ, on the directions that are not zero to rounding."""
    values = backend.to_tensor(backend.eigh(squared)[0], torch.device("cpu")).numpy()
    kept = values[values > len(values) * RANK_ROUNDING * values[-1]]
    return float((values[-1] / kept[0]) ** 0.5) if len(kept) else float("inf")
