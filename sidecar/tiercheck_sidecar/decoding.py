"""Decodes the protocol's messages and files strictly, from any thread.

Sealed files tell whether a bit of them has changed. Trainers write into the same folders, so only plain
files are opened: whoever opens a FIFO waits for its writer, for ever, and a link leads anywhere.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path
from typing import Any, TypeVar

from msgspec.json import Decoder, Encoder

from tiercheck.protocol.plain_json import MOST_BYTES, Malformed, decode_with
from tiercheck.protocol.requests import REQUESTS, NamedRequest, Request
from tiercheck_sidecar.digest import digest_chunk

__all__ = ["Malformed", "decode", "decode_request", "encode", "read_checked", "with_checksum"]

T = TypeVar("T")

_decoders: dict[type, Decoder[Any]] = {}
_making = threading.Lock()
_encoder = Encoder()


def decode(
    text: bytes | bytearray | str, cls: type[T], most: int = MOST_BYTES, most_values: int | None = None
) -> T:
    """The text has at most `most` bytes, and so many values. Raises Malformed, and nothing else."""
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
    """As `to_json`, an order of magnitude faster."""
    return _encoder.encode(value)


def decode_request(text: bytes) -> Request | NamedRequest:
    """What a rank asks; its name alone if a newer library sent it. Raises Malformed."""
    named = decode(text, NamedRequest)
    kind = REQUESTS.get(named.op)
    return named if kind is None else decode(text, kind)


def with_checksum(text: bytes) -> bytes:
    """A file of `text` that `read_checked` reads."""
    return text + _end_of(text)


def read_checked(path: Path, cls: type[T], most: int = MOST_BYTES) -> T:
    """What a file made by `with_checksum` says. Raises Malformed if it is none, or any bit of it has changed;
    OSError."""
    with open(open_plain(path), "rb") as reader:
        content = reader.read(most + 1)
    text = content[: -len(_end_of(b""))]
    if content != with_checksum(text):
        raise Malformed(f"{path} is not as it was written")
    return decode(text, cls, most)


def _end_of(text: bytes) -> bytes:
    return f"\n{digest_chunk(text)}\n".encode()


def is_plain(path: Path) -> bool:
    """Whether it is a file of bytes: no link, no folder, and nothing that could keep its reader waiting."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def create_plain(path: Path) -> int:
    """A descriptor of a new, empty file to write to, in place of whatever is there. Raises OSError."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def open_plain(path: Path, *, write: bool = False) -> int:
    """A descriptor to read from, or to `write` to as well, without waiting for anybody. Raises OSError, also
    if it is no plain file."""
    access = os.O_RDWR if write else os.O_RDONLY
    file = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "no plain file", str(path))
