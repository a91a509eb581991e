"""Stop tests: each fires when and only when it should, and none where a fit merely moves slowly."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from injected import BACKENDS, SOLVERS, graded, injected, tensor

from lmfit_gpu.damping import TrustRegion
from lmfit_gpu.levenberg_marquardt import LevenbergMarquardt
from lmfit_gpu.linear import Step
from lmfit_gpu.models import TorchFunction
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.result import Status
from lmfit_gpu.rows import ArrayRows
from lmfit_gpu.termination import (
    Tolerances,
    check,
    check_stalled,
    gradient_cosine,
    relative_gain,
    relative_step,
    rounding_of_residual,
    trusted,
)

NEVER = Tolerances(0.0, 0.0, 0.0)
QUIET = 1e-300  # a rounding that hides nothing


def simple(a, b, rest, **options):
    """J = identity over a zero row: p = (-a, -b), relative gain (a² + b²)/‖r‖², cosine max(|a|, |b|)/‖r‖."""
    return injected([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], [a, b, rest], **options)


def undamped(lin):
    return lin.solve(lin.least_damping)


def checked(lin, theta, tolerances, rounding=QUIET):
    return check(lin, undamped(lin), tensor(theta), rounding, tolerances)


# ---- tolerances


def test_auto_tolerances():
    assert Tolerances.resolve("auto", "auto", "auto", torch.float64) == Tolerances(1e-17, 1e-14, 1e-14)
    assert Tolerances.resolve("auto", "auto", "auto", torch.float32) == Tolerances(1e-8, 1e-4, 1e-6)
    assert Tolerances.resolve(0, "auto", 1e-3, torch.float64) == Tolerances(0.0, 1e-14, 1e-3)


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("value", [-1e-3, float("nan"), "tight", None, [1e-3]])
def test_tolerance_errors_name_the_argument(value, position):
    given = ["auto"] * 3
    given[position] = value
    name = ("ftol", "xtol", "gtol")[position]
    with pytest.raises(ValueError, match=f"{name}: got .*; a number >= 0 or 'auto' is expected"):
        Tolerances.resolve(*given, torch.float64)


# ---- the measures


def test_measures_of_a_simple_problem():
    lin = simple(3.0, -4.0, 12.0)
    assert gradient_cosine(lin) == pytest.approx(4 / 13)
    assert relative_gain(lin, undamped(lin)) == pytest.approx(25 / 169)
    assert relative_step(undamped(lin), tensor([30.0, 8.0])) == pytest.approx(0.5)


def test_measures_have_no_unit(rng):
    J, r, theta = rng.standard_normal((20, 3)), rng.standard_normal(20), rng.standard_normal(3)
    units = np.array([1e-8, 1.0, 1e8])
    norms = np.linalg.norm(J, axis=0)
    one, other = injected(J, r, scale=norms), injected(1e15 * J * units, 1e15 * r, scale=1e15 * norms * units)
    assert gradient_cosine(other) == pytest.approx(gradient_cosine(one), rel=1e-9)
    assert relative_gain(other, undamped(other)) == pytest.approx(relative_gain(one, undamped(one)), rel=1e-9)
    moved = [relative_step(undamped(lin), tensor(t)) for lin, t in ((one, theta), (other, theta / units))]
    assert moved[1] == pytest.approx(moved[0], rel=1e-6)


def test_measures_where_things_are_zero():
    assert gradient_cosine(simple(0.0, 0.0, 0.0)) == 0.0
    assert gradient_cosine(injected(np.zeros((3, 2)), np.ones(3))) == 0.0
    assert relative_step(undamped(simple(0.0, 0.0, 1.0)), tensor([0.0, 0.0])) == 0.0
    assert relative_step(undamped(simple(1e-300, 0.0, 1.0)), tensor([0.0, 1.0])) == float("inf")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rounding_is_measured_by_targets_residual_and_terms(dtype):
    epsilon = torch.finfo(dtype).eps
    lin = simple(3.0, 4.0, 12.0)
    theta = tensor([30.0, 40.0], dtype)
    assert rounding_of_residual(lin, theta, 1e6) == pytest.approx(epsilon * (1e6 + 13 + 50))
    assert rounding_of_residual(lin, theta, 0.0) == pytest.approx(epsilon * (13 + 50))


# ---- each test at its limit

LIMIT = 1e-4


@pytest.mark.parametrize(("value", "stops"), [(0.99, True), (1.01, False)])
def test_gradient(value, stops):
    cosine = value * LIMIT
    lin = simple(cosine, 0.0, (1 - cosine**2) ** 0.5)
    stop = checked(lin, [1e-3, 1.0], Tolerances(0.0, 0.0, LIMIT))
    assert (stop is not None) == stops
    if stops:
        assert (stop.status, stop.limit) == (Status.CONVERGED_GRADIENT, LIMIT)
        assert stop.measured == pytest.approx(cosine)


@pytest.mark.parametrize(("value", "stops"), [(0.99, True), (1.01, False)])
def test_cost(value, stops):
    gain = value * LIMIT
    lin = simple(gain**0.5, 0.0, (1 - gain) ** 0.5)
    stop = checked(lin, [1e-3, 1.0], Tolerances(LIMIT, 0.0, 0.0))
    assert (stop is not None) == stops
    if stops:
        assert (stop.status, stop.limit) == (Status.CONVERGED_COST, LIMIT)
        assert stop.measured == pytest.approx(gain)


@pytest.mark.parametrize(("value", "stops"), [(0.99, True), (1.01, False)])
@pytest.mark.parametrize("slow", [0, 1])
def test_step(slow, value, stops):
    """Every parameter must have its digits: one that moves is enough to go on."""
    theta = np.array([2.0, -3.0])
    p = 0.01 * LIMIT * theta
    p[slow] = value * LIMIT * theta[slow]
    stop = checked(simple(*p, 0.0), theta, Tolerances(0.0, LIMIT, 0.0))
    assert (stop is not None) == stops
    if stops:
        assert (stop.status, stop.limit) == (Status.CONVERGED_STEP, LIMIT)
        assert stop.measured == pytest.approx(value * LIMIT)


@pytest.mark.parametrize(("value", "stops"), [(0.99, True), (1.01, False)])
def test_residual(value, stops):
    rounding = 1e-10
    lin = simple(value * 4 * rounding, 0.0, 0.0)
    stop = checked(lin, [1.0, 1.0], NEVER, rounding)
    assert (stop is not None) == stops
    if stops:
        assert stop.status is Status.CONVERGED_RESIDUAL
        assert stop.measured == pytest.approx(value * 4 * rounding)
        assert stop.limit == pytest.approx(4 * rounding)


def test_an_exact_fit_has_converged():
    assert checked(simple(0.0, 0.0, 0.0), [1.0, 1.0], NEVER, 0.0).status is Status.CONVERGED_RESIDUAL


def test_an_exact_zero_gradient_has_converged():
    assert checked(simple(0.0, 0.0, 1.0), [1.0, 1.0], NEVER).status is Status.CONVERGED_GRADIENT


def test_no_test_counts_on_an_invalid_step():
    lin = simple(1e-9, 0.0, 1.0)
    failed = Step(torch.zeros(2, dtype=torch.float64), 0.0, 0.0, 0.0, valid=False)
    assert check(lin, failed, tensor([1.0, 1.0]), QUIET, Tolerances(1.0, 1.0, 1.0)) is None


def test_no_test_counts_on_an_undamped_step_that_would_go_uphill():
    lin = simple(1e-9, 1e-9, 1.0)
    theta = tensor([1.0, 1.0])
    step = replace(undamped(lin), predicted_reduction=-1e-6)
    assert check(lin, step, theta, QUIET, Tolerances(1e-3, 1e30, 0.0)) is None
    assert check_stalled(lin, step, theta, replace(step, predicted_reduction=1e-30), 1.0).status < 0


def test_no_step_yet_is_no_stop_but_for_the_residual():
    lin = simple(1e-9, 1e-9, 1.0)
    limits = Tolerances(1e30, 1e30, 1e30)
    assert check(lin, None, tensor([1.0, 1.0]), QUIET, limits) is None
    assert check(lin, None, tensor([1.0, 1.0]), 1.0, limits).status == Status.CONVERGED_RESIDUAL


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("condition", "counts"), [(1e3, True), (1e5, False)])
def test_in_float32_a_test_counts_only_while_the_step_is_known(condition, counts, backend, solver, rng):
    """The limit is ε κ = 1e-3, κ = 8,400 in float32."""
    lin = injected(graded(rng, 20, 3, condition), rng.standard_normal(20), solver, backend)
    theta = tensor([1.0, 1.0, 1.0], torch.float32)
    assert trusted(lin, theta) == counts
    assert trusted(lin, theta.double())
    stop = check(lin, undamped(lin), theta, QUIET, Tolerances(1e30, 1e30, 1e30))
    assert (stop is not None) == counts


def test_units_of_parameters_do_not_make_a_step_unknown(rng):
    J = rng.standard_normal((20, 2)) * [1e-6, 1e6]
    lin = injected(J, rng.standard_normal(20), scale=np.linalg.norm(J, axis=0))
    assert trusted(lin, tensor([1.0, 1.0], torch.float32))


# ---- after a rejected trial


def stalled(lin, theta, step, rounding=1e-12):
    return check_stalled(lin, undamped(lin), theta, step, rounding)


def test_a_rejected_trial_that_promised_something_decides_nothing():
    lin = simple(0.5, 0.5, 1.0)
    assert stalled(lin, tensor([1.0, 1.0]), lin.solve(1.0)) is None


@pytest.mark.parametrize("size", [1e-10, 1e-6])
def test_a_promise_below_rounding_ends_the_fit_converged(size):
    """Gain 1e-20 and 1e-12 of the cost, below 1e-9: 3e-5 of the standard errors."""
    lin = simple(size, 0.0, 1.0)
    stop = stalled(lin, tensor([1e-3, 1.0]), lin.solve(0.0), rounding=1e-3)
    assert (stop.status, stop.limit) == (Status.CONVERGED_COST, 1e-9)
    assert stop.measured == pytest.approx(size**2, rel=1e-6)


def test_a_promise_below_rounding_with_all_digits_ends_the_fit_converged():
    lin = simple(1e-3, 1e-3, 0.0)
    stop = stalled(lin, tensor([1e6, 1e6]), lin.solve(0.0), rounding=1.0)
    assert (stop.status, stop.limit) == (Status.CONVERGED_STEP, 1e-8)
    assert stop.measured == pytest.approx(1e-9)


def test_a_promise_below_rounding_with_much_to_gain_is_no_success():
    lin = simple(0.5, 0.0, 1.0)
    theta = tensor([1.0, 1.0])
    assert stalled(lin, theta, lin.solve(0.0), rounding=10.0) is None  # a shorter step may show its gain
    stop = stalled(lin, theta, lin.solve(0.0), rounding=1e4)
    assert stop.status is Status.STALLED_AT_PRECISION
    assert stop.measured == pytest.approx(0.125)
    assert stop.limit == pytest.approx(1e4 * 1.25**0.5)
    assert "float64" in stop.message


def test_a_step_that_does_not_move_theta_stalls():
    lin = simple(0.5, 0.5, 1.0)
    stop = stalled(lin, tensor([1e6, 1e6]), lin.solve(1e12), rounding=QUIET)
    assert stop.status is Status.STALLED
    assert not stop.status > 0


def test_a_nearly_singular_jacobian_in_float32_stalls_at_precision(rng):
    lin = injected(graded(rng, 20, 3, 1e5), rng.standard_normal(20))
    theta = tensor([1e9, 1e9, 1e9], torch.float32)
    assert stalled(lin, theta, lin.solve(1e6)).status is Status.STALLED_AT_PRECISION


def test_a_failed_factorisation_does_not_end_the_fit():
    """It is a rejected trial: the next λ is larger and may succeed (design, section 2)."""
    lin = simple(0.5, 0.5, 1.0, solver="cholesky")
    assert not lin.solve(0.0).valid
    assert stalled(lin, tensor([1.0, 1.0]), lin.solve(0.0)) is None


# ---- traps of false convergence


def fit(function, x, y, start, dtype=torch.float64, **options):
    names = tuple(f"p{j}" for j in range(len(start)))
    theta = tensor(start, dtype)
    problem = LeastSquaresProblem(TorchFunction(function, names), ArrayRows(tensor(x), tensor(y)), theta)
    return LevenbergMarquardt(**options).minimize(problem, theta)


@pytest.mark.parametrize("radius", [1e-12, 1e-8, 1e-3])
def test_a_tiny_radius_in_a_narrow_valley_is_not_convergence(radius):
    """Rosenbrock's valley as residuals (10(b - a²), 1 - a), minimum (1, 1)."""

    def residuals(x, a, b):
        return torch.where(x > 0, 10 * (b - a**2), 1 - a)

    x, y = np.array([0.0, 1.0]), np.zeros(2)
    result = fit(residuals, x, y, [-1.2, 1.0], damping=TrustRegion(radius=radius))
    assert result.success, result.message
    np.testing.assert_allclose(result.theta, [1.0, 1.0], rtol=1e-9)


def test_a_short_damped_step_is_not_convergence(rng):
    lin = injected(graded(rng, 20, 3, 1e4), rng.standard_normal(20))
    step, _ = TrustRegion().propose(lin, TrustRegion(radius=1e-30).start(lin, tensor([1.0, 1.0, 1.0])))
    assert step.scaled_norm < 2e-30
    assert checked(lin, [1.0, 1.0, 1.0], Tolerances.resolve("auto", "auto", "auto", torch.float64)) is None


def test_an_offset_of_ten_thousand_million_hides_no_signal():
    """y is rounded to 2e-6: the amplitude and rate of the signal are known to about that."""
    x = np.linspace(0, 4, 200)
    y = 1e10 + 1.0 * np.exp(-1.3 * x)
    result = fit(lambda x, a, b, c: a * torch.exp(-b * x) + c, x, y, [0.3, 0.4, 1e10])
    assert result.success, result.message
    np.testing.assert_allclose(result.theta[:2], [1.0, 1.3], atol=1e-5)


@pytest.mark.parametrize("tiny", [1e-3, 1e-9, 1e-15])
def test_tiny_start_values_are_not_convergence(tiny):
    x = np.linspace(0, 4, 50)
    result = fit(lambda x, a, b: a * torch.exp(-b * x), x, 2.0 * np.exp(-0.5 * x), [tiny, tiny])
    assert result.success, result.message
    np.testing.assert_allclose(result.theta, [2.0, 0.5], rtol=1e-9)


def test_nearly_collinear_columns_in_float32_end_at_precision(rng):
    """κ ≈ 1e6, so ε κ ≈ 0.1 in float32; the same fit in float64 converges."""

    def line(x, a, b, c):
        return a * x + b * x * (1 + 1e-6 * x) + c

    x = np.linspace(0, 1, 60)
    y = 2 * x + 1 + 0.1 * rng.standard_normal(60)
    single = fit(line, x, y, [0.5, 0.5, 0.5], dtype=torch.float32)
    assert single.status is Status.STALLED_AT_PRECISION, single.message
    assert not single.success
    double = fit(line, x, y, [0.5, 0.5, 0.5])
    assert double.success, double.message


def test_a_well_conditioned_fit_in_float32_converges(rng):
    x = np.linspace(0, 4, 60)
    y = 2 * np.exp(-x) + 0.01 * rng.standard_normal(60)
    single = fit(lambda x, a, b: a * torch.exp(-b * x), x, y, [1.0, 0.5], dtype=torch.float32)
    double = fit(lambda x, a, b: a * torch.exp(-b * x), x, y, [1.0, 0.5])
    assert single.success, single.message
    np.testing.assert_allclose(single.theta, double.theta, rtol=1e-4)


def test_a_parameter_whose_value_is_zero_can_converge(rng):
    x = np.linspace(-1, 1, 41)
    y = 1 + 0 * x + 0.1 * np.cos(40 * x)
    y -= x * (x @ y) / (x @ x)  # the slope of the fit is 0 to rounding
    result = fit(lambda x, a, b: a + b * x, x, y, [0.0, 1.0])
    assert result.success, result.message
    assert abs(result.theta[1]) < 1e-9 * result.stderr[1]
