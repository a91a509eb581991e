"""Ctrl-C: KeyboardInterrupt goes on, the estimator keeps its best point, and a grid search ends.

The signals are real ones, sent to a process of their own (tests/interrupted_child.py).
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("interrupted_child.py")
KINDS = ["numpy", "torch", "module", "factory", "network"]
DEADLINE = 120  # s; most of it for imports on a busy machine
SOON = 30  # s after the signal

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="SIGINT is sent with os.kill")


@contextmanager
def child(*arguments, log=None):
    """Start the program in a process group of its own, as a terminal does; none of it is left afterwards."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "LOG": str(log)}
    process = subprocess.Popen(
        [sys.executable, str(CHILD), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        process.stderr.close()


def answer_of(process, timeout):
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def wait_until_ready(process):
    line = process.stdout.readline()
    assert line == "ready\n", line + process.stderr.read()


def check(found):
    assert found["passed on"]
    assert found["status"] == "INTERRUPTED"
    assert found["history"] == found["n_iter"]
    assert found["cost"] == pytest.approx(found["cost of the prediction"], rel=1e-9)
    assert found["cost of the copy"] == found["cost of the prediction"]
    assert found["report"].startswith(f"NOT converged (INTERRUPTED) after {found['n_iter']} iterations")


@pytest.fixture(scope="module")
def interrupted_at_5():
    with child(*KINDS) as process:
        return answer_of(process, DEADLINE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_devices", [1, 2])
def test_a_signal_at_iteration_5(kind, n_devices, interrupted_at_5):
    found = interrupted_at_5[f"{kind} {n_devices}"]
    check(found)
    assert found["n_iter"] == 5
    assert found["parameters"] == (31 if kind == "network" else 3)  # 10 tanh units on one feature


SLOW = [("short path", 1), ("numpy", 1), ("numpy", 2), ("torch", 1), ("module", 2)]


@pytest.mark.parametrize(("kind", "n_devices"), SLOW)
def test_a_signal_while_the_model_runs(kind, n_devices):
    with child("slow", kind, json.dumps(["cpu"] * n_devices)) as process:
        wait_until_ready(process)
        time.sleep(0.1)  # the model sleeps 0.3 s a call
        process.send_signal(signal.SIGINT)
        check(answer_of(process, SOON))


def n_begun(log):
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.mark.parametrize("n_jobs", [1, 2])
@pytest.mark.parametrize("whole_group", [False, True], ids=["one process", "terminal"])
def test_a_grid_search_ends(n_jobs, whole_group, tmp_path):
    log = tmp_path / "fits"
    with child("search", str(n_jobs), log=log) as process:
        wait_until_ready(process)
        deadline = time.monotonic() + DEADLINE
        while n_begun(log) < n_jobs and time.monotonic() < deadline:
            time.sleep(0.05)
        begun = n_begun(log)
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        found = answer_of(process, SOON)
        assert found["passed on"]
        after = n_begun(log)
        assert begun >= n_jobs
        assert after <= begun + (0 if n_jobs == 1 else 2)  # a fit takes seconds; loky may have handed over the next
        time.sleep(2)
        assert n_begun(log) == after
