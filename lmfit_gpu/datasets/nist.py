"""The 27 NIST StRD nonlinear regression problems, with certified answers.

Each problem is data (X, y), a model f(x, b1, ..., bk), two starts (the first far from the solution, the second
near) and the least-squares solution: parameters b, standard errors s(b), residual sum of squares

    rss = Σᵢ (f(xᵢ, b) − yᵢ)²,   residual_std = √(rss / dof),   dof = n_obs − k,
    s(b)ⱼ = residual_std · √[(JᵀJ)⁻¹]ⱼⱼ,   J = ∂f/∂b at b.

Two solutions come with a problem. `certified` is what NIST prints: 11 digits, and one misprint (Rat43 says 9
degrees of freedom, see `NistProblem`). `reference` is the same solution worked out again with 60-digit arithmetic
and printed to 20 digits (in ENSO's parameters 17 are sure); it agrees with every certified number to 10 digits or
more, so count digits against it. `tests/test_datasets.py` checks both in mpmath.

Lanczos1 needs care: its y are printed with 14 digits, its residuals are no more than that rounding (rss 1.43e-25),
and rounding y once more, to float64, changes rss in the fourth digit. In float64, at the solution, 2.9 digits of
its rss and 3.2 of its standard errors are right (same tests); use `params_text` and mpmath for more.

The data file is `nist_strd.json`, package data; NIST's files are in the public domain.

References
----------
NIST/ITL Statistical Reference Datasets, nonlinear regression,
https://www.itl.nist.gov/div898/strd/nls/nls_main.shtml (files as shipped in lmfit 1.3.4).
B. D. McCullough (1998), "Assessing the reliability of statistical software: Part I", The American Statistician
52(4), 358-366: the log relative error.
"""

import json
import math
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmfit_gpu.datasets.nist_models import BODIES, NistModel

__all__ = ["NIST_NAMES", "NistProblem", "NistSolution", "correct_digits", "load_nist"]

#: The names `load_nist` takes, from NIST's lower to its higher level of difficulty.
NIST_NAMES: tuple[str, ...] = tuple(BODIES)

MAX_DIGITS = 15.0  # decimal digits that every float64 holds (C's DBL_DIG); more agreement than that is chance


@dataclass(frozen=True, eq=False)
class NistSolution:
    """Hold a least-squares solution: parameters, standard errors, residuals.

    Attributes
    ----------
    params : ndarray of shape (k,), float64
        b1 ... bk.
    stderr : ndarray of shape (k,), float64
        Their standard errors, residual_std · √diag (JᵀJ)⁻¹.
    rss : float
        Residual sum of squares, Σ (prediction − y)².
    residual_std : float
        √(rss / dof).
    dof : int
        Degrees of freedom, n_obs − k. In `certified` as NIST prints it.
    params_text, stderr_text : tuple of str
        The same numbers in decimal: 20 digits in `reference`, for mpmath or `decimal`.
    rss_text : str
        rss in decimal.
    """

    params: NDArray[np.float64]  # (k,)
    stderr: NDArray[np.float64]  # (k,)
    rss: float
    residual_std: float
    dof: int
    params_text: tuple[str, ...] = field(repr=False)
    stderr_text: tuple[str, ...] = field(repr=False)
    rss_text: str = field(repr=False)


@dataclass(frozen=True, eq=False)
class NistProblem:
    """Hold one NIST nonlinear regression problem.

    The residual of every problem is ``model(x, *b) - y``. For Nelson NIST models the logarithm of the response, so
    there `y` is ``log(response)``; everywhere else `y` equals `response`.

    Attributes
    ----------
    name, level, data_kind, model_class, description, model_text : str
        NIST's words. `level` is "Lower", "Average" or "Higher", `data_kind` "Observed" or "Generated".
    param_names : tuple of str
        ("b1", ..., "bk").
    X : ndarray of shape (n_obs, n_predictors), float64
        The predictors.
    y : ndarray of shape (n_obs,), float64
        What the model predicts.
    response : ndarray of shape (n_obs,), float64
        The response as printed.
    starts : tuple of two ndarrays of shape (k,), float64
        Start 1 (far) and start 2 (near).
    certified : NistSolution
        As NIST prints it.
    reference : NistSolution
        To 20 digits.
    model_numpy, model_torch : callable
        ``f(x, b1, ..., bk)`` returning shape (n_obs,); `inspect.signature` gives these names. They can be pickled
        and deep-copied.

    Notes
    -----
    Erratum: NIST's Rat43.dat prints 9 degrees of freedom. With 15 observations and 4 parameters there are 11, and
    NIST's residual standard deviation and standard errors are those of 11. ``certified.dof`` keeps the misprint;
    `dof` and ``reference.dof`` are right. Everything else NIST prints agrees with `reference`.

    The arrays belong to the caller: each `load_nist` makes new ones. They are writable, because `torch.as_tensor`
    warns about arrays that are not.
    """

    name: str
    level: str
    data_kind: str
    model_class: str
    description: str = field(repr=False)
    model_text: str
    param_names: tuple[str, ...]
    X: NDArray[np.float64] = field(repr=False)  # (n_obs, n_predictors)
    y: NDArray[np.float64] = field(repr=False)  # (n_obs,)
    response: NDArray[np.float64] = field(repr=False)  # (n_obs,)
    starts: tuple[NDArray[np.float64], NDArray[np.float64]] = field(repr=False)  # each (k,)
    certified: NistSolution = field(repr=False)
    reference: NistSolution = field(repr=False)
    model_numpy: NistModel = field(repr=False)
    model_torch: NistModel = field(repr=False)

    @property
    def x(self) -> NDArray[np.float64]:
        """The predictor as the models take it: (n_obs,) for one predictor, else (n_obs, n_predictors)."""
        return self.X[:, 0] if self.X.shape[1] == 1 else self.X

    @property
    def dof(self) -> int:
        """Degrees of freedom, n_obs − k."""
        return len(self.y) - len(self.param_names)


def load_nist(name: str) -> NistProblem:
    """Load one NIST nonlinear regression problem.

    Parameters
    ----------
    name : str
        One of `NIST_NAMES`; upper and lower case are the same.

    Returns
    -------
    NistProblem
        With arrays of its own.

    Raises
    ------
    TypeError
        If `name` is not a string.
    ValueError
        If there is no such problem.

    Examples
    --------
    >>> problem = load_nist("thurber")
    >>> problem.name, problem.level, problem.X.shape, problem.param_names
    ('Thurber', 'Higher', (37, 1), ('b1', 'b2', 'b3', 'b4', 'b5', 'b6', 'b7'))
    >>> residual = problem.model_numpy(problem.x, *problem.reference.params) - problem.y
    >>> print(f"{residual @ residual:.6f}, certified {problem.certified.rss:.6f}")
    5642.708240, certified 5642.708240
    """
    key = _match_name(name)
    record = _read_file()["problems"][key]
    X = np.array(record["x"], dtype=np.float64).T.copy()  # stored by column; (n_obs, n_predictors)
    response = np.array(record["response"], dtype=np.float64)
    first, second = (np.array(start, dtype=np.float64) for start in record["starts"])
    n_params = len(first)
    printed, precise = record["certified"], record["reference"]
    return NistProblem(
        name=key,
        **{word: record[word] for word in ("level", "data_kind", "model_class", "description", "model_text")},
        param_names=tuple(f"b{j + 1}" for j in range(n_params)),
        X=X,
        y=np.log(response) if record["log_response"] else response.copy(),
        response=response,
        starts=(first, second),
        certified=_make_solution(printed, printed["residual_std"], printed["dof"]),
        reference=_make_solution(precise, None, len(response) - n_params),
        model_numpy=NistModel(BODIES[key], "numpy"),
        model_torch=NistModel(BODIES[key], "torch"),
    )


def correct_digits(value: ArrayLike, reference: ArrayLike) -> float:
    """Count the correct decimal digits of the worst element (the log relative error).

    Parameters
    ----------
    value : array_like of shape (k,) or scalar
        What was computed.
    reference : array_like, same shape
        What is right.

    Returns
    -------
    float
        Between 0 and 15, see Notes.

    Raises
    ------
    ValueError
        If the shapes differ, or there is nothing to compare.

    Notes
    -----
    The minimum over j of −log₁₀(|valueⱼ − referenceⱼ| / |referenceⱼ|), with the absolute error where referenceⱼ is
    0, limited to [0, 15]: float64 holds 15 decimal digits, and an answer with no correct digit scores 0 however far
    off it is. nan and inf score 0. McCullough (1998) calls it the log relative error.

    Examples
    --------
    >>> round(correct_digits([1.0, 2.0002], [1.0, 2.0]), 6)
    4.0
    >>> correct_digits(3.0, 3.0), correct_digits(float("nan"), 3.0)
    (15.0, 0.0)
    """
    value, reference = np.asarray(value, dtype=np.float64), np.asarray(reference, dtype=np.float64)
    if value.shape != reference.shape or reference.size == 0:
        raise ValueError(
            f"value and reference must have the same shape and at least one element; "
            f"got value {value.shape} and reference {reference.shape}"
        )
    error = np.abs(value - reference) / np.where(reference == 0, 1.0, np.abs(reference))
    worst = float(np.max(error))  # nan if any is nan
    if not math.isfinite(worst):
        return 0.0
    return min(max(-math.log10(worst), 0.0), MAX_DIGITS) if worst > 0 else MAX_DIGITS


def _match_name(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}: {name!r}")
    for known in NIST_NAMES:
        if known.casefold() == name.casefold():
            return known
    raise ValueError(f"name must be one of {', '.join(NIST_NAMES)} (in any case); got {name!r}")


@cache
def _read_file() -> dict[str, Any]:
    """Parse the package data once; what is returned is shared and must not be changed or handed out."""
    path = resources.files("lmfit_gpu.datasets") / "nist_strd.json"
    return json.loads(path.read_text(encoding="utf-8"))


def _make_solution(record: dict[str, Any], residual_std: float | None, dof: int) -> NistSolution:
    """Build a solution from numbers (certified) or decimal strings (reference)."""
    rss = float(record["rss"])
    return NistSolution(
        params=np.array(record["params"], dtype=np.float64),
        stderr=np.array(record["stderr"], dtype=np.float64),
        rss=rss,
        residual_std=math.sqrt(rss / dof) if residual_std is None else residual_std,
        dof=dof,
        params_text=tuple(map(str, record["params"])),
        stderr_text=tuple(map(str, record["stderr"])),
        rss_text=str(record["rss"]),
    )
