"""The bootstrap: known spreads of linear models, SciPy's BCa, repeatability, and refusals."""

import pickle
import warnings

import numpy as np
import pytest
import scipy.stats
import torch

from lmfit_gpu import LMRegressor
from lmfit_gpu.bootstrap import _Cases, _interval, _Residuals, acceleration
from lmfit_gpu.exceptions import FitWarning
from lmfit_gpu.solution import solution_of

RNG = np.random.default_rng(5)
x = np.linspace(0, 4, 40)
X = x[:, None]
Y = 2 * np.exp(-1.1 * x) + 0.8 + 0.05 * RNG.normal(size=40)


def decay(x, a, b, c):
    return a * np.exp(-b * x) + c


def decay_torch(x, a, b, c):
    return a * torch.exp(-b * x) + c


def line_torch(x, a, b):
    return a + b * x + 0 * torch.exp(-x)


def test_residuals_of_a_line_have_its_standard_errors():
    """The mean square of r/√(1 − h), centred, is nearly s²: errors s √diag (XᵀX)⁻¹, to 3 % with 2,000 resamples."""
    est = LMRegressor(line_torch, p0=[0, 1]).fit(X, 1 + 2 * x + RNG.normal(size=40))
    found = est.bootstrap(2000, random_state=0)
    np.testing.assert_allclose(found.stderr, est.stderr_, rtol=0.06)
    assert np.abs(found.bias).max() < 0.1 * est.stderr_.max()
    assert set(found.kinds.values()) == {"BCa"}
    for name, (low, high) in found.intervals.items():
        expected = est.conf_int()[name]
        assert (low, high) == pytest.approx(expected, abs=0.25 * (expected[1] - expected[0]))


def test_cases_know_of_noise_that_varies():
    """Noise that grows threefold with x: cases have the sandwich's errors, residuals those of the textbook."""
    y = 1 + 2 * x + (0.2 + 0.6 * (x > 2)) * RNG.normal(size=40)
    robust = LMRegressor(line_torch, p0=[0, 1], covariance="HC1").fit(X, y)
    plain = LMRegressor(line_torch, p0=[0, 1]).fit(X, y)
    cases, residuals = (plain.bootstrap(1500, method=method, random_state=1) for method in ("case", "residual"))
    np.testing.assert_allclose(cases.stderr, robust.stderr_, rtol=0.1)
    np.testing.assert_allclose(residuals.stderr, plain.stderr_, rtol=0.08)
    assert abs(robust.stderr_[0] / plain.stderr_[0] - 1) > 0.2


def test_the_interval_is_that_of_scipy():
    """BCa of a mean, with scipy's own resamples: the jackknife of a mean is exact to first order."""
    sample = RNG.gamma(2.0, size=30)
    expected = scipy.stats.bootstrap((sample,), np.mean, n_resamples=4000, method="BCa", rng=np.random.default_rng(0))
    (low, high), kind = _interval(
        expected.bootstrap_distribution, sample.mean(), acceleration(sample - sample.mean()), 0.95
    )
    assert kind == "BCa"
    width = expected.confidence_interval.high - expected.confidence_interval.low
    assert low == pytest.approx(expected.confidence_interval.low, abs=0.01 * width)
    assert high == pytest.approx(expected.confidence_interval.high, abs=0.01 * width)
    assert acceleration(np.zeros(3)) == 0


@pytest.mark.parametrize("method", ["residual", "case"])
def test_a_seed_gives_the_same_and_every_route_nearly(method):
    by_tiny, by_batch = (LMRegressor(model, p0=[2, 1, 0.8]).fit(X, Y) for model in (decay, decay_torch))
    by_engine = LMRegressor(decay_torch, p0=[2, 1, 0.8], bounds={"a": (0, 10)}).fit(X, Y)
    first = by_batch.bootstrap(60, method=method, random_state=3, level=0.9)
    again = by_batch.bootstrap(60, method=method, random_state=3, level=0.9)
    np.testing.assert_array_equal(first.theta, again.theta)
    for est in (by_tiny, by_engine):
        other = est.bootstrap(60, method=method, random_state=3, level=0.9)
        np.testing.assert_allclose(other.theta, first.theta, rtol=1e-4)


def test_weights_losses_and_constraints():
    sigma, times = np.linspace(0.05, 0.1, 40), np.arange(40) % 2 + 1
    weighted = LMRegressor(decay, p0=[2, 1, 0.8]).fit(X, Y, sigma=sigma, sample_weight=times)
    for method in ("residual", "case"):
        found = weighted.bootstrap(80, method=method, random_state=0, level=0.9)
        assert found.n_failed == 0
        np.testing.assert_allclose(found.stderr, weighted.stderr_, rtol=0.6)
    huber = LMRegressor(decay, p0=[2, 1, 0.8], loss="huber", f_scale=0.05).fit(X, Y)
    assert np.isfinite(huber.bootstrap(40, random_state=0, level=0.9).stderr).all()
    tied = LMRegressor(decay, p0=[2, 1, 0.8], fixed=["b"], tied={"c": lambda a: 0.4 * a}).fit(X, Y)
    found = tied.bootstrap(40, random_state=0, level=0.9)
    assert found.stderr[1] == 0
    assert found.intervals["b"] == (tied.theta_[1], tied.theta_[1])
    np.testing.assert_allclose(found.theta[:, 2], 0.4 * found.theta[:, 0], rtol=1e-12)


def test_outputs_of_a_row_are_drawn_together():
    """The second output is the first in other units: whatever is drawn, it stays so."""
    y = Y + 0.2 * RNG.normal(size=40)
    est = LMRegressor(torch.nn.Linear(1, 2).double()).fit(X, np.stack((y, 10 * y), axis=1))
    for method in ("residual", "case"):
        theta = est.bootstrap(40, method=method, random_state=0, level=0.9).theta
        np.testing.assert_allclose(theta[:, [1, 3]], 10 * theta[:, [0, 2]], rtol=1e-6)


def test_fits_that_fail_are_counted_and_told():
    """Every third set of targets is one the model refuses."""
    calls = [0]

    def fragile(x, a, b, c):
        calls[0] += 1
        if fragile.breaks and calls[0] > 40 and (calls[0] // 400) % 2:
            return np.full_like(x, np.nan)
        return decay(x, a, b, c)

    fragile.breaks = False
    est = LMRegressor(fragile, p0=[2, 1, 0.8]).fit(X, Y)
    fragile.breaks = True
    with pytest.warns(FitWarning, match=r"\d+ of 60 fits of resampled data did not converge and are left out"):
        found = est.bootstrap(60, random_state=0, level=0.9)
    assert 0 < found.n_failed == 60 - len(found.theta)


def test_the_text_has_the_numbers():
    est = LMRegressor(decay_torch, p0=[2, 1, 0.8]).fit(X, Y)
    found = est.bootstrap(50, random_state=0, level=0.9)
    lines = str(found).splitlines()
    assert lines[0] == "residual bootstrap, 50 resamples, 0 failed"
    assert float(lines[2].split()[2]) == pytest.approx(found.stderr[0], rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"n_resamples": 1}, "n_resamples: got 1; a whole number >= 2"),
        ({"n_resamples": 20}, "n_resamples: got 20, too few for intervals of level 0.95"),
        ({"n_resamples": 99.5}, "n_resamples: got 99.5"),
        ({"method": "wild"}, "method: got 'wild'; 'residual' or 'case'"),
        ({"level": 0}, "level: got 0"),
    ],
)
def test_bad_arguments_are_named(arguments, said):
    est = LMRegressor(decay, p0=[2, 1, 0.8]).fit(X, Y)
    with pytest.raises(ValueError, match=said):
        est.bootstrap(**arguments)


def test_what_cannot_be_drawn_is_refused():
    alone = LMRegressor(residual=lambda theta, x, y: x - theta[0], p0=[1.0]).fit(X)
    with pytest.raises(ValueError, match="method='residual': residuals of a residual callable are not prediction"):
        alone.bootstrap()
    assert alone.bootstrap(50, method="case", random_state=0, level=0.9).stderr[0] == pytest.approx(
        x.std() / 40**0.5, rel=0.3
    )
    coupled = LMRegressor(lambda x, a, b: np.cumsum(a + b * x), p0=[1, 1]).fit(X, np.cumsum(Y))
    with pytest.raises(ValueError, match="method='case': the model couples rows"):
        coupled.bootstrap(method="case")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stopped = LMRegressor(decay, p0=[1, 5, 0], max_iter=1).fit(X, Y)
    with pytest.raises(ValueError, match="bootstrap: the fit has not converged"):
        stopped.bootstrap()
    est = pickle.loads(pickle.dumps(LMRegressor(line_torch_named, p0=[0, 1]).fit(X, Y)))
    with pytest.raises(ValueError, match="has no data"):
        est.bootstrap()


def line_torch_named(x, a, b):
    return a + b * x


SKEWED = np.random.default_rng(0).exponential(size=25)


@pytest.mark.parametrize("method", ["residual", "case"])
def test_noise_and_influences_have_the_sign_of_the_data(method):
    """The mean of skewed data: the estimates are skewed alike, the interval is SciPy's BCa."""
    est = LMRegressor(lambda x, mu: mu + 0 * torch.exp(x), p0=[1.0]).fit(np.ones((25, 1)), SKEWED)
    found = est.bootstrap(4999, method=method, random_state=0)
    assert found.kinds["mu"] == "BCa"
    # scipy 1.17: bootstrap((SKEWED,), np.mean, n_resamples=9999, method="BCa", random_state=1).confidence_interval
    assert found.intervals["mu"] == pytest.approx((0.8100740800, 1.9527556479), abs=0.03)
    expected = scipy.stats.skew(SKEWED) / 5  # of a mean of 25
    assert scipy.stats.skew(found.theta[:, 0]) == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("times", [1, np.arange(40) % 3 + 1])
def test_influences_of_a_line_are_those_of_leaving_rows_out(times):
    """Of a linear model θ̂ − θ̂₍ᵢ₎ = (XᵀX)⁻¹ xᵢ eᵢ/(1 − hᵢ), exactly, and a frequency is that many rows."""
    n = np.ones(40, dtype=int) * times
    y = 1 + 2 * x + RNG.exponential(size=40)
    est = LMRegressor(line_torch, p0=[0, 1]).fit(X, y, sample_weight=n)
    draws = _Residuals(solution_of(est))
    design = np.stack((np.ones(40), x), axis=1)
    left_out = []
    for i in range(40):
        w = (n - (np.arange(40) == i)) ** 0.5
        left_out.append(np.linalg.lstsq(w[:, None] * design, w * y, rcond=None)[0])
    np.testing.assert_allclose(draws.influence, (est.theta_ - left_out).T, rtol=1e-6, atol=1e-9)
    rows = np.repeat(est.theta_ - left_out, n, axis=0)[:, 1]
    expected = (rows**3).sum() / (6 * (rows**2).sum() ** 1.5)
    assert acceleration(draws.influence[1], draws.w) == pytest.approx(expected, rel=1e-5)


def test_under_a_loss_an_outlier_has_the_influence_of_its_psi():
    """Left out, an outlier of 60 f_scale moves the estimate no more than one of 6: by ψ, not by its residual."""
    influences = []
    for size in (0.3, 3.0):
        est = LMRegressor(line_torch, p0=[0, 1], loss="huber", f_scale=0.05)
        est.fit(X, 1 + 2 * x + 0.05 * np.cos(9 * x) + size * (np.arange(40) == 35))
        influences.append(_Cases(solution_of(est)).influence[1])
    assert influences[0][35] > 3 * np.median(np.abs(influences[0]))  # up at the right: a steeper line
    np.testing.assert_allclose(influences[1], influences[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("model", [line_torch, lambda x, a, b: a + b * np.sinh(x)])
def test_resamples_that_do_not_determine_the_parameters_are_left_out(model):
    """One row of six has another x: without it there is no slope."""
    few = np.array([[1.0], [1.0], [1.0], [1.0], [1.0], [2.0]])
    est = LMRegressor(model, p0=[0, 1]).fit(few, [1.0, 1.2, 0.9, 1.1, 0.8, 2.0])
    draws, generator = _Cases(solution_of(est)), np.random.RandomState(4)
    without = sum(draws.draw(generator)[5] == 0 for _ in range(60))
    assert 10 < without < 30
    with pytest.warns(FitWarning, match=f"{without} of 60 fits of resampled data"):
        found = est.bootstrap(60, method="case", random_state=4, level=0.9)
    assert found.n_failed == without
