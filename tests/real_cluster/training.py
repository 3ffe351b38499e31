"""One job on the cluster: all that was seen of it, of its pods and of what its trainers print."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import faults
import kubernetes
from stage import TRAINING, job, wait_until_gone
from testbed.cluster import Testbed
from testbed.node import Node

from tiercheck.protocol import names
from tiercheck_local.demo.record import Digest, Step, parse
from tiercheck_local.stage import JobStage, condition_is, find_condition, tier_step
from tiercheck_operator.model.status import parse_time

WORKER = names.LABEL_WORKER
_API = (names.API_GROUP, names.API_VERSION)
PATIENCE = 600.0
"""Seconds after which a test gives up; nothing is measured by it."""

Begin = Callable[[str, dict[str, Any]], "Training"]
"""Applies a job's manifest in a namespace."""


# Every line that a trainer printed is read from the nodes' disks, where it outlives the pod.


@dataclass
class _File:
    stream: IO[str]
    job: str
    rest: str = ""


@dataclass
class LossReader:
    """Follows the trainers' logs of all nodes until it is stopped."""

    nodes: Sequence[Node]
    _files: dict[Path, _File] = field(default_factory=dict)
    _steps: dict[str, list[Step]] = field(default_factory=dict)
    _digests: dict[str, str] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        threading.Thread(target=self._run, name="losses", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def steps(self, job: str) -> list[Step]:
        """In the order in which they were trained. `job`: namespace/name."""
        return list(self._steps.get(job, ()))

    def digest(self, job: str) -> str:
        return self._digests.get(job, "")

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            self._look()

    def _look(self) -> None:
        for node in self.nodes:
            for path in node.logs.glob("*/trainer/*.log"):
                if path not in self._files:
                    namespace, pod, _ = path.parents[1].name.split("_")
                    job = pod.rsplit("-", 2)[0]
                    try:
                        # Stays open: what was written before the kubelet removes the file can still be read.
                        self._files[path] = _File(open(path, errors="replace"), f"{namespace}/{job}")  # noqa: SIM115
                    except OSError:
                        continue
        for file in self._files.values():
            text = file.rest + file.stream.read()
            *lines, file.rest = text.split("\n")
            for line in lines:
                self._take(file.job, line)

    def _take(self, job: str, line: str) -> None:
        found = parse("{" + line.partition("{")[2])
        if isinstance(found, Step):
            self._steps.setdefault(job, []).append(found)
        elif isinstance(found, Digest):
            self._digests[job] = found.value


def gap_around(steps: Sequence[Step], since: float) -> float:
    """Seconds of the longest pause between two steps that ended after `since`; counts on until now."""
    times = [entry.time for entry in steps if entry.time >= since - 5]
    times.append(time.time())
    return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)


@dataclass(frozen=True)
class Sighting:
    """One change that the API server told."""

    at: float
    kind: str
    """ADDED, MODIFIED or DELETED."""
    body: dict[str, Any]


@dataclass
class Training(JobStage):
    """A job `name` in `namespace`, watched from its creation on."""

    testbed: Testbed
    losses: LossReader
    namespace: str
    name: str
    logs: str = ""
    """The pods' names begin so, if not with the job's name."""
    seen: list[Sighting] = field(default_factory=list, repr=False)
    pods_seen: list[Sighting] = field(default_factory=list, repr=False)
    _stop: bool = False

    def __post_init__(self) -> None:
        self._connect()

    def _connect(self) -> None:
        client = kubernetes.config.new_client_from_config(str(self.testbed.kubeconfig))
        self._jobs, self._core = (
            kubernetes.client.CustomObjectsApi(client),
            kubernetes.client.CoreV1Api(client),
        )

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.logs or self.name}"

    def apply(self, manifest: dict[str, Any]) -> None:
        self.testbed.apply(manifest, self.namespace)
        if not self.seen:
            threading.Thread(target=self._follow_job, daemon=True).start()
            threading.Thread(target=self._follow_pods, daemon=True).start()

    def patch(self, spec: dict[str, Any]) -> None:
        body = {"spec": spec}
        self._jobs.patch_namespaced_custom_object(*_API, self.namespace, names.PLURAL, self.name, body)

    def stop_watching(self) -> None:
        self._stop = True

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.seen[-1].body.get("status") or {}) if self.seen else {}

    def condition(self, kind: str) -> Mapping[str, Any]:
        return find_condition(self.status, kind)

    def reason(self, kind: str = "Placed") -> str:
        """That of the condition."""
        return str(self.condition(kind).get("reason"))

    @property
    def steps(self) -> list[Step]:
        return self.losses.steps(self.key)

    @property
    def step(self) -> int:
        found = self.steps
        return found[-1].step if found else 0

    def pods(self) -> list[dict[str, Any]]:
        """The pods of the job that exist, oldest first."""
        listed = self._core.list_namespaced_pod(self.namespace, _preload_content=False)
        found = [pod for pod in json.loads(listed.data)["items"] if self._is_ours(pod)]
        return sorted(found, key=lambda pod: pod["metadata"]["creationTimestamp"])

    def trainers(self) -> dict[str, tuple[str, int]]:
        """By pod: the ID of the trainer's container, and how often it was restarted."""
        return {
            pod["metadata"]["name"]: (each["containerID"], each["restartCount"])
            for pod in self.pods()
            for each in pod["status"]["containerStatuses"]
            if each["name"] == "trainer"
        }

    def node_of(self, worker: int) -> Node:
        return self.testbed.node(self.pod(worker)["spec"]["nodeName"])

    def events(self, since: float) -> list[dict[str, Any]]:
        """Of the job itself."""
        raw = self._core.list_namespaced_event(self.namespace, _preload_content=False)
        return [
            event
            for event in json.loads(raw.data)["items"]
            if event["involvedObject"].get("name") == self.name
            and event["involvedObject"].get("kind") == "TierCheckJob"
            and (parse_time(event.get("lastTimestamp")) or parse_time(event.get("eventTime")) or 0)
            >= since - 1
        ]

    def told(self, since: float, reason: str) -> list[str]:
        """The messages of the job's Events with this reason."""
        return [event["message"] for event in self.events(since) if event["reason"] == reason]

    def inject_fault(self, fault: str, worker: int, others: Iterable[int] = ()) -> str:
        pod = self.pod_of(worker)
        match fault:
            case "crash":
                faults.kill_rank(self, worker)
            case "out of memory":
                faults.starve_of_memory(self, worker)
            case "sidecar":
                faults.kill_sidecar(self, worker)
            case "delete" | "force delete":
                how = ("--force", "--grace-period=0") if fault == "force delete" else ("--wait=false",)
                self.testbed.kubectl("-n", self.namespace, "delete", "pod", pod, *how)
            case "delete every pod":
                every = [*(each["metadata"]["name"] for each in self.pods()), "--wait=false", "--force"]
                self.testbed.kubectl("-n", self.namespace, "delete", "pod", *every, "--grace-period=0")
            case "evict":
                faults.evict(self, pod)
            case "node":
                self.node_of(worker).power_off()
            case _:
                raise ValueError(f"no fault of this stage is called {fault}")
        return pod

    def wait_until_protected(self) -> None:
        """All workers train, each version has its copies, and every pod is well."""
        self.wait("training to be protected", lambda _: self.is_protected())

    def wait_for_phase(self, phase: str) -> None:
        self.wait(f"the job to be {phase}", lambda status: status.get("phase") == phase)

    def suspend(self, seconds: float = PATIENCE) -> None:
        """Until no pod is left."""
        self.patch({"suspend": True})
        self.wait(
            "the pods to go", lambda status: status["phase"] == "Suspended" and not self.pods(), seconds
        )

    def wait_for_step(self, step: int, seconds: float = PATIENCE) -> None:
        self.wait(f"step {step}", lambda _: self.step >= step, seconds)

    def wait(
        self, what: str, condition: Callable[[Mapping[str, Any]], object], seconds: float = PATIENCE
    ) -> Mapping[str, Any]:
        return super().wait(what, condition, seconds)

    def explain(self) -> str:
        pods = [
            f"{pod['metadata']['name']} {pod['status'].get('phase')} {pod['spec'].get('nodeName')}"
            for pod in self.pods()
        ]
        return "\n".join([f"step {self.step}", *pods])

    def released_after(self, since: float) -> float | None:
        """When the trainers of an attempt begun after `since` were released, unix seconds."""
        for sighting in self.seen:
            released = ((sighting.body.get("status") or {}).get("recovery") or {}).get("releasedAt")
            moment = parse_time(released)
            if moment is not None and moment >= since:
                return moment
        return None

    def pods_deleted(self, since: float) -> list[str]:
        """Names of pods that began to be deleted, or were gone at once, after `since`."""
        found = []
        for sighting in self.pods_seen:
            gone = sighting.kind == "DELETED" or "deletionTimestamp" in sighting.body["metadata"]
            name = sighting.body["metadata"]["name"]
            if sighting.at >= since and gone and name not in found and not self._was_going(name, since):
                found.append(name)
        return found

    def _was_going(self, name: str, since: float) -> bool:
        return any(
            sighting.body["metadata"]["name"] == name and "deletionTimestamp" in sighting.body["metadata"]
            for sighting in self.pods_seen
            if sighting.at < since
        )

    def is_protected(self) -> bool:
        """Whether it trains, nothing is being recovered, and peers hold the newest steps."""
        status, peer, pods = self.status, tier_step(self.status, "peer"), self.pods()
        return (
            status.get("phase") == "Running"
            and condition_is(status, "Protected")
            and "recovery" not in status
            and bool(self.steps)
            and self.steps[-1].attempt == self.attempt
            and peer >= max(1, self.step - 5)
            and len(pods)
            == self.seen[-1].body["spec"]["workers"] + self.seen[-1].body["spec"].get("spares", 0)
            and all(_all_ready(pod) for pod in pods)
        )

    def is_on_its_way(self) -> bool:
        """Whether it is protected, and has been long enough for its copies to follow every step."""
        made = [entry for entry in self.steps if entry.attempt == self.attempt]
        return self.is_protected() and len(made) >= 20 and tier_step(self.status, "peer") >= self.step - 1

    def _is_ours(self, pod: dict[str, Any]) -> bool:
        if not self.seen:
            return False
        job = self.seen[-1].body
        owner = ((job["spec"].get("attach") or {}).get("owner") or {}).get("uid") or job["metadata"]["uid"]
        return pod["metadata"].get("labels", {}).get(names.LABEL_JOB_UID) == owner

    def _follow_job(self) -> None:
        selector = f"metadata.name={self.name}"
        self._follow(
            self.seen,
            lambda watch: watch.stream(
                self._jobs.list_namespaced_custom_object, *_API, self.namespace, names.PLURAL,
                field_selector=selector, timeout_seconds=30,
            ),
        )  # fmt: skip

    def _follow_pods(self) -> None:
        self._follow(
            self.pods_seen,
            lambda watch: watch.stream(self._core.list_namespaced_pod, self.namespace, timeout_seconds=30),
        )

    def _follow(self, into: list[Sighting], stream: Callable[[Any], Any]) -> None:
        failed = False
        while not self._stop:
            try:
                if failed:
                    self._connect()  # with the CA of now
                failed = False
                for event in stream(kubernetes.watch.Watch()):
                    if event["type"] != "BOOKMARK":
                        into.append(Sighting(time.time(), event["type"], event["raw_object"]))
            except Exception as error:  # the watch is begun anew, as the API server may be away
                failed = True
                print(f"watch of {self.key}: {error!r}", flush=True)
                time.sleep(0.5)


def _all_ready(pod: dict[str, Any]) -> bool:
    statuses = [
        *(pod["status"].get("containerStatuses") or []),
        *(pod["status"].get("initContainerStatuses") or []),
    ]
    return (
        "deletionTimestamp" not in pod["metadata"]
        and bool(statuses)
        and all(status.get("ready") for status in statuses)
    )


# Trains the same job without any fault, to compare every loss with its.

_MORE = 100
"""Steps beyond those asked for, which the next one to ask may need."""


@dataclass
class UnhurtRun:
    """One worker with as many processes as the other job has, made when its losses are wanted."""

    testbed: Testbed
    reader: LossReader
    _losses: dict[int, dict[int, str]] = field(default_factory=dict)

    def compare(self, trained: Sequence[Step], ranks: int) -> tuple[list[Step], set[int]]:
        """The steps whose loss differs in any bit, and those that are missing."""
        last = max(entry.step for entry in trained)
        right = self._up_to(last, ranks)
        wrong = [entry for entry in trained if entry.loss_hex != right[entry.step]]
        return wrong, set(range(1, last + 1)) - {entry.step for entry in trained}

    def assert_same(self, training: Training, ranks: int) -> None:
        """Deletes the job first."""
        self.testbed.kubectl("-n", training.namespace, "delete", "tcj", training.name, "--ignore-not-found")
        wait_until_gone(self.testbed, training.namespace, "tcj,pods")
        wrong, missing = self.compare(training.steps, ranks)
        assert not wrong, f"{len(wrong)} losses differ from those of an unhurt run, first {wrong[0]}"
        assert not missing, f"{len(missing)} steps are missing, first {min(missing)}"

    def _up_to(self, last: int, ranks: int) -> dict[int, str]:
        known = self._losses.setdefault(ranks, {})
        if last not in known:
            manifest = job(f"unhurt-{ranks}-{last}", workers=1, procsPerWorker=ranks)
            manifest["spec"]["tiers"]["peer"] = {"copies": 0}
            reference = Training(self.testbed, self.reader, TRAINING, manifest["metadata"]["name"])
            reference.apply(manifest)
            try:
                reference.wait_for_step(last + _MORE, seconds=3000)
            finally:
                self.testbed.kubectl("-n", TRAINING, "delete", "tcj", reference.name, "--wait=false")
                reference.stop_watching()
                wait_until_gone(self.testbed, TRAINING, "pods")
            known |= {entry.step: entry.loss_hex for entry in reference.steps}
        return known
