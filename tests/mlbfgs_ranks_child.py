"""Processes that train together with MLBFGS; test_mlbfgs_ranks.py and test_distributed.py read what they write.

python mlbfgs_ranks_child.py FOLDER

Imports once (seconds), then forks the ranks of one phase after the other (milliseconds). FOLDER/PHASE-RANK.jsonl gets a
line for each scenario: its name and what the rank found. `answers` runs the program once for all tests.

The work: 12 rows a step, each rank has its share of them, and the loss is their mean, so that the mean over ranks of
the gradients is the gradient of one process that has all rows.
"""

import contextlib
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock
from torch import nn

from lmfit_gpu import MLBFGS
from lmfit_gpu.distributed import Ranks, ranks_of

PHASES = {"one": 1, "two": 2, "three": 3, "one again": 1}  # of one process: without a process group
DEADLINE = 120  # s, for all phases; the imports come before
PATIENCE = timedelta(seconds=40)  # of a rank that waits for another
IN_PROCESSES = pytest.mark.skipif(not hasattr(os, "fork"), reason="the ranks are forked")
START = "import gc, runpy, sys; gc.disable(); runpy.run_path(sys.argv[1], run_name='__main__')"  # imports: 2 s less
N_ROWS, STEPS, HALF = 12, 7, 5  # pairs are due at steps 2, 4 and 6, and two are kept
OPTIONS = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "update_every": 2, "history_size": 2}
SCENARIOS: dict[str, tuple[Any, tuple[str, ...]]] = {}


@dataclass(frozen=True)
class World:
    """Where a scenario runs."""

    phase: str
    rank: int
    size: int
    folder: Path

    @property
    def group(self):
        return dist.group.WORLD if self.size > 1 else None

    def share(self, rows):
        return rows.chunk(self.size)[self.rank]


def scenario(*phases):
    """Make a function of a World a scenario of some phases; they run in the order of this file."""

    def added(function):
        SCENARIOS[function.__name__] = (function, phases)
        return function

    return added


class Network(nn.Module):
    """4 → 6 → 5 → 1, tanh; `last` says that the last row is among the rows, which one more layer sees alone."""

    def __init__(self, seed=0, first=torch.float64, extra=False):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 6, dtype=first)
        self.second = nn.Linear(6, 5, dtype=torch.float64)
        self.third = nn.Linear(5, 1, dtype=torch.float64)
        self.extra = nn.Linear(4, 1, dtype=torch.float64) if extra else None

    def forward(self, x, last=False):
        hidden = self.first(x.to(self.first.weight.dtype)).tanh().double()
        found = self.third(self.second(hidden).tanh())
        if last and self.extra is not None:
            found = torch.cat((found[:-1], found[-1:] + self.extra(x[-1:])))
        return found


def batch(step):
    """Return rows that differ a little from step to step: the curvatures stay near 1, and rounding is not amplified."""
    generator = torch.Generator().manual_seed(1000)
    x = torch.randn(N_ROWS, 4, generator=generator, dtype=torch.float64)
    x += 0.02 * torch.randn(N_ROWS, 4, generator=generator.manual_seed(1001 + step), dtype=torch.float64)
    return x, x.prod(dim=1, keepdim=True)


def numbers(model):
    return [number for p in model.parameters() for number in p.detach().flatten().tolist()]


def optimizer_of(world, model, **options):
    return MLBFGS(model, **{"process_group": world.group, **OPTIONS, **options})


def train(world, model, optimizer, steps=range(STEPS), whole=False):
    """Take steps, each rank on its share of the rows, or each on all (whole)."""
    overlaps = optimizer.param_groups[0]["pairs"] == "overlap"
    sign = -1 if optimizer.param_groups[0]["maximize"] else 1
    for step in steps:
        x, y = (rows if whole else world.share(rows) for rows in batch(step))

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = sign * (model(x, last=world.rank == world.size - 1) - y).square().mean()
            loss.backward()
            return loss

        def every_other(x=x, y=y):
            return closure(x[::2], y[::2])

        if overlaps:
            again = closure if optimizer.param_groups[0]["damping"] is None else every_other
            optimizer.step(closure, overlap=again)
        else:
            closure()
            optimizer.step()
    return optimizer


def found_by(model, optimizer):
    return {"parameters": numbers(model), "hessians": optimizer.inverse_hessians()}


def refusal(function, *arguments, **options):
    """Return the error that a call raises, as text."""
    try:
        function(*arguments, **options)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


@contextlib.contextmanager
def counted():
    """Count the numbers that collectives are given."""
    count = {"reduce": 0, "all_reduce": 0, "broadcast": 0}
    kept = {name: getattr(dist, name) for name in count}

    def counting(name):
        def call(tensor, *arguments, **options):
            count[name] += tensor.numel()
            return kept[name](tensor, *arguments, **options)

        return call

    for name in count:
        setattr(dist, name, counting(name))
    try:
        yield count
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


# Ranks ----------------------------------------------------------------------------------------------------------------


def exchanged(ranks):
    """Send pieces through a group; rank r has r + 1 everywhere."""
    mine = float(ranks.rank + 1)
    lengths = [0 if owner == 1 else owner + 2 for owner in range(ranks.size)]  # rank 1 owns nothing
    pieces = [torch.full((length,), mine, dtype=torch.float64) for length in lengths]
    ranks.sum_to_owners(pieces)
    summed = pieces[ranks.rank].tolist()
    ranks.send_from_owners(pieces)
    kept = {"grid": torch.arange(6.0).view(2, 3).T * mine, "number": ranks.rank, "none": None} if ranks.rank else {}
    received = [ranks.send_tensors(kept, owner, torch.device("cpu")) for owner in range(ranks.size)]
    return {
        "rank": ranks.rank,
        "size": ranks.size,
        "summed": summed,
        "sent": [piece.tolist() for piece in pieces],
        "sum": ranks.sum(torch.tensor([mine, 10 * mine])).tolist(),
        "gathered": ranks.gathered({"rank": ranks.rank}),
        "received": [{**part, "grid": part["grid"].tolist()} if part else {} for part in received],
    }


@scenario("two", "three")
def exchange(world):
    return exchanged(Ranks(world.group))


@scenario("three")
def exchange_in_a_subgroup(world):
    group = dist.new_group([0, 2])
    if world.rank == 1:
        return {
            "ranks_of": refusal(ranks_of, group),
            "MLBFGS": refusal(MLBFGS, Network(), process_group=group),
        }
    model = Network()
    part = World("two", world.rank // 2, 2, world.folder)
    optimizer = train(part, model, MLBFGS(model, **OPTIONS, process_group=group))
    full = optimizer.full_state_dict(to=1)
    return {**exchanged(ranks_of(group)), "parameters": numbers(model), "full": sorted(full.get("state", {}))}


@scenario("two")
def no_group(world):
    return [refusal(ranks_of, wrong) for wrong in ("gloo", 0, True, [0, 1])]


# One process and several ----------------------------------------------------------------------------------------------


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of the network, and of the optimizer
    "module": ({}, {}),
    "two dtypes": (
        {"first": torch.float32},
        {"blocks": "model", "damping": "powell", "eigenvalue_bounds": (1e-3, 1e3)},
    ),
    "a gradient on one rank": (
        {"extra": True},
        {"blocks": "tensor", "relative_window": True, "history_growth": 2, "nesterov": True},
    ),
    "overlap": ({}, {"pairs": "overlap", "damping": None}),
}


@scenario("one", "two", "three")
def variants(world):
    found = {}
    for name, (of_network, of_optimizer) in VARIANTS.items():
        model = Network(**of_network)
        found[name] = found_by(model, train(world, model, optimizer_of(world, model, **of_optimizer)))
        found[name]["missing"] = [n for n, p in model.named_parameters() if p.grad is None]
    return found


@scenario("one", "two", "three")
def groups(world):
    model = Network()
    named = list(model.named_parameters())
    of_kinds = [
        {"params": named[:4], "lr": 0.03, "pairs": "overlap", "normalize": "gradient"},
        {"params": named[4:], "blocks": "tensor", "update_every": 3, "weight_decay": 0.0, "momentum": 0.0},
    ]
    return found_by(model, train(world, model, optimizer_of(world, of_kinds, maximize=True)))


@scenario("two", "three")
def data_parallel(world):
    found = {}
    kinds = [("module", True), ("module", False), ("overlap", False)]
    for name, average in kinds if world.size == 2 else kinds[:2]:
        model = Network()
        parallel = nn.parallel.DistributedDataParallel(model)
        optimizer = optimizer_of(world, model, **VARIANTS[name][1], average_gradients=average)
        found[f"{name}, {average}"] = found_by(model, train(world, parallel, optimizer))
    return found


# Memory ---------------------------------------------------------------------------------------------------------------


def storages(tensors):
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def alive():
    gc.collect()
    return storages(thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter))


@scenario("one", "two", "three")
def memory(world):
    ends = itertools.pairwise([20, 30, 25, 10, 15])
    model = nn.Sequential(*(nn.Linear(*of_layer, dtype=torch.float64) for of_layer in ends))
    before = alive()
    optimizer = MLBFGS(model, lr=1e-3, update_every=1, history_size=3, process_group=world.group)
    for _ in range(5):
        for p in model.parameters():
            p.grad = p.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"]
    of_state = storages(value for part in state.values() for value in part.values() if isinstance(value, torch.Tensor))
    now = alive()
    return {
        "state": sum(of_state.values()),
        "alive": sum(size for pointer, size in now.items() if pointer not in before),
        "blocks": [sum(p.numel() for p in layer.parameters()) for layer in model],
        "owned": [hessian["name"] for hessian in optimizer.inverse_hessians()],
    }


# Resuming -------------------------------------------------------------------------------------------------------------

MODES = {"mean": {"average_gradients": True}, "equal": {"average_gradients": False}}  # equal: all have all rows


def path_of(world, mode, size, part="full"):
    return world.folder / f"{mode} {size} {part}.pt"


def continued(world, mode, state, model_state):
    """Take the second half of the steps from a state; return the parameters."""
    model = Network(seed=5)
    model.load_state_dict(model_state)
    optimizer = optimizer_of(world, model, **MODES[mode])
    optimizer.load_state_dict(state)
    train(world, model, optimizer, range(HALF, STEPS), whole=mode == "equal")
    return found_by(model, optimizer)


def loaded(path):
    return torch.load(path, weights_only=True)


@scenario("one", "two", "three")
def run_and_save(world):
    found = {}
    for mode, options in MODES.items():
        model = Network()
        optimizer = optimizer_of(world, model, **options)
        train(world, model, optimizer, range(HALF), whole=mode == "equal")
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        full = optimizer.full_state_dict(to=world.size - 1)
        if full:
            torch.save((full, weights), path_of(world, mode, world.size))
        torch.save((optimizer.state_dict(), weights), path_of(world, mode, world.size, world.rank))
        with counted() as count:
            train(world, model, optimizer, range(HALF, STEPS), whole=mode == "equal")
        found[mode] = {**found_by(model, optimizer), "sent": count, "keeps": bool(full)}
        found[mode]["everywhere"] = summary(optimizer.full_state_dict())
    return found


def summary(state_dict):
    """Return the sum of each tensor in a state, and all that is not a tensor."""
    return {
        number: {key: float(v.sum()) if isinstance(v, torch.Tensor) else v for key, v in part.items()}
        for number, part in state_dict["state"].items()
    }


@scenario("two", "three", "one again")
def resume(world):
    """Go on from the full state of the phase before."""
    size = {"two": 1, "three": 2, "one again": 3}[world.phase]
    return {mode: continued(world, mode, *loaded(path_of(world, mode, size))) for mode in MODES}


@scenario("two", "three")
def resume_own_part(world):
    return {mode: continued(world, mode, *loaded(path_of(world, mode, world.size, world.rank))) for mode in MODES}


@scenario("two", "three", "one again")
def resume_other_part(world):
    """Load the part of another rank, or of another number of ranks; and go on after the error."""
    if world.size > 1:
        dist.barrier()  # the other has saved it
    model = Network()
    optimizer = train(world, model, optimizer_of(world, model), range(3))
    before = summary(optimizer.state_dict())
    other = path_of(world, "mean", 2, 1 - world.rank if world.size == 2 else 0)
    said = refusal(optimizer.load_state_dict, loaded(other)[0])
    same = summary(optimizer.state_dict()) == before
    train(world, model, optimizer, range(3, 5))
    return {"refusal": said, "same": same}


@scenario("two")
def load_only_own_part(world):
    """Count the bytes that torch casts to the dtype of the parameters while it takes up the state of all ranks."""
    optimizer = optimizer_of(world, Network().float())
    full, _ = loaded(path_of(world, "mean", 2))
    owned = sum(hessian["n_params"] for hessian in optimizer.inverse_hessians())  # lays out the blocks
    before, seen = alive(), []
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append(alive()))
    optimizer.load_state_dict(full)
    return {"bytes": sum(size for pointer, size in seen[0].items() if pointer not in before), "owned": owned}


# Errors ---------------------------------------------------------------------------------------------------------------


def refused_step(world, model, **options):
    optimizer = optimizer_of(world, model, **options)
    before = numbers(model)
    said = refusal(train, world, model, optimizer, range(1))
    return {"refusal": said, "moved": numbers(model) != before}


@scenario("two", "three")
def other_beginnings(world):
    """Begin one rank otherwise than the rest; afterwards the group still works."""
    odd = world.rank == world.size - 1
    wider = Network()
    if odd:
        wider.second, wider.third = nn.Linear(6, 7, dtype=torch.float64), nn.Linear(7, 1, dtype=torch.float64)
    swapped = Network()
    if odd:
        swapped.third.bias.data += 1e-13
    stepped = Network()
    stepped_optimizer = optimizer_of(world, stepped)
    if odd:
        stepped_optimizer.param_groups[0]["n_steps"] = 1
    same = Network()
    same.first.weight.data[0, 0] = float("nan")
    found = {
        "seed": refused_step(world, Network(seed=world.rank)),
        "shape": refused_step(world, wider),
        "one bit": refused_step(world, swapped),
        "lr": refused_step(world, Network(), lr=0.1 if odd else 0.2),
        "blocks": refused_step(world, Network(), blocks="tensor" if odd else "module"),
        "average_gradients": refused_step(world, Network(), average_gradients=odd),
        "n_steps": {"refusal": refusal(train, world, stepped, stepped_optimizer, range(1)), "moved": False},
        "nan everywhere": refused_step(world, same)["refusal"],
    }
    model = Network()
    train(world, model, optimizer_of(world, model), range(2))
    return {**found, "afterwards": numbers(model)}


@scenario("two", "three")
def a_group_added(world):
    """Add parameters after the first step that differ between ranks."""
    model, added = Network(), Network(seed=world.rank)
    optimizer = train(world, model, optimizer_of(world, model), range(2))
    optimizer.add_param_group({"params": list(added.named_parameters(prefix="added"))})
    return refusal(train, world, model, optimizer, range(2, 3))


@scenario("two", "three")
def a_sparse_gradient_on_one_rank(world):
    torch.manual_seed(0)
    model = nn.Embedding(5, 2, sparse=world.rank == world.size - 1, dtype=torch.float64)
    optimizer = optimizer_of(world, model)
    model(torch.tensor([1, 3])).sum().backward()
    said = refusal(optimizer.step)
    model.weight.grad = torch.ones(5, 2, dtype=torch.float64)  # of another model, all goes on
    return {"refusal": said, "again": refusal(optimizer.step), "parameters": numbers(model)}


@scenario("one", "two", "three")
def not_finite_on_one_rank(world):
    model = Network()
    optimizer = train(world, model, optimizer_of(world, model), range(5))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if world.rank == world.size - 1:
        model.second.weight.grad[0, 0] = float("nan")
    optimizer.step()
    return {"nan": [n != n for n in numbers(model)], "parameters": [0 if n != n else n for n in numbers(model)]}


@scenario("one", "two", "three")
def scaled_gradients(world):
    """GradScaler; at step 3 the gradient of the last rank overflows. One process leaves that step out, unscaled."""
    model = Network()
    optimizer = optimizer_of(world, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=world.size > 1)
    steps = 0
    for step in range(STEPS):
        overflows = step == 3
        if world.size == 1 and overflows:
            continue
        x, y = map(world.share, batch(step))
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean() * (float("inf") if overflows and world.rank == world.size - 1 else 1.0)
        scaler.scale(loss).backward()
        if step % 2 == 0:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        steps = optimizer.param_groups[0]["n_steps"]
    return {**found_by(model, optimizer), "scale": scaler.get_scale(), "n_steps": steps}


# The program ----------------------------------------------------------------------------------------------------------


def run_rank(phase, rank, folder):
    """Run the scenarios of a phase as one rank; stop at the first that fails, which others may wait for."""
    world = World(phase, rank, PHASES[phase], folder)
    warnings.simplefilter("error")
    if world.size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meet {phase}", rank=rank, world_size=world.size, timeout=PATIENCE
        )
    with (folder / f"{phase}-{rank}.jsonl").open("w") as out:
        for name, (function, phases) in SCENARIOS.items():
            if phase not in phases:
                continue
            began = time.process_time()
            try:
                line = {"name": name, "found": function(world)}
            except BaseException:  # noqa: BLE001  whatever it is, the test has to see it
                line = {"name": name, "failed": traceback.format_exc()}
            print(json.dumps({**line, "seconds": time.process_time() - began}), file=out, flush=True)
            if "failed" in line:
                return 1
    if world.size > 1:
        dist.destroy_process_group()
    return 0


def run_phase(phase, folder, deadline):
    """Fork the ranks of a phase; kill those that are not done at the deadline."""
    ranks = {}
    for rank in range(PHASES[phase]):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = run_rank(phase, rank, folder)
            finally:
                sys.stdout.flush()
                os._exit(status)
        ranks[pid] = rank
    while ranks and time.monotonic() < deadline:
        done = [pid for pid in ranks if os.waitpid(pid, os.WNOHANG)[0]]
        for pid in done:
            del ranks[pid]
        time.sleep(0.02)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main(folder):
    torch.set_num_threads(1)
    train(World("one", 0, 1, folder), model := Network(), MLBFGS(model), range(1))  # torch imports more at first use
    gc.enable()
    gc.freeze()  # what was imported is not looked at again, nor copied
    deadline = time.monotonic() + DEADLINE
    for phase in PHASES:
        run_phase(phase, folder, deadline)
    os._exit(0)  # to take the imported modules apart takes seconds


def answers(folder):
    """Return {phase: [{scenario: what rank r found}]} and what the program printed; it runs once for a folder."""
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):  # of two pytest workers the second waits
        if not (folder / "printed").exists():
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-c", START, str(Path(__file__)), str(folder)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3 * DEADLINE)
            (folder / "printed").write_text(done.stdout + done.stderr)
    found = {}
    for phase, size in PHASES.items():
        files = [folder / f"{phase}-{rank}.jsonl" for rank in range(size)]
        lines = [file.read_text().splitlines() if file.exists() else [] for file in files]
        found[phase] = [{line["name"]: line for line in map(json.loads, of_rank)} for of_rank in lines]
    return found, (folder / "printed").read_text()


class Answers:
    """What the scenarios found."""

    def __init__(self, folder):
        self.found, self.printed = answers(folder)

    def of(self, phase, name):
        """Return what each rank of a phase found; fail with what there is instead."""
        lines = [of_rank.get(name, {"failed": "nothing was written"}) for of_rank in self.found[phase]]
        failed = [f"{phase}, rank {rank}: {line['failed']}" for rank, line in enumerate(lines) if "failed" in line]
        if failed:
            pytest.fail("\n".join([f"scenario {name}", *failed, self.printed[-3000:]]), pytrace=False)
        return [line["found"] for line in lines]


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Return the answers; tests import this fixture, and share one run of the program."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    return Answers(shared / "mlbfgs_ranks")


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
