"""Lays out a slot, a safetensors file with its length word as state word, and maps it to memory.

A safetensors file begins with the length of its JSON header (8 bytes, little endian). That word is written
last: while it is zero the slot is *torn*, and no safetensors reader takes it for a checkpoint. The header is
padded so that data begins on a page, and has a fixed size for a given set of tensors, so a slot never grows.

A slot is mapped at an address aligned for its huge pages. Elsewhere a huge page is mapped as hundreds of
small ones, which makes touching or page-locking a slot that much slower.

Format: https://huggingface.co/docs/safetensors (8-byte length, JSON header, data; `__metadata__` holds
  strings).
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import mmap
import os
import re
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tiercheck.protocol.plain_json import MOST_VALUES, MOST_WHOLE, parse_json
from tiercheck.protocol.version import Kind, Version

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_HUGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def map_aligned(descriptor: int, size: int) -> memoryview:
    """Maps a file's first `size` bytes for reading and writing, aligned for huge pages. Raises OSError.

    The mapping lasts as long as any view of it."""
    huge = huge_page() or mmap.PAGESIZE
    length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    room = _map(None, length + huge, 0, nothing, -1)
    begin = -(-room // huge) * huge
    try:
        _map(begin, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    except OSError:
        libc().munmap(room, length + huge)
        raise
    if begin > room:
        libc().munmap(room, begin - room)
    if begin + length < room + length + huge:
        libc().munmap(begin + length, room + huge - begin)
    area = (ctypes.c_ubyte * size).from_address(begin)
    unmapping = weakref.finalize(area, libc().munmap, begin, length)
    unmapping.atexit = False  # other threads may still write when the interpreter ends
    return memoryview(area).cast("B")


@functools.cache
def huge_page() -> int:
    """Returns the bytes of a huge page; 0 if this kernel has none."""
    try:
        return int(_HUGE.read_text())
    except (OSError, ValueError):
        return 0


@functools.cache
def libc() -> ctypes.CDLL:
    """Returns libc with typed memory-mapping calls, and errors in `ctypes.get_errno`."""
    loaded = ctypes.CDLL(None, use_errno=True)
    loaded.mmap.restype = ctypes.c_void_p
    number = ctypes.c_int
    loaded.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long]
    loaded.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    loaded.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number]
    return loaded


def _map(address: int | None, length: int, protection: int, flags: int, descriptor: int) -> int:
    found = libc().mmap(address, length, protection, flags, descriptor, 0)
    if found is None or found == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)


PAGE = 4096
TORN = b"\0" * 8
"""The state word of a slot that is being written."""

PIECES = "pieces"
"""The entry before all tensors: a JSON table of the part that each is of its whole tensor.

See `docs/design/016-every-way-people-train.md`."""

PROOF = "proof"
"""The entry with checksums of samples of the live state, one for each following tensor, in order.

See `tiercheck.trainer.proof.proof`."""

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
    "F4_E2M1_X2": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "C32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8, "C128": 16,
}  # fmt: skip
"""Bytes of an element, by dtype name in a slot."""

MOST_DIMENSIONS = 64
_MAX_HEADER = 48 * 1024 * 1024
_COUNT = re.compile(r"[0-9]{1,20}", re.ASCII)


class NotASlot(ValueError):
    """The error for bytes that are torn, truncated or no safetensors header; the message gives the reason."""


@dataclass(frozen=True)
class Tensor:
    """A tensor in a slot. `dtype` is safetensors' notation; `begin`, `end` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class SlotHeader:
    """The parsed header of a sealed slot."""

    rank: int
    version: Version
    world_size: int
    metadata: Mapping[str, str]
    tensors: tuple[Tensor, ...]
    size: int
    """Bytes of the artifact. The file of a delta slot may be longer: its deltas differ in size."""
    kind: Kind = Kind.SNAPSHOT

    def tensor(self, name: str) -> Tensor | None:
        return next((tensor for tensor in self.tensors if tensor.name == name), None)

    def blob(self, name: str, length: str) -> tuple[int, int]:
        """Returns the begin and end (exclusive) of the used bytes of entry `name`.

        `length`: the metadata key of their number. Raises KeyError if either is missing, ValueError if there
        are more than the entry has.
        """
        place = self.tensor(name)
        if place is None:
            raise KeyError(name)
        used = _count(self.metadata[length])
        if used > place.end - place.begin:
            raise ValueError(f"{name} has {place.end - place.begin} bytes, not {used}")
        return place.begin, place.begin + used


@dataclass(frozen=True)
class SlotLayout:
    """The place of each tensor, for a fixed list of (name, safetensors dtype, shape, bytes).

    Every tensor begins on a 64-byte boundary; the gaps are declared as padding tensors, because the format
    allows no holes.
    """

    tensors: tuple[Tensor, ...]
    data_begin: int
    size: int
    _declared: tuple[tuple[str, str, tuple[int, ...], int, int], ...]

    @staticmethod
    def plan(entries: Sequence[tuple[str, str, tuple[int, ...], int]]) -> SlotLayout:
        """Lays out `entries` in order. Raises ValueError for a repeated name, or more than is readable."""
        names = [name for name, *_ in entries]
        if len(set(names)) != len(names):
            raise ValueError("tensor names in a slot must be unique")
        if sum(_VALUES + 3 * len(shape) for _, _, shape, _ in entries) > MOST_VALUES:
            raise ValueError(f"{len(names)} tensors are more than a slot can name")
        declared: list[tuple[str, str, tuple[int, ...], int, int]] = []
        offset = 0
        for name, dtype, shape, nbytes in entries:
            gap = -offset % 64
            if gap:
                declared.append((f"__pad{offset}", "U8", (gap,), offset, offset + gap))
                offset += gap
            declared.append((name, dtype, tuple(shape), offset, offset + nbytes))
            offset += nbytes
        room = len(
            _header_json(declared, {key: "9" * 20 for key in ("attempt", "rank", "step", "world_size")})
        )
        data_begin = -(-(8 + room + _METADATA_ROOM) // PAGE) * PAGE
        if data_begin - 8 > _MAX_HEADER:
            raise ValueError(f"the names of {len(names)} tensors are longer than a slot's header may be")
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
        """Returns the bytes from the state word to the data. Raises ValueError if `metadata` is too long."""
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
        """Returns the part of the header that is the same for every artifact of this layout."""
        entries = _ENCODER.encode(_table_of(self._declared)).encode()[1:]
        return entries if entries == b"}" else b"," + entries

    @property
    def state_word(self) -> bytes:
        """Returns the word that makes the slot readable; write it last."""
        return struct.pack("<Q", self.data_begin - 8)


_ENCODER = json.JSONEncoder(separators=(",", ":"))
_METADATA_ROOM = 1024
_VALUES = 16
"""The most JSON values per tensor in the header with padding and the table of pieces.

Each dimension adds three."""


def _header_json(
    declared: Sequence[tuple[str, str, tuple[int, ...], int, int]], metadata: Mapping[str, str]
) -> bytes:
    table: dict[str, object] = {"__metadata__": dict(metadata), **_table_of(declared)}
    return _ENCODER.encode(table).encode()


def _table_of(declared: Sequence[tuple[str, str, tuple[int, ...], int, int]]) -> dict[str, object]:
    return {
        name: {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        for name, dtype, shape, begin, end in declared
    }


def beginning(view: memoryview | bytes, size: int | None = None) -> int:
    """Returns the bytes of a slot up to the end of its table of pieces. Raises NotASlot.

    If `view` is shorter than the header, returns the bytes of the header; call again with that many. `size`:
    bytes of the whole artifact, if known; a larger result raises NotASlot."""
    header = 8 + _header_length(view)
    if header > len(view):
        end = header
    else:
        tensors = _parse(view, header)[1]
        end = next((tensor.end for tensor in tensors if tensor.name == PIECES), header)
    if size is not None and end > size:
        raise NotASlot(f"truncated: {size} of {end} bytes")
    return end


def read_header(view: memoryview | bytes, size: int | None = None) -> SlotHeader:
    """Parses the header of a slot from its first bytes (`view` must reach at least to the data).

    The header is untrusted: tensors must have known dtypes, fill their places exactly, and follow each other
    without holes, as the format demands. `size` is the length of the whole file if `view` is only its
    beginning. Raises NotASlot.
    """
    total = len(view) if size is None else size
    header = 8 + _header_length(view)
    if header > len(view):
        raise NotASlot(f"header length {header - 8} does not fit into {len(view)} bytes")
    metadata, tensors = _parse(view, header)
    end = max((tensor.end for tensor in tensors), default=header)
    try:
        found = SlotHeader(
            rank=_count(metadata.pop("rank")),
            version=Version(step=_count(metadata.pop("step")), attempt=_count(metadata.pop("attempt"))),
            world_size=_count(metadata.pop("world_size")),
            kind=Kind(metadata.pop("kind", Kind.SNAPSHOT.value)),
            metadata=metadata,
            tensors=tuple(tensor for tensor in tensors if not tensor.name.startswith("__pad")),
            size=end,
        )
    except (KeyError, ValueError) as error:
        raise NotASlot(f"no slot header: {error}") from error
    if end > total:
        raise NotASlot(f"truncated: {total} of {end} bytes")
    return found


def read_tensors(read: Callable[[int], bytes], size: int) -> list[Tensor]:
    """Returns the tensors of any safetensors file of `size` bytes. Raises NotASlot.

    `read(n)` returns the next n bytes of the file."""
    word = read(8)
    header = 8 + _header_length(word)
    if header > size:
        raise NotASlot(f"cut off: it has {size} bytes, its header alone {header}")
    tensors = _parse(word + read(header - 8), header)[1]
    end = max((tensor.end for tensor in tensors), default=header)
    if end > size:
        raise NotASlot(f"cut off: it has {size} bytes, {end} are needed")
    return tensors


def _header_length(view: memoryview | bytes) -> int:
    if len(view) < 8:
        raise NotASlot("shorter than its state word")
    (length,) = struct.unpack("<Q", bytes(view[:8]))
    if length == 0:
        raise NotASlot("torn: the writer did not finish")
    if length > _MAX_HEADER:
        raise NotASlot(f"header length {length} is more than the {_MAX_HEADER} bytes that any slot has")
    return int(length)


def _parse(view: memoryview | bytes, base: int) -> tuple[dict[str, str], list[Tensor]]:
    """Parses metadata and all entries, padding too, of the header before byte `base`. Raises NotASlot."""
    try:
        if len(view) < base:
            raise ValueError("it has no end")
        table = parse_json(bytes(view[8:base]), _MAX_HEADER)
        if not isinstance(table, dict):
            raise ValueError("it is no object")
        metadata = table.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata is not of strings")
        tensors = [_tensor(name, entry, base) for name, entry in table.items()]
    except (KeyError, TypeError, ValueError) as error:
        raise NotASlot(f"no slot header: {error}") from error
    expected = base
    for tensor in sorted(tensors, key=lambda each: (each.begin, each.end)):
        if tensor.begin != expected:
            raise NotASlot(
                f"no slot header: {tensor.name!r} begins at byte {tensor.begin}, where {expected} is next"
            )
        expected = tensor.end
    return metadata, tensors


def _tensor(name: str, entry: Any, base: int) -> Tensor:
    """Parses an entry of the header. Raises KeyError, TypeError, ValueError."""
    dtype, shape = entry["dtype"], entry["shape"]
    begin, end = entry["data_offsets"]
    if not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"{name!r} has no shape")
    for number in (*shape, begin, end):
        if type(number) is not int or number < 0:
            raise ValueError(f"{name!r} has no place")
    if dtype not in ITEM_BYTES or end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"{name!r} is not {shape} of {dtype} in bytes {begin} to {end}")
    return Tensor(name, dtype, tuple(shape), base + begin, base + end)


def _count(text: str) -> int:
    """Parses a 64-bit whole number, as `SlotLayout.header` writes it. Raises ValueError."""
    if not _COUNT.fullmatch(text) or int(text) > MOST_WHOLE:
        raise ValueError(f"{text[:40]!r} is no count")
    return int(text)
