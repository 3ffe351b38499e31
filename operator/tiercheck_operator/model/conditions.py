"""Lists every condition type and reason, and every cause that can bring a job down."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

PLACED = "Placed"
"""Every worker has a pod on a node, and the copies have holders."""
PROTECTED = "Protected"
"""Copies are where the spec wants them, and the tiers work."""
RESTORING = "Restoring"
"""The job is on its way back (or to its first step)."""
RUNNING = "Running"
"""Training was released in the current attempt and has not ended."""
SUSPENDED = "Suspended"
"""spec.suspend is true and the pods are gone."""
COMPLETED = "Completed"
"""Training succeeded on every worker."""
FAILED = "Failed"
"""The job was given up."""
DELTAS_ACTIVE = "DeltasActive"
"""Every step is kept for the price of a delta."""
IN_PROCESS = "InProcess"
"""The processes of all others stay when a rank is lost. Of jobs with several ranks."""
SPARES_READY = "SparesReady"
"""As many spares as wanted wait to take a lost worker's place."""
FULL_SIZE = "FullSize"
"""The job has as many workers as its spec asks for. Of jobs with spec.elastic."""

THROTTLED = "Throttled"
"""The kernel holds a sidecar back, because its CPU limit is used up. Of jobs that it has happened to."""

REMOTE_SAFE = "RemoteSafe"
"""The remote tier keeps the promises that are relied on. Of jobs where it did not."""

EXACT = "Exact"
"""Steps trained again after the last restore are bitwise what they were. Of jobs that compared any."""

EVICTABLE = "Evictable"
"""A worker may be evicted now; while it is False, the job's PodDisruptionBudget holds node drains up."""

# Placed
ALL_PLACED = "AllPlaced"
"""All pods have nodes, all copies have holders, and every node says where it stands."""
WAITING_FOR_PODS = "WaitingForPods"
"""Pods are being created, pulled or started."""
IMAGE_PULL = "ImagePull"
"""An image cannot be pulled; the message is the kubelet's."""
CONTAINER_CANNOT_START = "ContainerCannotStart"
"""The kubelet cannot start a container, as when its Secret is missing; the message is the kubelet's."""
WAITING_FOR_QUEUE = "WaitingForQueue"
"""A queue has not admitted some pods yet: they have scheduling gates. That is no lack of capacity."""
GANG_UNAVAILABLE = "GangUnavailable"
"""spec.gang cannot be had: its API is not served, or not for the operator. The job does not start without."""
REFUSED = "Refused"
"""The API server refuses what the job needs (quota, Pod Security, a webhook, rights), in its own words."""
CREDENTIALS_LOST = "CredentialsLost"
"""The job's Secret is gone or unreadable, and sidecars run with what was in it: no other is made then."""
NODE_MEMORY_FORBIDDEN = "NodeMemoryForbidden"
"""tiers.local.medium is NodeMemory, and the namespace does not allow hostPath volumes; the message says how
it could."""
UNSCHEDULABLE = "Unschedulable"
"""The scheduler finds no node for a pod; the message is the scheduler's."""
NO_CAPACITY = "NoCapacity"
"""For longer than failurePolicy.capacityTimeoutSeconds. The job waits; what other workers hold is kept."""
NODES_UNLABELLED = "NodesUnlabelled"
"""Nodes lack the label of a level, so that level cannot be used for spreading."""
TOPOLOGY_NOT_FOUND = "TopologyNotFound"
"""spec.topology.kueueTopology names no Topology that can be read. A job does not start without; one that runs
keeps its copies where they are."""
COPIES_MOVING = "CopiesMoving"
"""Some workers get other holders while training goes on; old ones stay until the new ones are complete."""
MOVE_DELAYED = "MoveDelayed"
"""Copies ought to move, and cannot yet; the message says why."""
DEGRADED_SPREAD = "DegradedSpread"
"""Copies are kept in different domains of a narrower level than wanted (mode Preferred)."""
MOVING = "Moving"
"""A pod will have to leave its node; it trains on until its replacement is ready."""
NO_ROOM_TO_MOVE = "NoRoomToMove"
"""A pod will have to leave its node, and no node has room for its replacement: it stays until it is ended."""
NODE_NOT_READY = "NodeNotReady"
"""A node of the job is not ready, or its kubelet is silent. Its pods train on as long as they answer; new
ones go elsewhere."""
DEVICE_UNHEALTHY = "DeviceUnhealthy"
"""The kubelet says that a device of a worker's pod is not well. Its next pod prefers other nodes."""
OWNER_RESIZED = "OwnerResized"
"""The workload that the job is attached to has another number of workers by now; the message names both."""
INSUFFICIENT_DOMAINS = "InsufficientDomains"
"""Mode Required, and the nodes cannot satisfy it; the job waits."""
INVALID_TEMPLATE = "InvalidTemplate"
"""spec.template cannot be made into a pod; the message says what to change."""
INVALID_SPEC = "InvalidSpec"
"""Another part of the spec cannot be used; the message says what to change."""

MEMORY_TOO_SMALL = "MemoryTooSmall"
"""The memory volumes cannot hold the slots. Placed: the job does not start. Protected: no snapshots."""

# Protected
COPIES_COMPLETE = "CopiesComplete"
"""A complete version lies in the tiers, and holders are as wanted."""
INTERFACE_MISSING = "InterfaceMissing"
"""The same, but a worker lacks an interface that tiers.peer.interfaces names, or cannot use it; the message
says which there are. Copies go over the others."""
WAITING_FOR_FIRST_VERSION = "WaitingForFirstVersion"
"""No version is complete on its holders yet."""
UNPROTECTED_WORKERS = "UnprotectedWorkers"
"""Some workers have no holder in another domain."""
NO_COPIES = "NoCopies"
"""There are neither copies nor parity."""
SIDECAR_RESTARTING = "SidecarRestarting"
"""A sidecar has ended and is not back yet; the message says how long its kubelet waits. Training goes on."""
SIDECAR_NOT_ANSWERING = "SidecarNotAnswering"
"""A sidecar does not answer, and its kubelet says nothing of it. Training goes on if it makes steps."""
SIDECAR_RESTARTED = "SidecarRestarted"
"""A sidecar ended and was started again; no version was completed since. Training was not touched."""
CANNOT_SAVE = "CannotSave"
"""Something in the state cannot be captured, so no version is taken; the message names it."""
INTERNAL_ERROR = "InternalError"
"""A part of a sidecar failed in a way that nobody thought of, and was begun again; the message says which
part and where."""
REHEARSAL_FAILED = "RehearsalFailed"
"""Something of the newest version would not come back from one tier; the message names the rank, the tier,
the artifact and the place."""
BAD_REPORT = "BadReport"
"""What a sidecar tells worker 0 cannot be true, or be reckoned with: it is refused, and the others go on."""
SOURCE_STALLED = "SourceStalled"
"""Something that a restore would read from hangs at a worker: what was asked of it has not come back.
Restores go on without it."""
REMOTE_UNREACHABLE = "RemoteUnreachable"
"""The remote tier does not answer or refuses; the message says what to do."""

REMOTE_OWNED = "RemoteOwned"
"""The job's folder in the remote tier belongs to another job, or to one of the same name in another cluster;
the message says to which, and how to take it over."""

# RemoteSafe
REMOTE_NOT_SAFE = "RemoteNotSafe"
"""The store does not keep a promise that is relied on; the message says which. Uploads go on."""
PROMISES_KEPT = "PromisesKept"
"""When it was tried again, it kept them."""

# Exact
PROVEN = "Proven"
"""Every step that was trained again after the last restore is bitwise equal."""
DIFFERS = "Differs"
"""A step that was trained again gave something else; the message names the rank and what differs first."""
NOT_COMPARABLE = "NotComparable"
"""No rank could compare a step; the message says why."""

# DeltasActive
EVERY_STEP = "EveryStep"
"""Every worker takes a delta at every step."""
DELTAS_TURNED_OFF = "TurnedOff"
"""checkpoint.delta.mode is None: snapshots only."""
DELTAS_OFF = "DeltasOff"
"""Some worker takes no deltas although the job wants them; the message is its reason."""

# InProcess
PROCESSES_STAY = "ProcessesStay"
"""If a rank is lost, the processes of all others stay."""
PROCESSES_RESTART = "ProcessesRestart"
"""Some or all would be started anew; the message names the first worker of them, and why."""

# SparesReady
SPARES_WAITING = "SparesWaiting"
"""All spares are ready."""
SPARES_COMING = "SparesComing"
"""Spares are being made, pulled or started; or they are made once every worker has a node."""
SPARES_UNSCHEDULABLE = "SparesUnschedulable"
"""The scheduler finds no node for a spare; the message is the scheduler's. The job does without it."""
NO_SPARES = "NoSpares"
"""None are wanted: spec.spares is 0, or the job does not train."""

# FullSize
ALL_WORKERS = "AllWorkers"
"""It has."""
SHRUNK = "Shrunk"
"""It goes on with fewer: no node took others for capacityTimeoutSeconds; the message says what it awaits."""
GROWING = "Growing"
"""It goes on with fewer, and has room again: it grows soon, when few steps would be made twice."""

# Throttled
SIDECAR_THROTTLED = "SidecarThrottled"
"""In a good part of the last minute; copies and restores are slow. The message has numbers."""
NOT_THROTTLED = "NotThrottled"
"""Not any more."""

# Evictable
ONE_AT_A_TIME = "OneAtATime"
"""One worker may be evicted."""
HELD_BY_RESTORE = "RestoreUnderWay"
"""The state of a worker is on its way back: another loss might take the last copy."""
HELD_BY_MOVE = "MoveUnderWay"
"""A replacement comes up for a pod that has to leave its node."""
HELD_BY_COPIES = "CopiesIncomplete"
"""Restored, but the copies on the holders are not complete again."""
BUDGET_REFUSED = "BudgetRefused"
"""The PodDisruptionBudget cannot be made or changed; the message says why. Training does not depend on it."""
NO_BUDGET = "NoBudget"
"""No PodDisruptionBudget: it is turned off, the pods are another controller's, or nothing is trained."""

# Restoring
SETTLING = "Settling"
"""A trainer failed; a moment is given to find out whether a pod or node loss explains it."""
HANDING_OVER = "HandingOver"
"""A pod that is being ended still brings its holders what they lack."""
WAITING_FOR_SIDECARS = "WaitingForSidecars"
"""Pods run, but not every sidecar has answered since the failure."""
NOTHING_TO_RESTORE_FROM = "NothingToRestoreFrom"
"""No version can be rebuilt from the sources that answer; the job waits for them."""
RETRYING = "Retrying"
"""A restore failed; the next try follows shortly."""
WAITING_FOR_TRAINERS = "WaitingForTrainers"
"""Every rank's state is there, but not every launcher waits for the release; the message says why."""
HEALTH_CHECK_FAILED = "HealthCheckFailed"
"""failurePolicy.healthCheck fails where it runs, no pod is moved for it now; the message has its words."""
RESTORE_STALLED = "RestoreStalled"
"""A restore makes no progress: nothing comes from what it waits for, and the message names that."""
COPYING = "Copying"
"""Ranks are being brought to the version of this attempt."""
STARTING = "Starting"
"""Training was released; not every worker has reported its first step."""
DONE = "Done"
"""Nothing to restore."""

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
"""Trainers are being stopped and sidecars upload what they owe."""
RESUMED = "Resumed"
"""spec.suspend is false again."""

# Completed, Failed
ALL_SUCCEEDED = "AllTrainersSucceeded"
"""Every training command exited with 0."""
MAX_RESTARTS_EXCEEDED = "MaxRestartsExceeded"
"""Training failed by itself more often than failurePolicy.maxRestarts allows, not getting on in between."""
FAILURE_POLICY_RULE = "FailurePolicyRule"
"""A rule of failurePolicy.rules with action Fail applies; the message names it."""
DEADLINE_EXCEEDED = "DeadlineExceeded"
"""The job was active for longer than spec.activeDeadlineSeconds."""
TORCH_MISSING = "TorchMissing"
"""The training image has no usable torch; starting it again would not help."""
CANNOT_START = "CannotStart"
"""The training command cannot be started at all; starting it again would not help."""


@dataclass(frozen=True)
class Finding:
    """A reason and a message, on their way to a condition."""

    reason: str
    message: str
    wake_after: float | None = None
    """Seconds until time alone may change it, if that is known."""


def listed(entries: Sequence[object], most: int) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(entries) - most} more" if len(entries) > most else ""
    return ", ".join(map(str, entries[:most])) + more


def numbered(numbers: Collection[int], most: int = 5, noun: str = "worker") -> str:
    """ "worker 2", "workers 1, 2 and 3", with 3 as `most` "workers 0, 1, 2 and 61 more"."""
    first, *more = sorted(set(numbers))
    if not more:
        return f"{noun} {first}"
    if len(more) > most:
        return f"{noun}s {listed([first, *more], most)}"
    return f"{noun}s {', '.join(map(str, [first, *more[:-1]]))} and {more[-1]}"


def plural(count: int, noun: str) -> str:
    """`3 steps`, `1 step`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class Cause(str, Enum):
    """`status.recovery.cause`. Of what is seen at once, later members explain earlier ones: a lost node
    explains the crash of every trainer. Of what is seen later, see `explains`."""

    DIVERGED = "Diverged"
    """The sanity gate refused failurePolicy.rollbackAfterNonFinite steps in a row: the job goes back to the
    last good version."""
    TRAINER_CRASH = "TrainerCrash"
    """A training command failed and nothing else explains it."""
    STEP_SUSPECTED = "StepSuspected"
    """A rank called `suspect`: all go back to a version before the step, and make it again."""
    OOM_KILLED = "OOMKilled"
    """A training command failed because the kernel killed one of its processes for want of memory."""
    RESTORE_FAILED = "RestoreFailed"
    """A rank could not be brought to the attempt's version. Explains the exit of its training command."""
    STATUS_OUTDATED = "StatusOutdated"
    """Sidecars or the remote tier know a newer attempt, signed by the operator, than the status does."""
    NODE_LEAVING = "NodeLeaving"
    """A pod was moved before its node is emptied or Kubernetes ends it. Its old pod trained until then."""
    POD_DELETED = "PodDeleted"
    HUNG = "Hung"
    """Training made no step for far longer than usual. If the same worker held the others up twice in a row,
    its pod is replaced elsewhere."""
    GPU_FAULT = "GPUFault"
    """The driver told a rank that the hardware failed: its pod is replaced on another node."""
    STEP_DIFFERED = "StepDiffered"
    """A suspected step gave other bits when it was made again, at one worker alone: its pod is replaced on
    another node."""
    START_FAILED = "StartFailed"
    """A worker's command failed twice in a row before its first step on the same node, and no other's did:
    its pod is replaced on another."""
    HEALTH_CHECK_FAILED = "HealthCheckFailed"
    """failurePolicy.healthCheck failed on a worker's node: its pod is replaced on another."""
    STUCK = "Stuck"
    """Processes of a training command outlive being killed: their pod is replaced on another node."""
    RESTORE_STALLED = "RestoreStalled"
    """A worker cannot be restored where it is, because nothing comes from what it waits for: its pod is
    replaced on another node, once."""
    SIDECAR_SILENT = "SidecarSilent"
    """A pod's sidecar stopped answering. Explains the deletion that follows, which is ours."""
    NODE_SILENT = "NodeSilent"
    """Neither we nor its peers hear anything from a pod's host; Kubernetes may not know it yet."""
    POD_FAILED = "PodFailed"
    POD_EVICTED = "PodEvicted"
    STORAGE_EXCEEDED = "StorageExceeded"
    """A kubelet ended a pod that used more local storage than its own limits allow."""
    NODE_LOST = "NodeLost"
    DOMAIN_LOST = "DomainLost"
    """Every node of a failure domain (a rack, a zone) is lost, more than one."""
    ALL_PODS_LOST = "AllPodsLost"
    """Every pod at once: nothing is left in memory."""
    GROWN = "Grown"
    """A job that went on with fewer workers has room again, and begins an attempt with all of them."""
    RESUMED = "Resumed"
    """spec.suspend became false."""
    FIRST_START = "FirstStart"
    SUSPENDING = "Suspending"
    """spec.suspend became true: trainers stop, sidecars upload, pods go."""

    @property
    def weight(self) -> int:
        return list(Cause).index(self)

    def explains(self, earlier: Cause) -> bool:
        """Whether `earlier`, which was seen first in the same failure, came from this. Otherwise this came
        from it, or has nothing to do with it, and what was seen first stands: a node that is switched off
        after a drain was drained.
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
        """Nothing failed: the job only starts, or ends, or grows."""
        return self in (Cause.GROWN, Cause.RESUMED, Cause.FIRST_START, Cause.SUSPENDING)

    @property
    def own_fault(self) -> bool:
        """Training is to blame: unless a rule says otherwise, it counts against failurePolicy.maxRestarts."""
        itself = (Cause.TRAINER_CRASH, Cause.STEP_SUSPECTED, Cause.OOM_KILLED, Cause.HUNG, Cause.DIVERGED)
        return self in (*itself, Cause.STORAGE_EXCEEDED)

    @property
    def in_place(self) -> bool:
        """If no pod was replaced either, trainers start again where they are, with all that memory held."""
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
        """Of a status; an unknown word counts as a restore that failed, which is nobody's fault."""
        try:
            return Cause(text)
        except ValueError:
            return Cause.RESTORE_FAILED
