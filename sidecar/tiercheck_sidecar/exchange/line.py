"""The connections to one peer that are kept open between artifacts, so that a small delta pays for no handshake."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from tiercheck_sidecar.exchange.frames import Wire


class Line:
    """Used by one thread at a time; each of its wires may then be used by another one."""

    def __init__(self, connect: Callable[[], Wire]) -> None:
        self._connect = connect
        self._wires: list[Wire] = []
        self._spent = 0

    @property
    def is_open(self) -> bool:
        """Whether it was connected before: then the peer may have hung up since without our knowing."""
        return bool(self._wires)

    @property
    def sent(self) -> int:
        """Bytes of chunks that were sent on it, over all its connections."""
        return self._spent + sum(wire.sent for wire in self._wires)

    def wires(self, count: int) -> list[Wire]:
        """The first `count` connections, made as needed. Raises WireBroken, PeerRefused."""
        while len(self._wires) < count:
            self._wires.append(self._connect())
        return self._wires[:count]

    def drop(self) -> None:
        """Hang up; the next use connects again."""
        self._spent = self.sent
        for wire in self._wires:
            wire.close()
        self._wires.clear()

    def __enter__(self) -> Line:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()
