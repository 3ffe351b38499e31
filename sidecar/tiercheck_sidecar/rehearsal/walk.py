"""Reads one rank's way back over one route, slowly and out of the way of everything else.

A version that training leaves behind is freed while it is read. Then the reading goes on in its successor,
from the chunk where it stopped: so a state that is too large to be read within the life of one version is
read whole all the same, in parts of several.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from tiercheck.protocol.artifacts.slot import NotASlot
from tiercheck.protocol.version import Artifact, History, Version
from tiercheck_sidecar.bounded_calls import SourceCorrupt, SourceFailed
from tiercheck_sidecar.digest import length_of
from tiercheck_sidecar.rehearsal.routes import Gone, Route

PAUSES = (2.0, 5.0, 15.0, 30.0)
"""Seconds before what could not be read is tried again: a sidecar may be starting anew."""
_FRUITLESS = 8
"""Versions in a row that were freed before one chunk of them was read."""


class Stopped(Exception):
    """Something that matters more has begun, or there is nothing to be read: no verdict."""


class TooSlow(Stopped):
    """Versions are freed before they can be read; another try at once would find the same."""


class Disproved(Exception):
    """It would not come back; the message is a sentence."""


class RehearsalGround(Protocol):
    """What goes on around."""

    def newest(self) -> Version:
        """The newest version that is complete in the tier. Raises Stopped."""

    def outlived(self, version: Version) -> bool:
        """Whether there is a newer one, if need be after a moment. Raises Stopped."""

    def rest(self, core: float, moved: int) -> None:
        """Pause after a piece of work as its cost demands, and while something is being saved. Raises
        Stopped."""

    def pause(self, seconds: float) -> None:
        """Raises Stopped."""


@dataclass(frozen=True)
class Walked:
    """It was read to its end, and nothing was wrong."""

    version: Version
    """The newest of which something was read."""
    bytes: int
    parts: int
    """How many versions it was read of."""


class Walk:
    """Used once."""

    def __init__(self, route: Route, rank: int, history: History, ground: RehearsalGround) -> None:
        self._route, self._rank, self._history, self._ground = route, rank, history, ground
        self._done = self._bytes = self._parts = 0
        self._at: Artifact | None = None
        """What is being read."""
        self._fresh = True
        """Whether nothing of the current version was read yet."""

    def run(self) -> Walked:
        """Raises Disproved, Stopped."""
        troubles = fruitless = 0
        while True:
            version, before, self._fresh = self._ground.newest(), self._done, True
            try:
                self._read_on(version)
                return Walked(version, self._bytes, max(1, self._parts))
            except SourceCorrupt as error:
                raise Disproved(self._sentence(version, error)) from error
            except (SourceFailed, NotASlot, OSError) as error:
                if self._done > before:
                    troubles = fruitless = 0
                if isinstance(error, Gone) and self._ground.outlived(version):
                    fruitless += 1
                    if fruitless > _FRUITLESS:
                        raise TooSlow("versions are freed before they can be read") from error
                    continue
                if troubles == len(PAUSES):
                    raise Disproved(self._sentence(version, error)) from error
                self._ground.pause(PAUSES[troubles])
                troubles += 1

    def _read_on(self, version: Version) -> None:
        began = time.thread_time()
        for artifact, index, length in self._chunks(version):
            moved = self._route.read(artifact, index)
            self._done, self._bytes = self._done + 1, self._bytes + length
            if self._fresh:
                self._parts, self._fresh = self._parts + 1, False
            self._ground.rest(time.thread_time() - began, moved)
            began = time.thread_time()

    def _chunks(self, version: Version) -> Iterator[tuple[Artifact, int, int]]:
        """Chunks that are still to be read, each with its bytes."""
        self._at, left = None, self._done
        for artifact in self._route.chain(self._rank, version, self._history):
            self._at = artifact
            digests = self._route.digests(artifact)
            count = len(digests.values)
            for index in range(min(left, count), count):
                yield artifact, index, length_of(digests, index)
            left = max(0, left - count)

    def _sentence(self, version: Version, error: Exception) -> str:
        what = f"the {self._at}" if self._at is not None else f"{version} of rank {self._rank}"
        return f"{what}, would not come back from {self._route.name}: {error}"
