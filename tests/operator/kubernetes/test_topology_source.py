"""The levels of a Kueue Topology reach the decisions; without one, a job says so and waits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.operator.world_in_memory import World, make_spec
from tiercheck_operator.kubernetes.client import ApiFailure, Kube
from tiercheck_operator.kubernetes.cluster_facts import TopologySource
from tiercheck_operator.model import conditions
from tiercheck_operator.model.observed import JobView

TOPOLOGY = {"spec": {"levels": [{"nodeLabel": "example.com/rack"}, {"nodeLabel": "kubernetes.io/hostname"}]}}


class Server(Kube):
    """Answers with what it has, or fails."""

    def __init__(self, found: Mapping[str, Any] | None = None, failure: ApiFailure | None = None) -> None:
        self.found, self.failure = dict(found or {}), failure
        self.asked: list[str] = []

    async def get(self, path: str, **names: str) -> dict[str, Any] | None:
        self.asked.append(path.format(**names))
        if self.failure is not None:
            raise self.failure
        return self.found.get(path.format(**names))


def job(name: str | None = "fabric") -> JobView:
    spec = make_spec(topology_preset=None, kueue_topology=name)
    return replace(World(spec).job)


def resolved(source: TopologySource, view: JobView) -> JobView:
    return asyncio.run(source.resolve(view))


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
def test_levels_are_read_from_whichever_version_is_served_and_only_once(version: str) -> None:
    server = Server({f"/apis/kueue.x-k8s.io/{version}/topologies/fabric": TOPOLOGY})
    source = TopologySource(server)
    for _ in range(3):
        levels = resolved(source, job()).spec.topology_levels
        assert levels is not None
        assert [level["name"] for level in levels] == ["rack", "host"]
    assert len(server.asked) <= 2


def test_a_job_without_one_asks_nothing() -> None:
    server = Server()
    assert resolved(TopologySource(server), job(None)) == job(None)
    assert server.asked == []


@pytest.mark.parametrize(
    ("server", "sentence"),
    [
        (Server(), "there is no Kueue Topology fabric"),
        (Server(failure=ApiFailure(403, "forbidden")), "rbac.kueueTopologies=true"),
        (Server({"/apis/kueue.x-k8s.io/v1beta2/topologies/fabric": {}}), "cannot be used: it has no levels"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(server: Server, sentence: str) -> None:
    assert sentence in resolved(TopologySource(server), job()).spec.topology_problem


def test_a_server_that_does_not_answer_is_asked_again() -> None:
    source = TopologySource(Server(failure=ApiFailure(0, "no answer")))
    with pytest.raises(ApiFailure):
        resolved(source, job())


def test_a_job_does_not_start_without_its_topology_and_starts_when_it_is_there() -> None:
    problem = resolved(TopologySource(Server()), job()).spec
    world = World(problem)
    world.tick()
    condition = world.status.condition(conditions.PLACED)
    assert condition is not None
    assert (condition.status, condition.reason) == (False, conditions.TOPOLOGY_NOT_FOUND)
    assert not world.pods
    assert world.last.wake_after == 10.0
    world.job = replace(world.job, spec=make_spec())
    world.until("Running")


def test_a_job_that_runs_keeps_its_copies_where_they_are_and_comes_back_without_it() -> None:
    world = World()
    world.until("Running")
    world.train(8)
    assert world.placement is not None
    before = world.placement.holders()
    world.job = replace(world.job, spec=resolved(TopologySource(Server()), job()).spec)
    world.train(20)
    assert world.placement.holders() == before
    condition = world.status.condition(conditions.PLACED)
    assert condition is not None
    assert condition.reason == conditions.TOPOLOGY_NOT_FOUND
    world.crash(1)
    world.until("Running", attempt=2)
