r"""When a fit has converged, and when it cannot go on.

At every accepted point the *undamped* step p is known, and with it what is still to gain. Three tests, each
scale-free, none with an absolute floor:

========  =====================================================  ===================================================
test      converged when                                         why it can be believed
========  =====================================================  ===================================================
gradient  max_j |J_jᵀr| / (‖J_j‖‖r‖) ≤ gtol                      MINPACK's cosine; r is orthogonal to the model
cost      predicted reduction of p ≤ ftol · cost                 Bates and Watts' relative offset, squared: p is
                                                                 that small a share of the standard errors
step      |p_j| ≤ xtol |θ_j| for every j                         every parameter has its digits
========  =====================================================  ===================================================

The tests look at the undamped step because a damped one is also short when the trust region is: in a narrow
valley ‖p(λ)‖ and its reduction fall below any tolerance far from the minimum. For the same reason the step test
is componentwise: one large term of ‖Dθ‖ (an offset of 1e10) would hide that the others still move.
A fourth test, *residual*, is met when ‖r‖ itself is rounding of the data.

In low precision, or with a nearly singular J, the step p is known only to ε κ(J D⁻¹); beyond
:data:`TRUSTED_ERROR` only the residual test counts, and the fit ends as STALLED_AT_PRECISION, which is not success.

Bates and Watts, Nonlinear Regression Analysis and Its Applications (1988), section 2.2.3.
"""

import numbers
from dataclasses import dataclass
from typing import Any

import torch

from lmfit_gpu.linear import Linearization, Step
from lmfit_gpu.result import Status, Stop

__all__ = [
    "AT_ROUNDING",
    "OF_NETWORKS",
    "REACH_AT_ROUNDING",
    "Tolerances",
    "check",
    "check_stalled",
    "gradient_cosine",
    "rounding_of_residual",
]

AUTO = {  # ftol, xtol, gtol
    torch.float64: (1e-17, 1e-14, 1e-14),
    torch.float32: (1e-8, 1e-4, 1e-6),
}
TRUSTED_ERROR = 1e-3  # relative error of the undamped step, ε κ, that a stop may rest on
# Where rounding of the cost ends a fit, the tests count up to these (ftol, xtol): in float64 3e-5 of the standard
# errors, or half the digits.
AT_ROUNDING = {torch.float64: (1e-9, 1e-8), torch.float32: (1e-7, 1e-3)}
OF_NETWORKS = {torch.float64: 1e-8, torch.float32: 1e-6}  # ftol: copied or dead units make minima that are flat
REACH_AT_ROUNDING = 1e-6  # where the gain is that of a step within reach (penalties, and the default network)
USUAL, STOP_AT_ROUNDING = AUTO[torch.float64], AT_ROUNDING[torch.float64]
TINY = 1e-300
HOPELESS = 1e-4  # of the rounding of the cost: the bound on it is a worst case
EXACT_FIT = 4.0  # ‖r‖ within this many roundings of the data is zero


@dataclass(frozen=True)
class Tolerances:
    """Limits of the stop tests; "auto" depends on the arithmetic.

    Parameters
    ----------
    ftol, xtol, gtol : float
        Relative predicted reduction, relative step, cosine of residual and columns.
    """

    ftol: float
    xtol: float
    gtol: float

    @classmethod
    def resolve(cls, ftol: float | str, xtol: float | str, gtol: float | str, dtype: torch.dtype) -> "Tolerances":
        """Return limits with "auto" replaced: 1e-17, 1e-14, 1e-14 in float64; 1e-8, 1e-4, 1e-6 in float32.

        Raises
        ------
        ValueError
            If a limit is not "auto" or a number >= 0.
        """
        given: dict[str, Any] = {"ftol": ftol, "xtol": xtol, "gtol": gtol}
        limits = {}
        for (name, value), default in zip(given.items(), AUTO[dtype], strict=True):
            if isinstance(value, str) and value == "auto":
                limits[name] = default
            elif _is_number(value) and value >= 0:
                limits[name] = float(value)
            else:
                raise ValueError(f"{name}: got {value!r}; a number >= 0 or 'auto' is expected")
        return cls(**limits)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def gradient_cosine(lin: Linearization) -> float:
    """Return max_j |J_jᵀr| / (‖J_j‖‖r‖), 0 when r or J is zero."""
    size = lin.column_norms * lin.residual_norm
    cosines = torch.where(size > 0, lin.gradient.abs() / size, torch.zeros_like(size))
    return float(cosines.max()) if cosines.numel() else 0.0


def rounding_of_residual(lin: Linearization, theta: torch.Tensor, target_norm: float) -> float:
    """Return the size of ‖δr‖ by rounding, ε(‖y‖ + ‖r‖ + (Σ ‖J_j‖²θ_j²)^½): data, residual, terms of the model."""
    terms = float(torch.linalg.vector_norm(lin.column_norms * theta.double()))
    return torch.finfo(theta.dtype).eps * (target_norm + lin.residual_norm + terms)


def check(
    lin: Linearization,
    undamped: Step | None,
    theta: torch.Tensor,
    rounding: float,
    tolerances: Tolerances,
    cost: float | None = None,
) -> Stop | None:
    """Return why the fit has converged at θ, or None.

    Parameters
    ----------
    lin : Linearization
    undamped : Step or None
        The step for the least λ the solver resolves; None: not known yet, only the residual is tested.
    theta : Tensor, shape (n_params,)
    rounding : float
        ‖δr‖ (:func:`rounding_of_residual`).
    tolerances : Tolerances
    cost : float, optional
        What is minimised, at θ; ½‖r‖² by default.
    """
    if lin.residual_norm <= EXACT_FIT * rounding:
        return Stop(Status.CONVERGED_RESIDUAL, lin.residual_norm, EXACT_FIT * rounding)
    if undamped is None or not undamped.valid or not trusted(lin, theta):
        return None
    cosine = gradient_cosine(lin)
    if cosine <= tolerances.gtol:
        return Stop(Status.CONVERGED_GRADIENT, cosine, tolerances.gtol)
    gain = relative_gain(lin, undamped, cost)
    if gain < 0:  # the step is not even one of descent: it is not known
        return None
    if gain <= tolerances.ftol:
        return Stop(Status.CONVERGED_COST, gain, tolerances.ftol)
    step = relative_step(undamped, theta)
    if step <= tolerances.xtol:
        return Stop(Status.CONVERGED_STEP, step, tolerances.xtol)
    return None


def check_stalled(  # noqa: PLR0913
    lin: Linearization,
    undamped: Step,
    theta: torch.Tensor,
    step: Step,
    rounding: float,
    cost: float | None = None,
    least_ftol: float = 0.0,
) -> Stop | None:
    """Return why a fit whose trial was rejected cannot go on, or None when a shorter step may still succeed.

    A trial whose predicted reduction is below the rounding of the cost, or whose step does not change θ, decides
    nothing. The fit has then converged if the undamped step has nearly nothing to gain; if not, shorter steps are
    tried until even rounding in the fit's favour could not show their gain.
    """
    epsilon = torch.finfo(theta.dtype).eps
    noise = rounding * lin.residual_norm  # |δ ½‖r‖²| <= ‖r‖‖δr‖
    if not step.valid:  # a failed factorisation: the next λ is larger
        return None
    moves = not bool(torch.equal(theta + step.p.to(theta), theta))
    if moves and step.predicted_reduction > noise:
        return None
    if undamped.valid and undamped.predicted_reduction >= 0 and trusted(lin, theta):
        ftol, xtol = AT_ROUNDING[theta.dtype]
        ftol = max(ftol, least_ftol)
        gain = relative_gain(lin, undamped, cost)
        if gain <= ftol:
            return Stop(Status.CONVERGED_COST, gain, ftol)
        change = relative_step(undamped, theta)
        if change <= xtol:
            return Stop(Status.CONVERGED_STEP, change, xtol)
    if moves and step.predicted_reduction > HOPELESS * noise:
        return None
    if step.predicted_reduction <= noise:
        return Stop(Status.STALLED_AT_PRECISION, step.predicted_reduction, noise)
    if not trusted(lin, theta):
        error = epsilon * lin.condition()
        return Stop(Status.STALLED_AT_PRECISION, error, TRUSTED_ERROR, "relative error of the undamped step")
    size = float(torch.linalg.vector_norm(lin.scale * theta.double()))
    return Stop(Status.STALLED, step.scaled_norm, epsilon * size)


def trusted(lin: Linearization, theta: torch.Tensor) -> bool:
    """Return whether the undamped step is known well enough to stop on."""
    epsilon = torch.finfo(theta.dtype).eps
    return epsilon * lin.condition_limit <= TRUSTED_ERROR or epsilon * lin.condition() <= TRUSTED_ERROR


def relative_gain(lin: Linearization, undamped: Step, cost: float | None = None) -> float:
    """Return the predicted reduction of the undamped step over the cost."""
    cost = 0.5 * lin.residual_norm**2 if cost is None else cost
    return undamped.predicted_reduction / max(cost, TINY)


def relative_step(undamped: Step, theta: torch.Tensor) -> float:
    """Return max_j |p_j| / |θ_j|; 0/0 is 0."""
    p, sizes = undamped.p.abs(), theta.double().abs()
    ratios = torch.where(p > 0, p / sizes, torch.zeros_like(p))
    return float(ratios.max()) if ratios.numel() else 0.0
