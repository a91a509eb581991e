r"""Where the points of a difference scheme lie: inside the box of the parameters.

For every parameter two signed moves a and b from θ_j. Without bounds a = h, b = −h. In a box, where u and d are the
rooms up and down:

- 2-point: a is the first of h and −h that fits; in a box narrower than the step, the longer room. b goes the other
  way, as far as there is room, and is used only where f(θ + a) is not finite.
- 3-point: central (a = −b = h) where both sides have room; else towards the longer room with a = h, b = 2a, which is of
  second order as well. Steps shorten to fit. A central step that does not fit goes half way to the bound: a model may
  jump on it (x**c at x = 0 and c = 0).

.. math:: f' = \frac{f(θ+a) - f(θ+b)}{a - b} + O(h^2 f'''/6), \qquad
          f' = \frac{-3 f(θ) + 4 f(θ+h) - f(θ+2h)}{2h} + O(h^2 f'''/3)

Rounding of f spoils the one-sided formula (weights 3, 4, 1 over 2h) up to four times as much as the central one (1, 1
over 2h), so a central step is kept while it is at least a quarter of the one-sided one.
(Fornberg, Math. Comp. 51 (1988) 699, doi:10.1090/S0025-5718-1988-0935077-0, for any points.)
"""

from dataclasses import dataclass

import torch

from lmfit_gpu.box import Bounds, inside, rooms

__all__ = ["ONE_SIDED_ROUNDING", "Stencil", "place", "three_point"]

ONE_SIDED_ROUNDING = 4.0  # (3 + 4 + 1) / 2h over (1 + 1) / 2h


@dataclass(frozen=True)
class Stencil:
    """Moves along each parameter, before rounding: points are to be clamped into the box.

    Parameters
    ----------
    first, second : Tensor, shape (n_params,)
        a and b, signed; 0 where there is no room.
    one_sided : Tensor of bool, shape (n_params,), or None
        b = 2a: the one-sided three-point formula. None: nowhere.
    """

    first: torch.Tensor
    second: torch.Tensor
    one_sided: torch.Tensor | None = None

    @property
    def resolution(self) -> torch.Tensor:
        """Steps (n_params,) that matter for rounding: its share of the column is ε‖f‖ over this."""
        a = self.first.abs()
        return a if self.one_sided is None else torch.where(self.one_sided, a / ONE_SIDED_ROUNDING, a)


def place(scheme: str, theta: torch.Tensor, steps: torch.Tensor, bounds: Bounds | None) -> Stencil:
    """Return the moves of a scheme ("2-point", "3-point") with steps h, shape (n_params,), at theta.

    Every θ_j + a and θ_j + b is in the box. A parameter whose bounds are equal has moves of 0.
    """
    if bounds is None:
        return Stencil(steps, -steps)
    up, down = rooms(theta, bounds)
    if scheme == "2-point":
        ahead, behind = torch.minimum(steps, up), -torch.minimum(steps, down)
        forward = (up >= steps) | ((down < steps) & (up >= down))
        return Stencil(torch.where(forward, ahead, behind), torch.where(forward, behind, ahead))
    wide, narrow = torch.maximum(up, down), torch.minimum(up, down)
    side = torch.where(up >= down, 1.0, -1.0).to(theta)
    short = torch.minimum(steps, wide / 2)
    narrow = torch.where(narrow < steps, narrow / 2, narrow)
    one_sided = ONE_SIDED_ROUNDING * narrow < short
    half, whole = (inside(theta + factor * side * short, bounds) for factor in (1, 2))
    merged = one_sided & ((half == theta) | (half == whole))  # too narrow for two points: f(θ) is the other one
    one_sided = one_sided & ~merged
    central = torch.where(merged, side * torch.minimum(steps, wide), torch.minimum(steps, narrow))
    first = torch.where(one_sided, side * short, central)
    second = torch.where(one_sided, 2 * first, torch.where(merged, torch.zeros_like(first), -central))
    return Stencil(first, second, one_sided)


def three_point(
    values: torch.Tensor, first: torch.Tensor, second: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """Return f'(θ) from f(θ), f(θ + a) and f(θ + b), exact for parabolas whatever a and b."""
    return ((first - values) * (b / a) - (second - values) * (a / b)) / (b - a)
