"""What the coordinator decides about the job's versions; every sidecar follows it."""

from __future__ import annotations

from dataclasses import dataclass

from tiercheck.protocol.report import Watermarks
from tiercheck.protocol.version import Version
from tiercheck_sidecar.model.cadence import UNDECIDED, Cadence


@dataclass(frozen=True)
class TierVerdict:
    """From the coordinator to a sidecar."""

    attempt: int
    watermarks: Watermarks
    floor: Version | None = None
    """What leads only to older versions may be freed; None: nothing."""
    anchor: Version | None = None
    """The newest snapshot that all holders of every rank have; without holders, that every rank has. Nobody
    gives it up for a newer one."""
    backed: Version | None = None
    """As long as there is no peer watermark in this attempt, or under this placement: a version that some
    holder of every rank can rebuild."""
    abandoned: tuple[Version, ...] = ()
    """Snapshots that may be freed although they are not older: they can not become complete, or nobody needs
    them to."""
    lost: Version | None = None
    """The local watermark, if some rank's memory has rotted so that nobody comes back to it: nothing needs to
    be kept for it."""
    copy: Version | None = None
    """The snapshot that every rank should now bring to its holders."""
    upload: Version | None = None
    """The snapshot that every rank should now bring to the remote tier."""
    received: tuple[int, ...] = ()
    """Ranks whose upload of that version the coordinator has on record."""
    cadence: Cadence = UNDECIDED
    spare: Version | None = None
    """The version `restore.proveSteps` before the floor: the job may go back there to train these steps again
    and compare, so it is kept where there is room."""
    placement: str = ""
    """The placement that it was found under."""
    stored: tuple[Version, ...] | None = None
    """The newest of this history in the remote tier, so that one sidecar lists it for all; None: not known
    yet."""
    over: bool = False
    """The job is over and nothing more goes to the remote tier: every sidecar may go."""
