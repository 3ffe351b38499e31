"""Refuses and counts messages of an attempt that is over, from any sender."""

from __future__ import annotations

from collections.abc import Callable

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from tiercheck.protocol.directive import Directive


def is_signed(key: bytes, statement: bytes, signature: str) -> bool:
    """Returns whether the operator with this public key signed the statement."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(bytes.fromhex(signature), statement)
    except (InvalidSignature, ValueError):
        return False
    return True


class Fence:
    """Refuses messages of other attempts. Thread-safe.

    Each method returns the reason of a refusal as a sentence; empty if there is none. The caller passes the
    directive that is followed: whatever else it decides by that must be decided by the same one.
    """

    def __init__(self, count_stale: Callable[[], None]) -> None:
        self._count_stale = count_stale

    def refuse_past(self, attempt: int, followed: Directive | None) -> str:
        """Refuses what is of an older attempt."""
        if followed is None or attempt >= followed.attempt:
            return ""
        self._count_stale()
        return f"attempt {attempt} is over, the job is at attempt {followed.attempt}"

    def refuse_future(self, attempt: int, followed: Directive | None) -> str:
        """Refuses what is of an attempt that this sidecar has no directive of yet."""
        if followed is None or attempt > followed.attempt:
            return f"attempt {attempt} is not known here yet"
        return ""

    def refuse_other(self, attempt: int, followed: Directive | None) -> str:
        """Refuses what is of any other attempt."""
        return self.refuse_past(attempt, followed) or self.refuse_future(attempt, followed)
