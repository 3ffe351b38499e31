"""Computes which versions are complete and when a sidecar may end, by set arithmetic alone.

Ranks skip captures independently, and holders have two snapshot slots per rank. Left alone, ranks would hold
disjoint sets forever, and holders different halves of two versions. So the coordinator names one snapshot at
a time for all ranks to copy: the newest that every rank has sealed. Deltas need no naming: every step has
one, and a version is complete where it can be rebuilt from what every rank has. What may be freed for it is
decided in `reclaim.py`.

At the end of a job Kubernetes ends each pod's sidecar when its own trainer has ended, so in any order and
seconds apart. The coordinator writes the manifest: it stays until no worker can add anything, and then
notifies all others. No sidecar waits for one that has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from tiercheck.protocol.directive import Directive, Phase
from tiercheck.protocol.report import TrainerState, Watermarks
from tiercheck.protocol.version import History, Version
from tiercheck_sidecar.model.tier_verdict import Span, TierVerdict, intersect, newest, unite
from tiercheck_sidecar.versions.tally import RankHoldings, RankState, RankTable


@dataclass(frozen=True)
class WatermarkState:
    """The newest versions found complete in one attempt.

    They only rise, so a sidecar that restarts and has to gather its acknowledgements again never makes a
    complete version look abandoned.
    """

    local: Version | None = None
    peer: Version | None = None
    snapshot: Version | None = None
    """The newest version of which every rank holds a whole snapshot in its own memory."""
    anchor: Version | None = None
    """The newest snapshot that all holders of every rank have, or without holders every rank."""
    copy: Version | None = None
    """The snapshot being copied to the holders, until all have it or some rank cannot copy it any more."""
    backed: Version | None = None
    """The same as `TierVerdict.backed`."""


def compute_watermarks(
    world_size: int, tally: RankTable, history: History, before: WatermarkState, prove_steps: int = 0
) -> tuple[WatermarkState, TierVerdict]:
    """Computes watermarks, floor, abandoned snapshots and the snapshot to copy.

    `remote`, `upload` and `cadence` are not decided here. Until every rank has reported, `before` stands.
    """
    shapes = tally.shapes
    if not tally.has_all(world_size):
        return before, _verdict(history, before, shapes, prove_steps)
    every = [shape.held.value for shape in shapes]
    guarded = [shape.held.value for shape in shapes if shape.guarded]
    snapshot = _later(before.snapshot, _newest(_shared(tiers.snapshots for tiers in every), history))
    copied = _newest(_shared(tiers.copied_snapshots for tiers in guarded), history) if guarded else snapshot
    anchor = _later(before.anchor, copied)
    standing = WatermarkState(
        local=_later(before.local, newest(intersect(tiers.local for tiers in every), history)),
        peer=_later(before.peer, newest(intersect(tiers.copied for tiers in guarded), history)),
        snapshot=snapshot,
        anchor=anchor,
        copy=_next_copy(before.copy, snapshot, anchor, guarded),
    )
    if standing.peer is None:
        standing = replace(standing, backed=_backed(tally, history, before.backed))
    verdict = replace(
        _verdict(history, standing, shapes, prove_steps),
        backed=standing.backed,
        abandoned=_abandoned(tally, history, standing),
        lost=standing.local if _is_lost(standing.local, tally) else None,
    )
    return standing, verdict


def _verdict(
    history: History, standing: WatermarkState, shapes: Collection[RankState], prove_steps: int
) -> TierVerdict:
    floor = standing.local
    if any(shape.guarded for shape in shapes):
        floor = min(standing.local, standing.peer) if standing.local and standing.peer else None
    marks = Watermarks(standing.local, standing.peer, snapshot=standing.snapshot)
    spare = history.version_of(floor.step - prove_steps) if floor is not None and prove_steps else None
    return TierVerdict(history.attempt, marks, floor, standing.anchor, copy=standing.copy, spare=spare)


def _next_copy(
    current: Version | None, snapshot: Version | None, anchor: Version | None, guarded: list[RankHoldings]
) -> Version | None:
    if not guarded or snapshot is None:
        return None
    if anchor is not None and snapshot <= anchor:
        # A restarted sidecar has no record of what its holders have, and deltas there need a snapshot to
        # follow.
        unsure = any(not any(run.last >= snapshot.step for run in tiers.copied) for tiers in guarded)
        return snapshot if unsure else None
    in_time = current is not None and (anchor is None or current > anchor)
    if in_time and all(current in tiers.snapshots or current in tiers.copied_snapshots for tiers in guarded):
        return current
    return snapshot


def _abandoned(tally: RankTable, history: History, standing: WatermarkState) -> tuple[Version, ...]:
    """Returns snapshots that some rank passed without keeping, or that a newer complete one overtook.

    Never what was once found complete: the other tiers exist for a rank that lost its own memory of that. The
    exception is a snapshot that they lack as well: no rank can be restored to it, and it would only take a
    slot from the next one. Copies count as known: their owner may have freed the snapshot long ago, and a
    holder that missed that update would otherwise keep them, and refuse newer ones, forever.
    """
    every = [shape.held.value for shape in tally.shapes]
    known = {version for tiers in every for version in (*tiers.snapshots, *tiers.unfinished)}
    known |= {version for copies in tally.copies for version in copies.snapshots}
    newest_whole = standing.snapshot
    lacking = [
        shape
        for shape in tally.shapes
        if newest_whole not in (*shape.held.value.snapshots, *shape.held.value.copied_snapshots)
    ]
    whole = tally.all_have_copies(lacking, lambda copies: newest_whole in copies.snapshots)
    kept = {newest_whole if whole else None, standing.anchor}
    return tuple(
        version
        for version in sorted(known - kept)
        if history.accepts(version)
        and (
            any(_passed(tiers, version, standing.local) for tiers in every)
            or (newest_whole is not None and version < newest_whole and version != standing.copy)
        )
    )


def _backed(tally: RankTable, history: History, before: Version | None) -> Version | None:
    """Returns the newest version that can be rebuilt for every rank from a holder, even a former one.

    What an earlier attempt completed stays until this one has completed as much. Once named it stays: a
    holder that still follows the verdict before may free a newer one, and an older one by the next verdict.
    """
    each = tally.kept_of_each([shape for shape in tally.shapes if shape.guarded])
    runs = ([run for shared in kept for run in shared.value.versions] for kept in each)
    common = intersect(map(unite, runs))
    stays = before is not None and history.accepts(before) and _leads(common, before)
    return before if stays else newest(common, history)


def _is_lost(version: Version | None, tally: RankTable) -> bool:
    """Returns whether some rank can restore it neither from its own memory nor from any copy."""
    if version is None:
        return False
    lacking = [
        shape
        for shape in tally.shapes
        # Its report leaves out what it may keep after all.
        if not shape.held.value.leaving
        and not _leads((*shape.held.value.local, *shape.held.value.copied), version)
    ]
    return not tally.all_have_copies(lacking, lambda copies: _leads(copies.versions, version))


def _leads(runs: Iterable[Span], version: Version) -> bool:
    """Returns whether one of these runs contains the version."""
    return any(run.attempt == version.attempt and run.first <= version.step <= run.last for run in runs)


def _passed(tiers: RankHoldings, version: Version, complete: Version | None) -> bool:
    """Returns whether the snapshot cannot become common, nor this rank's deltas complete the version.
    Otherwise it could be announced at the moment when a rank that rests on the snapshot frees it."""
    if version in tiers.snapshots or version in tiers.unfinished or tiers.reached is None:
        return False
    if complete is not None and version <= complete:
        return tiers.reached >= version
    if _leads(tiers.local, version) or any(each <= version for each in tiers.unfinished_deltas):
        return False
    if any(each <= version for each in tiers.leaving):
        return False  # its report leaves out what rests on these, and it may keep them after all
    if any(run.last == version.step - 1 for run in tiers.local):
        return tiers.reached > version  # the delta of that very step may be yet to come
    return tiers.reached >= version


def next_upload(
    standing: WatermarkState,
    history: History,
    shapes: Collection[RankState],
    *,
    stored: Iterable[Version],
    every: int,
    current: Version | None,
    finishing: bool,
) -> Version | None:
    """Returns the snapshot that every rank should upload; None if no upload is due.

    One at a time: `current`, once chosen, is kept until it is stored, some rank lacks it, or at the end a
    newer one is complete. An upload is due when the newest complete snapshot lies in a later interval of
    `every` steps than the newest stored one, and at the end of the job whenever it is newer at all.
    """
    stored_last = max((version for version in stored if history.accepts(version)), default=None)
    if current is not None and history.accepts(current) and (stored_last is None or current > stored_last):
        kept = all(can_upload(shape, current) for shape in shapes)
        if kept and not (finishing and current != standing.snapshot):
            return current
    mark = standing.snapshot
    if mark is None or (stored_last is not None and mark <= stored_last):
        return None
    passed = mark.step // max(1, every) > (stored_last.step if stored_last else 0) // max(1, every)
    return mark if passed or finishing else None


def can_upload(shape: RankState, version: Version) -> bool:
    """Returns whether the rank can upload the version or has done so."""
    return version in shape.held.value.snapshots or version in shape.uploaded


def _shared(groups: Iterable[Iterable[Version]]) -> set[Version]:
    sets = [set(each) for each in groups]
    return set.intersection(*sets) if sets else set()


def _newest(candidates: Iterable[Version], history: History) -> Version | None:
    return max((version for version in candidates if history.accepts(version)), default=None)


def _later(one: Version | None, other: Version | None) -> Version | None:
    marks = [mark for mark in (one, other) if mark is not None]
    return max(marks, default=None)


GONE = 10.0
"""Seconds of silence after which the other side counts as gone. A restarted container is back sooner."""


@dataclass(frozen=True)
class WorkerEnd:
    """The state of a sidecar when its job is over."""

    final: bool
    """True if nothing will be added to what it holds."""
    done: bool
    """True if everything that it holds is in the remote tier, or older than what is."""
    accepted: bool
    """True if the coordinator has accepted a report that it is done."""
    over: bool
    """True if the coordinator has announced that no more uploads will come."""
    unanswered: float | None
    """Seconds since the coordinator first gave no answer; None: it answered last time."""


def may_go(end: WorkerEnd) -> bool:
    """Returns whether a worker that is not the coordinator may end."""
    if not end.final:
        return False
    if end.over or (end.unanswered is not None and end.unanswered >= GONE):
        return True
    return end.done and (end.accepted or end.unanswered is not None)


def is_final(
    directive: Directive, trainer: TrainerState, asked_to_end: bool, unfinished: Collection[object]
) -> bool:
    """Returns whether nothing will be added to what this worker holds.
    `asked_to_end`: a sidecar is asked to only after its trainer has ended."""
    return (
        directive.phase is Phase.FINISH
        and (asked_to_end or trainer is not TrainerState.RUNNING)
        and not unfinished
    )


def is_all_stored(own: Collection[Version | None], stored: Version | None) -> bool:
    """Returns whether no version newer than `stored` can be uploaded with what is here.
    `own`: each rank's newest snapshot."""
    return any(newest is None or (stored is not None and newest <= stored) for newest in own) or not own


def workers_present(quiet: Mapping[int, float], interval: float) -> set[int]:
    """Returns the workers that are present.
    `quiet`: seconds since the last report of each; `interval`: between two reports of one."""
    return {worker for worker, seconds in quiet.items() if seconds < max(GONE, 3 * interval)}


def is_hopeless(
    upload: Version, world: int, ranks: Mapping[int, RankState], uploaded: Collection[int]
) -> bool:
    """Returns whether some rank will never upload `upload` if no worker adds anything.
    `ranks`: those of present workers."""
    return any(
        rank not in uploaded and (rank not in ranks or not can_upload(ranks[rank], upload))
        for rank in range(world)
    )
