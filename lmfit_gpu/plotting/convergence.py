"""How a fit went: the cost and the damping after each trial, against the number of the trial and against time.

The cost is drawn as it is, on a logarithmic axis where all costs are positive and span a decade: its end is then the
misfit that noise leaves. ``excess=True`` draws cost − least cost instead, whose slope is the rate of convergence
(Nocedal and Wright (2006), Numerical Optimization, appendix A.2: straight is linear, bending down is superlinear);
what equals the least cost has no place on that axis.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from lmfit_gpu.plotting.axes import BLUE, GREEN, ORANGE, VERMILLION, check_axes, merged, one_of, panels
from lmfit_gpu.result import IterationRecord, Result

__all__ = ["ConvergenceDisplay"]

AGAINST = ("iteration", "seconds", "both")
SIZE = (5.2, 2.7)  # of one panel, inches
SPAN = 10.0  # highest over lowest cost from which the axis is logarithmic
HEADROOM = 0.15  # of the range of the costs (or of their logarithms): rejected trials above it stand on the edge
MANY = 60  # trials beyond which accepted ones have no marker each


class ConvergenceDisplay:
    """Cost and damping of the trials of a fit.

    Parameters
    ----------
    records : sequence of IterationRecord
        One a trial: ``result_.history``, or the ``record`` of each step of :class:`lmfit_gpu.LMA`.

    Attributes
    ----------
    ax_, figure_ : Axes, Figure
        The first of the axes.
    axes_ : ndarray of Axes, shape (2, n_columns)
        Costs above, damping below; one column for each of iteration and seconds.
    cost_lines_, damping_lines_, held_out_lines_ : list of Line2D
        One a column; the last is empty without held-out rows.
    rejected_lines_, beyond_lines_ : list of Line2D
        Trials that were refused, and those of them that lie above the axis or are not finite.

    Examples
    --------
    >>> import numpy as np
    >>> import matplotlib.pyplot as plt
    >>> from lmfit_gpu import LMRegressor
    >>> from lmfit_gpu.plotting import ConvergenceDisplay
    >>> x = np.linspace(0, 4, 25)
    >>> est = LMRegressor(lambda x, a, b: a * np.exp(-b * x), p0=[1, 1]).fit(x[:, None], 3.0 * np.exp(-0.8 * x))
    >>> display = ConvergenceDisplay.from_estimator(est, against="iteration")
    >>> len(display.cost_lines_[0].get_xdata()) == est.n_iter_ + 1  # the start, too
    True
    >>> plt.close(display.figure_)
    """

    def __init__(self, *, records: Sequence[IterationRecord]) -> None:
        self.records = list(records)
        for record in self.records:
            if not isinstance(record, IterationRecord):
                raise TypeError(f"records: got {type(record).__name__} among them; IterationRecord is expected")

    def plot(
        self,
        ax: Any = None,
        *,
        against: str = "iteration",
        excess: bool = False,
        line_kwargs: Mapping[str, Any] | None = None,
        rejected_kwargs: Mapping[str, Any] | None = None,
    ) -> "ConvergenceDisplay":
        """Draw.

        Parameters
        ----------
        ax : Axes, or array of 2 (with "both" 4, row by row) of them, optional
            One is divided.
        against : {"iteration", "seconds", "both"}
        excess : bool
            Draw cost − least cost; rows held out have no place there.
        line_kwargs, rejected_kwargs : dict, optional
            For the lines of cost and damping, and for the marks of refused trials.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            For seconds that were not recorded.
        """
        one_of("against", against, AGAINST)
        styles = [
            merged({}, given, "line", name)
            for name, given in (("line_kwargs", line_kwargs), ("rejected_kwargs", rejected_kwargs))
        ]
        columns = ["iteration", "seconds"] if against == "both" else [against]
        positions = [self._positions(column) for column in columns]
        self.axes_ = panels(ax, 2 * len(columns), len(columns), SIZE).reshape(2, len(columns))
        self.cost_lines_: list[Any] = []
        self.damping_lines_: list[Any] = []
        self.held_out_lines_: list[Any] = []
        self.rejected_lines_: list[Any] = []
        self.beyond_lines_: list[Any] = []
        for k, (column, at) in enumerate(zip(columns, positions, strict=True)):
            upper, lower = self.axes_[:, k]
            self._draw_costs(upper, at, excess, *styles)
            self._draw_damping(lower, at[1:], *styles)
            lower.set_xlabel("iteration (trial)" if column == "iteration" else "seconds since the fit began")
            for axes in (upper, lower):
                axes.set_xlim(_with_margin(at))
                if column == "iteration":
                    axes.xaxis.get_major_locator().set_params(integer=True)
            if k == 0:
                upper.set_ylabel("cost − least cost" if excess else "cost")
                lower.set_ylabel("damping λ")
            upper.tick_params(labelbottom=False)
        self.ax_, self.figure_ = self.axes_[0, 0], self.axes_[0, 0].figure
        return self

    @classmethod
    def from_estimator(cls, estimator: Any, *, ax: Any = None, **kwargs: Any) -> "ConvergenceDisplay":
        """Draw the trials of a fitted estimator.

        Parameters
        ----------
        estimator : LMRegressor
        ax : Axes or array of them, optional
        **kwargs
            As in :meth:`plot`.
        """
        check_axes(ax)
        check_is_fitted(estimator, "result_")
        return cls.from_result(estimator.result_, ax=ax, **kwargs)

    @classmethod
    def from_result(cls, result: Result, *, ax: Any = None, **kwargs: Any) -> "ConvergenceDisplay":
        """Draw the trials of a result, such as ``est.result_``.

        Parameters
        ----------
        result : Result
        ax : Axes or array of them, optional
        **kwargs
            As in :meth:`plot`.
        """
        return cls.from_records(result.history, ax=ax, **kwargs)

    @classmethod
    def from_records(cls, records: Sequence[IterationRecord], *, ax: Any = None, **kwargs: Any) -> "ConvergenceDisplay":
        """Draw a list of records, such as those that ``LMA.record`` has shown step by step.

        Parameters
        ----------
        records : sequence of IterationRecord
        ax : Axes or array of them, optional
        **kwargs
            As in :meth:`plot`.
        """
        return cls(records=records).plot(ax, **kwargs)

    @property
    def start_cost(self) -> float:
        """Cost where the fit began: that after the first trial, plus what it gained. NaN without a trial."""
        if not self.records:
            return float("nan")
        first = self.records[0]
        return first.cost + (first.gain_ratio * first.predicted_reduction if first.accepted else 0.0)

    def _positions(self, column: str) -> np.ndarray:
        """Return where the start and the trials stand, shape (n_trials + 1,)."""
        if column == "iteration":  # LMA and partial lists need not begin at 1
            numbers = [record.n_iter for record in self.records]
            return np.array([numbers[0] - 1 if numbers else 0, *numbers], dtype=float)
        seconds = np.array([0.0, *(record.seconds for record in self.records)])
        if np.isnan(seconds).any():
            raise ValueError(
                "against: got 'seconds', which these records do not hold (an older file, or made by hand); "
                "'iteration' is there"
            )
        return seconds

    def _draw_costs(self, ax: Any, at: np.ndarray, excess: bool, line: dict[str, Any], mark: dict[str, Any]) -> None:
        cost = np.array([self.start_cost, *(record.cost for record in self.records)])
        trial = np.array([np.nan, *(np.nan if r.accepted else r.trial_cost for r in self.records)])
        refused = np.array([False, *(not record.accepted for record in self.records)])
        held_out = np.array([np.nan, *(record.held_out_cost for record in self.records)])
        cost[~np.isfinite(cost)] = np.nan
        if not self.records:
            ax.text(0.5, 0.5, "no trial was made", transform=ax.transAxes, ha="center", va="center")
            ax.set_yticks([])
            return
        if excess:
            least = np.nanmin(cost) if np.isfinite(cost).any() else 0.0
            cost, trial = cost - least, trial - least
            cost[cost == 0], trial[trial <= 0] = np.nan, np.nan  # no place on a logarithmic axis
            held_out[:] = np.nan
        logarithmic = is_logarithmic(cost, held_out)
        ax.set_yscale("log" if logarithmic else "linear")
        exact = cost == 0
        if logarithmic and exact.any():  # a perfect fit; 0 has no place on a logarithmic axis
            self._draw_zeros(ax, at[exact], "cost 0")
            cost[exact] = np.nan
        low, high = limits_of(np.concatenate([cost, held_out]), logarithmic)
        ax.set_ylim(low, high)
        style = {"color": BLUE, "linewidth": 1.4, "label": "cost", **_markers(~refused), **line}
        self.cost_lines_ += ax.plot(at, cost, **style)
        if np.isfinite(held_out).any():
            style = {"color": ORANGE, "linewidth": 1.4, "label": "cost of the rows held out", **line}
            self.held_out_lines_ += ax.plot(at, held_out, **style)
        inside = refused & (trial >= low) & (trial <= high)
        beyond = refused & ~inside
        style = {"color": VERMILLION, "linestyle": "none", "markersize": 5}
        crosses = {**style, "marker": "x", "label": "trial refused", **mark}
        self.rejected_lines_ += ax.plot(at[inside], trial[inside], **crosses)
        top = {**style, "marker": "^", "markerfacecolor": "none", "label": "refused, beyond this axis", **mark}
        edge = ax.get_xaxis_transform()  # y in shares of the height
        self.beyond_lines_ += ax.plot(at[beyond], np.full(beyond.sum(), 0.96), transform=edge, **top)
        self._legend(ax)

    def _draw_damping(self, ax: Any, at: np.ndarray, line: dict[str, Any], mark: dict[str, Any]) -> None:
        damping = np.array([record.damping for record in self.records], dtype=float)
        refused = np.array([not record.accepted for record in self.records], dtype=bool)
        known = np.isfinite(damping) & (damping > 0)
        if known.any():
            ax.set_yscale("log")
            ax.set_ylim(limits_of(damping[known], True, floor=HEADROOM))
        shown = np.where(known, damping, np.nan)
        style = {"color": BLUE, "linewidth": 1.2, "label": "_damping", **_markers(~refused), **line}
        self.damping_lines_ += ax.plot(at, shown, **style)
        crosses = {"color": VERMILLION, "marker": "x", "linestyle": "none", "markersize": 5, **mark}
        ax.plot(at[known & refused], damping[known & refused], **{**crosses, "label": "_refused"})
        none = damping == 0  # a full Gauss-Newton step; 0 has no place on a logarithmic axis
        if none.any():
            self._draw_zeros(ax, at[none], "λ = 0: full Gauss-Newton step")
        if not known.any():
            ax.set_yticks([])
        self._legend(ax)

    def _draw_zeros(self, ax: Any, at: np.ndarray, label: str) -> None:
        """Mark at the lower edge where there is a zero."""
        style = {"color": GREEN, "marker": "v", "linestyle": "none", "markersize": 5, "label": label}
        ax.plot(at, np.full(len(at), 0.05), transform=ax.get_xaxis_transform(), **style)

    def _legend(self, ax: Any) -> None:
        drawn = [line for line in ax.lines if not line.get_label().startswith("_") and len(line.get_xdata())]
        if len(drawn) > 1 or (drawn and drawn[0].get_label() != "cost"):
            ax.legend(handles=drawn, loc="best", fontsize="small")


def is_logarithmic(cost: np.ndarray, held_out: np.ndarray) -> bool:
    """Return whether costs are drawn on a logarithmic axis: all positive and over a decade; zeros may be at the end."""
    known = np.concatenate([cost[np.isfinite(cost)], held_out[np.isfinite(held_out)]])
    if not len(known) or known.min() < 0 or not known.max() > 0:
        return False
    positive = known[known > 0]
    return bool(known.min() == 0 or positive.max() >= SPAN * positive.min())


def limits_of(values: np.ndarray, logarithmic: bool, floor: float = 0.0) -> tuple[float, float]:
    """Return limits of an axis that show the finite values with room above them for refused trials.

    Parameters
    ----------
    values : ndarray
    logarithmic : bool
        Only positive values count.
    floor : float
        Further room below, as a share of the range.
    """
    known = values[np.isfinite(values) & ((values > 0) | (not logarithmic))]
    if not len(known):
        return (0.1, 1.0) if logarithmic else (0.0, 1.0)
    ends = np.array([known.min(), known.max()])
    if logarithmic:
        ends = np.log10(ends)
    if logarithmic and ends[1] - ends[0] < 1:
        ends = ends.mean() + np.array([-1.0, 1.0])  # ticks at powers of ten
    spread = max(ends[1] - ends[0], 0.0 if logarithmic else 0.05 * abs(ends[1]), np.finfo(float).tiny)
    low, high = ends[0] - (0.06 + floor) * spread, ends[1] + HEADROOM * spread
    return (float(10**low), float(10**high)) if logarithmic else (float(low), float(high))


def _with_margin(at: np.ndarray) -> tuple[float, float]:
    low, high = float(at.min()), float(at.max())
    margin = 0.03 * (high - low) or 0.5
    return low - margin, high + margin


def _markers(where: np.ndarray) -> dict[str, Any]:
    """Return keywords that mark some points of a line, if there are not too many."""
    few = len(where) <= MANY
    return {"marker": "o", "markersize": 3.5, "markevery": np.flatnonzero(where).tolist()} if few else {}
