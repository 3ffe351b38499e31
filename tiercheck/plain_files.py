"""Opens files in folders that others can write, plain ones only and through no link; syncs folders.

Opening a FIFO waits for its writer, and a link leads to what its maker may not read.
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
    """A part of the path is a link, "..", or of another kind than it should be."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, "no plain file below the folder", path)


@contextlib.contextmanager
def folder_beneath(root: Path, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """A descriptor, for `dir_fd`, of the folder at `parts` below `root`, which itself may be a link.

    `make`: missing folders are made. Raises NotPlain, OSError.
    """
    folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for depth, part in enumerate(parts):
            try:
                inner = _enter(folder, part, make)
            except NotADirectoryError:  # a link is none
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
    """A descriptor to read from, or to `write` to as well. Below `root` no folder may be a link; if it is not
    given, `path`'s own folder may be none. Raises NotPlain, OSError."""
    access = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with _parent(path, root) as folder:
        try:
            file = os.open(path.name, access, dir_fd=folder)
        except OSError as error:
            # A link; a socket or a device without a driver; a folder to write to.
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR):
                raise NotPlain(str(path)) from None
            raise
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise NotPlain(str(path))


def create_plain(path: Path, root: Path | None = None) -> int:
    """A descriptor of a new, empty file to write to, in place of whatever is there. `root` as in
    `open_plain`. Raises NotPlain, OSError."""
    with _parent(path, root) as folder:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        return create_in(folder, path.name)


def create_in(folder: int, name: str) -> int:
    """A descriptor of a new, empty file to write to, in an open folder. Raises FileExistsError, OSError."""
    access = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.open(name, access, 0o666, dir_fd=folder)


def is_plain(path: Path) -> bool:
    """Whether it is a file of bytes: no link, no folder, and nothing that could keep its reader waiting."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _parent(path: Path, root: Path | None) -> contextlib.AbstractContextManager[int]:
    root = path.parent.parent if root is None else root
    return folder_beneath(root, path.relative_to(root).parts[:-1])


def sync_folder(folder: Path | int) -> None:
    """Its entries: names that were made in it, or taken out of it. `folder`: its path, or a descriptor.

    Raises OSError, but not where folders may not be opened, or the file system syncs none.
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
