"""A Jacobian function given by the user: found to be numpy or torch by trying, and held against differences."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lmfit_gpu.constraints import ConstrainedModel
from lmfit_gpu.differences import start_differences
from lmfit_gpu.models import CALL_ERRORS, NumpyFunction, TorchFunction
from lmfit_gpu.problem import Block, Problem

__all__ = ["UserJacobian"]

JACOBIAN_RTOL = 0.05  # a user's column against differences: a wrong sign, factor or order is off by more


@dataclass(frozen=True)
class UserJacobian:
    """A Jacobian function given by the user, called like the model; returns (c, n)."""

    function: TorchFunction | NumpyFunction
    name = "user"

    @classmethod
    def choose(cls, function: Callable[..., Any], problem: Problem, theta: torch.Tensor) -> "UserJacobian":
        """Find out by trying whether the function is written in numpy or in torch."""
        order = getattr(problem.replicas[0], "order", None)
        if order is None:
            raise ValueError(
                "jac: a Jacobian function needs a model function; this model is a module or has a residual"
            )
        probe = problem.probe()
        chosen: TorchFunction | NumpyFunction = NumpyFunction(function, (), order)
        try:
            if probe.x.device.type != "cpu":
                raise TypeError("numpy does not read this device")
            model = probe.model  # the shape of what it returns is judged later: a wrong one is no reason to try torch
            chosen(model.all_parameters(theta) if isinstance(model, ConstrainedModel) else theta, probe.x, probe.y)
        except CALL_ERRORS:
            chosen = TorchFunction(function, (), order)
        jacobian = cls(chosen)
        jacobian.check(problem, theta, probe)
        return jacobian

    def check(self, problem: Problem, theta: torch.Tensor, probe: Block) -> None:
        """Hold the columns against 3-point differences on a probe of the rows.

        Raises
        ------
        ValueError
            If a column is off by more than 5 % and the rounding of the differences; the message names it.
        """
        differences = start_differences(problem, theta, "3-point")
        with torch.no_grad():
            n_values = problem.values(theta, probe).numel()
        columns, expected = theta.new_empty(theta.numel(), n_values), theta.new_empty(theta.numel(), n_values)
        try:
            values = self(problem, theta, probe, columns)
        except CALL_ERRORS as error:
            if str(error).startswith("jac:"):
                raise
            raise ValueError(f"jac: its call at the start failed: {type(error).__name__}: {error}") from error
        differences(problem, theta, probe, expected)
        rounding = 10 * torch.finfo(theta.dtype).eps * values.abs().max() / differences.resolution.to(theta)
        size = torch.linalg.vector_norm(expected, dim=1)
        off = torch.linalg.vector_norm(columns - expected, dim=1)
        wrong = off > JACOBIAN_RTOL * size + rounding * n_values**0.5
        if bool(wrong.any()):
            j = int(wrong.nonzero()[0, 0])
            name = problem.names[j] if j < len(problem.names) else f"parameter {j}"
            raise ValueError(
                f"jac: the column of {name!r} is not the derivative of the model at the start "
                f"(off by {float(off[j] / size[j]):.2g} of its size against 3-point differences)"
            )

    def passes(self, n_params: int) -> int:
        """Return the number of forward evaluations."""
        return 1

    def __call__(self, problem: Problem, theta: torch.Tensor, block: Block, columns: torch.Tensor) -> torch.Tensor:
        """Write ∂values/∂theta into `columns`, shape (n, c), and return the values, shape (c,)."""
        with torch.no_grad():
            values = problem.values(theta, block)
            jacobian = _of_free(self.function, theta, block)
        expected = (values.numel(), theta.numel())
        if jacobian.numel() != columns.numel() or jacobian.shape[-1] != expected[1]:
            raise ValueError(f"jac: returned shape {tuple(jacobian.shape)}; expected {expected}")
        columns.copy_(jacobian.reshape(expected).T)
        return values


def _of_free(function: TorchFunction | NumpyFunction, theta: torch.Tensor, block: Block) -> torch.Tensor:
    """Return the Jacobian by the free parameters: what the function gives for all of them, times ∂all/∂free."""
    model = block.model
    if not isinstance(model, ConstrainedModel):
        return torch.as_tensor(function(theta, block.x, block.y))
    constraints = model.constraints
    of_all = torch.as_tensor(function(model.all_parameters(theta), block.x, block.y))
    if of_all.ndim == 0 or of_all.shape[-1] != constraints.n_model:
        raise ValueError(f"jac: returned shape {tuple(of_all.shape)}; (n, {constraints.n_model}) is expected")
    if constraints.ties:
        return of_all @ constraints.derivative(theta)[: constraints.n_model].to(of_all)
    return of_all[..., torch.from_numpy(constraints.free[: constraints.n_model]).to(of_all.device)]
