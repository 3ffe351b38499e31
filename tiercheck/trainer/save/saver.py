"""Saves artifacts in a separate thread, so that training does not wait for the sidecar."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, assert_never

import torch

from tiercheck.protocol.local import ReportCannotSave
from tiercheck.protocol.version import Kind
from tiercheck.supervised import begin, supervise
from tiercheck.trainer.backends.backend import Backend, RankReport, Skipped, WarnOnce
from tiercheck.trainer.deltas.delta_format import Delta
from tiercheck.trainer.deltas.unseen import UntrackedTensors
from tiercheck.trainer.replicas.equality import Equality
from tiercheck.trainer.save.delta import DeltaBudget, DeltaChain, DeltaJob, Measured, Script
from tiercheck.trainer.save.slot_context import (
    Cancelled,
    DeltaRoom,
    Job,
    Layouts,
    Message,
    Sanity,
    SaveContext,
    Task,
    UnknownRoom,
)
from tiercheck.trainer.save.snapshot import SnapshotJob
from tiercheck.trainer.save.staging import Snapshot
from tiercheck.trainer.tensors.accelerator import Accelerator, Mark, Pending

_TICK = 0.05  # seconds between attempts to deliver pending progress
_UNFINISHED = 2  # the most artifacts copied but not handed over before the next copy waits


class Saver:
    """Writes artifacts through a backend.

    `captured` and `skipped` count snapshots, `deltas` and `deltas_skipped` deltas."""

    def __init__(
        self,
        backend: Backend,
        rank: int,
        world_size: int,
        equality: Equality,
        *,
        gate: Callable[[], bool],
        verify_all: Callable[[], bool],
    ) -> None:
        self._backend = backend
        self.sanity = Sanity()
        self.delta_chain = DeltaChain()
        self.delta_budget = DeltaBudget()
        # No reference cycle, so that an attempt's objects are freed with it, not later by the collector.
        self.layouts = Layouts(partial(Saver.reserve, weakref.proxy(self)))
        self._context = SaveContext(
            backend, rank, world_size, gate, verify_all, self.sanity, self.layouts, equality
        )
        self.script: Script | None = None
        """The properties of the script, set before the first delta is submitted."""
        self.warn = WarnOnce()
        self.captured = self.skipped = 0
        self.deltas = self.deltas_skipped = 0
        self.mutating: set[str] = set()
        """The tensors found to change outside the optimizer, which are therefore copied at once."""
        self.untracked = UntrackedTensors()
        self._count_lock = threading.Lock()
        self._current: list[Pending] = []
        self._held: list[tuple[Accelerator, Mark]] = []
        """The copies on devices for which the next updates must wait."""
        self._busy_since = 0.0
        self._landing = False
        self._lacking = ""
        """The reason why nothing can be saved, as last reported to the backend."""
        self._unfinished: deque[Job] = deque()
        self._copies: deque[Pending] = deque()
        """The submitted artifacts of which the copy has not begun."""
        self._inbox: queue.SimpleQueue[tuple[Pending, ...] | Message] = queue.SimpleQueue()
        """The messages of the training thread. Of a step, a device gets all copies before any is awaited."""
        self._later: deque[Message] = deque()
        before, alone = torch.get_num_threads(), threading.Event()
        self._alone = alone
        self._thread = begin("tiercheck-saver", lambda: supervise(self._run, self._died, self._rest))
        alone.wait()
        torch.set_num_threads(before)  # restores the number for the caller and for new threads

    # Called by the training thread.

    def submit(self, *artifacts: Pending) -> None:
        """Starts the lazy copies, in this order. Call `barrier` before the state changes."""
        self.barrier()  # an update may have been skipped since the last one
        # Training does not wait for a delta that is only measured: changes while it is read are harmless.
        self._current = [a for a in artifacts if not (isinstance(a, Delta) and a.only_measure)]
        for artifact in artifacts:
            if isinstance(artifact, Snapshot):
                self.delta_chain.snapshot(artifact.step)
        self._inbox.put(artifacts)

    def barrier(self) -> None:
        """Returns when the state may be changed: at once if no copy is running, or only one on a device."""
        current, self._current = self._current, []
        for pending in current:
            pending.mark_moved()
        patience, begun = self._backend.patience, time.monotonic()
        for pending in current:
            if patience is not None and not self._begins(pending, patience):
                self.skip(pending, "SlowSidecar", "no slot was granted before the next update")
                continue
            if isinstance(pending, Snapshot) and pending.parallel_copy is not None:
                pending.parallel_copy.assist()  # instead of only waiting
            pending.copied.wait()
            if pending.device is not None and pending.done is not None:
                self._held.append((pending.device, pending.done))
        # At each update, because each may run on another stream.
        self._held = [(device, mark) for device, mark in self._held if not mark.query()]
        for device, mark in self._held:
            device.hold(mark)
        # A device computes while this thread waits.
        if current and all(pending.device is None for pending in current):
            self.delta_budget.note_wait(time.monotonic() - begun)

    def _begins(self, pending: Pending, patience: float) -> bool:
        """Returns whether its copy begins within `patience` seconds; cancels it if not."""
        while True:
            # Includes the time that the thread has already waited, so that a slow sidecar delays training
            # once, not at every step.
            since = self._busy_since
            left = patience if since == 0.0 else patience - (time.monotonic() - since)
            if pending.granted.wait(max(0.0, left)):
                return True
            if not self._landing:
                return not pending.cancel()

    def reserve(self, snapshot_room: int, delta_room: DeltaRoom = UnknownRoom.AS_BEFORE) -> None:
        self._send(self._reserve, snapshot_room, delta_room)

    def skip(self, artifact: Pending, kind: str, message: str) -> None:
        """Counts an artifact that is not taken, and logs the reason, once per kind."""
        if isinstance(artifact, Delta):
            self.skip_delta(artifact.step, kind, message)
        else:
            self.delta_chain.snapshot_failed(artifact.step)
            self.skip_snapshot(artifact.step, kind, message)

    def skip_snapshot(self, step: int, kind: str, message: str) -> None:
        with self._count_lock:
            self.skipped += 1
        self.warn(kind, f"the snapshot after step {step} is skipped: {message}")

    def skip_delta(self, step: int, kind: str = "", message: str = "") -> None:
        """Counts a skipped delta. Without a `kind`, logs nothing: it would have continued no chain."""
        self.delta_chain.delta_missing(step)
        with self._count_lock:
            self.deltas_skipped += 1
        if kind:
            self.warn(f"Delta{kind}", f"the delta of step {step} is skipped: {message}")

    def report_skipped(self, step: int) -> None:
        self._send(self._backend.pass_over, step)

    def report(self, report: RankReport) -> None:
        self._send(self._backend.report, report)

    def report_cannot_save(self, why: str) -> None:
        """Reports to the backend that nothing can be saved, until a snapshot is."""
        self._send(self._lack, why)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until everything submitted is done and progress is delivered; returns False at the timeout.

        `timeout` is in seconds."""
        done = threading.Event()
        self._send(self._flush, done)
        return done.wait(timeout)

    def close(self, timeout: float) -> bool:
        """Finishes submitted work and ends the thread. Returns False if `timeout` seconds did not suffice."""
        if not self._thread.is_alive():
            return True
        self.barrier()
        self.wait(timeout)
        self._inbox.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _send(self, call: Callable[..., None], *arguments: Any) -> None:
        self._inbox.put(partial(call, *arguments))

    # The thread.

    def _died(self, error: BaseException, _: int) -> None:
        self.warn(type(error).__name__, f"saving failed, and goes on: {error!r}")

    def _rest(self, seconds: float) -> bool:
        """Waits briefly after an error, because training may wait for the next copy."""
        time.sleep(min(seconds, _TICK))
        return True

    def _run(self) -> None:
        torch.get_num_threads()  # initializes torch's threads here, so that the next line is not undone
        # Otherwise a copy would take processors from the training thread.
        torch.set_num_threads(1)
        self._alone.set()
        while True:
            if (task := self._next()) is None:
                return
            self._busy_since = time.monotonic()
            try:
                match task:
                    case Pending():
                        self._copy(task)
                    case Job():
                        self._finish(task)
                    case partial():
                        task()
                    case _:
                        assert_never(task)
            except (Cancelled, Measured):
                pass  # the barrier counted the first; the second is no failure
            except Exception as error:  # invariant: no error of TierCheck stops training
                self._failed(task, error)
            finally:
                self._busy_since = 0.0

    def _next(self) -> Task:
        """Returns the next task: first copies that training may wait for, then work on copied artifacts."""
        if len(self._unfinished) >= _UNFINISHED:
            return self._unfinished.popleft()
        while True:
            if self._copies:
                return self._copies.popleft()
            if self._later and not self._unfinished:
                return self._later.popleft()
            try:
                told = self._inbox.get(block=not self._unfinished, timeout=_TICK)
            except queue.Empty:
                if self._unfinished:
                    return self._unfinished.popleft()
                self._backend.flush()
                continue
            if isinstance(told, tuple):
                self._copies.extend(told)
            elif not self._unfinished:
                return told
            else:
                self._later.append(told)

    def _failed(self, task: Task, error: Exception) -> None:
        """Logs the reason, once per kind, and counts the artifact that is lost."""
        kind, message = type(error).__name__, repr(error)
        if isinstance(error, Skipped):
            kind, message = error.kind, str(error)
        lost = task.pending if isinstance(task, Job) else task
        if not isinstance(lost, Pending) or lost.cancelled or (isinstance(lost, Delta) and lost.only_measure):
            self.warn(kind, message)
            return
        self.skip(lost, kind, message)
        if kind == "NotCapturable" and isinstance(lost, Snapshot):
            self._lack(message)

    def _copy(self, pending: Pending) -> None:
        job: Job
        try:
            if isinstance(pending, Snapshot):
                job = SnapshotJob(self._context, pending, self.mutating, self.untracked)
            else:
                assert isinstance(pending, Delta)
                assert self.script is not None
                job = DeltaJob(self._context, pending, self.script)
            job.copy()
        finally:
            pending.end()
        self._unfinished.append(job)

    def _finish(self, job: Job) -> None:
        self._busy_since, self._landing = 0.0, True  # the device's time is not the sidecar's
        try:
            job.land()
        finally:
            self._busy_since, self._landing = time.monotonic(), False
        job.finish()
        if job.kind is Kind.SNAPSHOT:
            self._lack("")
        if isinstance(job, DeltaJob):
            self.delta_budget.note_work(job.seconds)
        with self._count_lock:
            self.captured += job.kind is Kind.SNAPSHOT
            self.deltas += job.kind is Kind.DELTA
        self._backend.flush()  # progress: this thread may never be idle between steps

    def _flush(self, done: threading.Event) -> None:
        """Delivers pending progress, and wakes the waiting caller."""
        try:
            self._backend.flush()
        finally:
            done.set()

    def _lack(self, why: str) -> None:
        if why != self._lacking:
            self._lacking = why
            self._backend.report(ReportCannotSave(why))

    def _reserve(self, snapshot_room: int, delta_room: DeltaRoom) -> None:
        context = self._context
        context.snapshot_room = snapshot_room
        if isinstance(delta_room, int):
            context.delta_room = delta_room
        if delta_room is not UnknownRoom.KNOWN_SOON:
            self._backend.reserve(context.snapshot_room, context.delta_room)
