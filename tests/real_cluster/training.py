"""One job on the cluster, and all that was seen of it and of its pods."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import kubernetes
import yaml
from losses import LossReader, Step
from stage import TRAINING, job, wait_until_gone
from testbed.cluster import Testbed
from testbed.node import Node
from testbed.processes import wait_for

from tiercheck_operator.model.status import parse_time

GROUP, VERSION, PLURAL = "tiercheck.io", "v1alpha1", "tiercheckjobs"
WORKER = "tiercheck.io/worker"
JOB_UID = "tiercheck.io/job-uid"
PATIENCE = 600.0
"""Seconds after which a test gives up; nothing is measured by it."""

Begin = Callable[[str, dict[str, Any]], "Training"]
"""Applies a job's manifest in a namespace."""


@dataclass(frozen=True)
class Sighting:
    """One change that the API server told."""

    at: float
    kind: str
    """ADDED, MODIFIED or DELETED."""
    body: dict[str, Any]


@dataclass
class Training:
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

    def apply(self, manifest: dict[str, Any] | str) -> None:
        text = manifest if isinstance(manifest, str) else yaml.safe_dump(manifest)
        done = subprocess.run(
            ["kubectl", f"--kubeconfig={self.testbed.kubeconfig}", "-n", self.namespace, "apply", "-f", "-"],
            input=text, text=True, capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        if not self.seen:
            threading.Thread(target=self._follow_job, daemon=True).start()
            threading.Thread(target=self._follow_pods, daemon=True).start()

    def patch(self, spec: dict[str, Any]) -> None:
        body = {"spec": spec}
        self._jobs.patch_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, self.name, body)

    def stop_watching(self) -> None:
        self._stop = True

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.seen[-1].body.get("status") or {}) if self.seen else {}

    @property
    def attempt(self) -> int:
        return int(self.status.get("attempt") or 0)

    def condition(self, kind: str) -> dict[str, Any]:
        return next((entry for entry in self.status.get("conditions") or [] if entry["type"] == kind), {})

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

    def pod(self, worker: int) -> dict[str, Any]:
        """The worker's newest pod that is not being deleted."""
        found = [
            pod
            for pod in self.pods()
            if pod["metadata"]["labels"].get(WORKER) == str(worker)
            and "deletionTimestamp" not in pod["metadata"]
        ]
        return found[-1]

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

    def wait_until_protected(self, seconds: float = PATIENCE) -> None:
        """All workers train, each version has its copies, and every pod is well."""
        self.wait(self.is_protected, "training to be protected", seconds)

    def wait_for_step(self, step: int, seconds: float = PATIENCE) -> None:
        self.wait(lambda: self.step >= step, f"step {step}", seconds)

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> None:
        """Raises TimeoutError with what the job says of itself."""
        try:
            wait_for(condition, seconds, what)
        except TimeoutError as error:
            says = [
                f"{c['type']}={c['status']} {c['reason']}: {c['message'][:200]}"
                for c in self.status.get("conditions", [])
            ]
            pods = [
                f"{p['metadata']['name']} {p['status'].get('phase')} {p['spec'].get('nodeName')}"
                for p in self.pods()
            ]
            raise TimeoutError(
                f"{error}\n{self.status.get('phase')} step {self.step}\n" + "\n".join(says + pods)
            ) from error

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
        status, step = self.status, self.step
        peer = ((status.get("tiers") or {}).get("peer") or {}).get("step")
        pods = self.pods()
        return (
            status.get("phase") == "Running"
            and self.condition("Protected").get("status") == "True"
            and "recovery" not in status
            and peer is not None
            and bool(self.steps)
            and self.steps[-1].attempt == self.attempt
            and peer >= step - 5
            and len(pods)
            == self.seen[-1].body["spec"]["workers"] + self.seen[-1].body["spec"].get("spares", 0)
            and all(_all_ready(pod) for pod in pods)
        )

    def is_on_its_way(self) -> bool:
        """Whether it is protected, and has been long enough for its copies to follow every step."""
        made = [entry for entry in self.steps if entry.attempt == self.attempt]
        peer = ((self.status.get("tiers") or {}).get("peer") or {}).get("step") or 0
        return self.is_protected() and len(made) >= 20 and peer >= self.step - 1

    def _is_ours(self, pod: dict[str, Any]) -> bool:
        if not self.seen:
            return False
        job = self.seen[-1].body
        owner = ((job["spec"].get("attach") or {}).get("owner") or {}).get("uid") or job["metadata"]["uid"]
        return pod["metadata"].get("labels", {}).get(JOB_UID) == owner

    def _follow_job(self) -> None:
        selector = f"metadata.name={self.name}"
        self._follow(
            self.seen,
            lambda watch: watch.stream(
                self._jobs.list_namespaced_custom_object, GROUP, VERSION, self.namespace, PLURAL,
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
        wrong = [entry for entry in trained if entry.loss != right[entry.step]]
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
            known |= {entry.step: entry.loss for entry in reference.steps}
        return known
