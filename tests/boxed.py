"""A model that keeps account of where it is evaluated: `Watched.outside` has every value beyond its box."""

import numpy as np
import torch
from oracles import numpy_model, torch_model
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


def plain(values):
    """Return what functorch (vmap, jvp) wraps, as a real array."""
    if not isinstance(values, torch.Tensor):
        return np.real(np.asarray(values))
    wraps = torch._C._functorch
    while wraps.is_functorch_wrapped_tensor(values):
        values = wraps.get_unwrapped(values)
    with temporarily_clear_interpreter_stack():
        return np.real(values.detach().numpy())


class Watched:
    """A model f(x, *parameters) in numpy or torch with its box, and the box as tensors (`bounds`)."""

    def __init__(self, make, library, lower, upper, dtype=torch.float64):
        self.bounds = tuple(torch.tensor(side, dtype=torch.float64).to(dtype) for side in (lower, upper))
        self.outside = []
        self.calls = 0
        function = make(library)

        def watched(x, *parameters):
            self.calls += 1
            for j, (value, low, high) in enumerate(zip(parameters, *self.bounds, strict=True)):
                beyond = (plain(value) < float(low)) | (plain(value) > float(high))
                if np.any(beyond):
                    self.outside.append((j, float(np.extract(beyond, plain(value))[0])))
            return function(x, *parameters)

        self.function = watched
        self.model = (numpy_model if library is np else torch_model)(watched)
