"""Tells a full disk, a wrong key and a flipped bit of the remote tier apart.

Every message is a sentence for the person who runs the job; `reason` is what a condition carries, `retriable`
is what the upload loop asks. Every byte to and from the tier is compared with the digests of its sealing.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from tiercheck.protocol.version import Digests
from tiercheck.redaction import redacted
from tiercheck_sidecar.digest import digest_as_filled, digest_chunk, running_digest


class Reason(str, Enum):
    """Why the remote tier did not do what was asked."""

    UNREACHABLE = "Unreachable"
    """No answer: network, name, TLS, a server in trouble."""
    FORBIDDEN = "Forbidden"
    """It answered, and refused these credentials or this permission."""
    NO_SUCH_BUCKET = "NoSuchBucket"
    """The bucket (or the shared directory) does not exist."""
    CREDENTIALS_MISSING = "CredentialsMissing"
    """Nothing was found to sign requests with."""
    FULL = "Full"
    """No space is left, or a quota is used up."""
    CORRUPT = "Corrupt"
    """What is stored is not what was written."""
    ARCHIVED = "Archived"
    """It is there, and cannot be read before it is brought back from the store's archive."""
    OWNED = "Owned"
    """The folder is another job's, or one of the same name in another cluster."""
    OTHER = "Other"


class RemoteConfigError(ValueError):
    """The settings of the remote tier cannot be used; the message says which and why."""


class RemoteError(Exception):
    """An operation on the remote tier failed. Its message holds no credential, whatever a library said."""

    def __init__(self, reason: Reason, message: str, *, retriable: bool) -> None:
        super().__init__(redacted(message))
        self.reason = reason
        self.retriable = retriable
        """Whether the same call may succeed later without anybody changing anything."""


class _Lasting(RemoteError):
    """No repetition changes it."""

    of = Reason.OTHER

    def __init__(self, message: str) -> None:
        super().__init__(self.of, message, retriable=False)


class RemoteCorrupt(_Lasting):
    """Stored bytes are missing, short, or do not match their digests."""

    of = Reason.CORRUPT


class RemoteArchived(_Lasting):
    """The store has what was asked for in an archive, where it cannot be read."""

    of = Reason.ARCHIVED

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; bring it back from there, and end the lifecycle rule that moves it.")


class RemoteMissing(_Lasting):
    """The wanted version is not in the remote tier (it never was, or it has been deleted)."""


class RemoteOwned(_Lasting):
    """The job's folder belongs to somebody else; nothing in it was touched."""

    of = Reason.OWNED


class RemoteClosed(_Lasting):
    """The store was closed while the operation ran."""

    def __init__(self) -> None:
        super().__init__("The remote tier was closed before this operation ended.")


def ignore(_: object) -> None:
    """For those who look at the bytes when all are there, or have no other use for them."""


def digest_of(digests: Digests) -> str:
    """One digest for all of an artifact's digests: what the manifest keeps of them."""
    return digest_chunk(f"{digests.size} {digests.chunk} {' '.join(digests.values)}".encode())


def check_shape(digests: Digests, place: str) -> None:
    """Raises RemoteCorrupt unless there is one digest per chunk. `place` names the artifact in the
    message.
    """
    if digests.chunk <= 0 or digests.size < 0 or len(digests.values) != -(-digests.size // digests.chunk):
        raise RemoteCorrupt(f"The digests of {place} are not those of {digests.size} bytes.")


def check_chunks(
    piece: memoryview, offset: int, digests: Digests, place: str, first: Callable[[memoryview], None] = ignore
) -> None:
    """Raises RemoteCorrupt at the first chunk that differs. `piece` begins on a chunk, at byte `offset`.

    `first` is called with all of it, part by part, each before it is digested: what reads or fills it there
    leaves it in the cache.
    """
    for begin in range(0, len(piece), digests.chunk):
        index = (offset + begin) // digests.chunk
        with piece[begin : begin + digests.chunk] as chunk:
            check_digest(digest_as_filled(chunk, first), index, digests, place)


class Arriving:
    """Digests the chunks of `into`, which are at `offset` of the artifact, as they come: while they are still
    in the cache."""

    def __init__(
        self,
        into: memoryview,
        offset: int,
        digests: Digests,
        place: str,
        heard: Callable[[int], None] = ignore,
    ) -> None:
        """`heard` is told how many bytes have come since it was told last; what it raises ends the
        reading.
        """
        self._into, self._offset, self._digests, self._place = into, offset, digests, place
        self._seen, self._hasher, self._heard = 0, running_digest(), heard

    def __call__(self, arrived: int) -> None:
        """So many bytes of `into` are there now; 0 when they begin to come.

        Raises RemoteCorrupt at the first chunk that differs.
        """
        self._heard(arrived - self._seen)
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
    """Raises RemoteCorrupt if that is not the digest of chunk `index`."""
    if found != digests.values[index]:
        raise RemoteCorrupt(f"{place} does not match its digest in chunk {index} of {len(digests.values)}.")
