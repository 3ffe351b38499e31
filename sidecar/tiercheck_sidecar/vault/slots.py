"""One slot: a plain file of fixed size on the memory volume, its memory paid for by the sidecar.

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

from tiercheck.protocol.artifact import Kind, Share
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.slot import TORN
from tiercheck_sidecar.vault.seal import Seal, break_seal

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_ZEROS = bytes(1024 * 1024)


@dataclass(frozen=True)
class Pool:
    """Slots that can stand in for each other: those of one rank, or of one parity block, for one kind in one tier."""

    tier: Tier
    rank: int
    kind: Kind = Kind.SNAPSHOT
    share: Share | None = None

    @property
    def parts(self) -> int:
        """How many artifacts' digests a seal in this pool has."""
        return 1 + len(self.share.ranks) if self.share else 1


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
    """Bytes of the file. The artifact in it may be shorter."""
    pool: Pool
    state: SlotState = SlotState.ALLOCATING
    seal: Seal | None = None
    pins: int = 0
    doomed: bool = False
    """Free it as soon as nobody uses it."""
    attempt: int = field(default=0)
    step: int = field(default=0)
    _area: mmap.mmap | None = field(default=None, repr=False)

    @property
    def rank(self) -> int:
        return self.pool.rank

    @property
    def tier(self) -> Tier:
        return self.pool.tier

    @property
    def kind(self) -> Kind:
        return self.pool.kind

    @contextlib.contextmanager
    def mapped(self, write: bool = False, size: int | None = None) -> Iterator[memoryview]:
        """The slot's first `size` bytes, or all. Raises OSError; ValueError if it has fewer."""
        length = self.size if size is None else size
        area = self._lasting() if write else None
        if area is None:
            with open(self.path, "rb") as file:
                area = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ)
        view = memoryview(area)[:length]
        try:
            yield view
        finally:
            # A caller's slice may outlive the block by a frame of a traceback; the mapping then goes with it.
            with contextlib.suppress(BufferError):
                view.release()
                if not write:
                    area.close()

    def _lasting(self) -> mmap.mmap:
        """What the sidecar itself writes through: kept as long as the slot, because the faults of mapping a slot anew cost as
        much as receiving an artifact into it.
        """
        if self._area is None:
            with open(self.path, "r+b") as file:
                self._area = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_WRITE)
            with contextlib.suppress(OSError):
                self._area.madvise(_MADV_POPULATE_WRITE)
        return self._area


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


def blank(view: memoryview) -> None:
    """Fill with zeros."""
    for offset in range(0, len(view), len(_ZEROS)):
        end = min(offset + len(_ZEROS), len(view))
        view[offset:end] = _ZEROS[: end - offset]


def remove(path: Path) -> None:
    break_seal(path)
    path.unlink(missing_ok=True)
