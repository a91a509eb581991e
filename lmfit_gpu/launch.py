"""How Legate, the runtime under cuPyNumeric, is configured: read, never changed, without importing it.

============================  =====================================================================================
started by                    configuration
============================  =====================================================================================
``legate --gpus N script.py``  the launcher's, as it is (the launcher sets LEGATE_CONFIG)
``python``, LEGATE_CONFIG set  what it says
``python``, nothing set        chosen here: the GPUs if there are any, else the CPU with half of the free memory
============================  =====================================================================================

Legate reserves its memory once, when it starts, and ends the process when that runs out or cannot be had. What it may
use is therefore known here, and refused before it is asked for.
"""

import argparse
import ctypes
import functools
import os
import shlex
import sys
from dataclasses import dataclass

from lmfit_gpu.exceptions import BackendUnavailableError

__all__ = [
    "STAND_IN",
    "Configuration",
    "chosen_configuration",
    "given_configuration",
    "gpus_of_legate",
    "load_driver",
]

STAND_IN = "LMFIT_GPU_LIBCUDA"  # names a library to load in the place of a missing driver (tests)
MIB = 2**20
SYSTEM_SHARE = 0.5  # of the memory that is free
GPU_SHARE = 0.45  # of each GPU: torch, which holds the model, may be on the same one
HOST_SHARE_WITH_GPUS = 0.1  # of the free memory: the host only passes small matrices on
LIBCUDA = "libcuda.so.1"


@dataclass(frozen=True)
class Configuration:
    """What Legate is asked for; None where it decides itself.

    Parameters
    ----------
    text : str
        In the form of LEGATE_CONFIG.
    cpus, gpus : int or None
    sysmem, fbmem : int or None
        Host memory, and memory of each GPU, in MiB.
    """

    text: str
    cpus: int | None = None
    gpus: int | None = None
    sysmem: int | None = None
    fbmem: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Configuration":
        """Read what matters here from options in Legate's own form; the rest is not looked at.

        Raises
        ------
        BackendUnavailableError
            For what is no number: Legate would print its options and end the process.
        """
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        for name in ("cpus", "gpus", "sysmem", "fbmem"):
            parser.add_argument(f"--{name}", type=int)
        try:
            known, _ = parser.parse_known_args(shlex.split(text))
        except (argparse.ArgumentError, ValueError) as error:
            raise BackendUnavailableError(f"LEGATE_CONFIG: got {text!r}; {error}") from error
        return cls(text, known.cpus, known.gpus, known.sysmem, known.fbmem)


def given_configuration() -> Configuration | None:
    """Return the configuration that a launcher or the user has set, or None."""
    text = os.environ.get("LEGATE_CONFIG")
    return None if text is None or not text.strip() else Configuration.parse(text)


@functools.cache
def chosen_configuration() -> Configuration:
    """Return the configuration for plain Python with nothing set; chosen once, when the backend is first used."""
    gpu_bytes = _gpu_memories()
    free = _free_memory() // MIB
    if gpu_bytes:
        fbmem = int(GPU_SHARE * min(gpu_bytes)) // MIB
        sysmem = int(HOST_SHARE_WITH_GPUS * free)
        text = f"--cpus 1 --gpus {len(gpu_bytes)} --fbmem {fbmem} --sysmem {sysmem}"
    else:  # level 6: without a driver its GPU module reports one as missing, on every start
        text = f"--cpus 1 --gpus 0 --utility 1 --sysmem {int(SYSTEM_SHARE * free)} --logging gpu=6"
    return Configuration.parse(text)


def gpus_of_legate() -> int | None:
    """Return how many GPUs Legate holds, or will hold: the first so many. None: all that there are."""
    given = given_configuration()
    if given is not None:
        return given.gpus
    return chosen_configuration().gpus if "legate.core" in sys.modules else 0


def check_memory(configuration: Configuration) -> None:
    """Refuse a configuration that reserves more than the machine has, which would end the process.

    Raises
    ------
    BackendUnavailableError
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MIB
    if configuration.sysmem is not None and configuration.sysmem >= physical:
        raise BackendUnavailableError(
            f"Legate is to reserve --sysmem {configuration.sysmem} MiB, but this machine has {physical}, and Legate "
            f"ends the process when it cannot: give {physical // 2} or less in LEGATE_CONFIG or to the launcher"
        )


def load_driver() -> bool:
    """Load the CUDA driver's library, or the stand-in that LMFIT_GPU_LIBCUDA names where there is no driver.

    The pip wheels of Legate are linked to ``libcuda.so.1`` even where they run on the CPU only. This package has no
    stand-in and looks for none; its tests build one.

    Returns
    -------
    bool
        Whether either was loaded.

    Raises
    ------
    BackendUnavailableError
        If LMFIT_GPU_LIBCUDA names a file that cannot be loaded.
    """
    try:
        ctypes.CDLL(LIBCUDA, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        stand_in = os.environ.get(STAND_IN)
        if not stand_in:
            return False
        try:
            ctypes.CDLL(stand_in, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise BackendUnavailableError(f"{STAND_IN}={stand_in!r} cannot be loaded: {error}") from error
    return True


def _gpu_memories() -> list[int]:
    """Return the bytes of every GPU that the driver shows; empty without a driver or a GPU."""
    try:
        driver = ctypes.CDLL(LIBCUDA)
    except OSError:
        return []
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    memories = []
    for index in range(count.value):
        device, size = ctypes.c_int(0), ctypes.c_size_t(0)
        if driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
            memories.append(size.value)
    return memories


def _free_memory() -> int:
    """Return the bytes that a new process could have: MemAvailable where the system tells, else half of all."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    except OSError:
        found = []
    return found[0] if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
