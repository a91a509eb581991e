"""What the displays draw of real fits is what the estimator says: bands, diagnostics, profiles, maps."""

import pickle

import matplotlib as mpl
import numpy as np
import pytest
import torch
from scipy import stats

from lmfit_gpu import LMRegressor
from lmfit_gpu.datasets import load_nist
from lmfit_gpu.plotting import ConvergenceDisplay, FitDisplay, ProfileDisplay, ResidualDisplay


@pytest.fixture(autouse=True)
def plt():
    mpl.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def fitted(name):
    problem = load_nist(name)
    return LMRegressor(problem.model_numpy, p0=problem.starts[1]).fit(problem.X, problem.y)


BOX, ONIONS = fitted("BoxBOD"), fitted("Rat43")


def edges(band):
    vertices = band.get_paths()[0].vertices
    n = (len(vertices) - 3) // 2
    return vertices[1 : n + 1, 0], vertices[1 : n + 1, 1], vertices[n + 2 : -1, 1][::-1]


def test_bands_are_the_prediction_intervals():
    display = FitDisplay.from_estimator(ONIONS, level=0.9, n_points=30)
    for kind, band in (("mean", display.mean_bands_[0]), ("observation", display.observation_bands_[0])):
        x, lower, upper = edges(band)
        interval = ONIONS.prediction_interval(x[:, None], level=0.9, kind=kind)
        np.testing.assert_allclose(lower, interval.lower, rtol=1e-12)
        np.testing.assert_allclose(upper, interval.upper, rtol=1e-12)
        np.testing.assert_allclose(display.lines_[0].get_ydata(), interval.prediction, rtol=1e-12)


def line(x, a, b):
    return a + b * x


def test_the_band_of_an_observation_widens_with_sigma(rng):
    x = np.linspace(1, 5, 21)
    sigma = 0.1 * x
    y = line(x, 1, 2) + sigma * rng.normal(size=21)
    est = LMRegressor(line, p0=[1, 1], absolute_sigma=True).fit(x[:, None], y, sigma=sigma)
    display = FitDisplay.from_estimator(est, kind="both", n_points=21)  # at the x of the data
    (_, low, high), (_, lower, upper) = edges(display.mean_bands_[0]), edges(display.observation_bands_[0])
    z = stats.norm.ppf(0.975)
    np.testing.assert_allclose((upper - lower) ** 2 - (high - low) ** 2, (2 * z * sigma) ** 2, rtol=1e-6)


@pytest.mark.parametrize("options", [{"loss": "huber", "f_scale": 0.1}, {"covariance": "robust"}])
def test_without_a_size_of_the_noise_the_band_is_that_of_the_mean(rng, options):
    x = np.linspace(0, 1, 15)[:, None]
    est = LMRegressor(line, p0=[1, 1], **options).fit(x, line(x[:, 0], 1, 2) + 0.1 * rng.normal(size=15))
    display = FitDisplay.from_estimator(est)
    assert (len(display.mean_bands_), len(display.observation_bands_)) == (1, 0)
    with pytest.raises(ValueError, match="kind='observation'"):
        FitDisplay.from_estimator(est, kind="both")


def test_error_bars_of_other_data_are_no_noise_of_the_fit():
    display = FitDisplay.from_estimator(ONIONS, [[2.0], [9.0]], [30.0, 600.0], sigma=[5.0, 50.0], n_points=3)
    x, lower, _ = edges(display.observation_bands_[0])
    interval = ONIONS.prediction_interval(x[:, None], kind="observation")
    np.testing.assert_allclose(lower, interval.lower, rtol=1e-12)
    assert len(display.data_[0].lines[2][0].get_segments()) == 2


def test_modules_and_several_outputs_have_bands(rng):
    x = np.linspace(-1, 1, 30)[:, None]
    y = np.column_stack([x[:, 0], x[:, 0] ** 2]) + 0.1 * rng.normal(size=(30, 2))
    est = LMRegressor(torch.nn.Linear(1, 2).double()).fit(torch.from_numpy(x), torch.from_numpy(y))
    display = FitDisplay.from_estimator(est, n_points=11)
    interval = est.prediction_interval(np.linspace(-1, 1, 11)[:, None], kind="mean")
    for k in range(2):
        np.testing.assert_allclose(edges(display.mean_bands_[k])[1], interval.lower[:, k], rtol=1e-9)


def test_a_frame_gives_no_warning_of_names():
    import pandas as pd

    x = np.linspace(0, 1, 9)
    est = LMRegressor(line, p0=[1, 1]).fit(pd.DataFrame({"t": x}), line(x, 1, 2) + 0.1 * np.cos(30 * x))
    assert FitDisplay.from_estimator(est).ax_.get_xlabel() == "t"


@pytest.mark.parametrize("kind", ["raw", "weighted", "standardised", "studentised"])
def test_residuals_are_the_diagnostics(kind):
    display = ResidualDisplay.from_estimator(ONIONS, kind=kind, against=["fitted", "leverage", "x"])
    told = ONIONS.diagnostics()
    value = np.ravel(told.residual if kind == "raw" else getattr(told, kind))
    places = (np.ravel(told.fitted), np.ravel(told.leverage), load_nist("Rat43").x)
    for panel, place in zip(display.points_, places, strict=True):
        np.testing.assert_allclose(panel[0].get_xydata(), np.column_stack([place, value]), rtol=1e-12)


def test_residuals_after_a_pickle_need_the_data():
    loaded = pickle.loads(pickle.dumps(ONIONS))
    problem = load_nist("Rat43")
    display = ResidualDisplay.from_estimator(loaded, problem.X, problem.y, kind="raw", against="order")
    np.testing.assert_allclose(display.points_[0][0].get_ydata(), ONIONS.predict(problem.X) - problem.y, rtol=1e-9)
    with pytest.raises(ValueError, match="no data"):
        ResidualDisplay.from_estimator(loaded)


def test_residuals_of_several_outputs_and_features(rng):
    X = rng.normal(size=(20, 2))
    Y = X @ np.array([[1.0, -1.0], [0.5, 2.0]]) + 0.1 * rng.normal(size=(20, 2))
    est = LMRegressor(torch.nn.Linear(2, 2).double()).fit(X, Y)
    display = ResidualDisplay.from_estimator(est, kind="raw", against=["x", "order"])
    assert [axes.get_xlabel() for axes in display.axes_] == ["x0", "x1", "row"]
    shown = np.column_stack([panel.get_ydata() for panel in display.points_[0]])
    np.testing.assert_allclose(shown, est.predict(X) - Y, atol=1e-9)


def test_rows_that_the_fit_left_out_are_left_out_of_the_picture(rng):
    x = np.arange(9.0)
    y = line(x, 1, 2) + 0.1 * rng.normal(size=9)
    y[3] = np.nan
    weight = np.ones(9)
    weight[5] = 0
    est = LMRegressor(line, p0=[1, 1], nan_policy="omit").fit(x[:, None], y, sample_weight=weight)
    for given in ((), (x[:, None], y)):
        options = {"sample_weight": weight} if given else {}
        display = ResidualDisplay.from_estimator(est, *given, **options, kind="raw", against="x")
        shown = display.points_[0][0].get_xydata()
        kept = ~np.isin(x, (3, 5))
        np.testing.assert_allclose(shown, np.column_stack([x, est.predict(x[:, None]) - y])[kept], atol=1e-9)


def test_under_a_loss_raw_residuals_are_drawn(rng):
    x = np.arange(12.0)
    y = line(x, 1, 2) + 0.1 * rng.normal(size=12)
    est = LMRegressor(line, p0=[1, 1], loss="soft_l1").fit(x[:, None], y)
    display = ResidualDisplay.from_estimator(est, kind="raw", against="x")
    expected = np.column_stack([x, est.predict(x[:, None]) - y])
    np.testing.assert_allclose(display.points_[0][0].get_xydata(), expected)
    with pytest.raises(ValueError, match="kind: got 'studentised'; under a loss only 'raw'"):
        ResidualDisplay.from_estimator(est)
    with pytest.raises(ValueError, match="X and y: got X alone"):
        ResidualDisplay.from_estimator(est, x[:, None], kind="raw")


def test_residual_callables_are_drawn_in_order(rng):
    angle = np.linspace(0, 5, 20)
    points = np.column_stack([3 * np.cos(angle), 3 * np.sin(angle)]) + 0.05 * rng.normal(size=(20, 2))

    def to_circle(theta, X, y):
        return np.hypot(X[:, 0] - theta[0], X[:, 1] - theta[1]) - theta[2]

    est = LMRegressor(residual=to_circle, p0=[0, 0, 1]).fit(points)
    display = ResidualDisplay.from_estimator(est, kind="raw")
    assert [axes.get_xlabel() for axes in display.axes_] == ["row", "quantile of a normal distribution"]
    np.testing.assert_allclose(display.points_[0][0].get_ydata(), to_circle(est.theta_, points, None), atol=1e-9)


def test_profiles_end_where_the_estimator_says():
    profiles = BOX.profile_likelihood(level=0.9)
    display = ProfileDisplay.from_profile(profiles)
    for k, profile in enumerate(profiles.values()):
        ends = [mark.get_xdata()[0] for mark in display.interval_lines_[2 * k : 2 * k + 2]]
        np.testing.assert_allclose(ends, profiles.intervals[profile.name])
        np.testing.assert_allclose(display.points_[k].get_xydata(), np.column_stack([profile.values, profile.zeta]))
        tops = [mark.get_ydata()[1] for mark in display.interval_lines_[2 * k : 2 * k + 2]]
        t = stats.t.ppf(0.95, 4)
        np.testing.assert_allclose(tops, [-t, t], rtol=0.02)
    again = ProfileDisplay.from_estimator(BOX, ["b2"], level=0.9)
    np.testing.assert_allclose(again.lines_[0].get_ydata(), display.lines_[1].get_ydata(), atol=1e-6)


def test_contours_lie_where_the_sum_of_squares_has_grown_as_f_says():
    display = ProfileDisplay.map_from_estimator(BOX, "b1", "b2", levels=(0.5, 0.8), shape=(25, 31))
    problem = load_nist("BoxBOD")

    def grown(points):
        least = problem.reference.rss
        sums = [np.sum((problem.model_numpy(problem.x, *point) - problem.y) ** 2) for point in points]
        return (np.array(sums) - least) / (least / 4)

    for path, level in zip(display.contours_.get_paths(), (0.5, 0.8), strict=True):
        np.testing.assert_allclose(grown(path.vertices), 2 * stats.f.ppf(level, 2, 4), rtol=0.02)
    for edge, level in zip(display.wald_lines_, (0.5, 0.8), strict=True):
        away = edge.get_xydata() - problem.reference.params
        height = np.einsum("ki,ij,kj->k", away, np.linalg.inv(BOX.covariance_), away)
        np.testing.assert_allclose(height, 2 * stats.f.ppf(level, 2, 4), rtol=1e-6)


def test_the_names_of_a_map_may_come_in_the_other_order():
    display = ProfileDisplay.map_from_estimator(BOX, "b2", "b1", shape=(9, 9))
    widths = np.ptp(display.wald_lines_[0].get_xydata(), axis=0) / BOX.stderr_[::-1]
    assert widths[0] == pytest.approx(widths[1], rel=1e-3)


def test_seconds_of_a_fit_rise():
    display = ConvergenceDisplay.from_estimator(BOX, against="seconds")
    assert (np.diff(display.cost_lines_[0].get_xdata()) > 0).all()


def test_plot_of_results():
    assert isinstance(BOX.profile_likelihood(["b1"]).plot(), ProfileDisplay)
    assert isinstance(BOX.profile_map("b1", "b2", shape=(7, 7)).plot(), ProfileDisplay)
