"""One process of a run that changes its mesh again and again: `python mesh_changes.py NUMBER FOLDER KIND:RANKS...`.

Prints, for each stage, what the whole state was after the restore and at the end, tensor by tensor as far as this rank knows it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sharded_script import make_model, make_optimizer, trainer, wrap
from torch import nn
from torch.optim import Optimizer

from tiercheck import Checkpointer
from tiercheck.trainer.capture import take_inventory
from tiercheck.trainer.partitioned import Partitions
from tiercheck.trainer.state_hash import fingerprints
from tiercheck.trainer.wrapped import Wrapped

STEPS = 2


def whole_state(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """A fingerprint of each tensor, gathered."""
    found = {}
    for entry in take_inventory(Wrapped.look(model).model, Partitions([optimizer]).inner).entries:
        value = entry.origin if entry.origin is not None else entry.tensor
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[entry.name] = fingerprints([whole.detach().contiguous()])[0]
    return found


def stage(kind: str, folder: Path) -> dict[str, object]:
    torch.manual_seed(dist.get_rank())  # a restore has to bring everything
    model = wrap(kind, make_model())
    optimizer = make_optimizer(kind, model)
    forward_backward = trainer(kind, model)
    position = {"samples": 0}
    with Checkpointer(model, optimizer, folder=folder, every=STEPS, state={"position": position}) as checkpointer:
        first = checkpointer.restore()
        restored = whole_state(model, optimizer) if first else {}
        torch.manual_seed(first if "tensor" in kind else 100 * first + dist.get_rank())
        for _ in range(STEPS):
            optimizer.zero_grad()
            forward_backward()
            optimizer.step()
            position["samples"] += 1
            checkpointer.step()
        checkpointer.wait()
        captured = checkpointer.captured
    return {
        "first": first,
        "restored": restored,
        "end": whole_state(model, optimizer),
        "captured": captured,
        "samples": position["samples"],
    }


def main(number: int, folder: Path, stages: list[str]) -> None:
    said = []
    for index, text in enumerate(stages):
        kind, _, ranks = text.partition(":")
        if number >= int(ranks):
            said.append(None)
        else:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store-{index}", rank=number, world_size=int(ranks)
            )
            said.append(stage(kind, folder / "checkpoints"))
            dist.destroy_process_group()
        (folder / f"done-{index}-{number}").touch()
        _wait_for(folder, index, int(ranks))
    print(json.dumps(said), flush=True)


def _wait_for(folder: Path, index: int, ranks: int) -> None:
    """Until all ranks of the stage have come to its end: the next one may have others."""
    import time

    deadline = time.monotonic() + 120
    while not all((folder / f"done-{index}-{rank}").exists() for rank in range(ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
