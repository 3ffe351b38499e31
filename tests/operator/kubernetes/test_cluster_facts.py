"""Topology levels, kubelets that live and the cluster's own name reach decisions as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.operator.api_model import ApiModel
from tests.operator.world_in_memory import REMOTE, World, make_spec, trained
from tiercheck.protocol import names
from tiercheck_operator.config import Config
from tiercheck_operator.controller.execute import Executor
from tiercheck_operator.kubernetes.api_server import ApiFailure
from tiercheck_operator.kubernetes.client import Kube
from tiercheck_operator.kubernetes.owned_objects import (
    ClusterIdentity,
    NodeLeases,
    OwnedObjects,
    TopologySource,
)
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import CreatePod, CreateSpare
from tiercheck_operator.model.observed import JobView

TOPOLOGY = {"spec": {"levels": [{"nodeLabel": "example.com/rack"}, {"nodeLabel": "kubernetes.io/hostname"}]}}


def job(name: str | None = "fabric") -> JobView:
    spec = make_spec(topology_preset=None, kueue_topology=name)
    return replace(World(spec).job)


def resolved(source: TopologySource, view: JobView) -> JobView:
    return asyncio.run(source.resolve(view))


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
def test_levels_are_read_from_whichever_version_is_served_and_only_once(version: str) -> None:
    server = ApiModel({f"/apis/kueue.x-k8s.io/{version}/topologies/fabric": TOPOLOGY})
    source = TopologySource(server)
    for _ in range(3):
        levels = resolved(source, job()).spec.topology_levels
        assert levels is not None
        assert [level["name"] for level in levels] == ["rack", "host"]
    assert len(server.calls) <= 2


def test_a_job_without_one_asks_nothing() -> None:
    server = ApiModel()
    assert resolved(TopologySource(server), job(None)) == job(None)
    assert server.calls == []


@pytest.mark.parametrize(
    ("server", "sentence"),
    [
        (ApiModel(), "there is no Kueue Topology fabric"),
        (ApiModel(GET=ApiFailure(403, "forbidden")), "rbac.kueueTopologies=true"),
        (
            ApiModel({"/apis/kueue.x-k8s.io/v1beta2/topologies/fabric": {}}),
            "cannot be used: it has no levels",
        ),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(server: ApiModel, sentence: str) -> None:
    assert sentence in resolved(TopologySource(server), job()).spec.topology_problem


BUDGETS = "/apis/policy/v1/namespaces/ns/poddisruptionbudgets"


@pytest.mark.parametrize(
    ("selector", "selects"),
    [
        (None, False),
        ({}, True),
        ({"matchLabels": {names.LABEL_JOB: "j"}}, True),
        ({"matchLabels": {names.LABEL_JOB: "j", "app": "web"}}, False),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["web"]}]}, True),
        ({"matchExpressions": [{"key": names.LABEL_JOB, "operator": "In", "values": ["j", "k"]}]}, True),
        ({"matchExpressions": [{"key": names.LABEL_JOB, "operator": "NotIn", "values": ["j"]}]}, False),
        ({"matchExpressions": [{"key": names.LABEL_WORKER, "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": names.LABEL_WORKER, "operator": "DoesNotExist"}]}, False),
    ],
)
def test_budget_of_others_is_a_rival_if_it_selects_the_jobs_pods(selector: Any, selects: bool) -> None:
    rival = {"metadata": {"name": "theirs"}, "spec": {"minAvailable": 1, "selector": selector}}
    server = ApiModel({BUDGETS: {"items": [rival]}})
    found = OwnedObjects(server)
    asyncio.run(found.refresh(job()))
    assert found.rival_budget.startswith("the PodDisruptionBudget theirs selects the job's pods") is selects
    assert found.budget_problem == "", "the job's own is written all the same"
    assert server.did("GET")[-1].query.endswith("labelSelector=%21tiercheck.io%2Fjob-uid"), "not our own"


def test_without_the_right_to_list_budgets_none_is_a_rival() -> None:
    found = OwnedObjects(ApiModel(GET=ApiFailure(403, "forbidden")))
    assert asyncio.run(found._find_rival(job())) == ""


def test_a_server_that_does_not_answer_is_asked_again() -> None:
    source = TopologySource(ApiModel(GET=ApiFailure(0, "no answer")))
    with pytest.raises(ApiFailure):
        resolved(source, job())


def test_a_job_does_not_start_without_its_topology_and_starts_when_it_is_there() -> None:
    problem = resolved(TopologySource(ApiModel()), job()).spec
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
    world.job = replace(world.job, spec=resolved(TopologySource(ApiModel()), job()).spec)
    world.train(20)
    assert world.saved.holders() == before
    world.assert_told(conditions.PLACED, conditions.TOPOLOGY_NOT_FOUND)
    world.recovered(crash=1)


# A kubelet is heard of when its lease changes, whatever the node's clock says.


NOW = 1_800_000_000.0
RIGHT, BEHIND, AHEAD = "2027-01-15T07:59:55.000000Z", "2027-01-15T07:00:00Z", "2027-01-15T09:00:00Z"
"""By the node's clock, where it is 2027-01-15T08:00:00Z."""


class Leases:
    def __init__(self, **renewed: str) -> None:
        self.renewed = renewed

    async def find(self, where: object, namespace: str, name: str) -> dict[str, Any] | None:
        if name == "forbidden":
            raise ApiFailure(403, "forbidden")
        return {"spec": {"renewTime": self.renewed[name]}} if name in self.renewed else None


async def test_lease_counts_by_its_own_time_first_and_then_by_when_it_was_seen_to_change() -> None:
    server = Leases(right=RIGHT, behind=BEHIND, ahead=AHEAD)
    leases, nodes = NodeLeases(cast(Kube, server)), ("right", "behind", "ahead", "gone", "forbidden")
    first = await leases.renewals(nodes, NOW)
    assert first == {"right": NOW - 5, "behind": NOW - 3600, "ahead": NOW}
    assert await leases.renewals(nodes, NOW + 20) == first, "nothing was renewed"
    server.renewed["behind"] = "2027-01-15T07:00:10Z"
    assert (await leases.renewals(nodes, NOW + 30))["behind"] == NOW + 30


# Pods are told which cluster they are in, and never a wrong one: a store that two share knows them by that.


KUBE_SYSTEM = "/api/v1/namespaces/kube-system"


def known() -> ApiModel:
    """A server that has the namespace kube-system."""
    return ApiModel({KUBE_SYSTEM: {"metadata": {"uid": "uid-of-the-cluster"}}})


def clusters(server: ApiModel) -> list[str | None]:
    found = []
    for pod in server.did("POST"):
        (sidecar,) = [
            each for each in pod.body["spec"]["initContainers"] if each["name"] == names.SIDECAR_CONTAINER
        ]
        found.append(
            next((each["value"] for each in sidecar["env"] if each["name"] == names.ENV_CLUSTER), None)
        )
    return found


async def make(
    server: ApiModel, identity: ClusterIdentity, remote: Mapping[str, Any] | None = REMOTE
) -> None:
    world = World()
    job = world.observe().job
    job = replace(job, spec=replace(job.spec, remote=remote))
    executor = Executor(server, Config(), OwnedObjects(server), identity)
    await executor.run(job, [CreatePod(0, 0, ()), CreateSpare(0, ())], None)


async def test_every_pod_knows_its_cluster_which_is_asked_for_once() -> None:
    server = known()
    identity = ClusterIdentity(server)
    await identity.uid()
    await make(server, identity)
    assert clusters(server) == ["uid-of-the-cluster"] * 2
    assert [call.path for call in server.did("GET")] == [KUBE_SYSTEM]


async def test_no_pod_is_made_while_the_server_does_not_answer() -> None:
    server = known()
    server.refused["GET"] = ApiFailure(0, "the API server does not answer")
    await make(server, ClusterIdentity(server))
    assert server.names("POST") == [], "made without it, a job could not go on from what its namesake left"


async def test_operator_without_the_right_makes_pods_that_do_not_know_until_it_has_it() -> None:
    server = known()
    identity = ClusterIdentity(server)
    server.refused["GET"] = ApiFailure(403, "forbidden")
    await make(server, identity)
    assert clusters(server) == [None, None]
    server.refused.clear()
    await make(server, identity)
    assert clusters(server)[2:] == ["uid-of-the-cluster"] * 2


async def test_job_without_a_store_depends_on_no_cluster_and_nobody_is_warned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = known()
    server.refused["GET"] = ApiFailure(0, "the API server does not answer")
    await make(server, ClusterIdentity(server), remote=None)
    assert (len(server.names("POST")), server.did("GET"), caplog.text) == (2, [], "")
