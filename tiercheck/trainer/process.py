"""Ends a rank cleanly: saves its step, reports why and where it ended, and waits for gloo's threads.

torchrun ends with 1 whatever happened, and a log must be found before it can be read. So an uncaught
exception is reported to the sidecar on the way out, with a reason that classifies it, as far as its type and
text are clear.

A rank that hangs in a collective cannot report where. The interpreter's own signal handler can, whatever the
rank waits in.

Threads of gloo must be idle before the interpreter exits.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from tiercheck.protocol.local import ReportFailing
from tiercheck.protocol.names import (
    COLLECTIVE_FAILED,
    EXITED,
    GPU_FAULT,
    OUT_OF_GPU_MEMORY,
    STEP_SUSPECTED,
    UNCAUGHT,
)

_STOP_PATIENCE = 20
"""Seconds. The signal then ends the process although no step has ended, as between two trainings."""
_DEFAULT: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class StopRequest:
    """Replaces the default handlers of both signals, until `release`."""

    def __init__(self) -> None:
        self.signal = 0
        """The number of the signal that was received; 0: none."""
        self._pid = os.getpid()
        self._alarm: Any = None
        self._taken: list[int] = []
        if threading.current_thread() is threading.main_thread():
            for number, default in _DEFAULT.items():
                if signal.getsignal(number) is default:  # else a framework, or the script, uses it
                    signal.signal(number, self._ask)
                    self._taken.append(number)

    def act_on_signal(self) -> None:
        """Performs the default action of the signal. Raises KeyboardInterrupt for Ctrl-C."""
        self.release()
        signal.raise_signal(self.signal)

    def release(self) -> None:
        """Restores the default handlers. May be called twice."""
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
            self.act_on_signal()
            return
        self.signal = number
        print("tiercheck: saves at the end of this step, then ends (once more: at once)", file=sys.stderr)
        self._alarm = signal.signal(signal.SIGALRM, lambda *_: self.act_on_signal())
        signal.alarm(_STOP_PATIENCE)


_LONGEST = 500
_HARDWARE = (
    # Texts of cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable, cudaErrorHardwareStackError,
    # cudaErrorContained, cudaErrorNoDevice and cudaErrorLaunchFailure (CUDA runtime API, cudaError_t), and
    # what the driver's users see of Xid 79.
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "hardware stack error",
    "invalid access of peer gpu memory over nvlink or a hardware error",
    "no cuda-capable device is detected",
    "unspecified launch failure",
    "fallen off the bus",
    "gpu is lost",
)
_XID = re.compile(r"\bxid\W{0,4}(?:\(pci:[^)]*\)\W{0,3})?(?:48|63|64|74|79|92|94|95|119|120)\b")
"""Xids at which NVIDIA advises to drain the node or reset the GPU (GPU Debug Guidelines, Xid catalog)."""
_COLLECTIVES = ("nccl", "gloo", "connection closed by peer", "connection reset by peer", "broken pipe")

Excepthook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class StepSuspected(BaseException):
    """`Checkpointer.suspect` was called in this step. Not an Exception: scripts must not go on from it."""


def reason_of(error: BaseException) -> str:
    """Returns the reason for `error`: one of the constants imported from `protocol.names`."""
    text = str(error).lower()
    if isinstance(error, SystemExit):
        return EXITED
    if isinstance(error, StepSuspected):
        return STEP_SUSPECTED
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_GPU_MEMORY
    if any(part in text for part in _HARDWARE) or _XID.search(text):
        return GPU_FAULT
    of_network = isinstance(error, (RuntimeError, ConnectionError)) and any(
        part in text for part in _COLLECTIVES
    )
    backend_error = getattr(getattr(torch, "distributed", None), "DistBackendError", ())
    return COLLECTIVE_FAILED if of_network or isinstance(error, backend_error) else UNCAUGHT


def describe_error(error: BaseException) -> str:
    """Returns the error's type and the beginning of its text, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_LONGEST] if text else type(error).__name__


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code of an interpreter that ends because of `error`."""
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


class FailureReporter:
    """Reports the error that ends this process, once; then calls the previous excepthook. Never raises."""

    def __init__(self, send: Callable[[ReportFailing], None]) -> None:
        self._send = send
        self._is_sent = False
        self._before: Excepthook = sys.excepthook
        self._ours: Excepthook = self._hook
        sys.excepthook = self._ours

    def report(self, error: BaseException) -> None:
        code = exit_code_of(error)
        if not self._is_sent and code and not isinstance(error, KeyboardInterrupt):
            self._is_sent = True
            self._send(ReportFailing(reason_of(error), describe_error(error), code))

    def close(self) -> None:
        if sys.excepthook is self._ours:
            sys.excepthook = self._before

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            self.report(error)
        finally:
            self._before(kind, error, trace)


ASK = signal.SIGUSR2
"""The signal that the launcher sends when no step has been made for long."""


def answer_with_stacks() -> bool:
    """Makes `ASK` write all threads' stacks to stderr. Returns False if the signal is in use or missing."""
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):  # stderr may be no file
        if signal.getsignal(ASK) is signal.SIG_DFL:
            faulthandler.register(ASK, file=sys.__stderr__ or sys.stderr, all_threads=True, chain=False)
            return True
    return False


_NAME = "pt_gloo_runloop"  # 15 characters: all that Linux keeps of a name
_PAUSE = 0.002
_LOOKS = 2  # a thread that waits for the interpreter lock at the first look has had it before the second
_PATIENCE = 1.0


@functools.cache
def wait_at_exit() -> None:
    """Makes the process wait for gloo's threads at exit, after the hooks that are registered later."""
    atexit.register(wait_until_idle)


def wait_until_idle() -> None:
    """Waits until no gloo thread of this process has anything to do, at most a second. Raises nothing.

    Such a thread may be the last to release a tensor, some time after it reported the collective as done, and
    needs the interpreter lock for that. An interpreter before 3.14 that has begun to end unwinds any thread
    that asks for its lock, which a C++ destructor answers with abort. `destroy_process_group` does not end
    these threads: DTensor's caches keep the group.
    """
    end = time.monotonic() + _PATIENCE
    idle = 0
    while idle < _LOOKS and time.monotonic() < end:
        time.sleep(_PAUSE)  # without the interpreter lock
        busy = any(state.startswith(("R", "D")) for state in _gloo_threads().values())
        idle = 0 if busy else idle + 1


def _gloo_threads() -> dict[str, str]:
    """Returns id and state of every thread that may be gloo's.

    Older torch (2.8 for one) does not name them: as other native threads they inherit the process's name.
    """
    known = {str(thread.native_id) for thread in threading.enumerate()}
    found = {}
    for status in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has just ended, or there is no /proc
            name, _, state = status.read_text().partition("(")[2].rpartition(") ")  # "id (name) state ..."
            inherited = (
                name == Path("/proc/self/comm").read_text().strip() and status.parent.name not in known
            )
            if name == _NAME or inherited:
                found[status.parent.name] = state
    return found
