"""Copies move when the cluster changes under a job, and training does not notice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.operator.world_in_memory import World, trained
from tiercheck.protocol.report import MemoryReport
from tiercheck_operator.model import conditions
from tiercheck_operator.planning.topology import HOSTNAME_LABEL

RACK = "topology.kubernetes.io/rack"


def on(world: World, node: str) -> list[int]:
    """The workers on a node."""
    return sorted(pod.worker for pod in world.pods.values() if pod.node == node)


def cordon(world: World, node: str, on_: bool = True) -> None:
    world.change_nodes(node, cordoned=on_, schedulable=not on_)


def held(world: World, worker: int) -> list[int]:
    """Who could give back the newest version complete in the peer tier (or a newer one)."""
    assert world.committed is not None
    return [
        sidecar.worker
        for sidecar in world.sidecars.values()
        if any(each.rank == worker and each.version.step >= world.committed.step for each in sidecar.hosted)
    ]


def trained_through(world: World, ticks: int, copies: int = 1) -> list[dict[int, tuple[int, ...]]]:
    """Every placement on the way, with the promise checked at every tick: nobody restarts, nobody has fewer
    complete copies."""
    attempt, pods, seen = world.status.attempt, set(world.pods), []
    for _ in range(ticks):
        step = max(world.position.values())
        world.tick()
        assert (world.status.attempt, set(world.pods)) == (attempt, pods)
        assert max(world.position.values()) == step + 1, "training goes on"
        for worker in range(world.job.spec.workers):
            assert len(held(world, worker)) >= copies, f"worker {worker} has fewer copies than promised"
        if not seen or seen[-1] != world.saved.holders():
            seen.append(world.saved.holders())
    return seen


def holders(world: World) -> dict[int, tuple[int, ...]]:
    assert not world.saved.leaving
    return world.saved.holders()


def sent(world: World) -> dict[int, tuple[int, ...]]:
    """What the sidecars were told."""
    return {
        sidecar.worker: tuple(peer.worker for peer in sidecar.directive.holders)
        for sidecar in world.sidecars.values()
        if sidecar.directive
    }


def test_copies_leave_a_cordoned_node_in_the_same_attempt() -> None:
    world = trained(12)
    before = holders(world)
    (there,) = on(world, "n10")
    cordon(world, "n10")
    seen = trained_through(world, 20)
    after = holders(world)
    assert all(there not in kept for kept in after.values())
    assert sent(world) == after
    moved = [worker for worker in before if before[worker] != after[worker]]
    assert moved == [worker for worker in before if before[worker] == (there,)]
    assert any(len(kept[moved[0]]) == 2 for kept in seen), (
        "the old holder stays until the new one is complete"
    )


def test_status_says_who_moves_and_why() -> None:
    world = trained(12)
    cordon(world, "n10")
    messages = []
    for _ in range(20):
        world.tick()
        condition = world.condition(conditions.PLACED)
        assert condition.status
        messages.append((condition.reason, condition.message))
    (moving,) = {message for reason, message in messages if reason == conditions.COPIES_MOVING}
    assert "gets other holders, because node n10 is cordoned" in moving
    assert messages[-1][0] == conditions.ALL_PLACED


def test_a_node_that_comes_back_gets_its_share_after_a_while() -> None:
    world = trained(12)
    before = Counter(holder for kept in holders(world).values() for holder in kept)
    cordon(world, "n10")
    trained_through(world, 20)
    cordon(world, "n10", False)
    trained_through(world, 30)
    assert Counter(h for kept in holders(world).values() for h in kept) != before, (
        "what puts nothing at risk waits longer"
    )
    trained_through(world, 60)
    assert Counter(h for kept in holders(world).values() for h in kept) == before


def test_a_cordon_that_flaps_moves_nothing() -> None:
    world = trained(12)
    before = holders(world)
    for turn in range(10):
        cordon(world, "n10", turn % 2 == 0)
        assert trained_through(world, 3) == [before]


def test_a_relabelled_node_is_told_apart_again() -> None:
    world = trained(12, racks=3, workers=6)
    (there,) = on(world, "n00")
    partner = holders(world)[there][0]
    rack = next(
        world.nodes[str(pod.node)].labels[RACK] for pod in world.pods.values() if pod.worker == partner
    )
    world.change_nodes("n00", labels={HOSTNAME_LABEL: "n00", RACK: rack})
    trained_through(world, 60)
    racks = {pod.worker: world.nodes[str(pod.node)].labels[RACK] for pod in world.pods.values()}
    assert all(racks[worker] != racks[h] for worker, kept in holders(world).items() for h in kept)
    assert world.status.placement is not None
    assert "any one rack" in world.status.placement.tolerates


def test_a_label_that_is_taken_away_is_reported_although_nothing_moves() -> None:
    world = trained(12)
    before = holders(world)
    world.change_nodes("n10", labels={HOSTNAME_LABEL: "n10"})
    trained_through(world, 20)
    assert holders(world) == before
    condition = world.condition(conditions.PLACED)
    assert condition.reason == conditions.NODES_UNLABELLED
    assert "n10" in condition.message
    assert world.status.placement is not None
    assert "any one rack" not in world.status.placement.tolerates


def test_more_copies_are_made_while_training_goes_on_and_fewer_are_dropped() -> None:
    world = trained(12, racks=3)
    world.change(copies=2)
    trained_through(world, 40)
    assert all(len(kept) == 2 for kept in holders(world).values())
    world.train(4)
    trained_through(world, 4, copies=2)
    world.change(copies=1)
    trained_through(world, 80)
    assert all(len(kept) == 1 for kept in holders(world).values())
    world.change(copies=0)
    world.train(90)
    assert set(holders(world).values()) == {()}
    world.change(copies=1)
    world.train(40)
    assert all(len(kept) == 1 for kept in holders(world).values())
    assert world.status.attempt == 1


def test_where_every_node_is_cordoned_copies_stay() -> None:
    world = trained(12)
    before = holders(world)
    for node in world.nodes:
        cordon(world, node)
    assert trained_through(world, 30) == [before]


def test_a_spread_that_cannot_be_had_any_more_is_told_and_nothing_is_dropped() -> None:
    world = trained(12, spread_required=True)
    before = holders(world)
    for node in world.nodes:
        world.change_nodes(node, labels={HOSTNAME_LABEL: node, RACK: "r0"})
    trained_through(world, 30)
    assert holders(world) == before
    condition = world.condition(conditions.PLACED)
    assert condition.reason == conditions.DEGRADED_SPREAD


def in_a_move() -> tuple[World, int]:
    """Copies leave the cordoned node n10, and are at both ends now; the worker there."""
    world = trained(12)
    (there,) = on(world, "n10")
    cordon(world, "n10")
    while not (world.placement and world.placement.leaving):
        trained_through(world, 1)
    return world, there


def test_an_operator_that_restarts_in_the_middle_goes_on() -> None:
    world, there = in_a_move()
    world.forget()
    trained_through(world, 10)
    assert all(there not in kept for kept in holders(world).values())


def test_a_crash_in_the_middle_of_a_move_restores_and_places_as_wanted() -> None:
    world, there = in_a_move()
    world.crash(1)
    assert world.recovered()["tiers"]["local"] == 4
    world.train(10)
    assert all(there not in kept for kept in holders(world).values())


def test_the_loss_of_the_old_holder_in_the_middle_of_a_move_is_like_any_other() -> None:
    world, _ = in_a_move()
    world.kill_node("n10")
    summary = world.recovered()
    assert summary["lostSteps"] <= 3
    assert summary["tiers"]["remote"] == 0


@pytest.mark.parametrize("killed_after", [0, 1, 2])
def test_an_operator_killed_at_any_point_of_a_move_does_no_harm(killed_after: int) -> None:
    world = trained(12)
    (there,) = on(world, "n10")
    cordon(world, "n10")
    for _ in range(30):
        world.tick(killed_after=killed_after)
        for worker in range(4):
            assert held(world, worker)
    trained_through(world, 20)
    assert all(there not in kept for kept in holders(world).values())


def with_memory(world: World, worker: int, copies: int) -> None:
    """The worker's sidecar reports that its memory holds its own snapshots and those of so many others, and
    no more."""
    sidecar = world.sidecar(worker)
    memory = MemoryReport(limit=(2 + 2 * copies) * 2**30 + 2**26, used=0, needed=2**32, snapshot=2**30)
    report = sidecar.report
    sidecar.report = lambda: replace(report(), memory=memory)  # type: ignore[method-assign]


def test_a_move_waits_where_no_other_holder_has_room_and_says_so() -> None:
    world = trained(12)
    before = holders(world)
    for worker in range(4):
        with_memory(world, worker, copies=1)
    cordon(world, "n10")
    assert trained_through(world, 30) == [before]
    condition = world.condition(conditions.PLACED)
    assert condition.reason == conditions.MOVE_DELAYED
    assert "stay on node n10: no other worker is as far away from them and has room" in condition.message


def test_copies_move_to_the_holder_that_has_room() -> None:
    world = trained(12, nodes_per_rack=3, workers=6)
    before = holders(world)
    (there,) = on(world, "n10")
    (owner,) = [worker for worker, kept in before.items() if there in kept]
    (full,), (roomy,) = on(world, "n11"), on(world, "n12")
    for worker in range(6):
        with_memory(world, worker, copies=3 if worker == roomy else 1)
    cordon(world, "n10")
    trained_through(world, 30)
    assert holders(world)[owner] == (roomy,)
    assert full not in holders(world)[owner]


def test_a_parity_block_leaves_a_cordoned_node() -> None:
    world = trained(12, racks=4, copies=0, parity=(2, 1))
    group = world.saved.groups[0]
    node = next(str(pod.node) for pod in world.pods.values() if pod.worker == group.holders[0])
    cordon(world, node)
    world.train(30)
    assert world.status.attempt == 1
    assert all(group.holders[0] not in each.holders for each in world.saved.groups)


def test_copies_become_parity_while_training_goes_on() -> None:
    world = trained(12, racks=3)
    world.job = replace(world.job, spec=replace(world.job.spec, copies=0, parity=(2, 1)))
    world.train(30)
    assert world.status.attempt == 1
    assert len(world.saved.groups) == 2
    assert set(holders(world).values()) == {()}
    assert any(sidecar.blocks for sidecar in world.sidecars.values())


def test_another_encoding_waits_for_the_next_restart_where_memory_has_no_room_for_both() -> None:
    world = trained(12, racks=3)
    before = holders(world)
    for worker in range(4):
        with_memory(world, worker, copies=1)
    world.job = replace(world.job, spec=replace(world.job.spec, copies=0, parity=(2, 1)))
    assert trained_through(world, 30) == [before]
    condition = world.condition(conditions.PLACED)
    assert condition.reason == conditions.MOVE_DELAYED
    assert "changes at the next restart" in condition.message
    world.crash(0)
    world.until("Running", attempt=2)
    assert world.saved.groups


def test_a_job_that_is_right_writes_no_placement_again_and_again() -> None:
    world = trained(12)
    world.train(20)
    known = world.placement
    for _ in range(30):
        world.tick()
        assert world.placement is known


def test_unprotected_workers_are_named_with_the_reason() -> None:
    world = trained(steps=6, racks=1, nodes_per_rack=1)
    placement = world.status.placement
    assert placement is not None
    assert placement.unprotected_workers == 4
    assert placement.unprotected_reason.startswith("workers 0, 1, 2 and 3: ")
    assert "host" in placement.unprotected_reason
    condition = world.condition(conditions.PROTECTED)
    assert placement.unprotected_reason in condition.message
