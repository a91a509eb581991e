"""Data frames and series of pandas and polars: the numbers in them, in their order, and nothing else.

What a frame gives is what its numbers give as arrays, to the bit; rows are never matched by an index.
"""

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch

from lmfit_gpu import LMRegressor

N = 40
_rng = np.random.default_rng(8)
X = np.column_stack([np.linspace(0, 4, N), _rng.normal(size=N)])
Y = 2.5 * np.exp(-1.3 * X[:, 0]) + 0.4 * X[:, 1] + 0.05 * _rng.normal(size=N)
SIGMA = 0.05 * (1 + X[:, 0])
TIMES = np.arange(N) % 3
NAMES = ["t", "u"]
P0 = [1.0, 1.0, 0.0]


def model(X, a, b, c):
    return a * np.exp(-b * X[:, 0]) + c * X[:, 1]


def torch_model(X, a, b, c):
    return a * torch.exp(-b * X[:, 0]) + c * X[:, 1]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Parameter(torch.tensor(v, dtype=torch.float64)) for v in P0)

    def forward(self, X):
        return torch_model(X, self.a, self.b, self.c)


def estimator(**options):
    return LMRegressor(model, p0=P0, **options)


KINDS = {
    "numpy": lambda: estimator(),
    "torch": lambda: LMRegressor(torch_model, p0=P0),
    "module": lambda: LMRegressor(Net()),
    "network": lambda: LMRegressor(hidden_layer_sizes=1, alpha=1.0, random_state=0),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)

ROWS = np.random.default_rng(0).permutation(N)  # an index without order
CONTAINERS = {  # X, y, and a vector of weights
    "pandas": (
        pd.DataFrame(X, columns=NAMES, index=ROWS),
        lambda v: pd.Series(v, index=ROWS[::-1], name="y"),
        lambda v: pd.DataFrame({"y": v}, index=ROWS[::-1]),
    ),
    "polars": (
        pl.DataFrame(X, schema=NAMES),
        lambda v: pl.Series("y", v),
        lambda v: pl.DataFrame({"y": v}),
    ),
    "pandas, other dtypes": (
        pd.DataFrame(X, columns=NAMES, dtype="Float64"),
        lambda v: pd.Series(v, dtype="Float64" if np.asarray(v).dtype.kind == "f" else "Int64"),
        lambda v: pd.DataFrame({"y": pd.Series(v, dtype="Float64")}),
    ),
}
every_container = pytest.mark.parametrize(("frame", "series", "column"), CONTAINERS.values(), ids=CONTAINERS)


@every_kind
@every_container
def test_frames_are_their_numbers(make, frame, series, column):
    arrays = make().fit(X, Y)
    framed = make().fit(frame, series(Y))
    assert np.array_equal(framed.theta_, arrays.theta_)
    assert np.array_equal(framed.stderr_, arrays.stderr_)
    assert np.array_equal(framed.predict(frame), arrays.predict(X))
    assert framed.score(frame, series(Y)) == arrays.score(X, Y)
    assert list(framed.feature_names_in_) == NAMES
    assert framed.n_features_in_ == 2
    assert not hasattr(arrays, "feature_names_in_")


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.DataConversionWarning")  # for models that return (n,)
@every_kind
@every_container
def test_a_frame_of_one_target_is_a_column(make, frame, series, column):
    framed = make().fit(frame, column(Y))
    assert framed.predict(frame).shape == (N, 1)
    np.testing.assert_allclose(framed.predict(frame)[:, 0], make().fit(X, Y).predict(X), rtol=1e-6, atol=1e-8)


@every_container
def test_sigma_and_weights_are_matched_by_position(frame, series, column):
    arrays = estimator().fit(X, Y, sigma=SIGMA, sample_weight=TIMES)
    framed = estimator().fit(frame, series(Y), sigma=series(SIGMA), sample_weight=series(TIMES))
    assert np.array_equal(framed.theta_, arrays.theta_)
    assert np.array_equal(framed.stderr_, arrays.stderr_)
    assert np.array_equal(
        estimator().fit(frame, series(Y), sigma=column(SIGMA), sample_weight=TIMES).theta_, framed.theta_
    )


def test_two_targets_in_a_frame():
    targets = np.column_stack([Y, X @ [1.0, 2.0]])
    arrays = LMRegressor(torch.nn.Linear(2, 2).double(), random_state=0)
    framed = LMRegressor(arrays.model, random_state=0)
    arrays.fit(X, targets)
    framed.fit(pd.DataFrame(X, columns=NAMES), pd.DataFrame(targets, columns=["y", "z"]))
    assert np.array_equal(framed.predict(pd.DataFrame(X, columns=NAMES)), arrays.predict(X))


def test_mixed_numbers_in_one_frame():
    """Columns of float32, int8, bool and nullable integers become float64."""
    frame = pd.DataFrame(
        {
            "t": X[:, 0].astype(np.float32),
            "count": (np.arange(N) % 5).astype(np.int8),
            "flag": np.arange(N) % 2 == 0,
            "maybe": pd.Series(np.arange(N) % 7, dtype="Int64"),
        }
    )
    numbers = np.column_stack([frame[name].to_numpy(dtype=np.float64) for name in frame])
    framed, arrays = (
        LMRegressor(torch.nn.Linear(4, 1).double()).fit(data, Y).predict(data) for data in (frame, numbers)
    )
    np.testing.assert_allclose(framed, arrays, rtol=1e-9)  # another start, the same minimum


# ---- missing values


def missing(values, library):
    """Return a series whose row 5 is missing."""
    if library == "polars":
        return pl.Series([None if i == 5 else v for i, v in enumerate(values.tolist())])
    series = pd.Series(values, dtype="Float64" if values.dtype.kind == "f" else "Int64")
    series[5] = pd.NA
    return series


def with_missing(library):
    made = pd.DataFrame if library == "pandas" else pl.DataFrame
    return {
        "X": (made({"t": missing(X[:, 0], library), "u": X[:, 1]}), Y, {}),
        "y": (X, missing(Y, library), {}),
        "sigma": (X, Y, {"sigma": missing(SIGMA, library)}),
        "sample_weight": (X, Y, {"sample_weight": missing(TIMES + 1, library)}),
    }


@pytest.mark.parametrize("library", ["pandas", "polars"])
@pytest.mark.parametrize("name", ["X", "y", "sigma", "sample_weight"])
def test_missing_values_are_an_error_or_left_out(name, library):
    features, targets, weights = with_missing(library)[name]
    with pytest.raises(ValueError, match=f"Input {name} contains NaN.* row 5"):
        estimator().fit(features, targets, **weights)
    kept = np.arange(N) != 5
    full = {"sigma": SIGMA, "sample_weight": TIMES + 1}
    oracle = estimator().fit(X[kept], Y[kept], **{key: full[key][kept] for key in weights})
    omitted = estimator(nan_policy="omit").fit(features, targets, **weights)
    assert np.array_equal(omitted.theta_, oracle.theta_)
    assert omitted.result_.used["rows left out"] == 1


def test_missing_values_at_predict_are_an_error():
    fitted = estimator(nan_policy="omit").fit(pd.DataFrame(X, columns=NAMES), Y)
    with pytest.raises(ValueError, match="NaN"):
        fitted.predict(with_missing("pandas")["X"][0])


# ---- what is not numbers

WORDS = np.array(["a", "b"])[np.arange(N) % 2]
DATES = pd.date_range("2024-01-01", periods=N)
NOT_NUMBERS = {
    "words": pd.Series(WORDS),
    "string dtype": pd.Series(WORDS, dtype="string"),
    "categories": pd.Series(WORDS, dtype="category"),
    "dates": pd.Series(DATES),
    "dates of a zone": pd.Series(DATES.tz_localize("UTC")),
    "durations": pd.Series(DATES - DATES[0]),
    "periods": pd.Series(pd.period_range("2024-01", periods=N)),
    "complex": pd.Series(X[:, 0] + 1j),
    "polars words": pl.Series(WORDS.tolist()),
    "polars categories": pl.Series(WORDS.tolist(), dtype=pl.Categorical),
    "polars dates": pl.Series(DATES.to_pydatetime().tolist()),
}
every_thing = pytest.mark.parametrize("values", NOT_NUMBERS.values(), ids=NOT_NUMBERS)


@every_thing
def test_features_that_are_not_numbers_are_refused(values):
    made = pl.DataFrame if isinstance(values, pl.Series) else pd.DataFrame
    for frame in (made({"t": X[:, 0], "u": values}), made({"t": values, "u": values})):
        with pytest.raises((ValueError, TypeError), match=REFUSAL):
            estimator().fit(frame, Y)


REFUSAL = r"(^|\W)X(\W|$)|could not convert string to float|Complex data not supported"


@every_thing
def test_targets_that_are_not_numbers_are_refused(values):
    with pytest.raises(
        (ValueError, TypeError), match=r"(^|\W)y(\W|$)|could not convert|Complex|arrays of bytes/strings"
    ):
        estimator().fit(X, values)


@every_thing
@pytest.mark.parametrize("name", ["sigma", "sample_weight"])
def test_weights_that_are_not_numbers_are_refused(name, values):
    with pytest.raises(ValueError, match=name):
        estimator().fit(X, Y, **{name: values})


# ---- names of columns


@every_kind
def test_columns_are_checked_at_predict(make):
    fitted = make().fit(pd.DataFrame(X, columns=NAMES), Y)
    for names in (["t", "v"], ["u", "t"]):
        with pytest.raises(ValueError, match="feature names should match"):
            fitted.predict(pd.DataFrame(X, columns=names))
    for frame in (pd.DataFrame({"t": X[:, 0]}), pd.DataFrame(np.hstack([X, X]), columns=["t", "u", "v", "w"])):
        with pytest.raises(ValueError, match="feature names should match"):
            fitted.predict(frame)
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        predicted = fitted.predict(X)
    assert np.array_equal(predicted, fitted.predict(pl.DataFrame(X, schema=NAMES)))


def test_names_at_predict_only_are_told():
    fitted = estimator().fit(X, Y)
    with pytest.warns(UserWarning, match="fitted without feature names"):
        fitted.predict(pd.DataFrame(X, columns=NAMES))


def test_names_follow_the_last_fit():
    fitted = LMRegressor(torch_model, p0=P0).fit(pd.DataFrame(X, columns=NAMES), Y)
    assert list(fitted.fit(pl.DataFrame(X, schema=["p", "q"]), Y).feature_names_in_) == ["p", "q"]
    assert not hasattr(fitted.fit(X, Y), "feature_names_in_")
    fitted.fit(pd.DataFrame(X, columns=NAMES), Y)
    assert not hasattr(fitted.fit(torch.from_numpy(X), torch.from_numpy(Y)), "feature_names_in_")


def test_names_of_two_kinds_are_refused():
    with pytest.raises(TypeError, match="string names"):
        estimator().fit(pd.DataFrame({"t": X[:, 0], 1: X[:, 1]}), Y)


def test_a_series_is_not_a_table():
    with pytest.raises(ValueError, match="2D array, got 1D array"):
        LMRegressor(lambda x, a, b: a + b * x, p0=[1, 1]).fit(pd.Series(X[:, 0]), Y)
