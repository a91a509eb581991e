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
from lmfit_gpu.linear.base import Step, reduce_with

__all__ = ["QRLinearization"]

EPSILON = float(np.finfo(np.float64).eps)
UNDETERMINED = 1e-4  # share of a parameter in the null directions above which the data do not determine it


class QRLinearization:
    """R and z of [J r] = Q [R z; 0 ρ].

    Parameters
    ----------
    triangle : backend array, shape (n + 1, n + 1)
        [R z; 0 ρ].
    backend : Backend
    scale : Tensor, shape (n,)
        D.
    error : float
        Relative error of J; directions below it are left out of :meth:`undamped`.
    """

    def __init__(self, triangle: Any, backend: Backend, scale: torch.Tensor, error: float = 0.0) -> None:
        self._triangle, self._backend, self._error = triangle, backend, error
        n = scale.numel()
        self._r, self._z = triangle[:n, :n], triangle[:n, n]
        self.scale = scale
        self._d = backend.asarray(scale)
        device = scale.device
        self.gradient = backend.to_tensor(self._r.T @ self._z, device)
        self.column_norms = backend.to_tensor((self._r**2).sum(0) ** 0.5, device)
        self.residual_norm = float((triangle[:, n] ** 2).sum()) ** 0.5
        self.finite = bool(np.isfinite(float(abs(triangle).sum())))

    @classmethod
    def reduce(cls, jacobian: Jacobian, backend: Backend) -> "QRLinearization":
        """Make one pass over the data; D is 1 until :meth:`with_scale`."""
        triangle = reduce_with(jacobian, backend, "triangle", backend.join_triangles)
        return cls(triangle, backend, torch.ones_like(jacobian.theta, dtype=torch.float64))

    least_damping = 0.0

    def with_scale(self, scale: torch.Tensor, error: float = 0.0) -> "QRLinearization":
        """Return the same reduction with another D."""
        return QRLinearization(self._triangle, self._backend, scale, error)

    @cached_property
    def _svd(self) -> tuple[Any, Any, Any]:
        """Return s (n,), w = Uᵀz (n,), Vᵀ (n, n) of R D⁻¹."""
        u, s, vt = self._backend.svd(self._r / self._d)
        return s, u.T @ self._z, vt

    @cached_property
    def _host(self) -> tuple[np.ndarray, np.ndarray]:
        """S and w as numpy vectors: the secular equation is scalar work."""
        s, w, _ = self._svd
        device = torch.device("cpu")
        return self._backend.to_tensor(s, device).numpy(), self._backend.to_tensor(w, device).numpy()

    def _inverse(self, s: Any, damping: float, error: float = 0.0) -> Any:
        """Return s / (s² + λ), with 0 for singular values that are zero to rounding, or to `error`, when λ = 0."""
        if damping > 0:
            return s / (s**2 + damping)
        kept = s > max(error, len(s) * EPSILON) * s[0]
        return kept / (s + (~kept))

    def solve(self, damping: float) -> Step:
        """Return the step for λ = `damping`; with 0 the Gauss-Newton step of least ‖D p‖."""
        return self._step(damping, 0.0)

    def undamped(self) -> Step:
        """Return the Gauss-Newton step on the directions that J resolves, given its error."""
        return self._step(0.0, self._error)

    def _step(self, damping: float, error: float) -> Step:
        s, w, vt = self._svd
        scaled = vt.T @ (-self._inverse(s, damping, error) * w)
        p = self._backend.to_tensor(scaled / self._d, self.scale.device)
        sizes, weights = self._host
        inverse = self._inverse(sizes, damping, error)
        share = sizes * inverse  # s²/(s² + λ)
        gain = 0.5 * float(weights**2 @ (share * (2 - share)))
        norm = float(np.linalg.norm(inverse * weights))
        return Step(p, gain, norm, damping, valid=bool(np.isfinite(norm)))

    def scaled_norm(self, damping: float) -> tuple[float, float]:
        """Return ‖D p(λ)‖ and its derivative by λ."""
        s, w = self._host
        q = self._inverse(s, damping) * w
        norm = float(np.linalg.norm(q))
        inverse = self._inverse(s, damping) ** 2 if damping == 0 else 1 / (s**2 + damping)
        return norm, -float(q**2 @ inverse) / norm if norm > 0 else 0.0

    def solve_rhs(self, damping: float, b: torch.Tensor) -> torch.Tensor:
        """Return (JᵀJ + λD²)⁻¹ b, shape (n,)."""
        s, _, vt = self._svd
        inverse = self._inverse(s, damping) ** 2 if damping == 0 else 1 / (s**2 + damping)
        scaled = vt.T @ (inverse * (vt @ (self._backend.asarray(b) / self._d)))
        return self._backend.to_tensor(scaled / self._d, self.scale.device)

    def condition(self) -> float:
        """Return the condition number of J D⁻¹ on the directions that J resolves, given its error."""
        s = self._host[0]
        kept = s[s > max(self._error, len(s) * EPSILON) * s[0]]
        return float(s[0] / kept[-1]) if len(kept) else float("inf")

    def covariance(self) -> tuple[torch.Tensor, int, torch.Tensor]:
        """Return (JᵀJ)⁻¹ on the estimable directions, its rank, and a mask of the undetermined parameters."""
        norms = self._backend.to_tensor((self._r**2).sum(0) ** 0.5, torch.device("cpu")).numpy()
        norms = np.where(norms > 0, norms, 1.0)
        r = self._backend.to_tensor(self._r, torch.device("cpu")).numpy()
        _, s, vt = np.linalg.svd(r / norms)
        kept = s > max(self._error, len(s) * EPSILON) * s[0]
        return covariance_from(s, vt, kept, norms)


def covariance_from(
    s: np.ndarray, vt: np.ndarray, kept: np.ndarray, norms: np.ndarray
) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Return covariance, rank and undetermined mask from the decomposition of the column-scaled J.

    Parameters
    ----------
    s, vt : ndarray, shapes (n,), (n, n)
        Singular values and right singular vectors of J diag(norms)⁻¹.
    kept : ndarray of bool, shape (n,)
        Singular values that are not zero to rounding.
    norms : ndarray, shape (n,)
    """
    half = vt[kept].T / s[kept]
    covariance = (half @ half.T) / np.outer(norms, norms)
    undetermined = np.linalg.norm(vt[~kept], axis=0) > UNDETERMINED
    covariance[undetermined] = np.nan
    covariance[:, undetermined] = np.nan
    covariance[undetermined, undetermined] = np.inf
    return torch.from_numpy(covariance), int(kept.sum()), torch.from_numpy(undetermined)
