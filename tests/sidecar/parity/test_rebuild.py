"""A parity group brings back any losses up to its number of holders, bit for bit."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.sidecar.parity.group import Group, flip
from tests.sidecar.stations import Station
from tests.sidecar.world import until
from tiercheck.protocol.directive import Peer
from tiercheck.protocol.report import Quarantined
from tiercheck.protocol.version import Artifact, Kind, Version
from tiercheck_sidecar.bounded_calls import SourceCorrupt, SourceFailed
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.exchange.frames import Wire, WireBroken

MakeJob = Callable[..., Group]
V = Version(10, 1)
SIZES = (9_000_000, 5_500_001, 12_345_678)


def test_lost_worker_is_rebuilt_from_parity(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=1)
    saved = job.protect(V, *SIZES)
    job.lose(1)
    job.next_attempt(V.step)
    assert job.stations[1].rebuild(1, V, job.group) == saved[1]


def test_every_member_can_be_the_lost_one(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=1, procs=2)
    saved = job.protect(V, 3_000_000, 70, 5_000_000)
    for worker in range(3):
        job.lose(worker)
        job.next_attempt(V.step)
        for rank in job.stations[worker].vault.ranks:
            assert job.stations[worker].rebuild(rank, V, job.group) == saved[rank]


def test_two_lost_workers_are_rebuilt_at_the_same_time(make_job: MakeJob) -> None:
    job = make_job(data=4, parity=2)
    saved = job.protect(V, *SIZES)
    job.lose(0, 2)
    job.next_attempt(V.step)
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda worker: job.stations[worker].rebuild(worker, V, job.group), (0, 2))
    assert (first, second) == (saved[0], saved[2])


def test_member_and_holder_lost_together(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=2)
    saved = job.protect(V, *SIZES)
    job.lose(2, 3)
    job.next_attempt(V.step)
    assert job.stations[2].rebuild(2, V, job.group) == saved[2]


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
    job.lose(0)
    job.next_attempt(step.step)
    assert job.stations[0].rebuild(0, step, job.group, Kind.DELTA) == saved[0]


def test_bad_block_is_noticed_and_another_is_used(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=2)
    saved = job.protect(V, *SIZES)
    (block,) = job.holders[0].blocks()
    assert block.share is not None
    flip(job.holders[0].block_path(block.share, V), 5_000_000)
    job.lose(1)
    job.next_attempt(V.step)
    bad: list[Quarantined] = []
    assert job.stations[1].rebuild(1, V, job.group, on_bad=bad.append) == saved[1]
    assert [(each.worker, each.version) for each in bad] == [(3, V)]
    assert not job.holders[0].blocks(), "its holder has looked, and keeps it no longer"
    assert job.holders[0].state.quarantined[0].worker == 3


def test_bad_survivor_is_named_and_another_block_takes_its_place(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=2)
    saved = job.protect(V, *SIZES)
    job.spoil(2, V, 4_500_000)
    job.lose(1)
    job.next_attempt(V.step)
    bad: list[Quarantined] = []
    assert job.stations[1].rebuild(1, V, job.group, on_bad=bad.append) == saved[1]
    assert [(each.rank, each.worker) for each in bad] == [(2, 2)]


def test_bad_block_without_another_fails_and_leaves_nothing_behind(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=1)
    job.protect(V, *SIZES)
    (block,) = job.holders[0].blocks()
    assert block.share is not None
    flip(job.holders[0].block_path(block.share, V), 100)
    job.lose(1)
    job.next_attempt(V.step)
    with pytest.raises(SourceCorrupt, match="parity block 0 at worker 3"):
        job.stations[1].rebuild(1, V, job.group)
    assert job.stations[1].vault.find(Artifact(1, V)) is None


def test_more_losses_than_blocks_say_who_is_missing(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=1)
    job.protect(V, 1_000_000)
    job.lose(0, 1)
    job.next_attempt(V.step)
    with pytest.raises(
        SourceFailed, match=r"2 members of the group are lost and 1 parity blocks.*rank 1.* at worker 1"
    ):
        job.stations[0].rebuild(0, V, job.group)


def test_no_block_at_all_is_a_sentence(make_job: MakeJob) -> None:
    job = make_job(data=2, parity=1)
    with pytest.raises(SourceFailed, match="no parity block"):
        job.stations[0].rebuild(0, V, job.group)


def test_block_with_digests_of_wrong_bytes_is_found_out_by_its_members(make_job: MakeJob) -> None:
    job = make_job(data=2, parity=1)
    job.protect(V, 1_000_000)
    holder = job.holders[0]
    (block,) = holder.blocks()
    holder.vault.evict(lambda seal: True)
    draft = holder.vault.draft(block)
    draft.view[:] = b"x" * len(draft.view)
    draft.keep(dataclasses.replace(block, digests=digest(draft.view)))
    job.lose(0)
    job.next_attempt(V.step)
    bad: list[Quarantined] = []
    with pytest.raises(SourceCorrupt, match="does not fit to the members"):
        job.stations[0].rebuild(0, V, job.group, on_bad=bad.append)
    assert [(each.rank, each.worker) for each in bad] == [(0, 2)]


def test_rebuild_goes_on_where_it_was_when_a_survivor_dies_in_the_middle(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=2)
    saved = job.protect(V, 40_000_000)
    job.lose(1)
    job.next_attempt(V.step)
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


def test_connection_refused_for_once_costs_no_source(make_job: MakeJob) -> None:
    job = make_job(data=2, parity=1)
    saved = job.protect(V, 20_000_000)
    job.lose(1)
    job.next_attempt(V.step)
    dials: Counter[Peer] = Counter()

    def connect(peer: Peer) -> Wire:
        dials[peer] += 1
        if dials[peer] == 2:
            raise WireBroken("not now")
        return Station.connect(job.stations[1], peer)

    job.stations[1].connect = connect  # type: ignore[method-assign]
    assert job.stations[1].rebuild(1, V, job.group) == saved[1]
    assert min(dials.values()) > 2, "each was refused once"
