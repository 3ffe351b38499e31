"""Keeps a proven connection proven: only its two ends can make the tags of its frames.

None can be left out, repeated or moved.

AES-256 in Galois/counter mode (NIST SP 800-38D), with a key for each direction of each connection and the
frame's number as nonce. Authenticated frames are its associated data alone (GMAC) and travel as they are;
encrypted ones are enciphered as well.
"""

from __future__ import annotations

import hashlib
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

TAG = 16
"""Bytes of a tag."""
_KEY = 32


class Forged(Exception):
    """A frame is not what the other end sent as the next one."""


class Frame:
    """One frame on its way, piece by piece."""

    def __init__(self, context: Any, header: bytes, encrypted: bool) -> None:
        self._context, self._encrypted = context, encrypted
        context.authenticate_additional_data(header)

    def work(self, view: memoryview | bytearray) -> None:
        """The next bytes of it, which are changed in place if the connection is encrypted."""
        if self._encrypted:
            self._context.update_into(view, view)
        else:
            self._context.authenticate_additional_data(view)

    def tag(self) -> bytes:
        """What ends a frame that is sent."""
        self._context.finalize()
        return bytes(self._context.tag)

    def check(self, tag: bytes | bytearray) -> None:
        """Whether a frame that was received is the one that was sent. Raises Forged."""
        try:
            self._context.finalize_with_tag(bytes(tag))
        except InvalidTag as error:
            raise Forged("the bytes are not those that were sent") from error


class Direction:
    """One way of a connection. Frames are numbered, and must be finished one after the other."""

    def __init__(self, key: bytes, encrypted: bool) -> None:
        self._key, self.encrypted = AES(key), encrypted
        self._number = 0

    def sending(self, header: bytes) -> Frame:
        return Frame(self._next().encryptor(), header, self.encrypted)

    def receiving(self, header: bytes) -> Frame:
        return Frame(self._next().decryptor(), header, self.encrypted)

    def _next(self) -> Cipher[GCM]:
        nonce = self._number.to_bytes(12, "big")
        self._number += 1
        return Cipher(self._key, GCM(nonce))


def directions(token: str, said: bytes, encrypted: bool) -> tuple[Direction, Direction]:
    """From the caller to the one who is called, and back. `said`: all that the two agreed on, with a fresh
    nonce of each (HKDF, RFC 5869)."""
    salt = hashlib.sha256(said).digest()
    keys = HKDF(SHA256(), 2 * _KEY, salt, b"tiercheck exchange").derive(token.encode())
    return Direction(keys[:_KEY], encrypted), Direction(keys[_KEY:], encrypted)
