"""Judge what a fit of the line makes of bad or odd input: a clear error or a right fit, in time.

A clear error is a ValueError or TypeError whose text names an argument. A right fit keeps the start's promises: finite
parameters inside the bounds, a cost not above that at the start, and with success a gradient of the cost that vanishes
but for components a bound blocks, or of parameters that the fit warned of. Cost and gradient are worked out here,
scaled so that 1e300 and 1e-300 do not matter.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from robust_problems import LOSSES

from lmfit_gpu import LMRegressor

SECONDS = 20  # for one example; a fit of twelve points takes a hundredth of one
KKT_LIMIT = 1e-5
ARGUMENTS = (
    "X|y|xdata|ydata|p0|model|residuals?|bounds|fixed|tied|sigma|absolute_sigma|sample_weight|loss|f_scale|nan_policy|"
    "solver|backend|jac|max_iter|maxfev|chunk_rows|damping|ftol|xtol|gtol|dtype|devices|x_format|check_finite|method|"
    "callback|unknown"
)
# scikit-learn's own words for data, which its checks ask for, do not always name X.
SKLEARN = r"Found array with|Expected 2D array|sparse|Complex data|minimum of|could not convert|dtype|argument must be"

X = np.linspace(0.0, 2.0, 12)[:, None]
Y = 1.5 + 2.5 * X[:, 0] + np.array([1, -2, 3, 1, -1, 2, -3, 0, 1, -2, 1, -1]) / 10
START = [1.0, 1.0]


def line(x: Any, a: Any, b: Any) -> Any:
    """The model of every fit here; exact in numpy and in torch."""
    return a + b * x


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Raise AssertionError when the body takes longer than an example may."""

    def stop(*_: Any) -> None:
        raise AssertionError(f"longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def judge(data: dict[str, Any], limits: Any = None, **options: Any) -> bool:
    """Fit the line and check that the outcome is a clear error or a right fit; say whether it was a fit."""
    given = {"X": X, "y": Y} | data
    options = {"p0": START} | options
    with time_limit():
        try:
            estimator = LMRegressor(line, **options).fit(**given)
        except (ValueError, TypeError) as error:
            assert_clear(error)
            return False
    trusted = estimator.result_.success and not options.keys() & {"ftol", "xtol", "gtol"}
    determined = ~np.isinf(estimator.stderr_) | (estimator.result_.dof <= 0)  # a warning names those that are not
    assert_right(estimator.theta_, given, options, limits, trusted & determined)
    return True


def assert_clear(error: Exception) -> None:
    """Check that an error names an argument, in a sentence."""
    assert re.search(rf"\b({ARGUMENTS})\b|{SKLEARN}", str(error)), repr(error)
    assert len(str(error)) > 10


def unit(values: np.ndarray) -> np.ndarray:
    """Return a vector of length 1 in its direction, without overflow; 0 of 0."""
    largest = np.max(np.abs(values), initial=0.0)
    if largest == 0:
        return values
    return values / largest / np.linalg.norm(values / largest)


def as_floats(values: Any) -> np.ndarray:
    """Return what a user gave as an array of float64."""
    values = [values["a"], values["b"]] if isinstance(values, dict) else values
    return np.array(values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values, dtype=float)


def rows_of(given: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """Return x, y and the weight of a residual √w/sigma, of the rows that count."""
    x, y = as_floats(given["X"]), as_floats(given["y"])
    y = np.full((len(x), 1), y) if y.size == 1 else y.reshape(len(x), -1)  # curve_fit takes a scalar, as SciPy does
    x = np.broadcast_to(x if x.shape == y.shape else x[:, :1], y.shape)  # y may have as many columns as X
    ones = np.ones((len(x), 1))
    sigma = ones if given.get("sigma") is None else as_floats(given["sigma"]).reshape(-1, 1)
    sigma = sigma.reshape(y.shape) if sigma.size == y.size else sigma
    frequency = ones if given.get("sample_weight") is None else as_floats(given["sample_weight"]).reshape(-1, 1)
    weight = np.broadcast_to(np.sqrt(frequency) / sigma, y.shape)
    keep = np.isfinite(x).all(1) & np.isfinite(y).all(1) & np.isfinite(weight).all(1) & (frequency[:, 0] != 0)
    return x[keep].ravel(), y[keep].ravel(), weight[keep].ravel()


def assert_right(theta: np.ndarray, given: dict[str, Any], options: dict[str, Any], limits: Any, trusted: Any) -> None:
    """Check where a fit of the line ended; its gradient too by the parameters that are to be trusted."""
    lower, upper = ([-np.inf] * 2, [np.inf] * 2) if limits is None else limits
    assert np.isfinite(theta).all()
    assert np.all(theta >= lower)
    assert np.all(theta <= upper)
    x, y, weight = rows_of(given)
    residual, at_start = (weight * (point[0] + point[1] * x - y) for point in (theta, as_floats(options["p0"])))
    terms = weight * (abs(theta[0]) + abs(theta[1] * x) + abs(y))
    rounding = 1e-13 * len(x) * np.max(terms, initial=0.0)
    rho, slope = LOSSES[options.get("loss", "linear")]
    scale = options.get("f_scale", 1.0) if "loss" in options else max(np.max(abs(at_start), initial=0.0), 1e-307)
    cost, start_cost = (np.sum(rho((values / scale) ** 2)) for values in (residual, at_start))
    assert cost <= start_cost * (1 + 1e-9) + rounding / scale
    to_zero = 1e-15 * np.max(abs(at_start), initial=0.0) if not y.any() else 0.0  # θ = 0 is met as well as it can be
    if np.max(abs(residual), initial=0.0) <= max(rounding, to_zero):
        return
    pull = slope((residual / scale) ** 2) * residual
    for j, column in enumerate((weight, weight * x)):
        cosine = float(unit(column) @ unit(pull))
        blocked = (theta[j] <= lower[j] and cosine > 0) or (theta[j] >= upper[j] and cosine < 0)
        assert blocked or not trusted[j] or abs(cosine) <= KKT_LIMIT
