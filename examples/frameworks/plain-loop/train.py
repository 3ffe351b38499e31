"""A loop like torchtitan's: a Trainer that is Stateful itself, a StatefulDataLoader, averaged weights, gradient accumulation.

python examples/frameworks/plain-loop/train.py --folder /tmp/plain
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from tiercheck import Checkpointer


class Trainer:
    """Owns everything, as torchtitan's does, and says what of it must come back."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(48, 8))
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=args.steps)
        # Generators of their own for order and workers: then to begin an epoch, or to resume one, draws from no other.
        order = RandomSampler(data, generator=torch.Generator().manual_seed(1))
        self.loader = StatefulDataLoader(
            data, batch_size=4, sampler=order, generator=torch.Generator(), num_workers=args.workers
        )
        self.steps, self.samples_seen = args.steps, 0
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
        return {"samples_seen": self.samples_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples_seen = state["samples_seen"]

    def batches(self) -> Iterator[Tensor]:
        while True:
            for (x,) in self.loader:
                self.samples_seen += len(x)
                yield x

    def train(self) -> None:
        first = self.checkpointer.restore()
        batches = self.batches()
        for step in range(first + 1, self.steps + 1):
            total = 0.0
            for _ in range(2):  # micro-batches
                x = next(batches)
                loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean() / 2
                loss.backward()
                total += loss.item()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.average.update_parameters(self.model)
            with torch.no_grad():
                total += self.average(x).mean().item() * 1e-3  # so that a lost bit of the average would be seen
            line = {"step": step, "loss_hex": total.hex(), "samples": self.samples_seen}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
            self.checkpointer.step(total)
        self.checkpointer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network in a loop of its own under TierCheck.")
    parser.add_argument("--folder", default="checkpoints", help="for snapshots outside a cluster")
    parser.add_argument("--every", type=int, help="steps between snapshots; default: as the job says")
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--workers", type=int, default=0, help="processes that load data")
    Trainer(parser.parse_args()).train()


if __name__ == "__main__":
    main()
