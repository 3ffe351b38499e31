"""Outside a cluster a plain folder stands in for all tiers, so that the same script runs on a laptop. Snapshots only.

    <folder>/rank-<r>-of-<n>/<step, 12 digits>-<attempt>.safetensors
                             <step, 12 digits>-<attempt>.json          checksums, written last

A version is complete when every rank has both files. They are renamed into place, so a killed process leaves nothing
that looks complete; a corrupt file is found by its checksums and an older version is used.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import torch.distributed as dist

from tiercheck.protocol.artifact import Kind
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.manifest import parse_version_name, version_name
from tiercheck.protocol.names import ENV_ATTEMPT
from tiercheck.protocol.version import Version
from tiercheck.trainer.backend import Offer, Skipped, log
from tiercheck.trainer.ranks import distributed

_CHUNK = 4 * 1024 * 1024


class FolderBackend:
    """A `Backend` over a folder that all ranks see."""

    patience: float | None = None  # nothing to fear from a folder: every due snapshot is taken
    every = 50
    delta = DeltaMode.NONE
    sanity_gate = True

    def __init__(self, folder: Path, rank: int, world_size: int, keep: int) -> None:
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._keep = keep
        self.attempt = int(os.environ.get(ENV_ATTEMPT, "0"))

    def find(self) -> Offer | None:
        self._warn_of_other_world_size()
        version = self._agreed()
        # What is newer was refused or is incomplete. Left there, it could become complete with files of another history.
        for newer in self._held(self._rank):
            if version is None or newer > version:
                self._remove(newer)
        for unfinished in self._place(self._rank).glob("*.tmp"):
            unfinished.unlink(missing_ok=True)
        return None if version is None else Offer(version, str(self._data(self._rank, version)))

    def restored(self, step: int) -> None:
        return

    def mismatch(self, step: int, message: str) -> None:
        return

    def reserve(self, size: int, delta_size: int) -> None:
        return

    def begin(self, step: int, size: int, kind: Kind = Kind.SNAPSHOT) -> str:
        path = self._temporary(self._version(step))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not a SIGBUS later
        except OSError as error:
            path.unlink(missing_ok=True)
            raise Skipped("CannotWrite", f"{path}: {error.strerror}") from error
        return str(path)

    def complete(self, path: str, step: int, size: int, kind: Kind = Kind.SNAPSHOT) -> None:
        version = self._version(step)
        try:
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
            record = {"size": size, "chunk": _CHUNK, "crc32": _checksums(Path(path))}
            os.rename(path, self._data(self._rank, version))
            temporary = self._record(self._rank, version).with_suffix(".json.tmp")
            with open(temporary, "w") as file:
                json.dump(record, file)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, self._record(self._rank, version))
            self._prune()
        except OSError as error:
            raise Skipped("CannotWrite", f"{path}: {error.strerror}") from error

    def abandon(self, path: str, step: int, kind: Kind = Kind.SNAPSHOT) -> None:
        Path(path).unlink(missing_ok=True)

    def pass_over(self, step: int) -> None:
        return

    def no_deltas(self, message: str) -> None:
        return

    def progress(self, step: int, loss: float | None, seconds: float | None, not_finite: int) -> None:
        return

    def failing(self, reason: str, message: str, exit_code: int) -> None:
        return

    def flush(self) -> bool:
        return True

    def close(self) -> None:
        return

    def _agreed(self) -> Version | None:
        """The newest version that is intact for every rank, the same answer on each of them."""
        if distributed() and self._world_size > 1:
            mine = [version for version in self._held(self._rank) if self._intact(self._rank, version)]
            everyones: list[list[Version]] = [[] for _ in range(self._world_size)]
            dist.all_gather_object(everyones, mine)
            return max(set.intersection(*map(set, everyones)), default=None)
        for version in sorted(self._complete(), reverse=True):
            if all(self._intact(rank, version) for rank in range(self._world_size)):
                return version
        return None

    def _intact(self, rank: int, version: Version) -> bool:
        path = self._data(rank, version)
        try:
            record = json.loads(self._record(rank, version).read_text())
            same_size = path.stat().st_size == record["size"]
            intact = bool(same_size and _checksums(path, record["chunk"]) == record["crc32"])
        except (OSError, ValueError, KeyError, TypeError):
            intact = False
        if not intact:
            log.warning("%s is corrupt or gone; an older version is used", path)
        return intact

    def _held(self, rank: int) -> set[Version]:
        """Versions whose record exists, so that their writer had finished."""
        versions = set()
        for path in self._place(rank).glob("*.json"):
            try:
                versions.add(parse_version_name(path.stem))
            except ValueError:
                continue  # not ours
        return versions

    def _complete(self) -> set[Version]:
        return set.intersection(*(self._held(rank) for rank in range(self._world_size)))

    def _prune(self) -> None:
        kept = sorted(self._complete())[-self._keep :]
        for version in self._held(self._rank):
            if kept and version < kept[0]:
                self._remove(version)

    def _remove(self, version: Version) -> None:
        self._record(self._rank, version).unlink(missing_ok=True)
        self._data(self._rank, version).unlink(missing_ok=True)

    def _warn_of_other_world_size(self) -> None:
        for path in self._folder.glob("rank-*-of-*"):
            if path.name.rpartition("-of-")[2] != str(self._world_size):
                log.warning("%s was written by another number of ranks than %d and is not used", path, self._world_size)
                return

    def _version(self, step: int) -> Version:
        return Version(step, self.attempt)

    def _place(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}-of-{self._world_size}"

    def _data(self, rank: int, version: Version) -> Path:
        return self._place(rank) / f"{version_name(version)}.safetensors"

    def _record(self, rank: int, version: Version) -> Path:
        return self._place(rank) / f"{version_name(version)}.json"

    def _temporary(self, version: Version) -> Path:
        return self._place(self._rank) / f"{version_name(version)}.tmp"


def _checksums(path: Path, chunk: int = _CHUNK) -> list[int]:
    with open(path, "rb") as file:
        return [zlib.crc32(piece) for piece in iter(lambda: file.read(chunk), b"")]
