"""Ranks of a process group, and who owns what. Those of several processes run in mlbfgs_ranks_child.py."""

import itertools

import pytest
import torch
import torch.distributed as dist
from mlbfgs_ranks_child import IN_PROCESSES, ranks  # noqa: F401  a fixture

from lmfit_gpu.distributed import balanced_owners, ranks_of

SIZES = {"two": 2, "three": 3}


def shares(sizes, n_ranks):
    held = [0] * n_ranks
    for size, owner in zip(sizes, balanced_owners(sizes, n_ranks), strict=True):
        held[owner] += size
    return held


def best_largest_share(sizes, n_ranks):
    """Try all owners."""
    every = itertools.product(range(n_ranks), repeat=len(sizes))
    return min(
        max(sum(s for s, o in zip(sizes, owners, strict=True) if o == r) for r in range(n_ranks)) for owners in every
    )


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_no_share_is_above_graham_s_bound(n_ranks, rng):
    for _ in range(4):
        sizes = rng.integers(1, 20, size=6).tolist()
        assert max(shares(sizes, n_ranks)) <= (4 / 3 - 1 / (3 * n_ranks)) * best_largest_share(sizes, n_ranks)


def test_graham_s_worst_case():
    """5, 5, 4, 4, 3, 3, 3 on 3 ranks: 9 is best, largest first finds 11 = (4/3 − 1/9) 9."""
    assert best_largest_share([5, 5, 4, 4, 3, 3, 3], 3) == 9
    assert sorted(shares([5, 5, 4, 4, 3, 3, 3], 3)) == [8, 8, 11]


def test_equal_pieces_go_round():
    assert balanced_owners([7] * 6, 3) == [0, 1, 2, 0, 1, 2]
    assert balanced_owners([0, 0, 0], 3) == [0, 0, 0]  # nothing to hold
    assert balanced_owners([4], 3) == [0]
    assert balanced_owners([], 2) == []


def test_no_group_is_no_ranks():
    assert ranks_of(None) is None


def test_a_group_before_initialisation_is_refused():
    assert not dist.is_initialized()
    with pytest.raises(
        ValueError, match=r"process_group: torch\.distributed is not initialised; call init_process_group"
    ):
        ranks_of(object())


@IN_PROCESSES
def test_what_is_no_group_is_refused(ranks):  # noqa: F811
    for said in ranks.of("two", "no_group"):
        for text, given in zip(said, ["'gloo'", "0", "True", "[0, 1]"], strict=True):
            assert text.startswith(f"TypeError: process_group: got {given}; a torch.distributed.ProcessGroup")


@IN_PROCESSES
def test_a_process_outside_the_group_is_refused(ranks):  # noqa: F811
    outside = ranks.of("three", "exchange_in_a_subgroup")[1]
    assert outside == dict.fromkeys(["ranks_of", "MLBFGS"], "ValueError: process_group: this process is not in it")


@IN_PROCESSES
@pytest.mark.parametrize("where", ["two", "three", "subgroup"])
def test_numbers_travel(where, ranks):  # noqa: F811
    """Rank r has r + 1 everywhere; rank 1 owns an empty piece, the others r + 2 numbers. Global ranks: 0, 2."""
    found = ranks.of("three", "exchange_in_a_subgroup")[::2] if where == "subgroup" else ranks.of(where, "exchange")
    size = SIZES.get(where, 2)
    total = size * (size + 1) / 2
    pieces = [[total] * length for length in ([2, 0, 4][:size])]
    grid = torch.arange(6.0).view(2, 3).T
    for rank, of_rank in enumerate(found):
        assert (of_rank["rank"], of_rank["size"]) == (rank, size)
        assert of_rank["summed"] == pieces[rank]
        assert of_rank["sent"] == pieces
        assert of_rank["sum"] == [total, 10 * total]
        assert of_rank["gathered"] == [{"rank": r} for r in range(size)]
        sent = [{"grid": (grid * (r + 1)).tolist(), "number": r, "none": None} for r in range(1, size)]
        assert of_rank["received"] == [{}, *sent]
