"""Check the Moré-Garbow-Hillstrom problems against values that the paper prints or that follow by hand."""

import math

import pytest
import scipy.optimize
import torch
from mgh import PROBLEMS, Problem, starts

# PyTorch scripts its forward-mode decompositions on the first jvp and warns that scripting is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

BROWN_ALPHA = 0.979430298  # the root other than 1 of 10 a^10 - 11 a^9 + 1

# Minimisers the paper prints in closed form, with their F.
MINIMISERS = [
    ("rosenbrock", (1, 1), 0),
    ("freudenstein_roth", (5, 4), 0),
    ("brown_badly_scaled", (1e6, 2e-6), 0),
    ("beale", (3, 0.5), 0),
    ("helical_valley", (1, 0, 0), 0),
    ("gulf", (50, 25, 1.5), 0),
    ("box_3d", (1, 10, 1), 0),
    ("box_3d", (10, 1, -1), 0),
    ("box_3d", (3, 3, 0), 0),
    ("powell_singular", (0,) * 4, 0),
    ("wood", (1,) * 4, 0),
    ("biggs_exp6", (1, 10, 1, 5, 4, 3), 0),
    ("extended_rosenbrock", (1,) * 10, 0),
    ("extended_powell_singular", (0,) * 12, 0),
    ("variably_dimensioned", (1,) * 10, 0),
    ("trigonometric", (0,) * 10, 0),
    ("brown_almost_linear", (1,) * 10, 0),
    ("brown_almost_linear", (0,) * 9 + (11,), 1),
    ("linear_full_rank", (-1,) * 5, 5),
    ("linear_rank_1", (3 / 21, 0, 0, 0, 0), 15 / 7),
    ("linear_rank_1_zero", (7, 3 / 34, 0, 0, 7), 62 / 17),
]

# F(x0) worked out by hand from the formulas.
START_VALUES = {
    "rosenbrock": 4.4**2 + 2.2**2,
    "freudenstein_roth": 19.5**2 + 4.5**2,
    "powell_badly_scaled": 1 + (math.exp(-1) - 0.0001) ** 2,
    "brown_badly_scaled": 999999.0**2 + (1 - 2e-6) ** 2 + 1,
    "beale": 14.203125,  # 1.5^2 + 2.25^2 + 2.625^2
    "helical_valley": 2500,  # the angle is 1/2
    "powell_singular": 49 + 5 + 1 + 160,
    "wood": 10000 + 16 + 9000 + 16 + 160,
    "watson_6": 30,
    "watson_9": 30,
    "watson_12": 30,
    "extended_rosenbrock": 5 * 24.2,
    "extended_powell_singular": 3 * 215,
    "penalty_1_4": 1e-5 * 14 + 29.75**2,
    "penalty_1_10": 1e-5 * 285 + 384.75**2,
    "variably_dimensioned": 3.85 + 38.5**2 + 38.5**4,
    "brown_almost_linear": 9 * 5.5**2 + (1 - 2**-10) ** 2,
    "broyden_tridiagonal": 21,  # r = (-2, -1, ..., -1, -3)
    "broyden_banded": 360,  # r = -6
    "linear_full_rank": 5 * 1 + 5 * 4,
    "linear_rank_1": 225 * 385 - 30 * 55 + 10,  # sum (15 i - 1)^2
    "linear_rank_1_zero": 81 * 204 - 18 * 36 + 8 + 2,  # sum (9 k - 1)^2, k = 1..8, and the two -1
}

every_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())


def sum_of_squares(problem: Problem, theta: tuple[float, ...]) -> float:
    return float(torch.sum(problem.residual(torch.tensor(theta, dtype=torch.float64)) ** 2))


def test_the_catalogue_covers_all_35_problems():
    assert {problem.number for problem in PROBLEMS.values()} == set(range(1, 36))
    assert len(PROBLEMS) == 41


@every_problem
def test_shapes_and_dtypes(problem):
    assert len(problem.start) == problem.n
    for theta in starts(problem):
        r = problem.residual(theta)
        assert theta.shape == (problem.n,)
        assert r.shape == (problem.m,)
        assert theta.dtype == r.dtype == torch.float64


@every_problem
def test_second_start_is_ten_times_the_first_or_ones(problem):
    first, second = starts(problem)
    expected = 10 * first if any(problem.start) else torch.ones(problem.n, dtype=torch.float64)
    torch.testing.assert_close(second, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "theta", "expected"), MINIMISERS)
def test_published_minimisers(name, theta, expected):
    assert sum_of_squares(PROBLEMS[name], theta) == pytest.approx(expected, rel=1e-12, abs=1e-24)
    assert expected in PROBLEMS[name].minima or expected == pytest.approx(PROBLEMS[name].minima[0])


@pytest.mark.parametrize(
    ("name", "theta", "expected"),
    [
        ("freudenstein_roth", (11.41277900, -0.896805254), 48.9842),
        ("bard", (0.8406667, -1e12, -1e12), 17.4286),
        ("jennrich_sampson", (0.331484645, -1e3), 259.58019),
        ("biggs_exp6", (1.22755595, 1e3, 0.83270306, -1e3, 1.22755595, 0.83270306), 0.306366773),
        ("biggs_exp6", (1.711416, 17.6831975, 1.16314365, 5.18656, 1.711416, 1.16314365), 5.65565e-3),
        ("beale", (-1e9, 1 + 13.875 / 14 * 1e-9), 0.452009),
        ("powell_badly_scaled", (1e-13, 1e9), 1e-8),
        ("brown_almost_linear", (BROWN_ALPHA,) * 9 + (BROWN_ALPHA**-9,), 0.0),
    ],
)
def test_other_minima(name, theta, expected):
    value = sum_of_squares(PROBLEMS[name], theta)
    assert value == pytest.approx(expected, rel=1e-5, abs=1e-12)  # six digits, truncated
    assert any(minimum == pytest.approx(expected, rel=1e-5) for minimum in PROBLEMS[name].minima)


@pytest.mark.parametrize(("name", "expected"), START_VALUES.items())
def test_start_values(name, expected):
    assert sum_of_squares(PROBLEMS[name], PROBLEMS[name].start) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("name", ["bard", "gaussian", "meyer", "kowalik_osborne", "osborne_1", "osborne_2", "watson_9"])
def test_minpack_reaches_the_published_minimum(name):
    """One wrong digit in a data table moves the minimum by more than the tolerance."""
    problem = PROBLEMS[name]
    jacobian = torch.func.jacfwd(problem.residual)
    fit = scipy.optimize.least_squares(
        lambda x: problem.residual(torch.from_numpy(x)).numpy(),
        problem.start,
        lambda x: jacobian(torch.from_numpy(x)).numpy(),
        method="lm",
        x_scale="jac",
        xtol=1e-12,
    )
    assert 2 * fit.cost == pytest.approx(problem.minima[0], rel=1e-5)


@every_problem
def test_gradients_are_finite_at_the_starts(problem):
    for theta in starts(problem):
        leaf = theta.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(torch.sum(problem.residual(leaf) ** 2), leaf)
        assert torch.isfinite(gradient).all()


@every_problem
def test_jvp_equals_central_differences(problem):
    theta = starts(problem)[0]
    direction = torch.randn(problem.n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    direction = direction * (theta.abs() + 0.01)  # steps in proportion to each parameter
    h = 1e-5  # near eps^(1/3), where truncation and rounding balance
    _, tangent = torch.func.jvp(problem.residual, (theta,), (direction,))
    difference = (problem.residual(theta + h * direction) - problem.residual(theta - h * direction)) / (2 * h)
    rounding = 1e-15 * float(problem.residual(theta).abs().max()) / h
    tolerance = 1e-7 * float(tangent.abs().max()) + rounding
    torch.testing.assert_close(tangent, difference, rtol=1e-6, atol=tolerance)


@every_problem
def test_forward_and_reverse_mode_agree_under_vmap(problem):
    first = starts(problem)[0]
    batch = torch.stack([first, first + 0.01])
    batched = torch.func.vmap(torch.func.jacfwd(problem.residual))(batch)
    reverse = torch.func.jacrev(problem.residual)(batch[1])
    torch.testing.assert_close(batched[1], reverse, rtol=1e-10, atol=1e-12 * float(reverse.abs().max()))


def test_gulf_derivative_is_finite_where_the_power_has_a_zero_base():
    y_1 = 25 + (-50 * torch.log(torch.tensor(0.01, dtype=torch.float64))) ** (2 / 3)
    theta = torch.stack([y_1.new_tensor(50.0), y_1, y_1.new_tensor(1.5)])
    assert torch.isfinite(torch.func.jacfwd(PROBLEMS["gulf"].residual)(theta)).all()
