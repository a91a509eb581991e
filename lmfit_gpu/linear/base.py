r"""What every linearisation offers: one pass over the data, then a step for every damping value.

At a point θ with residuals r, Jacobian J and scale D (a positive vector) the damped step is

.. math:: p(\lambda) = -(J^T J + \lambda D^2)^{-1} J^T r,

the minimiser of the model plus :math:`\tfrac12 \lambda \|D p\|^2`, and its predicted reduction is
:math:`-g^T p - \tfrac12 \|J p\|^2` with :math:`g = J^T r` (Nocedal and Wright, 2nd ed., section 10.3).
λ has no unit: D has the units of J.

Blocks of rows are reduced on the devices of the model; what is left, without rows, goes to the backend.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from lmfit_gpu.backends import Backend
from lmfit_gpu.jacobian import Jacobian
from lmfit_gpu.linear.covariance import Estimable
from lmfit_gpu.rows import LEAF_ROWS

__all__ = [
    "EPSILON",
    "FullLinearization",
    "Linearization",
    "Step",
    "no_step",
    "reduce_with",
    "secular_step",
    "shortened",
]

EPSILON = float(np.finfo(np.float64).eps)
RADIUS_WITHIN = 0.1  # MINPACK lmpar: the secular equation is solved to 10 %
SECULAR_ITERATIONS = 30  # two or three are usual; the safeguard halves the bracket's logarithm


@dataclass(frozen=True)
class Step:
    """A step and what the linear model says of it.

    Parameters
    ----------
    p : Tensor, shape (n_params,)
        In float64; in the dtype of the model where J was never formed.
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


def no_step(scale: torch.Tensor, damping: float) -> Step:
    """Return the invalid step: a trial that is rejected before it is made."""
    return Step(torch.zeros_like(scale), 0.0, 0.0, damping, valid=False)


class Linearization(Protocol):
    """(J, r) at one point, reduced; made by :func:`lmfit_gpu.linear.linearize`."""

    direct: bool  # one factorisation serves every right-hand side; else each solve is an iteration
    accelerates: bool  # whether another right-hand side is worth its price for a better step
    has_gradient: bool  # whether Jᵀr is at hand, or costs a pass over the data
    residual_norm: float  # ‖r‖
    condition_limit: float  # the largest condition number that the solver can tell from infinity

    @property
    def scale(self) -> torch.Tensor:
        """D, shape (n,)."""
        ...

    @property
    def gradient(self) -> torch.Tensor:
        """Jᵀr, shape (n,)."""
        ...

    @property
    def column_norms(self) -> torch.Tensor:
        """‖J_j‖, shape (n,)."""
        ...

    @property
    def finite(self) -> bool:
        """Whether J and r are."""
        ...

    def product(self, p: torch.Tensor) -> torch.Tensor:
        """Return JᵀJ p, shape (n,)."""
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

    def within(self, radius: float, guess: float) -> Step:
        """Return the step of least model cost with ‖D p‖ ≤ `radius`, to 10 %; `guess` is a λ to try first."""
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

    def estimable(self, held: np.ndarray | None = None, error: float = 0.0) -> Estimable | None:
        """Return what the data determine of the parameters that are not `held` (a mask, shape (n,)).

        `error` is the relative error of J, where it is more than :meth:`FullLinearization.with_scale` was told.
        None where n is beyond dense matrices and the solver keeps none.
        """
        ...


class FullLinearization(Linearization, Protocol):
    """A linearisation without bounds: what each solver makes."""

    @classmethod
    def room(cls, n_residuals: int, n_params: int) -> int:
        """Return the bytes that arrays of the backend take at most, with those of the point before."""
        ...

    def with_scale(self, scale: torch.Tensor, error: float = 0.0) -> "FullLinearization":
        """Return the same reduction with another D; `error` is the relative error of J.

        Singular values of the scaled J below `error` count as zero in :meth:`undamped`, :meth:`condition` and
        :meth:`estimable`: differences leave about 1e-10 where an exact J has a null direction.
        """
        ...

    def restricted(self, free: torch.Tensor, shift: torch.Tensor) -> "FullLinearization":
        """Return (J, r) with the columns that are not free set to zero, and r + J shift for r."""
        ...


def reduce_with(jacobian: Jacobian, backend: Backend, leaf: str) -> torch.Tensor:
    """Reduce [J r] leaf by leaf on the devices of the model, combined pairwise on the first of them.

    Parameters
    ----------
    jacobian : Jacobian
    backend : Backend
        Its :meth:`~lmfit_gpu.backends.Backend.leaves` do the work.
    leaf : {"triangle", "gram"}

    Returns
    -------
    Tensor, shape (n + 1, n + 1), float64
        On the problem's first device.
    """
    device = jacobian.problem.device

    def reduced(columns: torch.Tensor) -> torch.Tensor:
        leaves = backend.leaves(columns.device)
        return leaves.to_tensor(getattr(leaves, leaf)(leaves.asarray(columns)), device)

    def joined(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
        leaves = backend.leaves(device)
        return leaves.to_tensor(leaves.join_triangles(leaves.asarray(upper), leaves.asarray(lower)), device)

    many = jacobian.problem.n_equations > LEAF_ROWS
    with backend.leaves(device).leaf_threads() if many else nullcontext():
        return jacobian.reduce(reduced, joined if leaf == "triangle" else torch.add)


def secular_step(
    lin: Linearization, radius: float, guess: float, smooth: bool = True, force: float | None = None
) -> Step:
    r"""Return the step whose λ solves :math:`\|D p(\lambda)\| = \Delta` within 10 %.

    The least λ when p is shorter there. Newton's method on :math:`1/\|D p\|`, safeguarded (Nocedal and Wright, 2nd
    ed., algorithm 4.3; Moré (1978), section 5, doi:10.1007/BFb0067700). Where ‖D p‖ has kinks (not `smooth`) a Newton
    step from the left may pass the root and bounds nothing; the bracket then starts at the least λ. `force` is ‖D⁻¹g‖,
    where the solver knows it.
    """
    least = lin.least_damping
    if force is None:
        force = float(torch.linalg.vector_norm(lin.gradient / lin.scale))
    if force == 0:  # no λ moves anything
        return lin.solve(max(least, 1.0))
    norm, slope = lin.scaled_norm(least)
    if norm <= (1 + RADIUS_WITHIN) * radius:
        return lin.solve(least)
    low = max(least, least + (norm - radius) / -slope if slope < 0 and smooth else least)
    high = force / max(radius, np.finfo(np.float64).tiny)
    damping = guess
    for _ in range(SECULAR_ITERATIONS):
        if not low < damping < high:
            damping = max(1e-3 * high, (low * high) ** 0.5)
        norm, slope = lin.scaled_norm(damping)
        if not np.isfinite(norm):  # the factorisation failed: a larger λ
            low, damping = damping, 0.0
            continue
        excess = norm - radius
        if abs(excess) <= RADIUS_WITHIN * radius or slope == 0:
            break
        low, high = (damping, high) if excess > 0 else (low, damping)
        damping -= norm / radius * excess / slope
    return lin.solve(min(max(damping, low), high))


def shortened(lin: Linearization, step: Step, radius: float) -> Step:
    """Return a step of :func:`secular_step`, with λ raised while the step itself is longer than the radius.

    For solvers that know ‖D p(λ)‖ in the secular equation to less than the step they make.
    """
    for _ in range(SECULAR_ITERATIONS):
        if not step.valid or step.scaled_norm <= (1 + RADIUS_WITHIN) * radius:
            break
        step = lin.solve(step.damping * max(2.0, step.scaled_norm / radius))
    return step
