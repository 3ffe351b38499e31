"""What a durable place must be able to do to serve as remote tier: nine verbs over keys and bytes.

Everything that makes the remote tier safe (manifests, digests, retention) is above this line, in `store`;
adding a place means writing these verbs and passing the conformance suite. Keys are relative to the job's
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
"""Bytes of a small object, and of any other answer that is read into memory as a whole: the manifest of ten
thousand ranks has some 3 MiB."""

Arrived = Callable[[int], None]
"""Called with how many bytes of what is read are there; with 0 when the reading begins."""


class Gate(Protocol):
    """Called with the offset and the bytes of each piece before it is sent; raises to abandon the upload."""

    def __call__(self, offset: int, piece: memoryview, first: Callable[[memoryview], None] = ...) -> None:
        """`first` sees all of `piece`, part by part, just before the gate reads it: memory is then read once
        for both."""


@dataclass(frozen=True)
class Stored:
    """One object as the place lists it."""

    key: str
    size: int
    """Bytes."""
    modified: float
    """Unix seconds by the clock of the place, or of whoever wrote it: says nothing about which came first."""
    archived: bool = False
    """It is listed as in an archive, from which it may have been brought back."""


_PIECE = 1024 * 1024

_VERBS = {"check", "upload", "write", "create", "read", "read_into", "list", "delete", "forget_unfinished"}


def _declared(verb: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(verb)
    def guarded(place: Objects, *args: Any, **kwargs: Any) -> Any:
        try:
            return verb(place, *args, **kwargs)
        except RemoteError:
            raise
        except Exception as error:
            # Without the error's own words: a header that was refused is named with its content, and that may
            # be a credential.
            log.warning(
                "%s failed:\n%s%s",
                place.location,
                "".join(traceback.format_tb(error.__traceback__)),
                type(error),
            )
            raise RemoteError(
                Reason.OTHER,
                f"{place.location} failed in a way that nobody thought of ({describe(error)}); check "
                "spec.tiers.remote and what "
                "answers there. The log of this sidecar says more.",
                retriable=True,
            ) from error

    return guarded


class Objects(ABC):
    """A job's folder in a durable place."""

    def __init_subclass__(cls) -> None:
        """What a place raises beside RemoteError becomes one: here, so that no place can forget it."""
        for verb in _VERBS & vars(cls).keys():
            setattr(cls, verb, _declared(getattr(cls, verb)))

    location: str
    """How to name it in a sentence, e.g. `s3://bucket/prefix`."""
    weakness: str = ""
    """What it was found not to do as promised here, and is done without as far as that goes: a sentence.
    Known after `check`."""

    @abstractmethod
    def check(self) -> None:
        """Raise unless the place answers and can be read and written."""

    @abstractmethod
    def upload(self, key: str, source: memoryview, chunk: int, gate: Gate) -> None:
        """Store the bytes of `source`, in pieces of a multiple of `chunk` that pass `gate` before they are
        sent, from several threads.

        Readers see all of it or nothing. Overwrites. Pieces that an interrupted upload of the same bytes left
        may be used; they do not pass `gate` again.
        """

    @abstractmethod
    def write(self, key: str, body: bytes) -> None:
        """Store a small object; durable on return. Overwrites."""

    @abstractmethod
    def create(self, key: str, body: bytes) -> bool:
        """Store a small object only if none is there, atomically; False if there is one."""

    @abstractmethod
    def read(self, key: str) -> bytes | None:
        """A small object; None if there is none. Raises RemoteCorrupt, before it is read, if it is larger
        than `LONGEST`."""

    @abstractmethod
    def read_into(self, key: str, offset: int, into: memoryview, arrived: Arrived = ...) -> int:
        """Fill `into` from `offset` on. Returns the bytes read, less than asked at the end or if it is
        missing.

        What `arrived` raises ends it.
        """

    @abstractmethod
    def list(self, prefix: str) -> list[Stored]:
        """Every object whose key begins with `prefix`, in no order. Unfinished uploads are not objects."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete; what is already gone is no error."""

    @abstractmethod
    def forget_unfinished(self, dead: Callable[[str], bool]) -> None:
        """Free what killed uploads left behind invisibly, where `dead(key)` says that nobody writes it any
        more."""

    def remains_of_deleted(self) -> str:
        """What is known to stay for ever of what was deleted, and what to do; empty: nothing. Raises
        RemoteError."""
        return ""

    def close(self) -> None:  # noqa: B027  (nothing to release by default)
        """Release connections."""


def read_all(read: Callable[[int], bytes], place: str, claimed: int = 0) -> bytes:
    """All that `read` gives, which is asked for at most so many bytes each time and returns none at the end.
    `claimed`: bytes that there are said to be. Raises RemoteCorrupt if either is more than `LONGEST`."""
    found = bytearray()
    while max(claimed, len(found)) <= LONGEST:
        piece = read(min(_PIECE, LONGEST + 1 - len(found)))
        if not piece:
            return bytes(found)
        found += piece
    raise RemoteCorrupt(f"{place} has more than {LONGEST} bytes; it was not read.")
