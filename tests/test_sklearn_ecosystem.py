"""LMRegressor inside scikit-learn's pipelines, meta-estimators and inspection tools.

The models are linear in their parameters, so that ordinary least squares, wrapped in the same way, is the oracle.
Searches over parameters have test_sklearn_searches.py.
"""

import functools

import numpy as np
import pandas as pd
import polars as pl
import pytest
import sklearn
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.ensemble import (
    AdaBoostRegressor,
    BaggingRegressor,
    StackingRegressor,
    VotingRegressor,
)
from sklearn.exceptions import UnsetMetadataPassedError
from sklearn.feature_selection import SequentialFeatureSelector
from sklearn.inspection import partial_dependence, permutation_importance
from sklearn.linear_model import RANSACRegressor, Ridge
from sklearn.metrics import r2_score
from sklearn.model_selection import KFold, cross_val_predict, cross_val_score, cross_validate, learning_curve
from sklearn.multioutput import MultiOutputRegressor, RegressorChain
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, PolynomialFeatures, StandardScaler

from lmfit_gpu import LMRegressor

N, CLOSE = 80, {"rtol": 1e-8, "atol": 1e-9}
_rng = np.random.default_rng(5)
X = _rng.normal(size=(N, 3))
Y = 1 + X @ [2.0, -1.0, 0.5] + 0.3 * _rng.normal(size=N)
Y2 = np.column_stack([Y, X @ [1.0, 1.0, -1.0] + 0.2 * _rng.normal(size=N)])
TIMES = np.arange(N) % 3  # frequencies, 0 among them
SIGMA = 0.5 + np.abs(X[:, 0])
# Ordinary least squares; with a random_state, as LMRegressor has: boosting draws a seed for every estimator with one.
ORACLE = Ridge(0.0, solver="svd")
FRAME = pd.DataFrame(X, columns=["a", "b", "c"])


def linear(X, theta):
    return theta[0] + X @ theta[1:]


def zeros(X, y):
    """A start for as many columns as there are: what p0 as a callable is for."""
    return np.zeros(X.shape[1] + 1)


class Affine(torch.nn.Module):
    def __init__(self, n_features_in_, n_outputs):
        super().__init__()
        self.layer = torch.nn.Linear(n_features_in_, n_outputs, dtype=torch.float64)

    def forward(self, X):
        return self.layer(X)


MODELS = {
    "function": LMRegressor(linear, p0=zeros, x_format="columns"),
    "factory": LMRegressor(Affine, random_state=0),
}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


# ---- pipelines


@every_model
def test_pipeline_of_scaler_and_powers(model):
    """The number of columns is known at fit only."""
    steps = StandardScaler(), PolynomialFeatures(2, include_bias=False)
    fitted, oracle = (make_pipeline(*steps, last).fit(X, Y) for last in (clone(model), clone(ORACLE)))
    assert fitted[-1].n_features_in_ == 9
    assert len(fitted[-1].theta_) == 10
    np.testing.assert_allclose(fitted.predict(X), oracle.predict(X), **CLOSE)
    assert fitted.score(X, Y) == pytest.approx(oracle.score(X, Y), abs=1e-9)


@every_model
@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_pipeline_of_frames(model, library):
    steps = make_pipeline(StandardScaler(), PolynomialFeatures(2, include_bias=False), clone(model))
    steps.set_output(transform=library)
    given = FRAME if library == "pandas" else pl.DataFrame(X, schema=["a", "b", "c"])
    steps.fit(given, Y)
    assert list(steps[-1].feature_names_in_) == list(steps[:-1].get_feature_names_out())
    arrays = make_pipeline(StandardScaler(), PolynomialFeatures(2, include_bias=False), clone(model)).fit(X, Y)
    np.testing.assert_allclose(steps.predict(given), arrays.predict(X), **CLOSE)


@every_model
def test_feature_union(model):
    union = FeatureUnion([("scaled", StandardScaler()), ("powers", PolynomialFeatures((2, 2), include_bias=False))])
    fitted, oracle = (make_pipeline(union, last).fit(X, Y) for last in (clone(model), clone(ORACLE)))
    np.testing.assert_allclose(fitted.predict(X), oracle.predict(X), **CLOSE)


@every_model
@pytest.mark.parametrize("library", ["default", "pandas"])
def test_columns_of_a_frame_with_categories(model, library):
    frame = FRAME.assign(group=pd.Categorical(np.array(["u", "v", "w"])[np.arange(N) % 3]))
    encoder = OneHotEncoder(drop="first", sparse_output=False)
    columns = ColumnTransformer([("numbers", StandardScaler(), ["a", "c"]), ("groups", encoder, ["group"])])
    columns.set_output(transform=library)
    fitted, oracle = (make_pipeline(columns, last).fit(frame, Y) for last in (clone(model), clone(ORACLE)))
    np.testing.assert_allclose(fitted.predict(frame), oracle.predict(frame), **CLOSE)


def test_sparse_columns_are_refused_with_the_remedy():
    frame = FRAME.assign(group=list("uv") * (N // 2))
    columns = ColumnTransformer([("groups", OneHotEncoder(), ["group"])], sparse_threshold=1.0)
    with pytest.raises(TypeError, match="toarray"):
        make_pipeline(columns, clone(MODELS["function"])).fit(frame, Y)


# ---- meta-estimators: each beside itself with least squares inside


def last_kept(base):
    """Drop columns that say little; what is fitted is the model on the rest."""
    return make_pipeline(SequentialFeatureSelector(base, n_features_to_select=2, cv=3), clone(base))


ENSEMBLES = {
    "bagging": lambda base: BaggingRegressor(base, 10, random_state=0),
    "bagging of columns": lambda base: BaggingRegressor(base, 10, max_features=2, random_state=0),
    "stacking": lambda base: StackingRegressor([("lm", base), ("ridge", Ridge(50))], final_estimator=clone(base)),
    "voting": lambda base: VotingRegressor([("lm", base), ("ridge", Ridge(50))], weights=[2, 1]),
    "boosting": lambda base: AdaBoostRegressor(base, n_estimators=3, random_state=0),
    "consensus": lambda base: RANSACRegressor(base, min_samples=10, random_state=0),
    "selection": last_kept,
    "scaled target": lambda base: TransformedTargetRegressor(base, transformer=MinMaxScaler()),
}


@every_model
@pytest.mark.parametrize("wrap", ENSEMBLES.values(), ids=ENSEMBLES)
def test_meta_estimators(wrap, model):
    fitted, oracle = (wrap(base).fit(X, Y) for base in (clone(model), clone(ORACLE)))
    np.testing.assert_allclose(fitted.predict(X), oracle.predict(X), **CLOSE)


SEVERAL_OUTPUTS = {
    "one a column": MultiOutputRegressor,
    "chain": functools.partial(RegressorChain, order=[1, 0]),
    "chain of folds": functools.partial(RegressorChain, order=[1, 0], cv=3),
}


@every_model
@pytest.mark.parametrize("wrap", SEVERAL_OUTPUTS.values(), ids=SEVERAL_OUTPUTS)
def test_several_outputs(wrap, model):
    fitted, oracle = (wrap(base).fit(X, Y2) for base in (clone(model), clone(ORACLE)))
    np.testing.assert_allclose(fitted.predict(X), oracle.predict(X), **CLOSE)


def test_one_module_of_several_outputs():
    fitted = clone(MODELS["factory"]).fit(X, Y2)
    np.testing.assert_allclose(fitted.predict(X), clone(ORACLE).fit(X, Y2).predict(X), **CLOSE)
    assert fitted.score(X, Y2) == pytest.approx(r2_score(Y2, clone(ORACLE).fit(X, Y2).predict(X)), abs=1e-9)


@every_model
@pytest.mark.parametrize("wrap", [ENSEMBLES["bagging"], MultiOutputRegressor], ids=["bagging", "one a column"])
def test_meta_estimators_pass_weights_on(wrap, model):
    target = Y2 if wrap is MultiOutputRegressor else Y
    fitted, oracle = (wrap(base).fit(X, target, sample_weight=TIMES) for base in (clone(model), clone(ORACLE)))
    np.testing.assert_allclose(fitted.predict(X), oracle.predict(X), **CLOSE)


@every_model
def test_logarithm_of_the_target(model):
    """A line through log y, and predictions in the units of y."""
    target = np.exp(Y)
    wrapped = TransformedTargetRegressor(clone(model), func=np.log, inverse_func=np.exp).fit(X, target)
    np.testing.assert_allclose(wrapped.predict(X), np.exp(clone(ORACLE).fit(X, Y).predict(X)), rtol=1e-8)
    assert wrapped.regressor_.result_.success


# ---- folds


@every_model
def test_cross_val_predict_is_what_folds_by_hand_give(model):
    folds = KFold(5, shuffle=True, random_state=1)
    by_hand = np.empty(N)
    for train, test in folds.split(X):
        by_hand[test] = clone(model).fit(X[train], Y[train]).predict(X[test])
    assert np.array_equal(cross_val_predict(clone(model), X, Y, cv=folds), by_hand)
    np.testing.assert_allclose(by_hand, cross_val_predict(clone(ORACLE), X, Y, cv=folds), **CLOSE)


@every_model
def test_cross_validate_returns_the_estimators(model):
    folds = KFold(4)
    found = cross_validate(clone(model), X, Y, cv=folds, return_estimator=True, return_train_score=True)
    oracle = cross_validate(clone(ORACLE), X, Y, cv=folds, return_train_score=True)
    for part in ("test_score", "train_score"):
        np.testing.assert_allclose(found[part], oracle[part], **CLOSE)
    for fitted, (train, _) in zip(found["estimator"], folds.split(X), strict=True):
        assert fitted.result_.n_residuals == len(train)
        assert fitted.score(X[train], Y[train]) == pytest.approx(r2_score(Y[train], fitted.predict(X[train])))


def test_one_estimator_used_for_many_fits_keeps_nothing():
    """A shared estimator object would hand the end of one fold to the next."""
    template = clone(MODELS["factory"])
    first = cross_val_score(template, X, Y, cv=3)
    template.fit(X[:20], Y[:20])
    assert np.array_equal(cross_val_score(template, X, Y, cv=3), first)


# ---- inspection


@every_model
def test_permutation_importance(model):
    fitted, oracle = (base.fit(X, Y) for base in (clone(model), clone(ORACLE)))
    found, expected = (permutation_importance(each, X, Y, random_state=0, n_repeats=3) for each in (fitted, oracle))
    np.testing.assert_allclose(found.importances, expected.importances, **CLOSE)


@every_model
def test_learning_curve(model):
    sizes = [20, 40, 60]
    found, expected = (
        learning_curve(base, X, Y, train_sizes=sizes, cv=KFold(4)) for base in (clone(model), clone(ORACLE))
    )
    for ours, oracle in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, oracle, **CLOSE)


@every_model
def test_partial_dependence(model):
    fitted, oracle = clone(model).fit(FRAME, Y), clone(ORACLE).fit(FRAME, Y)
    found, expected = (partial_dependence(each, FRAME, ["b"], kind="both", method="brute") for each in (fitted, oracle))
    for part in ("average", "individual"):
        np.testing.assert_allclose(found[part], expected[part], **CLOSE)
    slope = np.diff(found["average"][0]) / np.diff(found["grid_values"][0])
    np.testing.assert_allclose(slope, oracle.coef_[1], rtol=1e-7)


# ---- sigma, by metadata routing


@pytest.fixture
def routing():
    with sklearn.config_context(enable_metadata_routing=True):
        yield


@every_model
@pytest.mark.usefixtures("routing")
def test_sigma_reaches_every_fold_cut_to_its_rows(model):
    """Weighted least squares by hand, row by row of each fold."""
    folds = KFold(4, shuffle=True, random_state=0)
    asking = clone(model).set_fit_request(sigma=True)
    found = cross_validate(asking, X, Y, params={"sigma": SIGMA}, cv=folds, return_estimator=True)["estimator"]
    for fitted, (train, test) in zip(found, folds.split(X), strict=True):
        by_hand = clone(ORACLE).fit(X[train], Y[train], sample_weight=SIGMA[train] ** -2.0)
        np.testing.assert_allclose(fitted.predict(X[test]), by_hand.predict(X[test]), **CLOSE)


@every_model
@pytest.mark.usefixtures("routing")
def test_sigma_goes_through_pipelines_and_meta_estimators(model):
    asking = clone(model).set_fit_request(sigma=True)
    weighted = clone(ORACLE).fit(X, Y, sample_weight=SIGMA**-2.0).predict(X)
    logarithm = TransformedTargetRegressor(asking, func=np.log, inverse_func=np.exp)
    assert not np.allclose(weighted, clone(ORACLE).fit(X, Y).predict(X), **CLOSE)
    np.testing.assert_allclose(make_pipeline(StandardScaler(), asking).fit(X, Y, sigma=SIGMA).predict(X), weighted)
    np.testing.assert_allclose(MultiOutputRegressor(asking).fit(X, Y2, sigma=SIGMA).predict(X)[:, 0], weighted)
    np.testing.assert_allclose(np.log(logarithm.fit(X, np.exp(Y), sigma=SIGMA).predict(X)), weighted)


@pytest.mark.usefixtures("routing")
def test_sigma_that_nobody_asked_for_is_not_dropped_silently():
    with pytest.raises(UnsetMetadataPassedError, match="sigma"):
        cross_validate(clone(MODELS["function"]), X, Y, params={"sigma": SIGMA}, cv=3)
