"""Builds every sidecar's directive from recorded state alone, so that it is the same when sent again."""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from collections.abc import Mapping

import msgspec

from tiercheck.protocol.directive import (
    NO_SOURCES,
    Directive,
    HangLimits,
    ParityGroup,
    Peer,
    Phase,
    Policy,
    Restore,
    Source,
    SourceTable,
    Tier,
)
from tiercheck_operator.controller.observe import inventories
from tiercheck_operator.controller.placement.placing import distance_between
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import Push
from tiercheck_operator.model.observed import Observation, PodView
from tiercheck_operator.model.saved_placement import SavedPlacement
from tiercheck_operator.model.serialization import parse_duration, parse_quantity
from tiercheck_operator.model.spec import REMOTE_EVERY, JobSpec
from tiercheck_operator.model.status import JobRecord, Recovery
from tiercheck_operator.planning.recovery.availability import Missing

_FIRST_PORT, _PORTS = 20000, 10000
_FIRST_STEP = 3600.0
"""Seconds for the first step of a script known to make steps: it may compile, and read much data."""


def master_port(job_uid: str, attempt: int) -> int:
    """Returns a port that depends on the attempt, so that it is unlikely to meet the last one's listener."""
    return _FIRST_PORT + zlib.crc32(f"{job_uid}:{attempt}".encode()) % _PORTS


def build_policy(spec: JobSpec, restored: bool = False, keeps: bool = True) -> Policy:
    """Builds the policy in the directives from the spec. `keeps`: earlier processes may stay.
    `restored`: the attempt began from a version, so its script is known to make steps."""
    remote = spec.remote or {}
    bandwidth, age = remote.get("bandwidth"), remote.get("keepFor")
    return Policy(
        snapshot_every=spec.snapshot_every,
        remote_every=int(remote.get("everySteps", REMOTE_EVERY)),
        remote_keep=int(remote.get("keep") or 5),
        remote_bandwidth=None if bandwidth is None else parse_quantity(bandwidth),
        remote_keep_seconds=None if age is None else parse_duration(age),
        peer_bandwidth=spec.peer_bandwidth,
        peer_encrypted=spec.peer_encrypted,
        peer_interfaces=spec.peer_interfaces,
        peer_ucx=spec.peer_ucx,
        delta=spec.delta,
        sanity_gate=spec.sanity_gate,
        verify_all=spec.verify_all,
        hang=None if spec.hang is None else _hang_limits(spec.hang, restored),
        rehearse_every=spec.rehearse_every,
        health_check=spec.health_check,
        restore_stall=spec.restore_stall,
        prove_steps=spec.prove_steps,
        interrupt_seconds=spec.interrupt_seconds if keeps else 0.0,
    )


def _hang_limits(hang: HangLimits, restored: bool) -> HangLimits:
    """Limits the first step too if the attempt began from a version, so that its script can make steps."""
    usual = max(_FIRST_STEP, hang.seconds) if restored else None
    return dataclasses.replace(hang, first_step=usual if hang.first_step is None else hang.first_step)


def wanted_phase(status: JobRecord) -> Phase:
    """Returns the phase for the launchers: Hold before the attempt's release, then Release."""
    return Phase.HOLD if status.is_restoring else Phase.RELEASE


def due_directives(
    obs: Observation,
    status: JobRecord,
    members: Mapping[int, PodView],
    placement: SavedPlacement | None,
    phase: Phase,
    *,
    exit_code: int = 0,
) -> list[Push]:
    """Returns directives for sidecars that follow another one. `exit_code`: the launchers', with Finish."""
    directives = build_directives(obs, status, members, placement, phase=phase, exit_code=exit_code)
    due = []
    for worker, directive in directives.items():
        report = obs.newest_reports.get(members[worker].uid)
        if report is None or report.revision == directive.revision or report.attempt > directive.attempt:
            continue
        # The sidecar refuses it if it has followed another one by then: a delayed directive never undoes a
        # later one.
        ordered = dataclasses.replace(directive, instance=report.instance, number=report.followed + 1)
        due.append(Push(members[worker].uid, ordered))
    return due


def _sources(
    obs: Observation,
    status: JobRecord,
    members: Mapping[int, PodView],
    placement: SavedPlacement | None,
    phase: Phase,
) -> Mapping[int, tuple[Source, ...]]:
    """Returns the sources of each rank for the attempt's version, nearest first."""
    version, spec = status.restored_version, obs.job.spec
    if version is None:
        return {}
    old = status.resized_from
    # Trainers read the old ranks' snapshots after the release, until they make steps.
    looking = phase is Phase.HOLD or (old and status.recovery is not None)
    stored = (Source(Tier.REMOTE),) if spec.remote is not None else ()
    settled = dict.fromkeys(range(old), stored) if old else find_settled_sources(spec, members, placement)
    if not looking:
        return settled
    groups = placement.groups if placement is not None else ()
    reports = inventories.reports_of(obs, members)
    known = inventories.pose_recovery(spec, obs.size, status.history, reports, groups)
    found = known.stock.sources(version, distance_between(obs, members))
    # If some rank has no known source, the places where its data should be are tried.
    return settled if isinstance(found, Missing) else inventories.to_sources(found, members)


def build_directives(
    obs: Observation,
    status: JobRecord,
    members: Mapping[int, PodView],
    placement: SavedPlacement | None,
    *,
    phase: Phase,
    exit_code: int = 0,
) -> dict[int, Directive]:
    """Builds the directives, by worker.
    Hold and Release need a `placement` and complete `members` with addresses; Finish goes to those left."""
    spec, uid = obs.job.spec, obs.job.identity
    hosts = {worker: pod.address for worker, pod in members.items()}
    holders = {} if placement is None else placement.holders()
    saved = placement.groups if placement is not None else ()
    coded = [known for group in saved if (known := inventories.parity_group(group, members)) is not None]
    group_of = {peer.worker: group for group in coded for peer in group.members}
    hosted: dict[int, list[int]] = {}
    for worker, keepers in sorted(holders.items()):
        for keeper in keepers:
            hosted.setdefault(keeper, []).append(worker)
    folded: dict[int, list[ParityGroup]] = {}
    for group in coded:
        for peer in group.holders:
            folded.setdefault(peer.worker, []).append(group)
    directives, named = {}, _placement_digest(placement)
    version = status.restored_version
    workers, procs = _size(obs, status)
    old = 0 if version is None else status.resized_from
    recovery = status.recovery
    rules = build_policy(spec, restored=version is not None, keeps=recovery is None or recovery.keeps)
    port = master_port(uid, status.attempt)
    sources = _sources(obs, status, members, placement, phase)
    shared = SourceTable.of(sources, range(old)) if old else None
    named_table = "" if shared is None else _digest_of(shared)
    for worker in sorted(members):
        own = range(worker * procs, (worker + 1) * procs)
        directive = Directive(
            job_uid=uid,
            worker=worker,
            workers=workers,
            procs_per_worker=procs,
            attempt=status.attempt,
            phase=phase,
            history=status.history,
            policy=rules,
            restore=None
            if version is None
            else Restore(version, shared or SourceTable.of(sources, own), world_size=old, base=status.base),
            holders=tuple(
                Peer(keeper, hosts[keeper]) for keeper in holders.get(worker, ()) if keeper in hosts
            ),
            hosted=tuple(Peer(other, hosts[other]) for other in hosted.get(worker, ()) if other in hosts),
            coordinator=Peer(0, hosts.get(0, "")),
            master_host=(members[0].ip if 0 in members else None) or "",
            master_port=port,
            parity=group_of.get(worker),
            folded=tuple(folded.get(worker, ())),
            placement=named,
            pod_uid=members[worker].uid,
            exit_code=exit_code,
            joins=_joins(obs, recovery, phase),
        )
        directives[worker] = dataclasses.replace(directive, revision=_revision(directive, named_table))
    return directives


def _joins(obs: Observation, recovery: Recovery | None, phase: Phase) -> bool:
    """Returns whether a started process joins others that stayed or, before the release, will join them."""
    if recovery is None or not recovery.keeps:
        return False
    if phase is not Phase.HOLD:
        return recovery.kept > 0
    would_stay = obs.conditions.get(conditions.IN_PROCESS)
    return would_stay is not None and would_stay.reason == conditions.PROCESSES_STAY


def _size(obs: Observation, status: JobRecord) -> tuple[int, int]:
    """Returns the attempt's workers and ranks per worker: the spec may change during a suspension."""
    saved, ranks = obs.placement, status.history.ranks
    if saved is not None and saved.attempt == status.attempt and saved.members and ranks:
        return len(saved.members), ranks // len(saved.members)
    return obs.size, obs.job.spec.procs_per_worker


def find_settled_sources(
    spec: JobSpec, members: Mapping[int, PodView], placement: SavedPlacement | None
) -> dict[int, tuple[Source, ...]]:
    """Returns each rank's sources of a released attempt's version, by the placement only.
    So the directive does not change with every snapshot that is taken or freed."""
    found = {}
    holders = {} if placement is None else placement.holders()
    groups = {worker: group for group in (placement.groups if placement else ()) for worker in group.members}
    for worker in members:
        sources = [Source(Tier.LOCAL)]
        sources += [
            Source(Tier.PEER, Peer(keeper, members[keeper].address))
            for keeper in holders.get(worker, ())
            if keeper in members
        ]
        group = inventories.parity_group(groups[worker], members) if worker in groups else None
        if group is not None:
            sources.append(Source(Tier.PEER, parity=group))
        if spec.remote is not None:
            sources.append(Source(Tier.REMOTE))
        for rank in range(worker * spec.procs_per_worker, (worker + 1) * spec.procs_per_worker):
            found[rank] = tuple(sources)
    return found


def _placement_digest(placement: SavedPlacement | None) -> str:
    if placement is None:
        return ""
    text = repr(
        (sorted(placement.holders().items()), [(group.members, group.holders) for group in placement.groups])
    )
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _revision(directive: Directive, named_table: str) -> str:
    """Returns the digest of a directive. `named_table`: the digest of the source table that all share.
    That digest is computed once for all workers; if it is empty, each has its own table."""
    if not named_table or directive.restore is None:
        return _digest_of(directive)
    restore = dataclasses.replace(directive.restore, table=NO_SOURCES)
    return _digest_of((dataclasses.replace(directive, restore=restore), named_table))


def _digest_of(content: object) -> str:
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]
