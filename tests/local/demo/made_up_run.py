"""Makes up a run for the report's tests: four workers and five faults."""

from __future__ import annotations

import math
import random

from tiercheck_local.demo.result import FaultRecord, RunRecord
from tiercheck_local.demo.training_log import Digest, RunVerdict, Step

_FAULTS = [
    # name, what, target, at step, lost, detect, restore, start, tiers, sources
    ("process", "a training process is killed", "training process of worker 1 (gpt-1-0)", 22, 2, 0.06, 0.4,
    4.1,
     {"local": 4}, ["own memory"] * 4),
    ("pod", "a pod is evicted", "pod gpt-2-0 (worker 2)", 48, 3, 0.2, 3.2, 4.4,
     {"local": 3, "peer": 1}, ["own memory", "own memory", "worker 0 (rack a)", "own memory"]),
    ("node", "a node dies", "node b-2 with worker 3", 71, 1, 2.4, 3.9, 4.2,
     {"local": 3, "peer": 1}, ["own memory", "own memory", "own memory", "worker 1 (rack a)"]),
    ("rack", "a rack goes dark", "rack a: nodes a-1, a-2", 98, 3, 2.6, 4.8, 4.9,
     {"local": 2, "peer": 2}, ["worker 2 (rack b)", "worker 3 (rack b)", "own memory", "own memory"]),
    ("all pods", "every pod is lost at once", "all pods, with all memory", 127, 7, 0.5, 5.9, 5.0,
     {"remote": 4}, ["S3"] * 4),
]  # fmt: skip


def loss_of(step: int) -> float:
    """The same for the run and for the reference: equality is what the demonstration shows."""
    return 2.2 + 3.4 * math.exp(-step / 38) + random.Random(step).uniform(-0.06, 0.06)


def made_up_step(step: int, attempt: int, time: float) -> Step:
    return Step(step, attempt, loss_of(step), loss_of(step).hex(), time)


def made_up_run(total: int = 150, step_seconds: float = 0.45) -> RunRecord:
    """150 steps in about two minutes."""
    started = now = 1_790_000_000.0
    attempt, step = 1, 0
    steps: list[Step] = []
    faults: list[FaultRecord] = []
    now += 9.0
    pending = list(_FAULTS)
    while step < total:
        step += 1
        now += step_seconds
        steps.append(made_up_step(step, attempt, now))
        if pending and step == pending[0][3]:
            name, what, target, _, lost, detect, restore, start, tiers, sources = pending.pop(0)
            injected = now + 0.1
            attempt += 1
            step -= lost
            now = injected + detect + restore + start
            faults.append(
                FaultRecord(
                    name, what, target, injected, injected + detect, injected + detect + restore,
                    now + step_seconds,
                    attempt, step, lost, dict(tiers), list(sources),
                    reason=f"step {step} is the newest version that every rank can rebuild",
                    exact="NotComparable" if "remote" in tiers else "Proven",
                )
            )  # fmt: skip
    return RunRecord(
        machine="2 cores, 24 GB, Linux",
        started=started,
        ended=now + 2.5,
        nodes={"a-1": "rack a", "a-2": "rack a", "b-1": "rack b", "b-2": "rack b"},
        steps=steps,
        faults=faults,
        reference=[made_up_step(number, 1, 0.0) for number in range(1, total + 1)],
        digest=Digest(total, "9f2c" * 16),
        reference_digest=Digest(total, "9f2c" * 16),
        verdict=RunVerdict(True, "all losses are bitwise equal", trained_again=len(steps) - total),
    )
