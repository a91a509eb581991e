"""One test for each fault known of LM trainers for networks (LeMA, torch-levenberg-marquardt).

The oracle of a step is p = −(JᵀJ + λD²)⁻¹ Jᵀr by numpy, J from torch.func, with damping="lema", whose λ is known:
D² = diag(JᵀJ), or, where the solver keeps one D for each tensor (ghost), the mean of its entries.
"""

import copy
import io
import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lmfit_gpu import LMA
from lmfit_gpu.damping import MarquardtDamping

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def vector(network):
    return torch.nn.utils.parameters_to_vector(network.parameters()).detach().clone()


def mean_square(network, x, y):
    with torch.no_grad():
        return float((network(x) - y).square().mean())


def network_of(*widths, dtype=torch.float64):
    torch.manual_seed(1)
    layers = []
    for n_in, n_out in itertools.pairwise(widths):
        layers += [torch.nn.Linear(n_in, n_out), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1]).to(dtype)


def data_of(rows, features, outputs=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, features, generator=generator, dtype=torch.float64)
    y = torch.sin(x @ torch.randn(features, outputs, generator=generator, dtype=torch.float64))
    return x.to(dtype), y.to(dtype)


def jacobian(network, x, y):
    """Return J (m, n) and r (m,) in float64, row outer and output inner."""
    names = [name for name, _ in network.named_parameters()]
    sizes = [p.numel() for p in network.parameters()]
    shapes = [p.shape for p in network.parameters()]

    def residual(theta):
        parts = [part.view(shape) for part, shape in zip(theta.split(sizes), shapes, strict=True)]
        return (torch.func.functional_call(network, dict(zip(names, parts, strict=True)), (x,)) - y).flatten()

    theta = vector(network)
    return torch.func.jacrev(residual)(theta).double().numpy(), residual(theta).double().numpy()


def step_by_hand(network, x, y, damping, by_tensor=False):
    J, r = jacobian(network, x, y)
    A = J.T @ J
    squares = np.diag(A)
    if by_tensor:
        ends = np.cumsum([p.numel() for p in network.parameters()])[:-1]
        squares = np.concatenate([np.full(len(part), part.mean()) for part in np.split(squares, ends)])
    return -np.linalg.solve(A + damping * np.diag(squares), J.T @ r)


def first_step(network, x, y, **options):
    trained = copy.deepcopy(network)
    lma = LMA(trained, None, lambda a, b: a - b, **options)
    lma.step(x, y)
    assert lma.record.accepted
    return (vector(trained) - vector(network)).double().numpy(), lma.record.damping


@pytest.mark.parametrize("rows", [60, 8], ids=["m > n", "m < n"])
def test_several_residuals_a_row(rows):
    """Fault: J has as many rows as samples, whatever the number of residuals."""
    network, (x, y) = network_of(3, 4, 2), data_of(rows, 3, 2)
    step, damping = first_step(network, x, y, damping="lema")
    by_hand = step_by_hand(network, x, y, damping, by_tensor=rows == 8)
    np.testing.assert_allclose(step, by_hand, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("rate", [0.5, 0.1])
def test_learning_rate_scales_the_step(rate):
    """Fault: accepted and never used."""
    network, (x, y) = network_of(3, 4, 1), data_of(60, 3)
    full, damping = first_step(network, x, y, damping="lema", damping_start=10.0)
    part, same = first_step(network, x, y, damping="lema", damping_start=10.0, learning_rate=rate)
    assert damping == same == 10
    np.testing.assert_allclose(part, rate * full, rtol=1e-9, atol=1e-12)


def test_the_jacobian_of_a_float64_model_is_float64():
    """Fault: float32 J; its step is off by 1e-7 of itself or, by the condition of J, far more."""
    network, (x, y) = network_of(3, 4, 1), data_of(60, 3)
    step, damping = first_step(network, x, y, damping="lema")
    by_hand = step_by_hand(network, x, y, damping)
    assert np.linalg.norm(step - by_hand) <= 1e-10 * np.linalg.norm(by_hand)


@pytest.mark.parametrize("damping", ["trust-region", "nielsen", "lema", MarquardtDamping(scaling="identity")], ids=str)
@pytest.mark.parametrize("alpha", [0.0, 1e-3])
def test_a_smaller_last_batch_is_a_batch(damping, alpha):
    """Fault: sums of a small batch meet a damping or a normalisation of a large one.

    What is minimised is a mean: a batch of 16 rows and the same rows four times over are the same problem, also after
    a batch of 64 others.
    """
    network, (x, y) = network_of(2, 3, 1), data_of(80, 2)
    small, ends = (x[64:], y[64:]), []
    for times in (1, 4):
        trained = copy.deepcopy(network)
        lma = LMA(trained, None, lambda a, b: a - b, damping=damping, alpha=alpha, noise_aware=False)
        for _ in range(3):
            lma.step(x[:64], y[:64])
            loss, _ = lma.step(small[0].repeat(times, 1), small[1].repeat(times, 1))
        ends.append((vector(trained), loss))
    torch.testing.assert_close(ends[1][0], ends[0][0], rtol=1e-6, atol=1e-8)
    assert ends[1][1] == pytest.approx(ends[0][1], rel=1e-7)


@pytest.mark.parametrize("solver", ["auto", "ghost", "dual", "cholesky"])
def test_the_dual_step_is_damped_in_the_parameters(solver):
    """Fault: J Jᵀ + λ diag(J Jᵀ) for m < n, whose step is not that of any damping of the parameters."""
    network, (x, y) = network_of(3, 12, 1), data_of(20, 3)
    step, damping = first_step(network, x, y, solver=solver, damping="lema")
    by_hand = step_by_hand(network, x, y, damping, by_tensor=solver in ("auto", "ghost"))
    np.testing.assert_allclose(step, by_hand, rtol=0, atol=1e-9 * np.abs(by_hand).max())
    J, r = jacobian(network, x, y)
    K = J @ J.T
    theirs = -J.T @ np.linalg.solve(K + damping * np.diag(np.diag(K)), r)
    assert np.linalg.norm(step - theirs) > 1e-3 * np.linalg.norm(theirs)  # the test can tell


# ---- uphill steps


class Cliff(torch.nn.Module):
    """A network that is far above anything as soon as a weight is not what it was."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1).double()
        self.start = vector(self.layer)

    def forward(self, x):
        moved = (torch.cat([p.detach().flatten() for p in self.layer.parameters()]) != self.start).any()
        return self.layer(x) + 1e3 * moved


@pytest.mark.parametrize("damping", ["trust-region", "nielsen", "marquardt", "lema"])
@pytest.mark.parametrize("repeats", [1, 3])
def test_without_a_success_the_parameters_are_what_they_were_to_the_bit(damping, repeats):
    """Fault: the last trial is kept when the attempts run out."""
    torch.manual_seed(3)
    model, (x, y) = Cliff(), data_of(30, 3)
    before, lma = vector(model), LMA(model, None, lambda a, b: a - b, damping=damping, attempts=6)
    for _ in range(repeats):
        loss, terminated = lma.step(x, y)
        assert torch.equal(vector(model), before)
        assert terminated
        assert loss == pytest.approx(mean_square(model, x, y))
    assert lma.status <= 0


@pytest.mark.parametrize("damping", ["trust-region", "nielsen", "marquardt", "lema"])
def test_no_step_goes_uphill(damping):
    """From weights so large that many trials fail; the loss is that of the model which the caller holds."""
    network, (x, y) = network_of(2, 6, 1), data_of(60, 2)
    with torch.no_grad():
        for weights in network.parameters():
            weights.mul_(8)
    lma = LMA(network, None, lambda a, b: a - b, damping=damping)
    last = mean_square(network, x, y)
    for _ in range(20):
        loss, _ = lma.step(x, y)
        assert loss <= last
        assert loss == pytest.approx(mean_square(network, x, y), rel=1e-9)
        last = loss


# ---- resume


@pytest.mark.parametrize("damping", ["trust-region", "nielsen", "lema"])
def test_the_damping_survives_a_resume(damping, tmp_path):
    """Fault: λ starts again at its first value."""
    network, (x, y) = network_of(2, 5, 1), data_of(50, 2)
    twin = copy.deepcopy(network)
    lma = LMA(network, None, lambda a, b: a - b, damping=damping)
    for _ in range(4):
        lma.step(x, y)
    file = io.BytesIO()
    torch.save({"model": network.state_dict(), "lma": lma.state_dict()}, file)
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    twin.load_state_dict(kept["model"])
    resumed = LMA(twin, None, lambda a, b: a - b, damping=damping)
    resumed.load_state_dict(kept["lma"])
    for _ in range(4):
        assert lma.step(x, y) == resumed.step(x, y)
        assert resumed.record.damping == lma.record.damping
        assert torch.equal(vector(twin), vector(network))
    fresh = LMA(copy.deepcopy(network), None, lambda a, b: a - b, damping=damping)
    lma.step(x, y)
    fresh.step(x, y)
    assert fresh.record.damping != lma.record.damping  # the state matters


# ---- stop tests


def test_it_stops_at_the_optimum_with_a_true_status():
    """Fault: no gradient or step test. The optimum of a linear network is that of numpy."""
    torch.manual_seed(4)
    layer, (x, y) = torch.nn.Linear(3, 1).double(), data_of(40, 3)
    lma = LMA(layer, None, lambda a, b: a - b)
    terminated = False
    while not terminated and lma.n_steps < 12:
        loss, terminated = lma.step(x, y)
    A = np.hstack([x.numpy(), np.ones((40, 1))])
    solution, squares, *_ = np.linalg.lstsq(A, y[:, 0].numpy(), rcond=None)
    assert terminated and lma.status > 0 and lma.message
    assert lma.n_steps <= 5
    np.testing.assert_allclose(vector(layer).numpy(), solution, rtol=1e-8)
    assert loss == pytest.approx(squares[0] / 40)


def test_it_does_not_stop_short_of_an_optimum():
    network, (x, y) = network_of(2, 5, 1), data_of(50, 2)
    lma = LMA(network, None, lambda a, b: a - b)
    for _ in range(3):
        assert lma.step(x, y)[1] is False
    assert lma.status <= 0 if lma.status is not None else True
    assert lma.n_steps == 3


# ---- layers that draw or that look at the batch


@pytest.mark.parametrize(
    "first",
    [torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(3, affine=False), torch.nn.Identity()],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("solver", ["auto", "cholesky", "cg"])
def test_one_draw_and_one_statistic_within_a_step(first, solver):
    """Fault: J, the residual and the trial each see other masks or other statistics.

    Behind the layer the model is linear, so with the same rows in all three the reduction is what was predicted.
    """
    torch.manual_seed(5)
    network = torch.nn.Sequential(copy.deepcopy(first), torch.nn.Linear(3, 1)).double().train()
    x, y = data_of(120, 3)
    lma = LMA(network, None, lambda a, b: a - b, solver=solver, noise_aware=False)
    for rows in (slice(40), slice(40, 80), slice(80, 120)):
        lma.step(x[rows], y[rows])
        assert lma.record.accepted
        assert lma.record.gain_ratio == pytest.approx(1, abs=1e-6)


def test_running_statistics_take_every_batch_in_once():
    """However many trials a step has; at the first batch they are its own. The loss is that of evaluation mode."""
    layer, (x, y) = torch.nn.BatchNorm1d(3).double(), data_of(80, 3)
    network = torch.nn.Sequential(layer, torch.nn.Linear(3, 1).double()).train()
    lma = LMA(network, None, lambda a, b: a - b)
    lma.step(x[:40], y[:40])
    torch.testing.assert_close(layer.running_mean, x[:40].mean(0))
    torch.testing.assert_close(layer.running_var, x[:40].var(0))
    loss, _ = lma.step(x[40:], y[40:])
    torch.testing.assert_close(layer.running_mean, 0.9 * x[:40].mean(0) + 0.1 * x[40:].mean(0))
    torch.testing.assert_close(layer.running_var, 0.9 * x[:40].var(0) + 0.1 * x[40:].var(0))
    assert int(layer.num_batches_tracked) == 2 and network.training and layer.training
    assert loss == pytest.approx(mean_square(network.eval(), x[40:], y[40:]))


# ---- the square root of a cross-entropy


def root_of_cross_entropy(a, b):
    return torch.sqrt(torch.nn.functional.cross_entropy(a, b, reduction="none"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_the_root_of_a_cross_entropy_of_zero(dtype):
    """Fault: its slope there is 0/0. Rows that are classified beyond rounding say nothing; the others still teach."""
    torch.manual_seed(6)
    network = torch.nn.Linear(2, 3).to(dtype)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[200.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
    x = torch.tensor([[5.0, 0.1], [4.0, -0.3], [-1.0, 0.4], [-2.0, 0.2], [-0.5, -0.5], [-1.0, -0.7]], dtype=dtype)
    y = torch.tensor([0, 0, 1, 2, 2, 1])
    assert root_of_cross_entropy(network(x), y)[0].item() == 0
    with torch.no_grad():
        start = float(root_of_cross_entropy(network(x), y).square().mean())
    lma = LMA(network, None, root_of_cross_entropy)
    losses = [lma.step(x, y)[0] for _ in range(4)]
    assert all(math.isfinite(loss) for loss in losses)
    assert torch.isfinite(vector(network)).all()
    assert losses[-1] < 0.95 * start


# ---- J


def peak_mb():
    return int(re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text()).group(1)) / 1024


@pytest.mark.skipif(not CLEAR.exists(), reason="the peak of the memory is read from /proc")
def test_the_jacobian_is_not_kept():
    """Fault: J, m x n, and copies of it. 256 rows, 262,561 weights, float64: J alone is 513 MB."""
    network, (x, y) = network_of(64, 480, 480, 1), data_of(256, 64)
    LMA(copy.deepcopy(network)).step(x[:16], y[:16])  # what is loaded on first use
    n = vector(network).numel()
    lma = LMA(network)
    CLEAR.write_text("5")  # the peak starts again from what is resident now
    before = peak_mb()
    lma.step(x, y)
    assert lma.record.accepted
    assert peak_mb() - before < 0.25 * len(x) * n * 8 / 2**20
