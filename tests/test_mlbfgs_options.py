"""What MLBFGS refuses: options of the wrong type or value, options that do not go together, tensors it cannot train."""

import math
import re

import pytest
import torch

from lmfit_gpu import MLBFGS

NAN = math.nan


def parameter():
    return torch.nn.Parameter(torch.zeros(2))


def test_the_defaults_are_as_documented():
    group = MLBFGS([parameter()]).param_groups[0]
    expected = {
        "lr": 0.1,
        "beta": 0.98,
        "momentum": 0.9,
        "nesterov": False,
        "update_every": 30,
        "history_size": 10,
        "history_growth": None,
        "blocks": "module",
        "damping": "window",
        "curvature_window": (0.1, 10.0),
        "tau": 1.0,
        "relative_window": False,
        "initial_inverse": "fixed",
        "initial_scale": 1.0,
        "eigenvalue_bounds": None,
        "normalize": None,
        "pairs": "averages",
        "weight_decay": 0.0,
        "maximize": False,
        "n_steps": 0,
    }
    assert {name: value for name, value in group.items() if name != "params"} == expected


@pytest.mark.parametrize(
    ("option", "wrong", "allowed"),
    [
        ("lr", "fast", "a number >= 0"),
        ("lr", -0.1, "a number >= 0"),
        ("lr", NAN, "a number >= 0"),
        ("lr", math.inf, "a finite number"),
        ("lr", None, "a number >= 0"),
        ("beta", "0.9", "a number in [0, 1)"),
        ("beta", 1.0, "a number in [0, 1)"),
        ("beta", -0.1, "a number in [0, 1)"),
        ("momentum", True, "a number in [0, 1)"),
        ("momentum", 1, "a number in [0, 1)"),
        ("nesterov", 1, "True or False"),
        ("nesterov", "yes", "True or False"),
        ("update_every", 2.0, "a whole number >= 1"),
        ("update_every", 0, "a whole number >= 1"),
        ("history_size", "10", "a whole number >= 1"),
        ("history_size", 0, "a whole number >= 1"),
        ("history_size", True, "a whole number >= 1"),
        ("history_growth", 1.5, "a whole number >= 1"),
        ("history_growth", 0, "a whole number >= 1"),
        ("blocks", 3, "'module', 'tensor', 'model'"),
        ("blocks", "layer", "'module', 'tensor', 'model'"),
        ("blocks", None, "'module', 'tensor', 'model'"),
        ("damping", True, "'window', 'powell', None"),
        ("damping", "Powell", "'window', 'powell', None"),
        ("curvature_window", 0.01, "two numbers (low, high)"),
        ("curvature_window", (0.01, "1.5"), "two numbers (low, high)"),
        ("curvature_window", (0.0, 1.5), "0 < low < high"),
        ("curvature_window", (0.01, 1.0), "0 < low < 1 < high < inf"),
        ("curvature_window", (1.0, 2.0), "0 < low < 1 < high < inf"),
        ("curvature_window", (0.01, math.inf), "0 < low < 1 < high < inf"),
        ("curvature_window", (0.01, NAN), "0 < low < high"),
        ("tau", "half", "0 < tau <= 1"),
        ("tau", 0.0, "0 < tau <= 1"),
        ("tau", 1.1, "0 < tau <= 1"),
        ("relative_window", 1, "True or False"),
        ("relative_window", None, "True or False"),
        ("initial_inverse", 1.0, "None, 'fixed', 'pair'"),
        ("initial_inverse", "newest", "None, 'fixed', 'pair'"),
        ("initial_scale", "1", "a number > 0"),
        ("initial_scale", 0.0, "a number > 0"),
        ("initial_scale", math.inf, "a finite number"),
        ("eigenvalue_bounds", 1.0, "two numbers (low, high)"),
        ("eigenvalue_bounds", (2.0, 1.0), "0 < low < high"),
        ("normalize", True, "None, 'gradient', 'unit'"),
        ("normalize", "both", "None, 'gradient', 'unit'"),
        ("pairs", None, "'averages', 'overlap'"),
        ("pairs", "overlaps", "'averages', 'overlap'"),
        ("weight_decay", "small", "a number >= 0"),
        ("weight_decay", -1e-4, "a number >= 0"),
        ("maximize", 1, "True or False"),
        ("maximize", "yes", "True or False"),
    ],
)
def test_a_bad_option_is_named_with_what_was_given_and_what_is_allowed(option, wrong, allowed):
    message = rf"^{option}: got {re.escape(repr(wrong))}; .*{re.escape(allowed)}"
    with pytest.raises((ValueError, TypeError), match=message):
        MLBFGS([parameter()], **{option: wrong})
    with pytest.raises((ValueError, TypeError), match=message):  # the same in a param group
        MLBFGS([{"params": [parameter()], option: wrong}])


@pytest.mark.parametrize(
    ("option", "wrong", "error"),
    [
        ("average_gradients", 1, TypeError),
        ("average_gradients", None, TypeError),
        ("process_group", "gloo", ValueError),  # torch.distributed is not initialised here
    ],
)
def test_a_bad_option_of_the_whole_optimizer_is_named(option, wrong, error):
    with pytest.raises(error, match=f"^{option}: "):
        MLBFGS([parameter()], **{option: wrong})


@pytest.mark.parametrize(
    ("option", "options"),
    [
        ("tau", {"tau": 1.0, "damping": "powell"}),
        ("tau", {"tau": 1.0, "damping": None}),
        ("relative_window", {"relative_window": True, "damping": "powell"}),
        ("relative_window", {"relative_window": True, "damping": None}),
        ("curvature_window", {"curvature_window": (0.1, 2.0), "damping": None}),
        ("beta", {"beta": 0.9, "pairs": "overlap"}),
        ("initial_inverse", {"initial_inverse": "fixed", "damping": "powell"}),
        ("nesterov", {"nesterov": True, "momentum": 0.0}),
        ("eigenvalue_bounds", {"eigenvalue_bounds": (0.1, 10.0), "initial_scale": 20.0}),
    ],
)
def test_options_that_do_not_go_together_are_refused(option, options):
    other = next(name for name in options if name != option)
    with pytest.raises(ValueError, match=rf"^{option}: got .*{other}"):
        MLBFGS([parameter()], **options)


def test_a_group_may_have_another_damping_than_the_rest():
    window, powell = MLBFGS([{"params": [parameter()]}, {"params": [parameter()], "damping": "powell"}]).param_groups
    assert (window["initial_inverse"], powell["initial_inverse"]) == ("fixed", "pair")
    assert (window["tau"], powell["tau"]) == (1.0, None)
    assert powell["curvature_window"] == (0.01, math.inf)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64], ids=str)
def test_parameters_that_are_not_of_single_or_double_precision_are_refused(dtype):
    wrong = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    with pytest.raises(ValueError, match=rf"^params: tensor 1 is {dtype}; float32 or float64 is expected"):
        MLBFGS([parameter(), wrong])


def test_sparse_parameters_are_refused():
    wrong = torch.nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match=r"^params: tensor 0 is torch.sparse_coo; a dense tensor"):
        MLBFGS([wrong])


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate:UserWarning")
def test_a_tensor_given_twice_is_refused():
    first, second = parameter(), parameter()
    with pytest.raises(ValueError, match=r"^params: tensor 2 is tensor 0 again"):
        MLBFGS([first, second, first])


def test_nothing_to_train_is_refused():
    frozen = torch.nn.Linear(2, 2).requires_grad_(requires_grad=False)
    with pytest.raises(ValueError, match=r"^params: the module has no parameters to train"):
        MLBFGS(frozen)
    with pytest.raises(ValueError, match="empty parameter list"):  # torch's own words
        MLBFGS([])


def test_a_lazy_module_is_refused_until_it_has_been_called():
    lazy = torch.nn.LazyLinear(2)
    with pytest.raises(ValueError, match=r"^params: a lazy layer has no weights yet; call the model once"):
        MLBFGS(lazy)
    lazy(torch.zeros(1, 3))
    assert [h["n_params"] for h in MLBFGS(lazy).inverse_hessians()] == [8]


def test_a_closure_for_the_overlap_is_for_pairs_of_the_overlap():
    optimizer = MLBFGS([parameter()])
    with pytest.raises(ValueError, match=r"^overlap: is for pairs='overlap'"):
        optimizer.step(lambda: 0.0, lambda: 0.0)
    optimizer = MLBFGS([parameter()], pairs="overlap")
    with pytest.raises(ValueError, match=r"^step: with pairs='overlap' a closure"):
        optimizer.step(lambda: 0.0)
