r"""What every linearisation offers: one pass over the data, then a step for every damping value.

At a point θ with residuals r, Jacobian J and scale D (a positive vector) the damped step is

.. math:: p(\lambda) = -(J^T J + \lambda D^2)^{-1} J^T r,

the minimiser of the model plus :math:`\tfrac12 \lambda \|D p\|^2`, and its predicted reduction is
:math:`-g^T p - \tfrac12 \|J p\|^2` with :math:`g = J^T r` (Nocedal and Wright, 2nd ed., section 10.3).
λ has no unit: D has the units of J.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lmfit_gpu.backends import Backend, TorchBackend
from lmfit_gpu.jacobian import Jacobian
from lmfit_gpu.rows import LEAF_ROWS

__all__ = ["Linearization", "Step", "reduce_with"]


@dataclass(frozen=True)
class Step:
    """A step and what the linear model says of it.

    Parameters
    ----------
    p : Tensor, shape (n_params,), float64
    predicted_reduction : float
        -gᵀp - ½‖Jp‖², in units of the cost.
    scaled_norm : float
        ‖D p‖, in units of the residual.
    damping : float
        λ that made it.
    valid : bool
        False when the factorisation failed or λ is below what the solver can resolve; p is then zero.
    n_inner : int
        Inner iterations of an iterative solver.
    """

    p: torch.Tensor
    predicted_reduction: float
    scaled_norm: float
    damping: float
    valid: bool = True
    n_inner: int = 0


class Linearization(Protocol):
    """(J, r) at one point, reduced; made by :func:`lmfit_gpu.linear.linearize`."""

    gradient: torch.Tensor  # (n,) Jᵀr
    column_norms: torch.Tensor  # (n,) ‖J_j‖
    residual_norm: float  # ‖r‖
    scale: torch.Tensor  # (n,) D
    finite: bool

    def with_scale(self, scale: torch.Tensor, error: float = 0.0) -> "Linearization":
        """Return the same reduction with another D; `error` is the relative error of J.

        Singular values of the scaled J below `error` count as zero in :meth:`undamped`, :meth:`condition` and
        :meth:`covariance`: differences leave about 1e-10 where an exact J has a null direction.
        """
        ...

    def solve(self, damping: float) -> Step:
        """Return the step for λ = `damping`; with 0 the Gauss-Newton step, of least ‖D p‖ when J is deficient."""
        ...

    def undamped(self) -> Step:
        """Return the Gauss-Newton step on the directions that J resolves: what the stop tests look at."""
        ...

    def scaled_norm(self, damping: float) -> tuple[float, float]:
        """Return ‖D p(λ)‖ and its derivative by λ."""
        ...

    def solve_rhs(self, damping: float, b: torch.Tensor) -> torch.Tensor:
        """Return (JᵀJ + λD²)⁻¹ b, shape (n,)."""
        ...

    @property
    def least_damping(self) -> float:
        """The least λ that the solver resolves; 0 for qr."""
        ...

    def condition(self) -> float:
        """Return the condition number of J D⁻¹ on the directions that J resolves."""
        ...

    def covariance(self) -> tuple[torch.Tensor, int, torch.Tensor]:
        """Return (JᵀJ)⁻¹ on the estimable directions, its rank, and a mask of the undetermined parameters."""
        ...


def reduce_with(jacobian: Jacobian, backend: Backend, leaf: str, combine: Any) -> Any:
    """Reduce [J r] by a primitive of the backend applied to every leaf, combined pairwise.

    A leaf on a GPU is reduced there by torch, and only its small result moves to the backend.

    Parameters
    ----------
    jacobian : Jacobian
    backend : Backend
    leaf : {"triangle", "gram"}
    combine : callable (left, right) -> result
    """

    def reduced(columns: torch.Tensor) -> Any:
        if columns.is_cuda:
            return backend.asarray(getattr(TorchBackend(columns.device), leaf)(columns.double()))
        return getattr(backend, leaf)(backend.asarray(columns))

    with backend.leaf_threads() if jacobian.problem.n_residuals > LEAF_ROWS else nullcontext():
        return jacobian.reduce(reduced, combine)
