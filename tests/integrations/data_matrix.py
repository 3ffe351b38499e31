"""One training of the data matrix: a framework, a kind of data, workers, `set_epoch`, accumulation.

    data_matrix.py FRAMEWORK DATA WORKERS EPOCHS ACCUMULATION FOLDER [STOP]

Scripts are as their authors would write them: what has a position of its own is handed over, nothing else is.
It says each step, and each warning. After it has said the step STOP it waits to be killed.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from tiercheck import Checkpointer

SAMPLES, BATCH, EPOCHS, EVERY = 72, 4, 3, 2
ROWS = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(5))


def say(**line: object) -> None:
    print(json.dumps(line), flush=True)
    if str(line.get("step")) in sys.argv[7:]:
        signal.pause()


class Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(told=record.getMessage())


class Rows(torch.utils.data.Dataset[Any]):
    """Map-style."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"x": ROWS[number]}


class Stream(IterableDataset[Any]):
    """The same, by one worker after the other; another order in each epoch, if it is told which."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        about = torch.utils.data.get_worker_info()
        first, step = (0, 1) if about is None else (about.id, about.num_workers)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return ({"x": ROWS[number]} for number in order[first::step])


def options(workers: str) -> dict[str, Any]:
    return {"0": {}, "2": {"num_workers": 2}, "persistent": {"num_workers": 2, "persistent_workers": True}}[
        workers
    ]


def make_loader(data: str, workers: str, epochs: str) -> tuple[Iterable[Any], Any]:
    """The loader, and what has `set_epoch`."""
    kind = StatefulDataLoader if data == "stateful" else DataLoader
    if data == "iterable":
        stream = Stream()
        return DataLoader(stream, BATCH, **options(workers)), stream if epochs == "set_epoch" else None
    if epochs == "set_epoch":
        sampler: Any = (StatefulDistributedSampler if data == "stateful" else DistributedSampler)(
            Rows(), 1, 0, seed=1
        )
        return kind(Rows(), BATCH, sampler=sampler, **options(workers)), sampler
    return kind(Rows(), BATCH, shuffle=True, **options(workers)), None


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).square().mean()


def plain(data: str, workers: str, epochs: str, accumulation: int, folder: str) -> None:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loop(
        model,
        optimizer,
        make_loader(data, workers, epochs),
        data=data,
        accumulation=accumulation,
        folder=folder,
    )


def accelerate(data: str, workers: str, epochs: str, accumulation: int, folder: str) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    configuration = DataLoaderConfiguration(use_stateful_dataloader=data == "stateful")
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    set_seed(0)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader, order = make_loader("map" if data == "stateful" else data, workers, epochs)
    loop(
        model,
        optimizer,
        (accelerator.prepare(loader), order),
        data=data,
        accumulation=accumulation,
        folder=folder,
    )


def loop(
    model: nn.Module, optimizer: Any, made: tuple[Any, Any], *, data: str, accumulation: int, folder: str
) -> None:
    loader, order = made
    per_epoch = SAMPLES // BATCH // accumulation
    state: dict[str, Any] = {"loader": loader} if data == "stateful" else {}
    with Checkpointer(model, optimizer, state=state, folder=folder, every=EVERY) as checkpointer:
        checkpointer.restore()
        while checkpointer.step_number < EPOCHS * per_epoch:
            if order is not None:
                order.set_epoch(checkpointer.step_number // per_epoch)
            for number, batch in enumerate(loader, 1):
                loss = loss_of(model, batch["x"]) / accumulation
                loss.backward()
                if number % accumulation == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    checkpointer.step(loss)
                    checkpointer.wait()
                    say(step=checkpointer.step_number, loss=loss.item().hex())
                    if checkpointer.step_number == EPOCHS * per_epoch:
                        break


def huggingface(data: str, workers: str, epochs: str, accumulation: int, folder: str) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

    from tiercheck.integrations.huggingface import Resumable

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            return {"loss": loss_of(self.network, x)}

    class Mine(Resumable, Trainer):
        checkpointing = {"folder": folder, "every": EVERY}  # noqa: RUF012

        def get_train_dataloader(self) -> Any:
            if data != "stateful":
                return super().get_train_dataloader()
            return self.accelerator.prepare(make_loader(data, workers, epochs)[0])

    class Say(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            trainer.checkpointer.wait()

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            total = sum(each.detach().double().sum() for each in trainer.model.parameters())
            say(step=state.global_step, loss=total.item().hex())

    set_seed(0)
    per_epoch = SAMPLES // BATCH // accumulation
    arguments = TrainingArguments(
        output_dir=f"{folder}/trainer", max_steps=EPOCHS * per_epoch, per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulation, learning_rate=1e-2, logging_steps=1, save_strategy="no",
        report_to=[], disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
        dataloader_num_workers=options(workers).get("num_workers", 0),
        dataloader_persistent_workers=workers == "persistent",
    )  # fmt: skip
    dataset = Stream() if data == "iterable" else Rows()
    trainer = Mine(Model(), arguments, train_dataset=dataset, callbacks=[Say()])
    trainer.train()


def lightning(data: str, workers: str, epochs: str, accumulation: int, folder: str) -> None:
    import lightning as L  # noqa: N812

    from tiercheck.integrations.lightning import TierCheck

    class Module(L.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            return loss_of(self.network, batch["x"])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Say(L.Callback):  # type: ignore[misc, unused-ignore]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
            own.checkpointer.wait()

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int
        ) -> None:
            if (number + 1) % accumulation == 0:
                total = sum(each.detach().double().sum() for each in module.parameters())
                say(step=trainer.global_step, loss=total.item().hex())

    L.seed_everything(0, verbose=False)
    own = TierCheck(every=EVERY, folder=folder)
    trainer = L.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, accumulate_grad_batches=accumulation,
        callbacks=[own, Say()],
    )  # fmt: skip
    loader, _ = make_loader(data, workers, epochs)
    trainer.fit(Module(), loader)


if __name__ == "__main__":
    logging.getLogger("tiercheck").addHandler(Told(logging.WARNING))
    torch.set_num_threads(1)
    framework, data, workers, epochs, accumulation, folder = sys.argv[1:7]
    {"plain": plain, "accelerate": accelerate, "huggingface": huggingface, "lightning": lightning}[framework](
        data, workers, epochs, int(accumulation), folder
    )
