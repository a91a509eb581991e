"""Covariances by sandwiches: against statsmodels' numbers, the formulas on explicit matrices, and by simulation."""

import warnings

import numpy as np
import pytest
import scipy.optimize
from scipy.stats import t

from lmfit_gpu import LMRegressor, curve_fit
from lmfit_gpu.exceptions import CovarianceWarning

X10 = np.arange(10.0) / 3
Y10 = np.array([1.02, 1.71, 2.25, 3.31, 3.38, 4.46, 5.61, 5.02, 6.93, 6.21])
SIGMA10 = 0.1 + 0.05 * np.arange(10)

# statsmodels 0.15.0: OLS(y, X).fit(cov_type=kind).bse and WLS(y, X, weights=1/sigma**2), X = [1, x, sin x]
OLS = {
    "classical": [0.3824076782167577, 0.16648202673307877, 0.4742770857823387],
    "HC0": [0.11569082396261936, 0.15057085157368036, 0.3410072945873676],
    "HC1": [0.13827698263759167, 0.17996658953270536, 0.4075816744825433],
    "HC2": [0.15245028064364033, 0.19810218703464583, 0.4599877467603009],
    "HC3": [0.2127735750852582, 0.27361254931069295, 0.6538939102890757],
    "robust": [0.2127735750852582, 0.27361254931069295, 0.6538939102890757],
}
WLS = {
    "HC0": [0.022603744869041174, 0.15990042201954358, 0.2684270594044239],
    "HC1": [0.02701664254557352, 0.19111755904240174, 0.3208317009196703],
    "HC2": [0.035644991187327266, 0.19685493554983569, 0.3309143305719211],
    "HC3": [0.07272954755174901, 0.24615235288186535, 0.41864969095525995],
}


def wavy(x, a, b, c):
    return a + b * x + c * np.sin(x)


def decay(x, a, b, c):
    return a * np.exp(-b * x) + c


def decay_rows(theta, x):
    """Return J of decay, shape (m, 3)."""
    a, b, _ = theta
    return np.stack((np.exp(-b * x), -a * x * np.exp(-b * x), np.ones_like(x)), axis=1)


def noisy_decay(n=80, seed=3):
    rng = np.random.default_rng(seed)
    x = np.linspace(0, 4, n)
    return x, decay(x, 2.5, 1.3, 0.5) + 0.05 * rng.standard_t(2, size=n)


@pytest.mark.parametrize("kind", OLS)
def test_a_linear_model_has_the_errors_of_statsmodels(kind):
    est = LMRegressor(wavy, p0=[0, 0, 0], covariance=kind).fit(X10[:, None], Y10)
    np.testing.assert_allclose(est.stderr_, OLS[kind], rtol=1e-7)


@pytest.mark.parametrize("kind", WLS)
@pytest.mark.parametrize("absolute", [False, True])
def test_with_sigma_it_has_those_of_weighted_least_squares(kind, absolute):
    """The size of sigma has no say in a sandwich: the residuals have."""
    est = LMRegressor(wavy, p0=[0, 0, 0], covariance=kind, absolute_sigma=absolute)
    est.fit(X10[:, None], Y10, sigma=SIGMA10)
    np.testing.assert_allclose(est.stderr_, WLS[kind], rtol=1e-7)
    assert est.result_.t_dof == 7


@pytest.mark.parametrize("kind", ["HC0", "HC1", "HC2", "HC3"])
def test_a_frequency_is_a_row_as_often(kind):
    x, y = noisy_decay(30)
    times = np.arange(30) % 3 + 1
    once = LMRegressor(decay, p0=[2, 1, 0.5], covariance=kind).fit(x[:, None], y, sample_weight=times)
    often = LMRegressor(decay, p0=[2, 1, 0.5], covariance=kind).fit(np.repeat(x, times)[:, None], np.repeat(y, times))
    np.testing.assert_allclose(once.stderr_, often.stderr_, rtol=1e-6)


@pytest.mark.parametrize("solver", ["qr", "cholesky", "dual"])
@pytest.mark.parametrize("chunk_rows", ["auto", 7])
def test_every_solver_and_every_cut_gives_the_same(solver, chunk_rows):
    x, y = noisy_decay()
    wanted = LMRegressor(decay, p0=[2, 1, 0.5], covariance="robust").fit(x[:, None], y)
    est = LMRegressor(decay, p0=[2, 1, 0.5], covariance="robust", solver=solver, chunk_rows=chunk_rows)
    np.testing.assert_allclose(est.fit(x[:, None], y).stderr_, wanted.stderr_, rtol=1e-6)


def test_fixed_tied_and_bound_parameters_are_left_out():
    """c fixed or on its bound, and a copy of a: the sandwich of the smaller model."""
    x, y = noisy_decay()

    def four(x, a, b, c, d):
        return 0.5 * (a + d) * np.exp(-b * x) + c

    ties = {"d": lambda a: a}
    fixed = LMRegressor(four, p0=[2, 1, 0.6, 2], fixed=["c"], tied=ties, covariance="HC1").fit(x[:, None], y)
    small = LMRegressor(lambda x, a, b: decay(x, a, b, 0.6), p0=[2, 1], covariance="HC1").fit(x[:, None], y)
    np.testing.assert_allclose(fixed.stderr_, [*small.stderr_, 0.0, small.stderr_[0]], rtol=1e-5)
    bound = LMRegressor(decay, p0=[2, 1, 0.7], bounds={"c": (0.6, None)}, covariance="HC1").fit(x[:, None], y)
    np.testing.assert_allclose(bound.stderr_, [*small.stderr_, np.nan], rtol=1e-5)


PSI = {  # psi and its derivative, by hand; c = 1
    "huber": lambda f: (np.clip(f, -1, 1), (np.abs(f) <= 1).astype(float)),
    "soft_l1": lambda f: (f / np.sqrt(1 + f**2), (1 + f**2) ** -1.5),
    "cauchy": lambda f: (f / (1 + f**2), (1 - f**2) / (1 + f**2) ** 2),
}


@pytest.mark.parametrize("loss", PSI)
@pytest.mark.parametrize("kind", ["classical", "HC0", "HC1", "robust"])
def test_under_a_loss_the_sandwich_is_that_of_raw_rows(loss, kind):
    x, y = noisy_decay()
    scale = 0.1
    est = LMRegressor(decay, p0=[2, 1, 0.5], loss=loss, f_scale=scale, covariance=kind).fit(x[:, None], y)
    psi, slope = PSI[loss]((decay(x, *est.theta_) - y) / scale)
    J, n, p = decay_rows(est.theta_, x), len(x), 3
    if kind == "classical":
        mean = slope.mean()
        correction = 1 + p / n * slope.var() / mean**2
        expected = correction**2 * (scale**2 * psi @ psi / (n - p)) / mean**2 * np.linalg.inv(J.T @ J)
    else:
        bread = np.linalg.inv((J.T * slope) @ J)
        expected = bread @ ((J.T * psi**2) @ J) @ bread * scale**2 * (1 if kind == "HC0" else n / (n - p))
    np.testing.assert_allclose(est.covariance_, expected, rtol=1e-5)


def test_a_wide_loss_is_no_loss():
    """With f_scale far above the residuals Huber's estimate is that of least squares, and so is its covariance."""
    x, y = noisy_decay()
    plain = LMRegressor(decay, p0=[2, 1, 0.5]).fit(x[:, None], y)
    wide = LMRegressor(decay, p0=[2, 1, 0.5], loss="huber", f_scale=1e3).fit(x[:, None], y)
    np.testing.assert_allclose(wide.covariance_, plain.covariance_, rtol=1e-6)


def test_curve_fit_under_a_loss_returns_scipys_covariance():
    x, y = noisy_decay()
    options = {"p0": [2, 1, 0.5], "loss": "soft_l1", "f_scale": 0.1}
    _, expected = scipy.optimize.curve_fit(decay, x, y, method="trf", **options)
    sizes = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    np.testing.assert_allclose(curve_fit(decay, x, y, **options)[1] / sizes, expected / sizes, atol=1e-3)
    ours = LMRegressor(decay, **options).fit(x[:, None], y)
    assert np.abs(ours.covariance_ / sizes - expected / sizes).max() > 0.05


def test_a_row_that_alone_determines_a_parameter_is_refused():
    """With leverage 1 its residual is 0 whatever its noise: HC3 divides 0 by 0."""
    x = np.array([0.0, 1.0, 2.0, 3.0, 4.0])

    def spike(x, a, b):
        return a + b * (x == 4)

    y = np.array([1.0, 1.2, 0.9, 1.1, 7.0])
    with pytest.warns(CovarianceWarning, match=r"covariance='HC3': residual 4 alone determines a parameter.*'HC1'"):
        est = LMRegressor(spike, p0=[1, 1], covariance="HC3").fit(x[:, None], y)
    assert np.isinf(est.stderr_).all()
    est = LMRegressor(spike, p0=[1, 1], covariance="HC1").fit(x[:, None], y)
    assert np.isfinite(est.stderr_).all()


def test_a_loss_that_is_concave_on_average_gives_no_classical_error_bar():
    """Twenty rows that the parameter does not touch lie where Cauchy's loss is concave: the mean of psi' is below 0."""
    x = np.arange(24.0)
    y = np.where(x < 4, [0.9, 1.1, 1.05, 0.95] * 6, 0.2)

    def step(x, a):
        return a * (x < 4)

    with pytest.warns(CovarianceWarning, match=r"covariance='classical': the loss is concave on average.*bootstrap"):
        est = LMRegressor(step, p0=[0.8], loss="cauchy", f_scale=0.1).fit(x[:, None], y)
    assert np.isinf(est.stderr_).all()
    est = LMRegressor(step, p0=[0.8], loss="cauchy", f_scale=0.1, covariance="robust").fit(x[:, None], y)
    assert 0.01 < est.stderr_[0] < 0.1


def test_no_freedom_no_sandwich():
    with pytest.warns(CovarianceWarning, match="no degrees of freedom: 2 residuals for 2 parameters"):
        est = LMRegressor(lambda x, a, b: a + b * x, p0=[0, 0], covariance="robust").fit([[0.0], [1.0]], [1.0, 3.0])
    assert np.isinf(est.stderr_).all()


@pytest.mark.parametrize("wrong", ["HC4", "hc3", None, 3])
def test_another_name_is_refused(wrong):
    with pytest.raises(ValueError, match="The 'covariance' parameter of LMRegressor must be a str among"):
        LMRegressor(wavy, p0=[0, 0, 0], covariance=wrong).fit(X10[:, None], Y10)


def coverage(kind, draw, n_sets, options=None):
    """Return the share of 95 % intervals that hold the truth, of each parameter."""
    truth = np.array([2.5, 1.3])
    x = np.linspace(0, 3, 60)
    rng, hits = np.random.default_rng(11), np.zeros(2)
    for _ in range(n_sets):
        y = truth[0] * np.exp(-truth[1] * x) + draw(rng, x)
        est = LMRegressor(lambda x, a, b: a * np.exp(-b * x), p0=truth, covariance=kind, **(options or {}))
        est.fit(x[:, None], y)
        hits += np.abs(est.theta_ - truth) <= t.ppf(0.975, 58) * est.stderr_
    return hits / n_sets


def test_noise_that_falls_is_covered_by_the_robust_errors_alone():
    """Three binomial standard deviations of 100 sets are 0.065; the classical errors are wrong by far more."""

    def draw(rng, x):
        return 0.1 * np.exp(-0.8 * x) * rng.standard_normal(len(x))

    robust, classical = coverage("robust", draw, 100), coverage("classical", draw, 300)
    assert (np.abs(robust - 0.95) < 0.065).all()
    assert np.abs(classical - 0.95).max() > 0.09


def test_huber_errors_cover_under_outliers():
    def draw(rng, x):
        noise = 0.05 * rng.standard_normal(len(x))
        return np.where(rng.uniform(size=len(x)) < 0.1, 10 * noise, noise)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = coverage("classical", draw, 100, {"loss": "huber", "f_scale": 0.07})
    assert (np.abs(found - 0.95) < 0.065).all()
