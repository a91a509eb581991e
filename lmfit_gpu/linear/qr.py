r"""Linearisation by orthogonal triangularisation: JᵀJ is never formed.

Blocks of [J r] are reduced to triangles, and the triangles pairwise to one (tall-skinny QR: Demmel, Grigori,
Hoemmen and Langou, SIAM J. Sci. Comput. 34 (2012), doi:10.1137/080731992):

.. math:: [J\ r] = Q \begin{bmatrix} R & z \\ 0 & \rho \end{bmatrix}, \qquad
          R D^{-1} = U\,\mathrm{diag}(s)\,V^T, \qquad w = U^T z .

Then for every λ, with no further factorisation,

.. math:: D\,p(\lambda) = -V \frac{s\,w}{s^2+\lambda}, \qquad
          \text{predicted reduction} = \tfrac12 \sum_j w_j^2 \frac{s_j^2 (s_j^2 + 2\lambda)}{(s_j^2+\lambda)^2},

a sum of positive terms. Cost: 2 m n² flops for R, about 20 n³ for the singular value decomposition; memory
8 (n + 1)² bytes per leaf in flight. Error of the step: ε κ(J D⁻¹).
"""

from functools import cached_property
from typing import Any

import numpy as np
import torch

from lmfit_gpu.backends import Backend
from lmfit_gpu.jacobian import Jacobian
from lmfit_gpu.linear.base import EPSILON, Step, reduce_with, secular_step
from lmfit_gpu.linear.covariance import Estimable, estimable_of_columns

__all__ = ["QRLinearization"]


class QRLinearization:
    """R and z of [J r] = Q [R z; 0 ρ].

    Parameters
    ----------
    triangle : Tensor, shape (n + 1, n + 1)
        [R z; 0 ρ], on the first device.
    backend : Backend
        Decomposes R D⁻¹.
    scale : Tensor, shape (n,)
        D.
    error : float
        Relative error of J; directions below it are left out of :meth:`undamped`.
    """

    direct = accelerates = True
    has_gradient = True
    least_damping = 0.0

    def __init__(self, triangle: torch.Tensor, backend: Backend, scale: torch.Tensor, error: float = 0.0) -> None:
        self._triangle, self._backend, self._error = triangle, backend, error
        n = scale.numel()
        self._r, self._z = triangle[:n, :n], triangle[:n, n]
        self.scale = scale
        self.gradient = self._r.T @ self._z
        self.column_norms = (self._r**2).sum(0) ** 0.5
        self.residual_norm = float((triangle[:, n] ** 2).sum()) ** 0.5
        # Squares of entries beyond 1e154 overflow: what is not known by its norm is as good as not finite.
        self.finite = bool(np.isfinite(float(triangle.abs().sum() + self.column_norms.sum())))
        self.condition_limit = 1 / (n * EPSILON)

    @classmethod
    def reduce(cls, jacobian: Jacobian, backend: Backend) -> "QRLinearization":
        """Make one pass over the data; D is 1 until :meth:`with_scale`."""
        triangle = reduce_with(jacobian, backend, "triangle")
        return cls(triangle, backend, torch.ones_like(jacobian.theta, dtype=torch.float64))

    @classmethod
    def room(cls, n_residuals: int, n_params: int) -> int:
        """Return 96 n² bytes: R, U, Vᵀ, work of the decomposition, U and Vᵀ of the point before, and fragments."""
        return 96 * n_params**2

    def with_scale(self, scale: torch.Tensor, error: float = 0.0) -> "QRLinearization":
        """Return the same reduction with another D."""
        return QRLinearization(self._triangle, self._backend, scale, error)

    def product(self, p: torch.Tensor) -> torch.Tensor:
        """Return JᵀJ p, shape (n,)."""
        return self._r.T @ (self._r @ p)

    def restricted(self, free: torch.Tensor, shift: torch.Tensor) -> "QRLinearization":
        """Return (J, r) with only the free columns, and r + J shift: R stays a triangle, nothing is factored again."""
        moved = self._z + self._r @ shift
        triangle = self._triangle.clone()
        triangle[: len(free), : len(free)] *= free
        triangle[: len(free), len(free)] = moved
        return QRLinearization(triangle, self._backend, self.scale, self._error)

    @cached_property
    def _svd(self) -> tuple[np.ndarray, np.ndarray, Any]:
        """Return s, w = Uᵀz as numpy vectors (the secular equation is scalar work), and Vᵀ of the backend."""
        backend, host = self._backend, torch.device("cpu")
        u, s, vt = backend.svd(backend.asarray(self._r / self.scale))
        w = u.T @ backend.asarray(self._z)
        return backend.to_tensor(s, host).numpy(), backend.to_tensor(w, host).numpy(), vt

    def _rotated(self, coefficients: np.ndarray) -> torch.Tensor:
        """Return V coefficients, shape (n,), on the model's device."""
        rotated = self._svd[2].T @ self._backend.asarray(torch.from_numpy(coefficients))
        return self._backend.to_tensor(rotated, self.scale.device)

    def _inverse(self, s: np.ndarray, damping: float, error: float = 0.0) -> np.ndarray:
        """Return s / (s² + λ), with 0 for singular values that are zero to rounding, or to `error`, when λ = 0."""
        if damping > 0:
            return s / (s**2 + damping)
        kept = s > max(error, len(s) * EPSILON) * s[0]
        return kept / (s + (~kept))

    def solve(self, damping: float) -> Step:
        """Return the step for λ = `damping`; with 0 the Gauss-Newton step of least ‖D p‖."""
        return self._step(damping, 0.0)

    def within(self, radius: float, guess: float) -> Step:
        """Return the step within a radius, by the secular equation."""
        return secular_step(self, radius, guess)

    def undamped(self) -> Step:
        """Return the Gauss-Newton step on the directions that J resolves, given its error."""
        return self._undamped

    @cached_property
    def _undamped(self) -> Step:
        return self._step(0.0, self._error)

    def _step(self, damping: float, error: float) -> Step:
        s, w, _ = self._svd
        inverse = self._inverse(s, damping, error)
        share = s * inverse  # s²/(s² + λ)
        with np.errstate(over="ignore", invalid="ignore"):  # a step too long for its norm is not valid
            gain = 0.5 * float(w**2 @ (share * (2 - share)))
            norm = float(np.linalg.norm(inverse * w))
        # Exactly 0 where a column is: rounding in V, over a D from a point where the column was tiny, is far from it.
        p = self._rotated(-inverse * w) / self.scale * (self.column_norms > 0)
        return Step(p, gain, norm, damping, valid=bool(np.isfinite(norm)))

    def _inverse_squares(self, damping: float) -> np.ndarray:
        """Return 1 / (s² + λ), with 0 for null directions when λ = 0."""
        s = self._svd[0]
        return self._inverse(s, damping) ** 2 if damping == 0 else 1 / (s**2 + damping)

    def scaled_norm(self, damping: float) -> tuple[float, float]:
        """Return ‖D p(λ)‖ and its derivative by λ."""
        s, w, _ = self._svd
        q = self._inverse(s, damping) * w
        with np.errstate(over="ignore", invalid="ignore"):
            norm = float(np.linalg.norm(q))
            return norm, -float(q**2 @ self._inverse_squares(damping)) / norm if norm > 0 else 0.0

    def solve_rhs(self, damping: float, b: torch.Tensor) -> torch.Tensor:
        """Return (JᵀJ + λD²)⁻¹ b, shape (n,)."""
        backend = self._backend
        along = backend.to_tensor(self._svd[2] @ backend.asarray(b / self.scale), torch.device("cpu")).numpy()
        return self._rotated(self._inverse_squares(damping) * along) / self.scale

    def condition(self) -> float:
        """Return the condition number of J D⁻¹ on the directions that J resolves, given its error."""
        s = self._svd[0]
        kept = s[s > max(self._error, len(s) * EPSILON) * s[0]]
        return float(s[0] / kept[-1]) if len(kept) else float("inf")

    def estimable(self, held: np.ndarray | None = None, error: float = 0.0) -> Estimable:
        """Return what the data determine of the parameters, with `held` ones (n,) kept where they are."""
        return estimable_of_columns(self._r.cpu().numpy(), max(self._error, error), held)
