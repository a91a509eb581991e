r"""Many fits of one small torch model together: of other data, with other parameters held, from other starts.

Values and Jacobians of all fits come from one call, by ``vmap`` over θ. Each fit takes damped Gauss-Newton steps with a
λ and a scale D of its own,

.. math:: p = -D^{-1} (D^{-1} J^T J D^{-1} + \lambda I)^{-1} D^{-1} J^T r,

λ a tenth after a step that lowers the cost, ten times after one that does not (Marquardt, J. SIAM 11 (1963) 431); what
has converged leaves the batch. A fit that does not is left to others, and so is one whose J is close to deficient:
nothing here is believed but convergence to a point that JᵀJ determines.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.func import jacfwd, vmap

from lmfit_gpu.autodiff import forward_mode
from lmfit_gpu.models import CALL_ERRORS
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.solution import Solution
from lmfit_gpu.warning_filters import warnings_here

__all__ = ["Batch"]

MOST_NUMBERS = 4_000_000  # of the Jacobians of a batch: 32 MB
ITERATIONS = 60
START_DAMPING, LEAST_DAMPING, MOST_DAMPING = 1e-4, 1e-14, 1e12
UP, DOWN = 10.0, 0.1
GAINED = 1e-14  # of the cost: what the step of a converged fit still promises
AT_ROUNDING = 1e-10  # the same where rounding lets no step succeed
LEAST_EIGENVALUE = 1e-12  # of JᵀJ with columns of length 1: below, the condition of J exceeds 1e6


class Batch:
    """Fits of a problem.

    Parameters
    ----------
    problem : LeastSquaresProblem
        One that :meth:`takes` accepts.
    """

    def __init__(self, problem: LeastSquaresProblem) -> None:
        block = problem.read(0, slice(0, problem.rows.n_samples), 0)
        zeros = torch.zeros(problem.n_residuals, dtype=torch.float64, device=problem.device)
        frequency, inverse_sigma = block.spread(zeros)
        self.inverse_sigma = torch.ones_like(zeros) if inverse_sigma is None else inverse_sigma
        self.factor = self.inverse_sigma if frequency is None else self.inverse_sigma * frequency**0.5
        self.target = -block.residual(zeros)

        def values(theta: torch.Tensor) -> torch.Tensor:
            return problem.values(theta, block)

        self._values, self._jacobians = vmap(values), vmap(jacfwd(values))
        self._most = max(1, MOST_NUMBERS // (problem.n_residuals * problem.n_params))
        self._device = problem.device

    @staticmethod
    def takes(solution: Solution) -> bool:
        """Return whether the fits of a solution can be made so.

        A torch model of independent rows in float64 on one device, without constraints, penalty or loss, and small.
        """
        problem, setup = solution.problem, solution.setup
        plain = setup.constraints is None and setup.penalty is None and problem.loss is None
        small = problem.n_residuals * problem.n_params <= MOST_NUMBERS and len(problem.devices) == 1
        return plain and small and problem.differentiable and not problem.coupled and problem.dtype == torch.float64

    def fit(
        self,
        theta: torch.Tensor,
        free: torch.Tensor | None = None,
        target: torch.Tensor | None = None,
        factor: torch.Tensor | None = None,
    ) -> Iterator[tuple[np.ndarray, float, bool]]:
        """Yield (θ, cost, converged) of each fit.

        Parameters
        ----------
        theta : Tensor, shape (B, n)
            Starts.
        free : Tensor, shape (B, n), optional
            1 for what is fitted, 0 for what is held; default: all is fitted.
        target, factor : Tensor, shape (B, m), optional
            y and √w/σ of each fit; default: those of the problem.
        """
        free = torch.ones_like(theta) if free is None else free
        for first in range(0, len(theta), self._most):
            part = slice(first, first + self._most)
            some = [None if given is None else given[part].to(self._device) for given in (target, factor)]
            start, moves = theta[part].to(self._device), free[part].to(self._device)
            try:
                with warnings_here("ignore"), forward_mode():
                    ends: Any = self._minimized(start.clone(), moves, *some)
            except CALL_ERRORS:  # vmap has no rule for something in the model
                nothing = torch.full((len(start),), torch.inf, dtype=torch.float64)
                ends = start, nothing, nothing < 0
            ends = (ends[0].cpu().numpy(), ends[1].tolist(), ends[2].tolist())
            yield from zip(*ends, strict=True)

    def _minimized(
        self, theta: torch.Tensor, free: torch.Tensor, target: torch.Tensor | None, factor: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return θ (B, n), costs (B,) and which have converged."""

        def of(at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return (self.target if target is None else target[at]), (self.factor if factor is None else factor[at])

        def costs(trial: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            y, root = of(at)
            cost = 0.5 * ((self._values(trial) - y) * root).square().sum(1)
            return torch.where(torch.isfinite(cost), cost, torch.inf)

        every = torch.arange(len(theta), device=theta.device)
        cost = costs(theta, every)
        damping, scale = torch.full_like(cost, START_DAMPING), torch.zeros_like(theta)
        gram, gradient = theta.new_zeros(*theta.shape, theta.shape[1]), torch.zeros_like(theta)
        done = ~torch.isfinite(cost)
        converged, stale = torch.zeros_like(done), torch.ones_like(done)  # stale: J is not of the point
        for _ in range(ITERATIONS):
            at = every[stale & ~done]
            if at.numel():
                y, root = of(at)
                r = (self._values(theta[at]) - y) * root
                jacobian = self._jacobians(theta[at]) * root[..., None] * free[at][:, None, :]
                gram[at] = jacobian.mT @ jacobian
                gradient[at] = (jacobian.mT @ r[..., None])[..., 0]
                scale[at] = torch.maximum(scale[at], torch.linalg.vector_norm(jacobian, dim=1))
                stale[at] = False
            at = every[~done]
            if not at.numel():
                break
            d = torch.where(scale[at] > 0, scale[at], 1.0)
            scaled, g = gram[at] / d[:, :, None] / d[:, None, :], gradient[at] / d
            chol, info = torch.linalg.cholesky_ex(scaled + torch.diag_embed(damping[at, None] + (1 - free[at])))
            q = -torch.cholesky_solve(g[..., None], chol)[..., 0]
            solved = (info == 0) & torch.isfinite(q).all(1)
            q = torch.where(solved[:, None], q, 0.0)
            promised = -(g * q).sum(1) - 0.5 * (q * (scaled @ q[..., None])[..., 0]).sum(1)
            trial = theta[at] + q / d * free[at]
            trial_cost = costs(trial, at)
            better = trial_cost < cost[at]
            ended = solved & (promised <= GAINED * cost[at]) & (damping[at] <= START_DAMPING)
            ended |= solved & ~better & (promised <= AT_ROUNDING * cost[at]) & (damping[at] <= START_DAMPING * UP)
            theta[at[better]], cost[at[better]] = trial[better], trial_cost[better]
            stale[at[better]] = True
            damping[at] = (damping[at] * torch.where(better, DOWN, UP).to(damping)).clamp_min(LEAST_DAMPING)
            converged[at] |= ended
            done[at] |= ended | (damping[at] > MOST_DAMPING)
        return theta, cost, converged & _is_determined(gram, free)


def _is_determined(gram: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
    """Return where JᵀJ, shape (B, n, n), is far from singular in what is free."""
    lengths = gram.diagonal(dim1=1, dim2=2).sqrt()
    lengths = torch.where(lengths > 0, lengths, 1.0)
    scaled = gram / lengths[:, :, None] / lengths[:, None, :] + torch.diag_embed(1 - free)
    finite = torch.isfinite(scaled).all(2).all(1)
    scaled = torch.where(finite[:, None, None], scaled, 0.0)
    return finite & (torch.linalg.eigvalsh(scaled)[:, 0] > LEAST_EIGENVALUE)
