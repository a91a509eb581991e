"""network: the model of LMRegressor()."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.preprocessing import StandardScaler

from lmfit_gpu import LMRegressor
from lmfit_gpu.network import TanhNetwork, default_network, hidden_sizes, standardise
from lmfit_gpu.rows import Weights

RNG = np.random.default_rng(0)
X = RNG.uniform(-2, 2, (100, 3))
Y = np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2]
TWO = np.stack([Y, 3 * X[:, 0] ** 2], 1)


@pytest.fixture(autouse=True)
def unfinished_fits_are_meant():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


def made(**options):
    return LMRegressor(**{"random_state": 0, "max_iter": 30, **options})


def by_hand(network, x):
    """The formula of the module docstring, in numpy."""
    state = {name: value.numpy() for name, value in network.state_dict().items()}
    a = (x - state["x_mean"]) / state["x_scale"]
    depth = len(network.layers)
    for layer in range(depth):
        z = a @ state[f"layers.{layer}.weight"].T + state[f"layers.{layer}.bias"]
        a = z if layer == depth - 1 else np.tanh(z)
    return state["y_mean"] + state["y_scale"] * a


@pytest.mark.parametrize("sizes", [(10,), (4, 3), (2, 2, 2)])
def test_is_the_formula(sizes):
    est = made(hidden_layer_sizes=sizes, max_iter=5).fit(X, TWO)
    assert [layer.out_features for layer in est.module_.layers] == [*sizes, 2]
    np.testing.assert_allclose(est.predict(X), by_hand(est.module_, X), rtol=1e-12)
    assert next(est.module_.parameters()).dtype == torch.float64


def test_learns_to_nearly_the_noise_of_rounding():
    est = made(max_iter=300).fit(X, Y)
    assert 1 - est.score(X, Y) < 1e-3
    assert est.predict(X).shape == (100,)
    est = made(max_iter=300, hidden_layer_sizes=12).fit(X, TWO)
    assert 1 - est.score(X, TWO) < 1e-2
    assert est.predict(X).shape == (100, 2)


def test_column_targets_come_back_as_columns_without_a_warning():
    est = made(max_iter=5).fit(X, Y[:, None])
    assert est.predict(X).shape == (100, 1)
    np.testing.assert_array_equal(est.predict(X)[:, 0], made(max_iter=5).fit(X, Y).predict(X))


def test_the_seed_decides_the_start_and_nothing_else_is_touched():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, same, other = (made(random_state=seed, max_iter=5).fit(X, Y).theta_ for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.allclose(one, other)
    assert torch.equal(torch.random.get_rng_state(), before)
    with_state = made(random_state=np.random.RandomState(1), max_iter=5).fit(X, Y).theta_
    np.testing.assert_array_equal(one, with_state)


def test_units_of_the_data_change_the_units_of_the_answer_only():
    """Powers of two scale without rounding: the same bits but for the shifts."""
    one = made(alpha=0.01).fit(X, TWO)
    other = made(alpha=0.01).fit(X * 1024, TWO * 2.0**-20)
    np.testing.assert_allclose(other.predict(X * 1024), one.predict(X) * 2.0**-20, rtol=1e-9)
    np.testing.assert_allclose(other.theta_, one.theta_, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("size", [1e150, 1e-120])
def test_data_of_extreme_size(size):
    est = made(max_iter=30).fit(X * size, Y)
    assert est.score(X * size, Y) > 0.9


def test_means_and_scales_are_those_of_standard_scaler():
    network = TanhNetwork(3, 2)
    weights = RNG.integers(0, 3, 100)
    standardise(network, torch.from_numpy(X), torch.from_numpy(TWO), Weights(torch.from_numpy(weights).double()))
    for name, values in (("x", X), ("y", TWO)):
        scaler = StandardScaler().fit(values, sample_weight=weights)
        np.testing.assert_allclose(getattr(network, f"{name}_mean"), scaler.mean_, rtol=1e-12)
        np.testing.assert_allclose(getattr(network, f"{name}_scale"), scaler.scale_, rtol=1e-12)


@pytest.mark.parametrize("value", [0.0, 3.7, 1e9 + 0.1])
def test_constant_columns_and_targets(value):
    """A constant column says nothing: the same predictions as without it are possible, and nothing overflows."""
    with_constant = np.column_stack([X, np.full(100, value)])
    est = made().fit(with_constant, Y)
    assert est.score(with_constant, Y) > 0.8
    moved = with_constant.copy()
    moved[:, 3] += 1.0  # one unit of a column without scale is one unit, not 1e16 of them
    assert np.isfinite(est.predict(moved)).all()
    flat = made().fit(X, np.full(100, value))
    np.testing.assert_allclose(flat.predict(X), value, rtol=1e-9, atol=1e-9)
    assert flat.result_.success


def test_one_row():
    est = made().fit(X[:1], Y[:1])
    np.testing.assert_allclose(est.predict(X[:1]), Y[:1], atol=1e-9)


def test_frequencies_are_repetition():
    weights = RNG.integers(0, 3, 100)
    repeated = np.repeat(np.arange(100), weights)
    options = {"max_iter": 8, "alpha": 0.1, "hidden_layer_sizes": (4,)}
    one = made(**options).fit(X, Y, sample_weight=weights)
    other = made(**options).fit(X[repeated], Y[repeated])
    np.testing.assert_allclose(one.predict(X), other.predict(X), rtol=1e-6, atol=1e-8)


def test_many_rows_are_reduced_by_cholesky():
    """Half the work of qr; said in the report. Few rows keep qr, and what is asked for is done."""
    many = np.tile(X, (400, 1))
    assert made(max_iter=1).fit(many, np.tile(Y, 400)).solver_ == "cholesky"
    assert made(max_iter=1, solver="qr").fit(many, np.tile(Y, 400)).solver_ == "qr"
    assert made(max_iter=1).fit(X, Y).solver_ == "qr"


@pytest.mark.parametrize("given", [np.float32, torch.float32])
def test_dtype(given):
    est = made(dtype=given).fit(X, Y)
    assert next(est.module_.parameters()).dtype == torch.float32
    assert est.module_.x_mean.dtype == torch.float32
    assert est.score(X, Y) > 0.9


def test_tensors():
    est = made(max_iter=5).fit(torch.from_numpy(X), torch.from_numpy(Y))
    prediction = est.predict(torch.from_numpy(X))
    assert isinstance(prediction, torch.Tensor)
    np.testing.assert_array_equal(prediction.numpy(), made(max_iter=5).fit(X, Y).predict(X))


def test_axes_beyond_two_are_refused():
    with pytest.raises(ValueError, match="X"):
        made().fit(X[:, :, None], Y)


def test_sizes():
    assert hidden_sizes(None) == (10,)
    assert hidden_sizes(7) == (7,)
    assert hidden_sizes([3, np.int64(4)]) == (3, 4)
    assert [layer.out_features for layer in default_network(2, 3, (4, 5)).layers] == [4, 5, 3]


def test_units_bend_within_the_range_of_the_data():
    """Nguyen and Widrow: tanh(w·x + b) bends at w·x = −b, at a distance |b|/‖w‖ from the mean of the features."""
    torch.manual_seed(0)
    layer = TanhNetwork(2, 1, (200,)).layers[0]
    distances = (layer.bias.detach().abs() / torch.linalg.vector_norm(layer.weight.detach(), dim=1)).numpy()
    assert distances.max() <= 1.7
    assert np.histogram(distances, bins=4, range=(0, 1.7))[0].min() > 30  # spread evenly: 50 each


def test_no_warning_of_the_covariance_of_its_weights():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ConvergenceWarning)
        made(max_iter=3).fit(X[:20], Y[:20])  # 51 parameters
