"""Memory of MLBFGS on 1, 2 and 4 processes: RssAnon of each rank, for 4,000,000 parameters in 16 equal layers, float32.

MALLOC_MMAP_THRESHOLD_=262144 python tests/benchmarks/bench_mlbfgs_ranks.py, or make bench.

With h pairs a rank that owns m of n parameters keeps 4 m averages, m of momentum and 2 h m of pairs, and n of work;
what is counted is what a rank gains from before the optimizer is made to after h + 2 steps with a pair in each. glibc
keeps 20 to 90 MB of freed buffers (of messages and products) unless MALLOC_MMAP_THRESHOLD_ is set, as it is here.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lmfit_gpu import MLBFGS

pytestmark = pytest.mark.benchmark

STATUS = Path("/proc/self/status")
WIDTH, LAYERS, PAIRS = 500, 16, 10
MB = 2**20


def anonymous_mb():
    """Return the anonymous resident memory of this process (RssAnon), in MB."""
    return int(re.search(r"RssAnon:\s+(\d+) kB", STATUS.read_text()).group(1)) / 1024


def predicted_mb(n_ranks):
    n = WIDTH**2 * LAYERS
    return 4 * ((4 + 1 + 2 * PAIRS) * n / n_ranks + n) / MB


def gain(rank, n_ranks, folder):
    """Return what this rank gains."""
    if n_ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/{n_ranks}", rank=rank, world_size=n_ranks)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(rank))
    model(x).square().sum().backward()
    before = anonymous_mb()
    group = dist.group.WORLD if n_ranks > 1 else None
    options = {"update_every": 1, "history_size": PAIRS, "eigenvalue_bounds": (1e-12, 1e12)}  # no pair is dropped
    optimizer = MLBFGS(model, lr=1e-4, process_group=group, **options)
    for _ in range(PAIRS + 2):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert all(hessian["n_pairs"] == PAIRS for hessian in optimizer.inverse_hessians())
    return anonymous_mb() - before


def forked(rank, n_ranks, folder):
    pid = os.fork()
    if pid == 0:
        (folder / f"{n_ranks} {rank}.json").write_text(json.dumps(gain(rank, n_ranks, folder)))
        os._exit(0)
    return pid


def main():
    torch.set_num_threads(1)
    MLBFGS(nn.Linear(1, 1))  # torch imports more when the first optimizer is made
    gains = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for n_ranks in (1, 2, 4):
            for pid in [forked(rank, n_ranks, folder) for rank in range(n_ranks)]:
                assert os.waitpid(pid, 0)[1] == 0
            gains[n_ranks] = [json.loads((folder / f"{n_ranks} {r}.json").read_text()) for r in range(n_ranks)]
    print(json.dumps(gains))


@pytest.mark.skipif(not STATUS.exists(), reason="RssAnon is read from /proc")
def test_memory_falls_with_ranks():
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=True)
    for n_ranks, gains in json.loads(done.stdout).items():
        expected = predicted_mb(int(n_ranks))
        print(f"\n{n_ranks} ranks: RssAnon +{', '.join(f'{mb:.0f}' for mb in gains)} MB, {expected:.0f} predicted")
        assert all(expected - 1 <= mb < 1.05 * expected for mb in gains)


if __name__ == "__main__":
    main()
