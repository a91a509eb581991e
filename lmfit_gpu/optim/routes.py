"""How a training loop differentiates: a route of its own for every group of residuals."""

from dataclasses import dataclass
from typing import Any

import torch

from lmfit_gpu.autodiff import choose_route
from lmfit_gpu.jacobian import Derivatives
from lmfit_gpu.optim.batch import BatchProblem
from lmfit_gpu.problem import Block, Problem

__all__ = ["derivatives_for"]


@dataclass(frozen=True)
class ByGroup:
    """The route of each group."""

    routes: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The routes in use."""
        return ", ".join(dict.fromkeys(route.name for route in self.routes))

    def __call__(self, problem: Problem, theta: torch.Tensor, block: Block, columns: torch.Tensor) -> torch.Tensor:
        """Write ∂values/∂theta into `columns`, shape (n, c), and return the values, shape (c,)."""
        return self.routes[block.group](problem, theta, block, columns)

    def passes(self, n_params: int) -> int:
        """Return the number of forward evaluations."""
        return max(route.passes(n_params) for route in self.routes)


def derivatives_for(problem: BatchProblem, theta: torch.Tensor, by_tensor: bool) -> Derivatives:
    """Return how the residuals of a batch are differentiated.

    Parameters
    ----------
    problem : BatchProblem
        A batch like those to come.
    theta : Tensor, shape (n_params,)
    by_tensor : bool
        For a solver that takes the rows of J tensor by tensor.
    """
    if by_tensor:
        return Derivatives.by_tensor(problem, theta)
    if len(problem.groups) == 1:
        return Derivatives(problem, choose_route(problem, theta))
    routes = tuple(choose_route(problem.only(index), theta) for index in range(len(problem.groups)))
    return Derivatives(problem, ByGroup(routes))  # type: ignore[arg-type]
