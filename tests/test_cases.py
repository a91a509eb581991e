"""Fit the numerical cases (D, W, G, N, P) and check every sentence they demand.

The first half runs all cases with one right answer, every variant, both forms of the model and both calls; the second
half takes the cases that ask for more than the right numbers. cases.py says where the numbers come from.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import cases
import cases_interface
import cases_numerical
import numpy as np
import pandas as pd
import pytest
from case_fits import standard_errors
from cases import Case, compare
from cases_interface import K1, K3, L3, S1, S2, S5, T1, T7
from cases_numerical import (
    D1,
    D2,
    D3,
    D7,
    G1,
    G1_IDENTIFIABLE,
    G3,
    G4,
    G6,
    N1,
    N3,
    N5,
    N5_BAD_START,
    P1,
    P1_FAR_START,
    P3,
    P4,
    P4_BAD_START,
    W6,
    torch_power_saturation_naive,
)
from scipy.optimize import OptimizeWarning
from sklearn.exceptions import ConvergenceWarning

from lmfit_gpu import LMRegressor, curve_fit
from lmfit_gpu.exceptions import CovarianceWarning

# A trial point may overflow in the user's function, and numpy says so from the line of that function.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::RuntimeWarning:{module.__name__}")
    for module in (cases, cases_interface, cases_numerical)
]

FORMS = ["numpy", "torch"]

RIGHT_ANSWER = [
    pytest.param(variant, form, id=f"{case.name}-{label}-{form}")
    for case in (D1, D2, D3, D7, W6, G6, N3, N5, P1, P3, P4, S1, S2, S5, L3, T1, T7, K1, K3)
    for label, variant in case.each_variant()
    for form in FORMS
]


def as_column(x: Any) -> Any:
    """Return x as one column of X; a list stays a list."""
    return [[value] for value in x] if isinstance(x, list) else np.asarray(x)[:, None]


def fit(case: Case, form: str, **options: Any) -> LMRegressor:
    """Return an estimator fitted to the case; warnings are errors unless the caller expects them."""
    options.setdefault("p0", case.p0)
    return LMRegressor(case.model(form), **options).fit(as_column(case.x), case.y)


def fit_or_admit_failure(case: Case, form: str, **options: Any) -> LMRegressor:
    """Return a fitted estimator; without success it must have warned, and its parameters must be finite."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        estimator = fit(case, form, **options)
    assert np.all(np.isfinite(estimator.theta_))
    if not estimator.result_.success:
        assert any(issubclass(warning.category, ConvergenceWarning) for warning in caught)
    return estimator


def largest_cosine(jacobian: np.ndarray, residual: np.ndarray) -> float:
    """Return the largest |cosine| between the residual and a column of J; 0 at a stationary point."""
    projections = jacobian.T @ residual
    return np.max(np.abs(projections) / (np.linalg.norm(jacobian, axis=0) * np.linalg.norm(residual)))


def rss_at(case: Case, theta: Any) -> float:
    """Return the residual sum of squares of the numpy model at theta."""
    return float(np.sum((case.numpy_model(np.asarray(case.x, float), *theta) - np.asarray(case.y, float)) ** 2))


# One right answer.


@pytest.mark.parametrize(("case", "form"), RIGHT_ANSWER)
def test_regressor_finds_the_right_answer(case: Case, form: str) -> None:
    estimator = fit(case, form)
    predicted = estimator.predict(as_column(case.x))
    rss = 2 * estimator.result_.cost
    assert estimator.result_.success
    assert tuple(estimator.params_) == case.params
    assert np.array_equal(list(estimator.params_.values()), estimator.theta_)
    assert compare(case.expected, estimator.theta_, estimator.stderr_, rss, predicted) == []
    assert np.allclose(standard_errors(estimator.covariance_), estimator.stderr_, rtol=1e-12, atol=0)
    assert estimator.rank_ == len(case.params)
    assert_cost_belongs_to(estimator, case)


def assert_cost_belongs_to(estimator: LMRegressor, case: Case) -> None:
    """Check that the cost told is that of the point returned."""
    y = np.asarray(case.y, float)
    residual = estimator.predict(as_column(case.x)) - y
    rounding = 1e-14 * (y @ y)  # below it a perfect fit has no digits left
    rss_rtol = max(case.expected.rss_rtol, 1e-6)
    assert 2 * estimator.result_.cost == pytest.approx(residual @ residual, rel=rss_rtol, abs=rounding)


@pytest.mark.parametrize(("case", "form"), RIGHT_ANSWER)
def test_curve_fit_finds_the_right_answer(case: Case, form: str) -> None:
    popt, pcov = curve_fit(case.model(form), case.x, case.y, p0=case.p0)
    assert type(popt) is np.ndarray
    assert type(pcov) is np.ndarray
    assert pcov.shape == (len(case.params), len(case.params))
    assert compare(case.expected, popt, standard_errors(pcov)) == []


# D: scale.


@pytest.mark.parametrize("form", FORMS)
def test_float32_pandas_series_do_not_lose_the_difference_step(form: str) -> None:
    x, y = pd.Series(D1.x), pd.Series(D1.y)
    assert x.dtype == y.dtype == np.float32
    popt, pcov = curve_fit(D1.model(form), x, y, p0=D1.p0)
    assert compare(D1.expected, popt, standard_errors(pcov)) == []
    estimator = LMRegressor(D1.model(form), p0=D1.p0).fit(x.to_frame("x"), y)
    assert compare(D1.expected, estimator.theta_, estimator.stderr_) == []


@pytest.mark.parametrize("label", list(D2.variants))
def test_the_model_never_sees_integers(label: str) -> None:
    variant = dict(D2.each_variant())[label]
    seen = set()  # "float64", "torch.float64", "float", ...

    def recording(x: Any, a: Any, b: Any) -> Any:
        seen.update(str(getattr(value, "dtype", type(value).__name__)) for value in (x, a, b))
        return variant.numpy_model(x, a, b)

    popt, _ = curve_fit(recording, variant.x, variant.y, p0=variant.p0)
    fit_of_columns = LMRegressor(recording, p0=variant.p0).fit(as_column(variant.x), variant.y)
    assert seen
    assert all("float" in kind for kind in seen)
    assert compare(D2.expected, popt) == []
    assert compare(D2.expected, fit_of_columns.theta_) == []


# G: degenerate problems.


def assert_g1_identifiable_part(theta: np.ndarray, stderr: np.ndarray) -> None:
    amplitude, shift, decay, floor = theta
    assert compare(G1_IDENTIFIABLE, [amplitude * np.exp(shift), decay, floor]) == []
    assert not np.any(np.isfinite(stderr[:2]))
    assert np.allclose(stderr[2:], G1_IDENTIFIABLE.std[1:], rtol=G1_IDENTIFIABLE.std_rtol, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_redundant_pair_is_named_and_the_rest_is_right(form: str) -> None:
    with pytest.warns(CovarianceWarning) as caught:
        estimator = fit(G1, form)
    predicted = estimator.predict(as_column(G1.x))
    assert estimator.result_.success
    assert compare(G1.expected, rss=2 * estimator.result_.cost, predict=predicted) == []
    assert_g1_identifiable_part(estimator.theta_, estimator.stderr_)
    assert estimator.rank_ == 3
    text = " ".join(str(warning.message) for warning in caught)
    named = {name for name in G1.params if re.search(rf"\b{name}\b", text)}
    assert named == {"amplitude", "shift"}


@pytest.mark.parametrize("form", FORMS)
def test_curve_fit_gives_a_redundant_pair_no_finite_error(form: str) -> None:
    with pytest.warns((OptimizeWarning, CovarianceWarning)):
        popt, pcov = curve_fit(G1.model(form), G1.x, G1.y, p0=G1.p0)
    amplitude, shift, decay, floor = popt
    assert compare(G1.expected, rss=rss_at(G1, popt)) == []
    assert compare(G1_IDENTIFIABLE, [amplitude * np.exp(shift), decay, floor]) == []
    assert not np.any(np.isfinite(pcov.diagonal()[:2]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("case", "rank"), [(G3, 2), (G4, 3)], ids=["G3", "G4"])
def test_no_degrees_of_freedom_means_no_standard_errors(case: Case, rank: int, form: str) -> None:
    with pytest.warns(CovarianceWarning):
        estimator = fit(case, form)
    predicted = estimator.predict(as_column(case.x))
    assert estimator.result_.success
    assert compare(case.expected, estimator.theta_, rss=2 * estimator.result_.cost) == []
    assert np.allclose(predicted, case.y, rtol=0, atol=1e-4)
    assert np.all(np.isfinite(estimator.theta_))
    assert estimator.rank_ == rank
    assert not np.any(np.isfinite(estimator.stderr_))
    assert not np.any(np.isfinite(estimator.covariance_.diagonal()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [G3, G4], ids=["G3", "G4"])
def test_curve_fit_without_degrees_of_freedom(case: Case, form: str) -> None:
    with pytest.warns((OptimizeWarning, CovarianceWarning)):
        popt, pcov = curve_fit(case.model(form), case.x, case.y, p0=case.p0)
    assert compare(case.expected, popt, rss=rss_at(case, popt)) == []
    assert not np.any(np.isfinite(pcov.diagonal()))


@pytest.mark.parametrize("form", FORMS)
def test_data_without_noise_converge_quickly(form: str) -> None:
    estimator = fit(G6, form)
    assert estimator.result_.success
    assert estimator.n_iter_ < 50
    assert np.all(estimator.stderr_ <= 1e-6)  # standard_errors() above: finite, not negative


# N: numbers that are not finite.


@pytest.mark.parametrize("form", FORMS)
def test_overflowing_trial_is_a_failed_step(form: str) -> None:
    estimator = fit_or_admit_failure(N1, form)
    if estimator.result_.success:
        assert compare(N1.expected, estimator.theta_, estimator.stderr_, 2 * estimator.result_.cost) == []
    else:
        assert 2 * estimator.result_.cost <= rss_at(N1, N1.p0)


@pytest.mark.parametrize("form", FORMS)
def test_curve_fit_survives_an_overflowing_trial(form: str) -> None:
    try:
        popt, pcov = curve_fit(N1.model(form), N1.x, N1.y, p0=N1.p0)
    except RuntimeError:
        return  # not converged, and said so
    assert compare(N1.expected, popt, standard_errors(pcov)) == []


def fit_theta(model: Any, case: Case) -> np.ndarray:
    return LMRegressor(model, p0=case.p0).fit(as_column(case.x), case.y).theta_


def curve_fit_theta(model: Any, case: Case) -> np.ndarray:
    return curve_fit(model, case.x, case.y, p0=case.p0)[0]


@pytest.mark.parametrize("theta_of", [fit_theta, curve_fit_theta])
def test_nan_derivative_is_overcome_or_located(theta_of: Any) -> None:
    try:
        theta = theta_of(torch_power_saturation_naive, N3)
    except ValueError as error:
        assert "exponent" in str(error)
        assert re.search(r"\brows?\b.*\b0\b", str(error))
    else:
        assert compare(N3.expected, theta) == []


@pytest.mark.parametrize("form", FORMS)
def test_residuals_that_are_not_finite_at_the_start_are_refused(form: str) -> None:
    with pytest.raises(ValueError, match=r"(?s)not finite.*start|start.*not finite"):
        fit(N5, form, p0=N5_BAD_START)
    with pytest.raises(ValueError, match=r"(?s)not finite.*start|start.*not finite"):
        curve_fit(N5.model(form), N5.x, N5.y, p0=N5_BAD_START)


# P: the path.


@pytest.mark.parametrize("form", FORMS)
def test_local_minimum_is_stationary_and_its_score_is_bad(form: str) -> None:
    estimator = fit(P1, form, p0=P1_FAR_START)
    (w,) = estimator.theta_
    if compare(P1.expected, estimator.theta_):
        residual = np.sin(w * P1.x) - P1.y
        assert estimator.score(as_column(P1.x), P1.y) < 0.2
        assert largest_cosine((P1.x * np.cos(w * P1.x))[:, None], residual) < 1e-4


@pytest.mark.parametrize(("form", "seed"), [("numpy", 0), ("torch", 1), ("numpy", 2)])
def test_a_search_for_the_start_finds_the_frequency(form: str, seed: int) -> None:
    estimator = fit(P1, form, p0="auto", random_state=seed)
    assert estimator.result_.success
    assert compare(P1.expected, estimator.theta_) == []
    assert estimator.score(as_column(P1.x), P1.y) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(("form", "seed"), [("torch", 0), ("numpy", 1), ("torch", 2)])
def test_curve_fit_finds_the_frequency_by_a_search(form: str, seed: int) -> None:
    popt, _ = curve_fit(P1.model(form), P1.x, P1.y, p0="auto", random_state=seed)
    assert compare(P1.expected, popt) == []


@pytest.mark.parametrize("form", FORMS)
def test_convergence_is_judged_by_the_gradient_not_by_the_residual(form: str) -> None:
    estimator = fit(P3, form)
    residual = estimator.predict(as_column(P3.x)) - P3.y
    assert estimator.result_.success
    assert estimator.n_iter_ <= 10
    assert largest_cosine(1 / P3.x[:, None], residual) < 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_poor_start_ends_at_the_optimum_or_says_that_it_did_not(form: str) -> None:
    estimator = fit_or_admit_failure(P4, form, p0=P4_BAD_START)
    if estimator.result_.success:
        assert compare(P4.expected, estimator.theta_, estimator.stderr_) == []
    else:
        assert re.search(r"MAX_ITER|STALLED_AT_PRECISION", estimator.result_.message)
        assert 2 * estimator.result_.cost <= rss_at(P4, P4_BAD_START)


@pytest.mark.parametrize("form", FORMS)
def test_running_out_of_iterations_keeps_the_best_point(form: str) -> None:
    with pytest.warns(ConvergenceWarning):
        estimator = fit(P4, form, max_iter=2)
    assert not estimator.result_.success
    assert re.search(r"(?i)max(imum|_iter)", estimator.result_.message)
    assert rss_at(P4, estimator.theta_) == pytest.approx(2 * estimator.result_.cost, rel=1e-9)
    assert 2 * estimator.result_.cost < rss_at(P4, P4.p0)
    with pytest.raises(RuntimeError):
        curve_fit(P4.model(form), P4.x, P4.y, p0=P4.p0, max_iter=2)
