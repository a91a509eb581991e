"""Named null directions: what of the parameters the data do not determine, and what of them they do."""

import math
import warnings

import numpy as np
import pytest
import torch
from cases_numerical import G1
from hypothesis import given, settings
from hypothesis import strategies as st

from lmfit_gpu import LMRegressor, curve_fit
from lmfit_gpu.estimability import unseen_directions
from lmfit_gpu.exceptions import CovarianceWarning

x = np.linspace(0, 4, 60)
X = x[:, None]
Y = 2.5 * np.exp(-1.3 * x) + 0.5 + 0.02 * np.random.default_rng(0).normal(size=60)


def fitted(model, p0, said=r"the data do not determine", **options):
    with pytest.warns(CovarianceWarning, match=said):
        return LMRegressor(model, p0=p0, **options).fit(X, Y)


def texts(est):
    return [group.text for group in est.result_.unseen]


def one(x, amplitude, gain, rate):
    return (2 * amplitude + gain) * np.exp(-rate * x)


def two(x, amplitude, gain, rate, offset, level):
    return (2 * amplitude + gain) * np.exp(-rate * x) + offset - 4 * level


def three(x, amplitude, gain, rate, a, b, c):
    return (2 * amplitude + gain) * np.exp(-rate * x) + a + b - c


def three_torch(x, amplitude, gain, rate, a, b, c):
    return (2 * amplitude + gain) * torch.exp(-rate * x) + a + b - c


ONE = ["amplitude and gain: only 2.00·amplitude + gain is determined"]
TWO = [*ONE, "offset and level: only −0.250·offset + level is determined"]
THREE = [*ONE, "a, b and c: only −a − b + c is determined"]


@pytest.mark.parametrize(
    ("model", "p0", "expected", "rank"),
    [
        (one, [1, 1, 1], ONE, 2),
        (two, [1, 1, 1, 0, 0], TWO, 3),
        (three, [1, 1, 1, 0, 0, 0], THREE, 3),
        (three_torch, [1, 1, 1, 0, 0, 0], THREE, 3),
    ],
    ids=["one", "two", "three", "three in torch"],
)
@pytest.mark.parametrize("solver", ["qr", "cholesky", "dual"])
def test_one_two_and_three_null_directions_are_named(model, p0, expected, rank, solver):
    est = fitted(model, p0, solver=solver)
    assert texts(est) == expected
    assert est.rank_ == rank
    assert sum(group.n_directions for group in est.result_.unseen) == len(p0) - rank
    involved = {name for group in est.result_.unseen for name in group.names}
    unknown = {name for name, error in zip(est.params_, est.stderr_, strict=True) if np.isinf(error)}
    assert unknown == involved


def test_the_warning_says_it():
    with pytest.warns(CovarianceWarning, match="only 2.00·amplitude . gain is determined"):
        LMRegressor(one, p0=[1, 1, 1]).fit(X, Y)
    with pytest.warns(CovarianceWarning, match="only 2.00·amplitude . gain is determined"):
        curve_fit(one, x, Y, p0=[1, 1, 1])


@pytest.mark.parametrize("units", [1.0, 1e-6, 1e8])
def test_units_do_not_matter(units):
    est = fitted(lambda x, a, b, rate: (2 * a + b / units) * np.exp(-rate * x), [1, units, 1])
    (group,) = est.result_.unseen
    assert group.combinations[0] == pytest.approx([2 * units, 1], rel=1e-6)
    reduced = LMRegressor(lambda x, c, rate: c * np.exp(-rate * x), p0=[3, 1]).fit(X, Y)
    assert group.values[0] == pytest.approx(units * reduced.theta_[0], rel=1e-7)
    assert group.stderr[0] == pytest.approx(units * reduced.stderr_[0], rel=1e-5)


def test_what_is_determined_has_the_error_of_the_smaller_model():
    """Of a·exp(b − cx) + d the combination k a + b is d(ln a exp(b)): its error is that of ln A in A·exp(−cx) + d."""
    with pytest.warns(CovarianceWarning, match="amplitude and shift: only"):
        est = LMRegressor(G1.numpy_model, p0=G1.p0).fit(np.asarray(G1.x)[:, None], G1.y)
    (group,) = est.result_.unseen
    a, b = est.theta_[:2]
    assert group.names == ("amplitude", "shift")
    assert group.combinations[0] == pytest.approx([1 / a, 1], rel=1e-5)
    # of A = a exp(b): 6.584624463059284, by 50-digit arithmetic (cases_numerical.py)
    assert group.stderr[0] * a * math.exp(b) == pytest.approx(6.584624463059284, rel=1e-4)


def test_a_parameter_that_nothing_depends_on():
    est = fitted(lambda x, a, b, unused: a * np.exp(-b * x) + 0 * unused, [1, 1, 1])
    assert texts(est) == ["unused: not determined at all"]
    assert np.isfinite(est.stderr_[:2]).all()


def test_more_parameters_than_data_are_counted():
    with pytest.warns(CovarianceWarning, match="6 direction|8 direction|of these"):
        est = LMRegressor(
            lambda x, theta: theta @ np.cos(np.arange(8)[:, None] * x), p0=np.zeros(8), absolute_sigma=True
        ).fit(X[:3], Y[:3], sigma=np.ones(3))
    (group,) = est.result_.unseen
    assert group.n_directions == 5
    assert group.text.startswith("p0, p1, p2, p3, p4, p5 and 2 more: 5 directions of these 8 parameters")


def test_a_partner_that_is_fixed_determines_the_other():

    def model(x, a, b, rate, c):
        return (2 * a + b) * np.exp(-rate * x) + c

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fixed = LMRegressor(model, p0=[1, 1, 1, 0.5], fixed=["a"]).fit(X, Y)
    assert fixed.result_.unseen == ()
    assert np.isfinite(fixed.stderr_).all()


def test_a_tie_to_what_is_determined_is_determined():
    def model(x, a, b, rate, c):
        return (2 * a + b) * np.exp(-rate * x) + c

    est = fitted(model, [1, 1, 1, 0.5], tied={"c": lambda a, b: 0.2 * (2 * a + b)})
    small = LMRegressor(lambda x, t, rate: t * np.exp(-rate * x) + 0.2 * t, p0=[3, 1]).fit(X, Y)
    assert est.stderr_[3] == pytest.approx(0.2 * small.stderr_[0], rel=1e-5)
    assert not est.result_.undetermined[3]


@st.composite
def spaces(draw):
    """Groups of parameters, each with a null space of its own, in units over many orders of magnitude."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    nulls = [int(rng.integers(1, max(size, 2))) for size in sizes]
    n, start, column = sum(sizes) + draw(st.integers(0, 3)), 0, 0
    null = np.zeros((n, sum(nulls)))
    for size, count in zip(sizes, nulls, strict=True):
        block = np.linalg.qr(rng.standard_normal((size, size)))[0][:, :count]
        null[start : start + size, column : column + count] = block
        start, column = start + size, column + count
    mix = np.linalg.qr(rng.standard_normal((sum(nulls), sum(nulls))))[0]
    order = rng.permutation(n)
    units = 10.0 ** rng.uniform(-6, 6, n)
    return order, sizes, nulls, (null @ mix)[order] * units[:, None], units


@settings(max_examples=60, deadline=None)
@given(spaces())
def test_groups_and_combinations_of_any_null_space(space):
    order, sizes, nulls, null, units = space
    names = [f"q{i}" for i in order]
    scaled = null / units[:, None]
    root = (np.eye(len(order)) - scaled @ scaled.T) * units[:, None]  # unit variance on the rest
    theta = np.arange(1.0, len(order) + 1) * units
    found = unseen_directions(names, theta, null, units, root)
    assert sum(group.n_directions for group in found) == sum(nulls)
    assert sorted(len(group.names) for group in found) == sorted(sizes)
    for group in found:
        at = [names.index(name) for name in group.names]
        assert group.combinations.shape == (len(at) - group.n_directions, len(at))
        for c, value, stderr in zip(group.combinations, group.values, group.stderr, strict=True):
            in_units = c * units[at]
            assert (
                np.abs(in_units @ scaled[at]).max() <= 1e-9 * np.linalg.norm(in_units) + 2e-4 * np.abs(in_units).max()
            )
            assert value == pytest.approx(c @ theta[at])
            assert stderr == pytest.approx(np.linalg.norm(in_units), rel=1e-3)


def test_float32_does_not_see_what_float64_does():
    """Two columns of J that differ by 1e-7 of their length are one in float32; a finite error bar would be rounding."""

    class Twins(torch.nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.a = torch.nn.Parameter(torch.tensor(1.0, dtype=dtype))
            self.b = torch.nn.Parameter(torch.tensor(1.0, dtype=dtype))

        def forward(self, x):
            return self.a * torch.exp(-x[:, 0]) + self.b * torch.exp(-1.0000002 * x[:, 0])

    with warnings.catch_warnings(record=True) as said:  # float32 may stop short of what it could see
        warnings.simplefilter("always")
        est = LMRegressor(Twins(torch.float32)).fit(X.astype(np.float32), Y.astype(np.float32))
    assert any("a and b: only a + b is determined" in str(warning.message) for warning in said)
    assert np.isinf(est.stderr_).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CovarianceWarning)
        est = LMRegressor(Twins(torch.float64)).fit(X, Y)
    assert np.isfinite(est.stderr_).all()
