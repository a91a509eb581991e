"""Modules take what modules take: images, sequences, tokens; as arrays or tensors, in folds, searches and pickles."""

import functools
import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_predict

from lmfit_gpu import LMRegressor

# Twenty trials of a network with as many weights as rows: neither converged nor determined, and not what is tested.
pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore::lmfit_gpu.exceptions.CovarianceWarning"),
]

N = 48
_rng = np.random.default_rng(6)
IMAGES = _rng.integers(0, 256, size=(N, 2, 5, 5), dtype=np.uint8)
BRIGHT = IMAGES[:, 0].mean((1, 2)) / 255 - IMAGES[:, 1, 2, 2] / 500
SEQUENCES = _rng.normal(size=(N, 6, 2))
LAST = SEQUENCES[:, -1, 0] + 0.5 * SEQUENCES[:, -1, 1]
TOKENS = _rng.integers(0, 5, size=(N, 4))
WORTH = np.array([0.0, 1.0, -1.0, 0.5, 2.0])
SUMS = WORTH[TOKENS].sum(1)


class Convolution(torch.nn.Module):
    """n_features_in_ is the number of channels: the second axis of X."""

    def __init__(self, n_features_in_, n_outputs, n_filters=1, dtype=torch.float64):
        super().__init__()
        self.filters = torch.nn.Conv2d(n_features_in_, n_filters, 3, dtype=dtype)
        self.outputs = torch.nn.Linear(9 * n_filters, n_outputs, dtype=dtype)

    def forward(self, X):
        return self.outputs(torch.tanh(self.filters(X / 255)).flatten(1))


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = torch.nn.RNN(2, 2, batch_first=True, dtype=torch.float64)
        self.output = torch.nn.Linear(2, 1, dtype=torch.float64)

    def forward(self, X):
        return self.output(self.cell(X)[0][:, -1])


class Sums(torch.nn.Module):
    """The sum of a learnt worth of each token."""

    def __init__(self):
        super().__init__()
        self.worth = torch.nn.Embedding(5, 1, dtype=torch.float64)

    def forward(self, X):
        return self.worth(X).sum(1)


def images(**options):
    return LMRegressor(Convolution, max_iter=20, random_state=0, **options)


def recurrent():
    torch.manual_seed(0)
    return LMRegressor(Recurrent(), max_iter=20)


# ---- images


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_images_of_every_dtype_are_the_same_numbers(dtype):
    reference = images().fit(IMAGES.astype(np.float64), BRIGHT)
    fitted = images().fit(IMAGES.astype(dtype), BRIGHT)
    assert reference.score(IMAGES, BRIGHT) > 0.9
    assert fitted.n_features_in_ == 2
    assert np.array_equal(fitted.theta_, reference.theta_)
    predicted = fitted.predict(IMAGES[:7].astype(dtype))
    assert predicted.shape == (7,)
    assert predicted.dtype == np.float64


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_tensors_in_tensors_out(dtype):
    X = torch.from_numpy(IMAGES).to(dtype)
    fitted = images().fit(X, torch.from_numpy(BRIGHT))
    predicted = fitted.predict(X[:7])
    assert isinstance(predicted, torch.Tensor)
    assert predicted.dtype == torch.float64
    assert np.array_equal(predicted.numpy(), images().fit(IMAGES, BRIGHT).predict(IMAGES[:7]))
    assert isinstance(fitted.predict(IMAGES[:7]), np.ndarray)


def test_a_float32_module_predicts_in_the_dtype_of_the_targets():
    fitted = LMRegressor(functools.partial(Convolution, dtype=torch.float32), max_iter=20, random_state=0)
    fitted.fit(IMAGES, BRIGHT)
    assert next(fitted.module_.parameters()).dtype == torch.float32
    assert fitted.predict(IMAGES).dtype == np.float64
    assert fitted.score(IMAGES, BRIGHT) > 0.9


@pytest.mark.parametrize("shape", [(N,), (N, 1), (N, 2)])
def test_predictions_have_the_shape_of_the_targets(shape):
    targets = BRIGHT.reshape(N, 1) * [[1.0, 2.0]] if shape == (N, 2) else BRIGHT.reshape(shape)
    fitted = images().fit(IMAGES, targets)
    assert fitted.predict(IMAGES[:5]).shape == (5, *shape[1:])
    assert fitted.module_.outputs.out_features == (2 if shape == (N, 2) else 1)


def test_blocks_of_images():
    """The block size changes no bit."""
    whole, blocks = (images(chunk_rows=rows).fit(IMAGES, BRIGHT) for rows in (N, 16))
    np.testing.assert_allclose(blocks.theta_, whole.theta_, rtol=1e-6)


def test_clones_and_pickles():
    fitted = images().fit(IMAGES, BRIGHT)
    assert np.array_equal(clone(fitted).fit(IMAGES, BRIGHT).theta_, fitted.theta_)
    again = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(again.predict(IMAGES), fitted.predict(IMAGES))


def test_a_search_over_factories():
    """One filter of a search's two is the number that the factory is given."""
    factories = [functools.partial(Convolution, n_filters=n) for n in (1, 2)]
    search = GridSearchCV(images(), {"model": factories}, cv=2, error_score="raise").fit(IMAGES, BRIGHT)
    n_filters = search.best_params_["model"].keywords["n_filters"]
    assert search.best_estimator_.module_.filters.out_channels == n_filters
    assert np.all(np.isfinite(search.cv_results_["mean_test_score"]))
    assert search.predict(IMAGES).shape == (N,)


@pytest.mark.parametrize("to", [np.asarray, torch.from_numpy], ids=["arrays", "tensors"])
def test_folds_of_images(to):
    folds = [(np.arange(0, N, 2), np.arange(1, N, 2)), (np.arange(1, N, 2), np.arange(0, N, 2))]
    predicted = cross_val_predict(images(), to(IMAGES.astype(float)), to(BRIGHT), cv=folds)
    train, test = folds[0]
    by_hand = images().fit(IMAGES[train], BRIGHT[train]).predict(IMAGES[test])
    assert np.array_equal(np.asarray(predicted)[test], by_hand)


# ---- sequences and tokens


@pytest.mark.parametrize("to", [np.asarray, torch.from_numpy], ids=["arrays", "tensors"])
def test_sequences(to):
    fitted = recurrent().fit(to(SEQUENCES), to(LAST))
    assert fitted.score(to(SEQUENCES), to(LAST)) > 0.9
    assert tuple(fitted.predict(to(SEQUENCES[:3])).shape) == (3,)
    assert isinstance(fitted.predict(to(SEQUENCES[:3])), type(to(LAST)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_tokens_are_not_cast(dtype):
    tokens = torch.from_numpy(TOKENS).to(dtype)
    fitted = LMRegressor(Sums()).fit(tokens, torch.from_numpy(SUMS))
    np.testing.assert_allclose(fitted.theta_, WORTH, atol=1e-9)
    np.testing.assert_allclose(fitted.predict(tokens), SUMS, atol=1e-9)
    again = pickle.loads(pickle.dumps(fitted))
    assert torch.equal(again.predict(tokens), fitted.predict(tokens))
    predicted = cross_val_predict(LMRegressor(Sums()), tokens, torch.from_numpy(SUMS), cv=3)
    np.testing.assert_allclose(predicted, SUMS, atol=1e-9)


# ---- what does not fit


def test_other_models_take_tables_only():
    for estimator in (LMRegressor(random_state=0), LMRegressor(lambda X, a: a * X.mean((1, 2, 3)), p0=[1.0])):
        with pytest.raises(ValueError, match=r"X: got shape \(48, 2, 5, 5\)|dim 4|at most 2"):
            estimator.fit(IMAGES.astype(float), BRIGHT)


def test_other_channels_at_predict_are_refused():
    fitted = images().fit(IMAGES, BRIGHT)
    with pytest.raises(ValueError, match="features"):
        fitted.predict(IMAGES[:, :1])


def test_missing_pixels_are_told_with_their_rows():
    broken = IMAGES.astype(float)
    broken[4, 1, 2, 3] = np.nan
    with pytest.raises(ValueError, match=r"Input X contains NaN.* row 4"):
        images().fit(broken, BRIGHT)
    kept = np.arange(N) != 4
    omitted = images(nan_policy="omit").fit(broken, BRIGHT)
    assert np.array_equal(omitted.theta_, images().fit(IMAGES[kept], BRIGHT[kept]).theta_)
