"""Fits in several threads at once: the same answers, and nothing of the process is left changed."""

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import joblib
import numpy as np
import pytest
import torch
from sklearn.model_selection import GridSearchCV

from lmfit_gpu import LMRegressor
from lmfit_gpu.factories import made_by
from lmfit_gpu.threads import _blas, blas_threads, share, share_of_threads

N_FITS = 8
# Few trials of networks; how far they have come, and standard errors of their weights, are not what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:the fit has not converged", "ignore:the data do not determine")


def blas():
    """Return the numbers of numpy's and SciPy's libraries; what a test before has loaded (Legate's) is left alone."""
    return [library.num_threads for library in _blas()]


def torch_threads_elsewhere():
    """Return torch's number in a thread that did not exist before."""
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture
def four_threads():
    """Let torch and BLAS use four threads, whatever the machine; the tests run with OMP_NUM_THREADS=1."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    with set_blas(4):
        yield
    torch.set_num_threads(before)


class set_blas:  # noqa: N801
    """threadpoolctl's own limit lets nobody else change the number."""

    def __init__(self, n):
        self.libraries, self.n = _blas(), n

    def __enter__(self):
        self.before = [library.num_threads for library in self.libraries]
        self._set([self.n] * len(self.before))

    def __exit__(self, *_):
        self._set(self.before)

    def _set(self, numbers):
        for library, n in zip(self.libraries, numbers, strict=True):
            library.set_num_threads(n)
            if hasattr(library, "clear_controlling_thread"):
                library.clear_controlling_thread()


# ---- BLAS: one number for the process


def test_the_least_that_is_asked_for(four_threads):
    assert set(blas()) == {4}
    with blas_threads(2):
        assert set(blas()) == {2}
        with blas_threads(1):
            assert set(blas()) == {1}
        with blas_threads(3):
            assert set(blas()) == {2}
        assert set(blas()) == {2}
    assert set(blas()) == {4}


def test_limits_that_overlap_in_two_threads_leave_nothing_behind(four_threads):
    """The first to enter leaves first: where each puts back what it found, the second leaves 1 for good."""
    entered, first_left = threading.Event(), threading.Event()
    inside = []

    def first():
        with blas_threads(1):
            entered.wait()
        first_left.set()

    def second():
        with blas_threads(1):
            entered.set()
            first_left.wait()
            inside.append(blas())

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert set(inside[0]) == {1}
    assert set(blas()) == {4}


def test_an_error_puts_the_number_back(four_threads):
    with pytest.raises(ZeroDivisionError), blas_threads(1):
        raise ZeroDivisionError
    assert set(blas()) == {4}


# ---- a worker's share


def inside(seconds=0.2):
    with share_of_threads():
        time.sleep(seconds)
        return share(), torch.get_num_threads(), max(blas())


def test_alone_nothing_changes(four_threads):
    assert share() is None
    assert inside(0) == (None, 4, 4)


def test_threads_of_a_program_of_its_own_are_not_touched(four_threads):
    with ThreadPoolExecutor(2) as pool:
        assert set(pool.map(inside, [0.1, 0.1])) == {(None, 4, 4)}


@pytest.mark.parametrize("n_jobs", [2, 4])
@pytest.mark.parametrize("n_cores", [2, 8])
def test_workers_of_joblib_in_threads_share_the_cores(n_jobs, n_cores, four_threads, monkeypatch):
    monkeypatch.setattr("lmfit_gpu.threads.joblib.cpu_count", lambda: n_cores)
    expected = max(1, n_cores // n_jobs)
    found = joblib.Parallel(n_jobs=n_jobs, backend="threading")(joblib.delayed(inside)() for _ in range(2 * n_jobs))
    for own_share, torch_threads, blas_threads_there in found:
        assert own_share == expected
        assert torch_threads == min(expected, 4)
        assert blas_threads_there == min(expected, 4)
    assert torch.get_num_threads() == torch_threads_elsewhere() == 4
    assert set(blas()) == {4}


def test_one_worker_has_all(four_threads):
    assert joblib.Parallel(n_jobs=1, backend="threading")([joblib.delayed(inside)(0)]) == [(None, 4, 4)]


# ---- fits


def decay(x, a, b, c):
    return a * np.exp(-b * x) + c


def torch_decay(x, a, b, c):
    return a * torch.exp(-b * x) + c


def halves(x, a, b, c):
    """A branch: torch's vmap refuses it, so derivatives are taken in forward mode."""
    return a * torch.exp(-b * x) + (c if x.max() > 0 else -c)


class Net(torch.nn.Module):
    def __init__(self, n_features_in_, n_outputs=1, hidden=6):
        super().__init__()
        self.hidden = torch.nn.Linear(n_features_in_, hidden, dtype=torch.float64)
        time.sleep(0.001)  # another thread's turn
        self.out = torch.nn.Linear(hidden, 1, dtype=torch.float64)

    def forward(self, X):
        return self.out(torch.tanh(self.hidden(X)))[:, 0]


P0 = [1.0, 1.0, 0.0]
MODELS = {
    "numpy": {"model": decay, "p0": P0},
    "torch": {"model": torch_decay, "p0": P0},
    "branch": {"model": halves, "p0": P0},
    "factory": {"model": Net, "max_iter": 10},
    "network": {"hidden_layer_sizes": (5,), "max_iter": 10},
}


def fit(kind, seed, n_rows):
    rng = np.random.default_rng(seed)
    X = np.linspace(0, 4, n_rows)[:, None]
    y = decay(X[:, 0], 2.5, 1.3, 0.5) + 0.05 * rng.standard_normal(n_rows)
    est = LMRegressor(**MODELS[kind], random_state=seed).fit(X, y)
    return est.theta_, est.predict(X)


@functools.cache
def fits_of_one_thread(kind, n_rows):
    return [fit(kind, seed, n_rows) for seed in range(N_FITS)]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("n_rows", [60, 6000])
@pytest.mark.parametrize("pool", ["joblib", "executor"])
def test_fits_in_two_threads_are_those_of_one(kind, n_rows, pool):
    alone = fits_of_one_thread(kind, n_rows)
    if pool == "joblib":
        tasks = (joblib.delayed(fit)(kind, seed, n_rows) for seed in range(N_FITS))
        together = joblib.Parallel(n_jobs=2, backend="threading")(tasks)
    else:
        with ThreadPoolExecutor(2) as executor:
            together = list(executor.map(lambda seed: fit(kind, seed, n_rows), range(N_FITS)))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(other[0], one[0], rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(other[1], one[1], rtol=1e-7, atol=1e-9)


def test_a_grid_search_in_threads():
    X = np.linspace(0, 4, 200)[:, None]
    y = decay(X[:, 0], 2.5, 1.3, 0.5)
    search = GridSearchCV(
        LMRegressor(Net, max_iter=5, random_state=0), {"random_state": [0, 1, 2]}, cv=2, error_score="raise"
    )
    alone = search.fit(X, y).cv_results_["mean_test_score"]
    with joblib.parallel_config(backend="threading", n_jobs=2):
        together = search.fit(X, y).cv_results_["mean_test_score"]
    np.testing.assert_allclose(together, alone, rtol=1e-7)


def weights(seed):
    return torch.cat([p.detach().reshape(-1) for p in made_by(Net, 3, 1, seed).parameters()])


def test_modules_made_in_two_threads_have_the_weights_of_their_seeds():
    alone = [weights(seed) for seed in range(40)]
    state = torch.get_rng_state()
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(weights, range(40)))
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_made_of_modules_that_are_made_here():
    class Outer(torch.nn.Module):
        def __init__(self, n_features_in_):
            super().__init__()
            self.inner = made_by(Net, n_features_in_, 1, 7)

    outer = made_by(Outer, 3, 1, 0)
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in outer.parameters()]), weights(7))
