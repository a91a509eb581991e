r"""Likelihoods: generalised Gauss-Newton for targets that are classes, probabilities or counts.

With f (q,) the outputs of a network in one row, y its target and ℓ(f, y) the negative log-likelihood, the cost is
Σ ℓ over the rows. With J = ∂f/∂θ the gradient is Σ Jᵀℓ′ and the generalised Gauss-Newton matrix Σ Jᵀℓ″J, where ℓ″ is
positive semidefinite because f is the natural parameter. Least squares sees both through the surrogate of each row,

.. math:: \tilde J = S J, \qquad S^T S = \ell'' \;(q \times q), \qquad S^T \tilde r = \ell' \;(q,)

(Schraudolph, Fast curvature matrix-vector products for second-order gradient descent (2002), section 3.1,
doi:10.1162/08997660260028683; McCullagh and Nelder, Generalized Linear Models (1989), section 2.5, with one row as one
observation). ‖r̃‖² is Pearson's χ² of the row, not 2ℓ: nothing may read it as the cost.

==========  ========================  ===================  ==========================  =========
likelihood  target                    ℓ                    ℓ′                          ℓ″
==========  ========================  ===================  ==========================  =========
softmax     class, or q probabilities −Σ_i y_i ln p_i      p − y, p = softmax(f)       diag(p) − p pᵀ
binary      0, 1 or a probability     −Σ_i y_i ln σ(f_i)   σ(f) − y                    diag(σ(1 − σ))
            for each output           + (1 − y_i) ln σ(−f_i)
poisson     a count for each output   Σ_i exp f_i − y_i    exp f − y                   diag(exp f)
                                      f_i + ln y_i!
==========  ========================  ===================  ==========================  =========

**Softmax with q − 1 residuals.** Let s = √p, a unit vector, j the most probable class, and P the reflection that maps
s to −e_j. ℓ″ = diag(s)(I − s sᵀ)diag(s), and the rows i ≠ j of P span what is orthogonal to s, so that

.. math:: S_{ik} = (\delta_{ik} - s_i s_k / (1 + s_j))\, s_k \;(k \ne j), \qquad S_{ij} = -s_i s_j, \qquad
          \tilde r_i = \ell'_i / s_i - s_i\, \ell'_j / (s_j (1 + s_j))

for i ≠ j. As p_k ≤ 1/2 there, no term cancels: every entry is good to rounding, however small.

**Targets that the model holds for all but impossible.** There ℓ″ → 0 while ℓ′ stays, and r̃ would grow like p_y^-½.
The *curvature* alone is kept up: S is that of p_i ≥ FLOOR·y_i (softmax), exp f ≥ FLOOR·y (Poisson), and
σ(1 − σ) ≥ FLOOR·|ℓ′| (binary). Sᵀr̃ remains the exact gradient, and the floor keeps |r̃| below about
FLOOR^-½ (Poisson: (y/FLOOR)^½ while exp f < y).
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["LIKELIHOODS", "Likelihood", "repaired_rows", "resolve_likelihood"]

FLOOR = 1e-6  # |r̃| <= 1e3, which costs three of the 16 digits of Qᵀr̃; met where ℓ > 13.8

SUM = 1e-3  # by how much the probabilities of a row may miss 1: ten thousand float32 roundings


@runtime_checkable
class Likelihood(Protocol):
    """A likelihood of targets given the outputs of a network, row by row. Nothing here tracks gradients."""

    @property
    def name(self) -> str:
        """Say what it is called in messages."""

    def checked(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise ValueError for outputs (rows, q) and targets that do not fit each other or the likelihood."""

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return ℓ of each row, shape (rows,), float64: every constant is in it, so that it is a true −ln L."""

    def surrogate(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return r̃ (rows, k) and S (rows, k, q), float64: SᵀS = ℓ″ (but for FLOOR) and Sᵀr̃ = ℓ′."""


@dataclass(frozen=True)
class Softmax:
    """One class of q >= 2 for each row: k = q − 1.

    The targets are class numbers 0 to q − 1, shape (rows,), or probabilities, shape (rows, q), which are divided by
    their sum. With probabilities the least value is their entropy, not 0.
    """

    name: str = "softmax"

    def checked(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise ValueError, see Likelihood."""
        rows, q = _rows_and_outputs(self.name, outputs)
        if q < 2:
            raise ValueError("model: gives 1 output a row; 'softmax' needs one for each class, 2 or more (or 'binary')")
        if targets.shape == (rows, q):
            _check_range(self.name, targets, 0, 1, "probabilities from 0 to 1")
            total = targets.double().sum(1)
            worst = int((total - 1).abs().argmax())
            if abs(float(total[worst]) - 1) > SUM:
                raise ValueError(f"y: probabilities of row {worst} sum to {float(total[worst]):g}; 1 is expected")
        elif targets.shape in {(rows,), (rows, 1)}:
            _check_range(self.name, targets, 0, q - 1, f"class numbers 0 to {q - 1}", whole=True)
        else:
            raise ValueError(
                f"y: got shape {tuple(targets.shape)}; 'softmax' of model outputs ({rows}, {q}) allows "
                f"class numbers ({rows},) or probabilities ({rows}, {q})"
            )

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return ℓ (rows,), the cross-entropy."""
        log_p, _ = _log_probabilities(outputs)
        y = _probabilities(targets, log_p)
        return torch.where(y > 0, -y * log_p, 0.0).sum(1)

    def surrogate(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return r̃ (rows, q − 1) and S (rows, q − 1, q)."""
        log_p, j = _log_probabilities(outputs)
        y = _probabilities(targets, log_p)
        q = y.shape[1]
        others = torch.arange(q - 1, device=y.device).expand(len(y), -1)
        others = others + (others >= j)  # (rows, q − 1): every class but j

        raised = torch.maximum(log_p.exp(), FLOOR * y)
        s = (raised / raised.sum(1, keepdim=True)).sqrt()
        s_i, s_j = s.gather(1, others), s.gather(1, j)
        slope = log_p.exp() - y
        slope_i, slope_j = slope.gather(1, others), slope.gather(1, j)
        r = torch.where(s_i > 0, slope_i / s_i, 0.0) - s_i * slope_j / (s_j * (1 + s_j))

        S = -(s_i / (1 + s_j))[:, :, None] * (s * s)[:, None, :]
        S.scatter_add_(2, others[:, :, None], s_i[:, :, None])
        S.scatter_(2, j[:, :, None].expand(-1, q - 1, 1), (-s_i * s_j)[:, :, None])
        return r, S


@dataclass(frozen=True)
class Binary:
    """For each output its own coin: targets 0, 1 or a probability, shape (rows, q) or (rows,) for one output; k = q."""

    name: str = "binary"

    def checked(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise ValueError, see Likelihood."""
        _check_one_for_each_output(self.name, outputs, targets)
        _check_range(self.name, targets, 0, 1, "0, 1 and probabilities between")

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return ℓ (rows,), the binary cross-entropy summed over the outputs of the row."""
        f, y = _like(outputs, targets)
        hit, miss = -y * F.logsigmoid(f), (y - 1) * F.logsigmoid(-f)
        return (torch.where(y > 0, hit, 0.0) + torch.where(y < 1, miss, 0.0)).sum(1)

    def surrogate(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return r̃ (rows, q) and the diagonal S (rows, q, q)."""
        f, y = _like(outputs, targets)
        p, other = torch.sigmoid(f), torch.sigmoid(-f)
        slope = (1 - y) * p - y * other  # p − y without its cancellation
        s = torch.maximum(p * other, FLOOR * slope.abs()).sqrt()
        return torch.where(s > 0, slope / s, 0.0), torch.diag_embed(s)


@dataclass(frozen=True)
class Poisson:
    """For each output a count of mean exp f: targets >= 0, shape (rows, q) or (rows,) for one output; k = q.

    Counts need not be whole: y! is Γ(y + 1). The value is +inf beyond f = 709, where exp f overflows.
    """

    name: str = "poisson"

    def checked(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise ValueError, see Likelihood."""
        _check_one_for_each_output(self.name, outputs, targets)
        _check_range(self.name, targets, 0, None, "counts >= 0")

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return ℓ (rows,)."""
        f, y = _like(outputs, targets)
        return (f.exp() - torch.where(y > 0, y * f, 0.0) + torch.lgamma(y + 1)).sum(1)

    def surrogate(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return r̃ (rows, q) and the diagonal S (rows, q, q)."""
        f, y = _like(outputs, targets)
        root = (f / 2).exp()
        s = torch.maximum(root, (FLOOR * y).sqrt())
        r = torch.where(s > 0, root * (root / s) - y / s, 0.0)  # (exp f − y)/s; exp f itself may overflow
        return r, torch.diag_embed(s)


LIKELIHOODS: dict[str, Likelihood | None] = {
    "gaussian": None,
    "softmax": Softmax(),
    "binary": Binary(),
    "poisson": Poisson(),
}


def resolve_likelihood(likelihood: Any) -> Likelihood | None:
    """Return a likelihood from its name, or the object given; None for "gaussian", which is plain least squares.

    Raises
    ------
    ValueError, TypeError
        For another name; for an object that lacks one of the members of Likelihood, which the message names.
    """
    allowed = f"{', '.join(map(repr, LIKELIHOODS))} or an object with name, checked, value, surrogate"
    if isinstance(likelihood, str):
        if likelihood not in LIKELIHOODS:
            raise ValueError(f"likelihood: got {likelihood!r}; allowed are {allowed}")
        return LIKELIHOODS[likelihood]
    missing = [name for name in ("name", "checked", "value", "surrogate") if not hasattr(likelihood, name)]
    if missing or isinstance(likelihood, type):
        lacks = f", which lacks {', '.join(missing)}" if missing else ", a class where an instance is expected"
        raise TypeError(f"likelihood: got {likelihood!r}{lacks}; allowed are {allowed}")
    return likelihood


def repaired_rows(residual: Tensor, slopes: Tensor) -> Tensor:
    """Return `slopes` with zeros for each residual that is exactly 0 and has slopes that are not finite.

    √ℓ of a cross-entropy ℓ has the slope ℓ′/(2√ℓ). Where ℓ rounds to 0, autograd returns ∞·ℓ′, an infinity or NaN,
    although ‖ℓ′‖ <= √2·(1 − p_y) <= √2·ℓ lets the slope vanish like √ℓ. The gradient of ½r² is 0 at r = 0 in any
    case; what a repair may lose, for another function (|f| written as √(f²)), is curvature.

    Parameters
    ----------
    residual : Tensor (...)
    slopes : Tensor (..., n)
        Derivatives of each residual with respect to n things: outputs or parameters.

    Returns
    -------
    Tensor (..., n)
        What is not finite at another residual stays as it is: that is an error to report.
    """
    broken = (residual == 0) & ~torch.isfinite(slopes).all(-1)
    return torch.where(broken[..., None], torch.zeros((), dtype=slopes.dtype, device=slopes.device), slopes)


def _log_probabilities(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return ln softmax(f) (rows, q), float64, good to rounding also where p_j is all but 1; and j (rows, 1)."""
    f = outputs.detach().double()
    top, j = f.max(1, keepdim=True)
    below = f - top
    rest = below.exp().scatter(1, j, 0.0).sum(1, keepdim=True)
    return below - torch.log1p(rest), j


def _probabilities(targets: Tensor, like: Tensor) -> Tensor:
    """Return the targets of Softmax as probabilities, float64, of the shape and on the device of `like` (rows, q)."""
    y = targets.detach().to(like.device)
    if y.shape == like.shape:
        return y.double() / y.double().sum(1, keepdim=True)
    return torch.zeros_like(like).scatter_(1, y.reshape(-1, 1).long(), 1.0)


def _like(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    f = outputs.detach().double()
    return f, targets.detach().to(f.device).double().reshape(f.shape)


def _rows_and_outputs(name: str, outputs: Tensor) -> tuple[int, int]:
    if outputs.ndim != 2 or not outputs.numel() or not outputs.is_floating_point():
        raise ValueError(
            f"model: its outputs have shape {tuple(outputs.shape)} and dtype {outputs.dtype}; "
            f"{name!r} needs real ones of shape (rows, outputs), one row or more"
        )
    return outputs.shape[0], outputs.shape[1]


def _check_one_for_each_output(name: str, outputs: Tensor, targets: Tensor) -> None:
    rows, q = _rows_and_outputs(name, outputs)
    if targets.shape != (rows, q) and not (q == 1 and targets.shape == (rows,)):
        also = f" or ({rows},)" if q == 1 else ""
        raise ValueError(
            f"y: got shape {tuple(targets.shape)}; {name!r} of model outputs ({rows}, {q}) allows ({rows}, {q}){also}"
        )


def _check_range(name: str, targets: Tensor, low: int, high: int | None, allowed: str, *, whole: bool = False) -> None:
    """Raise ValueError, which names the first row that is complex, not finite, out of range or not `whole`."""
    if targets.is_complex():
        raise ValueError(f"y: got dtype {targets.dtype}; {name!r} allows {allowed}")
    y = targets.detach().double()
    wrong = ~torch.isfinite(y) | (y < low)
    if high is not None:
        wrong = wrong | (y > high)
    if whole:
        wrong = wrong | (y != y.round())
    if bool(wrong.any()):
        first = wrong.nonzero()[0].tolist()
        raise ValueError(f"y: got {float(y[tuple(first)]):g} in row {first[0]}; {name!r} allows {allowed}")
