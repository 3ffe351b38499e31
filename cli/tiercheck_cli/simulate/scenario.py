"""Holds the inputs of a simulation, and derives its times from recoveries reported in job statuses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from tiercheck.protocol import names
from tiercheck.protocol.directive import Tier
from tiercheck_cli.events import PastRecovery, recoveries
from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_cli.layout import documents, workers_by_domain
from tiercheck_operator.planning.placement.placement import Placement
from tiercheck_operator.planning.placement.problem import WorkerSite
from tiercheck_operator.planning.recovery.recovery import RestoreSeconds
from tiercheck_operator.planning.topology import Topology

PROCESS, POD = "process", "pod"
"""Kinds of failure beside topology levels: the first costs no memory, the second that of one worker."""


@dataclass(frozen=True)
class FailureRates:
    """Failures per hour; independent and without memory (Poisson)."""

    process: float = 0.0
    """Failures of one worker's training command that leave its pod and its memory in place."""
    pod: float = 0.0
    """Losses of one worker's pod with its memory: evictions, deletions, moves."""
    domains: Mapping[str, float] = field(default_factory=dict)
    """Losses of one domain with every node in it, by topology level. "host" is the single node."""


@dataclass(frozen=True)
class RecoveryTimes:
    """Seconds of each part of a recovery."""

    detect: float = 5.0
    restore: RestoreSeconds = field(default_factory=RestoreSeconds)
    """Seconds until every rank has its state, by the farthest tier that any needs."""
    restart: float = 30.0
    """Seconds from the restored state to the first step: rendezvous, communicators, compilation."""
    spare: float = 5.0
    """Seconds until a warm spare replaces a lost worker."""
    replace: float = 300.0
    """Seconds until a lost worker has a new pod on another node, if no spare is left."""
    repair: float = 86400.0
    """Seconds until a used spare has a successor."""
    protect: float = 30.0
    """Seconds after a recovery until all copies are complete again."""
    kinds: Mapping[str, RecoveryTimes] = field(default_factory=dict)
    """Times by kind of failure: "process", "pod" or a topology level. Others take as long as above."""

    def of(self, kind: str) -> RecoveryTimes:
        """Returns the times after a failure of that kind."""
        return self.kinds.get(kind, self)

    def changed(self, change: Callable[[RecoveryTimes], RecoveryTimes]) -> RecoveryTimes:
        """Applies the same change to the times of every kind."""
        return change(replace(self, kinds={kind: change(times) for kind, times in self.kinds.items()}))

    def carrying(self, worker_bytes: int, peer_bandwidth: float, remote_bandwidth: float) -> RecoveryTimes:
        """Adds the transfer of a worker's snapshot, by bytes and bytes per second, to stateless times."""
        peer, remote = worker_bytes / peer_bandwidth, worker_bytes / remote_bandwidth
        bare = self.restore
        return replace(
            self, protect=peer, restore=replace(bare, peer=bare.peer + peer, remote=bare.remote + remote)
        )


NO_STATE = RecoveryTimes(restore=RestoreSeconds(2.0, 2.0, 2.0))
"""Recovery times with a state that takes no time to transfer."""


@dataclass(frozen=True)
class Saving:
    """The intervals and delays of saves, in steps."""

    snapshot_every: int = 10
    deltas: bool = True
    """True for a delta at every step: the newest state is never older than the last step."""
    peer_lag: int = 1
    """Steps until a save is at all holders."""
    remote_every: int | None = None
    """Steps between remote versions; None: no remote tier."""
    remote_lag: int = 0
    """Steps until an upload is complete."""

    def local(self, step: int) -> int:
        """Returns the newest step that own memory can restore when `step` was trained."""
        return step if self.deltas else step - step % self.snapshot_every

    def peer(self, step: int) -> int:
        """Returns the newest step that is at all holders."""
        arrived = max(0, step - self.peer_lag)
        return arrived if self.deltas else arrived - arrived % self.snapshot_every

    def remote(self, step: int) -> int:
        """Returns the newest step in the remote tier; 0: none."""
        if self.remote_every is None:
            return 0
        stored = max(0, step - self.remote_lag)
        return stored - stored % self.remote_every


@dataclass(frozen=True)
class Scenario:
    """One job on one cluster."""

    sites: Sequence[WorkerSite]
    topology: Topology
    placement: Placement
    spares: int = 0
    step_seconds: float = 1.0
    saving: Saving = field(default_factory=Saving)
    times: RecoveryTimes = field(default_factory=RecoveryTimes)
    rates: FailureRates = field(default_factory=FailureRates)

    def domains(self, level: str) -> dict[str, tuple[int, ...]]:
        return workers_by_domain(self.sites, self.topology, level)


NODE, DOMAIN, ALL = "node", "domain", "all"
"""Kinds that a simulation names by topology level; ALL is the loss of all pods at once."""

CAUSES: Mapping[str, tuple[str, ...]] = {
    PROCESS: ("TrainerCrash", "OOMKilled", "StepSuspected"),
    POD: (
        "NodeLeaving", "PodDeleted", "PodFailed", "PodEvicted", "GPUFault", "StartFailed", "Stuck",
        "HealthCheckFailed", "StepDiffered", "StorageExceeded",
    ),
    NODE: ("SidecarSilent", "NodeSilent", "NodeLost"),
    DOMAIN: ("DomainLost",),
    ALL: ("AllPodsLost",),
}  # fmt: skip
_KINDS = {cause: kind for kind, causes in CAUSES.items() for cause in causes}
KINDS = tuple(CAUSES)
"""The kinds of failure, from the smallest loss to the largest.

Hangs, rollbacks and restores that failed are of none: the limits of the job determine how long they take."""
_ALIKE: Mapping[str, tuple[str, ...]] = {
    PROCESS: (),
    POD: (NODE, DOMAIN, ALL),
    NODE: (POD, DOMAIN, ALL),
    DOMAIN: (NODE, POD, ALL),
    ALL: (DOMAIN, NODE, POD),
}
"""The kinds after which pods come back much as after each kind, the most similar first."""
_SILENT_LIKE: Mapping[str, str] = {DOMAIN: NODE, NODE: DOMAIN, ALL: DOMAIN}
"""The kind that is noticed in the same way as each kind."""


@dataclass(frozen=True)
class MeasuredRecovery:
    """A recovery reported in a status. Times are in seconds."""

    kind: str
    recovery: PastRecovery
    """The recovery. Its restore time includes the wait for new pods if some were lost."""
    restart: float
    """Seconds from the restored state to the beginning of the first new step."""
    spared: bool = False
    """True if the job keeps spares, so that lost pods had a successor at once."""


@dataclass(frozen=True)
class MeasuredTimes:
    """The mean times of measured recoveries."""

    times: RecoveryTimes
    """The times by `KINDS`; `for_levels` gives them a simulation's names."""
    counts: Mapping[str, int]
    derived: tuple[str, ...]
    """The sources of the parts that none of the recoveries measured, as sentences."""

    def for_levels(self, levels: Sequence[str]) -> RecoveryTimes:
        """Returns the times by topology level. `levels`: names from the widest to the single node."""
        kinds = self.times.kinds
        named = {PROCESS: kinds[PROCESS], POD: kinds[POD], ALL: kinds[ALL]}
        named |= dict.fromkeys(levels[:-1], kinds[DOMAIN])
        return replace(self.times, kinds=named | {levels[-1]: kinds[NODE]})


def jobs_in(paths: Sequence[str]) -> list[Mapping[str, Any]]:
    """Reads `kubectl get tcj -o json` (or yaml), one job or a list in each file. Raises CannotDo."""
    found: list[Mapping[str, Any]] = []
    for path in paths:
        before = len(found)
        for document in documents(path):
            items = document.get("items")
            entries = items if isinstance(items, list) else [document]
            found += [each for each in entries if isinstance(each, dict) and each.get("kind") == names.KIND]
        if len(found) == before:
            raise CannotDo(f"{path} holds no {names.KIND}; make it with: kubectl get tcj -o json", USAGE)
    return found


def describe_restore(restore: RestoreSeconds) -> str:
    """Returns the seconds of a restore from each tier, as a sentence."""
    return (
        f"restores take {restore.local:.3g} s from own memory, {restore.peer:.3g} s from a peer, "
        f"{restore.remote:.3g} s from the remote tier"
    )


def times_of(
    jobs: Sequence[Mapping[str, Any]], usual: RecoveryTimes, overrides: Mapping[str, Any], topology: Topology
) -> tuple[RecoveryTimes, tuple[str, ...]]:
    """Returns (times, their sources as sentences); without any recovery, `usual` times and no sentence.

    Parts that are assumed explicitly are the same for every kind of failure, whatever was measured."""
    past = measured_recoveries(jobs)
    if not past:
        return usual.changed(lambda each: replace(each, **overrides)), ()
    found = measure(past, usual)
    times = found.for_levels(topology.level_names).changed(lambda each: replace(each, **overrides))
    whose = ", ".join(dict.fromkeys(str((job.get("metadata") or {}).get("name") or "a job") for job in jobs))
    count = len(past)
    lines = [
        f"{count} recover{'y' if count == 1 else 'ies'} of {whose} (means; all of it stands for this size)"
    ]
    for kind, number in found.counts.items():
        own = found.times.kinds[kind]
        wait = "" if kind == PROCESS else f", a successor after {own.replace:.1f} s"
        lines.append(
            f"{number} x {kind}: noticed after {own.detect:.1f} s{wait}, the first step {own.restart:.1f} s "
            "after the state"
        )
    lines.append(describe_restore(times.restore))
    assumed = ", ".join(f"{key} {value:g} s" for key, value in overrides.items())
    return times, (*lines, *found.derived, *([f"assumed: {assumed}"] if assumed else []))


def measured_recoveries(jobs: Iterable[Any]) -> tuple[MeasuredRecovery, ...]:
    """Reads the recoveries of jobs as the API returns them; an invalid job is left out."""
    found: list[MeasuredRecovery] = []
    for job in jobs:
        with contextlib.suppress(ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            found += _read(job)
    return tuple(found)


def _read(job: Mapping[str, Any]) -> list[MeasuredRecovery]:
    status, spec = job["status"], job.get("spec") or {}
    step = max(0.0, float((status.get("progress") or {}).get("stepSeconds") or 0.0))
    spared = bool((status.get("spares") or {}).get("wanted") or spec.get("spares"))
    return [
        MeasuredRecovery(_KINDS[each.cause], each, max(0.0, each.start - step), spared)
        for each in recoveries(job)
        if each.cause in _KINDS
        and each.total
        and all(0 <= span < 1e9 for span in (each.detect, each.restore, each.total))
    ]


def measure(past: Sequence[MeasuredRecovery], usual: RecoveryTimes) -> MeasuredTimes:
    """Averages the recoveries of each kind; `usual` times replace those without a measurement."""
    by_kind = {kind: [each for each in past if each.kind == kind] for kind in KINDS}
    derived: list[str] = []
    in_place = [each.recovery.restore for each in by_kind[PROCESS] if each.recovery.farthest is Tier.LOCAL]
    local = fmean(in_place) if in_place else usual.restore.local
    if not in_place:
        derived.append(f"restore from own memory: {local:.3g} s, assumed")
    # A peer's copy takes time to transfer, at most that of the shortest restore from a peer that was seen.
    carried = max(0.0, usual.restore.peer - usual.restore.local)
    seen = [each.recovery.restore for each in past if each.recovery.farthest is Tier.PEER]
    peer = min([local + carried, *seen])
    waits = {
        (kind, spared): fmean(found)
        for kind in KINDS[1:]
        for spared in (False, True)
        if (found := _waits(by_kind[kind], spared, local, peer))
    }
    remote = usual.restore.remote
    far = [
        max(local, each.recovery.restore - _wait(each.kind, each.spared, waits))
        for each in past
        if each.recovery.farthest is Tier.REMOTE
    ]
    if far:
        remote = fmean(far)
    else:
        derived.append(f"restore from the remote tier: {remote:.3g} s, assumed")
    kinds = {}
    for kind in KINDS:
        own = by_kind[kind]
        like = next((each for each in (kind, *_ALIKE[kind], *KINDS) if by_kind[each]), None)
        restart = fmean(each.restart for each in by_kind[like]) if like else usual.restart
        noticed = own or by_kind.get(_SILENT_LIKE.get(kind, ""), [])
        detect = fmean(each.recovery.detect for each in noticed) if noticed else usual.detect
        successor = _wait(kind, False, waits, usual.replace)
        kinds[kind] = replace(
            usual,
            detect=detect,
            restart=restart,
            restore=RestoreSeconds(local, peer, remote),
            replace=successor,
            spare=min(successor, _wait(kind, True, waits, usual.spare)),
            kinds={},
        )
        if not own:
            first = f"noticed after {detect:.3g} s, {'as there' if noticed else 'assumed'}"
            derived.append(f"{kind}: as for {like}; {first}" if like else f"{kind}: assumed")
    if not any((kind, False) in waits for kind in KINDS):
        derived.append(f"a lost pod's successor: {usual.replace:.3g} s, assumed")
    if waits:
        derived.append(
            f"of a restore with a lost pod, {peer:.3g} s are taken for the state, the rest for its successor"
        )
    times = replace(kinds[NODE], kinds=kinds)
    return MeasuredTimes(
        times, {kind: len(found) for kind, found in by_kind.items() if found}, tuple(derived)
    )


def _waits(found: Sequence[MeasuredRecovery], spared: bool, local: float, peer: float) -> list[float]:
    """Returns the waits for successors in the restores from memory."""
    taken = {Tier.LOCAL: local, Tier.PEER: peer}
    return [
        max(0.0, each.recovery.restore - taken[tier])
        for each in found
        if each.spared is spared and (tier := each.recovery.farthest) in taken and tier is not None
    ]


def _wait(kind: str, spared: bool, waits: Mapping[tuple[str, bool], float], otherwise: float = 0.0) -> float:
    return next((waits[each, spared] for each in (kind, *_ALIKE[kind]) if (each, spared) in waits), otherwise)
