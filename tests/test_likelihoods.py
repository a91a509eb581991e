"""Likelihoods against torch's losses, their derivatives by autograd, and fits by other programs."""

import mpmath
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases_interface import T5_X, T5_Y
from sklearn.linear_model import LogisticRegression

from lmfit_gpu.likelihoods import FLOOR, LIKELIHOODS, repaired_rows, resolve_likelihood

SOFTMAX, BINARY, POISSON = (LIKELIHOODS[name] for name in ("softmax", "binary", "poisson"))
NAMES = ["softmax", "binary", "poisson"]
T5_MAXIMUM = [-0.384473856076165, 0.26228019176793843]  # of the Poisson likelihood, from the cases file


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def from_torch(name, f, y):
    """torch's own loss of each row, as a function that autograd can differentiate twice."""
    if name == "softmax":
        return F.cross_entropy(f, y, reduction="none")
    if name == "binary":
        return F.binary_cross_entropy_with_logits(f, y, reduction="none").sum(1)
    return F.poisson_nll_loss(f, y, log_input=True, reduction="none").sum(1) + torch.lgamma(y + 1).sum(1)


def examples(seed, rows=40, q=5, size=2.0):
    """Yield name, outputs and targets: classes, probabilities with zeros among them, coins, counts."""
    rng = torch.Generator().manual_seed(seed)
    f = size * torch.randn(rows, q, generator=rng, dtype=torch.float64)
    y = torch.rand(rows, q, generator=rng, dtype=torch.float64)
    y[::3, 1] = 0
    yield "softmax", f, torch.randint(q, (rows,), generator=rng)
    yield "softmax", f, y / y.sum(1, keepdim=True)
    yield "softmax", f[:, :2], torch.randint(2, (rows,), generator=rng)
    yield "binary", f, torch.randint(2, (rows, q), generator=rng).double()
    yield "binary", f, y
    yield "poisson", f, torch.poisson(4 * y, generator=rng)


def derivatives(name, f, y):
    """Return ℓ′ (rows, q) and ℓ″ (rows, q, q) by torch.func."""

    def value(row, target):
        return from_torch(name, row[None], target[None])[0]

    slope = torch.func.grad(value)
    return torch.func.vmap(slope)(f, y), torch.func.vmap(torch.func.jacrev(slope))(f, y)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_value_is_that_of_torch(seed):
    for name, f, y in examples(seed):
        LIKELIHOODS[name].checked(f, y)
        torch.testing.assert_close(LIKELIHOODS[name].value(f, y), from_torch(name, f, y), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_surrogate_has_the_gradient_and_the_hessian(seed):
    for name, f, y in examples(seed):
        r, S = LIKELIHOODS[name].surrogate(f, y)
        gradient, hessian = derivatives(name, f, y)
        torch.testing.assert_close(torch.einsum("rkq,rk->rq", S, r), gradient, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(S.mT @ S, hessian, rtol=1e-12, atol=1e-14)


def test_softmax_needs_one_residual_fewer_than_classes():
    for name, f, y in examples(2):
        k = f.shape[1] - (name == "softmax")
        r, S = LIKELIHOODS[name].surrogate(f, y)
        assert (r.shape, S.shape) == ((len(f), k), (len(f), k, f.shape[1]))
        assert r.dtype == S.dtype == torch.float64


EXTREME = [
    [1e3, -1e3, 0.0],
    [-1e3, 1e3, 0.0],
    [1e3, 1e3, -1e3],
    [0.0, 0.0, 0.0],
    [1e3, 1e3, 1e3],
    [-1e3, -1e3, -1e3],
    [40.0, 0.0, -40.0],
    [-300.0, -310.0, 0.0],
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("label", [0, 1, 2])
def test_softmax_at_extreme_logits(dtype, label):
    """The gradient is exact in all rows, the curvature above the floor; 60 digits say what is right."""
    f, y = tensor(EXTREME, dtype), torch.full((len(EXTREME),), label)
    r, S = SOFTMAX.surrogate(f, y)
    assert bool(torch.isfinite(r).all() and torch.isfinite(S).all())
    assert float(r.abs().max()) <= 1.01 * FLOOR**-0.5
    value = SOFTMAX.value(f, y)
    for i, row in enumerate(EXTREME):
        with mpmath.workdps(900):
            e = [mpmath.exp(v) for v in row]
            p = [v / sum(e) for v in e]
            exact_value = -mpmath.log(p[label])
            slope = np.array([float(p[k] - (k == label)) for k in range(3)])
            hessian = np.array([[float(p[k] * ((k == m) - p[m])) for m in range(3)] for k in range(3)])
            floored = p[label] < FLOOR
        assert float(value[i]) == pytest.approx(float(exact_value), rel=1e-13, abs=1e-300)
        found = (S[i].T @ r[i]).numpy()
        np.testing.assert_allclose(found, slope, rtol=1e-12, atol=1e-15 * np.abs(slope).max())
        tolerance = 2.1 * FLOOR if floored else 1e-15 * np.abs(hessian).max()
        np.testing.assert_allclose((S[i].T @ S[i]).numpy(), hessian, rtol=0 if floored else 1e-12, atol=tolerance)


@pytest.mark.parametrize("target", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_coin_at_extreme_logits(dtype, target):
    logits = [-1e3, -700.0, -40.0, -15.0, -1.0, 0.0, 1.0, 15.0, 40.0, 700.0, 1e3]
    f = tensor(logits, dtype)[:, None]
    y = torch.full_like(f, target)
    r, S = BINARY.surrogate(f, y)
    assert bool(torch.isfinite(r).all() and torch.isfinite(S).all())
    assert float(r.abs().max()) <= 1.01 * FLOOR**-0.5
    t = float(y[0, 0])  # 0.3 in float32 is another number
    with mpmath.workdps(900):
        p = [1 / (1 + mpmath.exp(-v)) for v in logits]
        value = [float(-t * mpmath.log(v) - (1 - t) * mpmath.log(1 - v)) for v in p]
        slope = [float(v - t) for v in p]
        curvature = np.array([float(v * (1 - v)) for v in p])
    np.testing.assert_allclose(BINARY.value(f, y), value, rtol=1e-13, atol=0)
    np.testing.assert_allclose((S[:, 0, 0] * r[:, 0]).numpy(), slope, rtol=1e-12, atol=0)
    expected = np.maximum(curvature, FLOOR * np.abs(slope))
    np.testing.assert_allclose(S[:, 0, 0].numpy() ** 2, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("count", [0.0, 1.0, 30.0])
def test_a_count_at_extreme_logits(count):
    f = tensor([-1e4, -1e3, -700.0, -50.0, 0.0, 50.0, 700.0])[:, None]
    y = torch.full_like(f, count)
    r, S = POISSON.surrogate(f, y)
    slope = f.exp() - count
    torch.testing.assert_close(S[:, 0] * r, slope, rtol=1e-12, atol=1e-320)
    torch.testing.assert_close(S[:, 0] ** 2, f.exp().clamp_min(FLOOR * count), rtol=1e-12, atol=1e-320)
    beyond = tensor([[1000.0]])  # exp f overflows: a rejected trial, but no NaN
    assert float(POISSON.value(beyond, tensor([[count]]))) == np.inf
    assert bool(torch.isfinite(POISSON.surrogate(beyond, tensor([[count]]))[0]).all())


def test_float32_outputs_are_judged_in_float64():
    for name, f, y in examples(3):
        f, y = f.float(), y.float() if y.is_floating_point() else y
        y64 = y.double() if y.is_floating_point() else y
        for got, expected in zip(
            LIKELIHOODS[name].surrogate(f, y), LIKELIHOODS[name].surrogate(f.double(), y64), strict=True
        ):
            assert got.dtype == torch.float64
            torch.testing.assert_close(got, expected, rtol=1e-15, atol=0)


def test_probabilities_of_one_class_are_that_class():
    _, f, y = next(examples(4))
    for got, expected in zip(SOFTMAX.surrogate(f, F.one_hot(y, 5)), SOFTMAX.surrogate(f, y), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    torch.testing.assert_close(SOFTMAX.value(f, y.double()), SOFTMAX.value(f, y), rtol=0, atol=0)


def test_no_gradient_is_tracked():
    for name, f, y in examples(5):
        f = f.clone().requires_grad_()
        assert not LIKELIHOODS[name].value(f, y).requires_grad
        assert not any(part.requires_grad for part in LIKELIHOODS[name].surrogate(f, y))


WRONG = {
    "class too large": ("softmax", (4, 3), [0, 1, 2, 3], r"y: got 3 in row 3; 'softmax' allows class numbers 0 to 2"),
    "class below 0": ("softmax", (2, 3), [0, -1], r"y: got -1 in row 1"),
    "half a class": ("softmax", (2, 3), [0.0, 0.5], r"y: got 0.5 in row 1"),
    "not a class": ("softmax", (2, 3), [0.0, float("nan")], r"y: got nan in row 1"),
    "probabilities above 1": ("softmax", (1, 2), [[1.5, -0.5]], r"y: got 1.5 in row 0"),
    "probabilities that miss 1": ("softmax", (2, 2), [[0.5, 0.5], [0.5, 0.4]], r"row 1 sum to 0.9; 1 is expected"),
    "classes of other rows": ("softmax", (3, 2), [0, 1], r"y: got shape \(2,\).*\(3,\).*\(3, 2\)"),
    "probabilities of other classes": ("softmax", (1, 3), [[0.5, 0.5]], r"y: got shape \(1, 2\)"),
    "one class": ("softmax", (2, 1), [0, 0], "gives 1 output a row"),
    "outputs without rows": ("softmax", (3,), [0, 1, 2], r"model: its outputs have shape \(3,\)"),
    "no rows": ("softmax", (0, 3), [], r"model: its outputs have shape \(0, 3\)"),
    "coin of 2": ("binary", (2, 1), [0, 2], r"y: got 2 in row 1; 'binary' allows 0, 1 and probabilities between"),
    "coin of -0.1": ("binary", (1, 2), [[0.5, -0.1]], r"y: got -0.1 in row 0"),
    "coins flat": ("binary", (4, 2), [0, 1, 0, 1], r"y: got shape \(4,\).*allows \(4, 2\)$"),
    "coins of other rows": ("binary", (3, 1), [0, 1], r"allows \(3, 1\) or \(3,\)"),
    "negative count": ("poisson", (3, 1), [0, 4, -1], r"y: got -1 in row 2; 'poisson' allows counts >= 0"),
    "infinite count": ("poisson", (2, 1), [0, float("inf")], r"y: got inf in row 1"),
    "complex count": ("poisson", (1, 1), [1 + 2j], r"y: got dtype torch.complex64"),
}


@pytest.mark.parametrize(("name", "shape", "y", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_targets_are_named(name, shape, y, message):
    with pytest.raises(ValueError, match=message):
        LIKELIHOODS[name].checked(torch.zeros(shape), torch.tensor(y))


def test_outputs_must_be_real():
    for outputs in (torch.zeros(2, 3, dtype=torch.complex64), torch.zeros(2, 3, dtype=torch.int64)):
        with pytest.raises(
            ValueError, match=r"model: its outputs have shape \(2, 3\) and dtype torch\.(complex|int)64"
        ):
            SOFTMAX.checked(outputs, torch.tensor([0, 1]))


def test_names_and_objects_are_resolved():
    assert resolve_likelihood("gaussian") is None
    assert [resolve_likelihood(name).name for name in NAMES] == NAMES
    assert resolve_likelihood(POISSON) is POISSON
    with pytest.raises(
        ValueError, match=r"likelihood: got 'cauchy'; allowed are 'gaussian', 'softmax', 'binary', 'poi"
    ):
        resolve_likelihood("cauchy")
    with pytest.raises(TypeError, match="likelihood: got 3, which lacks name, checked, value, surrogate"):
        resolve_likelihood(3)
    with pytest.raises(TypeError, match="a class where an instance is expected"):
        resolve_likelihood(type(POISSON))


# ---- fits: undamped generalised Gauss-Newton steps of linear models f = X Θ


def fitted(likelihood, X, y, q, steps=60):
    """Return Θ (n_features, q) where the gradient vanishes; a step that does not lower the cost is halved."""
    theta = torch.zeros(X.shape[1], q, dtype=torch.float64)
    cost = float(likelihood.value(X @ theta, y).sum())
    for _ in range(steps):
        r, S = likelihood.surrogate(X @ theta, y)
        J = torch.einsum("rkq,rn->rknq", S, X).reshape(r.numel(), -1)
        step = -torch.linalg.pinv(J, rcond=1e-8) @ r.reshape(-1)
        while (trial := float(likelihood.value(X @ (theta + step.reshape(theta.shape)), y).sum())) > cost:
            step = step / 2
            if float(step.norm()) < 1e-13:
                return theta
        theta, cost = theta + step.reshape(theta.shape), trial
    return theta


def clouds(q, rows=120):
    """Overlapping clouds of points, a column of ones first, and their classes."""
    rng = np.random.default_rng(0)
    classes = rng.integers(q, size=rows)
    points = rng.normal(size=(rows, 2)) + 1.2 * np.stack((np.cos(2.1 * classes), np.sin(2.1 * classes)), 1)
    return np.column_stack((np.ones(rows), points)), classes


def newton_softmax(X, classes, q, steps=30):
    """Newton's method for the differences from the last class, with the textbook gradient and Hessian."""
    B, hot = np.zeros((X.shape[1], q - 1)), np.eye(q)[classes][:, : q - 1]
    for _ in range(steps):
        e = np.exp(X @ B)
        p = e / (1 + e.sum(1, keepdims=True))
        gradient = (X.T @ (p - hot)).ravel()
        W = np.einsum("rk,km->rkm", p, np.eye(q - 1)) - np.einsum("rk,rm->rkm", p, p)
        H = np.einsum("ri,rkm,rj->ikjm", X, W, X).reshape(gradient.size, -1)
        B = B - np.linalg.solve(H, gradient).reshape(B.shape)
    return B


def test_softmax_regression_is_the_maximum_of_the_likelihood():
    X, classes = clouds(3)
    theta = fitted(SOFTMAX, torch.from_numpy(X), torch.from_numpy(classes), 3).numpy()
    np.testing.assert_allclose(theta[:, :2] - theta[:, 2:], newton_softmax(X, classes, 3), rtol=1e-8, atol=1e-9)


def test_logistic_regression_is_that_of_scikit_learn():
    X, classes = clouds(2)
    theta = fitted(BINARY, torch.from_numpy(X), torch.from_numpy(classes), 1)[:, 0].numpy()
    theirs = LogisticRegression(C=np.inf, solver="newton-cholesky", tol=1e-10).fit(X[:, 1:], classes)
    np.testing.assert_allclose(theta, [*theirs.intercept_, *theirs.coef_[0]], rtol=1e-7)


def test_poisson_regression_is_that_of_the_cases_file():
    X = torch.from_numpy(np.column_stack((np.ones(len(T5_X)), T5_X)))
    theta = fitted(POISSON, X, torch.as_tensor(T5_Y), 1)[:, 0]
    np.testing.assert_allclose(theta.numpy(), T5_MAXIMUM, rtol=1e-9)


def test_a_fit_starts_from_logits_that_are_all_wrong():
    """At p_y = e⁻²⁰⁰⁰ a damped step is finite and downhill, where S without its floor would be zero."""
    f, y = tensor([[1e3, -1e3, 0.0]]), torch.tensor([1])
    r, S = SOFTMAX.surrogate(f, y)
    step = -torch.linalg.solve(S[0].T @ S[0] + 1e-3 * torch.eye(3, dtype=torch.float64), S[0].T @ r[0])
    assert float(SOFTMAX.value(f + step, y)) < float(SOFTMAX.value(f, y))


# ---- the square root of a cross-entropy


def test_the_slope_of_a_root_of_a_cross_entropy_at_zero_is_repaired():
    """float32, as in LeMA's MNIST script: p_y rounds to 1 in row 0, ℓ to 0, and autograd gives what is not finite."""
    f = tensor([[30.0, 0.0, 0.0], [1.0, 0.0, 0.5]], torch.float32).requires_grad_()
    r = F.cross_entropy(f, torch.tensor([0, 0]), reduction="none").sqrt()
    (slopes,) = torch.autograd.grad(r.sum(), f)
    r = r.detach()
    assert float(r[0]) == 0
    assert not bool(torch.isfinite(slopes[0]).any())
    repaired = repaired_rows(r, slopes)
    assert repaired[0].tolist() == [0, 0, 0]
    assert repaired[1].tolist() == slopes[1].tolist()


def test_only_zero_residuals_are_repaired():
    nan, inf = float("nan"), float("inf")
    r = tensor([[0.0, 0.0], [1.0, nan]])
    slopes = tensor([[[nan, 1.0], [2.0, 3.0]], [[inf, 1.0], [nan, 1.0]]])
    expected = tensor([[[0.0, 0.0], [2.0, 3.0]], [[inf, 1.0], [nan, 1.0]]])
    torch.testing.assert_close(repaired_rows(r, slopes), expected, rtol=0, atol=0, equal_nan=True)


def test_the_slope_of_the_root_vanishes_with_the_residual():
    """The limit that the repair puts in: ‖∂r/∂f‖ <= r/√2 while p_y -> 1, in 50 digits."""
    with mpmath.workdps(50):
        for margin in (1, 5, 10, 20, 40):
            e = mpmath.exp(-margin)  # f = (margin, 0, 0)
            root = mpmath.sqrt(mpmath.log1p(2 * e))
            miss = 2 * e / (1 + 2 * e)
            slope = mpmath.sqrt(miss**2 + 2 * (miss / 2) ** 2) / (2 * root)
            assert slope <= root / mpmath.sqrt(2)
