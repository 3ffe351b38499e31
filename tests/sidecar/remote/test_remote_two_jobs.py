"""Of two jobs of one name, one writes to the folder, and the other is told whose it is."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.sidecar.remote.remote_places import DirectoryPlace, Place, S3Place, sealed
from tests.sidecar.remote.s3.faulty_proxy import DEAF, proxying
from tiercheck.protocol.version import Branch, History, Manifest, RankArtifact, Version
from tiercheck_sidecar.remote import (
    Claimant,
    Reason,
    RemoteCorrupt,
    RemoteError,
    RemoteMissing,
    RemoteOwned,
    RemoteStore,
    open_store,
)
from tiercheck_sidecar.remote.directory import DirectoryObjects
from tiercheck_sidecar.remote.objects import Stored
from tiercheck_sidecar.remote.s3 import s3

JOB = "ml/llama"
DEV, PROD = Claimant("cluster-dev", "uid-dev"), Claimant("cluster-prod", "uid-prod")
AGAIN = Claimant("cluster-dev", "uid-dev-again")
"""The job of the development cluster, deleted and created again."""
STRANGER = Claimant("", "uid-of-an-unknown-cluster")


everywhere = pytest.mark.parametrize("place", ["directory", "s3", "s3 without conditions"], indirect=True)
"""For what depends on how a place refuses a second writer; the rest is above that."""


@pytest.fixture(params=["directory"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(s3, "SETTLE_SECONDS", 0.05)
    if request.param == "directory":
        yield DirectoryPlace(tmp_path / "shared")
        return
    with ExitStack() as stack:
        endpoint = request.getfixturevalue("s3_endpoint")
        if request.param != "s3":
            proxy = stack.enter_context(proxying(endpoint))
            proxy.rule = lambda seen: DEAF
            endpoint = proxy.url
        yield S3Place(endpoint, request.getfixturevalue("s3_client"))


class Opener:
    """Stores of several jobs, closed in the end; `put` uploads as their only rank."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.place, self._folder, self._opened = place, folder, list[RemoteStore]()

    def __call__(self, claimant: Claimant | None, **settings: str) -> RemoteStore:
        described = {**json.loads(self.place.settings()), **settings}
        self._opened.append(open_store(json.dumps(described), JOB, claimant))
        return self._opened[-1]

    def put(self, store: RemoteStore, version: Version, content: bytes) -> RankArtifact:
        return store.put_artifact(0, version, *sealed(self._folder, content), None)

    def save(self, store: RemoteStore, version: Version, content: bytes, uid: str = "uid") -> bool:
        return store.commit(Manifest(JOB, uid, version, 1, (self.put(store, version, content),), 1.0))

    def content(self) -> dict[str, bytes]:
        """Everything that is there, but for the object that is written to learn whether one may."""
        return {name: self.place.get(name) for name in self.place.names() if not name.endswith("/probe")}

    def close(self) -> None:
        for store in self._opened:
            store.close()


@pytest.fixture
def jobs(place: Place, tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(place, tmp_path)
    yield opener
    opener.close()


def restored(store: RemoteStore, version: Version) -> bytes:
    artifact = store.artifact(0, version)
    into = bytearray(artifact.bytes)
    store.fetch(artifact, memoryview(into))
    return bytes(into)


def refused(jobs: Opener, store: RemoteStore, owner: Claimant) -> None:
    """Whatever it tries, it is told whose the folder is and what to do, and nothing there changes."""
    before = jobs.content()
    someones = RankArtifact(0, Version(10, 1), "artifacts/x", None, 1, "d")
    for attempt in (
        store.check,
        store.versions,
        lambda: jobs.put(store, Version(20, 1), b"other"),
        lambda: store.commit(Manifest(JOB, "uid", Version(10, 1), 1, (someones,), 1.0)),
        lambda: store.retain(1),
        lambda: store.begin_attempt("uid", 9),
    ):
        with pytest.raises(
            RemoteOwned, match=f"{owner.job_uid} of cluster {owner.cluster}.*take-over"
        ) as caught:
            attempt()
        assert caught.value.reason is Reason.OWNED
    assert jobs.content() == before


@everywhere
def test_job_in_another_cluster_is_refused_by_every_kind_of_place(jobs: Opener) -> None:
    assert jobs.save(jobs(DEV), Version(10, 1), b"of dev")
    with pytest.raises(RemoteOwned):
        jobs(PROD).begin_attempt(PROD.job_uid, 1)
    assert restored(jobs(DEV), Version(10, 1)) == b"of dev"


@pytest.mark.parametrize(
    "other", [PROD, STRANGER, replace(PROD, job_uid=DEV.job_uid)], ids=["prod", "unknown", "clone"]
)
def test_job_of_the_same_name_in_another_cluster_is_refused(jobs: Opener, other: Claimant) -> None:
    first = jobs(DEV)
    assert jobs.save(first, Version(10, 1), b"of dev")
    refused(jobs, jobs(other), DEV)
    first.retain(1)
    assert restored(jobs(DEV), Version(10, 1)) == b"of dev"


def test_job_that_was_deleted_and_created_again_goes_on_and_its_leftovers_do_not(jobs: Opener) -> None:
    first, again = jobs(DEV), jobs(AGAIN)
    assert jobs.save(first, Version(10, 1), b"before")
    again.check()
    assert again.versions() == [Version(10, 1)]
    assert jobs.save(again, Version(20, 2), b"after")
    refused(jobs, first, AGAIN)
    refused(jobs, jobs(DEV), AGAIN)  # its sidecar was started again
    again.retain(1, history=History((Branch(1, 0), Branch(2, 10))))
    assert again.versions() == [Version(20, 2)]


def test_versions_of_a_release_that_named_no_owner_are_gone_on_with(jobs: Opener) -> None:
    tool = jobs(None)
    assert jobs.save(tool, Version(10, 1), b"old")
    assert tool.ownership.owner() is None
    store = jobs(PROD)
    store.check()
    assert store.versions() == [Version(10, 1)]
    assert tool.ownership.owner() is None, "who only looks, owns nothing"
    store.begin_attempt(PROD.job_uid, 2)
    refused(jobs, jobs(DEV), PROD)


def test_folder_is_taken_over_by_a_persons_word(jobs: Opener) -> None:
    dev, prod, tool = jobs(DEV), jobs(PROD), jobs(None)
    assert jobs.save(dev, Version(10, 1), b"of dev")
    refused(jobs, prod, DEV)
    former = tool.ownership.assign_owner(PROD.job_uid)
    assert former is not None
    assert former.job_uid == DEV.job_uid
    assert prod.versions() == [Version(10, 1)]
    assert jobs.save(prod, Version(20, 2), b"of prod")
    refused(jobs, dev, PROD)
    tool.ownership.assign_owner(DEV.job_uid, DEV.cluster)
    assert jobs.save(dev, Version(30, 3), b"of dev again")
    refused(jobs, prod, DEV)
    assert [restored(tool, version) for version in tool.versions()] == [
        b"of dev",
        b"of prod",
        b"of dev again",
    ]


def test_spec_takes_over_from_the_job_that_it_names_and_only_once(jobs: Opener) -> None:
    dev = jobs(DEV)
    assert jobs.save(dev, Version(10, 1), b"of dev")
    refused(jobs, jobs(PROD, takeOverFrom="uid-of-somebody-else"), DEV)
    prod = jobs(PROD, takeOverFrom=DEV.job_uid)
    assert jobs.save(prod, Version(20, 2), b"of prod")
    refused(jobs, dev, PROD)
    # Two that name each other would take it from each other for ever.
    refused(jobs, jobs(DEV, takeOverFrom=PROD.job_uid), PROD)


@pytest.mark.parametrize("place", ["directory", "s3"], indirect=True)
def test_of_many_that_want_a_new_folder_one_gets_it(jobs: Opener) -> None:
    stores = [jobs(Claimant(f"cluster-{number}", f"uid-{number}")) for number in range(6)]
    together = threading.Barrier(len(stores))

    def begin(number: int) -> bool:
        together.wait()
        try:
            stores[number].begin_attempt(f"uid-{number}", 1)
        except RemoteOwned:
            return False
        return True

    with ThreadPoolExecutor(len(stores)) as pool:
        won = list(pool.map(begin, range(len(stores))))
    assert won.count(True) == 1
    owner = jobs(None).ownership.owner()
    assert owner is not None
    assert owner.job_uid == f"uid-{won.index(True)}"


def test_unreadable_owner_stops_writers_and_a_person_mends_it(jobs: Opener) -> None:
    store = jobs(DEV)
    assert jobs.save(store, Version(10, 1), b"state")
    (name,) = [name for name in jobs.place.names() if "/owner/" in name]
    jobs.place.put(name, b"{")
    with pytest.raises(RemoteCorrupt, match="names the owner of the folder"):
        jobs(DEV).check()
    jobs(None).ownership.assign_owner(DEV.job_uid)
    assert jobs(DEV).versions() == [Version(10, 1)]


@everywhere
def test_nothing_that_a_manifest_names_is_overwritten_by_any_other_upload(jobs: Opener) -> None:
    """Two that nobody keeps apart, such as clones of one cluster: the one that commits restores its own
    bytes."""
    one, other = jobs(None), jobs(None)
    ours, theirs = jobs.put(one, Version(10, 1), b"ours"), jobs.put(other, Version(10, 1), b"theirs")
    assert one.commit(Manifest(JOB, "uid", Version(10, 1), 1, (ours,), 1.0))
    assert not other.commit(Manifest(JOB, "uid", Version(10, 1), 1, (theirs,), 1.0))
    assert restored(one, Version(10, 1)) == b"ours"


steps = st.lists(
    st.tuples(st.sampled_from([DEV, PROD, AGAIN]), st.sampled_from(["save", "retain", "restart", "give"])),
    max_size=14,
)


@settings(max_examples=examples(60), deadline=None)
@given(steps)
def test_whoever_comes_in_whatever_order_what_was_committed_comes_back_and_only_the_owner_changes_anything(
    acts: list[tuple[Claimant, str]],
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: None)
        jobs = Opener(DirectoryPlace(Path(folder) / "shared"), Path(folder))
        tool = jobs(None)
        stores = {claimant: jobs(claimant) for claimant in (DEV, PROD, AGAIN)}
        kept: dict[Version, bytes] = {}
        for number, (claimant, act) in enumerate(acts, start=1):
            before, owner, version = jobs.content(), tool.ownership.owner(), Version(number, number)
            content = f"{number} of {claimant.job_uid}".encode()
            try:
                if act == "save":
                    assert jobs.save(stores[claimant], version, content, claimant.job_uid)
                    kept[version] = content
                elif act == "retain":
                    stores[claimant].retain(2)
                    kept = {version: kept[version] for version in sorted(kept)[-2:]}
                elif act == "restart":
                    stores[claimant] = jobs(claimant)
                else:
                    tool.ownership.assign_owner(claimant.job_uid, claimant.cluster)
            except RemoteOwned:
                assert owner is not None
                assert owner.job_uid != claimant.job_uid
                assert jobs.content() == before
            assert {version: restored(tool, version) for version in tool.versions()} == kept


class WrongClocks(DirectoryObjects):
    """Every object has a time of its own, as where writers' clocks differ."""

    def list(self, prefix: str) -> list[Stored]:
        return [
            replace(each, modified=float(xxhash.xxh3_64_intdigest(each.key.encode()) % 10**9))
            for each in super().list(prefix)
        ]


def test_store_of_wrong_clocks_loses_nothing_that_counts(tmp_path: Path) -> None:
    jobs = Opener(DirectoryPlace(tmp_path / "shared"), tmp_path)
    store = RemoteStore(WrongClocks(str(tmp_path / "shared"), "team/ml/llama"), JOB, DEV)
    history = History((Branch(1, 0),))
    for step in (100, 200, 300):
        assert jobs.save(store, Version(step, 1), b"%d" % step)
        store.retain(2, {Version(step, 1)}, None, history)
    history = history.after(2, 200)  # 300 was no good
    for step in (250, 260, 270):
        coming = jobs.put(store, Version(step + 5, 2), b"on its way")
        assert jobs.save(store, Version(step, 2), b"%d" % step)
        store.retain(2, {Version(step, 2)}, None, history)
        assert len(jobs.place.get(f"team/ml/llama/{coming.key}")) == coming.bytes, (
            "the next one is being uploaded"
        )
    assert store.versions() == [Version(260, 2), Version(270, 2)]
    with pytest.raises(RemoteMissing):
        store.read_manifest(Version(300, 1))


def test_owner_that_changes_while_it_is_asked_for_is_worth_another_try(tmp_path: Path) -> None:
    class Vanishing(DirectoryObjects):
        def read(self, key: str) -> Any:
            return None if key.startswith("owner/") else super().read(key)

    (tmp_path / "shared").mkdir()
    RemoteStore(DirectoryObjects(str(tmp_path / "shared"), "f"), JOB).ownership.assign_owner("uid")
    with pytest.raises(RemoteError) as caught:
        RemoteStore(Vanishing(str(tmp_path / "shared"), "f"), JOB, DEV).check()
    assert caught.value.retriable
