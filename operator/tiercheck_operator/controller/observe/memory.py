"""Computes the memory of a job's slots, so that what cannot fit is refused with numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tiercheck.protocol.artifacts import sizing
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.report import Report
from tiercheck_operator.model.conditions import plural
from tiercheck_operator.model.saved_placement import CodeGroup
from tiercheck_operator.model.serialization import parse_quantity
from tiercheck_operator.model.spec import JobSpec
from tiercheck_operator.model.status import MemoryRecord

_DENSE_DELTA = 3
"""The size of a snapshot in dense deltas: parameters and two moments versus gradients, same dtype."""


@dataclass(frozen=True)
class MemoryShare:
    """The copies and parity blocks that one worker keeps for others."""

    copies: int = 0
    """The number of workers of which it keeps a copy."""
    blocks: int = 0
    """The number of parity groups of which it keeps a block."""
    members: int = 1
    """The number of members of each of these groups."""


def equal_share(spec: JobSpec, workers: int) -> MemoryShare:
    """Returns what every worker keeps if all keep the same, which is known before there is a pod."""
    if spec.parity is not None:
        data, parity = spec.parity
        groups = -(-workers // data)
        return MemoryShare(blocks=-(-groups * parity // workers), members=min(data, workers))
    return MemoryShare(copies=min(spec.copies, max(0, workers - 1)))


def largest_share(holders: Mapping[int, tuple[int, ...]], groups: Iterable[CodeGroup]) -> MemoryShare:
    """Returns the most copies and parity blocks that any worker keeps by the placement."""
    copies = Counter(keeper for keepers in holders.values() for keeper in keepers)
    known = list(groups)
    blocks = Counter(keeper for group in known for keeper in group.holders)
    return MemoryShare(
        copies=max(copies.values(), default=0),
        blocks=max(blocks.values(), default=0),
        members=max((len(group.members) for group in known), default=1),
    )


def plan_memory(spec: JobSpec, share: MemoryShare) -> sizing.Sizing | None:
    """Returns what a worker needs; None unless `spec.checkpoint.stateSize` gives a rank's snapshot size."""
    if spec.state_size is None:
        return None
    delta = 0 if spec.delta is DeltaMode.NONE else max(1, spec.state_size // _DENSE_DELTA)
    own = sizing.Room(spec.state_size, delta)
    room = sizing.roomy(delta) if delta else 0
    kept = [sizing.Room(spec.state_size, room)] * (share.copies * spec.procs_per_worker)
    kept += [sizing.Room(sizing.roomy(spec.state_size), room, share.members + 1)] * (
        share.blocks * spec.procs_per_worker
    )
    cadence = spec.snapshot_every or sizing.auto_cadence(spec.state_size, delta)
    return sizing.plan(parse_quantity(spec.size_limit), [own] * spec.procs_per_worker, kept, cadence)


def why_too_small(spec: JobSpec, share: MemoryShare) -> str:
    """Returns why the job cannot fit, with numbers; empty if it can or that is unknown."""
    needed = plan_memory(spec, share)
    if needed is None or needed.fits:
        return ""
    limit = parse_quantity(spec.size_limit)
    kept = "nothing for others"
    if share.blocks:
        kept = f"the parity of {plural(share.blocks, 'group')}"
    elif share.copies:
        kept = f"copies of {plural(share.copies, 'other worker')}"
    return (
        f"tiers.local.sizeLimit is {spec.size_limit} ({_mib(limit)}), and a worker needs at least "
        f"{_mib(needed.minimum)}: snapshots of {plural(spec.procs_per_worker, 'rank')} of "
        f"{_mib(spec.state_size or 0)} each, and {kept}. {_mib(needed.needed)} would hold three snapshots "
        "per rank and all deltas. Raise sizeLimit, keep fewer copies or use parity"
    )


def forecast_memory(spec: JobSpec, share: MemoryShare) -> MemoryRecord | None:
    """Returns the memory record for the status while no sidecar has reported sizes."""
    needed = plan_memory(spec, share)
    if needed is None:
        return None
    return MemoryRecord(needed.needed, parse_quantity(spec.size_limit), needed.local, needed.peer)


def measured_memory(reports: Iterable[Report]) -> MemoryRecord | None:
    """Returns the memory record of the worker that needs most; None until sizes are reported."""
    known = [report.memory for report in reports if report.memory.needed]
    if not known:
        return None
    most = max(known, key=lambda memory: memory.needed)
    return MemoryRecord(most.needed, most.limit, most.local, most.peer)


@dataclass(frozen=True)
class Rooms:
    """The capacity of workers for others' copies. Empty where sizes are unknown."""

    copies: Mapping[int, int]
    """The number of others' copies each worker can hold; left out: more than would ever be needed."""
    bytes: Mapping[int, int]
    """Bytes for copies, by worker."""
    copy_bytes: int | None
    """Bytes of the copies of one worker; None if unknown."""


def rooms(spec: JobSpec, wanted_copies: int, reports: Iterable[Report]) -> Rooms:
    """Returns the capacity beside the minimum that a worker needs for its own ranks.
    It follows from the sizes and limits that sidecars report, with deltas if deltas are taken."""
    known = list(reports)
    snapshot = max((report.memory.snapshot for report in known), default=0)
    if not snapshot:
        return Rooms({}, {}, None)
    taken = spec.delta is not DeltaMode.NONE and not any(report.trainer.no_deltas for report in known)
    delta = max((report.memory.delta for report in known), default=0) if taken else 0
    chain = max((report.snapshot_every for report in known), default=0) + sizing.SPARE_DELTAS if delta else 0
    row = chain * sizing.cost(delta) if delta else 0
    own = spec.procs_per_worker * (sizing.OWN_SLOTS_MIN * sizing.cost(snapshot) + row)
    each = spec.procs_per_worker * (sizing.HOSTED_SLOTS * sizing.cost(snapshot) + row)
    free = {report.worker: max(0, report.memory.limit - own) for report in known}
    enough = 2 * max(1, wanted_copies) + 2
    copies = {worker: size // each for worker, size in sorted(free.items()) if size // each < enough}
    return Rooms(copies, free, each)


def _mib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{-(-size // 2**20)} MiB"
