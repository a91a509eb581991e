"""The bootstrap: known spreads of linear models, SciPy's BCa, repeatability, and refusals."""

import pickle
import warnings

import numpy as np
import pytest
import scipy.stats
import torch

from lmfit_gpu import LMRegressor
from lmfit_gpu.bootstrap import _interval, acceleration
from lmfit_gpu.exceptions import FitWarning

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


def test_skewed_noise_keeps_its_skewness():
    """The mean of exponentials: the noise is target minus prediction, its long tail is above; intervals are SciPy's."""
    sample = np.random.default_rng(3).exponential(size=25)
    est = LMRegressor(lambda x, a: a + 0 * torch.exp(-x), p0=[1.0]).fit(X[:25], sample)
    expected = scipy.stats.bootstrap((sample,), np.mean, n_resamples=4000, method="BCa", rng=np.random.default_rng(0))
    for method in ("residual", "case"):
        found = est.bootstrap(4000, method=method, random_state=0)
        assert scipy.stats.skew(found.theta[:, 0]) > 0.1
        width = found.intervals["a"][1] - found.intervals["a"][0]
        assert found.intervals["a"] == pytest.approx(tuple(expected.confidence_interval), abs=0.06 * width)
