"""What a reviewer found wrong in networks, penalties and early stopping; each failed before its mend."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

from lmfit_gpu import EarlyStopping, LMRegressor
from lmfit_gpu.early_stopping import split_rows

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 3))
Y = 5 * np.sin(X[:, 0]) + 3 * X[:, 1]


@pytest.fixture(autouse=True)
def unfinished_fits_are_meant():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


@pytest.mark.parametrize("solver", ["qr", "cholesky", "dual"])
def test_zero_weights_are_a_saddle_not_a_minimum(solver):
    """A start with a penalty far above the cost of the data is pulled there at once; R² was 0, and success True."""
    est = LMRegressor(hidden_layer_sizes=100, alpha=1.0, random_state=0, solver=solver, max_iter=40).fit(X, Y)
    assert est.score(X, Y) > 0.98


@pytest.mark.parametrize(("sizes", "alpha"), [((10, 10), 10.0), ((10, 10, 10), 3.0)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_first_step_does_not_end_at_zero_weights(sizes, alpha, seed):
    """With two hidden layers they are a local minimum; half of the seeds ended there, R² 0."""
    est = LMRegressor(hidden_layer_sizes=sizes, alpha=alpha, random_state=seed).fit(X, Y)
    assert est.score(X, Y) > 0.9


def test_zero_weights_are_the_minimum_when_the_penalty_outweighs_the_data():
    """α above the largest singular value of Xᵀy: no product of weights pays for itself."""
    est = LMRegressor(hidden_layer_sizes=5, alpha=1e4, random_state=0).fit(X, Y)
    assert est.result_.success
    np.testing.assert_allclose(est.predict(X), Y.mean(), atol=1e-3)


x = np.linspace(0, 4, 60)
DECAY = 2 * np.exp(-0.7 * x) + 0.01 * np.cos(40 * x)
STOPPING = EarlyStopping(0.1, 2)


def held_out_x():
    return x[split_rows(60, 0.1, 0)[1].numpy()]


def test_held_out_rows_that_are_not_finite_at_the_start_are_an_error():
    held = held_out_x()

    def model(x, a, b):
        return np.where(np.isin(x, held) & (b < 0.5), np.nan, a * np.exp(-b * x))

    est = LMRegressor(model, p0=[1, 0.1], early_stopping=STOPPING, random_state=0)
    with pytest.raises(ValueError, match="early_stopping: residuals of the held-out rows are not finite"):
        est.fit(x[:, None], DECAY)


def test_held_out_rows_that_the_model_refuses_later_count_as_worse():
    held = held_out_x()

    def model(x, a, b):
        if np.isin(x, held).any() and a > 1.9:
            raise ValueError("refused")
        return a * np.exp(-b * x)

    est = LMRegressor(model, p0=[1, 0.1], early_stopping=STOPPING, random_state=0).fit(x[:, None], DECAY)
    assert est.result_.status.name == "STOPPED_EARLY"
    assert est.theta_[0] <= 1.9
    assert est.result_.history[-1].held_out_cost == np.inf


def test_predictions_in_threads_leave_the_module_alone():
    est = LMRegressor(hidden_layer_sizes=4, random_state=0, max_iter=5).fit(X, Y)
    expected = est.predict(X)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: est.predict(X), range(80)):
            np.testing.assert_array_equal(found, expected)
    assert all(isinstance(p, torch.nn.Parameter) and p.requires_grad for p in est.module_.parameters())


class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(10, 2, dtype=torch.float64)
        self.out = torch.nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, tokens):
        return self.out(self.table(tokens).flatten(1))


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.uint8, np.uint16, np.uint32, np.int32, np.int64])
@pytest.mark.parametrize("form", [np.asarray, torch.from_numpy])
def test_tokens_of_any_type(dtype, form):
    tokens = RNG.integers(0, 10, (60, 2))
    y = np.cos(tokens).sum(1)
    torch.manual_seed(0)
    est = LMRegressor(Tokens(), max_iter=3, alpha=1e-3).fit(tokens, y)
    given = form(tokens.astype(dtype))
    np.testing.assert_array_equal(np.asarray(est.predict(given)), est.predict(tokens))
    torch.manual_seed(0)
    np.testing.assert_array_equal(LMRegressor(Tokens(), max_iter=3, alpha=1e-3).fit(given, y).theta_, est.theta_)


def test_a_warm_start_keeps_the_units_of_the_penalty_with_those_of_the_network():
    est = LMRegressor(warm_start=True, random_state=0, alpha=1.0, max_iter=60).fit(X, Y)
    est.fit(X, 1000 * Y)
    assert est.score(X, 1000 * Y) > 0.98


def test_a_subclass_with_arguments_of_its_own():
    class Extended(LMRegressor):
        def __init__(self, extra=1, **options):
            super().__init__(**options)
            self.extra = extra

    est = Extended(extra=2, random_state=0, max_iter=3).fit(X, Y)
    assert est.predict(X).shape == (200,)


def test_numpy_booleans_stop_early_or_not():
    stopping = [
        LMRegressor(hidden_layer_sizes=2, random_state=0, early_stopping=flag) for flag in np.array([True, False])
    ]
    used = [est.fit(X, Y).result_.history[-1].held_out_cost for est in stopping]
    assert np.isfinite(used[0])
    assert np.isnan(used[1])


@pytest.mark.parametrize("solver", ["dual", "cg"])
def test_degrees_of_freedom_are_never_negative(solver):
    options = {"hidden_layer_sizes": 210, "alpha": 1.0, "random_state": 0, "solver": solver, "max_iter": 1}
    assert LMRegressor(**options).fit(X[:30], Y[:30]).result_.dof >= 0
    assert (
        LMRegressor(hidden_layer_sizes=20, alpha=0.01, random_state=0, max_iter=20).fit(X[:20], Y[:20]).result_.dof >= 0
    )
