"""MLBFGS as an optimizer of torch: param groups, hooks, closures, schedulers, scalers, tensors of every kind.

Its saved state is in test_mlbfgs_state.py, what it refuses in test_mlbfgs_options.py.
"""

import copy
import math

import numpy as np
import pytest
import torch
from mlbfgs_runs import F64, FAST, backward, batch, equal, flat, gradient, loss_of, network, plain_run, run, same
from torch.optim import lr_scheduler as schedulers

from lmfit_gpu import MLBFGS
from lmfit_gpu.optim import curvature_pairs


def direction(optimizer, g, gamma):
    """Return H g by the two-loop recursion from the pairs in the state; one block, the tensors in order."""
    state = [optimizer.state_dict()["state"][i] for i in range(len(optimizer.param_groups[0]["params"]))]
    q, used = g.numpy().copy(), []
    if "pairs" in state[0]:
        pairs = torch.cat([part["pairs"].flatten(2) for part in state], dim=2).numpy()
        used = [pairs[slot] for slot in state[0]["block"]["slots"]]
    weights = []
    for s, y in reversed(used):
        weights.append(s @ q / (s @ y))
        q -= weights[-1] * y
    q *= gamma
    for (s, y), weight in zip(used, reversed(weights), strict=True):
        q += (weight - y @ q / (s @ y)) * s
    return torch.from_numpy(q)


BY_HAND = {
    "plain": {"momentum": 0.0},
    "momentum": {"momentum": 0.8},
    "nesterov": {"momentum": 0.8, "nesterov": True},
    "weight decay": {"momentum": 0.0, "weight_decay": 0.3},
    "decay and momentum": {"momentum": 0.8, "weight_decay": 0.3},
    "unit": {"momentum": 0.0, "normalize": "unit"},
    "gradient": {"momentum": 0.7, "normalize": "gradient"},
    "scale": {"momentum": 0.0, "initial_scale": 0.6},
    "maximize": {"momentum": 0.8, "weight_decay": 0.3, "maximize": True},
}


@pytest.mark.parametrize("case", BY_HAND)
def test_a_step_is_what_the_formula_says(case):
    """θ ← (1 − ηλ)θ − ηv, v ← m v + d, d = H g, of its own norm, 1 or ‖g‖; H from the pairs by two loops."""
    options = {**FAST, "blocks": "model", **BY_HAND[case]}
    model = network()
    optimizer = MLBFGS(model, **options)
    theta, v = flat(model), torch.zeros(flat(model).shape, dtype=F64)
    for number in range(11):
        run(model, optimizer, first=number)
        g = gradient(model) * (-1 if options.get("maximize") else 1)
        d = direction(optimizer, g, options.get("initial_scale", 1.0))
        if "normalize" in options:
            d = d / d.norm() * (g.norm() if options["normalize"] == "gradient" else 1)
        v = options["momentum"] * v + d
        move = d + options["momentum"] * v if options.get("nesterov") else v
        theta = (1 - options["lr"] * options.get("weight_decay", 0.0)) * theta - options["lr"] * move
        np.testing.assert_allclose(flat(model), theta, rtol=1e-11, atol=1e-13)
    assert optimizer.inverse_hessians()[0]["n_pairs"] == 3


def test_weight_decay_is_that_of_adamw():
    """With a zero gradient AdamW is decay alone, θ ← (1 − ηλ)θ: the same to the bit."""
    mine, adams = network(), network()
    optimizers = MLBFGS(mine, lr=0.1, weight_decay=0.2, update_every=2), torch.optim.AdamW(adams.parameters(), 0.1)
    optimizers[1].param_groups[0]["weight_decay"] = 0.2
    for _ in range(5):
        for model, optimizer in zip((mine, adams), optimizers, strict=True):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
    assert torch.equal(flat(mine), flat(adams))


def test_without_pairs_it_is_sgd_with_momentum():
    mine, sgds = network(), network()
    sgd = torch.optim.SGD(sgds.parameters(), lr=0.1, momentum=0.9)
    for one, other in zip(
        run(mine, MLBFGS(mine, lr=0.1, momentum=0.9, update_every=20), n=20), run(sgds, sgd, n=20), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-13, atol=1e-15)


def test_to_maximize_is_to_minimize_the_negative_to_the_bit():
    up, down = network(), network()
    climbing, falling = MLBFGS(up, **FAST, maximize=True), MLBFGS(down, **FAST)
    for number in range(9):
        backward(up, number)
        climbing.step()
        down.zero_grad()
        (-loss_of(down, number)).backward()
        falling.step()
        assert torch.equal(flat(up), flat(down))


OPTIONS = {
    "lr": {"lr": 0.01},
    "beta": {"beta": 0.0},
    "momentum": {"momentum": 0.5},
    "nesterov": {"nesterov": True},
    "update_every": {"update_every": 3},
    "history_size": {"history_size": 1},
    "history_growth": {"history_growth": 3},
    "blocks": {"blocks": "tensor"},
    "no damping": {"damping": None},
    "powell": {"damping": "powell"},
    "bounds of powell": {"damping": "powell", "curvature_window": (2.0, 3.0)},
    "curvature_window": {"curvature_window": (0.9, 1.1)},
    "tau": {"tau": 0.3},
    "relative_window": {"relative_window": True},
    "initial_inverse": {"initial_inverse": "pair"},
    "initial_scale": {"initial_scale": 0.5},
    "eigenvalue_bounds": {"eigenvalue_bounds": (0.99, 1.01)},
    "unit": {"normalize": "unit"},
    "gradient": {"normalize": "gradient"},
    "weight_decay": {"weight_decay": 0.1},
    "maximize": {"maximize": True},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_a_group_is_its_own_and_matters(option):
    """Two groups step as two optimizers do; a group steps otherwise than with the defaults."""
    together, apart = network(), network()
    own = OPTIONS[option]
    both = MLBFGS([{"params": [*together[0].parameters()], **own}, {"params": together[2].parameters()}], **FAST)
    first, second = MLBFGS(apart[0].parameters(), **{**FAST, **own}), MLBFGS(apart[2].parameters(), **FAST)
    path = run(together, both, n=7)
    assert same(path, run(apart, first, second, n=7))
    assert not torch.equal(path[-1][:16], plain_run(7)[-1][:16])  # the first layer


def test_pairs_of_the_overlap_may_be_one_group_s_choice():
    model, plain = network(), network()
    groups = [{"params": [*model[0].parameters()], "pairs": "overlap", "beta": None}, {"params": model[2].parameters()}]
    optimizer, other = MLBFGS(groups, **FAST), MLBFGS(plain.parameters(), **FAST)
    for number in range(6):
        optimizer.step(lambda number=number: backward(model, number), lambda number=number: backward(model, number))
        other.step(lambda number=number: backward(plain, number))
    assert [group["beta"] for group in optimizer.param_groups] == [None, 0.5]
    assert [h["n_pairs"] for h in optimizer.inverse_hessians()] == [3, 2]  # the first of the overlap is at once
    assert not torch.equal(flat(model), flat(plain))


@pytest.mark.parametrize(("before", "frozen"), [(0, 0), (1, 0), (7, 0), (2, 1)])
def test_a_group_that_is_added_leaves_the_history_of_the_others(before, frozen):
    """Also a history that begins in a step between pairs, after `frozen` steps."""
    together, apart = network(), network()
    both, first = MLBFGS(together[0].parameters(), **FAST), MLBFGS(apart[0].parameters(), **FAST)
    for number in range(before):
        for model in (together, apart):
            model[0].requires_grad_(requires_grad=number >= frozen)
        assert same(run(together, both, first=number), run(apart, first, first=number))
    both.add_param_group({"params": together[2].parameters(), "lr": 0.01})
    second = MLBFGS(apart[2].parameters(), **{**FAST, "lr": 0.01})
    assert same(run(together, both, n=7, first=before), run(apart, first, second, n=7, first=before))


def test_a_bad_group_leaves_the_optimizer_as_it_was():
    model, twin = network(), network()
    optimizer, other = MLBFGS(model[0].parameters(), **FAST), MLBFGS(twin[0].parameters(), **FAST)
    run(model, optimizer, n=3)
    for bad in ({"lr": -1.0}, {"params": [torch.nn.Parameter(torch.zeros(2, dtype=torch.half))]}):
        with pytest.raises(ValueError, match=r"^(lr|params): "):
            optimizer.add_param_group({"params": model[2].parameters(), **bad})
    assert len(optimizer.param_groups) == 1
    assert same(run(model, optimizer, n=3, first=3), run(twin, other, n=6)[3:])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("blocks", "tensor", r"^blocks: got 'tensor'; 'module' is expected"),
        ("history_size", 5, r"^history_size: got 5; 3 is expected"),
        ("params", [], r"^params: got other tensors \(0\) than at the first step \(4\)"),
    ],
)
def test_a_change_of_a_group_that_would_be_ignored_is_refused(name, value, message):
    model = network()
    optimizer = MLBFGS(model, **FAST)
    run(model, optimizer)
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=message):
        run(model, optimizer)


def test_step_hooks_see_the_step_and_may_replace_its_arguments():
    model, calls = network(), []
    optimizer = MLBFGS(model, **FAST)
    before = flat(model)

    def replaced(_, args, kwargs):
        assert (args, kwargs) == ((optimizer,), {"closure": 1})
        calls.append(("before", torch.equal(before, flat(model))))
        return args, {"closure": lambda: backward(model, 0)}

    optimizer.register_step_pre_hook(replaced)
    optimizer.register_step_post_hook(lambda *_: calls.append(("after", torch.equal(before, flat(model)))))
    assert optimizer.step(closure=1) == loss_of(network(), 0)
    assert calls == [("before", True), ("after", False)]


def test_a_closure_is_called_once_with_gradients_enabled_and_its_loss_returned():
    model, losses = network(), []
    optimizer = MLBFGS(model, **FAST)

    def closure():
        assert torch.is_grad_enabled()
        losses.append(backward(model, len(losses)))
        return losses[-1]

    for number in range(5):
        with torch.no_grad():
            assert optimizer.step(closure) is losses[number]
    assert len(losses) == 5
    assert losses[0].requires_grad
    assert torch.equal(plain_run(5)[-1], flat(model))


SCHEDULERS = {
    "StepLR": lambda o: schedulers.StepLR(o, 3, gamma=0.5),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 8),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.2, total_steps=12, base_momentum=0.5, max_momentum=0.9),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=4), schedulers.ExponentialLR(o, 0.8)], milestones=[4]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_sets_the_rate_and_the_momentum_of_each_step(name):
    """The same scheduler on SGD says what lr and momentum are to be; set by hand they give the same steps."""
    model, twin, other = network(), network(), network()
    optimizer, by_hand = MLBFGS(model, **FAST), MLBFGS(twin, **FAST)
    sgd = torch.optim.SGD(other.parameters(), lr=FAST["lr"], momentum=0.9)
    mine, oracle = SCHEDULERS[name](optimizer), SCHEDULERS[name](sgd)
    rates, metric = set(), ([1.0],) if name == "ReduceLROnPlateau" else ()
    for number in range(10):
        for key in ("lr", "momentum"):
            by_hand.param_groups[0][key] = sgd.param_groups[0][key]
        rates.add(sgd.param_groups[0]["lr"])
        sgd.step()
        assert same(run(model, optimizer, first=number), run(twin, by_hand, first=number))
        mine.step(*(m[0] for m in metric))
        oracle.step(*(m[0] for m in metric))
    assert len(rates) > 3


def test_a_scaler_skips_a_step_with_an_infinite_gradient_and_nothing_else():
    """A scale is a power of two: scaled and unscaled gradients are the same to the bit."""
    model, twin = network(dtype=torch.float32), network(dtype=torch.float32)
    optimizer, plain = MLBFGS(model, **FAST), MLBFGS(twin, **FAST)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for number in range(9):
        for overflow in (True, False) if number == 5 else (False,):
            before, history = flat(model), copy.deepcopy(optimizer.state_dict())
            optimizer.zero_grad()
            scaler.scale(loss_of(model, number)).backward()
            if overflow:
                model[2].bias.grad[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            if overflow:
                assert torch.equal(before, flat(model))
                assert equal(optimizer.state_dict(), history)
        run(twin, plain, first=number)
        assert torch.equal(flat(model), flat(twin))
    assert scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("options", [{}, {"normalize": "unit"}, {"damping": None, "lr": 1e-3, "history_size": 8}])
def test_autocast_is_for_the_model_and_not_for_the_step(options):
    """Products with the pairs in bfloat16 would spoil the direction, also where a closure is called under autocast."""
    outside, inside = network(dtype=torch.float32), network(dtype=torch.float32)
    one, other = MLBFGS(outside, **{**FAST, **options}), MLBFGS(inside, **{**FAST, **options})

    def closure(model, number):
        assert torch.is_autocast_enabled("cpu")
        assert model(batch(0, torch.float32)[0]).dtype == torch.bfloat16
        return backward(model, number)

    for number in range(9):
        with torch.autocast("cpu", torch.bfloat16):
            closure(outside, number)
        one.step()
        with torch.autocast("cpu", torch.bfloat16):
            other.step(lambda number=number: closure(inside, number))
        assert torch.equal(flat(outside), flat(inside))


def test_accumulated_and_clipped_gradients_are_what_is_used_and_stay_as_they_are():
    model, twin = network(), network()
    for m, accumulate in ((model, True), (twin, False)):
        optimizer = MLBFGS(m, **FAST, maximize=True, normalize="gradient")
        for number in range(7):
            x, y = batch(number)
            optimizer.zero_grad()
            for rows in (slice(0, 4), slice(4, 12)) if accumulate else (slice(None),):
                ((m(x[rows]) - y[rows]).square().sum() / y.numel()).backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            kept = [(p.grad, p.grad.clone()) for p in m.parameters()]
            optimizer.step()
            assert all(p.grad is g and torch.equal(g, was) for p, (g, was) in zip(m.parameters(), kept, strict=True))
            assert gradient(m).norm() == pytest.approx(0.1, rel=1e-4)
    np.testing.assert_allclose(flat(model), flat(twin), rtol=1e-10)


def test_a_frozen_layer_stays_and_the_others_go_on():
    model, twin = network(), network()
    optimizer, rest = MLBFGS(model.parameters(), **FAST), MLBFGS(twin[2].parameters(), **FAST)
    whole = MLBFGS(twin[0].parameters(), **FAST)
    run(model, optimizer, n=4)
    run(twin, whole, rest, n=4)
    for layer in (model[0], twin[0]):
        layer.requires_grad_(requires_grad=False)
    frozen = flat(model[0])
    assert same(run(model, optimizer, n=4, first=4), run(twin, rest, n=4, first=4))
    assert torch.equal(flat(model[0]), frozen)  # momentum does not move it either
    model[0].requires_grad_(requires_grad=True)
    run(model, optimizer, n=4, first=8)
    assert not torch.equal(flat(model[0]), frozen)


def test_a_bias_that_is_frozen_at_first_begins_to_move_later():
    model = network()
    optimizer = MLBFGS(model.parameters(), **FAST)
    bias = model[0].bias.requires_grad_(requires_grad=False)
    start = bias.clone()
    run(model, optimizer, n=6)
    assert torch.equal(bias, start)
    bias.requires_grad_(requires_grad=True)
    path = run(model, optimizer, n=6, first=6)
    assert not torch.equal(bias, start)
    assert torch.isfinite(path[-1]).all()


def test_a_tensor_without_a_gradient_is_passed_over_and_with_zeros_momentum_moves_it():
    for set_to_none in (True, False):
        model = network()
        optimizer = MLBFGS(model, **FAST)
        run(model, optimizer, n=5)
        before = flat(model)
        optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.step()
        assert torch.equal(before, flat(model)) == set_to_none


def test_zero_grad_of_both_kinds_trains_alike():
    ends = []
    for set_to_none in (True, False):
        model = network()
        optimizer = MLBFGS(model, **FAST)
        for number in range(8):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model, number).backward()
            optimizer.step()
        ends.append(flat(model))
    assert torch.equal(ends[0], plain_run(8)[-1])
    assert torch.equal(ends[1], plain_run(8)[-1])


def test_tensors_of_any_strides_train_as_contiguous_ones():
    torch.manual_seed(0)
    images = torch.randn(2, 3, 4, 5, dtype=F64).to(memory_format=torch.channels_last)
    tensors = [images, torch.randn(4, 3, dtype=F64).t(), torch.randn(6, 2, dtype=F64)[::2]]
    mine = [torch.nn.Parameter(t.detach()) for t in tensors]
    plain = [torch.nn.Parameter(t.detach().clone(memory_format=torch.contiguous_format)) for t in tensors]
    optimizers = [MLBFGS(parameters, **FAST) for parameters in (mine, plain)]
    for _ in range(9):
        for parameters, optimizer in zip((mine, plain), optimizers, strict=True):
            optimizer.zero_grad()
            sum(torch.cosh(p).sum() + p.mean() ** 2 for p in parameters).backward()
            optimizer.step()
    assert not mine[1].is_contiguous()
    for one, other, tensor in zip(mine, plain, tensors, strict=True):
        assert one.stride() == tensor.stride()
        np.testing.assert_allclose(one.detach(), other.detach(), rtol=1e-12)


def test_tensors_without_axes_and_without_entries_are_trained_with_the_rest():
    gain, empty = torch.nn.Parameter(torch.tensor(3.0)), torch.nn.Parameter(torch.zeros(0, 3))
    for blocks in ("module", "tensor", "model"):
        optimizer = MLBFGS([("m.gain", gain), ("m.empty", empty)], lr=0.1, momentum=0.0, update_every=2, blocks=blocks)
        for _ in range(80):
            optimizer.zero_grad()
            ((gain - 1) ** 2 + empty.sum()).backward()
            optimizer.step()
        assert float(gain.detach()) == pytest.approx(1.0, abs=0.1)
        with torch.no_grad():
            gain.fill_(3.0)


def test_tied_weights_are_one_tensor():
    layers = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5)})
    layers["head"].weight = layers["embedding"].weight
    assert [h["n_params"] for h in MLBFGS(layers).inverse_hessians()] == [15, 5]
    weight = layers["embedding"].weight
    before = weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    MLBFGS(layers, lr=0.5).step()
    assert torch.equal(weight, before - 0.5)


def test_single_and_double_precision_in_one_optimizer():
    single = network(dtype=torch.float32)
    pair = torch.nn.ModuleList([network(), copy.deepcopy(single)])
    optimizer = MLBFGS(pair, **FAST)
    for number in range(9):
        for half in pair:
            backward(half, number)
        optimizer.step()
    assert torch.equal(flat(pair[0]), plain_run(9)[-1])
    assert torch.equal(flat(pair[1]), run(single, MLBFGS(single, **FAST), n=9)[-1])


@pytest.mark.parametrize("given", ["named_parameters", "parameters", "list"])
def test_the_ways_to_give_parameters_train_alike(given):
    model = network()
    parameters = [*model.parameters()] if given == "list" else getattr(model, given)()
    assert same(run(model, MLBFGS(parameters, **FAST), n=9), plain_run(9))  # which is given the module


def test_lazy_layers_may_be_called_after_the_optimizer_is_made():
    """As with torch's own: parameters are given before they have shapes, and get them before the first step."""
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Tanh(), torch.nn.LazyLinear(2)).to(F64)
    optimizer = MLBFGS(lazy.parameters(), **FAST)
    lazy(batch(0)[0])
    ready = copy.deepcopy(lazy)
    assert same(run(lazy, optimizer, n=5), run(ready, MLBFGS(ready, **FAST), n=5))


def test_sparse_gradients_are_refused_before_anything_moves():
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 2))
    model[0].sparse = True
    optimizer = MLBFGS([*model[1].named_parameters("1"), *model[0].named_parameters("0")])
    model(torch.tensor([0, 2])).sum().backward()
    before = flat(model)
    with pytest.raises(ValueError, match=r"^step: the gradient of 0.weight is sparse; a dense one is expected"):
        optimizer.step()
    assert torch.equal(before, flat(model))
    assert optimizer.param_groups[0]["n_steps"] == 0
    assert optimizer.state_dict()["state"] == {}


def test_a_loss_that_is_not_a_number_spoils_no_pair():
    """The parameters become NaN, as with every optimizer; set back, the run goes on with the pairs it had."""
    model = network()
    optimizer = MLBFGS(model, **{**FAST, "momentum": 0.0})
    run(model, optimizer, n=6)
    kept = copy.deepcopy(model.state_dict())
    backward(model, 6)
    with torch.no_grad():
        for p in model.parameters():
            p.grad.mul_(math.nan)
    optimizer.step()  # a pair is due in this step
    assert torch.isnan(flat(model)).all()
    model.load_state_dict(kept)
    assert [h["n_pairs"] for h in optimizer.inverse_hessians()] == [2, 2]
    path = run(model, optimizer, n=10, first=7)
    assert torch.isfinite(torch.stack(path)).all()
    assert [h["n_pairs"] for h in optimizer.inverse_hessians()] == [3, 3]


@pytest.mark.parametrize("safe", [curvature_pairs.SAFE, 0.0], ids=["compact", "two loops"])
@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"normalize": "gradient", "weight_decay": 0.1}])
def test_a_step_reads_nothing_from_the_device_unless_a_pair_is_due(options, safe, monkeypatch):
    """Tensors on the device "meta" have no values: whatever reads one raises."""
    monkeypatch.setattr(curvature_pairs, "SAFE", safe)
    model = network(dtype=torch.float32)
    optimizer = MLBFGS(model, **{**FAST, **options})
    run(model, optimizer, n=9)
    ghost = copy.deepcopy(model).to("meta")
    reading = MLBFGS(ghost, **{**FAST, **options})
    reading.load_state_dict(optimizer.state_dict())
    for p in ghost.parameters():
        p.grad = torch.empty_like(p)
    reading.step()
    assert [h["n_pairs"] for h in reading.inverse_hessians()] == [3, 3]
    with pytest.raises(NotImplementedError, match="meta"):
        reading.step()


def test_a_compiled_model_trains_as_it_does_without():
    model = network()
    compiled = torch.compile(model, backend="eager")
    optimizer = MLBFGS(compiled, **FAST)
    run(compiled, optimizer, n=7)
    np.testing.assert_allclose(flat(model), plain_run(7)[-1], rtol=1e-12)
    assert [(h["name"], h["n_params"]) for h in optimizer.inverse_hessians()] == [
        ("_orig_mod.0", 16),
        ("_orig_mod.2", 10),
    ]


def test_a_running_mean_of_the_model_is_that_of_its_steps():
    model = network()
    mean = torch.optim.swa_utils.AveragedModel(model)
    optimizer, path = MLBFGS(model, **FAST), []
    for number in range(6):
        path += run(model, optimizer, first=number)
        mean.update_parameters(model)
    np.testing.assert_allclose(flat(mean.module), torch.stack(path).mean(0), rtol=1e-12)


def test_repr_shows_the_options():
    shown = repr(MLBFGS(network(), lr=0.25, damping="powell"))
    assert shown.startswith("MLBFGS (\nParameter Group 0\n")
    assert all(line in shown for line in ("    lr: 0.25\n", "    damping: powell\n", "    history_size: 10\n"))
