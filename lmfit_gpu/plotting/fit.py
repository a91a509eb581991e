"""Data, the fitted curve, and its bands, over one feature.

The band of the *mean* tells where the curve is, that of an *observation* where a further measurement would be::

    mean          f(x, θ) ± t · s(f),                s(f)² = ∇f C ∇fᵀ
    observation   f(x, θ) ± t · √(s(f)² + s²σ(x)²)

Seber and Wild (2003), Nonlinear Regression, section 5.1 (doi 10.1002/0471725315); both come from
``prediction_interval`` of the estimator, nothing is worked out here.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted

from lmfit_gpu.estimator import LMRegressor
from lmfit_gpu.plotting.axes import (
    BLUE,
    COLOURS,
    INK,
    check_axes,
    check_level,
    merged,
    one_of,
    panels,
    percent,
    plain_array,
)
from lmfit_gpu.plotting.fit_data import (
    columns_of,
    data_of,
    fine_grid,
    had_sigma,
    knows_noise,
    sigma_between,
    spread_sigma,
)

__all__ = ["FitDisplay"]

KINDS = ("auto", "both", "mean", "observation", None)
SIZE = (6.4, 4.2)
MANY = 300  # points that are drawn small
LEGEND_SEARCHES = 2000  # up to so many points matplotlib looks for the best place of a legend; it is slow beyond

Band = tuple[np.ndarray, np.ndarray]


class FitDisplay:
    """Data, fitted curve and bands.

    Parameters
    ----------
    grid : array_like, shape (p,)
        Where the curve is drawn, ascending.
    prediction : array_like, shape (p,) or (p, n_outputs)
    mean_band, observation_band : tuple (lower, upper) of arrays in the shape of prediction, optional
    x : array_like, shape (n,), optional
    y : array_like, shape (n,) or (n, n_outputs), optional
        The data.
    sigma : array_like, in the shape of y or (n,), optional
        Half the length of the error bars.
    level : float
        That of the bands.
    x_name, y_name : str
        Labels of the axes.

    Attributes
    ----------
    ax_, figure_ : Axes, Figure
    lines_ : list of Line2D
        The curves, one for each output.
    data_ : list of Line2D or ErrorbarContainer
        One for each output; empty without data.
    mean_bands_, observation_bands_ : list of PolyCollection

    Examples
    --------
    >>> import matplotlib.pyplot as plt
    >>> import numpy as np
    >>> from lmfit_gpu import LMRegressor
    >>> from lmfit_gpu.plotting import FitDisplay
    >>> x = np.linspace(0, 4, 25)
    >>> y = 3.0 * np.exp(-0.8 * x) + 0.02 * np.cos(40 * x)
    >>> est = LMRegressor(lambda x, a, b: a * np.exp(-b * x), p0=[1, 1]).fit(x[:, None], y)
    >>> display = FitDisplay.from_estimator(est, kind=None)
    >>> display.ax_.get_xlabel()
    'x'
    >>> plt.close(display.figure_)
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        grid: Any,
        prediction: Any,
        mean_band: Any = None,
        observation_band: Any = None,
        x: Any = None,
        y: Any = None,
        sigma: Any = None,
        level: float = 0.95,
        x_name: str = "x",
        y_name: str = "y",
    ) -> None:
        check_level(level)
        self.grid = plain_array(grid, "grid")
        self.prediction = plain_array(prediction, "prediction")
        if self.grid.ndim != 1 or self.prediction.shape[:1] != self.grid.shape or self.prediction.ndim > 2:
            raise ValueError(
                f"grid and prediction: got shapes {self.grid.shape} and {self.prediction.shape}; "
                "(p,) and (p,) or (p, n_outputs) are expected"
            )
        self.mean_band = _checked_band(mean_band, "mean_band", self.prediction)
        self.observation_band = _checked_band(observation_band, "observation_band", self.prediction)
        if (x is None) != (y is None):
            raise ValueError(f"x and y: got {'y' if x is None else 'x'} alone; both or neither are expected")
        self.x = None if x is None else plain_array(x, "x")
        self.y = None if y is None else plain_array(y, "y")
        self.sigma = None if sigma is None else plain_array(sigma, "sigma")
        self.level, self.x_name, self.y_name = level, x_name, y_name
        self._check_data()

    def plot(
        self,
        ax: Any = None,
        *,
        scatter_kwargs: Mapping[str, Any] | None = None,
        line_kwargs: Mapping[str, Any] | None = None,
        fill_kwargs: Mapping[str, Any] | None = None,
        legend: bool = True,
    ) -> "FitDisplay":
        """Draw.

        Parameters
        ----------
        ax : Axes, optional
            Default: a new figure.
        scatter_kwargs, line_kwargs, fill_kwargs : dict, optional
            For the data (``errorbar`` or ``plot``), the curves (``plot``) and the bands (``fill_between``).
        legend : bool

        Returns
        -------
        self
        """
        styles = {
            "scatter": merged({}, scatter_kwargs, "line", "scatter_kwargs"),
            "line": merged({}, line_kwargs, "line", "line_kwargs"),
            "fill": merged({}, fill_kwargs, "fill", "fill_kwargs"),
        }
        ax = panels(ax, 1, 1, SIZE)[0]
        empty = not ax.has_data()
        curves = columns_of(self.prediction)
        several = curves.shape[1] > 1
        self.lines_: list[Any] = []
        self.data_: list[Any] = []
        self.mean_bands_: list[Any] = []
        self.observation_bands_: list[Any] = []
        for k in range(curves.shape[1]):
            colour = COLOURS[k % len(COLOURS)] if several else BLUE
            of = "_" if k else ""  # of several outputs the legend says once what is what, and names the curves
            for band, kept, what, alpha in (
                (self.observation_band, self.observation_bands_, "an observation", 0.15),
                (self.mean_band, self.mean_bands_, "the mean", 0.35),
            ):
                if band is not None:
                    style = {"alpha": alpha, "linewidth": 0, "color": colour, **styles["fill"]}
                    kept.append(self._draw_band(ax, band, k, f"{of}{percent(self.level)} band of {what}", style))
            style = {"color": colour, "label": f"fit, output {k}" if several else "fit", "zorder": 3, **styles["line"]}
            self.lines_ += ax.plot(self.grid, curves[:, k], **style)
            if self.y is not None:
                style = {"color": colour if several else INK, **styles["scatter"]}
                self.data_.append(self._draw_data(ax, k, of, style))
        ax.set(xlabel=self.x_name, ylabel=self.y_name)
        if empty and ax.get_yscale() == "linear" and ax.get_autoscaley_on():
            self._show_curve(ax)
        if legend:
            few = self.x is None or len(self.x) <= LEGEND_SEARCHES
            ax.legend(loc="best" if few else "upper right")
        self.ax_, self.figure_ = ax, ax.figure
        return self

    @classmethod
    def from_estimator(  # noqa: PLR0913
        cls,
        estimator: Any,
        X: Any = None,
        y: Any = None,
        *,
        sigma: Any = None,
        level: float = 0.95,
        kind: str | None = "auto",
        n_points: int = 400,
        ax: Any = None,
        scatter_kwargs: Mapping[str, Any] | None = None,
        line_kwargs: Mapping[str, Any] | None = None,
        fill_kwargs: Mapping[str, Any] | None = None,
    ) -> "FitDisplay":
        """Draw a fitted estimator with its data and bands.

        Parameters
        ----------
        estimator : LMRegressor, or any regressor, with X and y
        X : array_like, shape (n, 1), optional
        y : array_like, shape (n,) or (n, n_outputs), optional
            Data to show; default: those of the fit. X without y only says over which range the curve is drawn, so
            that it may go on beyond the data.
        sigma : array_like, optional
            Standard deviations of these y.
        level : float
            That of the bands.
        kind : {"auto", "both", "mean", "observation", None}
            Which bands; "auto": both, or that of the mean where the size of the noise is not known (under a loss, with
            a robust covariance, without a degree of freedom), or none of another library's regressor.
        n_points : int
            Points of the curve, >= 2.
        ax : Axes, optional
        scatter_kwargs, line_kwargs, fill_kwargs : dict, optional
            As in :meth:`plot`.

        Returns
        -------
        FitDisplay

        Raises
        ------
        ValueError
            For several features, bad arguments, or an estimator that keeps no data when none are given.

        Notes
        -----
        The band of an observation needs σ(x) where there are no data: sigma that differ from row to row are
        interpolated linearly between the rows. A fit without sigma has the same noise everywhere.
        """
        check_axes(ax)
        check_level(level)
        one_of("kind", kind, KINDS)
        if isinstance(n_points, bool) or not isinstance(n_points, (int, np.integer)) or n_points < 2:
            raise ValueError(f"n_points: got {n_points!r}; a whole number >= 2 is expected")
        if isinstance(estimator, LMRegressor):
            check_is_fitted(estimator, "result_")
        data = data_of(estimator, X, y, sigma)
        grid = fine_grid(data["range"], int(n_points))
        points: Any = grid[:, None]
        if isinstance(estimator, LMRegressor):  # a tensor has no names of columns that scikit-learn would miss
            points = torch.from_numpy(points)
        if kind == "auto" and hasattr(estimator, "prediction_interval"):
            kind = "both" if knows_noise(estimator) else "mean"
        bands: dict[str, Any] = {}
        for which in ("mean", "observation"):
            if kind in (which, "both"):
                extra: dict[str, Any] = {}
                if which == "observation" and data["sigma"] is not None and had_sigma(estimator):
                    extra["sigma"] = sigma_between(grid, data["x"], data["sigma"])
                interval = estimator.prediction_interval(points, level=level, kind=which, **extra)
                bands[f"{which}_band"] = (interval.lower, interval.upper)
        display = cls(
            grid=grid,
            prediction=estimator.predict(points),
            **bands,
            x=data["x"],
            y=data["y"],
            sigma=data["sigma"],
            level=level,
            x_name=data["x_name"],
        )
        return display.plot(ax, scatter_kwargs=scatter_kwargs, line_kwargs=line_kwargs, fill_kwargs=fill_kwargs)

    @classmethod
    def from_predictions(  # noqa: PLR0913
        cls,
        x: Any,
        y: Any,
        prediction: Any,
        *,
        grid: Any = None,
        mean_band: Any = None,
        observation_band: Any = None,
        sigma: Any = None,
        level: float = 0.95,
        ax: Any = None,
        scatter_kwargs: Mapping[str, Any] | None = None,
        line_kwargs: Mapping[str, Any] | None = None,
        fill_kwargs: Mapping[str, Any] | None = None,
    ) -> "FitDisplay":
        """Draw predictions that are there already.

        Parameters
        ----------
        x : array_like, shape (n,)
        y : array_like, shape (n,) or (n, n_outputs)
        prediction : array_like
            At `grid`; without one at x, in any order.
        grid : array_like, shape (p,), optional
        mean_band, observation_band : tuple (lower, upper), optional
            Where the prediction is.
        sigma : array_like, optional
            Of y.
        level : float
        ax, scatter_kwargs, line_kwargs, fill_kwargs
            As in :meth:`plot`.

        Returns
        -------
        FitDisplay
        """
        check_axes(ax)
        grid, prediction = plain_array(x if grid is None else grid, "grid"), plain_array(prediction, "prediction")
        bands = {"mean_band": mean_band, "observation_band": observation_band}
        if grid.ndim == 1 and len(grid) == len(prediction):
            order = np.argsort(grid, kind="stable")
            grid, prediction = grid[order], prediction[order]
            for name, band in bands.items():
                if band is not None:
                    bands[name] = tuple(plain_array(edge, name)[order] for edge in band)
        display = cls(grid=grid, prediction=prediction, **bands, x=x, y=y, sigma=sigma, level=level)
        return display.plot(ax, scatter_kwargs=scatter_kwargs, line_kwargs=line_kwargs, fill_kwargs=fill_kwargs)

    def _check_data(self) -> None:
        if self.x is None or self.y is None:
            if self.sigma is not None:
                raise ValueError("sigma: given without x and y")
            return
        outputs = self.prediction.shape[1:]
        if self.y.ndim == 2 and self.y.shape[1] == 1 and not outputs:
            self.y = self.y[:, 0]
        if self.x.ndim != 1 or self.y.shape not in {self.x.shape + outputs, (*self.x.shape, *(outputs or (1,)))}:
            raise ValueError(
                f"x and y: got shapes {self.x.shape} and {self.y.shape}; (n,) and {('n', *outputs)} are expected"
            )
        if self.sigma is not None:
            self.sigma = spread_sigma(self.sigma, self.y)

    def _draw_data(self, ax: Any, k: int, of: str, style: dict[str, Any]) -> Any:
        assert self.x is not None
        assert self.y is not None
        y = columns_of(self.y)[:, k]
        small = len(self.x) > MANY
        style = {"linestyle": "none", "marker": "o", "markersize": 2.5 if small else 4.5, "zorder": 2.5} | style
        if self.sigma is None:
            return ax.plot(self.x, y, **{"label": f"{of}data", "alpha": 0.4 if small else 1.0, **style})[0]
        bars = {"elinewidth": 0.8, "capsize": 0 if small else 2}
        return ax.errorbar(self.x, y, yerr=columns_of(self.sigma)[:, k], **{"label": f"{of}data ± σ", **bars, **style})

    def _show_curve(self, ax: Any) -> None:
        """Let wide bands leave the picture where data and curve would take less than a third of its height."""
        shown = np.concatenate([part.ravel() for part in (self.prediction, self.y) if part is not None])
        shown = shown[np.isfinite(shown)]
        if not len(shown) or np.ptp(shown) == 0:
            return
        (low, high), height = ax.get_ylim(), np.ptp(shown)
        ax.set_ylim(max(low, shown.min() - height), min(high, shown.max() + height), auto=True)

    def _draw_band(self, ax: Any, band: Band, k: int, label: str, style: dict[str, Any]) -> Any:
        lower, upper = (columns_of(edge)[:, k] for edge in band)
        known = np.isfinite(lower) & np.isfinite(upper)
        if not known.any():
            label += ": not determined"
        return ax.fill_between(self.grid, lower, upper, where=known, label=label, **style)


def _checked_band(band: Any, name: str, prediction: np.ndarray) -> Band | None:
    if band is None:
        return None
    if not isinstance(band, (tuple, list)) or len(band) != 2:
        raise ValueError(f"{name}: got {type(band).__name__}; a pair (lower, upper) is expected")
    lower, upper = (plain_array(edge, name) for edge in band)
    if lower.shape != prediction.shape or upper.shape != prediction.shape:
        raise ValueError(f"{name}: got shapes {lower.shape} and {upper.shape}; {prediction.shape} is expected")
    return lower, upper
