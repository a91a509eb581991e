"""MLBFGS without averages is deterministic L-BFGS; with noise H stays bounded where plain L-BFGS diverges."""

import numpy as np
import pytest
import torch

from lmfit_gpu import MLBFGS

DETERMINISTIC = {
    "lr": 1.0,
    "beta": 0.0,
    "momentum": 0.0,
    "update_every": 1,
    "tau": 1.0,
    "curvature_window": (1e-9, 1e9),
    "eigenvalue_bounds": (1e-12, 1e12),
    "initial_inverse": "pair",
    "blocks": "model",
}


def quadratic(rng, n):
    """Return A, symmetric positive definite with a condition of 40, and b."""
    q, _ = np.linalg.qr(rng.normal(size=(n, n)))
    return (q * np.geomspace(40**-0.5, 40**0.5, n)) @ q.T, rng.normal(size=n)


def two_loop(gradient, history):
    """Return the direction of algorithm 7.4 of Nocedal and Wright (2006), with γ of 7.20."""
    q, weights = gradient.copy(), []
    for s, y in reversed(history):
        weights.append((s @ q) / (y @ s))
        q -= weights[-1] * y
    if history:
        s, y = history[-1]
        q *= (s @ y) / (y @ y)
    for (s, y), weight in zip(history, reversed(weights), strict=True):
        q += (weight - (y @ q) / (y @ s)) * s
    return q


def parameters(values):
    """Return two tensors that hold the values, for blocks of more than one tensor."""
    return [torch.nn.Parameter(torch.tensor(part)) for part in (values[:3], values[3:].reshape(1, -1))]


def values_of(tensors):
    return np.concatenate([tensor.detach().numpy().ravel() for tensor in tensors])


def set_gradient(tensors, gradient):
    for tensor, part in zip(tensors, np.split(gradient, [tensors[0].numel()]), strict=True):
        tensor.grad = torch.tensor(part).view_as(tensor)


def test_the_direction_is_that_of_the_two_loop_recursion(rng):
    """β = 0, T = 1, τ₀ = 1, one block: to 1e-10, over 40 steps, the memory of 6 pairs filled and turned over."""
    matrix, b = quadratic(rng, 12)
    tensors = parameters(np.zeros(12))
    optimizer = MLBFGS(tensors, history_size=6, **DETERMINISTIC)
    history, before = [], None
    for _ in range(40):
        theta = values_of(tensors)
        gradient = matrix @ theta - b
        if before is not None:
            history = [*history, (theta - before[0], gradient - before[1])][-6:]
        before = theta, gradient
        expected = two_loop(gradient, history)
        set_gradient(tensors, gradient)
        optimizer.step()
        found = theta - values_of(tensors)
        rounding = 4e-16 * np.linalg.norm(theta)  # of the difference that the step is seen in
        assert np.linalg.norm(found - expected) <= 1e-10 * np.linalg.norm(expected) + rounding
    assert len(history) == 6


@pytest.mark.parametrize("n", [5, 12, 20])
def test_exact_line_search_ends_a_quadratic_in_n_plus_2_steps(rng, n):
    matrix, b = quadratic(rng, n)
    tensors = parameters(np.zeros(n))
    optimizer = MLBFGS(tensors, history_size=n, **DETERMINISTIC)
    for _ in range(n + 2):
        theta = values_of(tensors)
        gradient = matrix @ theta - b
        set_gradient(tensors, gradient)
        optimizer.step()
        direction = values_of(tensors) - theta
        length = -(gradient @ direction) / (direction @ matrix @ direction)
        for tensor, part in zip(tensors, np.split(theta + length * direction, [3]), strict=True):
            tensor.data = torch.tensor(part).view_as(tensor)
    assert np.linalg.norm(matrix @ values_of(tensors) - b) <= 1e-9 * np.linalg.norm(b)


@pytest.mark.parametrize("n", [12, 20])
def test_full_steps_end_a_quadratic_in_3_n(rng, n):
    matrix, b = quadratic(rng, n)
    tensors = parameters(np.zeros(n))
    optimizer = MLBFGS(tensors, history_size=n, **DETERMINISTIC)
    for _ in range(3 * n):
        set_gradient(tensors, matrix @ values_of(tensors) - b)
        optimizer.step()
    assert np.linalg.norm(matrix @ values_of(tensors) - b) <= 1e-6 * np.linalg.norm(b)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_averages_keep_the_secant_equation_of_a_quadratic(rng, beta):
    """y = A s whatever β, T and the steps were: here one pair, undamped, of a Hessian that is c times the identity."""
    tensors = parameters(rng.normal(size=12))
    options = {**DETERMINISTIC, "beta": beta, "lr": 0.03, "update_every": 4}
    optimizer = MLBFGS(tensors, **options)
    for _ in range(6):
        set_gradient(tensors, 3.0 * values_of(tensors))
        optimizer.step()
    (block,) = optimizer.inverse_hessians()
    assert block["n_pairs"] == 1
    assert block["curvature"] == pytest.approx(3.0, rel=1e-12)
    assert block["eigenvalues"] == pytest.approx((1 / 3, 1 / 3), rel=1e-12)


def noisy_steps(optimizer, tensors, matrix, noise, n_steps):
    """Train on gradients with noise; yield after every step."""
    generator = np.random.default_rng(11)
    for _ in range(n_steps):
        theta = values_of(tensors)
        if not np.isfinite(theta).all():
            return
        set_gradient(tensors, matrix @ theta + noise * generator.normal(size=len(theta)))
        optimizer.step()
        yield


@pytest.mark.parametrize(
    "options",
    [
        {"tau": 0.9},
        {"tau": 1.0, "initial_inverse": "pair"},
        {"tau": 0.9, "relative_window": True},
        {"damping": "powell", "eigenvalue_bounds": (0.05, 50.0)},
    ],
    ids=["fixed", "pair", "relative", "powell"],
)
def test_h_stays_positive_definite_and_bounded_over_noisy_updates(rng, options):
    """10,000 pairs in all of indefinite, noisy curvature: ⟨s,ŷ⟩/⟨s,s⟩ in [σ_L, σ_H] κ, eigenvalues within bounds."""
    low, high = 0.05, 4.0
    chosen = {"damping": "window", "curvature_window": (low, high), "blocks": "tensor", **options}
    steps = {"lr": 1e-2, "beta": 0.5, "momentum": 0.0, "update_every": 1, "history_size": 5}
    matrix = np.diag(np.linspace(-1.0, 8.0, 9))
    tensors = parameters(rng.normal(size=9))
    optimizer = MLBFGS(tensors, **steps, **chosen)
    n_pairs = 0
    for _ in noisy_steps(optimizer, tensors, matrix, 0.2, 1251):
        for block in optimizer.inverse_hessians():
            if block["tau"] is None:
                continue
            n_pairs += 1
            scale = block["scale"] or 1.0
            least, most = chosen.get("eigenvalue_bounds", (0.5 / (scale * high), 2 / (scale * low)))
            if chosen["damping"] == "window" and "initial_inverse" not in chosen:
                least, most = min(least, 1.0), max(most, 1.0)  # a fixed H₀ is always within
            assert least * (1 - 1e-6) <= block["eigenvalues"][0] <= block["eigenvalues"][1] <= most * (1 + 1e-6)
            if chosen["damping"] == "window":
                damped = block["tau"] * block["curvature"] + (1 - block["tau"]) * scale
                assert low * scale * (1 - 1e-9) <= damped <= high * scale * (1 + 1e-9)
    assert n_pairs >= 1000  # of 2,500; the others are left out


def test_plain_stochastic_lbfgs_diverges_where_this_one_does_not(rng):
    """The same noise, the same first point, the same learning rate; both with a fixed H₀ of 1."""
    matrix = np.diag(np.geomspace(0.01, 1.0, 20))
    start = rng.normal(size=20)
    worst, last = {}, {}
    for name, options in {
        "plain": {"beta": 0.0, "update_every": 1, "damping": None, "initial_inverse": "fixed"},
        "momentum": {"update_every": 20, "curvature_window": (0.1, 10.0), "tau": 1.0},
    }.items():
        tensors = parameters(start)
        optimizer = MLBFGS(tensors, lr=0.1, momentum=0.0, blocks="model", **options)
        worst[name] = 0.0
        for _ in noisy_steps(optimizer, tensors, matrix, 0.1, 500):
            theta = values_of(tensors)
            last[name] = theta @ matrix @ theta
            worst[name] = max(worst[name], last[name])
    first = start @ matrix @ start
    assert worst["plain"] > 1e3 * first
    assert worst["momentum"] <= first
    assert last["momentum"] <= 0.02 * first
