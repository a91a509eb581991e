r"""How good a fit is, in numbers: χ², R², likelihood, information criteria, and the F test of two nested fits.

With N observations (frequencies counted), p estimated parameters (the rank of J; the effective number with a penalty),
χ² = Σ w (r/σ)² and dof = N − p,

.. math:: R^2 = 1 - \frac{\chi^2}{\sum w ((y-\bar y)/\sigma)^2}, \qquad
          -2\ln L = N \ln 2\pi + 2\sum w\ln\sigma + \begin{cases} N (1 + \ln(\chi^2/N)) & \text{relative } \sigma
          \\ \chi^2 & \text{absolute } \sigma\end{cases}

    AIC = −2 ln L + 2K,   AICc = AIC + 2K(K + 1)/(N − K − 1),   BIC = −2 ln L + K ln N,

with K = p + 1, or p with absolute σ

(Burnham and Anderson, Model Selection and Multimodel Inference, 2nd ed. (2002), sections 2.2 and 2.4; the conventions
of R's ``logLik`` and ``AIC`` of ``nls``, where the unknown variance counts as a parameter). The F test of a smaller
model in a larger one is

.. math:: F = \frac{(\chi^2_s - \chi^2_l)/(\mathrm{dof}_s - \mathrm{dof}_l)}{\chi^2_l/\mathrm{dof}_l}

(Bates and Watts, Nonlinear Regression Analysis and Its Applications (1988), section 3.10); with absolute σ it is the
difference of χ² itself, against the χ² distribution.
"""

import math
from dataclasses import dataclass
from typing import Any

from scipy.special import chdtrc, fdtrc
from sklearn.utils.validation import check_is_fitted

__all__ = ["FTest", "GoodnessOfFit", "f_test", "goodness_of_fit"]

SAME = 1e-9  # relative: sums of the same data, in another order
EXACT = 1e-25  # of the total sum of squares: residuals that are rounding have no likelihood


@dataclass(frozen=True)
class GoodnessOfFit:
    """Goodness of a fit; NaN where a number does not exist.

    Parameters
    ----------
    chi_square : float
        Σ w (r/σ)², in the units of y² without sigma; twice the cost under a loss.
    reduced_chi_square : float
        χ²/dof; near 1 where absolute sigma is right. NaN without a degree of freedom.
    s : float
        Residual standard error √(χ²/dof), in units of sigma where that was given.
    r_squared, adjusted_r_squared : float
        NaN for residual callables, constant targets and losses.
    log_likelihood, aic, aicc, bic : float
        NaN under a loss, which is no likelihood; without a degree of freedom; and for an exact fit, whose likelihood
        has no bound.
    n_observed : float
        Observations, counted with their frequencies; outputs of a row count each.
    n_params : float
        Estimated parameters p: the rank of J, less what a penalty determines.
    dof : float
    p_value : float
        Probability of a larger χ² if the model and absolute sigma are right; NaN without absolute sigma.
    """

    chi_square: float
    reduced_chi_square: float
    s: float
    r_squared: float
    adjusted_r_squared: float
    log_likelihood: float
    aic: float
    aicc: float
    bic: float
    n_observed: float
    n_params: float
    dof: float
    p_value: float


def goodness_of_fit(result: Any) -> GoodnessOfFit:
    """Return the goodness of a fit.

    Parameters
    ----------
    result : Result
    """
    nan = float("nan")
    n = float(result.n_residuals if result.n_observed is None else result.n_observed)
    dof, chi = float(result.dof), result.chi_square
    reduced = chi / dof if result.has_freedom else nan
    plain = _is_plain(result)
    total = result.total_sum
    r2 = 1 - chi / total if plain and total > 0 else nan
    likelihood = _log_likelihood(result, n) if plain else nan
    p = n - dof
    k = p if result.absolute_sigma else p + 1
    aic = -2 * likelihood + 2 * k
    return GoodnessOfFit(
        chi_square=chi,
        reduced_chi_square=reduced,
        s=reduced**0.5,
        r_squared=r2,
        adjusted_r_squared=1 - (1 - r2) * (n - 1) / dof if result.has_freedom else nan,
        log_likelihood=likelihood,
        aic=aic,
        aicc=aic + 2 * k * (k + 1) / (n - k - 1) if n > k + 1 else nan,
        bic=-2 * likelihood + k * math.log(n),
        n_observed=n,
        n_params=p,
        dof=dof,
        p_value=float(chdtrc(dof, chi)) if plain and result.absolute_sigma and dof > 0 else nan,
    )


def _is_plain(result: Any) -> bool:
    return bool(str(result.used.get("loss", "linear")) == "linear")


def _log_likelihood(result: Any, n: float) -> float:
    constant = n * math.log(2 * math.pi) + 2 * result.log_sigma
    if result.absolute_sigma:
        return -0.5 * (result.chi_square + constant)
    exact = not result.chi_square > (EXACT * result.total_sum if result.total_sum > 0 else 0.0)
    if exact or not result.has_freedom:
        return float("nan")
    return -0.5 * (n * (1 + math.log(result.chi_square / n)) + constant)


@dataclass(frozen=True)
class FTest:
    """Whether the larger of two nested models fits better than its further parameters explain.

    Parameters
    ----------
    statistic : float
        F; with absolute sigma the difference of χ².
    dof_numerator, dof_denominator : float
        The latter is inf with absolute sigma.
    p_value : float
        Probability of such a statistic, or a larger one, if the smaller model is right.
    """

    statistic: float
    dof_numerator: float
    dof_denominator: float
    p_value: float


def f_test(smaller: Any, larger: Any) -> FTest:
    """Compare two fits of the same data, the smaller model being a special case of the larger.

    That it is one is not checked; what is, are the data and the numbers of parameters.

    Parameters
    ----------
    smaller, larger : LMRegressor
        Fitted.

    Returns
    -------
    FTest

    Raises
    ------
    ValueError
        If the fits are not of the same data and noise, are under a loss or a penalty, or are in the wrong order; if the
        larger model leaves no degree of freedom, or fits worse than the smaller, as only a fit that has not converged
        does.

    Examples
    --------
    >>> import numpy as np
    >>> from lmfit_gpu import LMRegressor, f_test
    >>> x = np.arange(12.0)
    >>> y = 1 + 0.5 * x + 0.3 * np.cos(2.5 * x)
    >>> line = LMRegressor(lambda x, a, b: a + b * x, p0=[0, 1]).fit(x[:, None], y)
    >>> parabola = LMRegressor(lambda x, a, b, c: a + b * x + c * x**2, p0=[0, 1, 0]).fit(x[:, None], y)
    >>> bool(f_test(line, parabola).p_value > 0.5)
    True
    """
    for name, estimator in (("smaller", smaller), ("larger", larger)):
        check_is_fitted(estimator, "result_")
        result = estimator.result_
        if not _is_plain(result) or result.penalty or result.shrinkage:
            raise ValueError(f"f_test: {name} was fitted under a loss or a penalty; sums of squares are compared here")
        if result.n_iter and not result.success:
            raise ValueError(f"f_test: {name} has not converged ({result.status.name})")
    few, many = smaller.result_, larger.result_
    one, other = goodness_of_fit(few), goodness_of_fit(many)
    same = few.absolute_sigma == many.absolute_sigma and one.n_observed == other.n_observed
    for a, b in ((few.total_sum, many.total_sum), (few.log_sigma, many.log_sigma)):
        same &= (math.isnan(a) and math.isnan(b)) or abs(a - b) <= SAME * max(abs(a), abs(b))
    if not same:
        raise ValueError(
            "f_test: the fits are not of the same data: they differ in the number of observations "
            f"({one.n_observed:g} and {other.n_observed:g}), in y or in sigma"
        )
    k = one.dof - other.dof
    if not k > 0:
        raise ValueError(
            f"f_test: the larger model has {other.n_params:g} parameters, the smaller {one.n_params:g}; give the one "
            "with fewer first"
        )
    fall = one.chi_square - other.chi_square
    if fall < -SAME * one.chi_square:
        raise ValueError(
            f"f_test: the larger model fits worse (χ² {other.chi_square:.6g}) than the smaller ({one.chi_square:.6g}): "
            "they are not nested, or its fit ended elsewhere; start it from the smaller one's parameters"
        )
    fall = max(fall, 0.0)
    if few.absolute_sigma:
        return FTest(fall, k, float("inf"), float(chdtrc(k, fall)))
    if not many.has_freedom or not other.chi_square > 0:
        raise ValueError("f_test: the larger model leaves no residual to estimate the noise from")
    statistic = fall / k / other.reduced_chi_square
    return FTest(statistic, k, other.dof, float(fdtrc(k, other.dof, statistic)))
