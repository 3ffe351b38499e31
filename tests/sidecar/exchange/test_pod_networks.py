"""Copies go over further networks, as Multus gives them, and outlive the loss of one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.sidecar.exchange.pod_networks import PodNetworks, why_not
from tests.sidecar.nursery import nursery
from tests.sidecar.world import MakeWorld, World, until
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Version

MIB = 1 << 20
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
    world.lose(0)
    world.start(0)
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
    assert not world.report(0).unreachable, "its pod's address answers all the time"


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
