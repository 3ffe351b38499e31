"""One slot: a plain file of exact size on the memory volume, its memory paid for by the sidecar.

Never `multiprocessing.shared_memory`, whose segments vanish with their creator. The file is pre-faulted here, because
first touch is several times slower than reuse and its memory is charged to whoever touches first.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.slot import TORN
from tiercheck_sidecar.vault.seal import Seal, break_seal

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_ZEROS = bytes(1024 * 1024)


class SlotState(Enum):
    ALLOCATING = "allocating"
    FREE = "free"
    WRITING = "writing"
    SEALING = "sealing"
    SEALED = "sealed"
    GONE = "gone"


@dataclass(eq=False)
class Slot:
    """Guarded by the vault's lock, except for the bytes themselves."""

    path: Path
    size: int
    rank: int
    tier: Tier
    state: SlotState = SlotState.ALLOCATING
    seal: Seal | None = None
    pins: int = 0
    doomed: bool = False
    """Free it as soon as nobody uses it."""
    attempt: int = field(default=0)
    step: int = field(default=0)

    @contextlib.contextmanager
    def mapped(self, write: bool = False) -> Iterator[memoryview]:
        """The slot's bytes. Raises OSError."""
        with open(self.path, "r+b" if write else "rb") as file:
            access = mmap.ACCESS_WRITE if write else mmap.ACCESS_READ
            area = mmap.mmap(file.fileno(), self.size, access=access)
        view = memoryview(area)
        try:
            yield view
        finally:
            # A caller's slice may outlive the block by a frame of a traceback; the mapping then goes with it.
            with contextlib.suppress(BufferError):
                view.release()
                area.close()


def create(path: Path, size: int) -> None:
    """Create and pre-fault a slot file. Raises OSError (ENOSPC if the volume is full); then there is no file."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.fchmod(descriptor, 0o666)  # the trainer may run as another user of the same pod
        os.posix_fallocate(descriptor, 0, size)  # says ENOSPC here rather than SIGBUS at first touch
        _touch(descriptor, size)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _touch(descriptor: int, size: int) -> None:
    try:
        with mmap.mmap(descriptor, size) as area:
            area.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: an older kernel
            raise
        for offset in range(0, size, len(_ZEROS)):
            os.pwrite(descriptor, _ZEROS[: min(len(_ZEROS), size - offset)], offset)


def tear(slot: Slot) -> None:
    """Make the content unreadable before the slot is written again. The seal goes first."""
    break_seal(slot.path)
    with open(slot.path, "r+b") as file:
        file.write(TORN)


def remove(path: Path) -> None:
    break_seal(path)
    path.unlink(missing_ok=True)
