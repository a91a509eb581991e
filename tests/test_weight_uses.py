"""weight_uses: J of residuals that differentiate the network, against reverse mode one value at a time and by hand."""

import itertools
import math

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

from lmfit_gpu.autodiff import choose_route, forward_mode, jacobian_vector
from lmfit_gpu.models import ModuleModel
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.rows import ArrayRows
from lmfit_gpu.weight_uses import WeightUses

ROWS = 30
X = torch.rand(ROWS, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", autouse=True)
def forward_formulas():
    """Let torch load its forward formulas in silence: users' own jvp would warn of torch.jit's deprecation."""
    with forward_mode():
        pass


def network(*sizes, seed=1):
    torch.manual_seed(seed)
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (torch.nn.Linear(*pair), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers[:-1]).double()


class Residual(torch.nn.Module):
    """A residual function as a module: differentiation of the network inside `forward`."""

    def __init__(self, function, net, **coefficients):
        super().__init__()
        self.function, self.net = function, net
        for name, value in coefficients.items():
            setattr(self, name, torch.nn.Parameter(torch.tensor(value, dtype=torch.float64)))

    def forward(self, x):
        with torch.enable_grad():
            r = self.function(self, x.detach())
        return r if torch.is_grad_enabled() else r.detach()


def laplacian_by_autograd(self, x):
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
    second = [torch.autograd.grad(slope[:, k].sum(), x, create_graph=True)[0][:, k] for k in range(2)]
    return second[0] + second[1]


def laplacian_by_hessian(self, x):
    return vmap(lambda point: hessian(lambda p: self.net(p)[0])(point).trace())(x)


def laplacian_by_reverse_twice(self, x):
    return vmap(lambda point: jacrev(grad(lambda p: self.net(p)[0]))(point).trace())(x)


def laplacian_by_directions(self, x):
    def second(k):
        v = torch.zeros_like(x)
        v[:, k] = 1.0
        return jvp(lambda p: jvp(self.net, (p,), (v,))[1], (x,), (v,))[1][:, 0]

    return second(0) + second(1)


LAPLACIANS = [laplacian_by_autograd, laplacian_by_hessian, laplacian_by_reverse_twice, laplacian_by_directions]


def gradient_by_autograd(self, x):
    """Two values a row, and the network used twice."""
    x = x.requires_grad_()
    u = self.net(x) - self.net(-x)
    return torch.autograd.grad(u.sum(), x, create_graph=True)[0]


def burgers(self, x):
    """u_t + c u u_x - exp(k) u_xx: two coefficients of the equation are free as well."""
    x = x.requires_grad_()
    u = self.net(x)[:, 0]
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope[:, 1].sum(), x, create_graph=True)
    return slope[:, 0] + self.c * u * slope[:, 1] - self.k.exp() * second[:, 1]


def by_reverse_mode(module, x):
    """Return J (m, n), one backward pass a value."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    values = module(x).reshape(-1)
    rows = [torch.autograd.grad(v, parameters, retain_graph=True, materialize_grads=True) for v in values]
    return torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])


def by_uses(module, x):
    """Return J (m, n) and the values by the route."""
    model = ModuleModel(module)
    problem = LeastSquaresProblem(model, ArrayRows(x, None), model.theta)
    block = problem.read(0, slice(0, len(x)), 0)
    columns = torch.full((problem.n_params, problem.n_residuals), torch.nan, dtype=x.dtype)
    values = WeightUses(jacobian_vector)(problem, model.theta, block, columns)
    return columns.T, values


@pytest.mark.parametrize("laplacian", LAPLACIANS, ids=lambda function: function.__name__)
def test_a_laplacian_in_every_way_of_writing_it(laplacian):
    module = Residual(laplacian, network(2, 8, 7, 1))
    J, values = by_uses(module, X)
    expected = by_reverse_mode(Residual(laplacian_by_autograd, module.net), X)
    torch.testing.assert_close(J, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))
    torch.testing.assert_close(values, module(X).detach(), rtol=1e-12, atol=1e-12)


def test_one_hidden_unit_by_hand():
    # u = v tanh(w x + b) + c: u'' = v w^2 t''(z) with t'' = -2 t (1 - t^2), t''' = (1 - t^2) (6 t^2 - 2)
    w, b, v, c = 0.7, -0.2, 1.3, 0.4
    net = network(1, 1, 1)
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), (w, b, v, c), strict=True):
            parameter.fill_(value)

    def second(self, x):
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.sum(), x, create_graph=True)[0][:, 0]

    x = X[:, :1]
    t = torch.tanh(w * x[:, 0] + b)
    t2, t3 = -2 * t * (1 - t**2), (1 - t**2) * (6 * t**2 - 2)
    expected = torch.stack([2 * v * w * t2 + v * w**2 * x[:, 0] * t3, v * w**2 * t3, w**2 * t2, 0 * t], 1)
    torch.testing.assert_close(by_uses(Residual(second, net), x)[0], expected, rtol=1e-12, atol=1e-14)


CASES = {
    "two values a row, the network used twice": lambda: Residual(gradient_by_autograd, network(2, 6, 5, 1)),
    "free coefficients of the equation": lambda: Residual(burgers, network(2, 6, 1), c=0.8, k=-1.0),
    "a plain network": lambda: network(2, 5, 3),
    "one layer without bias": lambda: Residual(laplacian_by_autograd, without_bias(network(2, 6, 5, 1))),
    "a frozen weight, its bias free": lambda: Residual(laplacian_by_autograd, frozen(network(2, 6, 5, 1), "2.weight")),
    "a frozen bias, its weight free": lambda: Residual(laplacian_by_autograd, frozen(network(2, 6, 5, 1), "0.bias")),
    "a bias made from a parameter": lambda: MadeBias(),
    "a tied layer": lambda: Residual(laplacian_by_autograd, tied()),
}


def without_bias(net):
    net[2] = torch.nn.Linear(6, 5, bias=False, dtype=torch.float64)
    return net


def frozen(net, name):
    net.get_parameter(name).requires_grad_(False)
    return net


def tied():
    net = network(2, 5, 5, 5, 1)
    net[4].weight = net[2].weight
    return net


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_other_residuals(make):
    module = make()
    J, values = by_uses(module, X)
    expected = by_reverse_mode(module, X)
    torch.testing.assert_close(J, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))
    torch.testing.assert_close(values, module(X).detach().reshape(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("laplacian", LAPLACIANS, ids=lambda function: function.__name__)
def test_it_is_the_route_of_residuals_that_differentiate(laplacian):
    model = ModuleModel(Residual(laplacian, network(2, 6, 5, 1)))
    problem = LeastSquaresProblem(model, ArrayRows(X, None), model.theta)
    assert choose_route(problem, model.theta).name == "weight uses"


def test_in_float32():
    module = Residual(laplacian_by_autograd, network(2, 8, 7, 1))
    expected = by_reverse_mode(module, X)
    J, values = by_uses(module.float(), X.float())
    assert J.dtype == values.dtype == torch.float32
    torch.testing.assert_close(J.double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


class WeightElsewhere(torch.nn.Module):
    """Every row also sees the size of the weight, which no layer shows."""

    def __init__(self):
        super().__init__()
        self.net = network(2, 4, 1)

    def forward(self, x):
        return self.net(x)[:, 0] + self.net[0].weight.square().sum()


class MadeWeight(torch.nn.Module):
    """The second weight is made from the first, and has a bias of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.bias = network(3, 3), torch.nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        hidden = torch.tanh(self.first(torch.cat([x, x[:, :1]], 1)))
        return torch.nn.functional.linear(hidden, 2 * self.first[0].weight.T, self.bias).sum(1)


class MadeBias(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.log_bias = network(2, 4, 4), torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        return torch.nn.functional.linear(self.net(x), self.net[2].weight, self.log_bias.exp()).sum(1)


class Rolled(torch.nn.Module):
    """The layer meets pairs of rows: its first axis is not that of the rows."""

    def __init__(self):
        super().__init__()
        self.net = network(2, 4, 1)

    def forward(self, x):
        return self.net(torch.cat([x, -x]))[: len(x), 0]


REFUSED = {
    "a weight besides its layer": (WeightElsewhere, "besides its layer"),
    "a weight made from another": (MadeWeight, "besides its layer"),
    "another first axis": (Rolled, "rows as its first axis"),
    "a convolution": (
        lambda: torch.nn.Sequential(torch.nn.Conv1d(2, 40, 1), torch.nn.Flatten()).double(),
        "not in linear layers",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_it_cannot_do_is_refused(make, message):
    x = X[:, :, None] if message == "not in linear layers" else X
    with pytest.raises(ValueError, match=message):
        by_uses(make(), x)


class Switching(torch.nn.Module):
    """From a value of x on the weight is used without its layer."""

    def __init__(self):
        super().__init__()
        self.net = network(2, 4, 1)

    def forward(self, x):
        extra = self.net[0].weight.square().sum() if bool((x > 1).all()) else 0.0
        return self.net(x)[:, 0] + extra


def test_another_route_takes_over_where_the_uses_do_not_tell_all():
    model = ModuleModel(Switching())
    problem = LeastSquaresProblem(model, ArrayRows(X, None), model.theta)
    called = []

    def otherwise(problem, theta):
        called.append(len(theta))
        return choose_route(problem, theta, without=("layerwise", "layers", "weight uses", "rowwise"))

    route = WeightUses(jacobian_vector, otherwise)
    columns = torch.empty(model.theta.numel(), ROWS, dtype=torch.float64)
    route(problem, model.theta, problem.read(0, slice(0, ROWS), 0), columns)
    assert not called
    far = LeastSquaresProblem(model, ArrayRows(X + 1.5, None), model.theta)
    route(far, model.theta, far.read(0, slice(0, ROWS), 0), columns)
    torch.testing.assert_close(columns.T, by_reverse_mode(model.module, X + 1.5), rtol=1e-12, atol=1e-12)
    assert called == [model.theta.numel()]


def test_sums_over_rows_that_cancel_do_not_hide_a_parameter():
    # r = (x_1 - 1/2) c + net: with x_1 symmetrical about 1/2 the plain sum of dr/dc over the rows is 0
    def shifted(self, x):
        return (x[:, 0] - 0.5) * self.c + self.net(x)[:, 0]

    x = torch.cat([X, torch.stack([1 - X[:, 0], X[:, 1]], 1)])
    J, _ = by_uses(Residual(shifted, network(2, 3, 1), c=2.0), x)
    torch.testing.assert_close(J[:, 0], x[:, 0] - 0.5, rtol=1e-12, atol=1e-15)
    assert math.isclose(float(J[:, 0].sum()), 0.0, abs_tol=1e-12)


def test_functional_call_leaves_the_network_as_it_was():
    net = network(2, 4, 1)
    before = [p.clone() for p in net.parameters()]
    by_uses(Residual(laplacian_by_autograd, net), X)
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(net.parameters(), before, strict=True))
    assert functional_call(net, {}, (X,)).shape == (ROWS, 1)
