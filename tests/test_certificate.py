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


def gain_at(residual, theta, seen=None, **options):
    """Newton's gain of a residual function at a point, by the engine's own gradient; its points go to `seen`."""
    theta = tensor(theta)
    names = tuple(f"p{i}" for i in range(theta.numel()))
    model = TorchFunction(lambda t, x, y: residual(t), names, "residual")
    problem = LeastSquaresProblem(model, ArrayRows(torch.zeros(1, 1), None), theta)
    derivatives = Derivatives.choose(problem, "autograd", theta)

    def lin(point):
        return linearize(derivatives.at(point), "qr", ScipyBackend())

    def gradient(point):
        if seen is not None:
            seen.append(point)
        return lin(point).gradient

    return newton_gain(gradient, lin(theta), theta, **options)


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


# --- in a box ---------------------------------------------------------------------------------------------


def pulled(t):
    """`curved` with a third parameter that the bound z ≥ 0 holds: the cost is lower at z = −1."""
    return torch.cat([curved(t[:2]), t[2:] + 1])


BOX = (tensor([-1.0, -1.0, 0.0]), tensor([1.0, 1.0, 5.0]))
FREE = torch.tensor([True, True, False])
AT = [0.1, 1e-9, 0.0]


def test_a_held_parameter_has_no_share_in_the_gain():
    """½ g²/h of `curved`, over a cost with ½ (z + 1)² more; no point moves z, and none leaves the box."""
    g, h, cost = (1 + 0.5 * 0.01) * 0.1, 1 + 1.5 * 0.01, 0.5 * (1 + 0.5 * 0.01) ** 2 + 0.5
    seen = []
    assert gain_at(pulled, AT, seen, free=FREE, bounds=BOX) == pytest.approx(0.5 * g**2 / h / cost, rel=1e-6)
    assert len(seen) == 4
    assert all(float(point[2]) == 0 for point in seen)
    assert all(bool(((BOX[0] <= point) & (point <= BOX[1])).all()) for point in seen)


def test_the_gain_over_free_parameters_is_that_of_the_smaller_problem():
    """With z at its minimum, z + 1 = 0, its residual adds nothing to the cost."""
    free = torch.tensor([True, False, True])
    shifted = lambda t: torch.stack([1 + 0.5 * t[0] ** 2, t[1], t[2]])  # noqa: E731
    smaller = lambda t: torch.stack([1 + 0.5 * t[0] ** 2, t[1]])  # noqa: E731
    assert gain_at(shifted, [0.1, 0.0, 1e-9], free=free) == pytest.approx(gain_at(smaller, [0.1, 1e-9]), rel=1e-9)


def test_a_saddle_along_a_held_parameter_is_a_minimum_for_the_others():
    assert gain_at(saddle, [0.0, 1e-3]) is None
    held = torch.tensor([False, True])
    assert gain_at(saddle, [0.0, 1e-3], free=held) == pytest.approx(1e-6 / (1 + 1e-6), rel=1e-6)


def test_a_free_parameter_without_room_has_no_certificate():
    seen = []
    assert gain_at(pulled, AT, seen, bounds=BOX) is None
    narrow = (tensor([0.1 - 1e-9, -1.0, 0.0]), tensor([0.1 + 1e-3, 1.0, 5.0]))
    assert gain_at(pulled, AT, seen, free=FREE, bounds=narrow) is None
    assert seen == []


def test_bounds_out_of_reach_change_no_bit():
    far = (tensor([-9.0, -9.0]), tensor([9.0, 9.0]))
    every = torch.ones(2, dtype=torch.bool)
    assert gain_at(curved, [0.1, 1e-9], free=every, bounds=far) == gain_at(curved, [0.1, 1e-9])


def test_no_free_parameter_promises_nothing():
    assert gain_at(curved, [0.1, 1e-9], free=torch.zeros(2, dtype=torch.bool)) == 0.0


def test_only_free_parameters_count_towards_the_hundred():
    free = torch.zeros(101, dtype=torch.bool)
    free[:2] = True
    residual = lambda t: torch.cat([t - 1, t.new_ones(1)])  # noqa: E731
    assert gain_at(residual, np.zeros(101), free=free) == pytest.approx(2 / 102, rel=1e-6)
