"""Plays a bucket in memory under the real `RemoteStore`: slow, failing, forgetful.

What it does is recorded, so that the checker can say what existed when. One `Bucket` is the place; each
process has a `Folder` of it, through which its calls may fail or take their time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tiercheck_sidecar.remote.errors import Reason, RemoteError, ignore
from tiercheck_sidecar.remote.objects import Arrived, Gate, Objects, Stored

Record = Callable[..., None]


@dataclass
class Bucket:
    """What is stored, and how well the place feels."""

    record: Record
    clock: Callable[[], float]
    rng: random.Random
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    down: bool = False
    """Every call is answered with 503."""
    trouble: float = 0.0
    """The share of calls that fail; half of those that write have been carried out."""
    slow: float = 0.0
    """Seconds that a call takes at most."""
    behind: float = 0.0
    """Seconds by which lists may lag."""
    _gone: dict[str, tuple[bytes, float, float]] = field(default_factory=dict)

    def put(self, key: str, body: bytes) -> None:
        self.objects[key] = (body, self.clock())
        self.record("put", key=key, bytes=len(body), body=body if key.endswith(".json") else None)

    def remove(self, key: str) -> None:
        found = self.objects.pop(key, None)
        if found is not None:
            self._gone[key] = (*found, self.clock())
            self.record("removed", key=key)

    def list(self, prefix: str) -> list[Stored]:
        """New objects may be missing, and old ones still be there, if lists lag."""
        now = self.clock()
        late = now - (self.rng.uniform(0, self.behind) if self.behind else 0.0)
        there = [Stored(key, len(body), when) for key, (body, when) in self.objects.items() if when <= late]
        there += [
            Stored(key, len(body), when)
            for key, (body, when, gone) in self._gone.items()
            if gone > late >= when
        ]
        return [each for each in there if each.key.startswith(prefix)]


class Folder(Objects):
    """One process's way to the bucket. `wait` lets simulated time pass, and raises if the process is killed
    meanwhile."""

    def __init__(self, bucket: Bucket, wait: Callable[[float], None], cut: Callable[[], bool]) -> None:
        self._bucket, self._wait, self._cut = bucket, wait, cut
        self.location = "s3://simulated"

    def _call(self, change: Callable[[], object] | None = None) -> None:
        bucket = self._bucket
        if bucket.slow:
            self._wait(bucket.rng.uniform(0, bucket.slow))
        if bucket.down or self._cut():
            raise RemoteError(Reason.UNREACHABLE, "the bucket does not answer", retriable=True)
        if bucket.trouble and bucket.rng.random() < bucket.trouble:
            if change is not None and bucket.rng.random() < 0.5:
                change()
            raise RemoteError(Reason.UNREACHABLE, "503: slow down", retriable=True)

    def check(self) -> None:
        self._call()

    def upload(self, key: str, source: memoryview, chunk: int, gate: Gate) -> None:
        gate(0, source)
        body = bytes(source)
        self.write(key, body)

    def write(self, key: str, body: bytes) -> None:
        self._call(lambda: self._bucket.put(key, body))
        self._bucket.put(key, body)

    def create(self, key: str, body: bytes) -> bool:
        def attempt() -> bool:
            if key in self._bucket.objects:
                return False
            self._bucket.put(key, body)
            return True

        self._call(attempt)
        return attempt()

    def read(self, key: str) -> bytes | None:
        self._call()
        found = self._bucket.objects.get(key)
        return None if found is None else found[0]

    def read_into(self, key: str, offset: int, into: memoryview, arrived: Arrived = ignore) -> int:
        self._call()
        found = self._bucket.objects.get(key)
        if found is None:
            return 0
        part = found[0][offset : offset + len(into)]
        into[: len(part)] = part
        return len(part)

    def list(self, prefix: str) -> list[Stored]:
        self._call()
        return self._bucket.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        for key in list(keys):
            self._call(lambda key=key: self._bucket.remove(key))  # type: ignore[misc]
            self._bucket.remove(key)

    def forget_unfinished(self, dead: Callable[[str, float], bool]) -> None:
        self._call()
