"""Measures recoveries on a laptop cluster in which every other process stays.

python -m benchmarks --only in_process --part 200   with so many kills
"""

from __future__ import annotations

import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Figure, Outcome, Scale, Sense, load, seconds_text
from tests.cluster.jobs import OPERATOR_ENV, Job, Jobs
from tests.cluster.test_in_process import RANKS, start, undisturbed
from tests.lives import Lives
from tiercheck.trainer.inprocess.listener import OrderListener
from tiercheck.trainer.inprocess.steps import StepLoop
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.nodespec import NodeSpec
from tiercheck_operator.kubernetes.api_server import JOBS, PODS

_REST = {"kill": (9.0, 11.0), "stop": (9.0, 11.0), "delete": (11.0, 14.0)}
"""Seconds between two injections: the next warm interpreter is there by then, and the next spare's."""
_ENOUGH = {"LIVES": "1000000", "TIERCHECK_WARM_AFTER_SECONDS": "0.5", "PACE": "0.15"}
"""A step pauses, as it would for a GPU: the processors have to start what replaces a rank."""
_IMPATIENT = {"failurePolicy": {"maxRestarts": 1000, "hang": {"minSeconds": 4, "stepFactor": 20}}}


def run(scale: Scale, parts: Sequence[str] = (), earlier: object = None) -> Outcome:
    """The figures of in-process recovery that need neither a GPU nor kubelets."""
    injections = int(parts[0]) if parts else 5 if scale.quick else 10
    with _cluster() as jobs:
        killed = _Struck(start(jobs, "ddp", {}, RANKS, **_ENOUGH)).all("kill", injections * 3 // 5)
        stopped = _Struck(start(jobs, "ddp", _IMPATIENT, RANKS, **_ENOUGH)).all("stop", injections // 5)
        deleted = _Struck(start(jobs, "ddp", {"spares": 1}, RANKS, **_ENOUGH)).all("delete", injections // 5)
    struck = (killed, stopped, deleted)
    losses = _compare([line for each in struck for line in each.lines])
    name = "fault to all ranks' next step, "
    kept, of = (sum(pair[at] for each in struck for pair in each.kept) for at in (0, 1))
    unchanged = "survivors whose process and addresses are unchanged"
    counted = " + ".join(str(len(each.seconds)) for each in struck)
    note = f"{counted} kills, stops, deletions; {losses} losses, all equal"
    figures = [
        _figure(f"{name}killed rank", killed.seconds, 1.0),
        _figure(f"{name}pod deleted, a spare waits", deleted.seconds, 2.5),
        _figure("survivors out, rank killed", killed.out, 0.15),
        _figure("survivors out, rank stopped, after the decision", stopped.out, 1.0),
        Figure(unchanged, f"{kept} of {of}", "", kept / of, 0.95, Sense.AT_LEAST, note, "%"),
        _flat(killed.held()),
        _figure("cost of the loop, each step", [_cost_of_a_step()], 5e-6),
    ]
    return Outcome(figures, {"killed": killed.seconds, "pod lost": deleted.seconds, "out": killed.out})


def _compare(lines: list[dict[str, Any]]) -> int:
    """Returns how many losses there are. Raises AssertionError if one is not that of torch alone."""
    with tempfile.TemporaryDirectory() as folder:
        lives = Lives(Path(folder))
        try:
            expected = undisturbed(lives, "ddp", RANKS, max(line["step"] for line in lines) + 1)
        finally:
            lives.stop()
    assert all(line["loss"] == expected[line["rank"], line["step"]] for line in lines)
    return len(lines)


def _figure(name: str, found: Sequence[float], bound: float) -> Figure:
    middle = statistics.median(found)
    note = f"median of {len(found)}, worst {seconds_text(max(found))}"
    return Figure(name, seconds_text(middle), seconds_text(bound), middle / bound, 1.0, note=note)


def _flat(held: list[tuple[int, int, int]]) -> Figure:
    """Of a process that outlived all kills: what it held at its last recoveries, against its first ones."""
    few = max(1, len(held) // 5)
    first, last = (
        [statistics.median(column) for column in zip(*part, strict=True)]
        for part in (held[:few], held[-few:])
    )
    grown = max(b / a for a, b in zip(first, last, strict=True))
    early, late = (
        f"{each[0]:.0f} descriptors, {each[1]:.0f} threads, {each[2] / 256:.0f} MiB" for each in (first, last)
    )
    name = f"held after {len(held)} recoveries, against the first"
    return Figure(name, late, early, grown, 1.1)


@contextmanager
def _cluster() -> Iterator[Jobs]:
    nodes = NodeSpec.racks(6, 2)
    with tempfile.TemporaryDirectory(prefix="tcb-") as folder, LocalCluster(Path(folder), nodes) as cluster:
        cluster.apply_crds(ROOT / "crds")
        cluster.start_operator(OPERATOR_ENV)
        jobs = Jobs(cluster, Path(folder))
        yield jobs
        jobs.clean_up()


class _Struck:
    """A job, and what became of it at each strike."""

    def __init__(self, job: Job) -> None:
        self.job, self._rng = job, random.Random(0)
        self.seconds: list[float] = []
        self.out: list[float] = []
        """Seconds until the last survivor was out of its step."""
        self.kept: list[tuple[int, int]] = []
        """Of each strike: survivors that are what they were, and all."""
        self.lines: list[dict[str, Any]] = []
        """What its ranks said of each step."""
        self._left: dict[int, list[dict[str, Any]]] = {}
        """When ranks left their steps, and what they held then, by attempt."""
        self._read: dict[Path, int] = {}
        """Bytes of each log that were read."""
        job.wait_trained(13)

    def all(self, fault: str, count: int) -> _Struck:
        """Hits the job so often, and ends it."""
        for _ in range(count):
            self.strike(fault)
        self._read_logs()
        self.job.cluster.api.delete(JOBS, "default", self.job.name)
        return self

    def strike(self, fault: str) -> None:
        """Hits a random rank at a random moment, and waits for the recovery."""
        job, victim = self.job, self._rng.randrange(fault == "kill", RANKS)  # 0 outlives all kills
        time.sleep(self._rng.uniform(*_REST[fault]))
        before, ended = self._lives(), job.status["attempt"]
        pod, began = job.pod_of(victim), time.time()
        if fault == "delete":
            job.cluster.api.delete(PODS, "default", pod, grace=0)
        else:
            number = signal.SIGSTOP if fault == "stop" else signal.SIGKILL
            job.cluster.faults.kill_container_process(pod, number=number)
        if fault == "stop":
            job.cluster.wait_for(lambda: job.status["attempt"] > ended, 60.0, "the decision")
            began = time.time()
        attempt = job.wait_recovered(ended)["attempt"]
        job.wait(f"steps in attempt {attempt}", lambda _: len(self._first_steps(attempt)) == RANKS)
        after = self._lives()
        self.seconds.append(max(self._first_steps(attempt).values()) - began)
        left = [each["left"] for each in self._left[ended]]
        self.out.append(max(0.0, max(left) - began))  # a decision is seen a look later than it is made
        survivors = set(range(RANKS)) - {victim}
        self.kept.append((sum(before[rank] == after[rank] for rank in survivors), len(survivors)))
        told = f"{fault} of rank {victim}: {self.seconds[-1]:.2f} s, out after {self.out[-1]:.3f} s"
        print(f"{told}, {self.kept[-1][0]} stayed, load {load():.1f}", file=sys.stderr, flush=True)

    def held(self) -> list[tuple[int, int, int]]:
        """Descriptors, threads and pages of memory of rank 0 at each of its recoveries."""
        mine = [each for found in self._left.values() for each in found if each["rank"] == 0]
        return [(each["fd"], each["task"], each["pages"]) for each in mine]

    def _first_steps(self, attempt: int) -> dict[int, float]:
        self._read_logs()
        found: dict[int, float] = {}
        for line in reversed(self.lines):
            if line["attempt"] == attempt:
                found[line["rank"]] = min(line["t"], found.get(line["rank"], line["t"]))
            elif line["attempt"] < attempt - 1:
                break
        return found

    def _lives(self) -> dict[int, tuple[int, int]]:
        """Process, and address of the first parameter, of each rank at its newest step."""
        self._read_logs()
        return {line["rank"]: (line["pid"], line["at"]) for line in self.lines[-500:]}

    def _read_logs(self) -> None:
        """Read what came since: the whole, each time, would take the ranks' processors."""
        new = []
        for path in self.job.log_files():
            with path.open("rb") as log:
                log.seek(self._read.get(path, 0))
                for line in log:
                    if not line.endswith(b"\n"):
                        break
                    self._read[path] = self._read.get(path, 0) + len(line)
                    new += [json.loads(line)] if line.startswith(b'{"') else []
        self.lines += sorted((each for each in new if "step" in each), key=itemgetter("t"))
        for each in new:
            if "left" in each:
                self._left.setdefault(each["attempt"], []).append(each)


def _cost_of_a_step() -> float:
    """Seconds that `steps` and `with step` and both interruption points take."""
    loop, steps = StepLoop(0, 1, lambda: None, lambda: 0), 100_000
    with tempfile.TemporaryDirectory() as folder:
        loop._listener = OrderListener(Path(folder), 0, 1, 1, lambda: None)
        began = time.perf_counter()
        for step in loop.steps(0, steps):
            with step:
                loop.interruption_point()
                loop.interruption_point()
        return (time.perf_counter() - began) / steps
