"""Profiles by each route and by lmfit.conf_interval, turn by turn in one run: ratios of medians, never seconds.

Times are of this thread (``time.thread_time``), so that other processes on the machine do not count; the spread is that
of the quartiles of the ratios of single turns. The route that :class:`lmfit_gpu.held_fits.HeldFits` takes must be the
fastest, or within the spread of it. lmfit is optional.
"""

import time

import numpy as np
import pytest
import torch

from lmfit_gpu import LMRegressor
from lmfit_gpu.bootstrap import bootstrap
from lmfit_gpu.datasets import load_nist
from lmfit_gpu.held_fits import HeldFits
from lmfit_gpu.profiles import profile_likelihood
from lmfit_gpu.solution import solution_of

pytestmark = pytest.mark.benchmark

NIST = ("Misra1a", "BoxBOD", "Rat43", "Thurber", "Gauss1")
ROWS = (100, 10_000, 100_000)
TURNS = 3
SLACK = 1.3  # of the fastest route


def timed(calls, turns=TURNS):
    """Return thread times of each call, shape (calls, turns), all called in turn, and what they return."""
    answers = [call() for call in calls]
    times = np.empty((len(calls), turns))
    for turn in range(turns):
        for i, call in enumerate(calls):
            begin = time.thread_time()
            call()
            times[i, turn] = time.thread_time() - begin
    return times, answers


def ratio(times, base):
    """Return the text of a ratio of medians with the quartiles of the turns."""
    low, high = np.quantile(times / base, [0.25, 0.75])
    return f"{np.median(times) / np.median(base):.2f} ({low:.2f} to {high:.2f})"


def by_route(est, route):
    solution = solution_of(est)
    try:
        return profile_likelihood(solution, None, 0.95, route)
    finally:
        solution.close()


def same(found, expected):
    for key, profile in expected.items():
        width = profile.interval[1] - profile.interval[0]
        assert np.abs(np.subtract(found[key].interval, profile.interval)).max() <= 1e-5 * width


def compared(name, est, routes, others=(), turns=TURNS):
    """Print and judge the routes of one fit."""
    taken = HeldFits(solution_of(est)).route
    calls = [lambda route=route: by_route(est, route) for route in routes] + [call for _, call in others]
    times, answers = timed(calls, turns)
    base = times[routes.index(taken)]
    texts = [
        f"{label} {ratio(spent, base)}" for label, spent in zip([*routes, *(n for n, _ in others)], times, strict=True)
    ]
    print(f"\n{name}: {taken} takes {1e3 * np.median(base):.1f} ms; in units of it: {', '.join(texts)}")
    for found in answers[1 : len(routes)]:
        same(found, answers[0])
    assert np.median(base) <= SLACK * min(np.median(spent) for spent in times[: len(routes)])
    return times


@pytest.mark.parametrize("name", NIST)
def test_routes_on_nist_problems(name):
    problem = load_nist(name)
    in_numpy, in_torch = (
        LMRegressor(model, p0=problem.certified.params).fit(problem.X, problem.y)
        for model in (problem.model_numpy, problem.model_torch)
    )
    lmfit = pytest.importorskip("lmfit")
    minimizer = lmfit.Minimizer(
        lambda p: problem.model_numpy(problem.x, *p.valuesdict().values()) - problem.y, start(lmfit, problem)
    )
    result = minimizer.minimize(xtol=1e-12, ftol=1e-12)
    others = [("lmfit", lambda: lmfit.conf_interval(minimizer, result, sigmas=[0.95]))]
    compared(f"{name}, numpy", in_numpy, ["tiny", "engine"], others)
    if HeldFits(solution_of(in_torch)).route == "batched":  # not where a model without torch functions is one of numpy
        compared(f"{name}, torch", in_torch, ["batched", "engine"])


def start(lmfit, problem):
    parameters = lmfit.Parameters()
    for name, value in zip(problem.param_names, problem.certified.params, strict=True):
        parameters.add(name, value=value)
    return parameters


@pytest.mark.parametrize("n_rows", ROWS)
def test_routes_by_rows(n_rows):
    x = np.linspace(0, 4, n_rows)
    y = 2.5 * np.exp(-1.3 * x) + 0.5 + 0.05 * np.random.default_rng(0).normal(size=n_rows)
    torch.set_num_threads(1)
    est = LMRegressor(lambda x, a, b, c: a * torch.exp(-b * x) + c, p0=[2, 1, 0]).fit(x[:, None], y)
    compared(f"decay, {n_rows:,} x 3, torch", est, ["batched", "engine"])


def test_bootstrap_in_a_batch():
    x = np.linspace(0, 4, 60)
    y = 2.5 * np.exp(-1.3 * x) + 0.5 + 0.05 * np.random.default_rng(0).normal(size=60)
    in_numpy = LMRegressor(lambda x, a, b, c: a * np.exp(-b * x) + c, p0=[2, 1, 0]).fit(x[:, None], y)
    in_torch = LMRegressor(lambda x, a, b, c: a * torch.exp(-b * x) + c, p0=[2, 1, 0]).fit(x[:, None], y)
    bounded = LMRegressor(in_torch.model, p0=[2, 1, 0], bounds={"a": (0, 100)}).fit(x[:, None], y)
    for method in ("residual", "case"):
        times, (batch, tiny, engine) = timed(
            [
                lambda e=e, method=method: bootstrap(solution_of(e), 100, method, 0.9, 0)
                for e in (in_torch, in_numpy, bounded)
            ]
        )
        print(
            f"\n{method}: batch {1e3 * np.median(times[0]):.0f} ms; in units of it: "
            f"short path {ratio(times[1], times[0])}, engine {ratio(times[2], times[0])}"
        )
        np.testing.assert_allclose(tiny.theta, batch.theta, rtol=1e-4)
        np.testing.assert_allclose(engine.theta, batch.theta, rtol=1e-4)
        assert np.median(times[0]) < np.median(times[2])
