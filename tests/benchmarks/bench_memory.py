"""Memory of a fit does not grow with its rows: 10,000,000 rows x 20 parameters."""

import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lmfit_gpu import LMRegressor

pytestmark = pytest.mark.benchmark

N_ROWS = 10_000_000
LIMIT_MB = 500
STATUS = Path("/proc/self/status")


def anonymous_mb():
    """Return the anonymous resident memory of this process (RssAnon), in MB."""
    return int(re.search(r"RssAnon:\s+(\d+) kB", STATUS.read_text()).group(1)) / 1024


def peaks_on_decays(x, *p):
    """Five Gaussian peaks, each on a decay of its own: 20 parameters."""
    total = 0
    for i in range(5):
        height, centre, width, decay = p[4 * i : 4 * i + 4]
        total = total + height * torch.exp(-(((x - centre) / width) ** 2)) + decay * torch.exp(-0.2 * (i + 1) * x)
    return total


@pytest.mark.skipif(not STATUS.exists(), reason="RssAnon is read from /proc")
def test_ten_million_rows():
    rng = np.random.default_rng(0)
    true = [value for i in range(5) for value in (1.0 + i, 1.0 + 2 * i, 0.3 + 0.05 * i, 0.1 * i)]
    x, y = np.linspace(0, 10, N_ROWS)[:, None], np.empty(N_ROWS)
    for start in range(0, N_ROWS, 100_000):
        part = slice(start, start + 100_000)
        y[part] = peaks_on_decays(torch.from_numpy(x[part, 0]), *true).numpy() + 0.1 * rng.standard_normal(100_000)
    LMRegressor(peaks_on_decays, p0=[1.02 * value for value in true]).fit(
        x[::10_000], y[::10_000]
    )  # what torch loads on first use

    base, peak, running = anonymous_mb(), [0.0], [True]

    def watch():
        while running:
            peak[0] = max(peak[0], anonymous_mb())
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    est = LMRegressor(peaks_on_decays, p0=[1.03 * value for value in true]).fit(x, y)
    running.clear()
    watcher.join()
    jacobian_mb = N_ROWS * 20 * 8 / 2**20
    print(f"\npeak RssAnon {peak[0] - base:.0f} MB above {base:.0f} MB; J alone would be {jacobian_mb:.0f} MB")
    assert est.result_.success
    assert np.all(np.abs(est.theta_ - np.array(true)) < 6 * est.stderr_)
    assert peak[0] - base <= LIMIT_MB
