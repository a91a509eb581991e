"""The correlation matrix of the parameters as a map of colours."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lmfit_gpu.plotting.axes import check_axes, panels, plain_array
from lmfit_gpu.result import Result

__all__ = ["CorrelationDisplay"]

PRINTED = 12  # up to so many parameters the values are written into the cells
NAMED = 40  # up to so many the names stand beside the cells
DARK = 0.6  # |correlation| whose colour needs white text
ROUNDING = 1e-6  # beyond 1 by more than this is no rounding
ROUNDED_ONE = 1e-12  # nearer to ±1 than this it is one, to rounding


class CorrelationDisplay:
    """Correlations between parameters: red +1, blue −1, grey where there is none.

    Parameters
    ----------
    correlation : array_like, shape (n, n)
        NaN for what the data do not determine and for parameters on a bound.
    names : sequence of str, length n

    Attributes
    ----------
    ax_, figure_ : Axes, Figure
    image_ : AxesImage
    colorbar_ : Colorbar or None
    text_ : ndarray of Text, shape (n, n), or None
        The values printed.

    Examples
    --------
    >>> from lmfit_gpu.plotting import CorrelationDisplay
    >>> display = CorrelationDisplay(correlation=[[1.0, -0.5], [-0.5, 1.0]], names=["height", "rate"])
    >>> display.correlation.shape
    (2, 2)
    """

    def __init__(self, *, correlation: Any, names: Sequence[str]) -> None:
        self.correlation = plain_array(correlation, "correlation")
        self.names = [str(name) for name in names]
        n = len(self.names)
        if self.correlation.shape != (n, n) or n == 0:
            raise ValueError(
                f"correlation and names: got shape {self.correlation.shape} and {n} names; (n, n) and n are expected"
            )
        if np.nanmax(np.abs(self.correlation), initial=0.0) > 1 + ROUNDING:
            raise ValueError("correlation: got values beyond ±1; a covariance has to be scaled first")

    def plot(
        self,
        ax: Any = None,
        *,
        include_values: bool | None = None,
        colorbar: bool = True,
        im_kwargs: Mapping[str, Any] | None = None,
        text_kwargs: Mapping[str, Any] | None = None,
    ) -> "CorrelationDisplay":
        """Draw.

        Parameters
        ----------
        ax : Axes, optional
        include_values : bool, optional
            Print the values; default: up to 12 parameters.
        colorbar : bool
        im_kwargs, text_kwargs : dict, optional
            For ``imshow`` and ``text``.

        Returns
        -------
        self
        """
        for name, given in (("im_kwargs", im_kwargs), ("text_kwargs", text_kwargs)):
            if not (given is None or isinstance(given, Mapping)):
                raise TypeError(f"{name}: got {type(given).__name__}; a dict of matplotlib's keywords is expected")
        n = len(self.names)
        side = min(max(0.55 * n, 2.4), 7.0)
        ax = panels(ax, 1, 1, (side + 1.6, side + 0.6), layout="compressed")[0]
        import matplotlib as mpl

        colours = mpl.colormaps["RdBu_r"].with_extremes(bad="0.82")
        style = {"cmap": colours, "vmin": -1.0, "vmax": 1.0, "interpolation": "nearest", **(im_kwargs or {})}
        self.image_ = ax.imshow(self.correlation, **style)
        printed = n <= PRINTED if include_values is None else include_values
        self.text_ = self._print(ax, dict(text_kwargs or {})) if printed else None
        self._name(ax)
        self.colorbar_ = None
        if colorbar:
            self.colorbar_ = ax.figure.colorbar(self.image_, ax=ax, ticks=[-1, -0.5, 0, 0.5, 1], label="correlation")
        self.ax_, self.figure_ = ax, ax.figure
        return self

    @classmethod
    def from_estimator(cls, estimator: Any, ax: Any = None, **kwargs: Any) -> "CorrelationDisplay":
        """Draw the correlations of a fitted estimator, without its fixed parameters.

        Parameters
        ----------
        estimator : LMRegressor
            Fitted.
        ax : Axes, optional
        **kwargs
            As in :meth:`plot`.

        Returns
        -------
        CorrelationDisplay

        Raises
        ------
        ValueError
            If there is no covariance.
        """
        check_axes(ax)
        found = estimator.correlation()
        result: Result = estimator.result_
        if found is None:
            raise ValueError(
                "estimator: its fit keeps no covariance (solver dual or cg with more than 1,000 parameters), so there "
                "is no correlation to draw"
            )
        correlation = plain_array(found, "correlation")
        free = [j for j in range(len(result.names)) if result.roles.get(j) != "fixed"]
        names = [result.names[j] for j in free]
        return cls(correlation=correlation[np.ix_(free, free)], names=names).plot(ax, **kwargs)

    def _print(self, ax: Any, given: dict[str, Any]) -> np.ndarray:
        n = len(self.names)
        texts = np.empty((n, n), dtype=object)
        for i, j in np.ndindex(n, n):
            value = self.correlation[i, j]
            dark = abs(value) > DARK
            style = {"ha": "center", "va": "center", "fontsize": 9 if n <= 8 else 7.5, "color": "w" if dark else "0.1"}
            texts[i, j] = ax.text(j, i, written(float(value)), **{**style, **given})
        return texts

    def _name(self, ax: Any) -> None:
        n = len(self.names)
        if n > NAMED:
            ax.set(xlabel="parameter, by number", ylabel="parameter, by number")
            return
        long = max(map(len, self.names)) > 3
        many = n > PRINTED
        small = {"fontsize": 7 if many else 10}
        slanted = long and not many
        rotation = 45 if slanted else 90 if many else 0
        ax.set_xticks(range(n), self.names, rotation=rotation, ha="right" if slanted else "center", **small)
        if slanted:
            for label in ax.get_xticklabels():
                label.set_rotation_mode("anchor")
        ax.set_yticks(range(n), self.names, **small)
        ax.set_xticks(np.arange(n - 1) + 0.5, minor=True)  # white lines between the cells
        ax.set_yticks(np.arange(n - 1) + 0.5, minor=True)
        ax.grid(which="minor", color="w", linewidth=1.0)
        ax.tick_params(which="both", length=0)


def written(value: float) -> str:
    """Return a correlation in two decimals, up to four where it would round to ±1.

    Examples
    --------
    >>> written(0.5), written(-0.99987), written(1.0), written(0.9999999), written(float("nan"))
    ('0.50', '−0.9999', '1', '>0.9999', '')
    """
    if np.isnan(value):
        return ""
    if abs(value) > 1 - ROUNDED_ONE:
        return "1" if value > 0 else "−1"
    digits = 2
    while digits < 5 and float(f"{abs(value):.{digits}f}") == 1:
        digits += 1
    text = f"{value:.{digits}f}" if digits < 5 else (">0.9999" if value > 0 else "<-0.9999")
    return "0" if float(text.lstrip("<>")) == 0 else text.replace("-", "−")
