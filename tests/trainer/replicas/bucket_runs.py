"""Trains DDP in many ways, whole and begun again, and prints where the two differ.

`torchrun bucket_runs.py FOLDER WAY:RANKS...`. "Begun again" is with a new model, wrapper, optimizer and
Checkpointer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tiercheck import Checkpointer
from tiercheck.trainer.proof.state_hash import fingerprints

STEPS, STOPS = 7, (1, 2, 4)
WIDTH = 24


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
    """A hook's state, as PowerSGD has one."""

    calls = 0

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


def main(number: int, folder: Path, runs: list[str]) -> None:
    torch.set_num_threads(1)
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tiercheck").addHandler(handler)
    said = {}
    for run in runs:
        way, _, ranks = run.partition(":")
        if number < int(ranks):
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store {run}", rank=number, world_size=int(ranks)
            )
            warnings.clear()
            said[run] = {"differing": differing(way, folder / run), "warnings": [*warnings]}
            dist.destroy_process_group()
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(int(os.environ["RANK"]), Path(sys.argv[1]), sys.argv[2:])
