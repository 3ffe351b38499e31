"""Saves artifacts in a thread that does everything that may wait, so that training never does."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import assert_never

import torch

from tiercheck.protocol.report import Exact
from tiercheck.protocol.version import Kind
from tiercheck.supervised import begin, supervise
from tiercheck.trainer.backends.backend import Backend, Skipped, WarnOnce
from tiercheck.trainer.deltas.delta_format import Delta
from tiercheck.trainer.deltas.unseen import Untold
from tiercheck.trainer.replicas.equality import Equality
from tiercheck.trainer.save.delta import DeltaJob, Measured, Pace, Script, Unbroken
from tiercheck.trainer.save.slot_context import (
    CallBackend,
    Cancelled,
    CopyArtifact,
    DeltaRoom,
    Desk,
    End,
    FinishJob,
    Job,
    Layouts,
    Message,
    Sanity,
    Submitted,
    Task,
    UnknownRoom,
)
from tiercheck.trainer.save.snapshot import SnapshotJob
from tiercheck.trainer.save.staging import Snapshot
from tiercheck.trainer.tensors.accelerator import Accelerator, Mark, Pending

_TICK = 0.05  # seconds between attempts to deliver progress that is owed
_UNFINISHED = 2  # artifacts copied but not handed over, before the next copy has to wait


class Saver:
    """Takes artifacts to a backend. `captured` and `skipped` count snapshots, `deltas` and `deltas_skipped`
    deltas."""

    def __init__(
        self,
        backend: Backend,
        rank: int,
        world_size: int,
        equality: Equality,
        *,
        gate: Callable[[], bool],
        verify_all: Callable[[], bool],
        threads: int = 1,
    ) -> None:
        """`threads`: of torch in this thread; those of the training thread stay as they are."""
        self._backend = backend
        self.sanity = Sanity()
        self.unbroken = Unbroken()
        self.pace = Pace()
        # No cycle: what an attempt held goes with it. The collector comes late, and finds it old.
        self.layouts = Layouts(partial(Saver.reserve, weakref.proxy(self)))
        self._desk = Desk(backend, rank, world_size, gate, verify_all, self.sanity, self.layouts, equality)
        self.script: Script | None = None
        """Set before the first delta is submitted."""
        self.warn = WarnOnce()
        self.captured = self.skipped = 0
        self.deltas = self.deltas_skipped = 0
        self.mutating: set[str] = set()
        """Tensors found to change outside the optimizer: from then on they are copied at once."""
        self.untold = Untold()
        self._count_lock = threading.Lock()
        self._current: list[Pending] = []
        self._held: list[tuple[Accelerator, Mark]] = []
        """Copies that the next updates come after."""
        self._busy_since = 0.0
        self._landing = False
        """The thread waits for a device."""
        self._lacking = ""
        """Why nothing can be saved, as the backend knows it."""
        self._unfinished: deque[FinishJob] = deque()
        self._copies: deque[CopyArtifact] = deque()
        """Of those that were submitted together, the ones whose copy has not begun."""
        self._told: queue.SimpleQueue[Submitted | Message] = queue.SimpleQueue()
        """By the training thread."""
        self._later: deque[Message] = deque()
        before, alone = torch.get_num_threads(), threading.Event()
        self._alone = alone
        self._threads = threads
        self._thread = begin("tiercheck-saver", lambda: supervise(self._run, self._died, self._rest))
        alone.wait()
        torch.set_num_threads(before)  # the number is the caller's again, and that of threads to come

    # Called by the training thread.

    def submit(self, *artifacts: Pending) -> None:
        """Start the lazy copies, in this order. `barrier` must be called before the state changes."""
        self.barrier()  # an update may have been left out since the last one
        # Nobody waits for what is only measured: that it is read while it changes does no harm.
        self._current = [a for a in artifacts if not (isinstance(a, Delta) and a.only_measure)]
        for artifact in artifacts:
            if isinstance(artifact, Snapshot):
                self.unbroken.snapshot(artifact.step)
        self._told.put(Submitted(artifacts))

    def barrier(self) -> None:
        """Return when the state may be told to change: at once if no copy is under way, or only a
        device's.
        """
        current, self._current = self._current, []
        for pending in current:
            pending.let_go()
        patience, begun = self._backend.patience, time.monotonic()
        for pending in current:
            if patience is not None and not self._begins(pending, patience):
                self.skip(pending, "SlowSidecar", "no slot was granted before the next update")
                continue
            if isinstance(pending, Snapshot) and pending.crew is not None:
                pending.crew.help()  # instead of only waiting
            pending.copied.wait()
            if pending.device is not None and pending.done is not None:
                self._held.append((pending.device, pending.done))
        # At each update, because each may be given to another stream.
        self._held = [(device, mark) for device, mark in self._held if not mark.query()]
        for device, mark in self._held:
            device.hold(mark)
        if current and all(
            pending.device is None for pending in current
        ):  # a device computes while this thread waits
            self.pace.note_wait(time.monotonic() - begun)

    def _begins(self, pending: Pending, patience: float) -> bool:
        """Whether its copy begins before the patience with the sidecar ends; else it is cancelled."""
        while True:
            # What the thread has already been waiting counts: a slow sidecar costs its share once, not at
            # every step.
            since = self._busy_since
            left = patience if since == 0.0 else patience - (time.monotonic() - since)
            if pending.granted.wait(max(0.0, left)):
                return True
            if not self._landing:
                return not pending.cancel()

    def reserve(self, snapshot_room: int, delta_room: DeltaRoom = UnknownRoom.AS_BEFORE) -> None:
        """Let slots of these bytes be prepared."""
        self._told.put(CallBackend(partial(self._reserve, snapshot_room, delta_room)))

    def skip(self, artifact: Pending, kind: str, message: str) -> None:
        """Count an artifact that is not taken, and say why, once per kind."""
        if isinstance(artifact, Delta):
            self.skip_delta(artifact.step, kind, message)
        else:
            self.unbroken.snapshot_failed(artifact.step)
            self.skip_snapshot(artifact.step, kind, message)

    def skip_snapshot(self, step: int, kind: str, message: str) -> None:
        with self._count_lock:
            self.skipped += 1
        self.warn(kind, f"the snapshot after step {step} is skipped: {message}")

    def skip_delta(self, step: int, kind: str = "", message: str = "") -> None:
        """Without a `kind` there is nothing to say: it would have continued no chain."""
        self.unbroken.delta_missing(step)
        with self._count_lock:
            self.deltas_skipped += 1
        if kind:
            self.warn(f"Delta{kind}", f"the delta of step {step} is skipped: {message}")

    def tell_skipped(self, step: int) -> None:
        """Let the backend know that the snapshot after `step` will never come."""
        self._told.put(CallBackend(partial(self._backend.pass_over, step)))

    def tell_no_deltas(self, why: str, since: int = 0) -> None:
        """Let the backend know that this rank takes none (`Backend.no_deltas`), after those that are under
        way."""
        self._told.put(CallBackend(partial(self._backend.no_deltas, why, since)))

    def report_resume(self, step: int, exact: Exact, steps: int, message: str, suspected: bool) -> None:
        """Let the backend know how the resume compares (`Backend.resumed`)."""
        self._told.put(CallBackend(partial(self._backend.resumed, step, exact, steps, message, suspected)))

    def tell_cannot_save(self, why: str) -> None:
        """Let the backend know that nothing can be saved, until a snapshot is."""
        self._told.put(CallBackend(partial(self._lack, why)))

    def wait(self, timeout: float | None = None) -> bool:
        """Until all that was submitted is done and progress was delivered; False if `timeout` seconds were
        not enough."""
        done = threading.Event()
        self._told.put(CallBackend(partial(self._flush, done)))
        return done.wait(timeout)

    def close(self, timeout: float) -> bool:
        """Finish what was submitted, and end the thread. False if `timeout` seconds were not enough."""
        self.barrier()
        self.wait(timeout)
        self._told.put(End())
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # The thread.

    def _died(self, error: BaseException, _: int) -> None:
        self.warn(type(error).__name__, f"saving failed, and goes on: {error!r}")

    def _rest(self, seconds: float) -> bool:
        """Never long: training may wait for the next copy."""
        time.sleep(min(seconds, _TICK))
        return True

    def _run(self) -> None:
        torch.get_num_threads()  # makes torch set this thread up, so that the next line is not undone
        torch.set_num_threads(
            self._threads
        )  # or a copy would take the processors that the training thread computes with
        self._alone.set()
        while True:
            task = self._next()
            if isinstance(task, End):
                return
            self._busy_since = time.monotonic()
            try:
                self._do(task)
            except (Cancelled, Measured):
                pass  # the one was counted by the barrier, the other is no failure
            except Exception as error:  # invariant: no failure of ours stops training
                self._failed(task, error)
            finally:
                self._busy_since = 0.0

    def _next(self) -> Task:
        """What training may wait for comes first; what was copied is handed over as soon as nothing else is
        to do."""
        if len(self._unfinished) >= _UNFINISHED:
            return self._unfinished.popleft()
        while True:
            if self._copies:
                return self._copies.popleft()
            if self._later and not self._unfinished:
                return self._later.popleft()
            try:
                told = self._told.get(block=not self._unfinished, timeout=_TICK)
            except queue.Empty:
                if self._unfinished:
                    return self._unfinished.popleft()
                self._backend.flush()
                continue
            if isinstance(told, Submitted):
                self._copies.extend(map(CopyArtifact, told.artifacts))
            elif not self._unfinished:
                return told
            else:
                self._later.append(told)

    def _do(self, task: Task) -> None:
        match task:
            case CopyArtifact(artifact):
                self._copy(artifact)
            case FinishJob(job):
                self._finish(job)
            case CallBackend(call):
                call()
            case End():
                pass
            case _:
                assert_never(task)

    def _failed(self, task: Task, error: Exception) -> None:
        """Say why, once per kind, and count the artifact that is lost by it."""
        kind, message = type(error).__name__, repr(error)
        if isinstance(error, Skipped):
            kind, message = error.kind, str(error)
        match task:
            case CopyArtifact(artifact):
                lost: Pending | None = artifact
            case FinishJob(job):
                lost = job.pending
            case _:
                lost = None
        if lost is None or lost.cancelled or (isinstance(lost, Delta) and lost.only_measure):
            self.warn(kind, message)
            return
        self.skip(lost, kind, message)
        if kind == "NotCapturable" and isinstance(lost, Snapshot):
            self._lack(message)

    def _copy(self, pending: Pending) -> None:
        job: Job
        try:
            if isinstance(pending, Snapshot):
                job = SnapshotJob(self._desk, pending, self.mutating, self.untold)
            else:
                assert isinstance(pending, Delta)
                assert self.script is not None
                job = DeltaJob(self._desk, pending, self.script)
            job.copy()
        finally:
            pending.end()
        self._unfinished.append(FinishJob(job))

    def _finish(self, job: Job) -> None:
        self._land(job)
        job.finish()
        if job.kind is Kind.SNAPSHOT:
            self._lack("")
        if isinstance(job, DeltaJob):
            self.pace.note_work(job.seconds)
        with self._count_lock:
            self.captured += job.kind is Kind.SNAPSHOT
            self.deltas += job.kind is Kind.DELTA
        self._backend.flush()  # progress: steps may come faster than this thread gets idle

    def _land(self, job: Job) -> None:
        self._busy_since, self._landing = 0.0, True  # what a device takes is not the sidecar's time
        try:
            job.land()
        finally:
            self._busy_since, self._landing = time.monotonic(), False

    def _flush(self, done: threading.Event) -> None:
        """Deliver what progress is owed: somebody waits for it."""
        try:
            self._backend.flush()
        finally:
            done.set()

    def _lack(self, why: str) -> None:
        if why != self._lacking:
            self._lacking = why
            self._backend.cannot_save(why)

    def _reserve(self, snapshot_room: int, delta_room: DeltaRoom) -> None:
        desk = self._desk
        desk.snapshot_room = snapshot_room
        if isinstance(delta_room, int):
            desk.delta_room = delta_room
        if delta_room is not UnknownRoom.KNOWN_SOON:
            self._backend.reserve(desk.snapshot_room, desk.delta_room)
