"""In a cluster the sidecar owns the memory: this asks it for slots, and lives with any answer, or none."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from tiercheck.protocol.local import Hello, Request, Welcome
from tiercheck.protocol.names import ENV_ATTEMPT, SOCKET_NAME
from tiercheck.trainer.backend import Offer, RestoreError, Skipped, WarnOnce
from tiercheck.trainer.sidecar_link import LinkBroken, SidecarLink

ANSWER_SECONDS = 2.0
"""How long the sidecar may take to answer."""
RESERVE_SECONDS = 60.0
"""The same when it has to allocate and touch all slots."""
FIRST_CONNECT_SECONDS = 60.0
"""How long `restore` waits for the sidecar: without it nobody knows what to restore."""
_BACKOFF = (0.5, 30.0)  # seconds between attempts to connect again: first, longest
_PROGRESS_GAP = 0.05  # seconds between progress messages


class SidecarBackend:
    """A `Backend` over the sidecar's socket."""

    patience: float | None = 1.0

    def __init__(self, run_dir: Path, rank: int, world_size: int) -> None:
        self._path = run_dir / SOCKET_NAME
        self.attempt = int(os.environ.get(ENV_ATTEMPT, "0"))
        self._hello = Hello(role="rank", pid=os.getpid(), rank=rank, world_size=world_size, attempt=self.attempt)
        self.every = 50
        self.fenced = False
        """A newer attempt is on its way: nothing of this process is wanted any more."""
        self._link: SidecarLink | None = None
        self._welcome: Welcome | None = None
        self._restored_step: int | None = None
        self._reserved = 0
        self._wanted = 0
        self._retry_at = 0.0
        self._backoff = _BACKOFF[0]
        self._warn = WarnOnce()
        self._owed: Request | None = None
        self._owed_lock = threading.Lock()
        self._told_at = 0.0

    def find(self) -> Offer | None:
        deadline = time.monotonic() + FIRST_CONNECT_SECONDS
        while True:
            try:
                self._connect()
                break
            except LinkBroken as error:
                if time.monotonic() > deadline:
                    raise RestoreError(f"the sidecar does not answer: {error}") from error
                time.sleep(0.1)
            except Skipped as error:
                if self.fenced or time.monotonic() > deadline:
                    raise RestoreError(str(error)) from error
                time.sleep(0.1)
        assert self._welcome is not None
        if self._welcome.restore_version is None:
            return None
        return Offer(self._welcome.restore_version, self._welcome.restore_path)

    def restored(self, step: int) -> None:
        self._restored_step = step
        try:
            self._ask(Request("restored", step=step), ANSWER_SECONDS)
        except Skipped as skipped:
            self._warn(skipped.kind, str(skipped))

    def reserve(self, size: int) -> None:
        self._wanted = size
        self._reserve()

    def begin(self, step: int, size: int) -> str:
        self._wanted = size
        try:
            self._reserve()
        except Skipped as skipped:
            if skipped.kind != "SidecarRefused":
                raise
            self._warn(
                skipped.kind, str(skipped)
            )  # asking all the same tells the others that this version will not come
        return self._ask(Request("begin", step=step, bytes=size), ANSWER_SECONDS)

    def complete(self, path: str, step: int, size: int) -> None:
        self._ask(Request("complete", step=step, bytes=size, path=path), ANSWER_SECONDS)

    def abandon(self, path: str, step: int) -> None:
        try:
            self._ask(Request("abandon", step=step, path=path), ANSWER_SECONDS)
        except Skipped as skipped:
            self._warn(skipped.kind, str(skipped))

    def pass_over(self, step: int) -> None:
        try:
            # To ask for the slot and give it back is how the sidecar learns that this rank has come past `step`.
            path = self._ask(Request("begin", step=step, bytes=self._wanted), ANSWER_SECONDS)
        except Skipped as skipped:
            self._warn(skipped.kind, str(skipped))
        else:
            self.abandon(path, step)

    def progress(self, step: int, loss: float | None, seconds: float | None) -> None:
        with self._owed_lock:
            self._owed = Request("progress", step=step, loss=loss, step_seconds=seconds)
            if time.monotonic() - self._told_at >= _PROGRESS_GAP:
                self._tell_owed()

    def flush(self) -> bool:
        if self._owed is None:
            return True
        try:
            self._connected()
        except Skipped as skipped:
            self._warn(skipped.kind, str(skipped))
            return False
        with self._owed_lock:
            self._tell_owed()
            return self._owed is None

    def close(self) -> None:
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self.flush() and self._link is not None and not self._link.closed and time.monotonic() < deadline:
            time.sleep(0.01)  # the sidecar is there but its socket is full
        if self._link is not None:
            self._link.close()

    def _tell_owed(self) -> None:
        link = self._link
        if self._owed is None or link is None or link.closed:
            return
        try:
            if link.tell(self._owed):
                self._owed = None
                self._told_at = time.monotonic()
        except LinkBroken as error:
            self._warn("SidecarGone", str(error))

    def _reserve(self) -> None:
        self._connected()  # a new connection forgets what was reserved
        if self._reserved != self._wanted:
            self._ask(Request("reserve", bytes=self._wanted), RESERVE_SECONDS)
            self._reserved = self._wanted

    def _ask(self, request: Request, timeout: float) -> str:
        """The reply's path. Raises Skipped, whatever went wrong."""
        link = self._connected()
        try:
            reply = link.ask(request, timeout)
        except LinkBroken as error:
            raise Skipped("SidecarGone", f"{request.op}: {error}") from error
        if reply.skip:
            raise Skipped("NoFreeSlot", reply.skip)
        if not reply.ok:
            if request.op != "reserve":
                link.close()  # the next hello tells whether this attempt is over
            raise Skipped("SidecarRefused", reply.error or f"{request.op} was refused")
        return reply.path

    def _connected(self) -> SidecarLink:
        """The link, opened again if it broke and its time has come. Raises Skipped."""
        if self._link is not None and not self._link.closed:
            return self._link
        if self.fenced:
            raise Skipped("Fenced", "a newer attempt of the job has begun; nothing is saved any more")
        if time.monotonic() < self._retry_at:
            raise Skipped("SidecarGone", "the sidecar is not reachable")
        try:
            link = self._connect()
            if self._restored_step is not None:
                link.ask(Request("restored", step=self._restored_step), ANSWER_SECONDS)
        except LinkBroken as error:
            self._retry_at = time.monotonic() + self._backoff
            self._backoff = min(2 * self._backoff, _BACKOFF[1])
            raise Skipped("SidecarGone", str(error)) from error
        self._backoff = _BACKOFF[0]
        return link

    def _connect(self) -> SidecarLink:
        """Raises LinkBroken, or Skipped if the sidecar refuses this rank."""
        link = SidecarLink(self._path, self._hello, ANSWER_SECONDS)
        welcome = link.welcome
        if welcome.error:
            link.close()
            if welcome.attempt > self.attempt:
                self.fenced = True
                raise Skipped("Fenced", welcome.error)
            self._retry_at = time.monotonic() + self._backoff
            raise Skipped("SidecarRefused", welcome.error)
        self._welcome = welcome
        self.every = max(1, welcome.snapshot_every)
        self._reserved = 0  # a sidecar that was restarted has forgotten
        self._link = link
        return link
