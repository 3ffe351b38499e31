"""Versions of another number of ranks: complete if a snapshot of all who made them is found, wherever."""

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

OLD, NEW = Version(8, 1), Version(12, 2)
ranks = st.integers(1, 4)
tables = st.dictionaries(st.integers(0, 4), st.sampled_from(("snapshot", "delta", "both")), max_size=5)


def artifacts(version: Version, what: str) -> Artifacts:
    return Artifacts(
        frozenset({version} if what != "delta" else ()), frozenset({version} if what != "snapshot" else ())
    )


@st.composite
def situations(draw: st.DrawFn) -> RecoveryProblem:
    """The old ranks made step 8; there are others now, whose workers hold anything of it."""
    before, now = draw(ranks), draw(ranks)
    inventories = [
        JobInventory(
            worker,
            {rank: artifacts(OLD, what) for rank, what in draw(tables).items()},
            {rank: artifacts(OLD, what) for rank, what in draw(tables).items()},
        )
        for worker in range(now)
    ]
    stored = draw(st.booleans())
    return RecoveryProblem(
        ranks=now,
        ranks_per_worker=1,
        history=History().after(1, 0, before).after(2, 8, now),
        inventories=inventories,
        remote=RemoteInventory(True, True, {OLD} if stored else ()),
    )


def keepers(job: RecoveryProblem, rank: int) -> set[int]:
    """By definition: who has the whole snapshot of that rank."""
    return {
        inventory.worker
        for inventory in job.inventories
        for table in (inventory.own, inventory.hosted)
        if rank in table and OLD in table[rank].snapshots
    }


@given(situations())
def test_every_old_rank_is_named_with_those_who_hold_it(job: RecoveryProblem) -> None:
    before = job.history.ranks_of(OLD)
    if before == job.ranks:
        return
    found = job.stock.sources(OLD)
    stored = OLD in job.remote.usable
    missing = [rank for rank in range(before) if not keepers(job, rank) and not stored]
    if missing:
        assert found == Missing(tuple(missing))
        return
    assert not isinstance(found, Missing)
    assert sorted(found) == list(range(before))
    for rank, places in found.items():
        assert {place.worker for place in places if place.tier is Tier.PEER} == keepers(job, rank)
        assert all(place.tier is not Tier.LOCAL for place in places), "nobody is at home any more"
        assert (places[-1].tier is Tier.REMOTE) == stored


@given(situations())
def test_it_is_recovered_exactly_if_nobody_is_missing(job: RecoveryProblem) -> None:
    if job.history.ranks_of(OLD) == job.ranks:
        return
    outcome = decide_recovery(job)
    complete = not job.stock.of(OLD).lacking(OLD)
    assert isinstance(outcome, Recover) == complete
    if isinstance(outcome, Recover):
        assert sum(outcome.tier_counts.values()) == job.history.ranks_of(OLD)
        assert f"made by {job.history.ranks_of(OLD)} ranks" in outcome.reason


def test_newer_version_of_the_present_ranks_is_taken_before_it() -> None:
    held = {rank: Artifacts({NEW}) for rank in range(2)}
    job = RecoveryProblem(
        ranks=2,
        ranks_per_worker=1,
        history=History().after(1, 0, 4).after(2, 8, 2).after(3, 12, 2),
        inventories=[JobInventory(rank, {rank: held[rank]}) for rank in range(2)],
        remote=RemoteInventory(True, True, {OLD}),
    )
    outcome = decide_recovery(job)
    assert isinstance(outcome, Recover)
    assert outcome.version == NEW
    assert outcome.tier_counts == {Tier.LOCAL: 2}


def test_artifacts_of_both_sizes_are_never_one_chain() -> None:
    """A delta of the two ranks after the four's snapshot leads nowhere, though steps and rank numbers fit."""
    after = Version(9, 2)
    job = RecoveryProblem(
        ranks=2,
        ranks_per_worker=1,
        history=History().after(1, 0, 4).after(2, 8, 2).after(3, 9, 2),
        inventories=[JobInventory(rank, {rank: Artifacts({OLD}, {after})}) for rank in range(2)],
        remote=RemoteInventory(False),
    )
    assert job.stock.of(after).lacking(after) == (0, 1)
    assert job.stock.of(OLD).lacking(OLD) == (2, 3)


STEPS = [Version(step, 1) for step in range(4, 9)]
some = st.frozensets(st.sampled_from(STEPS))


@st.composite
def chains(draw: st.DrawFn) -> RecoveryProblem:
    """Old ranks took snapshots and deltas at any of five steps; workers of another number of ranks hold any
    of them."""
    before, now = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    often = st.one_of(st.just(frozenset(STEPS)), some)
    held = [
        {rank: Artifacts(draw(some), draw(often)) for rank in range(before)}
        for _ in range(draw(st.integers(1, 2)))
    ]
    rank = draw(st.integers(0, before - 1))
    bad = (
        {Artifact(rank, draw(st.sampled_from(STEPS)), draw(st.sampled_from(Kind)))}
        if draw(st.booleans())
        else set()
    )
    return RecoveryProblem(
        ranks=now,
        ranks_per_worker=1,
        history=History().after(1, 0, before).after(2, 8, now),
        inventories=[JobInventory(worker, {}, hosted) for worker, hosted in enumerate(held)],
        remote=RemoteInventory(True, True, draw(st.sampled_from([(), (STEPS[0],)]))),
        bad=bad,
    )


def common_snapshots(job: RecoveryProblem) -> list[Version]:
    """By definition: those that can be had of every old rank, oldest first."""

    def there(rank: int, wanted: Version) -> bool:
        if Artifact(rank, wanted, Kind.SNAPSHOT) in job.bad:
            return False
        held = [entry.hosted[rank] for entry in job.inventories]
        return wanted in job.remote.usable or any(wanted in each.snapshots for each in held)

    old = range(job.history.ranks_of(STEPS[0]))
    return [wanted for wanted in STEPS if all(there(rank, wanted) for rank in old)]


@given(chains())
def test_other_ranks_come_back_to_the_newest_snapshot_that_all_old_ones_had_and_no_delta_counts(
    job: RecoveryProblem,
) -> None:
    if job.history.ranks_of(STEPS[0]) == job.ranks:
        return
    common, stock = common_snapshots(job), job.stock
    for version in stock.versions:
        assert (not stock.of(version).lacking(version)) == (version in common), version
        assert all(stock.of(version).gap(rank, version) for rank in stock.of(version).lacking(version))
        assert stock.of(version).farthest_tier(version) in (
            (Tier.PEER, Tier.REMOTE) if version in common else (None,)
        )
    outcome = decide_recovery(job)
    assert isinstance(outcome, Recover) == bool(common)
    if isinstance(outcome, Recover):
        assert outcome.version == common[-1]
        for rank, places in outcome.sources.items():
            for place in places:
                held = (
                    job.remote.usable
                    if place.worker is None
                    else job.inventories[place.worker].hosted[rank].snapshots
                )
                assert outcome.version in held


# Parity of ranks that are no more.


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


def block_keepers(kept: list[JobInventory], share: Share) -> set[int]:
    return {entry.worker for entry in kept if share in entry.blocks}


def given_by(kept: list[JobInventory], ranks: tuple[int, ...]) -> bool:
    """By definition: as many different blocks as ranks of the group are nowhere."""
    blocks = sum(bool(block_keepers(kept, Share(index, ranks))) for index in range(2))
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
        assert stock.of(OLD).lacking(OLD) == missing
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
                assert (
                    worker in block_keepers(kept, share)
                    if worker is not None
                    else not block_keepers(kept, share)
                )


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
    assert job.stock.of(OLD).lacking(OLD) == (2,)
