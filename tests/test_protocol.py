"""What scikit-learn asks of an instance: arguments checked and named, tags that follow the model, nested parameters."""

import copy
import functools
import inspect
import pickle
import re
from fractions import Fraction

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.optimize
import torch
from sklearn import config_context
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, DataConversionWarning, UnsetMetadataPassedError
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV, KFold, cross_validate
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import get_tags

from lmfit_gpu import EarlyStopping, LMRegressor, MarquardtDamping, NielsenDamping, TrustRegion, curve_fit
from lmfit_gpu.exceptions import FitWarning
from lmfit_gpu.parameter_constraints import given_arguments

x = np.linspace(0, 4, 40)
X = x[:, None]
Y = 2.5 * np.exp(-1.3 * x) + 0.5 + 0.02 * np.cos(40 * x)
P0 = [1.0, 1.0, 0.0]
SIGMA = np.linspace(0.05, 0.4, 40)


def decay(x, a, b, c):
    return a * np.exp(-b * x) + c


def torch_decay(x, a, b, c):
    return a * torch.exp(-b * x) + c


def residual(theta, x, y):
    return decay(x, *theta) - y


class Decay(torch.nn.Module):
    """A factory without parameters of its own, or with: a further argument that does not matter."""

    def __init__(self, start=1.0):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Parameter(torch.tensor(v, dtype=torch.float64)) for v in (start, 1.0, 0.0))

    def forward(self, X):
        return self.a * torch.exp(-self.b * X[:, 0]) + self.c


class Network(torch.nn.Module):
    def __init__(self, n_features_in_, n_outputs, width, *, slope=1.0):
        super().__init__()
        self.hidden = torch.nn.Linear(n_features_in_, width, dtype=torch.float64)
        self.out = torch.nn.Linear(width, n_outputs, dtype=torch.float64)
        self.slope = slope

    def forward(self, X):
        return self.out(torch.tanh(self.slope * self.hidden(X)))


# ---- every argument by itself

ALLOWED = {
    "p0": [
        P0,
        tuple(P0),
        np.array(P0),
        torch.tensor(P0),
        {"a": 1.0, "b": 1.0, "c": 0.0},
        lambda x, y: P0,
        pd.Series(P0),
    ],
    "bounds": [(0, 9), {"a": (0, None)}, scipy.optimize.Bounds(0, 9), ([0, 0, 0], [9, 9, 9]), np.array([0, 9])],
    "fixed": [(), ["c"], "c", np.array([False, False, True]), None],
    "tied": [None, {}, {"c": lambda a: 0.2 * a}],
    "x_format": ["auto", "1d"],
    "loss": ["huber", lambda z: np.stack([z, np.ones_like(z), np.zeros_like(z)])],
    "f_scale": [1, 0.5, np.float32(2)],
    "absolute_sigma": [False, np.False_],
    "covariance": ["robust", "HC1"],
    "nan_policy": ["raise", "omit"],
    "jac": ["2-point", "cs"],
    "solver": ["qr", "cholesky"],
    "backend": ["auto", "scipy", "torch"],
    "devices": ["cpu", torch.device("cpu"), ["cpu", "cpu"]],
    "dtype": [None, torch.float64, "float64", np.float64, np.dtype("float64")],
    "chunk_rows": [7, np.int32(7), "auto"],
    "damping": ["nielsen", TrustRegion(grow=2), NielsenDamping(), MarquardtDamping(scaling=np.ones(3))],
    "ftol": [0, 1e-12, np.float64(1e-12), Fraction(1, 10**12)],
    "xtol": [0, "auto"],
    "gtol": [1e-12],
    "max_iter": [500, np.int64(500)],
    "alpha": [0, 0.0],
    "early_stopping": [None, False],
    "random_state": [None, 3, np.random.RandomState(0)],
    "warm_start": [False, True],
    "callback": [lambda record: False],
    "verbose": [0, False],
}
REFUSED = {
    "model": [3, "line", [decay]],
    "residual": [3, "line"],
    "predict_fn": [3],
    "p0": ["best", b"auto", np.nan, np.inf, True, 1j, object()],
    "bounds": ["ab", 7, object()],
    "fixed": [3, object()],
    "tied": [["c"], "c", lambda a: a],
    "x_format": ["2d", None, 1],
    "loss": ["Huber", None, 2],
    "f_scale": [0, -1.0, np.nan, np.inf, True, "1", None, Fraction(0)],
    "absolute_sigma": [1, 0, "yes", None],
    "covariance": ["HC4", None, True],
    "nan_policy": ["drop", None],
    "jac": ["4-point", None, np.ones(3)],
    "solver": ["lm", None, ["qr"]],
    "backend": ["jax", None],
    "devices": [None, 0, object()],
    "dtype": ["float16", torch.float16, float, int, np.dtype("int64"), 64, [1]],
    "chunk_rows": [0, -1, 1.5, True, None, "all"],
    "damping": ["lm", None, 0.1, TrustRegion, object()],
    "ftol": [-1e-9, np.nan, "small", None, True],
    "xtol": [-1, [1e-8]],
    "gtol": [-1, 1j],
    "max_iter": [-1, 1.0, None, "auto", True],
    "hidden_layer_sizes": [0, -3, 2.5, "10", (), [], (5, 0), (5, 2.0), [[5]], np.ones((2, 2), int), True, (True,)],
    "alpha": [-1e-9, np.nan, np.inf, None, "auto", True],
    "early_stopping": [
        1,
        0.1,
        "auto",
        EarlyStopping,
        EarlyStopping(0.0),
        EarlyStopping(1.0),
        EarlyStopping(patience=0),
    ],
    "random_state": ["a", -1, 1.5, np.random.default_rng(0)],
    "warm_start": [1, None],
    "callback": ["print", 1],
    "verbose": [-1, None, "loud"],
}
NETWORK = {
    "hidden_layer_sizes": [None, 3, (3,), [2, 2], np.array([3])],
    "early_stopping": [True, EarlyStopping(0.2, 3)],
}


def cases(table):
    return [pytest.param(name, i, id=f"{name}-{i}") for name, values in table.items() for i in range(len(values))]


def test_every_argument_has_a_constraint_and_is_tried():
    arguments = set(inspect.signature(LMRegressor).parameters)
    assert set(LMRegressor._parameter_constraints) == set(REFUSED) == arguments
    assert set(ALLOWED) | set(NETWORK) | {"model", "residual", "predict_fn"} == arguments


@pytest.mark.parametrize(("name", "i"), cases(ALLOWED))
def test_values_that_are_allowed(name, i):
    est = LMRegressor(decay, **({"p0": P0} | {name: ALLOWED[name][i]}))
    est.fit(X, Y)
    assert getattr(est, name) is ALLOWED[name][i]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize(("name", "i"), cases(NETWORK))
def test_values_that_are_allowed_of_a_network(name, i):
    est = LMRegressor(max_iter=2, **{name: NETWORK[name][i]}).fit(X, Y)
    assert getattr(est, name) is NETWORK[name][i]
    if name == "hidden_layer_sizes":
        sizes = [layer.out_features for layer in est.module_.layers]
        assert sizes == [*([10] if i == 0 else np.atleast_1d(NETWORK[name][i])), 1]


@pytest.mark.parametrize(("name", "i"), cases(REFUSED))
def test_values_that_are_not_allowed(name, i):
    def must_not_run(x, a, b, c):
        raise AssertionError("the model was called")

    value = REFUSED[name][i]
    est = LMRegressor(**({"model": must_not_run, "p0": P0} | {name: value}))
    message = rf"^The '{name}' parameter of LMRegressor must be .*\. Got {re.escape(repr(value))} instead\.$"
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        est.fit(X, Y)
    assert getattr(est, name) is value


def test_the_order_in_which_names_are_listed_is_that_of_the_docs():
    with pytest.raises(ValueError, match=r"among \{'linear', 'soft_l1', 'huber', 'cauchy', 'arctan'\} or a callable"):
        LMRegressor(decay, loss="l2").fit(X, Y)


def test_curve_fit_is_named_by_its_own_name():
    with pytest.raises(ValueError, match=r"The 'solver' parameter of curve_fit must be .* Got 'lm' instead"):
        curve_fit(decay, x, Y, P0, solver="lm")


def test_only_what_is_given_is_checked():
    assert given_arguments(LMRegressor()) == {}
    assert given_arguments(LMRegressor(decay, solver="qr")) == {"model": decay, "solver": "qr"}


def test_a_check_may_be_skipped_as_in_scikit_learn():
    with config_context(skip_parameter_validation=True):
        est = LMRegressor(decay, p0=P0, absolute_sigma=0).fit(X, Y)
    np.testing.assert_allclose(est.theta_, LMRegressor(decay, p0=P0).fit(X, Y).theta_, rtol=1e-12)


# ---- arguments together


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": decay, "hidden_layer_sizes": (5,)}, r"hidden_layer_sizes: got \(5,\) with a model"),
        ({"model": Decay, "hidden_layer_sizes": 5}, r"hidden_layer_sizes: got 5 with a model"),
        ({"residual": residual, "hidden_layer_sizes": 5}, r"hidden_layer_sizes: got 5 with a residual callable"),
        ({"residual": residual, "early_stopping": True}, r"early_stopping: got True with a residual callable"),
        ({"model": decay, "predict_fn": decay}, "predict_fn: goes with a residual callable alone"),
        ({"predict_fn": decay}, "predict_fn: goes with a residual callable alone"),
    ],
)
def test_arguments_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        LMRegressor(**options, p0=P0).fit(X, Y)


@pytest.mark.parametrize("options", [{"model": decay}, {"residual": residual}])
def test_a_penalty_on_a_function_is_said_to_have_no_effect(options):
    """An error it cannot be: scikit-learn's checks set alpha = 0.01."""
    without = LMRegressor(**options, p0=P0).fit(X, Y)
    with pytest.warns(FitWarning, match=r"alpha: got 0.01 with a (function|residual callable): no effect"):
        with_alpha = LMRegressor(**options, p0=P0, alpha=0.01).fit(X, Y)
    np.testing.assert_array_equal(with_alpha.theta_, without.theta_)


# ---- tags

TAGS = {  # y required, several outputs, images
    "network": (LMRegressor(), (True, True, False)),
    "module": (LMRegressor(Decay()), (True, True, True)),
    "factory": (LMRegressor(Decay), (True, True, True)),
    "partial": (LMRegressor(functools.partial(Decay, start=2.0)), (True, True, True)),
    "module with residual": (LMRegressor(Decay(), residual=lambda p, t: p - t), (True, True, True)),
    "function": (LMRegressor(decay), (True, False, False)),
    "function with residual": (LMRegressor(decay, residual=lambda p, t: p - t), (True, False, False)),
    "residual": (LMRegressor(residual=residual), (False, False, False)),
}


@pytest.mark.parametrize("kind", TAGS)
def test_tags_follow_the_instance(kind):
    est, expected = TAGS[kind]
    tags = get_tags(est)
    assert (tags.target_tags.required, tags.target_tags.multi_output, tags.input_tags.three_d_array) == expected
    assert tags.estimator_type == "regressor" and tags.regressor_tags is not None
    assert tags.target_tags.single_output and tags.input_tags.two_d_array and tags.requires_fit
    assert not (tags.input_tags.sparse or tags.input_tags.allow_nan or tags.non_deterministic)
    assert get_tags(clone(est).set_params(nan_policy="omit")).input_tags.allow_nan


def test_tags_change_with_set_params():
    est = LMRegressor()
    assert get_tags(est).target_tags.multi_output
    assert not get_tags(est.set_params(model=decay)).target_tags.multi_output


# ---- a column of targets


@pytest.mark.parametrize("form", ["numpy", "torch", "with residual", "bounds", "tensors"])
def test_a_column_for_a_function_that_returns_flat_arrays(form):
    model = decay if form == "numpy" else torch_decay
    options = {"with residual": {"residual": lambda p, t: p - t}, "bounds": {"bounds": (-9, 9)}}.get(form, {})
    convert = torch.from_numpy if form == "tensors" else np.asarray
    est = LMRegressor(model, p0=P0, **options)
    with pytest.warns(DataConversionWarning, match="A column-vector y was passed when a 1d array was expected") as said:
        est.fit(convert(X), convert(Y[:, None]))
    assert [warning.filename for warning in said] == [__file__]
    flat = clone(est).fit(convert(X), convert(Y))
    np.testing.assert_allclose(est.theta_, flat.theta_, rtol=1e-7)
    assert est.result_.n_residuals == 40
    assert tuple(est.predict(convert(X)).shape) == (40, 1)
    assert tuple(flat.predict(convert(X)).shape) == (40,)


def test_no_warning_where_columns_are_meant():
    def column(x, a, b, c):
        return decay(x, a, b, c)[:, None]

    for est in (
        LMRegressor(column, p0=P0),
        LMRegressor(lambda x, a, b, c: decay(x, a, b, c), p0=P0, x_format="columns"),
        LMRegressor(Decay()),
        LMRegressor(Decay),
        LMRegressor(lambda x, a: a, p0=[1.0]),  # a constant is no array
        LMRegressor(residual=lambda theta, x, y: decay(x, *theta) - y[:, 0], p0=P0),
    ):
        est.fit(X, Y[:, None])
    curve_fit(decay, x, Y[:, None], P0)


# ---- parameters of a factory


def nested(est):
    return {name: value for name, value in est.get_params().items() if name.startswith("model__")}


def test_parameters_of_a_factory_are_shown():
    assert nested(LMRegressor(Network)) == {"model__width": inspect.Parameter.empty, "model__slope": 1.0}
    assert nested(LMRegressor(functools.partial(Network, width=3))) == {"model__width": 3, "model__slope": 1.0}
    sized = functools.partial(Network, n_outputs=1, width=3)
    assert nested(LMRegressor(sized)) == {"model__n_outputs": 1, "model__width": 3, "model__slope": 1.0}
    assert nested(LMRegressor(functools.partial(torch.nn.Linear, 1, bias=False))) == {
        "model__out_features": inspect.Parameter.empty,
        "model__bias": False,
        "model__device": None,
        "model__dtype": None,
    }
    for model in (Decay(), decay, None):
        assert nested(LMRegressor(model)) == {}
    assert set(LMRegressor(Network).get_params(deep=False)) == set(inspect.signature(LMRegressor).parameters)


def test_a_parameter_of_a_factory_is_set_by_a_partial():
    mine = functools.partial(Network, width=3)
    est = LMRegressor(mine)
    assert est.set_params(model__width=5, model__slope=2.0, max_iter=7) is est
    assert (est.model.func, est.model.keywords) == (Network, {"width": 5, "slope": 2.0})
    assert mine.keywords == {"width": 3}
    assert est.max_iter == 7
    assert nested(clone(est)) == {"model__width": 5, "model__slope": 2.0}
    est.set_params(model__width=9, model=Network)  # in any order: the model is first
    assert (est.model.func, est.model.keywords) == (Network, {"width": 9})
    same = LMRegressor(mine)
    assert same.set_params(**same.get_params()).model is mine


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore::lmfit_gpu.exceptions.CovarianceWarning")
def test_what_is_set_is_what_is_made():
    est = LMRegressor(functools.partial(Network, width=3), max_iter=1).set_params(model__width=6, model__slope=0.5)
    est.fit(X, Y)
    assert est.module_.hidden.out_features == 6
    assert est.module_.slope == 0.5
    sized = LMRegressor(functools.partial(Network, n_outputs=1, width=3), max_iter=1).fit(X, Y[:, None])
    assert sized.module_.out.out_features == 1
    with pytest.raises(ValueError, match="returned"):  # two outputs were asked for, and one target is given
        LMRegressor(functools.partial(Network, n_outputs=2, width=3), max_iter=1).fit(X, Y)


def test_parameters_that_a_factory_does_not_have():
    est = LMRegressor(Network)
    with pytest.raises(
        ValueError, match=r"Invalid parameter 'depth' for model .*Valid parameters are: .*'slope', 'width'"
    ):
        est.set_params(model__depth=3)
    assert est.model is Network
    with pytest.raises(ValueError, match=r"Invalid parameter 'modle' for estimator"):
        est.set_params(modle__width=3)
    for model in (Decay(), decay, None):
        with pytest.raises(
            ValueError, match=r"Invalid parameter 'model__width': model=.* has no parameters of its own"
        ):
            LMRegressor(model).set_params(model__width=3)


def test_a_factory_that_takes_anything():
    class Anything(Decay):
        def __init__(self, **options):
            super().__init__(options.get("start", 1.0))

    est = LMRegressor(Anything).set_params(model__start=2.0)
    assert nested(est) == {"model__start": 2.0}
    assert est.model().a.item() == 2.0


def test_a_search_over_a_parameter_of_a_factory():
    """Only from 1 does the fit of one trial end where that fit from there does."""
    search = GridSearchCV(
        LMRegressor(Decay, max_iter=3), {"model__start": [50.0, 1.0]}, cv=KFold(3), error_score="raise"
    )
    with pytest.warns(ConvergenceWarning):
        search.fit(X, Y)
    scores = []
    for start in (50.0, 1.0):
        with pytest.warns(ConvergenceWarning):
            by_hand = cross_validate(LMRegressor(functools.partial(Decay, start=start), max_iter=3), X, Y, cv=KFold(3))
        scores.append(by_hand["test_score"].mean())
    np.testing.assert_allclose(search.cv_results_["mean_test_score"], scores, rtol=1e-12)
    assert search.best_params_ == {"model__start": [50.0, 1.0][int(np.argmax(scores))]}


def test_policies_are_cloned_and_searched():
    policy = TrustRegion(grow=2.0, scaling=np.array([1.0, 2.0, 3.0]))
    est = LMRegressor(decay, p0=P0, damping=policy)
    cloned = clone(est)
    assert cloned.damping.grow == 2.0
    np.testing.assert_array_equal(cloned.damping.scaling, policy.scaling)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(est)))
    assert copied.damping.grow == 2.0
    dampings = ["nielsen", TrustRegion(grow=2.0), MarquardtDamping(up=5.0), "lema"]
    search = GridSearchCV(est, {"damping": dampings}, cv=KFold(3, shuffle=True, random_state=0), error_score="raise")
    search.fit(X, Y)
    scores = search.cv_results_["mean_test_score"]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-6)  # one minimum, whatever leads there
    assert search.best_estimator_.result_.success


# ---- metadata routing

FOLDS = KFold(4, shuffle=True, random_state=1)


def by_hand(**metadata):
    """Return theta and the score of every fold, with the metadata sliced here."""
    thetas, scores = [], []
    for train, test in FOLDS.split(X):
        fitted = LMRegressor(decay, p0=P0).fit(X[train], Y[train], **{k: v[train] for k, v in metadata.items()})
        thetas.append(fitted.theta_)
        scores.append(r2_score(Y[test], fitted.predict(X[test])))
    return thetas, scores


@pytest.fixture
def routing():
    with config_context(enable_metadata_routing=True):
        yield


@pytest.mark.usefixtures("routing")
def test_sigma_is_routed_through_cross_validation():
    est = LMRegressor(decay, p0=P0).set_fit_request(sigma=True, sample_weight=True)
    est.set_score_request(sample_weight=False)
    weights = np.arange(40) % 3.0
    thetas, scores = by_hand(sigma=SIGMA, sample_weight=weights)
    found = cross_validate(
        est,
        X,
        Y,
        cv=FOLDS,
        params={"sigma": SIGMA, "sample_weight": weights},
        return_estimator=True,
        error_score="raise",
    )
    for fitted, theta in zip(found["estimator"], thetas, strict=True):
        np.testing.assert_array_equal(fitted.theta_, theta)
    np.testing.assert_allclose(found["test_score"], scores, rtol=1e-12)
    assert not np.allclose(by_hand()[0], thetas, rtol=1e-4)  # sigma matters


@pytest.mark.usefixtures("routing")
def test_sigma_is_routed_through_a_pipeline_and_a_search():
    est = LMRegressor(decay, p0=P0).set_fit_request(sigma=True)
    pipeline = Pipeline([("scale", StandardScaler(with_mean=False)), ("fit", est)])
    spread = X.std()
    direct = LMRegressor(decay, p0=P0).fit(X, Y, sigma=SIGMA)
    fitted = pipeline.fit(X, Y, sigma=SIGMA)
    np.testing.assert_allclose(fitted[-1].theta_ / [1, spread, 1], direct.theta_, rtol=1e-6)
    search = GridSearchCV(pipeline, {"fit__p0": [P0, [2.0, 1.0, 0.1]]}, cv=FOLDS, error_score="raise")
    search.fit(X, Y, sigma=SIGMA)
    expected = np.mean(by_hand(sigma=SIGMA)[1])
    np.testing.assert_allclose(search.cv_results_["mean_test_score"], expected, rtol=1e-6)
    np.testing.assert_allclose(search.best_estimator_[-1].theta_ / [1, spread, 1], direct.theta_, rtol=1e-6)


@pytest.mark.usefixtures("routing")
def test_weights_of_the_score_are_routed():
    weights = np.linspace(0, 2, 40)
    est = LMRegressor(decay, p0=P0).set_fit_request(sample_weight=False).set_score_request(sample_weight=True)
    found = cross_validate(est, X, Y, cv=FOLDS, params={"sample_weight": weights}, error_score="raise")
    for (train, test), score in zip(FOLDS.split(X), found["test_score"], strict=True):
        prediction = LMRegressor(decay, p0=P0).fit(X[train], Y[train]).predict(X[test])
        assert score == pytest.approx(r2_score(Y[test], prediction, sample_weight=weights[test]), rel=1e-12)


@pytest.mark.usefixtures("routing")
def test_metadata_that_nobody_asked_for():
    with pytest.raises(UnsetMetadataPassedError, match=r"\[sigma\] are passed but are not explicitly set as requested"):
        cross_validate(LMRegressor(decay, p0=P0), X, Y, cv=FOLDS, params={"sigma": SIGMA})
    assert LMRegressor(decay).set_fit_request(sigma=True)._get_metadata_request().fit.requests["sigma"] is True


# ---- how an estimator is shown

SHOWN = {
    "network": lambda: LMRegressor(max_iter=1),
    "module": lambda: LMRegressor(
        torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1)), max_iter=1
    ),
    "lambda": lambda: LMRegressor(lambda x, a, b, c: decay(x, a, b, c), p0=np.array(P0)),
    "tensor": lambda: LMRegressor(decay, p0=torch.tensor(P0), damping=TrustRegion(scaling=np.ones(3))),
    "factory": lambda: LMRegressor(functools.partial(Network, width=2), max_iter=1, early_stopping=EarlyStopping()),
    "bounds": lambda: LMRegressor(decay, p0=P0, bounds={"a": (0, None)}, tied={"c": lambda a: 0.2 * a}),
    "residual": lambda: LMRegressor(residual=residual, p0=P0),
}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore::lmfit_gpu.exceptions.CovarianceWarning")
@pytest.mark.parametrize("kind", SHOWN)
def test_text_and_html(kind):
    est = SHOWN[kind]()
    for fitted in (False, True):
        if fitted:
            est.fit(X.astype(np.float32), Y)
        assert repr(est).startswith("LMRegressor(")
        html = est._repr_html_()
        assert "LMRegressor" in html
        assert ("theta_" in html) is fitted
        assert ("Not fitted" in html) is not fitted


def test_html_of_a_result():
    """Names are the user's: what they hold is text."""
    est = LMRegressor(lambda x, theta: decay(x, *theta), p0={"<b>": 1.0, "b&": 1.0, "c": 0.0}, fixed=["c"]).fit(X, Y)
    html = est.result_._repr_html_()
    table = html[html.index("<table>") : html.index("</table>")]
    assert table.count("<tr>") == 4
    assert re.search(rf"<tr><td>&lt;b&gt;</td><td>[-.\d]+</td><td>{est.stderr_[0]:.3g}</td>", table)
    assert "<td>b&amp;</td>" in html
    assert re.search(r"<td>c</td><td>0</td><td>0</td>(<td></td>)*<td>fixed</td>", html)
    assert est.result_.status.name in html


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_html_of_many_parameters_is_cut():
    html = LMRegressor(max_iter=1, hidden_layer_sizes=30).fit(X, Y).result_._repr_html_()
    assert html[html.index("<table>") : html.index("</table>")].count("<tr>") == 62  # a head, 60, and how many more
    assert "and 31 more" in html  # of 30 + 30 + 30 + 1


# ---- data frames


@pytest.mark.parametrize("library", [pd, pl], ids=["pandas", "polars"])
@pytest.mark.parametrize("form", ["series", "frame"])
def test_data_frames(library, form):
    frame = library.DataFrame({"t": x, "u": x**2})
    one = library.Series if form == "series" else lambda values: library.DataFrame({"value": values})
    weights = np.arange(40) % 3.0
    model = LMRegressor(lambda X, theta: theta[0] * np.exp(-theta[1] * X[:, 0]) + theta[2] + 0 * X[:, 1], p0=P0)
    expected = clone(model).fit(np.column_stack([x, x**2]), Y, sigma=SIGMA, sample_weight=weights)
    weight = library.Series(weights)
    if form == "series":
        est = model.fit(frame, one(Y), sigma=one(SIGMA), sample_weight=weight)
        assert est.predict(frame).shape == (40,)
    else:
        with pytest.warns(DataConversionWarning):
            est = model.fit(frame, one(Y), sigma=one(SIGMA), sample_weight=weight)
        assert est.predict(frame).shape == (40, 1)
    np.testing.assert_allclose(est.theta_, expected.theta_, rtol=1e-12)
    np.testing.assert_allclose(est.stderr_, expected.stderr_, rtol=1e-9)
    assert list(est.feature_names_in_) == ["t", "u"] and est.n_features_in_ == 2
    with pytest.raises(ValueError, match=r"feature names should match.*\n.*unseen at fit time:\n- v"):
        est.predict(library.DataFrame({"t": x, "v": x}))
    with pytest.raises(ValueError, match="feature names should match"):
        est.predict(frame[["u", "t"]])
    with pytest.raises(ValueError, match="feature names should match"):
        est.predict(frame[["t"]])
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        est.predict(np.column_stack([x, x]))
    est.fit(np.column_stack([x, x**2]), Y)
    assert not hasattr(est, "feature_names_in_")


def test_missing_values_of_polars():
    holes = pl.Series([None if i == 4 else value for i, value in enumerate(Y.tolist())])
    with pytest.raises(ValueError, match=r"y contains NaN or infinity in row 4"):
        LMRegressor(decay, p0=P0).fit(X, holes)
    est = LMRegressor(decay, p0=P0, nan_policy="omit").fit(X, holes)
    np.testing.assert_array_equal(est.theta_, LMRegressor(decay, p0=P0).fit(np.delete(X, 4, 0), np.delete(Y, 4)).theta_)


# ---- masked values of a model


def test_what_a_model_masks_is_not_a_number():
    def masked(x, a, b, c):
        return np.ma.masked_less(decay(x, a, b, c), -10.0)

    est = LMRegressor(masked, p0=P0).fit(X, Y)
    np.testing.assert_allclose(est.theta_, LMRegressor(decay, p0=P0).fit(X, Y).theta_, rtol=1e-7)
    for more in ({}, {"residual": lambda p, t: p - t}):
        with pytest.raises(ValueError, match="not finite at the start"):
            LMRegressor(lambda x, a, b, c: np.ma.masked_less(decay(x, a, b, c), 0.5), p0=P0, **more).fit(X, Y)
