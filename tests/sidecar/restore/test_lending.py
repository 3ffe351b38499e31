"""Ranks on another mesh read only the parts they need of others' artifacts, verified."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.sidecar.exchange.test_exchange_fetch import MIB, copied
from tests.sidecar.stations import MakeStations, Stations
from tests.sidecar.world import MakeWorld, until
from tiercheck.protocol.artifacts.slot import SlotLayout, read_header
from tiercheck.protocol.directive import Directive, Restore, Source, SourceTable, Tier
from tiercheck.protocol.version import Artifact, Digests, Kind, Version
from tiercheck_sidecar.artifact_source import ArtifactSink, BoundedCall, OpenArtifact, SourceFailed
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.restore.sources import ShardReader
from tiercheck_sidecar.vault import MemoryTooSmall, Seal


@pytest.fixture
def job(stations: MakeStations) -> Stations:
    """Worker 0's artifact lies at workers 1 and 2; worker 3 wants parts of it."""
    return stations(workers=4)


@pytest.fixture
def lender(job: Stations) -> Iterator[ShardReader]:
    made = job[3].sidecar.reach.lender()
    yield made
    made.close()
    assert not list((job[3].state.config.vault_dir / "lent").glob("*"))


def directive(job: Stations, *workers: int) -> Directive:
    known = job[3].state.directive
    assert known is not None
    sources = tuple(Source(Tier.PEER, job.peer(worker)) for worker in workers)
    restore = Restore(Version(5, 1), SourceTable.of({0: sources}, range(2)), world_size=2)
    return dataclasses.replace(known, restore=restore)


def there(path: Path) -> int:
    """Bytes of the volume that a sparse file takes."""
    return path.stat().st_blocks * 512


def test_only_the_chunks_that_are_asked_for_are_brought(job: Stations, lender: ShardReader) -> None:
    _, artifact, content = copied(job)
    path = lender.lend(directive(job, 1, 2), artifact, ())
    assert path.read_bytes()[:4096] == content[:4096]
    assert there(path) <= 4 * MIB
    begin, end = 20 * MIB + 7, 25 * MIB
    assert lender.lend(directive(job, 1, 2), artifact, [(begin, end)]) == path
    assert path.read_bytes()[begin:end] == content[begin:end]
    assert path.stat().st_size == len(content)
    assert there(path) <= 12 * MIB


def test_damaged_chunk_is_brought_by_another_holder(job: Stations, lender: ShardReader) -> None:
    seal, artifact, content = copied(job)
    job[1].flip(seal, Tier.PEER, 3)
    path = lender.lend(directive(job, 1, 2), artifact, [(0, len(content))])
    assert path.read_bytes() == content


def test_nobody_has_it_and_each_is_named(job: Stations, lender: ShardReader) -> None:
    with pytest.raises(SourceFailed, match=r"worker 1: .*; the remote tier: the job has no remote tier"):
        lender.lend(directive(job, 1), Artifact(0, Version(5, 1)), ())


def test_loans_stay_within_the_memory_volume(job: Stations, lender: ShardReader) -> None:
    _, artifact, content = copied(job)
    job[3].vault.limit = job[3].vault.used() + 9 * MIB
    lender.lend(directive(job, 1), artifact, [(0, 8 * MIB)])
    with pytest.raises(MemoryTooSmall, match="sizeLimit"):
        lender.lend(directive(job, 1), artifact, [(0, len(content))])


def test_artifact_smaller_than_a_chunk_takes_no_more_room_than_it_has_bytes(
    job: Stations, lender: ShardReader
) -> None:
    _, artifact, content = copied(job, 100_000)
    job[3].vault.limit = job[3].vault.used() + len(content)
    assert lender.lend(directive(job, 1), artifact, [(0, len(content))]).read_bytes() == content


def test_what_lies_here_is_lent_as_it_is_unless_it_is_bad(job: Stations, lender: ShardReader) -> None:
    seal = job[3].save(Version(5, 1), 9 * MIB, rank=3)
    with job[3].vault.pin(Artifact(3, seal.version)) as slot:
        assert lender.lend(directive(job), Artifact(3, seal.version), ()) == slot.path


def test_rank_of_a_smaller_job_borrows_from_ranks_that_are_no_more(make_world: MakeWorld) -> None:
    world = make_world(workers=2)
    store = world.root / "store"
    store.mkdir()
    world.remote = json.dumps({"directory": {"path": str(store)}})
    world.policy = dataclasses.replace(world.policy, remote_every=1)
    world.launch()
    with world.ranks(9 * MIB) as ranks:
        for rank in ranks:
            assert rank.save(1)
        world.reach("remote", Version(1, 1))
        assert world.report(1).remote.ranks == (), (
            "manifests name every rank, so one worker reads them for all"
        )
    world.lose(0, 1)
    world.workers, world.others = 1, 2
    world.start(0)
    until(lambda: world.report(0).remote.ranks == (2,), "by how many ranks it was made is told")
    world.begin(Version(1, 1))
    with world.rank(0) as rank:
        assert (rank.welcome.restore_world_size, rank.welcome.restore_path) == (2, "")
        assert rank.welcome.restore_source == "the snapshots of 2 ranks"
        path = Path(rank.ask("borrow", step=1, rank=1, ranges=((5 * MIB, 5 * MIB + 1),)).path)
        original = next(store.rglob("rank-1.safetensors")).read_bytes()
        assert path.read_bytes()[4 * MIB : 8 * MIB] == original[4 * MIB : 8 * MIB]
        assert there(path) <= 8 * MIB
        assert rank.ask("borrow", step=1, rank=2).error
        assert rank.ask("restored", step=1).ok
        assert not path.exists()


def test_fewer_ranks_come_back_from_memory_which_keeps_the_old_snapshot_until_their_own_version_is_complete(
    make_world: MakeWorld,
) -> None:
    """Deltas had led further than the snapshot, from which alone other ranks can start."""
    world = make_world(workers=3)
    world.policy = dataclasses.replace(world.policy, snapshot_every=3)
    world.launch()
    reached, old, new = Version(3, 1), Version(1, 1), Version(4, 2)
    with world.ranks(300_000, 40_000) as ranks:
        for rank in ranks:
            assert rank.save(1)
        for rank in ranks:
            until(lambda r=rank: r.save_delta(2), "a slot for the delta of step 2")
        for rank in ranks:
            until(lambda r=rank: r.save_delta(3), "a slot for the delta of step 3")
        world.reach("peer", reached)
    world.lose(2)
    world.workers, world.others = 2, 3
    where = {0: (0, 1), 1: (1,), 2: (0,)}
    world.begin(old, {rank: tuple(map(world.from_peer, workers)) for rank, workers in where.items()})
    with world.ranks() as ranks:
        for rank in ranks:
            assert (rank.welcome.restore_version, rank.welcome.restore_world_size) == (old, 3)
            for lost in range(3):
                path = rank.ask("borrow", step=1, rank=lost).path
                assert read_header(Path(path).read_bytes()).version == old, f"rank {lost}"
            assert "needs no snapshot of step 3" in rank.ask("borrow", step=3, rank=1).error
            assert "needs no delta of step 2" in rank.ask("borrow", step=2, kind=Kind.DELTA, rank=1).error
            assert rank.ask("restored", step=1).ok
        assert world.report(0).watermarks.local is None, "what three ranks saved is not what two have saved"
        assert ranks[0].save(4)
        until(lambda: world.holds(0, 0, new), "rank 0 has saved step 4")
        for rank, workers in where.items():
            for worker in workers:
                assert world.holds(worker, rank, old), "rank 1 has not, so all must stay"
        assert ranks[1].save(4)
        world.reach("peer", new)
        for rank, workers in where.items():
            for worker in workers:
                until(lambda w=worker, r=rank: not world.holds(w, r, old), f"{worker} gives up rank {rank}")


class Bucket:
    """A remote tier that gives `body`, described by `digests`."""

    def __init__(self, body: bytes, digests: Digests) -> None:
        self.body, self.described = body, digests

    @contextlib.contextmanager
    def open(self, artifact: Artifact, call: BoundedCall) -> Iterator[OpenArtifact]:
        def read(indices: Sequence[int], sink: ArtifactSink) -> None:
            chunk = self.described.chunk
            for index in indices:
                sink.room(self.described, index)[:] = self.body[index * chunk : (index + 1) * chunk]

        seal = Seal(artifact.rank, artifact.version, 2, Tier.LOCAL, self.described, artifact.kind)
        yield OpenArtifact(seal, read)

    def close(self) -> None:
        pass


def described(body: bytes) -> Digests:
    return digest(memoryview(body), 4096)


def slot_of(rank: int) -> bytes:
    plan = SlotLayout.plan([("weight", "U8", (20_000,), 20_000)])
    return plan.state_word + plan.header(rank, Version(5, 1), 2, {}) + bytes(20_000)


TOO_LONG = struct.pack("<Q", 1 << 20) + bytes(8192)


@pytest.mark.parametrize(
    ("body", "digests", "reason"),
    [
        (TOO_LONG, described(TOO_LONG), "its header reaches to byte 1048584 of 8200"),
        (b"", described(b""), "it has 0 bytes"),
        (bytes(8192), described(bytes(8192)), "torn"),
        (slot_of(0), Digests(20_000, 4096, ()), "it has digests of 0 of 20000 bytes"),
        (slot_of(1), described(slot_of(1)), "rank 1"),
    ],
)
def test_artifact_that_is_none_is_refused_and_not_read_for_ever(
    job: Stations, body: bytes, digests: Digests, reason: str
) -> None:
    lender = job[3].reach(Bucket(body, digests)).lender()
    with pytest.raises(SourceFailed, match=reason):
        lender.lend(directive(job), Artifact(0, Version(5, 1)), ())
    lender.close()


def test_artifact_of_the_remote_tier_is_lent(job: Stations) -> None:
    body = slot_of(0)
    lender = job[3].reach(Bucket(body, described(body))).lender()
    assert lender.lend(directive(job), Artifact(0, Version(5, 1)), [(0, len(body))]).read_bytes() == body
    lender.close()
