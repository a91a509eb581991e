"""SciPy's behaviours, driven through curve_fit and LMRegressor: one test for each row of the tables in docs/scipy.md.

The behaviours are those that SciPy 1.17's own tests of ``curve_fit``, ``leastsq`` and ``least_squares`` hold it to, and
those that its documentation promises. Expected values come from SciPy itself at tight tolerances, or from theory.
"""

import functools
import re
import threading
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import Bounds, OptimizeWarning, least_squares
from scipy.optimize import curve_fit as scipy_curve_fit
from sklearn.exceptions import ConvergenceWarning

from lmfit_gpu import LMRegressor, curve_fit
from lmfit_gpu.damping import TrustRegion
from lmfit_gpu.exceptions import CovarianceWarning, FitWarning
from lmfit_gpu.result import Status

TIGHT = dict(ftol=1e-14, xtol=1e-14, gtol=1e-14)
METHODS = ["lm", "trf", "dogbox", None]
LOSSES = ["linear", "soft_l1", "huber", "cauchy", "arctan"]
X4, Y4 = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 3.2, 9.5, 13.7])
X11 = np.linspace(0, 1, 11)


def power(x, a, b):
    return b * x**a


def decay(x, a, b):
    return a * np.exp(-b * x)


def decay_jac(x, a, b):
    return np.stack([np.exp(-b * x), -a * x * np.exp(-b * x)], axis=1)


def torch_decay(x, a, b):
    return a * torch.exp(-b * x)


def line(x, a, b):
    return a * x + b


def noisy_decay(n=50, noise=0.2, seed=123):
    x = np.linspace(0, 4, n)
    return x, decay(x, 2.5, 1.3) + noise * np.random.default_rng(seed).normal(size=n)


def assert_like_scipy(f, *args, pcov_rtol=1e-5, **kwargs):
    """Hold popt and pcov against SciPy's at tight tolerances."""
    popt, pcov = curve_fit(f, *args, **kwargs)
    expected, covariance = scipy_curve_fit(f, *args, **kwargs, **({} if "max_nfev" in kwargs else TIGHT))
    np.testing.assert_allclose(popt, expected, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(pcov, covariance, rtol=pcov_rtol, atol=1e-12)


def solve(fun, x0, **options):
    """Return a fitted LMRegressor of residuals fun(theta), as least_squares takes them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CovarianceWarning)
        est = LMRegressor(residual=lambda theta, X, y: fun(theta), p0=x0, **options)
        return est.fit(np.zeros((1, 1)))


def rosenbrock(theta):
    return np.array([10 * (theta[1] - theta[0] ** 2), 1 - theta[0]])


def rosenbrock_jac(theta, X=None, y=None):
    return np.array([[-20 * theta[0], 10], [-1, 0]])


def squared_plus_five(theta):
    return theta**2 + 5.0


# ---- curve_fit: popt and pcov


def test_one_parameter_without_p0():
    def f(x, a):
        return x**a

    assert_like_scipy(f, X4, Y4)
    assert len(curve_fit(f, X4, Y4, full_output=1, check_finite=False)) == 5
    np.testing.assert_array_equal(curve_fit(f, X4, Y4, full_output=1, check_finite=False)[0], curve_fit(f, X4, Y4)[0])


def test_two_parameters_without_p0():
    assert_like_scipy(power, X4, Y4)


def test_self_of_a_method_is_no_parameter():
    class Holder:
        def f(self, x, a, b):
            return power(x, a, b)

        def __call__(self, x, a, b):
            return power(x, a, b)

    for f in (Holder().f, Holder()):
        np.testing.assert_array_equal(curve_fit(f, X4, Y4)[0], curve_fit(power, X4, Y4)[0])


@pytest.mark.parametrize(
    ("module", "jac"),
    [
        (np, None),
        (np, "2-point"),
        (np, "3-point"),
        (torch, None),
    ],
)
def test_two_close_peaks(module, jac):
    x = np.array([574.142, 574.154, 574.165, 574.177, 574.188, 574.199, 574.211, 574.222, 574.234, 574.245])
    y = np.array([859.0, 997, 1699, 2604, 2013, 1964, 2435, 1550, 949, 841])

    def f(x, x0, x1, a0, a1, s, c, exp=module.exp):
        return a0 * exp(-((x - x0) ** 2) / (2 * s**2)) + a1 * exp(-((x - x1) ** 2) / (2 * s**2)) + c

    p0 = [574.1861428571428, 574.2155714285715, 1302, 1302, 0.003502, 859]  # the peaks are narrower than the rows apart
    popt, pcov = curve_fit(f, x.tolist(), y.tolist(), p0, maxfev=10000, jac=jac)
    expected, covariance = scipy_curve_fit(functools.partial(f, exp=np.exp), x, y, p0, maxfev=10000, **TIGHT)
    np.testing.assert_allclose(popt, expected, rtol=1e-5)
    np.testing.assert_allclose(np.sqrt(pcov.diagonal()), np.sqrt(covariance.diagonal()), rtol=1e-3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("absolute_sigma", [False, True])
@pytest.mark.parametrize("factor", [1, 3])
def test_sigma_scales_pcov_only_if_absolute(method, absolute_sigma, factor):
    x, y = np.arange(6), np.array([1, 1, 5, 7, 8, 12])
    sigma = factor * np.array([1, 2, 1, 2, 1, 2])
    assert_like_scipy(line, x, y, [2, 0], sigma, absolute_sigma, method=method)
    _, pcov = curve_fit(line, x, y, [2, 0], sigma, absolute_sigma, method=method)
    _, of_one = curve_fit(line, x, y, [2, 0], sigma / factor, absolute_sigma, method=method)
    np.testing.assert_allclose(pcov, of_one * (factor**2 if absolute_sigma else 1), rtol=1e-10)


def test_a_parameter_without_effect():
    x, y = np.arange(6.0), np.array([1, 1, 5, 7, 8, 12.0])
    with pytest.warns(OptimizeWarning, match=r"^Covariance of the parameters could not be estimated: .*\bb\b"):
        popt, pcov = curve_fit(lambda x, a, b: a * x, x, y, p0=[2, 0], sigma=[1, 2, 1, 2, 1, 2])
    expected, _ = scipy_curve_fit(lambda x, a: a * x, x, y, p0=[2], sigma=[1, 2, 1, 2, 1, 2])
    np.testing.assert_allclose(popt[0], expected[0], rtol=1e-8)
    assert pcov.shape == (2, 2)
    assert np.isinf(pcov[1, 1]) and np.isnan(pcov[0, 1])
    assert 0 < pcov[0, 0] < np.inf  # SciPy: inf, though the data determine a


def test_as_many_values_as_parameters():
    with pytest.warns(OptimizeWarning, match="Covariance of the parameters could not be estimated"):
        popt, pcov = curve_fit(line, X4[:2], Y4[:2], p0=[2, 0])
    np.testing.assert_allclose(popt, [2.2, -1.2])
    assert pcov.tolist() == [[np.inf, np.inf], [np.inf, np.inf]]


def test_the_sentence_of_the_covariance_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Covariance of the parameters could not be estimated", OptimizeWarning)
        curve_fit(lambda x, a, b: a * x, X4, Y4)
    with pytest.warns(OptimizeWarning) as caught:
        curve_fit(lambda x, a, b: a * x, X4, Y4)
    assert caught[0].filename == __file__  # the caller's line, not one of the package


def test_degenerate_sums_have_no_negative_variance():
    def f(x, a, b, c, d, e):
        return a * np.log(x + 1 + b) + c * np.log(x + 1 + d) + e

    x = np.arange(100)
    y = np.linspace(2, 7, 100) + np.random.default_rng(408).random(100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizeWarning)
        try:
            _, pcov = curve_fit(f, x, y, maxfev=2000)
        except RuntimeError as failure:  # SciPy stops in the valley that leads to infinity and says converged
            assert "Best point" in str(failure)
            return
    assert np.all(pcov.diagonal() > 0)
    np.testing.assert_allclose(pcov, pcov.T)


def test_pcov_of_an_ordinary_fit():
    def f(x, a, b, c):
        return a * np.exp(-b * x) + c

    x = np.linspace(0, 4, 50)
    y = f(x, 2.5, 1.3, 0.5) + 0.2 * np.random.default_rng(4081).normal(size=50)
    assert_like_scipy(f, x, y)


# ---- curve_fit: data


def test_lists_tuples_and_integers():
    for kind in (list, tuple, np.array):
        popt, _ = curve_fit(line, kind([1, 2, 3, 4, 5]), kind([3, 5, 7, 9, 11]))
        np.testing.assert_allclose(popt, [2, 1], rtol=1e-10)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtypes", [(np.float32, np.float32), (np.float32, np.float64), (np.int64, np.float32)])
def test_dtypes_may_differ(method, dtypes):
    x = np.arange(-3, 5).astype(dtypes[0])
    y = (1.5 * x + 3.0 + 0.5 * np.sin(x)).astype(dtypes[1])
    popt, pcov = curve_fit(line, x, y, method=method)
    slope = np.polyfit(x.astype(float), y.astype(float), 1)
    np.testing.assert_allclose(popt, slope, rtol=1e-10)
    assert np.isfinite(pcov).all()


def test_float32_x_with_bounds():
    def hyperbola(x, s1, s2, ox, oy, c):
        return oy + (s2 - s1) / 2 * (x - ox) + (s1 + s2) / 2 * np.sqrt((x - ox) ** 2 + c**2 / 4)

    x = np.array([-32, -16, -8, 4, 4, 8, 16, 32])
    bounds = ([-3, 0, -2, -10, 0], [0, 3, 3, 0, 10])
    p0, p = [-2.5 / 3, 4 / 3, 1, -4, 0.5], [-2, 0.4, -1, -5, 9.5]
    for dtype in (np.float64, np.float32):
        y = hyperbola(x.astype(dtype), *p)
        popt, _ = curve_fit(hyperbola, x.astype(dtype), y, p0, bounds=bounds)
        np.testing.assert_allclose(hyperbola(x, *popt), y, atol=2e-5)


def test_empty_data():
    for x in ([], [1.0]):
        for bounds in ((-np.inf, np.inf), (1, 2)):
            with pytest.raises(ValueError, match="ydata"):
                curve_fit(lambda x, a: a * x, x, [], bounds=bounds)


def test_x_that_is_none():
    popt, _ = curve_fit(lambda _, a: a * np.arange(10), None, 2 * np.arange(10))
    np.testing.assert_allclose(popt, [2.0])


def test_x_that_only_f_understands():
    x, y = noisy_decay()
    expected = curve_fit(decay, x, y)[0]
    table = pd.DataFrame({"t": x, "dose": np.full(50, 2.0)})

    def of_table(t, a, b):
        return a * t["dose"] * np.exp(-b * t["t"])

    for data in (table, {"t": x, "dose": 2.0}):
        np.testing.assert_allclose(curve_fit(of_table, data, y, [1, 1])[0] * [2, 1], expected, rtol=1e-9)
    series = pd.Series(x, index=np.arange(50) + 7)
    np.testing.assert_allclose(curve_fit(lambda s, a, b: decay(s.values, a, b), series, y)[0], expected, rtol=1e-9)


def test_x_of_several_axes():
    u, v = np.meshgrid(np.arange(5.0), np.arange(6.0))
    z = 2 * u * np.exp(-0.3 * v) + 1

    def surface(uv, a, b, c):
        return (a * uv[0] * np.exp(-b * uv[1]) + c).ravel()

    for x in ((u, v), np.stack([u.ravel(), v.ravel()])):
        np.testing.assert_allclose(curve_fit(surface, x, z.ravel())[0], [2, 0.3, 1], rtol=1e-8)


def test_a_column_x_reaches_f_flat():
    x, y = noisy_decay()
    np.testing.assert_array_equal(curve_fit(decay, x[:, None], y)[0], curve_fit(decay, x, y)[0])


def test_one_y_stands_for_many():
    x = np.arange(10)
    target = 4.7 * x**2 + 3.5 * x + np.random.default_rng(123).random(10)

    def f(x, a, b):
        return a * x**2 + b * x - target

    for method in METHODS:
        popt, pcov = curve_fit(f, x, np.zeros(10), method=method)
        for y in (0, [0.0]):
            again, covariance = curve_fit(f, x, y, method=method)
            np.testing.assert_allclose(again, popt, atol=1e-8 * np.sqrt(pcov.diagonal().max()))  # ftol is 1e-17
            np.testing.assert_allclose(covariance, pcov, rtol=1e-6)


def test_complex_y_is_stacked():
    x = np.linspace(0, 2, 30)

    def f(x, a, w):
        return a * np.exp(1j * w * x)

    y = f(x, 2.0, 1.3) + 0.01 * np.exp(5j * x)

    def as_parts(x, a, w):
        return np.concatenate([f(x, a, w).real, f(x, a, w).imag])

    expected, covariance = scipy_curve_fit(as_parts, x, np.concatenate([y.real, y.imag]), [1, 1], **TIGHT)
    popt, pcov = curve_fit(f, x, y, [1, 1])
    np.testing.assert_allclose(popt, expected, rtol=1e-7)
    np.testing.assert_allclose(pcov, covariance, rtol=1e-5, atol=1e-12)


# ---- curve_fit: NaN


@pytest.mark.parametrize("keywords", [{}, {"check_finite": True}, {"check_finite": True, "nan_policy": "omit"}])
def test_nan_is_refused_by_default(keywords):
    broken, whole = np.array([1, np.nan, 3]), np.array([1.0, 2, 3])
    for value in (np.nan, np.inf):
        broken[1] = value
        with pytest.raises(ValueError, match=r"xdata.*rows \[1\]"):
            curve_fit(line, broken, whole, **keywords)
        with pytest.raises(ValueError, match=r"ydata.*rows \[1\]"):
            curve_fit(line, whole, broken, **keywords)


def of_two(x, a, b):
    return a * x[..., 0, :].squeeze() + b + x[..., 1, :].squeeze()


NAN = np.nan
WITH_NAN = {
    "1d": (line, np.array([2, 3, NAN, 4, 4, NAN, 5]), np.array([1, 2, 5, 3, NAN, 7, 3.5]), [0, 1, 3, 6]),
    "2d": (
        of_two,
        np.array([[2, 3, NAN, 4, 4, NAN, 5, 9], [2, 3, NAN, NAN, 4, NAN, 7, 1]]),
        np.array([1, 2, 5, 3, NAN, 7, 10, 2]),
        [0, 1, 6, 7],
    ),
}
WITH_NAN["3d"] = (of_two, WITH_NAN["2d"][1][None], *WITH_NAN["2d"][2:])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", WITH_NAN)
def test_nan_policy_omit(method, shape):
    f, x, y, rows = WITH_NAN[shape]
    popt, pcov = curve_fit(f, x, y, method=method, nan_policy="omit", check_finite=False)
    expected, covariance = curve_fit(f, x[..., rows], y[rows], method=method)
    np.testing.assert_array_equal(popt, expected)
    np.testing.assert_array_equal(pcov, covariance)


@pytest.mark.parametrize("shape", WITH_NAN)
def test_nan_policy_raise(shape):
    f, x, y, _ = WITH_NAN[shape]
    with pytest.raises(ValueError, match="The input contains nan"):
        curve_fit(f, x, y, nan_policy="raise")


def test_nan_policy_propagate():
    with pytest.raises(ValueError, match="`nan_policy='propagate'` is not supported by this function"):
        curve_fit(line, X4, Y4, nan_policy="propagate")


def test_nan_policy_unknown():
    with pytest.raises(ValueError, match=r"nan_policy must be one of \{None, 'raise', 'omit'\}"):
        curve_fit(line, X4, Y4, nan_policy="hi")


@pytest.mark.parametrize("sigma_ndim", [0, 1, 2])
def test_omit_drops_sigma_too(sigma_ndim, rng):
    x = np.linspace(1, 10, 60)
    a = rng.normal(0, 0.1, (60, 60))
    sigma = [0.05, 0.05 * x, a @ a.T + 0.01 * np.eye(60)][sigma_ndim]
    y = decay(x, 2.0, 0.2) + 0.05 * rng.normal(size=60)
    x[[3, 17]], y[[17, 30]] = np.nan, np.nan
    rows = np.delete(np.arange(60), [3, 17, 30])
    kept = [sigma, None if sigma_ndim == 0 else sigma[rows], None if sigma_ndim < 2 else sigma[np.ix_(rows, rows)]]
    popt, pcov = curve_fit(decay, x, y, [1, 0.1], sigma, nan_policy="omit")
    expected, covariance = curve_fit(decay, x[rows], y[rows], [1, 0.1], kept[sigma_ndim])
    np.testing.assert_allclose(popt, expected, atol=1e-14)
    np.testing.assert_allclose(pcov, covariance, atol=1e-14)


def test_omit_drops_inf_and_bad_sigma():
    x, y = noisy_decay()
    sigma = np.full(50, 0.2)
    x[4], y[5], sigma[6] = np.inf, -np.inf, np.nan
    rows = np.delete(np.arange(50), [4, 5, 6])
    popt, _ = curve_fit(decay, x, y, sigma=sigma, nan_policy="omit")
    np.testing.assert_array_equal(popt, curve_fit(decay, x[rows], y[rows], sigma=sigma[rows])[0])


def test_masked_values_are_missing():
    x, y = noisy_decay()
    masked = np.ma.masked_array(y, mask=np.arange(50) % 10 == 3)
    with pytest.raises(ValueError, match=r"ydata.*masked"):
        curve_fit(decay, x, masked)
    popt, _ = curve_fit(decay, x, masked, nan_policy="omit")
    np.testing.assert_array_equal(popt, curve_fit(decay, x[~masked.mask], y[~masked.mask])[0])


def test_unchecked_infinite_x_reaches_f():
    x, y = noisy_decay()
    x[-1] = np.inf
    assert_like_scipy(decay, x, y, [1, 1], check_finite=False)


def test_unchecked_nan_y_is_an_error():
    x, y = noisy_decay()
    y[3] = np.nan
    with pytest.raises(ValueError, match=r"NaN|not finite"):
        curve_fit(decay, x, y, check_finite=False)


# ---- curve_fit: sigma


@pytest.mark.parametrize("absolute_sigma", [False, True])
def test_scalar_sigma(absolute_sigma):
    _, pcov = curve_fit(line, X4, Y4, sigma=2, absolute_sigma=absolute_sigma)
    _, of_four = curve_fit(line, X4, Y4, sigma=np.full(4, 2.0), absolute_sigma=absolute_sigma)
    np.testing.assert_array_equal(pcov, of_four)
    assert_like_scipy(line, X4, Y4, sigma=2, absolute_sigma=absolute_sigma)


@pytest.mark.parametrize("absolute_sigma", [False, True])
@pytest.mark.parametrize("jac", [None, decay_jac])
def test_diagonal_covariance_is_sigma(absolute_sigma, jac):
    x, y = noisy_decay()
    sigma = np.linspace(0.1, 0.3, 50)
    popt, pcov = curve_fit(decay, x, y, sigma=sigma, jac=jac, absolute_sigma=absolute_sigma)
    again, covariance = curve_fit(decay, x, y, sigma=np.diag(sigma**2), jac=jac, absolute_sigma=absolute_sigma)
    np.testing.assert_allclose(again, popt, atol=1e-14)
    np.testing.assert_allclose(covariance, pcov, atol=1e-14)


@pytest.mark.parametrize("absolute_sigma", [False, True])
@pytest.mark.parametrize("with_jac", [False, True])
@pytest.mark.parametrize("form", [decay, torch_decay])
def test_rotated_data_with_rotated_covariance(absolute_sigma, with_jac, form, rng):
    x = np.arange(1.0, 5.0)
    y = decay(x, 2.5, 1.0) + 0.2 * rng.normal(size=4)
    rotation, _ = np.linalg.qr(rng.normal(size=(4, 4)))
    covariance = np.diag([0.1, 0.2, 0.2, 0.3]) ** 2
    turn = torch.from_numpy(rotation) if form is torch_decay else rotation

    def rotated(x, a, b):
        return turn @ form(x, a, b)

    def rotated_jac(x, a, b):
        return rotation @ decay_jac(x, a, b)

    popt, pcov = curve_fit(decay, x, y, sigma=covariance, absolute_sigma=absolute_sigma)
    again, of_rotated = curve_fit(
        rotated,
        x,
        rotation @ y,
        sigma=rotation @ covariance @ rotation.T,
        absolute_sigma=absolute_sigma,
        jac=rotated_jac if with_jac and form is decay else None,
    )
    np.testing.assert_allclose(again, popt, rtol=1.4e-7)
    np.testing.assert_allclose(of_rotated, pcov, rtol=1e-5)


@pytest.mark.parametrize("absolute_sigma", [False, True])
def test_full_covariance(absolute_sigma):
    x, y = noisy_decay()
    covariance = 0.04 * 0.6 ** np.abs(np.subtract.outer(np.arange(50), np.arange(50)))
    assert_like_scipy(decay, x, y, [1, 1], covariance, absolute_sigma)


def test_covariance_that_is_not_positive_definite():
    with pytest.raises(ValueError, match="`sigma` must be positive definite"):
        curve_fit(line, X4, Y4, sigma=np.ones((4, 4)) - np.eye(4))


def test_covariance_that_is_not_symmetric():
    with pytest.raises(ValueError, match=r"sigma.*symmetric"):
        curve_fit(line, X4, Y4, sigma=np.eye(4) + 0.1 * np.eye(4, k=1))


@pytest.mark.parametrize("sigma", [np.ones(3), np.ones((4, 2)), np.ones((3, 3)), np.ones(0)])
def test_sigma_of_a_wrong_shape(sigma):
    with pytest.raises(ValueError, match="sigma: has incorrect shape"):
        curve_fit(line, X4, Y4, sigma=sigma)


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_sigma_that_is_no_error_bar(value):
    with pytest.raises(ValueError, match=r"sigma.*rows \[2\]"):
        curve_fit(line, X4, Y4, sigma=[1, 1, value, 1])
    with pytest.raises(ValueError, match="sigma"):
        curve_fit(line, X4, Y4, sigma=value)


def test_absolute_sigma_without_sigma():
    with pytest.warns(FitWarning, match="standard deviations of 1"):
        popt, pcov = curve_fit(line, X4, Y4, absolute_sigma=True)
    expected, covariance = scipy_curve_fit(line, X4, Y4, absolute_sigma=True, **TIGHT)
    np.testing.assert_allclose(popt, expected, rtol=1e-7)
    np.testing.assert_allclose(pcov, covariance, rtol=1e-6)


def test_absolute_sigma_needs_no_degrees_of_freedom():
    popt, pcov = curve_fit(line, X4[:2], Y4[:2], sigma=[0.1, 0.2], absolute_sigma=True)
    J = np.stack([X4[:2], np.ones(2)], axis=1) / [[0.1], [0.2]]
    np.testing.assert_allclose(popt, [2.2, -1.2])
    np.testing.assert_allclose(pcov, np.linalg.inv(J.T @ J), rtol=1e-6)


# ---- curve_fit: start, bounds, method, jac


def test_a_function_without_parameters():
    with pytest.raises(ValueError, match="parameter"):
        curve_fit(lambda x: x, [1, 2], [3, 4])


def test_a_signature_that_does_not_tell():
    with pytest.raises(ValueError, match=r"p0.*number of parameters"):
        curve_fit(lambda x, *p: p[0] * x, X4, Y4)
    popt, pcov = curve_fit(lambda x, *p: p[0] * x + p[1], X4, Y4, p0=[1, 1])
    off = np.abs(popt - np.polyfit(X4, Y4, 1))
    assert np.all(off <= 1e-8 * np.sqrt(pcov.diagonal()))  # what a relative gain of ftol = 1e-17 leaves


def test_p0_of_the_wrong_length():
    with pytest.raises(ValueError, match=r"p0: got 3 values.*2 parameters"):
        curve_fit(line, X4, Y4, p0=[1, 1, 1])


def test_p0_is_left_as_it_is():
    p0 = np.array([1.0, 1.0])
    curve_fit(line, X4, Y4, p0)
    assert p0.tolist() == [1, 1]


def test_p0_that_is_complex():
    for p0 in ([1 + 0j, 1], 2.0 + 0j):
        with pytest.raises(ValueError, match=r"p0.*real"):
            curve_fit(line, X4, Y4, p0)


def test_p0_of_two_axes_is_flattened():
    np.testing.assert_array_equal(curve_fit(line, X4, Y4, [[1, 1]])[0], curve_fit(line, X4, Y4, [1, 1])[0])


def test_start_between_bounds():
    seen = []

    def f(x, a, b, c, d):
        seen.append((a, b, c, d))
        return a + b * x + c * x**2 + d * x**3

    x = np.linspace(0, 1, 9)
    y = f(x, 1, 2, -3, 4)
    seen.clear()
    curve_fit(f, x, y, bounds=([-np.inf, 0, 1, -np.inf][:4], [np.inf, 8, np.inf, 7]))
    assert seen[0] == (1, 4, 2, 6)


@pytest.mark.parametrize("method", [None, "trf", "dogbox"])
def test_bounds_as_pair_and_as_object(method):
    y = decay(X11, 2.0, 2.0)
    popt, _ = curve_fit(decay, X11, y, bounds=([1, 0], [1.5, 3]), method=method)
    again, _ = curve_fit(decay, X11, y, bounds=Bounds([1, 0], [1.5, 3]), method=method)
    named, _ = curve_fit(decay, X11, y, bounds={"a": (1, 1.5), "b": (0, 3)}, method=method)
    expected, _ = scipy_curve_fit(decay, X11, y, bounds=([1, 0], [1.5, 3]), **TIGHT)
    assert popt[0] == 1.5
    np.testing.assert_allclose(popt, expected, rtol=1e-6)
    np.testing.assert_array_equal(again, popt)
    np.testing.assert_array_equal(named, popt)
    at_upper, _ = curve_fit(decay, X11, y, bounds=([0.0, 0], [0.6, np.inf]), method=method)
    assert at_upper[0] == 0.6


def test_bounds_refused_by_lm():
    with pytest.raises(ValueError, match=r"lm.*unconstrained"):
        curve_fit(decay, X11, decay(X11, 2, 2), bounds=([1, 0], [1.5, 3]), method="lm")
    curve_fit(decay, X11, decay(X11, 2, 2), bounds=(-np.inf, np.inf), method="lm")


def test_equal_bounds_fix_a_parameter():
    x, y = noisy_decay()
    popt, pcov = curve_fit(decay, x, y, [2, 1.2], bounds=([0, 1.2], [9, 1.2]))
    expected, covariance = scipy_curve_fit(lambda x, a: decay(x, a, 1.2), x, y, **TIGHT)
    assert popt[1] == 1.2
    np.testing.assert_allclose(popt[0], expected[0], rtol=1e-8)
    np.testing.assert_allclose(pcov, [[covariance[0, 0], 0], [0, 0]], rtol=1e-6)


def test_pcov_beside_a_bound():
    x, y = noisy_decay()
    popt, pcov = curve_fit(decay, x, y, [2, 1.1], bounds=([0, 0], [9, 1.2]))
    expected, covariance = scipy_curve_fit(lambda x, a: decay(x, a, 1.2), x, y, **TIGHT)
    assert popt[1] == 1.2
    np.testing.assert_allclose(popt[0], expected[0], rtol=1e-8)
    np.testing.assert_allclose(pcov[0, 0], covariance[0, 0], rtol=1e-6)
    assert np.isnan(pcov[1]).all() and np.isnan(pcov[0, 1])


@pytest.mark.parametrize("x_of", [np.array, pd.Series, lambda x: {"t": x}], ids=["array", "Series", "dict"])
def test_parameters_by_name(x_of):
    x, y = noisy_decay()

    def f(x, a, b, c):
        return a * np.exp(-b * (x["t"] if isinstance(x, dict) else x)) + c

    popt, _ = curve_fit(f, x_of(x), y, {"c": 0.25, "b": 1, "a": 2}, bounds={"b": (0.5, 2)}, fixed=["c"])
    expected, _ = scipy_curve_fit(lambda x, a, b: decay(x, a, b) + 0.25, x, y, **TIGHT)
    np.testing.assert_allclose(popt, [*expected, 0.25], rtol=1e-7)
    popt, _ = curve_fit(f, x_of(x), y, {"c": 0, "b": 1, "a": 2}, tied={"c": lambda a: 0.1 * a})
    expected, _ = scipy_curve_fit(lambda x, a, b: decay(x, a, b) + 0.1 * a, x, y, **TIGHT)
    np.testing.assert_allclose(popt, [*expected, 0.1 * expected[0]], rtol=1e-7)
    with pytest.raises(ValueError, match=r"p0: got names \('a', 'd'"):
        curve_fit(f, x_of(x), y, {"a": 2, "d": 1, "b": 0})


@pytest.mark.parametrize("method", ["trf", "dogbox"])
def test_p0_is_used_with_bounds(method):
    x = np.linspace(-2 * np.pi, 2 * np.pi, 40)
    popt, _ = curve_fit(lambda x, a: np.sin(x + a), x, np.sin(x), p0=2.1 * np.pi)
    bounded, _ = curve_fit(
        lambda x, a: np.sin(x + a), x, np.sin(x), 2.1 * np.pi, bounds=(-3 * np.pi, 3 * np.pi), method=method
    )
    np.testing.assert_allclose([popt, bounded], [[2 * np.pi], [2 * np.pi]], rtol=1e-8)


@pytest.mark.parametrize("method", [None, "trf", "dogbox"])
def test_start_outside_the_bounds(method):
    with pytest.raises(ValueError, match=r"a\b.*1000"):
        curve_fit(lambda x, a: x**a, X4, Y4, p0=[1], bounds=(1000, 1001), method=method)


@pytest.mark.parametrize("bounds", [(1, 2, 3), (1,), "ab", (0, "b")])
def test_bounds_that_are_no_pair(bounds):
    with pytest.raises(ValueError, match="bounds"):
        curve_fit(line, X4, Y4, p0=[1, 1], bounds=bounds)


def test_method_names():
    for method in METHODS:
        popt, _ = curve_fit(decay, X11, decay(X11, 2, 2), method=method)
        np.testing.assert_allclose(popt, [2, 2], rtol=1e-8)
    with pytest.raises(ValueError, match=r"method.*unknown"):
        curve_fit(decay, X11, decay(X11, 2, 2), method="unknown")


def test_more_parameters_than_values():
    def f(x, a, b, c, d, e):
        return a + b * x + c * x**2 + d * x**3 + e * x**4

    with pytest.raises(TypeError, match="func parameters=5 must not exceed the number of data points=4"):
        curve_fit(f, X4, Y4, method="lm")
    for method in (None, "trf"):
        with pytest.warns(OptimizeWarning):
            popt, pcov = curve_fit(f, X4, Y4, method=method)
        np.testing.assert_allclose(f(X4, *popt), Y4, atol=1e-6)
        assert not np.isfinite(pcov.diagonal()).any()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("jac", ["2-point", "3-point", "cs", decay_jac])
def test_jac_by_name_or_function(method, jac):
    popt, _ = curve_fit(decay, X11, decay(X11, 2, 2), method=method, jac=jac)
    np.testing.assert_allclose(popt, [2, 2], rtol=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_jac_function_is_weighted(method):
    y = decay(X11, 2, 2)
    y[5] = 100
    sigma = np.where(np.arange(11) == 5, 200.0, 1.0)
    assert_like_scipy(decay, X11, y, sigma=sigma, method=method, jac=decay_jac)


def test_jac_function_that_is_wrong():
    with pytest.raises(ValueError, match="jac: the column of 'b'"):
        curve_fit(decay, X11, decay(X11, 2, 2), jac=lambda x, a, b: decay_jac(x, a, b) * [1, -1])


def test_jac_function_of_a_wrong_shape():
    for shape in ((11, 3), (12, 2), (2,)):
        with pytest.raises(ValueError, match="jac"):
            curve_fit(decay, X11, decay(X11, 2, 2), jac=lambda x, a, b, shape=shape: np.ones(shape))
        with pytest.raises(ValueError, match="jac"):
            curve_fit(decay, X11, decay(X11, 2, 2), sigma=0.1 + np.eye(11), jac=lambda *_, shape=shape: np.ones(shape))


def test_f_in_torch():
    x, y = noisy_decay()
    popt, pcov = curve_fit(torch_decay, x, y)
    expected, covariance = scipy_curve_fit(decay, x, y, **TIGHT)
    np.testing.assert_allclose(popt, expected, rtol=1e-7)
    np.testing.assert_allclose(pcov, covariance, rtol=1e-6)


def test_f_may_see_one_point_twice():
    x, y = noisy_decay()
    seen = []

    def f(x, *p):
        seen.append(p)
        return decay(x, *p)

    curve_fit(f, x, y, [1.0, 1.0], solver="cholesky")  # not by the short path of tiny fits
    assert seen.count((1.0, 1.0)) > 1  # numpy or torch? do rows stand alone? found out at p0 before the fit


# ---- curve_fit: keywords


def test_maxfev_and_max_nfev():
    x, y = noisy_decay()
    for keyword in ("maxfev", "max_nfev", "max_iter"):
        for bounds in ((-np.inf, np.inf), (0, 30)):
            np.testing.assert_allclose(
                curve_fit(decay, x, y, bounds=bounds, **{keyword: 100})[0], curve_fit(decay, x, y)[0], rtol=1e-8
            )
        with pytest.raises(RuntimeError, match=r"Optimal parameters not found: .*Best point: \["):
            curve_fit(decay, x, y, [30, 9], **{keyword: 1})
    curve_fit(decay, x, y, maxfev=0)
    curve_fit(decay, x, y, max_nfev=None)
    for value in (-1, 2.5, "many", True):
        with pytest.raises(ValueError, match="max_nfev"):
            curve_fit(decay, x, y, max_nfev=value)
    with pytest.raises(TypeError, match="max_nfev: means max_iter"):
        curve_fit(decay, x, y, maxfev=5, max_nfev=5)


def test_args_and_kwargs():
    with pytest.raises(ValueError, match="'args' is not a supported keyword argument"):
        curve_fit(line, [1, 2, 3, 4], [5, 9, 13, 17], p0=[1], args=(1,))
    with pytest.raises(TypeError, match=r"functools\.partial"):
        curve_fit(line, X4, Y4, kwargs={"b": 1})
    popt, _ = curve_fit(functools.partial(line, b=1.0), X4, 2 * X4 + 1)
    np.testing.assert_allclose(popt, [2])


def test_unknown_keywords():
    for keyword in ("max_fev", "options", "weights", "model", "x_format"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'"):
            curve_fit(line, X4, Y4, **{keyword: None})


REFUSED = {
    "diff_step": 1e-3,
    "epsfcn": 1e-8,
    "Dfun": decay_jac,
    "jac_sparsity": np.ones((11, 2)),
    "tr_options": {"regularize": True},
    "workers": 2,
    "kwargs": {"b": 1},
}


@pytest.mark.parametrize("keyword", REFUSED)
def test_refused_keywords_say_what_to_use(keyword):
    with pytest.raises(TypeError, match=rf"(?s){keyword}: got .*; .*"):
        curve_fit(decay, X11, decay(X11, 2, 2), **{keyword: REFUSED[keyword]})


def test_refused_keywords_may_ask_for_nothing():
    popt, _ = curve_fit(
        decay,
        X11,
        decay(X11, 2, 2),
        diff_step=None,
        epsfcn=None,
        jac_sparsity=None,
        tr_options={},
        verbose=0,
        workers=None,
    )
    np.testing.assert_allclose(popt, [2, 2], rtol=1e-8)


@pytest.mark.parametrize("tolerances", [(1e-4, None, None), (None, 1e-4, None), (None, None, 1e-4)])
def test_one_tolerance_alone(tolerances):
    x, y = noisy_decay()
    loose = dict(zip(("ftol", "xtol", "gtol"), tolerances, strict=True))
    popt, _, info, _, _ = curve_fit(decay, x, y, full_output=True, **loose)
    exact, _, most, _, _ = curve_fit(decay, x, y, full_output=True)
    np.testing.assert_allclose(popt, exact, rtol=1e-2)
    assert info["nfev"] < most["nfev"]


def test_no_tolerance_at_all():
    with pytest.raises(ValueError, match="ftol, xtol, gtol: all are None"):
        curve_fit(line, X4, Y4, ftol=None, xtol=None, gtol=None)


@pytest.mark.parametrize("x_scale", [1.0, [0.5, 20], np.array([1.0, 0.2]), "jac", None])
def test_x_scale(x_scale):
    x, y = noisy_decay()
    np.testing.assert_allclose(curve_fit(decay, x, y, x_scale=x_scale)[0], curve_fit(decay, x, y)[0], rtol=1e-7)


@pytest.mark.parametrize("x_scale", ["auto", -1.0, 1 + 2j, [1, 2, 3], [1, np.inf], 0])
def test_x_scale_that_is_no_scale(x_scale):
    with pytest.raises(ValueError, match="x_scale"):
        curve_fit(line, X4, Y4, x_scale=x_scale)


def test_diag_and_factor():
    x, y = noisy_decay()
    costs = {}
    for factor in (1e-3, 100):
        trials = []
        popt, _ = curve_fit(decay, x, y, [1, 1], diag=[1, 2], factor=factor, callback=trials.append)
        np.testing.assert_allclose(popt, curve_fit(decay, x, y)[0], rtol=1e-7)
        costs[factor] = trials[0].scaled_norm
    np.testing.assert_allclose(costs[1e-3], 1e-3 * np.hypot(1, 2), rtol=0.11)  # ‖D θ₀‖, within 10 % as everywhere
    assert costs[100] > costs[1e-3]
    for bad in (dict(factor=-1), dict(diag=[1, -2]), dict(diag=[1])):
        with pytest.raises(ValueError, match=next(iter(bad))):
            curve_fit(decay, x, y, **bad)
    for bad in (dict(diag=[1, 1], x_scale=1), dict(factor=1, damping="nielsen")):
        with pytest.raises(TypeError, match="give one of them"):
            curve_fit(decay, x, y, **bad)


@pytest.mark.parametrize(("name", "solver"), [("exact", "qr"), ("lsmr", "cg"), (None, "qr")])
def test_tr_solver(name, solver):
    x, y = noisy_decay()
    np.testing.assert_array_equal(curve_fit(decay, x, y, tr_solver=name)[0], curve_fit(decay, x, y, solver=solver)[0])
    with pytest.raises(ValueError, match=r"tr_solver.*best"):
        curve_fit(decay, x, y, tr_solver="best")


def test_col_deriv():
    x, y = noisy_decay()
    popt, _ = curve_fit(decay, x, y, jac=lambda x, a, b: decay_jac(x, a, b).T, col_deriv=True)
    np.testing.assert_array_equal(popt, curve_fit(decay, x, y, jac=decay_jac)[0])
    with pytest.raises(ValueError, match="col_deriv"):
        curve_fit(decay, x, y, col_deriv=True)


def test_callback_gets_records_and_may_stop():
    x, y = noisy_decay()
    records = []
    curve_fit(decay, x, y, callback=records.append)
    assert [record.n_iter for record in records] == list(range(1, len(records) + 1))

    def stopping(record):
        raise StopIteration

    for callback in (stopping, lambda record: True):
        with pytest.raises(RuntimeError, match="STOPPED_BY_CALLBACK"):
            curve_fit(decay, x, y, [30, 9], callback=callback)


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_f_scale(loss):
    x, y = noisy_decay()
    y[7] += 5
    popt, _ = curve_fit(decay, x, y, [2, 1], loss=loss, f_scale=0.3)
    result = least_squares(lambda p: decay(x, *p) - y, [2, 1], loss=loss, f_scale=0.3, **TIGHT)
    np.testing.assert_allclose(popt, result.x, rtol=1e-5)


def test_loss_with_lm():
    with pytest.raises(ValueError, match=r"lm.*linear"):
        curve_fit(line, X4, Y4, method="lm", loss="huber")
    with pytest.raises(ValueError, match="loss"):
        curve_fit(line, X4, Y4, loss="hinge")


# ---- curve_fit: full_output and failure


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sigma_ndim", [None, 1, 2])
def test_full_output(method, sigma_ndim):
    x, y = noisy_decay()
    s = np.linspace(0.1, 0.3, 50)
    covariance = np.outer(s, s) * 0.6 ** np.abs(np.subtract.outer(np.arange(50), np.arange(50)))
    sigma = {None: None, 1: s, 2: covariance}[sigma_ndim]
    popt, _, info, message, ier = curve_fit(decay, x, y, [1, 1], sigma, method=method, full_output=True)
    _, _, expected, _, _ = scipy_curve_fit(decay, x, y, [1, 1], sigma, method=method, full_output=True, **TIGHT)
    assert set(info) == set(expected)
    assert isinstance(message, str) and message
    assert ier in (1, 2, 3, 4)
    assert info["nfev"] > 0
    np.testing.assert_allclose(info["fvec"], expected["fvec"], atol=1e-6)
    if "fjac" not in info:
        return
    W = np.linalg.inv(np.linalg.cholesky({None: np.eye(50), 1: np.diag(s**2), 2: covariance}[sigma_ndim]))
    J = W @ decay_jac(x, *popt)
    pivots, R = info["ipvt"], np.triu(info["fjac"].T[:2])
    assert info["fjac"].shape == expected["fjac"].shape
    assert pivots.tolist() == expected["ipvt"].tolist()
    assert abs(R[0, 0]) >= abs(R[1, 1])
    np.testing.assert_allclose(R.T @ R, J[:, pivots].T @ J[:, pivots], rtol=1e-6)
    Q = J[:, pivots] @ np.linalg.inv(R)
    np.testing.assert_allclose(info["qtf"], Q.T @ info["fvec"], atol=1e-6 * np.linalg.norm(info["fvec"]))


def test_ier_says_which_test_was_met():
    x, y = noisy_decay()
    only = dict(ftol=None, xtol=None, gtol=None)
    for name, of_lm, of_trf in (("ftol", 1, 2), ("xtol", 2, 3), ("gtol", 4, 1)):
        for method, expected in (("lm", of_lm), ("trf", of_trf)):
            assert curve_fit(decay, x, y, method=method, full_output=True, **only | {name: 1e-5})[4] == expected


def test_a_fit_that_fails_is_a_runtime_error():
    x, y = noisy_decay()
    with pytest.raises(RuntimeError, match=r"^Optimal parameters not found: .*Best point: \[\d"):
        curve_fit(decay, x, y, [30, 9], maxfev=2)


def test_values_at_the_start_that_are_not_finite():
    with pytest.raises(ValueError, match="not finite at the start"):
        curve_fit(lambda x, a: np.log(a) * x, X4, Y4, p0=[-1])


def test_f_of_the_wrong_length():
    with pytest.raises(ValueError, match="shape"):
        curve_fit(lambda x, a: a * np.ones(3), X4, Y4)
    with pytest.raises(ValueError, match=r"xdata and ydata: .*\(4,\).* 3 values"):
        curve_fit(line, X4, Y4[:3])


# ---- leastsq, through LMRegressor(residual=...)

PARABOLA_X = np.linspace(0, 10, 40)
PARABOLA_Y = 3.1 * PARABOLA_X**2 + 42 * PARABOLA_X - 304.2 + 0.01 * np.random.default_rng(123).normal(size=40)


def parabola_residual(theta, X=None, y=None):
    a, b, c = theta
    return PARABOLA_Y - (a * PARABOLA_X**2 + b * PARABOLA_X + c)


def parabola_jac(theta, X=None, y=None):
    return -np.stack([PARABOLA_X**2, PARABOLA_X, np.ones(40)], axis=1)


@pytest.mark.parametrize("jac", ["auto", parabola_jac])
def test_residuals_from_a_zero_start(jac):
    p0 = np.zeros(3)
    est = solve(parabola_residual, p0, jac=jac)
    np.testing.assert_allclose(est.theta_, np.polyfit(PARABOLA_X, PARABOLA_Y, 2), rtol=1e-9)
    assert est.result_.success
    assert p0.tolist() == [0, 0, 0]


def test_residuals_that_are_one_number():
    with pytest.raises(ValueError, match="1 value for 2 parameters"):
        solve(lambda theta: 2 * (theta[0] - 3) ** 2 + 1, [0, 1])


def test_jacobian_of_another_shape_than_residuals():
    for shape in ((2, 2), (3, 3), (40, 2)):
        with pytest.raises(ValueError, match="jac"):
            solve(parabola_residual, [0, 0, 0], jac=lambda theta, X, y, shape=shape: np.ones(shape))


def test_residuals_in_float32():
    x = np.array([1.475, 1.429, 1.409, 1.419, 1.455, 1.519, 1.472, 1.368, 1.286, 1.231], dtype=np.float32)
    y = np.array([168, 193, 211, 202, 171, 151, 185, 258, 340, 396], dtype=np.float32) / 10000

    def fun(p):
        return p[0] * np.exp(-((x - p[1]) ** 2) / (2 * p[2] ** 2)) + p[3] - y

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        est = solve(fun, [1.0, 1.0, 1.0, 1.0])
    assert np.sum(fun(est.theta_) ** 2) < 1e-4 * np.sum(fun(np.ones(4)) ** 2)


def test_residuals_that_raise():
    def fun(theta):
        raise ValueError("I raised")

    with pytest.raises(ValueError, match="I raised"):
        solve(fun, [0.0])


def test_jacobian_that_raises():
    def jac(theta, X, y):
        raise ValueError("I raised")

    with pytest.raises(ValueError, match="I raised"):
        solve(lambda theta: theta - 10, [0.0], jac=jac)


def test_a_fit_within_a_residual():
    def fun(theta):
        test_residuals_from_a_zero_start("auto")
        return theta - [1.0, 2.0]

    np.testing.assert_allclose(solve(fun, [0.0, 0.0]).theta_, [1, 2])


def test_fits_in_several_threads():
    failures = []

    def fit():
        try:
            popt = curve_fit(decay, X11, decay(X11, 2, 2))[0]
            np.testing.assert_allclose(popt, [2, 2], rtol=1e-8)
        except BaseException as failure:
            failures.append(failure)
            raise

    threads = [threading.Thread(target=fit) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# ---- least_squares, through LMRegressor(residual=...)

JACS = ["auto", "2-point", "3-point", "cs"]


@pytest.mark.parametrize("jac", [*JACS, lambda theta, X, y: 2 * theta[:, None]])
def test_a_jacobian_that_vanishes_at_the_minimum(jac):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        est = solve(squared_plus_five, [2.0], jac=jac)
    np.testing.assert_allclose(est.theta_, 0, atol=1e-4)
    np.testing.assert_allclose(est.result_.cost, 12.5)


@pytest.mark.parametrize("jac", [*JACS, rosenbrock_jac])
@pytest.mark.parametrize("scaling", ["jacobian", "identity", [1.0, 5.0]])
@pytest.mark.parametrize("solver", ["qr", "cg"])
def test_rosenbrock(jac, scaling, solver):
    est = solve(rosenbrock, [-2, 1], jac=jac, solver=solver, damping=TrustRegion(scaling=scaling))
    np.testing.assert_allclose(est.theta_, [1, 1], rtol=1e-7)
    assert est.result_.success


def test_fewer_residuals_than_parameters():
    est = solve(lambda theta: np.append(rosenbrock(theta)[:1], 0.0), [-2, 1])
    np.testing.assert_allclose(est.result_.cost, 0, atol=1e-14)
    with pytest.raises(ValueError, match="1 value for 2 parameters"):  # a vector is expected, not a sum
        solve(lambda theta: rosenbrock(theta)[:1], [-2, 1])


def test_jac_names():
    with pytest.raises(ValueError, match=r"'jac' parameter .* Got 'oops'"):
        solve(squared_plus_five, [2.0], jac="oops")


def test_fit_options_that_do_not_exist():
    with pytest.raises(TypeError, match="no_such_option"):
        solve(squared_plus_five, [2.0], no_such_option=100)


def test_counts_and_status_of_a_result():
    calls = []

    def fun(theta):
        calls.append(theta)
        return rosenbrock(theta)

    est = solve(fun, [-2, 1], jac=rosenbrock_jac)
    result = est.result_
    assert result.success and result.status > 0 and result.message
    assert 0 < result.nfev <= len(calls) < result.nfev + 30  # the calls that find out what the function is come first
    assert 0 < result.njev <= result.n_iter + 2
    np.testing.assert_allclose(result.cost, 0.5 * np.sum(rosenbrock(est.theta_) ** 2), atol=1e-20)


def test_no_trial_at_all():
    with pytest.warns(ConvergenceWarning):
        est = solve(squared_plus_five, [2.0], max_iter=0)
    assert est.theta_.tolist() == [2.0]
    assert est.result_.cost == 40.5
    assert est.result_.status == Status.MAX_ITER
    assert not est.result_.success


def test_residuals_of_two_axes_are_flattened():
    est = solve(lambda theta: np.stack([theta - 1, theta - 3]), [0.0, 0.0])
    np.testing.assert_allclose(est.theta_, [2, 2], rtol=1e-9)


def test_start_of_two_axes():
    with pytest.raises((TypeError, ValueError), match="p0"):
        solve(squared_plus_five, np.ones((2, 2)))


def discrete_boundary_value_problem(theta):
    n = 5
    u = np.zeros((n + 2, n + 2))
    u[1:-1, 1:-1] = x = theta.reshape(n, n)
    return (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * x + x**3).ravel()


def test_a_boundary_value_problem_ends():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        est = solve(discrete_boundary_value_problem, np.ones(25), ftol=1e-2, max_iter=100)
    assert est.result_.cost < 0.5


def test_a_start_near_the_answer_is_not_left_for_a_worse_one():
    est = solve(lambda theta: (theta - 1e-12) ** 2, [1.1e-12], bounds=(0, np.inf))
    assert abs(est.theta_[0] - 1e-12) <= 0.1e-12
    assert est.result_.success


# ---- bounds


@pytest.mark.parametrize(
    ("x0", "bounds"),
    [
        ([2.0], (10.0, 0.0)),  # crossed
        ([2.0], (3.0, 4)),  # the start is outside
        ([2.0], (1.0, 2, 3)),
        ([2.0], (1.0, [2.0, 3.0])),
        ([1.0, 2.0], ([0.0, 1.0, 2.0], [3.0, 4.0])),
    ],
)
def test_bounds_that_make_no_sense(x0, bounds):
    with pytest.raises(ValueError, match=r"bound|p0"):
        solve(lambda theta: theta, x0, bounds=bounds)
    one_in_a_list = solve(rosenbrock, [0.5, 2.0], bounds=([0.0], [3.0, 4.0]))
    np.testing.assert_allclose(one_in_a_list.theta_, [1, 1], rtol=1e-7)


@pytest.mark.parametrize("jac", JACS)
def test_within_and_on_a_bound(jac):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        inside = solve(squared_plus_five, [2.0], jac=jac, bounds=(-1.0, 3.0))
    np.testing.assert_allclose(inside.theta_, 0, atol=1e-4)
    on_bound = solve(squared_plus_five, [2.0], jac=jac, bounds=(0.5, 3.0))
    assert on_bound.theta_.tolist() == [0.5]
    assert on_bound.result_.success
    assert "p0" in on_bound.result_.message and "bound" in on_bound.result_.message


@pytest.mark.parametrize("jac", JACS)
@pytest.mark.parametrize("kind", [lambda low, high: (low, high), Bounds])
def test_shapes_of_bounds(jac, kind):
    for low, high, expected in [
        (0.5, [2.0, 2.0], [0.5, 0.5]),
        ([0.3, 0.2], 3.0, [0.3, 0.2]),
        ([-1, 0.5], [1.0, 3.0], [0.0, 0.5]),
        (-np.inf, np.inf, [0.0, 0.0]),
        (-np.inf, [-0.5, 2], [-0.5, 0.0]),
    ]:
        x0 = np.minimum(np.ones(2), high)
        est = solve(lambda theta: theta.copy(), x0, jac=jac, bounds=kind(low, high))
        np.testing.assert_allclose(est.theta_, expected, atol=1e-8)


def test_bounds_objects():
    for x0, bounds, expected in [
        (0.5, Bounds(), 0),
        (3.0, Bounds(lb=1.0), 1),
        (0.5, Bounds(lb=-1.0, ub=1.0), 0),
        (-3.0, Bounds(ub=-1.0), -1),
    ]:
        est = solve(lambda theta: theta.copy(), x0, bounds=bounds)
        np.testing.assert_allclose(est.theta_, expected, atol=1e-8)


ROSENBROCK_IN_A_BOX = [
    ([-2.0, 1.0], ([-np.inf, -1.5], np.inf)),
    ([2.0, 2.0], ([-np.inf, 1.5], np.inf)),
    ([-2.0, 2.0], ([-np.inf, 1.5], np.inf)),
    ([0.0, 2.0], ([-np.inf, 1.5], [1.0, np.inf])),
    ([2.0, 2.0], ([1.0, 1.5], [3.0, 3.0])),
    ([-1.2, 1.0], ([-50.0, 0.0], [0.5, 100])),
]


@pytest.mark.parametrize("jac", [*JACS, rosenbrock_jac])
@pytest.mark.parametrize(("x0", "bounds"), ROSENBROCK_IN_A_BOX)
@pytest.mark.parametrize("scaling", ["jacobian", "identity"])
def test_rosenbrock_in_a_box(jac, x0, bounds, scaling):
    est = solve(rosenbrock, x0, jac=jac, bounds=bounds, damping=TrustRegion(scaling=scaling))
    assert est.result_.success
    gradient = rosenbrock_jac(est.theta_).T @ rosenbrock(est.theta_)
    lower, upper = (np.broadcast_to(np.asarray(bound, dtype=float), 2) for bound in bounds)
    assert np.all((est.theta_ >= lower) & (est.theta_ <= upper))
    free = np.where(est.theta_ == lower, np.minimum(gradient, 0), gradient)
    free = np.where(est.theta_ == upper, np.maximum(gradient, 0), free)
    np.testing.assert_allclose(free, 0, atol=1e-5)


def test_a_start_on_a_bound():
    y = np.concatenate([np.zeros(66), np.random.default_rng(19103).poisson(np.exp(0.06 * np.arange(83)))])
    x = 0.1 * np.arange(y.size)

    def fun(theta):
        a, b, x0 = theta
        return a * np.exp(b * (x - x0)) - y

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CovarianceWarning)
        est = solve(fun, [0.01, 1.0, 5.0], bounds=([0.01, 0, 0], [np.inf, 10, 20.9]))
    assert est.result_.success
    reference = least_squares(fun, [0.02, 1.0, 5.0], bounds=([0.01, 0, 0], [np.inf, 10, 20.9]), x_scale="jac", **TIGHT)
    assert est.result_.cost <= reference.cost * (1 + 1e-8)


# ---- robust losses


def cubic_soft_l1(z):
    t = 1 + z
    return np.stack([3 * (t ** (1 / 3) - 1), t ** (-2 / 3), -2 / 3 * t ** (-5 / 3)])


@pytest.mark.parametrize("loss", [*LOSSES, cubic_soft_l1])
@pytest.mark.parametrize("jac", ["auto", "3-point"])
def test_outliers_pull_less_than_in_least_squares(loss, jac):
    rng = np.random.default_rng(12220903)
    x = np.linspace(-1, 1, 11)
    for noise in (0.1, 1.0):
        y = 1 + np.exp(0.1 * x) + noise * rng.normal(size=11)
        y[3] += 50 * noise

        def fun(p, y=y):
            return p[0] + np.exp(p[1] * x) - y

        est = solve(fun, [0.0, 0.0], jac=jac, loss=loss, f_scale=noise)
        expected = least_squares(fun, est.theta_, loss=loss, f_scale=noise, **TIGHT)
        assert est.result_.success
        np.testing.assert_allclose(est.result_.cost, expected.cost, rtol=1e-8)
        if loss != "linear":
            plain = solve(fun, [0.0, 0.0])
            off, off_plain = (np.linalg.norm(e.theta_ - [1, 0.1]) for e in (est, plain))
            assert off < off_plain


@pytest.mark.parametrize("loss", [*LOSSES, cubic_soft_l1])
def test_the_cost_is_that_of_the_loss(loss):
    with pytest.warns(ConvergenceWarning):
        est = solve(squared_plus_five, [2.0], loss=loss, f_scale=3.0, max_iter=0)
    reference = least_squares(squared_plus_five, 2.0, loss=loss, f_scale=3.0, max_nfev=1)
    np.testing.assert_allclose(est.result_.cost, reference.cost, rtol=1e-12)


def test_loss_names_and_shapes():
    with pytest.raises(ValueError, match=r"loss.*hinge"):
        solve(squared_plus_five, [2.0], loss="hinge")
    with pytest.raises(ValueError, match="loss"):
        solve(lambda theta: theta - np.arange(3.0), [2.0], loss=lambda z: z)


# ---- callback


@pytest.mark.parametrize("bounds", [None, (-8.0, 8.0)])
def test_callback_is_called_after_every_trial(bounds):
    records = []
    est = solve(lambda theta: theta**2 - 5, [5.0], bounds=bounds, callback=records.append)
    assert [record.n_iter for record in records] == list(range(1, est.n_iter_ + 1))
    assert records[-1].cost == est.result_.cost
    assert est.result_.status != Status.STOPPED_BY_CALLBACK
    with pytest.warns(ConvergenceWarning, match="STOPPED_BY_CALLBACK"):
        est = solve(lambda theta: theta**2 - 5, [5.0], bounds=bounds, callback=lambda record: True)
    assert est.n_iter_ == 1


# ---- the tables themselves


def test_every_row_of_the_tables_names_its_test():
    text = (Path(__file__).parents[1] / "docs" / "scipy.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)` *\|$", text, re.MULTILINE)
    assert len(named) == len(set(named))
    here = {name for name in globals() if name.startswith("test_")} - {"test_every_row_of_the_tables_names_its_test"}
    assert set(named) == here
