"""When things break, a job comes back as its owner is promised, by the pure decision."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.operator.world_in_memory import REMOTE, World, make_spec, trained
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.report import Problem
from tiercheck.protocol.version import Version
from tiercheck_operator.model.status import JobRecord


@pytest.fixture
def world() -> World:
    """A job of four that trains."""
    return trained()


def test_a_new_job_gets_its_pods_and_trains_from_scratch() -> None:
    world = trained(0)
    assert sorted(pod.name for pod in world.pods.values()) == ["j-0-0", "j-1-0", "j-2-0", "j-3-0"]
    assert world.status.attempt == 1
    assert world.starts == {1: dict.fromkeys(range(4))}
    assert world.have_service
    assert world.have_credentials
    assert world.status.last_recovery is None
    assert world.status.placement is not None
    assert world.status.placement.spread_achieved == "rack"


def test_crashed_trainer_is_restarted_in_place_from_own_memory_and_that_is_announced_once() -> None:
    world = trained()
    pods = set(world.pods)
    assert world.crash(2, code=139)
    summary = world.recovered_from("TrainerCrash", "worker 2", "139")
    assert set(world.pods) == pods
    assert (world.status.crashes, world.status.disruptions) == (1, 0)
    assert summary["tiers"] == {"local": 4, "peer": 0, "remote": 0}
    assert summary["lostSteps"] <= 2
    assert world.notices.count("TrainerCrash") == 1


def test_what_lies_behind_the_step_that_a_new_attempt_goes_back_to_is_no_longer_told_to_be_complete() -> None:
    world = trained()
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
def test_pod_that_the_kubelet_fails_for_lack_of_memory_counts_as_evicted(world: World, reason: str) -> None:
    world.change_pod(1, phase="Failed", disruption=reason, message="The node was low on resource: memory.")
    world.recovered_from("PodEvicted", "low on resource")
    assert (world.status.crashes, world.status.disruptions) == (0, 1)


def test_evicted_pod_alone_is_replaced_and_restored_from_a_peer(world: World) -> None:
    survivors = {world.member(worker) for worker in (0, 2, 3)}
    world.evict(world.member(1))
    summary = world.recovered_from("PodEvicted")
    assert survivors <= set(world.pods)
    assert not survivors & {action.uid for action in world.deleted}
    assert world.pods[world.member(1)].name == "j-1-1"
    assert summary["tiers"] == {"local": 3, "peer": 1, "remote": 0}
    assert (world.status.crashes, world.status.disruptions) == (0, 1)


def test_worker_on_lost_node_is_restored_from_peer_elsewhere(world: World) -> None:
    node = world.home(3)
    world.kill_node(node)
    world.until("Running", attempt=2)
    assert world.home(3) != node
    assert world.summary["cause"] in ("NodeLost", "SidecarSilent")
    assert not [pod for pod in world.pods.values() if pod.node == node], "nothing lingers on the dead node"
    assert any(action.force for action in world.deleted)


def test_workers_on_lost_rack_are_restored_from_the_other_rack(world: World) -> None:
    for name in ("n10", "n11"):
        world.kill_node(name)
    summary = world.recovered_from("DomainLost")
    assert summary["message"].startswith("rack r1 lost: workers ")
    assert summary["tiers"]["remote"] == 0
    assert summary["tiers"]["local"] + summary["tiers"]["peer"] == 4
    assert summary["lostSteps"] <= 2


def test_loss_of_every_pod_at_once_goes_back_to_the_remote_tier() -> None:
    world = trained(remote=REMOTE)
    newest = max(world.remote)
    world.lose_all()
    summary = world.recovered_from("AllPodsLost")
    assert summary["step"] == newest.step
    assert summary["tiers"] == {"local": 0, "peer": 0, "remote": 4}


def test_lost_everything_with_unreachable_remote_waits_and_never_starts_afresh() -> None:
    world = trained(remote=REMOTE)
    world.remote_up = False
    world.lose_all()
    world.train(60, attempt=1)
    world.assert_told("Restoring", (True, "RemoteUnreachable"), "bucket")
    world.remote_up = True
    world.until("Running", attempt=2)
    assert world.summary["step"] > 0


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
    assert world.told("Running")[:2] == (False, "RemoteOwned")
    owned(world, "")
    world.until("Running")


@pytest.mark.parametrize("reason", ["NoSuchBucket", "Forbidden", "CredentialsMissing", "Unreachable"])
def test_new_job_whose_store_cannot_be_used_says_what_the_store_said(reason: str) -> None:
    world = World(make_spec(remote=REMOTE))
    world.remote_up, world.remote_said = False, f"{reason}: The store says why."
    world.train(30)
    world.assert_told("Running", (False, f"Remote{reason}"), "The store says why.")
    assert "does not answer" not in world.condition("Running").message
    world.remote_up = True
    world.until("Running")


def test_running_job_whose_folder_was_taken_over_trains_on_and_never_goes_back_to_it() -> None:
    world = trained(remote=REMOTE)
    owned(world, "it was taken over by job UID other.")
    step = world.status.step or 0
    world.train(20)
    assert (world.status.step or 0) > step
    assert world.status.attempt == 1
    assert world.told("Protected")[:2] == (False, "RemoteOwned")
    world.lose_all()
    for _ in range(60):
        owned(world, "it was taken over by job UID other.")
        world.tick()
    assert (world.status.attempt, world.condition("Restoring").reason) == (1, "RemoteOwned")


@pytest.mark.parametrize("first", ["node", "echo"])
def test_crash_that_echoes_a_node_loss_spends_no_restart_and_is_never_announced_as_a_crash(
    first: str,
) -> None:
    world = trained(max_restarts=0)
    node = world.home(3)
    if first == "node":
        world.kill_node(node)
    world.crash(0)
    world.kill_node(node)
    world.recovered()
    assert world.status.crashes == 0
    assert not world.status.holds("Failed")
    assert "NodeLost" in world.notices
    assert "TrainerCrash" not in world.notices


def test_silent_sidecar_is_suspected_only_while_somebody_else_sees_trouble(world: World) -> None:
    uid = world.member(1)
    world.sidecars[uid].reachable = False
    world.train(30)
    assert uid in world.pods
    assert not world.pods[uid].deleting
    assert world.crash(0)
    assert world.recovered()["cause"] == "SidecarSilent"
    assert world.member(1) != uid
    assert world.pods[world.member(1)].avoided == frozenset({"n01"})


@pytest.mark.parametrize("what", ["sidecars", "a node"])
def test_operator_that_hears_of_no_sidecar_or_not_of_a_node_yet_replaces_nobody(what: str) -> None:
    world = trained()
    pods = set(world.pods)
    if what == "a node":
        world.nodes.pop(world.home(1))
    else:
        for sidecar in world.sidecars.values():
            sidecar.reachable = False
    world.train(120)
    assert set(world.pods) == pods
    assert world.status.attempt == 1


def test_crash_budget_spent_fails_the_job_and_names_worker_and_exit_code() -> None:
    world = trained(max_restarts=1)
    world.crash(2, code=3)
    world.recovered()
    world.crash(1, code=7)
    world.until("Failed")
    world.assert_told("Failed", "MaxRestartsExceeded", "worker 1", "exit code 7")
    world.train(60)
    assert all(pod.terminal for pod in world.pods.values())


def test_image_without_torch_fails_at_once_and_says_what_to_do(world: World) -> None:
    world.crash(0, code=1, reason="TorchMissing")
    world.until("Failed")
    world.assert_told("Failed", "TorchMissing", "torch 2.6")
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
    world = trained(remote=REMOTE)
    newest = max(world.remote)
    world.suspended()
    assert not world.pods
    assert world.status.holds("Suspended")
    assert not world.status.holds("Running")
    attempt = world.status.attempt
    world.change(suspend=False)
    world.recovered()
    assert world.status.attempt == attempt + 1
    assert world.summary["cause"] == "Resumed"
    assert world.summary["step"] == newest.step
    assert (world.status.crashes, world.status.disruptions) == (0, 0)


def test_copy_that_went_bad_is_left_out_once_and_no_restart_is_spent_on_it() -> None:
    """Megatron-LM#5281: a shard that came from a replica was NaN. The run went on with it, or failed and
    fetched it again."""
    world = trained(remote=REMOTE)
    world.spoil_copies(1)
    world._gone(world.member(1))
    summary, back = world.recovered(), world.status.attempt
    assert Version(summary["step"], 1) in world.remote, "an older version, as no other copy is left"
    assert (summary["tiers"]["peer"], world.status.crashes) == (0, 0)
    assert set(world.starts) == {1, back}, "nobody began with it"
    world.train(60)
    assert world.status.attempt == back, "it is not fetched again"


def test_bad_remote_version_is_given_up_for_an_older_one() -> None:
    world = trained(remote=REMOTE)
    world.train(6)
    newest, older = sorted(world.remote, reverse=True)[:2]
    world.bad_remote.add(newest)
    world.lose_all()
    world.tick()
    world.until("Running", limit=400, attempt=2)
    assert world.summary["step"] == older.step


@pytest.mark.parametrize("asked", [None, 40])
def test_first_attempt_takes_over_what_an_earlier_job_left_in_the_remote_tier_at_the_step_that_was_asked_for(
    asked: int | None,
) -> None:
    world = World(make_spec(remote=REMOTE, restore_step=asked))
    world.remote = {Version(40, 3), Version(44, 3), Version(50, 2)}
    world.until("Running")
    assert world.status.attempt == 4
    assert world.starts[4] == dict.fromkeys(range(4), Version(asked or 44, 3))


def test_step_that_was_asked_for_stays_asked_for_where_the_first_attempt_never_trained() -> None:
    world = World(make_spec(remote=REMOTE, restore_step=40))
    world.remote = {Version(40, 3), Version(44, 3)}
    world.tick_until(lambda: world.status.attempt >= 4)
    world.evict(world.member(2))
    world.until("Running", attempt=5)
    assert 4 not in world.starts
    assert world.starts[5] == dict.fromkeys(range(4), Version(40, 3))


def test_unlabelled_nodes_are_named_and_the_job_trains() -> None:
    world = World()
    for name in world.nodes:
        world.change_nodes(name, labels={"kubernetes.io/hostname": name})
    world.until("Running")
    world.assert_told("Placed", (True, "NodesUnlabelled"), "topology.kubernetes.io/rack", "n00")


@pytest.mark.parametrize(
    ("spec", "racks", "reason", "word"),
    [
        ({"spread_level": "rack", "spread_required": True}, 1, "InsufficientDomains", "rack"),
        ({}, 2, "Unschedulable", "0 nodes fit"),
        ({"template": {"spec": {"containers": [{"name": "main"}]}}}, 2, "InvalidTemplate", "trainer"),
    ],
    ids=["a spread that is impossible", "no node", "no container that trains"],
)
def test_job_that_cannot_begin_waits_and_says_why(
    spec: dict[str, object], racks: int, reason: str, word: str
) -> None:
    world = World(make_spec(**spec), racks=racks, nodes_per_rack=4)
    world.change_nodes(schedulable=reason != "Unschedulable")
    world.train(20)
    world.assert_told("Placed", (False, reason), word)
    assert bool(world.created) is (reason != "InvalidTemplate")
    assert (world.status.attempt, world.starts) == (0, {})


def test_replacement_that_avoids_a_node_is_freed_when_the_node_is_well_again() -> None:
    world = trained(steps=5, racks=2, nodes_per_rack=1, workers=2)
    world.change_nodes("n10", schedulable=False)
    world.kill_node("n00")
    world.train(20)
    (replacement,) = (pod for pod in world.pods.values() if pod.node is None)
    assert replacement.avoided == {"n00"}
    world.revive_node("n00")
    world.until("Running", attempt=2)


def test_job_managed_by_somebody_else_is_left_alone() -> None:
    world = World(make_spec(managed_by="kueue.x-k8s.io/multikueue"))
    world.train(3)
    assert not world.created
    assert world.status.conditions == ()


def test_deleted_job_is_left_to_its_owner_references(world: World) -> None:
    world.job = replace(world.job, deleting=True)
    world.lose_all()
    created = len(world.created)
    world.train(3)
    assert len(world.created) == created


@pytest.mark.parametrize(
    ("finalizers", "why"),
    [
        (
            ("audit.example/hold", "foregroundDeletion"),
            "stays until its finalizers are removed, so look for their controller: audit.example/hold",
        ),
        (("foregroundDeletion",), "goes once its pods have ended"),
    ],
)
def test_job_that_a_finalizer_holds_is_terminating_and_says_what_holds_it(
    world: World, finalizers: tuple[str, ...], why: str
) -> None:
    world.job = replace(world.job, deleting=True, finalizers=finalizers)
    world.train(3)
    assert world.status.phase == "Terminating"
    (protected,) = (each for each in world.status.conditions if each.type == "Protected")
    assert (protected.status, protected.reason) == (False, "Terminating")
    assert why in protected.message


def test_release_is_held_back_until_the_last_rank_is_ready(world: World) -> None:
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
    world.change_pod(uid, phase="Failed", disruption="OutOfcpu")
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
    assert world.condition("Running").reason == "WaitingForTrainers"
    world.slow_trainers = set()
    world.until("Running")


def test_sidecars_that_know_a_newer_attempt_than_the_status_are_overtaken(world: World) -> None:
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
        said = world.condition("Running")
        told.append(said.message)
    assert said.reason == "WaitingForSidecars"
    assert f"are {failure}. Network policies and service meshes must" in told[-1]
    assert "meshes" not in told[8], "not while they may just be starting"


def test_status_that_was_restored_from_a_backup_is_brought_on_in_one_attempt() -> None:
    """etcd came back as it was many recoveries ago; sidecars and the remote tier are where they were."""
    world = trained(remote=REMOTE)
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
    assert world.status.attempt == newest + 1
    assert (world.summary["cause"], world.status.counted) == ("StatusOutdated", 0)
    assert f"attempt {newest} has begun before" in world.summary["message"]


def test_attempt_that_one_sidecar_learned_of_elsewhere_is_passed_at_once(world: World) -> None:
    """As from an announcement in the remote tier, which the operator signed."""
    world.sidecars[world.member(1)].learned = 40
    world.until("Running", attempt=41)
    assert world.status.attempt == 41


@pytest.mark.parametrize("moment", range(1, 12))
def test_operator_killed_in_the_middle_of_a_recovery_continues(world: World, moment: int) -> None:
    world._gone(world.member(1))
    for _ in range(6):
        world.tick(killed_after=moment % 5)
        if moment > 5:
            world.tick()
    world.until("Running", attempt=2)
    assert world.summary["lostSteps"] <= 2
    assert world.status.disruptions == 1


@pytest.mark.parametrize("trained_before", [False, True])
def test_command_that_fails_before_its_first_step_is_held_back_longer_each_time(trained_before: bool) -> None:
    """nvidia-resiliency-ext#349: what was restored ended every start at its load, 44 times in a row, until
    somebody looked."""
    world = trained(max_restarts=10) if trained_before else World(make_spec(max_restarts=6))
    if trained_before:
        world.crash(1, code=1)
    world.stillborn = True
    began = world.starts_until_failed()
    pauses = [later - earlier for earlier, later in pairwise(began)][trained_before:]
    assert len(began) <= 10 if trained_before else len(pauses) == 6, (
        "as often as failurePolicy.maxRestarts says"
    )
    assert pauses == sorted(pauses)
    assert pauses[-1] >= (60 if trained_before else 32), "ten restarts must not be spent in a moment"
    assert world.condition("Failed").reason == "MaxRestartsExceeded"


def test_suspended_job_without_a_remote_tier_says_that_it_starts_from_scratch() -> None:
    world = trained(remote=None)
    world.suspended()
    world.assert_told("Suspended", "", "start from scratch")
    assert not world.status.holds("Protected")
    world.change(suspend=False)
    world.recovered()
    assert world.starts[2] == dict.fromkeys(range(4))


def test_completed_job_claims_no_protection_and_names_what_the_remote_tier_holds() -> None:
    world = World(make_spec(remote=REMOTE), steps=60)
    world.until("Completed", limit=400)
    protected = world.condition("Protected")
    assert not protected.status
    assert "the remote tier holds step" in protected.message
    assert set(world.status.tiers) <= {"remote"}


@pytest.mark.parametrize("remote", [None, REMOTE])
def test_history_has_no_attempt_of_which_nothing_is_left_and_every_one_of_which_something_is(
    remote: object,
) -> None:
    """Or directives grow with every restart."""
    world = trained(remote=remote)
    whole = world.status.history
    for number in range(2, 10):
        assert world.crash(number % 4)
        world.recovered(number)
        whole = whole.after(number, world.status.history.branches[-1].base_step, whole.ranks)
        kept = {each.version for uid in world.pods for each in world.sidecars[uid].report().holdings}
        for version in kept | world.remote:
            assert world.status.history.accepts(version) == whole.accepts(version)
        world.train(9)
    assert len(whole.branches) == 9
    assert len(world.status.history.branches) < (5 if remote is None else 9)


def test_history_stays_whole_while_nobody_knows_what_the_remote_tier_has() -> None:
    world = trained(remote=REMOTE)
    world.remote_up = False
    for number in range(2, 6):
        assert world.crash(number % 4)
        world.recovered(number)
        world.train(9)
    assert [branch.attempt for branch in world.status.history.branches] == [1, 2, 3, 4, 5]


# Incidents of other tools' users. The list: docs/operate/failures.md.


@pytest.mark.parametrize("later", [1, 3, 6, 12])
def test_second_node_that_goes_while_the_first_is_being_replaced_costs_its_own_pods_only(later: int) -> None:
    """kueue#14244: a node was being replaced, a second one failed, and the whole workload was evicted."""
    world = trained(nodes_per_rack=3)
    homes = {worker: world.home(worker) for worker in range(4)}
    victim = world.sidecar(0)
    assert victim.directive is not None
    keeper = victim.directive.holders[0].worker
    second = next(
        each for each in range(1, 4) if each != keeper and homes[each] not in (homes[0], homes[keeper])
    )
    kept = {
        worker: world.member(worker) for worker in range(4) if homes[worker] not in (homes[0], homes[second])
    }
    world.kill_node(homes[0])
    world.train(later)
    world.kill_node(homes[second])
    world.until("Running", limit=400, attempt=2)
    world.train(20)
    assert world.status.phase == "Running"
    assert world.summary["tiers"]["remote"] == 0, "nothing is lost: copies are on other nodes"
    assert {worker: world.member(worker) for worker in kept} == kept, "who lives keeps pod and memory"
    assert not {world.home(0), world.home(second)} & {homes[0], homes[second]}
    assert (world.status.counted, world.status.crashes) == (0, 0), "no restart of the job's own is spent"
