"""LMA beside torch-levenberg-marquardt, Adam and LBFGS: a small network on many rows, a large one on few.

All trainers of a comparison start from the same weights and run in one process, turn by turn where a ratio of times is
asserted, so that what else the machine does falls on both. Losses are means of squares over all rows, evaluated while
the clock of the trainer stands still. The peer is optional::

    pip install torch-levenberg-marquardt==1.2.3
    make bench PYTEST_ARGS='-s -k lma'

``python tests/benchmarks/bench_lma.py`` draws the picture of docs/pictures again.
"""

import copy
import itertools
import math
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lmfit_gpu import LMA
from lmfit_gpu.damping import MarquardtDamping

pytestmark = pytest.mark.benchmark

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "million_weights.png"
PEER = "torch_levenberg_marquardt"
NO_PEER = "torch-levenberg-marquardt is not installed"
RATES = (1e-3, 3e-3, 1e-2)
PICTURE_RATES = (3e-4, 1e-3)  # of 1e-4 to 1e-2 the best; at 1e-2 it ends at 0.6
BATCH = 200  # of Adam on the small network; 1,000 and all 20,000 rows were no better in 15 s at any of the rates


def mean_square(network, x, y):
    with torch.no_grad():
        return float((network(x) - y).square().mean())


class Clock:
    """Seconds of one trainer, which runs only inside ``with clock:``."""

    def __init__(self, now=time.perf_counter):
        self.seconds, self.now = 0.0, now

    def __enter__(self):
        self.start = self.now()

    def __exit__(self, *_):
        self.last = self.now() - self.start
        self.seconds += self.last


class OfAdam:
    """Adam on mini-batches drawn without replacement; its rate falls along a cosine of the time spent."""

    def __init__(self, network, data, rate, seconds, batch=None, clock=None):
        self.network, self.data, self.rate, self.budget = network, data, rate, seconds
        self.batch, self.order = batch or len(data[0]), torch.empty(0, dtype=torch.long)
        self.adam, self.clock = torch.optim.Adam(network.parameters(), lr=rate), clock or Clock()

    def step(self):
        with self.clock:
            self.adam.param_groups[0]["lr"] = (
                self.rate * (1 + math.cos(math.pi * min(self.clock.seconds / self.budget, 1))) / 2
            )
            x, y = self.rows()
            self.adam.zero_grad()
            (self.network(x) - y).square().mean().backward()
            self.adam.step()

    def rows(self):
        x, y = self.data
        if self.batch == len(x):
            return x, y
        if len(self.order) < self.batch:
            self.order = torch.randperm(len(x))
        chosen, self.order = self.order[: self.batch], self.order[self.batch :]
        return x[chosen], y[chosen]

    def curve(self, every=0.25, enough=0.0):
        """Train until the budget is spent or the loss is `enough`; return (seconds, loss) every so many seconds."""
        points = [(0.0, mean_square(self.network, *self.data))]
        while self.clock.seconds < self.budget and points[-1][1] > enough:
            self.step()
            if self.clock.seconds - points[-1][0] >= every:
                points.append((self.clock.seconds, mean_square(self.network, *self.data)))
        return points


# ---- 20,000 rows, 61 weights

ROWS = 20_000
STEPS_OF_PEER = 100
SECONDS = 100.0


def sinc_task():
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, ROWS, dtype=torch.float64)[:, None]
    network = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1)).double()
    return network, x, torch.sinc(10 * x)


class OfLMA:
    """LMA on the first rows of a random order, twice as many whenever all rows are twice as far off as those."""

    FIRST, LOOK = 1000, 20  # rows; steps between two looks at all rows

    def __init__(self, network, data, first=FIRST):
        order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(0))
        self.network, self.data, self.n, self.n_steps, self.clock = network, [t[order] for t in data], first, 0, Clock()
        self.lma = LMA(network)
        self.rows = [t[:first] for t in self.data]

    def step(self):
        with self.clock:
            loss, _ = self.lma.step(*self.rows)
            self.n_steps += 1
            some = self.n < len(self.data[0])
            if some and self.n_steps % self.LOOK == 0 and mean_square(self.network, *self.data) > 2 * loss:
                self.n = min(2 * self.n, len(self.data[0]))
                self.rows = [t[: self.n] for t in self.data]


class OfPeer:
    """torch-levenberg-marquardt as it comes, on all rows or on batches of some."""

    def __init__(self, peer, network, data, batch=None):
        self.network, self.data, self.batch, self.n_steps = network, data, batch, 0
        self.module, self.clock = peer.training.LevenbergMarquardtModule(network), Clock()

    def step(self):
        with self.clock:
            x, y = self.data
            if self.batch:
                rows = torch.randperm(len(x))[: self.batch]
                x, y = x[rows], y[rows]
            self.module.training_step(x, y)
        self.n_steps += 1


def test_small_network_beside_the_peer_adam_and_lbfgs():
    peer = pytest.importorskip(PEER, reason=NO_PEER)
    start, x, y = sinc_task()

    def racers():
        fresh = (copy.deepcopy(start) for _ in range(4))
        return {
            "the peer, all rows": OfPeer(peer, next(fresh), (x, y)),
            "the peer, 1,000 rows a step": OfPeer(peer, next(fresh), (x, y), 1000),
            "LMA, all rows": OfLMA(next(fresh), (x, y), ROWS),
            "LMA, 1,000 rows and growing": OfLMA(next(fresh), (x, y)),
        }

    for racer in racers().values():  # what is loaded on first use
        racer.step()
    race = racers()
    first, *others = race.values()
    for _ in range(STEPS_OF_PEER):
        first.step()
        for other in others:
            while other.clock.seconds < first.clock.seconds:
                other.step()
    losses = [mean_square(racer.network, x, y) for racer in race.values()]
    print(f"\n1-20-1, {ROWS} rows, float64; the time of {STEPS_OF_PEER} steps of the peer on all rows:")
    for (name, racer), loss in zip(race.items(), losses, strict=True):
        print(f"{name}: {loss:.2e} after {racer.n_steps} steps in {racer.clock.seconds:.2f} s")

    ours, points = OfLMA(copy.deepcopy(start), (x, y)), []
    while ours.clock.seconds < 2:
        ours.step()
        points.append((ours.clock.seconds, mean_square(ours.network, x, y)))
    goal = min(value for seconds, value in points if seconds <= 2)
    ratios = []
    for rate in RATES:
        curve = OfAdam(copy.deepcopy(start), (x, y), rate, SECONDS, BATCH).curve(enough=goal)
        seconds, best = curve[-1][0], min(value for _, value in curve)
        reached = best <= goal
        ratios.append(seconds / first_time(points, goal) if reached else math.inf)
        print(
            f"Adam, rate {rate:g}, {BATCH} rows a step: {best:.2e} in {seconds:.1f} s"
            + ("" if reached else f"; our {goal:.2e} of 2 s not reached")
        )
    seconds, value = lbfgs(copy.deepcopy(start), x, y)
    print(f"LBFGS, strong Wolfe: {value:.2e} in {seconds:.1f} s; our loss after 2 s {goal:.2e}")
    assert losses[3] <= min(losses[:2]) / 10
    assert losses[2] <= losses[0] / 10
    assert min(ratios) >= 50


def first_time(points, goal):
    return next(seconds for seconds, value in points if value <= goal)


def lbfgs(network, x, y, seconds=SECONDS):
    """Return the seconds and the loss when torch's LBFGS stops, or when the time is over."""
    optimizer = torch.optim.LBFGS(
        network.parameters(), max_iter=100, history_size=100, line_search_fn="strong_wolfe",
        tolerance_grad=0, tolerance_change=0,
    )  # fmt: skip

    def closure():
        optimizer.zero_grad()
        loss = (network(x) - y).square().mean()
        loss.backward()
        return loss

    clock, before = Clock(), math.inf
    while clock.seconds < seconds:
        with clock:
            optimizer.step(closure)
        now = mean_square(network, x, y)
        if not now < before:
            break
        before = now
    return clock.seconds, mean_square(network, x, y)


# ---- LeMA's curve-fitting task, whole

DEVICES_AND_SLICES = [(["cpu"], 25_000), (["cpu", "cpu"], 25_000), (["cpu", "cpu"], 10_000)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_lema_curve_fitting_in_any_slices(dtype):
    x = torch.linspace(-1, 1, 100_000, dtype=dtype)[:, None]
    y = torch.sinc(10 * x)
    results = []
    for devices, slice_size in DEVICES_AND_SLICES:
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Linear(1, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)).to(dtype)
        lma, clock = LMA(network, devices, lambda a, b: a - b), Clock()
        with clock:
            for _ in range(30):
                loss, _ = lma.step(x, y, slice_size)
        theta = torch.nn.utils.parameters_to_vector(network.parameters()).detach()
        results.append((theta, loss))
        print(f"\n{dtype}, {devices}, slices of {slice_size}: loss {loss!r} in {clock.seconds:.1f} s", end="")
    print()
    theta, loss = results[0]
    for other, other_loss in results[1:]:
        assert other_loss == pytest.approx(loss, rel=1e-4 if dtype == torch.float32 else 1e-8)
        if dtype == torch.float64:
            assert float((other - theta).abs().max() / theta.abs().max()) <= 1e-8


# ---- 512 rows, 1,027,601 weights

LARGE_ROWS = 512
WIDTHS = (64, 700, 700, 700, 1)
ALPHA = 1e-8
LAMBDA = 0.01
PEER_BYTES = 14 * 2**30


def large_task(dtype=torch.float32, widths=WIDTHS, rows=LARGE_ROWS):
    """A smooth function of 64 normal features, standardised, without noise: sin(2u) + vw for directions u, v, w."""
    torch.manual_seed(0)
    x = torch.randn(rows, widths[0], dtype=torch.float64)
    u, v, w = (x @ torch.nn.functional.normalize(torch.randn(widths[0], dtype=torch.float64), dim=0) for _ in range(3))
    y = torch.sin(2 * u) + v * w
    y = ((y - y.mean()) / y.std())[:, None]
    layers = []
    for n_in, n_out in itertools.pairwise(widths):
        layers += [torch.nn.Linear(n_in, n_out), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1]).to(dtype), x.to(dtype), y.to(dtype)


def test_large_network_beside_adam():
    start, x, y = large_task()
    LMA(copy.deepcopy(start), alpha=ALPHA).step(x, y)  # what is loaded on first use
    accepted, of_adam, losses = [], [], []
    for _ in range(3):
        network = copy.deepcopy(start)
        lma, adam = LMA(network, alpha=ALPHA), OfAdam(copy.deepcopy(start), (x, y), 1e-3, 1e9)
        losses = []
        for _ in range(6):
            clock = Clock()
            with clock:
                lma.step(x, y)
            losses.append(mean_square(network, x, y))
            if lma.record.accepted:
                accepted.append(clock.last)
            for _ in range(4):
                adam.step()
                of_adam.append(adam.clock.last)
    ratio = median(accepted) / median(of_adam)
    weights = sum(p.numel() for p in start.parameters())
    print(
        f"\n{weights} weights, {LARGE_ROWS} rows, float32, alpha {ALPHA:g}: a step {1e3 * median(accepted):.0f} ms, "
        f"of Adam {1e3 * median(of_adam):.0f} ms; ratio {ratio:.2f}; "
        f"mean squares {', '.join(f'{value:.1e}' for value in losses)}"
    )
    assert min(losses) <= 1e-7
    assert ratio <= 3


def median(values):
    return float(torch.tensor(values).median())


def displacement(network, solver, x, y, alpha):
    """Return the first step of a copy of the network by one solver, for the same λ and D in all."""
    trained = copy.deepcopy(network)
    damping = MarquardtDamping(start_damping=LAMBDA, scaling="identity")
    lma = LMA(trained, solver=solver, alpha=alpha, damping=damping)
    before = torch.nn.utils.parameters_to_vector(network.parameters()).detach().double()
    lma.step(x, y)
    assert lma.record.accepted and lma.record.damping == LAMBDA
    return torch.nn.utils.parameters_to_vector(trained.parameters()).detach().double() - before


# The explicit J of dual takes a penalty as n further rows, 4 TB here; it is left out there.
@pytest.mark.parametrize(("other", "alpha"), [("dual", 0.0), ("cg", ALPHA)], ids=["explicit J", "cg"])
@pytest.mark.parametrize(
    ("dtype", "widths", "limit"),
    [(torch.float32, WIDTHS, 1e-4), (torch.float64, (64, 200, 200, 1), 1e-9)],
    ids=["float32, 1,027,601 weights", "float64, 53,401 weights"],
)
def test_the_step_is_that_of_the_other_solvers(dtype, widths, limit, other, alpha):
    start, x, y = large_task(dtype, widths)
    ghost, explicit = (displacement(start, solver, x, y, alpha) for solver in ("ghost", other))
    difference = float((ghost - explicit).norm() / ghost.norm())
    print(f"\n{dtype}: ghost beside {other}, relative difference of the step {difference:.1e}")
    assert difference <= limit


def test_the_step_of_the_peer_is_fifty_times_slower():
    """In a process of its own with a limit of memory, for it keeps J (2.1 GB) and copies of it."""
    pytest.importorskip(PEER, reason=NO_PEER)
    command = [sys.executable, str(Path(__file__).resolve()), "peer"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, preexec_fn=_limited)
    start, x, y = large_task()
    lma, clock = LMA(start, alpha=ALPHA), Clock()
    times = []
    for _ in range(5):
        with clock:
            lma.step(x, y)
        times.append(clock.last)
    if done.returncode:
        print(f"\nthe peer ended within {PEER_BYTES / 2**30:.0f} GiB with: {done.stderr.strip().splitlines()[-1]}")
        assert "memory" in done.stderr.lower() or done.returncode == -9
        return
    theirs = float(done.stdout.split()[-1])
    print(f"\na step of the peer {theirs:.1f} s, ours {1e3 * median(times):.0f} ms: {theirs / median(times):.0f} times")
    assert theirs >= 50 * median(times)


def _limited():
    resource.setrlimit(resource.RLIMIT_AS, (PEER_BYTES, PEER_BYTES))


def step_of_the_peer():
    from torch_levenberg_marquardt.training import LevenbergMarquardtModule

    network, x, y = large_task()
    module, clock = LevenbergMarquardtModule(network, solve_method="cholesky"), Clock()
    with clock:
        module.training_step(x, y)
    print(clock.seconds)


def draw(seconds=20.0):
    """Loss against processor time on one thread, ours and Adam's with its best rate; no penalty in either."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    torch.set_num_threads(1)
    start, x, y = large_task()
    LMA(copy.deepcopy(start)).step(x, y)
    network = copy.deepcopy(start)
    lma, clock, ours = LMA(network), Clock(time.process_time), [(0.0, mean_square(start, x, y))]
    for _ in range(10):
        with clock:
            _, terminated = lma.step(x, y)
        ours.append((clock.seconds, mean_square(network, x, y)))
        if terminated:
            break
    curves = {}
    for rate in PICTURE_RATES:
        adam = OfAdam(copy.deepcopy(start), (x, y), rate, seconds, clock=Clock(time.process_time))
        curves[rate] = adam.curve(every=0.1)
    best = min(curves, key=lambda rate: min(value for _, value in curves[rate]))
    print({rate: min(value for _, value in curve) for rate, curve in curves.items()}, ours)
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.plot(*zip(*ours, strict=True), "o-", ms=4, label=f"LMA ({len(ours) - 1} steps)")
    axes.plot(*zip(*curves[best], strict=True), lw=1, label=f"Adam, cosine, best rate ({best:g})")
    axes.set(
        yscale="log",
        xlabel="seconds of processor time, one thread (linear below 1)",
        ylabel="mean square of the residuals",
    )
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xlim(left=0)
    axes.set_title("1,027,601 weights (64-700-700-700-1, tanh), 512 rows, float32", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    if sys.argv[1:] == ["peer"]:
        step_of_the_peer()
    else:
        draw()
