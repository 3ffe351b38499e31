"""No byte leaves for the remote tier or comes back from it unchecked: the digests of sealing, compared at this hop."""

from __future__ import annotations

from tiercheck.protocol.manifest import Digests
from tiercheck_sidecar.digest import digest_chunk
from tiercheck_sidecar.remote.errors import RemoteCorrupt


def digest_of(digests: Digests) -> str:
    """One digest for all of an artifact's digests: what the manifest keeps of them."""
    return digest_chunk(f"{digests.size} {digests.chunk} {' '.join(digests.values)}".encode())


def check_shape(digests: Digests, place: str) -> None:
    """Raises RemoteCorrupt unless there is one digest per chunk. `place` names the artifact in the message."""
    if digests.chunk <= 0 or digests.size < 0 or len(digests.values) != -(-digests.size // digests.chunk):
        raise RemoteCorrupt(f"The digests of {place} are not those of {digests.size} bytes.")


def check_chunks(piece: memoryview, offset: int, digests: Digests, place: str) -> None:
    """Raises RemoteCorrupt at the first chunk that differs. `piece` begins on a chunk, at byte `offset`."""
    for begin in range(0, len(piece), digests.chunk):
        index = (offset + begin) // digests.chunk
        with piece[begin : begin + digests.chunk] as chunk:
            if digest_chunk(chunk) != digests.values[index]:
                raise RemoteCorrupt(f"{place} does not match its digest in chunk {index} of {len(digests.values)}.")
