"""Differences in a box: no evaluation outside, second order on a bound, an honest error, no change without bounds."""

import itertools
import math

import numpy as np
import pytest
import torch
from boxed import Watched
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import CPU, numpy_model, problem_of, relative_column_error, torch_model

from lmfit_gpu.differences import Differences, start_differences
from lmfit_gpu.jacobian import Derivatives
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.rows import ArrayRows

N = 50
X1 = np.linspace(0.1, 2.0, N)
Y = np.cos(X1)
INF = math.inf
THETA = [1.3, 0.7]
LIBRARIES = [pytest.param(np, id="numpy"), pytest.param(torch, id="torch")]


def tensor(values, dtype=torch.float64):
    return torch.as_tensor(np.asarray(values, dtype=float)).to(dtype)


def decay(library):
    return lambda x, a, b: a * library.exp(-b * x)


def decay_jacobian(a, b):
    return np.stack([np.exp(-b * X1), -a * X1 * np.exp(-b * X1)], 1)


def around(theta, down, up):
    return [t - down for t in theta], [t + up for t in theta]


# name: theta, lower, upper, the error a column may have: rounding over the width of the box, 10 ε / width
BOXES = {
    "on-lower": (THETA, *around(THETA, 0, INF), 1e-6),
    "on-upper": (THETA, *around(THETA, INF, 0), 1e-6),
    "in-a-corner": (THETA, [1.3, -INF], [INF, 0.7], 1e-6),
    "wide": (THETA, [0, 0], [5, 5], 1e-6),
    "near-lower": (THETA, *around(THETA, 1e-9, 4), 1e-6),
    "near-upper": (THETA, *around(THETA, 4, 1e-9), 1e-6),
    "zero-on-zero": ([1.3, 0.0], [0, 0], [INF, INF], 2e-6),
    "zeros-on-zero": ([0.0, 0.0], [0, 0], [INF, INF], 2e-6),
    "zero-under-zero": ([1.3, 0.0], [-INF, -INF], [INF, 0], 2e-6),
    "narrow": (THETA, *around(THETA, 1e-10, 3e-10), 1e-4),
    "narrow-on-lower": (THETA, *around(THETA, 0, 1e-10), 1e-4),
    "narrow-on-upper": (THETA, *around(THETA, 1e-10, 0), 1e-4),
    "narrow-in-the-middle": (THETA, *around(THETA, 1e-10, 1e-10), 1e-4),
}
SCHEMES = ["2-point", "3-point", "cs", "differences"]


def everything(watched, theta, jac, *, devices=(CPU,), others=()):
    """Use all that evaluates the model between a problem's making and its end; return J at theta."""
    problem = problem_of(
        watched.model,
        X1,
        Y,
        theta,
        bounds=watched.bounds,
        devices=devices,
        chunk_rows=16 if len(devices) > 1 else "auto",
    )
    derivatives = Derivatives.choose(problem, jac, tensor(theta))
    first = derivatives.at(tensor(theta))
    J = first.whole()[:-1].T
    move = problem.inside(tensor(theta) + 0.1) - tensor(theta)
    first.curvature(move)
    for other in others:
        moved = derivatives.adapted(tensor(other), 1.0, 0.1, tensor([1.0, 0.5]))
        for one in (moved, moved.refined() or moved):
            one.at(tensor(other)).repaired().whole()
            one.at(tensor(theta)).normal(tensor([0.5, 0.5]))  # steps of another point
    problem.close()
    return J


def other_points(theta, lower, upper):
    lower, upper = np.asarray(lower, float), np.asarray(upper, float)
    middle = np.clip(np.asarray(theta) + 0.3, lower, upper)
    return [np.where(np.isfinite(lower), lower, theta), np.where(np.isfinite(upper), upper, theta), middle]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("jac", SCHEMES)
@pytest.mark.parametrize(
    ("box", "devices"),
    [(box, (CPU,)) for box in BOXES] + [(box, (CPU, CPU)) for box in ("in-a-corner", "zero-on-zero", "narrow")],
    ids=lambda part: part if isinstance(part, str) else f"{len(part)}-devices",
)
def test_no_evaluation_leaves_the_box_and_columns_are_right(box, jac, library, devices):
    theta, lower, upper, accuracy = BOXES[box]
    watched = Watched(decay, library, lower, upper)
    J = everything(watched, theta, jac, devices=devices, others=other_points(theta, lower, upper))
    assert watched.calls
    assert watched.outside == []
    assert relative_column_error(J, decay_jacobian(*theta)) < accuracy


@pytest.mark.parametrize(  # the kept J of each scheme: in the test before
    ("jac", "kept"), [("auto", True), ("user", True), *((jac, False) for jac in ("auto", "user", *SCHEMES))]
)
@pytest.mark.parametrize("library", LIBRARIES)
def test_other_jacobians_and_an_unkept_one_stay_inside(library, jac, kept, monkeypatch):
    if not kept:
        monkeypatch.setattr("lmfit_gpu.jacobian.KEEP_BYTES", 0)
    for theta, lower, upper, accuracy in BOXES.values():
        watched = Watched(decay, library, lower, upper)
        user = lambda x, a, b: library.stack([library.exp(-b * x), -a * x * library.exp(-b * x)], 1)  # noqa: E731
        J = everything(watched, theta, user if jac == "user" else jac, others=[theta])
        assert watched.outside == []
        assert relative_column_error(J, decay_jacobian(*theta)) < accuracy


def test_a_wrong_jacobian_is_still_found_on_a_bound():
    watched = Watched(decay, np, THETA, [5, 5])
    with pytest.raises(ValueError, match="jac: the column of 'parameter 1' is not the derivative"):
        everything(watched, THETA, lambda x, a, b: np.stack([np.exp(-b * x), a * x * np.exp(-b * x)], 1))
    assert watched.outside == []


@pytest.mark.parametrize("jac", ["2-point", "3-point", "differences"])
def test_equal_bounds_have_a_zero_column(jac):
    watched = Watched(decay, np, [0, 0.7], [5, 0.7])
    J = everything(watched, THETA, jac, others=[THETA])
    assert watched.outside == []
    assert J[:, 1].abs().max() == 0
    assert relative_column_error(J[:, :1], decay_jacobian(*THETA)[:, :1]) < 1e-6


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_no_evaluation_leaves_a_random_box(data):
    size = st.one_of(st.just(0.0), st.just(INF), st.floats(1e-16, 10.0))
    theta = np.array([data.draw(st.one_of(st.just(0.0), st.floats(-3.0, 3.0))) for _ in range(2)])
    lower = theta - [data.draw(size) for _ in range(2)]
    upper = theta + [data.draw(size) for _ in range(2)]
    library, dtype = data.draw(st.sampled_from([(np, torch.float64), (torch, torch.float64), (torch, torch.float32)]))
    jac = data.draw(st.sampled_from(["auto", "2-point", "3-point", "differences"]))
    watched = Watched(decay, library, lower, upper, dtype)
    at, x = tensor(theta, dtype), tensor(X1, dtype)
    problem = LeastSquaresProblem(watched.model, ArrayRows(x, torch.cos(x)), at, bounds=watched.bounds)
    derivatives = Derivatives.choose(problem, jac, at)
    for point in (at, problem.inside(at + 0.3), problem.inside(at - 0.3)):
        moved = derivatives.adapted(point, 1.0, 0.5, torch.ones(2, dtype=torch.float64))
        assert torch.isfinite(moved.at(point).whole()).all()
        moved.at(at).repaired().whole()
        assert np.isfinite(moved.relative_error(torch.ones(2, dtype=torch.float64), 1.0))
    assert watched.outside == []


# --- accuracy on a bound ----------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["on-lower", "on-upper"])
@pytest.mark.parametrize("together", [True, False])
def test_one_sided_three_points_are_of_second_order(side, together):
    """Half the step, a quarter of the error: h²/3 of the third derivative, −a x³ e^{−bx} by b, against the formula."""
    theta, lower, upper, _ = BOXES[side]
    sign = 1 if side == "on-lower" else -1
    watched = Watched(decay, torch, lower, upper)
    problem = problem_of(watched.model, X1, Y, theta, bounds=watched.bounds)
    errors = []
    for h in (1e-2, 5e-3, 2.5e-3):
        columns = torch.empty(2, N, dtype=torch.float64)
        Differences("3-point", tensor([h, h]), together=together)(problem, tensor(theta), problem.probe(), columns)
        errors.append(columns[1].numpy() - decay_jacobian(*theta)[:, 1])
        f = lambda b: theta[0] * np.exp(-b * X1)  # noqa: E731
        b, s = theta[1], sign * h
        expected = (-3 * f(b) + 4 * f(b + s) - f(b + 2 * s)) / (2 * s)
        np.testing.assert_allclose(columns[1], expected, rtol=1e-11, atol=1e-11)
    for wide, short in itertools.pairwise(errors):
        assert np.linalg.norm(wide) / np.linalg.norm(short) == pytest.approx(4, rel=0.03)
    third = -theta[0] * X1**3 * np.exp(-theta[1] * X1)
    assert np.linalg.norm(errors[-1]) == pytest.approx(2.5e-3**2 / 3 * np.linalg.norm(third), rel=0.02)
    assert watched.outside == []


@pytest.mark.parametrize("box", ["on-lower", "on-upper", "near-lower", "narrow", "narrow-on-lower", "narrow-on-upper"])
@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
def test_the_relative_error_is_honest(box, scheme):
    theta, lower, upper, accuracy = BOXES[box]
    watched = Watched(decay, np, lower, upper)
    problem = problem_of(watched.model, X1, Y, theta, bounds=watched.bounds)
    differences = start_differences(problem, tensor(theta), scheme)
    columns = torch.empty(2, N, dtype=torch.float64)
    values = differences(problem, tensor(theta), problem.probe(), columns)
    expected = decay_jacobian(*theta)
    norms = tensor(np.linalg.norm(expected, axis=0))
    claimed = differences.relative_error(norms, float(values.norm()))
    assert relative_column_error(columns.T, expected) < 10 * claimed
    assert claimed < accuracy
    free = start_differences(problem_of(watched.model, X1, Y, theta), tensor(theta), scheme)
    central = free.relative_error(norms, float(values.norm()))
    assert claimed >= central
    if box in ("on-lower", "on-upper"):
        assert claimed <= 8 * central


def test_on_a_bound_three_points_beat_two():
    theta, lower, upper, _ = BOXES["on-lower"]
    for library in (np, torch):
        J = everything(Watched(decay, library, lower, upper), theta, "3-point")
        assert relative_column_error(J, decay_jacobian(*theta)) < 1e-8


@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
def test_a_square_root_at_zero_on_its_bound(scheme):
    watched = Watched(lambda library: lambda x, p, q: library.sqrt(p) + q * x, np, [0, 0], [INF, INF])
    J = everything(watched, [0.0, 1.0], scheme, others=[[0.0, 0.0]])
    assert watched.outside == []
    assert torch.isfinite(J).all()
    assert (J > 0).all()


@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_rounding_does_not_carry_a_point_over_its_bound(scheme, library):
    """−0.3 + (0.1 − (−0.3)) is 0.10000000000000003."""
    assert -0.3 + (0.1 - -0.3) > 0.1
    watched = Watched(lambda library: lambda x, a, b: a * x + b, library, [-0.3, 0.0], [0.1, 1.0])
    theta = [-0.3, 0.5]
    problem = problem_of(watched.model, X1, Y, theta, bounds=watched.bounds)
    columns = torch.empty(2, N, dtype=torch.float64)
    Differences(scheme, tensor([1.0, 1.0]), together=library is torch)(problem, tensor(theta), problem.probe(), columns)
    assert watched.outside == []
    np.testing.assert_allclose(columns.T, np.stack([X1, np.ones(N)], 1), rtol=1e-14)


# --- the search for a visible step ------------------------------------------------------------------------


def in_float32(library):
    del library
    return lambda x, a, b: (np.float32(a) * np.exp(-np.float32(b) * x.astype(np.float32))).astype(float)


@pytest.mark.parametrize(("down", "up"), [(0, INF), (INF, 0), (0, 1e-3), (1e-3, 0), (1e-4, 1e-3), (0, 1e-5)])
@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
def test_a_model_that_rounds_gets_a_longer_step_inside_its_box(scheme, down, up):
    """A step of √ε shows nothing in float32.

    The search asks for slopes to 1 %; one side of three points spoils four times as much. A box of 1e-5 has less to
    offer: 6e-8 of rounding twice over half of it, times four.
    """
    lower, upper = around(THETA, down, up)
    watched = Watched(in_float32, np, lower, upper)
    J = everything(watched, THETA, scheme, others=[THETA])
    assert watched.outside == []
    offered = 0.01 if up + down > 1e-5 else 2 * 6e-8 / 5e-6
    assert relative_column_error(J, decay_jacobian(*THETA)) < offered * (4 if scheme == "3-point" else 1)


def test_curvature_in_a_narrow_box_is_not_taken_for_rounding():
    """exp(b / 1e-7) turns within 11 steps, all the room there is: ten steps and a hundred must not be one point."""
    start, upper = 0.7, 0.7 + 1.1e-7
    watched = Watched(lambda library: lambda x, a, b: a * x * library.exp((b - 0.7) / 1e-7), np, [0, start], [5, upper])
    J = everything(watched, [1.3, start], "2-point")
    assert relative_column_error(J[:, 1:], (1.3e7 * X1)[:, None]) < 0.1  # 5 % of truncation in one step, 70 % in 11


@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
def test_a_small_rate_on_zero_beside_a_large_effect(scheme):
    """y = 100 exp(−p x) from p = 0, the lowest value allowed."""
    watched = Watched(lambda library: lambda x, p, q: 100 * library.exp(-p * 25 * x) + q, np, [0, 0], [INF, 0.5])
    J = everything(watched, [0.0, 0.5], scheme)
    assert watched.outside == []
    expected = np.stack([-2500 * X1, np.ones(N)], 1)
    assert relative_column_error(J, expected) < {"2-point": 1e-4, "3-point": 1e-6}[scheme]


# --- nothing changed without bounds -----------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["2-point", "3-point", "cs"])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("theta", [THETA, [0.0, 0.0], [1e-9, -1e-12], [1e6, 0.01]])
def test_infinite_bounds_change_no_bit(scheme, library, theta):
    model = (numpy_model if library is np else torch_model)(decay(library))
    found = []
    for bounds in (None, (tensor([-INF, -INF]), tensor([INF, INF]))):
        problem = problem_of(model, X1, Y, theta, bounds=bounds)
        differences = start_differences(problem, tensor(theta), scheme)
        columns = torch.empty(2, N, dtype=torch.float64)
        differences(problem, tensor(theta), problem.probe(), columns)
        error = differences.relative_error(tensor([1.0, 2.0]), 3.0)
        found.append((differences.steps, columns, tensor([error])))
    for free, boxed in zip(*found, strict=True):
        assert torch.equal(free, boxed)


@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
def test_columns_without_bounds_are_the_formula_to_the_bit(scheme):
    problem = problem_of(numpy_model(decay(np)), X1, Y, THETA)
    differences = start_differences(problem, tensor(THETA), scheme)
    columns = torch.empty(2, N, dtype=torch.float64)
    values = differences(problem, tensor(THETA), problem.probe(), columns).numpy()
    for j in range(2):
        up, down = np.array(THETA), np.array(THETA)
        up[j] += float(differences.steps[j])
        down[j] -= float(differences.steps[j])
        ahead, behind = decay(np)(X1, *up), decay(np)(X1, *down)
        width, below = up[j] - THETA[j], THETA[j] - down[j]
        expected = (ahead - values) / width if scheme == "2-point" else (ahead - behind) / (width + below)
        np.testing.assert_array_equal(columns[j].numpy(), expected)
