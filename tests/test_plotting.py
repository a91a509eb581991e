"""The displays draw the numbers they are given, on the axes they are given, and leave nothing behind."""

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure
from scipy import stats
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression

from lmfit_gpu import LMA, LMRegressor, plotting
from lmfit_gpu.datasets import load_nist
from lmfit_gpu.exceptions import BackendUnavailableError
from lmfit_gpu.plotting import (
    ConvergenceDisplay,
    CorrelationDisplay,
    FitDisplay,
    ProfileDisplay,
    ResidualDisplay,
)
from lmfit_gpu.result import IterationRecord


@pytest.fixture(autouse=True)
def plt():
    """Draw without a display, and see that nothing of pyplot is changed but for figures, which are closed."""
    mpl.use("Agg")
    from matplotlib import pyplot

    before = dict(mpl.rcParams)
    yield pyplot
    pyplot.close("all")
    assert dict(mpl.rcParams) == before


@pytest.fixture
def ax():
    """Axes of a figure that pyplot does not know."""
    return Figure().subplots()


def fitted(name="Misra1a", start=1, **fit):
    problem = load_nist(name)
    return LMRegressor(problem.model_numpy, p0=problem.starts[start]).fit(problem.X, problem.y, **fit)


MISRA = fitted()


def drawn(display):
    display.figure_.canvas.draw()  # what a bad number or a missing glyph would break
    return display


def edges(band):
    """Return x, lower and upper of what fill_between drew."""
    vertices = band.get_paths()[0].vertices
    n = (len(vertices) - 3) // 2
    return vertices[1 : n + 1, 0], vertices[1 : n + 1, 1], vertices[n + 2 : -1, 1][::-1]


# ---- FitDisplay


class Interval(NamedTuple):
    prediction: np.ndarray
    lower: np.ndarray
    upper: np.ndarray


class Line:
    """y = 1 + 2x ± (1 + level) for the mean, and a half more times sigma for an observation."""

    def __init__(self, X=None, y=None, sigma=None):
        weights = None if sigma is None else SimpleNamespace(sigma=torch.as_tensor(sigma))
        self._data = None if X is None else SimpleNamespace(X=X, y=y, weights=weights)
        used = {} if sigma is None else {"sigma": "given"}
        self.result_ = SimpleNamespace(used=used, sandwich=None, factor=None)

    def predict(self, X):
        return 1 + 2 * X[:, 0]

    def prediction_interval(self, X, level, kind, sigma=1.0):
        half = 1 + level + (0.5 * np.asarray(sigma) if kind == "observation" else 0)
        f = self.predict(X)
        return Interval(f, f - half, f + half)


X5 = np.array([[3.0], [0.0], [1.0], [4.0], [2.0]])
Y5 = np.array([7.5, 0.5, 3.5, 8.5, 5.5])


def test_fit_curve_is_the_prediction_over_the_range_of_the_data():
    display = FitDisplay.from_estimator(MISRA, kind=None, n_points=57)
    x, y = display.lines_[0].get_data()
    assert (len(x), x[0], x[-1]) == (57, MISRA._data.X.min(), MISRA._data.X.max())
    np.testing.assert_allclose(y, MISRA.predict(x[:, None]), rtol=1e-14)
    np.testing.assert_array_equal(display.data_[0].get_xydata(), np.column_stack([MISRA._data.X, MISRA._data.y]))
    assert display.mean_bands_ == display.observation_bands_ == []
    assert [text.get_text() for text in display.ax_.get_legend().get_texts()] == ["fit", "data"]


@pytest.mark.parametrize("kind", ["mean", "observation", "both"])
def test_bands_have_the_edges_of_the_intervals(kind):
    display = FitDisplay.from_estimator(Line(X5, Y5), kind=kind, level=0.5, n_points=9)
    halves = {"mean": 1.5, "observation": 2.0}
    for which, bands in (("mean", display.mean_bands_), ("observation", display.observation_bands_)):
        assert len(bands) == (kind in (which, "both"))
        for band in bands:
            x, lower, upper = edges(band)
            np.testing.assert_allclose(x, np.linspace(0, 4, 9))
            np.testing.assert_allclose(lower, 1 + 2 * x - halves[which])
            np.testing.assert_allclose(upper, 1 + 2 * x + halves[which])
            assert band.get_label().startswith("50 % band of ")


def test_error_bars_are_sigma_and_the_band_takes_sigma_between_the_rows():
    sigma = np.array([0.4, 0.1, 0.2, 0.5, 0.3])  # 0.1 (1 + x)
    display = drawn(FitDisplay.from_estimator(Line(X5, Y5, sigma), kind="observation", level=0.5, n_points=9))
    x, lower, _ = edges(display.observation_bands_[0])
    np.testing.assert_allclose(lower, 1 + 2 * x - 1.5 - 0.05 * (1 + x))
    bars = display.data_[0].lines[2][0].get_segments()
    np.testing.assert_allclose([bar[:, 1] for bar in bars], np.column_stack([Y5 - sigma, Y5 + sigma]))


def test_x_alone_says_how_far_the_curve_goes():
    display = FitDisplay.from_estimator(Line(X5, Y5), np.array([[-1.0], [9.0]]), kind=None)
    assert list(display.lines_[0].get_xdata()[[0, -1]]) == [-1, 9]
    assert len(display.data_[0].get_xdata()) == 5
    display = FitDisplay.from_estimator(Line(), np.array([[-1.0], [9.0]]), kind=None)
    assert display.data_ == []


def test_other_data_are_drawn_where_they_are_given():
    display = FitDisplay.from_estimator(MISRA, X5 + 100, Y5, sigma=0.5, kind=None)
    np.testing.assert_array_equal(display.data_[0].lines[0].get_xydata(), np.column_stack([X5 + 100, Y5]))


def test_any_regressor_is_drawn_without_bands():
    display = FitDisplay.from_estimator(LinearRegression().fit(X5, 1 + 2 * X5[:, 0]), X5, Y5)
    np.testing.assert_allclose(display.lines_[0].get_ydata()[[0, -1]], [1, 9])
    assert display.mean_bands_ == []


def test_names_of_columns_become_labels():
    import pandas as pd

    frame = pd.DataFrame({"pressure": X5[:, 0]})
    est = LMRegressor(lambda x, a, b: a + b * x, p0=[1, 1]).fit(frame, Y5)
    assert FitDisplay.from_estimator(est, kind=None).ax_.get_xlabel() == "pressure"


def test_several_outputs_have_a_curve_and_a_band_each(ax):
    grid = np.linspace(0, 1, 5)
    two = np.column_stack([grid, 1 - grid])
    display = FitDisplay(
        grid=grid, prediction=two, mean_band=(two - 0.1, two + 0.2), x=grid, y=two + 0.05, sigma=np.full(5, 0.3)
    ).plot(ax)
    for k in range(2):
        np.testing.assert_array_equal(display.lines_[k].get_ydata(), two[:, k])
        np.testing.assert_allclose(edges(display.mean_bands_[k])[1], two[:, k] - 0.1)
        np.testing.assert_allclose(display.data_[k].lines[0].get_ydata(), two[:, k] + 0.05)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["95 % band of the mean", "fit, output 0", "fit, output 1", "data ± σ"]


def test_logarithmic_axes_are_smooth_at_both_ends(ax):
    x = np.geomspace(1e-3, 1e3, 20)
    ax.set(xscale="log", yscale="log")
    est = Line(x[:, None], 1 + 2 * x)
    display = drawn(FitDisplay.from_estimator(est, ax=ax, level=0.95))  # lower edges below zero
    grid = display.lines_[0].get_xdata()
    assert len(grid) == 400 and (np.diff(grid) > 0).all()
    assert np.diff(np.log10(grid)).max() < 0.05  # of 6 decades
    assert np.diff(grid).max() < 0.01 * 1e3
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert np.isfinite(ax.get_ylim()).all() and ax.get_ylim()[0] > 0


def test_what_is_not_finite_in_a_band_is_left_out_and_said(ax):
    grid = np.arange(4.0)
    half = np.array([np.inf, 1.0, 1.0, np.nan])
    display = FitDisplay(grid=grid, prediction=grid, mean_band=(grid - half, grid + half)).plot(ax)
    assert list(edges(display.mean_bands_[0])[0]) == [1, 2]
    assert np.isfinite(ax.get_ylim()).all()
    nowhere = np.full(4, np.inf)
    display = drawn(FitDisplay(grid=grid, prediction=grid, observation_band=(-nowhere, nowhere)).plot(ax))
    assert display.observation_bands_[0].get_label() == "95 % band of an observation: not determined"


def test_a_band_that_explodes_leaves_the_picture(ax):
    grid = np.linspace(0, 1, 11)
    half = 1e3 * (1 - grid) ** 9
    display = FitDisplay(grid=grid, prediction=grid, mean_band=(grid - half, grid + half)).plot(ax)
    assert ax.get_ylim() == (-1, 2)
    assert edges(display.mean_bands_[0])[2][0] == 1e3
    narrow = Figure().subplots()
    FitDisplay(grid=grid, prediction=grid, mean_band=(grid - 0.5, grid + 0.5)).plot(narrow)
    assert narrow.get_ylim() == pytest.approx((-0.6, 1.6))  # matplotlib's margin of 5 %


def test_predictions_are_drawn_in_the_order_of_x():
    x, f = X5[:, 0], 1 + 2 * X5[:, 0]
    display = FitDisplay.from_predictions(x, Y5, f, mean_band=(f - 1, f + 1), sigma=0.1)
    np.testing.assert_array_equal(display.lines_[0].get_xydata(), [[k, 1 + 2 * k] for k in range(5)])
    np.testing.assert_array_equal(edges(display.mean_bands_[0])[2], 2 + 2 * np.arange(5.0))


def test_rows_without_numbers_are_not_drawn():
    X = X5.copy()
    X[0] = np.nan
    display = drawn(FitDisplay.from_estimator(Line(), X, np.where(np.arange(5) == 1, np.nan, Y5)))
    assert list(display.lines_[0].get_xdata()[[0, -1]]) == [0, 4]


def test_one_place_has_a_curve_about_it():
    display = FitDisplay.from_estimator(Line(np.full((3, 1), 2.0), np.zeros(3)), kind=None)
    assert list(display.lines_[0].get_xdata()[[0, -1]]) == [1, 3]


def test_styles_go_to_their_artists_by_long_and_short_names(ax):
    display = FitDisplay.from_estimator(
        Line(X5, Y5),
        ax=ax,
        line_kwargs={"lw": 7, "c": "red"},
        scatter_kwargs={"marker": "s", "label": "mine"},
        fill_kwargs={"fc": "green", "alpha": 0.9},
    )
    assert (display.lines_[0].get_linewidth(), display.lines_[0].get_color()) == (7, "red")
    assert (display.data_[0].get_marker(), display.data_[0].get_label()) == ("s", "mine")
    assert tuple(display.mean_bands_[0].get_facecolor()[0]) == to_rgba("green", 0.9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "prediction"}, r"kind: got 'prediction'; one of 'auto', 'both', 'mean', 'observation', None"),
        ({"level": 95}, "level: got 95; a number between 0 and 1"),
        ({"n_points": 1}, "n_points: got 1; a whole number >= 2"),
        ({"y": Y5}, "X: y is given without it"),
        ({"sigma": 1.0}, "sigma: given without X and y"),
        ({"X": np.zeros((5, 3)), "y": Y5}, r"X: got 3 features; a curve is drawn over one.*ResidualDisplay"),
        ({"X": X5[:, 0], "y": Y5}, r"X: got an array of shape \(5,\)"),
        ({"X": X5, "y": Y5[:3]}, r"x and y: got shapes \(5,\) and \(3,\)"),
        ({"X": X5, "y": Y5, "sigma": [1, 2]}, r"sigma: got shape \(2,\)"),
        ({"X": X5, "y": Y5 * 1j}, "y: got complex numbers"),
        ({"X": X5 * np.nan, "y": Y5}, "X: got no finite number"),
    ],
)
def test_fit_refuses_bad_arguments_before_it_makes_a_figure(plt, options, message):
    with pytest.raises(ValueError, match=message):
        FitDisplay.from_estimator(Line(X5, Y5), **options)
    assert plt.get_fignums() == []


def test_without_data_it_says_what_to_give():
    with pytest.raises(ValueError, match=r"X: the estimator holds no data .* give X and y"):
        FitDisplay.from_estimator(Line())
    with pytest.raises(ValueError, match="y: the fit had none"):
        FitDisplay.from_estimator(Line(X5, None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prediction": [1, 2]}, r"grid and prediction: got shapes \(3,\) and \(2,\)"),
        ({"mean_band": [0, 1, 2]}, r"mean_band: got list; a pair"),
        ({"mean_band": ([1, 2], [3, 4])}, r"mean_band: got shapes \(2,\) and \(2,\); \(3,\) is expected"),
        ({"x": [1, 2]}, "x and y: got x alone"),
        ({"sigma": 1.0}, "sigma: given without x and y"),
        ({"prediction": ["a", "b", "c"]}, "prediction: got list that is not numbers"),
    ],
)
def test_the_constructor_of_fit_names_what_is_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        FitDisplay(**({"grid": [1, 2, 3], "prediction": [1, 2, 3]} | options))


def test_what_is_not_fitted_is_said_by_scikit_learn():
    for display in (FitDisplay, ConvergenceDisplay, CorrelationDisplay):
        with pytest.raises(NotFittedError):
            display.from_estimator(LMRegressor())


# ---- ResidualDisplay


class Diagnosed:
    """An estimator of two features whose diagnostics are numbers that can be told apart."""

    residual = np.array([0.1, -0.4, 0.2, -0.1, 0.3, np.nan])
    _data = SimpleNamespace(X=np.column_stack([np.arange(6.0), 10 - np.arange(6.0)]))

    def diagnostics(self, X=None, y=None, sample_weight=None, sigma=None):
        given = sum(part is not None for part in (X, y, sample_weight, sigma))
        r = self.residual + given
        return SimpleNamespace(
            fitted=np.linspace(5, 6, 6),
            leverage=np.full(6, 0.3),
            residual=r,
            weighted=2 * r,
            standardised=3 * r,
            studentised=4 * r,
        )


@pytest.mark.parametrize(("kind", "factor"), [("raw", 1), ("weighted", 2), ("standardised", 3), ("studentised", 4)])
def test_residuals_of_each_kind_against_fitted_values_and_normal_quantiles(kind, factor):
    display = drawn(ResidualDisplay.from_estimator(Diagnosed(), kind=kind))
    scatter, normal = (panel[0] for panel in display.points_)
    np.testing.assert_allclose(scatter.get_ydata(), factor * Diagnosed.residual)
    np.testing.assert_allclose(scatter.get_xdata(), np.linspace(5, 6, 6))
    (quantiles, ordered), (slope, intercept, _) = stats.probplot(factor * Diagnosed.residual[:5])
    shown = normal.get_xydata()[:5]
    np.testing.assert_allclose(shown[np.argsort(shown[:, 1])], np.column_stack([quantiles, ordered]))
    ends = display.zero_lines_[1].get_xydata()
    np.testing.assert_allclose(ends[:, 1], intercept + slope * quantiles[[0, -1]])
    assert display.axes_[0].get_ylabel() in display.axes_[1].get_ylabel()
    n_lines = {"raw": 2, "weighted": 2, "standardised": 4, "studentised": 4}[kind]  # with ±1.96
    assert len(display.axes_[0].lines) == n_lines


def test_residuals_against_everything():
    display = ResidualDisplay.from_estimator(Diagnosed(), against=["x", "order", "leverage"], kind="raw")
    labels = [axes.get_xlabel() for axes in display.axes_]
    assert labels == ["x0", "x1", "row", "leverage"]
    places = [panel[0].get_xdata() for panel in display.points_]
    np.testing.assert_allclose(places, [np.arange(6), 10 - np.arange(6), np.arange(6), np.full(6, 0.3)])


def test_the_largest_residuals_have_the_number_of_their_row():
    display = ResidualDisplay.from_estimator(Diagnosed(), against="order")
    assert [label.get_text() for label in display.labels_] == ["1", "4", "2"]
    assert display.labels_[0].xy == (1, 4 * -0.4)
    assert ResidualDisplay.from_estimator(Diagnosed(), n_labelled=0).labels_ == []


def test_data_given_reach_the_diagnostics():
    X, y = Diagnosed._data.X + 1, np.zeros(6)
    display = ResidualDisplay.from_estimator(
        Diagnosed(), X, y, sample_weight=np.ones(6), sigma=1.0, kind="raw", against="x"
    )
    np.testing.assert_allclose(display.points_[0][0].get_xydata(), np.column_stack([X[:, 0], Diagnosed.residual + 4]))


def test_residuals_of_predictions_are_prediction_minus_data(ax):
    truth, told = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), np.array([[1.5, 2.0], [3.0, 3.0], [5.0, 8.0]])
    display = ResidualDisplay.from_predictions(truth, told, against="fitted", ax=ax)
    assert [line.get_label() for line in display.points_[0]] == ["output 0", "output 1"]
    np.testing.assert_allclose(display.points_[0][1].get_xydata(), [[2, 0], [3, -1], [8, 2]])
    assert [label.get_text() for label in display.labels_] == ["2", "1", "0"]
    assert display.figure_ is ax.figure


def test_one_axes_is_divided_and_several_are_taken_as_they_are():
    figure = Figure()
    whole = figure.subplots()
    display = drawn(ResidualDisplay.from_predictions([1, 2, 3.5], [1.0, 2.5, 3], ax=whole))
    assert figure.axes == [whole, *display.axes_]
    assert not whole.axison
    four = Figure().subplots(2, 2)
    display = ResidualDisplay.from_predictions([1, 2, 3.5], [1.0, 2.5, 3], ax=four[0])
    assert list(display.axes_) == list(four[0])
    with pytest.raises(ValueError, match="ax: got 4 axes; one, to be divided, or 2 are expected"):
        ResidualDisplay.from_predictions([1, 2], [1, 2], ax=four)
    free = Figure().add_axes((0, 0, 1, 1))
    with pytest.raises(ValueError, match="ax: got one that stands in no grid"):
        ResidualDisplay.from_predictions([1, 2], [1, 2], ax=free)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "pearson"}, "kind: got 'pearson'; one of 'raw', 'weighted', 'standardised', 'studentised'"),
        ({"against": "time"}, "against: got 'time'; one of 'fitted', 'x', 'order', 'leverage', 'normal'"),
        ({"against": []}, "against: got none"),
        ({"n_labelled": -1}, "n_labelled: got -1"),
        ({"n_labelled": 1.5}, "n_labelled: got 1.5"),
    ],
)
def test_residuals_refuse_bad_arguments(plt, options, message):
    with pytest.raises(ValueError, match=message):
        ResidualDisplay.from_estimator(Diagnosed(), **options)
    assert plt.get_fignums() == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ResidualDisplay(residual=[1, 2]).plot(against="fitted"), "against: got 'fitted', .* without fitted"),
        (lambda: ResidualDisplay(residual=[1, 2]).plot(against="x"), "against: got 'x', and .* without X"),
        (lambda: ResidualDisplay(residual=[]), r"residual: got shape \(0,\)"),
        (lambda: ResidualDisplay(residual=[1, 2], leverage=[1]), r"leverage: got shape \(1,\)"),
        (lambda: ResidualDisplay(residual=[1, 2], X=[1, 2, 3]), "X: got 3 rows for 2"),
        (lambda: ResidualDisplay(residual=[1, 2], X=[1, 2], x_names=["a", "b"]), "x_names: got 2 for 1"),
        (lambda: ResidualDisplay.from_predictions([1, 2], [1, 2, 3]), "y_true and y_pred: got shapes"),
    ],
)
def test_residuals_name_what_is_missing(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- ConvergenceDisplay


def record(n, cost, trial_cost=None, **more):
    told = {"gain_ratio": 1.0, "damping": 10.0**-n, "predicted_reduction": 1.0, "seconds": 0.5 * n} | more
    accepted = trial_cost is None
    return IterationRecord(
        n_iter=n,
        cost=cost,
        trial_cost=cost if accepted else trial_cost,
        scaled_norm=1.0,
        gradient_cosine=0.1,
        accepted=accepted,
        accelerated=False,
        jac="autograd",
        **told,
    )


def test_convergence_draws_every_trial_from_the_cost_at_the_start():
    problem = load_nist("Thurber")
    est = fitted("Thurber", start=0)
    display = ConvergenceDisplay.from_estimator(est)
    history = est.result_.history
    at, cost = display.cost_lines_[0].get_data()
    np.testing.assert_array_equal(at, range(len(history) + 1))
    np.testing.assert_array_equal(cost[1:], [r.cost for r in history])
    residual = problem.model_numpy(problem.x, *problem.starts[0]) - problem.y
    assert cost[0] == pytest.approx(residual @ residual / 2, rel=1e-12)
    refused = [r for r in history if not r.accepted]
    assert 0 < len(refused) == sum(len(line.get_xdata()) for line in display.rejected_lines_ + display.beyond_lines_)
    assert display.ax_.get_yscale() == "log"
    np.testing.assert_array_equal(
        display.damping_lines_[0].get_ydata(), [r.damping if r.damping > 0 else np.nan for r in history]
    )


def test_the_start_of_a_gain_is_worked_out_and_of_a_refusal_known():
    assert ConvergenceDisplay(records=[record(1, 3.0, gain_ratio=0.5, predicted_reduction=8.0)]).start_cost == 7
    assert ConvergenceDisplay(records=[record(1, 3.0, 4.0)]).start_cost == 3
    assert np.isnan(ConvergenceDisplay(records=[]).start_cost)


def test_convergence_against_seconds_and_both():
    records = [record(n, 100.0 / 4**n) for n in range(1, 5)]
    display = ConvergenceDisplay.from_records(records, against="both")
    assert display.axes_.shape == (2, 2)
    np.testing.assert_array_equal(display.cost_lines_[1].get_xdata(), [0, 0.5, 1, 1.5, 2])
    np.testing.assert_array_equal(display.damping_lines_[1].get_xdata(), [0.5, 1, 1.5, 2])
    assert [axes.get_xlabel() for axes in display.axes_[1]] == ["iteration (trial)", "seconds since the fit began"]
    with pytest.raises(ValueError, match="against: got 'seconds', which these records do not hold"):
        ConvergenceDisplay.from_records([record(1, 1.0, seconds=float("nan"))], against="seconds")


def test_refused_trials_stand_at_their_cost_or_on_the_edge():
    records = [record(1, 100.0), record(2, 100.0, 110.0), record(3, 100.0, 1e9), record(4, 1.0)]
    records += [record(5, 1.0, float("nan")), record(6, 1.0, float("inf"))]
    display = drawn(ConvergenceDisplay(records=records).plot())
    np.testing.assert_array_equal(display.rejected_lines_[0].get_xydata(), [[2, 110]])
    np.testing.assert_array_equal(display.beyond_lines_[0].get_xdata(), [3, 5, 6])
    assert display.axes_[0, 0].get_ylim()[1] < 1e3
    labels = {text.get_text() for text in display.axes_[0, 0].get_legend().get_texts()}
    assert labels == {"cost", "trial refused", "refused, beyond this axis"}


@pytest.mark.parametrize(
    ("costs", "scale"),
    [
        ([100, 5, 1], "log"),
        ([3, 2, 1], "linear"),
        ([5, -1, -8], "linear"),
        ([-1, -5, -8], "linear"),
        ([1, 0, 0], "log"),
    ],
)
def test_costs_are_logarithmic_where_they_span_a_decade_above_zero(costs, scale):
    records = [record(n, c, predicted_reduction=0.0) for n, c in enumerate(map(float, costs), 1)]
    display = ConvergenceDisplay(records=records).plot()
    assert display.ax_.get_yscale() == scale
    shown = display.cost_lines_[0].get_ydata()[1:]
    np.testing.assert_array_equal(shown, [c if c or scale == "linear" else np.nan for c in costs])
    low, high = display.ax_.get_ylim()
    assert all(low < c < high for c in shown[np.isfinite(shown)])


def test_zeros_are_marked_at_the_lower_edge():
    records = [record(1, 1.0, predicted_reduction=0.0), record(2, 0.0, damping=0.0), record(3, 0.0, damping=0.0)]
    display = ConvergenceDisplay(records=records).plot()
    marks = {line.get_label(): list(line.get_xdata()) for axes in display.axes_[:, 0] for line in axes.lines}
    assert marks["cost 0"] == marks["λ = 0: full Gauss-Newton step"] == [2, 3]


def test_excess_over_the_least_cost():
    records = [record(1, 12.0), record(2, 12.0, 15.0), record(3, 10.5), record(4, 10.0), record(5, 10.0, 10.0)]
    display = ConvergenceDisplay(records=records).plot(excess=True)
    np.testing.assert_allclose(display.cost_lines_[0].get_ydata(), [3, 2, 2, 0.5, np.nan, np.nan])
    assert display.ax_.get_ylabel() == "cost − least cost"


def test_rows_held_out_have_a_line_of_their_own():
    records = [record(n, 10.0 / n, held_out_cost=3.0 + n) for n in range(1, 4)]
    display = ConvergenceDisplay(records=records).plot()
    np.testing.assert_array_equal(display.held_out_lines_[0].get_ydata(), [np.nan, 4, 5, 6])
    assert ConvergenceDisplay(records=[record(1, 1.0)]).plot().held_out_lines_ == []


@pytest.mark.parametrize("n", [0, 1, 200])
def test_no_trial_one_trial_and_many(n):
    records = [record(k, 1.0 + 1.0 / k, damping=1e-3) for k in range(1, n + 1)]
    display = ConvergenceDisplay(records=records).plot(against="both")
    assert sum(len(line.get_xdata()) for line in display.cost_lines_) == (2 * (n + 1) if n else 0)


def test_the_steps_of_lma_are_drawn():
    torch.manual_seed(0)
    lma = LMA(torch.nn.Linear(1, 1).double())
    x = torch.linspace(-1, 1, 8, dtype=torch.float64)[:, None]
    records = []
    for _ in range(3):
        lma.step(x, 3 * x + 1)
        records.append(lma.record)
    display = ConvergenceDisplay.from_records(records)
    assert len(display.cost_lines_[0].get_xdata()) == 4


def test_convergence_refuses_bad_arguments(plt):
    with pytest.raises(TypeError, match="records: got float among them; IterationRecord is expected"):
        ConvergenceDisplay(records=[1.0])
    with pytest.raises(ValueError, match="against: got 'time'; one of 'iteration', 'seconds', 'both'"):
        ConvergenceDisplay(records=[]).plot(against="time")
    with pytest.raises(TypeError, match="line_kwargs: got str; a dict"):
        ConvergenceDisplay(records=[]).plot(line_kwargs="red")
    assert plt.get_fignums() == []


# ---- CorrelationDisplay


def test_correlations_without_the_fixed_ones():
    problem = load_nist("Hahn1")
    est = LMRegressor(problem.model_numpy, p0=problem.starts[1], fixed=["b2", "b4"]).fit(problem.X, problem.y)
    display = CorrelationDisplay.from_estimator(est)
    kept = [0, 2, 4, 5, 6]
    sd = est.stderr_[kept]
    expected = est.covariance_[np.ix_(kept, kept)] / np.outer(sd, sd)
    np.testing.assert_allclose(display.image_.get_array(), expected, atol=1e-12)
    assert [tick.get_text() for tick in display.ax_.get_yticklabels()] == [f"b{k + 1}" for k in kept]
    assert display.image_.get_clim() == (-1, 1)
    assert display.text_[0, 0].get_text() == "1"
    assert display.text_[1, 0].get_text() == f"{expected[1, 0]:.2f}".replace("-", "−")


def test_what_has_no_correlation_is_grey():
    matrix = [[1, np.nan, -0.999999], [np.nan, np.nan, np.nan], [-0.999999, np.nan, 1]]
    display = drawn(CorrelationDisplay(correlation=matrix, names=["a", "long name", "c"]).plot())
    image = display.image_
    assert to_hex(image.cmap(image.norm(image.get_array()))[1, 1]) == to_hex("0.82")
    assert [text.get_text() for text in display.text_.ravel()] == ["1", "", "<−0.9999", "", "", "", "<−0.9999", "", "1"]
    dark = image.cmap(image.norm(-0.999999))
    assert max(dark[:3]) < 0.5 and display.text_[0, 2].get_color() == "w"


@pytest.mark.parametrize("n", [2, 8, 13])
def test_names_are_within_the_figure(n):
    display = drawn(CorrelationDisplay(correlation=np.eye(n), names=[f"width {j}" for j in range(n)]).plot())
    box, page = display.ax_.get_tightbbox(), display.figure_.bbox
    assert box.x0 > 0 and box.y0 > 0 and box.y1 < page.y1
    assert display.colorbar_.ax.get_tightbbox().x1 < page.x1


@pytest.mark.parametrize("n", [13, 41])
def test_many_parameters_have_no_numbers_and_at_last_no_names(n):
    display = CorrelationDisplay(correlation=np.eye(n), names=[f"p{j}" for j in range(n)]).plot(colorbar=False)
    assert display.text_ is None and display.colorbar_ is None
    labels = [tick.get_text() for tick in display.ax_.get_xticklabels()]
    assert ("p12" in labels) == (n == 13)
    small = CorrelationDisplay(correlation=np.eye(n), names=range(n)).plot(include_values=True)
    assert small.text_.shape == (n, n)


def test_correlations_refuse_bad_arguments(plt):
    with pytest.raises(ValueError, match=r"correlation and names: got shape \(2, 2\) and 1 names"):
        CorrelationDisplay(correlation=np.eye(2), names=["a"])
    with pytest.raises(ValueError, match="correlation: got values beyond ±1; a covariance"):
        CorrelationDisplay(correlation=4 * np.eye(2), names=["a", "b"])
    with pytest.raises(TypeError, match="im_kwargs: got str"):
        CorrelationDisplay(correlation=np.eye(1), names=["a"]).plot(im_kwargs="red")
    none = SimpleNamespace(result_=MISRA.result_, correlation=lambda: None)
    with pytest.raises(ValueError, match="keeps no covariance"):
        CorrelationDisplay.from_estimator(none)
    assert plt.get_fignums() == []


# ---- ProfileDisplay


def profile(name="b", bend=0.0, **more):
    """ζ = u + bend u², u = (b − 10)/2: b̂ = 10 with a standard error of 2."""
    values = np.linspace(4, 16, 13)
    u = (values - 10) / 2
    ends = [10 + 2 * u_at(bend, z) for z in (-2.0, 2.0)]
    told = {"stderr": 2.0, "interval": tuple(ends), "reached": (True, True)} | more
    return SimpleNamespace(name=name, estimate=10.0, level=0.95, values=values, zeta=u + bend * u**2, **told)


def u_at(bend, z):
    return z if bend == 0 else (-1 + np.sqrt(1 + 4 * bend * z)) / (2 * bend)


def test_a_profile_is_drawn_with_its_interval_and_the_straight_line():
    display = ProfileDisplay.from_profile(profile(bend=0.05))
    fine, zeta = display.lines_[0].get_data()
    u = (fine - 10) / 2
    np.testing.assert_allclose(zeta, u + 0.05 * u**2, atol=0.01)  # a cubic through 13 points
    np.testing.assert_array_equal(display.points_[0].get_xdata(), np.linspace(4, 16, 13))
    straight = display.wald_lines_[0].get_xydata()
    np.testing.assert_allclose(straight[:, 1], (straight[:, 0] - 10) / 2)
    for line, z in zip(display.interval_lines_, (-2, 2), strict=True):
        assert line.get_xdata()[0] == line.get_xdata()[1] == 10 + 2 * u_at(0.05, z)
        assert line.get_ydata()[1] == pytest.approx(z, abs=0.01)
    assert display.ax_.get_title() == "95 %: 5.49 to 13.66"
    assert display.ax_.get_xlabel() == "b"


def test_the_size_of_zeta():
    display = ProfileDisplay.from_profile([profile(), profile("c")], absolute=True)
    assert len(display.axes_) == 2
    fine, zeta = display.lines_[1].get_data()
    np.testing.assert_allclose(zeta, np.abs(fine - 10) / 2, atol=1e-12)
    np.testing.assert_allclose(display.wald_lines_[1].get_ydata(), [3, 0, 3])
    assert display.axes_[1].get_ylim()[0] == 0


def test_an_end_that_was_not_reached_is_not_marked_and_bad_points_are_left_out():
    one = profile(interval=(float("-inf"), 14.0), reached=(False, True), stderr=float("nan"))
    one.zeta[[0, 3]] = np.nan
    display = drawn(ProfileDisplay(profiles={"b": one}).plot())
    assert [line.get_xdata()[0] for line in display.interval_lines_] == [14]
    assert display.wald_lines_ == []
    assert len(display.points_[0].get_xdata()) == 11
    assert display.ax_.get_title() == "95 %: −∞ to 14"
    neither = profile(interval=(4.0, 16.0), reached=(False, False))
    assert drawn(ProfileDisplay(profiles=neither).plot()).interval_lines_ == []


def test_five_profiles_stand_in_a_grid_without_empty_axes():
    display = ProfileDisplay.from_profile([profile(f"b{k}") for k in range(5)])
    assert list(display.axes_) == display.figure_.axes
    assert [axes.get_xlabel() for axes in display.axes_] == [f"b{k}" for k in range(5)]


CENTRE, COVARIANCE = np.array([3.0, -1e-3]), np.array([[4.0, 1.2e-3], [1.2e-3, 1e-6]])


def quadratic_map(shape=(21, 31)):
    x = CENTRE[0] + np.linspace(-8, 8, shape[0])
    y = CENTRE[1] + np.linspace(-4e-3, 4e-3, shape[1])
    away = np.stack(np.meshgrid(x - CENTRE[0], y - CENTRE[1]), axis=-1)
    zeta2 = np.einsum("yxi,ij,yxj->yx", away, np.linalg.inv(COVARIANCE), away)
    levels = {0.683: 2.4, 0.955: 7.0}
    return SimpleNamespace(name_x="a", name_y="b", x=x, y=y, zeta2=zeta2, levels=levels, estimate=CENTRE)


def heights(points):
    away = np.asarray(points) - CENTRE
    return np.einsum("ki,ij,kj->k", away, np.linalg.inv(COVARIANCE), away)


def test_contours_of_a_linear_model_are_the_ellipses_of_its_covariance():
    display = drawn(ProfileDisplay.from_profile(quadratic_map(), covariance=COVARIANCE))
    for path, edge, threshold in zip(display.contours_.get_paths(), display.wald_lines_, (2.4, 7.0), strict=True):
        np.testing.assert_allclose(heights(edge.get_xydata()), threshold, rtol=1e-12)
        np.testing.assert_allclose(heights(path.vertices), threshold, rtol=0.02)
        np.testing.assert_allclose(edge.get_xdata().max() - CENTRE[0], np.sqrt(threshold * 4), rtol=1e-3)
    assert {text.get_text() for text in display.contours_.labelTexts} == {"68.3 %", "95.5 %"}
    assert (display.ax_.get_xlabel(), display.ax_.get_ylabel()) == ("a", "b")


def test_styles_of_contours_and_ellipses():
    display = ProfileDisplay(profile_map=quadratic_map(), covariance=COVARIANCE).plot(
        line_kwargs={"lw": 5, "color": "green", "alpha": 0.5}, wald_kwargs={"ls": ":", "color": "red"}
    )
    assert set(display.contours_.get_linewidths()) == {5}
    assert tuple(display.contours_.get_edgecolor()[0]) == to_rgba("green", 0.5)
    assert {(line.get_linestyle(), line.get_color()) for line in display.wald_lines_} == {(":", "red")}
    assert display.ax_.get_legend().get_lines()[0].get_color() == "green"


def test_traces_run_where_each_parameter_is_best():
    display = ProfileDisplay(profile_map=quadratic_map(), covariance=COVARIANCE).plot(traces=True)
    first, second = (line.get_xydata() - CENTRE for line in display.trace_lines_)
    assert len(first) > 10 and len(second) > 10
    np.testing.assert_allclose(first[:, 1], first[:, 0] * COVARIANCE[0, 1] / COVARIANCE[0, 0], atol=1e-9)
    np.testing.assert_allclose(second[:, 0], second[:, 1] * COVARIANCE[0, 1] / COVARIANCE[1, 1], atol=1e-6)


def test_a_map_with_places_missing_or_without_a_covariance():
    found = quadratic_map()
    found.zeta2[:2, :3] = np.nan
    display = drawn(ProfileDisplay(profile_map=found).plot())
    assert display.wald_lines_ == []
    np.testing.assert_allclose(heights(display.contours_.get_paths()[1].vertices), 7.0, rtol=0.2)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ProfileDisplay(), ValueError, "profiles and profile_map: one of the two"),
        (lambda: ProfileDisplay(profiles={}), ValueError, "profiles: got none"),
        (lambda: ProfileDisplay(profiles=3.0), TypeError, "profiles: got float; what profile_likelihood"),
        (lambda: ProfileDisplay(profiles=profile(), covariance=np.eye(2)), ValueError, "covariance: given without"),
        (lambda: ProfileDisplay(profile_map=quadratic_map(), covariance=1), ValueError, r"covariance: got shape \(\)"),
        (lambda: ProfileDisplay(profiles=profile()).plot(traces=True), ValueError, "traces: got True; only a map"),
        (lambda: ProfileDisplay(profile_map=quadratic_map()).plot(absolute=True), ValueError, "absolute: got True"),
    ],
)
def test_profiles_refuse_bad_arguments(plt, make, error, message):
    with pytest.raises(error, match=message):
        make()
    assert plt.get_fignums() == []


# ---- all of them

EVERY = {
    "fit": lambda ax: FitDisplay(grid=[1, 2], prediction=[1, 2]).plot(ax),
    "residual": lambda ax: ResidualDisplay(residual=[1, 2]).plot(ax, against="order"),
    "convergence": lambda ax: ConvergenceDisplay(records=[record(1, 2.0)]).plot(ax),
    "profile": lambda ax: ProfileDisplay(profiles=profile()).plot(ax),
    "map": lambda ax: ProfileDisplay(profile_map=quadratic_map()).plot(ax),
    "correlation": lambda ax: CorrelationDisplay(correlation=np.eye(2), names="ab").plot(ax),
}
each_display = pytest.mark.parametrize("draw", EVERY.values(), ids=EVERY.keys())


@each_display
def test_the_axes_given_are_drawn_on_and_pyplot_is_left_alone(plt, ax, draw):
    display = draw(ax)
    assert display.figure_ is ax.figure
    assert plt.get_fignums() == []
    assert ax.has_data() or not ax.axison  # convergence divides it


@each_display
def test_a_figure_of_pyplot_is_made_when_none_is_given(plt, draw):
    display = drawn(draw(None))
    assert plt.get_fignums() == [display.figure_.number]
    assert display.ax_ in display.figure_.axes


@each_display
def test_without_matplotlib_the_install_line_is_named(monkeypatch, draw):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'lmfit_gpu\[plot\]'"):
        draw(None)


@each_display
def test_what_is_no_axes_is_refused(draw):
    with pytest.raises(TypeError, match="ax: got str; a matplotlib Axes"):
        draw("here")


def test_importing_the_displays_does_not_import_matplotlib():
    for path in Path(plotting.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:  # not those within functions
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "matplotlib" not in ast.unparse(node)
