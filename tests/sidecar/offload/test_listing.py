"""The remote tier is listed by one sidecar for all: what a bucket is asked does not grow with the job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from tests.sidecar.stations import Stations
from tiercheck.protocol.manifest import RankArtifact
from tiercheck.protocol.report import Watermarks
from tiercheck.protocol.signing import SignedAttempt
from tiercheck.protocol.version import Version
from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.offload.remote_inventory import RemoteListing
from tiercheck_sidecar.offload.remote_source import JobStore
from tiercheck_sidecar.offload.upload import Uploader
from tiercheck_sidecar.remote.errors import Reason, RemoteError

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
    (tmp_path / "token").write_text("x")
    (tmp_path / "operator.pub").write_bytes(bytes(32))
    env = {
        "JOB": "ns/j",
        "JOB_UID": "u",
        "WORKER": "1",
        "PROCS_PER_WORKER": "1",
        "POD_UID": "p",
        "POD_IP": "127.0.0.1",
    }
    env |= {"MEMORY_LIMIT": "1", "CREDENTIALS_DIR": str(tmp_path), "REMOTE": '{"directory": {"path": "/x"}}'}
    return SidecarState(SidecarConfig.from_env({f"TIERCHECK_{name}": value for name, value in env.items()}))


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
    stations: Callable[..., Stations], monkeypatch: pytest.MonkeyPatch
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
