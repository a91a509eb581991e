"""Fits with fixed and tied parameters and bounds: every kind of model, what comes back, and what it is worth."""

import copy
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from oracles import central_differences
from scipy.optimize import curve_fit as scipy_curve_fit
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

from lmfit_gpu import LMRegressor
from lmfit_gpu.exceptions import CovarianceWarning, FitWarning

x1 = np.linspace(0, 4, 60)
X = x1[:, None]
Y = 2.5 * np.exp(-1.3 * x1) + 0.5 + 0.01 * np.cos(40 * x1)


def decay(x, a, b, c):
    return a * np.exp(-b * x) + c


def torch_decay(x, a, b, c):
    return a * torch.exp(-b * x) + c


def decay_theta(X, theta):
    return theta[0] * torch.exp(-theta[1] * X) + theta[2]


def variadic(x, *params):
    return params[0] * np.exp(-params[1] * x) + params[2]


def of_scale(c, s):
    """Module level: it can be pickled."""
    return c * torch.exp(s)


def numpy_of_scale(c, s):
    return c * np.exp(s)


def half_of(c):
    return c / 2


class Decay(torch.nn.Module):
    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Parameter(torch.tensor(v, dtype=dtype)) for v in (1.0, 0.9, 0.2))

    def forward(self, X):
        return self.a * torch.exp(-self.b * X) + self.c


P0 = {"a": 1.0, "b": 0.9, "c": 0.2}
MODELS = {
    "numpy": (decay, {"p0": [1.0, 0.9, 0.2]}),
    "torch": (torch_decay, {"p0": P0}),
    "theta": (decay_theta, {"p0": P0}),
    "variadic": (variadic, {"p0": P0}),
    "module": (Decay(), {}),
    "residual-of": (torch_decay, {"p0": P0, "residual": lambda p, t: p - t}),
    "residual-of-numpy": (decay, {"p0": P0, "residual": lambda p, t: np.subtract(p, t)}),
}
ORACLES = {  # the same fit with the constraint written into the model: (function of the free, start, all from free)
    "fixed": (lambda x, a, b: decay(x, a, b, 0.2), [1, 0.9], lambda t: np.array([t[0], t[1], 0.2])),
    "tied": (lambda x, a, c: decay(x, a, 2 * c + 0.1, c), [1, 0.2], lambda t: np.array([t[0], 2 * t[1] + 0.1, t[1]])),
    "both": (lambda x, b: decay(x, 1.0, b, b**2 / 5), [0.9], lambda t: np.array([1.0, t[0], t[0] ** 2 / 5])),
}
OPTIONS = {
    "fixed": {"fixed": ["c"]},
    "tied": {"tied": {"b": lambda c: 2 * c + 0.1}},
    "both": {"fixed": [True, False, False], "tied": {"c": lambda b: b**2 / 5}},
}


def expected(what):
    """Return (theta, stderr) of all parameters by SciPy and the delta method."""
    function, start, everything = ORACLES[what]
    free, covariance = scipy_curve_fit(function, x1, Y, p0=start, xtol=1e-14, ftol=1e-14, gtol=1e-14)
    G = central_differences(everything, free)
    return everything(free), np.sqrt(np.diag(G @ covariance @ G.T))


def quietly(est, *data, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", CovarianceWarning)
        return est.fit(*data, **more)


@pytest.mark.parametrize("what", OPTIONS)
@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model(kind, what):
    model, options = MODELS[kind]
    theta, stderr = expected(what)
    est = LMRegressor(model, **options, **OPTIONS[what]).fit(X, Y)
    assert est.result_.success
    assert list(est.params_) == ["a", "b", "c"]
    np.testing.assert_allclose(est.theta_, theta, rtol=1e-7)
    np.testing.assert_allclose(est.stderr_, stderr, rtol=1e-5)
    np.testing.assert_allclose(np.diag(est.covariance_), stderr**2, rtol=1e-5)
    np.testing.assert_allclose(est.covariance_, est.covariance_.T, rtol=1e-12, atol=1e-20)
    np.testing.assert_allclose(est.predict(X), decay(x1, *theta), rtol=1e-7)
    assert est.result_.dof == 60 - len(ORACLES[what][1])


@pytest.mark.parametrize("what", OPTIONS)
@pytest.mark.parametrize("jac", ["2-point", "3-point", "cs", "differences"])
@pytest.mark.parametrize("kind", ["numpy", "module"])
def test_every_jacobian_by_differences(kind, what, jac):
    model, options = MODELS[kind]
    theta, _ = expected(what)
    est = quietly(LMRegressor(model, jac=jac, **options, **OPTIONS[what]), X, Y)
    np.testing.assert_allclose(est.theta_, theta, rtol=1e-5 if jac == "2-point" else 1e-7)


@pytest.mark.parametrize("what", OPTIONS)
@pytest.mark.parametrize("kind", ["numpy", "module"])
def test_two_devices_do_not_change_a_bit(kind, what):
    model, options = MODELS[kind]
    one, two = (
        LMRegressor(model, chunk_rows=31, devices=devices, **options, **OPTIONS[what]).fit(X, Y)
        for devices in (["cpu"], ["cpu", "cpu"])
    )
    np.testing.assert_array_equal(one.theta_, two.theta_)


@pytest.mark.parametrize("solver", ["qr", "cholesky", "dual", "cg"])
@pytest.mark.parametrize("what", OPTIONS)
def test_every_solver(what, solver):
    theta, stderr = expected(what)
    est = quietly(LMRegressor(torch_decay, p0=P0, solver=solver, **OPTIONS[what]), X, Y)
    np.testing.assert_allclose(est.theta_, theta, rtol=1e-5)
    np.testing.assert_allclose(est.stderr_, stderr, rtol=1e-4)


# ---- a Jacobian of the user's


def jacobian(library):
    stack = np.stack if library is np else torch.stack
    return lambda x, a, b, c: stack([library.exp(-b * x), -a * x * library.exp(-b * x), library.ones_like(x)], -1)


@pytest.mark.parametrize("library", [np, torch])
@pytest.mark.parametrize("tie", [of_scale, numpy_of_scale], ids=["torch", "numpy"])
def test_the_users_jacobian_is_by_all_parameters_of_the_model(library, tie):
    """The chain rule to the free ones is ours; c is fixed, b tied to it and to a new s."""
    model = decay if library is np else torch_decay
    options = {"p0": {**P0, "s": 1.0}, "fixed": ["c"], "tied": {"b": tie}}
    plain = LMRegressor(torch_decay, **{**options, "tied": {"b": of_scale}}).fit(X, Y)
    est = LMRegressor(model, jac=jacobian(library), **options).fit(X, Y)
    assert est.result_.success
    assert est.result_.used["jac"] == "user"
    np.testing.assert_allclose(est.theta_, plain.theta_, rtol=1e-8)
    np.testing.assert_allclose(est.stderr_, plain.stderr_, rtol=1e-6)


@pytest.mark.parametrize(
    "options", [{"fixed": "c"}, {"tied": {"c": lambda a: a / 5}}, {"bounds": (0, 9)}], ids=["fixed", "tied", "bounds"]
)
def test_a_jacobian_of_the_free_parameters_is_refused(options):
    """Its shape is taken for a sign that it is written in torch."""
    few = lambda x, a, b, c: np.stack([np.exp(-b * x), -a * x * np.exp(-b * x)], 1)  # noqa: E731
    with pytest.raises(ValueError, match=r"jac: returned shape \(60, 2\)"):
        LMRegressor(decay, p0=P0, jac=few, **options).fit(X, Y)


def test_a_wrong_column_is_named_by_the_free_parameter():
    wrong = lambda x, a, b, c: np.stack([np.exp(-b * x), a * x * np.exp(-b * x), 1 + 0 * x], 1)  # noqa: E731
    with pytest.raises(ValueError, match="jac: the column of 'b'"):
        LMRegressor(decay, p0=P0, jac=wrong, fixed=["a"]).fit(X, Y)


# ---- new parameters, names


@pytest.mark.parametrize(
    "tie", [of_scale, numpy_of_scale, lambda c, s: c * math.exp(s)], ids=["torch", "numpy", "math"]
)
@pytest.mark.parametrize("model", [decay, torch_decay])
def test_a_new_parameter_in_a_tie(model, tie):
    """b = c exp(s) is the free fit in other words: same estimates, same errors. In math s leaves the graph."""
    free = LMRegressor(torch_decay, p0=P0).fit(X, Y)
    est = LMRegressor(model, p0={"a": 1.0, "c": 0.2, "s": 1.5}, tied={"b": tie}).fit(X, Y)
    assert list(est.params_) == ["a", "b", "c", "s"]
    assert est.params_["s"] == pytest.approx(np.log(free.params_["b"] / free.params_["c"]), rel=1e-7)
    np.testing.assert_allclose(est.theta_[:3], free.theta_, rtol=1e-7)
    np.testing.assert_allclose(est.stderr_[:3], free.stderr_, rtol=1e-5)
    np.testing.assert_allclose(est.covariance_[:3, :3], free.covariance_, rtol=1e-4, atol=1e-10)
    np.testing.assert_allclose(est.predict(X[:5]), decay(x1[:5], *free.theta_), rtol=1e-7)


def test_the_start_of_a_tied_parameter_is_ignored():
    tied = {"c": lambda a: a / 5}
    fits = [
        LMRegressor(decay, p0=p0, tied=tied).fit(X, Y) for p0 in ([1, 0.9, 1e99], {**P0, "c": -7}, {"a": 1, "b": 0.9})
    ]
    for est in fits[1:]:
        np.testing.assert_array_equal(est.theta_, fits[0].theta_)
    assert fits[0].theta_[2] == fits[0].theta_[0] / 5
    LMRegressor(decay, p0=[1, 0.9, np.nan], tied=tied).fit(X, Y)


@pytest.mark.parametrize(
    ("p0", "message"),
    [
        ([1.0, 0.9, 0.2], r"p0: 's', which a tie depends on, has no start value; give p0 as a dict"),
        ({"a": 1.0, "c": 0.2}, r"p0: got names \('a', 'c'\)"),
        ({"a": 1.0, "c": 0.2, "s": 1.0, "t": 1.0}, r"p0: "),
        ({"a": 1.0, "s": 1.0}, r"p0: "),
    ],
)
def test_a_new_parameter_needs_a_start(p0, message):
    with pytest.raises(ValueError, match=message):
        LMRegressor(decay, p0=p0, tied={"b": of_scale}).fit(X, Y)


def test_without_a_start_all_but_the_tied_are_guessed():
    with pytest.warns(FitWarning, match="1 is used for a, c, s;"):
        est = LMRegressor(decay, tied={"b": of_scale}).fit(X, Y)
    assert est.result_.success


def test_entries_of_a_module():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1)).double()
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    options = {"fixed": ["0.weight"], "bounds": {"2.bias[0]": (-0.05, 0.05)}, "max_iter": 20}
    if not abs(float(start["2.bias"])) <= 0.05:
        net[2].bias.data.zero_()
    est = quietly(LMRegressor(net, **options), X, Y)
    assert torch.equal(est.module_[0].weight, start["0.weight"])
    assert not torch.equal(est.module_[2].weight, start["2.weight"])
    assert abs(est.params_["2.bias[0]"]) <= 0.05
    assert est.stderr_[:2].tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 2.2])
def test_a_fixed_entry_of_a_module_keeps_every_bit(dtype, value):
    module = Decay(dtype)
    module.b.data.fill_(value)
    kept = module.b.detach().clone()
    for options in (
        {"fixed": ["b"]},
        {"bounds": {"b": (float(kept), float(kept))}},
        {"fixed": [False, True, False], "bounds": (-9, 9)},
    ):
        est = quietly(LMRegressor(module, **options), X, Y)
        assert est.module_.b.dtype is dtype
        assert torch.equal(est.module_.b, kept)
        assert est.params_["b"] == float(kept)
    module.b.requires_grad_(False)
    frozen = quietly(LMRegressor(module), X, Y)
    np.testing.assert_allclose(frozen.theta_, est.theta_[[0, 2]], rtol=1e-6 if dtype is torch.float64 else 1e-2)


def test_fixed_keeps_every_bit_of_a_function():
    est = LMRegressor(decay, p0=[1.0, 1.2999999999999998, 0.2], fixed="b").fit(X, Y)
    assert est.theta_[1] == 1.2999999999999998


# ---- what is left behind


def test_roles_errors_and_the_report():
    """c ends on its bound; a is fixed, b free, d tied to b and e to c."""
    model = lambda x, a, b, c, d, e: a * np.exp(-b * x) + c + 0 * d + 0 * e  # noqa: E731
    tied = {"d": lambda b: 3 * b, "e": lambda b, c: b + c}
    est = LMRegressor(model, p0=[2.5, 1.0, 0.3, 0, 0], bounds={"c": (0, 0.4)}, fixed="a", tied=tied).fit(X, Y)
    assert est.result_.success
    assert est.result_.roles == {0: "fixed", 2: "on its upper bound", 3: "tied", 4: "tied"}
    assert "c (on its upper bound)" in est.result_.message
    held = LMRegressor(decay, p0=[2.5, 1.0, 0.4], fixed=["a", "c"]).fit(X, Y)
    np.testing.assert_allclose(est.theta_[:3], held.theta_, rtol=1e-8)
    np.testing.assert_allclose(est.stderr_, [0, held.stderr_[1], np.nan, 3 * held.stderr_[1], np.nan], rtol=1e-6)
    assert not est.covariance_[0, [0, 1, 3]].any()
    assert np.isnan(est.covariance_[2, [1, 2, 3, 4]]).all()
    lines = {line.split()[0]: line for line in est.report().splitlines() if line.strip()}
    for name, role in {"a": "fixed", "c": "on its upper bound", "d": "tied", "e": "tied"}.items():
        assert lines[name].endswith(role)
    assert float(lines["b"].split()[3]) == pytest.approx(100 * est.stderr_[1] / abs(est.theta_[1]), rel=0.06)


@pytest.mark.parametrize("tied", [None, {"d": lambda b: 2 * b}])
def test_rows_of_fixed_parameters_are_zero_whatever_the_rest(tied):
    """e is not determined. The rows of fixed parameters are 0 all the same."""
    model = lambda x, a, b, c, d, e: a * torch.exp(-b * x) + c + 0 * d + 0 * e  # noqa: E731
    with pytest.warns(CovarianceWarning, match="do not determine e:"):
        est = LMRegressor(model, p0=[2.5, 1, 0.3, 1, 1], fixed=["a"] if tied else ["a", "d"], tied=tied).fit(X, Y)
    assert np.isinf(est.stderr_[4]) and np.isfinite(est.stderr_[:4]).all()
    np.testing.assert_array_equal(est.covariance_[0], 0.0)


@pytest.mark.parametrize("tie", [of_scale, numpy_of_scale])
@pytest.mark.parametrize("kind", ["numpy", "torch", "module"])
def test_pickle_deepcopy_and_clone(kind, tie):
    options = (
        {"fixed": ["a"], "tied": {"b": half_of}}
        if kind == "module"
        else {"p0": {"a": 1, "c": 0.2, "s": 1}, "tied": {"b": tie}}
    )
    est = LMRegressor(MODELS[kind][0], **options).fit(X, Y)
    for other in (pickle.loads(pickle.dumps(est)), copy.deepcopy(est), clone(est).fit(X, Y)):
        np.testing.assert_array_equal(other.theta_, est.theta_)
        np.testing.assert_array_equal(other.predict(X), est.predict(X))
        assert other.params_ == est.params_
        assert other.report() == est.report()


def test_an_interrupted_fit_keeps_all_parameters():
    def stop(record):
        raise KeyboardInterrupt

    est = LMRegressor(torch_decay, p0={"a": 1, "c": 0.2, "s": 1.5}, tied={"b": of_scale}, fixed="a", callback=stop)
    with pytest.raises(KeyboardInterrupt):
        est.fit(X, Y)
    assert list(est.params_) == ["a", "b", "c", "s"]
    assert est.params_["b"] == pytest.approx(est.params_["c"] * np.exp(est.params_["s"]))
    assert est.result_.status < 0 and est.stderr_[0] == 0


def test_no_degrees_of_freedom():
    """Two rows for two free parameters: their errors are infinite, the fixed one's is 0."""
    with pytest.warns(CovarianceWarning, match="no degrees of freedom: 2 residuals"):
        est = LMRegressor(torch_decay, p0=P0, fixed="c").fit(X[[3, 20]], Y[[3, 20]])
    assert est.stderr_.tolist() == [np.inf, np.inf, 0]
    absolute = LMRegressor(torch_decay, p0=P0, fixed="c", absolute_sigma=True).fit(X[[3, 20]], Y[[3, 20]], sigma=0.1)
    assert np.isfinite(absolute.stderr_).all()


def test_parameters_without_names_in_a_signature():
    residual = lambda t, x, y: decay(x, *t) - y  # noqa: E731
    for tied in ({"p1": lambda p2: 2 * p2 + 0.1}, {"p1": lambda p2: 2 * torch.as_tensor(p2) + 0.1}):
        alone = LMRegressor(residual=residual, p0=[1, 0.9, 0.2], tied=tied, bounds={"p0": (0, 9)}).fit(X, Y)
        vector = LMRegressor(decay_theta, p0=[1, 0.9, 0.2], tied=tied, bounds={"p0": (0, 9)}).fit(X, Y)
        for est in (alone, vector):
            assert list(est.params_) == ["p0", "p1", "p2"]
            np.testing.assert_allclose(est.theta_, expected("tied")[0], rtol=1e-7)


# ---- where the model is evaluated


@pytest.mark.parametrize("jac", ["auto", "2-point", "3-point", "cs", "user"])
@pytest.mark.parametrize("library", [np, torch])
def test_the_model_is_never_evaluated_outside_the_bounds(library, jac):
    """Probes, difference steps and trials."""
    seen = []

    def model(x, a, b):
        for value in (a, b):
            value = np.real(value.detach().numpy() if library is torch else value)
            seen.append((np.min(value), np.max(value)))
        return a * library.exp(-b * x)

    def slopes(x, a, b):
        return (np.stack if library is np else torch.stack)([library.exp(-b * x), -a * x * library.exp(-b * x)], 1)

    est = LMRegressor(model, p0=[1, 0], bounds={"a": (0, 1), "b": (0, 1.2)}, jac=slopes if jac == "user" else jac).fit(
        X, Y
    )
    low, high = np.array(seen).reshape(-1, 2, 2).transpose(2, 1, 0)
    assert (low.min(1) >= 0).all()
    assert (high.max(1) <= [1, 1.2]).all()
    assert est.theta_[0] == 1


@pytest.mark.parametrize("upper", [0.3, 0.7])
def test_float32_does_not_leave_the_bounds(upper):
    """In float32 0.3 would be 0.30000001."""
    est = quietly(
        LMRegressor(torch_decay, p0=[1, 1, 0.1], bounds={"c": (0, upper), "a": (1, upper + 1)}, dtype=torch.float32),
        X,
        Y,
    )
    assert est.params_["c"] <= upper and est.params_["a"] <= upper + 1


def test_ties_in_math_with_complex_steps():
    """Math would drop the imaginary part of numpy's numbers, with a warning only."""
    try:
        est = LMRegressor(decay, p0=P0, tied={"c": lambda a: math.sqrt(a) / 3}, jac="cs").fit(X, Y)
    except ValueError as refused:
        assert "cs" in str(refused)
    else:
        assert est.result_.success


@pytest.mark.parametrize("tie", [lambda: 0.5, lambda a: np.float64(0.2) * float(a)], ids=["constant", "numpy"])
def test_autograd_with_a_tie_that_torch_does_not_know(tie):
    """It is not the model that is written in numpy; a constant costs nothing."""
    try:
        est = LMRegressor(torch_decay, p0=P0, tied={"c": tie}, jac="autograd").fit(X, Y)
    except ValueError as refused:
        assert "tied" in str(refused)
    else:
        assert est.result_.success
