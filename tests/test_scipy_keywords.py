"""scipy_keywords: every keyword of SciPy's functions is known, and every option of LMRegressor can be given."""

import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import least_squares, leastsq

from lmfit_gpu import LMRegressor, curve_fit
from lmfit_gpu.damping import TrustRegion
from lmfit_gpu.scipy_keywords import MAPPED, OWN, REFUSED, FactorRegion, fit_options

OF_CURVE_FIT = set(inspect.signature(curve_fit).parameters) - {"kwargs"}
ARGUMENTS = {"func", "fun", "x0"}  # what curve_fit itself gives
NOT_OPTIONS = {"model", "residual", "predict_fn", "x_format", "self"} | {  # of networks and estimators
    "hidden_layer_sizes",
    "alpha",
    "early_stopping",
    "warm_start",
}


def test_the_groups_do_not_overlap():
    assert not OWN & MAPPED and not OWN & set(REFUSED) and not MAPPED & set(REFUSED)
    assert not (OWN | MAPPED | set(REFUSED)) & OF_CURVE_FIT


@pytest.mark.parametrize("function", [leastsq, least_squares])
def test_every_keyword_of_scipy_is_known(function):
    asked = set(inspect.signature(function).parameters) - ARGUMENTS
    assert asked - OWN - MAPPED - set(REFUSED) - OF_CURVE_FIT == {"args"}


def test_every_option_of_the_estimator_can_be_given():
    options = set(inspect.signature(LMRegressor).parameters) - NOT_OPTIONS
    assert options - OF_CURVE_FIT == OWN


def test_the_docs_list_every_keyword():
    text = (Path(__file__).parents[1] / "docs" / "scipy.md").read_text(encoding="utf-8")
    table = text[text.index("## Keywords") :]
    listed = set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines() if "|" in line)))
    assert listed == OWN | MAPPED | set(REFUSED) | {"args"}


def test_translations():
    options, jac = fit_options({"max_nfev": 7, "xtol": None, "tr_solver": "lsmr", "x_scale": [1, 4]}, 2, "cs")
    assert jac == "cs"
    assert options.pop("damping").scaling.tolist() == [1, 0.25]
    assert options == {"max_iter": 7, "xtol": 0.0, "solver": "cg"}
    options, _ = fit_options({"diag": 3, "factor": 10}, 2, None)
    assert options["damping"].scaling.tolist() == [3, 3]
    assert options["damping"].factor == 10
    assert fit_options({"x_scale": "jac"}, 2, None)[0] == {"damping": TrustRegion()}
    assert fit_options({"factor": 5}, None, None)[0] == {"damping": FactorRegion(factor=5.0)}


@pytest.mark.parametrize("given", [{"fixed": ["a"]}, {"tied": {"a": lambda b: b}}])
def test_scales_of_all_parameters_do_not_go_with_fewer_free_ones(given):
    with pytest.raises(ValueError, match="x_scale: not together with fixed or tied"):
        fit_options({"x_scale": 1.0, **given}, 2, None)


def test_scales_need_the_number_of_parameters():
    with pytest.raises(ValueError, match="x_scale: give p0 as numbers"):
        fit_options({"x_scale": 1.0}, None, None)


def test_factor_at_a_zero_start_is_the_radius():
    x = np.linspace(0, 1, 9)
    trials = []
    curve_fit(lambda x, a, b: a + b * x, x, 5 + x, p0=[0, 0], factor=0.5, diag=[1, 1], callback=trials.append)
    np.testing.assert_allclose(trials[0].scaled_norm, 0.5, rtol=0.1)  # as in MINPACK; the radius is met within 10 %
