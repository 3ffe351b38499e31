"""Training never waits for a holder of parity; bandwidth is kept to, and a person is told.

Whole sidecars under parity bring back what is lost by the directive alone.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.sidecar.journeys.strikes import Strikes
from tests.sidecar.stations import Group, MakeJob
from tests.sidecar.world import MakeWorld, World, content, layout, until
from tiercheck import supervised
from tiercheck.protocol.directive import Directive, ParityGroup, Phase, Policy, Source, Tier
from tiercheck.protocol.report import Report
from tiercheck.protocol.version import Artifact, Kind, Version
from tiercheck_sidecar.replicate.lane import Lane

V = Version(10, 1)


def problems(job: Group, worker: int) -> list[str]:
    return [each.message for each in job.stations[worker].state.problems if each.reason == "PeerUnreachable"]


def test_holder_that_does_not_answer_is_told_and_taken_back_when_it_does(job: Group) -> None:
    job.stations[2].stop()
    job.save(V, 100_000)
    job.name(V)
    (told,) = until(lambda: problems(job, 0), "the member says so")
    assert told.startswith("Worker 2 takes no parity: ")
    job.lose(2)
    job.stations[2].follow(job.directive(2))
    job.stations[2].name(V)
    until(lambda: V in job.stations[0].copied(0), "protected")
    until(lambda: not problems(job, 0), "the member takes it back")


def test_last_word_of_a_holder_is_the_one_that_stays(job: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots and deltas are told of by two threads."""
    job.protect(V, 100_000)
    state, sender = job.stations[0].state, job.stations[0].sender
    era = sender._era
    assert era is not None
    real, held, go_on = state.problem, threading.Event(), threading.Event()

    def late(reason: str, message: str) -> None:
        if message:
            held.set()
            go_on.wait(60)
        real(reason, message)

    monkeypatch.setattr(state, "problem", late)
    words = [(Kind.SNAPSHOT, "it is full"), (Kind.SNAPSHOT, "")]
    threads = [
        threading.Thread(target=sender.report, args=(Lane(sender, era.holders[0], kind, era), why))
        for kind, why in words
    ]
    threads[0].start()
    assert held.wait(60)
    threads[1].start()
    threads[1].join(0.2)  # if it does not wait for the first, it is over now
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert problems(job, 0) == []


def test_holder_that_ends_is_left_for_the_one_that_takes_its_place(job: Group) -> None:
    """Or its last word, that it has everything, would be asked for again and again."""
    job.protect(V, 100_000)
    job.lose(2)
    job.stations[2].follow(job.directive(2))
    job.name(V)
    until(job.stations[2].blocks, "the members bring it anew")


def test_one_holder_in_trouble_does_not_hide_behind_the_other(make_job: MakeJob) -> None:
    job = make_job(data=2, parity=2)
    job.stations[3].stop()
    for step in (10, 11):
        job.save(Version(step, 1), 100_000)
        job.name(Version(step, 1))
        until(lambda: [1 for each in problems(job, 0) if each.startswith("Worker 3 ")], "worker 3 is named")
    assert job.stations[0].copied(0) == [], "one block of two is not enough to count"
    assert not [1 for each in problems(job, 0) if "Worker 2" in each]


def test_what_was_brought_is_counted_once(make_job: MakeJob) -> None:
    job = make_job(data=2, parity=1, procs=2)
    job.protect(V, 100_000)
    state = job.stations[0].state
    until(lambda: state.counters.replicated == 2, "two ranks at one holder")
    job.next_attempt(V.step)
    until(lambda: V in job.stations[0].copied(0), "the holder says again what it has")
    assert state.counters.replicated == 2


def test_own_artifact_that_rotted_is_quarantined_instead_of_being_sent_for_ever(job: Group) -> None:
    member = job.stations[0]
    job.save_rank(0, V, 1_000_000)
    job.spoil(0, V, 500_000)
    job.name(V)
    until(lambda: member.state.quarantined, "the member looks at its own memory")
    assert (member.state.quarantined[0].worker, member.state.quarantined[0].version) == (0, V)
    assert member.vault.find(Artifact(0, V)) is None


def test_deltas_and_snapshots_share_the_workers_bandwidth(job: Group) -> None:
    taken: list[int] = []
    for station in job.members:
        plain = station.sender.bucket.take
        station.sender.bucket.set_rate(1 << 30)
        station.sender.bucket.take = lambda size, plain=plain: (taken.append(size), plain(size))  # type: ignore[method-assign, misc]
    saved = job.protect(V, 1_000_000)
    job.save(Version(11, 1), 50_000, kind=Kind.DELTA)
    until(lambda: Version(11, 1) in job.stations[0].copied(0, Kind.DELTA), "the delta is protected")
    assert sum(taken) >= sum(map(len, saved.values())) + 2 * 50_000


def test_blocks_are_made_and_counted_although_every_wait_of_every_lane_fails_once(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    strikes = Strikes(monkeypatch)
    job = make_job(data=2, parity=1)
    job.protect(V, 100_000)
    until(lambda: not strikes.spared(), "all fail")
    assert set(strikes.begun.values()) >= {
        "status-of-worker-2",
        "snapshots-to-worker-2",
        "deltas-to-worker-2",
    }
    job.protect(Version(11, 1), 100_000)


def test_lanes_that_got_no_thread_at_first_are_begun_later(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "FIRST", 0.01)
    real, refused = threading.Thread.start, set[str]()

    def start(thread: threading.Thread) -> None:
        if thread.name.endswith("-worker-2") and thread.name not in refused:
            refused.add(thread.name)
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    job = make_job(data=2, parity=1)
    job.protect(V, 100_000)
    assert len(refused) == 3


SIZE, DELTA = 3_000_000, 200_000


class ParityWorld(World):
    """Groups instead of copies, each as (members, holders)."""

    def __init__(
        self, *arguments: Any, groups: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], **more: Any
    ) -> None:
        super().__init__(*arguments, **more)
        self.policy = Policy(snapshot_every=4, remote_every=1_000_000, remote_keep=5)
        self.groups = [
            ParityGroup(tuple(map(self.peer, members)), tuple(map(self.peer, holders)))
            for members, holders in groups
        ]

    def directive(self, worker: int, phase: Phase, *arguments: Any, **more: Any) -> Directive:
        plain = super().directive(worker, phase, *arguments, **{**more, "holders": ()})
        me = self.peer(worker)
        return replace(
            plain,
            parity=next(group for group in self.groups if me in group.members),
            folded=tuple(group for group in self.groups if me in group.holders),
            placement=repr([[peer.worker for peer in group.holders] for group in self.groups]),
        )

    def from_parity(self, worker: int) -> dict[int, tuple[Source, ...]]:
        group = next(group for group in self.groups if self.peer(worker) in group.members)
        ranks = range(worker * self.procs, (worker + 1) * self.procs)
        return {rank: (Source(Tier.PEER, parity=group),) for rank in ranks}

    def restored(self, worker: int) -> Report:
        return until(
            lambda: report if (report := self.report(worker)).restore.state.value == "Ready" else None,
            "restored",
        )


def body(path: str, size: int) -> bytes:
    begin = layout(size).data_begin
    return Path(path).read_bytes()[begin : layout(size).size]


def test_lost_worker_comes_back_from_parity_with_every_step_since_the_snapshot(make_world: MakeWorld) -> None:
    world = make_world(ParityWorld, workers=4, procs=2, groups=(((0, 1), (2,)), ((2, 3), (0,)))).launch()
    world.train(6, 4, SIZE, DELTA)
    world.renew(0)
    world.begin(Version(6, 1), world.from_parity(0))
    for rank in world.restored(0).restore.ranks:
        assert (rank.tier, rank.worker, rank.rebuilt, rank.deltas) == (Tier.PEER, None, True, 2), rank
    for rank in range(2):
        with world.rank(rank) as trainer:
            welcome = trainer.welcome
            assert welcome.restore_version == Version(6, 1)
            assert welcome.restore_source == "peer memory (rebuilt from parity)"
            assert body(welcome.restore_path, SIZE) == content(
                rank, 4, layout(SIZE).size - layout(SIZE).data_begin
            )
            for step, path in zip((5, 6), welcome.restore_deltas, strict=True):
                assert body(path, DELTA) == content(rank, step, layout(DELTA).size - layout(DELTA).data_begin)
    world.reach("peer", Version(6, 1))


def test_both_members_of_a_group_come_back_from_two_blocks(make_world: MakeWorld) -> None:
    world = make_world(ParityWorld, workers=4, groups=(((0, 1), (2, 3)), ((2, 3), (0, 1)))).launch()
    world.train(5, 4, SIZE, DELTA)
    world.renew(0, 1)
    world.begin(Version(5, 1), world.from_parity(0) | world.from_parity(1))
    for worker in (0, 1):
        (rank,) = world.restored(worker).restore.ranks
        assert (rank.tier, rank.rebuilt, rank.deltas) == (Tier.PEER, True, 1), rank
        with world.rank(worker) as trainer:
            path = trainer.welcome.restore_path
            assert body(path, SIZE) == content(worker, 4, layout(SIZE).size - layout(SIZE).data_begin)


def test_training_goes_on_under_parity_in_bounded_memory(make_world: MakeWorld) -> None:
    world = make_world(ParityWorld, workers=3, groups=(((0, 1), (2,)), ((2,), (0,))), limit=48 << 20).launch()
    for snapshot in (4, 8, 12, 16):
        world.train(snapshot + 3, snapshot, SIZE, DELTA)
    for worker in range(3):
        assert world.report(worker).memory.used <= 48 << 20
        assert not world.report(worker).problems


def test_blocks_move_to_other_holders_in_an_attempt_and_are_of_use_there(make_world: MakeWorld) -> None:
    world = make_world(ParityWorld, workers=4, groups=(((0, 1), (2,)), ((2, 3), (0,))))
    world.start(0, 1, 2, 3)
    world.begin()
    version = Version(5, 1)
    world.train(5, 4, SIZE, DELTA)
    world.groups = [
        ParityGroup((world.peer(0), world.peer(1)), (world.peer(3),)),
        ParityGroup((world.peer(2), world.peer(3)), (world.peer(1),)),
    ]
    world.direct(Phase.RELEASE)

    def blocks(worker: int) -> bool:
        return any(
            each.share is not None and each.version.step == 4 for each in world.report(worker).holdings
        )

    def moved() -> bool:
        new = blocks(3) and blocks(1)
        # Asked before the old ones: a block may go only when all new ones are complete.
        assert (blocks(2) and blocks(0)) or (blocks(3) and blocks(1))
        return new

    until(moved, "the blocks at the new holders")
    world.reach("peer", version)
    world.renew(0)
    world.begin(version, world.from_parity(0) | {rank: (Source(Tier.LOCAL),) for rank in (1, 2, 3)})
    assert world.restored(0).restore.ranks[0].rebuilt
