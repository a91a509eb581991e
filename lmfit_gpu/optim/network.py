"""The network of a training loop on its devices, the same function at every evaluation of one step.

In training mode a network is random (Dropout) or depends on the rows it sees (BatchNorm). A step compares costs and
linearises, so within it everything is frozen:

* random numbers start from a seed of the step and the block, at the Jacobian, the residuals and every trial alike;
* BatchNorm takes the whole batch into its running statistics once, before the step, and uses those; what the loop
  reports is therefore what the network in evaluation mode gives. At the very first batch they are that batch's.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from lmfit_gpu.models import ModuleModel
from lmfit_gpu.rows import each_tensor, tensors_of

__all__ = ["Network", "called", "frozen_statistics", "random_numbers"]

CPU_RANDOM = threading.Lock()  # torch has one generator for all threads of the CPU


class Network(ModuleModel):
    """A module as a function of its free parameters, in the mode it is in; x may be a tuple, list or dict of tensors.

    A tuple or list is the positional arguments of the module, a dict its keyword arguments.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module, evaluates=False)
        one = next(p for p in module.parameters() if p.requires_grad)
        self._kind = one.dtype, one.device

    def __call__(self, theta: torch.Tensor, x: Any, y: Any = None) -> torch.Tensor:
        """Return the module's output at theta, shape (rows, ...)."""
        return called(self.module, self.split(theta), x)

    def evaluated(self, theta: torch.Tensor, function: Callable[[torch.nn.Module], torch.Tensor]) -> torch.Tensor:
        """Return function(module), where the module has the parameters theta meanwhile: all of it can be used."""
        parameters = {f"module.{name}": part for name, part in self.split(theta).items()}
        return functional_call(_Holder(self.module), parameters, (function,))

    def check_current(self) -> None:
        """Raise ValueError where the module does not have the trained parameters any more that it had."""
        free = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if {name: p.shape for name, p in free.items()} != self._shapes:
            changed = sorted(set(free) ^ set(self._shapes)) or "another shape"
            raise ValueError(f"model: LMA was made for other trained parameters ({changed}); make a new LMA")
        kinds = {(p.dtype, p.device) for p in free.values()}
        if kinds != {self._kind}:
            raise ValueError(f"model: LMA was made for {self._kind}, the model has {kinds}; make a new LMA")

    def follow(self, source: torch.nn.Module) -> None:
        """Take over the modes, buffers and fixed parameters of another copy of the module."""
        mine = zip(self.module.modules(), source.modules(), strict=True)
        for module, other in mine:
            module.training = other.training
        with torch.no_grad():
            for part, other_part in zip(self.module.buffers(), source.buffers(), strict=True):
                part.copy_(other_part)
            for part, other_part in zip(self.module.parameters(), source.parameters(), strict=True):
                if not other_part.requires_grad:
                    part.copy_(other_part)


class _Holder(torch.nn.Module):
    """Calls a function of a module, so that torch's functional_call can give the module other parameters."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[torch.nn.Module], torch.Tensor]) -> torch.Tensor:
        """Return function(module)."""
        return function(self.module)


def called(module: torch.nn.Module, parameters: dict[str, torch.Tensor], x: Any) -> torch.Tensor:
    """Return the output of a module, a tensor with the rows in front."""
    args, kwargs = ((), x) if isinstance(x, dict) else (tuple(x) if isinstance(x, (tuple, list)) else (x,), {})
    outputs = functional_call(module, parameters, args, kwargs)
    if not isinstance(outputs, torch.Tensor):
        raise TypeError(
            f"model: returned {type(outputs).__name__}; a tensor is expected, or a residual_fn(model, x, y)"
        )
    return outputs


def _norms(module: torch.nn.Module) -> list[_BatchNorm]:
    return [m for m in module.modules() if isinstance(m, _BatchNorm) and m.training and m.running_mean is not None]


@contextmanager
def frozen_statistics(module: torch.nn.Module, run: Callable[[], Any]) -> Iterator[None]:
    """Take a batch into the running statistics of every BatchNorm in training mode, and hold them for a while.

    Parameters
    ----------
    module : Module
        Its modes are put back at the end; its statistics too where the work fails.
    run : callable ()
        Runs the module over the whole batch.
    """
    norms = _norms(module)
    buffers = [buffer for norm in norms for buffer in norm.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        if norms:
            _take_in(norms, run)
        for norm in norms:
            norm.training = False
        yield
    except BaseException:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        raise
    finally:
        for norm in norms:
            norm.training = True


def _take_in(norms: Sequence[_BatchNorm], run: Callable[[], Any]) -> None:
    """Run a batch; where nothing is known yet it replaces torch's (0, 1), which are no statistics."""
    own = [norm.momentum for norm in norms]
    for norm in norms:
        if norm.num_batches_tracked is not None and int(norm.num_batches_tracked) == 0:
            norm.momentum = 1.0
    try:
        run()
    finally:
        for norm, momentum in zip(norms, own, strict=True):
            norm.momentum = momentum


@contextmanager
def evaluating(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Hold modules in evaluation mode; every one of their parts goes back to its own mode."""
    parts = [(part, part.training) for module in modules for part in module.modules()]
    for part, _ in parts:
        part.training = False
    try:
        yield
    finally:
        for part, mode in parts:
            part.training = mode


@contextmanager
def random_numbers(seed: int | None, device: torch.device) -> Iterator[None]:
    """Let random numbers on a device start from a seed, and go on as before afterwards; None: do nothing."""
    if seed is None:
        yield
        return
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
        lock: Any = nullcontext()
    else:
        generator, lock = torch.default_generator, CPU_RANDOM
    with lock:
        before = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(before)


def is_random(module: torch.nn.Module) -> bool:
    """Return whether any part of a module is in training mode: it may then draw random numbers."""
    return any(part.training for part in module.modules())


def on_device(x: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return tensors on a device; those of real numbers in the arithmetic of the network, whole numbers as they are."""

    def moved(part: torch.Tensor) -> torch.Tensor:
        kind = dtype if part.is_floating_point() else part.dtype
        return part.to(device=device, dtype=kind, non_blocking=True)

    return each_tensor(moved, x)


def n_rows_of(x: Any, name: str) -> int:
    """Return the common number of rows of the tensors of x.

    Raises
    ------
    ValueError
        If there is no tensor, or their leading axes differ.
    """
    if not tensors_of(x):
        raise ValueError(
            f"{name}: got {type(x).__name__}; a tensor (torch.as_tensor), or a tuple, list or dict of them"
        )
    sizes = {part.shape[0] if part.ndim else None for part in tensors_of(x)}
    if len(sizes) != 1 or None in sizes or not next(iter(sizes)):
        shapes = [tuple(part.shape) for part in tensors_of(x)]
        raise ValueError(f"{name}: got tensors of shapes {shapes}; the same number of rows, at least 1, is expected")
    return int(next(iter(sizes)) or 0)
