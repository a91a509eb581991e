"""Fit the cases with errors of the data or gaps in them (W1, W3, W4, G3, G6, N4) and check every sentence they demand.

What sample_weight and sigma mean is checked against what they stand for: a weight k is a row k times, a weight 0 a row
that is not there, sigma a residual divided by it.
"""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import cases
import cases_interface
import cases_numerical
import cases_weights
import numpy as np
import pandas as pd
import pytest
import torch
from case_fits import (
    as_column,
    assert_curve_fit_right,
    assert_regressor_right,
    curve_fit_of,
    fit,
    standard_errors,
)
from cases import Case, compare
from cases_interface import K3, K3_SCALED_START
from cases_weights import (
    G3_ABSOLUTE,
    G6_ABSOLUTE,
    N4,
    N4_BAD_ROW_OF_X,
    N4_BAD_ROWS_OF_Y,
    N4_KEEP,
    W1,
    W3,
    W4,
    W4_BAD_SIGMA,
)
from sklearn.exceptions import DataConversionWarning
from sklearn.model_selection import GridSearchCV, KFold
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler

from lmfit_gpu import LMRegressor, curve_fit

# A trial point may overflow in the user's function, and numpy says so from the line of that function.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::RuntimeWarning:{module.__name__}")
    for module in (cases, cases_interface, cases_numerical, cases_weights)
]

FORMS = ["numpy", "torch"]

WEIGHTED = [
    pytest.param(variant, form, id=f"{case.name}-{label}-{form}")
    for case in (W1, W4, G3_ABSOLUTE, G6_ABSOLUTE)
    for label, variant in case.each_variant()
    for form in FORMS
]


def refusal(call: Any) -> str:
    """Return the text of the ValueError that the call raises."""
    with pytest.raises(ValueError, match=r"\w") as caught:
        call()
    return str(caught.value)


def assert_same_fit(estimator: LMRegressor, other: LMRegressor) -> None:
    """Check that two fits agree in parameters, errors, cost and degrees of freedom."""
    assert np.allclose(estimator.theta_, other.theta_, rtol=1e-7, atol=0)
    assert np.allclose(estimator.stderr_, other.stderr_, rtol=1e-6, atol=0)
    assert estimator.result_.cost == pytest.approx(other.result_.cost, rel=1e-9)
    assert estimator.result_.dof == other.result_.dof


# sigma.


@pytest.mark.parametrize(("case", "form"), WEIGHTED)
def test_regressor_with_sigma_is_right(case: Case, form: str) -> None:
    assert_regressor_right(case, form)


@pytest.mark.parametrize(("case", "form"), WEIGHTED)
def test_curve_fit_with_sigma_is_right(case: Case, form: str) -> None:
    assert_curve_fit_right(case, form)


@pytest.mark.parametrize("solver", ["qr", "cholesky", "dual", "cg"])
@pytest.mark.parametrize("label", ["base", "relative"])
def test_every_solver_divides_by_sigma_once(label: str, solver: str) -> None:
    assert_regressor_right(dict(W1.each_variant())[label], "torch", solver=solver)


@pytest.mark.parametrize("container", [list, pd.Series, torch.as_tensor, as_column], ids=lambda kind: kind.__name__)
def test_sigma_comes_in_every_container(container: Any) -> None:
    case = replace(W1, y=W1.y[:, None]) if container is as_column else W1
    with pytest.warns(DataConversionWarning) if container is as_column else nullcontext():
        estimator = fit(case, "numpy", sigma=container(W1.sigma))
    assert compare(W1.expected, estimator.theta_, estimator.stderr_, 2 * estimator.result_.cost) == []


@pytest.mark.parametrize("form", FORMS)
def test_absolute_sigma_needs_sigma(form: str) -> None:
    assert "sigma" in refusal(lambda: fit(W1, form, sigma=None))
    with pytest.warns(UserWarning, match="absolute_sigma=True without sigma"):  # SciPy's function takes it in silence
        curve_fit_of(W1, form, sigma=None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sigma", W4_BAD_SIGMA.values(), ids=W4_BAD_SIGMA)
@pytest.mark.parametrize("absolute", [True, False])
def test_bad_sigma_is_named(sigma: Any, form: str, absolute: bool) -> None:
    assert "sigma" in refusal(lambda: fit(W4, form, sigma=sigma, absolute_sigma=absolute))
    assert "sigma" in refusal(lambda: curve_fit_of(W4, form, sigma=sigma, absolute_sigma=absolute))


@pytest.mark.parametrize("solver", ["qr", "cholesky", "dual", "cg"])
def test_absolute_errors_need_no_degree_of_freedom(solver: str) -> None:
    assert_regressor_right(G3_ABSOLUTE, "torch", solver=solver)
    assert_regressor_right(G6_ABSOLUTE, "torch", solver=solver)


# A full covariance matrix.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("label", ["base", "relative"])
def test_correlated_errors_are_whitened(label: str, form: str) -> None:
    assert_curve_fit_right(dict(W3.each_variant())[label], form)


@pytest.mark.parametrize("form", FORMS)
def test_a_diagonal_matrix_is_the_vector_of_its_roots(form: str) -> None:
    popt, pcov = curve_fit_of(W1, form, sigma=np.diag(W1.sigma**2))
    assert compare(W1.expected, popt, standard_errors(pcov)) == []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "matrix",
    [-np.eye(15), np.ones((15, 15)), np.zeros((15, 15)), np.full((15, 15), np.nan), np.eye(14), np.ones((15, 2))],
    ids=["negative", "singular", "zero", "nan", "too small", "not square"],
)
def test_a_matrix_that_is_no_covariance_is_refused(matrix: Any, form: str) -> None:
    assert "sigma" in refusal(lambda: curve_fit_of(W3, form, sigma=matrix))


def test_the_regressor_takes_no_matrix() -> None:
    assert "sigma" in refusal(lambda: fit(W3, "numpy"))


# sample_weight.

W4_WEIGHT = np.array([1, 2, 0, 3, 1, 1, 0, 2])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("with_sigma", [False, True])
def test_a_weight_is_the_number_of_times_a_row_is_there(form: str, with_sigma: bool) -> None:
    sigma = np.linspace(0.2, 0.9, 8) if with_sigma else None
    options = {"absolute_sigma": False}
    repeated = np.repeat(np.arange(8), W4_WEIGHT)
    weighted = fit(W4, form, sigma=sigma, sample_weight=W4_WEIGHT, **options)
    rows = replace(W4, x=W4.x[repeated], y=W4.y[repeated])
    copied = fit(rows, form, sigma=None if sigma is None else sigma[repeated], **options)
    assert weighted.result_.dof == 10 - 2
    assert_same_fit(weighted, copied)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_weight_zero_is_not_there(form: str) -> None:
    y = W4.y.copy()
    y[W4_WEIGHT == 0] = 1e6
    present = W4_WEIGHT > 0
    weighted = fit(replace(W4, y=y), form, sigma=None, sample_weight=present, absolute_sigma=False)
    rows = replace(W4, x=W4.x[present], y=W4.y[present])
    assert_same_fit(weighted, fit(rows, form, sigma=None, absolute_sigma=False))


def test_weights_that_are_not_whole_numbers_point_to_sigma() -> None:
    with pytest.warns(UserWarning, match="sigma") as caught:
        fit(W1, "numpy", sigma=None, absolute_sigma=False, sample_weight=(1e-7 / W1.sigma) ** 2)
    assert any("sample_weight" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["nan", "inf", "negative", "wrong length"])
def test_bad_sample_weight_is_named(kind: str, form: str) -> None:
    weight = 2 * W4_BAD_SIGMA[kind]
    text = refusal(lambda: fit(W4, form, sigma=None, absolute_sigma=False, sample_weight=weight))
    assert "sample_weight" in text


def test_weights_and_bounds_go_through_a_pipeline() -> None:
    X = K3.x[:, None]
    lm = LMRegressor(K3.numpy_model, p0=K3_SCALED_START)
    pipeline = Pipeline([("scaler", StandardScaler()), ("lm", lm)])
    pipeline.fit(X, K3.y, lm__sample_weight=np.ones(len(X)))
    assert compare(K3.expected, predict=pipeline.predict(X)) == []
    grid = {"lm__bounds": [{"a": (0.0, 15.0)}, {"a": (0.0, 100.0)}], "lm__p0": [[10.0, -0.5]]}
    folds = KFold(4, shuffle=True, random_state=0)
    with warnings.catch_warnings():  # the first bounds are active
        warnings.simplefilter("ignore", UserWarning)
        search = GridSearchCV(pipeline, grid, cv=folds, error_score="raise").fit(X, K3.y)
    assert search.best_params_["lm__bounds"] == {"a": (0.0, 100.0)}
    assert compare(K3.expected, predict=search.predict(X)) == []


# N4: NaN and inf in the data.


@pytest.mark.parametrize("form", FORMS)
def test_values_that_are_not_finite_are_refused_by_default(form: str) -> None:
    text = refusal(lambda: fit(N4, form))
    assert re.search(r"NaN|inf", text)
    assert "X" in text or "y" in text
    assert any(re.search(rf"\b{row}\b", text) for row in (*N4_BAD_ROWS_OF_Y, N4_BAD_ROW_OF_X))
    text = refusal(lambda: curve_fit_of(N4, form))
    assert re.search(r"(?i)nan|inf", text)


@pytest.mark.parametrize("form", FORMS)
def test_the_refusal_names_the_rows_of_the_argument(form: str) -> None:
    in_y = refusal(lambda: fit(replace(N4, x=np.linspace(0, 3, 16)), form))
    assert re.search(r"\by\b", in_y)
    assert all(re.search(rf"\b{row}\b", in_y) for row in N4_BAD_ROWS_OF_Y)
    in_x = refusal(lambda: fit(replace(N4, y=np.nan_to_num(N4.y, posinf=0.0)), form))
    assert re.search(r"\bX\b", in_x)
    assert re.search(rf"\b{N4_BAD_ROW_OF_X}\b", in_x)


@pytest.mark.parametrize("form", FORMS)
def test_omit_fits_the_finite_rows(form: str) -> None:
    estimator = assert_regressor_right(N4, form, nan_policy="omit")
    assert estimator.result_.dof == 10
    assert_curve_fit_right(N4, form, nan_policy="omit")


@pytest.mark.parametrize("form", FORMS)
def test_omit_leaves_out_rows_by_sigma_and_weight_too(form: str) -> None:
    clean = replace(N4, x=N4.x[N4_KEEP], y=N4.y[N4_KEEP])
    sigma = np.linspace(0.5, 2.0, 16)
    weight = np.arange(16.0) % 3
    expected = fit(clean, form, sigma=sigma[N4_KEEP], sample_weight=weight[N4_KEEP])
    gaps = [value.copy() for value in (N4.x, np.nan_to_num(N4.y, nan=2.0, posinf=2.0), sigma, weight)]
    gaps[2][[3, 11]], gaps[3][7] = np.nan, np.inf
    case = replace(N4, x=gaps[0], y=gaps[1])
    estimator = fit(case, form, sigma=gaps[2], sample_weight=gaps[3], nan_policy="omit")
    assert_same_fit(estimator, expected)


def test_omit_without_a_finite_row_is_refused() -> None:
    assert re.search(
        r"NaN|finite|omit", refusal(lambda: fit(replace(N4, y=np.full(16, np.nan)), "numpy", nan_policy="omit"))
    )


def test_omit_keeps_predictions_out_of_it() -> None:
    estimator = fit(N4, "numpy", nan_policy="omit")
    assert estimator.predict(as_column(N4.x[N4_KEEP])).shape == (12,)
    with pytest.raises(ValueError, match="NaN"):
        estimator.predict(as_column(N4.x))


@pytest.mark.parametrize("form", FORMS)
def test_masked_rows_are_ignored_or_refused(form: str) -> None:
    clean_x, filled = np.linspace(0, 3, 16), np.nan_to_num(N4.y, nan=1e3, posinf=1e3)
    masked = np.ma.masked_array(filled, mask=~N4_KEEP)
    for answer in (
        lambda: curve_fit(N4.model(form), clean_x, masked, p0=N4.p0)[0],
        lambda: LMRegressor(N4.model(form), p0=N4.p0).fit(clean_x[:, None], masked).theta_,
    ):
        try:
            theta = answer()
        except (ValueError, TypeError) as error:
            assert re.search(r"mask|\by\b.*\brows\b.*\b3\b", str(error))
        else:
            assert compare(N4.expected, theta) == []


def test_the_policy_is_one_of_two() -> None:
    assert "nan_policy" in refusal(lambda: fit(N4, "numpy", nan_policy="drop"))
    assert "nan_policy" in refusal(lambda: curve_fit_of(N4, "numpy", nan_policy="drop"))
