"""A job that gets no node, or no pod, waits, says why, loses nothing of what is left, and comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.operator.world_in_memory import REMOTE, START, World, make_spec, trained
from tiercheck_operator.config import Config
from tiercheck_operator.controller.members.replacing import choose_sidecar_image, possible_size
from tiercheck_operator.controller.observe.situation import Situation
from tiercheck_operator.manifests.pod_settings import with_pull_settings
from tiercheck_operator.model import conditions
from tiercheck_operator.model.actions import (
    Action,
    CreatePod,
    CreateSpare,
    DeletePod,
    EnsureCredentials,
    Promote,
)
from tiercheck_operator.model.status import parse_record, render_record, rfc3339


def crowded(**changes: object) -> World:
    """Training; then the node of worker 1 dies, and no other one takes pods."""
    world = trained(racks=2, nodes_per_rack=3, **changes)
    node = world.home(1)
    for name, view in world.nodes.items():
        world.nodes[name] = replace(view, schedulable=name == node)
    world.kill_node(node)
    return world


@pytest.mark.parametrize("timeout", [60, None])
def test_job_without_a_node_for_a_worker_says_so_at_once_and_calls_for_help_later(
    timeout: int | None,
) -> None:
    """After five minutes unless the job says something else."""
    world = crowded(capacity_timeout=timeout)
    world.train((timeout or 300) - 20)
    assert world.told("Placed")[:2] == (False, "Unschedulable")
    assert "NoCapacity" not in world.notices
    world.train(60)
    assert world.told("Placed")[:2] == (False, "NoCapacity")
    for part in ("1 of 4 pods have no node", "0 nodes fit", "uncordon", "what 3 workers hold in memory"):
        assert part in world.condition("Placed").message
    assert "minWorkers" not in world.condition("Placed").message
    assert world.notices.count("NoCapacity") == 1
    before = world.condition("Placed").message
    world.train(30)
    assert world.condition("Placed").message == before, "time alone writes no status"


def test_survivors_keep_their_pods_and_memory_and_the_job_goes_on_from_there() -> None:
    world = crowded(capacity_timeout=30.0)
    survivors = {world.member(worker) for worker in (0, 2, 3)}
    world.train(400)
    assert survivors <= set(world.pods)
    assert world.status.attempt == 1
    world.change_nodes("n12", schedulable=True)
    assert world.recovered()["tiers"] == {"local": 3, "peer": 1, "remote": 0}
    assert world.condition("Placed").status
    assert survivors <= set(world.pods)


def test_node_that_was_avoided_is_used_when_it_is_well_again_and_nothing_else_is_there() -> None:
    world = crowded(capacity_timeout=30.0)
    dead = next(iter(world.dead_nodes))
    world.train(50)
    assert world.condition("Placed").reason == "NoCapacity"
    world.revive_node(dead)
    world.until("Running", attempt=2)
    assert world.home(1) == dead


def test_size_to_which_a_job_could_shrink_counts_workers_with_nodes_only() -> None:
    world = crowded(min_workers=1)
    world.train(10)
    obs = world.observe()
    assert possible_size(Situation.of(obs)) == 3
    obs = replace(obs, job=replace(obs.job, spec=replace(obs.job.spec, min_workers=None)))
    assert possible_size(Situation.of(obs)) is None


def test_job_that_never_found_its_nodes_is_told_since_when_it_waits() -> None:
    world = World(make_spec(capacity_timeout=20.0), racks=1, nodes_per_rack=1)
    world.change_nodes(schedulable=False)
    world.train(40)
    world.assert_told("Placed", "NoCapacity", rfc3339(START + 1))
    assert "hold in memory" not in world.condition("Placed").message
    assert world.status.phase == "Pending"


@pytest.mark.parametrize(
    ("node_memory", "how", "sent_back"),
    [
        (True, World.evict, True),
        (True, World._gone, True),
        (True, World.kill_node, False),
        (False, World.evict, False),
    ],
    ids=["evicted", "vanished", "its node is lost", "pod memory"],
)
def test_pod_made_again_goes_to_where_its_workers_memory_is_if_that_node_is_well(
    node_memory: bool, how: Callable[[World, str], object], sent_back: bool
) -> None:
    world = trained(nodes_per_rack=3, node_memory=node_memory)
    node = world.home(1)
    world.created.clear()
    how(world, node if how is World.kill_node else world.member(1))
    world.train(12)
    assert [(action.worker, action.prefer) for action in world.created] == [(1, node if sent_back else "")]


@given(
    housed=st.lists(st.booleans(), min_size=1, max_size=8),
    least=st.one_of(st.none(), st.integers(1, 8)),
    parity=st.one_of(st.none(), st.tuples(st.integers(1, 4), st.integers(1, 2))),
    on_its_way=st.booleans(),
)
def test_size_is_that_of_the_workers_that_have_nodes_or_none(
    housed: list[bool], least: int | None, parity: tuple[int, int] | None, on_its_way: bool
) -> None:
    spec = make_spec(workers=len(housed), min_workers=least, parity=parity, copies=0)
    world = World(spec, racks=2, nodes_per_rack=4)
    world.tick()
    for pod in list(world.pods.values()):
        node = "n00" if housed[pod.worker] else None
        since = None if node or on_its_way else START
        world.pods[pod.uid] = replace(pod, node=node, unschedulable_since=since)
    obs = world.observe()
    size = possible_size(Situation.of(obs))
    count = sum(housed)
    allowed = least is not None and least <= count < len(housed) and (parity is None or sum(parity) <= count)
    assert size == (count if allowed and not on_its_way else None)


QUOTA = 'pods "j" is forbidden: exceeded quota: gpus, used: 4, limited: 4'


def refusing(*kinds: type[Action]) -> Callable[[Action], str]:
    return lambda action: QUOTA if isinstance(action, kinds) else ""


def test_job_whose_spare_is_refused_trains_and_comes_back_and_says_so_until_it_has_one() -> None:
    world = World(make_spec(spares=1), nodes_per_rack=3)
    world.refuses = refusing(CreateSpare)
    world.running(5)
    assert (world.condition("Placed").status, world.condition("SparesReady").reason) == (
        True,
        conditions.REFUSED,
    )
    assert QUOTA in world.condition("SparesReady").message
    world.recovered(crash=1)
    world.end_gracefully(world.member(2))
    world.recovered(3)
    world.refuses = refusing()
    world.train(15)
    assert world.condition("SparesReady").status


def test_worker_whose_move_is_refused_trains_on_and_others_are_restarted_in_place() -> None:
    world = World(nodes_per_rack=3).running(0)
    world.refuses = refusing(CreatePod)
    node = world.home(1)
    world.change_nodes(node, leaving="it is tainted karpenter.sh/disrupted")
    world.train(5)
    world.assert_told("Placed", (True, conditions.REFUSED), QUOTA)
    pods = set(world.pods)
    world.recovered(crash=2)
    assert set(world.pods) == pods
    world.change_nodes(node, leaving="")
    world.train(2)
    assert world.condition("Placed").reason != conditions.REFUSED


@pytest.mark.parametrize("kind", [DeletePod, Promote])
def test_lost_worker_comes_back_although_its_old_pod_or_its_spare_may_not_be_changed(
    kind: type[Action],
) -> None:
    world = trained(nodes_per_rack=3, spares=1)
    world.refuses = refusing(kind)
    world.kill_node(world.home(1))
    world.until("Running", attempt=2)
    if kind is DeletePod:
        assert world.told("Placed")[:2] == (True, conditions.REFUSED)


def test_worker_that_is_refused_is_missing_capacity_and_the_job_goes_on_smaller() -> None:
    world = trained(nodes_per_rack=3, min_workers=2, capacity_timeout=60.0)
    world.refuses = refusing(CreatePod, CreateSpare)
    world.end_gracefully(world.member(1))
    world.train(20)
    for kind in ("Placed", "Restoring", "Running", "FullSize"):
        assert (world.condition(kind).reason, QUOTA in world.condition(kind).message) == (
            conditions.REFUSED,
            True,
        ), kind
    assert "the job goes on with 3 workers at" in world.condition("Placed").message
    assert world.notices.count("Refused") == 1
    world.until("Running", attempt=2)
    assert (world.status.size is not None, world.condition("FullSize").status) == (True, False)
    world.train(2)
    assert QUOTA in world.condition("FullSize").message
    world.refuses = refusing()
    world.train(200)
    assert (world.status.size, world.condition("FullSize").status) == (None, True)


def test_job_that_may_not_shrink_waits_for_the_quota_and_says_that_and_nothing_else() -> None:
    world = World(make_spec(remote=REMOTE, capacity_timeout=30.0)).running(0)
    world.refuses = refusing(CreatePod)
    world.end_gracefully(world.member(1))
    world.train(60)
    running = world.condition("Running")
    assert (running.reason, QUOTA in running.message) == (conditions.REFUSED, True)
    before = world.status
    world.train(60)
    assert world.status == before, "time alone writes no status"
    world.refuses = refusing()
    world.until("Running", attempt=2)
    assert world.condition("Placed").reason != conditions.REFUSED


def test_name_that_is_anothers_is_told_and_the_next_one_is_taken() -> None:
    world = World(make_spec(spares=1), nodes_per_rack=3)
    world.strangers = {"j-0-0", "j-0-1"}
    world.until("Running")
    assert world.pods[world.member(0)].name == "j-0-2"
    assert "Refused" in world.notices


def test_what_is_awaited_does_not_change_from_look_to_look() -> None:
    world = World(nodes_per_rack=3).running(0)
    world.start_seconds = 40.0
    world.end_gracefully(world.member(1))
    world.train(8)
    said = set()
    for _ in range(20):
        world.tick()
        said.add(world.condition("Running").message)
    assert said == {"no answer yet from the sidecars of workers 1"}


# A Secret that is lost: no other is made under running sidecars.


def training_without_secret(unreadable: bool = False) -> World:
    """As another process of the operator finds it."""
    world = trained()
    world.have_credentials, world.knows_credentials = unreadable, False
    for sidecar in world.sidecars.values():
        sidecar.reachable = False
    world.reports.clear()
    return world


@pytest.mark.parametrize("unreadable", [False, True])
def test_lost_secret_is_told_with_the_remedy_and_training_is_left_alone(unreadable: bool) -> None:
    world = training_without_secret(unreadable)
    pods, attempt = set(world.pods), world.status.attempt
    for _ in range(200):
        world.tick()
        assert not any(isinstance(action, EnsureCredentials) for action in world.last.before)
    world.assert_told("Placed", (False, "CredentialsLost"), "Secret j-credentials", "backup")
    assert (set(world.pods), world.status.attempt) == (pods, attempt)
    world.have_credentials = world.knows_credentials = True
    for sidecar in world.sidecars.values():
        sidecar.reachable = True
    world.train(5, attempt)
    assert world.told("Placed")[0] is True, "one that is back is used"


def test_new_secret_is_made_once_no_pod_runs_with_the_old_one() -> None:
    world = training_without_secret()
    world.tick()
    for uid in list(world.pods):
        world.evict(uid)
    world.until("Running")
    assert world.have_credentials


def test_secret_that_the_operator_remembers_is_written_again() -> None:
    world = trained(0)
    world.have_credentials = False
    world.tick()
    assert world.have_credentials
    assert world.status.attempt == 1


# A replacement speaks the language of its neighbours.


def images(world: World) -> set[str]:
    return {pod.sidecar_image for pod in world.pods.values()}


def upgraded(world: World) -> None:
    world.image = "sidecar:2"
    world.forget()


def test_new_operator_touches_no_pod_and_a_replacement_has_the_sidecar_that_the_job_began_with() -> None:
    world = trained(0, workers=4)
    attempt, pods, created = world.status.attempt, set(world.pods), len(world.created)
    upgraded(world)
    world.train(20, attempt=attempt)
    assert (set(world.pods), len(world.created)) == (pods, created)
    world.evict(world.member(2))
    world.until("Running", attempt=attempt + 1)
    assert world.status.attempt == attempt + 1
    assert images(world) == {"sidecar:1"}
    assert world.status.sidecar_image == "sidecar:1"


def test_suspended_and_resumed_job_gets_the_new_sidecar() -> None:
    world = World(make_spec(workers=2)).running(0)
    upgraded(world)
    world.suspended()
    assert world.status.sidecar_image == ""
    world.change(suspend=False)
    world.until("Running")
    assert images(world) == {"sidecar:2"}


def test_job_of_an_operator_that_wrote_no_image_down_keeps_that_of_its_pods() -> None:
    world = World(make_spec(workers=2)).running(0)
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


OURS = ("tiercheck-library", "tiercheck-node-memory", "tiercheck-sidecar")
POD: dict[str, Any] = {
    "metadata": {"name": "p"},
    "spec": {
        "initContainers": [{"name": name} for name in (*OURS, "theirs")],
        "containers": [{"name": "trainer", "imagePullPolicy": "Never"}],
        "imagePullSecrets": [{"name": "theirs"}],
    },
}


def test_pull_settings_are_for_our_containers_and_their_secrets_stay() -> None:
    spec = with_pull_settings(POD, "Always", ("ours", "theirs", "ours"))["spec"]
    policies = {
        entry["name"]: entry.get("imagePullPolicy") for entry in spec["initContainers"] + spec["containers"]
    }
    assert policies == {**dict.fromkeys(OURS, "Always"), "theirs": None, "trainer": "Never"}
    assert spec["imagePullSecrets"] == [{"name": "theirs"}, {"name": "ours"}]
    assert with_pull_settings(POD, "", ()) == POD


def test_pull_policy_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="TIERCHECK_SIDECAR_PULL_POLICY='Sometimes': expected one of Always"):
        Config.from_env({"TIERCHECK_SIDECAR_PULL_POLICY": "Sometimes"})
