"""The second-order certificate: a stall at a strict minimum is success, at a saddle or in a valley it is not."""

import numpy as np
import pytest
import torch
from injected import tensor
from mgh_runs import minimise

from lmfit_gpu.backends import ScipyBackend
from lmfit_gpu.certificate import newton_gain
from lmfit_gpu.jacobian import Derivatives
from lmfit_gpu.levenberg_marquardt import LevenbergMarquardt
from lmfit_gpu.linear import linearize
from lmfit_gpu.models import TorchFunction
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.result import Status
from lmfit_gpu.rows import ArrayRows


def gain_at(residual, theta):
    """Newton's gain of a residual function at a point, by the engine's own gradient."""
    theta = tensor(theta)
    names = tuple(f"p{i}" for i in range(theta.numel()))
    model = TorchFunction(lambda t, x, y: residual(t), names, "residual")
    problem = LeastSquaresProblem(model, ArrayRows(torch.zeros(1, 1), None), theta)
    derivatives = Derivatives.choose(problem, "autograd", theta)

    def lin(point):
        return linearize(derivatives.at(point), "qr", ScipyBackend())

    return newton_gain(lambda point: lin(point).gradient, lin(theta), theta)


def curved(t):
    """Cost ½(1 + s x²)² + ½ y², s = ±½: at 0 the Hessian is diag(2s, 1); J is singular there."""
    return torch.stack([1 + 0.5 * t[0] ** 2, t[1]])


def saddle(t):
    return torch.stack([1 - 0.5 * t[0] ** 2, t[1]])


def test_gain_is_half_the_squared_newton_decrement():
    """At (δ, 0): g = (1 + ½δ²)δ, H₁₁ = 1 + 1.5 δ²; the cost is ½(1 + ½δ²)²."""
    delta = 0.1
    g, h, cost = (1 + 0.5 * delta**2) * delta, 1 + 1.5 * delta**2, 0.5 * (1 + 0.5 * delta**2) ** 2
    assert gain_at(curved, [delta, 1e-9]) == pytest.approx(0.5 * g**2 / h / cost, rel=1e-6)


def test_a_saddle_has_no_certificate():
    assert gain_at(saddle, [1e-3, 1e-3]) is None


def test_a_flat_direction_has_no_certificate():
    assert gain_at(lambda t: torch.stack([t[0] + t[1] - 1, t[0] + t[1] + 1]), [0.3, 0.2]) is None


def test_more_than_a_hundred_parameters_are_not_tried():
    assert gain_at(lambda t: t - 1, np.zeros(101)) is None


@pytest.mark.parametrize("jac", ["auto", "3-point"])
def test_a_minimum_made_by_curvature_is_success(jac):
    """Freudenstein and Roth's local minimum: J is singular, Gauss-Newton promises most of the cost."""
    run = minimise("freudenstein_roth", 1, jac)
    assert pytest.approx(48.98425, rel=1e-6) == run.F
    assert run.result.status is Status.CONVERGED_CURVATURE
    assert run.result.stop.measured <= run.result.stop.limit


def test_a_stall_at_a_degenerate_point_is_not_success():
    """a e^{-bx} + c + dx through three points, from all ones: b goes to 0, where the Hessian is singular."""
    x = torch.tensor([0.0, 75.0, 745.5], dtype=torch.float64)
    y = torch.tensor([1e-6, 5.0, 135.0], dtype=torch.float64)
    model = TorchFunction(lambda x, a, b, c, d: a * torch.exp(-b * x / 100) + c + d * x / 100, tuple("abcd"))
    theta = tensor(np.ones(4))
    result = LevenbergMarquardt().minimize(LeastSquaresProblem(model, ArrayRows(x, y), theta), theta)
    assert result.cost > 20
    assert result.status is Status.STALLED_AT_PRECISION


def test_a_model_that_refuses_a_neighbour_gives_no_certificate(monkeypatch):
    """The stall is reported as it is, not the model's exception."""

    def refuses(*_):
        raise RuntimeError("no solution")

    monkeypatch.setattr("lmfit_gpu.levenberg_marquardt.newton_gain", refuses)
    assert minimise("freudenstein_roth", 1).result.status is Status.STALLED_AT_PRECISION
