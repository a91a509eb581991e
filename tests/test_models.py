"""What the user gave as one function of (theta, x, y): signatures, numpy or torch, modules, residuals."""

import functools
import math
import warnings

import numpy as np
import pytest
import torch
from boxed import Watched

from lmfit_gpu.models import (
    ModuleModel,
    NumpyFunction,
    ResidualOf,
    TorchFunction,
    adapt_callable,
    gradient_is_whole,
)
from lmfit_gpu.parameters import call_signature


class Line:
    """A callable object and a bound method."""

    def __call__(self, x, slope, intercept):
        return slope * x + intercept

    def method(self, x, slope, intercept):
        return slope * x + intercept


def line(x, slope, intercept=0.0):
    return slope * x + intercept


def variadic(x, *params):
    return params[0] * x + params[1]


def by_vector(X, theta):
    return X @ theta


# --- call_signature ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "n_params", "expected"),
    [
        pytest.param(lambda x, a, b: a * x + b, 2, (("a", "b"), "params"), id="named"),
        pytest.param(lambda x, a, b: a * x + b, None, (("a", "b"), "params"), id="named-no-p0"),
        pytest.param(lambda x, a, /, b: a * x + b, 2, (("a", "b"), "params"), id="positional-only"),
        pytest.param(lambda x, a, *, k=1.0: a * x, None, (("a",), "params"), id="keyword-only-is-no-parameter"),
        pytest.param(line, 2, (("slope", "intercept"), "params"), id="default-given"),
        pytest.param(line, 1, (("slope",), "params"), id="default-left-alone"),
        pytest.param(line, None, (("slope", "intercept"), "params"), id="default-no-p0"),
        pytest.param(variadic, 2, (None, "params"), id="variadic"),
        pytest.param(by_vector, 3, (None, "theta"), id="theta"),
        pytest.param(by_vector, 1, (None, "theta"), id="theta-of-one"),
        pytest.param(lambda x, p: p[0] * x + p[1], 2, (None, "theta"), id="one-argument-two-values"),
        pytest.param(lambda x, p: p * x, 1, (("p",), "either"), id="one-argument-one-value"),
        pytest.param(lambda x, a: a * x, None, (("a",), "params"), id="one-argument-no-p0"),
        pytest.param(lambda X, theta, power=2: X, 5, (None, "theta"), id="theta-and-an-option"),
        pytest.param(functools.partial(lambda x, a, scale: a * x, scale=2.0), 1, (("a",), "either"), id="partial"),
        pytest.param(Line(), 2, (("slope", "intercept"), "params"), id="object"),
        pytest.param(Line().method, 2, (("slope", "intercept"), "params"), id="bound-method"),
        pytest.param(torch.pow, 1, (None, "either"), id="builtin"),
    ],
)
def test_call_signature(function, n_params, expected):
    assert call_signature(function, n_params) == expected


@pytest.mark.parametrize("function", [variadic, torch.pow])
def test_a_signature_that_does_not_tell_needs_p0(function):
    with pytest.raises(ValueError, match=r"p0: the signature .* give p0"):
        call_signature(function, None)


@pytest.mark.parametrize("function", [by_vector, lambda x, params: x])
def test_a_vector_of_unknown_length_needs_p0(function):
    with pytest.raises(ValueError, match=r"one vector '(theta|params)'; give p0"):
        call_signature(function, None)


@pytest.mark.parametrize("n_params", [1, 4])
def test_a_wrong_number_of_start_values_names_both(n_params):
    with pytest.raises(ValueError, match=rf"p0: got {n_params} values, .* 3 parameters \('a', 'b', 'c'\)"):
        call_signature(lambda x, a, b, c: x, n_params)


# --- adapt_callable ---------------------------------------------------------------------------------------

X = torch.linspace(0.1, 2.0, 20, dtype=torch.float64)


def adapted(function, theta, order="params", *, prefer_torch=False, x=X, y=None):
    theta = torch.tensor(theta, dtype=torch.float64)
    return adapt_callable(function, (), order, (theta, x, y), prefer_torch)


def test_numpy_only():
    model = adapted(lambda x, a, b: a * np.exp(-b * x), [2.0, 0.5])
    assert isinstance(model, NumpyFunction)
    np.testing.assert_allclose(
        model(torch.tensor([2.0, 0.5], dtype=torch.float64), X, None), 2 * np.exp(-0.5 * X.numpy())
    )


def test_torch_only():
    model = adapted(lambda x, a, b: a * torch.exp(-b * x), [2.0, 0.5])
    assert isinstance(model, TorchFunction)
    np.testing.assert_allclose(
        model(torch.tensor([2.0, 0.5], dtype=torch.float64), X, None), 2 * np.exp(-0.5 * X.numpy())
    )


@pytest.mark.parametrize(
    "function",
    [lambda x, a, b: a * x + b, lambda x, a, b: a * x**2 / (1 + b * x), lambda x, a, b: a * x.sum() + b * x],
)
def test_a_function_of_both_worlds_is_taken_in_torch(function):
    assert isinstance(adapted(function, [2.0, 0.5]), TorchFunction)


@pytest.mark.parametrize(
    "function", [lambda x, a, b: a * x / x.std() + b, lambda x, a, b: a * x / x.var() + b], ids=["std", "var"]
)
def test_a_method_of_two_meanings_keeps_the_meaning_of_numpy(function):
    model = adapted(function, [2.0, 0.5])
    assert isinstance(model, NumpyFunction)
    expected = function(X.numpy(), 2.0, 0.5)
    np.testing.assert_allclose(model(torch.tensor([2.0, 0.5], dtype=torch.float64), X, None), expected, rtol=1e-15)


def test_tensors_prefer_torch():
    model = adapted(lambda x, a, b: a * x / x.std() + b, [2.0, 0.5], prefer_torch=True)
    assert isinstance(model, TorchFunction)


def test_tensors_are_not_handed_to_numpy():
    with pytest.raises(ValueError, match=r"model: the call at the start values failed \(torch: "):
        adapted(lambda x, a, b: a * np.exp(-b * x), [2.0, 0.5], prefer_torch=True)


def test_an_error_shows_both_messages():
    def neither(x, a):
        raise ValueError("bananas" if isinstance(x, np.ndarray) else "pears")

    with pytest.raises(ValueError, match=r"\(numpy: bananas; torch: pears\)") as caught:
        adapted(neither, [1.0])
    assert isinstance(caught.value.__cause__, ValueError)


def test_what_is_no_number_is_named():
    with pytest.raises(ValueError, match="returned object values; numbers are expected"):
        adapted(lambda x, a: np.array([None] * len(x)), [1.0])


@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
@pytest.mark.parametrize(("by_scalar", "order"), [(True, "params"), (False, "theta")], ids=["p", "p[0]"])
def test_one_parameter_may_be_a_number_or_a_vector(library, by_scalar, order):
    exp = library.exp
    function = (lambda x, p: exp(-p * x)) if by_scalar else (lambda x, p: exp(-p[0] * x))
    names, form = call_signature(function, 1)
    model = adapt_callable(function, names, form, (torch.tensor([0.5], dtype=torch.float64), X, None), False)
    assert model.order == order
    np.testing.assert_allclose(
        model(torch.tensor([0.5], dtype=torch.float64), X, None), np.exp(-0.5 * X.numpy()), rtol=1e-14
    )


def test_a_builtin_without_signature():
    names, form = call_signature(torch.pow, 1)
    model = adapted(torch.pow, [2.0], form)
    np.testing.assert_allclose(model(torch.tensor([2.0], dtype=torch.float64), X, None), X.numpy() ** 2)
    assert names is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("by_vector", [False, True])
def test_a_compiled_torch_function(by_vector):
    if by_vector:
        function = torch.jit.trace(lambda x, theta: theta[0] * x + theta[1], (X, torch.ones(2).double()))
    else:
        one = torch.ones((), dtype=torch.float64)
        function = torch.jit.trace(lambda x, a, b: a * x + b, (X, one, one))
    _, form = call_signature(function, 2)
    model = adapted(function, [2.0, 0.5], form)
    assert isinstance(model, TorchFunction)
    np.testing.assert_allclose(model(torch.tensor([2.0, 0.5], dtype=torch.float64), X, None), 2 * X.numpy() + 0.5)


def test_a_residual_function():
    y = 3 * X
    in_numpy = adapted(lambda theta, x, y: np.exp(theta[0] * x) - y, [0.5], "residual", y=y)
    in_torch = adapted(lambda theta, x, y: torch.exp(theta[0] * x) - y, [0.5], "residual", y=y)
    assert isinstance(in_numpy, NumpyFunction)
    assert isinstance(in_torch, TorchFunction)
    assert in_numpy.is_residual
    assert in_torch.is_residual
    theta = torch.tensor([0.5], dtype=torch.float64)
    np.testing.assert_allclose(in_numpy(theta, X, y), in_torch(theta, X, y), rtol=1e-14)


def test_a_parameter_that_passes_through_a_python_number_is_not_lost():
    """In torch b would leave the graph silently: its derivative would be 0."""

    def function(x, a, b):
        return a * x + math.exp(b)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the conversion; only once in a process
        model = adapted(function, [2.0, 0.5])
    assert isinstance(model, NumpyFunction)


def test_trying_a_numpy_model_in_torch_is_silent():
    def function(x, a, b):
        return a * x + math.exp(b)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted(function, [2.0, 0.5])
        adapted(lambda x, a, b: a * np.sin(x) + b, [2.0, 0.5])
    assert [str(warning.message) for warning in caught] == []


# --- NumpyFunction ----------------------------------------------------------------------------------------

THETA = torch.tensor([2.0, 0.5], dtype=torch.float64)


def test_numpy_sees_float64_and_numbers():
    seen = {}

    def function(x, a, b):
        seen.update(x=x, a=a)
        return a * x + b

    values = NumpyFunction(function, ("a", "b"))(THETA, X, None)
    assert seen["x"].dtype == np.float64
    assert np.ndim(seen["a"]) == 0
    assert values.dtype == torch.float64


def test_a_reused_output_buffer_is_copied():
    buffer = np.empty(X.numel())

    def function(x, a, b):
        np.multiply(a, x, out=buffer)
        return buffer

    model = NumpyFunction(function, ())
    first = model(THETA, X, None)
    second = model(2 * THETA, X, None)
    np.testing.assert_allclose(first, 2 * X.numpy())
    np.testing.assert_allclose(second, 4 * X.numpy())


def test_overflow_and_invalid_are_silent():
    model = NumpyFunction(lambda x, a, b: np.exp(1e6 * a * x) + np.log(-b * x), ())
    assert not torch.isfinite(model(THETA, X, None)).any()  # warnings are errors here


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.uint8])
def test_other_numbers_become_float64(dtype):
    values = NumpyFunction(lambda x, a, b: np.arange(len(x)).astype(dtype), ())(THETA, X, None)
    assert values.dtype == torch.float64
    np.testing.assert_array_equal(values, np.arange(20.0))


def test_complex_stays_complex():
    assert NumpyFunction(lambda x, a, b: a * x * 1j, ())(THETA, X, None).dtype == torch.complex128


@pytest.mark.parametrize("values", [np.array([None, 1.0]), np.array(["a", "b"]), np.array([True, False])])
def test_what_is_no_number_is_a_type_error(values):
    with pytest.raises(TypeError, match=rf"model: returned {values.dtype} values; numbers are expected"):
        NumpyFunction(lambda x, a, b: values, ())(THETA, X, None)


def test_a_list_is_an_array():
    np.testing.assert_allclose(NumpyFunction(lambda x, a, b: [a * t for t in x], ())(THETA, X, None), 2 * X.numpy())


def test_numpy_stays_on_the_cpu():
    model = NumpyFunction(line, ())
    assert model.replicate(torch.device("cpu")) is model
    with pytest.raises(ValueError, match="devices: a model written in numpy runs on the CPU, not on meta"):
        model.replicate(torch.device("meta"))


# --- ModuleModel ------------------------------------------------------------------------------------------


class Decay(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.lin = torch.nn.Linear(1, 2, dtype=torch.float64)

    def forward(self, x):
        return self.lin(torch.exp(-self.rate * x)).sum(1)


def test_names_say_where_each_entry_lives():
    assert ModuleModel(Decay()).names == [
        "rate",
        "lin.weight[0,0]",
        "lin.weight[1,0]",
        "lin.bias[0]",
        "lin.bias[1]",
    ]


def test_split_and_load_go_round():
    module = Decay()
    model = ModuleModel(module)
    theta = torch.arange(1.0, 6.0, dtype=torch.float64)
    model.load(theta)
    torch.testing.assert_close(model.theta, theta, rtol=0, atol=0)
    assert float(module.rate) == 1.0
    assert module.lin.weight.tolist() == [[2.0], [3.0]]
    parts = model.split(theta)
    assert {name: tuple(part.shape) for name, part in parts.items()} == {
        "rate": (), "lin.weight": (2, 1), "lin.bias": (2,),
    }  # fmt: skip
    assert all(part.data_ptr() >= theta.data_ptr() for part in parts.values())


def test_values_are_the_module_at_theta_and_leave_it_alone():
    module = Decay()
    model = ModuleModel(module)
    before = model.theta.clone()
    theta = torch.tensor([0.3, 1.0, 2.0, -1.0, 0.5], dtype=torch.float64)
    values = model(theta, X[:, None], None)
    np.testing.assert_allclose(values, 3 * np.exp(-0.3 * X.numpy()) - 0.5, rtol=1e-14)
    torch.testing.assert_close(model.theta, before, rtol=0, atol=0)


def test_theta_does_not_share_memory_with_the_module():
    model = ModuleModel(torch.nn.Linear(1, 1, bias=False))
    theta = model.theta
    theta += 1.0
    assert not torch.equal(theta, model.theta)


def test_frozen_parameters_keep_their_values():
    module = Decay()
    module.rate.requires_grad_(False)
    model = ModuleModel(module)
    assert "rate" not in model.names
    model.load(torch.zeros(4, dtype=torch.float64))
    assert float(module.rate) == 0.5
    assert model.theta.tolist() == [0.0] * 4
    np.testing.assert_allclose(model(torch.ones(4).double(), X[:, None], None), 2 * np.exp(-0.5 * X.numpy()) + 2)


class Tied(torch.nn.Module):
    """Encoder and decoder share one weight."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.second = torch.nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).sum(1)


def test_a_shared_weight_is_one_parameter():
    module = Tied()
    model = ModuleModel(module)
    assert len(model.names) == model.theta.numel() == 9
    X3 = torch.randn(7, 3, dtype=torch.float64)
    theta = torch.randn(9, dtype=torch.float64)
    W = theta.view(3, 3).numpy()
    np.testing.assert_allclose(model(theta, X3, None), (np.tanh(X3.numpy() @ W.T) @ W.T).sum(1), rtol=1e-12)
    replica = model.replicate(torch.device("cpu"))
    assert replica.module.first.weight is replica.module.second.weight
    torch.testing.assert_close(replica(theta, X3, None), model(theta, X3, None))


def test_evaluation_mode_and_untouched_buffers():
    module = torch.nn.Sequential(
        torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
    ).double()
    model = ModuleModel(module)
    assert not any(part.training for part in module.modules())
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    X2 = torch.randn(9, 2, dtype=torch.float64)
    first = model(model.theta, X2, None)
    torch.testing.assert_close(model(model.theta, X2, None), first, rtol=0, atol=0)
    assert buffers
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], rtol=0, atol=0)


def test_a_replica_is_a_module_of_its_own():
    model = ModuleModel(Decay())
    replica = model.replicate(torch.device("cpu"))
    replica.load(torch.zeros(5, dtype=torch.float64))
    assert replica.names == model.names
    assert float(model.module.rate.detach()) == 0.5


# --- ResidualOf -------------------------------------------------------------------------------------------


def test_a_column_of_predictions_meets_a_vector_of_targets():
    module = torch.nn.Linear(1, 1, dtype=torch.float64)
    model = ResidualOf(ModuleModel(module), lambda prediction, target: (prediction - target) / 2)
    y = torch.randn(20, dtype=torch.float64)
    residual = model(torch.tensor([2.0, 1.0], dtype=torch.float64), X[:, None], y)
    assert residual.shape == (20,)
    np.testing.assert_allclose(residual, (2 * X.numpy() + 1 - y.numpy()) / 2)
    assert model.is_residual
    assert list(model.names) == ["weight[0,0]", "bias[0]"]


@pytest.mark.parametrize("target_shape", [(20,), (20, 1)])
@pytest.mark.parametrize("kind", [NumpyFunction, TorchFunction])
def test_shapes_of_a_function_and_its_targets(kind, target_shape):
    y = torch.randn(target_shape, dtype=torch.float64)
    model = ResidualOf(kind(lambda x, a, b: a * x + b, ("a", "b")), lambda prediction, target: prediction - target)
    residual = model(THETA, X, y)
    np.testing.assert_allclose(residual.reshape(-1), 2 * X.numpy() + 0.5 - y.numpy().ravel())
    assert residual.numel() == 20
    assert model.differentiable == (kind is TorchFunction)


def test_a_numpy_residual_is_silent_and_copied():
    model = ResidualOf(NumpyFunction(line, ()), lambda prediction, target: np.log(-prediction))
    assert torch.isnan(model(THETA, X, X)).all()


def test_a_replica_of_a_residual_has_a_module_of_its_own():
    model = ResidualOf(ModuleModel(Decay()), torch.sub)
    replica = model.replicate(torch.device("cpu"))
    assert replica.model.module is not model.model.module


def test_the_complex_step_passes_through_a_numpy_residual():
    """Casting the residual to float64 would drop the imaginary part, with a warning."""
    model = ResidualOf(NumpyFunction(lambda x, a, b: a * x + b, ()), lambda prediction, target: prediction - target)
    theta = torch.complex(THETA, torch.tensor([1e-20, 0.0], dtype=torch.float64))
    np.testing.assert_allclose(model(theta, X, X).imag, 1e-20 * X.numpy())


# --- bounds -----------------------------------------------------------------------------------------------

INF = float("inf")
CORNERS = [
    ([2.0, 0.5], [2.0, 0.5], [INF, INF]),
    ([2.0, 0.5], [-INF, 0.0], [2.0, 0.5]),
    ([2.0, 0.5], [2.0, -INF], [INF, 0.5]),
    ([2.0, 0.0], [0.0, 0.0], [INF, INF]),
    ([2.0, 0.5], [2.0, 0.5 - 1e-12], [2.0 + 1e-10, 0.5]),
    ([2.0, 0.5], [2.0, 0.0], [2.0, 1.0]),
]


@pytest.mark.parametrize(("theta", "lower", "upper"), CORNERS)
def test_a_callable_is_tried_inside_its_box_alone(theta, lower, upper):
    """Of both worlds: its gradient is held against differences, towards where there is room."""
    watched = Watched(lambda library: lambda x, a, b: a * x * x + b * x, torch, lower, upper)
    sample = (torch.tensor(theta, dtype=torch.float64), X, None)
    model = adapt_callable(watched.function, ("a", "b"), "params", sample, False, watched.bounds)
    assert isinstance(model, TorchFunction)
    assert watched.calls
    assert watched.outside == []


@pytest.mark.parametrize(("theta", "lower", "upper"), CORNERS[:4])
def test_a_parameter_that_leaves_the_graph_is_found_inside_the_box(theta, lower, upper):
    watched = Watched(lambda library: lambda x, a, b: a * x + float(b) * x * a, torch, lower, upper)
    sample = (torch.tensor(theta, dtype=torch.float64), X, None)
    model = adapt_callable(watched.function, ("a", "b"), "params", sample, False, watched.bounds)
    assert isinstance(model, NumpyFunction)
    assert watched.outside == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("upper", [1.0, INF])
def test_a_steep_gradient_on_a_bound_is_whole(upper, dtype):
    """exp(10 b x) turns within the step of a float32 check, 0.5 %: a plain difference of one side is off by 5 %."""
    theta = torch.tensor([1.0, 1.0], dtype=dtype)
    bounds = (torch.zeros(2), torch.full((2,), upper)) if upper == 1.0 else (torch.ones(2), torch.full((2,), upper))
    function = lambda t, x, y: t[0] * torch.exp(10 * t[1] * x)  # noqa: E731
    assert gradient_is_whole(function, theta, X.to(dtype), None, bounds)
    detached = lambda t, x, y: t[0].detach() * torch.exp(10 * t[1] * x)  # noqa: E731
    assert not gradient_is_whole(detached, theta, X.to(dtype), None, bounds)
