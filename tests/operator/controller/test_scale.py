"""A job of a thousand workers: what an event costs the API server, and how large the object may get."""

from __future__ import annotations

import json

from benchmarks.reconcile import LIMIT, BenchJob, Server, ground, of_jobs, of_workers
from tiercheck.protocol.report import Problem, TrainerReport, TrainerState
from tiercheck_operator.metrics import Metrics


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
