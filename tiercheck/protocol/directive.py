"""Defines the directive: the state that the controller requests of one sidecar.

It is a desired state, not an event: it may be sent any number of times, and the sidecar converges to it.

Three numbers keep the order. An older attempt is refused. Within an attempt the phase only moves forward.
Each directive carries the number of directives that the sidecar had followed when it was decided on, so one
that arrives after a later one is refused.
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
"""Seconds without a byte after which a restore gives up a source; the default for a job.

It exceeds the grace period of a restarted file server (90 s with NFSv4) and all tries of a request to a
store."""


class Phase(str, Enum):
    """The phase of an attempt, which determines what the launchers may do."""

    HOLD = "Hold"
    """Ranks are restored, and the training command stays stopped."""
    RELEASE = "Release"
    """Every rank holds the restore version: the training command is started."""
    FINISH = "Finish"
    """The job is over or suspended: finish pending uploads to the remote tier, stop the command, exit."""

    @property
    def order(self) -> int:
        return list(Phase).index(self)


class DeltaMode(str, Enum):
    """The condition under which deltas are taken (`spec.checkpoint.delta.mode`)."""

    AUTO = "Auto"
    """Deltas if the optimizer is known, or was observed, to replay exactly, and memory has room."""
    REPLAY = "Replay"
    """Deltas because the user asserts exact replay; a mismatch found by a restore still counts."""
    NONE = "None"
    """Snapshots only."""


class Tier(str, Enum):
    """The tier in which an artifact is stored."""

    LOCAL = "local"
    PEER = "peer"
    REMOTE = "remote"


@dataclass(frozen=True)
class Peer:
    """The sidecar of another worker."""

    worker: int
    host: str
    """The address of its pod (`tiercheck.protocol.names.join_address`)."""


@dataclass(frozen=True)
class ParityGroup:
    """A group of workers with artifacts coded into parity. Any len(`holders`) of them may be lost at once.

    Local rank i of each member is coded with local rank i of the others.
    """

    members: tuple[Peer, ...]
    """The members in coding order."""
    holders: tuple[Peer, ...]
    """The workers that keep the parity blocks: holder j has block j. Never a member."""
    ranks: tuple[int, ...] = ()
    """The ranks coded together, if they are of an earlier world size (`Restore.world_size`).

    `members` are then the workers that have their artifacts; a peer without a host, also among `holders`,
    is a missing worker."""

    def coded_with(self, rank: int, procs_per_worker: int) -> tuple[int, ...]:
        """Returns the ranks that `rank` is coded with, including itself, in coding order."""
        if self.ranks:
            return self.ranks
        local = rank % procs_per_worker
        return tuple(member.worker * procs_per_worker + local for member in self.members)

    def shares(self, index: int, procs_per_worker: int) -> list[Share]:
        """Returns the blocks that holder `index` keeps of each version and kind: one per local rank."""
        return [Share(index, self.coded_with(local, procs_per_worker)) for local in range(procs_per_worker)]


@dataclass(frozen=True)
class Source:
    """A place from which a rank's artifacts can be restored; `peer` or `parity` is set in the peer tier."""

    tier: Tier
    peer: Peer | None = None
    parity: ParityGroup | None = None
    """The group from which to rebuild: its parity and the artifacts of its other members."""


@dataclass(frozen=True)
class SourceTable:
    """The sources of consecutive ranks, in few bytes: each place is named once.

    If all workers need the same ranks, one table is encoded once for all. With thousands of workers, each
    table may describe thousands of ranks."""

    workers: tuple[int, ...]
    """The workers of the peers that are sources: the first places."""
    hosts: tuple[str, ...]
    """The addresses of these peers."""
    others: tuple[Source, ...]
    """The further places, which are not single peers."""
    runs: tuple[tuple[int, ...], ...]
    """Runs of consecutive ranks with the same places: the number of ranks, then the places, nearest first."""
    first: int = 0

    @staticmethod
    def of(sources: Mapping[int, tuple[Source, ...]], ranks: range) -> SourceTable:
        """Builds the table for `ranks`; a rank missing in `sources` has no source."""
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
        """Returns a rank's sources, nearest first; none for an unknown rank or an invalid place."""
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
    """A request to restore every local rank to `version`: a snapshot, and the deltas after it.

    Each artifact comes from the nearest source that has it."""

    version: Version
    table: SourceTable
    """The sources of the local ranks; with `world_size`, of all ranks that saved the version."""
    world_size: int = 0
    """The number of ranks that saved the version, if it differs from the present one; else 0.

    The version is then a snapshot, and each rank reads what it needs of it."""
    base: Version | None = None
    """The snapshot that all ranks start from, combined from replicas' parts. None: each has its own."""


@dataclass(frozen=True)
class HangLimits:
    """The limits beyond which a rank that makes no step counts as hung."""

    steps: float
    """The limit as a multiple of the usual step duration."""
    seconds: float
    """Seconds. The least limit, so that evaluations and similar pauses fit in."""
    first_step: float | None = None
    """Seconds that the first step may take; None: no limit, as not every script reports steps."""


@dataclass(frozen=True)
class HealthCheck:
    """The check that a worker must pass before each start of its training command."""

    command: tuple[str, ...]
    """The command, run as it is in the trainer container with the training command's environment.

    Exit code 0: the check passed."""
    seconds: float
    """Seconds after which the check has failed."""


@dataclass(frozen=True)
class Policy:
    """The part of the job's spec that may change while it runs, as crds/tiercheckjobs.yaml describes it.

    Bandwidths are bytes per second of one worker, times are seconds. None: not limited, or off."""

    snapshot_every: int | None
    """Steps between snapshots; None: chosen from the sizes (`tiercheck_sidecar.model.tier_verdict`)."""
    remote_every: int
    remote_keep: int
    remote_bandwidth: int | None = None
    remote_keep_seconds: float | None = None
    peer_bandwidth: int | None = None
    peer_encrypted: bool = False
    peer_interfaces: tuple[str, ...] = ()
    peer_ucx: bool = False
    delta: DeltaMode = DeltaMode.AUTO
    sanity_gate: bool = True
    verify_all: bool = False
    hang: HangLimits | None = None
    rehearse_every: float | None = None
    health_check: HealthCheck | None = None
    restore_stall: float = RESTORE_STALL
    prove_steps: int = 0
    interrupt_seconds: float = 0.0
    """Seconds in which ranks of the previous attempt must leave their step for their processes to stay.

    0: every process is started anew."""

    @property
    def deltas(self) -> bool:
        return self.delta is not DeltaMode.NONE


@dataclass(frozen=True)
class Directive:
    """The desired state of one sidecar."""

    job_uid: str
    worker: int
    workers: int
    procs_per_worker: int
    attempt: int
    phase: Phase
    history: History
    policy: Policy
    restore: Restore | None
    """The restore to do; None: start from scratch."""
    holders: tuple[Peer, ...]
    """The workers that keep copies of this worker's artifacts."""
    hosted: tuple[Peer, ...]
    """The workers for which this worker keeps copies of artifacts."""
    coordinator: Peer
    """The sidecar of worker 0, which publishes the watermarks."""
    master_host: str
    master_port: int
    """The port of the training processes' rendezvous in this attempt, at `master_host`."""
    parity: ParityGroup | None = None
    """The group with which this worker's artifacts are coded; it then has no `holders`."""
    folded: tuple[ParityGroup, ...] = ()
    """The groups for which this worker is a holder."""
    pod_uid: str = ""
    """The UID of the addressed pod, which identifies its sidecar even if the address had another owner.

    Only with it can a sidecar be sure that an assignment to another worker is meant for it."""
    exit_code: int = 0
    """The launcher's exit code in phase Finish.

    Not zero only for a failed attached job, so that its owner sees the failure."""
    placement: str = ""
    """The digest of all assignments of holders in the job.

    Holders may change within an attempt; reports about a previous placement are then invalid."""
    revision: str = ""
    """The digest of the fields above, made by the controller; the sidecar echoes it in its report."""
    instance: str = ""
    """The `Report.instance` of the addressed process; a restarted one counts directives anew."""
    number: int = 0
    """The value of `Report.followed` when this was decided on, plus one."""
    joins: bool = False
    """True if some ranks keep their processes and starting ones join them; in phase Hold a prediction."""
    signature: str = ""
    """The operator's signature of the attempt (`protocol.signing`), which sidecars can relay to others."""
