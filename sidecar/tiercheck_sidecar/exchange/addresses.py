"""Chooses own addresses on the interfaces that the job names, and records those of peers.

A peer reports its addresses once both ends are authenticated. A new connection takes the route with the
fewest connections; a route that does not answer is not used for a while.
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
    """The entry of `Policy.peer_interfaces`. Workers connect only between addresses of the same entry."""
    host: str


@dataclass(frozen=True)
class OwnAddress:
    """An IP address of this pod."""

    interface: str
    host: str


@dataclass(frozen=True)
class ChosenAddresses:
    """The result of `choose_addresses`."""

    addresses: tuple[NamedAddress, ...]
    """The chosen addresses, without the pod's own."""
    missing: tuple[str, ...]
    """Entries that match no address."""


def choose_addresses(entries: Sequence[str], own: Sequence[OwnAddress], pod_ip: str) -> ChosenAddresses:
    """Returns the own addresses that the entries select, each once and without the pod's own.

    An entry with a slash is a CIDR and selects all addresses in it. Any other is the name of an interface and
    selects its first IPv4 address, or else its first IPv6 address."""
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
    """The fields of `struct ifaddrs` that are read."""


_InterfaceAddress._fields_ = (
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SocketAddress)),
)
_PLACES: dict[int, slice] = {socket.AF_INET: slice(2, 6), socket.AF_INET6: slice(6, 22)}
"""The position of the address bytes behind the family field, by family."""


def own_addresses() -> tuple[OwnAddress, ...]:
    """Returns the addresses of this pod's network, in the kernel's order. Raises OSError."""
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


RETRY_AFTER = 30.0
"""Seconds until an address that did not answer is tried again."""


@dataclass(frozen=True)
class PeerRoute:
    """A route from an own address to a peer's, both on interfaces of the same entry."""

    source: str
    host: str


def pair(own: Sequence[NamedAddress], theirs: Sequence[NamedAddress]) -> tuple[PeerRoute, ...]:
    """Returns a route to each of `theirs` that shares an entry and family with an own address.

    Own addresses of that entry and family are taken in order, and again from the first when they run out."""
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
    """Holds own and peers' addresses, and which routes fail or carry connections. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.own: tuple[NamedAddress, ...] = ()
        """The addresses beside its pod's at which this sidecar listens."""
        self._reported: dict[Peer, tuple[NamedAddress, ...]] = {}
        self._failed: dict[PeerRoute, float] = {}
        self._turns: Counter[Peer] = Counter()
        self._used: dict[PeerRoute, weakref.WeakSet[object]] = {}

    def record(self, peer: Peer, addresses: tuple[NamedAddress, ...]) -> bool:
        """Records the addresses that an authenticated peer reported. Returns whether they changed."""
        with self._lock:
            news = self._reported.get(peer, ()) != addresses
            self._reported[peer] = addresses
            return news

    @property
    def hosts(self) -> frozenset[str]:
        with self._lock:
            return frozenset(each.host for reported in self._reported.values() for each in reported)

    def routes(self, peer: Peer) -> tuple[PeerRoute, ...]:
        """Returns routes to try in order before the pod's address: least loaded first, equals in rotation."""
        with self._lock:
            now = self._clock()
            routes = [
                route
                for route in pair(self.own, self._reported.get(peer, ()))
                if self._failed.get(route, now) <= now
            ]
            if not routes:
                return ()
            first = self._turns[peer] % len(routes)
            self._turns[peer] += 1
            return tuple(sorted((*routes[first:], *routes[:first]), key=self._load))

    def failed(self, route: PeerRoute) -> bool:
        """Records that no peer, or another one, answers there. Returns whether that is a new failure."""
        with self._lock:
            news = route not in self._failed
            self._failed[route] = self._clock() + RETRY_AFTER
            return news

    def answered(self, route: PeerRoute, connection: object) -> None:
        """Records a working route. The connection counts as load for as long as it is referenced."""
        with self._lock:
            self._failed.pop(route, None)
            self._used.setdefault(route, weakref.WeakSet()).add(connection)

    def _load(self, route: PeerRoute) -> int:
        return len(self._used.get(route, ()))
