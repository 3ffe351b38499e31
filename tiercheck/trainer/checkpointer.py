"""Saves and restores the state of a rank: the one object that a training script needs.

    checkpointer = Checkpointer(model, optimizer, state={"scheduler": scheduler, "data": position})
    for step in range(checkpointer.restore(), steps):
        ...
        optimizer.step()
        scheduler.step()
        checkpointer.step(loss)

In a cluster snapshots go to the sidecar's shared memory; elsewhere to a folder. The script is the same. With

    for step in checkpointer.steps(total):
        with step:
            ...

as its loop, a process outlives the loss of another rank: model, compiled code and loaders stay. With any
other loop `tiercheck.reenter(train)` calls the training function again.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tiercheck.protocol.local import ReportFailing, ReportRestored
from tiercheck.protocol.names import ENV_RUN_DIR, STEP_SUSPECTED
from tiercheck.trainer import process
from tiercheck.trainer.announcements import SECOND, Announcements, StepProgress
from tiercheck.trainer.backends.backend import Claim, RestoreError
from tiercheck.trainer.deltas.gradients import UpdateHooks
from tiercheck.trainer.inprocess.groups import groups
from tiercheck.trainer.inprocess.half_step import forget_half_step
from tiercheck.trainer.inprocess.steps import RepeatableStep, StepLoop, entered, reenter
from tiercheck.trainer.process import FailureReporter, StepSuspected, StopRequest
from tiercheck.trainer.proof.fingerprints import Fingerprints
from tiercheck.trainer.proof.resume import Resume
from tiercheck.trainer.replicas.equality import Equality
from tiercheck.trainer.replicas.trained_state import TrainedState
from tiercheck.trainer.restore.restoring import Found, Loaded, Restoring, find, open_backend
from tiercheck.trainer.save.capturing import Capturing
from tiercheck.trainer.save.deltas import Deltas
from tiercheck.trainer.save.saver import Saver
from tiercheck.trainer.save.slot_context import UnknownRoom
from tiercheck.trainer.state import user_state
from tiercheck.trainer.tensors.accelerator import Pending
from tiercheck.trainer.tensors.tensor_parts import NotCapturable
from tiercheck.trainer.training import TRAINING, TrainingIdentity, fingerprint, name_of

__all__ = ["Checkpointer", "Found", "find", "reenter"]

groups()  # before the script creates any process group

_Batch = TypeVar("_Batch")

_CLOSE_SECONDS = 60.0
_PAUSE_SECONDS = 4.0
"""Seconds. Limits how long a save in progress may take to end once another attempt has begun."""
_UNDECIDED = 50
"""The number of steps between snapshots, without deltas, until the job sets one."""
_UNDECIDED_WITH_DELTAS = 4


class Checkpointer:
    """Saves and restores the state of one rank.

        checkpointer = Checkpointer(model, optimizer, state={"scheduler": scheduler})
        for step in range(checkpointer.restore(), steps):
            loss = forward_and_backward(step)
            optimizer.step()
            scheduler.step()
            checkpointer.step(loss)

    Only `optimizer.step` may change parameters. No failure to save raises: it is logged once per kind and
    counted in `skipped`. The default random number generators (torch, all CUDA devices, python, numpy) are
    always saved. It is a context manager: leaving it calls `close`.

    Args:
        model: The module that is trained, in its wrapper (DDP, FSDP2, torch.compile) if it has one.
        optimizer: The optimizer, or all of them.
        state: Whatever else the next step depends on, by names of your choice: objects with
            `state_dict`/`load_state_dict`, plain dicts, generators (torch.Generator, numpy's). Modules in it,
            such as averaged weights, are stored as tensors, as the model is.
        every: Steps between snapshots. None: set by the job, 50 outside a cluster.
        folder: Where snapshots go outside a cluster. None: `checkpoints` in the working directory.
        keep: How many complete snapshots stay in `folder`.
        sanity_gate: Refuse a state if its loss, a gradient, a parameter or an optimizer state is not
            finite. None: set by the job.
        verify_all: Compare every byte of a snapshot with the state before the next update, which waits for
            it. None: set by the job.
        found: What `tiercheck.find` returned, for frameworks that must know the step before they make model
            and optimizer. `folder`, `keep` and `run` are then those given to `find`.
        run: Name of the training. A folder keeps the versions of each separate, and a start restores only
            its own. None: the file name of the script.
        leave_out: Patterns (fnmatch) of names of frozen parameters and buffers that the script loads itself
            at each start, before `restore`, such as quantised base weights.

    Raises:
        NotCapturable: A TypeError. The model, an optimizer or `state` holds something that can never be
            saved; the message names it.
        ValueError: `every` is less than 1, or this process has a Checkpointer that is not closed: one in a
            cluster, elsewhere one for each folder.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        state: user_state.State | None = None,
        every: int | None = None,
        folder: Path | str | None = None,
        keep: int = 2,
        sanity_gate: bool | None = None,
        verify_all: bool | None = None,
        found: Found | None = None,
        run: str | None = None,
        leave_out: Sequence[str] = (),
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every must be at least 1, not {every}")
        self._given = model, optimizer, state, leave_out
        self._folder, self._keep, self._run = folder, keep, run
        self._every, self._sanity_gate, self._verify_all = every, sanity_gate, verify_all
        self._failure_reporter: FailureReporter | None = None
        self._stop: StopRequest | None = None
        self._closed, self._pid = False, os.getpid()
        self._open(found)
        if os.environ.get(ENV_RUN_DIR):
            process.answer_with_stacks()
            # Each attempt in this process has a backend of its own.
            self._failure_reporter = FailureReporter(lambda failure: self._backend.report(failure))  # noqa: PLW0108
        self._trained.check()
        self._claim = Claim(self._backend.place, name_of(run))
        self._loop = StepLoop(
            self.rank, self.world_size, self._pause, self._go_on, self._enter_again, ended=self._compare_count
        )
        process.wait_at_exit()
        atexit.register(self.close)

    def _open(self, found: Found | None = None) -> None:
        """Creates what belongs to one attempt. A process that outlives another rank calls it again."""
        trained = self._trained = TrainedState(*self._given)
        self._found = found
        self.rank, self.world_size = trained.rank, trained.world_size
        """This rank's number, and the number of ranks in the job."""
        backend = self._backend = (
            open_backend(self._folder, self._keep, name_of(self._run)) if found is None else found.backend
        )
        self._saver = Saver(
            backend,
            self.rank,
            self.world_size,
            Equality(trained.shares),
            gate=lambda: self.sanity_gate,
            verify_all=lambda: backend.verify_all if self._verify_all is None else self._verify_all,
        )
        self._deltas = Deltas(trained, backend, self._saver)
        self._capturing = Capturing(trained, self._saver, self._deltas)
        self._progress = StepProgress(backend, self._saver)
        self._announced = Announcements(backend, self._saver, self.rank)
        fingerprints = Fingerprints(trained.model, trained.beside.values(), trained.optimizers, trained.state)
        self._resume = Resume(fingerprints, self._announced.report_verdict, self._saver.warn)
        self._clean = False
        """True while the state is as the last `step` left it, and may be saved as such."""
        self._suspicion = ""
        """The reason why the current step must be repeated; empty: none."""
        self._saved = 0
        """The step of the newest snapshot that was begun or restored; 0: none."""
        self.step_number = 0
        """The number of optimizer steps done, including restored ones."""
        self._restored = -1
        """The step that `restore` returned; -1: it was not called."""
        after_any = self._capturing.not_given.updated
        self._hooks = UpdateHooks(trained.optimizers, self._before_update, self._after_update, after_any)

    @property
    def attempt(self) -> int:
        """Returns the job's attempt that this process belongs to; 0 outside a cluster."""
        return self._backend.attempt

    @property
    def captured(self) -> int:
        """Returns the number of snapshots handed over complete."""
        return self._saver.captured

    @property
    def skipped(self) -> int:
        """Returns the number of snapshots that were due but not taken."""
        return self._saver.skipped

    @property
    def deltas(self) -> int:
        """Returns the number of deltas handed over complete."""
        return self._saver.deltas

    @property
    def deltas_skipped(self) -> int:
        """Returns the number of deltas that were wanted but not taken."""
        return self._saver.deltas_skipped

    @property
    def every(self) -> int:
        """Returns the number of steps between snapshots."""
        return (
            self._every
            or self._backend.every
            or (_UNDECIDED_WITH_DELTAS if self._deltas.active else _UNDECIDED)
        )

    @property
    def sanity_gate(self) -> bool:
        """Returns whether a state that is not finite is refused."""
        return self._backend.sanity_gate if self._sanity_gate is None else self._sanity_gate

    @torch.inference_mode(False)
    def restore(self) -> int:
        """Loads the version to continue from. Call it once, before training.

        Returns:
            The step of that version; 0 is a fresh start.

        Raises:
            RestoreError: The version cannot be determined or read. Training must not begin.
            DifferentState: A ValueError. The version does not fit model, optimizer or `state`. Training must
                not begin.
            NotCapturable: A TypeError. `state` holds something that could not be read back later.
        """
        if self._forked:
            raise NotCapturable(
                "this Checkpointer was made before the process was forked: make it in the one that trains"
            )
        if groups().is_detached:  # from here on the other ranks are there, and this rank takes part
            self._backend.find()  # returns once the attempt is released
            self._end_attempt()
            groups().reconnect(
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), self.rank, self.world_size
            )
            self._open()
        groups().end_of_setup()
        if (node := self._capturing.begin()) is not None:
            self._backend.numa = node
        trained, backend, capturing = self._trained, self._backend, self._capturing
        training = TrainingIdentity.look(trained.optimizers, trained.state)
        capturing.training = training.facts()
        found, self._found = self._found, None
        offer = backend.find() if found is None else found.offer
        if self._claim.is_second and not backend.is_folder:
            offer, capturing.refused = None, SECOND
        trained.inventories.passing.begin()
        loaded: Loaded | None = None
        if offer is not None:
            loaded = Restoring(trained, backend).load(offer)
            self.step_number = self._saved = loaded.version.step
        elif (function := entered()) is not None and function.is_again:
            raise RestoreError("there is no version to go back to, and what the script began with is gone")
        # Before the saver's thread asks the sidecar for slots.
        backend.report(ReportRestored(self.step_number))
        if loaded is None:
            capturing.start(None)
        else:
            capturing.start(loaded.version.step, loaded.room, loaded.blob_bytes)
            loaded.put_back(trained.state)  # last: until the first step nothing may query these objects
            capturing.loaded(loaded.facts)
        journal = None if capturing.refused else backend.journal
        name = fingerprint(name_of(self._run))
        verdict = self._resume.begin(journal, name, self.world_size, self.step_number)
        self._announced.print_start(
            offer,
            verdict,
            left_out=capturing.refused or backend.left_out,
            ended=self._resume.ended,
            changes=[] if loaded is None else training.changes(loaded.facts.get(TRAINING, {})),
        )
        if backend.is_folder:
            self._stop = StopRequest()
        self._progress.begin()
        self._loop.join_entered_function()
        self._restored = self.step_number
        return self.step_number

    def steps(self, total: int) -> Iterator[RepeatableStep]:
        """Restores, and yields each step up to `total`, in a process that outlives the loss of a rank:

            for step in checkpointer.steps(total):
                with step:
                    ...
                    checkpointer.step(loss)

        When another rank of the job is lost, the current step is abandoned, the version to continue from is
        loaded into the existing model, and the loop continues with the step after it. What the script
        creates before the loop is kept as it is, an iterator too (`batches` begins a new one); what has to go
        back belongs in `state`. To a compiled function pass `int(step)`. Outside a cluster
        this is the loop over `range(restore(), total)`. A later loop, such as that of a second phase, goes on
        where the one before ended.

        Raises:
            RestoreError, DifferentState, NotCapturable: As `restore`.
        """
        # A second restore would go back to the newest version, and so undo the steps after it.
        return self._loop.steps(self.restore() if self._restored < 0 else self.step_number, total)

    def batches(self, loader: Iterable[_Batch], total: int) -> Iterator[tuple[RepeatableStep, _Batch]]:
        """Yields each step as `steps` does, with the next batch of `loader`.

        The loader is iterated anew at its end and after each restore. A `ResumableSampler` that it has as
        `batch_sampler` advances with each batch. That sampler, or else the loader, belongs into `state`.

        Raises:
            ValueError: The loader has no batch.
        """
        sampler = getattr(loader, "batch_sampler", None)
        follow: Callable[[Iterable[_Batch]], Iterator[_Batch]] = getattr(sampler, "follow", iter)
        if isinstance(loader, DataLoader) and not any(
            each is loader or each is sampler for each in self._trained.state.values()
        ):
            self._saver.warn(
                "Data",
                "`batches` begins this loader anew after a restore, as its position is in no version: give "
                "`state` its ResumableSampler, or a StatefulDataLoader of torchdata",
            )
        restored = -1
        found: Iterator[_Batch] = iter(())
        for step in self.steps(total):
            if restored != self._loop.rewinds:
                resumes = restored >= 0 or 0 < self.step_number == self._restored
                restored, drawn = self._loop.rewinds, user_state.random_state()
                found = follow(loader)
                if resumes:  # an undisturbed run drew its loader's seed when the epoch began
                    user_state.set_random_state(drawn)
            batch = next(found, None)
            if batch is None:
                found = follow(loader)
                batch = next(found, None)
            if batch is None:
                raise ValueError("the loader has no batch")
            yield step, batch

    @torch.inference_mode(False)
    def step(self, loss: float | torch.Tensor | None = None) -> None:
        """Marks the end of an optimizer step, after the scheduler and everything else has moved.

        Starts the snapshot or delta that is due, without waiting for it. A failure to save raises nothing.

        Args:
            loss: One number. A tensor on a device is waited for.
        """
        self._loop.interruption_point()
        self.step_number += 1
        if self._forked:
            return
        if self.step_number == 1 and not self._capturing.has_begun:
            self._saver.warn("Restore", "restore() was not called: each start of this script begins anew")
        loss = self._progress.read_loss(loss)
        begins = self._trained.loaders.begins_epoch
        same = self._resume.note(self.step_number, loss, suspected=bool(self._suspicion), begins_epoch=begins)
        self._trained.partitions.stepped()
        self._trained.arithmetic.end_step()
        self._capturing.look_for_gaps()
        poisoned = self.sanity_gate and loss is not None and not math.isfinite(loss)
        if poisoned:
            self._saver.sanity.refused(self.step_number)
        self._progress.step(self.step_number, loss)
        if self._suspicion:
            self._give_step_up(same)
        delta = self._deltas.end_step(self.step_number, self._trained.state, poisoned)
        self._clean = not poisoned
        stopping = self._stop is not None and self._stop.signal > 0
        due = self._deltas.needs_snapshot() or self.step_number % self.every == 0 or stopping
        if not due and not self._saver.layouts.known:
            self._capturing.prepare(UnknownRoom.KNOWN_SOON if delta is not None else UnknownRoom.AS_BEFORE)
        snapshot = self._capturing.take(self.step_number, loss, poisoned) if due else None
        self._saved = self.step_number if snapshot is not None else self._saved
        self._loop.refuse(self._capturing.unsaved)
        if delta is None and not due and loss is not None and not poisoned:
            self._saver.sanity.good(self.step_number)
        taken: list[Pending] = [artifact for artifact in (snapshot, delta) if artifact is not None]
        if taken:
            self._saver.submit(*taken)  # the snapshot first: it has more to copy before the next update
            if self._capturing.unseen.found:
                self._saver.barrier()  # no hook will report when the next one begins
        self._hooks.move_inside()
        if stopping and self._stop is not None:
            self._saver.wait(_CLOSE_SECONDS)
            self._stop.act_on_signal()

    def suspect(self, reason: str) -> None:
        """Requests that the current step be repeated, because its arithmetic may be wrong.

        Call it before `step`, at each rank that has a suspect result. `step` then keeps nothing of it and
        ends the attempt: all ranks go back to a version before it. A rank that gets other bits the second
        time is named, and its worker moves to another node if it is the only one.

        Args:
            reason: What was found, for people.

        Raises:
            RuntimeError: This is not a job in a cluster, or `step` was called already.
        """
        if self._backend.is_folder:
            raise RuntimeError(
                "suspect needs a TierCheckJob: outside a cluster no operator takes the ranks back"
            )
        if self._loop.number is not None and self._loop.number < self.step_number:
            raise RuntimeError(f"step {self.step_number} has ended: call suspect before checkpointer.step")
        self._suspicion = " ".join(reason.split()) or "no reason was given"

    def _give_step_up(self, same: bool) -> None:
        """Reports the suspicion, then raises StepSuspected. `same`: the repeated step gave the same bits."""
        again = "; made again, it gave the same bits: look at the script's arithmetic, not at the machine"
        message = f"step {self.step_number} is suspected: {self._suspicion[:500]}{again if same else ''}"
        self._suspicion, self._clean = "", False
        self._backend.flush()
        self._backend.report(ReportFailing(STEP_SUSPECTED, message, 1))
        raise StepSuspected(message)

    def alive(self) -> None:
        """Reports that this rank is well although it makes no step, for example during a long evaluation.

        Without it, a pause far longer than any before counts as a hang (`failurePolicy.hang`), and the job is
        restarted.
        """
        if not self._forked:
            self._progress.report_again(self.step_number)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the snapshot in progress is handed over. Returns False after `timeout` seconds."""
        return not self._forked and self._saver.wait(timeout)

    def close(self) -> None:
        """Finishes saves in progress, sends the last progress, releases the model. May be called twice."""
        if self._closed or self._forked:  # a data-loader worker inherits the exit hook
            return
        self._closed = True
        finished = sys.exc_info()[1] is None and getattr(sys, "last_value", None) is None
        short = self._saved == 0 < self.step_number and self._clean and self._backend.is_folder
        snapshot = self._capturing.take(self.step_number, None, False) if finished and short else None
        if snapshot is not None:  # a first run, shorter than `every`
            self._saver.submit(snapshot)
        if self._stop is not None:
            self._stop.release()
            finished = finished and not self._stop.signal
        self._resume.end(finished)
        self._hooks.remove()
        self._saver.close(_CLOSE_SECONDS)
        self._backend.close()
        self._leave_process()

    def _leave_process(self) -> None:
        """Allows another Checkpointer of this process to take its place."""
        self._closed = True
        atexit.unregister(self.close)
        if self._failure_reporter is not None:
            self._failure_reporter.close()
        self._claim.release()

    def _end_attempt(self) -> None:
        """Ends what belongs to the attempt that is over. Raises RestoreError if it does not end."""
        self._hooks.remove()
        self._resume.end(finished=False)
        if not self._saver.close(_PAUSE_SECONDS):
            raise RestoreError("what was being saved in the ended attempt does not end")
        self._backend.close()

    def _pause(self) -> None:
        """Cleans up between two attempts, in the process that stays. Raises CannotForget, RestoreError."""
        if not self._closed:  # else a `finally` of the script has closed it
            self._end_attempt()
        trained = self._trained
        forget_half_step([trained.given_model, *trained.given_modules.values()], trained)

    def _go_on(self) -> int:
        """Restores in the new attempt, and returns its step. Raises RestoreError, DifferentState."""
        self._open()
        if not (step := self.restore()):
            raise RestoreError("there is no version to go back to, and what the script began with is gone")
        return step

    def _compare_count(self, number: int) -> None:
        """Warns if step `number` of `steps` has ended and `step` was not called once in each so far."""
        if self.step_number != number + 1 and not self._forked:
            self._saver.warn(
                "Steps",
                f"step {number} of `steps` has ended, and step() was called {self.step_number} times, not "
                f"{number + 1}: a restore continues at the number of its calls, so other steps than these "
                "are trained again. Call step() once at the end of each, also of one that is skipped; "
                "accumulate the gradients of several batches within one",
            )

    def _enter_again(self, is_made_anew: bool) -> None:
        """Prepares for another call of the function, which creates its Checkpointer if `is_made_anew`."""
        if is_made_anew:
            self._leave_process()
        else:
            self._open()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and entered() is not None:
            return  # it may be the end of the attempt, and not of the process
        if error is not None and self._failure_reporter is not None:
            self._failure_reporter.report(error)
        self.close()

    @property
    def _forked(self) -> bool:
        """Returns whether this process is a fork of the one that is saved, in which nothing is saved."""
        return os.getpid() != self._pid

    def _before_update(self, index: int, _: Optimizer, arguments: Any, named: Any) -> None:
        if torch.compiler.is_compiling() or self._forked:
            return  # compiled code is traced once and never calls this: `UnhookedUpdates` detects that
        self._loop.interruption_point()
        if self._capturing.has_loaded:
            self._capturing.look_for_overwritten()
        self._clean = False
        self._saver.barrier()
        if self._capturing.unseen.hooked():
            self._trained.inventories.evaluating = not self._trained.model.training
            self._deltas.before_update(index, self.step_number + 1, arguments, named)

    def _after_update(self, index: int, *_: object) -> None:
        if not torch.compiler.is_compiling() and not self._forked:
            self._deltas.after_update(index)
