"""A new operator takes over running jobs, and nothing about them changes.

A replacement speaks the language of its neighbours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.operator.world_in_memory import World, make_spec
from tiercheck_operator.config import Config
from tiercheck_operator.controller.members.replacing import choose_sidecar_image
from tiercheck_operator.manifests.pod_settings import with_pull_settings
from tiercheck_operator.model.status import parse_record, render_record


def images(world: World) -> set[str]:
    return {pod.sidecar_image for pod in world.pods.values()}


def upgraded(world: World) -> None:
    world.image = "sidecar:2"
    world.forget()


def test_new_operator_spends_no_attempt_and_touches_no_pod() -> None:
    world = World(make_spec(workers=4))
    world.until("Running")
    attempt, pods, created = world.status.attempt, set(world.pods), len(world.created)
    upgraded(world)
    world.train(20)
    assert world.status.attempt == attempt
    assert (set(world.pods), len(world.created)) == (pods, created)


def test_replacement_after_an_upgrade_has_the_sidecar_that_the_job_began_with() -> None:
    world = World(make_spec(workers=4))
    world.until("Running")
    upgraded(world)
    attempt = world.status.attempt
    world.evict(world.member(2))
    world.until("Running", attempt=attempt + 1)
    assert world.status.attempt == attempt + 1
    assert images(world) == {"sidecar:1"}
    assert world.status.sidecar_image == "sidecar:1"


def test_suspended_and_resumed_job_gets_the_new_sidecar() -> None:
    world = World(make_spec(workers=2))
    world.until("Running")
    upgraded(world)
    world.suspended()
    assert world.status.sidecar_image == ""
    world.change(suspend=False)
    world.until("Running")
    assert images(world) == {"sidecar:2"}


def test_job_of_an_operator_that_wrote_no_image_down_keeps_that_of_its_pods() -> None:
    world = World(make_spec(workers=2))
    world.until("Running")
    world.job = replace(world.job, status=replace(world.status, sidecar_image=""))
    upgraded(world)
    world.tick()
    assert world.status.sidecar_image == "sidecar:1"


def test_image_is_remembered_in_the_status_and_an_operator_of_no_pods_uses_its_own() -> None:
    world = World()
    record = replace(world.status, sidecar_image="a:1")
    assert parse_record(render_record(record)).sidecar_image == "a:1"
    assert choose_sidecar_image(record, [], "b:2") == "a:1"
    assert choose_sidecar_image(world.status, [], "b:2") == "b:2"


POD: dict[str, Any] = {
    "metadata": {"name": "p"},
    "spec": {
        "initContainers": [{"name": "tiercheck-library"}, {"name": "tiercheck-sidecar"}, {"name": "theirs"}],
        "containers": [{"name": "trainer", "imagePullPolicy": "Never"}],
        "imagePullSecrets": [{"name": "theirs"}],
    },
}


def test_pull_settings_are_for_our_containers_and_their_secrets_stay() -> None:
    spec = with_pull_settings(POD, "Always", ("ours", "theirs", "ours"))["spec"]
    policies = {
        entry["name"]: entry.get("imagePullPolicy") for entry in spec["initContainers"] + spec["containers"]
    }
    assert policies == {
        "tiercheck-library": "Always", "tiercheck-sidecar": "Always", "theirs": None, "trainer": "Never",
    }  # fmt: skip
    assert spec["imagePullSecrets"] == [{"name": "theirs"}, {"name": "ours"}]
    assert with_pull_settings(POD, "", ()) == POD


def test_pull_policy_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="TIERCHECK_SIDECAR_PULL_POLICY='Sometimes': expected one of Always"):
        Config.from_env({"TIERCHECK_SIDECAR_PULL_POLICY": "Sometimes"})
