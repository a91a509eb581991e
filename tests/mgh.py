"""The Moré-Garbow-Hillstrom nonlinear least-squares problems: starts, residuals, published minima.

Problem solved by each entry: minimise F(theta) = sum_{i=1}^m r_i(theta)^2 over theta in R^n. Note that F
carries no factor 1/2. The residuals r are in `mgh_residuals.py`; numbers, dimensions, starts and minima are
those of the paper, section 3. Where the paper leaves n or m open, the value taken is one for which it
prints a minimum, or one common in later collections (n = 10, Gulf m = 99).

References
----------
Moré, J. J., Garbow, B. S. and Hillstrom, K. E. (1981). "Testing Unconstrained Optimization Software." ACM
Transactions on Mathematical Software 7(1), 17-41. doi:10.1145/355934.355936
Kuntsevich, A. and Kappel, F. (1997). "Moré set of test functions." Manual and test set of SolvOpt, University
of Graz. https://imsc.uni-graz.at/kuntsevich/solvopt/results/moreset.html (local minima; "Kuntsevich" in
`notes`)

Notes
-----
"SciPy" in `notes` marks a value that no source above prints: `scipy.optimize.least_squares` reached it, with
a gradient cosine under 1e-6 and a positive semidefinite Hessian (local), or approached it while theta
diverged (limit).
"""

from collections.abc import Callable
from dataclasses import dataclass

import mgh_residuals as mgh
import torch
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """State one least-squares test problem.

    Parameters
    ----------
    name : str
        Key in `PROBLEMS`.
    number : int
        Number in section 3 of the paper.
    n, m : int
        Parameters and residuals.
    start : tuple of float, length n
        The paper's standard start x0.
    residual : callable
        Maps theta (n,) to r (m,); works under autograd and `torch.func` (jvp, jacfwd, vmap).
    minima : tuple of float
        Values of F. First the lowest one in the paper, then the other values known, local or "at infinity" (a
        limit approached as theta diverges); `notes` says which is which. The list is not complete, and for
        Chebyquad n = 10 a later value is lower than the paper's. The paper truncates to six digits (the
        17.4286 of Bard is 17.42869...), so compare with a relative tolerance of 1e-5.
    notes : str
        Where the minima lie, who published those the paper does not have, what 10 x0 does.
    """

    name: str
    number: int
    n: int
    m: int
    start: tuple[float, ...]
    residual: Callable[[Tensor], Tensor]
    minima: tuple[float, ...]
    notes: str = ""


def starts(problem: Problem) -> list[Tensor]:
    """Return the starts [x0, 10 x0] as float64 tensors of shape (n,).

    Notes
    -----
    Where x0 = 0 (Watson) the second start is the vector of ones, as 10 x0 would repeat the first. No r, F or
    gradient overflows in float64 at these starts; at 100 x0, which the paper takes too, the F of Jennrich and
    Sampson does (exp(400) squared).
    """
    x0 = torch.tensor(problem.start, dtype=torch.float64)
    return [x0, 10 * x0 if torch.any(x0 != 0) else torch.ones_like(x0)]


def _ramp(n: int, first: float, step: float) -> tuple[float, ...]:
    """Return (first, first + step, ...) of length n."""
    return tuple(first + step * k for k in range(n))


def _grid(n: int) -> tuple[float, ...]:
    """Return j / (n + 1) for j = 1..n."""
    return tuple(j / (n + 1) for j in range(1, n + 1))


_ROSENBROCK, _SINGULAR = (-1.2, 1.0), (3.0, -1.0, 0.0, 1.0)
_INTERIOR = tuple(t * (t - 1) for t in _grid(10))  # start of problems 28 and 29

# One problem a row: name, number, n, m, start, residual, minima, notes.
# fmt: off
_CATALOGUE = (
    Problem("rosenbrock", 1, 2, 2, _ROSENBROCK, mgh.rosenbrock, (0.0,), "At (1, 1)."),
    Problem("freudenstein_roth", 2, 2, 2, (0.5, -2.0), mgh.freudenstein_roth, (0.0, 48.9842),
            "0 at (5, 4); local 48.9842 at (11.41, -0.8968)."),
    Problem("powell_badly_scaled", 3, 2, 2, (0.0, 1.0), mgh.powell_badly_scaled, (0.0, 1e-8),
            "0 at (1.098e-5, 9.106). Limit (1e-4)^2 on x1 x2 = 1e-4, x2 -> inf: solvers creep there from "
            "10 x0."),
    Problem("brown_badly_scaled", 4, 2, 3, (1.0, 1.0), mgh.brown_badly_scaled, (0.0,), "At (1e6, 2e-6)."),
    Problem("beale", 5, 2, 3, (1.0, 1.0), mgh.beale, (0.0, 14.203125 - 13.875**2 / 14),
            "0 at (3, 0.5). Limit 0.452009: x2 -> 1, x1 -> -inf with x1 (1 - x2) = c gives r_i = y_i - ic, "
            "least at c = 13.875/14 (SciPy from 10 x0)."),
    Problem("jennrich_sampson", 6, 2, 10, (0.3, 0.4), mgh.jennrich_sampson, (124.362, 259.58019),
            "124.362 at x1 = x2 = 0.2578; 259.58019 as one parameter -> -inf, the other 0.331485 "
            "(Kuntsevich). F(10 x0) = 5.5e34 is finite in float64, close to the largest float32."),
    Problem("helical_valley", 7, 3, 3, (-1.0, 0.0, 0.0), mgh.helical_valley, (0.0,), "At (1, 0, 0)."),
    Problem("bard", 8, 3, 15, (1.0, 1.0, 1.0), mgh.bard, (8.21487e-3, 17.4286),
            "17.4286 at (0.8406, -inf, -inf). Denominators change sign where x2 x3 < 0; more local minima "
            "there."),
    Problem("gaussian", 9, 3, 15, (0.4, 1.0, 0.0), mgh.gaussian, (1.12793e-8,)),
    Problem("meyer", 10, 3, 16, (0.02, 4000.0, 250.0), mgh.meyer, (87.9458,),
            "At (0.005610, 6181.3, 345.22). From 10 x0 MINPACK's lm needs about 1800 evaluations."),
    Problem("gulf", 11, 3, 99, (5.0, 2.5, 0.15), mgh.gulf, (0.0,),
            "At (50, 25, 1.5), which is 10 x0. Where the model vanishes lies a plateau, F = sum t_i^2 = "
            "32.835."),
    Problem("box_3d", 12, 3, 10, (0.0, 10.0, 20.0), mgh.box_3d, (0.0, 7.558874e-2),
            "0 at (1, 10, 1), (10, 1, -1) and x1 = x2, x3 = 0. Limit 0.0755887 at (0.6136, inf, 1.320) "
            "(SciPy from 10 x0)."),
    Problem("powell_singular", 13, 4, 4, _SINGULAR, mgh.powell_singular, (0.0,),
            "At 0, where J is singular."),
    Problem("wood", 14, 4, 6, (-3.0, -1.0, -3.0, -1.0), mgh.wood, (0.0,), "At (1, 1, 1, 1)."),
    Problem("kowalik_osborne", 15, 4, 11, (0.25, 0.39, 0.415, 0.39), mgh.kowalik_osborne,
            (3.07505e-4, 1.02734e-3),
            "1.02734e-3 at (inf, -14.07, -inf, -inf). A denominator can vanish: SciPy's trf from 10 x0 "
            "stops at a 0/0 point, x2 = -u_4, F = 5.592e-4, which is no minimum."),
    Problem("brown_dennis", 16, 4, 20, (25.0, 5.0, -5.0, -1.0), mgh.brown_dennis, (85822.2,)),
    Problem("osborne_1", 17, 5, 33, (0.5, 1.5, -1.0, 0.01, 0.02), mgh.osborne_1, (5.46489e-5, 7.98032e-5),
            "7.98032e-5 as x4 - x5 -> 0, x2 = -x3 -> -inf (SciPy's dogbox from 10 x0)."),
    Problem("biggs_exp6", 18, 6, 13, (1.0, 2.0, 1.0, 1.0, 1.0, 1.0), mgh.biggs_exp6,
            (0.0, 5.65565e-3, 0.306366773),
            "0 at (1, 10, 1, 5, 4, 3) and (4, 10, 3, 5, 1, 1); 5.65565e-3 where two terms merge (x1 = x5 = "
            "1.71142, x3 + x6 = 2.32629) or one escapes; 0.306366773 at x1 = x5 = 1.22756, x2 -> inf "
            "(Kuntsevich)."),
    Problem("osborne_2", 19, 11, 65, (1.3, 0.65, 0.65, 0.7, 0.6, 3.0, 5.0, 7.0, 2.0, 4.5, 5.5), mgh.osborne_2,
            (4.01377e-2, 1.789813587),
            "1.789813587 where the three peaks are flat or off the data (Kuntsevich); so from 10 x0."),
    Problem("watson_6", 20, 6, 31, (0.0,) * 6, mgh.watson, (2.28767e-3,)),
    Problem("watson_9", 20, 9, 31, (0.0,) * 9, mgh.watson, (1.39976e-6,)),
    Problem("watson_12", 20, 12, 31, (0.0,) * 12, mgh.watson, (4.72238e-10,)),
    Problem("extended_rosenbrock", 21, 10, 10, _ROSENBROCK * 5, mgh.extended_rosenbrock, (0.0,),
            "At (1, ..., 1)."),
    Problem("extended_powell_singular", 22, 12, 12, _SINGULAR * 3, mgh.extended_powell_singular, (0.0,),
            "At 0."),
    Problem("penalty_1_4", 23, 4, 5, _ramp(4, 1.0, 1.0), mgh.penalty_1, (2.24997e-5,)),
    Problem("penalty_1_10", 23, 10, 11, _ramp(10, 1.0, 1.0), mgh.penalty_1, (7.08765e-5,)),
    Problem("penalty_2_4", 24, 4, 8, (0.5,) * 4, mgh.penalty_2, (9.37629e-6,)),
    Problem("penalty_2_10", 24, 10, 20, (0.5,) * 10, mgh.penalty_2, (2.93660e-4,)),
    Problem("variably_dimensioned", 25, 10, 12, tuple(1 - j / 10 for j in range(1, 11)),
            mgh.variably_dimensioned, (0.0,), "At (1, ..., 1)."),
    Problem("trigonometric", 26, 10, 10, (0.1,) * 10, mgh.trigonometric,
            (0.0, 2.79506e-5, 4.21863e-5, 8.78823e-4),
            "0 also at 0. Local 2.79506e-5 (Kuntsevich) from x0 and 10 x0; the last two are SciPy's."),
    Problem("brown_almost_linear", 27, 10, 10, (0.5,) * 10, mgh.brown_almost_linear, (0.0, 1.0),
            "0 at (a, ..., a, a^(1-n)) with n a^n - (n + 1) a^(n-1) + 1 = 0: a = 1 and a = 0.979430. The "
            "paper's 1 at (0, ..., 0, n + 1), where J is singular."),
    Problem("discrete_boundary_value", 28, 10, 10, _INTERIOR, mgh.discrete_boundary_value, (0.0,)),
    Problem("discrete_integral_equation", 29, 10, 10, _INTERIOR, mgh.discrete_integral_equation, (0.0,),
            "The same theta as problem 28 to 5 digits: both discretise one differential equation."),
    Problem("broyden_tridiagonal", 30, 10, 10, (-1.0,) * 10, mgh.broyden_tridiagonal, (0.0,),
            "Many local minima (Kuntsevich lists six, 0.397 to 1.36); none met from x0 or 10 x0."),
    Problem("broyden_banded", 31, 10, 10, (-1.0,) * 10, mgh.broyden_banded, (0.0,)),
    Problem("linear_full_rank", 32, 5, 10, (1.0,) * 5, mgh.linear_full_rank, (5.0,),
            "m - n, at (-1, ..., -1)."),
    Problem("linear_rank_1", 33, 5, 10, (1.0,) * 5, mgh.linear_rank_1, (15 / 7,),
            "m (m - 1) / (2 (2m + 1)) wherever sum j x_j = 3 / (2m + 1)."),
    Problem("linear_rank_1_zero", 34, 5, 10, (1.0,) * 5, mgh.linear_rank_1_zero, (62 / 17,),
            "(m^2 + 3m - 6) / (2 (2m - 3)) wherever sum_{j=2..n-1} j x_j = 3 / (2m - 3); x1 and xn are "
            "free."),
    Problem("chebyquad_8", 35, 8, 8, _grid(8), mgh.chebyquad, (3.51687e-3,),
            "F(10 x0) = 2e22: there MINPACK's lm is still at 4e7 after 6000 evaluations. So for n = 9, 10."),
    Problem("chebyquad_9", 35, 9, 9, _grid(9), mgh.chebyquad, (0.0,), "F(10 x0) = 2e25."),
    Problem("chebyquad_10", 35, 10, 10, _grid(10), mgh.chebyquad, (6.50395e-3, 4.77271e-3),
            "6.50395e-3 from x0 is local; 4.77271e-3 is lower (SciPy, random starts). F(10 x0) = 3e28."),
)
# fmt: on

PROBLEMS: dict[str, Problem] = {problem.name: problem for problem in _CATALOGUE}
