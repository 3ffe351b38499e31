"""Runs replicas that drift apart on purpose, one run after the other.

`torchrun drifting_script.py FOLDER RUN...`

RUN is NAME:STEPS:DRIFTS_AFTER:HOW:RANKS, NAME that of its folder. HOW: "local" (no averaging of gradients any
more, as in local SGD), "element" (one rank changes some elements of one parameter), "hidden" (as local, and
nobody compares while it trains). Prints what a test compares.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tiercheck import Checkpointer
from tiercheck.trainer.backends.backend import RestoreError
from tiercheck.trainer.proof.state_hash import fingerprints
from tiercheck.trainer.replicas.equality import Equality
from tiercheck.trainer.state.capture import take_inventory


def drift(folder: Path, steps: int, drifts_after: int, how: str) -> dict[str, object]:
    rank = dist.get_rank()
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tiercheck").addHandler(handler)
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
    logging.getLogger("tiercheck").removeHandler(handler)
    said |= {"captured": checkpointer.captured, "skipped": checkpointer.skipped, "warnings": warnings}
    said["whole"] = checkpointer._trained.shares.whole
    return said


def main(number: int, folder: Path, runs: list[str]) -> None:
    for index, text in enumerate(runs):
        name, steps, drifts_after, how, ranks = text.split(":")
        if number >= int(ranks):
            continue
        store = f"file://{folder}/store-{index}"
        dist.init_process_group("gloo", init_method=store, rank=number, world_size=int(ranks))
        said = drift(folder / name, int(steps), int(drifts_after), how)
        print(json.dumps({"run": index, **said}), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), Path(sys.argv[1]), sys.argv[2:])
