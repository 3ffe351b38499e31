"""Files planted in a shared directory lead the sidecar nowhere, stop nothing and reveal nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sidecar.remote.remote_places import sealed
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.version import Digests, Manifest, RankArtifact, Version
from tiercheck_sidecar.remote import RemoteCorrupt, RemoteError, RemoteStore, open_store
from tiercheck_sidecar.remote import store as remote_store
from tiercheck_sidecar.remote.directory import DirectoryObjects
from tiercheck_sidecar.remote.ownership import Claimant

JOB, VERSION, SECRET = "research/gpt", Version(7, 1), b"the key of the job"


def put_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside / path.name)


def put_fifo(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def put_socket(path: Path, outside: Path) -> None:
    at = os.open(path.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as listener:  # its name may have 107 bytes at most
        listener.bind(f"/proc/self/fd/{at}/{path.name}")
    os.close(at)


def put_device(path: Path, outside: Path) -> None:
    try:
        os.mknod(path, 0o20666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("needs the right to make devices")


def put_folder(path: Path, outside: Path) -> None:
    path.mkdir()


FILES = [put_link, put_fifo, put_socket, put_device, put_folder]


class Shared:
    """A directory with one version of one rank, and a folder outside it that a link may lead to."""

    def __init__(self, path: Path) -> None:
        self.root, self.outside = path / "shared", path / "outside"
        self.root.mkdir()
        self.folder = self.root / JOB
        self.slot, self.digests = sealed(path)
        settings = json.dumps({"directory": {"path": str(self.root)}})
        self.store: RemoteStore = open_store(settings, JOB, Claimant("cluster", "uid"))
        self.artifact = self.store.put_artifact(0, VERSION, self.slot, self.digests, None)
        self.manifest = Manifest(JOB, "uid", VERSION, 1, (self.artifact,), 1.0)
        assert self.store.commit(self.manifest)
        self.store.begin_attempt("uid", 1)
        shutil.copytree(self.folder, self.outside)

    def replace(self, key: str, put: Callable[[Path, Path], None]) -> None:
        path = self.folder / key
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        put(path, self.outside / Path(key).parent)

    def operations(self) -> list[Callable[[], object]]:
        store = self.store
        return [
            store.check, store.versions, lambda: store.read_manifest(VERSION), store.ownership.owner,
            lambda: store.artifact(0, VERSION), lambda: store.fetch(self.artifact, memoryview(bytearray(5))),
            lambda: store.newest_attempts("uid"), lambda: store.begin_attempt("uid", 2),
            lambda: store.put_artifact(0, VERSION, self.slot, self.digests, None),
            lambda: store.commit(self.manifest), lambda: store.retain(1),
        ]  # fmt: skip

    def keys(self) -> list[str]:
        return sorted(
            path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()
        )


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    made = Shared(tmp_path)
    yield made
    made.store.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


KEYS = ["manifests/*.json", "artifacts/*/*/rank-0.safetensors", "artifacts/*/*/rank-0.json", "owner/*.json",
    "attempts/uid/*", "probe"]  # fmt: skip
FOLDERS = ["", "manifests", "artifacts", "artifacts/*", "artifacts/*/*", "owner", "attempts", "attempts/uid"]


@pytest.mark.parametrize("put", FILES)
@pytest.mark.parametrize("pattern", KEYS)
def test_what_is_no_plain_file_is_not_read_waited_for_or_written_through(
    shared: Shared, pattern: str, put: Callable[[Path, Path], None]
) -> None:
    shared.store.check()
    (path,) = shared.folder.glob(pattern)
    shared.replace(path.relative_to(shared.folder).as_posix(), put)
    before = contents(shared.outside)
    said = list[str]()
    for operation in shared.operations():
        try:
            operation()
        except RemoteError as error:
            said.append(str(error))
    assert not [sentence for sentence in said if "unexpectedly" in sentence]
    assert contents(shared.outside) == before, "nothing is written or deleted where a link leads"


@pytest.mark.parametrize("pattern", FOLDERS)
def test_folder_that_is_a_link_is_not_entered(shared: Shared, pattern: str) -> None:
    path = next(iter(shared.folder.glob(pattern))) if pattern else shared.folder
    inside = shared.outside / path.relative_to(shared.folder)
    shutil.rmtree(path)
    path.symlink_to(inside)
    before = contents(shared.outside)
    done = list[Callable[[], object]]()
    for operation in shared.operations():
        try:
            operation()
        except RemoteError:
            continue
        done.append(operation)
    assert contents(shared.outside) == before
    assert len(done) < len(shared.operations()), "what is needed there is refused"


def test_link_is_named_with_what_to_do(shared: Shared) -> None:
    shared.replace(shared.artifact.key, put_link)
    with pytest.raises(RemoteCorrupt, match=r"rank-0\.safetensors is a link.*Remove it"):
        shared.store.fetch(shared.artifact, memoryview(bytearray(5)))


def test_file_that_is_replaced_after_it_was_listed_is_not_followed(shared: Shared) -> None:
    (version,) = shared.store.versions()
    shared.replace(f"manifests/{version.step:012d}-1.json", put_link)
    with pytest.raises(RemoteCorrupt):
        shared.store.read_manifest(version)


@pytest.mark.parametrize("key", ["../other/x", "a/../../x", "/etc/hostname", "a//x", "./x", "a/\0/x", ""])
def test_key_of_a_manifest_leads_nowhere_else(shared: Shared, key: str) -> None:
    objects = DirectoryObjects(str(shared.root), JOB)
    for call in (
        lambda: objects.read(key),
        lambda: objects.read_into(key, 0, memoryview(bytearray(1))),
        lambda: objects.write(key, b"x"),
        lambda: objects.delete([key]),
    ):
        with pytest.raises(RemoteError, match="is no key of"):
            call()


def test_bytes_that_do_not_match_their_digests_stay_nowhere(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hard link is a file like any other, so what comes of one may be what the trainer may not read."""
    monkeypatch.setattr(remote_store, "FETCH_BYTES", 8)
    secret = shared.root / "secret"
    secret.write_bytes(SECRET)
    key = f"artifacts/{VERSION.step:012d}-1/x/rank-0.safetensors"
    (shared.folder / key).parent.mkdir(parents=True)
    os.link(secret, shared.folder / key)
    digests = Digests(len(SECRET), 8, ("0" * 32,) * 3)
    planted = RankArtifact(0, VERSION, key, digests)
    (shared.folder / key).with_suffix(".json").write_bytes(to_json(planted))
    into = bytearray(b"." * len(SECRET))
    with pytest.raises(RemoteCorrupt, match="does not match its digest"):
        shared.store.fetch(planted, memoryview(into))
    assert not set(into) - set(b".\0")


def test_folders_that_are_deeper_than_ours_are_not_listed(shared: Shared) -> None:
    deep = shared.folder / "manifests"
    for _ in range(40):
        deep /= "d"
        deep.mkdir()
    (deep / "x").touch()
    assert shared.store.versions() == [VERSION]
