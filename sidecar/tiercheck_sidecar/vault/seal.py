"""Reads and writes seals: the small file beside a slot that marks its content as valid.

It has the identity and the digests, and appears by rename, so a slot has either a complete seal or none. A
checksum over all of it detects corruption in memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from tiercheck.failpoints import failpoint
from tiercheck.plain_files import create_plain
from tiercheck.protocol.artifacts.slot import NotASlot, read_header
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.version import MOST_BLOCKS, Artifact, Digests, Kind, Share, Version
from tiercheck_sidecar.decoding import Malformed, read_checked, with_checksum
from tiercheck_sidecar.digest import is_well_formed
from tiercheck_sidecar.tags import Tags, is_well_described

SUFFIX = ".seal"


@dataclass(frozen=True)
class Seal:
    """Describes what a slot holds. `tier`: local for own ranks, peer for copies and parity of others."""

    rank: int
    """The artifact's rank, or the first rank of a parity block."""
    version: Version
    world_size: int
    tier: Tier
    digests: Digests
    """The digests and the size of the artifact; the slot's file may be longer."""
    kind: Kind = Kind.SNAPSHOT
    share: Share | None = None
    """Set if this is a parity block."""
    members: tuple[Digests, ...] = ()
    """The digests of each rank's artifact in coding order, if this is a parity block."""
    tags: Tags | None = field(default=None, compare=False)
    """The tags of an artifact; None with encryption, if no worker keeps copies, or if it came without.

    They are not compared: the digests suffice, and the same bytes sealed twice may have other tags."""

    @property
    def artifact(self) -> Artifact:
        """Returns the artifact; the first one of a parity block."""
        return Artifact(self.rank, self.version, self.kind)

    def __str__(self) -> str:
        if self.share is None:
            return f"{self.kind.value} of rank {self.rank}, {self.version}"
        ranks = ", ".join(map(str, self.share.ranks))
        return f"parity block {self.share.index} over the {self.kind.value}s of ranks {ranks}, {self.version}"


def seal_path(slot: Path) -> Path:
    return slot.with_name(slot.name + SUFFIX)


def write_seal(slot: Path, seal: Seal) -> None:
    """Writes the seal of a slot. Raises OSError; then there is no seal."""
    target = seal_path(slot)
    temporary = target.with_name(target.name + ".new")
    try:
        with open(create_plain(temporary), "wb") as file:
            file.write(with_checksum(to_json(seal)))
        failpoint("mid-seal")
        os.replace(temporary, target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_seal(slot: Path) -> Seal | None:
    """Returns the seal of a slot; None if it is missing or invalid. Raises nothing."""
    try:
        seal = read_checked(seal_path(slot), Seal)
    except (OSError, Malformed):
        return None
    return seal if _makes_sense(seal) else None


def _makes_sense(seal: Seal) -> bool:
    """Validates the fields: any process that may write to the volume can make a checksum too."""
    numbers = (seal.rank, seal.version.step, seal.version.attempt, seal.world_size)
    named = seal.share is None or (
        0 <= seal.share.index < MOST_BLOCKS
        and len(seal.share.ranks) <= MOST_BLOCKS
        and seal.share.ranks[:1] == (seal.rank,)
    )
    whole = is_well_described(seal.digests, seal.tags) and all(map(is_well_formed, seal.members))
    return min(numbers) >= 0 and named and whole


def header_fault(view: memoryview, seal: Seal, size: int | None = None) -> str:
    """Returns why the header is not of the artifact that the seal names; empty if it is.

    `size`: the size of all bytes, if `view` is only their beginning."""
    try:
        header = read_header(view, size)
    except NotASlot as error:
        return str(error)
    if (header.rank, header.version, header.kind) != (seal.rank, seal.version, seal.kind):
        found = f"{header.kind.value} of rank {header.rank}, {header.version}"
        return f"it says {found}, its seal says {seal}"
    return ""


def break_seal(slot: Path) -> None:
    """Removes the seal, so that the slot's content is not used again."""
    seal_path(slot).unlink(missing_ok=True)
