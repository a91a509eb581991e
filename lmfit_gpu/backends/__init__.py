"""The optimizer component: dense linear algebra of small matrices, on one of several array libraries.

A backend is a dozen primitives on its own arrays, which support ``+ - * / @ ** .T`` and indexing as numpy's do.
Arrays of a backend never leave :mod:`lmfit_gpu.linear`. Everything here is float64.
"""

from torch import device as Device  # the name torch is a submodule here

from lmfit_gpu.backends.base import Backend
from lmfit_gpu.backends.scipy import ScipyBackend
from lmfit_gpu.backends.torch import TorchBackend

__all__ = ["BACKENDS", "Backend", "ScipyBackend", "TorchBackend", "get_backend"]

BACKENDS = {"scipy": ScipyBackend, "torch": TorchBackend}


def get_backend(name: str, device: Device) -> Backend:
    """Return a backend by name.

    Parameters
    ----------
    name : {"auto", "scipy", "torch"}
        "auto" is torch when the model is on a GPU, else scipy.
    device : torch.device
        The model's first device; the torch backend works there.

    Raises
    ------
    ValueError
        For a name that is not a backend.
    """
    if name == "auto":
        name = "scipy" if device.type == "cpu" else "torch"
    if name not in BACKENDS:
        raise ValueError(f"backend: got {name!r}; allowed are 'auto', {', '.join(map(repr, BACKENDS))}")
    return TorchBackend(device) if name == "torch" else ScipyBackend()
