"""What a rank leaves behind: snapshots and deltas, and how an artifact is named."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tiercheck.protocol.version import Version


class Kind(str, Enum):
    SNAPSHOT = "snapshot"
    """One rank's complete state after a step."""
    DELTA = "delta"
    """What the optimizer consumed at one step: replayed on the state before it, it gives the state after it."""


@dataclass(frozen=True, order=True)
class Artifact:
    """The name of one artifact. A delta is named after the version that it leads to."""

    rank: int
    version: Version
    kind: Kind = Kind.SNAPSHOT

    def __str__(self) -> str:
        return f"{self.kind.value} of rank {self.rank}, {self.version}"


MOST_BLOCKS = 256
"""Ranks of a parity group, and blocks over them: elements of GF(2^8)."""


@dataclass(frozen=True)
class Share:
    """Which part of a parity group's redundancy a block is.

    Block `index` (0 is the XOR) over the artifacts of one version and kind of `ranks`, in coding order.
    """

    index: int
    ranks: tuple[int, ...]
