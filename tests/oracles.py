"""Oracles that share nothing with the engine: fourth-order central differences of a whole-array function."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch

from lmfit_gpu.models import ModuleModel, NumpyFunction, TorchFunction
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.rows import ArrayRows

CPU = torch.device("cpu")

# torch warns of its own torch.jit.script when forward mode is first used; test_autodiff.py asks the engine
# for silence there, once and in a process of its own.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._decomp.decompositions_for_jvp


def central_differences(values: Callable[[np.ndarray], np.ndarray], theta, width: float = 2e-3) -> np.ndarray:
    """Return ∂values/∂theta (m, n); the error is of order width⁴ + ε/width, about 1e-11 for smooth models.

    (8 (f(θ+h) − f(θ−h)) − (f(θ+2h) − f(θ−2h))) / 12h, Abramowitz and Stegun 25.3.6.
    """
    theta = np.asarray(theta, dtype=float)
    columns = []
    for j in range(theta.size):
        h = width * max(1.0, abs(theta[j]))
        unit = np.zeros_like(theta)
        unit[j] = h
        near = np.ravel(values(theta + unit)) - np.ravel(values(theta - unit))
        far = np.ravel(values(theta + 2 * unit)) - np.ravel(values(theta - 2 * unit))
        columns.append((8 * near - far) / (12 * h))
    return np.stack(columns, axis=1)


def values_of(model, x, y=None) -> Callable[[np.ndarray], np.ndarray]:
    """Return theta -> all values of a model as numpy arrays, evaluated on all rows at once."""

    def values(theta):
        with torch.no_grad():
            return model(torch.as_tensor(theta, dtype=torch.float64), x, y).numpy().ravel()

    return values


def problem_of(model, X, y, theta, **options) -> LeastSquaresProblem:
    """Return a problem on X and y (array_like); 1-D X is handed to the model as 1-D x."""
    X, y = torch.as_tensor(X), None if y is None else torch.as_tensor(y)
    cast = X.is_floating_point()
    return LeastSquaresProblem(
        model, ArrayRows(X, y, cast_features=cast), torch.as_tensor(theta, dtype=torch.float64), **options
    )


def torch_model(function, order="params") -> TorchFunction:
    return TorchFunction(function, (), order)


def numpy_model(function, order="params") -> NumpyFunction:
    return NumpyFunction(function, (), order)


def module_model(module: torch.nn.Module) -> ModuleModel:
    return ModuleModel(module.double())


def relative_column_error(J, expected) -> float:
    """Return the largest ‖J_j − expected_j‖ / ‖expected_j‖ (absolute where the expected column is zero)."""
    J, expected = np.asarray(J, dtype=float), np.asarray(expected, dtype=float)
    size = np.linalg.norm(expected, axis=0)
    return float(np.max(np.linalg.norm(J - expected, axis=0) / np.where(size > 0, size, 1.0)))
