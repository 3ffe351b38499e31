"""Trains with a Lightning Trainer that comes back from any kill, in the middle of an epoch too.

python examples/frameworks/lightning/train.py --folder /tmp/lightning
torchrun --nproc-per-node 2 examples/frameworks/lightning/train.py --folder /tmp/lightning-2
"""

from __future__ import annotations

import argparse
import json
import os
import sys

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from tiercheck.integrations.lightning import TierCheck

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
"""What torchrun sets for each process, and the values without it."""


class Small(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        return (self.layers(x) - x.sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch, batch_idx) -> None:
        (x,) = batch
        self.log("validation", (self.layers(x) - x.sum(1, keepdim=True)).square().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-1, total_steps=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Say(Callback):
    """One line of JSON for each batch."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        batches = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        loss = outputs["loss"].item()
        if trainer.is_global_zero:
            line = {"step": batches, "update": trainer.global_step, "loss": loss, "loss_hex": loss.hex()}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network with Lightning under TierCheck.")
    parser.add_argument("--folder", default="checkpoints", help="for snapshots outside a cluster")
    parser.add_argument("--every", type=int, help="steps between snapshots; default: as the job says")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    rank, world, here = (int(os.environ.get(name, alone)) for name, alone in TORCHRUN.items())
    L.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(48, 8))
    trainer = L.Trainer(
        max_epochs=args.epochs,
        accumulate_grad_batches=2,
        accelerator="auto",
        devices=here,
        num_nodes=world // here,
        use_distributed_sampler=False,
        callbacks=[Say(), TierCheck(every=args.every, folder=args.folder)],
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # The order follows from seed and epoch, and workers have a generator of their own: to begin or resume an
    # epoch draws from no other.
    order = StatefulDistributedSampler(data, world, rank, shuffle=True, seed=1)
    loader = StatefulDataLoader(data, batch_size=4, sampler=order, generator=torch.Generator())
    trainer.fit(Small(), loader, DataLoader(data, batch_size=16, generator=torch.Generator()))


if __name__ == "__main__":
    main()
