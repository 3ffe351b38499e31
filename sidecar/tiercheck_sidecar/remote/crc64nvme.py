"""CRC-64/NVME, which S3 servers compare on arrival: by ISA-L, so that it costs next to nothing.

The library is the one that the package `pyeclib` brings; ctypes releases the interpreter lock. In ISA-L the same polynomial is called
Rocksoft. Source: https://github.com/intel/isa-l, `include/crc64.h`; check value 0xAE8B14860A799888 for "123456789".
"""

from __future__ import annotations

import base64
import ctypes
import functools
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np

_NEEDED = frozenset(
    [
        "avx512f",
        "avx512vl",
        "avx512bw",
        "avx512cd",
        "avx512dq",
        "avx512ifma",
        "avx512vbmi",
        "avx512_vbmi2",
        "avx512_vnni",
        "avx512_bitalg",
        "avx512_vpopcntdq",
        "gfni",
        "vaes",
        "vpclmulqdq",
    ]
)
"""What ISA-L asks of a processor before it uses AVX-512 for this (AVX512_G1 and _G2), as Linux names it."""


def available() -> bool:
    """Whether the library is here and has the function."""
    return _function() is not None


def crc64nvme(view: memoryview | bytes, before: int = 0) -> int:
    """Of what had `before`, and then `view`. Raises RuntimeError if it is not `available`."""
    function = _function()
    if function is None:
        raise RuntimeError("CRC64NVME needs ISA-L, which the package pyeclib (1.8 or newer) brings; install it")
    data = np.frombuffer(view, dtype=np.uint8)  # an address for read-only memory as well, without a copy
    return int(function(before, data.ctypes.data, data.nbytes)) if data.nbytes else before


def header_value(view: memoryview | bytes) -> str:
    """As the header `x-amz-checksum-crc64nvme` carries it."""
    running = Running()
    running.update(view)
    return running.header_value()


class Running:
    """Of bytes that come piece by piece."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, piece: memoryview | bytes) -> None:
        """The next bytes. Raises RuntimeError if it is not `available`."""
        self._value = crc64nvme(piece, self._value)

    def header_value(self) -> str:
        """As the header `x-amz-checksum-crc64nvme` carries it."""
        return base64.b64encode(self._value.to_bytes(8, "big")).decode()


@functools.cache
def _function() -> Callable[[int, int, int], int] | None:
    try:
        files = metadata.files("pyeclib") or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name.startswith("libisal") and ".so" in file.name:
            try:
                library = ctypes.CDLL(str(file.locate()))
                usual = _typed(library.crc64_rocksoft_refl)
            except (OSError, AttributeError):
                continue
            return _wider(library, usual) or usual
    return None


def _wider(library: ctypes.CDLL, usual: Callable[[int, int, int], int]) -> Callable[[int, int, int], int] | None:
    """ISA-L's variant for AVX-512, at 1.7 times the speed: pyeclib's build has it and never chooses it (1.8.0, ISA-L 2.32)."""
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line.split() for line in file if line.startswith("flags")), [])
        wide = _typed(library.crc64_rocksoft_refl_by16_10)
    except (OSError, AttributeError):
        return None
    if not _NEEDED.issubset(flags):
        return None
    sample = np.arange(5003, dtype=np.uint32).view(np.uint8)
    lengths = (1, 15, 16, 255, 256, 257, 4095, sample.nbytes - 3)
    fits = all(wide(7, sample.ctypes.data + 3, n) == usual(7, sample.ctypes.data + 3, n) for n in lengths)
    return wide if fits else None


def _typed(function: Any) -> Callable[[int, int, int], int]:
    function.restype, function.argtypes = ctypes.c_uint64, [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64]
    typed: Callable[[int, int, int], int] = function
    return typed
