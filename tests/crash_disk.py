"""Tells what a disk may have kept if the power went at any moment: the least, and the most."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


class CrashDisk:
    """Watches what the product does to files below `root`, through `os`, and calls `look` after each of its
    acts.

    A file counts as kept for certain if its bytes were synced, and its folder, and every folder above up to
    `root`, each after its entry was made. An entry may be there as long as its removal was not synced.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._bytes: set[str] = set()
        """Inodes whose bytes were synced."""
        self._entries: dict[str, set[str]] = {str(root): set()}
        """Per folder, the names that were in it when it was synced last, less what was removed since."""
        self._lingering: dict[str, set[str]] = {}
        """Per folder, the names whose removal was not synced."""
        self.look: Callable[[], None] = lambda: None
        for name in ("rename", "link", "unlink", "rmdir", "mkdir", "fsync"):
            monkeypatch.setattr(os, name, self._watching(name, getattr(os, name)))

    def surely(self, path: Path) -> bool:
        """Whether it outlives a crash whole, whatever happens."""
        if not path.is_file() or str(path.stat().st_ino) not in self._bytes:
            return False
        while path != self._root:
            if path.name not in self._entries.get(str(path.parent), ()):
                return False
            path = path.parent
        return True

    def perhaps(self, path: Path) -> bool:
        """Whether it may be found after a crash."""
        return path.exists() or path.name in self._lingering.get(str(path.parent), ())

    def _watching(self, name: str, real: Callable[..., object]) -> Callable[..., object]:
        def act(*arguments: object, **more: object) -> object:
            if name == "fsync":
                paths = [_opened(arguments[0])]
            else:
                folders = more.get("dir_fd", more.get("src_dir_fd")), more.get("dst_dir_fd")
                paths = [
                    _opened(folder) / str(path) if folder is not None else Path(str(path))
                    for path, folder in zip(arguments, folders, strict=False)
                ]
            answer = real(*arguments, **more)
            if name == "fsync":
                self._synced(paths[0])
            elif name in ("unlink", "rmdir"):
                self._gone(paths[0])
            elif name == "rename":
                self._gone(paths[0])
                self._new(paths[1])
            elif name == "link":
                self._new(paths[1])
            elif name == "mkdir":
                self._entries[str(paths[0])] = set()
                self._new(paths[0])
            self.look()
            return answer

        return act

    def _synced(self, path: Path) -> None:
        if path.is_dir():
            self._entries[str(path)] = set(os.listdir(path))
            self._lingering.pop(str(path), None)
        else:
            self._bytes.add(str(path.stat().st_ino))

    def _new(self, path: Path) -> None:
        self._entries.setdefault(str(path.parent), set()).discard(path.name)  # whatever had the name before

    def _gone(self, path: Path) -> None:
        self._entries.get(str(path.parent), set()).discard(path.name)
        self._lingering.setdefault(str(path.parent), set()).add(path.name)


def _opened(descriptor: object) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
