"""Distinguishes errors of the remote tier, such as a full disk, a wrong key and a flipped bit.

Every message is a sentence for the user of the job; `reason` is used in a condition, `retriable` by the
upload loop. Every byte to and from the tier is compared with the digests made when its artifact was sealed.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from tiercheck.protocol.version import Digests
from tiercheck.redaction import redacted
from tiercheck_sidecar.digest import digest_as_filled, digest_chunk, running_digest


class Reason(str, Enum):
    """The reason why an operation on the remote tier failed."""

    UNREACHABLE = "Unreachable"
    """No answer: network, name, TLS, or a failing server."""
    FORBIDDEN = "Forbidden"
    """The store answered, and refused these credentials or this permission."""
    NO_SUCH_BUCKET = "NoSuchBucket"
    """The bucket (or the shared directory) does not exist."""
    CREDENTIALS_MISSING = "CredentialsMissing"
    """No credentials to sign requests were found."""
    FULL = "Full"
    """No space is left, or a quota is used up."""
    CORRUPT = "Corrupt"
    """The stored bytes are not those that were written."""
    ARCHIVED = "Archived"
    """The object exists, but cannot be read before it is restored from the store's archive."""
    OWNED = "Owned"
    """The folder belongs to another job, or to one of the same name in another cluster."""
    OTHER = "Other"


class RemoteConfigError(ValueError):
    """The settings of the remote tier cannot be used; the message names them and the reason."""


class RemoteError(Exception):
    """An operation on the remote tier failed. Its message holds no credential, even if a library's did."""

    def __init__(self, reason: Reason, message: str, *, retriable: bool) -> None:
        super().__init__(redacted(message))
        self.reason = reason
        self.retriable = retriable
        """True if the same call may succeed later without any change by a user."""


class _PermanentError(RemoteError):
    """An error that no retry fixes."""

    of = Reason.OTHER

    def __init__(self, message: str) -> None:
        super().__init__(self.of, message, retriable=False)


class RemoteCorrupt(_PermanentError):
    """Stored bytes are missing, short, or do not match their digests."""

    of = Reason.CORRUPT


class RemoteArchived(_PermanentError):
    """The object is in the store's archive, where it cannot be read."""

    of = Reason.ARCHIVED

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; bring it back from there, and end the lifecycle rule that moves it.")


class RemoteMissing(_PermanentError):
    """The requested version is not in the remote tier (it never was, or it has been deleted)."""


class RemoteOwned(_PermanentError):
    """The job's folder belongs to another job; nothing in it was touched."""

    of = Reason.OWNED


class RemoteClosed(_PermanentError):
    """The store was closed while the operation ran."""

    def __init__(self) -> None:
        super().__init__("The remote tier was closed before this operation ended.")


def ignore(_: object) -> None:
    """Does nothing; the default for callbacks that receive bytes or a number of bytes."""


def digest_of(digests: Digests) -> str:
    """Returns one digest for all of an artifact's digests; the manifest keeps it in place of them."""
    return digest_chunk(f"{digests.size} {digests.chunk} {' '.join(digests.values)}".encode())


def check_shape(digests: Digests, place: str) -> None:
    """Raises RemoteCorrupt unless there is one digest per chunk; `place` names the artifact."""
    if digests.chunk <= 0 or digests.size < 0 or len(digests.values) != -(-digests.size // digests.chunk):
        raise RemoteCorrupt(f"The digests of {place} are not those of {digests.size} bytes.")


def check_chunks(
    piece: memoryview, offset: int, digests: Digests, place: str, first: Callable[[memoryview], None] = ignore
) -> None:
    """Raises RemoteCorrupt at the first chunk that differs. `piece` begins on a chunk, at byte `offset`.

    `first` is called with each part of `piece` just before it is digested, so that what it reads or fills
    there is still in the cache.
    """
    for begin in range(0, len(piece), digests.chunk):
        index = (offset + begin) // digests.chunk
        with piece[begin : begin + digests.chunk] as chunk:
            check_digest(digest_as_filled(chunk, first), index, digests, place)


class StreamVerifier:
    """Digests the chunks of `into` as they arrive, while they are still in the cache."""

    def __init__(
        self,
        into: memoryview,
        offset: int,
        digests: Digests,
        place: str,
        on_bytes: Callable[[int], None] = ignore,
    ) -> None:
        """Takes a buffer that begins at byte `offset` of the artifact, on a chunk.

        The callback gets the number of new bytes; what it raises ends the reading.
        """
        self._into, self._offset, self._digests, self._place = into, offset, digests, place
        self._seen, self._hasher, self._on_bytes = 0, running_digest(), on_bytes

    def __call__(self, arrived: int) -> None:
        """Digests the first `arrived` bytes of `into`, which are there; 0 when the reading begins.

        Raises RemoteCorrupt at the first chunk that differs.
        """
        self._on_bytes(arrived - self._seen)
        chunk = self._digests.chunk
        while self._seen < arrived:
            index = self._seen // chunk
            end = min((index + 1) * chunk, len(self._into))
            stop = min(arrived, end)
            with self._into[self._seen : stop] as piece:
                self._hasher.update(piece)
            self._seen = stop
            if stop == end:
                check_digest(
                    self._hasher.hexdigest(), self._offset // chunk + index, self._digests, self._place
                )
                self._hasher = running_digest()


def check_digest(found: str, index: int, digests: Digests, place: str) -> None:
    """Raises RemoteCorrupt if `found` is not the digest of chunk `index`."""
    if found != digests.values[index]:
        raise RemoteCorrupt(f"{place} does not match its digest in chunk {index} of {len(digests.values)}.")
