"""Defines the report that a sidecar sends to the controller, complete each time.

The controller keeps no other state of a worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tiercheck.protocol.directive import Phase, Tier
from tiercheck.protocol.version import Kind, Share, Version

SPARE = -1
"""The worker's index in reports of a spare's sidecar, which is not assigned to a worker yet."""


class RestoreState(str, Enum):
    IDLE = "Idle"
    """The sidecar has not received a directive yet."""
    RUNNING = "Running"
    READY = "Ready"
    """Every local rank holds the wanted version, verified (or starts from scratch)."""
    FAILED = "Failed"
    """Some local rank could not be restored from any named source."""


class TrainerState(str, Enum):
    ABSENT = "Absent"
    """No launcher waits: none has connected yet, or it is busy (`TrainerReport.busy`)."""
    WAITING = "Waiting"
    """The launcher waits to be released."""
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class RankRestore:
    """The restore of one rank: its tier and worker, or the reasons for failure."""

    rank: int
    tier: Tier | None
    """The tier that it was restored from; None: not restored (yet)."""
    worker: int | None
    """The worker it was copied from (peer tier)."""
    bytes: int
    seconds: float
    failures: tuple[str, ...] = ()
    """One sentence per source that failed."""
    deltas: int = 0
    """The number of deltas from the snapshot to the version."""
    rebuilt: bool = False
    """True if the snapshot was rebuilt from parity (peer tier, `worker` is None)."""


@dataclass(frozen=True, slots=True)
class RestoreProgress:
    bytes: int
    """Bytes received so far."""
    wanted: int
    """Bytes that all local ranks need, as far as is known."""
    idle_seconds: float
    """Seconds since a byte arrived, or a source was given up for the next one."""
    sources: tuple[str, ...] = ()
    """The sources being waited for, in words for messages; at most 8."""


@dataclass(frozen=True, slots=True)
class RestoreReport:
    state: RestoreState
    version: Version | None
    ranks: tuple[RankRestore, ...] = ()
    seconds: float = 0.0
    progress: RestoreProgress | None = None
    stalled: tuple[str, ...] = ()
    """Sources given up after `Policy.restore_stall` seconds without data, in words; at most 8."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A rank's own report of its failure, if it could send one."""

    rank: int
    reason: str
    """One of the reasons of a rank in `tiercheck.protocol.names`."""
    message: str
    exit_code: int


class Exact(str, Enum):
    """The result of comparing steps trained again after a restore with their results before it."""

    PROVEN = "Proven"
    """The steps are bit for bit the same."""
    NOT_COMPARABLE = "NotComparable"
    """No step could be compared, or the script is not deterministic."""
    DIFFERS = "Differs"


@dataclass(frozen=True, slots=True)
class ResumeProof:
    """A rank's comparison of the steps that it trained again after a restore."""

    rank: int
    step: int
    """The step of the restored version."""
    exact: Exact
    steps: int = 0
    """The number of steps that were trained again and compared."""
    message: str = ""
    """The first difference, or the reason why nothing could be compared, for users."""
    suspected: bool = False
    """True if the rank itself had suspected the step that differs."""


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """The state of this worker's training command in the attempt of the report."""

    state: TrainerState
    exit_code: int | None = None
    """The exit code as in a shell: 128 + signal if a signal ended the command."""
    reason: str = ""
    """One of the reasons in `tiercheck.protocol.names`, if the cause is known."""
    message: str = ""
    ended_at: float | None = None
    """Unix seconds by this node's clock."""
    started_at: float | None = None
    first_step_at: float | None = None
    """Unix seconds at which the first optimizer step of this attempt was reported."""
    step: int | None = None
    """The newest step reported by any local rank."""
    step_seconds: float | None = None
    """Seconds per step, as a moving average."""
    not_finite: int = 0
    """The number of latest steps in a row that the sanity gate refused, for loss, gradient or state.

    The largest count of any local rank."""
    no_deltas: str = ""
    """The reason, a sentence, why the ranks take no deltas although the job uses them; empty if they do."""
    stalled_since: float | None = None
    """Unix seconds, by this node's clock, of the last sign of life of a hung rank; None: no rank hangs.

    `directive.HangLimits` defines when a rank hangs."""
    slowest_rank: int | None = None
    """The local rank with the lowest newest step; None: none has made a step in this attempt."""
    slowest_step: int | None = None
    failure: RankFailure | None = None
    """The first reported failure of a local rank; one that is not of a collective takes precedence."""
    busy: str = ""
    """A clause: the task before the launcher can wait for the release; empty: none, or no launcher."""
    stuck: str = ""
    """A clause that names processes of the training command that do not end although killed; empty: none.

    They may be of an earlier attempt."""
    unhealthy: str = ""
    """A clause with the failure of this attempt's health check; empty: it passed, or there is none."""
    resume: ResumeProof | None = None
    """The proof of one local rank; None: not known yet, or nothing was restored.

    It is of the first rank that differs; else of the first that proved its resume; else, once no local rank
    could compare anything, of the first."""
    stays: int = 0
    """The number of its ranks with processes of an earlier attempt, while it waits for the release."""
    listens: int = 0
    """The number of its ranks that would stay if another rank were lost."""
    refusal: str = ""
    """The reason, if given, why a rank would not stay; while it waits for the release, why one did not."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A verified artifact in this sidecar's memory. `tier` is local for own ranks, peer for copies."""

    rank: int
    """The artifact's rank; for a parity block, the first of its ranks."""
    version: Version
    tier: Tier
    bytes: int
    kind: Kind = Kind.SNAPSHOT
    share: Share | None = None
    """The block's place in its group, if this is a parity block."""


@dataclass(frozen=True, slots=True)
class RemoteReport:
    configured: bool
    reachable: bool | None
    """True if the remote tier can be reached; None: not tried yet."""
    message: str = ""
    versions: tuple[Version, ...] = ()
    """Complete versions (manifest present), oldest first."""
    ranks: tuple[int, ...] = ()
    """The number of ranks that made each version, 0 if unreadable. Empty: only worker 0 looks it up."""


@dataclass(frozen=True, slots=True)
class Watermarks:
    """The newest version complete for every rank, per tier, as published by worker 0. None: none yet."""

    local: Version | None = None
    peer: Version | None = None
    remote: Version | None = None
    snapshot: Version | None = None
    """The newest version with a whole snapshot in every rank's own memory, from which uploads can begin."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    limit: int
    """Bytes the memory volume may hold."""
    used: int
    needed: int
    """Bytes for all slots of this worker's ranks and of hosted copies, as far as known; else 0."""
    local: int = 0
    """The part of `needed` that is for own ranks."""
    peer: int = 0
    """The part of `needed` that is for copies and parity of others."""
    snapshot: int = 0
    """Bytes of the largest own snapshot; 0: not known yet."""
    delta: int = 0
    """Bytes of the largest own delta slot; 0: no deltas, or not known yet."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A copy at `worker` that failed verification and must not be used again."""

    rank: int
    version: Version
    worker: int
    reason: str
    kind: Kind = Kind.SNAPSHOT
    everywhere: bool = False
    """True if every copy is equally bad: its replay did not give the state that it was taken from."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A proof that everything a restore of this worker's ranks reads from a tier was read and verified.

    It was read as a restore reads it. Deltas are verified, not replayed."""

    tier: Tier
    version: Version
    """The oldest version proved for any of its ranks."""
    at: float
    """Unix seconds, by this node's clock, at which the proof of its first rank was complete."""
    seconds: float
    """Seconds that reading took, including pauses."""
    bytes: int
    parts: int = 1
    """The number of successive versions read. More than 1: none existed for as long as reading takes."""


class ConnectionFailure(str, Enum):
    """The way in which a peer cannot be reached, which distinguishes two problems."""

    REFUSED = "Refused"
    """The host answers, but not the sidecar: it was closed or restarts, or the address has another owner."""
    SILENT = "Silent"
    """No answer at all: its host is down, or the network in between is."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A peer that this sidecar cannot reach now."""

    worker: int
    host: str
    """The address of the peer's pod, which identifies it among the worker's pods."""
    since: float
    """Unix seconds, by this node's clock, of its last answer."""
    how: ConnectionFailure


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem for users. `reason` is a CamelCase word, and `message` includes what to do about it."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Counters:
    """The counts since the sidecar's start, each described where it is a metric (`control.report`)."""

    captured: int = 0
    skipped: int = 0
    replicated: int = 0
    uploaded: int = 0
    refused_stale: int = 0
    refused_reports: int = 0
    deltas: int = 0
    deltas_skipped: int = 0
    replay_mismatches: int = 0
    not_finite: int = 0
    proved: int = 0
    disproved: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    job_uid: str
    worker: int
    """The worker's index; `SPARE`: none yet."""
    pod_uid: str
    instance: str
    """A random value, new at every start of the sidecar process."""
    serial: int
    """A number that grows when the report changes in a way that the controller may act on."""
    attempt: int
    """The attempt of the newest accepted directive; 0: none yet."""
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
    """The peers that cannot be reached, at most 16, longest silent first."""
    holders_lack: bool = False
    """True if the training command does not run, and holders still lack artifacts of this worker."""
    settled: bool = False
    """True if the pod may be deleted.

    The job is over, the training command has ended, and nothing here could still be uploaded."""
    counters: Counters = Counters()
    snapshot_every: int = 0
    """Steps between snapshots, set by the coordinator; 0: undecided.

    `checkpoint.snapshot.everySteps` if given."""
    proofs: tuple[Proof, ...] = ()
    """The newest proof per tier, if every own rank has one. Failures are in `problems`."""
    has_holdings: bool = True
    """False if `holdings` is left out at the client's request."""
    held: int = 0
    """The revision of `holdings`, which grows when they change; set even if they are left out.

    A client may send the revision that it has, and receives them only if they differ."""
    followed: int = 0
    """The number of directives that this process has followed; the next one's number must be greater."""
    newest_attempt: int = 0
    """The newest attempt known to have begun in the job; 0: none, or it is not signed."""
    newest_signature: str = ""
    """The operator's signature of that attempt."""
