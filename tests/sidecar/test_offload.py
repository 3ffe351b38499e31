"""Versions get to the remote tier complete, and come back when nothing else is left.

What a bucket is asked does not grow with the job, and uploads take no more than they may.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from tests.operator_key import sign_attempt
from tests.sidecar.remote.remote_places import sealed
from tests.sidecar.stations import MakeStations, config_of
from tests.sidecar.world import JOB_UID, FakeLauncher, MakeWorld, until
from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase, Source, Tier
from tiercheck.protocol.report import Watermarks
from tiercheck.protocol.signing import SignedAttempt
from tiercheck.protocol.version import RankArtifact, Version
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.offload import JobStore, RemoteListing, Uploader
from tiercheck_sidecar.pacing import BURST_SECONDS, TokenBucket
from tiercheck_sidecar.remote import RemoteCorrupt, open_store
from tiercheck_sidecar.remote.directory import PIECE, DirectoryObjects
from tiercheck_sidecar.remote.errors import Reason, RemoteError
from tiercheck_sidecar.remote.store import RemoteStore
from tiercheck_sidecar.versions.coordinator import Coordinator


def test_every_tenth_step_is_uploaded_and_all_can_be_lost(make_world: MakeWorld) -> None:
    world = make_world(workers=2, procs=2)
    world.use_directory()
    world.launch()
    world.save_everywhere(4)
    assert world.report(0).watermarks.remote is None
    world.save_everywhere(12)
    world.reach("remote", Version(12, 1), 1)
    until(lambda: world.report(1).remote.versions == (Version(12, 1),), "listed")
    world.save_everywhere(15)
    world.lose(0, 1)
    world.start()
    until(lambda: world.report(0).remote.versions == (Version(12, 1),), "found again")
    remote = (Source(Tier.REMOTE),)
    world.begin(Version(12, 1), dict.fromkeys(range(4), remote))
    for worker in range(2):
        assert [each.tier for each in world.report(worker).restore.ranks] == [Tier.REMOTE] * 2
    world.reach("peer", Version(12, 1))
    world.save_everywhere(20)
    world.reach("remote", Version(20, 2))


def test_finished_job_leaves_its_last_version_in_the_remote_tier(make_world: MakeWorld) -> None:
    world = make_world(workers=2)
    world.use_directory(every=1000)
    world.launch()
    world.save_everywhere(7)
    assert world.report(0).remote.versions == ()
    world.direct(Phase.FINISH)
    world.ask_to_end(1)
    assert world.terminate(0) == 0
    assert world.end_of(1) == 0
    assert list((world.root / "store").rglob("000000000007-1.json")), "its manifest"


def test_broken_remote_tier_is_a_problem_and_not_a_stop(make_world: MakeWorld) -> None:
    world = make_world(workers=2)
    store = world.use_directory()
    store.rmdir()
    world.launch()
    until(lambda: world.report(0).problems, "a problem is reported")
    report = world.report(0)
    assert report.problems[0].reason.startswith("Remote")
    assert report.remote.reachable is False
    assert report.remote.message
    world.save_everywhere(10, 20, 30, 40)
    store.mkdir()
    until(
        lambda: world.report(0).watermarks.remote is not None, "it is made up for once the directory is there"
    )
    until(lambda: not world.report(0).problems, "the problem is withdrawn")


def test_misconfigured_remote_tier_says_so(make_world: MakeWorld) -> None:
    world = make_world()
    world.remote = '{"tape": {}}'
    world.start()
    until(lambda: [each.reason for each in world.report(0).problems] == ["RemoteMisconfigured"], "said")


def test_remote_copy_that_rotted_is_refused(make_world: MakeWorld) -> None:
    world = make_world()
    store = world.use_directory()
    world.launch()
    with world.ranks() as (rank,):
        rank.save(10)
        world.reach("remote", Version(10, 1))
    (stored,) = store.rglob("rank-0.safetensors")
    data = bytearray(stored.read_bytes())
    data[200_000] ^= 1
    stored.chmod(0o644)
    stored.write_bytes(data)
    world.renew(0)
    world.restore_in_vain(Version(10, 1), {0: (Source(Tier.REMOTE),)})
    assert world.report(0).restore.ranks[0].failures
    assert world.report(0).holdings == ()


def test_workers_that_nobody_can_reach_learn_from_the_store_that_the_job_went_on(
    make_world: MakeWorld,
) -> None:
    """All of them cut off from the controller, with each other and the store in reach: only the store can
    tell them."""
    world = make_world(workers=2)
    store = world.use_directory(every=10, keep=1)
    world.launch()
    world.save_everywhere(10)
    world.reach("remote", Version(10, 1))
    launcher = FakeLauncher(world.run_dir(1) / names.SOCKET_NAME)
    while launcher.order().phase is not Phase.RELEASE:
        pass
    elsewhere = open_store(world.remote, "default/gpt")
    elsewhere.begin_attempt(JOB_UID, *sign_attempt(JOB_UID, 2))
    world.save_everywhere(20, 30, 40)
    order = launcher.order()
    assert (order.attempt, order.phase) == (2, Phase.HOLD), "worker 0 read it, worker 1 heard its heartbeat"
    world.reach("local", Version(40, 1))
    assert elsewhere.versions() == [Version(10, 1)], (
        "attempt 2 began there: it is not pushed out by what nobody will read"
    )
    assert not list(store.rglob("*000000000020-1*")), "not even its bytes"
    launcher.close()
    elsewhere.close()


def test_attempts_of_a_job_of_the_same_name_before_ours_stop_nobody(make_world: MakeWorld) -> None:
    world = make_world()
    world.use_directory()
    earlier = open_store(world.remote, "default/gpt")
    earlier.begin_attempt("uid-of-a-deleted-job", 99)
    world.launch()
    with world.ranks() as (rank,):
        rank.save(10)
        world.reach("remote", Version(10, 1))
    assert earlier.newest_attempts("uid-of-a-deleted-job") == [], "forgotten when the new job began"
    assert [each.attempt for each in earlier.newest_attempts(JOB_UID)] == [1]
    earlier.close()


def test_job_of_the_same_name_in_another_cluster_is_told_whose_the_store_is_and_trains_on(
    make_world: MakeWorld,
) -> None:
    dev, prod = make_world(workers=2), make_world()
    store = dev.use_directory()
    dev.cluster, prod.cluster = "uid-of-dev", "uid-of-prod"
    dev.launch()
    dev.save_everywhere(10)
    dev.reach("remote", Version(10, 1))
    until(lambda: dev.report(1).remote.versions == (Version(10, 1),), "worker 1 hears of it from worker 0")
    before = sorted(path for path in store.rglob("*") if path.is_file())

    prod.remote, prod.policy = dev.remote, dev.policy
    prod.start()
    until(
        lambda: [each.reason for each in prod.report(0).problems] == ["RemoteOwned"],
        "said before training begins",
    )
    assert "uid-of-dev" in prod.report(0).problems[0].message
    assert (prod.report(0).remote.reachable, prod.report(0).remote.versions) == (False, ())
    prod.begin()
    with prod.ranks() as (rank,):
        rank.save(10)
        rank.save(20)
        prod.reach("local", Version(20, 1))
    assert sorted(path for path in store.rglob("*") if path.is_file()) == before

    tool = open_store(dev.remote or "", "default/gpt")
    tool.ownership.assign_owner(JOB_UID, "uid-of-prod")
    prod.reach("remote", Version(20, 1))
    until(lambda: not prod.report(0).problems, "the problem is withdrawn")
    dev.save_everywhere(20)
    until(lambda: "RemoteOwned" in {each.reason for each in dev.report(0).problems}, "the other one is told")
    assert dev.report(0).watermarks.peer == Version(20, 1), "and goes on training"
    tool.close()


def test_snapshot_that_rots_before_its_upload_is_given_up_so_that_another_can_be_uploaded(
    stations: MakeStations, tmp_path: Path
) -> None:
    """While it counts as held, the coordinator waits for it, and no later version gets to the remote tier."""
    (station,) = stations(workers=1).stations
    seal = station.save(Version(10, 1), 1 << 20)
    station.flip(seal, Tier.LOCAL, 0)
    store = open_store(json.dumps({"directory": {"path": str(tmp_path)}}), "default/gpt")
    state, coordinator = station.state, Coordinator(station.state)
    inventory = RemoteListing(state, coordinator.stored)
    uploader = Uploader(state, station.vault, JobStore(state.config), inventory, coordinator.manifest)
    assert station.state.directive is not None
    with pytest.raises(RemoteCorrupt):
        uploader._upload(store, station.state.directive, Version(10, 1))
    store.close()
    assert station.vault.held() == ()
    assert [(each.rank, each.version, each.worker) for each in station.state.quarantined] == [
        (0, Version(10, 1), 0)
    ]


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
    inventory.list_when_due(store, None, announced=True)  # type: ignore[arg-type]
    assert (state.remote.reachable, state.remote.versions, store.listed) == (True, (FIRST,), 1)
    for _ in range(3):
        inventory.list_when_due(store, verdict(FIRST, SECOND), announced=True)  # type: ignore[arg-type]
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
    inventory.list_when_due(store, None, announced=True)  # type: ignore[arg-type]
    assert (store.listed, told) == (1, [])
    state.config = replace(state.config, worker=0)
    monkeypatch.setattr(inventory, "_ranks_of", lambda *_: ())
    monkeypatch.setattr(inventory, "_examine", lambda _: None)
    for _ in range(2):
        inventory.list_when_due(store, None, announced=True)  # type: ignore[arg-type]
    assert (store.listed, told) == (2, [(FIRST, SECOND)])


def test_nothing_is_told_of_a_listing_that_the_attempt_before_may_still_change(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next worker 0 starts, and lists, while the last one still commits and deletes: an attempt is
    announced in the store first, which ends that, and then listed."""
    state, done = stations()[0].state, list[str]()
    store = Store()
    store.begin_attempt = lambda *_: done.append("announced")  # type: ignore[attr-defined]
    inventory = RemoteListing(state, lambda versions: done.append(f"told of {len(versions)}"))
    monkeypatch.setattr(inventory, "_ranks_of", lambda *_: ())
    monkeypatch.setattr(inventory, "_examine", lambda _: None)
    uploader = Uploader(state, stations()[0].vault, JobStore(state.config), inventory, lambda: None)
    directive, state.directive = state.directive, None
    uploader._step(store)  # type: ignore[arg-type]
    assert (store.listed, done) == (1, [])
    state.directive = directive
    uploader._step(store)  # type: ignore[arg-type]
    assert (store.listed, done) == (2, ["announced", "told of 2"])


def test_worker_that_had_trouble_looks_for_itself_again(state: SidecarState) -> None:
    store, inventory = Store(), RemoteListing(state, ignore)
    store.failure = RemoteError(Reason.FORBIDDEN, "refused", retriable=False)
    with pytest.raises(RemoteError):
        inventory.list_when_due(store, verdict(FIRST), announced=True)  # type: ignore[arg-type]
    assert state.remote.reachable is None, "that others reach it says nothing of this node"
    store.failure = None
    inventory.list_when_due(store, verdict(FIRST), announced=True)  # type: ignore[arg-type]
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
