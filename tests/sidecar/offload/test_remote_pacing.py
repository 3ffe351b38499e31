"""Uploads take no more of the network than allowed, to the byte, by the test's clock."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from tiercheck.protocol.manifest import Digests
from tiercheck.protocol.version import Version
from tiercheck_sidecar.pacing import BURST_SECONDS, TokenBucket
from tiercheck_sidecar.remote.directory import PIECE, DirectoryObjects
from tiercheck_sidecar.remote.store import RemoteStore


class Clock:
    """Time passes only when somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_average_rate_is_the_limit(clock: Clock) -> None:
    bucket = TokenBucket(1000, clock=clock, wait=clock.wait)
    for _ in range(101):
        bucket.take(100)
    # The last 100 bytes are granted once the 10,000 before are paid for.
    assert clock.now - 1000.0 == pytest.approx(10.0, abs=1e-6)


def test_unused_time_is_not_saved_up(clock: Clock) -> None:
    bucket = TokenBucket(1000, clock=clock, wait=clock.wait)
    clock.now += 3600
    begin = clock.now
    for _ in range(11):
        bucket.take(1000)
    assert clock.now - begin == pytest.approx(10.0 - BURST_SECONDS, abs=1e-6)


def test_piece_larger_than_a_second_is_granted_at_once_and_paid_after(clock: Clock) -> None:
    bucket = TokenBucket(10, clock=clock, wait=clock.wait)
    bucket.take(1000)
    assert clock.now == 1000.0
    bucket.take(1)
    assert clock.now == pytest.approx(1100.0)


def test_without_a_limit_nobody_waits(clock: Clock) -> None:
    bucket = TokenBucket(None, clock=clock, wait=clock.wait)
    for _ in range(1000):
        bucket.take(10**12)
    assert clock.now == 1000.0


def test_limit_may_change_while_uploads_run(clock: Clock) -> None:
    bucket = TokenBucket(None, clock=clock, wait=clock.wait)
    bucket.take(10**12)
    bucket.set_rate(1000)
    for _ in range(11):
        bucket.take(1000)
    assert clock.now - 1000.0 == pytest.approx(10.0, abs=1e-6)
    bucket.set_rate(None)
    now = clock.now
    bucket.take(10**12)
    assert clock.now - now <= 1.0  # what was granted before is still paid


@pytest.mark.parametrize("rate", [0, -1])
def test_limit_that_would_stop_everything_is_refused(rate: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        TokenBucket(rate)


def test_uploads_of_one_worker_share_the_limit(clock: Clock, tmp_path: Path) -> None:
    store = RemoteStore(DirectoryObjects(str(tmp_path), "job"), "research/gpt")
    store._bucket = TokenBucket(None, clock=clock, wait=clock.wait)
    content = bytes(3 * PIECE)
    slot = tmp_path / "slot"
    slot.write_bytes(content)
    digests = Digests(len(content), PIECE, (xxhash.xxh3_128_hexdigest(bytes(PIECE)),) * 3)
    for rank in range(4):
        store.put_artifact(rank, Version(1, 1), slot, digests, bandwidth=PIECE)
    assert clock.now - 1000.0 == pytest.approx(11.0, abs=1e-6)
