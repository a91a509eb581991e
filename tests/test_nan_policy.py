"""Values that are not finite: named with rows and columns, or their rows left out."""

import re

import numpy as np
import pandas as pd
import pytest
import torch
from test_arguments import (
    FREQUENCY,
    MODELS,
    P0,
    SIGMA,
    TWO,
    Decay,
    N,
    X,
    Y,
    both_outputs,
    broken,
    made,
    residual,
    same,
    x1,
)

from lmfit_gpu import LMRegressor


@pytest.mark.parametrize("as_tensor", [False, True], ids=["array", "tensor"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["torch", "module"])
def test_rows_that_are_not_finite_are_named(kind, value, as_tensor):
    convert = torch.from_numpy if as_tensor else np.asarray
    for name, data in {
        "X": (broken(X, [4, 9], value), Y),
        "y": (X, broken(Y, [4, 9], value)),
        "sigma": (X, Y, broken(SIGMA, [4, 9], abs(value))),
        "sample_weight": (X, Y, None, broken(FREQUENCY, [4, 9], abs(value))),
    }.items():
        X_, y_, sigma, weights = (None if part is None else convert(part) for part in (*data, None, None)[:4])
        if name == "sigma" and value != np.inf:
            continue  # NaN and -inf: not positive, see above
        with pytest.raises(ValueError, match=rf"Input {name} contains NaN or infinity in rows 4, 9; nan_policy='omit'"):
            made(kind).fit(X_, y_, sigma=sigma, sample_weight=weights)


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy, pd.DataFrame])
def test_columns_are_named(convert):
    features = np.ones((N, 5))
    features[[2, 3, 30], [1, 4, 1]] = np.nan
    model = LMRegressor(lambda X, theta: X @ theta, p0=np.ones(5))
    with pytest.raises(ValueError, match=r"Input X contains NaN or infinity in rows 2, 3, 30, columns 1, 4;"):
        model.fit(convert(features), Y)
    targets = TWO.copy()
    targets[5, 1] = np.inf
    with pytest.raises(ValueError, match=r"Input y contains NaN or infinity in row 5, column 1;"):
        LMRegressor(both_outputs, p0=P0).fit(X, targets)


def test_long_lists_are_cut():
    with pytest.raises(ValueError, match=r"in rows 0, 1, 2, 3, 4 and 12 more;"):
        made().fit(X, broken(Y, range(17)))


class OfImages(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Decay()

    def forward(self, images):
        return self.inner(images.mean((1, 2))[:, None])


@pytest.mark.parametrize("convert", [np.array, torch.tensor])
def test_features_with_more_axes(convert):
    images = np.tile(x1[:, None, None], (1, 3, 4))
    images[6, 1, 2] = images[6, 1, 3] = images[8, 0, 0] = np.nan
    with pytest.raises(ValueError, match=r"Input X contains NaN or infinity in rows 6, 8, columns 0, 6, 7;"):
        LMRegressor(OfImages()).fit(convert(images), Y)
    est = LMRegressor(OfImages(), nan_policy="omit").fit(convert(images), Y)
    kept = np.delete(np.arange(N), [6, 8])
    np.testing.assert_allclose(est.theta_, made().fit(X[kept], Y[kept]).theta_, rtol=1e-7)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["array", "tensor"])
def test_omit_is_leaving_the_rows_out(kind, as_tensor):
    convert = torch.from_numpy if as_tensor and kind != "numpy" else np.asarray
    data = broken(X, [1, 5]), broken(Y, [5, 8], np.inf), broken(SIGMA, [12]), broken(np.ones(N), [13])
    X_, y_, sigma, weights = map(convert, data)
    est = made(kind, nan_policy="omit").fit(X_, y_, sigma=sigma, sample_weight=weights)
    kept = np.delete(np.arange(N), [1, 5, 8, 12, 13])
    without = made(kind).fit(convert(X[kept]), convert(Y[kept]), sigma=SIGMA[kept])
    np.testing.assert_array_equal(est.theta_, without.theta_)
    np.testing.assert_array_equal(est.covariance_, without.covariance_)
    assert "rows left out 5" in est.report()
    assert "rows left out" not in without.report()
    assert est.predict(X).shape == (N,)


def test_omit_of_a_residual_callable_alone():
    x_and_y = np.column_stack([x1, broken(Y, [3])])
    alone = LMRegressor(residual=lambda t, xy, y: residual(t, xy[:, 0], xy[:, 1]), p0=P0, nan_policy="omit").fit(
        x_and_y
    )
    same(alone, made().fit(np.delete(X, 3, 0), np.delete(Y, 3)))
    with pytest.raises(ValueError, match=r"Input X contains NaN or infinity in row 3, column 1;"):
        LMRegressor(residual=lambda t, xy, y: residual(t, xy[:, 0], xy[:, 1]), p0=P0).fit(x_and_y)


@pytest.mark.parametrize("policy", ["omit", "raise"])
def test_data_are_not_changed(policy):
    data = [broken(X, [1]), broken(Y, [2]), broken(SIGMA, [3]), np.ones(N)]
    before = [part.copy() for part in data]
    try:
        made(nan_policy=policy).fit(data[0], data[1], sigma=data[2], sample_weight=data[3])
    except ValueError:
        assert policy == "raise"
    for part, copy in zip(data, before, strict=True):
        np.testing.assert_array_equal(part, copy)


def test_omit_without_a_row_left():
    with pytest.raises(ValueError, match="no row is left"):
        made(nan_policy="omit").fit(X, np.full(N, np.nan))
    weights = np.r_[np.ones(N // 2), np.zeros(N // 2)]
    with pytest.raises(ValueError, match="no row is left"):
        made(nan_policy="omit").fit(X, broken(Y, range(N // 2)), sample_weight=weights)
    with pytest.raises(ValueError, match=r"sigma: got .* in row 2"):  # omitted is what is not finite, not what is wrong
        made(nan_policy="omit").fit(X, Y, sigma=broken(SIGMA, [2], -1.0))


@pytest.mark.parametrize("policy", ["drop", "propagate", None, 1, ["omit"]])
def test_policies_that_there_are_not(policy):
    message = (
        f"The 'nan_policy' parameter of LMRegressor must be a str among {{'raise', 'omit'}}. Got {policy!r} instead."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        made(nan_policy=policy).fit(X, Y)


def test_none_in_a_list_is_nan():
    """A list with None is an array of objects, with NaN in its place."""
    with pytest.raises(ValueError, match=r"y.* row 4"):
        made().fit(X, [None if i == 4 else value for i, value in enumerate(Y.tolist())])
    holes = np.array([None if i == 4 else value for i, value in enumerate(Y.tolist())], dtype=object)
    for y in (pd.Series(holes), pd.Series(holes, dtype="Float64"), holes, holes.tolist()):
        est = made(nan_policy="omit").fit(X, y)
        np.testing.assert_array_equal(est.theta_, made().fit(np.delete(X, 4, 0), np.delete(Y, 4)).theta_)
