"""Trainers whose data, batch size, best model or learning rate do not follow from the step's number.

    python configured_huggingface.py CASE FOLDER [ARGUMENTS [EVERY [forget]]]

ARGUMENTS: of TrainingArguments, as JSON, over those of the case; `resume_from_checkpoint` is one of the
Trainer's own that it is told to begin from. It says each step, each warning, what a
resume has proved, and at the end what `train` gave. Steps of a second `train` have numbers from 11 on. Steps
that are left: see `struck`.
`forget`: the place is computed from the number of the step, and the batch size is searched for again.
"""

from __future__ import annotations

import json
import logging
import sys

import torch
from torch import nn
from torch.utils.data import IterableDataset, Sampler
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_callback import ExportableState

from tests.integrations.struck import reenter, strike
from tiercheck.integrations import huggingface
from tiercheck.integrations.huggingface import Resumable
from tiercheck.protocol.local import ReportResume
from tiercheck.trainer.backends.backend import RankReport
from tiercheck.trainer.backends.folder_backend import FolderBackend

DATA = [
    {"input_ids": (t := (torch.arange(4 + 4 * (i % 3 // 2)) * (i % 5 + 1) + i) % 64), "labels": t}
    for i in range(48)
]
ALIKE = [{name: value[:4] for name, value in each.items()} for each in DATA]


def say(**line) -> None:
    print(json.dumps(line), flush=True)


class Small(nn.Module):
    """Says which samples it gets; batches of more than `most` do not fit."""

    most = 1000

    def __init__(self) -> None:
        super().__init__()
        sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, attention_dropout=0.1))

    def forward(self, input_ids=None, labels=None):
        if len(input_ids) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. (pretended)")
        return self.model(input_ids=input_ids, labels=labels)


class NamedEmbeddings(Small):
    def get_input_embeddings(self):
        return self.model.get_input_embeddings()


class Fits4(Small):
    most = 4


class Stream(IterableDataset):
    """24 samples in each pass, in another order by its own generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self):
        return (ALIKE[i] for i in torch.randperm(24, generator=self.generator))


class Epochs(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 24

    def __iter__(self):
        return iter(ALIKE[self.epoch : self.epoch + 24])


class Drawn(Sampler):
    """An order by a generator of its own, which goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.source = torch.Generator().manual_seed(7)

    def __len__(self) -> int:
        return len(ALIKE)

    def __iter__(self):
        return iter(torch.randperm(len(ALIKE), generator=self.source).tolist())


class Sampled(Trainer):
    def _get_train_sampler(self, *_):
        return Drawn()


class Weighted(Trainer):
    """Keeps a weight of its own, which falls with every batch."""

    weight = 1.0

    def compute_loss(self, model, inputs, *more, **named):
        loss = super().compute_loss(model, inputs, *more, **named)
        if not model.training:
            return loss
        self.weight *= 0.95
        return loss * self.weight


WORKERS = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
BEST = {
    "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3,
    "save_total_limit": 2, "load_best_model_at_end": True, "greater_is_better": True, "logging_steps": 2,
}  # fmt: skip
EVALUATING = {
    "gradient_accumulation_steps": 2, "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0, "threshold_mode": "abs"},
    "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss", "greater_is_better": False,
    "save_strategy": "steps", "save_steps": 4,
}  # fmt: skip
"""In mid-epoch: the metric moves the learning rate, and a patience runs out."""
CASES = {
    # case: (base, model, dataset, arguments)
    "plain": (Trainer, Small, ALIKE, {}),
    "batch-size-found": (
        Trainer, Fits4, ALIKE, {"auto_find_batch_size": True, "per_device_train_batch_size": 5},
    ),
    "stream": (Trainer, Small, Stream(), {"max_steps": 8}),
    "epochs-of-stream": (Trainer, Small, Epochs(), {}),
    "persistent-workers": (Trainer, Small, ALIKE, {**WORKERS, "eval_strategy": "epoch"}),
    "own-generator": (Sampled, Small, ALIKE, {}),
    "by-length": (
        Trainer, Small, ALIKE,
        {"train_sampling_strategy": "group_by_length", "per_device_train_batch_size": 8},
    ),
    "drop-last": (Trainer, Small, ALIKE[:46], {"dataloader_drop_last": True}),
    "best": (Trainer, Small, ALIKE, BEST),
    "evaluating": (Trainer, Small, ALIKE, EVALUATING),
    "noisy": (Trainer, NamedEmbeddings, ALIKE, {"neftune_noise_alpha": 5.0}),
    "twice": (Trainer, Small, ALIKE, {"num_train_epochs": 1}),
    "averaging": (Weighted, Small, ALIKE, {}),
}  # fmt: skip


class Average(TrainerCallback, ExportableState):
    """Draws the last weights towards their average, which `state` shows, and clips more with each step."""

    mean: torch.Tensor | None = None

    def on_epoch_begin(self, *_, **named) -> None:
        torch.rand(1)

    def on_step_end(self, args, state, control, model=None, **named) -> None:
        args.max_grad_norm *= 0.8
        *_, last = model.parameters()
        now = last.detach()
        self.mean = now.clone() if self.mean is None else self.mean * 0.9 + now * 0.1
        now.lerp_(self.mean, 0.5)

    def state(self) -> dict:
        return {"args": {}, "attributes": {"mean": self.mean}}


class Say(TrainerCallback):
    """The step before is on disk when the next one is said."""

    trainer: Trainer
    number = 0

    def on_step_begin(self, args, state, control, **named) -> None:
        self.trainer.checkpointer.wait()

    def on_step_end(self, args, state, control, **named) -> None:
        total = sum(each.detach().double().sum() for each in self.trainer.model.parameters())
        line = {"weights": total.item().hex(), "epoch": state.epoch}
        for each in self.trainer.callback_handler.callbacks:
            if isinstance(each, EarlyStoppingCallback):
                line["waited"] = each.early_stopping_patience_counter
                line["rate"] = self.trainer.optimizer.param_groups[0]["lr"]
                line["evaluations"] = len([e for e in state.log_history if "eval_loss" in e])
        say(step=state.global_step + 10 * self.number, **line)


class Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(told=record.getMessage())


def forget_place() -> None:
    """The place is computed from the number of the step."""
    find = Resumable._find

    def found_without_batch_size(trainer):
        found = find(trainer)
        found.state.get("trainer", {}).pop("batch_size", None)
        return found

    def compute_position(trainer, _, steps_per_epoch: int) -> tuple[int, int]:
        epoch, steps = divmod(trainer.state.global_step, steps_per_epoch)
        return epoch, steps * trainer.args.gradient_accumulation_steps

    Resumable._find, Resumable._find_position = found_without_batch_size, compute_position


def say_resumed(_: FolderBackend, report: RankReport) -> None:
    if isinstance(report, ReportResume):
        say(resumed=report.exact.value, message=report.message)


def main(case: str, folder: str, arguments: str = "{}", every: str = "1", forget: str = "") -> None:
    logging.getLogger("tiercheck").addHandler(Told(logging.WARNING))
    FolderBackend.report = say_resumed
    huggingface.reenter = reenter
    if forget:
        forget_place()
    set_seed(0)
    base, model, data, of_case = CASES[case]

    class MyTrainer(Resumable, base):
        checkpointing = {"folder": folder, "every": int(every)}  # noqa: RUF012

        def compute_loss(self, model, inputs, *more, **named):
            say(samples=inputs["input_ids"][:, :2].tolist()) if model.training else None
            found = super().compute_loss(model, inputs, *more, **named)
            strike(self.state.global_step + 1 if model.training else -self.state.global_step)
            return found

    callback = Say()
    settings = {
        "output_dir": f"{folder}/trainer", "num_train_epochs": 3, "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 3, "learning_rate": 1e-2,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True,
        **of_case, **json.loads(arguments),
    }  # fmt: skip
    # No evaluation is ten better than the first, so from then on each is one that is waited for.
    patience = EarlyStoppingCallback(early_stopping_patience=5, early_stopping_threshold=10.0)
    trainer = callback.trainer = MyTrainer(
        model(),
        TrainingArguments(**settings),
        train_dataset=data,
        eval_dataset=ALIKE[:8],
        callbacks=[
            *([Average()] if case == "averaging" else []),
            callback,
            *([patience] if case == "evaluating" else []),
        ],
    )
    for callback.number in range(1 + (case == "twice")):
        loss = trainer.train(settings.get("resume_from_checkpoint")).training_loss.hex()
        say(step=1000, loss=loss, evaluated=trainer.evaluate()["eval_loss"], best=trainer.state.best_metric)


if __name__ == "__main__":
    main(*sys.argv[1:])
