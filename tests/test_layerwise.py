"""layerwise: Jacobians of networks of linear layers, against torch's own jacrev."""

import pytest
import torch
from torch.func import functional_call, jacrev

from lmfit_gpu.autodiff import choose_route
from lmfit_gpu.layerwise import Layerwise
from lmfit_gpu.models import ModuleModel, ResidualOf
from lmfit_gpu.network import TanhNetwork
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.rows import ArrayRows

ROWS = 70


def seeded(make):
    torch.manual_seed(1)
    return make()


class Branches(torch.nn.Module):
    """Two paths that share their input, a layer without bias, layers used in another order than they are defined."""

    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(4, 2, dtype=torch.float64)
        self.left = torch.nn.Linear(3, 4, bias=False, dtype=torch.float64)
        self.right = torch.nn.Linear(3, 4, dtype=torch.float64)

    def forward(self, X):
        return self.out(torch.tanh(self.right(X)) * torch.sigmoid(self.left(X))) + X[:, :2]


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 3, dtype=torch.float64)
        self.out = torch.nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, X):
        return self.out(torch.tanh(self.inner(torch.tanh(self.inner(X)))))


class WeightElsewhere(torch.nn.Module):
    """The penalty of an autoencoder's tied weights: the layer is used once, its weight twice."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 4, dtype=torch.float64)

    def forward(self, X):
        return (torch.tanh(self.inner(X)) @ self.inner.weight)[:, 0]


class Positions(torch.nn.Module):
    """A layer applied at each of three positions."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(1, 2, dtype=torch.float64)

    def forward(self, X):
        return torch.tanh(self.inner(X[:, :, None])).sum((1, 2))


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 1, dtype=torch.float64)
        self.scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, X):
        return self.scale * self.inner(X)


def partly_frozen():
    module = TanhNetwork(3, 1, (5, 4))
    module.layers[1].weight.requires_grad_(False)
    module.layers[0].bias.requires_grad_(False)
    return module


SUITED = {
    "one-layer": lambda: torch.nn.Linear(3, 1, dtype=torch.float64),
    "default": lambda: TanhNetwork(3, 1, (5,)),
    "deep-two-outputs": lambda: TanhNetwork(3, 2, (5, 4, 3)),
    "branches": Branches,
    "partly-frozen": partly_frozen,
}
UNSUITED = {"twice": Twice, "positions": Positions, "scaled": Scaled}


def problem_of(module, residual=None):
    torch.manual_seed(0)
    X = torch.randn(ROWS, 3, dtype=torch.float64)
    model = ModuleModel(module)
    y = torch.cos(X.sum(1))
    with torch.no_grad():
        outputs = module(X)
    y = y if outputs.numel() == ROWS else y[:, None].expand(-1, outputs.shape[1])
    return LeastSquaresProblem(model if residual is None else ResidualOf(model, residual), ArrayRows(X, y), model.theta)


def found(problem):
    theta = (
        problem.replicas[0].theta if isinstance(problem.replicas[0], ModuleModel) else problem.replicas[0].model.theta
    )
    block = problem.probe(ROWS)
    columns = torch.full((problem.n_params, problem.n_residuals), torch.nan, dtype=torch.float64)
    values = Layerwise()(problem, theta, block, columns)
    return theta, block, values, columns


@pytest.mark.parametrize("name", SUITED)
@pytest.mark.parametrize("residual", [None, lambda p, t: torch.atan(p - t)], ids=["plain", "residual"])
def test_is_what_jacrev_finds(name, residual):
    module = seeded(SUITED[name])
    problem = problem_of(module, residual)
    theta, block, values, columns = found(problem)
    expected = jacrev(lambda t: problem.values(t, block))(theta)
    torch.testing.assert_close(columns.T, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(values, problem.values(theta, block))
    assert choose_route(problem, theta).name == "layerwise"


@pytest.mark.parametrize("name", UNSUITED)
def test_other_modules_are_refused_and_take_another_route(name):
    problem = problem_of(seeded(UNSUITED[name]))
    with pytest.raises(ValueError, match="layerwise"):
        found(problem)
    assert choose_route(problem, problem.replicas[0].theta).name in ("layers", "weight uses")


class Later(torch.nn.Module):
    """What a route must find out in the middle of a fit: at the start the second use of the weight is switched off."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 4, dtype=torch.float64)
        self.out = torch.nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, X):
        size = self.inner.weight.abs().sum()
        return self.out(torch.tanh(self.inner(X))) + torch.relu(size - 6)


class Gated(Later):
    """Rows reach the output layer by a gate that is open for all of them at the start."""

    def forward(self, X):
        hidden = torch.tanh(self.inner(X))
        chosen = hidden[:, 0] > self.inner.bias[0] - 100 * (self.inner.weight[0, 0] < 1) - 0.01
        return torch.zeros(len(X), 1, dtype=X.dtype).index_put((chosen,), self.out(hidden[chosen]))


class InPlace(Later):
    def forward(self, X):
        return self.out(torch.nn.functional.hardtanh_(self.inner(torch.tanh(X)), -0.2, 0.2))


def test_a_weight_used_besides_its_layer_is_refused():
    problem = problem_of(seeded(WeightElsewhere))
    with pytest.raises(ValueError, match=r"layerwise: inner\.weight is used besides its layer"):
        found(problem)
    assert choose_route(problem, problem.replicas[0].theta).name == "rowwise"


@pytest.mark.parametrize("module", [Later, Gated, InPlace])
def test_other_points_than_the_start_get_another_route_where_the_layers_do_not_tell_all(module):
    made = seeded(module)
    with torch.no_grad():
        made.inner.weight.mul_(0.1)
        made.inner.weight[0, 0] = 0.5
    problem = problem_of(made)
    start = problem.replicas[0].theta
    route = choose_route(problem, start)
    assert route.name == "layerwise"
    for theta in (start, 4 * start):
        block = problem.probe(ROWS)
        columns = torch.full((problem.n_params, problem.n_residuals), torch.nan, dtype=torch.float64)
        values = route(problem, theta, block, columns)
        leaf = theta.clone().requires_grad_()
        expected = problem.values(leaf, block)
        torch.testing.assert_close(values, expected.detach())
        (gradient,) = torch.autograd.grad(expected.sum(), leaf)
        torch.testing.assert_close(columns.sum(1), gradient, rtol=1e-9, atol=1e-10)


def test_the_module_is_left_without_hooks():
    module = seeded(SUITED["default"])
    problem = problem_of(module)
    found(problem)
    assert not any(layer._forward_hooks for layer in module.modules())
    X = torch.ones(2, 3, dtype=torch.float64)
    assert functional_call(module, {}, (X,)).shape == (2, 1)
