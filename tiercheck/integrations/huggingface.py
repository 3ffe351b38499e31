"""Resumes a transformers Trainer in the middle of an epoch, bit for bit.

    from tiercheck.integrations.huggingface import Resumable

    class MyTrainer(Resumable, Trainer):  # or any subclass of it
        checkpointing = {"folder": "checkpoints", "every": 50}

    MyTrainer(model, TrainingArguments(...)).train()

It is no TrainerCallback, because none is called before the Trainer has decided in which epoch and at which
batch it begins, nor after the evaluation of a step (its random numbers belong to the step). When another
rank of a job is lost, the Trainer's `train` is called again in the same process, with the model and the
optimizer that are there. Needs transformers 5 (the methods in `_NEEDED`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from tiercheck.integrations.callbacks import CallbackWatch, replace_next_call
from tiercheck.trainer.backends.backend import log
from tiercheck.trainer.checkpointer import Checkpointer, Found, find, reenter
from tiercheck.trainer.inprocess.steps import refuse_reentry
from tiercheck.trainer.state import user_state
from tiercheck.trainer.state.plain_attributes import PlainAttributes, names_set_by
from tiercheck.trainer.state.readable import is_readable
from tiercheck.trainer.training import end_run, name_run

_NEEDED = (
    "_init_training_state",
    "_prepare_for_training",
    "_run_epoch",
    "_maybe_log_save_evaluate",
    "_finalize_training",
    "_load_rng_state",
    "get_batch_samples",
    "get_eval_dataloader",
    "get_total_train_batch_size",
)
_RESUMED = "tiercheck"
"""The placeholder for the folder that the Trainer would have loaded a checkpoint from."""
_COMPARED = (
    "max_grad_norm", "lr_scheduler_type", "warmup_", "optim", "label_smoothing", "neftune", "max_steps",
    "num_train_epochs", "seed", "data_seed", "bf16", "fp16", "gradient_accumulation_steps",
    "dataloader_drop_last", "train_sampling_strategy",
)  # fmt: skip
"""The prefixes of arguments that are compared here. Checkpointer compares those of the optimizer."""
_LENGTHS = ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps")
_LIVING = ("model", "model_wrapped", "optimizer", "lr_scheduler", "_created_lr_scheduler")
"""The attributes that `train` leaves in a Trainer and would find in it again."""

if TYPE_CHECKING:
    from typing import Any as _Trainer  # transformers.Trainer, or a subclass of it
else:
    _Trainer = object


class Resumable(_Trainer):  # type: ignore[misc]
    """Makes a Trainer resumable. It comes before the Trainer class among the bases.

    `checkpointing`: arguments of Checkpointer (`every`, `folder`, `keep`, `run`, `sanity_gate`; more for
    `state`). `keeps_own_checkpoints`: False leaves out what `save_strategy` asks for; `save_model` still
    works.
    """

    checkpointing: dict[str, Any] = {}  # noqa: RUF012 - replaced, never changed
    keeps_own_checkpoints = True
    checkpointer: Checkpointer | None = None
    _found: Found | None = None
    _run: str | None = None

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if missing := [name for name in _NEEDED if not hasattr(cls, name)]:
            raise TypeError(
                f"{cls.__name__} has no {', '.join(missing)}: Resumable needs the Trainer of transformers 5"
            )

    def train(self, *arguments: Any, **named: Any) -> Any:
        if self.args.load_best_model_at_end and not self.keeps_own_checkpoints:
            raise ValueError(
                "load_best_model_at_end=True needs the Trainer's own checkpoints, which "
                "keeps_own_checkpoints = False leaves out: remove one of them"
            )
        place = self.checkpointing.get("folder"), self.checkpointing.get("run")
        self._run = name_run(*place)
        try:
            result = reenter(self._train, dict(vars(self)), arguments, named)
        finally:
            if self.checkpointer is not None:
                self.checkpointer.close()
        end_run(*place)
        return result

    def _train(self, before: dict[str, Any], arguments: Any, named: Any) -> Any:
        """Calls the Trainer's own `train`.

        `before`: this Trainer as it was at the first call: what that one counted and opened, a new process
        would not have.
        """
        living = {name: value for name, value in self.__dict__.items() if name in _LIVING}
        if (handle := self.__dict__.get("neftune_hook_handle")) is not None:
            handle.remove()
        self.__dict__ = before | living
        self._found = self._find()
        size = self._found.state.get("trainer", {}).get("batch_size")
        if self.args.auto_find_batch_size and size:
            self._train_batch_size = size  # where the search begins: a larger one did not fit
        return super().train(*arguments, **named)

    def _find(self) -> Found:
        """Finds the version to continue from: after a batch size that did not fit, that of this `train`."""
        if self.checkpointer is not None:
            self.checkpointer.close()
        return find(self.checkpointing.get("folder"), self.checkpointing.get("keep", 2), self._run)

    def _init_training_state(self, max_steps: int, steps_per_epoch: int, *more: Any) -> tuple[int, int]:
        begun: tuple[int, int] = super()._init_training_state(max_steps, steps_per_epoch, *more)
        found = self._found = self._found or self._find()
        self._drawn: dict[str, Any] | None = None
        self._losses: list[Any] | None = None
        self._seconds, self._started, self._steps_in_epoch = 0.0, time.time(), 1
        self._epoch, self._short = begun[0], 0
        self._began: dict[str, Any] | None = None
        self._has_workers = self._stopped = False
        self._kept: dict[str, Any] = dict(found.state.get("trainer", {}))
        self._facts = _describe_arguments(self, steps_per_epoch)
        self._resumed = found.step > 0
        if not self._resumed:
            return begun
        self.state.global_step = found.step
        self._epoch, batches = self._find_position(max_steps, steps_per_epoch)
        self._kept["batches"] = 0 if self.args.ignore_data_skip else batches
        return self._epoch, self._kept["batches"]

    def _find_position(self, max_steps: int, steps_per_epoch: int) -> tuple[int, int]:
        """Returns the epoch and its batches that are done, converted if they had another size."""
        kept, step, accumulation = self._kept, self.state.global_step, self.args.gradient_accumulation_steps
        if "epoch" not in kept:
            log.warning("the version of step %d has no position in the data: it is taken from the step", step)
            return step // steps_per_epoch, step % steps_per_epoch * accumulation
        epoch, batches, samples = kept["epoch"], kept["batches"], kept["batches"] * kept["samples"]
        pairs = ((name, old, self._facts.get(name, old)) for name, old in kept["facts"].items())
        changed = [f"{name} {old} -> {new}" for name, old, new in pairs if new != old]
        if not changed:
            return epoch, batches
        batches = samples // _samples_per_batch(self)
        done = epoch * steps_per_epoch + batches // accumulation
        if self.args.max_steps <= 0 and steps_per_epoch != kept["facts"]["steps per epoch"]:
            self.state.max_steps = step + max(0, max_steps - done)  # as many epochs as were asked for
        log.warning(
            "not as when step %d was saved: %s. Data go on at batch %d of epoch %d (%d samples are done)",
            *(step, ", ".join(changed), batches, epoch, samples),
        )
        return epoch, batches

    def _prepare_for_training(self, max_steps: int, *more: Any) -> Any:
        model, loader = super()._prepare_for_training(self.state.max_steps, *more)
        options = {**self.checkpointing, "run": self._run}
        progress = _TrainerState(self)
        state = {"trainer": progress, "scheduler": self.lr_scheduler, **options.pop("state", {})}
        if (scaler := getattr(self.accelerator, "scaler", None)) is not None:
            state["scaler"] = scaler
        self.checkpointer = Checkpointer(model, self.optimizer, state=state, found=self._found, **options)
        self._found = None
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            refuse_reentry("a Trainer cannot prepare a model for FSDP or DeepSpeed twice")
        if not self.checkpointer.restore():  # a checkpoint of the Trainer's own may be where it begins
            self.checkpointer.step_number = self.state.global_step
        if self._resumed:
            self._begin_epoch_as_saved(progress)
        return model, loader

    def _begin_epoch_as_saved(self, progress: _TrainerState) -> None:
        """Lets callbacks begin the epoch as they had, though the Trainer calls them at each start.

        At an epoch's begin they draw the numbers that none has drawn yet. In its middle they had begun it."""
        drawn = user_state.random_state()
        is_begun = bool(self._kept["batches"])
        if is_begun or self.args.ignore_data_skip:
            self._drawn = drawn

        def on_epoch_begin(begin: Any, *given: Any) -> Any:
            if self._drawn is None:
                user_state.set_random_state(drawn)
            progress.load_callbacks()  # `on_train_begin` may have reset them
            control = begin(*given)
            if is_begun:
                progress.load_callbacks()
            return control

        replace_next_call(self.callback_handler, "on_epoch_begin", on_epoch_begin)

    def _run_epoch(self, *, train_dataloader: Any, epoch: int, steps_in_epoch: int, **named: Any) -> Any:
        resumed, self._resumed = self._resumed, False
        self._loader, self._epoch, self._steps_in_epoch = train_dataloader, epoch, steps_in_epoch
        self._started = named["start_time"]
        if resumed:
            self._put_back_losses()
            if self._has_ended():
                self.control.should_training_stop = True
                return None
            # so that batches are skipped and random numbers put back where the Trainer does that
            named["resume_from_checkpoint"] = _RESUMED
            self._begin_again()
        else:
            self._began = self._describe_begin()
        result = super()._run_epoch(
            train_dataloader=train_dataloader, epoch=epoch, steps_in_epoch=steps_in_epoch, **named
        )
        if getattr(_base(train_dataloader), "persistent_workers", False):
            if resumed and self._kept["batches"]:
                _draw_no_seed(train_dataloader)  # this epoch had a loader of its own
            self._has_workers = True
        if self.control.should_epoch_stop or self._batches == steps_in_epoch:
            self._epoch += 1
        self._end_step()  # the last of the epoch: what its end draws and evaluates is behind it
        return result

    @property
    def _batches(self) -> int:
        """Returns the number of batches of the epoch that are done, as the Trainer counts them."""
        done: int = round((self.state.epoch - self._epoch) * self._steps_in_epoch)
        return max(0, done)

    def _has_ended(self) -> bool:
        step, most = self.state.global_step, self.state.max_steps
        self._stopped = self._kept.get("stopped", False) and most == self._kept["max_steps"]
        if self._stopped:
            log.warning("an evaluation ended this training at step %d: it makes no further step", step)
        return self._stopped or step >= most

    def _describe_begin(self) -> dict[str, Any]:
        """Returns what the order of an epoch's samples depends on, before it is decided."""
        drawn = {name: user_state.generator_state(each) for name, each in _generators(self._loader).items()}
        return {"random": user_state.random_state(), "generators": drawn, "workers": self._has_workers}

    def _begin_again(self) -> None:
        """Begins the epoch as it once began; `_load_rng_state` then puts back what was drawn since."""
        if (began := self._kept.get("began")) is None:
            self._began = self._describe_begin()
            return
        loader, base = self._loader, _base(self._loader)
        data = getattr(base, "dataset", None)
        if getattr(base, "persistent_workers", False) and (
            isinstance(data, IterableDataset) or hasattr(data, "set_epoch")
        ):
            log.warning(
                "persistent workers are new after a restore: samples are the same only if the %s in them "
                "keeps nothing from epoch to epoch; dataloader_persistent_workers=False is exact",
                type(data).__name__,
            )
        if began["workers"]:
            _draw_no_seed(loader)
        for name, generator in _generators(loader).items():
            if name in began["generators"]:
                user_state.set_generator(generator, began["generators"][name])
        if self._drawn is not None:
            user_state.set_random_state(began["random"])
        self._began, self._has_workers = began, began["workers"]
        self._short = self._kept["batches"] % self.args.gradient_accumulation_steps

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *more: Any, **named: Any) -> Any:
        # The first step after a change of accumulation may have done some of its batches.
        short, self._short = self._short, 0
        return super().get_batch_samples(epoch_iterator, num_batches - short, *more, **named)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        loader = super().get_eval_dataloader(eval_dataset)
        name = eval_dataset if isinstance(eval_dataset, str) else "eval"
        if name in getattr(self, "_kept", {}).get("evaluated", ()):
            _draw_no_seed(loader)  # its workers were there already
        return loader

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint != _RESUMED:
            super()._load_rng_state(checkpoint)
        elif self._drawn is not None:
            drawn, self._drawn = self._drawn, None
            user_state.set_random_state(drawn)

    def _maybe_log_save_evaluate(self, *arguments: Any, **named: Any) -> Any:
        if not self.keeps_own_checkpoints:
            self.control.should_save = False
        ends = self.control.should_training_stop
        result = super()._maybe_log_save_evaluate(*arguments, **named)
        self._stopped |= self.control.should_training_stop and not ends
        last = self._batches == self._steps_in_epoch or self.control.should_epoch_stop
        if not last and not self.control.should_training_stop:
            self._end_step()
        return result

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        self._put_back_losses()  # of a training that has no epoch left
        if self.checkpointer is not None:
            self.checkpointer.wait()  # before the best model takes the place of the last
        # Loss, time and speed are those of the whole training, and not of its last run.
        return super()._finalize_training(trial, num_train_samples, start_time - self._seconds)

    def _end_step(self) -> None:
        if self.checkpointer is not None and self.state.global_step > self.checkpointer.step_number:
            self.checkpointer.step()

    def _put_back_losses(self) -> None:
        if self._losses is not None:
            waiting, self._globalstep_last_logged, self._total_loss_scalar, first, seconds = self._losses
            self._tr_loss.copy_(waiting)
            self._initial_global_step, self._seconds, self._losses = first, seconds, None


class _TrainerState:
    """The Trainer's own progress: position, history, best metric, losses not yet logged."""

    def __init__(self, trainer: Resumable) -> None:
        self._trainer = trainer
        self._watch = CallbackWatch("state() and from_state()")
        self._callbacks: list[Any] = []
        # A callback may change an argument in the middle, and a subclass may keep numbers of its own.
        kind: Any = type(trainer)
        others = {*_LENGTHS, *names_set_by(kind, of=("transformers.", "tiercheck."))}
        self._attributes = PlainAttributes(
            trainer,
            lambda: [("args.", trainer.args.__dict__, ()), ("", trainer.__dict__, ())],
            lambda _, name: name not in others,
        )
        self._attributes.begin()

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        plain = {
            field.name: getattr(trainer.state, field.name)
            for field in dataclasses.fields(trainer.state)
            if field.name != "stateful_callbacks" and is_readable(getattr(trainer.state, field.name))
        }
        callbacks = [(name, each.state()["attributes"]) for name, each in self._stateful()]
        self._watch.look(each for each in trainer.callback_handler.callbacks if not _is_stateful(each))
        losses = None
        if getattr(trainer, "_tr_loss", None) is not None:
            sums = (trainer._globalstep_last_logged, trainer._total_loss_scalar, trainer._initial_global_step)
            losses = [trainer._tr_loss.detach(), *sums, time.time() - trainer._started + trainer._seconds]
        batches = trainer._batches
        return {
            "state": plain,
            "losses": losses,
            "callbacks": [each for each in callbacks if is_readable(each) or _warn_of_callback(each[0])],
            "epoch": trainer._epoch,
            "batches": batches,
            "samples": _samples_per_batch(trainer),
            "began": trainer._began if batches or trainer._began is None else trainer._describe_begin(),
            "batch_size": trainer._train_batch_size,
            "evaluated": list(getattr(trainer, "_eval_dataloaders", ())),
            "stopped": trainer._stopped,
            "max_steps": trainer.state.max_steps,
            "facts": trainer._facts,
            "attributes": self._attributes.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["state"].items():
            # The arguments set the length of this training: they may be others than before.
            if name not in _LENGTHS:
                setattr(self._trainer.state, name, value)
        best = self._trainer.state.best_model_checkpoint
        if best is not None and not os.path.isdir(best):
            self._trainer.state.best_model_checkpoint = None
            log.warning(
                "the best checkpoint %s is gone: put output_dir on a volume that outlives the pod. Without a "
                "better one, load_best_model_at_end leaves the last model",
                best,
            )
        self._callbacks = state["callbacks"]
        self.load_callbacks()
        self._trainer._losses = state["losses"]
        self._attributes.load_state_dict(state["attributes"])

    def load_callbacks(self) -> None:
        """Gives the callbacks what they had when the version was saved."""
        kept, device = list(self._callbacks), self._trainer.args.device
        for name, callback in self._stateful():
            same = next((each for each in kept if each[0] == name), None)
            if same is not None:
                kept.remove(same)
                for attribute, value in same[1].items():
                    if isinstance(value, torch.Tensor):  # callbacks keep it beside the model, mostly
                        here = getattr(callback, attribute, None)
                        setattr(callback, attribute, value.to(getattr(here, "device", None) or device))
                    else:
                        setattr(callback, attribute, value)

    def _stateful(self) -> list[tuple[str, Any]]:
        """Returns stateful callbacks (`ExportableState`), such as EarlyStoppingCallback, by class name."""
        known = self._trainer.callback_handler.callbacks
        return [(type(each).__name__, each) for each in known if _is_stateful(each)]


def _is_stateful(callback: Any) -> bool:
    return hasattr(callback, "state") and hasattr(callback, "from_state")


@functools.cache
def _warn_of_callback(name: str) -> None:
    log.warning("the state() of callback %s could not be read back, and is in no version", name)


def _describe_arguments(trainer: Any, steps_per_epoch: int) -> dict[str, Any]:
    """Returns what position and hyper-parameters depend on, by the names that report their change."""
    length = len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else None
    known = ((name, getattr(value, "value", value)) for name, value in vars(trainer.args).items())
    return {
        "per_device_train_batch_size": trainer._train_batch_size,
        "ranks": trainer.args.world_size,
        "length of train_dataset": length,
        "steps per epoch": None if length is None else steps_per_epoch,
        **{name: value for name, value in known if name.startswith(_COMPARED) and is_readable(value)},
    }


def _samples_per_batch(trainer: Any) -> int:
    """Returns the number of samples in a batch of all ranks together."""
    total: int = trainer.get_total_train_batch_size(trainer.args)
    accumulation: int = trainer.args.gradient_accumulation_steps
    return max(1, total // accumulation)


def _base(loader: Any) -> Any:
    """Returns the DataLoader itself: Accelerate has an object around it."""
    return getattr(loader, "base_dataloader", loader)


def _draw_no_seed(loader: Any) -> None:
    """Keeps the next iterator from drawing a seed for its workers, which an undisturbed run had already."""
    _base(loader).generator = torch.Generator()


def _generators(holder: Any, name: str = "") -> dict[str, Any]:
    """Returns the random generators that a loader, its samplers and its dataset keep, by their paths."""
    found: dict[str, Any] = {}
    for attribute, value in getattr(_base(holder), "__dict__", {}).items():
        path = f"{name}.{attribute}"
        if attribute in ("batch_sampler", "sampler", "dataset") and value is not None:
            found |= _generators(value, path)
        elif user_state.generator_state(value) is not None:
            found[path] = value
    return found
