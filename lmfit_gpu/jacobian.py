r"""The Jacobian J = ∂r/∂θ at one point, block by block (with weights or a loss J̃ and r̃, see problem.surrogate).

:class:`Derivatives` chooses once per fit how J is computed (automatic differentiation, differences, the
user's function). :class:`Jacobian` is J at one point; it computes nothing until asked. Blocks are held as
*columns* (n + 1, c): the transposed block of J with the residuals r as the last row, the layout in which
LAPACK factors [J r] without a copy. J is kept between passes only while it is small (:data:`KEEP_BYTES`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lmfit_gpu.autodiff import Route, choose_route, jacobian_vector, vector_jacobian
from lmfit_gpu.box import nearly_on
from lmfit_gpu.differences import Differences, start_differences
from lmfit_gpu.factors import Factors, back, through
from lmfit_gpu.layer_blocks import joined, on_device
from lmfit_gpu.layer_route import ONLY_MODULES, Layers
from lmfit_gpu.layer_rows import TensorRows
from lmfit_gpu.problem import Block, Problem
from lmfit_gpu.rows import PairwiseTree, leaf_slices
from lmfit_gpu.user_jacobian import UserJacobian

__all__ = ["Derivatives", "Jacobian", "TensorSystem"]

KEEP_BYTES = 128 * 2**20
MANY_PARAMS = 1000  # beyond, a pass for the curvature costs more than the trials it saves
# Share of the step over which the second derivative along it is taken (Transtrum et al. use 0.1 as well): truncation
# grows with it, rounding of the residuals with its inverse square.
CURVATURE_STEP = 0.1
AUTOMATIC = "differences"
JACOBIANS = ("auto", "autograd", AUTOMATIC, "2-point", "3-point", "cs")


@dataclass(frozen=True)
class Derivatives:
    """How a fit computes its Jacobian.

    Parameters
    ----------
    problem : Problem
    route : Route, Differences or UserJacobian
    finer : Differences or None
        What to change to before a stop is believed.
    is_renewed : bool
        Whether the steps were searched at this point.
    """

    problem: Problem
    route: Route | Differences | UserJacobian
    finer: Differences | None = None
    is_renewed: bool = False

    @classmethod
    def by_tensor(cls, problem: Problem, theta: torch.Tensor) -> "Derivatives":
        """Return those of a solver that takes the rows of J tensor by tensor.

        Raises
        ------
        ValueError
            If the model is not a module of independent rows, or there are bounds.
        """
        if problem.bounds is not None:
            raise ValueError(ONLY_MODULES)
        return cls(problem, Layers.choose(problem, theta))

    @classmethod
    def choose(cls, problem: Problem, jac: str | Callable[..., Any], theta: torch.Tensor) -> "Derivatives":
        """Choose the route for a problem.

        Parameters
        ----------
        problem : Problem
        jac : {"auto", "autograd", "differences", "2-point", "3-point", "cs"} or callable
            "auto" is autograd for torch models and differences for numpy ones; "differences" starts with
            2-point and changes to 3-point near the solution.
        theta : Tensor, shape (n_params,)
            The start.

        Raises
        ------
        ValueError
            For autograd of a numpy model, or a scheme that does not work for the model.
        """
        if not callable(jac) and jac not in JACOBIANS:
            raise ValueError(f"jac: got {jac!r}; allowed are {JACOBIANS} or a callable")
        if callable(jac):
            return cls(problem, UserJacobian.choose(jac, problem, theta))
        if jac == "auto":
            jac = "autograd" if problem.differentiable else AUTOMATIC
        if jac == AUTOMATIC:
            coarse = start_differences(problem, theta, "2-point")
            return cls(problem, coarse, finer=start_differences(problem, theta, "3-point"))
        if jac != "autograd":
            return cls(problem, start_differences(problem, theta, jac))
        if not problem.differentiable and getattr(problem.replicas[0], "model", problem.replicas[0]).differentiable:
            raise ValueError("jac='autograd': a tied parameter is not in torch; use 'auto', or write the tie in torch")
        if not problem.differentiable:
            raise ValueError("jac='autograd': the model is written in numpy; use 'auto', '2-point', '3-point' or 'cs'")
        return cls(problem, choose_route(problem, theta))

    @property
    def is_autograd(self) -> bool:
        """Whether J is by automatic differentiation (not by differences, not the user's)."""
        return not isinstance(self.route, (Differences, UserJacobian))

    @property
    def name(self) -> str:
        """The route in one word, for reports."""
        return self.route.name

    def refined(self) -> "Derivatives | None":
        """Return the finer derivatives that must confirm a stop, or None when these are the finest."""
        return None if self.finer is None else replace(self, route=self.finer, finer=None)

    def renewed_at(self, theta: torch.Tensor) -> "Derivatives | None":
        """Return differences with steps searched anew, next to a bound; None where that is not called for.

        A model may jump on a bound (x**c at x = 0 and c = 0). The norms of a J seen from there make steps next to it so
        short that they show nothing.
        """
        if self.is_renewed or not isinstance(self.route, Differences) or not nearly_on(theta, self.problem.bounds):
            return None
        return replace(self, route=start_differences(self.problem, theta, self.route.scheme), is_renewed=True)

    def relative_error(self, column_norms: torch.Tensor, value_norm: float) -> float:
        """Return the relative error of the columns of J; 0 stands for the rounding of the solver."""
        return self.route.relative_error(column_norms, value_norm) if isinstance(self.route, Differences) else 0.0

    def at(self, theta: torch.Tensor) -> "Jacobian":
        """Return J at a point."""
        return Jacobian(self, theta)

    def adapted(
        self, theta: torch.Tensor, value_norm: float, residual_norm: float, column_norms: torch.Tensor
    ) -> "Derivatives":
        """Return the same derivatives with difference steps for another point."""
        norms = (value_norm, residual_norm, column_norms)
        bounds = self.problem.bounds
        finer = None if self.finer is None else self.finer.adapted(theta, *norms, bounds)
        route = self.route.adapted(theta, *norms, bounds) if isinstance(self.route, Differences) else self.route
        return replace(self, route=route, finer=finer, is_renewed=False)


@dataclass(frozen=True)
class TensorSystem:
    """r̃ (m,), the rows of J̃ of every tensor, the penalty α_t of each, and θ."""

    tensors: Sequence[TensorRows]
    residuals: torch.Tensor
    alphas: Sequence[float]
    theta: torch.Tensor


class Jacobian:
    """J and r at one point θ of a problem; computes nothing until asked.

    Parameters
    ----------
    derivatives : Derivatives
    theta : Tensor, shape (n_params,)
    """

    def __init__(self, derivatives: Derivatives, theta: torch.Tensor) -> None:
        self.derivatives = derivatives
        self.problem = derivatives.problem
        self.theta = theta
        self.nfev = 0
        self._broken: dict[int, int] = {}
        problem = self.problem
        item = torch.finfo(theta.dtype).bits // 8
        self.keeps = problem.n_equations * (problem.n_params + 1) * item <= KEEP_BYTES
        self._kept: dict[int, torch.Tensor] = {}
        self._repairing: Differences | None = None

    @property
    def can_accelerate(self) -> bool:
        """Whether a second directional derivative costs less than a linearisation.

        Without a kept J it takes the point behind as well, which may be outside the bounds.
        """
        if self.problem.curves:
            return False
        few = self.problem.n_params <= MANY_PARAMS
        return few and (self.keeps or (self.makes_products and self.problem.bounds is None))

    @property
    def makes_products(self) -> bool:
        """Whether J v and Jᵀu need no J: by autograd, not for differences, a user's J, or a repaired one."""
        return self.derivatives.is_autograd and self._repairing is None

    def columns(self, block: Block) -> torch.Tensor:
        """Return [J r]ᵀ of a block, shape (n + 1, c)."""
        if block.index in self._kept:
            return self._kept[block.index]
        theta = self.theta.to(block.device)
        part = self.problem.equations(block)
        columns = theta.new_empty(theta.numel() + 1, part.stop - part.start)
        if block.penalty is not None:
            columns[:-1], columns[-1] = block.penalty.columns(theta), block.penalty.residual(theta)
        else:
            self._fill(theta, block, columns)
        if self.keeps:
            self._kept[block.index] = columns
        return columns

    def _fill(self, theta: torch.Tensor, block: Block, columns: torch.Tensor) -> None:
        """Write [J r]ᵀ of a block of rows."""
        target, n_values = columns[:-1], self.problem.n_values(block)
        of_values = target if n_values == target.shape[1] else target.new_empty(len(target), n_values)
        values = self.derivatives.route(self.problem, theta, block, of_values)
        if self._repairing is not None:
            self._repair(theta, block, of_values)
        columns[-1], factors = self.problem.surrogate(block, values)
        if factors is not None and factors.ndim == 1:
            target *= factors
        elif factors is not None:
            target.copy_(through(factors, of_values))

    def reduce(self, leaf: Callable[[torch.Tensor], Any], combine: Callable[[Any, Any], Any]) -> Any:
        """Reduce all blocks: ``leaf`` of every leaf of [J r]ᵀ, combined pairwise in a fixed order.

        Parameters
        ----------
        leaf : callable (columns (n + 1, l)) -> result
            Runs on the block's device, in its thread.
        combine : callable (left, right) -> result
        """
        self._count_pass()
        cut = self.problem.leaf_per_row

        def leaves(block: Block) -> list[Any]:
            columns = self.columns(block)
            return [leaf(columns[:, part]) for part in leaf_slices(columns.shape[1], cut)]

        tree = PairwiseTree(combine)
        for results in self.problem.map_blocks(leaves):
            for result in results:
                tree.push(result)
        return tree.result()

    def blocks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (r (c,), J (c, n)) block by block, in the order of the rows."""
        self._count_pass()
        for columns in self.problem.map_blocks(self.columns):
            yield columns[-1], columns[:-1].T

    def whole(self) -> torch.Tensor:
        """Return [J r]ᵀ of all rows, shape (n + 1, m), on the first device: 8 m (n + 1) bytes in float64."""
        self._count_pass()
        problem = self.problem
        columns = self.theta.new_empty(problem.n_params + 1, problem.n_equations)
        start = 0
        for part in problem.map_blocks(self.columns):
            stop = start + part.shape[1]
            columns[:, start:stop] = part
            start = stop
        return columns

    def tensor_rows(self) -> TensorSystem:
        """Return r̃ and the rows of J̃ of every tensor of parameters, by layers; J is not formed.

        Raises
        ------
        ValueError
            If the route is not by layers.
        """
        self._count_pass()
        route = self.derivatives.route
        if not isinstance(route, Layers):
            raise ValueError(ONLY_MODULES)

        def of_block(block: Block) -> tuple[torch.Tensor, dict[str, TensorRows]] | None:
            if block.penalty is not None:
                return None
            r, rows, _ = route.tensors(self.problem, self.theta.to(block.device), block)
            first = self.problem.device
            return (r, rows) if block.device == first else (r.to(first), on_device(rows, first))

        found = [part for part in self.problem.map_blocks(of_block) if part is not None]
        shared: dict[Any, Any] = {}
        tensors = [joined([rows[name] for _, rows in found], shared) for name in found[0][1]]
        alphas = self.problem.alphas or (0.0,) * len(tensors)
        return TensorSystem(tensors, torch.cat([r for r, _ in found]), alphas, self.theta)

    def matvec(self, v: torch.Tensor) -> torch.Tensor:
        """Return J v, shape (m,), on the first device."""
        self._count_product()

        def product(block: Block) -> torch.Tensor:
            if block.index in self._kept or not self.makes_products:
                return v.to(block.device, self.theta.dtype) @ self.columns(block)[:-1]
            theta = self.theta.to(block.device)
            return through(self._factors(theta, block), jacobian_vector(self.problem, theta, block, v.to(theta)))

        return torch.cat([part.to(self.problem.device) for part in self.problem.map_blocks(product)])

    def rmatvec(self, u: torch.Tensor) -> torch.Tensor:
        """Return Jᵀ u, shape (n,), in float64 on the first device (a kept J: by leaves, like every reduction)."""
        self._count_product()
        return self._sum_rmatvec(lambda block: u[self.problem.equations(block)].to(block.device))

    def normal(self, v: torch.Tensor) -> torch.Tensor:
        """Return JᵀJ v, shape (n,), in float64 on the first device, by one pass over the blocks."""
        self._count_product(2)

        def product(block: Block) -> list[torch.Tensor]:
            theta = self.theta.to(block.device)
            along = v.to(theta)
            if not self.makes_products or block.index in self._kept:
                columns = self.columns(block)[:-1]
                slices = leaf_slices(columns.shape[1], self.problem.leaf_per_row)
                parts = [columns[:, part].contiguous().double() for part in slices]
                return [part @ (along.double() @ part) for part in parts]
            factors = self._factors(theta, block)
            ahead = through(factors, jacobian_vector(self.problem, theta, block, along))
            return [vector_jacobian(self.problem, theta, block, back(factors, ahead)).double()]

        return self._sum(product)

    def gradient(self) -> tuple[torch.Tensor, float]:
        """Return Jᵀr, shape (n,), float64, and ‖r‖, by one backward pass a block; J is neither needed nor kept."""
        self.nfev += 1

        def product(block: Block) -> list[torch.Tensor]:
            leaf = self.theta.to(block.device).clone().requires_grad_()
            values = self.problem.values(leaf, block)
            r, factors = self.problem.surrogate(block, values.detach())
            (g,) = torch.autograd.grad(values, leaf, back(factors, r), materialize_grads=True)
            return [torch.cat((g.double(), (r.double() @ r.double())[None]))]

        total = self._sum(product)
        return total[:-1], float(total[-1]) ** 0.5

    def _count_pass(self) -> None:
        if not self._kept:
            self.nfev += self.derivatives.route.passes(self.problem.n_params)

    def _count_product(self, passes: int = 1) -> None:
        if not self._kept:
            self.nfev += passes if self.makes_products else self.derivatives.route.passes(self.problem.n_params)

    def curvature(self, v: torch.Tensor) -> torch.Tensor:
        """Return Jᵀ r_vv, shape (n,), where r_vv is the second derivative of r along v.

        From a kept J, r_vv ≈ 2 ((r(θ + hv) − r(θ)) / h − Jv) / h by one evaluation; else
        (r(θ + hv) − 2 r(θ) + r(θ − hv)) / h². Nested forward mode gives the same trials at five times the cost
        (NIST StRD, 54 runs). In a box r(θ − hv) may not exist: Jv is computed for the first formula.
        """
        passes = self.derivatives.route.passes(self.problem.n_params)
        boxed = self.problem.bounds is not None
        self.nfev += 1 if self._kept else 4 if self.makes_products else 1 + 2 * passes if boxed else 3 + passes

        def second(block: Block) -> torch.Tensor:
            theta = self.theta.to(block.device)
            step = CURVATURE_STEP * v.to(theta)
            with torch.no_grad():
                ahead = self._residual(self.problem.inside(theta + step), block)
            if block.index in self._kept or boxed:
                here, along = self._residual_and_product(theta, block, step)
                return (ahead - here - along) * (2 / CURVATURE_STEP**2)
            with torch.no_grad():
                here = self._residual(theta, block)
                behind = self._residual(theta - step, block)
            return (ahead - 2 * here + behind) / CURVATURE_STEP**2

        return self._sum_rmatvec(second)

    def _residual_and_product(
        self, theta: torch.Tensor, block: Block, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if block.index in self._kept or not self.makes_products:
            columns = self.columns(block)
            return columns[-1], v @ columns[:-1]
        with torch.no_grad():
            here = self._residual(theta, block)
        return here, through(self._factors(theta, block), jacobian_vector(self.problem, theta, block, v))

    def _residual(self, theta: torch.Tensor, block: Block) -> torch.Tensor:
        return self.problem.surrogate(block, self.problem.values(theta, block))[0]

    def _sum_rmatvec(self, rows: Callable[[Block], torch.Tensor]) -> torch.Tensor:
        cut = self.problem.leaf_per_row

        def products(block: Block) -> list[torch.Tensor]:
            u = rows(block)
            if block.index in self._kept or not self.makes_products:
                columns = self.columns(block)[:-1]
                parts = leaf_slices(columns.shape[1], cut)
                return [columns[:, part].contiguous().double() @ u[part].double() for part in parts]
            theta = self.theta.to(block.device)
            u = back(self._factors(theta, block), u.to(theta.dtype))
            return [vector_jacobian(self.problem, theta, block, u).double()]

        return self._sum(products)

    def _sum(self, products: Callable[[Block], list[torch.Tensor]]) -> torch.Tensor:
        tree = PairwiseTree(torch.add)
        for parts in self.problem.map_blocks(products):
            for part in parts:
                tree.push(part.to(self.problem.device))
        return tree.result()

    def _factors(self, theta: torch.Tensor, block: Block) -> Factors:
        """Return S of a block's J̃ = S J, None in the plain case; a loss costs an evaluation."""
        if self.problem.is_plain or block.penalty is not None:
            return None
        with torch.no_grad():
            return self.problem.surrogate(block, self.problem.values(theta, block))[1]

    def repaired(self) -> "Jacobian":
        """Return J with entries that automatic differentiation left non-finite taken by 3-point differences.

        The derivative of ``x**c`` at 0, or of ``sqrt`` of a deviance at 0, is NaN by the chain rule although
        the model is smooth there. Blocks with such entries cost 2n + 1 more evaluations (counted as a whole pass).
        """
        fixed = Jacobian(self.derivatives, self.theta)
        fixed.nfev = self.nfev + 2 * self.problem.n_params + 1
        fixed._repairing = start_differences(self.problem, self.theta, "3-point")
        return fixed

    @property
    def n_repaired(self) -> int:
        """Entries of J taken by differences so far."""
        return sum(self._broken.values())

    def _repair(self, theta: torch.Tensor, block: Block, columns: torch.Tensor) -> None:
        broken = ~torch.isfinite(columns)
        if not bool(broken.any()) or self._repairing is None:
            return
        differences = torch.empty_like(columns)
        self._repairing(self.problem, theta, block, differences)
        columns[broken] = differences[broken]
        self._broken[block.index] = int(broken.sum())

    def first_non_finite(self) -> tuple[int, int] | None:
        """Return (row, parameter) of the first non-finite entry of J, or None."""
        for columns, block in zip(self.problem.map_blocks(self.columns), self.problem.row_blocks(), strict=False):
            broken = np.argwhere(~np.isfinite(columns[:-1].T.cpu().numpy()))
            if len(broken):
                return block.start + int(broken[0][0]) // (self.problem.per_row or 1), int(broken[0][1])
        return None
