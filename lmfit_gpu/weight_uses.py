r"""Jacobian of a network that the residual differentiates with respect to its inputs (a differential equation).

A residual such as :math:`u_{xx} + u_{yy} + f` uses the weight W of a linear layer z = W a + b many times: in the
network itself, and in each derivative of it, where :math:`W^T \delta` carries the output gradient δ back. Each of these
*uses* is a product with W or with Wᵀ, and differentiating a use gives uses again. The derivative of the value v of a
row is the sum over the uses k in that row,

.. math:: \frac{\partial v}{\partial W} = \sum_k \delta_k\, a_k^T,
          \qquad \frac{\partial v}{\partial b} = \sum_k \delta_k,

with a_k what W met and :math:`\delta_k` the gradient of v with respect to the product (for a use of Wᵀ the two change
places). So one evaluation, with the user's own differentiation inside, and one backward pass for each output of a row
give the J of all rows: the products with W stay matrix products of all rows, and J is written once per use. One copy
of W per row gives the same numbers, but every use then reads all copies.

Weights are found by what they are: views of θ that reach ``torch.nn.functional.linear``. Entries of θ that are in no
such view, a coefficient of the equation for instance, are done by one directional derivative each, if there are few.

The idea is that of per-example gradients from layer inputs and output gradients: Goodfellow, *Efficient per-example
gradient computations* (2015), arXiv:1510.01799; here with the uses that derivatives make.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lmfit_gpu.problem import Block, Problem

__all__ = ["WeightUses"]

FEW_ENTRIES = 32  # that one directional derivative each is worth, beside about ten uses of every layer
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3}  # of sums over a block
ROW_WEIGHTS = (0.5, 1.5)  # u of the check Jᵀu: unequal, so that rows that cancel are not taken for rows without effect

Place = tuple[int, int]  # start and stop in θ
Along = Callable[[Problem, torch.Tensor, Block, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Use:
    """A product with a weight: where in θ the weight and the bias are, None for one that is not free."""

    weight: Place | None
    bias: Place | None = None
    is_transposed: bool = False

    def without_bias(self) -> "Use":
        """Return the use that a derivative along a direction makes."""
        return replace(self, bias=None)

    def reversed(self) -> "Use":
        """Return the use that the gradient makes."""
        return Use(self.weight, None, not self.is_transposed)


class Tape:
    """The uses that the last backward pass met.

    Parameters
    ----------
    theta : Tensor, shape (n,)
        The leaf of which weights are views.
    """

    def __init__(self, theta: torch.Tensor) -> None:
        self.theta = theta
        self.shapes: dict[Place, torch.Size] = {}  # of the weights and biases
        self.weights: dict[Place, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # a (..., in), δ (..., out)
        self.biases: dict[Place, list[torch.Tensor]] = {}  # δ (..., out)
        self.is_running = False

    def place(self, tensor: torch.Tensor | None) -> Place | None:
        """Return where in θ a tensor is: a contiguous view of it; None for any other."""
        if tensor is None or tensor._base is not self.theta or not tensor.is_contiguous():
            return None
        start = int(tensor.storage_offset()) - int(self.theta.storage_offset())
        place = start, start + tensor.numel()
        self.shapes[place] = tensor.shape
        return place

    def record(self, use: Use, a: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Add a use, and return its gradients with respect to the weight and the bias, summed over rows."""
        of_weight = of_bias = None
        if use.weight is not None:
            met, out = (delta, a) if use.is_transposed else (a, delta)
            self.weights.setdefault(use.weight, []).append((met, out))
            of_weight = out.flatten(0, -2).T @ met.flatten(0, -2)
        if use.bias is not None:
            self.biases.setdefault(use.bias, []).append(delta)
            of_bias = delta.flatten(0, -2).sum(0)
        return of_weight, of_bias

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record the uses of one backward pass."""
        self.weights, self.biases = {}, {}
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False


class Product(torch.autograd.Function):
    """A W^T + b, or A W for a use of the transposed: its gradient is recorded, and is such a product again.

    `like` has the batch axes of vmap that the result must have: a cotangent or a direction may be the same for all
    rows, and would then be one use for all of them.
    """

    @staticmethod
    def forward(
        a: torch.Tensor, like: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tape: Tape, use: Use
    ) -> torch.Tensor:
        """Return the product, shape (..., out)."""
        if use.is_transposed:
            return a @ weight
        return a @ weight.T if bias is None else a @ weight.T + bias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep what the gradient needs."""
        a, _, weight, _, ctx.tape, ctx.use = inputs
        ctx.set_materialize_grads(False)  # no tangent of W: None, not zeros
        ctx.save_for_backward(a, weight)
        ctx.save_for_forward(a, weight)

    @staticmethod
    def backward(ctx: Any, delta: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient with respect to a; with respect to W and b only in the pass that is recorded."""
        if delta is None:
            return (None,) * 6
        a, weight = ctx.saved_tensors
        of_a = of_weight = of_bias = None
        if ctx.tape.is_running:
            of_weight, of_bias = ctx.tape.record(ctx.use, a.detach(), delta.detach())
        if ctx.needs_input_grad[0]:
            of_a = Product.apply(delta, _batch(a), weight, None, ctx.tape, ctx.use.reversed())
        return of_a, None, of_weight, of_bias, None, None

    @staticmethod
    def jvp(ctx: Any, along: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Return the derivative along a direction of a, a use of W as well."""
        a, weight = ctx.saved_tensors
        if any(tangent is not None for tangent in rest[1:3]):
            raise ValueError("weight uses: forward mode with respect to a weight")
        return Product.apply(along, _batch(a), weight, None, ctx.tape, ctx.use.without_bias())

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[torch.Tensor, int]:
        """Return the product for all of a batch, its axis first: the outermost vmap is that over rows."""
        a, like, *rest = inputs
        if in_dims[2] is not None or in_dims[3] is not None:
            raise ValueError("weight uses: vmap over a weight")
        like = like if in_dims[1] is None else like.movedim(in_dims[1], 0)
        a = a.expand(info.batch_size, *a.shape) if in_dims[0] is None else a.movedim(in_dims[0], 0)
        return Product.apply(a, like, *rest), 0


class Watching(TorchFunctionMode):
    """Turns every linear layer whose weight or bias is a view of θ into products that are recorded."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Return what the function returns."""
        if func is not torch.nn.functional.linear:
            return func(*args, **(kwargs or {}))
        return self._linear(*args, **(kwargs or {}))

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        where = self.tape.place(weight)
        if where is None and weight.requires_grad:  # made from parameters: what they do is not told by this product
            return torch.nn.functional.linear(input, weight, bias)
        use = Use(where, self.tape.place(bias))
        apart = bias is not None and use.bias is None  # a bias that is fixed, or made from parameters
        z = Product.apply(input, _batch(input), weight, None if apart else bias, self.tape, use)
        return z + bias if apart else z


class WeightUses:
    """Sums of outer products over the uses of each weight, those in derivatives of the network included.

    Parameters
    ----------
    along : callable (problem, theta, block, v) -> Tensor (c,)
        J v of a block, for the few entries of θ that are not in linear layers.
    otherwise : callable (problem, theta) -> Route, optional
        What to use from the first block on where the uses do not tell all: a module may choose by its data.
    """

    name = "weight uses"

    def __init__(self, along: Along, otherwise: Callable[[Problem, torch.Tensor], Any] | None = None) -> None:
        self.along = along
        self._otherwise = otherwise
        self._other: Any = None

    def __call__(self, problem: Problem, theta: torch.Tensor, block: Block, columns: torch.Tensor) -> torch.Tensor:
        """Write ∂values/∂theta into `columns`, shape (n, c), and return the values, shape (c,).

        Raises
        ------
        ValueError
            If a weight of a linear layer is used in another way too, meets something that has not the rows as its first
            axis, or more than a few entries of θ are in no linear layer, and there is no other route.
        """
        if self._other is None:
            try:
                return self._by_uses(problem, theta, block, columns)
            except ValueError:
                if self._otherwise is None:
                    raise
                self._other = self._otherwise(problem, theta)
        return self._other(problem, theta, block, columns)

    def _by_uses(self, problem: Problem, theta: torch.Tensor, block: Block, columns: torch.Tensor) -> torch.Tensor:
        leaf = theta.detach().clone().requires_grad_()
        tape = Tape(leaf)
        with torch.enable_grad(), Watching(tape):
            values = problem.values(leaf, block).view(block.n_rows, -1)
        targets = columns.view(theta.numel(), *values.shape)
        u = torch.linspace(*ROW_WEIGHTS, len(values), dtype=theta.dtype, device=theta.device)
        for q in range(values.shape[1]):
            keep = q + 1 < values.shape[1]
            with tape.running():
                (total,) = torch.autograd.grad(u @ values[:, q], leaf, retain_graph=keep, materialize_grads=True)
            for place, shape in tape.shapes.items():
                part = targets[slice(*place), :, q]
                if place in tape.weights:
                    _write_weight(tape.weights[place], u, part.view(*shape, -1))
                else:
                    _write_bias(tape.biases.get(place, []), u, part)
                _check(part, u, total[slice(*place)])
        for entry in _others(tape):
            unit = torch.zeros_like(theta)
            unit[entry] = 1.0
            columns[entry] = self.along(problem, theta, block, unit)
        return values.detach().reshape(-1)

    def passes(self, n_params: int) -> int:
        """Return the number of forward evaluations."""
        return 1


def _write_weight(uses: list[tuple[torch.Tensor, torch.Tensor]], u: torch.Tensor, part: torch.Tensor) -> None:
    """Write Σ_k δ_k a_kᵀ / u of every row into part, shape (out, in, rows)."""
    inputs = [a for use, _ in uses for a in _columns(use, u)]
    deltas = [delta / u for _, use in uses for delta in _columns(use, u)]
    for o, target in enumerate(part):  # one output of the layer at a time stays in the cache
        torch.mul(deltas[0][o], inputs[0], out=target)
        for a, delta in zip(inputs[1:], deltas[1:], strict=True):
            target.addcmul_(delta[o], a)


def _write_bias(uses: list[torch.Tensor], u: torch.Tensor, part: torch.Tensor) -> None:
    """Write Σ_k δ_k / u of every row into part, shape (out, rows); zero for a layer that the values do not need."""
    part.zero_()
    for use in uses:
        for delta in _columns(use, u):
            part.addcdiv_(delta, u)


def _batch(a: torch.Tensor) -> torch.Tensor:
    """Return something small, without derivatives, that has the batch axes of a."""
    return torch.zeros_like(a[..., :1])


def _columns(tensor: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return (rows, ..., size) as (positions, size, rows)."""
    if tensor.ndim < 2 or len(tensor) != len(u):
        raise ValueError("weight uses: a linear layer meets something that has not the rows as its first axis")
    return tensor.reshape(len(u), -1, tensor.shape[-1]).permute(1, 2, 0).contiguous()


def _check(part: torch.Tensor, u: torch.Tensor, total: torch.Tensor) -> None:
    """Check that the uses are all that a weight does: Jᵀu of its part (size, rows) is that of the backward pass."""
    size = part.abs() @ u
    off = (part @ u - total).abs() - ROUNDING[total.dtype] * size.max()
    if bool((off > 0).any()):
        raise ValueError("weight uses: a weight is used besides its layer")


def _others(tape: Tape) -> list[int]:
    """Return the entries of θ that no linear layer showed."""
    inside = torch.zeros(tape.theta.numel(), dtype=torch.bool)
    for place in tape.shapes:
        inside[slice(*place)] = True
    entries = torch.nonzero(~inside).flatten().tolist()
    if len(entries) > FEW_ENTRIES or not tape.shapes:
        raise ValueError(f"weight uses: {len(entries)} parameters are not in linear layers")
    return entries
