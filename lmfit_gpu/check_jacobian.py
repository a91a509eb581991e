r"""Hold derivatives against differences of the model, entry by entry.

Every derivative J_ij is compared with central differences over a ladder of steps h, each four times the last, with
Richardson's extrapolation over neighbouring steps (Ridders, Adv. Eng. Software 4 (1982) 75-76,
doi:10.1016/S0141-1195(82)80057-0):

.. math:: D_0(h) = \frac{f(\theta + h e_j) - f(\theta - h e_j)}{2h}, \qquad
          D_k(4h) = \frac{16^k D_{k-1}(h) - D_{k-1}(4h)}{16^k - 1}

Each value comes with an error: its distance from the two it is made of, and the noise of f over h. The noise of a row
is the rounding of its value, or more where the model itself is noisier: third differences over tiny steps show that
(they vanish for a smooth model), and so does a row that stands still over small steps and jumps over large ones
(a rounded model). The value with the least error is the expected one, and the error is part of the tolerance: what
rounding can explain is never called a disagreement, and where the error is as large as the derivative the check says
that differences cannot decide.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import max_pool1d

from lmfit_gpu.autodiff import Reverse, Route, choose_route
from lmfit_gpu.differences import start_differences
from lmfit_gpu.exceptions import NonFiniteError
from lmfit_gpu.models import CALL_ERRORS, NumpyFunction, TorchFunction
from lmfit_gpu.preparation import is_module, prepare
from lmfit_gpu.problem import Block, LeastSquaresProblem
from lmfit_gpu.user_jacobian import UserJacobian

__all__ = ["JacobianCheck", "check_jacobian"]

GROWTH = 4.0  # of the steps
FINEST = 4**-3  # first step, relative to that of 3-point differences
N_STEPS = 10  # the last is 1e-6 to 1e-1 of the parameter: truncation below rounding somewhere in between
NOISE_STEPS = torch.tensor([-3.0, -1.0, 1.0, 3.0], dtype=torch.float64)  # the third difference of a line vanishes
THIRD = torch.tensor([-1.0, 3.0, -3.0, 1.0], dtype=torch.float64)
PLAIN_CHANGE = 1e4  # times the rounding of a value
NEIGHBOURS = 9  # rows whose third differences count together: a single one may be small by chance
NOISE_OF_THIRD = math.sqrt(20.0)  # the standard deviation of 1-3-3-1 times independent noise
SAFETY = 10.0  # on the noise: the largest of many rows, and of values that are not those at theta
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
        return _worst(problem, given, _Ladder.at(problem, theta), rtol)


def _problem(model: Any, X: Any, theta: Any, y: Any) -> tuple[LeastSquaresProblem, torch.Tensor]:
    """Return the problem and the point, in float64."""
    if theta is None and not is_module(model):
        raise ValueError("theta: got None; only a module has parameters of its own")
    if callable(theta) or isinstance(theta, str):
        raise TypeError(f"theta: got {theta!r}; a sequence or a dict of numbers is expected")
    if y is not None and is_module(model):
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
        x_format="auto",
        devices="auto",
        dtype=torch.float64,
        random_state=0,
    )
    try:
        setup = prepare(options, X[:, None] if X.ndim == 1 else X, y)
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

    def __call__(
        self, problem: LeastSquaresProblem, theta: torch.Tensor, block: Block, columns: torch.Tensor
    ) -> torch.Tensor:
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


@dataclass(frozen=True)
class _Ladder:
    """Differences over a ladder of steps.

    Parameters
    ----------
    problem : LeastSquaresProblem
    theta : Tensor, shape (n_params,)
    steps : Tensor, shape (n_params,)
        The middle of each ladder: the step of 3-point differences.
    """

    problem: LeastSquaresProblem
    theta: torch.Tensor
    steps: torch.Tensor

    @classmethod
    def at(cls, problem: LeastSquaresProblem, theta: torch.Tensor) -> "_Ladder":
        """Find the steps at a point."""
        return cls(problem, theta, start_differences(problem, theta, "3-point").steps)

    def column(self, j: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ∂values/∂theta_j and the error of each, shape (n_values,), on the CPU."""
        parts = list(self.problem.map_blocks(lambda block: self._of_block(block, j)))
        derivative, error = (torch.cat([part[k].cpu() for part in parts]) for k in (0, 1))
        return derivative, error

    def _of_block(self, block: Block, j: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = self._moved(block, j, 0.0)
        hs = float(self.steps[j]) * FINEST * GROWTH ** torch.arange(N_STEPS, dtype=torch.float64)
        up = torch.stack([self._moved(block, j, float(h)) for h in hs])
        down = torch.stack([self._moved(block, j, -float(h)) for h in hs])
        taken = [self._taken(j, float(h)) - self._taken(j, -float(h)) for h in hs]  # after rounding
        width = torch.tensor(taken, dtype=torch.float64, device=values.device)[:, None]
        noise = self._noise(block, j, values, (up - values, values - down))
        noise = torch.where(torch.isfinite(noise), noise, 0.0)
        return _extrapolated((up - down) / width, SAFETY * noise / width)

    def _noise(
        self, block: Block, j: int, values: torch.Tensor, changes: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Return the noise of each value: its rounding, that of third differences, or the jumps of a rounded row."""
        epsilon = torch.finfo(values.dtype).eps
        rounding = epsilon * values.abs()
        tiny = float(self.steps[j]) * FINEST / GROWTH
        third = sum(float(c) * self._moved(block, j, float(k) * tiny) for c, k in zip(THIRD, NOISE_STEPS, strict=True))
        third = torch.nan_to_num(torch.as_tensor(third).abs(), nan=0.0, posinf=0.0)
        near = max_pool1d(third[None, None], NEIGHBOURS, stride=1, padding=NEIGHBOURS // 2)[0, 0]
        noise = torch.maximum(rounding, near / NOISE_OF_THIRD)
        # A change by h^k, k up to 7, is visible at the smaller step of two as well: if nothing moves there, it jumps.
        jumps = torch.zeros_like(noise)
        for change in changes:
            size = torch.nan_to_num(change.abs(), nan=0.0, posinf=0.0)
            visible = size[1:] > PLAIN_CHANGE * rounding
            still = (size[:-1] == 0) & visible
            jumps = torch.maximum(jumps, torch.where(still, size[1:], torch.zeros_like(size[1:])).amax(0))
        return torch.maximum(noise, jumps)

    def _taken(self, j: int, step: float) -> float:
        return float(self.theta[j] + step) - float(self.theta[j])

    def _moved(self, block: Block, j: int, step: float) -> torch.Tensor:
        moved = self.theta.clone()
        moved[j] += step
        try:
            return self.problem.values(moved, block).double()
        except CALL_ERRORS:  # outside the domain of the model
            return self.problem.values(self.theta, block).double() * torch.nan


def _extrapolated(first: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each column the best value of Richardson's table, and its error.

    Parameters
    ----------
    first : Tensor, shape (s, c)
        Central differences over steps that grow.
    noise : Tensor, shape (s, c)
        What noise in f does to each of them.
    """
    best = first[0].clone()
    least = torch.full_like(best, torch.inf)
    for s in range(1, len(first)):  # a difference by itself is as good as its distance from the next coarser one
        distance = (first[s] - first[s - 1]).abs()
        best, least = _better(first[s - 1], distance + noise[s - 1], best, least)
    table, noises = first, noise
    for k in range(1, 4):
        factor = GROWTH ** (2 * k)
        finer, coarser = table[:-1], table[1:]
        table = (factor * finer - coarser) / (factor - 1)
        noises = (factor * noises[:-1] + noises[1:]) / (factor - 1)
        for value, near, far, noisy in zip(table, finer, coarser, noises, strict=True):
            distance = torch.maximum((value - near).abs(), (value - far).abs() / factor)
            best, least = _better(value, distance + noisy, best, least)
    return best, least


def _better(
    value: torch.Tensor, error: torch.Tensor, best: torch.Tensor, least: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    better = error < least  # false for NaN
    return torch.where(better, value, best), torch.where(better, error, least)


def _worst(problem: LeastSquaresProblem, given: torch.Tensor, ladder: _Ladder, rtol: float) -> JacobianCheck:
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
