r"""JᵀJ v for conjugate gradients: matrix-free, or from a stored J or JᵀJ, whichever is smaller.

=================  ============================================================  ==================================
operator           product                                                       memory, bytes
=================  ============================================================  ==================================
``FreeProducts``   Jv by forward mode, Jᵀu by one backward pass; a kept J        none (a kept J: up to 128 MiB)
``StoredGram``     JᵀJ summed over blocks on the model's devices                 8 n²
``StoredRows``     J, its rows spread over the processors of the backend         8 m n
=================  ============================================================  ==================================

Backends scipy and torch store nothing where torch can differentiate the model. cuPyNumeric always stores, so that
the iteration runs where its vectors live.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lmfit_gpu.backends import Backend, TorchBackend
from lmfit_gpu.jacobian import Jacobian
from lmfit_gpu.linear.base import EPSILON, reduce_with

__all__ = ["Reduction", "reduce_for_products", "stored_bytes"]

PROBES = 32  # random vectors: the squares of the norms have a relative error of (2/32)^½, the norms half of it
SEED = 20120  # fixed: the same fit has the same D


@dataclass(frozen=True)
class Reduction:
    """What conjugate gradients know of (J, r) at a point.

    Parameters
    ----------
    backend : Backend
        Whose arrays the vectors are: torch where the model makes the products.
    product : callable (v) -> JᵀJ v
        On arrays of shape (n,).
    gradient : Tensor, shape (n,)
    column_norms : Tensor, shape (n,)
        Exact, or estimated where J is never formed.
    residual_norm : float
    epsilon : float
        Rounding of the products: that of the model's arithmetic where autograd makes them.
    gram : callable () -> Tensor, shape (n, n)
        JᵀJ, made when asked.
    """

    backend: Backend
    product: Callable[[Any], Any]
    gradient: torch.Tensor
    column_norms: torch.Tensor
    residual_norm: float
    epsilon: float
    gram: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class FreeProducts:
    """Products by the Jacobian itself, block by block on the model's devices."""

    jacobian: Jacobian

    def __call__(self, v: torch.Tensor) -> torch.Tensor:
        """Return JᵀJ v."""
        return self.jacobian.normal(v)


@dataclass(frozen=True)
class StoredGram:
    """JᵀJ as one array of the backend."""

    matrix: Any

    def __call__(self, v: Any) -> Any:
        """Return JᵀJ v."""
        return self.matrix @ v


@dataclass(frozen=True)
class StoredRows:
    """J as one array of the backend, spread by rows."""

    matrix: Any

    def __call__(self, v: Any) -> Any:
        """Return Jᵀ(J v)."""
        return (self.matrix @ v) @ self.matrix


def stored_bytes(n_residuals: int, n_params: int) -> int:
    """Return the bytes of the smaller of JᵀJ and J."""
    return 8 * n_params * min(n_residuals, n_params)


def reduce_for_products(jacobian: Jacobian, backend: Backend) -> Reduction:
    """Make one pass over the data, and more where column norms are estimated."""
    problem = jacobian.problem

    def gram() -> torch.Tensor:
        return reduce_with(jacobian, backend, "gram")[: problem.n_params, : problem.n_params]

    if backend.name != "cupynumeric" and (jacobian.keeps or jacobian.makes_products):
        where = TorchBackend(problem.device)  # numpy's threads and torch's together would be slower than either
        if jacobian.keeps:
            return Reduction(where, FreeProducts(jacobian), *_sums(jacobian), EPSILON, gram)
        gradient, norm = jacobian.gradient()
        rounding = torch.finfo(jacobian.theta.dtype).eps
        return Reduction(where, FreeProducts(jacobian), gradient, _estimated_norms(jacobian), norm, rounding, gram)
    if problem.n_params <= problem.n_equations:
        n = problem.n_params
        squares = reduce_with(jacobian, backend, "gram")
        product = StoredGram(backend.asarray(squares[:n, :n]))
        norms = squares.diagonal() ** 0.5
        return Reduction(backend, product, squares[:n, n], norms[:n], float(norms[n]), EPSILON, lambda: squares[:n, :n])
    sums = _sums(jacobian)
    rows = backend.stacked((block for _, block in jacobian.blocks()), (problem.n_equations, problem.n_params))
    return Reduction(backend, StoredRows(rows), *sums, EPSILON, gram)


def _sums(jacobian: Jacobian) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return Jᵀr, the column norms and ‖r‖ by one pass over the blocks of J."""
    device = jacobian.problem.device

    def leaf(columns: torch.Tensor) -> torch.Tensor:
        columns = columns.contiguous().double()  # a part of a longer block is multiplied with other rounding
        return torch.stack((columns @ columns[-1], (columns**2).sum(1))).to(device)

    products, squares = jacobian.reduce(leaf, torch.add)
    return products[:-1], squares[:-1] ** 0.5, float(squares[-1]) ** 0.5


def _estimated_norms(jacobian: Jacobian) -> torch.Tensor:
    """Return (mean (Jᵀz)²)^½ over vectors z of random signs: E (J_jᵀz)² = ‖J_j‖² (Bekas, Kokiopoulou and Saad (2007),
    doi:10.1016/j.apnum.2007.01.003). Zero exactly where a column is."""  # noqa: D205, D209
    generator = torch.Generator().manual_seed(SEED)
    squares = torch.zeros_like(jacobian.theta, dtype=torch.float64)
    for _ in range(PROBES):
        signs = torch.randint(0, 2, (jacobian.problem.n_equations,), generator=generator, dtype=torch.int8)
        squares += jacobian.rmatvec((2 * signs - 1).to(jacobian.theta)) ** 2
    return (squares / PROBES) ** 0.5
