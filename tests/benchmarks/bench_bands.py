"""Bands of many rows: a 30-parameter model on 100,000 rows, beside the delta method by central differences in numpy.

Floor: J of the rows, 8·30·1e5 bytes = 24 MB written once, and 2·30·30·1e5 = 1.8e8 flops for RᵀJ: about 0.02 s.
"""

import resource
import time

import numpy as np
import torch

from lmfit_gpu import LMRegressor

ROWS = 100_000


def peaks(x, theta):
    heights, centres, widths = theta[:10], theta[10:20], theta[20:]
    return sum(h * torch.exp(-(((x - c) / w) ** 2)) for h, c, w in zip(heights, centres, widths, strict=True))


def peaks_numpy(x, theta):
    heights, centres, widths = theta[:10], theta[10:20], theta[20:]
    return sum(h * np.exp(-(((x - c) / w) ** 2)) for h, c, w in zip(heights, centres, widths, strict=True))


def fitted(model):
    rng = np.random.default_rng(0)
    truth = np.concatenate([1 + rng.uniform(size=10), np.linspace(0.1, 3.9, 10), 0.15 + 0.05 * rng.uniform(size=10)])
    x = np.linspace(0, 4, 400)
    return LMRegressor(model, p0=truth).fit(x[:, None], peaks_numpy(x, truth) + 0.01 * rng.normal(size=400))


def naive(est, x):
    J = np.empty((len(x), 30))
    for j in range(30):
        step = np.zeros(30)
        step[j] = 6e-6 * max(abs(est.theta_[j]), 1e-3)
        J[:, j] = (peaks_numpy(x, est.theta_ + step) - peaks_numpy(x, est.theta_ - step)) / (2 * step[j])
    return np.sqrt(np.einsum("ij,jk,ik->i", J, est.covariance_, J))


def median(function, repeats=5):
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        found = function()
        times.append(time.perf_counter() - begin)
    return np.median(times), max(times) - min(times), found


def test_a_band_of_many_rows():
    x = np.linspace(0, 4, ROWS)
    for name, model in (("torch", peaks), ("numpy", peaks_numpy)):
        est = fitted(model)
        ours, spread, band = median(lambda est=est: est.prediction_interval(x[:, None]))
        theirs, _, expected = median(lambda est=est: naive(est, x), 3)
        std = est.predict(x[:, None], return_std=True)[1]
        print(f"{name}: {ours:.3f} s (spread {spread:.3f}), numpy delta method {theirs / ours:.1f} times that")
        np.testing.assert_allclose(std, expected, rtol=1e-3, atol=1e-8)
        assert len(band.upper) == ROWS


def test_memory_is_flat_in_rows():
    """Peak memory of ten times the rows grows by what is returned and given: 8 bytes for each of five arrays a row."""
    est, peak = fitted(peaks), []
    for rows in (ROWS, 10 * ROWS):
        x = np.linspace(0, 4, rows)[:, None]
        est.predict(x, return_std=True)
        peak.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        print(f"{rows:,} rows: peak {peak[-1]:.0f} MB; J alone would be {8 * 30 * rows / 2**20:.0f} MB")
    assert peak[1] - peak[0] < 150
