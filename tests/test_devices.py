"""Which devices hold the model: the list of GPUs, and the ``devices`` argument."""

import pytest
import torch

import lmfit_gpu
from lmfit_gpu.devices import get_available_gpus, resolve_devices

CPU = torch.device("cpu")


def test_the_list_is_never_empty():
    devices = get_available_gpus()
    assert len(devices) >= 1
    assert all(isinstance(device, torch.device) for device in devices)
    assert lmfit_gpu.get_available_gpus is get_available_gpus


def test_without_a_gpu_the_list_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert get_available_gpus() == [CPU]


def test_a_driver_without_devices_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert get_available_gpus() == [CPU]


def test_all_gpus_are_listed_in_order(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert get_available_gpus() == [torch.device("cuda", i) for i in range(3)]


@pytest.mark.parametrize("default", [CPU, torch.device("cuda", 1)])
def test_auto_is_the_default(default):
    assert resolve_devices("auto", default) == (default,)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("cpu", (CPU,)),
        (CPU, (CPU,)),
        (["cpu", CPU], (CPU, CPU)),
        (("cpu",), (CPU,)),
        ((d for d in ["cpu", "cpu"]), (CPU, CPU)),
    ],
)
def test_one_device_or_several(devices, expected):
    assert resolve_devices(devices, torch.device("cuda", 0)) == expected


def test_cuda_without_a_number_is_the_first(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_devices(["cuda", "cuda:1"], CPU) == (torch.device("cuda", 0), torch.device("cuda", 1))


def test_an_empty_list_is_refused():
    with pytest.raises(ValueError, match=r"devices: got an empty list; .*'auto'"):
        resolve_devices([], CPU)


@pytest.mark.parametrize("name", ["gpu0", "", "cpu:x", ["cpu", "banana"], [None], [3.5]])
def test_a_name_torch_does_not_know_is_refused(name):
    with pytest.raises(ValueError, match=r"devices: .* is not a torch device"):
        resolve_devices(name, CPU)


@pytest.mark.parametrize("devices", [3.5, None])
def test_what_is_no_list_is_refused_by_name(devices):
    with pytest.raises((ValueError, TypeError), match="devices"):
        resolve_devices(devices, CPU)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"devices: 'cuda:2' asked for, but torch sees 2 CUDA devices"):
        resolve_devices(["cuda:0", "cuda:2"], CPU)


@pytest.mark.gpu
def test_on_a_gpu_machine_the_gpus_are_usable():
    for device in get_available_gpus():
        assert device.type == "cuda"
        assert float(torch.ones(3, device=device).sum()) == 3.0


# ---- GPUs that Legate holds


@pytest.fixture
def three_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)


@pytest.mark.parametrize(
    ("configuration", "free"),
    [
        ("--gpus 1", [1, 2]),
        ("--cpus 2 --gpus 2 --fbmem 4000", [2]),
        ("--gpus 3", []),
        ("--gpus 5", []),
        ("--gpus 0", [0, 1, 2]),
        ("--cpus 2", []),  # Legate chooses by itself, and takes all
    ],
)
def test_the_gpus_of_legate_are_left_out(monkeypatch, three_gpus, configuration, free):
    monkeypatch.setenv("LEGATE_CONFIG", configuration)
    assert get_available_gpus() == ([torch.device("cuda", i) for i in free] or [CPU])


def test_no_free_gpu_is_said_once(monkeypatch, three_gpus, caplog):
    monkeypatch.setenv("LEGATE_CONFIG", "--gpus 3")
    lmfit_gpu.devices._say_once.cache_clear()
    for _ in range(3):
        assert get_available_gpus() == [CPU]
    said = [record.getMessage() for record in caplog.records if record.name == "lmfit_gpu"]
    assert said == ["no free GPU (3 seen by torch, 3 held by Legate): using the CPU"]
