"""What every display shares: matplotlib where there is one, the axes to draw on, colours, keywords of artists."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from lmfit_gpu.exceptions import BackendUnavailableError

__all__ = [
    "BLUE",
    "COLOURS",
    "GREEN",
    "GREY",
    "INK",
    "ORANGE",
    "VERMILLION",
    "check_axes",
    "check_level",
    "merged",
    "one_of",
    "panels",
    "percent",
    "plain_array",
    "pyplot",
]

# Okabe and Ito (2008), "Color universal design": told apart with every common kind of colour blindness.
BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
COLOURS = (BLUE, VERMILLION, GREEN, "#CC79A7", ORANGE, "#56B4E9")
INK = "0.15"  # data
GREY = "0.45"  # lines that only guide the eye


def pyplot() -> Any:
    """Return :mod:`matplotlib.pyplot`.

    Raises
    ------
    BackendUnavailableError
        If matplotlib is not installed.
    """
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        raise BackendUnavailableError("plots need matplotlib: pip install 'lmfit_gpu[plot]'") from error
    return plt


def check_axes(ax: Any) -> None:
    """Check, before any work, that matplotlib is there and that `ax` is None, an Axes or an array of them.

    Raises
    ------
    BackendUnavailableError
        If matplotlib is not installed.
    TypeError
        If `ax` is something else.
    """
    pyplot()
    from matplotlib.axes import Axes

    parts: Any = [] if ax is None else np.asarray(ax, dtype=object).ravel()
    for part in parts:
        if not isinstance(part, Axes):
            raise TypeError(f"ax: got {type(part).__name__}; a matplotlib Axes, an array of them, or None is expected")


def panels(ax: Any, n: int, n_columns: int, size: tuple[float, float], layout: str = "constrained") -> np.ndarray:
    """Return `n` axes to draw on, shape (n,), row by row.

    Parameters
    ----------
    ax : None, Axes, or array_like of n Axes
        None: a new figure of pyplot. One Axes, where several are needed, is divided and is no longer drawn itself.
    n, n_columns : int
    size : tuple of float
        Width and height of one panel of a new figure, in inches.
    layout : {"constrained", "compressed"}
        Of a new figure: the latter for axes of equal units.

    Raises
    ------
    TypeError
        As :func:`check_axes`.
    ValueError
        For another number of axes, or one that stands in no grid and cannot be divided.
    """
    check_axes(ax)
    n_columns = min(n_columns, n)
    shape = (-(-n // n_columns), n_columns)
    if ax is None:
        inches = (size[0] * shape[1], size[1] * shape[0])
        figure, cells = pyplot().subplots(*shape, squeeze=False, figsize=inches, layout=layout)
        for cell in cells.flat[n:]:
            figure.delaxes(cell)
        return cells.ravel()[:n]
    given = np.asarray(ax, dtype=object).ravel()
    if len(given) == n:
        return given
    if len(given) > 1 or not len(given):
        raise ValueError(f"ax: got {len(given)} axes; one, to be divided, or {n} are expected")
    place = given[0].get_subplotspec()
    if place is None:
        raise ValueError(f"ax: got one that stands in no grid and cannot be divided; {n} axes are expected")
    given[0].set_axis_off()
    grid = place.subgridspec(*shape)
    made = np.empty(n, dtype=object)
    for i in range(n):
        made[i] = given[0].figure.add_subplot(grid[divmod(i, n_columns)])
    return made


def merged(defaults: Mapping[str, Any], given: Any, artist: str, name: str) -> dict[str, Any]:
    """Return keywords of an artist, those given before the defaults; short names (``lw``) are matplotlib's.

    Parameters
    ----------
    defaults : mapping
        By their full names.
    given : mapping or None
    artist : str
        "line" or "fill": whose short names they are.
    name : str
        Of the argument.
    """
    if given is None:
        return dict(defaults)
    if not isinstance(given, Mapping):
        raise TypeError(f"{name}: got {type(given).__name__}; a dict of matplotlib's keywords is expected")
    from matplotlib import cbook, collections, lines

    kinds = {"line": lines.Line2D, "fill": collections.PolyCollection}
    return {**defaults, **cbook.normalize_kwargs(dict(given), kinds[artist])}


def one_of(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Raise ValueError unless `value` is one of those allowed."""
    if not (value is None or isinstance(value, str)) or value not in allowed:
        raise ValueError(f"{name}: got {value!r}; one of {', '.join(map(repr, allowed))} is expected")


def check_level(level: Any) -> None:
    """Raise ValueError unless `level` is between 0 and 1."""
    if isinstance(level, bool) or not isinstance(level, (int, float, np.number)) or not 0 < float(level) < 1:
        raise ValueError(f"level: got {level!r}; a number between 0 and 1 is expected, such as 0.95")


def percent(level: float) -> str:
    """Return a level as text.

    Examples
    --------
    >>> percent(0.95), percent(0.683)
    ('95 %', '68.3 %')
    """
    return f"{100 * level:.6g} %"


def plain_array(values: Any, name: str) -> np.ndarray:
    """Return numbers, arrays or tensors on any device, as a float64 array.

    Raises
    ------
    ValueError
        If they are not real numbers.
    """
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if np.iscomplexobj(array):
        raise ValueError(f"{name}: got complex numbers; real ones can be drawn")
    try:
        return np.asarray(array, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: got {type(values).__name__} that is not numbers: {error}") from error
