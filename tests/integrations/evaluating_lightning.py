"""Trains with a Lightning Trainer that validates in mid-epoch.

The metric moves its learning rate, and a patience runs out.

    python evaluating_lightning.py FOLDER [CHECKPOINT]

CHECKPOINT is one of Lightning's own that it is told to begin from; it writes some too: FOLDER/own.ckpt is
that of the third update.
"""

from __future__ import annotations

import json
import sys

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from tiercheck.integrations.lightning import TierCheck


class Small(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        return (self.layers(x) - x.sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch, batch_idx) -> None:
        (x,) = batch
        self.log("validation", self.layers(x + torch.rand_like(x)).square().mean() + 100)  # it draws, too

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=50.0, threshold_mode="abs"
        )
        moved = {"scheduler": scheduler, "interval": "step", "frequency": 4, "monitor": "validation"}
        return {"optimizer": optimizer, "lr_scheduler": moved}


class Say(Callback):
    """The step before is on disk when the next one is said, so that it is known where a killed life goes
    on.
    """

    def __init__(self, own: TierCheck, patience: EarlyStopping) -> None:
        self.own, self.patience = own, patience
        self.validations = 0

    def state_dict(self):
        return {"validations": self.validations}

    def load_state_dict(self, state_dict) -> None:
        self.validations = state_dict["validations"]

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self.own.checkpointer.wait()

    def on_validation_end(self, trainer, module) -> None:
        self.validations += not trainer.sanity_checking

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        line = {
            "step": trainer.fit_loop.epoch_loop.total_batch_idx + 1, "loss": outputs["loss"].item().hex(),
            "rate": trainer.optimizers[0].param_groups[0]["lr"], "waited": self.patience.wait_count,
            "validations": self.validations,
        }  # fmt: skip
        print(json.dumps(line), flush=True)


def main(folder: str, begin_from: str | None = None) -> None:
    L.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(48, 8))
    own = TierCheck(every=1, folder=folder)
    patience = EarlyStopping(
        "validation", patience=3, min_delta=50.0
    )  # no validation is so much better than the first
    trainer = L.Trainer(
        max_epochs=3,
        accumulate_grad_batches=2,
        val_check_interval=4,
        accelerator="cpu",
        callbacks=[
            own,
            Say(own, patience),
            patience,
            ModelCheckpoint(folder, filename="own", every_n_train_steps=3, save_top_k=-1),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = StatefulDataLoader(
        data,
        batch_size=4,
        sampler=StatefulDistributedSampler(data, 1, 0, seed=1),
        generator=torch.Generator(),
    )
    trainer.fit(
        Small(), loader, DataLoader(data, batch_size=16, generator=torch.Generator()), ckpt_path=begin_from
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
