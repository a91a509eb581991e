"""MLBFGS: momentum-based L-BFGS with a block-wise Hessian, for training on mini-batches and on several processes.

For each block of parameters θ with gradient g of the batch, at every step::

    P ← β P + (1 − β) θ,    G ← β G + (1 − β) g            (one β, one start: P = θ, G = g at the first step)

every T steps::

    s = P − P',  y = G − G',  (P', G') ← (P, G),           a curvature pair (s, ŷ), ŷ = τ y + (1 − τ) κ s by damping

and every step, H the L-BFGS inverse Hessian of the last `history_size` pairs::

    d = H g,    v ← m v + d,    θ ← (1 − η λ) θ − η v.

Averages of parameters and gradients with the same weights keep y = A s on a quadratic with Hessian A, whatever the
steps were, while the variance of the noise of g falls by (1 − β)/(1 + β). With two different β, as in the released code
of the paper, y = A s does not hold.

From the paper (Niu and others, 2023): the averages, a pair every T steps, the window damping, H by blocks, blocks
spread over processes. From SdLBFGS (Wang and others, 2017): damping="powell". From multi-batch L-BFGS (Berahas,
Nocedal, Takáč, 2016): pairs="overlap". After MB-AM (Zocco, McLoone, 2020): a memory that grows. Ours: the window
relative to a running scale κ, the compact form with exact eigenvalues, their bounds, sums sent to owners only.

Cost of a step for n parameters and k pairs: 8 k n + 17 n flops, W (2k, n) read twice. Memory: 4 n + 2 n h (h is
history_size) + n for momentum, divided by the ranks, and n for work on each. A step sends n numbers to owners, n back.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from lmfit_gpu.distributed import ranks_of
from lmfit_gpu.optim.block_optimizer import BlockOptimizer
from lmfit_gpu.optim.block_steps import (
    average,
    collect,
    described,
    differences,
    direct,
    moving,
    on_host,
    remember,
    share_direction,
    take_pair,
)
from lmfit_gpu.optim.mlbfgs_options import checked_options, named_groups
from lmfit_gpu.optim.parameter_blocks import Block

__all__ = ["MLBFGS"]

Closure = Callable[[], Any]
Groups = list[tuple[dict[str, Any], list[Block]]]  # options and blocks of each param group


class MLBFGS(BlockOptimizer):
    """Train by momentum-based L-BFGS with a Hessian approximated block by block.

    A `torch.optim.Optimizer`: schedulers, closures, hooks, GradScaler and DistributedDataParallel work with it. All
    options but `params`, `process_group` and `average_gradients` may be given for each param group.

    Parameters
    ----------
    params : Module, or iterable of Tensor, of (name, Tensor) or of param groups
        Dense, float32 or float64. A module stands for its named parameters that are trained.
    lr : float, default 0.05
        η. With initial_inverse="fixed" it is the learning rate of SGD with the same momentum; steps along flat
        directions grow by up to 1/σ_L.
    beta : float, optional
        Weight of the past in the averages, in [0, 1). None: 0.98 (0 with pairs="overlap", which takes no averages).
    momentum : float, default 0.9
        Of the directions, as in torch's SGD.
    nesterov : bool, default False
        Move by d + m v instead of v, as in torch's SGD.
    update_every : int, default 30
        T, the steps between pairs.
    history_size : int, default 5
        Most pairs kept for each block. Fixed from the first step on.
    history_growth : int, optional
        The memory begins with one pair and grows by one after each `history_growth` pairs.
    blocks : {"model", "module", "tensor"}, optional
        What a block is: all tensors of the param group, the tensors of one module, one tensor. Modules are told by
        names: give the module or `named_parameters()`. Tensors without names: one with one axis joins the block before
        it when it is as long as the first axis of the tensor that began it, as a bias is. None: "model" on one process,
        "module", the paper's, with a process group, where one block would leave nothing to divide.
    damping : {"window", "powell", None}, default "window"
        See `lmfit_gpu.optim.pair_damping`. None: plain stochastic L-BFGS.
    curvature_window : (float, float), optional
        σ_L < 1 < σ_H, default (0.1, 10); for "powell" bounds of B₀, default (0.01, inf).
    tau : float, optional
        τ₀ in (0, 1], for "window", default 1.
    relative_window : bool, default False
        The window is [σ_L κ, σ_H κ], κ a running ratio of Σ⟨s,y⟩ to Σ⟨s,s⟩ for each block.
    initial_inverse : {"fixed", "pair"}, optional
        H₀ = initial_scale · I, or, the paper's, ⟨s,ŷ⟩/⟨ŷ,ŷ⟩ · I of the newest pair. None: "fixed" for "window", else
        "pair".
    initial_scale : float, default 1
        H before the first pair: SGD with momentum.
    eigenvalue_bounds : (float, float), optional
        Of H; τ is halved, then a pair left out, to keep them. None: [1/(2 κ σ_H), 2/(κ σ_L)] for "window", none else.
    normalize : {None, "gradient", "unit"}
        Length of the direction of a block: that of its gradient, or 1.
    pairs : {"averages", "overlap"}, default "averages"
        "overlap", multi-batch L-BFGS: y is the change of the gradient of rows that two batches share, from a second
        closure; every `update_every` steps.
    weight_decay : float, default 0
        λ, decoupled from the gradient.
    maximize : bool, default False
    process_group : torch.distributed.ProcessGroup, optional
        Gradients are averaged over its ranks, each block is owned by one rank, which keeps its memory and makes its
        direction. A missing gradient counts as zero. All ranks call `step` alike.
    average_gradients : bool, default True
        False: the gradients are the same on all ranks already, as DistributedDataParallel leaves them.

    Raises
    ------
    ValueError, TypeError
        For an option that is not allowed, parameters in another arithmetic, or a group that is not initialised.

    Notes
    -----
    A gradient that is not finite spoils parameters as it does with SGD (GradScaler skips such steps); the pairs there
    are stay, and averages begin afresh.

    References
    ----------
    Niu, Fabian, Lee, Soltanolkotabi, Avestimehr (2023), "mL-BFGS: A Momentum-based L-BFGS for Distributed Large-Scale
    Neural Network Optimization", TMLR, arXiv 2307.13744.
    Wang, Ma, Goldfarb, Liu (2017), "Stochastic quasi-Newton methods for nonconvex stochastic optimization",
    DOI 10.1137/15M1053141.
    Berahas, Nocedal, Takáč (2016), "A multi-batch L-BFGS method for machine learning", NeurIPS, arXiv 1605.06049.
    Zocco, McLoone (2020), "An adaptive memory multi-batch L-BFGS algorithm for neural network training",
    arXiv 2012.07434.

    Examples
    --------
    >>> import torch
    >>> from lmfit_gpu import MLBFGS
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> x = torch.rand(256, 2)
    >>> y = torch.sin(3 * x).sum(1, keepdim=True)
    >>> optimizer = MLBFGS(model, lr=0.1)
    >>> for step in range(400):
    ...     optimizer.zero_grad()
    ...     loss = torch.nn.functional.mse_loss(model(x), y)
    ...     loss.backward()
    ...     _ = optimizer.step()
    >>> bool(loss < 0.01)
    True
    >>> [block["name"] for block in optimizer.inverse_hessians()]
    ['0.weight to 2.bias']
    """

    def __init__(  # noqa: PLR0913
        self,
        params: Any,
        lr: float = 0.05,
        *,
        beta: float | None = None,
        momentum: float = 0.9,
        nesterov: bool = False,
        update_every: int = 30,
        history_size: int = 5,
        history_growth: int | None = None,
        blocks: str | None = None,
        damping: str | None = "window",
        curvature_window: tuple[float, float] | None = None,
        tau: float | None = None,
        relative_window: bool = False,
        initial_inverse: str | None = None,
        initial_scale: float = 1.0,
        eigenvalue_bounds: tuple[float, float] | None = None,
        normalize: str | None = None,
        pairs: str = "averages",
        weight_decay: float = 0.0,
        maximize: bool = False,
        process_group: Any = None,
        average_gradients: bool = True,
    ) -> None:
        ranks = ranks_of(process_group)
        if not isinstance(average_gradients, bool):
            raise TypeError(f"average_gradients: got {average_gradients!r}; True or False is expected")
        defaults = {
            "lr": lr,
            "beta": beta,
            "momentum": momentum,
            "nesterov": nesterov,
            "update_every": update_every,
            "history_size": history_size,
            "history_growth": history_growth,
            "blocks": blocks or ("model" if ranks is None else "module"),
            "damping": damping,
            "curvature_window": curvature_window,
            "tau": tau,
            "relative_window": relative_window,
            "initial_inverse": initial_inverse,
            "initial_scale": initial_scale,
            "eigenvalue_bounds": eigenvalue_bounds,
            "normalize": normalize,
            "pairs": pairs,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        checked_options(defaults)
        super().__init__(named_groups(params), defaults, ranks, average_gradients)
        self._step_supports_amp_scaling = ranks is not None  # what GradScaler asks for, see _overflow

    @torch.no_grad()
    def step(self, closure: Closure | None = None, overlap: Closure | None = None) -> Any:
        """Take one step.

        Parameters
        ----------
        closure : callable, optional
            Clears the gradients, evaluates the loss of the batch, calls backward and returns the loss. Called once.
        overlap : callable, optional
            Of the same kind, on rows that this batch shares with the next; for pairs="overlap". Called before and after
            the step where a pair is due; `closure` itself may be given: all rows of the batch (one call less).

        Returns
        -------
        loss : object or None
            What `closure` returned, before the step.

        Raises
        ------
        ValueError
            For a sparse gradient, or a missing closure.
        """
        if self._overflow():
            return None
        groups = list(zip(self.param_groups, self._blocks(), strict=True))
        twice = self._overlap_is_due(closure, overlap)
        if twice and overlap is not closure:
            self._evaluate(groups, overlap)
            self._remember_overlap(groups, before=True)
        loss = self._evaluate(groups, closure)
        if twice and overlap is closure:
            self._remember_overlap(groups, before=True)
        for group, block in self._owned(groups, "averages"):
            average(block, group["beta"])
        self._take_pairs(groups, "averages")
        self._direct(groups)
        self._move(groups)
        if twice:
            self._evaluate(groups, overlap)
            self._remember_overlap(groups, before=False)
            self._take_pairs(groups, "overlap")
        if any(group["n_steps"] % group["update_every"] == 0 for group in self.param_groups):
            self._write_state()  # torch's checkpoints take an empty state for an optimizer that has not begun
        for group in self.param_groups:
            group["n_steps"] += 1
        return loss

    def inverse_hessians(self) -> list[dict[str, Any]]:
        """Return for each block that this rank owns what H is.

        Returns
        -------
        list of dict
            `name`, `n_params`, `n_pairs` (now in memory), `curvature` (⟨s,y⟩/⟨s,s⟩ of the newest pair before damping),
            `tau` (its damping; None where it was left out), `scale` (κ), `gamma` (H₀ = gamma I) and `eigenvalues`
            (smallest, largest of H).
        """
        return [described(block) for block in self._all_blocks() if self._owns(block)]

    def _owned(self, groups: Groups, source: str | None = None) -> Iterator[tuple[dict[str, Any], Block]]:
        """Yield the blocks of this rank that have a gradient, with their options; those with pairs of one source."""
        for group, blocks in groups:
            for block in blocks:
                if self._owns(block) and block.present and source in (None, group["pairs"]):
                    yield group, block

    def _overlap_is_due(self, closure: Closure | None, overlap: Closure | None) -> bool:
        """Return whether the gradients of the overlap are needed in this step, the same on all ranks."""
        groups = [group for group in self.param_groups if group["pairs"] == "overlap"]
        if groups and (closure is None or overlap is None):
            raise ValueError("step: with pairs='overlap' a closure, and one for the overlap, are expected")
        if not groups and overlap is not None:
            raise ValueError("overlap: is for pairs='overlap', this optimizer has pairs='averages'")
        return any(group["n_steps"] % group["update_every"] == 0 for group in groups)

    def _evaluate(self, groups: Groups, closure: Closure | None) -> Any:
        """Call a closure, put the gradients into the work vectors, with a process group their mean over ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._ranks is not None and not self._ranks_agree:
            self._check_ranks()
        for group, blocks in groups:
            for block in blocks:
                collect(block, maximize=group["maximize"], missing_is_zero=self._ranks is not None)
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            for pieces in self._vectors:
                torch._foreach_div_(pieces, float(scale))
        if self._ranks is not None and self._average_gradients:
            for pieces in self._vectors:
                self._ranks.sum_to_owners(pieces)
                pieces[self._ranks.rank].div_(self._ranks.size)
        return loss

    def _remember_overlap(self, groups: Groups, *, before: bool) -> None:
        for _, block in self._owned(groups, "overlap"):
            remember(block, before=before)

    def _take_pairs(self, groups: Groups, source: str) -> None:
        """Make a curvature pair of each block where one is due. The one place that waits for the device."""
        due = [
            (group, block)
            for group, block in self._owned(groups, source)
            if group["n_steps"] % group["update_every"] == 0 and (source == "overlap" or group["n_steps"] > 0)
        ]
        products = on_host([differences(block) for _, block in due])
        for (group, block), numbers in zip(due, products, strict=True):
            take_pair(block, group, numbers)

    def _direct(self, groups: Groups) -> None:
        """Turn gradients into directions, in the arithmetic of the parameters where step is called under autocast."""
        with ExitStack() as stack:
            for kind in {piece.device.type for pieces in self._vectors for piece in pieces}:
                if torch.amp.is_autocast_available(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            for group, block in self._owned(groups):
                direct(block, group)

    def _move(self, groups: Groups) -> None:
        """Send the directions to all ranks and move the parameters."""
        if self._ranks is not None:
            for block in self._all_blocks():
                share_direction(block, owned=self._owns(block))
            for pieces in self._vectors:
                self._ranks.send_from_owners(pieces)
        for group, blocks in groups:
            moves = [moving(block) for block in blocks if block.present]
            if not moves:
                continue
            theta, directions = ([tensor for move in moves for tensor in move[part]] for part in (0, 1))
            if group["weight_decay"]:
                torch._foreach_mul_(theta, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(theta, directions, alpha=-group["lr"])

    def _overflow(self) -> bool:
        """Return whether GradScaler found a gradient that is not finite, on any rank: no rank steps then.

        GradScaler decides by the gradients of its own process whether to call `step`: ranks that step would wait for
        one that does not. With `_step_supports_amp_scaling` it calls always, and leaves here what it found and a scale
        that the gradients still have.
        """
        found = getattr(self, "found_inf", None)
        return self._ranks is not None and found is not None and bool(self._ranks.sum(found.reshape(1)) > 0)
