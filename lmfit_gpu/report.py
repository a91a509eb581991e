"""The report of a fit, as text and as HTML: what was fitted, why it stopped, the parameters, and what to beware of.

One list of parts makes both. A part is a title and a table, or lines of text.
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import ndtr, stdtr

from lmfit_gpu.goodness import goodness_of_fit

__all__ = ["Facts", "Report", "not_estimated", "report_of"]

SHOWN_PARAMETERS = 60
SHOWN_CORRELATIONS = 12
SHOWN_TRIALS = 10
NAMES_SHOWN = 6
GROUPS_SHOWN = 3
MOST_SORTED = 50  # undetermined parameters: of a network's hundreds nobody reads the combinations
CORRELATED = 0.1
STRONGLY = 0.99  # nearly one parameter: each error is seven times what it would be if the other were known
COLLINEAR = 1e8  # condition number at which half of the digits are lost
IMPROBABLE = 1e-3  # of a chi-square, on either side
LEVEL = 0.95
WIDTH = 100
HEAD = ("parameter", "value", "std error", "rel. %", "t", "p", "lower 95 %", "upper 95 %", "")


@dataclass(frozen=True)
class Facts:
    """What an estimator knows of a fit and its result does not.

    Parameters
    ----------
    model, data : str
    given : dict of str to str
        Options that are not the default.
    bounds : dict of int to (lower, upper)
    """

    model: str = ""
    data: str = ""
    given: Mapping[str, str] = field(default_factory=dict)
    bounds: Mapping[int, tuple[float, float]] = field(default_factory=dict)


class Report(str):
    """A report: text, which a notebook shows as tables."""

    __slots__ = ("_page",)
    _page: str

    def __new__(cls, text: str, page: str) -> "Report":
        """Return a text with its page of HTML."""
        self = super().__new__(cls, text)
        self._page = page
        return self

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        """Return what a copy is made of."""
        return str(self), self._page

    def _repr_html_(self) -> str:
        """Return the report as HTML."""
        return self._page


@dataclass(frozen=True)
class _Part:
    """Lines under a title: texts, or a table where there is a header."""

    title: str
    rows: Sequence[tuple[str, ...]]
    header: tuple[str, ...] = ()
    is_fixed: bool = False  # lines whose columns are spaces

    def text(self) -> str:
        rows = [self.header, *self.rows] if self.header else self.rows
        if not self.header and all(len(row) == 1 for row in rows):
            lines = [row[0] if self.is_fixed else _wrapped(row[0]) for row in rows]
        elif not self.header:
            lines = [_wrapped(f"{name:12s} {value}", 13) for name, value in rows]
        else:
            widths = [max(len(row[i]) for row in rows) for i in range(len(self.header))]
            lines = [_aligned(row, widths) for row in rows]
        title = [f"{self.title}"] if self.title else []
        return "\n".join([*title, *(f"  {line}" if self.title else line for line in lines)])

    def page(self) -> str:
        title = f"<h4>{html.escape(self.title)}</h4>" if self.title else ""
        if self.is_fixed:
            return f"{title}<pre>{html.escape(chr(10).join(row[0] for row in self.rows))}</pre>"
        if not self.header and all(len(row) == 1 for row in self.rows):
            return title + "".join(f"<p>{html.escape(row[0])}</p>" for row in self.rows)
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.header)
        body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in self.rows)
        return f"{title}<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def report_of(result: Any, facts: Facts | None = None) -> Report:
    """Return the report of a fit.

    Parameters
    ----------
    result : Result
    facts : Facts, optional
    """
    facts = Facts() if facts is None else facts
    about = [(name, text) for name, text in (("model", facts.model), ("data", facts.data)) if text]
    parts = [
        _Part("", [(result.brief(),), (result.message,)]),
        _Part("", about),
        _Part("Parameters", *_parameters(result, facts)),
        _Part("Goodness of fit", _goodness(result)),
        _Part(f"Correlations above {CORRELATED:g}", _correlations(result)),
        _Part("Beware", [(text,) for text in _warnings(result)]),
        _Part("Options given", list(facts.given.items())),
        _Part("Used", [(key, str(value)) for key, value in result.used.items()]),
        _Part("Last trials", [(line,) for line in result.table(last=SHOWN_TRIALS).splitlines()], is_fixed=True),
    ]
    parts = [part for part in parts if part.rows]
    return Report("\n\n".join(part.text() for part in parts), f"<div>{''.join(part.page() for part in parts)}</div>")


def _aligned(row: tuple[str, ...], widths: Sequence[int]) -> str:
    cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True))]
    return "  ".join([*cells, row[-1]]).rstrip()


def _wrapped(text: str, indent: int = 0) -> str:
    """Return a text in lines of at most WIDTH, broken at spaces."""
    lines, line = [], ""
    for word in text.split(" "):
        if line and len(line) + 1 + len(word) > WIDTH - 2:
            lines.append(line)
            line = " " * indent + word
        else:
            line = f"{line} {word}" if line else word
    return "\n  ".join([*lines, line])


def _parameters(result: Any, facts: Facts) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    errors, intervals = result.stderr, result.conf_int(LEVEL)
    rows: list[tuple[str, ...]] = []
    for j in range(min(len(result.theta), SHOWN_PARAMETERS)):
        value, error, role = float(result.theta[j]), float(errors[j]), result.roles.get(j, "")
        if j in facts.bounds and "bound" not in role:
            low, high = facts.bounds[j]
            role = "; ".join(part for part in (role, f"in ({low:g}, {high:g})") if part)
        relative = t = p = low_text = high_text = ""
        if 0 < error < np.inf:
            relative = f"{100 * error / abs(value):.2g}" if value else ""
            ratio = value / error
            t, p = f"{ratio:.3g}", _probability(ratio, result.t_dof)
            low_text, high_text = (_number(end, error) for end in intervals[j])
        rows.append((result.names[j], _number(value, error), f"{error:.3g}", relative, t, p, low_text, high_text, role))
    more = len(result.theta) - len(rows)
    if more > 0:
        rows.append((f"... and {more} more", *[""] * (len(HEAD) - 1)))
    return rows, HEAD


def _number(value: float, error: float) -> str:
    """Return a value with the digits that its error supports, three of the error's own.

    Examples
    --------
    >>> _number(2.49986464, 0.00978515), _number(1234567.0, 0.5), _number(0.25, float("inf"))
    ('2.49986', '1234567.000', '0.25')
    """
    if not (0 < error < np.inf and np.isfinite(value)):
        return f"{value:.6g}"
    decimals = 2 - math.floor(math.log10(error))
    size = max(abs(value), error)
    if decimals < 0 or size >= 1e7 or size < 1e-4:
        digits = max(3 + math.floor(math.log10(size)) - math.floor(math.log10(error)), 3)
        return f"{value:.{min(digits, 15)}g}"
    return f"{value:.{min(decimals, 15)}f}"


def _probability(ratio: float, dof: float) -> str:
    """Return the probability of a larger |t| if the parameter were 0."""
    tail = ndtr(-abs(ratio)) if dof == np.inf else stdtr(dof, -abs(ratio))
    p = 2 * float(tail)
    return f"{p:.2g}" if p >= 1e-16 else "<1e-16"


def _goodness(result: Any) -> list[tuple[str, ...]]:
    found = goodness_of_fit(result)
    unit = "χ²" if result.absolute_sigma or "sigma" in result.used else "sum of squares"
    first = f"residuals {result.n_residuals}, rank {result.rank}, degrees of freedom {_short(result.dof)}"
    second = [f"{unit} {found.chi_square:.6g}"]
    if np.isfinite(found.s):
        second.append(f"s {found.s:.6g}" if unit != "χ²" else f"χ²/dof {found.reduced_chi_square:.6g}")
    if np.isfinite(found.p_value):
        second.append(f"p {found.p_value:.3g}")
    if np.isfinite(found.r_squared):
        second.append(f"R² {found.r_squared:.6g}, adjusted {found.adjusted_r_squared:.6g}")
    rows: list[tuple[str, ...]] = [(first,), (", ".join(second),)]
    if np.isfinite(found.aic):
        aicc = f", AICc {found.aicc:.6g}" if np.isfinite(found.aicc) else ""
        likelihood = f"log-likelihood {found.log_likelihood:.6g}"
        rows.append((f"{likelihood}, AIC {found.aic:.6g}{aicc}, BIC {found.bic:.6g}",))
    if np.isfinite(result.condition):
        rows.append((f"condition number of the scaled Jacobian {result.condition:.3g}",))
    return rows


def _short(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.6g}"


def _pairs(result: Any) -> list[tuple[float, str, str]]:
    """Return (r, name, name) of correlated parameters, the largest first."""
    if result.factor is None or len(result.theta) > SHOWN_PARAMETERS:
        return []
    matrix = np.abs(np.nan_to_num(result.correlation))
    rows, columns = np.nonzero(np.triu(matrix, 1) > CORRELATED)
    found = [
        (float(result.correlation[i, j]), result.names[i], result.names[j]) for i, j in zip(rows, columns, strict=True)
    ]
    return sorted(found, key=lambda pair: -abs(pair[0]))


def _correlations(result: Any) -> list[tuple[str, ...]]:
    found = _pairs(result)
    rows = [(f"{a}, {b}", f"{r:+.4f}") for r, a, b in found[:SHOWN_CORRELATIONS]]
    width = max((len(pair) for pair, _ in rows), default=0)
    lines: list[tuple[str, ...]] = [(f"{pair.ljust(width)}  {r}",) for pair, r in rows]
    more = len(found) - len(rows)
    return [*lines, (f"... and {more} more",)] if more > 0 else lines


def _warnings(result: Any) -> list[str]:
    """Return what to beware of, each with what to do."""
    found = []
    if not result.success and result.status.name != "STOPPED_EARLY":
        found.append("Not a minimum: errors and intervals are those of the best point as if it were one.")
    missing = not_estimated(result)
    if missing:
        held = f"; fix or tie one of them, such as fixed=[{result.unseen[0].names[-1]!r}]" if result.unseen else ""
        found.append(f"{missing[0].upper()}{missing[1:]}{held}.")
        if int(result.undetermined.sum()) <= MOST_SORTED:
            known = [
                f"{expression} = {_number(value, error)} ± {error:.3g}"
                for group in result.unseen[:GROUPS_SHOWN]
                for expression, value, error in zip(group.expressions, group.values, group.stderr, strict=True)
            ]
            found += [f"Determined of them: {'; '.join(known)}."] if known else []
    bound = [name for j, name in enumerate(result.names[:SHOWN_PARAMETERS]) if "bound" in result.roles.get(j, "")]
    if bound:
        found.append(
            f"On a bound: {', '.join(bound)}. Held there for the errors of the others; profile_likelihood gives "
            "intervals that know of the bound."
        )
    strong = [f"{a} and {b} ({r:+.5f})" for r, a, b in _pairs(result) if abs(r) > STRONGLY]
    if strong:
        more = f" and {len(strong) - GROUPS_SHOWN} more pairs" if len(strong) > GROUPS_SHOWN else ""
        found.append(
            f"Nearly the same to the data: {', '.join(strong[:GROUPS_SHOWN])}{more}. Center x, rescale, or measure "
            "where they differ; intervals of one alone may be far from symmetric: profile_likelihood."
        )
    if result.condition > COLLINEAR and np.isfinite(result.condition):
        found.append(
            f"Condition number {result.condition:.2g}: about {16 - math.log10(result.condition):.0f} of 16 digits are "
            "left in the errors; rescale or center x, or reparametrise."
        )
    p = goodness_of_fit(result).p_value
    if np.isfinite(p) and (p < IMPROBABLE or p > 1 - IMPROBABLE):
        what = "larger" if p < 0.5 else "smaller"
        found.append(
            f"Residuals are {what} than sigma says (χ²/dof {result.chi_square / result.dof:.3g}): the model or sigma "
            "is wrong, and with it the errors; without absolute_sigma they are scaled by the residuals."
        )
    return found


def not_estimated(result: Any) -> str:
    """Return which standard errors are not estimated and why, or "".

    Parameters
    ----------
    result : Result
    """
    if result.factor is None:
        return (
            f"no covariance: solver={result.used['solver']!r} keeps no dense matrix of {len(result.theta)} "
            "parameters; standard errors are NaN"
        )
    if "no covariance" in result.used:
        return str(result.used["no covariance"])
    if not result.has_variance:
        return (
            f"no degrees of freedom: {result.n_residuals} residuals for {result.n_estimated} parameters (rank "
            f"{result.rank}); standard errors are infinite. Give more data, or fewer parameters"
        )
    if not result.undetermined.any():
        return ""
    names = [name for name, lost in zip(result.names, result.undetermined, strict=True) if lost]
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    told = ""
    if len(names) <= MOST_SORTED:
        told = "; ".join(group.text for group in result.unseen[:GROUPS_SHOWN])
    return (
        f"the data do not determine {', '.join(names[:NAMES_SHOWN])}{more}: the Jacobian has rank "
        f"{result.rank} for {result.n_estimated} parameters; their standard errors are infinite"
        f"{f'. {told}' if told else ''}"
    )
