"""Promise: nothing that a store says takes more memory here than its limit."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sidecar.remote.remote_places import DirectoryPlace, S3Place
from tests.sidecar.remote.s3.faulty_proxy import QuietHandler, listening
from tests.sidecar.remote.test_remote_conformance import JOB, fetched, save
from tiercheck.protocol.version import Version
from tiercheck_sidecar.remote import RemoteCorrupt, RemoteError, objects, open_store
from tiercheck_sidecar.remote.store import RemoteStore

GIB = 2**30
LIMIT = 2**20
V = Version(100, 1)


class Zeros:
    """A store whose every answer is 10 GiB of zeros, and that counts what it got rid of."""

    def __init__(self, claims_length: bool, status: int) -> None:
        self.claims_length, self.status, self.sent = claims_length, status, 0


@contextlib.contextmanager
def pouring(zeros: Zeros) -> Iterator[str]:
    class Handler(QuietHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(zeros.status)
            self.send_header(
                *(("Content-Length", str(10 * GIB)) if zeros.claims_length else ("Connection", "close"))
            )
            self.end_headers()
            piece = bytes(LIMIT)
            with contextlib.suppress(OSError):
                while zeros.sent < 10 * GIB:
                    self.wfile.write(piece)
                    zeros.sent += len(piece)
            self.close_connection = True

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer  # noqa: N815

    with listening(Handler) as url:
        yield url


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "LONGEST", LIMIT)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("claims_length", [True, False])
@pytest.mark.parametrize("verb", ["versions", "read_manifest", "check"])
def test_ten_gibibytes_of_zeros_are_not_read(verb: str, claims_length: bool, status: int) -> None:
    zeros = Zeros(claims_length, status)
    with pouring(zeros) as url:
        settings = json.dumps({"s3": {"bucket": "b", "prefix": "p", "endpoint": url, "region": "us-east-1"}})
        store = open_store(settings, JOB)
        with contextlib.closing(store), pytest.raises(RemoteError):
            getattr(store, verb)(*([V] if verb == "read_manifest" else []))
    assert zeros.sent < 200 * LIMIT, "what is under way in buffers, and a few tries"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[tuple[DirectoryPlace, RemoteStore]]:
    place = DirectoryPlace(tmp_path / "store")
    store = open_store(place.settings(), JOB)
    yield place, store
    store.close()


def test_file_that_has_grown_is_not_read_either(
    directory: tuple[DirectoryPlace, RemoteStore], tmp_path: Path
) -> None:
    place, store = directory
    save(store, tmp_path, V)
    for kind in ("manifests", ".json"):
        for name in [each for each in place.names() if kind in each]:
            path = place.root / name
            body = path.read_bytes()
            os.truncate(path, 10 * GIB)
            with pytest.raises(
                RemoteCorrupt, match=f"{path.name} has more than {LIMIT} bytes; it was not read"
            ):
                read_all(store)
            path.write_bytes(body)
    read_all(store)


def read_all(store: RemoteStore) -> None:
    store.ownership.owner()
    for artifact in store.read_manifest(V).artifacts:
        store.artifact(artifact.rank, V)


def test_what_is_no_file_of_bytes_keeps_nobody_waiting(
    directory: tuple[DirectoryPlace, RemoteStore], tmp_path: Path
) -> None:
    place, store = directory
    save(store, tmp_path, V)
    (name,) = [each for each in place.names() if "manifests" in each]
    path = place.root / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RemoteError):
        store.read_manifest(V)


def test_objects_up_to_the_limit_are_read(s3_server: tuple[str, Any], tmp_path: Path) -> None:
    store = open_store(S3Place(*s3_server).settings(), JOB)
    with contextlib.closing(store):
        save(store, tmp_path, V)
        assert store.versions() == [V]
        assert fetched(store, store.artifact(0, V)) == b"state"
