"""Holds what a simulation is played with: places, protection, failures and the time of the way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tiercheck_operator.planning.placement.placement import Placement
from tiercheck_operator.planning.placement.problem import WorkerSite
from tiercheck_operator.planning.recovery.recovery import RestoreSeconds
from tiercheck_operator.planning.topology import Topology

PROCESS, POD = "process", "pod"
"""Kinds of failure beside the topology levels: the first costs no memory, the second that of one worker."""


@dataclass(frozen=True)
class FailureRates:
    """Failures per hour; independent and without memory (Poisson)."""

    process: float = 0.0
    """Of one worker's training command, with its pod and its memory left in place."""
    pod: float = 0.0
    """Of one worker's pod, with its memory: evictions, deletions, moves."""
    domains: Mapping[str, float] = field(default_factory=dict)
    """By topology level: of one domain of that level, with every node in it. "host" is the single node."""


@dataclass(frozen=True)
class RecoveryTimes:
    """Seconds of each part of a recovery."""

    detect: float = 5.0
    """Until the controller acts."""
    restore: RestoreSeconds = field(default_factory=RestoreSeconds)
    """Until every rank has its state, by the farthest tier that any needs."""
    restart: float = 30.0
    """Until the first step, with the state in place: rendezvous, communicators, compilation."""
    spare: float = 5.0
    """Until a warm spare stands in for a lost worker."""
    replace: float = 300.0
    """Until a lost worker has a new pod on another node, where no spare is left."""
    repair: float = 86400.0
    """Until a spare that was used has a successor."""
    protect: float = 30.0
    """After a recovery, until all copies are complete again."""
    kinds: Mapping[str, RecoveryTimes] = field(default_factory=dict)
    """By kind of failure: "process", "pod" or a topology level. Others take as long as above."""

    def of(self, kind: str) -> RecoveryTimes:
        """After a failure of that kind."""
        return self.kinds.get(kind, self)

    def changed(self, change: Callable[[RecoveryTimes], RecoveryTimes]) -> RecoveryTimes:
        """The same change of every kind's times."""
        return change(replace(self, kinds={kind: change(times) for kind, times in self.kinds.items()}))

    @staticmethod
    def of_sizes(worker_bytes: int, peer_bandwidth: float, remote_bandwidth: float) -> RecoveryTimes:
        """With times to restore and to protect from a worker's snapshot bytes and bytes per second."""
        peer, remote = worker_bytes / peer_bandwidth, worker_bytes / remote_bandwidth
        usual = RestoreSeconds()
        restore = RestoreSeconds(usual.local, usual.local + peer, usual.local + remote)
        return RecoveryTimes(protect=peer, restore=restore)


@dataclass(frozen=True)
class Saving:
    """What is saved how often, in steps."""

    snapshot_every: int = 10
    deltas: bool = True
    """A delta at every step: the newest state is never older than the last step."""
    peer_lag: int = 1
    """Steps until what was saved is at all holders."""
    remote_every: int | None = None
    """None: no remote tier."""
    remote_lag: int = 0
    """Steps until an upload is complete."""

    def local(self, step: int) -> int:
        """The newest step that own memory leads to, when `step` was trained."""
        return step if self.deltas else step - step % self.snapshot_every

    def peer(self, step: int) -> int:
        """The newest step that is at all holders."""
        arrived = max(0, step - self.peer_lag)
        return arrived if self.deltas else arrived - arrived % self.snapshot_every

    def remote(self, step: int) -> int:
        """The newest step in the remote tier; 0: none."""
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
        """By domain of that level, in order: the workers in it. Whose domain is unknown is in none."""
        found: dict[str, list[int]] = {}
        for site in self.sites:
            domain = self.topology.domain(site.node, level)
            if domain is not None:
                found.setdefault(domain, []).append(site.worker)
        return {domain: tuple(sorted(found[domain])) for domain in sorted(found)}
