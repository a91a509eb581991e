"""Cases with errors of the data, or gaps in them: sigma (W1, W3, W4, G3, G6), NaN and inf (N4).

Each comment says what went wrong elsewhere and where; cases.py says what a case is.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from cases import Case, Expected, decay, line, noise, torch_decay, torch_line
from cases_interface import growth, torch_growth
from cases_numerical import G3, G6

# W1: weights were applied twice, or the residual variance was left out (standard errors 13 orders of magnitude too
# small), or absolute errors were taken for relative ones (LsqFit.jl#103, #85, #70, scipy#12584).


def air_mass(x, a, b):
    return a / np.cos(x * np.pi / 180) + b


def torch_air_mass(x, a, b):
    return a / torch.cos(x * np.pi / 180) + b


_x = np.arange(0, 55, 5.0)
_y = [1.54378, 1.54341, 1.55381, 1.54877, 1.55381, 1.56225, 1.56568, 1.56822, 1.58282, 1.60016, 1.62545]
_sigma = [1.0376, 1.05538, 1.82407, 2.07246, 1.65643, 1.76996, 1.75132, 2.05185, 1.28095, 1.07386, 1.9007]
_y, _sigma = 1e-5 * np.array(_y), 1e-7 * np.array(_sigma)
_params, _rss = [1.3608774866017403e-06, 1.408176487328835e-05], 0.4684178200333029
_absolute = Expected(_params, 1e-6, [2.4038390026600503e-07, 2.829232824215919e-07], 1e-4, _rss)
_relative = replace(_absolute, std=[5.484042691442152e-08, 6.454522775801622e-08])
W1 = Case(
    "W1",
    ("a", "b"),
    air_mass,
    torch_air_mass,
    _x,
    _y,
    [0.0, 0.0],
    _absolute,
    sigma=_sigma,
    absolute_sigma=True,
)
W1.variants.update(
    {
        "relative": dict(absolute_sigma=False, expected=_relative),
        "10 sigma": dict(
            sigma=10 * _sigma, expected=replace(_absolute, std=10 * np.array(_absolute.std), rss=_rss / 100)
        ),
        "10 sigma relative": dict(sigma=10 * _sigma, absolute_sigma=False, expected=replace(_relative, rss=_rss / 100)),
        "no sigma": dict(
            sigma=None,
            absolute_sigma=False,
            expected=Expected(
                params=[1.365455936703589e-06, 1.408220225726628e-05],
                rtol=1e-6,
                std=[6.899145801091248e-08, 8.165418175146673e-08],
                std_rtol=1e-4,
            ),
        ),
    }
)

# W3: correlated errors were ignored, or the matrix was used as if it were its Cholesky factor (scipy#6493, #22377).
# Of the diagonal alone come other parameters: [2.39922, 0.54147].

_x, _index = np.linspace(0, 4, 15), np.arange(15)
_y = np.round(2.4 * np.exp(-0.55 * _x) + 0.08 * np.convolve(noise(17, 21), [0.7, 0.5, 0.3], "valid"), 5)
_absolute = Expected(
    params=[2.3897881395099714, 0.5395611425299076],
    rtol=1e-6,
    std=[0.07734975264902011, 0.032901315197302085],
    std_rtol=1e-4,
    rss=11.105468863417705,
)
W3 = Case(
    "W3",
    ("a", "b"),
    decay,
    torch_decay,
    _x,
    _y,
    [1.0, 1.0],
    _absolute,
    sigma=0.08**2 * 0.6 ** np.abs(np.subtract.outer(_index, _index)),
    absolute_sigma=True,
)
_relative = replace(_absolute, std=[0.07149171287671564, 0.03040955269792501])
W3.variants["relative"] = dict(absolute_sigma=False, expected=_relative)

# W4: a zero error bar (an empty bin of a histogram) has weight inf: nonsense, and a message that did not name sigma
# (scipp#2540, astropy#15215, #17870).

_y = np.array([0.9, 3.2, 4.8, 7.1, 9.2, 10.9, 13.1, 14.8])
_expected = Expected(
    params=[1.0333333333333332, 1.9904761904761905],
    rtol=1e-8,
    std=[0.3227486121839514, 0.07715167498104596],
    std_rtol=1e-5,
    rss=0.7847619047619023,
)
W4 = Case(
    "W4",
    ("a", "b"),
    line,
    torch_line,
    np.arange(8.0),
    _y,
    [0.0, 0.0],
    _expected,
    sigma=np.full(8, 0.5),
    absolute_sigma=True,
)
W4.variants["scalar"] = dict(sigma=0.5)
W4_BAD_SIGMA = {
    "zero": np.array([0.5, 0.5, 0.5, 0.0, 0.5, 0.5, 0.5, 0.5]),
    "nan": np.array([0.5, 0.5, np.nan, 0.5, 0.5, 0.5, 0.5, 0.5]),
    "inf": np.array([0.5, 0.5, np.inf, 0.5, 0.5, 0.5, 0.5, 0.5]),
    "negative": np.array([0.5, -0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]),
    "wrong length": np.full(7, 0.5),
    "scalar zero": 0.0,
    "scalar negative": -0.5,
}

# G3 and G6 with absolute errors: nothing is divided by m − n or by rss then, so both have standard errors.

_J = np.array([[350 * 48, 48], [380 * 17, 17.0]])  # of G3, whose curve goes through both points
_std = np.sqrt(np.diag(np.linalg.inv(_J.T @ _J)))
G3_ABSOLUTE = replace(
    G3, sigma=np.ones(2), absolute_sigma=True, expected=replace(G3.expected, std=_std, std_rtol=1e-6), variants={}
)
_std = [0.10593882173175653, 0.1352198067856332, 0.05884062672173334]  # 0.1·sqrt(diag (JᵀJ)⁻¹) in 40 digits
_expected = replace(G6.expected, std=_std, std_rtol=1e-4, rss_atol=1e-18)  # rss in units of sigma: 100 times as large
G6_ABSOLUTE = replace(G6, sigma=0.1, absolute_sigma=True, expected=_expected, variants={})
G6_ABSOLUTE.variants["array"] = dict(sigma=np.full(9, 0.1))

# N4: NaN went to the solver, which stopped at once and returned the start; or rows were left out of the residual but
# not of J (lmfit#480, #482, #385, scipy#3923, astropy#12809).

_x = np.linspace(0, 3, 16)
_y = np.round(1.5 * np.exp(0.6 * _x) + 0.05 * noise(16, 54), 4)
_y[[3, 11]] = np.nan
_y[7] = np.inf
_x[13] = np.nan
_expected = Expected(  # of the 12 finite rows
    params=[1.4910699747653033, 0.6020204978329561],
    rtol=1e-6,
    std=[0.010140908925446926, 0.002744944269639892],
    std_rtol=1e-4,
    rss=0.010879203389212593,
)
N4 = Case("N4", ("a", "b"), growth, torch_growth, _x, _y, [1.0, 1.0], _expected)
N4_BAD_ROWS_OF_Y, N4_BAD_ROW_OF_X = (3, 7, 11), 13
N4_KEEP = np.isfinite(_x) & np.isfinite(_y)
