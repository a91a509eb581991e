"""Training loops in which the module, or the kind of batch, changes between two steps."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from lmfit_gpu import LMA
from lmfit_gpu.damping import MarquardtDamping

X = torch.linspace(-1, 1, 60, dtype=torch.float64)[:, None]
Y = torch.sin(3 * X)
FIXED = MarquardtDamping(start_damping=0.3, scaling="identity")


def small(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 6), *between, nn.Tanh(), nn.Linear(6, 1)).double()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_layer_frozen_after_the_start_keeps_its_values():
    model = small()
    lma = LMA(model)
    lma.step(X, Y)
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    with contextlib.suppress(ValueError):  # a refusal is right too
        lma.step(X, Y)
    assert torch.equal(model[0].weight, before)


def test_first_batch_of_one_row_does_not_hide_that_rows_are_coupled():
    def centred(outputs, targets):
        return (outputs - outputs.mean(0)) - (targets - targets.mean(0))

    model = small()
    lma = LMA(model, None, centred, damping=FIXED)
    lma.step(X[:1], Y[:1])
    fresh = LMA(copy.deepcopy(model), None, centred, damping=FIXED)
    lma._memory = fresh._memory
    lma.step(X, Y)
    fresh.step(X, Y)
    torch.testing.assert_close(flat(model), flat(fresh.model), rtol=1e-10, atol=1e-12)


def test_statistics_of_batchnorm_follow_when_the_residual_function_calls_the_network():
    model = small(nn.BatchNorm1d(6))
    inputs = model[0](X + 5).mean(0).detach()
    LMA(model, None, lambda network, x, y: network(x) - y).step(X + 5, Y)
    torch.testing.assert_close(model[1].running_mean, inputs)  # the first batch's


@pytest.mark.parametrize(
    ("x", "y"),
    [(torch.full_like(X, torch.nan), Y), (X + 5, Y[:10])],
    ids=["nan", "rows"],
)
def test_a_refused_step_leaves_the_statistics(x, y):
    model = small(nn.BatchNorm1d(6))
    lma = LMA(model)
    lma.step(X, Y)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError):
        lma.step(x, y)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_targets_of_another_shape_are_refused():
    model = nn.Sequential(nn.Linear(1, 6), nn.Unflatten(1, (2, 3))).double()
    with pytest.raises(ValueError, match="y: "):
        LMA(model).step(X, torch.zeros(60, 3, 2, dtype=torch.float64))


class LongAndShort(nn.Module):
    """Long sequences use a weight besides its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x):
        h = self.first(x)
        if x.shape[1] > 4:
            h = h + nn.functional.linear(x, self.first.weight**2)
        return self.last(torch.tanh(h)).mean(1)


@pytest.mark.parametrize("solver", ["qr", "ghost"])
def test_each_kind_of_batch_has_its_own_route(solver):
    torch.manual_seed(0)
    model = LongAndShort().double()
    long, y = torch.randn(12, 6, 3, dtype=torch.float64), torch.randn(12, 1, dtype=torch.float64)
    start = copy.deepcopy(model.state_dict())
    steps = []
    for batches in ([long], [long, long[:, :3], long]):
        lma = LMA(model, solver=solver, damping=FIXED, noise_aware=False)
        fresh = lma._memory
        for x in batches:
            model.load_state_dict(start)
            lma._memory = fresh
            lma.step(x, y)
        steps.append(flat(model))
        model.load_state_dict(start)
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-10, atol=1e-12)


def test_ghost_proves_the_layers_of_every_group():
    def slope(network, x, y):
        x = x.requires_grad_()
        return torch.autograd.grad(network(x).sum(), x, create_graph=True)[0] - y

    found = []
    for solver in ("qr", "ghost"):
        model = small()
        lma = LMA(model, None, {"values": None, "slopes": slope}, solver=solver, damping=FIXED)
        try:
            lma.step({"values": X[:7], "slopes": X[:9]}, {"values": Y[:7], "slopes": Y[:9]})
        except ValueError:
            return  # a refusal is right too
        found.append(flat(model))
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-10)


def test_radius_grows_again_with_a_small_learning_rate():
    model = small()
    lma = LMA(model, learning_rate=0.1, noise_aware=False)
    lma.step(X, Y)
    state = lma._memory.policy
    object.__setattr__(lma._memory, "policy", type(state)(1e-4 * state.radius))
    radii = []
    for _ in range(5):
        lma.step(X, Y)
        radii.append(lma._memory.policy.radius)
    assert radii[-1] > 2e-4 * state.radius
