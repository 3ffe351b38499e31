"""Measures recoveries on a laptop cluster in which every other process stays.

python -m benchmarks --only in_process --part 200   with so many kills
"""

from __future__ import annotations

import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import ROOT, Figure, Outcome, Scale, Sense, load, seconds_text
from tests.cluster.conftest import OPERATOR_ENV
from tests.cluster.jobs import Job, Jobs
from tests.cluster.test_in_process import RANKS, lines_of, start, undisturbed
from tiercheck.trainer.inprocess.listener import OrderListener
from tiercheck.trainer.inprocess.steps import StepLoop
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.nodespec import NodeSpec
from tiercheck_operator.kubernetes.api_server import JOBS, PODS

_REST = (11.0, 13.0)
"""Seconds between two injections: the next warm interpreter is there by then."""
_ENOUGH = {"LIVES": "1000000", "TIERCHECK_WARM_AFTER_SECONDS": "2", "PACE": "0.05"}
_IMPATIENT = {"failurePolicy": {"maxRestarts": 1000, "hang": {"minSeconds": 4, "stepFactor": 20}}}


def run(scale: Scale, parts: Sequence[str] = (), earlier: object = None) -> Outcome:
    """The figures of in-process recovery that need neither a GPU nor kubelets."""
    injections = int(parts[0]) if parts else 2 if scale.quick else 10
    with _cluster() as jobs:
        killed = _Struck(start(jobs, "ddp", **_ENOUGH))
        for _ in range(injections):
            killed.strike("kill")
        equal = killed.compare()
        stopped = _Struck(start(jobs, "ddp", _IMPATIENT, **_ENOUGH))
        stopped.strike("stop")
        equal += stopped.compare()
        with_spare = _Struck(start(jobs, "ddp", {"spares": 1}, **_ENOUGH))
        for _ in range(max(1, injections // 5)):
            with_spare.strike("delete")
        equal += with_spare.compare()
    name = "fault to the next step of all ranks, "
    kept, of = sum(each[0] for each in killed.kept), sum(each[1] for each in killed.kept)
    unchanged = "survivors whose process, model and addresses are unchanged"
    note = f"{injections} injections; {equal} losses, all bitwise those of an undisturbed run"
    figures = [
        _figure(f"{name}killed rank, laptop cluster", killed.seconds, 1.0),
        _figure(f"{name}lost pod with a spare, laptop cluster", with_spare.seconds, 2.5),
        _figure("survivors out of their collectives, rank killed", killed.out, 0.15),
        _figure("survivors out, rank stopped, from the decision", stopped.out, 1.0),
        Figure(unchanged, f"{kept} of {of}", "", kept / of, 0.95, Sense.AT_LEAST, note, "%"),
        _figure("cost in the loop, each step", [_cost_of_a_step()], 5e-6),
    ]
    return Outcome(figures, {"killed": killed.seconds, "pod lost": with_spare.seconds, "out": killed.out})


def _figure(name: str, found: Sequence[float], bound: float) -> Figure:
    middle = statistics.median(found)
    note = f"median of {len(found)}, worst {seconds_text(max(found))}, load {load():.1f}"
    return Figure(name, seconds_text(middle), seconds_text(bound), middle / bound, 1.0, note=note)


@contextmanager
def _cluster() -> Iterator[Jobs]:
    nodes = NodeSpec.racks(6, 2)
    with tempfile.TemporaryDirectory(prefix="tcb-") as folder, LocalCluster(Path(folder), nodes) as cluster:
        cluster.apply_crds(ROOT / "crds")
        cluster.start_operator(OPERATOR_ENV)
        jobs = Jobs(cluster, Path(folder), OPERATOR_ENV)
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
        job.wait_trained(13)

    def strike(self, fault: str) -> None:
        """Hits a random rank at a random moment, and waits for the recovery."""
        job, victim = self.job, self._rng.randrange(RANKS)
        time.sleep(self._rng.uniform(*_REST))
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
        left = [each["left"] for each in job.printed() if "left" in each and each["attempt"] == ended]
        self.out.append(max(0.0, max(left) - began))  # a decision is seen a look later than it is made
        survivors = set(range(RANKS)) - {victim}
        self.kept.append((sum(before[rank] == after[rank] for rank in survivors), len(survivors)))
        told = f"{fault} of rank {victim}: {self.seconds[-1]:.2f} s, out after {self.out[-1]:.3f} s"
        print(f"{told}, {self.kept[-1][0]} stayed, load {load():.1f}", file=sys.stderr, flush=True)

    def compare(self) -> int:
        """Returns how many losses there are. Raises AssertionError if one differs."""
        lines = lines_of(self.job)
        expected = undisturbed("ddp", RANKS, max(line["step"] for line in lines) + 1)
        assert all(line["loss"] == expected[line["rank"], line["step"]] for line in lines)
        self.job.cluster.api.delete(JOBS, "default", self.job.name)
        return len(lines)

    def _first_steps(self, attempt: int) -> dict[int, float]:
        found: dict[int, float] = {}
        for line in lines_of(self.job):
            if line["attempt"] == attempt:
                found.setdefault(line["rank"], line["t"])
        return found

    def _lives(self) -> dict[int, tuple[int, int]]:
        """Process, and address of the first parameter, of each rank at its newest step."""
        return {line["rank"]: (line["pid"], line["at"]) for line in lines_of(self.job)}


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
