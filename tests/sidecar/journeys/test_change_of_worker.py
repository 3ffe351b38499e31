"""A pod's sidecar is the worker that it is told to be, and keeps what it made under another number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.sidecar.restore.test_restore import DELTA, SIZE, training
from tests.sidecar.stations import image
from tests.sidecar.world import FakeLauncher, MakeWorld, World, layout, until
from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase, Tier
from tiercheck.protocol.report import SPARE, TrainerState
from tiercheck.protocol.version import Artifact, Version
from tiercheck_sidecar.vault import Vault

OLD = Version(1, 1)


def shrunk(make_world: MakeWorld, lost: int = 1) -> World:
    """Of three workers one is lost, and the last one takes its place. Copies lie at the next worker."""
    world = make_world(workers=3).launch()
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
            world.reach("peer", version)


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
    path.write_bytes(image(2, OLD, layout(9000), world_size=3))
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


# Spares


def test_spare_waits_as_nobody_with_its_launcher(make_world: MakeWorld) -> None:
    world = make_world()
    world.spares = {0}
    world.start()
    assert world.report(0).worker == SPARE
    assert world.report(0).trainer.state is TrainerState.ABSENT
    launcher = FakeLauncher(world.run_dir(0) / names.SOCKET_NAME)
    until(lambda: world.report(0).trainer.state is TrainerState.WAITING, "the launcher waits")
    with world.rank(0, attempt=1) as rank:
        assert "has not sent this sidecar a directive" in rank.welcome.error
    launcher.close()


def test_spare_becomes_the_lost_worker_and_restores_it_from_its_peer(make_world: MakeWorld) -> None:
    world = training(make_world(workers=2))
    world.train(4)
    version = Version(4, world.attempt)
    world.lose(1)
    world.spares = {1}
    world.start(1)
    launcher = FakeLauncher(world.run_dir(1) / names.SOCKET_NAME)
    size = world.report(0).memory.snapshot
    assert world.call(1, "GET", f"/v1/report?snapshot={size}")[0] == 200
    until(lambda: world.report(1).memory.used >= size, "memory for a snapshot is ready")
    ready = {path.stat().st_ino for path in world.memory_dir(1).glob("ready-*")}
    world.begin(version, {0: (world.from_peer(1),), 1: (world.from_peer(0),)})
    assert ready & {path.stat().st_ino for path in world.memory_dir(1).glob("own-*")}, "it was used"
    report = world.report(1)
    assert report.worker == 1
    (restored,) = report.restore.ranks
    assert (restored.rank, restored.tier, restored.worker) == (1, Tier.PEER, 0)
    order = until(lambda: (found := launcher.order()).phase is Phase.RELEASE and found, "the release")
    assert (order.worker, order.attempt) == (1, 2)
    world.train(6, first=5)
    launcher.close()


def test_spare_that_is_a_worker_will_be_no_other(make_world: MakeWorld) -> None:
    world = make_world(workers=3)
    world.spares = {2}
    world.start(2)
    world.new_attempt()
    wanted = world.directive(2, Phase.HOLD)
    other = replace(world.directive(0, Phase.HOLD), job_uid="other")
    assert world.send(2, other)[0] == 403
    assert world.report(2).worker == SPARE, "a stranger's word changes nothing"
    assert world.send(2, wanted)[0] == 200
    assert world.report(2).worker == 2
    world.attempt += 1
    assert world.send(2, world.directive(1, Phase.HOLD))[0] == 403


def test_restarted_sidecar_of_a_former_spare_is_told_again_who_it_is(make_world: MakeWorld) -> None:
    world = training(make_world(workers=2))
    world.train(4)
    world.spares = {1}
    world.kill(1)
    world.start(1)
    assert world.report(1).worker == SPARE
    assert world.holds(1, 1, Version(1, 1), Tier.LOCAL), "its memory outlived the process"
    world.direct(Phase.RELEASE)
    assert world.report(1).worker == 1
    with world.rank(1) as rank:
        assert not rank.welcome.error
        assert rank.reserve(SIZE, DELTA).ok
