"""Turns sidecars' reports into the planner's inventory, without the copies known to be bad.

Workers are renumbered when a job is resized. A pod's label has its worker number. Its sidecar receives that
with the next attempt's directive; until then it reports, and is reported by others, under its old number.

A job's first attempt may begin from what an earlier job of the same name left in the remote tier. Those
versions carry the earlier job's attempts, so that history is adopted and new attempts are numbered after it:
nothing that this job writes can be mistaken for what is already stored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tiercheck.protocol.directive import ParityGroup, Peer, Source, Tier
from tiercheck.protocol.report import Holding, Problem, Quarantined, Report
from tiercheck.protocol.version import Artifact, Branch, History, Kind, Share, Version
from tiercheck_operator.model import conditions
from tiercheck_operator.model.observed import Observation, PodView
from tiercheck_operator.model.saved_placement import CodeGroup
from tiercheck_operator.model.spec import JobSpec
from tiercheck_operator.planning.parity.code_groups import OldGroup
from tiercheck_operator.planning.recovery.availability import (
    Artifacts,
    JobInventory,
    RemoteInventory,
    SourceChoice,
)
from tiercheck_operator.planning.recovery.recovery import RecoveryProblem

_SAID_OF_REMOTE = re.compile(r"(?s)(?:([A-Z][A-Za-z]{1,30}): )?(.*)")
"""Matches the reason, if there is one, and the sentence in what a report has about the remote tier."""
_Numbers = tuple[list[int], list[int]]
"""The numbers of the versions held as snapshots, and of those held as deltas."""


def build_inventories(reports: Iterable[Report]) -> list[JobInventory]:
    """Returns one inventory per report, without the copies that any sidecar found bad."""
    known = list(reports)
    quarantined = {
        (entry.worker, entry.rank, entry.version, entry.kind)
        for report in known
        for entry in report.quarantined
    }
    alike = _Alike()
    found = []
    for report in sorted(known, key=lambda report: report.worker):
        own: dict[int, _Numbers] = {}
        hosted: dict[int, _Numbers] = {}
        blocks: dict[Share, _Numbers] = {}
        for holding in report.holdings:
            if quarantined and _is_bad(report.worker, holding, quarantined):
                continue
            table: dict[Any, _Numbers] = own if holding.tier is Tier.LOCAL else hosted
            place: Any = holding.rank
            if holding.share is not None:
                table, place = blocks, holding.share
            held = table.get(place)
            if held is None:
                held = table[place] = [], []
            held[0 if holding.kind is Kind.SNAPSHOT else 1].append(alike.number(holding.version))
        found.append(
            JobInventory(
                report.worker,
                {rank: alike.artifacts(held) for rank, held in own.items()},
                {rank: alike.artifacts(held) for rank, held in hosted.items()},
                {share: alike.artifacts(held) for share, held in blocks.items()},
            )
        )
    return found


class _Alike:
    """Shares one object among equal holdings: thousands of ranks hold the same few versions.
    Versions are numbered, because Python hashes a number many times faster."""

    def __init__(self) -> None:
        self._number_of: dict[Version, int] = {}
        self._number_by_id: dict[int, int] = {}
        self._versions: list[Version] = []
        self._artifacts: dict[tuple[frozenset[int], frozenset[int]], Artifacts] = {}

    def number(self, version: Version) -> int:
        """Returns the number of `version`, which must live as long as this object."""
        number = self._number_by_id.get(id(version))
        if number is None:
            number = self._number_of.setdefault(version, len(self._versions))
            if number == len(self._versions):
                self._versions.append(version)
            self._number_by_id[id(version)] = number
        return number

    def artifacts(self, held: _Numbers) -> Artifacts:
        sets = frozenset(held[0]), frozenset(held[1])
        found = self._artifacts.get(sets)
        if found is None:
            snapshots, deltas = (frozenset(self._versions[number] for number in each) for each in sets)
            found = self._artifacts[sets] = Artifacts(snapshots, deltas)
        return found


def remote_inventory(spec: JobSpec, reports: Iterable[Report]) -> RemoteInventory:
    """Returns what the sidecars together report of the remote tier."""
    if spec.remote is None:
        return RemoteInventory(configured=False)
    known = list(reports)
    remotes = [report.remote for report in known if report.remote.configured]
    # A bad object in the store has no worker; its version must not be chosen again.
    bad = {
        entry.version
        for report in known
        for entry in report.quarantined
        if entry.worker < 0 and entry.kind is Kind.SNAPSHOT
    }
    reachable: bool | None = None
    if any(entry.reachable for entry in remotes):
        reachable = True
    elif remotes and all(entry.reachable is False for entry in remotes):
        reachable = False
    versions: Collection[Version] = {
        version for entry in remotes if entry.reachable for version in entry.versions if version not in bad
    }
    ranks = {
        version: count
        for entry in remotes
        if len(entry.ranks) == len(entry.versions)
        for version, count in zip(entry.versions, entry.ranks, strict=True)
        if count
    }
    return RemoteInventory(configured=True, reachable=reachable, versions=versions, ranks=ranks)


def find_remote_trouble(reports: Iterable[Report]) -> Problem:
    """Returns why sidecars cannot use the remote tier; another owner takes precedence over other problems."""
    known = list(reports)
    found = [each for report in known for each in report.problems if each.reason.startswith("Remote")]
    found = [each for each in found if each.reason != conditions.REMOTE_NOT_SAFE]
    found += [
        Problem(f"Remote{said[1]}" if said[1] else conditions.REMOTE_UNREACHABLE, said[2])
        for said in (_SAID_OF_REMOTE.match(report.remote.message) for report in known)
        if said and said[2]
    ]
    nothing = Problem(
        conditions.REMOTE_UNREACHABLE, "the remote tier cannot be used, and no sidecar says why."
    )
    return min(found, key=lambda problem: problem.reason != conditions.REMOTE_OWNED, default=nothing)


def to_sources(
    choices: Mapping[int, tuple[SourceChoice, ...]], members: Mapping[int, PodView]
) -> dict[int, tuple[Source, ...]]:
    """Returns the choices with addresses, without non-members. Ranks with equal choices share one tuple."""
    made: dict[tuple[SourceChoice, ...], tuple[Source, ...]] = {}
    for entries in choices.values():
        if entries not in made:
            named = (_source(choice, members) for choice in entries)
            made[entries] = tuple(source for source in named if source is not None)
    return {rank: made[entries] for rank, entries in choices.items()}


def parity_group(group: CodeGroup, members: Mapping[int, PodView]) -> ParityGroup | None:
    """Returns the group with addresses; None if a worker of it is no member or no worker keeps blocks."""
    if not group.holders or any(worker not in members for worker in group.workers):
        return None
    peers = {worker: Peer(worker, members[worker].address) for worker in group.workers}
    return ParityGroup(
        tuple(peers[worker] for worker in group.members), tuple(peers[worker] for worker in group.holders)
    )


def without_versions(
    situation: RecoveryProblem, bad: Collection[Version], *, deltas: bool = True
) -> RecoveryProblem:
    """Returns the problem without the versions in `bad`, and without any deltas unless `deltas`."""

    def left(held: Artifacts) -> Artifacts:
        return Artifacts(
            [version for version in held.snapshots if version not in bad],
            [version for version in held.deltas if version not in bad] if deltas else (),
        )

    return replace(
        situation,
        inventories=[entry.map_artifacts(left) for entry in situation.inventories],
        remote=replace(
            situation.remote,
            versions=[version for version in situation.remote.versions if version not in bad],
        ),
    )


def _source(choice: SourceChoice, members: Mapping[int, PodView]) -> Source | None:
    if isinstance(choice.group, OldGroup):
        return Source(choice.tier, parity=_old_group(choice.group, members))
    if choice.group is not None:
        group = parity_group(choice.group, members)
        return None if group is None else Source(choice.tier, parity=group)
    if choice.worker is None:
        return Source(choice.tier)
    if choice.worker not in members:
        return None
    return Source(choice.tier, Peer(choice.worker, members[choice.worker].address))


def _old_group(group: OldGroup, members: Mapping[int, PodView]) -> ParityGroup:
    def peer(worker: int | None) -> Peer:
        pod = None if worker is None else members.get(worker)
        return Peer(-1, "") if worker is None or pod is None else Peer(worker, pod.address)

    return ParityGroup(tuple(map(peer, group.members)), tuple(map(peer, group.holders)), group.ranks)


def _is_bad(worker: int, holding: Holding, quarantined: Collection[tuple[int, int, Version, Kind]]) -> bool:
    """Returns whether a holding was found bad; for a parity block, bad for any of its ranks."""
    ranks: Sequence[int] = (holding.rank,) if holding.share is None else holding.share.ranks
    return any((worker, rank, holding.version, holding.kind) in quarantined for rank in ranks)


def pose_recovery(
    spec: JobSpec, size: int, history: History, reports: Sequence[Report], groups: Sequence[CodeGroup] = ()
) -> RecoveryProblem:
    """Returns the problem of which version `size` workers can restore, according to the reports."""
    found_bad = (entry for report in reports for entry in report.quarantined if entry.everywhere)
    return RecoveryProblem(
        ranks=size * spec.procs_per_worker,
        ranks_per_worker=spec.procs_per_worker,
        history=history,
        inventories=build_inventories(reports),
        remote=remote_inventory(spec, reports),
        bad=frozenset(Artifact(entry.rank, entry.version, entry.kind) for entry in found_bad),
        groups=groups,
    )


def reports_of(obs: Observation, members: Mapping[int, PodView]) -> list[Report]:
    """Returns the newest report of each member that has one, by worker, with current worker numbers."""
    now: dict[int, int] = {}
    found = []
    for worker in sorted(members):
        report, known = obs.report(members[worker]), obs.reports.get(members[worker].uid)
        if report is None or known is None or known.report is None:
            continue
        now[known.report.worker] = worker
        found.append(report)
    if all(before == worker for before, worker in now.items()):
        return found
    return [replace(report, quarantined=tuple(_renumbered(report.quarantined, now))) for report in found]


def pods_by_their_own_index(obs: Observation, pods: Iterable[PodView]) -> dict[int, PodView]:
    """Returns the pods by the worker number that their sidecars use in the current attempt."""
    found = {}
    for pod in pods:
        known = obs.reports.get(pod.uid)
        report = known.report if known is not None else None
        follows = report is not None and report.attempt == obs.job.status.attempt and report.worker >= 0
        found[report.worker if report is not None and follows else pod.worker] = pod
    return found


def _renumbered(entries: Iterable[Quarantined], now: Mapping[int, int]) -> Iterable[Quarantined]:
    """Yields the entries with current worker numbers, without those of workers that are gone.
    Entries without a worker (the remote tier), or for all workers, are unchanged."""
    for entry in entries:
        if entry.worker < 0 or entry.everywhere:
            yield entry
        elif entry.worker in now:
            yield replace(entry, worker=now[entry.worker])


def adopted_history(remote: RemoteInventory, step: int | None, ranks: int) -> History:
    """Returns the history that accepts the version to begin from; empty if the remote tier holds none.
    `step`: the one that the user asked for; None: the newest. A later attempt takes precedence, because the
    earlier one was rolled back. `ranks`: the number of ranks of the version if the remote tier does not give
    it."""
    usable: list[Version] = [version for version in remote.usable if step is None or version.step == step]
    if not usable:
        return History()
    chosen = max(usable, key=lambda version: (version.attempt, version.step))
    return History((Branch(chosen.attempt, 0, remote.ranks.get(chosen, ranks)),))


def oldest_step(found: Iterable[JobInventory], remote: RemoteInventory) -> int | None:
    """Returns the oldest stored step, whether or not it is accepted; None if nothing is stored."""
    places = [
        kept
        for inventory in found
        for table in (inventory.own, inventory.hosted, inventory.blocks)
        for kept in table.values()
    ]
    steps = [version.step for kept in places for version in (*kept.snapshots, *kept.deltas)]
    return min([*steps, *(version.step for version in remote.versions)], default=None)
