"""Says what goes over the pod's Unix socket, between the sidecar and its own trainer container.

One JSON object per line. A connection opens with `Hello`; after it

- a *launcher* receives `Order` lines whenever the wanted state changes, and sends `LauncherEvent` lines;
- a *listener* (the second connection of a rank whose process may stay) receives the same `Order` lines, and
  sends `StepLeft`;
- a *rank* (one training process) sends one `Request` per line: one class for each operation, told apart on
  the wire by `op`. Each is answered by one `Reply`, in order; `ReportProgress` by none.

Only small messages travel here; state bytes stay in the slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from tiercheck.protocol.directive import DeltaMode, HealthCheck, Phase
from tiercheck.protocol.report import Exact
from tiercheck.protocol.version import Kind, Version


@dataclass(frozen=True)
class ReserveSlots:
    """Slots for this rank. Answered when the snapshot slots are allocated and pre-faulted; delta slots
    follow."""

    op: ClassVar[str] = "reserve"
    bytes: int
    """What each snapshot slot must hold."""
    delta_bytes: int | None = 0
    """What each delta slot must hold; 0: the rank takes no deltas; None: not known yet."""
    numa: int = -1
    """The NUMA node of its device; -1: none is known."""


@dataclass(frozen=True)
class BeginSlot:
    """A slot for what is captured after `step`. The reply carries `path`, or `skip` with the reason."""

    op: ClassVar[str] = "begin"
    step: int
    bytes: int = 0
    """At most; 0: as many as were reserved."""
    kind: Kind = Kind.SNAPSHOT


@dataclass(frozen=True)
class CompleteSlot:
    """The slot at `path` is written."""

    op: ClassVar[str] = "complete"
    path: str
    step: int = 0
    bytes: int = 0
    kind: Kind = Kind.SNAPSHOT


@dataclass(frozen=True)
class AbandonSlot:
    """The slot at `path` will not be completed."""

    op: ClassVar[str] = "abandon"
    path: str
    step: int = 0
    kind: Kind = Kind.SNAPSHOT


@dataclass(frozen=True)
class ReportProgress:
    """`step` was reached. No reply."""

    op: ClassVar[str] = "progress"
    step: int
    loss: float | None = None
    step_seconds: float | None = None
    not_finite: int = 0
    """Steps in a row, up to this one, that the sanity gate refused."""


@dataclass(frozen=True)
class DeclineDeltas:
    """This rank takes no deltas, because `message`; empty: it does again."""

    op: ClassVar[str] = "no-deltas"
    message: str = ""
    step: int = 0
    """Unless 0: what it took in this attempt from this step on must not be replayed either, wherever it lies.
    """


@dataclass(frozen=True)
class ReportCannotSave:
    """Nothing of this rank can be saved, because `message`; empty: it can again."""

    op: ClassVar[str] = "cannot-save"
    message: str = ""


@dataclass(frozen=True)
class ReportMismatch:
    """The artifact of `step` is wrong, as `message` says. No version that needs it may be restored again.

    A delta: replaying it did not give the state that it was taken from. A snapshot: replicas did not hold the
    same.
    """

    op: ClassVar[str] = "mismatch"
    step: int
    message: str = ""
    kind: Kind = Kind.SNAPSHOT


@dataclass(frozen=True)
class ReportRestored:
    """The rank has loaded the version that it was offered."""

    op: ClassVar[str] = "restored"
    step: int = 0


@dataclass(frozen=True)
class ReportResume:
    """The steps that the rank trained again after the restore are compared with what they gave before it."""

    op: ClassVar[str] = "resume"
    step: int
    """The version that the rank came back to."""
    exact: Exact
    steps: int = 0
    """How many steps were trained again and compared."""
    message: str = ""
    """For people: what differs first, or why nothing could be compared."""
    suspected: bool = False
    """The step that differs is one that the rank itself had suspected."""


@dataclass(frozen=True)
class BorrowArtifact:
    """The artifact of another `rank`, of `kind` after `step`.

    The reply carries the `path` of a file with the bytes asked for at their places, verified; what else is in
    it is undefined. It is there until `ReportRestored`; a delta until one of a later step is borrowed.
    """

    op: ClassVar[str] = "borrow"
    rank: int
    step: int
    kind: Kind = Kind.SNAPSHOT
    ranges: tuple[tuple[int, int], ...] = ()
    """The bytes that are wanted; none: the header and the table of pieces, which are always there."""


@dataclass(frozen=True)
class ReportFailing:
    """The process is about to end with `exit_code`, because of `message`; `reason` is a CamelCase word for
    it."""

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
    """Only the operation of a request. Where it is none of `REQUESTS`, a newer library sent it."""

    op: str


@dataclass(frozen=True)
class Hello:
    """First line of a connection. `role` is "launcher", "rank" or "listener"; `rank`, `world_size`, `attempt`
    are for the last two."""

    role: str
    pid: int
    rank: int = -1
    world_size: int = 0
    attempt: int = 0
    refusal: str = ""
    """Of a listener: why the process cannot stay when its attempt ends; empty: it can."""


NOT_RELEASED = "not every rank is restored yet"
"""The error of a Welcome before the release of the rank's attempt."""


@dataclass(frozen=True)
class Order:
    """To the launcher: the wanted state of the training command."""

    attempt: int
    phase: Phase
    worker: int
    workers: int
    procs_per_worker: int
    master_host: str
    master_port: int
    dump_stacks: bool = False
    """No step for long: the running command's processes are to write where they stand to the log, once per
    attempt."""
    exit_code: int = 0
    """With Finish: what the launcher exits with."""
    health_check: HealthCheck | None = None
    """What has to pass before the launcher may wait for the release of an attempt."""
    interrupt_seconds: float = 0.0
    """How long ranks that listen may take to leave the step of an older attempt."""
    listens: tuple[int, ...] = ()
    """The ranks whose processes may stay when their attempt ends. Others are ended at once."""
    stays: tuple[int, ...] = ()
    """Those that have left their step for `attempt`, and wait: from its release on they are of it."""
    joins: bool = False
    """Other ranks keep their processes, and one that is started now joins them. With Hold it may be started
    already: it waits for the release in `restore`."""


@dataclass(frozen=True)
class StepLeft:
    """From a listener: the rank has left the step of an older attempt and waits for the release of this
    one."""

    attempt: int
    failed: bool = False
    """It has left a step of this attempt itself, because a collective failed, and waits for a newer one."""


@dataclass(frozen=True)
class LauncherEvent:
    """From the launcher, which says the newest one again after each connection.

    `event`:

    - "idle": nothing of an earlier command is there any more, unless it `stays`, and the launcher waits for
      the release of `attempt`.
    - "started", "exited": the command of `attempt`. Ranks that have not failed may still be there: they wait.
    - "checking", "unhealthy": the health check of `attempt` runs; it has failed, as `message` says, and is
      repeated every minute.
    - "stuck": something of the command of `attempt` does not end although it was killed; `message` names it.
    """

    event: str
    attempt: int
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    fault: str = ""
    """What went wrong in the launcher itself, of a kind that nobody thought of, since it last said so: a few
    words. It goes on."""
    stays: int = 0
    """With "idle": so many ranks of an earlier attempt have left its step, and will be of `attempt`."""


@dataclass(frozen=True)
class Reply:
    """To a rank. `error` is a sentence; an error never means that training must stop."""

    ok: bool
    path: str = ""
    skip: str = ""
    error: str = ""
    snapshot_every: int = 0
    """Steps between snapshots from now on; 0: nothing new."""


@dataclass(frozen=True)
class Welcome:
    """To a rank, in answer to its Hello: what to restore, and what to save."""

    attempt: int
    snapshot_every: int
    """Steps between snapshots; 0: not decided yet, replies will tell."""
    restore_version: Version | None = None
    restore_path: str = ""
    """A sealed, verified snapshot; valid, as are the deltas, until the rank's "restored" request."""
    restore_deltas: tuple[str, ...] = ()
    """Sealed, verified deltas, to be replayed on the snapshot in this order to get to the version."""
    restore_world_size: int = 0
    """Ranks that saved the version. If they are not as many as now, there is no `restore_path`, and all is
    borrowed."""
    restore_source: str = ""
    """Where this rank's version came from, for people, such as "own memory"; empty: not known."""
    delta: DeltaMode = DeltaMode.NONE
    sanity_gate: bool = True
    verify_all: bool = False
    error: str = ""
    """Set when the rank is refused (stale attempt, unknown rank)."""
