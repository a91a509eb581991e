"""Profiles of NIST problems in torch: all sides as one batch, beside one constrained fit after the other."""

import time

import numpy as np

from lmfit_gpu import LMRegressor
from lmfit_gpu.datasets import load_nist
from lmfit_gpu.profiles import profile_likelihood
from lmfit_gpu.solution import solution_of

PROBLEMS = ("Gauss1", "Rat43", "BoxBOD", "Misra1a", "Lanczos3")


def timed(est, route):
    begin = time.perf_counter()
    found = profile_likelihood(solution_of(est), None, 0.95, route)
    return time.perf_counter() - begin, found


def test_a_batch_beside_single_fits():
    warm = load_nist("Misra1a")  # torch.func is imported, its forward formulas compiled
    timed(LMRegressor(warm.model_torch, p0=warm.starts[1]).fit(warm.X, warm.y), "batched")
    for name in PROBLEMS:
        problem = load_nist(name)
        est = LMRegressor(problem.model_torch, p0=problem.starts[1]).fit(problem.X, problem.y)
        batched = np.median([timed(est, "batched")[0] for _ in range(3)])
        seconds, expected = timed(est, "engine")
        found = timed(est, "batched")[1]
        print(f"{name}: {batched:.3f} s in a batch, one by one {seconds / batched:.1f} times that")
        for key, profile in expected.items():
            width = profile.interval[1] - profile.interval[0]
            assert np.abs(np.subtract(found[key].interval, profile.interval)).max() <= 1e-4 * width
