"""A slot is a safetensors file, so every dtype needs the name that this format gives it."""

from __future__ import annotations

import torch

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
# What the format has no name for, or torch not in every version. Only our own readers know the former.
_NAMES |= {
    dtype: name
    for attribute, name in (
        ("complex128", "C128"),
        ("complex32", "C32"),
        ("float8_e4m3fnuz", "F8_E4M3FNUZ"),
        ("float8_e5m2fnuz", "F8_E5M2FNUZ"),
        ("float8_e8m0fnu", "F8_E8M0"),
        ("float4_e2m1fn_x2", "F4_E2M1_X2"),
    )
    if (dtype := getattr(torch, attribute, None)) is not None
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Safetensors' name of `dtype`. Raises TypeError if the format has none."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise TypeError(f"tensors of {dtype} cannot be stored") from None


def dtype_of(name: str) -> torch.dtype:
    """Inverse of `dtype_name`. Raises TypeError if torch has no such dtype."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise TypeError(f"unknown dtype {name!r} in a slot") from None
