"""Linear parameters are found, and solved for as numpy's least squares does."""

import numpy as np
import pytest
import torch

from lmfit_gpu.separable import linear_parameters, projected

x = torch.linspace(0.1, 4, 40, dtype=torch.float64)
y = 3 * torch.exp(-0.7 * x) + 0.5
FREE = torch.full((9,), torch.inf, dtype=torch.float64)


def residuals_of(function):
    return lambda points: torch.stack([function(*point) - y for point in points])


MODELS = {
    "decay": (lambda a, b, c: a * torch.exp(-b * x) + c, 3, [0, 2]),
    "a product": (lambda a, b: a * b * x, 2, [0]),
    "a polynomial": (lambda a, b, c: a + b * x + c * x**2, 3, [0, 1, 2]),
    "a rational function": (lambda a, b, c: (a + b * x) / (1 + c * x), 3, [0, 1]),
    "nothing linear": (lambda a, b: torch.exp(-a * x) / (1 + b**2 * x), 2, []),
    "two exponentials": (
        lambda a, b, c, d: a * torch.exp(-b * x) + c * torch.exp(-d * x),
        4,
        [0, 2],
    ),
    "no effect": (lambda a, b: a * x + 0 * b, 2, [0]),
    "nearly linear": (lambda a, b: a * x + 1e-4 * torch.sin(b * x) + b * x, 2, [0]),
}


def drawn(n, seed=0, rows=48):
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (rows, n)))


@pytest.mark.parametrize("label", MODELS)
def test_linear_parameters_are_found(label):
    function, n, expected = MODELS[label]
    assert linear_parameters(residuals_of(function), drawn(n)) == expected


def test_scales_do_not_hide_them():
    def scaled(a, b, c):
        return a * torch.exp(-b * 1e9 * x) + c

    points = drawn(3) * torch.tensor([1e9, 1e-9, 1e9])
    assert linear_parameters(residuals_of(scaled), points) == [0, 2]


def test_points_are_only_made_of_coordinates_given():
    seen = []

    def recorded(points):
        seen.append(points)
        return residuals_of(MODELS["decay"][0])(points)

    points = drawn(3)
    linear_parameters(recorded, points)
    for j in range(3):
        assert set(torch.cat(seen)[:, j].tolist()) <= set(points[:, j].tolist())


def test_many_parameters_are_not_tried():
    assert linear_parameters(lambda points: points, drawn(25)) == []


def test_solution_is_that_of_least_squares():
    points = drawn(3, rows=6)
    solved, costs = projected(residuals_of(MODELS["decay"][0]), points, [0, 2], (-FREE[:3], FREE[:3]))
    for point, cost in zip(solved, costs, strict=True):
        A = np.stack([np.exp(-float(point[1]) * x.numpy()), np.ones(40)], axis=1)
        expected, rss = np.linalg.lstsq(A, y.numpy(), rcond=None)[:2]
        np.testing.assert_allclose(point[[0, 2]], expected, rtol=1e-6, atol=1e-9)
        assert float(cost) == pytest.approx(rss[0] / 2, rel=1e-6, abs=1e-12)
    assert solved[:, 1].tolist() == points[:, 1].tolist()


def test_bounds_hold_for_what_is_evaluated_and_returned():
    lower, upper = torch.tensor([2.0, -1.0, -5.0]).double(), torch.tensor([2.5, 3.0, -0.5]).double()

    def inside(points):
        assert bool(((points >= lower) & (points <= upper)).all())
        return residuals_of(MODELS["decay"][0])(points)

    points = lower + (upper - lower) * torch.rand(20, 3, dtype=torch.float64)
    solved, costs = projected(inside, points, [0, 2], (lower, upper))
    assert bool(((solved >= lower) & (solved <= upper)).all())
    expected = 0.5 * residuals_of(MODELS["decay"][0])(solved).square().sum(1)
    torch.testing.assert_close(costs, expected)


def test_what_is_not_finite_costs_infinity_and_spoils_nothing():
    def fails(a, b):
        return a * torch.exp(-b * x) if b < 1 else torch.full_like(x, torch.nan)

    points = torch.tensor([[1.0, 0.5], [1.0, 2.0], [1.0, -0.5]]).double()
    _, costs = projected(residuals_of(fails), points, [0], (-FREE[:2], FREE[:2]))
    assert torch.isfinite(costs).tolist() == [True, False, True]


def test_equal_columns_share_the_coefficient():
    solved, costs = projected(
        residuals_of(lambda a, b: a + b + 0 * x), torch.ones(1, 2).double(), [0, 1], (-FREE[:2], FREE[:2])
    )
    torch.testing.assert_close(solved[0], y.mean() / 2 * torch.ones(2).double())
    assert float(costs[0]) == pytest.approx(float(0.5 * (y - y.mean()).square().sum()))
