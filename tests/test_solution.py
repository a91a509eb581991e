"""A fitted estimator with its data: kept by reference, not pickled, given again, and known to be the same."""

import copy
import pickle

import numpy as np
import pytest
import torch

from lmfit_gpu import LMRegressor
from lmfit_gpu.exceptions import CovarianceWarning
from lmfit_gpu.solution import solution_of

RNG = np.random.default_rng(1)
x = np.linspace(0, 4, 40)
X = x[:, None]
Y = 2.5 * np.exp(-1.3 * x) + 0.5 + 0.02 * RNG.normal(size=40)


def decay(x, a, b, c):
    return a * np.exp(-b * x) + c


def decay_torch(x, a, b, c):
    return a * torch.exp(-b * x) + c


def fitted(model=decay, y=Y, **options):
    return LMRegressor(model, p0=[2, 1, 0.5], **options).fit(X, y)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (decay, {}),
        (decay_torch, {}),
        (decay, {"loss": "huber", "f_scale": 0.01}),
        (decay, {"bounds": {"c": (None, 0.5)}, "fixed": ["a"]}),
        (decay_torch, {"tied": {"c": lambda a: 0.2 * a}}),
        (decay, {"early_stopping": True, "random_state": 0}),
    ],
)
def test_it_is_the_problem_of_the_fit(model, options):
    est = fitted(model, **options)
    found = solution_of(est)
    assert found.problem.cost(found.theta) == pytest.approx(est.result_.cost, rel=1e-12)
    assert found.theta.numel() == found.free.sum()
    columns = found.jacobian(plain=True).whole().numpy()
    residual = est.predict(found.data.X) - found.data.y
    np.testing.assert_allclose(columns[-1], residual, atol=1e-14)
    found.close()


def test_the_data_are_references_and_no_part_of_a_pickle():
    est = fitted()
    assert np.shares_memory(est._data.X, X)
    assert copy.copy(est)._data.X is est._data.X
    assert copy.deepcopy(est)._data.X is est._data.X
    other = pickle.loads(pickle.dumps(est))
    assert len(pickle.dumps(fitted(y=Y))) == len(pickle.dumps(est))
    assert other._data is None
    with pytest.raises(ValueError, match=r"X, y: the estimator has no data .* give those of the fit as X=, y="):
        solution_of(other)
    found = solution_of(other, X, Y)
    assert found.problem.cost(found.theta) == pytest.approx(est.result_.cost, rel=1e-14)


def test_a_saved_one_has_no_data(tmp_path):
    fitted().save(tmp_path / "est")
    other = LMRegressor.load(tmp_path / "est", decay)
    with pytest.raises(ValueError, match="has no data"):
        solution_of(other)
    assert solution_of(other, X, Y).problem.n_residuals == 40


def test_other_data_and_changed_options_are_told():
    est = fitted()
    with pytest.raises(ValueError, match="not the data, or not the options, of the fit: 40 residuals with a cost of"):
        solution_of(est, X, Y + 0.01)
    with pytest.raises(ValueError, match="39 residuals"):
        solution_of(est, X[:-1], Y[:-1])
    with pytest.raises(ValueError, match="X: got None with other data"):
        solution_of(est, None, Y)
    with pytest.raises(ValueError, match="X has 2 features"):
        solution_of(est, np.hstack((X, X)), Y)
    est.set_params(loss="huber", f_scale=0.01)
    with pytest.raises(ValueError, match="not the options"):
        solution_of(est)


def test_data_changed_in_place_are_told():
    y = Y.copy()
    est = fitted(y=y)
    y[3] += 1
    with pytest.raises(ValueError, match="not the data"):
        solution_of(est)


def test_a_jacobian_that_fails_at_the_solution_leaves_the_fit():
    calls = [0]

    def jac(x, a, b, c):
        calls[0] += 1
        if calls[0] > jac.allowed:
            raise RuntimeError("no more")
        e = np.exp(-b * x)
        return np.stack((e, -a * x * e, np.ones_like(x)), axis=1)

    jac.allowed = 10**9
    expected = fitted(jac=jac, covariance="HC1").theta_
    first = calls[0]
    calls[0] = 0
    fitted(jac=jac)
    calls[0], jac.allowed = 0, first - 1
    with pytest.warns(CovarianceWarning, match="covariance='HC1': the Jacobian at the solution failed: no more"):
        est = fitted(jac=jac, covariance="HC1")
    np.testing.assert_allclose(est.theta_, expected, rtol=1e-9)
    assert np.isinf(est.stderr_).all()


def test_ctrl_c_in_the_sandwich_keeps_the_point():
    calls = [0]

    def jac(x, a, b, c):
        calls[0] += 1
        if calls[0] == jac.at:
            raise KeyboardInterrupt
        e = np.exp(-b * x)
        return np.stack((e, -a * x * e, np.ones_like(x)), axis=1)

    jac.at = 0
    expected = fitted(jac=jac, covariance="HC1").theta_
    jac.at, calls[0] = calls[0], 0
    est = LMRegressor(decay, p0=[2, 1, 0.5], jac=jac, covariance="HC1")
    with pytest.raises(KeyboardInterrupt):
        est.fit(X, Y)
    np.testing.assert_allclose(est.theta_, expected, rtol=1e-9)


@pytest.mark.parametrize("options", [{"covariance": "robust"}, {"loss": "huber", "f_scale": 0.02}, {}])
def test_what_is_known_of_the_errors_is_saved(options, tmp_path):
    sigma = None if options else np.linspace(0.1, 0.2, 40)
    est = LMRegressor(decay, p0=[2, 1, 0.5], **options).fit(X, Y, sigma=sigma)
    est.save(tmp_path / "est")
    for other in (LMRegressor.load(tmp_path / "est", decay), pickle.loads(pickle.dumps(est))):
        np.testing.assert_array_equal(other.stderr_, est.stderr_)
        assert other.conf_int() == est.conf_int()
        np.testing.assert_array_equal(other.predict(X, return_std=True)[1], est.predict(X, return_std=True)[1])
        assert other.report() == est.report()
