"""The scikit-learn estimator: what a user gives becomes a problem, the engine fits it, attributes hold the answer."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from sklearn.base import _fit_context
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from lmfit_gpu.arguments import check_data, check_features, check_options
from lmfit_gpu.bands import KINDS, PredictionInterval, noise_of, quantile, standard_errors
from lmfit_gpu.exceptions import CovarianceWarning
from lmfit_gpu.fitting import run
from lmfit_gpu.function_space import FunctionSpace, function_space
from lmfit_gpu.inferring import Inferring
from lmfit_gpu.models import ModuleModel
from lmfit_gpu.persistence import Persistent
from lmfit_gpu.prediction import predicted
from lmfit_gpu.preparation import Data, Setup, has_network
from lmfit_gpu.protocol import Regressor
from lmfit_gpu.report import not_estimated
from lmfit_gpu.result import ENDS_OF_TRAINING, Result, t_quantile
from lmfit_gpu.solution import solution_of
from lmfit_gpu.threads import share_of_threads

__all__ = ["LMRegressor"]

OF_FEATURES = ("n_features_in_", "feature_names_in_")


def _can_predict(estimator: "LMRegressor") -> bool:
    if estimator.residual is not None and estimator.model is None and estimator.predict_fn is None:
        raise AttributeError("predict and score of a residual callable need predict_fn(theta, X)")
    return True


class LMRegressor(Inferring, Persistent, Regressor):
    r"""Nonlinear least-squares regression by the Levenberg-Marquardt method.

    Minimises :math:`\tfrac12\sum_i w_i\,\rho\bigl((r_i(\theta)/\sigma_i)^2\bigr)`, r = prediction − target, over
    parameters within bounds, by a trust region with geodesic acceleration.

    Parameters
    ----------
    model : callable, torch.nn.Module, or module factory, optional
        A function ``f(x, a, b, ...)`` or ``f(X, theta)`` written in numpy or in torch (found out by trying; torch
        is differentiated exactly); a module instance (copied, never changed); or a factory: a subclass of
        ``torch.nn.Module`` or a ``functools.partial`` of one, called with ``n_features_in_`` and ``n_outputs``
        where its signature has them; its other parameters are set as ``model__name``. Default, without a `residual`:
        a network of tanh layers (:mod:`lmfit_gpu.network`) in standardised units of X and y.
    residual : callable, optional
        With a model: ``residual(prediction, target)``. Alone: ``residual(theta, X, y)`` → vector of any length.
    predict_fn : callable, optional
        ``predict_fn(theta, X)`` for a residual callable without a model.
    p0 : sequence, dict, "auto", or callable (x, y) -> sequence or dict, optional
        Start values. Default: a module's own parameters; 1 for each parameter of a function, with a warning (with
        bounds the middle between two, 1 from a single one). "auto": a search that begins there
        (:mod:`lmfit_gpu.starts`).
    bounds : (lower, upper), dict of name to (lower, upper), or scipy.optimize.Bounds, optional
        Scalars or one value for each parameter; None and ±inf: no bound. The model is never evaluated outside. A start
        on a bound is allowed, one outside is an error; equal bounds fix a parameter.
    fixed : sequence of names, or mask of bool
        Parameters that keep their start. A name of a module's tensor means all its entries; ``requires_grad=False``
        does the same.
    tied : dict of name to callable, optional
        Parameters that follow from others: ``{"b": lambda s, t: s * torch.exp(t)}``. The argument names are those of
        other parameters, or of new ones whose start is in the dict `p0`.
    x_format : {"auto", "columns", "1d"}
        What a function gets: with "auto" 1-D ``x`` for one column, else (n, k); always (n, k); always 1-D.
    loss : {"linear", "soft_l1", "huber", "cauchy", "arctan"} or callable
        ρ; as in :func:`scipy.optimize.least_squares`, a callable returns ρ, ρ' and ρ'' of an array (m,) as (3, m).
    f_scale : float
        Residual (over sigma) at which the loss begins to bend: the cost is ½ Σ w f_scale² ρ((r/σ/f_scale)²).
    absolute_sigma : bool
        sigma is known, not only its ratios: the covariance is (JᵀJ)⁻¹, not scaled by s².
    covariance : {"classical", "robust", "HC0", "HC1", "HC2", "HC3"}
        "classical": the noise has the same size everywhere (in units of sigma). The others are sandwiches, right also
        where it has not; "robust" is HC3, with a loss HC1 (:mod:`lmfit_gpu.sandwich`).
    nan_policy : {"raise", "omit"}
        NaN or infinity in the data: an error that names rows and columns, or the rows are left out.
    jac : {"auto", "autograd", "differences", "2-point", "3-point", "cs"} or callable
        "auto": autograd in torch; in numpy 2-point differences that change to 3-point near the solution.
        A callable has the signature of the model function and returns (n, n_params).
    solver : {"auto", "qr", "cholesky", "dual", "cg"}
        "auto": qr up to 1,000 parameters (the accurate one); beyond, dual with fewer residuals than parameters,
        else cholesky; cg where those matrices are too large.
    backend : {"auto", "scipy", "torch", "cupynumeric"}
        Where the damped systems are solved; "auto": cupynumeric under a ``legate`` launcher or with LEGATE_CONFIG
        set, torch when the model is on a GPU, else scipy.
    devices : "auto", a torch device, or a list of them
        Blocks of rows are dealt over the list; "auto": where the module, or the tensor X, is.
    dtype : {None, torch.float64, torch.float32}
        Arithmetic of the model. None: float64 for functions, its own for a module.
    chunk_rows : int or "auto"
        Rows evaluated together.
    damping : {"trust-region", "nielsen", "marquardt", "lema"} or policy object
    ftol, xtol, gtol : float or "auto"
        Limits of the stop tests (:mod:`lmfit_gpu.termination`).
    max_iter : int
        Most trials. The default network ends sooner, as SLOW_PROGRESS and without a warning, when 30 trials lower the
        cost by less than a hundredth of it, unless `ftol` is given.
    hidden_layer_sizes : int or sequence of int, optional
        Units of the hidden layers of the default network; None is (10,).
    alpha : float
        The cost has ½ alpha ‖weights‖² more; weights are the tensors of a module with two or more axes. For the default
        network in units of the variance of y (over sigma², with sigma).
    early_stopping : bool, EarlyStopping, optional
        Hold out a share of the rows, end the fit when their cost falls no more, and keep the point where it was least.
        True is ``EarlyStopping(fraction=0.1, patience=10)``.
    random_state : int, RandomState or None
        Seeds the default network or a module factory, the rows held out, and the search of p0="auto" (there None is 0).
    warm_start : bool
        Start where the last fit of this estimator has ended, in place of p0 and of new weights.
    callback : callable, optional
        ``callback(record)`` after every trial; a true return value stops the fit.
    verbose : int
        0: silent; 1: a bar over the trials, on standard error; 2: the iteration table, on standard output.

    Attributes
    ----------
    params_ : dict of str to float
    theta_ : ndarray, shape (n_params,)
        All parameters, fixed and tied ones too, in the order of the model, then those that only `tied` has.
    module_ : torch.nn.Module
        The fitted copy of a module, in evaluation mode.
    covariance_ : ndarray, shape (n_params, n_params)
        s²(JᵀJ)⁻¹, s² = χ²/dof, dof = Σw − rank, or what `covariance` and a loss make of it; inf on the diagonal for a
        parameter the data do not determine (``result_.unseen`` names what of it they do), 0 for fixed ones, by the
        delta method for tied ones. A parameter on a bound is held fixed for the others and has NaN itself. None (and
        standard errors NaN) with the solvers dual and cg beyond 1,000 parameters.
    stderr_ : ndarray, shape (n_params,)
    rank_ : int
    result_ : Result
        Status, message, counts, history, ``report()``.
    n_iter_, n_features_in_ : int
    solver_, backend_ : str
    devices_ : tuple of torch.device

    Examples
    --------
    >>> import numpy as np
    >>> from lmfit_gpu import LMRegressor
    >>> x = np.linspace(0, 4, 25)
    >>> y = 3.0 * np.exp(-0.8 * x) + 0.5
    >>> est = LMRegressor(lambda x, a, b, c: a * np.exp(-b * x) + c, p0=[1, 1, 0]).fit(x[:, None], y)
    >>> {name: round(value, 6) for name, value in est.params_.items()}
    {'a': 3.0, 'b': 0.8, 'c': 0.5}
    """

    _space: FunctionSpace | None = None  # where there is no covariance, what bands are made of
    _errors_of_surrogate = False  # curve_fit's: those of J̃ under a loss, as SciPy has them

    def __init__(  # noqa: PLR0913
        self,
        model: Any = None,
        *,
        residual: Callable[..., Any] | None = None,
        predict_fn: Callable[..., Any] | None = None,
        p0: Any = None,
        bounds: Any = None,
        fixed: Any = (),
        tied: Any = None,
        x_format: str = "auto",
        loss: str | Callable[..., Any] = "linear",
        f_scale: float = 1.0,
        absolute_sigma: bool = False,
        covariance: str = "classical",
        nan_policy: str = "raise",
        jac: str | Callable[..., Any] = "auto",
        solver: str = "auto",
        backend: str = "auto",
        devices: Any = "auto",
        dtype: Any = None,
        chunk_rows: int | str = "auto",
        damping: Any = "trust-region",
        ftol: float | str = "auto",
        xtol: float | str = "auto",
        gtol: float | str = "auto",
        max_iter: int = 1000,
        hidden_layer_sizes: Any = None,
        alpha: float = 0.0,
        early_stopping: Any = None,
        random_state: Any = None,
        warm_start: bool = False,
        callback: Callable[..., Any] | None = None,
        verbose: int = 0,
    ) -> None:
        self.model = model
        self.residual = residual
        self.predict_fn = predict_fn
        self.p0 = p0
        self.bounds = bounds
        self.fixed = fixed
        self.tied = tied
        self.x_format = x_format
        self.loss = loss
        self.f_scale = f_scale
        self.absolute_sigma = absolute_sigma
        self.covariance = covariance
        self.nan_policy = nan_policy
        self.jac = jac
        self.solver = solver
        self.backend = backend
        self.devices = devices
        self.dtype = dtype
        self.chunk_rows = chunk_rows
        self.damping = damping
        self.ftol = ftol
        self.xtol = xtol
        self.gtol = gtol
        self.max_iter = max_iter
        self.hidden_layer_sizes = hidden_layer_sizes
        self.alpha = alpha
        self.early_stopping = early_stopping
        self.random_state = random_state
        self.warm_start = warm_start
        self.callback = callback
        self.verbose = verbose

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, sigma: Any = None) -> "LMRegressor":
        """Fit the parameters to data.

        Parameters
        ----------
        X : array_like or Tensor, shape (n_samples, n_features)
            Modules take more axes too.
        y : array_like or Tensor, shape (n_samples,) or (n_samples, n_outputs)
            None only for a residual callable without a model.
        sample_weight : array_like, shape (n_samples,), optional
            Frequencies w: 0 is a row that is not there, 2 a row observed twice. For weights 1/σ² give sigma.
        sigma : float or array_like, shape (n_samples,) or that of y, optional
            Standard deviations of y; relative ones unless ``absolute_sigma``.

        Returns
        -------
        self

        Raises
        ------
        ValueError, TypeError
            For bad arguments or data, or a start where the model is not finite; before any fitting.
        KeyboardInterrupt, or what the model raised while it was linearised
            Passed on; the last linearised point is kept in the attributes.

        Warns
        -----
        ConvergenceWarning
            If no stop test was met; the best point is kept.
        CovarianceWarning
            If standard errors of some parameters cannot be estimated.
        """
        check_options(self)
        with self._features_of_last_fit():
            data = check_data(self, X, y, sample_weight, sigma)
            with share_of_threads():
                result = run(self, data, self._keep)
        self._warn(result)
        return self

    @available_if(_can_predict)
    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Predict targets.

        Parameters
        ----------
        X : array_like or Tensor, shape (n_samples, n_features)
        return_std : bool, default False
            Also return the standard error of each prediction, that of the mean (:mod:`lmfit_gpu.bands`).

        Returns
        -------
        prediction : ndarray or Tensor, float64, in the shape of y at fit: (n,), (n, 1) or (n, n_outputs)
            A tensor for a tensor X.
        std : the same, with `return_std`
            Infinite, with a warning, where a prediction depends on what the data do not determine.

        Raises
        ------
        ValueError
            With `return_std`, if the solver kept no covariance.
        """
        check_is_fitted(self, "result_")
        X = check_features(self, X, reset=False)
        prediction = predicted(self._setup, self.theta_, X, self.result_.used["chunk_rows"])
        found = (prediction, self._prediction_errors(X)[1]) if return_std else (prediction,)
        given = tuple(part if isinstance(X, torch.Tensor) else part.cpu().numpy() for part in found)
        return given if return_std else given[0]

    @available_if(_can_predict)
    def prediction_interval(
        self, X: Any, level: float = 0.95, kind: str = "mean", *, simultaneous: bool = False, sigma: Any = None
    ) -> PredictionInterval:
        """Return predictions with intervals of the mean, or of a new observation.

        Parameters
        ----------
        X : array_like or Tensor, shape (n_samples, n_features)
        level : float
            Between 0 and 1.
        kind : {"mean", "observation"}
            What the interval is of: the curve, or a new measurement with its noise.
        simultaneous : bool
            The band of the mean holds for all x at once (Scheffé), and is wider.
        sigma : float or array_like, shape (n_samples,) or that of y, optional
            With kind="observation": standard deviations of the new observations, in the meaning of those given to fit.
            Default: that of the fit, if it was the same for every row.

        Returns
        -------
        PredictionInterval
            (prediction, lower, upper), each in the shape of y at fit.

        Raises
        ------
        ValueError
            For other kinds and levels; where the noise of an observation is not known.

        Examples
        --------
        >>> import numpy as np
        >>> from lmfit_gpu import LMRegressor
        >>> x = np.arange(6.0)
        >>> y = np.array([1.1, 2.9, 5.2, 6.8, 9.1, 10.9])
        >>> est = LMRegressor(lambda x, a, b: a + b * x, p0=[0, 1]).fit(x[:, None], y)
        >>> band = est.prediction_interval([[2.5]])
        >>> print(f"{band.lower[0]:.3f} {band.prediction[0]:.3f} {band.upper[0]:.3f}")
        5.811 6.000 6.189
        """
        check_is_fitted(self, "result_")
        if kind not in KINDS:
            raise ValueError(f"kind: got {kind!r}; 'mean' or 'observation' is expected")
        if simultaneous and kind != "mean":
            raise ValueError("simultaneous: a band for all x at once is one of the mean; leave it out, or kind='mean'")
        if sigma is not None and kind != "observation":
            raise ValueError("sigma: the noise of new observations goes with kind='observation'")
        t_quantile(level, 1.0)  # checks the level before any work
        X = check_features(self, X, reset=False)
        result, errors = self._prediction_errors(X)
        prediction = predicted(self._setup, self.theta_, X, self.result_.used["chunk_rows"])
        if kind == "observation":
            noise = torch.from_numpy(noise_of(result, sigma, tuple(prediction.shape))).to(prediction)
            errors = torch.hypot(errors, noise.expand(prediction.shape))
        half = quantile(result, level, simultaneous) * errors
        found = PredictionInterval(prediction, prediction - half, prediction + half)
        return found if isinstance(X, torch.Tensor) else PredictionInterval(*(part.cpu().numpy() for part in found))

    def _prediction_errors(self, X: Any) -> tuple[Result, torch.Tensor]:
        """Return the result with the degrees of freedom, and standard errors of the mean at rows of X."""
        if self.result_.factor is not None:
            return self.result_, standard_errors(self._setup, self.result_, X, self)
        if self._space is None:
            self._space = function_space(solution_of(self))
        return self._space.result, self._space.standard_errors(self, X)

    @available_if(_can_predict)
    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the coefficient of determination R² of the prediction.

        Parameters
        ----------
        X : array_like or Tensor, shape (n_samples, n_features)
        y : array_like or Tensor, shape (n_samples,) or (n_samples, n_outputs)
        sample_weight : array_like, shape (n_samples,), optional
        """
        X, y = (part.cpu().numpy() if isinstance(part, torch.Tensor) else part for part in (X, y))
        return super().score(X, y, sample_weight)

    @property
    def params_(self) -> dict[str, float]:
        """Fitted parameters by name."""
        check_is_fitted(self, "result_")
        return dict(zip(self.result_.names, self.theta_.tolist(), strict=True))

    @contextmanager
    def _features_of_last_fit(self) -> Iterator[None]:
        """Leave the features that predict knows as they were, if a fit fails before there is anything to keep."""
        last = getattr(self, "result_", None)
        features = {name: self.__dict__[name] for name in OF_FEATURES if name in self.__dict__}
        try:
            yield
        except BaseException:
            if last is not None and self.result_ is last:
                for name in OF_FEATURES:
                    self.__dict__.pop(name, None)
                self.__dict__.update(features)
            raise

    def _keep(self, setup: Setup, result: Result, data: Data | None = None) -> None:
        """Set all fitted attributes: the only place that does."""
        self._data = data  # references, for profiles and pictures; not in a pickle or a file
        self._space = None
        self.result_ = result
        self.theta_ = result.theta
        self.covariance_ = result.covariance
        self.stderr_ = result.stderr
        self.rank_ = result.rank
        self.n_iter_ = result.n_iter
        self.solver_, self.backend_ = result.used["solver"], result.used["backend"]
        self.devices_ = setup.devices
        if isinstance(setup.predictor, ModuleModel):
            setup.predictor.load(torch.from_numpy(self.theta_).to(setup.theta))
            self.module_ = setup.predictor.module
        no_rows = replace(setup.rows, X=setup.rows.X[:0].clone(), y=None, weights=None)
        self._setup = replace(setup, rows=no_rows)

    def _warn(self, result: Result) -> None:
        if not result.success and result.status not in ENDS_OF_TRAINING:
            warnings.warn(f"the fit has not converged: {result.message}", ConvergenceWarning, stacklevel=4)
        if has_network(self):  # nobody asks for standard errors of its weights
            return
        missing = not_estimated(result)
        if missing:
            warnings.warn(missing, CovarianceWarning, stacklevel=4)
