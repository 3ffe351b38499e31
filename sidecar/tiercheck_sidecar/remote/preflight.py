"""Tries out all that the remote tier relies on, with small objects, before a job has to.

Each promise is tried by what would go wrong without it: a second writer that is not refused, a range that
begins elsewhere, an object that is listed late, or cannot be deleted. What is written is deleted again.
"""

from __future__ import annotations

import contextlib
import random
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tiercheck_sidecar.remote import keys
from tiercheck_sidecar.remote.errors import RemoteError
from tiercheck_sidecar.remote.objects import Objects
from tiercheck_sidecar.remote.verify import ignore_bytes

CHUNK = 1024 * 1024
SIZE = 17 * CHUNK
"""More than one part of a bucket's multipart upload."""
MOST_SKEW = 60.0
"""Seconds. S3 refuses requests from 15 minutes on."""


@dataclass(frozen=True)
class StoreFinding:
    """One promise of a durable place, and whether it keeps it."""

    name: str
    ok: bool
    message: str
    """What was seen; of a promise that is not kept also what to do."""
    passing: bool = False
    """It could not be tried, which may be otherwise in a moment."""


Check = Callable[[Objects, str], str]
"""Given the place and a folder of its own; what was seen. Raises Broken, RemoteError."""


class Broken(Exception):
    """A promise is not kept; the message says what was seen and what to do."""


def examine(objects: Objects) -> Iterator[StoreFinding]:
    """One finding after the other; only the first, if the place cannot be used at all."""
    folder = f"{keys.CHECK}{uuid.uuid4().hex}/"
    try:
        for name, check in _CHECKS:
            finding = _tried(name, check, objects, folder)
            yield finding
            if check is _access and not finding.ok:
                return
    finally:
        with contextlib.suppress(RemoteError):
            objects.delete([stored.key for stored in objects.list(folder)])


def _tried(name: str, check: Check, objects: Objects, folder: str) -> StoreFinding:
    try:
        return StoreFinding(name, True, check(objects, folder))
    except Broken as broken:
        return StoreFinding(name, False, str(broken))
    except RemoteError as error:
        return StoreFinding(name, False, str(error), passing=error.retriable)


def _access(objects: Objects, folder: str) -> str:
    objects.check()
    return f"{objects.location} can be listed and written"


def _conditional(objects: Objects, folder: str) -> str:
    if objects.weakness:
        raise Broken(objects.weakness)
    key = f"{folder}once"
    first, second = objects.create(key, b"first"), objects.create(key, b"second")
    found = objects.read(key)
    if not first or second or found != b"first":
        raise Broken(
            f"of two writers of one new object the first {'won' if first else 'lost'} and the second "
            f"{'won' if second else 'lost'}, and "
            f"{'the first' if found == b'first' else 'not the first'} is read. Use a server that honours "
            "If-None-Match, or a "
            "file system with hard links."
        )
    return "the second of two writers of a new object is refused"


def _parts(objects: Objects, folder: str) -> str:
    objects.upload(f"{folder}large", memoryview(_content()), CHUNK, _pass)
    return f"{SIZE // CHUNK} MiB were uploaded in parts"


def _ranges(objects: Objects, folder: str) -> str:
    content = _content()
    for begin, length in (
        (0, CHUNK),
        (SIZE - CHUNK - 5, 10),
        (SIZE - 3, 8),
    ):  # the second of both parts, the third beyond the end
        into = bytearray(length)
        got = objects.read_into(f"{folder}large", begin, memoryview(into))
        wanted = content[begin : begin + length]
        if into[:got] != wanted:
            raise Broken(
                f"bytes {begin} to {begin + len(wanted)} were asked for, and the {got} that came are not "
                "what was written. Look for a "
                "proxy or cache in between that does not know ranges."
            )
    return "ranges come as they were written"


def _listing(objects: Objects, folder: str) -> str:
    sizes = {stored.key: stored.size for stored in objects.list(folder)}
    if sizes != {f"{folder}once": 5, f"{folder}large": SIZE}:
        raise Broken(
            f"two objects were written and {len(sizes)} of them are listed right after that, or with "
            "another size. Use a store "
            "that lists what is written at once; a manifest that is listed late is a version that a "
            "restore does not find."
        )
    return "what was written is listed at once, in full size"


def _clock(objects: Objects, folder: str) -> str:
    before = time.time()
    objects.write(f"{folder}clock", b"now")
    after = time.time()
    stored = next(iter(objects.list(f"{folder}clock")), None)
    if stored is None:
        raise Broken("what was written is not listed, so its time is not known.")
    skew = min(max(stored.modified, before - 1.0), after) - stored.modified  # stores tell whole seconds
    seen = f"the store's clock is {abs(skew):.0f} s {'behind' if skew > 0 else 'ahead of'} this machine's"
    if abs(skew) > MOST_SKEW:
        raise Broken(
            f"{seen}. Synchronise both (NTP): S3 refuses requests from 15 minutes on, and keepFor goes by it."
        )
    return "the store's clock and this machine's agree" if abs(skew) < 2 else seen


def _delete(objects: Objects, folder: str) -> str:
    written = [stored.key for stored in objects.list(folder)]
    objects.delete(written)
    left = [key for key in written if objects.read(key) is not None] or objects.list(folder)
    if left:
        raise Broken(
            f"{len(left)} of {len(written)} objects are still there after they were deleted. Allow these "
            "credentials to delete; without "
            "that, old versions pile up for ever."
        )
    return "what is deleted is gone at once"


_CHECKS: tuple[tuple[str, Check], ...] = (
    ("access", _access),
    ("conditional create", _conditional),
    ("upload in parts", _parts),
    ("ranged reads", _ranges),
    ("listing after write", _listing),
    ("clock", _clock),
    ("delete", _delete),
)


def _content() -> bytes:
    """The same at every call, and different in every place."""
    return random.Random(1).randbytes(SIZE)


def _pass(offset: int, piece: memoryview, first: Callable[[memoryview], None] = ignore_bytes) -> None:
    first(piece)
