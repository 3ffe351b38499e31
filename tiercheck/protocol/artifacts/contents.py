"""Finds where the parts of each whole tensor of a version lie in the ranks' slots.

Pure: made from the beginnings of the slots (header and table of pieces), so nothing of the tensors has to be
read, or held, before it is wanted.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tiercheck.protocol.artifacts.pieces import Box, NotCovered, Part, Piece, cover
from tiercheck.protocol.artifacts.slot import ITEM_BYTES, PIECES, PROOF, SlotHeader

FORMAT = "format"
"""Key of a slot's metadata that says who wrote it; absent: a `Checkpointer`."""
DCP = "dcp"
"""Value of it: a `StorageWriter` of torch.distributed.checkpoint (`tiercheck.dcp`). Also the entry with its
note, JSON (`tiercheck.trainer.dcp.writer`)."""
IMPORT = "import"
"""Value of it: made by `tiercheck import` of what other tools wrote, as one rank's."""
DCP_BYTES = "dcp_bytes"
"""Entry of such a slot: what is no tensor."""
DCP_PREFIX = "dcp/"
"""Begins the names of its tensors."""
_OTHER = frozenset({PIECES, PROOF, "user", DCP, DCP_BYTES})


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, row-major in bytes `begin` to `end` of the slot of `rank`."""

    rank: int
    box: Box
    begin: int
    end: int


@dataclass(frozen=True)
class WholeTensor:
    """`dtype` is safetensors' spelling. Several chunks may hold the same elements; together they hold all."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return next(
            ((chunk.end - chunk.begin) // chunk.box.count for chunk in self.chunks if chunk.box.count), 1
        )

    def reads(self, wanted: Box) -> list[tuple[Chunk, Box]]:
        """Which boxes to take out of which chunks to fill `wanted`, each element once. Raises NotCovered."""
        takes = cover(wanted, [(chunk, Piece(self.shape, chunk.box)) for chunk in self.chunks])
        return [(take.source, take.box) for take in takes]


def ranges_of(chunk: Chunk, box: Box, itemsize: int) -> list[tuple[int, int]]:
    """Bytes of the slot in which the elements of `box`, a box inside the chunk, lie, in order."""
    return [
        (chunk.begin + first * itemsize, chunk.begin + last * itemsize)
        for first, last in Part(chunk.box, 0).ranges(box)
    ]


class Incomplete(ValueError):
    """Parts of a tensor are in no slot, or slots disagree about it; the message names it."""


def contents(
    slots: Sequence[tuple[SlotHeader, Mapping[str, Piece]]], names: Sequence[Mapping[str, str]] = ()
) -> dict[str, WholeTensor]:
    """All tensors by name, in the order of rank 0. `names`: for each rank, what an entry is called if not by
    its own name.

    A tensor that is a rank's own affair is that of the lowest rank that has it. Raises Incomplete.
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
            if not piece.box.count:  # a tensor without elements is somewhere, too
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
    """The checksums of a slot's tensors, in their order, out of its entry PROOF. Raises struct.error."""
    return [entry[0] for entry in struct.iter_unpack("<I", written)]


def unequal_names(ranks: Iterable[tuple[Mapping[str, Piece], Mapping[str, int]]]) -> list[str]:
    """The names of tensors of which ranks hold other bits where they should hold the same: the same part of a
    whole, or each its own under one name. `ranks`: the pieces and checksums of each."""
    seen: dict[tuple[str, Box | None], int] = {}
    found: dict[str, None] = {}
    for pieces, proof in ranks:
        for name, checksum in proof.items():
            piece = pieces.get(name)
            if seen.setdefault((name, None if piece is None else piece.box), checksum) != checksum:
                found[name] = None
    return list(found)


def check_complete(tensors: Mapping[str, WholeTensor]) -> None:
    """Raises Incomplete unless all elements of all tensors are somewhere."""
    for name, tensor in tensors.items():
        try:
            tensor.reads(Box.whole(tensor.shape))
        except NotCovered as error:
            raise Incomplete(f"{name}: {error}") from error
