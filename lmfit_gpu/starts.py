r"""p0="auto": a seeded search for a start, where the one at hand leads to a poor local minimum.

::

    given start ──────────────────────────────────────────── fitted to the end ──┐
    bounds, scales of the data ── 1,024 or more candidates                       │ the start whose
           └─ linear parameters solved for, costs on some rows as one batch      ├ fit ends lowest
              │ └─ the 12 best that are not near a better one: a few iterations  │
              │       └─ the 3 best: fitted to the end, on all rows ─────────────┘
              └─ twice: the 4 best ends, with one or two parameters drawn anew

(Guesses: :mod:`lmfit_gpu.guesses`; linear parameters: :mod:`lmfit_gpu.separable`.) With more than one parameter that
is not linear the best ends are drawn from again, unless three of them agree: what is right of them (one of two peaks,
one of two frequencies) is kept, and two coordinates are new. The given start is among those that
are fitted to the end, and wins ties, so the fit from the start found is never worse than the fit from the given one.
The same seed gives the same start, to the bit.

Multistart finds the global minimum only with luck (Rinnooy Kan and Timmer, Math. Programming 39 (1987) 27-78,
doi:10.1007/BF02592070): the chance falls geometrically with the number of parameters that are not linear.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_random_state

from lmfit_gpu.blocks import Workers
from lmfit_gpu.candidates import ManyPoints
from lmfit_gpu.exceptions import NonFiniteError
from lmfit_gpu.guesses import Scales, draw
from lmfit_gpu.levenberg_marquardt import LevenbergMarquardt
from lmfit_gpu.models import CALL_ERRORS
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.result import Result, Status
from lmfit_gpu.separable import linear_parameters, projected

__all__ = ["Search", "find_start", "seed_of"]

CANDIDATES = 1024
EASY_DIMENSIONS = 2  # each parameter more that is not linear doubles the candidates
MOST_CANDIDATES = 4096
LEAST_CANDIDATES = 16
MOST_VALUES = 2**25  # residuals evaluated for all candidates together: a second, or a few
MOST_NUMBERS = 2**24  # candidates times parameters: 128 MB
SEARCH_ROWS = 256  # costs on more rows rank candidates no better
PROBE_POINTS = 48  # candidates by which linear parameters are found, in threes
RANKED = 64  # candidates whose cost is taken once more, as the fit takes it (losses, weights)
POLISHED = 12
POLISH_ITERATIONS = 15
FURTHER_ROUNDS = 2
PARENTS = 4  # ends that a further round draws from
REDRAWN = 2  # of their coordinates, but not all
AGREEING = 3
FINALISTS = 3
SAME_END = 1e-7  # relative difference of the costs of two ends that are one minimum
NEAR = 0.02  # two candidates with no more than this share of all between them, in every parameter
TIE = 1e-9  # relative fall of the cost below which the given start is kept


@dataclass(frozen=True)
class Search:
    """What a search tried and found.

    Parameters
    ----------
    n_candidates, n_finite : int
        Candidates evaluated, and those where the residuals are finite.
    n_rows : int
        Rows they were evaluated on.
    how : str
        "vmap", "columns" or "one by one".
    linear : tuple of str
        Parameters that were solved for instead of guessed.
    polished : tuple of float
        Costs on those rows after a few iterations from the best candidates.
    given_cost, found_cost : float
        Costs on all rows at the end of the fits from the given start (inf where it cannot be fitted) and from the
        best candidate.
    end : Result or None
        Of the fit from the start that is used.
    """

    n_candidates: int
    n_finite: int
    n_rows: int
    how: str
    linear: tuple[str, ...]
    polished: tuple[float, ...]
    given_cost: float
    found_cost: float
    end: Result | None = field(default=None, repr=False)

    @property
    def from_given(self) -> bool:
        """Whether the given start was kept."""
        return not self.found_cost < self.given_cost * (1 - TIE)

    def __str__(self) -> str:
        solved = f", {len(self.linear)} linear parameters solved for" if self.linear else ""
        ends = f"cost {self.given_cost:.6g} from the given start, {self.found_cost:.6g} from the best candidate"
        return (
            f"{self.n_finite} of {self.n_candidates} candidates finite on {self.n_rows} rows ({self.how}){solved}; "
            f"{len(self.polished)} polished; {ends}: the {'given start' if self.from_given else 'candidate'} is used"
        )


def seed_of(random_state: Any) -> int:
    """Return the seed that a ``random_state`` means: an int or a RandomState as in scikit-learn, and 0 for None."""
    return int(check_random_state(0 if random_state is None else random_state).randint(2**31 - 1))


def find_start(
    problem: LeastSquaresProblem,
    given: torch.Tensor,
    engine: LevenbergMarquardt,
    *,
    seed: int,
    n_candidates: int | str = "auto",
) -> tuple[torch.Tensor, Search]:
    """Search for a start from which the engine ends lower than from the given one.

    Parameters
    ----------
    problem : LeastSquaresProblem
        Its bounds, where it has any, hold for every point that is evaluated.
    given : Tensor, shape (n_params,)
        The start at hand, on the problem's first device.
    engine : LevenbergMarquardt
        Makes the fits that are compared, and is to make the one that counts.
    seed : int
        See :func:`seed_of`.
    n_candidates : int or "auto"
        "auto": 1,024, doubled for every parameter beyond two that is not linear, to 4,096 at most; fewer where rows
        or parameters are so many that this takes more than seconds.

    Returns
    -------
    theta : Tensor, shape (n_params,)
        The start: `given` itself, or a candidate after a few iterations.
    search : Search

    Raises
    ------
    NonFiniteError
        If neither the given start nor any candidate can be fitted.
    KeyboardInterrupt, or an error of the model that is not one of ``CALL_ERRORS``
        Passed on, with the best result so far as its attribute ``result``, if there is one.

    Notes
    -----
    Costs: up to 2²⁵ residuals for the candidates; 12 polishes of 15 iterations on at most 512 rows (on all, where rows
    are coupled); the fit from the given start and 3 more on all rows.
    """
    best: list[Result] = []  # the best end on all rows so far, with its start
    try:
        return _find(problem, given, engine, (seed, n_candidates), best)
    except BaseException as interrupt:
        ended = [*best, *([interrupt.result] if hasattr(interrupt, "result") else [])]
        ended = [result for result in ended if result.n_residuals == problem.n_residuals]  # not those on some rows
        if ended:
            interrupt.result = min(ended, key=lambda result: result.cost)  # type: ignore[attr-defined]
        elif hasattr(interrupt, "result"):
            del interrupt.result
        raise
    finally:
        problem.close()


def _find(
    problem: LeastSquaresProblem,
    given: torch.Tensor,
    engine: LevenbergMarquardt,
    options: tuple[int, int | str],
    best: list[Result],
) -> tuple[torch.Tensor, Search]:
    refused: BaseException | None = None
    try:
        from_given: Result | None = engine.minimize(problem, given)
    except (NonFiniteError, *CALL_ERRORS) as error:
        from_given, refused = None, error
    given_cost = math.inf if from_given is None else from_given.cost
    if from_given is not None:
        best.append(from_given)
        if from_given.status == Status.CONVERGED_RESIDUAL:  # exact: there is nothing lower
            return given, Search(0, 0, 0, "none", (), (), given_cost, math.inf, from_given)
    some = _thinned(problem, options[0])
    candidates = _Field.of(some, given, *options)
    rounds = [candidates.fresh()]
    ends = _polished(candidates, rounds[0], engine)
    for k in range(1, 1 + (FURTHER_ROUNDS if len(candidates.guessed) > 1 else 0)):
        if _agree(ends):
            break
        rounds.append(candidates.redrawn([theta for theta, _ in ends[:PARENTS]], k))
        ends = sorted([*ends, *_polished(candidates, rounds[-1], engine)], key=lambda end: end[1])
    theta, found = given, None
    for start in _finalists(ends):
        result = _minimized(problem, start, engine)
        if result is not None and (found is None or result.cost < found.cost):
            theta, found = start, result
            best[:] = [min([*best, result], key=lambda one: one.cost)]
        if found is not None and found.status == Status.CONVERGED_RESIDUAL:
            break
    if from_given is None and found is None:
        assert refused is not None
        raise refused
    search = Search(
        sum(len(costs) for _, costs in rounds),
        sum(int(torch.isfinite(costs).sum()) for _, costs in rounds),
        some.rows.n_samples,
        candidates.residuals.how,
        tuple(problem.names[j] for j in candidates.linear),
        tuple(cost for _, cost in ends),
        given_cost,
        math.inf if found is None else found.cost,
    )
    if search.from_given:
        return given, replace(search, end=from_given)
    return theta, replace(search, end=found)


def _agree(ends: Sequence[tuple[torch.Tensor, float]]) -> bool:
    """Return whether the three best ends, from starts apart, are one minimum: further rounds would find it again."""
    costs = [cost for _, cost in ends[:AGREEING]]
    return len(costs) == AGREEING and costs[-1] - costs[0] <= SAME_END * costs[0]


def _finalists(ends: Sequence[tuple[torch.Tensor, float]]) -> list[torch.Tensor]:
    """Return the best ends, one of each cost: equal costs are the same minimum, or its mirror image."""
    chosen: list[tuple[torch.Tensor, float]] = []
    for theta, cost in ends:
        if all(abs(cost - other) > SAME_END * other for _, other in chosen):
            chosen.append((theta, cost))
    return [theta for theta, _ in chosen[:FINALISTS]]


def _minimized(problem: LeastSquaresProblem, theta: torch.Tensor, engine: LevenbergMarquardt) -> Result | None:
    """Return a fit, or None where it cannot be made."""
    try:
        result = engine.minimize(problem, theta)
    except CALL_ERRORS:  # not finite there, or the model raised: it is no start
        return None
    return result if math.isfinite(result.cost) else None


def _thinned(problem: LeastSquaresProblem, seed: int) -> LeastSquaresProblem:
    """Return the problem on some of its rows, or itself where its rows are few or coupled.

    One row is drawn from each of equal parts, at random: evenly spaced ones would take a fast oscillation for a slow
    one. Rows with the extremes of the first columns and of y are added.
    """
    n = problem.rows.n_samples
    if problem.coupled or n <= 2 * SEARCH_ROWS:
        return problem
    edges = np.linspace(0, n, SEARCH_ROWS + 1)
    drawn = edges[:-1] + np.random.default_rng(seed).random(SEARCH_ROWS) * np.diff(edges)
    chosen: set[int] = set(np.minimum(drawn.astype(int), n - 1).tolist())
    for part in (problem.rows.X, problem.rows.y):
        chosen |= set() if part is None else _extreme_rows(part)
    some = copy.copy(problem)
    some.__dict__.pop("target_norm", None)  # cached for all rows
    some.rows = problem.rows.some(torch.tensor(sorted(chosen)))
    some.n_residuals = problem.per_row * len(chosen)
    some._workers = Workers(len(problem.devices))
    return some


def _extreme_rows(part: torch.Tensor) -> set[int]:
    columns = part.reshape(part.shape[0], -1)[:, :4].double()
    return {*columns.argmin(0).tolist(), *columns.argmax(0).tolist()}


@dataclass(frozen=True)
class _Field:
    """Where candidates come from, and what they cost.

    Parameters
    ----------
    problem : LeastSquaresProblem
        On the rows of the search.
    residuals : ManyPoints
    linear, guessed : list of int
        Parameters that are solved for, and the others.
    bounds : (lower, upper), each Tensor (n_params,)
    draw : callable (n_points, seed) -> Tensor (n_points, n_params)
    number, seed : int
    given : Tensor, shape (n_params,), float64
    """

    problem: LeastSquaresProblem
    residuals: ManyPoints
    linear: list[int]
    guessed: list[int]
    bounds: tuple[torch.Tensor, torch.Tensor]
    draw: Callable[[int, int], torch.Tensor]
    number: int
    seed: int
    given: torch.Tensor

    @classmethod
    def of(cls, problem: LeastSquaresProblem, given: torch.Tensor, seed: int, n_candidates: int | str) -> "_Field":
        """Read scales from the data, and find the linear parameters."""
        n, device = problem.n_params, problem.device
        given = given.detach().double()
        bounds = _bounds(problem)
        scales = Scales.of(problem.rows.X, problem.rows.y)
        limits = bounds[0].cpu().numpy(), bounds[1].cpu().numpy()

        def drawn(n_points: int, seed: int) -> torch.Tensor:
            return torch.from_numpy(draw(given.cpu().numpy(), limits, scales, n_points, seed)).to(device)

        probes = drawn(PROBE_POINTS, seed)
        block = problem.probe(problem.rows.n_samples)
        residuals = ManyPoints.choose(problem, block, torch.cat([given[None], probes]))
        linear = [j for j in linear_parameters(residuals, probes) if bool(bounds[0][j] < bounds[1][j])]
        guessed = [j for j in range(n) if j not in set(linear)]
        number = _affordable(problem, len(linear)) if n_candidates == "auto" else int(n_candidates)
        return cls(problem, residuals, linear, guessed, bounds, drawn, number, seed, given)

    def fresh(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return candidates drawn from the scales, the given start among them, and their costs."""
        points = self.draw(self.number, self.seed)
        points[0] = self.given
        return self._solved(points)

    def redrawn(self, parents: Sequence[torch.Tensor], k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return candidates with one or two coordinates of a parent drawn anew, and their costs."""
        if not parents:
            return self.fresh()
        fresh = self.draw(self.number, self.seed + k)
        points = torch.stack(list(parents)).double()[torch.arange(self.number, device=fresh.device) % len(parents)]
        order = np.random.default_rng(self.seed + k).random((self.number, len(self.guessed))).argsort(axis=1)
        rows = torch.arange(self.number)[:, None]
        columns = torch.tensor(self.guessed)[torch.from_numpy(order[:, : min(REDRAWN, len(self.guessed) - 1)])]
        points[rows, columns] = fresh[rows, columns]
        return self._solved(points)

    def _solved(self, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch = max(1, MOST_NUMBERS // (self.problem.n_residuals * (1 + len(self.linear))))
        parts = [projected(self.residuals, part, self.linear, self.bounds) for part in points.split(batch)]
        return torch.cat([part for part, _ in parts]), torch.cat([part for _, part in parts])


def _affordable(problem: LeastSquaresProblem, n_linear: int) -> int:
    """Return how many candidates to draw, a power of two."""
    harder = min(max(0, problem.n_params - n_linear - EASY_DIMENSIONS), 20)
    number = min(MOST_CANDIDATES, CANDIDATES * 2**harder)
    limit = min(MOST_VALUES // (problem.n_residuals * (1 + n_linear)), MOST_NUMBERS // problem.n_params)
    while number > max(limit, LEAST_CANDIDATES):
        number //= 2
    return number


def _bounds(problem: LeastSquaresProblem) -> tuple[torch.Tensor, torch.Tensor]:
    found = getattr(problem, "bounds", None)
    if found is None:
        unbounded = torch.full((problem.n_params,), torch.inf, dtype=torch.float64, device=problem.device)
        return -unbounded, unbounded
    lower, upper = found
    return lower.double(), upper.double()


def _polished(
    field: _Field, candidates: tuple[torch.Tensor, torch.Tensor], engine: LevenbergMarquardt
) -> list[tuple[torch.Tensor, float]]:
    """Return the ends of a few iterations from the best candidates, best first, with their costs on these rows."""
    points, costs = candidates
    problem = field.problem
    order = [int(i) for i in costs.argsort(stable=True) if bool(torch.isfinite(costs[i]))]
    ranks = points.argsort(dim=0, stable=True).argsort(dim=0, stable=True).double() / len(points)
    chosen = _spread(ranks, order)
    starts = [points[i].to(device=problem.device, dtype=problem.dtype) for i in chosen]
    ranked = sorted(((_cost(problem, start), k) for k, start in enumerate(starts)), key=lambda pair: pair[0])
    short = replace(engine, max_iter=min(POLISH_ITERATIONS, engine.max_iter))
    ends = []
    for cost, k in ranked[:POLISHED]:
        result = _minimized(problem, starts[k], short) if math.isfinite(cost) else None
        if result is not None:
            ends.append((torch.from_numpy(result.theta).to(starts[k]), result.cost))
    problem.close()  # threads of the costs
    return sorted(ends, key=lambda end: end[1])


def _spread(ranks: torch.Tensor, order: Sequence[int]) -> list[int]:
    """Return candidates, best first, without those near a better one."""
    kept: list[int] = []
    for i in order:
        if len(kept) >= RANKED:
            break
        if not kept or bool(((ranks[kept] - ranks[i]).abs().amax(1) > NEAR).all()):
            kept.append(i)
    return kept


def _cost(problem: LeastSquaresProblem, theta: torch.Tensor) -> float:
    try:
        cost = problem.cost(theta)
    except CALL_ERRORS:
        return math.inf
    return cost if math.isfinite(cost) else math.inf
