"""Cases with bounds: tiny data (D5), a start on a bound (B1), an end on one (B4), odd bounds (B5), too few points (G4).

Each comment says what went wrong elsewhere and where; cases.py says what a case is.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from cases import Case, Expected, decay_to_level, line, noise, torch_decay_to_level, torch_line
from cases_numerical import G4, power_law, torch_power_law

# D5: data of size 1e-9. Jᵀr has the size of y², so a fixed gtol of 1e-8 was met by the start, which came back with
# success (StackOverflow, scipy#10767, #13873, NonlinearSolve.jl#1181). In other units of y a and c have to change by
# the unit and b not at all.

_x = np.linspace(0, 6, 25)
_y = (4.0 * np.exp(-0.7 * _x) + 1.0 + 0.03 * noise(25, 15)) * 1e-9
_params = np.array([4.0124973360058175e-09, 0.7146991684679166, 1.0172048298683962e-09])
_std = np.array([2.1538661059510087e-11, 0.009491511287801374, 1.2837554228467798e-11])
_expected = Expected(_params, 1e-5, _std, 1e-3, 1.854262903708958e-20)
D5 = Case(
    "D5",
    ("a", "b", "c"),
    decay_to_level,
    torch_decay_to_level,
    _x,
    _y,
    [1e-9, 1.0, 0.0],
    _expected,
    bounds=([0.0, 0.0, 0.0], [np.inf, 10.0, np.inf]),
)
for _unit in (1e-15, 1e9, 1e18):
    _scale = np.array([_unit, 1.0, _unit])
    D5.variants[f"y*{_unit:g}"] = dict(
        y=_y * _unit,
        p0=[1e-9 * _unit, 1.0, 0.0],
        expected=replace(_expected, params=_params * _scale, std=_std * _scale, rss=_expected.rss * _unit**2),
    )

# B1: a start exactly on a bound, the optimum inside. A scaling by the distance to the bound divided by zero, or the
# parameter never left its bound (scipy#19103, #19180, #19309, pahfit#301).

_x = np.linspace(0, 5, 18)
_y = np.round(2.2 * np.exp(-0.8 * _x) + 0.3 + 0.03 * noise(18, 41), 4)
_expected = Expected(
    params=[2.175031882275377, 0.8322708675797602, 0.33341858728323076],
    rtol=1e-5,
    std=[0.029293874566927603, 0.02838294946607675, 0.01856348433493591],
    rss=0.018318360338854357,
)
B1 = Case(
    "B1",
    ("a", "b", "c"),
    decay_to_level,
    torch_decay_to_level,
    _x,
    _y,
    [1.0, 0.0, 0.0],
    _expected,
    bounds=([0.0, 0.0, 0.0], [10.0, 10.0, 10.0]),
)
B1.variants.update({"upper": dict(p0=[10.0, 10.0, 10.0]), "mixed": dict(p0=[10.0, 0.0, 10.0])})

# B4: c0 ends on its bound of -2. The errors of m and c were those of a fit in which c0 is free, and larger than the
# values, or there was no covariance at all (StackOverflow 69317927, pyspeckit#338, lmfit#30).

_x = [1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55]
_y = [1.26, 1.24, 1.2, 1.17, 1.1, 1.01, 0.95, 0.84, 0.75, 0.71, 0.63]
B4 = Case(
    "B4",
    ("m", "c", "c0"),
    power_law,
    torch_power_law,
    np.array(_x),
    np.array(_y),
    [0.3, 1.0, 1.0],
    Expected(params=[0.3560989666661964, 3.249294220969188, -2.0], rtol=1e-4, rss=1.2003762748284754),
    bounds=([0.1, -2.0, -2.0], [0.9, 10.0, 2.0]),
    sigma=np.full(11, 0.078),
)
# Of m and c with c0 held on its bound: 11 points and 2 parameters, with relative and with absolute sigma.
B4_STD = [0.014442467753329516, 0.013719819326825474]
B4_STD_ABSOLUTE = [0.03954612727021029, 0.03756738325400449]

# B5: an upper bound of 0 (division by zero), equal bounds as a way to fix a value (crash), a start outside its bounds
# ("x0 is infeasible", without a name; or clipped in silence), crossed bounds (lmfit#207, #235, #171, scipy#11321).

_x, _y = np.arange(6.0), np.array([4.1, 2.3, 0.9, -1.2, -2.6, -4.4])
_centred = _x - _x.mean()
_slope = float(_centred @ _y / (_centred @ _centred))
B5 = Case(
    "B5",
    ("a", "b"),
    line,
    torch_line,
    _x,
    _y,
    [1.0, -1.0],
    Expected(params=[_y.mean() - _slope * _x.mean(), _slope], rtol=1e-7),
    bounds=([-np.inf, -5.0], [np.inf, 0.0]),
)
B5_EQUAL = replace(
    B5,
    p0=[1.0, -1.5],
    bounds=([-np.inf, -1.5], [np.inf, -1.5]),
    expected=Expected(params=[_y.mean() + 1.5 * _x.mean(), -1.5], rtol=1e-7),
)
B5_HITS_ZERO = replace(B5, y=-_y, expected=Expected(params=[-_y.mean(), 0.0], rtol=1e-7))

# G4 with bounds: three points, four parameters, none below 0 (scipy#13969, #14005). The best curve jumps from 1e-6 at
# x = 0 (b → ∞) to the line d·x/100 through the origin, d = Σxy/Σx²; b has no value, a and c share 1e-6.

_u = G4.x[1:] / 100
_rss = float(G4.y[1:] @ G4.y[1:] - (_u @ G4.y[1:]) ** 2 / (_u @ _u))
G4_BOUNDED = replace(
    G4,
    p0=[1.0, 1.0, 1.0, 1.0],
    bounds=([0.0, 0.0, 0.0, 0.0], [np.inf, np.inf, np.inf, np.inf]),
    expected=Expected(rss=_rss, rss_rtol=1e-6),
)
