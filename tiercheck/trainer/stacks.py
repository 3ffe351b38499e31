"""A rank that hangs in a collective cannot say where; the interpreter's own signal handler can, whatever it waits in."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys

ASK = signal.SIGUSR2
"""Sent by the launcher when no step was made for long."""


def answer_with_stacks() -> bool:
    """From now on `ASK` writes the stack of every thread to stderr, and nothing else happens. False if the script, or
    the platform, has another use for the signal."""
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):  # stderr may be no file
        if signal.getsignal(ASK) is signal.SIG_DFL:
            faulthandler.register(ASK, file=sys.__stderr__ or sys.stderr, all_threads=True, chain=False)
            return True
    return False
