"""Residuals at many points at once equal those one by one, whatever the model does."""

import numpy as np
import pytest
import torch

from lmfit_gpu.candidates import ManyPoints
from lmfit_gpu.models import ModuleModel, NumpyFunction, ResidualOf, TorchFunction
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.rows import ArrayRows

X = torch.linspace(0, 4, 30, dtype=torch.float64)
Y = torch.cos(X)


def refuses(x, a, b):
    if a < 0:
        raise ValueError("a must not be negative")
    return a * np.exp(-b * x)


MODELS = {
    "vmap": TorchFunction(lambda x, a, b: a * torch.exp(-b * x), ("a", "b")),
    "vmap, vector": TorchFunction(lambda x, t: t[0] * torch.exp(-t[1] * x), ("a", "b"), "theta"),
    "vmap, residual": TorchFunction(lambda t, x, y: t[0] * torch.exp(-t[1] * x) - y, ("a", "b"), "residual"),
    "vmap, composed": ResidualOf(TorchFunction(lambda x, a, b: a + b * x, ("a", "b")), lambda f, y: (f - y) / 2),
    "vmap, module": ModuleModel(torch.nn.Linear(1, 1).double()),
    "columns": NumpyFunction(lambda x, a, b: a * np.exp(-b * x), ("a", "b")),
    "columns, vector": NumpyFunction(lambda x, t: t[0] * np.exp(-t[1] * x), ("a", "b"), "theta"),
    "columns, residual": NumpyFunction(lambda t, x, y: t[0] * np.exp(-t[1] * x) - y, ("a", "b"), "residual"),
    "one by one": NumpyFunction(lambda x, t: np.stack([np.ones_like(x), x], 1) @ t, ("a", "b"), "theta"),
    "one by one, coupled": NumpyFunction(lambda x, a, b: np.convolve(a * x, np.exp(-b * x))[:30], ("a", "b")),
    "one by one, branch": TorchFunction(lambda x, a, b: a * x if b > 1 else b * x, ("a", "b")),
    "one by one, refuses": NumpyFunction(refuses, ("a", "b")),
    "one by one, sums": NumpyFunction(lambda x, a, b: a * x + b * x.sum() + 0 * np.size(a), ("a", "b")),
}


@pytest.mark.parametrize("label", MODELS)
def test_the_way_is_found_and_reproduces_single_calls(label):
    model, theta = MODELS[label], torch.ones(2, dtype=torch.float64)
    x = X[:, None] if "module" in label else X
    y = Y[:, None] if "module" in label else Y
    problem = LeastSquaresProblem(model, ArrayRows(x, y), theta)
    points = torch.from_numpy(np.random.default_rng(1).normal(1, 1, (50, 2)))
    many = ManyPoints.choose(problem, problem.probe(30), points)
    if "sums" not in label:  # it broadcasts as it is
        assert many.how == label.split(",")[0]
    found = many(points)
    assert found.shape == (50, 30)
    for point, r in zip(points, found, strict=True):
        if "refuses" in label and point[0] < 0:
            assert bool(torch.isnan(r).all())
        else:
            torch.testing.assert_close(r, problem.residual(point, slice(0, 30)), rtol=1e-8, atol=1e-8)


def test_no_finite_point_to_compare_means_one_by_one():
    model = TorchFunction(lambda x, a: torch.log(a - 5 - x), ("a",))
    theta = torch.ones(1, dtype=torch.float64)
    problem = LeastSquaresProblem(model, ArrayRows(X, Y), theta)
    assert ManyPoints.choose(problem, problem.probe(30), torch.ones(3, 1).double()).how == "one by one"


def test_a_model_that_raises_for_one_of_a_batch_loses_only_that_one():
    def positive(x, a):
        if np.any(a < 0):
            raise ValueError("negative")
        return a * x

    theta = torch.ones(1, dtype=torch.float64)
    problem = LeastSquaresProblem(NumpyFunction(positive, ("a",)), ArrayRows(X, Y), theta)
    points = torch.tensor([[1.0], [2.0], [-1.0], [3.0]]).double()
    many = ManyPoints.choose(problem, problem.probe(30), points)
    assert many.how == "columns"
    assert torch.isfinite(many(points)).all(1).tolist() == [True, True, False, True]


def test_warnings_of_far_guesses_stay_silent():
    def loud(x, a):
        import warnings

        warnings.warn("far off", RuntimeWarning, stacklevel=1)
        return a * x

    theta = torch.ones(1, dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match="far off"):
        problem = LeastSquaresProblem(NumpyFunction(loud, ("a",)), ArrayRows(X, Y), theta)
    many = ManyPoints.choose(problem, problem.probe(30), torch.ones(4, 1).double())
    assert bool(torch.isfinite(many(torch.ones(4, 1).double())).all())
