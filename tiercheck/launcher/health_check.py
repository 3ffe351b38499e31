"""Runs the user's own check of a place before training starts there.

Its exit code decides, its last lines are the reason.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from tiercheck.launcher import command as processes
from tiercheck.launcher.output import RelayedOutput
from tiercheck.protocol.directive import HealthCheck

_LAST_WAIT = 2.0
"""Seconds for what was killed to be gone."""


class RunningCheck:
    """One run. Its output goes to the log as well. Raises OSError if the command cannot be executed."""

    def __init__(self, wanted: HealthCheck, attempt: int, environment: Mapping[str, str]) -> None:
        self.wanted, self.attempt = wanted, attempt
        self.output = RelayedOutput()
        try:
            writing = self.output.writing
            self.pid = processes.start(wanted.command, environment, output=writing, errors=writing)
        except OSError:
            self.output.close()
            raise
        finally:
            self.output.close_writing()
        self._deadline = time.monotonic() + wanted.seconds
        self._stays = ""
        """What of it SIGKILL does not end."""
        self.code: int | None = None
        """None: it has not ended by itself."""
        self._killed = False

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
        said = self.output.last_lines()
        return f"{check} {why}{': ' + said if said else ' and said nothing'}"

    def close(self) -> None:
        self.output.close()
