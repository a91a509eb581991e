"""Optimizers for training loops of torch, and the samplers of batches that go with them."""

from lmfit_gpu.optim.attention import ResidualAttention
from lmfit_gpu.optim.lma import LMA
from lmfit_gpu.optim.mlbfgs import MLBFGS
from lmfit_gpu.optim.sampling import AdaptiveBatchSampler

__all__ = ["LMA", "MLBFGS", "AdaptiveBatchSampler", "ResidualAttention"]
