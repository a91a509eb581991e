r"""Linearisation in the space of residuals: for more parameters than residuals (a network on a batch of rows).

With A = J D⁻¹ (m × n) and the m × m Gram matrix K, the identity (AᵀA + λI)⁻¹Aᵀ = Aᵀ(AAᵀ + λI)⁻¹ gives

.. math:: K = A A^T = J D^{-2} J^T, \qquad (K + \lambda I)\, u = r, \qquad p = -D^{-2} J^T u .

Aᵀ takes away what rounding leaves in directions of u that it maps to zero, so the step, and the predicted reduction
−rᵀJp − ½‖Jp‖², are made with J. The secular equation does without: ‖Dp‖² = uᵀKu, which carries rounding of size
m ε‖K‖‖u‖²; as much is added to it. Where rows of J are dependent (as for m > n) and λ is tiny beside ‖K‖, the step is
therefore shorter than it might be; it never leaves the region. Like cholesky, dual resolves no λ below m ε ‖K‖.

J is kept: 8 m n bytes on the first device (4 in float32), twice while the next point is linearised. Cost: m² n flops
for K, m³/3 per λ.
"""

from functools import cached_property
from typing import Any

import numpy as np
import torch

from lmfit_gpu.backends import Backend
from lmfit_gpu.jacobian import Jacobian
from lmfit_gpu.linear.base import EPSILON, Step, no_step, secular_step, shortened
from lmfit_gpu.linear.cholesky import condition_from
from lmfit_gpu.linear.covariance import MANY_PARAMS, RANK_ROUNDING, Estimable, estimable_of_columns

__all__ = ["DualLinearization"]

CLEAN = 0.01  # of the predicted reduction of the undamped step: what rounding of K may make of it
COLUMNS_TOGETHER = 4096  # columns of J scaled and squared at a time


class DualLinearization:
    """J and r, and K = J D⁻² Jᵀ.

    Parameters
    ----------
    columns : Tensor, shape (n + 1, m)
        [J r]ᵀ, on the first device.
    backend : Backend
        Factors K + λI.
    scale : Tensor, shape (n,)
        D.
    error : float
        Relative error of J; what is below it counts as zero in :meth:`undamped` and for the rank.
    """

    direct = True
    has_gradient = True
    accelerates = False

    def __init__(self, columns: torch.Tensor, backend: Backend, scale: torch.Tensor, error: float = 0.0) -> None:
        self._columns, self._backend, self._error = columns, backend, error
        self.scale = scale
        self._m = columns.shape[1]
        self._residuals = columns[-1].double()
        self.residual_norm = float(torch.linalg.vector_norm(self._residuals))
        self.condition_limit = (self._m * RANK_ROUNDING) ** -0.5
        self._factors: dict[float, Any] = {}

    @classmethod
    def reduce(cls, jacobian: Jacobian, backend: Backend) -> "DualLinearization":
        """Make one pass over the data; D is 1 until :meth:`with_scale`."""
        return cls(jacobian.whole(), backend, torch.ones_like(jacobian.theta, dtype=torch.float64))

    @classmethod
    def room(cls, n_residuals: int, n_params: int) -> int:
        """Return 40 m² bytes: K, its copy in the factor's layout, the factor, and K and factor of the point before."""
        return 40 * n_residuals**2

    def with_scale(self, scale: torch.Tensor, error: float = 0.0) -> "DualLinearization":
        """Return the same reduction with another D."""
        return DualLinearization(self._columns, self._backend, scale, error)

    def product(self, p: torch.Tensor) -> torch.Tensor:
        """Return JᵀJ p, shape (n,)."""
        return self._transposed(self._along(p))

    def restricted(self, free: torch.Tensor, shift: torch.Tensor) -> "DualLinearization":
        """Return (J, r) with only the free columns, and r + J shift."""
        columns = self._columns.clone()
        columns[-1] += self._along(shift).to(columns)
        columns[:-1] *= free[:, None]
        return DualLinearization(columns, self._backend, self.scale, self._error)

    @cached_property
    def gradient(self) -> torch.Tensor:
        """Jᵀr, shape (n,)."""
        return self._transposed(self._residuals)

    @cached_property
    def column_norms(self) -> torch.Tensor:
        """‖J_j‖, shape (n,)."""
        return torch.linalg.vector_norm(self._columns[:-1], dim=1, dtype=torch.float64)

    @cached_property
    def finite(self) -> bool:
        """Whether J and r are."""
        return bool(torch.isfinite(self._columns).all())

    @cached_property
    def _parts(self) -> tuple[torch.Tensor, ...]:
        """Jᵀ in parts that are small enough to be made float64 one at a time; whole where it is already."""
        transposed = self._columns[:-1]
        return (transposed,) if transposed.dtype == torch.float64 else transposed.split(COLUMNS_TOGETHER)

    def _transposed(self, u: torch.Tensor) -> torch.Tensor:
        """Return Jᵀu, shape (n,), in float64."""
        return torch.cat([part.double() @ u for part in self._parts])

    def _along(self, v: torch.Tensor) -> torch.Tensor:
        """Return Jv, shape (m,), in float64."""
        sizes = [len(part) for part in self._parts]
        return torch.stack([w @ part.double() for w, part in zip(v.split(sizes), self._parts, strict=True)]).sum(0)

    @cached_property
    def _gram(self) -> torch.Tensor:
        """K, shape (m, m), in float64 whatever the dtype of J."""
        gram = self.scale.new_zeros(self._m, self._m)
        for part, d in zip(self._columns[:-1].split(COLUMNS_TOGETHER), self.scale.split(COLUMNS_TOGETHER), strict=True):
            scaled = part / d[:, None]
            gram.addmm_(scaled.T, scaled)
        return gram

    @cached_property
    def _k(self) -> Any:
        return self._backend.asarray(self._gram)

    @cached_property
    def least_damping(self) -> float:
        """M ε ‖K‖: below it K + λI is K to rounding."""
        return self._m * EPSILON * float(torch.linalg.matrix_norm(self._gram))

    def _factor(self, damping: float) -> Any | None:
        if damping not in self._factors:
            self._factors = {}  # only the last: m² memory each
            self._factors = {damping: self._backend.cholesky(self._k, damping)}
        return self._factors[damping]

    def _solved(self, factor: Any, b: torch.Tensor | None = None) -> torch.Tensor:
        """Return (K + λI)⁻¹ b, shape (m,), b = r by default: the only vectors that go to the backend and back."""
        b = self._residuals if b is None else b
        solved = self._backend.cholesky_solve(factor, self._backend.asarray(b))
        return self._backend.to_tensor(solved, self.scale.device)

    def solve(self, damping: float) -> Step:
        """Return the step for λ = `damping`; a λ below :attr:`least_damping` gives an invalid step."""
        factor = self._factor(damping) if self.finite and damping >= self.least_damping else None
        return no_step(self.scale, damping) if factor is None else self._step(self._solved(factor), damping)

    def _step(self, u: torch.Tensor, damping: float) -> Step:
        q = -self._transposed(u) / self.scale
        p, norm = q / self.scale, float(torch.linalg.vector_norm(q))
        ahead = self._along(p)
        gain = -float(ahead @ (self._residuals + 0.5 * ahead))
        return Step(p, gain, norm, damping, valid=bool(np.isfinite(norm)))

    def within(self, radius: float, guess: float) -> Step:
        """Return the step within a radius, by the secular equation; λ grows while the step made with J is longer."""
        return shortened(self, secular_step(self, radius, guess), radius)

    def undamped(self) -> Step:
        """Return the Gauss-Newton step on the directions that J and the solver resolve.

        It is the one for the least λ, unless a residual that J cannot take away makes u so large that the rounding of
        K shows (dependent rows); then that of the eigenvectors of K that are not zero to rounding, at 9 m³ flops.
        """
        return self._undamped

    @cached_property
    def _undamped(self) -> Step:
        damping = max(self.least_damping, self._error**2 * self.least_damping / (self._m * EPSILON))
        if not self.finite:
            return no_step(self.scale, damping)
        factor = self._factor(damping)
        if factor is not None:
            u = self._solved(factor)
            step, noise = self._step(u, damping), self.least_damping * float(torch.linalg.vector_norm(u))
            if step.valid and 0.5 * noise**2 <= CLEAN * step.predicted_reduction:
                return step
        return self._step(self._projected(), damping)

    def _projected(self) -> torch.Tensor:
        """Return K⁺r."""
        values, vectors = (self._backend.to_tensor(part, self.scale.device) for part in self._backend.eigh(self._k))
        kept = values > max(self._error**2, self._m * RANK_ROUNDING) * values[-1]
        along = torch.where(kept, vectors.T @ self._residuals / torch.where(kept, values, torch.ones_like(values)), 0.0)
        return vectors @ along

    def scaled_norm(self, damping: float) -> tuple[float, float]:
        """Return ‖D p(λ)‖ and its derivative by λ, from K alone; infinite and 0 where the factorisation fails."""
        factor = self._factor(damping)
        if factor is None:
            return float("inf"), 0.0
        u = self._solved(factor)
        ku = self._gram @ u
        slope = self._solved(factor, u)  # −∂u/∂λ
        norm = max(float(u @ ku) + self.least_damping * float(u @ u), 0.0) ** 0.5
        half = float(ku @ slope) + self.least_damping * float(u @ slope)
        return norm, -half / norm if norm > 0 else 0.0

    def solve_rhs(self, damping: float, b: torch.Tensor) -> torch.Tensor:
        """Return (JᵀJ + λD²)⁻¹ b, shape (n,), as (c − Aᵀ(K + λI)⁻¹A c)/λ with c = D⁻¹b; NaN where there is none."""
        factor = self._factor(damping) if damping > 0 else None
        if factor is None:
            return torch.full_like(self.scale, torch.nan)
        back = self._transposed(self._solved(factor, self._along(b / self.scale**2)))
        return (b - back) / (damping * self.scale**2)

    def condition(self) -> float:
        """Return the condition number of J D⁻¹ on the directions that are not zero to rounding."""
        return condition_from(self._backend, self._k) if self.finite else float("inf")

    def estimable(self, held: np.ndarray | None = None, error: float = 0.0) -> Estimable | None:
        """Return what the data determine of the parameters that are not `held`; None beyond 1,000 parameters."""
        if self.scale.numel() > MANY_PARAMS:
            return None
        return estimable_of_columns(self._columns[:-1].T.double().cpu().numpy(), max(self._error, error), held)
