r"""Jacobian of one block of rows by differences of the model's values.

======== =========================================== ============= ========== ==================
scheme   column j of J                               evaluations   step/|θ_j| relative error
======== =========================================== ============= ========== ==================
2-point  (f(θ + h e_j) − f(θ)) / h                   n + 1         ε^(1/2)    ε^(1/2)
3-point  (f(θ + h e_j) − f(θ − h e_j)) / 2h          2n + 1        ε^(1/3)    ε^(2/3)
cs       Im f(θ + i h e_j) / h                       n + 1         1e-20      ε
======== =========================================== ============= ========== ==================

(Nocedal and Wright, Numerical Optimization, 2nd ed. 2006, section 8.1; Squire and Trapp, SIAM Review 40 (1998),
doi:10.1137/S003614459631241X, for the complex step.)

A step relative to θ_j alone fails when θ_j is small beside its effect: near θ_j = 1e-9 it changes a model of
size 1 by less than rounding. So the step grows until rounding in f spoils at most :data:`NOISE` of the
column, but not beyond a hundredth of the change of θ_j that matters, ‖r‖/‖J_j‖:

.. math:: h_j = \max\bigl(\eta\,|\theta_j|,\ \min(\epsilon \|f\| / (\mathrm{NOISE}\,\|J_j\|),\
                \|r\| / (100\,\|J_j\|))\bigr)

with η‖r‖/‖J_j‖ in place of η|θ_j| when θ_j = 0. Norms come from the previous linearisation, at first from a probe.
Where the points lie in a box of bounds: :mod:`lmfit_gpu.stencil`. The complex step does not move the real part.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.func import vmap

from lmfit_gpu.box import Bounds, rooms
from lmfit_gpu.models import CALL_ERRORS
from lmfit_gpu.problem import Block, Problem
from lmfit_gpu.stencil import Stencil, place, three_point

__all__ = ["Differences", "start_differences"]

NOISE = 1e-6
MATTERS = 1e-2
COMPLEX_STEP = 1e-20
COMPLEX_RTOL = 0.05  # against 3-point differences, whose steps may be long: a model that is not analytic is off by all
ORDER = {"2-point": 1 / 2, "3-point": 1 / 3}  # step relative to |θ_j|: ε to this power
TOGETHER_BYTES = 64 * 2**20  # values of perturbed parameters held at once
FORWARD_BATCH = 32  # and never more points at once: a network's inner layers hold more than its output
PROPORTIONAL = 0.01  # two slopes of a model without noise agree to their truncation, 1e-7
PLAIN = 1e5  # times the rounding of a value: a hundredth of such a change is known to 0.1 %
NOISE_LIMIT = 1e-3  # relative step beyond which a curved model is no straight line any more
SEARCH_FACTOR = 1e3  # a probe step that shows nothing, or leaves the domain, is changed by this
SEARCH_TRIES = 9
SHRINK_TRIES = 3
TINY = torch.finfo(torch.float64).tiny  # a move lost to rounding changes nothing
WIDEST = 100  # slopes are compared at 1, 10 and 100 steps


@dataclass(frozen=True)
class Differences:
    """One difference scheme with its steps.

    Parameters
    ----------
    scheme : {"2-point", "3-point", "cs"}
    steps : Tensor, shape (n_params,)
        h, in units of the parameters.
    together : bool
        Perturbed parameters are evaluated together (vmap).
    floor : Tensor, shape (n_params,), optional
        Steps do not fall below it: what the search at the start had to grow to, for a model that rounds.
    ceiling : Tensor, shape (n_params,), optional
        Nor grow above it: what the search had to shrink to, for features as narrow as a usual step.
    complex_features : bool
        The complex step needs X cast to complex as well (matrix products do).
    stencil : Stencil, optional
        In a box: the moves at the point the steps are for.
    """

    scheme: str
    steps: torch.Tensor
    together: bool = False
    floor: torch.Tensor | None = None
    complex_features: bool = False
    ceiling: torch.Tensor | None = None
    stencil: Stencil | None = None

    @property
    def resolution(self) -> torch.Tensor:
        """Steps (n_params,) as rounding counts: shorter in a narrow box, a quarter for a one-sided 3-point."""
        return self.steps if self.stencil is None else self.stencil.resolution

    @property
    def name(self) -> str:
        """The scheme."""
        return self.scheme

    def passes(self, n_params: int) -> int:
        """Return the number of forward evaluations."""
        return 1 + n_params * (2 if self.scheme == "3-point" else 1)

    def __call__(self, problem: Problem, theta: torch.Tensor, block: Block, columns: torch.Tensor) -> torch.Tensor:
        """Write ∂values/∂theta into `columns`, shape (n, c), and return the values, shape (c,)."""
        with torch.no_grad():
            values = problem.values(theta, block)
            steps = self.steps.to(theta)
            cs = self.scheme == "cs"
            stencil = Stencil(steps, steps) if cs else place(self.scheme, theta, steps, problem.bounds)
            fits = TOGETHER_BYTES // (8 * max(values.numel(), 1))
            batch = max(1, min(FORWARD_BATCH, fits)) if self.together else 1
            fill = self._fill_complex if cs else self._fill
            for start in range(0, theta.numel(), batch):
                part = slice(start, min(start + batch, theta.numel()))
                fill(problem, theta, block, (part, stencil), values, columns[part])
        return values

    def _fill_complex(
        self,
        problem: Problem,
        theta: torch.Tensor,
        block: Block,
        moved: tuple[slice, Stencil],
        values: torch.Tensor,
        columns: torch.Tensor,
    ) -> None:
        part, stencil = moved
        moves = _along(part, stencil.first)
        shifted = torch.complex(theta.expand_as(moves), moves)
        columns.copy_(self._evaluate(problem, shifted, _complex_block(block, self.complex_features)).imag)
        columns /= stencil.first[part, None]

    def _fill(
        self,
        problem: Problem,
        theta: torch.Tensor,
        block: Block,
        moved: tuple[slice, Stencil],
        values: torch.Tensor,
        columns: torch.Tensor,
    ) -> None:
        part, stencil = moved

        def evaluated(moves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            points = problem.inside(theta + _along(part, moves))
            taken = (points - theta).sum(1)[:, None]  # the move actually made, after rounding
            return self._evaluate(problem, points, block), taken

        first, a = evaluated(stencil.first)
        if self.scheme == "2-point":
            torch.sub(first, values, out=columns)
            columns /= a
            if bool(torch.isfinite(columns.sum())):
                return
        second, b = evaluated(stencil.second)
        if self.scheme == "3-point":
            torch.sub(first, second, out=columns)
            columns /= a - b
            if stencil.one_sided is not None:
                some = stencil.one_sided[part]
                columns[some] = three_point(values, first[some], second[some], a[some], b[some]).to(columns)
            if bool(torch.isfinite(columns.sum())):
                return
        # One side is outside the model's domain: differences of the other.
        one_sided = torch.where(torch.isfinite(first), (first - values) / a, (values - second) / -b)
        columns.copy_(torch.where(torch.isfinite(columns), columns, one_sided))
        if problem.bounds is not None:
            columns[a[:, 0] == 0] = 0.0  # equal bounds: nothing is known outside, nothing moves inside

    def _evaluate(self, problem: Problem, thetas: torch.Tensor, block: Block) -> torch.Tensor:
        if self.together:
            return vmap(lambda t: problem.values(t, block))(thetas)
        return problem.values(thetas[0], block)[None]

    def relative_error(self, column_norms: torch.Tensor, value_norm: float) -> float:
        """Return an estimate of the relative error of the columns: rounding of the values over their change."""
        if self.scheme == "cs":
            return 0.0
        epsilon = torch.finfo(self.steps.dtype).eps
        change = self.resolution.double() * column_norms
        rounding = torch.where(change > 0, epsilon * value_norm / change, torch.zeros_like(change))
        sides = None if self.stencil is None else self.stencil.one_sided
        truncation = epsilon ** (2 * ORDER[self.scheme]) * (1 if sides is None or not bool(sides.any()) else 2)
        return max(truncation, float(rounding.max()))

    def adapted(
        self,
        theta: torch.Tensor,
        value_norm: float,
        residual_norm: float,
        column_norms: torch.Tensor,
        bounds: Bounds | None = None,
    ) -> "Differences":
        """Return the scheme with steps for another point, from the norms of the last linearisation.

        Parameters
        ----------
        theta : Tensor, shape (n_params,)
        value_norm, residual_norm : float
            ‖f‖ and ‖r‖.
        column_norms : Tensor, shape (n_params,)
            ‖J_j‖; a zero leaves the step of that parameter as it is.
        bounds : (lower, upper), optional
            The box in which the points lie.
        """
        if self.scheme == "cs":
            return replace(self, steps=COMPLEX_STEP * _nonzero(theta.abs(), torch.ones_like(theta)))
        epsilon = torch.finfo(theta.dtype).eps
        eta = epsilon ** ORDER[self.scheme]
        matters = residual_norm / column_norms.to(theta)
        noise = epsilon * value_norm / (NOISE * column_norms.to(theta))
        base = eta * torch.where(theta == 0, matters, theta.abs())
        steps = torch.maximum(base, torch.minimum(noise, MATTERS * matters))
        steps = steps if self.floor is None else torch.maximum(steps, self.floor)
        steps = steps if self.ceiling is None else torch.minimum(steps, self.ceiling)
        usable = torch.isfinite(steps) & (steps > 0)
        steps = torch.where(usable, steps, self.steps)
        return replace(self, steps=steps, stencil=None if bounds is None else place(self.scheme, theta, steps, bounds))


def _along(part: slice, moves: torch.Tensor) -> torch.Tensor:
    """Return the moves (n,) of some k parameters as vectors, shape (k, n): never n x n."""
    vectors = moves.new_zeros(part.stop - part.start, moves.numel())
    vectors[:, part].fill_diagonal_(1.0).mul_(moves[part])
    return vectors


def _nonzero(sizes: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    return torch.where(sizes > 0, sizes, otherwise)


def _complex_block(block: Block, complex_features: bool) -> Block:
    if not complex_features:
        return block
    return replace(block, x=block.x.to(torch.complex128 if block.x.dtype == torch.float64 else torch.complex64))


def start_differences(problem: Problem, theta: torch.Tensor, scheme: str) -> Differences:
    """Return a scheme with steps found on a probe of the rows at the start.

    Parameters
    ----------
    problem : Problem
    theta : Tensor, shape (n_params,)
    scheme : {"2-point", "3-point", "cs"}

    Raises
    ------
    ValueError
        If the complex step does not reproduce the 3-point differences: the model is then not an analytic
        function of its parameters as written (it uses ``abs``, comparisons or real-only functions).
    """
    probe = problem.probe()
    if scheme == "cs":
        return _checked_complex_step(problem, theta, probe)
    epsilon = torch.finfo(theta.dtype).eps
    eta = epsilon ** ORDER[scheme]
    first = eta * _nonzero(theta.abs(), torch.ones_like(theta))
    with torch.no_grad():
        values = problem.values(theta, probe)
        found = [_visible_step(problem, theta, probe, values, (j, float(first[j]), eta)) for j in range(theta.numel())]
        residual_norm = float(torch.linalg.vector_norm(probe.residual(values)))
    steps, norms = (torch.tensor(part, dtype=theta.dtype, device=theta.device) for part in zip(*found, strict=True))
    floor = torch.where(steps > first, steps, torch.zeros_like(steps))
    ceiling = torch.where(steps < first, steps, torch.full_like(steps, torch.inf))
    start = Differences(scheme, steps, together=_vmap_works(problem, theta, probe), floor=floor, ceiling=ceiling)
    return start.adapted(theta, float(torch.linalg.vector_norm(values)), residual_norm, norms, problem.bounds)


def _visible_step(
    problem: Problem,
    theta: torch.Tensor,
    probe: Block,
    values: torch.Tensor,
    search: tuple[int, float, float],
) -> tuple[float, float]:
    """Return a step of parameter j that changes the probe's values as a derivative does, and ‖J_j‖.

    The change must be above rounding, finite, and proportional to the step: where ten times the step gives another
    slope by more than 1 %, and a hundred times one nearer to that, the model rounds (float32 inside, a table, an inner
    solver) and the step grows.
    `search` is j, the first step to try, and the least step after a first that shows nothing. In a box the search goes
    to the side with room; where a hundred steps do not fit, the slopes are compared over the room there is.
    """
    j, step, eta = search
    epsilon = torch.finfo(theta.dtype).eps
    noise = epsilon * float(torch.linalg.vector_norm(values))

    def change(signed: float) -> tuple[float, torch.Tensor]:
        moved = theta.clone()
        moved[j] += signed
        moved = problem.inside(moved)
        taken = abs(float(moved[j] - theta[j]))
        return taken, problem.values(moved, probe) - values

    up, down = (float(room[j]) for room in rooms(theta, problem.bounds))
    first, last_norm = step, 0.0
    for _ in range(SEARCH_TRIES):
        side, room, other = (1, up, down) if up >= min(WIDEST * step, down) else (-1, down, up)
        if room == 0:  # equal bounds
            break
        step = min(step, room)
        taken, difference = change(side * step)
        size = float(torch.linalg.vector_norm(difference))
        if not size < float("inf") and other > 0:
            side, room = -side, other  # theta may lie on the edge of the model's domain
            step = min(step, room)
            taken, difference = change(side * step)
            size = float(torch.linalg.vector_norm(difference))
        if size <= noise:
            if step == room:
                break
            step = max(step * SEARCH_FACTOR, eta)  # 1e-30 is zero beside a model of size 1
            continue
        if not size < float("inf"):
            step /= SEARCH_FACTOR
            if step <= epsilon * float(theta[j].abs()):
                break
            continue
        last_norm = size / taken
        base = min(step, room / WIDEST)
        ladder = [(taken, difference)] if base == step else [change(side * base)]
        ladder += [change(side * factor * base) for factor in (10, WIDEST)]
        slopes = [moved / max(length, TINY) for length, moved in ladder]
        shorter = _shorter(slopes[0], side * ladder[0][0], change) if step == first and base == step else None
        if shorter is not None:
            return shorter
        if not _rounds(slopes, ladder[0][0], values) or taken > NOISE_LIMIT * max(1.0, float(theta[j].abs())):
            return step, last_norm
        if base < step:
            return room, float(torch.linalg.vector_norm(slopes[2]))
        step *= 10
    return first, last_norm


def _shorter(
    slope: torch.Tensor, signed: float, change: Callable[[float], tuple[float, torch.Tensor]]
) -> tuple[float, float] | None:
    """Return a shorter step, and the slope's norm, where features of the model are as narrow as the step; else None.

    There slopes at a tenth and a hundredth differ by more than 1 % from the slope, and ever less from each other; in a
    model that rounds they differ ever more.
    """
    norm = torch.linalg.vector_norm
    found = None
    for _ in range(SHRINK_TRIES):
        tenth, hundredth = (moved / max(length, TINY) for length, moved in (change(signed / 10), change(signed / 100)))
        off, off_shorter, size = float(norm(tenth - slope)), float(norm(hundredth - tenth)), float(norm(hundredth))
        if not off > PROPORTIONAL * float(norm(tenth)) or not off_shorter < min(off, size) / 2:
            break
        signed, slope = signed / 10, tenth
        found = abs(signed), float(norm(slope))
    return found


def _rounds(slopes: list[torch.Tensor], step: float, values: torch.Tensor) -> bool:
    """Return whether slopes at 1, 10 and 100 steps differ as rounding makes them differ.

    Rounding spoils a slope less the longer the step, in many rows; curvature spoils it more, and a pole near theta
    spoils few rows: the worst of them are left out.
    """
    plain = (slopes[2].abs() * 100 * step) > PLAIN * torch.finfo(values.dtype).eps * values.abs()
    if 2 * int((slopes[0][plain] != 0).sum()) < int(plain.sum()):  # most rows still round to their old value
        return True
    first, second, size = (part[plain] for part in (slopes[1] - slopes[0], slopes[2] - slopes[1], slopes[0]))
    n = first.numel()
    kept = first.abs().argsort()[: n - min(max(2, n // 20), n // 2)]
    norm = torch.linalg.vector_norm
    off, off_wider, scale = (float(norm(part[kept])) for part in (first, second, size))
    return off > PROPORTIONAL * scale and off_wider < off / 2


def _vmap_works(problem: Problem, theta: torch.Tensor, probe: Block) -> bool:
    if not problem.differentiable:
        return False
    try:
        with torch.no_grad():
            together = vmap(lambda t: problem.values(t, probe))(torch.stack([theta, theta]))
            alone = problem.values(theta, probe)
    except CALL_ERRORS:
        return False
    tolerance = 100 * torch.finfo(theta.dtype).eps
    return torch.allclose(together[1], alone, rtol=tolerance, atol=tolerance * float(alone.abs().max()), equal_nan=True)


def _checked_complex_step(problem: Problem, theta: torch.Tensor, probe: Block) -> Differences:
    reference = start_differences(problem, theta, "3-point")
    shape = (theta.numel(), int(problem.values(theta.detach(), probe).numel()))
    expected, columns = theta.new_empty(shape), theta.new_empty(shape)
    values = reference(problem, theta, probe, expected)
    rounding = 10 * torch.finfo(theta.dtype).eps * values.abs().max() / reference.resolution.to(theta)[:, None]
    steps = COMPLEX_STEP * _nonzero(theta.abs(), torch.ones_like(theta))
    failure: object = "its imaginary part is not the derivative (abs, comparisons, real-only functions)"
    for complex_features in (False, True):
        scheme = Differences("cs", steps, complex_features=complex_features)
        try:
            scheme(problem, theta, probe, columns)
        except CALL_ERRORS as error:
            failure = error
            continue
        size = torch.linalg.vector_norm(expected, dim=1, keepdim=True)
        if bool(torch.all((columns - expected).abs() <= COMPLEX_RTOL * size + rounding)):
            return scheme
    raise ValueError(f"jac='cs': the complex step does not work for this model: {failure}; use '3-point'")
