"""When what we send keeps arriving damaged, our own memory is the first suspect."""

from __future__ import annotations

import contextlib

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Quarantined
from tiercheck_sidecar.board import SidecarState
from tiercheck_sidecar.vault import NotHeld, Seal, Vault


def distrust(board: SidecarState, vault: Vault, seal: Seal) -> None:
    """Read an own artifact again; if it has rotted, it is freed and reported."""
    with contextlib.suppress(NotHeld, OSError):
        reason = vault.fault(seal.rank, seal.version, Tier.LOCAL, seal.kind)
        if reason:
            vault.free(lambda each: each == seal)
            board.quarantine(Quarantined(seal.rank, seal.version, board.config.worker, reason, seal.kind))
