"""How Legate's configuration is read and chosen: without Legate, on made-up machines."""

import ctypes
import sys
import types
from dataclasses import FrozenInstanceError

import pytest

from lmfit_gpu import launch
from lmfit_gpu.exceptions import BackendUnavailableError
from lmfit_gpu.launch import Configuration, check_memory, chosen_configuration, given_configuration, gpus_of_legate

GIB = 2**30


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    monkeypatch.delenv("LEGATE_CONFIG", raising=False)
    monkeypatch.delenv(launch.STAND_IN, raising=False)
    monkeypatch.setattr(launch, "chosen_configuration", chosen_configuration.__wrapped__)  # not what was chosen before


def machine(monkeypatch, gpu_bytes=(), free=8 * GIB):
    monkeypatch.setattr(launch, "_gpu_memories", lambda: list(gpu_bytes))
    monkeypatch.setattr(launch, "_free_memory", lambda: free)


# ---- reading


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (None, None, None, None)),
        ("--cpus 2", (2, None, None, None)),
        ("--cpus 1 --gpus 0 --sysmem 64", (1, 0, 64, None)),
        ("--gpus=4 --fbmem=40000", (None, 4, None, 40000)),
        ("--sysmem 64 --logging gpu=6 --profile --gpus 2 --logdir '/a b'", (None, 2, 64, None)),
        ("--cpus 1 --cpus 3", (3, None, None, None)),
        ("--utility 2 --omps 1 --ompthreads 4 --zcmem 128", (None, None, None, None)),
        ("--sys 64", (None, None, None, None)),  # not an option of Legate's
    ],
)
def test_parse(text, expected):
    found = Configuration.parse(text)
    assert found.text == text
    assert (found.cpus, found.gpus, found.sysmem, found.fbmem) == expected


@pytest.mark.parametrize("text", ["--cpus x", "--sysmem 4000M", "--gpus", "--cpus '1"])
def test_what_is_no_number_is_refused(text):
    """Legate would print its options and end the process."""
    with pytest.raises(BackendUnavailableError, match="LEGATE_CONFIG: got"):
        Configuration.parse(text)


def test_a_configuration_does_not_change():
    with pytest.raises(FrozenInstanceError):
        Configuration.parse("--cpus 1").cpus = 2


@pytest.mark.parametrize("text", [None, "", "  \t"])
def test_nothing_is_given(text, monkeypatch):
    if text is not None:
        monkeypatch.setenv("LEGATE_CONFIG", text)
    assert given_configuration() is None


def test_given_configuration(monkeypatch):
    monkeypatch.setenv("LEGATE_CONFIG", "--cpus 2 --gpus 0")
    assert given_configuration() == Configuration("--cpus 2 --gpus 0", cpus=2, gpus=0)


# ---- choosing


def test_without_a_gpu_half_of_the_free_memory_is_chosen(monkeypatch):
    machine(monkeypatch, free=8 * GIB)
    chosen = launch.chosen_configuration()
    assert (chosen.cpus, chosen.gpus, chosen.sysmem, chosen.fbmem) == (1, 0, 4096, None)


@pytest.mark.parametrize("sizes", [[80 * GIB], [80 * GIB, 40 * GIB, 80 * GIB]], ids=["one", "three"])
def test_with_gpus_less_than_half_of_the_smallest_is_chosen(sizes, monkeypatch):
    machine(monkeypatch, sizes, free=100 * GIB)
    chosen = launch.chosen_configuration()
    assert (chosen.cpus, chosen.gpus, chosen.sysmem) == (1, len(sizes), 10240)
    assert chosen.fbmem == int(0.45 * min(sizes) / 2**20)


def test_it_is_chosen_once(monkeypatch):
    """More memory is free later, when Legate already has what it was given."""
    machine(monkeypatch, free=8 * GIB)
    chosen_configuration.cache_clear()
    try:
        first = chosen_configuration()
        machine(monkeypatch, free=2 * GIB)
        assert chosen_configuration() is first
    finally:
        chosen_configuration.cache_clear()


@pytest.mark.parametrize("gpu_bytes", [(), (8 * GIB,)], ids=["no gpu", "one gpu"])
def test_a_chosen_configuration_fits_the_machine(gpu_bytes, monkeypatch):
    monkeypatch.setattr(launch, "_gpu_memories", lambda: list(gpu_bytes))
    check_memory(launch.chosen_configuration())


# ---- which GPUs are Legate's


def test_gpus_of_legate_that_was_configured(monkeypatch):
    for text, expected in [("--gpus 2", 2), ("--gpus 0", 0), ("--cpus 1", None)]:
        monkeypatch.setenv("LEGATE_CONFIG", text)
        assert gpus_of_legate() == expected


@pytest.mark.parametrize("started", [False, True])
def test_gpus_of_legate_that_is_chosen_are_its_only_when_it_has_started(started, monkeypatch):
    machine(monkeypatch, [8 * GIB, 8 * GIB])
    monkeypatch.delitem(sys.modules, "legate.core", raising=False)
    if started:
        monkeypatch.setitem(sys.modules, "legate.core", types.ModuleType("legate.core"))
    assert gpus_of_legate() == (2 if started else 0)


# ---- memory


def test_check_memory(monkeypatch):
    sizes = {"SC_PHYS_PAGES": 1024 * 256, "SC_PAGE_SIZE": 4096}  # 1,024 MiB
    monkeypatch.setattr(launch.os, "sysconf", sizes.__getitem__)
    check_memory(Configuration("", sysmem=1023))
    check_memory(Configuration("", sysmem=None))
    for sysmem in (1024, 10**9):
        with pytest.raises(BackendUnavailableError, match=f"--sysmem {sysmem} MiB, but this machine has 1024, .* 512"):
            check_memory(Configuration("", sysmem=sysmem))


def test_free_memory_is_what_the_system_tells():
    assert 0 < launch._free_memory() <= launch.os.sysconf("SC_PHYS_PAGES") * launch.os.sysconf("SC_PAGE_SIZE")


# ---- the driver


def libraries(monkeypatch, known):
    """Let ctypes find these libraries only; return the names asked for."""
    asked = []

    def load(name, mode=ctypes.DEFAULT_MODE):
        asked.append((name, mode))
        if name not in known:
            raise OSError(f"{name}: cannot open shared object file")
        return known[name]

    monkeypatch.setattr(ctypes, "CDLL", load)
    return asked


def test_the_driver_is_loaded_where_there_is_one(monkeypatch):
    monkeypatch.setenv(launch.STAND_IN, "stub.so")
    asked = libraries(monkeypatch, {"libcuda.so.1": None, "stub.so": None})
    assert launch.load_driver()
    assert asked == [("libcuda.so.1", ctypes.RTLD_GLOBAL)]


def test_the_stand_in_is_loaded_where_there_is_no_driver(monkeypatch):
    monkeypatch.setenv(launch.STAND_IN, "stub.so")
    asked = libraries(monkeypatch, {"stub.so": None})
    assert launch.load_driver()
    assert asked[-1] == ("stub.so", ctypes.RTLD_GLOBAL)


@pytest.mark.parametrize("value", [None, ""])
def test_without_either_there_is_none(value, monkeypatch):
    if value is not None:
        monkeypatch.setenv(launch.STAND_IN, value)
    libraries(monkeypatch, {})
    assert not launch.load_driver()


def test_a_stand_in_that_cannot_be_loaded(monkeypatch):
    monkeypatch.setenv(launch.STAND_IN, "stub.so")
    libraries(monkeypatch, {})
    with pytest.raises(BackendUnavailableError, match=r"LMFIT_GPU_LIBCUDA='stub.so' cannot be loaded: stub.so"):
        launch.load_driver()


class Driver:
    """A driver of devices of given sizes; cuInit fails where there are none, as the real one's does."""

    def __init__(self, sizes):
        self.sizes = sizes

    def cuInit(self, flags):
        return 0 if self.sizes else 100

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.sizes)
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = index
        return 0

    def cuDeviceTotalMem_v2(self, size, device):
        size._obj.value = self.sizes[device.value]
        return 0


@pytest.mark.parametrize("sizes", [[], [8 * GIB], [80 * GIB, 40 * GIB]], ids=len)
def test_memories_of_the_gpus_of_a_driver(sizes, monkeypatch):
    libraries(monkeypatch, {"libcuda.so.1": Driver(sizes)})
    assert launch._gpu_memories() == sizes


def test_no_driver_no_gpus(monkeypatch):
    libraries(monkeypatch, {})
    assert launch._gpu_memories() == []
