"""When things break, a job comes back as its owner is promised, by the pure decision."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.operator.world_in_memory import REMOTE, World, make_spec
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.report import Problem
from tiercheck.protocol.version import Version
from tiercheck_operator.model.actions import DeletePod, Push
from tiercheck_operator.model.status import JobRecord


def running_world(**changes: object) -> World:
    world = World(make_spec(**changes))
    world.until("Running")
    world.train(9)
    return world


def test_a_new_job_gets_its_pods_and_trains_from_scratch() -> None:
    world = World()
    world.until("Running")
    assert sorted(pod.name for pod in world.pods.values()) == ["j-0-0", "j-1-0", "j-2-0", "j-3-0"]
    assert world.status.attempt == 1
    assert world.starts == {1: dict.fromkeys(range(4))}
    assert world.have_service
    assert world.have_credentials
    assert world.status.last_recovery is None
    assert world.status.placement is not None
    assert world.status.placement.spread_achieved == "rack"


def test_crashed_trainer_is_restarted_in_place_from_own_memory() -> None:
    world = running_world()
    pods = set(world.pods)
    assert world.crash(2, code=139)
    world.tick()
    world.until("Running", attempt=2)
    assert set(world.pods) == pods
    assert (world.status.crashes, world.status.disruptions) == (1, 0)
    summary = world.status.last_recovery
    assert summary is not None
    assert summary["cause"] == "TrainerCrash"
    assert "worker 2" in summary["message"]
    assert "139" in summary["message"]
    assert summary["tiers"] == {"local": 4, "peer": 0, "remote": 0}
    assert summary["lostSteps"] <= 2


def test_what_lies_behind_the_step_that_a_new_attempt_goes_back_to_is_no_longer_told_to_be_complete() -> None:
    world = running_world()
    ahead = {name: replace(tier, step=tier.step + 100) for name, tier in world.status.tiers.items()}
    assert {"local", "peer"} <= set(ahead)
    world.job = replace(world.job, status=replace(world.status, tiers=ahead))
    assert world.crash(2)
    while world.status.attempt == 1:
        world.job = replace(world.job, status=replace(world.status, tiers=ahead))
        world.tick()
    assert world.status.recovery is not None
    assert all(tier.step <= world.status.recovery.step for tier in world.status.tiers.values())


@pytest.mark.parametrize("reason", ["TerminationByKubelet", "Evicted", "Terminated", "DeletionByPodGC"])
def test_pod_that_the_kubelet_fails_for_lack_of_memory_counts_as_evicted(reason: str) -> None:
    world = running_world()
    uid = world.member(1)
    world.pods[uid] = replace(
        world.pods[uid], phase="Failed", disruption=reason, message="The node was low on resource: memory."
    )
    world.until("Running", attempt=2)
    summary = world.status.last_recovery
    assert summary is not None
    assert summary["cause"] == "PodEvicted"
    assert "low on resource" in summary["message"]
    assert (world.status.crashes, world.status.disruptions) == (0, 1)


def test_evicted_pod_alone_is_replaced_and_restored_from_a_peer() -> None:
    world = running_world()
    survivors = {world.member(worker) for worker in (0, 2, 3)}
    world.evict(world.member(1))
    world.tick()
    world.until("Running", attempt=2)
    assert survivors <= set(world.pods)
    assert world.pods[world.member(1)].name == "j-1-1"
    summary = world.status.last_recovery
    assert summary is not None
    assert summary["cause"] == "PodEvicted"
    assert summary["tiers"] == {"local": 3, "peer": 1, "remote": 0}
    assert (world.status.crashes, world.status.disruptions) == (0, 1)


def test_worker_on_lost_node_is_restored_from_peer_elsewhere() -> None:
    world = running_world()
    node = world.pods[world.member(3)].node
    assert node is not None
    world.kill_node(node)
    for _ in range(4):
        world.tick()
    world.until("Running", attempt=2)
    assert world.pods[world.member(3)].node != node
    assert world.status.last_recovery is not None
    assert world.status.last_recovery["cause"] in ("NodeLost", "SidecarSilent")
    assert not [pod for pod in world.pods.values() if pod.node == node], "nothing lingers on the dead node"
    assert any(action.force for action in world.deleted)


def test_workers_on_lost_rack_are_restored_from_the_other_rack() -> None:
    world = running_world()
    for name in ("n10", "n11"):
        world.kill_node(name)
    world.train(6)
    world.until("Running", attempt=2)
    summary = world.status.last_recovery
    assert summary is not None
    assert summary["cause"] == "DomainLost"
    assert summary["message"].startswith("rack r1 lost: workers ")
    assert summary["tiers"]["remote"] == 0
    assert summary["tiers"]["local"] + summary["tiers"]["peer"] == 4
    assert summary["lostSteps"] <= 2


def test_loss_of_every_pod_at_once_goes_back_to_the_remote_tier() -> None:
    world = running_world(remote=REMOTE)
    newest = max(world.remote)
    for uid in list(world.pods):
        world._gone(uid)
    world.tick()
    world.until("Running", attempt=2)
    summary = world.status.last_recovery
    assert summary is not None
    assert summary["cause"] == "AllPodsLost"
    assert summary["step"] == newest.step
    assert summary["tiers"] == {"local": 0, "peer": 0, "remote": 4}


def test_lost_everything_with_unreachable_remote_waits_and_never_starts_afresh() -> None:
    world = running_world(remote=REMOTE)
    world.remote_up = False
    for uid in list(world.pods):
        world._gone(uid)
    world.train(60)
    assert world.status.attempt == 1
    restoring = world.status.condition("Restoring")
    assert restoring is not None
    assert (restoring.status, restoring.reason) == (True, "RemoteUnreachable")
    assert "bucket" in restoring.message
    world.remote_up = True
    world.until("Running", attempt=2)
    assert world.status.last_recovery is not None
    assert world.status.last_recovery["step"] > 0


def owned(world: World, message: str) -> None:
    """Every sidecar finds that the folder is somebody else's; an empty message: it is not any more."""
    world.remote_up = not message
    for sidecar in world.sidecars.values():
        sidecar.problems = (Problem("RemoteOwned", message),) if message else ()


def test_job_whose_folder_is_anothers_waits_and_says_whose_it_is() -> None:
    world = World(make_spec(remote=REMOTE))
    for _ in range(30):
        owned(world, "it belongs to job UID other.")
        world.tick()
    assert world.status.attempt == 0, "it must not begin from another job's versions, nor beside them"
    waiting = world.status.condition("Running")
    assert waiting is not None
    assert (waiting.status, waiting.reason) == (False, "RemoteOwned")
    owned(world, "")
    world.until("Running")


@pytest.mark.parametrize("reason", ["NoSuchBucket", "Forbidden", "CredentialsMissing", "Unreachable"])
def test_new_job_whose_store_cannot_be_used_says_what_the_store_said(reason: str) -> None:
    world = World(make_spec(remote=REMOTE))
    world.remote_up, world.remote_said = False, f"{reason}: The store says why."
    world.train(30)
    waiting = world.status.condition("Running")
    assert waiting is not None
    assert (waiting.status, waiting.reason) == (False, f"Remote{reason}")
    assert "The store says why." in waiting.message
    assert "does not answer" not in waiting.message
    world.remote_up = True
    world.until("Running")


def test_running_job_whose_folder_was_taken_over_trains_on_and_never_goes_back_to_it() -> None:
    world = running_world(remote=REMOTE)
    owned(world, "it was taken over by job UID other.")
    step = world.status.step or 0
    world.train(20)
    assert (world.status.step or 0) > step
    assert world.status.attempt == 1
    protected = world.status.condition("Protected")
    assert protected is not None
    assert (protected.status, protected.reason) == (False, "RemoteOwned")
    for uid in list(world.pods):
        world._gone(uid)
    for _ in range(60):
        owned(world, "it was taken over by job UID other.")
        world.tick()
    restoring = world.status.condition("Restoring")
    assert restoring is not None
    assert (world.status.attempt, restoring.reason) == (1, "RemoteOwned")


def test_node_loss_behind_a_crash_does_not_spend_the_crash_budget() -> None:
    world = running_world(max_restarts=0)
    node = world.pods[world.member(3)].node
    assert node is not None
    world.kill_node(node)
    world.crash(0)
    world.train(5)
    world.until("Running", attempt=2)
    assert world.status.crashes == 0
    assert not world.status.holds("Failed")


def test_silent_sidecar_is_suspected_only_while_somebody_else_sees_trouble() -> None:
    world = running_world()
    uid = world.member(1)
    world.sidecars[uid].reachable = False
    world.train(30)
    assert uid in world.pods
    assert not world.pods[uid].deleting
    assert world.crash(0)
    world.train(3)
    world.until("Running", attempt=2)
    assert world.status.last_recovery is not None
    assert world.status.last_recovery["cause"] == "SidecarSilent"
    assert world.pods[world.member(1)].uid != uid
    assert world.pods[world.member(1)].avoided == frozenset({"n01"})


def test_operator_cut_off_from_every_sidecar_replaces_nobody() -> None:
    world = running_world()
    pods = set(world.pods)
    for sidecar in world.sidecars.values():
        sidecar.reachable = False
    world.train(120)
    assert set(world.pods) == pods
    assert world.status.attempt == 1


def test_crash_budget_spent_fails_the_job_and_names_worker_and_exit_code() -> None:
    world = running_world(max_restarts=1)
    world.crash(2, code=3)
    world.tick()
    world.until("Running", attempt=2)
    world.crash(1, code=7)
    world.until("Failed")
    failed = world.status.condition("Failed")
    assert failed is not None
    assert failed.reason == "MaxRestartsExceeded"
    assert "worker 1" in failed.message
    assert "exit code 7" in failed.message
    world.train(60)
    assert all(pod.terminal for pod in world.pods.values())


def test_image_without_torch_fails_at_once_and_says_what_to_do() -> None:
    world = running_world()
    world.crash(0, code=1, reason="TorchMissing")
    world.until("Failed")
    failed = world.status.condition("Failed")
    assert failed is not None
    assert failed.reason == "TorchMissing"
    assert "torch 2.6" in failed.message
    assert world.status.crashes == 0


def test_completed_job_keeps_its_pods_for_their_logs_and_goes_after_its_ttl() -> None:
    world = World(make_spec(ttl_seconds=100.0), steps=5)
    world.until("Completed")
    world.train(3)
    assert [pod.phase for pod in world.pods.values()] == ["Succeeded"] * 4
    assert not world.deleted
    assert not world.deleted_job
    world.train(100)
    assert world.deleted_job


def test_suspended_job_gives_its_pods_back_and_resumes_from_the_remote_tier() -> None:
    world = running_world(remote=REMOTE)
    newest = max(world.remote)
    world.job = replace(world.job, spec=replace(world.job.spec, suspend=True))
    world.until("Suspended")
    assert not world.pods
    assert world.status.holds("Suspended")
    assert not world.status.holds("Running")
    attempt = world.status.attempt
    world.job = replace(world.job, spec=replace(world.job.spec, suspend=False))
    world.tick()
    world.until("Running", attempt=2)
    assert world.status.attempt == attempt + 1
    assert world.status.last_recovery is not None
    assert world.status.last_recovery["cause"] == "Resumed"
    assert world.status.last_recovery["step"] == newest.step
    assert (world.status.crashes, world.status.disruptions) == (0, 0)


def test_bad_copy_is_quarantined_and_an_older_version_used_when_no_other_is_left() -> None:
    world = running_world(remote=REMOTE)
    world.spoil_copies(1)
    world._gone(world.member(1))
    world.train(5)
    world.until("Running", attempt=2)
    assert world.status.last_recovery is not None
    assert Version(world.status.last_recovery["step"], 1) in world.remote


def test_bad_remote_version_is_given_up_for_an_older_one() -> None:
    world = running_world(remote=REMOTE)
    world.train(6)
    newest, older = sorted(world.remote, reverse=True)[:2]
    world.bad_remote.add(newest)
    for uid in list(world.pods):
        world._gone(uid)
    world.tick()
    world.until("Running", limit=400, attempt=2)
    assert world.status.last_recovery is not None
    assert world.status.last_recovery["step"] == older.step


def test_first_attempt_takes_over_what_an_earlier_job_left_in_the_remote_tier() -> None:
    world = World(make_spec(remote=REMOTE))
    world.remote = {Version(40, 3), Version(44, 3), Version(50, 2)}
    world.until("Running")
    assert world.status.attempt == 4
    assert world.starts[4] == dict.fromkeys(range(4), Version(44, 3))


def test_first_attempt_starts_from_the_step_that_was_asked_for() -> None:
    world = World(make_spec(remote=REMOTE, restore_step=40))
    world.remote = {Version(40, 3), Version(44, 3)}
    world.until("Running")
    assert world.starts[4] == dict.fromkeys(range(4), Version(40, 3))


def test_step_that_was_asked_for_stays_asked_for_where_the_first_attempt_never_trained() -> None:
    world = World(make_spec(remote=REMOTE, restore_step=40))
    world.remote = {Version(40, 3), Version(44, 3)}
    while world.status.attempt < 4:
        world.tick()
    world.evict(world.member(2))
    world.until("Running", attempt=5)
    assert 4 not in world.starts
    assert world.starts[5] == dict.fromkeys(range(4), Version(40, 3))


def test_required_spread_that_is_impossible_waits_and_names_the_bound() -> None:
    world = World(make_spec(spread_level="rack", spread_required=True), racks=1, nodes_per_rack=4)
    world.train(20)
    placed = world.status.condition("Placed")
    assert placed is not None
    assert (placed.status, placed.reason) == (False, "InsufficientDomains")
    assert "rack" in placed.message
    assert world.status.attempt == 0
    assert not world.starts


def test_unlabelled_nodes_are_named_and_the_job_trains() -> None:
    world = World()
    world.nodes = {
        name: replace(node, labels={"kubernetes.io/hostname": name}) for name, node in world.nodes.items()
    }
    world.until("Running")
    placed = world.status.condition("Placed")
    assert placed is not None
    assert (placed.status, placed.reason) == (True, "NodesUnlabelled")
    assert "topology.kubernetes.io/rack" in placed.message
    assert "n00" in placed.message


def test_pods_without_a_node_show_the_schedulers_words() -> None:
    world = World()
    world.nodes = {name: replace(node, schedulable=False) for name, node in world.nodes.items()}
    world.train(5)
    placed = world.status.condition("Placed")
    assert placed is not None
    assert (placed.status, placed.reason) == (False, "Unschedulable")
    assert "0 nodes fit" in placed.message


def test_replacement_that_avoids_a_node_is_freed_when_the_node_is_well_again() -> None:
    world = World(make_spec(workers=2), racks=2, nodes_per_rack=1)
    world.until("Running")
    world.train(5)
    world.nodes["n10"] = replace(world.nodes["n10"], schedulable=False)
    world.kill_node("n00")
    world.train(20)
    (replacement,) = (pod for pod in world.pods.values() if pod.node is None)
    assert replacement.avoided == {"n00"}
    world.revive_node("n00")
    world.until("Running", attempt=2)


def test_template_without_trainer_container_is_explained_and_nothing_is_created() -> None:
    world = World(make_spec(template={"spec": {"containers": [{"name": "main"}]}}))
    world.train(3)
    placed = world.status.condition("Placed")
    assert placed is not None
    assert (placed.status, placed.reason) == (False, "InvalidTemplate")
    assert not world.created


def test_job_managed_by_somebody_else_is_left_alone() -> None:
    world = World(make_spec(managed_by="kueue.x-k8s.io/multikueue"))
    world.train(3)
    assert not world.created
    assert world.status.conditions == ()


def test_deleted_job_is_left_to_its_owner_references() -> None:
    world = running_world()
    world.job = replace(world.job, deleting=True)
    for uid in list(world.pods):
        world._gone(uid)
    created = len(world.created)
    world.train(3)
    assert len(world.created) == created


def test_no_directive_is_sent_twice_to_a_sidecar_that_follows_it() -> None:
    world = running_world()
    world.tick()
    assert not [action for action in world.last.after if isinstance(action, Push)]
    assert not world.last.before


def test_release_is_held_back_until_the_last_rank_is_ready() -> None:
    world = running_world()
    world._gone(world.member(1))
    attempts = set(world.starts)
    for _ in range(100):
        world.tick()
        holding = [s for s in world.sidecars.values() if s.directive and s.directive.phase is Phase.HOLD]
        if holding:
            break
    assert set(world.starts) == attempts
    world.until("Running", attempt=2)
    assert set(world.starts) == attempts | {2}


def test_pod_that_fails_before_it_comes_up_is_not_replaced_in_a_tight_loop() -> None:
    world = World()
    world.tick()
    uid = world.member(0)
    world.pods[uid] = replace(world.pods[uid], phase="Failed", disruption="OutOfcpu")
    before = len(world.created)
    world.train(5)
    assert len(world.created) == before
    world.train(10)
    assert len(world.created) == before + 1


def test_release_waits_for_the_last_trainer_container() -> None:
    world = World()
    world.slow_trainers = {2}
    world.train(20)
    assert not world.starts
    running = world.status.condition("Running")
    assert running is not None
    assert running.reason == "WaitingForTrainers"
    world.slow_trainers = set()
    world.until("Running")


def test_pod_on_a_node_that_is_not_known_yet_is_left_alone() -> None:
    world = running_world()
    pods = set(world.pods)
    node = world.pods[world.member(1)].node
    assert node is not None
    hidden = world.nodes.pop(node)
    world.train(30)
    assert set(world.pods) == pods
    world.nodes[node] = hidden
    assert world.status.attempt == 1


def test_sidecars_that_know_a_newer_attempt_than_the_status_are_overtaken() -> None:
    world = running_world()
    world.job = replace(world.job, status=JobRecord())
    world.tick()
    world.until("Running")
    assert world.status.attempt == 2


@pytest.mark.parametrize("failure", ["refused", "timed out", "reset", "broken by TLS"])
def test_what_keeps_sidecars_from_being_reached_is_told_with_who_may_be_in_between(failure: str) -> None:
    world = World()
    world._reaches = lambda uid: False  # type: ignore[method-assign]
    told = list[str]()
    for _ in range(20):
        world.tick()
        world.reports = {uid: replace(known, failure=failure) for uid, known in world.reports.items()}
        said = world.status.condition("Running")
        assert said is not None
        told.append(said.message)
    assert said.reason == "WaitingForSidecars"
    assert f"are {failure}. Network policies and service meshes must" in told[-1]
    assert "meshes" not in told[8], "not while they may just be starting"


def test_status_that_was_restored_from_a_backup_is_brought_on_in_one_attempt() -> None:
    """etcd came back as it was many recoveries ago; sidecars and the remote tier are where they were."""
    world = running_world(remote=REMOTE)
    world.train(9)
    old = world.job.status
    for _ in range(3):
        world.crash(1)
        world.until("Running", attempt=world.status.attempt + 1)
    newest = world.status.attempt
    world.job = replace(world.job, status=old)
    world.tick()
    assert world.status.recovery is not None
    world.until("Running", attempt=newest + 1)
    assert world.status.last_recovery is not None
    assert world.status.attempt == newest + 1
    assert (world.status.last_recovery["cause"], world.status.counted) == ("StatusOutdated", 0)
    assert f"attempt {newest} has begun before" in world.status.last_recovery["message"]


def test_attempt_that_one_sidecar_learned_of_elsewhere_is_passed_at_once() -> None:
    """As from an announcement in the remote tier, which the operator signed."""
    world = running_world()
    world.sidecars[world.member(1)].learned = 40
    world.until("Running", attempt=41)
    assert world.status.attempt == 41


@pytest.mark.parametrize("moment", range(1, 12))
def test_operator_killed_in_the_middle_of_a_recovery_continues(moment: int) -> None:
    world = running_world()
    world._gone(world.member(1))
    for _ in range(6):
        world.tick(killed_after=moment % 5)
        if moment > 5:
            world.tick()
    world.until("Running", attempt=2)
    assert world.status.last_recovery is not None
    assert world.status.last_recovery["lostSteps"] <= 2
    assert world.status.disruptions == 1


def test_member_pods_are_never_deleted_while_they_live() -> None:
    world = running_world()
    keep = {world.member(worker) for worker in (0, 2, 3)}
    world.evict(world.member(1))
    world.tick()
    world.until("Running", attempt=2)
    assert not [action for action in world.deleted if isinstance(action, DeletePod) and action.uid in keep]


def test_crash_that_echoes_a_node_loss_is_never_announced_as_a_crash() -> None:
    world = running_world()
    node = world.pods[world.member(3)].node
    assert node is not None
    world.crash(0)
    world.kill_node(node)
    world.tick()
    world.until("Running", attempt=2)
    assert "NodeLost" in world.notices
    assert "TrainerCrash" not in world.notices


def test_crash_is_announced_once() -> None:
    world = running_world()
    world.crash(2)
    world.tick()
    world.until("Running", attempt=2)
    assert world.notices.count("TrainerCrash") == 1


def test_command_that_fails_before_its_first_step_is_held_back_longer_each_time() -> None:
    world = World(make_spec(max_restarts=6))
    world.stillborn = True
    began = world.starts_until_failed()
    pauses = [later - earlier for earlier, later in pairwise(began)]
    assert len(pauses) == 6
    assert pauses == sorted(pauses)
    assert pauses[-1] >= 32, "ten restarts must not be spent in a moment"


def test_suspended_job_without_a_remote_tier_says_that_it_starts_from_scratch() -> None:
    world = running_world(remote=None)
    world.job = replace(world.job, spec=replace(world.job.spec, suspend=True))
    world.until("Suspended")
    suspended = world.status.condition("Suspended")
    assert suspended is not None
    assert "start from scratch" in suspended.message
    assert not world.status.holds("Protected")
    world.job = replace(world.job, spec=replace(world.job.spec, suspend=False))
    world.tick()
    world.until("Running", attempt=2)
    assert world.starts[2] == dict.fromkeys(range(4))


def test_completed_job_claims_no_protection_and_names_what_the_remote_tier_holds() -> None:
    world = World(make_spec(remote=REMOTE), steps=60)
    world.until("Completed", limit=400)
    protected = world.status.condition("Protected")
    assert protected is not None
    assert not protected.status
    assert "the remote tier holds step" in protected.message
    assert set(world.status.tiers) <= {"remote"}


@pytest.mark.parametrize("remote", [None, REMOTE])
def test_history_has_no_attempt_of_which_nothing_is_left_and_every_one_of_which_something_is(
    remote: object,
) -> None:
    """Or directives grow with every restart."""
    world = running_world(remote=remote)
    whole = world.status.history
    for number in range(2, 10):
        assert world.crash(number % 4)
        world.tick()
        world.until("Running", attempt=number)
        whole = whole.after(number, world.status.history.branches[-1].base_step, whole.ranks)
        kept = {each.version for uid in world.pods for each in world.sidecars[uid].report().holdings}
        for version in kept | world.remote:
            assert world.status.history.accepts(version) == whole.accepts(version)
        world.train(9)
    assert len(whole.branches) == 9
    assert len(world.status.history.branches) < (5 if remote is None else 9)


def test_history_stays_whole_while_nobody_knows_what_the_remote_tier_has() -> None:
    world = running_world(remote=REMOTE)
    world.remote_up = False
    for number in range(2, 6):
        assert world.crash(number % 4)
        world.tick()
        world.until("Running", attempt=number)
        world.train(9)
    assert [branch.attempt for branch in world.status.history.branches] == [1, 2, 3, 4, 5]
