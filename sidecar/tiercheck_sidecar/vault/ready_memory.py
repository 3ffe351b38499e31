"""Makes memory for snapshots before it is known which ones a restore will bring.

Making a slot takes longer than fetching a snapshot into it: pages have to be zeroed, and on a virtual machine
the host has to find them. A spare waits for hours and a new pod for a second or two, so both do it meanwhile.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from tiercheck.plain_files import open_plain
from tiercheck_sidecar.vault.slots import create, identity, remove

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _ReadyFile:
    path: Path
    area: memoryview
    identity: tuple[int, int]
    """Device and inode."""


class ReadyMemory:
    """Holds slot files that are no slots yet. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._files: list[_ReadyFile] = []
        self._coming = 0
        self._is_made = False

    @property
    def size(self) -> int:
        """Bytes of all files that are there."""
        with self._changed:
            return sum(len(file.area) for file in self._files)

    def make(self, paths: list[Path], size: int, hands: int) -> bool:
        """Makes a file of `size` bytes at each path, in `hands` threads. Returns whether any was made. Slow.
        Only the first call makes any: what was used or discarded is not replaced."""
        with self._changed:
            if self._is_made:
                return False
            self._is_made, self._coming = True, len(paths)
        for path in paths:
            with self._changed:
                if not self._coming:  # discarded meanwhile
                    break
            file = None
            try:
                area = create(path, size, hands)
                file = _ReadyFile(path, area, identity(os.lstat(path)))
            except OSError as error:
                log.warning("cannot allocate %d bytes for %s: %s", size, path.name, error)
            with self._changed:
                if file is not None and self._coming:
                    self._files.append(file)
                    self._coming -= 1
                else:
                    self._coming = 0
                    if file is not None:
                        _drop(file)
                self._changed.notify_all()
        return True

    def take(self, path: Path, size: int) -> memoryview | None:
        """Turns a file into the slot at `path`, of `size` bytes. Returns its mapping; None if none fits.
        Waits for a file that is being made: it will be there sooner than another one."""
        with self._changed:
            self._changed.wait_for(lambda: self._files or not self._coming)
            file = next((file for file in self._files if len(file.area) >= size), None)
            if file is None:
                return None
            self._files.remove(file)
        try:
            descriptor = open_plain(file.path, write=True)
            try:
                status = os.fstat(descriptor)
                # A trainer of this pod can replace or shorten what lies on the volume.
                if identity(status) != file.identity or status.st_size != len(file.area):
                    raise OSError(f"{file.path.name} was changed")
                os.ftruncate(descriptor, size)
            finally:
                os.close(descriptor)
            os.rename(file.path, path)
        except OSError as error:
            log.warning("memory that was made ready cannot be used: %s", error)
            _drop(file)
            return None
        return file.area[:size]

    def discard(self) -> None:
        """Gives all of it back."""
        with self._changed:
            files, self._files, self._coming, self._is_made = self._files, [], 0, True
            self._changed.notify_all()
        for file in files:
            _drop(file)


def _drop(file: _ReadyFile) -> None:
    try:
        remove(file.path)
    except OSError as error:
        log.warning("%s cannot be removed: %s", file.path.name, error)
