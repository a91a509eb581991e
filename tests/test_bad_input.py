"""Two thousand bad or odd inputs: each gives a clear error or a right fit; nothing hangs, crashes or is silently wrong.

judged_fits.py says what is clear and what is right.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from judged_fits import START, X, Y, as_floats, assert_clear, assert_right, judge, line, time_limit

from lmfit_gpu import LMRegressor, curve_fit

# Models of numbers such as 1e300 overflow, and numpy says so; what a model is written in is found out by trying.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of convergence, covariance, odd weights: those are for users
]


def many(examples: int) -> Any:
    """Return the settings of a test: so many examples, the same in every run."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,  # time_limit says when to stop
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


# X and y.

EXTREME = st.sampled_from([0.0, np.nan, np.inf, -np.inf, 1e300, -1e300, 1e160, 1e-160, 1e-300, 5e-324, 1e30, -1e-30])
SHAPES = st.sampled_from([(), (0,), (1,), (12,), (11,), (0, 1), (12, 0), (1, 1), (2, 1), (12, 2), (1, 12), (12, 1, 1)])
DTYPES = st.sampled_from(
    ["float16", "float32", "int8", "int64", "uint8", "bool", "complex64", "object", "str", "M8[s]"]
)
NOT_DATA = st.sampled_from(
    [None, "abc", b"abc", 3, {}, {"a": 1}, {1, 2}, object(), [[1, 2], [3]], [None] * 12, line, []]
)


@st.composite
def arrays(draw: Any, like: np.ndarray) -> Any:
    """Return numbers that resemble `like`, with another scale, odd entries, another shape, dtype or container."""
    values = like.copy()
    with np.errstate(all="ignore"):
        values = values * draw(st.one_of(st.just(1.0), EXTREME))
    for _ in range(draw(st.integers(0, 2))):
        values.flat[draw(st.integers(0, values.size - 1))] = draw(EXTREME)
    if draw(st.integers(0, 3)) == 0:
        values = np.resize(values, draw(SHAPES))
    if draw(st.integers(0, 2)) == 0:
        with np.errstate(all="ignore"):
            values = np.nan_to_num(values, posinf=1e9, neginf=-1e9).astype(draw(DTYPES))
    return draw(containers)(np.asarray(values))


def as_tensor(values: np.ndarray) -> Any:
    return torch.from_numpy(values) if values.dtype.kind in "fiubc" else values


def as_sparse(values: np.ndarray) -> Any:
    return scipy.sparse.csr_matrix(values) if values.ndim == 2 and values.dtype == float else values


containers = st.sampled_from([np.asarray, np.asarray, np.ndarray.tolist, as_tensor, np.ma.masked_invalid, as_sparse])
containers = containers.map(lambda made: lambda values: values if _is_odd(values) else made(values))


def _is_odd(values: np.ndarray) -> bool:
    return values.dtype.kind in "OUM"


@many(500)
@given(X=arrays(X), y=arrays(Y), policy=st.sampled_from(["raise", "omit"]))
def test_data_of_every_kind(X: Any, y: Any, policy: str) -> None:
    judge({"X": X, "y": y}, nan_policy=policy)


@many(200)
@given(data=st.one_of(arrays(X).map(lambda X: {"X": X}), arrays(Y).map(lambda y: {"y": y})))
def test_one_of_x_and_y_of_every_kind(data: dict[str, Any]) -> None:
    judge(data)


@many(50)
@given(name=st.sampled_from(["X", "y"]), junk=NOT_DATA)
def test_what_is_no_data_is_refused(name: str, junk: Any) -> None:
    assert not judge({name: junk})


# p0.

ENTRIES = st.one_of(EXTREME, st.floats(-10, 10), st.integers(-3, 3), st.sampled_from([None, "1", True, [1.0], 1j]))
STARTS = st.one_of(
    st.lists(st.one_of(EXTREME, st.floats(-1e9, 1e9)), min_size=2, max_size=2),
    st.lists(ENTRIES, max_size=4),
    st.dictionaries(st.sampled_from(["a", "b", "c", "", 1]), ENTRIES, max_size=3),
)


def is_start(p0: Any) -> bool:
    return len(p0) == 2 and all(isinstance(v, (float, int)) and np.isfinite(v) for v in p0)


def is_number(value: Any) -> bool:
    """Say whether Python makes a finite float of it; it does of "1"."""
    try:
        return bool(np.isfinite(float(value)))
    except (TypeError, ValueError):
        return False


@many(300)
@given(p0=STARTS)
def test_starts_of_every_kind(p0: Any) -> None:
    values = list(p0.values()) if isinstance(p0, dict) else p0
    numbers = all(is_number(value) for value in values)
    sound = len(p0) == 2 and numbers and set(p0 if isinstance(p0, dict) else "ab") == {"a", "b"}
    assert sound or not judge({}, p0=p0)


# bounds, fixed, tied.

SIDES = st.lists(
    st.one_of(EXTREME, st.floats(-5, 5), st.sampled_from([None, 1.0, -np.inf, np.inf])), min_size=2, max_size=2
)
FORMS = {
    "pair": lambda lower, upper: (lower, upper),
    "arrays": lambda lower, upper: (np.array(lower, float), np.array(upper, float)),
    "dict": lambda lower, upper: {"a": (lower[0], upper[0]), "b": (lower[1], upper[1])},
    "Bounds": lambda lower, upper: scipy.optimize.Bounds(np.array(lower, float), np.array(upper, float)),
}


@many(300)
@given(lower=SIDES, upper=SIDES, form=st.sampled_from(list(FORMS)), fixed=st.sampled_from([(), ["a"], [False, True]]))
def test_bounds_of_every_kind(lower: list[Any], upper: list[Any], form: str, fixed: Any) -> None:
    if form in ("arrays", "Bounds"):
        lower, upper = ([0.0 if side is None else side for side in sides] for sides in (lower, upper))
    low = np.array([-np.inf if side is None else side for side in lower])
    high = np.array([np.inf if side is None else side for side in upper])
    try:
        bounds = FORMS[form](lower, upper)
    except ValueError:  # SciPy's Bounds refuses by itself
        return
    held = np.isin(["a", "b"], fixed) if fixed and isinstance(fixed[0], str) else np.array(fixed or [False] * 2)
    limits = np.where(held, START, low), np.where(held, START, high)
    fitted = judge({}, limits, bounds=bounds, fixed=fixed)
    sound = np.all((low <= START) & (high >= START) & (low < np.inf) & (high > -np.inf))
    assert not fitted or sound


def circle(b: Any) -> Any:
    return b


BAD_CONSTRAINTS = {
    "bounds": [
        {"c": (0, 1)},
        {"a": 1},
        {"a": (0, 1, 2)},
        {"a": ("x", 2)},
        {"a": (3, 2)},
        {"a": (2, 3)},
        {1: (0, 1)},
        7,
        "ab",
        (0,),
        (0, 1, 2),
        ([0], [1, 2, 3]),
        ([0, 0, 0], [3, 3, 3]),
        (np.nan, 1),
        (2, 3),
        ([0, 2], [3, 1]),
        object(),
        ([[0, 0]], [[[3]]]),
        (None, "x"),
        ([0, 1j], [2, 2]),
        (np.inf, np.inf),
        (-np.inf, -np.inf),
        {"a": None},
        [],
        (),
    ],
    "fixed": [
        ["c"],
        "c",
        [True],
        [True, False, True],
        [0, 1],
        [1.5],
        ["a", "b"],
        [True, True],
        [None],
        3,
        object(),
        [["a"]],
    ],
    "tied": [
        {"c": lambda a: a},
        {"b": 3},
        {"b": lambda z: z},
        {"b": lambda *a: 1},
        {"b": lambda b: b},
        "ab",
        ["b"],
        5,
        {"a": circle, "b": lambda a: a},
        {"b": lambda a: "x"},
        {"b": lambda a: None},
        {"b": lambda a: a * np.nan},
        {"b": lambda a: [a, a]},
        {"b": lambda a: 1 / 0},
        {1: lambda a: a},
        {"b": lambda a, *, b: a},
        {"b": None},
        {"a": lambda: 1.0, "b": lambda: 1.0},
        {"b": lambda a: 1j},
        {"b": print},
        {"b": lambda x: x},
    ],
}


@many(200)
@given(
    data=st.data(), argument=st.sampled_from(list(BAD_CONSTRAINTS)), solver=st.sampled_from(["qr", "cholesky", "cg"])
)
def test_constraints_that_make_no_sense_are_refused(data: Any, argument: str, solver: str) -> None:
    junk = data.draw(st.sampled_from(BAD_CONSTRAINTS[argument]))
    with time_limit(), pytest.raises((ValueError, TypeError)) as caught:
        LMRegressor(line, p0=START, solver=solver, **{argument: junk}).fit(X, Y)
    assert re.search(rf"\b({argument}|p0)\b", str(caught.value)), caught.value


# sigma and sample_weight.

SPREADS = st.one_of(EXTREME, st.floats(0.1, 10), st.sampled_from([-1.0, 1.0, 2.0, 3.0]))
PER_ROW = st.one_of(
    st.lists(st.sampled_from([1.0, 2.0, 0.5]), min_size=12, max_size=12),
    st.tuples(st.lists(st.floats(0.5, 2), min_size=12, max_size=12), st.integers(0, 11), SPREADS).map(
        lambda made: [*made[0][: made[1]], made[2], *made[0][made[1] + 1 :]]
    ),
    st.lists(SPREADS, max_size=13),
    SPREADS,
    st.sampled_from(["abc", None, [None] * 12, np.ones((12, 1)), np.ones((12, 12)), np.ones((12, 2)), {}, [1j] * 12]),
)


@many(300)
@given(sigma=PER_ROW, sample_weight=PER_ROW, policy=st.sampled_from(["raise", "omit"]), absolute=st.booleans())
def test_errors_and_weights_of_every_kind(sigma: Any, sample_weight: Any, policy: str, absolute: bool) -> None:
    spread = {"sigma": sigma, "sample_weight": sample_weight}
    fitted = judge(spread, nan_policy=policy, absolute_sigma=absolute)
    if fitted:
        for name, values in spread.items():
            number = np.ones(12) if values is None else as_floats(values)
            assert number.size in (1, 12)
            assert not np.any(number < 0)
            assert policy == "omit" or np.isfinite(number).all()
            there = np.ones(12) if sample_weight is None else as_floats(sample_weight) * np.ones(12)
            assert name == "sample_weight" or not np.any((number == 0) & (there != 0))
        assert not (absolute and sigma is None)


# Options.

JUNK = st.sampled_from([None, -1, 0, 1.5, np.nan, np.inf, "abc", "", b"qr", True, [], {}, object(), (1, 2), 1j])
NAMES = {
    "loss": ["linear", "soft_l1", "huber", "cauchy", "arctan", "Huber", "l2"],
    "f_scale": [1.0, 0.1, 1e-300, 1e300, 0.0, -1.0],
    "nan_policy": ["raise", "omit", "propagate", "drop"],
    "absolute_sigma": [True, False, 1, "yes"],
    "max_iter": [0, 1, 5, 10**9, -5],
    "ftol": [0.0, 1e-3, 1, -1e-3],
    "gtol": [0.0, 1e-3, 1, -1e-3],
    "solver": ["auto", "qr", "cholesky", "dual", "cg", "lm", "trf"],
    "backend": ["auto", "scipy", "torch", "numpy"],
    "jac": ["auto", "2-point", "3-point", "cs", "autograd", "4-point", lambda x, a: None, lambda x, a, b: "x"],
    "damping": ["trust-region", "nielsen", "marquardt", "lema", "lm"],
    "chunk_rows": ["auto", 1, 5, 10**9],
    "dtype": [None, torch.float64, torch.int64, "float32", np.float64],
    "devices": ["auto", "cpu", ["cpu", "cpu"], "cuda:99", "tpu"],
    "x_format": ["auto", "columns", "1d", "2d"],
    "callback": [lambda record: None, lambda record: "stop", print],
}
OPTIONS = st.sampled_from(list(NAMES)).flatmap(
    lambda name: st.tuples(st.just(name), st.one_of(st.sampled_from(NAMES[name]), JUNK))
)


@many(200)
@given(options=st.lists(OPTIONS, min_size=1, max_size=3).map(dict))
def test_options_of_every_kind(options: dict[str, Any]) -> None:
    with contextlib.redirect_stdout(None):
        judge({}, **options)


MODELS = {
    "None": lambda x, a, b: None,
    "text": lambda x, a, b: "abc",
    "nan": lambda x, a, b: (a + b * x) * np.nan,
    "short": lambda x, a, b: (a + b * x)[:-1],
    "long": lambda x, a, b: [1.0] * 99,
    "square": lambda x, a, b: (a + b * x)[:, None] * (a + b * x),
    "raises": lambda x, a, b: 1 / 0,
    "complex": lambda x, a, b: (a + b * x) * 1j,
    "no parameters": lambda x: x,
    "keyword only": lambda x, *, a, b: a + b * x,
    "too many": lambda x, a, b, c: a + b * x,
    "no number": 3,
    "name": "line",
}


@many(50)
@given(kind=st.sampled_from(list(MODELS)), jac=st.sampled_from(["auto", "2-point", "3-point", "cs"]))
def test_models_that_are_none_are_refused(kind: str, jac: str) -> None:
    with time_limit(), pytest.raises((ValueError, TypeError)) as caught:
        LMRegressor(MODELS[kind], p0=START, jac=jac).fit(X, Y)
    assert_clear(caught.value)


# curve_fit.

KEYWORDS = st.dictionaries(
    st.sampled_from(["unknown", "maxfev", "method", "loss", "full_output", "check_finite", "nan_policy", "bounds"]),
    st.one_of(JUNK, st.sampled_from(["trf", "lm", "omit", "raise", 100, (0, 9), "huber"])),
    max_size=2,
)


@many(200)
@given(xdata=arrays(X[:, 0]), ydata=arrays(Y), sigma=PER_ROW, keywords=KEYWORDS)
def test_curve_fit_of_every_kind(xdata: Any, ydata: Any, sigma: Any, keywords: dict[str, Any]) -> None:
    with time_limit():
        try:
            popt, pcov, *_ = curve_fit(line, xdata, ydata, START, sigma, **keywords)
        except (ValueError, TypeError) as error:
            assert_clear(error)
            return
        except RuntimeError as error:  # as SciPy says that a fit has not converged
            assert "Optimal parameters not found" in str(error)
            return
    assert "unknown" not in keywords
    assert pcov.shape == (2, 2)
    assert np.isfinite(popt).all()
    if not keywords.keys() & {"loss", "bounds"} and np.ndim(sigma) < 2 and not np.iscomplexobj(ydata):
        given = {"X": as_floats(xdata).reshape(-1, 1), "y": ydata, "sigma": sigma}
        assert_right(popt, given, {"p0": START}, None, trusted=np.isfinite(pcov.diagonal()))
