"""Losses against their definitions, and the surrogate against the gradient and the curvature of the cost."""

import mpmath
import numpy as np
import pytest
import torch
from oracles import CPU, central_differences, module_model, numpy_model, torch_model
from scipy.optimize import least_squares

from lmfit_gpu import LMRegressor
from lmfit_gpu.jacobian import Derivatives
from lmfit_gpu.losses import CONCAVE, LARGEST, LOSSES, resolve_loss
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.rows import ArrayRows, Weights

NAMES = [name for name in LOSSES if name != "linear"]
RHO = {  # as scipy.optimize.least_squares documents them
    "soft_l1": lambda z: 2 * (mpmath.sqrt(1 + z) - 1),
    "huber": lambda z: z if z <= 1 else 2 * mpmath.sqrt(z) - 1,
    "cauchy": lambda z: mpmath.log(1 + z),
    "arctan": mpmath.atan,
}
Z = [1e-300, 1e-30, 1e-9, 1e-3, 0.3, 0.999, 1.001, 2.0, 50.0, 1e4, 1e9, 1e30]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def terms_of(name, z):
    return torch.stack(LOSSES[name](tensor(z))).numpy()


@pytest.mark.parametrize("name", NAMES)
def test_values_and_derivatives_are_those_of_the_definition(name):
    """700 digits, for 1 + 1e-300; each term relative to its own size."""
    with mpmath.workdps(700):
        expected = np.array(
            [
                [float(mpmath.diff(RHO[name], mpmath.mpf(z), k, h=mpmath.mpf(z) * mpmath.mpf(10) ** -12)) for z in Z]
                for k in (0, 1, 2)
            ]
        )
    np.testing.assert_allclose(terms_of(name, Z), expected, rtol=1e-12, atol=1e-290)


@pytest.mark.parametrize("name", NAMES)
def test_losses_at_zero_and_one(name):
    value, first, second = terms_of(name, [0.0, 1.0])[:, 0]
    assert (value, first) == (0, 1)
    assert second == {"soft_l1": -0.5, "huber": 0.0, "cauchy": -1.0, "arctan": 0.0}[name]
    assert terms_of("huber", [1.0])[:, 0].tolist() == [1, 1, 0]


@pytest.mark.parametrize("name", NAMES)
def test_the_cost_is_that_of_scipy(name):
    """SciPy's own implementation, through its cost at a point where it does not move."""
    r = np.array([1e-5, 0.3, -0.9, 1.1, -4.0, 300.0])
    for scale in (0.1, 1.0, 7.0):
        theirs = least_squares(lambda t: r + 0 * t, [1.0], loss=name, f_scale=scale, max_nfev=1)
        assert 0.5 * float(resolve_loss(name, scale).value(tensor(r)).sum()) == pytest.approx(theirs.cost, rel=1e-12)


F = [-1e5, -30.0, -1.3, -1.0, -0.9999, -0.1, -1e-8, 0.0, 1e-300, 1e-20, 0.55, 0.57, 0.58, 1.0, 1.7, 2.0, 1e3, 1e70]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 20.0])
@pytest.mark.parametrize("name", NAMES)
def test_the_surrogate_has_the_gradient_of_the_cost(name, scale):
    f = scale * tensor(F)
    loss = resolve_loss(name, scale)
    r, s = loss.surrogate(f)
    slope = loss.rho((f / scale) ** 2)[1]
    np.testing.assert_allclose(s * r, slope * f, rtol=1e-14, atol=0)
    assert bool((s**2 >= CONCAVE * slope * (1 - 1e-14)).all())
    h = 1e-6 * f.abs().clamp_min(1e-6 * scale)
    differences = (loss.value(f + h) - loss.value(f - h)) / (4 * h)  # of ½ c² ρ
    small = torch.isfinite(differences) & (f.abs() > 1e-3 * scale) & (f.abs() < 1e6 * scale)
    kink = (f.abs() / scale - 1).abs() < 1e-3 if name == "huber" else torch.zeros_like(small)
    np.testing.assert_allclose((s * r)[small & ~kink], differences[small & ~kink], rtol=2e-4, atol=1e-10 * scale)


@pytest.mark.parametrize("name", NAMES)
def test_the_surrogate_has_the_curvature_of_the_cost_where_it_is_safe(name):
    """s² = ρ' + 2zρ'' = d²/df² of ½ρ(f²), up to the share κ of ρ'."""
    f = np.array([1e-6, 0.1, 0.3, 0.5, 0.56, 0.6, 0.8, 0.97, 1.1, 1.6, 3.0, 40.0])
    with mpmath.workdps(40):
        exact = np.array([float(mpmath.diff(lambda t: RHO[name](t * t) / 2, mpmath.mpf(v), 2)) for v in f])
    slope = terms_of(name, f**2)[1]
    s = resolve_loss(name, 1.0).surrogate(tensor(f))[1].numpy()
    np.testing.assert_allclose(s**2, np.maximum(exact, CONCAVE * slope), rtol=1e-9)
    assert (exact[:3] > CONCAVE * slope[:3]).all()  # small residuals have Newton's curvature


@pytest.mark.parametrize("f", [0.0, 5e-324, 1e-300, 1e-160, 1e-10, 1e80, 1e150, 1e160, 1e200, 1e300, -1e300, 1.7e308])
@pytest.mark.parametrize("name", NAMES)
def test_no_nan_for_any_finite_residual(name, f):
    """Z = (f/c)² overflows beyond 1e154."""
    loss = resolve_loss(name, 1.0)
    value, (r, s) = loss.value(tensor([f])), loss.surrogate(tensor([f]))
    assert not bool(torch.isnan(torch.cat((value, r, s))).any())
    assert bool(torch.isfinite(r).all()) and bool(torch.isfinite(s).all())
    with mpmath.workdps(30):
        exact = RHO[name](mpmath.mpf(f) ** 2)
    if exact > 1e-290 and abs(f) <= LARGEST:  # beyond it is constant
        assert float(value) == pytest.approx(float(exact), rel=1e-12)


# ---- a loss of the user's


def of_user(name):
    return lambda z: np.array([part.numpy() for part in LOSSES[name](torch.from_numpy(z))])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_a_callable_is_the_loss_that_it_computes(name, scale):
    f = scale * tensor(F[:-1])
    built_in, of_users = resolve_loss(name, scale), resolve_loss(of_user(name), scale)
    np.testing.assert_array_equal(of_users.value(f), built_in.value(f))
    for ours, theirs in zip(of_users.surrogate(f), built_in.surrogate(f), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    shaped = of_users.value(f[:16].reshape(4, 4))
    np.testing.assert_array_equal(shaped, built_in.value(f[:16].reshape(4, 4)))
    assert of_users.name == "<lambda>"


@pytest.mark.parametrize("as_rows", [list, tuple, np.array], ids=["list", "tuple", "array"])
def test_a_callable_may_return_any_three_rows(as_rows):
    loss = resolve_loss(lambda z: as_rows([np.log1p(z), 1 / (1 + z), -1 / (1 + z) ** 2]), 1.0)
    np.testing.assert_allclose(loss.value(tensor([0.5])), np.log1p(0.25))


def test_a_callable_cannot_write_to_the_residuals():
    def writing(z):
        z *= 2
        return np.array([z / 2, np.ones_like(z), np.zeros_like(z)])

    f = tensor([1.0, 2.0])
    resolve_loss(writing, 1.0).value(f)
    assert f.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("rho", "message"),
    [
        (lambda z: np.array([z, np.ones_like(z)]), r"loss: .*shape \(2, 7\); \(3, 7\)"),
        (lambda z: np.array([z, 1 + 0 * z, 0 * z]).T, r"loss: .*shape \(7, 3\)"),
        (lambda z: np.ones((3, len(z), 1)), r"loss: .*shape \(3, 7, 1\)"),
        (lambda z: np.array([np.log1p(z), 1 / (1 + z) ** 2, -1 / (1 + z) ** 2]), r"loss: the first derivative"),
        (lambda z: np.array([np.log1p(z), 2 / (1 + z), -2 / (1 + z) ** 2]), r"loss: the first derivative"),
        (lambda z: np.array([np.log1p(z), 1 / (1 + z), 1 / (1 + z) ** 2]), r"loss: the second derivative"),
        (lambda z: np.array([np.log1p(z), 1 / (1 + z), 0 * z]), r"loss: the second derivative"),
        (lambda z: np.array([-z, -np.ones_like(z), 0 * z]), r"loss: .*slope >= 0"),
        (lambda z: np.array([z - z**2, 1 - 2 * z, -2 + 0 * z]), r"loss: .*slope >= 0"),
        (lambda z: np.array([z * np.nan, 1 + 0 * z, 0 * z]), r"loss: .*finite"),
        (lambda z: np.array([z, 1 + 0 * z, np.full_like(z, np.inf)]), r"loss: .*finite"),
        (lambda z: np.array([np.where(z > 100, np.nan, z), 1 + 0 * z, 0 * z]), r"loss: .*finite"),
        pytest.param(lambda z: 1.0, "loss: ", id="a number, a bare TypeError"),
        pytest.param(lambda z: None, "loss: ", id="None, a bare TypeError"),
        pytest.param(lambda z: [z, np.ones(3), z], "loss: ", id="ragged rows, numpy's message"),
        pytest.param(lambda z: [["a"] * len(z)] * 3, "loss: ", id="no numbers, a bare ValueError"),
        pytest.param(lambda z: np.array([z + 0j, 1 + 0j * z, 0j * z]), "loss: ", id="complex, a warning"),
        pytest.param(lambda z: np.array([2 * z**0.5, z**-0.5, -0.5 * z**-1.5]), "loss: ", id="no finite slope at 0"),
    ],
)
def test_a_callable_that_is_no_loss(rho, message):
    with pytest.raises((ValueError, TypeError), match=message):
        resolve_loss(rho, 1.0)


@pytest.mark.parametrize("loss", ["Huber", "", None, 5, ["huber"], b"huber"])
def test_names_that_are_no_loss(loss):
    with pytest.raises(ValueError, match=r"loss: got .*'linear', 'soft_l1', 'huber', 'cauchy', 'arctan' or a callable"):
        resolve_loss(loss, 1.0)


@pytest.mark.parametrize("scale", [0, -1.0, np.nan, np.inf, "1", None, True, [1.0], np.array([1.0, 2.0]), 1j])
@pytest.mark.parametrize("loss", ["linear", "huber"])
def test_scales_that_are_no_scale(loss, scale):
    with pytest.raises(ValueError, match="f_scale: got "):
        resolve_loss(loss, scale)


def test_scales_of_every_type_of_number():
    for scale in (2, np.float32(2), np.int64(2)):
        assert resolve_loss("huber", scale).f_scale == 2.0
    assert resolve_loss("linear", 2.0) is None


# ---- costs and gradients of a problem, for every loss, every weight, every way to J

N = 18
X1 = np.linspace(0.1, 2.0, N)
THETA = tensor([1.3, 0.7])


def y_of(two):
    y = np.cos(2 * X1) + np.where(np.arange(N) % 9 == 4, 6.0, 0.0)
    return np.stack([y, -y / 2], 1) if two else y


def model_of(kind, two):
    def both(library):
        stack = np.stack if library is np else torch.stack
        if two:
            return lambda x, a, b: stack([a * library.exp(-b * x), a * b * x], -1)
        return lambda x, a, b: a * library.exp(-b * x)

    if kind == "coupled":
        return torch_model(lambda x, a, b: both(torch)(x, a, b) + a * x.mean())
    return numpy_model(both(np)) if kind == "numpy" else torch_model(both(torch))


WEIGHTS = ["none", "sigma", "frequency", "both", "sigma-of-y"]


def made(kind, loss, weights, two=False, **options):
    """Return (problem, f, c, w, σ): f θ -> all residuals (m,), the others as arrays that numpy broadcasts to (m,)."""
    rng = np.random.default_rng(5)
    y, model = y_of(two), model_of(kind, two)
    outputs = 2 if two else 1
    w = rng.integers(0, 4, N).astype(float) if weights in ("frequency", "both") else np.ones(N)
    sigma = rng.uniform(0.2, 3.0, N) if weights in ("sigma", "both") else np.ones(N)
    sigma = np.repeat(sigma, outputs)
    if weights == "sigma-of-y":
        sigma = rng.uniform(0.2, 3.0, N * outputs)
    frequency = torch.from_numpy(w) if weights in ("frequency", "both") else None
    given = None
    if weights in ("sigma", "both"):
        given = torch.from_numpy(sigma[::outputs].copy())
    elif weights == "sigma-of-y":
        given = torch.from_numpy(sigma.reshape(y.shape))
    rows = ArrayRows(
        torch.from_numpy(X1), torch.from_numpy(y), weights=None if weights == "none" else Weights(frequency, given)
    )
    problem = LeastSquaresProblem(model, rows, THETA, loss=resolve_loss(loss, 0.5), **options)

    def residuals(theta):
        with torch.no_grad():
            return (model(torch.as_tensor(theta), rows.X, rows.y).numpy() - y).ravel()

    return problem, residuals, (np.repeat(w, outputs), sigma)


def cost_by_hand(loss, f, w, sigma, scale=0.5):
    z = (f / sigma / scale) ** 2
    rho = {
        "linear": z, "soft_l1": 2 * ((1 + z) ** 0.5 - 1), "huber": np.where(z <= 1, z, 2 * z**0.5 - 1),
        "cauchy": np.log1p(z), "arctan": np.arctan(z),
    }[loss]  # fmt: skip
    return 0.5 * np.sum(w * scale**2 * rho)


OPTIONS = [
    pytest.param({"chunk_rows": 1}, id="rows-1"),
    pytest.param({"chunk_rows": 7}, id="rows-7"),
    pytest.param({"chunk_rows": 16, "devices": [CPU, CPU]}, id="two-devices"),
]


@pytest.mark.parametrize(("options", "two"), [({}, False), ({"chunk_rows": 1}, False), ({"chunk_rows": 7}, True)])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_cost_of_a_problem(loss, weights, options, two):
    problem, f, (w, sigma) = made("torch", loss, weights, two, **options)
    for theta in (THETA, THETA + 0.5):
        assert problem.cost(theta) == pytest.approx(cost_by_hand(loss, f(theta), w, sigma), rel=1e-13)
    assert problem.n_observed == w.sum()
    problem.close()


@pytest.fixture(params=[pytest.param(True, id="kept"), pytest.param(False, id="not-kept")])
def kept(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr("lmfit_gpu.jacobian.KEEP_BYTES", 0)
    return request.param


def check_every_path(problem, jac, gradient):
    """Hold every product of J̃ and r̃ against the gradient of the cost and against the dense J̃."""
    jacobian = Derivatives.choose(problem, jac, THETA).at(THETA)
    size = np.abs(gradient).max()
    J, r = (torch.cat(parts).numpy() for parts in zip(*((J, r) for r, J in jacobian.blocks()), strict=True))
    u, v = torch.linspace(-1, 2, len(r), dtype=torch.float64), tensor([0.4, -1.1])
    fresh = Derivatives.choose(problem, jac, THETA).at(THETA)
    for at in (fresh, jacobian):  # nothing kept yet, and after
        np.testing.assert_allclose(at.rmatvec(torch.from_numpy(r)), gradient, atol=1e-7 * size)
        np.testing.assert_allclose(at.rmatvec(u), J.T @ u.numpy(), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(at.matvec(v), J @ v.numpy(), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(at.normal(v), J.T @ (J @ v.numpy()), rtol=1e-9, atol=1e-9)
        gram = at.reduce(lambda columns: columns @ columns.T, torch.add)
        np.testing.assert_allclose(gram[:2, 2], gradient, atol=1e-7 * size)
        np.testing.assert_allclose(at.whole()[:-1].T, J, rtol=1e-12)
        np.testing.assert_allclose(at.whole()[-1], r, rtol=1e-12)
        if jac == "autograd":
            found, norm = at.gradient()
            np.testing.assert_allclose(found, gradient, atol=1e-7 * size)
            assert norm == pytest.approx(np.linalg.norm(r), rel=1e-12)
    everything = torch.cat([problem.residual(THETA, rows) for rows in problem.row_blocks()])
    np.testing.assert_allclose(everything, r, rtol=1e-12)
    problem.close()


@pytest.mark.parametrize("kind", ["torch", "numpy", "coupled"])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_path_has_the_gradient_of_the_cost(loss, weights, kind, kept):
    problem, _, _ = made(kind, loss, weights)
    gradient = central_differences(lambda t: np.array([problem.cost(tensor(t))]), THETA, 1e-4)[0]
    check_every_path(problem, "3-point" if kind == "numpy" else "autograd", gradient)


@pytest.mark.parametrize("two", [False, True], ids=["one-output", "two-outputs"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("loss", "weights"), [("linear", "both"), ("cauchy", "sigma-of-y")])
def test_every_path_in_blocks(loss, weights, options, two, kept):
    problem, _, _ = made("torch", loss, weights, two, **options)
    gradient = central_differences(lambda t: np.array([problem.cost(tensor(t))]), THETA, 1e-4)[0]
    check_every_path(problem, "autograd", gradient)


@pytest.mark.parametrize("loss", ["linear", "arctan"])
def test_the_users_jacobian_is_weighted_too(loss, kept):
    problem, _, _ = made("torch", loss, "both")
    gradient = central_differences(lambda t: np.array([problem.cost(tensor(t))]), THETA, 1e-4)[0]
    check_every_path(problem, lambda x, a, b: torch.stack([torch.exp(-b * x), -a * x * torch.exp(-b * x)], 1), gradient)


def test_curvature_is_weighted(kept):
    """f = a² x + a b x², with frequencies and sigma: f_vv = 2 v_a² x + 2 v_a v_b x², whatever the step."""
    w, sigma = np.arange(N) % 3.0, np.linspace(0.3, 2, N)
    weights = Weights(torch.from_numpy(w), torch.from_numpy(sigma))
    rows = ArrayRows(torch.from_numpy(X1), torch.from_numpy(y_of(False)), weights=weights)
    problem = LeastSquaresProblem(torch_model(lambda x, a, b: a * a * x + a * b * x * x), rows, THETA, chunk_rows=7)
    J = np.stack([2 * 1.3 * X1 + 0.7 * X1**2, 1.3 * X1**2], 1)
    jacobian = Derivatives.choose(problem, "autograd", THETA).at(THETA)
    for _ in range(2):
        found = jacobian.curvature(tensor([0.3, -0.4]))
        np.testing.assert_allclose(found, J.T @ (w / sigma**2 * (0.18 * X1 - 0.24 * X1**2)), rtol=1e-7)
        list(jacobian.blocks())
    assert not Derivatives.choose(made("torch", "huber", "none")[0], "autograd", THETA).at(THETA).can_accelerate


@pytest.mark.parametrize("loss", NAMES)
def test_a_float32_problem_has_the_cost_in_float64(loss):
    """The residuals are of float32, the loss is not: 1e4 times f_scale would lose digits."""
    x, y = torch.linspace(0.1, 2.0, N), torch.full((N,), 5e3)
    rows = ArrayRows(x, y, weights=Weights(None, torch.full((N,), 0.1, dtype=torch.float64)))
    model = torch_model(lambda x, a, b: a * torch.exp(-b * x))
    problem = LeastSquaresProblem(model, rows, THETA.float(), loss=resolve_loss(loss, 1.0))
    f = (model(THETA.float(), x, y) - y).double().numpy()
    assert problem.cost(THETA.float()) == pytest.approx(cost_by_hand(loss, f, 1.0, 0.1, 1.0), rel=1e-6)
    jacobian = Derivatives.choose(problem, "autograd", THETA.float()).at(THETA.float())
    columns = jacobian.whole()
    assert columns.dtype is torch.float32 and bool(torch.isfinite(columns).all())


def test_a_module_with_a_loss_and_weights(kept):
    torch.manual_seed(1)
    net = module_model(torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)))
    weights = Weights(torch.arange(N).double() % 3, torch.linspace(0.3, 2, N).double())
    rows = ArrayRows(torch.from_numpy(X1[:, None]), torch.from_numpy(y_of(True)), weights=weights)
    problem = LeastSquaresProblem(net, rows, net.theta, loss=resolve_loss("soft_l1", 0.5), chunk_rows=10)
    gradient = central_differences(lambda t: np.array([problem.cost(tensor(t))]), net.theta, 1e-4)[0]
    jacobian = Derivatives.choose(problem, "autograd", net.theta).at(net.theta)
    np.testing.assert_allclose(jacobian.gradient()[0], gradient, rtol=1e-6, atol=1e-8)
    columns = jacobian.whole()
    np.testing.assert_allclose(columns[:-1] @ columns[-1], gradient, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("form", ["name", "callable"])
@pytest.mark.parametrize("name", NAMES)
def test_fits_end_where_scipy_ends(name, form):
    rng = np.random.default_rng(2)
    y = 2.5 * np.exp(-1.3 * X1) + 0.05 * rng.normal(size=N)
    y[::9] += 3.0
    theirs = least_squares(
        lambda t: t[0] * np.exp(-t[1] * X1) - y, [2, 1], loss=name, f_scale=0.1, xtol=1e-14, ftol=1e-14, gtol=1e-12
    )
    loss = name if form == "name" else of_user(name)
    est = LMRegressor(lambda x, a, b: a * torch.exp(-b * x), p0=[2, 1], loss=loss, f_scale=0.1).fit(X1[:, None], y)
    assert est.result_.success
    assert est.result_.cost == pytest.approx(theirs.cost, rel=1e-9)
    np.testing.assert_allclose(est.theta_, theirs.x, rtol=1e-5)
