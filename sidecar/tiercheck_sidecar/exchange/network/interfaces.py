"""Chooses the pod's own addresses that match the interfaces which the job names."""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass


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
