"""warm_start: a second fit goes on where the first has ended, or says why it cannot."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import cross_val_score

from lmfit_gpu import LMRegressor

x = np.linspace(0, 4, 40)
X = x[:, None]
Y = 2.5 * np.exp(-1.3 * x) + 0.5 + 0.02 * np.cos(40 * x)
Y2 = np.column_stack([Y, np.sin(x)])


def decay(x, a, b, c):
    return a * np.exp(-b * x) + c


def torch_decay(x, a, b, c):
    return a * torch.exp(-b * x) + c


def decay_of_theta(x, theta):
    return theta[0] * np.exp(-theta[1] * x) + theta[2]


class Decay(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Parameter(torch.tensor(v, dtype=torch.float64)) for v in (1.0, 1.0, 0.0))

    def forward(self, X):
        return self.a * torch.exp(-self.b * X) + self.c


P0 = {"p0": [1.0, 1.0, 0.0]}
NETWORK = LMRegressor(hidden_layer_sizes=1, alpha=0.1, random_state=0)
ESTIMATORS = {
    "numpy": LMRegressor(decay, **P0),
    "torch": LMRegressor(torch_decay, **P0),
    "theta": LMRegressor(decay_of_theta, **P0),
    "names": LMRegressor(decay, p0={"a": 1.0, "b": 1.0, "c": 0.0}),
    "p0 callable": LMRegressor(decay, p0=lambda x, y: [1.0, 1.0, 0.0]),
    "bounds": LMRegressor(decay, bounds=([0, 0, 0.5], [9, 9, 9]), p0=[1.0, 1.0, 0.6]),
    "fixed": LMRegressor(decay, fixed=["c"], p0=[1.0, 1.0, 0.4]),
    "tied": LMRegressor(decay, tied={"c": lambda a: a / 5}, **P0),
    "residual": LMRegressor(residual=lambda theta, x, y: decay(x, *theta) - y, **P0),
    "module": LMRegressor(Decay()),
    "factory": LMRegressor(Decay),
    "network": NETWORK,
    "search": LMRegressor(decay, p0="auto", bounds=([0, 0, 0], [9, 9, 9])),
}
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)


def warm(estimator):
    return clone(estimator).set_params(warm_start=True)


@every_estimator
def test_a_second_fit_has_nothing_left_to_do(estimator):
    fitted = warm(estimator).fit(X, Y)
    first, n_iter = fitted.theta_.copy(), fitted.n_iter_
    fitted.fit(X, Y)
    assert n_iter > 3
    assert fitted.n_iter_ <= 2
    assert fitted.result_.success
    np.testing.assert_allclose(fitted.theta_, first, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(fitted.stderr_, clone(estimator).fit(X, Y).stderr_, rtol=1e-3)


@every_estimator
def test_a_fit_in_pieces_ends_where_one_fit_does(estimator):
    whole = clone(estimator).fit(X, Y)
    pieces, costs = warm(estimator).set_params(max_iter=4), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the first pieces end at max_iter
        while not costs or not (pieces.result_.success or len(costs) == 40):
            costs.append(pieces.fit(X, Y).result_.cost)
    assert np.all(np.diff(costs) <= 1e-12 * np.array(costs[1:]))
    np.testing.assert_allclose(pieces.theta_, whole.theta_, rtol=1e-4, atol=1e-6)


@every_estimator
def test_without_warm_start_a_second_fit_begins_again(estimator):
    fitted = clone(estimator).fit(X, Y)
    first, n_iter = fitted.theta_.copy(), fitted.n_iter_
    fitted.fit(X, Y)
    assert fitted.n_iter_ == n_iter
    assert np.array_equal(fitted.theta_, first)


@every_estimator
def test_a_clone_and_a_fold_begin_at_the_beginning(estimator):
    fitted, cold = warm(estimator).fit(X, Y), clone(estimator).fit(X, Y)
    again = clone(fitted).fit(X, Y)
    assert again.n_iter_ == cold.n_iter_
    assert np.array_equal(again.theta_, cold.theta_)


def test_folds_do_not_hand_on_their_end():
    estimator, folds = warm(NETWORK), [(np.arange(0, 40, 2), np.arange(1, 40, 2))]
    first = cross_val_score(estimator, X, Y, cv=folds)
    estimator.fit(X, Y)
    assert np.array_equal(cross_val_score(estimator, X, Y, cv=folds), first)


def test_p0_counts_for_the_first_fit_only():
    """A start far off does not matter once there is a fit."""
    fitted = warm(ESTIMATORS["numpy"]).fit(X, Y)
    fitted.set_params(p0=[1.0, -50.0, 1e9]).fit(X, Y)
    assert fitted.n_iter_ <= 2
    np.testing.assert_allclose(fitted.theta_, clone(ESTIMATORS["numpy"]).fit(X, Y).theta_, rtol=1e-7)


@pytest.mark.parametrize("name", ["numpy", "module", "network"])
def test_other_rows_are_fitted_from_there(name):
    """New data near the old: fewer trials than from the start, the same answer."""
    other = Y + 0.01 * np.sin(7 * x)
    cold = clone(ESTIMATORS[name]).fit(X[::2], other[::2])
    fitted = warm(ESTIMATORS[name]).fit(X, Y).fit(X[::2], other[::2])
    assert fitted.n_iter_ < cold.n_iter_
    if name != "network":  # its units are those of the first rows
        np.testing.assert_allclose(fitted.theta_, cold.theta_, rtol=1e-6)
    assert fitted.result_.cost <= 1.1 * cold.result_.cost


def test_a_warm_network_keeps_its_units():
    """Weights mean nothing in other units: the function of the first fit is the start of the second."""
    fitted = warm(NETWORK).fit(X, Y)
    before = fitted.predict(X)
    fitted.set_params(max_iter=0)
    with pytest.warns(ConvergenceWarning):
        fitted.fit(10 * X + 3, 100 * Y)
    np.testing.assert_allclose(fitted.predict(X), before, rtol=1e-12)


def test_the_given_module_stays_as_it_was():
    module = Decay()
    fitted = LMRegressor(module, warm_start=True).fit(X, Y).fit(X, Y)
    assert [parameter.item() for parameter in module.parameters()] == [1.0, 1.0, 0.0]
    assert fitted.module_ is not module


def test_the_start_is_put_within_new_bounds_or_refused():
    fitted = warm(ESTIMATORS["numpy"]).fit(X, Y).set_params(bounds=([0, 0, 0], [2, 9, 9]))
    with pytest.raises(ValueError, match=r"a.*bounds|bounds.*a"):
        fitted.fit(X, Y)


# ---- what cannot go on

CHANGES = {
    "columns": (NETWORK, {}, (np.hstack([X, X]), Y)),
    "outputs": (NETWORK, {}, (X, Y2)),
    "hidden_layer_sizes": (NETWORK, {"hidden_layer_sizes": 4}, (X, Y)),
    "a function of other parameters": (
        ESTIMATORS["numpy"],
        {"model": lambda x, a, b: a * np.exp(-b * x), "p0": [1, 1]},
        (X, Y),
    ),
    "another module": (ESTIMATORS["module"], {"model": torch.nn.Linear(1, 1).double()}, (X, Y)),
    "a module after a function": (ESTIMATORS["numpy"], {"model": Decay(), "p0": None}, (X, Y)),
}


@pytest.mark.parametrize(("estimator", "changes", "data"), CHANGES.values(), ids=CHANGES)
def test_another_model_is_refused_and_a_fresh_fit_is_the_remedy(estimator, changes, data):
    """MLPRegressor, too, raises ValueError when hidden_layer_sizes changes under warm_start."""
    fitted = warm(estimator).fit(X, Y).set_params(**changes)
    with pytest.raises(ValueError, match="warm_start"):
        fitted.fit(*data)
    fitted.set_params(warm_start=False).fit(*data)
    assert fitted.predict(data[0]).shape == data[1].shape
