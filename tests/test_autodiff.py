"""Routes of automatic differentiation against differences that share nothing with them."""

import os

import numpy as np
import pytest
import torch
from boxed import Watched
from forked import program
from oracles import (
    CPU,
    central_differences,
    module_model,
    numpy_model,
    problem_of,
    relative_column_error,
    torch_model,
    values_of,
)

from lmfit_gpu.autodiff import (
    Dual,
    Expanded,
    Forward,
    Reverse,
    Rowwise,
    choose_route,
    jacobian_vector,
    vector_jacobian,
)
from lmfit_gpu.models import ResidualOf
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.rows import ArrayRows

N = 40
X1 = torch.linspace(0.1, 2.0, N, dtype=torch.float64)
X3 = torch.stack([X1, X1.sin(), X1.square()], 1)
TOKENS = torch.arange(N * 2).reshape(N, 2) % 5


class Scalars(torch.nn.Module):
    """0-dimensional parameters."""

    def __init__(self):
        super().__init__()
        self.height = torch.nn.Parameter(torch.tensor(1.4))
        self.rate = torch.nn.Parameter(torch.tensor(0.6))

    def forward(self, x):
        return self.height * torch.exp(-self.rate * x[:, 0])


class Words(torch.nn.Module):
    """An embedding: X holds token numbers."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(5, 3)
        self.out = torch.nn.Linear(6, 1)

    def forward(self, tokens):
        return self.out(torch.tanh(self.table(tokens)).flatten(1))


class Pulses(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv1d(1, 2, 2)
        self.out = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.conv(x[:, None])).flatten(1))


def linear_tanh_linear(n_outputs=1):
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, n_outputs))


def decay(x, a, b, c):
    return a * torch.exp(-b * x) + c


def two_outputs(x, a, b, c):
    return torch.stack([a * torch.exp(-b * x), torch.sin(c * x) + b], 1)


THETA = [1.3, 0.7, 0.4]


def case(name):
    """Return (model, X, y, theta)."""
    torch.manual_seed(3)
    y, y2 = torch.cos(X1), torch.stack([X1, X1.cos()], 1)
    cauchy = lambda pred, target: torch.log1p((pred - target) ** 2)  # noqa: E731
    functions = {
        "params": (torch_model(decay), X1, y, THETA),
        "theta": (torch_model(lambda X, theta: torch.tanh(X @ theta), "theta"), X3, y, THETA),
        "theta-index": (
            torch_model(lambda X, t: t[0] * torch.exp(-t[1] * X[:, 0]) + t[2], "theta"),
            X3,
            y,
            THETA,
        ),
        "two-outputs": (torch_model(two_outputs), X1, y2, THETA),
        "residual-of": (ResidualOf(torch_model(decay), cauchy), X1, y, THETA),
        "residual": (
            torch_model(lambda t, x, y: (t[0] * torch.exp(-t[1] * x) + t[2] - y) / (1 + y**2), "residual"),
            X1,
            y,
            THETA,
        ),
        "unused-parameter": (torch_model(lambda x, a, b, c: a * torch.exp(-b * x)), X1, y, THETA),
    }
    if name in functions:
        return functions[name]
    model, X, y = {
        "network": lambda: (module_model(linear_tanh_linear()), X3, y),
        "network-two-outputs": lambda: (module_model(linear_tanh_linear(2)), X3, y2),
        "network-residual-of": lambda: (ResidualOf(module_model(linear_tanh_linear()), cauchy), X3, y),
        "conv": lambda: (module_model(Pulses()), X3, y),
        "embedding": lambda: (module_model(Words()), TOKENS, y),
        "scalars": lambda: (module_model(Scalars()), X1[:, None], y),
    }[name]()
    inner = getattr(model, "model", model)
    return model, X, y, inner.theta.clone()


BROADCASTING = ["params", "theta-index", "two-outputs", "residual-of", "residual", "unused-parameter"]
MODULES = ["network", "network-two-outputs", "network-residual-of", "conv", "embedding", "scalars"]
CASES = [*BROADCASTING, "theta", *MODULES]


def jacobian_by(route, problem, theta):
    block = problem.read(0, slice(0, problem.rows.n_samples), 0)
    columns = torch.full((theta.numel(), problem.n_residuals), float("nan"), dtype=torch.float64)
    values = route(problem, theta, block, columns)
    return values, columns.T


def block_of(problem):
    return problem.read(0, slice(0, problem.rows.n_samples), 0)


@pytest.mark.parametrize(
    ("route", "name"),
    [(Expanded(), name) for name in BROADCASTING]
    + [(route, name) for route in (Rowwise(), Forward(), Dual(), Reverse()) for name in CASES],
    ids=lambda part: getattr(part, "name", part),
)
def test_every_route_against_differences(route, name):
    model, X, y, theta = case(name)
    theta = torch.as_tensor(theta, dtype=torch.float64)
    problem = problem_of(model, X, y, theta)
    values, J = jacobian_by(route, problem, theta)
    f = values_of(model, X, y)
    np.testing.assert_allclose(values, f(theta), rtol=1e-13, atol=1e-13)
    assert values.shape == (problem.n_residuals,)
    assert not values.requires_grad
    assert relative_column_error(J, central_differences(f, theta)) < 1e-8


def test_forward_with_more_parameters_than_a_batch():
    """33 and 70 parameters: the last batch of tangents is not full."""
    for n in (33, 70):
        powers = torch.arange(n)
        model = torch_model(
            lambda X, theta, powers=powers: torch.tanh((X[:, None] ** powers) @ theta / len(powers)), "theta"
        )
        theta = torch.linspace(-1, 1, n, dtype=torch.float64)
        problem = problem_of(model, X1 / 2, X1, theta)
        _, J = jacobian_by(Forward(), problem, theta)
        assert relative_column_error(J, central_differences(values_of(model, X1 / 2, X1), theta)) < 1e-8


# --- which route ------------------------------------------------------------------------------------------


def chosen(model, X, y, theta, **options):
    theta = torch.as_tensor(theta, dtype=torch.float64)
    problem = problem_of(model, X, y, theta, **options)
    return choose_route(problem, theta).name


@pytest.mark.parametrize("name", BROADCASTING[:3])
def test_a_broadcasting_callable_is_expanded(name):
    assert chosen(*case(name)) == "expanded"


NETWORKS = ["network", "network-two-outputs", "network-residual-of"]


@pytest.mark.parametrize("name", ["theta", *(name for name in MODULES if name not in NETWORKS)])
def test_layers_of_other_kinds_go_by_layers_and_the_rest_row_by_row(name):
    assert chosen(*case(name)) == ("layers" if name in ("conv", "embedding") else "rowwise")


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_linear_layers_go_layer_by_layer(name):
    assert chosen(*case(name)) == "layerwise"


def written_row_by_row(x, a, b, c):
    values = torch.empty_like(x)
    for i in range(len(x)):
        values[i] = a * torch.exp(-b * x[i]) + c
    return values


def branch_on_a_parameter(x, a, b, c):
    return a * torch.exp(-b * x) + c if b > 0 else a * x + c


def written_into_a_new_array(x, a, b, c):
    values = torch.empty(len(x), dtype=x.dtype)
    for i in range(len(x)):
        values[i] = a * torch.exp(-b * x[i]) + c
    return values


def branch_on_the_values(x, a, b, c):
    rows = []
    for value in x:
        row = a * torch.exp(-b * value) + c
        rows.append(row if row > 1.0 else row**2)
    return torch.stack(rows)


class SoftExp(torch.autograd.Function):
    """X exp(θ) with a backward formula alone."""

    @staticmethod
    def forward(ctx, X, theta):
        ctx.save_for_backward(X, theta)
        return X @ theta.exp()

    @staticmethod
    def backward(ctx, u):
        X, theta = ctx.saved_tensors
        return None, theta.exp() * (X.T @ u)


def only_backward(X, theta):
    return SoftExp.apply(X, theta)


class SoftExpBoth(SoftExp):
    """With a forward formula too; written in the style that torch.func refuses (no setup_context)."""

    @staticmethod
    def forward(ctx, X, theta):
        ctx.save_for_forward(X, theta)
        return SoftExp.forward(ctx, X, theta)

    @staticmethod
    def jvp(ctx, X_tangent, tangent):
        X, theta = ctx.saved_tensors
        return X @ (theta.exp() * tangent)


def both_formulas(X, theta):
    return SoftExpBoth.apply(X, theta)


@pytest.mark.parametrize(
    ("function", "order", "X", "routes"),
    [
        pytest.param(written_row_by_row, "params", X1, ["rowwise"], id="in-place-like-x"),
        pytest.param(written_into_a_new_array, "params", X1, ["forward", "dual"], id="in-place"),
        pytest.param(branch_on_the_values, "params", X1, ["forward", "dual"], id="branch-on-values"),
        pytest.param(both_formulas, "theta", X3, ["dual"], id="both-formulas"),
        pytest.param(only_backward, "theta", X3, ["reverse"], id="only-backward"),
    ],
)
def test_models_that_do_not_broadcast(function, order, X, routes):
    model = torch_model(function, order)
    assert chosen(model, X, X1, THETA) in routes
    problem, theta = problem_of(model, X, X1, THETA), torch.tensor(THETA, dtype=torch.float64)
    _, J = jacobian_by(choose_route(problem, theta), problem, theta)
    assert relative_column_error(J, central_differences(values_of(model, X), theta)) < 1e-8


def test_a_branch_on_a_parameter():
    """bool(b) has no meaning for a parameter expanded to columns; any route that passes is right."""
    model, theta = torch_model(branch_on_a_parameter), torch.tensor(THETA, dtype=torch.float64)
    problem = problem_of(model, X1, X1, theta)
    route = choose_route(problem, theta)
    assert route.name != "expanded"
    _, J = jacobian_by(route, problem, theta)
    assert relative_column_error(J, central_differences(values_of(model, X1), theta)) < 1e-8


def test_coupled_rows_go_forward_while_there_are_fewer_parameters_than_residuals():
    model = torch_model(lambda x, a, b, c: torch.cumsum(decay(x, a, b, c), 0))
    assert chosen(model, X1, X1, THETA) == "forward"


def test_coupled_rows_go_in_reverse_when_there_are_more_parameters():
    model = torch_model(lambda theta, x, y: (theta * x[0] - y.mean())[:20].reshape(2, 10).sum(1), "residual")
    assert chosen(model, X1, X1, torch.arange(30.0)) == "reverse"


# --- wrong in silence -------------------------------------------------------------------------------------

WRONG_WHEN_EXPANDED = {
    "mean of a parameter": lambda x, a, b: a.mean() * x + b,
    "sum of a parameter": lambda x, a, b: x * a.sum() + b,
    "norm of both": lambda x, a, b: x * torch.stack([a, b]).pow(2).sum().sqrt(),
    "max of a parameter": lambda x, a, b: x * torch.exp(a.max()) + b,
    "vector by mean": lambda x, a, b: x * a + torch.exp(b.mean() * x),
}


@pytest.mark.parametrize("name", WRONG_WHEN_EXPANDED)
def test_a_route_with_wrong_gradients_is_not_taken(name):
    model, theta = torch_model(WRONG_WHEN_EXPANDED[name]), torch.tensor([1.3, 0.7], dtype=torch.float64)
    problem = problem_of(model, X1, X1, theta)
    values, J = jacobian_by(choose_route(problem, theta), problem, theta)
    f = values_of(model, X1)
    np.testing.assert_allclose(values, f(theta), rtol=1e-13)
    assert relative_column_error(J, central_differences(f, theta)) < 1e-8


def test_a_route_with_wrong_values_is_not_taken():
    """A parameter expanded to columns has many elements: right gradients, wrong values."""
    model, theta = (
        torch_model(lambda x, a, b: a * x + b + a.numel()),
        torch.tensor([1.3, 0.7], dtype=torch.float64),
    )
    problem = problem_of(model, X1, X1, theta)
    values, _ = jacobian_by(choose_route(problem, theta), problem, theta)
    np.testing.assert_allclose(values, values_of(model, X1)(theta), rtol=1e-13)


def test_a_zero_start_does_not_hide_wrong_gradients():
    """At a = 0 the derivative by b is 0 by every route; at the next point it is not."""
    model, start = (
        torch_model(lambda x, a, b: a * torch.exp(b.mean() * x)),
        torch.tensor([0.0, 0.7], dtype=torch.float64),
    )
    problem = problem_of(model, X1, X1, start)
    route = choose_route(problem, start)
    theta = torch.tensor([1.0, 0.7], dtype=torch.float64)
    _, J = jacobian_by(route, problem, theta)
    assert relative_column_error(J, central_differences(values_of(model, X1), theta)) < 1e-8


@pytest.mark.parametrize(
    "function",
    [
        lambda x, a, b: a.detach() * x + b.detach(),
        lambda x, a, b: torch.from_numpy(np.exp(a.detach().numpy()) * x.numpy()),
    ],
    ids=["detach", "numpy-inside"],
)
def test_a_model_that_leaves_the_graph_is_refused(function):
    theta = torch.tensor([1.3, 0.7], dtype=torch.float64)
    problem = problem_of(torch_model(function), X1, X1, theta)
    with pytest.raises(ValueError, match=r"model: torch cannot differentiate it .*jac='3-point'"):
        choose_route(problem, theta)


def test_a_parameter_that_leaves_the_graph_is_refused():
    """The route and the backward pass agree on a column of zeros; the values do not."""
    theta = torch.tensor([1.3, 0.7], dtype=torch.float64)
    problem = problem_of(torch_model(lambda x, a, b: a * x + torch.exp(b.detach() * x)), X1, X1, theta)
    with pytest.raises(ValueError, match="3-point"):
        choose_route(problem, theta)


# --- products ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_the_matrix(name):
    model, X, y, theta = case(name)
    theta = torch.as_tensor(theta, dtype=torch.float64)
    problem = problem_of(model, X, y, theta)
    J = torch.tensor(central_differences(values_of(model, X, y), theta))
    u, v = torch.randn(problem.n_residuals).double(), torch.randn(theta.numel()).double()
    block = block_of(problem)
    np.testing.assert_allclose(
        vector_jacobian(problem, theta, block, u), J.T @ u, atol=1e-8 * float(J.norm() * u.norm())
    )
    np.testing.assert_allclose(jacobian_vector(problem, theta, block, v), J @ v, atol=1e-8 * float(J.norm() * v.norm()))


class TwiceDifferentiable(torch.autograd.Function):
    """exp with a backward formula that torch can differentiate, and no forward formula."""

    @staticmethod
    def forward(ctx, t):
        result = t.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, u):
        return u * ctx.saved_tensors[0]


def test_jacobian_vector_without_forward_formulas():
    model = torch_model(lambda x, a, b: TwiceDifferentiable.apply(a) * x + TwiceDifferentiable.apply(-b) * x**2)
    theta, v = torch.tensor([0.3, 0.7], dtype=torch.float64), torch.tensor([1.0, -2.0], dtype=torch.float64)
    problem = problem_of(model, X1, X1, theta)
    expected = np.exp(0.3) * X1 + 2 * np.exp(-0.7) * X1**2
    np.testing.assert_allclose(jacobian_vector(problem, theta, block_of(problem), v), expected, rtol=1e-13)


# --- threads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", [Expanded(), Rowwise(), Forward(), Dual(), Reverse()], ids=lambda route: route.name)
def test_routes_in_two_threads(route):
    """Forward mode keeps its level in the process, not in the thread."""
    x = torch.linspace(0.1, 2.0, 40 * 16, dtype=torch.float64)
    theta = torch.tensor(THETA, dtype=torch.float64)
    problem = problem_of(torch_model(decay), x, x, theta, devices=[CPU, CPU], chunk_rows=16)
    expected = central_differences(values_of(torch_model(decay), x), theta)

    def columns(block):
        filled = torch.empty(3, block.x.shape[0], dtype=torch.float64)
        route(problem, theta, block, filled)
        return filled.T

    for _ in range(5):
        J = torch.cat(list(problem.map_blocks(columns)))
        assert relative_column_error(J, expected) < 1e-8
    problem.close()


def test_jacobian_vector_in_two_threads():
    x = torch.linspace(0.1, 2.0, 40 * 16, dtype=torch.float64)
    theta, v = torch.tensor(THETA, dtype=torch.float64), torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
    problem = problem_of(torch_model(decay), x, x, theta, devices=[CPU, CPU], chunk_rows=16)
    expected = central_differences(values_of(torch_model(decay), x), theta) @ v.numpy()
    for _ in range(15):  # the race shows in one round of eight
        parts = problem.map_blocks(lambda block: jacobian_vector(problem, theta, block, v))
        np.testing.assert_allclose(torch.cat(list(parts)), expected, atol=1e-8)
    problem.close()


def test_the_error_of_a_numpy_model_names_the_remedy():
    theta = torch.tensor([1.3, 0.7], dtype=torch.float64)
    problem = problem_of(numpy_model(lambda x, a, b: a * np.exp(-b * x)), X1, X1, theta)
    with pytest.raises(ValueError, match="3-point"):
        choose_route(problem, theta)


FIRST_FORWARD_MODE = """
import warnings
import torch
from lmfit_gpu.autodiff import choose_route
from lmfit_gpu.models import TorchFunction
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.rows import ArrayRows
x, theta = torch.linspace(0, 1, 9).double(), torch.ones(2).double()
model = TorchFunction(lambda x, a, b: torch.cumsum(a * torch.exp(-b * x), 0), ("a", "b"))
warnings.simplefilter("error")
print(choose_route(LeastSquaresProblem(model, ArrayRows(x, x), theta), theta).name)
"""


@pytest.mark.slow
def test_forward_mode_is_silent_in_a_fresh_process():
    """The first use of forward mode imports a part of torch that warns of torch.jit.script."""
    with program(["-c", FIRST_FORWARD_MODE], dict(os.environ)) as running:
        running.wait(60)
        assert running.written() == "forward\n", running.written("err")[-300:]


# --- bounds -----------------------------------------------------------------------------------------------

INF = float("inf")
BOXES = {
    "on-lower": ([1.3, 0.7], [1.3, 0.7], [INF, 5.0]),
    "on-upper": ([1.3, 0.7], [-INF, 0.0], [1.3, 0.7]),
    "in-a-corner": ([1.3, 0.7], [1.3, -INF], [INF, 0.7]),
    "zero-on-zero": ([1.3, 0.0], [0.0, 0.0], [INF, INF]),
    "narrow": ([1.3, 0.7], [1.3 - 1e-10, 0.7 - 1e-12], [1.3 + 1e-10, 0.7 + 1e-9]),
    "equal": ([1.3, 0.7], [1.3, 0.7], [1.3, 5.0]),
}


def in_a_box(make, box, dtype=torch.float64):
    """Return (watched model, problem, theta) in a named box."""
    theta, lower, upper = BOXES[box]
    watched = Watched(make, torch, lower, upper, dtype)
    at = torch.tensor(theta, dtype=torch.float64).to(dtype)
    rows = ArrayRows(X1.to(dtype), X1.cos().to(dtype))
    return watched, LeastSquaresProblem(watched.model, rows, at, bounds=watched.bounds), at


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("box", BOXES)
def test_the_choice_of_a_route_stays_in_the_box(box, dtype):
    watched, problem, theta = in_a_box(lambda library: lambda x, a, b: a * library.exp(-5 * b * x), box, dtype)
    route = choose_route(problem, theta)
    assert watched.calls
    assert watched.outside == []
    assert route.name == "expanded"


@pytest.mark.parametrize("box", ["on-lower", "on-upper", "in-a-corner", "zero-on-zero"])
def test_a_parameter_that_leaves_the_graph_is_found_in_a_box(box):
    def make(library):
        return lambda x, a, b: a * library.exp(-b * x) + library.cos(a.detach() * x)

    watched, problem, theta = in_a_box(make, box)
    with pytest.raises(ValueError, match="its gradient by autograd is not the derivative of its values"):
        choose_route(problem, theta)
    assert watched.outside == []
