"""From what the sidecars report to what the planner asks: who holds what, without the copies known to be bad."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from tiercheck.protocol.directive import Peer, Source, Tier
from tiercheck.protocol.report import Report
from tiercheck.protocol.version import Version
from tiercheck_operator.controller.observation import JobSpec, PodView
from tiercheck_operator.planning.inventory import Inventory, RemoteInventory, SourceChoice
from tiercheck_operator.planning.recovery import Situation


def inventories(reports: Iterable[Report]) -> list[Inventory]:
    """One per report. A copy that any sidecar found bad counts for nobody."""
    known = list(reports)
    bad = {(entry.worker, entry.rank, entry.version) for report in known for entry in report.quarantined}
    found = []
    for report in sorted(known, key=lambda report: report.worker):
        own: dict[int, set[Version]] = {}
        hosted: dict[int, set[Version]] = {}
        for holding in report.holdings:
            if (report.worker, holding.rank, holding.version) in bad:
                continue
            kind = own if holding.tier is Tier.LOCAL else hosted
            kind.setdefault(holding.rank, set()).add(holding.version)
        found.append(Inventory(report.worker, own, hosted))
    return found


def remote_inventory(spec: JobSpec, reports: Iterable[Report]) -> RemoteInventory:
    """What the sidecars see of the remote tier, taken together."""
    if spec.remote is None:
        return RemoteInventory(configured=False)
    known = list(reports)
    told = [report.remote for report in known if report.remote.configured]
    # A bad object in the store lies at no worker; its version must not be chosen again.
    bad = {entry.version for report in known for entry in report.quarantined if entry.worker < 0}
    reachable: bool | None = None
    if any(entry.reachable for entry in told):
        reachable = True
    elif told and all(entry.reachable is False for entry in told):
        reachable = False
    versions: Collection[Version] = {
        version for entry in told if entry.reachable for version in entry.versions if version not in bad
    }
    return RemoteInventory(configured=True, reachable=reachable, versions=versions)


def to_sources(
    choices: Mapping[int, tuple[SourceChoice, ...]], members: Mapping[int, PodView]
) -> dict[int, tuple[Source, ...]]:
    """With addresses; holders that are no members fall out."""
    return {
        rank: tuple(
            Source(choice.tier, None if choice.worker is None else Peer(choice.worker, members[choice.worker].ip or ""))
            for choice in entries
            if choice.worker is None or choice.worker in members
        )
        for rank, entries in choices.items()
    }


def without_versions(situation: Situation, bad: Collection[Version]) -> Situation:
    """As if nobody held `bad`."""
    return replace(
        situation,
        inventories=[
            Inventory(entry.worker, _without(entry.own, bad), _without(entry.hosted, bad))
            for entry in situation.inventories
        ],
        remote=replace(
            situation.remote, versions=[version for version in situation.remote.versions if version not in bad]
        ),
    )


def _without(held: Mapping[int, Collection[Version]], bad: Collection[Version]) -> dict[int, list[Version]]:
    return {rank: [version for version in versions if version not in bad] for rank, versions in held.items()}
