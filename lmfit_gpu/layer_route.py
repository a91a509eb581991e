"""From layers to the Jacobian of a block of rows: every tensor by its layers where that is proven, else row by row.

:class:`Layers` is both a route of :mod:`lmfit_gpu.autodiff` that writes J, and the way to the rows of every tensor
(:class:`lmfit_gpu.layers.TensorRows`), from which a solver needs no J at all.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.func import jacrev, vmap

from lmfit_gpu.blocks import Block
from lmfit_gpu.factors import Factors, through
from lmfit_gpu.layer_rows import ExplicitRows, Factor, TensorRows
from lmfit_gpu.layers import capture, proven
from lmfit_gpu.models import CALL_ERRORS, ModuleModel, ResidualOf
from lmfit_gpu.problem import Problem
from lmfit_gpu.row_check import nearby
from lmfit_gpu.rows import each_tensor

__all__ = ["Layers", "module_of"]

PROVEN_ROWS = 8
ONLY_MODULES = "solver='ghost': only for a torch module of independent rows, without bounds, fixed or tied parameters"


def module_of(model: Any) -> ModuleModel | None:
    """Return the module whose free parameters theta is, or None: fixed and tied parameters stand between."""
    if isinstance(model, ResidualOf):
        model = model.model
    return model if isinstance(model, ModuleModel) else None


@dataclass(frozen=True)
class Layers:
    """Rows of J from the inputs and output gradients of layers.

    Parameters
    ----------
    by_layers : frozenset of str
        Tensors whose rows by layers are those by autograd.
    otherwise : callable (problem, theta) -> Route, optional
        What writes J where, from some block on, the layers do not tell all.
    """

    by_layers: frozenset[str]
    otherwise: Callable[[Problem, torch.Tensor], Any] | None = None
    _other: list[Any] = field(default_factory=list, repr=False, compare=False)

    name = "layers"

    @classmethod
    def choose(
        cls, problem: Problem, theta: torch.Tensor, otherwise: Callable[[Problem, torch.Tensor], Any] | None = None
    ) -> "Layers":
        """Return the route, with the tensors that a few rows have proven.

        Raises
        ------
        ValueError
            If the model is not a module whose rows are independent.
        """
        model = module_of(problem.replicas[0])
        if model is None or problem.coupled:
            raise ValueError(ONLY_MODULES)
        block = problem.probe(PROVEN_ROWS)
        names = tuple(model.slices)

        def values_of(parts: dict[str, torch.Tensor]) -> torch.Tensor:
            return problem.values(torch.cat([parts[name].reshape(-1) for name in names]), block)

        points = [model.split(point.detach()) for point in (theta, nearby(theta))]  # a zero may switch a use off
        found = [frozenset(proven(model.module, names, values_of, point, block.n_rows)) for point in points]
        return cls(found[0] & found[1], otherwise)

    def passes(self, n_params: int) -> int:
        """Return the number of forward evaluations."""
        return 1

    def __call__(self, problem: Problem, theta: torch.Tensor, block: Block, columns: torch.Tensor) -> torch.Tensor:
        """Write ∂values/∂theta into `columns`, shape (n, c), and return the values, shape (c,).

        Raises
        ------
        ValueError
            If a tensor is used otherwise than by layers, and there is no other route.
        """
        if self._other:
            return self._other[0](problem, theta, block, columns)
        model = module_of(block.model)
        if model is None:
            raise ValueError(ONLY_MODULES)
        captured = capture(
            model.module, tuple(model.slices), lambda: problem.values(theta.detach(), block), block.n_rows
        )
        if captured.unsupported or not self.by_layers.issuperset(model.slices):
            if self.otherwise is None:
                raise ValueError("layers: a tensor is used otherwise than by layers")
            self._other.append(self.otherwise(problem, theta))
            return self(problem, theta, block, columns)
        rows = captured.rows()
        for name, part in model.slices.items():
            rows[name].columns(out=columns[part])
        return captured.values.reshape(-1)

    def tensors(
        self, problem: Problem, theta: torch.Tensor, block: Block
    ) -> tuple[torch.Tensor, dict[str, TensorRows], torch.Tensor]:
        """Return r̃ (e,) of a block, the rows of J̃ of every tensor by name, and the values (c,)."""
        model = module_of(block.model)
        if model is None:
            raise ValueError(ONLY_MODULES)
        names = tuple(model.slices)
        theta = theta.detach()
        by_layers = [name for name in names if name in self.by_layers]
        captured = capture(model.module, by_layers, lambda: problem.values(theta, block), block.n_rows)
        r, factors = problem.surrogate(block, captured.values.reshape(-1))
        lost = [name for name in names if name in captured.unsupported or name not in self.by_layers]
        rows = {} if len(lost) == len(names) else captured.rows(_seeds(factors, block.n_rows, theta.dtype))
        for name, explicit in _row_by_row(problem, theta, block, lost).items():
            rows[name] = ExplicitRows(Factor(through(factors, explicit).T))
        return r, {name: rows[name] for name in names}, captured.values


def _seeds(factors: Factors, n_rows: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Return S as what :meth:`lmfit_gpu.layers.Captured.rows` takes, shape (k, n_rows, q)."""
    if factors is None:
        return None
    if factors.ndim == 3:
        return factors.permute(1, 0, 2).to(dtype)
    return torch.diag_embed(factors.reshape(n_rows, -1)).permute(1, 0, 2).to(dtype)


def _row_by_row(problem: Problem, theta: torch.Tensor, block: Block, names: list[str]) -> dict[str, torch.Tensor]:
    """Return the transposed Jacobian (n_t, c) of the values with respect to some tensors, by autograd."""
    if not names:
        return {}
    model = module_of(block.model)
    assert model is not None
    parts = model.split(theta)
    leaves = {name: parts[name].clone() for name in names}

    def values_of(some: dict[str, torch.Tensor], x: Any, y: Any, rows: slice) -> torch.Tensor:
        whole = torch.cat([some.get(name, part).reshape(-1) for name, part in parts.items()])
        return problem.values(whole, replace(block, rows=rows, x=x, y=y))

    def one(some: dict[str, torch.Tensor], x: Any, y: Any) -> torch.Tensor:
        alone = each_tensor(lambda part: part[None], (x, y))
        return values_of(some, alone[0], alone[1], slice(0, 1))

    try:
        in_dims = (None, 0, None if block.y is None else 0)
        found = vmap(jacrev(one), in_dims=in_dims)(leaves, block.x, block.y)
        return {name: j.reshape(-1, leaves[name].numel()).T for name, j in found.items()}
    except CALL_ERRORS:
        tracked = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
        with torch.enable_grad():
            values = values_of(tracked, block.x, block.y, block.rows)
        columns = {name: theta.new_empty(leaf.numel(), values.numel()) for name, leaf in tracked.items()}
        for i in range(values.numel()):
            grads = torch.autograd.grad(values[i], list(tracked.values()), retain_graph=True, materialize_grads=True)
            for name, grad in zip(tracked, grads, strict=True):
                columns[name][:, i] = grad.reshape(-1)
        return columns
