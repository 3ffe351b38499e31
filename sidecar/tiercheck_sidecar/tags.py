"""Tags an artifact when it is sealed, and checks the tags of every chunk that arrives.

A digest detects what changed by accident. A tag also detects any change made without the job's token: it is
AES-256-GMAC (NIST SP 800-38D) of a chunk, with the chunk's index as nonce, under a key of this artifact
alone. That key comes from the token, from what the artifact is, and from a fresh salt (HKDF, RFC 5869). So no
chunk passes for that of another place, artifact, attempt or job, and what is sealed twice never uses a key
and a nonce again.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.version import Artifact, Digests
from tiercheck_sidecar.digest import CHUNK, digest, is_well_formed, running_digest

_KEY = 32
_HEX = 32
"""Characters of a tag."""
_PIECE = 256 * 1024
"""Bytes that are digested and tagged at once: they stay in a core's own cache in between."""


@dataclass(frozen=True)
class Tags:
    """The tags (hex) of all chunks of an artifact, one after the other, and the salt of their key."""

    salt: str
    values: str

    def of(self, index: int) -> str:
        return self.values[index * _HEX : (index + 1) * _HEX]


class Tagger:
    """Makes and checks the tags of one artifact under one salt. Thread-safe."""

    def __init__(self, token: str, job_uid: str, artifact: Artifact, salt: str | None = None) -> None:
        """Uses a fresh salt if there is no `salt`."""
        self.salt = secrets.token_hex(_KEY) if salt is None else salt
        said = to_json(["artifact", job_uid, artifact])
        self._key = AES(HKDF(SHA256(), _KEY, self.salt.encode(), said).derive(token.encode()))

    def running(self, index: int, wanted: str = "") -> ChunkTag:
        """Returns the tag of a chunk that comes piece by piece.
        `wanted`: the tag that it was sealed with, if that is known."""
        return ChunkTag(Cipher(self._key, GCM(index.to_bytes(12, "big"))), wanted)


class ChunkTag:
    """A tag that is being computed, to compare it with the one that was sealed."""

    def __init__(self, cipher: Cipher[GCM] | None = None, wanted: str = "") -> None:
        """Matches nothing if there is no `cipher`, because the tag is not known then."""
        self._context, self._wanted = cipher.encryptor() if cipher is not None else None, wanted
        self.update: Callable[[memoryview], None] = (
            self._context.authenticate_additional_data if self._context is not None else lambda _: None
        )

    def hex(self) -> str:
        """Returns the tag. Called once, after the last piece."""
        if self._context is None:
            return ""
        self._context.finalize()
        return self._context.tag.hex()

    def fits(self) -> bool:
        """Returns whether the tag is the one that was sealed. Called once, after the last piece."""
        found = self.hex()
        return bool(found) and hmac.compare_digest(found.encode(), self._wanted.encode())


def digest_and_tag(view: memoryview, tagger: Tagger | None) -> tuple[Digests, Tags | None]:
    """Returns the digests of all chunks of `view`, and their tags if there is a `tagger`.
    Both are computed while a piece is in the cache."""
    if tagger is None:
        return digest(view), None
    digests, tags = [], []
    for index, begin in enumerate(range(0, len(view), CHUNK)):
        end = min(begin + CHUNK, len(view))
        hasher, tag = running_digest(), tagger.running(index)
        for at in range(begin, end, _PIECE):
            piece = view[at : min(at + _PIECE, end)]
            hasher.update(piece)
            tag.update(piece)
        digests.append(hasher.hexdigest())
        tags.append(tag.hex())
    return Digests(len(view), CHUNK, tuple(digests)), Tags(tagger.salt, "".join(tags))


def is_well_described(digests: Digests | None, tags: Tags | None) -> bool:
    """Returns whether sizes and numbers of digests and tags match, to be checked first in a message."""
    if digests is None or not is_well_formed(digests):
        return False
    return tags is None or (
        len(tags.values) == _HEX * len(digests.values) and tags.values.isascii() and tags.salt.isascii()
    )
