"""A pod's sidecar keeps what it made when a job of another size gives it another number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sidecar.restore.test_restore import training
from tests.sidecar.world import FakeLauncher, World, layout, until
from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.version import Artifact, Kind, Version
from tiercheck_sidecar.vault import Vault

MakeWorld = Callable[..., World]
OLD = Version(1, 1)


def shrunk(make_world: MakeWorld, lost: int = 1) -> World:
    """Of three workers one is lost, and the last one takes its place. Copies lie at the next worker."""
    world = make_world(workers=3)
    world.start()
    world.begin()
    with world.ranks() as ranks:
        for rank in ranks:
            assert rank.save(1)
        until(lambda: world.report(0 if lost else 1).watermarks.peer == OLD, "step 1 lies at its holders")
    world.lose(lost)
    world.rename(2, lost)
    world.workers, world.others = 2, 3
    return world


def begin_smaller(world: World, lost: int = 1) -> None:
    """From what the survivors hold."""
    where = {0: 0, 1: 1, 2: 1} if lost else {0: 1, 1: 1, 2: 0}
    world.begin(OLD, {rank: (world.from_peer(worker),) for rank, worker in where.items()})


def save(world: World, first: int, last: int) -> None:
    with world.ranks() as ranks:
        for step in range(first, last + 1):
            for rank in ranks:
                until(lambda rank=rank, step=step: rank.save(step), f"a slot for step {step}")
            version = Version(step, world.attempt)
            until(lambda version=version: world.report(0).watermarks.peer == version, f"{version} is copied")


def test_survivor_is_another_worker_and_keeps_what_it_made_until_the_smaller_job_has_its_own(
    make_world: MakeWorld,
) -> None:
    world = shrunk(make_world)
    launcher = FakeLauncher(world.run_dir(1) / names.SOCKET_NAME)
    begin_smaller(world)
    assert world.report(1).worker == 1
    order = until(
        lambda: (o := launcher.order()).attempt == 2 and o.phase is Phase.RELEASE and o, "the release"
    )
    assert (order.worker, order.workers) == (1, 2)
    launcher.close()
    with world.rank(1) as rank:
        assert rank.welcome.restore_world_size == 3
        for lost in range(3):
            assert Path(rank.ask("borrow", step=1, rank=lost).path).exists(), f"rank {lost}"
    assert world.holds(1, 2, OLD), "its own memory as worker 2 is still there"
    save(world, 2, 4)
    for worker in (0, 1):
        until(lambda worker=worker: OLD not in versions(world, worker), "the larger job's version is freed")
        assert {each.rank for each in world.report(worker).holdings} == {0, 1}
        assert not world.report(worker).problems
    until(lambda: slots(world, 1) == {1}, "no slot is kept ready for rank 2")
    assert world.report(1).memory.local == world.report(0).memory.local
    world.kill(1)
    world.start(1)
    assert world.report(1).worker == 2, "its pod's environment says so"
    world.direct(Phase.RELEASE)
    assert world.report(1).worker == 1
    save(world, 5, 6)


def versions(world: World, worker: int) -> set[Version]:
    return {each.version for each in world.report(worker).holdings}


def slots(world: World, worker: int) -> set[int]:
    """The ranks that there are own slots for."""
    return {int(path.name.split("-")[1]) for path in world.memory_dir(worker).glob("own-*.safetensors")}


def test_survivor_that_becomes_worker_0_publishes_the_watermarks(make_world: MakeWorld) -> None:
    world = shrunk(make_world, lost=0)
    begin_smaller(world, lost=0)
    assert world.report(0).worker == 0
    save(world, 2, 6)


def test_identity_changes_with_a_new_attempt_only_and_for_the_pod_that_is_named(
    make_world: MakeWorld,
) -> None:
    world = make_world(workers=3)
    world.start(2)
    world.new_attempt()
    assert world.send(2, world.directive(2, Phase.HOLD))[0] == 200

    def told(worker: int, pod_uid: str = "pod-2", attempt: int | None = None) -> int:
        wanted = replace(
            world.directive(worker, Phase.HOLD), pod_uid=pod_uid, attempt=attempt or world.attempt
        )
        return world.send(2, wanted)[0]

    assert told(1) == 403, "within an attempt nobody changes"
    world.attempt += 2
    assert told(2) == 200
    assert told(1, attempt=2) == 403, "nor by an older one"
    world.attempt += 1
    assert told(1, pod_uid="") == 403, "an operator that does not say which pod it means"
    assert told(1, pod_uid="pod-1") == 403, "somebody else who had this address"
    assert world.report(2).worker == 2
    assert told(1) == 200
    assert world.report(2).worker == 1
    assert told(2) == 403


@pytest.mark.extended
def test_spare_that_becomes_worker_0_publishes_the_watermarks(make_world: MakeWorld) -> None:
    world = training(make_world(workers=2))
    world.lose(0)
    world.spares = {0}
    world.start(0)
    world.begin()
    save(world, 1, 4)


def test_what_an_earlier_pod_made_as_another_worker_gets_no_new_slots(memory: Path) -> None:
    """Taken over from the node's memory, or found after a restart."""
    before = Vault(memory, 10**7, (2,))
    before.open()
    before.reserve(2, layout(9000).size)
    path = before.begin(2, OLD)
    plan = layout(9000)
    path.write_bytes(
        plan.state_word + plan.header(2, OLD, 3, {}, Kind.SNAPSHOT) + bytes(plan.size - plan.data_begin)
    )
    before.complete(path, 3)
    assert before.seal(path)
    vault = Vault(memory, 10**7, (1,))
    vault.open()
    vault.identify((1,))
    vault.tidy()
    assert vault.find(Artifact(2, OLD)), "it is a source all the same"
    assert vault.size_plan().local == 0
    assert len(list(memory.glob("own-*.safetensors"))) == 1


def test_memory_of_the_node_is_for_the_next_pod_of_who_it_is_now(make_world: MakeWorld) -> None:
    world = make_world(workers=2)
    world.node_memory = True
    world.start(1)
    world.new_attempt()
    assert world.send(1, world.directive(1, Phase.HOLD))[0] == 200
    world.attempt += 1
    other = replace(world.directive(0, Phase.HOLD), pod_uid="pod-1")
    assert world.send(1, other)[0] == 200
    owner = world.memory_dir(1) / "pod-1" / ".owner"
    assert b'"worker":0' in owner.read_bytes().replace(b" ", b"")
