"""Every owner of attached pods gets its job, and nobody else by writing annotations.

Pods that were left out are found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.operator.api_model import ApiModel
from tests.operator.attach import attach_shapes as shapes
from tests.operator.attach.attach_shapes import Object
from tests.operator.attach.test_attach_admission import admitted, having, made_job
from tiercheck.protocol import names
from tiercheck_operator.attach.adoption import Adoption, UninjectedPods
from tiercheck_operator.kubernetes.api_server import ApiFailure
from tiercheck_operator.model.observed import PodView
from tiercheck_operator.model.parsing import parse_pod

JOBS = "/apis/tiercheck.io/v1alpha1/namespaces/ml/tiercheckjobs"


async def seen_pod() -> PodView:
    made, _ = await admitted(shapes.job_pod(0), shapes.job(), shapes.POLICY)
    made["metadata"] |= {"name": "train-0", "uid": "pod-uid"}
    pod = parse_pod(made)
    assert pod is not None
    return pod


async def adopted(server: ApiModel, has_job: Callable[[str, str], bool] = lambda *_: False) -> None:
    """Until something was created, or tried in vain."""
    pod = await seen_pod()
    adoption = Adoption(server, has_job, lambda *_: [pod])
    adoption.pod_seen(pod)
    adoption.pod_seen(pod)
    try:
        async with asyncio.timeout(30):
            await server.written.wait()
    finally:
        await adoption.stop()


async def test_owner_of_an_attached_pod_gets_its_job_once() -> None:
    server = having(shapes.job(), shapes.POLICY)
    await adopted(server)
    ((path, job),) = ((call.path, call.body) for call in server.did("POST"))
    assert path == f"{JOBS}/job-train"
    assert job["metadata"]["name"] == "job-train"
    assert (job["spec"]["workers"], job["spec"]["attach"]["owner"]["uid"]) == (4, "job-uid")
    assert job["spec"]["failurePolicy"] == {"maxRestarts": 3}


async def test_owner_that_has_its_job_is_left_alone() -> None:
    server = having(shapes.job(), shapes.POLICY)
    pod = await seen_pod()
    adoption = Adoption(server, lambda _, uid: uid == "job-uid", lambda *_: [pod])
    adoption.pod_seen(pod)
    await asyncio.sleep(0)
    await adoption.stop()
    assert server.calls == []


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        ([shapes.POLICY], "Job train of its pods is gone"),
        (
            [{**shapes.job(), "metadata": {**shapes.job()["metadata"], "uid": "another"}}, shapes.POLICY],
            "is gone",
        ),
        ([shapes.job()], "there is no TierCheckPolicy careful in namespace ml any more"),
    ],
    ids=["no owner", "another owner", "no policy"],
)
async def test_annotation_alone_makes_no_job(objects: list[Object], said: str) -> None:
    server = having(*objects)
    await adopted(server)
    (event,) = server.events
    assert len(server.did("POST")) == 1
    assert event["reason"] == "NotAttached"
    assert event["involvedObject"]["name"] == "train"
    assert said in event["message"]


async def test_job_of_the_same_name_that_is_somebodys_own_is_not_touched() -> None:
    server = having(shapes.job(), shapes.POLICY)
    theirs = made_job()
    theirs["spec"]["attach"]["owner"]["uid"] = "another"
    server.objects[f"{JOBS}/job-train"] = theirs
    pod = await seen_pod()
    adoption = Adoption(server, lambda *_: False, lambda *_: [pod])
    adoption.pod_seen(pod)
    try:
        async with asyncio.timeout(30):
            while not server.events:
                server.written.clear()
                await server.written.wait()
    finally:
        await adoption.stop()
    (event,) = server.events
    assert "job-train belongs to another owner" in event["message"]


def left_out(**changes: Any) -> Object:
    pod = shapes.job_pod(1)
    pod["metadata"] |= {"name": "train-1-x", "uid": "left-uid", **changes}
    return pod


@pytest.mark.parametrize(
    ("pod", "has_job", "goes"),
    [
        (left_out(), True, True),
        (left_out(), False, False),
        (left_out(annotations={names.ANNOTATION_NOT_ATTACHED: "no command"}), True, False),
        (left_out(deletionTimestamp="2027-01-01T00:00:00Z"), True, False),
        (left_out(ownerReferences=[]), True, False),
    ],
    ids=["waited for", "not waited for", "refused", "going already", "nobody's"],
)
async def test_pod_that_was_left_out_is_told_of_and_evicted_only_if_its_job_waits_for_it(
    pod: Object, has_job: bool, goes: bool
) -> None:
    server = having()
    server.objects["/api/v1/pods"] = {"items": [pod]}
    waited_for = ("ml", "job-uid")
    looked = UninjectedPods(server, (), lambda *owner: has_job and owner == waited_for)
    for _ in range(3):
        await looked.look()
    assert all("status.phase!=Succeeded" in call.query for call in server.did("GET")), (
        "what ended needs nothing"
    )
    evictions = server.did("EVICT")
    assert bool(evictions) is goes
    assert {call.name for call in evictions} <= {"train-1-x"}
    assert all(each.body["deleteOptions"]["preconditions"] == {"uid": "left-uid"} for each in evictions)
    assert len(server.events) == 1, "once, however often it is seen"


async def test_attached_pod_that_lost_its_labels_is_not_said_to_run_without_tiercheck() -> None:
    server = having()
    server.objects["/api/v1/pods"] = {"items": [left_out(annotations={names.ANNOTATION_ATTACHED: "{}"})]}
    await UninjectedPods(server, (), lambda *_: False).look()
    (event,) = server.events
    assert "admission webhook or policy that changes labels" in event["message"]
    assert "runs without" not in event["message"]


async def test_pod_that_its_disruption_budget_keeps_is_told_of_once_and_tried_again_after_minutes() -> None:
    kept = ApiFailure(429, "it would violate the pod's disruption budget", 10.0, considered=True)
    server, now = ApiModel(EVICT=kept), 0.0
    server.objects["/api/v1/pods"] = {"items": [left_out()]}
    looked = UninjectedPods(server, (), lambda *_: True, clock=lambda: now)
    for _ in range(10):
        await looked.look()
        now += 20
    assert len(server.did("EVICT")) == 1
    assert [("disruption budget" in event["message"]) for event in server.events] == [False, True]
    now += 300
    await looked.look()
    assert len(server.did("EVICT")) == 2
    assert len(server.events) == 2


async def test_five_thousand_pods_of_one_team_are_no_flood_of_calls_and_keep_no_others_waiting() -> None:
    server = having()
    many = [left_out(uid=f"u{n}", name=f"p{n}", namespace="many") for n in range(5000)]
    server.objects["/api/v1/pods"] = {"items": [*many, left_out(namespace="few")]}
    looked = UninjectedPods(server, (), lambda *_: False)
    for look in range(1, 4):
        await looked.look()
        assert len(server.events) == 20 * look + 1
