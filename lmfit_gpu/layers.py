r"""Rows of J of a module's tensors, layer by layer, from one forward and q backward passes, J never formed.

For a layer z = W a + b and a value v of a row of data (q values a row), with δ = ∂v/∂z,

.. math:: \frac{\partial v}{\partial W} = \sum_t \delta_t a_t^T,
    \qquad \frac{\partial v}{\partial b} = \sum_t \delta_t .

The forward pass shows the a of all rows and layers; a backward pass of Σ_i v_i gives the δ of all rows, since a row's
value depends on that row alone. Only gradients with respect to layer outputs are asked for: no weight gradient is
made. :mod:`lmfit_gpu.layer_uses` knows the layers, :mod:`lmfit_gpu.layer_rows` what is computed from a and δ.

What no supported layer accounts for is named in ``unsupported``. What the layers do not show (a parameter used besides
its layer, rows that depend on each other, positions in front of rows) `proven` finds by comparison with autograd.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointError

from lmfit_gpu.layer_blocks import joined
from lmfit_gpu.layer_positions import summed
from lmfit_gpu.layer_rows import TensorRows
from lmfit_gpu.layer_uses import LayerUse, holds, observed

__all__ = ["Captured", "TensorRows", "capture", "joined", "proven"]

PROBES = 32  # values of the probe that are compared one by one; of more, so many random combinations
PROBE_RTOL = {torch.float64: 1e-8, torch.float32: 1e-3}  # of the size of the numbers summed, the largest of a tensor


@dataclass(frozen=True, eq=False)
class Seen:
    """One use of a layer: the names of its parameters, and where in the graph its output is."""

    names: Mapping[str, str]  # {"weight": "layers.0.weight", ...}, the wanted ones
    use: LayerUse | None  # None: not one that has such rows
    version: int  # of a when it was used
    zeros: torch.Tensor  # of the output's shape, without memory of its own
    edge: GradientEdge | None  # of the output as the layer made it


class Captured:
    """What one forward pass showed of a module's layers; rows of J as often as wanted, by further backward passes.

    Attributes
    ----------
    values : Tensor
        As `values_of` returned them, detached.
    unsupported : tuple of str
        Names of parameters that no supported layer accounts for.
    """

    def __init__(self, seen: Sequence[Seen], values: torch.Tensor, names: Sequence[str], n_rows: int) -> None:
        if n_rows < 1 or values.numel() % n_rows:
            raise ValueError(f"n_rows: got {n_rows} for {values.numel()} values; a divisor of their number is expected")
        self.values = values.detach()
        self.n_rows = n_rows
        self._graph = values.reshape(n_rows, -1)
        unknown = {name for each in seen if not _has_rows(each, n_rows) for name in each.names.values()}
        known = {name for each in seen for name in each.names.values()} - unknown
        self.unsupported = tuple(name for name in names if name not in known)
        self._names = tuple(name for name in names if name in known)
        self._seen = [each for each in seen if known.intersection(each.names.values())]

    def rows(self, seeds: torch.Tensor | None = None) -> dict[str, TensorRows]:
        """Return the rows of J, or of S J, of every supported tensor.

        Parameters
        ----------
        seeds : Tensor, shape (k, n_rows, q), optional
            S: for every row of data k combinations of its q values. None: the q values themselves.

        Returns
        -------
        dict of str to TensorRows
            By parameter name; row i · k + j belongs to combination (or value) j of row i.

        Notes
        -----
        k backward passes through the layers, without weight gradients.
        """
        deltas = self._deltas(seeds)
        return self._summed([each.use.rows(delta, self.n_rows) for each, delta in self._pairs(deltas)])

    def sizes(self, seeds: torch.Tensor | None = None) -> dict[str, TensorRows]:
        """Return rows of |δ| |a|: the size of the numbers that `rows` sums, what their rounding is measured by."""
        pairs = self._pairs(self._deltas(seeds))
        return self._summed([each.use.absolute().rows(delta.abs(), self.n_rows) for each, delta in pairs])

    def _pairs(self, deltas: list[torch.Tensor]) -> list[tuple[Any, torch.Tensor]]:
        return list(zip(self._seen, deltas, strict=True))

    def _summed(self, found: list[dict[str, TensorRows]]) -> dict[str, TensorRows]:
        """Return the rows by name, those of a tensor's uses together."""
        uses: dict[str, list[TensorRows]] = {name: [] for name in self._names}
        for each, rows in zip(self._seen, found, strict=True):
            for kind, name in each.names.items():
                if name in uses:
                    uses[name].append(rows[kind])
        return {name: summed(rows) for name, rows in uses.items()}

    def _deltas(self, seeds: torch.Tensor | None) -> list[torch.Tensor]:
        """Return δ of every use, shape (n_rows, k, outputs of one row's uses, ...)."""
        if seeds is None:
            q = self._graph.shape[1]
            seeds = torch.eye(q, dtype=self.values.dtype, device=self.values.device)[:, None].expand(q, self.n_rows, q)
        elif seeds.ndim != 3 or seeds.shape[1:] != self._graph.shape:
            given, wanted = tuple(seeds.shape), ("k", *self._graph.shape)
            raise ValueError(f"seeds: got shape {given}; {wanted} is expected".replace("'", ""))
        passes = [self._backward(seed) for seed in seeds]
        return [torch.stack(parts, 1) if len(parts) > 1 else parts[0][:, None] for parts in zip(*passes, strict=True)]

    def _backward(self, seed: torch.Tensor) -> list[torch.Tensor]:
        """Return ∂(seed · values)/∂z of every use, rows of data in front."""
        edges = [each.edge for each in self._seen]
        found: Sequence[torch.Tensor | None] = [None] * len(edges)
        if edges and self._graph.requires_grad:
            found = torch.autograd.grad(self._graph, edges, seed, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
        grads = [each.zeros if grad is None else grad for grad, each in zip(found, self._seen, strict=True)]
        return [grad.reshape(self.n_rows, -1, *grad.shape[1:]) for grad in grads]


def capture(
    module: torch.nn.Module, names: Sequence[str], values_of: Callable[[], torch.Tensor], n_rows: int
) -> Captured:
    """Watch the layers of a module during one evaluation.

    Parameters
    ----------
    module : Module
    names : sequence of str
        Parameters of interest, as in ``module.named_parameters()``.
    values_of : callable () -> Tensor
        Calls the module, by ``torch.func.functional_call`` with parameters that do not require grad, and returns the
        values: shape (n_rows, q), (n_rows,) or (n_rows · q,).
    n_rows : int
        Rows of data: the leading axis of what the layers see, or a divisor of it where a row has several instances in
        a sequence of its own.

    Raises
    ------
    ValueError
        If a name is not that of a parameter, or the values are not a number per row.
    """
    seen, values = _watched(_wanted(module, names), values_of)
    return Captured(seen, values, names, n_rows)


def proven(
    module: torch.nn.Module,
    names: Sequence[str],
    values_of: Callable[[dict[str, torch.Tensor]], torch.Tensor],
    theta: Mapping[str, torch.Tensor],
    n_rows: int,
) -> tuple[str, ...]:
    """Return the names for which the rows by layers are those by autograd; for the others use another way.

    Parameters
    ----------
    module, names, n_rows
        As for `capture`; a few rows will do, some other number than a sequence has positions.
    values_of : callable (dict of str to Tensor) -> Tensor
        The values at the given parameters, the same at every call.
    theta : dict of str to Tensor
        The parameters `names`.

    Notes
    -----
    One backward pass through the whole module for each value, or for PROBES random combinations of more. A difference
    counts beyond PROBE_RTOL of the largest sum of |δ| |a| in the tensor.
    """
    held = {name: theta[name].detach() for name in names}
    captured = capture(module, names, lambda: values_of(held), n_rows)
    try:
        found, sizes = captured.rows(), captured.sizes()
    except CheckpointError:  # the forward pass that checkpointing repeats is another without the hooks
        return ()
    leaves = {name: held[name].clone().requires_grad_() for name in found}
    with torch.enable_grad():
        values = values_of({**held, **leaves}).reshape(-1)
    wrong: dict[str, list[torch.Tensor]] = {name: [] for name in found}
    for u in _probes(captured.values.reshape(-1)):
        grads: Sequence[torch.Tensor | None] = [None] * len(leaves)
        if leaves and values.requires_grad:
            grads = torch.autograd.grad(values, list(leaves.values()), u, retain_graph=True, materialize_grads=True)
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            expected = torch.zeros_like(leaf) if grad is None else grad
            limit = PROBE_RTOL[leaf.dtype] * sizes[name].transposed(u.abs()).max()
            off = (found[name].transposed(u) - expected.reshape(-1)).abs()
            wrong[name].append(~(off <= limit).all())  # nan is wrong
    return tuple(name for name in found if not bool(torch.stack(wrong[name]).any()))


def _probes(values: torch.Tensor) -> torch.Tensor:
    """Return what the values are combined by, shape (probes, m)."""
    m = values.numel()
    if m <= PROBES:
        return torch.eye(m, dtype=values.dtype, device=values.device)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(PROBES, m, generator=generator, dtype=torch.float64).to(values)


def _wanted(module: torch.nn.Module, names: Sequence[str]) -> dict[torch.nn.Module, dict[str, str]]:
    """Return the layers to watch, and by which names their parameters of interest go.

    A parameter that any module holds as something else than the weight or bias of a supported layer is left out.
    """
    by_id = {id(parameter): name for name, parameter in module.named_parameters()}
    missing = [name for name in names if name not in set(by_id.values())]
    if missing:
        raise ValueError(f"names: {missing[0]!r} is not a parameter of the module; its parameters: {[*by_id.values()]}")
    layers: dict[torch.nn.Module, dict[str, str]] = {}
    elsewhere, of_interest = set(), set(names)
    for layer in module.modules():
        for kind, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
            name = by_id[id(parameter)]
            if kind not in holds(layer):
                elsewhere.add(name)
            elif name in of_interest:
                layers.setdefault(layer, {})[kind] = name
    kept = {layer: {k: n for k, n in held.items() if n not in elsewhere} for layer, held in layers.items()}
    return {layer: held for layer, held in kept.items() if held}


def _watched(
    wanted: Mapping[torch.nn.Module, Mapping[str, str]], values_of: Callable[[], torch.Tensor]
) -> tuple[list[Seen], torch.Tensor]:
    """Return what the layers did, in order, and the values."""
    seen: list[Seen] = []

    def hook(layer: torch.nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], z: Any) -> torch.Tensor | None:
        x = inputs[0] if inputs else keywords["input"]
        dtype = getattr(layer, next(iter(wanted[layer]))).dtype
        use = observed(layer, x, z) if _is_plain(x, dtype) and _is_plain(z, dtype) else None
        if use is None:
            seen.append(Seen(wanted[layer], None, 0, torch.zeros(()), None))
            return None
        passed = None  # on: the output itself
        if not z.requires_grad:
            z = z.detach().requires_grad_()
            passed = z.clone()  # a leaf may not be written to
        elif z._base is not None:
            passed = z.clone()  # writing to a view takes its place in the graph away
        seen.append(Seen(wanted[layer], use, use.a._version, z.new_zeros(()).expand(z.shape), get_gradient_edge(z)))
        return passed

    hooks = [layer.register_forward_hook(hook, prepend=True, with_kwargs=True) for layer in wanted]
    try:
        with torch.enable_grad():
            return seen, values_of()
    finally:
        for handle in hooks:
            handle.remove()


def _is_plain(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether x is a tensor of numbers of the parameters' kind (or of tokens), outside vmap, jvp, autocast."""
    traced = is_functorch_wrapped_tensor(x) or forward_ad.unpack_dual(x).tangent is not None
    return not traced and (x.dtype == dtype or not x.is_floating_point())


def _has_rows(seen: Seen, n_rows: int) -> bool:
    """Return whether a use has rows of data in front, and an input that was not written to after it.

    Such an input no gradient of the weight can be made from: torch's own backward pass raises for it.
    """
    if seen.use is None or seen.use.a._version != seen.version:
        return False
    return seen.zeros.ndim > 1 and seen.zeros.shape[0] % n_rows == 0
