r"""Tiny fits: the same algorithm on numpy arrays, for a numpy function of few rows and parameters.

A fit of 100 points and 3 parameters is about 45 evaluations of 4 microseconds; the general engine spends two hundred
times that on tensors, probes and immutable states. Here is its usual path alone: Moré's trust region in the D-norm with
geodesic acceleration, [J r] = Q R once a point, 2-point differences that become 3-point near the solution, and the stop
tests of :mod:`lmfit_gpu.termination` on the undamped step, believed on a 3-point J only.

Everything off that path raises :class:`UnusualError`: values that are not finite float64 (rows,), a difference step
that does not show or shows rounding, a singular J, a stall, no degree of freedom, too many trials. The caller then lets
the general engine fit from the start, so statuses, messages and remedies are the engine's. A trial that overflows is a
rejected trial here too.

State is mutable here (:class:`~lmfit_gpu.compact.loop.Loop`). docs/tiny_fits.md says where the time goes.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lmfit_gpu.compact.curve import Curve, RefusedError, UnusualError
from lmfit_gpu.compact.linear import MOST_PARAMS, Linear
from lmfit_gpu.compact.loop import Limits, Loop, Trial
from lmfit_gpu.damping import TrustRegion
from lmfit_gpu.linear.covariance import Estimable, estimable_of_columns
from lmfit_gpu.result import IterationRecord, Result, Status, Stop

__all__ = ["Answer", "Curve", "Limits", "UnusualError", "has_size", "minimize"]

ARRAY_ERRORS = (TypeError, ValueError, ArithmeticError)  # of numpy, for what f returned, and of floats
MOST_ENTRIES = 200_000  # of J: larger ones are not tiny


def has_size(n_residuals: int, n_params: int) -> bool:
    """Return whether a fit has the size that this path is for; fits without a degree of freedom do not."""
    return 0 < n_params <= MOST_PARAMS and n_params < n_residuals and n_residuals * n_params <= MOST_ENTRIES


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """A finished fit; :meth:`result` makes the full account of it."""

    lin: Linear
    stop: Stop
    trials: list[Trial]
    counts: tuple[int, int]  # nfev, njev
    covariance: np.ndarray  # (JᵀJ)⁻¹, shape (n, n)

    @property
    def theta(self) -> np.ndarray:
        """Parameters, shape (n,)."""
        return self.lin.point.theta

    @property
    def cost(self) -> float:
        """½‖r‖²."""
        return self.lin.point.cost

    def result(self, names: Sequence[str], known: Estimable | None = None) -> Result:
        """Return the :class:`~lmfit_gpu.result.Result` of the fit; `known` where J may be deficient."""
        nfev, njev = self.counts
        known = self.lin.estimable() if known is None else known
        used = {
            "path": "compact",
            "jac": self.lin.how[0],
            "solver": "qr",
            "backend": "scipy",
            "damping": TrustRegion(),
            "devices": ["cpu"],
            "chunk_rows": None,
            "rows": "evaluated all together",
        }
        return Result(
            theta=self.theta,
            names=names,
            cost=self.cost,
            stop=self.stop,
            n_iter=len(self.trials),
            nfev=nfev,
            njev=njev,
            n_residuals=len(self.lin.point.r),
            history=[_record(number, trial) for number, trial in enumerate(self.trials, 1)],
            used=used,
            factor=known.factor,
            null=known.null,
            units=known.units,
            condition=known.condition,
            rank=known.rank,
            undetermined=known.undetermined,
            held=known.held,
        )


def _record(number: int, trial: Trial) -> IterationRecord:
    lin, step, cost = trial.lin, trial.step, trial.cost
    return IterationRecord(
        n_iter=number,
        cost=cost if trial.accepted else lin.point.cost,
        trial_cost=cost,
        gain_ratio=trial.gain_ratio,
        damping=step.damping,
        scaled_norm=step.norm,
        gradient_cosine=lin.cosine(),
        accepted=trial.accepted,
        accelerated=trial.corrected,
        jac=lin.how[0],
        predicted_reduction=step.gain,
        seconds=trial.seconds,
    )


def minimize(curve: Curve, theta: np.ndarray, limits: Limits, names: Sequence[str]) -> Answer:
    """Minimise ½‖r‖² from a start.

    Parameters
    ----------
    curve : Curve
    theta : ndarray, shape (n,), float64
    limits : Limits
    names : sequence of str
        For the result that an interrupt carries.

    Raises
    ------
    UnusualError
        If the fit does not go cleanly to convergence.
    KeyboardInterrupt, or what f or jac raised while it was linearised
        With the result so far as its attribute ``result``, as :meth:`LevenbergMarquardt.minimize` does. At a trial
        point an error of f is a rejected trial.
    """
    loop = Loop(curve, limits)
    try:
        with np.errstate(all="ignore"):
            return _minimized(loop, theta)
    except RefusedError as refused:
        if not loop.njev:
            raise UnusualError("f or jac raises at the start") from refused
        error: Any = refused.__cause__
        error.result = _interrupted(loop, names)
        raise error from None
    except UnusualError:
        raise
    except BaseException as interrupt:  # Ctrl-C, or what nobody expects of f or jac
        if loop.njev:
            interrupt.result = _interrupted(loop, names)  # type: ignore[attr-defined]
        raise


def _minimized(loop: Loop, theta: np.ndarray) -> Answer:
    try:
        stop = loop.run(theta)
        covariance = loop.lin.covariance()
    except ARRAY_ERRORS as error:  # arrays that do not fit
        raise UnusualError(str(error)) from error
    except UnusualError:
        if loop.refused:  # f that raises where it did not is broken: another start would lose the best point
            loop.curve.at(loop.lin.point.theta, loop.spare.r)
        raise
    return Answer(loop.lin, stop, loop.trials, (loop.curve.nfev, loop.njev), covariance)


def _interrupted(loop: Loop, names: Sequence[str]) -> Result:
    stop = Stop(Status.INTERRUPTED, len(loop.trials), math.inf)
    known = estimable_of_columns(loop.lin.triangle, loop.lin.error(loop.curve))
    return Answer(loop.lin, stop, loop.trials, (loop.curve.nfev, loop.njev), known.factor @ known.factor.T).result(
        names, known
    )
