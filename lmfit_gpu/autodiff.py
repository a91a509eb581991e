r"""Jacobian of one block of rows by automatic differentiation, by eight routes.

A *route* fills ``columns`` (n, c), the transposed Jacobian of c values with respect to n parameters, and
returns the values (c,). Cost in passes through the model, for values of q outputs per row:

=========  ==================================================  ================  ========================
route      idea                                                passes            needs
=========  ==================================================  ================  ========================
layerwise  outer products of layer inputs and output           1 forward,        independent rows, linear
           gradients (:mod:`lmfit_gpu.layerwise`)              q backward        layers used once
layers     the same for layers of other kinds                  1 forward,        independent rows, layers
           (:mod:`lmfit_gpu.layer_route`)                      q backward        that :mod:`~lmfit_gpu.layers` knows
weight     sums of them over all products with a weight,       1 forward,        independent rows, weights
uses       those in derivatives of the network included        q backward        in linear layers, few others
           (:mod:`lmfit_gpu.weight_uses`)
expanded   every row gets its own copy of each parameter; one  1 forward,        independent rows, a model
           backward pass gives all rows' gradients             q backward        that broadcasts
rowwise    vmap over rows of the gradient of one row           1 forward,        independent rows, no
                                                               q backward        branches on data
forward    vmap over parameters of the directional derivative  n forward         no branches on data
dual       one directional derivative at a time                n forward         forward formulas
reverse    one backward pass per value                         c backward        nothing
=========  ==================================================  ================  ========================

A route is used only after it has reproduced :math:`J^T u`, computed by one ordinary backward pass, on a
probe block (:func:`choose_route`).
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.autograd import forward_ad
from torch.func import grad_and_value, jacrev, jvp, vmap

from lmfit_gpu.box import rooms
from lmfit_gpu.layer_route import Layers
from lmfit_gpu.layerwise import Layerwise
from lmfit_gpu.models import CALL_ERRORS, TorchFunction, gradient_is_whole
from lmfit_gpu.problem import Block, Problem
from lmfit_gpu.row_check import nearby
from lmfit_gpu.rows import each_tensor
from lmfit_gpu.warning_filters import warnings_here
from lmfit_gpu.weight_uses import WeightUses

__all__ = ["Route", "choose_route", "forward_mode", "jacobian_vector", "vector_jacobian"]

FORWARD_BATCH = 32  # tangents pushed together through the model: bounds memory at 32 times one evaluation
PROBE_RTOL = {torch.float64: 1e-8, torch.float32: 2e-3, torch.float16: 0.1, torch.bfloat16: 0.2}
NOISE = 16  # ε of the largest column

FORWARD_MODE = threading.Lock()  # torch keeps the level of forward mode per process, not per thread


@functools.cache
def _load_forward_formulas() -> None:
    """Make torch compile its forward formulas now: the first use warns of torch.jit's deprecation (torch 2.13)."""
    with warnings_here("ignore"):
        jvp(torch.tanh, (torch.zeros(1),), (torch.ones(1),))


@contextmanager
def forward_mode() -> Iterator[None]:
    """Hold forward mode for one thread."""
    with FORWARD_MODE:
        _load_forward_formulas()
        yield


class Route(Protocol):
    """Fills the transposed Jacobian of a block."""

    name: str

    def __call__(self, problem: Problem, theta: torch.Tensor, block: Block, columns: torch.Tensor) -> torch.Tensor:
        """Write ∂values/∂theta into `columns`, shape (n, c), and return the values, shape (c,)."""
        ...

    def passes(self, n_params: int) -> int:
        """Return how many evaluations of the model one linearisation costs (backward passes not counted)."""
        ...


class Expanded:
    """Parameters expanded to columns: one backward pass per output."""

    name = "expanded"

    def __call__(self, problem: Problem, theta: torch.Tensor, block: Block, columns: torch.Tensor) -> torch.Tensor:
        """Write ∂values/∂theta into `columns`, shape (n, c), and return the values, shape (c,)."""
        n, rows = theta.numel(), block.n_rows
        wide = theta[:, None].expand(n, rows).requires_grad_()
        values = problem.values(wide, block).view(rows, -1)
        target = columns.view(n, rows, -1)
        for q in range(values.shape[1]):
            retain = q + 1 < values.shape[1]
            (gradient,) = torch.autograd.grad(values[:, q].sum(), wide, retain_graph=retain)
            target[:, :, q] = gradient
        return values.detach().reshape(-1)

    def passes(self, n_params: int) -> int:
        """Return the number of forward evaluations."""
        return 1


class Rowwise:
    """Gradient of one row, vectorised over rows; one pass for all outputs of a row."""

    name = "rowwise"

    def __call__(self, problem: Problem, theta: torch.Tensor, block: Block, columns: torch.Tensor) -> torch.Tensor:
        """Write ∂values/∂theta into `columns`, shape (n, c), and return the values, shape (c,)."""
        y = block.y

        def row_values(t: torch.Tensor, x: Any, y_row: Any) -> torch.Tensor:
            one = each_tensor(lambda part: part[None], (x, y_row))
            return problem.values(t, replace(block, rows=slice(0, 1), x=one[0], y=one[1]))

        in_dims = (None, 0, None if y is None else 0)
        if columns.shape[1] == block.n_rows:
            one = grad_and_value(lambda t, x, y_row: row_values(t, x, y_row).squeeze(0))
            jacobian, values = vmap(one, in_dims=in_dims)(theta, block.x, y)[:2]
        else:
            jacobian = vmap(jacrev(row_values), in_dims=in_dims)(theta, block.x, y)
            with torch.no_grad():
                values = problem.values(theta, block)
        columns.copy_(jacobian.reshape(-1, theta.numel()).T)
        return values.reshape(-1)

    def passes(self, n_params: int) -> int:
        """Return the number of forward evaluations."""
        return 1


class Forward:
    """Directional derivatives along the unit vectors, vectorised over parameters."""

    name = "forward"

    def __call__(self, problem: Problem, theta: torch.Tensor, block: Block, columns: torch.Tensor) -> torch.Tensor:
        """Write ∂values/∂theta into `columns`, shape (n, c), and return the values, shape (c,)."""

        def directional(tangent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            primal_and_tangent = jvp(lambda t: problem.values(t, block), (theta,), (tangent,))
            return primal_and_tangent[1], primal_and_tangent[0]

        unit = torch.eye(theta.numel(), dtype=theta.dtype, device=theta.device)
        for start in range(0, theta.numel(), FORWARD_BATCH):
            part = slice(start, start + FORWARD_BATCH)
            with forward_mode():
                columns[part], values = vmap(directional, out_dims=(0, None))(unit[part])  # type: ignore[arg-type]
        return values

    def passes(self, n_params: int) -> int:
        """Return the number of forward evaluations."""
        return n_params


class Dual:
    """One directional derivative at a time: works with in-place operations and branches on data."""

    name = "dual"

    def __call__(self, problem: Problem, theta: torch.Tensor, block: Block, columns: torch.Tensor) -> torch.Tensor:
        """Write ∂values/∂theta into `columns`, shape (n, c), and return the values, shape (c,)."""
        unit = torch.eye(theta.numel(), dtype=theta.dtype, device=theta.device)
        for j, tangent in enumerate(unit):
            with forward_mode(), forward_ad.dual_level():
                dual = problem.values(forward_ad.make_dual(theta, tangent), block)
                values, derivative = forward_ad.unpack_dual(dual)
                columns[j] = 0.0 if derivative is None else derivative
        return values.detach()

    def passes(self, n_params: int) -> int:
        """Return the number of forward evaluations."""
        return n_params


class Reverse:
    """One backward pass per value: for few values, or a model that has no forward formulas."""

    name = "reverse"

    def __call__(self, problem: Problem, theta: torch.Tensor, block: Block, columns: torch.Tensor) -> torch.Tensor:
        """Write ∂values/∂theta into `columns`, shape (n, c), and return the values, shape (c,)."""
        leaf = theta.clone().requires_grad_()
        values = problem.values(leaf, block)
        for i in range(values.numel()):
            (row,) = torch.autograd.grad(values[i], leaf, retain_graph=True, materialize_grads=True)
            columns[:, i] = row
        return values.detach()

    def passes(self, n_params: int) -> int:
        """Return the number of forward evaluations."""
        return 1


def vector_jacobian(problem: Problem, theta: torch.Tensor, block: Block, u: torch.Tensor) -> torch.Tensor:
    """Return Jᵀu (n,) of a block by one ordinary backward pass."""
    leaf = theta.clone().requires_grad_()
    values = problem.values(leaf, block)
    (product,) = torch.autograd.grad(values, leaf, u, materialize_grads=True)
    return product


def jacobian_vector(problem: Problem, theta: torch.Tensor, block: Block, v: torch.Tensor) -> torch.Tensor:
    """Return Jv (c,) of a block by one forward-mode pass, or by two backward passes without forward formulas."""
    try:
        with forward_mode():
            return jvp(lambda t: problem.values(t, block), (theta,), (v,))[1]
    except CALL_ERRORS:
        leaf = theta.clone().requires_grad_()
        values = problem.values(leaf, block)
        dummy = torch.zeros_like(values).requires_grad_()
        (product,) = torch.autograd.grad(values, leaf, dummy, create_graph=True, materialize_grads=True)
        return torch.autograd.grad(product, dummy, v, materialize_grads=True)[0]


def choose_route(problem: Problem, theta: torch.Tensor, without: tuple[str, ...] = ()) -> Route:
    """Return the first route, cheapest first, that reproduces Jᵀu on a probe block.

    Parameters
    ----------
    problem : Problem
        With a differentiable model.
    theta : Tensor, shape (n_params,)
    without : tuple of str
        Names of routes that are not to be used.

    Returns
    -------
    Route

    Raises
    ------
    ValueError
        If no route works: the model is then not differentiable by torch; the message offers ``jac="3-point"``.
    """
    probe = problem.probe()
    points = [theta, nearby(theta, problem.bounds)]
    try:
        with torch.no_grad():
            expected_values = [problem.values(point, probe) for point in points]
        u = torch.linspace(0.5, 1.5, expected_values[0].numel(), dtype=torch.float64).to(theta)
        expected = [vector_jacobian(problem, point, probe, u) for point in points]
        on_bound = not bool((torch.minimum(*rooms(theta, problem.bounds)) > 0).all())
        whole = any(  # on a bound a model may jump
            gradient_is_whole(lambda t, x, y: problem.values(t, probe), point, probe.x, probe.y, problem.bounds)
            for point in (points if on_bound else points[:1])
        )
    except CALL_ERRORS as error:
        raise ValueError(
            f"model: torch cannot differentiate it ({error}); use jac='3-point' for finite differences"
        ) from error
    if not whole:
        raise ValueError(
            "model: its gradient by autograd is not the derivative of its values (a parameter leaves the graph: "
            "detach, item, float, or rounding); use jac='3-point' for finite differences"
        )
    columns = theta.new_empty(theta.numel(), expected_values[0].numel())
    for route in [route for route in _candidates(problem, theta, columns.shape[1]) if route.name not in without]:
        for point, values, product, strict in zip(points, expected_values, expected, (False, True), strict=True):
            try:
                found = route(problem, point, probe, columns)
            except CALL_ERRORS:
                break
            if not (_reproduces(columns, u, product, strict) and _same_values(found, values)):
                break
        else:
            return _with_another(route)
    raise ValueError("model: no route of automatic differentiation reproduces its gradient; use jac='3-point'")


def _with_another(route: Route) -> Route:
    if isinstance(route, Layerwise):
        return Layerwise(functools.partial(choose_route, without=(Layerwise.name,)))
    if isinstance(route, Layers):
        return replace(route, otherwise=functools.partial(choose_route, without=(Layerwise.name, Layers.name)))
    if isinstance(route, WeightUses):
        without = (Layerwise.name, Layers.name, WeightUses.name)
        return WeightUses(route.along, functools.partial(choose_route, without=without))
    return route


def _same_values(found: torch.Tensor, expected: torch.Tensor) -> bool:
    rtol = PROBE_RTOL.get(found.dtype, 0.2)
    scale = float(torch.nan_to_num(expected.abs(), nan=0.0, posinf=0.0).max())
    return torch.allclose(found, expected, rtol=rtol, atol=rtol * scale, equal_nan=True)


def _candidates(problem: Problem, theta: torch.Tensor, n_values: int) -> list[Route]:
    routes: list[Route] = [Forward(), Dual(), Reverse()]
    if problem.coupled:
        return routes if problem.n_params <= n_values else routes[::-1]
    whole = _innermost(problem.replicas[0])
    if isinstance(whole, TorchFunction):
        return [Expanded(), Rowwise(), *routes]
    try:
        by_layers: list[Route] = [Layers.choose(problem, theta)]
    except CALL_ERRORS:
        by_layers = []
    return [Layerwise(), *by_layers, WeightUses(jacobian_vector), Rowwise(), *routes]


def _innermost(model: Callable) -> Callable:
    while hasattr(model, "model"):
        model = model.model
    return model


def _reproduces(columns: torch.Tensor, u: torch.Tensor, expected: torch.Tensor, strict: bool) -> bool:
    """Return whether the columns give Jᵀu: each to its own size, or not strictly to that of the largest.

    At a start like k = 1e-9 in xⁿ/(kⁿ + xⁿ) the terms of a derivative cancel, and routes differ by their rounding.
    """
    rounding = PROBE_RTOL.get(columns.dtype, 0.2)
    size = columns.abs().double() @ u.double()  # the sum without cancellation
    largest = torch.nan_to_num(size, nan=0.0, posinf=0.0).max()
    noise = NOISE * torch.finfo(columns.dtype).eps * largest  # a column may be zero but for rounding in the model
    size = size if strict else size + largest
    error = (columns @ u - expected).abs().double()
    return bool(torch.all((error <= rounding * size + noise) | ~torch.isfinite(expected)))
