"""Early stopping: which rows are held out, when the fit ends, and which of its points is kept.

The oracle is a fit of the other rows alone, stopped after 1, 2, ... trials: its points are those that early stopping
chooses from, and the cost of the held-out rows is computed here from predictions.
"""

import functools
import pickle
import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV

from lmfit_gpu import EarlyStopping, LMRegressor
from lmfit_gpu.early_stopping import split_rows
from lmfit_gpu.result import Status

# Networks that fit the noise have no covariance: that is not what is tested.
pytestmark = pytest.mark.filterwarnings("ignore::lmfit_gpu.exceptions.CovarianceWarning")

N, SEED = 60, 3
_rng = np.random.default_rng(7)
X = np.sort(_rng.uniform(-3, 3, N))[:, None]
Y = np.sin(2 * X[:, 0]) + 0.3 * _rng.normal(size=N)
Y2 = np.column_stack([Y, np.cos(X[:, 0]) + 0.3 * _rng.normal(size=N)])
TIMES = (1 + np.arange(N) % 3).astype(float)
SIGMA = 0.2 + 0.3 * np.abs(X[:, 0])
STOPPING = EarlyStopping(fraction=0.3, patience=4)


def waves(x, theta):
    """Return a sum of sines of many frequencies: enough to fit the noise."""
    return sum(theta[k] * np.sin((0.5 + 0.3 * k) * x + theta[15 + k]) for k in range(15))


class Wide(torch.nn.Module):
    def __init__(self, n_features_in_, n_outputs):
        super().__init__()
        self.inner = torch.nn.Linear(n_features_in_, 25, dtype=torch.float64)
        self.outer = torch.nn.Linear(25, n_outputs, dtype=torch.float64)

    def forward(self, X):
        return self.outer(torch.tanh(3 * self.inner(X)))


ESTIMATORS = {
    "network": LMRegressor(hidden_layer_sizes=25, random_state=SEED),
    "factory": LMRegressor(Wide, random_state=SEED),
    "function": LMRegressor(waves, p0=np.full(30, 0.1), random_state=SEED),
}


def rows(fraction=STOPPING.fraction, n_rows=N, seed=SEED):
    return tuple(part.numpy() for part in split_rows(n_rows, fraction, seed))


def squares(residual, **weights):
    """Return ½ Σ w (r/σ)²."""
    factors = weights.get("sample_weight", 1.0) / np.asarray(weights.get("sigma", 1.0)) ** 2
    return 0.5 * np.sum(factors * (residual**2).reshape(len(residual), -1).sum(1))


def points(estimator, max_iter, y=Y, **weights):
    """Return the fits of the rows that are not held out, stopped after 0, 1, ... trials, and the held-out cost of each.

    Only trials that moved count: the others repeat the point before.
    """
    train, held = rows()
    there = {name: values[train] for name, values in weights.items()}
    here = {name: values[held] for name, values in weights.items()}
    fits = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for most in range(max_iter + 1):
            fits.append(clone(estimator).set_params(max_iter=most).fit(X[train], y[train], **there))
    return fits, [squares(fit.predict(X[held]) - y[held], **here) for fit in fits]


CASES = {
    **{name: (estimator, Y, {}) for name, estimator in ESTIMATORS.items()},
    "two outputs": (ESTIMATORS["network"], Y2, {}),
    "sample_weight": (ESTIMATORS["network"], Y, {"sample_weight": TIMES}),
    "sigma": (ESTIMATORS["network"], Y, {"sigma": SIGMA}),
    "sigma of a function": (ESTIMATORS["function"], Y, {"sigma": SIGMA, "sample_weight": TIMES}),
}


@pytest.mark.parametrize(("estimator", "y", "weights"), CASES.values(), ids=CASES)
def test_the_point_of_the_least_held_out_cost_is_kept(estimator, y, weights):
    fitted = clone(estimator).set_params(early_stopping=STOPPING).fit(X, y, **weights)  # a warning would be an error
    assert fitted.result_.status is Status.STOPPED_EARLY
    assert not fitted.result_.success
    fits, costs = points(estimator, fitted.n_iter_, y, **weights)
    best = int(np.argmin(costs))
    assert best < fitted.n_iter_  # it went on, and back
    np.testing.assert_allclose(fitted.theta_, fits[best].theta_, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(fitted.predict(X), fits[best].predict(X), rtol=1e-6, atol=1e-8)
    told = [record.held_out_cost for record in fitted.result_.history]
    np.testing.assert_allclose(told, costs[1:], rtol=1e-5)
    assert fitted.result_.cost == pytest.approx(fits[best].result_.cost, rel=1e-6)
    assert fitted.result_.stop.measured == pytest.approx(costs[best], rel=1e-6)
    assert f"at iteration {best}" in fitted.result_.message


@pytest.mark.parametrize("patience", [1, 3, 6])
def test_patience_counts_accepted_trials(patience):
    stopping = EarlyStopping(STOPPING.fraction, patience)
    fitted = clone(ESTIMATORS["network"]).set_params(early_stopping=stopping).fit(X, Y)
    history = fitted.result_.history
    accepted = [record.held_out_cost for record in history if record.accepted]
    assert history[-1].accepted
    assert len(accepted) - 1 - int(np.argmin(accepted)) == patience
    for end in range(1, len(accepted)):  # and never before
        waited = end - 1 - int(np.argmin(accepted[:end]))
        assert waited < patience


def test_the_held_out_rows_take_no_part():
    """Targets of held-out rows change when the fit ends, not where it goes."""
    train, held = rows()
    other = Y.copy()
    other[held] += 5
    options = {"early_stopping": EarlyStopping(STOPPING.fraction, 1000), "max_iter": 6}
    with pytest.warns(ConvergenceWarning):
        first = clone(ESTIMATORS["network"]).set_params(**options).fit(X, Y)
    with pytest.warns(ConvergenceWarning):
        second = clone(ESTIMATORS["network"]).set_params(**options).fit(X, other)
    assert [r.trial_cost for r in first.result_.history] == [r.trial_cost for r in second.result_.history]
    assert [r.held_out_cost for r in first.result_.history] != [r.held_out_cost for r in second.result_.history]
    assert first.result_.n_residuals == len(train) == N - len(held)
    assert torch.equal(first.module_.y_mean, second.module_.y_mean)


def test_it_predicts_better_than_a_fit_to_the_end():
    fresh = np.linspace(-2.9, 2.9, 400)[:, None]
    truth = np.sin(2 * fresh[:, 0])
    early = LMRegressor(hidden_layer_sizes=25, early_stopping=True, random_state=SEED).fit(X, Y)
    with pytest.warns(ConvergenceWarning):
        late = LMRegressor(hidden_layer_sizes=25, max_iter=200, random_state=SEED).fit(X, Y)
    assert late.score(X, Y) > early.score(X, Y)
    errors = [np.mean((each.predict(fresh) - truth) ** 2) for each in (early, late)]
    assert errors[0] < 0.5 * errors[1]


# ---- the split


@pytest.mark.parametrize(
    ("n_rows", "fraction", "n_held"), [(60, 0.3, 18), (60, 0.1, 6), (5, 0.1, 1), (2, 0.1, 1), (10, 0.99, 9)]
)
def test_split(n_rows, fraction, n_held):
    train, held = rows(fraction, n_rows)
    assert len(held) == n_held
    assert np.array_equal(np.sort(np.concatenate([train, held])), np.arange(n_rows))
    assert np.all(np.diff(train) > 0)


def test_one_row_cannot_be_split():
    with pytest.raises(ValueError, match="early_stopping: got 1 row"):
        LMRegressor(early_stopping=True).fit(X[:1], Y[:1])


def test_random_state_decides():
    fits = [clone(ESTIMATORS["function"]).set_params(early_stopping=STOPPING, random_state=s) for s in (1, 1, 2)]
    first, again, other = (each.fit(X, Y).theta_ for each in fits)
    assert np.array_equal(first, again)
    assert not np.allclose(first, other, rtol=1e-3)


def test_rows_that_are_left_out_are_left_out_first():
    """Rows with NaN or no weight are not there: the split is that of the others."""
    missing, times = Y.copy(), np.ones(N)
    missing[::10], times[::10] = np.nan, 0
    there = np.isfinite(missing)
    estimator = clone(ESTIMATORS["function"]).set_params(early_stopping=STOPPING)
    alone = clone(estimator).fit(X[there], Y[there])
    omitted = clone(estimator).set_params(nan_policy="omit").fit(X, missing)
    weightless = clone(estimator).fit(X, Y, sample_weight=times)
    assert np.array_equal(omitted.theta_, alone.theta_)
    assert np.array_equal(weightless.theta_, alone.theta_)


# ---- ends that are not early


def decay(x, a, b):
    return a * np.exp(-b * x)


def test_a_fit_that_converges_at_its_best_point_is_a_success():
    x = np.linspace(0, 3, 40)[:, None]
    exact = decay(x[:, 0], 2.0, 0.7)
    fitted = LMRegressor(decay, p0=[1, 1], early_stopping=True, random_state=0).fit(x, exact)
    assert fitted.result_.success
    np.testing.assert_allclose(fitted.theta_, [2.0, 0.7], rtol=1e-9)
    assert fitted.result_.n_residuals == 36


def test_max_iter_is_told_as_such_and_the_best_point_is_kept():
    estimator = clone(ESTIMATORS["network"]).set_params(early_stopping=EarlyStopping(0.3, 1000))
    with pytest.warns(ConvergenceWarning, match="MAX_ITER"):
        fitted = estimator.set_params(max_iter=25).fit(X, Y)
    costs = [record.held_out_cost for record in fitted.result_.history]
    assert costs[-1] > min(costs)
    _, held = rows()
    assert squares(fitted.predict(X[held]) - Y[held]) == pytest.approx(min(costs), rel=1e-9)


def test_a_callback_sees_the_held_out_cost_and_may_stop():
    seen = []

    def third(record):
        seen.append(record.held_out_cost)
        return record.n_iter == 3

    estimator = clone(ESTIMATORS["network"]).set_params(early_stopping=STOPPING, callback=third)
    with pytest.warns(ConvergenceWarning, match="STOPPED_BY_CALLBACK"):
        estimator.fit(X, Y)
    _, costs = points(ESTIMATORS["network"], 3)
    np.testing.assert_allclose(seen, costs[1:], rtol=1e-6)
    assert estimator.n_iter_ == 3


def test_an_interrupt_keeps_the_best_point():
    def interrupted(record):
        if record.n_iter == 12:
            raise KeyboardInterrupt

    options = {"early_stopping": EarlyStopping(0.3, 1000), "callback": interrupted}
    estimator = clone(ESTIMATORS["network"]).set_params(**options)
    with pytest.raises(KeyboardInterrupt):
        estimator.fit(X, Y)
    assert estimator.result_.status is Status.INTERRUPTED
    assert np.all(np.isfinite(estimator.predict(X)))


# ---- with other options


def test_a_robust_loss_judges_the_held_out_rows_too():
    """½ Σ ρ(r²) with soft_l1's ρ(z) = 2(√(1 + z) − 1)."""
    _, held = rows()
    estimator = clone(ESTIMATORS["function"]).set_params(loss="soft_l1", early_stopping=STOPPING).fit(X, Y)
    r = estimator.predict(X[held]) - Y[held]
    expected = np.sum(np.sqrt(1 + r**2) - 1)
    assert min(record.held_out_cost for record in estimator.result_.history) == pytest.approx(expected, rel=1e-9)


def test_the_penalty_is_no_part_of_the_held_out_cost():
    _, held = rows()
    estimator = clone(ESTIMATORS["factory"]).set_params(alpha=1e-3, early_stopping=STOPPING).fit(X, Y)
    expected = squares(estimator.predict(X[held]) - Y[held])
    assert min(record.held_out_cost for record in estimator.result_.history) == pytest.approx(expected, rel=1e-9)


def test_bounds_hold():
    """The best b within them is the upper one, 1.9 (2 in truth)."""
    options = {"p0": [1, 1.8], "bounds": {"b": (1.5, 1.9)}, "early_stopping": True, "random_state": SEED}
    fitted = LMRegressor(lambda x, a, b: a * np.sin(b * x), **options).fit(X, Y)
    assert fitted.params_["b"] == 1.9


def test_in_a_search_and_in_a_pickle():
    grid = {"early_stopping": [EarlyStopping(0.3, 1), EarlyStopping(0.3, 8)]}
    search = GridSearchCV(clone(ESTIMATORS["network"]), grid, cv=3, error_score="raise").fit(X, Y)
    assert search.best_params_["early_stopping"] in grid["early_stopping"]
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    assert again.early_stopping == search.best_params_["early_stopping"]
    assert np.array_equal(again.predict(X), search.predict(X))


@pytest.mark.parametrize("value", [None, False])
def test_nothing_is_held_out_unless_asked(value):
    fitted = LMRegressor(decay, p0=[1, 1], early_stopping=value).fit(X, decay(X[:, 0], 2.0, 0.7))
    assert fitted.result_.n_residuals == N
    assert all(np.isnan(record.held_out_cost) for record in fitted.result_.history)


# ---- refused


def running_sum(x, a, b):
    return np.cumsum(a * np.sin(b * x))


def test_coupled_rows_are_refused():
    with pytest.raises(ValueError, match="early_stopping: the model couples rows"):
        LMRegressor(running_sum, p0=[1, 2], early_stopping=True, random_state=0).fit(X, Y)
    residual = functools.partial(lambda theta, x, y: np.append(theta[0] * np.sin(theta[1] * x) - y, theta[0]))
    with pytest.raises(ValueError, match="early_stopping"):
        LMRegressor(residual=residual, p0=[1, 2], early_stopping=True, random_state=0).fit(X, Y)
