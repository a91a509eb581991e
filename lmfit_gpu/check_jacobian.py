r"""Hold derivatives against differences of the model, entry by entry.

Expected values, and what they are uncertain by, come from :mod:`lmfit_gpu.extrapolation`. An entry disagrees when it is
off by more than

.. math:: |J_{ij} - D_{ij}| > \text{rtol}\,\max(|J_{ij}|, |D_{ij}|) + \text{error}_{ij} +
          10^3 \epsilon \max_i |J_{ij}|,

so that what rounding can explain is never called a disagreement. Where the error is as large as the derivatives
themselves, in most of the rows that tell, differences cannot decide, and the check says so.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lmfit_gpu.autodiff import Reverse, Route, choose_route
from lmfit_gpu.exceptions import NonFiniteError
from lmfit_gpu.extrapolation import Ladder
from lmfit_gpu.models import CALL_ERRORS, NumpyFunction, TorchFunction
from lmfit_gpu.preparation import Data, gives_module, prepare
from lmfit_gpu.problem import Block, LeastSquaresProblem, Problem
from lmfit_gpu.user_jacobian import UserJacobian

__all__ = ["JacobianCheck", "check_jacobian"]

GIVEN_ROUNDING = 1e3  # epsilons of the largest entry of a column: the rounding of the given derivative
DECIDED = 0.1  # error relative to the entry up to which differences can tell it
TELLING = 1e-3  # entries below this share of the largest of their column do not tell
BLOCK_ROWS = 4096


@dataclass(frozen=True)
class JacobianCheck:
    """Outcome of :func:`check_jacobian`: the entry that is worst, measured by its tolerance.

    Parameters
    ----------
    ok : bool
        No entry disagrees, and differences can decide for every parameter.
    parameter : str
    row : int
        Index of the residual divided by residuals per row: a row of X for a model with one output or more.
    given, expected : float
        ∂value/∂parameter as given, and by differences.
    error : float
        What the expected value is uncertain by.
    tolerance : float
        rtol times the entry, the error, and the rounding of the given value.
    undecided : tuple of str
        Parameters whose derivatives drown in the rounding of the model.
    n_wrong : int
        Entries that disagree.
    """

    ok: bool
    parameter: str
    row: int
    given: float
    expected: float
    error: float
    tolerance: float
    undecided: tuple[str, ...] = ()
    n_wrong: int = 0

    def __str__(self) -> str:
        off = abs(self.given - self.expected)
        size = abs(self.expected)
        share = f"off by {100 * off / size:.3g} %" if size > 0 and math.isfinite(off) else f"off by {off:.3g}"
        entry = (
            f"derivative by {self.parameter!r} in row {self.row}: {self.given:.6g} given, "
            f"{self.expected:.6g} by differences ({share}"
        )
        if self.n_wrong:
            more = f"; {self.n_wrong} entries disagree" if self.n_wrong > 1 else ""
            return f"{entry}, {self.tolerance:.2g} is allowed{more})"
        if self.undecided:
            names = ", ".join(repr(name) for name in self.undecided)
            return (
                f"differences cannot decide for {names}: the values of the model are rounded, or noisy, and change by "
                "less than that; is it computed in integers, in float32, or from a table?"
            )
        return f"the derivatives agree; worst is the {entry}, {self.tolerance:.2g} is allowed)"


def check_jacobian(
    model: Any,
    X: Any,
    theta: Any = None,
    *,
    jac: Callable[..., Any] | None = None,
    y: Any = None,
    rtol: float = 1e-5,
) -> JacobianCheck:
    """Compare derivatives of a model with differences of its values, on all rows.

    Parameters
    ----------
    model : callable or torch.nn.Module
        ``f(x, a, b, ...)`` or ``f(X, theta)`` in torch, whose autograd is checked, or in numpy with `jac`; a module;
        with `y`, a residual callable ``residual(theta, X, y)``.
    X : array_like or Tensor, shape (n_samples, n_features) or (n_samples,)
    theta : sequence, or dict of name to value
        Where. None for a module: its own parameters.
    jac : callable, optional
        The derivative to check: called like the model, returns (n_values, n_params).
    y : array_like or Tensor, shape (n_samples,) or (n_samples, n_outputs), optional
        Only with a residual callable.
    rtol : float
        Disagreement up to this share of an entry is allowed.

    Returns
    -------
    JacobianCheck
        ``ok``, and the worst entry by parameter and row; ``str()`` says it in a sentence.

    Raises
    ------
    ValueError, TypeError
        For bad arguments, a model in numpy without `jac`, or a `jac` of the wrong shape.
    NonFiniteError
        If the model is not finite at theta; the message names rows.

    Notes
    -----
    In float64. Costs 24 evaluations of the model a parameter.

    Examples
    --------
    >>> import numpy as np
    >>> from lmfit_gpu import check_jacobian
    >>> x = np.linspace(0, 4, 20)
    >>> def decay(x, a, b):
    ...     return a * np.exp(-b * x)
    >>> def wrong(x, a, b):  # the second column lacks its x
    ...     return np.stack([np.exp(-b * x), -a * np.exp(-b * x)], axis=1)
    >>> check = check_jacobian(decay, x, [2.0, 0.5], jac=wrong)
    >>> check.ok, check.parameter, check.row
    (False, 'b', 0)
    >>> print(check)
    derivative by 'b' in row 0: -2 given, 0 by differences (off by 2, ...)
    """
    if not callable(model):
        raise TypeError(f"model: got {model!r}; a callable or a torch module is expected")
    if jac is not None and not callable(jac):
        raise TypeError(f"jac: got {jac!r}; a callable is expected")
    if not (isinstance(rtol, (int, float)) and 0 <= rtol < math.inf):
        raise ValueError(f"rtol: got {rtol!r}; a number >= 0 is expected")
    problem, theta = _problem(model, X, theta, y)
    given = _given(problem, theta, jac)
    with torch.no_grad():
        values = torch.cat([part.cpu() for part in problem.map_blocks(lambda block: problem.values(theta, block))])
        broken = (~torch.isfinite(values)).nonzero()[:, 0]
        if len(broken):
            rows = sorted({int(i) // max(problem.per_row, 1) for i in broken[:1000]})[:5]
            raise NonFiniteError(f"model: its values at theta are not finite in {len(broken)} places, rows {rows}")
        return _worst(problem, given, Ladder.at(problem, theta), rtol)


def _problem(model: Any, X: Any, theta: Any, y: Any) -> tuple[LeastSquaresProblem, torch.Tensor]:
    """Return the problem and the point, in float64."""
    if theta is None and not gives_module(model):
        raise ValueError("theta: got None; only a module has parameters of its own")
    if callable(theta) or isinstance(theta, str):
        raise TypeError(f"theta: got {theta!r}; a sequence or a dict of numbers is expected")
    if y is not None and gives_module(model):
        raise ValueError("y: goes with a residual callable; a module is checked by its predictions")
    theta = theta.detach().cpu().tolist() if isinstance(theta, torch.Tensor) else theta
    X, y = _data(X, "X"), None if y is None else _data(y, "y")
    if y is not None and len(y) != len(X):
        raise ValueError(f"y: got {len(y)} rows for {len(X)} rows of X")
    options = SimpleNamespace(
        model=model if y is None else None,
        residual=None if y is None else model,
        predict_fn=None,
        p0=theta,
        bounds=None,
        fixed=(),
        tied=None,
        x_format="auto",
        devices="auto",
        dtype=torch.float64,
        random_state=0,
        alpha=0.0,
        hidden_layer_sizes=None,
        warm_start=False,
    )
    try:
        setup = prepare(options, Data(X[:, None] if X.ndim == 1 else X, y))
    except (ValueError, TypeError) as error:
        raise type(error)(str(error).replace("p0:", "theta:")) from error
    problem = LeastSquaresProblem(
        setup.model, setup.rows, setup.theta, devices=setup.devices[:1], chunk_rows=BLOCK_ROWS
    )
    return problem, setup.theta


def _data(data: Any, name: str) -> Any:
    array = data if isinstance(data, torch.Tensor) else np.asarray(data)
    numeric = isinstance(array, torch.Tensor) or np.issubdtype(array.dtype, np.number)
    if not numeric or array.ndim == 0 or len(array) == 0:
        raise ValueError(f"{name}: got {array!r}; an array of numbers with at least one row is expected")
    return array


def _given(problem: LeastSquaresProblem, theta: torch.Tensor, jac: Callable[..., Any] | None) -> torch.Tensor:
    """Return the derivatives to check, shape (n_params, n_values), on the CPU."""
    if jac is not None:
        return _columns(problem, theta, _user_jacobian(problem, theta, jac))
    model: Any = problem.replicas[0]
    if isinstance(model, NumpyFunction):
        model = TorchFunction(model.function, model.names, model.order)  # of both worlds, but a parameter is lost
        if not _works_in_torch(model, problem, theta):
            raise ValueError("jac: got None; a model in numpy has no derivatives of its own, give those to check")
        problem.replicas = [model]
    try:
        return _columns(problem, theta, choose_route(problem, theta))
    except ValueError:  # no route, or a gradient that is not whole: which entries?
        return _columns(problem, theta, _RowByRow())


def _works_in_torch(model: TorchFunction, problem: LeastSquaresProblem, theta: torch.Tensor) -> bool:
    probe = problem.probe()
    try:
        values = model(theta.clone().requires_grad_(), probe.x, probe.y)
    except CALL_ERRORS:
        return False
    return isinstance(values, torch.Tensor) and values.requires_grad


def _user_jacobian(problem: LeastSquaresProblem, theta: torch.Tensor, jac: Callable[..., Any]) -> UserJacobian:
    """Return the user's function as a route, unchecked: written in numpy, or in torch where that fails."""
    order = getattr(problem.replicas[0], "order", None)
    if order is None:
        raise ValueError("jac: a Jacobian function needs a model function; this model is a module")
    probe = problem.probe()
    try:
        chosen: TorchFunction | NumpyFunction = NumpyFunction(jac, (), order)
        if probe.x.device.type != "cpu":
            raise TypeError("numpy does not read this device")
        chosen(theta, probe.x, probe.y)
    except CALL_ERRORS:
        chosen = TorchFunction(jac, (), order)
    return UserJacobian(chosen)


class _RowByRow:
    """One backward pass a value, as the values are: also zeros where nothing is connected to theta."""

    name = "reverse"

    def __call__(self, problem: Problem, theta: torch.Tensor, block: Block, columns: torch.Tensor) -> torch.Tensor:
        """Write ∂values/∂theta into `columns`, shape (n, c), and return the values, shape (c,)."""
        with torch.enable_grad():
            values = problem.values(theta.clone().requires_grad_(), block)
        if values.requires_grad:
            return Reverse()(problem, theta, block, columns)
        columns.zero_()
        return values

    def passes(self, n_params: int) -> int:
        """Return the number of forward evaluations."""
        return 1


def _columns(problem: LeastSquaresProblem, theta: torch.Tensor, route: Route | UserJacobian) -> torch.Tensor:
    def of_block(block: Block) -> torch.Tensor:
        with torch.no_grad():
            count = problem.values(theta, block).numel()
        columns = theta.new_empty(theta.numel(), count)
        route(problem, theta, block, columns)
        return columns.cpu()

    return torch.cat(list(problem.map_blocks(of_block)), dim=1)


def _worst(problem: LeastSquaresProblem, given: torch.Tensor, ladder: Ladder, rtol: float) -> JacobianCheck:
    """Return the check, with the entry whose difference is largest relative to its tolerance."""
    epsilon = torch.finfo(given.dtype).eps
    worst: tuple[float, JacobianCheck] | None = None
    undecided, n_wrong = [], 0
    for j in range(len(given)):
        expected, error = ladder.column(j)
        size = torch.maximum(torch.nan_to_num(given[j].abs(), nan=0.0, posinf=0.0), expected.abs().nan_to_num(0.0))
        largest = float(size.max())
        tolerance = rtol * size + error + GIVEN_ROUNDING * epsilon * largest
        known = torch.isfinite(error)
        if not bool(known.any()):
            undecided.append(problem.names[j])
        off = torch.where(known, (given[j] - expected).abs(), torch.zeros_like(error)).nan_to_num(math.inf)
        telling = size > TELLING * largest
        lost = (error > DECIDED * torch.maximum(size, torch.as_tensor(TELLING * largest))) & (error > 0)
        if bool(telling.any()) and 2 * int((lost & telling).sum()) > int(telling.sum()):
            undecided.append(problem.names[j])
        ratio = torch.where(off > 0, off / tolerance.clamp(min=torch.finfo(torch.float64).tiny), off)
        i = int(ratio.argmax())
        n_wrong += int((off > tolerance).sum())
        if worst is None or float(ratio[i]) > worst[0]:
            numbers = [float(part[i]) for part in (given[j], expected, error, tolerance)]
            row = i // max(problem.per_row, 1)
            worst = float(ratio[i]), JacobianCheck(True, problem.names[j], row, *numbers)  # type: ignore[arg-type]
    assert worst is not None  # a model has parameters
    return replace(worst[1], ok=n_wrong == 0 and not undecided, undecided=tuple(undecided), n_wrong=n_wrong)
