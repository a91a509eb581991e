"""The short path of tiny fits: it agrees with the general engine and SciPy, or it leaves the fit to the engine."""

import pickle
import warnings
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
import torch
from cases import compare, decay_to_level
from cases_numerical import D1, D2, D3, D7, G1, G3, G4, G6, N1, N3, N5, N5_BAD_START, P1, P3, P4, P4_BAD_START, W6
from scipy.optimize import curve_fit as scipy_curve_fit
from scipy.optimize import least_squares

from lmfit_gpu import LMRegressor, curve_fit
from lmfit_gpu.attempt import attempt, tiny_curve_fit
from lmfit_gpu.compact import MOST_ENTRIES, Curve, Limits, UnusualError, has_size, minimize
from lmfit_gpu.compact.linear import MOST_PARAMS
from lmfit_gpu.compact.loop import MOST_TRIALS
from lmfit_gpu.datasets import NIST_NAMES, correct_digits, load_nist
from lmfit_gpu.preparation import Data
from lmfit_gpu.result import Status

X = np.linspace(0, 5, 100)
TRUE = (2.5, 1.3, 0.5)
Y = decay_to_level(X, *TRUE) + 0.05 * np.random.default_rng(0).standard_normal(100)
P0 = [1.0, 1.0, 0.0]
NAMES = ("a", "b", "c")


def fit(f=decay_to_level, x=X, y=Y, p0=P0, weights=None, jac=None, **limits):
    curve = Curve(f, np.asarray(x, float), np.asarray(y, float), weights, jac)
    return minimize(curve, np.array(p0, float), Limits(**limits), [f"p{j}" for j in range(len(p0))])


def engine(f=decay_to_level, x=X, y=Y, p0=P0, **options):
    """Return an estimator fitted by the general engine: it alone takes a number of rows per block."""
    est = LMRegressor(f, p0=p0, chunk_rows=10**6, **options).fit(np.reshape(x, (-1, 1)), y)
    assert "path" not in est.result_.used
    return est


def decay_jacobian(x, a, b, c):
    e = np.exp(-b * x)
    return np.column_stack([e, -a * x * e, np.ones_like(x)])


# ---- the answer


def test_it_is_the_answer_of_the_engine():
    """The same point, the same path as far as the first extrapolation, the same account."""
    short = LMRegressor(decay_to_level, p0=P0).fit(X[:, None], Y)
    long = engine()
    assert short.result_.used["path"] == "compact"
    assert short.result_.used["jac"] == "3-point"
    np.testing.assert_allclose(short.theta_, long.theta_, rtol=1e-8)
    np.testing.assert_allclose(short.covariance_, long.covariance_, rtol=1e-6)
    np.testing.assert_allclose(short.stderr_, long.stderr_, rtol=1e-6)
    assert short.result_.cost == pytest.approx(long.result_.cost, rel=1e-14)
    assert short.result_.names == long.result_.names
    assert (short.rank_, short.result_.dof, short.result_.success) == (3, 97, True)
    first, expected = (asdict(est.result_.history[0]) for est in (short, long))
    assert 0 < first.pop("seconds") < 10
    assert 0 < expected.pop("seconds") < 60
    assert (first.pop("jac"), first.pop("accepted")) == (expected.pop("jac"), expected.pop("accepted"))
    np.testing.assert_allclose(list(first.values()), list(expected.values()), rtol=1e-5)
    assert set(long.result_.used) < set(short.result_.used)
    assert short.result_.nfev < long.result_.nfev


def test_records_are_of_their_trials():
    calls = []

    def f(x, *params):
        calls.append(params)
        return decay_to_level(x, *params)

    result = fit(f).result(NAMES)
    assert [record.n_iter for record in result.history] == list(range(1, result.n_iter + 1))
    assert result.nfev == len(calls)
    costs = [record.cost for record in result.history]
    assert all(after <= before for before, after in pairwise(costs))
    assert costs[-1] == result.cost == pytest.approx(0.5 * np.sum((decay_to_level(X, *result.theta) - Y) ** 2))
    for record in result.history:
        assert (record.trial_cost == record.cost) == record.accepted


@pytest.mark.parametrize("start", [1, 2])
@pytest.mark.parametrize("name", NIST_NAMES)
def test_nist(name, start):
    """Six correct digits, and four of the standard errors, or None."""
    problem = load_nist(name)
    x = problem.X[:, 0] if problem.X.shape[1] == 1 else problem.X
    answer = tiny_curve_fit(problem.model_numpy, x, problem.y, problem.starts[start - 1])
    if answer is None:
        assert (name, start) in {("MGH17", 1)}, "another run is left to the engine; is it slower now?"
        return
    assert correct_digits(answer.theta, problem.reference.params) >= 6
    if name != "Lanczos1":  # its residuals are the rounding of its data
        dof = len(problem.y) - len(answer.theta)
        stderr = np.sqrt(np.diag(answer.covariance) * 2 * answer.cost / dof)
        assert correct_digits(stderr, problem.reference.stderr) >= 4


RIGHT_ANSWER = [
    pytest.param(variant, id=f"{case.name}-{label}")
    for case in (D1, D2, D3, D7, W6, G6, N1, N3, N5, P1, P3, P4)
    for label, variant in case.each_variant()
]


@pytest.mark.parametrize("case", RIGHT_ANSWER)
def test_cases_are_right_or_left_to_the_engine(case):
    answer = tiny_curve_fit(case.numpy_model, case.x, case.y, np.atleast_1d(np.asarray(case.p0, float)))
    if answer is None:
        return
    dof = len(case.y) - len(answer.theta)
    std = np.sqrt(np.diag(answer.covariance) * 2 * answer.cost / dof)
    assert compare(case.expected, answer.theta, std if case.expected.std is not None else None, 2 * answer.cost) == []


def test_most_cases_are_answered():
    answered = [
        tiny_curve_fit(c.numpy_model, c.x, c.y, np.atleast_1d(np.asarray(c.p0, float))) is not None
        for c in (parameter.values[0] for parameter in RIGHT_ANSWER)
    ]
    assert np.mean(answered) >= 0.6, f"{sum(answered)} of {len(answered)}"


RANDOM = {
    "decay": (decay_to_level, [2.0, 1.0, 0.5]),
    "peak": (lambda x, a, m, s: a * np.exp(-0.5 * ((x - m) / s) ** 2), [3.0, 2.5, 0.8]),
    "sine": (lambda x, a, w, p, c: a * np.sin(w * x + p) + c, [1.5, 2.0, 0.3, 1.0]),
    "saturation": (lambda x, a, k: a * x / (k + x), [4.0, 1.5]),
    "cubic": (lambda x, a, b, c, d: a + x * (b + x * (c + x * d)), [1.0, -2.0, 0.7, 0.1]),
    "logistic": (lambda x, a, b, c: a / (1 + np.exp(-b * (x - c))), [5.0, 1.7, 2.4]),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", RANDOM)
def test_random_problems_agree_with_scipy(name, seed, weighted):
    """Against least_squares at its tightest from our answer; started within 20 %, every one is answered."""
    f, true = RANDOM[name]
    rng = np.random.default_rng([seed, len(name)])
    true = np.array(true) * (1 + 0.3 * rng.uniform(-1, 1, len(true)))
    x = np.sort(rng.uniform(0.1, 5, 60))
    sigma = rng.uniform(0.02, 0.1, 60)
    y = f(x, *true) + sigma * rng.standard_normal(60)
    weights = 1 / sigma if weighted else np.ones(60)
    answer = fit(f, x, y, true * (1 + 0.2 * rng.uniform(-1, 1, len(true))), weights=weights if weighted else None)
    best = least_squares(lambda p: weights * (f(x, *p) - y), answer.theta, xtol=1e-15, ftol=1e-15, gtol=1e-15)
    assert answer.cost <= best.cost * (1 + 1e-12)
    stderr = np.sqrt(np.diag(answer.covariance) * 2 * answer.cost / (60 - len(true)))
    assert np.all(np.abs(answer.theta - best.x) <= 1e-4 * stderr)
    np.testing.assert_allclose(np.linalg.inv(answer.covariance), best.jac.T @ best.jac, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("jac", [None, decay_jacobian])
def test_curve_fit_agrees_with_scipy(jac):
    popt, pcov = curve_fit(decay_to_level, X, Y, P0, jac=jac)
    expected, expected_cov = scipy_curve_fit(decay_to_level, X, Y, P0, ftol=1e-14, xtol=1e-14, gtol=1e-14)
    np.testing.assert_allclose(popt, expected, rtol=1e-7)
    np.testing.assert_allclose(pcov, expected_cov, rtol=1e-5)
    popt[0] = pcov[0, 0] = 0  # the caller's own


def test_a_user_jacobian_is_used():
    answer = fit(jac=decay_jacobian)
    assert answer.result(NAMES).used["jac"] == "user"
    np.testing.assert_allclose(answer.theta, fit().theta, rtol=1e-8)
    weights = np.linspace(0.5, 2, 100)
    np.testing.assert_allclose(fit(jac=decay_jacobian, weights=weights).theta, fit(weights=weights).theta, rtol=1e-8)


def test_exact_data_and_given_limits():
    assert fit(y=decay_to_level(X, *TRUE)).stop.status is Status.CONVERGED_RESIDUAL
    loose = fit(ftol=1e-4)
    assert loose.stop.status is Status.CONVERGED_COST
    assert loose.stop.limit == 1e-4
    assert len(loose.trials) < len(fit().trials)
    assert fit(ftol=0.0, gtol=0.0, xtol=1e-3).stop.status is Status.CONVERGED_STEP
    assert fit(ftol=0.0, xtol=0.0, gtol=1e-4).stop.status is Status.CONVERGED_GRADIENT


def test_a_trial_that_overflows_or_is_refused_is_a_rejected_trial():
    def refusing(x, a, b):
        if b > 1.2:
            raise ValueError("b is too large")
        return a * np.exp(b * x)

    y = 2 * np.exp(1.1 * X)
    for f in (refusing, lambda x, a, b: a * np.exp(b * x) if b < 1.2 else np.full(100, np.inf)):
        answer = fit(f, y=y, p0=[60.0, 0.3])
        np.testing.assert_allclose(answer.theta, [2.0, 1.1], rtol=1e-9)


# ---- what is left to the engine


def rounded(x, a, b, c):
    return np.round(decay_to_level(x, a, b, c), 6)


def float32_inside(x, a, b, c):
    return decay_to_level(*(np.float32(v) for v in (x, a, b, c))).astype(np.float64)


NOISE = np.random.default_rng(1)
# Rounded less than differences resolve at the start, but not less than they have to at the end.
finely_rounded = lambda x, *p: np.round(decay_to_level(x, *p), 8)  # noqa: E731

UNUSUAL = {
    "finely rounded values": (dict(f=finely_rounded), "does not show|go together"),
    "rounded values": (dict(f=rounded), "not finite|singular"),
    "float32 inside": (dict(f=float32_inside), "not finite|singular"),
    "float32 values": (dict(f=lambda x, *p: decay_to_level(x, *p).astype(np.float32)), "does not return float64"),
    "a table": (dict(f=lambda x, a, b, c: decay_to_level(x, np.round(a * 100) / 100, b, c)), "not finite|singular"),
    "noise": (dict(f=lambda x, *p: decay_to_level(x, *p) + 1e-7 * NOISE.standard_normal(100)), "go together|stalled"),
    "a column": (dict(f=lambda x, *p: decay_to_level(x, *p)[:, None]), "does not return float64"),
    "a scalar": (dict(f=lambda x, a, b, c: a), "does not return float64"),
    "a list": (dict(f=lambda x, *p: decay_to_level(x, *p).tolist()), "does not return float64"),
    "integers": (dict(f=lambda x, *p: np.arange(100)), "does not return float64"),
    "complex values": (dict(f=lambda x, *p: decay_to_level(x, *p) + 0j), "does not return float64"),
    "complex later": (
        dict(f=lambda x, a, b, c: decay_to_level(x, a, b, c) + (0j if a > 1 else 0)),
        "does not return float64|cast",
    ),
    "a tensor": (
        dict(f=lambda x, a, b, c: a * torch.exp(-b * torch.tensor(np.array(x))) + c),
        "does not return float64",
    ),
    "raises": (dict(f=lambda x, a, b: a * x + b), "raises at the start"),
    "writes to x": (dict(f=lambda x, *p: x.__iadd__(1.0)), "raises at the start"),
    "not finite at the start": (dict(f=lambda x, a, b, c: a * np.log(x - b) + c), "not finite at the start"),
    "derivative not finite": (
        dict(f=lambda x, a, b, c: a * np.exp(-b * x) + np.sqrt(c), p0=[1.0, 1.0, 0.0], scheme="3-point"),
        "not finite|go together",
    ),
    "an unused parameter": (dict(f=lambda x, a, b, c: a * np.exp(-b * x)), "not finite|singular|does not show"),
    "one parameter twice": (dict(f=lambda x, a, b, c: a * np.exp(c - b * x)), "stalled"),
    "too many trials": (dict(max_iter=3), "too many trials"),
    "jac of another sign": (dict(jac=lambda x, *p: -decay_jacobian(x, *p)), "jac is not the derivative"),
    "jac with columns swapped": (
        dict(jac=lambda x, *p: decay_jacobian(x, *p)[:, [1, 0, 2]]),
        "jac is not the derivative",
    ),
    "jac transposed": (dict(jac=lambda x, *p: decay_jacobian(x, *p).T), "jac does not return"),
    "G1": (dict(f=G1.numpy_model, x=G1.x, y=G1.y, p0=G1.p0), "stalled|singular"),
    "N5": (dict(f=N5.numpy_model, x=N5.x, y=N5.y, p0=N5_BAD_START), "not finite at the start"),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_is_left_to_the_engine(name):
    given, reason = UNUSUAL[name]
    with pytest.raises(UnusualError, match=reason):
        fit(**given)


def test_the_size():
    assert has_size(4, 3)
    assert not has_size(3, 3)  # no degree of freedom
    assert not has_size(2, 3)
    assert not has_size(5, 0)
    assert not has_size(1000, MOST_PARAMS + 1)
    assert not has_size(MOST_ENTRIES, 2)
    for case in (G3, G4):
        assert tiny_curve_fit(case.numpy_model, case.x, case.y, list(case.p0)) is None


@pytest.mark.parametrize(
    "changes",
    [
        dict(x=torch.from_numpy(X)),
        dict(x=X + 0j),
        dict(x=np.where(X > 4, np.nan, X)),
        dict(y=np.where(X > 4, np.inf, Y)),
        dict(y=Y[:, None]),
        dict(y=Y[:-1]),
        dict(p0=None),
        dict(p0=dict(a=1.0, b=1.0, c=0.0)),
        dict(p0=[1.0, np.nan, 0.0]),
        dict(p0="abc"),
        dict(p0=[[1.0, 1.0, 0.0]]),
        dict(p0=[1.0, 1.0]),
    ],
    ids=str,
)
def test_arguments_for_the_general_path(changes):
    given = dict(x=X, y=Y, p0=P0) | changes
    assert tiny_curve_fit(decay_to_level, given["x"], given["y"], given["p0"]) is None


@pytest.mark.parametrize(
    "options",
    [
        dict(solver="cholesky"),
        dict(backend="torch"),
        dict(damping="nielsen"),
        dict(dtype=torch.float32),
        dict(chunk_rows=10),
        dict(callback=print),
        dict(jac="2-point"),
        dict(jac="cs"),
        dict(devices=["cpu"]),
        dict(p0=None),
        dict(p0=lambda x, y: P0),
        dict(residual=lambda p, t: p - t),
        dict(model=torch.nn.Linear(1, 1)),
    ],
    ids=lambda options: next(iter(options)) + "=" + str(next(iter(options.values())))[:10],
)
def test_options_of_the_general_path(options):
    est = LMRegressor(**(dict(model=decay_to_level, p0=P0) | options))
    assert attempt(est, Data(X[:, None], Y)) is None


def test_a_wrong_number_of_parameters_is_the_usual_error():
    with pytest.raises(ValueError, match="p0: got 2 values"):
        curve_fit(decay_to_level, X, Y, [1.0, 1.0])
    with pytest.raises(ValueError, match="p0: got 2 values"):
        LMRegressor(decay_to_level, p0=[1.0, 1.0]).fit(X[:, None], Y)


def test_a_wrong_jacobian_is_the_usual_error():
    with pytest.raises(ValueError, match="jac: the column of 'a' is not the derivative"):
        curve_fit(decay_to_level, X, Y, P0, jac=lambda x, *p: -decay_jacobian(x, *p))


def test_a_far_start_is_never_a_silent_wrong_answer():
    """The bad start of P4 crawls along a valley; whatever answers, it is a minimum."""
    answer = tiny_curve_fit(P4.numpy_model, P4.x, P4.y, P4_BAD_START)
    if answer is not None:
        best = least_squares(lambda p: P4.numpy_model(P4.x, *p) - P4.y, answer.theta, xtol=1e-15, ftol=1e-15)
        assert answer.cost <= best.cost * (1 + 1e-9)


# ---- the data, interrupts, the estimator


def test_data_are_safe():
    x, y = X.copy(), Y.copy()
    seen = []

    def writing(x, a, b, c):
        values = decay_to_level(x, a, b, c)
        seen.append(x.flags.writeable)
        return values

    tiny_curve_fit(writing, x, y, P0)
    assert not any(seen)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)
    assert x.flags.writeable


def test_a_function_that_uses_its_memory_again():
    memory = np.empty(100)

    def f(x, a, b, c):
        memory[:] = decay_to_level(x, a, b, c)
        return memory

    np.testing.assert_array_equal(fit(f).theta, fit().theta)


class Interrupting:
    """A model that is interrupted, or breaks, at one of its calls."""

    def __init__(self, call, error=KeyboardInterrupt, forever=False):
        self.call, self.error, self.forever, self.calls = call, error, forever, 0

    def __call__(self, x, a, b, c):
        self.calls += 1
        if self.calls == self.call or (self.forever and self.calls > self.call):
            raise self.error("stop")
        return decay_to_level(x, a, b, c)


@pytest.mark.parametrize("call", [6, 15, 22, 40])
def test_an_interrupt_keeps_the_best_point(call):
    est = LMRegressor(Interrupting(call), p0=P0)
    with pytest.raises(KeyboardInterrupt):
        est.fit(X[:, None], Y)
    assert est.result_.status is Status.INTERRUPTED
    assert est.result_.cost == pytest.approx(0.5 * np.sum((decay_to_level(X, *est.theta_) - Y) ** 2))
    assert est.result_.cost <= 0.5 * np.sum((decay_to_level(X, *P0) - Y) ** 2)
    assert est.covariance_.shape == (3, 3)


def test_an_interrupt_before_the_first_point_keeps_nothing():
    est = LMRegressor(Interrupting(2), p0=P0)
    with pytest.raises(KeyboardInterrupt):
        est.fit(X[:, None], Y)
    assert not hasattr(est, "result_")


@pytest.mark.parametrize("call", range(6, 40, 3))
def test_a_model_that_breaks_for_good_keeps_the_best_point(call):
    """At a trial, and while it is linearised: the engine would find no model to start with."""
    est = LMRegressor(Interrupting(call, RuntimeError, forever=True), p0=P0)
    with pytest.raises(RuntimeError, match="stop"):
        est.fit(X[:, None], Y)
    assert not est.result_.success
    assert est.result_.cost <= 0.5 * np.sum((decay_to_level(X, *P0) - Y) ** 2)


def test_predict_pickle_and_refit():
    est = LMRegressor(decay_to_level, p0=P0).fit(X[:, None], Y)
    assert est.result_.used["path"] == "compact"
    again = pickle.loads(pickle.dumps(est))
    wide = np.linspace(-1, 6, 5000)[:, None]
    np.testing.assert_allclose(again.predict(wide), decay_to_level(wide[:, 0], *est.theta_), rtol=1e-14)
    assert isinstance(est.predict(torch.from_numpy(wide)), torch.Tensor)
    assert est.score(X[:, None], Y) > 0.9
    assert again.params_ == est.params_
    assert "compact" in est.report()
    np.testing.assert_array_equal(est.fit(X[:, None], Y).theta_, again.theta_)


def test_more_columns_and_other_types_of_data():
    wide = np.column_stack([X, X**2])
    f = lambda x, a, b: a * x[:, 0] + b * x[:, 1]  # noqa: E731
    est = LMRegressor(f, p0=[1.0, 1.0]).fit(wide, wide @ [2.0, 3.0])
    assert est.result_.used["path"] == "compact"
    np.testing.assert_allclose(est.theta_, [2.0, 3.0], rtol=1e-12)
    popt, _ = curve_fit(lambda x, a, b: a * x[0] + b * x[1], wide.T, wide @ [2.0, 3.0], [1.0, 1.0])
    np.testing.assert_allclose(popt, [2.0, 3.0], rtol=1e-12)
    popt, _ = curve_fit(lambda x, a, b: a * x + b, range(9), [2 * i + 1 for i in range(9)], [1, 1])
    np.testing.assert_allclose(popt, [2.0, 1.0], rtol=1e-12)


def test_no_warning_and_no_trace_of_numpy_settings():
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        fit(lambda x, a, b: a * np.exp(b * x), y=2 * np.exp(1.1 * X), p0=[60.0, 0.3])
        assert np.geterr()["over"] == "raise"


def test_a_fit_that_does_not_end_is_given_up_early():
    calls = [0]

    def crawling(x, a, b, c):
        calls[0] += 1
        return decay_to_level(x, a, b, c) + 1e-3 * np.sin(1e9 * calls[0])

    with pytest.raises(UnusualError):
        fit(crawling)
    assert calls[0] <= MOST_TRIALS * 8
