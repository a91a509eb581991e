"""J at one point: products, curvature, kept or not, repair, what is counted."""

import math

import numpy as np
import pytest
import torch
from boxed import Watched
from oracles import CPU, central_differences, module_model, numpy_model, problem_of, torch_model, values_of

from lmfit_gpu.differences import Differences
from lmfit_gpu.jacobian import Derivatives
from lmfit_gpu.models import ResidualOf
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.rows import ArrayRows

N = 45
X1 = np.linspace(0.1, 2.0, N)
Y = np.cos(X1)
THETA = torch.tensor([1.3, 0.7], dtype=torch.float64)
KEPT = [pytest.param(True, id="kept"), pytest.param(False, id="not-kept")]


@pytest.fixture(params=KEPT)
def kept(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr("lmfit_gpu.jacobian.KEEP_BYTES", 0)
    return request.param


def decay(library):
    return lambda x, a, b: a * library.exp(-b * x)


def decay_jacobian():
    return np.stack([np.exp(-0.7 * X1), -1.3 * X1 * np.exp(-0.7 * X1)], 1)


def network():
    torch.manual_seed(2)
    return module_model(torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)))


def both_outputs(library):
    return lambda x, a, b: library.stack([a * library.exp(-b * x), a * b * x], 1)


MODELS = {
    "torch": (lambda: torch_model(decay(torch)), "autograd", False),
    "numpy": (lambda: numpy_model(decay(np)), "3-point", False),
    "numpy-cs": (lambda: numpy_model(decay(np)), "cs", False),
    "torch-3-point": (lambda: torch_model(decay(torch)), "3-point", False),
    "two-outputs": (lambda: torch_model(both_outputs(torch)), "autograd", True),
    "two-outputs-numpy": (lambda: numpy_model(both_outputs(np)), "3-point", True),
    "coupled": (
        lambda: torch_model(lambda x, a, b: torch.cumsum(a * torch.exp(-b * x), 0)),
        "autograd",
        False,
    ),
    "coupled-numpy": (lambda: numpy_model(lambda x, a, b: np.cumsum(a * np.exp(-b * x))), "3-point", False),
    "network": (network, "autograd", False),
}


def made(name, **options):
    """Return (Jacobian, dense J (m, n), r (m,)) of a named model."""
    make, jac, two = MODELS[name]
    model = make()
    theta = model.theta.clone() if name == "network" else THETA
    X = torch.tensor(X1[:, None] if name == "network" else X1)
    y = np.stack([Y, -Y], 1) if two else Y
    problem = problem_of(model, X, y, theta, **options)
    f = values_of(model, X)
    J = central_differences(f, theta)
    return Derivatives.choose(problem, jac, theta).at(theta), J, f(theta) - y.ravel()


OPTIONS = [
    pytest.param({}, id="one-block"),
    pytest.param({"chunk_rows": 16}, id="blocks-of-16"),
    pytest.param({"chunk_rows": 16, "devices": [CPU, CPU]}, id="two-devices"),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_products_are_those_of_the_dense_matrix(name, options, kept, rng):
    jacobian, J, r = made(name, **options)
    u, v = rng.normal(size=J.shape[0]), rng.normal(size=J.shape[1])
    tolerance = {"atol": 1e-7 * np.abs(J).max() * math.sqrt(N), "rtol": 0}
    assert jacobian.keeps is kept
    for _ in range(2):  # before anything is kept, and after
        np.testing.assert_allclose(jacobian.matvec(torch.tensor(v)), J @ v, **tolerance)
        product = jacobian.rmatvec(torch.tensor(u))
        assert product.dtype is torch.float64
        np.testing.assert_allclose(product, J.T @ u, **tolerance)
        normal = jacobian.normal(torch.tensor(v))
        assert normal.dtype is torch.float64
        np.testing.assert_allclose(normal, J.T @ (J @ v), atol=1e-6 * np.abs(J.T @ J).max() * len(v), rtol=0)
        np.testing.assert_allclose(torch.cat([part for _, part in jacobian.blocks()]), J, **tolerance)
        np.testing.assert_allclose(torch.cat([part for part, _ in jacobian.blocks()]), r, atol=1e-12)
        gram = jacobian.reduce(lambda columns: columns @ columns.T, torch.add)
        whole = np.column_stack([J, r])
        np.testing.assert_allclose(gram, whole.T @ whole, atol=1e-6 * np.abs(whole.T @ whole).max())
    jacobian.problem.close()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_the_whole_is_the_dense_matrix(name, options, kept):
    jacobian, J, r = made(name, **options)
    for _ in range(2):
        whole = jacobian.whole()
        assert whole.shape == (J.shape[1] + 1, J.shape[0])
        np.testing.assert_allclose(whole[:-1].T, J, atol=1e-7 * np.abs(J).max() * math.sqrt(N), rtol=0)
        np.testing.assert_allclose(whole[-1], r, atol=1e-12)
    jacobian.problem.close()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", [name for name, made in MODELS.items() if made[1] == "autograd"])
def test_the_gradient_by_autograd_alone(name, options, kept):
    jacobian, J, r = made(name, **options)
    for _ in range(2):  # before anything is kept, and after
        gradient, norm = jacobian.gradient()
        assert gradient.dtype is torch.float64
        np.testing.assert_allclose(gradient, J.T @ r, atol=1e-8 * np.abs(J).max() * np.linalg.norm(r) * math.sqrt(N))
        assert norm == pytest.approx(np.linalg.norm(r), rel=1e-12)
        list(jacobian.blocks())
    jacobian.problem.close()


def test_float32_products_are_summed_in_float64(kept):
    x, theta = torch.linspace(0.1, 2.0, N), THETA.float()
    problem = LeastSquaresProblem(torch_model(decay(torch)), ArrayRows(x, torch.cos(x)), theta)
    jacobian = Derivatives.choose(problem, "autograd", theta).at(theta)
    t = x.double().numpy()
    e = np.exp(-0.7 * t)
    J = np.stack([e, -1.3 * t * e], 1)
    r = 1.3 * e - np.cos(t)
    gradient, norm = jacobian.gradient()
    normal = jacobian.normal(torch.ones(2, dtype=torch.float64))
    assert gradient.dtype is normal.dtype is torch.float64
    np.testing.assert_allclose(gradient, J.T @ r, atol=1e-5)
    np.testing.assert_allclose(normal, J.T @ J.sum(1), rtol=1e-5)
    assert norm == pytest.approx(np.linalg.norm(r), rel=1e-5)


def test_blocks_of_one_row(kept):
    jacobian, J, _ = made("torch", chunk_rows=1)
    np.testing.assert_allclose(torch.cat([part for _, part in jacobian.blocks()]), J, atol=1e-9)
    np.testing.assert_allclose(jacobian.matvec(THETA), J @ THETA.numpy(), atol=1e-9)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
def test_curvature_of_a_quadratic(library, options, kept):
    """f = a² x + a b x²: r_vv = 2 v_a² x + 2 v_a v_b x², exactly, whatever the step."""
    model = (numpy_model if library is np else torch_model)(lambda x, a, b: a * a * x + a * b * x * x)
    problem = problem_of(model, X1, Y, THETA, **options)
    jacobian = Derivatives.choose(problem, "auto" if library is torch else "3-point", THETA).at(THETA)
    v = torch.tensor([0.3, -0.4], dtype=torch.float64)
    J = np.stack([2 * 1.3 * X1 + 0.7 * X1**2, 1.3 * X1**2], 1)
    expected = J.T @ (2 * 0.09 * X1 - 2 * 0.12 * X1**2)
    for _ in range(2):
        np.testing.assert_allclose(jacobian.curvature(v), expected, rtol=1e-7)
        list(jacobian.blocks())
    problem.close()


def test_curvature_of_a_smooth_model(kept):
    """Truncation is h²/12 of the fourth derivative: a short step has a part in 1e4."""
    jacobian, J, _ = made("torch", chunk_rows=16)
    v = np.array([0.1, -0.1])
    e = np.exp(-0.7 * X1)
    r_vv = 2 * v[0] * v[1] * (-X1 * e) + v[1] ** 2 * 1.3 * X1**2 * e
    np.testing.assert_allclose(jacobian.curvature(torch.tensor(v)), J.T @ r_vv, rtol=1e-4)


def test_products_follow_the_chosen_derivatives(kept):
    """jac='3-point' is the remedy for a model torch cannot differentiate: products must not ask torch."""
    model = torch_model(lambda x, a, b: torch.from_numpy(a.detach().numpy() * np.exp(-b.detach().numpy() * x.numpy())))
    problem = problem_of(model, X1, Y, THETA)
    jacobian = Derivatives.choose(problem, "3-point", THETA).at(THETA)
    v, u = torch.tensor([1.0, -2.0], dtype=torch.float64), torch.ones(N, dtype=torch.float64)
    np.testing.assert_allclose(jacobian.matvec(v), decay_jacobian() @ v.numpy(), rtol=1e-7)
    np.testing.assert_allclose(jacobian.rmatvec(u), decay_jacobian().sum(0), rtol=1e-7)


def test_products_follow_the_jacobian_of_the_user(kept):
    """1 % off the true J, so that it can be told from autograd."""
    problem = problem_of(torch_model(decay(torch)), X1, Y, THETA)
    jac = lambda x, a, b: 1.01 * torch.stack([torch.exp(-b * x), -a * x * torch.exp(-b * x)], 1)  # noqa: E731
    jacobian = Derivatives.choose(problem, jac, THETA).at(THETA)
    u = torch.ones(N, dtype=torch.float64)
    np.testing.assert_allclose(jacobian.rmatvec(u), 1.01 * decay_jacobian().sum(0), rtol=1e-12)
    np.testing.assert_allclose(jacobian.matvec(THETA), 1.01 * decay_jacobian() @ THETA.numpy(), rtol=1e-12)


@pytest.mark.parametrize("name", ["torch", "network"])
def test_devices_do_not_change_a_bit(name, kept, rng):
    u = torch.tensor(rng.normal(size=N))
    results = []
    for devices in ([CPU], [CPU, CPU], [CPU] * 3):
        jacobian, J, _ = made(name, chunk_rows=16, devices=devices)
        v = torch.ones(J.shape[1], dtype=torch.float64)
        for _ in range(3):
            parts = jacobian.matvec(v), jacobian.rmatvec(u), jacobian.curvature(v)
            parts = *parts, jacobian.normal(v), jacobian.gradient()[0], jacobian.whole()
            results.append((*parts, jacobian.reduce(lambda c: c @ c.T, torch.add)))
        jacobian.problem.close()
    for one, other in zip(results[0], results[3], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(results[0], results[6], strict=True):
        assert torch.equal(one, other)


def test_blocks_do_not_change_a_bit_of_a_product(rng):
    """rows.py: the same rounding whatever the size of the blocks."""
    x = np.linspace(0, 2, 9 * 4096 + 5)
    u = torch.tensor(rng.normal(size=x.size))
    products = []
    for chunk_rows in (4096, 8192, 16384):
        problem = problem_of(torch_model(decay(torch)), x, x, THETA, chunk_rows=chunk_rows)
        jacobian = Derivatives.choose(problem, "autograd", THETA).at(THETA)
        jacobian.reduce(*SUM)
        products.append(jacobian.rmatvec(u))
    assert torch.equal(products[0], products[1])
    assert torch.equal(products[0], products[2])


def test_large_jacobians_are_not_kept(monkeypatch):
    jacobian, _, _ = made("torch")
    assert jacobian.keeps
    monkeypatch.setattr("lmfit_gpu.jacobian.KEEP_BYTES", 8 * N * 3 - 1)
    jacobian, _, _ = made("torch")
    assert not jacobian.keeps
    list(jacobian.blocks())
    assert jacobian._kept == {}


# --- repair -----------------------------------------------------------------------------------------------


def naive_power(x, a, c):
    """a xᶜ by its logarithm: at x = 0 the value is 0, the derivative by c is 0 · −∞."""
    return a * torch.exp(c * torch.log(x))


def power_jacobian(x):
    """∂/∂a, ∂/∂c of 1.3 x^0.7."""
    log = np.log(np.where(x > 0, x, 1.0))
    return np.stack([x**0.7, 1.3 * x**0.7 * log], 1)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_power_at_zero_is_repaired(options, kept):
    x = np.linspace(0.0, 2.0, N)
    problem = problem_of(torch_model(naive_power), x, Y, THETA, **options)
    broken = Derivatives.choose(problem, "autograd", THETA).at(THETA)
    assert broken.first_non_finite() == (0, 1)
    fixed = broken.repaired()
    J = torch.cat([J for _, J in fixed.blocks()])
    np.testing.assert_allclose(J, power_jacobian(x), rtol=1e-12, atol=1e-12)
    assert fixed.first_non_finite() is None
    u = torch.ones(N, dtype=torch.float64)
    np.testing.assert_allclose(fixed.rmatvec(u), power_jacobian(x).sum(0), rtol=1e-10)
    normal = power_jacobian(x).T @ power_jacobian(x) @ THETA.numpy()
    np.testing.assert_allclose(fixed.normal(THETA), normal, rtol=1e-10)
    np.testing.assert_allclose(fixed.matvec(THETA), power_jacobian(x) @ THETA.numpy(), rtol=1e-10, atol=1e-12)
    assert fixed.n_repaired >= 1
    problem.close()


def test_an_entry_is_counted_as_repaired_once(kept):
    x = np.linspace(0.0, 2.0, N)
    fixed = (
        Derivatives.choose(problem_of(torch_model(naive_power), x, Y, THETA), "autograd", THETA).at(THETA).repaired()
    )
    for _ in range(3):
        list(fixed.blocks())
    assert fixed.n_repaired == 1


def deviance_residual(prediction, target):
    """Signed root of the Poisson deviance; 0 · ∞ where the prediction meets the target."""
    half = target * torch.log(target / prediction) - (target - prediction)
    return torch.sign(prediction - target) * torch.sqrt(2 * torch.clamp(half, min=0.0))


def test_the_root_of_a_deviance_at_zero_is_repaired():
    """r ≈ (μ − y)/√y: smooth, with derivative 1/√y · ∂μ."""
    y = np.array([4.0, 9.0, 2.5, 7.0])
    x = np.array([4.0, 8.0, 3.0, 6.0])  # the first row is met exactly at a = 1
    model = ResidualOf(torch_model(lambda x, a: a * x), deviance_residual)
    theta = torch.ones(1, dtype=torch.float64)
    jacobian = Derivatives.choose(problem_of(model, x, y, theta), "autograd", theta).at(theta)
    assert jacobian.first_non_finite() == (0, 0)
    ((_, J),) = jacobian.repaired().blocks()
    assert float(J[0, 0]) == pytest.approx(4 / math.sqrt(4), rel=1e-2)
    r = [math.copysign(math.sqrt(2 * (b * math.log(b / a) - b + a)), a - b) for a, b in zip(x[1:], y[1:], strict=True)]
    np.testing.assert_allclose(
        J[1:, 0], [(1 - b / a) * a / d for a, b, d in zip(x[1:], y[1:], r, strict=True)], rtol=1e-12
    )


@pytest.mark.parametrize("two_outputs", [False, True])
@pytest.mark.parametrize("chunk_rows", [4, 7, 64])
def test_the_first_non_finite_entry(chunk_rows, two_outputs):
    """Row 11 and parameter 1, in any block."""
    x = X1.copy()
    x[11] = 0.0

    def function(x, a, c):
        bad = naive_power(x, a, c)
        return torch.stack([a * x + 0 * c, bad], 1) if two_outputs else bad

    y = np.stack([Y, Y], 1) if two_outputs else Y
    problem = problem_of(torch_model(function), x, y, THETA, chunk_rows=chunk_rows)
    assert Derivatives.choose(problem, "autograd", THETA).at(THETA).first_non_finite() == (11, 1)


def test_all_finite():
    assert made("torch")[0].first_non_finite() is None


# --- what is counted --------------------------------------------------------------------------------------


class Counted:
    """Counts the rows a model is called with."""

    def __init__(self, library):
        self.rows = 0
        self.function = decay(library)

    def __call__(self, x, a, b):
        self.rows += len(x)
        return self.function(x, a, b)


def counted(library, jac, **options):
    model = Counted(library)
    problem = problem_of((numpy_model if library is np else torch_model)(model), X1, Y, THETA, **options)
    derivatives = Derivatives.choose(problem, jac, THETA)
    model.rows = 0
    return model, derivatives


SUM = (lambda columns: columns.sum(), torch.add)
COUNTED = [(np, "2-point"), (np, "3-point"), (np, "cs"), (torch, "autograd")]


@pytest.mark.parametrize(("library", "jac"), COUNTED)
@pytest.mark.parametrize("options", OPTIONS)
def test_linearising_counts_what_it_calls(library, jac, options, kept):
    model, derivatives = counted(library, jac, **options)
    jacobian = derivatives.at(THETA)
    for _ in range(2):
        jacobian.reduce(*SUM)
        assert jacobian.nfev * N == model.rows
    derivatives.problem.close()


@pytest.mark.parametrize(("library", "jac"), COUNTED)
def test_curvature_counts_what_it_calls(library, jac, kept):
    model, derivatives = counted(library, jac, chunk_rows=16)
    jacobian = derivatives.at(THETA)
    jacobian.reduce(*SUM)
    jacobian.curvature(THETA)
    assert jacobian.nfev * N == model.rows


@pytest.mark.parametrize(("library", "jac"), COUNTED)
def test_products_count_what_they_call(library, jac, kept):
    model, derivatives = counted(library, jac, chunk_rows=16)
    jacobian = derivatives.at(THETA)
    jacobian.rmatvec(torch.ones(N, dtype=torch.float64))
    jacobian.matvec(THETA)
    assert jacobian.nfev * N == model.rows


@pytest.mark.parametrize(("library", "jac"), COUNTED)
@pytest.mark.parametrize("verb", ["normal", "whole"])
def test_normal_and_whole_count_what_they_call(verb, library, jac, kept):
    model, derivatives = counted(library, jac, chunk_rows=16)
    jacobian = derivatives.at(THETA)
    for _ in range(3):
        jacobian.normal(THETA) if verb == "normal" else jacobian.whole()
        assert jacobian.nfev * N == model.rows


def test_the_gradient_counts_what_it_calls(kept):
    """The values for r, and those that the backward pass starts from."""
    model, derivatives = counted(torch, "autograd", chunk_rows=16)
    jacobian = derivatives.at(THETA)
    for _ in range(3):
        jacobian.gradient()
        assert jacobian.nfev * N == model.rows


def test_a_kept_jacobian_calls_nothing_more():
    model, derivatives = counted(np, "3-point")
    jacobian = derivatives.at(THETA)
    jacobian.reduce(*SUM)
    before = model.rows
    jacobian.reduce(*SUM)
    jacobian.matvec(THETA)
    jacobian.rmatvec(torch.ones(N, dtype=torch.float64))
    jacobian.normal(THETA)
    jacobian.whole()
    list(jacobian.blocks())
    assert model.rows == before
    assert jacobian.nfev * N == model.rows


def test_nothing_is_computed_until_asked():
    model, derivatives = counted(np, "3-point")
    derivatives.at(THETA)
    assert model.rows == 0


# --- derivatives ------------------------------------------------------------------------------------------


def test_differences_are_refined_to_three_points():
    _, derivatives = counted(np, "auto")
    finer = derivatives.refined()
    assert derivatives.name == "2-point"
    assert finer.name == "3-point"
    assert finer.refined() is None
    ((_, J),) = finer.at(THETA).blocks()
    np.testing.assert_allclose(J, decay_jacobian(), rtol=1e-8)


@pytest.mark.parametrize(("library", "jac"), [*COUNTED])
def test_what_was_asked_for_is_not_refined(library, jac):
    assert counted(library, jac)[1].refined() is None


def test_adapted_steps_serve_both_schemes():
    _, derivatives = counted(np, "auto")
    moved = derivatives.adapted(1e3 * THETA, 1e3, 1.0, torch.ones(2, dtype=torch.float64))
    for old, new in ((derivatives.route, moved.route), (derivatives.finer, moved.finer)):
        assert isinstance(new, Differences)
        assert (new.steps > 10 * old.steps).all()
    _, exact = counted(torch, "autograd")
    assert exact.adapted(THETA, 1.0, 1.0, torch.ones(2)).route is exact.route


def test_relative_error_of_exact_derivatives_is_zero():
    assert counted(torch, "autograd")[1].relative_error(torch.ones(2), 1.0) == 0.0
    assert 0 < counted(np, "2-point")[1].relative_error(torch.ones(2), 1.0) < 1e-6


def test_acceleration_is_for_small_or_differentiable_problems(kept):
    assert made("torch")[0].can_accelerate
    assert made("numpy")[0].can_accelerate is kept


# --- bounds -----------------------------------------------------------------------------------------------


def boxed_jacobian(library, lower, upper, jac="auto", **options):
    """Return (watched model, Jacobian at THETA of the decay in a box)."""
    watched = Watched(decay, library, lower, upper)
    problem = problem_of(watched.model, X1, Y, THETA, bounds=watched.bounds, **options)
    return watched, Derivatives.choose(problem, jac, THETA).at(THETA)


def test_acceleration_in_a_box_needs_a_kept_jacobian(kept):
    """Without it the second derivative takes the point behind, which need not be in the box."""
    for library in (np, torch):
        assert boxed_jacobian(library, [0.0, 0.0], [5.0, 5.0])[1].can_accelerate is kept


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("linearised", [True, False])
@pytest.mark.parametrize(("library", "jac"), [(torch, "auto"), (torch, "3-point"), (np, "3-point"), (np, "cs")])
def test_curvature_on_a_bound_stays_inside(library, jac, linearised, options, kept):
    """Asked for all the same (accelerate=True), it goes from θ towards θ + p alone; truncation is of first order."""
    v = np.array([0.01, -0.01])
    watched, jacobian = boxed_jacobian(library, [1.3, -5.0], [5.0, 0.7], jac, **options)
    if linearised:
        jacobian.whole()
    e = np.exp(-0.7 * X1)
    r_vv = 2 * v[0] * v[1] * (-X1 * e) + v[1] ** 2 * 1.3 * X1**2 * e
    found = jacobian.curvature(torch.tensor(v))
    np.testing.assert_allclose(found, decay_jacobian().T @ r_vv, rtol=2e-2)
    assert watched.outside == []
    jacobian.problem.close()


@pytest.mark.parametrize(("library", "jac"), [(torch, "auto"), (torch, "3-point"), (np, "3-point"), (np, "cs")])
def test_evaluations_of_a_curvature_in_a_box_are_counted(library, jac, monkeypatch):
    """Of an unkept J by differences: the point ahead, and J twice. By autograd: ahead, here, J v and Jᵀ r_vv."""
    monkeypatch.setattr("lmfit_gpu.jacobian.KEEP_BYTES", 0)
    watched, jacobian = boxed_jacobian(library, [0.0, 0.0], [5.0, 5.0], jac)
    jacobian.curvature(THETA / 10)
    before, watched.calls = jacobian.nfev, 0
    jacobian.curvature(THETA / 10)
    if jac == "auto":
        assert watched.calls == jacobian.nfev - before == 4
    else:
        together = jacobian.derivatives.route.together
        assert jacobian.nfev - before == 1 + 2 * jacobian.derivatives.route.passes(2)
        assert together or watched.calls == jacobian.nfev - before


def test_a_repaired_jacobian_in_a_box():
    """The derivative of x**c at x = 0 is NaN by the chain rule; its 3-point differences keep to c ≥ 1.5."""
    watched = Watched(lambda library: lambda x, a, c: a * x**c, torch, [0.0, 1.5], [5.0, 5.0])
    theta = torch.tensor([1.3, 1.5], dtype=torch.float64)
    x = np.linspace(0.0, 2.0, N)
    problem = problem_of(watched.model, x, x, theta, bounds=watched.bounds)
    jacobian = Derivatives.choose(problem, "auto", theta).at(theta).repaired()
    J = jacobian.whole()[:-1].T
    logs = np.log(np.where(x > 0, x, 1.0))
    np.testing.assert_allclose(J, np.stack([x**1.5, 1.3 * x**1.5 * logs], 1), atol=1e-8)
    assert watched.outside == []


def test_adapted_steps_follow_the_box():
    """Centrally inside, on one side at a bound: four times the rounding, and twice the truncation."""
    _, jacobian = boxed_jacobian(np, [1.3, 0.0], [5.0, 5.0], "3-point")
    norms = torch.ones(2, dtype=torch.float64)
    on_bound = jacobian.derivatives
    inside = on_bound.adapted(torch.tensor([2.0, 0.7], dtype=torch.float64), 1.0, 0.1, norms)
    assert on_bound.route.stencil.one_sided.tolist() == [True, False]
    assert inside.route.stencil.one_sided.tolist() == [False, False]
    back = inside.adapted(THETA, 1.0, 0.1, norms)
    assert torch.equal(back.route.resolution, back.route.steps / torch.tensor([4.0, 1.0], dtype=torch.float64))
    assert back.relative_error(norms, 1.0) >= 2 * np.finfo(float).eps ** (2 / 3)
