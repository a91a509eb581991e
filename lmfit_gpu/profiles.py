r"""Profile likelihood: intervals that know how curved a model is.

With one parameter held at a value and all others fitted, S(value) is the sum of squares that is left, Ŝ its least, and

.. math:: \zeta(\text{value}) = \mathrm{sign}(\text{value} - \hat\theta)\,\sqrt{(S - \hat S)/s^2}

is a straight line of slope 1/stderr for a linear model. The interval is where |ζ| ≤ t, the quantile of Student's t with
the degrees of freedom of s² (normal with absolute sigma): where ζ bends, it is wider on one side, or has no end (Bates
and Watts, Nonlinear Regression Analysis and Its Applications (1988), chapter 6, doi:10.1002/9780470316757).

A profile is followed from the estimate outwards on both sides, in steps of ζ of about a quarter of t, at most 0.5 to
t = 10; starts of the fits are extrapolated along the trace of the other parameters. The ends are fits where |ζ| is t to
1e-9 where the rounding of the cost allows. All sides of all parameters go step by step together
(:mod:`lmfit_gpu.held_fits`).

With a penalty the cost is that of the penalised fit: with a normal prior it is the posterior that is profiled. s² is
the same everywhere: ``covariance="robust"`` has no say.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lmfit_gpu.held_fits import HeldFits, Point, Request
from lmfit_gpu.result import Result, t_quantile
from lmfit_gpu.solution import Solution

__all__ = ["Profile", "ProfileLikelihood", "followed", "profile_likelihood", "profiled_names"]

STEPS_TO_END = 4, 20  # of zeta, to the threshold: at least, and at most
STEP = 0.5  # of zeta, between the two
MOST_STEPS = 60
MOST_HALVINGS = 8
GROWTH = 4.0
FAR = 1e9  # of the size of a parameter and its error: no end is looked for beyond
END = 1e-9  # of the threshold, where rounding allows
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5}  # of the cost of a fit, relative
ROOT_STEPS = 60
CLOSE = 1e-12  # of the size: values between which zeta jumps


@dataclass(frozen=True)
class Profile:
    """The profile of one parameter.

    Parameters
    ----------
    name : str
    estimate, stderr : float
    level : float
    values : ndarray, shape (k,)
        Of the parameter, ascending; the estimate among them.
    zeta : ndarray, shape (k,)
    cost : ndarray, shape (k,)
        Least cost at each value.
    theta : ndarray, shape (k, n_params)
        The trace: all parameters of each fit.
    converged : ndarray of bool, shape (k,)
    interval : tuple of float
        (lower, upper); a bound where that comes first, ±inf where there is no end.
    reached : tuple of bool
        Whether ζ reaches the level on each side.
    notes : tuple of str
    """

    name: str
    estimate: float
    stderr: float
    level: float
    values: np.ndarray = field(repr=False)
    zeta: np.ndarray = field(repr=False)
    cost: np.ndarray = field(repr=False)
    theta: np.ndarray = field(repr=False)
    converged: np.ndarray = field(repr=False)
    interval: tuple[float, float]
    reached: tuple[bool, bool]
    notes: tuple[str, ...] = ()

    def plot(self, ax: Any = None, **kwargs: Any) -> Any:
        """Draw ζ against the parameter (:class:`lmfit_gpu.plotting.ProfileDisplay`)."""
        from lmfit_gpu.plotting import ProfileDisplay

        return ProfileDisplay.from_profile(self, ax=ax, **kwargs)


@dataclass(frozen=True)
class ProfileLikelihood(Mapping[str, Profile]):
    """Profiles by name.

    Parameters
    ----------
    profiles : dict of str to Profile
    level : float
    """

    profiles: dict[str, Profile]
    level: float

    def __getitem__(self, name: str) -> Profile:
        return self.profiles[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.profiles)

    def __len__(self) -> int:
        return len(self.profiles)

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """The intervals by name."""
        return {name: profile.interval for name, profile in self.profiles.items()}

    def plot(self, ax: Any = None, **kwargs: Any) -> Any:
        """Draw all profiles (:class:`lmfit_gpu.plotting.ProfileDisplay`)."""
        from lmfit_gpu.plotting import ProfileDisplay

        return ProfileDisplay.from_profile(self, ax=ax, **kwargs)


def profiled_names(result: Result, names: Any) -> list[int]:
    """Return the indices of parameters that can be profiled: free ones, all of them for None.

    Raises
    ------
    ValueError
        For names that there are not, and for fixed and tied parameters.
    """
    every = list(result.names)
    free = [j for j in range(len(every)) if result.roles.get(j) not in ("fixed", "tied")]
    if names is None:
        return free
    found = []
    for name in [names] if isinstance(names, str) else list(names):
        if name not in every:
            raise ValueError(f"names: no parameter {name!r}; there are {', '.join(every[:8])}")
        j = every.index(name)
        if j not in free:
            raise ValueError(
                f"names: {name!r} is {result.roles[j]}; only fitted parameters have a profile"
                + ("; bootstrap has an interval for it" if result.roles[j] == "tied" else "")
            )
        found.append(j)
    if not found:
        raise ValueError("names: got none; at least one parameter is expected")
    return found


def check_profile(solution: Solution) -> None:
    """Refuse fits that have no profile likelihood.

    Raises
    ------
    ValueError
        Under a loss, and without an estimate of the noise.
    """
    result = solution.result
    if solution.problem.loss is not None:
        raise ValueError(
            "profile_likelihood: a robust loss is no likelihood, and its cost has no threshold; est.bootstrap() has "
            "intervals under a loss"
        )
    if not np.isfinite(result.s2):
        raise ValueError(
            f"profile_likelihood: no degree of freedom is left to estimate the noise ({result.n_residuals} residuals, "
            f"rank {result.rank})"
        )
    if result.s2 == 0 or result.status.name == "CONVERGED_RESIDUAL":
        raise ValueError("profile_likelihood: the fit is exact; residuals that are rounding say nothing of the noise")
    if not result.success:
        raise ValueError(f"profile_likelihood: the fit has not converged ({result.status.name}); there is no minimum")


def profile_likelihood(solution: Solution, names: Any, level: float, route: str = "auto") -> ProfileLikelihood:
    """Return the profiles of parameters.

    Parameters
    ----------
    solution : Solution
    names : sequence of str, str, or None
        None: all free parameters.
    level : float
    route : str
        See :class:`lmfit_gpu.held_fits.HeldFits`.

    Warns
    -----
    FitWarning
        If a lower cost is found than that of the fit.
    """
    dof = np.inf if solution.result.absolute_sigma else float(solution.result.dof)
    threshold = t_quantile(level, dof)
    check_profile(solution)
    indices = profiled_names(solution.result, names)
    fits = HeldFits(solution, route)
    profiles = followed(fits, indices, threshold, level)
    fits.warn_of_better(3)
    return ProfileLikelihood({profile.name: profile for profile in profiles}, level)


def followed(fits: HeldFits, indices: Sequence[int], threshold: float, level: float) -> list[Profile]:
    """Return profiles followed to |ζ| = `threshold` on both sides, all sides step by step together."""
    solution = fits.solution
    sides = [_Side(solution, j, direction, threshold) for j in indices for direction in (-1, 1)]
    waiting: list[tuple[_Side, Generator[Request, Point, None], Request]] = []
    for side in sides:
        walk = side.walk()
        request = next(walk, None)
        if request is not None:
            waiting.append((side, walk, request))
    while waiting:
        points = fits.fit([request for _, _, request in waiting])
        going = []
        for (side, walk, _), point in zip(waiting, points, strict=True):
            try:
                going.append((side, walk, walk.send(point)))
            except StopIteration:
                continue
        waiting = going
    pairs = zip(indices, sides[::2], sides[1::2], strict=True)
    return [_joined(solution.result, j, below, above, level) for j, below, above in pairs]


class _Side:
    """A profile on one side of the estimate.

    Parameters
    ----------
    solution : Solution
    index : int
    direction : {-1, 1}
    threshold : float
    """

    def __init__(self, solution: Solution, index: int, direction: int, threshold: float) -> None:
        result, constraints = solution.result, solution.setup.constraints
        self.result, self.index, self.direction, self.threshold = result, index, direction, threshold
        self.names = list(result.names)
        bound = np.inf * direction
        if constraints is not None:
            bound = float((constraints.lower if direction < 0 else constraints.upper)[index])
        self.bound = bound
        self.estimate, self.stderr = float(result.theta[index]), float(result.stderr[index])
        if result.sandwich is not None and result.factor is not None:  # a profile is classical
            self.stderr = float((result.factor[index] ** 2).sum() ** 0.5 * result.s2**0.5)
        if np.isnan(self.stderr):
            self.stderr = error_on_bound(solution, index)
        least, most = STEPS_TO_END
        self.wanted = max(min(threshold / least, STEP), threshold / most)  # gain of zeta by a step
        rounding = (
            ROUNDING[solution.problem.dtype] * 2 * abs(result.cost) / result.s2 / threshold
        )  # of zeta, at the end
        self.near = max(END * threshold, rounding)
        self.points: list[Point] = [Point(result.theta, result.cost, True)]
        self.zetas: list[float] = [0.0]
        self.end, self.reached, self.note = bound, False, ""

    def walk(self) -> Generator[Request, Point, None]:
        """Ask for points outwards, until the threshold is passed, a bound met, or the search given up."""
        if self.result.undetermined[self.index]:
            self.end, self.note = self.direction * np.inf, "not determined by the data: no end"
            return
        if self.estimate == self.bound:
            self.note = "the estimate is on its bound"
            return
        step = self._first_step()
        for _ in range(MOST_STEPS):
            value = self._value(-1) + self.direction * step
            at_bound = (value - self.bound) * self.direction >= 0
            value = self.bound if at_bound else value
            if not np.isfinite(value) or abs(value - self.estimate) > FAR * self._size():
                return self._give_up()
            point = yield Request((self.index,), self._start(value))
            halvings = 0
            while not (point.converged and np.isfinite(point.cost)):
                halvings += 1
                if halvings > MOST_HALVINGS:
                    self.end = self._value(-1)
                    self.note = f"the fit at {value:.6g} did not converge; the interval ends before it"
                    return None
                step /= 2
                value, at_bound = self._value(-1) + self.direction * step, False
                point = yield Request((self.index,), self._start(value))
            gained = self._zeta(point) - self.zetas[-1]
            self._keep(point)
            if self.zetas[-1] >= self.threshold:
                yield from self._root()
                return None
            if at_bound:
                self.end, self.note = self.bound, f"ends on its bound, at zeta {self.zetas[-1]:.3g}"
                return None
            step *= float(np.clip(self.wanted / gained if gained > 0 else GROWTH, 1 / GROWTH, GROWTH))
        return self._give_up()

    def _root(self) -> Generator[Request, Point, None]:
        """Find the end between the last two points, by fits: false position, by Illinois' rule."""
        (a, f), (b, g) = ((self._value(k), self.zetas[k] - self.threshold) for k in (-2, -1))
        weight_a, weight_b, last = 1.0, 1.0, 0  # of an end that stays twice: halved, or the other creeps
        self.reached = True
        for _ in range(ROOT_STEPS):
            self.end, gap = min((a, f), (b, g), key=lambda end: abs(end[1]))
            if abs(gap) <= self.near:
                return
            if abs(b - a) <= CLOSE * self._size():
                break
            low, high = weight_a * f, weight_b * g
            value = b - high * (b - a) / (high - low)
            point = yield Request((self.index,), self._start(value))
            if not (point.converged and np.isfinite(point.cost)):
                self.end = b - g * (b - a) / (g - f)
                self.note = f"the fit at {value:.6g} did not converge; the end is interpolated"
                return
            gap = self._zeta(point) - self.threshold
            self._keep(point)
            if gap > 0:
                b, g, weight_b, weight_a, last = value, gap, 1.0, weight_a / 2 if last > 0 else 1.0, 1
            else:
                a, f, weight_a, weight_b, last = value, gap, 1.0, weight_b / 2 if last < 0 else 1.0, -1
        self.note = (
            f"zeta goes from {f + self.threshold:.4g} to {g + self.threshold:.4g} between {a:.9g} and {b:.9g}: "
            "the fits there end in different minima, or are not precise enough"
        )

    def _give_up(self) -> None:
        self.end = self.direction * np.inf
        self.note = (
            f"no end was found: zeta stays below {self.threshold:.3g} as far as {self._value(-1):.3g}, where it is "
            f"{self.zetas[-1]:.3g}"
        )

    def _value(self, k: int) -> float:
        return float(self.points[k].theta[self.index])

    def _size(self) -> float:
        error = self.stderr if np.isfinite(self.stderr) else 0.0
        return abs(self.estimate) + error

    def _first_step(self) -> float:
        if np.isfinite(self.stderr) and self.stderr > 0:
            step = self.wanted * self.stderr
        else:  # nothing is known of its error
            step = 1e-3 * (abs(self.estimate) or 1.0)
        room = abs(self.bound - self.estimate)
        return min(step, room) if np.isfinite(room) else step

    def _zeta(self, point: Point) -> float:
        return float(max(2 * (point.cost - self.result.cost), 0.0) / self.result.s2) ** 0.5

    def _keep(self, point: Point) -> None:
        """Keep a point, in the order outwards."""
        zeta, value = self._zeta(point), point.theta[self.index]
        at = sum((p.theta[self.index] - value) * self.direction < 0 for p in self.points)
        self.points.insert(at, point)
        self.zetas.insert(at, zeta)

    def _start(self, value: float) -> np.ndarray:
        """Return all parameters, extrapolated or interpolated along the trace."""
        values = np.array([p.theta[self.index] for p in self.points])
        if len(values) == 1:
            theta = self.points[0].theta.copy()
            factor = self.result.factor
            along = np.zeros(1) if factor is None else factor @ factor[self.index]
            if factor is not None and along[self.index] > 0:  # not on a bound
                theta = theta + along / along[self.index] * (value - values[0])
        else:
            order = np.argsort(np.abs(values - value))[:2]
            (a, b), (first, second) = values[order], (self.points[i].theta for i in order)
            theta = first + (second - first) * ((value - a) / (b - a)) if a != b else first.copy()
        theta[self.index] = value
        return theta


def error_on_bound(solution: Solution, index: int) -> float:
    """Return the size of a change of a parameter on a bound that the data can see: s/‖J_j‖, the others held."""
    place = int(solution.free[:index].sum())
    length = float(solution.jacobian().whole()[place].norm())
    return float(solution.result.s2**0.5 / length) if length > 0 else float("inf")


def _joined(result: Result, index: int, below: _Side, above: _Side, level: float) -> Profile:
    points = [*reversed(below.points), *above.points[1:]]
    zetas = [*(-zeta for zeta in reversed(below.zetas)), *above.zetas[1:]]
    notes = tuple(f"{end}: {side.note}" for end, side in (("lower", below), ("upper", above)) if side.note)
    return Profile(
        name=result.names[index],
        estimate=below.estimate,
        stderr=float(result.stderr[index]),
        level=level,
        values=np.array([point.theta[index] for point in points]),
        zeta=np.array(zetas),
        cost=np.array([point.cost for point in points]),
        theta=np.stack([point.theta for point in points]),
        converged=np.array([point.converged for point in points]),
        interval=(float(below.end), float(above.end)),
        reached=(below.reached, above.reached),
        notes=notes,
    )
