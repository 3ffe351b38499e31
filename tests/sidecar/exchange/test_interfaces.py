"""Copies go over the interfaces that the job names, or the pod's address where none works.

They go over further networks, as Multus gives them, and outlive the loss of one.
"""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sidecar.exchange.pod_networks import PodNetworks, why_not
from tests.sidecar.nursery import nursery
from tests.sidecar.stations import MakeStations, Stations
from tests.sidecar.world import MakeWorld, World, until
from tiercheck.protocol.directive import Peer, Policy, Tier
from tiercheck.protocol.version import Artifact, Version
from tiercheck_local.markers import free_ports
from tiercheck_sidecar.exchange import handshake
from tiercheck_sidecar.exchange.addresses import (
    RETRY_AFTER,
    NamedAddress,
    OwnAddress,
    PeerAddresses,
    PeerRoute,
    choose_addresses,
    own_addresses,
    pair,
)
from tiercheck_sidecar.exchange.fetch import fetch
from tiercheck_sidecar.exchange.frames import PeerRequest, PeerResponse, Wire
from tiercheck_sidecar.exchange.server import ExchangeServer
from tiercheck_sidecar.replicate.lane import push

MIB = 1 << 20
LARGE = 21 * MIB
POD = "10.1.0.7"
OWN = [
    OwnAddress("lo", "127.0.0.1"),
    OwnAddress("lo", "::1"),
    OwnAddress("eth0", POD),
    OwnAddress("net1", "fd00:20::7"),
    OwnAddress("net1", "10.20.0.7"),
    OwnAddress("net1", "fe80::7"),
    OwnAddress("net2", "fe80::8"),
    OwnAddress("net2", "fd00:30::7"),
    OwnAddress("net2", "fd00:30::8"),
]


def chosen(*entries: str) -> list[str]:
    return [each.host for each in choose_addresses(entries, OWN, POD).addresses]


def missing(*entries: str) -> tuple[str, ...]:
    return choose_addresses(entries, OWN, POD).missing


def test_interface_is_named_by_name_or_by_cidr_of_either_family() -> None:
    assert chosen("net1", "net2") == ["10.20.0.7", "fd00:30::7"]
    assert chosen("10.20.0.0/16") == ["10.20.0.7"]
    assert chosen("10.20.0.9/16") == ["10.20.0.7"], "bits of the host do no harm"
    assert chosen("fd00::/16") == ["fd00:20::7", "fd00:30::7", "fd00:30::8"]
    assert chosen("fd00:20::/64", "net1", "fd00::/16") == [
        "fd00:20::7", "10.20.0.7", "fd00:30::7", "fd00:30::8",
    ], "each address once"  # fmt: skip


def test_what_nothing_matches_is_told_and_the_pods_own_address_is_no_further_one() -> None:
    assert missing("net1", "net7", "10.99.0.0/16") == ("net7", "10.99.0.0/16")
    assert (chosen("eth0", "10.1.0.0/16"), missing("eth0", "10.1.0.0/16")) == ([], ())
    assert missing("fd00:99::/129", "fe80::/10") == ("fd00:99::/129", "fe80::/10"), "nonsense, and link-local"


def test_loopback_is_used_only_where_it_is_meant() -> None:
    assert "127.0.0.1" not in chosen("0.0.0.0/0")
    assert chosen("127.0.0.0/8", "::1/128") == ["127.0.0.1", "::1"]


def test_kernel_says_what_addresses_there_are() -> None:
    assert OwnAddress("lo", "127.0.0.1") in own_addresses()


named = st.builds(
    NamedAddress, st.sampled_from(["net1", "net2"]), st.sampled_from(["10.0.0.1", "10.0.0.2", "fd::1"])
)


@given(st.lists(named, max_size=5), st.lists(named, max_size=5))
def test_routes_stay_within_an_entry_and_a_family(
    own: list[NamedAddress], theirs: list[NamedAddress]
) -> None:
    entries = {mine.host: {each.entry for each in own if each.host == mine.host} for mine in own}
    for route in pair(own, theirs):
        reached = {each.entry for each in theirs if each.host == route.host}
        assert reached & entries[route.source]
        assert (":" in route.source) == (":" in route.host)


def test_connections_take_turns_and_leave_alone_for_a_while_what_does_not_answer() -> None:
    now = 100.0
    book = PeerAddresses(lambda: now)
    peer = Peer(1, "10.1.0.8")
    book.own = (NamedAddress("net1", "10.20.0.7"), NamedAddress("net2", "10.30.0.7"))
    assert book.record(peer, (NamedAddress("net1", "10.20.0.8"), NamedAddress("net2", "10.30.0.8")))
    assert not book.record(peer, (NamedAddress("net1", "10.20.0.8"), NamedAddress("net2", "10.30.0.8")))
    first, second = PeerRoute("10.20.0.7", "10.20.0.8"), PeerRoute("10.30.0.7", "10.30.0.8")
    assert [book.routes(peer) for _ in range(3)] == [(first, second), (second, first), (first, second)]
    assert (book.failed(first), book.failed(first)) == (True, False)
    assert book.routes(peer) == (second,)
    now += RETRY_AFTER
    assert set(book.routes(peer)) == {first, second}
    assert book.routes(Peer(2, "10.1.0.9")) == ()


def test_new_connection_takes_the_interface_that_carries_fewest(stations: MakeStations) -> None:
    """Two lanes dial the same peer, each at its own time."""
    job = with_rails(stations, "net1", "net2")
    with ExitStack() as stack:
        ends = []
        for _ in range(6):
            ends.append(stack.enter_context(closing(job[0].connect(1))).far_end[0])
            job[0].identity.addresses.routes(job.peer(1))  # somebody else looks, and does not come
        assert Counter(ends) == {job.rail(1, 1): 3, job.rail(2, 1): 3}


def with_rails(stations: MakeStations, *entries: str, rails: int = 2) -> Stations:
    """Every worker listens at what `entries` names."""
    job = stations(rails=rails)
    job.next_attempt(policy=Policy(None, 1_000_000, 5, peer_interfaces=entries))
    for station in job.stations:
        wanted = choose_addresses(entries, job.own(station.worker), job.host(station.worker)).addresses
        until(lambda station=station, wanted=wanted: station.identity.addresses.own == wanted, "it listens")
    return job


def test_one_copy_goes_over_all_named_interfaces_at_once(stations: MakeStations) -> None:
    job = with_rails(stations, "net1", "net2")
    seal = job[0].save(Version(5, 2), LARGE)
    with job[0].line(1) as line:
        assert push(job[0].vault, seal, line)
        ends = {(wire.near_end[0], wire.far_end[0]) for wire in line.wires(2)}
    assert ends == {(job.rail(n, 0), job.rail(n, 1)) for n in (1, 2)}, "each from its own to the other's"
    assert job[1].content(seal, Tier.PEER) == job[0].content(seal, Tier.LOCAL)


def test_restore_reads_over_all_named_interfaces_at_once(stations: MakeStations) -> None:
    job = with_rails(stations, "net1", "net2")
    seal = job[0].save(Version(5, 2), LARGE)
    job[0].push(seal, 1)
    content = job[0].content(seal, Tier.LOCAL)
    job[0].vault.evict(lambda _: True)
    called: Counter[str] = Counter()

    def connect(job: Stations = job) -> Wire:
        wire = job[0].connect(1)
        called[wire.far_end[0]] += 1
        return wire

    (dial,) = job[0].dials(1)
    fetch(job[0].vault, seal.artifact, [type(dial)(1, connect)])
    assert set(called) == {job.rail(1, 1), job.rail(2, 1)}
    assert job[0].content(seal, Tier.LOCAL) == content


def test_copy_goes_on_over_the_other_interface_when_one_is_cut_in_mid_copy(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = with_rails(stations, "net1", "net2")
    seal = job[0].save(Version(5, 2), LARGE)
    victim, cut = job.rail(1, 1), Cut(monkeypatch)
    send_chunk = Wire.send_chunk

    def send_and_pull(wire: Wire, *arguments: Any, **more: Any) -> None:
        send_chunk(wire, *arguments, **more)
        if wire.far_end[0] == victim:
            cut.pull(victim)
            wire.cut()

    monkeypatch.setattr(Wire, "send_chunk", send_and_pull)
    with job[0].line(1) as line:
        assert push(job[0].vault, seal, line)
        assert {wire.far_end[0] for wire in line.wires(2)} == {job.rail(2, 1)}
        assert line.sent < 2 * seal.digests.size, "what had arrived is not sent again"
    assert cut.pulled == {victim}
    assert job[1].content(seal, Tier.PEER) == job[0].content(seal, Tier.LOCAL)


def test_pods_address_takes_over_when_no_interface_leads_there(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = with_rails(stations, "net1", "net2")
    with closing(job[0].connect(1)) as wire:
        assert wire.far_end[0] == job.rail(1, 1)
    cut = Cut(monkeypatch)
    cut.pull(job.rail(1, 1), job.rail(2, 1))
    for _ in range(2):
        with closing(job[0].connect(1)) as wire:
            assert wire.far_end[0] == job.host(1)
            wire.send(PeerRequest("list", 0))
            assert wire.receive(PeerResponse).state == "listed"


def test_whoever_else_answers_at_a_told_address_is_not_taken_for_the_peer(stations: MakeStations) -> None:
    """The address of worker 1 on net1 is worker 2's by now: both ends are of the job, and it is refused."""
    job = stations(workers=3, rails=1)
    job.next_attempt(policy=Policy(None, 1_000_000, 5, peer_interfaces=("net1",)))
    until(lambda: all(station.identity.addresses.own for station in job.stations), "all listen")
    job[0].identity.addresses.record(job.peer(1), (NamedAddress("net1", job.rail(1, 2)),))
    with closing(job[0].connect(1)) as wire:
        assert wire.far_end[0] == job.rail(1, 1), "its pod's address was asked, which told the right one"


def test_missing_interface_is_told_with_those_that_there_are_and_copies_are_made(
    stations: MakeStations,
) -> None:
    job = stations(rails=1)
    job.next_attempt(policy=Policy(None, 1_000_000, 5, peer_interfaces=("net1", "net7", "10.99.0.0/16")))
    (problem,) = until(lambda: job[0].state.problems, "it is told")
    assert problem.reason == "InterfaceMissing"
    assert "no interface net7 or 10.99.0.0/16" in problem.message
    assert f"eth0 ({job.host(0)}), net1 ({job.rail(1, 0)})" in problem.message
    seal = job[0].save(Version(5, 2), MIB)
    assert job[0].push(seal, 1)
    assert job[1].holds(Artifact(0, seal.version))
    job.next_attempt(policy=Policy(None, 1_000_000, 5, peer_interfaces=("net1",)))
    until(lambda: not job[0].state.problems, "all is well")


def test_peer_without_the_interface_is_reached_at_its_pods_address(stations: MakeStations) -> None:
    job = stations(rails=1)
    policy = Policy(None, 1_000_000, 5, peer_interfaces=("net1",))
    job[0].follow(job.directive(0, policy))
    until(lambda: job[0].identity.addresses.own, "worker 0 listens; worker 1 knows of nothing")
    with closing(job[0].connect(1)) as there, closing(job[1].connect(0)) as back:
        assert (there.far_end[0], back.far_end[0]) == (job.host(1), job.host(0))


def test_nobody_listens_where_no_interface_is_named_any_more(stations: MakeStations) -> None:
    job = with_rails(stations, "net1", rails=1)
    with closing(socket.create_connection((job.rail(1, 1), job.port))):
        pass
    job.next_attempt(policy=Policy(None, 1_000_000, 5))
    until(lambda: not job[1].identity.addresses.own, "it stopped")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((job.rail(1, 1), job.port))


def test_peers_meet_over_ipv6(stations: MakeStations) -> None:
    """Both are at ::1, with ports of their own, as pods in their node's network."""
    (port,) = free_ports(1)
    job = stations()
    own = [OwnAddress("lo", "::1")]
    called = ExchangeServer(job[1].state, job[1].vault, job[1].identity, port, lambda: own)
    with closing(socket.socket(socket.AF_INET6)) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
    host = f"{job.network}.200"
    job[1].identity.host = host
    called.start()
    try:
        job.next_attempt(policy=Policy(None, 1_000_000, 5, peer_interfaces=("::1/128",)))
        until(lambda: job[1].identity.addresses.own, "it listens at ::1")
        job[0].identity.addresses.own = (NamedAddress("::1/128", "::1"),)
        with closing(handshake.dial(job[0].identity, 2, Peer(1, host), port)) as wire:
            assert (wire.near_end[0], wire.far_end) == ("::1", ("::1", port))
    finally:
        called.stop()


class Cut:
    """Nobody answers at some addresses any more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pulled: set[str] = set()
        create_connection = socket.create_connection

        def connect(target: tuple[str, int], *arguments: Any, **more: Any) -> socket.socket:
            if target[0] in self.pulled:
                raise ConnectionRefusedError("the cable was pulled")
            return create_connection(target, *arguments, **more)

        monkeypatch.setattr(socket, "create_connection", connect)

    def pull(self, *hosts: str) -> None:
        self.pulled.update(hosts)


SIZE = 16 * MIB


@pytest.fixture
def world(make_world: MakeWorld) -> Iterator[World]:
    """Two workers; each pod has net1, and net2 for IPv6 only."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    nursery()  # whose network is that of other tests
    networks = PodNetworks(2)
    world = make_world(workers=2, limit=1 << 28)
    world.network, world.networks = "10.88.0", networks
    try:
        with networks.entered():
            yield world
    finally:
        world.close()
        networks.close()


def begin(world: World, *entries: str, bandwidth: int | None = None) -> None:
    world.policy = replace(world.policy, peer_interfaces=entries, peer_bandwidth=bandwidth)
    world.launch()
    until(
        lambda: all(len(listens_at(world, worker)) == len(entries) for worker in (0, 1)), "they listen there"
    )


def listens_at(world: World, worker: int) -> list[str]:
    """Beside the pod's address."""
    told = re.findall(r"the exchange also listens at: (.*)", world.logs(worker))
    return told[-1].split(", ") if told else []


def networks_of(world: World) -> PodNetworks:
    assert world.networks is not None
    return world.networks


def sent(world: World, interface: str) -> int:
    return networks_of(world).carried(0, interface)


def test_copies_and_restores_go_over_the_named_interfaces_and_not_over_the_pods(world: World) -> None:
    begin(world, "net1", "fd00:89::/32", bandwidth=32 * MIB)
    assert listens_at(world, 0) == ["10.89.0.1", "fd00:89::1"]
    with world.ranks(SIZE) as ranks:
        for rank in ranks:
            assert rank.save(5)
        world.reach("peer", Version(5, 1))
    assert sent(world, "net1") > SIZE / 8
    assert sent(world, "net2") > SIZE / 8
    assert sent(world, "net1") + sent(world, "net2") > SIZE
    copied = networks_of(world).carried(1, "net1") + networks_of(world).carried(1, "net2")
    world.renew(0)
    world.begin(Version(5, 1), {0: (world.from_peer(1),)})
    (rank,) = world.report(0).restore.ranks
    assert (rank.tier, rank.worker) == (Tier.PEER, 1)
    back = networks_of(world).carried(1, "net1") + networks_of(world).carried(1, "net2") - copied
    assert back > SIZE
    assert max(networks_of(world).carried(pod, "eth0") for pod in (0, 1)) < SIZE / 4


@pytest.mark.extended
def test_copy_goes_on_over_the_other_interface_when_one_falls_silent(world: World) -> None:
    begin(world, "net1", "net2", bandwidth=2 * MIB)
    with world.ranks(SIZE) as ranks:
        for rank in ranks:
            assert rank.save(5)
        until(lambda: min(sent(world, "net1"), sent(world, "net2")) > MIB, "it is on its way over both")
        networks_of(world).cut(1, "net1")
        assert not world.holds(1, 0, Version(5, 1), Tier.PEER)
        until(lambda: world.holds(1, 0, Version(5, 1), Tier.PEER), "it arrives all the same")
    assert "worker 1 is not reached at 10.89.0.2 from 10.89.0.1" in world.logs(0)
    assert sent(world, "net2") > SIZE / 2
    assert sent(world, "eth0") < SIZE / 4
    until(lambda: not world.report(0).unreachable, "its pod's address answers, if late")


def test_copies_go_over_the_pods_address_when_all_others_are_silent_and_a_missing_one_is_told(
    world: World,
) -> None:
    world.policy = replace(world.policy, peer_interfaces=("net1", "net7"))
    world.launch()
    (problem,) = until(lambda: world.report(0).problems, "net7 is missing")
    assert problem.reason == "InterfaceMissing"
    assert "no interface net7" in problem.message
    assert "net2 (fd00:89::1)" in problem.message, "what there is"
    networks_of(world).cut(1, "net1")
    world.save_everywhere(5)
