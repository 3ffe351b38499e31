"""Computes CRC-64/NVME by ISA-L, to recognise the parts that an earlier upload left.

The library is the one that the package `pyeclib` brings; there the polynomial is called Rocksoft.
Source: https://github.com/intel/isa-l, `include/crc64.h`; check value 0xAE8B14860A799888 for "123456789".
"""

from __future__ import annotations

import base64
import ctypes
import functools
from importlib import metadata
from typing import Any

import numpy as np


def available() -> bool:
    """Whether the library is here and has the function."""
    return _function() is not None


def header_value(view: memoryview | bytes) -> str:
    """As the header `x-amz-checksum-crc64nvme` carries it. Only if it is `available`."""
    data = np.frombuffer(view, dtype=np.uint8)  # an address for read-only memory as well, without a copy
    return base64.b64encode(int(_function()(0, data.ctypes.data, data.nbytes)).to_bytes(8, "big")).decode()


@functools.cache
def _function() -> Any:
    try:
        files = metadata.files("pyeclib") or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name.startswith("libisal") and ".so" in file.name:
            try:
                function = ctypes.CDLL(str(file.locate())).crc64_rocksoft_refl
            except (OSError, AttributeError):
                continue
            function.restype = ctypes.c_uint64
            function.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64]
            return function
    return None
