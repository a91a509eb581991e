"""Nonlinear least squares on torch devices: a scikit-learn estimator, a curve fitter, one engine."""

from importlib.metadata import version

from lmfit_gpu.check_jacobian import check_jacobian
from lmfit_gpu.curve_fit import curve_fit
from lmfit_gpu.damping import MarquardtDamping, NielsenDamping, ProximalDamping, TrustRegion
from lmfit_gpu.devices import get_available_gpus
from lmfit_gpu.early_stopping import EarlyStopping
from lmfit_gpu.estimator import LMRegressor
from lmfit_gpu.goodness import f_test
from lmfit_gpu.optim import LMA, MLBFGS, AdaptiveBatchSampler, ResidualAttention

__all__ = [
    "LMA",
    "MLBFGS",
    "AdaptiveBatchSampler",
    "EarlyStopping",
    "LMRegressor",
    "MarquardtDamping",
    "NielsenDamping",
    "ProximalDamping",
    "ResidualAttention",
    "TrustRegion",
    "check_jacobian",
    "curve_fit",
    "f_test",
    "get_available_gpus",
]

__version__ = version("lmfit-gpu")
