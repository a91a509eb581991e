"""A torch Linear layer with a penalty on its weights is ridge regression: scikit-learn's Ridge is the oracle.

Ridge minimises ‖y − Xw − b‖² + α‖w‖², twice the cost here: the same α, the intercept free in both.
"""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV, KFold

from lmfit_gpu import LMRegressor

N = 60
_rng = np.random.default_rng(11)
X = _rng.normal(size=(N, 3)) * [1.0, 20.0, 0.1]
Y = 4 + X @ [2.0, -0.1, 5.0] + 0.5 * _rng.normal(size=N)
Y2 = np.column_stack([Y, X @ [0.5, 0.1, -3.0] + 100 + _rng.normal(size=N)])
TIMES = (np.arange(N) % 4).astype(float)
SIGMA = 0.3 + np.abs(_rng.normal(size=N))
WEIGHTS = {
    "none": ({}, None),
    "frequencies": ({"sample_weight": TIMES}, TIMES),
    "sigma": ({"sigma": SIGMA}, SIGMA**-2.0),
    "both": ({"sample_weight": TIMES, "sigma": SIGMA}, TIMES * SIGMA**-2.0),
}


def affine(n_outputs=1):
    return torch.nn.Linear(3, n_outputs, dtype=torch.float64)


def assert_equal_to_ridge(fitted, oracle):
    module = fitted.module_
    np.testing.assert_allclose(module.weight.detach().numpy(), np.atleast_2d(oracle.coef_), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(module.bias.detach().numpy(), np.atleast_1d(oracle.intercept_), rtol=1e-9)


@pytest.mark.parametrize("alpha", [1e-6, 0.1, 10.0, 1e4])
@pytest.mark.parametrize("y", [Y, Y2], ids=["one output", "two outputs"])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_penalised_layer_is_ridge_regression(kind, y, alpha):
    given, factors = WEIGHTS[kind]
    n_outputs = 1 if y.ndim == 1 else y.shape[1]
    fitted = LMRegressor(affine(n_outputs), alpha=alpha).fit(X, y, **given)
    assert fitted.result_.success
    assert_equal_to_ridge(fitted, Ridge(alpha, solver="svd").fit(X, y, sample_weight=factors))


@pytest.mark.parametrize(("solver", "rtol"), [("qr", 1e-10), ("cholesky", 1e-8), ("dual", 1e-4), ("cg", 1e-6)])
def test_every_solver_heeds_the_penalty(solver, rtol):
    fitted = LMRegressor(affine(), alpha=10.0, solver=solver).fit(X, Y)
    oracle = Ridge(10.0, solver="svd").fit(X, Y)
    np.testing.assert_allclose(fitted.theta_, [*oracle.coef_, oracle.intercept_], rtol=rtol)


def test_fewer_rows_than_parameters():
    fitted = LMRegressor(affine(), alpha=0.5).fit(X[:3], Y[:3])
    assert_equal_to_ridge(fitted, Ridge(0.5, solver="svd").fit(X[:3], Y[:3]))


def test_covariance_is_that_of_the_penalised_normal_equations():
    """s²(JᵀJ + A²)⁻¹ with s² = Σr²/(n − tr((JᵀJ + A²)⁻¹JᵀJ)): the parameters that the data determine are counted."""
    alpha = 25.0
    fitted = LMRegressor(affine(), alpha=alpha).fit(X, Y)
    J = np.column_stack([X, np.ones(N)])
    inverse = np.linalg.inv(J.T @ J + alpha * np.diag([1.0, 1.0, 1.0, 0.0]))
    r = J @ fitted.theta_ - Y
    effective = np.trace(inverse @ J.T @ J)
    assert 1 < effective < 4
    np.testing.assert_allclose(fitted.covariance_, r @ r / (N - effective) * inverse, rtol=1e-7)


def test_cost_counts_the_penalty():
    fitted = LMRegressor(affine(), alpha=7.0).fit(X, Y)
    slopes = fitted.theta_[:3]
    r = X @ slopes + fitted.theta_[3] - Y
    assert fitted.result_.cost == pytest.approx(0.5 * r @ r + 3.5 * slopes @ slopes, rel=1e-12)


def test_fixed_weights_are_not_shrunk():
    """What is left of the target is ridge regression on the other columns."""
    module = affine()
    with torch.no_grad():
        module.weight[0] = torch.tensor([0.0, -0.125, 0.0])
    fitted = LMRegressor(module, alpha=10.0, fixed=["weight[0,1]"]).fit(X, Y)
    oracle = Ridge(10.0, solver="svd").fit(X[:, [0, 2]], Y + 0.125 * X[:, 1])
    np.testing.assert_allclose(fitted.theta_[[0, 2, 3]], [*oracle.coef_, oracle.intercept_], rtol=1e-8)
    assert fitted.theta_[1] == -0.125


def test_no_penalty_is_least_squares():
    fitted = LMRegressor(affine(), alpha=0.0).fit(X, Y)
    np.testing.assert_allclose(
        fitted.theta_, np.linalg.lstsq(np.column_stack([X, np.ones(N)]), Y, rcond=None)[0], rtol=1e-9
    )


def test_the_best_alpha_of_a_search_is_that_of_ridge():
    grid, folds = {"alpha": [1e-3, 0.3, 3.0, 30.0, 300.0]}, KFold(5, shuffle=True, random_state=0)
    few, noisy = X[:20], Y[:20] + 4 * np.random.default_rng(2).normal(size=20)
    found, oracle = (
        GridSearchCV(base, grid, cv=folds).fit(few, noisy) for base in (LMRegressor(affine()), Ridge(solver="svd"))
    )
    assert found.best_params_ == oracle.best_params_
    assert 0.01 < found.best_params_["alpha"] < 200  # not at an end of the grid: the penalty helps, and may hurt
    for name in ("mean_test_score", "std_test_score"):
        np.testing.assert_allclose(found.cv_results_[name], oracle.cv_results_[name], rtol=1e-7)
