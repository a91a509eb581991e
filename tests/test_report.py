"""The report: its numbers are the fit's, its lines fit a terminal, its page is well formed, its warnings are due."""

import copy
import pickle
import warnings
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from lmfit_gpu import LMRegressor

RNG = np.random.default_rng(0)
x = np.linspace(0, 4, 60)
X = x[:, None]
Y = 2.5 * np.exp(-1.3 * x) + 0.5 + 0.02 * RNG.normal(size=60)


def decay(x, amplitude, rate, offset):
    return amplitude * np.exp(-rate * x) + offset


def twice(x, amplitude, gain, rate, offset):
    return (2 * amplitude + gain) * np.exp(-rate * x) + offset


def fitted(model=decay, p0=(1, 1, 0), fit=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LMRegressor(model, p0=list(p0), **options).fit(X, Y, **(fit or {}))


def row(est, name):
    (found,) = [line.split() for line in est.report().splitlines() if line.split()[:1] == [name]]
    return found


def joined(est):
    return " ".join(est.report().split())


def test_the_table_has_the_numbers_of_the_fit():
    est = fitted()
    for j, name in enumerate(est.params_):
        value, error, relative, t, p, low, high = row(est, name)[1:]
        assert float(value) == pytest.approx(est.theta_[j], abs=est.stderr_[j] / 100)
        assert float(error) == pytest.approx(est.stderr_[j], rel=6e-3)
        assert float(relative) == pytest.approx(100 * est.stderr_[j] / est.theta_[j], rel=0.06)
        assert float(t) == pytest.approx(est.theta_[j] / est.stderr_[j], rel=6e-3)
        assert p == "<1e-16"
        for found, expected in zip((low, high), est.conf_int()[name], strict=True):
            assert float(found) == pytest.approx(expected, abs=est.stderr_[j] / 100)


def test_p_is_that_of_student():
    """A slope with t = 1.5 on 8 degrees of freedom: p = 0.172 (R: 2 * pt(-1.5, 8) = 0.1720)."""
    from scipy.stats import t

    xs = np.arange(10.0)
    noise = np.array([1, -1, 0.5, 0.2, -0.7, 0.9, -1.2, 0.4, 1.1, 0.3])
    est = LMRegressor(lambda x, a, b: a + b * x, p0=[0, 0]).fit(xs[:, None], noise)
    assert float(row(est, "b")[5]) == pytest.approx(2 * t.sf(abs(est.theta_[1] / est.stderr_[1]), 8), rel=0.06)


def test_model_data_goodness_and_options():
    text = joined(fitted(fit={"sigma": np.full(60, 0.02)}, absolute_sigma=True))
    for part in (
        "converged (",
        "model decay(x, amplitude, rate, offset), numpy",
        "data 60 rows, 1 feature",
        "residuals 60, rank 3, degrees of freedom 57",
        "R² 0.99",
        "AICc",
        "condition number of the scaled Jacobian",
        "absolute_sigma True",
        "p0 [1, 1, 0]",
        "solver qr",
        "Last trials iter cost",
    ):
        assert part in text, part
    est = fitted()
    assert f"AIC {est.goodness_of_fit().aic:.6g}" in joined(est)
    largest = est.correlation()[1, 2]
    assert f"rate, offset {largest:+.4f}" in joined(est)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (torch.nn.Linear(1, 1).double(), "module Linear, 2 parameters"),
        (None, "tanh network 1-3-1, 10 parameters"),
        (lambda x, theta: theta[0] + theta[1] * x, "lambda(X, theta), torch"),
    ],
    ids=["module", "network", "vector"],
)
def test_models_by_name(model, said):
    options = {"hidden_layer_sizes": (3,), "max_iter": 5, "random_state": 0} if model is None else {}
    if model is not None and not isinstance(model, torch.nn.Module):
        options = {"p0": [0, 0], "jac": "3-point"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert said in joined(LMRegressor(model, **options).fit(X, Y))


def test_a_residual_by_name():
    def to_circle(theta, X, y):
        return np.hypot(X[:, 0] - theta[0], X[:, 1] - theta[1]) - theta[2]

    angle = np.linspace(0, 2, 20)
    points = np.column_stack([1 + 3 * np.cos(angle), -2 + 3 * np.sin(angle)])
    est = LMRegressor(residual=to_circle, p0={"x0": 0, "y0": 0, "radius": 1}).fit(points)
    assert "model residual to_circle(theta, X, y), numpy data 20 residuals, 2 features" in joined(est)


def test_what_to_beware_of_is_said_with_a_remedy():
    text = joined(fitted(twice, (1, 1, 1, 0)))
    assert "amplitude and gain: only 2.00·amplitude + gain is determined; fix or tie one of them" in text
    assert "Determined of them: 2.00·amplitude + gain = 2.49986 ± 0.00979" in text
    text = joined(fitted(p0=(1, 1, 0.6), bounds={"offset": (0.55, 1), "rate": (0, None)}))
    assert "On a bound: offset." in text
    assert "profile_likelihood" in text
    assert "in (0, inf)" in text
    assert "Not a minimum" in joined(fitted(max_iter=2))
    assert "Residuals are larger than sigma says" in joined(fitted(fit={"sigma": 0.002}, absolute_sigma=True))
    assert "Residuals are smaller than sigma says" in joined(fitted(fit={"sigma": 2.0}, absolute_sigma=True))
    collinear = joined(fitted(lambda x, a, b: a * x + b * (x + 1e-6 * x**2), p0=(1, 1)))
    assert "Nearly the same to the data: a and b (-1.00000)" in collinear
    assert "Beware" not in joined(fitted())


def test_lines_fit_a_terminal():
    long = {f"a_rather_long_name_{i}": 1.0 for i in range(3)}
    code = f"lambda x, {', '.join(long)}: {'+'.join(f'{n}*x**{i}' for i, n in enumerate(long))}"
    est = LMRegressor(eval(code), p0=list(long.values()), bounds={next(iter(long)): (0, 1e9)}).fit(X, Y)
    assert max(map(len, fitted().report().splitlines())) <= 100
    assert max(map(len, est.report().splitlines())) <= 130  # names are not cut
    many = LMRegressor(lambda x, theta: np.cos(np.outer(x, np.arange(70))) @ theta, p0=np.zeros(70), jac="3-point")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = many.fit(np.linspace(0, 3, 100)[:, None], np.linspace(0, 3, 100)).report()
    assert "... and 10 more" in text
    assert len(text.splitlines()) < 120


class Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_escaped():
    est = LMRegressor(residual=lambda theta, x, y: x - theta[0], p0={"<b>&": 1.0}).fit(X)
    page = est.report()._repr_html_()
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert {"table", "tr", "td", "h4", "pre"} <= set(parser.seen)
    assert "script" not in parser.seen
    assert "&lt;b&gt;&amp;" in page
    assert "<b>" not in page
    assert est.result_._repr_html_().count("<table>") >= 1
    assert "sk-" in fitted()._repr_html_()  # scikit-learn's own picture of the estimator stays


def test_it_is_a_text_that_can_be_kept():
    report = fitted().report()
    assert isinstance(report, str)
    for other in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
        assert other == report
        assert other._repr_html_() == report._repr_html_()


def test_a_saved_fit_reports_the_same(tmp_path):
    est = fitted(bounds={"offset": (0, 1)})
    est.save(tmp_path / "est")
    assert LMRegressor.load(tmp_path / "est", decay).report() == est.report()
    assert pickle.loads(pickle.dumps(est)).report() == est.report()
    assert "0x" not in fitted(tied={"offset": lambda rate: 0.4 * rate}).report()
