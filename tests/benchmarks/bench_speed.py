"""Fits of many rows beside scipy.optimize.curve_fit, both in one run: ratios, never seconds.

``make bench`` runs them. Each peer is run once to warm up on a thousandth of the rows, then timed as the best of
two. The floor of a fit is what its model costs: one evaluation over all rows is printed with the ratios.
"""

import time

import numpy as np
import pytest
import torch
from scipy.optimize import curve_fit as scipy_curve_fit

from lmfit_gpu import LMRegressor

pytestmark = pytest.mark.benchmark


def best_of(n, call):
    """Return the shortest of n wall times, in seconds, and the last result."""
    times = []
    for _ in range(n):
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
    return min(times), result


def ten_peaks(xp):
    """Ten Gaussian peaks, as a function of 30 parameters."""

    def model(x, *p):
        return sum(
            height * xp.exp(-(((x - centre) / width) ** 2) / 2)
            for height, centre, width in zip(p[::3], p[1::3], p[2::3], strict=True)
        )

    return model


def peaks_data(n_rows):
    """A spectrum of constant resolution with noise; the start is 5 % off in every parameter."""
    rng = np.random.default_rng(0)
    x = np.linspace(0.5, 60, n_rows)
    centres = 1.5 ** np.arange(10)
    true = np.ravel([(rng.uniform(5, 10), centre, 0.2 * centre) for centre in centres])
    y = ten_peaks(np)(x, *true) + 0.1 * rng.standard_normal(n_rows)
    return x, y, true * (1 + 0.05 * rng.choice([-1, 1], 30))


def decay(xp):
    def model(x, a, b, c):
        return a * xp.exp(-b * x) + c

    return model


def compare(model_pair, data, floor):
    """Time both, print and return the ratio SciPy / ours, and the largest difference in standard errors."""
    in_torch, in_numpy = model_pair
    x, y, p0 = data
    LMRegressor(in_torch, p0=p0).fit(x[::1000, None], y[::1000])
    ours, est = best_of(2, lambda: LMRegressor(in_torch, p0=p0).fit(x[:, None], y))
    theirs, (popt, pcov) = best_of(1, lambda: scipy_curve_fit(in_numpy, x, y, p0))
    evaluation, _ = best_of(3, lambda: in_numpy(x, *p0))
    off = float(np.max(np.abs(est.theta_ - popt) / np.sqrt(np.diag(pcov))))
    print(
        f"\n{floor}: ours {ours:.2f} s, SciPy {theirs:.2f} s, ratio {theirs / ours:.2f}; one numpy evaluation "
        f"{1e3 * evaluation:.1f} ms, ours = {ours / evaluation:.0f} evaluations; {est.result_.brief()}"
    )
    assert est.result_.success
    return theirs / ours, off


def test_ten_peaks_200_000_rows():
    ratio, off = compare((ten_peaks(torch), ten_peaks(np)), peaks_data(200_000), "10 peaks, 200,000 x 30, torch")
    assert ratio >= 5
    assert off <= 3


@pytest.mark.parametrize(("library", "least"), [(torch, 1.0), (np, 0.5)], ids=["torch", "numpy"])
def test_decay_1_000_000_rows(library, least):
    rng = np.random.default_rng(0)
    x = np.linspace(0, 10, 1_000_000)
    y = decay(np)(x, 5.0, 0.4, 1.0) + 0.1 * rng.standard_normal(x.size)
    models = decay(library), decay(np)
    ratio, off = compare(models, (x, y, [1.0, 1.0, 0.0]), f"decay, 1,000,000 x 3, {library.__name__}")
    assert ratio >= least
    assert off <= 3
