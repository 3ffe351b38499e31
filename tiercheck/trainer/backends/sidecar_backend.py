"""Requests slots from the sidecar, with a deadline on everything, and handles any answer, or none."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import TypeVar

from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.encoding import Malformed, from_json, to_json
from tiercheck.protocol.local import (
    LONGEST_LINE,
    NOT_RELEASED,
    AbandonSlot,
    BeginSlot,
    BorrowArtifact,
    CompleteSlot,
    DeclineDeltas,
    Hello,
    Reply,
    ReportCannotSave,
    ReportProgress,
    ReportRestored,
    Request,
    ReserveSlots,
    Welcome,
)
from tiercheck.protocol.names import ENV_ATTEMPT, ENV_JOINS, SOCKET_NAME
from tiercheck.protocol.version import Kind, Version
from tiercheck.trainer.backends.backend import Offer, Ranges, RankReport, RestoreError, Skipped, WarnOnce

T = TypeVar("T")


class LinkBroken(OSError):
    """The sidecar gave no valid answer, or the connection is gone. The link is closed; open a new one."""


class SidecarLink:
    """A connection to the sidecar, which closes itself after a missed deadline.

    Answers come in the order of the requests, so that it would be of no use any more.
    """

    def __init__(self, path: Path, hello: Hello, timeout: float) -> None:
        """Connects and sends a hello; `welcome` holds the answer. Raises LinkBroken."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._sending = threading.Lock()
        self._received = b""
        self.closed = False
        try:
            self._socket.settimeout(timeout)
            self._socket.connect(str(path))
            self._socket.setblocking(False)
        except OSError as error:
            self.close()
            raise LinkBroken(f"{path}: {error.strerror or error}") from error
        self.welcome = self.exchange(hello, Welcome, timeout)

    def send_nowait(self, request: Request) -> bool:
        """Sends without waiting for anything; False if not possible right now. Raises LinkBroken."""
        if not self._sending.acquire(blocking=False):
            return False
        try:
            line = to_json(request) + b"\n"
            if self._socket.send(line) != len(line):
                raise LinkBroken("a message was cut")  # cannot be: the kernel takes short messages whole
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            self.close()
            raise LinkBroken(str(error)) from error
        finally:
            self._sending.release()

    def close(self) -> None:
        self.closed = True
        self._socket.close()

    def exchange(self, message: Hello | Request, answer: type[T], timeout: float) -> T:
        """Sends a message and waits for the answer. Raises LinkBroken."""
        deadline = time.monotonic() + timeout
        try:
            with self._sending:
                self._send(to_json(message) + b"\n", deadline)
            return from_json(self._line(deadline), answer)
        except (OSError, Malformed) as error:
            self.close()
            raise LinkBroken(str(error)) from error

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._received:
            self._wait(select.POLLIN, deadline)
            piece = self._socket.recv(65536)
            if not piece:
                raise LinkBroken("the sidecar closed the connection")
            self._received += piece
            if len(self._received) > LONGEST_LINE:
                raise LinkBroken("the sidecar's answer has no end")
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _wait(self, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise LinkBroken("the sidecar did not answer in time")


ANSWER_SECONDS = 2.0
"""Seconds. The longest that the sidecar may take to answer."""
RESERVE_SECONDS = 60.0
"""Seconds. The same when it has to allocate and touch all slots."""
FIRST_CONNECT_SECONDS = 60.0
"""Seconds. The longest that `restore` waits for the sidecar, which has to name the version."""
BORROW_SECONDS = 600.0
"""Seconds. The longest that `restore` waits for a snapshot of another rank."""
_BACKOFF = (0.5, 30.0)  # seconds between attempts to connect again: first, longest
_PROGRESS_LATE = 0.5  # seconds without a progress message after which the training thread sends it itself


class SidecarBackend:
    """A `Backend` over the sidecar's socket."""

    patience: float | None = 1.0
    left_out = ""
    is_folder = False
    delta = DeltaMode.NONE
    sanity_gate = True
    verify_all = False

    def __init__(self, run_dir: Path, rank: int, world_size: int) -> None:
        self._path = run_dir / SOCKET_NAME
        self.place = str(run_dir)
        self.journal = run_dir / f"journal-{rank}"
        self.attempt = int(os.environ.get(ENV_ATTEMPT, "0"))
        self._hello = Hello(
            role="rank", pid=os.getpid(), rank=rank, world_size=world_size, attempt=self.attempt
        )
        self.every = 0
        self.numa = -1
        self.fenced = False
        """True once a newer attempt is on its way: nothing of this process is wanted any more."""
        self._link: SidecarLink | None = None
        self._lasting: dict[type, ReportRestored | DeclineDeltas | ReportCannotSave] = {}
        """The newest report of each kind that a new connection has to repeat."""
        self._reserved: tuple[int, int | None] = (0, 0)
        self._wanted = (0, 0)
        self._retry_at = 0.0
        self._backoff = _BACKOFF[0]
        self._warn = WarnOnce()
        self._pending_progress: ReportProgress | None = None
        # Answers have no id: a second thread (an error that ends the script) would take another's.
        self._request_lock = threading.RLock()
        self._pending_lock = threading.Lock()
        self._progress_lock = threading.Lock()
        self._progress_sent_at = 0.0

    def find(self) -> Offer | None:
        deadline = time.monotonic() + FIRST_CONNECT_SECONDS
        while True:
            try:
                welcome = self._connect().welcome
                break
            except LinkBroken as error:
                if time.monotonic() > deadline:
                    raise RestoreError(f"the sidecar does not answer: {error}") from error
                time.sleep(0.1)
            except Skipped as error:
                early = str(error) == NOT_RELEASED and os.environ.get(ENV_JOINS) == "1"  # not released yet
                if self.fenced or (time.monotonic() > deadline and not early):
                    raise RestoreError(str(error)) from error
                time.sleep(0.05)
        version = welcome.restore_version
        if version is None:
            return None
        return Offer(
            version,
            welcome.restore_path,
            welcome.restore_deltas,
            world_size=welcome.restore_world_size,
            source=welcome.restore_source or "the sidecar",
            borrow=partial(self._borrow, version) if welcome.restore_world_size else None,
        )

    def _borrow(self, version: Version, rank: int, ranges: Ranges) -> str:
        wanted = BorrowArtifact(rank, version.step, Kind.SNAPSHOT, tuple(ranges))
        try:
            return self._ask(wanted, BORROW_SECONDS)
        except Skipped as error:
            raise RestoreError(f"the snapshot of {version} of rank {rank} cannot be had: {error}") from error

    def report(self, report: RankReport) -> None:
        if isinstance(report, ReportRestored | DeclineDeltas | ReportCannotSave):
            self._lasting[type(report)] = report
        self._send_or_warn(report)

    def reserve(self, size: int, delta_size: int) -> None:
        self._wanted = (size, delta_size)
        self._reserve()

    def begin(self, step: int, size: int, kind: Kind) -> str:
        if kind is Kind.SNAPSHOT:
            self._wanted = (size, self._wanted[1])
        try:
            self._reserve()
        except Skipped as skipped:
            if skipped.kind != "SidecarRefused":
                raise
            # The request all the same lets the other ranks see that this version will not come.
            self._warn(skipped.kind, str(skipped))
        return self._ask(BeginSlot(step, size, kind), ANSWER_SECONDS)

    def complete(self, path: str, step: int, size: int, kind: Kind) -> None:
        self._ask(CompleteSlot(path, step, size, kind), ANSWER_SECONDS)

    def abandon(self, path: str, step: int, kind: Kind) -> None:
        self._send_or_warn(AbandonSlot(path, step, kind))

    def pass_over(self, step: int) -> None:
        try:
            # A slot requested and given back shows the sidecar that this rank has come past `step`.
            path = self._ask(BeginSlot(step, self._wanted[0]), ANSWER_SECONDS)
        except Skipped as skipped:
            self._warn(skipped.kind, str(skipped))
        else:
            self.abandon(path, step, Kind.SNAPSHOT)

    def progress(self, step: int, loss: float | None, seconds: float | None, not_finite: int) -> None:
        with self._pending_lock:
            self._pending_progress = ReportProgress(step, loss, seconds, not_finite)
        if time.monotonic() - self._progress_sent_at < _PROGRESS_LATE:
            return  # the other thread does it: waking the sidecar costs more than all else here
        if self._progress_lock.acquire(blocking=False):
            try:
                self._send_pending_progress()
            finally:
                self._progress_lock.release()

    def flush(self) -> bool:
        if self._pending_progress is None:
            return True
        try:
            with self._request_lock:
                self._connected()
        except Skipped as skipped:
            self._warn(skipped.kind, str(skipped))
            return False
        with self._progress_lock:
            self._send_pending_progress()
        return self._pending_progress is None

    def close(self) -> None:
        deadline = time.monotonic() + ANSWER_SECONDS
        while (
            not self.flush()
            and self._link is not None
            and not self._link.closed
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)  # the sidecar is there but its socket is full
        if self._link is not None:
            self._link.close()

    def _send_pending_progress(self) -> None:
        link, pending = self._link, self._pending_progress
        if pending is None or link is None or link.closed:
            return
        try:
            if link.send_nowait(pending):
                self._progress_sent_at = time.monotonic()
                with self._pending_lock:
                    if self._pending_progress is pending:
                        self._pending_progress = None
        except LinkBroken as error:
            self._warn("SidecarGone", str(error))

    def _reserve(self) -> None:
        with self._request_lock:
            self._connected()  # a new connection forgets what was reserved
        size, delta_size = self._wanted
        # As long as deltas may come, a request for none would report that this rank takes none.
        declined = any(
            isinstance(each, DeclineDeltas) and each.message for each in list(self._lasting.values())
        )
        undecided = delta_size == 0 and self.delta is not DeltaMode.NONE and not declined
        wanted = (size, None if undecided else delta_size)
        if self._reserved != wanted:
            said = ReserveSlots(size, wanted[1], self.numa)
            self._ask(said, RESERVE_SECONDS)
            self._reserved = wanted

    def _send_or_warn(self, request: Request) -> None:
        try:
            self._ask(request, ANSWER_SECONDS)
        except Skipped as skipped:
            self._warn(skipped.kind, str(skipped))

    def _ask(self, request: Request, timeout: float) -> str:
        """Sends a request and returns the reply's path. Raises Skipped, whatever went wrong."""
        with self._request_lock:
            link = self._connected()
            try:
                reply = link.exchange(request, Reply, timeout)
            except LinkBroken as error:
                raise Skipped("SidecarGone", f"{request.op}: {error}") from error
            self.every = reply.snapshot_every or self.every
        if reply.skip:
            raise Skipped("NoFreeSlot", reply.skip)
        if not reply.ok:
            if request.op != "reserve":
                link.close()  # the next hello shows whether this attempt is over
            raise Skipped("SidecarRefused", reply.error or f"{request.op} was refused")
        return reply.path

    def _connected(self) -> SidecarLink:
        """Returns the link, opened again if it broke and its backoff is over. Raises Skipped."""
        if self._link is not None and not self._link.closed:
            return self._link
        if self.fenced:
            raise Skipped("Fenced", "a newer attempt of the job has begun; nothing is saved any more")
        if time.monotonic() < self._retry_at:
            raise Skipped("SidecarGone", "the sidecar is not reachable")
        try:
            link = self._connect()
            for report in list(self._lasting.values()):
                if isinstance(report, ReportRestored) or report.message:
                    link.exchange(report, Reply, ANSWER_SECONDS)
        except LinkBroken as error:
            self._retry_at = time.monotonic() + self._backoff
            self._backoff = min(2 * self._backoff, _BACKOFF[1])
            raise Skipped("SidecarGone", str(error)) from error
        self._backoff = _BACKOFF[0]
        return link

    def _connect(self) -> SidecarLink:
        """Connects. Raises LinkBroken, or Skipped if the sidecar refuses this rank."""
        link = SidecarLink(self._path, self._hello, ANSWER_SECONDS)
        welcome = link.welcome
        if welcome.error:
            link.close()
            if welcome.attempt > self.attempt:
                self.fenced = True
                raise Skipped("Fenced", welcome.error)
            self._retry_at = time.monotonic() + self._backoff
            raise Skipped("SidecarRefused", welcome.error)
        self.delta, self.sanity_gate, self.verify_all = welcome.delta, welcome.sanity_gate, welcome.verify_all
        self.every = welcome.snapshot_every or self.every
        self._reserved = (0, 0)  # a restarted sidecar has no reservations
        self._link = link
        return link
