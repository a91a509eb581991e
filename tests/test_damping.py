"""Damping policies: the secular equation, sequences of radius and λ, and the scale D."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from injected import BACKENDS, CUPYNUMERIC, SOLVERS, graded, injected, injected_problem, tensor

from lmfit_gpu.damping import (
    Lambda,
    MarquardtDamping,
    NielsenDamping,
    Region,
    TrustRegion,
    damping_policy,
    updated_scale,
)
from lmfit_gpu.levenberg_marquardt import LevenbergMarquardt
from lmfit_gpu.linear import Step
from lmfit_gpu.result import Status
from lmfit_gpu.user_jacobian import UserJacobian

every_solver = pytest.mark.parametrize("solver", SOLVERS)


def step_of(scaled_norm, damping=1.0, valid=True):
    return Step(torch.zeros(2, dtype=torch.float64), 1.0, scaled_norm, damping, valid)


# ---- the secular equation


LONG, SQUARE, WIDE = (20, 5), (4, 4), (3, 6)
# Every shape with every condition on the backends that are quick, each of both once on cuPyNumeric.
ON_BACKENDS = [
    *itertools.product((LONG, SQUARE, WIDE), (1.0, 1e3, 1e6, 1e10), BACKENDS[:2]),
    *(pytest.param(*pair, *CUPYNUMERIC.values, marks=CUPYNUMERIC.marks)
      for pair in ((LONG, 1e10), (LONG, 1.0), (SQUARE, 1e6), (WIDE, 1e3))),
]  # fmt: skip


@every_solver
@pytest.mark.parametrize(("shape", "condition", "backend"), ON_BACKENDS)
def test_the_step_has_the_length_of_the_radius(shape, condition, backend, solver, rng):
    """To 10 %; cg, which truncates, may end within; so may dual where ‖D p‖ is below the rounding of K."""
    J, r = graded(rng, *shape, condition), rng.standard_normal(shape[0])
    d = 10.0 ** rng.uniform(-2, 2, shape[1])
    lin = injected(J * d, r, solver, backend, d)
    longest = longest_step(lin if solver in ("qr", "cholesky") else injected(J * d, r, "qr", scale=d))
    guess = 0.0
    for share in 10.0 ** rng.uniform(-8, 0, 5):
        radius = share * longest
        step, state = TrustRegion().propose(lin, Region(radius, guess))
        q = step.p.numpy() * d
        assert step.valid
        assert step.damping >= lin.least_damping
        assert step.scaled_norm <= 1.1 * radius * (1 + 1e-9)
        assert state.radius == radius
        assert state.damping == step.damping
        assert step.scaled_norm == pytest.approx(np.linalg.norm(q), rel=1e-9)
        known = solver == "dual" and rounding_of_dual(J, r, q, step) < 1e-3 * radius**2
        if solver in ("qr", "cholesky") or (known and step.damping > lin.least_damping):
            assert step.scaled_norm >= 0.9 * radius * (1 - 1e-3)
        guess = state.damping


def longest_step(lin):
    """Return ‖D p‖ for the least λ that is solved."""
    longest, _ = lin.scaled_norm(lin.least_damping)
    return longest if np.isfinite(longest) else lin.scaled_norm(10 * lin.least_damping)[0]


def rounding_of_dual(J, r, q, step):
    """Return ε‖K‖‖u‖² of linear/dual.py, times 50; ‖u‖ = ‖r + A q‖/λ."""
    u = np.linalg.norm(r + J @ q) / step.damping
    return 50 * np.finfo(float).eps * (np.linalg.norm(J, 2) * u) ** 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(20, 5), (25, 2), (100, 3)], ids=str)
def test_more_residuals_than_parameters_do_not_lead_dual_out_of_the_region(shape, backend):
    """K is singular then, and uᵀKu is rounding where λ is tiny: of either sign."""
    outside = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        J, r = graded(rng, *shape, 10.0), rng.standard_normal(shape[0])
        lin, longest = injected(J, r, "dual", backend), np.linalg.norm(np.linalg.lstsq(J, r)[0])
        for share in (1e-3, 0.1, 0.5):
            step = lin.within(share * longest, 0.0)
            assert step.valid
            if step.scaled_norm > 1.1 * share * longest * (1 + 1e-9):
                outside.append((seed, share, step.scaled_norm / (share * longest)))
    assert not outside


@every_solver
@pytest.mark.parametrize("share", [1.0, 1.5, 1e6])
def test_the_step_is_gauss_newton_when_that_is_shorter(share, solver, rng):
    """Of dual the shortest, for fewer residuals than parameters; of cg to the share of the gradient it may leave."""
    J, r = (rng.standard_normal(shape) for shape in (((3, 20), 3) if solver == "dual" else ((20, 3), 20)))
    q = -np.linalg.lstsq(J, r)[0]
    lin = injected(J, r, solver)
    step, _ = TrustRegion().propose(lin, Region(share * np.linalg.norm(q), 123.0))
    assert step.damping == lin.least_damping
    if solver == "cg":
        g = J.T @ r
        assert np.linalg.norm(g + J.T @ J @ step.p.numpy()) <= 0.1 * np.linalg.norm(g)
    else:
        np.testing.assert_allclose(step.p.numpy(), q, rtol=1e-9, atol=1e-12)


def test_the_guess_for_damping_does_not_matter(rng):
    lin = injected(graded(rng, 20, 4, 1e4), rng.standard_normal(20))
    radius = 1e-3 * lin.scaled_norm(0.0)[0]
    for guess in (0.0, 1e-30, 1e-6, 1.0, 1e30, float("inf")):
        step, _ = TrustRegion().propose(lin, Region(radius, guess))
        assert abs(step.scaled_norm - radius) <= 0.1 * radius * (1 + 1e-9)


@pytest.mark.parametrize("factor", [1e-15, 1e18])
def test_damping_has_no_unit(factor, rng):
    J, r = rng.standard_normal((20, 3)), rng.standard_normal(20)
    d = np.linalg.norm(J, axis=0)
    one, _ = TrustRegion().propose(injected(J, r, scale=d), Region(0.01))
    other, _ = TrustRegion().propose(injected(factor * J, factor * r, scale=factor * d), Region(0.01 * factor))
    assert other.damping == pytest.approx(one.damping, rel=1e-9)
    np.testing.assert_allclose(other.p, one.p, rtol=1e-9)


# ---- the first radius


def test_first_radius_is_the_size_of_the_start(rng):
    J, r, theta = rng.standard_normal((20, 2)), rng.standard_normal(20), np.array([3.0, -4.0])
    lin = injected(J, r, scale=[2.0, 10.0])
    assert TrustRegion().start(lin, tensor(theta)).radius == pytest.approx(np.hypot(6.0, 40.0))


def test_first_radius_of_a_tiny_start_is_a_share_of_the_residual(rng):
    lin = injected(rng.standard_normal((20, 2)), rng.standard_normal(20))
    assert TrustRegion().start(lin, tensor([1e-12, 0.0])).radius == pytest.approx(1e-3 * lin.residual_norm)


def test_first_radius_of_a_start_at_zero_is_the_residual(rng):
    lin = injected(rng.standard_normal((20, 2)), rng.standard_normal(20))
    assert TrustRegion().start(lin, tensor([0.0, 0.0])).radius == lin.residual_norm


def test_first_radius_may_be_given(rng):
    lin = injected(rng.standard_normal((20, 2)), rng.standard_normal(20))
    assert TrustRegion(radius=0.5).start(lin, tensor([1.0, 1.0])).radius == 0.5


@pytest.mark.parametrize("theta", [[0.0, 0.0], [1e-9, 1e-9], [1.0, 2.0]], ids=str)
@pytest.mark.parametrize("factor", [1e-15, 1e18])
def test_first_radius_has_the_unit_of_the_residual(factor, theta, rng):
    J, r = rng.standard_normal((20, 2)), rng.standard_normal(20)
    radii = []
    for f in (1.0, factor):
        lin = injected(f * J, f * r)
        lin = lin.with_scale(updated_scale("jacobian", lin, None).d)
        radii.append(TrustRegion().start(lin, tensor(theta)).radius)
    assert radii[1] == pytest.approx(factor * radii[0], rel=1e-12)


# ---- sequences of the radius


@pytest.mark.parametrize(
    ("gain_ratio", "scaled_norm", "damping", "radius"),
    [
        (0.2, 1.0, 1.0, 0.15),  # poor: a share of the step
        (0.2, 5.0, 1.0, 0.3),  # ... or of the radius, when that is less
        (-3.0, 1.0, 1.0, 0.15),
        (0.5, 1.0, 1.0, 2.0),  # fair: as it was
        (0.9, 1.9, 1.0, 5.7),  # very good: three times the step
        (0.9, 0.1, 1.0, 2.0),  # ... never less than it was
        (0.5, 1.0, 0.0, 3.0),  # a Gauss-Newton step
    ],
)
def test_radius_after_an_accepted_step(gain_ratio, scaled_norm, damping, radius):
    state = TrustRegion().accept(Region(2.0), step_of(scaled_norm, damping), gain_ratio)
    assert state.radius == pytest.approx(radius)


def test_radius_grows_by_the_factor_given():
    assert TrustRegion(grow=2.0).accept(Region(1.0), step_of(1.0), 0.9).radius == 2.0


def test_radius_after_rejected_steps():
    policy, state = TrustRegion(), Region(2.0, 1.0)
    state = policy.reject(state, step_of(1.0))
    assert state.radius == pytest.approx(0.15)
    state = policy.reject(state, step_of(0.15))
    assert state.radius == pytest.approx(0.0225)
    state = policy.reject(state, step_of(0.0, valid=False))  # of a failed solve only the radius is known
    assert state.radius == pytest.approx(0.0225 * 0.15)


def test_states_are_not_changed():
    state = Region(2.0, 1.0)
    TrustRegion().reject(state, step_of(1.0))
    TrustRegion().accept(state, step_of(1.0), 0.9)
    assert state == Region(2.0, 1.0)
    with pytest.raises(AttributeError, match="cannot assign"):
        state.radius = 1.0


# ---- sequences of λ


@pytest.mark.parametrize("gain_ratio", [0.01, 0.25, 0.5, 0.75, 1.0, 1.5])
def test_nielsen_follows_the_gain_ratio(gain_ratio):
    state = NielsenDamping().accept(Lambda(2.0, 16.0), step_of(1.0), gain_ratio)
    assert state.damping == pytest.approx(2.0 * max(1 / 3, 1 - (2 * gain_ratio - 1) ** 3))
    assert state.factor == 2.0


def test_nielsen_raises_faster_each_time():
    policy, state, seen = NielsenDamping(), Lambda(1e-3, 2.0), []
    for _ in range(5):
        state = policy.reject(state, step_of(1.0))
        seen.append(state.damping)
    np.testing.assert_allclose(seen, 1e-3 * np.array([2.0, 8.0, 64.0, 1024.0, 32768.0]))


@pytest.mark.parametrize("policy", [NielsenDamping(start_damping=0.5), MarquardtDamping(start_damping=0.5)])
def test_first_damping_and_the_step_for_it(policy, rng):
    J, r = rng.standard_normal((20, 3)), rng.standard_normal(20)
    lin = injected(J, r)
    state = policy.start(lin, tensor([1.0, 1.0, 1.0]))
    assert state.damping == 0.5
    step, same = policy.propose(lin, state)
    assert same == state
    np.testing.assert_allclose(step.p, -np.linalg.solve(J.T @ J + 0.5 * np.eye(3), J.T @ r), rtol=1e-10)


@pytest.mark.parametrize("policy", [NielsenDamping(), MarquardtDamping()])
def test_damping_never_falls_below_what_the_solver_resolves(policy, rng):
    lin = injected(rng.standard_normal((20, 3)), rng.standard_normal(20), "cholesky")
    step, _ = policy.propose(lin, Lambda(1e-20, 2.0))
    assert step.valid
    assert step.damping == lin.least_damping


@pytest.mark.parametrize("policy", [NielsenDamping(), MarquardtDamping()])
def test_damping_stays_bounded(policy):
    low, high = Lambda(1e-3, 2.0), Lambda(1e-3, 2.0)
    for _ in range(200):
        low = policy.accept(low, step_of(1.0), 1.0)
        high = policy.reject(high, step_of(1.0))
    assert low.damping == pytest.approx(1e-20)
    assert high.damping == pytest.approx(1e20)


def test_marquardt_multiplies():
    policy = MarquardtDamping(up=4.0, down=0.5)
    state = policy.start(None, None)
    state = policy.reject(policy.reject(state, step_of(1.0)), step_of(1.0))
    assert state.damping == pytest.approx(16e-3)
    assert policy.accept(state, step_of(1.0), 0.1).damping == pytest.approx(8e-3)


def test_lema_starts_falls_and_rises_as_lema():
    policy = damping_policy("lema")
    state = policy.start(None, None)
    seen = [state.damping]
    for success in (True, True, False, False, True):
        move = policy.accept(state, step_of(1.0), 0.5) if success else policy.reject(state, step_of(1.0))
        state = move
        seen.append(state.damping)
    np.testing.assert_allclose(seen, [1e-3, 1e-4, 1e-5, 1e-4, 1e-3, 1e-4])
    assert (policy.attempts, policy.scaling) == (10, "diagonal")


def test_lema_stops_after_ten_attempts(rng, monkeypatch):
    """A Jacobian of the wrong sign, not checked: every trial goes uphill."""
    monkeypatch.setattr(UserJacobian, "check", lambda *_: None)
    problem, theta = injected_problem(rng.standard_normal((20, 2)), rng.standard_normal(20), [1.0, 2.0])
    engine = LevenbergMarquardt(jac=lambda x, t: -x, damping=damping_policy("lema"))
    result = engine.minimize(problem, theta)
    assert result.status is Status.STALLED
    assert result.n_iter == 10
    np.testing.assert_allclose([record.damping for record in result.history], 1e-3 * 10.0 ** np.arange(10))
    assert not any(record.accepted for record in result.history)
    np.testing.assert_array_equal(result.theta, theta)


def test_lema_counts_attempts_anew_after_a_success():
    """After a success the next failure is the first again."""
    problem, theta = injected_problem(np.eye(2), [3.0, 4.0], [1.0, 2.0])
    engine = LevenbergMarquardt(damping=replace(damping_policy("lema"), attempts=2))
    state = engine.init(problem, theta)
    state = engine.step(problem, replace(state, rejected=1))
    assert state.record.accepted
    assert state.rejected == 0


# ---- the scale


def test_scale_at_the_start_is_the_column_norms(rng):
    J = rng.standard_normal((20, 3)) * [1.0, 1e6, 1e-6]
    scale = updated_scale("jacobian", injected(J, np.ones(20)), None)
    np.testing.assert_allclose(scale.d, np.linalg.norm(J, axis=0), rtol=1e-12)
    assert not scale.placeholder.any()


def norms_of(columns, residual=1.0):
    """Return a linearisation whose column norms are `columns` and whose residual norm is `residual`."""
    n = len(columns)
    return injected(np.vstack([np.diag(columns), np.zeros(n)]), np.append(np.zeros(n), residual))


def scales(scaling, *points):
    """Return D at each of a sequence of (column norms, residual norm)."""
    previous, seen = None, []
    for columns, residual in points:
        previous = updated_scale(scaling, norms_of(columns, residual), previous)
        seen.append(previous.d.tolist())
    return seen, previous.placeholder.tolist()


def test_jacobian_scale_is_the_running_maximum():
    seen, placeholder = scales("jacobian", ([1.0, 5.0], 1.0), ([3.0, 2.0], 1.0), ([2.0, 9.0], 1.0))
    assert seen == [[1.0, 5.0], [3.0, 5.0], [3.0, 9.0]]
    assert placeholder == [False, False]


def test_a_zero_column_carries_the_first_residual_norm():
    seen, placeholder = scales("jacobian", ([1.0, 0.0], 7.0), ([1.0, 0.0], 3.0), ([1.0, 0.0], 90.0))
    assert seen == [[1.0, 7.0]] * 3
    assert placeholder == [False, True]


@pytest.mark.parametrize("first", [0.5, 20.0])
def test_the_first_norm_replaces_the_placeholder(first):
    seen, placeholder = scales(
        "jacobian", ([1.0, 0.0], 7.0), ([1.0, first], 3.0), ([1.0, first / 2], 3.0), ([1.0, 0.0], 3.0)
    )
    assert [d[1] for d in seen] == [7.0, first, first, first]
    assert placeholder == [False, False]


def test_placeholder_where_everything_is_zero():
    seen, placeholder = scales("jacobian", ([0.0, 0.0], 0.0))
    assert seen == [[1.0, 1.0]]
    assert placeholder == [True, True]


def test_identity_scale():
    seen, _ = scales("identity", ([3.0, 0.0], 7.0), ([5.0, 6.0], 7.0))
    assert seen == [[1.0, 1.0]] * 2


def test_diagonal_scale_is_the_current_norms():
    seen, _ = scales("diagonal", ([3.0, 0.0], 7.0), ([1.0, 2.0], 7.0), ([0.5, 0.0], 1.0))
    assert seen == [[3.0, 7.0], [1.0, 2.0], [0.5, 2.0]]


@pytest.mark.parametrize("given", [[2.0, 0.5], (2, 0.5), np.array([2.0, 0.5]), torch.tensor([2.0, 0.5])])
def test_given_scale(given):
    seen, placeholder = scales(given, ([3.0, 0.0], 7.0), ([1.0, 2.0], 7.0))
    assert seen == [[2.0, 0.5]] * 2
    assert placeholder == [False, False]


def test_scale_name_error():
    allowed = "allowed are 'jacobian', 'identity', 'diagonal' or an array"
    with pytest.raises(ValueError, match=f"scaling: got 'unit'; {allowed}"):
        updated_scale("unit", norms_of([1.0, 1.0]), None)


@pytest.mark.parametrize("given", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, np.nan], [1.0, np.inf], [[1.0, 1.0]], 1.0])
def test_given_scale_error(given):
    with pytest.raises(ValueError, match="scaling: an array must hold 2 positive numbers"):
        updated_scale(given, norms_of([1.0, 1.0]), None)


# ---- names


def test_policy_names():
    assert damping_policy("trust-region") == TrustRegion()
    assert damping_policy("nielsen") == NielsenDamping()
    assert damping_policy("marquardt") == MarquardtDamping()
    assert damping_policy("marquardt").attempts is None


def test_a_policy_is_itself():
    policy = TrustRegion(grow=2.0)
    assert damping_policy(policy) is policy


def test_policy_name_error():
    allowed = "'trust-region', 'nielsen', 'marquardt', 'lema', 'proximal' or a policy object"
    with pytest.raises(ValueError, match=f"damping: got 'dogleg'; allowed are {allowed}"):
        damping_policy("dogleg")


@pytest.mark.parametrize("given", [None, 1.0, object()])
def test_policy_type_error(given):
    with pytest.raises(TypeError, match="a name or an object with start, propose, accept and reject"):
        damping_policy(given)
