"""Nonlinear least squares on torch devices: a scikit-learn estimator, a curve fitter, one engine."""

from importlib.metadata import version

from lmfit_gpu.damping import MarquardtDamping, NielsenDamping, TrustRegion
from lmfit_gpu.devices import get_available_gpus

__all__ = ["MarquardtDamping", "NielsenDamping", "TrustRegion", "get_available_gpus"]

__version__ = version("lmfit-gpu")
