"""One slot: a plain file of fixed size on the memory volume, paid for by the sidecar.

Never `multiprocessing.shared_memory`, whose segments vanish with their creator. The file is pre-faulted here,
because first touch is several times slower than reuse and its memory is charged to whoever touches first.

Paying page by page takes longer than filling a slot. tmpfs hands out small pages unless the host is set up
otherwise, which a pod cannot do. But a process may ask for its own mapping to be collapsed (`MADV_COLLAPSE`,
Linux 6.1; see madvise(2) and the kernel's admin-guide/mm/transhuge), unless the host says "deny". Measured: a
tenth of the time of `fallocate` and pre-faulting. Whatever is not given stays in small pages.

Eight devices would else write through one socket. Memory lies where the thread runs that touches it first, so
that thread runs there meanwhile. To say where it shall lie (`set_mempolicy`) is forbidden in a restricted
pod: container runtimes ask for CAP_SYS_NICE.

Each error's message says in a sentence why the vault could not do what was asked.
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
"""Bytes that are asked for in one call, of which each has to reach every core once."""


def populate(view: memoryview, begin: int = 0, hands: int = 1) -> None:
    """Fault in what `map_aligned` gave, from `begin` on, in that many threads. Raises OSError; EINVAL on
    kernels before 5.14."""
    start = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
    begin -= begin % mmap.PAGESIZE

    def fault_in(at: int) -> None:
        _advise(start + at, min(_SPAN, len(view) - at), _MADV_POPULATE_WRITE)

    with ThreadPoolExecutor(hands) as pool:
        list(pool.map(fault_in, range(begin, len(view), _SPAN)))


def collapse(descriptor: int, view: memoryview, hands: int = 1) -> int:
    """Give an empty file huge pages, in that many threads; `view` is all of it. Returns how many of its bytes
    have got them, from its beginning. Raises OSError if the volume is full.
    """
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
        except OSError:  # memory is too fragmented, the host forbids it, or the kernel does not know it
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
"""Nice value: about a tenth of what others get where they want all."""


def step_back() -> None:
    """This thread runs behind this process's others from now on."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BEHIND)


_NODES = Path("/sys/devices/system/node")


@contextlib.contextmanager
def touch_on_node(node: int) -> Iterator[None]:
    """What this thread touches for the first time meanwhile lies on that node. Without effect for -1, and
    where this process may not run."""
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
    """Slots that can stand in for each other: those of one rank, or of one parity block, for one kind in one
    tier."""

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
    """The vault changes it, under its lock, except for the bytes themselves."""

    path: Path
    size: int
    """Bytes of the file. The artifact in it may be shorter."""
    pool: Pool
    state: SlotState = SlotState.ALLOCATING
    seal: Seal | None = None
    pins: int = 0
    doomed: bool = False
    """Free it as soon as nobody uses it."""
    version: Version = field(default=Version(0, 0))
    """Of what is being written, until it is sealed."""
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
        """What is, or shall be, in it; of a parity block: the first."""
        return Artifact(self.rank, self.seal.version if self.seal else self.version, self.kind)

    @contextlib.contextmanager
    def mapped(self, write: bool = False, size: int | None = None) -> Iterator[memoryview]:
        """The slot's first `size` bytes, or all. Raises OSError, also if the file has become shorter than the
        slot."""
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
        """Whether the file is as long as it was made. Raises OSError."""
        return self.path.lstat().st_size >= self.size

    def adopt(self, area: memoryview) -> None:
        """Keep the mapping that the slot was made through."""
        self._area, self._identity = area, _identity(os.lstat(self.path))

    def unmap(self) -> None:
        """Let the memory of a removed slot go; one that is still read keeps it until then."""
        area, self._area = self._area, None
        if area is not None:
            with contextlib.suppress(BufferError):
                area.release()

    def _lasting(self) -> memoryview:
        """One mapping for as long as the slot: the faults of mapping it anew cost as much as receiving an
        artifact into it, and three times as much as digesting one.

        What is mapped must be the file that a trainer would open, and all there: touching what was cut off is
        a SIGBUS. A link in its place is not followed: it may lead to where the trainer itself cannot write.
        """
        status = os.lstat(self.path)
        if status.st_size < self.size:
            raise OSError(errno.EIO, f"it is {status.st_size} bytes long, {self.size} were made")
        if self._area is None or self._identity != _identity(status):
            file = open_plain(self.path, write=True)
            try:
                self._identity = _identity(os.fstat(file))
                self._area = map_aligned(file, self.size)
            finally:
                os.close(file)
            with contextlib.suppress(OSError):
                populate(self._area)
        return self._area


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def create(path: Path, size: int, hands: int = 1) -> memoryview:
    """Create and pre-fault a slot file in that many threads, and map it. Raises OSError (ENOSPC if the volume
    is full); then there is no file."""
    descriptor = create_plain(path)
    try:
        os.fchmod(descriptor, 0o666)  # the trainer may run as another user of the same pod
        os.ftruncate(descriptor, size)
        area = map_aligned(descriptor, size)
        huge = collapse(descriptor, area, hands)
        os.posix_fallocate(descriptor, 0, size)  # says ENOSPC here rather than SIGBUS at first touch
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
    """Make the content unreadable before the slot is written again. The seal goes first."""
    break_seal(slot.path)
    file = open_plain(slot.path, write=True)
    try:
        os.pwrite(file, TORN, 0)
    finally:
        os.close(file)


def blank(view: memoryview) -> None:
    """Fill with zeros."""
    for offset in range(0, len(view), len(_ZEROS)):
        end = min(offset + len(_ZEROS), len(view))
        view[offset:end] = _ZEROS[: end - offset]


def remove(path: Path) -> None:
    break_seal(path)
    path.unlink(missing_ok=True)


class NoFreeSlot(Exception):
    """Every slot that could be used is in use. Try again later."""


class NoDeltas(NoFreeSlot):
    """There are no delta slots, nor will there be for now."""


class MemoryTooSmall(Exception):
    """The memory volume cannot hold the fewest slots that saving needs; the message says what to set."""


class NotHeld(LookupError):
    """No such verified artifact is here."""


class SlotDraft:
    """`view` is the artifact's bytes, to be written chunk by verified chunk; all zero at first for a parity
    block."""

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
        """The slot's file, for those who write through a descriptor."""
        return self._slot.path

    def keep(self, seal: Seal | None = None) -> None:
        """The caller has verified every chunk: seal it, as `seal` if that is known only now (a parity block's
        digests are). Raises NotASlot if a whole artifact is not what it claims to be, OSError; then the slot
        is given back.
        """
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
        """Give the slot back. Harmless after `keep`."""
        if self._over:
            return
        self._over = True
        self._stack.close()
        self._drop(self._slot)
