"""A store in which nothing may be deleted is used as any other, and its refusal is told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.sidecar.remote.remote_places import S3Place, sealed
from tests.sidecar.remote.s3.faulty_proxy import Fault, Proxy, refusal
from tests.sidecar.world import MakeWorld
from tiercheck.protocol.version import Manifest, Version
from tiercheck_sidecar.remote import Reason, RemoteError
from tiercheck_sidecar.remote.directory import DirectoryObjects
from tiercheck_sidecar.remote.store import RemoteStore

JOB = "research/gpt"
LOCKED = "Deletes are denied by the records policy."


class Keeps(DirectoryObjects):
    """Deletes nothing whose key has one of these words in it, and lists no unfinished upload."""

    locked: tuple[str, ...] = ("",)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            if any(word in key for word in self.locked):
                raise RemoteError(Reason.FORBIDDEN, LOCKED, retriable=False)
            super().delete([key])

    def forget_unfinished(self, dead: Callable[[str], bool]) -> None:
        raise RemoteError(Reason.UNREACHABLE, "busy", retriable=True)


@pytest.fixture
def store(tmp_path: Path) -> RemoteStore:
    (tmp_path / "shared").mkdir()
    return RemoteStore(Keeps(str(tmp_path / "shared"), "job"), JOB)


def save(store: RemoteStore, step: int, tmp_path: Path) -> None:
    version = Version(step, 1)
    artifact = store.put_artifact(0, version, *sealed(tmp_path), None)
    assert store.commit(Manifest(JOB, "uid", version, 1, (artifact,), created=1.0))


def test_attempt_begins_and_versions_stay_where_nothing_may_be_deleted(
    store: RemoteStore, tmp_path: Path
) -> None:
    for attempt in (1, 2, 3):
        store.begin_attempt("uid", attempt)
    assert store.newest_attempts("uid")[0].attempt == 3
    assert LOCKED in store.untidied
    for step in range(1, 7):
        save(store, step, tmp_path)
    left = store.retain(2, frozenset())
    assert [version.step for version in left] == [1, 2, 3, 4, 5, 6]


def test_version_that_cannot_be_deleted_keeps_no_other_there(
    store: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 7):
        save(store, step, tmp_path)
    monkeypatch.setattr(Keeps, "locked", ("manifests/000000000002",))
    assert [version.step for version in store.retain(2, frozenset())] == [2, 5, 6]
    assert store.artifact(0, Version(2, 1)), "what has a manifest is complete"
    monkeypatch.setattr(Keeps, "locked", ())
    monkeypatch.setattr(Keeps, "forget_unfinished", lambda *_: None)
    assert [version.step for version in store.retain(2, frozenset())] == [5, 6]
    assert store.untidied == ""


def test_directory_where_nothing_may_be_deleted_takes_manifests(
    store: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    save(store, 1, tmp_path)
    assert store.versions() == [Version(1, 1)]


def test_uploads_go_on_after_a_recovery_where_nothing_may_be_deleted(
    proxy: Proxy, s3_client: Any, make_world: MakeWorld
) -> None:
    denied = refusal("AccessDenied", 403, LOCKED)
    proxy.rule = lambda seen: Fault(answer=denied) if seen.method == "DELETE" else None
    world = make_world()
    world.remote = S3Place(proxy.url, s3_client).settings()
    world.policy = world.policy.__class__(snapshot_every=1, remote_every=1, remote_keep=1)
    world.start()
    for attempt, steps in ((1, (1, 2)), (2, (3, 4))):
        world.begin(*([Version(2, 1)] if attempt == 2 else []))
        with world.ranks() as (rank,):
            for step in steps:
                rank.save(step)
                world.reach("remote", Version(step, attempt))
    (problem,) = world.report(0).problems
    assert problem.reason == "RemoteNotSafe"
    assert LOCKED[:-1] in problem.message
