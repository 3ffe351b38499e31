"""Manages a slot: a plain file of fixed size on the memory volume, allocated by the sidecar.

It is not `multiprocessing.shared_memory`, because those segments vanish with their creator. The file is
pre-faulted here, because first touch is several times slower than reuse, and the memory is charged to the
process that touches it first.

Faulting page by page takes longer than filling a slot. tmpfs uses small pages unless the host is configured
otherwise, which a pod cannot do. But a process may ask for its own mapping to be collapsed (`MADV_COLLAPSE`,
Linux 6.1; see madvise(2) and the kernel's admin-guide/mm/transhuge), unless the host's setting is "deny".
Measured: a tenth of the time of `fallocate` and pre-faulting. What is not collapsed stays in small pages.

Memory lies on the NUMA node of the thread that touches it first, so that thread runs there meanwhile:
otherwise eight devices would write through one socket. Setting the node (`set_mempolicy`) is forbidden in a
restricted pod: container runtimes ask for CAP_SYS_NICE.

Each error's message is a sentence about why the vault could not do what was asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from tiercheck.plain_files import create_plain, open_plain
from tiercheck.protocol.artifacts.slot import TORN, NotASlot, huge_page, libc, map_aligned
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Artifact, Kind, Share, Version
from tiercheck_sidecar.vault.seal import Seal, break_seal, header_fault

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_MADV_COLLAPSE = 25
_SPAN = 64 * 1024 * 1024
"""Bytes per madvise call; each call has to reach every core once."""


def populate(view: memoryview, begin: int = 0, hands: int = 1) -> None:
    """Faults in a mapping of `map_aligned` from `begin` on, in `hands` threads.

    Raises OSError; EINVAL on kernels before 5.14."""
    start = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
    begin -= begin % mmap.PAGESIZE

    def fault_in(at: int) -> None:
        _advise(start + at, min(_SPAN, len(view) - at), _MADV_POPULATE_WRITE)

    with ThreadPoolExecutor(hands) as pool:
        list(pool.map(fault_in, range(begin, len(view), _SPAN)))


def collapse(descriptor: int, view: memoryview, hands: int = 1) -> int:
    """Gives an empty file huge pages, in `hands` threads; `view` is all of it.

    Returns how many of its bytes, from its beginning, have them. Raises OSError if the volume is full."""
    huge = huge_page()
    if not huge:
        return 0
    start = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
    end, span = len(view) // huge * huge, max(_SPAN, huge)
    refused = threading.Event()

    def collapse_span(begin: int) -> bool:
        if refused.is_set():
            return False
        length = min(span, end - begin)
        for offset in range(begin, begin + length, huge):
            os.pwrite(descriptor, b"\0", offset)  # an extent without any page is taken for a hole
        try:
            _advise(start + begin, length, _MADV_COLLAPSE)
        except OSError:  # memory is too fragmented, or the host or the kernel does not allow it
            refused.set()
        return not refused.is_set()

    with ThreadPoolExecutor(hands) as pool:
        done = list(pool.map(collapse_span, range(0, end, span)))
    return min(end, span * (*done, False).index(False))


def _advise(address: int, length: int, advice: int) -> None:
    if libc().madvise(address, length, advice):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


_BEHIND = 10
"""The nice value that gives about a tenth of the CPU time of a normal busy thread."""


def lower_priority() -> None:
    """Lowers this thread's priority below that of this process's others."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BEHIND)


_NODES = Path("/sys/devices/system/node")


@contextlib.contextmanager
def touch_on_node(node: int) -> Iterator[None]:
    """Places memory that this thread touches first on that node; no effect for -1 or if not allowed."""
    before = os.sched_getaffinity(0)
    there = _processors(node) & before
    if not there:
        yield
        return
    os.sched_setaffinity(0, there)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _processors(node: int) -> set[int]:
    try:
        listed = (_NODES / f"node{node}" / "cpulist").read_text().strip()
        spans = [part.partition("-") for part in listed.split(",") if part]
        return {each for first, _, last in spans for each in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):
        return set()


_ZEROS = bytes(1024 * 1024)


@dataclass(frozen=True)
class Pool:
    """Interchangeable slots: those of one rank, or of one parity block, for one kind in one tier."""

    tier: Tier
    rank: int
    kind: Kind = Kind.SNAPSHOT
    share: Share | None = None

    @property
    def parts(self) -> int:
        """Returns the number of artifacts that a seal in this pool has digests of."""
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
    """The state of a slot. Only the vault changes it, under its lock, except for the bytes themselves."""

    path: Path
    size: int
    """Bytes of the file. The artifact in it may be shorter."""
    pool: Pool
    state: SlotState = SlotState.ALLOCATING
    seal: Seal | None = None
    pins: int = 0
    doomed: bool = False
    """True if it is to be freed as soon as it is not in use."""
    version: Version = field(default=Version(0, 0))
    """The version of what is being written, until it is sealed."""
    _area: memoryview | None = field(default=None, repr=False)
    _identity: tuple[int, int] = field(default=(0, 0), repr=False)

    @property
    def rank(self) -> int:
        return self.pool.rank

    @property
    def tier(self) -> Tier:
        return self.pool.tier

    @property
    def kind(self) -> Kind:
        return self.pool.kind

    @property
    def artifact(self) -> Artifact:
        """Returns the artifact that is, or will be, in it; the first one of a parity block."""
        return Artifact(self.rank, self.seal.version if self.seal else self.version, self.kind)

    @contextlib.contextmanager
    def mapped(self, write: bool = False, size: int | None = None) -> Iterator[memoryview]:
        """Yields the first `size` bytes, or all. Raises OSError, also if the file is too short."""
        area = self._lasting()
        whole = area[: self.size if size is None else size]
        view = whole if write else whole.toreadonly()
        try:
            yield view
        finally:
            # A caller's slice may outlive the block by a frame of a traceback.
            with contextlib.suppress(BufferError):
                view.release()
                whole.release()

    def is_whole(self) -> bool:
        """Returns whether the file has at least the slot's size. Raises OSError."""
        return self.path.lstat().st_size >= self.size

    def adopt(self, area: memoryview) -> None:
        """Keeps the mapping through which the slot was created."""
        self._area, self._identity = area, identity(os.lstat(self.path))

    def unmap(self) -> None:
        """Releases the memory of a removed slot; while the slot is read, its memory stays."""
        area, self._area = self._area, None
        if area is not None:
            with contextlib.suppress(BufferError):
                area.release()

    def _lasting(self) -> memoryview:
        """Returns a mapping that lasts as long as the slot.

        The faults of mapping it anew cost as much as receiving an artifact into it, and three times as much
        as digesting one. It must map the file that a trainer would open, in full length: touching what was
        cut off is a SIGBUS. A symlink in its place is not followed: it could point to where the trainer
        itself cannot write.
        """
        status = os.lstat(self.path)
        if status.st_size < self.size:
            raise OSError(errno.EIO, f"it is {status.st_size} bytes long, {self.size} were made")
        if self._area is None or self._identity != identity(status):
            file = open_plain(self.path, write=True)
            try:
                self._identity = identity(os.fstat(file))
                self._area = map_aligned(file, self.size)
            finally:
                os.close(file)
            with contextlib.suppress(OSError):
                populate(self._area)
        return self._area


def identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def create(path: Path, size: int, hands: int = 1) -> memoryview:
    """Creates, pre-faults (in `hands` threads) and maps a slot file.

    Raises OSError (ENOSPC if the volume is full); then there is no file."""
    descriptor = create_plain(path)
    try:
        os.fchmod(descriptor, 0o666)  # the trainer may run as another user of the same pod
        os.ftruncate(descriptor, size)
        area = map_aligned(descriptor, size)
        huge = collapse(descriptor, area, hands)
        os.posix_fallocate(descriptor, 0, size)  # fails with ENOSPC here rather than SIGBUS at first touch
        _touch(area, descriptor, huge, hands)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return area


def _touch(area: memoryview, descriptor: int, begin: int, hands: int) -> None:
    size = len(area)
    if begin == size:
        return
    try:
        populate(area, begin, hands)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: an older kernel
            raise
        for offset in range(begin, size, len(_ZEROS)):
            os.pwrite(descriptor, _ZEROS[: min(len(_ZEROS), size - offset)], offset)


def tear(slot: Slot) -> None:
    """Makes the content unreadable before the slot is written again. The seal is removed first."""
    break_seal(slot.path)
    file = open_plain(slot.path, write=True)
    try:
        os.pwrite(file, TORN, 0)
    finally:
        os.close(file)


def blank(view: memoryview) -> None:
    for offset in range(0, len(view), len(_ZEROS)):
        end = min(offset + len(_ZEROS), len(view))
        view[offset:end] = _ZEROS[: end - offset]


def remove(path: Path) -> None:
    break_seal(path)
    path.unlink(missing_ok=True)


class NoFreeSlot(Exception):
    """Every slot that could be used is in use. Try again later."""


class NoDeltas(NoFreeSlot):
    """There are no delta slots, and none are planned."""


class MemoryTooSmall(Exception):
    """The memory volume cannot hold the fewest slots that saving needs; the message names what to set."""


class NotHeld(LookupError):
    """No such verified artifact is here."""


class SlotDraft:
    """A slot being filled with verified chunks through `view`, which is zeroed first for parity."""

    def __init__(
        self, slot: Slot, seal: Seal, keep: Callable[[Slot, Seal], None], drop: Callable[[Slot], None]
    ) -> None:
        self.seal = seal
        self._slot, self._keep, self._drop = slot, keep, drop
        self._over = False
        self._stack = contextlib.ExitStack()
        self.view = self._stack.enter_context(slot.mapped(write=True, size=seal.digests.size))
        if seal.share is not None:
            blank(self.view)

    @property
    def path(self) -> Path:
        """Returns the path of the slot's file, for writing through a descriptor."""
        return self._slot.path

    def keep(self, seal: Seal | None = None) -> None:
        """Seals the slot, of which the caller has verified every chunk.

        `seal` is given if it was not known before, as a parity block's digests. Raises NotASlot if a whole
        artifact is not what it claims to be, OSError; then the slot is given back."""
        final = seal or self.seal
        reason = header_fault(self.view, final) if final.share is None else ""
        if reason:
            self.release()
            raise NotASlot(reason)
        self._stack.close()
        try:
            self._keep(self._slot, final)
        except BaseException:
            self.release()
            raise
        self.seal, self._over = final, True

    def release(self) -> None:
        """Gives the slot back. Harmless after `keep`."""
        if self._over:
            return
        self._over = True
        self._stack.close()
        self._drop(self._slot)
