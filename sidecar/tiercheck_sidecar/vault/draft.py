"""A draft: a slot that the sidecar itself fills, with a copy, a restored artifact or a parity block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from tiercheck.protocol.artifacts.slot import NotASlot
from tiercheck_sidecar.vault.inventory import header_fault
from tiercheck_sidecar.vault.seal import Seal
from tiercheck_sidecar.vault.slots import Slot, blank


class SlotDraft:
    """`view` is the artifact's bytes, to be written chunk by verified chunk; all zero at first for a parity
    block."""

    def __init__(
        self, slot: Slot, seal: Seal, keep: Callable[[Slot, Seal], None], drop: Callable[[Slot], None]
    ) -> None:
        self.seal = seal
        self._slot, self._keep, self._drop = slot, keep, drop
        self._over = False
        self._stack = contextlib.ExitStack()
        self.view = self._stack.enter_context(slot.mapped(write=True, size=seal.digests.size))
        if seal.share is not None:
            blank(self.view)

    @property
    def path(self) -> Path:
        """The slot's file, for those who write through a descriptor."""
        return self._slot.path

    def keep(self, seal: Seal | None = None) -> None:
        """The caller has verified every chunk: seal it, as `seal` if that is known only now (a parity block's
        digests are). Raises NotASlot if a whole artifact is not what it claims to be, OSError; then the slot
        is given back.
        """
        final = seal or self.seal
        reason = header_fault(self.view, final) if final.share is None else ""
        if reason:
            self.release()
            raise NotASlot(reason)
        self._stack.close()
        try:
            self._keep(self._slot, final)
        except BaseException:
            self.release()
            raise
        self.seal, self._over = final, True

    def release(self) -> None:
        """Give the slot back. Harmless after `keep`."""
        if self._over:
            return
        self._over = True
        self._stack.close()
        self._drop(self._slot)
