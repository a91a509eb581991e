"""MLBFGS on 2 and 3 processes: the run of one process, its memory divided, and no rank left waiting.

The processes run once, in mlbfgs_ranks_child.py; these tests read what they wrote.
"""

import numpy as np
import pytest
from mlbfgs_ranks_child import HALF, IN_PROCESSES, OPTIONS, STEPS, VARIANTS, ranks  # noqa: F401  a fixture

from lmfit_gpu.distributed import balanced_owners

pytestmark = IN_PROCESSES
SEVERAL = {"two": 2, "three": 3}
N_PARAMS = 4 * 6 + 6 + 6 * 5 + 5 + 5 + 1  # of the network
TOLERANCE = 1e-12  # a mean over ranks and one over rows are summed in another order: 3.5e-16 was seen
several = pytest.mark.parametrize("phase", SEVERAL)


def assert_close(found, expected, tolerance=TOLERANCE):
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def assert_alike(found):
    """The parameters of all ranks, to the bit."""
    assert all(of_rank["parameters"] == found[0]["parameters"] for of_rank in found)


def blocks_of(found):
    """Return what all ranks say of their blocks, by name; no two may own one."""
    hessians = [hessian for of_rank in found for hessian in of_rank["hessians"]]
    named = {hessian["name"]: hessian for hessian in hessians}
    assert len(named) == len(hessians)
    return named


def assert_same_run(found, one, tolerance=TOLERANCE):
    """The parameters and the inverse Hessians of one process."""
    assert_alike(found)
    assert_close(found[0]["parameters"], one["parameters"], tolerance)
    blocks, expected = blocks_of(found), blocks_of([one])
    assert blocks.keys() == expected.keys()
    for name, hessian in blocks.items():
        assert hessian["n_pairs"] == expected[name]["n_pairs"] > 0
        assert_close(hessian["eigenvalues"], expected[name]["eigenvalues"], 100 * tolerance)


@several
@pytest.mark.parametrize("name", VARIANTS)
def test_several_processes_are_one(phase, name, ranks):  # noqa: F811
    found = [of_rank[name] for of_rank in ranks.of(phase, "variants")]
    one = ranks.of("one", "variants")[0][name]
    assert_same_run(found, one, tolerance=1e-6 if name == "two dtypes" else TOLERANCE)  # float32 in it


@several
def test_param_groups(phase, ranks):  # noqa: F811
    assert_same_run(ranks.of(phase, "groups"), ranks.of("one", "groups")[0])


@several
def test_the_gradient_of_a_layer_is_on_one_rank_only(phase, ranks):  # noqa: F811
    missing = [of_rank["a gradient on one rank"]["missing"] for of_rank in ranks.of(phase, "variants")]
    assert missing == [["extra.weight", "extra.bias"]] * (SEVERAL[phase] - 1) + [[]]


def test_a_rank_may_own_nothing(ranks):  # noqa: F811
    """Two blocks on three ranks."""
    owned = [len(of_rank["two dtypes"]["hessians"]) for of_rank in ranks.of("three", "variants")]
    assert owned == [1, 1, 0]


@several
def test_distributed_data_parallel(phase, ranks):  # noqa: F811
    """DDP has averaged the gradients; to average them again, or not, is the same."""
    for name in ranks.of(phase, "data_parallel")[0]:
        found = [of_rank[name] for of_rank in ranks.of(phase, "data_parallel")]
        assert_same_run(found, ranks.of("one", "variants")[0][name.split(",")[0]])


def test_ranks_of_a_subgroup(ranks):  # noqa: F811
    """Ranks 0 and 2 of three are the ranks 0 and 1 of two."""
    first, _, second = ranks.of("three", "exchange_in_a_subgroup")
    two = ranks.of("two", "variants")[0]["module"]
    assert first["parameters"] == second["parameters"]
    assert_close(first["parameters"], two["parameters"])
    assert (first["full"], second["full"]) == ([], list(range(6)))  # full_state_dict(to=1)


@several
def test_numbers_sent(phase, ranks):  # noqa: F811
    """n to owners and n back for a step; with equal gradients nothing to owners."""
    for of_rank in ranks.of(phase, "run_and_save"):
        n = (STEPS - HALF) * N_PARAMS
        assert of_rank["mean"]["sent"] == {"reduce": n, "all_reduce": 0, "broadcast": n}
        assert of_rank["equal"]["sent"] == {"reduce": 0, "all_reduce": 0, "broadcast": n}


@several
def test_equal_gradients_are_used_as_they_are(phase, ranks):  # noqa: F811
    """Without a sum over ranks the rounding is that of one process, too."""
    found = [of_rank["equal"] for of_rank in ranks.of(phase, "run_and_save")]
    assert_same_run(found, ranks.of("one", "run_and_save")[0]["equal"], tolerance=1e-15)


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["one", *SEVERAL])
def test_the_state_is_divided(phase, ranks):  # noqa: F811
    """float64, 3 pairs: 4 averages, momentum and 2 · 3 rows for each parameter owned, and work for all parameters."""
    found = ranks.of(phase, "memory")
    sizes = found[0]["blocks"]
    owners = balanced_owners(sizes, len(found))
    for rank, of_rank in enumerate(found):
        owned = [str(block) for block, owner in enumerate(owners) if owner == rank]
        n = sum(sizes[int(block)] for block in owned)
        assert of_rank["owned"] == owned
        assert of_rank["state"] == 8 * (4 + 1 + 2 * 3) * n
        cores = len(owned) * 8 * 6**2  # M
        assert of_rank["alive"] == of_rank["state"] + 8 * sum(sizes) + cores


def test_the_largest_state_falls_with_ranks(ranks):  # noqa: F811
    """Blocks of 630, 775, 260 and 165 parameters: 1,830 on one rank, 940 on two, 775 on three."""
    largest = [max(of_rank["state"] for of_rank in ranks.of(phase, "memory")) for phase in ["one", *SEVERAL]]
    assert largest == [88 * 1830, 88 * 940, 88 * 775]


# Resuming -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["mean", "equal"])
@pytest.mark.parametrize("phase", ["two", "three", "one again"])
def test_another_number_of_ranks_goes_on(phase, mode, ranks):  # noqa: F811
    """1 → 2, 2 → 3 and 3 → 1 ranks through full_state_dict, torch.save and torch.load(weights_only=True)."""
    found = [of_rank[mode] for of_rank in ranks.of(phase, "resume")]
    assert_same_run(found, ranks.of("one", "run_and_save")[0][mode])


@several
@pytest.mark.parametrize("mode", ["mean", "equal"])
def test_the_part_of_a_rank_goes_on(phase, mode, ranks):  # noqa: F811
    """On as many ranks, to the bit."""
    for resumed, run in zip(ranks.of(phase, "resume_own_part"), ranks.of(phase, "run_and_save"), strict=True):
        assert resumed[mode]["parameters"] == run[mode]["parameters"]
        assert resumed[mode]["hessians"] == run[mode]["hessians"]


@several
def test_full_state_dict(phase, ranks):  # noqa: F811
    """The same on all ranks, and that of one process; `to` names the one that keeps it."""
    found = ranks.of(phase, "run_and_save")
    one = ranks.of("one", "run_and_save")[0]["equal"]["everywhere"]
    for rank, of_rank in enumerate(found):
        assert of_rank["mean"]["keeps"] == (rank == SEVERAL[phase] - 1)
        state = of_rank["equal"]["everywhere"]
        assert state == found[0]["equal"]["everywhere"]
        assert list(state) == list(one)
        for number, part in state.items():
            assert part.keys() == one[number].keys()
            tensors = [key for key in part if key != "block"]
            assert_close([part[key] for key in tensors], [one[number][key] for key in tensors])


@pytest.mark.parametrize("phase", ["two", "three", "one again"])
def test_the_part_of_another_rank_is_refused(phase, ranks):  # noqa: F811
    for rank, of_rank in enumerate(ranks.of(phase, "resume_other_part")):
        other = 1 - rank if phase == "two" else 0
        this = "an optimizer without a process group" if phase == "one again" else f"rank {rank} of {SEVERAL[phase]}"
        assert of_rank["refusal"] == (
            f"ValueError: state_dict: is the part of rank {other} of 2, this is {this}; "
            "full_state_dict() returns what any number of ranks can load"
        )
        assert of_rank["same"]


def test_only_its_own_part_is_loaded(ranks):  # noqa: F811
    """Of a float64 state for float32 parameters, torch makes copies: 4 averages, momentum and the rows of the pairs."""
    for of_rank in ranks.of("two", "load_only_own_part"):
        assert of_rank["bytes"] == 4 * (4 + 1 + 2 * OPTIONS["history_size"]) * of_rank["owned"]


# Errors ---------------------------------------------------------------------------------------------------------------

DIFFER = "ValueError: params: they differ between ranks; send those of one rank to all, as DDP does, first"
OTHERWISE = "ValueError: params: options, average_gradients or steps taken differ between ranks; give the same"


@several
def test_ranks_that_begin_otherwise_are_refused(phase, ranks):  # noqa: F811
    """On all ranks, before a parameter moves; and the group can still be used."""
    found = ranks.of(phase, "other_beginnings")
    for of_rank in found:
        for name in ("seed", "shape", "one bit"):
            assert of_rank[name] == {"refusal": DIFFER, "moved": False}, name
        for name in ("lr", "blocks", "average_gradients", "n_steps"):
            assert of_rank[name] == {"refusal": OTHERWISE, "moved": False}, name
        assert of_rank["nan everywhere"] == "none"
        assert of_rank["afterwards"] == found[0]["afterwards"]


@several
def test_param_groups_added_later_are_compared(phase, ranks):  # noqa: F811
    assert ranks.of(phase, "a_group_added") == [DIFFER] * SEVERAL[phase]


@several
def test_a_sparse_gradient_on_one_rank_is_refused_on_all(phase, ranks):  # noqa: F811
    *others, last = ranks.of(phase, "a_sparse_gradient_on_one_rank")
    assert last["refusal"].startswith("ValueError: step: the gradient of weight is sparse")
    for of_rank in others:
        assert of_rank["refusal"] == "ValueError: step: another rank has a sparse gradient; a dense one is expected"
    assert_alike([*others, last])
    assert {of_rank["again"] for of_rank in [*others, last]} == {"none"}


@several
def test_a_gradient_that_is_not_finite_on_one_rank(phase, ranks):  # noqa: F811
    """Without a GradScaler: its block is lost, on all ranks as on one process."""
    found, one = ranks.of(phase, "not_finite_on_one_rank"), ranks.of("one", "not_finite_on_one_rank")[0]
    assert_alike(found)
    assert sum(one["nan"]) == 6 * 5 + 5  # the weight and the bias of the second layer
    for of_rank in found:
        assert of_rank["nan"] == one["nan"]
        assert_close(of_rank["parameters"], one["parameters"])


@several
def test_gradscaler_skips_a_step_on_all_ranks_or_none(phase, ranks):  # noqa: F811
    """The gradient of the last rank overflows once: one process leaves this step out. Its own scale is halved."""
    found, one = ranks.of(phase, "scaled_gradients"), ranks.of("one", "scaled_gradients")[0]
    assert_same_run(found, one)
    assert {of_rank["n_steps"] for of_rank in found} == {STEPS - 1}
    assert [of_rank["scale"] for of_rank in found] == [1024.0] * (SEVERAL[phase] - 1) + [512.0]
