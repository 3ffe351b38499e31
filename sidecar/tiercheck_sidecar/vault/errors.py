"""Why the vault could not do what was asked. Each message is a sentence for a person."""

from __future__ import annotations


class NoFreeSlot(Exception):
    """Every slot that could be used is in use. Try again later."""


class NoDeltas(NoFreeSlot):
    """There are no delta slots, nor will there be for now."""


class MemoryTooSmall(Exception):
    """The memory volume cannot hold the fewest slots that saving needs; the message says what to set."""


class NotHeld(LookupError):
    """No such verified artifact is here."""
