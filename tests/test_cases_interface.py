"""Hand over what users hand over (S, L, K) and check every sentence those cases demand.

That each case has its right answer is checked in test_cases.py; here come shapes, containers, callables, size
and the scikit-learn protocol. Modules and residual functions have test_cases_modules.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from typing import Any

import cases
import cases_interface
import numpy as np
import pandas as pd
import pytest
import torch
from cases import compare
from cases_interface import (
    K1,
    K1_FOLD_PARAMS,
    K1_FOLD_R2,
    K1_FOLDS,
    K3,
    K3_SCALED_START,
    L3,
    S1,
    S2,
    S2_X_INDEX,
    S2_Y_INDEX,
    S4,
    S5,
    DecayModule,
    GrowthModule,
    LinearModule,
)
from sklearn.base import clone
from sklearn.exceptions import DataConversionWarning, NotFittedError
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler

from lmfit_gpu import LMRegressor, curve_fit

# A trial point may overflow in the user's function, and numpy says so from the line of that function.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::RuntimeWarning:{module.__name__}") for module in (cases, cases_interface)
]

FORMS = ["numpy", "torch"]


def flat(values: Any) -> Any:
    return values


def column(values: Any) -> Any:
    return values[:, None]


# S1: columns.

SHAPES = [flat, column]


def column_line(x: Any, a: Any, b: Any) -> Any:
    return (a + b * x).reshape(-1, 1)  # an array or a tensor


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape_y", SHAPES)
@pytest.mark.parametrize("shape_x", SHAPES)
def test_curve_fit_takes_columns(shape_x: Any, shape_y: Any, form: str) -> None:
    popt, pcov = curve_fit(S1.model(form), shape_x(S1.x), shape_y(S1.y), p0=S1.p0)
    assert compare(S1.expected, popt, np.sqrt(pcov.diagonal())) == []
    popt, pcov = curve_fit(column_line, shape_x(S1.x), shape_y(S1.y), p0=S1.p0)
    assert compare(S1.expected, popt, np.sqrt(pcov.diagonal())) == []


@pytest.mark.parametrize("shape_y", SHAPES)
@pytest.mark.parametrize("x_format", ["auto", "columns", "1d"])
@pytest.mark.parametrize("model", [S1.numpy_model, S1.torch_model, column_line])
def test_regressor_takes_columns(model: Any, x_format: str, shape_y: Any) -> None:
    X, y = S1.x[:, None], shape_y(S1.y)
    expected = y.ndim == 2 and model is not column_line and x_format != "columns"  # of a column, the line is one
    with pytest.warns(DataConversionWarning, match="column-vector") if expected else contextlib.nullcontext():
        estimator = LMRegressor(model, p0=S1.p0, x_format=x_format).fit(X, y)
    assert compare(S1.expected, estimator.theta_, estimator.stderr_, 2 * estimator.result_.cost) == []
    assert estimator.result_.n_residuals == len(S1.y)  # not (n, n)
    assert estimator.predict(X).shape == y.shape


@pytest.mark.parametrize("shape_y", SHAPES)
def test_module_that_returns_a_column(shape_y: Any) -> None:
    X, y = S1.x[:, None], shape_y(S1.y)
    estimator = LMRegressor(LinearModule()).fit(X, y)
    slope_then_intercept = estimator.theta_, estimator.stderr_
    assert compare(S1.expected, *(values[::-1] for values in slope_then_intercept)) == []
    assert estimator.result_.n_residuals == len(S1.y)
    assert estimator.predict(X).shape == y.shape


@pytest.mark.parametrize("shape_y", SHAPES)
def test_module_that_returns_one_value_a_row(shape_y: Any) -> None:
    X, y = S1.x[:, None], shape_y(S1.y)
    estimator = LMRegressor(torch.nn.Sequential(LinearModule(), torch.nn.Flatten(0))).fit(X, y)
    slope_then_intercept = estimator.theta_, estimator.stderr_
    assert compare(S1.expected, *(values[::-1] for values in slope_then_intercept)) == []
    assert estimator.predict(X).shape == y.shape


def test_flat_X_is_refused_with_both_remedies() -> None:
    with pytest.raises(ValueError, match=r"x\[:, None\]") as refusal:
        LMRegressor(S1.numpy_model, p0=S1.p0).fit(S1.x, S1.y)
    assert "curve_fit" in str(refusal.value)


@pytest.mark.parametrize("form", FORMS)
def test_model_output_of_another_size_is_refused(form: str) -> None:
    def one_short(x: Any, a: Any, b: Any) -> Any:
        return S1.model(form)(x, a, b)[:-1]

    with pytest.raises(ValueError):
        LMRegressor(one_short, p0=S1.p0).fit(S1.x[:, None], S1.y)
    with pytest.raises(ValueError):
        curve_fit(one_short, S1.x, S1.y, p0=S1.p0)


def test_module_output_of_another_size_is_refused() -> None:
    module = torch.nn.Linear(1, 2).double()
    with pytest.raises(ValueError, match=r"model: returned shape \(12, 2\)"):
        LMRegressor(module).fit(S1.x[:, None], S1.y)


# S2: containers.

S2_FRAME, S2_SERIES = pd.DataFrame({"t": S2.x}, index=S2_X_INDEX), pd.Series(S2.y, index=S2_Y_INDEX)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_pandas_data_are_matched_by_position(form: str) -> None:
    estimator = LMRegressor(S2.model(form), p0=S2.p0).fit(S2_FRAME, S2_SERIES)
    assert compare(S2.expected, estimator.theta_, estimator.stderr_) == []
    assert list(estimator.feature_names_in_) == ["t"]
    assert estimator.predict(S2_FRAME).shape == S2.y.shape


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("y", [S2_SERIES, S2.y.tolist(), tuple(S2.y)], ids=["Series", "list", "tuple"])
@pytest.mark.parametrize(
    "x", [S2_FRAME, S2_FRAME["t"], S2.x.tolist(), tuple(S2.x)], ids=["DataFrame", "Series", "list", "tuple"]
)
def test_curve_fit_takes_every_container(x: Any, y: Any, form: str) -> None:
    popt, pcov = curve_fit(S2.model(form), x, y, p0=S2.p0)
    assert compare(S2.expected, popt, np.sqrt(pcov.diagonal())) == []


S2_TARGETS = {
    "Series": S2_SERIES,
    "DataFrame": S2_SERIES.to_frame("y"),
    "list": S2.y.tolist(),
    "tuple": tuple(S2.y),
}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.DataConversionWarning")  # for a function and a column
@pytest.mark.parametrize("y", S2_TARGETS.values(), ids=S2_TARGETS)
@pytest.mark.parametrize(
    "X", [S2_FRAME, S2.x[:, None].tolist(), tuple((t,) for t in S2.x)], ids=["DataFrame", "list", "tuple"]
)
@pytest.mark.parametrize("kind", [*FORMS, "module"])
def test_regressor_takes_every_container(X: Any, y: Any, kind: str) -> None:
    options = {} if kind == "module" else {"p0": S2.p0}
    estimator = LMRegressor(LinearModule() if kind == "module" else S2.model(kind), **options).fit(X, y)
    first = slice(None, None, -1) if kind == "module" else slice(None)  # the module has its slope first
    assert compare(S2.expected, estimator.theta_[first], estimator.stderr_[first]) == []
    assert estimator.predict(X).shape == np.shape(y)


@pytest.mark.parametrize("x", [S2_FRAME["t"], S2.x.tolist(), tuple(S2.x)], ids=["Series", "list", "tuple"])
def test_regressor_refuses_every_flat_container(x: Any) -> None:
    with pytest.raises(ValueError, match="2D array, got 1D array"):
        LMRegressor(S2.numpy_model, p0=S2.p0).fit(x, S2.y)


# S4: complex data.


@pytest.mark.parametrize("form", FORMS)
def test_curve_fit_uses_both_parts_of_complex_data(form: str) -> None:
    popt, pcov = curve_fit(S4.model(form), S4.x, S4.y, p0=S4.p0)
    distance = S4.numpy_model(S4.x, *popt) - S4.y
    assert compare(S4.expected, popt, np.sqrt(pcov.diagonal()), np.sum(np.abs(distance) ** 2)) == []


@pytest.mark.parametrize("form", FORMS)
def test_regressor_refuses_complex_data(form: str) -> None:
    with pytest.raises(ValueError, match="Complex data not supported"):
        LMRegressor(S4.model(form), p0=S4.p0).fit(S4.x[:, None], S4.y)


# S5: kinds of callables.


class LineObject:
    """The line of S5 as a callable object and as a bound method."""

    def __call__(self, x: Any, m: Any, b: Any) -> Any:
        return m * x + b

    def method(self, x: Any, m: Any, b: Any) -> Any:
        return m * x + b


def power_line(x: Any, m: Any, b: Any, power: int = 1) -> Any:
    return m * x**power + b


CALLABLES = {
    "function": S5.numpy_model,
    "torch-function": S5.torch_model,
    "lambda": lambda x, m, b: m * x + b,
    "varargs": lambda x, *p: p[0] * x + p[1],
    "theta": lambda x, theta: theta[0] * x + theta[1],
    "instance": LineObject(),
    "bound-method": LineObject().method,
    "default-argument": power_line,
    "partial": functools.partial(power_line, power=1),
    "torch-compile": torch.compile(S5.torch_model, backend="eager"),
}


@pytest.mark.parametrize("model", CALLABLES.values(), ids=CALLABLES)
def test_every_kind_of_callable_is_a_model(model: Any) -> None:
    popt, pcov = curve_fit(model, S5.x, S5.y, p0=S5.p0)
    assert compare(S5.expected, popt, np.sqrt(pcov.diagonal())) == []
    estimator = LMRegressor(model, p0=S5.p0).fit(S5.x[:, None], S5.y)
    assert compare(S5.expected, estimator.theta_, estimator.stderr_) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::DeprecationWarning:torch.jit._script")
def test_scripted_function_is_a_model() -> None:
    def scripted_line(x: torch.Tensor, m: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return m * x + b

    scripted_line.__annotations__ = dict.fromkeys(["x", "m", "b", "return"], torch.Tensor)  # TorchScript reads objects
    test_every_kind_of_callable_is_a_model(torch.jit.script(scripted_line))


def test_unreadable_signature_needs_p0() -> None:
    with pytest.raises(ValueError, match="p0"):
        curve_fit(CALLABLES["varargs"], S5.x, S5.y)
    with pytest.raises(ValueError, match="p0"):
        LMRegressor(CALLABLES["varargs"]).fit(S5.x[:, None], S5.y)


# L3: size.


@pytest.mark.parametrize("form", FORMS)
def test_chunks_do_not_change_the_answer(form: str) -> None:
    X = L3.x[:, None]
    whole = LMRegressor(L3.model(form), p0=L3.p0).fit(X, L3.y)
    chunked = LMRegressor(L3.model(form), p0=L3.p0, chunk_rows=65536).fit(X, L3.y)
    assert compare(L3.expected, chunked.theta_, chunked.stderr_, 2 * chunked.result_.cost) == []
    assert np.allclose(chunked.theta_, whole.theta_, rtol=1e-7, atol=0)


# K1: refit, clone, folds, copies.

K1_X = K1.x[:, None]
K1_ESTIMATORS = {
    "numpy": lambda: LMRegressor(K1.numpy_model, p0=K1.p0),
    "torch": lambda: LMRegressor(K1.torch_model, p0=K1.p0),
    "module": lambda: LMRegressor(DecayModule()),
}
k1_estimators = pytest.mark.parametrize("make", K1_ESTIMATORS.values(), ids=K1_ESTIMATORS)


@k1_estimators
def test_refit_starts_afresh(make: Any) -> None:
    estimator = make().fit(K1_X, K1.y)
    first = estimator.theta_.copy(), estimator.n_iter_
    estimator.fit(K1_X, K1.y)
    assert compare(K1.expected, estimator.theta_, estimator.stderr_) == []
    assert np.array_equal(estimator.theta_, first[0])
    assert estimator.n_iter_ == first[1]


def test_module_given_to_the_constructor_is_left_alone() -> None:
    module = DecayModule()
    estimator = LMRegressor(module).fit(K1_X, K1.y)
    assert module.a.item() == module.b.item() == 1.0
    assert module.a.grad is None
    assert estimator.get_params()["model"] is module
    assert estimator.module_ is not module
    assert [estimator.module_.a.item(), estimator.module_.b.item()] == list(estimator.theta_)
    again = clone(estimator).fit(K1_X, K1.y)
    assert np.array_equal(again.theta_, estimator.theta_)
    assert again.n_iter_ == estimator.n_iter_


@k1_estimators
def test_folds_do_not_see_earlier_fits(make: Any) -> None:
    estimator = make().fit(K1_X, K1.y)
    for (train, _), params in zip(K1_FOLDS, K1_FOLD_PARAMS, strict=True):
        for fold in (
            clone(estimator),
            estimator,
        ):  # a fresh clone, and the very estimator that was fitted before
            fold.fit(K1_X[train], K1.y[train])
            assert np.allclose(fold.theta_, params, rtol=K1.expected.rtol, atol=0)
    assert cross_val_score(estimator, K1_X, K1.y, cv=K1_FOLDS) == pytest.approx(K1_FOLD_R2, rel=1e-6)


@k1_estimators
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda fitted: pickle.loads(pickle.dumps(fitted))])
def test_copies_of_a_fitted_estimator_predict_the_same(make: Any, duplicate: Any) -> None:
    estimator = make().fit(K1_X, K1.y)
    assert np.array_equal(duplicate(estimator).predict(K1_X), estimator.predict(K1_X))


# K3: a pipeline with a scaler.

K3_X = K3.x[:, None]


def scaled(model: Any, **options: Any) -> Pipeline:
    return Pipeline([("scaler", StandardScaler()), ("lm", LMRegressor(model, **options))])


@pytest.mark.parametrize("form", FORMS)
def test_pipeline_predicts_like_the_fit_without_scaling(form: str) -> None:
    pipeline = scaled(K3.model(form), p0=K3_SCALED_START).fit(K3_X, K3.y)
    predicted = pipeline.predict(K3_X)
    assert compare(K3.expected, predict=predicted) == []
    assert pipeline.score(K3_X, K3.y) == pytest.approx(r2_score(K3.y, predicted), rel=1e-12)


def test_float32_module_in_a_pipeline() -> None:
    predicted = scaled(GrowthModule()).fit(K3_X, K3.y).predict(K3_X)
    assert np.allclose(predicted, K3.expected.predict, rtol=1e-4, atol=0)
    assert predicted.shape == K3.y.shape
    assert predicted.dtype == np.float64  # that of y, whatever the module computes in


@pytest.mark.parametrize("form", FORMS)
def test_start_is_reached_through_the_pipeline(form: str) -> None:
    pipeline = scaled(K3.model(form), p0=[1.0, 1.0]).set_params(lm__p0=K3_SCALED_START)
    assert compare(K3.expected, predict=pipeline.fit(K3_X, K3.y).predict(K3_X)) == []
    folds = KFold(4, shuffle=True, random_state=0)
    search = GridSearchCV(pipeline, {"lm__p0": [K3_SCALED_START, [10.0, -1.0]]}, cv=folds, error_score="raise")
    assert compare(K3.expected, predict=search.fit(K3_X, K3.y).predict(K3_X)) == []


@pytest.mark.parametrize("form", FORMS)
def test_bounds_are_reached_through_the_pipeline(form: str) -> None:
    pipeline = scaled(K3.model(form), p0=K3_SCALED_START)
    wide, narrow = ([0.0, -2.0], [np.inf, 0.0]), ([0.0, -2.0], [5.0, 0.0])
    pipeline.set_params(lm__bounds=wide)
    assert compare(K3.expected, predict=pipeline.fit(K3_X, K3.y).predict(K3_X)) == []
    pipeline.set_params(lm__p0=[5.0, -0.5])  # within both
    folds = KFold(4, shuffle=True, random_state=0)
    search = GridSearchCV(pipeline, {"lm__bounds": [narrow, wide]}, cv=folds, error_score="raise").fit(K3_X, K3.y)
    assert search.best_params_ == {"lm__bounds": wide}
    assert compare(K3.expected, predict=search.predict(K3_X)) == []
    narrowly = search.estimator.set_params(lm__bounds=narrow).fit(K3_X, K3.y)
    assert narrowly[-1].theta_[0] == 5.0


@pytest.mark.parametrize("form", FORMS)
def test_sample_weight_goes_through_the_pipeline(form: str) -> None:
    times = np.tile([1, 2, 0, 3], 4)
    weighted = scaled(K3.model(form), p0=K3_SCALED_START).fit(K3_X, K3.y, lm__sample_weight=times)
    scaler = weighted["scaler"]  # of all rows: a weight does not reach it
    repeated = np.repeat(scaler.transform(K3_X), times, axis=0), np.repeat(K3.y, times)
    oracle = LMRegressor(K3.model(form), p0=K3_SCALED_START).fit(*repeated)
    np.testing.assert_allclose(weighted[-1].theta_, oracle.theta_, rtol=1e-7)
    np.testing.assert_allclose(weighted[-1].stderr_, oracle.stderr_, rtol=1e-5)


def test_predict_checks_columns_and_fit() -> None:
    for estimator in (LMRegressor(K3.numpy_model, p0=K3.p0), scaled(K3.numpy_model, p0=K3_SCALED_START)):
        with pytest.raises(NotFittedError):
            estimator.predict(K3_X)
        estimator.fit(K3_X, K3.y)
        assert estimator.n_features_in_ == 1
        with pytest.raises(ValueError, match="features"):
            estimator.predict(np.hstack([K3_X, K3_X]))
