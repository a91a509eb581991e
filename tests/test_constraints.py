"""Bounds, fixed and tied parameters: what is refused, and the way from the free vector to all parameters."""

import math
import warnings

import numpy as np
import pytest
import torch
from oracles import CPU, central_differences, problem_of, relative_column_error, values_of
from scipy.optimize import Bounds
from sklearn.exceptions import ConvergenceWarning
from test_autodiff import BROADCASTING, CASES, X1, case, jacobian_by
from torch.func import jvp, vmap

from lmfit_gpu import LMRegressor
from lmfit_gpu.autodiff import Dual, Expanded, Forward, Reverse, Rowwise, choose_route
from lmfit_gpu.constraints import ConstrainedModel, between, resolve_constraints
from lmfit_gpu.exceptions import FitWarning
from lmfit_gpu.ties import tie_arguments

NAMES = ("a", "b", "c")
INF = np.inf


def resolved(bounds=None, fixed=(), tied=None, start=(1.0, 2.0, 3.0), names=NAMES, n_model=None, given=True):
    n_model = len(names) if n_model is None else n_model
    return resolve_constraints(names, n_model, np.array(start, dtype=float), given, bounds, fixed, tied)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


# ---- bounds

LOW, HIGH = [0.0, -INF, 2.0], [5.0, 9.0, INF]


@pytest.mark.parametrize(
    "bounds",
    [
        pytest.param((LOW, HIGH), id="lists"),
        pytest.param([np.array(LOW), np.array(HIGH)], id="arrays"),
        pytest.param(np.array([LOW, HIGH]), id="array-2-n"),
        pytest.param((tensor(LOW), tensor(HIGH)), id="tensors"),
        pytest.param(tensor([LOW, HIGH]), id="tensor-2-n"),
        pytest.param(([0, None, 2], [5, 9, None]), id="None"),
        pytest.param(Bounds(LOW, HIGH), id="scipy"),
        pytest.param({"a": (0, 5), "b": (None, 9), "c": (2, INF)}, id="dict"),
        pytest.param({"a": [0, 5], "b": (-INF, 9.0), "c": np.array([2, INF])}, id="dict-of-arrays"),
    ],
)
def test_bounds_in_every_form(bounds):
    found = resolved(bounds)
    np.testing.assert_array_equal(found.lower, LOW)
    np.testing.assert_array_equal(found.upper, HIGH)
    assert found.free.all()
    assert found.lower.dtype == found.upper.dtype == np.float64
    np.testing.assert_array_equal(found.theta(), [1, 2, 3])


@pytest.mark.parametrize("bounds", [(0, 7), (0.0, [7, 7, 7]), (None, 7), Bounds(0, 7), (np.float32(0), tensor(7.0))])
def test_scalar_bounds_are_for_all_parameters_of_the_model(bounds):
    """Not for those that only ties have."""
    found = resolved(bounds, start=(1, 2, 3, -4), names=(*NAMES, "s"), n_model=3)
    np.testing.assert_array_equal(found.upper, [7, 7, 7, INF])
    assert found.lower[3] == -INF
    assert found.lower[0] == (-INF if isinstance(bounds, tuple) and bounds[0] is None else 0)


def test_bounds_of_a_tensor_hold_for_all_its_entries():
    found = resolved({"w": (0, 2), "v": (0, 1)}, start=(1, 1, 1), names=("w[0]", "w[1]", "v"))
    np.testing.assert_array_equal(found.upper, [2, 2, 1])


def test_tensors_of_bounds_follow_the_arithmetic():
    found = resolved({"a": (0, 5)}, fixed="b")
    lower, upper = found.bounds(torch.zeros(1, dtype=torch.float32))
    assert lower.dtype is upper.dtype is torch.float32
    assert lower.tolist() == [0, -INF] and upper.tolist() == [5, INF]
    assert resolved(fixed="b").bounds(torch.zeros(1)) is None
    assert resolved({"b": (0, 3)}, fixed="b").bounds(torch.zeros(1)) is None  # b alone has bounds, and is not free


def test_bounds_in_float32_are_not_wider():
    """0.3 in float32 is 0.30000001, which is outside."""
    lower, upper = resolved({"a": (0.7, 1.3), "b": (1.1, 2.3)}).bounds(torch.zeros(1, dtype=torch.float32))
    assert bool((lower.double()[:2] >= tensor([0.7, 1.1])).all()) and bool(
        (upper.double()[:2] <= tensor([1.3, 2.3])).all()
    )


def test_equal_bounds_fix_a_parameter():
    found = resolved({"b": (2, 2)})
    assert found.free.tolist() == [True, False, True]
    assert found.free_names == ("a", "c")
    with pytest.raises(ValueError, match=r"p0: 'b' starts at 2, outside its bounds \(4, 4\)"):
        resolved({"b": (4, 4)})
    assert resolved({"b": (4, 4)}, given=False).start[1] == 4


@pytest.mark.parametrize(("start", "wrong"), [(1.0, False), (5.0, False), (0.999, True), (np.nextafter(5, 6), True)])
def test_a_start_on_a_bound_is_inside(start, wrong):
    if wrong:
        with pytest.raises(ValueError, match=rf"p0: 'a' starts at {start:g}, outside its bounds \(1, 5\)"):
            resolved({"a": (1, 5)}, start=(start, 2, 3))
    else:
        assert resolved({"a": (1, 5)}, start=(start, 2, 3)).start[0] == start


def test_a_start_that_was_not_given_is_between():
    lower, upper = np.array([0, -INF, 3, -INF, -1e308, 1e308]), np.array([10, -4, INF, INF, 1e308, 1.5e308])
    np.testing.assert_allclose(between(lower, upper, np.full(6, 1.0)), [5, -5, 4, 1, 0, 1.25e308])
    est = LMRegressor(lambda x, a, b: a + b * x, bounds={"b": (3, 6)}, max_iter=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", FitWarning)
        est.fit(X1.numpy()[:, None], X1.numpy())
    assert est.params_ == {"a": 1.0, "b": 4.5}


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"z": (0, 1)}, r"bounds: no parameter 'z'; there are a, b, c$"),
        ({1: (0, 1)}, r"bounds: no parameter 1; there are a, b, c"),
        ({"b": (3, 1)}, r"bounds: of 'b': lower 3, upper 1; lower <= upper is expected"),
        (([0, 0, 9], [1, 5, 8]), r"bounds: of 'c': lower 9, upper 8"),
        ({"b": (INF, INF)}, r"bounds: of 'b': lower inf"),
        ({"b": (-INF, -INF)}, r"bounds: of 'b': lower -inf, upper -inf"),
        ({"b": (np.nan, 1)}, r"bounds: got NaN of 'b'"),
        ((0, [1, np.nan, 1]), r"bounds: got NaN"),
        ({"b": 3}, r"bounds: got 3 of 'b' ; a pair"),
        ({"b": None}, r"bounds: got None of 'b'"),
        ({"b": "01"}, r"bounds: got '01' of 'b'"),
        ((0, 1, 2), r"bounds: got \(0, 1, 2\) ; a pair"),
        (7, r"bounds: got 7 ; a pair"),
        ("ab", r"bounds: got 'ab'"),
        (([0, 0], [1, 1]), r"bounds: got shape \(2,\)"),
        (([0, [1, 2], 3], 9), r"bounds: got \[0, \[1, 2\], 3\] ; numbers"),
        ({"b": ("x", 1)}, r"bounds: got 'x' of 'b' ; numbers"),
        ((0, 1j), r"bounds: got 1j ; numbers"),
        pytest.param({"b": ([0, 1], 2)}, r"bounds: .*'b'", id="the parameter is not named"),
        pytest.param({0, 1}, r"bounds: got \{0, 1\}", id="a bare TypeError"),
        pytest.param((np.array([0j, 0j, 0j]), 9), r"bounds: ", id="the imaginary part is dropped"),
    ],
)
def test_bounds_that_make_no_sense(bounds, message):
    with pytest.raises((ValueError, TypeError), match=message):
        resolved(bounds)


# ---- fixed


@pytest.mark.parametrize(
    "fixed",
    [
        "b",
        ["b"],
        ("b",),
        {"b"},
        np.array(["b"]),
        [False, True, False],
        np.array([0, 1, 0], bool),
        torch.tensor([0, 1, 0]) > 0,
    ],
    ids=str,
)
def test_fixed_by_name_or_mask(fixed):
    found = resolved(fixed=fixed)
    assert found.free.tolist() == [True, False, True]
    assert found.start.tolist() == [1, 2, 3]


@pytest.mark.parametrize("fixed", [(), [], None, np.array([], bool)])
def test_nothing_fixed_is_no_constraint(fixed):
    assert resolved(fixed=fixed) is None
    assert resolved(fixed=fixed, tied={}) is None
    assert resolved({"a": (0, 2)}, fixed=fixed).free.all()


def test_a_tensor_of_a_module_is_fixed_by_its_name():
    names = ("lin.weight[0,0]", "lin.weight[0,1]", "lin.bias[0]", "lin.weights[0]")
    assert resolved(fixed=["lin.weight"], start=(1, 1, 1, 1), names=names).free.tolist() == [False, False, True, True]
    with pytest.raises(ValueError, match=r"fixed: no parameter 'lin'; there are lin\.weight"):
        resolved(fixed=["lin"], start=(1, 1, 1, 1), names=names)


def test_a_mask_is_over_the_parameters_of_the_model():
    found = resolved(fixed=[False, True, False], start=(1, 2, 3, 4), names=(*NAMES, "s"), n_model=3)
    assert found.free.tolist() == [True, False, True, True]
    with pytest.raises(ValueError, match="fixed: got a mask of 4 entries for 3 parameters"):
        resolved(fixed=[False] * 4, start=(1, 2, 3, 4), names=(*NAMES, "s"), n_model=3)


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ("z", r"fixed: no parameter 'z'; there are a, b, c"),
        ("", r"fixed: no parameter ''"),
        ([1], r"fixed: got \[1\]; names of parameters, or a mask of bool"),
        ([True, "b", False], r"fixed: got .*names of parameters"),
        ([True], r"fixed: got a mask of 1 entries for 3 parameters"),
        ([True] * 3, r"no parameter is left free"),
        pytest.param(5, "fixed: got 5", id="a bare TypeError"),
    ],
)
def test_fixed_that_makes_no_sense(fixed, message):
    with pytest.raises((ValueError, TypeError), match=message):
        resolved(fixed=fixed)


def test_long_lists_of_names_are_cut():
    with pytest.raises(ValueError, match=r"there are p0, p1, p2, p3, p4, p5, p6, p7, \.\.\.$"):
        resolved(fixed="z", start=np.ones(12), names=tuple(f"p{i}" for i in range(12)))


# ---- tied


@pytest.mark.parametrize("library", [torch, np, pytest.param(math, id="a warning of torch")])
def test_a_chain_of_ties(library):
    """c of b, b of a: whatever the order in which they are given."""
    tied = {"c": lambda b, a: library.exp(b) + a, "b": lambda a: 2 * library.sqrt(a)}
    found = resolved(tied=tied, start=(1.0, -7.0, -7.0))
    assert found.in_torch is (library is torch)
    assert found.free.tolist() == [True, False, False]
    np.testing.assert_allclose(found.start, [1, 2, np.exp(2) + 1], rtol=1e-15)
    np.testing.assert_allclose(found.full(tensor([4.0])), [4, 4, np.exp(4) + 4], rtol=1e-15)
    slope = found.derivative(tensor([4.0]))
    np.testing.assert_allclose(slope, [[1], [0.5], [0.5 * np.exp(4) + 1]], rtol=1e-12 if library is torch else 1e-8)
    assert slope.dtype is torch.float64


def test_ties_to_constants_and_fixed_parameters():
    found = resolved(
        fixed="a", tied={"b": lambda: 5.0, "c": lambda a, s: a * s}, start=(2, 0, 0, 3), names=(*NAMES, "s"), n_model=3
    )
    assert found.free_names == ("s",)
    assert found.full(tensor([4.0])).tolist() == [2, 5, 8, 4]
    np.testing.assert_allclose(found.derivative(tensor([4.0])), [[0], [0], [2], [1]], atol=1e-9)


def test_defaults_of_a_tie_are_not_parameters():
    assert tie_arguments("b", lambda a, power=2: a**power) == ("a",)
    assert tie_arguments("b", lambda a, *, power=2: a**power) == ("a",)
    assert resolved(tied={"b": lambda a, power=3: a**power}, start=(2, 0, 0)).start.tolist() == [2, 8, 0]


@pytest.mark.parametrize(
    ("tied", "message"),
    [
        ({"a": lambda b: b, "b": lambda c: c, "c": lambda a: a}, r"tied: .*circle: (\w -> ){3}\w$"),
        ({"a": lambda a: a}, r"tied: .*circle: a -> a"),
        ({"z": lambda a: a}, r"tied: no parameter 'z'"),
        ({"b": lambda z: z}, r"tied: 'b': no parameter 'z'; there are a, b, c"),
        ({"b": 3.0}, r"tied: 'b': got 3.0; a callable"),
        ({"b": lambda *args: 1.0}, r"tied: 'b': .*\*args"),
        ({"b": lambda a, **more: 1.0}, r"tied: 'b': .*keywords"),
        ({"b": lambda *, a: 1.0}, r"tied: 'b': .*keywords"),
        ({"b": lambda a: a / 0}, r"tied: 'b'( is inf|: its function fails)"),
        ({"b": lambda a: np.log(a - 2)}, r"tied: 'b' is nan at the start"),
        ({"b": lambda a: math.log(a - 2)}, r"tied: 'b': its function fails at the start: (math domain|expected)"),
        ({"b": lambda a: None}, r"tied: 'b' is nan at the start"),
        ({"b": lambda a: torch.stack([a, a])}, r"tied: 'b': its function fails at the start"),
        ([("b", len)], r"tied: got .*a dict of name to callable"),
    ],
)
def test_ties_that_make_no_sense(tied, message):
    with pytest.raises((ValueError, TypeError), match=message):
        resolved(tied=tied).full(tensor([1.0, 2.0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tied": {"b": lambda a: a}, "bounds": {"b": (0, 9)}}, r"bounds: 'b' is tied"),
        ({"tied": {"b": lambda a: a}, "bounds": (0, 9)}, r"bounds: 'b' is tied"),
        ({"tied": {"b": lambda a: a}, "fixed": "b"}, r"fixed: 'b' is tied as well"),
        ({"tied": {"b": lambda a: a, "c": lambda a: a}, "fixed": "a"}, r"no parameter is left free"),
    ],
)
def test_options_that_contradict_each_other(options, message):
    with pytest.raises(ValueError, match=message):
        resolved(**options)


def test_ties_name_entries_of_a_module_one_by_one():
    names = ("w[0]", "w[1]", "v")
    with pytest.raises(ValueError, match=r"tied: 'w' is a tensor of 2 parameters; tie its entries one by one"):
        resolved(tied={"w": lambda v: v}, names=names)
    assert resolved(tied={"w[1]": lambda v: 2 * v}, names=names).start.tolist() == [1, 6, 3]
    with pytest.raises(ValueError, match="w"):
        resolved(tied={"v": lambda w: w.sum()}, names=names)


# ---- between the free vector and all parameters

MIXED = {"fixed": "b", "tied": {"d": lambda a, s: a * torch.exp(s), "e": lambda d, b: d - b}}


def mixed(tied=None):
    """Order of the model: d (tied), a, b (fixed), e (tied), then s; free: a, s."""
    return resolved(
        fixed="b", tied=tied or MIXED["tied"], start=(0, 2, 3, 0, 0.5), names=("d", "a", "b", "e", "s"), n_model=4
    )


def by_hand(theta):
    a, s = theta
    d = a * np.exp(s)
    return np.stack([d, a, 3.0 + 0 * a, d - 3.0, s])


def test_full_puts_every_parameter_in_its_place(rng):
    found = mixed()
    np.testing.assert_allclose(found.full(tensor(found.theta())), found.start, rtol=1e-15)
    for shape in ((2,), (2, 7), (2, 3, 4)):
        theta = rng.normal(size=shape)
        np.testing.assert_allclose(found.full(tensor(theta)), by_hand(theta), rtol=1e-14)
    for dtype in (torch.float32, torch.complex128):
        assert found.full(torch.ones(2, dtype=dtype)).dtype is dtype


def test_full_under_the_transforms_of_torch(rng):
    found, thetas, v = mixed(), tensor(rng.normal(size=(6, 2))), tensor([0.3, -0.4])
    np.testing.assert_allclose(vmap(found.full)(thetas), by_hand(thetas.numpy().T).T, rtol=1e-14)
    G = central_differences(by_hand, thetas[0])
    np.testing.assert_allclose(jvp(found.full, (thetas[0],), (v,))[1], G @ v.numpy(), rtol=1e-8)
    np.testing.assert_allclose(torch.func.jacrev(found.full)(thetas[0]), G, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(torch.func.jacfwd(found.full)(thetas[0]), G, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(found.derivative(thetas[0].requires_grad_()), G, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("library", [np, math])
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6, 0.0])
def test_differences_of_ties_that_torch_does_not_know(library, size):
    found = mixed({"d": lambda a, s: a * library.exp(s), "e": lambda d, b: d - b})
    assert not found.in_torch

    G = np.array([[math.exp(0.5), size * math.exp(0.5)], [1, 0], [0, 0], [math.exp(0.5), size * math.exp(0.5)], [0, 1]])
    np.testing.assert_allclose(found.derivative(tensor([size, 0.5])), G, rtol=1e-8, atol=1e-9 * max(size, 1))


@pytest.mark.parametrize("library", [math, np, torch])
def test_a_tie_is_not_evaluated_outside_the_bounds(library):
    """The parameter a ends on 0, where the differences of sqrt step to -1e-6; torch has an infinite slope there."""
    est = LMRegressor(
        lambda x, a, b: a - 0.5 + b + 0 * x, p0=[1, 1], bounds={"a": (0, 2)}, tied={"b": lambda a: library.sqrt(a)}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        est.fit(X1.numpy()[:, None], np.full(len(X1), -1.0))
    assert est.theta_.tolist() == [0, 0]
    assert not np.isfinite(est.stderr_).any()


# ---- models of free parameters


def constrained(name):
    """Return (model, X, y, theta) of a case of test_autodiff: first parameter fixed, last tied to the second."""
    model, X, y, theta = case(name)
    theta = torch.as_tensor(theta, dtype=torch.float64).numpy()
    names = tuple(f"p{i}" for i in range(len(theta)))
    fixed, tie = ("p0", lambda p1: torch.tanh(p1) + 0.1) if len(theta) > 2 else ((), lambda p0: torch.tanh(p0) + 0.1)
    found = resolve_constraints(names, len(theta), theta, True, None, fixed, {names[-1]: tie})
    return ConstrainedModel(model, found), X, y, torch.from_numpy(found.theta())


@pytest.mark.parametrize(
    ("route", "name"),
    [(Expanded(), name) for name in BROADCASTING]
    + [(route, name) for route in (Rowwise(), Forward(), Dual(), Reverse()) for name in CASES],
    ids=lambda part: getattr(part, "name", part),
)
def test_every_route_goes_through_ties(route, name):
    model, X, y, theta = constrained(name)
    problem = problem_of(model, X, y, theta)
    values, J = jacobian_by(route, problem, theta)
    f = values_of(model, X, y)
    np.testing.assert_allclose(values, f(theta), rtol=1e-13, atol=1e-13)
    assert relative_column_error(J, central_differences(f, theta)) < 1e-8


@pytest.mark.parametrize("name", CASES)
def test_constraints_do_not_change_the_route(name):
    """A broadcasting function is still expanded, a module goes row by row, a network too."""
    model, X, y, theta = constrained(name)
    plain, _, _, whole = case(name)
    route = choose_route(problem_of(plain, X, y, whole), torch.as_tensor(whole, dtype=torch.float64))
    expected = "rowwise" if route.name in ("layerwise", "layers") else route.name
    assert choose_route(problem_of(model, X, y, theta), theta).name == expected
    assert (model.is_residual, model.differentiable) == (plain.is_residual, True)
    assert isinstance(model.replicate(CPU), ConstrainedModel)
    np.testing.assert_allclose(values_of(model.replicate(CPU), X, y)(theta), values_of(model, X, y)(theta), rtol=1e-14)
