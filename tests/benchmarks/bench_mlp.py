"""LMRegressor beside MLPRegressor: the same grid of hidden sizes and penalties, the same folds, in one run.

X and y are standardised within the folds. MLPRegressor is as it comes (ReLU, Adam), with ``max_iter`` raised so that
its own tolerance ends it; LMRegressor as it comes, with at most `MAX_ITER` trials on the large task. Printed: the best
cross-validated R² of each, 1 - R², and the time of the whole search.
"""

import time
import warnings

import numpy as np
import pytest
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_diabetes, load_linnerud
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV, KFold, RepeatedKFold
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from lmfit_gpu import LMRegressor

HIDDEN = [(5,), (10,), (20,)]
PENALTIES = {"diabetes": [1.0, 30.0, 300.0], "linnerud": [3.0, 10.0, 30.0], "synthetic": [1e-4, 1e-2, 1.0]}
FOLDS = {
    "diabetes": KFold(5, shuffle=True, random_state=0),
    "linnerud": RepeatedKFold(n_splits=5, n_repeats=5, random_state=0),  # 20 rows: one split decides by chance
    "synthetic": KFold(3, shuffle=True, random_state=0),
}
MAX_ITER = 60


def synthetic():
    """Return 20,000 rows of 8 features: a smooth function of five of them with interactions, and 1 % noise."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (20_000, 8))
    y = np.sin(3 * X[:, 0] * X[:, 1]) + X[:, 2] ** 2 + np.exp(-4 * X[:, 3] ** 2) * X[:, 4] + 0.5 * X[:, 5]
    return X, y + 0.01 * y.std() * rng.standard_normal(len(y))


TASKS = {
    "diabetes": lambda: load_diabetes(return_X_y=True),
    "linnerud": lambda: load_linnerud(return_X_y=True),
    "synthetic": synthetic,
}


def searched(regressor, task):
    X, y = TASKS[task]()
    pipeline = make_pipeline(StandardScaler(), regressor)
    standardised = TransformedTargetRegressor(pipeline, transformer=StandardScaler())
    prefix = f"regressor__{pipeline.steps[-1][0]}__"
    grid = {prefix + "hidden_layer_sizes": HIDDEN, prefix + "alpha": PENALTIES[task]}
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        search = GridSearchCV(standardised, grid, cv=FOLDS[task], refit=False).fit(X, y)
    return search, time.perf_counter() - start


@pytest.mark.benchmark
@pytest.mark.parametrize("task", TASKS)
def test_best_cross_validated_r2(task):
    options = {"max_iter": MAX_ITER} if task == "synthetic" else {}
    peer, of_peer = searched(MLPRegressor(random_state=0, max_iter=1000), task)
    ours, of_ours = searched(LMRegressor(random_state=0, **options), task)
    for name, search, seconds in (("MLPRegressor", peer, of_peer), ("LMRegressor", ours, of_ours)):
        best = {key.rsplit("__", 1)[1]: value for key, value in search.best_params_.items()}
        r2 = search.best_score_
        print(f"{task:10s} {name:13s} best R2 {r2:.5f}, 1 - R2 {1 - r2:.2e}, {seconds:.1f} s, {best}")
    assert ours.best_score_ >= peer.best_score_ - 0.005
    if task == "synthetic":
        assert 1 - ours.best_score_ <= (1 - peer.best_score_) / 3
        assert of_ours <= of_peer
