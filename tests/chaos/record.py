"""Writes down what happens, from status, pods and ranks, in words that the checker reads."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.simulation.checker import Checker, Entry, Step
from tiercheck.protocol import names
from tiercheck.protocol.version import Branch, History, Version
from tiercheck_local.client import Client
from tiercheck_local.stage import condition_is, find_condition
from tiercheck_operator.kubernetes.api_server import JOBS, PODS, ApiResource, Object

_SETTLED = 1.0
"""Seconds after which everything that happened by then has been heard of."""


class Said:
    """What an attempt has itself said to be complete: its status begins with what the attempt before had said
    last."""

    def __init__(self) -> None:
        self._attempt = 0
        self._last: dict[str, tuple[int, str]] = {}
        self._carried: dict[str, tuple[int, str]] = {}

    def of(self, attempt: int, tiers: Mapping[str, Any]) -> dict[str, int]:
        """Steps by tier. What it says again exactly as it was cannot be told from what was carried on, and is
        left out."""
        if attempt != self._attempt:
            self._attempt, self._carried = attempt, self._last
        self._last = {name: (tier["step"], tier["time"]) for name, tier in tiers.items()}
        return {name: mark[0] for name, mark in self._last.items() if mark != self._carried.get(name)}


class Recorder:
    """Thread-safe. Times are Unix seconds."""

    def __init__(self, kubeconfig: Path, logs: Path, job: str) -> None:
        self._logs, self._job = logs, job
        self._lock = threading.Lock()
        self._waiting: list[Entry] = []
        self._offsets: dict[Path, int] = {}
        self._attempt = 0
        self._told: tuple[Any, ...] = ()
        self._marks: tuple[Any, ...] = ()
        self._said = Said()
        self._nodes: dict[str, str] = {}
        self.status: Mapping[str, Any] = {}
        """The newest."""
        self.pods: dict[str, Object] = {}
        self.steps: dict[int, list[tuple[float, int, int]]] = {}
        """What each rank made: when, step, attempt."""
        self.losses: dict[tuple[int, int], set[tuple[str, str]]] = {}
        """By rank and step, every (loss, state) that was ever told."""
        self.begun: dict[int, dict[int, int]] = {}
        """By attempt and rank, the step that it came back to."""
        self.ended: dict[int, int] = {}
        """Last step of ranks that ended as they were asked to."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._follow_all, args=(kubeconfig,), name="recorder", daemon=True
        )
        self._thread.start()

    def record(self, what: str, /, at: float | None = None, **fields: Any) -> None:
        with self._lock:
            self._waiting.append((time.time() if at is None else at, what, fields))

    def take(self, all_of_it: bool = False) -> list[Entry]:
        """What happened since this was asked last, in order, but for what is so new that something before it
        may be missing."""
        self.poll()
        limit = time.time() + 1 if all_of_it else time.time() - _SETTLED
        with self._lock:
            ready = sorted(
                (entry for entry in self._waiting if entry[0] <= limit), key=lambda entry: entry[0]
            )
            self._waiting = [entry for entry in self._waiting if entry[0] > limit]
        return ready

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    # What the ranks print

    def poll(self) -> None:
        for path in sorted(self._logs.glob(f"{self._job}-*/{names.TRAINER_CONTAINER}.log")):
            known = self._offsets.get(path, 0)
            if path.stat().st_size == known:
                continue
            with path.open("rb") as file:
                file.seek(known)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offsets[path] = known + len(whole) + len(newline)
            for line in whole.splitlines():
                if line.startswith(b'{"') and line.endswith(b"}"):
                    self._heard(json.loads(line), path.parent.name)

    def _heard(self, line: dict[str, Any], pod: str) -> None:
        at, rank, attempt = line["at"], line["rank"], line["attempt"]
        if "start" in line:
            begun = line["start"]
            self.begun.setdefault(attempt, {})[rank] = begun
            state = bytes.fromhex(line["state"]) if begun else bytes(8)
            self.record("started", at, rank=rank, attempt=attempt, pod=pod, begun=begun, state=state)
            self.losses.setdefault((rank, begun), set()).add(("", line["state"]))
        elif "step" in line:
            self.steps.setdefault(rank, []).append((at, line["step"], attempt))
            self.losses.setdefault((rank, line["step"]), set()).add((line["loss"], line["state"]))
            self.record(
                "step", at, rank=rank, step=line["step"], attempt=attempt, state=bytes.fromhex(line["state"])
            )
        else:
            self.ended[rank] = line["steps"]

    # What the API server says

    def _follow_all(self, kubeconfig: Path) -> None:
        asyncio.set_event_loop(self._loop)

        async def follow(resource: ApiResource, selector: dict[str, str], see: Any, gone: Any) -> None:
            async with Client.of(kubeconfig) as client:
                async for kind, found in client.follow(resource, "default", **selector):
                    for item in found["items"] if kind == "LISTED" else [found]:
                        (gone if kind == "DELETED" else see)(item)

        by_name = {"fields": f"metadata.name={self._job}"}
        of_job = {"labels": f"{names.LABEL_JOB}={self._job}"}
        work = [
            follow(JOBS, by_name, self._see_job, lambda _: None),
            follow(PODS, of_job, self._see_pod, self._lose_pod),
        ]
        tasks = [self._loop.create_task(each) for each in work]
        self._loop.run_forever()
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _see_pod(self, pod: Object) -> None:
        name, node = pod["metadata"]["name"], pod["spec"].get("nodeName")
        self.pods = {**self.pods, name: pod}
        if node and self._nodes.get(name) != node:
            self._nodes[name] = node
            self.record(
                "pod", pod=name, node=node, worker=int(pod["metadata"]["labels"].get(names.LABEL_WORKER, -1))
            )

    def _lose_pod(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        self.pods = {key: value for key, value in self.pods.items() if key != name}
        self.record("gone", pod=name)

    def _see_job(self, job: Object) -> None:
        status = self.status = job.get("status") or {}
        attempt, history = int(status.get("attempt") or 0), _history(status)
        if attempt != self._attempt:
            self._attempt = attempt
            base = history.branches[-1].base_step if history.branches else 0
            owner = history.owner(base) if base else None
            version = None if owner is None else Version(base, owner)
            self.record("attempt", number=attempt, version=version, heard=())
        protected = find_condition(status, "Protected")
        bare = int((status.get("placement") or {}).get("unprotectedWorkers") or 0)
        told = (status.get("phase"), condition_is(status, "Protected"), protected.get("reason"), bare)
        if told != self._told:
            self._told = told
            self.record("told", phase=told[0], protected=told[1], reason=told[2], bare=bare)
        self._see_marks(status, attempt, history)

    def _see_marks(self, status: Mapping[str, Any], attempt: int, history: History) -> None:
        placement = str((status.get("placement") or {}).get("hash"))
        said = self._said.of(attempt, status.get("tiers") or {})
        steps = {name: said.get(name) for name in ("local", "peer", "remote")}
        marks = (attempt, placement, *steps.values())
        if marks == self._marks:
            return
        self._marks = marks
        versions = {}
        for name, step in steps.items():
            owner = history.owner(step) if step else None
            versions[name] = None if owner is None else Version(step, owner)
        self.record("verdict", by="status", attempt=attempt, placement=placement, snapshot=None, **versions)


def _history(status: Mapping[str, Any]) -> History:
    return History(
        tuple(Branch(int(each["attempt"]), int(each["baseStep"])) for each in status.get("history") or ())
    )


# Checks a history of real processes with the simulation's checker, from outside.

TIERS = ("local", "peer", "remote")


@dataclass
class LifeChecker(Checker):
    """As `Checker`; "injection" begins a window, "settled" ends it."""

    ends: bool = True
    """Training may be ended by what struck last."""
    costs_copies: bool = True
    """What was complete in memory only may be lost to it."""
    struck: str = "the start"
    complete: dict[str, Step] = field(default_factory=dict)
    """The newest mark of each tier, of whatever attempt: what may not be lost."""

    def _injection(self, f: Mapping[str, Any]) -> None:
        self.faults.clear()
        self.lives.clear()
        self.ends, self.costs_copies, self.struck = f["ends"], f["costs_copies"], f["name"]

    def _stuck(self, f: Mapping[str, Any]) -> None:
        self._say("it goes on", f["why"])

    def _verdict(self, f: Mapping[str, Any]) -> None:
        # The status is silent of a tier while nobody answers for it. What it says next must not be less than
        # what it said before.
        known = self.marks.get((f["by"], f["attempt"], f["placement"]), {})
        f = {**f, **{name: f[name] or _as_mark(known.get(name)) for name in TIERS}}
        super()._verdict(f)
        for name in TIERS:
            if f["attempt"] == self.attempt and name in self.announced:
                self.complete[name] = self.announced[name]

    def _look_at_mark(self, name: str, version: Step) -> None:
        # An operator that was stopped tells what was so before: retention may have put newer ones in the
        # place of it.
        newer = any(each >= version and self._on_line(each, self.attempt) for each in self._stored())
        if name == "remote" and not newer:
            super()._look_at_mark(name, version)

    def _look_at_protection(self) -> None:
        """Who covers whom is not recorded."""

    def _attempt(self, f: Mapping[str, Any]) -> None:
        before, version = self.attempt, f["version"]
        chosen = (0, 0) if version is None else (version.step, version.attempt)
        if before and not self.ends:
            self._say("the healthy are left alone", f"attempt {f['number']} begins after {self.struck}")
        for name in TIERS if before else ():
            lost = self.costs_copies and name != "remote"
            mark = self.complete.get(name, (0, 0))
            if name != "local" and not lost and mark[0] > chosen[0]:
                self._say(
                    "committed is kept",
                    f"attempt {f['number']} goes back to {chosen}; {mark} was complete in {name}",
                )
        super()._attempt(f)
        self.complete = {name: mark for name, mark in self.complete.items() if mark[0] <= chosen[0]}

    def _started(self, f: Mapping[str, Any]) -> None:
        base = self.from_.get(f["attempt"])
        version = (
            base if base is not None and base[0] == f["begun"] else (f["begun"], -1) if f["begun"] else None
        )
        super()._started({**f, "version": _as_mark(version)})


@dataclass(frozen=True)
class Mark:
    step: int
    attempt: int


def _as_mark(version: Step | None) -> Mark | None:
    return None if version is None else Mark(*version)
