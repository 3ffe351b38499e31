"""Maps a slot, and shows its tensors as torch tensors over the same bytes."""

from __future__ import annotations

import functools
import logging
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercheck.failpoints import failpoint
from tiercheck.protocol.artifacts.contents import read_proof
from tiercheck.protocol.artifacts.mapping import map_aligned
from tiercheck.protocol.artifacts.pieces import Piece, read_pieces
from tiercheck.protocol.artifacts.slot import PIECES, PROOF, SlotHeader, SlotLayout, read_header
from tiercheck.protocol.artifacts.slot import Tensor as SlotTensor
from tiercheck.protocol.version import Kind, Version
from tiercheck.trainer.state.stored import StoredTensors
from tiercheck.trainer.tensors.accelerator import page_lock, release
from tiercheck.trainer.tensors.leaves import dtype_of

log = logging.getLogger("tiercheck")

USER_BLOB = "user"
USER_BYTES = "user_bytes"
DELTA_ROOM = "delta_room"
"""Of a snapshot: bytes that the slots for deltas had when it was taken, 0 if that was not known."""


def view_of(buffer: mmap.mmap | memoryview, tensor: SlotTensor) -> Tensor:
    """The tensor's bytes in the slot as a torch tensor, without a copy."""
    dtype = dtype_of(tensor.dtype)
    if tensor.begin == tensor.end:
        return torch.empty(tensor.shape, dtype=dtype, device="cpu")
    count = (tensor.end - tensor.begin) // dtype.itemsize
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=tensor.begin).view(tensor.shape)


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
        self._pinned: Sequence[int] = ()

    def is_current(self) -> bool:
        """Whether the path still names the mapped file."""
        try:
            return _identity(os.stat(self.path)) == self.identity
        except OSError:
            return False

    def begin(self, layout: SlotLayout) -> dict[str, Tensor]:
        """Mark the slot torn and return where each tensor of `layout` goes. Raises ValueError if it is too
        small."""
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
        """Write header, then the state word: from here on the slot is readable."""
        header = layout.header(rank, version, world_size, metadata, kind)
        self.buffer[8 : 8 + len(header)] = header
        failpoint("before-state-word")
        self.buffer[:8] = layout.state_word
        failpoint("after-state-word")

    def pin(self) -> None:
        """Page-lock the mapping, so that the GPU copies straight into it. Tried once; without it the copy is
        only slower."""
        if self._tried:
            return
        self._tried = True
        begin = torch.frombuffer(self.buffer, dtype=torch.uint8).data_ptr()
        self._pinned, why = page_lock(begin, len(self.buffer))
        if why:
            log.warning("slots are not page-locked, so copies from the GPU are slower: %s", why)

    @property
    def pinned(self) -> bool:
        """Whether all of it is page-locked."""
        return bool(self._pinned)

    def close(self) -> None:
        """Let the GPU forget a slot that is no more. The mapping goes when its last tensor does."""
        release(self._pinned)
        self._pinned = ()


class OpenSlots:
    """Slots that stay mapped from one artifact to the next, because mapping and page-locking take longer than
    copying."""

    def __init__(self) -> None:
        self._writers: dict[str, SlotWriter] = {}

    def open(self, path: str) -> SlotWriter:
        """The slot at `path`. Raises OSError or ValueError."""
        for known, writer in list(self._writers.items()):
            if not writer.is_current():
                del self._writers[known]
                writer.close()
        if path not in self._writers:
            self._writers[path] = SlotWriter(path)
        return self._writers[path]


def bytes_into(view: Tensor, content: bytes) -> None:
    """Write `content` at the beginning of `view`, a tensor of bytes."""
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
        """Raises OSError, or NotASlot if it is torn."""
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
        """All but the user blob and the table of pieces."""
        return self.stored

    @functools.cached_property
    def pieces(self) -> Mapping[str, Piece]:
        """What its tensors are of the whole, by name. Raises ValueError if the table is broken."""
        place = self.header.tensor(PIECES)
        return {} if place is None else read_pieces(self.buffer[place.begin : place.end])

    def proof(self) -> dict[str, int]:
        """A checksum of each tensor as it was at `step`, by name (`proof`); empty: it was saved without
        one.
        """
        place = self.header.tensor(PROOF)
        if place is None:
            return {}
        return dict(zip(self.stored, read_proof(self.buffer[place.begin : place.end]), strict=True))

    def user_blob_bytes(self) -> int:
        """The length of the user blob. Raises KeyError, ValueError."""
        begin, end = self.header.blob(USER_BLOB, USER_BYTES)
        return end - begin

    def user_blob(self) -> bytes:
        return self.blob(USER_BLOB, USER_BYTES)

    def blob(self, name: str, length: str) -> bytes:
        """The bytes stored as `name`, whose number the metadata tells as `length`. Raises KeyError,
        ValueError."""
        begin, end = self.header.blob(name, length)
        return self.buffer[begin:end]


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_size
