"""The inverse Hessian of curvature pairs: compact form, two-loop recursion, and the BFGS formula as a dense matrix."""

import numpy as np
import pytest
import torch

from lmfit_gpu.optim.curvature_pairs import CurvaturePairs
from lmfit_gpu.optim.pair_damping import PairProducts, damped_pair

N = 12
WINDOW = {"damping": "window", "curvature_window": (0.05, 3.0), "tau": 0.9}


def append(pairs, s, y, options=WINDOW):
    products = pairs.products(s, y).numpy()
    scalars = PairProducts(*map(float, (products[-2, 0], products[-2, 1], products[-1, 1])))
    pair = damped_pair(scalars, options, 1.0)
    pairs.append(s, y, pairs.foreseen(pair, products))
    return pair.tau * y + pair.shift * s, pair.gamma


def bfgs(history, gamma):
    """Return H = (I − ρ s ŷᵀ) H (I − ρ ŷ sᵀ) + ρ s sᵀ, pair after pair (Nocedal and Wright, 6.17)."""
    inverse = gamma * np.eye(N)
    for s, y in history:
        s, y = s.double().numpy(), y.double().numpy()
        rho = 1 / (s @ y)
        left = np.eye(N) - rho * np.outer(s, y)
        inverse = left @ inverse @ left.T + rho * np.outer(s, s)
    return inverse


def noisy(rng, n_pairs, dtype=torch.float64):
    """Return steps of different lengths and noisy changes of the gradient, some of negative curvature."""
    hessian = np.diag(np.linspace(-0.2, 5.0, N))
    steps = rng.normal(size=(n_pairs, N)) * 10.0 ** rng.integers(-4, 4, size=(n_pairs, 1))
    changes = steps @ hessian + 0.5 * np.linalg.norm(steps, axis=1, keepdims=True) * rng.normal(size=(n_pairs, N))
    return [(torch.tensor(s, dtype=dtype), torch.tensor(y, dtype=dtype)) for s, y in zip(steps, changes, strict=True)]


def matrix(pairs, how):
    dtype = pairs._like.dtype
    return torch.stack([how(e.clone()) for e in torch.eye(N, dtype=dtype)]).double().numpy()


@pytest.mark.parametrize("n_pairs", [1, 3, 5, 6, 13])
@pytest.mark.parametrize(("dtype", "accuracy"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_compact_and_two_loop_are_the_bfgs_formula(rng, n_pairs, dtype, accuracy):
    pairs, history = CurvaturePairs(N, 5, torch.zeros(1, dtype=dtype), 1.0), []
    for s, y in noisy(rng, n_pairs, dtype):
        damped, gamma = append(pairs, s, y)
        history = [*history, (s, damped)][-5:]
    expected = bfgs(history, gamma)
    assert pairs._core is not None  # the compact form is what is compared
    for how in (pairs.apply_, pairs.two_loop_):
        found = matrix(pairs, how)
        assert np.linalg.norm(found - expected) <= accuracy * np.linalg.norm(expected)
    values = np.linalg.eigvalsh(expected)
    assert pairs.eigenvalues == pytest.approx((values[0], values[-1]), rel=1e3 * accuracy)


def test_running_sums_are_those_of_products_one_by_one(rng):
    pairs = CurvaturePairs(N, 4, torch.zeros(1, dtype=torch.float64), 0.7)
    total, gradient = (torch.tensor(rng.normal(size=N)) for _ in range(2))
    expected = 0.9 * total + 0.7 * gradient
    assert torch.allclose(pairs.add_applied_(total.clone(), 0.9, gradient.clone()), expected, rtol=1e-14)
    for s, y in noisy(rng, 6):
        append(pairs, s, y)
    expected = 0.9 * total + pairs.two_loop_(gradient.clone())
    assert torch.allclose(pairs.add_applied_(total.clone(), 0.9, gradient.clone()), expected, rtol=1e-11)


def test_pairs_that_rounding_would_spoil_go_by_two_loop(rng):
    """Nearly orthogonal s and y in float32: the compact form is refused, and H g is still that of the formula."""
    pairs, history = CurvaturePairs(N, 6, torch.zeros(1), 1.0), []
    for _ in range(6):
        s = torch.tensor(rng.normal(size=N), dtype=torch.float32)
        y = 3000 * torch.tensor(rng.normal(size=N), dtype=torch.float32)
        y = y - (y @ s) / (s @ s) * s + s
        damped, gamma = append(pairs, s, y, {**WINDOW, "curvature_window": (1e-4, 1e4), "tau": 1.0})
        history.append((s, damped))
    assert pairs._core is None
    vector = torch.ones(N)
    assert torch.equal(pairs.apply_(vector.clone()), pairs.two_loop_(vector.clone()))
    expected = bfgs(history, gamma)
    found = matrix(pairs, pairs.apply_)
    assert np.linalg.norm(found - expected) <= 1e-2 * np.linalg.norm(expected)


def test_dropped_pairs_leave_the_formula_of_the_others(rng):
    pairs, history = CurvaturePairs(N, 5, torch.zeros(1, dtype=torch.float64), 1.0), []
    for s, y in noisy(rng, 5):
        damped, gamma = append(pairs, s, y)
        history.append((s, damped))
    pairs.drop_oldest()
    pairs.drop_oldest()
    assert np.allclose(matrix(pairs, pairs.apply_), bfgs(history[2:], gamma), rtol=1e-11, atol=1e-13)
    s, y = noisy(rng, 1)[0]
    damped, gamma = append(pairs, s, y)  # takes a slot that is free again
    assert np.allclose(matrix(pairs, pairs.apply_), bfgs([*history[2:], (s, damped)], gamma), rtol=1e-11, atol=1e-13)


def test_the_secant_equation_holds_for_the_newest_pair(rng):
    pairs = CurvaturePairs(N, 5, torch.zeros(1, dtype=torch.float64), 1.0)
    for s, y in noisy(rng, 8):
        damped, _ = append(pairs, s, y)
    assert torch.allclose(pairs.apply_(damped.clone()), s, rtol=1e-10, atol=1e-12 * float(s.norm()))


def test_without_pairs_it_is_gamma_times_the_identity():
    pairs = CurvaturePairs(N, 5, torch.zeros(1, dtype=torch.float64), 0.25)
    assert torch.equal(pairs.apply_(torch.ones(N, dtype=torch.float64)), torch.full((N,), 0.25, dtype=torch.float64))
    assert pairs.storage is None  # no memory before the first pair


def test_scaling_a_pair_does_not_change_it(rng):
    made = []
    for factor in (1.0, 1e-30):  # squares of 1e-30 are no trouble in float64 sums
        pairs = CurvaturePairs(N, 3, torch.zeros(1, dtype=torch.float64), 1.0)
        for s, y in noisy(np.random.default_rng(5), 3):
            append(pairs, factor * s, factor * y)
        made.append(matrix(pairs, pairs.apply_))
    assert np.allclose(made[1], made[0], rtol=1e-12, atol=1e-14)


def test_eigenvalues_of_a_pair_to_come_are_those_it_brings(rng):
    """With room in the memory, and when the oldest pair leaves."""
    pairs = CurvaturePairs(N, 3, torch.zeros(1, dtype=torch.float64), 1.0)
    for s, y in noisy(rng, 7):
        products = pairs.products(s, y).numpy()
        scalars = PairProducts(*map(float, (products[-2, 0], products[-2, 1], products[-1, 1])))
        pair = damped_pair(scalars, WINDOW, 1.0)
        prospect = pairs.foreseen(pair, products)
        pairs.append(s, y, prospect)
        values = np.linalg.eigvalsh(matrix(pairs, pairs.two_loop_))
        assert prospect.eigenvalues == pytest.approx((values[0], values[-1]), rel=1e-9)
