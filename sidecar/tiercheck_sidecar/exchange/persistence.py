"""A push that is broken off goes on where it stopped, as long as each connection brought something."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tiercheck.protocol.directive import Tier
from tiercheck_sidecar.exchange.frames import WireBroken
from tiercheck_sidecar.exchange.line import Line
from tiercheck_sidecar.plain_files import open_plain
from tiercheck_sidecar.vault import Seal, Vault

T = TypeVar("T")

_MOST_BREAKS = 20


def push_on(vault: Vault, seal: Seal, line: Line, once: Callable[[int], T]) -> T:
    """What `once` says, which is given the open file of an own artifact and sends on `line` what is still missing.

    Raises NotHeld, OSError, WireBroken, and what `once` raises; then `line` is hung up.
    """
    try:
        with (
            vault.pin(seal.rank, seal.version, Tier.LOCAL, seal.kind) as slot,
            open(open_plain(slot.path), "rb") as file,
        ):
            for _ in range(_MOST_BREAKS):
                hopeful, before = line.is_open, line.sent
                try:
                    return once(file.fileno())
                except WireBroken:
                    # A connection that lay idle may have been closed by the other end long ago: that proves nothing.
                    if not hopeful and line.sent == before:
                        raise
                    line.drop()
            raise WireBroken(f"the connection broke {_MOST_BREAKS} times")
    except BaseException:
        line.drop()
        raise
