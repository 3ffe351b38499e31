"""An elastic job without a node for a lost worker goes on smaller, and later whole again.

Nothing that the survivors hold is lost on the way, whoever dies next, and however often the operator is
started again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.operator.world_in_memory import REMOTE, World, make_spec, trained
from tiercheck.protocol.directive import DeltaMode, Restore
from tiercheck.protocol.report import Quarantined, TrainerState
from tiercheck.protocol.version import Branch, Version
from tiercheck_operator.controller.members import elastic as elastic_module
from tiercheck_operator.model.actions import Promote
from tiercheck_operator.model.status import SizeRecord, SparesRecord, render_record

TIMEOUT = 30.0
RACK = "topology.kubernetes.io/rack"
ANEW = "every process starts anew: the job has another number of ranks now"


def elastic(workers: int = 4, least: int = 2, nodes_per_rack: int = 4, **changes: Any) -> World:
    """Training, each worker on a node of its own."""
    spec = make_spec(workers=workers, min_workers=least, capacity_timeout=TIMEOUT, **changes)
    world = World(spec, racks=2, nodes_per_rack=nodes_per_rack)
    return world.running()


def lose(world: World, *workers: int) -> None:
    """Their nodes die, and there is no room elsewhere."""
    nodes = [world.pods[pod_of(world, worker)].node for worker in workers]
    world.change_nodes(schedulable=False)
    for node in nodes:
        assert node is not None
        world.kill_node(node)


def pod_of(world: World, worker: int) -> str:
    """UID of the pod that trains as `worker`, or did."""
    placement = world.placement
    assert placement is not None
    return next(member.pod_uid for member in placement.members if member.worker == worker)


def shrunk(world: World, *lost: int) -> World:
    attempt = world.status.attempt
    lose(world, *lost)
    world.until("Running", attempt=attempt + 1)
    return world


def shrunk_a_while(lost: int = 1, **changes: Any) -> World:
    """It has made versions of its own."""
    world = shrunk(elastic(**changes), lost)
    world.train(8)
    return world


def with_room_again() -> World:
    """The smaller job, as soon as there are nodes for everybody."""
    world = shrunk_a_while()
    world.change_nodes(schedulable=True)
    return world


def promotes(world: World) -> list[Promote]:
    """Of the last decision."""
    return [action for action in world.last.before if isinstance(action, Promote)]


def begun(world: World) -> tuple[list[int], Version]:
    """The workers of the newest attempt, and what they began from."""
    starts = world.starts[max(world.starts)]
    (version,) = set(starts.values())
    assert version is not None
    return sorted(starts), version


# Smaller


@pytest.mark.parametrize("lost", range(4))
def test_job_goes_on_with_the_workers_that_have_nodes_from_what_they_hold(lost: int) -> None:
    world = elastic()
    newest, survivors = world.committed, {pod_of(world, worker) for worker in range(4) if worker != lost}
    assert newest is not None
    shrunk(world, lost)
    workers, version = begun(world)
    assert (workers, version) == ([0, 1, 2], newest)
    assert world.status.history.branches[-1] == Branch(2, newest.step, ranks=3)
    assert {pod_of(world, worker) for worker in range(3)} == survivors, "nobody who has state is made anew"
    assert world.status.size == SizeRecord(3)
    summary = world.summary
    assert summary["cause"] == "NodeLost"
    assert "made by 4 ranks, from which 3 read their parts; " in summary["reason"]
    assert summary["reason"].endswith(f"; {ANEW}; with 3 of 4 workers")
    assert (world.status.crashes, world.status.disruptions) == (0, 1)


def test_owner_is_told_before_when_and_why() -> None:
    world = elastic()
    assert world.told("FullSize")[:2] == (True, "AllWorkers")
    lose(world, 1)
    world.train(15)
    world.assert_told(
        "Placed", "", "1 of 4 pods have no node", "If that stays so, the job goes on with 3 workers at 2027-"
    )
    assert world.status.size is None, "not before time is up"
    world.until("Running", attempt=2)
    world.train(3)
    world.assert_told(
        "FullSize", (False, "Shrunk"), "3 of 4 workers: no node takes j-spare-0. Unschedulable: 0 nodes fit"
    )
    assert world.notices.count("Shrunk") == 1
    assert "NoCapacity" not in world.notices


def test_it_does_not_wait_for_more_than_the_timeout() -> None:
    world = elastic()
    lose(world, 2)
    world.train(8)
    recovery = world.status.recovery
    assert recovery is not None
    world.until("Running", attempt=2)
    assert world.now - recovery.detected_at < TIMEOUT + 15


def test_pods_that_found_no_node_are_given_up_and_the_missing_worker_is_asked_for_as_a_spare() -> None:
    world = shrunk(elastic(), 1)
    world.train(5)
    assert sorted(pod.name for pod in world.pods.values() if pod.node is None) == ["j-spare-0"]
    assert world.status.spares == SparesRecord(1, 0)


def test_smaller_job_is_protected_and_comes_back_to_what_it_made_itself() -> None:
    world = shrunk_a_while()
    version = world.committed
    assert version is not None
    assert version.attempt == 2
    assert world.made[version] == 3
    assert world.crash(1)
    world.recovered(3)
    workers, back = begun(world)
    assert (workers, back.attempt) == ([0, 1, 2], 2)
    assert world.summary["tiers"]["local"] == 3


def test_several_may_be_lost_at_once() -> None:
    world = elastic(workers=6, least=3, copies=2)
    shrunk(world, 0, 1)
    assert begun(world)[0] == [0, 1, 2, 3]
    assert world.status.size == SizeRecord(4)


def test_further_loss_makes_it_smaller_again_but_not_below_the_least() -> None:
    world = shrunk(elastic(workers=4, least=2), 3)
    world.train(8)
    shrunk(world, 0)
    assert begun(world)[0] == [0, 1]
    assert world.notices.count("Shrunk") == 2
    world.train(8)
    attempt = world.status.attempt
    lose(world, 1)
    world.train(80, attempt=attempt)
    world.assert_told(
        "Placed",
        "NoCapacity",
        "It cannot go on smaller: elastic.minWorkers is 2, and only 1 workers have a node",
    )


def test_survivor_that_dies_before_it_has_its_new_place_makes_the_job_smaller_still() -> None:
    world = elastic(workers=4, least=2, copies=3)
    lose(world, 1)
    world.tick_until(lambda: world.status.size)
    doomed = pod_of(world, 3)
    node = world.pods[doomed].node
    assert node is not None
    world.kill_node(node)
    world.until("Running", attempt=2)
    assert len(begun(world)[0]) == world.status.size.workers == 2 if world.status.size else False


def test_node_that_comes_back_just_then_is_used_and_the_job_is_whole() -> None:
    """The size is written, nothing else has happened: with a node for everybody nobody has to change."""
    world = elastic()
    lose(world, 1)
    world.tick_until(lambda: world.status.size)
    unschedulable = next(uid for uid, pod in world.pods.items() if pod.worker == 1 and pod.node is None)
    world.change_pod(unschedulable, node="n13", unschedulable_since=None)
    world.reconcile()
    assert world.status.size is None
    world.until("Running", attempt=2)
    assert begun(world)[0] == [0, 1, 2, 3]


# What forbids it


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"least": 4}, "elastic.minWorkers is 4, and only 3 workers have a node"),
        ({"copies": 0, "parity": (3, 1)}, "tiers.peer.parity needs 4 workers, and 3 have a node"),
        ({"gang": "Volcano"}, "spec.gang asks for all workers or none"),
    ],
)
def test_job_that_cannot_go_on_smaller_waits_and_says_why(changes: dict[str, Any], says: str) -> None:
    world = elastic(**changes)
    lose(world, 1)
    world.train(80)
    world.assert_told("Placed", "NoCapacity", f"It cannot go on smaller: {says}.")
    assert world.status.attempt == 1


def test_job_in_a_queue_waits_for_the_queue() -> None:
    world = elastic()
    world.job = replace(world.job, queue_labels={"kueue.x-k8s.io/queue-name": "team"})
    lose(world, 1)
    world.train(80, attempt=1)
    assert "which decides when there is room" in str(world.status.condition("Placed"))


def test_job_with_parity_goes_on_smaller_from_what_the_blocks_give() -> None:
    world = elastic(workers=5, copies=0, parity=(2, 1))
    newest = world.committed
    shrunk(world, 1)
    assert begun(world) == ([0, 1, 2, 3], newest)
    assert "5 ranks from a peer" in str(world.status.last_recovery)
    world.train(9)
    assert world.saved.groups


def test_job_with_parity_waits_where_more_is_lost_than_the_blocks_give() -> None:
    world = elastic(workers=6, least=3, copies=0, parity=(2, 1))
    lose(world, *world.saved.groups[0].members)
    world.train(80, attempt=1)
    assert "what the others hold leads back to no version without" in str(world.status.condition("Placed"))
    world = elastic(workers=6, least=3, copies=0, parity=(2, 1), remote=REMOTE)
    newest = max(world.remote)
    lose(world, *world.saved.groups[0].members)
    world.train(80)
    assert world.status.history.branches[-1].base_step == newest.step


def test_job_waits_for_a_worker_whose_state_nobody_else_has() -> None:
    world = elastic(workers=4, copies=1)
    pairs = world.placement.holders() if world.placement is not None else {}
    lose(world, 1, *pairs[1])
    world.train(80)
    assert world.status.attempt == 1, "nothing is begun from scratch"
    world.assert_told(
        "Placed", "", "It cannot go on smaller: what the others hold leads back to no version without them"
    )


def test_copies_are_at_most_as_many_as_there_are_other_workers() -> None:
    world = elastic(workers=3, least=2, copies=2)
    shrunk(world, 2)
    assert world.saved.holders() == {0: (1,), 1: (0,)}


# The operator dies


@pytest.mark.parametrize("moment", range(14))
def test_operator_killed_between_any_two_writes_shrinks_the_job_once_and_well(moment: int) -> None:
    world = elastic()
    newest, survivors = world.committed, {pod_of(world, worker) for worker in (0, 2, 3)}
    lose(world, 1)
    world.tick_until(lambda: world.status.recovery)
    assert world.status.recovery is not None
    soon = world.status.recovery.detected_at + TIMEOUT - 2
    world.tick_until(lambda: world.now >= soon)
    for tick in range(moment // 2, moment // 2 + 6):
        world.tick(killed_after=tick % 7)
    world.until("Running", attempt=2)
    assert begun(world) == ([0, 1, 2], newest)
    assert {pod_of(world, worker) for worker in range(3)} == survivors
    assert survivors <= set(world.pods)


@pytest.mark.parametrize("moment", range(14))
def test_operator_killed_between_any_two_writes_grows_the_job_once_and_well(moment: int) -> None:
    world = with_room_again()
    world.train(57)
    for tick in range(moment // 2, moment // 2 + 6):
        world.tick(killed_after=tick % 7)
    world.until("Running", attempt=3)
    workers, version = begun(world)
    assert (workers, version.attempt) == ([0, 1, 2, 3], 2)
    assert world.status.size is None


def test_decision_made_from_an_old_view_gives_a_survivor_one_place_only() -> None:
    world = elastic()
    lose(world, 1)
    world.tick_until(lambda: promotes(world))
    again = promotes(world)
    assert [(action.worker, action.pod.worker) for action in again] == [(1, 3)]
    now = dict(world.pods)
    for action in again:
        world._do(action)
    assert world.pods == now


def test_pod_for_a_place_whose_first_pod_is_another_worker_now_has_a_name_of_its_own() -> None:
    world = with_room_again()
    world.until("Running", attempt=3)
    world.train(5)
    assert "j-3-0" in {pod.name for pod in world.pods.values() if pod.worker == 1}
    world.evict(pod_of(world, 3))
    world.until("Running", attempt=4)
    assert world.pods[pod_of(world, 3)].name == "j-3-2"


# Whole again


def test_job_grows_back_by_itself_from_a_fresh_snapshot_of_its_own() -> None:
    world = shrunk_a_while()
    world.staying = True
    attempt_of_smaller = world.status.attempt
    trained = world.newest_step()
    world.change_nodes(schedulable=True)
    world.train(20)
    assert world.status.attempt == attempt_of_smaller, "room has to last"
    assert world.told("FullSize")[:2] == (False, "Growing")
    world.until("Running", attempt=3)
    workers, version = begun(world)
    assert workers == [0, 1, 2, 3]
    assert version.attempt == attempt_of_smaller
    assert version.step > trained
    summary = world.summary
    assert summary["cause"] == "Grown"
    assert summary["lostSteps"] <= 4
    assert "made by 3 ranks, from which 4 read their parts" in summary["reason"]
    assert summary["reason"].endswith(f"; {ANEW}")
    assert (summary["inProcess"], summary["restarted"]) == (0, 4)
    assert (world.status.crashes, world.status.disruptions) == (0, 1), "to grow is no failure"
    assert world.notices.count("Grown") == 1
    assert world.told("FullSize")[::2] == (True, "the job has all 4 workers")
    assert "size" not in render_record(world.status)


def test_job_with_deltas_waits_for_a_snapshot_of_its_own_before_it_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Deltas carry what is complete further at every step, but more workers can start from a snapshot
    alone.
    """
    monkeypatch.setattr(elastic_module, "_PATIENT_TIMES", 1)
    world = elastic(delta=DeltaMode.AUTO, snapshot_every=100)
    world.train(100 - world.newest_step())
    shrunk(world, 1)
    world.train(5)
    _, base = begun(world)
    assert base == Version(100, 1) == world.committed
    directive = world.sidecars[pod_of(world, 0)].told
    world.copied[directive.attempt, directive.placement] = Version(world.newest_step(), 2)
    world.change_nodes(schedulable=True)
    world.train(75)
    assert world.status.attempt == 2, "what the smaller job has done would be lost"
    assert world.status.tiers["peer"].step > base.step
    world.until("Running", attempt=3)
    assert begun(world)[1] == Version(200, 2)


def test_pods_that_trained_on_keep_their_places_and_the_spare_gets_the_missing_one() -> None:
    world = shrunk_a_while()
    before = [pod_of(world, worker) for worker in range(3)]
    world.change_nodes(schedulable=True)
    world.until("Running", attempt=3)
    assert [pod_of(world, worker) for worker in range(3)] == before
    assert world.pods[pod_of(world, 3)].name == "j-spare-0"


def test_room_that_does_not_last_changes_nothing() -> None:
    world = with_room_again()
    world.train(30)
    (spare,) = (uid for uid, pod in world.pods.items() if pod.is_spare)
    world.change_nodes(schedulable=False)
    world.evict(spare)
    world.train(100, attempt=2)
    assert world.status.size == SizeRecord(3)
    world.change_nodes(schedulable=True)
    world.until("Running", attempt=3)
    assert begun(world)[0] == [0, 1, 2, 3]


def test_job_does_not_grow_before_the_smaller_one_has_a_complete_version_of_its_own() -> None:
    world = elastic()
    world.change(snapshot_every=1000)
    shrunk(world, 1)
    world.change_nodes(schedulable=True)
    world.train(200, attempt=2)
    world.change(snapshot_every=2)
    world.until("Running", attempt=3)
    assert begun(world)[1].attempt == 2


def test_job_that_comes_back_from_a_loss_takes_the_room_that_there_is() -> None:
    world = with_room_again()
    world.train(10)
    assert world.crash(0)
    world.recovered(3)
    assert begun(world)[0] == [0, 1, 2, 3]


def test_growth_that_comes_to_nothing_lets_the_smaller_job_train_on() -> None:
    world = with_room_again()
    world.tick_until(lambda: world.status.size is None)
    world.change_nodes(schedulable=False)
    for uid in [uid for uid, pod in world.pods.items() if pod.is_spare or pod.worker == 3]:
        world._gone(uid)
    world.train(5)
    assert (world.status.attempt, world.status.size) == (2, SizeRecord(3))
    assert world.status.recovery is None
    step = world.newest_step()
    world.train(5)
    assert world.newest_step() == step + 5
    world.change_nodes(schedulable=True)
    world.until("Running", attempt=3)


def test_growth_that_copies_do_not_allow_stops_nobody() -> None:
    """With three workers in one rack no copy of theirs is on another one, as the spec requires."""
    world = elastic(workers=4, least=2, nodes_per_rack=2, spread_level="rack", spread_required=True)
    shrunk(world, 1, next(worker for worker in (2, 3) if worker not in world.saved.holders()[1]))
    world.train(8)
    for name, view in world.nodes.items():
        world.nodes[name] = replace(view, schedulable=view.labels[RACK] == "r0")
    world.train(120, attempt=2)
    step = world.newest_step()
    world.train(400)
    assert world.newest_step() == step + 400, "it trains on all the while"
    world.change_nodes(schedulable=True)
    world.until("Running", attempt=3, limit=600)


def test_spares_that_the_spec_asks_for_are_there_again_afterwards() -> None:
    world = elastic(spares=1)
    world.until("Running")
    world.change_nodes(schedulable=False)
    for uid in [uid for uid, pod in world.pods.items() if pod.is_spare]:
        world._gone(uid)
    shrunk(world, 1)
    world.train(8)
    world.change_nodes(schedulable=True)
    world.until("Running", attempt=3)
    world.train(10)
    assert world.status.spares == SparesRecord(1, 1)


def test_job_that_has_ended_does_not_grow() -> None:
    world = with_room_again()
    world.total_steps = world.newest_step() + 20
    world.until("Completed")
    assert world.status.attempt == 2


# Its beginning and its end


def test_job_that_finds_room_for_some_workers_only_begins_with_those() -> None:
    spec = make_spec(min_workers=2, capacity_timeout=TIMEOUT)
    world = World(spec, racks=2, nodes_per_rack=4)
    world.train(2)
    for pod in list(world.pods.values()):
        if pod.worker in (1, 3):
            world.pods[pod.uid] = replace(
                pod, node=None, ip=None, unschedulable_since=world.now, message="no room"
            )
            world.sidecars.pop(pod.uid, None)
    world.change_nodes(schedulable=False)
    world.train(5, attempt=0)
    (beyond,) = (pod for pod in world.pods.values() if pod.worker == 2)
    world.tick_until(lambda: world.pods.get(beyond.uid, beyond).deleting)
    assert beyond.node is not None
    world.train(3)
    assert world.status.size == SizeRecord(2), "room that is about to be given back is not given up"
    world.change_nodes(beyond.node, schedulable=True)
    world.until("Running", attempt=1)
    assert sorted(world.starts[1]) == [0, 1]
    assert world.status.size == SizeRecord(2)
    assert world.status.history.ranks == 2
    world.change_nodes(schedulable=True)
    world.until("Running", attempt=2)
    assert begun(world)[0] == [0, 1, 2, 3]


def test_suspended_job_forgets_its_size() -> None:
    world = shrunk(elastic(remote=REMOTE), 1)
    world.train(9)
    world.suspended()
    assert world.status.size is None
    world.change_nodes(schedulable=True)
    world.change(suspend=False)
    world.recovered(3)
    workers, version = begun(world)
    assert (workers, version.attempt) == ([0, 1, 2, 3], 2)


def test_survivors_are_told_to_finish_as_who_they_know_themselves_to_be() -> None:
    """Suspended between the new label and the new attempt."""
    world = elastic(remote=REMOTE)
    lose(world, 1)
    world.tick_until(lambda: promotes(world))
    assert [pod.worker for pod in world.pods.values() if pod.name == "j-3-0"] == [1]
    world.change(suspend=True)
    world.train(3)
    assert not any(sidecar.trainer.state is TrainerState.RUNNING for sidecar in world.sidecars.values())
    world.until("Suspended")
    assert world.status.size is None


# What was said under old numbers


def test_copy_that_was_found_bad_is_not_used_though_its_worker_has_another_number_now() -> None:
    world = elastic(workers=4, least=2, copies=3)
    newest = world.committed
    assert newest is not None
    reporter = world.sidecars[pod_of(world, 0)]
    reporter.quarantined = tuple(Quarantined(1, newest, worker, "digest mismatch") for worker in (0, 2, 3))
    shrunk(world, 1)
    _, version = begun(world)
    assert version < newest, "rank 1 has no good copy of the newest version left"


# With deltas


def with_deltas() -> World:
    world = elastic(delta=DeltaMode.AUTO, snapshot_every=None)
    world.train(1)
    assert world.newest_step() % 4 > 1, "deltas lead beyond the newest snapshot"
    return world


@pytest.mark.parametrize("lost", range(4))
def test_smaller_job_goes_back_to_the_newest_snapshot_that_all_had_whatever_deltas_lead_to(lost: int) -> None:
    world = with_deltas()
    reached = world.newest_step()
    newest = Version(reached - reached % 4, 1)
    shrunk(world, lost)
    assert begun(world) == ([0, 1, 2], newest)
    assert world.status.history.branches[-1] == Branch(2, newest.step, ranks=3)
    summary = world.summary
    assert (summary["step"], summary["deltas"]) == (newest.step, 0)
    assert summary["lostSteps"] >= reached % 4
    assert "made by 4 ranks, from which 3 read their parts" in summary["reason"]


@pytest.mark.parametrize("deltas", [False, True])
def test_failure_before_the_smaller_job_has_saved_anything_comes_back_to_the_same_step(deltas: bool) -> None:
    world = with_deltas() if deltas else elastic()
    newest = Version(world.newest_step() - world.newest_step() % (4 if deltas else 2), 1)
    world.change(snapshot_every=1000)
    shrunk(world, 3)
    assert begun(world) == ([0, 1, 2], newest)
    world.recovered(3, crash=1)
    assert begun(world) == ([0, 1, 2], newest), "from the larger job once more"


# Suspended, given another number of workers, and resumed from where it was.


def restart_with(world: World, workers: int) -> None:
    world.suspended()
    before = world.status.attempt
    world.change(workers=workers, suspend=False)
    world.recovered(before + 1)
    world.train(2)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_job_of_another_size_goes_on_from_the_version_of_the_former_one(before: int, after: int) -> None:
    world = trained(remote=REMOTE, workers=before)
    newest = max(world.remote)
    restart_with(world, after)
    assert begun(world) == ([*range(after)], newest)
    assert world.status.history.ranks == after
    assert f"made by {before} ranks" in world.summary["reason"]
    assert (world.status.crashes, world.status.disruptions) == (0, 0)
    assert {pod.worker for pod in world.pods.values()} == {*range(after)}


@pytest.mark.parametrize("saved", [True, False])
def test_failure_after_that_comes_back_to_versions_of_the_new_ranks_once_they_have_saved_any(
    saved: bool,
) -> None:
    world = trained(remote=REMOTE, workers=4)
    newest = max(world.remote)
    world.change(snapshot_every=2 if saved else 100)
    restart_with(world, 2)
    world.train(8)
    attempt = world.status.attempt
    world.evict(world.member(1))
    world.recovered(attempt + 1)
    workers, version = begun(world)
    assert workers == [0, 1]
    assert (world.made[version], version.attempt) == (2, attempt) if saved else version == newest


def test_workers_may_change_while_the_job_is_still_being_suspended() -> None:
    world = trained(remote=REMOTE, workers=4)
    world.change(suspend=True)
    world.tick()
    world.change(workers=2)
    world.until("Suspended")
    for sidecar in world.sidecars.values():
        assert sidecar.directive is None or sidecar.directive.workers == 4
    world.change(suspend=False)
    world.recovered()
    workers, version = begun(world)
    assert (workers, world.made[version]) == ([0, 1], 4)


def test_another_job_of_that_name_may_have_another_size() -> None:
    first = trained(remote=REMOTE, workers=4)
    newest = max(first.remote)
    second = World(make_spec(remote=REMOTE, workers=2))
    second.remote, second.made = set(first.remote), dict(first.made)
    second.until("Running")
    second.train(2)
    assert begun(second) == ([0, 1], newest)
    assert second.status.history.branches[0] == Branch(newest.attempt, 0, ranks=4)


def restores_of(workers: int) -> dict[int, Restore]:
    """What each worker of a job that had four is told to restore, by the newest directive to hold."""
    world = trained(remote=REMOTE, workers=4)
    restart_with(world, workers)
    told = {worker: world.sidecars[world.member(worker)].directive for worker in range(workers)}
    return {worker: each.restore for worker, each in told.items() if each is not None and each.restore}


@pytest.mark.parametrize("workers", [2, 6])
def test_all_sidecars_of_a_resized_job_are_told_the_same_sources_of_every_old_rank(workers: int) -> None:
    restores = restores_of(workers)
    assert len(restores) == workers
    assert len({id(each.table) for each in restores.values()}) == 1, "one table, so that it is written once"
    for restore in restores.values():
        assert restore.world_size == 4
        assert all(restore.table.of_rank(rank) for rank in range(4)), "complete for the new mesh"
