"""What a rank says to its sidecar: one class for each operation, told apart on the wire by `op`.

Each is answered by one `Reply`, in order; `ReportProgress` by none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from tiercheck.protocol.report import Exact
from tiercheck.protocol.version import Kind


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
