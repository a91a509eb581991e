"""The NIST problems against an independent oracle: the same models in 60-digit arithmetic (mpmath).

The oracle reads the decimal digits NIST prints (not their nearest float64), evaluates each model at the 20-digit
reference parameters, differentiates it by a complex step and forms JᵀJ, which at 60 digits loses nothing that
matters. From that follow rss, standard errors and one Gauss-Newton step, whose length says how many digits of the
reference parameters are right.
"""

import copy
import inspect
import json
import pickle
from collections import Counter
from dataclasses import FrozenInstanceError, dataclass
from functools import cache
from importlib import resources
from types import SimpleNamespace

import mpmath
import numpy as np
import pytest
import torch

from lmfit_gpu.datasets import NIST_NAMES, NistProblem, correct_digits, load_nist
from lmfit_gpu.datasets.nist_models import BODIES, NistModel

DIGITS = 60  # of the oracle
COMPLEX_STEP = mpmath.mpf(10) ** -45  # relative; its error, the square, is below 60 digits of a derivative
MPMATH = SimpleNamespace(exp=mpmath.exp, cos=mpmath.cos, sin=mpmath.sin, arctan=mpmath.atan, pi=mpmath.pi)

every_problem = pytest.mark.parametrize("name", NIST_NAMES)


@dataclass(frozen=True)
class Oracle:
    """What 60-digit arithmetic finds one Gauss-Newton step from the reference parameters."""

    rss: mpmath.mpf
    stderr: tuple[mpmath.mpf, ...]
    gauss_newton_step: tuple[mpmath.mpf, ...]  # relative to the parameters


class _Rows:
    """One row that answers x[:, j] with a scalar, as Nelson's body asks."""

    def __init__(self, row: list[mpmath.mpf]) -> None:
        self.row = row

    def __getitem__(self, index: tuple[slice, int]) -> mpmath.mpf:
        return self.row[index[1]]


def _exact(values: np.ndarray) -> list[mpmath.mpf]:
    """Return the decimals that NIST prints: the shortest that round to these float64."""
    return [mpmath.mpf(repr(v)) for v in values.tolist()]


@cache
def consult_oracle(name: str) -> Oracle:
    problem = load_nist(name)
    with mpmath.workdps(DIGITS):
        b = [mpmath.mpf(text) for text in problem.reference.params_text]
        target = _exact(problem.response)
        if name == "Nelson":
            target = [mpmath.log(v) for v in target]
        rows = [_exact(row) for row in problem.X]
        points = [row[0] if len(row) == 1 else _Rows(row) for row in rows]
        residual = [BODIES[name](MPMATH, point, *b) - v for point, v in zip(points, target, strict=True)]
        jacobian = mpmath.matrix(len(points), len(b))
        for j, value in enumerate(b):
            step = abs(value) * COMPLEX_STEP
            moved = [*b[:j], mpmath.mpc(value, step), *b[j + 1 :]]
            for i, point in enumerate(points):
                jacobian[i, j] = mpmath.im(BODIES[name](MPMATH, point, *moved)) / step
        gradient = jacobian.T * mpmath.matrix(residual)
        inverse = (jacobian.T * jacobian) ** -1
        step = inverse * gradient
        # Less what the step removes, gᵀp: for Lanczos1 rounding b to 20 digits adds 2e-14 of rss, else nothing.
        rss = mpmath.fsum(r * r for r in residual) - mpmath.fsum(gradient[j] * step[j] for j in range(len(b)))
        stderr = tuple(mpmath.sqrt(rss / problem.dof * inverse[j, j]) for j in range(len(b)))
        return Oracle(rss, stderr, tuple(step[j] / b[j] for j in range(len(b))))


def _as_torch(problem: NistProblem) -> torch.Tensor:
    return torch.as_tensor(problem.x)


# The data


def test_the_collection_is_nists():
    levels = Counter(load_nist(name).level for name in NIST_NAMES)
    assert len(set(NIST_NAMES)) == 27
    assert levels == {"Lower": 8, "Average": 11, "Higher": 8}


def test_package_data_is_found_and_holds_the_same_problems():
    path = resources.files("lmfit_gpu.datasets") / "nist_strd.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    assert tuple(content["problems"]) == NIST_NAMES == tuple(BODIES)
    assert "NIST" in content["source"] and "public domain" in content["license"]


@every_problem
def test_shapes_and_dtypes(name):
    problem = load_nist(name)
    n_obs, n_params = len(problem.response), len(problem.param_names)
    n_predictors = 2 if name == "Nelson" else 1
    assert problem.name == name
    assert problem.param_names == tuple(f"b{j}" for j in range(1, n_params + 1))
    assert problem.X.shape == (n_obs, n_predictors)
    assert problem.x.shape == ((n_obs,) if n_predictors == 1 else (n_obs, 2))
    assert problem.y.shape == (n_obs,)
    assert len(problem.starts) == 2
    solutions = (problem.certified, problem.reference)
    vectors = (*problem.starts, *(s.params for s in solutions), *(s.stderr for s in solutions))
    assert all(v.shape == (n_params,) for v in vectors)
    assert all(v.dtype == np.float64 for v in (problem.X, problem.y, problem.response, *vectors))
    assert problem.dof == problem.reference.dof == n_obs - n_params
    assert len(problem.reference.params_text) == len(problem.reference.stderr_text) == n_params


@every_problem
def test_y_is_the_response_but_for_nelson(name):
    problem = load_nist(name)
    expected = np.log(problem.response) if name == "Nelson" else problem.response
    np.testing.assert_array_equal(problem.y, expected)


# The models


@every_problem
def test_models_have_the_right_signature(name):
    problem = load_nist(name)
    for model in (problem.model_numpy, problem.model_torch):
        assert tuple(inspect.signature(model).parameters) == ("x", *problem.param_names)


@every_problem
@pytest.mark.parametrize("where", ["reference", "start 1", "start 2"])
def test_numpy_and_torch_agree(name, where):
    problem = load_nist(name)
    theta = {
        "reference": problem.reference.params,
        "start 1": problem.starts[0],
        "start 2": problem.starts[1],
    }[where]
    by_numpy = problem.model_numpy(problem.x, *theta)
    by_torch = problem.model_torch(_as_torch(problem), *torch.as_tensor(theta))
    assert by_numpy.shape == problem.y.shape and by_torch.dtype == torch.float64
    # Worst measured: 1.7e-14 (Thurber: its numerator cancels near the left end), most 2e-16.
    np.testing.assert_allclose(by_torch.numpy(), by_numpy, rtol=1e-13, atol=0)


@every_problem
def test_autograd_matches_the_complex_step(name):
    problem = load_nist(name)
    theta = torch.as_tensor(problem.reference.params)
    # Reverse mode: in torch 2.13 forward mode uses torch.jit.script, which is deprecated and warns.
    by_autograd = torch.func.jacrev(lambda t: problem.model_torch(_as_torch(problem), *t))(theta).numpy()
    expected = _complex_step_jacobian(problem)
    scale = np.linalg.norm(expected, axis=0)
    np.testing.assert_allclose(by_autograd / scale, expected / scale, rtol=0, atol=1e-12)


@pytest.mark.parametrize("namespace", ["numpy", "torch"])
def test_models_survive_pickle_and_deepcopy(namespace):
    problem = load_nist("Thurber")
    model = NistModel(BODIES["Thurber"], namespace)
    x = problem.x if namespace == "numpy" else _as_torch(problem)
    expected = model(x, *problem.reference.params.tolist())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(twin(x, *problem.reference.params.tolist()), expected)
        assert inspect.signature(twin) == inspect.signature(model)


# The solutions, in 60 digits


@every_problem
def test_reference_parameters_are_stationary(name):
    # Rounding to 20 digits alone leaves up to 5e-20 of a parameter, and that is what is measured, except ENSO:
    # 1.7e-18, for with its large residuals the Gauss-Newton iteration that made `reference` converges slowly.
    assert max(map(abs, consult_oracle(name).gauss_newton_step)) < (1e-17 if name == "ENSO" else 1e-19)


@every_problem
def test_reference_rss_and_stderr_are_right_to_18_digits(name):
    oracle, reference = consult_oracle(name), load_nist(name).reference
    with mpmath.workdps(DIGITS):
        assert abs(mpmath.mpf(reference.rss_text) / oracle.rss - 1) < 1e-18
        for text, expected in zip(reference.stderr_text, oracle.stderr, strict=True):
            assert abs(mpmath.mpf(text) / expected - 1) < 1e-18


@every_problem
def test_what_nist_prints_agrees_to_10_digits(name):
    problem = load_nist(name)
    certified, oracle = problem.certified, consult_oracle(name)
    assert correct_digits(certified.params, problem.reference.params) >= 10
    assert correct_digits(certified.stderr, [float(s) for s in oracle.stderr]) >= 10
    assert correct_digits(certified.rss, float(oracle.rss)) >= 10
    assert correct_digits(certified.residual_std, problem.reference.residual_std) >= 10


def test_rat43_is_printed_with_the_wrong_degrees_of_freedom():
    problem = load_nist("Rat43")
    certified = problem.certified
    assert len(problem.y) - len(problem.param_names) == problem.dof == 11
    assert certified.dof == 9  # the misprint, kept
    assert correct_digits(certified.residual_std, np.sqrt(certified.rss / 11)) >= 10
    assert correct_digits(certified.residual_std, np.sqrt(certified.rss / 9)) < 1.1  # 31.2 for 28.3


def test_rat43_is_the_only_one():
    assert [name for name in NIST_NAMES if load_nist(name).certified.dof != load_nist(name).dof] == ["Rat43"]


# The solutions, in float64


def _complex_step_jacobian(problem: NistProblem) -> np.ndarray:
    theta = problem.reference.params
    columns = []
    for j, value in enumerate(theta):
        step = 1e-30 * abs(value)
        moved = theta.astype(np.complex128)
        moved[j] += 1j * step
        columns.append(problem.model_numpy(problem.x.astype(np.complex128), *moved).imag / step)
    return np.stack(columns, axis=1)  # (n_obs, k)


def _float64_rss(problem: NistProblem) -> float:
    residual = problem.model_numpy(problem.x, *problem.reference.params) - problem.y
    return float(residual @ residual)


def _float64_stderr(problem: NistProblem) -> np.ndarray:
    """Compute standard errors by QR of the scaled Jacobian."""
    jacobian = _complex_step_jacobian(problem)
    scale = np.linalg.norm(jacobian, axis=0)
    inverse = np.linalg.inv(np.linalg.qr(jacobian / scale, mode="r"))
    return np.sqrt(_float64_rss(problem) / problem.dof) * np.linalg.norm(inverse, axis=1) / scale


@every_problem
def test_float64_reproduces_rss(name):
    if name == "Lanczos1":
        pytest.skip("Lanczos1's residuals (9e-14) are near the rounding of y in float64; see the next tests")
    problem = load_nist(name)
    # Worst measured: 7e-11 (Lanczos2, residuals of 1e-6), then 2e-12 (MGH10).
    assert _float64_rss(problem) == pytest.approx(problem.reference.rss, rel=1e-9)
    assert _float64_rss(problem) == pytest.approx(problem.certified.rss, rel=1e-9)


@every_problem
def test_float64_reproduces_standard_errors(name):
    if name == "Lanczos1":
        pytest.skip("limited to 3 digits by the rounding of y to float64; see the next test")
    problem = load_nist(name)
    assert correct_digits(_float64_stderr(problem), problem.certified.stderr) >= 10


def test_lanczos1_in_float64_is_limited_by_the_rounding_of_y():
    problem = load_nist("Lanczos1")
    with mpmath.workdps(DIGITS):
        b = [mpmath.mpf(text) for text in problem.reference.params_text]
        points = _exact(problem.x)
        rounded = [mpmath.mpf(v) for v in problem.y.tolist()]  # the float64 themselves
        rss = mpmath.fsum((BODIES["Lanczos1"](MPMATH, x, *b) - y) ** 2 for x, y in zip(points, rounded, strict=True))
    # Exact arithmetic on the rounded y has hardly more digits of rss than float64 arithmetic has.
    assert 2.5 < correct_digits(float(rss), problem.reference.rss) < 4  # measured: 3.2
    assert 2 < correct_digits(_float64_rss(problem), problem.reference.rss) < 4  # measured: 2.9
    assert 2.5 < correct_digits(_float64_stderr(problem), problem.certified.stderr) < 4.5  # measured: 3.2


# load_nist and correct_digits


@pytest.mark.parametrize("given", ["rat43", "RAT43", "Rat43"])
def test_names_in_any_case(given):
    assert load_nist(given).name == "Rat43"


def test_unknown_name():
    with pytest.raises(ValueError, match=r"name must be one of Misra1a, .*Bennett5.*got 'Rat44'"):
        load_nist("Rat44")


def test_name_that_is_not_a_string():
    with pytest.raises(TypeError, match="name must be a str, got int: 3"):
        load_nist(3)


def test_problems_are_immutable_and_share_nothing():
    first = load_nist("Thurber")
    with pytest.raises(FrozenInstanceError):
        first.y = None
    with pytest.raises(FrozenInstanceError):
        first.reference.rss = 0.0
    own = (first.X, first.y, first.response, *first.starts)
    for array in (*own, *(v for s in (first.certified, first.reference) for v in (s.params, s.stderr))):
        array[...] = -1.0
    second = load_nist("Thurber")
    assert second.y[0] == second.response[0] == 80.574 and second.X[0, 0] == -3.067
    assert second.starts[0][0] == 1000 and second.starts[1][0] == 1300
    assert second.certified.params[0] == 1288.13968 and second.reference.stderr[0] > 0


def test_y_and_response_do_not_share_memory():
    problem = load_nist("Thurber")
    problem.y[0] = 0.0
    assert problem.response[0] == 80.574


@pytest.mark.parametrize(
    ("value", "reference", "expected"),
    [
        (1.001, 1.0, 3.0),
        ([1.0, -2.02], [1.0, -2.0], 2.0),  # the worst counts
        (1e-6, 0.0, 6.0),  # absolute where the reference is 0
        (0.0, 0.0, 15.0),
        (1.0 + 2e-16, 1.0, 15.0),  # no more than float64 holds
        (50.0, 1.0, 0.0),
        ([1.0, np.nan], [1.0, 2.0], 0.0),
        (np.inf, 1.0, 0.0),
    ],
)
def test_correct_digits(value, reference, expected):
    assert correct_digits(value, reference) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("value", "reference"), [([1.0, 2.0], [1.0]), ([], [])])
def test_correct_digits_refuses(value, reference):
    with pytest.raises(ValueError, match="same shape and at least one element"):
        correct_digits(value, reference)
