"""Trains with a class like torchtitan's Trainer, unchanged but for the line that calls it.

HOW: method (`train` is called again, and the object stays) or function (`main`, which makes all, groups
included). KIND, STEPS, PACE, LIVES and what is said: as of `staying_trainer`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.cluster.staying_trainer import TAIL, WIDTH, Block, attempt, build, say
from tiercheck import Checkpointer, reenter


class Numbers:
    """Batches by a generator of its own, as a stateful loader has them."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.randn(8, WIDTH, generator=self.generator)


class Trainer:
    def __init__(self, kind: str, total: int) -> None:
        dist.init_process_group("gloo")
        self.rank, self.total, self.step, self.seen = dist.get_rank(), total, 0, 0
        self.model = build(kind, dist.get_world_size())
        blocks = (part for part in self.model.modules() if isinstance(part, Block))
        self.of_blocks = [each for part in blocks for each in part.parameters()]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 10, 0.999)
        self.data = Numbers(100 + (self.rank // 2 if kind == "tp" else self.rank))
        state = {"schedule": self.schedule, "data": self.data.generator, "trainer": self}
        self.checkpointer = None
        if "TIERCHECK_ATTEMPT" in os.environ:
            self.checkpointer = Checkpointer(self.model, self.optimizer, state=state)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]

    def train_step(self, batches: Iterator[torch.Tensor]) -> torch.Tensor:
        batch = next(batches)
        self.seen += len(batch)
        loss: torch.Tensor = (self.model(batch) - 1.0 - 1e-4 * self.seen).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.of_blocks, 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss

    def train(self) -> None:
        self.step = 0 if self.checkpointer is None else self.checkpointer.restore()
        batches, last = iter(self.data), 10**9
        where = next(self.model.parameters())
        pid, at = os.getpid(), getattr(where, "_local_tensor", where).data_ptr()
        while self.step < min(self.total, last):
            self.step += 1
            loss = self.train_step(batches)
            if self.checkpointer is not None:
                self.checkpointer.step(loss)
            number, loss_hex = attempt(), loss.item().hex()
            say(step=self.step - 1, rank=self.rank, attempt=number, loss=loss_hex, pid=pid, at=at)
            time.sleep(float(os.environ.get("PACE", "0")))
            if number > int(os.environ.get("LIVES", "1")):
                last = min(last, self.step + TAIL)


def main() -> None:
    Trainer(os.environ["KIND"], int(os.environ["STEPS"]) or 10**9).train()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ.get("HOW") == "function":
        reenter(main)
    else:
        trainer = Trainer(os.environ["KIND"], int(os.environ["STEPS"]) or 10**9)
        reenter(trainer.train)
