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
from lmfit_gpu.linear.base import Step, reduce_with
from lmfit_gpu.linear.qr import EPSILON, covariance_from

__all__ = ["CholeskyLinearization"]

UNDAMPED_TRIES = 5
RANK_ROUNDING = 10 * EPSILON  # per column: eigenvalues of a Gram matrix summed over many rows are known to that


class CholeskyLinearization:
    """JᵀJ and Jᵀr.

    Parameters
    ----------
    gram : backend array, shape (n + 1, n + 1)
        [J r]ᵀ[J r].
    backend : Backend
    scale : Tensor, shape (n,)
        D.
    error : float
        Relative error of J, for the rank.
    """

    def __init__(self, gram: Any, backend: Backend, scale: torch.Tensor, error: float = 0.0) -> None:
        self._gram, self._backend, self._error = gram, backend, error
        n = scale.numel()
        self.scale = scale
        self._d = backend.asarray(scale)
        self._a = gram[:n, :n] / self._d / self._d[:, None]
        self._b = gram[:n, n] / self._d
        self.gradient = backend.to_tensor(gram[:n, n], scale.device)
        self.column_norms = backend.to_tensor(gram.diagonal()[:n] ** 0.5, scale.device)
        self.residual_norm = float(gram[n, n]) ** 0.5
        self.finite = bool(np.isfinite(float(abs(gram).sum())))
        self._factors: dict[float, Any] = {}

    @classmethod
    def reduce(cls, jacobian: Jacobian, backend: Backend) -> "CholeskyLinearization":
        """Make one pass over the data; D is 1 until :meth:`with_scale`."""
        gram = reduce_with(jacobian, backend, "gram", lambda left, right: left + right)
        return cls(gram, backend, torch.ones_like(jacobian.theta, dtype=torch.float64))

    def with_scale(self, scale: torch.Tensor, error: float = 0.0) -> "CholeskyLinearization":
        """Return the same reduction with another D."""
        return CholeskyLinearization(self._gram, self._backend, scale, error)

    @cached_property
    def least_damping(self) -> float:
        """N ε ‖A‖: below it A + λI is A to rounding."""
        return len(self._b) * EPSILON * float((self._a**2).sum()) ** 0.5

    def _factor(self, damping: float) -> Any | None:
        if damping not in self._factors:
            shifted = self._a + damping * self._backend.asarray(torch.eye(len(self._b)))
            self._factors = {damping: self._backend.cholesky(shifted)}  # only the last: n² memory each
        return self._factors[damping]

    def solve(self, damping: float) -> Step:
        """Return the step for λ = `damping`; a λ below :attr:`least_damping` gives an invalid step."""
        factor = self._factor(damping) if damping >= self.least_damping and self.finite else None
        if factor is None:
            return Step(torch.zeros_like(self.scale), 0.0, 0.0, damping, valid=False)
        q = -self._backend.cholesky_solve(factor, self._b)
        norm = float((q**2).sum()) ** 0.5
        gain = 0.5 * (damping * norm**2 - float(self._b @ q))
        p = self._backend.to_tensor(q / self._d, self.scale.device)
        return Step(p, gain, norm, damping, valid=bool(np.isfinite(norm)))

    def undamped(self) -> Step:
        """Return the step for the least λ that the solver resolves."""
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
        q = self._backend.cholesky_solve(factor, self._b)
        norm = float((q**2).sum()) ** 0.5
        slope = float(q @ self._backend.cholesky_solve(factor, q))
        return norm, -slope / norm if norm > 0 else 0.0

    def solve_rhs(self, damping: float, b: torch.Tensor) -> torch.Tensor:
        """Return (JᵀJ + λD²)⁻¹ b, shape (n,); NaN where the factorisation fails."""
        factor = self._factor(damping)
        if factor is None:
            return torch.full_like(self.scale, torch.nan)
        scaled = self._backend.cholesky_solve(factor, self._backend.asarray(b) / self._d)
        return self._backend.to_tensor(scaled / self._d, self.scale.device)

    @cached_property
    def _eigenvalues(self) -> np.ndarray:
        return self._backend.to_tensor(self._backend.eigh(self._a)[0], torch.device("cpu")).numpy()

    def condition(self) -> float:
        """Return the condition number of J D⁻¹ on the directions that are not zero to rounding."""
        if not self.finite:
            return float("inf")
        values = self._eigenvalues
        kept = values[values > len(values) * RANK_ROUNDING * values[-1]]
        return float((values[-1] / kept[0]) ** 0.5) if len(kept) else float("inf")

    def covariance(self) -> tuple[torch.Tensor, int, torch.Tensor]:
        """Return (JᵀJ)⁻¹ on the estimable directions, its rank, and a mask of the undetermined parameters."""
        n = len(self._b)
        gram = self._backend.to_tensor(self._gram, torch.device("cpu")).numpy()[:n, :n]
        norms = np.sqrt(np.where(gram.diagonal() > 0, gram.diagonal(), 1.0))
        values, vectors = np.linalg.eigh(gram / np.outer(norms, norms))
        kept = values > max(self._error**2, n * RANK_ROUNDING) * values[-1]
        s = np.sqrt(np.where(kept, values, 0.0))
        return covariance_from(s, vectors.T, kept, norms)
