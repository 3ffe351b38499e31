"""A parity group brings back any losses up to its number of holders, bit for bit.

Of a lost rank only what somebody reads is added up from parity when fewer workers come back.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.sidecar.stations import Group, MakeJob, Station
from tests.sidecar.world import flip, until
from tiercheck.protocol.directive import (
    Directive,
    ParityGroup,
    Peer,
    Policy,
    Restore,
    Source,
    SourceTable,
    Tier,
)
from tiercheck.protocol.report import Quarantined, Watermarks
from tiercheck.protocol.version import Artifact, Kind, Version
from tiercheck_sidecar.artifact_source import BoundedCall, SourceCorrupt, SourceFailed
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.exchange.frames import Wire, WireBroken
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.parity.rebuild import ParitySource
from tiercheck_sidecar.rehearsal.rehearser import Rehearser

V = Version(10, 1)
SIZES = (9_000_000, 5_500_001, 12_345_678)


@pytest.mark.parametrize(("parity", "lost"), [(1, (1,)), (2, (2, 3))], ids=["one", "and a holder"])
def test_lost_worker_is_rebuilt_from_parity(make_job: MakeJob, parity: int, lost: tuple[int, ...]) -> None:
    job = make_job(data=3, parity=parity)
    saved = job.protect(V, *SIZES)
    job.lose(*lost, back_to=V)
    assert job.stations[lost[0]].rebuild(lost[0], V, job.group) == saved[lost[0]]


def test_every_member_can_be_the_lost_one(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=1, procs=2)
    saved = job.protect(V, 3_000_000, 70, 5_000_000)
    for worker in range(3):
        job.lose(worker, back_to=V)
        for rank in job.stations[worker].vault.ranks:
            assert job.stations[worker].rebuild(rank, V, job.group) == saved[rank]


def test_two_lost_workers_are_rebuilt_at_the_same_time(make_job: MakeJob) -> None:
    job = make_job(data=4, parity=2)
    saved = job.protect(V, *SIZES)
    job.lose(0, 2, back_to=V)
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda worker: job.stations[worker].rebuild(worker, V, job.group), (0, 2))
    assert (first, second) == (saved[0], saved[2])


def test_deltas_are_rebuilt_like_snapshots(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=1)
    job.protect(V, 1_000_000)
    step = Version(11, 1)
    saved = job.save(step, 400_000, 5_000, 900_000, kind=Kind.DELTA)
    for rank, station in enumerate(job.members):
        until(
            lambda rank=rank, station=station: step in station.copied(rank, Kind.DELTA),
            "the delta is protected",
        )
    job.lose(0, back_to=step)
    assert job.stations[0].rebuild(0, step, job.group, Kind.DELTA) == saved[0]


def test_bad_block_is_noticed_and_another_is_used(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=2)
    saved = job.protect(V, *SIZES)
    (block,) = job.holders[0].blocks()
    assert block.share is not None
    flip(job.holders[0].block_path(block.share, V), 5_000_000)
    job.lose(1, back_to=V)
    bad: list[Quarantined] = []
    assert job.stations[1].rebuild(1, V, job.group, bad=bad) == saved[1]
    assert [(each.worker, each.version) for each in bad] == [(3, V)]
    assert not job.holders[0].blocks(), "its holder has looked, and keeps it no longer"
    assert job.holders[0].state.quarantined[0].worker == 3


def test_bad_survivor_is_named_and_another_block_takes_its_place(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=2)
    saved = job.protect(V, *SIZES)
    job.spoil(2, V, 4_500_000)
    job.lose(1, back_to=V)
    bad: list[Quarantined] = []
    assert job.stations[1].rebuild(1, V, job.group, bad=bad) == saved[1]
    assert [(each.rank, each.worker) for each in bad] == [(2, 2)]


def test_bad_block_without_another_fails_and_leaves_nothing_behind(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=1)
    job.protect(V, *SIZES)
    (block,) = job.holders[0].blocks()
    assert block.share is not None
    flip(job.holders[0].block_path(block.share, V), 100)
    job.lose(1, back_to=V)
    with pytest.raises(SourceCorrupt, match="parity block 0 at worker 3"):
        job.stations[1].rebuild(1, V, job.group)
    assert job.stations[1].vault.find(Artifact(1, V)) is None


def test_more_losses_than_blocks_say_who_is_missing(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=1)
    job.protect(V, 1_000_000)
    job.lose(0, 1, back_to=V)
    with pytest.raises(
        SourceFailed, match=r"2 members of the group are lost and 1 parity blocks.*rank 1.* at worker 1"
    ):
        job.stations[0].rebuild(0, V, job.group)


def test_no_block_at_all_is_a_sentence(job: Group) -> None:
    with pytest.raises(SourceFailed, match="no parity block"):
        job.stations[0].rebuild(0, V, job.group)


def test_block_with_digests_of_wrong_bytes_is_found_out_by_its_members(job: Group) -> None:
    job.protect(V, 1_000_000)
    holder = job.holders[0]
    (block,) = holder.blocks()
    holder.vault.evict(lambda seal: True)
    draft = holder.vault.draft(block)
    draft.view[:] = b"x" * len(draft.view)
    draft.keep(dataclasses.replace(block, digests=digest(draft.view)))
    job.lose(0, back_to=V)
    bad: list[Quarantined] = []
    with pytest.raises(SourceCorrupt, match="does not fit to the members"):
        job.stations[0].rebuild(0, V, job.group, bad=bad)
    assert [(each.rank, each.worker) for each in bad] == [(0, 2)]


def test_rebuild_goes_on_where_it_was_when_a_survivor_dies_in_the_middle(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=2)
    saved = job.protect(V, 40_000_000)
    job.lose(1, back_to=V)
    headers: Counter[int] = Counter()

    def connect(peer: Peer) -> Wire:
        wire = Station.connect(job.stations[1], peer)
        plain = wire.receive_chunk_header

        def receive_chunk_header() -> tuple[int, int]:
            headers[peer.worker] += 1
            if peer.worker == 2 and headers[2] > 3:
                raise WireBroken("it is gone")
            return plain()

        wire.receive_chunk_header = receive_chunk_header  # type: ignore[method-assign]
        return wire

    job.stations[1].connect = connect  # type: ignore[method-assign]
    assert job.stations[1].rebuild(1, V, job.group) == saved[1]
    assert headers[4] > 0, "the second block took its place"
    assert headers[4] < headers[3], "what had been rebuilt before was not rebuilt again"


def test_connection_refused_for_once_costs_no_source(job: Group) -> None:
    saved = job.protect(V, 20_000_000)
    job.lose(1, back_to=V)
    dials: Counter[Peer] = Counter()

    def connect(peer: Peer) -> Wire:
        dials[peer] += 1
        if dials[peer] == 2:
            raise WireBroken("not now")
        return Station.connect(job.stations[1], peer)

    job.stations[1].connect = connect  # type: ignore[method-assign]
    assert job.stations[1].rebuild(1, V, job.group) == saved[1]
    assert min(dials.values()) > 2, "each was refused once"


# What a restore plans with


def ask(job: Group, rank: int) -> dict[Artifact, int]:
    station = job.stations[rank // job.procs]
    return ParitySource(job.group, job.procs, station.connect).list(rank, V, BoundedCall())


def test_what_survivors_and_blocks_suffice_for_is_obtainable_with_its_size(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=1, procs=2)
    saved = job.protect(V, 1_000_000, 70_000)
    for rank in (0, 4):  # step 11 of the third member is in no block yet
        job.save_rank(rank, Version(11, 1), 100_000, Kind.DELTA)
    job.lose(1, back_to=V)
    for rank in (2, 3):
        assert ask(job, rank) == {Artifact(rank, V): len(saved[rank])}


def test_version_with_too_few_blocks_is_not_promised(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=1)
    job.protect(V, 1_000_000)
    job.lose(0, 1, back_to=V)
    assert ask(job, 0) == {}


def test_two_blocks_make_up_for_two_members(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=2)
    saved = job.protect(V, 1_000_000)
    job.lose(0, 1, back_to=V)
    assert ask(job, 0) == {Artifact(0, V): len(saved[0])}


def test_silence_is_not_taken_for_nothing(job: Group) -> None:
    for worker in (1, 2):
        job.stations[worker].stop()
    with pytest.raises(SourceFailed, match="worker 2"):
        ask(job, 0)


# What a rehearsal proves


def rehearsed(job: Group) -> SidecarState:
    """Worker 0, once it has looked at all tiers."""
    me = job.stations[0]
    me.accept(replace(job.directive(0), policy=Policy(1, 1_000_000, 5, rehearse_every=600.0)))
    with me.state.lock:
        me.state.verdict = TierVerdict(1, Watermarks(local=V, peer=V))
    Rehearser(me.state, me.vault, me.sidecar.reach, wait=lambda until, seconds: until()).look()
    return me.state


def test_what_parity_would_give_back_is_proved(job: Group) -> None:
    job.protect(V, 50_000)
    used = [station.vault.used() for station in job.stations]
    state = rehearsed(job)
    assert {proof.tier: proof.version for proof in state.proofs} == {Tier.LOCAL: V, Tier.PEER: V}
    assert not state.problems
    assert [station.vault.used() for station in job.stations] == used


def test_member_without_whom_it_could_not_be_put_together_is_named_and_keeps_what_it_has(
    job: Group,
) -> None:
    job.protect(V, 50_000)
    with job.stations[1].vault.pin(Artifact(1, V)) as slot:
        flip(slot.path, 30_000)
    state = rehearsed(job)
    (problem,) = state.problems
    assert (
        f"the {Artifact(0, V)}, would not come back from parity: what worker 1 gives for it is bad"
        in problem.message
    )
    assert [proof.tier for proof in state.proofs] == [Tier.LOCAL]
    assert job.stations[1].vault.find(Artifact(1, V), Tier.LOCAL) is not None
    assert not job.stations[1].state.quarantined


MIB = 1 << 20
LENT_SIZES = (9 * MIB, 5 * MIB + 1, 12 * MIB + 345)
NOBODY = Peer(-1, "")


def directive(job: Group, rank: int, group: ParityGroup) -> Directive:
    ranks = job.procs * len(job.members)
    table = SourceTable.of({rank: (Source(Tier.PEER, parity=group),)}, range(ranks))
    return dataclasses.replace(job.directive(0), restore=Restore(V, table, world_size=ranks))


def without(job: Group, *lost: int, ranks: tuple[int, ...]) -> ParityGroup:
    """The group of `ranks` as a controller names it when other workers than theirs are there: all are
    numbered anew."""
    last = len(job.stations) - 1
    for station in job.stations:
        station.identity.worker = last - station.worker

    def now(worker: int) -> Peer:
        return NOBODY if worker in lost else Peer(last - worker, job.host(worker))

    group = job.group
    return ParityGroup(
        tuple(now(peer.worker) for peer in group.members),
        tuple(now(peer.worker) for peer in group.holders),
        ranks,
    )


def test_parts_of_a_lost_rank_are_added_up_and_only_those(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=1)
    content = job.protect(V, *LENT_SIZES)[2]
    job.lose(2, back_to=V)
    lender, word = job.stations[0].sidecar.reach.lender(), directive(job, 2, without(job, 2, ranks=(0, 1, 2)))
    path = lender.lend(word, Artifact(2, V), ())
    assert path.read_bytes()[:4096] == content[:4096]
    assert path.stat().st_blocks * 512 <= 4 * MIB
    begin, end = 8 * MIB + 7, 9 * MIB
    assert lender.lend(word, Artifact(2, V), [(begin, end)]) == path
    assert path.read_bytes()[begin:end] == content[begin:end]
    assert path.stat().st_blocks * 512 <= 8 * MIB, "the chunk between is not there"
    assert lender.lend(word, Artifact(2, V), [(0, len(content))]).read_bytes() == content
    lender.close()


def test_each_local_rank_of_two_lost_workers(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=2, procs=2)
    saved = job.protect(V, *LENT_SIZES)
    job.lose(0, 2, back_to=V)
    lender = job.stations[4].sidecar.reach.lender()
    for rank, ranks in ((0, (0, 2, 4)), (1, (1, 3, 5)), (4, (0, 2, 4)), (5, (1, 3, 5))):
        word = directive(job, rank, without(job, 0, 2, ranks=ranks))
        assert lender.lend(word, Artifact(rank, V), [(0, len(saved[rank]))]).read_bytes() == saved[rank]
    lender.close()


def test_bad_survivor_is_noticed_and_another_block_takes_its_place(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=2)
    saved = job.protect(V, *LENT_SIZES)
    job.spoil(2, V, 4_500_000)
    job.lose(1, back_to=V)
    lender, word = job.stations[0].sidecar.reach.lender(), directive(job, 1, without(job, 1, ranks=(0, 1, 2)))
    assert lender.lend(word, Artifact(1, V), [(0, len(saved[1]))]).read_bytes() == saved[1]
    assert not job.stations[2].vault.held(), "who had it has looked, and keeps it no longer"
    lender.close()


def test_too_little_is_left_and_everything_that_is_missing_is_named(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=1)
    job.protect(V, *LENT_SIZES)
    job.lose(1, 2, back_to=V)
    lender, word = (
        job.stations[0].sidecar.reach.lender(),
        directive(job, 1, without(job, 1, 2, ranks=(0, 1, 2))),
    )
    with pytest.raises(SourceFailed, match=r"parity: .*; the remote tier: the job has no remote tier"):
        lender.lend(word, Artifact(1, V), ())
    with pytest.raises(SourceFailed, match="parity block 0 at worker 0"):
        lender.lend(word, Artifact(1, Version(11, 1)), ())
    lender.close()
