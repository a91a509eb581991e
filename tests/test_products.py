"""Products JᵀJ v: which operator is chosen, that all give the same, estimated norms, what is counted."""

import numpy as np
import pytest
import torch
from injected import BACKENDS, CPU, CUPYNUMERIC, exact, injected_problem, tensor
from oracles import numpy_model, problem_of

from lmfit_gpu.backends import get_backend
from lmfit_gpu.jacobian import Derivatives
from lmfit_gpu.linear.products import (
    PROBES,
    FreeProducts,
    StoredGram,
    StoredRows,
    reduce_for_products,
    stored_bytes,
)

EPS = float(np.finfo(np.float64).eps)
TALL, SQUARE, WIDE = (23, 6), (6, 6), (6, 23)
shapes = pytest.mark.parametrize("shape", [TALL, SQUARE, WIDE], ids=str)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(params=[True, False], ids=["kept", "not-kept"])
def kept(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr("lmfit_gpu.jacobian.KEEP_BYTES", 0)
    return request.param


def jacobian_of(kind, J, r, **options):
    """Return the Jacobian of a linear model by autograd, by the user's function, or of a numpy model."""
    if kind == "numpy":
        theta = torch.zeros(J.shape[1], dtype=torch.float64)
        problem = problem_of(numpy_model(lambda X, t: X @ t, "theta"), J, -r, theta, **options)
        return Derivatives.choose(problem, "3-point", theta).at(theta)
    problem, theta = injected_problem(J, r, **options)
    return Derivatives.choose(problem, "autograd" if kind == "torch" else exact, theta).at(theta)


def operator(kind, backend, kept, shape):
    """Return what the table of the module docstring says."""
    if backend != "cupynumeric" and (kept or kind == "torch"):
        return FreeProducts
    return StoredGram if shape[0] >= shape[1] else StoredRows


@shapes
@every_backend
@pytest.mark.parametrize("kind", ["torch", "user", "numpy"])
def test_every_operator_is_the_normal_matrix(kind, backend, kept, shape, rng):
    J, r, v = rng.standard_normal(shape), rng.standard_normal(shape[0]), rng.standard_normal(shape[1])
    backend = get_backend(backend, CPU)
    jacobian = jacobian_of(kind, J, r, chunk_rows=4)
    reduction = reduce_for_products(jacobian, backend)
    assert jacobian.keeps == kept
    assert type(reduction.product) is operator(kind, backend.name, kept, shape)
    rtol = 1e-7 if kind == "numpy" else 1e-12
    for _ in range(2):
        vectors = reduction.backend
        assert vectors.name == ("torch" if type(reduction.product) is FreeProducts else backend.name)
        product = vectors.to_tensor(reduction.product(vectors.asarray(tensor(v))), CPU)
        assert product.dtype == torch.float64
        np.testing.assert_allclose(product, J.T @ (J @ v), atol=rtol * np.linalg.norm(J.T @ J) * np.linalg.norm(v))
    size = np.linalg.norm(J) * np.linalg.norm(r)
    np.testing.assert_allclose(reduction.gradient, J.T @ r, atol=rtol * size)
    assert reduction.gradient.dtype == reduction.column_norms.dtype == torch.float64
    assert reduction.residual_norm == pytest.approx(np.linalg.norm(r), rel=1e-13)
    gram = reduction.gram()
    assert gram.shape == (shape[1], shape[1])
    np.testing.assert_allclose(gram, J.T @ J, atol=rtol * np.linalg.norm(J) ** 2)
    if backend.name == "cupynumeric" or kept or kind != "torch":
        np.testing.assert_allclose(reduction.column_norms, np.linalg.norm(J, axis=0), rtol=rtol)
    jacobian.problem.close()


@pytest.mark.parametrize("shape", [TALL, WIDE], ids=str)
@pytest.mark.parametrize("backend", ["torch", CUPYNUMERIC])
def test_devices_give_the_same(backend, kept, shape, rng):
    J, r, v = rng.standard_normal(shape), rng.standard_normal(shape[0]), rng.standard_normal(shape[1])
    backend, seen = get_backend(backend, CPU), []
    for devices in ((CPU,), (CPU, CPU)):
        jacobian = jacobian_of("torch", J, r, chunk_rows=4, devices=devices)
        reduction = reduce_for_products(jacobian, backend)
        vectors = reduction.backend
        assert vectors.name == ("torch" if type(reduction.product) is FreeProducts else backend.name)
        product = vectors.to_tensor(reduction.product(vectors.asarray(tensor(v))), CPU)
        seen.append(torch.cat((product, reduction.gradient, reduction.column_norms)))
        jacobian.problem.close()
    assert torch.equal(*seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_that_of_the_arithmetic_that_makes_the_products(dtype, kept, rng):
    """A kept J of float32 is multiplied in float64; autograd works in the model's arithmetic."""
    J, r = rng.standard_normal(TALL), rng.standard_normal(TALL[0])
    reduction = reduce_for_products(jacobian_of("torch", J, r, dtype=dtype), get_backend("torch", CPU))
    assert reduction.epsilon == (EPS if kept else torch.finfo(dtype).eps)


# ---- estimated norms


def test_estimated_norms_are_within_their_statistics(monkeypatch, rng):
    """(Jᵀz)_j² / ‖J_j‖² has mean 1 and variance at most 2: 32 of them (2/32)^½, over 300 columns 1/17 of that."""
    monkeypatch.setattr("lmfit_gpu.jacobian.KEEP_BYTES", 0)
    J = rng.standard_normal((700, 300)) * 10.0 ** rng.uniform(-4, 4, 300)
    J[:, 7] = J[:, 100] = 0.0
    J[:, 8], J[11, 8] = 0.0, -3.0
    reduction = reduce_for_products(jacobian_of("torch", J, np.ones(700)), get_backend("scipy", CPU))
    norms, estimated = np.linalg.norm(J, axis=0), reduction.column_norms.numpy()
    assert estimated[7] == estimated[100] == 0.0
    assert estimated[8] == pytest.approx(3.0, rel=1e-15)  # one entry has one square
    shares = (estimated[norms > 0] / norms[norms > 0]) ** 2
    deviation = (2 / PROBES) ** 0.5
    assert np.all(np.abs(shares - 1) <= 6 * deviation)
    assert abs(shares.mean() - 1) <= 5 * deviation / 298**0.5
    assert 0.7 * deviation <= shares.std() <= 1.3 * deviation


def test_estimated_norms_are_the_same_each_time_and_on_all_devices(monkeypatch, rng):
    monkeypatch.setattr("lmfit_gpu.jacobian.KEEP_BYTES", 0)
    J, r, backend = rng.standard_normal((50, 4)), rng.standard_normal(50), get_backend("scipy", CPU)
    seen = []
    for devices in ((CPU,), (CPU,), (CPU, CPU)):
        jacobian = jacobian_of("torch", J, r, chunk_rows=16, devices=devices)
        seen.append(reduce_for_products(jacobian, backend).column_norms)
        jacobian.problem.close()
        torch.rand(3)  # the global generator has no part in it
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


# ---- memory and work


def test_the_smaller_of_the_two_is_stored():
    assert stored_bytes(1000, 10) == 800
    assert stored_bytes(10, 1000) == 80_000
    assert stored_bytes(7, 7) == 8 * 49


def test_the_rows_are_made_by_one_pass_and_the_gram_matrix_too(rng):
    for shape in (TALL, WIDE):
        jacobian = jacobian_of("user", rng.standard_normal(shape), rng.standard_normal(shape[0]))
        before = jacobian.nfev
        reduce_for_products(jacobian, get_backend("scipy", CPU))
        assert jacobian.nfev - before == 1
