"""A holder of parity takes less memory than copies, and acknowledges complete blocks only."""

from __future__ import annotations

import os

import pytest

from tests.sidecar.stations import Group, MakeJob, Station
from tests.sidecar.world import JOB_UID, until
from tiercheck.protocol.directive import Peer
from tiercheck.protocol.version import Artifact, Digests, Kind, Share, Version
from tiercheck_sidecar import coding
from tiercheck_sidecar.digest import CHUNK
from tiercheck_sidecar.exchange.frames import PeerRequest, PeerResponse, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import CallerClaim, PeerRefused, dial
from tiercheck_sidecar.tags import Tagger
from tiercheck_sidecar.vault import Seal

V = Version(10, 1)


def expected(saved: dict[int, bytes], ranks: tuple[int, ...], index: int) -> bytes:
    block = bytearray(max(len(saved[rank]) for rank in ranks))
    for rank, coefficient in zip(ranks, coding.row(len(ranks), index), strict=True):
        coding.fold(memoryview(block), coefficient, memoryview(saved[rank]))
    return bytes(block)


def block_of(holder: Station, share: Share, version: Version = V, kind: Kind = Kind.SNAPSHOT) -> bytes:
    with (
        holder.vault.pin(Artifact(share.ranks[0], version, kind), share=share) as slot,
        slot.mapped() as view,
    ):
        assert slot.seal is not None
        return bytes(view[: slot.seal.digests.size])


def sealed(member: Station) -> Seal:
    """What a member of one rank has captured as `V`."""
    seal = member.vault.find(Artifact(member.worker, V))
    assert seal is not None
    return seal


def talk(station: Station, holder: Station, attempt: int | None = None) -> Wire:
    """A connection of a member that says what the test wants."""
    attempt = station.state.attempt if attempt is None else attempt
    return dial(station.identity, attempt, Peer(holder.identity.worker, holder.identity.host), 8471)


def offer(wire: Wire, seal: Seal) -> PeerResponse:
    wire.send(PeerRequest.about("fold", seal.artifact, world_size=seal.world_size, digests=seal.digests))
    return wire.receive(PeerResponse)


def send(wire: Wire, seal: Seal, chunks: dict[int, bytes]) -> PeerResponse:
    wire.send(PeerRequest.about("chunks", seal.artifact))
    for index, chunk in chunks.items():
        read, write = os.memfd_create("chunk"), 0
        os.write(read, chunk)
        wire.send_chunk(read, index, write, len(chunk))
        os.close(read)
    wire.send_end()
    return wire.receive(PeerResponse)


def chunks_of(content: bytes, *indices: int) -> dict[int, bytes]:
    return {index: content[index * CHUNK : (index + 1) * CHUNK] for index in indices}


def test_blocks_are_the_code_of_their_members(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=2, procs=2)
    saved = job.protect(V, 9_000_000, 4_000_000, 6_000_001)
    for index, holder in enumerate(job.holders):
        for local in range(2):
            ranks = (local, 2 + local, 4 + local)
            assert block_of(holder, Share(index, ranks)) == expected(saved, ranks, index)


@pytest.mark.parametrize("tags", ["right", "wrong", "none"])
def test_artifact_is_folded_in_whatever_tags_it_was_sealed_with_and_read_by_nobody_if_they_are_right(
    job: Group, monkeypatch: pytest.MonkeyPatch, tags: str
) -> None:
    read = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *those: read.append(those) or real(*those))
    for member in job.members:
        if tags != "right":
            made = None if tags == "none" else Tagger("another token", JOB_UID, Artifact(member.worker, V))
            monkeypatch.setattr(member.vault, "_tagger", lambda _, made=made: made)
    saved = job.protect(V, 9_000_000, 4_000_000)
    assert block_of(job.holders[0], Share(0, (0, 1))) == expected(saved, (0, 1), 0)
    assert (not read) == (tags == "right")


def test_holder_needs_a_fraction_of_the_memory_of_copies(make_job: MakeJob) -> None:
    size, data = 8_000_000, 4
    job = make_job(data=data, parity=1)
    job.protect(V, size)
    held = sum(path.stat().st_blocks * 512 for path in job.holders[0].directory.iterdir())
    assert size <= held < 1.25 * size, "one block, not one copy per member"


def test_block_is_not_acknowledged_before_all_members_are_in(job: Group) -> None:
    first, second = job.members
    job.save_rank(0, V, 5_000_000)
    job.name(V)
    artifact = Artifact(0, V)
    until(lambda: artifact in job.holders[0].holder.status(claim(job, 0)).folded, "the first is in")
    assert first.copied(0) == []
    assert not job.holders[0].blocks()
    job.save_rank(1, V, 5_000_000)
    until(lambda: V in first.copied(0) and V in second.copied(1), "both are protected")


def test_a_claim_that_does_not_fit_makes_no_later_block_impossible(job: Group) -> None:
    size = 1 << 38
    digests = Digests(size, CHUNK, ("a" * 32,) * (size // CHUNK))
    said = job.holders[0].holder.offer(claim(job, 0), PeerRequest("fold", 0, V, 2, digests))
    assert said.state == "busy"
    job.protect(V, 5_000_000)


def claim(job: Group, worker: int) -> CallerClaim:
    return CallerClaim("uid", worker, job.attempt, "")


def test_broken_stream_goes_on_where_it_stopped_and_nothing_is_folded_twice(job: Group) -> None:
    saved = job.save(V, 3 * CHUNK)
    one, other, holder = *job.members, job.holders[0]
    seal, second = sealed(one), sealed(other)
    wire = talk(one, holder)
    assert offer(wire, seal).missing == (0, 1, 2, 3)
    assert send(wire, seal, chunks_of(saved[0], 2, 0)).damaged == ()
    wire.send(PeerRequest("chunks", 0, V))
    wire.close()
    wire = talk(one, holder)
    assert offer(wire, seal).missing == (1, 3)
    send(wire, seal, chunks_of(saved[0], 0, 1, 1, 2))  # again, and once more
    assert offer(wire, seal).missing == (3,)
    send(wire, seal, chunks_of(saved[0], 3, 3, 0))
    assert offer(wire, seal).state == "in"
    wire = talk(other, holder)
    offer(wire, second)
    send(wire, second, chunks_of(saved[1], 3, 2, 1, 0))
    assert offer(wire, second).state == "have"
    assert block_of(holder, Share(0, (0, 1))) == expected(saved, (0, 1), 0)


def test_chunk_that_arrives_damaged_is_not_folded(job: Group) -> None:
    saved = job.save(V, CHUNK)
    seal = sealed(job.members[0])
    wire = talk(job.members[0], job.holders[0])
    offer(wire, seal)
    damaged = bytearray(saved[0][:CHUNK])
    damaged[77] ^= 1
    assert send(wire, seal, {0: bytes(damaged)}).damaged == (0,)
    job.name(V)
    until(job.holders[0].blocks, "the block is complete")
    assert block_of(job.holders[0], Share(0, (0, 1))) == expected(saved, (0, 1), 0)


def test_larger_member_makes_the_block_anew(job: Group) -> None:
    saved = {0: job.save_rank(0, V, 1_000_000)}
    job.name(V)
    until(lambda: job.holders[0].holder.status(claim(job, 0)).folded, "the small one is in")
    saved[1] = job.save_rank(1, V, 9_000_000)
    until(job.holders[0].blocks, "the block is complete")
    assert block_of(job.holders[0], Share(0, (0, 1))) == expected(saved, (0, 1), 0)
    until(lambda: V in job.members[0].copied(0), "the first knows")


def test_attempt_that_is_over_is_refused(job: Group) -> None:
    saved = job.save(V, 2 * CHUNK)
    seal = sealed(job.members[0])
    wire = talk(job.members[0], job.holders[0])
    offer(wire, seal)
    job.attempt, job.history = 2, job.history.after(2, 10)
    job.holders[0].accept(job.directive(job.holders[0].worker))
    with pytest.raises(WireBroken):
        send(wire, seal, chunks_of(saved[0], 0))
    with pytest.raises(PeerRefused, match="attempt 1 is over"):
        talk(job.members[0], job.holders[0], attempt=1)
    assert job.holders[0].state.counters.refused_stale >= 2


def test_folding_goes_on_in_the_next_attempt(job: Group) -> None:
    saved = job.save(V, 2 * CHUNK)
    seal = sealed(job.members[0])
    wire = talk(job.members[0], job.holders[0])
    offer(wire, seal)
    send(wire, seal, chunks_of(saved[0], 1))
    job.next_attempt(V.step)
    wire = talk(job.members[0], job.holders[0])
    assert offer(wire, seal).missing == (0, 2)
    job.name(V)
    until(job.holders[0].blocks, "the block is complete")
    assert block_of(job.holders[0], Share(0, (0, 1))) == expected(saved, (0, 1), 0)


def test_stranger_to_the_group_is_refused(job: Group) -> None:
    job.save(V, 1_000)
    seal = sealed(job.members[1])
    said = offer(talk(job.members[0], job.holders[0]), seal)
    assert (said.state, said.message) == ("refused", "rank 1 is not of worker 0")
    said = offer(talk(job.members[1], job.members[0]), seal)
    assert (said.state, said.message) == ("refused", "this worker keeps no parity for worker 1")


def test_overtaken_block_makes_room_for_the_next(job: Group) -> None:
    for step in (10, 20, 30, 40):
        job.save_rank(0, Version(step, 1), 1_000_000)
        job.name(Version(step, 1))
        version = Version(step, 1)
        until(
            lambda version=version: (
                Artifact(0, version) in job.holders[0].holder.status(claim(job, 0)).folded
            ),
            f"{version} is folded",
        )
        job.members[0].vault.evict(lambda seal, version=version: seal.version < version)
    until(
        lambda: len(job.holders[0].holder.status(claim(job, 0)).folded) == 1, "only the newest is being made"
    )


def test_deltas_are_folded_in_the_order_of_their_steps_after_their_snapshot(job: Group) -> None:
    job.save(Version(9, 1), 300_000, kind=Kind.SNAPSHOT)
    for step in (10, 11, 12):
        job.save(Version(step, 1), 100_000, 30_000, kind=Kind.DELTA)
    job.name(Version(9, 1))
    steps = [Version(step, 1) for step in (10, 11, 12)]
    until(lambda: job.members[0].copied(0, Kind.DELTA) == steps, "all deltas are protected")


def test_killed_holder_costs_training_nothing_and_its_successor_gets_everything(job: Group) -> None:
    job.protect(V, 1_000_000)
    job.lose(2)
    job.save(Version(20, 1), 1_000_000)
    job.next_attempt(Version(20, 1).step)
    job.name(Version(20, 1))
    until(lambda: Version(20, 1) in job.members[0].copied(0), "protected again")
    assert V not in job.members[0].copied(0), "the new holder never had it"
