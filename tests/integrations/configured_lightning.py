"""Lightning Trainers with callbacks that add something on their way, metrics and validations.

    python configured_lightning.py CASE FOLDER [CHECKPOINT]

CHECKPOINT is one of Lightning's own that it is told to begin from; the case `evaluating` writes some too:
FOLDER/own.ckpt is that of the third update. Steps that are left: see `struck`.
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
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from torchmetrics import MeanAbsoluteError

from tests.integrations.struck import reenter, strike
from tiercheck.integrations import lightning
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
        strike(self.trainer.global_step + 1)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Scheduled(Small):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Searched(Small):
    lr = 1e-2

    def on_save_checkpoint(self, checkpoint) -> None:
        """It may write files, or expect weights there: it is not called for a version."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Annealed(Small):
    """Changes a hyper-parameter and the clipping after each batch."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch, number):
        return super().training_step(batch, number) * self.hparams.scale

    def on_train_batch_end(self, *_) -> None:
        self.hparams.scale *= 0.9
        self.trainer.gradient_clip_val = (self.trainer.gradient_clip_val or 1.0) * 0.9


class Normed(Small):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 8))


class Plateau(Small):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train"}}


class PlateauOfSteps(Small):
    """Its rate is reduced by the loss of each step."""

    def training_step(self, batch, number):
        loss = super().training_step(batch, number)
        self.log("now", loss, on_step=True, on_epoch=False)
        return loss

    def configure_optimizers(self):
        optimizer = Small.configure_optimizers(self)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
        moved = {"scheduler": plateau, "interval": "step", "monitor": "now"}
        return {"optimizer": optimizer, "lr_scheduler": moved}


class Evaluating(Small):
    """In mid-epoch: the metric moves the learning rate, and a patience runs out."""

    def validation_step(self, batch, number) -> None:
        (x,) = batch
        given = self.head(self.backbone(x + torch.rand_like(x)))  # it draws, too
        self.log("validation", given.square().mean() + 100)
        strike(-self.trainer.global_step)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=50.0, threshold_mode="abs"
        )
        moved = {"scheduler": plateau, "interval": "step", "frequency": 4, "monitor": "validation"}
        return {"optimizer": optimizer, "lr_scheduler": moved}


def averaging(first: int) -> C.Callback:
    return C.StochasticWeightAveraging(1e-3, swa_epoch_start=first, annealing_epochs=2)


CASES = {
    # case: (module, callbacks, loader)
    "averaging": (Scheduled, lambda: [averaging(1)], StatefulDataLoader),
    "averaging-with-statistics": (Normed, lambda: [averaging(2)], StatefulDataLoader),
    "averaging-each-step": (Annealed, lambda: [C.EMAWeightAveraging(decay=0.9)], StatefulDataLoader),
    "rate-found": (Searched, lambda: [C.LearningRateFinder(num_training_steps=20)], StatefulDataLoader),
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
    "plateau-of-steps": (PlateauOfSteps, list, StatefulDataLoader),
    # No validation is so much better than the first.
    "evaluating": (Evaluating, lambda: [C.EarlyStopping("validation", 50.0, 3)], StatefulDataLoader),
    "plain-loader": (Scheduled, list, DataLoader),
}


class Say(C.Callback):
    def __init__(self, own: TierCheck, patience: C.EarlyStopping | None) -> None:
        self.own, self.patience, self.validations = own, patience, 0

    def state_dict(self):
        return {"validations": self.validations}

    def load_state_dict(self, state_dict) -> None:
        self.validations = state_dict["validations"]

    def on_validation_end(self, trainer, module) -> None:
        self.validations += not trainer.sanity_checking

    def on_train_batch_start(self, trainer, module, batch, number) -> None:
        self.own.checkpointer.wait()

    def on_train_batch_end(self, trainer, module, outputs, batch, number) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        step = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        waited = self.patience and self.patience.wait_count
        loss = outputs["loss"].item().hex()
        averaged = [
            sum(each.detach().double().sum() for each in callback._average_model.parameters()).item().hex()
            for callback in trainer.callbacks
            if isinstance(callback, C.WeightAveraging)
        ]
        say(step=step, loss=loss, rate=rate, waited=waited, validations=self.validations, averaged=averaged)

    def on_train_epoch_end(self, trainer, module) -> None:
        epoch = {
            name: value.item().hex() for name, value in trainer.callback_metrics.items() if "step" not in name
        }
        say(step=trainer.fit_loop.epoch_loop.total_batch_idx + 1.5, **epoch)


class Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(told=record.getMessage())


def main(case: str, folder: str, begin_from: str | None = None) -> None:
    logging.getLogger("tiercheck").addHandler(Told(logging.WARNING))
    lightning.reenter, lightning.refuse_reentry = reenter, lambda why: say(refused=why)
    L.seed_everything(0, verbose=False)
    module, callbacks, loader = CASES[case]
    own, others = TierCheck(every=1, folder=folder), callbacks()
    if evaluates := case == "evaluating":
        others.append(C.ModelCheckpoint(folder, filename="own", every_n_train_steps=3, save_top_k=-1))
        data = TensorDataset(torch.randn(48, 8))
        sampler = StatefulDistributedSampler(data, 1, 0, seed=1)
        loaders = (
            loader(data, 4, sampler=sampler, generator=torch.Generator()),
            DataLoader(data, 16, generator=torch.Generator()),
        )
    else:
        loaders = (loader(DATA, 4, shuffle=True),)
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_checkpointing=evaluates, enable_model_summary=False,
        callbacks=[own, *others, Say(own, others[0] if evaluates else None)],
        **({"accumulate_grad_batches": 2, "val_check_interval": 4} if evaluates else {}),
    )  # fmt: skip
    trainer.fit(module(), *loaders, ckpt_path=begin_from)


if __name__ == "__main__":
    main(*sys.argv[1:])
