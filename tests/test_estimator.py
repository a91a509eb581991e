"""LMRegressor: every kind of model, data and option, and the promises of the issue that go through the estimator."""

import copy
import pickle
import re
import warnings

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError

from lmfit_gpu import LMRegressor, MarquardtDamping, TrustRegion
from lmfit_gpu.datasets import NIST_NAMES, correct_digits, load_nist
from lmfit_gpu.exceptions import CovarianceWarning, FitWarning
from lmfit_gpu.result import Status

X = np.linspace(0, 4, 60)[:, None]
TRUE = {"a": 2.5, "b": 1.3, "c": 0.5}
Y = 2.5 * np.exp(-1.3 * X[:, 0]) + 0.5 + 0.01 * np.cos(40 * X[:, 0])
DEVICES = [["cpu"], ["cpu", "cpu"]]


def decay(x, a, b, c):
    return a * np.exp(-b * x) + c


def torch_decay(x, a, b, c):
    return a * torch.exp(-b * x) + c


def torch_decay_of_theta(X, theta):
    return theta[0] * torch.exp(-theta[1] * X) + theta[2]


class Decay(torch.nn.Module):
    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Parameter(torch.tensor(v, dtype=dtype)) for v in (1.0, 1.0, 0.0))

    def forward(self, X):
        return self.a * torch.exp(-self.b * X) + self.c


P0 = [1.0, 1.0, 0.0]
REFERENCE = LMRegressor(torch_decay, p0=P0).fit(X, Y)
MODELS = {
    "numpy": (decay, {"p0": P0}),
    "torch": (torch_decay, {"p0": P0}),
    "theta": (torch_decay_of_theta, {"p0": P0}),
    "module": (Decay(), {}),
    "factory": (Decay, {}),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("jac", ["auto", "differences", "3-point", "cs"])
@pytest.mark.parametrize("devices", DEVICES, ids=["one", "two"])
def test_every_kind_of_model_ends_at_the_same_point(kind, jac, devices):
    model, options = MODELS[kind]
    est = LMRegressor(model, jac=jac, devices=devices, **options).fit(X, Y)
    assert est.result_.success
    np.testing.assert_allclose(est.theta_, REFERENCE.theta_, rtol=1e-8)
    np.testing.assert_allclose(est.stderr_, REFERENCE.stderr_, rtol=1e-6)
    np.testing.assert_allclose(est.predict(X), decay(X[:, 0], *REFERENCE.theta_), rtol=1e-8)


@pytest.mark.parametrize("solver", ["qr", "cholesky"])
@pytest.mark.parametrize("backend", ["scipy", "torch"])
@pytest.mark.parametrize("damping", ["trust-region", "nielsen", "marquardt", TrustRegion(grow=2.0)])
def test_every_solver_backend_and_damping(solver, backend, damping):
    est = LMRegressor(torch_decay, p0=P0, solver=solver, backend=backend, damping=damping).fit(X, Y)
    assert (est.solver_, est.backend_) == (solver, backend)
    np.testing.assert_allclose(est.theta_, REFERENCE.theta_, rtol=1e-7)


def test_lema_follows_its_schedule():
    seen = []
    est = LMRegressor(
        torch_decay, p0=[2.0, 1.0, 0.3], damping="lema", callback=lambda record: seen.append(record.damping)
    )
    est.fit(X, Y)
    np.testing.assert_allclose(seen[:3], [1e-3, 1e-4, 1e-5], rtol=1e-12)
    np.testing.assert_allclose(est.theta_, REFERENCE.theta_, rtol=1e-6)


# ---- what a fit leaves behind


def test_attributes():
    est = REFERENCE
    assert list(est.params_) == ["a", "b", "c"]
    assert est.params_["b"] == est.theta_[1]
    assert est.n_features_in_ == 1
    assert est.rank_ == 3
    residual = decay(X[:, 0], *est.theta_) - Y
    J = np.stack(
        [np.exp(-est.theta_[1] * X[:, 0]), -est.theta_[0] * X[:, 0] * np.exp(-est.theta_[1] * X[:, 0]), np.ones(60)], 1
    )
    covariance = residual @ residual / 57 * np.linalg.inv(J.T @ J)
    np.testing.assert_allclose(est.covariance_, covariance, rtol=1e-8)
    np.testing.assert_allclose(est.stderr_, np.sqrt(np.diag(covariance)), rtol=1e-8)
    assert est.result_.cost == pytest.approx(0.5 * residual @ residual)
    assert est.score(X, Y) == pytest.approx(1 - residual @ residual / np.sum((Y - Y.mean()) ** 2))
    assert "expanded" in est.report()
    assert "CONVERGED" in est.report()


def test_the_users_module_is_not_touched():
    module = Decay().train()
    est = LMRegressor(module).fit(X, Y)
    assert [p.item() for p in module.parameters()] == [1.0, 1.0, 0.0]
    assert module.training
    assert not est.module_.training
    np.testing.assert_allclose([p.item() for p in est.module_.parameters()], est.theta_)


def test_clone_pickle_and_refit():
    est = LMRegressor(decay, p0=P0)
    first = clone(est).fit(X, Y)
    again = clone(first).fit(X, Y)
    assert np.array_equal(first.theta_, again.theta_)
    assert first.n_iter_ == again.n_iter_
    for copied in (pickle.loads(pickle.dumps(first)), copy.deepcopy(first)):
        assert np.array_equal(copied.predict(X), first.predict(X))


def test_tensors_in_tensors_out():
    est = LMRegressor(torch_decay, p0=P0).fit(torch.from_numpy(X), torch.from_numpy(Y))
    prediction = est.predict(torch.from_numpy(X))
    assert isinstance(prediction, torch.Tensor)
    assert prediction.dtype == torch.float64
    assert isinstance(est.predict(X), np.ndarray)
    np.testing.assert_allclose(est.theta_, REFERENCE.theta_, rtol=1e-12)


@pytest.mark.parametrize("shape", [(60,), (60, 1)])
def test_predictions_have_the_shape_of_y(shape):
    est = LMRegressor(lambda x, a, b, c: decay(x, a, b, c).reshape(-1, *shape[1:]), p0=P0).fit(X, Y.reshape(shape))
    assert est.predict(X[:7]).shape == (7, *shape[1:])


@pytest.mark.parametrize("library", [np, torch])
def test_several_outputs(library):
    def both(x, a, b, c):
        stack = np.column_stack if library is np else lambda parts: torch.stack(parts, dim=1)
        return stack([a * library.exp(-b * x), c * x])

    targets = np.column_stack([2.5 * np.exp(-1.3 * X[:, 0]), 0.5 * X[:, 0]])
    est = LMRegressor(both, p0=P0).fit(X, targets)
    np.testing.assert_allclose(est.theta_, list(TRUE.values()), rtol=1e-8)
    assert est.predict(X).shape == (60, 2)
    np.testing.assert_allclose(est.predict(X), targets, atol=1e-10)
    assert est.result_.n_residuals == 120


# ---- p0


@pytest.mark.parametrize(
    "p0", [P0, np.array(P0), tuple(P0), {"c": 0.0, "a": 1.0, "b": 1.0}, lambda x, y: [np.ptp(y), 1.0, y.min()]]
)
def test_forms_of_p0(p0):
    np.testing.assert_allclose(LMRegressor(decay, p0=p0).fit(X, Y).theta_, REFERENCE.theta_, rtol=1e-7)


def test_without_p0_ones_are_used_and_said():
    with pytest.warns(FitWarning, match="1 is used for a, b, c"):
        est = LMRegressor(decay).fit(X, Y)
    np.testing.assert_allclose(est.theta_, REFERENCE.theta_, rtol=1e-7)


@pytest.mark.parametrize(
    ("p0", "message"),
    [
        ([1.0, 1.0], r"p0: got 2 values, but the model takes 3 parameters"),
        ({"a": 1.0, "b": 1.0, "d": 1.0}, r"p0: got names .*'d'.*the model has"),
        ([1.0, np.nan, 0.0], "finite"),
        ("automatic", r"'p0' parameter of LMRegressor must be an array-like.*Got 'automatic' instead"),
    ],
)
def test_bad_p0(p0, message):
    with pytest.raises(ValueError, match=message):
        LMRegressor(decay, p0=p0).fit(X, Y)


NAMED = {  # argument: a value that is not allowed, and what the message says is
    "solver": ("lu", "a str among {'auto', 'qr', 'cholesky', 'dual', 'ghost', 'cg'}"),
    "backend": ("jax", "a str among {'auto', 'scipy', 'torch', 'cupynumeric'}"),
    "jac": ("4-point", "a str among {'auto', 'autograd', 'differences', '2-point', '3-point', 'cs'} or a callable"),
    "damping": ("none", "a str among {'trust-region', 'nielsen', 'marquardt', 'lema', 'proximal'} or a policy object"),
    "x_format": ("rows", "a str among {'auto', 'columns', '1d'}"),
    "max_iter": (-1, "an int in the range [0, inf)"),
    "chunk_rows": (0, "an int in the range [1, inf) or a str among {'auto'}"),
    "ftol": (-1.0, "a float in the range [0.0, inf] or a str among {'auto'}"),
    "dtype": (torch.float16, "torch.float64, torch.float32"),
    "random_state": ("a", "an int in the range [0, 4294967295], an instance of 'numpy.random"),
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({name: value}, f"The {name!r} parameter of LMRegressor must be {allowed}")
            for name, (value, allowed) in NAMED.items()
        ),
        ({"devices": ["gpu"]}, "devices"),
        ({"predict_fn": decay}, "predict_fn"),
        ({"hidden_layer_sizes": 3}, "hidden_layer_sizes: got 3 with a model"),
    ],
)
def test_bad_options_are_named_before_any_work(options, message):
    def must_not_run(x, a, b, c):
        raise AssertionError("the model was called")

    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        LMRegressor(must_not_run, p0=P0, **options).fit(X, Y)
    for name, (value, _) in NAMED.items():
        assert name not in options or f"Got {value!r} instead." in str(caught.value)


def test_bad_data():
    est = LMRegressor(decay, p0=P0)
    with pytest.raises(ValueError, match=r"x\[:, None\].*curve_fit"):
        est.fit(X[:, 0], Y)
    with pytest.raises(ValueError, match="inconsistent"):
        est.fit(X, Y[:-1])
    with pytest.raises(ValueError, match="NaN"):
        est.fit(X, np.where(Y > 2, np.nan, Y))
    with pytest.raises(ValueError, match="Complex data not supported"):
        est.fit(X, Y + 1j)
    with pytest.raises(NotFittedError):
        est.predict(X)
    with pytest.raises(ValueError, match="features"):
        REFERENCE.predict(np.ones((3, 2)))
    with pytest.raises(ValueError, match="shape"):
        LMRegressor(lambda x, a: a * x[:-1], p0=[1.0]).fit(X, Y)


# ---- residuals


def test_residual_of_a_model_and_alone():
    with_model = LMRegressor(torch_decay, residual=lambda prediction, target: 2 * (prediction - target), p0=P0).fit(
        X, Y
    )
    alone = LMRegressor(
        residual=lambda theta, x, y: decay(x, *theta) - y, predict_fn=lambda theta, x: decay(x, *theta), p0=P0
    ).fit(X, Y)
    for est in (with_model, alone):
        np.testing.assert_allclose(est.theta_, REFERENCE.theta_, rtol=1e-7)
        np.testing.assert_allclose(est.predict(X), REFERENCE.predict(X), rtol=1e-7)
    assert with_model.result_.cost == pytest.approx(4 * REFERENCE.result_.cost)


def test_a_residual_alone_cannot_predict_without_predict_fn():
    est = LMRegressor(residual=lambda theta, x, y: theta[0] * x - y, p0=[1.0]).fit(X, Y)
    assert not hasattr(est, "predict")
    assert not hasattr(est, "score")


# ---- status


def test_not_converged_is_a_warning_and_the_best_point_is_kept():
    with pytest.warns(ConvergenceWarning, match="MAX_ITER"):
        est = LMRegressor(decay, p0=P0, max_iter=2).fit(X, Y)
    assert est.result_.status is Status.MAX_ITER
    assert est.result_.cost < 0.5 * np.sum((decay(X[:, 0], *P0) - Y) ** 2)


def test_callback_stops():
    with pytest.warns(ConvergenceWarning, match="STOPPED_BY_CALLBACK"):
        est = LMRegressor(decay, p0=P0, callback=lambda record: record.n_iter == 2).fit(X, Y)
    assert est.n_iter_ == 2


def test_interrupt_keeps_the_best_point():
    def interrupted(record):
        if record.n_iter == 3:
            raise KeyboardInterrupt

    est = LMRegressor(decay, p0=P0, callback=interrupted)
    with pytest.raises(KeyboardInterrupt):
        est.fit(X, Y)
    assert est.result_.status is Status.INTERRUPTED
    assert est.result_.cost < 0.5 * np.sum((decay(X[:, 0], *P0) - Y) ** 2)


# ---- rows that depend on each other, through the estimator


def numpy_coupled():
    kernel = np.array([0.25, 0.5, 0.25])

    def ode(x, a, b, c):
        return solve_ivp(lambda t, u: -b * u, (0, x[-1]), [a], t_eval=x, rtol=1e-10, atol=1e-12).y[0] + c

    def in_place(x, a, b, c):
        out = np.zeros_like(x)
        for _ in range(3):
            out += a * np.exp(-b * x) / 3
        out += c
        return out

    return {
        "convolution": lambda x, a, b, c: np.convolve(decay(x, a, b, c), kernel, mode="same"),
        "running sum": lambda x, a, b, c: np.cumsum(decay(x, a, b, c)),
        "centred": lambda x, a, b, c: decay(x - x.mean(), a, b, c),
        "branch": lambda x, a, b, c: decay(x, a, b, c) * (2.0 if x.max() > 3 else 1.0),
        "ode": ode,
        "in place": in_place,
    }


def torch_coupled():
    def ode(x, a, b, c):
        u, values = a, []
        for i in range(len(x)):
            values.append(u)
            if i + 1 < len(x):
                u = u * torch.exp(-b * (x[i + 1] - x[i]))
        return torch.stack(values) + c

    def in_place(x, a, b, c):
        out = torch.zeros_like(x) + 0 * a
        for _ in range(3):
            out += a * torch.exp(-b * x) / 3
        out += c
        return out

    def convolution(x, a, b, c):
        kernel = torch.tensor([[[0.25, 0.5, 0.25]]], dtype=x.dtype)
        return torch.nn.functional.conv1d(torch_decay(x, a, b, c)[None, None], kernel, padding=1)[0, 0]

    return {
        "convolution": convolution,
        "running sum": lambda x, a, b, c: torch.cumsum(torch_decay(x, a, b, c), 0),
        "centred": lambda x, a, b, c: torch_decay(x - x.mean(), a, b, c),
        "branch": lambda x, a, b, c: torch_decay(x, a, b, c) * (2.0 if x.max() > 3 else 1.0),
        "ode": ode,
        "in place": in_place,
    }


COUPLED = {"convolution", "running sum", "centred", "branch", "ode"}


@pytest.mark.parametrize("form", ["numpy", "torch"])
@pytest.mark.parametrize("name", [*sorted(COUPLED), "in place"])
def test_coupled_rows(form, name):
    model = (numpy_coupled() if form == "numpy" else torch_coupled())[name]
    exact = numpy_coupled()[name](X[:, 0], *TRUE.values())
    short = LMRegressor(model, p0=[2.0, 1.0, 0.2]).fit(X, exact)  # a tiny fit in numpy does not ask: all together
    np.testing.assert_allclose(short.theta_, list(TRUE.values()), rtol=1e-6)
    np.testing.assert_allclose(short.predict(X), exact, rtol=1e-5)
    est = LMRegressor(model, p0=[2.0, 1.0, 0.2], chunk_rows=100).fit(X, exact)
    np.testing.assert_allclose(est.theta_, list(TRUE.values()), rtol=1e-6)
    if not (name == "ode" and form == "torch"):  # this ODE's rows, alone, are its start: told apart by the last
        assert est.result_.used["rows"].startswith("coupled" if name in COUPLED else "independent")
    np.testing.assert_allclose(est.predict(X), exact, rtol=1e-5)


# ---- arithmetic: NIST in float32


@pytest.mark.parametrize("name", NIST_NAMES)
def test_float32_data_are_fitted_in_float64(name):
    """Within 1e-3 relative of the certified values, from both starts."""
    problem = load_nist(name)
    for start in problem.starts:
        est = LMRegressor(problem.model_torch, p0=start)
        est.fit(problem.X.astype(np.float32), problem.y.astype(np.float32))
        assert est.result_.success
        assert correct_digits(est.theta_, problem.reference.params) >= 3


@pytest.mark.parametrize("name", NIST_NAMES)
def test_float32_arithmetic_never_says_converged_and_is_wrong(name):
    """Converged: within 1 %, or within a tenth of a standard error where the data say no more."""
    problem = load_nist(name)
    reference = problem.reference
    for start in problem.starts:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            warnings.simplefilter("ignore", CovarianceWarning)
            est = LMRegressor(problem.model_torch, p0=start, dtype=torch.float32).fit(problem.X, problem.y)
        off = np.abs(est.theta_ - reference.params)
        right = np.all(off <= np.maximum(0.01 * np.abs(reference.params), 0.1 * reference.stderr))
        assert right or not est.result_.success


def test_a_float32_module_stays_float32():
    est = LMRegressor(Decay(torch.float32)).fit(X, Y)
    assert next(est.module_.parameters()).dtype == torch.float32
    np.testing.assert_allclose(est.theta_, REFERENCE.theta_, rtol=1e-3)
    assert est.predict(X).dtype == np.float64


def test_policies_check_their_parameters():
    with pytest.raises(ValueError, match="grow"):
        TrustRegion(grow=1.0)
    with pytest.raises(ValueError, match="up > 1"):
        MarquardtDamping(up=0.5)


# ---- what a hostile reviewer found


def test_names_of_a_modules_start_are_heeded():
    line = torch.nn.Linear(1, 1).double()
    options = {"max_iter": 0, "p0": {"bias[0]": 7.0, "weight[0,0]": 1.0}}
    with pytest.warns(ConvergenceWarning):
        assert LMRegressor(line, **options).fit(X, Y).params_ == {"weight[0,0]": 1.0, "bias[0]": 7.0}
    with pytest.raises(ValueError, match=r"p0: got names .*'foo'"):
        LMRegressor(line, p0={"foo": 7.0, "weight[0,0]": 1.0}).fit(X, Y)


@pytest.mark.parametrize("library", [np, torch])
def test_known_arrays_of_all_rows_in_a_closure(library):
    """Weights of one's own: such a residual takes all rows or none."""
    weights = np.linspace(1, 2, 200)
    weights = weights if library is np else torch.from_numpy(weights)
    wide = np.linspace(0, 4, 200)[:, None]
    exact = decay(wide[:, 0], *TRUE.values())
    model = decay if library is np else torch_decay
    weighted = LMRegressor(model, residual=lambda p, t: weights * (p - t), p0=P0).fit(wide, exact)
    short = LMRegressor(lambda x, a, b, c: weights * model(x, a, b, c), p0=P0)
    short.fit(wide, exact * np.asarray(weights))
    np.testing.assert_allclose(short.theta_, list(TRUE.values()), rtol=1e-7)
    scaled = clone(short).set_params(chunk_rows=64)
    scaled.fit(wide, exact * np.asarray(weights))
    for est in (weighted, scaled):
        np.testing.assert_allclose(est.theta_, list(TRUE.values()), rtol=1e-7)
        assert est.result_.used["rows"].startswith("coupled")


@pytest.mark.parametrize("rounded", [lambda v: np.round(v, 6), lambda v: v.astype(np.float32)])
@pytest.mark.parametrize("jac", ["auto", "2-point"])
def test_a_model_that_rounds(rounded, jac):
    """Differences with steps for float64 see nothing of a model that keeps six digits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        est = LMRegressor(lambda x, a, b, c: rounded(decay(x, a, b, c)), p0=P0, jac=jac).fit(X, Y)
    assert est.rank_ == 3
    np.testing.assert_allclose(est.theta_, REFERENCE.theta_, rtol=1e-3)


def test_a_transposed_output_is_refused_with_a_residual_too():
    targets = np.column_stack([Y, 2 * Y])
    with pytest.raises(ValueError, match=r"model: .*shape \(2, 60\)"):
        LMRegressor(lambda x, a, b: np.stack([a * x, b * x]), residual=lambda p, t: p - t, p0=[1, 1]).fit(X, targets)


@pytest.mark.parametrize("model", [decay, torch_decay])
def test_a_model_that_writes_to_its_input_does_not_reach_the_data(model):
    def writing(x, a, b, c):
        x -= 1.0
        return model(x, a, b, c)

    mine = X.copy()
    with pytest.raises(ValueError, match=r"read-only|writes to its input"):
        LMRegressor(writing, p0=P0).fit(mine, Y)
    np.testing.assert_array_equal(mine, X)


def test_predict_fn_gets_all_rows():
    est = LMRegressor(
        residual=lambda t, x, y: t[0] * np.exp(-t[1] * x) - y,
        predict_fn=lambda t, x: t[0] * np.exp(-t[1] * x) - np.mean(x),
        p0=[1.0, 1.0],
        chunk_rows=10,
    ).fit(X, 2 * np.exp(-X[:, 0]))
    np.testing.assert_allclose(est.predict(X), 2 * np.exp(-X[:, 0]) - 2.0, rtol=1e-7, atol=1e-9)


def test_a_failed_fit_leaves_the_estimator_as_it_was():
    est = LMRegressor(decay, p0=P0).fit(X, Y)
    before = est.predict(X)
    est.set_params(model=lambda x, a, b, c: np.log(a) + b * x + c, p0=[-1.0, 1.0, 0.0])
    with pytest.raises(ValueError, match="not finite at the start"):
        est.fit(X, Y)
    np.testing.assert_array_equal(est.predict(X), before)


def test_a_numpy_residual_of_a_model_of_both_worlds():
    line = 3 * X[:, 0] + 1
    for residual in (lambda p, t: np.arctan(p - t), lambda p, t: np.where(p > t, 1.0, 2.0) * (p - t)):
        est = LMRegressor(lambda x, a, b: a * x + b, residual=residual, p0=[1.0, 1.0]).fit(X, line)
        np.testing.assert_allclose(est.theta_, [3.0, 1.0], rtol=1e-6)
    est = LMRegressor(residual=lambda t, x, y: t[0] * x + t[1] - y, predict_fn=lambda t, x: np.polyval(t, x), p0=[1, 1])
    np.testing.assert_allclose(est.fit(X, line).predict(X), line, rtol=1e-7)


def test_an_error_of_the_model_while_it_is_linearised_keeps_the_best_point():
    calls = [0]

    def breaking(x, a, b, c):
        calls[0] += 1
        if calls[0] > 40:
            raise RuntimeError("solver failed")
        return decay(x, a, b, c)

    est = LMRegressor(breaking, p0=P0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            est.fit(X, Y)
    except RuntimeError:
        pass
    assert est.result_.cost <= 0.5 * np.sum((decay(X[:, 0], *P0) - Y) ** 2)
    assert not est.result_.success


@pytest.mark.parametrize("options", [{"max_iter": "auto"}, {"jac": np.ones(3)}, {"dtype": [1]}, {"solver": ["qr"]}])
def test_options_of_the_wrong_type_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        LMRegressor(decay, p0=P0, **options).fit(X, Y)


def test_a_scalar_start_is_one_parameter():
    assert LMRegressor(lambda x, a: a * x, p0=1.0).fit(X, 2 * X[:, 0]).params_ == {"a": pytest.approx(2.0)}
