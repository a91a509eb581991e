"""Conjugate gradients where they are for: 20,000 parameters, a matrix-free or a row-distributed J."""

import warnings

import numpy as np
import pytest
import torch
from injected import CPU, CUPYNUMERIC, SOLVERS, graded, injected
from sklearn.exceptions import ConvergenceWarning

import lmfit_gpu.jacobian
import lmfit_gpu.levenberg_marquardt
from lmfit_gpu import LMRegressor
from lmfit_gpu.backends import get_backend
from lmfit_gpu.exceptions import CovarianceWarning
from lmfit_gpu.jacobian import Derivatives
from lmfit_gpu.linear import DualLinearization, linearize
from lmfit_gpu.linear.products import FreeProducts, StoredRows
from lmfit_gpu.models import ModuleModel
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.result import Status
from lmfit_gpu.rows import ArrayRows
from lmfit_gpu.termination import trusted

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
def few(data):
    """Rows that are fitted in few inner steps."""
    X, y = data
    return X[:30], y[:30]


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
def test_a_network_of_20_000_weights_is_fitted_to_rounding(few, backend):
    X, y = few
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CovarianceWarning)  # fewer rows than weights
        est = LMRegressor(network(), solver="cg", backend=backend, max_iter=60).fit(X, y)
    assert est.result_.success
    assert est.result_.cost < 1e-20 * float(y @ y)
    assert est.covariance_ is None
    assert all(record.n_inner > 0 for record in est.result_.history)


# ---- edges


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("radius", [1e-300, 1.0])
def test_a_jacobian_of_zeros_gives_a_step_of_zero(solver, radius):
    lin = injected(torch.zeros(6, 3), torch.ones(6), solver)
    step = lin.within(radius, 0.0)
    assert step.valid
    assert (step.scaled_norm, step.predicted_reduction) == (0.0, 0.0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_model_that_does_not_move_is_no_success_in_float32(solver):
    """A module whose units are all dead: nothing is known of J, and no trial is made for ever."""
    X = torch.linspace(0, 1, 20)[:, None].numpy()
    est = LMRegressor(lambda x, a, b: 0 * a * x + 0 * b + 1, p0=[3, 1], solver=solver, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        est.fit(X, X[:, 0])
    assert est.result_.status == Status.STALLED_AT_PRECISION
    assert est.n_iter_ < 5


def test_in_float32_products_do_not_show_a_large_condition_number_and_are_not_trusted(monkeypatch, rng):
    J = graded(rng, 50, 5, 1e4).astype(np.float32).astype(float)
    r, norms = rng.standard_normal(50), np.linalg.norm(J, axis=0)
    condition = np.linalg.cond(J / norms)
    assert condition > 1000
    lin = injected(J, r, "cg", scale=norms, dtype=torch.float32, jac="autograd")
    assert lin.condition() == pytest.approx(condition, rel=0.01)  # a kept J is multiplied in float64
    monkeypatch.setattr(lmfit_gpu.jacobian, "KEEP_BYTES", 0)
    free = injected(J, r, "cg", scale=norms, dtype=torch.float32, jac="autograd")
    assert free.condition() == float("inf")
    assert not trusted(free, torch.ones(5))


def test_a_large_fit_that_meets_a_non_finite_jacobian_keeps_its_best_point(monkeypatch):
    """With 1,201 weights no n x n matrix of NaN is made."""
    made = []
    reduce = DualLinearization.reduce.__func__

    def later_not_finite(cls, jacobian, backend):
        lin = reduce(cls, jacobian, backend)
        made.append(lin)
        if len(made) > 1:
            lin._columns[0, 0] = torch.nan
        return lin

    monkeypatch.setattr(DualLinearization, "reduce", classmethod(later_not_finite))
    monkeypatch.setattr(lmfit_gpu.levenberg_marquardt, "MOST_DENSE", 0)  # no repair by differences
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(1, 400), torch.nn.Tanh(), torch.nn.Linear(400, 1)).double()
    X = torch.linspace(-1, 1, 8, dtype=torch.float64)[:, None]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        est = LMRegressor(module).fit(X, torch.sin(X))
    assert {warning.category for warning in said} == {ConvergenceWarning, CovarianceWarning}
    assert any("no covariance: solver='dual'" in str(warning.message) for warning in said)
    assert est.solver_ == "dual"
    assert est.result_.status == Status.NON_FINITE_JACOBIAN
    assert est.covariance_ is None
    assert est.result_.cost < made[0].residual_norm ** 2 / 2
