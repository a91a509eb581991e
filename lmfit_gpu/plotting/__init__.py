"""Pictures of a fit, in scikit-learn's Display style: a constructor takes what is drawn, ``plot`` draws it.

Every display has classmethods ``from_...`` that gather the numbers and draw at once, takes the axes to draw on as `ax`
(a new figure by default), passes dicts of keywords on to matplotlib, and keeps what it drew in attributes that end
in an underscore. matplotlib is imported when something is drawn, not before; without it BackendUnavailableError names
the install line.
"""

from lmfit_gpu.plotting.convergence import ConvergenceDisplay
from lmfit_gpu.plotting.correlation import CorrelationDisplay
from lmfit_gpu.plotting.fit import FitDisplay
from lmfit_gpu.plotting.profiles import ProfileDisplay
from lmfit_gpu.plotting.residuals import ResidualDisplay

__all__ = ["ConvergenceDisplay", "CorrelationDisplay", "FitDisplay", "ProfileDisplay", "ResidualDisplay"]
