"""curve_fit: SciPy's calling convention and its answers."""

import numpy as np
import pytest
import torch
from scipy.optimize import OptimizeWarning
from scipy.optimize import curve_fit as scipy_curve_fit

from lmfit_gpu import curve_fit
from lmfit_gpu.exceptions import CovarianceWarning

X = np.linspace(0, 4, 40)
Y = 2.5 * np.exp(-1.3 * X) + 0.5 + 0.02 * np.sin(30 * X)


def decay(x, a, b, c):
    return a * np.exp(-b * x) + c


def torch_decay(x, a, b, c):
    return a * torch.exp(-b * x) + c


@pytest.mark.parametrize("f", [decay, torch_decay])
@pytest.mark.parametrize("jac", [None, "2-point", "3-point"])
def test_scipys_answer(f, jac):
    popt, pcov = curve_fit(f, X, Y, p0=[1, 1, 0], jac=jac)
    expected, covariance = scipy_curve_fit(decay, X, Y, [1, 1, 0], ftol=1e-14, xtol=1e-14)
    np.testing.assert_allclose(popt, expected, rtol=1e-6)
    np.testing.assert_allclose(pcov, covariance, rtol=1e-4)


def test_ones_are_the_default_start_as_in_scipy():
    np.testing.assert_allclose(curve_fit(decay, X, Y)[0], scipy_curve_fit(decay, X, Y)[0], rtol=1e-5)


def plane(xy, a, b, c):
    return a * xy[0] + b * np.exp(-c * xy[1])


@pytest.mark.parametrize("k", [1, 2])
def test_several_predictors_reach_f_as_given(k):
    rng = np.random.default_rng(0)
    xy = rng.uniform(0, 2, (k, 50))
    f = plane if k == 2 else lambda x, a, b: a * x[0] + b
    p = [1.0, 2.0, 0.7][: k + 1]
    popt, _ = curve_fit(f, xy, f(xy, *p), p0=np.ones(k + 1))
    np.testing.assert_allclose(popt, p, rtol=1e-7)


def test_a_jacobian_function():
    def jac(x, a, b, c):
        return np.stack([np.exp(-b * x), -a * x * np.exp(-b * x), np.ones_like(x)], axis=1)

    np.testing.assert_allclose(
        curve_fit(decay, X, Y, [1, 1, 0], jac=jac)[0], curve_fit(decay, X, Y, [1, 1, 0])[0], rtol=1e-7
    )


def test_complex_values_are_fitted_whole():
    def response(x, a, phase, w):
        return a * np.exp(1j * phase) / (1 + 1j * x / w)

    popt, _ = curve_fit(response, X, response(X, 1.96, 0.38, 1.75), p0=[1, 0, 1])
    np.testing.assert_allclose(popt, [1.96, 0.38, 1.75], rtol=1e-7)


def test_a_failure_has_the_best_point():
    with pytest.raises(RuntimeError, match=r"Optimal parameters not found: MAX_ITER.*Best point: \["):
        curve_fit(decay, X, Y, p0=[1, 1, 0], max_iter=1)


def test_redundant_parameters_are_a_warning():
    with pytest.warns(OptimizeWarning, match="do not determine a, b") as caught:
        _, pcov = curve_fit(
            lambda x, a, b, c: a * np.exp(b - c * x), X, np.exp(-X) + 0.01 * np.cos(9 * X), p0=[1, 0, 1]
        )
    assert caught[0].category is CovarianceWarning
    assert np.isinf(np.diag(pcov)).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((decay, X, Y[:-1]), ValueError, "xdata"),
        ((decay, X, np.ones((40, 2))), ValueError, "ydata"),
        ((decay, np.ones((2, 3, 40)), Y), ValueError, "xdata"),
        ((decay, X, Y, [1, 1]), ValueError, "p0"),
        ((lambda x, *p: p[0] * x, X, Y), ValueError, "p0"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        curve_fit(*arguments)


def test_an_unknown_option_is_a_type_error():
    with pytest.raises(TypeError, match="max_fev"):  # maxfev and max_nfev are SciPy's, and known
        curve_fit(decay, X, Y, max_fev=10)


def test_a_jacobian_of_several_predictors_and_of_complex_values():
    xy = np.stack([X, np.cos(X)])

    def two(xy, a, b):
        return a * np.exp(-b * xy[0]) + xy[1]

    def two_jac(xy, a, b):
        return np.stack([np.exp(-b * xy[0]), -a * xy[0] * np.exp(-b * xy[0])], 1)

    np.testing.assert_allclose(curve_fit(two, xy, two(xy, 2.0, 1.3), [1, 1], jac=two_jac)[0], [2.0, 1.3], rtol=1e-7)

    def wave(x, a, w):
        return a * np.exp(1j * w * x)

    def wave_jac(x, a, w):
        return np.stack([np.exp(1j * w * x), 1j * a * x * np.exp(1j * w * x)], 1)

    np.testing.assert_allclose(curve_fit(wave, X, wave(X, 2.0, 1.3), [1, 1.2], jac=wave_jac)[0], [2.0, 1.3], rtol=1e-7)
