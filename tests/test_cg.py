"""Conjugate gradients where they are for: 20,000 parameters, a matrix-free or a row-distributed J."""

import warnings

import pytest
import torch
from injected import CPU, CUPYNUMERIC

import lmfit_gpu.jacobian
from lmfit_gpu import LMRegressor
from lmfit_gpu.backends import get_backend
from lmfit_gpu.exceptions import CovarianceWarning
from lmfit_gpu.jacobian import Derivatives
from lmfit_gpu.linear import linearize
from lmfit_gpu.linear.products import FreeProducts, StoredRows
from lmfit_gpu.models import ModuleModel
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.rows import ArrayRows

N_ROWS, N_FEATURES = 100, 64


def network():
    torch.manual_seed(0)
    layers = torch.nn.Linear(N_FEATURES, 256), torch.nn.Tanh(), torch.nn.Linear(256, 16), torch.nn.Tanh()
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 1)).double()


@pytest.fixture
def data(seed):
    X = torch.randn(N_ROWS, N_FEATURES, dtype=torch.float64)
    return X, torch.sin(X.sum(1) / 8)


@pytest.fixture
def derivatives(data):
    model = ModuleModel(network())
    problem = LeastSquaresProblem(model, ArrayRows(*data), model.theta)
    assert problem.n_params == 20_769
    yield Derivatives.choose(problem, "auto", model.theta)
    problem.close()


@pytest.mark.slow
@pytest.mark.parametrize("damping", [1e-1, 1e-4])
@pytest.mark.parametrize(
    ("backend", "products"),
    [("torch", FreeProducts), pytest.param(*CUPYNUMERIC.values, StoredRows, marks=CUPYNUMERIC.marks)],
)
def test_20_000_parameters_agree_with_the_dense_dual_solution(derivatives, backend, products, damping, monkeypatch):
    theta = derivatives.problem.replicas[0].theta
    dual = linearize(derivatives.at(theta), "dual", get_backend("scipy", CPU))
    scale = torch.where(dual.column_norms > 0, dual.column_norms, torch.ones_like(theta))
    expected = dual.with_scale(scale).solve(damping)
    monkeypatch.setattr(lmfit_gpu.jacobian, "KEEP_BYTES", 0)  # J is never formed, or only to be stored by the backend
    lin = linearize(derivatives.at(theta), "cg", get_backend(backend, CPU))
    assert type(lin._reduction.product) is products
    step = lin.with_scale(scale).solve(damping)
    assert step.valid
    assert step.n_inner > 10
    error = torch.linalg.vector_norm((step.p - expected.p) * scale)
    assert error <= 1e-6 * expected.scaled_norm
    assert step.predicted_reduction == pytest.approx(expected.predicted_reduction, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["scipy", CUPYNUMERIC])
def test_a_network_of_20_000_weights_is_fitted_to_rounding(data, backend):
    X, y = data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CovarianceWarning)  # fewer rows than weights
        est = LMRegressor(network(), solver="cg", backend=backend, max_iter=60).fit(X, y)
    assert est.result_.success
    assert est.result_.cost < 1e-20 * float(y @ y)
    assert est.covariance_ is None
    assert all(record.n_inner > 0 for record in est.result_.history)
