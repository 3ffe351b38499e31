"""The layout of a slot: a plain safetensors file whose length word doubles as the state word.

A safetensors file begins with the length of its JSON header (8 bytes, little endian). That word is the last thing
written: while it is zero the slot is *torn* and no reader, ours or anybody's, takes it for a checkpoint. The header
is padded so that data begins on a page and has a fixed size for a given set of tensors, so a slot never has to grow.

Format: https://huggingface.co/docs/safetensors (8-byte length, JSON header, data; `__metadata__` holds strings).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tiercheck.protocol.artifact import Kind
from tiercheck.protocol.version import Version

PAGE = 4096
TORN = b"\0" * 8
"""The state word of a slot that is being written."""

PIECES = "pieces"
"""The table of pieces, JSON, before all tensors: what each is of the whole (`docs/design/016-every-way-people-train.md`)."""

PROOF = "proof"
"""Checksums of samples of the live state (`tiercheck.trainer.proof`), one for each tensor that follows, in their order."""

_MAX_HEADER = 100 * 1024 * 1024  # what the safetensors library itself accepts


class NotASlot(ValueError):
    """The bytes are torn, truncated or no safetensors header; the message says which."""


@dataclass(frozen=True)
class Tensor:
    """One tensor in a slot. `dtype` is safetensors' spelling; `begin`/`end` are byte offsets from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class SlotHeader:
    """What a sealed slot says about itself."""

    rank: int
    version: Version
    world_size: int
    metadata: Mapping[str, str]
    tensors: tuple[Tensor, ...]
    size: int
    """Bytes of the artifact. The file of a delta slot may be longer: its deltas differ in size."""
    kind: Kind = Kind.SNAPSHOT


@dataclass(frozen=True)
class SlotLayout:
    """Where each tensor lies, for a fixed list of (name, safetensors dtype, shape, bytes).

    Every tensor begins on a 64-byte boundary; the gaps are declared as padding tensors, because the format allows
    no holes.
    """

    tensors: tuple[Tensor, ...]
    data_begin: int
    size: int
    _declared: tuple[tuple[str, str, tuple[int, ...], int, int], ...]

    @staticmethod
    def plan(entries: Sequence[tuple[str, str, tuple[int, ...], int]]) -> SlotLayout:
        """Lay out `entries` in order. Raises ValueError on a repeated name."""
        names = [name for name, *_ in entries]
        if len(set(names)) != len(names):
            raise ValueError("tensor names in a slot must be unique")
        declared: list[tuple[str, str, tuple[int, ...], int, int]] = []
        offset = 0
        for name, dtype, shape, nbytes in entries:
            gap = -offset % 64
            if gap:
                declared.append((f"__pad{offset}", "U8", (gap,), offset, offset + gap))
                offset += gap
            declared.append((name, dtype, tuple(shape), offset, offset + nbytes))
            offset += nbytes
        room = len(_header_json(declared, {key: "9" * 20 for key in ("attempt", "rank", "step", "world_size")}))
        data_begin = -(-(8 + room + _METADATA_ROOM) // PAGE) * PAGE
        tensors = tuple(
            Tensor(name, dtype, shape, data_begin + begin, data_begin + end)
            for name, dtype, shape, begin, end in declared
            if not name.startswith("__pad")
        )
        return SlotLayout(tensors, data_begin, data_begin + offset, tuple(declared))

    def header(
        self,
        rank: int,
        version: Version,
        world_size: int,
        metadata: Mapping[str, str],
        kind: Kind = Kind.SNAPSHOT,
    ) -> bytes:
        """The bytes that follow the state word, exactly up to the data. Raises ValueError if `metadata` is too long."""
        about = {
            "rank": str(rank),
            "step": str(version.step),
            "attempt": str(version.attempt),
            "world_size": str(world_size),
            "kind": kind.value,
            **metadata,
        }
        text = _header_json([], about)[:-1] + self._table
        room = self.data_begin - 8
        if len(text) > room:
            raise ValueError(f"slot metadata is {len(text) - room} bytes too long")
        return text + b" " * (room - len(text))

    @cached_property
    def _table(self) -> bytes:
        """The part of the header that is the same for every artifact of this layout."""
        entries = json.dumps(_table_of(self._declared), separators=(",", ":")).encode()[1:]
        return entries if entries == b"}" else b"," + entries

    @property
    def state_word(self) -> bytes:
        """The word that makes the slot readable; write it last."""
        return struct.pack("<Q", self.data_begin - 8)


_METADATA_ROOM = 1024


def _header_json(declared: Sequence[tuple[str, str, tuple[int, ...], int, int]], metadata: Mapping[str, str]) -> bytes:
    table: dict[str, object] = {"__metadata__": dict(metadata), **_table_of(declared)}
    return json.dumps(table, separators=(",", ":")).encode()


def _table_of(declared: Sequence[tuple[str, str, tuple[int, ...], int, int]]) -> dict[str, object]:
    return {
        name: {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        for name, dtype, shape, begin, end in declared
    }


def beginning(view: memoryview | bytes) -> int:
    """Bytes of a slot from its start to the end of its table of pieces; those of its header if `view` does not reach that far, so
    that the caller can ask again with more. Raises NotASlot.
    """
    (length,) = struct.unpack("<Q", bytes(view[:8]))
    if not 0 < length <= _MAX_HEADER:
        raise NotASlot("torn, or no slot")
    if 8 + length > len(view):
        return int(8 + length)
    try:
        table = json.loads(bytes(view[8 : 8 + length]))
        pieces = int(table[PIECES]["data_offsets"][1]) if PIECES in table else 0
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NotASlot(f"no slot header: {error}") from error
    return int(8 + length) + pieces


def read_header(view: memoryview | bytes, size: int | None = None) -> SlotHeader:
    """Parse the header of a slot from its first bytes (`view` must reach at least to the data).

    `size` is the length of the whole file if `view` is only its beginning. Raises NotASlot.
    """
    total = len(view) if size is None else size
    if len(view) < 8:
        raise NotASlot("shorter than its state word")
    (length,) = struct.unpack("<Q", bytes(view[:8]))
    if length == 0:
        raise NotASlot("torn: the writer did not finish")
    if length > _MAX_HEADER or 8 + length > len(view):
        raise NotASlot(f"header length {length} does not fit into {len(view)} bytes")
    try:
        table = json.loads(bytes(view[8 : 8 + length]))
        metadata = dict(table.pop("__metadata__"))
        base = 8 + length
        tensors = tuple(
            Tensor(
                name,
                entry["dtype"],
                tuple(entry["shape"]),
                base + entry["data_offsets"][0],
                base + entry["data_offsets"][1],
            )
            for name, entry in table.items()
            if not name.startswith("__pad")
        )
        end = base + max((entry["data_offsets"][1] for entry in table.values()), default=0)
        header = SlotHeader(
            rank=int(metadata.pop("rank")),
            version=Version(step=int(metadata.pop("step")), attempt=int(metadata.pop("attempt"))),
            world_size=int(metadata.pop("world_size")),
            kind=Kind(metadata.pop("kind", Kind.SNAPSHOT.value)),
            metadata=metadata,
            tensors=tensors,
            size=end,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NotASlot(f"no slot header: {error}") from error
    if end > total:
        raise NotASlot(f"truncated: {total} of {end} bytes")
    return header
