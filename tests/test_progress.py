"""What verbose shows, where it goes, and the protocol of the callback beside it."""

import io
import sys
import threading

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from tqdm import tqdm

from lmfit_gpu import LMRegressor
from lmfit_gpu.exceptions import NonFiniteError
from lmfit_gpu.result import Status, table_row

X = np.linspace(0, 4, 60)[:, None]
Y = 2.5 * np.exp(-1.3 * X[:, 0]) + 0.5 + 0.01 * np.cos(40 * X[:, 0])
P0 = [1.0, 1.0, 0.0]


class DiskFullError(Exception):
    """An error of a program that uses this one."""


class Decay(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.theta = torch.nn.Parameter(torch.tensor(P0, dtype=torch.float64))

    def forward(self, X):
        return self.theta[0] * torch.exp(-self.theta[1] * X) + self.theta[2]


def decay(x, a, b, c):
    return a * np.exp(-b * x) + c


def torch_decay(x, a, b, c):
    return a * torch.exp(-b * x) + c


def residual(theta, X, y):
    return decay(X, *theta) - y


MODELS = {
    "numpy": {"model": decay, "p0": P0},
    "torch": {"model": torch_decay, "p0": P0},
    "module": {"model": Decay()},
    "residual": {"residual": residual, "p0": P0},
}
every_model = pytest.mark.parametrize("kind", MODELS)


def cost_of(theta):
    return 0.5 * np.sum((decay(X[:, 0], *theta) - Y) ** 2)


def last_state(text):
    """Return what a terminal shows of a bar in the end."""
    return text.rstrip("\n").rsplit("\r", 1)[-1]


@pytest.fixture(autouse=True)
def no_bar_is_left_open():
    yield
    assert not tqdm._instances
    assert not [thread for thread in threading.enumerate() if "tqdm" in type(thread).__module__]


# ---- what is shown


@every_model
@pytest.mark.parametrize("verbose", [0, False])
def test_silence(kind, verbose, capfd):
    LMRegressor(**MODELS[kind], verbose=verbose).fit(X, Y)
    assert capfd.readouterr() == ("", "")


@every_model
@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]], ids=["one", "two"])
def test_the_table_is_that_of_the_result(kind, devices, capsys):
    est = LMRegressor(**MODELS[kind], devices=devices, verbose=2).fit(X, Y)
    out, err = capsys.readouterr()
    assert est.n_iter_ > 3
    assert out == f"{est.result_.table()}\n{est.result_.brief()}\n"
    assert err == ""


@every_model
@pytest.mark.parametrize("verbose", [1, True])
def test_the_bar(kind, verbose, capsys):
    est = LMRegressor(**MODELS[kind], verbose=verbose, max_iter=77).fit(X, Y)
    out, err = capsys.readouterr()
    assert out == ""
    assert f" {est.n_iter_}/77 " in last_state(err)
    assert f"cost {est.result_.cost:.6g}, {est.result_.status.name}]" in last_state(err)
    assert err.endswith("\n")


@every_model
def test_showing_changes_nothing(kind, capsys):
    silent, bar, table = (LMRegressor(**MODELS[kind], verbose=verbose).fit(X, Y) for verbose in (0, 1, 2))
    assert np.array_equal(bar.theta_, table.theta_)
    np.testing.assert_allclose(silent.theta_, table.theta_, rtol=1e-7)  # numpy: another path, to its stop tests


def test_lines_appear_while_the_fit_runs(monkeypatch):
    stream, seen = io.StringIO(), []
    monkeypatch.setattr(sys, "stdout", stream)
    est = LMRegressor(decay, p0=P0, verbose=2, callback=lambda record: seen.append(stream.getvalue())).fit(X, Y)
    lines = est.result_.table().splitlines(keepends=True)
    assert seen == ["".join(lines[: n + 2]) for n in range(est.n_iter_ - 1)] + [est.result_.table() + "\n"]


@pytest.mark.parametrize("verbose", [1, 2])
def test_the_search_for_a_start_is_not_shown(verbose, capsys):
    est = LMRegressor(decay, p0="auto", random_state=0, verbose=verbose).fit(X, Y)
    out, err = capsys.readouterr()
    assert out == (f"{est.result_.table()}\n{est.result_.brief()}\n" if verbose == 2 else "")
    if verbose == 1:
        assert f" {est.n_iter_}/1000 " in last_state(err)
        assert err.count("\n") == 1  # one bar


@pytest.mark.parametrize("verbose", [1, 2])
def test_no_trials(verbose, capsys):
    with pytest.warns(ConvergenceWarning, match="MAX_ITER"):
        est = LMRegressor(decay, p0=P0, max_iter=0, verbose=verbose).fit(X, Y)
    out, err = capsys.readouterr()
    if verbose == 1:
        assert "0/0" in last_state(err) or "0trial" in last_state(err)
        assert "MAX_ITER" in last_state(err)
    else:
        assert out == est.result_.brief() + "\n"


def raises(error):
    def callback(record):
        if record.n_iter == 3:
            raise error

    return callback


ENDS = {  # how a fit ends: options, the error that goes on, the status
    "limit": ({"max_iter": 3}, None, Status.MAX_ITER),
    "callback": ({"callback": lambda record: record.n_iter == 3}, None, Status.STOPPED_BY_CALLBACK),
    "interrupt": ({"callback": raises(KeyboardInterrupt())}, KeyboardInterrupt, Status.INTERRUPTED),
    "error": ({"callback": raises(DiskFullError())}, DiskFullError, Status.INTERRUPTED),
}


@pytest.mark.parametrize("verbose", [1, 2])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.filterwarnings("ignore:the fit has not converged")
def test_every_end_is_shown(end, verbose, capsys):
    options, error, status = ENDS[end]
    est = LMRegressor(decay, p0=P0, verbose=verbose, **options)
    if error is None:
        est.fit(X, Y)
    else:
        with pytest.raises(error):
            est.fit(X, Y)
    out, err = capsys.readouterr()
    assert est.result_.status is status
    assert len(est.result_.history) == 3
    if verbose == 1:
        assert last_state(err).startswith("LMRegressor:")
        assert " 3/" in last_state(err)
        assert f", {status.name}]" in last_state(err)
        assert err.endswith("\n")
    else:
        assert out == f"{est.result_.table()}\n{est.result_.brief()}\n"


@pytest.mark.parametrize("verbose", [1, 2])
def test_a_start_that_is_not_finite(verbose, capsys):
    with pytest.raises(NonFiniteError, match="not finite at the start"):
        LMRegressor(lambda x, a: a / x, p0=[1.0], verbose=verbose).fit(X, Y)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("\n") == (verbose == 1)


# ---- streams that fail


class Broken(io.StringIO):
    """A pipe whose reader leaves after some lines."""

    def __init__(self, n_lines):
        super().__init__()
        self.left = n_lines

    def write(self, text):
        self.left -= 1
        if self.left < 0:
            raise BrokenPipeError("nobody reads")
        return super().write(text)


def test_a_broken_pipe_keeps_the_best_point(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Broken(3))
    est = LMRegressor(decay, p0=P0, verbose=2)
    with pytest.raises(BrokenPipeError, match="nobody reads"):
        est.fit(X, Y)
    assert est.result_.status is Status.INTERRUPTED
    assert est.n_iter_ == 4
    assert est.result_.cost == pytest.approx(cost_of(est.theta_))


def test_a_last_line_that_cannot_be_written_does_not_cost_the_fit(monkeypatch):
    n_iter = LMRegressor(decay, p0=P0, verbose=2).fit(X, Y).n_iter_
    monkeypatch.setattr(sys, "stdout", Broken(n_iter))
    est = LMRegressor(decay, p0=P0, verbose=2)
    with pytest.raises(BrokenPipeError):
        est.fit(X, Y)
    assert est.result_.success


def test_a_broken_pipe_does_not_hide_ctrl_c(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Broken(3))
    with pytest.raises(KeyboardInterrupt):
        LMRegressor(decay, p0=P0, verbose=2, callback=raises(KeyboardInterrupt())).fit(X, Y)


@pytest.mark.parametrize("verbose", [1, 2])
def test_a_program_without_streams(monkeypatch, verbose):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert LMRegressor(decay, p0=P0, verbose=verbose).fit(X, Y).result_.success


# ---- the callback


STOP = {
    "True": True,
    "1": 1,
    "numpy true": np.True_,
    "numpy int": np.int64(2),
    "array of one": np.array([1.0]),
    "tensor": torch.tensor(True),
    "text": "stop",
}
GO_ON = {
    "None": None,
    "False": False,
    "0": 0,
    "numpy false": np.False_,
    "numpy zero": np.float64(0),
    "tensor": torch.tensor(0),
    "text": "",
    "list": [],
}


@pytest.mark.parametrize("answer", STOP.values(), ids=STOP)
@pytest.mark.parametrize("verbose", [0, 1, 2])
def test_a_true_answer_stops(answer, verbose):
    with pytest.warns(ConvergenceWarning, match="STOPPED_BY_CALLBACK"):
        est = LMRegressor(decay, p0=P0, callback=lambda record: answer, verbose=verbose).fit(X, Y)
    assert est.n_iter_ == 1


@pytest.mark.parametrize("answer", GO_ON.values(), ids=GO_ON)
@pytest.mark.parametrize("verbose", [0, 1, 2])
def test_any_other_answer_goes_on(answer, verbose):
    seen = []

    def callback(record):
        seen.append(record)
        return answer

    est = LMRegressor(decay, p0=P0, callback=callback, verbose=verbose).fit(X, Y)
    assert est.result_.success
    assert seen == list(est.result_.history)
    assert [record.n_iter for record in seen] == list(range(1, est.n_iter_ + 1))


@pytest.mark.parametrize(
    "answer", [np.array([True, False]), torch.tensor([1, 0]), np.zeros((2, 2))], ids=["array", "tensor", "matrix"]
)
def test_an_answer_neither_true_nor_false(answer):
    est = LMRegressor(decay, p0=P0, callback=lambda record: answer)
    with pytest.raises(TypeError, match=r"callback: returned (ndarray|Tensor), which is neither true nor false"):
        est.fit(X, Y)
    assert est.result_.status is Status.INTERRUPTED
    assert est.n_iter_ == 1


ERRORS = [ValueError, RuntimeError, OSError, MemoryError, StopIteration, DiskFullError, SystemExit, KeyboardInterrupt]


@every_model
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_an_error_of_the_callback_goes_on_and_keeps_the_best_point(kind, error):
    raised, seen = error("of the callback"), []

    def callback(record):
        seen.append(record)
        if record.n_iter == 4:
            raise raised

    est = LMRegressor(**MODELS[kind], callback=callback)
    with pytest.raises(error) as caught:
        est.fit(X, Y)
    assert caught.value is raised
    assert est.result_.status is Status.INTERRUPTED
    assert list(est.result_.history) == seen
    assert est.result_.cost == seen[-1].cost == pytest.approx(cost_of(est.theta_))
    assert est.result_.cost < 0.5 * cost_of(P0)
    if kind != "residual":
        np.testing.assert_allclose(est.predict(X), decay(X[:, 0], *est.theta_), rtol=1e-12)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_an_error_of_the_callback_after_a_search(error):
    with pytest.raises(error):
        (est := LMRegressor(decay, p0="auto", random_state=0, callback=raises(error()))).fit(X, Y)
    assert est.result_.status is Status.INTERRUPTED
    assert est.result_.cost == pytest.approx(cost_of(est.theta_))


def spoilt(kind, limit=np.inf):
    """Return options with a model that fails after so many calls, and the list of its calls."""
    calls = []

    def counted(function):
        def model(*args):
            calls.append(None)
            if len(calls) > limit:
                raise DiskFullError
            return function(*args)

        return model

    class Module(Decay):
        def forward(self, X):
            return counted(super().forward)(X)

    if kind == "module":
        return {"model": Module()}, calls
    if kind in ("numpy", "torch"):
        model = counted(decay if kind == "numpy" else torch_decay)
        return {"model": lambda x, a, b, c: model(x, a, b, c), "p0": P0}, calls
    return {"residual": counted(residual), "p0": P0}, calls


@every_model
@pytest.mark.parametrize("part", [0.8, 0.9, 0.95])
def test_an_error_of_the_model_that_nobody_expects_keeps_the_best_point(kind, part):
    options, calls = spoilt(kind)
    LMRegressor(**options).fit(X, Y)
    options, _ = spoilt(kind, part * len(calls))
    est = LMRegressor(**options)
    with pytest.raises(DiskFullError):
        est.fit(X, Y)
    assert est.result_.status is Status.INTERRUPTED
    assert est.result_.cost == pytest.approx(cost_of(est.theta_))


def test_rows_of_the_table_are_the_records(capsys):
    seen = []
    LMRegressor(decay, p0=P0, callback=seen.append, verbose=2).fit(X, Y)
    assert capsys.readouterr().out.splitlines()[1:-1] == [table_row(record) for record in seen]
