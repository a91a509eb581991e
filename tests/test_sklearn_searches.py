"""Searches over options of LMRegressor: the grid is made so that theory names the best entry.

Outliers make a robust loss win, a start in a flat place loses, so do bounds that leave out the truth, a damping too
large to move, a network too small for its target, and a penalty that leaves no weights. In workers and in this process.
"""

import pickle
import warnings

import numpy as np
import pytest
import torch
from scipy.stats import loguniform
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, FitFailedWarning
from sklearn.experimental import enable_halving_search_cv  # noqa: F401  the next import needs it
from sklearn.linear_model import Ridge
from sklearn.model_selection import (
    GridSearchCV,
    HalvingGridSearchCV,
    KFold,
    RandomizedSearchCV,
    validation_curve,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

from lmfit_gpu import LMRegressor, MarquardtDamping, TrustRegion
from lmfit_gpu.exceptions import CovarianceWarning

FOLDS = KFold(2, shuffle=True, random_state=0)
STUCK = MarquardtDamping(start_damping=1e15, down=0.5)  # steps of no length for as long as a fit here lasts
TRUTH = [2.0, 0.5, 0.7]  # height, centre, width
X = np.linspace(-4, 4, 150)[:, None]


def peak(x, height, centre, width):
    return height * np.exp(-(((x - centre) / width) ** 2))


def wave(x):
    return np.sin(x)


def beside_the_peak(estimator, X, y):
    """Score a fit by the truth: the outliers in y say nothing."""
    return -np.mean((estimator.predict(X) - peak(X[:, 0], *TRUTH)) ** 2)


def beside_the_wave(estimator, X, y):
    return -np.mean((estimator.predict(X) - wave(X[:, 0])) ** 2)


_rng = np.random.default_rng(4)
OUTLIERS = 3.0 * (np.arange(150) % 7 == 0)
NOISE = 0.02 * _rng.normal(size=150)
PEAK, WAVE = peak(X[:, 0], *TRUTH) + NOISE + OUTLIERS, wave(X[:, 0]) + NOISE + OUTLIERS

GRID_OF_FUNCTION = {  # the second of each is the right one
    "loss": ["linear", "soft_l1"],
    "damping": [STUCK, TrustRegion(grow=2.0)],
    "bounds": [([3, -4, 0.1], [9, 4, 5]), {"height": (0, 9), "width": (0.1, 5)}],
    "p0": [[3.5, -3.8, 0.15], [3.5, 0.0, 1.0]],
}
GRID_OF_NETWORK = {
    "hidden_layer_sizes": [(1,), (6,)],
    "alpha": [1e5, 1e-3],
    "damping": [STUCK, "trust-region"],
    "loss": ["linear", "soft_l1"],
}
SEARCHES = {
    "function": (LMRegressor(peak, f_scale=0.05, max_iter=15), GRID_OF_FUNCTION, beside_the_peak, PEAK),
    "network": (LMRegressor(f_scale=0.2, max_iter=25, random_state=0), GRID_OF_NETWORK, beside_the_wave, WAVE),
}


def quietly(search, X, y):
    """Fit a search whose losers do not converge."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", CovarianceWarning)
        return search.fit(X, y)


@pytest.mark.slow
@pytest.mark.parametrize(("base", "grid", "scoring", "y"), SEARCHES.values(), ids=SEARCHES)
def test_the_right_entry_of_every_option_wins_in_two_processes_as_in_one(base, grid, scoring, y):
    alone, both = (
        quietly(GridSearchCV(base, grid, scoring=scoring, cv=FOLDS, n_jobs=n_jobs, error_score="raise"), X, y)
        for n_jobs in (1, 2)
    )
    assert alone.best_params_ == {name: values[1] for name, values in grid.items()}
    scores = np.sort(alone.cv_results_["mean_test_score"])
    assert scores[-1] > 0.5 * scores[-2]  # both below 0: at least twice as near
    assert np.all(np.isfinite(alone.cv_results_["mean_test_score"]))
    for name in ("split0_test_score", "split1_test_score"):
        np.testing.assert_allclose(both.cv_results_[name], alone.cv_results_[name], rtol=1e-4)
    assert both.best_params_ == alone.best_params_
    by_hand = quietly(clone(base).set_params(**alone.best_params_), X, y)
    for search in (alone, both):
        np.testing.assert_allclose(search.predict(X), by_hand.predict(X), rtol=1e-4, atol=1e-6)
        assert search.score(X, y) == pytest.approx(scoring(by_hand, X, y), rel=1e-3)


# ---- other searches, with ridge regression as oracle: a Linear layer and alpha (test_ridge.py)

_few = np.random.default_rng(2)
FEW = _few.normal(size=(40, 4))
TARGET = FEW @ [1.0, -1.0, 0.5, 0.0] + 3 * _few.normal(size=40)
LAYER = LMRegressor(torch.nn.Linear(4, 1, dtype=torch.float64))
RIDGE = Ridge(solver="svd")
ALPHAS = [1e-2, 1.0, 10.0, 100.0, 1000.0]


def pair(make):
    return (make(clone(base)).fit(FEW, TARGET) for base in (LAYER, RIDGE))


def test_random_search_over_a_distribution_of_alpha():
    found, oracle = pair(
        lambda base: RandomizedSearchCV(base, {"alpha": loguniform(1e-2, 1e3)}, n_iter=6, cv=FOLDS, random_state=0)
    )
    assert found.best_params_ == oracle.best_params_
    np.testing.assert_allclose(found.cv_results_["mean_test_score"], oracle.cv_results_["mean_test_score"], rtol=1e-6)


def test_halving_search():
    found, oracle = pair(lambda base: HalvingGridSearchCV(base, {"alpha": ALPHAS}, cv=FOLDS, random_state=0))
    assert found.best_params_ == oracle.best_params_
    assert found.n_resources_ == oracle.n_resources_
    np.testing.assert_allclose(found.cv_results_["mean_test_score"], oracle.cv_results_["mean_test_score"], rtol=1e-6)


def test_validation_curve():
    found, oracle = (
        validation_curve(clone(base), FEW, TARGET, param_name="alpha", param_range=ALPHAS, cv=FOLDS)
        for base in (LAYER, RIDGE)
    )
    for part in range(2):  # training and test scores
        np.testing.assert_allclose(found[part], oracle[part], rtol=1e-6)


def linear(X, theta):
    return theta[0] + X @ theta[1:]


def zeros(X, y):
    return np.zeros(X.shape[1] + 1)


def test_steps_of_a_pipeline_are_searched_together():
    """The right degree is 2: a product of two features is in the target."""
    target = FEW[:, 0] * FEW[:, 1] + FEW[:, 2] + 0.1 * TARGET
    grid = {"polynomialfeatures__degree": [1, 2, 3]}
    function = LMRegressor(linear, p0=zeros, x_format="columns")
    searches = [
        GridSearchCV(make_pipeline(StandardScaler(), PolynomialFeatures(include_bias=False), last), grid, cv=4)
        for last in (function, Ridge(1e-12, solver="svd"))
    ]
    found, oracle = (quietly(search, FEW, target) for search in searches)
    assert found.best_params_ == {"polynomialfeatures__degree": 2}
    np.testing.assert_allclose(
        found.cv_results_["mean_test_score"][:2], oracle.cv_results_["mean_test_score"][:2], rtol=1e-6
    )
    assert len(found.best_estimator_[-1].theta_) == 15


# ---- models themselves, and candidates that fail


def line(x, a, b):
    return a + b * x


def test_models_with_their_starts_are_searched():
    grid = [
        {"model": [line], "p0": [[0.0, 0.0]]},
        {"model": [peak], "p0": [[1.0, 0.0, 1.0]]},
        {"model": [torch.nn.Linear(1, 1).double()], "p0": [None]},
    ]
    search = GridSearchCV(LMRegressor(), grid, cv=FOLDS, error_score="raise").fit(X, PEAK - OUTLIERS)
    assert search.best_params_["model"] is peak
    np.testing.assert_allclose(search.best_estimator_.theta_, TRUTH, rtol=0.02)


def test_lambdas_reach_the_workers():
    grid = {"model": [lambda x, a, b: a + b * x, lambda x, a, b: a * np.sin(b * x)], "p0": [[1.0, 0.8]]}
    search = GridSearchCV(LMRegressor(), grid, cv=FOLDS, n_jobs=2, error_score="raise").fit(X, WAVE - OUTLIERS)
    np.testing.assert_allclose(search.best_estimator_.theta_, [1.0, 1.0], atol=0.01)


def test_a_candidate_that_cannot_be_fitted_does_not_end_the_search():
    """A start outside the bounds is an error; its score is NaN and the others go on."""
    base = LMRegressor(peak, bounds=([0, -4, 0.1], [9, 4, 5]))
    search = GridSearchCV(base, {"p0": [[-1.0, 0.0, 1.0], [1.0, 0.0, 1.0]]}, cv=FOLDS)
    with pytest.warns(FitFailedWarning, match="p0"), pytest.warns(UserWarning, match="non-finite"):
        search.fit(X, PEAK)
    assert search.best_params_ == {"p0": [1.0, 0.0, 1.0]}
    assert np.isnan(search.cv_results_["mean_test_score"][0])


def test_a_fitted_search_is_pickled():
    search = GridSearchCV(clone(LAYER), {"alpha": ALPHAS}, cv=FOLDS).fit(FEW, TARGET)
    again = pickle.loads(pickle.dumps(search))
    assert np.array_equal(again.predict(FEW), search.predict(FEW))
    assert again.best_params_ == search.best_params_
