"""What a step does to one block: take its gradient, average, make a curvature pair, turn the gradient into a direction.

All that is element by element runs on the lists of the block's tensors at once (torch's foreach functions); the
products with pairs run on its flat vectors. Nothing here waits for a device but `on_host`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lmfit_gpu.optim.curvature_pairs import CurvaturePairs
from lmfit_gpu.optim.pair_damping import PairProducts, damped_pair
from lmfit_gpu.optim.parameter_blocks import Averages, Block, Flat

__all__ = [
    "average",
    "collect",
    "described",
    "differences",
    "direct",
    "moving",
    "on_host",
    "remember",
    "share_direction",
    "take_pair",
]

SCALE_MEMORY = 0.9  # of the running curvature scale, for each pair


def collect(block: Block, *, maximize: bool, missing_is_zero: bool) -> None:
    """Put the gradients of a block into its work vector."""
    block.present = []
    work = _flat(block.work)
    for index, member in enumerate(block.members):
        gradient = member.parameter.grad
        if gradient is None:
            work.views[index].zero_()
            if not (missing_is_zero and member.parameter.requires_grad):
                continue
        elif gradient.layout != torch.strided:
            raise ValueError(
                f"step: the gradient of {member.name or f'tensor {member.number}'} is sparse; a dense one is expected "
                "(nn.Embedding: sparse=False)"
            )
        block.present.append(index)
    filled = [index for index in block.present if block.members[index].parameter.grad is not None]
    if filled:
        gradients = [gradient for member in block.members if (gradient := member.parameter.grad) is not None]
        torch._foreach_copy_([work.views[index] for index in filled], gradients)
    if maximize:
        work.vector.neg_()


def average(block: Block, beta: float) -> None:
    """Let the averages of a block follow its parameters and its gradient; they begin with the first of these."""
    if block.averages is None:
        remember(block, before=True)
        remember(block, before=False)
        return
    theta = [block.members[index].parameter.detach() for index in block.present]
    torch._foreach_lerp_(_present(block, block.averages.parameter), theta, 1 - beta)
    torch._foreach_lerp_(_present(block, block.averages.gradient), _present(block, block.work), 1 - beta)


def remember(block: Block, *, before: bool) -> None:
    """Put the parameters and the gradient of a block, as they are, in the place of their averages."""
    if block.averages is None:
        block.averages = Averages(block.flat(), block.flat(), block.flat(), block.flat())
    kept = block.averages
    theta, gradient = (kept.parameter_before, kept.gradient_before) if before else (kept.parameter, kept.gradient)
    torch._foreach_copy_(theta.views, [member.parameter.detach() for member in block.members])
    gradient.vector.copy_(_flat(block.work).vector)


def direct(block: Block, options: Mapping[str, Any]) -> None:
    """Turn the gradient of a block into its direction, with momentum into the running sum of these."""
    work, pairs = _flat(block.work), _pairs(block)
    block.direction = work
    if options["momentum"] and block.momentum is None:
        block.momentum = block.flat()
    whole = len(block.present) == len(block.members)
    if block.momentum is not None and whole and options["normalize"] is None and not options["nesterov"]:
        block.direction = block.momentum
        pairs.add_applied_(block.momentum.vector, options["momentum"], work.vector)
        return
    length = torch.linalg.vector_norm(work.vector) if options["normalize"] == "gradient" else 1.0
    pairs.apply_(work.vector)
    if options["normalize"] is not None:
        own = torch.linalg.vector_norm(work.vector)
        work.vector.mul_(length / own.clamp_min(torch.finfo(own.dtype).tiny))
    if block.momentum is not None:
        running = _present(block, block.momentum)
        torch._foreach_mul_(running, options["momentum"])
        torch._foreach_add_(running, _present(block, work))
        if options["nesterov"]:
            torch._foreach_add_(_present(block, work), running, alpha=options["momentum"])
        else:
            block.direction = block.momentum


def differences(block: Block) -> torch.Tensor:
    """Turn the earlier averages into s and y, and return their products with the pairs."""
    averages = _averages(block)
    torch.sub(averages.parameter.vector, averages.parameter_before.vector, out=averages.parameter_before.vector)
    torch.sub(averages.gradient.vector, averages.gradient_before.vector, out=averages.gradient_before.vector)
    return _pairs(block).products(averages.parameter_before.vector, averages.gradient_before.vector)


def take_pair(block: Block, options: Mapping[str, Any], numbers: NDArray[np.float64]) -> None:
    """Damp the pair of a block and keep it; the averages begin a new difference."""
    averages, pairs = _averages(block), _pairs(block)
    products = PairProducts(float(numbers[-2, 0]), float(numbers[-2, 1]), float(numbers[-1, 1]))
    if not np.isfinite(numbers).all():
        block.averages = None  # a gradient was not finite: begin afresh, with the pairs there are
        return
    if products.ss > 0:
        block.curvature = products.curvature
        _follow_scale(block, options, products)
        pair = damped_pair(products, options, block.scale or 1.0)
        if pair is not None and options["initial_inverse"] == "fixed":
            pair = replace(pair, gamma=options["initial_scale"])
        block.tau = None if pair is None else pair.tau
        if pair is not None:
            pairs.append(averages.parameter_before.vector, averages.gradient_before.vector, pair, numbers)
            block.n_pairs += 1
            _shorten(block, options)
    averages.parameter_before.vector.copy_(averages.parameter.vector)
    averages.gradient_before.vector.copy_(averages.gradient.vector)


def _follow_scale(block: Block, options: Mapping[str, Any], products: PairProducts) -> None:
    """Let κ follow ‖y‖/‖s‖, in the geometric mean, for a window relative to it."""
    if options["relative_window"] and products.yy > 0:
        now = (products.yy / products.ss) ** 0.5
        block.scale = now if block.scale is None else block.scale**SCALE_MEMORY * now ** (1 - SCALE_MEMORY)


def _shorten(block: Block, options: Mapping[str, Any]) -> None:
    """Drop the oldest pairs until memory and eigenvalues are within their bounds."""
    pairs = _pairs(block)
    if options["history_growth"] is not None:
        while len(pairs) > 1 + (block.n_pairs - 1) // options["history_growth"]:
            pairs.drop_oldest()
    if options["eigenvalue_bounds"] is None:
        return
    low, high = options["eigenvalue_bounds"]
    while len(pairs) and not (low <= pairs.eigenvalues[0] and pairs.eigenvalues[1] <= high):
        pairs.drop_oldest()
    if not len(pairs):
        pairs.use_scale(min(max(pairs.eigenvalues[0], low), high))


def on_host(tensors: Sequence[torch.Tensor]) -> list[NDArray[np.float64]]:
    """Return the tensors as arrays, with one wait for each device."""
    arrays: dict[int, NDArray[np.float64]] = {}
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    for indices in by_device.values():
        joined = torch.cat([tensors[index] for index in indices]).cpu().numpy()
        ends = np.cumsum([len(tensors[index]) for index in indices])[:-1]
        arrays.update(zip(indices, np.split(joined, ends), strict=True))
    return [arrays[index] for index in range(len(tensors))]


def share_direction(block: Block, *, owned: bool) -> None:
    """Let the work vector, which travels between ranks, be the direction."""
    if owned and block.present and block.direction is not block.work:
        _flat(block.work).vector.copy_(_flat(block.direction).vector)
    block.direction = block.work


def described(block: Block) -> dict[str, Any]:
    """Return what the inverse Hessian of a block is, in plain numbers."""
    pairs = _pairs(block)
    return {
        "name": block.name,
        "n_params": block.n_params,
        "n_pairs": len(pairs),
        "curvature": block.curvature,
        "tau": block.tau,
        "scale": block.scale,
        "gamma": pairs.gamma,
        "eigenvalues": pairs.eigenvalues,
    }


def moving(block: Block) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters of a block that move in this step, and their directions."""
    return [block.members[index].parameter for index in block.present], _present(block, block.direction)


def _present(block: Block, flat: Flat | None) -> list[torch.Tensor]:
    """Return their views of a flat vector."""
    return [_flat(flat).views[index] for index in block.present]


def _flat(flat: Flat | None) -> Flat:
    assert flat is not None
    return flat


def _pairs(block: Block) -> CurvaturePairs:
    assert block.pairs is not None  # this rank owns the block
    return block.pairs


def _averages(block: Block) -> Averages:
    assert block.averages is not None
    return block.averages
