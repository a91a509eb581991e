"""What a fit returns: why it stopped, every trial it made, and reports of both."""

import html
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
import torch

from lmfit_gpu.constraints import Constraints

__all__ = ["ENDS_OF_TRAINING", "IterationRecord", "Result", "Status", "Stop", "of_all_parameters", "scaled_covariance"]

SHOWN_PARAMETERS = 60  # of a report


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
    covariance : ndarray, shape (n_params, n_params), or None
        (JᵀJ)⁻¹ at theta, not scaled; inf on the diagonal for parameters the data do not determine, NaN for those on
        a bound (held fixed for the others), 0 for fixed ones. None where the solver keeps no dense matrix (dual and
        cg with more than 1,000 parameters).
    rank : int
        Numerical rank of J; without a covariance the smaller of its sides.
    undetermined : ndarray of bool, shape (n_params,)
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
    covariance: np.ndarray | None = field(repr=False)
    rank: int = 0
    undetermined: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool), repr=False)
    n_observed: float | None = None
    absolute_sigma: bool = False
    roles: dict[int, str] = field(default_factory=dict, repr=False)
    penalty: float = 0.0
    shrinkage: float = 0.0

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

    def report(self) -> str:
        """Return the full account: outcome, options used, parameters with standard errors, iterations."""
        lines = [self.brief(), self.message, ""]
        lines += [f"  {key:12s} {value}" for key, value in self.used.items()]
        lines += ["", f"  {'parameter':>16} {'value':>22} {'std error':>12} {'relative':>9}"]
        lines += [self._parameter_line(j) for j in range(min(len(self.theta), SHOWN_PARAMETERS))]
        if len(self.theta) > SHOWN_PARAMETERS:
            lines.append(f"  ... and {len(self.theta) - SHOWN_PARAMETERS} more")
        lines += ["", f"  residuals {self.n_residuals}, rank {self.rank}, degrees of freedom {self.dof}"]
        return "\n".join([*lines, "", self.table(last=40)])

    def _repr_html_(self) -> str:
        """Return the outcome and a table of the parameters, for notebooks."""
        errors = self.stderr
        cells = [
            (self.names[j], f"{self.theta[j]:.6g}", f"{errors[j]:.3g}", self.roles.get(j, ""))
            for j in range(min(len(self.theta), SHOWN_PARAMETERS))
        ]
        rows = [("parameter", "value", "std error", ""), *cells]
        table = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        more = len(self.theta) - len(cells)
        return f"<p>{html.escape(self.brief())}</p><table>{table}</table>{f'<p>and {more} more</p>' if more else ''}"

    @property
    def stderr(self) -> np.ndarray:
        """Standard errors, shape (n_params,): the square root of the diagonal of s²(JᵀJ)⁻¹, s² = 2 cost/dof.

        With absolute sigma s² = 1. NaN without a covariance.
        """
        scaled = scaled_covariance(self)
        if scaled is None:
            return np.array([0.0 if self.roles.get(j) == "fixed" else np.nan for j in range(len(self.theta))])
        with np.errstate(invalid="ignore"):
            return np.sqrt(np.diag(scaled))

    def _parameter_line(self, j: int) -> str:
        value, error = self.theta[j], self.stderr[j]
        relative = f"{100 * error / abs(value):8.2g}%" if value != 0 and np.isfinite(error) else ""
        role = self.roles.get(j, "")
        return f"  {self.names[j]:>16} {value:22.15g} {error:12.4g} {relative:>9}  {role}".rstrip()


def scaled_covariance(result: Result) -> np.ndarray | None:
    """Return s²(JᵀJ)⁻¹, s² = 2 cost / dof, or 1 with absolute sigma; None without a covariance.

    A penalty is no part of the cost here.

    Infinite throughout, but for fixed parameters, when no degree of freedom is left to estimate s².
    """
    covariance = result.covariance
    if covariance is None or result.absolute_sigma:
        return covariance
    if not result.has_freedom:
        return np.where(covariance == 0, 0.0, np.inf) if result.roles else np.full_like(covariance, np.inf)
    with np.errstate(invalid="ignore"):  # inf stays inf, of a perfect fit too
        return np.where(
            np.isinf(covariance), covariance, covariance * (2 * (result.cost - result.penalty) / result.dof)
        )


def of_all_parameters(result: Result, constraints: Constraints) -> Result:
    """Return the result of a fit of the free parameters as one of all, tied ones by the delta method."""
    theta = torch.from_numpy(result.theta)
    free = np.flatnonzero(constraints.free)
    roles = {int(i): "fixed" for i in np.flatnonzero(~constraints.free)} | {t.index: "tied" for t in constraints.ties}
    roles |= {int(free[j]): role for j, role in result.roles.items()}
    n = len(constraints.names)
    undetermined = np.zeros(n, dtype=bool)
    undetermined[free] = result.undetermined
    covariance = None
    if result.covariance is not None:
        covariance = np.zeros((n, n))
        covariance[np.ix_(free, free)] = result.covariance
        if constraints.ties:
            slopes = constraints.derivative(theta).numpy()
            covariance, lost = _by_delta_method(result.covariance, slopes)
            undetermined |= lost
    return replace(
        result,
        theta=constraints.full(theta).numpy(),
        names=constraints.names,
        covariance=covariance,
        undetermined=undetermined,
        roles=roles,
    )


def _by_delta_method(covariance: np.ndarray, slopes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return G C Gᵀ, and which entries depend on a parameter that the data do not determine.

    Those are infinite; what depends on a parameter on a bound (NaN) is NaN.
    """
    diagonal = np.diag(covariance)
    known = np.where(np.isfinite(covariance), covariance, 0.0)
    steep = ~np.isfinite(slopes) & np.isfinite(diagonal)
    finite = np.where(np.isfinite(slopes), slopes, 0.0)
    scaled = finite @ known @ finite.T
    lost, held = ((slopes != 0) @ part > 0 for part in (np.isinf(diagonal), np.isnan(diagonal)))
    lost |= steep.any(axis=1)
    for mask, value in ((held, np.nan), (lost, np.inf)):
        scaled[mask], scaled[:, mask] = np.nan, np.nan
        scaled[mask, mask] = value
    fixed = ~(slopes != 0).any(axis=1)
    scaled[fixed], scaled[:, fixed] = 0.0, 0.0
    return scaled, lost


def table_row(record: IterationRecord) -> str:
    """Return one line of the iteration table."""
    trial = ("accepted" if record.accepted else "rejected") + (", accelerated" if record.accelerated else "")
    return (
        f"{record.n_iter:5d} {record.cost:14.7e} {record.trial_cost:14.7e} {record.gain_ratio:9.2e} "
        f"{record.damping:9.2e} {record.scaled_norm:9.2e} {record.gradient_cosine:9.2e}  {trial}"
    )
