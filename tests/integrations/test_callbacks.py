"""A callback that keeps something of its own and does not show it is in the log, once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tiercheck.integrations.callbacks import CallbackWatch


class Average:
    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}
        self.count = 0


class Constant:
    def __init__(self) -> None:
        self.rate, self.logger = 0.1, object()


def test_callback_whose_attributes_change_is_named_once_with_what_to_give_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch, average, constant = CallbackWatch("state_dict"), Average(), Constant()
    for step in range(4):
        watch.look([average, constant])
        average.count = step
    assert caplog.text.count("Callback: ") == 1
    assert "Average.count changes, and is in no version: give the callback state_dict" in caplog.text


@pytest.mark.parametrize("change", ["filled", "replaced", "in place"])
def test_tensors_that_a_callback_keeps_are_looked_at(caplog: pytest.LogCaptureFixture, change: str) -> None:
    watch, average = CallbackWatch("state_dict"), Average()
    average.shadow = {} if change == "filled" else {"weight": torch.zeros(2)}
    watch.look([average])
    if change == "in place":
        average.shadow["weight"] += 1
    else:
        average.shadow = {"weight": torch.ones(2)}
    watch.look([average])
    assert "Average.shadow changes" in caplog.text


def test_callback_counts_an_epoch_once_though_its_middle_is_resumed(tmp_path: Path) -> None:
    """The Trainer calls on_train_begin and on_epoch_begin at each start, after the restore."""
    transformers = pytest.importorskip("transformers")
    from transformers.trainer_callback import ExportableState

    from tiercheck.integrations.huggingface import Resumable

    class Lost(Exception):
        pass

    class Annealed(transformers.TrainerCallback, ExportableState):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.epochs = self.steps = 0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.steps = 0

        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            self.epochs += 1

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.steps += 1

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"epochs": self.epochs, "steps": self.steps}}

    class Line(torch.nn.Module):
        def __init__(self, lost_at: int, note: Callable[[float], None]) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.lost_at, self.note, self.annealed = lost_at, note, Annealed()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            if self.annealed.steps == self.lost_at:
                raise Lost
            loss = (self.layer(x) - labels).square().mean() * (self.annealed.epochs + self.annealed.steps)
            self.note(float(loss.detach()))
            return {"loss": loss}

    class Mine(Resumable, transformers.Trainer):  # type: ignore[misc, name-defined]
        pass

    def fit(folder: str, lost_at: int = -1) -> list[float]:
        Mine.checkpointing = {"folder": tmp_path / folder, "every": 1}
        torch.manual_seed(0)
        losses: list[float] = []
        model = Line(lost_at, losses.append)
        arguments = transformers.TrainingArguments(
            tmp_path / "out",
            num_train_epochs=3,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        data = [{"x": torch.full((1,), i / 16), "labels": torch.ones(1)} for i in range(16)]
        trainer = Mine(model, arguments, train_dataset=data, callbacks=[model.annealed])
        if lost_at < 0:
            trainer.train()
        else:
            with pytest.raises(Lost):
                trainer.train()
        return losses

    whole = fit("whole")
    assert fit("lost", 7) + fit("lost") == whole


@pytest.mark.parametrize("wrapped", [True, False])
def test_sampler_that_lightning_wraps_for_several_ranks_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrapped: bool
) -> None:
    lightning = pytest.importorskip("lightning")
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import RandomSampler

    from tiercheck.integrations.lightning import TierCheck

    class Line(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data: Any = torch.randn(4, 2)
    kind = DistributedSamplerWrapper if wrapped else DistributedSampler
    sampler = kind(RandomSampler(data) if wrapped else data, num_replicas=1, rank=0)
    trainer = lightning.Trainer(
        max_steps=1,
        accelerator="cpu",
        callbacks=[TierCheck(folder=tmp_path)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Line(), StatefulDataLoader(data, batch_size=2, sampler=sampler))
    assert caplog.text.count("Order: for several ranks Lightning wraps the RandomSampler") == wrapped


def test_sampler_that_is_given_its_epoch_goes_on_in_the_order_of_that_epoch(tmp_path: Path) -> None:
    """Lightning sets the epoch after it has made the iterators, which fixes the order of a restored one."""
    data: Any = torch.arange(24.0)[:, None]
    sampler = partial(torch.utils.data.DistributedSampler, data, 1, 0)  # it keeps its epoch
    whole = batches_seen(tmp_path / "whole", data, sampler())
    lost = batches_seen(tmp_path / "lost", data, sampler(), 8)
    assert lost + batches_seen(tmp_path / "lost", data, sampler()) == whole


@pytest.mark.parametrize("lost_at", [2, 4])
def test_dataset_that_draws_goes_on_with_the_numbers_that_it_would_have_drawn(
    tmp_path: Path, lost_at: int
) -> None:
    """Without workers a batch is augmented in the training process, before Lightning's first hook for it."""

    class Noisy(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> torch.Tensor:
            return index + torch.rand(1)

    data = Noisy()
    sampler = torch.utils.data.SequentialSampler(data)
    whole = batches_seen(tmp_path / "whole", data, sampler)
    lost = batches_seen(tmp_path / "lost", data, sampler, lost_at)
    assert lost + batches_seen(tmp_path / "lost", data, sampler) == whole


def batches_seen(folder: Path, data: Any, sampler: Any, lost_at: int = -1) -> list[list[float]]:
    """The batches that a LightningModule trains with in two epochs, or until it is lost at a step."""
    lightning = pytest.importorskip("lightning")
    from torchdata.stateful_dataloader import StatefulDataLoader

    from tiercheck.integrations.lightning import TierCheck

    class Lost(Exception):
        pass

    seen: list[list[float]] = []

    class Line(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            if self.global_step == lost_at:
                raise Lost
            seen.append(batch.flatten().tolist())
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    torch.manual_seed(0)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=[TierCheck(folder=folder, every=1)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    loader = StatefulDataLoader(data, batch_size=4, sampler=sampler, generator=torch.Generator())
    with pytest.raises(Lost) if lost_at >= 0 else contextlib.nullcontext():
        trainer.fit(Line(), loader)
    return seen
