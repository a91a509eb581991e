"""Steps within bounds: against enumeration of all faces, SciPy's bounded least squares, and the KKT conditions."""

import itertools

import numpy as np
import pytest
import torch
from injected import BACKENDS, SOLVERS, injected_problem, known, tensor
from scipy.optimize import lsq_linear

from lmfit_gpu import LMRegressor
from lmfit_gpu.backends import get_backend
from lmfit_gpu.jacobian import Derivatives
from lmfit_gpu.levenberg_marquardt import LevenbergMarquardt
from lmfit_gpu.linear import BoundedLinearization, linearize

CPU = torch.device("cpu")
DIRECT = ("qr", "cholesky", "dual")
DAMPINGS = (1e-3, 0.1, 3.0)


def bounded(J, r, below, above, *, solver="qr", backend="scipy", scale=None):
    """Return the linearisation of (J, r) with D = `scale` (column norms by default), within gaps to bounds."""
    problem, theta = injected_problem(J, r)
    jacobian = Derivatives.choose(problem, "auto", theta).at(theta)
    lin = linearize(jacobian, solver, get_backend(backend, CPU))
    lin = lin.with_scale(lin.column_norms if scale is None else tensor(scale))
    return BoundedLinearization(lin, tensor(below), tensor(above))


def by_enumeration(J, r, D, damping, below, above):
    """Return the minimiser of g'p + ½|Jp|² + ½λ|Dp|² over the box: the best feasible one of all 3ⁿ faces."""
    n = J.shape[1]
    H, g = J.T @ J + damping * np.diag(D**2), J.T @ r
    best, lowest = None, np.inf
    for face in itertools.product((-1, 0, 1), repeat=n):
        side = np.array(face)
        p = np.where(side < 0, below, np.where(side > 0, above, 0.0))
        if not np.isfinite(p).all():
            continue
        free = side == 0
        if free.any():
            p[free] = np.linalg.solve(H[np.ix_(free, free)], -g[free] - H[np.ix_(free, ~free)] @ p[~free])
        value = g @ p + 0.5 * p @ H @ p
        if (p >= below - 1e-12).all() and (p <= above + 1e-12).all() and value < lowest:
            best, lowest = p, value
    return best


def random_box(rng, n, J, r):
    """Return gaps of which about half cut the Gauss-Newton step; some are 0 (on a bound), some infinite."""
    size = np.abs(np.linalg.lstsq(J, -r, rcond=None)[0]) + 0.1
    below, above = -size * rng.choice([0.0, 0.3, 2.0, np.inf], n), size * rng.choice([0.1, 0.5, 3.0, np.inf], n)
    return below, above


def kkt_violation(J, r, D, damping, p, below, above):
    """Return the largest wrong multiplier over the size of its gradient."""
    force = J.T @ (r + J @ p) + damping * D**2 * p
    wrong = np.where(p <= below, np.minimum(force, 0), np.where(p >= above, np.maximum(force, 0), force))
    return np.max(np.abs(wrong) / (np.linalg.norm(J, axis=0) * np.linalg.norm(r)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shape", [(12, 4), (4, 4)])
def test_the_damped_step_is_the_minimiser_over_the_box(shape, solver, backend):
    rng = np.random.default_rng(shape)
    for trial in range(3 if backend == "cupynumeric" else 12):
        J, r = rng.standard_normal(shape) * 10.0 ** rng.integers(-2, 3, shape[1]), rng.standard_normal(shape[0])
        below, above = random_box(rng, shape[1], J, r)
        lin = bounded(J, r, below, above, solver=solver, backend=backend)
        D = lin.scale.numpy()
        damping = DAMPINGS[trial % len(DAMPINGS)]
        step = lin.solve(damping)
        expected = by_enumeration(J, r, D, damping, below, above)
        assert step.valid
        assert step.p.numpy() * D == pytest.approx(expected * D, rel=1e-8, abs=1e-8 * np.linalg.norm(expected * D))
        assert step.scaled_norm == pytest.approx(np.linalg.norm(D * expected), rel=1e-8)
        gain = -(J.T @ r) @ expected - 0.5 * np.sum((J @ expected) ** 2)
        assert step.predicted_reduction == pytest.approx(gain, rel=1e-7)


@pytest.mark.parametrize("solver", SOLVERS)
def test_parameters_on_a_bound_are_on_it_exactly(solver):
    rng = np.random.default_rng(5)
    J, r = rng.standard_normal((30, 8)), rng.standard_normal(30)
    below, above = np.full(8, -0.01), np.full(8, 0.02)
    p = bounded(J, r, below, above, solver=solver).solve(1e-3).p.numpy()
    assert ((p >= below) & (p <= above)).all()
    assert np.isin(p, [-0.01, 0.02]).sum() >= 4


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("n", [5, 40])
def test_the_undamped_step_is_bounded_least_squares(n, solver):
    rng = np.random.default_rng(n)
    for _ in range(4):
        J, r = rng.standard_normal((3 * n, n)), rng.standard_normal(3 * n)
        below, above = random_box(rng, n, J, r)
        above = np.maximum(above, below + 1e-3)
        step = bounded(J, r, below, above, solver=solver).undamped()
        expected = lsq_linear(J, -r, (below, above), method="bvls", tol=1e-14).x
        assert step.valid
        assert step.p.numpy() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_step_within_a_radius_keeps_to_both(solver):
    rng = np.random.default_rng(1)
    for radius in (1e-4, 0.05, 0.5, 5.0, 500.0):
        J, r = rng.standard_normal((20, 6)), rng.standard_normal(20)
        below, above = random_box(rng, 6, J, r)
        lin = bounded(J, r, below, above, solver=solver)
        step = lin.within(radius, 0.0)
        p, D = step.p.numpy(), lin.scale.numpy()
        assert step.valid
        assert ((p >= below) & (p <= above)).all()
        assert np.linalg.norm(D * p) <= 1.1 * radius * (1 + 1e-12)
        assert step.predicted_reduction == pytest.approx(-(J.T @ r) @ p - 0.5 * np.sum((J @ p) ** 2), rel=1e-9)
        if solver != "cg":
            violation = kkt_violation(J, r, D, step.damping, p, below, above)
            assert violation < (1e-6 if solver == "dual" else 1e-12)  # more rows than columns: ε m ‖K‖/λ


def cauchy_reduction(J, r, D, radius, below, above):
    """Return the best reduction along the projected scaled gradient, by a fine search: what convergence rests on."""
    g = J.T @ r
    best = 0.0
    for t in np.geomspace(1e-6, 1e3, 400):
        p = np.clip(-t * g / D**2, below, above)
        if np.linalg.norm(D * p) <= radius:
            best = max(best, -g @ p - 0.5 * np.sum((J @ p) ** 2))
    return best


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_step_gains_a_share_of_what_the_projected_gradient_gains(solver):
    rng = np.random.default_rng(2)
    for radius in (0.01, 0.3, 3.0):
        for _ in range(8):
            J, r = rng.standard_normal((25, 10)), rng.standard_normal(25)
            below, above = random_box(rng, 10, J, r)
            lin = bounded(J, r, below, above, solver=solver)
            step = lin.within(radius, 0.0)
            assert step.predicted_reduction >= 0.2 * cauchy_reduction(J, r, lin.scale.numpy(), radius, below, above)


@pytest.mark.parametrize("solver", DIRECT)
def test_the_length_falls_with_the_damping_and_its_slope_is_right(solver):
    rng = np.random.default_rng(3)
    J, r = rng.standard_normal((15, 5)), rng.standard_normal(15)
    below, above = random_box(rng, 5, J, r)
    lin = bounded(J, r, below, above, solver=solver)
    dampings = np.geomspace(1e-3, 1e3, 30)
    norms = [lin.scaled_norm(damping)[0] for damping in dampings]
    assert (np.diff(norms) <= 1e-12).all()
    for damping in (0.01, 1.0, 30.0):
        h = 1e-6 * damping
        difference = (lin.scaled_norm(damping + h)[0] - lin.scaled_norm(damping - h)[0]) / (2 * h)
        assert lin.scaled_norm(damping)[1] == pytest.approx(difference, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
def test_without_an_active_bound_nothing_changes(solver):
    rng = np.random.default_rng(4)
    J, r = rng.standard_normal((20, 5)), rng.standard_normal(20)
    lin = bounded(J, r, np.full(5, -np.inf), np.full(5, 100.0), solver=solver)
    inner = lin._inner
    for ours, theirs in ((lin.solve(0.1), inner.solve(0.1)), (lin.undamped(), inner.undamped())):
        assert torch.equal(ours.p, theirs.p)
        assert ours.predicted_reduction == theirs.predicted_reduction
    assert torch.equal(lin.gradient, inner.gradient)
    assert lin.condition() == inner.condition()


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_held_parameter_leaves_gradient_and_covariance(solver):
    rng = np.random.default_rng(6)
    J, r = rng.standard_normal((20, 3)), rng.standard_normal(20)
    g = J.T @ r
    below, above = np.where(g > 0, 0.0, -9.0), np.where(g > 0, 9.0, 0.0)
    below[1], above[1] = -9.0, 9.0
    lin = bounded(J, r, below, above, solver=solver)
    assert lin.gradient.numpy() == pytest.approx([0.0, g[1], 0.0], rel=1e-12)
    covariance, rank, undetermined = known(lin)
    assert rank == 1
    assert not undetermined.any()
    assert float(covariance[1, 1]) == pytest.approx(1 / (J[:, 1] @ J[:, 1]), rel=1e-10)
    assert np.isnan(covariance).sum() == 8


@pytest.mark.parametrize("solver", SOLVERS)
def test_at_the_bounded_minimum_nothing_is_left_to_do(solver):
    rng = np.random.default_rng(7)
    J, r = rng.standard_normal((20, 3)), rng.standard_normal(20)
    outward = np.sign(J.T @ r)
    lin = bounded(J, r, np.where(outward > 0, 0.0, -1.0), np.where(outward > 0, 1.0, 0.0), solver=solver)
    assert not lin.gradient.any()
    for step in (lin.undamped(), lin.within(1.0, 0.0), lin.solve(0.1)):
        assert not step.p.any()
        assert step.predicted_reduction == 0


def test_a_cycle_of_exchanges_is_broken():
    """Exchanging all wrong sides at once need not end; one at a time does (Murty)."""
    cycled = False
    for seed in range(60):
        rng = np.random.default_rng(seed)
        J = rng.standard_normal((8, 8)) + 3 * np.outer(rng.standard_normal(8), np.ones(8))
        r = rng.standard_normal(8) * 3
        below, above = -rng.uniform(0, 0.2, 8), rng.uniform(0, 0.2, 8)
        step = bounded(J, r, below, above, scale=np.ones(8)).solve(1e-4)
        assert step.valid
        assert kkt_violation(J, r, np.ones(8), 1e-4, step.p.numpy(), below, above) < 1e-9
        cycled = cycled or plain_exchange_cycles(J, r, 1e-4, below, above)
    assert cycled  # else this test says nothing


def plain_exchange_cycles(J, r, damping, below, above):
    """Return whether exchanging all wrong sides at once, and nothing else, comes back to a face."""
    H, g = J.T @ J + damping * np.eye(len(below)), J.T @ r
    face, seen = np.zeros(len(below), int), set()
    for _ in range(200):
        if tuple(face) in seen:
            return True
        seen.add(tuple(face))
        p = np.where(face < 0, below, np.where(face > 0, above, 0.0))
        free = face == 0
        if free.any():
            p[free] = np.linalg.solve(H[np.ix_(free, free)], -g[free] - H[np.ix_(free, ~free)] @ p[~free])
        force = g + H @ p
        new = np.where(free & (p < below), -1, np.where(free & (p > above), 1, face))
        new = np.where(((face < 0) & (force < 0)) | ((face > 0) & (force > 0)), 0, new)
        if (new == face).all():
            return False
        face = new
    return False


@pytest.mark.parametrize("solver", SOLVERS)
def test_rank_deficient_columns_stay_within_the_box(solver):
    rng = np.random.default_rng(8)
    J = rng.standard_normal((12, 3))
    J = np.column_stack((J, J[:, 0] + J[:, 1]))
    r = rng.standard_normal(12)
    lin = bounded(J, r, np.full(4, -0.05), np.full(4, 0.05), solver=solver)
    for step in (lin.within(10.0, 0.0), lin.solve(1e-6)):
        assert step.valid
        assert step.predicted_reduction > 0
        assert (step.p.abs() <= 0.05).all()
    expected = lsq_linear(J, -r, (-0.05, 0.05), tol=1e-14)
    found = 0.5 * r @ r - lin.undamped().predicted_reduction
    assert found == pytest.approx(expected.cost, rel=1e-9)


def banana(x, a, b):
    """Rosenbrock's valley as a model of three rows, the last of which is 0."""
    return torch.stack((10 * (b - a**2), 1 - a, 0 * a)).reshape(-1) + 0 * x


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("damping", ["trust-region", "nielsen", "marquardt"])
def test_every_policy_ends_at_the_bounded_minimum(damping, solver):
    """With a <= 0.5 the minimum is (0.5, 0.25), cost 1/8; with b <= 0.5 it is on b = 0.5 where its derivative is 0."""
    X, y = np.zeros((3, 1)), np.zeros(3)
    options = {"p0": [-1.2, 0.3], "damping": damping, "solver": solver, "max_iter": 3000}
    fit = LMRegressor(banana, bounds=([-3, -3], [0.5, 3]), **options).fit(X, y)
    assert fit.result_.success
    assert fit.theta_ == pytest.approx([0.5, 0.25], rel=1e-7)
    assert fit.theta_[0] == 0.5
    assert "a (on its upper bound)" in fit.result_.message
    fit = LMRegressor(banana, bounds={"b": (None, 0.5)}, **options).fit(X, y)
    a = np.roots([200, 0, -99, -1]).real.max()  # d/da [½(100(½ − a²)² + (1 − a)²)] = 200a³ − 99a − 1
    assert fit.theta_ == pytest.approx([a, 0.5], rel=1e-7)


@pytest.mark.parametrize("solver", SOLVERS)
def test_no_trial_leaves_the_bounds(solver):
    seen = []

    def model(x, a, b, c):
        seen.append(np.array([a, b, c]))
        return a * np.exp(-b * x) + c

    x = np.linspace(0, 5, 40)
    y = 3 * np.exp(-0.8 * x) - 0.5
    lower, upper = np.array([0.0, 0.0, 0.0]), np.array([2.5, 10.0, 5.0])
    fit = LMRegressor(model, p0=[0.0, 10.0, 5.0], bounds=(lower, upper), solver=solver, jac="cs").fit(x[:, None], y)
    points = np.array(seen).real
    assert fit.result_.success
    assert ((points >= lower) & (points <= upper)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_bounded_module(dtype):
    rng = np.random.default_rng(9)
    X = rng.standard_normal((60, 3))
    y = X @ [1.0, -2.0, 0.5] + 0.3
    module = torch.nn.Linear(3, 1, dtype=dtype)
    with torch.no_grad():
        module.weight.zero_()
    fit = LMRegressor(module, bounds={"weight": (-1.5, 0.75)}).fit(X, y)
    design = np.column_stack((X, np.ones(60)))
    expected = lsq_linear(design, y, ([-1.5] * 3 + [-np.inf], [0.75] * 3 + [np.inf]), tol=1e-12).x
    assert fit.theta_ == pytest.approx(expected, rel=1e-6 if dtype == torch.float64 else 1e-4)
    assert fit.theta_[0] == 0.75
    assert fit.theta_[1] == -1.5
    assert np.isnan(fit.stderr_[:2]).all()
    assert np.isfinite(fit.stderr_[2:]).all()


def test_the_engine_keeps_the_best_point_within_bounds_at_max_iter():
    problem, theta = injected_problem(np.eye(2), np.array([3.0, -4.0]))
    problem.bounds = tensor([-1.0, -1.0]), tensor([1.0, 1.0])
    result = LevenbergMarquardt(max_iter=0).minimize(problem, theta)
    assert result.theta.tolist() == theta.tolist()
    result = LevenbergMarquardt().minimize(problem, theta)
    assert result.theta == pytest.approx([-1.0, 1.0])
    assert result.roles == {0: "on its lower bound", 1: "on its upper bound"}
