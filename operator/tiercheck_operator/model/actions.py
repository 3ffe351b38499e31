"""What a decision asks for. Carrying it out is somebody else's business (`execute`)."""

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
    """Made once; never replaced while they exist, because running sidecars hold the old ones."""


@dataclass(frozen=True)
class EnsureGang:
    """What a gang scheduler knows the workers by. If it cannot be had, the next observation says why."""


@dataclass(frozen=True)
class RemoveGang:
    pass


@dataclass(frozen=True)
class EnsureBudget:
    """The job's PodDisruptionBudget. If it cannot be had, the next observation says why; nothing else waits
    for it."""

    min_available: int


@dataclass(frozen=True)
class RemoveBudget:
    pass


@dataclass(frozen=True)
class CreatePod:
    worker: int
    incarnation: int
    avoid: tuple[str, ...]
    """Host names to stay away from."""
    prefer: str = ""
    """Host name of the node where the worker's memory lies; empty: none is better than another."""
    unwelcome: tuple[str, ...] = ()
    """Host names to stay away from if that is possible."""


@dataclass(frozen=True)
class CreateSpare:
    number: int
    avoid: tuple[str, ...]
    unwelcome: tuple[str, ...] = ()


@dataclass(frozen=True)
class Promote:
    """Give a pod the identity of a worker: a spare, or a survivor of a job that goes on smaller. Nothing
    happens if the pod has changed since it was seen."""

    pod: PodView
    worker: int
    incarnation: int


@dataclass(frozen=True)
class DeletePod:
    name: str
    uid: str
    """Deleted only if it is still this one."""
    force: bool
    """Without waiting for its node, which is gone."""
    why: str
    """Which pod, a colon, and why it goes: for the log and for Events."""
    given_up: str = ""
    """What is noted on the pod before (`PodView.given_up`)."""
    evict: bool = False
    """By an eviction, so that its own controller sees a disruption and no failure."""


@dataclass(frozen=True)
class SavePlacement:
    placement: SavedPlacement


@dataclass(frozen=True)
class ProbeSidecar:
    """Ask this pod's sidecar now."""

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
    """Returns what a refusal of the action is remembered by.

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
    """An Event, to be posted if the status that it belongs to was written."""

    type: str
    """Normal or Warning."""
    reason: str
    message: str


@dataclass(frozen=True)
class Decision:
    """Carried out in this order; if the status cannot be written, what follows it is not done."""

    before: tuple[Action, ...] = ()
    status: JobRecord | None = None
    """None: leave it as it is."""
    after: tuple[Action, ...] = ()
    notices: tuple[Notice, ...] = ()
    wake_after: float | None = None
    """Seconds until time alone may change the decision."""
