r"""From the free parameters of a fit to all of them: values, and what is known of them by the delta method.

With all = F(θ) and G = ∂F/∂θ, to first order a change of θ by the rows of a factor changes all parameters by those of G
times the factor; so both the factor of the covariance and the null directions are multiplied by G (Casella and Berger,
Statistical Inference, 2nd ed., section 5.5.4). A parameter tied to a combination that the data determine is determined,
also where the parameters in it are not.
"""

from dataclasses import replace

import numpy as np
import torch

from lmfit_gpu.constraints import Constraints
from lmfit_gpu.linear.covariance import UNDETERMINED
from lmfit_gpu.result import Result

__all__ = ["of_all_parameters"]


def of_all_parameters(result: Result, constraints: Constraints) -> Result:
    """Return the result of a fit of the free parameters as one of all.

    Parameters
    ----------
    result : Result
    constraints : Constraints
    """
    theta = torch.from_numpy(result.theta)
    free = np.flatnonzero(constraints.free)
    roles = {int(i): "fixed" for i in np.flatnonzero(~constraints.free)} | {t.index: "tied" for t in constraints.ties}
    roles |= {int(free[j]): role for j, role in result.roles.items()}
    slopes = constraints.derivative(theta).numpy()
    finite = np.where(np.isfinite(slopes), slopes, 0.0)
    depends = slopes != 0
    units = np.linalg.norm(finite * result.units, axis=1)
    units[units == 0] = 1.0
    null = finite @ result.null
    unknown = result.undetermined & ~_in_null(result.null, result.units)  # columns whose squares vanish
    steep = (depends & ~np.isfinite(slopes) & ~result.held).any(1)
    lost = _in_null(null, units) | (depends @ unknown > 0) | steep
    return replace(
        result,
        theta=constraints.full(theta).numpy(),
        names=constraints.names,
        factor=None if result.factor is None else finite @ result.factor,
        null=null,
        units=units,
        undetermined=lost,
        held=(depends @ result.held > 0) & ~lost,
        roles=roles,
    )


def _in_null(null: np.ndarray, units: np.ndarray) -> np.ndarray:
    """Return which parameters take part in null directions, shape (n,)."""
    found: np.ndarray = np.linalg.norm(null / units[:, None], axis=1) > UNDETERMINED
    return found
