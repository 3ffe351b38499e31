"""Lightning Trainers with callbacks that add something on their way, and metrics of an epoch.

python configured_lightning.py CASE FOLDER
"""

from __future__ import annotations

import json
import logging
import sys

import lightning as L  # noqa: N812
import torch
from lightning.pytorch import callbacks as C  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanAbsoluteError

from tiercheck.integrations.lightning import TierCheck

DATA = TensorDataset(torch.randn(24, 8, generator=torch.Generator().manual_seed(5)))


def say(**line) -> None:
    print(json.dumps(line), flush=True)


class Small(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1))
        self.head, self.error = nn.Linear(16, 8), MeanAbsoluteError()

    def training_step(self, batch, number):
        (x,) = batch
        given = self.head(self.backbone(x))
        loss = (given - x).square().mean()
        self.error(given, x)
        self.log("train", loss, on_step=False, on_epoch=True)
        self.log("most", loss, on_epoch=True, reduce_fx=max)
        self.log("error", self.error, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Scheduled(Small):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Normed(Small):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 8))


class Plateau(Small):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train"}}


def averaging(first: int) -> C.Callback:
    return C.StochasticWeightAveraging(1e-3, swa_epoch_start=first, annealing_epochs=2)


CASES = {
    # case: (module, callbacks, loader)
    "averaging": (Scheduled, lambda: [averaging(1)], StatefulDataLoader),
    "averaging-with-statistics": (Normed, lambda: [averaging(2)], StatefulDataLoader),
    "averaging-each-step": (Small, lambda: [C.EMAWeightAveraging(decay=0.9)], StatefulDataLoader),
    "finetuning": (Scheduled, lambda: [C.BackboneFinetuning(1, verbose=False)], StatefulDataLoader),
    "pruning": (
        Small,
        lambda: [C.ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False)],
        StatefulDataLoader,
    ),
    "accumulation": (
        Small,
        lambda: [C.GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})],
        StatefulDataLoader,
    ),
    "metrics": (Plateau, lambda: [C.EarlyStopping("error", patience=2, min_delta=1.0)], StatefulDataLoader),
    "loader": (Small, list, StatefulDataLoader),
    "plain-loader": (Scheduled, list, DataLoader),
}


class Say(C.Callback):
    def __init__(self, own: TierCheck) -> None:
        self.own = own

    def on_train_batch_start(self, trainer, module, batch, number) -> None:
        self.own.checkpointer.wait()

    def on_train_batch_end(self, trainer, module, outputs, batch, number) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        step = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        say(step=step, loss=outputs["loss"].item().hex(), rate=rate)

    def on_train_epoch_end(self, trainer, module) -> None:
        epoch = {
            name: value.item().hex() for name, value in trainer.callback_metrics.items() if "step" not in name
        }
        say(step=trainer.fit_loop.epoch_loop.total_batch_idx + 1.5, **epoch)


class Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(told=record.getMessage())


def main(case: str, folder: str) -> None:
    logging.getLogger("tiercheck").addHandler(Told(logging.WARNING))
    L.seed_everything(0, verbose=False)
    module, callbacks, loader = CASES[case]
    own = TierCheck(every=1, folder=folder)
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, callbacks=[own, *callbacks(), Say(own)],
    )  # fmt: skip
    trainer.fit(module(), loader(DATA, 4, shuffle=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
