"""Damped solves on cuPyNumeric beside SciPy, both in one run: ratios, never seconds.

What is timed is what a fit does at every point: scale JᵀJ, hand it over, factor it with a damping, solve, and bring the
step back. Each side works with its default threads; run with OpenBLAS' presets unset (see docs/benchmarks.md). Medians
are compared: on two cores a SciPy call is at times half as long as the next. The floor is the factorisation, n³/3
flops.
"""

import time

import numpy as np
import pytest
import torch

from lmfit_gpu.backends import get_backend
from lmfit_gpu.linear import CholeskyLinearization

pytestmark = pytest.mark.benchmark

CPU = torch.device("cpu")
ROUNDS = 15
RATIO = 1.5


@pytest.mark.parametrize("n", [2000, 4000])
def test_damped_solves_take_at_most_one_and_a_half_times_scipys_time(n):
    rng = np.random.default_rng(n)
    J = rng.standard_normal((n + 200, n + 1))
    gram = torch.from_numpy(J.T @ J)
    scale = gram.diagonal()[:n].sqrt()
    lins = {
        name: CholeskyLinearization(gram, get_backend(name, CPU), torch.ones_like(scale))
        for name in ("scipy", "cupynumeric")
    }
    seconds = {name: [] for name in lins}
    for turn in range(ROUNDS):
        steps = []
        for name, lin in lins.items():  # in turn, so that both meet the same load of the machine
            start = time.perf_counter()
            steps.append(lin.with_scale(scale).solve(1e-3 * (turn + 1)).p)
            seconds[name].append(time.perf_counter() - start)
        torch.testing.assert_close(*steps, rtol=1e-8, atol=0)
    middle, best = ({name: take(times) for name, times in seconds.items()} for take in (np.median, np.min))
    ratio = middle["cupynumeric"] / middle["scipy"]
    speed = n**3 / 3e9 / middle["cupynumeric"]
    print(
        f"\nn = {n}: SciPy {middle['scipy']:.3f} s, cuPyNumeric {middle['cupynumeric']:.3f} s, ratio {ratio:.2f} (of "
        f"the shortest times {best['cupynumeric'] / best['scipy']:.2f}); {speed:.0f} Gflop/s"
    )
    assert ratio <= RATIO
