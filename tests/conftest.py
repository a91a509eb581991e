"""What every test shares: fixed seeds, and the rules that skip what the machine does not have.

GPU tests are skipped where there is no GPU, tests of backend cupynumeric where it cannot be used. Whether it can is
known only by starting Legate, which takes seconds and memory: the first such test that runs asks, collecting never
does. With LMFIT_GPU_REQUIRE_CUPYNUMERIC=1 these tests fail where they would be skipped.
"""

import functools
import os
import random

import numpy as np
import pytest
import torch

from lmfit_gpu.backends import get_backend
from lmfit_gpu.exceptions import BackendUnavailableError

REQUIRE = "LMFIT_GPU_REQUIRE_CUPYNUMERIC"
SEED = 20260


@pytest.fixture(autouse=True)
def seed():
    """Start every test from the same global random state; returns the seed for generators of its own."""
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002  scikit-learn's default random_state=None draws from this one
    torch.manual_seed(SEED)
    return SEED


@pytest.fixture
def rng(seed):
    """Return a numpy generator, seeded."""
    return np.random.default_rng(seed)


def pytest_collection_modifyitems(items):
    gpu_items = [item for item in items if "gpu" in item.keywords]
    if gpu_items and not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False"))


def pytest_runtest_setup(item):
    if item.get_closest_marker("cupynumeric") is None:
        return
    reason = why_no_cupynumeric()
    if reason and os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{reason} ({REQUIRE}=1: this is a failure)", pytrace=False)
    if reason:
        pytest.skip(reason)


@functools.cache
def why_no_cupynumeric():
    """Start the backend; return why it cannot be used, in one clause, or ""."""
    try:
        get_backend("cupynumeric", torch.device("cpu"))
    except BackendUnavailableError as error:
        return str(error).split(". ")[0].split("; ")[0]
    return ""
