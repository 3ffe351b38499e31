"""Plays a bucket under the real `RemoteStore`, and a memory volume under the real `Vault`.

What it does is recorded, so that the checker can say what existed when. One `Bucket` is the place; each
process has a `Folder` of it, through which its calls may fail or take their time.
"""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiercheck.protocol.artifacts.slot import TORN, NotASlot, SlotLayout, read_header
from tiercheck.protocol.version import Artifact
from tiercheck_sidecar.remote.errors import Reason, RemoteError, ignore
from tiercheck_sidecar.remote.objects import Arrived, Gate, Objects, Stored
from tiercheck_sidecar.vault import Seal, slots, vault
from tiercheck_sidecar.vault.slots import Pool, Slot, SlotState
from tiercheck_sidecar.vault.stock import fault

Record = Callable[..., None]


@dataclass
class Bucket:
    """What is stored, and how well the place feels."""

    record: Record
    clock: Callable[[], float]
    rng: random.Random
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    down: bool = False
    """Every call is answered with 503."""
    trouble: float = 0.0
    """The share of calls that fail; half of those that write have been carried out."""
    slow: float = 0.0
    """Seconds that a call takes at most."""
    behind: float = 0.0
    """Seconds by which lists may lag."""
    _gone: dict[str, tuple[bytes, float, float]] = field(default_factory=dict)

    def put(self, key: str, body: bytes) -> None:
        self.objects[key] = (body, self.clock())
        self.record("put", key=key, bytes=len(body), body=body if key.endswith(".json") else None)

    def remove(self, key: str) -> None:
        found = self.objects.pop(key, None)
        if found is not None:
            self._gone[key] = (*found, self.clock())
            self.record("removed", key=key)

    def list(self, prefix: str) -> list[Stored]:
        """New objects may be missing, and old ones still be there, if lists lag."""
        now = self.clock()
        late = now - (self.rng.uniform(0, self.behind) if self.behind else 0.0)
        there = [Stored(key, len(body), when) for key, (body, when) in self.objects.items() if when <= late]
        there += [
            Stored(key, len(body), when)
            for key, (body, when, gone) in self._gone.items()
            if gone > late >= when
        ]
        return [each for each in there if each.key.startswith(prefix)]


class Folder(Objects):
    """One process's way to the bucket. `wait` lets simulated time pass, and raises if the process is killed
    meanwhile."""

    def __init__(self, bucket: Bucket, wait: Callable[[float], None], cut: Callable[[], bool]) -> None:
        self._bucket, self._wait, self._cut = bucket, wait, cut
        self.location = "s3://simulated"

    def _call(self, change: Callable[[], object] | None = None) -> None:
        bucket = self._bucket
        if bucket.slow:
            self._wait(bucket.rng.uniform(0, bucket.slow))
        if bucket.down or self._cut():
            raise RemoteError(Reason.UNREACHABLE, "the bucket does not answer", retriable=True)
        if bucket.trouble and bucket.rng.random() < bucket.trouble:
            if change is not None and bucket.rng.random() < 0.5:
                change()
            raise RemoteError(Reason.UNREACHABLE, "503: slow down", retriable=True)

    def check(self) -> None:
        self._call()

    def upload(self, key: str, source: memoryview, chunk: int, gate: Gate) -> None:
        gate(0, source)
        body = bytes(source)
        self.write(key, body)

    def write(self, key: str, body: bytes) -> None:
        self._call(lambda: self._bucket.put(key, body))
        self._bucket.put(key, body)

    def create(self, key: str, body: bytes) -> bool:
        def attempt() -> bool:
            if key in self._bucket.objects:
                return False
            self._bucket.put(key, body)
            return True

        self._call(attempt)
        return attempt()

    def read(self, key: str) -> bytes | None:
        self._call()
        found = self._bucket.objects.get(key)
        return None if found is None else found[0]

    def read_into(self, key: str, offset: int, into: memoryview, arrived: Arrived = ignore) -> int:
        self._call()
        found = self._bucket.objects.get(key)
        if found is None:
            return 0
        part = found[0][offset : offset + len(into)]
        into[: len(part)] = part
        return len(part)

    def list(self, prefix: str) -> list[Stored]:
        self._call()
        return self._bucket.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        for key in list(keys):
            self._call(lambda key=key: self._bucket.remove(key))  # type: ignore[misc]
            self._bucket.remove(key)

    def forget_unfinished(self, dead: Callable[[str, float], bool]) -> None:
        self._call()


# Only what touches the file system is replaced: making, tearing, sealing and removing a slot's file, and
# taking inventory of what an earlier process left. Slots hold real slot headers and eight bytes of state,
# and every digest is computed.


@dataclass
class Volumes:
    """Every slot file and seal, by path. One simulation at a time has them."""

    files: dict[Path, memoryview] = field(default_factory=dict)
    seals: dict[Path, Seal] = field(default_factory=dict)
    full: set[Path] = field(default_factory=set)
    """Folders on which nothing new can be made now."""

    def create(self, path: Path, size: int, hands: int = 1) -> memoryview:
        if path.parent in self.full:
            raise OSError(errno.ENOSPC, "no space left on the memory volume")
        area = self.files[path] = memoryview(bytearray(size))
        return area

    def seal(self, path: Path, seal: Seal) -> None:
        if path.parent in self.full:
            raise OSError(errno.ENOSPC, "no space left on the memory volume")
        self.seals[path] = seal

    def remove(self, path: Path) -> None:
        self.seals.pop(path, None)
        self.files.pop(path, None)

    def tear(self, slot: Slot) -> None:
        self.seals.pop(slot.path, None)
        self.lasting(slot)[:8] = TORN

    def lasting(self, slot: Slot) -> memoryview:
        if slot.path not in self.files:
            raise OSError(errno.ENOENT, "the slot's file is gone")
        return self.files[slot.path]

    def inventory(self, folder: Path) -> list[Slot]:
        """As `take_inventory`: what is sealed and verified; everything else is removed."""
        kept = []
        for path in sorted(each for each in self.files if each.parent == folder):
            seal = self.seals.get(path)
            if seal is not None:
                pool = Pool(seal.tier, seal.rank, seal.kind, seal.share)
                slot = Slot(path, len(self.files[path]), pool, SlotState.SEALED, seal)
                if not fault(slot):
                    kept.append(slot)
                    continue
            self.remove(path)
        return kept

    def drop(self, folder: Path) -> None:
        """The pod is gone."""
        for path in [each for each in self.files if each.parent == folder]:
            self.remove(path)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[None]:
        """While it lasts, vaults work on these."""

        def lasting(slot: Slot) -> memoryview:  # a method, which a bound one would not become
            return self.lasting(slot)

        with in_place(
            (vault, "create", self.create),
            (vault, "remove", self.remove),
            (vault, "tear", self.tear),
            (vault, "write_seal", self.seal),
            (vault, "take_inventory", self.inventory),
            (vault, "touch_on_node", lambda *_: contextlib.nullcontext()),
            (slots, "break_seal", lambda path: self.seals.pop(path, None)),
            (Slot, "_lasting", lasting),
            (Slot, "adopt", lambda slot, area: None),
            (Slot, "unmap", lambda slot: None),
            (Slot, "is_whole", lambda slot: slot.path in self.files),
            (Path, "mkdir", lambda *_, **__: None),
            (Path, "chmod", lambda *_, **__: None),
        ):
            yield


@contextlib.contextmanager
def in_place(*what: tuple[Any, str, Any]) -> Iterator[None]:
    """Each name in its place is that thing for a while. As many `mock.patch.object`, which take longer than a
    short schedule's checks."""
    before = [(where, name, vars(where)[name]) for where, name, _ in what]
    for where, name, thing in what:
        setattr(where, name, thing)
    try:
        yield
    finally:
        for where, name, thing in reversed(before):
            setattr(where, name, thing)


_STATE = SlotLayout.plan([("state", "U8", (8,), 8)])
_STEP = SlotLayout.plan([("before", "U8", (8,), 8), ("after", "U8", (8,), 8)])
SNAPSHOT_BYTES, DELTA_BYTES = _STATE.size, _STEP.size


def write_snapshot(area: memoryview, name: Artifact, world: int, state: bytes) -> None:
    _write(area, _STATE, name, world, (state,))


def write_delta(area: memoryview, name: Artifact, world: int, before: bytes, after: bytes) -> None:
    _write(area, _STEP, name, world, (before, after))


def _write(
    area: memoryview, layout: SlotLayout, name: Artifact, world: int, parts: tuple[bytes, ...]
) -> None:
    header = layout.header(name.rank, name.version, world, {}, name.kind)
    area[8 : 8 + len(header)] = header
    for tensor, part in zip(layout.tensors, parts, strict=True):
        area[tensor.begin : tensor.end] = part
    area[:8] = layout.state_word


def read_snapshot(area: memoryview) -> bytes:
    """The state that lies in a snapshot's slot. Raises NotASlot."""
    return _part(area, 0)


def read_delta(area: memoryview) -> tuple[bytes, bytes]:
    """The state that a delta applies to, and the one that it leads to. Raises NotASlot."""
    return _part(area, 0), _part(area, 1)


def _part(area: memoryview, index: int) -> bytes:
    tensors = read_header(area).tensors
    if len(tensors) <= index:
        raise NotASlot("another kind of artifact")
    return bytes(area[tensors[index].begin : tensors[index].end])
