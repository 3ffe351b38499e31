"""Incidents of other tools' users end here as ours are promised.

They are told in their words. The list: docs/operate/failures.md.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.operator.world_in_memory import REMOTE, World, make_spec


def running_world(**changes: object) -> World:
    world = World(make_spec(**changes), nodes_per_rack=3)
    world.until("Running")
    world.train(9)
    return world


def test_restart_that_fails_at_the_same_place_every_time_is_held_back_and_ends_with_a_reason() -> None:
    """nvidia-resiliency-ext#349: what was restored ended every start at its load, 44 times in a row, until
    somebody looked."""
    world = running_world(max_restarts=10)
    world.crash(1, code=1)
    world.stillborn = True
    began = world.starts_until_failed()
    pauses = [later - earlier for earlier, later in pairwise(began)]
    assert len(began) <= 10, "as often as failurePolicy.maxRestarts says"
    assert pauses[1:] == sorted(pauses[1:])
    assert pauses[-1] >= 60, "by then a start comes once a minute"
    failed = world.status.condition("Failed")
    assert failed is not None
    assert failed.reason == "MaxRestartsExceeded"


def test_copy_that_went_bad_is_left_out_once_and_no_restart_is_spent_on_it() -> None:
    """Megatron-LM#5281: a shard that came from a replica was NaN. The run went on with it, or failed and
    fetched it again."""
    world = running_world(remote=REMOTE)
    world.spoil_copies(1)
    world._gone(world.member(1))
    summary, back = world.recovered(), world.status.attempt
    assert (summary["tiers"]["peer"], world.status.crashes) == (0, 0)
    assert set(world.starts) == {1, back}, "nobody began with it"
    world.train(60)
    assert world.status.attempt == back, "it is not fetched again"


@pytest.mark.parametrize("later", [1, 3, 6, 12])
def test_second_node_that_goes_while_the_first_is_being_replaced_costs_its_own_pods_only(later: int) -> None:
    """kueue#14244: a node was being replaced, a second one failed, and the whole workload was evicted."""
    world = running_world()
    homes = {worker: world.home(worker) for worker in range(4)}
    victim = world.live_sidecar(0)
    assert victim is not None
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
    assert world.status.last_recovery is not None
    assert world.status.last_recovery["tiers"]["remote"] == 0, "nothing is lost: copies are on other nodes"
    assert {worker: world.member(worker) for worker in kept} == kept, "who lives keeps pod and memory"
    assert not {world.home(0), world.home(second)} & {homes[0], homes[second]}
    assert (world.status.counted, world.status.crashes) == (0, 0), "no restart of the job's own is spent"
