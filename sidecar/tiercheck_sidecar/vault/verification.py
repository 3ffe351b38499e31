"""Reads an artifact in own memory again, to see whether it is what was sealed.

All of it at once, its chunks on several threads, because training waits for a restore. When what we send
keeps arriving damaged, our own memory is the first suspect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Quarantined
from tiercheck.protocol.version import Artifact, Share
from tiercheck_sidecar.digest import chunk_view, digest_chunk, length_of
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.vault import NotHeld, Seal, Vault
from tiercheck_sidecar.vault.inventory import sealed
from tiercheck_sidecar.vault.seal import header_fault


def fault_of(
    vault: Vault, artifact: Artifact, threads: Executor, read: Callable[[int], None] = lambda _: None
) -> str:
    """What is wrong with an own rank's artifact; empty if nothing is. `read` hears of the bytes of each
    chunk. Raises NotHeld, OSError."""
    with mapped(vault, artifact) as (view, seal):
        digests = seal.digests

        def look(index: int) -> str:
            good = digest_chunk(chunk_view(view, digests, index)) == digests.values[index]
            read(length_of(digests, index))
            return "" if good else f"chunk {index} does not match its digest"

        found = threads.map(look, range(len(digests.values)))
        return next(filter(None, list(found)), "") or header_fault(view, seal)


@contextlib.contextmanager
def mapped(vault: Vault, artifact: Artifact) -> Iterator[tuple[memoryview, Seal]]:
    """An own rank's artifact and its seal. Raises NotHeld, OSError."""
    with vault.pin(artifact, Tier.LOCAL) as slot, sealed(slot) as found:
        yield found


def evict_if_bad(
    state: SidecarState,
    vault: Vault,
    artifact: Artifact,
    tier: Tier | None = None,
    share: Share | None = None,
) -> str:
    """Read an artifact, or a block, again. If it has rotted it is freed and reported, and what is wrong with
    it is returned: whoever complains of it is not believed, our own eyes are. What an own rank wrote may be
    all that there is, so it stays where it only could not be read, as without descriptors."""
    try:
        reason = vault.fault(artifact, tier, share=share)
    except (NotHeld, OSError) as error:
        if tier is Tier.LOCAL:
            return str(error)
        reason = str(error)
    if reason and vault.evict(
        lambda seal: (seal.artifact, seal.share) == (artifact, share) and tier in (None, seal.tier)
    ):
        bad = Quarantined(artifact.rank, artifact.version, state.config.worker, reason, artifact.kind)
        state.quarantine(bad)
    return reason
