"""Keeps the remote tier in a shared directory, for clusters with NFS instead of a bucket.

Nothing is visible before it is complete and on disk: bytes go to a temporary file, are synced, then renamed;
then every folder up to the root is synced. The manifest is hard-linked into place instead, because a link
fails where a rename would silently replace.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tiercheck.durable import sync_folder
from tiercheck_sidecar.decoding import open_plain
from tiercheck_sidecar.remote.errors import Reason, RemoteError
from tiercheck_sidecar.remote.keys import ARTIFACTS, PROBE
from tiercheck_sidecar.remote.objects import Arrived, Gate, Objects, Stored, read_all
from tiercheck_sidecar.remote.verify import ignore_arrival

PIECE = 4 * 1024 * 1024
_TEMPORARY = ".tmp-"


class DirectoryObjects(Objects):
    """`root` must exist (else the volume is not mounted, and we would fill the container's own disk)."""

    def __init__(self, root: str, folder: str) -> None:
        self._root = Path(root)
        self._folder = self._root / folder
        self.location = str(self._folder)

    def check(self) -> None:
        with self._sentences():
            if not self._root.is_dir():
                raise RemoteError(
                    Reason.NO_SUCH_BUCKET,
                    f"The directory {self._root} does not exist; mount the shared volume there in every "
                    "worker.",
                    retriable=True,
                )
        self.write(PROBE, b"")

    def upload(self, key: str, source: memoryview, chunk: int, gate: Gate) -> None:
        stride = max(1, PIECE // chunk) * chunk
        with self._sentences(), self._temporary(key) as (temporary, target):
            with open(temporary, "wb", buffering=0) as sink:
                for begin in range(0, len(source), stride):
                    with source[begin : begin + stride] as piece:
                        gate(begin, piece)
                        _write_all(sink.fileno(), piece)
                os.fsync(sink.fileno())
            os.rename(temporary, target)
            self._sync_up(target.parent)

    def write(self, key: str, body: bytes) -> None:
        with self._sentences(), self._temporary(key) as (temporary, target):
            _write_synced(temporary, body)
            os.rename(temporary, target)
            self._sync_up(target.parent)

    def create(self, key: str, body: bytes) -> bool:
        with self._sentences(), self._temporary(key) as (temporary, target):
            _write_synced(temporary, body)
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            self._sync_up(target.parent)
            return True

    def read(self, key: str) -> bytes | None:
        with self._sentences():
            try:
                with open(open_plain(self._path(key)), "rb", buffering=0) as source:
                    return read_all(source.read, f"{self.location}/{key}", os.fstat(source.fileno()).st_size)
            except FileNotFoundError:
                return None

    def read_into(self, key: str, offset: int, into: memoryview, arrived: Arrived = ignore_arrival) -> int:
        with self._sentences():
            try:
                source = os.open(self._path(key), os.O_RDONLY)
            except FileNotFoundError:
                return 0
            try:
                done = 0
                arrived(done)
                while done < len(into):
                    got = os.preadv(source, [into[done : done + PIECE]], offset + done)
                    if got == 0:
                        break
                    done += got
                    arrived(done)
                return done
            finally:
                os.close(source)

    def list(self, prefix: str) -> list[Stored]:
        folder, _, beginning = prefix.rpartition("/")
        found = []
        with self._sentences():
            for path, name in _walk(self._folder / folder):
                key = path.relative_to(self._folder).as_posix()
                if name.startswith(_TEMPORARY) or not key.startswith(
                    f"{folder}/{beginning}" if folder else beginning
                ):
                    continue
                with contextlib.suppress(FileNotFoundError):  # deleted since
                    status = path.stat()
                    found.append(Stored(key, status.st_size, status.st_mtime))
        return found

    def delete(self, keys: Iterable[str]) -> None:
        folders = set()
        with self._sentences():
            for key in keys:
                path = self._path(key)
                path.unlink(missing_ok=True)
                folders.add(path.parent)
            for folder in folders:
                with contextlib.suppress(FileNotFoundError):
                    sync_folder(folder)  # a manifest must be gone for good before its artifacts go
                self._remove_empty(folder)

    def forget_unfinished(self, dead: Callable[[str], bool]) -> None:
        with self._sentences():
            for path, name in _walk(self._folder / ARTIFACTS):
                if name.startswith(_TEMPORARY):
                    with contextlib.suppress(FileNotFoundError):
                        if dead(path.relative_to(self._folder).as_posix()):
                            path.unlink()
                            self._remove_empty(path.parent)

    def _sync_up(self, folder: Path) -> None:
        """A folder that was just made is an entry of its parent, and lost with it: so every one up to the
        root is synced."""
        while folder != self._root:
            sync_folder(folder)
            folder = folder.parent
        sync_folder(folder)

    def _remove_empty(self, folder: Path) -> None:
        """With its parents, but not those that every job has: others may be writing there."""
        with contextlib.suppress(OSError):  # not empty, or already gone
            while self._folder not in (folder, folder.parent):
                folder.rmdir()
                folder = folder.parent

    def _path(self, key: str) -> Path:
        # Keys of artifacts come out of manifests, that is, from the store: never let one point elsewhere.
        if key.startswith("/") or ".." in key.split("/"):
            raise RemoteError(Reason.OTHER, f"{key!r} is no key of {self.location}.", retriable=False)
        return self._folder / key

    @contextlib.contextmanager
    def _temporary(self, key: str) -> Iterator[tuple[Path, Path]]:
        target = self._path(key)
        if not self._root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "not mounted", str(self._root))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f"{_TEMPORARY}{target.name}-{uuid.uuid4().hex}"
        try:
            yield temporary, target
        finally:
            with contextlib.suppress(
                OSError
            ):  # where nothing may be deleted; `forget_unfinished` tries again
                temporary.unlink()

    @contextlib.contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _as_remote_error(error, self.location) from error


def _as_remote_error(error: OSError, location: str) -> RemoteError:
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return RemoteError(
            Reason.FORBIDDEN,
            f"{location} may not be used ({error.strerror}); let the sidecar's user (see fsGroup) write "
            "there.",
            retriable=False,
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RemoteError(
            Reason.FULL,
            f"{location} is full ({error.strerror}); free space or keep fewer versions (tiers.remote.keep).",
            retriable=True,
        )
    if error.errno == errno.ENOENT:
        return RemoteError(
            Reason.NO_SUCH_BUCKET,
            f"{location} is not there; mount the shared volume in every worker.",
            retriable=True,
        )
    return RemoteError(
        Reason.UNREACHABLE, f"{location} does not answer ({error}); look at the file server.", retriable=True
    )


def _write_synced(path: Path, body: bytes) -> None:
    with open(path, "wb", buffering=0) as sink:
        _write_all(sink.fileno(), memoryview(body))
        os.fsync(sink.fileno())


def _write_all(descriptor: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += os.write(descriptor, view[done:])


def _walk(folder: Path) -> Iterator[tuple[Path, str]]:
    for root, _, names in os.walk(folder):
        for name in names:
            yield Path(root) / name, name
