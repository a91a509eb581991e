r"""Bands of a penalised network with more parameters than a dense matrix may have, in the space of its residuals.

The linearised Laplace approximation of :mod:`lmfit_gpu.bands` without an n × n matrix. With the prior N(0, s²/α) on the
weights w and none on the rest b (biases), J = [J_w H] at the solution and g = (g_w, g_b) the gradient of a prediction,

.. math:: K = \tfrac1\alpha J_w J_w^T + I, \qquad k = \tfrac1\alpha J_w g_w, \qquad
          \mathrm{var} = s^2 \bigl[ \tfrac1\alpha\|g_w\|^2 - k^T K^{-1} k + e^T (H^T K^{-1} H)^{-1} e \bigr], \quad
          e = g_b - H^T K^{-1} k,

kriging with fixed effects (Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), eq. 2.41 and 2.42).
It equals ‖Rᵀg‖² in the space of parameters. What K leaves of the residuals gives the degrees of freedom,
tr(I − J C Jᵀ).

Cost: 8 m n bytes for J, m² n flops for K, m³/3 for its factor; 2 m n flops for each new row.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lmfit_gpu.bands import gradients
from lmfit_gpu.blocks import Block
from lmfit_gpu.fitting import problem_of
from lmfit_gpu.linear import MOST_DENSE, MOST_JACOBIAN
from lmfit_gpu.linear.covariance import EPSILON, UNDETERMINED
from lmfit_gpu.result import Result
from lmfit_gpu.sandwich import jacobian_at
from lmfit_gpu.solution import Solution
from lmfit_gpu.threads import share_of_threads

__all__ = ["FunctionSpace", "function_space"]


@dataclass(frozen=True)
class FunctionSpace:
    """The residuals of a fit as a Gaussian process.

    Parameters
    ----------
    rows : Tensor, shape (m, n), float64
        J.
    is_weight : Tensor of bool, shape (n,)
    alpha : float
    chol : Tensor, shape (m, m)
        L with K = L Lᵀ.
    effects : tuple of Tensor
        U (m, k), S (k,), V (b, b) of L⁻¹H, k its rank.
    result : Result
        With the degrees of freedom.
    """

    rows: torch.Tensor
    is_weight: torch.Tensor
    alpha: float
    chol: torch.Tensor
    effects: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    result: Result

    @share_of_threads()
    def standard_errors(self, estimator: Any, X: Any) -> torch.Tensor:
        """Return the standard errors of the mean at rows of X, float64, in y's shape; inf where not determined.

        Parameters
        ----------
        estimator : LMRegressor
        X : ndarray or Tensor, shape (n_samples, ...)
            Checked.
        """
        setup = estimator._setup
        jacobian = gradients(setup, self.result.theta, X, estimator)
        try:
            found = torch.cat(list(jacobian.problem.map_blocks(self._of_block(jacobian.columns))))
        finally:
            jacobian.problem.close()
        return (self.result.s2 * found).sqrt().reshape(len(X), *setup.y_shape)

    def _of_block(self, columns: Callable[[Block], torch.Tensor]) -> Callable[[Block], torch.Tensor]:
        rows_w, rows_b = self.rows[:, self.is_weight], self.rows[:, ~self.is_weight]
        _, s, v = self.effects
        k = len(s)

        def variances(block: Block) -> torch.Tensor:
            g = columns(block)[:-1].double().to(self.rows)  # (n, c)
            g_w, g_b = g[self.is_weight], g[~self.is_weight]
            whitened = torch.linalg.solve_triangular(self.chol, rows_w @ g_w / self.alpha, upper=False)
            h = torch.linalg.solve_triangular(self.chol, rows_b, upper=False)
            e = v.T @ (g_b - h.T @ whitened)  # in the directions of b
            fixed = ((e[:k] / s[:, None]) ** 2).sum(0)
            unseen = torch.linalg.vector_norm(e[k:], dim=0) > UNDETERMINED * torch.linalg.vector_norm(g, dim=0)
            found = ((g_w**2).sum(0) / self.alpha - (whitened**2).sum(0)).clamp_min(0) + fixed
            return torch.where(unseen, torch.inf, found)

        return variances


def function_space(solution: Solution) -> FunctionSpace:
    """Return the residuals of a fit as a Gaussian process.

    Parameters
    ----------
    solution : Solution

    Raises
    ------
    ValueError
        Without a penalty, with constraints or a loss, or if K or J is too large.
    """
    setup, result, n = solution.setup, solution.result, solution.theta.numel()
    no_matrix = f"solver={result.used['solver']!r} keeps no covariance of {n} parameters"
    if setup.penalty is None:
        raise ValueError(
            f"return_std, prediction_interval: {no_matrix}; with alpha > 0, the prior precision of the weights, bands "
            f"are computed from the residuals, or solver='cholesky' keeps a matrix (up to {MOST_DENSE} parameters)"
        )
    if setup.constraints is not None or solution.problem.loss is not None:
        raise ValueError(
            f"return_std, prediction_interval: {no_matrix}, and bands from the residuals are for fits without a loss, "
            "bounds, fixed or tied parameters; solver='cholesky' keeps a matrix"
        )
    m = solution.problem.n_residuals
    if m > MOST_DENSE or m * n > MOST_JACOBIAN:
        raise ValueError(
            f"return_std, prediction_interval: {no_matrix}, and {m} residuals are too many for bands from the "
            f"residuals (at most {MOST_DENSE}, and {MOST_JACOBIAN:.2g} numbers in J); solver='cholesky' keeps a matrix"
        )
    plain = problem_of(solution.options, replace(setup, theta=solution.theta, penalty=None))
    rows = jacobian_at(plain, solution.options.jac, solution.theta).whole()[:-1].T.double()
    plain.close()
    is_weight = torch.zeros(n, dtype=torch.bool, device=rows.device)
    is_weight[setup.penalty.indices] = True
    alpha = setup.penalty.root**2
    rows_w = rows[:, is_weight]
    gram = rows_w @ rows_w.T / alpha
    gram.diagonal().add_(1.0)
    chol = torch.linalg.cholesky(gram)
    u, s, vt = torch.linalg.svd(torch.linalg.solve_triangular(chol, rows[:, ~is_weight], upper=False))
    k = int((s > n * EPSILON * s[:1]).sum())
    effects = u[:, :k], s[:k], vt.T
    inverse = torch.linalg.solve_triangular(chol, torch.eye(m).to(chol), upper=False)
    dof = float((inverse**2).sum() - ((inverse.T @ effects[0]) ** 2).sum())
    unobserved = float(result.n_residuals if result.n_observed is None else result.n_observed) - m
    known = replace(result, shrinkage=max(dof + unobserved, np.finfo(float).tiny) - (m + unobserved) + result.rank)
    return FunctionSpace(rows, is_weight, alpha, chol, effects, known)
