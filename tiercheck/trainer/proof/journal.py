"""Records what each step of a rank gave, in a small file that outlives the process.

The next life of the rank compares the steps that it trains again with it (`resume`). A record has the place
`step % CAPACITY`, so a step that is made again replaces what the life before wrote. Writing is a copy into
mapped memory: no system call, no wait.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

CAPACITY = 4096
"""Records. A rank that trains more steps again compares the newest of them only."""
_HEADER = struct.Struct("<8sIIII")
_RECORD = struct.Struct("<Qd7I")
_CHECKED = struct.Struct("<I")
_MAGIC = b"TCJRNL01"
_PLACE = 64
_BYTES = _PLACE * (1 + CAPACITY)
_HAS_LOSS, _HAS_UPDATE = 1, 2


class StepRecord(NamedTuple):
    """One step. Fingerprints are CRC-32 checksums of 32 bits; equal ones say that the bytes were equal."""

    step: int
    loss: float | None
    """As it was given to `Checkpointer.step`; compared as 64 bits."""
    update: int | None
    """Fingerprint of a sample of the parameters after the update; None: not known (yet)."""
    generators: int
    """Fingerprint of torch's generators, those of the script's `state` included."""
    others: int
    """Fingerprint of the generators of Python and numpy."""
    position: int
    """Fingerprint of the plain numbers in the script's `state`, as far as they can be read without asking its
    objects."""
    hyper_parameters: int
    """Fingerprint of the numbers in the parameter groups."""
    drawn: int = 0
    """Where torch's generators stand: the CPU's in its block of 624 numbers (10 bits), the device's (22)."""


@dataclass(frozen=True)
class Header:
    """Which training the journal is of."""

    training: int
    """Fingerprint of the name of the training (`run`)."""
    world_size: int
    ended: int = 0
    """The step at which a life ended because its script had nothing left to do; 0: none did."""
    differed: int = 0
    """Number of the field that differed first at the newest resume (`resume.FIELDS`); 0: none did."""


class Journal:
    """The journal of one rank. Raises nothing after it was opened."""

    def __init__(self, path: Path, training: int, world_size: int) -> None:
        """Open the file at `path`, or begin it anew if it is of another training, or of another number of
        ranks. Raises OSError, ValueError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(file).st_size != _BYTES:
                os.ftruncate(file, 0)
                os.posix_fallocate(file, 0, _BYTES)  # a full disk is an error here, not a SIGBUS later
            self._memory = mmap.mmap(file, _BYTES)
        finally:
            os.close(file)
        self.other = ""
        """Why what an earlier life has written cannot be compared; empty: it can, if there is something."""
        found = self._read_header()
        if found is None or found.training != training:
            self._begin(Header(training, world_size))
        elif found.world_size != world_size:
            self._begin(Header(training, world_size))
            self.other = f"it was trained by {found.world_size} ranks, here are {world_size}"

    @property
    def header(self) -> Header:
        """Which training it is of, and how its lives ended."""
        return self._read_header() or Header(0, 0)

    def change_header(self, *, ended: int | None = None, differed: int | None = None) -> None:
        """Replace one of its values."""
        now = self.header
        self._write_header(
            Header(
                now.training,
                now.world_size,
                now.ended if ended is None else ended,
                now.differed if differed is None else differed,
            )
        )

    def write(self, record: StepRecord) -> None:
        """Replace what is known of its step."""
        flags = _HAS_LOSS * (record.loss is not None) | _HAS_UPDATE * (record.update is not None)
        loss = 0.0 if record.loss is None else record.loss
        packed = _RECORD.pack(record.step, loss, flags, record.update or 0, *record[3:])
        begin = _place_of(record.step)
        self._memory[begin : begin + _RECORD.size + _CHECKED.size] = packed + _checksum(packed)

    def read(self, step: int) -> StepRecord | None:
        """What is known of a step; None: nothing, or a process was killed while it wrote it."""
        begin = _place_of(step)
        packed = self._memory[begin : begin + _RECORD.size]
        if self._memory[begin + _RECORD.size : begin + _RECORD.size + _CHECKED.size] != _checksum(packed):
            return None
        found, loss, flags, update, *rest = _RECORD.unpack(packed)
        if found != step:
            return None
        return StepRecord(
            step, loss if flags & _HAS_LOSS else None, update if flags & _HAS_UPDATE else None, *rest
        )

    def after(self, step: int) -> Iterator[StepRecord]:
        """The records of the steps that follow `step` without a gap."""
        while (record := self.read(step := step + 1)) is not None:
            yield record

    def clear(self) -> None:
        """Begin anew: the training begins at its first step."""
        now = self.header
        self._begin(Header(now.training, now.world_size))

    def close(self) -> None:
        """Let go of the file."""
        self._memory.close()

    def _begin(self, header: Header) -> None:
        self._memory[:] = bytes(_BYTES)
        self._write_header(header)

    def _write_header(self, header: Header) -> None:
        packed = _HEADER.pack(_MAGIC, header.training, header.world_size, header.ended, header.differed)
        self._memory[: _HEADER.size + _CHECKED.size] = packed + _checksum(packed)

    def _read_header(self) -> Header | None:
        packed = self._memory[: _HEADER.size]
        if self._memory[_HEADER.size : _HEADER.size + _CHECKED.size] != _checksum(packed):
            return None
        magic, *values = _HEADER.unpack(packed)
        return Header(*values) if magic == _MAGIC else None


def _place_of(step: int) -> int:
    return _PLACE * (1 + step % CAPACITY)


def _checksum(packed: bytes) -> bytes:
    return _CHECKED.pack(zlib.crc32(packed))
