"""cuPyNumeric: what it does with Legate's memory, processes and refusals. Its primitives: test_backends.py."""

import importlib.util

import numpy as np
import pytest
import torch
from injected import CPU, injected, tensor
from legate_process import ONE_CPU, TWO_CPUS, has_driver, is_cpu_build, python, require_cupynumeric

from lmfit_gpu.backends import cupynumeric as module
from lmfit_gpu.backends import get_backend
from lmfit_gpu.exceptions import BackendUnavailableError
from lmfit_gpu.linear import SOLVERS

MIB = 2**20
every_cpu_count = pytest.mark.parametrize("config", [ONE_CPU, TWO_CPUS], ids=["one cpu", "two cpus"])


@pytest.fixture
def cupynumeric():
    require_cupynumeric()


@pytest.fixture
def backend(cupynumeric):
    """The backend in this process."""
    return get_backend("cupynumeric", CPU)


needs_cupynumeric = pytest.mark.usefixtures("cupynumeric")
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, which Legate finds")
needs_the_stand_in = pytest.mark.skipif(
    has_driver() or is_cpu_build(), reason="this machine has an NVIDIA driver, or a build that needs none"
)


# ---- a matrix that is not positive definite


@needs_cupynumeric
@every_cpu_count
def test_a_matrix_that_is_not_positive_definite_does_not_end_the_process(config):
    said = python(
        """
b = backend()
for n in (3, 300):
    diagonal = torch.ones(n, dtype=torch.float64)
    diagonal[1] = -1
    matrix = b.asarray(torch.diag(diagonal))
    say(b.cholesky(matrix) is None)
    x = b.cholesky_solve(b.cholesky(matrix, 2.0), b.asarray(diagonal))
    say(np.abs(b.to_tensor(x, CPU).numpy() - np.where(diagonal > 0, 1 / 3, -1)).max() < 1e-14)
""",
        config,
    )
    assert said == ["True"] * 4


FAILING_FIT = """
from lmfit_gpu import LMRegressor
from lmfit_gpu.backends import CuPyNumericBackend

tried, shifted = [], CuPyNumericBackend._shifted
def once_indefinite(self, matrix, damping):
    tried.append(damping > 1e-9)  # smaller ones are those of the stop tests
    return shifted(self, matrix, -1e6 if tried[-1] and sum(tried) == 1 else damping)
CuPyNumericBackend._shifted = once_indefinite

x = np.linspace(0, 4, 30)
est = LMRegressor(lambda x, a, b: a * torch.exp(-b * x), p0=[1, 1], solver="cholesky", damping="nielsen",
                  backend="cupynumeric").fit(x[:, None], 2.5 * np.exp(-1.3 * x))
failed = [record for record in est.result_.history if not record.accepted and np.isnan(record.trial_cost)]
say(len(failed), sum(tried) > 3, est.result_.success, np.abs(est.theta_ - [2.5, 1.3]).max() < 1e-9)
"""


@needs_cupynumeric
@every_cpu_count
def test_a_fit_goes_on_after_a_factorisation_that_fails(config):
    """The matrix of the first trial is made indefinite before cuPyNumeric gets it: one rejected trial."""
    assert python(FAILING_FIT, config) == ["1 True True True"]


# ---- hand-over


def address(array):
    return np.asarray(array).__array_interface__["data"][0]


def test_asarray_shares_memory_on_the_cpu(backend):
    given = torch.zeros(3, 4, dtype=torch.float64)
    array = backend.asarray(given)
    assert address(array) == given.data_ptr()
    given[1, 2] = 5.0
    assert float(array[1, 2]) == 5.0


@pytest.mark.parametrize("solver", ["cholesky", "dual"])
def test_the_gram_matrix_is_handed_over_without_a_copy(solver, backend, rng):
    lin = injected(rng.standard_normal((6, 4)), rng.standard_normal(6), solver, "cupynumeric")
    array, kept = (lin._a, lin._scaled) if solver == "cholesky" else (lin._k, lin._gram)
    assert address(array) == kept.data_ptr()


def test_the_gram_matrix_of_cg_is_handed_over_without_a_copy_only_when_contiguous(backend, rng):
    gram = tensor(rng.standard_normal((5, 5)))
    part = gram[:4, :4]
    array = backend.asarray(part)
    np.testing.assert_array_equal(np.asarray(array), part.numpy())
    assert address(array) != gram.data_ptr()


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.float(),
        lambda t: t.T,
        lambda t: t[:, 1],
        lambda t: t[::2, ::2],
        lambda t: t[:2, :3],
        lambda t: t[1].expand(3, -1),
    ],
    ids=["float32", "transposed", "column", "every other", "corner", "expanded"],
)
def test_other_tensors_are_copied(view, backend, rng):
    given = view(tensor(rng.standard_normal((5, 4))))
    before = given.double().clone().numpy()
    array = backend.asarray(given)
    assert array.dtype == np.float64
    assert address(array) != given.data_ptr()
    np.testing.assert_array_equal(np.asarray(array), before)
    if given.stride(0):
        given.zero_()
        np.testing.assert_array_equal(np.asarray(array), before)


def test_to_tensor_returns_memory_of_its_own(backend):
    given = torch.ones(4, dtype=torch.float64)
    array = backend.asarray(given)
    back = backend.to_tensor(array, CPU)
    assert back.data_ptr() != address(array)
    array[1] = 5.0
    assert back.tolist() == [1.0] * 4
    back[2] = 7.0
    assert np.asarray(array).tolist() == [1.0, 5.0, 1.0, 1.0]


def test_stacked_takes_blocks_of_any_length(backend, rng):
    rows = rng.standard_normal((11, 3))
    array = backend.stacked((tensor(rows[start : start + 4]) for start in (0, 4, 8)), (11, 3))
    np.testing.assert_array_equal(np.asarray(array), rows)


# ---- memory

TOO_LARGE = """
from injected import exact, injected_problem
from lmfit_gpu.jacobian import Derivatives
from lmfit_gpu.linear import linearize

b = backend()
for solver, (m, n) in {cases}:
    problem, theta = injected_problem(np.zeros((m, n)), np.zeros(m))
    jacobian = Derivatives.choose(problem, exact, theta).at(theta)
    try:
        linearize(jacobian, solver, b)
    except BackendUnavailableError as error:
        say(jacobian.nfev)
        say(error)
say(b.cholesky(b.asarray(torch.eye(100, dtype=torch.float64))) is not None)
"""


@needs_cupynumeric
def test_what_does_not_fit_is_refused_before_it_is_computed():
    cases = [("cholesky", (1, 1400)), ("dual", (1400, 1)), ("qr", (1, 1100)), ("cg", (2500, 2500))]
    *refusals, lives = python(TOO_LARGE.format(cases=cases), ONE_CPU)
    assert lives == "True"
    for (solver, shape), nfev, message in zip(cases, refusals[::2], refusals[1::2], strict=True):
        assert nfev == "0"
        assert f"solver='{solver}' with {shape[0]} residuals and {shape[1]} parameters" in message
        assert "which is 64 MiB" in message
        assert "backend='scipy'" in message
        needed = int(message.split("--sysmem ")[1].split()[0])
        assert f"up to {needed} MiB" in message
        room = SOLVERS[solver].room(*shape)  # enough is asked for, and not far too much
        assert module.USABLE * (needed - 1.01) * MIB < room < module.USABLE * needed * MIB


def test_the_memory_that_is_advised_is_enough(monkeypatch):
    backend = object.__new__(module.CuPyNumericBackend)
    backend._gpus = 0
    for n_bytes in (1, 5 * MIB, 123_456_789, 10**12):
        backend._budget = 0
        with pytest.raises(BackendUnavailableError, match="--sysmem") as refused:
            backend.reserve(n_bytes, "it")
        backend._budget = MIB * int(str(refused.value).split("--sysmem ")[1].split()[0])
        backend.reserve(n_bytes, "it")


def test_on_gpus_the_memory_to_set_is_theirs():
    backend = object.__new__(module.CuPyNumericBackend)
    backend._gpus, backend._budget = 2, 0
    with pytest.raises(BackendUnavailableError, match="--fbmem 2 "):
        backend.reserve(MIB, "it")


LARGEST = """
from lmfit_gpu import LMRegressor
from lmfit_gpu.linear import SOLVERS

warnings.simplefilter("ignore")
solver, kind, max_iter = {given}
b = backend()

def rows(n):
    return max(n // 4, 1) if kind == "wide" else n

def fits(n):
    try:
        b.reserve(SOLVERS[solver].room(rows(n), n), "it")
    except BackendUnavailableError:
        return False
    return True

largest = step = 2**11
while step:
    largest += step if fits(largest) else -step
    step //= 2
largest -= 0 if fits(largest) else 1
say(fits(largest), fits(largest + 1), largest > 100)

def model(X, theta):
    return X @ (theta + 0.1 * theta**3)

def slope(X, theta):
    return X * (1 + 0.3 * theta**2)

for n in (largest, largest * 4 // 5, largest):  # a later fit finds what the first has left
    m, rng = rows(n), np.random.default_rng(0)
    X, true = np.eye(m, n) + 0.3 * rng.standard_normal((m, n)) / n**0.5, rng.standard_normal(n)
    y = model(X, true)
    est = LMRegressor(model, p0=np.zeros(n), solver=solver, backend="cupynumeric", max_iter=max_iter,
                      jac="auto" if kind == "differences" else slope).fit(X, y)
    reached = np.abs(est.theta_ - true).max() < 1e-4
    say(est.backend_, est.result_.njev > 2, reached or (solver == "cg" and est.result_.cost < 0.5 * y @ y / 2))
"""


@needs_cupynumeric
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cpus", "solver", "kind", "max_iter"),
    [
        (1, "dual", "exact", 12),
        (2, "cholesky", "differences", 12),  # finer derivatives: a third linearisation lives for a while
        (2, "qr", "differences", 12),
        (2, "cg", "exact", 3),
        (2, "cg", "wide", 3),
    ],
)
def test_the_largest_fit_that_is_let_through_does_not_end_the_process(cpus, solver, kind, max_iter):
    config = f"--cpus {cpus} --gpus 0 --sysmem 8"
    said = python(LARGEST.format(given=(solver, kind, max_iter)), config, timeout=100)
    assert said == ["True False True"] + ["cupynumeric True True"] * 3


# ---- refusals


@needs_cupynumeric
def test_more_memory_than_the_machine_has_is_refused():
    (said,) = python("say(refusal())", "--cpus 1 --gpus 0 --sysmem 99999999")
    assert "--sysmem 99999999 MiB, but this machine has" in said


@needs_cupynumeric
@without_a_gpu
def test_a_configuration_without_gpus_on_a_machine_without_one():
    (said,) = python("say(refusal())", "--cpus 1 --sysmem 64")
    assert "add --gpus 0 to LEGATE_CONFIG or to the legate launcher" in said


@needs_cupynumeric
@without_a_gpu
def test_a_gpu_asked_for_on_a_machine_without_one():
    (said,) = python("say(refusal())", "--cpus 1 --gpus 1 --sysmem 64")
    assert said.startswith("backend='cupynumeric': Legate did not start: ")


@needs_cupynumeric
@needs_the_stand_in
def test_without_a_driver_the_ways_out_are_named():
    (said,) = python("say(refusal())", LMFIT_GPU_LIBCUDA=None)
    for words in ("no NVIDIA driver", "conda (environment.yml)", "pip build, the one for GPUs", "backend='scipy'"):
        assert words in said


@needs_cupynumeric
@needs_the_stand_in
def test_a_stand_in_that_is_not_there():
    (said,) = python("say(refusal())", LMFIT_GPU_LIBCUDA="/not/there.so")
    assert said.startswith("LMFIT_GPU_LIBCUDA='/not/there.so' cannot be loaded")


def test_without_cupynumeric_the_install_line_is_named(monkeypatch):
    monkeypatch.setattr(module, "_started", module._started.__wrapped__)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "cupynumeric" else found(name, *a)
    )
    with pytest.raises(BackendUnavailableError, match=r"pip install 'lmfit-gpu\[cupynumeric\]'"):
        get_backend("cupynumeric", CPU)


@needs_cupynumeric
def test_inline_task_launch_is_refused():
    (said,) = python("say(refusal())", ONE_CPU + " --inline-task-launch")
    assert "--inline-task-launch" in said


@needs_cupynumeric
def test_a_worker_process_does_not_reserve_the_gpus_again():
    (said,) = python("say(refusal())", "--cpus 1 --gpus 1 --sysmem 64", LOKY_PICKLER="cloudpickle")
    assert "use n_jobs=1" in said


FORKED = """
import multiprocessing, os

def in_child(pipe):
    pipe.send(refusal())

say(float(backend().asarray(torch.ones(3, dtype=torch.float64)).sum()))
context = multiprocessing.get_context("fork")
receive, send = context.Pipe()
child = context.Process(target=in_child, args=(send,))
child.start()
say(receive.recv() if receive.poll(30) else "hangs")
child.join(30)
say(child.exitcode)
say(float(backend().asarray(torch.ones(4, dtype=torch.float64)).sum()))
"""


@needs_cupynumeric
def test_a_forked_child_is_refused_and_the_parent_goes_on():
    three, said, status, four = python(FORKED, ONE_CPU)
    assert (three, status, four) == ("3.0", "0", "4.0")
    assert "started before this process was forked" in said


@needs_cupynumeric
def test_another_thread_is_refused():
    said = python(
        """
import threading
b = backend()

def use():
    message = refusal()
    say(message)
    if message == "started":
        b.asarray(torch.ones(3, dtype=torch.float64)).sum()

thread = threading.Thread(target=use)
thread.start()
thread.join(30)
say("lives")
""",
        ONE_CPU,
    )
    assert "thread" in said[0]
    assert said[1] == "lives"


# ---- configuration


@needs_cupynumeric
def test_plain_python_takes_the_cpu_and_half_of_the_free_memory():
    said = python(
        """
import os
from lmfit_gpu.launch import _free_memory
free = _free_memory()
b = backend()
say("LEGATE_CONFIG" in os.environ, b._gpus, b._budget / free)
""",
        CUDA_VISIBLE_DEVICES="",
    )
    left, gpus, share = said[0].split()
    assert (left, gpus) == ("False", "0")
    assert 0.4 < float(share) < 0.6  # others use memory meanwhile


@needs_cupynumeric
def test_a_configuration_that_is_set_is_left_as_it_is():
    said = python("import os\nsay(backend()._budget / 2**20, os.environ['LEGATE_CONFIG'])", ONE_CPU)
    assert said == ["64.0 " + ONE_CPU]


def test_importing_the_package_starts_nothing():
    said = python(
        "import sys, lmfit_gpu\nsay([n for n in sys.modules if n.split('.')[0] in ('legate', 'cupynumeric')])"
    )
    assert said == ["[]"]


FIT = """
import sys
from lmfit_gpu import LMRegressor
x = np.linspace(0, 4, 30)
y = 2.5 * np.exp(-1.3 * x) + 0.01 * np.random.default_rng(0).standard_normal(30)
for solver in {solvers}:
    est = LMRegressor(lambda x, a, b: a * torch.exp(-b * x), p0=[1, 1], solver=solver).fit(x[:, None], y)
    say(est.backend_, est.solver_, "legate.core" in sys.modules, *est.theta_.tolist(), *est.stderr_.tolist())
"""


@needs_cupynumeric
def test_auto_is_cupynumeric_where_legate_is_configured_and_else_scipy():
    solvers = [solver for solver in SOLVERS if solver != "ghost"]  # for modules
    fit = FIT.format(solvers=solvers)
    for solver, plain, legate in zip(solvers, python(fit), python(fit, ONE_CPU), strict=True):
        plain, legate = plain.split(), legate.split()
        assert plain[:3] == ["scipy", solver, "False"]
        assert legate[:3] == ["cupynumeric", solver, "True"]
        np.testing.assert_allclose(np.array(legate[3:], float), np.array(plain[3:], float), rtol=1e-7)
