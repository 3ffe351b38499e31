"""A tagged chunk is what was sealed at that place of that artifact, whoever brings it."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.sidecar.stations import TOKEN, MakeStations, MeddledChannel, send_bytes
from tests.sidecar.world import JOB_UID
from tiercheck.protocol.artifacts.sizing import cost
from tiercheck.protocol.directive import Policy, Tier
from tiercheck.protocol.encoding import from_json, to_json
from tiercheck.protocol.version import Artifact, Kind, Version
from tiercheck_sidecar import tags
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.exchange.fetch import fetch
from tiercheck_sidecar.exchange.frames import END, PeerRequest, PeerResponse, Wire, WireBroken
from tiercheck_sidecar.exchange.session import Chunks
from tiercheck_sidecar.replicate.lane import push
from tiercheck_sidecar.tags import Tagger, Tags, digest_and_tag, is_well_described
from tiercheck_sidecar.vault import Seal, Vault
from tiercheck_sidecar.vault.seal import read_seal, seal_path, write_seal

MIB = 1 << 20
ARTIFACT = Artifact(3, Version(5, 2))


def tagged(content: bytes, tagger: Tagger) -> Tags:
    _, found = digest_and_tag(memoryview(content), tagger)
    assert found is not None
    return found


def fits(tagger: Tagger, said: Tags, index: int, chunk: memoryview) -> bool:
    expected = tagger.running(index, said.of(index))
    expected.update(chunk)
    return expected.fits()


ARTIFACTS = st.builds(
    Artifact,
    st.integers(0, 3),
    st.builds(Version, st.integers(0, 3), st.integers(1, 3)),
    st.sampled_from(Kind),
)
SEALED = st.tuples(ARTIFACTS, st.sampled_from([TOKEN, "another"]), st.sampled_from([JOB_UID, "another"]))


@given(
    one=SEALED,
    two=SEALED,
    chunks=st.lists(st.binary(min_size=4, max_size=4), min_size=1, max_size=4),
    again=st.booleans(),
    data=st.data(),
)
@settings(max_examples=examples(150))
def test_chunk_fits_where_it_was_sealed_and_nowhere_else(
    one: tuple[Artifact, str, str],
    two: tuple[Artifact, str, str],
    chunks: list[bytes],
    again: bool,
    data: st.DataObject,
) -> None:
    """Not in another place, artifact, kind, attempt or job, nor under the tags of another time that the same
    artifact was sealed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tags, "CHUNK", 4)
        sealer = Tagger(one[1], one[2], one[0])
        known = tagged(b"".join(chunks), sealer)
    checker = Tagger(two[1], two[2], two[0], Tagger(*two[1:], two[0]).salt if again else known.salt)
    source, place = data.draw(st.integers(0, len(chunks) - 1)), data.draw(st.integers(0, len(chunks) - 1))
    same = one == two and not again and chunks[source] == chunks[place]
    assert fits(checker, known, place, memoryview(chunks[source])) == same
    assert len({known.of(index) for index in range(len(chunks))}) == len(chunks), "of equal chunks too"


@pytest.mark.parametrize("size", [1, MIB // 4, MIB // 4 + 1, 4 * MIB, 4 * MIB + 1, 9 * MIB - 7])
def test_one_pass_gives_the_digests_that_others_compute_and_a_tag_for_each_chunk(size: int) -> None:
    content = memoryview(os.urandom(size))
    tagger = Tagger(TOKEN, JOB_UID, ARTIFACT)
    digests, found = digest_and_tag(content, tagger)
    assert digests == digest(content) == digest_and_tag(content, None)[0]
    assert found is not None
    assert is_well_described(digests, found)
    for index in range(len(digests.values)):
        chunk = bytearray(content[index * digests.chunk : (index + 1) * digests.chunk])
        assert fits(tagger, found, index, memoryview(chunk))
        chunk[len(chunk) // 2] ^= 1
        assert not fits(tagger, found, index, memoryview(chunk))
        assert not fits(tagger, found, index, memoryview(chunk)[:-1])


def test_what_is_sealed_twice_has_a_key_of_its_own_each_time() -> None:
    """Two texts under one key and nonce would give the key of all tags away."""
    first, second = Tagger(TOKEN, JOB_UID, ARTIFACT), Tagger(TOKEN, JOB_UID, ARTIFACT)
    assert first.salt != second.salt
    assert tagged(b"state", first).values != tagged(b"state", second).values


def test_tags_of_another_number_than_there_are_chunks_or_that_are_no_text_make_no_sense() -> None:
    digests, found = digest_and_tag(memoryview(bytes(5 * MIB)), Tagger(TOKEN, JOB_UID, ARTIFACT))
    assert found is not None
    assert is_well_described(digests, found)
    assert is_well_described(digests, None)
    for values in ("", found.values[:-1], found.values + "0", found.values[32:], "\ud800" * 64):
        assert not is_well_described(digests, Tags(found.salt, values))
    assert not is_well_described(digests, Tags("\ud800", found.values))
    assert not is_well_described(None, found)


# Seals


def test_tags_outlive_the_process_and_a_seal_of_before_there_were_any_is_still_one(tmp_path: Path) -> None:
    content = memoryview(os.urandom(5 * MIB))
    digests, found = digest_and_tag(content, Tagger(TOKEN, JOB_UID, ARTIFACT))
    seal = Seal(3, Version(5, 2), 4, Tier.LOCAL, digests, tags=found)
    write_seal(tmp_path / "slot", seal)
    read = read_seal(tmp_path / "slot")
    assert read is not None
    assert (read, read.tags) == (seal, found)
    assert seal == replace(seal, tags=None), "they say nothing that the digests do not"
    raw = to_json(seal).replace(to_json(found), b"null").replace(b',"tags":null', b"")
    assert from_json(raw, Seal) == seal
    assert from_json(raw, Seal).tags is None


def test_seal_with_tags_takes_no_more_memory_than_is_set_aside_for_it(tmp_path: Path) -> None:
    size = 1 << 33
    chunks = size // (4 * MIB)
    digests = replace(digest(memoryview(b"x")), size=size, values=("f" * 32,) * chunks)
    seal = Seal(
        10**6, Version(10**9, 10**6), 10**6, Tier.LOCAL, digests, tags=Tags("f" * 64, "f" * 32 * chunks)
    )
    write_seal(tmp_path / "slot", seal)
    assert size + seal_path(tmp_path / "slot").stat().st_size <= cost(size)


@pytest.mark.parametrize("why", ["encrypted", "kept by nobody", "before the first directive"])
def test_tags_are_not_made_where_nobody_would_check_them(stations: MakeStations, why: str) -> None:
    job = stations(workers=1 if why == "kept by nobody" else 2)
    state = job[0].state
    assert (state.tagger(ARTIFACT) is None) == (why == "kept by nobody")
    if why == "encrypted":
        job.next_attempt(policy=Policy(None, 1_000_000, 5, peer_encrypted=True))
    if why == "before the first directive":
        state.directive = None
    assert state.tagger(ARTIFACT) is None
    assert job[0].save(Version(7, job.attempt), 5000).tags is None


# On the wire


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends chunks must not read them."""

    def read(*_: object) -> int:
        raise AssertionError("bytes were read on their way out")

    monkeypatch.setattr(os, "preadv", read)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("kind", Kind)
def test_nobody_reads_what_was_sealed_with_tags_on_its_way_to_a_holder_and_back(
    stations: MakeStations, kind: Kind
) -> None:
    job = stations(workers=3, limit=1 << 30)
    if kind is Kind.DELTA:
        job[0].save(Version(4, 1), 9 * MIB)
    seal = job[0].save(Version(5, 1), 9 * MIB, kind)
    content = job[0].content(seal, Tier.LOCAL)
    with job[0].line(1) as line:
        assert push(job[0].vault, seal, line)
        assert line.sent == seal.digests.size
    job[0].vault.evict(lambda _: True)
    fetched = fetch(job[0].vault, seal.artifact, job[0].dials(1)).seal
    assert fetched.tags == seal.tags, "what came back can be sent on as it is"
    with job[0].line(1) as line:
        job[1].vault.evict(lambda _: True)
        assert push(job[0].vault, fetched, line)
    assert job[1].content(seal, Tier.PEER) == content


def test_copy_that_a_restarted_holder_finds_again_is_served_as_it_was(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = stations()
    seal = job[0].save(Version(5, 1), 5 * MIB)
    job[0].push(seal, 1)
    folder = job[1].directory
    again = Vault(folder, job.limit, (1,))
    again.open()
    held = again.find(Artifact(0, Version(5, 1)), Tier.PEER)
    assert held is not None
    assert held.tags == seal.tags


@pytest.mark.parametrize("encrypted", [False, True])
def test_artifact_without_tags_is_sent_fetched_and_right(stations: MakeStations, encrypted: bool) -> None:
    """Sealed by a sidecar that made none, or brought back from the remote tier; and whatever has tags is
    enciphered all the same."""
    job = stations()
    seal = job[0].save(Version(5, 1), 9 * MIB)
    content = job[0].content(seal, Tier.LOCAL)
    for station in job.stations:
        station.identity.encrypts = lambda: encrypted
    sent = seal if encrypted else replace(seal, tags=None)
    assert job[0].push(sent, 1)
    copy = job[1].vault.find(Artifact(0, Version(5, 1)), Tier.PEER)
    assert copy is not None
    assert (copy.tags is None) != encrypted
    job[0].vault.evict(lambda _: True)
    fetch(job[0].vault, seal.artifact, job[0].dials(1))
    assert job[0].content(seal, Tier.LOCAL) == content


def test_good_bytes_with_wrong_tags_still_reach_a_holder_and_come_back(stations: MakeStations) -> None:
    """Memory may bend a tag as it bends anything. Then frames prove the bytes, as without tags."""
    job = stations()
    seal = job[0].save(Version(5, 1), 9 * MIB)
    content = job[0].content(seal, Tier.LOCAL)
    assert seal.tags is not None
    bent = replace(seal, tags=replace(seal.tags, values="0" * len(seal.tags.values)))
    assert job[0].push(bent, 1)
    job[0].vault.evict(lambda _: True)
    fetched = fetch(job[0].vault, seal.artifact, job[0].dials(1))
    assert not fetched.bad
    assert job[1].holds(seal.artifact), "nobody calls the copy bad"
    assert job[0].content(seal, Tier.LOCAL) == content


class Altering(Wire):
    """A line on which somebody changes what travels bare."""

    def __init__(self, wire: Wire) -> None:
        self.__dict__ = wire.__dict__ | {"channel": MeddledChannel(wire.channel, self._alter)}
        self.altered = 0

    def _alter(self, arrived: memoryview) -> None:
        if self._bare and len(arrived) > 1000:
            arrived[77] ^= 1
            self.altered += 1


def test_chunk_that_was_changed_and_has_the_right_digest_is_not_taken(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """xxh3 has no secret: anybody can make such bytes."""
    job = stations()
    seal = job[0].save(Version(5, 1), 9 * MIB)
    content = job[0].content(seal, Tier.LOCAL)
    job[0].push(seal, 1)
    job[0].vault.evict(lambda _: True)
    wires: list[Altering] = []
    (holder,) = job[0].dials(1)

    def connect() -> Wire:
        wires.append(Altering(holder.connect()))
        return wires[-1]

    receive = Chunks.receive
    monkeypatch.setattr(Chunks, "receive", lambda *those: receive(*those) or True)
    fetched = fetch(job[0].vault, seal.artifact, [replace(holder, connect=connect)])
    assert sum(wire.altered for wire in wires) > 0
    assert not fetched.bad
    assert job[0].content(seal, Tier.LOCAL) == content


@pytest.mark.parametrize("how", ["no tags", "encrypted", "of another chunk", "of another artifact"])
def test_bare_chunk_that_nothing_vouches_for_counts_for_nothing(stations: MakeStations, how: str) -> None:
    job = stations()
    if how == "encrypted":
        job[0].identity.encrypts = lambda: True
    seal = job[0].save(Version(5, 1), 9 * MIB)
    content = job[0].content(seal, Tier.LOCAL)
    sent = {"of another chunk": content[4 * MIB : 8 * MIB], "of another artifact": os.urandom(4 * MIB)}

    def damaged(wire: Wire) -> tuple[int, ...]:
        wire.send(PeerRequest("join", transfer=transfer))
        if how == "encrypted":
            wire._out.encrypted = False  # type: ignore[union-attr]  # it means to send in the clear
        send_bytes(wire, 0, sent.get(how, content[: 4 * MIB]), bare=True)
        wire.send_end()
        return wire.receive(PeerResponse).damaged

    with closing(job[0].connect(1)) as wire:
        offered = None if how == "no tags" else seal.tags
        wire.send(PeerRequest("offer", 0, seal.version, seal.world_size, seal.digests, tags=offered))
        transfer = wire.receive(PeerResponse).transfer
        if how == "encrypted":
            with pytest.raises(WireBroken):
                damaged(wire)
        else:
            assert damaged(wire) == (0,)
    arriving = job[1].server.inbox.find(transfer, 0)
    assert arriving is not None
    assert arriving.verified == set()


def test_offer_with_senseless_tags_is_refused_and_a_copy_with_such_is_not_read(
    stations: MakeStations,
) -> None:
    job = stations()
    seal = job[0].save(Version(5, 1), 9 * MIB)
    assert seal.tags is not None
    with closing(job[0].connect(1)) as wire:
        short = Tags(seal.tags.salt, "0" * 32)
        wire.send(PeerRequest("offer", 0, seal.version, seal.world_size, seal.digests, tags=short))
        assert wire.receive(PeerResponse).state == "refused"


def test_reader_that_knows_no_tags_is_sent_frames(stations: MakeStations) -> None:
    """A rehearsal, say: it wants to know whether the copy is bad, or the line."""
    job = stations()
    seal = job[0].save(Version(5, 1), 5 * MIB)
    with closing(job[1].connect(0)) as wire:
        wire.send(PeerRequest("read", 0, Version(5, 1)))
        assert wire.receive(PeerResponse).tags == seal.tags
        wire.send_index(1)
        index, length = wire.receive_chunk_header()
        view = memoryview(bytearray(length))
        assert wire.receive_into(view) is False
        assert index == 1
        assert view == job[0].content(seal, Tier.LOCAL)[4 * MIB :]
        wire.send_index(END)
