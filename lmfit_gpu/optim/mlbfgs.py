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

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from lmfit_gpu.distributed import Ranks, ranks_of
from lmfit_gpu.optim.block_state import read_block, write_block
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
from lmfit_gpu.optim.mlbfgs_options import check_loaded, checked_options, checked_parameters, named_groups
from lmfit_gpu.optim.parameter_blocks import Block, Layout, Member, check_layout, grouped, laid_out

__all__ = ["MLBFGS"]

Closure = Callable[[], Any]
Groups = list[tuple[dict[str, Any], list[Block]]]  # options and blocks of each param group


class MLBFGS(torch.optim.Optimizer):
    """Momentum-based L-BFGS."""

    def __init__(  # noqa: PLR0913
        self,
        params: Any,
        lr: float = 0.1,
        *,
        beta: float | None = None,
        momentum: float = 0.9,
        nesterov: bool = False,
        update_every: int = 50,
        history_size: int = 10,
        history_growth: int | None = None,
        blocks: str = "module",
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
        self._built: list[list[Block]] | None = None
        self._layouts: list[Layout] = []
        self._vectors: list[list[torch.Tensor]] = []
        self._ranks_agree = False
        self._ranks: Ranks | None = ranks_of(process_group)
        self._average_gradients = average_gradients
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
            "blocks": blocks,
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
        super().__init__(named_groups(params), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; those that are not given are the optimizer's.

        Raises
        ------
        ValueError, TypeError
            For an option that is not allowed, or parameters that are not float32 or float64.
        """
        options = checked_options({**self.defaults, **{k: param_group[k] for k in self.defaults if k in param_group}})
        self._write_state()
        super().add_param_group(param_group)
        try:
            checked_parameters(self.param_groups[-1]["params"])
        except ValueError:
            self.param_groups.pop()
            raise
        self.param_groups[-1].update(options, n_steps=0)
        self._built = None

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

    def state_dict(self) -> dict[str, Any]:
        """Return the state: with a process group the part of this rank, which only ranks of that number can load.

        See Also
        --------
        full_state_dict : The state of all ranks.
        """
        self._write_state()
        state = super().state_dict()
        if self._ranks is not None:
            state["ranks"] = {"rank": self._ranks.rank, "size": self._ranks.size}
        return state

    def full_state_dict(self, to: int | None = None) -> dict[str, Any]:
        """Return the state of all ranks, on the CPU; any number of ranks can load it. Collective: all ranks call it.

        Parameters
        ----------
        to : int, optional
            The rank that keeps it; the others return an empty dict. None: all ranks.
        """
        state = self.state_dict()
        if self._ranks is None:
            return state
        del state["ranks"]
        whole: dict[int, dict[str, Any]] = {}
        for block in self._all_blocks():
            numbers = [member.number for member in block.members]
            for number in numbers:
                part = self._ranks.send_tensors(state["state"].get(number, {}), block.owner, block.like.device)
                if part and to in (None, self._ranks.rank):
                    whole[number] = part
        return {**state, "state": whole} if to in (None, self._ranks.rank) else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a state: of `full_state_dict`, or the part of this rank.

        Raises
        ------
        ValueError
            If it is the part of another rank, or of other parameters, blocks or another optimizer. Nothing has changed.
        """
        mine = None if self._ranks is None else {"rank": self._ranks.rank, "size": self._ranks.size}
        theirs = state_dict.get("ranks")
        if theirs is not None and theirs != mine:
            raise ValueError(
                f"state_dict: is the part of rank {theirs['rank']} of {theirs['size']}, this is "
                + (f"rank {mine['rank']} of {mine['size']}" if mine else "an optimizer without a process group")
                + "; full_state_dict() returns what any number of ranks can load"
            )
        self._write_state()
        before = {"state": self.state, "param_groups": self.param_groups}
        super().load_state_dict(state_dict)
        try:
            check_loaded(self.param_groups, self.defaults)
            self._lay_out()
        except (ValueError, TypeError):
            self.__setstate__(before)
            raise

    def inverse_hessians(self) -> list[dict[str, Any]]:
        """Return for each block that this rank owns what H is.

        Returns
        -------
        list of dict
            `name`, `n_params`, `n_pairs` (now in memory), `curvature` (⟨s,y⟩/⟨s,s⟩ of the newest pair before damping),
            `tau` (its damping), `scale` (κ), `gamma` (H₀ = gamma I) and `eigenvalues`
            (smallest, largest of H).
        """
        return [described(block) for block in self._all_blocks() if self._owns(block)]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and copy, which have no place for a process group."""
        if self._ranks is not None:
            raise TypeError("MLBFGS with a process group cannot be pickled or copied; full_state_dict() has its state")
        self._write_state()
        return {**super().__getstate__(), "_average_gradients": self._average_gradients}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take up a state of pickle or copy; blocks are laid out when they are needed."""
        super().__setstate__(state)
        self._built = None
        self.__dict__.setdefault("_ranks", None)

    def _blocks(self) -> list[list[Block]]:
        """Return the blocks of each param group, laid out if they are not."""
        if self._built is None:
            self._lay_out()
        assert self._built is not None
        for layout, group in zip(self._layouts, self.param_groups, strict=True):
            check_layout(layout, group)
        return self._built

    def _all_blocks(self) -> list[Block]:
        return [block for blocks in self._blocks() for block in blocks]

    def _lay_out(self) -> None:
        numbers = iter(range(sum(len(group["params"]) for group in self.param_groups)))
        built = []
        for group in self.param_groups:
            names = group.get("param_names", [None] * len(group["params"]))
            members = [Member(p, name, next(numbers)) for p, name in zip(group["params"], names, strict=True)]
            built.append([Block(of_block) for of_block in grouped(members, group["blocks"])])
        flat = [block for blocks in built for block in blocks]
        vectors = laid_out(flat, 1 if self._ranks is None else self._ranks.size)
        for group, blocks in zip(self.param_groups, built, strict=True):
            for block in blocks:
                if self._owns(block):
                    read_block(block, self.state, group)
        self.state = defaultdict(dict)
        self._built, self._vectors = built, vectors
        self._layouts = [Layout.of(group) for group in self.param_groups]
        self._write_state()

    def _owns(self, block: Block) -> bool:
        return self._ranks is None or block.owner == self._ranks.rank

    def _owned(self, groups: Groups, source: str | None = None) -> Iterator[tuple[dict[str, Any], Block]]:
        """Yield the blocks of this rank that have a gradient, with their options; those with pairs of one source."""
        for group, blocks in groups:
            for block in blocks:
                if self._owns(block) and block.present and source in (None, group["pairs"]):
                    yield group, block

    def _write_state(self) -> None:
        for blocks in self._built or []:
            for block in blocks:
                if self._owns(block):
                    write_block(block, self.state)

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

    def _check_ranks(self) -> None:
        """Raise ValueError where ranks began with other parameters: they would never meet."""
        assert self._ranks is not None
        parameters = [p.detach() for group in self.param_groups for p in group["params"]]
        sums = [(tuple(p.shape), float(p.double().sum()), float(p.double().square().sum())) for p in parameters]
        if any(other != sums for other in self._ranks.gathered(sums)):
            raise ValueError("params: they differ between ranks; send those of one rank to all, as DDP does, first")
        self._ranks_agree = True
