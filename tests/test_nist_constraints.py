"""Fit the 54 NIST runs within bounds, with a parameter fixed, and with a parameter tied; count the digits.

(a) Bounds are the box that start and certified value span, ten times as wide about its centre; the optimum is inside.
(b) One parameter is fixed at its certified value: the others have theirs, and the standard errors of the problem
    without it, worked out here from J at the certified point (no certified table has them).
(c) One parameter is tied as b = s·exp(t), s its certified sign, t a new parameter that starts at log |start|: value and
    standard error of b, by the delta method, are the certified ones.

A run is judged as `lmfit_gpu.validate` judges it: converged, six digits of the parameters, four of the standard errors
(2.8 for Lanczos1, whose residuals are rounding).
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

from lmfit_gpu import LMRegressor
from lmfit_gpu.datasets import NIST_NAMES, NistProblem, correct_digits, load_nist
from lmfit_gpu.exceptions import CovarianceWarning
from lmfit_gpu.validate import PARAM_DIGITS, stderr_limit

# A trial point may overflow in a model, and numpy says so; what a model is written in is found out by a call with
# tensors, and numpy may then complain of __array_wrap__.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:lmfit_gpu.datasets.nist_models"),
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning"),
]

BOX_WIDENED = 10
FORMS = ["torch", "numpy"]
RUNS = [pytest.param(name, start, id=f"{name}-{start}") for name in NIST_NAMES for start in (1, 2)]

# Which parameter is fixed or tied: the first, unless the constrained problem has another minimum in the way of its far
# start. With b1 fixed that is rss = 33.6 (a pole) of Hahn1 and 0.052 (b5 → ∞) of MGH17; MGH09 with b1 = exp(t) goes to
# t → −∞. The unconstrained engine, given the reduced or reparametrised models as they are, ends there too.
FIXED = {"Hahn1": 1, "MGH17": 3}
TIED = {"MGH09": 3}


def model_of(problem: NistProblem, form: str) -> Any:
    return problem.model_torch if form == "torch" else problem.model_numpy


def fit(problem: NistProblem, form: str, **options: Any) -> LMRegressor:
    """Return a fitted estimator; a run that has not converged is judged by its status, not by its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", CovarianceWarning)
        return LMRegressor(model_of(problem, form), **options).fit(problem.X, problem.y)


def standard_errors(problem: NistProblem, free: list[int]) -> np.ndarray:
    """Return the standard errors of some parameters, the others known, at the certified point, shape (len(free),).

    residual_std·√diag (JᵀJ)⁻¹ with J by automatic differentiation, its columns scaled to length 1, by their QR.
    """
    x = torch.from_numpy(problem.x)
    params = torch.from_numpy(problem.reference.params)
    J = torch.autograd.functional.jacobian(lambda b: problem.model_torch(x, *b), params).numpy()[:, free]
    lengths = np.linalg.norm(J, axis=0)
    inverse = np.linalg.inv(np.linalg.qr(J / lengths, mode="r"))
    residual_std = np.sqrt(problem.reference.rss / (len(problem.y) - len(free)))
    return residual_std * np.linalg.norm(inverse, axis=1) / lengths


def assert_digits(problem: NistProblem, values: Any, errors: Any, expected_values: Any, expected_errors: Any) -> None:
    """Check that parameters and standard errors have the digits that validate asks for."""
    assert correct_digits(values, expected_values) >= PARAM_DIGITS
    assert correct_digits(errors, expected_errors) >= stderr_limit(problem.name)


@pytest.mark.parametrize("name", NIST_NAMES)
def test_the_standard_errors_worked_out_here_are_the_certified_ones(name: str) -> None:
    problem = load_nist(name)
    every = list(range(len(problem.param_names)))
    assert correct_digits(standard_errors(problem, every), problem.reference.stderr) >= 7


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "start"), RUNS)
def test_certified_within_bounds(name: str, start: int, form: str) -> None:
    problem = load_nist(name)
    p0, certified = problem.starts[start - 1], problem.reference.params
    centre, half = (p0 + certified) / 2, BOX_WIDENED * np.abs(p0 - certified) / 2
    assert np.all(half > 0)
    estimator = fit(problem, form, p0=p0, bounds=(centre - half, centre + half))
    assert estimator.result_.success
    assert np.all(np.abs(estimator.theta_ - centre) <= half * (1 + 1e-15))
    assert_digits(problem, estimator.theta_, estimator.stderr_, certified, problem.reference.stderr)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "start"), RUNS)
def test_certified_with_one_parameter_fixed(name: str, start: int, form: str) -> None:
    problem = load_nist(name)
    fixed, certified = FIXED.get(name, 0), problem.reference.params
    p0 = problem.starts[start - 1].copy()
    p0[fixed] = certified[fixed]
    estimator = fit(problem, form, p0=p0, fixed=(problem.param_names[fixed],))
    free = [j for j in range(len(p0)) if j != fixed]
    assert estimator.result_.success
    assert tuple(estimator.params_) == problem.param_names
    assert estimator.theta_[fixed] == certified[fixed]
    assert estimator.stderr_[fixed] == 0
    assert np.all(estimator.covariance_[fixed] == 0)
    assert estimator.result_.dof == len(problem.y) - len(free)
    expected = standard_errors(problem, free)
    assert_digits(problem, estimator.theta_[free], estimator.stderr_[free], certified[free], expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "start"), RUNS)
def test_certified_with_one_parameter_tied(name: str, start: int, form: str) -> None:
    problem = load_nist(name)
    tied, certified = TIED.get(name, 0), problem.reference
    b, sign = problem.param_names[tied], float(np.sign(certified.params[tied]))
    p0 = dict(zip(problem.param_names, problem.starts[start - 1].tolist(), strict=True))
    p0["t"] = float(np.log(abs(p0.pop(b))))
    exp = torch.exp if form == "torch" else np.exp
    estimator = fit(problem, form, p0=p0, tied={b: lambda t: sign * exp(t)})
    k = len(problem.param_names)
    assert estimator.result_.success
    assert tuple(estimator.params_) == (*problem.param_names, "t")
    assert estimator.result_.dof == problem.dof
    assert_digits(problem, estimator.theta_[:k], estimator.stderr_[:k], certified.params, certified.stderr)
    value, error = certified.params[tied], certified.stderr[tied]
    log_value, log_error = np.log(abs(value)), error / abs(value)
    assert estimator.theta_[k] == pytest.approx(log_value, rel=0, abs=1e-6)
    assert estimator.stderr_[k] == pytest.approx(log_error, rel=10 ** -stderr_limit(name))
