"""A program that gets SIGINT in the middle of fits; test_interrupt.py runs it and reads the line of JSON it writes.

python interrupted_child.py KIND...            every fit sends the signal to itself at iteration 5
python interrupted_child.py slow KIND          writes "ready" and becomes slow; the test sends the signal
python interrupted_child.py search N_JOBS LOG  a grid search that logs every fit that begins
"""

import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.model_selection import GridSearchCV

from lmfit_gpu import LMRegressor

X = np.linspace(0, 4, 60)[:, None]
Y = 2.5 * np.exp(-1.3 * X[:, 0]) + 0.5 + 0.01 * np.cos(40 * X[:, 0])
P0 = [1.0, 1.0, 0.0]
STOP_AT = 5
LONG = 60.0  # s; a test that waits so long has failed
PACE = {"ready after": None, "calls": 0}


def paced():
    """Say "ready" after some calls of the model, and make all further ones slow."""
    if PACE["ready after"] is None:
        return
    PACE["calls"] += 1
    if PACE["calls"] == PACE["ready after"]:
        print("ready", flush=True)
    if PACE["calls"] >= PACE["ready after"]:
        time.sleep(0.3)


def numpy_decay(x, a, b, c):
    paced()
    return a * np.exp(-b * x) + c


def torch_decay(x, a, b, c):
    paced()
    return a * torch.exp(-b * x) + c


class Decay(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.theta = torch.nn.Parameter(torch.tensor(P0, dtype=torch.float64))

    def forward(self, X):
        paced()
        return self.theta[0] * torch.exp(-self.theta[1] * X) + self.theta[2]


MODELS = {
    "numpy": lambda: {"model": numpy_decay, "p0": P0},
    "torch": lambda: {"model": torch_decay, "p0": P0},
    "module": lambda: {"model": Decay()},
    "factory": lambda: {"model": Decay},
    "network": lambda: {"random_state": 0},
}


def fitted(kind, devices, callback):
    """Fit until the signal, and return what the estimator is good for then."""
    est = LMRegressor(**MODELS[kind](), devices=devices, callback=callback)
    passed_on = False
    try:
        est.fit(X, Y)
    except KeyboardInterrupt:
        passed_on = True
    restored = pickle.loads(pickle.dumps(est.set_params(callback=None)))
    return {
        "passed on": passed_on,
        "status": est.result_.status.name,
        "n_iter": est.n_iter_,
        "history": len(est.result_.history),
        "cost": est.result_.cost,
        "cost of the prediction": float(0.5 * np.sum((est.predict(X) - Y) ** 2)),
        "cost of the copy": float(0.5 * np.sum((restored.predict(X) - Y) ** 2)),
        "parameters": len(est.params_),
        "report": est.report(),
    }


def to_itself(record):
    if record.n_iter == STOP_AT:
        os.kill(os.getpid(), signal.SIGINT)


def begin(record):
    if record.n_iter == 2:
        PACE["ready after"] = 1


class LoggedRegressor(LMRegressor):
    """Writes a line at the begin of every fit."""

    def fit(self, X, y):
        with Path(os.environ["LOG"]).open("a") as log:
            log.write("fit\n")
        return super().fit(X, y)


def slow_decay(x, a, b, c):
    time.sleep(0.05)
    return a * np.exp(-b * x) + c


def search(n_jobs):
    grid = {"p0": [[1.0, 1.0, 0.1 * i] for i in range(40)]}
    passed_on = False
    print("ready", flush=True)
    try:
        GridSearchCV(LoggedRegressor(slow_decay), grid, cv=3, n_jobs=n_jobs, pre_dispatch="n_jobs").fit(X, Y)
    except KeyboardInterrupt:
        passed_on = True
    return {"passed on": passed_on}


def main(arguments):
    if arguments[0] == "search":
        answer = search(int(arguments[1]))
    elif arguments[0] == "slow":
        kind, devices = arguments[1], json.loads(arguments[2])
        if kind == "short path":
            PACE["ready after"] = 12
            answer = fitted("numpy", "auto", None)
        else:
            answer = fitted(kind, devices, begin)
    else:
        answer = {
            f"{kind} {len(devices)}": fitted(kind, devices, to_itself)
            for kind in arguments
            for devices in (["cpu"], ["cpu", "cpu"])
        }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts it in the background ignores SIGINT
    main(sys.argv[1:])
