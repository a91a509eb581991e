"""Where difference points lie: inside the box, as wide as the step where there is room, exact for parabolas."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from injected import tensor

from lmfit_gpu.box import inside
from lmfit_gpu.stencil import ONE_SIDED_ROUNDING, place, three_point

INF = math.inf
H = 1e-3


def placed(scheme, down, up, h=H, theta=1.5):
    """Return (a, b, one-sided) of one parameter with some room down and up."""
    bounds = (tensor([theta - down]), tensor([theta + up]))
    stencil = place(scheme, tensor([theta]), tensor([h]), bounds)
    one_sided = stencil.one_sided is not None and bool(stencil.one_sided[0])
    return float(stencil.first[0]), float(stencil.second[0]), one_sided


@pytest.mark.parametrize(
    ("down", "up", "a", "b"),
    [
        (INF, INF, H, -H),
        (0.0, INF, H, 0.0),
        (INF, 0.0, -H, 0.0),
        (INF, H / 2, -H, H / 2),
        (H / 2, INF, H, -H / 2),
        (H / 4, H / 2, H / 2, -H / 4),  # narrower than the step: the longer room
        (H / 2, H / 4, -H / 2, H / 4),
        (0.0, 0.0, 0.0, 0.0),
    ],
)
def test_two_points_go_where_there_is_room(down, up, a, b):
    assert placed("2-point", down, up)[:2] == pytest.approx((a, b), rel=1e-10, abs=0)


@pytest.mark.parametrize(
    ("down", "up", "a", "b", "one_sided"),
    [
        (INF, INF, H, -H, False),
        (H, INF, H, -H, False),
        (0.0, INF, H, 2 * H, True),
        (INF, 0.0, -H, -2 * H, True),
        (0.0, H, H / 2, H, True),
        (H, 0.0, -H / 2, -H, True),
        (
            0.8 * H,
            INF,
            0.4 * H,
            -0.4 * H,
            False,
        ),  # a shorter central step rounds less than one side; half way to the bound
        (H / 2, INF, H / 4, -H / 4, False),
        (H / 2.1, INF, H, 2 * H, True),
        (H / 5, INF, H, 2 * H, True),
        (H / 2, H / 3, H / 6, -H / 6, False),
        (0.0, 0.0, 0.0, 0.0, False),
    ],
)
def test_three_points_are_central_or_on_one_side(down, up, a, b, one_sided):
    found = placed("3-point", down * (1 + 1e-12), up * (1 + 1e-12))
    assert found[2] is one_sided
    assert found[:2] == pytest.approx((a, b), rel=1e-9, abs=0)


@pytest.mark.parametrize("side", [1, -1])
def test_a_box_of_one_ulp_has_a_difference_of_two_points(side):
    theta = 1.5
    other = float(np.nextafter(theta, side * INF))
    bounds = tensor([min(theta, other)]), tensor([max(theta, other)])
    for scheme in ("2-point", "3-point"):
        stencil = place(scheme, tensor([theta]), tensor([H]), bounds)
        assert float(stencil.first[0]) == other - theta
        assert float(stencil.second[0]) == 0
        assert stencil.one_sided is None or not bool(stencil.one_sided[0])


def test_without_bounds_the_steps_are_untouched():
    steps = tensor([1e-3, 2e-3])
    for scheme in ("2-point", "3-point"):
        free = place(scheme, tensor([1.0, -4.0]), steps, None)
        assert free.first is steps
        assert free.one_sided is None
        assert torch.equal(free.resolution, steps)


def test_resolution_counts_what_rounding_does():
    """Largest rounding: (3 + 4 + 1) ε / 2h on one side, 2 ε / 2h centrally."""
    stencil = place("3-point", tensor([0.0, 0.0]), tensor([H, H]), (tensor([0.0, -1.0]), tensor([INF, 1.0])))
    np.testing.assert_allclose(stencil.resolution, [H / 4, H])
    assert ONE_SIDED_ROUNDING == (3 + 4 + 1) / (1 + 1)


edges = st.one_of(st.just(0.0), st.just(INF), st.floats(1e-18, 1e3))
points = st.one_of(st.just(0.0), st.floats(-1e6, 1e6))


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    theta=points,
    down=edges,
    up=edges,
    h=st.floats(1e-20, 1e3),
    scheme=st.sampled_from(["2-point", "3-point"]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_every_point_is_in_the_box_and_differs_where_it_has_width(theta, down, up, h, scheme, dtype):
    at = tensor([theta], dtype)
    lower, upper = at - down, at + up
    step = torch.maximum(tensor([h], dtype), torch.finfo(dtype).eps ** 0.5 * at.abs())  # as the rule for the step
    stencil = place(scheme, at, step, (lower, upper))
    first, second = (inside(at + move, (lower, upper)) for move in (stencil.first, stencil.second))
    for point, move in ((first, stencil.first), (second, stencil.second)):
        assert lower <= point <= upper
        assert abs(float(point - (at + move))) <= float(torch.finfo(dtype).eps * (at + move).abs())  # by rounding only
    assert bool(first == at) == bool(lower == upper)
    assert bool(stencil.first.abs() <= step)
    if stencil.one_sided is not None and bool(stencil.one_sided[0]):
        assert at < first < second or at > first > second
    else:
        assert bool(first != second) == bool(lower != upper)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    a=st.floats(0.1, 2.0), ratio=st.floats(1.5, 3.0), sign=st.sampled_from([1, -1]),
    c=st.tuples(*[st.floats(-3, 3)] * 3),
)  # fmt: skip
def test_three_points_are_exact_for_parabolas(a, ratio, sign, c):
    f = lambda t: tensor([c[0] + c[1] * t + c[2] * t * t])  # noqa: E731
    a, b = sign * a, sign * a * ratio
    assert float(three_point(f(0.0), f(a), f(b), tensor([a]), tensor([b]))) == pytest.approx(c[1], abs=1e-11)


def test_three_points_are_the_formula_of_the_text():
    f, h = np.exp, 0.125
    found = three_point(*(tensor([f(s)]) for s in (0, h, 2 * h)), tensor([h]), tensor([2 * h]))
    assert float(found) == pytest.approx((-3 * f(0) + 4 * f(h) - f(2 * h)) / (2 * h), rel=1e-14)
