"""Goodness of fit: statsmodels' numbers for linear models, definitions for the rest, and what does not exist."""

import math
import pickle

import numpy as np
import pytest
from scipy.stats import chi2, norm

from lmfit_gpu import LMRegressor, f_test
from lmfit_gpu.exceptions import CovarianceWarning

X10 = (np.arange(10.0) / 3)[:, None]
Y10 = np.array([1.02, 1.71, 2.25, 3.31, 3.38, 4.46, 5.61, 5.02, 6.93, 6.21])
SIGMA10 = 0.1 + 0.05 * np.arange(10)

# statsmodels 0.15.0, OLS and WLS of y on [1, x, sin x]; its AIC and BIC do not count the variance: 2 and ln 10 more
OLS = {"r2": 0.9508629676837381, "adjusted": 0.9368238155933776, "llf": -5.438597963831501}
OLS |= {"aic": 16.877195927663003 + 2, "bic": 17.78495120664514 + math.log(10), "chi_square": 1.7374658078900929}
WLS = {"r2": 0.9788713838216708, "adjusted": 0.9728346363421482, "llf": -1.7976625975912182}
WLS |= {"aic": 9.595325195182436 + 2, "bic": 10.503080474164573 + math.log(10)}


def line(x, a, b):
    return a + b * x


def wavy(x, a, b, c):
    return a + b * x + c * np.sin(x)


def fitted(model=wavy, y=Y10, sigma=None, **options):
    p0 = [0.0] * (2 if model is line else 3)
    return LMRegressor(model, p0=p0, **options).fit(X10, y, sigma=sigma)


@pytest.mark.parametrize(("expected", "sigma"), [(OLS, None), (WLS, SIGMA10)], ids=["OLS", "WLS"])
def test_linear_models_have_the_numbers_of_statsmodels(expected, sigma):
    est = fitted(sigma=sigma)
    for found in (est.goodness_of_fit(), pickle.loads(pickle.dumps(est)).goodness_of_fit()):
        assert found.r_squared == pytest.approx(expected["r2"], rel=1e-10)
        assert found.adjusted_r_squared == pytest.approx(expected["adjusted"], rel=1e-10)
        assert found.log_likelihood == pytest.approx(expected["llf"], rel=1e-10)
        assert found.aic == pytest.approx(expected["aic"], rel=1e-10)
        assert found.bic == pytest.approx(expected["bic"], rel=1e-10)
        assert found.aicc == pytest.approx(expected["aic"] + 2 * 4 * 5 / 5, rel=1e-10)
        assert (found.n_observed, found.n_params, found.dof) == (10, 3, 7)
        assert found.s**2 == pytest.approx(found.chi_square / 7)
        assert math.isnan(found.p_value)


def test_with_absolute_sigma_the_likelihood_is_that_of_the_normal_density():
    est = fitted(sigma=SIGMA10, absolute_sigma=True)
    found, residual = est.goodness_of_fit(), est.predict(X10) - Y10
    assert found.log_likelihood == pytest.approx(norm.logpdf(residual, scale=SIGMA10).sum(), rel=1e-12)
    assert found.aic == pytest.approx(-2 * found.log_likelihood + 6)
    assert found.p_value == pytest.approx(chi2.sf(((residual / SIGMA10) ** 2).sum(), 7), rel=1e-9)


def test_frequencies_are_rows_as_often():
    times = np.arange(10) % 3 + 1
    once = LMRegressor(wavy, p0=[0, 0, 0]).fit(X10, Y10, sample_weight=times, sigma=SIGMA10).goodness_of_fit()
    often = LMRegressor(wavy, p0=[0, 0, 0]).fit(
        np.repeat(X10, times, axis=0), np.repeat(Y10, times), sigma=np.repeat(SIGMA10, times)
    )
    for name, value in vars(often.goodness_of_fit()).items():
        assert vars(once)[name] == pytest.approx(value, rel=1e-8, nan_ok=True), name


def test_fixed_tied_and_undetermined_parameters_do_not_count():
    reference = fitted(line).goodness_of_fit()
    fixed = LMRegressor(wavy, p0=[0, 0, 0], fixed=["c"]).fit(X10, Y10)
    assert fixed.goodness_of_fit().aic == pytest.approx(reference.aic, rel=1e-9)
    with pytest.warns(CovarianceWarning):
        double = LMRegressor(lambda x, a, b, c: a + c + b * x, p0=[0, 0, 0]).fit(X10, Y10)
    assert double.goodness_of_fit().n_params == 2
    assert double.goodness_of_fit().bic == pytest.approx(reference.bic, rel=1e-9)


def test_several_outputs_have_a_mean_each():
    def both(x, a, b):
        import torch

        return torch.stack((a + b * x, 100 + a - b * x), dim=1)

    x = X10[:, 0]
    rng = np.random.default_rng(0)
    targets = np.stack((1 + 2 * x, 101 - 2 * x), axis=1) + 0.1 * rng.normal(size=(10, 2))
    est = LMRegressor(both, p0=[0, 1]).fit(X10, targets)
    r = est.predict(X10) - targets
    expected = 1 - (r**2).sum() / ((targets - targets.mean(0)) ** 2).sum()
    assert est.goodness_of_fit().r_squared == pytest.approx(expected, rel=1e-12)
    assert est.goodness_of_fit().n_observed == 20


def test_what_does_not_exist_is_nan():
    huber = fitted(loss="huber", f_scale=0.5).goodness_of_fit()
    assert np.isnan([huber.r_squared, huber.aic, huber.log_likelihood]).all()
    with pytest.warns(CovarianceWarning):
        none = LMRegressor(line, p0=[0, 0]).fit([[0.0], [1.0]], [1.0, 3.0]).goodness_of_fit()
    assert none.dof == 0
    assert np.isnan([none.reduced_chi_square, none.s, none.adjusted_r_squared, none.aic, none.aicc]).all()
    exact = fitted(line, y=1 + 2 * X10[:, 0]).goodness_of_fit()
    assert exact.r_squared == pytest.approx(1)
    assert np.isnan([exact.log_likelihood, exact.aic, exact.bic]).all()
    alone = LMRegressor(residual=lambda theta, x, y: x - theta[0], p0=[1.0]).fit(X10)
    assert math.isnan(alone.goodness_of_fit().r_squared)
    assert math.isfinite(alone.goodness_of_fit().aic)
    flat = fitted(line, y=np.r_[np.full(9, 2.0), 2.0]).goodness_of_fit()
    assert math.isnan(flat.r_squared)


def test_a_penalty_counts_what_the_data_determine():
    rng = np.random.default_rng(0)
    features = rng.uniform(-2, 2, size=(60, 1))
    target = np.sin(features[:, 0]) + 0.1 * rng.normal(size=60)
    est = LMRegressor(hidden_layer_sizes=(6,), alpha=1e-2, random_state=0).fit(features, target)
    found = est.goodness_of_fit()
    assert found.n_params == pytest.approx(60 - est.result_.dof)
    assert 2 < found.n_params < 19
    assert found.r_squared == pytest.approx(est.score(features, target), rel=1e-9)


def test_the_f_test_of_statsmodels():
    """compare_f_test of [1, x, sin x] with [1, x]: F = 0.653137, p = 0.445585."""
    found = f_test(fitted(line), fitted())
    assert found.statistic == pytest.approx(0.6531372197601154, rel=1e-7)
    assert found.p_value == pytest.approx(0.4455851416558966, rel=1e-7)
    assert (found.dof_numerator, found.dof_denominator) == (1, 7)


def test_with_absolute_sigma_it_is_a_chi_square_test():
    small, large = (fitted(model, sigma=SIGMA10, absolute_sigma=True) for model in (line, wavy))
    fall = small.result_.chi_square - large.result_.chi_square
    found = f_test(small, large)
    assert (found.statistic, found.dof_denominator) == (pytest.approx(fall), math.inf)
    assert found.p_value == pytest.approx(chi2.sf(fall, 1), rel=1e-9)


def test_f_tests_that_mean_nothing_are_refused():
    small, large = fitted(line), fitted()
    with pytest.raises(ValueError, match="the larger model has 2 parameters, the smaller 3; give the one with fewer"):
        f_test(large, small)
    with pytest.raises(ValueError, match="the larger model has 2 parameters, the smaller 2"):
        f_test(small, small)
    with pytest.raises(ValueError, match="not of the same data"):
        f_test(fitted(line, y=1.001 * Y10), large)
    with pytest.raises(ValueError, match="not of the same data"):
        f_test(fitted(line, sigma=SIGMA10), large)
    with pytest.raises(ValueError, match="larger was fitted under a loss or a penalty"):
        f_test(small, fitted(loss="huber"))

    def worse(x, a, b, c):
        return a + 0 * x + b * np.cos(9 * x) + c * np.cos(8 * x)

    with pytest.raises(ValueError, match="the larger model fits worse"):
        f_test(small, fitted(worse))
