"""Hand over torch modules and residual functions (T) and check every sentence those cases demand.

That each curve has its right answer from a plain function is checked in test_cases.py.
"""

from __future__ import annotations

import warnings
from typing import Any

import cases_interface
import numpy as np
import pytest
import torch
from cases import compare
from cases_interface import (
    T1,
    T2,
    T3_EXPECTED,
    T3_X,
    T3_Y,
    T5_EXPECTED,
    T5_START,
    T5_X,
    T5_Y,
    T7,
    FrozenIntercept,
    batch_norm_net,
    deviance_residual,
    dropout_net,
    line_residual,
    mean_squared_error,
    poisson_mean,
    tanh_net_module,
    torch_deviance_residual,
    torch_line_residual,
    torch_mean_squared_error,
)
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import r2_score

from lmfit_gpu import LMRegressor
from lmfit_gpu.exceptions import CovarianceWarning

# A trial point may overflow in the user's function, and numpy says so from the line of that function.
pytestmark = pytest.mark.filterwarnings(f"ignore::RuntimeWarning:{cases_interface.__name__}")

FORMS = ["numpy", "torch"]


# T1: frozen parameters.


def test_frozen_parameter_stays_and_is_not_counted() -> None:
    module = FrozenIntercept()
    estimator = LMRegressor(module).fit(T1.x[:, None], T1.y)
    assert list(estimator.params_) == ["slope"]
    assert compare(T1.expected, estimator.theta_, estimator.stderr_, 2 * estimator.result_.cost) == []
    assert estimator.covariance_.shape == (1, 1)
    assert estimator.module_ is not module
    assert estimator.module_.intercept.item() == 0.5
    assert not estimator.module_.intercept.requires_grad
    assert estimator.module_.slope.item() == estimator.theta_[0]
    assert module.slope.item() == 0.0


# T2: more parameters than points.


@pytest.mark.parametrize("form", FORMS)
def test_underdetermined_net_as_a_function(form: str) -> None:
    with pytest.warns(CovarianceWarning):
        estimator = LMRegressor(T2.model(form), p0=T2.p0).fit(T2.x[:, None], T2.y)
    assert_perfect_net(estimator, rss_limit=T2.expected.rss_atol)


@pytest.mark.parametrize(("dtype", "rss_limit"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_underdetermined_net_as_a_module(dtype: torch.dtype, rss_limit: float) -> None:
    with pytest.warns(CovarianceWarning):
        estimator = LMRegressor(tanh_net_module().to(dtype)).fit(T2.x[:, None], T2.y)
    assert_perfect_net(estimator, rss_limit)


def assert_perfect_net(estimator: LMRegressor, rss_limit: float) -> None:
    predicted = estimator.predict(T2.x[:, None])
    assert np.sum((predicted - T2.y) ** 2) < rss_limit
    assert 2 * estimator.result_.cost < rss_limit
    assert estimator.n_iter_ <= 200
    assert np.all(np.isfinite(estimator.theta_))
    assert estimator.rank_ <= len(T2.y)
    assert np.all(np.isposinf(estimator.stderr_))
    assert np.all(np.isposinf(estimator.covariance_.diagonal()))
    accepted = [record.trial_cost for record in estimator.result_.history if record.accepted]
    assert len(accepted) > 3
    assert np.all(np.diff(accepted) <= 0)


@pytest.mark.parametrize("solver", ["cholesky", "dual", "cg"])
def test_every_solver_gives_the_same_first_step_with_fewer_points_than_parameters(solver: str) -> None:
    ends = []
    for name in ("qr", solver):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            warnings.simplefilter("ignore", CovarianceWarning)
            options = dict(max_iter=1, damping="marquardt")  # one λ for all
            ends.append(LMRegressor(tanh_net_module(), solver=name, **options).fit(T2.x[:, None], T2.y).theta_)
    assert np.linalg.norm(ends[1] - ends[0]) <= 1e-6 * np.linalg.norm(ends[0] - T2.p0)
    assert not np.array_equal(ends[0], T2.p0)


def test_cost_of_the_net_never_increases() -> None:
    costs = []
    for max_iter in (1, 2, 3, 4, 6, 8):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            warnings.simplefilter("ignore", CovarianceWarning)
            estimator = LMRegressor(tanh_net_module(), max_iter=max_iter).fit(T2.x[:, None], T2.y)
        costs.append(estimator.result_.cost)
    assert np.all(np.diff(costs) <= 0)
    assert costs[-1] < costs[0]


# T3: BatchNorm and Dropout. A module is fitted in eval mode, whatever mode it comes in.


def buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_no_trace(estimator: LMRegressor, module: torch.nn.Module, before: dict, training: bool) -> None:
    """Check that neither the fit nor predict moved a buffer or changed a mode of the user's module."""
    first, second = estimator.predict(T3_X), estimator.predict(T3_X)
    assert np.array_equal(first, second)
    assert np.sum((first - T3_Y) ** 2) == pytest.approx(2 * estimator.result_.cost, rel=1e-6, abs=1e-12)
    for fitted in (module, estimator.module_):
        after = buffers(fitted)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(part.training is training for part in module.modules())


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_batch_norm_keeps_its_statistics(training: bool) -> None:
    module = batch_norm_net().train(training)
    before = buffers(module)
    with pytest.warns(CovarianceWarning):  # scale and weight are one parameter: 7 parameters, 3 directions
        estimator = LMRegressor(module).fit(T3_X, T3_Y)
    assert compare(T3_EXPECTED, predict=estimator.predict(T3_X)) == []
    assert estimator.rank_ == 3
    assert {"0.weight[1]", "0.bias[0]", "1.weight[0,1]"} <= set(estimator.params_)
    assert len(estimator.params_) == 7
    assert_no_trace(estimator, module, before, training)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_dropout_is_off_during_the_fit(training: bool) -> None:
    module = dropout_net().train(training)
    before = buffers(module)
    estimators = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        with pytest.warns(CovarianceWarning):
            estimators.append(LMRegressor(module).fit(T3_X, T3_Y))
    assert np.array_equal(estimators[0].theta_, estimators[1].theta_)
    assert estimators[0].result_.success
    assert_no_trace(estimators[0], module, before, training)


# T5: a residual function alone.


def test_deviance_residuals_give_the_maximum_of_the_poisson_likelihood() -> None:
    estimator = LMRegressor(residual=deviance_residual, p0=T5_START).fit(T5_X[:, None], T5_Y)
    assert compare(T5_EXPECTED, estimator.theta_, rss=2 * estimator.result_.cost) == []


def test_torch_deviance_residuals_work_or_the_derivative_is_named() -> None:
    try:
        estimator = LMRegressor(residual=torch_deviance_residual, p0=T5_START).fit(T5_X[:, None], T5_Y)
    except ValueError as error:
        assert "finite" in str(error)
    else:
        assert compare(T5_EXPECTED, estimator.theta_, rss=2 * estimator.result_.cost) == []


def test_predict_of_a_residual_function_needs_predict_fn() -> None:
    X, options = T5_X[:, None], dict(residual=deviance_residual, p0=T5_START)
    silent = LMRegressor(**options).fit(X, T5_Y)
    for method in ("predict", "score"):
        assert not hasattr(silent, method)
        with pytest.raises(AttributeError) as missing:
            getattr(silent, method)
        assert "predict_fn" in f"{missing.value} {missing.value.__cause__}"  # available_if chains the reason
    estimator = LMRegressor(predict_fn=poisson_mean, **options).fit(X, T5_Y)
    assert np.allclose(estimator.predict(X), poisson_mean(np.array(T5_EXPECTED.params), X), rtol=1e-4, atol=0)
    assert estimator.score(X, T5_Y) == pytest.approx(r2_score(T5_Y, estimator.predict(X)))


# T7: a scalar loss as residual.


@pytest.mark.parametrize("residual", [line_residual, torch_line_residual])
def test_vector_residual_is_fitted(residual: Any) -> None:
    estimator = LMRegressor(residual=residual, p0=T7.p0).fit(T7.x[:, None], T7.y)
    assert compare(T7.expected, estimator.theta_, estimator.stderr_, 2 * estimator.result_.cost) == []


@pytest.mark.parametrize("residual", [mean_squared_error, torch_mean_squared_error])
def test_scalar_loss_is_not_taken_for_a_residual_silently(residual: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            LMRegressor(residual=residual, p0=T7.p0).fit(T7.x[:, None], T7.y)
        except ValueError as error:
            texts = [str(error)]
        else:
            texts = [str(warning.message) for warning in caught]
    assert any("vector" in text and "2 parameters" in text and ("1 " in text or "one " in text) for text in texts)
