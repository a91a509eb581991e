"""A fitted estimator with its data, at its solution: what intervals, bands and pictures are computed from.

An estimator keeps references to the data of its fit, which a pickle or a saved file does not hold; they are then given
again. Whether they are the same is known from the cost: at the fitted parameters it must be that of the fit.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from lmfit_gpu.arguments import check_data
from lmfit_gpu.fitting import problem_of
from lmfit_gpu.jacobian import Jacobian
from lmfit_gpu.preparation import Data, Setup, targets_of
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.result import Result
from lmfit_gpu.rows import as_tensor
from lmfit_gpu.sandwich import jacobian_at

__all__ = ["Solution", "solution_of"]

SAME_COST = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative: another order of the rows rounds otherwise
EXACT = {torch.float64: 1e-15, torch.float32: 1e-9}  # of Σ w (y/σ)²: an exact fit has a cost that is rounding


@dataclass(frozen=True)
class Solution:
    """A fit at its solution.

    Parameters
    ----------
    setup : Setup
        With the rows of the fit.
    theta : Tensor, shape (n_free,)
        The free parameters.
    result : Result
        Of all parameters.
    options : LMRegressor
    data : Data
        The rows as they were checked.
    """

    setup: Setup
    theta: torch.Tensor
    result: Result
    options: Any
    data: Data

    @cached_property
    def problem(self) -> LeastSquaresProblem:
        """The problem that was fitted: weighted, with its loss and penalty."""
        return problem_of(self.options, replace(self.setup, theta=self.theta))

    @cached_property
    def plain(self) -> LeastSquaresProblem:
        """The same without the loss: r = √w (prediction − target)/σ."""
        if self.problem.loss is None:
            return self.problem
        return problem_of(self.options, replace(self.setup, theta=self.theta), plain=True)

    def jacobian(self, plain: bool = False) -> Jacobian:
        """Return J by the free parameters, by the finest derivatives of the fit; `plain`: without the loss."""
        return jacobian_at(self.plain if plain else self.problem, self.options.jac, self.theta)

    @property
    def free(self) -> np.ndarray:
        """Mask of the free parameters among all, shape (n_all,)."""
        constraints = self.setup.constraints
        return np.ones(len(self.result.theta), dtype=bool) if constraints is None else constraints.free

    def close(self) -> None:
        """End the threads of the problems."""
        for name in ("problem", "plain"):
            if name in self.__dict__:
                self.__dict__[name].close()


def solution_of(estimator: Any, X: Any = None, y: Any = None, sample_weight: Any = None, sigma: Any = None) -> Solution:
    """Return a fitted estimator at its solution.

    Parameters
    ----------
    estimator : LMRegressor
        Fitted.
    X, y, sample_weight, sigma
        The data of the fit, where the estimator has them no more; None: those it keeps.

    Raises
    ------
    ValueError
        If there are no data, or they are not those of the fit.
    """
    data = getattr(estimator, "_data", None)
    if X is not None:
        data = check_data(estimator, X, y, sample_weight, sigma, reset=False)
    elif y is not None or sample_weight is not None or sigma is not None:
        raise ValueError("X: got None with other data; give all that fit was given, or nothing")
    elif data is None:
        raise ValueError(
            "X, y: the estimator has no data (a pickle or a saved file holds none); give those of the fit as X=, y=, "
            "and sample_weight= and sigma= where fit had them"
        )
    setup, result = estimator._setup, estimator.result_
    rows = replace(setup.rows, X=as_tensor(data.X), y=targets_of(data.y), weights=data.weights)
    setup = replace(setup, rows=rows)
    theta = result.theta if setup.constraints is None else result.theta[setup.constraints.free]
    found = Solution(setup, torch.from_numpy(theta.copy()).to(setup.theta), result, estimator, data)
    _check_same(found)
    return found


def _check_same(solution: Solution) -> None:
    result, problem = solution.result, solution.problem
    cost = problem.cost(solution.theta)
    slack = SAME_COST[problem.dtype] * abs(result.cost) + EXACT[problem.dtype] * problem.target_norm**2
    if problem.n_residuals != result.n_residuals or not abs(cost - result.cost) <= slack:
        hint = "; some were held out for early stopping" if "held out" in result.used else ""
        raise ValueError(
            f"X, y: not the data, or not the options, of the fit: {problem.n_residuals} residuals with a cost of "
            f"{cost:.6g}, it had {result.n_residuals} and {result.cost:.6g}{hint}"
        )
