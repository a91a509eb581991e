"""The box of the parameters: clamping, rooms, and what is refused."""

import math

import pytest
import torch
from injected import tensor

from lmfit_gpu.box import checked, inside, rooms

INF = math.inf
BOUNDS = (tensor([0.0, -INF, -1.0]), tensor([1.0, 2.0, INF]))


def test_inside_clamps_every_row():
    theta = tensor([[-1.0, 3.0, 5.0], [0.5, -9.0, -2.0]])
    torch.testing.assert_close(inside(theta, BOUNDS), tensor([[0.0, 2.0, 5.0], [0.5, -9.0, -1.0]]), rtol=0, atol=0)


def test_without_bounds_theta_is_itself():
    theta = tensor([1.0, 2.0])
    assert inside(theta, None) is theta
    assert all(torch.isinf(room).all() for room in rooms(theta, None))


def test_rooms_are_distances_to_the_bounds():
    up, down = rooms(tensor([0.25, 1.0, -1.0]), BOUNDS)
    assert up.tolist() == [0.75, 1.0, INF]
    assert down.tolist() == [0.25, INF, 0.0]


def test_bounds_take_the_dtype_of_theta():
    bounds = checked(BOUNDS, torch.zeros(3), ())
    assert all(side.dtype == torch.float32 for side in bounds)
    assert checked(None, torch.zeros(3), ()) is None


@pytest.mark.parametrize(
    ("theta", "lower", "upper", "message"),
    [
        ([1.0, 5.0], [0.0, 0.0], [2.0, 2.0], r"bounds: 'b' is 5 at the start; .* got 0 and 2"),
        ([1.0, -1.0], [0.0, 0.0], [2.0, 2.0], r"bounds: 'b' is -1 at the start"),
        ([1.0, 1.0], [2.0, 0.0], [0.0, 2.0], r"bounds: 'a' is 1 at the start; .* got 2 and 0"),
        ([1.0, 1.0], [0.0, math.nan], [2.0, 2.0], r"bounds: 'b' .* got nan and 2"),
        ([1.0, 1.0], [0.0], [2.0, 2.0], r"bounds: lower has shape \(1,\); expected \(2,\)"),
        ([1.0, 1.0], [0.0, 0.0], [2.0, 2.0, 2.0], r"bounds: upper has shape \(3,\); expected \(2,\)"),
    ],
)
def test_wrong_bounds_are_refused(theta, lower, upper, message):
    with pytest.raises(ValueError, match=message):
        checked((tensor(lower), tensor(upper)), tensor(theta), ("a", "b"))


def test_an_unnamed_parameter_has_a_number():
    with pytest.raises(ValueError, match="'parameter 1' is 5"):
        checked((tensor([0.0, 0.0]), tensor([2.0, 2.0])), tensor([1.0, 5.0]), ())
