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


def test_complex_values_for_real_data_are_refused():
    with pytest.raises(ValueError, match="complex values for real ydata"):
        curve_fit(lambda x, a, b: a * np.exp(-b * x) + 0j, X, Y, p0=[1, 1], sigma=np.eye(40) + 0.1)


@pytest.mark.parametrize("sigma", [np.linspace(0.1, 0.2, 40), np.eye(40) + 0.1], ids=["errors", "covariance"])
@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]])
def test_tensors(sigma, devices):
    x, y = torch.tensor(X), torch.tensor(Y)
    popt, pcov, info, _, _ = curve_fit(torch_decay, x, y, [1, 1, 0], sigma, devices=devices, full_output=True)
    expected, covariance = scipy_curve_fit(decay, X, Y, [1, 1, 0], sigma, ftol=1e-14, xtol=1e-14)
    np.testing.assert_allclose(popt, expected, rtol=1e-6)
    np.testing.assert_allclose(pcov, covariance, rtol=1e-4)
    assert info["fvec"].shape == (40,)
    broken = torch.where(x > 3, torch.nan, y)
    omitted, _ = curve_fit(torch_decay, x, broken, [1, 1, 0], sigma, nan_policy="omit")
    rows = X <= 3
    kept = sigma[rows] if sigma.ndim == 1 else sigma[np.ix_(rows, rows)]
    np.testing.assert_allclose(omitted, curve_fit(decay, X[rows], Y[rows], [1, 1, 0], kept)[0], rtol=1e-6)


def test_a_seeded_search_for_the_start():
    popt, _ = curve_fit(decay, X, Y, "auto", random_state=0)
    np.testing.assert_allclose(popt, curve_fit(decay, X, Y, [1, 1, 0])[0], rtol=1e-6)
    with pytest.raises(ValueError, match="p0='auto' needs xdata"):
        curve_fit(decay, X, Y, "auto", sigma=np.eye(40) + 0.1)


def test_full_output_of_tied_and_complex_fits():
    popt, _, info, _, _ = curve_fit(
        torch_decay, X, Y, {"a": 1, "c": 0, "t": 0}, tied={"b": lambda t: torch.exp(t)}, full_output=True
    )
    assert len(popt) == 4
    assert info["fjac"].shape == (3, 40)
    np.testing.assert_allclose(info["fvec"], decay(X, *popt[:3]) - Y, atol=1e-12)

    def wave(x, a, w):
        return a * np.exp(1j * w * x)

    y = wave(X, 2.0, 1.3) + 0.01
    popt, _, info, _, _ = curve_fit(wave, X, y, [1, 1.2], full_output=True)
    off = wave(X, *popt) - y
    np.testing.assert_allclose(info["fvec"], np.stack([off.real, off.imag], 1).ravel(), atol=1e-12)
