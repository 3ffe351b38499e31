"""What may vanish right now: a placement promises it, and the promise holds only while all its copies are made.

They are once the coordinator names a version that is complete in the peer tier. They are not any more when a pod is lost, or when
others are to hold them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from tiercheck.protocol.report import Report
from tiercheck_operator.model.actions import Push
from tiercheck_operator.model.causes import Cause
from tiercheck_operator.model.observed import PodView
from tiercheck_operator.model.status import JobRecord, PlacementRecord
from tiercheck_operator.planning.saved_placement import SavedPlacement


def all_copied(reports: Mapping[int, Report], members: Mapping[int, PodView], owed: Iterable[Push]) -> bool:
    """Whether the coordinator says so, of the placement that is wanted now: no directive is on its way to it."""
    report = reports.get(0)
    if report is None or report.watermarks.peer is None:
        return False
    return members[0].uid not in {push.pod_uid for push in owed}


def found_again(before: PlacementRecord | None, after: PlacementRecord) -> PlacementRecord:
    """`after`, made anew for the same pods: if nothing moves, what is complete stays so."""
    same = before is not None and before.hash == after.hash and before.complete
    return replace(after, complete=after.complete or same)


def redescribed(
    before: PlacementRecord | None, after: PlacementRecord | None, was: SavedPlacement, now: SavedPlacement
) -> PlacementRecord | None:
    """What the placement is worth while training goes on. Where others hold copies at once, these are not made yet; where the old
    holders stay until the new ones have them, they are.
    """
    at_once = not (now.same_holders(was) or now.leaving or was.leaving)
    if after is None or before is None or at_once:
        return after or before
    return replace(after, complete=after.complete or before.complete)


def as_it_is(record: JobRecord, *, copied: bool) -> PlacementRecord | None:
    """For the status that is about to be written. `copied`: as `all_copied` says."""
    placement, recovery = record.placement, record.recovery
    if placement is None or copied:
        return placement and replace(placement, complete=True)
    pod_lost = recovery is not None and recovery.decided_at is None and not Cause.parse(recovery.cause).in_place
    return replace(placement, complete=False) if pod_lost else placement
