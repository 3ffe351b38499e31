"""The exchange's wire as it would be without tags: what they cost is measured against it.

Chunks go from the page cache to the socket by `sendfile`, nobody looks at them on their way, and who receives
them compares digests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from tiercheck_sidecar.exchange import handshake, server
from tiercheck_sidecar.exchange.channel import TAG, Direction, Frame
from tiercheck_sidecar.exchange.frames import Wire
from tiercheck_sidecar.pacing import Portion
from tiercheck_sidecar.tags import ChunkTag


class PlainWire(Wire):
    """Takes anything for a tag."""

    def send_chunk(
        self,
        file: int,
        index: int,
        offset: int,
        length: int,
        pace: Portion | None = None,
        *,
        bare: bool = False,
    ) -> None:
        super().send_chunk(file, index, offset, length, pace, bare=True)

    def receive_into(self, view: memoryview, sealed: ChunkTag | None = None) -> bool:
        self._fill(view)
        return False


class _PlainFrame(Frame):
    def __init__(self) -> None: ...

    def work(self, view: memoryview | bytearray) -> None: ...

    def tag(self) -> bytes:
        return bytes(TAG)

    def check(self, tag: bytes | bytearray) -> None: ...


class _PlainDirection(Direction):
    encrypted = False

    def __init__(self) -> None: ...

    def sending(self, header: bytes) -> Frame:
        return _PlainFrame()

    def receiving(self, header: bytes) -> Frame:
        return _PlainFrame()


@contextmanager
def plain_wires() -> Iterator[None]:
    """Connections of this process that are made meanwhile are plain; those of the other end must be, too."""
    both = (_PlainDirection(), _PlainDirection())
    with (
        patch.object(handshake, "directions", lambda *_: both),
        patch.object(handshake, "Wire", PlainWire),
        patch.object(server, "Wire", PlainWire),
    ):
        yield
