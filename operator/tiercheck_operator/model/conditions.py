"""Lists every condition type and reason, and every cause that can bring a job down."""

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
"""All pods have nodes, all copies have holders, and every node has the topology labels."""
WAITING_FOR_PODS = "WaitingForPods"
"""Pods are being created, pulled or started."""
IMAGE_PULL = "ImagePull"
"""An image cannot be pulled; the message is the kubelet's."""
CONTAINER_CANNOT_START = "ContainerCannotStart"
"""The kubelet cannot start a container, as when its Secret is missing; the message is the kubelet's."""
WAITING_FOR_QUEUE = "WaitingForQueue"
"""A queue has not admitted some pods yet: they have scheduling gates. Capacity is not lacking."""
GANG_UNAVAILABLE = "GangUnavailable"
"""The API for spec.gang is not served, or the operator has no rights to it. The job does not start."""
REFUSED = "Refused"
"""The API server refuses an object (quota, Pod Security, webhook, rights); the message is its own."""
CREDENTIALS_LOST = "CredentialsLost"
"""The job's Secret is gone or unreadable, and sidecars still use its contents: no other is made."""
NODE_MEMORY_FORBIDDEN = "NodeMemoryForbidden"
"""NodeMemory needs hostPath volumes, which the namespace forbids; the message explains the remedy."""
UNSCHEDULABLE = "Unschedulable"
"""The scheduler finds no node for a pod; the message is the scheduler's."""
NO_CAPACITY = "NoCapacity"
"""No node for longer than failurePolicy.capacityTimeoutSeconds. The job waits and keeps its copies."""
NODES_UNLABELLED = "NodesUnlabelled"
"""Nodes lack the label of a level, so that level cannot be used for spreading."""
TOPOLOGY_NOT_FOUND = "TopologyNotFound"
"""spec.topology.kueueTopology names no Topology that can be read.

A new job does not start; a running one keeps its copies where they are."""
COPIES_MOVING = "CopiesMoving"
"""Some workers get new holders during training; old ones stay until the new ones are complete."""
MOVE_DELAYED = "MoveDelayed"
"""Copies should move and cannot yet; the message gives the reason."""
DEGRADED_SPREAD = "DegradedSpread"
"""Copies are kept in different domains of a narrower level than requested (mode Preferred)."""
MOVING = "Moving"
"""A pod must leave its node; it continues to train until its replacement is ready."""
NO_ROOM_TO_MOVE = "NoRoomToMove"
"""A pod must leave its node, and no node has room for its replacement: it stays until it is ended."""
NODE_NOT_READY = "NodeNotReady"
"""A node of the job is not ready, or its kubelet is silent.

Its pods continue to train as long as they answer; new ones go elsewhere."""
DEVICE_UNHEALTHY = "DeviceUnhealthy"
"""The kubelet reports an unhealthy device of a worker's pod. Its next pod prefers other nodes."""
OWNER_RESIZED = "OwnerResized"
"""The attached workload's number of workers has changed; the message gives both numbers."""
INSUFFICIENT_DOMAINS = "InsufficientDomains"
"""Mode Required, and the nodes cannot satisfy it; the job waits."""
INVALID_TEMPLATE = "InvalidTemplate"
"""spec.template cannot be made into a pod; the message explains what to change."""
INVALID_SPEC = "InvalidSpec"
"""Another part of the spec cannot be used; the message explains what to change."""

MEMORY_TOO_SMALL = "MemoryTooSmall"
"""The memory volumes cannot hold the slots. Placed: the job does not start. Protected: no snapshots."""

# Protected
COPIES_COMPLETE = "CopiesComplete"
"""The tiers hold a complete version, and holders are as required."""
INTERFACE_MISSING = "InterfaceMissing"
"""Copies are complete, but a worker lacks or cannot use an interface of tiers.peer.interfaces.

The message lists the available ones. Copies go over the others."""
WAITING_FOR_FIRST_VERSION = "WaitingForFirstVersion"
"""No version is complete on its holders yet."""
UNPROTECTED_WORKERS = "UnprotectedWorkers"
"""Some workers have no holder in another domain."""
NO_COPIES = "NoCopies"
"""There are neither copies nor parity."""
SIDECAR_RESTARTING = "SidecarRestarting"
"""A sidecar has ended; the message gives its kubelet's back-off. Training continues."""
SIDECAR_NOT_ANSWERING = "SidecarNotAnswering"
"""A sidecar does not answer; its kubelet reports no problem. Training continues if it makes steps."""
SIDECAR_RESTARTED = "SidecarRestarted"
"""A sidecar was restarted; no version was completed since. Training was not interrupted."""
CANNOT_SAVE = "CannotSave"
"""Something in the state cannot be captured, so no version is taken; the message names it."""
INTERNAL_ERROR = "InternalError"
"""A part of a sidecar failed unexpectedly and was restarted; the message names the part and the place."""
REHEARSAL_FAILED = "RehearsalFailed"
"""A tier cannot restore the newest version; the message names rank, tier, artifact and place."""
BAD_REPORT = "BadReport"
"""A sidecar's report to worker 0 is invalid and refused; the other sidecars go on."""
SOURCE_STALLED = "SourceStalled"
"""A read of a restore source hangs at a worker and has not returned. Restores go on without it."""
REMOTE_UNREACHABLE = "RemoteUnreachable"
"""The remote tier does not answer or refuses; the message explains what to do."""

REMOTE_OWNED = "RemoteOwned"
"""The job's folder in the remote tier belongs to another job or to another cluster's job of that name.

The message names the owner, and explains how to take the folder over."""

# RemoteSafe
REMOTE_NOT_SAFE = "RemoteNotSafe"
"""The store does not give a guarantee that is relied on; the message names it. Uploads go on."""
PROMISES_KEPT = "PromisesKept"
"""A later check found that the store gives the guarantees."""

# Exact
PROVEN = "Proven"
"""Every step that was trained again after the last restore is bitwise equal."""
DIFFERS = "Differs"
"""A step trained again gave another result; the message names the rank and the first difference."""
NOT_COMPARABLE = "NotComparable"
"""No rank could compare a step; the message gives the reason."""

# DeltasActive
EVERY_STEP = "EveryStep"
"""Every worker takes a delta at every step."""
DELTAS_TURNED_OFF = "TurnedOff"
"""checkpoint.delta.mode is None: snapshots only."""
DELTAS_OFF = "DeltasOff"
"""Some worker takes no deltas although the job requests them; the message is its reason."""

# InProcess
PROCESSES_STAY = "ProcessesStay"
"""The other ranks' processes stay if a rank is lost."""
PROCESSES_RESTART = "ProcessesRestart"
"""Some or all processes would be restarted; the message names the first such worker and the reason."""

# SparesReady
SPARES_WAITING = "SparesWaiting"
"""All spares are ready."""
SPARES_COMING = "SparesComing"
"""Spares are being created, pulled or started, or will be once every worker has a node."""
SPARES_UNSCHEDULABLE = "SparesUnschedulable"
"""The scheduler finds no node for a spare; the message is the scheduler's. The job goes on."""
NO_SPARES = "NoSpares"
"""No spares are requested: spec.spares is 0, or the job does not train."""

# FullSize
ALL_WORKERS = "AllWorkers"
"""The job has as many workers as its spec requests."""
SHRUNK = "Shrunk"
"""No node took more workers within capacityTimeoutSeconds; the message names what the job waits for."""
GROWING = "Growing"
"""The job runs with fewer workers and has room again: it grows when few steps would be repeated."""

# Throttled
SIDECAR_THROTTLED = "SidecarThrottled"
"""Throttled for much of the last minute, so copies and restores are slow; the message has numbers."""
NOT_THROTTLED = "NotThrottled"
"""No sidecar is throttled."""

# Evictable
ONE_AT_A_TIME = "OneAtATime"
"""One worker may be evicted."""
HELD_BY_RESTORE = "RestoreUnderWay"
"""A worker's state is being restored: another loss might destroy the last copy."""
HELD_BY_MOVE = "MoveUnderWay"
"""A replacement is starting for a pod that must leave its node."""
HELD_BY_COPIES = "CopiesIncomplete"
"""The job is restored, but the copies on the holders are not complete again."""
BUDGET_REFUSED = "BudgetRefused"
"""The PodDisruptionBudget cannot be written; the message gives the reason. Training goes on."""
NO_BUDGET = "NoBudget"
"""There is no budget: it is turned off, the pods are another controller's, or nothing trains."""

# Restoring
SETTLING = "Settling"
"""A trainer failed; the operator waits briefly for a pod or node loss that explains it."""
HANDING_OVER = "HandingOver"
"""A pod that is being ended still sends its holders the data that they lack."""
WAITING_FOR_SIDECARS = "WaitingForSidecars"
"""Pods run, but not every sidecar has answered since the failure."""
NOTHING_TO_RESTORE_FROM = "NothingToRestoreFrom"
"""No version can be rebuilt from the sources that answer; the job waits for them."""
RETRYING = "Retrying"
"""A restore failed; the next try follows shortly."""
WAITING_FOR_TRAINERS = "WaitingForTrainers"
"""Every rank is restored, but not every launcher waits for the release; the message gives the reason."""
HEALTH_CHECK_FAILED = "HealthCheckFailed"
"""failurePolicy.healthCheck fails, and no pod is moved for it; the message has the check's output."""
RESTORE_STALLED = "RestoreStalled"
"""A restore makes no progress; the message names the source that delivers nothing."""
COPYING = "Copying"
"""Ranks are being restored to the version of this attempt."""
STARTING = "Starting"
"""Training was released; not every worker has reported its first step."""
DONE = "Done"
"""There is nothing to restore."""

# Running
RELEASED = "Released"
"""The trainers were released."""
NOT_RELEASED = "NotReleased"
"""The trainers are held."""
ENDED = "Ended"
"""Training has ended."""

# Suspended
SUSPEND_REQUESTED = "SuspendRequested"
"""spec.suspend is true."""
SUSPENDING = "Suspending"
"""Trainers are being stopped, and sidecars upload what is not yet uploaded."""
RESUMED = "Resumed"
"""spec.suspend is false again."""

# Completed, Failed
ALL_SUCCEEDED = "AllTrainersSucceeded"
"""Every training command exited with 0."""
MAX_RESTARTS_EXCEEDED = "MaxRestartsExceeded"
"""Training failed by itself, without progress, more often than failurePolicy.maxRestarts allows."""
FAILURE_POLICY_RULE = "FailurePolicyRule"
"""A rule of failurePolicy.rules with action Fail applies; the message names it."""
DEADLINE_EXCEEDED = "DeadlineExceeded"
"""The job was active for longer than spec.activeDeadlineSeconds."""
TORCH_MISSING = "TorchMissing"
"""The training image has no usable torch; a restart would not help."""
CANNOT_START = "CannotStart"
"""The training command cannot be started at all; a restart would not help."""


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
    """The values of `status.recovery.cause`.

    Among causes seen at once, later members explain earlier ones: a lost node explains the crash of every
    trainer. `explains` decides about causes seen later."""

    DIVERGED = "Diverged"
    """The sanity gate refused rollbackAfterNonFinite steps in a row; the last good version is restored."""
    TRAINER_CRASH = "TrainerCrash"
    """A training command failed and nothing else explains it."""
    STEP_SUSPECTED = "StepSuspected"
    """A rank called `suspect`: all ranks go back to a version before the step and repeat it."""
    OOM_KILLED = "OOMKilled"
    """A training command failed because the kernel's OOM killer ended one of its processes."""
    RESTORE_FAILED = "RestoreFailed"
    """A rank could not be brought to the attempt's version. Explains the exit of its training command."""
    STATUS_OUTDATED = "StatusOutdated"
    """Sidecars or the remote tier have a newer attempt, signed by the operator, than the status has."""
    NODE_LEAVING = "NodeLeaving"
    """A pod was moved before its node is drained or Kubernetes ends it; the old pod trained until then."""
    POD_DELETED = "PodDeleted"
    HUNG = "Hung"
    """Training made no step for far longer than usual.

    If the same worker held the others up twice in a row, its pod is replaced elsewhere."""
    GPU_FAULT = "GPUFault"
    """The driver reported a hardware failure to a rank: its pod is replaced on another node."""
    STEP_DIFFERED = "StepDiffered"
    """A suspected step gave other bits when one worker repeated it: that pod moves to another node."""
    START_FAILED = "StartFailed"
    """A worker's command, and no other's, failed twice on a node before its first step: its pod moves."""
    HEALTH_CHECK_FAILED = "HealthCheckFailed"
    """failurePolicy.healthCheck failed on a worker's node: its pod is replaced on another."""
    STUCK = "Stuck"
    """Processes of a training command survive SIGKILL: their pod is replaced on another node."""
    RESTORE_STALLED = "RestoreStalled"
    """A worker's restore stalls on a source that delivers nothing: its pod is replaced elsewhere, once."""
    SIDECAR_SILENT = "SidecarSilent"
    """A pod's sidecar stopped answering. Explains the operator's deletion that follows."""
    NODE_SILENT = "NodeSilent"
    """Neither the operator nor peers can reach a pod's host; Kubernetes may not have noticed yet."""
    POD_FAILED = "PodFailed"
    POD_EVICTED = "PodEvicted"
    STORAGE_EXCEEDED = "StorageExceeded"
    """A kubelet ended a pod that used more local storage than its own limits allow."""
    NODE_LOST = "NodeLost"
    DOMAIN_LOST = "DomainLost"
    """Every node of a failure domain (a rack, a zone) with more than one is lost."""
    ALL_PODS_LOST = "AllPodsLost"
    """All pods were lost at once: nothing is left in memory."""
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
