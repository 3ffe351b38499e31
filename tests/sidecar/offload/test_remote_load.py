"""What a bucket is asked does not grow with the job, and uploads take no more than they may."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from tests.sidecar.remote.remote_places import sealed
from tests.sidecar.stations import MakeStations
from tests.sidecar.values import config_of
from tiercheck.protocol.report import Watermarks
from tiercheck.protocol.signing import SignedAttempt
from tiercheck.protocol.version import RankArtifact, Version
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.offload.remote_inventory import RemoteListing
from tiercheck_sidecar.offload.remote_source import JobStore
from tiercheck_sidecar.offload.upload import Uploader
from tiercheck_sidecar.pacing import BURST_SECONDS, TokenBucket
from tiercheck_sidecar.remote.directory import PIECE, DirectoryObjects
from tiercheck_sidecar.remote.errors import Reason, RemoteError
from tiercheck_sidecar.remote.store import RemoteStore

# Listing


FIRST, SECOND = Version(10, 1), Version(20, 1)


class Store:
    """Counts how often it is listed."""

    shortcomings: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        self.listed = 0
        self.failure: RemoteError | None = None

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def versions(self) -> list[Version]:
        self.listed += 1
        return [FIRST] if self.listed == 1 else [FIRST, SECOND]

    def newest_attempts(self, job_uid: str, above: int) -> list[SignedAttempt]:
        return []

    def read_manifest(self, version: Version) -> object:
        raise AssertionError("only worker 0 asks how many ranks made a version")


def ignore(stored: tuple[Version, ...]) -> None:
    """Nobody is told."""


@pytest.fixture
def state(tmp_path: Path) -> SidecarState:
    return SidecarState(config_of(tmp_path, worker=1, remote='{"directory": {"path": "/x"}}'))


def verdict(*stored: Version) -> TierVerdict:
    return TierVerdict(1, Watermarks(remote=max(stored)), stored=stored)


def test_worker_lists_when_it_starts_and_then_hears_from_the_coordinator(state: SidecarState) -> None:
    store, inventory = Store(), RemoteListing(state, ignore)
    inventory.list_when_due(store, None)  # type: ignore[arg-type]
    assert (state.remote.reachable, state.remote.versions, store.listed) == (True, (FIRST,), 1)
    for _ in range(3):
        inventory.list_when_due(store, verdict(FIRST, SECOND))  # type: ignore[arg-type]
    assert (state.remote.versions, store.listed) == ((FIRST, SECOND), 1)


def test_worker_asks_once_per_version_whether_its_attempt_is_over_however_many_ranks_it_has(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = stations(procs=4)
    for rank in range(4):
        job[0].save(FIRST, 10_000, rank=rank)
    state, store, asked, put = job[0].state, Store(), list[str](), list[int]()
    monkeypatch.setattr(store, "newest_attempts", lambda uid, above: asked.append(uid) or [])
    store.put_artifact = lambda rank, version, *_, **more: put.append(rank) or RankArtifact(rank, version, "")  # type: ignore[attr-defined]
    uploader = Uploader(
        state, job[0].vault, JobStore(state.config), RemoteListing(state, ignore), lambda: None
    )
    for _ in range(2):
        uploader._upload(store, state.directive, FIRST)  # type: ignore[arg-type]
    assert (put, len(asked)) == ([0, 1, 2, 3], 1)


def test_whoever_becomes_worker_0_lists_at_once_and_tells_nothing_that_it_found_before(
    state: SidecarState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a spare found when it was started may have been deleted long ago."""
    store, told = Store(), list[tuple[Version, ...]]()
    inventory = RemoteListing(state, told.append)
    inventory.list_when_due(store, None)  # type: ignore[arg-type]
    assert (store.listed, told) == (1, [])
    state.config = replace(state.config, worker=0)
    monkeypatch.setattr(inventory, "_ranks_of", lambda *_: ())
    monkeypatch.setattr(inventory, "_examine", lambda _: None)
    for _ in range(2):
        inventory.list_when_due(store, None)  # type: ignore[arg-type]
    assert (store.listed, told) == (2, [(FIRST, SECOND)])


def test_worker_that_had_trouble_looks_for_itself_again(state: SidecarState) -> None:
    store, inventory = Store(), RemoteListing(state, ignore)
    store.failure = RemoteError(Reason.FORBIDDEN, "refused", retriable=False)
    with pytest.raises(RemoteError):
        inventory.list_when_due(store, verdict(FIRST))  # type: ignore[arg-type]
    assert state.remote.reachable is None, "that others reach it says nothing of this node"
    store.failure = None
    inventory.list_when_due(store, verdict(FIRST))  # type: ignore[arg-type]
    assert (state.remote.reachable, store.listed) == (True, 1)


# Pacing


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
    for rank in range(4):
        store.put_artifact(rank, Version(1, 1), *sealed(tmp_path, bytes(3 * PIECE), PIECE), bandwidth=PIECE)
    assert clock.now - 1000.0 == pytest.approx(11.0, abs=1e-6)
