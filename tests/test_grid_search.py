"""GridSearchCV over starts and solvers, with cuPyNumeric: in this process, and in loky's worker processes."""

import warnings

import numpy as np
import pytest
from legate_process import ONE_CPU, python, require_cupynumeric
from sklearn.model_selection import GridSearchCV, KFold

from lmfit_gpu import LMRegressor
from lmfit_gpu.linear import SOLVERS

FAR, NEAR = [0.5, -2.8, 0.3], [1.0, 0.4, 0.5]  # the first is far from the peak, in the noise
MAX_ITER = 10  # enough for all but dual, which has fewer digits with more rows than parameters
IN_ALL = [
    {"p0": [FAR, NEAR], "solver": ["qr", "cholesky"]},
    {"p0": [NEAR], "solver": ["dual", "cg"]},  # cg in the noise takes Legate half a minute and shows nothing more
]


@pytest.fixture(autouse=True)
def cupynumeric():
    require_cupynumeric()


def peak(x, height, centre, width):
    return height * np.exp(-(((x - centre) / width) ** 2))


def rounded_r2(estimator, X, y):
    """R² to 6 digits: solvers that reach the same minimum tie, and the first of them in the grid is the best."""
    return round(estimator.score(X, y), 6)


def searched(backend, n_jobs=1, grid=IN_ALL):
    x = np.linspace(-3, 3, 60)
    y = peak(x, 2.0, 0.8, 0.6) + 0.02 * np.random.default_rng(0).standard_normal(60)
    search = GridSearchCV(
        LMRegressor(peak, backend=backend, max_iter=MAX_ITER),
        grid,
        scoring=rounded_r2,
        cv=KFold(2, shuffle=True, random_state=0),
        n_jobs=n_jobs,
        refit=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return search.fit(x[:, None], y)


def test_the_best_on_cupynumeric_is_the_best_on_scipy():
    assert {solver for part in IN_ALL for solver in part["solver"]} == set(SOLVERS) - {"ghost"}  # that is for modules
    scipy, legate = searched("scipy"), searched("cupynumeric")
    assert scipy.best_estimator_.backend_ == "scipy"
    assert legate.best_estimator_.backend_ == "cupynumeric"
    assert legate.best_params_ == scipy.best_params_
    np.testing.assert_allclose(legate.best_estimator_.theta_, scipy.best_estimator_.theta_, rtol=1e-7)
    np.testing.assert_allclose(legate.best_estimator_.theta_, [2.0, 0.8, 0.6], atol=0.05)
    scores = legate.cv_results_["mean_test_score"]
    assert np.ptp(scores) > 0.1  # the start matters


IN_WORKERS = """
from test_grid_search import IN_ALL, searched
search = searched("cupynumeric", 2, IN_ALL[:1])
say(search.best_estimator_.backend_, search.best_params_["p0"], search.best_params_["solver"])
say(np.isfinite(search.cv_results_["mean_test_score"]).all(), search.best_score_ > 0.99)
"""


def test_two_workers_each_start_a_legate_of_their_own_on_the_cpu():
    """A fit that a worker refused would score NaN."""
    assert python(IN_WORKERS, ONE_CPU, timeout=300) == [f"cupynumeric {NEAR} qr", "True True"]


def test_workers_do_not_share_gpus():
    """With a configuration that leaves the GPUs to Legate, every worker refuses, and says what to do."""
    said = python(
        """
from sklearn.model_selection import cross_val_score
from test_grid_search import peak
from lmfit_gpu import LMRegressor
x = np.linspace(-3, 3, 30)[:, None]
try:
    cross_val_score(LMRegressor(peak, p0=[1, 0, 1], backend="cupynumeric"), x, x[:, 0], n_jobs=2, error_score="raise")
except BackendUnavailableError as error:
    say(error)
""",
        "--cpus 1 --gpus 1 --sysmem 64",
    )
    assert "use n_jobs=1" in said[0]
