"""What becomes of a reconcile when the API server says no."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest

from tests.operator.api_model import ApiModel
from tests.operator.controller.test_job_loop import Silent, StandIn, new_job, surroundings
from tests.operator.kubelet_words import made_by
from tests.operator.world_in_memory import START, TEMPLATE, World, make_spec, trained
from tiercheck_operator.config import Config
from tiercheck_operator.controller.decide import decide, decision_after_refusal
from tiercheck_operator.controller.execute import Executor, RefusalMemory
from tiercheck_operator.controller.reconciler import JobLoop
from tiercheck_operator.kubernetes.api_server import ApiFailure
from tiercheck_operator.kubernetes.events import EventPoster
from tiercheck_operator.kubernetes.owned_objects import OwnedObjects
from tiercheck_operator.model.actions import CreatePod, CreateSpare, Decision, DeletePod, EnsureService
from tiercheck_operator.model.observed import Observation, PodView
from tiercheck_operator.model.parsing import parse_pod


def refusing(status: int = 403) -> ApiModel:
    """A server without room."""
    return ApiModel(POST=ApiFailure(status, "exceeded quota: gpus"))


def executor(server: ApiModel) -> Executor:
    return Executor(server, Config(), OwnedObjects(server))


async def test_a_large_job_does_not_ask_for_every_pod_once_one_was_refused() -> None:
    server = refusing()
    actions = [
        *(CreatePod(worker, 0, ()) for worker in range(500)),
        DeletePod("old", "u", force=False, why="pod old: it is lost"),
    ]
    failures = await executor(server).run(World().observe().job, actions, None)
    assert len(server.names("POST")) < 50
    assert {action.worker for action, _ in failures if isinstance(action, CreatePod)} == {*range(500)}
    assert {str(error) for _, error in failures} == {"403: exceeded quota: gpus"}
    assert server.names("DELETE") == ["old"]


async def test_a_moment_of_trouble_does_not_keep_other_pods_from_being_tried() -> None:
    server = refusing(503)
    await executor(server).run(
        World().observe().job, [CreatePod(worker, 0, ()) for worker in range(50)], None
    )
    assert len(server.names("POST")) == 50


ODD_FIELDS: tuple[Mapping[str, Any], ...] = (
    {"securityContext": "x"}, {"affinity": []}, {"affinity": {"nodeAffinity": "x"}}, {"volumes": 5},
    {"initContainers": "x"}, {"terminationGracePeriodSeconds": {}, "securityContext": 5},
    {"containers": [{**TEMPLATE["spec"]["containers"][0], "volumeMounts": 5}]},
    {"containers": [{**TEMPLATE["spec"]["containers"][0], "resources": "x"}]},
)  # fmt: skip


@pytest.mark.parametrize("odd", ODD_FIELDS, ids=str)
def test_a_template_that_is_no_pod_is_refused_with_a_sentence(odd: Mapping[str, Any]) -> None:
    world = World(make_spec(template={"spec": {**TEMPLATE["spec"], **odd}}))
    world.train(3)
    world.assert_told("Placed", (False, "InvalidTemplate"), "kubectl explain pod.spec")
    assert not world.created


async def test_of_a_job_that_trains_a_template_that_became_no_pod_is_told_as_a_refusal() -> None:
    world = trained(0)
    job = world.observe().job
    spoilt = replace(
        job, spec=replace(job.spec, template={"spec": {**TEMPLATE["spec"], "securityContext": "x"}})
    )
    server = refusing()
    ((_, error),) = await executor(server).run(
        spoilt, [CreatePod(0, 1, ()), DeletePod("old", "u", force=False, why="pod old: it is lost")], None
    )
    assert "cannot be made a pod" in str(error)
    assert (error.refused, server.names("POST"), server.names("DELETE")) == (True, [], ["old"])
    decision = decide(replace(world.observe(), job=spoilt))
    assert (decision.status or spoilt.status).phase == "Running", "its pods go on"


def test_refused_pods_are_said_in_the_status_and_in_an_event() -> None:
    obs = World().observe()
    answer = decision_after_refusal(obs, decide(obs), "403: exceeded quota: gpus")
    assert answer.status is not None
    placed = answer.status.condition("Placed")
    assert placed is not None
    assert (placed.status, placed.reason, placed.message) == (False, "Refused", "403: exceeded quota: gpus")
    assert answer.status.phase == "Pending"
    assert any("exceeded quota" in notice.message for notice in answer.notices)
    assert (answer.before, answer.after) == ((), ())


def test_attempt_whose_placement_was_refused_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    begun: list[tuple[Observation, Decision]] = []
    reconcile = world.reconcile

    def watched(killed_after: int | None = None) -> None:
        obs = world.observe()
        decision = decide(obs)
        if decision.status is not None and decision.status.attempt > obs.job.status.attempt:
            begun.append((obs, decision))
        reconcile(killed_after)

    monkeypatch.setattr(world, "reconcile", watched)
    world.until("Running")
    world.evict(world.member(1))
    world.until("Running", attempt=2)
    assert len(begun) == 2
    for obs, decision in begun:
        answer = decision_after_refusal(obs, decision, "403: exceeded quota: configmaps")
        assert answer.status is not None
        assert answer.status.attempt == obs.job.status.attempt
        assert answer.status.history == obs.job.status.history
        waits = {"Placed": False, "Running": False, **({"Restoring": True} if obs.job.status.attempt else {})}
        for kind, status in waits.items():
            said = answer.status.condition(kind)
            assert said is not None
            found = said.status, said.reason, said.message
            assert found == (status, "Refused", "403: exceeded quota: configmaps")


def pod_of(kind: str, name: str, uid: str) -> dict[str, Any]:
    owner = {"apiVersion": "apps/v1", "kind": kind, "name": name, "uid": uid, "controller": True}
    return {"metadata": {"name": "j-0-0", "uid": "p", "ownerReferences": [owner]}}


def having(pod: dict[str, Any]) -> ApiModel:
    """A server whose pods have the names of the first two workers'."""
    return ApiModel({f"/api/v1/namespaces/ns/pods/j-{worker}-0": pod for worker in (0, 1)})


async def test_pod_that_has_the_name_of_ours_is_named_with_its_owner_and_the_others_are_made() -> None:
    server = having(pod_of("StatefulSet", "j", "s"))
    failures = await executor(server).run(
        World().observe().job, [CreatePod(0, 0, ()), CreatePod(1, 0, ())], None
    )
    assert server.names("POST") == ["j-0-0", "j-1-0"]
    said = str(failures[0][1])
    assert "Pod j-0-0 belongs to StatefulSet j and is not one of this job's" in said
    memory = RefusalMemory()
    assert memory.note([action for action, _ in failures], failures, 0.0)
    assert (memory.names_taken, memory.seconds_to_next_try(0.0)) == ({"j-0-0", "j-1-0"}, 0.0)


async def test_pod_of_ours_that_no_watch_has_shown_yet_is_nothing_to_tell() -> None:
    world = World()
    pod = pod_of("TierCheckJob", "j", "job-uid")
    pod["metadata"]["ownerReferences"][0]["apiVersion"] = "tiercheck.io/v1alpha1"
    pod["metadata"]["labels"] = {"tiercheck.io/job-uid": "job-uid", "tiercheck.io/worker": "0"}
    assert await executor(having(pod)).run(world.observe().job, [CreatePod(0, 0, ())], None) == []
    ((_, error),) = await executor(ApiModel(POST=ApiFailure(409, "exists"))).run(
        world.observe().job, [CreatePod(0, 0, ())], None
    )
    assert error.conflict, "as where two pods are counted by one quota at once: asked again"


class Stripping(ApiModel):
    """A server whose admission takes something off every new pod's metadata, or changes it (`name=value`)."""

    def __init__(self, objects: Mapping[str, dict[str, Any]], *path: str) -> None:
        super().__init__(objects)
        self.path = path

    def put(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        made = copy.deepcopy(dict(body))
        *above, last = ("metadata", *self.path)
        name, changed, value = last.partition("=")
        values = reduce(dict.__getitem__, above, made)
        del values[name]
        values |= {name: value} if changed else {}
        return super().put(path, made)


@pytest.mark.parametrize("made_before", [False, True])
@pytest.mark.parametrize(
    "path",
    [
        ("labels", "tiercheck.io/job-uid"),
        ("labels", "tiercheck.io/worker"),
        ("labels", "tiercheck.io/worker=7"),
        ("labels", "tiercheck.io/spare=7"),
        ("ownerReferences",),
    ],
)
async def test_pod_that_admission_made_unrecognizable_is_deleted_and_told_as_a_refusal(
    made_before: bool, path: tuple[str, ...]
) -> None:
    """It would run unseen, and the job would make another one under the next name, dozens of times."""
    world, left = World(), dict[str, dict[str, Any]]()
    action = CreateSpare(0, ()) if "spare" in path[-1] else CreatePod(0, 0, ())
    name = "j-spare-0" if "spare" in path[-1] else "j-0-0"
    if made_before and path[0] == "labels":  # by an operator that died before it looked
        pod = pod_of("TierCheckJob", "j", world.job.uid)
        pod["metadata"]["name"] = name
        left = {f"/api/v1/namespaces/ns/pods/{name}": pod}
    server, memory = Stripping(left, *path), RefusalMemory()
    failures = await executor(server).run(world.observe().job, [action], None)
    memory.note([action], failures, 0.0)
    said = str(failures[0][1])
    assert f"Pod {name} was admitted with other labels" in said
    assert "admission webhook" in said
    assert server.names("DELETE") == [name]
    assert (memory.names_taken, [each.is_shown for each in memory.known.values()]) == (frozenset(), [True])


async def test_pod_that_somebody_deletes_at_once_is_made_with_pauses_and_told() -> None:
    server, memory, action = ApiModel(), RefusalMemory(), CreatePod(0, 0, ())
    work, told, said, now = executor(server), list[bool](), list[str](), 0.0
    while now < 60.0:
        memory.note([action], await work.run(World().observe().job, memory.due([action], now), None), now)
        server.objects.clear()
        told += [refusal.is_shown for refusal in memory.known.values()]
        said = [refusal.sentence for refusal in memory.known.values()] or said
        now += memory.seconds_to_next_try(now) or 0.02
    assert 8 <= len(server.names("POST")) <= 14, "and not three thousand"
    assert all(told)
    assert "Pod j-0-0 is made again and again" in said[0]
    assert "policy, controller or user" in said[0]
    assert await work.run(World().observe().job, [CreatePod(0, 1, ())], None) == []


def test_what_is_refused_is_asked_for_again_with_growing_pauses_and_forgotten_when_nobody_wants_it() -> None:
    memory, now, tried = RefusalMemory(), 0.0, list[float]()
    wanted = [CreatePod(0, 0, ()), CreateSpare(0, ())]
    while now < 60.0:
        due = memory.due(wanted, now)
        if due:
            tried.append(now)
        memory.note(wanted, [(action, ApiFailure(403, "no room")) for action in due], now)
        now += memory.seconds_to_next_try(now) or 1.0
    assert 8 <= len(tried) <= 12
    memory.note(wanted[:1], [], tried[-1] + 1.0)
    assert [*memory.known] == [0]


async def test_no_pod_is_made_before_the_service_that_is_refused_and_both_are_asked_for_again() -> None:
    server, memory = refusing(), RefusalMemory()
    wanted = [CreatePod(0, 0, ()), EnsureService()]
    job = World().observe().job
    for now in (0.0, 0.1, 1.0):
        due = memory.due(wanted, now)
        memory.note(wanted, await executor(server).run(job, due, None), now)
    assert server.names("POST") == ["j", "j"]
    assert {refusal.sentence for refusal in memory.known.values()} == {"403: exceeded quota: gpus"}


# Pods are removed with a reason that people read.


JOB = World().job
SILENT = DeletePod(
    "j-3-1",
    "uid-3",
    force=False,
    why="pod j-3-1 of worker 3 on node n: its sidecar has not answered for 11 s",
    given_up="SidecarSilent: its sidecar has not answered for 11 s",
)


POD = {"/api/v1/namespaces/ns/pods/j-3-1": {"metadata": {"name": "j-3-1", "uid": "uid-3"}}}


async def test_why_a_pod_was_given_up_is_noted_on_it_before_it_is_deleted() -> None:
    """However its containers end then: whoever looks later, another operator too, reads it there."""
    server = ApiModel(POD)
    await executor(server).run(JOB, [SILENT], None)
    assert server.asked == [("PATCH", "j-3-1"), ("DELETE", "j-3-1")]
    raw = {
        "metadata": {
            "name": "j-3-1",
            "labels": {"tiercheck.io/worker": "3", "tiercheck.io/job-uid": "u"},
            "annotations": server.calls[0].body["metadata"]["annotations"],
            "ownerReferences": made_by("u"),
        }
    }
    pod = parse_pod(raw)
    assert pod is not None
    assert pod.given_up == SILENT.given_up


async def test_pod_is_deleted_although_nothing_can_be_noted_on_it() -> None:
    server = ApiModel(POD, PATCH=ApiFailure(403, "pods may not be patched"))
    work = executor(server)
    await work.run(JOB, [SILENT], None)
    assert work.take_deleted_pods() == [SILENT]


@pytest.mark.parametrize("there", [True, False])
async def test_what_was_asked_for_twice_is_told_once_and_what_was_gone_already_not_at_all(
    there: bool,
) -> None:
    server = ApiModel(POD if there else {})
    work = executor(server)
    for _ in range(2):
        await work.run(JOB, [SILENT], None)
    assert work.take_deleted_pods() == ([SILENT] if there else [])
    assert work.take_deleted_pods() == []


@pytest.mark.parametrize("status", [403, 409, 500])
async def test_deletion_that_failed_is_not_told(status: int) -> None:
    failure = ApiFailure(status, "no")
    server = ApiModel(POD, PATCH=failure, DELETE=failure)
    work = executor(server)
    with contextlib.suppress(ApiFailure):
        await work.run(JOB, [SILENT], None)
    assert server.names("DELETE") == ["j-3-1"]
    assert work.take_deleted_pods() == []


@pytest.mark.parametrize(
    ("uid", "owner", "deleted"),
    [("uid-3", JOB.uid, True), ("uid-3", "another", False), ("uid-9", JOB.uid, False), ("", "", False)],
)
async def test_pod_that_no_watch_shows_is_deleted_if_it_is_there_and_the_jobs(
    uid: str, owner: str, deleted: bool
) -> None:
    """A user who may write the placement, but may not delete pods, could name any there."""
    pod = {"metadata": {"name": "j-3-1", "uid": uid, "ownerReferences": [{"uid": owner}]}}
    server = ApiModel({path: pod for path in POD if uid})
    work = executor(server)
    for _ in range(3):
        await work.run(JOB, [replace(SILENT, given_up="", unseen=True)], None)
    assert server.names("DELETE") == (["j-3-1"] if deleted else [])
    assert len(server.names("GET")) == (2 if deleted else 1), "asked until it is gone"


def test_worker_whose_pod_lost_its_labels_gets_another_and_the_old_one_goes() -> None:
    world = trained(6)
    old = world.pods[world.member(1)]
    world._gone(old.uid)
    world.until("Running", attempt=2)
    (action,) = {each for each in world.deleted if each.uid == old.uid}
    assert (action.name, action.unseen, action.force) == (old.name, True, False)
    world.train(5)
    deleted = len(world.deleted)
    world.train(20)
    assert len(world.deleted) == deleted


async def test_job_and_pod_both_say_why() -> None:
    server = ApiModel()
    await EventPoster(server).post_removed(JOB, [SILENT], START)
    sentence = "deleted pod j-3-1 of worker 3 on node n: its sidecar has not answered for 11 s"
    told = [(e["involvedObject"]["kind"], e["involvedObject"]["name"], e["message"]) for e in server.events]
    assert told == [("TierCheckJob", "j", sentence), ("Pod", "j-3-1", sentence)]
    assert {(event["type"], event["reason"]) for event in server.events} == {("Normal", "PodRemoved")}


async def test_thousand_pods_do_not_make_thousands_of_events() -> None:
    server = ApiModel()
    many = [DeletePod(f"j-{n}-0", f"u{n}", True, f"pod j-{n}-0: the node is gone") for n in range(1000)]
    await EventPoster(server).post_removed(JOB, many, START)
    assert len([event for event in server.events if event["involvedObject"]["kind"] == "TierCheckJob"]) <= 11
    assert len(server.events) <= 80
    assert "combined" in next(e["message"] for e in reversed(server.events) if e["count"] > 1)


async def test_loop_tells_of_what_it_has_deleted_even_if_the_reconcile_fails_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = new_job()
    job["spec"]["suspend"] = True
    kube = StandIn(job)
    kube.objects["/api/v1/namespaces/default/pods/j-0-0"] = {"metadata": {"name": "j-0-0"}}
    pod = PodView("j-0-0", "p", "u", 0, 0, None, None, "Pending", START)
    loop = JobLoop(job, surroundings(kube, [pod]))

    async def refuse(*_: object, **__: object) -> dict[str, Any]:
        raise ApiFailure(500, "the status cannot be written")

    monkeypatch.setattr(kube, "patch", refuse)
    with pytest.raises(ApiFailure):
        await loop._reconcile()
    await loop._report_deletions()
    told = [(event["involvedObject"]["kind"], event["message"]) for event in kube.events]
    assert told == [
        ("TierCheckJob", "deleted pod j-0-0: the job is suspended"),
        ("Pod", "deleted pod j-0-0: the job is suspended"),
    ]
    assert Silent.reports == {}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("refusal", [None, ApiFailure(429, "disruption budget"), ApiFailure(403, "no right")])
async def test_pod_of_another_controller_is_evicted_and_deleted_only_where_that_is_refused(
    refusal: ApiFailure | None, force: bool
) -> None:
    server, action = ApiModel(POD), replace(SILENT, evict=True, force=force)
    if refusal is not None:
        server.refused["EVICT"] = refusal
    work = executor(server)
    await work.run(JOB, [action], None)
    assert server.asked == [
        (method, "j-3-1") for method in ("PATCH", "EVICT", "DELETE")[: 2 if refusal is None else 3]
    ]
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
    options |= {"preconditions": {"uid": "uid-3"}, **({"gracePeriodSeconds": 0} if force else {})}
    assert server.calls[1].body["deleteOptions"] == options
    assert work.take_deleted_pods() == [action]
