"""What an estimator says of its parameters after a fit, beside their values: intervals, correlations, and more."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from lmfit_gpu.bootstrap import Bootstrap, bootstrap
from lmfit_gpu.diagnostics import Diagnostics, diagnostics_of
from lmfit_gpu.facts import facts_of
from lmfit_gpu.goodness import GoodnessOfFit, goodness_of_fit
from lmfit_gpu.profile_map import ProfileMap, profile_map
from lmfit_gpu.profiles import ProfileLikelihood, profile_likelihood, profiled_names
from lmfit_gpu.report import Report, report_of
from lmfit_gpu.result import Result, t_quantile
from lmfit_gpu.solution import solution_of

__all__ = ["Inferring"]


class Inferring:
    """The statistics of a fitted :class:`lmfit_gpu.LMRegressor`."""

    result_: Result
    _data: Any

    def conf_int(self, level: float = 0.95) -> dict[str, tuple[float, float]]:
        r"""Return the interval :math:`\hat\theta \pm t\,\mathrm{stderr}` of every parameter.

        t is the quantile of Student's distribution with ``result_.dof`` degrees of freedom, the normal one with
        ``absolute_sigma``. It takes the model to be linear over the interval: :meth:`profile_likelihood` does not.

        Parameters
        ----------
        level : float
            Between 0 and 1.

        Returns
        -------
        dict of str to (lower, upper)
            Infinite for parameters that the data do not determine, NaN for those on a bound, the value itself for
            fixed ones.

        Raises
        ------
        ValueError
            For a level that is not between 0 and 1.

        Examples
        --------
        >>> import numpy as np
        >>> from lmfit_gpu import LMRegressor
        >>> x = np.arange(6.0)
        >>> y = np.array([1.1, 2.9, 5.2, 6.8, 9.1, 10.9])
        >>> est = LMRegressor(lambda x, a, b: a + b * x, p0=[0, 1]).fit(x[:, None], y)
        >>> low, high = est.conf_int()["b"]
        >>> print(f"{low:.3f} {high:.3f}")
        1.867 2.088
        """
        check_is_fitted(self, "result_")
        found = self.result_.conf_int(level)
        return {name: (float(low), float(high)) for name, (low, high) in zip(self.result_.names, found, strict=True)}

    def correlation(self) -> np.ndarray | None:
        """Return the correlations of the estimates, shape (n_params, n_params), in the order of ``theta_``.

        NaN for parameters without a variance: fixed, on a bound, not determined. None without a covariance.
        """
        check_is_fitted(self, "result_")
        return self.result_.correlation

    def profile_likelihood(
        self,
        names: Any = None,
        level: float = 0.95,
        *,
        X: Any = None,
        y: Any = None,
        sample_weight: Any = None,
        sigma: Any = None,
    ) -> ProfileLikelihood:
        """Return intervals by profile likelihood: right also where a model is curved (:mod:`lmfit_gpu.profiles`).

        Parameters
        ----------
        names : str, sequence of str, optional
            Fitted parameters; default: all.
        level : float
            Between 0 and 1.
        X, y, sample_weight, sigma
            The data of the fit, where the estimator has them no more.

        Returns
        -------
        ProfileLikelihood
            A mapping of name to :class:`~lmfit_gpu.profiles.Profile`; ``intervals`` are those of all.

        Raises
        ------
        ValueError
            For names that have no profile, under a robust loss, without an estimate of the noise, and for a fit that
            has not converged.

        Warns
        -----
        FitWarning
            If a better fit is found on the way.

        Examples
        --------
        >>> import numpy as np
        >>> from lmfit_gpu import LMRegressor
        >>> x = np.array([0.02, 0.06, 0.11, 0.22, 0.56, 1.1])
        >>> y = np.array([47, 97, 123, 152, 191, 200])
        >>> est = LMRegressor(lambda x, top, half: top * x / (half + x), p0=[200, 0.1]).fit(x[:, None], y)
        >>> low, high = est.profile_likelihood().intervals["half"]
        >>> print(f"{low:.4f} {high:.4f}")
        0.0621 0.0943
        """
        check_is_fitted(self, "result_")
        t_quantile(level, 1.0)  # checks the level
        profiled_names(self.result_, names)
        solution = solution_of(self, X, y, sample_weight, sigma)
        try:
            return profile_likelihood(solution, names, level)
        finally:
            solution.close()

    def profile_map(  # noqa: PLR0913
        self,
        name_x: str,
        name_y: str,
        *,
        levels: Sequence[float] = (0.683, 0.955),
        shape: tuple[int, int] = (25, 25),
        limits: Any = None,
        X: Any = None,
        y: Any = None,
        sample_weight: Any = None,
        sigma: Any = None,
    ) -> ProfileMap:
        """Return the least cost over all other parameters on a grid of two, with the joint regions of levels.

        Parameters
        ----------
        name_x, name_y : str
            Fitted parameters.
        levels : sequence of float
        shape : (p, q)
            Points along x and y; as many fits as p q.
        limits : ((low, high), (low, high)), optional
            Of x and y. Default: a little more than the region of the highest level.
        X, y, sample_weight, sigma
            The data of the fit, where the estimator has them no more.

        Returns
        -------
        ProfileMap

        Raises
        ------
        ValueError
            As :meth:`profile_likelihood`, and for levels, shapes and limits that make no map.
        """
        check_is_fitted(self, "result_")
        profiled_names(self.result_, (name_x, name_y))
        solution = solution_of(self, X, y, sample_weight, sigma)
        try:
            return profile_map(solution, (name_x, name_y), levels, shape, limits)
        finally:
            solution.close()

    def bootstrap(  # noqa: PLR0913
        self,
        n_resamples: int = 999,
        *,
        method: str = "residual",
        level: float = 0.95,
        random_state: Any = None,
        X: Any = None,
        y: Any = None,
        sample_weight: Any = None,
        sigma: Any = None,
    ) -> Bootstrap:
        """Return estimates of resampled data, with their spread and BCa intervals (:mod:`lmfit_gpu.bootstrap`).

        Parameters
        ----------
        n_resamples : int
            Fits, each from the estimate.
        method : {"residual", "case"}
            Residuals, or whole rows, are drawn anew.
        level : float
            Between 0 and 1.
        random_state : int, RandomState or None
        X, y, sample_weight, sigma
            The data of the fit, where the estimator has them no more.

        Returns
        -------
        Bootstrap

        Raises
        ------
        ValueError
            For other methods and levels, too few resamples, and models whose rows or residuals cannot be drawn.

        Warns
        -----
        FitWarning
            If more than a hundredth of the fits do not converge; they are left out.
        """
        check_is_fitted(self, "result_")
        solution = solution_of(self, X, y, sample_weight, sigma)
        try:
            return bootstrap(solution, n_resamples, method, level, random_state)
        finally:
            solution.close()

    def report(self) -> Report:
        """Return the full report of the fit: text, which a notebook shows as tables (:mod:`lmfit_gpu.report`).

        Model and data, why it stopped, the parameters with standard errors, t, p and 95 % intervals, goodness of fit,
        correlations, what to beware of and what to do, options given and used, the last trials.

        Returns
        -------
        Report
            A str.
        """
        check_is_fitted(self, "result_")
        return report_of(self.result_, facts_of(self))

    def goodness_of_fit(self) -> GoodnessOfFit:
        """Return χ², R², likelihood, AIC, AICc and BIC of the fit (:mod:`lmfit_gpu.goodness`).

        Returns
        -------
        GoodnessOfFit
            NaN where a number does not exist: likelihoods under a loss, or of an exact fit.
        """
        check_is_fitted(self, "result_")
        return goodness_of_fit(self.result_)

    def diagnostics(self, X: Any = None, y: Any = None, sample_weight: Any = None, sigma: Any = None) -> Diagnostics:
        """Return residuals, leverage and influence of every row (:mod:`lmfit_gpu.diagnostics`).

        Parameters
        ----------
        X, y, sample_weight, sigma
            The data of the fit, where the estimator has them no more (after a pickle, or from a file).

        Returns
        -------
        Diagnostics
            Arrays in the shape of y.

        Raises
        ------
        ValueError
            Under a loss, without a covariance, or for other data than those of the fit.
        """
        check_is_fitted(self, "result_")
        solution = solution_of(self, X, y, sample_weight, sigma)
        try:
            return diagnostics_of(solution)
        finally:
            solution.close()
