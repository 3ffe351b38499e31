"""Reads a version as bytes of ranks' slots, wherever it is kept, and checks every byte."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tiercheck.plain_files import open_plain
from tiercheck.protocol.artifacts.contents import (
    DCP,
    FORMAT,
    WholeTensor,
    check_complete,
    contents,
    read_proof,
    unequal_names,
)
from tiercheck.protocol.artifacts.pieces import Box, Part, Piece, read_pieces
from tiercheck.protocol.artifacts.slot import PIECES, PROOF, SlotHeader, beginning, read_header
from tiercheck.protocol.plain_json import MOST_BYTES, parse_json
from tiercheck.protocol.version import Kind, Version, parse_version_name, version_name
from tiercheck_cli.failure import NOT_FOUND, USAGE, CannotDo

_MOST_CHUNK = 1024 * 1024 * 1024
"""Bytes. Larger than the chunks of any TierCheck writer, and limited because a few are kept in memory."""
_KEPT = 8
"""The number of verified chunks of a slot to keep, because adjacent ranges are often read next."""


@dataclass
class SavedArtifact:
    place: str
    size: int
    chunk: int
    fetch: Callable[[int, int], bytes | bytearray]
    """Returns a verified chunk by its number and length. Raises CannotDo."""

    def __post_init__(self) -> None:
        self._chunk = lru_cache(_KEPT)(self._fetched)
        if self.size <= 0 or not 0 < self.chunk <= _MOST_CHUNK:
            raise CannotDo(f"{self.place} cannot have {self.size} bytes in chunks of {self.chunk}")

    def read(self, begin: int, end: int) -> memoryview:
        """Returns the bytes as they were written. Raises CannotDo if that is not possible."""
        if end > self.size:
            raise CannotDo(f"{self.place} is cut off: it has {self.size} bytes, {end} are needed")
        first, last = begin // self.chunk, max(begin, end - 1) // self.chunk
        if first == last:
            return memoryview(self._chunk(first))[begin - first * self.chunk : end - first * self.chunk]
        found = bytearray(end - begin)
        for index in range(first, last + 1):
            start = index * self.chunk
            low, high = max(begin, start), min(end, start + self.chunk)
            found[low - begin : high - begin] = memoryview(self._chunk(index))[low - start : high - start]
        return memoryview(found)

    def _fetched(self, index: int) -> bytes | bytearray:
        return self.fetch(index, min(self.chunk, self.size - index * self.chunk))


@dataclass(frozen=True)
class Saved:
    """A complete version."""

    version: Version
    slots: tuple[SavedArtifact, ...]
    """The artifacts, by rank."""
    headers: tuple[SlotHeader, ...]
    tensors: Mapping[str, WholeTensor]
    """Tensors by name in the state (dcp) or of a `Checkpointer` (`model/...`, `optimizer0/...`)."""
    notes: tuple[Mapping[str, Any], ...]
    """The notes of `tiercheck.trainer.dcp.writer` by rank; empty if another writer saved the version."""
    unequal: tuple[str, ...] = ()
    """Names of tensors that differ between ranks; `tensors` has the lowest rank's."""

    @property
    def writer(self) -> str:
        """Returns `dcp`, `import`, or an empty string for a `Checkpointer`."""
        return self.headers[0].metadata.get(FORMAT, "")

    def entry(self, rank: int, name: str, length: str) -> bytes:
        """Returns the bytes of a non-tensor entry; metadata `length` has their number. Raises CannotDo."""
        header = self.headers[rank]
        try:
            begin, end = header.blob(name, length)
        except (KeyError, ValueError) as error:
            raise CannotDo(f"{self.slots[rank].place} has no {name}: {error}") from error
        return bytes(self.slots[rank].read(begin, end))

    @staticmethod
    def open(version: Version, slots: tuple[SavedArtifact, ...]) -> Saved:
        """Reads and checks the beginning of each slot. Raises CannotDo."""
        headers: list[SlotHeader] = []
        pieces: list[Mapping[str, Piece]] = []
        notes: list[Mapping[str, Any]] = []
        proofs: list[Mapping[str, int]] = []
        for rank, slot in enumerate(slots):
            try:
                end = beginning(slot.read(0, min(slot.size, slot.chunk)), slot.size)
                end = beginning(slot.read(0, end), slot.size)
                header = read_header(bytes(slot.read(0, end)), slot.size)
                place = header.tensor(PIECES)
                table = read_pieces(bytes(slot.read(place.begin, place.end))) if place is not None else {}
                place = header.tensor(PROOF)
                sums = read_proof(bytes(slot.read(place.begin, place.end))) if place is not None else []
            except (ValueError, struct.error) as error:
                raise CannotDo(f"{slot.place} cannot be read: {error}") from error
            if (header.rank, header.version, header.world_size, header.kind) != (
                rank,
                version,
                len(slots),
                Kind.SNAPSHOT,
            ):
                raise CannotDo(
                    f"{slot.place} holds {header.version} of rank {header.rank} of {header.world_size}"
                )
            headers.append(header)
            pieces.append(table)
            named = (each.name for each in header.tensors if each.name not in (PIECES, PROOF, "user"))
            proofs.append(dict(zip(named, sums, strict=False)))
        found = Saved(version, slots, tuple(headers), {}, ())
        names: list[Mapping[str, str]] = []
        if found.writer == DCP:
            for rank, header in enumerate(headers):
                note = _note(slots[rank].place, found.entry(rank, DCP, "dcp_length"))
                notes.append(note)
                called = note["names"]
                names.append(
                    {
                        each.name: called.get(each.name, each.name.removeprefix("dcp/"))
                        for each in header.tensors
                    }
                )
        try:
            tensors = contents(list(zip(headers, pieces, strict=True)), names)
            check_complete(tensors)
        except ValueError as error:
            raise CannotDo(f"{version} is not whole: {error}") from error
        unequal = tuple(unequal_names(zip(pieces, proofs, strict=True)))
        return Saved(version, slots, tuple(headers), tensors, tuple(notes), unequal)


def _note(place: str, text: bytes) -> Mapping[str, Any]:
    """Parses a note of `tiercheck.trainer.dcp.writer`. Raises CannotDo."""
    try:
        note = parse_json(text)
        names, items, planner = note["names"], note["bytes"], note["planner"]
        words = [*names.values(), *(fqn for fqn, _ in planner or ())]
        steps = [step for _, path in planner or () for step in path]
        if not all(type(word) is str for word in words) or not all(
            type(step) in (str, int) for step in steps
        ):
            raise ValueError("its names are no words")
        if not all(0 <= begin <= end for begin, end in items.values()):
            raise ValueError("its items have no places")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CannotDo(f"the note in {place} cannot be read: {error}") from error
    return dict(note)


def open_folder(folder: Path, step: int | None) -> Saved:
    """Opens the newest complete version of a `Checkpointer`'s folder, or that of `step`. Raises CannotDo."""
    held: dict[tuple[Version, int], int] = {}
    for path in folder.glob("rank-*-of-*/*.json"):
        try:
            key = parse_version_name(path.stem), int(path.parent.name.rpartition("-of-")[2])
        except ValueError:
            continue  # not ours
        held[key] = held.get(key, 0) + 1
    complete = [key for key, count in held.items() if count == key[1] and step in (None, key[0].step)]
    if not complete:
        steps = sorted({version.step for (version, world), count in held.items() if count == world})
        there = f"; there are {', '.join(map(str, steps))}" if steps else ""
        raise CannotDo(
            f"{folder} has no complete version{'' if step is None else f' of step {step}'}{there}", NOT_FOUND
        )
    version, world = max(complete)
    return Saved.open(version, tuple(_file(folder, rank, world, version) for rank in range(world)))


def _file(folder: Path, rank: int, world: int, version: Version) -> SavedArtifact:
    path = folder / f"rank-{rank}-of-{world}" / f"{version_name(version)}.safetensors"
    try:
        with open(open_plain(path.with_suffix(".json"), folder), "rb") as file:
            record = parse_json(file.read(MOST_BYTES + 1))
        size, chunk, sums = record["size"], record["chunk"], record["crc32"]
        if not all(type(each) is int and each > 0 for each in (size, chunk)) or len(sums) != -(
            -size // chunk
        ):
            raise ValueError("sizes and checksums do not belong together")
        with open(open_plain(path, folder), "rb") as file:
            held = file.seek(0, 2)
        if held < size:
            raise CannotDo(f"{path} is cut off: it has {held} bytes, {size} are needed")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CannotDo(f"{path.with_suffix('.json')} cannot be read: {error}") from error

    def fetch(index: int, length: int) -> bytes:
        try:
            with open(open_plain(path, folder), "rb") as file:
                file.seek(index * chunk)
                found = file.read(length)
        except OSError as error:
            raise CannotDo(f"{path} cannot be read: {error.strerror}") from error
        if len(found) != length or index >= len(sums) or zlib.crc32(found) != sums[index]:
            raise CannotDo(f"{path} is corrupt at byte {index * chunk}; export another --step")
        return found

    return SavedArtifact(str(path), size, chunk, fetch)


def check_new(folder: Path) -> None:
    """Raises CannotDo unless the folder does not exist or is empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CannotDo(f"{folder} is there already; give a new folder with --to", USAGE)


SLAB = 64 * 1024 * 1024
"""Bytes. The most held at once, unless one row has more."""


def slabs(tensor: WholeTensor, most: int = SLAB) -> Iterator[Box]:
    """Yields the tensor in row-major order, in boxes of whole rows of at most `most` bytes."""
    if not tensor.shape or tensor.size <= most:
        yield Box.whole(tensor.shape)
        return
    row = math.prod(tensor.shape[1:]) * tensor.itemsize
    rows = max(1, most // max(1, row))
    for first in range(0, tensor.shape[0], rows):
        yield Box(
            (first, *(0,) * (len(tensor.shape) - 1)), (min(rows, tensor.shape[0] - first), *tensor.shape[1:])
        )


def read_box(saved: Saved, tensor: WholeTensor, wanted: Box) -> bytearray:
    """Returns the elements of the box in row-major order. Raises CannotDo."""
    import numpy  # here, as most commands read no tensor

    size, kind = tensor.itemsize, f"V{tensor.itemsize}"
    filled = bytearray(wanted.count * size)
    target = numpy.ndarray(wanted.shape, kind, filled)
    for chunk, box in tensor.reads(wanted):
        ((first, last),) = Part(chunk.box, 0).ranges(box, most=0)
        near = saved.slots[chunk.rank].read(chunk.begin + first * size, chunk.begin + last * size)
        strides = [stride * size for stride in chunk.box.strides]
        target[box.within(wanted)] = numpy.ndarray(box.shape, kind, near, strides=strides)
    return filled
