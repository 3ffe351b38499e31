"""What a rank saves comes back after the sidecar or the trainer dies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors

from tests.sidecar.world import COME_BACK, FakeLauncher, FakeRank, MakeWorld, World, flip, until
from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase, Tier
from tiercheck.protocol.local import Hello, NamedRequest, Reply
from tiercheck.protocol.report import Exact, ResumeProof
from tiercheck.protocol.version import Version


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    """One worker, in its first attempt."""
    return make_world().launch()


def test_saved_snapshot_is_held_and_offered_to_the_next_attempt(world: World) -> None:
    with world.ranks() as (rank,):
        assert rank.welcome.restore_version is None
        assert rank.save(10)
        until(lambda: world.holds(0, 0, Version(10, 1), Tier.LOCAL), "sealed")
    world.begin(Version(10, 1))
    report = world.report(0)
    assert [(each.rank, each.tier) for each in report.restore.ranks] == [(0, Tier.LOCAL)]
    with world.rank(0) as rank:
        assert rank.welcome.restore_version == Version(10, 1)
        with safetensors.safe_open(rank.welcome.restore_path, "numpy") as slot:
            assert slot.metadata()["step"] == "10"
            assert slot.get_tensor("model.weight").shape == (300_000,)
        assert rank.ask("restored", step=10).ok


def test_result_of_the_comparison_after_a_restore_is_in_the_report_until_the_next_attempt(
    world: World,
) -> None:
    with world.ranks() as (rank,):
        assert (rank.welcome.restore_source, world.report(0).trainer.resume) == ("", None)
        assert rank.save(10)
        until(lambda: world.holds(0, 0, Version(10, 1), Tier.LOCAL), "sealed")
    world.begin(Version(10, 1))
    with world.rank(0) as rank:
        assert rank.welcome.restore_source == "own memory"
        said = {"exact": "Differs", "steps": 1, "message": "m" * 5000, "suspected": True}
        assert rank.ask("resume", step=10, **said).ok
        assert world.report(0).trainer.resume == ResumeProof(0, 10, Exact.DIFFERS, 1, "m" * 1000, True)
    world.begin(Version(10, 1))
    assert world.report(0).trainer.resume is None


def test_kill_minus_nine_keeps_sealed_slots_and_forgets_torn_ones(world: World) -> None:
    with world.ranks() as (rank,):
        rank.save(10)
        until(lambda: world.holds(0, 0, Version(10, 1)), "sealed")
        torn = rank.begin(20).path
        rank.write(torn, 20, finish=False)
        world.kill(0)
    world.start(0)
    assert [each.version for each in world.report(0).holdings] == [Version(10, 1)]
    assert not Path(torn).exists()


def test_slot_whose_bytes_changed_while_the_sidecar_was_dead_is_not_held(world: World) -> None:
    with world.ranks() as (rank,):
        path = rank.begin(10).path
        rank.write(path, 10)
        rank.ask("complete", step=10, path=path)
        until(lambda: world.holds(0, 0, Version(10, 1)), "sealed")
    world.kill(0)
    flip(Path(path), 200_000)
    world.start(0)
    assert world.report(0).holdings == ()


def test_own_copy_that_rotted_is_never_offered(world: World) -> None:
    with world.ranks() as (rank,):
        path = rank.begin(10).path
        rank.write(path, 10)
        rank.ask("complete", step=10, path=path)
        until(lambda: world.holds(0, 0, Version(10, 1)), "sealed")
    flip(Path(path), 200_000)
    world.new_attempt(Version(10, 1))
    world.direct(Phase.HOLD)
    until(lambda: world.report(0).restore.state.value == "Failed", "refused")
    report = world.report(0)
    assert [(bad.rank, bad.version, bad.worker) for bad in report.quarantined] == [(0, Version(10, 1), 0)]
    assert report.holdings == ()
    assert "does not match its digest" in report.restore.ranks[0].failures[0]


def test_writer_that_vanished_never_writes_into_a_slot_that_is_used_again(world: World) -> None:
    rank = world.rank(0)
    rank.reserve(300_000)
    path = rank.begin(10).path
    with open(path, "r+b") as survivor:
        rank.close()
        until(lambda: not Path(path).exists(), "the slot is lost")
        with world.ranks() as (again,):
            for step in (20, 21, 22):
                assert again.save(step), "three fresh slots"
            survivor.write(b"x" * 100_000)
            survivor.flush()
            until(lambda: world.holds(0, 0, Version(22, 1)), "the last one is sealed")
    world.kill(0)
    assert not any(b"x" * 1000 in path.read_bytes() for path in world.memory_dir(0).iterdir())
    world.start(0)
    assert Version(22, 1) in {each.version for each in world.report(0).holdings}


def test_memory_too_small_refuses_saving_with_numbers_and_training_goes_on(make_world: MakeWorld) -> None:
    world = make_world(limit=500_000).launch()
    with world.rank(0) as rank:
        refused = rank.reserve(300_000)
        assert not refused.ok
        assert "tiers.local.sizeLimit is 500000, needed" in refused.error
        reply = rank.begin(10)
        assert reply.ok
        assert reply.skip
    (problem,) = world.report(0).problems
    assert problem.reason == "MemoryTooSmall"
    assert "Raise tiers.local.sizeLimit" in problem.message
    assert world.report(0).memory.needed > 500_000


def test_memory_for_two_slots_saves_with_two(make_world: MakeWorld) -> None:
    world = make_world(limit=700_000).launch()
    with world.ranks() as (rank,):
        assert rank.save(1)
        assert rank.begin(2).path
        assert rank.begin(3).skip
    assert world.report(0).memory.used <= 700_000


def test_complete_slot_of_the_wrong_version_is_refused(world: World) -> None:
    with world.ranks() as (rank,):
        path = rank.begin(10).path
        rank.write(path, 11)
        reply = rank.ask("complete", step=10, path=path)
        assert "not what was begun" in reply.error
        torn = rank.begin(12).path
        rank.write(torn, 12, finish=False)
        assert "torn" in rank.ask("complete", step=12, path=torn).error
        assert not rank.ask("complete", step=12, path="/etc/passwd").ok
    assert world.report(0).holdings == ()


def test_rank_of_an_older_attempt_is_refused(world: World) -> None:
    with world.ranks() as (old,):
        world.begin()
        assert "is over" in old.begin(10).error
    with world.rank(0, attempt=1) as stale:
        assert "attempt 1 is over" in stale.welcome.error
        assert stale.welcome.attempt == 2
    assert world.report(0).counters.refused_stale >= 2


def test_wrong_number_of_processes_is_refused_with_a_remedy(world: World) -> None:
    beyond = world.workers * world.procs
    path = world.run_dir(0) / names.SOCKET_NAME
    wrong = (
        Hello("rank", os.getpid(), beyond, beyond, world.attempt),
        Hello("rank", os.getpid(), 0, 99, world.attempt),
    )
    for hello, about in zip(
        wrong, (f"rank {beyond} does not belong", f"the job has {beyond} ranks, not 99"), strict=True
    ):
        with FakeRank(path, hello) as rank:
            assert about in rank.welcome.error
            assert "procsPerWorker must be the number of processes in each pod" in rank.welcome.error


def test_request_of_a_newer_library_is_refused_and_the_connection_goes_on(world: World) -> None:
    with world.ranks() as (rank,):
        rank.send(NamedRequest("dance"))
        assert rank.receive(Reply).error == "unknown request 'dance'"
        assert rank.save(10)


def test_launcher_follows_the_phases_and_its_disappearance_is_a_failure(make_world: MakeWorld) -> None:
    world = make_world()
    world.patience[COME_BACK] = 0.2
    world.start()
    launcher = FakeLauncher(world.run_dir(0) / names.SOCKET_NAME)
    world.new_attempt()
    world.direct(Phase.HOLD)
    assert launcher.order().phase is Phase.HOLD
    until(lambda: world.report(0).trainer.state.value == "Waiting", "waiting")
    world.direct(Phase.RELEASE)
    order = launcher.order()
    assert (order.phase, order.attempt, order.master_host) == (Phase.RELEASE, 1, world.host(0))
    launcher.tell("started", 1)
    until(lambda: world.report(0).trainer.state.value == "Running", "running")
    launcher.close()
    until(lambda: world.report(0).trainer.state.value == "Failed", "container restarted")
    assert world.report(0).trainer.reason == "ContainerRestarted"
    again = FakeLauncher(world.run_dir(0) / names.SOCKET_NAME)
    assert again.order().phase is Phase.HOLD, "the same attempt is never begun twice"
    world.new_attempt()
    world.direct(Phase.HOLD)
    assert again.order().attempt == 2
    world.direct(Phase.RELEASE)
    assert again.order().phase is Phase.RELEASE
    again.tell("started", 2)
    again.tell("exited", 2, exit_code=137, reason="Signalled", message="killed")
    until(lambda: world.report(0).trainer.exit_code == 137, "exit code")
    again.close()


def test_launcher_that_another_one_follows_is_hung_up(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.new_attempt()
    world.direct(Phase.HOLD)
    old = FakeLauncher(world.run_dir(0) / names.SOCKET_NAME)
    assert old.order().phase is Phase.HOLD
    new = FakeLauncher(world.run_dir(0) / names.SOCKET_NAME)
    assert new.order().phase is Phase.HOLD
    old._file.read()  # to the end of the connection, which would time out
