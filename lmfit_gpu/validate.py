"""Fit the NIST StRD problems with default options and count the digits: ``python -m lmfit_gpu validate``.

The 27 problems of :mod:`lmfit_gpu.datasets.nist` from both their starts are 54 *runs*. They are made in three
*ways*: a torch model by automatic differentiation, the same model by 3-point differences, and a numpy model
by the differences that ``jac="auto"`` chooses. Digits are those of the worst parameter,
−log₁₀ max_j |θ_j − θ*_j|/|θ*_j| (:func:`~lmfit_gpu.datasets.correct_digits`), or of the worst standard
error.

A run falls short when it has not converged, when its parameters have fewer than 6 digits, or its standard
errors fewer than 4. A way falls short when one of its runs does or its trials exceed 1,600 in all. A run that
says *converged* and has fewer than 6 digits is listed by itself: the one failure that a user cannot see.
"""

import argparse
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy
from scipy.optimize import OptimizeWarning
from scipy.optimize import curve_fit as scipy_curve_fit
from sklearn.exceptions import ConvergenceWarning

from lmfit_gpu.backends import BACKENDS
from lmfit_gpu.datasets import NIST_NAMES, NistProblem, correct_digits, load_nist
from lmfit_gpu.estimator import LMRegressor
from lmfit_gpu.exceptions import CovarianceWarning
from lmfit_gpu.jacobian import JACOBIANS
from lmfit_gpu.linear import SOLVERS
from lmfit_gpu.result import Status

__all__ = [
    "WAYS",
    "Run",
    "ScipyRun",
    "Way",
    "add_arguments",
    "fit_all",
    "fit_run",
    "fit_scipy",
    "main",
    "shortfalls",
]

PARAM_DIGITS = 6.0
STDERR_DIGITS = 6.0
# The residuals of Lanczos1 are the rounding of y to the 14 digits that NIST prints. Its standard errors are
# proportional to their size, of which float64 keeps three digits at the very solution (test_datasets.py).
STDERR_DIGITS_OF = {"Lanczos1": 2.8}
MOST_TRIALS = 1600  # of one way, 54 runs


@dataclass(frozen=True)
class Way:
    """One way to fit: which form of the model, and the options that are not default."""

    name: str
    form: str = "torch"  # or "numpy"
    jac: str = "auto"
    solver: str = "auto"
    backend: str = "auto"


WAYS = (
    Way("torch models, jac='auto' (autograd)"),
    Way("torch models, jac='3-point'", jac="3-point"),
    Way("numpy models, jac='auto' (differences)", form="numpy"),
)


@dataclass(frozen=True)
class Run:
    """One fit and how many of its digits are right."""

    problem: str
    start: int  # 1 (far) or 2 (near)
    n_iter: int
    nfev: int
    njev: int
    param_digits: float
    stderr_digits: float
    status: Status

    @property
    def wrong(self) -> bool:
        """Whether the parameters have too few digits."""
        return not self.param_digits >= PARAM_DIGITS

    @property
    def converged_and_wrong(self) -> bool:
        """Whether the fit says it has converged and its parameters are wrong."""
        return self.status > 0 and self.wrong

    @property
    def reasons(self) -> list[str]:
        """What falls short, in words; empty for a good run."""
        least = stderr_limit(self.problem)
        found = [] if self.status > 0 else [f"not converged ({self.status.name})"]
        if self.wrong:
            found.append(f"parameters have {self.param_digits:.1f} digits, {PARAM_DIGITS:.0f} expected")
        if not self.stderr_digits >= least:
            found.append(f"standard errors have {self.stderr_digits:.1f} digits, {least:g} expected")
        return found


@dataclass(frozen=True)
class ScipyRun:
    """What :func:`scipy.optimize.curve_fit` made of a run."""

    problem: str
    start: int
    nfev: int  # calls of the model, also of a fit that failed
    param_digits: float
    stderr_digits: float
    failed: bool  # RuntimeError or OptimizeWarning

    @property
    def params_right(self) -> bool:
        """Whether the parameters have enough digits."""
        return not self.failed and self.param_digits >= PARAM_DIGITS

    @property
    def stderr_right(self) -> bool:
        """Whether the standard errors have enough digits."""
        return not self.failed and self.stderr_digits >= stderr_limit(self.problem)


def stderr_limit(problem: str) -> float:
    """Return how many digits of the standard errors a run must have."""
    return STDERR_DIGITS_OF.get(problem, STDERR_DIGITS)


def fit_run(problem: NistProblem, start: int, way: Way = WAYS[0]) -> Run:
    """Fit one problem from one start with :class:`~lmfit_gpu.LMRegressor`.

    Parameters
    ----------
    problem : NistProblem
    start : {1, 2}
        As NIST numbers them: 1 is the far one.
    way : Way, optional
        Default: autograd.

    Returns
    -------
    Run

    Examples
    --------
    >>> from lmfit_gpu.datasets import load_nist
    >>> run = fit_run(load_nist("Misra1a"), start=1)
    >>> run.reasons, run.param_digits > 9
    ([], True)
    """
    model = problem.model_torch if way.form == "torch" else problem.model_numpy
    estimator = LMRegressor(model, p0=problem.starts[start - 1], jac=way.jac, solver=way.solver, backend=way.backend)
    with warnings.catch_warnings():  # the table says so in its own way
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", CovarianceWarning)
        estimator.fit(problem.X, problem.y)
    result = estimator.result_
    return Run(
        problem.name,
        start,
        result.n_iter,
        result.nfev,
        result.njev,
        correct_digits(estimator.theta_, problem.reference.params),
        correct_digits(estimator.stderr_, problem.reference.stderr),
        result.status,
    )


def fit_scipy(problem: NistProblem, start: int) -> ScipyRun:
    """Fit one problem from one start with SciPy's ``curve_fit`` and its defaults.

    Parameters
    ----------
    problem : NistProblem
    start : {1, 2}

    Returns
    -------
    ScipyRun
    """
    calls = 0

    def counted(x: Any, *params: float) -> Any:
        nonlocal calls
        calls += 1
        return problem.model_numpy(x, *params)

    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("error", OptimizeWarning)
            popt, pcov = scipy_curve_fit(counted, problem.x, problem.y, p0=problem.starts[start - 1])
            stderr = np.sqrt(np.diag(pcov))
    except (RuntimeError, OptimizeWarning):
        return ScipyRun(problem.name, start, calls, 0.0, 0.0, failed=True)
    digits = correct_digits(popt, problem.reference.params)
    return ScipyRun(problem.name, start, calls, digits, correct_digits(stderr, problem.reference.stderr), failed=False)


def fit_all(way: Way, problems: Iterable[NistProblem] | None = None) -> list[Run]:
    """Fit problems from both starts.

    Parameters
    ----------
    way : Way
    problems : iterable of NistProblem, optional
        Default: all 27.
    """
    chosen = map(load_nist, NIST_NAMES) if problems is None else problems
    return [fit_run(problem, start, way) for problem in chosen for start in (1, 2)]


def shortfalls(runs: Sequence[Run]) -> list[str]:
    """Return a sentence for everything about the runs of one way that falls short.

    Parameters
    ----------
    runs : sequence of Run

    Returns
    -------
    list of str
        Empty when all is well.
    """
    found = [f"{run.problem} start {run.start}: {reason}" for run in runs for reason in run.reasons]
    trials = sum(run.n_iter for run in runs)
    if trials > MOST_TRIALS:
        found.append(f"{trials:,} trials in all, at most {MOST_TRIALS:,} expected")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``validate`` to a parser."""
    parser.add_argument(
        "--model",
        choices=("torch", "numpy"),
        help="fit in one way only, with models in torch (the default) or numpy",
    )
    parser.add_argument(
        "--jac",
        choices=JACOBIANS,
        help="fit in one way only, with this jac (default auto: autograd in torch, differences in numpy)",
    )
    parser.add_argument(
        "--solver",
        choices=("auto", *(name for name in SOLVERS if name != "ghost")),
        default="auto",
        help="default: %(default)s",
    )
    parser.add_argument("--backend", choices=("auto", *BACKENDS), default="auto", help="default: %(default)s")
    parser.add_argument(
        "--problems",
        nargs="+",
        metavar="NAME",
        default=NIST_NAMES,
        help="only these, such as Thurber MGH09 (default: all 27)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Fit, print tables and totals, and return the exit status: 1 if anything falls short, else 0.

    Parameters
    ----------
    arguments : argparse.Namespace
        As :func:`add_arguments` makes it.

    Raises
    ------
    ValueError
        For an unknown problem, or autograd of numpy models.
    """
    ways = [
        replace(way, solver=arguments.solver, backend=arguments.backend)
        for way in _chosen_ways(arguments.model, arguments.jac)
    ]
    problems = [load_nist(name) for name in arguments.problems]
    found = {way.name: _report_way(way, problems) for way in ways}
    _report_scipy(problems)
    print()
    for name, messages in found.items():
        print(f"{name}: {'all is well' if not messages else f'{len(messages)} fall short'}")
        for message in messages:
            print(f"  {message}")
    return 1 if any(found.values()) else 0


def _chosen_ways(form: str | None, jac: str | None) -> Sequence[Way]:
    if form is None and jac is None:
        return WAYS
    form, jac = form or "torch", jac or "auto"
    if form == "numpy" and jac == "autograd":
        raise ValueError("--jac autograd: numpy models cannot be differentiated; try --model torch")
    return [Way(f"{form} models, jac={jac!r}", form, jac)]


def _report_way(way: Way, problems: Sequence[NistProblem]) -> list[str]:
    options = [f", {name}={value!r}" for name, value in (("solver", way.solver), ("backend", way.backend))]
    print(f"\n{way.name}{''.join(option for option in options if 'auto' not in option)}\n")
    print(f"{'problem':12}{'start':>6}{'trials':>8}{'nfev':>7}{'njev':>6}{'digits':>8}{'of stderr':>11}  status")
    runs = fit_all(way, problems)
    for run in runs:
        print(
            f"{run.problem:12}{run.start:6d}{run.n_iter:8d}{run.nfev:7d}{run.njev:6d}{run.param_digits:8.1f}"
            f"{run.stderr_digits:11.1f}  {run.status.name}{'  FALLS SHORT' if run.reasons else ''}"
        )
    trials, nfev, njev = (sum(getattr(run, count) for run in runs) for count in ("n_iter", "nfev", "njev"))
    right = sum(not run.reasons for run in runs)
    print(f"{'total':18}{trials:8,d}{nfev:7,d}{njev:6,d}  {right} of {len(runs)} runs right")
    wrong = [f"{run.problem} start {run.start}" for run in runs if run.converged_and_wrong]
    print(f"converged and wrong: {', '.join(wrong) or 'none'}")
    if any(problem.name in STDERR_DIGITS_OF for problem in problems):
        least = STDERR_DIGITS_OF["Lanczos1"]
        print("Lanczos1: its residuals are the rounding of y as printed; float64 holds about three digits of")
        print(f"its standard errors. {least} are asked for, elsewhere {STDERR_DIGITS:.0f}.")
    return shortfalls(runs)


def _report_scipy(problems: Sequence[NistProblem]) -> None:
    runs = [fit_scipy(problem, start) for problem in problems for start in (1, 2)]
    total = len(runs)
    failed = [f"{run.problem} start {run.start}" for run in runs if run.failed]
    wrong = [
        f"{run.problem} start {run.start} ({run.param_digits:.1f})"
        for run in runs
        if not run.failed and not run.params_right
    ]
    print(f"\nscipy.optimize.curve_fit {scipy.__version__}, its defaults, numpy models, the same limits\n")
    print(f"parameters to {PARAM_DIGITS:.0f} digits: {sum(run.params_right for run in runs)} of {total} runs")
    print(f"standard errors to {STDERR_DIGITS:.0f} digits: {sum(run.stderr_right for run in runs)} of {total}")
    print(f"both: {sum(run.params_right and run.stderr_right for run in runs)} of {total}")
    print(f"calls of the model: {sum(run.nfev for run in runs):,}")
    print(f"failed (RuntimeError or OptimizeWarning): {', '.join(failed) or 'none'}")
    print(f"returned without complaint, and wrong (digits): {', '.join(wrong) or 'none'}")
