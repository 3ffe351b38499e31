"""A job on a laptop cluster for a campaign, and the strikes that hit it."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.chaos.record import Recorder
from tests.cluster.jobs import OPERATOR_ENV as LAPTOPS_ENV
from tests.cluster.jobs import PREPARE_LATE, Jobs, page
from tests.sidecar.remote.s3 import faulty_proxy
from tests.sidecar.remote.s3.faulty_proxy import BUSY, CUT, Proxy, Seen, proxying
from tiercheck.failpoints import Arming
from tiercheck.protocol import names
from tiercheck_local.cluster import FailpointHit, LocalCluster
from tiercheck_local.demo.job import ObjectStore, credentials, in_bucket
from tiercheck_local.nodespec import NodeSpec
from tiercheck_local.stage import FAULTS, Fault, LaptopStage, condition_is, tier_step
from tiercheck_operator.kubernetes.api_server import ApiFailure, Object

ROOT = Path(__file__).parents[2]
JOB = "chaos"
RACKS = 3
OPERATOR = "operator"
OPERATOR_ENV = {
    **LAPTOPS_ENV,
    "TIERCHECK_LEASE": "default/tiercheck-operator",
    "TIERCHECK_LEASE_SECONDS": "4",
    "TIERCHECK_PROGRESS_SECONDS": "0.5",
}
_LOOK_EVERY = 0.1
_PROBE_EVERY, _PROBES = 10.0, 6
"""Seconds, and failures in a row: the chart's liveness probe."""


BUCKET = "checkpoints"
_SLOW = 1.5
_KEY = re.compile(rb"<Key>([^<]+)</Key>")


class Store:
    """An S3 server that can have a bad time, and tells the history what it stored and what it deleted.

    `mood`: "", "store down", "store trouble" or "store slow"."""

    def __init__(self, proxy: Proxy, record: Callable[..., None], seed: int) -> None:
        self.mood = ""
        self._record, self._rng = record, random.Random(f"store {seed}")
        self.endpoint = proxy.url
        proxy.rule, proxy.answered = self._rule, self._answered
        self._proxy = proxy

    def _rule(self, seen: Seen) -> faulty_proxy.Fault | None:
        if self.mood == "store down":
            return BUSY
        if self.mood == "store trouble" and self._rng.random() < 0.4:
            return BUSY if self._rng.random() < 0.7 else CUT
        if self.mood == "store slow":
            time.sleep(_SLOW * self._rng.random())
        return None

    def _answered(self, seen: Seen, body: bytes, status: int) -> None:
        self._proxy.seen.clear()
        if status >= 300:
            return
        path, query = urlsplit(seen.path).path, urlsplit(seen.path).query
        if seen.method == "PUT" and not query:
            body = _decoded(seen, body)
            key = _within_job(path)
            self._record("put", key=key, bytes=len(body), body=body if key.startswith("manifests/") else None)
        elif seen.method == "DELETE" and "uploadId" not in query:
            self._record("removed", key=_within_job(path))
        elif seen.method == "POST" and query.startswith("delete"):
            for key in _KEY.findall(body):
                self._record("removed", key=_within_job(f"/{BUCKET}/{key.decode()}"))


def _within_job(path: str) -> str:
    """/bucket/prefix/namespace/job/REST"""
    return "/".join(unquote(path).split("/")[5:])


def _decoded(seen: Seen, body: bytes) -> bytes:
    """What is stored of a body that came in signed pieces."""
    if "x-amz-decoded-content-length" not in seen.headers:
        return body
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size.split(b";")[0], 16)
        if not length:
            break
        whole, body = whole + rest[:length], rest[length + 2 :]
    return whole


class StruckStage(LaptopStage):
    """Whoever waits here also does what a Deployment and a kubelet do: an operator that has ended, or says
    that it is ill, is started again."""

    def __init__(
        self, cluster: LocalCluster, recorder: Recorder, store: Store, workers: int, stop: Path
    ) -> None:
        super().__init__(cluster, JOB)
        self.recorder, self.store, self.workers = recorder, store, workers
        self._stop = stop
        self._ill, self._probe_at = 0, 0.0

    # How it stands

    @property
    def status(self) -> Mapping[str, Any]:
        return self.recorder.status

    def reached(self) -> int:
        """The newest step that any rank ever made."""
        self.recorder.poll()
        return max((made[1] for each in self.recorder.steps.values() for made in each[-1:]), default=0)

    def lacks(self, beyond: int, tiers: tuple[str, ...] = ("local", "peer")) -> str:
        """What is not well yet; empty if every rank has made a step beyond that one, all that should run
        runs, and a newer version is complete in these tiers."""
        status = self.status
        if status.get("phase") != "Running" or status.get("recovery"):
            return f"the job is {status.get('phase')}"
        if not (condition_is(status, "Protected") or _told_of_a_fault(status)):
            return "the job is not Protected"
        here = [pod for pod in self.recorder.pods.values() if not pod["metadata"].get("deletionTimestamp")]
        if len(here) != self.workers or not all(
            condition_is(each.get("status") or {}, "Ready") for each in here
        ):
            return "not every pod is ready"
        self.recorder.poll()
        made = [self.recorder.steps.get(rank, [(0.0, 0, 0)])[-1] for rank in range(self.workers)]
        if any(step <= beyond or attempt != self.attempt for _, step, attempt in made):
            return f"not every rank has made a step beyond {beyond}: {[step for _, step, _ in made]}"
        complete = {name: tier_step(status, name) for name in tiers}
        if min(complete.values()) <= beyond:
            return f"nothing beyond step {beyond} is complete: {complete}"
        return ""

    def comes(self, met: Callable[[], object], seconds: float) -> bool:
        """Whether `met` within that time."""
        end = time.monotonic() + seconds
        while not met():
            if time.monotonic() > end:
                return False
            self.keep_operator()
            time.sleep(_LOOK_EVERY)
        return True

    def rest(self, seconds: float) -> None:
        self.comes(lambda: False, seconds)

    def keep_operator(self) -> None:
        operator = self.cluster.operator
        if operator is None or operator.poll() is not None:
            self.cluster.start_operator(OPERATOR_ENV, OPERATOR)
            self._ill, self._probe_at = 0, time.monotonic() + _PROBE_EVERY
        elif time.monotonic() >= self._probe_at:
            self._ill = 0 if page(self.cluster.metrics_address, "/healthz") else self._ill + 1
            self._probe_at = time.monotonic() + _PROBE_EVERY
            if self._ill >= _PROBES:
                operator.kill()
                operator.wait()

    # Failpoints

    def process_of(self, injection: Injection) -> str:
        """As `Faults.arm` names it."""
        assert injection.point is not None
        if injection.point.role == "operator":
            return OPERATOR
        sidecar = injection.point.role == "sidecar"
        container = names.SIDECAR_CONTAINER if sidecar else names.TRAINER_CONTAINER
        return f"{self.pod_of(injection.worker)}.{container}"

    def arm(self, whose: str, injection: Injection) -> None:
        self.cluster.faults.arm(
            whose, Arming(injection.name, injection.action, skip=injection.skip, seconds=2.0)
        )

    def struck(self, whose: str, seconds: float) -> FailpointHit | None:
        """The strike, if the point is passed within that time. Nothing is armed afterwards."""
        self.comes(lambda: self.cluster.faults.strikes(whose), seconds)
        self.cluster.faults.disarm(whose)
        return next(iter(self.cluster.faults.strikes(whose)), None)

    def go_on(self, strike: FailpointHit) -> None:
        """End of "stop"; whoever was stopped may have been killed meanwhile."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(strike.pid, signal.SIGCONT)

    # Faults

    def inject_fault(self, fault: str, worker: int, others: Iterable[int] = ()) -> str:
        if fault.startswith("store"):
            self.store.mood = fault
            return fault
        try:
            return super().inject_fault(fault, worker, set(range(self.workers)) - {worker})
        except ApiFailure:
            if fault != "evict":  # else it was just replaced
                raise
            return ""

    def undo(self) -> None:
        self.store.mood = ""
        super().undo()

    # The end

    def finish(self, seconds: float) -> bool:
        """Whether all ranks ended as they were asked to, and the job is complete."""
        self._stop.touch()
        return self.comes(lambda: condition_is(self.status, "Completed"), seconds)


def _told_of_a_fault(status: Mapping[str, Any]) -> bool:
    """A loop of a sidecar that failed and began again is told for ten minutes, whatever is well by then."""
    return any(each["reason"] == "InternalError" for each in status.get("conditions") or ())


def _manifest(cluster: LocalCluster, workers: int, stop: Path, endpoint: str, pace: float) -> Object:
    env = {"STOP": str(stop), **dict.fromkeys(PREPARE_LATE, "10")}
    limit = {"maxRestarts": 1_000_000}
    jobs = Jobs(cluster, stop.parent)
    manifest = jobs.manifest(workers, pace=pace, env=env, remote_every=None, failurePolicy=limit)
    manifest["metadata"]["name"] = JOB
    s3 = in_bucket(BUCKET, endpoint, "prod")
    manifest["spec"]["tiers"]["remote"] = {"s3": s3, "everySteps": 20, "keep": 3}
    return manifest


@contextlib.contextmanager
def staged(folder: Path, workers: int, seed: int, pace: float) -> Iterator[StruckStage]:
    """Three racks of two nodes that have room for one worker each, the operator, the store, and the job,
    which has just been applied."""
    nodes = [replace(node, pods=1) for node in NodeSpec.racks(2 * RACKS, RACKS)]
    stop = folder / "stop"
    with LocalCluster(
        folder / "cluster", nodes, lease_grace=4.0, back_off=0.5, cuttable=True, failpoints=True
    ) as cluster:
        recorder = Recorder(cluster.kubeconfig, cluster.logs, JOB)
        try:
            log = cluster.logs / "s3.log"
            with ObjectStore(log, BUCKET) as server, proxying(server.endpoint) as proxy:
                store = Store(proxy, recorder.record, seed)
                recorder.record("begins", workers=workers, copies=1, keep=3, prove=0)
                cluster.apply_crds(ROOT / "crds")
                cluster.apply(credentials())
                cluster.start_operator(OPERATOR_ENV, OPERATOR)
                cluster.apply(_manifest(cluster, workers, stop, store.endpoint, pace))
                stage = StruckStage(cluster, recorder, store, workers, stop)
                yield stage
                stage.undo()
        finally:
            recorder.stop()


_HARM = {"kill": 4, "exception": 2, "enospc": 2, "emfile": 1, "eio": 2, "stop": 1, "delay": 1}
"""Actions, and how often each comes where all are possible."""


@dataclass(frozen=True)
class Point:
    """One failpoint in the product."""

    role: str
    """Whose processes pass it: sidecar, trainer, launcher, operator."""
    provoke: str = ""
    """The fault that makes them pass it; empty: they do while training goes well."""
    actions: tuple[str, ...] = tuple(_HARM)


POINTS = {
    "mid-copy": Point("trainer"),
    "before-state-word": Point("trainer"),
    "after-state-word": Point("trainer"),
    "mid-seal": Point("sidecar"),
    "after-seal": Point("sidecar"),
    "before-push": Point("sidecar"),
    "mid-chunk": Point("sidecar"),
    "before-ack": Point("sidecar"),
    "after-ack": Point("sidecar"),
    "before-reclaim": Point("sidecar"),
    "mid-reclaim": Point("sidecar"),
    "before-manifest": Point("sidecar"),
    "after-manifest": Point("sidecar"),
    "before-inventory": Point("sidecar", "sidecar"),
    "before-restore-load": Point("sidecar", "crash"),
    "after-restore": Point("sidecar", "crash"),
    "before-release": Point("sidecar", "crash"),
    "before-idle": Point("launcher", "crash"),
    "after-spawn": Point("launcher", "crash"),
    "before-status-write": Point("operator"),
    "after-status-write": Point("operator"),
    "after-lease": Point("operator"),
    "after-release": Point("operator", "crash"),
    "after-pod-create": Point("operator", "evict"),
    "before-pod-delete": Point("operator", "node"),
}
"""By name: all that there are (`test_every_failpoint_of_the_product_is_known_to_the_campaign`)."""

FIRST_WORKER_ONLY = ("before-manifest", "after-manifest")
"""Passed by the coordinator alone."""


WEIGHTS = {
    "crash": 3, "out of memory": 1, "container": 1, "evict": 2, "force delete": 1, "node": 3, "rack": 1,
    "every pod": 1, "cut": 2, "sidecar": 2, "all sidecars": 1, "kubelet": 2, "deaf": 2, "operator": 2,
    "operator stopped": 1, "store down": 1, "store trouble": 1, "store slow": 1,
}  # fmt: skip
"""How often each fault comes."""

_SHARE_OF_POINTS = 0.65


@dataclass(frozen=True)
class Injection:
    number: int
    name: str
    """Of a point or of a fault."""
    action: str
    """Empty: it is a fault, which has one."""
    worker: int
    skip: int
    """Passings of the point that are let through before."""

    @property
    def point(self) -> Point | None:
        return POINTS.get(self.name)

    @property
    def fault(self) -> Fault | None:
        """What is done from outside: it, or what provokes its point."""
        point = self.point
        if point is None:
            return FAULTS[self.name]
        return FAULTS[point.provoke] if point.provoke else None

    @property
    def ends(self) -> bool:
        """Whether training may be ended by it. By an error of ours never, unless it does not train at that
        moment."""
        if self.fault is not None and self.fault.ends:
            return True
        return self.point is not None and self.point.role == "trainer" and self.action in ("kill", "stop")

    @property
    def costs_copies(self) -> bool:
        return self.fault is not None and self.fault.costs_copies

    def __str__(self) -> str:
        where = f" of worker {self.worker}" if self.point is None or self.point.role != "operator" else ""
        return f"{self.name}{' ' + self.action if self.action else ''}{where}"


def drawn(number: int, rng: random.Random, workers: int, *, only: str = "") -> Injection:
    """The next injection. `only`: the one with this name."""
    points = rng.random() < _SHARE_OF_POINTS
    if only:
        points = only in POINTS
    name = only or (rng.choice(list(POINTS)) if points else _weighted(rng, WEIGHTS))
    action = _weighted(rng, {each: _HARM[each] for each in POINTS[name].actions}) if points else ""
    worker = 0 if name in FIRST_WORKER_ONLY else rng.randrange(workers)
    often = points and not POINTS[name].provoke and name not in FIRST_WORKER_ONLY
    return Injection(number, name, action, worker, rng.randrange(4) if often else 0)


def _weighted(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]
