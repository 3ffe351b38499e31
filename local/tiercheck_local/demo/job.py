"""Defines the demo's job, its object store, and its story: train, fail six times, recover, compare."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tiercheck.protocol import names
from tiercheck_local import controlplane
from tiercheck_local.controlplane import wait_until
from tiercheck_local.demo.record import FaultRecord, TrainingLog, count_tiers, rank_source
from tiercheck_local.markers import free_ports
from tiercheck_local.running import WaitTimeout
from tiercheck_local.stage import FAULTS, NAMESPACE, LaptopStage, condition_is, in_words, tier_step
from tiercheck_operator.kubernetes.api_server import Object
from tiercheck_operator.model.status import parse_time

ACCESS_KEY = "tiercheck-demo"
SECRET_KEY = "tiercheck-demo-secret"
REGION = "us-east-1"


class ObjectStore:
    """A local S3 server that runs within a `with` block; `endpoint` is its URL."""

    def __init__(self, log: Path, bucket: str) -> None:
        self.bucket = bucket
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        (self._port,) = free_ports(1)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        process = self._process = controlplane.start_child(command, self._log)
        wait_until(self._answers, process, self._log, "the local S3 server", seconds=90.0)
        self.client().create_bucket(Bucket=self.bucket)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            controlplane.stop_child(self._process)

    def client(self) -> Any:
        """Returns a boto3 client of this server."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1.0):
            return True
        return False


WORKERS = 4
CREDENTIALS = "demo-s3-credentials"

REMOTE_EVERY = 20


def credentials() -> dict[str, Any]:
    """Returns the Secret that lets the sidecars write to the bucket."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": CREDENTIALS, "namespace": NAMESPACE},
        "type": "Opaque",
        "stringData": {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY},
    }


def in_bucket(bucket: str, endpoint: str, prefix: str) -> dict[str, Any]:
    """Returns `spec.tiers.remote.s3` of a job, for a store with those credentials."""
    place = {"bucket": bucket, "prefix": prefix, "region": REGION, "endpoint": endpoint}
    return {**place, "credentialsSecretName": CREDENTIALS}


def job_manifest(name: str, workers: int, pod: Object, tiers: Object, **spec: Any) -> Object:
    """Returns a TierCheckJob that gives its workers the pod spec `pod`."""
    return {
        "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"workers": workers, "template": {"spec": pod}, "tiers": tiers, **spec},
    }


@dataclass(frozen=True)
class Play:
    """One run of the story: the job's name, a title, and `spec.recovery.inProcess`."""

    name: str
    title: str
    in_process: str


PLAYS = (
    Play("gpt", "every process starts anew", "Never"),
    Play("gpt-stays", "the other processes stay", "Auto"),
)


def job(play: Play, command: list[str], endpoint: str, bucket: str) -> Object:
    """Returns the TierCheckJob: four workers, a delta of every step, a copy in another rack, and S3."""
    container = {"name": "trainer", "image": "example-trainer", "command": command}
    s3 = in_bucket(bucket, endpoint, play.name)
    tiers = {
        "local": {"sizeLimit": "512Mi"},
        "peer": {"copies": 1, "spread": {"level": "rack", "mode": "Preferred"}},
        "remote": {"s3": s3, "everySteps": REMOTE_EVERY, "keep": 3},
    }
    return job_manifest(
        play.name,
        WORKERS,
        {"terminationGracePeriodSeconds": 5, "containers": [container]},
        tiers,
        topology={
            "levels": [
                {"name": "rack", "label": "topology.kubernetes.io/rack"},
                {"name": "host", "label": "kubernetes.io/hostname"},
            ]
        },
        restore={"proveSteps": 1},
        recovery={"inProcess": play.in_process},
        failurePolicy={"maxRestarts": 5},
    )


@dataclass(frozen=True)
class Failure:
    name: str
    fault: str
    """A key of `tiercheck_local.stage.FAULTS`."""
    worker: int
    needs_remote: bool = False
    """True to wait for a complete remote version first, as nothing else will be left."""
    asks_for_parity: bool = False
    """True to request parity before; that takes effect with the recovery."""


FAILURES = (
    Failure("process", "crash", 1),
    Failure("pod", "evict", 2),
    Failure("node", "node", 3),
    Failure("rack", "rack", 0),
    Failure("all", "delete every pod", 0, needs_remote=True, asks_for_parity=True),
    Failure("node, parity", "node", 1),
)
"""The failures, by size; the last one under parity, which replaced copies when all pods were lost."""


PRINT_EVERY = 15.0
"""Seconds between lines where there is no terminal to redraw."""


class Live:
    """A progress display within a `with` block: redraws a terminal, or prints lines elsewhere (CI)."""

    def __init__(self, console: Console, steps: int, log: TrainingLog) -> None:
        self._console = console
        self._log = log
        self._steps = steps
        self._printed = 0.0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=steps, state="starting")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, sentence: str) -> None:
        self._console.print(sentence, highlight=False, soft_wrap=True)

    def follow(self, status: Mapping[str, Any]) -> None:
        """Shows the current state of the job."""
        last = self._log.last
        state = describe(status, last.step if last else 0, last.loss if last else None)
        self._progress.update(self._task, completed=last.step if last else 0, state=state)
        if not self._console.is_terminal and time.monotonic() - self._printed > PRINT_EVERY:
            self._printed = time.monotonic()
            self._console.print(f"  {state}", highlight=False, soft_wrap=True)

    def count(self, description: str, step: int) -> None:
        """Shows a plain count (the reference run)."""
        self._progress.update(
            self._task, description=description, completed=step, state=f"step {step}/{self._steps}"
        )


def describe(status: Mapping[str, Any], step: int, loss: float | None) -> str:
    """Returns the job in one line: phase, step, loss, and the step that is safe in each tier."""
    tiers = status.get("tiers") or {}
    safe = " ".join(
        f"{tier}:{tiers[tier]['step']}"
        for tier in ("local", "peer", "remote")
        if "step" in tiers.get(tier, {})
    )
    words = [str(status.get("phase") or "Pending"), f"step {step}"]
    if loss is not None:
        words.append(f"loss {loss:.3f}")
    words.append(f"safe {safe or 'nothing yet'}")
    words.append(f"attempt {status.get('attempt', 0)}")
    return " · ".join(words)


_PATIENCE = 90.0
"""Seconds after which one wait fails."""


@dataclass
class StoryRunner:
    """Plays the failures on one job and records its recoveries."""

    stage: LaptopStage
    log: TrainingLog
    ranks: int
    live: Live

    def __post_init__(self) -> None:
        self._under_way: dict[int, dict[str, Any]] = {}
        """The fields that the status had of each recovery while it was under way, by attempt."""
        self.ended: dict[int, Mapping[str, Any]] = {}
        """The recoveries that have ended, by attempt, as the status last had them."""

    def wait_for(self, what: str, condition: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any]:
        """Polls the job until `condition` of its status holds. Raises WaitTimeout."""

        def look(status: Mapping[str, Any]) -> bool:
            under_way, ended = status.get("recovery") or {}, status.get("lastRecovery")
            if "attempt" in under_way:  # it has none before its version is chosen
                self._under_way.setdefault(int(under_way["attempt"]), {}).update(under_way)
            if ended:
                self.ended[int(ended["attempt"])] = ended
            self.log.poll()
            self.live.follow(status)
            if condition_is(status, "Failed") and not condition(status):
                raise WaitTimeout(f"while waiting for {what}, the job failed: {in_words(status)}")
            return condition(status)

        return self.stage.wait(what, look, _PATIENCE)

    def play(self, failure: Failure, at_step: int) -> FaultRecord:
        """Waits for `at_step`, injects the failure, and follows the job until it trains again."""
        status = self.wait_for(
            f"step {at_step}, protected", lambda status: self._ready_for(failure, at_step, status)
        )
        if failure.asks_for_parity:
            self.live.say(f"  → {self.stage.protect_by_parity()}")
        attempt_before = int(status.get("attempt", 0))
        injected_at = time.time()
        target = self.stage.inject_fault(failure.fault, failure.worker)
        self.live.say(f"  ✗ {FAULTS[failure.fault].what}: {target}")
        self.wait_for(
            "the recovery to end",
            lambda status: (
                int((status.get("lastRecovery") or {}).get("attempt", 0)) > attempt_before
                and self._trains_in(int(status["attempt"]))
            ),
        )
        record = self._record(failure, target, injected_at)
        self.stage.undo()
        return record

    def finish(self) -> Mapping[str, Any]:
        """Waits for the job to complete, and for rank 0's digest."""
        return self.wait_for(
            "the job to complete",
            lambda status: condition_is(status, "Completed") and self.log.digest is not None,
        )

    @property
    def step(self) -> int:
        """Returns the newest step that rank 0 has printed."""
        return self.log.last.step if self.log.last else 0

    def _ready_for(self, failure: Failure, at_step: int, status: Mapping[str, Any]) -> bool:
        whole = condition_is(status, "Running") and self._trains_in(int(status.get("attempt", 0)))
        durable = tier_step(status, "remote") or not failure.needs_remote
        return bool(self.step >= at_step and whole and tier_step(status, "peer") and durable)

    def _trains_in(self, attempt: int) -> bool:
        return self.log.last is not None and self.log.last.attempt == attempt

    def _record(self, failure: Failure, target: str, injected_at: float) -> FaultRecord:
        attempt = max(self.ended)
        finished, under_way = self.ended[attempt], self._under_way.get(attempt, {})
        ranks = self.stage.restores(attempt)
        if len(ranks) != self.ranks:
            raise WaitTimeout(f"only ranks {sorted(ranks)} said how they were restored in attempt {attempt}")
        resumed_at = min(step.time for step in self.log.steps if step.attempt == attempt)
        restored_step = int(finished["step"])
        racks = {worker: self.stage.rack_of(worker) for worker in range(self.ranks)}
        return FaultRecord(
            name=failure.name,
            what=FAULTS[failure.fault].what,
            target=target,
            injected_at=injected_at,
            detected_at=parse_time(under_way.get("detectedAt")) or injected_at,
            restored_at=parse_time(under_way.get("restoredAt")) or resumed_at,
            resumed_at=resumed_at,
            attempt=attempt,
            restarted=int(finished.get("restarted", 0)),
            restored_step=restored_step,
            lost_steps=max(
                0, max(step.step for step in self.log.steps if step.attempt < attempt) - restored_step
            ),
            tiers=count_tiers(ranks),
            rank_sources=[rank_source(restore, rank, racks) for rank, restore in sorted(ranks.items())],
            cause=str(finished.get("cause", "")),
            reason=str(finished.get("reason", "")),
        )
