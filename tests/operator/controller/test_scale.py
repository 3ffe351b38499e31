"""What a look costs: calls to the API server, bytes of the object, modules that it passes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from benchmarks.reconcile import LIMIT, BenchJob, Server, ground, of_jobs, of_workers
from tests.operator import world_in_memory
from tests.operator.world_in_memory import World
from tiercheck.protocol.report import Problem, TrainerReport, TrainerState
from tiercheck_operator.metrics import Metrics
from tiercheck_operator.model.actions import Decision
from tiercheck_operator.model.observed import Observation


async def test_events_and_recoveries_make_no_more_calls_for_many_workers_than_for_few() -> None:
    few, many = await of_workers(4), await of_workers(200)
    for what in ("heartbeat, API calls", "pod event, API calls", "recovery, API calls"):
        assert many[what] <= few[what], what
    assert few["heartbeat, API calls"] <= 1
    assert few["pod event, API calls"] == 0


async def test_event_of_one_job_makes_no_calls_for_the_others() -> None:
    assert (await of_jobs(20))["event, API calls"] <= 1


async def test_object_of_a_thousand_workers_stays_small_whatever_they_have_to_say() -> None:
    server = Server()
    job = BenchJob("job", 1000, server, ground(1000), Metrics())
    server.pod_created = job.pod_created
    await job.until_running()
    story = "no space left on device " * 200
    for number, uid in enumerate(list(job.sidecars.reports)):
        job.sidecars.change(uid, problems=(Problem(f"Problem{number}", story),))
        if number % 2:
            failed = TrainerReport(TrainerState.FAILED, 1, "Crashed", story, ended_at=job.now())
            job.sidecars.change(uid, trainer=failed)
    for name in list(job.pods)[::3]:
        del job.pods[name]
    sizes = []
    for _ in range(60):
        job.later(0.5)
        for uid in list(job.sidecars.reports):
            job.sidecars.probe(uid)
        await job.look()
        sizes.append(len(json.dumps({**job.object, "spec": {}})))
    assert job.object["status"]["attempt"] > 1
    assert max(sizes) < LIMIT


# A person who follows one look passes few modules.


ROOT = Path(__file__).parents[3]
PRODUCT = (ROOT / "operator", ROOT / "tiercheck")
MOST = 20


def modules_entered(decide: Callable[[Observation], Decision], seen: Observation) -> set[str]:
    """In which modules of the product a function is called between the observation and the decision."""
    files = set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        decide(seen)
    finally:
        sys.setprofile(before)
    paths = map(Path, files)
    return {str(path.relative_to(ROOT)) for path in paths if any(map(path.is_relative_to, PRODUCT))}


def test_one_look_at_a_running_job_passes_few_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    world, seen = World(), list[Observation]()
    world.running()
    decide = world_in_memory.decide

    def remember(obs: Observation) -> Decision:
        seen.append(obs)
        return decide(obs)

    monkeypatch.setattr(world_in_memory, "decide", remember)
    world.train(1)
    entered = modules_entered(decide, seen[-1])
    assert len(entered) <= MOST, sorted(entered)
