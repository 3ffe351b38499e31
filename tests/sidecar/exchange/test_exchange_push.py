"""Copies are verified before they are acknowledged, taken up where they broke, and go by UCX or TCP.

Peers notice at once that one of them is gone, and one that was cut off learns from them that it is.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from tests.sidecar.stations import MakeStations, Stations, send_bytes
from tests.sidecar.world import DEADLINE, FakeLauncher, MakeWorld, World, until
from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase, Policy, Tier
from tiercheck.protocol.report import ConnectionFailure, Report, Unreachable
from tiercheck.protocol.version import Artifact, Kind, Version
from tiercheck_sidecar.decoding import decode
from tiercheck_sidecar.digest import length_of
from tiercheck_sidecar.exchange import server, session
from tiercheck_sidecar.exchange.channel import TcpChannel, UcxChannel, why_no_ucx
from tiercheck_sidecar.exchange.fetch import fetch
from tiercheck_sidecar.exchange.frames import PeerRequest, PeerResponse, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import CallerClaim, PeerRefused, dial, dial_pod
from tiercheck_sidecar.exchange.session import Inbox
from tiercheck_sidecar.exchange.streams import ConnectionPool, TooDamaged
from tiercheck_sidecar.replicate.lane import PushRefused, push
from tiercheck_sidecar.vault import NoFreeSlot, Seal

MIB = 1 << 20
LARGE = 21 * MIB  # six chunks, so that there are several streams and a short last chunk


@pytest.fixture
def job(stations: MakeStations) -> Stations:
    return stations()


@pytest.fixture
def seal(job: Stations) -> Seal:
    """What worker 0 has captured, of six chunks."""
    return job[0].save(Version(5, 1), LARGE)


@pytest.fixture
def content(job: Stations, seal: Seal) -> bytes:
    return job[0].content(seal, Tier.LOCAL)


class Breaking(Wire):
    """A connection that breaks once it has carried `after` chunks, and these have `arrived`."""

    def __init__(self, wire: Wire, after: int, arrived: Callable[[set[int]], bool]) -> None:
        self.__dict__ = wire.__dict__
        self._rest, self._carried, self._arrived = after, set[int](), arrived

    def send_chunk(self, file: int, index: int, *arguments: int, **more: Any) -> None:  # type: ignore[override]
        if self._rest == 0:
            until(lambda: self._arrived(self._carried), "what it carried has arrived")
            self.cut()
            raise WireBroken("the cable was pulled")
        self._rest -= 1
        self._carried.add(index)
        super().send_chunk(file, index, *arguments, **more)


def send_by_hand(wire: Wire, seal: Seal, content: bytes, transfer: str, *chunks: int) -> PeerResponse:
    """As a sender does, but only `chunks`."""
    wire.send(PeerRequest("join", transfer=transfer))
    for index in chunks:
        begin, length = index * seal.digests.chunk, length_of(seal.digests, index)
        send_bytes(wire, index, content[begin : begin + length])
    wire.send_end()
    return wire.receive(PeerResponse)


def offer(wire: Wire, seal: Seal) -> PeerResponse:
    wire.send(PeerRequest("offer", seal.rank, seal.version, seal.world_size, seal.digests, kind=seal.kind))
    return wire.receive(PeerResponse)


def test_copy_is_byte_for_byte_what_was_saved(job: Stations, seal: Seal) -> None:
    with job[0].line(1) as line:
        assert push(job[0].vault, seal, line)
        assert line.sent == seal.digests.size
        assert push(job[0].vault, seal, line)
        assert line.sent == seal.digests.size, "what the holder has is not sent again"
    assert job[1].content(seal, Tier.PEER) == job[0].content(seal, Tier.LOCAL)


def test_delta_shorter_than_its_slot_is_copied_up_to_its_end(job: Stations) -> None:
    job[0].save(Version(5, 1), 8 * MIB)
    seal = job[0].save(Version(6, 1), 5000, Kind.DELTA)
    with job[0].vault.pin(Artifact(0, Version(6, 1), Kind.DELTA)) as slot:
        assert slot.size > seal.digests.size
    with job[0].line(1) as line:
        assert push(job[0].vault, seal, line)
        assert line.sent == seal.digests.size
    assert job[1].content(seal, Tier.PEER) == job[0].content(seal, Tier.LOCAL)
    assert not job[1].holds(Artifact(0, Version(6, 1), Kind.SNAPSHOT))


def test_broken_stream_is_taken_up_where_it_stopped(job: Stations, seal: Seal) -> None:

    def arrived(chunks: set[int]) -> bool:
        return any(chunks <= each.verified for each in job[1].server.inbox.of(0))

    cables = [Breaking(job[0].connect(1), 2, arrived)]
    with ConnectionPool(lambda: cables.pop() if cables else job[0].connect(1)) as line:
        assert push(job[0].vault, seal, line)
        resent = line.sent - seal.digests.size
    assert resent == 0, "both chunks had arrived"
    assert job[1].content(seal, Tier.PEER) == job[0].content(seal, Tier.LOCAL)


def test_sender_that_comes_back_is_told_what_is_there(job: Stations, seal: Seal, content: bytes) -> None:
    chunks = len(seal.digests.values)
    first = job[0].connect(1)
    said = offer(first, seal)
    assert (said.state, said.missing) == ("send", tuple(range(chunks)))
    assert send_by_hand(first, seal, content, said.transfer, 0, 3, 5).damaged == ()
    first.close()
    second = job[0].connect(1)
    again = offer(second, seal)
    assert (again.state, set(again.missing)) == ("send", set(range(chunks)) - {0, 3, 5})
    second.close()
    with job[0].line(1) as line:
        assert push(job[0].vault, seal, line)
        assert line.sent == sum(length_of(seal.digests, index) for index in (1, 2, 4))


def test_stream_of_an_earlier_offer_that_joins_late_is_hung_up(
    job: Stations, seal: Seal, content: bytes
) -> None:
    """It might be at a chunk that its sender, which has given it up, sends anew."""
    with closing(job[0].connect(1)) as first, closing(job[0].connect(1)) as second:
        late = offer(first, seal).transfer
        said = offer(second, seal)
        with pytest.raises(WireBroken):
            send_by_hand(first, seal, content, late, 0)
        assert send_by_hand(second, seal, content, said.transfer, 0).state == "ok"


def test_other_content_under_the_same_name_starts_over(job: Stations, seal: Seal) -> None:
    """A restarted worker may save the same version again; not one chunk of the two may be mixed."""
    wire = job[0].connect(1)
    said = offer(wire, seal)
    send_by_hand(wire, seal, job[0].content(seal, Tier.LOCAL), said.transfer, 0)
    other = Seal(
        0, seal.version, seal.world_size, Tier.LOCAL, type(seal.digests)(LARGE, 4 * MIB, ("0" * 32,) * 6)
    )
    again = offer(wire, other)
    assert again.state == "send"
    assert again.transfer != said.transfer
    assert again.missing == tuple(range(6))
    wire.close()


def test_stream_of_before_cannot_write_once_its_sender_began_again(job: Stations, seal: Seal) -> None:
    old = job[0].connect(1)
    said = offer(old, seal)
    old.send(PeerRequest("join", transfer=said.transfer))
    inbox = job[1].server.inbox
    transfer = until(lambda: inbox.find(said.transfer, 0), "offered")
    until(lambda: transfer.idle() == 0, "the stream is open")
    assert job[0].push(seal, 1)
    with pytest.raises(WireBroken):
        old.receive(PeerResponse)
    old.close()


def test_chunk_that_arrives_damaged_is_sent_again(job: Stations, seal: Seal, content: bytes) -> None:
    bad = content[: 9 * MIB] + bytes([content[9 * MIB] ^ 1]) + content[9 * MIB + 1 :]
    wire = job[0].connect(1)
    transfer = offer(wire, seal).transfer
    assert send_by_hand(wire, seal, bad, transfer, *range(6)).damaged == (2,)
    wire.send(PeerRequest("commit", transfer=transfer))
    assert wire.receive(PeerResponse).state == "again"
    assert not job[1].holds(Artifact(0, seal.version)), "nothing is acknowledged before it is verified"
    assert send_by_hand(wire, seal, content, transfer, 2).damaged == ()
    assert send_by_hand(wire, seal, bad, transfer, 2).damaged == (2,), (
        "a bad chunk does not replace a good one"
    )
    wire.send(PeerRequest("commit", transfer=transfer))
    assert wire.receive(PeerResponse).state == "ok"
    wire.close()
    assert job[1].content(seal, Tier.PEER) == content


def test_copy_that_rotted_at_its_owner_is_never_acknowledged(job: Stations, seal: Seal) -> None:
    job[0].flip(seal, Tier.LOCAL, 3)
    with job[0].line(1) as line, pytest.raises(TooDamaged, match="chunk 3"):
        push(job[0].vault, seal, line)
    assert not job[1].holds(Artifact(0, seal.version))


def test_idle_connection_that_the_holder_closed_costs_nothing(job: Stations) -> None:
    first, second = job[0].save(Version(5, 1), MIB), job[0].save(Version(6, 1), MIB)
    with job[0].line(1) as line:
        assert push(job[0].vault, first, line)
        for wire in line.wires(1):
            wire.cut()
        assert push(job[0].vault, second, line)


def test_one_connection_carries_many_deltas(job: Stations) -> None:
    made = 0

    def connect() -> Wire:
        nonlocal made
        made += 1
        return job[0].connect(1)

    job[0].save(Version(1, 1), MIB)
    with ConnectionPool(connect) as line:
        for step in range(2, 6):
            assert push(job[0].vault, job[0].save(Version(step, 1), 1000, Kind.DELTA), line)
    assert made == 1


def test_holder_without_room_says_so_and_takes_it_later(job: Stations) -> None:
    seals = [job[0].save(Version(step, 1), MIB) for step in (1, 2, 3)]
    with job[0].line(1) as line:
        said = [push(job[0].vault, seal, line) is not None for seal in seals]
        assert said == [True, True, False]
        job[1].vault.evict(lambda seal: seal.version == Version(1, 1))
        assert push(job[0].vault, seals[2], line)


def test_transfer_that_was_left_gives_way_to_one_that_needs_its_slot(
    stations: MakeStations,
) -> None:
    job = stations()
    old, kept, new = (job[0].save(Version(step, 1), MIB) for step in (1, 2, 3))
    job[0].push(kept, 1)
    abandoned = job[0].connect(1)
    assert offer(abandoned, old).state == "send"
    abandoned.close()
    assert job[0].push(new, 1)


def test_transfer_that_nobody_comes_back_for_is_given_up(job: Stations, seal: Seal) -> None:
    now = 100.0
    inbox = Inbox(job[1].vault, lambda: now)
    transfer = inbox.open(CallerClaim("uid", 0, 1, ""), Seal(0, seal.version, 2, Tier.PEER, seal.digests))
    now += session.LINGER
    inbox.sweep()
    assert inbox.find(transfer.name, 0) is transfer
    assert inbox.find(transfer.name, 1) is None, "it is its sender's alone"
    now += 1
    inbox.sweep()
    assert inbox.find(transfer.name, 0) is None
    for step in (6, 7):  # its slot is free again
        job[1].vault.draft(Seal(0, Version(step, 1), 2, Tier.PEER, seal.digests))
    with pytest.raises(NoFreeSlot):
        job[1].vault.draft(Seal(0, Version(8, 1), 2, Tier.PEER, seal.digests))


def test_sender_of_an_older_attempt_is_refused_in_mid_transfer(job: Stations, seal: Seal) -> None:
    wire = job[0].connect(1)
    transfer = offer(wire, seal).transfer
    job.next_attempt()
    assert send_by_hand(wire, seal, job[0].content(seal, Tier.LOCAL), transfer, *range(6)).damaged == ()
    wire.send(PeerRequest("commit", transfer=transfer))
    assert "attempt 1 is over" in wire.receive(PeerResponse).message
    wire.close()
    assert not job[1].holds(Artifact(0, seal.version))


def test_rank_that_is_not_the_senders_is_refused(stations: MakeStations) -> None:
    job = stations(workers=3)
    seal = job[0].save(Version(5, 1), MIB)
    with job[0].line(2) as line, pytest.raises(PushRefused, match="does not keep copies for worker 0"):
        push(job[0].vault, seal, line)


@pytest.mark.parametrize("name", [0, 2])
def test_one_worker_cannot_take_all_connections_in_whoevers_name(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch, name: int
) -> None:
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 4)
    job = stations(workers=3)
    thief = replace(job[2].identity, worker=name)
    wires = [dial(thief, 1, job.peer(1), job.port) for _ in range(8)]
    seal = job[0].save(Version(5, 1), MIB)
    for _ in range(3):
        assert job[0].push(seal, 1)
    for wire in wires:
        wire.close()


def test_worker_that_the_job_does_not_have_is_refused(stations: MakeStations) -> None:
    job = stations(workers=3)
    with pytest.raises(PeerRefused, match="the job has no worker 1000"):
        dial(replace(job[2].identity, worker=1000), 1, job.peer(1), job.port)


def lost(world: World, worker: int) -> dict[int, Unreachable]:
    return {each.worker: each for each in world.report(worker).unreachable}


def news(world: World, worker: int, after: int) -> Report:
    """As the controller asks: the answer comes with the news, or when the time is over."""
    status, body = world.call(worker, "GET", f"/v1/report?after={after}&wait={DEADLINE}")
    assert status == 200
    return decode(body, Report)


def test_killed_neighbour_is_told_to_the_controller_in_its_open_call(make_world: MakeWorld) -> None:
    world = make_world(workers=3).launch()
    until(lambda: world.report(0).trainer.state is not None, "worker 0 to settle")
    until(lambda: not lost(world, 0), "nobody is late")
    killed, report = time.time(), world.report(0)
    world.kill(1)
    while [each.how for each in report.unreachable] != [
        ConnectionFailure.REFUSED
    ]:  # an answer may be late first
        report = news(world, 0, report.serial)
    (gone,) = report.unreachable
    assert (gone.worker, gone.host) == (1, world.host(1))
    assert gone.since <= killed + 1
    until(lambda: lost(world, 2), "its other neighbour notices as well")


def test_silent_neighbour_is_told_apart_from_a_closed_one_and_well_again_when_it_answers(
    make_world: MakeWorld,
) -> None:
    world = make_world(workers=2).launch()
    world.pause(1)  # its kernel goes on to accept connections, and nobody answers
    until(lambda: lost(world, 0), "worker 0 misses worker 1")
    assert lost(world, 0)[1].how is ConnectionFailure.SILENT
    world.resume(1)
    until(lambda: not lost(world, 0), "worker 1 is back")


def test_answer_that_is_late_is_told_while_it_is_waited_for(make_world: MakeWorld) -> None:
    """So the controller's own wait begins beside that of the neighbour, not after it."""
    world = make_world(workers=2)
    world.patience |= {"tiercheck_sidecar.exchange.server:ANSWER": 1e6}
    world.launch()
    world.pause(1)
    until(lambda: lost(world, 0), "worker 0 misses worker 1")
    world.resume(1)
    until(lambda: not lost(world, 0), "one answer is enough for one that was only late")


def test_worker_that_was_cut_off_stops_its_trainer_when_it_hears_of_the_next_attempt(
    make_world: MakeWorld,
) -> None:
    world = make_world(workers=2).launch()
    launcher = FakeLauncher(world.run_dir(1) / names.SOCKET_NAME)
    order = launcher.order()
    while order.phase is not Phase.RELEASE:
        order = launcher.order()
    assert order.attempt == 1
    launcher.tell("started", 1)
    world.new_attempt()  # the controller reaches worker 0 only
    for phase in (Phase.HOLD, Phase.RELEASE):
        assert world.send(0, world.directive(0, phase))[0] == 200
    order = launcher.order()
    assert (order.attempt, order.phase) == (2, Phase.HOLD), "the command of attempt 1 has to stop"
    launcher.close()


needs_ucx = pytest.mark.skipif(bool(why_no_ucx()), reason=why_no_ucx() or "it is there")
os.environ.setdefault("UCX_TLS", "tcp,self")
os.environ.setdefault("UCX_NET_DEVICES", "lo")


def with_ucx(stations: MakeStations, *workers: int, **options: int) -> Stations:
    job = stations(**options)
    for worker in workers:
        job[worker].identity.ucx = lambda: True
    return job


def is_by_ucx(wire: Wire) -> bool:
    return isinstance(wire.channel, UcxChannel)


@needs_ucx
@pytest.mark.parametrize("encrypted", [False, True], ids=["authenticated", "encrypted"])
def test_copies_and_restores_are_carried_by_ucx(stations: MakeStations, encrypted: bool) -> None:
    job = with_ucx(stations, 0, 1)
    job[0].identity.encrypts = lambda: encrypted
    seal = job[0].save(Version(5, 1), LARGE)
    with job[0].line(1) as line:
        assert push(job[0].vault, seal, line)
        assert all(is_by_ucx(wire) for wire in line.wires(2))
        assert {wire.far_end[0] for wire in line.wires(2)} == {job.host(1)}
    content = job[0].content(seal, Tier.LOCAL)
    assert job[1].content(seal, Tier.PEER) == content
    job[0].vault.evict(lambda _: True)
    fetch(job[0].vault, seal.artifact, job[0].dials(1))
    assert job[0].content(seal, Tier.LOCAL) == content


@needs_ucx
def test_connection_that_is_cut_or_closed_at_the_other_end_is_noticed_at_once(stations: MakeStations) -> None:
    job = with_ucx(stations, 0, 1)
    with closing(job[0].connect(1)) as wire:
        wire.send(PeerRequest("list", 0))
        assert wire.receive(PeerResponse).state == "listed"
        threading.Timer(0.1, wire.cut).start()
        with pytest.raises(WireBroken):
            wire.receive(PeerResponse)
    with closing(job[0].connect(1)) as wire:
        wire.send(PeerRequest("join", transfer="that nobody offered"))  # it hangs up
        with pytest.raises(WireBroken):
            wire.receive(PeerResponse)
    with closing(job[0].connect(1)) as wire:
        wire.patience(0.1)
        with pytest.raises(WireBroken, match="no progress in time"):
            wire.receive(PeerResponse)


@needs_ucx
def test_peer_that_does_not_want_ucx_and_heartbeats_stay_with_tcp(stations: MakeStations) -> None:
    job = with_ucx(stations, 0, 1, workers=3)
    with closing(job[0].connect(2)) as copies:
        assert type(copies.channel) is TcpChannel
    with closing(dial_pod(job[0].identity, 1, job.peer(1), job.port)[0]) as heartbeat:
        assert type(heartbeat.channel) is TcpChannel


@needs_ucx
def test_process_that_dies_in_mid_copy_takes_nobody_with_it(make_world: MakeWorld) -> None:
    world = make_world(workers=2)
    world.policy = replace(world.policy, peer_ucx=True, peer_bandwidth=2 * MIB)
    world.launch()
    with world.ranks(8 * MIB) as ranks:
        for rank in ranks:
            assert rank.save(5)
        until(lambda: world.report(1).memory.used > 8 * MIB, "a slot is made for the copy")
        world.kill(1)
        until(lambda: world.report(0).unreachable, "worker 0 lives, and misses it")
        world.policy = replace(world.policy, peer_bandwidth=None)
        world.start(1)
        world.direct(Phase.RELEASE)
        until(lambda: world.holds(1, 0, Version(5, 1), Tier.PEER), "it gets its copy, again by UCX")
    assert "TCP carries copies" not in world.logs(0)


@pytest.mark.skipif(not why_no_ucx(), reason="ucxx is here")
def test_where_ucx_is_missing_it_is_told_and_tcp_carries_copies(stations: MakeStations) -> None:
    job = stations()
    job.next_attempt(policy=Policy(None, 1_000_000, 5, peer_ucx=True))
    (problem,) = until(lambda: job[0].state.problems, "it is told")
    assert problem.reason == "InterfaceMissing"
    assert "image has no ucxx" in problem.message
    assert "TCP carries copies" in problem.message
    for station in job.stations:
        station.identity.ucx = lambda: True  # as if it were there until it is needed
    seal = job[0].save(Version(5, 2), MIB)
    with job[0].line(1) as line:
        assert push(job[0].vault, seal, line)
        assert type(line.wires(1)[0].channel) is TcpChannel
    assert job[1].holds(Artifact(0, seal.version))
