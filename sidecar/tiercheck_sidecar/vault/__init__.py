"""The local tier: slots in shared memory, what is held, what may be freed."""

from tiercheck_sidecar.vault.seal import Seal
from tiercheck_sidecar.vault.vault import Draft, MemoryTooSmall, NoFreeSlot, NotHeld, Vault

__all__ = ["Draft", "MemoryTooSmall", "NoFreeSlot", "NotHeld", "Seal", "Vault"]
