"""Run the engine on the Moré-Garbow-Hillstrom problems and print the tables of docs/mgh.md.

Every problem of `mgh.py` is minimised from its standard start x0 and from 10 x0 with the default options.
A run has *reached* a minimum when F = ‖r‖² equals a value of `Problem.minima`: within :data:`RTOL`, as the
paper prints six digits, or below :data:`ZERO` when the value is 0.

    python tests/mgh_runs.py [auto | 3-point]
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from mgh import PROBLEMS, Problem, starts

from lmfit_gpu.levenberg_marquardt import LevenbergMarquardt
from lmfit_gpu.models import TorchFunction
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.result import Result
from lmfit_gpu.rows import ArrayRows

RTOL = 1e-5  # the paper prints six digits
ZERO = 1e-20  # the lowest minimum of the list that is not 0 is 4.7e-10
TIMES = (1, 10)  # run k starts from k x0 (Watson's second start is the vector of ones)


@dataclass(frozen=True)
class Run:
    """One minimisation.

    Parameters
    ----------
    problem : Problem
    times : {1, 10}
        The start over x0.
    result : Result
    """

    problem: Problem
    times: int
    result: Result

    @property
    def F(self) -> float:
        """‖r‖² at the end: twice the cost."""
        return 2 * self.result.cost

    @property
    def minimum(self) -> float | None:
        """The listed minimum or limit that F equals, or None."""
        return next((value for value in self.problem.minima if _equal(self.F, value)), None)


def _equal(F: float, value: float) -> bool:
    return ZERO >= F if value == 0 else abs(F - value) <= RTOL * value


def minimise(name: str, times: int, jac: str = "auto", max_iter: int = 1000) -> Run:
    """Return the run of one problem from `times` x0."""
    problem = PROBLEMS[name]
    start = starts(problem)[TIMES.index(times)]
    names = tuple(f"x{j + 1}" for j in range(problem.n))
    model = TorchFunction(lambda theta, x, y: problem.residual(theta), names, order="residual")
    rows = ArrayRows(torch.zeros(problem.m, 1, dtype=torch.float64), None)
    engine = LevenbergMarquardt(jac=jac, max_iter=max_iter)
    return Run(problem, times, engine.minimize(LeastSquaresProblem(model, rows, start), start))


def table(jac: str) -> Iterator[str]:
    """Yield the table as lines of Markdown."""
    yield "| problem | n | m | start | trials | F reached | listed | status |"
    yield "|---|---|---|---|---|---|---|---|"
    reached = converged = trials = 0
    for name, problem in PROBLEMS.items():
        for times in TIMES:
            run = minimise(name, times, jac)
            reached += run.minimum is not None
            converged += run.result.success
            trials += run.result.n_iter
            start = "x0" if times == 1 else "10 x0" if any(problem.start) else "ones"
            found = "none" if run.minimum is None else f"{run.minimum:.6g}"
            sizes, outcome = (name, problem.n, problem.m), (f"{run.F:.7g}", found, run.result.status.name)
            yield "| " + " | ".join(map(str, (*sizes, start, run.result.n_iter, *outcome))) + " |"
    yield ""
    runs = len(TIMES) * len(PROBLEMS)
    yield f"{runs} runs, {reached} at a listed minimum, {converged} converged, {trials} trials."


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in table(sys.argv[1] if len(sys.argv) > 1 else "auto"):
        print(line, flush=True)
