"""Defines the directive: what the controller wants of one sidecar.

It is a wanted state, not an event: the same one may be sent any number of times, and the sidecar converges to
it.

Order is kept by three numbers. An older attempt is refused. Within an attempt the phase only moves forward.
And each directive says how many the sidecar had followed when it was decided upon: what arrives after a later
one is refused.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from tiercheck.protocol.version import History, Share, Version

RESTORE_STALL = 180.0
"""Seconds without a byte after which a source of a restore is given up, if the job says nothing else. The
grace of a file server that was restarted (90 s with NFSv4) fits in, and so do all tries of a request to a
store."""


class Phase(str, Enum):
    """What the launchers may do in this attempt."""

    HOLD = "Hold"
    """Restore, and keep the training command stopped."""
    RELEASE = "Release"
    """Every rank holds the restore version: start the training command."""
    FINISH = "Finish"
    """The job is over (or suspended): flush what is owed to the remote tier, stop the command, exit."""

    @property
    def order(self) -> int:
        return _ORDER[self]


_ORDER = {phase: number for number, phase in enumerate(Phase)}


class DeltaMode(str, Enum):
    """Whether deltas are taken (`spec.checkpoint.delta.mode`)."""

    AUTO = "Auto"
    """Where the optimizer is known, or was seen, to replay exactly, and memory has room for them."""
    REPLAY = "Replay"
    """The user vouches for the optimizer; what a restore finds out to the contrary still counts."""
    NONE = "None"
    """Snapshots only."""


class Tier(str, Enum):
    """Where an artifact lies."""

    LOCAL = "local"
    PEER = "peer"
    REMOTE = "remote"


@dataclass(frozen=True)
class Peer:
    """Another worker's sidecar."""

    worker: int
    host: str
    """Address of its pod (`protocol.address`)."""


@dataclass(frozen=True)
class ParityGroup:
    """Workers whose artifacts are folded into parity: any len(`holders`) of all these workers may be lost at
    once.

    Local rank i of each member is coded with local rank i of the others.
    """

    members: tuple[Peer, ...]
    """In coding order."""
    holders: tuple[Peer, ...]
    """Who keeps the parity blocks: block j lies at holder j. Never a member."""
    ranks: tuple[int, ...] = ()
    """Of ranks that are no more (`Restore.world_size`): which ones were coded together. Then `members` are
    those who have their artifacts now, whoever they are; a peer without a host stands for nobody, among
    `holders` too."""

    def coded_with(self, rank: int, procs_per_worker: int) -> tuple[int, ...]:
        """Returns the ranks that `rank` is coded with, itself among them, in coding order."""
        if self.ranks:
            return self.ranks
        local = rank % procs_per_worker
        return tuple(member.worker * procs_per_worker + local for member in self.members)

    def shares(self, index: int, procs_per_worker: int) -> list[Share]:
        """Returns the blocks that holder `index` keeps of each version and kind: one per local rank."""
        return [Share(index, self.coded_with(local, procs_per_worker)) for local in range(procs_per_worker)]


@dataclass(frozen=True)
class Source:
    """One place a rank's artifacts can be restored from. In the peer tier either `peer` or `parity` is
    set.
    """

    tier: Tier
    peer: Peer | None = None
    parity: ParityGroup | None = None
    """Rebuild from the group's parity and from what its other members hold."""


@dataclass(frozen=True)
class SourceTable:
    """The sources of ranks that follow one another. Each place is named once. Where all workers are told of
    the same ranks, one table is written once for all of them: thousands are told of thousands, so each takes
    few bytes.
    """

    workers: tuple[int, ...]
    """Peers that artifacts can be restored from: the first places."""
    hosts: tuple[str, ...]
    """Their addresses."""
    others: tuple[Source, ...]
    """The places after those, which are no single peer."""
    runs: tuple[tuple[int, ...], ...]
    """Ranks that follow one another and are found in the same places: how many, and the number of each place,
    nearest first."""
    first: int = 0
    """The rank that `runs` begin with."""

    @staticmethod
    def of(sources: Mapping[int, tuple[Source, ...]], ranks: range) -> SourceTable:
        """Of these ranks; one that `sources` does not know has none."""
        runs = [
            (named, sum(1 for _ in run))
            for named, run in itertools.groupby(sources.get(rank, ()) for rank in ranks)
        ]
        places = dict.fromkeys(source for named, _ in runs for source in named)
        peers = {
            source: source.peer
            for source in places
            if source.peer and source == Source(Tier.PEER, source.peer)
        }
        others = [source for source in places if source not in peers]
        number = {source: place for place, source in enumerate((*peers, *others))}
        return SourceTable(
            tuple(peer.worker for peer in peers.values()),
            tuple(peer.host for peer in peers.values()),
            tuple(others),
            tuple((many, *(number[source] for source in named)) for named, many in runs),
            ranks.start,
        )

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(max(0, run[0]) if run else 0 for run in self.runs))

    def of_rank(self, rank: int) -> tuple[Source, ...]:
        """Nearest first; none of a rank that it does not have, and no place that is not there."""
        number = bisect.bisect_right(self._ends, rank - self.first)
        if rank < self.first or number == len(self.runs):
            return ()
        return tuple(source for place in self.runs[number][1:] if (source := self._place(place)) is not None)

    def _place(self, number: int) -> Source | None:
        peers = min(len(self.workers), len(self.hosts))
        if 0 <= number < peers:
            return Source(Tier.PEER, Peer(self.workers[number], self.hosts[number]))
        return self.others[number - peers] if peers <= number < peers + len(self.others) else None


NO_SOURCES = SourceTable((), (), (), ())


@dataclass(frozen=True)
class Restore:
    """Bring every local rank to `version`: a snapshot, and the deltas after it, each from the nearest source
    that has it."""

    version: Version
    table: SourceTable
    """Of the local ranks; with `world_size`, of all that saved the version."""
    world_size: int = 0
    """Ranks that saved the version, if they are others than there are now: then it is a snapshot, and each
    rank borrows what it needs. 0: as many as now."""
    base: Version | None = None
    """The snapshot that all ranks begin from: replicas put its parts together. None: each has its own."""


@dataclass(frozen=True)
class HangLimits:
    """When a rank that makes no step counts as hung."""

    steps: float
    """Times the usual duration of a step; and at least"""
    seconds: float
    """so long, so that evaluations and the like fit in."""
    first_step: float | None = None
    """Seconds that the first step of an attempt may take; None: any time, as not every script reports steps.
    """


@dataclass(frozen=True)
class HealthCheck:
    """What a worker's place has to pass before each start of the training command there."""

    command: tuple[str, ...]
    """Run as it is in the trainer's container, with the environment of the training command. Exit code 0: it
    passed."""
    seconds: float
    """How long it may take; then it has failed."""


@dataclass(frozen=True)
class Policy:
    """The part of the job's spec that may change while it runs."""

    snapshot_every: int | None
    """Steps between snapshots; None: chosen from the sizes (`tiercheck_sidecar.model.tier_verdict`)."""
    remote_every: int
    """Steps between snapshots that also go to the remote tier."""
    remote_keep: int
    """Versions kept in the remote tier."""
    remote_bandwidth: int | None = None
    """Bytes per second for this worker's uploads; None: not limited."""
    remote_keep_seconds: float | None = None
    """Versions younger than this are kept as well, however many they are; None: only the count decides."""
    peer_bandwidth: int | None = None
    """Bytes per second that this worker sends to its holders; None: not limited."""
    peer_encrypted: bool = False
    """Whether what sidecars say to each other is enciphered; it is authenticated in any case."""
    peer_interfaces: tuple[str, ...] = ()
    """Names or CIDRs of the interfaces that sidecars use for copies beside the pod's address; they tell each
    other which addresses these are."""
    peer_ucx: bool = False
    """Whether UCX carries copies, between sidecars that have its library; else TCP does."""
    delta: DeltaMode = DeltaMode.AUTO
    sanity_gate: bool = True
    """Refuse artifacts of a state or a gradient that is not finite."""
    verify_all: bool = False
    """Compare every byte of a snapshot with the state before the next update."""
    hang: HangLimits | None = None
    """None: nothing counts as hung."""
    rehearse_every: float | None = None
    """Seconds between two proofs that the newest version of a tier would come back; None: none are made."""
    health_check: HealthCheck | None = None
    """None: every place is good enough."""
    restore_stall: float = RESTORE_STALL
    """Seconds without a byte after which a source of a restore is given up."""
    prove_steps: int = 0
    """Steps behind the newest complete version to which the job may go back, so that they are compared."""
    interrupt_seconds: float = 0.0
    """How long the ranks of the attempt before may take to leave their step, so that their processes stay; 0:
    every process is started anew."""

    @property
    def deltas(self) -> bool:
        """Whether any are taken."""
        return self.delta is not DeltaMode.NONE


@dataclass(frozen=True)
class Directive:
    """The wanted state of one sidecar."""

    job_uid: str
    worker: int
    workers: int
    procs_per_worker: int
    attempt: int
    phase: Phase
    history: History
    policy: Policy
    restore: Restore | None
    """None: start from scratch."""
    holders: tuple[Peer, ...]
    """Who keeps copies of this worker's artifacts."""
    hosted: tuple[Peer, ...]
    """Whose artifacts this worker keeps copies of."""
    coordinator: Peer
    """Worker 0, which publishes the watermarks."""
    master_host: str
    master_port: int
    """Rendezvous of the training processes of this attempt."""
    parity: ParityGroup | None = None
    """The group that this worker's artifacts are coded with; then it has no `holders`."""
    folded: tuple[ParityGroup, ...] = ()
    """Groups that this worker is a holder of."""
    pod_uid: str = ""
    """Of the pod that is meant. Only by it a sidecar knows for certain that it is to be another worker from
    now on, and that it is not addressed as whoever had its address before."""
    exit_code: int = 0
    """With Finish: what the launcher exits with. Other than zero only for an attached job that failed, whose
    owner must see it."""
    placement: str = ""
    """Digest of who keeps what for whom in the whole job. Holders may change within an attempt; what was said
    of other ones then counts no more."""
    revision: str = ""
    """Digest of the above, chosen by the controller; the sidecar echoes it in its report."""
    instance: str = ""
    """`Report.instance` of the process that is meant: one that is started again counts anew."""
    number: int = 0
    """One more than `Report.followed` was when this was decided upon."""
    joins: bool = False
    """Some ranks keep their processes, and those that start now join them: with Hold as it seems."""
    signature: str = ""
    """The operator's, of the attempt (`protocol.signing`): by it those believe it who are not told."""
