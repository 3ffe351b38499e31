"""Saving must not cost training time: one thread does everything that may wait - slots, copies, messages."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass

import torch

from tiercheck.protocol.version import Version
from tiercheck.trainer import copying
from tiercheck.trainer.backend import Backend, Skipped, WarnOnce
from tiercheck.trainer.copying import Snapshot
from tiercheck.trainer.slot_file import USER_BLOB, USER_BYTES, SlotWriter

_TICK = 0.05  # seconds between attempts to deliver progress that is owed


class _Cancelled(Exception):
    """The barrier gave the snapshot up before its copy began."""


@dataclass(frozen=True)
class _SkippedStep:
    step: int


class Saver:
    """Takes snapshots to a backend, one at a time. `captured` and `skipped` count them."""

    def __init__(self, backend: Backend, rank: int, world_size: int, *, sanity_gate: bool) -> None:
        self._backend = backend
        self._rank = rank
        self._world_size = world_size
        self._sanity_gate = sanity_gate
        self.warn = WarnOnce()
        self.captured = 0
        self.skipped = 0
        self.mutating: set[str] = set()
        """Tensors found to change outside the optimizer: from then on they are copied at once."""
        self._count_lock = threading.Lock()
        self._current: Snapshot | None = None
        self._busy_since = 0.0
        self._writers: dict[str, SlotWriter] = {}
        self._stream: torch.cuda.Stream | None = None
        self._tasks: queue.SimpleQueue[Snapshot | _SkippedStep | int | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tiercheck-saver", daemon=True)
        self._thread.start()

    # Called by the training thread.

    def submit(self, snapshot: Snapshot) -> None:
        """Start the lazy copy. `barrier` must be called before the state changes."""
        self.barrier()  # an update may have been left out since the last one
        self._current = snapshot
        self._tasks.put(snapshot)

    def barrier(self) -> None:
        """Return when the state may change: at once if no copy is under way."""
        snapshot, self._current = self._current, None
        if snapshot is None:
            return
        patience = self._backend.patience
        if patience is not None:
            # What the thread has already been waiting counts: a slow sidecar costs its share once, not at every step.
            since = self._busy_since
            left = patience if since == 0.0 else patience - (time.monotonic() - since)
            if not snapshot.granted.wait(max(0.0, left)) and snapshot.cancel():
                self.skip(snapshot.step, "SlowSidecar", "no slot was granted before the next update")
                return
        snapshot.copied.wait()

    def reserve(self, size: int) -> None:
        """Let slots of `size` bytes be prepared."""
        self._tasks.put(size)

    def skip(self, step: int, kind: str, message: str) -> None:
        """Count a snapshot that is not taken, and say why, once per kind."""
        with self._count_lock:
            self.skipped += 1
        self.warn(kind, f"the snapshot after step {step} is skipped: {message}")

    def tell_skipped(self, step: int) -> None:
        """Let the backend know that the snapshot after `step` will never come."""
        self._tasks.put(_SkippedStep(step))

    def wait(self, timeout: float | None = None) -> bool:
        """Until all that was submitted is done and progress was delivered; False if `timeout` seconds were not enough."""
        done = threading.Event()
        self._tasks.put(done)
        return done.wait(timeout)

    def close(self, timeout: float) -> None:
        self.barrier()
        self.wait(timeout)
        self._tasks.put(None)
        self._thread.join(timeout)

    # The thread.

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=_TICK)
            except queue.Empty:
                self._backend.flush()
                continue
            self._busy_since = time.monotonic()
            try:
                if task is None:
                    return
                if isinstance(task, Snapshot):
                    self._save(task)
                elif isinstance(task, _SkippedStep):
                    self._backend.pass_over(task.step)
                elif isinstance(task, int):
                    self._backend.reserve(task)
                else:
                    self._backend.flush()
                    task.set()
            except _Cancelled:
                pass  # counted by the barrier
            except Skipped as skipped:
                if isinstance(task, Snapshot) and not task.cancelled:
                    self.skip(task.step, skipped.kind, str(skipped))
                else:
                    self.warn(skipped.kind, str(skipped))
            except Exception as error:  # invariant: no failure of ours stops training
                kind = type(error).__name__
                if isinstance(task, Snapshot) and not task.cancelled:
                    self.skip(task.step, kind, repr(error))
                else:
                    self.warn(kind, repr(error))
            finally:
                self._busy_since = 0.0

    def _save(self, snapshot: Snapshot) -> None:
        try:
            path = self._backend.begin(snapshot.step, snapshot.layout.size)
            try:
                self._write(snapshot, path)
            except (Skipped, _Cancelled):
                self._backend.abandon(path, snapshot.step)
                raise
            except (OSError, ValueError, RuntimeError) as error:
                self._backend.abandon(path, snapshot.step)
                raise Skipped("CannotWrite", str(error)) from error
        finally:
            snapshot.end()
        self._backend.complete(path, snapshot.step, snapshot.layout.size)
        with self._count_lock:
            self.captured += 1

    def _write(self, snapshot: Snapshot, path: str) -> None:
        writer = self._writer(path)
        views = writer.begin(snapshot.layout)
        if not snapshot.start():
            raise _Cancelled
        if snapshot.device is not None:
            torch.cuda.set_device(snapshot.device)  # of this thread: else it would open the first GPU as well
            writer.pin()
            self._stream = self._stream or torch.cuda.Stream(snapshot.device)  # type: ignore[no-untyped-call]
        copying.copy_all(snapshot, views, self._stream)
        changed = snapshot.changed()
        snapshot.end()
        if changed:
            self.mutating |= changed
            raise Skipped(
                "ChangedOutsideOptimizer",
                f"{min(changed)} changed while it was copied; it is copied at once from now on",
            )
        views[USER_BLOB][: len(snapshot.blob)].copy_(torch.frombuffer(bytearray(snapshot.blob), dtype=torch.uint8))
        if self._sanity_gate and (name := copying.non_finite(snapshot.entries, views)):
            raise Skipped("NotFinite", f"{name} holds an infinity or a NaN")
        writer.finish(
            snapshot.layout,
            self._rank,
            Version(snapshot.step, self._backend.attempt),
            self._world_size,
            {USER_BYTES: str(len(snapshot.blob))},
        )

    def _writer(self, path: str) -> SlotWriter:
        self._writers = {known: writer for known, writer in self._writers.items() if writer.is_current()}
        if path not in self._writers:
            self._writers[path] = SlotWriter(path)
        return self._writers[path]
