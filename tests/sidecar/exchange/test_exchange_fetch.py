"""Restoring from peers: several holders at once, and none of them able to harm what another can give.

The rules by which chunks are gathered and sent again hold under every order of events.
"""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.sidecar.stations import MakeStations, MeddledChannel, Station, Stations
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Artifact, Kind, Version
from tiercheck_sidecar.artifact_source import FetchFailed
from tiercheck_sidecar.exchange.fetch import Dial, fetch, holdings
from tiercheck_sidecar.exchange.frames import Wire, WireBroken
from tiercheck_sidecar.exchange.streams import DAMAGED_MOST, OVERDUE, ChunkQueue, ChunkScheduler
from tiercheck_sidecar.replicate.lane import FIRST, LONGEST, Backoff
from tiercheck_sidecar.vault import NoFreeSlot, Seal

MIB = 1 << 20
LARGE = 41 * MIB


@pytest.fixture
def job(stations: MakeStations) -> Stations:
    return stations(workers=3)


def copied(job: Stations, size: int = LARGE, kind: Kind = Kind.SNAPSHOT) -> tuple[Seal, Artifact, bytes]:
    """Worker 0's artifact, at workers 1 and 2 as well; then worker 0 loses it."""
    version = Version(5, 1)
    if kind is Kind.DELTA:
        job[0].save(Version(4, 1), size)
    seal = job[0].save(version, size, kind)
    content = job[0].content(seal, Tier.LOCAL)
    for worker in (1, 2):
        plant(job[worker], seal, content)
    job[0].vault.evict(lambda each: True)
    return seal, Artifact(0, version, kind), content


def plant(station: Station, seal: Seal, content: bytes) -> None:
    station.vault.host([seal.rank])
    draft = station.vault.draft(replace(seal, tier=Tier.PEER))
    draft.view[:] = content
    draft.keep()


class Cable(Wire):
    """A connection over which only `chunks` chunks arrive."""

    def __init__(self, wire: Wire, chunks: int) -> None:
        self.__dict__ = wire.__dict__
        self._left = chunks

    def receive_chunk_header(self) -> tuple[int, int]:
        if self._left == 0:
            self.cut()
            raise WireBroken("the cable was pulled")
        self._left -= 1
        return super().receive_chunk_header()


def test_artifact_comes_back_from_two_holders_at_once(job: Stations) -> None:
    seal, artifact, content = copied(job)
    asked = {1: threading.Event(), 2: threading.Event()}

    def dialled(holder: int) -> Dial:
        class Together(Wire):
            def __init__(self) -> None:
                self.__dict__ = job[0].connect(holder).__dict__

            def send_index(self, index: int) -> None:
                """None is asked before the other is, too: one alone might bring everything."""
                asked[holder].set()
                assert all(event.wait(20) for event in asked.values())
                super().send_index(index)

        return Dial(holder, Together)

    fetched = fetch(job[0].vault, artifact, [dialled(1), dialled(2)])
    assert fetched.workers == (1, 2), "each brought a part"
    assert fetched.seal == seal
    assert not fetched.bad
    assert job[0].content(seal, Tier.LOCAL) == content


@pytest.mark.parametrize("size", [1, 5000, 4 * MIB, 9 * MIB])
def test_delta_of_any_size_comes_back(stations: MakeStations, size: int) -> None:
    job = stations(workers=3, limit=1 << 30)
    seal, artifact, content = copied(job, size, Kind.DELTA)
    fetch(job[0].vault, artifact, job[0].dials(1))
    assert job[0].content(seal, Tier.LOCAL) == content


def test_bad_copy_is_named_and_the_good_one_is_used(job: Stations) -> None:
    seal, artifact, content = copied(job)
    job[1].flip(seal, Tier.PEER, *range(len(seal.digests.values)))
    answered = threading.Event()

    class Eager(Wire):
        def __init__(self, wire: Wire) -> None:
            self.__dict__ = wire.__dict__

        def receive_chunk_header(self) -> tuple[int, int]:
            header = super().receive_chunk_header()
            answered.set()
            return header

    class Patient(Eager):
        def send_index(self, index: int) -> None:
            """Lets the bad copy be asked first: else the good one might bring everything."""
            assert answered.wait(20)
            super().send_index(index)

    sources = [Dial(1, lambda: Eager(job[0].connect(1))), Dial(2, lambda: Patient(job[0].connect(2)))]
    fetched = fetch(job[0].vault, artifact, sources)
    assert [bad.worker for bad in fetched.bad] == [1]
    assert fetched.workers == (2,)
    assert job[0].content(seal, Tier.LOCAL) == content
    assert not job[1].holds(artifact), "its holder read it again, and gave it up"
    assert [bad.worker for bad in job[1].state.quarantined] == [1]


def test_copies_that_are_bad_in_different_places_make_a_good_one(job: Stations) -> None:
    seal, artifact, content = copied(job)
    job[1].flip(seal, Tier.PEER, 2)
    job[2].flip(seal, Tier.PEER, 7)
    fetch(job[0].vault, artifact, job[0].dials(1, 2))
    assert job[0].content(seal, Tier.LOCAL) == content


def test_only_copy_being_bad_is_an_error_that_names_it(job: Stations) -> None:
    seal, artifact, _ = copied(job)
    job[1].flip(seal, Tier.PEER, 2, 3)
    with pytest.raises(FetchFailed, match="the copy at worker 1 is bad") as failure:
        fetch(job[0].vault, artifact, job[0].dials(1))
    assert [bad.worker for bad in failure.value.bad] == [1]
    assert not job[0].holds(artifact, Tier.LOCAL), "a half-restored slot is never offered"
    fetch(job[0].vault, artifact, job[0].dials(2))


def test_holder_that_dies_in_the_middle_is_made_up_for(job: Stations) -> None:
    seal, artifact, content = copied(job)
    cables = [Cable(job[0].connect(1), 2)]

    def dying() -> Wire:
        if not cables:
            raise WireBroken("no route to host")
        return cables.pop()

    fetched = fetch(job[0].vault, artifact, [Dial(1, dying), *job[0].dials(2)])
    assert 2 in fetched.workers
    assert not fetched.bad, "a broken line is no bad copy"
    assert job[0].content(seal, Tier.LOCAL) == content


def test_broken_line_to_the_only_holder_costs_what_was_on_it(job: Stations) -> None:
    seal, artifact, content = copied(job)
    made: list[Cable] = []

    def flaky() -> Wire:
        made.append(Cable(job[0].connect(1), 3))
        return made[-1]

    fetch(job[0].vault, artifact, [Dial(1, flaky)])
    assert job[0].content(seal, Tier.LOCAL) == content
    assert len(made) >= 4, "eleven chunks, three for each connection"


def test_holder_that_stalls_holds_up_nobody(job: Stations) -> None:
    """What it owes is asked of the other one, long before its connection counts as broken."""
    seal, artifact, content = copied(job)

    class Stalled(Wire):
        def __init__(self, wire: Wire) -> None:
            self.__dict__ = wire.__dict__

        def send_index(self, index: int) -> None:
            """Nobody hears it, so nothing comes."""

    fetched = fetch(job[0].vault, artifact, [Dial(1, lambda: Stalled(job[0].connect(1))), *job[0].dials(2)])
    assert fetched.workers == (2,)
    assert job[0].content(seal, Tier.LOCAL) == content


def test_holder_that_does_not_answer_is_not_waited_for(job: Stations) -> None:
    seal, artifact, content = copied(job, 5 * MIB)
    with socket.create_server((job.host(7), 0)) as silent:

        def deaf() -> Wire:
            wire = Wire(socket.create_connection(silent.getsockname()))
            wire.receive(dict)
            return wire

        fetched = fetch(job[0].vault, artifact, [Dial(1, deaf), *job[0].dials(2)])
    assert fetched.workers == (2,)
    assert job[0].content(seal, Tier.LOCAL) == content


def test_holder_without_it_and_holder_with_other_content_do_no_harm(stations: MakeStations) -> None:
    job = stations(workers=4)
    seal, artifact, content = copied(job, 5 * MIB)
    job[3].vault.host([0])
    fetched = fetch(job[0].vault, artifact, job[0].dials(3, 1, 2))
    assert fetched.seal == seal
    assert job[0].content(seal, Tier.LOCAL) == content


def test_nobody_having_it_says_so_for_each(job: Stations) -> None:
    with pytest.raises(FetchFailed) as failure:
        fetch(job[0].vault, Artifact(0, Version(5, 1)), job[0].dials(1, 2))
    said = sorted(failure.value.reasons)
    assert [reason.split(":")[0] for reason in said] == ["worker 1", "worker 2"]
    assert all("not here" in reason for reason in said)
    with pytest.raises(FetchFailed, match="no source is known"):
        fetch(job[0].vault, Artifact(0, Version(5, 1)), [])


def test_no_room_is_said_before_a_byte_travels(job: Stations) -> None:
    _, artifact, _ = copied(job, 5 * MIB)
    for step in (10, 11, 12):
        job[0].save(Version(step, 1), 5 * MIB)
    with pytest.raises(NoFreeSlot):
        fetch(job[0].vault, artifact, job[0].dials(1))


def test_what_a_peer_holds_can_be_asked(job: Stations) -> None:
    snapshot = job[0].save(Version(4, 1), MIB)
    delta = job[0].save(Version(5, 1), 5000, Kind.DELTA)
    for seal in (snapshot, delta):
        plant(job[1], seal, job[0].content(seal, Tier.LOCAL))
    (dial,) = job[2].dials(1)
    listed = {each.artifact: each.bytes for each in holdings(dial, 0)}
    assert listed == {
        Artifact(0, Version(4, 1)): snapshot.digests.size,
        Artifact(0, Version(5, 1), Kind.DELTA): delta.digests.size,
    }
    assert holdings(dial, 2) == ()


def test_line_that_damages_is_not_taken_for_a_bad_copy(job: Stations) -> None:
    seal, artifact, content = copied(job, 13 * MIB)

    def damage(arrived: memoryview) -> None:
        if len(arrived) > 1000:
            arrived[77] ^= 1

    class Noisy(Wire):
        def __init__(self, wire: Wire) -> None:
            self.__dict__ = wire.__dict__ | {"channel": MeddledChannel(wire.channel, damage)}

    fetched = fetch(job[0].vault, artifact, [Dial(1, lambda: Noisy(job[0].connect(1))), *job[0].dials(2)])
    assert not fetched.bad
    assert job[1].holds(artifact)
    assert job[0].content(seal, Tier.LOCAL) == content


EVENTS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["take", "arrive", "damage", "lose", "drop", "wait"])),
    max_size=200,
)


@settings(max_examples=examples(300))
@given(chunks=st.integers(1, 12), events=EVENTS)
def test_no_chunk_is_lost_whatever_happens_and_the_rest_completes(
    chunks: int, events: list[tuple[int, str]]
) -> None:
    sources = range(4)
    gathering = ChunkScheduler(chunks, sources)
    owed: dict[int, list[int]] = {source: [] for source in sources}
    arrived: set[int] = set()
    now = 0.0
    for source, event in events:
        if event == "wait":
            now += OVERDUE / 2
        elif event == "drop":
            gathering.drop(source)
            owed[source].clear()
        elif event == "take":
            index = gathering.take(source, now)
            if index is not None:
                assert gathering.is_live(source)
                assert index not in owed[source], "a source is not asked twice at once"
                assert index not in arrived, "what is here is not asked for again"
                owed[source].append(index)
        elif owed[source]:
            index = owed[source].pop(0)
            if event == "arrive":
                assert gathering.arrived(index, source) == (index not in arrived)
                arrived.add(index)
            elif event == "damage":
                gathering.damaged(index, source)
                if not gathering.is_live(source):
                    owed[source].clear()
            else:
                gathering.lost([index], source)
        assert sum(map(gathering.is_here, range(chunks))) == len(arrived)
        askers = {index: sum(index in those for those in owed.values()) for index in range(chunks)}
        assert max(askers.values()) <= 2, "at most two sources are asked for one chunk"
    # One good source that is left brings everything that is missing, once the others have given up.
    live = [source for source in sources if gathering.is_live(source)]
    if not live:
        assert gathering.over
        return
    survivor = live[0]
    for source in live[1:]:
        gathering.drop(source)
    gathering.lost(owed[survivor], survivor)
    while (index := gathering.take(survivor, now)) is not None:
        gathering.arrived(index, survivor)
    assert gathering.complete


def test_chunk_that_came_damaged_is_asked_of_another_first() -> None:
    gathering = ChunkScheduler(1, ["a", "b"])
    assert gathering.take("a", 0) == 0
    gathering.damaged(0, "a")
    assert gathering.take("a", 0) is None
    assert gathering.take("b", 0) == 0
    gathering.damaged(0, "b")
    assert gathering.take("a", 0) == 0, "nobody else is left to ask"


def test_source_that_damages_repeatedly_is_dropped_and_one_bad_chunk_is_forgiven() -> None:
    gathering = ChunkScheduler(DAMAGED_MOST + 1, ["a", "b"])
    for fault in range(DAMAGED_MOST):
        assert gathering.is_live("a")
        assert gathering.brought_damaged("a") == (fault > 0)
        gathering.damaged(gathering.take("a", fault), "a")
    assert not gathering.brought_damaged("b")
    assert not gathering.is_live("a")


def test_chunk_that_is_overdue_is_asked_of_a_second_source_and_only_then() -> None:
    gathering = ChunkScheduler(1, ["slow", "fast", "other"])
    assert gathering.take("slow", 0) == 0
    assert gathering.take("fast", OVERDUE / 2) is None
    assert gathering.take("slow", OVERDUE) is None
    assert gathering.take("fast", OVERDUE) == 0
    assert gathering.take("other", 9 * OVERDUE) is None, "not of a third"
    assert gathering.arrived(0, "fast")
    assert not gathering.arrived(0, "slow")


@settings(max_examples=examples(200))
@given(chunks=st.integers(1, 20), data=st.data())
def test_push_that_breaks_again_and_again_brings_every_chunk(chunks: int, data: st.DataObject) -> None:
    """Each connection carries some chunks, of which some are damaged, and breaks; what the holder has
    verified is not dealt again."""
    verified: set[int] = set()
    sent = 0
    while len(verified) < chunks:
        deal = ChunkQueue(chunks, verified)
        assert len(deal) == chunks - len(verified)
        for _ in range(data.draw(st.integers(1, chunks))):
            index = deal.take()
            if index is None:
                break
            assert index not in verified
            sent += 1
            if data.draw(st.integers(0, 9)) or sent > 10 * chunks:
                verified.add(index)
    assert verified == set(range(chunks))


@given(failures=st.integers(1, 30))
def test_waiting_grows_and_is_bounded(failures: int) -> None:
    backoff: Backoff[str] = Backoff()
    assert backoff.ready("rank", 0.0)
    before = 0.0
    for count in range(1, failures + 1):
        assert backoff.failed("rank", 0.0) == count
        assert FIRST <= backoff.until("rank") <= LONGEST
        assert backoff.until("rank") >= before
        assert not backoff.ready("rank", backoff.until("rank") - 0.01)
        assert backoff.ready("rank", backoff.until("rank"))
        assert backoff.ready("another rank", 0.0)
        before = backoff.until("rank")
    backoff.succeeded("rank")
    assert backoff.ready("rank", 0.0)
