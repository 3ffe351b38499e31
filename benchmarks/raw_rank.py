"""Plays a rank without torch, where only the sidecars are measured.

It speaks the trainer's protocol and writes bytes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

from benchmarks.job import Job
from tiercheck.protocol.artifacts.slot import SlotLayout
from tiercheck.protocol.local import Hello, Reply
from tiercheck.protocol.names import ENV_RUN_DIR, SOCKET_NAME
from tiercheck.protocol.requests import BeginSlot, CompleteSlot, ReportRestored, Request, ReserveSlots
from tiercheck.protocol.version import Version
from tiercheck.trainer.backends.sidecar_link import SidecarLink

_SECONDS = 120.0
_PIECE = 16 << 20


class RawRank:
    """One rank's connection to its sidecar. Use it as a context."""

    def __init__(self, job: Job, rank: int) -> None:
        self._rank, self._job = rank, job
        self._layout: SlotLayout | None = None
        path = Path(job.trainer_env(rank)[ENV_RUN_DIR]) / SOCKET_NAME
        hello = Hello("rank", os.getpid(), rank, job.workers, job.attempt)
        self._link = SidecarLink(path, hello, _SECONDS)
        if self._link.welcome.error:
            raise RuntimeError(self._link.welcome.error)
        self._ask(ReportRestored())
        self._bytes = os.urandom(_PIECE)

    def __enter__(self) -> RawRank:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._link.close()

    def reserve(self, size: int) -> None:
        """Slots for `size` bytes of state."""
        self._layout = SlotLayout.plan([("state", "U8", (size,), size)])
        self._ask(ReserveSlots(self._layout.size))

    def save(self, step: int) -> None:
        """A snapshot of random bytes; waits for a free slot."""
        assert self._layout is not None
        layout = self._layout
        while not (reply := self._ask(BeginSlot(step, layout.size))).path:
            time.sleep(0.01)
        with open(reply.path, "r+b", buffering=0) as file:
            file.seek(8)
            file.write(layout.header(self._rank, Version(step, self._job.attempt), self._job.workers, {}))
            left = layout.size - layout.data_begin
            while left > 0:
                left -= file.write(self._bytes[: min(left, _PIECE)])
            file.seek(0)
            file.write(layout.state_word)
        self._ask(CompleteSlot(reply.path, step, layout.size))

    def _ask(self, request: Request) -> Reply:
        reply = self._link.ask(request, _SECONDS)
        if not reply.ok:
            raise RuntimeError(f"{request.op}: {reply.error}")
        return reply
