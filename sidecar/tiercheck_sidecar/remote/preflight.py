"""Tests everything that the remote tier relies on, with small objects, before a job depends on it.

Each guarantee is tested by the failure it prevents: a second writer that is not refused, a range that begins
elsewhere, an object that is listed late, or cannot be deleted. The objects are deleted again.
"""

from __future__ import annotations

import contextlib
import random
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tiercheck_sidecar.remote import keys
from tiercheck_sidecar.remote.errors import RemoteError, ignore
from tiercheck_sidecar.remote.objects import Objects

CHUNK = 1024 * 1024
SIZE = 17 * CHUNK
"""Bytes. More than one part of a bucket's multipart upload."""
MOST_SKEW = 60.0
"""Seconds. S3 refuses requests from 15 minutes on."""


@dataclass(frozen=True)
class StoreFinding:
    """The result of one check of a durable store."""

    name: str
    ok: bool
    message: str
    """The observation; if `ok` is false, also the advice."""
    passing: bool = False
    """True if the check failed for a reason that may pass in a moment."""
    tried: bool = True
    """False if the check was skipped because what it needs was missing; `ok` is then true."""


@dataclass
class _CheckContext:
    """A store, a folder of its own there, and what the checks have written so far."""

    objects: Objects
    folder: str
    written: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    """Bytes, and the time by this machine before and after the write, by key."""

    def need(self, *names: str) -> list[str]:
        """Returns the keys of those of `names` that were written. Raises CheckSkipped if none was."""
        found = [self.folder + name for name in names if self.folder + name in self.written]
        if not found:
            raise CheckSkipped("not tried: an earlier check wrote nothing that it could look at")
        return found

    @contextlib.contextmanager
    def writing(self, key: str, size: int) -> Iterator[None]:
        """Records the size and the times of what the block writes under `key`."""
        before = time.time()
        yield
        self.written[key] = size, before, time.time()


Check = Callable[[_CheckContext], str]
"""A check that returns its observation. Raises Broken, CheckSkipped, RemoteError."""


class CheckSkipped(Exception):
    """A check cannot be made, for a reason that another finding reports."""


class GuaranteeMissing(Exception):
    """A guarantee is missing; the message holds the observation and the advice."""


def examine(objects: Objects) -> Iterator[StoreFinding]:
    """Yields one finding after the other; only the first if the store cannot be used at all."""
    trial = _CheckContext(objects, f"{keys.CHECK}{uuid.uuid4().hex}/")
    try:
        for name, check in _CHECKS:
            finding = _tried(name, check, trial)
            yield finding
            if check is _access and not finding.ok:
                return
    finally:
        with contextlib.suppress(RemoteError):
            objects.delete([stored.key for stored in objects.list(trial.folder)])


def _tried(name: str, check: Check, trial: _CheckContext) -> StoreFinding:
    try:
        return StoreFinding(name, True, check(trial))
    except CheckSkipped as reason:
        return StoreFinding(name, True, str(reason), tried=False)
    except GuaranteeMissing as broken:
        return StoreFinding(name, False, str(broken))
    except RemoteError as error:
        return StoreFinding(name, False, str(error), passing=error.retriable)


def _access(trial: _CheckContext) -> str:
    trial.objects.check()
    return f"{trial.objects.location} can be listed and written"


def _conditional(trial: _CheckContext) -> str:
    objects, key = trial.objects, f"{trial.folder}once"
    with trial.writing(key, 5):
        first = objects.create(key, b"first")
    if objects.weakness:
        raise GuaranteeMissing(objects.weakness)
    second = objects.create(key, b"second")
    found: bytes | None = b"first"
    with contextlib.suppress(RemoteError):  # whether what is there can be read is another check
        found = objects.read(key)
    if not first or second or found != b"first":
        raise GuaranteeMissing(
            f"of two writers of one new object the first {'won' if first else 'lost'} and the second "
            f"{'won' if second else 'lost'}, and {'the first' if found == b'first' else 'not the first'} is "
            "read. Use a server that honours If-None-Match, or a file system with hard links."
        )
    return "the second of two writers of a new object is refused"


def _parts(trial: _CheckContext) -> str:
    with trial.writing(f"{trial.folder}large", SIZE):
        trial.objects.upload(f"{trial.folder}large", memoryview(_content()), CHUNK, _pass)
    return f"{SIZE // CHUNK} MiB were uploaded in parts"


def _ranges(trial: _CheckContext) -> str:
    (key,) = trial.need("large")
    content = _content()
    # The second spans both parts, the third goes beyond the end.
    for begin, length in ((0, CHUNK), (SIZE - CHUNK - 5, 10), (SIZE - 3, 8)):
        into = bytearray(length)
        got = trial.objects.read_into(key, begin, memoryview(into))
        wanted = content[begin : begin + length]
        if into[:got] != wanted:
            raise GuaranteeMissing(
                f"bytes {begin} to {begin + len(wanted)} were asked for, and the {got} that came are not "
                "what was written. Look for a proxy or cache in between that does not know ranges."
            )
    return "ranges come as they were written"


def _listing(trial: _CheckContext) -> str:
    written = trial.need("once", "large")
    listed = {stored.key: stored.size for stored in trial.objects.list(trial.folder)}
    late = [key for key in written if listed.get(key) != trial.written[key][0]]
    if late:
        raise GuaranteeMissing(
            f"of {len(written)} objects that were written {len(late)} are not listed right after that, or "
            "with another size. Use a store that lists what is written at once; a manifest that is listed "
            "late is a version that a restore does not find."
        )
    return "what was written is listed at once, in full size"


def _clock(trial: _CheckContext) -> str:
    key = trial.need("once", "large")[0]
    _, before, after = trial.written[key]
    stored = next(iter(trial.objects.list(key)), None)
    if stored is None:
        raise CheckSkipped("not tried: what was written is not listed")
    skew = min(max(stored.modified, before - 1.0), after) - stored.modified  # stores report whole seconds
    seen = f"the store's clock is {abs(skew):.0f} s {'behind' if skew > 0 else 'ahead of'} this machine's"
    if abs(skew) > MOST_SKEW:
        raise GuaranteeMissing(
            f"{seen}. Synchronise both (NTP): S3 refuses requests from 15 minutes on, and keepFor goes by it."
        )
    return "the store's clock and this machine's agree" if abs(skew) < 2 else seen


def _delete(trial: _CheckContext) -> str:
    objects, written = trial.objects, trial.need("once", "large")
    objects.delete(written)
    try:
        left = [key for key in written if objects.read(key) is not None]
    except RemoteError as error:
        raise CheckSkipped(
            "deleting is allowed; not tried whether it is done, as nothing can be read"
        ) from error
    if left:
        raise GuaranteeMissing(
            f"{len(left)} of {len(written)} objects are still there after they were deleted. Use a store "
            "that deletes; without that, old versions pile up for ever."
        )
    try:
        remains = objects.remains_of_deleted()
    except RemoteError as error:
        return (
            "what is deleted is gone at once; see that a lifecycle rule with NoncurrentVersionExpiration "
            f"ends its old versions, which the bucket keeps (the rules cannot be read: {error})"
        )
    if remains:
        raise GuaranteeMissing(remains)
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
    """Returns the same bytes at every call, different at every offset."""
    return random.Random(1).randbytes(SIZE)


def _pass(offset: int, piece: memoryview, first: Callable[[memoryview], None] = ignore) -> None:
    first(piece)
