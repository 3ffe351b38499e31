"""Page-locking for the GPU, and what it must not do: fail unnoticed, or leave its failure to an innocent call.

A registration that fails leaves its error on the thread, and torch reports it at the next kernel that it starts, as if that had
failed (vllm-project/vllm#51081). Very large ones always fail, and each holds a lock of the driver, so it is done in pieces.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from tiercheck.trainer.accelerator import runtimes

PIECE = 256 * 1024 * 1024
_PORTABLE = 1
"""cudaHostRegisterPortable: for every CUDA context of this process."""


def page_lock(address: int, size: int) -> tuple[Sequence[int], str]:
    """Register host memory. The addresses of the pieces, and why there are none; then nothing is left registered."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    done: list[int] = []
    for begin in range(address, address + size, PIECE):
        code = int(runtime.cudaHostRegister(begin, min(PIECE, address + size - begin), _PORTABLE))
        if code:
            release(done)
            _clear_error()
            return (
                (),
                f"cudaHostRegister failed with error {code} after {len(done) * PIECE // 2**20} of {size // 2**20} MiB",
            )
        done.append(begin)
    return tuple(done), ""


def release(pieces: Sequence[int]) -> None:
    """Undo it."""
    if not pieces:
        return
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    failed = [code for begin in pieces if (code := int(runtime.cudaHostUnregister(begin)))]
    if failed:
        _clear_error()


def _clear_error() -> None:
    """Take the error off this thread. torch has no call for it."""
    for path in runtimes():
        ctypes.CDLL(path).cudaGetLastError()
