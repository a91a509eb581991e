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
"""

from dataclasses import dataclass, replace

import torch
from torch.func import vmap

from lmfit_gpu.models import CALL_ERRORS
from lmfit_gpu.problem import Block, LeastSquaresProblem

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
    complex_features : bool
        The complex step needs X cast to complex as well (matrix products do).
    """

    scheme: str
    steps: torch.Tensor
    together: bool = False
    floor: torch.Tensor | None = None
    complex_features: bool = False

    @property
    def name(self) -> str:
        """The scheme."""
        return self.scheme

    def passes(self, n_params: int) -> int:
        """Return the number of forward evaluations."""
        return 1 + n_params * (2 if self.scheme == "3-point" else 1)

    def __call__(
        self, problem: LeastSquaresProblem, theta: torch.Tensor, block: Block, columns: torch.Tensor
    ) -> torch.Tensor:
        """Write ∂values/∂theta into `columns`, shape (n, c), and return the values, shape (c,)."""
        with torch.no_grad():
            values = problem.values(theta, block)
            steps = self.steps.to(theta)
            fits = TOGETHER_BYTES // (8 * max(values.numel(), 1))
            batch = max(1, min(FORWARD_BATCH, fits)) if self.together else 1
            for start in range(0, theta.numel(), batch):
                part = slice(start, min(start + batch, theta.numel()))
                self._fill(problem, theta, block, steps, part, values, columns[part])
        return values

    def _fill(  # noqa: PLR0913
        self,
        problem: LeastSquaresProblem,
        theta: torch.Tensor,
        block: Block,
        steps: torch.Tensor,
        part: slice,
        values: torch.Tensor,
        columns: torch.Tensor,
    ) -> None:
        moves = steps.new_zeros(part.stop - part.start, steps.numel())  # (k, n): never n x n
        moves[:, part].fill_diagonal_(1.0).mul_(steps[part])
        if self.scheme == "cs":
            shifted = torch.complex(theta.expand_as(moves), moves)
            columns.copy_(self._evaluate(problem, shifted, _complex_block(block, self.complex_features)).imag)
            columns /= steps[part, None]
            return
        upper = theta + moves
        up = self._evaluate(problem, upper, block)
        width = (upper - theta).sum(1)[:, None]  # the step actually taken, after rounding
        if self.scheme == "2-point":
            torch.sub(up, values, out=columns)
            columns /= width
            if bool(torch.isfinite(columns.sum())):
                return
        lower = theta - moves
        down = self._evaluate(problem, lower, block)
        below = (theta - lower).sum(1)[:, None]
        if self.scheme == "3-point":
            torch.sub(up, down, out=columns)
            columns /= width + below
            if bool(torch.isfinite(columns.sum())):
                return
        # One side is outside the model's domain: differences of the other.
        one_sided = torch.where(torch.isfinite(up), (up - values) / width, (values - down) / below)
        columns.copy_(torch.where(torch.isfinite(columns), columns, one_sided))

    def _evaluate(self, problem: LeastSquaresProblem, thetas: torch.Tensor, block: Block) -> torch.Tensor:
        if self.together:
            return vmap(lambda t: problem.values(t, block))(thetas)
        return problem.values(thetas[0], block)[None]

    def relative_error(self, column_norms: torch.Tensor, value_norm: float) -> float:
        """Return an estimate of the relative error of the columns: rounding of the values over their change."""
        if self.scheme == "cs":
            return 0.0
        epsilon = torch.finfo(self.steps.dtype).eps
        change = self.steps.double() * column_norms
        rounding = torch.where(change > 0, epsilon * value_norm / change, torch.zeros_like(change))
        return max(epsilon ** (2 * ORDER[self.scheme]), float(rounding.max()))

    def adapted(
        self, theta: torch.Tensor, value_norm: float, residual_norm: float, column_norms: torch.Tensor
    ) -> "Differences":
        """Return the scheme with steps for another point, from the norms of the last linearisation.

        Parameters
        ----------
        theta : Tensor, shape (n_params,)
        value_norm, residual_norm : float
            ‖f‖ and ‖r‖.
        column_norms : Tensor, shape (n_params,)
            ‖J_j‖; a zero leaves the step of that parameter as it is.
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
        usable = torch.isfinite(steps) & (steps > 0)
        return replace(self, steps=torch.where(usable, steps, self.steps))


def _nonzero(sizes: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    return torch.where(sizes > 0, sizes, otherwise)


def _complex_block(block: Block, complex_features: bool) -> Block:
    if not complex_features:
        return block
    return replace(block, x=block.x.to(torch.complex128 if block.x.dtype == torch.float64 else torch.complex64))


def start_differences(problem: LeastSquaresProblem, theta: torch.Tensor, scheme: str) -> Differences:
    """Return a scheme with steps found on a probe of the rows at the start.

    Parameters
    ----------
    problem : LeastSquaresProblem
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
    start = Differences(scheme, steps, together=_vmap_works(problem, theta, probe), floor=floor)
    return start.adapted(theta, float(torch.linalg.vector_norm(values)), residual_norm, norms)


def _visible_step(
    problem: LeastSquaresProblem,
    theta: torch.Tensor,
    probe: Block,
    values: torch.Tensor,
    search: tuple[int, float, float],
) -> tuple[float, float]:
    """Return a step of parameter j that changes the probe's values as a derivative does, and ‖J_j‖.

    The change must be above rounding, finite, and proportional to the step: where ten times the step gives another
    slope by more than 1 %, and a hundred times one nearer to that, the model rounds (float32 inside, a table, an inner
    solver) and the step grows.
    `search` is j, the first step to try, and the least step after a first that shows nothing.
    """
    j, step, eta = search
    epsilon = torch.finfo(theta.dtype).eps
    noise = epsilon * float(torch.linalg.vector_norm(values))

    def change(signed: float) -> tuple[float, torch.Tensor]:
        moved = theta.clone()
        moved[j] += signed
        taken = abs(float(moved[j] - theta[j]))
        return taken, problem.values(moved, probe) - values

    first, last_norm = step, 0.0
    for _ in range(SEARCH_TRIES):
        taken, difference = change(step)
        size = float(torch.linalg.vector_norm(difference))
        side = 1
        if not size < float("inf"):
            side = -1  # theta may lie on the edge of the model's domain
            taken, difference = change(-step)
            size = float(torch.linalg.vector_norm(difference))
        if size <= noise:
            step = max(step * SEARCH_FACTOR, eta)  # 1e-30 is zero beside a model of size 1
            continue
        if not size < float("inf"):
            step /= SEARCH_FACTOR
            if step <= epsilon * float(theta[j].abs()):
                break
            continue
        last_norm = size / taken
        slopes = [difference / taken]
        for factor in (10, 100):
            wide_taken, wide = change(side * factor * step)
            slopes.append(wide / wide_taken)
        if not _rounds(slopes, taken, values) or taken > NOISE_LIMIT * max(1.0, float(theta[j].abs())):
            return step, last_norm
        step *= 10
    return first, last_norm


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


def _vmap_works(problem: LeastSquaresProblem, theta: torch.Tensor, probe: Block) -> bool:
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


def _checked_complex_step(problem: LeastSquaresProblem, theta: torch.Tensor, probe: Block) -> Differences:
    reference = start_differences(problem, theta, "3-point")
    shape = (theta.numel(), int(problem.values(theta.detach(), probe).numel()))
    expected, columns = theta.new_empty(shape), theta.new_empty(shape)
    values = reference(problem, theta, probe, expected)
    rounding = 10 * torch.finfo(theta.dtype).eps * values.abs().max() / reference.steps.to(theta)[:, None]
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
