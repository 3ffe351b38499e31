"""ISA-L by ctypes on our own buffers, because the Python interfaces to it copy every byte.

The library is the one that the package `pyeclib` brings along. ctypes releases the interpreter lock while it
works.
Sources: https://github.com/intel/isa-l, `include/erasure_code.h` and `include/crc64.h`.
"""

from __future__ import annotations

import base64
import ctypes
import functools
from collections.abc import Sequence
from importlib import metadata

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
    """ISA-L is not here; the message names the package to install."""


class Isal:
    """The functions we need, over GF(2^8). Matrices are lists of rows."""

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
        """`parity` rows of `data` coefficients, every square part of which can be inverted."""
        flat = (ctypes.c_ubyte * (data * (data + parity)))()
        self._library.gf_gen_cauchy1_matrix(flat, data + parity, data)
        return [list(flat[row * data : (row + 1) * data]) for row in range(data, data + parity)]

    def invert(self, matrix: Sequence[Sequence[int]]) -> list[list[int]]:
        """Raises ValueError if it cannot be inverted."""
        size = len(matrix)
        given = (ctypes.c_ubyte * (size * size))(*(value for row in matrix for value in row))
        found = (ctypes.c_ubyte * (size * size))()
        if self._library.gf_invert_matrix(given, found, size) != 0:
            raise ValueError("the matrix is singular")
        return [list(found[row * size : (row + 1) * size]) for row in range(size)]

    def combine(self, target: int, weights: tuple[int, ...], sources: tuple[int, ...], length: int) -> None:
        """target = sum of weight * source, over `length` bytes; addresses as integers."""
        count = len(weights)
        self._encode(length, count, 1, self._tables(weights), _pointers(sources), _pointers((target,)))

    def add(self, target: int, weight: int, source: int, length: int) -> None:
        """target += weight * source."""
        self._library.ec_encode_data_update(
            length, 1, 1, 0, self._tables((weight,)), ctypes.c_void_p(source), _pointers((target,))
        )

    def crc64nvme(self, view: memoryview | bytes) -> str:
        """CRC-64/NVME as the header `x-amz-checksum-crc64nvme` carries it; empty if this version of the
        library has it not. Check value of "123456789": 0xAE8B14860A799888."""
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
    """Raises LibraryMissing."""
    found = _load()
    if isinstance(found, str):
        raise LibraryMissing(found)
    return found


def is_here() -> bool:
    """Whether ISA-L can be used."""
    return isinstance(_load(), Isal)


@functools.cache
def _load() -> Isal | str:
    """The library, or why there is none."""
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
