"""Derives the status of a job for users, and the advice of the troubleshooting guide about it."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from tiercheck.protocol import names
from tiercheck_cli.events import TIERS, PastRecovery, recoveries
from tiercheck_cli.terminal import to_json_value
from tiercheck_operator.model.serialization import INTERNAL, As, At, from_api
from tiercheck_operator.model.status import parse_time
from tiercheck_operator.planning.topology import Topology

_ITEM = re.compile(r"^- `(\w+)`: .+?(?:\s\*\*Do:\*\*\s(.+?))?(?=\n- |\n\n|\Z)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
_QUIET = ("Nothing", "As you wish", "Normal", "See ")
_PATIENCE = "Nothing for a minute."
_MINUTE = 90.0
_WITH_REMOTE = re.compile(r" *With tiers\.remote, [^.]*\.")
_PLACEHOLDER = re.compile(r"\b(?:NAMESPACE|NAME|POD)\b")


@dataclass(frozen=True)
class GuideEntry:
    """An item of the troubleshooting guide."""

    advice: str

    def calls_for_action(self, seconds: float) -> bool:
        """Returns whether a user should act if the condition has lasted for `seconds`."""
        if self.advice.startswith(_PATIENCE):
            return seconds > _MINUTE
        return not self.advice.startswith(_QUIET)

    def advise(self, namespace: str, job: str, message: str, *, remote: bool) -> str:
        """Returns the advice with the job's names, without the request to wait or a remote tier it lacks.

        `message`: the condition's, which may name a pod."""
        text = self.advice.removeprefix(_PATIENCE).removeprefix(" Then ").strip()
        if not remote:
            text = _WITH_REMOTE.sub("", text)
        named = {"NAMESPACE": namespace, "NAME": job, "POD": f"-n {namespace} {_pod(job, message)}"}
        return _PLACEHOLDER.sub(lambda word: named[word[0]], text)


@functools.cache
def guide() -> dict[str, GuideEntry]:
    """Returns the guide's items by the reason that each is about."""
    packed = resources.files("tiercheck_cli").joinpath("troubleshooting.md")
    # In a checkout the guide is among the docs.
    unpacked = Path(__file__).parents[3] / "docs" / "operate" / "troubleshooting.md"
    conditions = (packed if packed.is_file() else unpacked).read_text().partition("\n## Events\n")[0]
    found: dict[str, GuideEntry] = {}
    for item in _ITEM.finditer(conditions):
        found.setdefault(item[1], GuideEntry(_plain(item[2] or "Nothing.")))
    return found


def _pod(job: str, message: str) -> str:
    """Returns the pod that `message` is about, for kubectl: its name, else the labels of its worker."""
    if pod := re.search(rf"(?<![\w.-]){re.escape(job)}-(?:spare-)?\d+-\d+(?![\w-])", message):
        return pod[0]
    worker = re.search(r"\bworkers? (\d+)", message)
    return f"-l {names.LABEL_JOB}={job}" + (f",{names.LABEL_WORKER}={worker[1]}" if worker else "")


def _plain(text: str) -> str:
    """Returns `text` in one line, without Markdown."""
    return " ".join(_LINK.sub(r"\1", re.sub(r"\*\*([^*]*)\*\*", r"\1", text)).replace("`", "").split())


@dataclass(frozen=True)
class TierView:
    """One tier's newest complete version."""

    name: str
    step: int | None
    """The step of that version; None: nothing is complete there yet."""
    lag_steps: int | None
    lag_seconds: float | None
    """Seconds of training to repeat if the tier had to be used now."""
    age_seconds: float | None
    """Seconds since it was seen complete."""
    proof_step: int | None = None
    """The step of the last proof that all ranks can restore from here; None: there is none."""
    proof_age_seconds: float | None = None
    configured: bool = True


@dataclass(frozen=True)
class Attention:
    """A condition on which a user should act."""

    condition: str
    reason: str
    message: str
    advice: str
    since_seconds: float | None


@dataclass(frozen=True)
class RestoreView:
    """A restore under way, of all workers together."""

    bytes: int
    wanted: int
    bytes_per_second: float | None
    """The average since the attempt was decided; None: not known."""


@dataclass(frozen=True)
class WorkerView:
    """One worker's pod. `domains`: by level, widest first, without the host; "?" if labels do not give it."""

    worker: int
    pod: str
    node: str
    domains: tuple[str, ...]
    phase: str
    replaced: int
    """The number of pods that this worker has had before."""
    container_restarts: int
    holders: tuple[int, ...]


def _doing(status: Mapping[str, Any]) -> str:
    """Returns the message of the condition that holds the job up."""
    found = {entry.get("type"): entry for entry in status.get("conditions") or []}
    for kind in ("Failed", "Completed", "Suspended"):
        if found.get(kind, {}).get("status") == "True":
            return str(found[kind].get("message") or "")
    restoring, running = found.get("Restoring") or {}, found.get("Running") or {}
    if running.get("status") == "False":
        return str(running.get("message") or "")
    return str(restoring.get("message") or "") if restoring.get("status") == "True" else ""


@dataclass(frozen=True, kw_only=True)
class StatusView:
    """The status of one job. Ages in seconds count back from the time of reading."""

    namespace: Annotated[str, At("metadata.namespace")]
    name: Annotated[str, At("metadata.name")]
    phase: Annotated[str, At("status.phase")] = "Pending"
    doing: Annotated[str, At("status"), As(_doing)] = ""
    """The current activity, as a sentence; empty while the job trains."""
    attempt: Annotated[int, At("status.attempt")] = 0
    workers: Annotated[int, At("status.size.workers")] = 0
    wanted_workers: Annotated[int, At("spec.workers")] = 0
    procs_per_worker: Annotated[int, At("spec.procsPerWorker")] = 1
    age_seconds: Annotated[float | None, INTERNAL] = None
    step: Annotated[int | None, At("status.progress.step")] = None
    step_seconds: Annotated[float | None, At("status.progress.stepSeconds")] = None
    restarts: Annotated[int, At("status.restarts.total")] = 0
    crashes: Annotated[int, At("status.restarts.crash")] = 0
    disruptions: Annotated[int, At("status.restarts.disruption")] = 0
    max_restarts: Annotated[int, At("spec.failurePolicy.maxRestarts")] = 10
    tiers: Annotated[tuple[TierView, ...], INTERNAL] = ()
    snapshot_every: Annotated[int | None, At("status.checkpoint.snapshotEverySteps")] = None
    deltas: Annotated[str, At("status.checkpoint.deltas")] = ""
    tolerates: Annotated[tuple[str, ...], At("status.placement.tolerates")] = ()
    tolerates_once_complete: Annotated[tuple[str, ...], At("status.placement.toleratesOnceComplete")] = ()
    spread: Annotated[str, At("status.placement.spreadAchieved")] = ""
    unprotected_workers: Annotated[int, At("status.placement.unprotectedWorkers")] = 0
    memory_needed: Annotated[int | None, At("status.memory.neededBytes")] = None
    memory_limit: Annotated[int | None, At("status.memory.limitBytes")] = None
    attention: Annotated[tuple[Attention, ...], INTERNAL] = ()
    recoveries: Annotated[tuple[PastRecovery, ...], At(""), As(recoveries)] = ()
    restoring: Annotated[RestoreView | None, INTERNAL] = None
    levels: Annotated[tuple[str, ...], INTERNAL] = ()
    """The levels of the workers' `domains`."""
    members: Annotated[tuple[WorkerView, ...], INTERNAL] = ()
    """The workers' pods; empty if they were not asked for."""

    def as_json(self, now: float) -> dict[str, Any]:
        """Returns the status for programs; names are stable."""
        return {"time": now, **to_json_value(self)}


def status_view(
    job: Mapping[str, Any], now: float, members: Sequence[WorkerView] = (), levels: tuple[str, ...] = ()
) -> StatusView:
    """Returns the status of a job. `now` is unix seconds."""
    view, spec, status = from_api(StatusView, job), job.get("spec") or {}, job.get("status") or {}
    return replace(
        view,
        workers=view.workers or view.wanted_workers,
        age_seconds=_since(job["metadata"].get("creationTimestamp"), now),
        tiers=tuple(_tier(name, status, spec, view.step_seconds, now) for name in TIERS),
        attention=_attention(job, now),
        restoring=_restoring(status, now),
        levels=levels,
        members=tuple(members),
    )


def worker_views(
    pods: Sequence[Mapping[str, Any]], holders: Mapping[int, tuple[int, ...]], topology: Topology
) -> tuple[WorkerView, ...]:
    """Returns a view of the newest pod of each worker that has one."""
    newest: dict[int, Mapping[str, Any]] = {}
    for pod in pods:
        labels = pod["metadata"].get("labels") or {}
        try:
            worker = int(labels[names.LABEL_WORKER])
        except (KeyError, ValueError):
            continue
        if worker not in newest or _incarnation(newest[worker]) < _incarnation(pod):
            newest[worker] = pod
    return tuple(
        _worker(worker, newest[worker], holders.get(worker, ()), topology) for worker in sorted(newest)
    )


def _worker(worker: int, pod: Mapping[str, Any], holders: tuple[int, ...], topology: Topology) -> WorkerView:
    status = pod.get("status") or {}
    node = str((pod.get("spec") or {}).get("nodeName") or "")
    containers = [*(status.get("containerStatuses") or []), *(status.get("initContainerStatuses") or [])]
    return WorkerView(
        worker=worker,
        pod=str(pod["metadata"]["name"]),
        node=node,
        domains=tuple(
            (topology.domain(node, level) or "?").rsplit("/", 1)[-1] for level in topology.levels[:-1]
        ),
        phase="Terminating"
        if pod["metadata"].get("deletionTimestamp")
        else str(status.get("phase") or "Pending"),
        replaced=_incarnation(pod),
        container_restarts=sum(int(entry.get("restartCount") or 0) for entry in containers),
        holders=holders,
    )


def _incarnation(pod: Mapping[str, Any]) -> int:
    try:
        return int((pod["metadata"].get("labels") or {}).get(names.LABEL_INCARNATION, 0))
    except ValueError:
        return 0


def _tier(
    name: str, status: Mapping[str, Any], spec: Mapping[str, Any], step_seconds: float | None, now: float
) -> TierView:
    found = (status.get("tiers") or {}).get(name) or {}
    if "step" not in found:
        return TierView(name, None, None, None, None, configured=_has_tier(name, spec))
    lag = int(found.get("lagSteps") or 0)
    proof = (((status.get("restore") or {}).get("lastProof") or {}).get("tiers") or {}).get(name) or {}
    return TierView(
        name,
        int(found["step"]),
        lag,
        lag * step_seconds if step_seconds else None,
        _since(found.get("time"), now),
        proof.get("step"),
        _since(proof.get("time"), now),
    )


def _restoring(status: Mapping[str, Any], now: float) -> RestoreView | None:
    progress = status.get("progress") or {}
    done, wanted = int(progress.get("restoredBytes") or 0), int(progress.get("restoreBytes") or 0)
    if not wanted:
        return None
    seconds = _since((status.get("recovery") or {}).get("decidedAt"), now)
    return RestoreView(done, wanted, done / seconds if seconds else None)


def _attention(job: Mapping[str, Any], now: float) -> tuple[Attention, ...]:
    """Returns one entry for each reason, in the order of the conditions."""
    namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
    remote = _has_tier("remote", job.get("spec") or {})
    found: dict[str, Attention] = {}
    for condition in (job.get("status") or {}).get("conditions") or []:
        reason, message = str(condition.get("reason") or ""), str(condition.get("message") or "")
        entry = guide().get(reason)
        since = _since(condition.get("lastTransitionTime"), now)
        if entry is None or reason in found or not entry.calls_for_action(since or 0.0):
            continue
        advice = entry.advise(namespace, name, message, remote=remote)
        found[reason] = Attention(str(condition.get("type")), reason, message, advice, since)
    return tuple(found.values())


def _has_tier(name: str, spec: Mapping[str, Any]) -> bool:
    tiers = spec.get("tiers") or {}
    if name == "remote":
        return bool(tiers.get("remote"))
    peer = tiers.get("peer") or {}
    alone = peer.get("parity") is None and int(spec.get("workers") or 0) < 2
    copies = peer.get("copies")
    return name != "peer" or bool(not alone if copies is None else copies)


def _since(text: object, now: float) -> float | None:
    at = parse_time(text)
    return None if at is None else max(0.0, now - at)
