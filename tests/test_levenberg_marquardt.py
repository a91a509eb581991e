"""The loop: units, descent, counts, every way to end, and what the result says."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from injected import BACKENDS, CPU, SOLVERS, exact, injected_problem, tensor
from scipy.optimize import curve_fit

from lmfit_gpu.damping import MarquardtDamping, NielsenDamping, TrustRegion, damping_policy
from lmfit_gpu.exceptions import NonFiniteError
from lmfit_gpu.levenberg_marquardt import LevenbergMarquardt
from lmfit_gpu.models import NumpyFunction, TorchFunction
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.result import Status
from lmfit_gpu.rows import ArrayRows
from lmfit_gpu.user_jacobian import UserJacobian

TRUE = np.array([2.5, 1.3, 0.5])
START = np.array([1.0, 0.7, 0.1])


def torch_decay(x, a, b, c):
    return a * torch.exp(-b * x) + c


def numpy_decay(x, a, b, c):
    return a * np.exp(-b * x) + c


MODELS = {"torch": (TorchFunction, torch_decay), "numpy": (NumpyFunction, numpy_decay)}
every_model = pytest.mark.parametrize("kind", MODELS)


def problem_of(kind, function, x, y, start, **options):
    names = tuple("abcdefgh"[: len(start)])
    model = MODELS[kind][0](function, names)
    theta = tensor(start)
    rows = ArrayRows(tensor(x), None if y is None else tensor(y))
    return LeastSquaresProblem(model, rows, theta, **options), theta


def data(rng, factor=1.0, noise=0.02, m=60):
    x = np.linspace(0, 4, m)
    return x, factor * (numpy_decay(x, *TRUE) + noise * rng.standard_normal(m))


def decay(kind, rng, start=START, factor=1.0, noise=0.02, **options):
    x, y = data(rng, factor, noise)
    return problem_of(kind, MODELS[kind][1], x, y, start, **options)


def engine(**options):
    return LevenbergMarquardt(**options)


# ---- units


def scaled_fits(kind, function, linear, start, factor, seed):
    """Fit y and factor·y from starts in the same proportion; return each with the units of its parameters."""
    results = []
    for f in (1.0, factor):
        x, y = data(np.random.default_rng(seed), f)
        units = np.where(linear, f, 1.0)
        problem, theta = problem_of(kind, function, x, y, np.asarray(start) * units)
        results.append((engine().minimize(problem, theta), units))
    return results


@every_model
@pytest.mark.parametrize("factor", [2.0**-50, 2.0**30, 2.0**60])
def test_powers_of_two_change_no_bit(kind, factor, seed):
    (one, _), (other, units) = scaled_fits(kind, MODELS[kind][1], [True, False, True], START, factor, seed)
    assert other.status is one.status
    assert one.success
    assert (other.n_iter, other.nfev, other.njev) == (one.n_iter, one.nfev, one.njev)
    np.testing.assert_array_equal(other.theta, one.theta * units)
    assert [record.damping for record in other.history] == [record.damping for record in one.history]


def assert_same_iterates(one, other, factor):
    """Costs agree trial by trial and fits end alike; far away exp magnifies rounding: costs are cut."""
    assert other.status is one.status
    assert one.success
    costs = [np.array([record.trial_cost for record in result.history]) for result in (one, other)]
    common = min(len(costs[0]), len(costs[1]))
    assert abs(len(costs[0]) - len(costs[1])) <= 1
    far = 100 * one.history[0].trial_cost
    cut = np.minimum(costs[1][:common] / factor**2, far), np.minimum(costs[0][:common], far)
    np.testing.assert_allclose(*cut, rtol=1e-5)


@every_model
@pytest.mark.parametrize("factor", [1e-15, 1e9, 1e18])
def test_units_of_y_do_not_matter(kind, factor, seed):
    (one, _), (other, units) = scaled_fits(kind, MODELS[kind][1], [True, False, True], START, factor, seed)
    assert_same_iterates(one, other, factor)
    np.testing.assert_allclose(other.theta, one.theta * units, rtol=1e-7)


@every_model
@pytest.mark.parametrize("factor", [1e-15, 1e9, 1e18])
def test_units_of_y_do_not_matter_from_amplitudes_of_zero(kind, factor, seed):
    start = [0.0, 0.7, 0.0]
    (one, _), (other, units) = scaled_fits(kind, MODELS[kind][1], [True, False, True], start, factor, seed)
    assert_same_iterates(one, other, factor)
    np.testing.assert_allclose(other.theta, one.theta * units, rtol=1e-7)


@every_model
@pytest.mark.parametrize("factor", [1e-15, 1e9, 1e18])
def test_units_of_y_do_not_matter_from_zero(kind, factor, seed):
    def line(x, a, b, c):
        return a + b * x + c * x**2

    (one, _), (other, units) = scaled_fits(kind, line, [True] * 3, [0.0, 0.0, 0.0], factor, seed)
    assert_same_iterates(one, other, factor)
    np.testing.assert_allclose(other.theta, one.theta * units, rtol=1e-7)


@every_model
@pytest.mark.parametrize("factor", [1e-15, 1e9, 1e18])
def test_units_of_y_do_not_matter_from_all_zero_where_rates_are_hidden(kind, factor, seed):
    """At a = 0 the column of the rate b is zero, and it carries a placeholder."""
    start = [0.0, 0.0, 0.0]

    def shifted(x, a, b, c):
        exp = torch.exp if kind == "torch" else np.exp
        return a * exp(-(b + 1) * x) + c

    (one, _), (other, units) = scaled_fits(kind, shifted, [True, False, True], start, factor, seed)
    assert_same_iterates(one, other, factor)
    np.testing.assert_allclose(other.theta, one.theta * units, rtol=1e-7)


# ---- descent


@every_model
@pytest.mark.parametrize("policy", ["trust-region", "nielsen", "marquardt", "lema"])
def test_every_policy_converges_and_never_climbs(kind, policy, rng):
    problem, theta = decay(kind, rng, start=[10.0, 0.1, -3.0])
    result = engine(damping=damping_policy(policy)).minimize(problem, theta)
    assert result.success, result.message
    costs = [problem.cost(theta), *(record.cost for record in result.history)]
    assert all(later <= earlier for earlier, later in pairwise(costs))
    accepted = [record for record in result.history if record.accepted]
    assert all(record.cost == record.trial_cost for record in accepted)
    assert all(record.gain_ratio >= 1e-4 for record in accepted)
    assert result.cost == costs[-1] == problem.cost(tensor(result.theta))
    r = numpy_decay(problem.rows.X.numpy(), *result.theta) - problem.rows.y.numpy()
    assert result.cost == pytest.approx(0.5 * r @ r, rel=1e-12)


@every_model
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_solvers_and_backends_reach_the_same_answer(kind, solver, backend, rng):
    problem, theta = decay(kind, rng)
    result = engine(solver=solver, backend=backend).minimize(problem, theta)
    expected, covariance = curve_fit(
        numpy_decay, problem.rows.X.numpy(), problem.rows.y.numpy(), START, ftol=1e-14, xtol=1e-14, gtol=1e-14
    )
    assert result.success, result.message
    np.testing.assert_allclose(result.theta, expected, rtol=1e-6)
    np.testing.assert_allclose(result.stderr, np.sqrt(np.diag(covariance)), rtol=1e-4)
    assert (result.rank, result.dof) == (3, 57)
    assert not result.undetermined.any()
    assert result.used["solver"] == solver
    assert result.used["backend"] == backend


@pytest.mark.parametrize("accelerate", [True, False, "auto"])
def test_acceleration_reaches_the_same_answer(accelerate, rng):
    problem, theta = decay("torch", rng)
    result = engine(damping=TrustRegion(accelerate=accelerate)).minimize(problem, theta)
    np.testing.assert_allclose(numpy_decay(0.7, *result.theta), numpy_decay(0.7, *TRUE), atol=0.05)
    assert result.success
    assert any(record.accelerated for record in result.history) == bool(accelerate)


@pytest.mark.parametrize("accelerate", [False, True])
def test_blocks_and_devices_change_no_answer(accelerate, rng):
    x, y = data(rng, m=9000)
    results = []
    for options in ({}, {"chunk_rows": 4096}, {"chunk_rows": 4096, "devices": (CPU, CPU)}):
        problem, theta = problem_of("torch", torch_decay, x, y, START, **options)
        results.append(engine(damping=TrustRegion(accelerate=accelerate)).minimize(problem, theta))
    for other in results[1:]:
        np.testing.assert_array_equal(other.theta, results[0].theta)
        assert other.history == results[0].history
    assert results[2].used["devices"] == ["cpu", "cpu"]


# ---- trials that fail


@pytest.mark.parametrize("value", [np.nan, np.inf])
@every_model
def test_a_trial_that_is_not_finite_is_rejected(kind, value, rng):
    """Beyond b = 2 the model does not exist, and the first step leads there."""

    def fenced(x, a, b, c):
        values = MODELS[kind][1](x, a, b, c)
        where = torch.where if kind == "torch" else np.where
        return where(b > 2, values * 0 + value, values)

    x, y = data(rng)
    problem, theta = problem_of(kind, fenced, x, y, [0.1, 0.01, 0.0])
    result = engine(damping=TrustRegion(radius=1e3)).minimize(problem, theta)
    outside = [record for record in result.history if not np.isfinite(record.trial_cost)]
    assert outside
    assert not any(record.accepted for record in outside)
    assert all(np.isfinite(record.cost) for record in result.history)
    assert result.success, result.message
    np.testing.assert_allclose(result.theta, TRUE, atol=0.1)


LEAST = [TrustRegion(), NielsenDamping(start_damping=1e-20), MarquardtDamping(start_damping=1e-20)]


@pytest.mark.parametrize("policy", LEAST, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("m", "n"), [(100, 2), (4096, 3)])
def test_cholesky_of_dependent_columns_reaches_the_minimum(m, n, backend, policy):
    """Rounding of JᵀJ may leave it indefinite at the least λ: in one or two of these problems."""
    stopped_short = []
    for seed in range(8 if m == 100 else 12):
        rng = np.random.default_rng(seed)
        J = (rng.standard_normal((m, 1)) + 3) @ rng.standard_normal((1, n))
        r = rng.standard_normal(m)
        problem, theta = injected_problem(J, r, np.ones(n))
        result = engine(solver="cholesky", backend=backend, jac=exact, damping=policy).minimize(problem, theta)
        least = 0.5 * np.sum((r - J @ np.linalg.lstsq(J, r)[0]) ** 2)
        assert result.rank == 1
        if result.cost > least * (1 + 1e-9):
            stopped_short.append((seed, result.message))
    assert stopped_short == []


class Failing:
    """A policy whose first proposal is a failed factorisation, as cholesky reports one."""

    scaling, accelerate, attempts = "jacobian", False, None

    def start(self, lin, theta):
        return 0

    def propose(self, lin, state):
        step = lin.solve(1e-3)
        failed = replace(step, p=step.p * 0, predicted_reduction=0.0, scaled_norm=0.0, valid=False)
        return (failed if state < 2 else step), state

    def accept(self, state, step, gain_ratio):
        return state

    def reject(self, state, step):
        return state + 1


def test_the_fit_goes_on_after_a_failed_factorisation(rng):
    problem, theta = decay("torch", rng)
    result = engine(damping=Failing()).minimize(problem, theta)
    assert [record.accepted for record in result.history[:3]] == [False, False, True], result.message
    assert result.success


# ---- ways to end


def test_max_iter(rng):
    problem, theta = decay("torch", rng)
    result = engine(max_iter=3).minimize(problem, theta)
    assert result.status is Status.MAX_ITER
    assert result.n_iter == len(result.history) == 3
    assert not result.success
    assert "iterations 3, limit 3; raise max_iter" in result.message


def test_max_iter_zero_returns_the_start(rng):
    problem, theta = decay("torch", rng)
    result = engine(max_iter=0).minimize(problem, theta)
    assert (result.status, result.n_iter, list(result.history)) == (Status.MAX_ITER, 0, [])
    np.testing.assert_array_equal(result.theta, START)


def test_callback_sees_every_trial_and_stops(rng):
    problem, theta = decay("torch", rng)
    seen = []

    def callback(record):
        seen.append(record)
        return record.n_iter == 2

    result = engine().minimize(problem, theta, callback=callback)
    assert result.status is Status.STOPPED_BY_CALLBACK
    assert seen == list(result.history)
    assert [record.n_iter for record in seen] == [1, 2]
    assert not result.success


def test_a_callback_that_returns_nothing_does_not_stop(rng):
    problem, theta = decay("torch", rng)
    seen = []
    result = engine().minimize(problem, theta, callback=seen.append)
    assert result.success
    assert len(seen) == result.n_iter


@every_model
@pytest.mark.parametrize("calls", [55, 70])
def test_an_interrupt_keeps_the_best_point(kind, calls, rng):
    function, count = MODELS[kind][1], [0]

    def interrupted(x, a, b, c):
        count[0] += 1
        if count[0] >= calls:
            raise KeyboardInterrupt
        return function(x, a, b, c)

    x, y = data(rng)
    problem, theta = problem_of(kind, interrupted, x, y, [20.0, 0.01, -10.0])
    start = problem.cost(theta)
    with pytest.raises(KeyboardInterrupt) as caught:
        engine(damping=TrustRegion(radius=0.3, grow=1.01, accelerate=False)).minimize(problem, theta)
    result = caught.value.result
    assert result.status is Status.INTERRUPTED
    assert not result.success
    clean, _ = problem_of(kind, function, x, y, START)
    assert result.cost == pytest.approx(clean.cost(tensor(result.theta)))
    assert result.cost == min([start, *(record.cost for record in result.history)])
    assert len(result.history) == result.n_iter


def test_an_interrupt_from_the_callback(rng):
    problem, theta = decay("torch", rng)

    def callback(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        engine().minimize(problem, theta, callback=callback)
    assert caught.value.result.n_iter == len(caught.value.result.history) == 1


@every_model
def test_a_start_that_is_not_finite_names_rows(kind):
    x = np.arange(1.0, 11.0)
    x[[3, 7]] = 0.0

    def inverse(x, a):
        return a / x

    problem, theta = problem_of(kind, inverse, x, np.ones(10), [1.0])
    with pytest.raises(NonFiniteError, match=r"not finite at the start p0 in 2 places, first in rows \[3, 7\]"):
        engine().minimize(problem, theta)


def test_rows_are_named_by_sample_in_later_blocks():
    x = np.arange(1.0, 10001.0)
    x[9000] = 0.0
    problem, theta = problem_of("torch", lambda x, a: a / x, x, np.ones(10000), [1.0], chunk_rows=4096)
    with pytest.raises(NonFiniteError, match=r"first in rows \[9000\]"):
        engine().minimize(problem, theta)


def test_a_start_whose_cost_overflows_says_so():
    problem, theta = problem_of("torch", lambda x, a: a * x, np.ones(5), np.zeros(5), [1e200])
    with pytest.raises(NonFiniteError, match="sum of squares overflows"):
        engine().minimize(problem, theta)


def numpy_jacobian(x, a, b, c):
    return np.stack([np.exp(-b * x), -a * x * np.exp(-b * x), np.ones_like(x)], axis=1)


def test_a_derivative_that_is_not_finite_at_the_start_names_parameter_and_row(rng):
    problem, theta = decay("numpy", rng)

    def jac(x, a, b, c):
        columns = numpy_jacobian(x, a, b, c)
        columns[4, 1] = np.nan
        return columns

    with pytest.raises(NonFiniteError, match="derivative by 'b' is not finite at the start p0, first in row 4"):
        engine(jac=jac).minimize(problem, theta)


def test_a_derivative_that_becomes_non_finite_ends_the_fit(rng):
    problem, theta = decay("numpy", rng)
    calls = [0]

    def jac(x, a, b, c):
        calls[0] += 1
        return numpy_jacobian(x, a, b, c) * (1.0 if calls[0] <= 3 else np.nan)  # two checks, then the start

    result = engine(jac=jac).minimize(problem, theta)
    assert result.status is Status.NON_FINITE_JACOBIAN
    assert not result.success
    assert result.n_iter == 1
    assert result.cost < problem.cost(theta)
    assert np.isnan(result.covariance).all()
    assert "NON_FINITE_JACOBIAN" in result.report()


def test_a_jacobian_of_the_wrong_sign_stalls(rng, monkeypatch):
    monkeypatch.setattr(UserJacobian, "check", lambda *_: None)
    problem, theta = decay("torch", rng)

    def jac(x, a, b, c):
        return -torch.stack([torch.exp(-b * x), -a * x * torch.exp(-b * x), torch.ones_like(x)], dim=1)

    result = engine(jac=jac).minimize(problem, theta)
    assert not result.success
    assert result.status in (Status.STALLED, Status.STALLED_AT_PRECISION)
    np.testing.assert_array_equal(result.theta, START)
    assert result.n_iter < 100


@pytest.mark.parametrize("factor", [-1.0, 0.5, 1.1])
def test_a_wrong_jacobian_is_refused_by_name(factor, rng):
    problem, theta = decay("numpy", rng)

    def jac(x, a, b, c):
        columns = numpy_jacobian(x, a, b, c)
        columns[:, 1] *= factor
        return columns

    with pytest.raises(ValueError, match="jac: the column of 'b' is not the derivative"):
        engine(jac=jac).minimize(problem, theta)


def test_an_error_of_the_model_at_a_trial_is_a_rejected_trial():
    """As of solvers inside a model at wild trials; the message of a fit that fails repeats it."""

    def fenced(x, a, b, c):
        if b > 2:
            raise RuntimeError("no solution")
        return a * np.exp(-b * x) + c

    x, y = data(np.random.default_rng(0))
    problem, theta = problem_of("numpy", fenced, x, y, [0.1, 0.01, 0.0])
    result = engine(damping=TrustRegion(radius=1e3)).minimize(problem, theta)
    assert any(np.isnan(record.trial_cost) for record in result.history)
    assert result.success, result.message
    stopped = engine(damping=TrustRegion(radius=1e3), max_iter=1).minimize(problem, theta)
    assert "the model raised RuntimeError: no solution" in stopped.message


@every_model
def test_an_exact_fit_converges(kind, rng):
    problem, theta = decay(kind, rng, noise=0.0)
    result = engine().minimize(problem, theta)
    assert result.success, result.message
    np.testing.assert_allclose(result.theta, TRUE, rtol=1e-12)


@every_model
def test_a_start_at_the_solution_needs_no_trial_or_few(kind, rng):
    problem, theta = decay(kind, rng)
    first = engine().minimize(problem, theta)
    again = engine().minimize(problem, tensor(first.theta))
    assert again.success
    assert again.n_iter <= 2
    np.testing.assert_allclose(again.theta, first.theta, rtol=1e-7)


# ---- counts


class Counted:
    """A model that counts the evaluations over all of its rows."""

    def __init__(self, function, n_rows):
        self.function, self.n_rows, self.count = function, n_rows, 0

    def __call__(self, x, *params):
        self.count += len(x) == self.n_rows
        return self.function(x, *params)


@pytest.mark.parametrize("jac", ["2-point", "3-point", "auto"])
def test_counts_of_a_numpy_model(jac, rng):
    """200 rows: the probes see 64 of them, so that whole evaluations can be told from probes."""
    x, y = data(rng, m=200)
    model = Counted(numpy_decay, 200)
    problem, theta = problem_of("numpy", model, x, y, START)
    model.count = 0
    result = engine(jac=jac).minimize(problem, theta)
    assert result.n_iter == len(result.history)
    assert [record.n_iter for record in result.history] == list(range(1, result.n_iter + 1))
    assert result.nfev == model.count


@pytest.mark.parametrize("accelerate", [True, False])
def test_counts_of_a_torch_model(accelerate, rng):
    """With the user's Jacobian every evaluation is a plain call: trials, linearisations, two a curvature."""
    x, y = data(rng, m=200)
    model = Counted(torch_decay, 200)

    def jac(x, a, b, c):
        return torch.stack([torch.exp(-b * x), -a * x * torch.exp(-b * x), torch.ones_like(x)], dim=1)

    problem, theta = problem_of("torch", model, x, y, START)
    model.count = 0
    result = engine(jac=jac, damping=TrustRegion(accelerate=accelerate)).minimize(problem, theta)
    assert result.nfev == model.count
    trials, accepted = result.n_iter, sum(record.accepted for record in result.history)
    assert result.njev == 1 + accepted
    assert result.nfev == 1 + trials + result.njev + (trials if accelerate else 0)


# ---- automatic differences


def test_a_stop_of_automatic_differences_was_made_on_three_points(rng):
    problem, theta = decay("numpy", rng)
    result = engine().minimize(problem, theta)
    assert result.success
    assert result.used["jac"] == "3-point"
    schemes = [record.jac for record in result.history]
    assert schemes[0] == "2-point"
    assert schemes[-1] == "3-point"
    assert schemes == sorted(schemes)  # never back


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_start_at_the_solution_is_confirmed_by_three_points(noise, rng):
    problem, theta = decay("numpy", rng, start=TRUE, noise=noise)
    result = engine().minimize(problem, theta)
    assert result.success
    assert result.used["jac"] == "3-point"


@pytest.mark.parametrize("jac", ["2-point", "3-point", "cs"])
def test_a_scheme_that_is_named_is_kept(jac, rng):
    problem, theta = decay("numpy", rng)
    result = engine(jac=jac).minimize(problem, theta)
    assert {record.jac for record in result.history} == {jac}
    np.testing.assert_allclose(result.theta, TRUE, atol=0.1)


# ---- the result in words


def test_brief_message_and_report(rng):
    problem, theta = decay("torch", rng)
    result = engine().minimize(problem, theta)
    brief = result.brief()
    assert "\n" not in brief
    for part in (
        f"converged ({result.status.name})",
        f"after {result.n_iter} iterations",
        f"{result.nfev} model evaluations",
        f"{result.njev} linearisations",
        f"cost {result.cost:.6g}",
    ):
        assert part in brief
    assert "NOT" not in brief
    assert f"{result.stop.measured:.3g}, limit {result.stop.limit:.3g}" in result.message
    report = result.report()
    lines = report.splitlines()
    assert report.replace("\n  ", " ").startswith(brief)
    assert result.message in report.replace("\n  ", " ")
    for key in ("jac", "solver", "backend", "damping", "devices", "rows"):
        assert f"\n  {key} " in report
    for name, value in zip("abc", result.theta, strict=True):
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert float(line.split()[1]) == pytest.approx(value, abs=float(line.split()[2]) / 100)
    assert "residuals 60, rank 3, degrees of freedom 57" in report
    assert [f"  {line}" for line in result.table(last=10).splitlines()] == lines[-min(len(result.history), 10) - 1 :]


def test_a_fit_that_did_not_converge_says_so(rng):
    problem, theta = decay("torch", rng)
    result = engine(max_iter=1).minimize(problem, theta)
    assert result.brief().startswith("NOT converged (MAX_ITER) after 1 iterations")


def test_table_has_a_line_for_each_trial(rng):
    problem, theta = decay("torch", rng, start=[10.0, 0.1, -3.0])
    result = engine(damping=MarquardtDamping(start_damping=1e-8), max_iter=30).minimize(problem, theta)
    lines = result.table().splitlines()
    assert len(lines) == 1 + result.n_iter
    assert lines[0].split()[0] == "iter"
    for line, record in zip(lines[1:], result.history, strict=True):
        assert line.split()[0] == str(record.n_iter)
        assert ("accepted" in line) == record.accepted
        assert ("rejected" in line) == (not record.accepted)
    assert result.table(last=2).splitlines() == [lines[0], *lines[-2:]]


def test_undetermined_parameters_are_reported_with_infinite_errors(rng):
    x, y = data(rng)
    problem, theta = problem_of("torch", lambda x, a, b, c, d: (a + d) * torch.exp(-b * x) + c, x, y, [1, 1, 1, 1])
    result = engine().minimize(problem, theta)
    assert result.success, result.message
    assert result.undetermined.tolist() == [True, False, False, True]
    assert (result.rank, result.dof) == (3, 57)
    assert np.isinf(result.stderr[[0, 3]]).all()
    assert np.isfinite(result.stderr[[1, 2]]).all()
    assert " inf" in result.report()


@pytest.mark.parametrize(("option", "value"), [("solver", "lu"), ("backend", "numpy")])
def test_names_are_checked_before_any_trial(option, value, rng):
    problem, theta = decay("torch", rng)
    with pytest.raises(ValueError, match=f"{option}: got '{value}'"):
        engine(**{option: value}).minimize(problem, theta)
