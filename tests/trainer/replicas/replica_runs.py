"""Runs replicas in many ways, and prints what a test compares.

`replica_runs.py buckets FOLDER WAY:RANKS...` trains DDP whole and begun again, with a new model, wrapper,
optimizer and Checkpointer, and prints where the two differ. `proved FOLDER STEPS [forget]` prints what a
resume has proved.

`replica_runs.py drift FOLDER NAME:STEPS:DRIFTS_AFTER:HOW:RANKS...` lets replicas drift apart, one run after
the other, NAME that of its folder. HOW: "local" (no averaging of gradients any more, as in local SGD),
"element" (one rank changes some elements of one parameter), "hidden" (as local, and nobody compares while it
trains).

`replica_runs.py FOLDER KIND STEPS` runs a script whose ranks are not alike, or whose optimizer is spread over
them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from tiercheck import Checkpointer
from tiercheck.trainer.backends.backend import RestoreError
from tiercheck.trainer.backends.folder_backend import FolderBackend
from tiercheck.trainer.proof.state_hash import fingerprints
from tiercheck.trainer.replicas.arithmetic import BucketLayout
from tiercheck.trainer.replicas.equality import Equality
from tiercheck.trainer.state.capture import take_inventory

STEPS, STOPS = 7, (1, 2, 4)
WIDTH = 24
THAWED = 2
"""Steps after which a group is added."""


@contextlib.contextmanager
def warnings_heard() -> Iterator[list[str]]:
    """What TierCheck tells a person meanwhile."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tiercheck").addHandler(handler)
    yield heard
    logging.getLogger("tiercheck").removeHandler(handler)


def groups(folder: Path, runs: list[str]) -> Iterator[tuple[int, str]]:
    """Each run of which this process is a rank, in a process group of the run's own. A run ends with how many
    ranks it has."""
    number = int(os.environ["RANK"])
    for index, run in enumerate(runs):
        ranks = int(run.rpartition(":")[2])
        if number < ranks:
            store = f"file://{folder}/store-{index}"
            dist.init_process_group("gloo", init_method=store, rank=number, world_size=ranks)
            yield index, run
            dist.destroy_process_group()


# In buckets.


class Block(nn.Module):
    """Makes its layers in another order than it uses them."""

    def __init__(self, kind: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(WIDTH, WIDTH, dtype=kind), nn.Linear(WIDTH, WIDTH, dtype=kind)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(torch.relu(self.first(x.to(self.first.weight.dtype)))).to(x.dtype)


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH, sparse=way == "sparse")
        self.unused = nn.Linear(WIDTH, 3) if way in ("find_unused_parameters", "static_graph") else None
        self.blocks = nn.Sequential(
            *(Block(torch.float64 if way == "dtypes" and n % 2 else torch.float32) for n in range(4))
        )

    def forward(self, words: Tensor) -> Tensor:
        return self.blocks(self.words(words))


class Counted:
    """A hook's state, in slots as torch's own ones."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.calls += 1
        return default_hooks.allreduce_hook(None, bucket)


OPTIONS: dict[str, dict[str, Any]] = {
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "frozen on the way": {"find_unused_parameters": True},
    "frozen before restore": {"static_graph": True},
}
HOOKS: dict[str, Callable[[DistributedDataParallel], None]] = {
    "hook before": lambda wrapped: wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "counting hook": lambda wrapped: wrapped.register_comm_hook(
        Counted(), lambda state, bucket: state.reduce(bucket)
    ),
    "built-in hook": lambda wrapped: wrapped._register_builtin_comm_hook(
        dist.BuiltinCommHookType.FP16_COMPRESS
    ),
}


class Training:
    """One process's life, from its first step to its last."""

    def __init__(self, way: str, folder: Path, every: int) -> None:
        self.way = way
        torch.manual_seed(0)
        options = {"bucket_cap_mb": 0.004, **OPTIONS.get(way, {})}
        if way == "other buckets" and folder.exists():
            options["bucket_cap_mb"] = 0.01
        self.parts = [
            DistributedDataParallel(Net(way), **options) for _ in range(2 if way == "two parts" else 1)
        ]
        for part in self.parts:
            HOOKS.get(way, lambda _: None)(part)
        model = nn.ModuleList(self.parts) if way == "two parts" else self.parts[0]
        make: Any = torch.optim.SGD if way == "sparse" else torch.optim.AdamW
        trained = list(model.parameters())
        self.optimizer = (
            ZeroRedundancyOptimizer(trained, make, lr=1e-2) if way == "ZeRO" else make(trained, lr=1e-2)
        )
        self.model = model
        self.checkpointer = Checkpointer(model, self.optimizer, folder=folder, every=every, keep=STEPS)
        if way == "frozen before restore":
            self._freeze()
        self.first = self.checkpointer.restore()
        if way == "hook after restore":
            HOOKS["hook before"](self.parts[0])

    def _freeze(self) -> None:
        for parameter in self.parts[0].module.blocks[1].parameters():
            parameter.requires_grad_(False)

    def train(self, last: int) -> list[str]:
        """What identifies the parameters after each step."""
        found = []
        for step in range(self.first + 1, last + 1):
            if self.way == "frozen on the way" and step == 4:
                self._freeze()
            self.optimizer.zero_grad()
            for number, part in enumerate(self.parts):
                if number and step < 3:
                    continue  # begins to be trained later
                for micro in range(2 if self.way == "accumulated" else 1):
                    with (
                        part.no_sync()
                        if self.way == "accumulated" and not micro
                        else contextlib.nullcontext()
                    ):
                        chance = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
                        words = torch.randint(0, 50, (8,), generator=chance)
                        (part(words) - torch.randn(WIDTH, generator=chance)).square().mean().backward()
            self.optimizer.step()
            self.checkpointer.step()
            self.checkpointer.wait()
            found.append("".join(fingerprints([each.detach() for each in self.model.parameters()])))
        self.checkpointer.close()
        return found


def differing(way: str, folder: Path) -> dict[int, list[int]]:
    """By the step that a run was stopped after: the steps in which it then differed from a whole one."""
    whole = Training(way, folder / "whole", 1).train(STEPS)
    own = f"rank-{dist.get_rank()}-of-{dist.get_world_size()}"
    found = {}
    for stop in STOPS:

        def made_later(_: str, names: list[str], stop: int = stop) -> list[str]:
            return [name for name in names if int(name[:12]) > stop]

        shutil.copytree(folder / "whole" / own, folder / str(stop) / own, ignore=made_later)
        dist.barrier()
        again = Training(way, folder / str(stop), STEPS)
        assert again.first == stop
        states = again.train(STEPS)
        found[stop] = [
            step for step in range(stop + 1, STEPS + 1) if states[step - stop - 1] != whole[step - 1]
        ]
    return found


def train_proved(folder: Path, steps: int, forget: bool) -> None:
    """Rank 0 says each step, each rank what its resume has proved. `forget`: the layout of the buckets is not
    put back."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    FolderBackend.report = lambda _, each: (  # type: ignore[method-assign]
        each.op == "resume" and say(resumed=each.exact.value, message=each.message)
    )
    if forget:
        BucketLayout.put_back = lambda *_: None  # type: ignore[method-assign]
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(8)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpointer = Checkpointer(model, optimizer, folder=folder, every=4)
    for step in range(checkpointer.restore(), steps):
        drawn = torch.Generator().manual_seed(1000 * step + rank)
        loss = model(torch.randn(16, 64, generator=drawn)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpointer.step(loss)
        checkpointer.wait()
        dist.barrier()
        if rank == 0:
            say(step=step + 1)
    checkpointer.close()
    sys.stdout.flush()
    os._exit(0)


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


# That drift apart.


def drift(folder: Path, steps: int, drifts_after: int, how: str) -> dict[str, object]:
    rank = dist.get_rank()
    judge = Equality.judge
    if how == "hidden":
        Equality.judge = lambda *_: None  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 64))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inner = model.module

    def state() -> list[str]:
        return fingerprints([entry.tensor for entry in take_inventory(inner, [optimizer]).entries])

    said: dict[str, object] = {"refused": ""}
    checkpointer = Checkpointer(model, optimizer, folder=folder, every=1, keep=20)
    try:
        first = said["first"] = checkpointer.restore()
    except RestoreError as error:
        first, steps, said["refused"] = 0, 0, str(error)
    said["restored"] = state()
    for step in range(first + 1, steps + 1):
        drifting = step > drifts_after
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        (inner if drifting and how != "element" else model)(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        if drifting and how == "element" and rank == 1:
            with torch.no_grad():
                inner[0].weight.view(-1)[::50] += 1e-3
        checkpointer.step()
        checkpointer.wait()
        dist.barrier()
    said["end"] = state()
    checkpointer.close()
    Equality.judge = judge  # type: ignore[method-assign]
    said |= {"captured": checkpointer.captured, "skipped": checkpointer.skipped}
    said["whole"] = checkpointer._trained.shares.whole
    return said


# Whose ranks are not alike.


def experts(number: int) -> tuple[nn.Module, Optimizer, Callable[[int], Tensor]]:
    """Each rank has experts of its own under the same names; the rest is averaged by hand."""
    torch.manual_seed(0)
    shared = nn.Linear(WIDTH, WIDTH)
    torch.manual_seed(50 + number)
    model = nn.ModuleDict({"shared": shared, "experts": nn.ModuleList([nn.Linear(WIDTH, WIDTH)])})
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def update(step: int) -> Tensor:
        loss: Tensor = model["experts"][0](shared(torch.randn(4, WIDTH))).square().mean()  # type: ignore[index]
        loss.backward()
        for parameter in shared.parameters():
            dist.all_reduce(parameter.grad)
        return loss

    return model, optimizer, update


def alike(number: int) -> tuple[nn.Module, Optimizer, Callable[[int], Tensor]]:
    """All is averaged by hand, but for the statistics of batch norm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def update(step: int) -> Tensor:
        loss: Tensor = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return loss

    return model, optimizer, update


def zero(number: int) -> tuple[nn.Module, Optimizer, Callable[[int], Tensor]]:
    """Layers are thawed on the way, and thawed once more by a script that was restored later."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model = DistributedDataParallel(layers)
    optimizer = ZeroRedundancyOptimizer(layers[0].parameters(), AdamW, lr=1e-2)
    done = []

    def update(step: int) -> Tensor:
        if step >= THAWED and not done:
            done.append(optimizer.add_param_group({"params": layers[1:].parameters(), "lr": 1e-3}))
        loss: Tensor = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        return loss

    return model, optimizer, update


def train_unlike(folder: Path, kind: str, steps: int) -> None:
    dist.init_process_group("gloo")
    number = dist.get_rank()
    model, optimizer, update = {"experts": experts, "alike": alike, "zero": zero}[kind](number)
    losses = {}
    with Checkpointer(model, optimizer, folder=folder / "checkpoints", every=1) as checkpointer:
        try:
            first = checkpointer.restore()
        except ValueError as error:
            print(json.dumps({"refused": str(error)}), flush=True)
            return
        for step in range(first, steps):
            torch.manual_seed(10 * step + number)
            optimizer.zero_grad()
            loss = update(step)
            optimizer.step()
            checkpointer.step(loss)
            checkpointer.wait()
            losses[step + 1] = float(loss.detach()).hex()
    dist.barrier()
    groups = [[group["lr"], len(group["params"])] for group in optimizer.param_groups]
    print(json.dumps({"first": first, "losses": losses, "groups": groups}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    how, *rest = sys.argv[1:]
    if how == "buckets":
        torch.set_num_threads(1)
        said = {}
        for _, run in groups(Path(rest[0]), rest[1:]):
            with warnings_heard() as heard:
                found = differing(run.partition(":")[0], Path(rest[0]) / run)
            said[run] = {"differing": found, "warnings": heard}
        print(json.dumps(said), flush=True)
    elif how == "drift":
        for index, run in groups(Path(rest[0]), rest[1:]):
            name, steps, drifts_after, how, _ = run.split(":")
            with warnings_heard() as heard:
                drifted = drift(Path(rest[0]) / name, int(steps), int(drifts_after), how)
            print(json.dumps({"run": index, **drifted, "warnings": heard}), flush=True)
    elif how == "proved":
        train_proved(Path(rest[0]), int(rest[1]), "forget" in rest)
    else:
        train_unlike(Path(how), rest[0], int(rest[1]))
