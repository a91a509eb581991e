"""first draft"""

import math
import sys
import time
from dataclasses import dataclass
from functools import cache
from typing import Callable

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss


class Residual(nn.Module):
    """x + BatchNorm(conv(relu(BatchNorm(conv(x))))), then relu."""

    def __init__(self, width):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.second, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        inner = torch.relu(self.norm1(self.first(x)))
        return torch.relu(x + self.norm2(self.second(inner)))


def convolutional():
    layers = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def residual():
    stem = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*stem, Residual(16), Residual(16), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))


def perceptron():
    return nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


@cache
def digits():
    data = load_digits()
    return torch.tensor(data.images[:, None] / 16, dtype=torch.float32), torch.tensor(data.target)


@cache
def tabular(rows=20_000, features=24):
    draw = torch.Generator().manual_seed(0)
    normal = torch.randn(rows, 8, generator=draw, dtype=torch.float64)
    mixing = torch.randn(8, features, generator=draw, dtype=torch.float64) / 8**0.5
    latent = 0.7 * normal @ mixing + 0.7 * torch.randn(rows, features, generator=draw, dtype=torch.float64)
    u = torch.special.ndtr(latent)
    x = latent.clone()
    x[:, 8:14] = latent[:, 8:14].exp()  # long tails
    x[:, 14:18] = (4 * u[:, 14:18]).floor()  # counts
    x[:, 18:22] = (u[:, 18:22] > 0.95).double()  # rare events
    u = u - 0
    y = (
        10 * torch.sin(math.pi * u[:, 0] * u[:, 8]) + 20 * (u[:, 1] - 0.5).square() + 10 * u[:, 9] + 5 * u[:, 2]
        + 6 * x[:, 18] * latent[:, 3] + 3 * torch.sin(2 * latent[:, 10]) * u[:, 14] + 2 * latent[:, 4] * latent[:, 5]
    )
    y = (y - y.mean()) / y.std() + 0.1 * torch.randn(rows, generator=draw, dtype=torch.float64)
    x = (x - x.mean(0)) / x.std(0)
    return x.float(), y[:, None].float()


@dataclass(frozen=True)
class Task:
    name: str
    network: Callable
    data: Callable
    loss: Callable
    batch: int
    goal: float
    looks: int = 2

    def start(self, seed):
        torch.manual_seed(seed)
        return self.network()


TASKS = {
    "convolutional": Task("convolutional", convolutional, digits, cross_entropy, 64, 0.003),
    "residual": Task("residual", residual, digits, cross_entropy, 64, 0.0003),
    "tabular": Task("tabular", perceptron, tabular, mse_loss, 256, 0.03),
}


def run(task, seed, make, most=30, trace=None):
    model = task.start(seed)
    x, y = task.data()
    opt = make(model)
    draw = torch.Generator().manual_seed(seed)
    seconds, drawn, looked = 0.0, 0, 0
    while drawn < most * len(y):
        for rows in torch.randperm(len(y), generator=draw)[: len(y) // task.batch * task.batch].split(task.batch):
            a, b = x[rows], y[rows]
            begun = time.process_time()
            opt.zero_grad()
            task.loss(model(a), b).backward()
            opt.step()
            seconds += time.process_time() - begun
            drawn += len(rows)
            if task.looks * drawn // len(y) > looked:
                looked = task.looks * drawn // len(y)
                with torch.no_grad():
                    value = float(task.loss(model(x), y))
                if trace is not None:
                    trace.append((drawn / len(y), seconds, value))
                if not math.isfinite(value):
                    return math.inf, seconds
                if value <= task.goal:
                    return drawn / len(y), seconds
    return math.inf, seconds


class Reached(Exception):
    pass


def run_lbfgs(task, seed, most=100, trace=None, **options):
    model = task.start(seed)
    x, y = task.data()
    opt = torch.optim.LBFGS(model.parameters(), max_iter=10**6, max_eval=10**6, line_search_fn="strong_wolfe", tolerance_change=0, tolerance_grad=0, **options)
    n = 0
    begun = time.process_time()

    def closure():
        nonlocal n
        opt.zero_grad()
        value = task.loss(model(x), y)
        value.backward()
        n += 1
        if trace is not None:
            trace.append((n, time.process_time() - begun, float(value)))
        if value <= task.goal or n >= most:
            raise Reached
        return value

    try:
        opt.step(closure)
    except Reached:
        pass
    return n, time.process_time() - begun
