"""Cases about what users hand over: shapes (S), size (L), torch modules and residual functions (T), scikit-learn (K).

Each comment says what went wrong elsewhere and where; cases.py says what a case is.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from cases import (
    Case,
    Expected,
    decay,
    decay_to_level,
    line,
    noise,
    torch_decay,
    torch_decay_to_level,
    torch_line,
)

# Shapes and containers.

# S1: y as a column: (m,) − (m, 1) broadcasts to (m, m), and the "fit" is slope 0 and the mean (skorch#728, scipy#7018).

_x = np.linspace(0, 4, 12)
_y = np.round(0.7 + 1.6 * _x + 0.1 * noise(12, 71), 3)
_expected = Expected(
    params=[0.6473333333333334, 1.627375],
    rtol=1e-7,
    std=[0.03903997289054492, 0.016533224610633005],
    std_rtol=1e-5,
    rss=0.05168753030303028,
)
S1 = Case("S1", ("a", "b"), line, torch_line, _x, _y, [0.0, 0.0], _expected)


class LinearModule(torch.nn.Module):
    """The line of S1 as a module that returns a column, (m, 1); parameters lin.weight (slope) and lin.bias."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(1, 1, dtype=torch.float64)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        return self.lin(X)


# S2: pandas aligned X and y by index: y came back in reverse order, or all NaN (lifelines#1215, scipy#16162).

_x = np.arange(10.0)
_expected = Expected(
    params=[1.8096909090909092, 0.5255575757575758],
    rtol=1e-7,
    std=[0.05309988612356983, 0.009946519987987835],
    std_rtol=1e-5,
    rss=0.06529595151515141,
)
_y = np.round(2.0 + 0.5 * _x + 0.2 * noise(10, 72), 3)
S2 = Case("S2", ("a", "b"), line, torch_line, _x, _y, [0.0, 0.0], _expected)
S2_X_INDEX, S2_Y_INDEX = range(30, 40), range(39, 29, -1)

# S4: complex data were cast to real; half the data lost and the phase not determined (lmfit#185, #900, hyperspy#2194).


def low_pass(x, A, ph, w):
    return A * np.exp(1j * ph) / (1 + 1j * x / w)


def torch_low_pass(x, A, ph, w):
    return A * torch.exp(1j * ph) / (1 + 1j * x / w)


_x, _noise = np.linspace(0.1, 6, 16), noise(32, 74)
_y = 2.0 * np.exp(0.4j) / (1 + 1j * _x / 1.7) + 0.02 * (_noise[:16] + 1j * _noise[16:])
_expected = Expected(  # real and imaginary parts stacked: 32 residuals
    params=[1.9642050116365768, 0.38448782756960875, 1.7484138134648302],
    rtol=1e-6,
    std=[0.013375014498166663, 0.006430430356891861, 0.023132088750862787],
    std_rtol=1e-4,
    rss=0.013936285730307424,
)
S4 = Case("S4", ("A", "ph", "w"), low_pass, torch_low_pass, _x, _y, [1.0, 0.0, 1.0], _expected)

# S5: the number of parameters was read from model.__code__, which only plain functions have (jaxfit#2, scipy#6142).


def slope_first(x, m, b):
    return m * x + b


def torch_slope_first(x, m, b):
    return torch.mul(m, x) + b


_x = np.arange(11.0)
_y = 2.0 * _x + np.array([0.1, -0.1, 0.2, 0.0, -0.2, 0.1, 0.1, -0.1, 0.0, 0.2, -0.3])
_expected = Expected(
    params=[1.988181818181818, 0.0590909090909092],
    rtol=1e-7,
    std=[0.01571965133253689, 0.09299871144579644],
    std_rtol=1e-5,
    rss=0.2446363636363636,
)
S5 = Case("S5", ("m", "b"), slope_first, torch_slope_first, _x, _y, [1.0, 1.0], _expected)

# L3: 10⁶ points. A full weight matrix exhausted memory; float32 sums over 10⁶ terms lost the digits
# (jwst#4683, jaxopt#587).

_n_points = 1_000_000
_i = np.arange(_n_points, dtype=float)
_x = 10 * (_i + 0.5) / _n_points
_y = 5.0 * np.exp(-0.4 * _x) + 1.0 + (np.mod(_i * 0.6180339887498949, 1.0) - 0.5)
_expected = Expected(
    params=[4.99999212973175, 0.39999927677347613, 0.9999998314976717],
    rtol=1e-7,
    std=[0.0011743023363000402, 0.0002382524299604966, 0.0007234776530726363],
    std_rtol=1e-4,
    rss=83333.33936949536,
)
L3 = Case("L3", ("a", "b", "c"), decay_to_level, torch_decay_to_level, _x, _y, [1.0, 1.0, 0.0], _expected)
L3.variants["float32"] = dict(
    x=_x.astype(np.float32),
    y=_y.astype(np.float32),
    expected=replace(_expected, rtol=1e-4, std_rtol=1e-3, rss_rtol=1e-4),
)

# Torch modules and residual functions.

# T1: a parameter with requires_grad=False was updated, or counted in J and in m − n (torch-levenberg-marquardt#5).


def slope_only(x, s):
    return 0.5 + s * x


def torch_slope_only(x, s):
    return 0.5 + torch.mul(s, x)


class FrozenIntercept(torch.nn.Module):
    """The line of T1 as a module with a fixed intercept; both parameters are 0-dimensional."""

    def __init__(self) -> None:
        super().__init__()
        self.intercept = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64), requires_grad=False)
        self.slope = torch.nn.Parameter(torch.tensor(0.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.intercept + self.slope * x


_x = np.linspace(0, 5, 20)
_y = np.round(0.5 + 1.3 * _x + 0.2 * noise(20, 91), 4)
_expected = Expected([1.2969072307692309], 1e-7, [0.015424927740210623], 1e-5, 0.7732672863198373)
T1 = Case("T1", ("s",), slope_only, torch_slope_only, _x, _y, [0.0], _expected)

# T2: 31 parameters on 8 points. JᵀJ has rank 8; without damping the solve fails, in float32 almost always
# (tf-levenberg-marquardt#4, neupy#258, optimistix#124). A perfect fit exists.

T2_HIDDEN = 10


def tanh_net(x, *weights):
    w = np.asarray(weights)
    hidden = np.tanh(np.multiply.outer(x, w[:T2_HIDDEN]) + w[T2_HIDDEN : 2 * T2_HIDDEN])
    return hidden @ w[2 * T2_HIDDEN : 3 * T2_HIDDEN] + w[3 * T2_HIDDEN]


def torch_tanh_net(x, *weights):
    w = weights
    units = [w[2 * T2_HIDDEN + k] * torch.tanh(x * w[k] + w[T2_HIDDEN + k]) for k in range(T2_HIDDEN)]
    return sum(units) + w[3 * T2_HIDDEN]


def tanh_net_module() -> torch.nn.Module:
    """Return the net of T2 as a float64 module whose weights are the start of T2."""
    net = torch.nn.Sequential(torch.nn.Linear(1, T2_HIDDEN), torch.nn.Tanh(), torch.nn.Linear(T2_HIDDEN, 1)).double()
    torch.nn.utils.vector_to_parameters(torch.as_tensor(T2.p0), net.parameters())
    return net


_names = tuple(f"p{k}" for k in range(3 * T2_HIDDEN + 1))
_y = np.array([0.1, -0.6, 0.3, 0.9, -0.2, -0.8, 0.4, 0.7])
_start, _expected = 0.8 * noise(3 * T2_HIDDEN + 1, 92), Expected(rss=0.0, rss_atol=1e-10)
T2 = Case("T2", _names, tanh_net, torch_tanh_net, np.linspace(-1, 1, 8), _y, _start, _expected)

# T3: batch statistics were updated once per trial, and every evaluation saw another dropout mask (functorch#867, #273).
# BatchNorm with fixed statistics, then Linear, is affine in X: the best fit is ordinary least squares.

T3_X = np.stack([2 + 3 * noise(16, 93), -1 + 0.5 * noise(16, 94)], 1)
T3_Y = np.round(0.4 + 1.2 * T3_X[:, 0] - 2.0 * T3_X[:, 1] + 0.1 * noise(16, 95), 4)
_design = np.column_stack([np.ones(16), T3_X])
_fitted = _design @ np.linalg.lstsq(_design, T3_Y, rcond=None)[0]
T3_EXPECTED = Expected(predict=_fitted, predict_rtol=1e-4, predict_atol=1e-5)


def batch_norm_net() -> torch.nn.Module:
    """Return BatchNorm and Linear in train mode, with running statistics from one pass over X."""
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)).double()
    net(torch.as_tensor(T3_X))
    return net


def dropout_net() -> torch.nn.Module:
    """Return a 2-20-1 tanh net with 30 % dropout in train mode; 81 parameters for 16 points."""
    torch.manual_seed(4)
    layers = torch.nn.Linear(2, 20), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(20, 1)
    return torch.nn.Sequential(*layers).double()


# T5: deviance residuals of Poisson counts. Where y = mu (three rows at the start) the derivative of sqrt(deviance) is
# 0/0 = NaN although its limit is finite; zero counts give log(0) (Gpufit#45, pytorch#16317, theseus#654).

T5_X, T5_Y, T5_START = np.arange(10.0), np.array([1, 0, 2, 1, 3, 1, 4, 4, 6, 7]), np.zeros(2)
T5_EXPECTED = Expected([-0.384473856076165, 0.26228019176793843], rss=4.4955198808863335, rss_rtol=1e-8)


def poisson_mean(theta, X):
    return np.exp(theta[0] + theta[1] * X.ravel())


def deviance_residual(theta, X, y):
    mu = poisson_mean(theta, X)
    y_log_ratio = np.where(y > 0, y * np.log(np.where(y > 0, y, 1) / mu), 0.0)
    return np.sign(y - mu) * np.sqrt(np.maximum(2 * (y_log_ratio - (y - mu)), 0))


def torch_deviance_residual(theta, X, y):
    mu = torch.exp(theta[0] + theta[1] * X.ravel())
    deviance = 2 * (torch.xlogy(y, y / mu) - (y - mu))
    return torch.sign(y - mu) * torch.sqrt(deviance.clamp_min(0))


# T7: the mean squared error as "residual": J has one row, vanishes at the optimum and nothing moves (optimistix#124).

_x = np.linspace(0, 2, 10)
_y = 1.0 + 0.5 * _x + np.array([0.02, -0.01, 0.03, -0.02, 0.0, 0.01, -0.03, 0.02, 0.0, -0.02])
_expected = Expected(
    params=[1.009818181818182, 0.49018181818181816],
    rtol=1e-7,
    std=[0.011768426732940806, 0.009919927352439961],
    std_rtol=1e-5,
    rss=0.003207272727272745,
)
T7 = Case("T7", ("a", "b"), line, torch_line, _x, _y, [0.0, 0.0], _expected)


def line_residual(theta, X, y):
    return theta[0] + theta[1] * X.ravel() - y


def torch_line_residual(theta, X, y):
    return theta[0] + torch.mul(theta[1], X.ravel()) - y


def mean_squared_error(theta, X, y):
    return np.atleast_1d(np.mean(line_residual(theta, X, y) ** 2))


def torch_mean_squared_error(theta, X, y):
    return torch.atleast_1d(torch.mean(torch_line_residual(theta, X, y) ** 2))


# The scikit-learn protocol.

# K1: a module given to the constructor was trained in place, so that the next fit, clone or fold started from fitted
# weights (skorch#1073, #689, #317, scikit-learn#15722).


class DecayModule(torch.nn.Module):
    """The decay of K1 as a module, a = b = 1 at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.b = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a * torch.exp(-self.b * x)


_x = np.linspace(0, 4, 16)
_expected = Expected(
    params=[2.9872778562219864, 0.5962979759018869],
    rtol=1e-6,
    std=[0.0481093643048905, 0.015688483397926344],
    std_rtol=1e-4,
    rss=0.0654600327483952,
)
_y = np.round(3.0 * np.exp(-0.6 * _x) + 0.05 * noise(16, 98), 4)
K1 = Case("K1", ("a", "b"), decay, torch_decay, _x, _y, [1.0, 1.0], _expected)
K1_FOLDS = [(np.arange(8, 16), np.arange(0, 8)), (np.arange(0, 8), np.arange(8, 16))]  # (train, test)
K1_FOLD_PARAMS = [
    [2.9240134491682377, 0.5937289145221089],
    [2.9770713608481247, 0.58772544914824],
]  # of train
K1_FOLD_R2 = [0.9893387865950123, 0.8609838421131208]  # on test

# K3: a scaler hands on float64 columns, a module expects float32: dtype or shape errors (skorch#518, #824).


def growth(x, a, b):
    return a * np.exp(b * x)


def torch_growth(x, a, b):
    return a * torch.exp(b * x)


class GrowthModule(torch.nn.Module):
    """The model of K3 as a float32 module that starts at the start for scaled x."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(K3_SCALED_START[0]))
        self.b = torch.nn.Parameter(torch.tensor(K3_SCALED_START[1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a * torch.exp(self.b * x)


_x = np.linspace(100, 130, 16)
_y = np.round(50.0 * np.exp(-0.08 * (_x - 100)) + 0.4 * noise(16, 100), 3)
_fitted = [49.804688471201686, 42.454423966529966, 36.18892457026512, 30.848098718400422, 26.29548144467577]
_fitted += [22.41474752526144, 19.106739219750754, 16.28693266342306, 13.88327817384304, 11.834359288853175]
_fitted += [10.08782349701328, 8.599044563633038, 7.3299822731077375, 6.248210452507946, 5.326088441176753]
_fitted += [4.540054836317237]
_expected = Expected(
    params=[146094.54253811706, -0.07983900117143106],
    rtol=1e-4,
    std=[9764.90872594677, 0.0006348965984011585],
    rss=1.660713714102512,
    predict=_fitted,
    predict_rtol=1e-6,
)
_start = np.array([40.0 * math.exp(0.05 * _x.mean()), -0.05])
K3 = Case("K3", ("a", "b"), growth, torch_growth, _x, _y, _start, _expected)
K3_SCALED_START = [20.0, -0.5]
