"""Difference schemes: accuracy against autograd, the rule for the step, the edge of a domain."""

import numpy as np
import pytest
import torch
from oracles import (
    central_differences,
    module_model,
    numpy_model,
    problem_of,
    relative_column_error,
    torch_model,
    values_of,
)

from lmfit_gpu.differences import Differences, start_differences
from lmfit_gpu.jacobian import Derivatives
from lmfit_gpu.models import ResidualOf

N = 50
X1 = np.linspace(0.1, 2.0, N)
X3 = np.stack([X1, np.sin(X1), X1**2], 1)
Y = np.cos(X1)
SCHEMES = ["2-point", "3-point", "cs"]
ACCURACY = {"2-point": 1e-6, "3-point": 1e-8, "cs": 1e-13}


def tensor(values):
    return torch.as_tensor(np.asarray(values, dtype=float))


def jacobian(problem, theta, jac):
    theta = tensor(theta)
    return torch.cat([J for _, J in Derivatives.choose(problem, jac, theta).at(theta).blocks()])


def exact(function, X, theta, order="params"):
    """Return J of a torch function by one backward pass per value."""
    x = torch.as_tensor(X)
    call = (lambda t: function(x, *t.unbind())) if order == "params" else (lambda t: function(x, t))
    J = torch.autograd.functional.jacobian(call, tensor(theta))
    return J.reshape(-1, len(theta))


SMOOTH = {
    "decay": (lambda lib: lambda x, a, b, c: a * lib.exp(-b * x) + c, "params", X1, [1.3, 0.7, 0.4]),
    "rational": (lambda lib: lambda x, a, b, c: a * x / (b + x) + c * x**2, "params", X1, [1.3, 0.7, 0.4]),
    "power": (lambda lib: lambda x, a, b: a * x**b, "params", X1, [2.0, 1.5]),
    "waves": (lambda lib: lambda x, a, b: a * lib.sin(b * x) + lib.cosh(a * x), "params", X1, [0.9, 2.1]),
    "matrix": (lambda lib: lambda X, theta: lib.tanh(X @ theta), "theta", X3, [0.3, -0.2, 0.5]),
    "two-outputs": (
        lambda lib: lambda x, a, b: lib.stack([a * lib.exp(-b * x), lib.sin(a * b * x)], 1),
        "params", X1, [1.3, 0.7],
    ),
}  # fmt: skip


@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", SMOOTH)
def test_accuracy_of_callables(name, scheme, library):
    make, order, X, theta = SMOOTH[name]
    model = (numpy_model if library is np else torch_model)(make(library), order)
    y = np.stack([Y, -Y], 1) if name == "two-outputs" else Y
    J = jacobian(problem_of(model, X, y, theta), theta, scheme)
    assert relative_column_error(J, exact(make(torch), X, theta, order)) < ACCURACY[scheme]


def network():
    torch.manual_seed(2)
    return module_model(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_accuracy_of_a_module(scheme):
    model = network()
    theta = model.theta.clone()
    problem = problem_of(model, X3, Y, theta)
    autograd = jacobian(problem, theta, "autograd")
    assert relative_column_error(autograd, central_differences(values_of(model, tensor(X3)), theta)) < 1e-8
    assert relative_column_error(jacobian(problem, theta, scheme), autograd) < ACCURACY[scheme]


@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
def test_perturbed_modules_together_are_the_loop(scheme):
    model = network()
    theta = model.theta.clone()
    problem = problem_of(model, X3, Y, theta)
    together = start_differences(problem, theta, scheme)
    assert together.together
    loop = Differences(scheme, together.steps)
    columns = [torch.empty(theta.numel(), N, dtype=torch.float64) for _ in range(2)]
    for differences, filled in zip((together, loop), columns, strict=True):
        differences(problem, theta, problem.probe(), filled)
    # rounding of two kernels over the step: ε / 1e-9
    torch.testing.assert_close(columns[0], columns[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
def test_batches_of_perturbed_parameters_are_one_loop(scheme, monkeypatch):
    model = network()
    theta = model.theta.clone()
    problem = problem_of(model, X3, Y, theta)
    expected = jacobian(problem, theta, scheme)
    monkeypatch.setattr("lmfit_gpu.differences.TOGETHER_BYTES", 3 * 8 * N)  # three parameters at a time
    torch.testing.assert_close(jacobian(problem, theta, scheme), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_passes_are_the_evaluations_made(scheme):
    calls = []

    def function(x, a, b):
        calls.append(1)
        return a * np.exp(-b * x)

    theta = tensor([1.3, 0.7])
    problem = problem_of(numpy_model(function), X1, Y, theta)
    differences = start_differences(problem, theta, scheme)
    calls.clear()
    differences(problem, theta, problem.probe(), torch.empty(2, N, dtype=torch.float64))
    assert len(calls) == differences.passes(2)


# --- the step ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 1e-9, 1e-30, -1e-12, 1.0, 1e9])
@pytest.mark.parametrize("slope", [0.0, 3.0])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
def test_a_small_or_large_start_has_an_accurate_column(p, slope, scheme, library):
    model = (numpy_model if library is np else torch_model)(lambda x, p: p + slope * x)
    J = jacobian(problem_of(model, X1, Y, [p]), [p], scheme)
    assert relative_column_error(J, np.ones((N, 1))) < 2e-6


@pytest.mark.parametrize("p", [0.0, 1e-9, 1e-30, -1e-12])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_small_rate_beside_a_large_effect(p, scheme):
    """y = 100 exp(−p x): only x p matters."""
    x = np.linspace(0, 50, N)
    model = numpy_model(lambda x, p: 100 * np.exp(-p * x))
    J = jacobian(problem_of(model, x, 100 * np.exp(-0.02 * x), [p]), [p], scheme)
    error = relative_column_error(J, (-100 * x * np.exp(-p * x))[:, None])
    assert error < {"2-point": 1e-4, "3-point": 1e-6, "cs": 1e-13}[scheme]


@pytest.mark.parametrize(("scheme", "accuracy"), [("2-point", 1e-2), ("3-point", 1e-3), ("cs", 1e-13)])
def test_an_offset_of_1e10(scheme, accuracy):
    """Values keep six digits after the point: a step of √ε would show nothing but rounding."""
    theta = [1.3, 0.7]
    model = numpy_model(lambda x, a, b: 1e10 + a * np.exp(-b * x))
    y = 1e10 + 2.0 * np.exp(-0.5 * X1)
    expected = np.stack([np.exp(-0.7 * X1), -1.3 * X1 * np.exp(-0.7 * X1)], 1)
    assert relative_column_error(jacobian(problem_of(model, X1, y, theta), theta, scheme), expected) < accuracy


@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
def test_an_exact_start_still_has_columns(scheme):
    """r = 0: what matters is not known, the step found on the probe stays."""
    model = numpy_model(lambda x, a, b: a * np.exp(-b * x))
    theta = [1.3, 0.0]
    J = jacobian(problem_of(model, X1, np.full(N, 1.3), theta), theta, scheme)
    expected = np.stack([np.ones(N), -1.3 * X1], 1)
    assert relative_column_error(J, expected) < 2e-6


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_parameter_without_effect_has_a_zero_column(scheme):
    theta = [1.3, 0.7]
    J = jacobian(problem_of(numpy_model(lambda x, a, b: a * x), X1, Y, theta), theta, scheme)
    assert J[:, 1].abs().max() == 0
    assert relative_column_error(J[:, :1], X1[:, None]) < ACCURACY[scheme]


def test_steps_follow_the_point():
    """After a move from 1 to 1e6 the step is of the new size; a zero column leaves its step."""
    theta = tensor([1.0, 1.0])
    problem = problem_of(numpy_model(lambda x, a, b: a * x + 0 * b), X1, Y, theta)
    start = start_differences(problem, theta, "2-point")
    moved = start.adapted(tensor([1e6, 1e6]), 1e6, 1.0, tensor([1.0, 0.0]))
    assert float(moved.steps[0]) == pytest.approx(1e6 * np.finfo(float).eps ** 0.5, rel=0.5)
    assert float(moved.steps[1]) == float(start.steps[1])


def test_relative_error_is_an_upper_bound_of_the_order_of_the_scheme():
    theta = tensor([1.3, 0.7])
    problem = problem_of(numpy_model(lambda x, a, b: a * np.exp(-b * x)), X1, Y, theta)
    expected = exact(lambda x, a, b: a * torch.exp(-b * x), X1, theta)
    for scheme in ("2-point", "3-point"):
        differences = start_differences(problem, theta, scheme)
        columns = torch.empty(2, N, dtype=torch.float64)
        values = differences(problem, theta, problem.probe(), columns)
        claimed = differences.relative_error(expected.norm(dim=0), float(values.norm()))
        assert relative_column_error(columns.T, expected) < 10 * claimed
        assert claimed < 1e-6
    assert start_differences(problem, theta, "cs").relative_error(expected.norm(dim=0), 1.0) == 0.0


# --- the edge of a domain ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("gap", [1e-5, 1e-7, 1e-9, 1e-12])
def test_log_just_inside_its_domain(gap, library, scheme):
    """A step forward leaves the domain in one row; the other rows are smooth."""
    s = X1[0] - gap
    model = (numpy_model if library is np else torch_model)(lambda x, a, s: a * library.log(x - s))
    J = jacobian(problem_of(model, X1, Y, [1.3, s]), [1.3, s], scheme).numpy()
    assert np.isfinite(J).all()
    np.testing.assert_allclose(J[1:, 1], -1.3 / (X1[1:] - s), rtol=1e-3)
    assert J[0, 1] < 0


@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
def test_sqrt_at_the_end_of_its_domain(scheme):
    """x − s is 0 in one row, where the derivative is −∞: only the step back is finite."""
    s = X1[0]
    model = numpy_model(lambda x, a, s: a * np.sqrt(x - s))
    J = jacobian(problem_of(model, X1, Y, [1.3, s]), [1.3, s], scheme).numpy()
    assert np.isfinite(J).all()
    np.testing.assert_allclose(J[1:, 1], -0.65 / np.sqrt(X1[1:] - s), rtol=1e-3)
    assert J[0, 1] < 0


@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
def test_sqrt_of_a_parameter_at_zero(scheme):
    """√p at p = 0 exists to the right alone."""
    model = numpy_model(lambda x, p: np.sqrt(p) + x)
    J = jacobian(problem_of(model, X1, Y, [0.0]), [0.0], scheme)
    assert torch.isfinite(J).all()
    assert (J > 0).all()


# --- the complex step -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Casting complex values to real:numpy.exceptions.ComplexWarning")
@pytest.mark.parametrize(
    ("model", "name"),
    [
        (numpy_model(lambda x, a, b: np.abs(a * x - b)), "numpy-abs"),
        (numpy_model(lambda x, a, b: a * np.hypot(x.real, np.abs(b))), "numpy-norm"),
        (numpy_model(lambda x, a, b: np.real(a) * x + b), "numpy-real"),
        (numpy_model(lambda x, a, b: np.asarray(a * x + b).astype(float)), "numpy-cast"),
        (numpy_model(lambda x, a, b: a * x + (b * b.conjugate()).real), "numpy-conjugate"),
        (torch_model(lambda x, a, b: torch.abs(a * x - b)), "torch-abs"),
        (torch_model(lambda x, a, b: torch.where(a * x > b, a * x, b)), "torch-comparison"),
        (torch_model(lambda x, a, b: torch.clamp(a * x, min=0.5) + b), "torch-clamp"),
        (
            module_model(torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))),
            "relu",
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_the_complex_step_refuses_what_is_not_analytic(model, name):
    theta = model.theta if name == "relu" else tensor([1.3, 0.7])
    problem = problem_of(model, X1[:, None] if name == "relu" else X1, Y, theta)
    with pytest.raises(ValueError, match=r"jac='cs': the complex step does not work .* '3-point'"):
        start_differences(problem, theta, "cs")


def test_a_comparison_of_real_parts_is_right():
    """numpy orders complex numbers by their real parts: a branch is then as good as a smooth model."""
    function = lambda x, a, b: np.where(x > b, a * (x - b), 0)  # noqa: E731
    theta = tensor([1.3, 0.7001])
    J = jacobian(problem_of(numpy_model(function), X1, Y, theta), theta, "cs")
    right = X1 > 0.7001
    expected = np.stack([right * (X1 - 0.7001), -1.3 * right], 1)
    np.testing.assert_allclose(J, expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
def test_the_complex_step_with_several_blocks_and_a_residual(library, rng):
    x = rng.normal(size=(300, 3))
    y = rng.normal(size=300)
    model = (numpy_model if library is np else torch_model)(lambda theta, X, y: library.tanh(X @ theta) - y, "residual")
    theta = tensor([0.3, -0.2, 0.5])
    J = jacobian(problem_of(model, x, y, theta, chunk_rows=64), theta, "cs")
    assert relative_column_error(J, exact(lambda X, t: torch.tanh(X @ t), x, theta, "theta")) < 1e-13


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_residual_of_a_numpy_model(scheme):
    model = ResidualOf(numpy_model(lambda x, a, b: a * np.exp(-b * x)), lambda pred, target: np.sinh(pred - target))
    theta = tensor([1.3, 0.7])
    expected = exact(lambda x, a, b: torch.sinh(a * torch.exp(-b * x) - tensor(Y)), X1, theta)
    J = jacobian(problem_of(model, X1, Y, theta), theta, scheme)
    assert relative_column_error(J, expected) < ACCURACY[scheme]


# --- the user's Jacobian ----------------------------------------------------------------------------------

DECAY = np.stack([np.exp(-0.7 * X1), -1.3 * X1 * np.exp(-0.7 * X1)], 1)


def decay(library):
    return lambda x, a, b: a * library.exp(-b * x)


def decay_jac(library):
    return lambda x, a, b: library.stack([library.exp(-b * x), -a * x * library.exp(-b * x)], 1)


@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("order", ["params", "theta", "residual"])
def test_a_jacobian_of_the_user(order, library):
    spread = {
        "params": lambda f: f,
        "theta": lambda f: lambda x, theta: f(x, theta[0], theta[1]),
        "residual": lambda f: lambda theta, x, y: f(x, theta[0], theta[1]),
    }[order]
    model = (numpy_model if library is np else torch_model)(spread(decay(library)), order)
    theta = [1.3, 0.7]
    problem = problem_of(model, X1, Y, theta, chunk_rows=16)
    np.testing.assert_allclose(jacobian(problem, theta, spread(decay_jac(library))), DECAY, rtol=1e-13)


def test_a_numpy_jacobian_of_a_model_of_both_worlds():
    """a x² + b x is taken in torch; its Jacobian may still be written in numpy."""
    theta = [1.3, 0.7]
    problem = problem_of(torch_model(lambda x, a, b: a * x**2 + b * x), X1, Y, theta)
    J = jacobian(problem, theta, lambda x, a, b: np.column_stack([np.square(x), x]))
    np.testing.assert_allclose(J, np.stack([X1**2, X1], 1))


def test_a_jacobian_of_several_outputs():
    model = numpy_model(lambda x, a, b: np.stack([a * x, b * x**2], 1))
    jac = lambda x, a, b: np.stack([np.stack([x, 0 * x], 1), np.stack([0 * x, x**2], 1)], 1)  # noqa: E731  (n, 2, 2)
    theta = [1.3, 0.7]
    problem = problem_of(model, X1, np.stack([Y, Y], 1), theta)
    J = jacobian(problem, theta, jac)
    np.testing.assert_allclose(J, jac(X1, 1.3, 0.7).reshape(-1, 2))


@pytest.mark.parametrize(
    ("jac", "shape"),
    [
        (lambda x, a, b: np.stack([x, x]), r"\(2, 50\)"),
        (lambda x, a, b: np.ones((len(x), 3)), r"\(50, 3\)"),
        (lambda x, a, b: x, r"\(50,\)"),
    ],
)
def test_a_jacobian_of_a_wrong_shape(jac, shape):
    theta = [1.3, 0.7]
    with pytest.raises(ValueError, match=rf"jac: returned shape {shape}; expected \(50, 2\)"):
        jacobian(problem_of(numpy_model(decay(np)), X1, Y, theta), theta, jac)


def test_a_jacobian_of_a_module_is_refused():
    model = network()
    with pytest.raises(ValueError, match="jac: a Jacobian function needs a model function"):
        Derivatives.choose(problem_of(model, X3, Y, model.theta), lambda *arguments: None, model.theta)


def test_autograd_of_a_numpy_model_is_refused():
    theta = tensor([1.3, 0.7])
    with pytest.raises(ValueError, match=r"jac='autograd': the model is written in numpy; use 'auto'"):
        Derivatives.choose(problem_of(numpy_model(decay(np)), X1, Y, theta), "autograd", theta)


@pytest.mark.parametrize("jac", ["4-point", "", "exact"])
def test_an_unknown_scheme_is_refused_by_name(jac):
    theta = tensor([1.3, 0.7])
    with pytest.raises(ValueError, match="jac"):
        Derivatives.choose(problem_of(numpy_model(decay(np)), X1, Y, theta), jac, theta)
