"""What a fitting case is: data, a model in two forms, a start, and the right answer with its tolerances.

The cases come from public bug reports and questions about other libraries; cases_numerical.py holds those about numbers
(scale, degenerate problems, values that are not finite, the path), cases_bounds.py those with bounds, cases_weights.py
those with errors of the data or gaps in them, cases_interface.py those about what users hand over (shapes, containers,
callables, size, torch modules, scikit-learn). A comment over each says what went wrong and where.
The model is written twice, in numpy and in torch, as everyday users write it. A variant is the same case with some
fields replaced; unless it replaces `expected`, it must give the same answer. The names (D1, W6, ...) are those of the
acceptance set the cases were taken from.

Expected values are independent of any solver under test: closed forms where there is one, else Gauss-Newton in
50-digit arithmetic with exact derivatives (L3: 80-bit). Standard errors are relative: the square roots of the diagonal
of s² (JᵀJ)⁻¹ with s² = rss / (n_residuals - n_params).

Data that need noise draw it from a fixed generator, not from numpy's, so that they are the same in every version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

Model = Callable[..., Any]


@dataclass(frozen=True)
class Expected:
    """The right answer and how near a float64 fit has to come; None: not compared."""

    params: Any = None  # (n,)
    rtol: Any = 1e-5
    std: Any = None  # (n,)
    std_rtol: float = 1e-3
    rss: float | None = None
    rss_rtol: float = 1e-5
    rss_atol: float = 0.0
    predict: Any = None  # (m,)
    predict_rtol: float = 1e-5
    predict_atol: float = 0.0


@dataclass(frozen=True)
class Case:
    """One fit: data, model in both forms, start, right answer, and the variants that must agree."""

    name: str
    params: tuple[str, ...]
    numpy_model: Model
    torch_model: Model
    x: Any  # (m,)
    y: Any  # (m,)
    p0: Any  # (n,)
    expected: Expected
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    bounds: Any = None  # (lower, upper)
    sigma: Any = None  # standard deviations of y; expected.rss is then in units of them
    absolute_sigma: bool = False

    def model(self, form: str) -> Model:
        """Return the model in the form "numpy" or "torch"."""
        return {"numpy": self.numpy_model, "torch": self.torch_model}[form]

    def each_variant(self) -> Iterator[tuple[str, Case]]:
        """Yield (label, case) for the case itself, called "base", and for every variant."""
        yield "base", self
        for label, changes in self.variants.items():
            yield label, replace(self, **changes)


def compare(expected: Expected, params: Any = None, std: Any = None, rss: Any = None, predict: Any = None) -> list[str]:
    """Return one text for every given value that differs from `expected`; an empty list is a pass."""
    checks = [
        ("params", params, expected.params, expected.rtol, 0.0),
        ("std", std, expected.std, expected.std_rtol, 0.0),
        ("rss", rss, expected.rss, expected.rss_rtol, expected.rss_atol),
        ("predict", predict, expected.predict, expected.predict_rtol, expected.predict_atol),
    ]
    return [
        f"{what}: got {got}, want {want} (rtol {rtol}, atol {atol})"
        for what, got, want, rtol, atol in checks
        if got is not None and want is not None and not _is_close(got, want, rtol, atol)
    ]


def _is_close(got: Any, want: Any, rtol: Any, atol: float) -> bool:
    """Say whether the shapes agree and |got − want| ≤ atol + rtol·|want| everywhere (NaN never is close)."""
    got, want = np.asarray(got, float), np.asarray(want, float)
    return got.shape == want.shape and bool(np.all(np.abs(got - want) <= atol + np.asarray(rtol) * np.abs(want)))


def noise(n: int, seed: int) -> np.ndarray:
    """Return n standard normal numbers (64-bit linear congruential generator, Box-Muller), the same everywhere."""
    state = (seed * 2862933555777941757 + 3037000493) % 2**64
    uniform = []
    for _ in range(n + n % 2):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        uniform.append(((state >> 11) + 0.5) / 2**53)
    normal = []
    for u, v in zip(uniform[::2], uniform[1::2], strict=True):
        radius = math.sqrt(-2 * math.log(u))
        normal += [radius * math.cos(2 * math.pi * v), radius * math.sin(2 * math.pi * v)]
    return np.array(normal[:n])


# Models. The torch form calls torch even where arithmetic would do: an array instead of a tensor has to fail in it.


def line(x, a, b):
    return a + b * x


def torch_line(x, a, b):
    return a + torch.mul(b, x)


def decay(x, a, b):
    return a * np.exp(-b * x)


def torch_decay(x, a, b):
    return a * torch.exp(-b * x)


def decay_to_level(x, a, b, c):
    return a * np.exp(-b * x) + c


def torch_decay_to_level(x, a, b, c):
    return a * torch.exp(-b * x) + c
