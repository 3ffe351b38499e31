"""Whatever the bucket does, training goes on; after the loss of all ranks it is read once.

Neither a clock nor a power cut costs the version that a restore would choose.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.crash_disk import CrashDisk
from tests.examples import examples
from tests.sidecar.remote.remote_places import S3Place, sealed
from tests.sidecar.remote.s3.faulty_proxy import BUSY, CUT, FORBIDDEN, FULL, Fault, Proxy, Seen
from tests.sidecar.world import MakeWorld, until
from tiercheck.protocol.directive import Phase, Source, Tier
from tiercheck.protocol.version import Branch, History, Manifest, Version
from tiercheck_sidecar.remote import open_store
from tiercheck_sidecar.remote.keys import is_abandoned, to_delete


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (FULL, "RemoteFull"),
        (FORBIDDEN, "RemoteForbidden"),
        (BUSY, "RemoteUnreachable"),
        (CUT, "RemoteUnreachable"),
        (None, ""),
    ],
    ids=["full", "forbidden", "overloaded", "cut off", "stalled"],
)
def test_training_and_its_copies_go_on_while_the_bucket_is_in_trouble(
    proxy: Proxy, s3_client: Any, make_world: MakeWorld, fault: Fault | None, problem: str
) -> None:
    recovered = threading.Event()

    def rule(seen: Seen) -> Fault | None:
        if seen.method != "PUT" or recovered.is_set() or not seen.key.endswith(".safetensors"):
            return None
        return fault or Fault(until=recovered)

    proxy.rule = rule
    world = make_world(workers=2)
    world.patience["tiercheck_sidecar.remote.s3.s3_transfers:BACKOFF"] = (0.05, 0.5)
    world.remote = S3Place(proxy.url, s3_client).settings()
    world.policy = replace(world.policy, remote_every=1)
    world.launch()
    try:
        with world.ranks() as ranks:
            for step in (1, 2, 3):
                for rank in ranks:
                    until(lambda rank=rank, step=step: rank.save(step), f"a slot for step {step}")
                world.reach("peer", Version(step, 1))
            if problem:
                until(lambda: problem in {each.reason for each in world.report(0).problems}, "it is said")
                assert f'tiercheck_problem{{reason="{problem}"}} 1.0' in world.metrics()
                assert "tiercheck_remote_reachable 0.0" in world.metrics()
            assert world.report(0).watermarks.remote is None
            recovered.set()
            until(lambda: world.report(0).watermarks.remote is not None, "it is made up for")
            until(lambda: not world.report(0).problems, "the problem is withdrawn")
            until(
                lambda: "tiercheck_remote_versions 0.0" not in world.metrics(),
                "its versions are counted",
            )
    finally:
        recovered.set()


@pytest.mark.parametrize("copies", [1, 2])
def test_restore_of_all_ranks_reads_each_artifact_once_however_many_copies_are_kept(
    proxy: Proxy, s3_client: Any, make_world: MakeWorld, copies: int
) -> None:
    holders = tuple(range(1, copies + 1))
    world = make_world(workers=3)
    world.remote = S3Place(proxy.url, s3_client).settings()
    world.policy = replace(world.policy, remote_every=1)
    world.start()
    world.new_attempt()
    world.direct(Phase.HOLD, holders=holders)
    world.direct(Phase.RELEASE, holders=holders)
    with world.ranks() as ranks:
        for rank in ranks:
            assert rank.save(10)
        world.reach("remote", Version(10, 1))
    assert proxy.reads() == []
    world.lose(0, 1, 2)
    world.start()
    world.new_attempt(Version(10, 1))
    sources = dict.fromkeys(range(3), (Source(Tier.REMOTE),))
    world.direct(Phase.HOLD, sources, holders=holders)
    for worker in range(3):
        until(lambda worker=worker: world.report(worker).restore.state.value == "Ready", "restored")
        assert [each.tier for each in world.report(worker).restore.ranks] == [Tier.REMOTE]
    world.direct(Phase.RELEASE, sources, holders=holders)
    world.reach("peer", Version(10, 1))
    for worker in range(3):
        for distance in holders:
            assert world.holds((worker + distance) % 3, worker, Version(10, 1), Tier.PEER)
    assert set(Counter(proxy.reads()).values()) == {1}
    assert len(proxy.reads()) == 3


versions = st.builds(Version, st.integers(1, 20), st.integers(1, 4))
committed = st.dictionaries(versions, st.floats(0, 100))
histories = st.dictionaries(st.integers(1, 4), st.integers(0, 20), max_size=4).map(
    lambda bases: History(tuple(Branch(attempt, bases[attempt]) for attempt in sorted(bases)))
)


@settings(max_examples=examples(200))
@given(committed, st.integers(-1, 5), st.sets(versions), st.none() | histories)
def test_newest_of_the_history_and_protected_are_never_deleted(
    when: dict[Version, float], keep: int, protect: set[Version], history: History | None
) -> None:
    doomed = set(to_delete(when, keep, protect, None, history))
    left = set(when) - doomed
    assert doomed <= set(when)
    assert not doomed & protect
    accepted = sorted(version for version in when if history is None or history.accepts(version))
    if history is not None:
        assert set(accepted[-max(keep, 1) :]) <= left, "the newest that a restore may choose from"
        dead = left - protect - set(accepted)
        assert not dead or set(accepted) <= left, "what is dead never outlives what counts"
    if when:
        assert len(left) >= min(len(when), max(keep, 1))
        assert len(left - protect) <= max(keep, 1)


@settings(max_examples=examples(200))
@given(committed, st.permutations(range(100)), st.integers(1, 5), st.none() | histories)
def test_no_clock_decides_what_is_kept(
    when: dict[Version, float], other: list[int], keep: int, history: History | None
) -> None:
    shuffled = {version: float(other[index % len(other)]) for index, version in enumerate(when)}
    assert to_delete(when, keep, set(), None, history) == to_delete(shuffled, keep, set(), None, history)


def test_after_a_rollback_to_a_new_coordinator_with_a_slow_clock_its_versions_stay() -> None:
    when = {Version(100, 1): 1000.0, Version(200, 1): 2000.0, Version(150, 2): 500.0, Version(160, 2): 600.0}
    history = History((Branch(1, 0), Branch(2, 100)))
    assert set(to_delete(when, 2, {Version(160, 2)}, None, history)) == {Version(100, 1), Version(200, 1)}
    assert to_delete(when, 3, set(), None, history) == (Version(200, 1),), "100 is what attempt 2 began from"


def test_dead_versions_are_kept_only_in_place_of_those_that_are_not_there_yet() -> None:
    when = {Version(step, 1): float(step) for step in (100, 200, 300)} | {Version(150, 2): 400.0}
    history = History((Branch(1, 0), Branch(2, 100)))
    assert to_delete(when, 3, set(), None, history) == (Version(200, 1),)


@settings(max_examples=examples(200))
@given(committed, st.integers(1, 5), st.floats(0, 100), st.none() | histories)
def test_young_versions_are_kept_however_many_they_are(
    when: dict[Version, float], keep: int, keep_seconds: float, history: History | None
) -> None:
    by_count = set(to_delete(when, keep, set(), None, history))
    doomed = set(to_delete(when, keep, set(), keep_seconds, history))
    assert doomed <= by_count, "age only ever keeps more"
    for version in by_count:
        young = max(when.values()) - when[version] <= keep_seconds
        assert (version in doomed) is not young


@settings(max_examples=examples(200))
@given(st.sets(versions), st.sets(versions), histories, versions)
def test_what_may_still_be_completed_is_never_taken_for_abandoned(
    kept: set[Version], protect: set[Version], history: History, version: Version
) -> None:
    abandoned = is_abandoned(version, kept, protect, history)
    newest = max((each for each in kept if history.accepts(each)), default=None)
    if version in protect or version.attempt > max([history.attempt, *(each.attempt for each in kept)]):
        assert not abandoned
    if history.accepts(version) and (newest is None or version > newest):
        assert not abandoned, "the next one that the job may complete"
    if newest is not None and history.accepts(version) and version < newest and version not in protect:
        assert abandoned


def test_uploads_of_a_dead_line_are_abandoned_once_the_new_one_has_a_version() -> None:
    history = History((Branch(1, 0), Branch(2, 300)))
    assert is_abandoned(Version(900, 1), {Version(400, 2)}, set(), history)
    assert not is_abandoned(Version(900, 1), {Version(300, 1)}, {Version(900, 1)}, history)
    assert not is_abandoned(Version(100, 3), {Version(400, 2)}, set(), history), (
        "a newer attempt, of which we have not heard"
    )
    assert not is_abandoned(Version(500, 2), {Version(400, 2)}, set(), history)
    assert not is_abandoned(Version(500, 2), set(), set(), history)


# Power cuts


def test_no_manifest_outlives_its_artifacts_and_none_comes_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    disk = CrashDisk(root, monkeypatch)
    store = open_store(json.dumps({"directory": {"path": str(root), "subPath": "a/b"}}), "research/gpt")
    folder = root / "a/b/research/gpt"
    named: dict[Path, list[Path]] = {}
    judged: set[Path] = set()

    def look() -> None:
        for manifest, artifacts in named.items():
            if disk.perhaps(manifest):
                judged.add(manifest)
                for artifact in artifacts:
                    assert disk.surely(artifact), f"{manifest.name} may be there without {artifact}"

    disk.look = look
    for step in (10, 20, 30):
        version = Version(step, 1)
        stored = [store.put_artifact(rank, version, *sealed(tmp_path), None) for rank in (0, 1)]
        manifest = folder / f"manifests/{step:012d}-1.json"
        artifacts = [folder / each.key for each in stored]
        named[manifest] = [*artifacts, *(path.with_suffix(".json") for path in artifacts)]
        assert store.commit(Manifest("research/gpt", "uid", version, 2, tuple(stored), 1.0))
        assert disk.surely(manifest), "what is said to exist does so after a crash"
        store.retain(1)
    assert judged == set(named)
    assert store.versions() == [Version(30, 1)]
