"""Python in a process of its own, where Legate can be configured, refused or ended without harm to the tests."""

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked import program

ROOT = Path(__file__).parents[1]
REQUIRE = "LMFIT_GPU_REQUIRE_CUPYNUMERIC"  # 1: a machine where these tests must not be skipped
ONE_CPU = "--cpus 1 --gpus 0 --sysmem 64"
TWO_CPUS = "--cpus 2 --gpus 0 --sysmem 64"


def has_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def is_cpu_build():
    """Return whether Legate is conda's build for CPUs, which is not linked to the driver."""
    return any(Path(sys.prefix, "conda-meta").glob("legate-*cpu*.json"))


def require_cupynumeric():
    """Skip, or fail where the tests are required, unless Legate can be started."""
    if importlib.util.find_spec("cupynumeric") is None:
        reason = "cupynumeric is not installed"
    elif not (has_driver() or is_cpu_build() or os.environ.get("LMFIT_GPU_LIBCUDA")):
        reason = "no NVIDIA driver, and LMFIT_GPU_LIBCUDA names no stand-in (tests/libcuda_stub.c)"
    else:
        return
    (pytest.fail if os.environ.get(REQUIRE) == "1" else pytest.skip)(reason)


def environment(config=None, **changes):
    """Return os.environ with LEGATE_CONFIG as given (None: unset) and changes; a value of None unsets."""
    found = {name: value for name, value in os.environ.items() if name != "LEGATE_CONFIG"}
    path = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # legate runs "python"
    wanted = {"PATH": programs, "PYTHONPATH": os.pathsep.join(path), "LEGATE_CONFIG": config, **changes}
    found.update({name: value for name, value in wanted.items() if value is not None})
    return {name: value for name, value in found.items() if name not in wanted or wanted[name] is not None}


def legate(*arguments, timeout=120):
    """Run a program by Legate's launcher on two CPUs; return the lines it printed."""
    launcher = str(Path(sys.executable).with_name("legate"))
    done = subprocess.run(
        [launcher, "--cpus", "2", "--gpus", "0", *arguments],
        env=environment(), cwd=ROOT, timeout=timeout, capture_output=True, text=True,
    )  # fmt: skip
    return _lines(done.returncode, done.stdout, done.stderr)


def plain(*arguments, config=None, timeout=120, **changes):
    """Run a program by Python, in an interpreter that has imported lmfit_gpu; return the lines it printed."""
    with program(list(arguments), environment(config, **changes), ROOT) as running:
        return _lines(running.wait(timeout), running.written(), running.written("err"))


def _lines(status, out, err):
    assert status == 0, f"status {status}\n{out[-2000:]}\n{err[:3000]}"
    return out.splitlines()


def python(code, config=None, timeout=120, **changes):
    """Run code that prints what it found after "> "; return those lines without the mark, and check its status.

    The code begins with ``backend()``, which starts Legate, and ``refusal()``, the message of the error it raises.
    """
    lines = plain("-c", PREAMBLE + code, config=config, timeout=timeout, **changes)
    return [line.removeprefix("> ") for line in lines if line.startswith("> ")]


PREAMBLE = """
import warnings
import numpy as np
import torch
from lmfit_gpu.backends import get_backend
from lmfit_gpu.exceptions import BackendUnavailableError

CPU = torch.device("cpu")

def say(*found):
    print(">", *found, flush=True)

def backend():
    return get_backend("cupynumeric", CPU)

def refusal():
    try:
        backend()
    except BackendUnavailableError as error:
        return str(error)
    return "started"

"""
