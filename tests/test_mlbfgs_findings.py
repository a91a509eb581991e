"""What a hostile review of MLBFGS found, one test each, which failed before."""

import copy

import numpy as np
import pytest
import torch

from lmfit_gpu import MLBFGS
from lmfit_gpu.optim.curvature_pairs import CurvaturePairs

HESSIAN = torch.tensor(
    [[3.0, 0.4, 0.1, 0.0], [0.4, 2.0, 0.0, 0.2], [0.1, 0.0, 1.0, 0.3], [0.0, 0.2, 0.3, 0.5]]
).double()
EXACT = {"beta": 0.8, "update_every": 5, "damping": None, "momentum": 0.0, "lr": 0.1}  # pairs as they are


def halves():
    return [torch.nn.Parameter(torch.tensor(values, dtype=torch.float64)) for values in ([1.0, -1.0], [2.0, 0.5])]


def descend(optimizer, tensors, n_steps, *, without=()):
    """Take steps on ½ θᵀ A θ − Σθ; tensors in `without` get no gradient."""
    for _ in range(n_steps):
        gradient = HESSIAN @ torch.cat([t.detach() for t in tensors]) - 1
        for index, (tensor, part) in enumerate(zip(tensors, gradient.split(2), strict=True)):
            tensor.grad = None if index in without else part.clone()
        optimizer.step()


def secant_misses(optimizer, tensors):
    """Return how far each pair in memory is from ŷ = A s."""
    (first, second) = (optimizer.state[tensor]["pairs"] for tensor in tensors)
    slots = optimizer.state[tensors[0]]["block"]["slots"]
    s, y = torch.cat((first, second), dim=2)[slots].unbind(1)
    return [float((b - HESSIAN @ a).norm() / b.norm()) for a, b in zip(s, y, strict=True)]


@pytest.mark.parametrize("moment", ["products", "append"])
def test_an_interrupt_at_a_pair_leaves_no_wrong_pair(monkeypatch, moment):
    """Where the host waits for the device, Ctrl-C lands; lack of memory is an error in the same place."""
    tensors = halves()
    optimizer = MLBFGS(tensors, **EXACT)
    descend(optimizer, tensors, 11)
    assert optimizer.inverse_hessians()[0]["n_pairs"] == 2

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    descend(optimizer, tensors, 4)
    with monkeypatch.context() as patch:
        if moment == "products":
            patch.setattr(CurvaturePairs, "products", interrupted)
        else:
            patch.setattr(torch, "mul", interrupted)  # the first rows of the new pair are written with it
        with pytest.raises(KeyboardInterrupt):
            descend(optimizer, tensors, 1)
    values = torch.linalg.eigvalsh(HESSIAN)
    for _ in range(16):
        descend(optimizer, tensors, 1)
        curvature = optimizer.inverse_hessians()[0]["curvature"]
        assert values[0] - 1e-9 <= curvature <= values[-1] + 1e-9  # as ⟨s, A s⟩/⟨s, s⟩ is
    optimizer.state_dict()
    assert max(secant_misses(optimizer, tensors)) < 1e-9


@pytest.mark.parametrize("late", [0, 1])
def test_a_tensor_whose_first_gradient_comes_late_spoils_no_pair(late):
    tensors = halves()
    optimizer = MLBFGS(tensors, **EXACT)
    descend(optimizer, tensors, 3, without=(late,))
    descend(optimizer, tensors, 30)
    optimizer.state_dict()
    misses = secant_misses(optimizer, tensors)
    assert len(misses) == 5
    assert max(misses) < 1e-9


@pytest.mark.parametrize("growth", [None, 3])
def test_bounds_hold_after_pairs_have_left_the_memory(rng, growth):
    """Dropping the oldest pair changes H of the rest."""
    tensor = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    options = {"beta": 0.0, "momentum": 0.0, "update_every": 1, "history_size": 10, "history_growth": growth}
    optimizer = MLBFGS([tensor], **options)
    for _ in range(600):
        tensor.data = torch.tensor(rng.normal(size=5) * 10.0 ** rng.integers(-3, 1))
        tensor.grad = torch.tensor(rng.normal(size=5))
        optimizer.step()
        smallest, largest = optimizer.inverse_hessians()[0]["eigenvalues"]
        assert 0.05 * (1 - 1e-6) <= smallest <= largest <= 20 * (1 + 1e-6)


def test_plain_lbfgs_keeps_its_pairs_where_it_leaves_one_out():
    tensor = torch.nn.Parameter(torch.tensor([1.0, 1.0], dtype=torch.float64))
    optimizer = MLBFGS([tensor], lr=0.1, beta=0.0, momentum=0.0, update_every=1, damping=None)
    for gradient in ([1.0, 1.0], [0.8, 0.9], [2.0, 2.0], [5.0, 5.0]):  # the last two: negative curvature
        tensor.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    assert optimizer.inverse_hessians()[0]["n_pairs"] == 1


@pytest.mark.parametrize("options", [{"initial_scale": 0.01}, {"initial_scale": 50.0, "lr": 1e-3}])
def test_a_small_or_large_initial_scale_lets_pairs_in(options):
    tensors = halves()
    optimizer = MLBFGS(tensors, **{"lr": 0.05, "update_every": 2, **options})
    descend(optimizer, tensors, 12)
    assert optimizer.inverse_hessians()[0]["n_pairs"] > 0


def test_a_state_dict_that_is_kept_goes_on_with_the_run_as_a_whole():
    """As with torch's optimizers its tensors are those of the run; so are the numbers that belong to them."""
    tensors = halves()
    optimizer = MLBFGS(tensors, **EXACT)
    descend(optimizer, tensors, 12)
    state = optimizer.state_dict()
    descend(optimizer, tensors, 20)
    now = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    assert optimizer.state_dict()["state"][0]["block"] == now["state"][0]["block"]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_eigenvalues_are_those_of_h_for_blocks_of_few_parameters(rng, n):
    """γ is none of them where the pairs span everything."""
    tensor = torch.nn.Parameter(torch.tensor(rng.normal(size=n)))
    optimizer = MLBFGS([tensor], lr=0.05, beta=0.0, momentum=0.0, update_every=1)
    for _ in range(8):
        tensor.grad = torch.arange(1.0, n + 1).double() * tensor.detach() + 0.1 * torch.tensor(rng.normal(size=n))
        optimizer.step()
    (block,) = optimizer._built[0]
    dense = torch.stack([block.pairs.two_loop_(e.clone()) for e in torch.eye(n, dtype=torch.float64)])
    values = np.linalg.eigvalsh(dense.numpy())
    assert optimizer.inverse_hessians()[0]["eigenvalues"] == pytest.approx((values[0], values[-1]), rel=1e-9)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("damping", "foo", "damping: got 'foo'"),
        ("update_every", 0, "update_every: got 0"),
        ("damping", "powell", "initial_inverse: got .fixed."),
    ],
)
def test_an_option_changed_by_hand_is_checked(name, value, said):
    tensors = halves()
    optimizer = MLBFGS(tensors)
    descend(optimizer, tensors, 2)
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=said):
        descend(optimizer, tensors, 1)


def test_whole_states_are_copies():
    tensors = halves()
    optimizer = MLBFGS(tensors, **EXACT)
    descend(optimizer, tensors, 12)
    kept = optimizer.full_state_dict()["state"][0]["pairs"].clone()
    whole = optimizer.full_state_dict()
    descend(optimizer, tensors, 10)
    assert torch.equal(whole["state"][0]["pairs"], kept)


@pytest.mark.parametrize("length", [1e-44, 1e-30])
def test_steps_too_short_for_single_precision_make_no_pair(length):
    """They raised, or made H infinite."""
    tensor = torch.nn.Parameter(torch.zeros(5))
    optimizer = MLBFGS([tensor], lr=0.1, beta=0.0, momentum=0.0, update_every=1)
    for step in range(6):
        tensor.data.fill_(length * step)
        tensor.grad = torch.full((5,), float(step))
        optimizer.step()
    assert np.isfinite(optimizer.inverse_hessians()[0]["eigenvalues"]).all()
    assert tensor.isfinite().all()


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_a_relative_window_lets_pairs_in_where_curvatures_are_far_from_one(rng, scale):
    tensor = torch.nn.Parameter(torch.tensor(rng.normal(size=20)))
    optimizer = MLBFGS([tensor], lr=0.05 / scale, momentum=0.0, update_every=5, relative_window=True)
    for _ in range(60):
        tensor.grad = scale * torch.linspace(0.3, 3.0, 20).double() * tensor.detach()
        optimizer.step()
    (block,) = optimizer.inverse_hessians()
    assert block["n_pairs"] > 0
    assert 0.3 * scale <= block["scale"] <= 3.0 * scale


def test_frozen_tensors_take_no_memory_and_may_be_trained_later():
    backbone, head = torch.nn.Linear(30, 30), torch.nn.Linear(30, 1)
    backbone.requires_grad_(False)
    model = torch.nn.Sequential(backbone, head)
    optimizer = MLBFGS(model.parameters(), blocks="model", update_every=2)
    x = torch.linspace(-1, 1, 60).reshape(2, 30)

    def train(n_steps):
        for _ in range(n_steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    train(6)
    assert set(optimizer.state) == set(head.parameters())
    backbone.requires_grad_(True)
    train(6)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})  # lays the blocks out anew
    train(2)
    assert [block["n_pairs"] for block in optimizer.inverse_hessians()] == [3, 5, 0]
    copy.deepcopy(optimizer).step()
