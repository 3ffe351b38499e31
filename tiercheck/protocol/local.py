"""What is said on the pod's Unix socket, between the sidecar and its own trainer container.

One JSON object per line. A connection opens with `Hello`; after it

- a *launcher* receives `Order` lines whenever the wanted state changes, and sends `Exited` / `Started`
  events;
- a *rank* (one training process) sends one of `requests.Request` per line, each answered by one `Reply` line,
  in order.

Only small messages travel here; state bytes stay in the slots.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiercheck.protocol.directive import DeltaMode, HealthCheck, Phase
from tiercheck.protocol.version import Version


@dataclass(frozen=True)
class Hello:
    """First line of a connection. `role` is "launcher" or "rank"; `rank`, `world_size`, `attempt` are for
    ranks."""

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
    dump_stacks: bool = False
    """No step for long: the running command's processes are to write where they stand to the log, once per
    attempt."""
    exit_code: int = 0
    """With Finish: what the launcher exits with."""
    health_check: HealthCheck | None = None
    """What has to pass before the launcher may wait for the release of an attempt."""


@dataclass(frozen=True)
class LauncherEvent:
    """From the launcher, which says the newest one again after each connection.

    `event`:

    - "idle": nothing of an earlier command is there any more, and the launcher waits for the release of
      `attempt`.
    - "started", "exited": the command of `attempt`, with all that it started.
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
