"""Implements the local tier: slots in shared memory, what they hold, and what may be freed."""

from tiercheck.protocol.artifacts.sizing import Room
from tiercheck_sidecar.vault.seal import Seal
from tiercheck_sidecar.vault.slots import MemoryTooSmall, NoDeltas, NoFreeSlot, NotHeld, Slot, SlotDraft
from tiercheck_sidecar.vault.vault import Vault

__all__ = [
    "MemoryTooSmall",
    "NoDeltas",
    "NoFreeSlot",
    "NotHeld",
    "Room",
    "Seal",
    "Slot",
    "SlotDraft",
    "Vault",
]
