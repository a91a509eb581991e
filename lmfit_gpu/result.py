"""What a fit returns: why it stopped, every trial it made, and reports of both."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

__all__ = ["IterationRecord", "Result", "Status", "Stop"]


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
}


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


@dataclass(frozen=True)
class Result:
    """Outcome of a minimisation; the point is the best one found, however the fit ended.

    Parameters
    ----------
    theta : ndarray, shape (n_params,), float64
    names : sequence of str
    cost : float
        ½‖r‖² at theta.
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
        (JᵀJ)⁻¹ at theta, not scaled; inf on the diagonal for parameters the data do not determine. None where the
        solver keeps no dense matrix (dual and cg with more than 1,000 parameters).
    rank : int
        Numerical rank of J; without a covariance the smaller of its sides.
    undetermined : ndarray of bool, shape (n_params,)
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
    def dof(self) -> int:
        """Degrees of freedom: residuals less the rank of J."""
        return self.n_residuals - self.rank

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
        head = (
            f"{'iter':>5} {'cost':>14} {'trial cost':>14} {'gain':>9} {'damping':>9} {'|D p|':>9} {'cosine':>9}  trial"
        )
        records = list(self.history)[-last:] if last else self.history
        return "\n".join([head, *(table_row(record) for record in records)])

    def report(self) -> str:
        """Return the full account: outcome, options used, parameters with standard errors, iterations."""
        lines = [self.brief(), self.message, ""]
        lines += [f"  {key:12s} {value}" for key, value in self.used.items()]
        lines += ["", f"  {'parameter':>16} {'value':>22} {'std error':>12} {'relative':>9}"]
        lines += [self._parameter_line(j) for j in range(min(len(self.theta), 60))]
        if len(self.theta) > 60:
            lines.append(f"  ... and {len(self.theta) - 60} more")
        lines += ["", f"  residuals {self.n_residuals}, rank {self.rank}, degrees of freedom {self.dof}"]
        return "\n".join([*lines, "", self.table(last=40)])

    @property
    def stderr(self) -> np.ndarray:
        """Standard errors, shape (n_params,): the square root of the diagonal of s²(JᵀJ)⁻¹, s² = 2 cost/dof.

        NaN without a covariance.
        """
        scaled = scaled_covariance(self.covariance, self.cost, self.dof)
        if scaled is None:
            return np.full(len(self.theta), np.nan)
        with np.errstate(invalid="ignore"):
            return np.sqrt(np.diag(scaled))

    def _parameter_line(self, j: int) -> str:
        value, error = self.theta[j], self.stderr[j]
        relative = f"{100 * error / abs(value):8.2g}%" if value != 0 and np.isfinite(error) else ""
        return f"  {self.names[j]:>16} {value:22.15g} {error:12.4g} {relative:>9}"


def scaled_covariance(covariance: np.ndarray | None, cost: float, dof: int) -> np.ndarray | None:
    """Return s²(JᵀJ)⁻¹ with s² = 2 cost / dof; infinite throughout when no degree of freedom is left; None of None."""
    if covariance is None:
        return None
    if dof <= 0:
        return np.full_like(covariance, np.inf)
    return covariance * (2 * cost / dof)


def table_row(record: IterationRecord) -> str:
    """Return one line of the iteration table."""
    trial = ("accepted" if record.accepted else "rejected") + (", accelerated" if record.accelerated else "")
    return (
        f"{record.n_iter:5d} {record.cost:14.7e} {record.trial_cost:14.7e} {record.gain_ratio:9.2e} "
        f"{record.damping:9.2e} {record.scaled_norm:9.2e} {record.gradient_cosine:9.2e}  {trial}"
    )
