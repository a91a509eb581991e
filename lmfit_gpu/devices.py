"""Which torch devices hold the model.

The *model component* of a fit is a list of torch devices; blocks of rows are dealt over them in turn.
The list may name one device several times: ``["cpu", "cpu"]`` runs two workers, each with its own replica.
"""

import functools
import logging
from collections.abc import Iterable, Sequence

import torch

from lmfit_gpu.launch import gpus_of_legate

__all__ = ["get_available_gpus", "resolve_devices"]


def get_available_gpus() -> list[torch.device]:
    """List the GPUs that torch can use and Legate does not hold, or the CPU when there is none.

    Returns
    -------
    list of torch.device
        CUDA devices in order; ``[torch.device("cpu")]`` when none is free, so that the list is never empty (said once,
        by the logger "lmfit_gpu"). Under ``legate --gpus N`` the first N are Legate's. A GPU can be shared all the
        same, by naming it: ``devices="cuda:0"``.

    Examples
    --------
    >>> from lmfit_gpu import get_available_gpus
    >>> len(get_available_gpus()) >= 1
    True
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    held = gpus_of_legate()
    free = [torch.device("cuda", i) for i in range(count if held is None else held, count)]
    if not free:
        _say_once(
            f"no free GPU ({count} seen by torch, {'all' if held is None else held} held by Legate): using the CPU"
        )
    return free or [torch.device("cpu")]


@functools.cache
def _say_once(message: str) -> None:
    logging.getLogger("lmfit_gpu").warning(message)


def resolve_devices(devices: str | torch.device | Sequence[str | torch.device], default: torch.device) -> tuple:
    """Turn the ``devices`` argument into a non-empty tuple of torch devices.

    Parameters
    ----------
    devices : "auto", a device, or a sequence of devices
        ``"auto"`` is `default`: the device that already holds the module or the data.
    default : torch.device
        What ``"auto"`` means.

    Returns
    -------
    tuple of torch.device

    Raises
    ------
    ValueError
        If a name is not a torch device, the list is empty, or a CUDA device is not there.
    """
    if isinstance(devices, str) and devices == "auto":
        return (default,)
    if not isinstance(devices, (str, torch.device, Iterable)):
        raise ValueError(f"devices: got {devices!r}; 'auto', a torch device or a list of them is expected")
    listed = [devices] if isinstance(devices, (str, torch.device)) else list(devices)
    if not listed:
        raise ValueError("devices: got an empty list; give at least one torch device or 'auto'")
    return tuple(_checked_device(device) for device in listed)


def _checked_device(device: str | torch.device) -> torch.device:
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"devices: {device!r} is not a torch device such as 'cpu' or 'cuda:0'") from error
    if resolved.type == "cuda":
        index = resolved.index or 0
        if index >= torch.cuda.device_count():
            raise ValueError(f"devices: {device!r} asked for, but torch sees {torch.cuda.device_count()} CUDA devices")
        return torch.device("cuda", index)
    return resolved
