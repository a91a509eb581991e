"""MLBFGS in skorch: options by name, clones, searches, and states that go on."""

import io

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from skorch import NeuralNetClassifier

from lmfit_gpu import MLBFGS

ROWS = 48


def network():
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))


def net(**options):
    return NeuralNetClassifier(
        network,
        criterion=torch.nn.CrossEntropyLoss,
        optimizer=MLBFGS,
        **{"optimizer__lr": 0.1, "optimizer__update_every": 3, "max_epochs": 2, **options},
        batch_size=8,
        train_split=None,
        verbose=0,
    )


@pytest.fixture
def rows(rng):
    x = rng.standard_normal((ROWS, 2)).astype(np.float32)
    return x, (x[:, 0] > x[:, 1]).astype(np.int64)


def test_a_clone_has_the_options_and_no_state(rows):
    copy = clone(net(optimizer__damping="powell").fit(*rows))
    assert not hasattr(copy, "optimizer_")
    assert copy.get_params()["optimizer"] is MLBFGS
    (group,) = copy.initialize().optimizer_.param_groups
    assert (group["lr"], group["update_every"], group["damping"], group["n_steps"]) == (0.1, 3, "powell", 0)


def test_a_search_tries_each_rate(rows):
    search = GridSearchCV(net(max_epochs=20), {"optimizer__lr": [0.0, 0.3]}, cv=2, error_score="raise").fit(*rows)
    assert search.best_params_ == {"optimizer__lr": 0.3}  # with 0 nothing is learned
    assert search.best_score_ > 0.9
    assert search.best_estimator_.optimizer_.param_groups[0]["lr"] == 0.3


def test_layers_are_blocks_though_skorch_gives_no_names(rows):
    blocks = net().fit(*rows).optimizer_.inverse_hessians()
    assert [block["n_params"] for block in blocks] == [2 * 3 + 3, 3 * 2 + 2]
    assert [block["n_pairs"] for block in blocks] == [(2 * ROWS // 8 - 1) // 3] * 2  # none at the first step


def test_a_saved_optimizer_goes_on_to_the_bit(rows):
    first = net().fit(*rows)
    weights, state = io.BytesIO(), io.BytesIO()
    first.save_params(f_params=weights, f_optimizer=state)
    weights.seek(0), state.seek(0)
    second = net().initialize()
    second.load_params(f_params=weights, f_optimizer=state)
    alone = net().initialize()
    weights.seek(0)
    alone.load_params(f_params=weights)
    for each in (first, second, alone):
        each.partial_fit(*rows)
    flat = [torch.nn.utils.parameters_to_vector(each.module_.parameters()) for each in (first, second, alone)]
    assert torch.equal(flat[0], flat[1])
    assert not torch.equal(flat[0], flat[2])  # without its state


@pytest.mark.parametrize(
    ("option", "message"),
    [({"optimizer__update_evry": 5}, "update_evry"), ({"optimizer__damping": "none"}, "damping: got 'none'")],
    ids=["misspelt", "not allowed"],
)
def test_a_wrong_option_is_named(option, message, rows):
    with pytest.raises((TypeError, ValueError), match=message):
        net(**option).fit(*rows)
