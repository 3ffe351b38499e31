"""Files in folders that trainers write into too: whoever opens a FIFO waits for its writer, for ever, and a link leads anywhere."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def is_plain(path: Path) -> bool:
    """Whether it is a file of bytes: no link, no folder, and nothing that could keep its reader waiting."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def create_plain(path: Path) -> int:
    """A descriptor of a new, empty file to write to, in place of whatever is there. Raises OSError."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def open_plain(path: Path, *, write: bool = False) -> int:
    """A descriptor to read from, or to `write` to as well, without waiting for anybody. Raises OSError, also if it is no plain file."""
    access = os.O_RDWR if write else os.O_RDONLY
    file = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "no plain file", str(path))
