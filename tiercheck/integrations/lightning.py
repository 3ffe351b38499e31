"""Brings a Lightning Trainer back in the middle of an epoch, bit for bit.

    Trainer(callbacks=[TierCheck(every=50)], enable_checkpointing=False).fit(model, loader)

A callback is enough: `on_fit_start` is called when model and optimizers are where they will be trained, and
before Lightning's loops look at how far they are. The loops, schedulers, precision plugin, other callbacks,
the datamodule and the loader's position are what Lightning itself would write into its checkpoint. Lightning
skips no batches: for a position inside of an epoch the loader needs `state_dict`, as torchdata's
StatefulDataLoader has it. A step that a validation follows in mid-epoch is kept after it, with the metrics
that schedules and other callbacks look at. Needs lightning (or pytorch_lightning) 2.5 or later.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tiercheck.trainer.backends.backend import RestoreError
from tiercheck.trainer.checkpointer import Checkpointer
from tiercheck.trainer.state import user_state

try:
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError:  # the same under its other name
    from pytorch_lightning.callbacks import Callback


class TierCheck(Callback):  # type: ignore[misc, unused-ignore]
    """`every`, `folder`, `keep`, `sanity_gate`, `state`: as for Checkpointer."""

    def __init__(
        self,
        *,
        every: int | None = None,
        folder: Path | str | None = None,
        keep: int = 2,
        sanity_gate: bool | None = None,
        state: user_state.State | None = None,
    ) -> None:
        self._options: dict[str, Any] = {
            "every": every,
            "folder": folder,
            "keep": keep,
            "sanity_gate": sanity_gate,
        }
        self._more = state or {}
        self._drawn: dict[str, Any] | None = None
        self._validates = False
        """Whether a validation is under way that belongs to the step."""
        self.metrics: dict[str, Any] = {}
        """What was logged until the last validation or epoch, for schedules and callbacks that monitor it."""
        self.between_epochs = False
        """Whether a step is kept of which Lightning's loops have yet to begin their epoch."""
        self.checkpointer: Checkpointer | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # What other callbacks do at the end of a batch or a validation belongs to the step; what they do at
        # the start of an epoch comes after its last one, and is done again after a restore.
        others = [
            each for each in trainer.callbacks if each is not self and not isinstance(each, _EpochStart)
        ]
        trainer.callbacks = [_EpochStart(self), *others, self]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        state = {"lightning": _Progress(trainer, self), **self._more}
        model = trainer.strategy.model
        # A strategy wraps the module for DistributedDataParallel; without one it is the module itself.
        self.checkpointer = Checkpointer(
            pl_module if model is None else model, trainer.optimizers, state=state, **self._options
        )
        if self.checkpointer.restore():
            # The loaders' iterators draw seeds before the first batch, which they would not have done in
            # mid-epoch.
            self._drawn = user_state.random_state()
            self._forget_ckpt_path(trainer)

    def _forget_ckpt_path(self, trainer: Any) -> None:
        """What Lightning has read of `ckpt_path` would be loaded after this: it is where the first life
        began."""
        if trainer.ckpt_path is not None and trainer.strategy.restore_checkpoint_after_setup:
            raise RestoreError(
                f"{type(trainer.strategy).__name__} would load {trainer.ckpt_path} now: leave ckpt_path out"
            )
        trainer._checkpoint_connector._loaded_checkpoint = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if (
            self.checkpointer is not None
            and not self.checkpointer.step_number
            and len(trainer.optimizers) == 1
        ):
            self.checkpointer.step_number = trainer.global_step  # `ckpt_path` is where it begins
        if self.between_epochs:
            # The loaders came back at the end of their epoch, not yet aware of it: let them find out, and
            # begin the next.
            fetcher = trainer.fit_loop._data_fetcher
            next(fetcher.iterator, None)
            iter(fetcher)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._drawn is not None:
            user_state.set_random_state(self._drawn)
            self._drawn = None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        epoch = trainer.fit_loop.epoch_loop
        if epoch.batch_progress.is_last_batch:
            return  # kept by `begin_epoch`
        self._validates = (
            epoch._should_check_val_fx(trainer.fit_loop._data_fetcher) and not epoch.val_loop.skip
        )
        if not self._validates:
            self._end_step(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._validates:
            self._validates = False
            self._keep_metrics(trainer)
            self._end_step(trainer)

    def begin_epoch(self, trainer: Any) -> None:
        """Ends the last step of the epoch before: validation and schedules at its end are behind it."""
        if (
            self.between_epochs
        ):  # restored: the loop begins its epoch like any other, and takes up nothing of the one before
            self.between_epochs = False
            trainer.fit_loop.epoch_loop.restarting = False
            return
        self._keep_metrics(trainer)
        self.between_epochs = True
        self._end_step(trainer)
        self.between_epochs = False

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end_step(trainer)
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def _keep_metrics(self, trainer: Any) -> None:
        # In host memory: they are written with every step, and nothing then has to wait for the device.
        self.metrics = {
            name: torch.as_tensor(each).to("cpu", copy=True)
            for name, each in trainer.callback_metrics.items()
        }

    def _end_step(self, trainer: Any) -> None:
        # In the middle of accumulated gradients there is no step to keep.
        if self.checkpointer is not None and trainer.global_step > self._steps_kept(trainer):
            self.checkpointer.step()

    def _steps_kept(self, trainer: Any) -> int:
        assert self.checkpointer is not None
        # With several optimizers (manual optimization) Lightning counts the updates of each: any of them ends
        # the batch's step.
        return self.checkpointer.step_number if len(trainer.optimizers) == 1 else trainer.global_step - 1

    def _close(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.close()


class _EpochStart(Callback):  # type: ignore[misc, unused-ignore]
    """Stands before all other callbacks."""

    def __init__(self, own: TierCheck) -> None:
        self._own = own

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._own.begin_epoch(trainer)


class _Progress:
    """What Lightning's own checkpoint holds beside the weights and the optimizers."""

    def __init__(self, trainer: Any, own: TierCheck) -> None:
        self._trainer, self._own = trainer, own

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "fit_loop": trainer.fit_loop.state_dict(),
            "between_epochs": self._own.between_epochs,
            "metrics": self._own.metrics,
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin.state_dict(),
            "callbacks": {callback.state_key: callback.state_dict() for callback in self._others()},
            "datamodule": None if trainer.datamodule is None else trainer.datamodule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer.fit_loop.load_state_dict(state["fit_loop"])
        self._own.between_epochs = state["between_epochs"]
        self._own.metrics = state["metrics"]
        trainer._logger_connector._callback_metrics.update(self._own.metrics)
        for config, kept in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(kept)
        if state["precision"]:
            trainer.precision_plugin.load_state_dict(state["precision"])
        for callback in self._others():
            if state["callbacks"].get(callback.state_key):
                callback.load_state_dict(state["callbacks"][callback.state_key])
        if trainer.datamodule is not None and state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])

    def _others(self) -> list[Any]:
        return [
            each
            for each in self._trainer.callbacks
            if each is not self._own and not isinstance(each, _EpochStart)
        ]
