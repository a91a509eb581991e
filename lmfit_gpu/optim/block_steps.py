"""What a step does to one block: take its gradient, average, make a curvature pair, turn the gradient into a direction.

All that is element by element runs on the lists of the block's tensors at once (torch's foreach functions); the
products with pairs run on its flat vectors. Nothing here waits for a device but `on_host`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lmfit_gpu.optim.curvature_pairs import CurvaturePairs, Prospect
from lmfit_gpu.optim.pair_damping import PairProducts, damped_pair, weakened
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

MAX_HALVINGS = 8  # of τ, before a pair is left out
ROUNDING = 1e-9  # share by which an eigenvalue may miss its bound
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
        prospect = _bounded(block, options, products, numbers)
        block.tau = None if prospect is None else prospect.pair.tau
        if prospect is None:
            pairs.drop_oldest()  # else a full memory that lets no pair in would stay for ever
        else:
            pairs.append(averages.parameter_before.vector, averages.gradient_before.vector, prospect)
            block.n_pairs += 1
        while len(pairs) > _most_pairs(block, options):
            pairs.drop_oldest()
    averages.parameter_before.vector.copy_(averages.parameter.vector)
    averages.gradient_before.vector.copy_(averages.gradient.vector)


def _follow_scale(block: Block, options: Mapping[str, Any], products: PairProducts) -> None:
    """Let κ follow the running ratio Σ⟨s,y⟩/Σ⟨s,s⟩, for a window relative to it.

    Noise of either sign averages out of it, as it does not of a mean of ‖y‖/‖s‖. From one pair to the next κ changes by
    a factor of 2 at most: smaller steps make noise in y weigh more, which κ without a limit would follow to infinity.
    """
    if not options["relative_window"]:
        return
    before = block.scale_sums or (0.0, 0.0)
    block.scale_sums = (SCALE_MEMORY * before[0] + products.sy, SCALE_MEMORY * before[1] + products.ss)
    now = block.scale_sums[0] / block.scale_sums[1]
    if block.scale is None:
        block.scale = now if now > 0 else (products.yy / products.ss) ** 0.5 or None
    elif now > 0:
        block.scale = min(max(now, block.scale / 2), block.scale * 2)


def _bounded(
    block: Block, options: Mapping[str, Any], products: PairProducts, numbers: NDArray[np.float64]
) -> Prospect | None:
    """Return H with the damped pair, weakened until the eigenvalues are within their bounds, or None."""
    scale = block.scale or 1.0
    low, high = eigenvalue_bounds(options, scale)
    pair = damped_pair(products, options, scale)
    for _ in range(MAX_HALVINGS):
        if pair is None:
            return None
        gamma = options["initial_scale"] if options["initial_inverse"] == "fixed" else pair.gamma
        pair = replace(pair, gamma=min(max(gamma, low), high))
        prospect = _pairs(block).foreseen(pair, numbers)
        smallest, largest = prospect.eigenvalues
        if low * (1 - ROUNDING) <= smallest and largest <= high * (1 + ROUNDING):
            return prospect
        pair = weakened(pair, products)
    return None


def eigenvalue_bounds(options: Mapping[str, Any], scale: float) -> tuple[float, float]:
    """Return the bounds of the eigenvalues of H.

    Those given; for damping by a window by default [1/(2 κ σ_H), 2/(κ σ_L)], what the window allows along one step,
    with a factor of 2 for several; none for the other rules. A fixed H₀ is always within.
    """
    low, high = 0.0, math.inf
    if options["eigenvalue_bounds"] is not None:
        low, high = options["eigenvalue_bounds"]
    elif options["damping"] == "window":
        least, most = options["curvature_window"]
        low, high = 1 / (2 * scale * most), 2 / (scale * least)
    if options["initial_inverse"] == "fixed":
        low, high = min(low, options["initial_scale"]), max(high, options["initial_scale"])
    return low, high


def _most_pairs(block: Block, options: Mapping[str, Any]) -> int:
    """Return the pairs that the memory may hold, which may grow with those that were made."""
    growth = options["history_growth"]
    return _pairs(block).capacity if growth is None else 1 + (block.n_pairs - 1) // growth


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
