"""Two hundred random curve fits with bounds, outliers and robust losses, and what SciPy makes of them.

Each problem is made from its number alone: a family of models, n = 1 to 8 parameters whose sizes differ by up to 10¹²,
m = 10 to 200 points, noise, outliers, one of five losses, bounds of which some are active at the solution, a start
inside or on a bound. The first hundred are *near*: fifty convex ones (polynomials under linear, soft_l1 and huber,
started anywhere), fifty started within 5 % of a solution (SciPy's, from the parameters the data were made from). The
others start anywhere in their box. The cost is SciPy's,

    cost(θ) = ½ Σ_i C² ρ((r_i/C)²),   r = f(x, θ) − y,   C = f_scale,

with gradient Σ_i ρ′_i r_i ∂r_i/∂θ = J̃ᵀr̃, J̃ = √ρ′ J, r̃ = √ρ′ r, worked out here from the definitions and from J by
automatic differentiation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares

N_PROBLEMS = 200
N_CONVEX, N_NEAR = 50, 100  # the first so many are convex, the first so many convex or near
SCIPY_TOLERANCE = 1e-14

# ρ(z) and ρ′(z), as scipy.optimize.least_squares documents them.
LOSSES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "linear": (lambda z: z, np.ones_like),
    "soft_l1": (lambda z: 2 * (np.sqrt(1 + z) - 1), lambda z: 1 / np.sqrt(1 + z)),
    "huber": (
        lambda z: np.where(z <= 1, z, 2 * np.sqrt(z) - 1),
        lambda z: np.where(z <= 1, 1.0, 1 / np.sqrt(np.maximum(z, 1))),
    ),
    "cauchy": (np.log1p, lambda z: 1 / (1 + z)),
    "arctan": (np.arctan, lambda z: 1 / (1 + z**2)),
}
CONVEX_LOSSES = ("linear", "soft_l1", "huber")


# Models of unit parameters u, with values of order one; x lies in [−1, 1] or [0, 5].


def polynomial(x, u):
    return sum(u[k] * x**k for k in range(len(u)))


def exponentials(x, u):
    value = u[0] * torch.exp(-u[1] * x)
    value = value + u[2] if len(u) in (3, 5) else value
    return value + u[3] * torch.exp(-u[4] * x) if len(u) == 5 else value


def peaks(x, u):
    value = u[0] * torch.exp(-((x - u[1]) ** 2) / (2 * u[2] ** 2))
    value = value + u[3] * torch.exp(-((x - u[4]) ** 2) / (2 * u[5] ** 2)) if len(u) > 4 else value
    value = value + u[-2] + u[-1] * x if len(u) == 8 else value
    return value + u[3] if len(u) == 4 else value


def rational(x, u):
    if len(u) == 2:
        return u[0] * x / (u[1] + x)
    return (u[0] + u[1] * x) / (1 + u[2] * x + u[3] * x**2)


def sines(x, u):
    value = u[0] * torch.sin(u[1] * x) + u[2] * torch.cos(u[1] * x)
    return value + u[3] if len(u) == 4 else value


@dataclass(frozen=True)
class Family:
    """A model, the numbers of parameters it takes with the ranges of their true values, the range of x.

    `room` says how far bounds lie from the truth, in units of it: at most so far below, and so far above. Peaks have
    little: one outside the data, or between two points, has no effect at all, and every point is a solution.
    """

    model: Callable[..., Any]
    truth: dict[int, list[tuple[float, float]]]  # by n
    x_range: tuple[float, float]
    room: tuple[float, float] = (0.95, 4.0)


_DECAY, _PEAK, _SECOND = [(1.0, 3.0), (0.8, 2.5)], [(1.0, 3.0), (1.0, 2.0), (0.3, 0.7)], [(1.0, 3.0), (3.2, 4.2)]
FAMILIES = {
    "polynomial": Family(polynomial, {n: [(-3.0, 3.0)] * n for n in range(1, 9)}, (-1.0, 1.0)),
    "exponentials": Family(
        exponentials,
        {2: _DECAY, 3: [*_DECAY, (0.3, 1.0)], 5: [(1, 3), (2.5, 5), (0.3, 1), (1, 3), (0.3, 0.8)]},
        (0.0, 5.0),
    ),
    "peaks": Family(
        peaks,
        {
            3: _PEAK,
            4: [*_PEAK, (0.3, 1.0)],
            6: [*_PEAK, *_SECOND, (0.3, 0.7)],
            8: [*_PEAK, *_SECOND, (0.3, 0.7), (0.3, 1.0), (0.1, 0.5)],
        },
        (0.0, 5.0),
        room=(0.5, 0.3),
    ),
    "rational": Family(rational, {2: [(2, 5), (0.5, 2)], 4: [(1, 3), (1, 3), (0.2, 1), (0.2, 1)]}, (0.0, 5.0)),
    "sines": Family(sines, {3: [(1, 3), (1.0, 3.0), (1, 3)], 4: [(1, 3), (1.0, 3.0), (1, 3), (0.3, 1.0)]}, (0.0, 5.0)),
}
CURVED = ("exponentials", "peaks", "rational", "sines")


class ScaledModel:
    """f(X, theta) = family(x, theta / scale): the same curve whatever the sizes of the parameters."""

    def __init__(self, model: Callable[..., Any], scale: np.ndarray) -> None:
        self.model, self.scale = model, torch.from_numpy(scale)

    def __call__(self, X: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        return self.model(X, [theta[j] / self.scale[j] for j in range(len(self.scale))])


@dataclass(frozen=True)
class RobustProblem:
    """One problem, and everything that can be said of a point without an optimiser."""

    number: int
    family: str
    model: ScaledModel
    x: np.ndarray  # (m,)
    y: np.ndarray  # (m,)
    p0: np.ndarray  # (n,)
    lower: np.ndarray  # (n,)
    upper: np.ndarray  # (n,)
    loss: str
    f_scale: float

    @property
    def near(self) -> bool:
        return self.number < N_NEAR

    def __str__(self) -> str:
        return f"{self.number}-{self.family}{len(self.p0)}-{self.loss}"

    def residual(self, theta: np.ndarray) -> np.ndarray:
        """Return f(x, θ) − y, shape (m,)."""
        with torch.no_grad():
            return self.model(torch.from_numpy(self.x), torch.from_numpy(theta)).expand(len(self.x)).numpy() - self.y

    def jacobian(self, theta: np.ndarray) -> np.ndarray:
        """Return ∂r/∂θ by automatic differentiation, shape (m, n): the parameters of every row are its own."""
        x = torch.from_numpy(self.x)
        columns = [torch.full_like(x, value, requires_grad=True) for value in theta]
        return torch.stack(torch.autograd.grad(self.model(x, columns).sum(), columns), dim=1).numpy()

    def cost(self, theta: np.ndarray) -> float:
        """Return ½ Σ C² ρ((r/C)²)."""
        rho, _ = LOSSES[self.loss]
        return 0.5 * self.f_scale**2 * float(np.sum(rho((self.residual(theta) / self.f_scale) ** 2)))

    def inside(self, theta: np.ndarray) -> bool:
        """Say whether the point keeps its bounds, to the bit."""
        return bool(np.all(theta >= self.lower) and np.all(theta <= self.upper))

    def kkt_violation(self, theta: np.ndarray) -> float:
        """Return max_j of |g_j| / (‖J̃_j‖‖r̃‖) over the parameters that a descent step may move, else 0."""
        residual = self.residual(theta)
        weight = np.sqrt(LOSSES[self.loss][1]((residual / self.f_scale) ** 2))
        J, r = weight[:, None] * self.jacobian(theta), weight * residual
        gradient, size = J.T @ r, np.linalg.norm(J, axis=0) * np.linalg.norm(r)
        blocked = ((theta <= self.lower) & (gradient > 0)) | ((theta >= self.upper) & (gradient < 0))
        cosines = np.divide(np.abs(gradient), size, out=np.zeros_like(size), where=size > 0)
        return float(np.max(np.where(blocked, 0.0, cosines)))

    def scipy_fit(self, start: np.ndarray, tolerance: float = SCIPY_TOLERANCE) -> np.ndarray:
        """Return the point at which scipy.optimize.least_squares ends."""
        bounds, limits = (self.lower, self.upper), dict.fromkeys(("ftol", "xtol", "gtol"), tolerance)
        options = {"x_scale": "jac", "loss": self.loss, "f_scale": self.f_scale, "max_nfev": 1000}
        with np.errstate(all="ignore"):
            found = least_squares(
                self.residual, start, jac=self.jacobian, bounds=bounds, method="trf", **limits, **options
            )
        assert np.isclose(found.cost, self.cost(found.x), rtol=1e-12)  # the same definition of the cost
        return found.x


def make_problem(number: int) -> RobustProblem:
    """Return problem number 0 ... N_PROBLEMS − 1; the same one every time."""
    rng = np.random.default_rng([20262, number])
    convex, near = number < N_CONVEX, number < N_NEAR
    name = "polynomial" if convex else str(rng.choice(CURVED))
    family = FAMILIES[name]
    n = int(rng.choice(list(family.truth)))
    truth = np.array([rng.uniform(low, high) for low, high in family.truth[n]])
    m = int(np.exp(rng.uniform(np.log(max(10, 2 * n)), np.log(200))))
    x = np.sort(rng.uniform(*family.x_range, m))
    scale = 10.0 ** rng.uniform(-6, 6, n)
    sigma = rng.uniform(0.01, 0.1)
    model = ScaledModel(family.model, scale)
    y = model(torch.from_numpy(x), torch.from_numpy(truth * scale)).expand(m).numpy() + sigma * rng.standard_normal(m)
    outliers = rng.random(m) < rng.choice([0.0, 0.05, 0.15])
    y = y + np.where(outliers, rng.choice([-1, 1], m) * rng.uniform(1, 5, m), 0.0)
    lower, upper = _bounds(rng, truth, family.room, finite=not near)
    start = np.clip(truth, lower, upper) if near and not convex else _start(rng, truth, lower, upper)
    ends = (lower * scale, upper * scale)
    problem = RobustProblem(number, name, model, x, y, start * scale, *ends, loss_of(number), sigma * rng.uniform(1, 3))
    if not near or convex:
        return problem
    solution = problem.scipy_fit(problem.p0, tolerance=1e-8)
    return replace(problem, p0=np.clip(solution * (1 + 0.05 * rng.uniform(-1, 1, n)), *ends))


def loss_of(number: int) -> str:
    """Return the loss of a problem, which needs no problem to be made."""
    return CONVEX_LOSSES[number % 3] if number < N_CONVEX else list(LOSSES)[number % 5]


def _bounds(
    rng: np.random.Generator, truth: np.ndarray, room: tuple[float, float], finite: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds of which one in six cuts the truth off; in units of u."""
    size, (below, above) = np.abs(truth), room
    lower = truth - size * below * rng.uniform(0.5, 1, len(truth))
    upper = truth + size * above * rng.uniform(0.25, 1, len(truth))
    kind = rng.random(len(truth))
    cut = size * min(0.2, 0.2 * above) * rng.uniform(0.1, 1, len(truth))
    lower, upper = np.where(kind < 1 / 12, truth + cut, lower), np.where(kind > 11 / 12, truth - cut, upper)
    if not finite:
        lower = np.where((kind > 0.3) & (kind < 0.6), -np.inf, lower)
        upper = np.where((kind > 0.5) & (kind < 0.8), np.inf, upper)
    return lower, upper


def _start(rng: np.random.Generator, truth: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Return a start anywhere in the box, one parameter in four on a bound; in units of u."""
    low, high = np.where(np.isfinite(lower), lower, truth - 10), np.where(np.isfinite(upper), upper, truth + 10)
    start = rng.uniform(low, high)
    edge = rng.random(len(truth))
    start = np.where((edge < 1 / 8) & np.isfinite(lower), lower, start)
    return np.where((edge > 7 / 8) & np.isfinite(upper), upper, start)
