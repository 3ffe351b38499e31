"""Derives all that there is to say about a job, and what the troubleshooting guide says to do."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from tiercheck.protocol import names
from tiercheck_cli.events import TIERS, PastRecovery, recoveries
from tiercheck_cli.terminal import spell
from tiercheck_operator.model.status import parse_time
from tiercheck_operator.planning.topology import Topology

_ITEM = re.compile(r"^- `(\w+)`: .+?(?:\s\*\*Do:\*\*\s(.+?))?(?=\n- |\n\n|\Z)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
_QUIET = ("Nothing", "As you wish", "Normal", "See ", "Read ")
_PATIENCE = "Nothing for a minute."
_MINUTE = 90.0
_WITH_REMOTE = re.compile(r" *With tiers\.remote, [^.]*\.")
_PLACEHOLDER = re.compile(r"\b(?:NAMESPACE|NAME|POD)\b")


@dataclass(frozen=True)
class GuideEntry:
    """An item of the guide."""

    advice: str

    def calls_for_action(self, seconds: float) -> bool:
        """Whether a person should do something about it, if it has been so for `seconds`."""
        if self.advice.startswith(_PATIENCE):
            return seconds > _MINUTE
        return not self.advice.startswith(_QUIET)

    def advise(self, namespace: str, job: str, message: str, *, remote: bool) -> str:
        """Returns the advice about a job: with its names in place of the guide's, without the call for
        patience, and without a remote tier that it lacks. `message`: the condition's, which may name a pod.
        """
        text = self.advice.removeprefix(_PATIENCE).removeprefix(" Then ").strip()
        if not remote:
            text = _WITH_REMOTE.sub("", text)
        named = {"NAMESPACE": namespace, "NAME": job, "POD": f"-n {namespace} {_pod(job, message)}"}
        return _PLACEHOLDER.sub(lambda word: named[word[0]], text)


def find_entry(reason: str) -> GuideEntry | None:
    """None for a reason that the guide of this version does not know."""
    return _entries().get(reason)


@functools.cache
def _entries() -> dict[str, GuideEntry]:
    conditions = _text().partition("\n## Events\n")[0]
    found: dict[str, GuideEntry] = {}
    for item in _ITEM.finditer(conditions):
        found.setdefault(item[1], GuideEntry(_plain(item[2] or "Nothing.")))
    return found


def _pod(job: str, message: str) -> str:
    """The pod that `message` is about, for kubectl: by its name, else by the labels of its worker."""
    if pod := re.search(rf"(?<![\w.-]){re.escape(job)}-(?:spare-)?\d+-\d+(?![\w-])", message):
        return pod[0]
    worker = re.search(r"\bworkers? (\d+)", message)
    return f"-l {names.LABEL_JOB}={job}" + (f",{names.LABEL_WORKER}={worker[1]}" if worker else "")


def _plain(text: str) -> str:
    """`text` in one line, without Markdown."""
    return " ".join(_LINK.sub(r"\1", re.sub(r"\*\*([^*]*)\*\*", r"\1", text)).replace("`", "").split())


def _text() -> str:
    packed = resources.files("tiercheck_cli").joinpath("troubleshooting.md")
    if packed.is_file():
        return packed.read_text()
    # In a checkout the guide is where people look for it.
    return (Path(__file__).parents[3] / "docs" / "operate" / "troubleshooting.md").read_text()


@dataclass(frozen=True)
class TierView:
    """One tier's newest complete version."""

    name: str
    step: int | None
    """None: nothing is complete there yet."""
    lag_steps: int | None
    lag_seconds: float | None
    """Training that would have to be done again if it had to be used now."""
    age_seconds: float | None
    """Since it was seen complete."""
    proof_step: int | None = None
    """Of the last proof that all ranks would come back from here; None: there is none."""
    proof_age_seconds: float | None = None
    configured: bool = True
    """Whether the job has this tier."""


@dataclass(frozen=True)
class Attention:
    """A condition that a person should do something about."""

    condition: str
    reason: str
    message: str
    advice: str
    since_seconds: float | None


@dataclass(frozen=True)
class RestoreView:
    """A restore under way, of all workers together."""

    bytes: int
    """That are back."""
    wanted: int
    """Bytes that there will be, as far as is known."""
    bytes_per_second: float | None
    """On average, since the attempt was decided; None: not known."""


@dataclass(frozen=True)
class WorkerView:
    """One worker's pod. `domains`: by level, widest first, the host left out; "?" where labels do not say."""

    worker: int
    pod: str
    node: str
    domains: tuple[str, ...]
    phase: str
    replaced: int
    """Pods that this worker has had before."""
    container_restarts: int
    holders: tuple[int, ...]


@dataclass(frozen=True)
class StatusView:
    """One job. Seconds are durations before the moment of looking, unless said otherwise."""

    namespace: str
    name: str
    phase: str
    doing: str
    """What it is at, as a sentence; empty while it simply trains."""
    attempt: int
    workers: int
    """That it has now."""
    wanted_workers: int
    """That its spec asks for."""
    procs_per_worker: int
    age_seconds: float | None
    step: int | None
    step_seconds: float | None
    restarts: int
    crashes: int
    disruptions: int
    max_restarts: int
    tiers: tuple[TierView, ...]
    snapshot_every: int | None
    deltas: str
    tolerates: tuple[str, ...]
    """Now."""
    tolerates_once_complete: tuple[str, ...]
    """When the copies are made that are lacking; empty if none are."""
    spread: str
    unprotected_workers: int
    memory_needed: int | None
    memory_limit: int | None
    attention: tuple[Attention, ...]
    recoveries: tuple[PastRecovery, ...]
    restoring: RestoreView | None = None
    levels: tuple[str, ...] = ()
    """Of `domains` of the workers."""
    members: tuple[WorkerView, ...] = ()
    """Only where they were asked for."""

    def as_json(self, now: float) -> dict[str, Any]:
        """For programs; names are stable."""
        return {"time": now, **spell(self)}


def status_view(
    job: Mapping[str, Any], now: float, members: Sequence[WorkerView] = (), levels: tuple[str, ...] = ()
) -> StatusView:
    """`now` is unix seconds."""
    metadata, spec, status = job["metadata"], job.get("spec") or {}, job.get("status") or {}
    progress, restarts = status.get("progress") or {}, status.get("restarts") or {}
    placement, checkpoint = status.get("placement") or {}, status.get("checkpoint") or {}
    memory = status.get("memory") or {}
    step_seconds = progress.get("stepSeconds")
    return StatusView(
        namespace=metadata["namespace"],
        name=metadata["name"],
        phase=str(status.get("phase") or "Pending"),
        doing=_doing(status),
        attempt=int(status.get("attempt") or 0),
        workers=int((status.get("size") or {}).get("workers") or spec.get("workers") or 0),
        wanted_workers=int(spec.get("workers") or 0),
        procs_per_worker=int(spec.get("procsPerWorker") or 1),
        age_seconds=_since(metadata.get("creationTimestamp"), now),
        step=progress.get("step"),
        step_seconds=step_seconds,
        restarts=int(restarts.get("total") or 0),
        crashes=int(restarts.get("crash") or 0),
        disruptions=int(restarts.get("disruption") or 0),
        max_restarts=int(_or((spec.get("failurePolicy") or {}).get("maxRestarts"), 10)),
        tiers=tuple(_tier(name, status, spec, step_seconds, now) for name in TIERS),
        snapshot_every=checkpoint.get("snapshotEverySteps"),
        deltas=str(checkpoint.get("deltas") or ""),
        tolerates=tuple(placement.get("tolerates") or ()),
        tolerates_once_complete=tuple(placement.get("toleratesOnceComplete") or ()),
        spread=str(placement.get("spreadAchieved") or ""),
        unprotected_workers=int(placement.get("unprotectedWorkers") or 0),
        memory_needed=memory.get("neededBytes"),
        memory_limit=memory.get("limitBytes"),
        attention=_attention(job, now),
        recoveries=recoveries(job),
        restoring=_restoring(status, now),
        levels=levels,
        members=tuple(members),
    )


def worker_views(
    pods: Sequence[Mapping[str, Any]], holders: Mapping[int, tuple[int, ...]], topology: Topology
) -> tuple[WorkerView, ...]:
    """One for each worker that has a pod: its newest one."""
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


def _doing(status: Mapping[str, Any]) -> str:
    """The message of what holds the job up."""
    found = {entry.get("type"): entry for entry in status.get("conditions") or []}
    for kind in ("Failed", "Completed", "Suspended"):
        if found.get(kind, {}).get("status") == "True":
            return str(found[kind].get("message") or "")
    restoring, running = found.get("Restoring") or {}, found.get("Running") or {}
    if running.get("status") == "False":
        return str(running.get("message") or "")
    return str(restoring.get("message") or "") if restoring.get("status") == "True" else ""


def _attention(job: Mapping[str, Any], now: float) -> tuple[Attention, ...]:
    """One for each reason, in the order of the conditions."""
    namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
    remote = _has_tier("remote", job.get("spec") or {})
    found: dict[str, Attention] = {}
    for condition in (job.get("status") or {}).get("conditions") or []:
        reason, message = str(condition.get("reason") or ""), str(condition.get("message") or "")
        entry = find_entry(reason)
        since = _since(condition.get("lastTransitionTime"), now)
        if entry is None or reason in found or not entry.calls_for_action(since or 0.0):
            continue
        advice = entry.advise(namespace, name, message, remote=remote)
        found[reason] = Attention(str(condition.get("type")), reason, message, advice, since)
    return tuple(found.values())


def _has_tier(name: str, spec: Mapping[str, Any]) -> bool:
    """Whether the job asks for this tier."""
    tiers = spec.get("tiers") or {}
    if name == "remote":
        return bool(tiers.get("remote"))
    peer = tiers.get("peer") or {}
    default = 0 if peer.get("parity") is None and int(spec.get("workers") or 0) < 2 else 1
    return name != "peer" or bool(_or(peer.get("copies"), default))


def _since(text: object, now: float) -> float | None:
    at = parse_time(text)
    return None if at is None else max(0.0, now - at)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
