"""What is on disk for good, whatever happens to the power."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_NOT_SYNCED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL, errno.ENOTSUP)


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
