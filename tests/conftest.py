"""What every test shares: fixed seeds, and the rule that skips GPU tests where there is no GPU."""

import random

import numpy as np
import pytest
import torch

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
