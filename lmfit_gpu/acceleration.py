r"""Geodesic acceleration: a second-order correction to a damped step.

Along the step p the residuals curve by :math:`r_{vv} = p^T \nabla^2 r\, p`. The same damped system, solved for
that curvature, gives

.. math:: a = -(J^T J + \lambda D^2)^{-1} J^T r_{vv}, \qquad \theta_{trial} = \theta + p + \tfrac12 a,

used only while :math:`2 \|D a\| \le \alpha \|D p\|`, so that the series in p may be trusted
(Transtrum, Machta and Sethna, Phys. Rev. E 83 (2011) 036701, doi:10.1103/PhysRevE.83.036701; α = 0.75 there).
An undamped step after a trial whose gain was as predicted is left alone: the residuals are nearly linear over it.
"""

import torch

from lmfit_gpu.damping import DampingPolicy
from lmfit_gpu.jacobian import Jacobian
from lmfit_gpu.linear import Linearization, Step

__all__ = ["accelerated", "accelerates"]

ALPHA = 0.75
AS_PREDICTED = 0.01


def accelerates(policy: DampingPolicy, lin: Linearization, jacobian: Jacobian, step: Step, gain_ratio: float) -> bool:
    """Return whether a step is to be corrected.

    Parameters
    ----------
    policy : DampingPolicy
        Its ``accelerate`` is a bool, or "auto": where a correction costs less than a linearisation, and may help.
    lin : Linearization
    jacobian : Jacobian
    step : Step
        The step to correct; a Gauss-Newton step after a trial as predicted is left alone.
    gain_ratio : float
        Of the trial before; NaN when there was none.
    """
    if policy.accelerate != "auto":
        return bool(policy.accelerate)
    undamped = step.damping <= lin.least_damping
    return lin.accelerates and jacobian.can_accelerate and not (undamped and abs(gain_ratio - 1) <= AS_PREDICTED)


def accelerated(lin: Linearization, jacobian: Jacobian, step: Step) -> torch.Tensor | None:
    """Return p + ½a, shape (n,), or None when the correction is too large to trust or not finite."""
    curvature = jacobian.curvature(step.p)
    if not bool(torch.isfinite(curvature).all()):
        return None
    a = -lin.solve_rhs(step.damping, curvature.to(lin.gradient))
    size = float(torch.linalg.vector_norm(lin.scale * a))
    if 2 * size > ALPHA * step.scaled_norm:
        return None
    return step.p + 0.5 * a
