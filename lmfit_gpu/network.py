r"""The default model: a tanh network in standardised units.

With hidden layers of :math:`h_1, \ldots, h_L` units

.. math:: \hat y = \mu_y + s_y \circ \bigl(W_{L+1} a_L + b_{L+1}\bigr), \qquad
          a_l = \tanh(W_l a_{l-1} + b_l), \qquad a_0 = (x - \mu_x) / s_x .

The means and scales are those of the rows it is fitted to, and no parameters: a change of the units of a feature, or
of all of y, changes nothing but the units of the answer. (Of several outputs, those in small units count for little in
a sum of squares, as ever: standardise y, or give sigma.)

Weights start as Nguyen and Widrow proposed: every unit of a layer bends somewhere in the range of its inputs, and the
bends are spread over it (Nguyen and Widrow, "Improving the learning speed of 2-layer neural networks by choosing
initial values of the adaptive weights", IJCNN 1990, vol. 3, 21-26, doi:10.1109/IJCNN.1990.137819).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch

from lmfit_gpu.rows import Weights

__all__ = ["DEFAULT_HIDDEN", "TanhNetwork", "default_network", "hidden_sizes", "standardise"]

DEFAULT_HIDDEN = (10,)
SPREAD = 0.7  # Nguyen and Widrow: slopes of 0.7 h^(1/n), so that neighbouring bends overlap a little
RANGE = 1.7  # half the range of a standardised feature, in standard deviations (a uniform one has 3^½)
CONSTANT = 100.0  # roundings of its largest value that a constant column varies by


class TanhNetwork(torch.nn.Module):
    """Fully connected tanh layers between fixed standardisations, in float64.

    Parameters
    ----------
    n_features, n_outputs : int
    hidden_layer_sizes : sequence of int

    Examples
    --------
    >>> network = TanhNetwork(3, 2, (4,))
    >>> network(torch.zeros(5, 3, dtype=torch.float64)).shape
    torch.Size([5, 2])
    >>> [name for name, _ in network.named_parameters()]
    ['layers.0.weight', 'layers.0.bias', 'layers.1.weight', 'layers.1.bias']
    """

    x_mean: torch.Tensor
    x_scale: torch.Tensor
    y_mean: torch.Tensor
    y_scale: torch.Tensor

    def __init__(self, n_features: int, n_outputs: int, hidden_layer_sizes: Sequence[int] = DEFAULT_HIDDEN) -> None:
        super().__init__()
        sizes = (n_features, *hidden_layer_sizes, n_outputs)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(a, b, dtype=torch.float64) for a, b in pairwise(sizes))
        for name, size in (("x", n_features), ("y", n_outputs)):
            self.register_buffer(f"{name}_mean", torch.zeros(size, dtype=torch.float64))
            self.register_buffer(f"{name}_scale", torch.ones(size, dtype=torch.float64))
        self._initialise()

    @property
    def linears(self) -> list[torch.nn.Linear]:
        """The layers' affine maps, in order."""
        return cast(list[torch.nn.Linear], list(self.layers))

    def _initialise(self) -> None:
        """Draw the start from torch's global generator."""
        *hidden, last = self.linears
        with torch.no_grad():
            for depth, layer in enumerate(hidden):
                reach = RANGE if depth == 0 else 1.0  # a_l is within ±1
                slope = SPREAD * layer.out_features ** (1 / layer.in_features) / reach
                directions = torch.nn.functional.normalize(torch.randn_like(layer.weight), dim=1)
                layer.weight.copy_(slope * directions)
                layer.bias.copy_(slope * reach * (2 * torch.rand_like(layer.bias) - 1))
            last.weight.copy_((2 * torch.rand_like(last.weight) - 1) / last.in_features**0.5)
            last.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return predictions, shape (rows, n_outputs), of x, shape (rows, n_features)."""
        a = (x - self.x_mean) / self.x_scale
        *hidden, last = self.linears
        for layer in hidden:
            a = torch.tanh(layer(a))
        return self.y_mean + self.y_scale * last(a)


def hidden_sizes(hidden_layer_sizes: Any) -> tuple[int, ...]:
    """Return the sizes that the argument of that name means: None is one layer of 10, a number one layer."""
    if hidden_layer_sizes is None:
        return DEFAULT_HIDDEN
    sizes = hidden_layer_sizes if hasattr(hidden_layer_sizes, "__iter__") else (hidden_layer_sizes,)
    return tuple(int(size) for size in sizes)


def default_network(n_features: int, n_outputs: int, hidden_layer_sizes: Any = None) -> TanhNetwork:
    """Return the network of an estimator without a model, its start drawn from torch's global generator."""
    return TanhNetwork(n_features, n_outputs, hidden_sizes(hidden_layer_sizes))


def standardise(network: TanhNetwork, X: torch.Tensor, y: torch.Tensor, weights: Weights | None = None) -> None:
    """Set the means and scales of a network to those of rows, each counted with its frequency.

    Parameters
    ----------
    network : TanhNetwork
    X : Tensor, shape (n_samples, n_features)
    y : Tensor, shape (n_samples,) or (n_samples, n_outputs)
    weights : Weights, optional
    """
    frequency = None if weights is None else weights.frequency
    for name, values in (("x", X), ("y", y.reshape(len(y), -1))):
        mean, scale = _mean_and_scale(values.double(), None if frequency is None else frequency.to(values.device))
        getattr(network, f"{name}_mean").copy_(mean)
        getattr(network, f"{name}_scale").copy_(scale)


def _mean_and_scale(values: torch.Tensor, frequency: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and standard deviation of the columns, 1 for those that are constant but for rounding."""
    share = torch.ones(len(values), dtype=torch.float64, device=values.device) if frequency is None else frequency
    share = share / share.sum()
    largest = values.abs().amax(0)
    unit = torch.where(largest > 0, largest, torch.ones_like(largest))  # squares of 1e200 overflow
    scaled = values / unit
    mean = share @ scaled
    deviation = (share @ (scaled - mean) ** 2) ** 0.5
    constant = deviation <= CONSTANT * torch.finfo(torch.float64).eps
    return mean * unit, torch.where(constant, torch.ones_like(unit), deviation * unit)
