"""LeMA's scripts on LMA: its README loop, its curve-fitting task in any slices, its λ sequence."""

import copy
import itertools

import numpy as np
import pytest
import torch

from lmfit_gpu import LMA

# The loop of LeMA's README, written for any data; only the name of the package is filled in.
LOOP = """
from {package} import LMA, get_available_gpus

devices = get_available_gpus()
model = MyModel().to(devices[0])
residual_fn = lambda a, b: a - b
lma = LMA(model, devices, residual_fn)
for x, y in loader:
    loss, terminated = lma.step(x, y)
    losses.append(loss)
"""


def sinc_network(width, dtype=torch.float64):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)).to(dtype)


def sinc_data(n, dtype=torch.float64):
    x = torch.linspace(-1, 1, n, dtype=dtype)[:, None]
    return x, torch.sinc(10 * x)


def vector(network):
    return torch.nn.utils.parameters_to_vector(network.parameters()).detach().clone()


def test_the_readme_loop_runs_with_only_its_import_changed():
    x, y = sinc_data(300, torch.float32)
    namespace = {"MyModel": lambda: sinc_network(8, torch.float32), "loader": [(x, y)] * 12, "losses": []}
    exec(LOOP.format(package="lmfit_gpu"), namespace)
    losses = namespace["losses"]
    assert all(isinstance(loss, float) for loss in losses)
    assert isinstance(namespace["terminated"], bool)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2
    with torch.no_grad():  # the loss is the mean of squares after the step, of the model that the script holds
        assert losses[-1] == pytest.approx(float((namespace["model"](x) - y).square().mean()), rel=1e-5)


# ---- the curve-fitting task, in any slices on any number of devices

POINTS, WIDTH, STEPS = 2000, 24, 30  # LeMA's 100,000 points, 256 units: tests/benchmarks/bench_lma.py


def trained(dtype, devices, slice_size):
    network, (x, y) = sinc_network(WIDTH, dtype), sinc_data(POINTS, dtype)
    lma = LMA(network, devices, lambda a, b: a - b)
    for _ in range(STEPS):
        loss, _ = lma.step(x, y, slice_size)
    return vector(network), loss


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["float64", "float32"])
def whole(request):
    return request.param, *trained(request.param, ["cpu"], None)


@pytest.mark.parametrize(
    ("devices", "slice_size"), [(["cpu"], 500), (["cpu", "cpu"], 500), (["cpu", "cpu"], 350)], ids=str
)
def test_slices_and_devices_do_not_change_the_result(whole, devices, slice_size):
    dtype, theta, loss = whole
    other, other_loss = trained(dtype, devices, slice_size)
    if dtype == torch.float64:
        torch.testing.assert_close(other, theta, rtol=0, atol=1e-8 * float(theta.abs().max()))
        assert other_loss == pytest.approx(loss, rel=1e-8)
    else:
        assert other_loss == pytest.approx(loss, rel=1e-4)


# ---- λ of damping="lema"


class ByHand:
    """LeMA's rule in numpy on f(x) = b₂ + Σ w₂ tanh(w₁ x + b₁), with JᵀJ + λ diag(JᵀJ)."""

    def __init__(self, theta, x, y):
        self.theta, self.x, self.y, self.damping = theta, x, y, 1e-3

    def residual(self, theta):
        w1, b1, w2 = theta[:-1].reshape(3, -1)
        return np.tanh(np.outer(self.x, w1) + b1) @ w2 + theta[-1] - self.y

    def jacobian(self):
        w1, b1, w2 = self.theta[:-1].reshape(3, -1)
        h = np.tanh(np.outer(self.x, w1) + b1)
        slope = w2 * (1 - h**2)
        return np.hstack([slope * self.x[:, None], slope, h, np.ones((len(self.x), 1))])

    def step(self):
        """Return the λ of every trial, and the loss."""
        J, r = self.jacobian(), self.residual(self.theta)
        A, tried, loss = J.T @ J, [], np.mean(r**2)
        for _ in range(10):
            tried.append(self.damping)
            p = -np.linalg.solve(A + self.damping * np.diag(np.diag(A)), J.T @ r)
            now = np.mean(self.residual(self.theta + p) ** 2)
            if now < loss:
                self.theta, loss, self.damping = self.theta + p, now, self.damping * 0.1
                break
            self.damping *= 10
        return tried, loss


def test_lema_damping_is_its_sequence():
    network, (x, y) = sinc_network(6), sinc_data(80)  # a relative change of the start by 1e-9 changes the end by 1e-7
    oracle = ByHand(vector(network).numpy(), x[:, 0].numpy(), y[:, 0].numpy())
    lma = LMA(network, None, lambda a, b: a - b, damping="lema")
    lengths = set()
    for _ in range(25):
        tried, expected = oracle.step()
        loss, terminated = lma.step(x, y)
        assert not terminated
        assert lma.record.damping == pytest.approx(tried[-1], rel=1e-9)
        assert loss == pytest.approx(expected, rel=1e-6)
        lengths.add(len(tried))
    np.testing.assert_allclose(vector(network).numpy(), oracle.theta, rtol=1e-5)
    assert len(lengths) > 1  # λ went up as well as down


class Cliff(torch.nn.Module):
    """w x, and far above anything as soon as w is not what it was: every trial fails."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, x):
        return self.w * x + 1e3 * (self.w.detach() != 0.3)


def test_lema_damping_gives_up_after_ten_attempts():
    model, x = Cliff(), torch.linspace(1, 2, 9, dtype=torch.float64)[:, None]
    lma = LMA(model, None, lambda a, b: a - b, damping="lema")
    loss, terminated = lma.step(x, x)
    assert terminated
    assert loss == pytest.approx(float(((0.3 * x - x) ** 2).mean()))
    assert not lma.record.accepted
    assert lma.record.damping == pytest.approx(1e-3 * 10**9)  # of the tenth trial
    assert model.w.item() == 0.3
    assert lma.status < 0  # no success


def test_lema_keywords_of_damping():
    """λ starts at damping_start and falls by damping_down."""
    network, (x, y) = sinc_network(4), sinc_data(50)
    keywords = dict(damping="lema", damping_start=0.5, damping_up=4.0, damping_down=0.25)
    lma = LMA(copy.deepcopy(network), None, lambda a, b: a - b, **keywords)
    used = []
    for _ in range(4):
        lma.step(x, y)
        used.append(lma.record.damping)
    powers = np.log2(np.array(used) / 0.5)
    assert powers[0] % 2 == 0 and powers[0] >= 0
    assert all((later - before + 2) % 2 == 0 and later - before >= -2 for before, later in itertools.pairwise(powers))
