"""The scikit-learn estimator: what a user gives becomes a problem, the engine fits it, attributes hold the answer."""

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from lmfit_gpu.attempt import attempt
from lmfit_gpu.backends import get_backend
from lmfit_gpu.damping import damping_policy
from lmfit_gpu.exceptions import CovarianceWarning
from lmfit_gpu.jacobian import JACOBIANS
from lmfit_gpu.levenberg_marquardt import LevenbergMarquardt
from lmfit_gpu.linear import choose
from lmfit_gpu.models import ModuleModel
from lmfit_gpu.preparation import Setup, is_module, prepare
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.result import Result, scaled_covariance
from lmfit_gpu.rows import as_tensor, chunk_slices
from lmfit_gpu.termination import Tolerances

__all__ = ["LMRegressor"]

X_FORMATS = ("auto", "columns", "1d")
NAMES_SHOWN = 6


def _can_predict(estimator: "LMRegressor") -> bool:
    if estimator.model is None and estimator.predict_fn is None:
        raise AttributeError("predict and score of a residual callable need predict_fn(theta, X)")
    return True


class LMRegressor(RegressorMixin, BaseEstimator):
    r"""Nonlinear least-squares regression by the Levenberg-Marquardt method.

    Minimises :math:`\tfrac12\sum_i r_i(\theta)^2` with r = prediction − target, by a trust region with geodesic
    acceleration.

    Parameters
    ----------
    model : callable, torch.nn.Module, or module factory
        A function ``f(x, a, b, ...)`` or ``f(X, theta)`` written in numpy or in torch (found out by trying; torch
        is differentiated exactly); a module instance (copied, never changed); or a factory: a subclass of
        ``torch.nn.Module`` or a ``functools.partial`` of one, called with ``n_features_in_`` and ``n_outputs``
        where its signature has them.
    residual : callable, optional
        With a model: ``residual(prediction, target)``. Alone: ``residual(theta, X, y)`` → vector of any length.
    predict_fn : callable, optional
        ``predict_fn(theta, X)`` for a residual callable without a model.
    p0 : sequence, dict, or callable (x, y) -> sequence or dict, optional
        Start values. Default: a module's own parameters; 1 for each parameter of a function, with a warning.
    x_format : {"auto", "columns", "1d"}
        What a function gets: with "auto" 1-D ``x`` for one column, else (n, k); always (n, k); always 1-D.
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
        Most trials.
    random_state : int, RandomState or None
        Seeds a module factory.
    callback : callable, optional
        ``callback(record)`` after every trial; a true return value stops the fit.

    Attributes
    ----------
    params_ : dict of str to float
    theta_ : ndarray, shape (n_params,)
    module_ : torch.nn.Module
        The fitted copy of a module, in evaluation mode.
    covariance_ : ndarray, shape (n_params, n_params)
        s²(JᵀJ)⁻¹, s² = Σr²/dof; inf on the diagonal for a parameter the data do not determine. None (and standard
        errors NaN) with the solvers dual and cg beyond 1,000 parameters.
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

    def __init__(  # noqa: PLR0913
        self,
        model: Any = None,
        *,
        residual: Callable[..., Any] | None = None,
        predict_fn: Callable[..., Any] | None = None,
        p0: Any = None,
        x_format: str = "auto",
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
        random_state: Any = None,
        callback: Callable[..., Any] | None = None,
    ) -> None:
        self.model = model
        self.residual = residual
        self.predict_fn = predict_fn
        self.p0 = p0
        self.x_format = x_format
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
        self.random_state = random_state
        self.callback = callback

    def fit(self, X: Any, y: Any = None) -> "LMRegressor":
        """Fit the parameters to data.

        Parameters
        ----------
        X : array_like or Tensor, shape (n_samples, n_features)
            Modules take more axes too.
        y : array_like or Tensor, shape (n_samples,) or (n_samples, n_outputs)
            None only for a residual callable without a model.

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
        self._check_options()
        X, y = self._check_data(X, y)
        tiny = attempt(self, X, y)
        result = None if tiny is None else self._guarded(tiny.setup, tiny.minimize)
        if tiny is not None and result is not None:
            self._keep(tiny.setup, result)
            return self
        engine = LevenbergMarquardt(
            jac=self.jac,
            solver=self.solver,
            backend=self.backend,
            damping=damping_policy(self.damping),
            tolerances=(self.ftol, self.xtol, self.gtol),
            max_iter=self.max_iter,
        )
        setup = prepare(self, X, y)
        theta = setup.theta
        problem = LeastSquaresProblem(setup.model, setup.rows, theta, devices=setup.devices, chunk_rows=self.chunk_rows)
        if problem.n_residuals == 1 and problem.n_params > 1 and setup.model.is_residual:
            raise ValueError(
                f"residual: returned 1 value for {problem.n_params} parameters; a vector of residuals is expected, "
                "not their sum or mean (squares are taken here)"
            )
        result = self._guarded(setup, functools.partial(engine.minimize, problem, theta, callback=self.callback))
        self._keep(setup, result)
        self._warn(result)
        return self

    @available_if(_can_predict)
    def predict(self, X: Any) -> Any:
        """Predict targets.

        Parameters
        ----------
        X : array_like or Tensor, shape (n_samples, n_features)

        Returns
        -------
        ndarray or Tensor, float64, in the shape of y at fit: (n,), (n, 1) or (n, n_outputs)
            A tensor for a tensor X.
        """
        check_is_fitted(self, "result_")
        X = self._check_features(X, reset=False)
        rows = replace(self._setup.rows, X=as_tensor(X), y=None)
        theta = torch.from_numpy(self.theta_).to(self._setup.theta)
        chunk: Any = self.result_.used["chunk_rows"]
        predictor: Any = self._setup.predictor
        whole = chunk is None or self._setup.predicts_whole
        with torch.no_grad():
            parts = [
                _shaped(predictor(theta, x, None), len(x), self._setup.y_shape)
                for part in chunk_slices(rows.n_samples, max(rows.n_samples, 1) if whole else chunk)
                for x, _ in [rows.read(part, theta.device, theta.dtype)]
            ]
        prediction = torch.cat(parts)
        return prediction if isinstance(X, torch.Tensor) else prediction.cpu().numpy()

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

    def report(self) -> str:
        """Return the full report of the fit as text."""
        check_is_fitted(self, "result_")
        return self.result_.report()

    def _check_options(self) -> None:
        if self.model is None and self.residual is None:
            raise ValueError("model: got None; give a model, or residual(theta, X, y)")
        if self.model is not None and not callable(self.model):
            raise TypeError(f"model: got {self.model!r}; a callable, a torch module or a module factory is expected")
        if self.residual is not None and not callable(self.residual):
            raise TypeError(f"residual: got {self.residual!r}; a callable is expected")
        if self.predict_fn is not None and self.model is not None:
            raise ValueError("predict_fn: goes with a residual callable alone; a model predicts by itself")
        if self.x_format not in X_FORMATS:
            raise ValueError(f"x_format: got {self.x_format!r}; allowed are {X_FORMATS}")
        if not callable(self.jac) and not (isinstance(self.jac, str) and self.jac in JACOBIANS):
            raise ValueError(f"jac: got {self.jac!r}; allowed are {JACOBIANS} or a callable")
        if self.callback is not None and not callable(self.callback):
            raise TypeError(f"callback: got {self.callback!r}; a callable is expected")
        for name in ("solver", "backend"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name}: got {getattr(self, name)!r}; a name is expected")
        for name, low in (("max_iter", 0), ("chunk_rows", 1)):
            value = getattr(self, name)
            automatic = name == "chunk_rows" and isinstance(value, str) and value == "auto"
            whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= low
            if not (whole or automatic):
                raise ValueError(f"{name}: got {value!r}; a whole number >= {low} is expected")
        choose(self.solver, 1, 1)
        get_backend(self.backend, torch.device("cpu"))
        Tolerances.resolve(self.ftol, self.xtol, self.gtol, torch.float64)

    def _check_data(self, X: Any, y: Any) -> tuple[Any, Any]:
        X = self._check_features(X, reset=True)
        if y is None:
            if self.model is not None:
                raise ValueError("y: got None; a model is fitted to targets (requires y to be passed)")
            return X, None
        if not isinstance(y, torch.Tensor):
            y = check_array(y, ensure_2d=False, dtype="numeric", input_name="y", estimator=self)
        elif y.is_complex():
            raise ValueError("Complex data not supported: y is a complex tensor")
        elif not bool(torch.isfinite(y).all()):
            raise ValueError("Input y contains NaN or infinity.")
        if y.ndim not in (1, 2):
            raise ValueError(f"y: got shape {tuple(y.shape)}; (n_samples,) or (n_samples, n_outputs) is expected")
        if len(y) != len(X):
            raise ValueError(f"X and y: found input variables with inconsistent numbers of samples: {[len(X), len(y)]}")
        return X, y

    def _check_features(self, X: Any, reset: bool) -> Any:
        if np.ndim(X) == 1 or (isinstance(X, torch.Tensor) and X.ndim == 1):
            raise ValueError(
                f"X: expected 2D array, got 1D array of shape {tuple(np.shape(X))}. Reshape your data: "
                "x[:, None] makes one column; curve_fit takes 1-D x."
            )
        if not isinstance(X, torch.Tensor):
            return validate_data(self, X, reset=reset, dtype="numeric", allow_nd=is_module(self.model))
        if X.ndim < 2:
            raise ValueError(f"X: got shape {tuple(X.shape)}; (n_samples, n_features) is expected")
        if X.is_complex():
            raise ValueError("Complex data not supported: X is a complex tensor")
        if len(X) == 0:
            raise ValueError("X: got 0 samples; at least 1 is expected")
        if X.is_floating_point() and not bool(torch.isfinite(X).all()):
            raise ValueError("Input X contains NaN or infinity.")
        if reset:
            self.n_features_in_ = X.shape[1]
        elif X.shape[1] != self.n_features_in_:
            raise ValueError(
                f"X has {X.shape[1]} features, but {type(self).__name__} is expecting "
                f"{self.n_features_in_} features as input."
            )
        return X

    def _guarded(self, setup: Setup, minimize: Callable[[], Any]) -> Any:
        """Return what `minimize` returns; the best point is kept when it is interrupted."""
        try:
            return minimize()
        except BaseException as interrupt:
            if hasattr(interrupt, "result"):  # Ctrl-C, or an error of the model
                self._keep(setup, interrupt.result)
            raise

    def _keep(self, setup: Setup, result: Result) -> None:
        """Set all fitted attributes: the only place that does."""
        self.result_ = result
        self.theta_ = result.theta
        self.covariance_ = scaled_covariance(result.covariance, result.cost, result.dof)
        self.stderr_ = result.stderr
        self.rank_ = result.rank
        self.n_iter_ = result.n_iter
        self.solver_, self.backend_ = result.used["solver"], result.used["backend"]
        self.devices_ = setup.devices
        if isinstance(setup.predictor, ModuleModel):
            setup.predictor.load(torch.from_numpy(self.theta_).to(setup.theta))
            self.module_ = setup.predictor.module
        no_rows = replace(setup.rows, X=setup.rows.X[:0].clone(), y=None)  # an estimator does not keep its data
        self._setup = replace(setup, rows=no_rows)

    def _warn(self, result: Result) -> None:
        if not result.success:
            warnings.warn(f"the fit has not converged: {result.message}", ConvergenceWarning, stacklevel=3)
        if result.covariance is None:
            message = (
                f"no covariance: solver={result.used['solver']!r} keeps no dense matrix of {len(self.theta_)} "
                "parameters; standard errors are NaN"
            )
            warnings.warn(message, CovarianceWarning, stacklevel=3)
        elif result.dof <= 0:
            message = (
                f"no degrees of freedom: {result.n_residuals} residuals for {len(self.theta_)} parameters (rank "
                f"{result.rank}); standard errors are infinite. Give more data, or fewer parameters"
            )
            warnings.warn(message, CovarianceWarning, stacklevel=3)
        elif result.undetermined.any():
            names = [name for name, lost in zip(result.names, result.undetermined, strict=True) if lost]
            more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
            message = (
                f"the data do not determine {', '.join(names[:NAMES_SHOWN])}{more}: the Jacobian has rank "
                f"{result.rank} for {len(self.theta_)} parameters; their standard errors are infinite"
            )
            warnings.warn(message, CovarianceWarning, stacklevel=3)


def _shaped(values: torch.Tensor, n_rows: int, y_shape: tuple[int, ...]) -> torch.Tensor:
    """Return predictions of n_rows rows in float64 and in y's shape."""
    shape = (n_rows, *y_shape)
    values = values.double()
    if values.ndim == 0:
        return values.expand(shape)
    if y_shape == () and values.numel() != n_rows:  # fitted by residuals alone: the model's own shape
        return values
    if tuple(values.shape) not in (shape, (n_rows,), (n_rows, 1)):
        raise ValueError(f"model: returned shape {tuple(values.shape)} for {n_rows} rows; {shape} is expected")
    return values.reshape(shape)
