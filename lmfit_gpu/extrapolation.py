r"""Derivatives by extrapolated central differences, each with an error.

Central differences over a ladder of steps h, each four times the last, with Richardson's extrapolation over
neighbouring steps (Ridders, Adv. Eng. Software 4 (1982) 75-76, doi:10.1016/S0141-1195(82)80057-0):

.. math:: D_0(h) = \frac{f(\theta + h e_j) - f(\theta - h e_j)}{2h}, \qquad
          D_k(4h) = \frac{16^k D_{k-1}(h) - D_{k-1}(4h)}{16^k - 1}

The error of a value is its distance from the two it is made of, and the noise of f over h. The noise of a row is the
rounding of its value, or more where the model itself is noisier: third differences over tiny steps show that (they
vanish for a smooth model), and so does a row that stands still over small steps and jumps over large ones (a rounded
model). In each row the value with the least error counts.
"""

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import max_pool1d

from lmfit_gpu.differences import start_differences
from lmfit_gpu.models import CALL_ERRORS
from lmfit_gpu.problem import Block, Problem

__all__ = ["Ladder"]

GROWTH = 4.0  # of the steps
FINEST = 4**-3  # first step, relative to that of 3-point differences
N_STEPS = 10  # the last is 1e-6 to 1e-1 of the parameter: truncation below rounding somewhere in between
NOISE_STEPS = torch.tensor([-3.0, -1.0, 1.0, 3.0], dtype=torch.float64)  # the third difference of a line vanishes
THIRD = torch.tensor([-1.0, 3.0, -3.0, 1.0], dtype=torch.float64)
PLAIN_CHANGE = 1e4  # times the rounding of a value
LONGEST = 1e-3  # middle of a ladder, of the parameter or 1: what shows nothing below may be off (ReLU), and is 0
BISECTIONS = 20
KINK = 1e-3  # of the change a whole step makes: 20 bisections leave 1e-6 of it past a kink, all of it at a jump
NEIGHBOURS = 9  # rows whose third differences count together: a single one may be small by chance
NOISE_OF_THIRD = math.sqrt(20.0)  # the standard deviation of 1-3-3-1 times independent noise
SAFETY = 10.0  # on the noise: the largest of many rows, and of values that are not those at theta


@dataclass(frozen=True)
class Ladder:
    """Differences over a ladder of steps.

    Parameters
    ----------
    problem : Problem
    theta : Tensor, shape (n_params,)
    steps : Tensor, shape (n_params,)
        The middle of each ladder: the step of 3-point differences.
    """

    problem: Problem
    theta: torch.Tensor
    steps: torch.Tensor

    @classmethod
    def at(cls, problem: Problem, theta: torch.Tensor) -> "Ladder":
        """Find the steps at a point."""
        steps = start_differences(problem, theta, "3-point").steps
        return cls(problem, theta, torch.minimum(steps, LONGEST * theta.abs().clamp(min=1.0)))

    def column(self, j: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ∂values/∂theta_j and the error of each, shape (n_values,), on the CPU."""
        parts = list(self.problem.map_blocks(lambda block: self._of_block(block, j)))
        derivative, error = (torch.cat([part[k].cpu() for part in parts]) for k in (0, 1))
        return derivative, error

    def _of_block(self, block: Block, j: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = self._moved(block, j, 0.0)
        hs = float(self.steps[j]) * FINEST * GROWTH ** torch.arange(N_STEPS, dtype=torch.float64)
        up = torch.stack([self._moved(block, j, float(h)) for h in hs])
        down = torch.stack([self._moved(block, j, -float(h)) for h in hs])
        taken = [self._taken(j, float(h)) - self._taken(j, -float(h)) for h in hs]  # after rounding
        width = torch.tensor(taken, dtype=torch.float64, device=values.device)[:, None]
        noise = self._noise(block, j, values, hs, (up - values, down - values))
        noise = torch.where(torch.isfinite(noise), noise, 0.0)
        return _extrapolated((up - down) / width, SAFETY * noise / width)

    def _noise(
        self, block: Block, j: int, values: torch.Tensor, hs: torch.Tensor, changes: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Return the noise of each value: its rounding, that of third differences, or the jumps of a rounded row."""
        epsilon = torch.finfo(values.dtype).eps
        rounding = epsilon * values.abs()
        tiny = float(self.steps[j]) * FINEST / GROWTH
        third = sum(float(c) * self._moved(block, j, float(k) * tiny) for c, k in zip(THIRD, NOISE_STEPS, strict=True))
        third = torch.nan_to_num(torch.as_tensor(third).abs(), nan=0.0, posinf=0.0)
        near = max_pool1d(third[None, None], NEIGHBOURS, stride=1, padding=NEIGHBOURS // 2)[0, 0]
        noise = torch.maximum(rounding, near / NOISE_OF_THIRD)
        jumps = [
            self._jumps(block, j, values, side * hs, change) for side, change in zip((1, -1), changes, strict=True)
        ]
        return torch.stack([noise, *jumps]).amax(0)

    def _jumps(
        self, block: Block, j: int, values: torch.Tensor, hs: torch.Tensor, change: torch.Tensor
    ) -> torch.Tensor:
        """Return by how much values jump that stand still over one step and move over the next; zeros for a kink.

        A change by h^k, k up to 7, is visible at the smaller step of two: what does not move there moves by a jump (a
        rounded model), or from a kink on (a hidden unit that is off), where bisection finds ever smaller changes.
        """
        size = torch.nan_to_num(change.abs(), nan=0.0, posinf=0.0)  # (s, c)
        visible = size[1:] > PLAIN_CHANGE * torch.finfo(values.dtype).eps * values.abs()
        jumps = torch.where((size[:-1] == 0) & visible, size[1:], torch.zeros_like(size[1:]))
        largest = jumps.amax(0)
        if not bool((largest > 0).any()):
            return largest
        row = int(largest.argmax())
        step = int((jumps[:, row] > 0).nonzero()[0, 0])
        still, moved, found = float(hs[step]), float(hs[step + 1]), float(jumps[step, row])
        for _ in range(BISECTIONS):
            middle = (still + moved) / 2
            at_middle = float((self._moved(block, j, middle) - values)[row].abs())
            still, moved, found = (middle, moved, found) if at_middle == 0 else (still, middle, at_middle)
        return largest if found > KINK * float(jumps[step, row]) else torch.zeros_like(largest)

    def _taken(self, j: int, step: float) -> float:
        return float(self.theta[j] + step) - float(self.theta[j])

    def _moved(self, block: Block, j: int, step: float) -> torch.Tensor:
        moved = self.theta.clone()
        moved[j] += step
        try:
            return self.problem.values(moved, block).double()
        except CALL_ERRORS:  # outside the domain of the model
            return self.problem.values(self.theta, block).double() * torch.nan


def _extrapolated(first: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each column the best value of Richardson's table, and its error.

    Parameters
    ----------
    first : Tensor, shape (s, c)
        Central differences over steps that grow.
    noise : Tensor, shape (s, c)
        What noise in f does to each of them.
    """
    best = first[0].clone()
    least = torch.full_like(best, torch.inf)
    for s in range(1, len(first)):  # a difference by itself is as good as its distance from the next coarser one
        distance = (first[s] - first[s - 1]).abs()
        best, least = _better(first[s - 1], distance + noise[s - 1], best, least)
    table, noises = first, noise
    for k in range(1, 4):
        factor = GROWTH ** (2 * k)
        finer, coarser = table[:-1], table[1:]
        table = (factor * finer - coarser) / (factor - 1)
        noises = (factor * noises[:-1] + noises[1:]) / (factor - 1)
        for value, near, far, noisy in zip(table, finer, coarser, noises, strict=True):
            distance = torch.maximum((value - near).abs(), (value - far).abs() / factor)
            best, least = _better(value, distance + noisy, best, least)
    return best, least


def _better(
    value: torch.Tensor, error: torch.Tensor, best: torch.Tensor, least: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    better = error < least  # false for NaN
    return torch.where(better, value, best), torch.where(better, error, least)
