"""Defines the report that a sidecar gives the controller, complete each time.

The controller keeps no other memory of a worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tiercheck.protocol.directive import Phase, Tier
from tiercheck.protocol.version import Kind, Share, Version

SPARE = -1
"""In place of a worker's index: of the sidecar of a spare, which no worker's identity was given to yet."""


class RestoreState(str, Enum):
    IDLE = "Idle"
    """No directive yet."""
    RUNNING = "Running"
    READY = "Ready"
    """Every local rank holds the wanted version, verified (or starts from scratch)."""
    FAILED = "Failed"
    """At least one local rank could not be restored from any named source."""


class TrainerState(str, Enum):
    ABSENT = "Absent"
    """No launcher waits: none has connected yet, or it is still busy with what `TrainerReport.busy` says."""
    WAITING = "Waiting"
    """The launcher waits to be released."""
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class RankRestore:
    """How one rank came back: from which tier and worker, or why not."""

    rank: int
    tier: Tier | None
    """None: not restored (yet)."""
    worker: int | None
    """The worker it was copied from (peer tier)."""
    bytes: int
    seconds: float
    failures: tuple[str, ...] = ()
    """One sentence per source that was tried in vain."""
    deltas: int = 0
    """Length of the chain that leads from the snapshot to the version."""
    rebuilt: bool = False
    """The snapshot was rebuilt from parity (peer tier, `worker` is None)."""


@dataclass(frozen=True, slots=True)
class RestoreProgress:
    """Of a restore that is under way."""

    bytes: int
    """That are here."""
    wanted: int
    """Bytes that all local ranks need, as far as is known."""
    idle_seconds: float
    """Since a byte came, or a source was given up for the next one."""
    sources: tuple[str, ...] = ()
    """That are waited for, as sentences call them; at most 8."""


@dataclass(frozen=True, slots=True)
class RestoreReport:
    state: RestoreState
    version: Version | None
    ranks: tuple[RankRestore, ...] = ()
    seconds: float = 0.0
    progress: RestoreProgress | None = None
    """While it runs."""
    stalled: tuple[str, ...] = ()
    """Sources that were given up because nothing came from them for `Policy.restore_stall` seconds, as
    sentences call them; at most 8."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """What a rank said about its own end, when it could."""

    rank: int
    reason: str
    """One of `reasons`."""
    message: str
    exit_code: int


class Exact(str, Enum):
    """How the steps that were trained again after a restore compare with what they gave before it."""

    PROVEN = "Proven"
    """Bit for bit the same."""
    NOT_COMPARABLE = "NotComparable"
    """No step could be compared, or the script gives other bits each time."""
    DIFFERS = "Differs"


@dataclass(frozen=True, slots=True)
class ResumeProof:
    """What a rank found when it compared the steps that it trained again after a restore."""

    rank: int
    step: int
    """The version that the rank came back to."""
    exact: Exact
    steps: int = 0
    """How many steps were trained again and compared."""
    message: str = ""
    """For people: what differs first, or why nothing could be compared."""
    suspected: bool = False
    """The step that differs is one that the rank itself had suspected."""


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """The training command of this worker, for the attempt of the report."""

    state: TrainerState
    exit_code: int | None = None
    """As the shell counts: 128 + signal when a signal ended it."""
    reason: str = ""
    """One of `reasons` when the launcher knows the cause."""
    message: str = ""
    ended_at: float | None = None
    """Unix seconds by this node's clock."""
    started_at: float | None = None
    first_step_at: float | None = None
    """When the first optimizer step of this attempt was reported."""
    step: int | None = None
    """Newest step reported by any local rank."""
    step_seconds: float | None = None
    """Moving average."""
    not_finite: int = 0
    """Steps in a row, up to now, whose loss, gradient or state the sanity gate refused; the largest count of
    any local rank."""
    no_deltas: str = ""
    """Why this worker's ranks take no deltas although the job wants them: a sentence; empty if they do."""
    stalled_since: float | None = None
    """Last sign of life of a rank that should have made a step long since (`directive.HangLimits`), unix
    seconds by this node's clock; None: all go on."""
    slowest_rank: int | None = None
    """The local rank whose newest step is the lowest; None: none has made a step in this attempt."""
    slowest_step: int | None = None
    """That step."""
    failure: RankFailure | None = None
    """Of the local rank that spoke first, or of the first one whose failure is not that of a collective."""
    busy: str = ""
    """What the launcher has to do before it can wait for the release, as a clause; empty: nothing, or there
    is no launcher."""
    stuck: str = ""
    """Which processes of the training command do not end although they were killed, as a clause; empty: none.
    They may be those of an earlier attempt."""
    unhealthy: str = ""
    """How the health check of this attempt failed, as a clause; empty: it passed, or there is none."""
    resume: ResumeProof | None = None
    """Of the first local rank that differs; else of the first that proved its resume; else of the first, once
    no local rank could compare anything. None: not known yet, or nothing was restored."""
    stays: int = 0
    """While it waits for the release: how many of its ranks are processes of an earlier attempt."""
    listens: int = 0
    """How many of its ranks would stay now if another were lost."""
    refusal: str = ""
    """Why one of them would not, if it said so; while it waits for the release: why one did not."""


@dataclass(frozen=True, slots=True)
class Holding:
    """One verified artifact in this sidecar's memory. `tier` is local for own ranks, peer for copies of
    others."""

    rank: int
    """Of a parity block: the first of its ranks."""
    version: Version
    tier: Tier
    bytes: int
    kind: Kind = Kind.SNAPSHOT
    share: Share | None = None
    """Set if this is a parity block."""


@dataclass(frozen=True, slots=True)
class RemoteReport:
    configured: bool
    reachable: bool | None
    """None: not tried yet."""
    message: str = ""
    versions: tuple[Version, ...] = ()
    """Complete versions (manifest present), oldest first."""
    ranks: tuple[int, ...] = ()
    """For each of them by how many ranks it was made, 0 if that cannot be read. Empty: not looked up, as only
    worker 0 does it."""


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Newest version complete for every rank, per tier, as published by worker 0. None: none yet."""

    local: Version | None = None
    peer: Version | None = None
    remote: Version | None = None
    snapshot: Version | None = None
    """Newest version of which every rank holds a whole snapshot in its own memory: what an upload can begin
    from."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    limit: int
    """Bytes the memory volume may hold."""
    used: int
    needed: int
    """Bytes for all slots of this worker's ranks and of the copies it hosts, as far as sizes are known; else
    0."""
    local: int = 0
    """The part of `needed` that is for own ranks."""
    peer: int = 0
    """The part of `needed` that is for copies and parity of others."""
    snapshot: int = 0
    """Bytes of the largest snapshot of an own rank; 0: not known yet."""
    delta: int = 0
    """Bytes of the largest delta slot of an own rank; 0: no deltas, or not known yet."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A copy that failed verification and must not be used again. `worker` is where it lies."""

    rank: int
    version: Version
    worker: int
    reason: str
    kind: Kind = Kind.SNAPSHOT
    everywhere: bool = False
    """Every copy of it is equally bad: its replay did not give the state that it was taken from."""


@dataclass(frozen=True, slots=True)
class Proof:
    """All that a restore of this worker's ranks would read from a tier was read as a restore reads it, and
    every byte was verified. Deltas are verified, not replayed."""

    tier: Tier
    version: Version
    """The oldest of those that were proved for any of its ranks."""
    at: float
    """When the proof of the first of its ranks was complete, unix seconds by this node's clock."""
    seconds: float
    """How long the reading took, pauses included."""
    bytes: int
    parts: int = 1
    """Of how many versions, one after the other, it was read. More than 1: none of them lived for as long as
    that takes."""


class Break(str, Enum):
    """How a peer cannot be reached, which tells two troubles apart."""

    REFUSED = "Refused"
    """Its host answers, its sidecar does not: it was closed, is being started again, or its address belongs
    to somebody else."""
    SILENT = "Silent"
    """Nothing comes back: its host is down, or the network between us is."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A peer that this sidecar cannot reach now."""

    worker: int
    host: str
    """Which of the worker's pods is meant."""
    since: float
    """When it last answered, unix seconds by this node's clock."""
    how: Break


@dataclass(frozen=True, slots=True)
class Problem:
    """Something a person should know. `reason` is a CamelCase word, `message` says what to do about it."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Counters:
    captured: int = 0
    skipped: int = 0
    """Captures skipped because no slot was free."""
    replicated: int = 0
    uploaded: int = 0
    refused_stale: int = 0
    """Messages refused because they carried an older attempt."""
    refused_reports: int = 0
    """Tier reports of other sidecars that were refused because they cannot be true, or cannot be reckoned
    with."""
    deltas: int = 0
    """Deltas captured."""
    deltas_skipped: int = 0
    """Deltas that were due and not taken: the versions after them wait for the next snapshot."""
    replay_mismatches: int = 0
    """Restores whose replay did not give the recorded state."""
    not_finite: int = 0
    """Artifacts that the sanity gate refused."""
    proved: int = 0
    """Rehearsals of one tier that went well."""
    disproved: int = 0
    """Rehearsals of one tier that found what would not come back."""


@dataclass(frozen=True, slots=True)
class Report:
    job_uid: str
    worker: int
    """`SPARE`: none yet."""
    pod_uid: str
    instance: str
    """Random, new at every start of the sidecar process."""
    serial: int
    """Grows whenever something in the report changed that the controller may act on."""
    attempt: int
    """Of the newest accepted directive; 0: none yet."""
    revision: str
    phase: Phase | None
    restore: RestoreReport
    trainer: TrainerReport
    holdings: tuple[Holding, ...]
    remote: RemoteReport
    watermarks: Watermarks
    memory: MemoryReport
    quarantined: tuple[Quarantined, ...] = ()
    problems: tuple[Problem, ...] = ()
    unreachable: tuple[Unreachable, ...] = ()
    """At most 16, those that answered last long ago in front."""
    owes: bool = False
    """The training command does not run (any more), and holders still lack something of this worker that they
    should have."""
    settled: bool = False
    """The job is over, the training command has ended, and nothing that is here could go to the remote tier
    any more: the pod may go."""
    counters: Counters = Counters()
    snapshot_every: int = 0
    """Steps between snapshots that the coordinator has named (`checkpoint.snapshot.everySteps` if given); 0:
    not decided yet."""
    proofs: tuple[Proof, ...] = ()
    """The newest of each tier, as far as there is one of every own rank. What went wrong is a problem."""
    tells_holdings: bool = True
    """False: `holdings` is left out, as whoever asked wished."""
    held: int = 0
    """Number of `holdings`, also where they are left out: grows when they change. Whoever asks may name the
    one that he knows, and is told them only if they are others."""
    followed: int = 0
    """Directives that this process has followed so far; the next one's number must be greater."""
    newest_attempt: int = 0
    """The newest that is known to have begun, whoever was told to follow it; 0: none, or it is not signed."""
    newest_signature: str = ""
    """The operator's, of that attempt."""
