"""Blocks of parity give what nobody has of ranks that are no more, if there are enough."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Artifact, History, Kind, Share, Version
from tiercheck_operator.planning.parity.code_groups import OldGroup
from tiercheck_operator.planning.recovery.availability import (
    Artifacts,
    JobInventory,
    Missing,
    RemoteInventory,
)
from tiercheck_operator.planning.recovery.recovery import Recover, RecoveryProblem, decide_recovery

OLD = Version(8, 1)
GROUPS = ((0, 1, 2), (3, 4), (2, 1, 0))
"""The last is of another placement of the same ranks."""
HISTORY = History().after(1, 0, 5).after(2, 8, 3)


@st.composite
def inventories(draw: st.DrawFn) -> list[JobInventory]:
    """Of three workers, who hold snapshots of five old ranks, and blocks."""
    held = st.frozensets(st.integers(0, 4), max_size=4)
    blocks = st.frozensets(st.tuples(st.sampled_from(GROUPS), st.integers(0, 1)), max_size=3)
    return [
        JobInventory(
            worker,
            {rank: Artifacts({OLD}) for rank in draw(held)},
            blocks={Share(index, ranks): Artifacts({OLD}) for ranks, index in draw(blocks)},
        )
        for worker in range(3)
    ]


def situation(kept: list[JobInventory]) -> RecoveryProblem:
    return RecoveryProblem(3, 1, HISTORY, kept, RemoteInventory(False))


def who(kept: list[JobInventory], rank: int) -> set[int]:
    return {entry.worker for entry in kept if rank in entry.own}


def keepers(kept: list[JobInventory], share: Share) -> set[int]:
    return {entry.worker for entry in kept if share in entry.blocks}


def given_by(kept: list[JobInventory], ranks: tuple[int, ...]) -> bool:
    """By definition: as many different blocks as ranks of the group are nowhere."""
    blocks = sum(bool(keepers(kept, Share(index, ranks))) for index in range(2))
    return sum(not who(kept, rank) for rank in ranks) <= blocks


@given(inventories())
def test_rank_is_missing_exactly_if_nobody_has_it_and_no_group_gives_it(kept: list[JobInventory]) -> None:
    missing = tuple(
        rank
        for rank in range(5)
        if not who(kept, rank) and not any(rank in ranks and given_by(kept, ranks) for ranks in GROUPS)
    )
    stock = situation(kept).stock
    if stock.versions:
        assert stock.lacking(OLD) == missing
    found = stock.sources(OLD)
    if missing:
        assert found == Missing(missing)
        return
    assert not isinstance(found, Missing)
    for rank, places in found.items():
        assert {place.worker for place in places if place.group is None} == who(kept, rank)
        groups = [place.group for place in places if place.group is not None]
        assert bool(groups) == (not who(kept, rank)), "nothing is rebuilt that somebody has"
        for group in groups:
            assert isinstance(group, OldGroup)
            assert rank in group.ranks
            for other, worker in zip(group.ranks, group.members, strict=True):
                assert worker in who(kept, other) if worker is not None else not who(kept, other)
            for index, worker in enumerate(group.holders):
                share = Share(index, group.ranks)
                assert worker in keepers(kept, share) if worker is not None else not keepers(kept, share)


def test_snapshot_is_rebuilt_whatever_deltas_lead_to_and_each_place_is_named() -> None:
    base, delta = Version(6, 1), Version(7, 1)
    history = History().after(1, 0, 3).after(2, 7, 2)
    both = Artifacts({base}, {delta})
    kept = [
        JobInventory(0, {0: both}, {1: Artifacts((), {delta})}, {Share(0, (0, 1, 2)): both}),
        JobInventory(1, {1: Artifacts({base})}),
    ]
    decision = decide_recovery(RecoveryProblem(2, 1, history, kept, RemoteInventory(False)))
    assert isinstance(decision, Recover)
    assert (decision.version, decision.tier_counts) == (base, {Tier.PEER: 3})
    assert [place.group for place in decision.sources[2]] == [OldGroup((0, 1, 2), (0, 1, None), (0,))]


def test_block_that_a_member_keeps_since_workers_were_numbered_anew_breaks_nothing() -> None:
    """Three workers, then two, then three again: block 1 of the first three lies at one who is a member
    now.
    """
    history = History().after(1, 0, 3).after(2, 8, 2).after(3, 9, 3)
    held = {rank: Artifacts({OLD}) for rank in range(3)}
    kept = [JobInventory(rank, {rank: held[rank]}) for rank in range(2)]
    kept.append(JobInventory(2, blocks={Share(1, (0, 1, 2)): Artifacts({OLD})}))
    job = RecoveryProblem(3, 1, history, kept, RemoteInventory(False))
    decision = decide_recovery(job)
    assert isinstance(decision, Recover)
    assert decision.version == OLD


def test_what_turned_out_bad_everywhere_is_not_rebuilt_either() -> None:
    kept = [
        JobInventory(
            0, {0: Artifacts({OLD}), 1: Artifacts({OLD})}, blocks={Share(0, (0, 1, 2)): Artifacts({OLD})}
        )
    ]
    history = History().after(1, 0, 3).after(2, 8, 2)
    job = RecoveryProblem(2, 1, history, kept, RemoteInventory(False), bad={Artifact(2, OLD, Kind.SNAPSHOT)})
    assert job.stock.lacking(OLD) == (2,)
