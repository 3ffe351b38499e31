"""UCX carries copies where both sidecars have it, and TCP does where one has not."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from dataclasses import replace

import pytest

from tests.sidecar.stations import MakeStations, Stations
from tests.sidecar.world import MakeWorld, until
from tiercheck.protocol.directive import Phase, Policy, Tier
from tiercheck.protocol.version import Artifact, Version
from tiercheck_sidecar.exchange.channel import TcpChannel, UcxChannel, why_no_ucx
from tiercheck_sidecar.exchange.fetch import fetch
from tiercheck_sidecar.exchange.frames import Ask, Say, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import dial_pod
from tiercheck_sidecar.replicate.lane import push

MIB = 1 << 20
LARGE = 21 * MIB
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
        wire.send(Ask("list", 0))
        assert wire.receive(Say).state == "listed"
        threading.Timer(0.1, wire.cut).start()
        with pytest.raises(WireBroken):
            wire.receive(Say)
    with closing(job[0].connect(1)) as wire:
        wire.send(Ask("join", transfer="that nobody offered"))  # it hangs up
        with pytest.raises(WireBroken):
            wire.receive(Say)
    with closing(job[0].connect(1)) as wire:
        wire.patience(0.1)
        with pytest.raises(WireBroken, match="no progress in time"):
            wire.receive(Say)


@needs_ucx
def test_peer_that_does_not_want_ucx_and_heartbeats_stay_with_tcp(stations: MakeStations) -> None:
    job = with_ucx(stations, 0, 1, workers=3)
    with closing(job[0].connect(2)) as copies:
        assert type(copies.channel) is TcpChannel
    with closing(dial_pod(job[0].identity, 1, job.peer(1), job.port)) as heartbeat:
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
