"""Passes on what a command writes to its pipe, and keeps the last lines for the message about its end."""

from __future__ import annotations

import contextlib
import os
import re
import select
from io import FileIO

_STDERR = 2
_KEPT = 16384
"""Bytes of output that are kept: the report that torchrun ends with has some 3000 of them."""
_LINES, _CHARACTERS = 5, 600
"""Of the output that are told."""
_PIECE, _PIECES = 4096, 64
"""Bytes that a pipe with room takes at once (PIPE_BUF), and how many such pieces are passed on in a turn."""
_TORCHRUN = re.compile(
    rb"^.*elastic/multiprocessing/api\.py:\d+\] (?:failed \(exitcode|Sending process)", re.M
)
"""Where the words of a rank end and torchrun's report about them begins."""


class RelayedOutput:
    """A pipe whose content goes on to the launcher's own stderr."""

    def __init__(self) -> None:
        reading, self.writing = os.pipe()
        os.set_blocking(reading, False)
        self._reading = open(reading, "rb", buffering=0)  # noqa: SIM115
        self._ended = False
        self.blocked = False
        """Whether nobody took what was last written to stderr: then the command waits, as it would without
        us, and `relay` is to be called again in a moment."""
        self._said = b""

    @property
    def channel(self) -> FileIO | None:
        """For a selector; None: nothing can be passed on now, or no more comes."""
        return None if self._ended or self.blocked else self._reading

    def relay(self) -> None:
        """Passes on what was written, without waiting for anything."""
        for _ in range(_PIECES):
            self.blocked = _is_full(_STDERR)
            if (channel := self.channel) is None or (piece := channel.read(_PIECE)) is None:
                return
            self._ended = not piece
            self._said = (self._said + piece)[-_KEPT:]
            with contextlib.suppress(OSError, ValueError):
                os.write(_STDERR, piece)

    def forget(self) -> None:
        """Another command begins to write."""
        self._said = b""

    def last_lines(self) -> str:
        """What was written last, in one line; empty: nothing."""
        self.relay()
        report = _TORCHRUN.search(self._said)
        said = (self._said[: report.start()].strip() if report else b"") or self._said
        lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
        return " / ".join(lines[-_LINES:])[-_CHARACTERS:]

    def close_writing(self) -> None:
        """Once the command has it; so that its end is seen."""
        os.close(self.writing)

    def close(self) -> None:
        """Passes on what was written last, and takes no more."""
        self.relay()
        self._reading.close()


def _is_full(descriptor: int) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return not select.select([], [descriptor], [], 0)[1]
    return False  # it is closed
