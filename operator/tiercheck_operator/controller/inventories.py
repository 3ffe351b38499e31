"""From what the sidecars report to what the planner asks: who holds what, without the copies known to be bad."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from tiercheck.protocol.artifact import Artifact, Kind, Share
from tiercheck.protocol.directive import ParityGroup, Peer, Source, Tier
from tiercheck.protocol.report import Holding, Report
from tiercheck.protocol.version import Version
from tiercheck_operator.model.observed import PodView
from tiercheck_operator.model.spec import JobSpec
from tiercheck_operator.planning.code_group import CodeGroup, OldGroup
from tiercheck_operator.planning.inventory import Artifacts, Inventory, RemoteInventory, SourceChoice
from tiercheck_operator.planning.recovery import Situation

_Table = dict[int, tuple[set[Version], set[Version]]]


def inventories(reports: Iterable[Report]) -> list[Inventory]:
    """One per report. A copy that any sidecar found bad counts for nobody."""
    known = list(reports)
    quarantined = {
        (entry.worker, entry.rank, entry.version, entry.kind) for report in known for entry in report.quarantined
    }
    same: dict[Version, Version] = {}
    found = []
    for report in sorted(known, key=lambda report: report.worker):
        own: _Table = {}
        hosted: _Table = {}
        blocks: dict[Share, tuple[set[Version], set[Version]]] = {}
        for holding in report.holdings:
            if quarantined and _is_bad(report.worker, holding, quarantined):
                continue
            held = (
                blocks.setdefault(holding.share, (set(), set()))
                if holding.share is not None
                else (own if holding.tier is Tier.LOCAL else hosted).setdefault(holding.rank, (set(), set()))
            )
            version = same.setdefault(holding.version, holding.version)
            held[0 if holding.kind is Kind.SNAPSHOT else 1].add(version)
        found.append(
            Inventory(
                report.worker,
                {rank: _artifacts(held) for rank, held in own.items()},
                {rank: _artifacts(held) for rank, held in hosted.items()},
                {share: _artifacts(held) for share, held in blocks.items()},
            )
        )
    return found


def bad_everywhere(reports: Iterable[Report]) -> frozenset[Artifact]:
    """Artifacts that are useless wherever they lie: their replay did not give the state that they were taken from."""
    return frozenset(
        Artifact(entry.rank, entry.version, entry.kind)
        for report in reports
        for entry in report.quarantined
        if entry.everywhere
    )


def elementwise(reports: Iterable[Report]) -> bool:
    """Whether deltas can be replayed on other ranks: some sidecar heard so from its trainers, and none the contrary."""
    told = [report.elementwise for report in reports if report.elementwise is not None]
    return bool(told) and all(told)


def remote_inventory(spec: JobSpec, reports: Iterable[Report]) -> RemoteInventory:
    """What the sidecars see of the remote tier, taken together."""
    if spec.remote is None:
        return RemoteInventory(configured=False)
    known = list(reports)
    told = [report.remote for report in known if report.remote.configured]
    # A bad object in the store lies at no worker; its version must not be chosen again.
    bad = {
        entry.version
        for report in known
        for entry in report.quarantined
        if entry.worker < 0 and entry.kind is Kind.SNAPSHOT
    }
    reachable: bool | None = None
    if any(entry.reachable for entry in told):
        reachable = True
    elif told and all(entry.reachable is False for entry in told):
        reachable = False
    versions: Collection[Version] = {
        version for entry in told if entry.reachable for version in entry.versions if version not in bad
    }
    ranks = {
        version: count
        for entry in told
        if len(entry.ranks) == len(entry.versions)
        for version, count in zip(entry.versions, entry.ranks, strict=True)
        if count
    }
    return RemoteInventory(configured=True, reachable=reachable, versions=versions, ranks=ranks)


def to_sources(
    choices: Mapping[int, tuple[SourceChoice, ...]], members: Mapping[int, PodView]
) -> dict[int, tuple[Source, ...]]:
    """With addresses; places that are no members fall out."""
    return {
        rank: tuple(source for source in (_source(choice, members) for choice in entries) if source is not None)
        for rank, entries in choices.items()
    }


def parity_group(group: CodeGroup, members: Mapping[int, PodView]) -> ParityGroup | None:
    """With addresses; None if somebody of it is no member now, or nobody keeps its blocks."""
    if not group.holders or any(worker not in members for worker in group.workers):
        return None
    peers = {worker: Peer(worker, members[worker].address) for worker in group.workers}
    return ParityGroup(
        tuple(peers[worker] for worker in group.members), tuple(peers[worker] for worker in group.holders)
    )


def without_versions(situation: Situation, bad: Collection[Version], *, deltas: bool = True) -> Situation:
    """As if nobody held `bad`; without `deltas`, as if there were snapshots only."""

    def left(held: Artifacts) -> Artifacts:
        return Artifacts(
            [version for version in held.snapshots if version not in bad],
            [version for version in held.deltas if version not in bad] if deltas else (),
        )

    return replace(
        situation,
        inventories=[
            Inventory(
                entry.worker,
                {rank: left(held) for rank, held in entry.own.items()},
                {rank: left(held) for rank, held in entry.hosted.items()},
                {share: left(held) for share, held in entry.blocks.items()},
            )
            for entry in situation.inventories
        ],
        remote=replace(
            situation.remote, versions=[version for version in situation.remote.versions if version not in bad]
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
    return (
        Source(choice.tier, Peer(choice.worker, members[choice.worker].address)) if choice.worker in members else None
    )


def _old_group(group: OldGroup, members: Mapping[int, PodView]) -> ParityGroup:
    def peer(worker: int | None) -> Peer:
        pod = None if worker is None else members.get(worker)
        return Peer(-1, "") if worker is None or pod is None else Peer(worker, pod.address)

    return ParityGroup(tuple(map(peer, group.members)), tuple(map(peer, group.holders)), group.ranks)


def _is_bad(worker: int, holding: Holding, quarantined: Collection[tuple[int, int, Version, Kind]]) -> bool:
    """Of a parity block: whichever of its ranks it was found bad for."""
    ranks: Sequence[int] = (holding.rank,) if holding.share is None else holding.share.ranks
    return any((worker, rank, holding.version, holding.kind) in quarantined for rank in ranks)


def _artifacts(held: tuple[set[Version], set[Version]]) -> Artifacts:
    return Artifacts(frozenset(held[0]), frozenset(held[1]))
