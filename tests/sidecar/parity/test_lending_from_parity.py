"""Of a lost rank only what somebody reads is added up from parity when fewer workers come back."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest

from tests.sidecar.parity.group import Group, MakeJob
from tests.sidecar.stations import Station
from tiercheck.protocol.directive import Directive, ParityGroup, Peer, Restore, Source, SourceTable, Tier
from tiercheck.protocol.version import Artifact, Version
from tiercheck_sidecar.bounded_calls import SourceFailed
from tiercheck_sidecar.restore.resharded_reads import Lender

V = Version(10, 1)
MIB = 1 << 20
SIZES = (9 * MIB, 5 * MIB + 1, 12 * MIB + 345)
NOBODY = Peer(-1, "")


class NoRemote:
    def digests(self, artifact: Artifact) -> None:
        raise SourceFailed("the job has no remote tier")


def lender_of(station: Station) -> Lender:
    return Lender(
        station.vault,
        station.state.config.vault_dir / "lent",
        station.connect,
        cast(Any, NoRemote()),
    )


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
    content = job.protect(V, *SIZES)[2]
    job.lose(2, back_to=V)
    lender, word = lender_of(job.stations[0]), directive(job, 2, without(job, 2, ranks=(0, 1, 2)))
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
    saved = job.protect(V, *SIZES)
    job.lose(0, 2, back_to=V)
    lender = lender_of(job.stations[4])
    for rank, ranks in ((0, (0, 2, 4)), (1, (1, 3, 5)), (4, (0, 2, 4)), (5, (1, 3, 5))):
        word = directive(job, rank, without(job, 0, 2, ranks=ranks))
        assert lender.lend(word, Artifact(rank, V), [(0, len(saved[rank]))]).read_bytes() == saved[rank]
    lender.close()


def test_bad_survivor_is_noticed_and_another_block_takes_its_place(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=2)
    saved = job.protect(V, *SIZES)
    job.spoil(2, V, 4_500_000)
    job.lose(1, back_to=V)
    lender, word = lender_of(job.stations[0]), directive(job, 1, without(job, 1, ranks=(0, 1, 2)))
    assert lender.lend(word, Artifact(1, V), [(0, len(saved[1]))]).read_bytes() == saved[1]
    assert not job.stations[2].vault.held(), "who had it has looked, and keeps it no longer"
    lender.close()


def test_too_little_is_left_and_everything_that_is_missing_is_named(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=1)
    job.protect(V, *SIZES)
    job.lose(1, 2, back_to=V)
    lender, word = lender_of(job.stations[0]), directive(job, 1, without(job, 1, 2, ranks=(0, 1, 2)))
    with pytest.raises(SourceFailed, match=r"parity: .*; the remote tier: the job has no remote tier"):
        lender.lend(word, Artifact(1, V), ())
    with pytest.raises(SourceFailed, match="parity block 0 at worker 0"):
        lender.lend(word, Artifact(1, Version(11, 1)), ())
    lender.close()
