"""The sampler by what a training loop sees: permutations, sizes, and a resume that repeats the uninterrupted run."""

import json
import math
import re
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lmfit_gpu.optim.sampling import WINDOW, AdaptiveBatchSampler


def rows_of(batches):
    return list(chain.from_iterable(batches))


def feed(sampler, noise, times=WINDOW):
    for _ in range(times):
        sampler.update(noise)


def trained(sampler, epochs, noise=lambda step: None, batches=None):
    """Return the batches of so many epochs, each used; `noise(step)` is what its step showed."""
    batches = [] if batches is None else batches
    for _ in range(epochs):
        for batch in sampler:
            batches.append(batch)
            sampler.update(noise(len(batches)))
    return batches


@pytest.mark.parametrize("size", [1, 3, 10, 23])
def test_every_epoch_is_another_permutation(size):
    sampler = AdaptiveBatchSampler(23, size, seed=4)
    orders = []
    for epoch in range(3):
        assert (sampler.epoch, len(sampler)) == (epoch, math.ceil(23 / size))
        batches = trained(sampler, 1)
        assert len(batches) == math.ceil(23 / size)
        assert all(len(batch) == size for batch in batches[:-1])
        orders.append(rows_of(batches))
        assert sorted(orders[-1]) == list(range(23))
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_an_epoch_is_complete_whatever_it_grows():
    sampler = AdaptiveBatchSampler(200, 4, seed=1)
    batches = trained(sampler, 2, lambda step: 9.0)
    rows = rows_of(batches)
    assert sorted(rows[:200]) == sorted(rows[200:]) == list(range(200))
    sizes = [len(batch) for batch in batches]
    assert sizes[:16] == [4] * 5 + [8] * 5 + [16] * 5 + [32]


def test_without_update_every_epoch_is_still_another_permutation():
    sampler = AdaptiveBatchSampler(9, 4)
    first, second = list(sampler), list(sampler)
    assert sorted(rows_of(first)) == sorted(rows_of(second)) == list(range(9))
    assert first != second
    assert sampler.epoch == 1  # the second one was not used


def test_the_seed_makes_the_order():
    runs = [trained(AdaptiveBatchSampler(50, 10, seed=seed), 2) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][5:] != runs[2][:5]  # epoch 1 of seed 0 is not epoch 0 of seed 1


def test_torch_s_and_numpy_s_generators_are_left_alone():
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    trained(AdaptiveBatchSampler(50, 10), 2)
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])  # noqa: NPY002


def test_without_shuffle_rows_come_in_order():
    assert trained(AdaptiveBatchSampler(7, 3, shuffle=False), 2) == 2 * [[0, 1, 2], [3, 4, 5], [6]]


def test_drop_last():
    sampler = AdaptiveBatchSampler(7, 3, shuffle=False, drop_last=True)
    assert len(sampler) == 2
    assert trained(sampler, 2) == 2 * [[0, 1, 2], [3, 4, 5]]
    assert sampler.epoch == 2


def test_leaving_an_epoch_early_ends_it():
    sampler = AdaptiveBatchSampler(30, 10)
    batch = next(iter(sampler))
    sampler.update(None)
    assert sorted(rows_of(trained(sampler, 1))) == list(range(30))
    assert len(batch) == 10 and sampler.epoch == 2


# ---- growth


@pytest.mark.parametrize(
    ("noises", "grown"),
    [
        ([0.6] * WINDOW, True),
        ([0.4] * 20, False),
        ([0.5] * 20, False),
        ([0.6] * (WINDOW - 1), False),
        ([0.1, 0.1, 0.1, 0.1, 1e9] * 3, False),  # a fall near zero, by accident
        ([0.1, 0.1, 9.0, 9.0, 9.0], True),
        ([math.inf] * WINDOW, True),
        ([None, math.nan] * 20, False),
        ([None, 0.6, math.nan] * WINDOW, True),
        ([0.6] * (WINDOW - 1) + [None] * 9, False),
        ([0.0] * 20, False),
    ],
)
def test_the_batch_grows_only_when_noisy(noises, grown):
    sampler = AdaptiveBatchSampler(1000, 10)
    for noise in noises:
        sampler.update(noise)
    assert sampler.batch_size == (20 if grown else 10)


def test_threshold_and_growth_are_used():
    sampler = AdaptiveBatchSampler(1000, 10, threshold=2.0, growth=1.25)
    feed(sampler, 1.9, 20)
    assert sampler.batch_size == 10
    feed(sampler, 2.1, 2 * WINDOW)
    assert sampler.batch_size == 17  # 10, 12.5 upwards, 16.25 upwards


def test_the_noise_of_a_smaller_batch_is_forgotten():
    sampler = AdaptiveBatchSampler(1000, 10)
    feed(sampler, 5.0, 2 * WINDOW - 1)
    assert sampler.batch_size == 20
    feed(sampler, 5.0, 1)
    assert sampler.batch_size == 40


@pytest.mark.parametrize(("limit", "largest"), [(None, 100), (70, 70), (10, 10)])
def test_the_batch_never_passes_its_limit_nor_shrinks(limit, largest):
    sampler = AdaptiveBatchSampler(100, 10, max_batch_size=limit)
    sizes = []
    for step in range(120):
        sampler.update(9.0 if step < 80 else 0.0)
        sizes.append(sampler.batch_size)
    assert sizes == sorted(sizes)
    assert sizes[-1] == largest
    assert max(len(batch) for batch in sampler) == largest


def test_it_grows_until_the_mean_of_the_rows_is_known():
    """Falls N(0.1, 1): noise ≈ 10/√m is 0.5 at m = 400; chance pushes it a doubling or two beyond, in 400 steps."""
    rng = np.random.default_rng(0)
    sampler = AdaptiveBatchSampler(100_000, 25)
    for _ in range(400):
        falls = rng.normal(0.1, 1.0, sampler.batch_size)
        sampler.update(falls.std(ddof=1) / math.sqrt(falls.size) / abs(falls.mean()))
    assert sampler.batch_size in {400, 800, 1600}


# ---- resume


def by_step(step):
    return [None, 0.2, 0.9, 0.7, 0.8, 2.0, 0.6][step % 7]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("stop", [0, 1, 5, 9, 13, 19, 24])
def test_a_resume_repeats_the_uninterrupted_run(stop, drop_last):
    options = dict(seed=3, max_batch_size=40, growth=1.7, drop_last=drop_last)
    expected = trained(AdaptiveBatchSampler(103, 7, **options), 9, by_step)
    assert max(map(len, expected)) == 40 and len(expected) > 26
    sampler, batches = AdaptiveBatchSampler(103, 7, **options), []
    while len(batches) < stop:
        for batch in sampler:
            batches.append(batch)
            sampler.update(by_step(len(batches)))
            if len(batches) == stop:
                break
    state = json.loads(json.dumps(sampler.state_dict()))
    other = AdaptiveBatchSampler(103, 7, **options)
    other.load_state_dict(state)
    assert other.state_dict() == state
    trained(other, 9 - other.epoch, by_step, batches)
    assert batches == expected


def test_a_batch_that_was_dealt_but_not_used_comes_again():
    sampler = AdaptiveBatchSampler(100, 10, seed=8)
    dealt = []
    for batch in sampler:
        dealt.append(batch)
        if len(dealt) == 4:
            break
        if len(dealt) == 1:
            sampler.update(None)
    other = AdaptiveBatchSampler(100, 10, seed=8)
    other.load_state_dict(sampler.state_dict())
    assert len(other) == 9
    assert trained(other, 1)[:3] == dealt[1:]


def test_batches_fetched_ahead_keep_their_size_after_a_resume():
    sampler = AdaptiveBatchSampler(100, 10, seed=8)
    feed(sampler, 9.0, WINDOW - 1)
    ahead = iter(sampler)
    dealt = [next(ahead) for _ in range(3)]  # what workers do
    sampler.update(9.0)
    dealt.append(next(ahead))
    assert [len(batch) for batch in dealt] == [10, 10, 10, 20]
    other = AdaptiveBatchSampler(100, 10, seed=8)
    other.load_state_dict(sampler.state_dict())
    assert trained(other, 1)[:3] == dealt[1:]


def test_loading_twice_and_saving_in_between_is_the_same():
    sampler = AdaptiveBatchSampler(20, 5, seed=2)
    next(iter(sampler))
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    assert sampler.state_dict() == state
    assert len(trained(sampler, 1)) == 4


def test_states_of_others_are_refused():
    state = AdaptiveBatchSampler(20, 5).state_dict()
    with pytest.raises(ValueError, match="state: has n_samples=20; this sampler has 21"):
        AdaptiveBatchSampler(21, 5).load_state_dict(state)
    for name, value in (("seed", 1), ("shuffle", False), ("drop_last", True)):
        with pytest.raises(ValueError, match=f"state: has {name}="):
            AdaptiveBatchSampler(20, 5, **{name: value}).load_state_dict(state)
    with pytest.raises(ValueError, match="batch_size of state: got 5; a whole number from 1 to 4"):
        AdaptiveBatchSampler(20, 2, max_batch_size=4).load_state_dict(state)
    with pytest.raises(ValueError, match=r"state: got the keys \['epoch'\]"):
        AdaptiveBatchSampler(20, 5).load_state_dict({"epoch": 3})


# ---- in a DataLoader


def test_a_data_loader_sees_the_new_size_at_its_next_batch():
    data = TensorDataset(torch.arange(100.0))
    sampler = AdaptiveBatchSampler(data, 5, threshold=0.5)
    loader = DataLoader(data, batch_sampler=sampler)
    assert len(loader) == 20
    sizes, seen = [], []
    for (x,) in loader:
        sizes.append(len(x))
        seen += x.tolist()
        sampler.update(1.0)
    assert sizes == [5] * 5 + [10] * 5 + [20, 5]
    assert sorted(seen) == list(range(100))
    assert len(loader) == 5


def test_a_data_loader_resumes_in_the_middle_of_an_epoch():
    data = TensorDataset(torch.arange(60.0))

    def run(sampler, steps=None):
        batches = []
        for (x,) in DataLoader(data, batch_sampler=sampler):
            batches.append(x.tolist())
            sampler.update(1.0)
            if len(batches) == steps:
                break
        return batches

    expected = run(AdaptiveBatchSampler(data, 5))
    first, second = AdaptiveBatchSampler(data, 5), AdaptiveBatchSampler(data, 5)
    start = run(first, 3)
    second.load_state_dict(first.state_dict())
    assert start + run(second) == expected


# ---- errors

WRONG = {
    "no rows": (dict(data=0), ValueError, "data: got 0; a whole number >= 1 is expected"),
    "part of a row": (dict(data=2.5), TypeError, "data: got float; a number of rows or a data set"),
    "an empty set": (dict(data=[]), ValueError, "data: got 0"),
    "truth": (dict(data=True), TypeError, "data: got True"),
    "batch of none": (dict(batch_size=0), ValueError, "batch_size: got 0; a whole number from 1 to 20"),
    "batch of more": (dict(batch_size=21), ValueError, "batch_size: got 21; a whole number from 1 to 20"),
    "batch of 2.0": (dict(batch_size=2.0), TypeError, "batch_size: got 2.0"),
    "limit below": (dict(max_batch_size=4), ValueError, "max_batch_size: got 4; a whole number from 5 to 20"),
    "limit above": (dict(max_batch_size=21), ValueError, "max_batch_size: got 21"),
    "no growth": (dict(growth=1), ValueError, "growth: got 1; a finite number > 1 is expected"),
    "endless growth": (dict(growth=math.inf), ValueError, "growth: got inf"),
    "growth in words": (dict(growth="2"), TypeError, "growth: got '2'"),
    "threshold 0": (dict(threshold=0.0), ValueError, "threshold: got 0.0; a finite number > 0 is expected"),
    "threshold NaN": (dict(threshold=math.nan), ValueError, "threshold: got nan"),
    "seed below 0": (dict(seed=-1), ValueError, "seed: got -1; a whole number >= 0 is expected"),
    "no seed": (dict(seed=None), TypeError, "seed: got None"),
    "shuffle 1": (dict(shuffle=1), TypeError, "shuffle: got 1; True or False is expected"),
    "drop_last in words": (dict(drop_last="no"), TypeError, "drop_last: got 'no'"),
}


@pytest.mark.parametrize(("options", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_bad_arguments_are_named(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        AdaptiveBatchSampler(**{"data": 20, "batch_size": 5} | options)


@pytest.mark.parametrize(("noise", "error"), [(-0.1, ValueError), ("0.1", TypeError), (True, TypeError)])
def test_noise_is_a_number_not_below_zero(noise, error):
    sampler = AdaptiveBatchSampler(20, 5)
    with pytest.raises(error, match=re.escape(f"noise: got {noise!r}; a number >= 0, NaN or None is expected")):
        sampler.update(noise)
