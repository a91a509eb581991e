"""LMA on residuals that differentiate the network: steps by hand, groups, attention, proximal steps, solutions."""

import math

import pytest
import torch
from torch.func import grad, vmap

from lmfit_gpu import LMA, MarquardtDamping, ProximalDamping, ResidualAttention
from lmfit_gpu.autodiff import forward_mode

INSIDE = torch.linspace(0.0, 1.0, 42, dtype=torch.float64)[1:-1, None]
ENDS = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
SOURCE = math.pi**2 * torch.sin(math.pi * INSIDE[:, 0])  # of -u'' = f with u = sin(pi x)
X, Y = {"inside": INSIDE, "ends": ENDS}, {"inside": SOURCE, "ends": torch.zeros(2, dtype=torch.float64)}
WEIGHTS = {"ends": 100.0}


@pytest.fixture(scope="module", autouse=True)
def forward_formulas():
    """Let torch load its forward formulas in silence: it warns of torch.jit's deprecation."""
    with forward_mode():
        pass


def network(width=10, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)).double()


def by_autograd(net, x, source):
    x.requires_grad_()
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return torch.autograd.grad(slope.sum(), x, create_graph=True)[0][:, 0] + source


def by_func(net, x, source):
    return vmap(grad(grad(lambda point: net(point[None])[0])))(x[:, 0]) + source


def at_ends(net, x, target):
    return net(x)[:, 0] - target


STYLES = {"autograd": by_autograd, "torch.func": by_func}


def residuals_and_jacobian(net, inside=by_autograd):
    """Return the residuals of each group and their J, one backward pass a residual."""
    found = {}
    for name, function in {"inside": inside, "ends": at_ends}.items():
        r = function(net, X[name].clone(), Y[name])
        rows = [torch.autograd.grad(v, list(net.parameters()), retain_graph=True, materialize_grads=True) for v in r]
        found[name] = r.detach(), torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])
    return found


def vector(net):
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def damped(r, J, per_row):
    """Return the minimiser of the mean of (r + J p)²/2 + per_row |p|²/2."""
    m, n = J.shape
    return torch.linalg.solve(J.T @ J / m + per_row * torch.eye(n, dtype=torch.float64), -J.T @ r / m)


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())
@pytest.mark.parametrize("solver", ["qr", "cholesky", "cg"])
def test_a_proximal_step_is_that_of_explicit_j(style, solver):
    net = network()
    start, found = vector(net), residuals_and_jacobian(net)
    roots = {"inside": 1.0, "ends": WEIGHTS["ends"] ** 0.5}
    r, J = (torch.cat([roots[name] * found[name][k] for name in roots]) for k in (0, 1))
    expected = damped(r, J, 1 / 1e-3)
    lma = LMA(
        net,
        "cpu",
        {"inside": style, "ends": at_ends},
        solver=solver,
        weights=WEIGHTS,
        damping=ProximalDamping(step_size=1e-3),
    )
    loss, _ = lma.step(X, Y)
    assert lma.record.accepted
    torch.testing.assert_close(vector(net) - start, expected, rtol=0, atol=1e-8 * float(expected.abs().max()))
    after = residuals_and_jacobian(net)
    mean = sum(float((roots[name] * after[name][0]).square().sum()) for name in roots) / 42
    assert loss == pytest.approx(mean, rel=1e-9)


def test_a_proximal_step_does_not_depend_on_the_number_of_rows():
    ends = []
    for repeats in (1, 3):
        net = network()
        lma = LMA(net, "cpu", by_autograd, damping=ProximalDamping(step_size=0.1))
        lma.step(INSIDE.repeat(repeats, 1), SOURCE.repeat(repeats))
        ends.append(vector(net))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-12)


def test_two_devices_and_slices_make_the_same_step():
    ends = []
    for devices, slice_size in (("cpu", None), (["cpu", "cpu"], 7)):
        net = network()
        lma = LMA(net, devices, {"inside": by_autograd, "ends": at_ends}, weights=WEIGHTS)
        for _ in range(3):
            lma.step(X, Y, slice_size=slice_size)
        ends.append(vector(net))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-8, atol=1e-10)


def test_attention_multiplies_the_residuals_of_rows():
    net = network()
    start, found = vector(net), residuals_and_jacobian(net)
    attention = ResidualAttention(decay=0.5, rate=1.0)
    factors = attention.updated(None, {name: r for name, (r, _) in found.items()})
    r, J = (
        torch.cat([factors[name] * found[name][0] for name in found]),
        torch.cat([factors[n][:, None] * found[n][1] for n in found]),
    )
    damping = MarquardtDamping(start_damping=10.0, scaling="identity")
    lma = LMA(net, "cpu", {"inside": by_autograd, "ends": at_ends}, attention=attention, damping=damping)
    lma.step(X, Y)
    assert lma.record.accepted
    expected = damped(r, J, 10.0)
    torch.testing.assert_close(vector(net) - start, expected, rtol=0, atol=1e-8 * float(expected.abs().max()))


def test_attention_of_rows_with_two_residuals():
    def both(net, x, source):
        return torch.stack([by_autograd(net, x, source), net(x)[:, 0]], 1)

    net = network()
    lma = LMA(net, "cpu", both, attention=ResidualAttention())
    first = lma.step(INSIDE, SOURCE)[0]
    second = lma.step(INSIDE, SOURCE)[0]
    assert second < first
    (factors,) = lma.state_dict()["memory"]["row_weights"].values()
    assert factors.shape == (len(INSIDE),)


def test_attention_needs_the_same_rows():
    lma = LMA(network(), "cpu", by_autograd, attention=ResidualAttention())
    lma.step(INSIDE, SOURCE)
    with pytest.raises(ValueError, match="attention: got 10 rows, 40 in the step before"):
        lma.step(INSIDE[:10], SOURCE[:10])


@pytest.mark.parametrize("bad", [True, "rba", ResidualAttention], ids=["True", "a string", "the class"])
def test_what_is_no_attention_is_refused(bad):
    with pytest.raises(TypeError, match="attention: got"):
        LMA(network(), "cpu", by_autograd, attention=bad)


def test_attention_goes_on_from_its_state():
    net = network()
    functions = {"inside": by_autograd, "ends": at_ends}
    lma = LMA(net, "cpu", functions, attention=ResidualAttention())
    for _ in range(3):
        lma.step(X, Y)
    other = network(seed=1)
    other.load_state_dict(net.state_dict())
    resumed = LMA(other, "cpu", functions, attention=ResidualAttention())
    resumed.load_state_dict(lma.state_dict())
    for _ in range(3):
        assert lma.step(X, Y) == resumed.step(X, Y)
    assert torch.equal(vector(net), vector(other))


OPTIONS = {
    "trust region": {},
    "attention": {"attention": ResidualAttention()},
    "proximal": {"damping": "proximal"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_boundary_value_problem_is_solved(options):
    net = network()
    lma = LMA(net, "cpu", {"inside": by_autograd, "ends": at_ends}, weights=WEIGHTS, **options)
    for _ in range(60):
        lma.step(X, Y)
    x = torch.linspace(0, 1, 101, dtype=torch.float64)
    exact = torch.sin(math.pi * x)
    with torch.no_grad():
        error = torch.linalg.vector_norm(net(x[:, None])[:, 0] - exact) / torch.linalg.vector_norm(exact)
    assert float(error) < 1e-4


class WithCoefficient(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.log_k = network(), torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        return self.net(x)


def test_a_coefficient_of_the_equation_is_found():
    # -k u'' = pi^2 sin(pi x) and u = sin(pi x) / 2 is observed: k = 2
    def equation(model, x, source):
        return model.log_k.exp() * (by_autograd(model.net, x, 0.0)) + source

    model = WithCoefficient()
    data = torch.sin(math.pi * INSIDE[:, 0]) / 2
    lma = LMA(model, "cpu", {"equation": equation, "data": at_ends}, weights={"data": 100.0})
    for _ in range(60):
        lma.step({"equation": INSIDE, "data": INSIDE}, {"equation": SOURCE, "data": data})
    assert float(model.log_k.detach().exp()) == pytest.approx(2.0, rel=1e-3)
