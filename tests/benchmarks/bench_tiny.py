"""Tiny fits beside scipy.optimize.curve_fit and lmfit.Model.fit, turn by turn in one run: ratios, never seconds.

Times are of this thread (``time.thread_time``), so that other processes on the machine do not count; the ratio is that
of medians over many turns. lmfit is optional.
"""

import time

import numpy as np
import pytest
from scipy.optimize import curve_fit as scipy_curve_fit

import lmfit_gpu

pytestmark = pytest.mark.benchmark

TURNS = 400
LIMIT = {"decay, 100 x 3": 3.3}  # the target is 3; the rest is the spread of a shared machine
OTHER_LIMIT = 4.0


def decay(x, a, b, c):
    return a * np.exp(-b * x) + c


def peak(x, a, m, s, c):
    return a * np.exp(-0.5 * ((x - m) / s) ** 2) + c


def saturation(x, a, k):
    return a * x / (k + x)


def sine(x, a, w, p, c):
    return a * np.sin(w * x + p) + c


MODELS = {  # model, truth, start, rows
    "decay, 100 x 3": (decay, [2.5, 1.3, 0.5], [1.0, 1.0, 0.0], 100),
    "peak, 100 x 4": (peak, [3.0, 2.2, 0.6, 0.3], [2.0, 2.5, 1.0, 0.0], 100),
    "saturation, 30 x 2": (saturation, [4.0, 1.5], [1.0, 1.0], 30),
    "sine, 200 x 4": (sine, [1.5, 2.0, 0.3, 1.0], [1.0, 2.1, 0.0, 0.5], 200),
    "decay, 1,000 x 3": (decay, [2.5, 1.3, 0.5], [1.0, 1.0, 0.0], 1000),
}


def data_of(name):
    f, true, p0, m = MODELS[name]
    x = np.linspace(0, 5, m)
    return f, x, f(x, *true) + 0.05 * np.random.default_rng(0).standard_normal(m), p0


def medians(calls):
    """Return the median thread time of each call, all called in turn."""
    for call in calls:
        call()
    times = [[] for _ in calls]
    for _ in range(TURNS):
        for call, kept in zip(calls, times, strict=True):
            start = time.thread_time()
            call()
            kept.append(time.thread_time() - start)
    return [float(np.median(kept)) for kept in times]


@pytest.mark.parametrize("name", MODELS)
def test_curve_fit_within_three_times_scipy(name):
    f, x, y, p0 = data_of(name)
    ours, theirs, value = medians(
        [lambda: lmfit_gpu.curve_fit(f, x, y, p0), lambda: scipy_curve_fit(f, x, y, p0), lambda: f(x, *p0)]
    )
    nfev = lmfit_gpu.LMRegressor(f, p0=p0).fit(x[:, None], y).result_.nfev
    their_nfev = scipy_curve_fit(f, x, y, p0, full_output=True)[2]["nfev"]
    print(
        f"\n{name}: ours / SciPy {ours / theirs:.2f} ({1e3 * ours:.2f} and {1e3 * theirs:.2f} ms); evaluations "
        f"{nfev} and {their_nfev}, of {1e6 * value:.1f} microseconds"
    )
    assert ours / theirs <= LIMIT.get(name, OTHER_LIMIT)


def test_estimator_faster_than_lmfit():
    lmfit = pytest.importorskip("lmfit", reason="lmfit is not installed")
    f, x, y, p0 = data_of("decay, 100 x 3")
    est, model = lmfit_gpu.LMRegressor(f, p0=p0), lmfit.Model(f)
    start = model.make_params(**dict(zip("abc", p0, strict=True)))
    X = x[:, None]
    ours, theirs, scipys = medians(
        [lambda: est.fit(X, y), lambda: model.fit(y, start, x=x), lambda: scipy_curve_fit(f, x, y, p0)]
    )
    print(
        f"\nLMRegressor.fit / lmfit.Model.fit {ours / theirs:.2f} ({1e3 * ours:.2f} and {1e3 * theirs:.2f} ms); "
        f"LMRegressor.fit / SciPy {ours / scipys:.2f}"
    )
    assert ours < theirs
