"""Messages and files of the protocol's classes, decoded strictly, from any thread."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

from msgspec.json import Decoder

T = TypeVar("T")

_decoders: dict[type, Decoder[Any]] = {}
_making = threading.Lock()


def decode(text: bytes | bytearray | str, cls: type[T]) -> T:
    """Raises msgspec.DecodeError (ValidationError is one)."""
    decoder = _decoders.get(cls)
    if decoder is None:
        # msgspec plans a class, and those in its fields, on first use. A second thread that meets a plan half made ends the process
        # by SIGSEGV (seen with 0.22), so `msgspec.json.decode(type=...)` is not for threads.
        with _making:
            decoder = _decoders.setdefault(cls, Decoder(cls))
    found: T = decoder.decode(text)
    return found
