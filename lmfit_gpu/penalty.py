r"""An L2 penalty on weights: more equations of the same least-squares problem.

.. math:: \tfrac12 \sum_j \alpha_j \theta_j^2 = \tfrac12 \| A\theta \|^2, \qquad A = \mathrm{diag}(\sqrt{\alpha_j}),

over the penalised parameters j (all of the model, as fixed and tied ones follow from the free ones). To the engine
√α_j θ_j are residuals like others, with the derivative √α_j: the minimum is that of ridge regression (Hoerl and
Kennard (1970), doi:10.1080/00401706.1970.10488634), and the most probable θ under the prior N(0, s²/α_j), of which
s²(JᵀJ + A²)⁻¹ is the covariance (MacKay (1992), doi:10.1162/neco.1992.4.3.415).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lmfit_gpu.constraints import Constraints

__all__ = ["Penalty", "penalty_on"]


@dataclass(frozen=True)
class Penalty:
    """√α_j θ_j of the penalised parameters.

    Parameters
    ----------
    indices : Tensor of int, shape (k,)
        Positions of the penalised parameters among those of the model.
    root : float
        √α.
    constraints : Constraints or None
        From the free parameters to those of the model; None: all are free.
    """

    indices: torch.Tensor
    root: float
    constraints: Constraints | None = None

    @property
    def size(self) -> int:
        """Number of penalised parameters, k."""
        return len(self.indices)

    def residual(self, theta: torch.Tensor) -> torch.Tensor:
        """Return √α_j θ_j, shape (k,), at free parameters theta (n,)."""
        full = theta if self.constraints is None else self.constraints.full(theta)
        return self.root * full[self.indices.to(theta.device)]

    def columns(self, theta: torch.Tensor) -> torch.Tensor:
        """Return the transposed derivative of the residual, shape (n, k)."""
        indices = self.indices.to(theta.device)
        if self.constraints is not None:
            return self.root * self.constraints.derivative(theta).to(theta)[indices].T
        columns = theta.new_zeros(theta.numel(), self.size)
        columns[indices, torch.arange(self.size, device=theta.device)] = self.root
        return columns

    def shrinkage(self, factor: np.ndarray, theta: torch.Tensor) -> float:
        """Return how many parameters the penalty determines rather than the data, ‖A F‖², F Fᵀ = (JᵀJ + A²)⁻¹.

        Rows of F are 0 for those on a bound, and undetermined directions are not in it: neither counts in the rank.
        """
        columns = self.columns(theta).double().numpy()
        return float(((columns.T @ factor) ** 2).sum())


def penalty_on(is_weight: Sequence[bool], alpha: float, constraints: Constraints | None) -> Penalty:
    """Return the penalty ½ α ‖weights‖².

    Parameters
    ----------
    is_weight : sequence of bool, shape (n_model,)
        Which parameters of the model are weights.
    alpha : float
        Positive.
    constraints : Constraints or None
        Fixed weights are left out: they are constants.

    Raises
    ------
    ValueError
        If no weight is left.
    """
    penalised = torch.tensor(is_weight, dtype=torch.bool)
    if constraints is not None:
        moves = constraints.free.copy()
        moves[[tie.index for tie in constraints.ties]] = True
        penalised &= torch.from_numpy(moves[: constraints.n_model])
    if not bool(penalised.any()):
        raise ValueError("alpha: the module has no weights to penalise (tensors with two or more axes that are fitted)")
    return Penalty(penalised.nonzero()[:, 0], alpha**0.5, constraints)
