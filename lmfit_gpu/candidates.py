"""Residuals at many points of parameter space at once.

Three ways, the first that reproduces calls one by one on two points:

===========  ==========================================================================
vmap         torch models: one call vectorised over the points
columns      numpy functions that broadcast: each parameter as a column (B, 1) against x
one by one   any model
===========  ==========================================================================

A model that raises for some point raises for its whole batch: the points of that batch are then tried one by one.
"""

from dataclasses import dataclass, replace

import torch
from torch.func import vmap

from lmfit_gpu.models import CALL_ERRORS
from lmfit_gpu.problem import Block, LeastSquaresProblem
from lmfit_gpu.warning_filters import warnings_here

__all__ = ["ManyPoints"]

TOGETHER_VALUES = 2**20  # residuals evaluated together: 8 MB
REPRODUCED = {torch.float64: 1e-8, torch.float32: 1e-3}  # of the largest value: rounding of other kernels


@dataclass(frozen=True)
class ManyPoints:
    """Residuals of one block at many points.

    Parameters
    ----------
    problem : LeastSquaresProblem
    block : Block
        The rows, on the problem's first device.
    how : {"vmap", "columns", "one by one"}
    """

    problem: LeastSquaresProblem
    block: Block
    how: str

    @classmethod
    def choose(cls, problem: LeastSquaresProblem, block: Block, points: torch.Tensor) -> "ManyPoints":
        """Find the way to evaluate many points by trying it on some.

        Parameters
        ----------
        problem : LeastSquaresProblem
        block : Block
        points : Tensor, shape (B, n_params)
            The first two where the model is finite are compared.
        """
        plain = cls(problem, block, "one by one")
        tried = []
        for point in points:
            r = plain(point[None])
            if bool(torch.isfinite(r).all()):
                tried.append((point, r[0]))
            if len(tried) == 2:
                break
        if len(tried) < 2:
            return plain
        two = torch.stack([point for point, _ in tried])
        expected = torch.stack([r for _, r in tried])
        together = replace(plain, how="vmap" if problem.differentiable else "columns")
        try:
            found = together.evaluated(two)
        except CALL_ERRORS:
            return plain
        tolerance = REPRODUCED[problem.dtype] * float(expected.abs().max())
        same = found.shape == expected.shape and bool(((found - expected).abs() <= tolerance).all())
        return together if same else plain

    def __call__(self, points: torch.Tensor) -> torch.Tensor:
        """Return residuals, shape (B, c), float64, on the problem's device; NaN where the model raises."""
        per_batch = max(1, TOGETHER_VALUES // max(1, self.problem.n_residuals))
        return torch.cat([self._batch(part) for part in points.split(per_batch)])

    def _batch(self, points: torch.Tensor) -> torch.Tensor:
        if self.how != "one by one":
            try:
                return self.evaluated(points)
            except CALL_ERRORS:
                return replace(self, how="one by one")._batch(points)
        return torch.stack([self._single(point) for point in points])

    def _single(self, point: torch.Tensor) -> torch.Tensor:
        try:
            return self.evaluated(point[None])
        except CALL_ERRORS:
            return torch.full((self.problem.n_residuals,), torch.nan, dtype=torch.float64, device=self.problem.device)

    def evaluated(self, points: torch.Tensor) -> torch.Tensor:
        """Return residuals of one batch, shape (B, c); (c,) one by one. What the model raises goes on."""
        problem, block = self.problem, self.block
        thetas = points.to(device=problem.device, dtype=problem.dtype)
        with torch.no_grad(), warnings_here("ignore"):  # guesses far off: overflow, and operations that vmap is slow at
            if self.how == "one by one":
                return block.residual(problem.values(thetas[0], block)).double()
            if self.how == "vmap":
                return vmap(lambda theta: block.residual(problem.values(theta, block)))(thetas).double()
            values = block.model(thetas.T[:, :, None], block.x, block.y)
            if tuple(values.shape) != (len(points), problem.n_residuals):
                raise ValueError(f"model: returned shape {tuple(values.shape)} for parameters in columns")
            return block.residual(values).double()
