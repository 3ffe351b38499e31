"""Runs the user's own check of a place before training starts there.

Its exit code decides, its last lines are the reason.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from io import FileIO

from tiercheck.launcher import command as processes
from tiercheck.protocol.directive import HealthCheck

_KEPT = 4096
"""Bytes of output that are kept."""
_LINES, _CHARACTERS = 5, 600
"""Of the output that are told."""
_LAST_WAIT = 2.0
"""Seconds for what was killed to be gone."""


class RunningCheck:
    """One run. Its output goes to the log as well. Raises OSError if the command cannot be executed."""

    def __init__(self, wanted: HealthCheck, attempt: int, environment: Mapping[str, str]) -> None:
        self.wanted, self.attempt = wanted, attempt
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._output = open(reading, "rb", buffering=0)  # noqa: SIM115
        self.channel: FileIO | None = self._output
        """For a selector: where its output comes from. None: no more comes, and it may still run."""
        try:
            self.pid = processes.start(wanted.command, environment, output=writing)
        except OSError:
            self._output.close()
            raise
        finally:
            os.close(writing)
        self._deadline = time.monotonic() + wanted.seconds
        self._said = b""
        self._stays = ""
        """What of it SIGKILL does not end."""
        self.code: int | None = None
        """None: it has not ended by itself."""
        self._killed = False

    def listen(self) -> None:
        """Take what was written."""
        piece = self._output.read(65536)
        if piece is None:
            return
        if not piece:
            self.channel = None
        self._said = (self._said + piece)[-_KEPT:]
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), piece)

    def ended(self, code: int) -> None:
        """The command itself has ended; what it started may still be there."""
        if not self._killed:
            self.code = code

    @property
    def over(self) -> bool:
        """Whether nothing of it is waited for any more."""
        return self.code is not None or time.monotonic() >= self._deadline

    @property
    def due(self) -> float:
        """Seconds until it is over at the latest."""
        return max(0.0, self._deadline - time.monotonic())

    def kill(self, spared: int | None) -> bool:
        """SIGKILL to all of it. Whether nothing is left, or it has become clear that it stays."""
        left = processes.kill_descendants(spared)
        if not left:
            return True
        self._killed = True
        self._deadline = min(self._deadline, time.monotonic())
        if time.monotonic() < self._deadline + _LAST_WAIT:
            return False
        self._stays = processes.describe_stuck(left)
        return True

    def failure(self) -> str:
        """Why it has failed, as a clause; empty: it passed. Once it is over and killed."""
        self.listen()
        check = f"failurePolicy.healthCheck ({os.path.basename(self.wanted.command[0])})"
        if self.code == 0 and not self._stays:
            return ""
        if self._stays:
            why = f"left something behind ({self._stays})"
        elif self.code is None:
            why = f"did not end within {self.wanted.seconds:g} s"
        elif name := processes.signal_of(self.code):
            why = f"was ended by {name}"
        else:
            why = f"ended with exit code {self.code}"
        lines = [line.strip() for line in self._said.decode(errors="replace").splitlines() if line.strip()]
        said = " / ".join(lines[-_LINES:])[-_CHARACTERS:]
        return f"{check} {why}{': ' + said if said else ' and said nothing'}"

    def close(self) -> None:
        self._output.close()
