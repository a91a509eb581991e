"""What fit is given: frequencies and standard deviations."""

import warnings

import numpy as np
import pandas as pd
import pytest
import scipy.optimize
import torch
from sklearn.exceptions import ConvergenceWarning

from lmfit_gpu import LMRegressor
from lmfit_gpu.arguments import check_data
from lmfit_gpu.exceptions import FitWarning

N = 40
x1 = np.linspace(0, 4, N)
X = x1[:, None]
Y = 2.5 * np.exp(-1.3 * x1) + 0.5 + 0.02 * np.cos(40 * x1)
TWO = np.column_stack([Y, 1 + 2 * Y])
P0 = [1.0, 1.0, 0.0]
SIGMA = np.linspace(0.05, 0.4, N)
FREQUENCY = np.arange(N) % 4.0  # 0, 1, 2, 3, 0, ...


def decay(x, a, b, c):
    return a * np.exp(-b * x) + c


def torch_decay(x, a, b, c):
    return a * torch.exp(-b * x) + c


def both_outputs(x, a, b, c):
    return torch.stack([torch_decay(x, a, b, c), 1 + 2 * torch_decay(x, a, b, c)], 1)


class Decay(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Parameter(torch.tensor(v, dtype=torch.float64)) for v in (1.0, 1.0, 0.0))

    def forward(self, X):
        return self.a * torch.exp(-self.b * X[:, 0]) + self.c


MODELS = {"numpy": (decay, {"p0": P0}), "torch": (torch_decay, {"p0": P0}), "module": (Decay(), {})}


def made(kind="torch", **more):
    model, options = MODELS[kind]
    return LMRegressor(model, **{**options, **more})


def same(est, other, rtol=1e-7):
    np.testing.assert_allclose(est.theta_, other.theta_, rtol=rtol)
    np.testing.assert_allclose(est.stderr_, other.stderr_, rtol=max(rtol, 1e-6))
    assert est.result_.cost == pytest.approx(other.result_.cost, rel=1e-9)
    assert est.result_.dof == other.result_.dof


def broken(values, rows, value=np.nan):
    values = np.array(values, dtype=float)
    for row in rows:
        values[row] = value
    return values


# ---- frequencies


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("with_sigma", [False, True])
def test_frequencies_are_repetition(kind, with_sigma):
    sigma = SIGMA if with_sigma else None
    repeated = np.repeat(np.arange(N), FREQUENCY.astype(int))
    weighted = made(kind).fit(X, Y, sample_weight=FREQUENCY, sigma=sigma)
    same(weighted, made(kind).fit(X[repeated], Y[repeated], sigma=sigma[repeated] if with_sigma else None))
    assert weighted.result_.dof == FREQUENCY.sum() - 3
    assert isinstance(weighted.result_.dof, int)


def test_frequencies_of_two_outputs_are_repetition():
    repeated = np.repeat(np.arange(N), FREQUENCY.astype(int))
    weighted = LMRegressor(both_outputs, p0=P0).fit(X, TWO, sample_weight=FREQUENCY)
    same(weighted, LMRegressor(both_outputs, p0=P0).fit(X[repeated], TWO[repeated]))
    assert weighted.result_.dof == 2 * FREQUENCY.sum() - 3


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("loss", ["linear", "soft_l1"])
def test_rows_of_weight_zero_are_left_out_to_the_bit(loss, absolute):
    kept = np.arange(N) % 3 > 0
    options = {"loss": loss, "f_scale": 0.1, "absolute_sigma": absolute}
    weighted = made(**options).fit(X, Y, sample_weight=kept.astype(int), sigma=SIGMA)
    without = made(**options).fit(X[kept], Y[kept], sigma=SIGMA[kept])
    np.testing.assert_array_equal(weighted.theta_, without.theta_)
    np.testing.assert_array_equal(weighted.covariance_, without.covariance_)
    assert weighted.result_.cost == without.result_.cost
    assert weighted.result_.dof == without.result_.dof


@pytest.mark.parametrize("what", ["X", "y", "sigma-nan", "sigma-0"])
def test_what_a_row_of_weight_zero_holds_does_not_matter(what):
    """A row of weight 0 is not there, whatever it holds."""
    data = {"X": X.copy(), "y": Y.copy(), "sigma": SIGMA.copy()}
    data[what.split("-")[0]][3] = 0.0 if what == "sigma-0" else np.nan
    weights = np.ones(N)
    weights[3] = 0
    est = made().fit(**data, sample_weight=weights)
    kept = weights > 0
    np.testing.assert_array_equal(est.theta_, made().fit(X[kept], Y[kept], sigma=SIGMA[kept]).theta_)


@pytest.mark.parametrize("form", [list, tuple, pd.Series, torch.tensor, lambda w: w.astype(np.int8), lambda w: w > 0])
def test_frequencies_in_every_form(form):
    found = made().fit(X, Y, sample_weight=form(FREQUENCY))
    np.testing.assert_array_equal(
        found.theta_, made().fit(X, Y, sample_weight=np.asarray(form(FREQUENCY), float)).theta_
    )


def with_entry(value):
    weights = np.ones(N)
    weights[7] = value
    return weights


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.zeros(N), "sample_weight: all are zero; no row is left"),
        (0, "sample_weight: all are zero"),
        (with_entry(-1), r"sample_weight: got -1 in row 7; frequencies >= 0"),
        (with_entry(np.nan), r"Input sample_weight contains NaN or infinity in row 7;"),
        (with_entry(np.inf), r"Input sample_weight contains NaN or infinity in row 7;"),
        (np.ones(N - 1), r"sample_weight: got shape \(39,\); \(40,\) is expected"),
        (np.ones((N, 2)), r"sample_weight: got shape \(40, 2\)"),
        ([], r"sample_weight: got shape \(0,\)"),
        ("balanced", r"sample_weight: got str that is not numbers"),
        (np.ones(N) + 1j, r"sample_weight: got ndarray that is not numbers: complex"),
        ({"a": 1}, r"sample_weight: got dict that is not numbers"),
    ],
)
def test_frequencies_that_make_no_sense(weights, message):
    with pytest.raises(ValueError, match=message):
        made().fit(X, Y, sample_weight=weights)


def test_frequencies_that_are_not_whole_warn():
    with pytest.warns(FitWarning, match="sample_weight: they are frequencies.*give the standard deviations as sigma"):
        est = made().fit(X, Y, sample_weight=FREQUENCY + 0.5)
    f = decay(x1, *est.theta_) - Y
    assert est.result_.cost == pytest.approx(0.5 * np.sum((FREQUENCY + 0.5) * f**2), rel=1e-9)
    assert est.result_.dof == pytest.approx((FREQUENCY + 0.5).sum() - 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(nan_policy="omit").fit(X, np.where(x1 == x1[7], np.nan, Y), sample_weight=with_entry(0.5))


# ---- standard deviations


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("sigma", [SIGMA, np.full(N, 0.3)], ids=["each", "equal"])
def test_covariance_with_sigma_is_that_of_scipy(kind, absolute, sigma):
    options = {"xtol": 1e-14, "ftol": 1e-14, "gtol": 1e-14}
    popt, pcov = scipy.optimize.curve_fit(decay, x1, Y, P0, sigma, absolute, **options)
    est = made(kind, absolute_sigma=absolute).fit(X, Y, sigma=sigma)
    np.testing.assert_allclose(est.theta_, popt, rtol=1e-7)
    np.testing.assert_allclose(est.covariance_, pcov, rtol=1e-5)
    assert est.result_.cost == pytest.approx(0.5 * np.sum(((decay(x1, *popt) - Y) / sigma) ** 2), rel=1e-9)


def test_sigma_ten_times_as_large():
    one, ten = (made(absolute_sigma=True).fit(X, Y, sigma=k * SIGMA) for k in (1, 10))
    np.testing.assert_allclose(ten.stderr_, 10 * one.stderr_, rtol=1e-6)
    one, ten = (made().fit(X, Y, sigma=k * SIGMA) for k in (1, 10))
    np.testing.assert_allclose(ten.stderr_, one.stderr_, rtol=1e-6)
    np.testing.assert_allclose(ten.theta_, one.theta_, rtol=1e-8)
    assert ten.result_.cost == pytest.approx(one.result_.cost / 100, rel=1e-9)


def test_the_scale_of_sigma_does_not_matter():
    """Beyond 1e100 squares of residuals over it would vanish, and the start pass for an exact fit: refused."""
    one = made().fit(X, Y, sigma=SIGMA)
    for scale in (1e-90, 1e90):
        np.testing.assert_allclose(made().fit(X, Y, sigma=scale * SIGMA).theta_, one.theta_, rtol=1e-7)
    for scale in (1e-200, 1e200):
        with pytest.raises(ValueError, match=r"sigma: got .* rescale"):
            made().fit(X, Y, sigma=scale * SIGMA)


@pytest.mark.parametrize(
    "form",
    [
        lambda s: s[:, None],
        lambda s: torch.from_numpy(s),
        lambda s: pd.Series(s, index=np.arange(N)[::-1]),
        lambda s: list(s),
        lambda s: pd.DataFrame({"sigma": s}),
    ],
    ids=["column", "tensor", "Series", "list", "DataFrame"],
)
def test_sigma_in_every_form(form):
    found = made().fit(X, Y, sigma=form(SIGMA))
    np.testing.assert_array_equal(found.theta_, made().fit(X, Y, sigma=SIGMA).theta_)


def test_a_scalar_sigma_is_for_every_row():
    for sigma in (0.3, np.float32(0.25), torch.tensor(0.25), 1):
        found = made(absolute_sigma=True).fit(X, Y, sigma=sigma)
        np.testing.assert_array_equal(
            found.stderr_, made(absolute_sigma=True).fit(X, Y, sigma=np.full(N, sigma)).stderr_
        )


def test_sigma_of_two_outputs():
    """(n, k): each its own; (n,): one for both."""
    sigma = np.column_stack([SIGMA, SIGMA[::-1] * 3])
    options = {"xtol": 1e-14, "ftol": 1e-14, "gtol": 1e-14}
    flat = lambda x, a, b, c: np.column_stack([decay(x, a, b, c), 1 + 2 * decay(x, a, b, c)]).ravel()  # noqa: E731
    for given, all_of in ((sigma, sigma), (SIGMA, np.column_stack([SIGMA, SIGMA]))):
        popt, pcov = scipy.optimize.curve_fit(flat, x1, TWO.ravel(), P0, all_of.ravel(), True, **options)
        for chunk in ("auto", 7):
            est = LMRegressor(both_outputs, p0=P0, absolute_sigma=True, chunk_rows=chunk).fit(X, TWO, sigma=given)
            np.testing.assert_allclose(est.theta_, popt, rtol=1e-7)
            np.testing.assert_allclose(est.covariance_, pcov, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, -np.inf])
def test_a_sigma_that_is_not_positive_names_its_row(value):
    sigma = np.where(np.arange(N) == 11, value, SIGMA)
    for given in (sigma, sigma[:, None], torch.from_numpy(sigma)):
        with pytest.raises(ValueError, match=r"sigma.* in row 11"):
            made().fit(X, Y, sigma=given)
    with pytest.raises(ValueError, match=r"sigma.* in row 11"):
        LMRegressor(both_outputs, p0=P0).fit(X, TWO, sigma=np.column_stack([SIGMA, sigma]))
    with pytest.raises(ValueError, match=r"sigma"):
        made().fit(X, Y, sigma=value)


@pytest.mark.parametrize(
    ("sigma", "message"),
    [
        (np.ones(N + 1), r"sigma: got shape \(41,\); \(40,\) or \(40, 1\) is expected"),
        (np.ones((N, 2)), r"sigma: got shape \(40, 2\)"),
        (np.ones((1, N)), r"sigma: got shape \(1, 40\)"),
        (np.eye(N) + 1, r"sigma: got shape \(40, 40\); .*covariance matrix: curve_fit"),
        ([], r"sigma: got shape \(0,\)"),
        ("auto", r"sigma: got str that is not numbers"),
        (np.ones(N) * 1j, r"sigma: got ndarray that is not numbers: complex"),
        ([None] * N, r"sigma"),
    ],
)
def test_sigma_that_makes_no_sense(sigma, message):
    with pytest.raises(ValueError, match=message):
        made().fit(X, Y, sigma=sigma)


def test_absolute_sigma_needs_sigma():
    with pytest.raises(ValueError, match=r"absolute_sigma=True: .*fit got no sigma"):
        made(absolute_sigma=True).fit(X, Y)
    for wrong in (1, "yes", None):
        with pytest.raises(ValueError, match=rf"'absolute_sigma' parameter .* 'bool'.* Got {wrong!r} instead"):
            made(absolute_sigma=wrong).fit(X, Y, sigma=SIGMA)


# ---- a residual callable alone


def residual(theta, x, y):
    return theta[0] * np.exp(-theta[1] * x) + theta[2] - y


@pytest.mark.parametrize(
    "weights", [{"sigma": SIGMA}, {"sample_weight": FREQUENCY}, {"sigma": 0.2}], ids=["sigma", "frequency", "scalar"]
)
def test_a_residual_callable_row_by_row_takes_weights(weights):
    same(LMRegressor(residual=residual, p0=P0).fit(X, Y, **weights), made().fit(X, Y, **weights))
    x_and_y = np.column_stack([x1, Y])
    alone = LMRegressor(residual=lambda t, xy, y: residual(t, xy[:, 0], xy[:, 1]), p0=P0).fit(x_and_y, **weights)
    same(alone, made().fit(X, Y, **weights))


def test_a_coupled_model_takes_sigma():
    """A running sum: as many values as rows."""
    running = lambda x, a, b, c: np.cumsum(decay(x, a, b, c))  # noqa: E731
    popt, pcov = scipy.optimize.curve_fit(running, x1, np.cumsum(Y), P0, SIGMA, True, xtol=1e-14, ftol=1e-14)
    est = LMRegressor(running, p0=P0, absolute_sigma=True, chunk_rows=N).fit(X, np.cumsum(Y), sigma=SIGMA)
    assert est.result_.used["rows"].startswith("coupled")
    np.testing.assert_allclose(est.theta_, popt, rtol=1e-6)
    np.testing.assert_allclose(est.covariance_, pcov, rtol=1e-4)


@pytest.mark.parametrize("name", ["sigma", "sample_weight"])
@pytest.mark.parametrize(
    "more",
    [
        lambda r: np.append(r, 0.1),
        lambda r: r[1:] - r[:-1],
        pytest.param(lambda r: np.concatenate([r, 0 * r]), id="2n"),
    ],
)
def test_residuals_that_belong_to_no_row_take_no_weights(name, more):
    """Of 2n residuals, r_0 .. r_n-1 and n more, the first two are taken for those of row 0."""
    est = LMRegressor(residual=lambda t, x, y: more(residual(t, x, y)), p0=P0)
    with pytest.raises(ValueError, match=rf"{name}: .* depend on all 40 rows"):
        est.fit(X, Y, **{name: np.where(SIGMA > 0.2, 2.0, 1.0)})


# ---- all of it


def test_check_data_by_itself():
    est = made(nan_policy="omit")
    data = check_data(est, broken(X, [0]), Y, FREQUENCY, SIGMA)
    assert data.n_left_out == np.sum((FREQUENCY == 0) | (np.arange(N) == 0))
    assert len(data.X) == len(data.y) == len(data.weights.frequency) == len(data.weights.sigma) == N - data.n_left_out
    assert data.weights.frequency.dtype is data.weights.sigma.dtype is torch.float64
    assert check_data(made(), X, Y).weights is None
    assert est.n_features_in_ == 1


def test_weights_reach_every_device():
    fits = [
        made(devices=devices, chunk_rows=16, loss="cauchy").fit(X, Y, sample_weight=FREQUENCY, sigma=SIGMA)
        for devices in (["cpu"], ["cpu", "cpu"])
    ]
    np.testing.assert_array_equal(fits[0].theta_, fits[1].theta_)


@pytest.mark.parametrize("solver", ["qr", "cholesky", "dual", "cg"])
def test_every_solver_with_weights(solver):
    popt, _ = scipy.optimize.curve_fit(
        decay, x1, Y, P0, SIGMA / np.sqrt(np.maximum(FREQUENCY, 1e-12)), xtol=1e-14, ftol=1e-14
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        est = made(solver=solver).fit(X, Y, sample_weight=FREQUENCY, sigma=SIGMA)
    np.testing.assert_allclose(est.theta_, popt, rtol=1e-5)
