"""A job comes back to the best version that every rank can rebuild, nearest sources first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.operator.planning.clusters import racks
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Artifact, History, Kind, Share, Version, chain_to, rebuildable
from tiercheck_operator.model.saved_placement import CodeGroup
from tiercheck_operator.planning.recovery.availability import (
    Artifacts,
    JobInventory,
    Missing,
    RemoteInventory,
    SourceChoice,
)
from tiercheck_operator.planning.recovery.recovery import (
    Recover,
    RecoveryProblem,
    Refuse,
    RestoreSeconds,
    StartFresh,
    Wait,
    decide_recovery,
)

NO_REMOTE = RemoteInventory(configured=False)
LOCAL = SourceChoice(Tier.LOCAL)
REMOTE = SourceChoice(Tier.REMOTE)


def peer(worker: int) -> SourceChoice:
    return SourceChoice(Tier.PEER, worker)


def versions_of(*numbers: int, attempt: int = 1) -> set[Version]:
    return {Version(number, attempt) for number in numbers}


def steps(*snapshots: int, deltas: Iterable[int] = (), attempt: int = 1) -> Artifacts:
    """What one place holds of a rank."""
    return Artifacts(versions_of(*snapshots, attempt=attempt), versions_of(*deltas, attempt=attempt))


def situation(*inventories: JobInventory, ranks: int, **more: object) -> RecoveryProblem:
    """One rank per worker, a job in its first attempt, no remote tier, unless `more` says otherwise."""
    base = RecoveryProblem(
        ranks=ranks,
        ranks_per_worker=1,
        history=History().after(1, 0),
        inventories=inventories,
        remote=NO_REMOTE,
    )
    return replace(base, **more)  # type: ignore[arg-type]


def coded(*inventories: JobInventory, ranks: int, **more: object) -> Recover:
    found = decide_recovery(situation(*inventories, ranks=ranks, **more))
    assert isinstance(found, Recover)
    return found


versions = st.builds(Version, st.integers(1, 8), st.integers(1, 3))
held = st.frozensets(versions, max_size=5)
artifacts = st.builds(Artifacts, held, held)


@st.composite
def situations(draw: st.DrawFn) -> RecoveryProblem:
    """Up to four workers of one or two ranks that hold anything of themselves and of others, and blocks of
    any parity group."""
    workers = draw(st.integers(1, 4))
    per_worker = draw(st.integers(1, 2))
    ranks = workers * per_worker
    history = History()
    for attempt, base in enumerate(draw(st.lists(st.integers(0, 8), max_size=3)), start=1):
        history = history.after(attempt, base)
    answered = draw(st.sets(st.integers(0, workers - 1)))
    lanes = draw(st.permutations(range(workers)))[: draw(st.integers(0, workers))]
    group = tuple(worker * per_worker for worker in lanes)
    inventories = [
        JobInventory(
            worker,
            {rank: draw(artifacts) for rank in range(worker * per_worker, (worker + 1) * per_worker)},
            {
                rank: draw(artifacts)
                for rank in range(ranks)
                if rank // per_worker != worker and draw(st.booleans())
            },
            {Share(draw(st.integers(0, 1)), group): draw(artifacts)}
            if group and worker not in lanes and draw(st.booleans())
            else {},
        )
        for worker in sorted(answered)
    ]
    remote = draw(st.builds(RemoteInventory, st.booleans(), st.sampled_from((None, True, False)), held))
    return RecoveryProblem(
        ranks=ranks,
        ranks_per_worker=per_worker,
        history=history,
        inventories=inventories,
        remote=remote,
        distance=draw(st.sampled_from((None, lambda a, b: abs(a - b)))),
        step_seconds=draw(st.none() | st.floats(0.01, 100)),
        last_step=draw(st.none() | st.integers(0, 12)),
        target_step=draw(st.none() | st.integers(1, 8)),
        bad=draw(
            st.sets(
                st.builds(Artifact, st.integers(0, ranks - 1), versions, st.sampled_from(Kind)), max_size=2
            )
        ),
    )


def home(job: RecoveryProblem, rank: int) -> int:
    return rank // job.ranks_per_worker


def at(job: RecoveryProblem, place: SourceChoice, artifact: Artifact) -> bool:
    """By definition: whether that place alone can give the artifact."""
    rank, version = artifact.rank, artifact.version
    if artifact in job.bad:
        return False
    if place.tier is Tier.REMOTE:
        return artifact.kind is Kind.SNAPSHOT and version in job.remote.usable
    if place.group is not None:
        return by_parity(job, artifact)
    worker = home(job, rank) if place.tier is Tier.LOCAL else place.worker
    if place.tier is Tier.PEER and worker == home(job, rank):
        return False
    return any(
        version in of_kind(table[rank], artifact.kind)
        for inventory in job.inventories
        if inventory.worker == worker
        for table in (inventory.own, inventory.hosted)
        if rank in table
    )


def of_kind(held_there: Artifacts, kind: Kind) -> set[Version]:
    return set(held_there.snapshots if kind is Kind.SNAPSHOT else held_there.deltas)


def by_parity(job: RecoveryProblem, artifact: Artifact) -> bool:
    """If the rank had nothing: its group's other members that hold their own, and distinct blocks, make as
    many as the group has."""
    shares = {
        share for inventory in job.inventories for share in inventory.blocks if artifact.rank in share.ranks
    }
    for ranks in {share.ranks for share in shares}:
        indices = {
            share.index
            for inventory in job.inventories
            for share, block in inventory.blocks.items()
            if share.ranks == ranks and artifact.version in of_kind(block, artifact.kind)
        }
        others = [replace(artifact, rank=rank) for rank in ranks if rank != artifact.rank]
        if len(indices) + sum(at(job, LOCAL, other) for other in others) >= len(ranks) and indices:
            return True
    return False


PARITY = SourceChoice(Tier.PEER, group=CodeGroup((), ()))
"""Any group."""


def held_by(
    job: RecoveryProblem, rank: int, places: Iterable[SourceChoice]
) -> tuple[set[Version], set[Version]]:
    every = [Version(step, attempt) for step in range(1, 9) for attempt in range(1, 4)]
    snapshots, deltas = (
        {
            version
            for version in every
            if any(at(job, place, Artifact(rank, version, kind)) for place in places)
        }
        for kind in (Kind.SNAPSHOT, Kind.DELTA)
    )
    return snapshots, deltas


def everywhere(job: RecoveryProblem) -> list[SourceChoice]:
    return [LOCAL, PARITY, REMOTE, *(peer(inventory.worker) for inventory in job.inventories)]


def possible_versions(job: RecoveryProblem) -> set[Version]:
    """By brute force: the intersection over ranks of what the union of all places leads to."""
    sets = [rebuildable(*held_by(job, rank, everywhere(job)), job.history) for rank in range(job.ranks)]
    return set(frozenset.intersection(*sets))


@given(situations())
@settings(deadline=None, max_examples=examples(300))
def test_decision_is_one_that_brute_force_agrees_with(job: RecoveryProblem) -> None:
    possible = possible_versions(job)
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
        maybe = job.remote.configured and not job.remote.reachable
        if isinstance(decision, StartFresh):
            assert job.target_step is None
            assert not job.history.branches or not maybe
        elif isinstance(decision, Refuse):
            assert job.target_step is not None
            assert not maybe
        else:
            assert isinstance(decision, Wait)
            assert maybe


def nearest(job: RecoveryProblem, rank: int, version: Version) -> Tier:
    """The farthest tier that the rank needs, by definition."""
    memory = [place for place in everywhere(job) if place is not REMOTE]
    for tier, places in ((Tier.LOCAL, [LOCAL]), (Tier.PEER, memory)):
        if chain_to(version, *held_by(job, rank, places), job.history):
            return tier
    return Tier.REMOTE


@given(situations())
@settings(deadline=None, max_examples=examples(300))
def test_named_sources_are_those_that_hold_something_of_the_chain_and_the_nearest_comes_first(
    job: RecoveryProblem,
) -> None:
    decision = decide_recovery(job)
    if not isinstance(decision, Recover):
        return
    assert sorted(decision.sources) == list(range(job.ranks))
    order = [Tier.LOCAL, Tier.PEER, Tier.REMOTE]
    for rank, sources in decision.sources.items():
        assert len(set(sources)) == len(sources)
        tiers = [order.index(source.tier) for source in sources]
        assert tiers == sorted(tiers)
        if job.distance is not None:
            far = [job.distance(home(job, rank), s.worker) for s in sources if s.worker is not None]
            assert far == sorted(far)
        # Together they lead to the version, and none that has a part in it is left out.
        assert decision.version in rebuildable(*held_by(job, rank, sources), job.history)
        snapshots, deltas = held_by(job, rank, everywhere(job))
        wanted = of_any_chain(job, rank, decision.version, snapshots, deltas)
        named = {PARITY if source.group is not None else source for source in sources}
        assert named == {
            place for place in everywhere(job) if any(at(job, place, artifact) for artifact in wanted)
        }
    for tier, count in decision.tier_counts.items():
        assert count == sum(nearest(job, rank, decision.version) is tier for rank in range(job.ranks))
    assert sum(decision.tier_counts.values()) == job.ranks


def of_any_chain(
    job: RecoveryProblem, rank: int, version: Version, snapshots: set[Version], deltas: set[Version]
) -> set[Artifact]:
    wanted: set[Artifact] = set()
    for base in snapshots:
        chain = chain_to(version, {base}, deltas, job.history)
        if chain is not None:
            wanted.add(Artifact(rank, chain.base))
            wanted |= {Artifact(rank, delta, Kind.DELTA) for delta in chain.deltas}
    return wanted


@given(situations())
@settings(deadline=None)
def test_restarted_operator_finds_the_same_sources_for_the_decided_version(job: RecoveryProblem) -> None:
    decision = decide_recovery(job)
    for version in {Version(1, 1), Version(5, 2)} | (
        {decision.version} if isinstance(decision, Recover) else set()
    ):
        again = job.stock.sources(version, job.distance)
        lacking = tuple(
            rank
            for rank in range(job.ranks)
            if chain_to(version, *held_by(job, rank, everywhere(job)), job.history) is None
        )
        assert (again == Missing(lacking)) if lacking else not isinstance(again, Missing)
        if isinstance(decision, Recover) and version == decision.version:
            assert again == decision.sources


def test_all_ranks_begin_from_a_snapshot_that_all_of_them_have() -> None:
    """Replicas put it together from the shares of all. The lost rank's holder has no copy of the newest."""
    own = steps(400, 405, deltas=range(401, 407))
    copy = steps(400, deltas=range(401, 407))
    decision = coded(
        JobInventory(0, {0: own}, {1: copy}), JobInventory(1, {}), JobInventory(2, {2: own}), ranks=3
    )
    assert (decision.version, decision.base) == (Version(406, 1), Version(400, 1))


def test_snapshot_that_most_have_in_their_own_memory_is_the_one_to_begin_from() -> None:
    both, newest = steps(4, 8, deltas=range(5, 10)), steps(8, deltas=[9])
    decision = coded(
        JobInventory(0, {0: both}, {1: newest}), JobInventory(1, {1: steps(4, deltas=range(5, 10))}), ranks=2
    )
    assert (decision.version, decision.base) == (Version(9, 1), Version(4, 1))


def test_snapshot_in_memory_is_begun_from_before_a_newer_one_in_the_remote_tier() -> None:
    held = steps(4, deltas=range(5, 10))
    stored = RemoteInventory(configured=True, reachable=True, versions=versions_of(8))
    decision = coded(JobInventory(0, {0: held}), JobInventory(1, {1: held}), ranks=2, remote=stored)
    assert (decision.version, decision.base) == (Version(9, 1), Version(4, 1))


@given(situations())
@settings(deadline=None, max_examples=examples(300))
def test_snapshot_to_begin_from_leads_every_rank_to_the_version_if_any_does(job: RecoveryProblem) -> None:
    decision = decide_recovery(job)
    if not isinstance(decision, Recover):
        return

    def leads(base: Version) -> bool:
        for rank in range(job.ranks):
            snapshots, deltas = held_by(job, rank, everywhere(job))
            if not chain_to(decision.version, {base} & {*snapshots}, deltas, job.history):
                return False
        return True

    common = {Version(step, attempt) for step in range(1, 9) for attempt in range(1, 4)}
    common = {base for base in common if leads(base)}
    assert (decision.base in common) if common else decision.base is None


def test_minimum_of_the_newest_is_not_taken_when_nobody_can_rebuild_it() -> None:
    decision = coded(JobInventory(0, {0: steps(8, 10)}), JobInventory(1, {1: steps(8, 9)}), ranks=2)
    assert decision.version == Version(8, 1)


def test_lost_workers_rank_comes_from_its_peer_and_the_reason_says_so() -> None:
    decision = coded(
        JobInventory(0, {0: steps(40, 50)}),
        JobInventory(1, {1: steps(40, 50)}, {2: steps(40)}),
        JobInventory(2, {2: steps()}),
        ranks=3,
        last_step=52,
    )
    assert decision.sources == {0: (LOCAL,), 1: (LOCAL,), 2: (peer(1),)}
    assert decision.lost_steps == 12
    assert decision.reason == (
        "step 40: newest version that every rank can rebuild; 2 ranks from own memory, 1 from a peer; "
        "step 50 is incomplete: rank 2 has no copy"
    )


def test_holder_in_the_same_rack_is_asked_before_one_further_away() -> None:
    cluster = racks(2, 2)
    node = [site.node for site in cluster.sites]
    decision = coded(
        *(JobInventory(worker, {}, {3: steps(5)}) for worker in (0, 1, 2)),
        JobInventory(3, {}, {0: steps(5), 1: steps(5), 2: steps(5)}),
        ranks=4,
        distance=lambda a, b: cluster.topology.distance(node[a], node[b]),
    )
    assert decision.sources[3] == (peer(2), peer(0), peer(1))


def test_abandoned_history_is_not_restored_even_if_it_is_newer() -> None:
    history = History().after(1, 0).after(2, 40)
    decision = coded(JobInventory(0, {0: steps(40, 50)}), ranks=1, history=history)
    assert decision.version == Version(40, 1)


def test_memory_is_used_while_the_remote_tier_is_unreachable() -> None:
    remote = RemoteInventory(True, False, versions_of(60))
    decision = coded(JobInventory(0, {0: steps(50)}), ranks=1, remote=remote)
    assert decision.sources == {0: (LOCAL,)}


@pytest.mark.parametrize(("reachable", "says"), [(None, "has not been tried yet"), (False, "is unreachable")])
def test_nothing_is_started_afresh_while_the_remote_tier_cannot_be_seen(
    reachable: bool | None, says: str
) -> None:
    decision = decide_recovery(situation(JobInventory(0), ranks=1, remote=RemoteInventory(True, reachable)))
    assert isinstance(decision, Wait)
    assert says in decision.reason


def test_job_that_lost_everything_starts_afresh_and_says_why() -> None:
    decision = decide_recovery(situation(JobInventory(0), ranks=1, remote=RemoteInventory(True, True)))
    assert isinstance(decision, StartFresh)
    assert "the remote tier holds none" in decision.reason


def test_first_attempt_starts_at_once_without_asking_the_remote_tier() -> None:
    decision = decide_recovery(
        situation(JobInventory(0), ranks=1, history=History(), remote=RemoteInventory(True, None))
    )
    assert isinstance(decision, StartFresh)


def test_loss_of_all_memory_comes_back_from_the_remote_tier() -> None:
    remote = RemoteInventory(True, True, versions_of(20, 40))
    decision = coded(JobInventory(0), JobInventory(1), ranks=2, remote=remote, last_step=45)
    assert decision.version == Version(40, 1)
    assert decision.tier_counts == {Tier.REMOTE: 2}
    assert decision.lost_steps == 5


def test_rank_without_copy_is_mixed_in_from_the_remote_tier() -> None:
    remote = RemoteInventory(True, True, versions_of(40))
    decision = coded(JobInventory(0, {0: steps(40)}), JobInventory(1), ranks=2, remote=remote)
    assert decision.sources == {0: (LOCAL, REMOTE), 1: (REMOTE,)}


def test_older_version_in_memory_wins_when_the_newer_one_takes_longer_to_fetch_than_to_train() -> None:
    job = situation(
        JobInventory(0, {0: steps(40)}),
        ranks=1,
        remote=RemoteInventory(True, True, versions_of(41)),
        restore_seconds=RestoreSeconds(local=1, peer=5, remote=100),
    )
    # At 99 both cost the same: then the newer one.
    for step_seconds, step in ((1.0, 40), (99.0, 41), (1000.0, 41)):
        decision = decide_recovery(replace(job, step_seconds=step_seconds))
        assert isinstance(decision, Recover)
        assert decision.version == Version(step, 1)
        assert ("back sooner than from step 41" in decision.reason) is (step == 40)


def test_asked_for_step_is_taken_refused_or_waited_for() -> None:
    memory = JobInventory(0, {0: steps(30, 40)})
    asked = decide_recovery(situation(memory, ranks=1, target_step=30))
    assert isinstance(asked, Recover)
    assert asked.version == Version(30, 1)
    assert asked.reason.startswith("step 30: asked for by spec.restore")
    refused = decide_recovery(situation(memory, ranks=1, target_step=35))
    assert isinstance(refused, Refuse)
    assert refused.reason.startswith("step 35 was asked for, but no source holds it for every rank")
    unseen = RemoteInventory(True, None)
    assert isinstance(decide_recovery(situation(memory, ranks=1, target_step=35, remote=unseen)), Wait)


def test_ranks_that_do_not_fill_the_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        decide_recovery(situation(ranks=3, ranks_per_worker=2))


def test_snapshot_of_one_place_and_deltas_of_another_make_a_chain() -> None:
    decision = coded(
        JobInventory(0, {0: steps(40, 44, deltas=range(41, 48))}, {1: steps(44)}),
        JobInventory(1, {1: steps(deltas=(45, 46, 47))}),
        ranks=2,
    )
    assert decision.version == Version(47, 1)
    assert decision.sources == {0: (LOCAL,), 1: (LOCAL, peer(0))}
    assert decision.tier_counts == {Tier.LOCAL: 1, Tier.PEER: 1}


def test_chain_passes_from_one_attempt_to_the_next() -> None:
    history = History().after(1, 0).after(2, 46)
    own = Artifacts({Version(44, 1)}, {*versions_of(45, 46, 47), *versions_of(47, 48, attempt=2)})
    decision = coded(JobInventory(0, {0: own}), ranks=1, history=history)
    assert decision.version == Version(48, 2)


def test_rank_with_a_gap_in_its_deltas_is_named() -> None:
    decision = coded(
        JobInventory(0, {0: steps(40, deltas=(41, 42, 43, 44))}),
        JobInventory(1, {1: steps(40, deltas=(41, 43, 44))}),
        ranks=2,
    )
    assert decision.version == Version(41, 1)
    assert "step 44 is incomplete: rank 1 lacks the delta of step 42" in decision.reason


def test_deltas_whose_snapshot_is_gone_are_no_chain() -> None:
    decision = coded(
        JobInventory(0, {0: steps(40, deltas=(45, 46))}),
        JobInventory(1, {1: steps(40, 44, deltas=(45, 46))}),
        ranks=2,
    )
    assert decision.version == Version(40, 1)
    assert "step 46 is incomplete: rank 0 lacks the delta of step 44" in decision.reason


GROUP = CodeGroup((0, 1, 2), (3, 4))


def block(index: int, *snapshots: int, deltas: Iterable[int] = ()) -> dict[Share, Artifacts]:
    return {Share(index, (0, 1, 2)): steps(*snapshots, deltas=deltas)}


def members(*lost: int) -> list[JobInventory]:
    """Three members of a group with a snapshot and two deltas each; the lost ones are new and hold
    nothing.
    """
    whole = steps(40, deltas=(41, 42))
    return [
        JobInventory(worker) if worker in lost else JobInventory(worker, {worker: whole})
        for worker in range(3)
    ]


def holders_of(*blocks: dict[Share, Artifacts]) -> list[JobInventory]:
    own = steps(40, deltas=(41, 42))
    return [JobInventory(worker, {worker: own}, {}, kept) for worker, kept in enumerate(blocks, start=3)]


def test_lost_member_is_rebuilt_from_the_others_and_one_block() -> None:
    kept = holders_of(block(0, 40, deltas=(41, 42)), block(1, 40, deltas=(41, 42)))
    decision = coded(*members(1), *kept, ranks=5)
    assert decision.version == Version(42, 1)
    assert decision.sources[1] == (SourceChoice(Tier.PEER, group=GROUP),)
    assert decision.sources[0] == (LOCAL, SourceChoice(Tier.PEER, group=GROUP))
    assert decision.sources[3] == (LOCAL,)
    assert decision.tier_counts == {Tier.LOCAL: 4, Tier.PEER: 1}


def test_two_lost_members_need_both_blocks() -> None:
    whole = block(0, 40, deltas=(41, 42)), block(1, 40, deltas=(41, 42))
    assert coded(*members(0, 2), *holders_of(*whole), ranks=5).version == Version(42, 1)
    partly = block(0, 40, deltas=(41, 42)), block(1, 40, deltas=(41,))
    decision = coded(*members(0, 2), *holders_of(*partly), ranks=5)
    assert decision.version == Version(41, 1)
    assert "step 42 is incomplete: ranks 0 and 2 have no copy" in decision.reason
    assert isinstance(
        decide_recovery(situation(*members(0, 2), *holders_of(whole[0], {}), ranks=5)), StartFresh
    )


def test_lost_member_and_lost_holder_are_survived_with_parity_of_two() -> None:
    kept = holders_of({}, block(1, 40, deltas=(41, 42)))
    decision = coded(
        *members(1), JobInventory(3, {3: steps(40, deltas=(41, 42))}), kept[1], ranks=5, groups=(GROUP,)
    )
    assert decision.version == Version(42, 1)
    assert decision.sources[1] == (SourceChoice(Tier.PEER, group=GROUP),), "block 1 stays in its place"


def test_group_of_an_earlier_placement_is_read_from_what_its_holders_keep() -> None:
    kept = holders_of(block(0, 40, deltas=(41, 42)))
    other = JobInventory(4, {4: steps(40, deltas=(41, 42))})
    later = CodeGroup((0, 3, 4), (1,))
    decision = coded(*members(1), *kept, other, ranks=5, groups=(later,))
    assert decision.sources[1] == (SourceChoice(Tier.PEER, group=CodeGroup((0, 1, 2), (3,))),)


def test_delta_that_is_bad_everywhere_is_rebuilt_from_nothing() -> None:
    kept = holders_of(block(0, 40, deltas=(41, 42)), block(1, 40, deltas=(41, 42)))
    bad = {Artifact(1, Version(42, 1), Kind.DELTA)}
    decision = coded(*members(), *kept, ranks=5, bad=bad)
    assert decision.version == Version(41, 1)


@given(job=situations(), more=st.integers(1, 3))
def test_steps_are_given_up_for_the_proof_only_where_none_would_be_trained_again(
    job: RecoveryProblem, more: int
) -> None:
    plain, proving = decide_recovery(job), decide_recovery(replace(job, prove_steps=more))
    if not isinstance(plain, Recover) or plain.lost_steps or job.target_step is not None:
        assert proving == plain
        return
    assert isinstance(proving, Recover)
    assert proving.lost_steps in (0, more)
    assert proving.version.step == plain.version.step - proving.lost_steps
    assert (proving == plain) is (proving.lost_steps == 0)
    if not job.stock.is_resized(plain.version):
        nearness = list(Tier).index
        assert max(map(nearness, proving.tier_counts)) <= max(map(nearness, plain.tier_counts))


def test_version_that_leaves_steps_to_compare_is_as_old_as_asked_and_never_farther_away() -> None:
    def back_at(*inventories: JobInventory, last: int = 43, **more: object) -> int:
        decision = coded(*inventories, ranks=1, last_step=last, prove_steps=1, **more)
        return decision.version.step

    chain = JobInventory(0, {0: steps(40, deltas=(41, 42, 43))})
    assert back_at(chain) == 42
    assert back_at(chain, last=44) == 43, "one step is trained again anyway"
    assert back_at(chain, target_step=43) == 43
    assert back_at(JobInventory(0, {0: steps(43)})) == 43, "no chain ends earlier"
    stored = RemoteInventory(True, True, versions_of(42))
    assert back_at(JobInventory(0, {0: steps(43)}), remote=stored) == 43, "a proof is not worth a download"
    decision = coded(chain, ranks=1, prove_steps=1)
    assert decision.reason.startswith(
        "step 42: older than step 43, as restore.proveSteps needs steps to compare"
    )


# Whatever a worker that was given up still writes.


@st.composite
def histories(draw: st.DrawFn) -> tuple[History, int]:
    """Any line of attempts with rollbacks, and the newest attempt."""
    history, attempt = History(), 0
    for base in draw(st.lists(st.integers(0, 30), min_size=1, max_size=6)):
        attempt += draw(st.integers(1, 2))
        history = history.after(attempt, base if attempt > 1 else 0)
    return history, attempt


@st.composite
def fates(draw: st.DrawFn) -> tuple[RecoveryProblem, RecoveryProblem]:
    """What the accepted line left in memory and in the store; and the same with what stale workers have put
    there as well."""
    history, newest = draw(histories())
    versions = st.builds(Version, st.integers(1, 40), st.integers(1, newest))
    sets = st.sets(versions, max_size=12)
    ranks = 2
    drawn = {
        (place, kind): draw(sets)
        for place in ("own0", "own1", "at0", "at1")
        for kind in ("snapshots", "deltas")
    }
    remote = draw(sets)

    def situation(keep: bool) -> RecoveryProblem:
        def kept(found: set[Version]) -> frozenset[Version]:
            return frozenset(v for v in found if keep or history.accepts(v))

        def artifacts(place: str) -> Artifacts:
            return Artifacts(kept(drawn[place, "snapshots"]), kept(drawn[place, "deltas"]))

        inventories = (
            JobInventory(0, own={0: artifacts("own0")}, hosted={1: artifacts("at0")}),
            JobInventory(1, own={1: artifacts("own1")}, hosted={0: artifacts("at1")}),
        )
        return RecoveryProblem(
            ranks, 1, history, inventories, RemoteInventory(True, True, kept(remote)), last_step=40
        )

    return situation(keep=False), situation(keep=True)


@given(fates())
def test_versions_that_no_history_accepts_change_no_decision(
    fate: tuple[RecoveryProblem, RecoveryProblem],
) -> None:
    clean, soiled = fate
    expected, decided = decide_recovery(clean), decide_recovery(soiled)
    assert type(decided) is type(expected)
    if isinstance(decided, Recover):
        assert isinstance(expected, Recover)
        assert soiled.history.accepts(decided.version)
        assert (decided.version, decided.sources) == (expected.version, expected.sources)


@given(fates(), st.integers(1, 40), st.integers(1, 5))
def test_version_completed_by_an_attempt_after_it_was_over_is_never_chosen(
    fate: tuple[RecoveryProblem, RecoveryProblem], base: int, late: int
) -> None:
    """The next attempt begins from `base`; only then the last one completes a later step everywhere."""
    before, _ = fate
    over = before.history.attempt
    history = before.history.after(over + 1, base)
    stale = Version(base + late, over)
    everywhere = {rank: Artifacts((stale,)) for rank in range(2)}
    after = replace(
        before,
        history=history,
        inventories=(
            JobInventory(0, own=everywhere, hosted=everywhere),
            JobInventory(1, own=everywhere, hosted=everywhere),
        ),
        remote=RemoteInventory(True, True, (*before.remote.versions, stale)),
    )
    decided = decide_recovery(after)
    assert not isinstance(decided, Recover) or decided.version != stale
