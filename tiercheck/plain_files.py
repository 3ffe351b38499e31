"""Opens regular files without following symlinks, in folders that others can write to; syncs folders.

Opening a FIFO would block, and a symlink could point to a file that its creator must not read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

_NOT_SYNCED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL, errno.ENOTSUP)


class NotPlain(OSError):
    """A part of the path is a link, "..", or not of the expected type."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, "no plain file below the folder", path)


@contextlib.contextmanager
def folder_beneath(root: Path, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """Yields a descriptor, for `dir_fd`, of the folder at `parts` below `root`, which may be a link.

    `make`: creates missing folders. Raises NotPlain, OSError.
    """
    folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for depth, part in enumerate(parts):
            try:
                inner = _enter(folder, part, make)
            except NotADirectoryError:  # raised for a symlink too
                raise NotPlain(str(root.joinpath(*parts[: depth + 1]))) from None
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def _enter(folder: int, part: str, make: bool) -> int:
    if part in ("", ".", ".."):
        raise NotADirectoryError
    access = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(part, access, dir_fd=folder)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(part, dir_fd=folder)
    return os.open(part, access, dir_fd=folder)


def open_plain(path: Path, root: Path | None = None, *, write: bool = False) -> int:
    """Returns a descriptor of a regular file for reading, and with `write` for writing too.

    No folder below `root` may be a link. Default: the parent of `path`'s folder. Raises NotPlain, OSError."""
    access = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with _parent(path, root) as folder:
        try:
            file = os.open(path.name, access, dir_fd=folder)
        except OSError as error:
            # A symlink; a socket or a device without a driver; a folder opened for writing.
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR):
                raise NotPlain(str(path)) from None
            raise
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise NotPlain(str(path))


def create_plain(path: Path, root: Path | None = None) -> int:
    """Creates an empty file in place of any other, and returns its descriptor. Raises NotPlain, OSError.

    `root` as in `open_plain`."""
    with _parent(path, root) as folder:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        return create_in(folder, path.name)


def create_in(folder: int, name: str) -> int:
    """Creates an empty file in an open folder; returns its descriptor. Raises FileExistsError, OSError."""
    access = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.open(name, access, 0o666, dir_fd=folder)


def is_plain(path: Path) -> bool:
    """Returns whether `path` is a regular file, which excludes links, folders and FIFOs."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _parent(path: Path, root: Path | None) -> contextlib.AbstractContextManager[int]:
    root = path.parent.parent if root is None else root
    return folder_beneath(root, path.relative_to(root).parts[:-1])


def sync_folder(folder: Path | int) -> None:
    """Syncs the entries of a folder (path or descriptor), so that created and removed names persist.

    Raises OSError, except where folders may not be opened or the file system cannot sync them.
    """
    try:
        path, parent = (".", folder) if isinstance(folder, int) else (folder, None)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=parent)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SYNCED:
            raise
