"""Run the demo's fits at small sizes, its plots, and its command."""

import sys
from functools import partial

import pytest
import torch

from lmfit_gpu import demo
from lmfit_gpu.__main__ import main
from lmfit_gpu.datasets import correct_digits, load_nist


@pytest.fixture
def small():
    """A network of 16 weights and 200 points."""
    return demo.make_network(5), demo.sinc_data(200)


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


def test_the_curve_is_fitted_and_plotted(tmp_path):
    problem = load_nist("Thurber")
    estimator = demo.fit_curve(problem)
    assert correct_digits(estimator.theta_, problem.reference.params) >= 6
    assert is_png(demo.plot_curve(problem, estimator, tmp_path / "curve.png"))


def test_the_data_are_those_of_lema():
    x, y = demo.sinc_data()
    assert x.shape == y.shape == (20_000, 1)
    assert (float(x.min()), float(x.max())) == (-1, 1)
    torch.testing.assert_close(y, torch.sin(10 * x) / (10 * x))  # no point is at 0


def test_the_network_has_the_same_weights_each_time_and_leaves_the_seed_alone():
    before = torch.random.get_rng_state()
    first, second = (demo.make_network().state_dict() for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert sum(value.numel() for value in first.values()) == 61


def test_both_optimisers_note_time_and_mean_square(small):
    network, (x, y) = small
    before = {name: value.clone() for name, value in network.state_dict().items()}
    estimator, lm = demo.fit_network(network, (x, y), max_iter=30)
    adam = demo.train_adam(network, (x, y), seconds=0.2)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert len(lm) == estimator.n_iter_
    mean_square = float(((estimator.predict(x) - y) ** 2).mean())
    assert lm[-1][1] == pytest.approx(mean_square, rel=1e-9)
    assert adam[-1][0] >= 0.2
    start = float(((network(x) - y) ** 2).mean().detach())
    for curve in (lm, adam):
        times, values = zip(*curve, strict=True)
        assert list(times) == sorted(times)
        assert list(values) == sorted(values, reverse=True)
        assert values[-1] < start


def test_levenberg_marquardt_stops_when_its_time_is_over(small):
    estimator, lm = demo.fit_network(*small, most_seconds=0.0)
    assert estimator.result_.status.name == "STOPPED_BY_CALLBACK"
    assert len(lm) == 1


def test_the_table_compares_at_the_same_times():
    table = demo.loss_table({"LM": [(1.0, 0.5), (4.0, 1e-8)], "Adam": [(2.0, 0.25), (9.0, 0.1)]}, n_lines=3)
    rows = [line.split() for line in table.splitlines()[2:]]
    assert rows == [
        ["1.00", "5.00e-01", "-"],
        ["2.00", "5.00e-01", "2.50e-01"],
        ["4.00", "1.00e-08", "2.50e-01"],
    ]


def test_the_command_prints_and_saves(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "show_network", partial(demo.show_network, n_points=200, max_iter=20))
    folder = tmp_path / "new" / "plots"
    assert main(["demo", "--output", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "converged (CONVERGED_" in out
    assert "Right digits, by NIST's answer" in out
    assert "mean square of the residuals" in out
    for name in ("thurber.png", "sinc_network.png"):
        assert is_png(folder / name)
        assert str(folder / name) in out


def test_without_matplotlib_the_demo_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["demo", "--output", str(tmp_path / "plots")]) == 1
    assert "pip install 'matplotlib>=3.8'" in capsys.readouterr().err
    assert not (tmp_path / "plots").exists()
