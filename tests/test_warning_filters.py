"""Filters for one thread: they filter there and nowhere else, and are gone afterwards."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

from lmfit_gpu import LMRegressor
from lmfit_gpu.warning_filters import warnings_here


class LoudWarning(UserWarning):
    pass


def warn():
    warnings.warn("loud", LoudWarning, stacklevel=1)


def in_a_thread(function):
    """Return what a function raised in another thread."""
    raised = []

    def run():
        try:
            function()
        except Warning as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


@pytest.fixture(autouse=True)
def filters_are_left_as_they_were():
    before = list(warnings.filters)
    yield
    assert warnings.filters == before


def test_ignore():
    with warnings_here("ignore"):
        warn()
    with pytest.raises(LoudWarning):  # as the tests' own filter says
        warn()


def test_ignore_of_one_category():
    with warnings_here("ignore", RuntimeWarning), pytest.raises(LoudWarning):
        warn()


def test_error_of_a_warning_that_was_shown_before():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        warn()
        warn()  # not shown again: Python remembers where it came from
        with warnings_here("error"), pytest.raises(LoudWarning):
            warn()
    assert len(shown) == 1


def test_other_threads_are_not_filtered():
    with warnings_here("ignore"):
        assert in_a_thread(warn)  # an error, as in every test
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with warnings_here("error"):
            assert not in_a_thread(warn)


def test_filters_within_filters():
    with warnings_here("error"), warnings_here("ignore"):
        warn()
        with warnings_here("error"), pytest.raises(LoudWarning):
            warn()
        warn()


def test_a_filter_ends_where_it_is_left_by_an_error():
    with pytest.raises(ZeroDivisionError), warnings_here("ignore"):
        raise ZeroDivisionError
    with pytest.raises(LoudWarning):
        warn()


def test_a_filter_that_somebody_else_puts_back_filters_nothing():
    with warnings_here("ignore"):
        copied = list(warnings.filters)
    with warnings.catch_warnings():
        warnings.filters = copied
        with pytest.raises(LoudWarning):
            warn()


def test_two_that_overlap_in_two_threads():
    entered, left = threading.Event(), threading.Event()

    def first():
        with warnings_here("error"):
            entered.wait()
        left.set()

    def second():
        with warnings_here("ignore"):
            entered.set()
            left.wait()
            warn()

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


X = np.linspace(0, 4, 60)[:, None]
Y = 2.5 * np.exp(-1.3 * X[:, 0]) + 0.5


def numpy_decay(x, a, b, c):
    return a * np.exp(-b * x) + c


def torch_decay(x, a, b, c):
    return a * torch.exp(-b * x) + c


def test_fits_in_threads_warn_and_do_not_fail():
    """Each fit tries its model under "error", and warns of its two iterations while others try theirs."""

    def fit(i):
        return LMRegressor((numpy_decay, torch_decay)[i % 2], p0=[1, 1, 0], max_iter=2).fit(X, Y).n_iter_

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fit(0), fit(1)  # what torch imports then has filters of its own
        filters = list(warnings.filters)
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(fit, range(200))) == [2] * 200
        assert warnings.filters == filters
