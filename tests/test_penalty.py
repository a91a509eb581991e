"""penalty: ½ α ‖weights‖² as equations of the least-squares problem, against Ridge and the normal equations."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from lmfit_gpu import LMRegressor
from lmfit_gpu.constraints import resolve_constraints
from lmfit_gpu.exceptions import CovarianceWarning
from lmfit_gpu.network import TanhNetwork
from lmfit_gpu.penalty import penalty_on

RNG = np.random.default_rng(0)
X = RNG.standard_normal((60, 4))
Y = np.stack([X @ [1.0, -2.0, 0.5, 0.0] + 3, np.sin(X[:, 0]) - 1], 1) + 0.1 * RNG.standard_normal((60, 2))
WEIGHTS = RNG.integers(0, 4, 60)
SIGMA = RNG.uniform(0.5, 2, 60)
DIGITS = {"qr": 1e-12, "cholesky": 1e-11, "dual": 1e-6, "cg": 1e-7}


def linear(n_outputs=1):
    torch.manual_seed(0)
    return torch.nn.Linear(4, n_outputs).double()


def coefficients(est):
    return est.module_.weight.detach().numpy(), est.module_.bias.detach().numpy()


@pytest.mark.parametrize("solver", DIGITS)
@pytest.mark.parametrize("alpha", [0.3, 50.0])
def test_a_linear_layer_is_ridge_regression(solver, alpha):
    est = LMRegressor(linear(2), alpha=alpha, solver=solver).fit(X, Y, sample_weight=WEIGHTS)
    ridge = Ridge(alpha=alpha).fit(X, Y, sample_weight=WEIGHTS)
    weight, bias = coefficients(est)
    np.testing.assert_allclose(weight, ridge.coef_, atol=DIGITS[solver])
    np.testing.assert_allclose(bias, ridge.intercept_, atol=DIGITS[solver])
    assert est.result_.success


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]])
@pytest.mark.parametrize("chunk_rows", ["auto", 7])
def test_blocks_and_devices_do_not_matter(devices, chunk_rows):
    est = LMRegressor(linear(), alpha=2.0, devices=devices, chunk_rows=chunk_rows).fit(X, Y[:, 0])
    np.testing.assert_allclose(coefficients(est)[0][0], Ridge(alpha=2.0).fit(X, Y[:, 0]).coef_, atol=1e-12)


def test_with_sigma_the_residuals_are_in_its_units():
    est = LMRegressor(linear(), alpha=2.0).fit(X, Y[:, 0], sigma=SIGMA)
    ridge = Ridge(alpha=2.0).fit(X, Y[:, 0], sample_weight=1 / SIGMA**2)
    np.testing.assert_allclose(coefficients(est)[0][0], ridge.coef_, atol=1e-12)


def design(x):
    return np.column_stack([x, np.ones(len(x))])


def test_cost_covariance_and_degrees_of_freedom():
    """Those of the posterior under a normal prior: C = s² (JᵀJ + αP)⁻¹, s² = ‖r‖² / (m − tr JᵀJ (JᵀJ + αP)⁻¹)."""
    alpha = 20.0
    est = LMRegressor(linear(), alpha=alpha).fit(X, Y[:, 0])
    J, P = design(X), np.diag([1.0, 1, 1, 1, 0])
    inverse = np.linalg.inv(J.T @ J + alpha * P)
    theta = inverse @ J.T @ Y[:, 0]
    rss = np.sum((J @ theta - Y[:, 0]) ** 2)
    effective = np.trace(J.T @ J @ inverse)
    np.testing.assert_allclose(est.theta_, theta, rtol=1e-10)
    assert est.result_.cost == pytest.approx(0.5 * rss + 0.5 * alpha * np.sum(theta[:4] ** 2), rel=1e-12)
    assert est.result_.penalty == pytest.approx(0.5 * alpha * np.sum(theta[:4] ** 2), rel=1e-10)
    assert est.result_.dof == pytest.approx(60 - effective, rel=1e-10)
    assert 3 < effective < 4.5
    np.testing.assert_allclose(est.covariance_, rss / (60 - effective) * inverse, rtol=1e-8, atol=1e-14)


def test_more_parameters_than_residuals_are_determined_by_the_penalty():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        est = LMRegressor(linear(), alpha=1.0).fit(X[:3], Y[:3, 0])
    np.testing.assert_allclose(coefficients(est)[0][0], Ridge(alpha=1.0).fit(X[:3], Y[:3, 0]).coef_, atol=1e-10)
    assert np.isfinite(est.stderr_).all()
    with pytest.warns(CovarianceWarning, match="degrees of freedom"):
        LMRegressor(linear()).fit(X[:3], Y[:3, 0])


def test_a_fixed_weight_keeps_its_value_and_is_no_part_of_the_penalty():
    module = linear()
    est = LMRegressor(module, alpha=5.0, fixed=["weight[0,1]"]).fit(X, Y[:, 0])
    kept = float(module.weight[0, 1].detach())
    ridge = Ridge(alpha=5.0).fit(X[:, [0, 2, 3]], Y[:, 0] - kept * X[:, 1])
    np.testing.assert_allclose(coefficients(est)[0][0][[0, 2, 3]], ridge.coef_, atol=1e-12)
    assert est.params_["weight[0,1]"] == kept


class Named(torch.nn.Module):
    """Three weights, each a tensor of its own, without a bias."""

    def __init__(self):
        super().__init__()
        self.w0, self.w1, self.w2 = (torch.nn.Parameter(torch.full((1, 1), v).double()) for v in (0.3, 0.2, 0.1))

    def forward(self, x):
        return (x[:, 0] * self.w0 + x[:, 1] * self.w1 + x[:, 2] * self.w2)[0]


@pytest.mark.parametrize("solver", ["qr", "cholesky", "cg"])
def test_a_tied_weight_counts_in_the_penalty(solver):
    """w1 = 2 w0: the penalty of both is 5 w0², that of √5 w0, whose column is (x0 + 2 x1)/√5."""
    est = LMRegressor(Named(), alpha=3.0, tied={"w1[0,0]": lambda w0: 2 * w0}, solver=solver).fit(X, Y[:, 0])
    columns = np.column_stack([(X[:, 0] + 2 * X[:, 1]) / 5**0.5, X[:, 2]])
    ridge = Ridge(alpha=3.0, fit_intercept=False).fit(columns, Y[:, 0])
    w0, w2 = ridge.coef_ / [5**0.5, 1]
    np.testing.assert_allclose(est.theta_, [w0, 2 * w0, w2], rtol=1e-7)


@pytest.mark.parametrize("tied", [False, True])
def test_derivative_and_residual_belong_together(tied):
    names = ("a", "b", "c", "d")
    ties = {"c": lambda a, b: a * torch.exp(b)} if tied else None
    constraints = resolve_constraints(names, 4, np.array([0.5, 0.2, 1.0, 2.0]), True, None, ["d"], ties)
    penalty = penalty_on([True, False, True, True], 4.0, constraints)
    assert penalty.indices.tolist() == [0, 2]  # d is fixed
    theta = torch.from_numpy(constraints.theta())
    residual = penalty.residual(theta)
    third = theta[0] * torch.exp(theta[1]) if tied else theta[2]
    torch.testing.assert_close(residual, 2 * torch.stack([theta[0], third]))
    expected = torch.func.jacrev(penalty.residual)(theta)
    torch.testing.assert_close(penalty.columns(theta).T, expected)


def test_a_loss_does_not_touch_the_penalty():
    """At the robust minimum the gradient of Σρ is that of the penalty, by hand."""
    y = Y[:, 0].copy()
    y[::10] += 20
    est = LMRegressor(linear(), alpha=2.0, loss="soft_l1", f_scale=0.5).fit(X, y)
    r = design(X) @ est.theta_ - y
    slope = r / np.sqrt(1 + (r / 0.5) ** 2)
    np.testing.assert_allclose(design(X).T @ slope + 2.0 * np.append(est.theta_[:4], 0), 0, atol=1e-6)


def test_bounds_go_with_a_penalty():
    est = LMRegressor(linear(), alpha=2.0, bounds={"weight": (-1.0, np.inf)}).fit(X, Y[:, 0])
    weight = coefficients(est)[0][0]
    assert weight[1] == -1.0
    ridge = Ridge(alpha=2.0).fit(X[:, [0, 2, 3]], Y[:, 0] + X[:, 1])
    np.testing.assert_allclose(weight[[0, 2, 3]], ridge.coef_, atol=1e-8)


@pytest.mark.parametrize("solver", ["qr", "cholesky", "cg"])
def test_of_the_default_network_it_is_in_units_of_the_variance_of_y(solver):
    options = {"alpha": 0.5, "random_state": 0, "hidden_layer_sizes": (3,), "solver": solver, "max_iter": 60}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = LMRegressor(**options).fit(X, Y[:, 1])
        other = LMRegressor(**options).fit(1000 * X + 5, 1e-3 * Y[:, 1] - 7)
    np.testing.assert_allclose(other.predict(1000 * X + 5), 1e-3 * one.predict(X) - 7, rtol=0, atol=2e-6)
    variance = Y[:, 1].var()
    weights = np.concatenate([layer.weight.detach().numpy().ravel() for layer in one.module_.layers])
    assert one.result_.penalty == pytest.approx(0.25 * variance * np.sum(weights**2), rel=1e-9)


def test_alpha_shrinks():
    norms = []
    for alpha in (0.01, 1.0, 100.0):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            est = LMRegressor(alpha=alpha, random_state=0, max_iter=100).fit(X, Y)
        norms.append(sum(float((layer.weight.detach() ** 2).sum()) for layer in est.module_.layers))
    assert norms[0] > norms[1] > norms[2]


def test_biases_alone_cannot_be_penalised():
    class Shift(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(1).double())

        def forward(self, x):
            return x[:, :1] + self.bias

    with pytest.raises(ValueError, match="alpha: the module has no weights"):
        LMRegressor(Shift(), alpha=1.0).fit(X, Y[:, 0])


def test_weights_are_tensors_of_two_axes():
    from lmfit_gpu.models import ModuleModel

    network = TanhNetwork(2, 1, (3,))
    names = ModuleModel(network).names
    weights = {
        name.split("[")[0] for name, is_weight in zip(names, ModuleModel(network).are_weights, strict=True) if is_weight
    }
    assert weights == {"layers.0.weight", "layers.1.weight"}
