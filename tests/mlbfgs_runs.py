"""Short runs of MLBFGS that its tests share: a small network, batches that differ, parameters as one vector."""

import functools

import torch

from lmfit_gpu import MLBFGS

F64 = torch.float64
ROWS = 12
FAST = {"lr": 0.05, "beta": 0.5, "momentum": 0.9, "update_every": 2, "history_size": 3}  # pairs from the third step on


def network(seed=0, dtype=F64):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).to(dtype)


def batch(number, dtype=F64):
    """Return the rows of a step: another batch for each number."""
    generator = torch.Generator().manual_seed(1000 + number)
    x = torch.randn(ROWS, 3, generator=generator, dtype=F64)
    y = torch.stack((torch.sin(x.sum(1)), x[:, 0] * x[:, 1]), 1)
    return x.to(dtype), y.to(dtype)


def loss_of(model, number):
    x, y = batch(number, next(model.parameters()).dtype)
    return (model(x) - y).square().mean()


def backward(model, number):
    """Leave the gradients of a batch in the model."""
    model.zero_grad()
    loss = loss_of(model, number)
    loss.backward()
    return loss


def run(model, *optimizers, n=1, first=0):
    """Take n steps of each optimizer on the batches `first`, `first` + 1, …; return the parameters after each."""
    path = []
    for number in range(first, first + n):
        backward(model, number)
        for optimizer in optimizers:
            optimizer.step()
        path.append(flat(model))
    return path


@functools.cache
def plain_run(n):
    """Return the parameters after each of n steps with the options of FAST, both layers in one group."""
    model = network()
    return run(model, MLBFGS(model, **FAST), n=n)


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def gradient(model):
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def same(first, second):
    """Return whether two lists of vectors are equal to the bit."""
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def equal(first, second):
    """Return whether two states are equal to the bit."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(value, second[key]) for key, value in first.items())
    if isinstance(first, list):
        return len(first) == len(second) and all(map(equal, first, second))
    return first == second
