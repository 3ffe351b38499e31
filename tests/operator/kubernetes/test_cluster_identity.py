"""Pods are told which cluster they are in, and never a wrong one.

A store that two clusters share knows them apart by that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.operator.world_in_memory import REMOTE, World
from tiercheck.protocol import names
from tiercheck_operator.config import Config
from tiercheck_operator.controller.execute import Executor
from tiercheck_operator.kubernetes.client import ApiFailure, Kube
from tiercheck_operator.kubernetes.cluster_facts import ClusterIdentity
from tiercheck_operator.kubernetes.owned_objects import Belongings
from tiercheck_operator.model.actions import CreatePod, CreateSpare


class Server:
    """Knows the namespace kube-system, unless it fails."""

    def __init__(self) -> None:
        self.failure: ApiFailure | None = None
        self.asked = 0
        self.created: list[Mapping[str, Any]] = []

    async def get(self, path: str) -> dict[str, Any] | None:
        assert path == "/api/v1/namespaces/kube-system"
        self.asked += 1
        if self.failure is not None:
            raise self.failure
        return {"metadata": {"uid": "uid-of-the-cluster"}}

    async def create(self, path: str, body: Mapping[str, Any], **parts: str) -> dict[str, Any]:
        self.created.append(body)
        return dict(body)

    def clusters(self) -> list[str | None]:
        found = []
        for pod in self.created:
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
    kube = cast(Kube, server)
    job = replace(job, spec=replace(job.spec, remote=remote))
    executor = Executor(kube, Config(), Belongings(kube), identity)
    await executor.run(job, [CreatePod(0, 0, ()), CreateSpare(0, ())], None)


async def test_every_pod_knows_its_cluster_which_is_asked_for_once() -> None:
    server = Server()
    identity = ClusterIdentity(cast(Kube, server))
    await identity.uid()
    await make(server, identity)
    assert server.clusters() == ["uid-of-the-cluster"] * 2
    assert server.asked == 1


async def test_no_pod_is_made_while_the_server_does_not_answer() -> None:
    server = Server()
    server.failure = ApiFailure(0, "the API server does not answer")
    await make(server, ClusterIdentity(cast(Kube, server)))
    assert server.created == [], "made without it, a job could not go on from what its namesake left"


async def test_operator_without_the_right_makes_pods_that_do_not_know_until_it_has_it() -> None:
    server = Server()
    identity = ClusterIdentity(cast(Kube, server))
    server.failure = ApiFailure(403, "forbidden")
    await make(server, identity)
    assert server.clusters() == [None, None]
    server.failure = None
    await make(server, identity)
    assert server.clusters()[2:] == ["uid-of-the-cluster"] * 2


async def test_job_without_a_store_depends_on_no_cluster_and_nobody_is_warned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server()
    server.failure = ApiFailure(0, "the API server does not answer")
    await make(server, ClusterIdentity(cast(Kube, server)), remote=None)
    assert (len(server.created), server.asked, caplog.text) == (2, 0, "")
