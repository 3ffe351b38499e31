"""Trains by a loop like torchtitan's: a Stateful Trainer, FSDP2, gradient accumulation.

Its data come from a StatefulDataLoader, and it averages weights.

python examples/frameworks/plain-loop/train.py --folder /tmp/plain-loop
torchrun --nproc-per-node 2 examples/frameworks/plain-loop/train.py --folder /tmp/plain-loop-2
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from tiercheck import Checkpointer


class Trainer:
    """Owns everything, as torchtitan's does, and says what of it must come back."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(48, 8))
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        if self.world > 1:
            for whole in (self.model, self.average.module):
                for part in (whole[0], whole[3], whole):
                    # Also at the root: the average is only evaluated, and nothing else would make it shards
                    # again.
                    fully_shard(part, reshard_after_forward=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=args.steps)
        # The order follows from seed and epoch, and workers have a generator of their own: to begin or resume
        # an epoch draws from no other.
        self.order = StatefulDistributedSampler(data, self.world, self.rank, shuffle=True, seed=1)
        self.loader = StatefulDataLoader(
            data, batch_size=4, sampler=self.order, generator=torch.Generator(), num_workers=args.workers
        )
        self.steps, self.epoch, self.samples_seen = args.steps, 0, 0
        self.checkpointer = Checkpointer(
            self.model,
            self.optimizer,
            state={
                "average": self.average,
                "scheduler": self.scheduler,
                "loader": self.loader,
                "trainer": self,
            },
            every=args.every,
            folder=args.folder,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "samples_seen": self.samples_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.samples_seen = state["epoch"], state["samples_seen"]

    def batches(self) -> Iterator[Tensor]:
        while True:
            self.order.set_epoch(self.epoch)
            for (x,) in self.loader:
                self.samples_seen += len(x) * self.world
                yield x
            self.epoch += 1

    def train(self) -> None:
        first = self.checkpointer.restore()
        batches = self.batches()
        for step in range(first + 1, self.steps + 1):
            loss = torch.zeros(())
            for _ in range(2):  # micro-batches
                x = next(batches)
                part = (self.model(x) - x.sum(1, keepdim=True)).square().mean() / 2
                part.backward()
                loss += part.detach()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.average.update_parameters(self.model)
            with torch.no_grad():
                loss += self.average(x).mean() * 1e-3  # so that a lost bit of the average would be seen
            if self.world > 1:
                dist.all_reduce(loss)
                loss /= self.world
            line = {
                "step": step,
                "loss": loss.item(),
                "loss_hex": loss.item().hex(),
                "samples": self.samples_seen,
            }
            if self.rank == 0:
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()
            self.checkpointer.step(loss.item())
        self.checkpointer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a small network in a loop of its own under TierCheck."
    )
    parser.add_argument("--folder", default="checkpoints", help="for snapshots outside a cluster")
    parser.add_argument("--every", type=int, help="steps between snapshots; default: as the job says")
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--workers", type=int, default=0, help="processes that load data")
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    Trainer(args).train()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
