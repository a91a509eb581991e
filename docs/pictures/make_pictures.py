"""Draw the pictures of docs/plotting.md, of which README.md shows the first: ``python docs/pictures/make_pictures.py``.

The data are NIST's (lmfit_gpu.datasets). One file each, in the folder of this script or the one named as argument.
"""

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from lmfit_gpu import LMRegressor
from lmfit_gpu.datasets import load_nist
from lmfit_gpu.plotting import (
    ConvergenceDisplay,
    CorrelationDisplay,
    FitDisplay,
    ProfileDisplay,
    ResidualDisplay,
)

DPI = 100


def fitted(name, start=1):
    problem = load_nist(name)
    return LMRegressor(problem.model_numpy, p0=problem.starts[start]).fit(problem.X, problem.y)


def fit_bands():
    display = FitDisplay.from_estimator(fitted("Rat43"))
    display.ax_.set(xlabel="growing time", ylabel="dry weight of onion bulbs and tops")
    return display


def residuals():
    return ResidualDisplay.from_estimator(fitted("Thurber"), against=["fitted", "normal"])


def convergence():
    return ConvergenceDisplay.from_estimator(fitted("MGH09", start=0), against="both")


def profile():
    return ProfileDisplay.from_estimator(fitted("Rat43"))


def profile_map():
    return ProfileDisplay.map_from_estimator(fitted("BoxBOD"), "b1", "b2", shape=(41, 41), traces=True)


def correlation():
    return CorrelationDisplay.from_estimator(fitted("Gauss1"))


PICTURES = (fit_bands, residuals, convergence, profile, profile_map, correlation)


def main(folder):
    for draw in PICTURES:
        display = draw()
        display.figure_.savefig(folder / f"{draw.__name__}.png", dpi=DPI)
        plt.close(display.figure_)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
