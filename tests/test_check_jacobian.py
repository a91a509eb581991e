"""check_jacobian names the parameter and the row that disagree, and never blames rounding."""

import numpy as np
import pytest
import torch

from lmfit_gpu import check_jacobian
from lmfit_gpu.datasets import NIST_NAMES, load_nist
from lmfit_gpu.exceptions import NonFiniteError

x = np.linspace(0, 4, 40)
THETA = [2.0, 0.5, 1.0]


def decay(x, a, b, c):
    return a * np.exp(-b * x) + c


def right(x, a, b, c):
    return np.stack([np.exp(-b * x), -a * x * np.exp(-b * x), np.ones_like(x)], axis=1)


def torch_decay(x, a, b, c):
    return a * torch.exp(-b * x) + c


def changed(change):
    def jac(x, a, b, c):
        J = right(x, a, b, c)
        return change(J, x)

    return jac


def one_entry(J, x):
    J[17, 1] *= 1.001
    return J


def not_a_number(J, x):
    J[3, 2] = np.nan
    return J


def test_right_derivatives_pass():
    check = check_jacobian(decay, x, THETA, jac=right)
    assert check.ok
    assert check.n_wrong == 0
    assert str(check).startswith("the derivatives agree")


@pytest.mark.parametrize(
    ("change", "parameter", "row"),
    [
        (lambda J, x: J * [1, -1, 1], "b", None),
        (lambda J, x: J * [1, 1, 2], "c", None),
        (lambda J, x: J * [1, 1 + 1e-4, 1], "b", None),
        (lambda J, x: np.stack([J[:, 0], -2 * J[:, 0], J[:, 2]], 1), "b", 0),  # the chain rule's x is missing
        (lambda J, x: J[:, [0, 2, 1]], None, None),
        (one_entry, "b", 17),
        (not_a_number, "c", 3),
    ],
    ids=["sign", "factor", "a little", "chain rule", "order", "one entry", "nan"],
)
def test_what_is_wrong_is_named(change, parameter, row):
    check = check_jacobian(decay, x, THETA, jac=changed(change))
    assert not check.ok
    assert parameter in (None, check.parameter)
    assert row in (None, check.row)
    assert f"derivative by {check.parameter!r} in row {check.row}" in str(check)
    exact = right(x, *THETA)[check.row, "abc".index(check.parameter)]
    assert check.expected == pytest.approx(exact, rel=1e-8, abs=1e-8)
    assert abs(check.expected - exact) <= check.error + 1e-14


def test_the_sentence():
    check = check_jacobian(decay, x, THETA, jac=changed(one_entry))
    assert str(check) == (
        "derivative by 'b' in row 17: -1.4598 given, -1.45834 by differences (off by 0.1 %, 1.5e-05 is allowed)"
    )


def test_a_transposed_jacobian():
    with pytest.raises(ValueError, match=r"jac: returned shape \(3, 40\); expected \(40, 3\)"):
        check_jacobian(decay, x, THETA, jac=lambda *args: right(*args).T)
    assert not check_jacobian(decay, x[:3], THETA, jac=lambda *args: right(*args).T).ok


def test_a_jacobian_written_in_torch():
    def jac(x, a, b, c):
        return torch.stack([torch.exp(-b * x), -a * x * torch.exp(-b * x), torch.ones_like(x)], dim=1)

    assert check_jacobian(torch_decay, torch.from_numpy(x), THETA, jac=jac).ok


@pytest.mark.parametrize("theta", [THETA, dict(zip("cab", [1.0, 2.0, 0.5], strict=True)), torch.tensor(THETA)])
@pytest.mark.parametrize("X", [x, x[:, None], torch.from_numpy(x)])
def test_autograd_of_torch_functions(X, theta):
    assert check_jacobian(torch_decay, X, theta).ok


@pytest.mark.parametrize(
    ("model", "parameter"),
    [
        (lambda x, a, b: a * torch.exp(-b.detach() * x), "b"),
        (lambda x, a, b: a * torch.exp(-float(b.detach()) * x), "b"),
        (lambda x, a, b: a.item() * torch.exp(-b * x), "a"),
        (lambda x, a, b: a * x + float(b.detach() if isinstance(b, torch.Tensor) else b) * x**2, "b"),
    ],
    ids=["detach", "float", "item", "numpy and torch"],
)
def test_a_parameter_that_leaves_the_graph_is_named(model, parameter):
    check = check_jacobian(model, x, [2.0, 0.5])
    assert not check.ok
    assert check.parameter == parameter
    assert check.given == 0


def test_a_nan_derivative_is_named():
    check = check_jacobian(lambda x, a: torch.sqrt(a * x), x, [2.0])
    assert (check.ok, check.parameter, check.row) == (False, "a", 0)
    assert np.isnan(check.given)


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 3)
        self.gain = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, X):
        return torch.tanh(self.inner(X)) * self.gain.detach()


def test_modules(rng):
    X = rng.standard_normal((30, 2))
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    before = [p.clone() for p in net.parameters()]
    assert check_jacobian(net, X).ok  # float32 weights, checked in float64
    assert all(bool((p == q).all()) and p.dtype == torch.float32 for p, q in zip(net.parameters(), before, strict=True))
    check = check_jacobian(Gated(), X)
    assert (check.ok, check.parameter) == (False, "gain")
    assert 0 <= check.row < 30


@pytest.mark.parametrize("seed", range(8))
def test_kinks_and_units_that_are_off(seed):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.ReLU(), torch.nn.Linear(6, 1))
    check = check_jacobian(net, np.random.default_rng(seed).standard_normal((50, 2)))
    assert check.ok, check


def test_residual_callables():
    def residual(theta, X, y):
        return theta[0] * np.exp(-theta[1] * X) - y

    def jac(theta, X, y):
        e = np.exp(-theta[1] * X)
        return np.stack([e, -theta[0] * X * e], axis=1)

    assert check_jacobian(residual, x, [2.0, 0.5], y=x, jac=jac).ok
    check = check_jacobian(residual, x, {"s": 2.0, "t": 0.5}, y=x, jac=lambda *args: -jac(*args))
    assert not check.ok
    assert check.parameter in "st"
    assert check_jacobian(lambda t, X, y: t[0] * torch.exp(-t[1] * X) - y, x, [2.0, 0.5], y=x).ok


def test_coupled_rows():
    assert check_jacobian(lambda x, a, b: torch.cumsum(a * torch.exp(-b * x), 0), x, [2.0, 0.5]).ok


@pytest.mark.parametrize("n_rows", [5000, 20_000])
def test_rows_of_later_blocks(n_rows):
    X = np.linspace(0, 4, n_rows)
    wrong = n_rows - 7

    def jac(x, a, b, c):  # blocks of rows are not told their number
        J = right(x, a, b, c)
        J[x == X[wrong], 1] *= 1.01
        return J

    check = check_jacobian(decay, X, THETA, jac=jac)
    assert (check.ok, check.parameter, check.row, check.n_wrong) == (False, "b", wrong, 1)


@pytest.mark.parametrize(
    "model",
    [
        lambda x, a, b: np.floor(a * x + b),
        lambda x, a, b: np.round(a * np.exp(-b * x), 2),
        lambda x, a, b: np.float64(np.float16(a * np.exp(-b * x))),
    ],
    ids=["integers", "rounded", "float16"],
)
def test_rounded_models_are_undecided_not_wrong_for_the_true_derivative(model):
    def jac(x, a, b):
        if model(x, 1.0, 0.0)[1] == 0:  # floor
            return np.stack([x, np.ones_like(x)], axis=1)
        return right(x, a, b, 0)[:, :2]

    check = check_jacobian(model, x, [2.3, 0.5], jac=jac)
    assert check.n_wrong == 0, check
    if not check.ok:
        assert "differences cannot decide for" in str(check)
        assert check.undecided


def test_integers_cannot_be_decided():
    def jac(x, a, b):
        return np.stack([x, np.ones_like(x)], axis=1)

    check = check_jacobian(lambda x, a, b: np.floor(a * x + b), x, [2.3, 0.5], jac=jac)
    assert not check.ok
    assert check.undecided


def test_float32_inside_is_rounding_not_disagreement():
    def single(x, a, b):
        return (a.float() * torch.exp(-b.float() * x.float())).double()

    assert check_jacobian(single, torch.from_numpy(x), [2.0, 0.5], rtol=1e-3).ok
    assert check_jacobian(single, torch.from_numpy(x), [2.0, 0.5]).n_wrong == 0


@pytest.mark.parametrize("theta", [[0.0, 0.0, 0.0], [1e-9, 0.5, 1e-9], [1e9, 0.5, 1e9], [2.0, 1e-9, 0.0]])
def test_any_scale_of_parameters(theta):
    assert check_jacobian(torch_decay, x, theta).ok
    assert check_jacobian(lambda x, a, b, c: torch_decay(x, a, b * 1e9, c), 1e-9 * x, theta).ok


@pytest.mark.parametrize("name", NIST_NAMES)
def test_no_false_alarm_at_nist_starts_and_solutions(name):
    problem = load_nist(name)
    for theta in (*problem.starts, problem.certified.params):
        check = check_jacobian(problem.model_torch, problem.X, theta, rtol=1e-8)
        assert check.ok, check


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((3, x, [1.0]), {}, TypeError, "model: got 3"),
        ((decay, x, THETA), {}, ValueError, "jac: got None; a model in numpy"),
        ((decay, x), {"jac": right}, ValueError, "theta: got None"),
        ((decay, x, [1.0, 2.0]), {"jac": right}, ValueError, "theta: got 2 values, but the model takes 3"),
        ((decay, x, [1.0, np.nan, 1.0]), {"jac": right}, ValueError, "theta: got .* all finite"),
        ((decay, x, "auto"), {"jac": right}, TypeError, "theta: got 'auto'"),
        ((decay, [], THETA), {"jac": right}, ValueError, "X: got"),
        ((decay, ["a"], THETA), {"jac": right}, ValueError, "X: got"),
        ((decay, x, THETA), {"jac": "3-point"}, TypeError, "jac: got '3-point'"),
        ((decay, x, THETA), {"jac": right, "rtol": -1}, ValueError, "rtol: got -1"),
        ((torch.nn.Linear(1, 1), x), {"jac": right}, ValueError, "jac: a Jacobian function needs a model function"),
        ((torch.nn.Linear(1, 1), x), {"y": x}, ValueError, "y: goes with a residual callable"),
        ((lambda t, X, y: X - y, x, [1.0]), {"y": x[:3]}, ValueError, "y: got 3 rows for 40"),
        ((lambda x, a: torch.log(a * x), x - 1, [2.0]), {}, NonFiniteError, r"not finite in 10 places, rows \[0, 1, 2"),
    ],
)
def test_bad_input(arguments, options, error, message):
    with pytest.raises(error, match=message):
        check_jacobian(*arguments, **options)
