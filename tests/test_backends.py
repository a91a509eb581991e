"""The primitives of every backend against numpy."""

import numpy as np
import pytest
import torch
from injected import BACKENDS, CPU, tensor

from lmfit_gpu.backends import ScipyBackend, TorchBackend, get_backend

SHAPES = [(1, 1), (1, 9), (3, 3), (3, 50), (4, 2), (6, 1), (8, 1339)]  # (k, l): both long and short leaves


@pytest.fixture(params=BACKENDS)
def backend(request):
    return get_backend(request.param, CPU)


@pytest.fixture(params=["scipy", "torch"])
def leaves(request):
    return get_backend(request.param, CPU).leaves(CPU)


def numpy_of(backend, array):
    return backend.to_tensor(array, CPU).numpy()


def columns_of(rng, shape):
    return rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 3, shape[0])[:, None]


def symmetric(rng, n):
    a = rng.standard_normal((n + 2, n))
    return a.T @ a


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_arrays_are_float64_and_come_back(backend, dtype, rng):
    given = tensor(rng.standard_normal((3, 4)), dtype)
    back = backend.to_tensor(backend.asarray(given), CPU)
    assert back.dtype == torch.float64
    assert torch.equal(back, given.double())


def test_asarray_shares_the_memory_of_float64(backend):
    given = torch.zeros(3, dtype=torch.float64)
    array = backend.asarray(given)
    given[1] = 5.0
    assert float(array[1]) == 5.0


def test_asarray_of_a_tensor_with_gradient(backend):
    array = backend.asarray(torch.ones(3, dtype=torch.float64, requires_grad=True))
    assert numpy_of(backend, array).tolist() == [1.0, 1.0, 1.0]


def test_to_tensor_takes_views(backend, rng):
    matrix = rng.standard_normal((4, 4))
    array = backend.asarray(tensor(matrix))
    np.testing.assert_array_equal(numpy_of(backend, array[:3, :3].T), matrix[:3, :3].T)
    np.testing.assert_array_equal(numpy_of(backend, array[:, 1]), matrix[:, 1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triangle(leaves, shape, rng):
    columns = columns_of(rng, shape)
    triangle = numpy_of(leaves, leaves.triangle(leaves.asarray(tensor(columns))))
    k = shape[0]
    assert triangle.shape == (k, k)
    np.testing.assert_array_equal(np.tril(triangle, -1), 0.0)
    gram, sizes = columns @ columns.T, np.linalg.norm(columns, axis=1)
    assert np.all(np.abs(triangle.T @ triangle - gram) <= 1e-13 * np.outer(sizes, sizes))


def test_triangle_keeps_what_squares_would_lose(leaves):
    columns = np.array([[1.0, 0.0, 0.0], [1.0, 1e-10, 0.0]])
    triangle = numpy_of(leaves, leaves.triangle(leaves.asarray(tensor(columns))))
    assert abs(triangle[1, 1]) == pytest.approx(1e-10, rel=1e-12)


def test_triangle_of_a_part_of_a_block(leaves, rng):
    block = rng.standard_normal((3, 200))
    part = leaves.triangle(leaves.asarray(tensor(block))[:, 51:102])
    alone = leaves.triangle(leaves.asarray(tensor(block[:, 51:102].copy())))
    np.testing.assert_allclose(numpy_of(leaves, part), numpy_of(leaves, alone), rtol=1e-13, atol=1e-14)


def test_gram_of_a_part_of_a_block_is_the_gram_of_its_copy(leaves, rng):
    """Bit for bit: the sums over rows must not depend on how long the block is."""
    leaf = rng.standard_normal((5, 1339))
    alone = numpy_of(leaves, leaves.gram(leaves.asarray(tensor(leaf))))
    for start, width in [(4096, 5435), (0, 1340), (1, 1344), (3, 4096), (4, 4100), (12288, 13627)]:
        block = np.zeros((5, width))
        block[:, start : start + 1339] = leaf
        part = leaves.gram(leaves.asarray(tensor(block))[:, start : start + 1339])
        np.testing.assert_array_equal(numpy_of(leaves, part), alone)


@pytest.mark.parametrize("k", [1, 2, 7])
def test_join_triangles(leaves, k, rng):
    upper, lower = (np.triu(rng.standard_normal((k, k))) for _ in range(2))
    joined = leaves.join_triangles(leaves.asarray(tensor(upper)), leaves.asarray(tensor(lower)))
    joined = numpy_of(leaves, joined)
    assert joined.shape == (k, k)
    np.testing.assert_array_equal(np.tril(joined, -1), 0.0)
    np.testing.assert_allclose(joined.T @ joined, upper.T @ upper + lower.T @ lower, atol=1e-13)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gram(leaves, shape, rng):
    columns = columns_of(rng, shape)
    gram = numpy_of(leaves, leaves.gram(leaves.asarray(tensor(columns))))
    sizes = np.linalg.norm(columns, axis=1)
    assert np.all(np.abs(gram - columns @ columns.T) <= 1e-13 * np.outer(sizes, sizes))


@pytest.mark.parametrize("n", [1, 2, 9])
def test_svd(backend, n, rng):
    matrix = np.triu(rng.standard_normal((n, n)))
    u, s, vt = (numpy_of(backend, part) for part in backend.svd(backend.asarray(tensor(matrix))))
    np.testing.assert_allclose((u * s) @ vt, matrix, atol=1e-13)
    np.testing.assert_allclose(s, np.linalg.svd(matrix, compute_uv=False), atol=1e-13)
    np.testing.assert_allclose(u.T @ u, np.eye(n), atol=1e-13)
    np.testing.assert_allclose(vt @ vt.T, np.eye(n), atol=1e-13)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_svd_of_a_non_finite_matrix_is_nan(backend, value):
    matrix = np.eye(3)
    matrix[0, 2] = value
    u, s, vt = (numpy_of(backend, part) for part in backend.svd(backend.asarray(tensor(matrix))))
    assert (u.shape, s.shape, vt.shape) == ((3, 3), (3,), (3, 3))
    assert np.isnan(u).all()
    assert np.isnan(s).all()
    assert np.isnan(vt).all()


@pytest.mark.parametrize("n", [1, 2, 9])
def test_eigh(backend, n, rng):
    matrix = symmetric(rng, n) - 2 * np.eye(n)
    values, vectors = (numpy_of(backend, part) for part in backend.eigh(backend.asarray(tensor(matrix))))
    assert np.all(np.diff(values) >= 0)
    np.testing.assert_allclose((vectors * values) @ vectors.T, matrix, atol=1e-12)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(n), atol=1e-13)


@pytest.mark.parametrize("n", [1, 2, 9])
def test_cholesky_solves(backend, n, rng):
    matrix, b = symmetric(rng, n) + np.eye(n), rng.standard_normal(n)
    factor = backend.cholesky(backend.asarray(tensor(matrix)))
    x = numpy_of(backend, backend.cholesky_solve(factor, backend.asarray(tensor(b))))
    assert x.shape == (n,)
    np.testing.assert_allclose(x, np.linalg.solve(matrix, b), rtol=1e-10)


def test_cholesky_leaves_its_arguments(backend, rng):
    matrix, b = symmetric(rng, 4), rng.standard_normal(4)
    a, rhs = backend.asarray(tensor(matrix)), backend.asarray(tensor(b))
    backend.cholesky_solve(backend.cholesky(a), rhs)
    np.testing.assert_array_equal(numpy_of(backend, a), matrix)
    np.testing.assert_array_equal(numpy_of(backend, rhs), b)


@pytest.mark.parametrize("eigenvalue", [-1.0, 0.0])
def test_cholesky_of_what_is_not_positive_definite_is_none(backend, eigenvalue):
    assert backend.cholesky(backend.asarray(tensor(np.diag([1.0, eigenvalue, 2.0])))) is None


def test_triangle_leaves_its_argument(leaves, rng):
    given = tensor(rng.standard_normal((3, 10)))
    before = given.clone()
    leaves.triangle(leaves.asarray(given))
    assert torch.equal(given, before)


# ---- names


def test_get_backend_by_name():
    assert isinstance(get_backend("auto", CPU), ScipyBackend)
    assert isinstance(get_backend("scipy", CPU), ScipyBackend)
    assert isinstance(get_backend("torch", CPU), TorchBackend)
    assert get_backend("torch", CPU).device == CPU
    on_gpu = get_backend("auto", torch.device("cuda", 0))
    assert isinstance(on_gpu, TorchBackend)
    assert on_gpu.device == torch.device("cuda", 0)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_knows_its_name(name):
    assert get_backend(name, CPU).name == name


@pytest.mark.parametrize("name", ["numpy", "", "SciPy"])
def test_get_backend_of_another_name(name):
    with pytest.raises(ValueError, match=f"backend: got '{name}'; allowed are 'auto', 'scipy', 'torch'"):
        get_backend(name, CPU)
