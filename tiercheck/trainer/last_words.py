"""Why a rank ends, in its own words: torchrun ends with 1 whatever happened, and a log must be found before it can be read.

An exception that nobody caught is told to the sidecar on the way out, with a reason that says whose fault it is as far as its
type and text are clear about it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import TracebackType

import torch

from tiercheck.protocol.reasons import COLLECTIVE_FAILED, EXITED, GPU_FAULT, OUT_OF_GPU_MEMORY, UNCAUGHT

_LONGEST = 500
_HARDWARE = (
    # Texts of cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable, cudaErrorHardwareStackError, cudaErrorContained,
    # cudaErrorNoDevice and cudaErrorLaunchFailure (CUDA runtime API, cudaError_t), and what the driver's users see of Xid 79.
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
"""The driver's numbers of faults for which NVIDIA says to drain the node or reset the GPU (GPU Debug Guidelines, Xid catalog)."""
_COLLECTIVES = ("nccl", "gloo", "connection closed by peer", "connection reset by peer", "broken pipe")

Excepthook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def reason_of(error: BaseException) -> str:
    """One of the words above."""
    text = str(error).lower()
    if isinstance(error, SystemExit):
        return EXITED
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_GPU_MEMORY
    if any(part in text for part in _HARDWARE) or _XID.search(text):
        return GPU_FAULT
    of_network = isinstance(error, (RuntimeError, ConnectionError)) and any(part in text for part in _COLLECTIVES)
    backend_error = getattr(getattr(torch, "distributed", None), "DistBackendError", ())
    return COLLECTIVE_FAILED if of_network or isinstance(error, backend_error) else UNCAUGHT


def in_words(error: BaseException) -> str:
    """Its type and the beginning of its text, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_LONGEST] if text else type(error).__name__


def exit_code_of(error: BaseException) -> int:
    """What the interpreter ends with because of it."""
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


class LastWords:
    """Hands what ends this process to `tell`, once. Never raises; what was there before is called after it."""

    def __init__(self, tell: Callable[[str, str, int], None]) -> None:
        self._tell = tell
        self._said = False
        self._before: Excepthook = sys.excepthook
        self._ours: Excepthook = self._hook
        sys.excepthook = self._ours

    def say(self, error: BaseException) -> None:
        code = exit_code_of(error)
        if not self._said and code and not isinstance(error, KeyboardInterrupt):
            self._said = True
            self._tell(reason_of(error), in_words(error), code)

    def close(self) -> None:
        if sys.excepthook is self._ours:
            sys.excepthook = self._before

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            self.say(error)
        finally:
            self._before(kind, error, trace)
