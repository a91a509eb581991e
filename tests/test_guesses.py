"""Candidates: within their bounds, from the scales of the data, the same for the same seed."""

import numpy as np
import pytest
import torch

from lmfit_gpu.guesses import KINDS, Scales, draw

X = torch.linspace(5.0, 15.0, 101, dtype=torch.float64)[:, None]
Y = 40 * torch.sin(X[:, 0])
INF = np.inf


def points(lower, upper, n_points=1024, seed=0, given=None, scales=None):
    lower, upper = np.asarray(lower, float), np.asarray(upper, float)
    given = np.clip(np.ones(len(lower)), lower, upper) if given is None else np.asarray(given, float)
    return draw(given, (lower, upper), Scales.of(X, Y) if scales is None else scales, n_points, seed)


def test_scales_are_those_of_the_columns():
    scales = Scales.of(torch.cat([X, torch.ones(101, 1), 1e-9 * X], dim=1), Y)
    np.testing.assert_allclose(scales.columns, [[5, 10, 0.1], [5e-9, 1e-8, 1e-10]])  # the constant column is left out
    assert scales.levels[0] < 40 < scales.levels[1]


@pytest.mark.parametrize(
    ("X", "y"),
    [
        (torch.ones(3, 1), None),
        (torch.zeros(1, 2), torch.zeros(1)),
        (torch.arange(6).reshape(3, 2), torch.tensor([0.0, 1e300, -1e300])),
        (torch.tensor([[1e-300], [2e-300]]).double(), torch.tensor([1e-320, 0.0]).double()),
        (torch.tensor([[-1e308], [1e308]]).double(), torch.ones(2)),
        (torch.randn(5, 3, 4, 4), torch.randn(5, 2)),
    ],
)
def test_data_without_scales_still_give_finite_candidates(X, y):
    drawn = draw(np.ones(3), None, Scales.of(X, y), 256, seed=1)
    assert drawn.shape == (256, 3)
    assert np.isfinite(drawn).all()


def test_a_box_is_filled_evenly():
    drawn = points([-3.0], [7.0])[:, 0]
    counts, _ = np.histogram(drawn, bins=16, range=(-3, 7))
    assert (np.abs(counts - 64) <= 1).all()  # one of Sobol's properties, in each coordinate


@pytest.mark.parametrize("sign", [1, -1])
def test_a_box_of_decades_is_filled_evenly_in_the_logarithm(sign):
    drawn = points([1e-3], [1e5])[:, 0] if sign > 0 else points([-1e5], [-1e-3])[:, 0]
    assert (np.sign(drawn) == sign).all()
    counts, _ = np.histogram(np.log10(np.abs(drawn)), bins=8, range=(-3, 5))
    assert (np.abs(counts - 128) <= 1).all()


@pytest.mark.parametrize(
    ("lower", "upper"), [([2.0, -INF, 0.0], [INF, -2.0, 1.0]), ([1e9, -INF, 0.0], [INF, 1e-9, 0.0])]
)
def test_bounds_hold(lower, upper):
    drawn = points(lower, upper)
    assert (drawn >= lower).all()
    assert (drawn <= upper).all()
    assert len(np.unique(drawn[:, 0])) > 900


def test_no_parameter_is_taken_for_one_kind_only():
    drawn = points([-INF], [INF])[:, 0]
    assert (drawn < 0).mean() == pytest.approx(sum(v for k, v in KINDS.items() if k.startswith("neg")), abs=0.05)
    assert ((drawn >= 5) & (drawn <= 15)).mean() > KINDS["position"]
    assert (np.abs(drawn) > 40).any()  # the levels of y
    assert (drawn < 0.011).any()  # slower than one period in ten ranges


def test_the_seed_decides():
    one, same, other = (points([-INF, 0], [INF, 1], seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one, same)
    assert (one != other).all(axis=1).mean() > 0.99


def test_many_parameters_and_odd_numbers_of_candidates():
    assert points([-INF] * 600, [INF] * 600, n_points=8).shape == (8, 600)
    assert points([-INF], [INF], n_points=7).shape == (7, 1)
