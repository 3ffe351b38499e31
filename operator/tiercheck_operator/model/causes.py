"""Lists what can bring a job down, ordered by how much each cause explains.

A lost node explains the crash of every trainer.
"""

from __future__ import annotations

from enum import Enum


class Cause(str, Enum):
    """`status.recovery.cause`. Of what is seen at once, later members explain earlier ones; of what is seen
    later, see `explains`."""

    DIVERGED = "Diverged"
    """The sanity gate refused failurePolicy.rollbackAfterNonFinite steps in a row: the job goes back to the
    last good version."""
    TRAINER_CRASH = "TrainerCrash"
    """A training command failed and nothing else explains it."""
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
        itself = (Cause.TRAINER_CRASH, Cause.OOM_KILLED, Cause.HUNG, Cause.DIVERGED)
        return self in (*itself, Cause.STORAGE_EXCEEDED)

    @property
    def in_place(self) -> bool:
        """If no pod was replaced either, trainers start again where they are, with all that memory held."""
        return self in (
            Cause.TRAINER_CRASH,
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
