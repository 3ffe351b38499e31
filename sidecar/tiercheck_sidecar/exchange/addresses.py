"""Chooses own addresses on the interfaces that the job names, and remembers those of peers.

A peer tells its addresses once both ends have proved themselves. A new connection takes the route that has
the fewest; one that does not answer is left alone for a while.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiercheck.protocol.directive import Peer


@dataclass(frozen=True)
class NamedAddress:
    """An IP address on an interface that the job names."""

    entry: str
    """Of `Policy.peer_interfaces`. Workers reach each other from and to addresses of the same entry."""
    host: str


@dataclass(frozen=True)
class OwnAddress:
    """An IP address of this pod."""

    interface: str
    host: str


@dataclass(frozen=True)
class ChosenAddresses:
    """`choose_addresses` found these."""

    addresses: tuple[NamedAddress, ...]
    """Beside the pod's own."""
    missing: tuple[str, ...]
    """Entries that nothing matches."""


def choose_addresses(entries: Sequence[str], own: Sequence[OwnAddress], pod_ip: str) -> ChosenAddresses:
    """An entry with a slash is a CIDR: each address in it. Any other is the name of an interface: its first
    IPv4 address, or else its first IPv6 address. Each address is used once; the pod's always is.
    """
    used, chosen, missing = {pod_ip}, [], []
    for entry in entries:
        matching = _matching(entry, own)
        for host in matching:
            if host not in used:
                used.add(host)
                chosen.append(NamedAddress(entry, host))
        if not matching:
            missing.append(entry)
    return ChosenAddresses(tuple(chosen), tuple(missing))


def _matching(entry: str, own: Sequence[OwnAddress]) -> list[str]:
    if "/" not in entry:
        hosts = [each.host for each in own if each.interface == entry and not _of(each).is_link_local]
        return sorted(hosts, key=lambda host: ":" in host)[:1]
    try:
        network = ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return []
    return [
        each.host
        for each in own
        if _of(each) in network
        and not _of(each).is_link_local
        and (network.is_loopback or not _of(each).is_loopback)  # 0.0.0.0/0 means no such address
    ]


def _of(address: OwnAddress) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.host)


class _SocketAddress(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _InterfaceAddress(ctypes.Structure):
    """`struct ifaddrs`, as far as it is read."""


_InterfaceAddress._fields_ = (
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SocketAddress)),
)
_PLACES: dict[int, slice] = {socket.AF_INET: slice(2, 6), socket.AF_INET6: slice(6, 22)}
"""Where the bytes of an address are, behind its family."""


def own_addresses() -> tuple[OwnAddress, ...]:
    """Of this pod's network, in the kernel's order. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_InterfaceAddress)()
    if library.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "the pod's addresses cannot be listed")
    found = []
    try:
        each = first
        while each:
            address = each.contents.address
            place = _PLACES.get(address.contents.family) if address else None
            if place is not None:
                packed = bytes(address.contents.data[place])
                found.append(OwnAddress(each.contents.name.decode(), str(ipaddress.ip_address(packed))))
            each = each.contents.next
    finally:
        library.freeifaddrs(first)
    return tuple(found)


LEFT_ALONE = 30.0
"""Seconds until an address that did not answer is tried again."""


@dataclass(frozen=True)
class PeerRoute:
    """From one of our addresses to one of a peer's, both on interfaces of the same entry."""

    source: str
    host: str


def pair(own: Sequence[NamedAddress], theirs: Sequence[NamedAddress]) -> tuple[PeerRoute, ...]:
    """How each of `theirs` is reached: from the address of ours that has the same place among those of its
    entry and family, as far as there is one."""
    routes = []
    seen: Counter[tuple[str, bool]] = Counter()
    for each in theirs:
        kind = each.entry, ":" in each.host
        ours = [mine.host for mine in own if (mine.entry, ":" in mine.host) == kind]
        if ours:
            routes.append(PeerRoute(ours[seen[kind] % len(ours)], each.host))
        seen[kind] += 1
    return tuple(routes)


class PeerAddresses:
    """Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.own: tuple[NamedAddress, ...] = ()
        """Where this sidecar listens beside its pod's address."""
        self._told: dict[Peer, tuple[NamedAddress, ...]] = {}
        self._failed: dict[PeerRoute, float] = {}
        self._turns: Counter[Peer] = Counter()
        self._used: dict[PeerRoute, weakref.WeakSet[object]] = {}
        """The connections that there are."""

    def hear(self, peer: Peer, addresses: tuple[NamedAddress, ...]) -> bool:
        """A proven peer's word. Returns whether it is news."""
        with self._lock:
            news = self._told.get(peer, ()) != addresses
            self._told[peer] = addresses
            return news

    @property
    def hosts(self) -> frozenset[str]:
        """All that peers have told."""
        with self._lock:
            return frozenset(each.host for told in self._told.values() for each in told)

    def routes(self, peer: Peer) -> tuple[PeerRoute, ...]:
        """To try in this order, before the pod's address: those that carry least, in turns."""
        with self._lock:
            now = self._clock()
            routes = [
                route
                for route in pair(self.own, self._told.get(peer, ()))
                if self._failed.get(route, now) <= now
            ]
            if not routes:
                return ()
            first = self._turns[peer] % len(routes)
            self._turns[peer] += 1
            return tuple(sorted((*routes[first:], *routes[:first]), key=self._load))

    def failed(self, route: PeerRoute) -> bool:
        """It does not answer, or somebody else does there. Returns whether that is news."""
        with self._lock:
            news = route not in self._failed
            self._failed[route] = self._clock() + LEFT_ALONE
            return news

    def answered(self, route: PeerRoute, connection: object) -> None:
        """It counts for as long as anybody has it."""
        with self._lock:
            self._failed.pop(route, None)
            self._used.setdefault(route, weakref.WeakSet()).add(connection)

    def _load(self, route: PeerRoute) -> int:
        return len(self._used.get(route, ()))
