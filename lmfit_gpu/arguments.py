"""What a user hands to the estimator, checked before any work; every message names the argument and the remedy.

What each argument may be by itself is said in :mod:`lmfit_gpu.parameter_constraints`.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_array, validate_data

from lmfit_gpu.backends import get_backend
from lmfit_gpu.exceptions import FitWarning
from lmfit_gpu.losses import resolve_loss
from lmfit_gpu.preparation import Data, has_network, is_module
from lmfit_gpu.rows import LEAST_TARGET, Weights, as_tensor

__all__ = ["check_data", "check_features", "check_options"]

SIZE_OF_SIGMA = SIZE_OF_WEIGHTS = 1e100
SHOWN = 5  # offending rows and columns that a message lists


def check_options(options: Any) -> None:
    """Check what arguments of the constructor say together, or need from elsewhere.

    Parameters
    ----------
    options : LMRegressor
        Each argument is one that is allowed by itself.

    Raises
    ------
    ValueError
        For arguments that do not go together, and a loss function that is none.
    BackendUnavailableError
    """
    network, alone = has_network(options), options.model is None and options.residual is not None
    kind = "a residual callable" if alone else "a model"
    if options.predict_fn is not None and not alone:
        raise ValueError("predict_fn: goes with a residual callable alone; a model predicts by itself")
    if options.hidden_layer_sizes is not None and not network:
        raise ValueError(
            f"hidden_layer_sizes: got {options.hidden_layer_sizes!r} with {kind}; they are those of the network that "
            "model=None stands for (model__name sets a parameter of a module factory)"
        )
    if options.early_stopping and alone:
        raise ValueError(
            f"early_stopping: got {options.early_stopping!r} with {kind}; which of its residuals belong to the rows "
            "held out is not known"
        )
    if options.alpha > 0 and not is_module(options):
        # Not an error: scikit-learn's checks give every regressor that has an alpha one of 0.01.
        kind = "a residual callable" if alone else "a function"
        message = f"alpha: got {options.alpha!r} with {kind}: no effect; only torch modules have weights to penalise"
        warnings.warn(message, FitWarning, stacklevel=4)
    get_backend(options.backend, torch.device("cpu"))
    resolve_loss(options.loss, options.f_scale)


def check_data(
    estimator: Any, X: Any, y: Any, sample_weight: Any = None, sigma: Any = None, *, reset: bool = True
) -> Data:
    """Check what ``fit`` was given and return the rows that take part.

    Parameters
    ----------
    estimator : LMRegressor
        Gets ``n_features_in_`` and ``feature_names_in_``.
    X, y, sample_weight, sigma
        See :meth:`lmfit_gpu.LMRegressor.fit`.
    reset : bool
        False: X is checked against those of the fit.

    Raises
    ------
    ValueError, TypeError
        For shapes that do not fit, values that are not numbers, NaN or infinity with ``nan_policy="raise"``, weights
        below 0, standard deviations that are not positive.
    """
    X = check_features(estimator, _unmasked(X, "X"), reset=reset, finite=False)
    y = _checked_targets(estimator, _unmasked(y, "y"), len(X))
    frequency = _checked_frequencies(_unmasked(sample_weight, "sample_weight"), len(X))
    kept = torch.ones(len(X), dtype=torch.bool)
    if frequency is not None:
        kept &= torch.nan_to_num(frequency, nan=1.0) > 0
    sigma = _shaped_sigma(_unmasked(sigma, "sigma"), len(X), None if y is None else tuple(y.shape))
    if sigma is not None:
        _check_positive(sigma, kept)
    if estimator.absolute_sigma and sigma is None:
        raise ValueError("absolute_sigma=True: it says that sigma is known, but fit got no sigma")
    named = {"X": X, "y": y, "sample_weight": frequency, "sigma": sigma}
    broken = {name: _not_finite(values) & kept for name, values in named.items() if values is not None}
    for name, rows in broken.items():
        if bool(rows.any()):
            if estimator.nan_policy == "raise":
                raise ValueError(_where(name, named[name], rows))
            kept &= ~rows
    if frequency is not None and bool((frequency[kept] != frequency[kept].round()).any()):
        message = (
            "sample_weight: they are frequencies here (2 is a row observed twice), and some are not whole numbers; for "
            "weights 1/σ² give the standard deviations as sigma"
        )
        warnings.warn(message, FitWarning, stacklevel=4)
    if bool(kept.all()):
        return Data(X, y, _weights(frequency, sigma), 0)
    if not bool(kept.any()):
        raise ValueError("X and y: no row is left: all have NaN or infinity, or sample_weight 0")
    X, y = (None if values is None else values[_mask_like(kept, values)] for values in (X, y))
    frequency, sigma = (None if values is None else values[kept] for values in (frequency, sigma))
    return Data(X, y, _weights(frequency, sigma), int((~kept).sum()))


def _unmasked(values: Any, name: str) -> Any:
    """Return a masked array, or a list with None, with NaN for what is missing: what ``nan_policy`` is for."""
    if isinstance(values, (list, tuple)):
        try:
            found = np.asarray(values)
        except ValueError as error:
            raise ValueError(f"{name}: got rows of different lengths: {error}") from error
        return found if found.dtype != object else _with_missing(found)
    if isinstance(values, np.ndarray) and values.dtype.kind in "mM":
        raise ValueError(
            f"{name}: got dates or durations ({values.dtype}); numbers are expected, such as days as floats"
        )
    if not isinstance(values, np.ma.MaskedArray):
        _check_columns(values, name)
        return values
    return np.ma.filled(values.astype(np.float64), np.nan) if np.ma.is_masked(values) else values.data


def _check_columns(values: Any, name: str) -> None:
    """Refuse dates and words in a data frame or a series by name; missing values are for ``nan_policy``."""
    if isinstance(values, (np.ndarray, torch.Tensor)) or not hasattr(values, "__array__"):  # sparse matrices have none
        return
    if hasattr(values, "columns") and hasattr(values, "dtypes"):
        columns = [(f"{name}, column {column!r}", values[column]) for column in values.columns]
    else:
        columns = [(name, values)] if hasattr(values, "dtype") else []
    for where, column in columns:
        found = np.asarray(column)
        if found.dtype.kind in "mM" or (found.dtype.kind in "OU" and not all(map(_is_number, found.ravel()))):
            raise ValueError(f"{where}: got {column.dtype}, could not convert to float; numbers are expected")


def _is_number(value: Any) -> bool:
    if value is None or type(value).__name__ == "NAType":
        return True
    try:
        float(value)
    except (TypeError, ValueError):
        return isinstance(value, complex)  # scikit-learn's message
    return True


def _with_missing(values: np.ndarray) -> np.ndarray:
    """Return None as NaN, where everything else is numbers."""
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError):
        return values  # scikit-learn's message


def _weights(frequency: torch.Tensor | None, sigma: torch.Tensor | None) -> Weights | None:
    if frequency is not None and bool((frequency == 1).all()):
        frequency = None
    return None if frequency is None and sigma is None else Weights(frequency, sigma)


def _mask_like(mask: torch.Tensor, values: Any) -> Any:
    return mask.to(values.device) if isinstance(values, torch.Tensor) else mask.numpy()


def _not_finite(values: Any) -> torch.Tensor:
    """Return which rows of values (n, ...) hold NaN or infinity, shape (n,), on the CPU."""
    tensor = as_tensor(values)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.zeros(len(tensor), dtype=torch.bool)
    return ~torch.isfinite(tensor).reshape(len(tensor), -1).all(1).cpu()


def _where(name: str, values: Any, rows: torch.Tensor) -> str:
    """Return the message for values that are not finite, with their rows and columns."""
    found = rows.nonzero()[:, 0].tolist()
    tensor = as_tensor(values)
    text = f"Input {name} contains NaN or infinity in {_listed('row', found)}"
    if tensor.ndim > 1 and tensor[0].numel() > 1:
        columns = (~torch.isfinite(tensor)).reshape(len(tensor), -1).any(0).nonzero()[:, 0].tolist()
        text += f", {_listed('column', columns)}"
    return text + "; nan_policy='omit' leaves such rows out"


def _listed(what: str, found: Sequence[int]) -> str:
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"{what}{'s' if len(found) > 1 else ''} {', '.join(map(str, found[:SHOWN]))}{more}"


def _checked_targets(estimator: Any, y: Any, n_rows: int) -> Any:
    if y is None:
        if estimator.residual is None or estimator.model is not None:
            # scikit-learn's own words, which its checks look for
            raise ValueError(f"y: {type(estimator).__name__} requires y to be passed, but the target y is None")
        return None
    if _ndim(y) == 0:
        raise ValueError(f"y: got {y!r}; (n_samples,) or (n_samples, n_outputs) is expected")
    if not isinstance(y, torch.Tensor):
        y = check_array(
            y, ensure_2d=False, ensure_all_finite=False, dtype="numeric", input_name="y", estimator=estimator
        )
    elif y.is_complex():
        raise ValueError("Complex data not supported: y is a complex tensor")
    if y.ndim not in (1, 2):
        raise ValueError(f"y: got shape {tuple(y.shape)}; (n_samples,) or (n_samples, n_outputs) is expected")
    _check_size(y)
    if len(y) != n_rows:
        raise ValueError(f"X and y: found input variables with inconsistent numbers of samples: {[n_rows, len(y)]}")
    return y


def _check_size(y: Any) -> None:
    """Refuse targets whose squares vanish: every point would pass for an exact fit."""
    tensor = as_tensor(y)
    if not tensor.is_floating_point() or not tensor.numel():
        return
    largest = float(torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0).abs().max())
    if 0 < largest < LEAST_TARGET:
        raise ValueError(f"y: its largest value is {largest:.3g}, squares of which vanish in float64: rescale the data")


def _as_numbers(values: Any, name: str) -> torch.Tensor:
    """Return values as a float64 tensor on the CPU."""
    try:
        array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
        if np.iscomplexobj(array):
            raise TypeError("complex numbers")
        return torch.from_numpy(np.array(array, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: got {type(values).__name__} that is not numbers: {error}") from error


def _checked_frequencies(sample_weight: Any, n_rows: int) -> torch.Tensor | None:
    if sample_weight is None:
        return None
    weights = _as_numbers(sample_weight, "sample_weight")
    weights = weights[:, 0] if tuple(weights.shape) == (n_rows, 1) else weights
    if weights.ndim == 0:
        weights = weights.expand(n_rows)
    if weights.shape != (n_rows,):
        raise ValueError(f"sample_weight: got shape {tuple(weights.shape)}; ({n_rows},) is expected")
    if bool((weights < 0).any()):
        row = int((weights < 0).nonzero()[0, 0])
        raise ValueError(f"sample_weight: got {float(weights[row]):g} in row {row}; frequencies >= 0 are expected")
    if not bool((weights != 0).any()):
        raise ValueError("sample_weight: all are zero; no row is left")
    counted = weights[torch.isfinite(weights) & (weights > 0)]
    if counted.numel() and not (float(counted.min()) > 1 / SIZE_OF_WEIGHTS and float(counted.max()) < SIZE_OF_WEIGHTS):
        extremes = f"{float(counted.min()):g} to {float(counted.max()):g}"
        raise ValueError(f"sample_weight: got {extremes}; frequencies are expected, and 0 for rows that are not there")
    return weights


def _shaped_sigma(sigma: Any, n_rows: int, y_shape: tuple[int, ...] | None) -> torch.Tensor | None:
    if sigma is None:
        return None
    found = _as_numbers(sigma, "sigma")
    if found.ndim == 0:
        found = found.expand(n_rows)
    shapes = {(n_rows,), (n_rows, 1)} if y_shape is None else {(n_rows,), (n_rows, 1), y_shape}
    if tuple(found.shape) not in shapes:
        expected = " or ".join(map(str, sorted(shapes, key=len)))
        raise ValueError(
            f"sigma: got shape {tuple(found.shape)}; {expected} is expected (a full covariance matrix: curve_fit)"
        )
    return found[:, 0] if found.ndim == 2 and found.shape[1] == 1 else found


def _check_positive(sigma: torch.Tensor, kept: torch.Tensor) -> None:
    """Check the sigma of the rows that take part; NaN and infinity are for ``nan_policy``."""
    wrong = (sigma <= 0).reshape(len(sigma), -1).any(1) & kept
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        raise ValueError(f"sigma: got {sigma[row].tolist()} in row {row}; positive standard deviations are expected")
    finite = sigma[kept][torch.isfinite(sigma[kept])]
    if finite.numel() and not (float(finite.min()) > 1 / SIZE_OF_SIGMA and float(finite.max()) < SIZE_OF_SIGMA):
        extremes = f"{float(finite.min()):g} to {float(finite.max()):g}"
        raise ValueError(f"sigma: got {extremes}; squares of residuals over it overflow or vanish: rescale the data")


def _ndim(values: Any) -> int:
    """Return the number of axes, also of an object that only becomes an array by ``__array__``."""
    return int(values.ndim if hasattr(values, "ndim") else np.asarray(values).ndim)


def check_features(estimator: Any, X: Any, reset: bool, finite: bool = True) -> Any:
    """Check X for fit (`reset`) or predict; return an array or the tensor.

    Raises
    ------
    ValueError
        For another number of axes or columns, complex values, no rows; with `finite` for NaN and infinity.
    """
    if _ndim(X) == 1:
        raise ValueError(
            f"X: expected 2D array, got 1D array of shape {tuple(np.shape(X))}. Reshape your data: "
            f"{'x.to_frame()' if hasattr(X, 'to_frame') else 'x[:, None]'} makes one column; curve_fit takes 1-D x."
        )
    if not isinstance(X, torch.Tensor):
        of_module = is_module(estimator)
        return validate_data(estimator, X, reset=reset, dtype="numeric", allow_nd=of_module, ensure_all_finite=finite)
    if X.ndim < 2 or (X.ndim > 2 and not is_module(estimator)):
        raise ValueError(f"X: got shape {tuple(X.shape)}; (n_samples, n_features) is expected")
    if X.is_complex():
        raise ValueError("Complex data not supported: X is a complex tensor")
    if len(X) == 0:
        raise ValueError("X: got 0 samples; at least 1 is expected")
    if finite and X.is_floating_point() and not bool(torch.isfinite(X).all()):
        raise ValueError("Input X contains NaN or infinity.")
    if reset:
        estimator.n_features_in_ = X.shape[1]
        if hasattr(estimator, "feature_names_in_"):
            del estimator.feature_names_in_
    elif X.shape[1] != estimator.n_features_in_:
        raise ValueError(
            f"X has {X.shape[1]} features, but {type(estimator).__name__} is expecting "
            f"{estimator.n_features_in_} features as input."
        )
    return X
