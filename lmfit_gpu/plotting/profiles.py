"""Profiles of the cost, beside the straight lines and ellipses that standard errors assume.

In one dimension ζ(b) = sign(b − b̂) √((S(b) − Ŝ)/s²), where S(b) is the least sum of squares with the parameter held at
b. A model that is linear in its parameters gives the straight line (b − b̂)/stderr; the bend of ζ is what a Wald
interval, b̂ ± t·stderr, leaves out. The profile interval ends where ζ = ±t.

In two dimensions the contours ζ² = 2 F(level; 2, dof) are joint confidence regions, and Wald's are the ellipses
(b − b̂)ᵀ C⁻¹ (b − b̂) of the same size, with the covariance C of the two.

Bates and Watts (1988), Nonlinear Regression Analysis and Its Applications, sections 6.1 and 6.2
(doi 10.1002/9780470316757).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.interpolate import PchipInterpolator

from lmfit_gpu.plotting.axes import BLUE, GREY, VERMILLION, check_axes, merged, panels, percent, plain_array
from lmfit_gpu.plotting.regions import draw_regions, ellipse, traces_of

__all__ = ["ProfileDisplay"]

SIZE = (3.5, 2.9)
MAP_SIZE = (5.4, 4.4)
FINE = 300  # points of a curve through a profile
ROOM = 1.25  # of the highest |ζ| that is marked


class ProfileDisplay:
    """Profiles of parameters, or a map of two.

    Parameters
    ----------
    profiles : Profile, mapping of name to Profile, or sequence of Profile, optional
        As ``est.profile_likelihood()`` returns.
    profile_map : ProfileMap, optional
        As ``est.profile_map(name_x, name_y)`` returns; instead of `profiles`.
    covariance : array_like, shape (2, 2), optional
        Of the two parameters of the map, scaled; default: the map's own, where it has one. Without it no ellipses.

    Attributes
    ----------
    ax_, figure_ : Axes, Figure
        The first of the axes.
    axes_ : ndarray of Axes, shape (n_profiles,)
    lines_ : list of Line2D
        ζ, one for each profile.
    points_ : list of Line2D
        The constrained fits on it.
    wald_lines_ : list of Line2D
        The straight lines, and on a map one ellipse for each level; none where there is no standard error.
    interval_lines_ : list of Line2D
        The ends of the intervals that were reached.
    contours_ : QuadContourSet or None
        Of the map; it holds √ζ².
    trace_lines_ : list of Line2D
    """

    def __init__(self, *, profiles: Any = None, profile_map: Any = None, covariance: Any = None) -> None:
        if (profiles is None) == (profile_map is None):
            raise ValueError("profiles and profile_map: one of the two is expected")
        self.profiles = [] if profiles is None else _listed(profiles)
        self.profile_map = profile_map
        if profile_map is None and covariance is not None:
            raise ValueError("covariance: given without a profile_map")
        if profile_map is not None and covariance is None:
            covariance = getattr(profile_map, "covariance", None)
        self.covariance = None if covariance is None else plain_array(covariance, "covariance")
        if self.covariance is not None and self.covariance.shape != (2, 2):
            raise ValueError(f"covariance: got shape {self.covariance.shape}; (2, 2) is expected")

    def plot(
        self,
        ax: Any = None,
        *,
        absolute: bool = False,
        wald: bool = True,
        traces: bool = False,
        line_kwargs: Mapping[str, Any] | None = None,
        wald_kwargs: Mapping[str, Any] | None = None,
    ) -> "ProfileDisplay":
        """Draw.

        Parameters
        ----------
        ax : Axes, or array of one for each profile, optional
            One is divided.
        absolute : bool
            Draw the size of ζ, without its sign. Not for a map.
        wald : bool
            Draw what standard errors assume, too.
        traces : bool
            Draw where each parameter is best for given values of the other. Only for a map.
        line_kwargs, wald_kwargs : dict, optional
            For the profiles or contours, and for Wald's lines or ellipses.

        Returns
        -------
        self
        """
        line, assumed = merged({}, line_kwargs, "line", "line_kwargs"), merged({}, wald_kwargs, "line", "wald_kwargs")
        self.lines_: list[Any] = []
        self.points_: list[Any] = []
        self.wald_lines_: list[Any] = []
        self.interval_lines_: list[Any] = []
        self.trace_lines_: list[Any] = []
        self.contours_: Any = None
        if self.profile_map is not None:
            if absolute:
                raise ValueError("absolute: got True; a map has no sign")
            self.axes_ = panels(ax, 1, 1, MAP_SIZE)
            self._draw_map(self.axes_[0], wald, traces, line, assumed)
        else:
            if traces:
                raise ValueError("traces: got True; only a map of two parameters has them")
            n = len(self.profiles)
            self.axes_ = panels(ax, n, 2 if n in (2, 4) else 3, SIZE)
            for axes, profile in zip(self.axes_, self.profiles, strict=True):
                self._draw_profile(axes, profile, absolute, wald, line, assumed)
            handles = [self.lines_[0], *self.wald_lines_[:1]]
            self.axes_[0].legend(handles=handles, loc="upper center" if absolute else "upper left", fontsize="small")
        self.ax_, self.figure_ = self.axes_[0], self.axes_[0].figure
        return self

    @classmethod
    def from_profile(cls, profile: Any, *, covariance: Any = None, ax: Any = None, **kwargs: Any) -> "ProfileDisplay":
        """Draw what was computed before.

        Parameters
        ----------
        profile : Profile, ProfileLikelihood, sequence of Profile, or ProfileMap
        covariance : array_like, shape (2, 2), optional
            Of the two parameters of a map.
        ax : Axes or array of them, optional
        **kwargs
            As in :meth:`plot`.
        """
        check_axes(ax)
        given = {"profile_map": profile} if hasattr(profile, "zeta2") else {"profiles": profile}
        return cls(**given, covariance=covariance).plot(ax, **kwargs)

    @classmethod
    def from_estimator(
        cls, estimator: Any, names: Sequence[str] | None = None, *, level: float = 0.95, ax: Any = None, **kwargs: Any
    ) -> "ProfileDisplay":
        """Profile parameters of a fitted estimator, and draw them.

        Parameters
        ----------
        estimator : LMRegressor
        names : sequence of str, optional
            Default: all that can be profiled.
        level : float
            Of the intervals.
        ax : Axes or array of them, optional
        **kwargs
            As in :meth:`plot`.
        """
        check_axes(ax)
        return cls(profiles=estimator.profile_likelihood(names, level)).plot(ax, **kwargs)

    @classmethod
    def map_from_estimator(  # noqa: PLR0913
        cls,
        estimator: Any,
        name_x: str,
        name_y: str,
        *,
        levels: Sequence[float] = (0.683, 0.955),
        shape: tuple[int, int] = (25, 25),
        limits: Any = None,
        ax: Any = None,
        **kwargs: Any,
    ) -> "ProfileDisplay":
        """Map the cost over two parameters of a fitted estimator, and draw it.

        Parameters
        ----------
        estimator : LMRegressor
        name_x, name_y : str
        levels, shape, limits
            As in ``profile_map`` of the estimator.
        ax : Axes, optional
        **kwargs
            As in :meth:`plot`.
        """
        check_axes(ax)
        found = estimator.profile_map(name_x, name_y, levels=levels, shape=shape, limits=limits)
        return cls(profile_map=found).plot(ax, **kwargs)

    def _draw_profile(
        self, ax: Any, profile: Any, absolute: bool, wald: bool, line: dict[str, Any], assumed: dict[str, Any]
    ) -> None:
        values, zeta = (np.asarray(part, dtype=float) for part in (profile.values, profile.zeta))
        known = np.isfinite(values) & np.isfinite(zeta)
        values, zeta = values[known], zeta[known]
        threshold = threshold_of(profile)
        fine, curve = _through(values, zeta)
        low, high = (float(fine[0]), float(fine[-1])) if len(fine) else (profile.estimate - 1, profile.estimate + 1)

        def shown(z: np.ndarray) -> np.ndarray:
            return np.abs(z) if absolute else z

        if wald and np.isfinite(profile.stderr) and profile.stderr > 0:
            places = np.array([low, profile.estimate, high])
            style = {"color": GREY, "linewidth": 1.2, "linestyle": (0, (5, 3)), "label": "linear (Wald)", **assumed}
            self.wald_lines_ += ax.plot(places, shown((places - profile.estimate) / profile.stderr), **style)
        style = {"color": BLUE, "linewidth": 1.6, "label": "profile", **line}
        self.lines_ += ax.plot(fine, shown(curve), **style)
        self.points_ += ax.plot(values, shown(zeta), linestyle="none", marker="o", markersize=3, color=style["color"])
        height = float(np.max(np.abs(zeta), initial=0.0))
        if threshold is not None:
            height = min(height, 2 * threshold)
            for level in (threshold,) if absolute else (-threshold, threshold):
                ax.axhline(level, color=GREY, linewidth=0.7, linestyle=":")
            self._mark_ends(ax, profile, threshold, absolute)
            height = max(height, threshold)
        height = ROOM * (height or 1.0)
        ax.set(xlabel=profile.name, ylabel="|ζ|" if absolute else "ζ")
        ax.set_ylim(0.0 if absolute else -height, height)
        ax.set_title(interval_text(profile), fontsize="small")
        ax.locator_params(axis="x", nbins=5)

    def _mark_ends(self, ax: Any, profile: Any, threshold: float, absolute: bool) -> None:
        floor = 0.0 if absolute else -ROOM * 10 * threshold
        for end, reached, sign in zip(profile.interval, profile.reached, (-1, 1), strict=True):
            if reached:
                top = threshold if absolute else sign * threshold
                style = {"color": VERMILLION, "linewidth": 1.1, "scaley": False}
                self.interval_lines_ += ax.plot([end, end], [floor, top], **style)

    def _draw_map(self, ax: Any, wald: bool, traces: bool, line: dict[str, Any], assumed: dict[str, Any]) -> None:
        found = self.profile_map
        self.contours_ = draw_regions(ax, found, line)
        from matplotlib.lines import Line2D

        handles = [Line2D([], [], **{"color": BLUE, "linewidth": 1.6, "label": "profile", **line})]
        if wald and self.covariance is not None and np.isfinite(self.covariance).all():
            limits = ax.get_xlim(), ax.get_ylim()
            style = {"color": GREY, "linewidth": 1.2, "linestyle": (0, (5, 3)), "label": "ellipse (Wald)", **assumed}
            for threshold in found.levels.values():
                edge = ellipse(np.asarray(found.estimate, dtype=float), self.covariance, float(threshold))
                self.wald_lines_ += ax.plot(*edge, **style)
            ax.set(xlim=limits[0], ylim=limits[1])
            handles.append(self.wald_lines_[0])
        if traces:
            for across, look in zip(traces_of(found), ("-", "-."), strict=True):
                self.trace_lines_ += ax.plot(*across, color=VERMILLION, linewidth=1.0, linestyle=look)
            self.trace_lines_[0].set_label(f"best {found.name_y} for {found.name_x}")
            self.trace_lines_[1].set_label(f"best {found.name_x} for {found.name_y}")
            handles += self.trace_lines_
        ax.plot(*found.estimate, marker="+", color="k", markersize=9, linestyle="none")
        ax.set(xlabel=found.name_x, ylabel=found.name_y)
        ax.legend(handles=handles, loc="best", fontsize="small")


def threshold_of(profile: Any) -> float | None:
    """Return |ζ| at the ends of the interval, t of its level; None if no end was reached.

    The profile's own ``threshold`` where it has one; else ζ at the end that lies between the nearest two of its values.
    """
    own = getattr(profile, "threshold", None)
    if own is not None:
        return float(own)
    values, zeta = (np.asarray(part, dtype=float) for part in (profile.values, profile.zeta))
    known = np.isfinite(values) & np.isfinite(zeta)
    values, zeta = values[known], zeta[known]
    curve, found = _curve(values, zeta), []
    for end, reached in zip(profile.interval, profile.reached, strict=True):
        if reached and curve is not None:
            k = int(np.clip(np.searchsorted(values, end), 1, len(values) - 1))
            found.append((abs(zeta[k] - zeta[k - 1]), abs(float(curve(end)))))
    return min(found)[1] if found else None


def _curve(values: np.ndarray, zeta: np.ndarray) -> Any:
    """Return a monotone cubic through a profile (Fritsch and Butland 1984, doi 10.1137/0905021), or None."""
    places, first = np.unique(values, return_index=True)
    return PchipInterpolator(places, zeta[first]) if len(places) > 1 else None


def _through(values: np.ndarray, zeta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    curve = _curve(values, zeta)
    if curve is None:
        return values, zeta
    fine = np.union1d(np.linspace(values.min(), values.max(), FINE), values)
    return fine, curve(fine)


def interval_text(profile: Any) -> str:
    """Return level and interval, with the digits that its width calls for.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> interval_text(SimpleNamespace(level=0.95, interval=(181.02, 258.571)))
    '95 %: 181.0 to 258.6'
    >>> interval_text(SimpleNamespace(level=0.9, interval=(float("-inf"), 0.0123456)))
    '90 %: −∞ to 0.01235'
    """
    lower, upper = (float(end) for end in profile.interval)
    width = upper - lower
    form = ".4g"
    if np.isfinite(width) and width > 0:
        decimals = 2 - int(np.floor(np.log10(width / 2)))
        largest = max(abs(lower), abs(upper))
        if 1e-3 <= largest < 1e6 and decimals <= 7:
            form = f".{max(decimals, 0)}f"
        else:
            form = f".{max(int(np.floor(np.log10(largest))) + decimals + 1, 3)}g"
    return f"{percent(profile.level)}: {_written(lower, form)} to {_written(upper, form)}"


def _written(value: float, form: str) -> str:
    if np.isinf(value):
        return "∞" if value > 0 else "−∞"
    return "?" if np.isnan(value) else f"{value:{form}}".replace("-", "−")


def _listed(profiles: Any) -> list[Any]:
    """Return profiles as a list, checked."""
    if isinstance(profiles, Mapping):
        profiles = list(profiles.values())
    listed = list(profiles) if isinstance(profiles, (list, tuple)) else [profiles]
    if not listed:
        raise ValueError("profiles: got none; at least one is expected")
    for profile in listed:
        if not all(hasattr(profile, name) for name in ("name", "values", "zeta", "interval", "reached")):
            raise TypeError(
                f"profiles: got {type(profile).__name__}; what profile_likelihood or profile_map returns is expected"
            )
    return listed
