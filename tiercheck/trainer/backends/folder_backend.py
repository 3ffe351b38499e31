"""Stores snapshots in a plain folder outside a cluster, so that the same script runs on a laptop.

    <folder>/rank-<r>-of-<n>/<step, 12 digits>-<attempt>.safetensors
                             <step, 12 digits>-<attempt>.json          checksums, written last
    <folder>/run                                                       the training that they are of
    <folder>/<run>/...                                                 the same, of another training
    <folder>/journal-<r>                                               what the last steps gave

A version is complete when every rank has both files. They are renamed into place, so a killed process leaves
nothing that looks complete; a corrupt file is found by its checksums and an older version is used.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from tiercheck.plain_files import sync_folder
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.names import ENV_ATTEMPT
from tiercheck.protocol.plain_json import parse_json
from tiercheck.protocol.version import Kind, Version, parse_version_name, version_name
from tiercheck.trainer.backends.backend import (
    Backend,
    Offer,
    Ranges,
    Skipped,
    gather_from_all,
    is_distributed,
    log,
)

_CHUNK = 4 * 1024 * 1024
_NONE = Version(-1, -1)
_OWNER = "run"


class FolderBackend(Backend):
    """A `Backend` over a folder that all ranks see."""

    patience: float | None = None  # a folder is never busy: every due snapshot is taken
    every = 50
    delta = DeltaMode.NONE
    sanity_gate = True
    verify_all = False
    numa = -1
    is_folder = True

    def __init__(self, folder: Path, rank: int, world_size: int, keep: int, run: str = "") -> None:
        """`run`: name of the training; empty: whichever the folder has."""
        folder = folder.absolute()  # a script may change its working directory
        owner = _owner_of(folder)
        self._folder, self._run, self.left_out = folder, run, ""
        if run and owner not in ("", run):
            self._folder, self._run = folder / re.sub(r"[^\w.-]", "_", run), ""
            self.left_out = (
                f"{folder} has versions of another training, {owner}, which are not taken: this one is {run} "
                f"and keeps its own in {self._folder}; to go on from those, give run={owner!r}"
            )
        self.place = os.path.realpath(self._folder)
        self.journal = self._folder / f"journal-{rank}"
        self._rank = rank
        self._world_size = world_size
        self._keep = keep
        self.attempt = int(os.environ.get(ENV_ATTEMPT, "0"))

    def find(self) -> Offer | None:
        version, world = max(
            self._offers(), key=lambda offer: offer[0] or _NONE, default=(None, self._world_size)
        )
        # What is newer was refused or is incomplete. Left there, it could become complete with files of
        # another history.
        for newer in self._held(self._rank):
            if version is None or newer > version:
                self._remove(newer)
        for unfinished in self._place(self._rank).glob("*.tmp"):
            unfinished.unlink(missing_ok=True)
        if version is None:
            return None
        own = str(self.path_of(self._rank, version)) if world == self._world_size else ""

        def borrow(rank: int, _: Ranges) -> str:
            return str(self.path_of(rank, version, world))

        return Offer(version, own, world_size=world, source=str(self._folder), borrow=borrow)

    def withdraw(self, step: int) -> None:
        """Removes this rank's files of a version. Raises FileExistsError if the version is complete."""
        version = self._version(step)
        if version in self._complete():
            raise FileExistsError(f"{version} is saved already")
        self._remove(version)

    def begin(self, step: int, size: int, kind: Kind = Kind.SNAPSHOT) -> str:
        path = self.path_of(self._rank, self._version(step)).with_suffix(".tmp")
        try:
            if not path.parent.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                for above in path.parent.parents:
                    sync_folder(above)
            if self._run and self._rank == 0:
                (self._folder / _OWNER).write_text(self._run)
                self._run = ""
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
            os.rename(path, self.path_of(self._rank, version))
            temporary = self._record(self._rank, version).with_suffix(".json.tmp")
            with open(temporary, "w") as file:
                json.dump(record, file)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, self._record(self._rank, version))
            # Else a crash of the node could lose the new names, and keep the removal of the old ones.
            sync_folder(self._place(self._rank))
            self._prune()
        except OSError as error:
            raise Skipped("CannotWrite", f"{path}: {error.strerror}") from error

    def abandon(self, path: str, step: int, kind: Kind = Kind.SNAPSHOT) -> None:
        Path(path).unlink(missing_ok=True)

    def _offers(self) -> Iterator[tuple[Version | None, int]]:
        """Yields the newest intact version for each number of ranks that ever saved here, this one first."""
        yield self._agreed(self._world_size), self._world_size
        worlds = {path.name.rpartition("-of-")[2] for path in self._folder.glob("rank-0-of-*")}
        for world in sorted(int(each) for each in worlds if each.isdigit()):
            if world != self._world_size:
                yield self._agreed(world), world

    def _agreed(self, world: int) -> Version | None:
        """Returns the newest version that is intact for each of `world` ranks: the same at every rank.

        Each rank looks at its share of the files.
        """
        shared = is_distributed() and self._world_size > 1
        ranks = range(self._rank, world, self._world_size) if shared else range(world)
        if not shared:
            for version in sorted(self._complete(world), reverse=True):
                if all(self._intact(rank, version, world) for rank in ranks):
                    return version
            return None
        complete = self._complete(world)
        mine = {version for version in complete if all(self._intact(rank, version, world) for rank in ranks)}
        return max(set.intersection(*gather_from_all(mine)), default=None)

    def _intact(self, rank: int, version: Version, world: int) -> bool:
        path = self.path_of(rank, version, world)
        try:
            record = parse_json(self._record(rank, version, world).read_bytes())
            same_size = path.stat().st_size == record["size"]
            intact = bool(same_size and _checksums(path, record["chunk"]) == record["crc32"])
        except (OSError, ValueError, KeyError, TypeError):
            intact = False
        if not intact:
            log.warning("%s is corrupt or gone; an older version is used", path)
        return intact

    def _held(self, rank: int, world: int | None = None) -> set[Version]:
        """Returns the versions that have a record, so that their writer had finished."""
        versions = set()
        for path in self._place(rank, world).glob("*.json"):
            try:
                versions.add(parse_version_name(path.stem))
            except ValueError:
                continue  # not ours
        return versions

    def _complete(self, world: int | None = None) -> set[Version]:
        return set.intersection(*(self._held(rank, world) for rank in range(world or self._world_size)))

    def _prune(self) -> None:
        kept = sorted(self._complete())[-self._keep :]
        for version in self._held(self._rank):
            if kept and version < kept[0]:
                self._remove(version)
        if len(kept) == self._keep and self._rank == 0:
            for path in self._folder.glob("rank-*-of-*"):
                rank, _, world = path.name.removeprefix("rank-").partition("-of-")
                if rank.isdigit() and world.isdigit() and int(world) != self._world_size:
                    for version in self._held(int(rank), int(world)):
                        if version < kept[0]:
                            self._remove(version, int(rank), int(world))

    def _remove(self, version: Version, rank: int | None = None, world: int | None = None) -> None:
        rank = self._rank if rank is None else rank
        self._record(rank, version, world).unlink(missing_ok=True)
        self.path_of(rank, version, world).unlink(missing_ok=True)

    def _version(self, step: int) -> Version:
        return Version(step, self.attempt)

    def _place(self, rank: int, world: int | None = None) -> Path:
        return self._folder / f"rank-{rank}-of-{world or self._world_size}"

    def path_of(self, rank: int, version: Version, world: int | None = None) -> Path:
        """Returns the path of a rank's snapshot, if it is there."""
        return self._place(rank, world) / f"{version_name(version)}.safetensors"

    def _record(self, rank: int, version: Version, world: int | None = None) -> Path:
        return self._place(rank, world) / f"{version_name(version)}.json"


def _owner_of(folder: Path) -> str:
    """Returns the training that saved the versions there; empty: there are none, or it is not recorded."""
    try:
        return (folder / _OWNER).read_text() if any(folder.glob("rank-*-of-*/*.json")) else ""
    except (OSError, ValueError):
        return ""


def _checksums(path: Path, chunk: int = _CHUNK) -> list[int]:
    with open(path, "rb") as file:
        return [zlib.crc32(piece) for piece in iter(lambda: file.read(chunk), b"")]
