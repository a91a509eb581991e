"""Count digits, see what falls short, and run `python -m lmfit_gpu validate`, whole and in part."""

import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from lmfit_gpu import LMRegressor, validate
from lmfit_gpu.__main__ import main
from lmfit_gpu.datasets import load_nist
from lmfit_gpu.result import Status
from lmfit_gpu.validate import WAYS, Run, Way, fit_run, fit_scipy, shortfalls

# What a model is written in is found out by a call with tensors; numpy may then complain of __array_wrap__.
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

GOOD = Run("Misra1a", 1, 10, 40, 8, 9.0, 8.0, Status.CONVERGED_COST)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("start", [1, 2])
def test_a_run_has_the_digits_of_the_certified_answer(way, start):
    run = fit_run(load_nist("DanWood"), start, way)
    assert (run.problem, run.start, run.reasons) == ("DanWood", start, [])
    assert run.param_digits >= 6
    assert run.stderr_digits >= 6
    assert 0 < run.njev <= run.n_iter + 2 <= run.nfev  # differences add one linearisation to confirm the stop


def test_digits_are_those_of_the_worst_parameter():
    problem = load_nist("Misra1a")
    off = replace(problem.reference, params=problem.reference.params * np.array([1.0, 1 + 1e-3]))
    run = fit_run(replace(problem, reference=off), 1)
    assert run.param_digits == pytest.approx(3.0, abs=0.01)
    assert run.converged_and_wrong


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"param_digits": 5.9}, "parameters have 5.9 digits, 6 expected"),
        ({"param_digits": float("nan")}, "parameters have nan digits"),
        ({"stderr_digits": 5.9}, "standard errors have 5.9 digits, 6 expected"),
        ({"status": Status.MAX_ITER}, "not converged (MAX_ITER)"),
        ({"problem": "Lanczos1", "stderr_digits": 2.7}, "standard errors have 2.7 digits, 2.8 expected"),
    ],
)
def test_what_falls_short_is_named(change, reason):
    run = replace(GOOD, **change)
    (message,) = shortfalls([GOOD, run])
    assert message.startswith(f"{run.problem} start 1: {reason}")


def test_what_is_good_enough_does_not_fall_short():
    edge = replace(GOOD, param_digits=6.0, stderr_digits=6.0)
    assert shortfalls([GOOD, edge, replace(GOOD, problem="Lanczos1", stderr_digits=2.8)]) == []


def test_only_a_run_that_says_converged_is_converged_and_wrong():
    wrong = replace(GOOD, param_digits=2.0)
    assert wrong.converged_and_wrong
    assert not replace(wrong, status=Status.STALLED).converged_and_wrong
    assert not GOOD.converged_and_wrong


def test_the_trials_of_a_way_are_limited_in_all():
    assert shortfalls([replace(GOOD, n_iter=800)] * 2) == []
    assert shortfalls([replace(GOOD, n_iter=800), replace(GOOD, n_iter=801)]) == [
        "1,601 trials in all, at most 1,600 expected"
    ]


def test_scipy_is_counted_by_the_same_limits():
    good = fit_scipy(load_nist("Misra1a"), 2)
    assert good.params_right
    assert good.stderr_right
    failed = fit_scipy(load_nist("BoxBOD"), 1)  # curve_fit says that it cannot estimate the covariance
    assert failed.failed
    assert not failed.params_right
    assert not failed.stderr_right
    assert failed.nfev > 0


def test_the_command_prints_a_table_and_succeeds(capsys):
    assert main(["validate", "--jac", "3-point", "--problems", "misra1a", "Lanczos1"]) == 0
    out = capsys.readouterr().out
    assert "torch models, jac='3-point'" in out
    assert "numpy models, jac" not in out  # one way only
    assert sum(line.startswith(("Misra1a ", "Lanczos1 ")) for line in out.splitlines()) == 4
    assert "4 of 4 runs right" in out
    assert "converged and wrong: none" in out
    assert "Lanczos1: its residuals are the rounding" in out
    assert "scipy.optimize.curve_fit" in out
    assert "all is well" in out


def test_a_wrong_answer_makes_exit_status_1(capsys, monkeypatch):
    def fit_one_wrong(problem, start, way):
        run = fit_run(problem, start, way)
        return replace(run, param_digits=1.5) if start == 2 else run

    monkeypatch.setattr(validate, "fit_run", fit_one_wrong)
    assert main(["validate", "--jac", "auto", "--problems", "Misra1a"]) == 1
    out = capsys.readouterr().out
    assert "converged and wrong: Misra1a start 2" in out
    assert "1 of 2 runs right" in out
    assert "Misra1a start 2: parameters have 1.5 digits, 6 expected" in out


def test_a_fit_that_does_not_converge_makes_exit_status_1(capsys, monkeypatch):
    monkeypatch.setattr(validate, "LMRegressor", partial(LMRegressor, max_iter=3))
    assert main(["validate", "--model", "torch", "--problems", "MGH09"]) == 1
    assert "MGH09 start 1: not converged (MAX_ITER)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["validate", "--problems", "Misra9"], "name must be one of"),
        (["validate", "--model", "numpy", "--jac", "autograd"], "numpy models cannot be differentiated"),
        (["validate", "--jac", "4-point"], "invalid choice: '4-point'"),
        (["destroy"], "invalid choice: 'destroy'"),
    ],
)
def test_mistakes_on_the_command_line_exit_with_2(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_command_the_help_is_printed(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "demo" in out
    assert "validate" in out


def test_the_command_runs_as_a_module():
    command = [sys.executable, "-m", "lmfit_gpu", "validate", "--model", "numpy", "--problems", "Misra1a"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "2 of 2 runs right" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS, Way("qr on torch", solver="qr", backend="torch")], ids=lambda way: way.name)
def test_all_54_runs_are_right(way):
    runs = validate.fit_all(way)
    assert len(runs) == 54
    assert shortfalls(runs) == []
    assert [run for run in runs if run.converged_and_wrong] == []


def test_another_solver_is_passed_on():
    run = fit_run(load_nist("Gauss1"), 2, Way("", solver="cholesky"))
    assert run.param_digits >= 6
