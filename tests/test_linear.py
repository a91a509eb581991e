"""The contract of a linearisation, for every solver and backend.

With A = J D⁻¹, q = D p, M = (AᵀA + λ)⁻¹ the step is q = −M Aᵀr. The oracle is 50-digit arithmetic on the same
J, r, D. A first-order perturbation of the damped problem by rounding (δA ~ ε‖A‖, δr ~ ε‖r‖ for qr; δ(AᵀA) ~
ε‖A‖², δ(Aᵀr) ~ ε‖A‖‖r‖ for cholesky) gives the bounds (Björck, Numerical Methods for Least Squares Problems
(1996), sections 1.4 and 2.2; for a consistent r the one of qr is ε κ):

    qr              ε [(‖A‖‖q‖ + ‖r‖)/σ + ‖A‖‖r + A q‖/σ²],      σ² = σ_min² + λ
    cholesky, cg    ε [(‖A‖² + λ)‖q‖ + ‖A‖‖r‖]/σ²
    dual            ε [(‖A‖² + λ) max s/(s² + λ) + ‖A‖] ‖u‖,     q = −Aᵀu, s the singular values
"""

from dataclasses import dataclass

import mpmath
import numpy as np
import pytest
import torch
from injected import BACKENDS, CPU, SOLVERS, exact, graded, injected, injected_problem, tensor

from lmfit_gpu.backends import get_backend
from lmfit_gpu.jacobian import Derivatives
from lmfit_gpu.linear import choose, linearize

EPS = float(np.finfo(np.float64).eps)
MODEST = 50  # constant of the bounds: a low multiple of n

every_solver = pytest.mark.parametrize("solver", SOLVERS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


# ---- the oracle


@dataclass
class Truth:
    """What a step must be, rounded from 50 digits, and the bound on the error of q."""

    q: np.ndarray  # D p
    gain: float
    norm: float
    slope: float
    rhs: np.ndarray  # D (JᵀJ + λD²)⁻¹ b
    size: float  # ‖A‖
    least: float  # σ² = σ_min² + λ
    perp: float  # ‖r + A q‖ = λ‖u‖
    least_dual: float  # σ² of Aᵀ
    steepest: float  # max s/(s² + λ)


def truth(J, r, d, damping, b):
    with mpmath.workdps(50):
        jm, rm, dm = mpmath.matrix(J.tolist()), mpmath.matrix(r.tolist()), [mpmath.mpf(float(v)) for v in d]
        n = J.shape[1]
        a = mpmath.matrix(J.shape[0], n)
        for i in range(J.shape[0]):
            for j in range(n):
                a[i, j] = jm[i, j] / dm[j]
        gram = a.T * a
        shifted = gram + mpmath.mpf(damping) * mpmath.eye(n)
        bm = mpmath.matrix([mpmath.mpf(float(b[j])) / dm[j] for j in range(n)])
        g = a.T * rm
        q = -mpmath.lu_solve(shifted, g)
        aq = a * q
        norm = mpmath.norm(q)
        slope = -(q.T * mpmath.lu_solve(shifted, q))[0] / norm
        gain = -(g.T * q)[0] - mpmath.norm(aq) ** 2 / 2
        rhs = mpmath.lu_solve(shifted, bm)
        perp = float(mpmath.norm(rm + aq))
    s = np.linalg.svd(J / d, compute_uv=False)
    smallest = [s[-1] ** 2 if len(s) == side else 0.0 for side in (n, len(J))]
    least, least_dual = (damping + square for square in smallest)
    exact = (vector(q), float(gain), float(norm), float(slope), vector(rhs))
    return Truth(*exact, s[0], least, perp, least_dual, np.max(s / (s**2 + damping)))


def vector(column):
    return np.array([float(v) for v in column])


def step_bound(solver, t, r, damping):
    size, least, norm = t.size, t.least, t.norm
    r_norm = np.linalg.norm(r)
    if solver == "dual":
        return MODEST * EPS * ((size**2 + damping) * t.steepest + size) * t.perp / damping
    if solver == "qr":
        bound = (size * norm + r_norm) / least**0.5 + size * t.perp / least
    else:
        bound = ((size**2 + damping) * norm + size * r_norm) / least
    return MODEST * EPS * bound


def gain_bound(solver, t, r, damping):
    squared = 0.0 if solver in ("qr", "dual") else t.size**2 * t.norm**2
    r_norm = np.linalg.norm(r)
    data = EPS * MODEST * (r_norm * (r_norm + t.size * t.norm) + squared)
    off = step_bound(solver, t, r, damping)
    second = (t.size * off) ** 2 if solver == "dual" else 0.0
    return damping * t.norm * off + data + second


def slope_bound(solver, t, r, damping):
    condition = ((t.size**2 + damping) / t.least) ** (0.5 if solver == "qr" else 1.0)
    return 3 * step_bound(solver, t, r, damping) / t.least + MODEST * EPS * condition * abs(t.slope)


def rhs_bound(solver, t, b, damping):
    x = np.linalg.norm(t.rhs)
    if solver == "dual":  # a difference of two vectors, divided by λ
        return MODEST * EPS * (t.size**2 + damping) / t.least_dual * np.linalg.norm(b) / damping
    if solver != "qr":
        return MODEST * EPS * ((t.size**2 + damping) * x + np.linalg.norm(b)) / t.least
    return MODEST * EPS * (t.size * x / t.least**0.5 + (t.size**2 * x + np.linalg.norm(b)) / t.least)


def random_problem(seed, shape, condition, consistent):
    """Return J with columns in different units, r, and D up to three orders of magnitude off those units."""
    rng = np.random.default_rng(seed)
    m, n = shape
    units = 10.0 ** rng.uniform(-4, 4, n)
    a = graded(rng, m, n, condition)
    J = a * units
    r = a @ rng.standard_normal(n) if consistent else rng.standard_normal(m) * 10.0 ** rng.uniform(-3, 3)
    return J, r, units * 10.0 ** rng.uniform(-1.5, 1.5, n), rng.standard_normal(n) * units


SHAPES = [(9, 4), (7, 5), (5, 5), (12, 2), (3, 5), (6, 1)]
CONDITIONS = [1.0, 1e2, 1e4, 1e6, 1e8]
DAMPINGS = [1e-14, 1e-11, 1e-8, 1e-5, 1e-2, 1.0, 1e6]


# ---- steps against 50 digits


@pytest.mark.parametrize("consistent", [True, False], ids=["consistent", "random"])
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_agree_with_fifty_digits(shape, condition, consistent):
    J, r, d, b = random_problem(hash(shape) % 1000, shape, condition, consistent)
    size = np.linalg.norm(J / d, 2)
    lins = {(s, k): injected(J, r, s, k, d) for s in SOLVERS for k in BACKENDS}
    for share in DAMPINGS:
        damping = share * size**2
        t = truth(J, r, d, damping, b)
        for (solver, backend), lin in lins.items():
            label = f"{solver} {backend} λ={share:g}"
            step = lin.solve(damping)
            if damping < lin.least_damping:
                assert not step.valid, label
                continue
            bound = step_bound(solver, t, r, damping)
            if not step.valid:  # above the limit the matrix may still be indefinite to rounding, not far above
                assert bound > 0.1 * t.norm, label
                continue
            q = step.p.numpy() * d
            assert np.linalg.norm(q - t.q) <= bound, label
            assert abs(step.scaled_norm - t.norm) <= bound, label
            assert abs(step.predicted_reduction - t.gain) <= gain_bound(solver, t, r, damping), label
            assert step.damping == damping
            norm, slope = lin.scaled_norm(damping)
            if solver == "dual":  # squares, from K alone
                noise = MODEST * EPS * (size**2 + damping) * (t.perp / damping) ** 2
                assert abs(norm**2 - t.norm**2) <= noise, label
                assert abs(slope * norm - t.slope * t.norm) <= 3 * noise / t.least_dual, label
            else:
                assert abs(norm - t.norm) <= bound, label
                assert abs(slope - t.slope) <= slope_bound(solver, t, r, damping), label
            x = lin.solve_rhs(damping, tensor(b)).numpy() * d
            assert np.linalg.norm(x - t.rhs) <= rhs_bound(solver, t, b / d, damping), label
            if share >= 1e-5:
                floor = size * np.linalg.norm(r) / (damping if solver == "dual" else t.least)
                assert np.linalg.norm(q - t.q) <= 1e-10 * max(t.norm, 0.01 * floor), label


@every_backend
@pytest.mark.parametrize("condition", [1e2, 1e5, 1e8])
def test_gauss_newton_of_qr_has_error_epsilon_kappa(condition, backend, rng):
    a = graded(rng, 40, 6, condition)
    r = a @ rng.standard_normal(6)
    step = injected(a, r, "qr", backend).solve(0.0)
    t = truth(a, r, np.ones(6), 0.0, np.ones(6))
    assert np.linalg.norm(step.p.numpy() - t.q) <= MODEST * EPS * condition * t.norm
    assert step.predicted_reduction == pytest.approx(0.5 * np.sum(r**2), rel=1e-12)


@every_solver
@every_backend
@pytest.mark.parametrize("shape", [(5000, 30), (60, 60), (40, 70)], ids=str)
def test_larger_problems_agree_with_the_singular_values(shape, solver, backend, rng):
    m, n = shape
    J = graded(rng, m, n, 1e3) * 10.0 ** rng.uniform(-3, 3, n)
    r, d = rng.standard_normal(m), np.linalg.norm(J, axis=0)
    lin = injected(J, r, solver, backend, d)
    u, s, vt = np.linalg.svd(J / d, full_matrices=False)
    for damping in (1e-5, 1e-2, 1e3):
        step = lin.solve(damping)
        q = -vt.T @ (s / (s**2 + damping) * (u.T @ r))
        np.testing.assert_allclose(step.p.numpy() * d, q, atol=1e-10 * np.linalg.norm(q))
        jp = J @ (q / d)
        assert step.predicted_reduction == pytest.approx(-(J.T @ r) @ (q / d) - 0.5 * jp @ jp, rel=1e-9)


# ---- what does not depend on λ


@every_solver
@every_backend
@pytest.mark.parametrize("factor", [1e-15, 1.0, 1e18])
@pytest.mark.parametrize("shape", [(50, 4), (5, 5), (3, 6), (1, 3), (4, 1)], ids=str)
def test_gradient_and_norms(shape, factor, solver, backend, rng):
    J = rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 3, shape[1]) * factor
    r = rng.standard_normal(shape[0]) * factor
    lin = injected(J, r, solver, backend)
    norms = np.linalg.norm(J, axis=0)
    assert lin.finite
    assert lin.gradient.shape == lin.column_norms.shape == lin.scale.shape == (shape[1],)
    assert lin.gradient.dtype == lin.column_norms.dtype == torch.float64
    error = np.abs(lin.gradient.numpy() - J.T @ r)
    assert np.all(error <= MODEST * EPS * norms * np.linalg.norm(r))
    np.testing.assert_allclose(lin.column_norms.numpy(), norms, rtol=1e-13)
    assert lin.residual_norm == pytest.approx(np.linalg.norm(r), rel=1e-13)
    np.testing.assert_array_equal(lin.scale.numpy(), 1.0)


@every_solver
@every_backend
def test_autograd_and_the_exact_jacobian_reduce_to_the_same(solver, backend, rng):
    J, r = rng.standard_normal((40, 3)), rng.standard_normal(40)
    one, other = (numbers(injected(J, r, solver, backend, jac=jac)) for jac in ("autograd", exact))
    np.testing.assert_allclose(one, other, rtol=1e-14)


@every_solver
@every_backend
def test_with_scale_returns_another_and_leaves_the_first(solver, backend, rng):
    J, r = rng.standard_normal((20, 3)), rng.standard_normal(20)
    lin = injected(J, r, solver, backend)
    before = lin.solve(1.0).p.clone()
    other = lin.with_scale(tensor([1.0, 10.0, 100.0]))
    expected = -np.linalg.solve(J.T @ J + np.diag([1.0, 1e2, 1e4]), J.T @ r)
    np.testing.assert_allclose(other.solve(1.0).p.numpy(), expected, rtol=1e-11)
    assert torch.equal(lin.solve(1.0).p, before)


@every_solver
@every_backend
@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6])
def test_condition(condition, solver, backend, rng):
    lin = injected(graded(rng, 20, 4, condition), rng.standard_normal(20), solver, backend)
    rtol = 1e-8 if solver == "qr" else MODEST * EPS * condition**2 + 1e-12
    assert lin.condition() == pytest.approx(condition, rel=rtol)


# ---- what each solver resolves


@every_backend
@pytest.mark.parametrize("shape", [(30, 4), (4, 4), (3, 6)], ids=str)
def test_cholesky_says_when_damping_is_below_what_it_resolves(shape, backend, rng):
    J, r = rng.standard_normal(shape) * 1e3, rng.standard_normal(shape[0])
    lin = injected(J, r, "cholesky", backend)
    n, size = shape[1], np.linalg.norm(J, 2) ** 2
    assert n * EPS * size * (1 - 1e-6) <= lin.least_damping <= n**0.5 * n * EPS * size
    for damping in (0.0, 0.5 * n * EPS * size, lin.least_damping * 0.99):
        step = lin.solve(damping)
        assert not step.valid
        assert torch.equal(step.p, torch.zeros(n, dtype=torch.float64))
        assert (step.predicted_reduction, step.scaled_norm, step.damping) == (0.0, 0.0, damping)
    assert lin.solve(1e3 * lin.least_damping).valid


@every_backend
def test_qr_resolves_every_damping(backend, rng):
    lin = injected(graded(rng, 10, 4, 1e8), rng.standard_normal(10), "qr", backend)
    assert lin.least_damping == 0
    assert all(lin.solve(damping).valid for damping in (0.0, 1e-300, 1e-20, 1e20))


@every_backend
def test_a_factorisation_that_fails_is_a_value_not_an_exception(backend, rng):
    J = rng.standard_normal((10, 3))
    J[:, 2] = J[:, 0] + J[:, 1]
    lin = injected(J, rng.standard_normal(10), "cholesky", backend)
    assert lin.scaled_norm(-1.0) == (float("inf"), 0.0)
    assert bool(torch.isnan(lin.solve_rhs(-1.0, torch.ones(3, dtype=torch.float64))).all())


# ---- rank


def deficient(rng, m=30):
    """Columns 1, 2, 3 are dependent; 0 and 4 are determined."""
    J = rng.standard_normal((m, 5))
    J[:, 3] = J[:, 1] - 2 * J[:, 2]
    return J


@every_backend
@pytest.mark.parametrize("kind", ["dependent", "wide", "zero column", "zero"])
def test_gauss_newton_of_qr_is_the_shortest(kind, backend, rng):
    J = rng.standard_normal((4, 7)) if kind == "wide" else deficient(rng)
    if kind == "zero column":
        J[:, 1] = 0.0
    J = np.zeros_like(J) if kind == "zero" else J
    r, d = rng.standard_normal(len(J)), 10.0 ** rng.uniform(-2, 2, J.shape[1])
    a = J / d
    q = -np.linalg.pinv(a, rcond=1e-12) @ r
    lin = injected(J, r, "qr", backend, d)
    step = lin.solve(0.0)
    assert step.valid
    np.testing.assert_allclose(step.p.numpy() * d, q, atol=1e-10 * max(np.linalg.norm(q), 1e-300))
    assert step.scaled_norm == pytest.approx(np.linalg.norm(q), rel=1e-10)
    assert step.predicted_reduction == pytest.approx(0.5 * np.sum((a @ q) ** 2), rel=1e-10)
    norm, slope = lin.scaled_norm(0.0)
    assert norm == pytest.approx(np.linalg.norm(q), rel=1e-10)
    inverse = np.linalg.pinv(a.T @ a, rcond=1e-12, hermitian=True)
    assert slope == pytest.approx(-q @ inverse @ q / np.linalg.norm(q) if q.any() else 0.0, rel=1e-6)
    b = rng.standard_normal(J.shape[1])
    expected = inverse @ (b / d)
    scaled = lin.solve_rhs(0.0, tensor(b)).numpy() * d
    np.testing.assert_allclose(scaled, expected, atol=1e-6 * np.linalg.norm(expected))


@every_solver
@every_backend
@pytest.mark.parametrize("condition", [1.0, 1e2, 1e5])
def test_covariance_of_a_full_rank_jacobian(condition, solver, backend, rng):
    units = 10.0 ** rng.uniform(-4, 4, 4)
    J = graded(rng, 25, 4, condition) * units
    lin = injected(J, rng.standard_normal(25), solver, backend, 10.0 ** rng.uniform(-3, 3, 4))
    covariance, rank, undetermined = lin.covariance()
    with mpmath.workdps(50):
        jm = mpmath.matrix(J.tolist())
        expected = np.array(((jm.T * jm) ** -1).tolist(), dtype=float)
    scaled = np.linalg.cond(J / np.linalg.norm(J, axis=0))
    rtol = MODEST * EPS * (scaled if solver == "qr" else scaled**2)
    sizes = np.sqrt(np.diag(expected))
    assert np.all(np.abs(covariance.numpy() - expected) <= rtol * np.outer(sizes, sizes))
    assert (rank, undetermined.tolist()) == (4, [False] * 4)


@every_solver
@every_backend
@pytest.mark.parametrize("units", [[1, 1, 1, 1, 1], [1e6, 1e-4, 1e3, 1e-6, 1e2]], ids=["one", "many"])
def test_covariance_names_what_is_undetermined(units, solver, backend, rng):
    J = deficient(rng)
    expected = np.linalg.pinv(J.T @ J, rcond=1e-12, hermitian=True) / np.outer(units, units)
    lin = injected(J * units, rng.standard_normal(30), solver, backend, 10.0 ** rng.uniform(-2, 2, 5))
    covariance, rank, undetermined = lin.covariance()
    covariance = covariance.numpy()
    assert rank == 4
    assert undetermined.tolist() == [False, True, True, True, False]
    np.testing.assert_array_equal(np.diag(covariance)[1:4], np.inf)
    np.testing.assert_allclose(covariance[np.ix_([0, 4], [0, 4])], expected[np.ix_([0, 4], [0, 4])], rtol=1e-6)
    assert np.isnan(covariance[0, 1:4]).all()


@every_solver
@every_backend
def test_covariance_of_a_wide_and_of_a_zero_jacobian(solver, backend, rng):
    covariance, rank, undetermined = injected(rng.standard_normal((3, 5)), np.ones(3), solver, backend).covariance()
    assert rank == 3
    assert undetermined.all()
    assert np.isinf(np.diag(covariance.numpy())).all()
    covariance, rank, undetermined = injected(np.zeros((4, 2)), np.ones(4), solver, backend).covariance()
    assert rank == 0
    assert undetermined.all()
    assert np.isinf(np.diag(covariance.numpy())).all()


@every_solver
@every_backend
def test_covariance_drops_what_an_inexact_jacobian_cannot_tell(solver, backend, rng):
    J = graded(rng, 20, 3, 1e5)
    lin = injected(J, rng.standard_normal(20), solver, backend)
    assert lin.covariance()[1] == 3
    assert lin.with_scale(lin.scale, 1e-4).covariance()[1] == 2


@every_solver
@every_backend
def test_zero_column(solver, backend, rng):
    J = rng.standard_normal((20, 3))
    J[:, 1] = 0.0
    r = rng.standard_normal(20)
    lin = injected(J, r, solver, backend)
    expected = -np.linalg.solve(J[:, ::2].T @ J[:, ::2] + 0.1 * np.eye(2), J[:, ::2].T @ r)
    p = lin.solve(0.1).p.numpy()
    np.testing.assert_allclose(p[::2], expected, rtol=1e-12)
    assert p[1] == 0
    assert lin.column_norms[1] == 0
    covariance, rank, undetermined = lin.covariance()
    assert rank == 2
    assert undetermined.tolist() == [False, True, False]
    inverse = np.linalg.inv(J[:, ::2].T @ J[:, ::2])
    np.testing.assert_allclose(covariance.numpy()[::2, ::2], inverse, rtol=1e-10)


@every_solver
@every_backend
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["J", "r"])
def test_non_finite_is_said_not_raised(where, value, solver, backend, rng):
    J, r = rng.standard_normal((20, 3)), rng.standard_normal(20)
    if where == "J":
        J[7, 1] = value
    else:
        r[7] = value
    lin = injected(J, r, solver, backend, np.ones(3))
    assert not lin.finite
    for damping in (0.0, 1.0):
        assert not lin.solve(damping).valid
        lin.scaled_norm(damping)
    if where == "J":
        lin.condition()
    finite = injected(np.nan_to_num(J, posinf=1.0, neginf=1.0), np.zeros(20), solver, backend)
    assert finite.finite


# ---- blocks, leaves and devices


def numbers(lin):
    step = lin.solve(1e-3)
    return torch.cat(
        [
            lin.gradient,
            lin.column_norms,
            step.p,
            torch.tensor([lin.residual_norm, step.predicted_reduction, step.scaled_norm], dtype=torch.float64),
        ]
    )


def long_data(rng, m=30011):
    x = np.linspace(-1, 1, m)
    J = np.stack([np.ones(m), x, np.exp(3 * x), np.sin(20 * x)], axis=1)
    return J, rng.standard_normal(m)


@every_solver
@every_backend
def test_long_data_in_any_blocks(solver, backend, rng):
    J, r = long_data(rng)
    reference = numbers(injected(J, r, solver, backend))
    np.testing.assert_allclose(reference[:4], J.T @ r, rtol=1e-11, atol=1e-11 * np.linalg.norm(r) * 200)
    for chunk_rows in (777, 4097, 10_000, 30_010, 50_000):
        other = numbers(injected(J, r, solver, backend, chunk_rows=chunk_rows))
        np.testing.assert_allclose(other, reference, rtol=1e-12, atol=1e-12 * float(reference[:4].abs().max()))


@every_solver
@every_backend
@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 7, 13, 100])
def test_short_data_in_any_blocks(chunk_rows, solver, backend, rng):
    J, r = rng.standard_normal((53, 3)), rng.standard_normal(53)
    one = numbers(injected(J, r, solver, backend))
    other = numbers(injected(J, r, solver, backend, chunk_rows=chunk_rows))
    np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-12 * float(one.abs().max()))


@every_solver
@every_backend
def test_blocks_of_whole_leaves_and_devices_change_no_bit(solver, backend, rng):
    J, r = long_data(rng)
    reference = numbers(injected(J, r, solver, backend, chunk_rows=4096))
    for chunk_rows in (8192, 16384):
        assert torch.equal(numbers(injected(J, r, solver, backend, chunk_rows=chunk_rows)), reference)
    for devices in ((CPU,), (CPU, CPU), (CPU, CPU, CPU)):
        for chunk_rows in (4096, 8192):
            lin = injected(J, r, solver, backend, devices=devices, chunk_rows=chunk_rows)
            assert torch.equal(numbers(lin), reference)


@every_solver
def test_backends_agree(solver, rng):
    J, r = long_data(rng)
    one, other = (numbers(injected(J, r, solver, backend)) for backend in BACKENDS)
    np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11 * float(one.abs().max()))


@every_solver
@every_backend
def test_float32_jacobian_is_reduced_in_float64(solver, backend, rng):
    J = rng.standard_normal((100, 3)).astype(np.float32).astype(np.float64)
    r = rng.standard_normal(100).astype(np.float32).astype(np.float64)
    lin = injected(J, r, solver, backend, dtype=torch.float32)
    assert lin.gradient.dtype == torch.float64
    np.testing.assert_allclose(lin.gradient, J.T @ r, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lin.column_norms, np.linalg.norm(J, axis=0), rtol=1e-13)


# ---- names


def test_choose():
    assert choose("auto", 1000) == "qr"
    assert choose("auto", 1001) == "cholesky"
    assert choose("cholesky", 2) == "cholesky"
    with pytest.raises(ValueError, match="solver: got 'lu'; allowed are 'auto', 'qr', 'cholesky'"):
        choose("lu", 2)


@every_solver
def test_linearize_counts_one_pass(solver, rng):
    problem, theta = injected_problem(rng.standard_normal((10, 2)), rng.standard_normal(10))
    jacobian = Derivatives.choose(problem, "autograd", theta).at(theta)
    assert jacobian.nfev == 0
    linearize(jacobian, solver, get_backend("auto", CPU))
    assert jacobian.nfev == 1
