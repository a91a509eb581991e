"""Errors and warnings raised by lmfit_gpu, each with the cause and the first thing to try."""

from scipy.optimize import OptimizeWarning

__all__ = [
    "BackendUnavailableError",
    "CovarianceWarning",
    "FitWarning",
    "NonFiniteError",
]


class BackendUnavailableError(ImportError):
    """A solver backend needs a package, a device or memory that this process does not have."""


class NonFiniteError(ValueError):
    """The model or its derivatives are not finite where a fit needs them (at the start)."""


class FitWarning(UserWarning):
    """A fit went on, but with something the caller should know (a guessed start)."""


class CovarianceWarning(OptimizeWarning):
    """The covariance of some parameters cannot be estimated from the data.

    A subclass of :class:`scipy.optimize.OptimizeWarning`, so filters written for
    :func:`scipy.optimize.curve_fit` keep working.
    """
