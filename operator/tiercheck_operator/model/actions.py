"""Defines the actions that a decision requests; `controller.execute` carries them out."""

from __future__ import annotations

from dataclasses import dataclass

from tiercheck.protocol.directive import Directive
from tiercheck.protocol.report import SPARE
from tiercheck_operator.model.observed import PodView
from tiercheck_operator.model.saved_placement import SavedPlacement
from tiercheck_operator.model.status import JobRecord


@dataclass(frozen=True)
class EnsureService:
    pass


@dataclass(frozen=True)
class EnsureCredentials:
    """Creates the job's Secret; never replaces it, because running sidecars hold the old credentials."""


@dataclass(frozen=True)
class EnsureGang:
    """Creates the PodGroup for a gang scheduler. If that fails, the next observation has the reason."""


@dataclass(frozen=True)
class RemoveGang:
    pass


@dataclass(frozen=True)
class EnsureBudget:
    """Creates or updates the job's PodDisruptionBudget, for which nothing else waits.

    If that fails, the next observation has the reason.
    """

    min_available: int


@dataclass(frozen=True)
class RemoveBudget:
    pass


@dataclass(frozen=True)
class CreatePod:
    worker: int
    incarnation: int
    avoid: tuple[str, ...]
    """Host names of nodes that the pod must avoid."""
    prefer: str = ""
    """Host name of the node that holds the worker's memory; empty: no node is preferred."""
    unwelcome: tuple[str, ...] = ()
    """Host names of nodes that the pod avoids if possible."""


@dataclass(frozen=True)
class CreateSpare:
    number: int
    avoid: tuple[str, ...]
    unwelcome: tuple[str, ...] = ()


@dataclass(frozen=True)
class Promote:
    """Gives a worker's identity to a spare, or to a remaining pod of a job that shrinks.

    Nothing happens if the pod has changed since it was observed.
    """

    pod: PodView
    worker: int
    incarnation: int


@dataclass(frozen=True)
class DeletePod:
    name: str
    uid: str
    """The pod is deleted only if it still has this UID."""
    force: bool
    """True if the deletion does not wait for the pod's node, because the node is gone."""
    why: str
    """The pod, a colon, and the reason for the deletion: for the log and for Events."""
    given_up: str = ""
    """The annotation that the pod gets before its deletion (`PodView.given_up`)."""
    evict: bool = False
    """True if the pod is evicted, so that its own controller sees a disruption and not a failure."""
    unseen: bool = False
    """True if no watch shows the pod any more. It is deleted only if it is there and the job owns it."""


@dataclass(frozen=True)
class SavePlacement:
    placement: SavedPlacement


@dataclass(frozen=True)
class ProbeSidecar:
    """Requests a report from this pod's sidecar immediately."""

    pod_uid: str


@dataclass(frozen=True)
class Push:
    pod_uid: str
    directive: Directive


@dataclass(frozen=True)
class DeleteJob:
    pass


Action = (
    EnsureService
    | EnsureCredentials
    | EnsureGang
    | RemoveGang
    | EnsureBudget
    | RemoveBudget
    | CreatePod
    | CreateSpare
    | Promote
    | DeletePod
    | SavePlacement
    | ProbeSidecar
    | Push
    | DeleteJob
)


PODS = (CreatePod, CreateSpare)
NEEDED_BY_PODS = (EnsureGang, EnsureCredentials, EnsureService)


def subject_of(action: Action) -> int | str:
    """Returns the key under which a refusal of the action is remembered.

    That is a worker, SPARE for all spares, the UID of a pod, or the action's own name.
    """
    match action:
        case CreatePod():
            return action.worker
        case CreateSpare():
            return SPARE
        case DeletePod():
            return action.uid
        case Promote():
            return action.pod.uid
    return type(action).__name__


@dataclass(frozen=True)
class Notice:
    """An Event that is posted once the status that it belongs to is written."""

    type: str
    """Normal or Warning."""
    reason: str
    message: str


@dataclass(frozen=True)
class Decision:
    """Holds the steps of a decision in their order; if the status write fails, the later ones are skipped."""

    before: tuple[Action, ...] = ()
    status: JobRecord | None = None
    """The new status; None: it stays as it is."""
    after: tuple[Action, ...] = ()
    notices: tuple[Notice, ...] = ()
    wake_after: float | None = None
    """Seconds until time alone may change the decision."""
