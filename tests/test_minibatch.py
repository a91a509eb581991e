"""Mini-batches: steps judged by other rows, D that forgets, batches that grow; the module cases T1 to T5 for LMA."""

import copy

import numpy as np
import pytest
import torch
from cases_interface import T2, T2_HIDDEN, T3_EXPECTED, T3_X, T3_Y, T5_EXPECTED, T5_X, T5_Y, dropout_net
from torch import nn

from lmfit_gpu import LMA, AdaptiveBatchSampler

F64 = torch.float64


def noisy(rows=400, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 1, generator=generator, dtype=F64) * 2 - 1
    return x, torch.sin(3 * x) + 0.5 * torch.randn(rows, 1, generator=generator, dtype=F64)


def network(width=10, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).double()


def mean_square(model, x, y):
    with torch.no_grad():
        return float(((model(x) - y) ** 2).mean())


def trained(model, steps=25, rows=8, **options):
    """Return the mean square on all rows after steps on few rows each: 31 parameters, noise of 0.25."""
    x, y = noisy()
    lma, generator = LMA(model, **options), torch.Generator().manual_seed(1)
    for _ in range(steps):
        some = torch.randint(0, len(x), (rows,), generator=generator)
        lma.step(x[some], y[some])
    return mean_square(model, x, y), lma


def test_other_rows_keep_steps_from_fitting_noise():
    """Each batch can be fitted exactly, noise included; judged by its own rows every such step is a success."""
    aware = np.mean([trained(network(seed=seed))[0] for seed in range(4)])
    plain = np.mean([trained(network(seed=seed), noise_aware=False)[0] for seed in range(4)])
    assert aware < 0.9 * plain  # 0.25 is the noise


def test_an_undone_step_is_undone():
    """The step fits rows that contradict the next ones: the parameters go back, and the next step starts from there."""
    model = network()
    x, y = noisy(40)
    lma = LMA(model)
    before = copy.deepcopy(model)
    lma.step(x, 5 + y)
    assert mean_square(model, x, 5 + y) < mean_square(before, x, 5 + y)
    reference = copy.deepcopy(before)
    loss, _ = lma.step(x, -5 + y)
    assert lma.noise < 0.5  # no doubt about it
    assert loss < mean_square(reference, x, -5 + y)  # from the restored point downhill; not from the one at +5
    assert loss < mean_square(before, x, -5 + y)


def test_noise_is_known_after_the_second_batch():
    x, y = noisy()
    lma = LMA(network())
    lma.step(x[:50], y[:50])
    assert np.isnan(lma.noise)
    lma.step(x[50:100], y[50:100])
    assert lma.noise > 0


@pytest.mark.parametrize(("decay", "remembers"), [(0.5, False), (1.0, True)])
def test_d_forgets_by_the_decay(decay, remembers):
    """A batch with inputs 100 times as large makes D large; after 20 ordinary batches only decay = 1 remembers it."""
    x, y = noisy()
    lma = LMA(nn.Linear(1, 1).double(), decay=decay, noise_aware=False)
    lma.step(100 * x[:30], y[:30])
    large = lma.state_dict()["memory"]["scale"]["d"].max()
    for k in range(20):
        lma.step(x[10 * k : 10 * k + 10], y[10 * k : 10 * k + 10])
    now = lma.state_dict()["memory"]["scale"]["d"].max()
    assert bool(now > 0.99 * large) is remembers


@pytest.mark.parametrize("solver", ["qr", "ghost"])
def test_a_batch_that_is_repeated_within_itself_gives_the_same_step(solver):
    """Three copies of every row are the same mean: the same radius, D and λ in other units."""
    x, y = noisy(9)
    one, three = network(), network()
    first, second = LMA(one, solver=solver, alpha=1e-3), LMA(three, solver=solver, alpha=1e-3)
    for _ in range(3):
        a, _ = first.step(x, y)
        b, _ = second.step(x.repeat(3, 1), y.repeat(3, 1))
        assert a == pytest.approx(b, rel=1e-8)


def test_the_batch_grows_where_progress_drowns_in_noise():
    x, y = noisy(2000)
    model, sampler = network(4), AdaptiveBatchSampler(2000, 20, seed=0)
    lma = LMA(model)
    for _ in range(2):
        for rows in sampler:
            lma.step(x[rows], y[rows])
            sampler.update(lma.noise)
    assert sampler.batch_size > 20


class Line(nn.Module):
    """Case T1: 0.5 + s x with a frozen intercept, both of no dimension."""

    def __init__(self):
        super().__init__()
        self.intercept = nn.Parameter(torch.tensor(0.5, dtype=F64), requires_grad=False)
        self.slope = nn.Parameter(torch.tensor(0.0, dtype=F64))

    def forward(self, x):
        return self.intercept + self.slope * x


@pytest.mark.parametrize("solver", ["auto", "cholesky", "cg"])
def test_t1_a_frozen_parameter_of_no_dimension(solver):
    """The slope is that of least squares through (0, 0.5)."""
    x = torch.linspace(0, 5, 20, dtype=F64)
    y = 0.5 + 1.3 * x + 0.2 * torch.sin(7 * x)
    model = Line()
    lma = LMA(model, solver=solver)
    for _ in range(10):
        if lma.step(x, y)[1]:
            break
    assert float(model.slope.detach()) == pytest.approx(float((x * (y - 0.5)).sum() / (x * x).sum()), rel=1e-9)
    assert float(model.intercept.detach()) == 0.5


@pytest.mark.parametrize(("dtype", "goal"), [(F64, 1e-10), (torch.float32, 1e-6)], ids=["float64", "float32"])
def test_t2_more_parameters_than_points(dtype, goal):
    model = nn.Sequential(nn.Linear(1, T2_HIDDEN), nn.Tanh(), nn.Linear(T2_HIDDEN, 1)).to(dtype)
    torch.manual_seed(0)
    start = torch.as_tensor(T2.p0, dtype=dtype)
    with torch.no_grad():
        model[0].weight.copy_(start[:10, None]), model[0].bias.copy_(start[10:20])
        model[2].weight.copy_(start[None, 20:30]), model[2].bias.copy_(start[30:])
    x, y = torch.as_tensor(T2.x, dtype=dtype)[:, None], torch.as_tensor(T2.y, dtype=dtype)[:, None]
    lma, losses = LMA(model), []
    while len(losses) < 200 and (not losses or 8 * losses[-1] > goal):
        losses.append(lma.step(x, y)[0])
    assert 8 * losses[-1] <= goal
    assert np.all(np.diff(losses) <= 0)


@pytest.mark.parametrize("training", [True, False])
def test_t3_batch_norm_is_affine(training):
    """Fitted values are those of least squares, in evaluation mode too; the modes are put back."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)).double().train(training)
    x, y = torch.as_tensor(T3_X), torch.as_tensor(T3_Y)[:, None]
    lma = LMA(model)
    for _ in range(30):
        loss, terminated = lma.step(x, y)
        if terminated:
            break
    assert model.training is training
    model.eval()
    assert mean_square(model, x, y) == pytest.approx(loss, rel=1e-9)
    with torch.no_grad():
        np.testing.assert_allclose(model(x)[:, 0].numpy(), T3_EXPECTED.predict, rtol=1e-4, atol=1e-5)


def test_t3_dropout_is_one_function_within_a_step():
    """With masks that changed between J and trial a fifth of the trials would go uphill."""
    model, lma = dropout_net(), None
    lma = LMA(model)
    x, y = torch.as_tensor(T3_X), torch.as_tensor(T3_Y)[:, None]
    for _ in range(5):
        lma.step(x, y)
        assert lma.record.accepted
        assert lma.record.trial_cost <= lma.record.cost * (1 + 1e-12)
    assert model.training


def test_t5_counts_by_the_poisson_likelihood():
    """The result is the maximum of the likelihood; the deviance residuals are not needed."""
    model = nn.Linear(1, 1).double()
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    lma = LMA(model, residual_fn="poisson")
    x, y = torch.as_tensor(T5_X)[:, None], torch.as_tensor(T5_Y, dtype=F64)
    for _ in range(30):
        if lma.step(x, y)[1]:
            break
    found = [model.bias.item(), model.weight.item()]
    np.testing.assert_allclose(found, T5_EXPECTED.params, rtol=1e-6)
