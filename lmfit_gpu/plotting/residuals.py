"""Residuals against what they should not depend on, and against the quantiles of a normal distribution.

Four kinds, of raw residual r = prediction − data, weight w, standard deviation σ and leverage h::

    raw           r
    weighted      r √w / σ
    standardised  r √w / (σ s √(1 − h))           internally studentised: s from all rows
    studentised   the same with s from the other rows: t-distributed, one row at a time

Cook and Weisberg (1982), Residuals and Influence in Regression, sections 2.2.1 and 2.2.2; in nonlinear fits they hold
for the model linearised at its solution. The numbers are those of ``est.diagnostics()``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import probplot
from sklearn.utils.validation import check_is_fitted

from lmfit_gpu.arguments import check_data
from lmfit_gpu.estimator import LMRegressor
from lmfit_gpu.plotting.axes import BLUE, COLOURS, GREY, check_axes, merged, one_of, panels, plain_array

__all__ = ["ResidualDisplay"]

KINDS = ("raw", "weighted", "standardised", "studentised")
AGAINST = ("fitted", "x", "order", "leverage", "normal")
NAMES = {
    "raw": "residual (prediction − data)",
    "weighted": "weighted residual",
    "standardised": "standardised residual",
    "studentised": "studentised residual",
}
SIZE = (4.4, 3.6)
LABELLED = 3  # as R's plot.lm
MANY = 300  # points that are drawn small
TWO_SIDED_95 = 1.959963984540054  # of a normal distribution


class ResidualDisplay:
    """Residuals in one or more panels.

    Parameters
    ----------
    residual : array_like, shape (n,) or (n, n_outputs)
    kind : {"raw", "weighted", "standardised", "studentised"}
        What they are.
    fitted, leverage : array_like, in the shape of residual, optional
        Needed by the panels of these names.
    X : array_like, shape (n,) or (n, n_features), optional
    x_names : sequence of str, optional

    Attributes
    ----------
    ax_, figure_ : Axes, Figure
        The first of the axes.
    axes_ : ndarray of Axes, shape (n_panels,)
    points_ : list of list of Line2D
        For each panel one for each output.
    zero_lines_ : list of Line2D
        One for each panel: zero, and of the normal quantiles the line fitted to them.
    labels_ : list of Annotation
        Numbers of the rows with the largest residuals.

    Examples
    --------
    >>> import matplotlib.pyplot as plt
    >>> from lmfit_gpu.plotting import ResidualDisplay
    >>> display = ResidualDisplay.from_predictions(y_true=[1.0, 2.0, 3.0], y_pred=[1.5, 2.0, 2.0])
    >>> display.residual
    array([ 0.5,  0. , -1. ])
    >>> plt.close(display.figure_)
    """

    def __init__(
        self,
        *,
        residual: Any,
        kind: str = "raw",
        fitted: Any = None,
        leverage: Any = None,
        X: Any = None,
        x_names: Sequence[str] | None = None,
    ) -> None:
        one_of("kind", kind, KINDS)
        self.kind = kind
        self.residual = plain_array(residual, "residual")
        if self.residual.ndim not in (1, 2) or not self.residual.size:
            raise ValueError(f"residual: got shape {self.residual.shape}; (n,) or (n, n_outputs) is expected")
        self.fitted, self.leverage = self._alike(fitted, "fitted"), self._alike(leverage, "leverage")
        self.X = None if X is None else plain_array(X, "X").reshape(len(X), -1)
        if self.X is not None and len(self.X) != len(self.residual):
            raise ValueError(f"X: got {len(self.X)} rows for {len(self.residual)} of the residuals")
        n_features = 0 if self.X is None else self.X.shape[1]
        if x_names is None:
            x_names = ["x"] if n_features == 1 else [f"x{j}" for j in range(n_features)]
        self.x_names = [str(name) for name in x_names]
        if len(self.x_names) != n_features:
            raise ValueError(f"x_names: got {len(self.x_names)} for {n_features} features")

    def plot(
        self,
        ax: Any = None,
        *,
        against: str | Sequence[str] | None = None,
        n_labelled: int | None = None,
        scatter_kwargs: Mapping[str, Any] | None = None,
        line_kwargs: Mapping[str, Any] | None = None,
    ) -> "ResidualDisplay":
        """Draw.

        Parameters
        ----------
        ax : Axes, or array of one for each panel, optional
            One is divided.
        against : {"fitted", "x", "order", "leverage", "normal"}, or a sequence of them
            One panel each ("x": one for each feature). "order" is the number of the row, "normal" the quantiles of a
            normal distribution. Default: "fitted" ("order" where there is none, of residual callables) and "normal".
        n_labelled : int, optional
            So many of the largest residuals get the number of their row, from 0; default: 3, none with more than 300
            rows.
        scatter_kwargs, line_kwargs : dict, optional
            For the points and for the line of zero.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            For a panel whose numbers the display does not have.
        """
        if against is None:
            against = ["order" if self.fitted is None else "fitted", "normal"]
        wanted = [against] if isinstance(against, str) else list(against)
        for name in wanted:
            one_of("against", name, AGAINST)
            self._check_has(name)
        if not wanted:
            raise ValueError(f"against: got none; some of {', '.join(AGAINST)} are expected")
        if n_labelled is None:
            n_labelled = LABELLED if len(self.residual) <= MANY else 0
        if isinstance(n_labelled, bool) or not isinstance(n_labelled, (int, np.integer)) or n_labelled < 0:
            raise ValueError(f"n_labelled: got {n_labelled!r}; a whole number >= 0 is expected")
        points = merged({}, scatter_kwargs, "line", "scatter_kwargs")
        line = merged({"color": GREY, "linewidth": 1.0, "zorder": 1.5}, line_kwargs, "line", "line_kwargs")
        drawn = [panel for name in wanted for panel in self._panels(name)]
        self.axes_ = panels(ax, len(drawn), 2 if len(drawn) in (2, 4) else 3, SIZE)
        self.points_: list[Any] = []
        self.zero_lines_: list[Any] = []
        self.labels_: list[Any] = []
        for axes, (name, at, label) in zip(self.axes_, drawn, strict=True):
            value = NAMES[self.kind]
            if name == "normal":
                at, line_ends = self._quantiles()
                self.zero_lines_ += axes.plot(*line_ends, **line)
                axes.set(xlabel=label, ylabel=value)
            else:
                self.zero_lines_.append(axes.axhline(0.0, **line))
                axes.set(xlabel=label, ylabel=value)
                self._draw_limits(axes, line)
            self.points_.append(self._draw_points(axes, at, points))
            self._label_largest(axes, at, int(n_labelled))
        self.ax_, self.figure_ = self.axes_[0], self.axes_[0].figure
        return self

    @classmethod
    def from_estimator(  # noqa: PLR0913
        cls,
        estimator: Any,
        X: Any = None,
        y: Any = None,
        *,
        sample_weight: Any = None,
        sigma: Any = None,
        kind: str = "studentised",
        ax: Any = None,
        **kwargs: Any,
    ) -> "ResidualDisplay":
        """Draw the residuals of a fitted estimator.

        Parameters
        ----------
        estimator : LMRegressor
        X, y, sample_weight, sigma
            The data of the fit; by default those it has kept.
        kind : {"raw", "weighted", "standardised", "studentised"}
            Under a loss only "raw".
        ax : Axes or array of them, optional
        **kwargs
            As in :meth:`plot`.

        Returns
        -------
        ResidualDisplay

        Raises
        ------
        ValueError
            As ``est.diagnostics``; and for a panel whose numbers there are not.
        """
        check_axes(ax)
        one_of("kind", kind, KINDS)
        if getattr(estimator, "loss", "linear") != "linear":
            if kind != "raw":
                raise ValueError(
                    f"kind: got {kind!r}; under a loss only 'raw' residuals are drawn: leverage is of least squares"
                )
            X, y = _data_under_loss(estimator, X, y)
            return cls.from_predictions(y, estimator.predict(X), X=X, ax=ax, **kwargs)
        diagnostics = estimator.diagnostics(X, y, sample_weight, sigma)
        if X is None:
            X = estimator._data.X
        elif isinstance(estimator, LMRegressor):  # without the rows that the fit left out
            X = check_data(estimator, X, y, sample_weight, sigma, reset=False).X
        names = getattr(estimator, "feature_names_in_", None)
        display = cls(
            residual=getattr(diagnostics, "residual" if kind == "raw" else kind),
            kind=kind,
            fitted=diagnostics.fitted,
            leverage=diagnostics.leverage,
            X=X if len(X) == len(diagnostics.residual) else None,  # a residual callable may have any number
            x_names=None if names is None else list(names),
        )
        return display.plot(ax, **kwargs)

    @classmethod
    def from_predictions(
        cls, y_true: Any, y_pred: Any, *, X: Any = None, ax: Any = None, **kwargs: Any
    ) -> "ResidualDisplay":
        """Draw the raw residuals of any predictions.

        Parameters
        ----------
        y_true, y_pred : array_like, shape (n,) or (n, n_outputs)
        X : array_like, optional
        ax : Axes or array of them, optional
        **kwargs
            As in :meth:`plot`.

        Returns
        -------
        ResidualDisplay
        """
        check_axes(ax)
        y_true, y_pred = plain_array(y_true, "y_true"), plain_array(y_pred, "y_pred")
        if y_true.shape != y_pred.shape:
            raise ValueError(f"y_true and y_pred: got shapes {y_true.shape} and {y_pred.shape}; the same is expected")
        return cls(residual=y_pred - y_true, fitted=y_pred, X=X).plot(ax, **kwargs)

    def _alike(self, values: Any, name: str) -> np.ndarray | None:
        if values is None:
            return None
        array = plain_array(values, name)
        if array.size != self.residual.size:
            raise ValueError(f"{name}: got shape {array.shape}; that of residual, {self.residual.shape}, is expected")
        return array.reshape(self.residual.shape)

    def _check_has(self, name: str) -> None:
        missing = {"fitted": self.fitted, "leverage": self.leverage, "x": self.X}
        if name in missing and missing[name] is None:
            argument = "X" if name == "x" else name
            raise ValueError(f"against: got {name!r}, and the display was made without {argument}")

    def _panels(self, name: str) -> list[tuple[str, Any, str]]:
        """Return (name, positions in the shape of residual, label of the axis) of each panel."""
        if name == "x":
            assert self.X is not None
            return [(name, self._spread(column), label) for column, label in zip(self.X.T, self.x_names, strict=True)]
        if name == "order":
            return [(name, self._spread(np.arange(len(self.residual))), "row")]
        if name == "normal":
            return [(name, None, "quantile of a normal distribution")]
        return [(name, getattr(self, name), {"fitted": "fitted value", "leverage": "leverage"}[name])]

    def _spread(self, column: np.ndarray) -> np.ndarray:
        shape = self.residual.shape
        return np.broadcast_to(column if len(shape) == 1 else column[:, None], shape)

    def _quantiles(self) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """Return normal quantiles in the shape of residual (NaN for what is not finite), and a line fitted to them."""
        known = np.isfinite(self.residual)
        at = np.full(self.residual.shape, np.nan)
        values = self.residual[known]
        if len(values) < 2:
            return at, (np.array([]), np.array([]))
        (quantiles, _), (slope, intercept, _) = probplot(values)
        places = np.empty(len(values))
        places[np.argsort(values, kind="stable")] = quantiles
        at[known] = places
        ends = quantiles[[0, -1]]
        return at, (ends, slope * ends + intercept)

    def _draw_limits(self, ax: Any, line: dict[str, Any]) -> None:
        """Draw where 95 % of residuals in units of their standard deviation are expected."""
        if self.kind not in ("standardised", "studentised"):
            return
        for level in (-TWO_SIDED_95, TWO_SIDED_95):
            ax.axhline(level, **{**line, "linestyle": (0, (4, 3)), "linewidth": 0.8})
        largest = max(float(np.max(np.abs(self.residual), initial=0.0, where=np.isfinite(self.residual))), TWO_SIDED_95)
        ax.set_ylim(-1.25 * largest, 1.25 * largest)  # room for the numbers
        place = {"xycoords": ax.get_yaxis_transform(), "xytext": (-3, 2), "textcoords": "offset points"}
        ax.annotate("95 %", (1.0, TWO_SIDED_95), ha="right", va="bottom", fontsize="small", color=GREY, **place)

    def _draw_points(self, ax: Any, at: np.ndarray, given: dict[str, Any]) -> list[Any]:
        at, values = (part.reshape(len(self.residual), -1) for part in (at, self.residual))
        small = len(values) > MANY
        style = {"linestyle": "none", "marker": "o", "markersize": 2.5 if small else 4.5}
        drawn = []
        for k in range(values.shape[1]):
            colour = BLUE if values.shape[1] == 1 else COLOURS[k % len(COLOURS)]
            label = {} if values.shape[1] == 1 else {"label": f"output {k}"}
            look = {**style, "color": colour, "alpha": 0.5 if small else 0.9, **label, **given}
            drawn += ax.plot(at[:, k], values[:, k], **look)
        if len(drawn) > 1 and ax is self.axes_[0]:
            ax.legend(loc="best" if not small else "upper right", fontsize="small")
        return drawn

    def _label_largest(self, ax: Any, at: np.ndarray, n: int) -> None:
        at, values = at.reshape(len(self.residual), -1), self.residual.reshape(len(self.residual), -1)
        size = np.where(np.isfinite(values), np.abs(values), -1.0).ravel()
        middle = sum(ax.get_xlim()) / 2
        for place in np.argsort(-size, kind="stable")[:n]:
            row, k = divmod(int(place), values.shape[1])
            if size[place] > 0:
                style = {"textcoords": "offset points", "fontsize": "small", "color": GREY}
                left = at[row, k] > middle  # of the picture: the number stands on its inner side
                where = {"xytext": (-5 if left else 5, 0), "ha": "right" if left else "left", "va": "center"}
                self.labels_.append(ax.annotate(str(row), (at[row, k], values[row, k]), **where, **style))


def _data_under_loss(estimator: Any, X: Any, y: Any) -> tuple[Any, Any]:
    """Return X and y, those of the fit by default."""
    check_is_fitted(estimator, "result_")
    if (X is None) != (y is None):
        raise ValueError(f"X and y: got {'y' if X is None else 'X'} alone; both or neither are expected")
    if X is not None:
        return X, y
    kept = getattr(estimator, "_data", None)
    if kept is None or kept.y is None:
        raise ValueError("X, y: the estimator has no data (a pickle or a saved file holds none); give both")
    return kept.X, kept.y
