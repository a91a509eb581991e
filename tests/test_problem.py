"""The problem: are rows independent, do values fit y, what is the cost, what do several devices change."""

import math
import threading

import numpy as np
import pytest
import torch
from boxed import Watched
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import (
    CPU,
    central_differences,
    module_model,
    numpy_model,
    problem_of,
    relative_column_error,
    torch_model,
)
from scipy.integrate import solve_ivp

from lmfit_gpu.jacobian import Derivatives
from lmfit_gpu.models import ResidualOf
from lmfit_gpu.problem import LeastSquaresProblem
from lmfit_gpu.row_check import nearby
from lmfit_gpu.rows import LEAF_ROWS, ArrayRows

THETA = np.array([1.3, 0.7])
FEW, MANY = 300, LEAF_ROWS + 904


# --- the row check ----------------------------------------------------------------------------------------


def in_place(library):
    def model(x, a, b):
        total = library.zeros_like(x)
        total += a * x
        total += library.sin(b * x)
        return total

    return model


def in_place_by_row(library):
    """Assigns row by row: no vectorised route of autograd sees through it."""

    def model(x, a, b):
        values = library.empty_like(x)
        for i in range(len(x)):
            values[i] = a * library.exp(-b * x[i])
        return values

    return model


def branch_on_all_rows(library):
    def model(x, a, b):
        return a * library.exp(-b * x) if x.max() > 0.5 else a * x + b

    return model


def branch_by_row(library):
    def model(x, a, b):
        return library.where(x > 0.5, a * library.exp(-b * x), a * x + b * x * x)

    return model


KERNEL = np.array([0.2, 0.5, 0.3])


def convolution(library):
    def in_numpy(x, a, b):
        return np.convolve(a * np.exp(-b * x), KERNEL, mode="same")

    def in_torch(x, a, b):
        kernel = torch.tensor(KERNEL[::-1].copy())[None, None]
        return torch.conv1d((a * torch.exp(-b * x))[None, None], kernel, padding=1)[0, 0]

    return in_numpy if library is np else in_torch


def running_sum(library):
    def model(x, a, b):
        return library.cumsum(a * library.exp(-b * x), 0) / len(x)

    return model


def centred(library):
    def model(x, a, b):
        return a * (x - x.mean()) + library.exp(-b * x)

    return model


def ode_over_x(library):
    """y' = −a y + b sin(t), y(x₀) = 1, at the rows x."""

    def in_numpy(x, a, b):
        if len(x) == 1:
            return np.ones(1)
        rhs = lambda t, y: -a * y + b * np.sin(t)  # noqa: E731
        return solve_ivp(rhs, (x[0], x[-1]), [1.0], t_eval=x, rtol=1e-11, atol=1e-12).y[0]

    def in_torch(x, a, b):
        rhs = lambda t, y: -a * y + b * torch.sin(t)  # noqa: E731
        y = [torch.ones_like(x[0]) + 0 * a]
        for t, h in zip(x[:-1], x.diff(), strict=True):
            k1 = rhs(t, y[-1])
            k2 = rhs(t + h / 2, y[-1] + h / 2 * k1)
            k3 = rhs(t + h / 2, y[-1] + h / 2 * k2)
            k4 = rhs(t + h, y[-1] + h * k3)
            y.append(y[-1] + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4))
        return torch.stack(y)

    return in_numpy if library is np else in_torch


LIBRARIES = [pytest.param(np, id="numpy"), pytest.param(torch, id="torch")]
FORMS = [
    pytest.param(in_place, False, FEW, id="in-place"),
    pytest.param(in_place, False, MANY, id="in-place-many"),
    pytest.param(in_place_by_row, False, 24, id="in-place-by-row"),
    pytest.param(branch_on_all_rows, True, FEW, id="branch-on-all-rows"),
    pytest.param(branch_on_all_rows, True, MANY, id="branch-on-all-rows-many"),
    pytest.param(branch_by_row, False, FEW, id="branch-by-row"),
    pytest.param(branch_by_row, False, MANY, id="branch-by-row-many"),
    pytest.param(convolution, True, FEW, id="convolution"),
    pytest.param(convolution, True, MANY, id="convolution-many"),
    pytest.param(running_sum, True, FEW, id="running-sum"),
    pytest.param(running_sum, True, MANY, id="running-sum-many"),
    pytest.param(centred, True, FEW, id="centred"),
    pytest.param(centred, True, MANY, id="centred-many"),
    pytest.param(ode_over_x, True, 24, id="ode"),
]


def wrapped(function, library):
    return numpy_model(function) if library is np else torch_model(function)


def whole_values(function, library, x):
    """Return theta -> the user's function on all rows at once, called without the engine."""
    if library is np:
        return lambda theta: function(x, *theta)
    return lambda theta: function(torch.tensor(x), *torch.tensor(theta)).numpy()


def check_against_whole_array(problem, function, library, x, theta=THETA):
    """Jacobian, residuals and cost of the engine equal those of the function on all rows at once."""
    values = whole_values(function, library, x)
    theta_t = torch.tensor(theta)
    jac = "autograd" if library is torch else "3-point"
    blocks = list(Derivatives.choose(problem, jac, theta_t).at(theta_t).blocks())
    J = torch.cat([J for _, J in blocks])
    r = torch.cat([r for r, _ in blocks])
    expected = values(theta) - problem.rows.y.numpy()
    np.testing.assert_allclose(r, expected, rtol=1e-12, atol=1e-12)
    assert relative_column_error(J, central_differences(values, theta)) < 2e-7
    np.testing.assert_allclose(problem.cost(theta_t), 0.5 * expected @ expected, rtol=1e-12)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("form", "coupled", "n_rows"), FORMS)
def test_the_row_check(form, coupled, n_rows, library, rng):
    function = form(library)
    x, y = np.linspace(0.0, 1.0, n_rows), rng.normal(size=n_rows)
    problem = problem_of(wrapped(function, library), x, y, THETA)
    assert problem.coupled is coupled
    assert problem.n_residuals == n_rows
    assert len(problem.row_blocks()) == 1 or not coupled
    check_against_whole_array(problem, function, library, x)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("form", [branch_by_row, in_place], ids=lambda form: form.__name__)
def test_independent_rows_in_several_blocks(form, library, rng):
    x, y = np.linspace(0.0, 1.0, 3 * LEAF_ROWS + 7), rng.normal(size=3 * LEAF_ROWS + 7)
    problem = problem_of(wrapped(form(library), library), x, y, THETA, chunk_rows=LEAF_ROWS)
    assert len(problem.row_blocks()) == 4
    check_against_whole_array(problem, form(library), library, x)


@pytest.mark.parametrize("library", LIBRARIES)
def test_coupling_that_shows_only_beyond_the_first_leaf(library, rng):
    """x rises: the first 4,096 rows do not reach the branch that the whole array takes."""

    def function(x, a, b):
        return a * library.exp(-b * x) if x.max() > 0.9 else a * x + b

    x, y = np.linspace(0.0, 1.0, 3 * LEAF_ROWS), rng.normal(size=3 * LEAF_ROWS)
    problem = problem_of(wrapped(function, library), x, y, THETA, chunk_rows=LEAF_ROWS)
    assert problem.coupled
    check_against_whole_array(problem, function, library, x)


@pytest.mark.parametrize("library", LIBRARIES)
def test_coupling_hidden_by_a_zero_start(library, rng):
    """At b = 0 every row stands alone; one step later none does."""

    def function(x, a, b):
        return a * x + b * library.cumsum(x, 0)

    x, y = np.linspace(0.0, 1.0, FEW), rng.normal(size=FEW)
    problem = problem_of(wrapped(function, library), x, y, [1.0, 0.0])
    assert problem.coupled


@pytest.mark.parametrize("library", LIBRARIES)
def test_standardised_features_are_probed_in_silence(library, rng):
    """One row alone has no standard deviation: both libraries warn of it, and warnings are errors here."""

    def function(x, a, b):
        scale = x.std(ddof=1) if library is np else x.std()
        return a * (x - x.mean()) / scale + b

    x, y = np.linspace(0.0, 1.0, FEW), rng.normal(size=FEW)
    assert problem_of(wrapped(function, library), x, y, THETA).coupled


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_network_has_independent_rows_in_its_own_precision(dtype):
    """A row alone and in a block differ by the rounding of the module's dtype."""
    module = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    model = module_model(module)
    model.module.to(dtype)
    rows = ArrayRows(torch.randn(500, 20), torch.randn(500))
    problem = LeastSquaresProblem(model, rows, model.theta.clone())
    assert problem.dtype is dtype
    assert not problem.coupled


@pytest.mark.parametrize("offset", [0.0, 1e10])
def test_an_offset_does_not_hide_coupling(offset, rng):
    x, y = np.linspace(0.0, 1.0, FEW), rng.normal(size=FEW)
    problem = problem_of(torch_model(lambda x, a, b: offset + 1e3 * torch.cumsum(a * x + b, 0)), x, y, THETA)
    assert problem.coupled


def test_one_row():
    problem = problem_of(torch_model(lambda x, a, b: a * x + b), [2.0], [1.0], THETA)
    assert problem.n_residuals == 1
    assert problem.cost(torch.tensor(THETA)) == pytest.approx(0.5 * (2 * 1.3 + 0.7 - 1) ** 2)


@pytest.mark.parametrize(
    "X",
    [
        pytest.param(np.array([0, 1, 1, 0], dtype=bool), id="bool"),
        pytest.param(np.array([0, 65535, 3, 9], dtype=np.uint16), id="uint16"),
        pytest.param(np.array([0, 255, 3, 9], dtype=np.uint8), id="uint8"),
        pytest.param(np.array([0, 7, 3, 9], dtype=np.float16), id="float16"),
        pytest.param(np.zeros((4, 0)), id="no-columns"),
    ],
)
def test_features_of_any_kind(X):
    rows = ArrayRows(torch.as_tensor(X), torch.arange(4.0))
    model = torch_model(lambda x, a: a + x.reshape(len(x), -1).sum(1))
    problem = LeastSquaresProblem(model, rows, torch.ones(1).double())
    expected = 1 + X.reshape(4, -1).astype(float).sum(1) - np.arange(4)
    np.testing.assert_allclose(problem.residual(torch.ones(1).double(), slice(0, 4)), expected)
    assert not problem.coupled


@pytest.mark.parametrize("dtype", [np.bool_, np.uint16, np.float16])
def test_the_probe_reads_features_of_any_kind(dtype):
    rows = ArrayRows(torch.as_tensor(np.ones(200, dtype=dtype)), torch.ones(200))
    problem = LeastSquaresProblem(torch_model(lambda x, a: a * x), rows, torch.ones(1).double())
    assert set(problem.probe().x.tolist()) == {1.0}


# --- shapes -----------------------------------------------------------------------------------------------

N = 6
x6 = torch.linspace(0.0, 1.0, N, dtype=torch.float64)


@pytest.mark.parametrize("y_shape", [(N,), (N, 1)])
@pytest.mark.parametrize("value_shape", [(N,), (N, 1)])
def test_a_column_and_a_vector_are_the_same(y_shape, value_shape):
    y = torch.arange(6.0).double()
    problem = problem_of(
        torch_model(lambda x, a: (a * x).reshape(len(x), *value_shape[1:])), x6, y.view(y_shape), [2.0]
    )
    r = problem.residual(torch.tensor([2.0], dtype=torch.float64), slice(0, N))
    torch.testing.assert_close(r, 2 * x6 - y)


@pytest.mark.parametrize(
    ("values", "y_shape", "message"),
    [
        (
            lambda x, a: a * torch.ones(3),
            (N,),
            r"model: returned shape \(3,\) for 6 rows; y asks for \(6,\) or \(6, 1\)",
        ),
        (lambda x, a: a * torch.ones(N, N), (N,), r"returned shape \(6, 6\) for 6 rows"),
        (lambda x, a: a * torch.ones(1, N), (N,), r"returned shape \(1, 6\) for 6 rows"),
        (lambda x, a: a * x, (N, 2), r"returned shape \(6,\) for 6 rows; y asks for \(6, 2\)"),
        (
            lambda x, a: a * torch.ones(2, N),
            (N, 2),
            r"returned shape \(2, 6\) for 6 rows; y asks for \(6, 2\)",
        ),
        (lambda x, a: a * x[:0], (N,), r"returned (shape \(0,\)|no values)"),
    ],
)
def test_values_of_a_wrong_shape(values, y_shape, message):
    with pytest.raises(ValueError, match=message):
        problem_of(torch_model(values), x6, torch.zeros(y_shape).double(), [2.0])


def test_a_residual_without_values():
    with pytest.raises(ValueError, match="returned no values"):
        problem_of(torch_model(lambda theta, x, y: theta[:0], "residual"), x6, x6, [2.0])


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_constant_model(library):
    model = wrapped(lambda x, a: a, library)
    problem = problem_of(model, x6, x6, [2.0])
    assert not problem.coupled
    assert problem.cost(torch.tensor([2.0], dtype=torch.float64)) == pytest.approx(0.5 * float(((2 - x6) ** 2).sum()))
    jac = Derivatives.choose(problem, "auto", torch.tensor([2.0], dtype=torch.float64)).at(
        torch.tensor([2.0], dtype=torch.float64)
    )
    ((_, J),) = jac.blocks()
    np.testing.assert_allclose(J, np.ones((N, 1)), rtol=1e-7)


@pytest.mark.parametrize("library", LIBRARIES)
def test_several_outputs_stay_together_row_by_row(library, rng):
    stack = np.stack if library is np else torch.stack
    function = lambda x, a, b: stack([a * x, library.exp(-b * x)], 1)  # noqa: E731
    y = rng.normal(size=(FEW, 2))
    x = np.linspace(0, 1, FEW)
    problem = problem_of(wrapped(function, library), x, y, THETA)
    assert (problem.per_row, problem.n_residuals, problem.coupled) == (2, 2 * FEW, False)
    expected = np.stack([1.3 * x, np.exp(-0.7 * x)], 1) - y
    np.testing.assert_allclose(problem.residual(torch.tensor(THETA), slice(0, FEW)), expected.ravel())
    np.testing.assert_allclose(problem.cost(torch.tensor(THETA)), 0.5 * (expected**2).sum(), rtol=1e-13)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("n_rows", [FEW, MANY])
@pytest.mark.parametrize("kind", ["differences", "with-a-prior", "a-few", "stacked"])
def test_residuals_that_are_not_one_a_row(kind, n_rows, library, rng):
    join = np.concatenate if library is np else torch.cat

    def function(theta, x, y):
        r = theta[0] * library.exp(-theta[1] * x) - y
        return {
            "differences": lambda: r[1:] - r[:-1],
            "with-a-prior": lambda: join([r, theta - 1.0]),
            "a-few": lambda: library.stack([r.sum(), (r * x).sum(), (x * r).mean()]),
            "stacked": lambda: join([r, r * x]),
        }[kind]()

    x, y = np.linspace(0, 1, n_rows), rng.normal(size=n_rows)
    model = (numpy_model if library is np else torch_model)(function, "residual")
    problem = problem_of(model, x, y, THETA)
    make = (lambda t: t) if library is np else torch.tensor
    values = lambda theta: np.asarray(function(make(theta), make(x), make(y)))  # noqa: E731
    expected = values(THETA)
    assert problem.n_residuals == expected.size
    assert problem.coupled
    theta = torch.tensor(THETA)
    np.testing.assert_allclose(problem.cost(theta), 0.5 * expected @ expected, rtol=1e-12)
    ((r, J),) = Derivatives.choose(problem, "autograd" if library is torch else "3-point", theta).at(theta).blocks()
    np.testing.assert_allclose(r, expected, rtol=1e-12, atol=1e-12)
    assert relative_column_error(J, central_differences(values, THETA)) < 1e-6  # rounding of differences


def test_a_residual_of_one_number(rng):
    problem = problem_of(torch_model(lambda theta, x, y: (theta[0] * x - y).norm(), "residual"), x6, 3 * x6, [2.0])
    assert problem.n_residuals == 1
    assert problem.cost(torch.tensor([2.0], dtype=torch.float64)) == pytest.approx(0.5 * float((x6**2).sum()))


# --- cost -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_rows", [1, 7, LEAF_ROWS, 5 * LEAF_ROWS + 3])
def test_cost_against_an_exact_sum(n_rows, rng):
    x, y = rng.normal(size=n_rows), rng.normal(size=n_rows) * 10.0 ** rng.integers(-6, 7, n_rows)
    problem = problem_of(numpy_model(lambda x, a, b: a * x + b), x, y, THETA)
    exact = 0.5 * math.fsum(np.square(np.longdouble(1.3 * x + 0.7 - y)).tolist())
    assert problem.cost(torch.tensor(THETA)) == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize(("size", "expected"), [(1e200, math.inf), (math.inf, math.inf), (math.nan, math.nan)])
def test_a_cost_that_is_no_number_is_no_exception(size, expected):
    problem = problem_of(numpy_model(lambda x, a: a * np.ones_like(x)), np.ones(5 * LEAF_ROWS), None, [1.0])
    assert problem.cost(torch.tensor([size], dtype=torch.float64)) == pytest.approx(expected, nan_ok=True)


def test_theta_written_by_the_model_is_a_copy():
    def function(x, theta):
        theta[0] = abs(theta[0])
        return theta[0] * x

    x, theta = np.linspace(1.0, 2.0, 5), torch.tensor([-1.0], dtype=torch.float64)
    problem = problem_of(numpy_model(function, "theta"), x, x.copy(), theta)
    problem.cost(theta)
    assert float(theta[0]) == -1.0


@pytest.mark.parametrize("make", [numpy_model, torch_model])
def test_a_model_that_writes_to_the_data_is_refused(make):
    def function(x, a):
        x -= 0.5
        return a * x

    x = np.linspace(1.0, 2.0, 5)
    with pytest.raises(ValueError, match=r"read-only|writes to its input"):
        problem_of(make(function), x, x.copy(), torch.ones(1, dtype=torch.float64))


def test_finite_leaves_whose_sum_overflows_are_an_infinite_cost():
    """4096 · (1.2e152)² = 5.9e307 fits; five of them do not."""
    problem = problem_of(numpy_model(lambda x, a: a * np.ones_like(x)), np.ones(5 * LEAF_ROWS), None, [1.0])
    assert problem.cost(torch.tensor([1.2e152], dtype=torch.float64)) == math.inf


@pytest.mark.parametrize("y", [np.arange(5), np.arange(5.0), np.arange(5, dtype=np.float32)[:, None]])
def test_target_norm(y):
    problem = problem_of(torch_model(lambda x, a: a * x), np.arange(5.0), y, [1.0])
    assert problem.target_norm == pytest.approx(math.sqrt(30))


def test_residuals_have_no_target_norm():
    model = ResidualOf(torch_model(lambda x, a: a * x), torch.sub)
    assert problem_of(model, np.arange(5.0), np.arange(5.0), [1.0]).target_norm == 0.0


# --- blocks and devices -----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_rows", [0, -3])
def test_a_block_has_at_least_one_row(chunk_rows):
    with pytest.raises(ValueError, match="chunk_rows"):
        problem_of(torch_model(lambda x, a: a * x), np.arange(5.0), np.arange(5.0), [1.0], chunk_rows=chunk_rows)


def decay_problem(devices, rng, library=torch, chunk_rows=LEAF_ROWS):
    x, y = np.linspace(0, 3, 9 * LEAF_ROWS + 5), rng.normal(size=9 * LEAF_ROWS + 5)
    model = wrapped(lambda x, a, b: a * library.exp(-b * x), library)
    return problem_of(model, x, y, THETA, devices=devices, chunk_rows=chunk_rows)


def gram(problem, jac):
    theta = torch.tensor(THETA)
    jacobian = Derivatives.choose(problem, jac, theta).at(theta)
    return jacobian.reduce(lambda columns: columns @ columns.T, torch.add)


@pytest.mark.parametrize(("library", "jac"), [(np, "3-point"), (torch, "autograd")])
@pytest.mark.parametrize("devices", [2, 3])
def test_devices_do_not_change_a_bit(devices, library, jac, seed):
    one = decay_problem([CPU], np.random.default_rng(seed), library)
    several = decay_problem([CPU] * devices, np.random.default_rng(seed), library)
    theta = torch.tensor(THETA)
    assert several.cost(theta) == one.cost(theta)
    assert torch.equal(gram(several, jac), gram(one, jac))
    several.close()


@pytest.mark.parametrize("chunk_rows", [2 * LEAF_ROWS, 4 * LEAF_ROWS, "auto"])
def test_blocks_do_not_change_a_bit(chunk_rows, seed):
    small = decay_problem([CPU], np.random.default_rng(seed))
    large = decay_problem([CPU], np.random.default_rng(seed), chunk_rows=chunk_rows)
    theta = torch.tensor(THETA)
    assert large.cost(theta) == small.cost(theta)
    assert torch.equal(gram(large, "autograd"), gram(small, "autograd"))


def test_a_module_in_two_threads_gives_each_row_its_own():
    module = torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    model = module_model(module)
    X, y = torch.randn(12 * 256, 2).double(), torch.randn(12 * 256).double()
    theta = model.theta.clone()
    one = problem_of(model, X, y, theta, chunk_rows=256)
    two = problem_of(model, X, y, theta, chunk_rows=256, devices=[CPU, CPU])
    expected = torch.cat([J for _, J in Derivatives.choose(one, "autograd", theta).at(theta).blocks()])
    for _ in range(5):
        J = torch.cat([J for _, J in Derivatives.choose(two, "autograd", theta).at(theta).blocks()])
        assert torch.equal(J, expected)
    two.close()


def our_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("lmfit_gpu")]


def test_no_thread_is_left_after_close(rng):
    problem = decay_problem([CPU, CPU], rng)
    cost = problem.cost(torch.tensor(THETA))
    assert len(our_threads()) == 2
    problem.close()
    assert our_threads() == []
    assert problem.cost(torch.tensor(THETA)) == cost  # and it can be used again
    problem.close()
    problem.close()
    assert our_threads() == []


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("devices", [1, 2])
def test_what_a_worker_raises_reaches_the_caller(error, devices, rng):
    trouble = {"calls": 0, "at": math.inf}
    lock = threading.Lock()

    def function(x, a, b):
        with lock:
            trouble["calls"] += 1
            if trouble["calls"] == trouble["at"]:
                raise error("from the model")
        return a * np.exp(-b * x)

    x, y = np.linspace(0, 3, 9 * LEAF_ROWS), rng.normal(size=9 * LEAF_ROWS)
    problem = problem_of(numpy_model(function), x, y, THETA, devices=[CPU] * devices, chunk_rows=LEAF_ROWS)
    theta = torch.tensor(THETA)
    cost = problem.cost(theta)
    trouble.update(calls=0, at=3)
    with pytest.raises(error, match="from the model"):
        problem.cost(theta)
    trouble.update(at=math.inf)
    assert problem.cost(theta) == cost
    problem.close()
    assert our_threads() == []


def test_an_interrupt_between_blocks_leaves_the_problem_usable(rng):
    problem = decay_problem([CPU, CPU], rng)
    theta = torch.tensor(THETA)
    cost = problem.cost(theta)
    blocks = problem.map_blocks(lambda block: block.index)
    assert next(blocks) == 0
    with pytest.raises(KeyboardInterrupt):
        blocks.throw(KeyboardInterrupt)
    assert problem.cost(theta) == cost
    problem.close()
    assert our_threads() == []


def test_blocks_come_in_order_and_cover_the_rows(rng):
    problem = decay_problem([CPU, CPU], rng)
    blocks = list(problem.map_blocks(lambda block: (block.index, block.rows, block.x.shape[0])))
    assert [index for index, _, _ in blocks] == list(range(10))
    assert [rows for _, rows, _ in blocks] == problem.row_blocks()
    assert sum(n for _, _, n in blocks) == problem.rows.n_samples
    problem.close()


# --- bounds -----------------------------------------------------------------------------------------------

INF = math.inf


def bounds_of(lower, upper, dtype=torch.float64):
    return torch.tensor(lower, dtype=dtype), torch.tensor(upper, dtype=dtype)


def test_bounds_are_stored_in_the_dtype_of_theta():
    theta = torch.tensor([1.3, 0.7])
    rows = ArrayRows(torch.ones(5), torch.ones(5))
    problem = LeastSquaresProblem(torch_model(in_place(torch)), rows, theta, bounds=bounds_of([0.0, -INF], [INF, 0.7]))
    assert all(side.dtype == torch.float32 and side.device == problem.device for side in problem.bounds)
    assert problem.inside(torch.tensor([-1.0, 5.0])).tolist() == [0.0, pytest.approx(0.7)]
    assert problem.inside(torch.tensor([[-1.0, 0.0], [2.0, -9.0]])).tolist() == [[0.0, 0.0], [2.0, -9.0]]


def test_without_bounds_inside_is_the_identity():
    problem = problem_of(numpy_model(in_place(np)), np.ones(5), np.ones(5), THETA)
    theta = torch.tensor(THETA)
    assert problem.bounds is None
    assert problem.inside(theta) is theta


def test_a_start_outside_its_bounds_is_refused_by_name():
    model = ResidualOf(numpy_model(in_place(np)), np.subtract)
    with pytest.raises(ValueError, match=r"bounds: 'parameter 1' is 0.7 at the start; .* got 0 and 0.5"):
        problem_of(model, np.ones(5), np.ones(5), THETA, bounds=bounds_of([0.0, 0.0], [5.0, 0.5]))


@pytest.mark.parametrize(
    ("start", "lower", "upper"),
    [
        (0.0, 0.0, INF),
        (0.0, -INF, 0.0),
        (0.0, -1e-3, 1e-3),
        (0.0, 0.0, 1e-3),
        (0.0, -1e-3, 0.0),
        (0.5, 0.5, 0.5),
        (1.0, 0.0, 1.0),
    ],
)
@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_row_check_stays_in_the_box_and_still_finds_coupled_rows(library, coupled, start, lower, upper):
    """b = 0 switches the coupled term off: the second point of the check must move b, within its bounds."""

    def make(library):
        if coupled:
            return lambda x, a, b: a * x + b * library.cumsum(x, 0)
        return lambda x, a, b: a * x + b * x**2

    watched = Watched(make, library, [1.3, lower], [INF, upper])
    x = np.linspace(0.1, 2.0, FEW)
    problem = problem_of(watched.model, x, np.cos(x), [1.3, start], bounds=watched.bounds)
    assert watched.calls
    assert watched.outside == []
    assert problem.coupled is coupled


room = st.one_of(st.just(0.0), st.just(INF), st.floats(1e-18, 1e3))


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    theta=st.lists(st.one_of(st.just(0.0), st.floats(-1e6, 1e6)), min_size=3, max_size=3),
    down=st.lists(room, min_size=3, max_size=3),
    up=st.lists(room, min_size=3, max_size=3),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_a_nearby_point_is_in_the_box_and_differs_where_the_box_has_width(theta, down, up, dtype):
    at = torch.tensor(theta, dtype=dtype)
    lower, upper = at - torch.tensor(down, dtype=dtype), at + torch.tensor(up, dtype=dtype)
    point = nearby(at, (lower, upper))
    assert bool(((lower <= point) & (point <= upper)).all())
    assert torch.equal(point != at, lower != upper)
    assert bool(((point - at).abs() <= 0.11 * (1 + at.abs())).all())


@pytest.mark.parametrize("theta", [[1.3, 0.7], [0.0, 0.0], [-1e6, 1e-9]])
def test_a_nearby_point_is_the_same_without_bounds_and_with_infinite_ones(theta):
    """theta + u (1 + |theta|) / 10, u from a fixed seed."""
    at = torch.tensor(theta, dtype=torch.float64)
    u = torch.rand(2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = at + 0.1 * (1 + at.abs()) * u
    assert torch.equal(nearby(at), expected)
    assert torch.equal(nearby(at, bounds_of([-INF, -INF], [INF, INF])), expected)
