"""What a fit returns: why it stopped, every trial it made, and reports of both."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np
from scipy.special import ndtri, stdtrit

from lmfit_gpu.estimability import Unseen, unseen_directions
from lmfit_gpu.linear.covariance import marked_covariance
from lmfit_gpu.report import Report, report_of

__all__ = ["ENDS_OF_TRAINING", "IterationRecord", "Result", "Status", "Stop", "t_quantile"]


class Status(IntEnum):
    """Why a fit stopped; members above 0 mean converged."""

    CONVERGED_GRADIENT = 1
    CONVERGED_COST = 2
    CONVERGED_STEP = 3
    CONVERGED_RESIDUAL = 4
    CONVERGED_CURVATURE = 5
    MAX_ITER = 0
    STALLED = -1
    STALLED_AT_PRECISION = -2
    NON_FINITE_JACOBIAN = -3
    STOPPED_BY_CALLBACK = -4
    INTERRUPTED = -5
    STOPPED_EARLY = -6
    SLOW_PROGRESS = -7


ENDS_OF_TRAINING = (Status.STOPPED_EARLY, Status.SLOW_PROGRESS)  # no minimum, and none was asked for

MEASURE = {  # what is compared with the limit, and what to try
    Status.CONVERGED_GRADIENT: ("cosine of residual and Jacobian columns", ""),
    Status.CONVERGED_COST: ("relative reduction still to gain", ""),
    Status.CONVERGED_STEP: ("largest relative step of a parameter", ""),
    Status.CONVERGED_RESIDUAL: ("norm of the residual, zero to rounding,", ""),
    Status.CONVERGED_CURVATURE: ("relative reduction that Newton's step with the true Hessian promises", ""),
    Status.MAX_ITER: ("iterations", "raise max_iter, or start nearer (p0)"),
    Status.STALLED: (
        "length of the last step",
        "no shorter step lowers the cost: check the model for jumps, its jac, or start elsewhere (p0)",
    ),
    Status.STALLED_AT_PRECISION: (
        "predicted reduction",
        "it is below the rounding of the cost: use float64, or rescale nearly collinear parameters",
    ),
    Status.NON_FINITE_JACOBIAN: (
        "non-finite columns of the Jacobian",
        "try jac='3-point', or start elsewhere (p0)",
    ),
    Status.STOPPED_BY_CALLBACK: ("iterations", ""),
    Status.INTERRUPTED: ("iterations", ""),
    Status.STOPPED_EARLY: ("least cost of the held-out rows", ""),
    Status.SLOW_PROGRESS: ("relative fall of the cost in the last trials", "ftol=0 goes on"),
}
TABLE_HEAD = f"{'iter':>5} {'cost':>14} {'trial cost':>14} {'gain':>9} {'damping':>9} {'|D p|':>9} {'cosine':>9}  trial"


@dataclass(frozen=True)
class Stop:
    """A status with what was measured and the limit it is held against."""

    status: Status
    measured: float
    limit: float
    what: str = ""
    note: str = ""

    @property
    def message(self) -> str:
        """One sentence: status, value, limit, remedy."""
        what, remedy = MEASURE[self.status]
        text = f"{self.status.name}: {self.what or what} {self.measured:.3g}"
        if np.isfinite(self.limit):
            text += f", limit {self.limit:.3g}"
        return "; ".join(part for part in (text, self.note, remedy) if part)


@dataclass(frozen=True)
class IterationRecord:
    """One trial.

    Parameters
    ----------
    n_iter : int
        Number of the trial, from 1.
    cost : float
        Best cost after the trial.
    trial_cost : float
        Cost at the trial point (NaN or inf when not finite).
    gain_ratio : float
        Actual over predicted reduction.
    damping : float
        λ of the step.
    scaled_norm : float
        ‖D p‖, in units of the residual.
    gradient_cosine : float
        max_j |J_jᵀr| / (‖J_j‖‖r‖) where the step started.
    accepted, accelerated : bool
    jac : str
        How the Jacobian there was computed.
    predicted_reduction : float
        −gᵀp − ½‖Jp‖² of the step, in units of the cost.
    n_inner : int
        Inner iterations of the step, with solver="cg".
    held_out_cost : float
        Cost of the rows held out for early stopping, at the best point after the trial; NaN without any.
    seconds : float
        Since the fit began; NaN where nobody looked at a clock. Not compared.
    """

    n_iter: int
    cost: float
    trial_cost: float
    gain_ratio: float
    damping: float
    scaled_norm: float
    gradient_cosine: float
    accepted: bool
    accelerated: bool
    jac: str
    predicted_reduction: float = float("nan")
    n_inner: int = 0
    held_out_cost: float = float("nan")
    seconds: float = field(default=float("nan"), compare=False)


@dataclass(frozen=True)
class Result:
    """Outcome of a minimisation; the point is the best one found, however the fit ended.

    Parameters
    ----------
    theta : ndarray, shape (n_params,), float64
    names : sequence of str
    cost : float
        What was minimised, at theta: ½‖r‖² in the plain case.
    stop : Stop
    n_iter : int
        Trials: evaluations of the cost at trial points.
    nfev : int
        Evaluations of the model over all rows: trials, linearisations (differences count each) and curvatures.
    njev : int
        Linearisations.
    n_residuals : int
    history : sequence of IterationRecord
    used : dict
        What "auto" options became: jac, solver, backend, damping, devices, chunk_rows, rows.
    factor : ndarray, shape (n_params, k), or None
        F with F Fᵀ = (JᵀJ)⁻¹ on what the data determine, not scaled (:mod:`lmfit_gpu.linear.covariance`); rows of fixed
        and held parameters are 0. None where the solver keeps no dense matrix (dual and cg with more than 1,000
        parameters).
    null : ndarray, shape (n_params, q)
        Directions of theta that the data do not see.
    units : ndarray, shape (n_params,)
        The change of each parameter that moves the residuals by 1; what sizes in `null` are to be held against.
    condition : float
        Condition number of J with columns of length 1, on what the data determine.
    rank : int
        Numerical rank of J; without a factor the smaller of its sides.
    undetermined : ndarray of bool, shape (n_params,)
    held : ndarray of bool, shape (n_params,)
        Parameters on a bound, kept there for the others, and those tied to them: they have no standard error.
    sandwich : ndarray, shape (k, k), or None
        M with covariance F M Mᵀ Fᵀ (:mod:`lmfit_gpu.sandwich`); None: M Mᵀ = s² I.
    n_observed : float
        Residuals counted with their frequencies.
    absolute_sigma : bool
        The residuals are in standard deviations: the covariance is not scaled by s².
    roles : dict of int to str
        What is special about a parameter: on a bound, fixed, tied.
    penalty : float
        ½α‖weights‖², the part of the cost that is not of the data.
    shrinkage : float
        Parameters that the penalty determines rather than the data, of the rank.
    total_sum : float
        Σ w ((y − ȳ)/σ)², ȳ the weighted mean of each output: what R² is measured by. NaN where the residuals are not
        prediction minus target.
    log_sigma : float
        Σ w ln σ over the residuals; 0 without sigma.
    common_sigma : float
        The standard deviation of every observation that the fit was given; 1 without any, NaN where they differ.
    """

    theta: np.ndarray
    names: Sequence[str]
    cost: float
    stop: Stop
    n_iter: int
    nfev: int
    njev: int
    n_residuals: int
    history: Sequence[IterationRecord]
    used: dict[str, object]
    factor: np.ndarray | None = field(repr=False)
    null: np.ndarray = field(repr=False)
    units: np.ndarray = field(repr=False)
    condition: float
    rank: int
    undetermined: np.ndarray = field(repr=False)
    held: np.ndarray = field(repr=False)
    sandwich: np.ndarray | None = field(default=None, repr=False)
    n_observed: float | None = None
    absolute_sigma: bool = False
    roles: dict[int, str] = field(default_factory=dict, repr=False)
    penalty: float = 0.0
    shrinkage: float = 0.0
    total_sum: float = float("nan")
    log_sigma: float = 0.0
    common_sigma: float = 1.0

    @property
    def status(self) -> Status:
        """Why the fit stopped."""
        return self.stop.status

    @property
    def success(self) -> bool:
        """Whether the fit converged."""
        return self.status > 0

    @property
    def message(self) -> str:
        """The status with its measured value, its limit and what to try."""
        return self.stop.message

    @property
    def dof(self) -> float:
        """Degrees of freedom: residuals, counted with their frequencies, less the rank of J.

        With a penalty, less what the data determine of it: the effective number of parameters.
        """
        observed = (self.n_residuals if self.n_observed is None else self.n_observed) + self.shrinkage
        if self.shrinkage:  # with more parameters than residuals the trace leaves nothing, to rounding
            return max(observed - self.rank, 0.0)
        return int(observed) - self.rank if observed == int(observed) else observed - self.rank

    @property
    def has_freedom(self) -> bool:
        """Whether residuals are left to estimate s² from; with fewer than parameters, bounds leave none more."""
        bound = any("bound" in kind for kind in self.roles.values())
        return self.dof > 0 and not (bound and self.dof + self.rank < self.n_estimated)

    @property
    def n_estimated(self) -> int:
        """Parameters that are neither fixed nor tied."""
        return len(self.theta) - sum(kind in ("fixed", "tied") for kind in self.roles.values())

    def brief(self) -> str:
        """Return one line: outcome, cost and counts."""
        return (
            f"{'converged' if self.success else 'NOT converged'} ({self.status.name}) after {self.n_iter} iterations, "
            f"{self.nfev} model evaluations, {self.njev} linearisations: cost {self.cost:.6g}"
        )

    def table(self, last: int | None = None) -> str:
        """Return the iteration table, one line a trial.

        Parameters
        ----------
        last : int, optional
            Only so many last trials.
        """
        records = list(self.history)[-last:] if last else self.history
        return "\n".join([TABLE_HEAD, *(table_row(record) for record in records)])

    def report(self) -> Report:
        """Return the full account (:mod:`lmfit_gpu.report`): text, which a notebook shows as tables."""
        return report_of(self)

    def _repr_html_(self) -> str:
        """Return the report, for notebooks."""
        return report_of(self)._repr_html_()

    @property
    def chi_square(self) -> float:
        """Twice the cost of the data: Σ w (r/σ)² in the plain case."""
        return max(2 * (self.cost - self.penalty), 0.0)

    @property
    def s2(self) -> float:
        """s² = χ²/dof, the variance of an observation over σ²; 1 with absolute sigma, NaN without freedom."""
        if self.absolute_sigma:
            return 1.0
        return self.chi_square / self.dof if self.has_freedom else float("nan")

    @property
    def t_dof(self) -> float:
        """Degrees of freedom of the t distribution of the estimates; inf, a normal one, with absolute sigma."""
        return float("inf") if self.absolute_sigma and self.sandwich is None else float(self.dof)

    @property
    def has_variance(self) -> bool:
        """Whether there is an estimate of the noise, and with a sandwich of its effect."""
        if self.sandwich is not None:
            return self.has_freedom and bool(np.isfinite(self.sandwich).all())
        return self.absolute_sigma or self.has_freedom

    @property
    def root(self) -> np.ndarray | None:
        """R with covariance R Rᵀ on what the data determine, shape (n_params, k); NaN without freedom; None as factor.

        The variance of a combination cᵀθ is ‖Rᵀc‖² where c has no part in `null`.
        """
        if self.factor is None:
            return None
        if self.sandwich is not None:
            return self.factor @ self.sandwich if self.has_variance else np.full_like(self.factor, np.nan)
        return self.factor * self.s2**0.5

    @cached_property
    def covariance(self) -> np.ndarray | None:
        """Covariance of the parameters, shape (n_params, n_params), or None.

        s²(JᵀJ)⁻¹, s² = χ²/dof (1 with absolute sigma), or the sandwich. inf on the diagonal for parameters that the
        data do not determine, NaN for those on a bound (held fixed for the others), 0 for fixed ones; infinite
        throughout without a degree of freedom to estimate s² from.
        """
        root = self.root
        if root is None:
            return None
        covariance = marked_covariance(root, self.undetermined, self.held)
        if not self.has_variance:
            covariance = np.full_like(covariance, np.inf)
        covariance[self.exact], covariance[:, self.exact] = 0.0, 0.0
        return covariance

    @property
    def exact(self) -> np.ndarray:
        """Mask of the parameters that follow from no fitted one: fixed, or tied to fixed ones, shape (n_params,)."""
        fixed = np.array([self.roles.get(j) in ("fixed", "tied") for j in range(len(self.theta))])
        if self.factor is None:
            return np.array([self.roles.get(j) == "fixed" for j in range(len(self.theta))])
        return fixed & ~(self.held | self.undetermined | self.factor.any(1) | self.null.any(1))

    @cached_property
    def stderr(self) -> np.ndarray:
        """Standard errors, shape (n_params,): square roots of the diagonal of the covariance, marked as it is."""
        root = self.root
        if root is None:
            return np.where(self.exact, 0.0, np.nan)
        with np.errstate(over="ignore", invalid="ignore"):
            found = (root**2).sum(1) ** 0.5 if self.has_variance else np.full(len(root), np.inf)
        known = np.where(self.held & self.has_variance, np.nan, found)
        return np.where(self.exact, 0.0, np.where(self.undetermined, np.inf, known))

    @property
    def correlation(self) -> np.ndarray | None:
        """Correlations of the parameters, shape (n_params, n_params), or None; NaN where there is no variance."""
        if self.covariance is None:
            return None
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            found = self.covariance / self.stderr / self.stderr[:, None]
        return np.clip(np.where(np.isinf(found), np.nan, found), -1.0, 1.0)

    def conf_int(self, level: float = 0.95) -> np.ndarray:
        r"""Return intervals :math:`\hat\theta_j \pm t\, \mathrm{stderr}_j`, shape (n_params, 2).

        t is the quantile of Student's distribution with :attr:`t_dof` degrees of freedom. Infinite for parameters that
        the data do not determine, NaN for those on a bound.

        Parameters
        ----------
        level : float
            Between 0 and 1.
        """
        half = t_quantile(level, self.t_dof) * self.stderr
        with np.errstate(invalid="ignore"):
            return np.stack((self.theta - half, self.theta + half), axis=1)

    @cached_property
    def unseen(self) -> tuple[Unseen, ...]:
        """Directions of the parameters that the data do not determine, by name."""
        root = self.root
        if root is None or not self.null.size:
            return ()
        free = np.array([self.roles.get(j) not in ("fixed", "tied") for j in range(len(self.theta))])
        names = [name for name, is_free in zip(self.names, free, strict=True) if is_free]
        return unseen_directions(names, self.theta[free], self.null[free], self.units[free], root[free])


def t_quantile(level: float, dof: float) -> float:
    """Return t with P(|T| ≤ t) = level for Student's distribution; the normal one for infinite dof.

    Raises
    ------
    ValueError
        If the level is not between 0 and 1.

    Examples
    --------
    >>> round(t_quantile(0.95, 10), 4), round(t_quantile(0.95, float("inf")), 4)
    (2.2281, 1.96)
    """
    if isinstance(level, bool) or not isinstance(level, (int, float, np.integer, np.floating)) or not 0 < level < 1:
        raise ValueError(f"level: got {level!r}; a number between 0 and 1 is expected, such as 0.95")
    upper = 0.5 + level / 2
    if dof == np.inf:
        return float(ndtri(upper))
    return float(stdtrit(dof, upper)) if dof > 0 else float("nan")


def table_row(record: IterationRecord) -> str:
    """Return one line of the iteration table."""
    trial = ("accepted" if record.accepted else "rejected") + (", accelerated" if record.accelerated else "")
    return (
        f"{record.n_iter:5d} {record.cost:14.7e} {record.trial_cost:14.7e} {record.gain_ratio:9.2e} "
        f"{record.damping:9.2e} {record.scaled_norm:9.2e} {record.gradient_cosine:9.2e}  {trial}"
    )
