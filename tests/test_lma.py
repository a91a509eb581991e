"""LMA as a user meets it: arguments, batches of any kind, what a step returns and leaves behind."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lmfit_gpu import LMA, LMRegressor
from lmfit_gpu.exceptions import NonFiniteError

F64 = torch.float64
X = torch.linspace(-1, 1, 60, dtype=F64)[:, None]
Y = torch.sin(3 * X)


def network(width=6, inputs=1, outputs=1, seed=0, dtype=F64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs)).to(dtype)


def difference(outputs, targets):
    return outputs - targets


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def steps(lma, n, *batch, **keywords):
    return [lma.step(*batch, **keywords)[0] for _ in range(n)]


BAD = {
    "no module": (TypeError, r"model: got str", {"model": "net"}),
    "nothing to train": (ValueError, r"model: has no parameters to train", {"model": nn.ReLU()}),
    "half": (ValueError, r"model: its parameters are torch.float16", {"model": nn.Linear(1, 1).half()}),
    "two dtypes": (
        ValueError,
        r"all float32 or all float64",
        {"model": nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double())},
    ),
    "no device": (ValueError, r"devices: 'gpu:7' is not a torch device", {"devices": "gpu:7"}),
    "empty devices": (ValueError, r"devices: got an empty list", {"devices": []}),
    "device of another": (ValueError, r"model: is on cpu, devices are \['meta'\]", {"devices": ["meta"]}),
    "residual number": (TypeError, r"residual_fn: got 3", {"residual_fn": 3}),
    "residual name": (
        ValueError,
        r"residual_fn: .*'probit'; allowed are 'gaussian', 'softmax'",
        {"residual_fn": "probit"},
    ),
    "residual of one": (TypeError, r"takes 1 arguments|takes 1 argument", {"residual_fn": lambda a: a}),
    "no groups": (ValueError, r"residual_fn: got an empty dict", {"residual_fn": {}}),
    "weights alone": (ValueError, r"weights: got .* only for a dict", {"weights": {"a": 1.0}}),
    "weights of others": (
        ValueError,
        r"weights: got \['b'\]",
        {"residual_fn": {"a": difference}, "weights": {"b": 1.0}},
    ),
    "negative weight": (
        ValueError,
        r"weights: got -1.0 for 'a'",
        {"residual_fn": {"a": difference}, "weights": {"a": -1.0}},
    ),
    "solver": (ValueError, r"solver: got 'lu'; allowed are 'auto', 'qr'", {"solver": "lu"}),
    "solver callable": (ValueError, r"solver: got .*not a callable, as in LeMA", {"solver": np.linalg.solve}),
    "backend": (ValueError, r"backend: got 'jax'", {"backend": "jax"}),
    "learning rate": (ValueError, r"learning_rate: got 0", {"learning_rate": 0}),
    "long learning rate": (ValueError, r"learning_rate: got 1.5", {"learning_rate": 1.5}),
    "damping": (ValueError, r"damping: got 'newton'; allowed are 'trust-region'", {"damping": "newton"}),
    "start of a region": (
        ValueError,
        r"damping_start: got 0.1 with damping='trust-region'",
        {"damping": "trust-region", "damping_start": 0.1},
    ),
    "negative start": (ValueError, r"damping_start, damping_up, damping_down", {"damping_start": -1.0}),
    "dtype": (
        ValueError,
        r"dtype: got torch.float32; the model, and J with it, is in float64",
        {"dtype": torch.float32},
    ),
    "numpy dtype": (ValueError, r"dtype: got .*float32.*is in float64", {"dtype": np.float32}),
    "alpha": (ValueError, r"alpha: got -1", {"alpha": -1}),
    "momentum": (ValueError, r"momentum: got 1", {"momentum": 1}),
    "noise": (ValueError, r"noise_aware: got 'yes'", {"noise_aware": "yes"}),
    "decay": (ValueError, r"decay: got 2", {"decay": 2}),
    "attempts": (ValueError, r"attempts: got 0", {"attempts": 0}),
    "seed": (ValueError, r"seed: got -1", {"seed": -1}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused_before_any_work(case):
    error, message, options = BAD[case]
    model = options.pop("model", network()) if "model" in options else network()
    with pytest.raises(error, match=message):
        LMA(model, **{"residual_fn": difference} | options)


def test_the_dtype_of_the_model_is_accepted_in_both_languages():
    assert LMA(network(), dtype=np.float64).step(X, Y)[0] > 0
    assert LMA(network(), dtype=torch.float64).step(X, Y)[0] > 0


BAD_BATCHES = {
    "rows": (ValueError, r"y: has 59 rows; x has 60", (X, Y[1:])),
    "width": (
        ValueError,
        r"y: got rows of shape \(2,\); the model's outputs have rows of shape \(1,\)",
        (X, torch.cat([Y, Y], 1)),
    ),
    "no rows": (ValueError, r"x: got tensors of shapes \[\(0, 1\)\]", (X[:0], Y[:0])),
    "no tensor": (ValueError, r"x: got float; a tensor", (3.0, Y)),
    "no targets": (ValueError, r"y: got NoneType", (X, None)),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_bad_batches_are_refused_and_nothing_changes(case):
    error, message, batch = BAD_BATCHES[case]
    model = network()
    before = flat(model)
    with pytest.raises(error, match=message):
        LMA(model).step(*batch)
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize("slice_size", [0, -3, 2.5, True])
def test_a_bad_slice_size_is_refused(slice_size):
    with pytest.raises(ValueError, match="slice_size: got"):
        LMA(network()).step(X, Y, slice_size)


def test_targets_of_another_shape_do_not_make_all_pairs():
    """Outputs (60, 1) minus targets (60,) is (60, 60) by broadcasting: the classic silent mistake."""
    with pytest.raises(ValueError, match="broadcast to every pair of rows"):
        LMA(network(), residual_fn=difference).step(X, Y[:, 0])
    LMA(network()).step(X, Y[:, 0])  # without a function of the user's there is nothing to mistake


def test_the_loss_is_the_mean_of_squares_after_the_step():
    model = network()
    lma = LMA(model, residual_fn=difference, alpha=1e-3)
    for _ in range(3):
        loss, _ = lma.step(X, Y)
        with torch.no_grad():
            assert loss == pytest.approx(float(((model(X) - Y) ** 2).mean()), rel=1e-12)


@pytest.mark.parametrize(("solver", "rtol"), [("qr", 1e-9), ("cholesky", 1e-9), ("ghost", 1e-6)])
def test_the_optimum_is_that_of_the_estimator(solver, rtol):
    """mean r² + α‖w‖² has the minimum of ½‖r‖² + ½ m α‖w‖²: of LMRegressor with m α."""
    torch.manual_seed(1)
    features = torch.randn(30, 3, dtype=F64)
    targets = features @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=F64) + 0.1 * torch.randn(30, 1, dtype=F64)
    linear = nn.Linear(3, 1).double()
    estimator = LMRegressor(copy.deepcopy(linear), alpha=30 * 0.01).fit(features, targets)
    lma = LMA(linear, alpha=0.01, solver=solver)
    for _ in range(20):
        terminated = lma.step(features, targets)[1]
        if terminated:
            break
    assert terminated and lma.status > 0, lma.message
    np.testing.assert_allclose(flat(linear), estimator.theta_, rtol=rtol)


@pytest.mark.parametrize("solver", ["auto", "ghost"])
def test_frozen_weights_keep_their_bits_and_tied_ones_stay_tied(solver):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
            self.outer.weight = self.inner.weight
            self.last = nn.Linear(4, 1).double()
            self.last.bias.requires_grad_(False)

        def forward(self, x):
            return self.last(torch.tanh(self.outer(torch.tanh(self.inner(x)))))

    torch.manual_seed(0)
    model = Tied()
    frozen = model.last.bias.detach().clone()
    features = torch.randn(12, 4, dtype=F64)
    targets = torch.sin(features.sum(1, keepdim=True))
    losses = steps(LMA(model, solver=solver), 12, features, targets)
    assert losses[-1] < 0.1 * losses[0]
    assert torch.equal(model.last.bias, frozen)
    assert model.outer.weight is model.inner.weight
    assert all(p.grad is None for p in model.parameters())


class Sum(nn.Module):
    """Takes what a user's batches may be: two tensors, one of them by name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(1, 5).double(), nn.Linear(2, 5).double()
        self.out = nn.Linear(5, 1).double()

    def forward(self, a, b):
        return self.out(torch.tanh(self.one(a) + self.two(b)))


B = torch.cat([X**2, torch.cos(X)], 1)


@pytest.mark.parametrize("solver", ["qr", "ghost"])
@pytest.mark.parametrize("batch", [(X, B), [X, B], {"a": X, "b": B}], ids=["tuple", "list", "dict"])
def test_inputs_of_several_tensors(batch, solver):
    model = Sum()
    losses = steps(LMA(model, solver=solver), 10, batch, Y, slice_size=25)
    assert losses[-1] < 1e-2 * losses[0]


def test_targets_of_several_tensors():
    model = network(outputs=2)

    def residual(outputs, targets):
        return torch.stack([outputs[:, 0] - targets["s"][:, 0], 2 * (outputs[:, 1] - targets["c"][:, 0])], 1)

    losses = steps(LMA(model, residual_fn=residual), 25, X, {"s": Y, "c": torch.cos(X)})
    assert losses[-1] < 1e-3 * losses[0]


def test_groups_of_residuals_with_weights_are_one_problem():
    """A group with weight w counts w times: as its residuals times √w in one group."""

    def low(outputs, targets):
        return outputs - targets

    one, other = network(), network()
    x, y = {"a": X[:30], "b": X[30:]}, {"a": Y[:30], "b": Y[30:]}
    grouped = LMA(one, residual_fn={"a": low, "b": low}, weights={"b": 4.0})
    factors = torch.cat([torch.ones(30, 1, dtype=F64), 2 * torch.ones(30, 1, dtype=F64)])
    whole = LMA(other, residual_fn=lambda outputs, targets: targets[:, 1:] * (outputs - targets[:, :1]))
    for _ in range(5):
        loss = grouped.step(x, y)[0], whole.step(X, torch.cat([Y, factors], 1))[0]
        assert loss[0] == pytest.approx(loss[1], rel=1e-9)
    torch.testing.assert_close(flat(one), flat(other), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("x", "y", "message"), [(X, None, r"x: got Tensor; a dict with the groups"), ({"a": X}, None, r"x: got \['a'\]")]
)
def test_groups_need_their_rows(x, y, message):
    lma = LMA(network(), residual_fn={"a": difference, "b": difference})
    with pytest.raises(ValueError, match=message):
        lma.step(x, y)


def test_a_scalar_for_residuals_is_refused():
    """Case T7: the mean of squares is not the vector of residuals."""
    with pytest.raises(ValueError, match="one value for several rows; return the residuals themselves"):
        LMA(network(), residual_fn=lambda a, b: ((a - b) ** 2).mean()).step(X, Y)


@pytest.mark.parametrize("solver", ["auto", "ghost"])
def test_residuals_that_are_not_finite_are_an_error_and_change_nothing(solver):
    model = network()
    before = flat(model)
    broken = Y.clone()
    broken[7] = torch.nan
    with pytest.raises(NonFiniteError, match="residuals of this batch are not finite"):
        LMA(model, solver=solver).step(X, broken)
    assert torch.equal(flat(model), before)


def test_an_interrupted_step_leaves_the_parameters_of_the_last():
    model = network()
    lma = LMA(model, residual_fn=difference)
    lma.step(X, Y)
    before, forward = flat(model), model.forward

    def interrupted(x):
        raise KeyboardInterrupt

    model.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        lma.step(X, Y)
    model.forward = forward
    assert torch.equal(flat(model), before)
    assert lma.n_steps == 1
    assert lma.step(X, Y)[0] < 1


def test_zero_grad_clears_gradients_and_a_step_leaves_them():
    model = network()
    model(X).sum().backward()
    given = model[0].weight.grad.clone()
    lma = LMA(model)
    lma.step(X, Y)
    assert torch.equal(model[0].weight.grad, given)
    lma.zero_grad()
    assert model[0].weight.grad is None


@pytest.mark.parametrize("options", [{}, {"momentum": 0.5}, {"damping": "lema"}, {"solver": "ghost"}], ids=str)
def test_a_resumed_loop_is_the_uninterrupted_one_to_the_bit(options, tmp_path):
    def loop(model, lma, first, last):
        rows = torch.randperm(60, generator=torch.Generator().manual_seed(3))
        for k in range(first, last):
            some = rows[(12 * k) % 60 :][:12]
            lma.step(X[some], Y[some])

    model = network()
    model.insert(2, nn.Dropout(0.2))
    whole = copy.deepcopy(model)
    loop(whole, LMA(whole, **options), 0, 9)
    lma = LMA(model, **options)
    loop(model, lma, 0, 4)
    torch.save({"model": model.state_dict(), "lma": lma.state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    again = network(seed=5)
    again.insert(2, nn.Dropout(0.2))
    again.load_state_dict(state["model"])
    resumed = LMA(again, **options)
    resumed.load_state_dict(state["lma"])
    assert resumed.n_steps == 4
    loop(again, resumed, 4, 9)
    assert torch.equal(flat(again), flat(whole))


@pytest.mark.parametrize(
    "state", [None, {}, {"version": 1}, {"version": 2, "memory": {}}, {"version": 1, "memory": {}, "seed": 0}]
)
def test_a_state_of_something_else_is_refused(state):
    with pytest.raises(ValueError, match="state_dict: "):
        LMA(network()).load_state_dict(state)


def test_the_state_of_another_model_is_refused():
    lma = LMA(network())
    lma.step(X, Y)
    with pytest.raises(ValueError, match="state_dict: D has 19 numbers; the model has 25 parameters"):
        LMA(network(width=8)).load_state_dict(lma.state_dict())


def test_batches_that_grow_change_the_solver_in_mid_training():
    """5 rows of 19 parameters are for ghost, 60 for qr: D goes over from tensors to columns and back."""
    lma = LMA(network())
    rows = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    for n in (5, 60, 5, 60, 60, 60, 60):
        loss, _ = lma.step(X[rows[:n]], Y[rows[:n]])
        assert np.isfinite(loss)
    assert loss < 0.2


def test_a_loader_of_shuffled_rows_ends_when_nothing_is_left_to_gain():
    torch.manual_seed(0)
    features = torch.randn(40, 3, dtype=F64)
    loader = DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=40, shuffle=True)
    lma = LMA(nn.Linear(3, 1).double(), residual_fn=difference)
    for _ in range(30):
        (batch,) = loader
        loss, terminated = lma.step(*batch)
        if terminated:
            break
    assert terminated
    assert loss < 1e-25
    assert "CONVERGED" in lma.message


def test_one_batch_that_is_fitted_does_not_end_the_training():
    """A batch with nothing to gain is no reason to stop while others have much."""
    model = nn.Linear(1, 1).double()
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    lma = LMA(model, residual_fn=difference, noise_aware=False)
    lma.step(X, 2 * X + 1)
    solved, _ = lma.step(X[:20], 2 * X[:20] + 1)
    assert solved < 1e-25
    assert lma.step(X, torch.sin(9 * X))[1] is False


def test_residual_functions_that_couple_rows_are_taken_whole():
    """Residuals after the mean over the batch has been taken off belong to no row alone."""

    def centred(outputs, targets):
        r = outputs - targets
        return r - r.mean()

    model = network()
    losses = steps(LMA(model, residual_fn=centred), 12, X, Y, slice_size=7)
    assert losses[-1] < 0.1 * losses[0]
    with torch.no_grad():
        assert losses[-1] == pytest.approx(float((centred(model(X), Y) ** 2).mean()), rel=1e-10)


def test_momentum_changes_the_path_and_never_goes_uphill():
    plain, carried = network(), network()
    without = steps(LMA(plain), 10, X, Y)
    lma = LMA(carried, momentum=0.5)
    losses = steps(lma, 10, X, Y)
    assert losses != without
    assert all(after <= before for before, after in itertools.pairwise(losses))


@pytest.mark.parametrize("solver", ["qr", "ghost"])
def test_a_residual_function_that_calls_the_model_may_take_targets(solver):
    """(model, x, y) is the same problem as (outputs, targets)."""
    one, other = network(), network()
    ours = steps(LMA(one, residual_fn=lambda net, x, y: net(x) - y, solver=solver), 4, X, Y)
    theirs = steps(LMA(other, residual_fn=difference, solver=solver), 4, X, Y)
    assert ours == pytest.approx(theirs, rel=1e-9)


def test_residuals_that_leave_rows_out_are_an_error_that_says_so():
    """The rows probed were all there; later some are missing, which the number of residuals cannot tell whose."""

    def finite(outputs, targets):
        return (outputs - targets)[torch.isfinite(targets)]

    holes = Y.clone()
    holes[1] = torch.nan
    with pytest.raises(ValueError, match="not the same number for each"):
        LMA(network(), residual_fn=finite).step(X, holes)


def test_a_copy_goes_on_alone():
    """LMA and its module are copied or pickled together."""
    lma = LMA(network(), devices=["cpu", "cpu"])
    steps(lma, 2, X, Y)
    other = copy.deepcopy(lma)
    before = flat(lma.model)
    ours = steps(other, 3, X, Y)
    assert torch.equal(flat(lma.model), before)
    assert steps(lma, 3, X, Y) == ours


@pytest.mark.parametrize("damping", ["auto", "lema"])
@pytest.mark.parametrize("attempts", [3, 14])
def test_attempts_are_those_asked_for(damping, attempts):
    """Of a policy that has its own number too: the model refuses every point but the start."""
    model = network()
    start, forward = flat(model), model.forward

    def walled(x):
        return forward(x) if torch.equal(flat(model), start) else forward(x) * torch.inf

    model.forward, lma = walled, LMA(model, damping=damping, attempts=attempts)
    _, terminated = lma.step(X, Y)
    assert terminated
    assert lma.record.n_iter == attempts
    assert torch.equal(flat(model), start)
