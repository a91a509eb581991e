r"""How sure a prediction is: standard errors and bands of f(x, θ̂), block by block of rows.

To first order a prediction moves with the parameters by its gradient g(x) = ∂f/∂θ, so with R Rᵀ the covariance of θ̂

.. math:: \mathrm{se}(x) = \| R^T g(x) \|, \qquad
          f(x, \hat\theta) \pm q\, \mathrm{se}(x) \quad\text{or}\quad
          f(x, \hat\theta) \pm q \sqrt{\mathrm{se}(x)^2 + s^2\sigma(x)^2}

for the mean and for a new observation, q the quantile of Student's t (Seber and Wild, Nonlinear Regression (1989),
section 5.1, doi:10.1002/0471725315). A *simultaneous* band holds for all x at once: q² = k F(level; k, dof), k the rank
(Scheffé, Biometrika 40 (1953) 87, doi:10.1093/biomet/40.1-2.87). For a network with a penalty R is that of the
posterior: the same formula is the linearised Laplace approximation (MacKay (1992), doi:10.1162/neco.1992.4.3.448).

Variances are sums of squares and never negative. A row needs n + k numbers: memory does not grow with the rows but for
what is returned. Cost: the Jacobian of the rows, and 2 k n flops a row.
"""

import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import chdtri, fdtri

from lmfit_gpu.blocks import Block
from lmfit_gpu.constraints import ConstrainedModel
from lmfit_gpu.exceptions import CovarianceWarning
from lmfit_gpu.jacobian import Jacobian
from lmfit_gpu.prediction import named_shape
from lmfit_gpu.preparation import Setup
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.report import not_estimated
from lmfit_gpu.result import Result, t_quantile
from lmfit_gpu.rows import as_tensor
from lmfit_gpu.sandwich import jacobian_at
from lmfit_gpu.threads import share_of_threads

__all__ = ["KINDS", "PredictionInterval", "gradients", "noise_of", "quantile", "standard_errors"]

KINDS = ("mean", "observation")
UNSEEN = {torch.float64: 1e-6, torch.float32: 1e-3}  # share of a gradient in null directions that is not rounding


class PredictionInterval(NamedTuple):
    """Predictions with the ends of their intervals, each in the shape of y."""

    prediction: Any
    lower: Any
    upper: Any


def gradients(setup: Setup, theta: np.ndarray, X: Any, options: Any) -> Jacobian:
    """Return the Jacobian of the predictions of rows by the free parameters; computes nothing yet but probes.

    Parameters
    ----------
    setup : Setup
        With a predictor.
    theta : ndarray, shape (n_all,)
    X : ndarray or Tensor, shape (n_samples, ...)
        Checked.
    options : LMRegressor
    """
    predictor: Any = setup.predictor
    if setup.constraints is not None:
        predictor = ConstrainedModel(predictor, setup.constraints)
        theta = theta[setup.constraints.free]
    at = torch.from_numpy(theta.copy()).to(setup.theta)
    tensor = as_tensor(X)
    alone = options.residual is not None and options.model is None
    y = None if alone else torch.zeros((), dtype=torch.float64).expand(len(tensor), *setup.y_shape)
    rows = replace(setup.rows, X=tensor, y=y, weights=None)
    with named_shape(setup, X):
        problem = LeastSquaresProblem(
            predictor, rows, at, devices=setup.devices, chunk_rows=options.chunk_rows, bounds=setup.bounds
        )
        jac = "auto" if callable(options.jac) and setup.model.is_residual else options.jac
        jacobian = jacobian_at(problem, jac, at)
    jacobian.keeps = False  # each block is read once
    return jacobian


@share_of_threads()
def standard_errors(setup: Setup, result: Result, X: Any, options: Any) -> torch.Tensor:
    """Return the standard errors of the mean at rows of X, float64, in y's shape; inf where not determined.

    Parameters
    ----------
    setup : Setup
        With a predictor.
    result : Result
        With a factor.
    X : ndarray or Tensor, shape (n_samples, ...)
        Checked.
    options : LMRegressor

    Warns
    -----
    CovarianceWarning
        Once, where some are infinite.
    """
    root = result.root
    assert root is not None
    free = slice(None) if setup.constraints is None else torch.from_numpy(setup.constraints.free)
    turn = torch.from_numpy(root if result.has_variance else np.zeros_like(root))[free]
    null = torch.from_numpy(result.null)[free]
    units = torch.from_numpy(result.units)[free]
    jacobian = gradients(setup, result.theta, X, options)
    tolerance = UNSEEN[jacobian.problem.dtype]

    def of_block(block: Block) -> torch.Tensor:
        g = jacobian.columns(block)[:-1].double()  # (n, c)
        found = torch.linalg.vector_norm(turn.T.to(g.device) @ g, dim=0)
        if null.shape[1] or not result.has_variance:
            scaled = units.to(g.device)[:, None] * g
            sizes = torch.linalg.vector_norm(scaled, dim=0)
            hidden = torch.linalg.vector_norm((null / units[:, None]).T.to(g.device) @ scaled, dim=0)
            unknown = (hidden > tolerance * sizes) | ((sizes > 0) & (not result.has_variance))
            found = torch.where(unknown, torch.inf, found)
        return found.to(jacobian.problem.device)

    try:
        found = torch.cat(list(jacobian.problem.map_blocks(of_block)))
    finally:
        jacobian.problem.close()
    if bool(torch.isinf(found).any()):
        warnings.warn(_unknown(result, int(torch.isinf(found).sum())), CovarianceWarning, stacklevel=4)
    return found.reshape(len(X), *setup.y_shape) if found.numel() == len(X) * int(np.prod(setup.y_shape)) else found


def _unknown(result: Result, n: int) -> str:
    reason = not_estimated(result) or "directions of the parameters are not determined"
    return f"{n} predictions have an infinite standard error: {reason}"


def noise_of(result: Result, sigma: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return the standard deviations of new observations, s σ(x), that broadcast to `shape`.

    Parameters
    ----------
    result : Result
    sigma : float or array_like, or None
        Standard deviations of the new observations, in the meaning of those of the fit.
    shape : tuple of int
        Of the predictions.

    Raises
    ------
    ValueError
        Where the noise is not known: no degree of freedom, a robust loss, a sandwich, or no sigma for rows whose fit
        had one that varied.
    """
    if result.sandwich is not None or not str(result.used.get("loss", "linear")).startswith("linear"):
        what = "covariance=" + repr(result.used.get("covariance", "")) if result.sandwich is not None else "a loss"
        raise ValueError(
            f"kind='observation': with {what} the noise has no common size to add; kind='mean' has a band, and a fit "
            "with loss='linear', covariance='classical' (and sigma= where the noise varies) has both"
        )
    if not np.isfinite(result.s2):
        raise ValueError(
            f"kind='observation': no degree of freedom is left to estimate the noise ({result.n_residuals} residuals, "
            f"rank {result.rank}); give more data, or sigma with absolute_sigma=True"
        )
    if "sigma" not in result.used:
        if sigma is not None:
            raise ValueError("sigma: the fit had none, all observations have the same noise; None is expected")
        return np.asarray(result.s2**0.5)
    if sigma is None:
        if not np.isfinite(result.common_sigma):
            raise ValueError("sigma: the fit had one that varied from row to row; give that of the new observations")
        sigma = result.common_sigma
    values = np.asarray(sigma.detach().cpu() if isinstance(sigma, torch.Tensor) else sigma, dtype=np.float64)
    if values.ndim == 1 and len(shape) == 2 and len(values) == shape[0]:
        values = values[:, None]
    if values.shape != () and values.shape not in (shape, (*shape[:1], 1)):
        raise ValueError(f"sigma: got shape {values.shape}; a number, {shape[:1]} or {shape} is expected")
    if not bool((np.isfinite(values) & (values > 0)).all()):
        raise ValueError("sigma: positive, finite standard deviations are expected")
    return np.asarray(result.s2**0.5 * values)


def quantile(result: Result, level: float, simultaneous: bool) -> float:
    """Return what standard errors are multiplied by: t, or Scheffé's root of k F."""
    if not simultaneous:
        return t_quantile(level, result.t_dof)
    t_quantile(level, 1.0)  # checks the level
    k = result.rank
    if result.t_dof == np.inf:
        return float(chdtri(k, 1 - level)) ** 0.5
    return float(k * fdtri(k, result.t_dof, level)) ** 0.5 if result.t_dof > 0 else float("inf")
