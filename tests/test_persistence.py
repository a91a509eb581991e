"""save and load: what comes back, what must be given again, and what is refused."""

import functools
import json
import os
import re
import types
import warnings

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds
from sklearn import config_context
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from test_pickling import FITTED, X, Y, decay, fit, loaded, net, on_cuda, predict_fn, residual, torch_decay

from lmfit_gpu import EarlyStopping, LMRegressor, MarquardtDamping, NielsenDamping, ProximalDamping, TrustRegion
from lmfit_gpu.curve_fit import CurveRegressor
from lmfit_gpu.persistence import container
from lmfit_gpu.persistence.encoding import NotDataError, decoded, encoded
from lmfit_gpu.result import Status


class Scaled(torch.nn.Module):
    """A network with a buffer, a frozen parameter and BatchNorm, in float32."""

    def __init__(self, n_features_in_=1, n_outputs=1, power=1):
        super().__init__()
        self.register_buffer("offset", torch.tensor([0.25]))
        self.lin = torch.nn.Linear(n_features_in_, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.out = torch.nn.Linear(2, n_outputs)
        self.norm.bias.requires_grad_(False)
        self.power = power

    def forward(self, X):
        return self.out(torch.tanh(self.norm(self.lin(X + self.offset)))) ** self.power


def learned():
    """Return a network whose buffers are not those that a new one has."""
    torch.manual_seed(1)
    module = Scaled()
    module.offset += 1
    module(torch.linspace(0, 4, 50)[:, None])  # moves the running statistics of BatchNorm
    return module


SAVED = {
    **FITTED,
    "network": lambda: LMRegressor(hidden_layer_sizes=(4, 3), alpha=0.1, random_state=0, max_iter=20),
    "early stopping": lambda: LMRegressor(
        early_stopping=EarlyStopping(fraction=0.2, patience=3), random_state=0, max_iter=20
    ),
    "buffers": lambda: LMRegressor(learned(), max_iter=5),
    "module in float64": lambda: LMRegressor(learned(), dtype=torch.float64, max_iter=5),
    "module with bounds": lambda: LMRegressor(net(), bounds={"0.weight": (-1, 1)}, fixed=["2.bias"], max_iter=5),
    "own factory": lambda: LMRegressor(Scaled, max_iter=5, random_state=3),
    "module and residual": lambda: LMRegressor(net(), residual=lambda p, t: p - t, max_iter=5),
    "theta": lambda: LMRegressor(lambda X, theta: theta[0] * torch.exp(-theta[1] * X), p0=[1.0, 1.0]),
    "float32": lambda: LMRegressor(torch_decay, p0=[2.0, 1.0], dtype="float32"),
    "cauchy loss": lambda: LMRegressor(decay, p0=[2.0, 1.0], loss="cauchy", f_scale=0.1),
    "not converged": lambda: LMRegressor(decay, p0=[1.0, 1.0], max_iter=1),
    "a start that was searched": lambda: LMRegressor(torch_decay, p0="auto", bounds=([0, 0], [5, 5]), random_state=0),
}
NO_MODEL = {"residual", "residual by lambdas", "network", "early stopping"}


def code_of(path, est):
    """Return what a file asks for, taken from the estimator that was saved."""
    document, _ = container.read_file(path)
    asked = [name for name, value in document["options"].items() if isinstance(value, dict) and "code" in value]
    return {name: getattr(est, name) for name in asked}


def saved(kind, path):
    est = fit(SAVED[kind]())
    est.save(path)
    return est


@pytest.mark.parametrize("kind", SAVED)
def test_what_comes_back(kind, tmp_path):
    path = tmp_path / "est"
    est = saved(kind, path)
    code = code_of(path, est)
    assert ("model" in code) == (kind not in NO_MODEL)
    other = type(est).load(path, **code)
    assert type(other) is type(est)
    assert vars(other).keys() == vars(est).keys()
    np.testing.assert_array_equal(other.predict(X), est.predict(X))
    assert other.score(X, Y) == est.score(X, Y)
    assert other.params_ == est.params_
    assert list(other.params_) == list(est.params_)
    for name in ("theta_", "stderr_", "covariance_"):
        np.testing.assert_array_equal(getattr(other, name), getattr(est, name))
    for name in ("rank_", "n_iter_", "n_features_in_", "solver_", "backend_"):
        assert getattr(other, name) == getattr(est, name)
    result, expected = other.result_, est.result_
    assert (result.status, result.message, result.success) == (expected.status, expected.message, expected.success)
    assert (result.nfev, result.njev, result.dof, result.cost) == (
        expected.nfev,
        expected.njev,
        expected.dof,
        expected.cost,
    )
    assert result.used == expected.used
    assert result.roles == expected.roles
    assert list(map(repr, result.history)) == list(map(repr, expected.history))
    assert other.report() == est.report()
    assert repr(other.get_params()) == repr(est.get_params())
    assert_as_good(other, est, kind, tmp_path)


def assert_as_good(other, est, kind, folder):
    """Check that it is cloned, pickled, saved and fitted again, from the start or from where it is."""
    code = code_of(folder / "est", est)
    np.testing.assert_array_equal(loaded(other).predict(X), est.predict(X))
    other.save(folder / "again")
    np.testing.assert_array_equal(type(est).load(folder / "again", **code).predict(X), est.predict(X))
    np.testing.assert_array_equal(fit(clone(other)).theta_, est.theta_)
    if kind != "loss, jac, callback, p0":  # there p0 is a function, and warm_start goes before it
        warm, expected = (fit(one.set_params(warm_start=True, max_iter=2)) for one in (other, est))
        np.testing.assert_array_equal(warm.theta_, expected.theta_)


def test_the_file_is_data_alone(tmp_path):
    """One safetensors file that safetensors itself reads, with valid JSON: no pickle, no NaN, no code."""
    path = tmp_path / "est"
    saved("constraints", path)
    with safetensors.safe_open(path, framework="pt") as file:
        metadata, names = file.metadata(), set(file.keys())
    assert metadata["format"] == "lmfit_gpu estimator"
    assert {"theta", "factor", "undetermined", "constraints.lower", "constraints.upper"} <= names

    def refuse(constant):
        raise AssertionError(constant)

    document = json.loads(metadata["document"], parse_constant=refuse)
    assert document["result"]["stop"]["status"].startswith("CONVERGED")
    assert document["options"]["model"] == {"code": "decay of test_pickling, called with (x, a, b)"}
    assert b"pickle" not in path.read_bytes().replace(b"test_pickling", b"")
    assert os.listdir(tmp_path) == ["est"]


def test_the_state_of_a_module_keeps_its_dtypes(tmp_path):
    path = tmp_path / "est"
    est = saved("buffers", path)
    state = LMRegressor.load(path, model=Scaled()).module_.state_dict()
    for name, value in est.module_.state_dict().items():
        assert torch.equal(state[name], value)
        assert state[name].dtype == value.dtype
    assert state["lin.weight"].dtype == torch.float32
    assert state["norm.num_batches_tracked"].dtype == torch.int64
    assert float(state["offset"]) == 1.25


def test_a_state_in_float64_is_not_rounded_by_a_fresh_module_in_float32(tmp_path):
    est = fit(LMRegressor(learned().double(), max_iter=3))
    with torch.no_grad():
        est.module_.offset.fill_(1 / 3)
        est.module_.norm.bias.fill_(0.1)  # frozen
    est.save(tmp_path / "est")
    module = LMRegressor.load(tmp_path / "est", Scaled()).module_
    assert float(module.offset) == 1 / 3
    assert float(module.norm.bias[0].detach()) == 0.1


def test_the_module_that_is_given_is_not_changed(tmp_path):
    path = tmp_path / "est"
    saved("buffers", path)
    module = Scaled()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    est = LMRegressor.load(path, module)
    assert est.model is module
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_module_may_come_from_a_factory_and_the_other_way_round(tmp_path):
    path = tmp_path / "est"
    for kind, model in (("buffers", Scaled), ("own factory", Scaled())):
        est = saved(kind, path)
        np.testing.assert_array_equal(LMRegressor.load(path, model=model).predict(X), est.predict(X))


class Small(LMRegressor):
    """A subclass that offers few of the arguments."""

    def __init__(self, random_state=None, n_units=3):
        super().__init__(hidden_layer_sizes=n_units, random_state=random_state, early_stopping=True)
        self.n_units = n_units


def test_a_subclass_with_fewer_arguments_is_saved_and_loaded(tmp_path):
    est = Small(random_state=0, n_units=2).fit(X, Y)
    est.save(tmp_path / "fit.safetensors")
    loaded = Small.load(tmp_path / "fit.safetensors")
    np.testing.assert_array_equal(loaded.predict(X), est.predict(X))
    assert loaded.n_units == 2


def test_sizes_set_after_the_fit_are_for_the_next_one(tmp_path):
    est = LMRegressor(hidden_layer_sizes=(3, 2), alpha=0.1, early_stopping=True, random_state=0).fit(X, Y)
    est.set_params(hidden_layer_sizes=7).save(tmp_path / "fit.safetensors")
    loaded = LMRegressor.load(tmp_path / "fit.safetensors")
    np.testing.assert_array_equal(loaded.predict(X), est.predict(X))
    assert loaded.hidden_layer_sizes == 7


def test_loading_draws_no_numbers(tmp_path):
    for kind, code in (("network", {}), ("own factory", {"model": Scaled})):
        saved(kind, tmp_path / "est")
        torch.manual_seed(5)
        LMRegressor.load(tmp_path / "est", **code)
        drawn = torch.rand(1)
        torch.manual_seed(5)
        assert torch.equal(torch.rand(1), drawn)


def test_names_of_columns_and_more_outputs(tmp_path):
    import pandas as pd

    frame = pd.DataFrame({"time": X[:, 0], "dose": np.cos(X[:, 0])})
    y = np.stack((Y, Y**2), axis=1)
    est = fit(LMRegressor(random_state=0, max_iter=5), frame, y)
    est.save(tmp_path / "est")
    other = LMRegressor.load(tmp_path / "est")
    assert list(other.feature_names_in_) == ["time", "dose"]
    np.testing.assert_array_equal(other.predict(frame), est.predict(frame))
    assert other.predict(frame).shape == (40, 2)
    with pytest.raises(ValueError, match="feature names should match"):
        other.predict(frame.rename(columns={"dose": "other"}))


def test_metadata_routing_comes_back(tmp_path):
    with config_context(enable_metadata_routing=True):
        est = LMRegressor(decay, p0=[1.0, 1.0]).set_fit_request(sigma=True, sample_weight="counts").fit(X, Y)
        est.save(tmp_path / "est")
        other = LMRegressor.load(tmp_path / "est", decay)
        assert other.get_metadata_routing().fit.requests == est.get_metadata_routing().fit.requests
        assert other.get_metadata_routing().fit.requests["sample_weight"] == "counts"


@pytest.mark.parametrize("kind", ["buffers", "torch", "network"])
def test_a_fit_on_a_gpu_loads_on_the_cpu(kind, tmp_path):
    est = fit(SAVED[kind]())
    expected, code = est.predict(X), {name: getattr(est, name) for name in ("model",) if est.model is not None}
    if kind == "buffers":
        code = {"model": Scaled()}
    on_cuda(est).set_params(devices="cuda").save(tmp_path / "est")
    other = LMRegressor.load(tmp_path / "est", **code)
    np.testing.assert_array_equal(other.predict(X), expected)
    assert other.devices_ == other._setup.devices == (torch.device("cpu"),)
    assert other._setup.theta.device == torch.device("cpu")
    assert other.devices == "cuda"
    if kind != "torch":
        assert {p.device.type for p in other.module_.parameters()} == {"cpu"}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["network", "torch"])
def test_on_a_real_gpu(kind, tmp_path):
    est = fit(SAVED[kind]().set_params(devices="cuda"))
    est.save(tmp_path / "est")
    other = LMRegressor.load(tmp_path / "est", **code_of(tmp_path / "est", est))
    assert other.devices_ == (torch.device("cpu"),)
    np.testing.assert_allclose(other.predict(X), est.predict(X), rtol=1e-10)


# ---- what must be given


MISSING = {
    "numpy, short path": r"Give what was saved as model \(decay of test_pickling, called with \(x, a, b\)\)$",
    "buffers": r"model \(a module Scaled of test_persistence with lin\.weight \(2, 1\), lin\.bias \(2,\), norm\.weight",
    "own factory": r"model \(the class Scaled of test_persistence with lin\.weight \(2, 1\)",
    "residual": r"residual \(residual of .*\); predict_fn \(predict_fn of test_pickling, called with \(theta, X\)\)$",
    "constraints": r"model \(decay .*\); tied \(\{'b': .*called with \(s\)\}\)$",
    "loss, jac, callback, p0": r"model .*; callback .*; jac .*; loss .*; p0 .*; callback=None leaves it out$",
}


@pytest.mark.parametrize("kind", MISSING)
def test_the_error_names_all_that_is_missing(kind, tmp_path):
    saved(kind, tmp_path / "est")
    with pytest.raises(ValueError, match=rf"^load: the file holds no code\. .*{MISSING[kind]}") as caught:
        LMRegressor.load(tmp_path / "est")
    assert "0x" not in str(caught.value)


def test_a_callback_can_be_left_out(tmp_path):
    est = saved("loss, jac, callback, p0", tmp_path / "est")
    code = code_of(tmp_path / "est", est)
    other = LMRegressor.load(tmp_path / "est", **{**code, "callback": None})
    assert other.callback is None
    np.testing.assert_array_equal(other.predict(X), est.predict(X))


def other_tie(s):
    return 3 * s


WRONG = {
    "another function": ("numpy, short path", {"model": lambda x, a, b: a * np.exp(b * x)}, "predicts otherwise"),
    "other names": (
        "numpy, short path",
        {"model": lambda x, height, b: height * np.exp(-b * x)},
        r"it takes height, b; the saved one takes a, b$",
    ),
    "names the other way round": ("numpy, short path", {"model": lambda x, b, a: a * np.exp(-b * x)}, "takes b, a;"),
    "more parameters": ("numpy, short path", {"model": lambda x, a, b, c: a * x + b + c}, "2 values, but .* takes 3"),
    "one vector": ("numpy, short path", {"model": lambda x, theta: theta[0] * x}, "it takes one vector theta; .* a, b"),
    "not one vector": ("theta", {"model": torch_decay}, "it takes a, b; the saved one takes one vector theta"),
    "torch for numpy": ("numpy, short path", {"model": torch_decay}, "it fails where the saved one predicts"),
    "no function": ("numpy, short path", {"model": 3}, "model: got 3; decay of test_pickling"),
    "a function for a module": ("buffers", {"model": decay}, "a module like the saved Scaled is expected"),
    "another architecture": ("module", {"model": torch.nn.Linear(1, 1)}, r"it has no '0\.bias', '0\.weight'"),
    "another width": (
        "module",
        {"model": torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))},
        r"'0\.weight' has shape \(4, 1\), the saved one \(3, 1\)",
    ),
    "one layer more": (
        "module",
        {"model": torch.nn.Sequential(*net(), torch.nn.Linear(1, 1))},
        r"it has also '3\.bias'",
    ),
    "another activation": (
        "module",
        {"model": torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))},
        "predicts otherwise",
    ),
    "same state, other attribute": ("buffers", {"model": Scaled(power=2)}, "predicts otherwise"),
    "nothing frozen": ("buffers", {"model": Scaled().requires_grad_(True)}, r"requires_grad of 'norm\.bias' is not"),
    "another predict_fn": (
        "residual",
        {"residual": residual, "predict_fn": lambda theta, X: theta[0] * X},
        "predict_fn: it predicts otherwise",
    ),
    "another tie": ("constraints", {"model": decay, "tied": {"b": other_tie}}, "another function: it makes 'b'"),
    "a tie of another parameter": (
        "constraints",
        {"model": decay, "tied": {"b": lambda a: 2 * a}},
        "'b' is to be a function of s",
    ),
    "other ties": ("constraints", {"model": decay, "tied": {"a": other_tie}}, "a dict with functions for 'b'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_code_that_is_not_that_of_the_saved_estimator(what, tmp_path):
    kind, code, message = WRONG[what]
    saved(kind, tmp_path / "est")
    with pytest.raises((ValueError, TypeError), match=rf"^load: .*{message}"):
        LMRegressor.load(tmp_path / "est", **code)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ({"solver": "qr"}, "got solver, which the file holds as data; set_params"),
        ({"colour": 1}, "got colour, which is no option"),
        ({"model": decay}, "the file needs none"),
    ],
    ids=["data", "unknown", "model"],
)
def test_what_is_not_asked_for_is_refused(code, message, tmp_path):
    saved("network", tmp_path / "est")
    with pytest.raises(TypeError, match=message):
        LMRegressor.load(tmp_path / "est", **code)


def test_a_model_that_rounds_otherwise_is_the_same(tmp_path):
    """On another machine exp may differ in the last digits."""
    saved("numpy, short path", tmp_path / "est")
    LMRegressor.load(tmp_path / "est", lambda x, a, b: a * np.exp(-b * x) * (1 + 1e-9))


@pytest.mark.parametrize(
    "model",
    [
        lambda x, a, b: a * np.exp(-b * np.where(np.size(x) == 40, x, np.nan)),
        lambda x, a, b: a * np.exp(-b * X[:, 0]),
        lambda x, a, b: (
            a * np.exp(-b * x) + 1e-3 * np.random.default_rng().standard_normal(np.shape(x)) * (len(x) == 4)
        ),
    ],
    ids=["NaN for the probe", "refuses the probe", "draws numbers for the probe"],
)
def test_a_model_that_has_no_probe_is_loaded_unchecked(model, tmp_path):
    est = fit(LMRegressor(model, p0=[2.0, 1.0]))
    est.save(tmp_path / "est")
    np.testing.assert_array_equal(LMRegressor.load(tmp_path / "est", model).predict(X), est.predict(X))


# ---- what cannot be saved


def test_only_a_fitted_estimator_is_saved(tmp_path):
    with pytest.raises(NotFittedError):
        LMRegressor(decay).save(tmp_path / "est")
    est = LMRegressor(decay, p0=[1.0, 1.0]).fit(X, Y).set_params(model=torch_decay)
    with pytest.raises(ValueError, match=r"^save: model was changed since the fit"):
        est.save(tmp_path / "est")
    with pytest.raises(ValueError, match=r"^save: model was changed since the fit"):
        est.set_params(model=net()).save(tmp_path / "est")
    est = FITTED["constraints"]().fit(X, Y).set_params(tied={"b": other_tie})
    with pytest.raises(ValueError, match=r"^save: tied was changed since the fit"):
        est.save(tmp_path / "est")
    est = LMRegressor(decay, p0=[1.0, 1.0]).fit(X, Y)
    est.note = object()
    with pytest.raises(ValueError, match=r"^save: the attribute note is no data"):
        est.save(tmp_path / "est")
    assert os.listdir(tmp_path) == []


def test_a_module_with_a_state_that_is_no_tensor(tmp_path):
    class Extra(torch.nn.Linear):
        def get_extra_state(self):
            return {"n": 1}

        def set_extra_state(self, state):
            pass

    est = fit(LMRegressor(Extra(1, 1), max_iter=3))
    with pytest.raises(ValueError, match=r"^save: '_extra_state' of the module's state is no tensor but dict"):
        est.save(tmp_path / "est")


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(broken, tmp_path, monkeypatch):
    path = tmp_path / "est"
    est = saved("numpy, short path", path)
    before = path.read_bytes()

    def fail(*args):
        raise OSError("no space left")

    monkeypatch.setattr(container, "os", types.SimpleNamespace(**{**vars(os), broken: fail}))
    with pytest.raises(OSError, match="no space left"):
        est.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["est"]


def test_a_file_is_replaced_and_a_link_kept(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "est")
    saved("torch", link)
    est = saved("network", link)
    assert link.is_symlink()
    np.testing.assert_array_equal(LMRegressor.load(link).predict(X), est.predict(X))


# ---- what cannot be loaded


def test_files_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError):
        LMRegressor.load(tmp_path / "nothing")
    path = tmp_path / "est"
    for content in (b"", b"x", b"something else", b"\xff" * 100, bytes(100)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"not a file that est\.save wrote"):
            LMRegressor.load(path)
    safetensors.torch.save_file({"theta": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=r"not one that est\.save wrote"):
        LMRegressor.load(path)


def test_another_version_of_the_format(tmp_path, monkeypatch):
    monkeypatch.setattr(container, "FORMAT_VERSION", "2")
    saved("network", tmp_path / "est")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"version '2' of the format; this lmfit_gpu reads '1'"):
        LMRegressor.load(tmp_path / "est")


UNKNOWN = {
    "option": (lambda d, t: d["options"].update(colour=1), "option 'colour'"),
    "result": (lambda d, t: d["result"].update(colour=1), "entry of the result 'colour'"),
    "status": (lambda d, t: d["result"]["stop"].update(status="TIRED"), "status 'TIRED'"),
    "history": (lambda d, t: t.update({"history.colour": torch.zeros(1)}), "column of the history 'colour'"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_a_file_of_a_newer_package_says_what_is_not_known(what, tmp_path):
    add, message = UNKNOWN[what]
    saved("network", tmp_path / "est")
    document, tensors = container.read_file(tmp_path / "est")
    document["library"] = "99.0"
    add(document, tensors)
    container.write_file(tmp_path / "est", document, tensors)
    with pytest.raises(ValueError, match=rf"the file is of lmfit_gpu 99\.0; this one does not know the {message}"):
        LMRegressor.load(tmp_path / "est")


def test_a_file_of_an_older_package_takes_the_defaults_of_new_options(tmp_path):
    saved("network", tmp_path / "est")
    document, tensors = container.read_file(tmp_path / "est")
    del document["options"]["verbose"]
    container.write_file(tmp_path / "est", document, tensors)
    assert LMRegressor.load(tmp_path / "est").verbose == LMRegressor().verbose


def test_whole_numbers_as_features_are_probed_in_between(tmp_path):
    """1**a is 1 for every a: rows of ones would not tell one model from another."""
    est = LMRegressor(lambda x, a: x**a, p0=[1.5]).fit(np.arange(1, 9)[:, None], np.arange(1.0, 9.0) ** 2)
    est.save(tmp_path / "est")
    with pytest.raises(ValueError, match="predicts otherwise"):
        LMRegressor.load(tmp_path / "est", lambda x, a: x ** (a + 1))


def test_tokens_of_an_embedding(tmp_path):
    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(5, 1, dtype=torch.float64)

        def forward(self, X):
            return self.table(X).sum((1, 2))

    tokens = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 4], [4, 0], [0, 2]])
    est = fit(LMRegressor(Words()), tokens, tokens.sum(1).double())
    est.save(tmp_path / "est")
    other = LMRegressor.load(tmp_path / "est", Words)
    assert torch.equal(other.predict(tokens), est.predict(tokens))
    assert "probe" in container.read_file(tmp_path / "est")[1]


def test_another_class(tmp_path):
    saved("network", tmp_path / "est")
    with pytest.raises(ValueError, match=r"the file is of LMRegressor; use LMRegressor.load, not CurveRegressor"):
        CurveRegressor.load(tmp_path / "est")


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """Return a directory, the bytes of a file there, and what it predicts."""
    folder = tmp_path_factory.mktemp("fuzz")
    est = saved("network", folder / "est")
    return folder, (folder / "est").read_bytes(), est.predict(X)


DAMAGED = r"damaged|not a file that est\.save wrote|of the format"


def read_damaged(network, data):
    """Return whether a damaged file is refused; if not, it must be read as what it was."""
    folder, _, expected = network
    (folder / "damaged").write_bytes(data)
    try:
        est = LMRegressor.load(folder / "damaged")
    except ValueError as error:
        assert re.search(DAMAGED, str(error)), error
        return True
    np.testing.assert_array_equal(est.predict(X), expected)
    return False


@settings(max_examples=300, derandomize=True, deadline=None)
@given(data=st.data())
def test_flipped_bytes_are_found(network, data):
    content = bytearray(network[1])
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    read_damaged(network, bytes(content))


@settings(max_examples=100, derandomize=True, deadline=None)
@given(data=st.data())
def test_cut_and_longer_files_are_found(network, data):
    content = network[1]
    length = data.draw(st.integers(0, len(content) - 1))
    assert read_damaged(network, content[:length])
    assert read_damaged(network, content + data.draw(st.binary(min_size=1, max_size=9)))


def test_every_bit_of_the_numbers_counts(network):
    content = network[1]
    start = 8 + int.from_bytes(content[:8], "little")
    for position in range(start, len(content), 37):
        for bit in (0, 7):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            assert read_damaged(network, bytes(damaged))


# ---- values as JSON


class Odd:
    pass


VALUES = {
    "plain": [None, True, 3, -(2**70), "é\n", 0.1, 5e-324, []],
    "not finite": [float("nan"), float("inf"), -float("inf")],
    "nested": ({"a": (1, [2.5, None])}, {3: "x", ("k", 1): {"y": 2}}),
    "tagged like ours": {"code": 1, "float": "nan", "tensor": "theta"},
    "set": {1, 2},
    "scalars": [np.float64(0.1), np.float32(0.5), np.int64(3), np.bool_(True), np.str_("a")],
    "arrays": [np.arange(3), np.zeros((2, 0)), np.array([True]), np.array([np.nan, 1]), np.array(1.5)],
    "a view": np.arange(9)[::-2],
    "words": [np.array(["a", "b"]), np.array(["a", "b"], dtype=object)],
    "tensors": [torch.arange(3), torch.tensor(1.5), torch.ones(2, dtype=torch.bfloat16)],
    "complex tensors": [torch.full((2,), 1 + 2j, dtype=torch.complex128), torch.tensor(1j).conj()],
    "devices": [torch.device("cuda", 1), torch.device("cpu")],
    "dtypes": [torch.float32, torch.float64, np.float32, np.dtype("float64")],
    "policies": [
        TrustRegion(grow=2.0),
        NielsenDamping(),
        MarquardtDamping(attempts=10),
        ProximalDamping(step_size=0.5),
        EarlyStopping(patience=3),
    ],
    "scaling": TrustRegion(scaling=np.array([1.0, 2.0])),
}  # fmt: skip


@pytest.mark.parametrize("kind", VALUES)
def test_values_come_back(kind, tmp_path):
    value, tensors = VALUES[kind], {}
    container.write_file(tmp_path / "file", encoded(value, tensors, "x"), tensors)
    found = decoded(*container.read_file(tmp_path / "file"))
    assert repr(found) == repr(value).replace("np.float64(0.1)", "0.1").replace("np.float32(0.5)", "0.5").replace(
        "np.int64(3)", "3"
    ).replace("np.True_", "True").replace("np.str_('a')", "'a'")


def test_bounds_and_random_states_come_back():
    tensors = {}
    bounds = decoded(encoded(Bounds([0, -np.inf], [1, np.inf]), tensors, "b"), tensors)
    np.testing.assert_array_equal(bounds.ub, [1, np.inf])
    random = np.random.RandomState(3)
    random.standard_normal(3)
    again = decoded(encoded(random, tensors, "r"), tensors)
    np.testing.assert_array_equal(again.standard_normal(4), random.standard_normal(4))


@pytest.mark.parametrize(
    "value",
    [decay, net(), Odd(), [decay], {"b": decay}, 1j, np.complex128(1j), b"x", np.array([Odd()]), Status.MAX_ITER,
     functools.partial(decay, b=1.0), np.zeros(2, dtype="datetime64[s]"), type("Mine", (TrustRegion,), {})()],
    ids=["function", "module", "object", "list", "dict", "complex", "NumPy complex", "bytes", "objects", "enum",
         "partial", "dates", "subclass"],
)  # fmt: skip
def test_what_is_not_data_is_refused(value):
    with pytest.raises(NotDataError):
        encoded(value, {}, "x")


def test_options_of_every_kind_come_back(tmp_path):
    est = LMRegressor(
        torch_decay,
        p0={"a": np.float64(1.0), "b": 1},
        bounds=Bounds([0, 0], [np.inf, 9]),
        fixed=np.array([False, False]),
        damping=NielsenDamping(start_damping=1e-2),
        dtype=torch.float64,
        devices=[torch.device("cpu")],
        random_state=np.random.RandomState(0),
        xtol=np.float64(1e-9),
        chunk_rows=np.int64(7),
    ).fit(X, Y)
    est.save(tmp_path / "est")
    other = LMRegressor.load(tmp_path / "est", torch_decay)
    np.testing.assert_array_equal(other.bounds.ub, est.bounds.ub)
    assert other.p0 == {"a": 1.0, "b": 1}
    assert other.damping == est.damping
    assert (other.dtype, other.devices, other.xtol, other.chunk_rows) == (torch.float64, est.devices, 1e-9, 7)
    np.testing.assert_array_equal(fit(clone(other)).theta_, fit(clone(est)).theta_)


def test_an_option_of_the_users_own_class_is_asked_for(tmp_path):
    class Own(TrustRegion):
        pass

    est = LMRegressor(torch_decay, p0=[1.0, 1.0], damping=Own()).fit(X, Y)
    est.save(tmp_path / "est")
    with pytest.raises(ValueError, match=r"damping \(an object of .*Own\)"):
        LMRegressor.load(tmp_path / "est", torch_decay)
    assert LMRegressor.load(tmp_path / "est", torch_decay, damping=est.damping).damping is est.damping


def test_saving_says_nothing_and_calls_the_model_on_few_rows(tmp_path):
    sizes = []

    def model(x, a, b):
        sizes.append(len(x))
        warnings.warn("called", UserWarning, stacklevel=1)
        return a * np.exp(-b * x)

    est = fit(LMRegressor(model, p0=[1.0, 1.0]))
    sizes.clear()
    est.save(tmp_path / "est")
    assert sizes == [4, 4]


def test_the_residual_alone_needs_no_prediction(tmp_path):
    est = LMRegressor(residual=residual, p0=[1.0, 1.0]).fit(X, Y)
    est.save(tmp_path / "est")
    other = LMRegressor.load(tmp_path / "est", residual=residual)
    assert other.params_ == est.params_
    assert not hasattr(other, "predict")
    assert predict_fn(other.theta_, X).shape == X.shape
