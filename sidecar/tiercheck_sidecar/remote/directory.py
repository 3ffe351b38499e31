"""Keeps the remote tier in a shared directory, for clusters with NFS instead of a bucket.

Nothing is visible before it is complete and on disk: bytes go to a temporary file, are synced, then renamed;
then every folder up to the root is synced. The manifest is hard-linked into place instead, because a link
fails where a rename would silently replace.

Training scripts often mount the same volume: nothing below the root is reached through a symbolic link, and
only regular files are read or listed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tiercheck.plain_files import NotPlain, create_in, folder_beneath, open_plain, sync_folder
from tiercheck_sidecar.remote.errors import Reason, RemoteCorrupt, RemoteError, ignore
from tiercheck_sidecar.remote.keys import ARTIFACTS, PROBE
from tiercheck_sidecar.remote.objects import Arrived, Gate, Objects, Stored, read_all

PIECE = 4 * 1024 * 1024
_TEMPORARY = ".tmp-"
_DEEPEST = 8
"""The number of folder levels below the job's that are listed; TierCheck's own files use three."""


class DirectoryObjects(Objects):
    """A job's folder in a mounted `root`, which must exist: else the container's own disk would fill up."""

    def __init__(self, root: str, folder: str) -> None:
        self._root = Path(root)
        self._folder = Path(folder).parts
        self.location = str(self._root / folder)

    def check(self) -> None:
        with self._translate_errors():
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

        def fill(file: int) -> None:
            for begin in range(0, len(source), stride):
                with source[begin : begin + stride] as piece:
                    gate(begin, piece)
                    _write_all(file, piece)

        self._store(key, fill)

    def write(self, key: str, body: bytes) -> None:
        self._store(key, lambda file: _write_all(file, memoryview(body)))

    def create(self, key: str, body: bytes) -> bool:
        return self._store(key, lambda file: _write_all(file, memoryview(body)), once=True)

    def read(self, key: str) -> bytes | None:
        with self._translate_errors():
            try:
                with open(self._open(key), "rb", buffering=0) as source:
                    return read_all(source.read, f"{self.location}/{key}", os.fstat(source.fileno()).st_size)
            except FileNotFoundError:
                return None

    def read_into(self, key: str, offset: int, into: memoryview, arrived: Arrived = ignore) -> int:
        with self._translate_errors():
            try:
                source = self._open(key)
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
        with self._translate_errors():
            return [each for each in self._walk(prefix) if not _is_temporary(each.key)]

    def delete(self, keys: Iterable[str]) -> None:
        folders = set()
        with self._translate_errors():
            for key in keys:
                parts = self._parts(key)
                with contextlib.suppress(FileNotFoundError), folder_beneath(self._root, parts[:-1]) as folder:
                    os.unlink(parts[-1], dir_fd=folder)
                folders.add(parts[:-1])
            for parts in folders:
                with contextlib.suppress(FileNotFoundError):
                    self._sync(parts)  # a manifest must be gone for good before its artifacts go
                self._remove_empty(parts)

    def forget_unfinished(self, dead: Callable[[str], bool]) -> None:
        with self._translate_errors():
            keys = [each.key for each in self._walk(ARTIFACTS) if _is_temporary(each.key)]
        self.delete(key for key in keys if dead(key))

    def _walk(self, prefix: str) -> Iterator[Stored]:
        """Yields every regular file with a key that begins with `prefix`. Raises OSError."""
        parts = prefix.split("/")[:-1]
        below = (*self._folder, *parts)
        with contextlib.suppress(FileNotFoundError), folder_beneath(self._root, below) as folder:
            yield from _files(folder, ".", "".join(f"{part}/" for part in parts), prefix)

    def _sync(self, parts: tuple[str, ...]) -> None:
        with folder_beneath(self._root, parts) as folder:
            sync_folder(folder)

    def _remove_empty(self, parts: tuple[str, ...]) -> None:
        """Removes an empty folder and empty parents, but not the job's top folders: others write there."""
        with contextlib.suppress(OSError):  # not empty, or already gone
            while len(parts) > len(self._folder) + 1:
                with folder_beneath(self._root, parts[:-1]) as folder:
                    os.rmdir(parts[-1], dir_fd=folder)
                parts = parts[:-1]

    def _open(self, key: str) -> int:
        return open_plain(self._root.joinpath(*self._parts(key)), self._root)

    def _parts(self, key: str) -> tuple[str, ...]:
        """Splits a key into the components of its path below the root."""
        parts = key.split("/")
        # Keys of artifacts come from manifests, that is, from the store: never let one point elsewhere.
        if "\0" in key or {"", ".", ".."} & set(parts):
            raise RemoteError(Reason.OTHER, f"{key!r} is no key of {self.location}.", retriable=False)
        return (*self._folder, *parts)

    def _store(self, key: str, fill: Callable[[int], None], once: bool = False) -> bool:
        """Writes a file with `fill`; returns False if `once` is set and the file existed already."""
        *parts, name = self._parts(key)
        temporary = f"{_TEMPORARY}{name}-{uuid.uuid4().hex}"
        with self._translate_errors(), folder_beneath(self._root, parts, make=True) as folder:
            try:
                with open(create_in(folder, temporary), "wb", buffering=0) as sink:
                    fill(sink.fileno())
                    os.fsync(sink.fileno())
                try:
                    (os.link if once else os.rename)(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                except FileExistsError:
                    if not once:
                        raise
                    return False
                except OSError as error:
                    if not (once and error.errno == errno.EPERM):
                        raise
                    # The kernel's answer if a file system has no links at all.
                    raise OSError(errno.EOPNOTSUPP, error.strerror) from error
                # A new folder is an entry of its parent and would be lost with it, so every folder up to the
                # root is synced.
                for depth in range(len(parts), -1, -1):
                    self._sync(tuple(parts[:depth]))
                return True
            finally:
                # If deleting is forbidden, `forget_unfinished` tries again.
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except NotPlain as error:
            raise RemoteCorrupt(
                f"{error.filename} is a link, or of another kind than what is stored there, so it is neither "
                "read nor written. Remove it."
            ) from error
        except OSError as error:
            raise _as_remote_error(error, self.location) from error


_FORBIDDEN = (
    Reason.FORBIDDEN,
    "{place} may not be used ({said}); let the sidecar's user (see fsGroup) write there.",
)
_FULL = Reason.FULL, "{place} is full ({said}); free space or keep fewer versions (tiers.remote.keep)."
_UNABLE = (
    Reason.OTHER,
    "{place} is on a file system that cannot do what is needed ({said}). Use one with hard links, renames "
    "and fsync, such as NFS; or give its bucket, if it shows one, in tiers.remote.s3.",
)
_ABSENT = Reason.NO_SUCH_BUCKET, "{place} is not there; mount the shared volume in every worker."
_SILENT = Reason.UNREACHABLE, "{place} does not answer ({error}); look at the file server."
_TROUBLES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _FORBIDDEN),
    **dict.fromkeys((errno.ENOSYS, errno.EOPNOTSUPP), _UNABLE),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _FULL),
    errno.ENOENT: _ABSENT,
}


def _as_remote_error(error: OSError, location: str) -> RemoteError:
    reason, sentence = _TROUBLES.get(error.errno or 0, _SILENT)
    message = sentence.format(place=location, said=error.strerror, error=error)
    return RemoteError(reason, message, retriable=reason not in (Reason.FORBIDDEN, Reason.OTHER))


def _write_all(descriptor: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += os.write(descriptor, view[done:])


def _is_temporary(key: str) -> bool:
    return key.rpartition("/")[2].startswith(_TEMPORARY)


def _files(parent: int, name: str, above: str, prefix: str, depth: int = _DEEPEST) -> Iterator[Stored]:
    """Yields regular files in folder `name` of `parent` and below; `above` is the prefix of their keys."""
    access = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(name, access, dir_fd=parent)
    try:
        for entry in os.scandir(folder):
            key = f"{above}{entry.name}"
            with contextlib.suppress(OSError):  # deleted since, or a folder that may not be read
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and key.startswith(prefix):
                    yield Stored(key, status.st_size, status.st_mtime)
                elif stat.S_ISDIR(status.st_mode) and depth:
                    yield from _files(folder, entry.name, f"{key}/", prefix, depth - 1)
    finally:
        os.close(folder)
