"""Reads an artifact in own memory again, its chunks on several threads: a restore waits for this, and training for the restore."""

from __future__ import annotations

from concurrent.futures import Executor

from tiercheck.protocol.artifact import Artifact
from tiercheck.protocol.directive import Tier
from tiercheck_sidecar.digest import digest_chunk, piece
from tiercheck_sidecar.vault import Vault
from tiercheck_sidecar.vault.inventory import header_fault


def fault_of(vault: Vault, artifact: Artifact, threads: Executor) -> str:
    """What is wrong with an own rank's artifact; empty if nothing is. Raises NotHeld, OSError."""
    with vault.pin(artifact.rank, artifact.version, Tier.LOCAL, artifact.kind) as slot:
        seal = slot.seal
        assert seal is not None
        digests = seal.digests
        if slot.size < digests.size:
            return f"it is {slot.size} bytes long, its seal says {digests.size}"
        with slot.mapped(size=digests.size) as view:
            found = threads.map(lambda index: digest_chunk(piece(view, digests, index)), range(len(digests.values)))
            for index, (value, wanted) in enumerate(zip(list(found), digests.values, strict=True)):
                if value != wanted:
                    return f"chunk {index} does not match its digest"
            return header_fault(view, seal)
