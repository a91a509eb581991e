"""Data in every kind of memory: read-only, mapped from a file, big-endian, strided, float32. Warnings are errors here.

joblib maps large arrays read-only into its workers, so a grid search hands over what nobody asked for.
"""

import joblib
import numpy as np
import pytest
import torch
from sklearn.model_selection import GridSearchCV

from lmfit_gpu import LMRegressor

N_ROWS = 5000  # more than one block of rows
P0 = [1.0, 1.0, 0.0]


def numpy_decay(x, a, b, c):
    return a * np.exp(-b * x) + c


def torch_decay(x, a, b, c):
    return a * torch.exp(-b * x) + c


class Decay(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.theta = torch.nn.Parameter(torch.tensor(P0, dtype=torch.float64))

    def forward(self, X):
        return self.theta[0] * torch.exp(-self.theta[1] * X) + self.theta[2]


MODELS = {
    "numpy": {"model": numpy_decay, "p0": P0},
    "torch": {"model": torch_decay, "p0": P0},
    "module": {"model": Decay()},
    "network": {"hidden_layer_sizes": (2,), "random_state": 0, "max_iter": 5},
}
every_model = pytest.mark.parametrize("kind", MODELS)
pytestmark = pytest.mark.filterwarnings("ignore:the fit has not converged")  # five trials of the network


def data():
    rng = np.random.default_rng(3)
    x = np.linspace(0, 4, N_ROWS)
    return x[:, None], numpy_decay(x, 2.5, 1.3, 0.5) + 0.1 * rng.standard_normal(N_ROWS)


def mapped(array, directory, name):
    path = directory / name
    array.tofile(path)
    return np.memmap(path, dtype=array.dtype, mode="r", shape=array.shape)


def loaded(array, directory, name):
    np.save(directory / f"{name}.npy", array)
    return np.load(directory / f"{name}.npy", mmap_mode="r")


def locked(array):
    array.flags.writeable = False
    return array


def read_only(array):
    return locked(array.copy())


def strided(array, step):
    """Return a view of every second value of larger memory, from the end with step −2."""
    larger = np.full((2 * len(array), *array.shape[1:]), np.nan, dtype=array.dtype)
    view = larger[::step]
    view[...] = array
    return view


def column_of(array):
    """Return a view of one column of a table."""
    table = np.full((len(array), 3), np.nan)
    table[:, 1] = array.reshape(len(array))
    return table[:, 1:2] if array.ndim == 2 else table[:, 1]


KINDS = {  # how the same float64 values may stand in memory: array, directory, name -> array
    "memmap": mapped,
    "np.load": loaded,
    "read-only": lambda array, *_: read_only(array),
    "memmap, big-endian": lambda array, *where: mapped(array.astype(">f8"), *where),
    "big-endian": lambda array, *_: array.astype(">f8"),
    "Fortran": lambda array, *_: np.asfortranarray(array),
    "Fortran, read-only": lambda array, *_: locked(np.array(array, order="F")),
    "every second": lambda array, *_: strided(array, 2),
    "reversed": lambda array, *_: strided(array, -2),
    "reversed, read-only": lambda array, *_: locked(strided(array, -2)),
    "column": lambda array, *_: column_of(array),
}


def bits(array):
    return np.ascontiguousarray(array).tobytes()


def fitted(kind, X, y, **options):
    """Return theta and the prediction."""
    est = LMRegressor(**MODELS[kind], **options).fit(X, y)
    return est.theta_, est.predict(X)


@pytest.fixture(scope="module")
def answers():
    return {kind: fitted(kind, *data()) for kind in MODELS}


@every_model
@pytest.mark.parametrize("memory", KINDS)
def test_the_same_values_give_the_same_bits(kind, memory, answers, tmp_path):
    plain_X, plain_y = data()
    X, y = (KINDS[memory](array, tmp_path, name) for array, name in ((plain_X, "X"), (plain_y, "y")))
    assert np.array_equal(X, plain_X) and np.array_equal(y, plain_y)
    before = bits(X), bits(y)
    theta, prediction = fitted(kind, X, y)
    assert np.array_equal(theta, answers[kind][0])
    assert np.array_equal(prediction, answers[kind][1])
    assert (bits(X), bits(y)) == before


@every_model
@pytest.mark.parametrize("memory", ["memmap", "read-only", "big-endian", "every second"])
def test_float32(kind, memory, tmp_path):
    small_X, small_y = (array.astype(np.float32) for array in data())
    known = fitted(kind, small_X.astype(np.float64), small_y.astype(np.float64))
    if memory == "big-endian":
        X, y = small_X.astype(">f4"), small_y.astype(">f4")
    else:
        X, y = KINDS[memory](small_X, tmp_path, "X"), KINDS[memory](small_y, tmp_path, "y")
    assert X.dtype.itemsize == 4
    theta, prediction = fitted(kind, X, y)  # in float64, on float32 data
    np.testing.assert_allclose(theta, known[0], rtol=1e-9)
    np.testing.assert_allclose(prediction, known[1], rtol=1e-9, atol=1e-9)


@every_model
@pytest.mark.parametrize("options", [{"devices": ["cpu", "cpu"]}, {"chunk_rows": 4096}], ids=["devices", "chunks"])
def test_mapped_data_on_the_other_ways_through_a_fit(kind, options, tmp_path):
    X, y = data()
    known = fitted(kind, X, y, **options)
    found = fitted(kind, mapped(X, tmp_path, "X"), mapped(y, tmp_path, "y"), **options)
    assert np.array_equal(found[0], known[0])
    assert np.array_equal(found[1], known[1])


@pytest.mark.parametrize("memory", ["memmap", "read-only", "big-endian", "column"])
def test_weights_and_sigma(memory, tmp_path):
    X, y = data()
    rng = np.random.default_rng(4)
    weights, sigma = rng.integers(1, 4, N_ROWS).astype(float), rng.uniform(0.5, 2, N_ROWS)
    parts = [KINDS[memory](part, tmp_path, str(i)) for i, part in enumerate((X, y, weights, sigma))]
    known = LMRegressor(numpy_decay, p0=P0).fit(X, y, sample_weight=weights, sigma=sigma)
    found = LMRegressor(numpy_decay, p0=P0).fit(parts[0], parts[1], sample_weight=parts[2], sigma=parts[3])
    assert np.array_equal(found.theta_, known.theta_)


def test_a_tensor_keeps_the_memory_it_stands_on():
    """A read-only array is wrapped, not copied: it must live as long as the tensor."""
    from lmfit_gpu.rows import as_tensor

    tensor = as_tensor(read_only(np.arange(1000.0)))
    _ = [np.full(1000, -1.0) for _ in range(100)]  # would reuse freed memory
    assert torch.equal(tensor, torch.arange(1000.0, dtype=torch.float64))


class MappedRegressor(LMRegressor):
    """Says what it was given."""

    def fit(self, X, y):
        super().fit(X, y)
        self.was_read_only_ = not X.flags.writeable
        return self


@pytest.mark.parametrize("kind", ["numpy", "torch", "module"])
def test_a_grid_search_in_two_processes_on_mapped_data(kind):
    X, y = data()
    grid = {"loss": ["linear", "soft_l1"]}
    alone = GridSearchCV(LMRegressor(**MODELS[kind]), grid, cv=2).fit(X, y)
    with joblib.parallel_config(backend="loky", n_jobs=2, max_nbytes=1):
        both = GridSearchCV(LMRegressor(**MODELS[kind]), grid, cv=2, error_score="raise").fit(X, y)
        fits = joblib.Parallel()(
            joblib.delayed(MappedRegressor(**MODELS[kind]).fit)(part, target) for part, target in [(X, y)] * 2
        )
    np.testing.assert_allclose(both.cv_results_["mean_test_score"], alone.cv_results_["mean_test_score"], rtol=1e-9)
    assert both.best_params_ == alone.best_params_
    assert all(est.was_read_only_ for est in fits)  # joblib has mapped it: the test tests something
    known = fitted(kind, X, y)[0]
    for est in fits:
        np.testing.assert_allclose(est.theta_, known, rtol=1e-9)
