r"""What one use of a layer gives the rows of J: its inputs a and the gradients δ of its outputs, layer by layer.

For z = layer(x), with δ = ∂v/∂z (all positions t of one row of data):

- linear: ∂v/∂W = Σ_t δ_t a_tᵀ, a = x;
- convolution: the same, a_t the patch of x that makes output position t (stride, padding, dilation), group by group;
- embedding: the same with a one-hot a: δ_t is added to the line of the token;
- normalisation z = w ∘ x̂ + b over fixed statistics or those of the row itself: ∂v/∂w = Σ_t δ_t ∘ x̂_t;
- every bias: ∂v/∂b = Σ_t δ_t.

Exact classes only: a subclass may do something else.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lmfit_gpu.layer_positions import EmbeddingRows, PositionRows
from lmfit_gpu.layer_rows import ExplicitRows, Factor, OuterRows, TensorRows

__all__ = ["LayerUse", "holds", "observed"]


@dataclass(frozen=True, eq=False)
class LayerUse:
    """One call of a layer.

    Parameters
    ----------
    layer : Module
    a : Tensor
        What its weight is multiplied by: the input, tokens, or the normalised input; rows in the leading axis, or rows
        times something else, row by row.
    """

    layer: nn.Module
    a: torch.Tensor
    moved: torch.Tensor | None = None  # W a of a linear layer with one position a row, as it was made

    def absolute(self) -> "LayerUse":
        """Return the use with |a|: with |δ| its rows tell the size of the numbers that are summed."""
        return replace(self, a=self.a.abs(), moved=None)

    def rows(self, delta: torch.Tensor, n_rows: int) -> dict[str, TensorRows]:
        """Return the rows of J of the layer's weight and bias.

        Parameters
        ----------
        delta : Tensor, shape (n_rows, k, *shape of the output with n_rows in front)
            ∂v/∂z for k values (or combinations of values) a row.
        n_rows : int
            Rows of data.
        """
        found = KINDS[type(self.layer)].rows(self.layer, self.a.reshape(n_rows, -1, *self.a.shape[1:]), delta)
        if self.moved is not None and isinstance(found["weight"], OuterRows):
            found["weight"] = replace(found["weight"], moved=self.moved)
        return found


def holds(layer: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters that `rows` knows of this layer, () for layers of other kinds."""
    return ("weight", "bias") if type(layer) in KINDS else ()


def observed(layer: nn.Module, x: torch.Tensor, z: torch.Tensor) -> LayerUse | None:
    """Return the use of a layer with input x and output z, None if it is used in a way that has no such rows."""
    with torch.no_grad():
        a, moved = KINDS[type(layer)].input(layer, x.detach()), None
        if type(layer) is nn.Linear and z.ndim == 2:
            moved = z.detach().clone() if layer.bias is None else z.detach() - layer.bias
    return None if a is None else LayerUse(layer, a, moved)


@dataclass(frozen=True)
class Kind:
    """How layers of a kind are read.

    `input(layer, x)` returns a or None; `rows(layer, a, delta)` takes a (rows, f, ...) and δ (rows, k, f, ...), f the
    instances of the layer's input in one row of data, usually 1.
    """

    input: Callable[[Any, torch.Tensor], torch.Tensor | None]
    rows: Callable[[Any, torch.Tensor, torch.Tensor], dict[str, TensorRows]]


# ---- linear


def _features(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor | None:
    return x if x.ndim >= 2 else None


def _linear_rows(layer: nn.Linear, a: torch.Tensor, delta: torch.Tensor) -> dict[str, TensorRows]:
    rows, k = delta.shape[:2]
    a, delta = a.reshape(rows, 1, -1, a.shape[-1]), delta.reshape(rows, k, 1, -1, delta.shape[-1])
    return _products(delta, a)


def _products(delta: torch.Tensor, a: torch.Tensor) -> dict[str, TensorRows]:
    """Return rows of a weight and its bias from δ (rows, k, G, T, O) and a (rows, G, T, I)."""
    rows, k, g, t, o = delta.shape
    summed = (delta[:, :, :, 0] if t == 1 else delta.sum(3)).reshape(rows * k, g * o)
    bias = ExplicitRows(Factor(summed))
    if g == 1 and t == 1:
        return {"weight": OuterRows(bias.rows, Factor(a[:, 0, 0])), "bias": bias}
    return {"weight": PositionRows(delta, a), "bias": bias}


# ---- convolutions


def _images(layer: Any, x: torch.Tensor) -> torch.Tensor | None:
    return x if x.ndim == 2 + len(layer.kernel_size) and layer.padding_mode == "zeros" else None


def _convolution_rows(layer: Any, a: torch.Tensor, delta: torch.Tensor) -> dict[str, TensorRows]:
    rows, k, f = delta.shape[:3]
    g, o = layer.groups, layer.out_channels // layer.groups
    patches = _patches(layer, a.reshape(rows * f, *a.shape[2:])).view(rows, f, g, -1, _positions(delta))
    patches = patches.permute(0, 2, 1, 4, 3).reshape(rows, g, f * _positions(delta), -1)
    delta = delta.reshape(rows, k, f, g, o, -1).permute(0, 1, 3, 2, 5, 4)
    return _products(delta.reshape(rows, k, g, -1, o), patches)


def _positions(delta: torch.Tensor) -> int:
    return delta[0, 0, 0, 0].numel()


def _patches(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the patches of images, shape (images, channels · kernel, positions), a 1-D image as one of height 1."""
    kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    if layer.padding == "same":  # the odd one out goes to the end
        totals = [d * (size - 1) for d, size in zip(dilation, kernel, strict=True)]
        both = [(total // 2, total - total // 2) for total in totals]
    else:
        both = [(pad, pad) for pad in ([0] * len(kernel) if layer.padding == "valid" else layer.padding)]
    x = F.pad(x, [pad for pair in reversed(both) for pad in pair])
    if len(kernel) == 1:
        x, kernel, stride, dilation = x[:, :, None], (1, *kernel), (1, *stride), (1, *dilation)
    return F.unfold(x, kernel, dilation=dilation, stride=stride)


# ---- embeddings


def _tokens(layer: nn.Embedding, x: torch.Tensor) -> torch.Tensor | None:
    if layer.max_norm is not None or layer.scale_grad_by_freq or x.ndim == 0:
        return None  # it writes to its table, or its gradient is another
    return x


def _embedding_rows(layer: nn.Embedding, a: torch.Tensor, delta: torch.Tensor) -> dict[str, TensorRows]:
    rows, k = delta.shape[:2]
    tokens, delta = a.reshape(rows, -1), delta.reshape(rows, k, -1, delta.shape[-1])
    if layer.padding_idx is not None:  # a line that is no parameter
        delta = delta * (tokens != layer.padding_idx)[:, None, :, None]
    return {"weight": EmbeddingRows(delta, tokens, layer.num_embeddings)}


# ---- normalisations: a is the normalised input


def _layer_norm(layer: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor | None:
    return F.layer_norm(x, layer.normalized_shape, eps=layer.eps) if x.ndim > len(layer.normalized_shape) else None


def _rms_norm(layer: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor | None:
    return F.rms_norm(x, layer.normalized_shape, eps=layer.eps) if x.ndim > len(layer.normalized_shape) else None


def _group_norm(layer: nn.GroupNorm, x: torch.Tensor) -> torch.Tensor | None:
    return F.group_norm(x, layer.num_groups, eps=layer.eps)


def _batch_norm(layer: Any, x: torch.Tensor) -> torch.Tensor | None:
    if layer.training or layer.running_mean is None:
        return None  # its statistics couple the rows
    return F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)


def _instance_norm(layer: Any, x: torch.Tensor) -> torch.Tensor | None:
    batched = x.ndim == (3 if isinstance(layer, nn.InstanceNorm1d) else 4)
    return F.instance_norm(x, eps=layer.eps) if batched and layer.running_mean is None else None


def _trailing_rows(layer: Any, a: torch.Tensor, delta: torch.Tensor) -> dict[str, TensorRows]:
    """Return the rows of a scale and a shift over the last axes: LayerNorm, RMSNorm."""
    n = layer.weight.numel()
    rows, k = delta.shape[:2]
    a, delta = a.reshape(rows, 1, -1, n), delta.reshape(rows, k, -1, n)
    return {"weight": _summed((delta * a).sum(2)), "bias": _summed(delta.sum(2))}


def _channel_rows(layer: Any, a: torch.Tensor, delta: torch.Tensor) -> dict[str, TensorRows]:
    """Return the rows of a scale and a shift of channels: the other normalisations."""
    rows, k, f, c = delta.shape[:4]
    a, delta = a.reshape(rows, 1, f, c, -1), delta.reshape(rows, k, f, c, -1)
    return {"weight": _summed((delta * a).sum((2, 4))), "bias": _summed(delta.sum((2, 4)))}


def _summed(rows: torch.Tensor) -> ExplicitRows:
    return ExplicitRows(Factor(rows.reshape(-1, rows.shape[-1])))


KINDS: dict[type, Kind] = {
    nn.Linear: Kind(_features, _linear_rows),
    nn.Conv1d: Kind(_images, _convolution_rows),
    nn.Conv2d: Kind(_images, _convolution_rows),
    nn.Embedding: Kind(_tokens, _embedding_rows),
    nn.LayerNorm: Kind(_layer_norm, _trailing_rows),
    nn.RMSNorm: Kind(_rms_norm, _trailing_rows),
    nn.GroupNorm: Kind(_group_norm, _channel_rows),
    nn.BatchNorm1d: Kind(_batch_norm, _channel_rows),
    nn.BatchNorm2d: Kind(_batch_norm, _channel_rows),
    nn.InstanceNorm1d: Kind(_instance_norm, _channel_rows),
    nn.InstanceNorm2d: Kind(_instance_norm, _channel_rows),
}
