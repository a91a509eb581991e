"""Fit the cases with bounds (D5, B1, B4, B5, G4) and check every sentence they demand.

Every model evaluation must keep the bounds, not only the answer: a model is often undefined outside.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import Any

import cases
import cases_bounds
import cases_numerical
import numpy as np
import pytest
from case_fits import (
    as_column,
    assert_curve_fit_right,
    assert_inside,
    assert_regressor_right,
    curve_fit_of,
    fit,
    standard_errors,
)
from cases import Case, compare
from cases_bounds import B1, B4, B4_STD, B4_STD_ABSOLUTE, B5, B5_EQUAL, B5_HITS_ZERO, D5, G4_BOUNDED
from scipy.optimize import Bounds, OptimizeWarning

from lmfit_gpu import LMRegressor, curve_fit
from lmfit_gpu.exceptions import CovarianceWarning

# A trial point may overflow in the user's function, and numpy says so from the line of that function.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::RuntimeWarning:{module.__name__}")
    for module in (cases, cases_bounds, cases_numerical)
]

FORMS = ["numpy", "torch"]

INSIDE = [
    pytest.param(variant, form, id=f"{case.name}-{label}-{form}")
    for case in (D5, B1, B5)
    for label, variant in case.each_variant()
    for form in FORMS
]


def recording(case: Case, form: str, seen: list[list[float]]) -> Any:
    """Return the model of the case; it writes down the parameters of every call made with plain numbers."""
    model = case.model(form)

    def recorder(x: Any, a: Any, b: Any, c: Any) -> Any:
        values = [np.asarray(getattr(value, "detach", lambda value=value: value)()) for value in (a, b, c)]
        seen.append([(float(value.min()), float(value.max())) for value in values])
        return model(x, a, b, c)

    return recorder


def refusal(call: Any) -> str:
    """Return the text of the ValueError that the call raises."""
    with pytest.raises(ValueError, match=r"\w") as caught:
        call()
    return str(caught.value)


# The optimum lies inside the bounds.


@pytest.mark.parametrize(("case", "form"), INSIDE)
def test_regressor_finds_the_optimum_inside(case: Case, form: str) -> None:
    estimator = assert_regressor_right(case, form)
    assert estimator.rank_ == len(case.params)


@pytest.mark.parametrize(("case", "form"), INSIDE)
def test_curve_fit_finds_the_optimum_inside(case: Case, form: str) -> None:
    assert_curve_fit_right(case, form)


@pytest.mark.parametrize("solver", ["qr", "cholesky", "dual", "cg"])
@pytest.mark.parametrize("label", ["base", "upper", "mixed"])
def test_every_solver_leaves_a_bound_it_starts_on(label: str, solver: str) -> None:
    assert_regressor_right(dict(B1.each_variant())[label], "torch", solver=solver)


@pytest.mark.parametrize("form", FORMS)
def test_bounds_do_not_move_an_optimum_inside(form: str) -> None:
    free = fit(replace(B1, p0=[1.0, 1.0, 1.0], bounds=None), form)
    for _, variant in B1.each_variant():
        bounded = fit(variant, form)
        assert np.allclose(bounded.theta_, free.theta_, rtol=1e-6, atol=0)
        assert np.allclose(bounded.stderr_, free.stderr_, rtol=1e-5, atol=0)
        assert not any(re.search(rf"\b{name}\b.*bound", bounded.result_.message) for name in B1.params)


@pytest.mark.parametrize("jac", ["2-point", "3-point", "auto"])
@pytest.mark.parametrize("label", ["base", "upper", "mixed"])
def test_the_model_is_never_evaluated_outside(label: str, jac: str) -> None:
    case = dict(B1.each_variant())[label]
    seen: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        LMRegressor(recording(case, "numpy", seen), p0=case.p0, bounds=case.bounds, jac=jac).fit(
            as_column(case.x), case.y
        )
    lowest, highest = np.min(seen, axis=0)[:, 0], np.max(seen, axis=0)[:, 1]
    assert len(seen) > 10
    assert_inside(case, lowest)
    assert_inside(case, highest)


def dict_of(case: Case) -> dict[str, tuple[float, float]]:
    return {name: (lo, hi) for name, lo, hi in zip(case.params, *case.bounds, strict=True)}


@pytest.mark.parametrize(
    "as_given",
    [
        lambda case: case.bounds,
        lambda case: tuple(np.array(side) for side in case.bounds),
        lambda case: list(case.bounds),
        lambda case: Bounds(*case.bounds),
        dict_of,
        lambda case: {"b": (None, 0.0)},
        lambda case: (-np.inf, [np.inf, 0.0]),
    ],
    ids=["lists", "arrays", "list", "Bounds", "dict", "dict of one", "scalar lower"],
)
@pytest.mark.parametrize("case", [B5, B5_HITS_ZERO], ids=["inside", "active"])
def test_bounds_are_taken_in_every_form(case: Case, as_given: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CovarianceWarning)
        estimator = fit(case, "numpy", bounds=as_given(case))
    assert np.allclose(estimator.theta_, case.expected.params, rtol=1e-7, atol=1e-12)
    assert estimator.theta_[1] <= 0.0


# The optimum lies on a bound.


@pytest.mark.parametrize("absolute", [False, True], ids=["relative", "absolute"])
@pytest.mark.parametrize("form", FORMS)
def test_an_active_bound_is_reported_and_the_other_errors_are_right(form: str, absolute: bool) -> None:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        estimator = fit(B4, form, absolute_sigma=absolute)
    assert estimator.result_.success
    assert compare(B4.expected, estimator.theta_, rss=2 * estimator.result_.cost) == []
    assert estimator.theta_[2] == -2.0
    assert re.search(r"\bc0\b", estimator.result_.message)
    assert not re.search(r"\b(m|c)\b[^.]*bound", estimator.result_.message)
    expected = B4_STD_ABSOLUTE if absolute else B4_STD
    assert np.allclose(estimator.stderr_[:2], expected, rtol=1e-4, atol=0)
    assert np.allclose(standard_errors(estimator.covariance_[:2, :2]), expected, rtol=1e-4, atol=0)
    assert np.isnan(estimator.stderr_[2])
    assert np.isnan(estimator.covariance_[2]).all()
    assert np.isnan(estimator.covariance_[:, 2]).all()


@pytest.mark.parametrize("absolute", [False, True], ids=["relative", "absolute"])
@pytest.mark.parametrize("form", FORMS)
def test_curve_fit_holds_the_active_parameter_fixed(form: str, absolute: bool) -> None:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        popt, pcov = curve_fit_of(B4, form, absolute_sigma=absolute)
    assert compare(B4.expected, popt) == []
    assert popt[2] == -2.0
    expected = B4_STD_ABSOLUTE if absolute else B4_STD
    assert np.allclose(standard_errors(pcov[:2, :2]), expected, rtol=1e-4, atol=0)
    assert not np.isfinite(pcov[2, 2])


@pytest.mark.parametrize("solver", ["qr", "cholesky", "dual", "cg"])
def test_every_solver_ends_on_the_bound(solver: str) -> None:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        estimator = fit(B4, "torch", solver=solver)
    assert estimator.result_.success
    assert compare(B4.expected, estimator.theta_, rss=2 * estimator.result_.cost) == []
    assert estimator.theta_[2] == -2.0
    assert re.search(r"\bc0\b", estimator.result_.message)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("start", [[1.0, -1.0], [1.0, 0.0], [-3.0, -5.0]])
def test_an_upper_bound_of_zero_can_be_active(start: list[float], form: str) -> None:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        estimator = fit(B5_HITS_ZERO, form, p0=start)
        popt, _ = curve_fit_of(B5_HITS_ZERO, form, p0=start)
    for theta in (estimator.theta_, popt):
        assert theta[0] == pytest.approx(B5_HITS_ZERO.expected.params[0], rel=1e-7)
        assert theta[1] == 0.0
    assert estimator.result_.success
    assert re.search(r"\bb\b", estimator.result_.message)
    of_a_mean = np.std(B5_HITS_ZERO.y, ddof=1) / np.sqrt(len(B5.y))
    assert estimator.stderr_[0] == pytest.approx(of_a_mean, rel=1e-6)
    assert np.isnan(estimator.stderr_[1])


# B5: equal, crossed and violated bounds.


@pytest.mark.parametrize("form", FORMS)
def test_equal_bounds_fix_a_parameter(form: str) -> None:
    estimator = fit(B5_EQUAL, form)
    popt, pcov = curve_fit_of(B5_EQUAL, form)
    residual = estimator.predict(as_column(B5.x)) - B5.y
    of_a_mean = np.sqrt(residual @ residual / 5 / 6)  # six points, one parameter
    assert compare(B5_EQUAL.expected, estimator.theta_) == []
    assert compare(B5_EQUAL.expected, popt) == []
    assert estimator.theta_[1] == popt[1] == -1.5
    assert np.allclose(estimator.stderr_, [of_a_mean, 0.0], rtol=1e-6, atol=0)
    assert np.allclose(pcov, [[of_a_mean**2, 0.0], [0.0, 0.0]], rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_a_start_outside_names_the_parameter_and_the_numbers(form: str) -> None:
    for call in (lambda: fit(B5, form, p0=[1.0, 3.0]), lambda: curve_fit_of(B5, form, p0=[1.0, 3.0])):
        text = refusal(call)
        assert "p0" in text
        assert re.search(r"\bb\b", text)
        assert "3" in text
        assert re.search(r"-5(\.0)?\b.*\b0(\.0)?\b", text)


@pytest.mark.parametrize("form", FORMS)
def test_crossed_bounds_name_the_parameter(form: str) -> None:
    crossed = ([-np.inf, 0.0], [np.inf, -5.0])
    for call in (lambda: fit(B5, form, bounds=crossed), lambda: curve_fit_of(B5, form, bounds=crossed)):
        text = refusal(call)
        assert "bounds" in text
        assert re.search(r"\bb\b", text)


def test_the_start_of_curve_fit_without_p0_lies_inside_the_bounds() -> None:
    popt, _ = curve_fit(B5.numpy_model, B5.x, B5.y, bounds=B5.bounds)  # SciPy starts inside, not at 1
    assert compare(B5.expected, popt) == []


# G4: fewer points than parameters.


@pytest.mark.parametrize("form", FORMS)
def test_too_few_points_within_bounds_have_no_covariance(form: str) -> None:
    with pytest.warns(CovarianceWarning):
        estimator = fit(G4_BOUNDED, form)
    assert compare(G4_BOUNDED.expected, rss=2 * estimator.result_.cost) == []
    assert_inside(G4_BOUNDED, estimator.theta_)
    assert np.all(np.isfinite(estimator.theta_))
    assert not np.any(np.isfinite(estimator.stderr_))
    assert not np.any(np.isfinite(estimator.covariance_.diagonal()))


@pytest.mark.parametrize("form", FORMS)
def test_curve_fit_of_too_few_points_within_bounds(form: str) -> None:
    with pytest.warns((OptimizeWarning, CovarianceWarning)):
        popt, pcov = curve_fit_of(G4_BOUNDED, form)
    assert_inside(G4_BOUNDED, popt)
    assert np.all(np.isfinite(popt))
    assert not np.any(np.isfinite(pcov.diagonal()))
