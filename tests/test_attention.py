"""attention: the recursion of the factors by hand, and what is refused."""

import math

import pytest
import torch

from lmfit_gpu import ResidualAttention


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_factors_follow_the_recursion():
    attention = ResidualAttention(decay=0.9, rate=0.2, start=1.0)
    first = attention.updated(None, {"in": tensor(1.0, -4.0, 0.0), "edge": tensor(-2.0, 2.0)})
    torch.testing.assert_close(first["in"], tensor(0.95, 1.1, 0.9))
    torch.testing.assert_close(first["edge"], tensor(1.1, 1.1))
    second = attention.updated(first, {"in": tensor(-8.0, 2.0, 8.0), "edge": tensor(0.0, 1e-9)})
    torch.testing.assert_close(second["in"], tensor(0.9 * 0.95 + 0.2, 0.9 * 1.1 + 0.05, 0.9 * 0.9 + 0.2))
    torch.testing.assert_close(second["edge"], tensor(0.99, 0.99 + 0.2))
    torch.testing.assert_close(first["in"], tensor(0.95, 1.1, 0.9))  # the state before is as it was


def test_a_row_that_is_always_the_largest_ends_at_rate_over_one_minus_decay():
    attention, state = ResidualAttention(decay=0.9, rate=0.02), None
    for _ in range(300):
        state = attention.updated(state, {"": tensor(-3.0, 0.0, 1.5)})
    torch.testing.assert_close(state[""], tensor(0.2, 0.0, 0.1), rtol=1e-9, atol=1e-12)


def test_several_residuals_of_a_row_count_by_their_norm():
    r = tensor(3.0, 4.0, 0.0, -10.0).reshape(2, 2)
    state = ResidualAttention(decay=0.0, rate=1.0).updated(None, {"": r})
    torch.testing.assert_close(state[""], tensor(0.5, 1.0))


@pytest.mark.parametrize("r", [tensor(0.0, 0.0), tensor(1.0, math.nan), tensor(math.inf, 1.0)], ids=["0", "nan", "inf"])
def test_without_a_largest_residual_factors_stay(r):
    attention, before = ResidualAttention(), {"": tensor(0.3, 2.0)}
    assert torch.equal(attention.updated(before, {"": r})[""], before[""])


@pytest.mark.parametrize(
    ("state", "message"),
    [({"in": tensor(1.0)}, "2 rows of 'in', 1 in the step before"), ({"edge": tensor(1.0, 1.0)}, "no in the step")],
    ids=["another number of rows", "another group"],
)
def test_other_rows_than_before_are_refused(state, message):
    with pytest.raises(ValueError, match=message):
        ResidualAttention().updated(state, {"in": tensor(1.0, 2.0)})


@pytest.mark.parametrize(
    ("name", "value"), [("decay", 1.0), ("decay", -0.1), ("rate", 0.0), ("rate", math.inf), ("start", -1.0)]
)
def test_bad_numbers_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}: got {value!r}"):
        ResidualAttention(**{name: value})
