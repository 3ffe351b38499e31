"""Computes a parity block from its members' bytes, and rebuilds a lost member.

Local rank i of each member is coded together, in the group's order. Block 0 is the plain XOR. The blocks
after it are Reed-Solomon over GF(2^8): a Cauchy matrix, with columns scaled so that its first row is ones.
Scaling columns keeps every square part invertible, so any *n* losses are made good by any *n* blocks. Members
may differ in size; a shorter one counts as padded with zeros.

ISA-L is called by ctypes on our own buffers, because the Python interfaces to it copy every byte. The library
is the one that the package `pyeclib` brings along. ctypes releases the interpreter lock while it works.

Sources: Bloemer et al., "An XOR-based erasure-resilient coding scheme", ICSI TR-95-048 (Cauchy matrices);
https://github.com/intel/isa-l, `include/erasure_code.h` and `include/crc64.h`.
"""

from __future__ import annotations

import base64
import ctypes
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_PACKAGE = "pyeclib"
_FUNCTIONS = (
    "gf_mul",
    "gf_inv",
    "gf_gen_cauchy1_matrix",
    "gf_invert_matrix",
    "ec_init_tables",
    "ec_encode_data",
    "ec_encode_data_update",
)
_TABLE = 32
"""Bytes per coefficient."""


class LibraryMissing(RuntimeError):
    """The lack of ISA-L; the message names the package to install."""


class Isal:
    """The functions of ISA-L in use, over GF(2^8). Matrices are lists of rows."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        for name in _FUNCTIONS:
            getattr(self._library, name)
        self._encode, self._update = self._library.ec_encode_data, self._library.ec_encode_data_update
        self._crc64 = getattr(self._library, "crc64_rocksoft_refl", None)  # not every version has it
        if self._crc64 is not None:
            self._crc64.restype = ctypes.c_uint64
            self._crc64.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64]
        for name in ("gf_mul", "gf_inv"):
            function = getattr(self._library, name)
            function.restype, function.argtypes = (
                ctypes.c_ubyte,
                [ctypes.c_ubyte] * (2 if name == "gf_mul" else 1),
            )

    def multiply(self, one: int, other: int) -> int:
        return int(self._library.gf_mul(one, other))

    def inverse_of(self, value: int) -> int:
        return int(self._library.gf_inv(value))

    def cauchy(self, data: int, parity: int) -> list[list[int]]:
        """Returns `parity` rows of `data` coefficients, of which every square part can be inverted."""
        flat = (ctypes.c_ubyte * (data * (data + parity)))()
        self._library.gf_gen_cauchy1_matrix(flat, data + parity, data)
        return [list(flat[row * data : (row + 1) * data]) for row in range(data, data + parity)]

    def invert(self, matrix: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the inverse of a matrix. Raises ValueError if it cannot be inverted."""
        size = len(matrix)
        given = (ctypes.c_ubyte * (size * size))(*(value for row in matrix for value in row))
        found = (ctypes.c_ubyte * (size * size))()
        if self._library.gf_invert_matrix(given, found, size) != 0:
            raise ValueError("the matrix is singular")
        return [list(found[row * size : (row + 1) * size]) for row in range(size)]

    def combine(self, target: int, weights: tuple[int, ...], sources: tuple[int, ...], length: int) -> None:
        """Computes target = sum of weight * source, over `length` bytes; addresses as integers."""
        count = len(weights)
        self._encode(length, count, 1, self._tables(weights), _pointers(sources), _pointers((target,)))

    def add(self, target: int, weight: int, source: int, length: int) -> None:
        """Computes target += weight * source."""
        self._library.ec_encode_data_update(
            length, 1, 1, 0, self._tables((weight,)), ctypes.c_void_p(source), _pointers((target,))
        )

    def crc64nvme(self, view: memoryview | bytes) -> str:
        """Returns CRC-64/NVME as in the header `x-amz-checksum-crc64nvme`; empty if the library lacks it.
        Check value of "123456789": 0xAE8B14860A799888."""
        import numpy as np

        if self._crc64 is None:
            return ""
        data = np.frombuffer(view, np.uint8)  # an address for read-only memory as well, without a copy
        value: int = self._crc64(0, data.ctypes.data, data.nbytes)
        return base64.b64encode(value.to_bytes(8, "big")).decode()

    @functools.lru_cache(maxsize=1024)  # noqa: B019 - there is one instance
    def _tables(self, weights: tuple[int, ...]) -> ctypes.Array[ctypes.c_ubyte]:
        tables = (ctypes.c_ubyte * (_TABLE * len(weights)))()
        self._library.ec_init_tables(len(weights), 1, (ctypes.c_ubyte * len(weights))(*weights), tables)
        return tables


def _pointers(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(addresses))(*addresses)


def library() -> Isal:
    """Returns ISA-L. Raises LibraryMissing."""
    found = _load()
    if isinstance(found, str):
        raise LibraryMissing(found)
    return found


def is_here() -> bool:
    return isinstance(_load(), Isal)


@functools.cache
def _load() -> Isal | str:
    try:
        files = metadata.files(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.startswith("libisal") and ".so" in file.name:
            try:
                return Isal(str(file.locate()))
            except (OSError, AttributeError) as error:
                return f"ISA-L of the package {_PACKAGE} cannot be used: {error}"
    return (
        f"more than one parity block needs ISA-L, which the package {_PACKAGE} (1.8 or newer) brings; "
        "install it"
    )


MOST = 128
"""The limit of members and blocks of a group together."""
_FRAGMENT = 64 * 1024
"""Bytes that stay in the cache while XOR goes over several sources."""


class NotRecoverable(ValueError):
    """A group with fewer blocks left than members lost; the message gives both numbers."""


@functools.lru_cache(maxsize=1024)
def row(data: int, index: int) -> tuple[int, ...]:
    """Returns the coefficients of `data` members in block `index`.
    Raises ValueError if there is no such block, LibraryMissing if it is not the first and ISA-L is not here.
    """
    if not 0 < data + index < MOST:
        raise ValueError(f"a group of {data} members has no block {index}")
    if index == 0:
        return (1,) * data
    field = library()
    matrix = field.cauchy(data, index + 1)
    return tuple(
        field.multiply(matrix[index][each], field.inverse_of(matrix[0][each])) for each in range(data)
    )


def fold(block: memoryview, coefficient: int, piece: memoryview) -> None:
    """Computes block += coefficient * piece, in place. A second call with the same piece undoes it."""
    import numpy as np

    target, source = _bytes(block)[: len(piece)], _bytes(piece)
    if coefficient == 1:
        np.bitwise_xor(target, source, out=target)
    elif len(piece):
        library().add(_address(target), coefficient, _address(source), len(piece))


@dataclass(frozen=True)
class RebuildRecipe:
    """A lost member as a weighted sum of `members`, by coding order, and `blocks`, by index."""

    members: Mapping[int, int]
    blocks: Mapping[int, int]


def recipe(data: int, wanted: int, lost: Collection[int], blocks: Collection[int]) -> RebuildRecipe:
    """Returns how to rebuild member `wanted` when all of `lost` (itself among them) are missing.
    Uses the first of `blocks` that suffice, so XOR where it can. Raises NotRecoverable; LibraryMissing."""
    missing = sorted(lost)
    chosen = sorted(blocks)[: len(missing)]
    if len(chosen) < len(missing):
        raise NotRecoverable(
            f"{len(missing)} members of the group are lost and {len(chosen)} parity blocks are left"
        )
    rows = {index: row(data, index) for index in chosen}
    if chosen == [0]:
        weights = {0: 1}
    else:
        inverse = library().invert([[rows[index][member] for member in missing] for index in chosen])
        weights = dict(zip(chosen, inverse[missing.index(wanted)], strict=True))
    survivors = {
        member: _sum_of_products([(weight, rows[index][member]) for index, weight in weights.items()])
        for member in range(data)
        if member not in lost
    }
    return RebuildRecipe(survivors, weights)


def _sum_of_products(pairs: Sequence[tuple[int, int]]) -> int:
    total = 0
    for one, other in pairs:
        total ^= one * other if 1 in (one, other) else library().multiply(one, other)
    return total


def combine(target: memoryview, weights: Sequence[int], pieces: Sequence[memoryview]) -> None:
    """Computes target = sum of weight * piece, and writes each byte once.
    Bytes beyond the end of a piece count as zero."""
    out = _bytes(target)
    sources = [(weight, _bytes(piece)) for weight, piece in zip(weights, pieces, strict=True) if weight]
    begin = 0
    for end in sorted({*(min(len(source), len(out)) for _, source in sources), len(out)} - {0}):
        part = [(weight, source[begin:end]) for weight, source in sources if len(source) >= end]
        _combine(out[begin:end], [weight for weight, _ in part], [source for _, source in part])
        begin = end


class Adder:
    """Combines the same few buffers repeatedly, with their addresses looked up only once."""

    def __init__(self, target: memoryview, weights: Sequence[int], buffers: Sequence[memoryview]) -> None:
        self._target, self._weights, self._buffers = target, tuple(weights), tuple(buffers)
        self._start = _address(_bytes(target))
        self._addresses = tuple(_address(_bytes(buffer)) for buffer in buffers)

    def add(self, begin: int, length: int, filled: Sequence[int]) -> None:
        """Combines `length` bytes of the target from `begin` on.
        `filled`: how many bytes of each buffer count."""
        if min(filled) >= length and is_here():
            library().combine(self._start + begin, self._weights, self._addresses, length)
        else:
            pieces = [buffer[:count] for buffer, count in zip(self._buffers, filled, strict=True)]
            combine(self._target[begin : begin + length], self._weights, pieces)


def _combine(out: np.ndarray, weights: Sequence[int], sources: Sequence[np.ndarray]) -> None:
    if not sources:
        out[:] = 0
    elif is_here():
        addresses = tuple(_address(source) for source in sources)
        library().combine(_address(out), tuple(weights), addresses, len(out))
    elif set(weights) == {1}:
        _xor(out, sources)
    else:
        library()  # raises an error that names the package


def _xor(out: np.ndarray, sources: Sequence[np.ndarray]) -> None:
    import numpy as np

    for begin in range(0, len(out), _FRAGMENT):
        part = out[begin : begin + _FRAGMENT]
        np.copyto(part, sources[0][begin : begin + _FRAGMENT])
        for source in sources[1:]:
            np.bitwise_xor(part, source[begin : begin + _FRAGMENT], out=part)


def _bytes(view: memoryview) -> np.ndarray:
    import numpy as np

    return np.frombuffer(view, np.uint8)


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
