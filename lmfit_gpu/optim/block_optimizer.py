"""An optimizer whose memory lies in blocks of parameters, each on the rank that owns it: layout, state, resuming.

Blocks are laid out when they are first needed, and anew when parameters are added or a state is taken up, from the
state of torch's optimizers (a dict for each parameter), which is the only form in which their memory is saved.
"""

from collections import defaultdict
from typing import Any

import torch

from lmfit_gpu.distributed import Ranks
from lmfit_gpu.optim.block_state import read_block, write_block
from lmfit_gpu.optim.mlbfgs_options import check_loaded, checked_options, checked_parameters
from lmfit_gpu.optim.parameter_blocks import Block, Layout, Member, check_layout, grouped, laid_out

__all__ = ["BlockOptimizer"]


class BlockOptimizer(torch.optim.Optimizer):
    """Base of optimizers that keep a memory for each block of parameters.

    Parameters
    ----------
    params : iterable
        As torch's optimizers take it.
    defaults : dict
        Options of the param groups.
    ranks : Ranks or None
        Those that the blocks are divided over.
    average_gradients : bool
        Whether gradients are averaged over the ranks.
    """

    def __init__(self, params: Any, defaults: dict[str, Any], ranks: Ranks | None, average_gradients: bool) -> None:
        self._built: list[list[Block]] | None = None
        self._layouts: list[Layout] = []
        self._vectors: list[list[torch.Tensor]] = []
        self._ranks_agree = False
        self._ranks = ranks
        self._average_gradients = average_gradients
        super().__init__(params, defaults)

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
        super().load_state_dict(self._of_this_rank(state_dict))
        try:
            check_loaded(self.param_groups, self.defaults)
            self._lay_out()
        except (ValueError, TypeError):
            self.__setstate__(before)
            raise

    def _of_this_rank(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Leave out what other ranks own: torch would copy all of it to this device, where it may not fit."""
        kinds = [group["blocks"] for group in self.param_groups]
        if self._ranks is None or kinds != [group.get("blocks") for group in state_dict["param_groups"]]:
            return state_dict  # with other blocks the owners are other ranks, too
        mine = {member.number for block in self._all_blocks() if self._owns(block) for member in block.members}
        return {**state_dict, "state": {key: part for key, part in state_dict["state"].items() if key in mine}}

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
        self._built, self._vectors, self._ranks_agree = built, vectors, False
        self._layouts = [Layout.of(group) for group in self.param_groups]
        self._write_state()

    def _owns(self, block: Block) -> bool:
        return self._ranks is None or block.owner == self._ranks.rank

    def _write_state(self) -> None:
        for blocks in self._built or []:
            for block in blocks:
                if self._owns(block):
                    write_block(block, self.state)

    def _check_ranks(self) -> None:
        """Raise ValueError where ranks began otherwise: they would never meet, or wait for each other.

        The bits of a tensor are summed as whole numbers, which no order of summation changes.
        """
        assert self._ranks is not None
        parameters = [p for group in self.param_groups for p in group["params"]]
        whole = {4: torch.int32, 8: torch.int64}
        values = [(tuple(p.shape), int(p.detach().view(whole[p.element_size()]).sum())) for p in parameters]
        options = [{name: group.get(name) for name in (*self.defaults, "n_steps")} for group in self.param_groups]
        sparse = any(p.grad is not None and p.grad.layout != torch.strided for p in parameters)
        ranks = self._ranks.gathered((values, options, self._average_gradients, sparse))
        if any(other[0] != values for other in ranks):
            raise ValueError("params: they differ between ranks; send those of one rank to all, as DDP does, first")
        if any(other[1:3] != (options, self._average_gradients) for other in ranks):
            raise ValueError("params: options, average_gradients or steps taken differ between ranks; give the same")
        if not sparse and any(other[3] for other in ranks):
            raise ValueError("step: another rank has a sparse gradient; a dense one is expected")
        self._ranks_agree = not sparse
