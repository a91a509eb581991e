"""saddle: the lowest eigenvalue of the true Hessian, against torch's own, and the lower point beside a saddle."""

import numpy as np
import pytest
import torch

from lmfit_gpu.jacobian import Derivatives
from lmfit_gpu.models import ModuleModel
from lmfit_gpu.network import TanhNetwork
from lmfit_gpu.penalty import penalty_on
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.rows import ArrayRows
from lmfit_gpu.saddle import _lowest, below_saddle


def problem_of(alpha, sizes=(2,)):
    torch.manual_seed(0)
    X = torch.randn(30, 2, dtype=torch.float64)
    y = 2 * torch.sin(X[:, 0]) - X[:, 1]
    model = ModuleModel(TanhNetwork(2, 1, sizes))
    penalty = penalty_on(model.are_weights, alpha, None)
    return LeastSquaresProblem(model, ArrayRows(X, y - y.mean()), model.theta, penalty=penalty)


def cost(problem, theta):
    """½‖r‖² + ½α‖w‖², differentiable."""
    block = problem.probe(1000)
    r = block.residual(problem.values(theta, block))
    return 0.5 * (r @ r) + 0.5 * (problem.penalty.residual(theta) ** 2).sum()


def seen(problem, theta):
    return _lowest(problem, Derivatives.choose(problem, "auto", theta), theta)


@pytest.mark.parametrize("where", ["zero", "anywhere"])
def test_eigenvalues_are_those_of_the_hessian(where):
    problem = problem_of(1.0)
    theta = torch.zeros(problem.n_params, dtype=torch.float64) if where == "zero" else problem.replicas[0].theta
    values, vectors = np.linalg.eigh(torch.autograd.functional.hessian(lambda t: cost(problem, t), theta).numpy())
    lowest, largest, direction = seen(problem, theta)
    assert lowest == pytest.approx(values[0], rel=1e-5)
    assert largest == pytest.approx(values[-1], rel=1e-5)
    along = vectors[:, np.abs(values - values[0]) < 1e-6 * abs(values[0])]
    np.testing.assert_allclose(np.linalg.norm(along.T @ direction.numpy()), 1, rtol=1e-4)


def test_zero_weights_are_left_where_they_are_a_saddle():
    problem = problem_of(1.0)
    theta = torch.zeros(problem.n_params, dtype=torch.float64)
    moved = below_saddle(problem, Derivatives.choose(problem, "auto", theta), theta)
    assert problem.cost(moved) < 0.9 * problem.cost(theta)


@pytest.mark.parametrize(("alpha", "sizes"), [(1e3, (2,)), (1.0, (2, 2))])
def test_zero_weights_are_kept_where_they_are_a_minimum(alpha, sizes):
    """A large penalty, or two hidden layers, of which no joint change of two gains anything."""
    problem = problem_of(alpha, sizes)
    theta = torch.zeros(problem.n_params, dtype=torch.float64)
    assert below_saddle(problem, Derivatives.choose(problem, "auto", theta), theta) is None
