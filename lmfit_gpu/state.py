"""Where a fit stands between two trials."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lmfit_gpu.damping import Scale
from lmfit_gpu.jacobian import Derivatives, Jacobian
from lmfit_gpu.linear import Linearization
from lmfit_gpu.result import IterationRecord, Stop

__all__ = ["State"]


@dataclass(frozen=True)
class State:
    """The best point so far, linearised, and what the trials have taught; immutable."""

    theta: torch.Tensor
    cost: float
    derivatives: Derivatives
    jacobian: Jacobian
    lin: Linearization
    scale: Scale | None
    policy: Any
    rounding: float = np.inf  # of ‖r‖, at the start
    n_iter: int = 0
    nfev: int = 0  # without those of `jacobian`
    njev: int = 0
    rejected: int = 0
    refusal: str = ""  # what the model raised at its last refused trial
    stop: Stop | None = None
    record: IterationRecord | None = None

    @property
    def evaluations(self) -> int:
        """Evaluations of the model over all rows so far."""
        return self.nfev + self.jacobian.nfev
