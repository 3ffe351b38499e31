"""Lets the step under way end, and be saved, before Ctrl-C or SIGTERM ends the process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

_PATIENCE = 20
"""Seconds until the signal ends the process although no step has ended. A script between two trainings must
not ignore it."""
_DEFAULT: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class StopRequest:
    """Takes the place of the default handlers of both signals, until `release`."""

    def __init__(self) -> None:
        self.signal = 0
        """The one that came; 0: none."""
        self._pid = os.getpid()
        self._alarm: Any = None
        self._taken: list[int] = []
        if threading.current_thread() is threading.main_thread():
            for number, default in _DEFAULT.items():
                if signal.getsignal(number) is default:  # a framework, or the script, has another use for it
                    signal.signal(number, self._ask)
                    self._taken.append(number)

    def obey(self) -> None:
        """Do what the signal does by default. Raises KeyboardInterrupt for Ctrl-C."""
        self.release()
        signal.raise_signal(self.signal)

    def release(self) -> None:
        """Give the signals back. May be called twice."""
        if self._alarm is not None:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, self._alarm)
            self._alarm = None
        while self._taken:
            number = self._taken.pop()
            if signal.getsignal(number) == self._ask:
                signal.signal(number, _DEFAULT[number])

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self.signal or os.getpid() != self._pid:  # a forked worker of a loader makes no step
            self.signal = number
            self.obey()
            return
        self.signal = number
        print("tiercheck: saves at the end of this step, then ends (once more: at once)", file=sys.stderr)
        self._alarm = signal.signal(signal.SIGALRM, lambda *_: self.obey())
        signal.alarm(_PATIENCE)
