"""Deltas are taken where there is room, and a chain is worth what its links allow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sidecar.world import FakeLauncher, FakeRank, MakeWorld, World, layout, until
from tiercheck.protocol import names
from tiercheck.protocol.artifacts.sizing import auto_cadence
from tiercheck.protocol.directive import DeltaMode, Phase, Tier
from tiercheck.protocol.version import Kind, Version

SIZE, DELTA = 300_000, 40_000
CHAIN = auto_cadence(layout(SIZE).size, layout(DELTA).size)
"""Deltas that cost what a snapshot costs."""


def auto(world: World) -> World:
    world.policy = replace(world.policy, snapshot_every=None)
    return world


def decided(world: World, rank: FakeRank) -> int:
    """Steps between snapshots, once the sidecar has said so and has made room."""
    until(lambda: world.report(rank.hello.rank // world.procs).snapshot_every, "the cadence is decided")
    return world.report(0).snapshot_every


def keep_delta(rank: FakeRank, step: int, size: int = 20_000) -> int:
    """Delta slots are prepared behind the trainer's back: whoever is fast may have to wait for one. Returns
    how often it was refused before."""
    answers: list[bool] = []

    def kept() -> bool:
        answers.append(rank.save_delta(step, size))
        return answers[-1]

    until(kept, f"a slot for the delta of step {step}")
    return answers.count(False)


def save_until(world: World, rank: FakeRank, last: int) -> None:
    """The snapshot of step 1 and the deltas up to that of `last`, until the local tier has them."""
    assert rank.save(1)
    keep_delta(rank, 2)
    for step in range(3, last + 1):
        keep_delta(rank, step)
    world.reach("local", Version(last, 1))


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    """One worker that takes deltas, in its first attempt."""
    return auto(make_world()).launch()


def test_snapshot_and_every_delta_after_it_lead_to_the_newest_step(world: World) -> None:
    with world.ranks(SIZE, DELTA) as (rank,):
        assert rank.welcome.delta is DeltaMode.AUTO
        assert decided(world, rank) == CHAIN
        assert rank.save(1)
        refused = keep_delta(rank, 2)
        for step in range(3, 7):
            refused += keep_delta(rank, step, 1000 * step)
        world.reach("local", Version(6, 1))
        marks = world.report(0).watermarks
        assert marks.snapshot == Version(1, 1)
        assert rank.ask("abandon", path="nothing").snapshot_every == CHAIN, "replies tell the cadence"
    world.begin(Version(6, 1))
    with world.rank(0) as again:
        assert again.welcome.restore_version == Version(6, 1)
        assert again.welcome.snapshot_every == CHAIN, "known before the rank has reserved anything"
        assert len(again.welcome.restore_deltas) == 5
        assert again.reserve(SIZE, DELTA).ok
        refused += keep_delta(again, 7)  # the chain goes on in the next attempt
        world.reach("local", Version(7, 2))
    assert world.report(0).counters.deltas == 6
    assert world.report(0).counters.deltas_skipped == refused


def test_deltas_before_any_snapshot_are_refused_and_not_counted(world: World) -> None:
    with world.ranks(SIZE, DELTA) as (rank,):
        assert "no snapshot yet" in rank.begin(1, Kind.DELTA).skip
    assert world.report(0).counters.deltas_skipped == 0


def test_skipped_delta_breaks_the_chain_until_the_next_snapshot(world: World) -> None:
    with world.ranks(SIZE, DELTA) as (rank,):
        assert rank.save(1)
        keep_delta(rank, 2)
        before = world.report(0).counters.deltas_skipped
        assert "an earlier delta is missing" in rank.begin(4, Kind.DELTA).skip
        assert rank.save(5)
        refused = keep_delta(rank, 6)
        world.reach("local", Version(6, 1))
    report = world.report(0)
    assert report.counters.deltas_skipped == before + 1 + refused
    assert report.counters.skipped == 0


def test_delta_is_skipped_when_no_slot_is_free_and_snapshots_are_not_touched(make_world: MakeWorld) -> None:
    world = auto(make_world(workers=2)).launch()
    with world.ranks(SIZE, DELTA) as (rank, _):
        decided(world, rank)
        world.pause(1)  # nothing can become complete, so nothing may be freed
        assert rank.save(1)
        for step in range(2, CHAIN + 1):  # at least a chain has room
            keep_delta(rank, step)
        step = CHAIN
        while rank.save_delta(step + 1):
            step += 1
        assert rank.begin(step + 2).path, "snapshots have slots of their own"
        until(lambda: world.holds(0, 0, Version(1, 1)), "kept")
        assert world.report(0).memory.used <= world.limit
    world.resume(1)


def test_restarted_sidecar_keeps_verified_snapshots_and_deltas_of_every_size(world: World) -> None:
    with world.ranks(SIZE, DELTA) as (rank,):
        assert rank.save(1)
        keep_delta(rank, 2, 100)
        keep_delta(rank, 3, DELTA)
        world.reach("local", Version(3, 1))
        torn = until(lambda: rank.begin(4, Kind.DELTA).path, "a slot for the delta of step 4")
        rank.write(torn, 4, finish=False, kind=Kind.DELTA, plan=layout(500))
        world.kill(0)
    world.start(0)
    held = [(each.version.step, each.kind) for each in world.report(0).holdings]
    assert held == [(1, Kind.SNAPSHOT), (2, Kind.DELTA), (3, Kind.DELTA)]
    world.begin(Version(3, 1))
    with world.rank(0) as rank:
        assert len(rank.welcome.restore_deltas) == 2


def test_what_a_newer_snapshot_makes_superfluous_is_freed(world: World) -> None:
    with world.ranks(SIZE, DELTA) as (rank,):
        assert rank.save(1)
        keep_delta(rank, 2)
        assert rank.save(3)
        keep_delta(rank, 3)
        keep_delta(rank, 4)
        world.reach("local", Version(4, 1))
        until(lambda: not world.holds(0, 0, Version(1, 1)), "the older snapshot goes")
        until(
            lambda: not world.holds(0, 0, Version(3, 1), kind=Kind.DELTA),
            "the deltas that lead to the newer one too",
        )
        assert world.holds(0, 0, Version(3, 1))
        assert world.holds(0, 0, Version(4, 1), kind=Kind.DELTA)


def test_too_little_memory_for_deltas_means_snapshots_only_and_says_so_with_numbers(
    make_world: MakeWorld,
) -> None:
    world = auto(make_world(limit=1_100_000)).launch()
    with world.ranks(SIZE, DELTA) as (rank,):
        assert rank.save(1)
        until(lambda: world.report(0).snapshot_every == 50, "the cadence of a job without deltas")
        reply = rank.begin(2, Kind.DELTA)
        assert reply.ok
        assert reply.skip
    (problem,) = world.report(0).problems
    assert problem.reason == "DeltasOff"
    assert "tiers.local.sizeLimit is 1100000, deltas need" in problem.message
    assert world.report(0).trainer.no_deltas == problem.message
    assert world.report(0).counters.deltas_skipped == 0


def test_rank_that_cannot_take_deltas_switches_them_off_for_the_job(make_world: MakeWorld) -> None:
    world = auto(make_world(workers=2)).launch()
    with world.ranks(SIZE, DELTA) as (one, other):
        until(lambda: world.report(0).snapshot_every == CHAIN, "with deltas")
        assert other.ask("no-deltas", message="its optimizer needs a closure").ok
        until(lambda: world.report(0).snapshot_every == 50, "without")
        assert one.save(1)
        assert "lead nowhere" in one.begin(2, Kind.DELTA).skip
        assert "closure" in other.begin(2, Kind.DELTA).skip
    assert world.report(1).trainer.no_deltas == "its optimizer needs a closure"
    assert world.report(0).trainer.no_deltas == ""


def test_job_that_wants_no_deltas_gets_none(make_world: MakeWorld) -> None:
    world = auto(make_world())
    world.policy = replace(world.policy, delta=DeltaMode.NONE)
    world.launch()
    with world.ranks(SIZE, DELTA) as (rank,):
        assert rank.welcome.delta is DeltaMode.NONE
        assert rank.begin(2, Kind.DELTA).skip == "the job takes no deltas"
        until(lambda: world.report(0).snapshot_every == 50, "snapshots only")
    assert world.report(0).problems == ()


def test_users_cadence_counts_before_the_sizes(make_world: MakeWorld) -> None:
    world = make_world()
    world.policy = replace(world.policy, snapshot_every=9)
    world.launch()
    with world.rank(0) as rank:
        assert rank.welcome.snapshot_every == 9


def test_mismatch_quarantines_the_chain_everywhere_and_ends_deltas_here(world: World) -> None:
    with world.ranks(SIZE, DELTA) as (rank,):
        save_until(world, rank, 4)
    world.begin(Version(3, 1))
    with world.rank(0) as rank:
        assert rank.ask("mismatch", step=3, kind=Kind.DELTA, message="tensor exp_avg of layer 1 differs").ok
        report = world.report(0)
        assert {(bad.version.step, bad.kind, bad.everywhere) for bad in report.quarantined} == {
            (2, Kind.DELTA, True),
            (3, Kind.DELTA, True),
        }
        assert "exp_avg" in report.quarantined[0].reason
        assert report.counters.replay_mismatches == 1
        until(lambda: not world.holds(0, 0, Version(2, 1), kind=Kind.DELTA), "freed")
        assert world.holds(0, 0, Version(1, 1)), "the snapshot is good"
    world.begin(Version(1, 1))
    with world.rank(0) as rank:
        assert rank.welcome.delta is DeltaMode.NONE
        assert rank.welcome.restore_version == Version(1, 1)
        assert rank.welcome.restore_deltas == ()
        assert "exp_avg" in rank.begin(2, Kind.DELTA).skip
        assert "exp_avg" in world.report(0).trainer.no_deltas
        assert rank.ask("mismatch", step=1, kind=Kind.SNAPSHOT, message="replicas held different bits").ok
        (bad,) = world.report(0).quarantined
        assert (bad.version, bad.kind, bad.everywhere) == (Version(1, 1), Kind.SNAPSHOT, True)
        until(lambda: not world.holds(0, 0, Version(1, 1)), "not even kept")


def test_deltas_that_a_rank_found_worthless_while_it_trains_are_replayed_nowhere(world: World) -> None:
    with world.ranks(SIZE, DELTA) as (rank,):
        save_until(world, rank, 2)
    world.begin(Version(2, 1))
    with world.ranks(SIZE, DELTA) as (rank,):
        keep_delta(rank, 3)
        keep_delta(rank, 4)
        assert rank.ask("no-deltas", step=3, message="the probe found other bits").ok
        found = world.report(0).quarantined
        assert {(bad.rank, bad.version, bad.kind, bad.everywhere) for bad in found} == {
            (0, Version(3, 2), Kind.DELTA, True),
            (0, Version(4, 2), Kind.DELTA, True),
        }, "but not those from which it was restored, whose replay was checked"
        assert all(bad.reason == "the probe found other bits" for bad in found)
        assert "other bits" in rank.begin(5, Kind.DELTA).skip
        assert rank.save(5), "training goes on, with snapshots"


def test_rank_may_take_deltas_again(make_world: MakeWorld) -> None:
    world = auto(make_world(workers=2)).launch()
    with world.ranks(SIZE, DELTA) as (one, other):
        assert other.ask("no-deltas", message="they take longer than a step").ok
        until(lambda: world.report(0).snapshot_every == 50, "without")
        assert other.ask("no-deltas", message="").ok
        until(lambda: world.report(0).snapshot_every == CHAIN, "with deltas")
        assert one.save(1)
        keep_delta(one, 2)
    assert world.report(1).trainer.no_deltas == ""


def test_steps_that_the_sanity_gate_refused_are_told_to_the_controller(make_world: MakeWorld) -> None:
    world = make_world(procs=2).launch()
    serial = world.report(0).serial
    with world.ranks() as (one, other):
        one.send_progress(5, not_finite=2)
        other.send_progress(5)
        until(lambda: world.report(0).trainer.not_finite == 2, "the worst of all ranks")
        assert world.report(0).serial > serial
        one.send_progress(6, not_finite=3)
        until(lambda: world.report(0).counters.not_finite == 3, "counted once each")
        one.send_progress(7)
        until(lambda: world.report(0).trainer.not_finite == 0, "over")
    assert world.report(0).counters.not_finite == 3


def test_holdings_and_steps_wake_nobody(make_world: MakeWorld) -> None:
    """Thousands of workers with news at every step would leave the controller no time for what matters."""
    world = auto(make_world(workers=2)).launch()
    launchers = [FakeLauncher(world.run_dir(worker) / names.SOCKET_NAME) for worker in range(world.workers)]
    for launcher in launchers:  # of a trainer that does not run, what is not yet with its holders is news
        launcher.tell("started", 1)
    with world.ranks(SIZE, DELTA) as ranks:
        for rank in ranks:
            assert rank.save(1)
        world.reach("peer", Version(1, 1), 1)
        for rank in ranks:
            keep_delta(rank, 2)
        until(
            lambda: world.holds(1, 0, Version(2, 1), kind=Kind.DELTA),
            "how much room copies of deltas take is known",
        )
        until(
            lambda: world.report(1).watermarks.peer is not None and world.report(1).snapshot_every,
            "all is told",
        )
        serial = world.report(1).serial
        for step in range(3, 6):
            for rank in ranks:
                keep_delta(rank, step)
        until(lambda: world.holds(1, 1, Version(5, 1), kind=Kind.DELTA), "held")
        world.reach("local", Version(5, 1), 1)
        assert world.report(1).serial == serial
    for launcher in launchers:
        launcher.close()


def test_slow_directive_of_an_old_attempt_is_no_base_for_a_delta(world: World) -> None:
    with world.ranks(SIZE, DELTA) as (rank,):
        save_until(world, rank, 3)
    world.begin(Version(2, 1))
    with world.ranks(SIZE, DELTA) as (rank,):
        keep_delta(rank, 3)  # the same step again, in another attempt
        world.reach("local", Version(3, 2))
        until(lambda: not world.holds(0, 0, Version(3, 1), kind=Kind.DELTA), "what was cut off is dropped")


def test_job_that_ends_offers_its_newest_whole_snapshot_for_upload(make_world: MakeWorld) -> None:
    world = auto(make_world())
    (world.root / "store").mkdir()
    world.remote = '{"directory": {"path": "%s"}}' % (world.root / "store")
    world.launch()
    with world.ranks(SIZE, DELTA) as (rank,):
        save_until(world, rank, 2)
    world.direct(Phase.FINISH)
    assert world.terminate(0) == 0, world.logs(0)
    assert [path.name for path in (world.root / "store").rglob("manifests/*.json")] == ["000000000001-1.json"]


def test_deltas_reach_the_holder_and_count_for_the_peer_watermark(make_world: MakeWorld) -> None:
    world = auto(make_world(workers=2)).launch()
    with world.ranks(SIZE, DELTA) as ranks:
        for rank in ranks:
            assert rank.save(1)
        for step in range(2, 5):
            for rank in ranks:
                keep_delta(rank, step, 1000 * step)
        world.reach("peer", Version(4, 1))
        assert world.holds(1, 0, Version(4, 1), Tier.PEER, Kind.DELTA)
        assert world.report(0).watermarks.snapshot == Version(1, 1)


def test_rank_that_cannot_save_is_a_problem_of_its_worker_until_it_can_again(world: World) -> None:
    with world.ranks(SIZE, DELTA) as (rank,):
        assert rank.ask(
            "cannot-save", message="model/w: tensors of layout torch.sparse_coo cannot be stored"
        ).ok
        (problem,) = world.report(0).problems
        assert (problem.reason, problem.message[:6]) == ("CannotSave", "rank 0")
        assert "model/w" in problem.message
        assert rank.ask("cannot-save", message="").ok
        assert world.report(0).problems == ()
