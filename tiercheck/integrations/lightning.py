"""A Lightning Trainer restores before its first batch and goes on in the middle of an epoch, bit for bit, by itself.

    Trainer(callbacks=[TierCheck(every=50)], enable_checkpointing=False).fit(model, loader)

A callback is enough: `on_fit_start` is called when model and optimizers are where they will be trained, and before Lightning's
loops look at how far they are. The loops, schedulers, precision plugin, other callbacks, the datamodule and the loader's
position are what Lightning itself would write into its checkpoint. Lightning skips no batches: for a position inside of an epoch the
loader needs `state_dict`, as torchdata's StatefulDataLoader has it. Needs lightning (or pytorch_lightning) 2.5 or later.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiercheck.trainer import user_state
from tiercheck.trainer.checkpointer import Checkpointer

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
        self._options: dict[str, Any] = {"every": every, "folder": folder, "keep": keep, "sanity_gate": sanity_gate}
        self._more = state or {}
        self._drawn: dict[str, Any] | None = None
        self.between_epochs = False
        """Whether a step is kept of which Lightning's loops have yet to begin their epoch."""
        self.checkpointer: Checkpointer | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        state = {"lightning": _Progress(trainer, self), **self._more}
        model = trainer.strategy.model
        # A strategy wraps the module for DistributedDataParallel; without one it is the module itself.
        self.checkpointer = Checkpointer(
            pl_module if model is None else model, trainer.optimizers, state=state, **self._options
        )
        if self.checkpointer.restore():
            # The loaders' iterators draw seeds before the first batch, which they would not have done in mid-epoch.
            self._drawn = user_state.random_state()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.between_epochs:
            self.between_epochs = False
            # The loaders came back at the end of their epoch, not yet aware of it: let them find out, and begin the next.
            fetcher = trainer.fit_loop._data_fetcher
            next(fetcher.iterator, None)
            iter(fetcher)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._drawn is not None:
            user_state.set_random_state(self._drawn)
            self._drawn = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._end_step(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        # The last step of the epoch before: validation and schedules at its end are behind it.
        self.between_epochs = True
        self._end_step(trainer)
        self.between_epochs = False

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end_step(trainer)
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def _end_step(self, trainer: Any) -> None:
        # In the middle of accumulated gradients there is no step to keep.
        if self.checkpointer is not None and trainer.global_step > self._steps_kept(trainer):
            self.checkpointer.step()

    def _steps_kept(self, trainer: Any) -> int:
        assert self.checkpointer is not None
        # With several optimizers (manual optimization) Lightning counts the updates of each: any of them ends the batch's step.
        return self.checkpointer.step_number if len(trainer.optimizers) == 1 else trainer.global_step - 1

    def _close(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.close()


class _Progress:
    """What Lightning's own checkpoint holds beside the weights and the optimizers."""

    def __init__(self, trainer: Any, own: TierCheck) -> None:
        self._trainer, self._own = trainer, own

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "fit_loop": trainer.fit_loop.state_dict(),
            "between_epochs": self._own.between_epochs,
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin.state_dict(),
            "callbacks": {callback.state_key: callback.state_dict() for callback in self._others()},
            "datamodule": None if trainer.datamodule is None else trainer.datamodule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer.fit_loop.load_state_dict(state["fit_loop"])
        self._own.between_epochs = state["between_epochs"]
        if self._own.between_epochs:
            # What the epoch loop does itself at the beginning of an epoch, unless it was loaded.
            epoch = trainer.fit_loop.epoch_loop
            epoch.batch_progress.reset_on_run()
            epoch.scheduler_progress.reset_on_run()
            epoch.automatic_optimization.optim_progress.reset_on_run()
            epoch.val_loop.batch_progress.total.reset()
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
        return [callback for callback in self._trainer.callbacks if callback is not self._own]
