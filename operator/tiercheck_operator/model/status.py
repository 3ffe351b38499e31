"""Defines the job's status, which is the controller's only memory, and its form in the API.

The CRD (crds/tiercheckjobs.yaml) describes each field; a docstring here says what only decisions need.

`parse_record(render_record(r)) == r` up to the rounding of times; unknown fields are dropped.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from tiercheck.protocol.version import Branch, History, Version
from tiercheck_operator.model import conditions as kinds
from tiercheck_operator.model.serialization import ALWAYS, As, At, from_api, to_api


def rfc3339(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rfc3339_millis(seconds: float) -> str:
    """Formats a time to the millisecond, for times of which differences are taken."""
    moment = datetime.datetime.fromtimestamp(round(seconds, 3), datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_time(text: object) -> float | None:
    """Returns the unix seconds of an RFC 3339 time; None for any other value."""
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()


Moment = Annotated[float, As(read=parse_time, write=rfc3339_millis)]
"""Unix seconds."""


@dataclass(frozen=True)
class Condition:
    """A metav1.Condition. `changed` is lastTransitionTime, RFC 3339."""

    type: str
    status: Annotated[
        bool | None,
        As({"True": True, "False": False}.get, {True: "True", False: "False", None: "Unknown"}.get),
    ]
    """True, False, or None for Unknown."""
    reason: str
    message: str
    changed: Annotated[str, At("lastTransitionTime")]
    observed_generation: Annotated[int, ALWAYS] = 0


@dataclass(frozen=True)
class Facts:
    """The facts of a failure that `failurePolicy.rules` match."""

    exit_code: int | None = None
    """Exit code of the training command that failed first; None: none failed, or it is not known."""
    reasons: tuple[str, ...] = ()
    """The reasons beside the cause, from the launcher, the container or the pod."""
    nodes: tuple[str, ...] = ()
    """The nodes of the failure."""


NO_FACTS = Facts()


@dataclass(frozen=True)
class Recovery:
    """A recovery under way, from the failure to the first step after it. Times are unix seconds."""

    cause: str
    message: str
    failed_at: Moment
    detected_at: Moment
    attempt: int | None = None
    reason: str = ""
    step: Annotated[int, ALWAYS] = 0
    version_attempt: Annotated[int, ALWAYS] = 0
    lost_steps: Annotated[int, ALWAYS] = 0
    decided_at: Moment | None = None
    restored_at: Moment | None = None
    released_at: Moment | None = None
    failed_versions: tuple[Version, ...] = ()
    facts: Annotated[Facts, At("")] = Facts()
    rule: str = ""
    tries: int = 0
    reached: Annotated[int, At("reachedStep")] = 0
    """The newest known step of the ended attempt, which is only reported every few seconds."""
    noticed_at: Moment | None = None
    """The time of the first failure since the last step, if `detected_at` is of a later one."""
    stalled: Annotated[tuple[int, ...], At("stalledWorkers")] = ()
    undone: bool = False
    keeps: bool = False
    kept: Annotated[int, At("keptRanks")] = 0
    restarted_message: str = ""

    @property
    def version(self) -> Version | None:
        return Version(self.step, self.version_attempt) if self.step else None


SENTENCES = ("message", "reason", "restartedMessage", "exactMessage")
"""Fields of an ended recovery that are shortened if the status would be too large."""


@dataclass(frozen=True)
class TierRecord:
    step: int
    time: str
    lag_steps: int


@dataclass(frozen=True)
class ProofRecord:
    """The oldest of all ranks' newest proofs of one tier."""

    step: int
    time: str
    """RFC 3339."""


@dataclass(frozen=True)
class PlacementRecord:
    hash: str
    spread_achieved: str
    tolerates: Annotated[tuple[str, ...], At("toleratesOnceComplete")]
    unprotected_workers: int
    unprotected_reason: str = ""
    complete: Annotated[bool, At("tolerance")] = False
    """True if everything that the placement requires is in place for some version."""

    @property
    def survives(self) -> tuple[str, ...]:
        """Returns what may be lost at present without any loss from memory."""
        return self.tolerates if self.complete else ()


@dataclass(frozen=True)
class CheckpointRecord:
    """The state of saving. `deltas`: "EveryStep", "Off", or empty if not known yet.

    `snapshot_every`: steps, 0 if not decided yet."""

    snapshot_every: Annotated[int, At("snapshotEverySteps")] = 0
    deltas: str = ""
    deltas_reason: str = ""


@dataclass(frozen=True)
class MemoryRecord:
    """The memory use, in bytes, of the worker that needs most."""

    needed: Annotated[int, At("neededBytes")]
    limit: Annotated[int, At("limitBytes")]
    local: Annotated[int, At("localBytes")]
    peer: Annotated[int, At("peerBytes")]


@dataclass(frozen=True)
class SparesRecord:
    wanted: int
    ready: int


@dataclass(frozen=True)
class SizeRecord:
    """The size of a job that runs with fewer workers than its spec requests."""

    workers: int
    room_since: Moment | None = None


@dataclass(frozen=True)
class HangRecord:
    """The worker that held the others up in the last hang, and how often in a row."""

    worker: int
    node: str
    times: int


@dataclass(frozen=True)
class PlaceRecord:
    """A node on which a pod of the job did not start, or which a pod had to leave."""

    node: str
    times: int
    message: str
    time: Moment
    created: Annotated[Moment, At("podCreated")]
    """The creation time of the newest such pod: an older one is not counted again."""


@dataclass(frozen=True)
class FailedStartRecord:
    """The worker that failed before its first step in this recovery's last attempts, and how often."""

    worker: int
    node: str
    times: int
    moved: Annotated[tuple[int, ...], At("movedWorkers")] = ()


_AS_BRANCHES = As(
    lambda raw: History(tuple(from_api(Branch, entry) for entry in raw)), lambda known: to_api(known.branches)
)


@dataclass(frozen=True)
class JobRecord:
    observed_generation: Annotated[int, ALWAYS] = 0
    attempt: Annotated[int, ALWAYS] = 0
    phase: Annotated[str, ALWAYS] = ""
    members: str = ""
    sidecar_image: str = ""
    history: Annotated[History, _AS_BRANCHES] = field(default_factory=History)
    base: Annotated[Version | None, At("restore.base")] = None
    crashes: Annotated[int, At("restarts.crash"), ALWAYS] = 0
    counted: Annotated[int, At("restarts.counted"), ALWAYS] = 0
    crash_step: Annotated[int, At("restarts.crashStep"), ALWAYS] = 0
    disruptions: Annotated[int, At("restarts.disruption"), ALWAYS] = 0
    step: Annotated[int | None, At("progress.step")] = None
    step_seconds: Annotated[float | None, At("progress.stepSeconds"), As(write=partial(round, ndigits=6))] = (
        None
    )
    restored_bytes: Annotated[int, At("progress.restoredBytes")] = 0
    restore_bytes: Annotated[int, At("progress.restoreBytes")] = 0
    tiers: Mapping[str, TierRecord] = field(default_factory=dict)
    proofs: Annotated[Mapping[str, ProofRecord], At("restore.lastProof.tiers")] = field(default_factory=dict)
    placement: PlacementRecord | None = None
    size: SizeRecord | None = None
    spares: SparesRecord | None = None
    checkpoint: CheckpointRecord | None = None
    memory: MemoryRecord | None = None
    recovery: Recovery | None = None
    hang: HangRecord | None = None
    places: Annotated[tuple[PlaceRecord, ...], At("avoidedNodes")] = ()
    failed_start: FailedStartRecord | None = None
    last_recovery: Mapping[str, Any] | None = None
    """The last ended recovery in its API form; no decision depends on it."""
    recoveries: tuple[Mapping[str, Any], ...] = ()
    started: Annotated[str | None, At("startTime")] = None
    completed: Annotated[str | None, At("completionTime")] = None
    conditions: tuple[Condition, ...] = ()

    @property
    def finished(self) -> bool:
        """Returns whether the job has completed or failed."""
        return self.holds(kinds.COMPLETED) or self.holds(kinds.FAILED)

    @property
    def is_restoring(self) -> bool:
        """Returns whether a recovery is under way and training is not released yet."""
        return self.recovery is not None and self.recovery.released_at is None

    def condition(self, kind: str) -> Condition | None:
        return next((entry for entry in self.conditions if entry.type == kind), None)

    def holds(self, kind: str) -> bool:
        """Returns whether the condition exists and is true."""
        found = self.condition(kind)
        return found is not None and found.status is True

    @property
    def restored_version(self) -> Version | None:
        """Returns the version from which the current attempt began; None: from scratch."""
        branches = self.history.branches
        if not branches or not branches[-1].base_step:
            return None
        base = branches[-1].base_step
        owner = self.history.owner(base)
        return None if owner is None else Version(base, owner)

    @property
    def resized_from(self) -> int:
        """Returns how many ranks made that version if the attempt has another number of ranks; else 0."""
        version = self.restored_version
        if version is None:
            return 0
        made, now = self.history.ranks_of(version), self.history.ranks
        return made if made and now and made != now else 0


_REASON_ORDER = (
    (kinds.FAILED, True),
    (kinds.COMPLETED, True),
    (kinds.SUSPENDED, True),
    (kinds.PLACED, False),
    (kinds.RUNNING, False),
    (kinds.PROTECTED, False),
    (kinds.REMOTE_SAFE, False),
    (kinds.EXACT, False),
    (kinds.FULL_SIZE, False),
    (kinds.SPARES_READY, False),
    (kinds.THROTTLED, True),
)
"""Conditions in the order in which they explain the job's state, each with the explaining status."""


def _reason(record: JobRecord) -> str:
    """Returns the reason column of `kubectl get`; empty: the job trains, and nothing is wrong."""
    found = (record.condition(kind) for kind, status in _REASON_ORDER if record.holds(kind) is status)
    return next((entry.reason for entry in found if entry is not None and entry.status is not None), "")


def parse_record(raw: Mapping[str, Any]) -> JobRecord:
    """Parses `status` from the API. Raises the errors of `from_api`."""
    if placement := raw.get("placement"):
        raw = {**raw, "placement": {"toleratesOnceComplete": placement.get("tolerates"), **placement}}
    return from_api(JobRecord, raw)


def render_record(record: JobRecord) -> dict[str, Any]:
    """Renders `status` for the API: the record's fields, and derived ones for users."""
    raw: dict[str, Any] = to_api(record if record.restore_bytes else replace(record, restored_bytes=0))
    if reason := _reason(record):
        raw["reason"] = reason
    raw["restarts"]["total"] = record.crashes + record.disruptions
    if record.restore_bytes:
        raw["progress"]["restoredBytes"] = record.restored_bytes
    if record.proofs:
        oldest = min(record.proofs.values(), key=lambda proof: (proof.time, proof.step))
        raw["restore"]["lastProof"] |= {"step": oldest.step, "time": oldest.time}
    if (placement := record.placement) is not None:
        raw["placement"]["tolerates"] = list(placement.survives)
        if placement.complete:
            raw["placement"]["tolerance"] = ", ".join(placement.tolerates) or "nothing"
            del raw["placement"]["toleratesOnceComplete"]
    if record.recovery is not None and record.recovery.attempt is None:
        for name in ("step", "versionAttempt", "lostSteps"):
            del raw["recovery"][name]  # step 0 would mean a start from scratch
    return raw
