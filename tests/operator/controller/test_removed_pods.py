"""Whatever pod we delete is told, at the job and at the pod, with the cause."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from tests.operator.controller.test_job_loop import Silent, StandIn, new_job, surroundings
from tests.operator.kubelet_words import made_by
from tests.operator.world_in_memory import START, World
from tiercheck_operator.config import Config
from tiercheck_operator.controller.execute import Executor
from tiercheck_operator.controller.reconciler import JobLoop
from tiercheck_operator.kubernetes.client import ApiFailure, Kube
from tiercheck_operator.kubernetes.events import EventPoster
from tiercheck_operator.kubernetes.owned_objects import Belongings
from tiercheck_operator.model.actions import DeletePod
from tiercheck_operator.model.observed import PodView
from tiercheck_operator.model.parsing import parse_pod

JOB = World().job
SILENT = DeletePod(
    "j-3-1",
    "uid-3",
    force=False,
    why="pod j-3-1 of worker 3 on node n: its sidecar has not answered for 11 s",
    given_up="SidecarSilent: its sidecar has not answered for 11 s",
)


@dataclass
class Server:
    """Has some pods, takes Events, and writes down what it was asked in its order."""

    pods: set[str] = field(default_factory=set)
    calls: list[tuple[str, str]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    failure: ApiFailure | None = None

    async def merge(self, path: str, body: Mapping[str, Any], **names: str) -> dict[str, Any]:
        self.calls.append(("merge", names["name"]))
        if self.failure is not None:
            raise self.failure
        self.notes |= body["metadata"]["annotations"]
        return dict(body)

    async def delete(self, path: str, options: Mapping[str, Any], **names: str) -> bool:
        self.calls.append(("delete", names["name"]))
        if self.failure is not None:
            raise self.failure
        return names["name"] in self.pods

    async def create(self, path: str, body: Mapping[str, Any], **names: str) -> dict[str, Any]:
        assert path.endswith("/events")
        self.events.append(dict(body))
        return dict(body)

    def told(self) -> list[tuple[str, str, str]]:
        return [(e["involvedObject"]["kind"], e["involvedObject"]["name"], e["message"]) for e in self.events]


def executor(server: Server) -> Executor:
    kube = cast(Kube, server)
    return Executor(kube, Config(), Belongings(kube))


async def test_why_a_pod_was_given_up_is_noted_on_it_before_it_is_deleted() -> None:
    """However its containers end then: whoever looks later, another operator too, reads it there."""
    server = Server({"j-3-1"})
    await executor(server).run(JOB, [SILENT], None)
    assert server.calls == [("merge", "j-3-1"), ("delete", "j-3-1")]
    raw = {
        "metadata": {
            "name": "j-3-1",
            "labels": {"tiercheck.io/worker": "3", "tiercheck.io/job-uid": "u"},
            "annotations": server.notes,
            "ownerReferences": made_by("u"),
        }
    }
    pod = parse_pod(raw)
    assert pod is not None
    assert pod.given_up == SILENT.given_up


async def test_pod_is_deleted_although_nothing_can_be_noted_on_it() -> None:
    class Reluctant(Server):
        async def merge(self, path: str, body: Mapping[str, Any], **names: str) -> dict[str, Any]:
            raise ApiFailure(403, "pods may not be patched")

    server = Reluctant({"j-3-1"})
    work = executor(server)
    await work.run(JOB, [SILENT], None)
    assert work.take_deleted_pods() == [SILENT]


@pytest.mark.parametrize("there", [True, False])
async def test_what_was_asked_for_twice_is_told_once_and_what_was_gone_already_not_at_all(
    there: bool,
) -> None:
    server = Server({"j-3-1"} if there else set())
    work = executor(server)
    for _ in range(2):
        await work.run(JOB, [SILENT], None)
    assert work.take_deleted_pods() == ([SILENT] if there else [])
    assert work.take_deleted_pods() == []


@pytest.mark.parametrize("status", [403, 409, 500])
async def test_deletion_that_failed_is_not_told(status: int) -> None:
    server = Server({"j-3-1"}, failure=ApiFailure(status, "no"))
    work = executor(server)
    with contextlib.suppress(ApiFailure):
        await work.run(JOB, [SILENT], None)
    assert ("delete", "j-3-1") in server.calls
    assert work.take_deleted_pods() == []


async def test_job_and_pod_both_say_why() -> None:
    server = Server()
    await EventPoster(cast(Kube, server)).post_removed(JOB, [SILENT], START)
    sentence = "deleted pod j-3-1 of worker 3 on node n: its sidecar has not answered for 11 s"
    assert server.told() == [("TierCheckJob", "j", sentence), ("Pod", "j-3-1", sentence)]
    assert {(event["type"], event["reason"]) for event in server.events} == {("Normal", "PodRemoved")}


async def test_thousand_pods_do_not_make_thousands_of_events() -> None:
    server = Server()
    many = [DeletePod(f"j-{n}-0", f"u{n}", True, f"pod j-{n}-0: the node is gone") for n in range(1000)]
    await EventPoster(cast(Kube, server)).post_removed(JOB, many, START)
    assert len([event for event in server.events if event["involvedObject"]["kind"] == "TierCheckJob"]) <= 11
    assert len(server.events) <= 80
    assert "combined" in next(e["message"] for e in reversed(server.events) if e["count"] > 1)


class WithPods(StandIn):
    """That can delete pods, and keeps the Events."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        self.events: list[dict[str, Any]] = []

    async def create(self, path: str, body: Mapping[str, Any], **names: str) -> dict[str, Any]:
        if path.endswith("/events"):
            self.events.append(dict(body))
        return await super().create(path, body, **names)

    async def delete(self, path: str, options: Mapping[str, Any], **names: str) -> bool:
        return True


async def test_loop_tells_of_what_it_has_deleted_even_if_the_reconcile_fails_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = new_job()
    job["spec"]["suspend"] = True
    kube = WithPods(job)
    pod = PodView("j-0-0", "p", "u", 0, 0, None, None, "Pending", START)
    loop = JobLoop(job, surroundings(kube, [pod]))

    async def refuse(*_: object, **__: object) -> dict[str, Any]:
        raise ApiFailure(500, "the status cannot be written")

    monkeypatch.setattr(kube, "merge", refuse)
    with pytest.raises(ApiFailure):
        await loop._reconcile()
    await loop._tell_removed()
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
    class Evicting(Server):
        async def create(self, path: str, body: Mapping[str, Any], **names: str) -> dict[str, Any]:
            assert path.endswith("/pods/{name}/eviction")
            self.calls.append(("evict", names["name"]))
            grace = {"gracePeriodSeconds": 0} if force else {}
            assert body["deleteOptions"] == {"preconditions": {"uid": "uid-3"}, **grace}
            if refusal is not None:
                raise refusal
            return {}

    server, action = Evicting({"j-3-1"}), replace(SILENT, evict=True, force=force)
    work = executor(server)
    await work.run(JOB, [action], None)
    tried = [("merge", "j-3-1"), ("evict", "j-3-1"), ("delete", "j-3-1")]
    assert server.calls == (tried[:2] if refusal is None else tried)
    assert work.take_deleted_pods() == [action]
