r"""What SciPy's keywords mean here: each is turned into options of :class:`LMRegressor`, or refused with what to use.

``scipy.optimize.curve_fit`` hands its further keywords to ``leastsq`` (MINPACK, method "lm") or to ``least_squares``
("trf", "dogbox"). One engine stands behind all three methods here, so a keyword of either function is taken whatever
the method. None is accepted and then ignored. ``docs/scipy.md`` has the table.

===========================  ==========================================================================
keyword                      becomes
===========================  ==========================================================================
maxfev, max_nfev             ``max_iter``: trials; evaluations for differences are not counted
ftol, xtol, gtol             themselves; None switches the test off
x_scale, diag                D of the trust region: 1 / x_scale, or diag
factor                       first radius factor ‖D θ₀‖
tr_solver                    ``solver``: "exact" is "qr", "lsmr" is "cg"
col_deriv                    the Jacobian function's result is transposed
callback                     itself; StopIteration ends the fit as well
loss, f_scale                themselves
===========================  ==========================================================================
"""

import functools
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lmfit_gpu.damping import Region, TrustRegion
from lmfit_gpu.linear import Linearization

__all__ = ["MAPPED", "OWN", "REFUSED", "FactorRegion", "fit_options"]

OWN = frozenset(
    """solver backend devices dtype chunk_rows damping ftol xtol gtol max_iter random_state callback fixed tied loss
    f_scale covariance verbose""".split()
)
MAPPED = frozenset("maxfev max_nfev x_scale diag factor tr_solver col_deriv".split())
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {  # keyword: (values that ask for nothing, what to use)
    "diff_step": (
        (None,),
        "difference steps are chosen from the rounding of the model; jac='3-point' is the finer one",
    ),
    "epsfcn": ((None,), "difference steps are chosen from the rounding of the model; jac='3-point' is the finer one"),
    "Dfun": ((None,), "give the Jacobian function of the model as jac"),
    "jac_sparsity": ((None,), "J is dense here; solver='cg' with a model in torch needs no J"),
    "tr_options": ((None, {}), "there are no such options; damping=TrustRegion(...) has those of the trust region"),
    "workers": ((None,), "differences are not taken in several processes; a model in torch needs none"),
    "kwargs": ((None, {}), "bind further arguments of the model with functools.partial"),
}
TR_SOLVERS = {"exact": "qr", "lsmr": "cg"}
TOLERANCES = ("ftol", "xtol", "gtol")


@dataclass(frozen=True)
class FactorRegion(TrustRegion):
    """A trust region that starts as MINPACK's: with the radius factor ‖D θ₀‖, and factor when θ₀ = 0.

    Parameters
    ----------
    factor : float, default 100
    """

    factor: float = 100.0

    def start(self, lin: Linearization, theta: torch.Tensor) -> Region:
        """Return the first region."""
        size = float(torch.linalg.vector_norm(lin.scale * theta.double()))
        return Region(self.factor * size if size > 0 else self.factor)


def fit_options(
    keywords: dict[str, Any], n_params: int | None, jac: Any
) -> tuple[dict[str, Any], str | Callable[..., Any] | None]:
    """Return options of :class:`LMRegressor`, and jac, for the further keywords of a call.

    Parameters
    ----------
    keywords : dict
    n_params : int or None
        Number of parameters, None when not known beforehand.
    jac : str, callable or None

    Raises
    ------
    TypeError
        For an unknown keyword, one that has no meaning here (the message says what to use), or two for one thing.
    ValueError
        For a value that is not allowed.

    Examples
    --------
    >>> fit_options({"maxfev": 500, "ftol": 1e-10, "xtol": None}, 2, None)
    ({'ftol': 1e-10, 'xtol': 0.0, 'max_iter': 500}, None)
    """
    for name in keywords:
        if name == "args":
            raise ValueError(
                "'args' is not a supported keyword argument; bind further arguments with functools.partial"
            )
        if name in REFUSED:
            _refuse(name, keywords[name])
        elif name not in OWN and name not in MAPPED:
            raise TypeError(f"curve_fit() got an unexpected keyword argument {name!r}")
    options = {name: value for name, value in keywords.items() if name in OWN}
    _translate_tolerances(options)
    _translate_counts(keywords, options)
    _translate_scaling(keywords, options, n_params)
    if keywords.get("tr_solver") is not None:
        _claim("solver", "tr_solver", options)
        if keywords["tr_solver"] not in TR_SOLVERS:
            raise ValueError(f"tr_solver: got {keywords['tr_solver']!r}; None, 'exact' or 'lsmr' is expected")
        options["solver"] = TR_SOLVERS[keywords["tr_solver"]]
    if callable(options.get("callback")):
        options["callback"] = _stopped_by_exception(options["callback"])
    if keywords.get("col_deriv"):
        if not callable(jac):
            raise ValueError("col_deriv: says how a Jacobian function lays out its result; jac is not a function")
        jac = _transposed(jac)
    return options, jac


def _refuse(name: str, value: Any) -> None:
    neutral, remedy = REFUSED[name]
    if not any(value is nothing or (type(value) is type(nothing) and value == nothing) for nothing in neutral):
        raise TypeError(f"{name}: got {value!r}; {remedy}")


def _claim(option: str, keyword: str, options: dict[str, Any]) -> None:
    if option in options:
        raise TypeError(f"{keyword}: means {option}, which is given as well; give one of them")


def _translate_tolerances(options: dict[str, Any]) -> None:
    given = [name for name in TOLERANCES if name in options]
    if len(given) == len(TOLERANCES) and all(options[name] is None for name in given):
        raise ValueError("ftol, xtol, gtol: all are None; at least one of the stop tests is needed")
    for name in given:
        if options[name] is None:
            options[name] = 0.0


def _translate_counts(keywords: dict[str, Any], options: dict[str, Any]) -> None:
    for name, automatic in (("maxfev", (None, 0)), ("max_nfev", (None,))):
        value: Any = keywords.get(name)
        if value in automatic:
            continue
        whole = _is_number(value) and value >= 1 and value == value // 1
        if not whole:
            raise ValueError(f"{name}: got {value!r}; a whole number >= 1 is expected")
        _claim("max_iter", name, options)
        options["max_iter"] = int(value)


def _translate_scaling(keywords: dict[str, Any], options: dict[str, Any], n_params: int | None) -> None:
    """Turn x_scale, diag and factor into a trust region."""
    scaling: Any = None
    for name, power in (("x_scale", -1), ("diag", 1)):
        value = keywords.get(name)
        if value is None:
            continue
        if scaling is not None:
            raise TypeError("diag: means the scale of the parameters, as x_scale does; give one of them")
        is_jac = name == "x_scale" and isinstance(value, str) and value == "jac"
        scaling = "jacobian" if is_jac else _scales(name, value, n_params, options) ** power
    factor = keywords.get("factor")
    if scaling is None and factor is None:
        return
    _claim("damping", "factor" if scaling is None else "x_scale or diag", options)
    scaling = "jacobian" if scaling is None else scaling
    if factor is None:
        options["damping"] = TrustRegion(scaling=scaling)
    elif _is_number(factor) and 0 < factor < np.inf:
        options["damping"] = FactorRegion(scaling=scaling, factor=float(factor))
    else:
        raise ValueError(f"factor: got {factor!r}; a positive number is expected")


def _scales(name: str, value: Any, n_params: int | None, options: dict[str, Any]) -> np.ndarray:
    expected = f"{name}: got {value!r}; {'jac, ' if name == 'x_scale' else ''}"
    if options.get("tied") or np.size(options.get("fixed", ())):
        raise ValueError(f"{name}: not together with fixed or tied; damping=TrustRegion(scaling=...) takes free ones")
    if n_params is None:
        raise ValueError(f"{name}: give p0 as numbers, to tell how many parameters there are")
    try:
        if np.iscomplexobj(value):
            raise TypeError("complex")
        scales = np.asarray(value, dtype=float)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{expected}positive numbers are expected") from error
    scales = np.full(n_params, float(scales)) if scales.ndim == 0 else scales
    if scales.shape != (n_params,) or not (np.isfinite(scales) & (scales > 0)).all():
        raise ValueError(f"{expected}{n_params} positive numbers or one are expected")
    return scales


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _stopped_by_exception(callback: Callable[..., Any]) -> Callable[..., Any]:
    def stopping(record: Any) -> Any:
        try:
            return callback(record)
        except StopIteration:  # how a callback of SciPy ends a fit
            return True

    return stopping


def _transposed(jac: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(jac)
    def transposed(*arguments: Any) -> Any:
        columns = jac(*arguments)
        return columns.T if isinstance(columns, torch.Tensor) else np.asarray(columns).T

    return transposed
