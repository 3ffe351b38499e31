"""What is sealed reaches the holder in the right order, whoever else is slow."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

import pytest

from tests.sidecar.stations import MakeStations, Stations
from tests.sidecar.world import until
from tiercheck.protocol.directive import Peer, Policy, Tier
from tiercheck.protocol.report import Watermarks
from tiercheck.protocol.version import Artifact, Branch, Digests, History, Kind, Version
from tiercheck_sidecar.exchange import handshake
from tiercheck_sidecar.exchange.frames import ListedArtifact, PeerRequest, PeerResponse, Wire
from tiercheck_sidecar.exchange.handshake import Identity, PeerRefused, dial
from tiercheck_sidecar.exchange.server import ExchangeServer
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.pacing import SMALLEST_PIECE, Portion, TokenBucket
from tiercheck_sidecar.replicate import lane, replicate
from tiercheck_sidecar.replicate.lane import due, first_of_each_rank
from tiercheck_sidecar.replicate.replicate import still_kept
from tiercheck_sidecar.vault import Seal
from tiercheck_sidecar.vault.stock import MemoryStock, StockPlace, by_rank

MIB = 1 << 20
V = Version


def snapshot(step: int, rank: int = 0) -> Artifact:
    return Artifact(rank, V(step, 1))


def delta(step: int, rank: int = 0) -> Artifact:
    return Artifact(rank, V(step, 1), Kind.DELTA)


def acknowledged(job: Stations, worker: int = 0) -> frozenset[Artifact]:
    directive = job[worker].state.directive
    assert directive is not None
    return frozenset(
        Artifact(rank, version, kind)
        for _, stocks in job[worker].replicator.acknowledged(directive)
        for rank, stock in stocks.items()
        for kind in Kind
        for version in stock.of(kind)
    )


@pytest.fixture
def job(stations: MakeStations) -> Stations:
    """Two workers, each of whom keeps the other's copies."""
    return stations()


def test_named_snapshot_and_every_delta_after_it_reach_the_holder(job: Stations) -> None:
    job[0].save(V(1, 1), MIB)
    job[0].save(V(2, 1), 5000, Kind.DELTA)
    job[0].save(V(3, 1), 5000, Kind.DELTA)
    job[0].save(V(3, 1), MIB)
    job[0].save(V(4, 1), 5000, Kind.DELTA)
    job[0].replicate(V(3, 1))
    until(lambda: acknowledged(job) >= {snapshot(3), delta(4)}, "copied")
    assert acknowledged(job) == {snapshot(3), delta(4)}, (
        "neither older deltas nor snapshots that are not named"
    )
    assert {(seal.kind, seal.version.step) for seal in job[1].vault.held()} == {
        (Kind.SNAPSHOT, 3),
        (Kind.DELTA, 4),
    }
    job[0].save(V(5, 1), 5000, Kind.DELTA)
    until(lambda: job[1].holds(delta(5)), "the next delta follows by itself")


def test_only_holders_of_the_directive_count_and_only_what_they_acknowledged_in_its_attempt(
    job: Stations,
) -> None:
    """Else a sidecar that was just started says that it has no holders, and one that was just told of others
    that they have everything."""
    directive = job[0].state.directive
    assert directive is not None
    assert job[0].replicator.acknowledged(directive) == [(1, {})], "nothing was sent yet"
    job[0].save(V(1, 1), MIB)
    job[0].replicate(V(1, 1))
    until(lambda: acknowledged(job) == {snapshot(1)}, "copied")
    moved = replace(directive, holders=(Peer(1, job.host(2)),))
    later = replace(directive, attempt=2)
    assert job[0].replicator.acknowledged(moved) == [(1, {})], "another pod of that worker"
    assert job[0].replicator.acknowledged(later) == [(1, {})]


def test_deltas_pass_while_a_snapshot_is_held_up(job: Stations, monkeypatch: pytest.MonkeyPatch) -> None:
    job[0].save(V(1, 1), 9 * MIB)
    began, go_on = threading.Event(), threading.Event()
    real = Wire.send_chunk

    def held_up(*arguments: object, **more: object) -> None:
        if threading.current_thread().name.startswith("snapshot"):
            began.set()
            go_on.wait(60)
        real(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(lane, "stream_count", lambda *_: 1)
    monkeypatch.setattr(Wire, "send_chunk", held_up)
    job[0].replicate(V(1, 1))
    try:
        assert began.wait(30)
        for step in (2, 3):
            job[0].save(V(step, 1), 5000, Kind.DELTA)
        until(lambda: acknowledged(job) == {delta(2), delta(3)}, "deltas do not wait")
    finally:
        go_on.set()
    until(lambda: snapshot(1) in acknowledged(job), "the snapshot arrives too")


def test_every_rank_of_a_worker_is_served(stations: MakeStations) -> None:
    job = stations(procs=4)
    for rank in range(4):
        job[0].save(V(1, 1), MIB, rank=rank)
    for step in (2, 3):
        for rank in range(4):
            job[0].save(V(step, 1), 5000, Kind.DELTA, rank=rank)
    job[0].replicate(V(1, 1))
    wanted = {snapshot(1, rank) for rank in range(4)} | {
        delta(step, rank) for rank in range(4) for step in (2, 3)
    }
    until(lambda: acknowledged(job) == wanted, "all of them")


def test_rank_whose_slots_are_full_at_the_holder_holds_up_no_other(stations: MakeStations) -> None:
    job = stations(procs=2)
    for step in (1, 2):
        seal = job[0].save(V(step, 1), MIB, rank=0)
        job[1].vault.draft(Seal(0, V(step + 10, 1), 4, Tier.PEER, seal.digests))
    job[0].save(V(2, 1), MIB, rank=1)
    job[0].replicate(V(2, 1))
    until(lambda: snapshot(2, 1) in acknowledged(job), "rank 1 is served")
    assert snapshot(2, 0) not in acknowledged(job)


def test_busy_holder_is_not_asked_in_a_circle(job: Stations) -> None:
    """However often something else changes meanwhile, offers to a holder without room become rarer."""
    offers = 0
    inbox = job[1].server.inbox
    seal = job[0].save(V(1, 1), MIB)
    for step in (11, 12):  # both slots of the rank are taken
        job[1].vault.draft(Seal(0, V(step, 1), 2, Tier.PEER, seal.digests))
    real = inbox.open

    def counted(*arguments: object) -> object:
        nonlocal offers
        offers += 1
        for _ in range(50):
            job[0].state.bump()
        return real(*arguments)  # type: ignore[arg-type]

    inbox.open = counted  # type: ignore[method-assign, assignment]
    job[0].replicate(V(1, 1))
    until(lambda: offers >= 4, "asked again and again")
    assert offers <= 8


def test_copies_are_offered_again_in_the_next_attempt_and_not_sent_again(job: Stations) -> None:
    job[0].save(V(1, 1), MIB)
    job[0].save(V(2, 1), 5000, Kind.DELTA)
    job[0].replicate(V(1, 1))
    until(lambda: acknowledged(job) == {snapshot(1), delta(2)}, "copied")
    job.next_attempt(base_step=2)
    until(lambda: acknowledged(job) == frozenset(), "what counted in the old attempt counts no longer")
    held = job[1].vault.held()
    job[0].name(V(1, 1))
    until(lambda: acknowledged(job) == {snapshot(1), delta(2)}, "acknowledged at once")
    assert job[1].vault.held() == held


def test_copy_that_a_holder_has_no_more_does_not_count_and_is_brought_again(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found that the copy had rotted, or was started anew and found it then."""
    monkeypatch.setattr(replicate, "_REVIEW_EVERY", 0.0)
    job = stations(procs=2)
    for rank in (0, 1):
        job[0].save(V(1, 1), MIB, rank=rank)
    job[0].replicate(V(1, 1))
    until(lambda: acknowledged(job) == {snapshot(1), snapshot(1, 1)}, "copied")
    counted = job[0].state.counters.replicated
    job[1].vault.evict(lambda seal: seal.rank == 0)
    until(lambda: job[0].state.counters.replicated > counted and job[1].holds(snapshot(1)), "brought again")
    until(lambda: acknowledged(job) == {snapshot(1), snapshot(1, 1)}, "it counts again")
    assert job[0].state.counters.replicated == counted + 1, "the other one was there all the time"


def test_copy_that_a_holder_frees_by_the_rule_while_it_is_asked_is_missed_by_nobody(
    job: Stations, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        job[0].save(V(step, 1), MIB)
    job[0].replicate()
    for step in (1, 2):
        job[0].name(V(step, 1))
        until(lambda step=step: snapshot(step) in acknowledged(job), "copied")
    replicator = job[0].replicator
    directive = job[0].state.directive
    assert directive is not None

    def ask(rank: int) -> list[ListedArtifact]:
        all_have = Watermarks(local=V(2, 1), peer=V(2, 1))
        with job[0].state.lock:
            job[0].state.verdict = TierVerdict(1, all_have, floor=V(2, 1), anchor=V(2, 1), copy=V(2, 1))
        return [ListedArtifact(snapshot(2), MIB)]

    replicator._review(directive.holders[0], ask, lambda: None, replicator._era)
    assert "no longer holds" not in caplog.text
    assert acknowledged(job) == {snapshot(2)}


def test_holder_that_cannot_be_reached_is_told_to_a_person_and_withdrawn(job: Stations) -> None:
    job[1].server.stop()
    job[0].save(V(1, 1), MIB)
    job[0].replicate(V(1, 1))
    problem = until(lambda: job[0].state.problems, "a problem is stated")[0]
    assert problem.reason == "PeerUnreachable"
    assert "Worker 1 does not take copies" in problem.message
    assert "Training goes on" in problem.message
    job[1].server = ExchangeServer(job[1].state, job[1].vault, job[1].identity, job.port)
    job[1].server.start()
    until(lambda: not job[0].state.problems, "withdrawn")
    assert acknowledged(job) == {snapshot(1)}


def test_own_copy_that_rotted_is_given_up_and_reported(job: Stations) -> None:
    seal = job[0].save(V(1, 1), 5 * MIB)
    job[0].flip(seal, Tier.LOCAL, 1)
    job[0].replicate(V(1, 1))
    (bad,) = until(lambda: job[0].state.quarantined, "reported")
    assert (bad.rank, bad.version, bad.worker) == (0, V(1, 1), 0)
    assert not job[0].holds(snapshot(1), Tier.LOCAL)


def test_stranger_with_a_guessed_token_gets_nothing(job: Stations) -> None:
    stranger = Identity("uid-of-the-job", 0, "guessed", job.host(0))
    with pytest.raises(PeerRefused):
        dial(stranger, 1, job.peer(1), job.port)


def test_stranger_that_trickles_is_cut_off(stations: MakeStations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "CONNECT_TIMEOUT", 0.3)
    job = stations()
    with socket.create_connection((job.host(1), job.port)) as raw:
        raw.sendall((100).to_bytes(4, "little") + b"{")
        raw.settimeout(20)
        assert raw.recv(1) == b"", "hung up"


def test_bandwidth_of_the_policy_bounds_what_is_sent(stations: MakeStations) -> None:
    """By a clock of the test: as much time passes as the bytes may take, and not a byte is left out of
    account."""
    now, granted = 0.0, []

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    bucket = TokenBucket(MIB, clock=lambda: now, wait=wait)
    portion = Portion(bucket, 0.1)
    job = stations()
    seal = job[0].save(V(1, 1), 5 * MIB)

    class Counted:
        piece = portion.piece

        def take(self, size: int) -> None:
            granted.append(size)
            portion.take(size)

    with job[0].line(1) as line:
        lane.push(job[0].vault, seal, line, Counted())
        assert sum(granted) == line.sent == seal.digests.size
    assert max(granted) <= MIB // 10 + 1
    bucket.take(1)  # granted once what was sent is paid for
    assert now >= seal.digests.size / MIB - 0.26


def test_pieces_are_bounded_below_and_unlimited_without_a_rate() -> None:
    assert Portion(TokenBucket(1000), 0.1).piece == SMALLEST_PIECE
    assert Portion(TokenBucket(None), 0.1).piece is None


def test_change_of_the_policy_reaches_the_bucket(job: Stations) -> None:
    job[0].replicate()
    assert job[0].replicator.bucket.rate is None
    job.next_attempt(policy=Policy(None, 1, 1, peer_bandwidth=123_456))
    until(lambda: job[0].replicator.bucket.rate == 123_456, "taken over")


def test_offer_with_digests_that_cannot_be_true_is_refused(job: Stations) -> None:
    seal = job[0].save(V(1, 1), MIB)
    for size, chunk in ((1 << 60, 1 << 59), (seal.digests.size, 0), (0, 4 * MIB), (9 * MIB, 4 * MIB)):
        wire = job[0].connect(1)
        wire.send(PeerRequest("offer", 0, V(1, 1), 2, type(seal.digests)(size, chunk, seal.digests.values)))
        assert wire.receive(PeerResponse).state == "refused"
        wire.close()


# What is due, as arithmetic


HISTORY = History((Branch(1, 0),))


def own(*artifacts: Artifact) -> dict[StockPlace, MemoryStock]:
    return {StockPlace(Tier.LOCAL, rank): stock for rank, stock in by_rank(artifacts).items()}


def test_deltas_are_due_after_the_oldest_snapshot_that_the_holder_keeps_or_is_sent() -> None:
    held = own(snapshot(10), *(delta(step) for step in range(5, 15)))
    assert due(Kind.DELTA, held, {}, None, HISTORY) == [], "nothing to rest them on"
    assert due(Kind.DELTA, held, {}, V(10, 1), HISTORY) == [delta(step) for step in range(11, 15)]
    has = by_rank({snapshot(6), delta(7), delta(9)})
    expected = [delta(step) for step in (8, 10, 11, 12, 13, 14)]
    assert due(Kind.DELTA, held, has, V(10, 1), HISTORY) == expected


def test_delta_that_the_history_does_not_accept_is_never_due() -> None:
    history = History((Branch(1, 0), Branch(2, 12)))
    held = own(snapshot(10), *(delta(step) for step in range(11, 15)))
    assert due(Kind.DELTA, held, {}, V(10, 1), history) == [delta(11), delta(12)]


def test_ranks_take_turns_step_by_step() -> None:
    held = own(
        *(snapshot(1, rank) for rank in (0, 1)), *(delta(step, rank) for rank in (0, 1) for step in (2, 3))
    )
    found = due(Kind.DELTA, held, {}, V(1, 1), HISTORY)
    assert found == [delta(2, 0), delta(2, 1), delta(3, 0), delta(3, 1)]
    seals = [Seal(each.rank, each.version, 4, Tier.LOCAL, Digests(1, 1, ("0",)), each.kind) for each in found]
    firsts = [seal.artifact for seal in first_of_each_rank(seals)]
    assert firsts == [delta(2, 0), delta(2, 1)], "in order within a rank"


def test_acknowledgements_of_what_the_holder_may_free_are_forgotten() -> None:
    has = by_rank([snapshot(5), snapshot(10), *(delta(step) for step in range(6, 14))])[0]
    verdict = TierVerdict(1, Watermarks(local=V(13, 1), peer=V(13, 1)), floor=V(13, 1), anchor=V(10, 1))
    expected = by_rank([snapshot(10), delta(11), delta(12), delta(13)])[0]
    assert still_kept(has, HISTORY, verdict) == expected
    assert still_kept(has, HISTORY, None) == has
