"""The optimizer component: dense linear algebra of small matrices, on one of several array libraries.

A backend is a dozen primitives on its own arrays, which support ``+ - * / @ ** .T`` and indexing as numpy's do.
Arrays of a backend never leave :mod:`lmfit_gpu.linear`. Everything here is float64.
"""

from torch import device as Device  # the name torch is a submodule here

from lmfit_gpu.backends.base import Backend
from lmfit_gpu.backends.cupynumeric import CuPyNumericBackend
from lmfit_gpu.backends.scipy import ScipyBackend
from lmfit_gpu.backends.torch import TorchBackend
from lmfit_gpu.launch import given_configuration

__all__ = ["BACKENDS", "Backend", "CuPyNumericBackend", "ScipyBackend", "TorchBackend", "backend_name", "get_backend"]

BACKENDS = {"scipy": ScipyBackend, "torch": TorchBackend, "cupynumeric": CuPyNumericBackend}


def backend_name(name: str, device: Device) -> str:
    """Return the backend that a name stands for.

    Parameters
    ----------
    name : {"auto", "scipy", "torch", "cupynumeric"}
        "auto" is cupynumeric under a ``legate`` launcher or with LEGATE_CONFIG set; torch when the model is on a GPU;
        else scipy.
    device : torch.device
        The model's first device.

    Raises
    ------
    ValueError
        For a name that is not a backend.
    """
    if name == "auto":
        if given_configuration() is not None:
            return "cupynumeric"
        return "scipy" if device.type == "cpu" else "torch"
    if name not in BACKENDS:
        raise ValueError(f"backend: got {name!r}; allowed are 'auto', {', '.join(map(repr, BACKENDS))}")
    return name


def get_backend(name: str, device: Device) -> Backend:
    """Return a backend by name; cupynumeric is imported, and Legate started, when it is first asked for.

    Parameters
    ----------
    name : {"auto", "scipy", "torch", "cupynumeric"}
        See :func:`backend_name`.
    device : torch.device
        The model's first device; the torch backend works there.

    Raises
    ------
    ValueError
        For a name that is not a backend.
    BackendUnavailableError
        If cupynumeric cannot be used in this process; the message says why and what to do.
    """
    name = backend_name(name, device)
    return TorchBackend(device) if name == "torch" else BACKENDS[name]()
