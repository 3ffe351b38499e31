"""Defines the messages on the pod's Unix socket between the sidecar and its trainer container.

One JSON object per line. A connection begins with `Hello`; after it

- a *launcher* receives `Order` lines whenever the wanted state changes, and sends `LauncherEvent` lines;
- a *listener* (the second connection of a rank with a process that may stay) receives the same `Order` lines,
  and sends `StepLeft`;
- a *rank* (one training process) sends one `Request` per line: one class for each operation, distinguished on
  the wire by `op`. Each is answered by one `Reply`, in order; `ReportProgress` by none.

Only small messages are sent here; state bytes stay in the slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from tiercheck.protocol.directive import DeltaMode, HealthCheck, Phase
from tiercheck.protocol.report import Exact
from tiercheck.protocol.version import Kind, Version

LONGEST_LINE = 1024 * 1024
"""Bytes. The longest message."""


@dataclass(frozen=True)
class ReserveSlots:
    """Requests slots for this rank.

    The reply comes once the snapshot slots are allocated and pre-faulted; delta slots follow later."""

    op: ClassVar[str] = "reserve"
    bytes: int
    """Bytes that each snapshot slot must hold."""
    delta_bytes: int | None = 0
    """Bytes that each delta slot must hold; 0: the rank takes no deltas; None: not known yet."""
    numa: int = -1
    """The NUMA node of the rank's device; -1: not known."""


@dataclass(frozen=True)
class BeginSlot:
    """Requests a slot for a capture after `step`. The reply has `path`, or `skip` with the reason."""

    op: ClassVar[str] = "begin"
    step: int
    bytes: int = 0
    """The most bytes that the artifact takes; 0: as many as were reserved."""
    kind: Kind = Kind.SNAPSHOT


@dataclass(frozen=True)
class CompleteSlot:
    """Reports that the slot at `path` is written."""

    op: ClassVar[str] = "complete"
    path: str
    step: int = 0
    bytes: int = 0
    kind: Kind = Kind.SNAPSHOT


@dataclass(frozen=True)
class AbandonSlot:
    """Reports that the slot at `path` will not be completed."""

    op: ClassVar[str] = "abandon"
    path: str
    step: int = 0
    kind: Kind = Kind.SNAPSHOT


@dataclass(frozen=True)
class ReportProgress:
    """Reports that `step` was reached. No reply."""

    op: ClassVar[str] = "progress"
    step: int
    loss: float | None = None
    step_seconds: float | None = None
    not_finite: int = 0
    """The number of consecutive steps, up to this one, that the sanity gate refused."""


@dataclass(frozen=True)
class DeclineDeltas:
    """Reports that this rank takes no deltas, for the reason `message`; empty: it takes them again."""

    op: ClassVar[str] = "no-deltas"
    message: str = ""
    step: int = 0
    """The step from which this attempt's deltas must not be replayed, in any tier; 0: none."""


@dataclass(frozen=True)
class ReportCannotSave:
    """Reports that this rank cannot be saved, for the reason `message`; empty: it can again."""

    op: ClassVar[str] = "cannot-save"
    message: str = ""


@dataclass(frozen=True)
class ReportMismatch:
    """Reports that the artifact of `step` is wrong; `message` gives the reason.

    No version that needs it may be restored.

    For a delta: its replay did not give the state that it was taken from. For a snapshot: replicas differed.
    """

    op: ClassVar[str] = "mismatch"
    step: int
    message: str = ""
    kind: Kind = Kind.SNAPSHOT


@dataclass(frozen=True)
class ReportRestored:
    """Reports that the rank has loaded the offered version."""

    op: ClassVar[str] = "restored"
    step: int = 0


@dataclass(frozen=True)
class ReportResume:
    """Reports how steps trained again after the restore compare; `report.ResumeProof` has its fields."""

    op: ClassVar[str] = "resume"
    step: int
    exact: Exact
    steps: int = 0
    message: str = ""
    suspected: bool = False


@dataclass(frozen=True)
class BorrowArtifact:
    """Requests the artifact of another `rank`, of `kind` after `step`.

    The reply has the `path` of a file with the requested bytes at their offsets, verified; the rest of it is
    undefined. It exists until `ReportRestored`; a delta until one of a later step is requested.
    """

    op: ClassVar[str] = "borrow"
    rank: int
    step: int
    kind: Kind = Kind.SNAPSHOT
    ranges: tuple[tuple[int, int], ...] = ()
    """The requested byte ranges, beside the header and table of pieces, which are always included."""


@dataclass(frozen=True)
class ReportFailing:
    """Reports that the process will end with `exit_code`; `reason` is a CamelCase word for `message`."""

    op: ClassVar[str] = "failing"
    reason: str
    message: str = ""
    exit_code: int = 0


Request = (
    ReserveSlots
    | BeginSlot
    | CompleteSlot
    | AbandonSlot
    | ReportProgress
    | DeclineDeltas
    | ReportCannotSave
    | ReportMismatch
    | ReportRestored
    | ReportResume
    | BorrowArtifact
    | ReportFailing
)

REQUESTS: dict[str, type[Request]] = {each.op: each for each in get_args(Request)}


@dataclass(frozen=True)
class NamedRequest:
    """The operation of a request. If it is not in `REQUESTS`, a newer library sent it."""

    op: str


@dataclass(frozen=True)
class Hello:
    """The first line of a connection. `role` is "launcher", "rank" or "listener".

    `rank`, `world_size` and `attempt` are for the last two."""

    role: str
    pid: int
    rank: int = -1
    world_size: int = 0
    attempt: int = 0
    refusal: str = ""
    """The reason why a listener's process cannot stay when its attempt ends; empty: it can."""


NOT_RELEASED = "not every rank is restored yet"
"""The error of a Welcome before the release of the rank's attempt."""


@dataclass(frozen=True)
class Order:
    """The desired state of the training command, sent to the launcher."""

    attempt: int
    phase: Phase
    worker: int
    workers: int
    procs_per_worker: int
    master_host: str
    master_port: int
    dump_stacks: bool = False
    """True if the command's processes must log their stacks, because no step was made for long.

    Done once per attempt."""
    exit_code: int = 0
    health_check: HealthCheck | None = None
    """The check that must pass before the launcher may wait for the release of an attempt."""
    interrupt_seconds: float = 0.0
    """Seconds that listening ranks may take to leave the step of an older attempt."""
    listens: tuple[int, ...] = ()
    """The ranks with processes that may stay when their attempt ends. Others are ended at once."""
    stays: tuple[int, ...] = ()
    """The ranks that have left their step and wait for `attempt`; from its release on they belong to it."""
    joins: bool = False
    """True if other ranks keep their processes and a new one joins them.

    It may be started in phase Hold already, and then waits for the release in `restore`."""


@dataclass(frozen=True)
class StepLeft:
    """Reports, from a listener, that the rank has left an older attempt's step and waits for this one."""

    attempt: int
    failed: bool = False
    """True if it left a step of this attempt, as a collective failed, and waits for a newer attempt."""


@dataclass(frozen=True)
class LauncherEvent:
    """The launcher's state, sent at each change and again after each connection.

    `event`:

    - "idle": no process of an earlier command is left, except those that stay (`stays`), and the launcher
      waits for the release of `attempt`.
    - "started", "exited": the command of `attempt`. Ranks that have not failed may still exist and wait.
    - "checking", "unhealthy": the health check of `attempt` runs; it has failed for the reason `message`, and
      is repeated every minute.
    - "stuck": processes of the command of `attempt` do not end although killed; `message` names them.
    """

    event: str
    attempt: int
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    fault: str = ""
    """The type and place of an unexpected launcher error since the last report; the launcher continues."""
    stays: int = 0
    """The number of an earlier attempt's ranks that left its step and will join `attempt` (with "idle")."""


@dataclass(frozen=True)
class Reply:
    """The reply to a rank. `error` is a sentence; an error never means that training must stop."""

    ok: bool
    path: str = ""
    skip: str = ""
    error: str = ""
    snapshot_every: int = 0
    """Steps between snapshots from here on; 0: unchanged."""


@dataclass(frozen=True)
class Welcome:
    """The reply to a rank's Hello: what to restore, and what to save."""

    attempt: int
    snapshot_every: int
    """Steps between snapshots; 0: not decided yet, and sent in a later reply."""
    restore_version: Version | None = None
    restore_path: str = ""
    """A sealed, verified snapshot; valid, as are the deltas, until the rank's "restored" request."""
    restore_deltas: tuple[str, ...] = ()
    """Sealed, verified deltas, which replayed on the snapshot in this order give the version."""
    restore_world_size: int = 0
    """The number of ranks that saved the version.

    If it is not the present number, `restore_path` is empty, and everything is read with `BorrowArtifact`."""
    restore_source: str = ""
    """The source of this rank's version, for users, such as "own memory"; empty: not known."""
    delta: DeltaMode = DeltaMode.NONE
    sanity_gate: bool = True
    verify_all: bool = False
    error: str = ""
    """The reason if the rank is refused (stale attempt, unknown rank)."""
