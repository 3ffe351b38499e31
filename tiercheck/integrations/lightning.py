"""Resumes a Lightning Trainer in the middle of an epoch, bit for bit.

    Trainer(callbacks=[TierCheck(every=50)], enable_checkpointing=False).fit(model, loader)

A callback is enough: `on_fit_start` is called when model and optimizers are where they will be trained, and
before Lightning's loops look at how far they are. The loops, schedulers, precision plugin, other callbacks,
the datamodule and the loader's position are what Lightning itself would write into its checkpoint. Lightning
skips no batches: for a position inside of an epoch the loader needs `state_dict`, as torchdata's
StatefulDataLoader has it. A step that a validation follows in mid-epoch is kept after it, with the metrics
that schedules and other callbacks look at. When another rank of a job is lost, `fit` begins its loops again
in the same process, with the model and the optimizers that are there. Needs lightning (or pytorch_lightning)
2.5 or later.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import prune

from tiercheck.integrations.callbacks import FRAMEWORKS, CallbackWatch, replace_next_call
from tiercheck.trainer.backends.backend import RestoreError, log
from tiercheck.trainer.checkpointer import Checkpointer, find, reenter
from tiercheck.trainer.inprocess.groups import groups
from tiercheck.trainer.inprocess.steps import refuse_reentry
from tiercheck.trainer.state import user_state
from tiercheck.trainer.state.plain_attributes import PlainAttributes
from tiercheck.trainer.training import end_run, name_run

try:
    from lightning.pytorch import callbacks, strategies
except ModuleNotFoundError:  # the same under its other name
    from pytorch_lightning import callbacks, strategies

_ON_THEIR_WAY = ("BaseFinetuning", "ModelPruning", "StochasticWeightAveraging", "WeightAveraging")
"""The callbacks that change model or optimizers in training, so that an older version may not fit."""
_SETTINGS = ("gradient_clip_val", "gradient_clip_algorithm")
"""The Trainer's attributes that a script may change in the middle."""
_AVERAGING = getattr(callbacks, "WeightAveraging", ())
"""The callback with an averaged model that its state_dict lacks; an older Lightning has none."""


class TierCheck(callbacks.Callback):  # type: ignore[misc, unused-ignore]
    """Saves and restores a Trainer. The arguments are as for Checkpointer."""

    def __init__(
        self,
        *,
        every: int | None = None,
        folder: Path | str | None = None,
        keep: int = 2,
        run: str | None = None,
        sanity_gate: bool | None = None,
        state: user_state.State | None = None,
    ) -> None:
        self._options: dict[str, Any] = {"every": every, "sanity_gate": sanity_gate}
        self._folder, self._keep, self._run = folder, keep, run
        self._more = state or {}
        self._drawn: dict[str, Any] | None = None
        self.metrics: dict[str, Any] = {}
        """The metrics logged up to the last validation or epoch, for schedules and callbacks."""
        self.between_epochs = False
        """True while the step that is saved or restored lies between two epochs of Lightning's loops."""
        self.logged: dict[str, list[Any]] = {}
        """The metrics logged in the epoch before the restore, and not since: sum, and number of samples."""
        self.checkpointer: Checkpointer | None = None
        self._before: list[tuple[Any, dict[str, Any]]] = []
        """The other callbacks and the Trainer, with the attributes that they had before the loops began."""
        self._has_begun = False
        _keep_paths_alone()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # What other callbacks do at the end of a batch or a validation belongs to the step; what they do at
        # the start of an epoch comes after its last one, and is done again after a restore.
        others = [
            each for each in trainer.callbacks if each is not self and not isinstance(each, _EpochStart)
        ]
        trainer.callbacks = [_EpochStart(self), *others, self]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        run = name_run(self._folder, self._run)
        found = find(self._folder, self._keep, run)
        progress = _Progress(trainer, pl_module, self)
        for each in (pl_module, *trainer.callbacks):
            if not (module := type(each).on_save_checkpoint.__module__).startswith(FRAMEWORKS):
                log.warning(
                    "%s.on_save_checkpoint (%s) is not called: give TierCheck `state`, an object with "
                    "state_dict and load_state_dict, if training depends on what it stores",
                    type(each).__name__,
                    module.partition(".")[0],
                )
        progress.prune(found.state.get("lightning", {}).get("pruned", ()))
        averaged = [each for each in trainer.callbacks if isinstance(each, _AVERAGING)]
        state = {
            "lightning": progress,
            **{f"averaged {number}": each._average_model for number, each in enumerate(averaged)},
            **self._more,
        }
        model = trainer.strategy.model
        # A strategy wraps the module for DistributedDataParallel; without one it is the module itself.
        self.checkpointer = Checkpointer(
            pl_module if model is None else model,
            trainer.optimizers,
            state=state,
            found=found,
            run=run,
            **self._options,
        )
        self._before = [(each, dict(vars(each))) for each in trainer.callbacks if each is not self]
        plain = {key: value for key, value in vars(trainer).items() if isinstance(value, (int, float, str))}
        self._before.append((trainer, plain))
        self._has_begun = False
        replace_next_call(trainer, "_run_stage", lambda run: reenter(self._run_stage, trainer, run))
        self._restore(trainer)

    def _run_stage(self, trainer: Any, run: Callable[[], None]) -> None:
        """Runs what Lightning does from here on, as in a new process if another rank was lost."""
        if self._has_begun:
            trainer.fit_loop = _begin_loops(trainer)
            trainer.training = True
            trainer._logger_connector.reset_results()
            trainer._logger_connector.reset_metrics()
            self.metrics = {}
            for holder, before in self._before:
                vars(holder).update(before)
            self._restore(trainer)
            trainer._checkpoint_connector.resume_end()  # waits for the others
        self._has_begun = True
        self._end_batches(trainer)
        run()

    def _restore(self, trainer: Any) -> None:
        assert self.checkpointer is not None
        self._drawn, self.between_epochs, self.logged = None, False, {}
        if self.checkpointer.restore():
            # The loaders' iterators draw seeds before the first batch, which they would not have done in
            # mid-epoch.
            self._drawn = user_state.random_state()
            # Another release of Lightning may lack it: then the first hook of the batch does it.
            replace_next_call(trainer.fit_loop.epoch_loop, "_on_before_fetch", self._draw_before_fetch)
            # Made by a LearningRateFinder: only a loader that is made now gets its position.
            loop = trainer.fit_loop
            loop._combined_loader = None
            replace_next_call(
                loop, "_load_combined_loader_states", lambda load: self._load_loaders(loop, load)
            )
            self._forget_ckpt_path(trainer)

    def _draw_before_fetch(self, begin: Callable[[], None]) -> None:
        """Puts random numbers back before the first batch is fetched: a dataset may draw to augment it."""
        if not self.between_epochs:
            self._put_back_drawn()
        begin()

    def _put_back_drawn(self) -> None:
        if self._drawn is not None:
            user_state.set_random_state(self._drawn)
            self._drawn = None

    def _load_loaders(self, loop: Any, load: Callable[[], None]) -> None:
        """Loads positions after samplers have their epoch, which Lightning sets when their order is fixed."""
        for each in loop._combined_loader.flattened:
            sys.modules[type(loop).__module__]._set_sampler_epoch(each, loop.epoch_progress.current.processed)
        load()

    def _forget_ckpt_path(self, trainer: Any) -> None:
        """Discards what Lightning read of `ckpt_path`, where the first run began. Raises RestoreError."""
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
            self.checkpointer.step_number = trainer.global_step  # training begins at the step of `ckpt_path`
        fetcher = trainer.fit_loop._data_fetcher
        if why := self._find_refusal(trainer, pl_module):
            refuse_reentry(why)
        for each in fetcher.combined_loader.flattened:
            if name := _find_hidden_sampler(each):
                log.warning(
                    "Order: for several ranks Lightning wraps the %s of a loader, and the loader's state "
                    "lacks its position: if its order changes from epoch to epoch, give the loader a "
                    "DistributedSampler, whose order follows from seed and epoch",
                    name,
                )
        if self._drawn is not None and not self.between_epochs:
            for each in trainer.callbacks:  # sets again what it set when the epoch began
                if isinstance(each, callbacks.GradientAccumulationScheduler):
                    each.on_train_epoch_start(trainer)
            loaders = fetcher.combined_loader.flattened
            if fetcher.length is None or not all(hasattr(each, "state_dict") for each in loaders):
                log.warning(
                    "restored in mid-epoch, and its data begin anew or miss a batch: only a loader "
                    "with state_dict and a length (torchdata's StatefulDataLoader) goes on where it was"
                )

    def _find_refusal(self, trainer: Any, pl_module: Any) -> str:
        """Returns why a process cannot begin its loops again; empty: it can."""
        for each in trainer.callbacks:
            if names := {kind.__name__ for kind in type(each).__mro__}.intersection(_ON_THEIR_WAY):
                return f"{names.pop()} changes model or optimizers on its way"
        loaders = trainer.fit_loop._data_fetcher.combined_loader.flattened
        if not all(hasattr(each, "state_dict") for each in loaders):
            return "a loader has no state_dict"
        return "" if pl_module.automatic_optimization else "optimization is manual"

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self.between_epochs:
            # The loaders were restored at the end of their epoch: `next` lets them detect it, and `iter`
            # begins the next one, which draws what it would have drawn.
            self.between_epochs = False
            fetcher = trainer.fit_loop._data_fetcher
            if all(hasattr(each, "state_dict") for each in fetcher.combined_loader.flattened):
                next(fetcher.iterator, None)
            self._put_back_drawn()
            iter(fetcher)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.logged:
            log.warning(
                "%s of this epoch are of its batches since the restore: log them at each batch to keep them",
                ", ".join(sorted(self.logged)),
            )
            self.logged = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        trainer.fit_loop._restarting = False  # or schedules of epoch metrics would miss the end of this epoch
        self._put_back_drawn()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._add_logged(trainer.fit_loop.epoch_loop._results)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._keep_metrics(trainer)

    def _end_batches(self, trainer: Any) -> None:
        """Ends steps when a batch of Lightning's loop has ended: after hooks, validation and schedulers."""
        loop = trainer.fit_loop.epoch_loop
        begin, end = loop.on_run_start, loop.on_advance_end

        def on_run_start(*given: Any) -> None:
            begin(*given)
            loop.restarting = False  # or it would end the last batch again if a validation followed it

        def on_advance_end(*given: Any) -> None:
            end(*given)
            if not loop.batch_progress.is_last_batch:  # that one is kept by `begin_epoch`
                self._end_step(trainer)

        loop.on_run_start, loop.on_advance_end = on_run_start, on_advance_end

    def begin_epoch(self, trainer: Any) -> None:
        """Ends the last step of the previous epoch, after the validation and schedules at its end."""
        # Restored: the loop begins its epoch as any other, and takes up nothing of the one before.
        if self.between_epochs:
            trainer.fit_loop.epoch_loop.restarting = False
            # Lightning counts it in the total only, and would take the next such version for a finished one.
            epochs = trainer.fit_loop.epoch_progress.current
            epochs.ready = epochs.started + 1
            return
        self._keep_metrics(trainer)
        self.between_epochs = True
        self._end_step(trainer)
        self.between_epochs = False

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end_step(trainer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()  # also of a training that had no epoch left
        end_run(self._folder, self._run)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def _keep_metrics(self, trainer: Any) -> None:
        # In host memory: they are written with every step, and nothing then has to wait for the device.
        self.metrics = {
            name: torch.as_tensor(each).to("cpu", copy=True)
            for name, each in trainer.callback_metrics.items()
        }

    def _add_logged(self, results: Any) -> None:
        """Adds what was logged before the restore to each metric, once that is logged again."""
        for name in self.logged.keys() & results.keys():
            (value, size), metric = self.logged.pop(name), results[name]
            value, extreme = value.to(metric.value.device), metric.meta
            if extreme.is_max_reduction or extreme.is_min_reduction:
                metric.value = extreme.reduce_fx(metric.value, value)
            else:
                metric.value = metric.value + value
            if size is not None:
                metric.cumulated_batch_size = metric.cumulated_batch_size + size.to(metric.value.device)

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


def _find_hidden_sampler(loader: Any) -> str:
    """Returns the class of a sampler that Lightning has wrapped and that has no set_epoch; empty: none."""
    outer = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    inner = getattr(getattr(outer, "dataset", None), "_sampler", None)
    wrapped = type(outer).__name__ == "DistributedSamplerWrapper" and not hasattr(inner, "set_epoch")
    return type(inner).__name__ if wrapped else ""


class _EpochStart(callbacks.Callback):  # type: ignore[misc, unused-ignore]
    """Runs before all other callbacks."""

    def __init__(self, own: TierCheck) -> None:
        self._own = own

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._own.begin_epoch(trainer)


class _Progress:
    """The content of Lightning's own checkpoint beside weights and optimizers, and the epoch's metrics."""

    def __init__(self, trainer: Any, module: Any, own: TierCheck) -> None:
        self._trainer, self._module, self._own = trainer, module, own
        self._watch = CallbackWatch("state_dict and load_state_dict")
        self._attributes = PlainAttributes(
            trainer,
            lambda: [
                ("hparams.", module.hparams if isinstance(module.hparams, dict) else {}, ()),
                ("trainer.", vars(trainer), ()),
            ],
            lambda before, name: before == "hparams." or name in _SETTINGS,
        )
        self._attributes.begin()

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        saved = {callback.state_key: callback.state_dict() for callback in self._others()}
        self._watch.look(each for each in self._others() if not saved[each.state_key])
        return {
            "fit_loop": trainer.fit_loop.state_dict(),
            "between_epochs": self._own.between_epochs,
            "metrics": self._own.metrics,
            "logged": {**self._own.logged, **_list_logged(trainer.fit_loop.epoch_loop._results)},
            "schedulers": [
                (type(each.scheduler).__name__, each.scheduler.state_dict())
                for each in trainer.lr_scheduler_configs
            ],
            "precision": trainer.precision_plugin.state_dict(),
            "callbacks": saved,
            "datamodule": None if trainer.datamodule is None else trainer.datamodule.state_dict(),
            "pruned": self._list_pruned(),
            "attributes": self._attributes.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer.fit_loop.load_state_dict(state["fit_loop"])
        self._own.between_epochs = state["between_epochs"]
        self._own.metrics, self._own.logged = state["metrics"], state["logged"]
        trainer._logger_connector._callback_metrics.update(self._own.metrics)
        if state["precision"]:
            trainer.precision_plugin.load_state_dict(state["precision"])
        for callback in self._others():
            if kept := state["callbacks"].get(callback.state_key):
                callback.load_state_dict(kept)
            self._begin_again(callback)
        self._load_schedulers(state["schedulers"])
        if trainer.datamodule is not None and state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])
        self._attributes.load_state_dict(state["attributes"])

    def _begin_again(self, callback: Any) -> None:
        """Repeats what Lightning's own callbacks did at the start of an earlier epoch, and do not keep."""
        trainer = self._trainer
        if isinstance(callback, callbacks.StochasticWeightAveraging) and callback._scheduler_state:
            (optimizer,), progress = trainer.optimizers, trainer.fit_loop.epoch_progress.current
            values = [{**group} for group in optimizer.param_groups]
            now, progress.completed = progress.completed, callback._latest_update_epoch
            callback.on_train_epoch_start(trainer, self._module)
            progress.completed = now
            for group, value in zip(optimizer.param_groups, values, strict=True):
                group.update(value)  # a new scheduler begins with a rate of its own

    def _load_schedulers(self, kept: list[Any]) -> None:
        here = [config.scheduler for config in self._trainer.lr_scheduler_configs]
        then, now = [name for name, _ in kept], [type(each).__name__ for each in here]
        if then != now:
            log.warning("schedulers %s were saved, here are %s: only equal ones are loaded", then, now)
        for scheduler, name, (old, state) in zip(here, now, kept, strict=False):
            if name == old:
                scheduler.load_state_dict(state)

    def _list_pruned(self) -> list[str]:
        if not any(isinstance(each, callbacks.ModelPruning) for each in self._trainer.callbacks):
            return []
        return [
            f"{name}.{hook._tensor_name}"
            for name, module in self._module.named_modules()
            for hook in module._forward_pre_hooks.values()
            if isinstance(hook, prune.BasePruningMethod)
        ]

    def prune(self, names: Sequence[str]) -> None:
        """Gives these parameters masks, for the version's to be loaded into."""
        if names and any(getattr(each, "_original_layers", None) for each in self._trainer.callbacks):
            log.warning(
                "ModelPruning keeps the first weights nowhere: those that it goes back to after this restore "
                "(use_lottery_ticket_hypothesis) are those of this start"
            )
        for path in names:
            owner, _, name = path.rpartition(".")
            module = self._module.get_submodule(owner)
            if not hasattr(module, f"{name}_mask"):
                prune.identity(module, name)  # type: ignore[no-untyped-call]

    def _others(self) -> list[Any]:
        return [each for each in self._trainer.callbacks if not isinstance(each, (TierCheck, _EpochStart))]


@functools.cache
def _keep_paths_alone() -> None:
    """Lets a rank that builds its model alone keep its own folders for logs and checkpoints.

    Lightning gives all ranks those that rank 0 has. Nothing that is trained depends on them.
    """
    for kind in (strategies.DDPStrategy, strategies.ModelParallelStrategy):

        def broadcast(strategy: Any, value: Any, src: int = 0, known: Any = kind.broadcast) -> Any:
            caller, exchanged = sys._getframe(1).f_globals["__name__"], groups().exchanged
            if not caller.endswith((".trainer.trainer", ".callbacks.model_checkpoint")):
                return known(strategy, value, src)
            value = value if groups().is_detached else known(strategy, value, src)
            groups().exchanged = exchanged
            return value

        kind.broadcast = broadcast


def _begin_loops(trainer: Any) -> Any:
    """Returns the loops of `fit` as the Trainer makes them."""
    old = trainer.fit_loop
    new = type(old)(trainer, min_epochs=old.min_epochs, max_epochs=old.max_epochs)
    new.epoch_loop = type(old.epoch_loop)(trainer, min_steps=old.min_steps, max_steps=old.max_steps)
    new._data_source = old._data_source
    new.epoch_loop.val_loop._data_source = old.epoch_loop.val_loop._data_source
    return new


def _list_logged(results: Any) -> dict[str, list[Any]]:
    """Returns what `self.log` has added up since the epoch began."""
    return {
        name: [metric.value.detach(), getattr(metric, "cumulated_batch_size", None)]
        for name, metric in results.items()
        if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset
    }
