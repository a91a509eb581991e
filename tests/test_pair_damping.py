"""Damping of curvature pairs: formulas by hand, the window as a property, Powell's share."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmfit_gpu.optim.pair_damping import DampedPair, PairProducts, damped_pair, weakened

WINDOW = {"damping": "window", "curvature_window": (0.1, 4.0), "tau": 0.9}
POWELL = {"damping": "powell", "curvature_window": (0.5, 20.0)}


@pytest.mark.parametrize(
    ("curvature", "tau"),
    [
        (-2.0, 0.9 / 3),  # (1 − 0.1)/(1 + 2)
        (0.05, 0.9),  # (1 − 0.1)/(1 − 0.05) = 0.947, more than τ₀
        (0.1, 0.9),
        (1.0, 0.9),
        (4.0, 0.9),
        (31.0, 0.1),  # (4 − 1)/(31 − 1)
    ],
)
def test_the_window_takes_tau_of_the_paper(curvature, tau):
    pair = damped_pair(PairProducts(2.0, 2 * curvature, 2 * curvature**2 + 1), WINDOW, 1.0)
    assert pair.tau == pytest.approx(tau, rel=1e-15)
    assert pair.shift == pytest.approx(1 - tau, rel=1e-15)


finite = st.floats(-1e6, 1e6)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    curvature=finite,
    low=st.floats(1e-3, 0.9),
    high=st.floats(1.1, 1e3),
    tau=st.floats(1e-3, 1),
    scale=st.floats(1e-3, 1e3),
)
def test_the_damped_curvature_lies_in_the_window(curvature, low, high, tau, scale):
    options = {"damping": "window", "curvature_window": (low, high), "tau": tau}
    products = PairProducts(1.0, curvature * scale, (curvature * scale) ** 2 + 1.0)
    damped = damped_pair(products, options, scale).curvature(products)
    # rounding: ŷ is a difference of numbers of the size of the curvature
    slack = 1e-13 * scale * (1 + abs(curvature))
    assert low * scale - slack <= damped <= high * scale + slack


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_the_relative_window_is_the_window_in_units_of_the_scale(scale):
    products = PairProducts(1.0, -0.3, 2.0)
    scaled = PairProducts(1.0, -0.3 * scale, 2.0 * scale**2)
    one, other = damped_pair(products, WINDOW, 1.0), damped_pair(scaled, WINDOW, scale)
    assert other.tau == pytest.approx(one.tau, rel=1e-14)
    assert other.gamma == pytest.approx(one.gamma / scale, rel=1e-14)


def test_the_initial_inverse_is_that_of_the_damped_pair():
    s, y = (1.0, 2.0), (3.0, -1.0)
    pair = damped_pair(PairProducts(5.0, 1.0, 10.0), WINDOW, 1.0)
    damped = [pair.tau * b + pair.shift * a for a, b in zip(s, y, strict=True)]
    along = sum(a * b for a, b in zip(s, damped, strict=True))
    assert pair.gamma == pytest.approx(along / sum(b * b for b in damped), rel=1e-14)


@pytest.mark.parametrize(("sy", "yy"), [(-3.0, 10.0), (0.0, 1.0), (0.01, 1e-3), (1e-3, 5.0)])
def test_powell_keeps_a_quarter_of_the_initial_curvature(sy, yy):
    products = PairProducts(1.0, sy, yy)
    initial = 0.5 if sy <= 0 else min(max(yy / sy, 0.5), 20.0)
    pair = damped_pair(products, POWELL, 1.0)
    assert pair.curvature(products) == pytest.approx(max(0.25 * initial, sy), rel=1e-14)
    assert pair.gamma == pytest.approx(1 / initial, rel=1e-15)


def test_powell_leaves_a_pair_of_enough_curvature_alone():
    assert damped_pair(PairProducts(1.0, 2.0, 5.0), POWELL, 1.0) == DampedPair(1.0, 0.0, 1 / 2.5, 2.5)


@pytest.mark.parametrize(("sy", "kept"), [(-1.0, False), (0.0, False), (1e-12, False), (1e-3, True)])
def test_without_damping_only_pairs_of_positive_curvature_are_kept(sy, kept):
    pair = damped_pair(PairProducts(1.0, sy, 1.0), {"damping": None}, 1.0)
    assert (pair is not None) == kept
    if kept:
        assert (pair.tau, pair.shift) == (1.0, 0.0)
        assert math.isclose(pair.gamma, sy, rel_tol=1e-14)  # ⟨s,y⟩/⟨y,y⟩


def test_a_weakened_pair_has_half_the_tau_and_pulls_to_the_same_curvature():
    products = PairProducts(1.0, 0.5, 9.0)
    pair = damped_pair(products, WINDOW, 2.0)
    weak = weakened(pair, products)
    assert weak.tau == pair.tau / 2
    assert weak.shift == pytest.approx((1 - pair.tau / 2) * 2.0, rel=1e-15)
    for _ in range(60):
        weak = weakened(weak, products)
    assert weak.curvature(products) == pytest.approx(2.0, rel=1e-12)  # κ
    assert weak.gamma == pytest.approx(0.5, rel=1e-12)
    assert weakened(damped_pair(products, {"damping": None}, 1.0), products) is None
