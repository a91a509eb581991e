r"""What each row says of a fit: residuals in several units, leverage, influence, and order.

With rows j_i of J in units of σ, F F^T = (JᵀJ)⁻¹ and u_i = Fᵀ j_i, frequencies w counted in JᵀJ,

.. math:: h_i = \|u_i\|^2, \qquad
          t_i = \frac{r_i/\sigma_i}{s\sqrt{1 - h_i}}, \qquad
          t_i^* = t_i \sqrt{\frac{\mathrm{dof} - 1}{\mathrm{dof} - t_i^2}}, \qquad
          D_i = \frac{t_i^2}{p}\,\frac{h_i}{1 - h_i}

are the leverage of one observation, the internally and the externally studentised residual (the residual over its
standard deviation, s from all rows, and from all others), and Cook's distance, the shift of the estimate without the
row (Cook and Weisberg, Residuals and Influence in Regression (1982), chapters 2 and 3; for nonlinear models of the
linearised one: Seber and Wild (1989), section 5.13). Σ w h = p. The Durbin-Watson statistic of residuals e in the order
of the rows, Σ(e_i − e_{i−1})²/Σe_i², is near 2 for independent ones, below for neighbours that err together (Biometrika
37 (1950) 409).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lmfit_gpu.blocks import Block
from lmfit_gpu.solution import Solution

__all__ = ["Diagnostics", "diagnostics_of"]

FULL_LEVERAGE = 1e-9  # 1 - h below which a residual is 0 whatever the noise


@dataclass(frozen=True)
class Diagnostics:
    """Residuals and influence of every row, each in the shape of y, or (m,) for residual callables.

    Parameters
    ----------
    fitted : ndarray or None
        Predictions; None for residual callables.
    residual : ndarray
        Prediction − target, in the units of y.
    weighted : ndarray
        Over sigma, times the root of the frequency: what is squared and summed.
    leverage : ndarray
        h of one observation of each row, 0 to 1.
    standardised, studentised : ndarray
        Internally and externally studentised. NaN for leverage 1 and without a degree of freedom.
    cooks_distance : ndarray
    durbin_watson : float or ndarray, shape (n_outputs,)
        Of `weighted`, in the order of the rows.
    """

    fitted: np.ndarray | None
    residual: np.ndarray
    weighted: np.ndarray
    leverage: np.ndarray
    standardised: np.ndarray
    studentised: np.ndarray
    cooks_distance: np.ndarray
    durbin_watson: Any


def diagnostics_of(solution: Solution) -> Diagnostics:
    """Return the diagnostics of a fit.

    Parameters
    ----------
    solution : Solution

    Raises
    ------
    ValueError
        Under a loss, or where the solver keeps no covariance.
    """
    result, problem = solution.result, solution.problem
    if problem.loss is not None:
        raise ValueError(
            "diagnostics: leverage and studentised residuals are those of least squares; under a loss look at the "
            "residuals themselves: est.predict(X) - y"
        )
    if result.factor is None:
        raise ValueError(
            f"diagnostics: solver={result.used['solver']!r} keeps no covariance of {len(result.theta)} parameters; "
            "solver='cholesky' does"
        )
    jacobian = solution.jacobian()
    jacobian.keeps = False
    turn = torch.from_numpy(result.factor[solution.free])

    def of_block(block: Block) -> list[torch.Tensor] | None:
        if block.penalty is not None:
            return None
        columns = jacobian.columns(block).double()
        frequency, inverse_sigma = block.spread(columns[-1])
        ones = torch.ones_like(columns[-1])
        w = ones if frequency is None else frequency
        leverage = (turn.T.to(columns.device) @ columns[:-1]).square().sum(0) / w
        return [part.cpu() for part in (columns[-1], leverage, w, ones if inverse_sigma is None else inverse_sigma)]

    parts = [found for found in problem.map_blocks(of_block) if found is not None]
    weighted, h, w, inverse_sigma = (torch.cat([part[i] for part in parts]).numpy() for i in range(4))
    residual = weighted / w**0.5 / inverse_sigma
    f = weighted / w**0.5  # of one observation, in units of sigma
    left = np.where(1 - h > FULL_LEVERAGE, 1 - h, np.nan)
    s2 = result.chi_square / result.dof if result.has_freedom else np.nan
    with np.errstate(invalid="ignore", divide="ignore"):
        standardised = f / np.sqrt(s2 * left)
        room = result.dof - standardised**2  # exactly 0 where a row makes up all that is left
        studentised = np.where(
            room > 0, standardised * np.sqrt(max(result.dof - 1, 0) / np.where(room > 0, room, 1)), np.nan
        )
        cooks = standardised**2 * h / left / max(result.rank, 1)
    y = solution.data.y
    y = y.detach().cpu().numpy() if isinstance(y, torch.Tensor) else y
    shape = tuple(np.shape(y)) if y is not None and weighted.size == np.size(y) else weighted.shape
    fitted = None
    if not solution.setup.model.is_residual and y is not None:
        fitted = residual.reshape(shape) + np.asarray(y)
    in_order = weighted.reshape(shape[0], -1)
    squares = (in_order**2).sum(0)
    steps = (np.diff(in_order, axis=0) ** 2).sum(0)
    durbin_watson = np.divide(steps, squares, out=np.full(len(squares), np.nan), where=squares > 0)
    return Diagnostics(
        fitted=fitted,
        residual=residual.reshape(shape),
        weighted=weighted.reshape(shape),
        leverage=h.reshape(shape),
        standardised=standardised.reshape(shape),
        studentised=studentised.reshape(shape),
        cooks_distance=cooks.reshape(shape),
        durbin_watson=float(durbin_watson[0]) if len(shape) == 1 else durbin_watson,
    )
