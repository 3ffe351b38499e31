"""Locates the parts of each whole tensor of a version in the ranks' slots.

It needs only the beginnings of the slots (header and table of pieces), so no tensor data is read or held
before it is needed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tiercheck.protocol.artifacts.pieces import Box, NotCovered, Part, Piece, cover
from tiercheck.protocol.artifacts.slot import ITEM_BYTES, PIECES, PROOF, SlotHeader

FORMAT = "format"
"""The key of a slot's metadata that names its writer; absent: a `Checkpointer`."""
DCP = "dcp"
"""Its value for a `StorageWriter` of torch.distributed.checkpoint (`tiercheck.dcp`).

Also the name of the entry with its note, JSON (`tiercheck.trainer.dcp.writer`)."""
IMPORT = "import"
"""Its value for a checkpoint of another tool that `tiercheck import` converted into one rank's slot."""
DCP_BYTES = "dcp_bytes"
"""The entry of a DCP slot for objects that are not tensors."""
DCP_PREFIX = "dcp/"
"""The prefix of the names of a DCP slot's tensors."""
_OTHER = frozenset({PIECES, PROOF, "user", DCP, DCP_BYTES})


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, stored row-major in bytes `begin` to `end` of the slot of `rank`."""

    rank: int
    box: Box
    begin: int
    end: int


@dataclass(frozen=True)
class WholeTensor:
    """A tensor and its chunks, which together hold all elements, some perhaps more than once.

    `dtype` is in safetensors' notation."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def itemsize(self) -> int:
        return next(
            ((chunk.end - chunk.begin) // chunk.box.count for chunk in self.chunks if chunk.box.count), 1
        )

    def reads(self, wanted: Box) -> list[tuple[Chunk, Box]]:
        """Returns the chunks and boxes to read to fill `wanted`, each element once. Raises NotCovered."""
        takes = cover(wanted, [(chunk, Piece(self.shape, chunk.box)) for chunk in self.chunks])
        return [(take.source, take.box) for take in takes]


def ranges_of(chunk: Chunk, box: Box, itemsize: int) -> list[tuple[int, int]]:
    """Returns the byte ranges of the slot with the elements of `box`, a box inside the chunk, in order."""
    return [
        (chunk.begin + first * itemsize, chunk.begin + last * itemsize)
        for first, last in Part(chunk.box, 0).ranges(box)
    ]


class Incomplete(ValueError):
    """The error for a tensor that has parts in no slot, or about which slots disagree; names the tensor."""


def contents(
    slots: Sequence[tuple[SlotHeader, Mapping[str, Piece]]], names: Sequence[Mapping[str, str]] = ()
) -> dict[str, WholeTensor]:
    """Returns all tensors by name, in the order of rank 0. Raises Incomplete.

    `names`: for each rank, the tensor names of entries that differ. A tensor without a piece, which each rank
    has for itself, is taken from the lowest rank that has it.
    """
    found: dict[str, WholeTensor] = {}
    for rank, (header, pieces) in enumerate(slots):
        for place in header.tensors:
            if place.name in _OTHER:
                continue
            piece = pieces.get(place.name)
            name = names[rank].get(place.name, place.name) if names else place.name
            before = found.get(name)
            if piece is None:
                if before is None:
                    box = Box.whole(place.shape)
                    found[name] = WholeTensor(
                        place.dtype, place.shape, (Chunk(rank, box, place.begin, place.end),)
                    )
                continue
            size = ITEM_BYTES[place.dtype]
            if piece.count * size != place.end - place.begin:
                raise Incomplete(
                    f"{name} of rank {rank} has {place.end - place.begin} bytes for {piece.count} elements"
                )
            chunks = tuple(
                Chunk(
                    rank,
                    part.box,
                    place.begin + part.at * size,
                    place.begin + (part.at + part.box.count) * size,
                )
                for part in piece.parts()
            )
            if not piece.box.count:  # a tensor without elements needs a chunk, too
                chunks = (Chunk(rank, piece.box, place.begin, place.begin),)
            if before is None:
                found[name] = WholeTensor(place.dtype, piece.shape, chunks)
                continue
            if (before.dtype, before.shape) != (place.dtype, piece.shape):
                raise Incomplete(
                    f"{name} is {before.shape} {before.dtype} at one rank, {piece.shape} {place.dtype} at "
                    f"rank {rank}"
                )
            known = {chunk.box for chunk in before.chunks}
            more = tuple(chunk for chunk in chunks if chunk.box not in known)
            found[name] = WholeTensor(before.dtype, before.shape, before.chunks + more)
    return found


def read_proof(written: bytes) -> list[int]:
    """Returns the checksums of a slot's tensors, in order, from its PROOF entry. Raises struct.error."""
    return [entry[0] for entry in struct.iter_unpack("<I", written)]


def unequal_names(ranks: Iterable[tuple[Mapping[str, Piece], Mapping[str, int]]]) -> list[str]:
    """Returns the names of tensors that should be equal on several ranks and are not.

    Equal should be the same part of a whole, and tensors without a piece under one name. `ranks`: the pieces
    and checksums of each."""
    seen: dict[tuple[str, Box | None], int] = {}
    found: dict[str, None] = {}
    for pieces, proof in ranks:
        for name, checksum in proof.items():
            piece = pieces.get(name)
            if seen.setdefault((name, None if piece is None else piece.box), checksum) != checksum:
                found[name] = None
    return list(found)


def check_complete(tensors: Mapping[str, WholeTensor]) -> None:
    """Raises Incomplete unless every element of every tensor is in some slot."""
    for name, tensor in tensors.items():
        try:
            tensor.reads(Box.whole(tensor.shape))
        except NotCovered as error:
            raise Incomplete(f"{name}: {error}") from error
