"""The contract of a linearisation, for every solver and backend.

With A = J D⁻¹, q = D p, M = (AᵀA + λ)⁻¹ the step is q = −M Aᵀr. The oracle is 50-digit arithmetic on the same
J, r, D. A first-order perturbation of the damped problem by rounding (δA ~ ε‖A‖, δr ~ ε‖r‖ for qr; δ(AᵀA) ~
ε‖A‖², δ(Aᵀr) ~ ε‖A‖‖r‖ for cholesky) gives the bounds (Björck, Numerical Methods for Least Squares Problems
(1996), sections 1.4 and 2.2; for a consistent r the one of qr is ε κ):

    qr              ε [(‖A‖‖q‖ + ‖r‖)/σ + ‖A‖‖r + A q‖/σ²],      σ² = σ_min² + λ
    cholesky, cg    ε [(‖A‖² + λ)‖q‖ + ‖A‖‖r‖]/σ²
    dual            ε [(‖A‖² + λ) max s/(s² + λ) + ‖A‖] ‖u‖,     q = −Aᵀu, s the singular values

A Legate operation costs about a millisecond on the CPU whatever its size, and an iteration of cg makes twenty:
cupynumeric gets every solver and every kind of matrix, but fewer of each.
"""

from dataclasses import dataclass

import mpmath
import numpy as np
import pytest
import torch
from injected import BACKENDS, CPU, SOLVERS, exact, graded, injected, injected_problem, known, tensor
from oracles import problem_of, torch_model

from lmfit_gpu.backends import BACKENDS as BACKEND_CLASSES
from lmfit_gpu.backends import TorchBackend, get_backend
from lmfit_gpu.damping import MarquardtDamping, NielsenDamping, TrustRegion
from lmfit_gpu.jacobian import Derivatives
from lmfit_gpu.levenberg_marquardt import LevenbergMarquardt
from lmfit_gpu.linear import MANY_PARAMS, MOST_DENSE, MOST_JACOBIAN, choose, linearize

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
    compare_with_fifty_digits(shape, condition, consistent, [(s, k) for s in SOLVERS for k in BACKENDS[:2]], DAMPINGS)


@pytest.mark.cupynumeric
@pytest.mark.parametrize(("condition", "consistent"), [(1.0, False), (1e4, True), (1e8, True), (1e8, False)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_direct_steps_of_cupynumeric_agree_with_fifty_digits(shape, condition, consistent):
    direct = [(solver, "cupynumeric") for solver in SOLVERS if solver != "cg"]
    compare_with_fifty_digits(shape, condition, consistent, direct, DAMPINGS[::2])


@pytest.mark.cupynumeric
@pytest.mark.parametrize(("shape", "consistent"), [((9, 4), False), ((5, 5), True), ((3, 5), False)], ids=str)
def test_iterated_steps_of_cupynumeric_agree_with_fifty_digits(shape, consistent):
    compare_with_fifty_digits(shape, 1e2, consistent, [("cg", "cupynumeric")], [1e-5, 1.0])


def compare_with_fifty_digits(shape, condition, consistent, pairs, shares):
    """Compare the steps of (solver, backend) pairs for the dampings share · ‖A‖²."""
    J, r, d, b = random_problem(10 * shape[0] + shape[1], shape, condition, consistent)
    size = np.linalg.norm(J / d, 2)
    lins = {pair: injected(J, r, *pair, d) for pair in pairs}
    for share in shares:
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
    m = min(m, 1500) if solver == "dual" else m  # K is m x m
    J = graded(rng, m, n, 1e3) * 10.0 ** rng.uniform(-3, 3, n)
    r, d = rng.standard_normal(m), np.linalg.norm(J, axis=0)
    lin = injected(J, r, solver, backend, d)
    u, s, vt = np.linalg.svd(J / d, full_matrices=False)
    for damping in (0.1, 1e3) if (solver, backend) == ("cg", "cupynumeric") else (1e-5, 1e-2, 1e3):
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
    """That of J D⁻¹; of cg, which scales by the diagonal, that of J with unit columns."""
    J = graded(rng, 20, 4, condition)
    lin = injected(J, rng.standard_normal(20), solver, backend)
    expected = np.linalg.cond(J / np.linalg.norm(J, axis=0)) if solver == "cg" else condition
    rtol = 1e-8 if solver == "qr" else MODEST * EPS * condition**2 + 1e-12
    assert lin.condition() == pytest.approx(expected, rel=rtol)


@every_backend
@pytest.mark.parametrize("excited", [1, 2, 3, 4])
def test_condition_of_cg_is_that_of_the_directions_in_the_residual(excited, backend, rng):
    """J = U diag(s) Hᵀ with Hadamard's H has equal columns: of s only those with a part in r are seen."""
    s = np.array([1.0, 0.3, 0.05, 0.01])
    u = np.linalg.qr(rng.standard_normal((20, 4)))[0]
    hadamard = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    r = u[:, :excited] @ rng.uniform(1, 2, excited)
    J = (u * s) @ hadamard.T
    assert injected(J, r, "cg", backend).condition() == pytest.approx(1 / s[excited - 1], rel=1e-9)
    badly_scaled = injected(J, r, "cg", backend, [0.1, 10.0, 1.0, 100.0])  # the columns are made equal again
    assert badly_scaled.condition() == pytest.approx(1 / s[excited - 1], rel=1e-9)


@every_backend
@pytest.mark.parametrize("kind", ["more rows", "rows given twice", "full rank"])
def test_undamped_of_dual_is_gauss_newton_whatever_j_cannot_take_away(kind, backend, rng):
    """A residual outside the range of J is ‖r‖/λ in u, and must not show in the step or in what it promises."""
    if kind == "more rows":
        J = graded(rng, 30, 4, 1e3)
    else:
        J = np.repeat(graded(rng, 5, 12, 1e3), 2 if kind == "rows given twice" else 1, axis=0)
    r = rng.standard_normal(len(J))
    step = injected(J, r, "dual", backend).undamped()
    q = -np.linalg.pinv(J, rcond=1e-10) @ r
    assert step.valid
    np.testing.assert_allclose(step.p.numpy(), q, atol=1e-6 * np.linalg.norm(q))
    assert step.predicted_reduction == pytest.approx(0.5 * np.sum((J @ q) ** 2), rel=1e-9)


# ---- what each solver resolves


factoring = pytest.mark.parametrize("solver", ["cholesky", "dual"])


@factoring
@every_backend
@pytest.mark.parametrize("shape", [(30, 4), (4, 4), (3, 6)], ids=str)
def test_solvers_that_factor_say_when_damping_is_below_what_they_resolve(shape, backend, solver, rng):
    J, r = rng.standard_normal(shape) * 1e3, rng.standard_normal(shape[0])
    lin = injected(J, r, solver, backend)
    side, size = shape[0 if solver == "dual" else 1], np.linalg.norm(J, 2) ** 2
    assert side * EPS * size * (1 - 1e-6) <= lin.least_damping <= side**0.5 * side * EPS * size
    for damping in (0.0, 0.5 * side * EPS * size, lin.least_damping * 0.99):
        step = lin.solve(damping)
        assert not step.valid
        assert torch.equal(step.p, torch.zeros(shape[1], dtype=torch.float64))
        assert (step.predicted_reduction, step.scaled_norm, step.damping) == (0.0, 0.0, damping)
    assert lin.solve(1e3 * lin.least_damping).valid


@every_backend
def test_qr_resolves_every_damping(backend, rng):
    lin = injected(graded(rng, 10, 4, 1e8), rng.standard_normal(10), "qr", backend)
    assert lin.least_damping == 0
    assert all(lin.solve(damping).valid for damping in (0.0, 1e-300, 1e-20, 1e20))


@factoring
@every_backend
@pytest.mark.parametrize("share", [-0.5, -2.0])
@pytest.mark.parametrize("shape", [(10, 3), (3, 3), (3, 10)], ids=str)
def test_a_factorisation_that_fails_is_a_value_not_an_exception(shape, share, backend, solver, rng):
    """With λ = share · ‖J‖² the matrix is indefinite or negative definite."""
    J = rng.standard_normal(shape)
    lin = injected(J, rng.standard_normal(shape[0]), solver, backend)
    damping = share * np.linalg.norm(J, 2) ** 2
    assert lin.scaled_norm(damping) == (float("inf"), 0.0)
    assert not lin.solve(damping).valid
    assert bool(torch.isnan(lin.solve_rhs(damping, torch.ones(shape[1], dtype=torch.float64))).all())


POLICIES = [NielsenDamping(), MarquardtDamping(), TrustRegion(radius=0.01)]


@factoring
@every_backend
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_factorisation_that_fails_rejects_the_trial(policy, backend, solver, rng, monkeypatch):
    """While the first trial is made the matrix counts as not positive definite; the fit goes on and converges."""
    x = np.linspace(0, 3, 25)
    problem = problem_of(torch_model(lambda x, a, b: a * torch.exp(-b * x)), x, 2.5 * np.exp(-1.3 * x), [1.0, 1.0])
    engine = LevenbergMarquardt(solver=solver, backend=backend, damping=policy)
    start = engine.init(problem, tensor([1.0, 1.0]))
    assert start.stop is None
    tried = []
    with monkeypatch.context() as patched:
        patched.setattr(BACKEND_CLASSES[backend], "cholesky", lambda *_: tried.append(1))
        state = engine.step(problem, start)
    assert tried
    assert not state.record.accepted
    assert (state.record.scaled_norm, state.record.predicted_reduction) == (0.0, 0.0)
    assert torch.equal(state.theta, start.theta)
    assert (state.cost, state.n_iter, state.stop) == (start.cost, 1, None)
    assert state.evaluations == start.evaluations
    for _ in range(100):
        state = state if state.stop else engine.step(problem, state)
    assert state.stop.status > 0
    np.testing.assert_allclose(state.theta, [2.5, 1.3], rtol=1e-6)


@every_backend
def test_one_factorisation_that_fails_costs_a_trust_region_nothing(backend, rng, monkeypatch):
    """The secular equation goes on with a larger λ, here twice the one that failed."""
    J, r = rng.standard_normal((20, 3)), rng.standard_normal(20)
    lin = injected(J, r, "cholesky", backend)
    radius = 1e-3 * lin.scaled_norm(lin.least_damping)[0]
    guess = lin.within(radius, 1.0).damping / 2
    lin = injected(J, r, "cholesky", backend)
    lin.undamped()
    real, failed = BACKEND_CLASSES[backend].cholesky, []

    def once(self, matrix, damping=0.0):
        if failed:
            return real(self, matrix, damping)
        failed.append(damping)
        return None

    monkeypatch.setattr(BACKEND_CLASSES[backend], "cholesky", once)
    step = lin.within(radius, guess)
    assert failed == [guess]
    assert step.valid
    assert step.damping > guess
    assert abs(step.scaled_norm - radius) <= 0.1 * radius * (1 + 1e-9)


# ---- within a radius by conjugate gradients


def region_problem(rng, condition=30.0, m=40, n=8):
    """Return J, r, D, and B = AᵀA, b = −Aᵀr with A = J D⁻¹."""
    d = 10.0 ** rng.uniform(-2, 2, n)
    a = graded(rng, m, n, condition)
    r = a @ rng.standard_normal(n) + 0.1 * rng.standard_normal(m)
    return a * d, r, d, a.T @ a, -a.T @ r


def cauchy(gram, b, radius):
    """Return the minimiser of the model along b within the radius."""
    along = min(b @ b / (b @ gram @ b), radius / np.linalg.norm(b))
    return along * b


def model_cost(gram, b, q):
    return 0.5 * q @ gram @ q - b @ q


def forcing(b, r):
    return min(0.1, (np.linalg.norm(b) / np.linalg.norm(r)) ** 0.5)


SHARES = [1e-6, 1e-2, 0.3, 0.6, 0.9, 1.1, 1e6]


@every_backend
@pytest.mark.parametrize("share", SHARES)
def test_the_step_of_cg_within_a_radius(share, backend, rng):
    """Steihaug (1983), theorem 2.1, and the definition of a truncated Newton step."""
    J, r, d, gram, b = region_problem(rng)
    radius = share * np.linalg.norm(np.linalg.solve(gram, b))
    step = injected(J, r, "cg", backend, d).within(radius, 0.0)
    q = step.p.numpy() * d
    left = b - gram @ q
    assert step.valid
    assert step.scaled_norm == pytest.approx(np.linalg.norm(q), rel=1e-12)
    jp = J @ step.p.numpy()
    assert step.predicted_reduction == pytest.approx(-(J.T @ r) @ step.p.numpy() - 0.5 * jp @ jp, rel=1e-10)
    assert model_cost(gram, b, q) <= model_cost(gram, b, cauchy(gram, b, radius)) * (1 - 1e-12)
    if step.scaled_norm < radius * (1 - 1e-12):
        assert step.damping == 0
        assert np.linalg.norm(left) <= forcing(b, r) * np.linalg.norm(b) * (1 + 1e-9)
    else:
        assert step.scaled_norm == pytest.approx(radius, rel=1e-12)
        assert step.damping == pytest.approx(left @ q / (q @ q), rel=1e-8, abs=1e-14)
    if share <= 0.3:
        assert step.scaled_norm == pytest.approx(radius, rel=1e-12)
    if share > 1:
        assert step.scaled_norm < radius
    if radius <= np.linalg.norm(cauchy(gram, b, np.inf)):
        np.testing.assert_allclose(q, radius * b / np.linalg.norm(b), atol=1e-12 * radius)


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_the_step_of_cg_is_gauss_newton_near_the_solution(backend, rng):
    """The forcing is the root of the cosine between r and J: where it is 1e-8, four digits of the step."""
    J, r, d, gram, _ = region_problem(rng)
    u = np.linalg.qr(np.column_stack([J, r]))[0]
    a = J / d
    r = u[:, -1] + 1e-8 * a @ rng.standard_normal(8)
    b = -a.T @ r
    newton = np.linalg.solve(gram, b)
    step = injected(J, r, "cg", backend, d).within(1.0, 0.0)
    error = step.p.numpy() * d - newton
    assert np.linalg.norm(gram @ error) <= 2 * forcing(b, r) * np.linalg.norm(b)
    assert forcing(b, r) < 1e-3


def test_the_step_of_cg_without_a_gradient_is_zero():
    step = injected(np.eye(4)[:, :2], [0.0, 0.0, 1.0, 1.0], "cg").within(1.0, 0.0)
    assert (step.scaled_norm, step.predicted_reduction) == (0.0, 0.0)
    assert not step.p.any()


def looking_every(iterations, J, r, d):
    """Return the linearisation by cg on torch with so many iterations between two looks."""
    backend = TorchBackend(CPU)
    backend.check_every = iterations
    problem, theta = injected_problem(J, r)
    lin = linearize(Derivatives.choose(problem, exact, theta).at(theta), "cg", backend)
    return lin.with_scale(tensor(d))


@pytest.mark.parametrize("share", SHARES)
def test_a_step_within_a_radius_does_not_depend_on_how_often_cg_looks(share, rng):
    J, r, d, gram, b = region_problem(rng)
    radius = share * np.linalg.norm(np.linalg.solve(gram, b))
    one, other = (looking_every(k, J, r, d).within(radius, 0.0) for k in (1, 10))
    np.testing.assert_allclose(one.p * tensor(d), other.p * tensor(d), rtol=0, atol=1e-10 * one.scaled_norm)
    assert one.predicted_reduction == pytest.approx(other.predicted_reduction, rel=1e-10)
    assert one.damping == pytest.approx(other.damping, rel=1e-8, abs=1e-13)


@pytest.mark.parametrize("damping", [0.0, 1e-3, 10.0])
def test_a_solution_does_not_depend_on_how_often_cg_looks(damping, rng):
    J, r, d, *_ = region_problem(rng)
    one, other = (looking_every(k, J, r, d).solve(damping) for k in (1, 10))
    np.testing.assert_allclose(one.p * tensor(d), other.p * tensor(d), rtol=0, atol=1e-10 * one.scaled_norm)


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
    covariance, rank, undetermined = known(lin)
    with mpmath.workdps(50):
        jm = mpmath.matrix(J.tolist())
        expected = np.array(((jm.T * jm) ** -1).tolist(), dtype=float)
    scaled = np.linalg.cond(J / np.linalg.norm(J, axis=0))
    rtol = MODEST * EPS * (scaled if solver == "qr" else scaled**2)
    sizes = np.sqrt(np.diag(expected))
    assert np.all(np.abs(covariance - expected) <= rtol * np.outer(sizes, sizes))
    assert (rank, undetermined.tolist()) == (4, [False] * 4)


@every_solver
@every_backend
@pytest.mark.parametrize("units", [[1, 1, 1, 1, 1], [1e6, 1e-4, 1e3, 1e-6, 1e2]], ids=["one", "many"])
def test_covariance_names_what_is_undetermined(units, solver, backend, rng):
    J = deficient(rng)
    expected = np.linalg.pinv(J.T @ J, rcond=1e-12, hermitian=True) / np.outer(units, units)
    lin = injected(J * units, rng.standard_normal(30), solver, backend, 10.0 ** rng.uniform(-2, 2, 5))
    covariance, rank, undetermined = known(lin)
    assert rank == 4
    assert undetermined.tolist() == [False, True, True, True, False]
    np.testing.assert_array_equal(np.diag(covariance)[1:4], np.inf)
    np.testing.assert_allclose(covariance[np.ix_([0, 4], [0, 4])], expected[np.ix_([0, 4], [0, 4])], rtol=1e-6)
    assert np.isnan(covariance[0, 1:4]).all()


@every_solver
@every_backend
def test_covariance_of_a_wide_and_of_a_zero_jacobian(solver, backend, rng):
    covariance, rank, undetermined = known(injected(rng.standard_normal((3, 5)), np.ones(3), solver, backend))
    assert rank == 3
    assert undetermined.all()
    assert np.isinf(np.diag(covariance)).all()
    covariance, rank, undetermined = known(injected(np.zeros((4, 2)), np.ones(4), solver, backend))
    assert rank == 0
    assert undetermined.all()
    assert np.isinf(np.diag(covariance)).all()


@every_solver
@every_backend
def test_covariance_drops_what_an_inexact_jacobian_cannot_tell(solver, backend, rng):
    J = graded(rng, 20, 3, 1e5)
    lin = injected(J, rng.standard_normal(20), solver, backend)
    assert lin.estimable().rank == 3
    assert lin.with_scale(lin.scale, 1e-4).estimable().rank == 2


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
    covariance, rank, undetermined = known(lin)
    assert rank == 2
    assert undetermined.tolist() == [False, True, False]
    inverse = np.linalg.inv(J[:, ::2].T @ J[:, ::2])
    np.testing.assert_allclose(covariance[::2, ::2], inverse, rtol=1e-10)


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
    """Dual, with K of m x m, gets 311 rows."""
    J, r = long_data(rng, 311 if solver == "dual" else 30011)
    reference = numbers(injected(J, r, solver, backend))
    np.testing.assert_allclose(reference[:4], J.T @ r, rtol=1e-11, atol=1e-11 * np.linalg.norm(r) * 200)
    for chunk_rows in (7, 64, 310, 500) if solver == "dual" else (777, 4097, 10_000, 30_010, 50_000):
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
    """Dual puts the rows together before anything is summed: for it any block will do."""
    J, r = long_data(rng, 311 if solver == "dual" else 30011)
    leaf = 50 if solver == "dual" else 4096
    reference = numbers(injected(J, r, solver, backend, chunk_rows=leaf))
    for chunk_rows in (2 * leaf, 4 * leaf):
        assert torch.equal(numbers(injected(J, r, solver, backend, chunk_rows=chunk_rows)), reference)
    for devices in ((CPU,), (CPU, CPU), (CPU, CPU, CPU)):
        for chunk_rows in (leaf, 2 * leaf):
            lin = injected(J, r, solver, backend, devices=devices, chunk_rows=chunk_rows)
            assert torch.equal(numbers(lin), reference)


@every_solver
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_backends_agree(backend, solver, rng):
    J, r = long_data(rng, 311 if solver == "dual" else 30011)
    one, other = (numbers(injected(J, r, solver, name)) for name in ("scipy", backend))
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


@pytest.mark.parametrize(
    ("m", "n", "expected"),
    [
        (1, 1, "qr"),
        (10**8, MANY_PARAMS, "qr"),
        (1, MANY_PARAMS, "qr"),
        (MANY_PARAMS, MANY_PARAMS + 1, "dual"),
        (MANY_PARAMS + 1, MANY_PARAMS + 1, "cholesky"),
        (10**8, MANY_PARAMS + 1, "cholesky"),
        (10**8, MOST_DENSE, "cholesky"),
        (10**8, MOST_DENSE + 1, "cg"),
        (MOST_DENSE - 1, MOST_DENSE, "dual"),
        (MOST_DENSE, MOST_DENSE + 1, "dual"),
        (MOST_DENSE + 1, MOST_DENSE + 2, "cg"),
        (512, 10**6, "dual"),
        (1024, MOST_JACOBIAN // 1024, "dual"),
        (1024, MOST_JACOBIAN // 1024 + 1, "cg"),
        (1, MOST_JACOBIAN, "dual"),
        (1, MOST_JACOBIAN + 1, "cg"),
    ],
)
def test_auto_works_in_the_smaller_dimension(m, n, expected):
    assert choose("auto", m, n) == expected


def test_constants_of_auto_are_those_of_its_docstring():
    """1,000 parameters, a side of 20,000, 2²⁹ entries."""
    assert (MANY_PARAMS, MOST_DENSE, MOST_JACOBIAN) == (1000, 20_000, 2**29)


@every_solver
def test_a_named_solver_is_itself(solver):
    assert choose(solver, 10**9, 10**9) == choose(solver, 1, 1) == solver


@pytest.mark.parametrize("name", ["lu", "", "QR"])
def test_choose_error(name):
    allowed = "allowed are 'auto', 'qr', 'cholesky', 'dual', 'ghost', 'cg'"
    with pytest.raises(ValueError, match=f"solver: got '{name}'; {allowed}"):
        choose(name, 2, 2)


@every_solver
def test_linearize_counts_one_pass(solver, rng):
    problem, theta = injected_problem(rng.standard_normal((10, 2)), rng.standard_normal(10))
    jacobian = Derivatives.choose(problem, "autograd", theta).at(theta)
    assert jacobian.nfev == 0
    linearize(jacobian, solver, get_backend("auto", CPU))
    assert jacobian.nfev == 1
