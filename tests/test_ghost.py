"""The dual system from one Gram matrix per tensor: against dense formulas, and beside the solvers that hold J."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from injected import CPU, graded, injected, tensor

from lmfit_gpu.backends import get_backend
from lmfit_gpu.linear import SOLVERS, GhostLinearization

SIZES = (5, 1, 12, 7)  # of the tensors
ALPHAS = {"none": (0, 0, 0, 0), "some": (0.3, 0, 2.0, 0), "all": (0.5, 0.1, 3.0, 0.1), "same": (0.4, 0.4, 0.4, 0.4)}
DAMPINGS = (1e-6, 1e-3, 0.3, 1.0, 40.0, 1e6)
EXACT = 1e-10
penalties = pytest.mark.parametrize("alphas", ALPHAS.values(), ids=ALPHAS.keys())


class Rows:
    """J_t itself."""

    def __init__(self, block):
        self.block, self.size = block, block.shape[1]
        self.transposes = 0

    def gram(self):
        return self.block @ self.block.T

    def transposed(self, u):
        self.transposes += 1
        return self.block.T @ u

    def along(self, v):
        return self.block @ v


class Case:
    """Random J, r, θ and one d and α per tensor."""

    def __init__(self, seed=0, m=6, sizes=SIZES, alphas=None, dtype=torch.float64, theta=None, J=None):
        rng = np.random.default_rng(seed)
        self.sizes, self.m, self.n = sizes, m, sum(sizes)
        self.d = 10.0 ** rng.uniform(-0.5, 0.5, len(sizes))
        self.J = rng.standard_normal((m, self.n)) if J is None else J
        self.r = rng.standard_normal(m)
        self.theta = rng.standard_normal(self.n) if theta is None else theta
        self.alphas = np.zeros(len(sizes)) if alphas is None else np.array(alphas, dtype=float)
        self.D, self.A = np.repeat(self.d, sizes), np.repeat(self.alphas, sizes)
        self.dtype = dtype

    def rows(self):
        return [Rows(block.contiguous()) for block in tensor(self.J, self.dtype).split(self.sizes, dim=1)]

    def lin(self, backend="scipy", scale=None):
        scale = tensor(self.D if scale is None else scale)
        theta = tensor(self.theta, self.dtype)
        r, solver = tensor(self.r, self.dtype), get_backend(backend, CPU)
        return GhostLinearization(self.rows(), r, solver, scale, alphas=self.alphas, theta=theta)

    @property
    def gradient(self):
        return self.J.T @ self.r + self.A * self.theta

    @property
    def hessian(self):
        return self.J.T @ self.J + np.diag(self.A)

    def step(self, damping):
        """Return p, by QR of the stacked system [J; √A; √λ D]: no cancellation however small λ is."""
        stacked = np.vstack((self.J, np.diag(self.A**0.5), np.diag(damping**0.5 * self.D)))
        target = np.concatenate((self.r, self.A**0.5 * self.theta, np.zeros(self.n)))
        return -np.linalg.lstsq(stacked / self.D, target, rcond=None)[0] / self.D

    def cost(self, p):
        ahead = self.r + self.J @ p
        return 0.5 * ahead @ ahead + 0.5 * self.A @ (self.theta + p) ** 2

    def gain(self, p):
        """Return the fall of the cost of the linear model, term by term: no difference of costs."""
        ahead = self.J @ p
        return -ahead @ (self.r + 0.5 * ahead) - (self.A * p) @ (self.theta + 0.5 * p)

    def slope(self, damping, p):
        """Return the derivative of ‖Dp‖ by λ, −q·(H + λ)⁻¹q/‖q‖ in the units of D."""
        q = self.D * p
        scaled = self.hessian / self.D / self.D[:, None]
        return -q @ np.linalg.solve(scaled + damping * np.eye(self.n), q) / np.linalg.norm(q)


def close(actual, expected, within=EXACT):
    expected = np.asarray(expected)
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=within * np.linalg.norm(expected))


# ---- against dense formulas


@pytest.mark.parametrize("backend", ["scipy", "torch"])
@pytest.mark.parametrize("damping", DAMPINGS)
@penalties
def test_the_step_solves_the_penalised_and_damped_problem(alphas, damping, backend):
    case = Case(alphas=alphas)
    step = case.lin(backend).solve(damping)
    p = case.step(damping)
    assert step.valid
    assert step.damping == damping
    assert step.p.dtype == torch.float64
    close(step.p, p)
    close(step.scaled_norm, np.linalg.norm(case.D * p))
    close(step.predicted_reduction, case.gain(p))
    close(case.cost(np.zeros(case.n)) - case.cost(step.p.numpy()), case.gain(p), 1e-8)


@pytest.mark.parametrize("damping", DAMPINGS)
@penalties
def test_the_secular_function_and_its_derivative(alphas, damping):
    case = Case(seed=1, alphas=alphas)
    norm, slope = case.lin().scaled_norm(damping)
    p = case.step(damping)
    close(norm, np.linalg.norm(case.D * p))
    close(slope, case.slope(damping, p), 1e-8)


@given(
    seed=st.integers(0, 10**6),
    m=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    exponents=st.lists(st.none() | st.floats(-6, 3), min_size=5, max_size=5),
    power=st.floats(-4, 4),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_sizes_and_penalties(seed, m, sizes, exponents, power):
    alphas = [0.0 if e is None else 10.0**e for e in exponents[: len(sizes)]]
    case, damping = Case(seed, m, tuple(sizes), alphas), 10.0**power
    lin, p = case.lin(), case.step(damping)
    step = lin.solve(damping)
    close(step.p, p, 1e-8)
    close(lin.scaled_norm(damping), (np.linalg.norm(case.D * p), case.slope(damping, p)), 1e-7)
    assert lin.scaled_norm(damping)[1] <= 0
    close(step.predicted_reduction, case.gain(p), 1e-8)


@pytest.mark.parametrize("damping", [0.0, 1e-300, 1e-15, 1e-8])
@pytest.mark.parametrize("alphas", [(0.5, 0.1, 3.0, 0.1), (1e-4, 1e-3, 1e-4, 1e-4)], ids=["large", "small"])
def test_a_damping_that_is_tiny_beside_the_penalty(alphas, damping):
    case = Case(seed=2, alphas=alphas)
    lin, p = case.lin(), case.step(damping)
    assert lin.least_damping == 0
    step = lin.solve(damping)
    close(step.p, p, 1e-9)
    close(step.predicted_reduction, case.gain(p), 1e-9)
    close(lin.scaled_norm(damping)[0], np.linalg.norm(case.D * p), 1e-9)
    close(lin.scaled_norm(damping)[1], case.slope(damping, p), 1e-7)
    close(lin.undamped().p, case.step(0.0), 1e-9)


@penalties
def test_gradient_products_and_norms(alphas):
    case = Case(seed=3, alphas=alphas)
    lin, v = case.lin(), np.random.default_rng(4).standard_normal(case.n)
    close(lin.gradient, case.gradient)
    close(lin.product(tensor(v)), case.hessian @ v)
    close(lin.residual_norm, np.linalg.norm(case.r))
    blocks = np.split(case.J, np.cumsum(SIZES)[:-1], axis=1)
    norms = [np.linalg.norm(block) / block.shape[1] ** 0.5 for block in blocks]
    close(lin.tensor_norms, norms)
    close(lin.column_norms, np.repeat(norms, SIZES))
    close(lin.scale, case.D)
    assert lin.finite
    assert lin.estimable() is None


@pytest.mark.parametrize("damping", DAMPINGS)
@penalties
def test_other_right_hand_sides(alphas, damping):
    case = Case(seed=5, alphas=alphas)
    b = np.random.default_rng(6).standard_normal(case.n)
    x = np.linalg.solve(case.hessian + damping * np.diag(case.D**2), b)
    close(case.lin().solve_rhs(damping, tensor(b)), x, 1e-9 + 1e-14 / damping)


def test_theta_zero():
    case = Case(seed=7, alphas=ALPHAS["some"], theta=np.zeros(sum(SIZES)))
    lin, p = case.lin(), case.step(0.2)
    close(lin.gradient, case.J.T @ case.r)
    close(lin.solve(0.2).p, p)
    close(lin.scaled_norm(0.2), (np.linalg.norm(case.D * p), case.slope(0.2, p)))


def test_another_scale_makes_no_new_gram_matrices():
    case = Case(seed=8, alphas=ALPHAS["some"])
    rows = case.rows()
    lin = GhostLinearization(
        rows, tensor(case.r), get_backend("scipy", CPU), torch.ones(4), alphas=case.alphas, theta=tensor(case.theta)
    )
    lin.solve(1.0)
    for each in rows:
        each.gram = None
    for scale in (case.D, case.d):  # one number per parameter, or per tensor
        close(lin.with_scale(tensor(scale)).solve(0.7).p, case.step(0.7))


def test_one_product_with_the_transpose_for_a_step_within_a_radius():
    case = Case(seed=9, alphas=ALPHAS["some"])
    lin = case.lin()
    step = lin.within(0.05, 0.0)
    assert abs(step.scaled_norm - 0.05) <= 0.1 * 0.05
    assert [rows.transposes for rows in lin._point.tensors] == [1] * len(SIZES)


# ---- beside the solvers that hold J


@pytest.mark.parametrize("backend", ["scipy", "torch"])
@pytest.mark.parametrize("damping", DAMPINGS[1:])
def test_equals_dual_without_a_penalty(damping, backend):
    case = Case(seed=10)
    dual, ghost = injected(case.J, case.r, "dual", backend, case.D), case.lin(backend)
    mine, other = ghost.solve(damping), dual.solve(damping)
    close(mine.p, other.p)
    close(mine.predicted_reduction, other.predicted_reduction)
    close(ghost.scaled_norm(damping), dual.scaled_norm(damping))
    close(ghost.undamped().p, dual.undamped().p, 1e-8)
    close(ghost.condition(), dual.condition(), 1e-8)
    close(ghost.within(0.3, 0.0).p, dual.within(0.3, 0.0).p, 1e-8)
    assert dual.least_damping <= ghost.least_damping <= 10 * dual.least_damping


@pytest.mark.parametrize("damping", [0.0, *DAMPINGS])
@pytest.mark.parametrize("name", ["all", "same"])
def test_equals_qr_of_the_stacked_system(name, damping):
    case = Case(seed=11, alphas=ALPHAS[name])
    J, r = np.vstack((case.J, np.diag(case.A**0.5))), np.concatenate((case.r, case.A**0.5 * case.theta))
    qr, ghost = injected(J, r, "qr", "scipy", case.D), case.lin()
    mine, other = ghost.solve(damping), qr.solve(damping)
    close(mine.p, other.p)
    close(mine.predicted_reduction, other.predicted_reduction)
    close(ghost.scaled_norm(damping), qr.scaled_norm(damping))
    close(ghost.gradient, qr.gradient)
    close(ghost.within(0.1, 0.0).p, qr.within(0.1, 0.0).p, 1e-8)


# ---- the radius


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("radius", [1e-6, 1e-2, 0.3, 1.0, 1e3])
@penalties
def test_a_step_within_a_radius(alphas, radius, dtype):
    case = Case(seed=12, alphas=alphas, dtype=dtype)
    lin = case.lin()
    longest = lin.undamped().scaled_norm
    for guess in (0.0, 1e-3, 1e9):
        step = lin.within(radius, guess)
        assert step.valid
        assert step.predicted_reduction > 0
        assert step.scaled_norm <= 1.1 * radius
        assert step.scaled_norm >= 0.85 * min(radius, longest)
        close(np.linalg.norm(case.D * step.p.numpy()), step.scaled_norm, 1e-6)


# ---- float32


@pytest.mark.parametrize("damping", [1e-2, 1.0, 1e2])
@penalties
def test_rows_in_float32(alphas, damping):
    case = Case(seed=13, alphas=alphas, dtype=torch.float32)
    step, p = case.lin().solve(damping), case.step(damping)
    assert step.valid
    close(step.p, p, 1e-4)
    close(step.predicted_reduction, case.gain(p), 1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_a_damping_below_what_is_resolved_is_no_step(dtype):
    case = Case(seed=14, dtype=dtype, J=graded(np.random.default_rng(0), 6, sum(SIZES), 1e12))
    lin = case.lin()
    least = lin.least_damping
    assert 0 < least < 1e-4 * np.linalg.norm(case.J / case.D, 2) ** 2
    step = lin.solve(0.5 * least)
    assert not step.valid
    assert not bool(step.p.any())
    assert lin.solve(1.01 * least).valid


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_rounding_of_k_is_below_the_least_damping(dtype):
    """What LOW_PRECISION says: the error of K is smaller, so that the step at the least λ falls as it should."""
    rng = np.random.default_rng(15)
    m, sizes = 60, (3000, 40, 1)
    case = Case(15, m, sizes, dtype=dtype, J=graded(rng, m, sum(sizes), 1e10))
    lin = case.lin()
    K = (case.J / case.D**2) @ case.J.T
    assert np.linalg.norm(lin._groups.grams[0].numpy() - K, 2) <= 0.5 * lin.least_damping
    step = lin.solve(lin.least_damping)
    close(step.predicted_reduction, case.gain(step.p.numpy()), 0.1)


# ---- edges


def test_a_tensor_without_influence_moves_only_by_its_penalty():
    case = Case(seed=16, alphas=ALPHAS["some"])
    case.J[:, :5] = 0  # penalised
    case.J[:, 5:6] = 0  # not
    step, p = case.lin().solve(0.1), case.step(0.1)
    close(step.p, p)
    np.testing.assert_allclose(step.p[:5], -0.3 * case.theta[:5] / (0.3 + 0.1 * case.d[0] ** 2), rtol=1e-12)
    assert float(step.p[5]) == 0


def test_j_zero_throughout_is_a_point_that_no_step_leaves():
    case = Case(J=np.zeros((6, sum(SIZES))))
    lin = case.lin(scale=np.full(sum(SIZES), 2.0))
    for step in (lin.undamped(), lin.within(1.0, 0.0), lin.solve(0.5)):
        assert step.valid
        assert step.predicted_reduction == step.scaled_norm == 0
        assert not bool(step.p.any())


def test_no_residuals_left():
    case = Case(seed=17)
    case.r = np.zeros(6)
    step = case.lin().within(1.0, 0.0)
    assert step.valid and not bool(step.p.any())
    penalised = Case(seed=17, alphas=ALPHAS["some"])
    penalised.r = np.zeros(6)
    close(penalised.lin().solve(0.3).p, penalised.step(0.3))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["J", "r"])
@penalties
def test_values_that_are_not_finite_give_no_step(alphas, where, bad):
    case = Case(seed=18, alphas=alphas)
    (case.J if where == "J" else case.r)[..., 3] = bad
    lin = case.lin()
    assert not lin.finite
    for step in (lin.solve(1.0), lin.within(1.0, 0.0), lin.undamped()):
        assert not step.valid
        assert not bool(step.p.any())
    assert lin.condition() == np.inf


def dependent(dtype=torch.float64, **options):
    J = np.random.default_rng(19).standard_normal((6, sum(SIZES)))
    J[3:] = J[:3]
    return Case(seed=19, J=J, dtype=dtype, **options)


def test_dependent_rows_with_contradicting_residuals():
    case = dependent()
    close(case.lin().undamped().p, -np.linalg.pinv(case.J / case.D) @ case.r / case.D, 1e-6)


@penalties
def test_the_derivative_is_that_of_the_norm_with_its_rounding(alphas):
    """Where rounding is most of ‖q‖: without its part in the derivative Newton's method goes astray.

    In float32, where what is added for the rounding of K is far above the rounding of the arithmetic here.
    """
    lin = dependent(torch.float32, alphas=alphas).lin()
    damping = (
        0.1 * lin.least_damping / lin._rounding**0.5 + 1e-6
    )  # the solution is known there, and yet most is rounding
    if not any(alphas):
        assert lin.scaled_norm(damping)[0] > 2 * lin.solve(damping).scaled_norm
    ends = [lin.scaled_norm(damping * (1 + h))[0] for h in (-1e-3, 1e-3)]
    close(lin.scaled_norm(damping)[1], (ends[1] - ends[0]) / (2e-3 * damping), 1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("radius", [1e-4, 0.1, 1e2])
def test_few_factorisations_even_where_rounding_is_most_of_the_norm(radius, dtype, monkeypatch):
    lin, tried = dependent(dtype).lin(), []
    original = GhostLinearization.scaled_norm
    monkeypatch.setattr(
        GhostLinearization, "scaled_norm", lambda self, damping: (tried.append(damping), original(self, damping))[1]
    )
    step = lin.within(radius, 0.0)
    assert step.valid
    assert step.scaled_norm <= 1.1 * radius
    assert len(tried) <= 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(scale=np.arange(1.0, 26.0)), r"scaling: with solver='ghost' one number per .* got 1 to 5 in tensor 0"),
        (dict(scale=np.ones(7)), r"scaling: got shape \(7,\); \(25,\) or \(4,\)"),
        (dict(alphas=(1.0,)), r"alphas: got \(1.0,\); 4 numbers"),
        (dict(alphas=(1.0, -1, 0, 0)), r"alphas: got .*>= 0"),
        (dict(theta=None), "theta: got None"),
        (dict(theta=np.ones(3)), r"theta: got shape \(3,\)"),
    ],
    ids=["scale", "scale shape", "alphas", "negative", "no theta", "theta shape"],
)
def test_bad_input(change, message):
    case = Case(alphas=ALPHAS["some"])
    given = dict(scale=case.D, alphas=case.alphas, theta=case.theta) | change
    theta = None if given["theta"] is None else tensor(given["theta"])
    with pytest.raises(ValueError, match=message):
        GhostLinearization(
            case.rows(),
            tensor(case.r),
            get_backend("scipy", CPU),
            tensor(given["scale"]),
            alphas=given["alphas"],
            theta=theta,
        )


def test_bounds_are_refused():
    lin = Case().lin()
    with pytest.raises(ValueError, match=r"bounds: .*solver='ghost'"):
        lin.restricted(torch.ones(25, dtype=torch.bool), torch.zeros(25))


def test_a_jacobian_is_reduced_by_its_rows():
    case = Case(seed=20, alphas=ALPHAS["some"])

    class Linearized:
        tensors, residuals, alphas = case.rows(), tensor(case.r), case.alphas

    class Jacobian:
        theta = tensor(case.theta)

        def tensor_rows(self):
            return Linearized()

    lin = SOLVERS["ghost"].reduce(Jacobian(), get_backend("torch", CPU)).with_scale(tensor(case.D))
    close(lin.solve(0.1).p, case.step(0.1))
    assert lin.direct and not lin.accelerates
    assert SOLVERS["ghost"].room(100, 10**6) == 40 * 100**2


def at_minimum(theta, alphas):
    """Return a case whose penalised cost is least at θ: Jᵀr = −Aθ, with r = J⁺ᵀ(−Aθ) for square J."""
    n = sum(SIZES)
    case = Case(seed=21, m=n, alphas=alphas, theta=theta)
    case.r = np.linalg.solve(case.J.T, -case.A * theta)
    return case


@pytest.mark.parametrize("damping", [1e-3, 1.0, 1e6])
def test_near_the_minimum_the_reduction_is_known_to_the_rounding_of_the_cost_and_not_negative(damping):
    theta = np.random.default_rng(22).standard_normal(sum(SIZES))
    for seed in range(10):
        case = at_minimum(theta, ALPHAS["all"])
        case.r = case.r + 1e-9 * np.random.default_rng(seed).standard_normal(len(case.r))
        step = case.lin().solve(damping)
        assert step.predicted_reduction > 0
        assert abs(step.predicted_reduction - case.gain(case.step(damping))) <= 1e-12 * case.cost(np.zeros(case.n))
