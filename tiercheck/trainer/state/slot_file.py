"""Maps a slot as torch tensors over the same bytes, and reads it straight into a state's memory.

Mapping a file costs a fault for every few pages, which takes longer than copying them; `preadv` has none, and
releases the interpreter lock. The mapping stays for what cannot be filled that way, and to look at shapes
without reading anything.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from tiercheck.failpoints import failpoint
from tiercheck.protocol.artifacts.contents import read_proof
from tiercheck.protocol.artifacts.pieces import Piece, read_pieces
from tiercheck.protocol.artifacts.slot import PIECES, PROOF, SlotHeader, SlotLayout, map_aligned, read_header
from tiercheck.protocol.artifacts.slot import Tensor as SlotTensor
from tiercheck.protocol.version import Kind, Version
from tiercheck.trainer.backends.backend import RestoreError, log
from tiercheck.trainer.state.user_state import unpack
from tiercheck.trainer.tensors.accelerator import Accelerator, Mark, accelerator_of, page_lock, release
from tiercheck.trainer.tensors.tensor_parts import NotCapturable, dtype_name, dtype_of, has_plain_bytes, write

_PIECE = 4 * 1024 * 1024
_MANY = 32 * 1024 * 1024
"""Bytes. Reads of at least this size use several threads."""
_THREADS = 4
_WINDOW = 64 * 1024 * 1024
"""Bytes. The size of each of the two windows through which a device is filled."""


class StoredTensors(dict[str, Tensor]):
    """The tensors of a slot by name, as views of its mapping; `read_into` is the fast way to read many."""

    def __init__(
        self, descriptor: int, size: int, views: Mapping[str, Tensor], offsets: Mapping[str, int]
    ) -> None:
        """Takes over `descriptor`, which is closed with this object. `size`: of the artifact."""
        super().__init__(views)
        self._descriptor, self._size, self._offsets = descriptor, size, offsets

    def __del__(self) -> None:
        os.close(self._descriptor)

    def ensure_whole(self) -> None:
        """Raises RestoreError if the file is too short."""
        found = os.fstat(self._descriptor).st_size
        if found < self._size:
            raise RestoreError(f"the checkpoint is cut off: {found} of {self._size} bytes are there")

    @torch.no_grad()
    def read_into(self, wanted: Sequence[tuple[str, Tensor]]) -> None:
        """Fills each tensor with what is stored under its name; shapes and dtypes must be the same.

        Raises RestoreError if bytes are missing or cannot be read: before anything is written, if the file is
        too short already.
        """
        self.ensure_whole()
        self._read([(target, self[name], self._offsets[name]) for name, target in wanted])

    @torch.no_grad()
    def read_parts(self, wanted: Sequence[tuple[str, int, Tensor]]) -> None:
        """Fills each tensor with stored elements of its name, in their order, from the given index on.

        Raises RestoreError if the bytes cannot be read; no others need to be there.
        """
        found = []
        for name, first, target in wanted:
            stored = self[name].view(-1)[first : first + target.numel()].view(target.shape)
            found.append((target, stored, self._offsets[name] + first * stored.element_size()))
        self._read(found)

    def _read(self, wanted: Sequence[tuple[Tensor, Tensor, int]]) -> None:
        """Fills tensors. `wanted`: the tensor, the stored one, and where its bytes are in the file."""
        pieces: list[tuple[memoryview, int]] = []
        on_device: dict[Accelerator, list[tuple[Tensor, int]]] = {}
        for target, stored, offset in wanted:
            device = accelerator_of([target])
            if not _is_plain(target, stored):
                write(target, stored)
            elif device is not None:
                on_device.setdefault(device, []).append((target.view(-1).view(torch.uint8), offset))
            else:
                # Changes nothing but torch's counter of changes.
                target.view(-1).view(torch.uint8)[:0].zero_()
                pieces += _pieces(target, offset)
        try:
            self._fill_all(pieces)
            for device, targets in on_device.items():
                self._lift(device, targets)
        except OSError as error:
            raise RestoreError(f"the checkpoint cannot be read: {error}") from error

    def _lift(self, device: Accelerator, wanted: Sequence[tuple[Tensor, int]]) -> None:
        """Fills a device through two page-locked windows: one is filled while the other is emptied.

        `wanted`: flat tensors of bytes to fill, and where these are in the file.
        """
        windows = [device.room(min(_WINDOW, sum(target.numel() for target, _ in wanted))) for _ in range(2)]
        marks: list[Mark] = []
        for window, batch in zip(cycle(windows), _batches(wanted, len(windows[0]))):
            if len(marks) == len(windows):
                marks.pop(0).synchronize()
            places = window[: sum(target.numel() for target, _ in batch)].split_with_sizes(
                [t.numel() for t, _ in batch]
            )
            self._fill_all(
                [p for place, (_, at) in zip(places, batch, strict=True) for p in _pieces(place, at)]
            )
            for place, (target, _) in zip(places, batch, strict=True):
                device.put(target, place)
            marks.append(device.final())
        for mark in marks:
            mark.synchronize()

    def _fill_all(self, pieces: Sequence[tuple[memoryview, int]]) -> None:
        threads = min(_THREADS, len(os.sched_getaffinity(0)))
        if threads > 1 and sum(len(view) for view, _ in pieces) >= _MANY:
            with ThreadPoolExecutor(threads, thread_name_prefix="tiercheck-read") as pool:
                list(pool.map(lambda piece: self._fill(*piece), pieces))
        else:
            for view, offset in pieces:
                self._fill(view, offset)

    def _fill(self, view: memoryview, offset: int) -> None:
        while view:
            count = os.preadv(self._descriptor, [view], offset)
            if count == 0:
                raise RestoreError(f"the checkpoint is cut off: nothing is at byte {offset} of {self._size}")
            view, offset = view[count:], offset + count


def _pieces(target: Tensor, offset: int) -> list[tuple[memoryview, int]]:
    """Returns the memory of a host tensor in pieces, each with where its content is in the file."""
    if not target.nbytes:
        return []
    memory = (ctypes.c_char * target.nbytes).from_address(target.data_ptr())
    view = memoryview(memory).cast("B")
    return [(view[at : at + _PIECE], offset + at) for at in range(0, target.nbytes, _PIECE)]


def _batches(wanted: Iterable[tuple[Tensor, int]], most: int) -> Iterator[list[tuple[Tensor, int]]]:
    """Yields the tensors in order, in batches of at most `most` bytes; larger ones are cut."""
    batch: list[tuple[Tensor, int]] = []
    left = most
    for target, offset in wanted:
        at = 0
        while at < target.numel():
            part = target[at : at + left]
            batch.append((part, offset + at))
            at += part.numel()
            left -= part.numel()
            if not left:
                yield batch
                batch, left = [], most
    if batch:
        yield batch


def _is_plain(target: Tensor, stored: Tensor) -> bool:
    """Returns whether the bytes of `target` in memory are exactly those of the file."""
    return (
        target.layout is torch.strided
        and has_plain_bytes(target)
        and (target.dtype, target.shape) == (stored.dtype, stored.shape)
    )


USER_BLOB = "user"
USER_BYTES = "user_bytes"
DELTA_ROOM = "delta_room"
"""The key of the bytes that the slots for deltas had when a snapshot was taken; 0: not known."""


def view_of(buffer: mmap.mmap | memoryview, tensor: SlotTensor) -> Tensor:
    """Returns the tensor's bytes in the slot as a torch tensor, without a copy."""
    dtype = dtype_of(tensor.dtype)
    if tensor.begin == tensor.end:
        return torch.empty(tensor.shape, dtype=dtype, device="cpu")
    count = (tensor.end - tensor.begin) // dtype.itemsize
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=tensor.begin).view(tensor.shape)


def plan_slot(
    before: Mapping[str, int], tensors: Iterable[tuple[str, Tensor]], after: Mapping[str, int]
) -> SlotLayout:
    """Lays out named tensors, with entries of so many bytes around them. Raises NotCapturable."""
    try:
        return SlotLayout.plan(
            [
                *((name, "U8", (size,), size) for name, size in before.items()),
                *((name, dtype_name(each.dtype), tuple(each.shape), each.nbytes) for name, each in tensors),
                *((name, "U8", (size,), size) for name, size in after.items()),
            ]
        )
    except (TypeError, ValueError) as error:
        raise NotCapturable(str(error)) from error


class SlotWriter:
    """One slot open for writing; the mapping is kept for as long as the file stays the same one."""

    def __init__(self, path: str) -> None:
        """Raises OSError, also for an empty file, which cannot be mapped."""
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            self.identity = _identity(found)
            self.buffer = map_aligned(descriptor, found.st_size)
        finally:
            os.close(descriptor)
        self._tried = False
        self.pinned: Sequence[int] = ()
        """The pieces that are page-locked; empty: the mapping is not."""

    def is_current(self) -> bool:
        """Returns whether the path still names the mapped file."""
        try:
            return _identity(os.stat(self.path)) == self.identity
        except OSError:
            return False

    def begin(self, layout: SlotLayout) -> dict[str, Tensor]:
        """Marks the slot torn, and returns where each tensor goes. Raises ValueError if it is too small."""
        if layout.size > len(self.buffer):
            raise ValueError(f"the slot has {len(self.buffer)} bytes, {layout.size} are needed")
        self.buffer[:8] = b"\0" * 8
        return {tensor.name: view_of(self.buffer, tensor) for tensor in layout.tensors}

    def finish(
        self,
        layout: SlotLayout,
        rank: int,
        version: Version,
        world_size: int,
        metadata: Mapping[str, str],
        *,
        kind: Kind = Kind.SNAPSHOT,
    ) -> None:
        """Writes the header, then the state word: from here on the slot is readable."""
        header = layout.header(rank, version, world_size, metadata, kind)
        self.buffer[8 : 8 + len(header)] = header
        failpoint("before-state-word")
        self.buffer[:8] = layout.state_word
        failpoint("after-state-word")

    def pin(self) -> None:
        """Page-locks the mapping for direct copies from the GPU. Tried once; else copies are slower."""
        if self._tried:
            return
        self._tried = True
        begin = torch.frombuffer(self.buffer, dtype=torch.uint8).data_ptr()
        self.pinned, why = page_lock(begin, len(self.buffer))
        if why:
            log.warning("slots are not page-locked, so copies from the GPU are slower: %s", why)

    def close(self) -> None:
        """Removes the page lock of a slot that is no more. The mapping ends with its last tensor."""
        release(self.pinned)
        self.pinned = ()


class OpenSlots:
    """Keeps slots mapped between artifacts: mapping and page-locking take longer than copying."""

    def __init__(self) -> None:
        self._writers: dict[str, SlotWriter] = {}

    def open(self, path: str) -> SlotWriter:
        """Returns the slot at `path`. Raises OSError or ValueError."""
        for known, writer in list(self._writers.items()):
            if not writer.is_current():
                del self._writers[known]
                writer.close()
        if path not in self._writers:
            self._writers[path] = SlotWriter(path)
        return self._writers[path]


def bytes_into(view: Tensor, content: bytes) -> None:
    """Writes `content` at the beginning of `view`, a tensor of bytes."""
    if content:
        view[: len(content)].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))


@dataclass(frozen=True)
class SlotReader:
    """A sealed slot, mapped privately: nothing done to its tensors reaches the file."""

    header: SlotHeader
    buffer: mmap.mmap
    stored: StoredTensors

    @staticmethod
    def open(path: str) -> SlotReader:
        """Opens the slot at `path`. Raises OSError, or NotASlot if it is torn."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            buffer = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
            with memoryview(buffer) as view:
                header = read_header(view)
            places = [tensor for tensor in header.tensors if tensor.name not in (USER_BLOB, PIECES, PROOF)]
            views = {tensor.name: view_of(buffer, tensor) for tensor in places}
        except BaseException:
            os.close(descriptor)
            raise
        begins = {tensor.name: tensor.begin for tensor in places}
        return SlotReader(header, buffer, StoredTensors(descriptor, header.size, views, begins))

    def tensors(self) -> StoredTensors:
        """Returns all tensors but the user blob, the table of pieces and the proof."""
        return self.stored

    @functools.cached_property
    def pieces(self) -> Mapping[str, Piece]:
        """Returns which part of the whole each tensor is. Raises ValueError if the table is broken."""
        place = self.header.tensor(PIECES)
        return {} if place is None else read_pieces(self.buffer[place.begin : place.end])

    def proof(self) -> dict[str, int]:
        """Returns each tensor's checksum as of `step`, by name (`proof`); empty: saved without one."""
        place = self.header.tensor(PROOF)
        if place is None:
            return {}
        return dict(zip(self.stored, read_proof(self.buffer[place.begin : place.end]), strict=True))

    def user_blob_bytes(self) -> int:
        """Returns the length of the user blob. Raises KeyError, ValueError."""
        begin, end = self.header.blob(USER_BLOB, USER_BYTES)
        return end - begin

    @functools.cached_property
    def content(self) -> dict[str, Any]:
        """Returns what the user blob holds. Raises KeyError, ValueError, NotCapturable."""
        return unpack(self.blob(USER_BLOB, USER_BYTES))

    def blob(self, name: str, length: str) -> bytes:
        """Returns the bytes of `name`; metadata `length` has their number. Raises KeyError, ValueError."""
        begin, end = self.header.blob(name, length)
        return self.buffer[begin:end]


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_size
