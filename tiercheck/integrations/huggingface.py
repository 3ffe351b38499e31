"""Brings a transformers Trainer back in the middle of an epoch, bit for bit.

    from tiercheck.integrations.huggingface import Resumable

    class MyTrainer(Resumable, Trainer):  # or any subclass of it
        pass

    MyTrainer(model, TrainingArguments(...)).train()

It is no TrainerCallback, because none is called before the Trainer has decided in which epoch and at which
batch it begins, nor after the evaluation of a step, whose random numbers belong to the step too. Needs
transformers 5 (its methods `_init_training_state`, `_prepare_for_training`, `_run_epoch` and
`_maybe_log_save_evaluate`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tiercheck.trainer.checkpointer import Checkpointer, Found, find
from tiercheck.trainer.state import user_state

_NEEDED = (
    "_init_training_state",
    "_prepare_for_training",
    "_run_epoch",
    "_maybe_log_save_evaluate",
    "_load_rng_state",
)
_RESUMED = "tiercheck"
"""Stands for the folder that the Trainer would have loaded a checkpoint from."""

if TYPE_CHECKING:
    from typing import Any as _Trainer  # transformers.Trainer, or a subclass of it
else:
    _Trainer = object


class Resumable(_Trainer):  # type: ignore[misc]
    """Put before the Trainer class among the bases. What the Trainer would save at a step itself is left out:
    set `keeps_own_checkpoints` to have that too. `save_model` works as ever.

    `checkpointing`: arguments of Checkpointer (`every`, `folder`, `keep`, `sanity_gate`; more for `state`).
    """

    checkpointing: dict[str, Any] = {}  # noqa: RUF012 - replaced, never changed
    keeps_own_checkpoints = False
    checkpointer: Checkpointer | None = None

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if missing := [name for name in _NEEDED if not hasattr(cls, name)]:
            raise TypeError(
                f"{cls.__name__} has no {', '.join(missing)}: Resumable needs the Trainer of transformers 5"
            )

    def train(self, *arguments: Any, **named: Any) -> Any:
        try:
            return super().train(*arguments, **named)
        finally:
            if self.checkpointer is not None:
                self.checkpointer.close()

    def _init_training_state(
        self,
        max_steps: int,
        steps_per_epoch: int,
        epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        begun: tuple[int, int] = super()._init_training_state(
            max_steps, steps_per_epoch, epochs, resume_from_checkpoint, trial
        )
        options = self.checkpointing
        self._found: Found | None = find(options.get("folder"), options.get("keep", 2))
        self._steps_per_epoch = steps_per_epoch
        self._drawn: dict[str, Any] | None = None
        self._resumed = self._found.step > 0
        if not self._resumed:
            return begun
        step = self.state.global_step = self._found.step
        rest = 0 if self.args.ignore_data_skip else step % steps_per_epoch
        return step // steps_per_epoch, rest * self.args.gradient_accumulation_steps

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        options = {**self.checkpointing}
        state = {"trainer": _TrainerState(self), "scheduler": self.lr_scheduler, **options.pop("state", {})}
        if (scaler := getattr(self.accelerator, "scaler", None)) is not None:
            state["scaler"] = scaler
        if self.checkpointer is not None:
            self.checkpointer.close()
        self._tr_loss_kept: tuple[float, int] | None = None
        self.checkpointer = Checkpointer(model, self.optimizer, state=state, found=self._found, **options)
        self._found = None
        if not self.checkpointer.restore():  # a checkpoint of the Trainer's own may be where it begins
            self.checkpointer.step_number = self.state.global_step
        self._drawn = user_state.random_state() if self._resumed else None
        return model, loader

    def _run_epoch(self, *arguments: Any, **named: Any) -> Any:
        if (
            self._resumed
        ):  # so that batches are skipped and random numbers put back where the Trainer does that
            named["resume_from_checkpoint"] = _RESUMED
            self._put_back_losses()
        result = super()._run_epoch(*arguments, **named)
        self._end_step()  # the last of the epoch: what its end draws and evaluates is behind it
        return result

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint != _RESUMED:
            super()._load_rng_state(checkpoint)
        elif self._drawn is not None:
            drawn, self._drawn = self._drawn, None
            user_state.set_random_state(drawn)

    def _maybe_log_save_evaluate(self, *arguments: Any, **named: Any) -> Any:
        if not self.keeps_own_checkpoints:
            self.control.should_save = False
        result = super()._maybe_log_save_evaluate(*arguments, **named)
        if self.state.global_step % self._steps_per_epoch:
            self._end_step()
        return result

    def _end_step(self) -> None:
        if self.checkpointer is not None and self.state.global_step > self.checkpointer.step_number:
            self.checkpointer.step()

    def _put_back_losses(self) -> None:
        if self._tr_loss_kept is not None:
            total, logged = self._tr_loss_kept
            self._tr_loss_kept = None
            self._tr_loss.fill_(total)
            self._globalstep_last_logged = logged


class _TrainerState:
    """What a Trainer knows of its own progress: history, best metric, counters, losses not yet logged."""

    def __init__(self, trainer: Resumable) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        plain = {
            field.name: getattr(trainer.state, field.name)
            for field in dataclasses.fields(trainer.state)
            if field.name != "stateful_callbacks" and _is_plain(getattr(trainer.state, field.name))
        }
        callbacks = [(name, each.state()["attributes"]) for name, each in self._stateful()]
        losses = getattr(trainer, "_tr_loss", None)
        waiting = None if losses is None else [float(losses), trainer._globalstep_last_logged]
        return {
            "state": plain,
            "losses": waiting,
            "callbacks": [each for each in callbacks if _is_plain(each)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["state"].items():
            # How long this training is, its arguments say: they may be others than before.
            if name not in ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps"):
                setattr(self._trainer.state, name, value)
        kept = list(state["callbacks"])
        for name, callback in self._stateful():
            same = next((each for each in kept if each[0] == name), None)
            if same is not None:
                kept.remove(same)
                for attribute, value in same[1].items():
                    setattr(callback, attribute, value)
        if state["losses"] is not None:
            self._trainer._tr_loss_kept = tuple(state["losses"])

    def _stateful(self) -> list[tuple[str, Any]]:
        """Callbacks with a state of their own (`ExportableState`), such as EarlyStoppingCallback, by the
        names of their classes."""
        known = ((type(each).__name__, each) for each in self._trainer.callback_handler.callbacks)
        return [
            (name, each) for name, each in known if hasattr(each, "state") and hasattr(each, "from_state")
        ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or type(value) in (int, float, bool, str)
