"""Whole sidecars under parity bring back what is lost by the directive alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.sidecar.world import MakeWorld, World, content, layout, until
from tiercheck.protocol.directive import Directive, ParityGroup, Phase, Policy, Source, Tier
from tiercheck.protocol.report import Report
from tiercheck.protocol.version import Version

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
    world.lose(0)
    world.start(0)
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
    world.lose(0, 1)
    world.start(0, 1)
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
    world.lose(0)
    world.start(0)
    world.begin(version, world.from_parity(0) | {rank: (Source(Tier.LOCAL),) for rank in (1, 2, 3)})
    assert world.restored(0).restore.ranks[0].rebuilt
