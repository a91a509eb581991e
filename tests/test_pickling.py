"""Pickles and copies of an estimator: what is in them, where they load, and what they say when they cannot."""

import copy
import functools
import os
import pickle
import sys
import threading
import types
import warnings
from dataclasses import replace

import joblib
import numpy as np
import pytest
import torch
from forked import program
from on_cuda import OnCuda, as_on_cuda
from sklearn.base import clone
from sklearn.exceptions import InconsistentVersionWarning
from sklearn.model_selection import GridSearchCV, KFold, cross_validate

from lmfit_gpu import LMRegressor, TrustRegion
from lmfit_gpu.curve_fit import CurveRegressor
from lmfit_gpu.persistence import pickling

X = np.linspace(0, 4, 40)[:, None]
Y = 2.5 * np.exp(-1.3 * X[:, 0]) + 0.01 * np.cos(40 * X[:, 0])
P0 = [1.0, 1.0]


def decay(x, a, b):
    return a * np.exp(-b * x)


def torch_decay(x, a, b):
    return a * torch.exp(-b * x)


def residual(theta, X, y):
    return theta[0] * np.exp(-theta[1] * X) - y


def predict_fn(theta, X):
    return theta[0] * np.exp(-theta[1] * X)


def halved(prediction, target):
    return (prediction - target) / 2


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()


def scaled_decay(scale):
    return lambda x, a, b: scale * a * np.exp(-b * x)


def cauchy(z):
    return np.stack((np.log1p(z), 1 / (1 + z), -1 / (1 + z) ** 2))


FITTED = {
    "numpy, short path": lambda: LMRegressor(decay, p0=P0),
    "numpy, general path": lambda: LMRegressor(decay, p0=P0, max_iter=50, solver="cholesky"),
    "torch": lambda: LMRegressor(torch_decay, p0=P0),
    "lambda": lambda: LMRegressor(lambda x, a, b: a * torch.exp(-b * x), p0=P0),
    "closure": lambda: LMRegressor(scaled_decay(2.0), p0=P0),
    "partial of a closure": lambda: LMRegressor(functools.partial(scaled_decay(2.0), b=1.3), p0=[1.0]),
    "module": lambda: LMRegressor(net(), max_iter=10),
    "factory": lambda: LMRegressor(functools.partial(torch.nn.Linear, 1, 1, dtype=torch.float64), random_state=0),
    "residual": lambda: LMRegressor(residual=residual, predict_fn=predict_fn, p0=P0),
    "residual by lambdas": lambda: LMRegressor(
        residual=lambda theta, X, y: residual(theta, X, y), predict_fn=lambda theta, X: predict_fn(theta, X), p0=P0
    ),
    "model and residual": lambda: LMRegressor(decay, residual=lambda p, t: halved(p, t), p0=P0),
    "constraints": lambda: LMRegressor(
        decay, p0={"a": 1.0, "s": 1.0}, tied={"b": lambda s: 2 * s}, bounds={"a": (0, 10)}
    ),
    "fixed": lambda: LMRegressor(decay, p0=[1.0, 1.3], fixed=["b"]),
    "loss, jac, callback, p0": lambda: LMRegressor(
        decay,
        p0=lambda x, y: [1.0, 1.0],
        loss=lambda z: cauchy(z),
        jac=lambda x, a, b: np.stack((np.exp(-b * x), -a * x * np.exp(-b * x)), 1),
        callback=lambda record: False,
    ),
    "damping": lambda: LMRegressor(decay, p0=P0, damping=TrustRegion(grow=2.0)),
    "curve": lambda: CurveRegressor(decay, p0=P0),
}


def fit(est, X=X, y=Y):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a network that ten iterations do not bring to its end
        return est.fit(X, y)


def loaded(est, protocol=pickle.HIGHEST_PROTOCOL):
    return pickle.loads(pickle.dumps(est, protocol))


@pytest.mark.parametrize("kind", FITTED)
@pytest.mark.parametrize("protocol", [2, 5])
def test_a_pickle_holds_the_whole_fit(kind, protocol):
    est = fit(FITTED[kind]())
    other = loaded(est, protocol)
    assert type(other) is type(est)
    np.testing.assert_array_equal(other.predict(X), est.predict(X))
    assert other.params_ == est.params_
    np.testing.assert_array_equal(other.covariance_, est.covariance_)
    assert other.report() == est.report()
    assert list(map(repr, other.result_.history)) == list(map(repr, est.result_.history))
    assert other.score(X, Y) == est.score(X, Y)
    assert other.get_params().keys() == est.get_params().keys()
    np.testing.assert_array_equal(fit(clone(other)).theta_, est.theta_)


@pytest.mark.parametrize("kind", FITTED)
def test_an_estimator_that_is_not_fitted_is_pickled_too(kind):
    est = FITTED[kind]()
    np.testing.assert_array_equal(fit(loaded(est)).theta_, fit(est).theta_)


@pytest.mark.parametrize("kind", ["numpy, short path", "lambda", "module", "constraints"])
def test_joblib_dump(kind, tmp_path):
    est = fit(FITTED[kind]())
    joblib.dump(est, tmp_path / "est.joblib", compress=3)
    np.testing.assert_array_equal(joblib.load(tmp_path / "est.joblib").predict(X), est.predict(X))


def test_pickling_changes_nothing_in_the_object():
    est = FITTED["constraints"]().fit(X, Y)
    before = dict(est.__dict__)
    pickle.dumps(est)
    assert est.__dict__.keys() == before.keys()
    assert all(est.__dict__[name] is before[name] for name in before)


def test_one_object_stays_one_object():
    for est in (FITTED["lambda"](), FITTED["numpy, short path"]()):
        other = loaded(est.fit(X, Y))
        assert other._setup.model.function is other.model
        assert other._setup.predictor is other._setup.model
    other = loaded(FITTED["constraints"]().fit(X, Y))
    assert other._setup.constraints.ties[0].function is other.tied["b"]
    other = loaded(fit(FITTED["module"]()))
    assert other.module_ is other._setup.predictor.module
    assert other.model is not other.module_


# ---- size


def test_a_function_of_a_module_is_stored_by_its_name():
    """A def keeps its name, not its code: the class and the options are all that is in the pickle."""
    data = pickle.dumps(LMRegressor(decay, p0=P0))
    assert b"test_pickling" in data
    assert b"decay" in data
    assert len(data) < 1500
    assert loaded(LMRegressor(decay)).model is decay


@pytest.mark.parametrize("kind", ["numpy, short path", "numpy, general path", "lambda", "module", "constraints"])
def test_a_pickle_does_not_hold_the_data(kind):
    n_rows = 100_000
    x = np.linspace(0, 4, n_rows)[:, None]
    y = decay(x[:, 0], 2.5, 1.3) + 0.01 * np.cos(40 * x[:, 0])
    tensors = [(torch.from_numpy(x), torch.from_numpy(y))] if kind in ("lambda", "module") else []
    for data in ((x, y), *tensors):
        est = FITTED[kind]().set_params(max_iter=3, callback=None)
        fit(est, *data)
        assert len(pickle.dumps(est)) < 20_000 < 8 * n_rows


# ---- without a GPU


def test_the_stand_in_is_honest():
    """Its tensors say cuda:0, compute, come to the CPU by a copy, and cannot be pickled."""
    tensor = OnCuda(torch.arange(3.0))
    assert tensor.device == torch.device("cuda", 0)
    assert (tensor * 2).device.type == "cuda"
    assert torch.equal(tensor.cpu(), torch.arange(3.0))
    for where in (tensor, torch.nn.Parameter(tensor), as_on_cuda(net())):
        with pytest.raises(AssertionError, match="reached the pickle"):
            pickle.dumps(where)


def on_cuda(est):
    """Return a fitted estimator as a fit on cuda:0 would leave it."""
    est.devices_ = (torch.device("cuda", 0),)
    est._setup = replace(
        est._setup,
        theta=OnCuda(est._setup.theta),
        devices=est.devices_,
        rows=replace(est._setup.rows, X=OnCuda(est._setup.rows.X)),
    )
    if hasattr(est, "module_"):
        as_on_cuda(est.module_)
    if isinstance(est.model, torch.nn.Module):
        as_on_cuda(est.model)
    return est


@pytest.mark.parametrize("kind", ["torch", "lambda", "module"])
def test_a_fit_on_a_gpu_loads_and_predicts_on_the_cpu(kind):
    est = fit(FITTED[kind]())
    expected = est.predict(X)
    on_cuda(est).set_params(devices="cuda:0", p0=OnCuda(torch.tensor(P0)))
    other = loaded(est)
    np.testing.assert_array_equal(other.predict(X), expected)
    assert other.devices_ == other._setup.devices == (torch.device("cpu"),)
    assert other._setup.theta.device == other._setup.rows.X.device == other.p0.device == torch.device("cpu")
    assert other.devices == "cuda:0"  # an option stays what the user gave
    assert torch.equal(other.p0, torch.tensor(P0))
    if kind == "module":
        for module in (other.module_, other.model):
            assert {p.device.type for p in module.parameters()} == {"cpu"}
            assert all(isinstance(p, torch.nn.Parameter) and p.requires_grad for p in module.parameters())
    assert est.devices_ == est._setup.devices == (torch.device("cuda", 0),)  # nothing of the object has moved
    assert est._setup.theta.device.type == est.p0.device.type == "cuda"


def test_tensors_on_a_gpu_in_an_object_of_the_user_come_to_the_cpu():
    weights = OnCuda(torch.ones(2))
    other = loaded(LMRegressor(lambda x, a: a * x * weights.sum(), bounds=(OnCuda(torch.zeros(1)), np.inf)))
    assert other.model.__closure__[0].cell_contents.device.type == "cpu"
    assert other.bounds[0].device.type == "cpu"


def test_frozen_parameters_stay_frozen_on_the_way():
    module = net()
    module[0].weight.requires_grad_(False)
    other = loaded(LMRegressor(as_on_cuda(module)))
    assert [p.requires_grad for p in other.model.parameters()] == [False, True, True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["torch", "module"])
def test_on_a_real_gpu(kind):
    est = fit(FITTED[kind]().set_params(devices="cuda"))
    other = loaded(est)
    assert other.devices_ == (torch.device("cpu"),)
    np.testing.assert_allclose(other.predict(X), est.predict(X), rtol=1e-10)


# ---- copies


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_share_functions(copied):
    lock = threading.Lock()  # a copy that went through a pickle would fail

    def model(x, a, b):
        with lock:
            return a * np.exp(-b * x)

    est = LMRegressor(model, p0=P0).fit(X, Y)
    other = copied(est)
    assert other.model is model is other._setup.model.function
    np.testing.assert_array_equal(other.predict(X), est.predict(X))
    assert (other.theta_ is est.theta_) == (copied is copy.copy)
    other.set_params(max_iter=3)
    assert est.max_iter == 1000
    assert clone(est).model is model


def test_a_deep_copy_of_a_network_is_its_own():
    est = fit(LMRegressor(net(), max_iter=3))
    expected = est.predict(X)
    other = copy.deepcopy(est)
    assert other.module_ is other._setup.predictor.module is not est.module_
    with torch.no_grad():
        next(other.module_.parameters()).zero_()
    np.testing.assert_array_equal(est.predict(X), expected)


def test_copies_and_pickles_of_an_estimator_that_refers_to_itself():
    """A callback often holds the estimator it watches."""

    class Watch:
        def __init__(self, est):
            self.est = est

        def __call__(self, record):
            return False

    for model in (decay, lambda x, a, b: decay(x, a, b)):
        est = LMRegressor(model, p0=P0)
        est.callback = Watch(est)
        for other in (loaded(est), copy.deepcopy(est)):
            assert other.callback.est is other


class Holder:
    def __init__(self, est):
        self.est = est

    def __call__(self, record):
        return False


def test_a_state_that_pickle_can_store_is_left_as_it_is():
    """So subclasses can read it, and estimators that share a module still share it after one pickle."""
    est = LMRegressor(decay, p0=P0)
    est.callback = Holder(est)
    assert est.__getstate__()["model"] is decay
    module = net()
    first, second = pickle.loads(pickle.dumps((LMRegressor(module), LMRegressor(module))))
    assert first.model is second.model


def test_equal_estimators_have_equal_hashes():
    """joblib.Memory recognises an estimator by its pickle."""
    assert joblib.hash(LMRegressor(decay, p0=P0)) == joblib.hash(clone(LMRegressor(decay, p0=P0)))
    assert joblib.hash(LMRegressor(decay, p0=P0)) != joblib.hash(LMRegressor(decay, p0=[1.0, 2.0]))


# ---- versions


def test_code_of_another_python_is_refused_and_names_are_not(monkeypatch):
    by_value, by_name = (pickle.dumps(fit(FITTED[kind]())) for kind in ("lambda", "torch"))
    monkeypatch.setattr(pickling, "sys", types.SimpleNamespace(version_info=(3, 99, 0)))
    running = f"{sys.version_info[0]}.{sys.version_info[1]}"
    with pytest.raises(
        pickle.UnpicklingError, match=rf"pickled under Python {running} with the code of <lambda>.*3\.99"
    ):
        pickle.loads(by_value)
    assert pickle.loads(by_name).model is torch_decay


@pytest.mark.parametrize("kind", ["lambda", "torch"])
def test_another_version_of_the_package_warns(kind, monkeypatch):
    data = pickle.dumps(fit(FITTED[kind]()))
    monkeypatch.setattr(pickling, "version", lambda name: "99.0")
    with pytest.warns(InconsistentVersionWarning, match=r"LMRegressor from version .* when using version 99\.0"):
        pickle.loads(data)


# ---- what cannot be pickled


def with_variable(held):
    def model(x, a, b):
        return (held, a * np.exp(-b * x))[1]

    return model


CANNOT = {
    "a lock": (threading.Lock, "a _thread.lock"),
    "an open file": (
        lambda: open(os.devnull, "w"),  # noqa: SIM115  closed below
        "a _io.TextIOWrapper",
    ),
    "a generator": (lambda: (i for i in range(3)), "<genexpr> (generator)"),
}


@pytest.mark.parametrize("what", CANNOT)
@pytest.mark.parametrize("fitted", [False, True])
def test_the_error_names_the_argument_the_variable_and_the_remedy(what, fitted):
    made, kind = CANNOT[what]
    held = made()
    est = LMRegressor(with_variable(held), p0=P0)
    est = est.fit(X, Y) if fitted else est
    with pytest.raises(pickle.PicklingError) as caught:
        pickle.dumps(est)
    message = str(caught.value)
    assert message.startswith(
        "model: cannot be pickled, not even by value: the function with_variable.<locals>.model ("
    )
    assert f"the variable 'held' is {kind}" in message
    assert "at the top level of a module" in message
    assert "est.save(path)" in message
    assert "0x" not in message
    if what == "an open file":
        held.close()


def locked_module():
    module = net()
    module[1].lock = threading.Lock()
    return module


REFUSED = {
    "residual": lambda bad: LMRegressor(residual=bad, p0=P0),
    "predict_fn": lambda bad: LMRegressor(residual=residual, predict_fn=bad, p0=P0),
    "p0": lambda bad: LMRegressor(decay, p0=bad),
    "loss": lambda bad: LMRegressor(decay, loss=bad),
    "jac": lambda bad: LMRegressor(decay, jac=bad),
    "callback": lambda bad: LMRegressor(decay, callback=bad),
    "tied": lambda bad: LMRegressor(decay, tied={"b": bad}),
    "model": lambda bad: LMRegressor(functools.partial(bad, b=1.0)),
}


@pytest.mark.parametrize("argument", REFUSED)
def test_every_argument_is_named(argument):
    with pytest.raises(pickle.PicklingError, match=rf"^{argument}: cannot be pickled.*variable 'held'.*_thread\.lock"):
        pickle.dumps(REFUSED[argument](with_variable(threading.Lock())))


def test_a_module_that_holds_a_lock_is_named():
    with pytest.raises(pickle.PicklingError, match=r"^model: .*attribute 'lock'.* is a _thread\.lock"):
        pickle.dumps(LMRegressor(locked_module()))


# ---- parallel searches

BACKENDS = ["loky", "multiprocessing"]


def searched(est, backend):
    search = GridSearchCV(est, {"p0": [[1.0, 1.0], [2.0, 1.5]]}, cv=KFold(2, shuffle=True, random_state=0), n_jobs=2)
    with joblib.parallel_config(backend=backend):
        return search.fit(X, Y)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_search_with_a_lambda_runs_in_workers(backend):
    search = searched(LMRegressor(lambda x, a, b: a * np.exp(-b * x)), backend)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    np.testing.assert_array_equal(
        search.best_estimator_.theta_, LMRegressor(decay, **search.best_params_).fit(X, Y).theta_
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_fitted_estimators_come_back_from_workers(backend):
    with joblib.parallel_config(backend=backend):
        found = cross_validate(
            LMRegressor(lambda x, a, b: a * np.exp(-b * x), p0=P0), X, Y, cv=2, n_jobs=2, return_estimator=True
        )
    halves = [(slice(20, 40)), (slice(0, 20))]
    for est, rows in zip(found["estimator"], halves, strict=True):
        np.testing.assert_array_equal(est.theta_, LMRegressor(decay, p0=P0).fit(X[rows], Y[rows]).theta_)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_search_that_cannot_be_pickled_says_so_before_any_fit(backend, tmp_path):
    calls, lock = tmp_path / "calls", threading.Lock()

    def model(x, a, b):
        with lock, calls.open("a") as file:
            file.write("x")
        return a * np.exp(-b * x)

    with pytest.raises(pickle.PicklingError) as caught:
        searched(LMRegressor(model), backend)
    said = f"{caught.value} {caught.value.__cause__}"  # loky puts the worker's error behind one of its own
    assert "model: cannot be pickled" in said
    assert "the variable 'lock' is a _thread.lock" in said
    assert not calls.exists()
    LMRegressor(model, p0=P0).fit(X, Y)
    assert calls.exists()  # the record works


SCRIPT = """
import sys
import numpy as np
import pickle
from lmfit_gpu import LMRegressor
x = np.linspace(0, 4, 40)[:, None]
if sys.argv[1] == "dump":
    RATE = 1.5
    def decay(x, a, b):
        return a * np.exp(-RATE * b * x)
    est = LMRegressor(decay, p0=[1, 1]).fit(x, 2 * np.exp(-x[:, 0]) + 0.01 * np.cos(40 * x[:, 0]))
    with open(sys.argv[2], "wb") as file:
        pickle.dump(est, file)
else:
    with open(sys.argv[2], "rb") as file:
        est = pickle.load(file)
print(est.predict(x).tobytes().hex())
"""


def test_a_def_of_a_script_or_notebook_loads_in_another_process(tmp_path):
    def run(what):
        with program(["-c", SCRIPT, what, str(tmp_path / "est.pickle")], dict(os.environ)) as running:
            assert running.wait(60) == 0, running.written("err")
            return running.written()

    dumped = run("dump")
    assert len(dumped) > 40
    assert run("load") == dumped


def test_a_state_without_version_is_read():
    """As pickles of before this module are, and those of subclasses that write their own."""
    est = LMRegressor(decay, p0=P0).fit(X, Y)
    other = LMRegressor.__new__(LMRegressor)
    other.__setstate__(dict(est.__dict__))
    np.testing.assert_array_equal(other.predict(X), est.predict(X))
