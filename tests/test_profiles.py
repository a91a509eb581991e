"""Profile likelihood: linear models, roots of the cost, lmfit's numbers on NIST problems, bounds, ties, no ends."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import brentq, least_squares
from scipy.stats import chi2, f, norm, t

from lmfit_gpu import LMRegressor
from lmfit_gpu.datasets import load_nist
from lmfit_gpu.exceptions import FitWarning
from lmfit_gpu.held_fits import Point
from lmfit_gpu.profiles import _Side, profile_likelihood
from lmfit_gpu.solution import solution_of

RNG = np.random.default_rng(2)
x = np.linspace(0, 4, 30)
X = x[:, None]
Y = 2 * np.exp(-1.1 * x) + 0.8 + 0.05 * RNG.normal(size=30)


def decay(x, a, b, c):
    return a * np.exp(-b * x) + c


def decay_torch(x, a, b, c):
    return a * torch.exp(-b * x) + c


def line(x, a, b):
    return a + b * x


def fitted(model=decay, p0=(2, 1, 0.8), **options):
    return LMRegressor(model, p0=list(p0), **options).fit(X, Y)


@pytest.mark.parametrize("level", [0.5, 0.95, 0.99])
def test_of_a_linear_model_it_is_the_t_interval(level):
    est = LMRegressor(line, p0=[0, 1], jac="autograd").fit(X, Y)
    found, expected = est.profile_likelihood(level=level).intervals, est.conf_int(level)
    for name in "ab":
        assert found[name] == pytest.approx(expected[name], rel=1e-8)
    profile = est.profile_likelihood(level=level)["b"]
    slope = (profile.values - est.theta_[1]) / est.stderr_[1]
    np.testing.assert_allclose(profile.zeta, slope, atol=1e-7)
    assert np.diff(profile.zeta).max() < 0.5001


def test_of_one_parameter_the_ends_are_roots_of_the_cost():
    def model(x, b):
        return 2 * np.exp(-b * x) + 0.8

    est = LMRegressor(model, p0=[1.0]).fit(X, Y)
    found = est.profile_likelihood()["b"]
    b, s2 = est.theta_[0], est.result_.s2

    def excess(value):
        return ((model(x, value) - Y) ** 2).sum() - 2 * est.result_.cost - s2 * t.ppf(0.975, 29) ** 2

    expected = brentq(excess, b - 1, b, xtol=1e-14), brentq(excess, b, b + 1, xtol=1e-14)
    assert np.abs(np.subtract(found.interval, expected)).max() < 1e-7 * est.stderr_[0]
    assert found.reached == (True, True)


LMFIT = {  # lmfit 1.3.4: conf_interval(Minimizer(residual, p), minimize(method="leastsq"), sigmas=[0.95])
    "Misra1a": [(233.1953079249, 245.0173693462), (0.0005343183, 0.0005660299)],
    "Chwirut2": [(0.0942551805, 0.2535640834), (0.0037633393, 0.0064748665), (0.0090493447, 0.0153259848)],
    "Rat42": [(68.7647653311, 77.189139291), (2.415552004, 2.848375598), (0.0594721826, 0.0760035724)],
    "DanWood": [(0.7196071629, 0.8207698033), (3.718058657, 4.0041831569)],
    "BoxBOD": [(180.9670046734, 258.5677770978), (0.302589594, 1.073053205)],
    "Thurber": [(1278.5867636253, 1297.7142044894), (1381.5033007394, 1548.2749803689)],
}


@pytest.mark.parametrize("name", LMFIT)
@pytest.mark.parametrize("form", ["numpy", "torch"])
def test_nist_problems_have_the_intervals_of_lmfit(name, form):
    """To 1 % of the width as the issue asks; in fact to 1e-4 of it."""
    problem = load_nist(name)
    est = LMRegressor(problem.model_torch if form == "torch" else problem.model_numpy, p0=problem.starts[1])
    est.fit(problem.X, problem.y)
    some = problem.param_names[: len(LMFIT[name])]
    names = list(est.params_)[: len(some)]
    found = est.profile_likelihood(names).intervals
    for key, (low, high) in zip(names, LMFIT[name], strict=True):
        assert np.abs(np.subtract(found[key], (low, high))).max() < 1e-4 * (high - low)


@pytest.mark.parametrize("route", ["batched", "engine"])
def test_every_route_ends_in_the_same_place(route):
    expected = fitted().profile_likelihood()
    found = profile_likelihood(solution_of(fitted(decay_torch)), None, 0.95, route)
    for name, profile in expected.items():
        assert np.abs(np.subtract(found[name].interval, profile.interval)).max() < 1e-5 * profile.stderr
        assert (np.diff(profile.values) > 0).all()
        assert (np.diff(profile.zeta) > 0).all()
        assert profile.converged.all()
    trace = expected["b"]
    at = trace.theta[0]
    held = LMRegressor(decay, p0=at, fixed=["b"]).fit(X, Y)
    np.testing.assert_allclose(held.theta_, at, rtol=1e-6)
    assert held.result_.cost == pytest.approx(trace.cost[0], rel=1e-9)


def test_sigma_frequencies_and_the_normal_threshold():
    sigma, times = np.full(30, 0.05), np.arange(30) % 2 + 1
    absolute = LMRegressor(line, p0=[0, 1], absolute_sigma=True, jac="autograd").fit(X, Y, sigma=sigma)
    profile = absolute.profile_likelihood()["a"]
    half = norm.ppf(0.975) * absolute.stderr_[0]
    assert profile.interval == pytest.approx((absolute.theta_[0] - half, absolute.theta_[0] + half), rel=1e-5)
    once = LMRegressor(decay, p0=[2, 1, 0.8]).fit(X, Y, sample_weight=times)
    often = LMRegressor(decay, p0=[2, 1, 0.8]).fit(np.repeat(X, times, axis=0), np.repeat(Y, times))
    for name, expected in often.profile_likelihood().intervals.items():
        assert once.profile_likelihood().intervals[name] == pytest.approx(expected, rel=1e-5)


def test_ties_and_fixed_parameters():
    """c tied to 0.4 a: the intervals of the model written with it."""
    tied = fitted(tied={"c": lambda a: 0.4 * a}).profile_likelihood()
    small = LMRegressor(lambda x, a, b: decay(x, a, b, 0.4 * a), p0=[2, 1]).fit(X, Y).profile_likelihood()
    assert set(tied) == {"a", "b"}
    for name, expected in small.intervals.items():
        assert tied.intervals[name] == pytest.approx(expected, rel=1e-5)
    # lmfit 1.3.4 on the same data: a 1.92587 2.03048, b 0.98817 1.15354
    assert tied.intervals["a"] == pytest.approx((1.92587, 2.03048), abs=2e-3)
    fixed = fitted(fixed=["c"])
    assert set(fixed.profile_likelihood()) == {"a", "b"}
    with pytest.raises(ValueError, match="names: 'c' is fixed; only fitted parameters have a profile"):
        fixed.profile_likelihood(["c"])
    with pytest.raises(ValueError, match=r"names: 'c' is tied.*bootstrap"):
        fitted(tied={"c": lambda a: 0.4 * a}).profile_likelihood("c")


def test_a_bound_ends_an_interval():
    """c on its lower bound, where lmfit 1.3.4 has −∞ for c, or an exception, by where c starts."""
    est = fitted(p0=(2, 1, 0.9), bounds={"c": (0.85, None), "b": (0, None)})
    assert est.theta_[2] == 0.85
    found = est.profile_likelihood()
    c = found["c"]
    assert c.interval[0] == 0.85
    assert c.reached == (False, True)
    assert "on its bound" in c.notes[0]
    s2, threshold = est.result_.s2, t.ppf(0.975, est.result_.dof) ** 2
    for name, profile in found.items():
        assert np.isfinite(profile.interval).all()
        for end, reached in zip(profile.interval, profile.reached, strict=True):
            if reached:
                j = "abc".index(name)
                start = np.array([2, 1, 0.9])
                start[j] = end
                at = fitted(p0=start, bounds={"c": (0.85, None)}, fixed=[name])
                assert 2 * (at.result_.cost - est.result_.cost) / s2 == pytest.approx(threshold, rel=1e-4)


def test_a_curved_model_has_no_upper_end():
    """Nearly a line: top and half may be anything large. The line through 0 is the limit, and within the level."""
    xs = np.arange(1, 7.0)
    ys = np.array([1.1, 1.9, 3.2, 3.8, 5.1, 5.7])
    est = LMRegressor(lambda x, top, half: top * x / (half + x), p0=[50, 50]).fit(xs[:, None], ys)
    found = est.profile_likelihood()["top"]
    assert found.interval[0] == pytest.approx(17.38698, rel=1e-4)  # as lmfit 1.3.4
    assert found.interval[1] == np.inf
    assert found.reached == (True, False)
    assert "no end" in found.notes[0]
    slope = (xs @ ys) / (xs @ xs)
    limit = (((slope * xs - ys) ** 2).sum() - 2 * est.result_.cost) / est.result_.s2
    assert limit < t.ppf(0.975, 4) ** 2
    assert found.zeta[-1] ** 2 == pytest.approx(limit, rel=0.05)


def test_a_better_fit_on_the_way_is_told():
    """From 3.3 the fit of a sine ends beside the minimum; following it, the profile meets the true frequency."""
    xs = np.linspace(0, 6, 40)
    ys = np.sin(2 * xs) + 0.3 * np.random.default_rng(0).normal(size=40)
    est = LMRegressor(lambda x, w: np.sin(w * x), p0=[4.1]).fit(xs[:, None], ys)
    assert abs(est.theta_[0] - 2) > 0.5  # the start is caught
    with pytest.warns(FitWarning, match="a better fit was found, cost .* at w="):
        est.profile_likelihood(level=0.999)


def test_what_has_no_profile_is_refused():
    with pytest.raises(ValueError, match=r"a robust loss is no likelihood.*bootstrap"):
        fitted(loss="huber", f_scale=0.1).profile_likelihood()
    with pytest.raises(ValueError, match="names: no parameter 'z'"):
        fitted().profile_likelihood(["z"])
    with pytest.raises(ValueError, match="names: got none"):
        fitted().profile_likelihood([])
    with pytest.raises(ValueError, match="level: got 2"):
        fitted().profile_likelihood(level=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stopped = fitted(p0=(1, 5, 0), max_iter=1)
        none = LMRegressor(line, p0=[0, 0]).fit(X[:2], Y[:2])
        twice = LMRegressor(lambda x, a, b, c: a + c + b * x, p0=[0, 0, 0]).fit(X, Y)
        undetermined = twice.profile_likelihood(["a"])["a"]
    with pytest.raises(ValueError, match="the fit has not converged"):
        stopped.profile_likelihood()
    with pytest.raises(ValueError, match="no degree of freedom is left"):
        none.profile_likelihood()
    exact = LMRegressor(decay, p0=[2, 1, 0.8]).fit(X, decay(x, 2, 1, 0.5))
    with pytest.raises(ValueError, match="the fit is exact"):
        exact.profile_likelihood()
    assert undetermined.interval == (-np.inf, np.inf)
    assert "not determined" in undetermined.notes[0]


def test_after_a_pickle_the_data_are_given_again():
    est = fitted()
    other = pickle.loads(pickle.dumps(est))
    with pytest.raises(ValueError, match="has no data"):
        other.profile_likelihood()
    assert other.profile_likelihood(X=X, y=Y).intervals["b"] == pytest.approx(
        est.profile_likelihood().intervals["b"], rel=1e-9
    )


@pytest.mark.parametrize("absolute", [False, True])
def test_the_map_of_a_linear_model_is_an_ellipse(absolute):
    est = LMRegressor(line, p0=[0, 1], absolute_sigma=absolute, jac="autograd").fit(X, Y, sigma=np.full(30, 0.3))
    found = est.profile_map("a", "b", levels=(0.5, 0.95), shape=(9, 11))
    assert found.zeta2.shape == (11, 9)
    for level, threshold in found.levels.items():
        expected = chi2.ppf(level, 2) if absolute else 2 * f.ppf(level, 2, 28)
        assert threshold == pytest.approx(expected, rel=1e-9)
    inverse = np.linalg.inv(est.covariance_)
    a, b = np.meshgrid(found.x, found.y)
    moved = np.stack((a, b), axis=-1) - est.theta_
    np.testing.assert_allclose(found.zeta2, np.einsum("...i,ij,...j->...", moved, inverse, moved), rtol=1e-4, atol=1e-6)
    extent = np.sqrt(found.levels[0.95] * np.diag(est.covariance_))
    assert (found.x[-1] - est.theta_[0]) / extent[0] == pytest.approx(1.15, rel=1e-3)


def test_a_map_fits_what_is_not_on_it():
    est = fitted(decay_torch)
    found = est.profile_map("b", "c", shape=(5, 4))
    theta = found.theta[3, 1]
    held = LMRegressor(decay_torch, p0=theta, fixed=["b", "c"]).fit(X, Y)
    assert held.result_.cost == pytest.approx(found.cost[3, 1], rel=1e-9)
    assert (theta[1], theta[2]) == (found.x[1], found.y[3])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shape": (2, 5)}, "shape: got"),
        ({"levels": ()}, "levels: got none"),
        ({"levels": (95,)}, "level: got 95"),
        ({"limits": ((1, 0), (0, 1))}, "limits: got"),
    ],
)
def test_maps_that_are_none(options, said):
    with pytest.raises(ValueError, match=said):
        fitted().profile_map("a", "b", **options)
    with pytest.raises(ValueError, match="two parameters are expected"):
        fitted().profile_map("a", "a")


def test_limits_of_a_map_keep_the_bounds():
    est = fitted(bounds={"b": (0.9, 3)})
    with pytest.raises(ValueError, match=r"limits: got \(0.5, 2\) of 'b', outside its bounds \(0.9, 3\)"):
        est.profile_map("a", "b", limits=((1, 3), (0.5, 2)))
    assert est.profile_map("a", "b", shape=(3, 3), limits=((1, 3), (0.9, 2))).y[0] == 0.9


def test_a_better_fit_on_a_map_is_told():
    """A fit at an amplitude of 0 and a wrong frequency, where the sine is lost; the map meets the true one."""
    xs = np.linspace(0, 4, 40)
    ys = np.sin(2 * xs) + 0.05 * np.cos(30 * xs)
    est = LMRegressor(lambda x, w, a: a * np.sin(w * x), p0=[4.5, 0.3]).fit(xs[:, None], ys)
    assert abs(est.theta_[0] - 2) > 1
    with pytest.warns(FitWarning, match="a better fit was found, cost .* at w=2, a=") as said:
        est.profile_map("w", "a", shape=(5, 5), limits=((1, 3), (-1, 1)))
    assert [warning.filename for warning in said] == [__file__]


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_from_a_bound_of_0_the_end_is_found_in_any_unit(size):
    """The estimate has no standard error there, and no size; J has. lmfit 1.3.4 has no interval for it."""

    def model(x, a, b, c):
        return size * a * np.exp(-b * x) + c

    y = size * (2 * np.exp(-1.1 * x) - 0.05 + 0.05 * np.cos(7 * x))
    est = LMRegressor(model, p0=[2, 1, 0.1 * size], bounds={"c": (0, None)}).fit(X, y)
    assert est.theta_[2] == 0
    found = est.profile_likelihood("c")["c"]
    assert found.interval[0] == 0
    assert found.reached == (False, True)

    def excess(c):
        best = least_squares(lambda p: (model(x, *p, c * size) - y) / size, [2, 1], xtol=1e-14, ftol=1e-14)
        return 2 * best.cost - (2 * est.result_.cost + est.result_.s2 * t.ppf(0.975, est.result_.dof) ** 2) / size**2

    assert found.interval[1] == pytest.approx(size * brentq(excess, 0, 1, xtol=1e-10), rel=1e-5)


def test_a_jump_of_zeta_is_told():
    """The cost jumps beyond 0.7 standard errors: fits that end in another minimum. The end is the jump, and said."""
    solution = solution_of(fitted())
    result = solution.result
    side = _Side(solution, 1, 1, 2.0)
    walk, jump = side.walk(), side.estimate + 0.7 * side.stderr
    request = next(walk)
    for _ in range(200):
        zeta = (request.theta[1] - side.estimate) / side.stderr + 9.0 * (request.theta[1] > jump)
        try:
            request = walk.send(Point(request.theta, result.cost + 0.5 * zeta**2 * result.s2, converged=True))
        except StopIteration:
            break
    assert side.reached
    assert side.end == pytest.approx(jump, rel=1e-9)
    assert "zeta goes from 0.7 to 9.7" in side.note


def test_the_end_of_thurbers_b6_is_the_one_that_scipy_sees():
    """lmfit 1.3.4 gives 0.3597103286615257 as the lower end: zeta is 1.92 there, of 2.04."""
    problem = load_nist("Thurber")
    best = problem.certified.params
    est = LMRegressor(problem.model_numpy, p0=best).fit(problem.X, problem.y)
    profile = est.profile_likelihood("b6")["b6"]

    def zeta(value, start):
        def residual(scales):
            return problem.model_numpy(problem.x, *np.insert(scales * np.delete(best, 5), 5, value)) - problem.y

        start = np.delete(start, 5) / np.delete(best, 5)
        return ((2 * least_squares(residual, start, method="lm").cost - 2 * est.result_.cost) / est.result_.s2) ** 0.5

    threshold = t.ppf(0.975, problem.certified.dof)
    assert zeta(profile.interval[0], profile.theta[0]) == pytest.approx(threshold, rel=1e-5)
    assert zeta(0.3597103286615257, profile.theta[0]) < 0.95 * threshold
