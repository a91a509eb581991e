"""What a fitted model predicts, block by block and in y's shape."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lmfit_gpu.models import CALL_ERRORS, ModuleModel
from lmfit_gpu.preparation import Setup
from lmfit_gpu.rows import as_tensor, chunk_slices
from lmfit_gpu.threads import share_of_threads

__all__ = ["named_shape", "predicted"]


@share_of_threads()
def predicted(setup: Setup, theta: np.ndarray, X: Any, chunk_rows: Any) -> torch.Tensor:
    """Return predictions in float64, in the shape of y at fit.

    Parameters
    ----------
    setup : Setup
        With a predictor.
    theta : ndarray, shape (n_params,)
        All parameters.
    X : ndarray or Tensor, shape (n_samples, ...)
        Checked.
    chunk_rows : int or None
        Rows evaluated together; None: all.

    Returns
    -------
    Tensor, shape (n_samples,) or (n_samples, n_outputs)
    """
    rows = replace(setup.rows, X=as_tensor(X), y=None)
    n_model = len(theta) if setup.constraints is None else setup.constraints.n_model
    parameters = torch.from_numpy(theta[:n_model]).to(setup.theta)
    predictor: Any = setup.predictor

    def values(x: torch.Tensor) -> torch.Tensor:
        if isinstance(predictor, ModuleModel):  # it holds theta; functional_call is not for several threads
            return predictor.module(x)
        return predictor(parameters, x, None)

    whole = chunk_rows is None or setup.predicts_whole
    with torch.no_grad(), named_shape(setup, X):
        parts = [
            _shaped(values(x), len(x), setup.y_shape)
            for part in chunk_slices(rows.n_samples, max(rows.n_samples, 1) if whole else chunk_rows)
            for x, _ in [rows.read(part, parameters.device, parameters.dtype)]
        ]
    return torch.cat(parts)


@contextmanager
def named_shape(setup: Setup, X: Any) -> Iterator[None]:
    """Say which shape X has and which it had at fit, where a module fails on another."""
    try:
        yield
    except CALL_ERRORS as error:
        fitted = tuple(setup.rows.X.shape[1:])
        if not isinstance(setup.predictor, ModuleModel) or tuple(X.shape[1:]) == fitted:
            raise
        raise ValueError(f"X: got rows of shape {tuple(X.shape[1:])}; the module was fitted to {fitted}") from error


def _shaped(values: torch.Tensor, n_rows: int, y_shape: tuple[int, ...]) -> torch.Tensor:
    """Return predictions of n_rows rows in float64 and in y's shape."""
    shape = (n_rows, *y_shape)
    values = values.double()
    if values.ndim == 0:
        return values.expand(shape)
    if y_shape == () and values.numel() != n_rows:  # fitted by residuals alone: the model's own shape
        return values
    if tuple(values.shape) not in (shape, (n_rows,), (n_rows, 1)):
        raise ValueError(f"model: returned shape {tuple(values.shape)} for {n_rows} rows; {shape} is expected")
    return values.reshape(shape)
