"""Fit a case by LMRegressor or by curve_fit, with its bounds and its sigma, and check what every answer must have."""

from __future__ import annotations

from typing import Any

import numpy as np
from cases import Case, compare

from lmfit_gpu import LMRegressor, curve_fit


def as_column(x: Any) -> Any:
    """Return x as one column of X."""
    return np.asarray(x)[:, None]


def fit(case: Case, form: str, **options: Any) -> LMRegressor:
    """Return an estimator fitted to the case; options replace what the case says."""
    data = {name: options.pop(name) for name in ("sigma", "sample_weight") if name in options}
    data = {"sigma": case.sigma} | data
    options = {"p0": case.p0, "bounds": case.bounds, "absolute_sigma": case.absolute_sigma} | options
    return LMRegressor(case.model(form), **options).fit(as_column(case.x), case.y, **data)


def curve_fit_of(case: Case, form: str, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return popt and pcov of the case; options replace what the case says."""
    bounds = {} if case.bounds is None else {"bounds": case.bounds}
    given = {"p0": case.p0, "sigma": case.sigma, "absolute_sigma": case.absolute_sigma} | bounds | options
    return curve_fit(case.model(form), case.x, case.y, **given)


def standard_errors(covariance: np.ndarray) -> np.ndarray:
    """Return the square roots of the diagonal of a finite, symmetric covariance without negative variances."""
    assert np.all(np.isfinite(covariance))
    spread = np.sqrt(np.abs(np.outer(covariance.diagonal(), covariance.diagonal())))
    assert np.all(np.abs(covariance - covariance.T) <= 1e-12 * spread)
    assert np.all(covariance.diagonal() >= 0)
    return np.sqrt(covariance.diagonal())


def assert_regressor_right(case: Case, form: str, **options: Any) -> LMRegressor:
    """Fit the case by LMRegressor, check parameters, errors and rss, and return the estimator."""
    estimator = fit(case, form, **options)
    assert estimator.result_.success
    assert tuple(estimator.params_) == case.params
    assert compare(case.expected, estimator.theta_, estimator.stderr_, 2 * estimator.result_.cost) == []
    assert np.allclose(standard_errors(estimator.covariance_), estimator.stderr_, rtol=1e-12, atol=0)
    assert_inside(case, estimator.theta_)
    return estimator


def assert_curve_fit_right(case: Case, form: str, **options: Any) -> None:
    """Fit the case by curve_fit and check parameters and errors."""
    popt, pcov = curve_fit_of(case, form, **options)
    assert compare(case.expected, popt, standard_errors(pcov)) == []
    assert_inside(case, popt)


def assert_inside(case: Case, theta: np.ndarray) -> None:
    """Check that a point keeps the bounds of the case, to the bit."""
    if case.bounds is not None:
        assert np.all(theta >= case.bounds[0])
        assert np.all(theta <= case.bounds[1])
