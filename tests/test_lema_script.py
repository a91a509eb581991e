"""notebooks/lema_curve_fit.py: the same loss on cuPyNumeric, under a launcher and without, as on SciPy."""

import importlib.util
import re

import pytest
from legate_process import ROOT, legate, plain, require_cupynumeric

SCRIPT = ROOT / "notebooks" / "lema_curve_fit.py"
LAST = re.compile(r"backend (\w+), solver (\w+), loss (\S+)")
FLAT = 1 / 1000  # mean square of the residuals that training must get far below


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("lema_curve_fit", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(launcher, solver, backend):
    """Return the loss that the script prints, and check what else it says of itself."""
    out = launcher(str(SCRIPT), "--solver", solver, "--backend", backend)
    used, how, loss = LAST.fullmatch(next(line for line in reversed(out) if line.startswith("backend "))).groups()
    assert (used, how) == (backend, solver)
    return float(loss)


@pytest.mark.parametrize(("launcher", "solver"), [(plain, "cholesky"), (legate, "qr")])
def test_cupynumeric_ends_at_the_loss_of_scipy(launcher, solver, script):
    require_cupynumeric()
    loss = script.train(script.parser().parse_args(["--backend", "scipy", "--solver", solver]))[1]
    assert 0 < loss < 1e-3 * FLAT
    assert printed(launcher, solver, "cupynumeric") == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("solver", ["qr", "cholesky"])
def test_the_loss_compared_is_not_chaotic_yet(script, solver):
    """Weights changed by 1e-12 change it by less than 1e-7: rounding differences of 1e-16 cannot reach 1e-6."""
    options = script.parser().parse_args(["--backend", "scipy", "--solver", solver])
    loss = script.train(options)[1]
    for size in (1e-12, -1e-12):
        other = script.train(options, script.perturbed(script.make_network(), size))[1]
        assert other != loss
        assert other == pytest.approx(loss, rel=1e-7)


def test_the_torch_backend_runs_it_too(script):
    options = script.parser().parse_args(["--backend", "torch", "--iterations", "3"])
    estimator, loss = script.train(options)
    assert estimator.backend_ == "torch"
    assert loss > FLAT  # three iterations are not enough
