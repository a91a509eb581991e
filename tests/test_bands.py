"""Standard errors of predictions and intervals: closed forms, analytic gradients, every kind of model, refusals."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from scipy.stats import chi2, f, norm, t

from lmfit_gpu import LMRegressor
from lmfit_gpu.exceptions import CovarianceWarning
from lmfit_gpu.function_space import function_space
from lmfit_gpu.solution import solution_of

RNG = np.random.default_rng(4)
x = np.linspace(0, 4, 40)
X = x[:, None]
Y = 2.5 * np.exp(-1.3 * x) + 0.5 + 0.05 * RNG.normal(size=40)
NEW = np.array([[-0.5], [0.7], [2.0], [6.0]])


def decay(x, a, b, c):
    return a * np.exp(-b * x) + c


def decay_torch(x, a, b, c):
    return a * torch.exp(-b * x) + c


def decay_vector(X, theta):
    return theta[0] * torch.exp(-theta[1] * X[:, 0]) + theta[2]


class Decay(torch.nn.Module):
    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Parameter(torch.tensor(v, dtype=dtype)) for v in (2.0, 1.0, 0.5))

    def forward(self, X):
        return self.a * torch.exp(-self.b * X[:, 0]) + self.c


def gradient(theta, x):
    a, b, _ = theta[:3]
    return np.stack((np.exp(-b * x), -a * x * np.exp(-b * x), np.ones_like(x)), axis=1)


def by_hand(est, x):
    J = gradient(est.theta_, x)
    return np.sqrt(np.einsum("ij,jk,ik->i", J, est.covariance_, J))


def line(x, a, b):
    return a + b * x


@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
def test_of_a_line_they_are_the_textbook_s(level):
    y = 1 + 2 * x + RNG.normal(size=40)
    est = LMRegressor(line, p0=[0, 1], jac="autograd").fit(X, y)
    slope, intercept = np.polyfit(x, y, 1)
    new = NEW[:, 0]
    s2 = ((intercept + slope * x - y) ** 2).sum() / 38
    h = 1 / 40 + (new - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum()
    mean, std = est.predict(NEW, return_std=True)
    np.testing.assert_allclose(mean, intercept + slope * new, rtol=1e-10)
    np.testing.assert_allclose(std, np.sqrt(s2 * h), rtol=1e-10)
    q = t.ppf(0.5 + level / 2, 38)
    for kind, variance in (("mean", s2 * h), ("observation", s2 * (1 + h))):
        band = est.prediction_interval(NEW, level, kind)
        np.testing.assert_allclose(band.upper - band.prediction, q * np.sqrt(variance), rtol=1e-8)
        np.testing.assert_allclose(band.prediction - band.lower, q * np.sqrt(variance), rtol=1e-8)
    scheffe = est.prediction_interval(NEW, level, simultaneous=True)
    np.testing.assert_allclose(scheffe.upper - mean, np.sqrt(2 * f.ppf(level, 2, 38) * s2 * h), rtol=1e-8)


def test_with_absolute_sigma_the_quantiles_are_normal():
    sigma = np.full(40, 0.3)
    est = LMRegressor(line, p0=[0, 1], absolute_sigma=True).fit(X, 1 + 2 * x, sigma=sigma)
    std = est.predict(NEW, return_std=True)[1]
    np.testing.assert_allclose(est.prediction_interval(NEW).upper - est.predict(NEW), norm.ppf(0.975) * std, rtol=1e-9)
    scheffe = est.prediction_interval(NEW, simultaneous=True)
    np.testing.assert_allclose(scheffe.upper - scheffe.prediction, np.sqrt(chi2.ppf(0.95, 2)) * std, rtol=1e-9)
    band = est.prediction_interval(NEW, kind="observation")
    expected = norm.ppf(0.975) * np.hypot(std, 0.3)
    np.testing.assert_allclose(band.upper - band.prediction, expected, rtol=1e-9)


@pytest.mark.parametrize(
    "model", [decay, decay_torch, decay_vector, Decay()], ids=["numpy", "torch", "vector", "module"]
)
@pytest.mark.parametrize("chunk_rows", ["auto", 3])
def test_every_kind_of_model_has_the_delta_method(model, chunk_rows):
    p0 = None if isinstance(model, torch.nn.Module) else [2, 1, 0.5]
    columns = {"x_format": "columns"} if model is decay_vector else {}
    est = LMRegressor(model, p0=p0, chunk_rows=chunk_rows, **columns).fit(X, Y)
    std = est.predict(NEW, return_std=True)[1]
    np.testing.assert_allclose(std, by_hand(est, NEW[:, 0]), rtol=1e-6)
    as_tensor = est.predict(torch.from_numpy(NEW), return_std=True)
    assert isinstance(as_tensor[1], torch.Tensor)
    np.testing.assert_allclose(as_tensor[1].numpy(), std, rtol=1e-6)
    np.testing.assert_array_equal(est.predict(NEW, return_std=True)[0], est.predict(NEW))


def test_float32_modules():
    est = LMRegressor(Decay(torch.float32)).fit(X.astype(np.float32), Y.astype(np.float32))
    std = est.predict(NEW, return_std=True)[1]
    assert std.dtype == np.float64
    np.testing.assert_allclose(std, by_hand(est, NEW[:, 0]), rtol=1e-3)


def test_constraints():
    """Fixed and bound parameters add nothing; a tied one moves with what it is tied to."""
    new = NEW[:, 0]
    fixed = LMRegressor(decay_torch, p0=[2, 1, 0.5], fixed=["c"]).fit(X, Y)
    np.testing.assert_allclose(fixed.predict(NEW, return_std=True)[1], by_hand(fixed, new), rtol=1e-7)
    bound = LMRegressor(decay, p0=[2, 1, 0.7], bounds={"c": (0.6, None)}).fit(X, Y)
    held = LMRegressor(decay, p0=[2, 1, 0.6], fixed=["c"]).fit(X, Y)
    assert bound.theta_[2] == 0.6
    errors = bound.predict(NEW, return_std=True)[1]
    np.testing.assert_allclose(errors, held.predict(NEW, return_std=True)[1], rtol=1e-4)
    tied = LMRegressor(decay_torch, p0=[2, 1, 0.5], tied={"c": lambda a: 0.2 * a}).fit(X, Y)
    g = gradient(tied.theta_, new) @ np.array([[1, 0], [0, 1], [0.2, 0]])
    expected = np.sqrt(np.einsum("ij,jk,ik->i", g, tied.covariance_[:2, :2], g))
    np.testing.assert_allclose(tied.predict(NEW, return_std=True)[1], expected, rtol=1e-6)


def test_several_outputs_keep_their_shape():
    def both(x, a, b):
        return torch.stack((a * torch.exp(-b * x), a - b * x), dim=1)

    targets = np.stack((2 * np.exp(-x), 2 - x), axis=1) + 0.05 * RNG.normal(size=(40, 2))
    est = LMRegressor(both, p0=[1, 1]).fit(X, targets)
    a, b = est.theta_
    new = NEW[:, 0]
    rows = [
        np.stack((np.exp(-b * new), -a * new * np.exp(-b * new)), axis=1),
        np.stack((np.ones(4), -new), axis=1),
    ]
    expected = [np.sqrt(np.einsum("ij,jk,ik->i", J, est.covariance_, J)) for J in rows]
    mean, std = est.predict(NEW, return_std=True)
    assert mean.shape == std.shape == (4, 2)
    np.testing.assert_allclose(std.T, expected, rtol=1e-7)
    assert est.prediction_interval(NEW, kind="observation").lower.shape == (4, 2)
    column = LMRegressor(Decay()).fit(X, Y[:, None])
    assert column.predict(NEW, return_std=True)[1].shape == (4, 1)


def test_coupled_models_and_residuals_with_predict_fn():
    def running(x, a, b):
        return np.cumsum(a * np.exp(-b * x))

    y = running(x, 2.0, 1.0) + 0.01 * RNG.normal(size=40)
    est = LMRegressor(running, p0=[1, 1]).fit(X, y)
    a, b = est.theta_
    J = np.cumsum(np.stack((np.exp(-b * x), -a * x * np.exp(-b * x)), axis=1), axis=0)
    std = est.predict(X, return_std=True)[1]
    np.testing.assert_allclose(std, np.sqrt(np.einsum("ij,jk,ik->i", J, est.covariance_, J)), rtol=1e-6)

    alone = LMRegressor(
        residual=lambda theta, x, y: decay(x, *theta) - y,
        predict_fn=lambda theta, x: decay(x, *theta),
        p0=[2, 1, 0.5],
    ).fit(X, Y)
    np.testing.assert_allclose(alone.predict(NEW, return_std=True)[1], by_hand(alone, NEW[:, 0]), rtol=1e-5)


def test_what_is_not_determined_is_infinite_where_it_matters():
    """a and b do the same for x < 3; beyond, they do not: there nothing is known."""

    def model(x, a, b, c):
        return a + np.where(x < 3, b, 2 * b) + 0 * x + c * x

    few = X[X[:, 0] < 3]
    with pytest.warns(CovarianceWarning, match=r"a and b: only a \+ b is determined"):
        est = LMRegressor(model, p0=[1, 1, 1]).fit(few, 1 + few[:, 0] + 0.1 * RNG.normal(size=len(few)))
    with pytest.warns(CovarianceWarning, match=r"2 predictions have an infinite standard error: .*only a \+ b") as said:
        std = est.predict([[0.0], [2.9], [3.1], [5.0]], return_std=True)[1]
    assert len(said) == 1
    reference = LMRegressor(line, p0=[1, 1]).fit(few, est._data.y)
    np.testing.assert_allclose(std[:2], reference.predict([[0.0], [2.9]], return_std=True)[1], rtol=1e-6)
    assert np.isinf(std[2:]).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        est.predict([[0.0], [2.9]], return_std=True)


def test_without_freedom_nothing_is_known_of_the_noise():
    with pytest.warns(CovarianceWarning):
        est = LMRegressor(line, p0=[0, 1]).fit([[0.0], [1.0]], [1.0, 2.0])
    with pytest.warns(CovarianceWarning, match="no degrees of freedom"):
        assert np.isinf(est.predict([[0.5]], return_std=True)[1]).all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="kind='observation': no degree of freedom is left to estimate the noise"):
            est.prediction_interval([[0.5]], kind="observation")


def test_sigma_of_new_observations():
    sigma = np.linspace(0.5, 2, 40)
    est = LMRegressor(line, p0=[0, 1]).fit(X, 1 + 2 * x + sigma * RNG.normal(size=40), sigma=sigma)
    with pytest.raises(ValueError, match="sigma: the fit had one that varied from row to row"):
        est.prediction_interval(NEW, kind="observation")
    mean, std = est.predict(NEW, return_std=True)
    new = np.array([1.0, 2.0, 3.0, 4.0])
    for other in (est, pickle.loads(pickle.dumps(est))):
        band = other.prediction_interval(NEW, kind="observation", sigma=new)
        expected = t.ppf(0.975, 38) * np.sqrt(std**2 + est.result_.s2 * new**2)
        np.testing.assert_allclose(band.upper - mean, expected, rtol=1e-9)
    with pytest.raises(ValueError, match=r"sigma: got shape \(3,\); a number, \(4,\)"):
        est.prediction_interval(NEW, kind="observation", sigma=new[:3])
    with pytest.raises(ValueError, match="sigma: positive, finite"):
        est.prediction_interval(NEW, kind="observation", sigma=-new)
    constant = LMRegressor(line, p0=[0, 1]).fit(X, Y, sigma=0.7)
    without = LMRegressor(line, p0=[0, 1]).fit(X, Y)
    np.testing.assert_allclose(
        constant.prediction_interval(NEW, kind="observation").upper,
        without.prediction_interval(NEW, kind="observation").upper,
        rtol=1e-6,
        atol=1e-7,
    )
    with pytest.raises(ValueError, match="sigma: the fit had none"):
        without.prediction_interval(NEW, kind="observation", sigma=new)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "both"}, "kind: got 'both'; 'mean' or 'observation' is expected"),
        ({"level": 1}, "level: got 1; a number between 0 and 1"),
        ({"level": 95}, "level: got 95"),
        ({"level": True}, "level: got True"),
        ({"kind": "observation", "simultaneous": True}, "simultaneous: a band for all x at once is one of the mean"),
        ({"sigma": 1.0}, "sigma: the noise of new observations goes with kind='observation'"),
    ],
)
def test_arguments_are_checked_before_any_work(options, said):
    est = LMRegressor(line, p0=[0, 1]).fit(X, Y)
    with pytest.raises(ValueError, match=said):
        est.prediction_interval(NEW, **options)


def test_noise_without_a_common_size_is_refused():
    robust = LMRegressor(decay, p0=[2, 1, 0.5], covariance="robust").fit(X, Y)
    assert np.isfinite(robust.prediction_interval(NEW).upper).all()
    with pytest.raises(ValueError, match=r"kind='observation': with covariance='HC3' the noise has no common size"):
        robust.prediction_interval(NEW, kind="observation")
    huber = LMRegressor(decay, p0=[2, 1, 0.5], loss="huber", f_scale=0.1).fit(X, Y)
    with pytest.raises(ValueError, match="kind='observation': with"):
        huber.prediction_interval(NEW, kind="observation")


def noisy_surface(n=40):
    rng = np.random.default_rng(0)
    features = rng.uniform(-2, 2, size=(n, 2))
    return features, np.sin(features[:, 0]) * features[:, 1] + 0.1 * rng.normal(size=n), rng.uniform(-2, 2, size=(7, 2))


@pytest.mark.parametrize("outputs", [1, 2])
def test_both_spaces_give_the_same_band_of_a_network(outputs):
    features, target, new = noisy_surface()
    target = target if outputs == 1 else np.stack((target, 2 * target), axis=1)
    est = LMRegressor(hidden_layer_sizes=(8,), alpha=1e-2, random_state=0).fit(features, target)
    space = function_space(solution_of(est))
    assert space.result.dof == pytest.approx(est.result_.dof, rel=1e-8)
    np.testing.assert_allclose(space.standard_errors(est, new).numpy(), est.predict(new, return_std=True)[1], rtol=1e-8)


def test_a_wide_network_has_a_band_by_its_residuals():
    features, target, new = noisy_surface(400)
    options = {"hidden_layer_sizes": (300,), "random_state": 0, "max_iter": 30, "solver": "ghost"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        est = LMRegressor(alpha=1e-2, **options).fit(features, target)
        bare = LMRegressor(**options).fit(features, target)
    assert est.covariance_ is None
    band = est.prediction_interval(new, kind="observation")
    assert (band.lower < band.prediction).all()
    assert np.isfinite(band.upper).all()
    far = est.predict([[30.0, -40.0]], return_std=True)[1]
    near = est.predict(features[:1], return_std=True)[1]
    assert far > 10 * near
    with pytest.raises(
        ValueError, match=r"keeps no covariance of 1201 parameters; with alpha > 0, the prior precision"
    ):
        bare.predict(new, return_std=True)
    lost = pickle.loads(pickle.dumps(est))
    with pytest.raises(ValueError, match="the estimator has no data"):
        lost.predict(new, return_std=True)


def test_memory_does_not_grow_with_the_rows():
    """Blocks of J of one size are worked on, whatever the number of rows; J of all would be 48 MB here."""
    sizes = []

    def watched(x, a, b, c):
        sizes.append(x.shape[0])
        return a * torch.exp(-b * x) + c

    est = LMRegressor(watched, p0=[2, 1, 0.5], chunk_rows=4096).fit(X, Y)
    sizes.clear()
    std = est.predict(np.linspace(0, 4, 200_000)[:, None], return_std=True)[1]
    assert std.shape == (200_000,)
    assert max(sizes[5:]) <= 4096
