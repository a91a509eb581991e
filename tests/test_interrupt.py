"""Ctrl-C: KeyboardInterrupt goes on, the estimator keeps its best point, and a grid search ends.

The signals are real ones, sent to a process of their own (tests/interrupted_child.py).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from forked import program

CHILD = Path(__file__).with_name("interrupted_child.py")
KINDS = ["numpy", "torch", "module", "factory", "network"]
DEADLINE = 120  # s; a search's workers import torch, on a busy machine
SOON = 30  # s after the signal

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="SIGINT is sent with os.kill")


def child(*arguments, log=None):
    """Start the program in a process group of its own, as a terminal does; none of it is left afterwards."""
    return program([str(CHILD), *arguments], {**os.environ, "LOG": str(log)})


def answer_of(running, timeout):
    assert running.wait(timeout) == 0, running.written("err")
    return json.loads(running.written().splitlines()[-1])


def wait_until(told, timeout=DEADLINE):
    deadline = time.monotonic() + timeout
    while not told() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert told()


def wait_until_ready(running):
    wait_until(lambda: running.written() == "ready\n")


def check(found):
    assert found["passed on"]
    assert found["status"] == "INTERRUPTED"
    assert found["history"] == found["n_iter"]
    assert found["cost"] == pytest.approx(found["cost of the prediction"], rel=1e-9)
    assert found["cost of the copy"] == found["cost of the prediction"]
    assert found["report"].startswith(f"NOT converged (INTERRUPTED) after {found['n_iter']} iterations")


@pytest.fixture(scope="module")
def interrupted_at_5():
    with child(*KINDS) as running:
        return answer_of(running, DEADLINE)


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
    with child("slow", kind, json.dumps(["cpu"] * n_devices)) as running:
        wait_until_ready(running)
        time.sleep(0.1)  # the model sleeps 0.3 s a call
        os.kill(running.pid, signal.SIGINT)
        check(answer_of(running, SOON))


def n_begun(log):
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.mark.parametrize("n_jobs", [1, 2])
@pytest.mark.parametrize("whole_group", [False, True], ids=["one process", "terminal"])
def test_a_grid_search_ends(n_jobs, whole_group, tmp_path):
    log = tmp_path / "fits"
    with child("search", str(n_jobs), log=log) as running:
        wait_until(lambda: n_begun(log) >= n_jobs)
        begun = n_begun(log)
        (os.killpg if whole_group else os.kill)(running.pid, signal.SIGINT)
        found = answer_of(running, SOON)
        assert found["passed on"]
        after = n_begun(log)
        assert begun >= n_jobs
        assert after <= begun + (0 if n_jobs == 1 else 2)  # a fit takes seconds; loky may have handed over the next
        time.sleep(2)
        assert n_begun(log) == after
