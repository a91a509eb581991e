"""What a training loop gives as ``residual_fn``, in one form: groups of residuals of a network.

==================  ==================================  ==========================================================
form                given as                            values that are differentiated by the parameters
==================  ==================================  ==========================================================
``"difference"``    None, "gaussian"                    outputs of the network; r = outputs − targets
``"outputs"``       f(outputs, targets)                 outputs; r = f, and S = ∂f/∂outputs mixes those of a row
``"likelihood"``    a name or a likelihood              outputs; r̃ and S of :mod:`lmfit_gpu.likelihoods`
``"network"``       f(network, x, y)                    r = f itself: it calls the network, and may differentiate it
==================  ==================================  ==========================================================

With f(outputs, targets) the network is differentiated up to its outputs and f alone by its own cheap backward passes.
A residual such as √ℓ, whose slope is infinite where it is zero, is mended there (:func:`repaired_rows`) before anything
is multiplied with it.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lmfit_gpu.likelihoods import Likelihood, repaired_rows, resolve_likelihood

__all__ = ["ONLY", "Residuals", "resolve_residuals"]

ONLY = ""  # the name of the group where there is one


@dataclass(frozen=True)
class Residuals:
    """How one group of residuals comes about.

    Parameters
    ----------
    form : {"difference", "outputs", "likelihood", "network"}
    function : callable, optional
    likelihood : Likelihood, optional
    weight : float
        w > 0: the group contributes w Σ r².
    """

    form: str
    function: Callable[..., Any] | None = None
    likelihood: Likelihood | None = None
    weight: float = 1.0

    def of_outputs(self, outputs: torch.Tensor, y: Any) -> torch.Tensor:
        """Return r, shape (rows, k), of outputs (rows, ...)."""
        if self.function is None:
            if outputs.shape != y.shape and outputs.numel() == y.numel():
                y = y.reshape(outputs.shape)
            return (outputs - y).reshape(len(outputs), -1)
        return self._checked(self.function(outputs, y), len(outputs))

    def of_network(self, network: Callable[..., Any], x: Any, y: Any, n_rows: int) -> torch.Tensor:
        """Return r, shape (rows, k) or (c,) where it does not divide by the rows."""
        assert self.function is not None
        return self._checked(self.function(network, x, y), n_rows)

    def _checked(self, r: Any, n_rows: int) -> torch.Tensor:
        if not isinstance(r, torch.Tensor):
            raise TypeError(f"residual_fn: returned {type(r).__name__}; a tensor of residuals is expected")
        if r.numel() == 0 or r.is_complex() or not r.is_floating_point():
            raise ValueError(f"residual_fn: returned shape {tuple(r.shape)} of {r.dtype}; real residuals are expected")
        if n_rows > 1 and r.numel() == 1:
            raise ValueError(
                "residual_fn: returned one value for several rows; return the residuals themselves, a vector, not "
                "their mean or sum of squares"
            )
        return r.reshape(n_rows, -1) if r.numel() % n_rows == 0 else r.reshape(-1)

    def linearized(self, outputs: torch.Tensor, y: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return r (rows, k) and S = ∂r/∂outputs, shape (rows, k, q), None for the identity."""
        outputs = outputs.detach()
        if self.function is None:
            return self.of_outputs(outputs, y), None
        with torch.enable_grad():
            leaf = outputs.requires_grad_()
            r = self.of_outputs(leaf, y)
            if r.ndim == 1:
                raise ValueError(
                    f"residual_fn: returned {len(r)} residuals for {len(outputs)} rows, not the same number for each; "
                    "a row that is to be left out has residuals of zero"
                )
            if not r.requires_grad:
                raise ValueError("residual_fn: what it returns does not depend on the outputs of the model")
            slopes = [
                torch.autograd.grad(r[:, j].sum(), leaf, retain_graph=True, materialize_grads=True)[0]
                for j in range(r.shape[1])
            ]
        S = torch.stack([slope.reshape(len(outputs), -1) for slope in slopes], 1)
        return r.detach(), repaired_rows(r.detach(), S)


def resolve_residuals(residual_fn: Any, weights: Mapping[str, float] | None) -> dict[str, Residuals]:
    """Return the groups of residuals by name, one with an empty name where there is no mapping.

    Raises
    ------
    TypeError, ValueError
        For what is no residual function, or weights that are not those of the groups.
    """
    if not isinstance(residual_fn, Mapping):
        if weights is not None:
            raise ValueError(f"weights: got {weights!r}; only for a dict of residual functions")
        return {ONLY: _resolved(residual_fn, 1.0)}
    if not residual_fn:
        raise ValueError("residual_fn: got an empty dict; at least one group of residuals is expected")
    given = dict(weights or {})
    unknown = sorted(set(given) - set(residual_fn))
    if unknown:
        raise ValueError(f"weights: got {unknown}; the groups of residual_fn are {sorted(residual_fn)}")
    groups: dict[str, Residuals] = {}
    for name, function in residual_fn.items():
        weight: Any = given.get(name, 1.0)
        if (
            isinstance(weight, bool)
            or not isinstance(weight, (int, float, np.integer, np.floating))
            or not 0 < weight < math.inf
        ):
            raise ValueError(f"weights: got {weight!r} for {name!r}; a positive number is expected")
        groups[name] = _resolved(function, float(weight))
    return groups


def _resolved(residual_fn: Any, weight: float) -> Residuals:
    if residual_fn is None:
        return Residuals("difference", weight=weight)
    if isinstance(residual_fn, str) or (hasattr(residual_fn, "surrogate") and not isinstance(residual_fn, type)):
        try:
            likelihood = resolve_likelihood(residual_fn)
        except (ValueError, TypeError) as error:
            raise type(error)(f"residual_fn: {error}") from error
        return Residuals("difference" if likelihood is None else "likelihood", likelihood=likelihood, weight=weight)
    if not callable(residual_fn):
        raise TypeError(
            f"residual_fn: got {residual_fn!r}; a function of (outputs, targets) or of (model, x, y), the name of a "
            "likelihood, or a dict of such is expected"
        )
    return Residuals("network" if _n_arguments(residual_fn) == 3 else "outputs", residual_fn, weight=weight)


def _n_arguments(function: Callable[..., Any]) -> int:
    """Return how many positional arguments a function needs, 2 where it does not tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 2
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in positional if p.default is p.empty]
    if len(needed) in (2, 3):
        return len(needed)
    if len(needed) < 2 <= len(positional) or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 2
    raise TypeError(f"residual_fn: {function!r} takes {len(needed)} arguments; (outputs, targets) or (model, x, y)")
