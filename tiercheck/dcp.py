"""Stores what a script saves with torch.distributed.checkpoint in TierCheck, by the same calls.

    storage = Storage(folder="checkpoints")
    if storage.start:
        dcp.load(state, storage_reader=storage.reader())
    for step in range(storage.start + 1, steps + 1):
        ...
        if storage.due(step):
            storage.async_save(state, step)
        storage.end_step(step, loss)

In a cluster what is saved goes to the sidecar's shared memory, and from there to peers and the remote tier,
as a `Checkpointer`'s snapshots do; elsewhere to a folder. `dcp.save(state,
storage_writer=storage.writer(step))` works as well as `storage.save(state, step)`; the latter plans only
once, uses a process group of its own, and never ends training.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import itertools
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_loader as loader
import torch.distributed.checkpoint.state_dict_saver as saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tiercheck.protocol.local import DeclineDeltas, ReportRestored
from tiercheck.supervised import begin, supervise
from tiercheck.trainer import process
from tiercheck.trainer.backends.backend import (
    Offer,
    RestoreError,
    Skipped,
    WarnOnce,
    is_distributed,
    rank_and_world,
)
from tiercheck.trainer.dcp.reader import TierCheckReader
from tiercheck.trainer.dcp.writer import Slots, StagingWriter, TierCheckWriter
from tiercheck.trainer.process import FailureReporter
from tiercheck.trainer.restore.restoring import open_backend

__all__ = ["Storage", "TierCheckReader", "TierCheckWriter"]

log = logging.getLogger("tiercheck")

_UNDECIDED = 50
"""The number of steps between saves until the job sets one."""
_FLUSH_SECONDS = 0.25
_CLOSE_SECONDS = 60.0
_numbers = itertools.count()


class Storage:
    """Saves and loads a rank's state with torch.distributed.checkpoint, instead of a `Checkpointer`.

    Each rank makes one, after `init_process_group`, together with all others. `folder`, `keep`: outside a
    cluster, where versions go and how many complete ones stay. Raises RestoreError if the version to continue
    from cannot be determined. Training must not begin then.
    """

    def __init__(self, folder: Path | str = "checkpoints", *, keep: int = 2) -> None:
        self.rank, self.world_size = rank_and_world()
        """This rank's number, and the number of ranks in the job."""
        backend = open_backend(folder, keep, run="")
        self._backend, self._slots = backend, Slots(backend, self.rank, self.world_size)
        self._failure_reporter = None if backend.is_folder else FailureReporter(backend.report)
        if not backend.is_folder:
            process.answer_with_stacks()
        self.process_group: dist.ProcessGroup | None = (
            dist.new_group(backend="gloo") if is_distributed() else None
        )
        """A gloo group for saving only: a save in a thread must not meet the collectives of training."""
        self.saved = self.failed = 0
        """The numbers of versions that this rank took part in, and of those that failed."""
        self._warn = WarnOnce()
        self._number = next(_numbers)
        self._under_way: Future[Any] | None = None
        self._begun = self._closed = self._is_read = False
        self._pid = os.getpid()
        self._offer: Offer | None = backend.find()
        with self._slots.lock:
            backend.report(DeclineDeltas("saves by torch.distributed.checkpoint have no deltas"))
        self._stop = threading.Event()
        if not backend.is_folder:
            begin(
                "tiercheck-progress",
                lambda: supervise(self._deliver, self._died, lambda pause: not self._stop.wait(pause)),
            )
        process.wait_at_exit()
        atexit.register(self.close)

    @property
    def start(self) -> int:
        """Returns the step of the version to load; 0: a fresh start."""
        return 0 if self._offer is None else self._offer.version.step

    @property
    def every(self) -> int:
        """Returns the number of steps between saves, as set by the job; 50 outside a cluster."""
        return self._backend.every or _UNDECIDED

    def due(self, step: int) -> bool:
        """Returns whether to save the state after `step`. Ranks that step in unison get the same answer."""
        return step % self.every == 0

    def reader(self) -> TierCheckReader:
        """Returns a reader of the version to load, for `dcp.load`. Raises RestoreError if there is none."""
        if self._offer is None:
            raise RestoreError("there is no version to load: this is a fresh start")
        self._is_read = True
        return TierCheckReader(self._offer)

    def writer(self, step: int | None = None) -> TierCheckWriter:
        """Returns a writer of the state after `step`, for `dcp.save` or `dcp.async_save`.

        None: the step is the number in which its `checkpoint_id` ends.
        """
        self._begin()
        return (StagingWriter if StagingWriter.NEEDED else TierCheckWriter)(self._slots, step)

    def planner(self) -> DefaultSavePlanner:
        """Returns torch's own planner, which exchanges plans only at the first save if this torch can."""
        caches = "enable_plan_caching" in inspect.signature(DefaultSavePlanner.__init__).parameters
        planner = DefaultSavePlanner(enable_plan_caching=True) if caches else DefaultSavePlanner()
        # All planners of a class share one cache: without a key of its own, this state would be compared with
        # plans of another.
        planner._cached_plans_key = f"tiercheck-{self._number}"
        return planner

    def load(self, state: dict[str, Any], **options: Any) -> int:
        """Loads the version to continue from, if any, into `state` by `dcp.load`, and returns its step.

        `options`: of `dcp.load`. Raises RestoreError, CheckpointException. Training must not begin then.
        """
        if self._offer is not None:
            loader.load(
                state, storage_reader=self.reader(), **{"process_group": self.process_group, **options}
            )
            log.info("loaded %s", self._offer.version)
        return self.start

    def save(self, state: dict[str, Any], step: int, **options: Any) -> bool:
        """Saves the state after `step` by `dcp.save(**options)`. Returns False if it failed; never raises."""
        self.wait()
        before = self.failed
        with self.never_fatal():
            saver.save(state, storage_writer=self.writer(step), **self._options(options))
            self.saved += 1
        return self.failed == before

    def async_save(self, state: dict[str, Any], step: int, **options: Any) -> None:
        """Saves the state after `step` by `dcp.async_save`, after any save in progress. Never raises."""
        self.wait()
        with self.never_fatal():
            given = saver.async_save(state, storage_writer=self.writer(step), **self._options(options))
            # With a stager of its own torch returns two futures.
            self._under_way = given if isinstance(given, Future) else given.upload_completion

    def wait(self) -> None:
        """Waits until no save is in progress. Never raises."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            with self.never_fatal():
                under_way.result()
                self.saved += 1

    @contextlib.contextmanager
    def never_fatal(self) -> Iterator[None]:
        """Logs and counts a save that fails in here, also one with a `CheckpointException`.

        That is no `Exception`, so `except Exception` lets it through.
        """
        try:
            yield
        except (Exception, CheckpointException) as error:
            self.failed += 1
            self._warn(_kind_of(error), f"a version was not saved: {_in_words(error)}")

    def end_step(self, step: int, loss: float | None = None) -> None:
        """Reports that optimizer step `step` is done, so that the job sees progress. Returns at once."""
        self._begin()
        self._backend.progress(step, loss, None, 0)

    def close(self) -> None:
        """Finishes a save in progress. May be called twice."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._under_way is not None:
            with contextlib.suppress(TimeoutError, Exception, CheckpointException):  # `wait` logs it
                self._under_way.exception(_CLOSE_SECONDS)
            if self._under_way.done():
                self.wait()
        if self._under_way is None:
            # A reference to the group at the interpreter's end keeps gloo's threads alive, and one that
            # releases a Python object then aborts. Without this reference destroy_process_group ends them.
            self.process_group = None
        if self._failure_reporter is not None:
            self._failure_reporter.close()
        self._stop.set()
        with self._slots.lock:
            self._backend.close()

    def __enter__(self) -> Storage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and self._failure_reporter is not None:
            self._failure_reporter.report(error)
        self.close()

    def _begin(self) -> None:
        """Reports once that the version was loaded: training continues, so nothing more will be loaded."""
        if not self._begun:
            self._begun = True
            if self._offer is not None and not self._is_read and self.rank == 0:
                self._warn(
                    "Load",
                    f"{self._offer.version} was not loaded, so each start of this script begins anew, and "
                    f"what it saves is older than that until step {self.start}: call load(state) before the "
                    "first save, or give another folder to begin anew",
                )
            with self._slots.lock:
                self._backend.report(ReportRestored(self.start))

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"planner": self.planner(), "process_group": self.process_group, **given}

    def _died(self, error: BaseException, _: int) -> None:
        self._warn(type(error).__name__, f"progress could not be reported, and will be again: {error!r}")

    def _deliver(self) -> None:
        while not self._stop.wait(_FLUSH_SECONDS):
            with self._slots.lock:
                self._backend.flush()


def _kind_of(error: BaseException) -> str:
    """Returns the name of the trouble: for DCP's error, which is the same for all, that of the first rank."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    first = failures[min(failures)][0] if failures else error
    return first.kind if isinstance(first, Skipped) else type(first).__name__


def _in_words(error: BaseException) -> str:
    """Returns what each rank reported; DCP's own text is a traceback of each rank."""
    if not isinstance(error, CheckpointException):
        return str(error) or type(error).__name__
    said = functools.reduce(
        lambda found, failure: found if failure in found else [*found, failure],
        (f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items())),
        list[str](),
    )
    return "; ".join(said[:3]) + (f"; and {len(said) - 3} more" if len(said) > 3 else "")
