r"""Residual-based attention: rows whose residuals stay large gain weight.

Each row i of a group of residuals has a factor w_i, and w_i r_i takes the place of r_i. Before every step

.. math:: w_i \leftarrow \gamma\, w_i + \eta\, \frac{|r_i|}{\max_j |r_j|},

with the decay γ and the rate η; :math:`|r_i|` is the norm of the residuals of the row, without factors. A row whose
residual is always the largest ends at η / (1 − γ), one without residual at 0: what the rows of a differential equation
need where the residual is uneven, at a boundary layer or a front, say. No gradient is taken of the factors.

Anagnostopoulos, Toscano, Stergiopulos and Karniadakis, *Residual-based attention and connection to information
bottleneck theory in PINNs* (2023), arXiv:2307.00379. There factors start at 0 and tens of thousands of small steps
build them up; here they start at 1: a Gauss-Newton step goes a long way, and rows that had no weight in the first ones
would not be fitted.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

__all__ = ["ResidualAttention"]


@dataclass(frozen=True)
class ResidualAttention:
    """Factors of rows that follow their residuals.

    Parameters
    ----------
    decay : float, default 0.999
        γ, at least 0 and less than 1.
    rate : float, default 0.01
        η > 0.
    start : float, default 1.0
        Factor of every row before the first step, at least 0.

    Raises
    ------
    ValueError
        For other numbers.

    Examples
    --------
    >>> import torch
    >>> attention = ResidualAttention(decay=0.5, rate=1.0)
    >>> attention.updated(None, {"interior": torch.tensor([3.0, -6.0])})["interior"].tolist()
    [1.0, 1.5]
    """

    decay: float = 0.999
    rate: float = 0.01
    start: float = 1.0

    def __post_init__(self) -> None:
        """Check the parameters."""
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay: got {self.decay!r}; a number from 0 to below 1 is expected")
        if not 0 < self.rate < float("inf"):
            raise ValueError(f"rate: got {self.rate!r}; a positive number is expected")
        if not 0 <= self.start < float("inf"):
            raise ValueError(f"start: got {self.start!r}; a number >= 0 is expected")

    def updated(
        self, state: Mapping[str, torch.Tensor] | None, residuals: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the factors of the rows of every group for the next step.

        Parameters
        ----------
        state : dict of str to Tensor, shape (rows,), or None
            Factors of the step before; None at the first.
        residuals : dict of str to Tensor, shape (rows,) or (rows, k)
            By group, without factors. A group without any residual, or with one that is not finite, keeps its factors.

        Raises
        ------
        ValueError
            If a group has another number of rows than in the step before: factors belong to rows.
        """
        return {name: self._of_group(state, name, r) for name, r in residuals.items()}

    def _of_group(self, state: Mapping[str, torch.Tensor] | None, name: str, r: torch.Tensor) -> torch.Tensor:
        sizes = torch.linalg.vector_norm(r.detach().double().reshape(len(r), -1), dim=1)
        before = torch.full_like(sizes, self.start)
        if state is not None:
            if name not in state or len(state[name]) != len(sizes):
                known = len(state[name]) if name in state else "no"
                group = f" of {name!r}" if name else ""
                raise ValueError(
                    f"attention: got {len(sizes)} rows{group}, {known} in the step before; every step needs the same "
                    "rows in the same order"
                )
            before = state[name].to(sizes)
        largest = sizes.max()
        if not (bool(torch.isfinite(largest)) and float(largest) > 0):
            return before
        return self.decay * before + self.rate * sizes / largest
