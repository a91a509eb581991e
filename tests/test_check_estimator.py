"""Every check that scikit-learn has for a regressor: the default network, a module factory, a model function.

No check is expected to fail. scikit-learn itself skips one unless SCIPY_ARRAY_API is set before SciPy is imported; a
process of its own runs that one.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.utils.estimator_checks import (
    check_array_api_input,
    check_param_validation,
    parametrize_with_checks,
)

from lmfit_gpu import LMRegressor

pytestmark = [  # said of the small, noisy data of the checks
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore::lmfit_gpu.exceptions.CovarianceWarning"),
    pytest.mark.filterwarnings("ignore::lmfit_gpu.exceptions.FitWarning"),
]


class SmallNetwork(torch.nn.Module):
    """A user's own network, made for the data."""

    def __init__(self, n_features_in_, n_outputs, width=4):
        super().__init__()
        self.hidden = torch.nn.Linear(n_features_in_, width, dtype=torch.float64)
        self.out = torch.nn.Linear(width, n_outputs, dtype=torch.float64)

    def forward(self, X):
        return self.out(torch.tanh(self.hidden(X)))


class Plane:
    """θ₀ + X θ₁.. in numpy or torch; an object, because the name of a test would hold a function's address."""

    def __call__(self, X, theta):
        return X @ theta[1:] + theta[0]

    def __repr__(self):
        return "plane"


class Zeros:
    """The start of a plane."""

    def __call__(self, X, y):
        return np.zeros(X.shape[1] + 1)

    def __repr__(self):
        return "zeros"


def factory():
    return LMRegressor(SmallNetwork, max_iter=20)  # trials enough for a score; noise is not worth more


def function():
    return LMRegressor(Plane(), x_format="columns", p0=Zeros())


@parametrize_with_checks([LMRegressor(), factory(), function()])
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize("make", [LMRegressor, factory, function])
def test_parameter_validation_check(make):
    """As scikit-learn asks of its own estimators: every argument has a constraint, and an error that names it."""
    check_param_validation("LMRegressor", make())


ARRAY_API = """
import warnings
import test_check_estimator as tests
warnings.simplefilter("ignore")
for make in (tests.LMRegressor, tests.factory, tests.function):
    tests.check_array_api_input("LMRegressor", make(), array_namespace="numpy", expect_only_array_outputs=False)
print("passed")
"""


def test_the_check_of_array_api_dispatch():
    assert callable(check_array_api_input)
    environment = {**os.environ, "SCIPY_ARRAY_API": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", ARRAY_API],
        env=environment,
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.stdout.strip() == "passed", run.stderr
