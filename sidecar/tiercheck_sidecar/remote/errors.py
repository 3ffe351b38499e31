"""So that a full disk, a wrong key and a flipped bit are told apart: the errors of the remote tier.

Every message is a sentence for the person who runs the job; `reason` is what a condition carries, `retriable`
is what the upload loop asks.
"""

from __future__ import annotations

from enum import Enum

from tiercheck.redaction import redacted


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
