"""Lists every condition type and reason, and every cause that can bring a job down.

Each reason is explained once, for users and maintainers, in docs/operate/troubleshooting.md; a test compares
both lists.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

PLACED = "Placed"
"""Every worker has a pod on a node, and the copies have holders."""
PROTECTED = "Protected"
"""Copies are where the spec requires them, and the tiers work."""
RESTORING = "Restoring"
"""The job is being restored (or on its way to its first step)."""
RUNNING = "Running"
"""Training was released in the current attempt and has not ended."""
SUSPENDED = "Suspended"
"""spec.suspend is true and the pods are gone."""
COMPLETED = "Completed"
"""Training succeeded on every worker."""
FAILED = "Failed"
"""The job was given up."""
DELTAS_ACTIVE = "DeltasActive"
"""Every step is saved as a delta."""
IN_PROCESS = "InProcess"
"""The other ranks' processes stay when a rank is lost. Only on jobs with several ranks."""
SPARES_READY = "SparesReady"
"""All requested spares are ready to take a lost worker's place."""
FULL_SIZE = "FullSize"
"""The job has as many workers as its spec requests. Only on jobs with spec.elastic."""

THROTTLED = "Throttled"
"""The kernel throttles a sidecar at its CPU limit. Only on jobs where this has happened."""

REMOTE_SAFE = "RemoteSafe"
"""The remote tier gives the guarantees that are relied on. Only on jobs where it once did not."""

EXACT = "Exact"
"""Steps trained again after a restore are bitwise identical. Only on jobs that compared any."""

EVICTABLE = "Evictable"
"""A worker may be evicted now; while False, the job's PodDisruptionBudget blocks node drains."""

# Placed
ALL_PLACED = "AllPlaced"
WAITING_FOR_PODS = "WaitingForPods"
IMAGE_PULL = "ImagePull"
CONTAINER_CANNOT_START = "ContainerCannotStart"
WAITING_FOR_QUEUE = "WaitingForQueue"
GANG_UNAVAILABLE = "GangUnavailable"
REFUSED = "Refused"
CREDENTIALS_LOST = "CredentialsLost"
NODE_MEMORY_FORBIDDEN = "NodeMemoryForbidden"
UNSCHEDULABLE = "Unschedulable"
NO_CAPACITY = "NoCapacity"
NODES_UNLABELLED = "NodesUnlabelled"
TOPOLOGY_NOT_FOUND = "TopologyNotFound"
COPIES_MOVING = "CopiesMoving"
MOVE_DELAYED = "MoveDelayed"
DEGRADED_SPREAD = "DegradedSpread"
MOVING = "Moving"
NO_ROOM_TO_MOVE = "NoRoomToMove"
NODE_NOT_READY = "NodeNotReady"
DEVICE_UNHEALTHY = "DeviceUnhealthy"
OWNER_RESIZED = "OwnerResized"
INSUFFICIENT_DOMAINS = "InsufficientDomains"
INVALID_TEMPLATE = "InvalidTemplate"
INVALID_SPEC = "InvalidSpec"
MEMORY_TOO_SMALL = "MemoryTooSmall"

# Protected
COPIES_COMPLETE = "CopiesComplete"
INTERFACE_MISSING = "InterfaceMissing"
WAITING_FOR_FIRST_VERSION = "WaitingForFirstVersion"
UNPROTECTED_WORKERS = "UnprotectedWorkers"
NO_COPIES = "NoCopies"
SIDECAR_RESTARTING = "SidecarRestarting"
SIDECAR_NOT_ANSWERING = "SidecarNotAnswering"
SIDECAR_RESTARTED = "SidecarRestarted"
CANNOT_SAVE = "CannotSave"
INTERNAL_ERROR = "InternalError"
REHEARSAL_FAILED = "RehearsalFailed"
BAD_REPORT = "BadReport"
SOURCE_STALLED = "SourceStalled"
REMOTE_UNREACHABLE = "RemoteUnreachable"
REMOTE_OWNED = "RemoteOwned"
TERMINATING = "Terminating"

# RemoteSafe
REMOTE_NOT_SAFE = "RemoteNotSafe"
PROMISES_KEPT = "PromisesKept"

# Exact
PROVEN = "Proven"
DIFFERS = "Differs"
NOT_COMPARABLE = "NotComparable"

# DeltasActive
EVERY_STEP = "EveryStep"
DELTAS_TURNED_OFF = "TurnedOff"
DELTAS_OFF = "DeltasOff"

# InProcess
PROCESSES_STAY = "ProcessesStay"
PROCESSES_RESTART = "ProcessesRestart"

# SparesReady
SPARES_WAITING = "SparesWaiting"
SPARES_COMING = "SparesComing"
SPARES_UNSCHEDULABLE = "SparesUnschedulable"
NO_SPARES = "NoSpares"

# FullSize
ALL_WORKERS = "AllWorkers"
SHRUNK = "Shrunk"
GROWING = "Growing"

# Throttled
SIDECAR_THROTTLED = "SidecarThrottled"
NOT_THROTTLED = "NotThrottled"

# Evictable
ONE_AT_A_TIME = "OneAtATime"
HELD_BY_RESTORE = "RestoreUnderWay"
HELD_BY_MOVE = "MoveUnderWay"
HELD_BY_COPIES = "CopiesIncomplete"
BUDGET_REFUSED = "BudgetRefused"
NO_BUDGET = "NoBudget"

# Restoring
SETTLING = "Settling"
HANDING_OVER = "HandingOver"
WAITING_FOR_SIDECARS = "WaitingForSidecars"
NOTHING_TO_RESTORE_FROM = "NothingToRestoreFrom"
RETRYING = "Retrying"
WAITING_FOR_TRAINERS = "WaitingForTrainers"
HEALTH_CHECK_FAILED = "HealthCheckFailed"
RESTORE_STALLED = "RestoreStalled"
COPYING = "Copying"
STARTING = "Starting"
DONE = "Done"

# Running
RELEASED = "Released"
NOT_RELEASED = "NotReleased"
ENDED = "Ended"

# Suspended
SUSPEND_REQUESTED = "SuspendRequested"
SUSPENDING = "Suspending"
RESUMED = "Resumed"

# Completed, Failed
ALL_SUCCEEDED = "AllTrainersSucceeded"
MAX_RESTARTS_EXCEEDED = "MaxRestartsExceeded"
FAILURE_POLICY_RULE = "FailurePolicyRule"
DEADLINE_EXCEEDED = "DeadlineExceeded"
TORCH_MISSING = "TorchMissing"
CANNOT_START = "CannotStart"


@dataclass(frozen=True)
class Finding:
    """The reason and message of a condition that is to be set."""

    reason: str
    message: str
    wake_after: float | None = None
    """Seconds until time alone may change it, if that is known."""


def listed(entries: Sequence[object], most: int) -> str:
    """Joins the first `most` entries, and states how many more there are."""
    more = f" and {len(entries) - most} more" if len(entries) > most else ""
    return ", ".join(map(str, entries[:most])) + more


def numbered(numbers: Collection[int], most: int = 5, noun: str = "worker") -> str:
    """Returns "worker 2", "workers 1, 2 and 3" or, with 3 as `most`, "workers 0, 1, 2 and 61 more"."""
    first, *more = sorted(set(numbers))
    if not more:
        return f"{noun} {first}"
    if len(more) > most:
        return f"{noun}s {listed([first, *more], most)}"
    return f"{noun}s {', '.join(map(str, [first, *more[:-1]]))} and {more[-1]}"


def plural(count: int, noun: str) -> str:
    """Returns `3 steps` or `1 step`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class Cause(str, Enum):
    """The values of `status.recovery.cause`; docs/operate/failures.md explains each failure.

    Among causes seen at once, later members explain earlier ones: a lost node explains the crash of every
    trainer. `explains` decides about causes seen later."""

    DIVERGED = "Diverged"
    TRAINER_CRASH = "TrainerCrash"
    STEP_SUSPECTED = "StepSuspected"
    OOM_KILLED = "OOMKilled"
    RESTORE_FAILED = "RestoreFailed"
    """A rank could not be brought to the attempt's version. Explains the exit of its training command."""
    STATUS_OUTDATED = "StatusOutdated"
    """Sidecars or the remote tier have a newer attempt, signed by the operator, than the status has."""
    NODE_LEAVING = "NodeLeaving"
    POD_DELETED = "PodDeleted"
    HUNG = "Hung"
    GPU_FAULT = "GPUFault"
    STEP_DIFFERED = "StepDiffered"
    START_FAILED = "StartFailed"
    HEALTH_CHECK_FAILED = "HealthCheckFailed"
    STUCK = "Stuck"
    RESTORE_STALLED = "RestoreStalled"
    SIDECAR_SILENT = "SidecarSilent"
    """A pod's sidecar stopped answering. Explains the operator's deletion that follows."""
    NODE_SILENT = "NodeSilent"
    """Neither the operator nor peers can reach a pod's host; Kubernetes may not have noticed yet."""
    POD_FAILED = "PodFailed"
    POD_EVICTED = "PodEvicted"
    STORAGE_EXCEEDED = "StorageExceeded"
    NODE_LOST = "NodeLost"
    DOMAIN_LOST = "DomainLost"
    ALL_PODS_LOST = "AllPodsLost"
    GROWN = "Grown"
    """A job with fewer workers than requested has room again, and begins an attempt with all of them."""
    RESUMED = "Resumed"
    """spec.suspend became false."""
    FIRST_START = "FirstStart"
    SUSPENDING = "Suspending"
    """spec.suspend became true: trainers stop, sidecars upload, pods go."""

    @property
    def weight(self) -> int:
        return list(Cause).index(self)

    def explains(self, earlier: Cause) -> bool:
        """Returns whether `earlier`, seen first in the same failure, was caused by this.

        If not, `earlier` stands: a node that is switched off after a drain was drained.
        """
        if earlier in (
            Cause.NODE_LEAVING,
            Cause.POD_DELETED,
            Cause.GPU_FAULT,
            Cause.STEP_DIFFERED,
            Cause.START_FAILED,
            Cause.HEALTH_CHECK_FAILED,
            Cause.STUCK,
            Cause.RESTORE_STALLED,
            Cause.POD_FAILED,
            Cause.POD_EVICTED,
            Cause.STORAGE_EXCEEDED,
        ):
            return self is Cause.ALL_PODS_LOST
        if earlier is Cause.SIDECAR_SILENT or earlier is Cause.NODE_SILENT:
            ended = (Cause.POD_FAILED, Cause.POD_EVICTED, Cause.STORAGE_EXCEEDED)
            return self.weight > earlier.weight and self not in ended
        return self.weight > earlier.weight

    @property
    def planned(self) -> bool:
        """Returns whether nothing failed: the job only starts, ends or grows."""
        return self in (Cause.GROWN, Cause.RESUMED, Cause.FIRST_START, Cause.SUSPENDING)

    @property
    def caused_by_training(self) -> bool:
        """Returns whether training caused it: without another rule, it counts against maxRestarts."""
        itself = (Cause.TRAINER_CRASH, Cause.STEP_SUSPECTED, Cause.OOM_KILLED, Cause.HUNG, Cause.DIVERGED)
        return self in (*itself, Cause.STORAGE_EXCEEDED)

    @property
    def in_place(self) -> bool:
        """Returns whether, if no pod was replaced, trainers restart in place with their memory kept."""
        return self in (
            Cause.TRAINER_CRASH,
            Cause.STEP_SUSPECTED,
            Cause.OOM_KILLED,
            Cause.HUNG,
            Cause.DIVERGED,
            Cause.RESTORE_FAILED,
            Cause.STATUS_OUTDATED,
        )

    @staticmethod
    def parse(text: str) -> Cause:
        """Parses a cause in a status; an unknown one counts as a failed restore, which is not counted."""
        try:
            return Cause(text)
        except ValueError:
            return Cause.RESTORE_FAILED
