r"""The bootstrap: the spread of estimates over resampled data, without a linear model and without normal noise.

*residual*: the fitted curve with the noise drawn anew, target − prediction in units of σ, each over √(1 − h) of its
leverage h, so that it has the size of the noise, and centred (Davison and Hinkley, Bootstrap Methods and Their
Application (1997), section 7.4); x stays. The noise of all outputs of a row is drawn together.
*case*: rows drawn anew, as frequencies; right also where the size of the noise varies in an unknown way.

Intervals are bias-corrected and accelerated (Efron, J. Am. Stat. Assoc. 82 (1987) 171,
doi:10.1080/01621459.1987.10478410): the quantiles of the resampled estimates at

.. math:: \alpha' = \Phi\Bigl(z_0 + \frac{z_0 + z_\alpha}{1 - a (z_0 + z_\alpha)}\Bigr), \qquad
          z_0 = \Phi^{-1}(\text{share below the estimate}), \qquad
          a = \frac{\sum_i w_i l_i^3}{6 (\sum_i w_i l_i^2)^{3/2}},

l_i the influence of a row on the parameter, :math:`-F F^T j_i r_i/(1 - h_i)` summed over its outputs: the jackknife to
first order, without refitting (Davison and Hinkley, section 5.3.2), w_i its frequency. Under a loss r_i is ψ_i. Unlike
percentiles BCa intervals are right to the second order where estimates are biased and skewed, as they are in nonlinear
models. Where all estimates lie on one side, or the parameter is on a bound and no row has an influence, percentiles
stand in, which `kinds` says. A parameter that the data do not determine stays where its fits began: its interval is the
whole line. One that follows from no fitted one has its value for both ends.

A fit that fails, or whose data do not determine what those of the estimate do, is counted and left out.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy.special import ndtr, ndtri
from sklearn.utils import check_random_state

from lmfit_gpu.attempt import attempt
from lmfit_gpu.batch import Batch
from lmfit_gpu.compact import UnusualError
from lmfit_gpu.damping import damping_policy
from lmfit_gpu.exceptions import FitWarning, NonFiniteError
from lmfit_gpu.fitting import problem_of
from lmfit_gpu.levenberg_marquardt import LevenbergMarquardt
from lmfit_gpu.models import CALL_ERRORS
from lmfit_gpu.preparation import Data, targets_of
from lmfit_gpu.result import t_quantile
from lmfit_gpu.rows import Weights, as_tensor
from lmfit_gpu.solution import Solution
from lmfit_gpu.warning_filters import warnings_here

__all__ = ["METHODS", "Bootstrap", "bootstrap"]

METHODS = ("residual", "case")
FULL_LEVERAGE = 1e-9
ROUNDING = 1e-9  # of 1 − level
MANY_FAILED = 0.01  # of the resamples
MOST_NUMBERS = 4_000_000  # of resampled targets that are kept at a time: 32 MB


@dataclass(frozen=True)
class Bootstrap:
    """Estimates of resampled data.

    Parameters
    ----------
    names : tuple of str
    estimate : ndarray, shape (n_params,)
        Of the data themselves.
    theta : ndarray, shape (n_resamples - n_failed, n_params)
        All parameters of every resample whose fit converged.
    stderr, bias : ndarray, shape (n_params,)
        Standard deviation of the estimates, and their mean less the estimate; inf and NaN where not determined.
    intervals : dict of str to (lower, upper)
    kinds : dict of str to {"BCa", "percentile", "fixed", "undetermined"}
        How each interval was made.
    method : {"residual", "case"}
    level : float
    n_resamples, n_failed : int
    """

    names: tuple[str, ...]
    estimate: np.ndarray = field(repr=False)
    theta: np.ndarray = field(repr=False)
    stderr: np.ndarray
    bias: np.ndarray = field(repr=False)
    intervals: dict[str, tuple[float, float]]
    kinds: dict[str, str] = field(repr=False)
    method: str
    level: float
    n_resamples: int
    n_failed: int

    def __str__(self) -> str:
        """Return a table of the parameters."""
        percent = f"{100 * self.level:g} %"
        rows: list[tuple[str, ...]] = [
            ("parameter", "estimate", "std error", "bias", f"lower {percent}", f"upper {percent}", "")
        ]
        for j, name in enumerate(self.names):
            low, high = self.intervals[name]
            numbers = (self.estimate[j], self.stderr[j], self.bias[j], low, high)
            rows.append((name, *(f"{number:.5g}" for number in numbers), self.kinds[name]))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        head = f"{self.method} bootstrap, {self.n_resamples} resamples, {self.n_failed} failed"
        return "\n".join([head, *(line.rstrip() for line in lines)])


def bootstrap(solution: Solution, n_resamples: int, method: str, level: float, random_state: Any) -> Bootstrap:
    """Return the bootstrap of a fit.

    Parameters
    ----------
    solution : Solution
    n_resamples : int
    method : {"residual", "case"}
    level : float
    random_state : int, RandomState or None

    Raises
    ------
    ValueError
        For arguments that are not allowed, and for models whose rows or residuals cannot be drawn.

    Warns
    -----
    FitWarning
        If more than a hundredth of the fits do not converge.
    """
    _check(solution, n_resamples, method, level)
    generator = check_random_state(random_state)
    with warnings_here("ignore"):
        draws = _Residuals(solution) if method == "residual" else _Cases(solution)
        batch = Batch(solution.problem) if Batch.takes(solution) else None
        ends: list[np.ndarray | None] = []
        some = max(1, MOST_NUMBERS // solution.problem.n_residuals)
        for first in range(0, n_resamples, some):
            raw = np.stack([draws.draw(generator) for _ in range(min(some, n_resamples - first))])
            found = [None] * len(raw) if batch is None else _together(solution, draws, raw, batch)
            ends += [_fit(solution, draws.data(one)) if at is None else at for at, one in zip(found, raw, strict=True)]
    theta = np.array([end for end in ends if end is not None]).reshape(-1, len(solution.result.theta))
    n_failed = n_resamples - len(theta)
    if len(theta) < 2:
        raise ValueError(f"bootstrap: {n_failed} of {n_resamples} fits of resampled data failed; nothing is left")
    if n_failed > MANY_FAILED * n_resamples:
        warnings.warn(
            f"bootstrap: {n_failed} of {n_resamples} fits of resampled data did not converge and are left out; the "
            "rest may be the easier ones",
            FitWarning,
            stacklevel=4,
        )
    return _summed_up(solution, theta, (method, level, n_resamples), draws)


def _check(solution: Solution, n_resamples: int, method: str, level: float) -> None:
    t_quantile(level, 1.0)  # checks the level
    if method not in METHODS:
        raise ValueError(f"method: got {method!r}; 'residual' or 'case' is expected")
    if isinstance(n_resamples, bool) or not isinstance(n_resamples, (int, np.integer)) or n_resamples < 2:
        raise ValueError(f"n_resamples: got {n_resamples!r}; a whole number >= 2 is expected")
    if n_resamples * (1 - level) / 2 < 1 - ROUNDING:
        raise ValueError(
            f"n_resamples: got {n_resamples}, too few for intervals of level {level:g}: at least "
            f"{int(np.ceil(2 / (1 - level) - ROUNDING))} are needed, better ten times as many"
        )
    if method == "residual" and (solution.setup.model.is_residual or solution.data.y is None):
        raise ValueError(
            "method='residual': residuals of a residual callable are not prediction minus target; use method='case'"
        )
    if method == "case" and (solution.problem.coupled or solution.problem.per_row == 0):
        raise ValueError("method='case': the model couples rows, they cannot be drawn alone; use method='residual'")
    if not solution.result.success:
        raise ValueError(f"bootstrap: the fit has not converged ({solution.result.status.name})")
    if not solution.result.has_freedom:
        raise ValueError(
            f"bootstrap: {solution.problem.n_residuals} residuals and rank {solution.result.rank} leave no degree of "
            "freedom; the residuals say nothing of the noise"
        )


class _Draws:
    """What resampling needs of a fit: leverages, and residuals in units of sigma.

    Parameters
    ----------
    solution : Solution
    """

    def __init__(self, solution: Solution) -> None:
        self.solution = solution
        result = solution.result
        columns = self._columns(plain=True)
        frequency = solution.data.weights.frequency if solution.data.weights is not None else None
        per_row = solution.problem.per_row or 1
        w = np.ones(columns.shape[1]) if frequency is None else np.repeat(frequency.numpy(), per_row)
        rows, residual = columns[:-1] / w**0.5, columns[-1] / w**0.5
        factor = np.zeros((rows.shape[0], 0)) if result.factor is None else result.factor[solution.free]
        turned = factor.T @ rows
        self.noise, self.h = -residual, (turned**2).sum(0)
        pull = turned * residual  # (k, m): that of the cost at each residual
        if solution.problem.loss is not None:
            columns = self._columns(plain=False)
            pull = factor.T @ columns[:-1] * columns[-1] / w
        every = np.zeros((len(result.theta), 0)) if result.factor is None else result.factor
        by_residual = -every @ pull / np.maximum(1 - self.h, FULL_LEVERAGE)
        self.influence = by_residual.reshape(len(every), -1, per_row).sum(2)  # (n_all, n_samples)
        self.w = w.reshape(-1, per_row)[:, 0]  # (n_samples,)

    def _columns(self, plain: bool) -> np.ndarray:
        """Return J and r, shape (n_free + 1, m)."""
        m = self.solution.problem.n_residuals
        columns: np.ndarray = self.solution.jacobian(plain=plain).whole()[:, :m].double().cpu().numpy()
        return columns


class _Residuals(_Draws):
    """Fitted values with residuals drawn anew."""

    def __init__(self, solution: Solution) -> None:
        super().__init__(solution)
        scaled = self.noise / np.sqrt(np.maximum(1 - self.h, FULL_LEVERAGE))
        scaled[1 - self.h <= FULL_LEVERAGE] = 0.0  # its residual is 0 whatever the noise
        scaled = scaled.reshape(len(self.w), -1)
        self.share = self.w / self.w.sum()
        self.scaled = scaled - self.share @ scaled
        target = as_tensor(solution.data.y).double().cpu().numpy()
        self.shape = target.shape
        inverse = None
        if solution.data.weights is not None:
            inverse = solution.data.weights.read(slice(None), target.size, torch.device("cpu"), torch.float64)[1]
        self.sigma = np.ones(target.size) if inverse is None else 1 / inverse.numpy()
        self.fitted = target.reshape(-1) - self.noise * self.sigma

    def draw(self, generator: np.random.RandomState) -> np.ndarray:
        """Return targets with another noise, shape (m,); rows of a frequency share its mean."""
        n = len(self.scaled)
        some = generator.randint(n, size=n) if (self.w == 1).all() else generator.choice(n, size=n, p=self.share)
        noise = self.scaled[some] / np.sqrt(self.w)[:, None]
        drawn: np.ndarray = self.fitted + noise.reshape(-1) * self.sigma
        return drawn

    def data(self, raw: np.ndarray) -> Data:
        """Return the data of a draw."""
        return replace(self.solution.data, y=raw.reshape(self.shape))

    def terms(self, raw: np.ndarray, batch: Batch) -> dict[str, torch.Tensor]:
        """Return what a batch takes of draws, shape (B, m)."""
        return {"target": torch.from_numpy(raw)}


class _Cases(_Draws):
    """Rows drawn anew, as frequencies."""

    def draw(self, generator: np.random.RandomState) -> np.ndarray:
        """Return how often each row is drawn, shape (n_samples,)."""
        weights, n = self.solution.data.weights, len(self.solution.data.X)
        if weights is None or weights.frequency is None:
            return np.bincount(generator.randint(n, size=n), minlength=n)
        total = float(weights.frequency.sum())
        return generator.multinomial(round(total), (weights.frequency / total).numpy())

    def data(self, raw: np.ndarray) -> Data:
        """Return the data of a draw; rows that are not drawn are left out."""
        data = self.solution.data
        drawn = torch.from_numpy(np.flatnonzero(raw))
        sigma = None if data.weights is None or data.weights.sigma is None else data.weights.sigma[drawn]
        few = replace(data, weights=None).some(drawn)
        return replace(few, weights=Weights(torch.from_numpy(raw[raw > 0].astype(np.float64)), sigma))

    def terms(self, raw: np.ndarray, batch: Batch) -> dict[str, torch.Tensor]:
        """Return what a batch takes of draws, shape (B, m)."""
        counts = torch.from_numpy(raw.astype(np.float64)).repeat_interleave(self.solution.problem.per_row, dim=1)
        return {"factor": counts**0.5 * batch.inverse_sigma.cpu()}


def _together(
    solution: Solution, draws: "_Residuals | _Cases", raw: np.ndarray, batch: Batch
) -> list[np.ndarray | None]:
    """Return the fits of draws as one batch; None for those that did not converge in it."""
    start = solution.theta.double().cpu().expand(len(raw), -1)
    return [theta if good else None for theta, _, good in batch.fit(start, **draws.terms(raw, batch))]


def _fit(solution: Solution, data: Data) -> np.ndarray | None:
    """Return all parameters fitted to resampled data from the estimate, or None where that fails."""
    options, setup = solution.options, solution.setup
    unseen = solution.result.null.shape[1]
    tiny = attempt(_Started(options, solution.result.theta), data) if setup.constraints is None else None
    if tiny is not None:
        try:
            result = tiny.minimize()
        except (UnusualError, *CALL_ERRORS):
            result = None
        if result is not None and result.success:
            return None if result.null.shape[1] > unseen else result.theta
    rows = replace(setup.rows, X=as_tensor(data.X), y=targets_of(data.y), weights=data.weights)
    engine = LevenbergMarquardt(
        jac=options.jac,
        solver=options.solver,
        backend=options.backend,
        damping=damping_policy(options.damping),
        tolerances=(options.ftol, options.xtol, options.gtol),
        max_iter=options.max_iter,
        within_reach=setup.penalty is not None,
    )
    problem = None
    try:
        problem = problem_of(options, replace(setup, rows=rows, theta=solution.theta))
        result = engine.minimize(problem, solution.theta)
    except (NonFiniteError, *CALL_ERRORS):
        return None
    finally:
        if problem is not None:
            problem.close()
    if not result.success or result.null.shape[1] > unseen:
        return None
    if setup.constraints is None:
        return result.theta
    full: np.ndarray = setup.constraints.full(torch.from_numpy(result.theta)).numpy()
    return full


class _Started:
    """The options of a fit that starts at an estimate and says nothing."""

    def __init__(self, options: Any, theta: np.ndarray) -> None:
        self._options, self.p0 = options, theta
        self.warm_start, self.callback, self.verbose, self.covariance = False, None, 0, "classical"
        self.early_stopping = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._options, name)


def _summed_up(solution: Solution, theta: np.ndarray, said: tuple[str, float, int], draws: _Draws) -> Bootstrap:
    method, level, n_resamples = said
    result = solution.result
    estimate, exact, lost = result.theta, result.exact, result.undetermined
    theta[:, exact] = estimate[exact]
    intervals, kinds = {}, {}
    for j, name in enumerate(result.names):
        if exact[j]:
            intervals[name], kinds[name] = (float(estimate[j]), float(estimate[j])), "fixed"
        elif lost[j]:
            intervals[name], kinds[name] = (-np.inf, np.inf), "undetermined"
        else:
            a = acceleration(draws.influence[j], draws.w) if draws.influence[j].any() else np.nan
            intervals[name], kinds[name] = _interval(theta[:, j], float(estimate[j]), a, level)
    return Bootstrap(
        names=tuple(result.names),
        estimate=estimate,
        theta=theta,
        stderr=np.where(exact, 0.0, np.where(lost, np.inf, theta.std(axis=0, ddof=1))),
        bias=np.where(exact, 0.0, np.where(lost, np.nan, theta.mean(axis=0) - estimate)),
        intervals=intervals,
        kinds=kinds,
        method=method,
        level=level,
        n_resamples=n_resamples,
        n_failed=n_resamples - len(theta),
    )


def _interval(values: np.ndarray, estimate: float, a: float, level: float) -> tuple[tuple[float, float], str]:
    """Return the interval of one parameter and how it was made."""
    tails = np.array([(1 - level) / 2, (1 + level) / 2])
    below = ((values < estimate).sum() + 0.5 * (values == estimate).sum()) / len(values)
    kind = "percentile"
    if 0 < below < 1 and np.isfinite(a):
        z0 = ndtri(below)
        shifted = z0 + ndtri(tails)
        if (1 - a * shifted > 0).all():
            tails, kind = ndtr(z0 + shifted / (1 - a * shifted)), "BCa"
    low, high = np.quantile(values, tails)
    return (float(low), float(high)), kind


def acceleration(influence: Sequence[float] | np.ndarray, frequency: float | np.ndarray = 1.0) -> float:
    """Return a = Σ w l³ / (6 (Σ w l²)^{3/2}); 0 where nothing has any influence.

    Examples
    --------
    >>> round(acceleration([1.0, 1.0, -2.0]), 4)
    -0.068
    """
    l = np.asarray(influence, dtype=float)  # noqa: E741
    squares = float((frequency * l**2).sum())
    return float((frequency * l**3).sum() / (6 * squares**1.5)) if squares > 0 else 0.0
