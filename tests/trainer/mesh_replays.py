"""One process of a run that changes its mesh in the middle of chains of deltas: `python mesh_replays.py NUMBER FOLDER KIND:RANKS...`.

Each stage is a job of its own at the sidecars below FOLDER/<stage>/<rank>. Prints, for each stage, what the whole state was after the restore and at the
end, tensor by tensor as far as this rank knows it. A KIND that begins with "rich-" trains a model with everything in it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded_script import make_model, make_optimizer, trainer, wrap
from torch import Tensor, nn
from torch.optim import Optimizer

from tiercheck import Checkpointer
from tiercheck.trainer.capture import take_inventory
from tiercheck.trainer.partitioned import Partitions
from tiercheck.trainer.state_hash import fingerprints
from tiercheck.trainer.wrapped import Wrapped

STEPS = 6
WORDS, WIDE = 12003, 32


class Rich(nn.Module):
    """Half precision, a table of which few rows have gradients, tied and frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDE)
        self.frozen = nn.Linear(WIDE, WIDE)
        self.up = nn.Linear(WIDE, 40)
        self.up_again = nn.Linear(WIDE, 40)
        self.up_again.weight = self.up.weight
        self.down = nn.Linear(40, 1501)
        self.frozen.requires_grad_(False)
        self.bfloat16()

    def forward(self, words: Tensor) -> Tensor:
        inside = self.frozen(self.words(words))
        out: Tensor = self.down(torch.relu(self.up(inside)) + self.up_again(inside))
        return out


def rich(kind: str) -> tuple[nn.Module, Optimizer, Any]:
    model = Rich()
    if kind in ("fsdp", "hybrid"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        world = dist.get_world_size()
        fully_shard(
            model,
            mesh=init_device_mesh("cpu", (world,))
            if kind == "fsdp"
            else init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")),
        )
    wrapped = model if kind in ("fsdp", "hybrid") else nn.parallel.DistributedDataParallel(model)
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": others, "lr": 3e-3}]
    if kind == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Optimizer = ZeroRedundancyOptimizer(
            groups, torch.optim.AdamW, lr=1e-2, weight_decay=0.1, amsgrad=True
        )
    else:
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, amsgrad=True)

    def forward_backward() -> Tensor:
        loss: Tensor = wrapped(torch.randint(0, 20, (7,))).float().square().mean()
        loss.backward()
        return loss

    return wrapped, optimizer, forward_backward


def whole_state(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """A fingerprint of each tensor, gathered."""
    found = {}
    for entry in take_inventory(Wrapped.look(model).model, Partitions([optimizer]).inner).entries:
        value = entry.origin if entry.origin is not None else entry.tensor
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[entry.name] = fingerprints([whole.detach().contiguous()])[0]
    return found


def stage(kind: str) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())  # a restore has to bring everything
    if kind.startswith("rich-"):
        model, optimizer, forward_backward = rich(kind.removeprefix("rich-"))
    else:
        model = wrap(kind, make_model())
        optimizer = make_optimizer(kind, model)
        forward_backward = trainer(kind, model)
    position = {"samples": 0}
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with Checkpointer(model, optimizer, state={"position": position, "scheduler": scheduler}) as checkpointer:
        first = checkpointer.restore()
        restored = whole_state(model, optimizer) if first else {}
        samples = position["samples"]
        torch.manual_seed(first if "tensor" in kind else 100 * first + dist.get_rank())
        for _ in range(STEPS):
            optimizer.zero_grad()
            forward_backward()
            optimizer.step()
            scheduler.step()
            position["samples"] += 1
            checkpointer.step()
            checkpointer.wait()
    return {
        "first": first,
        "samples": samples,
        "restored": restored,
        "end": whole_state(model, optimizer),
        "lr": [group["lr"] for group in optimizer.param_groups],
    }


def main(number: int, folder: Path, stages: list[str]) -> None:
    for index, text in enumerate(stages):
        kind, _, ranks = text.partition(":")
        ready = folder / str(index) / "ready"
        deadline = time.monotonic() + 200
        while not ready.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        said = None
        if number < int(ranks):
            os.environ["TIERCHECK_RUN_DIR"] = str(folder / str(index) / str(number))
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store-{index}", rank=number, world_size=int(ranks)
            )
            said = stage(kind)
            dist.destroy_process_group()
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
