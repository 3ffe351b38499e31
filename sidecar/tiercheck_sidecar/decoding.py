"""Decodes the protocol's messages and files strictly, from any thread.

Sealed files have a checksum, which reveals any changed bit.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, TypeVar

from msgspec.json import Decoder, Encoder

from tiercheck.plain_files import open_plain
from tiercheck.protocol.local import REQUESTS, NamedRequest, Request
from tiercheck.protocol.plain_json import MOST_BYTES, Malformed, decode_with
from tiercheck_sidecar.digest import digest_chunk

__all__ = ["Malformed", "decode", "decode_request", "encode", "read_checked", "with_checksum"]

T = TypeVar("T")

_decoders: dict[type, Decoder[Any]] = {}
_making = threading.Lock()
_encoder = Encoder()


def decode(
    text: bytes | bytearray | str, cls: type[T], most: int = MOST_BYTES, most_values: int | None = None
) -> T:
    """Decodes at most `most` bytes and `most_values` values. Raises Malformed, and nothing else."""
    decoder = _decoders.get(cls)
    if decoder is None:
        # msgspec plans a class, and those in its fields, on first use. A second thread that meets a plan half
        # made ends the process by SIGSEGV (seen with 0.22), so `msgspec.json.decode(type=...)` is not for
        # threads.
        with _making:
            decoder = _decoders.setdefault(cls, Decoder(cls))
    found: T = decode_with(decoder.decode, text, most, most_values)
    return found


def encode(value: object) -> bytes:
    """Encodes as `to_json` does, an order of magnitude faster."""
    return _encoder.encode(value)


def decode_request(text: bytes) -> Request | NamedRequest:
    """Returns the request of a rank; its name alone if a newer library sent it. Raises Malformed."""
    named = decode(text, NamedRequest)
    kind = REQUESTS.get(named.op)
    return named if kind is None else decode(text, kind)


def with_checksum(text: bytes) -> bytes:
    """Returns the content of a file of `text` that `read_checked` reads."""
    return text + _end_of(text)


def read_checked(path: Path, cls: type[T], most: int = MOST_BYTES) -> T:
    """Reads a file made by `with_checksum`.
    Raises Malformed if it is none, or any bit of it has changed; OSError."""
    with open(open_plain(path), "rb") as reader:
        content = reader.read(most + 1)
    text = content[: -len(_end_of(b""))]
    if content != with_checksum(text):
        raise Malformed(f"{path} is not as it was written")
    return decode(text, cls, most)


def _end_of(text: bytes) -> bytes:
    return f"\n{digest_chunk(text)}\n".encode()
