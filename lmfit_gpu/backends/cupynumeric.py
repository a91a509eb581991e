"""Backend on cuPyNumeric arrays, which Legate spreads over its GPUs or CPUs.

Rows are reduced on the devices of the model by torch or LAPACK; what is left, without rows, is handed to Legate: on
the CPU the same memory, from a GPU by DLPack. ``cupynumeric.linalg.cho_factor`` works on all processors (from n = 8,192
in tiles); triangular solves, svd and eigh run on one of them (cuPyNumeric 26.6). Products with a matrix are spread by
rows.

Legate is started by the first use and not before, once in a process, and only the thread and the process that started
it may use it. How it is configured: :mod:`lmfit_gpu.launch`.
"""

import functools
import importlib
import importlib.util
import multiprocessing
import os
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from lmfit_gpu.backends.base import starts_of
from lmfit_gpu.backends.scipy import ScipyBackend
from lmfit_gpu.backends.torch import TorchBackend
from lmfit_gpu.exceptions import BackendUnavailableError
from lmfit_gpu.launch import MIB, check_memory, chosen_configuration, given_configuration, load_driver

__all__ = ["CuPyNumericBackend"]

Array = Any  # cupynumeric.ndarray
CHECK_EVERY = 10  # each look at a scalar waits for all tasks before it
USABLE = 0.95  # of Legate's memory: the rest is vectors and fragments

INSTALL = "pip install 'lmfit-gpu[cupynumeric]' (Linux)"
NO_DRIVER = (
    "backend='cupynumeric': the packages are installed, but there is no NVIDIA driver (libcuda.so.1), which their pip "
    "build, the one for GPUs, needs. On a machine with an NVIDIA GPU install its driver; without a GPU install the CPU "
    "build with conda (environment.yml), or use backend='scipy'"
)


class CuPyNumericBackend:
    """The primitives by cuPyNumeric.

    Raises
    ------
    BackendUnavailableError
        If the packages, the driver or the memory are missing; the message says what to do.
    """

    name = "cupynumeric"
    check_every = CHECK_EVERY

    def __init__(self) -> None:
        self._np, self._gpus, self._budget = _started()
        process, thread = _started_in()
        if os.getpid() != process:
            raise BackendUnavailableError(
                "backend='cupynumeric': Legate was started before this process was forked and does not survive that; "
                "start processes by spawn or loky (scikit-learn's default)"
            )
        if threading.get_ident() != thread:
            raise BackendUnavailableError(
                "backend='cupynumeric': Legate was started in another thread, and ends the process when a second one "
                "uses it; make all fits with this backend in one thread"
            )

    def leaves(self, device: torch.device) -> ScipyBackend | TorchBackend:
        """Return LAPACK for blocks on the CPU, torch for those on a GPU: rows are never handed to Legate."""
        return ScipyBackend().leaves(device)

    def reserve(self, n_bytes: int, purpose: str) -> None:
        """Refuse what does not fit into the memory that Legate has reserved: beyond it, it ends the process.

        Raises
        ------
        BackendUnavailableError
        """
        if n_bytes <= USABLE * self._budget:
            return
        needed, has = int(n_bytes / USABLE) // MIB + 1, self._budget // MIB
        option = "--fbmem" if self._gpus else "--sysmem"
        raise BackendUnavailableError(
            f"backend='cupynumeric': {purpose} takes up to {needed} MiB of Legate's memory, which is {has} MiB; "
            f"set {option} {needed} in LEGATE_CONFIG before Python starts, or for the legate launcher, or use "
            "backend='scipy'"
        )

    def asarray(self, tensor: torch.Tensor) -> Array:
        """Return a float64 array on the memory of the tensor where that is float64 and contiguous.

        A tensor on a GPU that Legate does not hold goes through the host.
        """
        tensor = tensor.detach().to(torch.float64)
        if tensor.is_cuda and (tensor.device.index or 0) < self._gpus:
            torch.cuda.current_stream(tensor.device).synchronize()  # Legate's streams know nothing of torch's
        else:
            tensor = tensor.cpu()
        return self._np.from_dlpack(tensor.contiguous())

    def to_tensor(self, array: Array, device: torch.device) -> torch.Tensor:
        """Return a float64 tensor on a device, on memory of its own."""
        if device.type == "cuda" and self._gpus:
            return torch.from_dlpack(array).to(device, copy=True)
        return torch.from_numpy(np.asarray(array).copy()).to(device)

    def draw(self, *scalars: Any) -> tuple[float, ...]:
        """Return scalars as floats; the first waits, the others are there."""
        return tuple(map(float, scalars))

    def stacked(self, blocks: Iterable[torch.Tensor], shape: tuple[int, int]) -> Array:
        """Return blocks of rows as one array, which Legate spreads by rows."""
        rows = self._np.empty(shape)
        for start, block in starts_of(blocks):
            rows[start : start + len(block)] = self.asarray(block)
        return rows

    def svd(self, matrix: Array) -> tuple[Array, Array, Array]:
        """Return U, s, Vᵀ on one processor (LAPACK's gesvd, slower than gesdd); NaN when the matrix is not finite."""
        if not bool(self._np.isfinite(matrix).all()):
            bad = self._np.full(matrix.shape, np.nan)
            return bad, bad[0], bad
        return self._np.linalg.svd(matrix)

    def eigh(self, matrix: Array) -> tuple[Array, Array]:
        """Return eigenvalues, rising, and eigenvectors, on one processor."""
        return self._np.linalg.eigh(matrix)

    def cholesky(self, matrix: Array, damping: float = 0.0) -> Array | None:
        """Return the lower factor of matrix + damping I, None when it is not positive definite.

        By ``cho_factor``: the factorisation of ``cholesky`` without its last pass, which writes zeros into the upper
        triangle and takes a third of the time at n = 2,000. cuPyNumeric 26.6 raises numpy's LinAlgError; its docstring
        says that the process is killed (tests/test_cupynumeric.py tries it in a process of its own).
        """
        try:
            return self._np.linalg.cho_factor(self._shifted(matrix, damping), lower=True, check_finite=False)[0]
        except np.linalg.LinAlgError:
            return None

    def _shifted(self, matrix: Array, damping: float) -> Array:
        if self._gpus:
            shifted, every = matrix.copy(), self._np.arange(len(matrix))
            shifted[every, every] += damping
            return shifted
        shifted = np.asarray(
            matrix
        ).copy()  # on the host, where copies are several times faster, and its memory is Legate's
        shifted.reshape(-1)[:: len(matrix) + 1] += damping
        return self._np.asarray(shifted)

    def cholesky_solve(self, factor: Array, b: Array) -> Array:
        """Solve with the factor, on one processor."""
        return self._np.linalg.cho_solve((factor, True), b, check_finite=False)


@functools.cache
def _started() -> tuple[Any, int, int]:
    """Start Legate; return cupynumeric, the number of GPUs Legate holds, and the bytes of memory it has there."""
    if importlib.util.find_spec("cupynumeric") is None:
        raise BackendUnavailableError(f"backend='cupynumeric' needs packages that are not installed: {INSTALL}")
    has_driver = load_driver()
    given = given_configuration()
    configuration = given or chosen_configuration()
    check_memory(configuration)
    if configuration.gpus != 0 and _is_worker():
        raise BackendUnavailableError(
            "backend='cupynumeric' in a worker process: each would reserve the GPUs' memory again, and Legate would "
            "end it; use n_jobs=1"
        )
    try:
        cupynumeric = _import(configuration.text)
    except (ImportError, RuntimeError, ValueError) as error:  # no driver; no auto-configuration; a bad option
        raise BackendUnavailableError(_why_not(error, has_driver, configuration.gpus)) from error
    runtime = importlib.import_module("legate.core").get_legate_runtime()
    if runtime.config().enable_inline_task_launch:
        raise BackendUnavailableError(
            "backend='cupynumeric': Legate 26.6 with --inline-task-launch solves triangular systems wrongly; leave it "
            "out of its configuration"
        )
    realm = runtime.realm_config()
    gpus = realm.gpus or 0
    _started_in()
    return cupynumeric, gpus, (realm.fbmem if gpus else realm.sysmem) or 0


def _import(text: str) -> Any:
    """Import cupynumeric, which starts Legate by LEGATE_CONFIG; a configuration chosen here is not left behind."""
    given = os.environ.get("LEGATE_CONFIG")
    os.environ["LEGATE_CONFIG"] = text
    try:
        return importlib.import_module("cupynumeric")
    finally:
        if given is None:
            del os.environ["LEGATE_CONFIG"]
        else:
            os.environ["LEGATE_CONFIG"] = given


@functools.cache
def _started_in() -> tuple[int, int]:
    """Return the process and the thread that started Legate."""
    return os.getpid(), threading.get_ident()


def _is_worker() -> bool:
    return multiprocessing.parent_process() is not None or "LOKY_PICKLER" in os.environ


def _why_not(error: Exception, has_driver: bool, gpus: int | None) -> str:
    if not has_driver and "libcuda" in str(error):
        return NO_DRIVER
    if "AutoConfiguration" in str(error) and gpus is None:
        return (
            "backend='cupynumeric': Legate found no GPU and its configuration does not say how many; add --gpus 0 to "
            "LEGATE_CONFIG or to the legate launcher"
        )
    numbered = (line.partition("#0 ")[2] for line in str(error).splitlines() if "#0 " in line)  # its exception stack
    summary = next(numbered, str(error)[:200])
    return f"backend='cupynumeric': Legate did not start: {summary}"
