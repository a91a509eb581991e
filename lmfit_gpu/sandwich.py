r"""Covariance where the noise is not that of the textbook: unequal variances, and robust losses.

At the minimum Σ w ψ(f_i) j_i = 0, with f the residuals in units of σ, j_i the rows of their raw Jacobian, ψ = ρ'f and
ψ' its derivative (f and 1 for plain least squares), the estimate is normal about the truth with covariance A⁻¹BA⁻¹,

.. math:: A = \sum_i w_i \psi'_i\, j_i j_i^T + \alpha, \qquad B = \sum_i w_i\, c_i\, \psi_i^2\, j_i j_i^T

(Huber, Proc. 5th Berkeley Symp. 1 (1967) 221; White, Econometrica 48 (1980) 817, doi:10.2307/1912934). Both are summed
in the coordinates of F (:mod:`lmfit_gpu.linear.covariance`), in which the rows are those of an orthonormal matrix
U = J F: no digit is lost to squaring J. With N observations, p parameters and leverages h_i = ‖u_i‖² the corrections
c_i are

=======  =====================  ===============================================================
kind     c                      source
=======  =====================  ===============================================================
HC0      1                      White (1980)
HC1      N/(N − p)              Hinkley (1977), doi:10.1080/00401706.1977.10489550
HC2      1/(1 − h_i)            MacKinnon and White (1985), doi:10.1016/0304-4076(85)90158-7
HC3      1/(1 − h_i)²           the same; best in small samples (Long and Ervin (2000),
                                doi:10.1080/00031305.2000.10474549)
=======  =====================  ===============================================================

``"robust"`` is HC3, and HC1 with a loss, where leverages do not correct ψ. ``"classical"`` takes the noise to be the
same everywhere (in units of σ): s²(JᵀJ)⁻¹, and with a loss Huber's

.. math:: K^2\, \frac{\sum w\psi^2/(N - p)}{\bar{\psi'}^2}\,(J^T J)^{-1}, \qquad
          K = 1 + \frac{p}{N}\,\frac{\mathrm{var}(\psi')}{\bar{\psi'}^2}

(Huber, Robust Statistics (1981), eq. 7.6.5). ψ' is of the data: where the loss is concave it is negative.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from lmfit_gpu.backends import get_backend
from lmfit_gpu.jacobian import Derivatives, Jacobian
from lmfit_gpu.linear import MANY_PARAMS, Estimable, linearize
from lmfit_gpu.losses import Loss
from lmfit_gpu.outcome import arithmetic_error, what_is_known
from lmfit_gpu.problem import Block, LeastSquaresProblem
from lmfit_gpu.result import Result

__all__ = ["COVARIANCES", "jacobian_at", "sandwiched"]

COVARIANCES = ("classical", "robust", "HC0", "HC1", "HC2", "HC3")
OF_LOSSES = ("classical", "robust", "HC0", "HC1")
FINEST = {"differences": "3-point", "2-point": "3-point"}
FULL_LEVERAGE = 1e-9  # 1 - h below which a row determines a parameter alone: its residual says nothing
DEFINITE = 1e-8  # of the largest eigenvalue of A, which is about the mean of ψ'


def jacobian_at(problem: LeastSquaresProblem, jac: object, theta: torch.Tensor) -> Jacobian:
    """Return J at a solution, by the finest derivatives that an option `jac` stands for.

    Parameters
    ----------
    problem : LeastSquaresProblem
    jac : str or callable
        As in :class:`lmfit_gpu.LMRegressor`.
    theta : Tensor, shape (n_params,)
    """
    scheme: object = jac
    if isinstance(jac, str):
        scheme = "3-point" if jac == "auto" and not problem.differentiable else FINEST.get(jac, jac)
    jacobian = Derivatives.choose(problem, scheme, theta).at(theta)  # type: ignore[arg-type]
    with_gaps = jacobian.derivatives.is_autograd and jacobian.first_non_finite() is not None
    return jacobian.repaired() if with_gaps else jacobian


def _estimable_at(jacobian: Jacobian, held: np.ndarray) -> Estimable:
    problem = jacobian.problem
    solver = "qr" if problem.n_params <= MANY_PARAMS else "cholesky"
    lin = linearize(jacobian, solver, get_backend("scipy", torch.device("cpu")))
    norms = problem.target_norm + lin.residual_norm
    error = max(jacobian.derivatives.relative_error(lin.column_norms, norms), arithmetic_error(problem.dtype))
    return lin.with_scale(lin.scale, error).estimable(held)  # type: ignore[return-value]


def sandwiched(result: Result, plain: LeastSquaresProblem, jacobian: Jacobian, loss: Loss | None, kind: str) -> Result:
    """Return a result with the covariance of a kind.

    Parameters
    ----------
    result : Result
        Of the free parameters, with a factor.
    plain : LeastSquaresProblem
        The problem without its loss.
    jacobian : Jacobian
        Of `plain` at the solution.
    loss : Loss or None
    kind : {"classical", "robust", "HC0", "HC1", "HC2", "HC3"}
    """
    kind = ("HC3" if loss is None else "HC1") if kind == "robust" else kind
    known = _estimable_at(jacobian, result.held)
    result = replace(result, **what_is_known(known, plain, jacobian.theta))
    sums = _summed(jacobian, known.factor, loss, kind)
    size = float(result.n_residuals if result.n_observed is None else result.n_observed)
    reason, middle = "", np.full((result.rank, result.rank), np.nan)
    if not result.has_freedom:  # said elsewhere
        pass
    elif sums.full_leverage is not None and kind in ("HC2", "HC3"):
        reason = (
            f"covariance={kind!r}: residual {sums.full_leverage} alone determines a parameter (leverage 1) and says "
            "nothing of its own noise; 'HC1' or 'classical' do without"
        )
    else:
        found = sums.classical(size, result.dof) if kind == "classical" else sums.sandwich(size, result.dof, kind)
        if found is None:
            reason = f"covariance={kind!r}: the loss is concave on average at the minimum; bootstrap the errors"
        else:
            middle = found
    used = {**result.used, "covariance": kind} | ({"no covariance": reason} if reason else {})
    nfev, njev = result.nfev + jacobian.nfev, result.njev + 1
    return replace(result, sandwich=middle, used=used, nfev=nfev, njev=njev)


@dataclass(frozen=True)
class _Sums:
    """Sums over the observations in the coordinates of F.

    Parameters
    ----------
    curvature, meat : ndarray, shape (k, k)
        Σ w ψ' u uᵀ and Σ w c ψ² u uᵀ.
    prior : ndarray, shape (k, k)
        FᵀA²F of the penalty.
    moments : ndarray, shape (3,)
        Σ w ψ², Σ w ψ', Σ w ψ'².
    full_leverage : int or None
        The first residual with leverage 1.
    """

    curvature: np.ndarray
    meat: np.ndarray
    prior: np.ndarray
    moments: np.ndarray
    full_leverage: int | None

    def classical(self, size: float, dof: float) -> np.ndarray | None:
        """Return a root of K² s²/ψ̄' (ψ̄' UᵀU + P)⁻¹, or None where it is not positive definite."""
        squares, slope, slopes2 = self.moments / np.array([dof, size, size])
        if not slope > DEFINITE:
            return None
        correction = 1 + (size - dof) / size * max(slopes2 - slope**2, 0.0) / slope**2
        data = np.eye(len(self.prior)) - self.prior
        inverse = _inverse(slope * data + self.prior)
        return None if inverse is None else _root(correction**2 * squares / slope * inverse)

    def sandwich(self, size: float, dof: float, kind: str) -> np.ndarray | None:
        """Return a root of A⁻¹BA⁻¹, or None where A is not positive definite."""
        inverse = _inverse(self.curvature + self.prior)
        if inverse is None:
            return None
        return _root(inverse @ self.meat @ inverse * (size / dof if kind == "HC1" else 1.0))


def _summed(jacobian: Jacobian, factor: np.ndarray, loss: Loss | None, kind: str) -> _Sums:
    """Make one pass over the rows."""
    problem = jacobian.problem
    turn = torch.from_numpy(factor)
    k = turn.shape[1]

    def part(block: Block) -> list[torch.Tensor]:
        columns = jacobian.columns(block).double()
        turned = columns[:-1].T @ turn.to(columns.device)  # √w u, or the penalty's rows
        if block.penalty is not None:
            return [columns.new_zeros(2 * k * k + 3), (turned.T @ turned).reshape(-1), columns.new_zeros(0)]
        frequency = block.spread(columns[-1])[0]
        w = torch.ones_like(columns[-1]) if frequency is None else frequency
        f, h = columns[-1] / w**0.5, (turned**2).sum(1) / w
        psi, slope = (f, torch.ones_like(f)) if loss is None else loss.influence(f)
        c = {"HC2": 1 / (1 - h), "HC3": 1 / (1 - h) ** 2}.get(kind, torch.ones_like(h))
        curvature, meat = ((turned.T * weight) @ turned for weight in (slope, c * psi**2))
        moments = torch.stack([(w * term).sum() for term in (psi**2, slope, slope**2)])
        at = ((1 - h) < FULL_LEVERAGE).nonzero()[:1, 0] + problem.equations(block).start
        return [torch.cat((curvature.reshape(-1), meat.reshape(-1), moments)), columns.new_zeros(k * k), at]

    parts = list(problem.map_blocks(part))
    total, prior = (sum(found[i].cpu() for found in parts).numpy() for i in (0, 1))
    full = [int(found[2]) for found in parts if found[2].numel()]
    square = (k, k)
    return _Sums(
        total[: k * k].reshape(square),
        total[k * k : 2 * k * k].reshape(square),
        prior.reshape(square),
        total[2 * k * k :],
        min(full) if full else None,
    )


def _inverse(matrix: np.ndarray) -> np.ndarray | None:
    values, vectors = np.linalg.eigh(matrix)
    if not len(values) or not values[0] > DEFINITE * max(values[-1], DEFINITE):
        return None if len(values) else matrix
    found: np.ndarray = (vectors / values) @ vectors.T
    return found


def _root(matrix: np.ndarray) -> np.ndarray:
    """Return the symmetric root of a positive semidefinite matrix."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    found: np.ndarray = (vectors * values.clip(min=0.0) ** 0.5) @ vectors.T
    return found
