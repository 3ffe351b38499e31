"""What is said on the pod's Unix socket, between the sidecar and its own trainer container.

One JSON object per line. A connection opens with `Hello`; after it

- a *launcher* receives `Order` lines whenever the wanted state changes, and sends `Exited` / `Started` events;
- a *rank* (one training process) sends `Request` lines, each answered by one `Reply` line, in order. Progress is a
  `Request` with `op="progress"` that gets no reply.

Only small messages travel here; state bytes stay in the slots.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiercheck.protocol.directive import Phase
from tiercheck.protocol.version import Version


@dataclass(frozen=True)
class Hello:
    """First line of a connection. `role` is "launcher" or "rank"; `rank`, `world_size`, `attempt` are for ranks."""

    role: str
    pid: int
    rank: int = -1
    world_size: int = 0
    attempt: int = 0


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


@dataclass(frozen=True)
class LauncherEvent:
    """From the launcher. `event`: "started", "exited" or "idle" (stopped, waiting for release)."""

    event: str
    attempt: int
    exit_code: int | None = None
    reason: str = ""
    message: str = ""


@dataclass(frozen=True)
class Request:
    """From a rank.

    - "reserve": the rank's slots must hold `bytes` each. Answered when they are allocated and pre-faulted.
    - "begin": a slot for the snapshot after `step`. Reply carries `path`, or `skip` with the reason.
    - "complete": the slot at `path` is written.
    - "abandon": the slot at `path` will not be completed.
    - "progress": `step` was reached, with `loss` if known. No reply.
    - "restored": the rank has loaded the version it was offered.
    """

    op: str
    step: int = 0
    bytes: int = 0
    path: str = ""
    loss: float | None = None
    step_seconds: float | None = None


@dataclass(frozen=True)
class Reply:
    """To a rank. `error` is a sentence; an error never means that training must stop."""

    ok: bool
    path: str = ""
    skip: str = ""
    error: str = ""


@dataclass(frozen=True)
class Welcome:
    """To a rank, in answer to its Hello: what to restore, and how often to take snapshots."""

    attempt: int
    snapshot_every: int
    restore_version: Version | None = None
    restore_path: str = ""
    """A sealed, verified slot; valid until the rank's "restored" request."""
    error: str = ""
    """Set when the rank is refused (stale attempt, unknown rank)."""
