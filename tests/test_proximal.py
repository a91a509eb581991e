"""ProximalDamping: closed forms of implicit Euler on linear problems, and the sequence of h."""

import numpy as np
import pytest
import torch
from injected import BACKENDS, SOLVERS, injected

from lmfit_gpu import LMRegressor, ProximalDamping
from lmfit_gpu.damping import Lambda, damping_policy
from lmfit_gpu.linear import Step

STEP = Step(torch.zeros(1), 1.0, 1.0, 1.0)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_of_a_linear_problem_is_the_proximal_point(solver, backend, rng):
    # argmin ½‖J(θ + p) − y‖² + ‖p‖²/2h, by lstsq on the stacked equations [J; I/√h] p = [−r; 0]
    h, J, r = 0.3, rng.standard_normal((12, 4)), rng.standard_normal(12)
    policy = ProximalDamping(step_size=h)
    lin = injected(J, r, solver, backend)
    step, _ = policy.propose(lin, policy.start(lin, torch.zeros(4, dtype=torch.float64)))
    stacked = np.vstack([J, np.eye(4) / h**0.5])
    expected = np.linalg.lstsq(stacked, np.concatenate([-r, np.zeros(4)]), rcond=None)[0]
    np.testing.assert_allclose(step.p.numpy(), expected, rtol=1e-6 if solver == "cg" else 1e-9)


def test_small_steps_follow_the_gradient_flow_of_a_linear_problem():
    # cost ½ Σ_j s_j² θ_j²: θ_j(t) = θ_j(0) exp(−s_j² t); implicit Euler is (1 + h s²)^−k, of first order in h
    s, theta, h, k = np.array([0.5, 1.0, 3.0]), np.array([1.0, -2.0, 0.7]), 1e-3, 200
    policy = ProximalDamping(step_size=h, grow=2.0)
    state, start = None, theta.copy()
    for _ in range(k):
        lin = injected(np.diag(s), s * theta, "qr")
        state = policy.start(lin, torch.from_numpy(theta)) if state is None else state
        step, _ = policy.propose(lin, state)
        theta = theta + step.p.numpy()
    np.testing.assert_allclose(theta, start * (1 + h * s**2) ** -k, rtol=1e-10)
    np.testing.assert_allclose(theta, start * np.exp(-(s**2) * h * k), rtol=s.max() ** 4 * h**2 * k)


@pytest.mark.parametrize(
    ("gain_ratio", "factor"), [(1.1, 1 / 4), (0.76, 1 / 4), (0.74, 1.0), (0.26, 1.0), (0.24, 2.0), (1e-3, 2.0)]
)
def test_the_step_follows_the_gain_ratio(gain_ratio, factor):
    policy = ProximalDamping(grow=4.0, shrink=0.5)
    assert policy.accept(Lambda(8.0, 2.0), STEP, gain_ratio).damping == pytest.approx(8.0 * factor)


def test_a_rejection_shortens_the_step():
    assert ProximalDamping(shrink=0.25).reject(Lambda(8.0, 4.0), STEP).damping == pytest.approx(32.0)


def test_a_fit_by_name():
    x = np.linspace(0, 3, 40)
    y = 1.7 * np.exp(-0.9 * x)
    estimator = LMRegressor(lambda x, a, b: a * np.exp(-b * x), p0=[1.0, 0.2], damping="proximal").fit(x[:, None], y)
    assert damping_policy("proximal") == ProximalDamping()
    assert estimator.result_.success
    np.testing.assert_allclose(estimator.theta_, [1.7, 0.9], rtol=1e-7)


@pytest.mark.parametrize("bad", [{"step_size": 0.0}, {"grow": 1.0}, {"shrink": 1.0}, {"shrink": 0.0}], ids=str)
def test_bad_numbers_are_refused(bad):
    with pytest.raises(ValueError, match="step_size > 0, grow > 1 and 0 < shrink < 1"):
        ProximalDamping(**bad)
