"""How many threads a fit may take, when several fits run at once.

torch and BLAS give every thread that calls them as many workers as there are cores, and those workers spin while they
wait. So two fits in two threads on two cores have four workers that fight, and each fit takes longer than alone. What
joblib's workers get, for ``n_jobs`` of them on ``c`` cores (measured, joblib 1.6):

===============  =============================  =====================================================================
backend          torch and BLAS threads each    so
===============  =============================  =====================================================================
loky             c / n_jobs, set by joblib      nothing to do
threading        c                              c / n_jobs here, for the time of a fit or a prediction
multiprocessing  c                              1 here: how many processes there are is not known in them, and the
                                                workers of OpenMP do not survive a fork
===============  =============================  =====================================================================

torch keeps the number per thread, and one for threads to come; both are put back. BLAS has one number for all threads
of the process: it is the least that anybody now asks for, and put back when nobody asks any more.

A small fit is faster on one thread, alone too: what the workers of torch and BLAS do for it is to wait for each other.
"""

import functools
import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.dummy import DummyProcess
from typing import Any

import joblib
import torch
from joblib.parallel import get_active_backend
from threadpoolctl import ThreadpoolController

__all__ = ["at_most", "blas_threads", "share", "share_of_threads"]


def share() -> int | None:
    """Return how many threads a fit may take here; None outside joblib's workers, and in those that joblib limits."""
    in_pool = isinstance(threading.current_thread(), DummyProcess)  # a worker of a ThreadPool, as joblib's are
    forked = multiprocessing.current_process().daemon  # a worker of a Pool; those of loky are no daemons
    if not (in_pool or forked) or not getattr(get_active_backend()[0], "nesting_level", 0):
        return None
    if not in_pool:
        return 1
    n_workers = sum(isinstance(thread, DummyProcess) for thread in threading.enumerate())
    return max(1, joblib.cpu_count() // n_workers)


@contextmanager
def share_of_threads() -> Iterator[None]:
    """Run a fit on its share of the threads; also a decorator."""
    allowed = share()
    with at_most(allowed, allowed):
        yield


@contextmanager
def at_most(of_torch: int | None, of_blas: int | None) -> Iterator[None]:
    """Run with so many threads of torch, in this thread, and of BLAS; None: with as many as there are."""
    before = None if of_torch is None else _TORCH.lower(of_torch)
    try:
        with nullcontext() if of_blas is None else blas_threads(of_blas):
            yield
    finally:
        if before is not None:
            _TORCH.put_back(before)


class _TorchThreads:
    """torch's number of threads, lowered in some of the threads of this process.

    Setting it in one thread sets it for threads to come as well; a new one that finds it lowered takes what the first
    had found.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_lowered = 0
        self._first = 0

    def lower(self, allowed: int) -> int:
        """Return the number to put back."""
        with self._lock:
            before = torch.get_num_threads()
            if not self._n_lowered:
                self._first = before
            self._n_lowered += 1
            before = max(before, self._first)
            torch.set_num_threads(min(before, allowed))
        return before

    def put_back(self, before: int) -> None:
        with self._lock:
            self._n_lowered -= 1
            torch.set_num_threads(before)


_TORCH = _TorchThreads()


class _Limit:
    """The number of BLAS threads of this process, lowered while somebody asks for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: list[int] = []
        self._before: list[int] = []  # of each BLAS library

    def ask(self, n_threads: int) -> None:
        with self._lock:
            if not self._asked:
                self._before = [library.num_threads for library in _blas()]
            self._asked.append(n_threads)
            self._lower()

    def leave(self, n_threads: int) -> None:
        with self._lock:
            self._asked.remove(n_threads)
            self._lower()

    def _lower(self) -> None:
        for library, before in zip(_blas(), self._before, strict=True):
            library.set_num_threads(min([before, *self._asked]))
            if hasattr(library, "clear_controlling_thread"):  # threadpoolctl 3.8: a thread that has set a number
                library.clear_controlling_thread()  # is the only one that may, until it says that it is done


_LIMIT = _Limit()


@contextmanager
def blas_threads(n_threads: int) -> Iterator[None]:
    """Hold BLAS to so many threads, in the whole process.

    threadpoolctl's own limits put back what they found: of two that overlap in two threads, the second one finds, and
    leaves for good, the number of the first.
    """
    _LIMIT.ask(n_threads)
    try:
        yield
    finally:
        _LIMIT.leave(n_threads)


@functools.cache
def _blas() -> list[Any]:
    """Return the BLAS libraries of this process: those of numpy and SciPy, which this package has loaded."""
    libraries: list[Any] = ThreadpoolController().select(user_api="blas").lib_controllers
    return libraries
