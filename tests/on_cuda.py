"""A stand-in for tensors on a GPU, for machines that have none: it says cuda:0, and pickling it is an error."""

import copy

import torch


class OnCuda(torch.Tensor):
    """A tensor that computes on the CPU, says it is on cuda:0, and leaves it only through a copy to the CPU."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), dtype=inner.dtype, device="cuda:0", requires_grad=inner.requires_grad
        )

    def __init__(self, inner):
        self.inner = inner.detach()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        args = [arg.inner if isinstance(arg, OnCuda) else arg for arg in args]
        if kwargs.get("device") is not None:
            to_cpu = torch.device(kwargs.pop("device")).type == "cpu"
            return args[0].clone() if to_cpu else OnCuda(args[0].clone())
        values = function(*args, **kwargs)
        return cls(values) if isinstance(values, torch.Tensor) else values

    def __reduce_ex__(self, protocol):
        raise AssertionError("a tensor on cuda:0 reached the pickle")

    def __deepcopy__(self, memo):
        return OnCuda(copy.deepcopy(self.inner, memo))


def as_on_cuda(module):
    """Return a module whose parameters and buffers say that they are on cuda:0."""
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None:
                part._parameters[name] = torch.nn.Parameter(OnCuda(p.detach()), requires_grad=p.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = OnCuda(buffer)
    return module
