"""The job's status as decisions use it, and its spelling in the API. It is the only thing the controller remembers.

`parse_record(render_record(r)) == r` up to the rounding of times; unknown fields are dropped, missing ones have defaults, so that
a status written by an older version is understood.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tiercheck.protocol.version import Branch, History, Version


@dataclass(frozen=True)
class Condition:
    """A metav1.Condition. `changed` is lastTransitionTime, RFC 3339."""

    type: str
    status: bool
    reason: str
    message: str
    changed: str
    observed_generation: int = 0


@dataclass(frozen=True)
class Facts:
    """What `failurePolicy.rules` look at."""

    exit_code: int | None = None
    """Of the training command that failed first; None: none did, or it did not say."""
    reasons: tuple[str, ...] = ()
    """Beside the cause: what the launcher, the container or the pod gave as theirs."""
    nodes: tuple[str, ...] = ()
    """Where it happened."""


NO_FACTS = Facts()


@dataclass(frozen=True)
class Recovery:
    """A recovery under way, from the moment something failed to the first step after it. Times are unix seconds."""

    cause: str
    message: str
    """What failed, as a sentence."""
    failed_at: float
    detected_at: float
    attempt: int | None = None
    """The attempt that it led to; None: not decided yet."""
    reason: str = ""
    """Why this version was chosen, as a sentence."""
    step: int = 0
    """0: from scratch."""
    version_attempt: int = 0
    lost_steps: int = 0
    decided_at: float | None = None
    restored_at: float | None = None
    released_at: float | None = None
    failed_versions: tuple[Version, ...] = ()
    """Versions whose restore failed on the way back, once per failure, oldest first."""
    facts: Facts = Facts()
    rule: str = ""
    """Name of the rule that decided what the failure counts as; empty: none."""
    tries: int = 0
    """Attempts on the way back that ended before their first step."""
    reached: int = 0
    """The newest step that the ended attempt is known to have made; it is only heard of every few seconds."""
    noticed_at: float | None = None
    """When the first failure since the last step was noticed, if `detected_at` is of a later one."""
    stalled: tuple[int, ...] = ()
    """Workers that have got another node on the way back because they could not be restored where they were."""

    @property
    def version(self) -> Version | None:
        return Version(self.step, self.version_attempt) if self.step else None


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
    tolerates: tuple[str, ...]
    """Once copies are `complete`."""
    unprotected_workers: int
    unprotected_reason: str = ""
    """Which they are and why, in one sentence; empty if there are none."""
    complete: bool = False
    """Whether all of what the placement asks for lies where it should, of some version."""

    @property
    def survives(self) -> tuple[str, ...]:
        """What may vanish now with nothing lost from memory."""
        return self.tolerates if self.complete else ()


@dataclass(frozen=True)
class CheckpointRecord:
    """What is saved. `snapshot_every`: steps, 0 if not decided yet. `deltas`: "EveryStep", "Off", or empty if not known yet."""

    snapshot_every: int = 0
    deltas: str = ""
    deltas_reason: str = ""


@dataclass(frozen=True)
class MemoryRecord:
    """Bytes of the worker that needs most."""

    needed: int
    limit: int
    local: int
    peer: int


@dataclass(frozen=True)
class SparesRecord:
    wanted: int
    ready: int


@dataclass(frozen=True)
class SizeRecord:
    """Of a job that goes on with fewer workers than its spec asks for."""

    workers: int
    room_since: float | None = None
    """Since when it could grow back, unix seconds; None: it cannot."""


@dataclass(frozen=True)
class HangRecord:
    """Who held the others up when training hung last, and how often in a row."""

    worker: int
    node: str
    times: int


@dataclass(frozen=True)
class FailedStartRecord:
    """Whose command failed before its first step when the last attempts on the way back began, and how often in a row there."""

    worker: int
    node: str
    times: int
    moved: tuple[int, ...] = ()
    """Workers that have got another node for that since the last step."""


@dataclass(frozen=True)
class JobRecord:
    observed_generation: int = 0
    attempt: int = 0
    phase: str = ""
    members: str = ""
    sidecar_image: str = ""
    """With which the job's pods are made, until it is suspended."""
    history: History = field(default_factory=History)
    crashes: int = 0
    counted: int = 0
    """Restarts that count against maxRestarts now."""
    crash_step: int = 0
    """The newest step known when a restart was last counted."""
    disruptions: int = 0
    step: int | None = None
    step_seconds: float | None = None
    restored_bytes: int = 0
    """That a restore under way has brought back."""
    restore_bytes: int = 0
    """That it will have brought back in the end, as far as is known; 0: none is under way."""
    tiers: Mapping[str, TierRecord] = field(default_factory=dict)
    proofs: Mapping[str, ProofRecord] = field(default_factory=dict)
    """By tier, where all ranks have one."""
    placement: PlacementRecord | None = None
    size: SizeRecord | None = None
    """None: as many workers as the spec asks for."""
    spares: SparesRecord | None = None
    checkpoint: CheckpointRecord | None = None
    memory: MemoryRecord | None = None
    recovery: Recovery | None = None
    hang: HangRecord | None = None
    failed_start: FailedStartRecord | None = None
    last_recovery: Mapping[str, Any] | None = None
    """As in the API: nothing is decided by it."""
    recoveries: tuple[Mapping[str, Any], ...] = ()
    """The newest that have ended, newest first; spelled like `last_recovery`, with shorter sentences."""
    started: str | None = None
    completed: str | None = None
    conditions: tuple[Condition, ...] = ()

    def condition(self, kind: str) -> Condition | None:
        return next((entry for entry in self.conditions if entry.type == kind), None)

    def holds(self, kind: str) -> bool:
        """Whether the condition is there and true."""
        found = self.condition(kind)
        return found is not None and found.status

    @property
    def restored_version(self) -> Version | None:
        """What the current attempt began from; None: from scratch."""
        branches = self.history.branches
        if not branches or not branches[-1].base_step:
            return None
        base = branches[-1].base_step
        owner = self.history.owner(base)
        return None if owner is None else Version(base, owner)

    @property
    def resized_from(self) -> int:
        """How many ranks made that version, if not as many as the attempt has; 0: as many."""
        version = self.restored_version
        if version is None:
            return 0
        made, now = self.history.ranks_of(version), self.history.ranks
        return made if made and now and made != now else 0


def rfc3339(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def precise(seconds: float) -> str:
    """The same to the millisecond, for moments between which seconds are measured."""
    moment = datetime.datetime.fromtimestamp(round(seconds, 3), datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_time(text: object) -> float | None:
    """Unix seconds of an RFC 3339 time; None if it is none."""
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()


def parse_record(raw: Mapping[str, Any]) -> JobRecord:
    """Of `status` as the API gives it."""
    restarts, progress = raw.get("restarts") or {}, raw.get("progress") or {}
    placement, recovery = raw.get("placement"), raw.get("recovery")
    checkpoint, memory = raw.get("checkpoint"), raw.get("memory")
    return JobRecord(
        observed_generation=int(raw.get("observedGeneration") or 0),
        attempt=int(raw.get("attempt") or 0),
        phase=str(raw.get("phase") or ""),
        members=str(raw.get("members") or ""),
        sidecar_image=str(raw.get("sidecarImage") or ""),
        history=History(
            tuple(
                Branch(int(e["attempt"]), int(e["baseStep"]), int(e.get("ranks") or 0)) for e in raw.get("history") or []
            )
        ),
        crashes=int(restarts.get("crash") or 0),
        counted=int(restarts.get("counted") or 0),
        crash_step=int(restarts.get("crashStep") or 0),
        disruptions=int(restarts.get("disruption") or 0),
        step=_int(progress.get("step")),
        step_seconds=_float(progress.get("stepSeconds")),
        restored_bytes=int(progress.get("restoredBytes") or 0),
        restore_bytes=int(progress.get("restoreBytes") or 0),
        tiers={
            name: TierRecord(int(e.get("step") or 0), str(e.get("time") or ""), int(e.get("lagSteps") or 0))
            for name, e in (raw.get("tiers") or {}).items()
            if e
        },
        proofs={
            name: ProofRecord(int(e.get("step") or 0), str(e.get("time") or ""))
            for name, e in (((raw.get("restore") or {}).get("lastProof") or {}).get("tiers") or {}).items()
            if e
        },
        placement=None if not placement else PlacementRecord(
            hash=str(placement.get("hash") or ""),
            spread_achieved=str(placement.get("spreadAchieved") or ""),
            tolerates=tuple(placement.get("toleratesOnceComplete") or placement.get("tolerates") or ()),
            unprotected_workers=int(placement.get("unprotectedWorkers") or 0),
            unprotected_reason=str(placement.get("unprotectedReason") or ""),
            complete=bool(placement.get("tolerance")),
        ),
        size=None if not (size := raw.get("size")) else SizeRecord(
            int(size.get("workers") or 0), _moment(size.get("roomSince"))
        ),
        spares=None if not raw.get("spares") else SparesRecord(
            *(int(raw["spares"].get(name) or 0) for name in ("wanted", "ready"))
        ),
        checkpoint=None if not checkpoint else CheckpointRecord(
            snapshot_every=int(checkpoint.get("snapshotEverySteps") or 0),
            deltas=str(checkpoint.get("deltas") or ""),
            deltas_reason=str(checkpoint.get("deltasReason") or ""),
        ),
        memory=None if not memory else MemoryRecord(
            *(int(memory.get(name) or 0) for name in ("neededBytes", "limitBytes", "localBytes", "peerBytes"))
        ),
        recovery=None if not recovery else _parse_recovery(recovery),
        hang=None if not (hang := raw.get("hang")) else HangRecord(
            int(hang.get("worker") or 0), str(hang.get("node") or ""), int(hang.get("times") or 0)
        ),
        failed_start=None if not (start := raw.get("failedStart")) else FailedStartRecord(
            int(start.get("worker") or 0), str(start.get("node") or ""), int(start.get("times") or 0),
            tuple(int(worker) for worker in start.get("movedWorkers") or ()),
        ),
        last_recovery=raw.get("lastRecovery") or None,
        recoveries=tuple(entry for entry in raw.get("recoveries") or [] if entry),
        started=raw.get("startTime") or None,
        completed=raw.get("completionTime") or None,
        conditions=tuple(_parse_condition(entry) for entry in raw.get("conditions") or []),
    )  # fmt: skip


def render_record(record: JobRecord) -> dict[str, Any]:
    """`status` for the API. Absent values are left out."""
    raw: dict[str, Any] = {
        "observedGeneration": record.observed_generation,
        "attempt": record.attempt,
        "phase": record.phase,
        "members": record.members or None,
        "sidecarImage": record.sidecar_image or None,
        "history": [
            _present({"attempt": b.attempt, "baseStep": b.base_step, "ranks": b.ranks or None})
            for b in record.history.branches
        ] or None,
        "restarts": {
            "crash": record.crashes, "disruption": record.disruptions, "total": record.crashes + record.disruptions,
            "counted": record.counted, "crashStep": record.crash_step,
        },
        "progress": _present({
            "step": record.step,
            "stepSeconds": _rounded(record.step_seconds, 6),
            "restoredBytes": record.restored_bytes if record.restore_bytes else None,
            "restoreBytes": record.restore_bytes or None,
        }) or None,
        "tiers": {
            name: {"step": tier.step, "time": tier.time, "lagSteps": tier.lag_steps}
            for name, tier in sorted(record.tiers.items())
        } or None,
        "restore": _render_proofs(record.proofs),
        "placement": None if record.placement is None else _present({
            "hash": record.placement.hash,
            "spreadAchieved": record.placement.spread_achieved,
            "tolerates": list(record.placement.survives),
            "tolerance": (", ".join(record.placement.tolerates) or "nothing") if record.placement.complete else None,
            "toleratesOnceComplete": None if record.placement.complete else list(record.placement.tolerates),
            "unprotectedWorkers": record.placement.unprotected_workers,
            "unprotectedReason": record.placement.unprotected_reason or None,
        }),
        "size": None if record.size is None else _present({
            "workers": record.size.workers,
            "roomSince": _spelled(record.size.room_since),
        }),
        "spares": None if record.spares is None else {"wanted": record.spares.wanted, "ready": record.spares.ready},
        "checkpoint": None if record.checkpoint is None else _present({
            "snapshotEverySteps": record.checkpoint.snapshot_every or None,
            "deltas": record.checkpoint.deltas or None,
            "deltasReason": record.checkpoint.deltas_reason or None,
        }) or None,
        "memory": None if record.memory is None else {
            "neededBytes": record.memory.needed,
            "limitBytes": record.memory.limit,
            "localBytes": record.memory.local,
            "peerBytes": record.memory.peer,
        },
        "recovery": None if record.recovery is None else _render_recovery(record.recovery),
        "hang": None if record.hang is None else {
            "worker": record.hang.worker, "node": record.hang.node, "times": record.hang.times,
        },
        "failedStart": None if record.failed_start is None else _present({
            "worker": record.failed_start.worker, "node": record.failed_start.node, "times": record.failed_start.times,
            "movedWorkers": list(record.failed_start.moved) or None,
        }),
        "lastRecovery": record.last_recovery,
        "recoveries": [dict(entry) for entry in record.recoveries] or None,
        "startTime": record.started,
        "completionTime": record.completed,
        "conditions": [_render_condition(entry) for entry in record.conditions] or None,
    }  # fmt: skip
    return _present(raw)


def _render_proofs(proofs: Mapping[str, ProofRecord]) -> dict[str, Any] | None:
    if not proofs:
        return None
    each = {name: {"step": proof.step, "time": proof.time} for name, proof in sorted(proofs.items())}
    oldest = min(proofs.values(), key=lambda proof: (proof.time, proof.step))
    return {"lastProof": {"step": oldest.step, "time": oldest.time, "tiers": each}}


def _parse_recovery(raw: Mapping[str, Any]) -> Recovery:
    detected = _moment(raw.get("detectedAt")) or 0.0
    return Recovery(
        cause=str(raw.get("cause") or "Unknown"),
        message=str(raw.get("message") or ""),
        failed_at=_moment(raw.get("failedAt")) or detected,
        detected_at=detected,
        attempt=_int(raw.get("attempt")),
        reason=str(raw.get("reason") or ""),
        step=int(raw.get("step") or 0),
        version_attempt=int(raw.get("versionAttempt") or 0),
        lost_steps=int(raw.get("lostSteps") or 0),
        decided_at=_moment(raw.get("decidedAt")),
        restored_at=_moment(raw.get("restoredAt")),
        released_at=_moment(raw.get("releasedAt")),
        failed_versions=tuple(
            Version(int(entry["step"]), int(entry["attempt"])) for entry in raw.get("failedVersions") or []
        ),
        facts=Facts(_int(raw.get("exitCode")), tuple(raw.get("reasons") or ()), tuple(raw.get("nodes") or ())),
        rule=str(raw.get("rule") or ""),
        tries=int(raw.get("tries") or 0),
        reached=int(raw.get("reachedStep") or 0),
        noticed_at=_moment(raw.get("noticedAt")),
        stalled=tuple(int(worker) for worker in raw.get("stalledWorkers") or ()),
    )


def _render_recovery(recovery: Recovery) -> dict[str, Any]:
    decided = recovery.attempt is not None  # before, step 0 would read as a start from scratch
    return _present(
        {
            "attempt": recovery.attempt,
            "cause": recovery.cause,
            "message": recovery.message,
            "reason": recovery.reason or None,
            "step": recovery.step if decided else None,
            "versionAttempt": recovery.version_attempt if decided else None,
            "lostSteps": recovery.lost_steps if decided else None,
            "reachedStep": recovery.reached or None,
            "failedAt": _spelled(recovery.failed_at),
            "noticedAt": _spelled(recovery.noticed_at),
            "detectedAt": _spelled(recovery.detected_at),
            "decidedAt": _spelled(recovery.decided_at),
            "restoredAt": _spelled(recovery.restored_at),
            "releasedAt": _spelled(recovery.released_at),
            "failedVersions": [{"step": v.step, "attempt": v.attempt} for v in recovery.failed_versions] or None,
            "exitCode": recovery.facts.exit_code,
            "reasons": list(recovery.facts.reasons) or None,
            "nodes": list(recovery.facts.nodes) or None,
            "rule": recovery.rule or None,
            "tries": recovery.tries or None,
            "stalledWorkers": list(recovery.stalled) or None,
        }
    )


def _parse_condition(raw: Mapping[str, Any]) -> Condition:
    return Condition(
        type=str(raw.get("type")),
        status=raw.get("status") == "True",
        reason=str(raw.get("reason") or ""),
        message=str(raw.get("message") or ""),
        changed=str(raw.get("lastTransitionTime") or ""),
        observed_generation=int(raw.get("observedGeneration") or 0),
    )


def _render_condition(condition: Condition) -> dict[str, Any]:
    return {
        "type": condition.type,
        "status": "True" if condition.status else "False",
        "reason": condition.reason,
        "message": condition.message,
        "lastTransitionTime": condition.changed,
        "observedGeneration": condition.observed_generation,
    }


def _present(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if value is not None}


def _int(value: Any) -> int | None:
    return None if value is None else int(value)


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _moment(value: Any) -> float | None:
    """Unix seconds. The first operators wrote them as numbers."""
    return parse_time(value) if isinstance(value, str) else _float(value)


def _spelled(moment: float | None) -> str | None:
    return None if moment is None else precise(moment)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
