"""Topology levels, kubelets that live and the cluster's own name reach decisions as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.operator.world_in_memory import REMOTE, World, make_spec, trained
from tiercheck.protocol import names
from tiercheck_operator.config import Config
from tiercheck_operator.controller.execute import Executor
from tiercheck_operator.kubernetes.client import ApiFailure, Kube
from tiercheck_operator.kubernetes.owned_objects import (
    Belongings,
    ClusterIdentity,
    NodeLeases,
    TopologySource,
)
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import CreatePod, CreateSpare
from tiercheck_operator.model.observed import JobView

TOPOLOGY = {"spec": {"levels": [{"nodeLabel": "example.com/rack"}, {"nodeLabel": "kubernetes.io/hostname"}]}}


class Server(Kube):
    """Answers with what it has, or fails, and keeps what is created."""

    def __init__(self, found: Mapping[str, Any] | None = None, failure: ApiFailure | None = None) -> None:
        self.found, self.failure = dict(found or {}), failure
        self.asked: list[str] = []
        self.created: list[Mapping[str, Any]] = []

    async def get(self, path: str, **names: str) -> dict[str, Any] | None:
        self.asked.append(path.format(**names))
        if self.failure is not None:
            raise self.failure
        return self.found.get(path.format(**names))

    async def create(self, path: str, body: Mapping[str, Any], **names: str) -> dict[str, Any]:
        self.created.append(body)
        return dict(body)


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
    world.assert_told(conditions.PLACED, (False, conditions.TOPOLOGY_NOT_FOUND))
    assert not world.pods
    assert world.last.wake_after == 10.0
    world.job = replace(world.job, spec=make_spec())
    world.until("Running")


def test_a_job_that_runs_keeps_its_copies_where_they_are_and_comes_back_without_it() -> None:
    world = trained(steps=8)
    before = world.saved.holders()
    world.job = replace(world.job, spec=resolved(TopologySource(Server()), job()).spec)
    world.train(20)
    assert world.saved.holders() == before
    world.assert_told(conditions.PLACED, conditions.TOPOLOGY_NOT_FOUND)
    world.crash(1)
    world.until("Running", attempt=2)


# A kubelet is heard of when its lease changes, whatever the node's clock says.


NOW = 1_800_000_000.0
RIGHT, BEHIND, AHEAD = "2027-01-15T07:59:55.000000Z", "2027-01-15T07:00:00Z", "2027-01-15T09:00:00Z"
"""By the node's clock, where it is 2027-01-15T08:00:00Z."""


class Leases:
    def __init__(self, **renewed: str) -> None:
        self.renewed = renewed

    async def get(self, path: str, *, name: str) -> dict[str, Any] | None:
        if name == "forbidden":
            raise ApiFailure(403, "forbidden")
        return {"spec": {"renewTime": self.renewed[name]}} if name in self.renewed else None


async def test_lease_counts_by_its_own_time_first_and_then_by_when_it_was_seen_to_change() -> None:
    server = Leases(right=RIGHT, behind=BEHIND, ahead=AHEAD)
    leases, nodes = NodeLeases(cast(Kube, server)), ("right", "behind", "ahead", "gone", "forbidden")
    first = await leases.heard(nodes, NOW)
    assert first == {"right": NOW - 5, "behind": NOW - 3600, "ahead": NOW}
    assert await leases.heard(nodes, NOW + 20) == first, "nothing was renewed"
    server.renewed["behind"] = "2027-01-15T07:00:10Z"
    assert (await leases.heard(nodes, NOW + 30))["behind"] == NOW + 30


# Pods are told which cluster they are in, and never a wrong one: a store that two share knows them by that.


KUBE_SYSTEM = "/api/v1/namespaces/kube-system"


def known() -> Server:
    """A server that has the namespace kube-system."""
    return Server({KUBE_SYSTEM: {"metadata": {"uid": "uid-of-the-cluster"}}})


def clusters(server: Server) -> list[str | None]:
    found = []
    for pod in server.created:
        (sidecar,) = [
            each for each in pod["spec"]["initContainers"] if each["name"] == names.SIDECAR_CONTAINER
        ]
        found.append(
            next((each["value"] for each in sidecar["env"] if each["name"] == names.ENV_CLUSTER), None)
        )
    return found


async def make(server: Server, identity: ClusterIdentity, remote: Mapping[str, Any] | None = REMOTE) -> None:
    world = World()
    job = world.observe().job
    job = replace(job, spec=replace(job.spec, remote=remote))
    executor = Executor(server, Config(), Belongings(server), identity)
    await executor.run(job, [CreatePod(0, 0, ()), CreateSpare(0, ())], None)


async def test_every_pod_knows_its_cluster_which_is_asked_for_once() -> None:
    server = known()
    identity = ClusterIdentity(server)
    await identity.uid()
    await make(server, identity)
    assert clusters(server) == ["uid-of-the-cluster"] * 2
    assert server.asked == [KUBE_SYSTEM]


async def test_no_pod_is_made_while_the_server_does_not_answer() -> None:
    server = known()
    server.failure = ApiFailure(0, "the API server does not answer")
    await make(server, ClusterIdentity(server))
    assert server.created == [], "made without it, a job could not go on from what its namesake left"


async def test_operator_without_the_right_makes_pods_that_do_not_know_until_it_has_it() -> None:
    server = known()
    identity = ClusterIdentity(server)
    server.failure = ApiFailure(403, "forbidden")
    await make(server, identity)
    assert clusters(server) == [None, None]
    server.failure = None
    await make(server, identity)
    assert clusters(server)[2:] == ["uid-of-the-cluster"] * 2


async def test_job_without_a_store_depends_on_no_cluster_and_nobody_is_warned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = known()
    server.failure = ApiFailure(0, "the API server does not answer")
    await make(server, ClusterIdentity(server), remote=None)
    assert (len(server.created), server.asked, caplog.text) == (2, [], "")
