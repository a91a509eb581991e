"""Leverage, studentised residuals, Cook's distance and Durbin-Watson: statsmodels' numbers, and definitions."""

import pickle

import numpy as np
import pytest
import torch

from lmfit_gpu import LMRegressor
from lmfit_gpu.exceptions import CovarianceWarning

X10 = (np.arange(10.0) / 3)[:, None]
Y10 = np.array([1.02, 1.71, 2.25, 3.31, 3.38, 4.46, 5.61, 5.02, 6.93, 6.21])

# statsmodels 0.15.0: OLS(y, [1, x, sin x]).fit().get_influence(); its residuals are target - prediction
LEVERAGE = [0.5891623431467683, 0.28812552609039377, 0.17950042297222163, 0.19314348724586491, 0.23548421557729593]
LEVERAGE += [0.23946717742723833, 0.20043631776925558, 0.18158058498462218, 0.2859847063376623, 0.6071152184486759]
INTERNAL = [0.2961983026912242, 0.06930931614640598, -0.3822696143967411, 0.38420036199150615, -1.0057322209260997]
INTERNAL += [0.006566668184943715, 1.2476654366438737, -1.3153599693002762, 1.874192354371417, -1.408549284016136]
EXTERNAL = [0.2759611535954758, 0.0641899871027324, -0.3576658487788935, 0.3595111431430876, -1.0066972084311339]
EXTERNAL += [0.006079572119759963, 1.309909823761951, -1.4035310321624606, 2.4583217154702304, -1.5405272625598183]
COOK = [0.041938086727778795, 0.000648097413407457, 0.010656274937323023, 0.011778176124980924, 0.10385294550768832]
COOK += [4.5258163022067734e-06, 0.13007636442100262, 0.12795624129141572, 0.4689670865890452, 1.0219478925630123]
DURBIN_WATSON = 3.3238019415579467


def wavy(x, a, b, c):
    return a + b * x + c * np.sin(x)


def wavy_torch(x, a, b, c):
    return a + b * x + c * torch.sin(x)


@pytest.mark.parametrize("model", [wavy, wavy_torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("chunk_rows", ["auto", 3])
def test_a_linear_model_has_the_influence_of_statsmodels(model, chunk_rows):
    est = LMRegressor(model, p0=[0, 0, 0], chunk_rows=chunk_rows).fit(X10, Y10)
    found = est.diagnostics()
    np.testing.assert_allclose(found.leverage, LEVERAGE, rtol=1e-8)
    np.testing.assert_allclose(-found.standardised, INTERNAL, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(-found.studentised, EXTERNAL, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.cooks_distance, COOK, rtol=1e-3, atol=1e-8)
    assert found.durbin_watson == pytest.approx(DURBIN_WATSON, rel=1e-7)
    np.testing.assert_allclose(found.fitted, est.predict(X10), rtol=1e-13)
    np.testing.assert_allclose(found.residual, est.predict(X10) - Y10, atol=1e-14)
    np.testing.assert_array_equal(found.weighted, found.residual)


def test_studentised_residuals_are_those_of_a_fit_without_the_row():
    """Exactly so for a linear model: the prediction error of a row left out, over its standard error."""
    est = LMRegressor(wavy_torch, p0=[0, 0, 0]).fit(X10, Y10)
    others = np.arange(10) != 8
    left_out = LMRegressor(wavy_torch, p0=[0, 0, 0]).fit(X10[others], Y10[others])
    mean, std = left_out.predict(X10[8:9], return_std=True)
    expected = (mean - Y10[8:9]) / np.sqrt(std**2 + left_out.result_.s2)
    assert est.diagnostics().studentised[8] == pytest.approx(expected[0], rel=1e-8)


def test_weights():
    """sigma divides; a frequency is rows as often, of which each has the leverage of one."""
    sigma, times = 0.1 + 0.05 * np.arange(10), np.arange(10) % 3 + 1
    once = LMRegressor(wavy_torch, p0=[0, 0, 0]).fit(X10, Y10, sample_weight=times, sigma=sigma).diagnostics()
    index = np.repeat(np.arange(10), times)
    often = LMRegressor(wavy_torch, p0=[0, 0, 0]).fit(X10[index], Y10[index], sigma=sigma[index]).diagnostics()
    for name in ("residual", "leverage", "standardised", "studentised", "cooks_distance"):
        np.testing.assert_allclose(getattr(once, name)[index], getattr(often, name), rtol=1e-7)
    assert (times * once.leverage).sum() == pytest.approx(3, rel=1e-10)
    np.testing.assert_allclose(once.weighted, once.residual / sigma * np.sqrt(times), rtol=1e-12)


def test_constraints_leave_the_leverage_of_what_is_free():
    fixed = LMRegressor(wavy_torch, p0=[0, 0, 0.2], fixed=["c"]).fit(X10, Y10)
    assert fixed.diagnostics().leverage.sum() == pytest.approx(2, rel=1e-9)
    tied = LMRegressor(wavy_torch, p0=[0, 0, 0], tied={"c": lambda b: 0.1 * b}).fit(X10, Y10)
    assert tied.diagnostics().leverage.sum() == pytest.approx(2, rel=1e-9)
    with pytest.warns(CovarianceWarning):
        double = LMRegressor(lambda x, a, b, c: a + b * x + c * x, p0=[0, 0, 0]).fit(X10, Y10)
    assert double.diagnostics().leverage.sum() == pytest.approx(2, rel=1e-9)


def test_a_penalty_lowers_the_leverage():
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, size=(60, 1))
    target = np.sin(x[:, 0]) + 0.1 * rng.normal(size=60)
    est = LMRegressor(hidden_layer_sizes=(3,), alpha=1e-2, random_state=0).fit(x, target)
    assert est.diagnostics().leverage.sum() == pytest.approx(60 - est.result_.dof, rel=1e-5)


def test_several_outputs():
    def both(x, a, b):
        return torch.stack((a + b * x, a - b * x), dim=1)

    targets = np.stack((Y10, 2 - Y10), axis=1)
    found = LMRegressor(both, p0=[0, 1]).fit(X10, targets).diagnostics()
    assert found.leverage.shape == found.fitted.shape == (10, 2)
    assert found.durbin_watson.shape == (2,)
    e = found.residual[:, 1]
    assert found.durbin_watson[1] == pytest.approx((np.diff(e) ** 2).sum() / (e**2).sum(), rel=1e-12)


def test_residual_callables_and_coupled_models():
    alone = LMRegressor(residual=lambda theta, x, y: x - theta[0], p0=[1.0]).fit(X10).diagnostics()
    assert alone.fitted is None
    np.testing.assert_allclose(alone.leverage, 0.1, rtol=1e-8)
    coupled = LMRegressor(lambda x, a, b: np.cumsum(a + b * x), p0=[1, 1]).fit(X10, np.cumsum(Y10)).diagnostics()
    assert coupled.leverage.sum() == pytest.approx(2, rel=1e-8)


def test_what_is_not_known_is_nan():
    def spike(x, a, b):
        return a + b * (x > 2.9)

    found = LMRegressor(spike, p0=[1, 1]).fit(X10, Y10).diagnostics()
    assert found.leverage[9] == pytest.approx(1)
    assert np.isnan([found.standardised[9], found.studentised[9], found.cooks_distance[9]]).all()
    assert np.isfinite(found.studentised[:9]).all()
    with pytest.warns(CovarianceWarning):
        none = LMRegressor(wavy, p0=[0, 0, 0]).fit(X10[:3], Y10[:3]).diagnostics()
    assert np.isnan(none.standardised).all()


def test_the_data_may_be_given_again():
    est = LMRegressor(wavy, p0=[0, 0, 0]).fit(X10, Y10)
    other = pickle.loads(pickle.dumps(est))
    with pytest.raises(ValueError, match="has no data"):
        other.diagnostics()
    np.testing.assert_allclose(other.diagnostics(X10, Y10).leverage, est.diagnostics().leverage, rtol=1e-12)


def test_refusals():
    with pytest.raises(ValueError, match="diagnostics: leverage and studentised residuals are those of least squares"):
        LMRegressor(wavy, p0=[0, 0, 0], loss="huber").fit(X10, Y10).diagnostics()


@pytest.mark.parametrize("columns", [1, 2])
def test_tensors_have_the_shapes_of_arrays(columns):
    """A tensor's size is a method: targets (n, 1) gave fitted values (n, n)."""
    y = np.stack([Y10 * (k + 1) for k in range(columns)], axis=1)
    arrays = LMRegressor(torch.nn.Linear(1, columns).double()).fit(X10, y).diagnostics()
    est = LMRegressor(torch.nn.Linear(1, columns).double()).fit(torch.from_numpy(X10), torch.from_numpy(y))
    found = est.diagnostics()
    assert found.fitted.shape == found.leverage.shape == (10, columns)
    np.testing.assert_allclose(found.fitted, arrays.fitted, rtol=1e-6)
    assert "p0" in LMRegressor(wavy, p0=torch.zeros(3)).fit(X10, Y10).report()
