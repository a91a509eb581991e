"""Conjugate gradients against numpy: solutions, truncation, what is counted, the estimate of the condition number."""

import numpy as np
import pytest
from injected import BACKENDS, CPU, tensor

from lmfit_gpu.backends import TorchBackend, get_backend
from lmfit_gpu.linear.conjugate_gradients import RESTARTS, Limits, conjugate_gradients

EPS = float(np.finfo(np.float64).eps)
MODEST = 50


class Products:
    """Products with a symmetric matrix, counted; `spoilt` is the call that goes wrong, by 1e-3."""

    def __init__(self, matrix, backend, spoilt=None):
        self.array, self.calls, self.spoilt = backend.asarray(tensor(matrix)), 0, spoilt

    def __call__(self, v):
        self.calls += 1
        return self.array @ v * (1.001 if self.calls == self.spoilt else 1.0)


class Found:
    """A solution as numbers of numpy, and the products made for it."""

    def __init__(self, matrix, b, backend, spoilt=None, **limits):
        products = Products(matrix, backend, spoilt)
        self.solution = conjugate_gradients(products, backend.asarray(tensor(b)), backend, Limits(**limits))
        self.x = backend.to_tensor(self.solution.x, CPU).numpy()
        self.residual = backend.to_tensor(self.solution.residual, CPU).numpy()
        self.calls = products.calls


@pytest.fixture(params=BACKENDS)
def backend(request):
    return get_backend(request.param, CPU)


@pytest.fixture(params=[1, 3, 10])
def looking(request):
    """Return torch with so many iterations between two looks at a scalar."""
    backend = TorchBackend(CPU)
    backend.check_every = request.param
    return backend


def spectrum(rng, values):
    """Return a symmetric matrix with these eigenvalues, and its eigenvectors."""
    vectors = np.linalg.qr(rng.standard_normal((len(values), len(values))))[0]
    return (vectors * values) @ vectors.T, vectors


def krylov(matrix, b, k):
    """Return the minimiser of ½xᵀBx − bᵀx over span(b, Bb, ..., Bᵏ⁻¹b)."""
    basis = [b]
    for _ in range(k - 1):
        basis.append(matrix @ np.linalg.qr(np.stack(basis, 1))[0][:, -1])
    q = np.linalg.qr(np.stack(basis, 1))[0]
    return q @ np.linalg.solve(q.T @ matrix @ q, q.T @ b)


# ---- solutions


@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_solution_of_a_positive_definite_system(n, condition, backend, rng):
    matrix, _ = spectrum(rng, condition ** -np.linspace(0, 1, n) * 1e3)
    b = rng.standard_normal(n)
    found, expected = Found(matrix, b, backend), np.linalg.solve(matrix, b)
    size = np.linalg.norm(expected)
    assert found.solution.converged
    assert not found.solution.at_radius
    assert np.linalg.norm(found.x - expected) <= MODEST * EPS * np.linalg.cond(matrix) * size
    rounding = MODEST * EPS * (np.linalg.norm(matrix, 2) * size + np.linalg.norm(b))
    np.testing.assert_allclose(found.residual, b - matrix @ found.x, atol=rounding)
    assert found.solution.norm == pytest.approx(np.linalg.norm(found.x), rel=1e-13)
    assert found.solution.along == pytest.approx(b @ found.x, rel=1e-13)
    assert found.solution.remaining == pytest.approx(found.residual @ found.x, rel=1e-12, abs=EPS * rounding * size)


def test_a_larger_system_in_few_iterations(looking, rng):
    """Distinct eigenvalues bound the iterations (Nocedal and Wright, theorem 5.4): here five of them."""
    matrix, _ = spectrum(rng, np.repeat([1.0, 2.0, 5.0, 7.0, 30.0], 40))
    b = rng.standard_normal(200)
    found = Found(matrix, b, looking)
    assert found.solution.converged
    assert found.solution.n_inner <= 5 + looking.check_every * (1 + RESTARTS) + RESTARTS + 1
    np.testing.assert_allclose(found.x, np.linalg.solve(matrix, b), atol=1e-13 * np.linalg.norm(b))


@pytest.mark.parametrize("values", [[3.0, 1.0, 0.1, 0.0, 0.0], [1.0, 0.0]], ids=str)
def test_solution_of_a_singular_consistent_system_is_the_shortest(values, backend, rng):
    matrix, vectors = spectrum(rng, np.array(values))
    b = matrix @ rng.standard_normal(len(values))
    found, expected = Found(matrix, b, backend), np.linalg.pinv(matrix, rcond=1e-12, hermitian=True) @ b
    assert found.solution.converged
    np.testing.assert_allclose(found.x, expected, atol=1e-12 * np.linalg.norm(expected))
    null = vectors[:, np.array(values) == 0]
    assert np.abs(null.T @ found.x).max() <= 1e-12 * np.linalg.norm(expected)


def test_no_part_in_the_null_space_however_often_it_looks(looking, rng):
    matrix, _ = spectrum(rng, np.array([3.0, 1.0, 0.1, 0.0, 0.0]))
    b = matrix @ rng.standard_normal(5)
    expected = np.linalg.pinv(matrix, rcond=1e-12, hermitian=True) @ b
    np.testing.assert_allclose(Found(matrix, b, looking).x, expected, atol=1e-12 * np.linalg.norm(expected))


def test_a_direction_of_no_curvature_ends_the_iteration(backend):
    """b = e₁ + e₃ with B e₃ = 0: after the part in the range there is nothing to gain; that is no convergence."""
    found = Found(np.diag([2.0, 1.0, 0.0]), np.array([0.0, 0.0, 1.0]), backend)
    assert not found.solution.converged
    np.testing.assert_array_equal(found.x, 0.0)


@pytest.mark.parametrize("factor", [1e-120, 1e-30, 1e30, 1e120])
def test_units_do_not_matter(factor, looking, rng):
    matrix, _ = spectrum(rng, np.array([5.0, 1.0, 0.1]))
    b = rng.standard_normal(3)
    found = Found(matrix * 1e20, b * factor, looking)
    assert found.solution.converged
    np.testing.assert_allclose(found.x * (1e20 / factor), np.linalg.solve(matrix, b), rtol=1e-12)


# ---- nothing to solve


def test_no_right_hand_side(backend):
    found = Found(np.eye(3), np.zeros(3), backend)
    assert found.solution.converged
    assert (found.calls, found.solution.n_inner, found.solution.norm, found.solution.condition) == (0, 0, 0.0, np.inf)
    np.testing.assert_array_equal(found.x, 0.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_right_hand_side_that_is_not_finite(value, backend):
    with np.errstate(invalid="ignore"):
        found = Found(np.eye(3), np.array([1.0, value, 0.0]), backend)
    assert not found.solution.converged
    assert found.calls == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_matrix_that_is_not_finite(value, backend):
    matrix = np.eye(3)
    matrix[0, 1] = matrix[1, 0] = value
    with np.errstate(invalid="ignore"):
        found = Found(matrix, np.ones(3), backend)
    assert not found.solution.converged
    assert found.calls <= (backend.check_every + 1) * (1 + RESTARTS)


# ---- early ends


@pytest.mark.parametrize("k", [1, 2, 5, 12])
def test_after_k_iterations_the_model_is_least_on_the_krylov_space(k, looking, rng):
    """Nocedal and Wright, theorem 5.2."""
    matrix, _ = spectrum(rng, np.geomspace(1, 1e3, 30))
    b = rng.standard_normal(30)
    found = Found(matrix, b, looking, max_iter=k)
    assert not found.solution.converged
    assert (found.solution.n_inner, found.calls) == (k, k)
    expected = krylov(matrix, b, k)
    np.testing.assert_allclose(found.x, expected, atol=1e-10 * np.linalg.norm(expected))


@pytest.mark.parametrize("rtol", [0.5, 1e-2, 1e-6])
def test_a_residual_that_has_fallen_enough(rtol, looking, rng):
    matrix, _ = spectrum(rng, np.geomspace(1, 1e3, 60))
    b = rng.standard_normal(60)
    found = Found(matrix, b, looking, rtol=rtol)
    assert found.solution.converged
    assert np.linalg.norm(b - matrix @ found.x) <= rtol * np.linalg.norm(b) * (1 + 1e-9)
    assert found.solution.n_inner < Found(matrix, b, looking).solution.n_inner


@pytest.mark.parametrize("rtol", [0.5, 1e-2, 1e-6])
def test_where_it_ends_does_not_depend_on_how_often_it_looks(rtol, looking, rng):
    """The first iterate that is good enough, whichever look finds it (module docstring)."""
    matrix, _ = spectrum(rng, np.geomspace(1, 1e3, 60))
    b = rng.standard_normal(60)
    reference = Found(matrix, b, TorchBackend(CPU), rtol=rtol)
    np.testing.assert_allclose(Found(matrix, b, looking, rtol=rtol).x, reference.x, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("share", [1e-9, 0.1, 0.5, 0.9, 0.99])
def test_truncation_at_a_radius(share, looking, rng):
    """Between two iterates, on the line that joins them; shorter radii have higher models (Steihaug, theorem 2.1)."""
    matrix, _ = spectrum(rng, np.geomspace(1, 1e2, 20))
    b = rng.standard_normal(20)
    solution = np.linalg.solve(matrix, b)
    radius = share * np.linalg.norm(solution)
    iterates = [np.zeros(20)] + [krylov(matrix, b, k) for k in range(1, 21)]
    norms = np.array([np.linalg.norm(x) for x in iterates])
    assert np.all(np.diff(norms) > -1e-9 * norms[-1])
    k = int(np.flatnonzero(norms > radius)[0])
    low, high = iterates[k - 1], iterates[k]
    found = Found(matrix, b, looking, radius=radius)
    assert found.solution.at_radius
    assert np.linalg.norm(found.x) == pytest.approx(radius, rel=1e-12)
    share_of_line = (found.x - low) @ (high - low) / ((high - low) @ (high - low))
    assert 0 <= share_of_line <= 1
    np.testing.assert_allclose(found.x, low + share_of_line * (high - low), atol=1e-8 * radius)
    np.testing.assert_allclose(found.residual, b - matrix @ found.x, atol=1e-11 * np.linalg.norm(b))
    assert found.calls == found.solution.n_inner


@pytest.mark.parametrize("radius", [0.1, 1.0, 100.0])
def test_truncation_on_every_backend(radius, backend):
    """B = 2I: one iteration, to b/2 or to the radius along b."""
    b = np.array([3.0, -4.0])
    found = Found(2 * np.eye(2), b, backend, radius=radius)
    assert found.solution.at_radius == (radius < 2.5)
    np.testing.assert_allclose(found.x, b * min(0.5, radius / 5), rtol=1e-14)


# ---- the true residual


@pytest.mark.parametrize("spoilt", [1, 2, 4])
def test_a_residual_that_drifted_is_made_anew(spoilt, looking, rng):
    """One product in error by 1e-3: the recurrence never learns of it, the true residual does."""
    matrix, _ = spectrum(rng, np.geomspace(1, 50, 8))
    b = rng.standard_normal(8)
    expected = np.linalg.solve(matrix, b)
    found = Found(matrix, b, looking, spoilt)
    assert found.solution.converged
    np.testing.assert_allclose(found.x, expected, atol=1e-12 * np.linalg.norm(expected))


def test_what_never_converges_is_said(looking, rng):
    """Products with a part in 1e3 of noise cannot give a residual of rounding."""
    matrix, _ = spectrum(rng, np.geomspace(1, 50, 8))
    b = rng.standard_normal(8)

    def noisy(v):
        return tensor(matrix) @ v * tensor(1 + 1e-3 * rng.standard_normal(8))

    solution = conjugate_gradients(noisy, tensor(b), looking, Limits(max_iter=300))
    assert not solution.converged
    assert solution.n_inner <= 300 + 1 + RESTARTS


def test_coarse_products_converge_to_their_own_rounding(looking, rng):
    matrix, _ = spectrum(rng, np.geomspace(1, 50, 8))
    b, epsilon = rng.standard_normal(8), float(np.finfo(np.float32).eps)
    coarse = conjugate_gradients(
        lambda v: (tensor(matrix).float() @ v.float()).double(), tensor(b), looking, Limits(epsilon=epsilon)
    )
    assert coarse.converged
    expected = np.linalg.solve(matrix, b)
    np.testing.assert_allclose(coarse.x, expected, atol=MODEST * epsilon * 50 * np.linalg.norm(expected))


@pytest.mark.parametrize("n", [1, 4, 12])
def test_every_product_is_counted(n, looking, rng):
    matrix, _ = spectrum(rng, np.geomspace(1, 50, n))
    found = Found(matrix, rng.standard_normal(n), looking)
    assert found.calls == found.solution.n_inner


# ---- the condition number


@pytest.mark.parametrize("excited", [1, 2, 4, 6])
def test_condition_is_that_of_the_directions_in_b(excited, backend, rng):
    """B is diagonal: what has no part in b has none in any iterate, to the last bit."""
    values = np.array([1.0, 3.0, 10.0, 40.0, 90.0, 300.0])
    b = np.where(np.arange(6) < excited, rng.uniform(1, 2, 6), 0.0)
    found = Found(np.diag(values), b, backend)
    assert found.solution.converged
    assert found.solution.condition == pytest.approx(values[excited - 1], rel=1e-8)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_condition_before_the_end_is_a_lower_bound(k, looking, rng):
    """Ritz values lie between the eigenvalues: those of the projection on the Krylov space."""
    matrix, _ = spectrum(rng, np.geomspace(1, 1e3, 30))
    b = rng.standard_normal(30)
    basis = [b]
    for _ in range(k - 1):
        basis.append(matrix @ np.linalg.qr(np.stack(basis, 1))[0][:, -1])
    q = np.linalg.qr(np.stack(basis, 1))[0]
    ritz = np.linalg.eigvalsh(q.T @ matrix @ q)
    condition = Found(matrix, b, looking, max_iter=k).solution.condition
    assert condition == pytest.approx(ritz[-1] / ritz[0], rel=1e-8)
    assert condition < 1e3


def test_condition_survives_a_restart(looking, rng):
    """What the first pass over the Krylov space has shown is not forgotten when a residual is made anew."""
    values = np.array([1.0, 3.0, 10.0, 40.0])
    matrix, _ = spectrum(rng, values)
    b = rng.standard_normal(4)
    assert Found(matrix, b, looking, 2).solution.condition == pytest.approx(40.0, rel=0.05)
