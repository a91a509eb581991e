"""The state of MLBFGS: what is saved goes on to the bit, what does not fit is refused and changes nothing."""

import copy
import dataclasses
import io
import math
import pickle

import numpy as np
import pytest
import torch
from mlbfgs_runs import F64, FAST, backward, equal, flat, network, plain_run, run, same

from lmfit_gpu import MLBFGS
from lmfit_gpu.optim.parameter_blocks import Averages, Block, Flat

KINDS = {
    "plain": {},
    "no momentum": {"momentum": 0.0},
    "one block": {"blocks": "model"},
    "a block for each tensor": {"blocks": "tensor", "nesterov": True},
    "growing memory": {"history_growth": 2, "history_size": 4},
    "bounds": {"eigenvalue_bounds": (0.5, 1.5)},
    "relative window": {"relative_window": True, "initial_inverse": "pair"},
    "powell": {"damping": "powell", "normalize": "unit"},
    "no damping": {"damping": None, "lr": 0.01},
}
PASSING = {"members", "owner", "work", "present", "direction", "shapes", "n_params"}  # of a step, or of the layout


def saved(optimizer):
    """Return the state as a file gives it back."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def plain(value):
    """Return a part of a block in a form that can be compared."""
    if isinstance(value, Flat):
        return value.vector
    if isinstance(value, Averages):
        return [
            part.vector for part in (value.parameter, value.gradient, value.parameter_before, value.gradient_before)
        ]
    if hasattr(value, "capacity"):
        return {key: v.tolist() if isinstance(v, np.ndarray) else v for key, v in vars(value).items() if key != "_like"}
    return value


def memory(optimizer):
    names = [f.name for f in dataclasses.fields(Block) if f.name not in PASSING]
    return [{name: plain(getattr(block, name)) for name in names} for group in optimizer._blocks() for block in group]


@pytest.mark.parametrize(
    ("kind", "before"),
    # Nothing yet; averages; one pair; a ring that has gone round, for each kind.
    [("plain", 0), ("plain", 2), ("plain", 4), ("growing memory", 6), *((kind, 12) for kind in KINDS)],
)
def test_a_saved_run_goes_on_to_the_bit(kind, before):
    options = {**FAST, **KINDS[kind]}
    model, other = network(), network(seed=1)
    optimizer, resumed = MLBFGS(model, **options), MLBFGS(other, **FAST)  # the options come with the state
    run(model, optimizer, n=before)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved(optimizer))
    assert equal(memory(resumed), memory(optimizer))
    assert same(run(other, resumed, n=3, first=before), run(model, optimizer, n=3, first=before))
    assert equal(resumed.state_dict(), optimizer.state_dict())
    assert resumed.inverse_hessians() == optimizer.inverse_hessians()


def begun_between_pairs():
    """Return a model whose first layer had its first gradient in a step where no pair was due."""
    model = network()
    optimizer = MLBFGS(model.parameters(), **FAST)
    for number in range(2):
        model[0].requires_grad_(requires_grad=number == 1)
        run(model, optimizer, first=number)
    return model, optimizer


def test_a_history_that_began_between_two_pairs_is_saved():
    model, optimizer = begun_between_pairs()
    other = copy.deepcopy(model)
    resumed = MLBFGS(other.parameters(), **FAST)
    resumed.load_state_dict(saved(optimizer))
    assert same(run(other, resumed, n=4, first=2), run(model, optimizer, n=4, first=2))


def test_a_history_that_began_between_two_pairs_outlives_a_state_that_is_refused():
    (model, optimizer), (other, twin) = begun_between_pairs(), begun_between_pairs()
    with pytest.raises(ValueError, match="its param groups have no"):
        optimizer.load_state_dict(torch.optim.SGD(network().parameters()).state_dict())
    assert same(run(model, optimizer, n=4, first=2), run(other, twin, n=4, first=2))


def test_a_saved_run_with_pairs_of_the_overlap_goes_on_to_the_bit():
    model = network()
    optimizer = MLBFGS(model, **{**FAST, "beta": None}, pairs="overlap")

    def step(model, optimizer, number):
        def closure():
            return backward(model, number)

        optimizer.step(closure, closure)

    for number in range(9):
        step(model, optimizer, number)
    other = copy.deepcopy(model)
    resumed = MLBFGS(other)
    resumed.load_state_dict(saved(optimizer))
    for number in range(9, 14):
        step(model, optimizer, number)
        step(other, resumed, number)
        assert torch.equal(flat(model), flat(other))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deep", "pickle"]
)
@pytest.mark.parametrize("before", [0, 3, 11])
def test_a_copy_goes_on_to_the_bit_and_apart(copied, before):
    model = network()
    optimizer = MLBFGS(model, **FAST)
    run(model, optimizer, n=before)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it wraps step of this instance
    other, twin = copied((model, optimizer))
    assert twin.param_groups[0]["params"][0] is other[0].weight
    expected = run(model, optimizer, n=5, first=before)
    assert same(run(other, twin, n=5, first=before), expected)


def test_a_loaded_state_is_not_shared():
    model, other = network(), network()
    optimizer, resumed = MLBFGS(model, **FAST), MLBFGS(other, **FAST)
    run(model, optimizer, n=7)
    resumed.load_state_dict(optimizer.state_dict())
    kept = copy.deepcopy(optimizer.state_dict())
    run(other, resumed, n=7)
    assert equal(optimizer.state_dict(), kept)


def test_a_state_of_tensors_without_axes_and_without_entries_is_taken_up():
    def of(gain):
        return torch.nn.Parameter(torch.tensor(gain)), torch.nn.Parameter(torch.zeros(0, 3))

    def steps(tensors, optimizer):
        for _ in range(7):
            optimizer.zero_grad()
            (torch.cosh(tensors[0]) + tensors[1].sum()).backward()
            optimizer.step()
        return float(tensors[0].detach())

    first, second = of(2.0), of(2.0)
    optimizer, resumed = MLBFGS(first, **FAST, blocks="model"), MLBFGS(second, **FAST)
    steps(first, optimizer)
    with torch.no_grad():
        second[0].copy_(first[0])
    resumed.load_state_dict(saved(optimizer))
    assert resumed.inverse_hessians()[0]["n_pairs"] == 3
    assert steps(second, resumed) == steps(first, optimizer)


def test_the_state_is_there_from_the_first_step_on():
    """torch.distributed.checkpoint takes an empty `state` for an optimizer that has not begun, and makes it step."""
    model = network()
    optimizer = MLBFGS(model, **FAST)
    for number in range(4):
        run(model, optimizer, first=number)
        assert set(optimizer.state) == set(model.parameters())
    assert optimizer.state[model[0].weight]["pairs"].shape == (3, 2, 4, 3)
    assert torch.equal(
        optimizer.state[model[2].bias]["momentum_buffer"], optimizer.state_dict()["state"][3]["momentum_buffer"]
    )


def test_what_is_forgotten_is_not_written():
    """A gradient that is not finite ends the averages, here before the first pair: nothing is left."""
    model = network()
    optimizer = MLBFGS(model, **{**FAST, "momentum": 0.0})
    run(model, optimizer, n=2)
    assert len(optimizer.state_dict()["state"]) == 4
    backward(model, 2)
    for p in model.parameters():
        p.grad.fill_(math.nan)
    optimizer.step()
    assert optimizer.state_dict()["state"] == {}


def test_hooks_of_states_see_them_and_may_replace_them():
    model, seen = network(), []
    optimizer = MLBFGS(model, **FAST)
    run(model, optimizer, n=5)
    optimizer.register_state_dict_pre_hook(lambda o: seen.append(len(o.state)))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": "mine"})
    state = optimizer.state_dict()
    assert (seen, state["note"]) == ([4], "mine")
    other = MLBFGS(network(), **FAST)
    other.register_load_state_dict_pre_hook(lambda _, state: seen.append(state["note"]) or copy.deepcopy(state))
    other.register_load_state_dict_post_hook(lambda o: seen.append(o.param_groups[0]["n_steps"]))
    other.load_state_dict(state)
    assert seen == [4, "mine", 5]
    assert other.inverse_hessians() == optimizer.inverse_hessians()


@pytest.mark.parametrize("option", [{"history_size": 5}, {"blocks": "tensor"}, {"blocks": "model"}])
def test_options_come_with_the_state_as_in_torch(option):
    model, other = network(), network()
    optimizer, resumed = MLBFGS(model, **{**FAST, **option}), MLBFGS(other, **FAST)
    run(model, optimizer, n=9)
    run(other, resumed, n=3)
    resumed.load_state_dict(optimizer.state_dict())
    assert {key: resumed.param_groups[0][key] for key in option} == option
    assert resumed.inverse_hessians() == optimizer.inverse_hessians()


def test_a_state_in_double_precision_is_taken_up_in_single():
    model, other = network(), network(dtype=torch.float32)
    optimizer, resumed = MLBFGS(model, **FAST), MLBFGS(other, **FAST)
    run(model, optimizer, n=9)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved(optimizer))
    single, double = run(other, resumed, n=4, first=9)[-1], run(model, optimizer, n=4, first=9)[-1]
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single, double, atol=1e-4)


def test_the_state_of_a_compiled_model_is_that_of_the_model():
    """Its names begin with "_orig_mod."; the blocks are the same."""
    model, other = network(), network()
    optimizer = MLBFGS([("_orig_mod." + name, p) for name, p in model.named_parameters()], **FAST)
    resumed = MLBFGS(other, **FAST)
    run(model, optimizer, n=5)
    resumed.load_state_dict(optimizer.state_dict())
    other.load_state_dict(model.state_dict())
    assert same(run(other, resumed, n=5, first=5), run(model, optimizer, n=5, first=5))


def another_network():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(4, 2)).to(F64)


def state_of(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.linspace(0.1, 1, p.numel(), dtype=p.dtype).view(p.shape)
    optimizer.step()
    return optimizer.state_dict()


def changed(change):
    def make():
        state = copy.deepcopy(state_of(MLBFGS(network(), **FAST)))
        change(state)
        return state

    return make


FOREIGN = {
    "shapes": (lambda: state_of(MLBFGS(another_network(), **FAST)), "its blocks are not those of this optimizer"),
    "fewer tensors": (lambda: state_of(MLBFGS(network()[0], **FAST)), "doesn't match the size"),
    "two groups": (
        lambda: state_of(MLBFGS([{"params": layer.parameters()} for layer in (network()[0], network()[2])], **FAST)),
        "different number of parameter groups",
    ),
    "adam": (lambda: state_of(torch.optim.Adam(network().parameters())), r"have no beta, momentum, .*those of MLBFGS"),
    "sgd": (
        lambda: state_of(torch.optim.SGD(network().parameters())),
        "have no beta, update_every, ",
    ),
    "other blocks": (changed(lambda s: s["param_groups"][0].update(blocks="tensor")), r"block '0.weight' differs"),
    "a tensor short": (changed(lambda s: s["state"].pop(1)), r"block '0' differs"),
    "the numbers short": (changed(lambda s: s["state"][0].pop("block")), r"block '0' differs"),
    "a number short": (changed(lambda s: s["state"][0]["block"].pop("scale")), r"block '0' differs"),
    "another memory": (changed(lambda s: s["param_groups"][0].update(history_size=7)), "^history_size: got 7"),
    "a bad option": (changed(lambda s: s["param_groups"][0].update(beta=2.0)), r"^beta: got 2.0"),
    "a bad type": (changed(lambda s: s["param_groups"][0].update(maximize="no")), r"^maximize: got 'no'"),
    "a part": (changed(lambda s: s.update(ranks={"rank": 1, "size": 3})), "is the part of rank 1 of 3"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(kind):
    make, message = FOREIGN[kind]
    model = network()
    optimizer = MLBFGS(model, **FAST)
    run(model, optimizer, n=6)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.load_state_dict(make())
    assert equal(optimizer.state_dict(), before)
    assert same(run(model, optimizer, n=3, first=6), plain_run(9)[6:])


def test_blocks_by_names_are_not_those_without():
    """A convolution without bias and a norm: two blocks by names, one without (test_parameter_blocks.py)."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, bias=False), torch.nn.BatchNorm2d(4))
    named, nameless = MLBFGS(copy.deepcopy(model), **FAST), MLBFGS(model.parameters(), **FAST)
    state = state_of(nameless)
    with pytest.raises(ValueError, match=r"^state_dict: its blocks are not those of this optimizer \(block '0.weight'"):
        named.load_state_dict(state)
    named.load_state_dict({**state, "state": {}})  # a state without history has no blocks


def test_without_a_process_group_the_full_state_is_the_state():
    model = network()
    optimizer = MLBFGS(model, **FAST)
    run(model, optimizer, n=5)
    assert equal(optimizer.full_state_dict(), optimizer.state_dict())
