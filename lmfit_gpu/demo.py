"""Two fits in under a minute: ``python -m lmfit_gpu demo``.

1. *A curve.* Thurber's measured electron mobility against the logarithm of density (NIST StRD, observed
   data, 37 points, 7 parameters) from NIST's far start; report, and a plot of data, curve and residuals.
2. *A network.* The curve-fitting task of LeMA, y = sin(10x)/(10x) on 20,000 points of [−1, 1], by 61 weights
   (1-20-1 with tanh, float64), fitted by Levenberg-Marquardt and by Adam on all rows from the same weights;
   the mean square of the residuals against wall time. Adam gets at least as long as Levenberg-Marquardt.

Both use one thread: blocks of 4,096 rows are too small to share out, and BLAS threads that wait for a busy
core slow the factorisations many times over.
"""

import argparse
import copy
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits  # scikit-learn brings it

from lmfit_gpu.datasets import NistProblem, correct_digits, load_nist
from lmfit_gpu.estimator import LMRegressor
from lmfit_gpu.exceptions import BackendUnavailableError, CovarianceWarning
from lmfit_gpu.result import IterationRecord

__all__ = [
    "Curve",
    "add_arguments",
    "fit_curve",
    "fit_network",
    "main",
    "show_curve",
    "show_network",
    "sinc_data",
    "train_adam",
]

N_POINTS, N_HIDDEN = 20_000, 20  # LeMA's example
SEED = 0
MAX_ITER = 150
MOST_SECONDS = 15.0  # of Levenberg-Marquardt; Adam has as long, and a minute must do for both
ADAM_RATE = 3e-2  # the best after 9 s of 3e-3, 1e-2, 3e-2, 1e-1
ADAM_EVERY = 10  # steps between two entries of its curve

Curve = list[tuple[float, float]]  # (seconds, mean square of the residuals)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``demo`` to a parser."""
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        metavar="DIR",
        help="folder of the plots, made where it is missing (default: %(default)s)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Run both fits, print, save the plots, and return 0.

    Raises
    ------
    BackendUnavailableError
        If matplotlib is not installed.
    """
    new_figure((1, 1))  # before any work: is matplotlib there?
    arguments.output.mkdir(parents=True, exist_ok=True)
    with threadpool_limits(1):
        plots = [show_curve(arguments.output), show_network(arguments.output)]
    print("\nPlots:", *plots, sep="\n  ")
    return 0


def fit_curve(problem: NistProblem) -> LMRegressor:
    """Fit a NIST problem from its far start; the torch form is differentiated exactly."""
    return LMRegressor(problem.model_torch, p0=problem.starts[0]).fit(problem.X, problem.y)


def sinc_data(n_points: int = N_POINTS) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x (n_points, 1) on [−1, 1] and y = sin(10x)/(10x) (n_points, 1), float64."""
    x = torch.linspace(-1, 1, n_points, dtype=torch.float64)[:, None]
    return x, torch.sinc(10 * x / torch.pi)  # torch's sinc(u) is sin(πu)/(πu)


def make_network(n_hidden: int = N_HIDDEN) -> torch.nn.Sequential:
    """Return the network 1-n_hidden-1 with tanh, in float64, with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        layers = torch.nn.Linear(1, n_hidden), torch.nn.Tanh(), torch.nn.Linear(n_hidden, 1)
        return torch.nn.Sequential(*layers).double()


def fit_network(
    network: torch.nn.Module,
    data: tuple[torch.Tensor, torch.Tensor],
    max_iter: int = MAX_ITER,
    most_seconds: float = MOST_SECONDS,
) -> tuple[LMRegressor, Curve]:
    """Fit a network by Levenberg-Marquardt and time it.

    Parameters
    ----------
    network : torch.nn.Module
        Not changed.
    data : (x, y), shapes (n, 1)
    max_iter : int
    most_seconds : float
        The fit is stopped after the trial that ends later.

    Returns
    -------
    estimator : LMRegressor
    curve : list of (seconds, mean square), one entry a trial
    """
    x, y = data
    curve: Curve = []
    begin = time.perf_counter()

    def note(record: IterationRecord) -> bool:
        curve.append((time.perf_counter() - begin, 2 * record.cost / y.numel()))
        return curve[-1][0] > most_seconds

    with _stopped_early():
        estimator = LMRegressor(network, max_iter=max_iter, callback=note).fit(x, y)
    return estimator, curve


def train_adam(
    network: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor], seconds: float, rate: float = ADAM_RATE
) -> Curve:
    """Train a copy of a network by Adam, every step on all rows, for at least some seconds.

    Parameters
    ----------
    network : torch.nn.Module
        Not changed.
    data : (x, y), shapes (n, 1)
    seconds : float
    rate : float
        Learning rate.

    Returns
    -------
    list of (seconds, mean square)
        The best so far, one entry every tenth step.
    """
    x, y = data
    network = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=rate)
    curve: Curve = []
    best = float("inf")
    begin = time.perf_counter()
    while not curve or curve[-1][0] < seconds:
        for _ in range(ADAM_EVERY):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(network(x), y)
            loss.backward()
            optimizer.step()
            best = min(best, float(loss.detach()))
        curve.append((time.perf_counter() - begin, best))
    return curve


@contextmanager
def _stopped_early() -> Iterator[None]:
    """Silence what is expected of a network stopped early: not converged, no standard errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", CovarianceWarning)
        yield


def show_curve(output: Path) -> Path:
    """Fit the curve, print the report, and return the path of the plot."""
    problem = load_nist("Thurber")
    print(f"1. A curve: {problem.name}, {len(problem.y)} measured points (NIST StRD), from the far start\n")
    print(f"   {problem.model_text}\n")
    estimator = fit_curve(problem)
    print(estimator.report())
    digits = correct_digits(estimator.theta_, problem.reference.params)
    errors = correct_digits(estimator.stderr_, problem.reference.stderr)
    print(f"\nRight digits, by NIST's answer: parameters {digits:.1f}, standard errors {errors:.1f}.")
    return plot_curve(problem, estimator, output / "thurber.png")


def show_network(output: Path, n_points: int = N_POINTS, max_iter: int = MAX_ITER) -> Path:
    """Fit the network by both methods, print the comparison, and return the path of the plot."""
    data, network = sinc_data(n_points), make_network()
    n_weights = sum(p.numel() for p in network.parameters())
    print(f"\n2. A network: sin(10x)/(10x), {n_points:,} points, {n_weights} weights (1-{N_HIDDEN}-1, tanh)\n")
    fit_network(network, sinc_data(64), max_iter=2)  # torch imports parts of itself at their first use
    estimator, lm = fit_network(network, data, max_iter)
    adam = train_adam(network, data, seconds=lm[-1][0])
    print(loss_table({"Levenberg-Marquardt": lm, "Adam": adam}))
    result = estimator.result_
    print(
        f"\nLevenberg-Marquardt: {result.n_iter} trials, then stopped ({result.status.name}). "
        f"Adam: {ADAM_EVERY * len(adam):,} steps, learning rate {ADAM_RATE:g}."
    )
    print(
        "The fit is stopped before it converges, and the data do not determine all weights of a network;\n"
        "the warnings that say so are expected and not shown."
    )
    return plot_losses({"Levenberg-Marquardt": lm, "Adam": adam}, output / "sinc_network.png")


def loss_table(curves: dict[str, Curve], n_lines: int = 8) -> str:
    """Return the mean squares of several curves at the same times, up to the end of the shortest."""
    end = min(curve[-1][0] for curve in curves.values())
    times = [end / 2**k for k in reversed(range(n_lines))]
    head = f"{'seconds':>9}" + "".join(f"{name:>22}" for name in curves)
    lines = [f"{t:9.2f}" + "".join(f"{_value_at(curve, t):>22}" for curve in curves.values()) for t in times]
    return "\n".join(["mean square of the residuals:", head, *lines])


def _value_at(curve: Curve, seconds: float) -> str:
    passed = [value for t, value in curve if t <= seconds]
    return f"{passed[-1]:.2e}" if passed else "-"


def new_figure(size: tuple[float, float]) -> Any:
    """Return a matplotlib figure drawn without a display.

    Raises
    ------
    BackendUnavailableError
        If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise BackendUnavailableError("plots need matplotlib: pip install 'matplotlib>=3.8'") from error
    return Figure(figsize=size, layout="constrained")  # not pyplot: a bare figure saves by Agg


def plot_curve(problem: NistProblem, estimator: LMRegressor, path: Path) -> Path:
    """Save data, fitted curve and residuals, and return the path."""
    figure = new_figure((7.0, 5.5))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    dense = torch.linspace(problem.x.min(), problem.x.max(), 400, dtype=torch.float64).numpy()
    upper.plot(dense, estimator.predict(dense[:, None]), color="C0", label="fit")
    upper.plot(problem.x, problem.y, "o", color="black", markersize=4, label="measured")
    upper.set(title=f"{problem.name}: electron mobility, 7 parameters", ylabel="mobility")
    upper.legend()
    lower.axhline(0, color="C0", linewidth=1)
    lower.plot(problem.x, estimator.predict(problem.X) - problem.y, "o", color="black", markersize=4)
    lower.set(xlabel="log of electron density", ylabel="prediction − data")
    figure.savefig(path, dpi=120)
    return path


def plot_losses(curves: dict[str, Curve], path: Path) -> Path:
    """Save the mean square against time, both logarithmic, and return the path."""
    figure = new_figure((7.0, 4.5))
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.loglog(*zip(*curve, strict=True), label=name)
    title = f"sin(10x)/(10x) by a network 1-{N_HIDDEN}-1, all points at once, one thread"
    axes.set(title=title, xlabel="seconds", ylabel="mean square of the residuals")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path
