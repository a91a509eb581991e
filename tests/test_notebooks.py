"""The notebooks run from top to bottom, are stored without outputs, and reach what they show.

The code cells of a notebook are executed here in order, in one namespace, without Jupyter; warnings are errors.
"""

import contextlib
import functools
import io
import json
import math
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
import torch

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
MLBFGS_NOTEBOOK = "03_mlbfgs.ipynb"


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def findings(notebook):
    """Return sentences on what a stored notebook should not have."""
    said = []
    for cell in notebook["cells"]:
        if cell.get("outputs"):
            said.append(f"cell {cell['id']} has outputs")
        if cell.get("execution_count") is not None:
            said.append(f"cell {cell['id']} has an execution count")
        if cell["metadata"]:
            said.append(f"cell {cell['id']} has metadata")
    names = [cell["id"] for cell in notebook["cells"]]
    if len(set(names)) < len(names):
        said.append("two cells have the same id")
    extra = set(notebook["metadata"]) - {"kernelspec", "language_info"}
    if extra or set(notebook["metadata"]["language_info"]) - {"name"}:
        said.append("metadata: only the kernel and the name of the language are expected")
    if notebook["metadata"]["kernelspec"]["name"] != "python3":
        said.append("the kernel is not python3")
    return said


@functools.cache
def executed(path):
    """Run the code cells; return their namespace and what they printed. The global random state is left as it was."""
    mpl.use("Agg")
    names, printed = {"__name__": path.stem}, io.StringIO()
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(printed):
        for cell in read(path)["cells"]:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{path.name}, cell {cell['id']}", "exec"), names)
    plt.close("all")
    return names, printed.getvalue()


@pytest.fixture
def mlbfgs():
    (path,) = [path for path in NOTEBOOKS if path.name == MLBFGS_NOTEBOOK]
    return executed(path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    assert findings(read(path)) == []


def test_what_a_stored_notebook_should_not_have_is_found():
    kernel = {"kernelspec": {"name": "python3"}, "language_info": {"name": "python"}}
    clean = {"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "execution_count": None}
    assert findings({"cells": [clean], "metadata": kernel}) == []
    shown = {**clean, "outputs": [{"text": "1"}], "execution_count": 1, "metadata": {"tags": []}}
    other = {**kernel, "kernelspec": {"name": "mine"}, "language_info": {"name": "python", "version": "3.11"}}
    assert len(findings({"cells": [shown, clean], "metadata": other})) == 6


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path):
    _, printed = executed(path)
    assert printed
    assert "nan" not in printed


def test_mlbfgs_learns_digits_and_its_hessian(mlbfgs):
    names, _ = mlbfgs
    chance = math.log(10)  # cross-entropy of ten classes that are guessed
    assert names["loss_on"](names["model"], names["train"]) < 0.1 * chance
    for block, n_params in zip(names["optimizer"].inverse_hessians(), (64 * 32 + 32, 32 * 10 + 10), strict=True):
        assert (block["n_params"], block["n_pairs"]) == (n_params, (6 * 21 - 1) // 20)
        assert block["eigenvalues"][1] > 2  # it is 1 without a pair


def test_the_picture_has_the_best_of_three_rates_of_each_optimizer(mlbfgs):
    names, printed = mlbfgs
    labels = [text.get_text().split(",")[0] for text in names["left"].get_legend().get_texts()]
    assert labels == ["SGD with momentum", "Adam", "MLBFGS"]
    for line, (_, losses) in zip(names["left"].lines, names["best"].values(), strict=True):
        assert line.get_ydata()[-1] == losses[-1, 0] < 0.1
    assert printed.count("training loss") >= 3 * len(labels)
    lowest = min(names["best"], key=lambda name: names["best"][name][1][-1, 0])
    assert lowest == "MLBFGS"  # what the text below the picture says


def test_a_resumed_run_ends_at_the_same_weights(mlbfgs):
    names, printed = mlbfgs
    assert names["same"] is True
    assert "resumed after 3 passes with lr 0.150" in printed  # half way down a cosine from 0.3
    assert names["saved"]["scheduler"]["last_epoch"] == 3


def test_skorch_searches_rates_and_follows_a_schedule(mlbfgs):
    names, _ = mlbfgs
    assert names["search"].best_score_ > 0.9
    assert names["accuracy"] > 0.9
    rates = names["scheduled"].history[:, "event_lr"]
    assert rates == pytest.approx([0.15 * (1 + math.cos(math.pi * k / 6)) for k in range(6)])
    assert names["scheduled"].history[-1, "valid_acc"] > 0.9
