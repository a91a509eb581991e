r"""A curve as the engine takes it: the user's f and jac, and a residual where data do not come in rows.

With data in rows or columns the model stays a model: the engine sees rows, cuts them into blocks, predicts. With data
that only the user's function understands, with a covariance matrix, or with one ydata for many values, all values
are computed at once and :class:`WholeCurve` gives the residual

.. math:: r(\theta) = W\,(f(x, \theta) - y), \qquad W = L^{-1} \text{ or } \mathrm{diag}(1/\sigma)

(C = L Lᵀ the covariance matrix of y). Complex values enter as real and imaginary part, one after the other.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.linalg import solve_triangular

from lmfit_gpu.curve_data import CurveData
from lmfit_gpu.parameters import call_signature

__all__ = ["WholeCurve", "of_columns", "stacked", "with_stacked_output", "with_stacked_rows"]


def of_columns(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return f(x (k, M), ...) as a function of rows (M, k)."""

    @functools.wraps(f)
    def of_rows(rows: Any, *params: Any) -> Any:
        return f(rows[None] if rows.ndim == 1 else rows.T, *params)

    return of_rows


def stacked(values: Any) -> Any:
    """Return complex values (M,) as (M, 2): real and imaginary part of a row together."""
    if isinstance(values, torch.Tensor):
        imaginary = values.imag if values.is_complex() else torch.zeros_like(values)
        return torch.stack((values.real, imaginary), dim=-1)
    return np.stack((np.real(values), np.imag(values)), axis=-1)


def with_stacked_output(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return f with complex values (M,) as (M, 2)."""

    @functools.wraps(f)
    def of_parts(x: Any, *params: Any) -> Any:
        return stacked(f(x, *params))

    return of_parts


def with_stacked_rows(jac: Callable[..., Any]) -> Callable[..., Any]:
    """Return jac (M, n), complex, as (2M, n): the rows of the real and imaginary part of a value together."""

    @functools.wraps(jac)
    def of_parts(x: Any, *params: Any) -> Any:
        return _stacked_rows(jac(x, *params))

    return of_parts


def _stacked_rows(rows: Any) -> Any:
    stack = stacked(rows)  # (M, n, 2)
    if isinstance(stack, torch.Tensor):
        return stack.transpose(1, 2).reshape(-1, stack.shape[1])
    return stack.transpose(0, 2, 1).reshape(-1, stack.shape[1])


@dataclass(frozen=True)
class WholeCurve:
    """The residual of a curve whose values are computed all at once.

    Parameters
    ----------
    f : callable
    data : CurveData
    n_params : int or None
        None when only the signature tells.
    """

    f: Callable[..., Any]
    data: CurveData
    n_params: int | None

    @cached_property
    def signature(self) -> tuple[tuple[str, ...] | None, str]:
        """Names of the parameters, and whether f takes them one by one or as one vector."""
        return call_signature(self.f, self.n_params)

    def __call__(self, theta: Any, X: Any = None, y: Any = None) -> Any:
        """Return the residuals, shape (M,) or (2M,); theta (n,) is an array, or a tensor for f in torch."""
        data = self._like(theta)
        values = self._called(self.f, theta)
        values = values if isinstance(values, torch.Tensor) else np.asarray(values)
        if data.keep is not None and values.ndim:
            values = values[data.keep]
        return self._weighted(self._aligned(values, data.y), data)

    def jacobian(self, jac: Callable[..., Any]) -> Callable[..., Any]:
        """Return ∂r/∂θ, shape (M, n), by the user's jac(x, ...)."""

        def of_residual(theta: Any, X: Any, y: Any) -> Any:
            data = self._like(theta)
            rows = self._called(jac, theta)
            rows = rows if isinstance(rows, torch.Tensor) else np.asarray(rows)
            m = data.y.shape[0] if data.keep is None else data.keep.shape[0]
            if rows.ndim != 2 or (m != 1 and rows.shape[0] != m):
                raise ValueError(f"jac: returned shape {tuple(rows.shape)}; ({m}, n) is expected")
            return self._weighted(rows if data.keep is None else rows[data.keep], data)

        return of_residual

    def _called(self, function: Callable[..., Any], theta: Any) -> Any:
        x = self._like(theta).x
        return function(x, theta) if self.signature[1] == "theta" else function(x, *theta)

    def _like(self, theta: Any) -> CurveData:
        """Return the data as theta is: arrays, or tensors on its device."""
        place = theta.device if isinstance(theta, torch.Tensor) else None
        if place not in self._converted:
            self._converted[place] = _converted(self.data, place)
        return self._converted[place]

    @cached_property
    def _converted(self) -> dict[torch.device | None, CurveData]:
        return {}

    def _aligned(self, values: Any, y: Any) -> Any:
        """Return values − y."""
        if _is_complex(values) and not _is_complex(y):
            raise ValueError("xdata and ydata: the model returned complex values for real ydata; make ydata complex")
        if values.ndim == 0 or y.shape[0] == 1 or tuple(values.shape) == tuple(y.shape):
            return (values - y).reshape(-1)
        if values.ndim != 2 or sorted(values.shape) != sorted((1, y.shape[0])):
            shape = getattr(self.data.x, "shape", None)
            of = type(self.data.x).__name__ if shape is None else f"shape {tuple(shape)}"
            raise ValueError(
                f"xdata and ydata: the model returned shape {tuple(values.shape)} for xdata of {of} and "
                f"{y.shape[0]} values of ydata"
            )
        return values.reshape(-1) - y

    def _weighted(self, part: Any, data: CurveData) -> Any:
        """Return W times residuals (M,) or rows of a Jacobian (M, n); complex ones as (2M,) or (2M, n)."""
        if data.cholesky is not None:
            return _whitened(data.cholesky, part)
        if data.sigma is not None:
            per_row = isinstance(data.sigma, np.ndarray | torch.Tensor) and part.ndim == 2
            part = part / (data.sigma[:, None] if per_row else data.sigma)
        if not _is_complex(data.y):
            return part
        return stacked(part).reshape(-1) if part.ndim == 1 else _stacked_rows(part)


def _is_complex(array: Any) -> bool:
    return array.is_complex() if isinstance(array, torch.Tensor) else np.iscomplexobj(array)


def _converted(data: CurveData, device: torch.device | None) -> CurveData:
    def convert(part: Any) -> Any:
        if not isinstance(part, np.ndarray | torch.Tensor):
            return part
        if device is None:
            return part.detach().cpu().numpy() if isinstance(part, torch.Tensor) else part
        return torch.as_tensor(part).to(device)

    fields = {name: convert(getattr(data, name)) for name in ("x", "y", "sigma", "cholesky", "keep")}
    return CurveData(layout=data.layout, **fields)


def _whitened(cholesky: Any, part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        columns = part[:, None] if part.ndim == 1 else part
        return torch.linalg.solve_triangular(cholesky.to(part.dtype), columns, upper=False).reshape(part.shape)
    return solve_triangular(cholesky, part, lower=True, check_finite=False)
