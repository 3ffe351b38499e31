"""Versions get to the remote tier complete, and come back when nothing else is left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.operator_key import sign_attempt
from tests.sidecar.stations import MakeStations
from tests.sidecar.world import JOB_UID, FakeLauncher, MakeWorld, until
from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase, Source, Tier
from tiercheck.protocol.version import Version
from tiercheck_sidecar.offload.remote_source import JobStore
from tiercheck_sidecar.offload.upload import RemoteListing, Uploader
from tiercheck_sidecar.remote import RemoteCorrupt, open_store
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
    world.lose(0)
    world.start(0)
    world.new_attempt(Version(10, 1))
    world.direct(Phase.HOLD, {0: (Source(Tier.REMOTE),)})
    until(lambda: world.report(0).restore.state.value == "Failed", "refused")
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
    tool.ownership.give_to(JOB_UID, "uid-of-prod")
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
