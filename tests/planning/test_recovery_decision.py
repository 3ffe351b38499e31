"""What a job comes back to: the best version that every rank can rebuild, nearest sources first, and never a guess."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.clusters import racks
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import History, Version
from tiercheck_operator.planning.recovery import (
    Inventory,
    Missing,
    Recover,
    Refuse,
    RemoteInventory,
    RestoreSeconds,
    Situation,
    SourceChoice,
    StartFresh,
    Wait,
    decide_recovery,
    sources_for,
)

NO_REMOTE = RemoteInventory(configured=False)
LOCAL = SourceChoice(Tier.LOCAL)
REMOTE = SourceChoice(Tier.REMOTE)


def peer(worker: int) -> SourceChoice:
    return SourceChoice(Tier.PEER, worker)


def steps(*numbers: int, attempt: int = 1) -> set[Version]:
    return {Version(number, attempt) for number in numbers}


def situation(*inventories: Inventory, ranks: int, **more: object) -> Situation:
    """One rank per worker, a job in its first attempt, no remote tier, unless `more` says otherwise."""
    base = Situation(
        ranks=ranks, ranks_per_worker=1, history=History().after(1, 0), inventories=inventories, remote=NO_REMOTE
    )
    return replace(base, **more)  # type: ignore[arg-type]


versions = st.builds(Version, st.integers(1, 8), st.integers(1, 3))
held = st.frozensets(versions, max_size=5)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    workers = draw(st.integers(1, 4))
    per_worker = draw(st.integers(1, 2))
    ranks = workers * per_worker
    history = History()
    for attempt, base in enumerate(draw(st.lists(st.integers(0, 8), max_size=3)), start=1):
        history = history.after(attempt, base)
    answered = draw(st.sets(st.integers(0, workers - 1)))
    inventories = [
        Inventory(
            worker,
            {rank: draw(held) for rank in range(worker * per_worker, (worker + 1) * per_worker)},
            {rank: draw(held) for rank in range(ranks) if rank // per_worker != worker and draw(st.booleans())},
        )
        for worker in sorted(answered)
    ]
    remote = draw(st.builds(RemoteInventory, st.booleans(), st.sampled_from((None, True, False)), held))
    return Situation(
        ranks=ranks,
        ranks_per_worker=per_worker,
        history=history,
        inventories=inventories,
        remote=remote,
        silent=set(range(workers)) - answered if draw(st.booleans()) else frozenset(),
        distance=draw(st.sampled_from((None, lambda a, b: abs(a - b)))),
        step_seconds=draw(st.none() | st.floats(0.01, 100)),
        last_step=draw(st.none() | st.integers(0, 12)),
        target_step=draw(st.none() | st.integers(1, 8)),
    )


def rebuildable(job: Situation) -> set[Version]:
    """By brute force: the intersection over ranks of what any source holds."""
    sets = []
    for rank in range(job.ranks):
        found = set(job.remote.versions) if job.remote.configured and job.remote.reachable else set()
        for inventory in job.inventories:
            found |= set(inventory.own.get(rank, ())) | set(inventory.hosted.get(rank, ()))
        sets.append(found)
    return {version for version in set.intersection(*sets) if job.history.accepts(version)}


def holds(job: Situation, rank: int, source: SourceChoice, version: Version) -> bool:
    home = rank // job.ranks_per_worker
    if source.tier is Tier.REMOTE:
        return bool(job.remote.configured and job.remote.reachable and version in job.remote.versions)
    if source.tier is Tier.LOCAL:
        return any(i.worker == home and version in i.own.get(rank, ()) for i in job.inventories)
    return any(i.worker == source.worker != home and version in i.hosted.get(rank, ()) for i in job.inventories)


@given(situations())
@settings(deadline=None, max_examples=300)
def test_decision_is_one_that_brute_force_agrees_with(job: Situation) -> None:
    possible = rebuildable(job)
    if job.target_step is not None:
        possible = {version for version in possible if version.step == job.target_step}
    decision = decide_recovery(job)
    if isinstance(decision, Recover):
        assert decision.version in possible
        assert job.history.accepts(decision.version)
        if not job.step_seconds:
            assert decision.version == max(possible)
    else:
        assert not possible
        maybe = bool(job.silent) or (job.remote.configured and not job.remote.reachable)
        if isinstance(decision, StartFresh):
            assert job.target_step is None
            assert not job.history.branches or not maybe
        elif isinstance(decision, Refuse):
            assert job.target_step is not None
            assert not maybe
        else:
            assert isinstance(decision, Wait)
            assert maybe


@given(situations())
@settings(deadline=None, max_examples=300)
def test_every_named_source_holds_the_version_and_the_nearest_comes_first(job: Situation) -> None:
    decision = decide_recovery(job)
    if not isinstance(decision, Recover):
        return
    assert sorted(decision.sources) == list(range(job.ranks))
    order = [Tier.LOCAL, Tier.PEER, Tier.REMOTE]
    for rank, sources in decision.sources.items():
        assert sources
        assert all(holds(job, rank, source, decision.version) for source in sources)
        assert len(set(sources)) == len(sources)
        tiers = [order.index(source.tier) for source in sources]
        assert tiers == sorted(tiers)
        if job.distance is not None:
            far = [job.distance(rank // job.ranks_per_worker, s.worker) for s in sources if s.worker is not None]
            assert far == sorted(far)
        # None is left out either.
        everyone = [LOCAL, REMOTE, *(peer(inventory.worker) for inventory in job.inventories)]
        assert set(sources) == {source for source in everyone if holds(job, rank, source, decision.version)}
    assert sum(decision.tier_counts.values()) == job.ranks
    for tier, count in decision.tier_counts.items():
        assert count == sum(sources[0].tier is tier for sources in decision.sources.values())


@given(situations())
@settings(deadline=None)
def test_restarted_operator_finds_the_same_sources_for_the_decided_version(job: Situation) -> None:
    decision = decide_recovery(job)
    for version in {Version(1, 1), Version(5, 2)} | ({decision.version} if isinstance(decision, Recover) else set()):
        again = sources_for(
            version,
            ranks=job.ranks,
            ranks_per_worker=job.ranks_per_worker,
            inventories=job.inventories,
            remote=job.remote,
            distance=job.distance,
        )
        everyone = [LOCAL, REMOTE, *(peer(inventory.worker) for inventory in job.inventories)]
        lacking = tuple(
            rank for rank in range(job.ranks) if not any(holds(job, rank, source, version) for source in everyone)
        )
        assert (again == Missing(lacking)) if lacking else not isinstance(again, Missing)
        if isinstance(decision, Recover) and version == decision.version:
            assert again == decision.sources


def test_minimum_of_the_newest_is_not_taken_when_nobody_can_rebuild_it() -> None:
    job = situation(Inventory(0, {0: steps(8, 10)}), Inventory(1, {1: steps(8, 9)}), ranks=2)
    decision = decide_recovery(job)
    assert isinstance(decision, Recover)
    assert decision.version == Version(8, 1)


def test_lost_workers_rank_comes_from_its_peer_and_the_reason_says_so() -> None:
    job = situation(
        Inventory(0, {0: steps(40, 50)}),
        Inventory(1, {1: steps(40, 50)}, {2: steps(40)}),
        Inventory(2, {2: set()}),
        ranks=3,
        last_step=52,
    )
    decision = decide_recovery(job)
    assert isinstance(decision, Recover)
    assert decision.sources == {0: (LOCAL,), 1: (LOCAL,), 2: (peer(1),)}
    assert decision.lost_steps == 12
    assert decision.reason == (
        "step 40: newest version that every rank can rebuild; 2 ranks from own memory, 1 from a peer; "
        "step 50 is incomplete: rank 2 has no copy"
    )


def test_holder_in_the_same_rack_is_asked_before_one_further_away() -> None:
    cluster = racks(2, 2)
    node = [site.node for site in cluster.sites]
    job = situation(
        *(Inventory(worker, {}, {3: steps(5)}) for worker in (0, 1, 2)),
        Inventory(3, {}, {0: steps(5), 1: steps(5), 2: steps(5)}),
        ranks=4,
        distance=lambda a, b: cluster.topology.distance(node[a], node[b]),
    )
    decision = decide_recovery(job)
    assert isinstance(decision, Recover)
    assert decision.sources[3] == (peer(2), peer(0), peer(1))


def test_abandoned_history_is_not_restored_even_if_it_is_newer() -> None:
    history = History().after(1, 0).after(2, 40)
    job = situation(Inventory(0, {0: steps(40, 50)}), ranks=1, history=history)
    decision = decide_recovery(job)
    assert isinstance(decision, Recover)
    assert decision.version == Version(40, 1)


def test_memory_is_used_while_the_remote_tier_is_unreachable() -> None:
    remote = RemoteInventory(True, False, steps(60))
    decision = decide_recovery(situation(Inventory(0, {0: steps(50)}), ranks=1, remote=remote))
    assert isinstance(decision, Recover)
    assert decision.sources == {0: (LOCAL,)}


@pytest.mark.parametrize(("reachable", "says"), [(None, "has not been tried yet"), (False, "is unreachable")])
def test_nothing_is_started_afresh_while_the_remote_tier_cannot_be_seen(reachable: bool | None, says: str) -> None:
    decision = decide_recovery(situation(Inventory(0), ranks=1, remote=RemoteInventory(True, reachable)))
    assert isinstance(decision, Wait)
    assert says in decision.reason


def test_nothing_is_started_afresh_while_a_sidecar_is_silent() -> None:
    decision = decide_recovery(situation(Inventory(0), ranks=2, silent={1}))
    assert isinstance(decision, Wait)
    assert "waiting for worker 1" in decision.reason


def test_job_that_lost_everything_starts_afresh_and_says_why() -> None:
    decision = decide_recovery(situation(Inventory(0), ranks=1, remote=RemoteInventory(True, True)))
    assert isinstance(decision, StartFresh)
    assert "the remote tier holds none" in decision.reason


def test_first_attempt_starts_at_once_without_asking_the_remote_tier() -> None:
    decision = decide_recovery(
        situation(Inventory(0), ranks=1, history=History(), remote=RemoteInventory(True, None), silent={0})
    )
    assert isinstance(decision, StartFresh)


def test_loss_of_all_memory_comes_back_from_the_remote_tier() -> None:
    remote = RemoteInventory(True, True, steps(20, 40))
    decision = decide_recovery(situation(Inventory(0), Inventory(1), ranks=2, remote=remote, last_step=45))
    assert isinstance(decision, Recover)
    assert decision.version == Version(40, 1)
    assert decision.tier_counts == {Tier.REMOTE: 2}
    assert decision.lost_steps == 5


def test_rank_without_copy_is_mixed_in_from_the_remote_tier() -> None:
    remote = RemoteInventory(True, True, steps(40))
    decision = decide_recovery(situation(Inventory(0, {0: steps(40)}), Inventory(1), ranks=2, remote=remote))
    assert isinstance(decision, Recover)
    assert decision.sources == {0: (LOCAL, REMOTE), 1: (REMOTE,)}


def test_older_version_in_memory_wins_when_the_newer_one_takes_longer_to_fetch_than_to_train() -> None:
    remote = RemoteInventory(True, True, steps(41))
    job = situation(
        Inventory(0, {0: steps(40)}),
        ranks=1,
        remote=remote,
        step_seconds=1.0,
        restore_seconds=RestoreSeconds(local=1, peer=5, remote=100),
    )
    decision = decide_recovery(job)
    assert isinstance(decision, Recover)
    assert decision.version == Version(40, 1)
    assert "back sooner than from step 41" in decision.reason
    for step_seconds in (99.0, 1000.0):  # at 99 both cost the same: then the newer one
        slow = decide_recovery(replace(job, step_seconds=step_seconds))
        assert isinstance(slow, Recover)
        assert slow.version == Version(41, 1)


def test_asked_for_step_is_taken_refused_or_waited_for() -> None:
    memory = Inventory(0, {0: steps(30, 40)})
    asked = decide_recovery(situation(memory, ranks=1, target_step=30))
    assert isinstance(asked, Recover)
    assert asked.version == Version(30, 1)
    assert asked.reason.startswith("step 30: asked for by spec.restore")
    refused = decide_recovery(situation(memory, ranks=1, target_step=35))
    assert isinstance(refused, Refuse)
    assert refused.reason.startswith("step 35 was asked for, but no source holds it for every rank")
    assert isinstance(decide_recovery(situation(memory, ranks=1, target_step=35, silent={0})), Wait)


def test_ranks_that_do_not_fill_the_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        decide_recovery(situation(ranks=3, ranks_per_worker=2))
