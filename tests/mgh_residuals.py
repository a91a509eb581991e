"""Residual vectors of the Moré-Garbow-Hillstrom least-squares problems.

Every function here maps theta (n,) to r (m,), F(theta) = sum_i r_i(theta)^2, and follows the formula of the
same number in section 3 of the paper; the catalogue with starts and minima is `mgh.py`. The paper's index i
runs from 1, x_j is written theta[j - 1], and t, u, y are its constants.

Two rules keep the functions usable under `torch.func` (jvp, jacfwd, vmap): nothing is written in place, and
no Python branch looks at a value of theta. The constants take the dtype and device of theta.

References
----------
Moré, J. J., Garbow, B. S. and Hillstrom, K. E. (1981). "Testing Unconstrained Optimization Software." ACM
Transactions on Mathematical Software 7(1), 17-41. doi:10.1145/355934.355936
Moré, J. J., Garbow, B. S. and Hillstrom, K. E. (1981). "Algorithm 566: FORTRAN Subroutines for Testing
Unconstrained Optimization Software." ACM TOMS 7(1), 136-140. doi:10.1145/355934.355943
"""

import math
from functools import reduce

import torch
from torch import Tensor

# --- Problems 1 to 20: fixed n ------------------------------------------------------------------------------


def rosenbrock(theta: Tensor) -> Tensor:
    """Return Rosenbrock's curved valley, problem 1."""
    x1, x2 = theta.unbind()
    return torch.stack([10 * (x2 - x1**2), 1 - x1])


def freudenstein_roth(theta: Tensor) -> Tensor:
    """Return the Freudenstein and Roth cubics, problem 2."""
    x1, x2 = theta.unbind()
    return torch.stack([-13 + x1 + ((5 - x2) * x2 - 2) * x2, -29 + x1 + ((x2 + 1) * x2 - 14) * x2])


def powell_badly_scaled(theta: Tensor) -> Tensor:
    """Return Powell's badly scaled pair, problem 3."""
    x1, x2 = theta.unbind()
    return torch.stack([1e4 * x1 * x2 - 1, torch.exp(-x1) + torch.exp(-x2) - 1.0001])


def brown_badly_scaled(theta: Tensor) -> Tensor:
    """Return Brown's badly scaled triple, problem 4."""
    x1, x2 = theta.unbind()
    return torch.stack([x1 - 1e6, x2 - 2e-6, x1 * x2 - 2])


def beale(theta: Tensor) -> Tensor:
    """Return y_i - x1 (1 - x2^i), problem 5."""
    x1, x2 = theta.unbind()
    return torch.stack([1.5 - x1 * (1 - x2), 2.25 - x1 * (1 - x2**2), 2.625 - x1 * (1 - x2**3)])


def jennrich_sampson(theta: Tensor) -> Tensor:
    """Return 2 + 2i - (exp(i x1) + exp(i x2)) for i = 1..10, problem 6."""
    x1, x2 = theta.unbind()
    i = _integers(theta, 1, 10)
    return 2 + 2 * i - (torch.exp(i * x1) + torch.exp(i * x2))


def helical_valley(theta: Tensor) -> Tensor:
    """Return Fletcher and Powell's helical valley, problem 7.

    The paper's angle, arctan(x2/x1)/2π plus 1/2 where x1 < 0, runs over (-1/4, 3/4). Measured from the x2
    axis it is 1/4 - atan2(x1, x2)/2π: the same function, no division, and smooth except across the half-line
    x1 = 0, x2 <= 0, where the paper's own definition jumps.
    """
    x1, x2, x3 = theta.unbind()
    angle = 0.25 - torch.atan2(x1, x2) / (2 * math.pi)
    return torch.stack([10 * (x3 - 10 * angle), 10 * (torch.sqrt(x1**2 + x2**2) - 1), x3])


def bard(theta: Tensor) -> Tensor:
    """Return y_i - (x1 + u_i / (v_i x2 + w_i x3)), u = i, v = 16 - i, w = min(u, v), problem 8."""
    x1, x2, x3 = theta.unbind()
    u = _integers(theta, 1, 15)
    v = 16 - u
    return _like(theta, BARD_Y) - (x1 + u / (v * x2 + torch.minimum(u, v) * x3))


def gaussian(theta: Tensor) -> Tensor:
    """Return x1 exp(-x2 (t_i - x3)^2 / 2) - y_i, t = (8 - i)/2, problem 9."""
    x1, x2, x3 = theta.unbind()
    t = (8 - _integers(theta, 1, 15)) / 2
    return x1 * torch.exp(-x2 * (t - x3) ** 2 / 2) - _like(theta, GAUSSIAN_Y)


def meyer(theta: Tensor) -> Tensor:
    """Return x1 exp(x2 / (t_i + x3)) - y_i, t = 45 + 5i, problem 10."""
    x1, x2, x3 = theta.unbind()
    t = 45 + 5 * _integers(theta, 1, 16)
    return x1 * torch.exp(x2 / (t + x3)) - _like(theta, MEYER_Y)


def gulf(theta: Tensor, m: int = 99) -> Tensor:
    """Return exp(-|y_i - x2|^x3 / x1) - t_i, t = i/100, y = 25 + (-50 ln t)^(2/3), problem 11.

    The paper prints |y_i m i x2|; the solution (50, 25, 1.5) it states holds for y_i - x2, which is what
    later collections use. At y_i = x2 the power is 0 for x3 > 0; the inner `where` keeps the log in its
    derivative finite.
    """
    x1, x2, x3 = theta.unbind()
    t = _integers(theta, 1, m) / 100
    y = 25 + (-50 * torch.log(t)) ** (2 / 3)
    gap = torch.abs(y - x2)
    power = torch.where(gap > 0, torch.where(gap > 0, gap, 1.0) ** x3, 0.0)
    return torch.exp(-power / x1) - t


def box_3d(theta: Tensor, m: int = 10) -> Tensor:
    """Return exp(-t x1) - exp(-t x2) - x3 (exp(-t) - exp(-10 t)), t = i/10, problem 12."""
    x1, x2, x3 = theta.unbind()
    t = _integers(theta, 1, m) / 10
    return torch.exp(-t * x1) - torch.exp(-t * x2) - x3 * (torch.exp(-t) - torch.exp(-10 * t))


def powell_singular(theta: Tensor) -> Tensor:
    """Return Powell's function with a singular Jacobian at its zero, problem 13."""
    x1, x2, x3, x4 = theta.unbind()
    return torch.stack([x1 + 10 * x2, math.sqrt(5) * (x3 - x4), (x2 - 2 * x3) ** 2, math.sqrt(10) * (x1 - x4) ** 2])


def wood(theta: Tensor) -> Tensor:
    """Return Wood's two coupled Rosenbrock valleys, problem 14."""
    x1, x2, x3, x4 = theta.unbind()
    return torch.stack(
        [
            10 * (x2 - x1**2),
            1 - x1,
            math.sqrt(90) * (x4 - x3**2),
            1 - x3,
            math.sqrt(10) * (x2 + x4 - 2),
            (x2 - x4) / math.sqrt(10),
        ]
    )


def kowalik_osborne(theta: Tensor) -> Tensor:
    """Return y_i - x1 (u_i^2 + u_i x2) / (u_i^2 + u_i x3 + x4), problem 15."""
    x1, x2, x3, x4 = theta.unbind()
    u = _like(theta, KOWALIK_OSBORNE_U)
    return _like(theta, KOWALIK_OSBORNE_Y) - x1 * (u**2 + u * x2) / (u**2 + u * x3 + x4)


def brown_dennis(theta: Tensor, m: int = 20) -> Tensor:
    """Return (x1 + t x2 - exp t)^2 + (x3 + x4 sin t - cos t)^2, t = i/5, problem 16."""
    x1, x2, x3, x4 = theta.unbind()
    t = _integers(theta, 1, m) / 5
    return (x1 + t * x2 - torch.exp(t)) ** 2 + (x3 + x4 * torch.sin(t) - torch.cos(t)) ** 2


def osborne_1(theta: Tensor) -> Tensor:
    """Return y_i - (x1 + x2 exp(-t x4) + x3 exp(-t x5)), t = 10 (i - 1), problem 17."""
    x1, x2, x3, x4, x5 = theta.unbind()
    t = 10 * _integers(theta, 0, 32)
    return _like(theta, OSBORNE_1_Y) - (x1 + x2 * torch.exp(-t * x4) + x3 * torch.exp(-t * x5))


def biggs_exp6(theta: Tensor, m: int = 13) -> Tensor:
    """Return x3 exp(-t x1) - x4 exp(-t x2) + x6 exp(-t x5) - y_i, t = i/10, problem 18."""
    x1, x2, x3, x4, x5, x6 = theta.unbind()
    t = _integers(theta, 1, m) / 10
    y = torch.exp(-t) - 5 * torch.exp(-10 * t) + 3 * torch.exp(-4 * t)
    return x3 * torch.exp(-t * x1) - x4 * torch.exp(-t * x2) + x6 * torch.exp(-t * x5) - y


def osborne_2(theta: Tensor) -> Tensor:
    """Return y_i minus an exponential and three Gaussian peaks, t = (i - 1)/10, problem 19.

    The model is x1 exp(-t x5) + sum_{k=1..3} x_{1+k} exp(-(t - x_{8+k})^2 x_{5+k}).
    """
    t = _integers(theta, 0, 64) / 10
    decay = theta[0] * torch.exp(-t * theta[4])  # (65,)
    peaks = theta[1:4] * torch.exp(-((t[:, None] - theta[8:11]) ** 2) * theta[5:8])  # (65, 3)
    return _like(theta, OSBORNE_2_Y) - (decay + peaks.sum(dim=1))


def watson(theta: Tensor) -> Tensor:
    """Return p'(t_i) - p(t_i)^2 - 1, then x1 and x2 - x1^2 - 1, problem 20.

    p(t) = sum_j x_j t^(j-1) and t_i = i/29.
    """
    n = theta.shape[0]
    t = _integers(theta, 1, 29) / 29
    powers = t[:, None] ** _integers(theta, 0, n - 1)  # (29, n)
    slope = powers[:, :-1] @ (_integers(theta, 1, n - 1) * theta[1:])
    ends = torch.stack([theta[0], theta[1] - theta[0] ** 2 - 1])
    return torch.cat([slope - (powers @ theta) ** 2 - 1, ends])


# --- Problems 21 to 35: n is the length of theta ------------------------------------------------------------


def extended_rosenbrock(theta: Tensor) -> Tensor:
    """Return n/2 independent copies of problem 1, interleaved, problem 21."""
    odd, even = theta[0::2], theta[1::2]
    return torch.stack([10 * (even - odd**2), 1 - odd], dim=1).reshape(-1)


def extended_powell_singular(theta: Tensor) -> Tensor:
    """Return n/4 independent copies of problem 13, interleaved, problem 22."""
    a, b, c, d = theta[0::4], theta[1::4], theta[2::4], theta[3::4]
    rows = [a + 10 * b, math.sqrt(5) * (c - d), (b - 2 * c) ** 2, math.sqrt(10) * (a - d) ** 2]
    return torch.stack(rows, dim=1).reshape(-1)


def penalty_1(theta: Tensor) -> Tensor:
    """Return sqrt(a) (x_i - 1), then sum x_j^2 - 1/4, problem 23."""
    return torch.cat([math.sqrt(PENALTY_WEIGHT) * (theta - 1), (torch.sum(theta**2) - 0.25).reshape(1)])


def penalty_2(theta: Tensor) -> Tensor:
    """Return the 2n residuals of the second penalty problem, problem 24."""
    n = theta.shape[0]
    root, i = math.sqrt(PENALTY_WEIGHT), _integers(theta, 1, n)
    growth, target = torch.exp(theta / 10), torch.exp(i / 10)
    pairs = growth[1:] + growth[:-1] - (target[1:] + target[:-1])
    weighted_sum = torch.sum((n - i + 1) * theta**2) - 1
    return torch.cat(
        [
            (theta[0] - 0.2).reshape(1),
            root * pairs,
            root * (growth[1:] - math.exp(-0.1)),
            weighted_sum.reshape(1),
        ]
    )


def variably_dimensioned(theta: Tensor) -> Tensor:
    """Return x_i - 1, then s = sum j (x_j - 1), then s^2, problem 25."""
    s = torch.sum(_integers(theta, 1, theta.shape[0]) * (theta - 1)).reshape(1)
    return torch.cat([theta - 1, s, s**2])


def trigonometric(theta: Tensor) -> Tensor:
    """Return n - sum cos x_j + i (1 - cos x_i) - sin x_i, problem 26."""
    n = theta.shape[0]
    cosine = torch.cos(theta)
    return n - torch.sum(cosine) + _integers(theta, 1, n) * (1 - cosine) - torch.sin(theta)


def brown_almost_linear(theta: Tensor) -> Tensor:
    """Return x_i + sum x_j - (n + 1) for i < n, then prod x_j - 1, problem 27.

    The product is a chain of multiplications: the derivative of `torch.prod` counts zeros, which vmap cannot
    do.
    """
    n = theta.shape[0]
    product = reduce(torch.mul, theta.unbind())
    return torch.cat([theta[:-1] + torch.sum(theta) - (n + 1), (product - 1).reshape(1)])


def discrete_boundary_value(theta: Tensor) -> Tensor:
    """Return 2 x_i - x_{i-1} - x_{i+1} + h^2 (x_i + t_i + 1)^3 / 2, h = 1/(n + 1), t = ih, problem 28."""
    n = theta.shape[0]
    h = 1 / (n + 1)
    t = h * _integers(theta, 1, n)
    before, after = _neighbours(theta)
    return 2 * theta - before - after + h**2 * (theta + t + 1) ** 3 / 2


def discrete_integral_equation(theta: Tensor) -> Tensor:
    """Return x_i + (h/2) sum_j K(t_i, t_j) (x_j + t_j + 1)^3, problem 29.

    K(t, s) = (1 - t) s where s <= t and t (1 - s) where s > t, that is min(t, s) (1 - max(t, s)).
    """
    n = theta.shape[0]
    h = 1 / (n + 1)
    t = h * _integers(theta, 1, n)
    kernel = torch.minimum(t[:, None], t) * (1 - torch.maximum(t[:, None], t))  # (n, n)
    return theta + h / 2 * (kernel @ (theta + t + 1) ** 3)


def broyden_tridiagonal(theta: Tensor) -> Tensor:
    """Return (3 - 2 x_i) x_i - x_{i-1} - 2 x_{i+1} + 1, x_0 = x_{n+1} = 0, problem 30."""
    before, after = _neighbours(theta)
    return (3 - 2 * theta) * theta - before - 2 * after + 1


def broyden_banded(theta: Tensor) -> Tensor:
    """Return x_i (2 + 5 x_i^2) + 1 - sum_{j in J_i} x_j (1 + x_j), problem 31.

    J_i holds the j != i from i - 5 to i + 1.
    """
    n = theta.shape[0]
    ones = torch.ones(n, n, dtype=theta.dtype, device=theta.device)
    band = ones.tril(1).triu(-5) - torch.eye(n, dtype=theta.dtype, device=theta.device)
    return theta * (2 + 5 * theta**2) + 1 - band @ (theta * (1 + theta))


def linear_full_rank(theta: Tensor, m: int = 10) -> Tensor:
    """Return x_i - (2/m) sum x_j - 1, with no x_i term for i > n, problem 32."""
    padded = torch.cat([theta, theta.new_zeros(m - theta.shape[0])])
    return padded - 2 / m * torch.sum(theta) - 1


def linear_rank_1(theta: Tensor, m: int = 10) -> Tensor:
    """Return i sum_j j x_j - 1, problem 33."""
    return _integers(theta, 1, m) * torch.sum(_integers(theta, 1, theta.shape[0]) * theta) - 1


def linear_rank_1_zero(theta: Tensor, m: int = 10) -> Tensor:
    """Return (i - 1) sum_{j=2..n-1} j x_j - 1, with -1 for i = 1 and i = m, problem 34."""
    inner = torch.sum(_integers(theta, 2, theta.shape[0] - 1) * theta[1:-1])
    factor = _integers(theta, 0, m - 1) * (_integers(theta, 1, m) < m)
    return factor * inner - 1


def chebyquad(theta: Tensor) -> Tensor:
    """Return the mean of T_i(x_j) over j minus the integral of T_i over [0, 1], i = 1..n, problem 35.

    T_i is the Chebyshev polynomial shifted to [0, 1]; its integral is 0 for i odd and -1/(i^2 - 1) for i
    even.
    """
    z = 2 * theta - 1
    twice = 2 * z  # not in the loop: under vmap torch takes a millisecond for a product with a number
    previous, current, means = torch.ones_like(z), z, []
    for _ in range(theta.shape[0]):
        means.append(current.mean())
        previous, current = current, twice * current - previous
    integrals = [-1 / (i**2 - 1) if i % 2 == 0 else 0.0 for i in range(1, theta.shape[0] + 1)]
    return torch.stack(means) - _like(theta, integrals)


# --- Helpers ------------------------------------------------------------------------------------------------


def _like(theta: Tensor, values: list[float] | tuple[float, ...]) -> Tensor:
    """Return constants with the dtype and device of theta."""
    return torch.tensor(values, dtype=theta.dtype, device=theta.device)


def _integers(theta: Tensor, first: int, last: int) -> Tensor:
    """Return first, ..., last (both included) with the dtype and device of theta."""
    return torch.arange(first, last + 1, dtype=theta.dtype, device=theta.device)


def _neighbours(theta: Tensor) -> tuple[Tensor, Tensor]:
    """Return (x_{i-1}) and (x_{i+1}) with x_0 = x_{n+1} = 0."""
    zero = theta.new_zeros(1)
    return torch.cat([zero, theta[:-1]]), torch.cat([theta[1:], zero])


# --- Data printed in the paper ------------------------------------------------------------------------------

PENALTY_WEIGHT = 1e-5  # the paper's a, problems 23 and 24

# fmt: off
BARD_Y = (0.14, 0.18, 0.22, 0.25, 0.29, 0.32, 0.35, 0.39, 0.37, 0.58, 0.73, 0.96, 1.34, 2.10, 4.39)
GAUSSIAN_Y = (0.0009, 0.0044, 0.0175, 0.0540, 0.1295, 0.2420, 0.3521, 0.3989,
              0.3521, 0.2420, 0.1295, 0.0540, 0.0175, 0.0044, 0.0009)
MEYER_Y = (34780.0, 28610.0, 23650.0, 19630.0, 16370.0, 13720.0, 11540.0, 9744.0,
           8261.0, 7030.0, 6005.0, 5147.0, 4427.0, 3820.0, 3307.0, 2872.0)
KOWALIK_OSBORNE_Y = (0.1957, 0.1947, 0.1735, 0.1600, 0.0844, 0.0627, 0.0456, 0.0342, 0.0323, 0.0235, 0.0246)
KOWALIK_OSBORNE_U = (4.0, 2.0, 1.0, 0.5, 0.25, 0.167, 0.125, 0.1, 0.0833, 0.0714, 0.0625)
OSBORNE_1_Y = (0.844, 0.908, 0.932, 0.936, 0.925, 0.908, 0.881, 0.850, 0.818, 0.784, 0.751,
               0.718, 0.685, 0.658, 0.628, 0.603, 0.580, 0.558, 0.538, 0.522, 0.506, 0.490,
               0.478, 0.467, 0.457, 0.448, 0.438, 0.431, 0.424, 0.420, 0.414, 0.411, 0.406)
OSBORNE_2_Y = (1.366, 1.191, 1.112, 1.013, 0.991, 0.885, 0.831, 0.847, 0.786, 0.725, 0.746, 0.679, 0.608,
               0.655, 0.616, 0.606, 0.602, 0.626, 0.651, 0.724, 0.649, 0.649, 0.694, 0.644, 0.624, 0.661,
               0.612, 0.558, 0.533, 0.495, 0.500, 0.423, 0.395, 0.375, 0.372, 0.391, 0.396, 0.405, 0.428,
               0.429, 0.523, 0.562, 0.607, 0.653, 0.672, 0.708, 0.633, 0.668, 0.645, 0.632, 0.591, 0.559,
               0.597, 0.625, 0.739, 0.710, 0.729, 0.720, 0.636, 0.581, 0.428, 0.292, 0.162, 0.098, 0.054)
# fmt: on
