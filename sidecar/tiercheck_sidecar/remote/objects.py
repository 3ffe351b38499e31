"""Defines the nine operations over keys and bytes that a store needs to serve as remote tier.

Everything that makes the remote tier safe (manifests, digests, retention) is built on top, in `store`; a new
kind of store implements these operations and passes the conformance suite. Keys are relative to the job's
folder and use "/". All methods block, may be called from several threads, and raise RemoteError.
"""

from __future__ import annotations

import functools
import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from tiercheck.protocol.plain_json import MOST_BYTES
from tiercheck.supervised import describe
from tiercheck_sidecar.remote.errors import Reason, RemoteCorrupt, RemoteError

log = logging.getLogger(__name__)

LONGEST = MOST_BYTES
"""Bytes, at most, read into memory as a whole: the manifest of ten thousand ranks has some 3 MiB."""

Arrived = Callable[[int], None]
"""Called with the number of bytes that have been read; with 0 when the reading begins."""


class Gate(Protocol):
    """A callback with the offset and bytes of each piece before it is sent; raises to abandon the upload."""

    def __call__(self, offset: int, piece: memoryview, first: Callable[[memoryview], None] = ...) -> None:
        """Checks a piece. `first` gets each part of it just before, so that memory is read once for both."""


@dataclass(frozen=True)
class Stored:
    """One object in a listing of the store."""

    key: str
    size: int
    """Bytes."""
    modified: float
    """Unix seconds by the clock of the store or of the writer: they do not show which object came first."""
    archived: bool = False
    """True if it is listed as archived; it may have been restored from the archive since."""


_PIECE = 1024 * 1024


def _declared(verb: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(verb)
    def guarded(place: Objects, *args: Any, **kwargs: Any) -> Any:
        try:
            return verb(place, *args, **kwargs)
        except RemoteError:
            raise
        except Exception as error:
            # The error's text is left out: it quotes a header that was refused, and that may be a credential.
            log.warning(
                "%s failed:\n%s%s",
                place.location,
                "".join(traceback.format_tb(error.__traceback__)),
                type(error),
            )
            raise RemoteError(
                Reason.OTHER,
                f"{place.location} failed unexpectedly ({describe(error)}); check spec.tiers.remote and what "
                "answers there. The log of this sidecar says more.",
                retriable=True,
            ) from error

    return guarded


class Objects(ABC):
    """A job's folder in a durable store."""

    def __init_subclass__(cls) -> None:
        """Wraps the operations of every store, so that all other exceptions become RemoteError."""
        for name in vars(Objects).keys() & vars(cls).keys():
            if not name.startswith("_") and name != "close" and callable(verb := vars(cls)[name]):
                setattr(cls, name, _declared(verb))

    location: str
    """The name of the store in messages, e.g. `s3://bucket/prefix`."""
    weakness: str = ""
    """A sentence on a guarantee that the store lacks, worked around as far as possible; set by `check`."""

    @abstractmethod
    def check(self) -> None:
        """Raises unless the store answers and can be read and written."""

    @abstractmethod
    def upload(self, key: str, source: memoryview, chunk: int, gate: Gate) -> None:
        """Stores `source` in pieces of a multiple of `chunk` bytes that pass `gate` before they are sent.

        Several threads may call `gate`. Readers see all of the object or nothing. Overwrites. Pieces left by
        an interrupted upload of the same bytes may be used; they do not pass `gate` again.
        """

    @abstractmethod
    def write(self, key: str, body: bytes) -> None:
        """Stores a small object; durable on return. Overwrites."""

    @abstractmethod
    def create(self, key: str, body: bytes) -> bool:
        """Stores a small object atomically, if there is none; returns False if there is one."""

    @abstractmethod
    def read(self, key: str) -> bytes | None:
        """Returns a small object, or None. Raises RemoteCorrupt if it has more than `LONGEST` bytes."""

    @abstractmethod
    def read_into(self, key: str, offset: int, into: memoryview, arrived: Arrived = ...) -> int:
        """Fills `into` from byte `offset` on; returns the bytes read, fewer at the end or if it is missing.

        An exception from `arrived` ends the reading.
        """

    @abstractmethod
    def list(self, prefix: str) -> list[Stored]:
        """Returns the objects with keys that begin with `prefix`, in no order, without unfinished uploads."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects; a missing one is no error."""

    @abstractmethod
    def forget_unfinished(self, dead: Callable[[str], bool]) -> None:
        """Frees the invisible remains of killed uploads to keys that `dead` reports as abandoned."""

    def remains_of_deleted(self) -> str:
        """Returns what remains of deleted objects for ever, with advice; else empty. Raises RemoteError."""
        return ""

    def close(self) -> None:  # noqa: B027  (nothing to release by default)
        """Releases connections."""


def read_all(read: Callable[[int], bytes], place: str, claimed: int = 0) -> bytes:
    """Reads to the end. Raises RemoteCorrupt if the bytes, or the announced `claimed`, exceed `LONGEST`."""
    found = bytearray()
    while max(claimed, len(found)) <= LONGEST:
        piece = read(min(_PIECE, LONGEST + 1 - len(found)))
        if not piece:
            return bytes(found)
        found += piece
    raise RemoteCorrupt(f"{place} has more than {LONGEST} bytes; it was not read.")
