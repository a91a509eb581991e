"""Any (J, r) as a linearisation: a model X @ (theta - theta_0), linear in theta, whose rows are those of J.

With ``y = -r`` its residuals at theta_0 are r and its Jacobian is J, both exactly.
"""

import numpy as np
import pytest
import torch

from lmfit_gpu.backends import get_backend
from lmfit_gpu.jacobian import Derivatives
from lmfit_gpu.linear import linearize
from lmfit_gpu.linear.covariance import marked_covariance
from lmfit_gpu.models import TorchFunction
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.rows import ArrayRows

CPU = torch.device("cpu")
SOLVERS = ("qr", "cholesky", "dual", "cg")
# The mark is what conftest.py looks for when a test starts: a machine may not have this one.
CUPYNUMERIC = pytest.param("cupynumeric", marks=pytest.mark.cupynumeric)
BACKENDS = ("scipy", "torch", CUPYNUMERIC)


def known(lin):
    """Return (JᵀJ)⁻¹ marked, the rank, and a mask of what is undetermined."""
    found = lin.estimable()
    return marked_covariance(found.factor, found.undetermined, found.held), found.rank, found.undetermined


def tensor(values, dtype=torch.float64):
    return torch.as_tensor(np.asarray(values, dtype=np.float64)).to(dtype)


def injected_problem(J, r, theta=None, *, dtype=torch.float64, devices=(CPU,), chunk_rows="auto"):
    """Return (problem, theta) where the Jacobian is J and the residuals are r."""
    J = np.asarray(J, dtype=np.float64)
    start = torch.zeros(J.shape[1], dtype=dtype) if theta is None else tensor(theta, dtype)
    names = tuple(f"p{j}" for j in range(J.shape[1]))
    model = TorchFunction(lambda x, t: torch.nan_to_num(x) @ (t - start.to(t)), names, "theta")
    rows = ArrayRows(tensor(J), tensor(-np.asarray(r)))
    return LeastSquaresProblem(model, rows, start, devices=devices, chunk_rows=chunk_rows), start


def exact(x, theta):
    """Return J itself, as a user's Jacobian function; choosing a route of autograd takes longer."""
    return x


def injected(J, r, solver="qr", backend="scipy", scale=None, *, jac=exact, **options):
    """Return the linearisation of J and r, with D = `scale` when given."""
    problem, theta = injected_problem(J, r, **options)
    try:
        jacobian = Derivatives.choose(problem, jac, theta).at(theta)
        lin = linearize(jacobian, solver, get_backend(backend, CPU))
    finally:
        problem.close()
    return lin if scale is None else lin.with_scale(tensor(scale))


def graded(rng, m, n, condition):
    """Return J (m, n) with singular values from 1 down to 1/condition, geometrically, and column units."""
    k = min(m, n)
    u = np.linalg.qr(rng.standard_normal((m, k)))[0]
    v = np.linalg.qr(rng.standard_normal((n, k)))[0]
    return (u * condition ** -np.linspace(0, 1, k)) @ v.T
