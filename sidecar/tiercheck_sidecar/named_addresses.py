"""Who has room of his own among strangers: whoever comes from an address that the operator named."""

from __future__ import annotations

import contextlib

from tiercheck.protocol.address import split_address
from tiercheck.protocol.directive import Directive, Peer


def named_addresses(directive: Directive | None) -> frozenset[str]:
    """The IP addresses of the peers that a directive names."""
    if directive is None:
        return frozenset()
    groups = [*directive.folded, *([directive.parity] if directive.parity else [])]
    peers: list[Peer] = [*directive.holders, *directive.hosted, directive.coordinator]
    for group in groups:
        peers += [*group.members, *group.holders]
    addresses = set()
    for peer in peers:
        with contextlib.suppress(ValueError):  # not an address: nobody comes from there
            addresses.add(split_address(peer.host)[0])
    return frozenset(addresses)
