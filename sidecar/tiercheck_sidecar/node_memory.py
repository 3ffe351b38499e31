"""Keeps what a pod leaves in the node's memory for the next pod of the same worker alone.

Each sidecar has a folder named after its pod, in the folder of its job. A file in it names the worker, and is
locked as long as the process lives, so that any process on the node can distinguish the dead from the living.
A new pod takes over the sealed slots of its predecessors. Unused folders are removed by sidecars of the same
job, the init container of any later pod on the node, and a janitor where one is installed.

`python3 -m tiercheck_sidecar.node_memory BASE JOB_UID KEEP_SECONDS` prepares the folder of a job and sweeps
all others; it is the init container's command. With `--watch` in place of a job it sweeps forever: the
janitor's.
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":  # PID 1 ignores a signal that it does not handle
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))

import contextlib
import fcntl
import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiercheck.plain_files import NotPlain, is_plain, open_plain
from tiercheck.protocol.encoding import to_json
from tiercheck.redaction import log_redacted
from tiercheck_sidecar.decoding import Malformed, read_checked, with_checksum
from tiercheck_sidecar.vault.seal import seal_path
from tiercheck_sidecar.vault.stock import SLOT_SUFFIX

log = logging.getLogger(__name__)

OWNER = ".owner"
_MOST_OWNER = 4096
"""Bytes of the largest owner file that is read."""
_WATCH_EVERY = 60.0
_JOB_MODE = 0o1777
"""The mode of a job's folder.
Its sidecars run as users that only the pod template defines; none may remove another's folder."""


@dataclass(frozen=True)
class FolderOwner:
    """The content of the file `.owner`.
    `claimed`: unix seconds of the node's clock. The later of two claims may take from the other."""

    worker: int
    claimed: float


class FolderClaim:
    """The claim of this process on its folder, until it ends. Raises OSError if it cannot be had."""

    def __init__(self, folder: Path, worker: int, now: float) -> None:
        self.folder = folder
        if folder.is_symlink():  # a trainer of this pod made it, while the sidecar was not running
            folder.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):
            folder.chmod(0o777)  # so that a janitor without capabilities can remove it
        # A trainer may have put anything there, and this process must start all the same.
        if not is_plain(folder / OWNER):
            _remove(folder / OWNER)
        self._file = os.open(
            folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644
        )
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        known = _read(folder)
        # A process that was restarted in its pod is no later pod.
        self.owner = FolderOwner(worker, known.claimed if known else now)
        self._write()

    def identify(self, worker: int) -> None:
        """Records that this is another worker, so that the memory is for the next pod of that one."""
        self.owner = FolderOwner(worker, self.owner.claimed)
        self._write()

    def adopt(self) -> int:
        """Moves the sealed slots of the worker's earlier pods here, to be verified; returns how many.

        The seal goes first. An owner that is still alive can then neither break it nor, without its path,
        write into the slot; what it had begun to overwrite has no seal any more, or fails verification.
        """
        adopted = 0
        for folder in _folders(self.folder.parent):
            if folder == self.folder:
                continue
            owner = _read(folder)
            if owner is None or owner.worker != self.owner.worker:
                continue
            with _dead(folder) as dead:
                if not dead and owner.claimed >= self.owner.claimed:
                    continue
                adopted += sum(self._take(slot) for slot in sorted(folder.glob(f"*{SLOT_SUFFIX}")))
                if dead:
                    _remove(folder)
        return adopted

    def discard(self) -> None:
        """Removes the folder, when the job is over."""
        _remove(self.folder)

    def close(self) -> None:
        """Releases the lock, as the end of the process does."""
        os.close(self._file)

    def _take(self, slot: Path) -> bool:
        target = self.folder / slot.name
        if target.exists():
            return False
        try:
            os.rename(seal_path(slot), seal_path(target))
            os.rename(slot, target)
        except OSError as error:
            log.info("%s is not taken over: %s", slot, error)
            return False
        return True

    def _write(self) -> None:
        content = with_checksum(to_json(self.owner))
        os.pwrite(self._file, content, 0)
        os.ftruncate(self._file, len(content))


def sweep_job(job: Path, keep: float, now: float) -> int:
    """Removes dead pods' folders and other files unchanged for `keep` seconds; returns how many."""
    removed = 0
    for path in entries(job):
        with _dead(path) as dead:
            if dead and now - _newest(path, now + keep) > keep:
                _remove(path)
                removed += not os.path.lexists(path)
    return removed


def sweep(base: Path, keep: float, now: float) -> int:
    """Does the same for every job of the node, and removes the empty folders of jobs."""
    removed = 0
    for job in _folders(base):
        removed += sweep_job(job, keep, now)
        with contextlib.suppress(OSError):  # not empty, or gone
            if now - _newest(job, now + keep) > keep:
                job.rmdir()
    return removed


def prepare(base: Path, job_uid: str) -> None:
    """Makes the folder of a job, writable for its sidecars. Raises OSError."""
    folder = base / job_uid
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(_JOB_MODE)
    os.utime(folder)  # or a sweep might find it empty and old, between here and the sidecar's start


def entries(parent: Path) -> list[Path]:
    """Returns what a folder contains, sorted; nothing if it cannot be read."""
    try:
        return sorted(parent.iterdir())
    except OSError:
        return []


def _folders(parent: Path) -> list[Path]:
    return [path for path in entries(parent) if path.is_dir() and not path.is_symlink()]


@contextlib.contextmanager
def _dead(folder: Path) -> Iterator[bool]:
    """Yields whether no process has claimed the folder; none can while this lasts."""
    try:
        file = open_plain(folder / OWNER)
    except (FileNotFoundError, NotPlain):  # no claim: those are plain files in folders
        yield True
        return
    except OSError:
        yield False
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        alive = True
    else:
        alive = False
    try:
        yield not alive
    finally:
        os.close(file)


def _read(folder: Path) -> FolderOwner | None:
    try:
        return read_checked(folder / OWNER, FolderOwner, _MOST_OWNER)
    except (OSError, Malformed):
        return None


def _remove(path: Path) -> None:
    """Removes a folder or a file, as far as possible.
    What another job's trainer made of it must not stop a sweep."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        if os.path.lexists(path):
            log.warning("%s cannot be removed: something in it is another user's", path)
    except (OSError, RecursionError) as error:  # folders nested too deep
        log.warning("%s cannot be removed: %s", path, error)


def _newest(path: Path, latest: float) -> float:
    """Returns when anything was last written: every snapshot leaves a new seal.
    A date after `latest` does not count: the owner of a file can set any."""
    times = [0.0]
    for each in [path, *([] if path.is_symlink() else entries(path))]:
        with contextlib.suppress(OSError):
            times.append(each.lstat().st_mtime)
    return max(moment for moment in times if moment <= latest)


def main(arguments: list[str]) -> int:
    """Returns 0; 1 if the folder cannot be made; 2 if the command line is wrong."""
    log_redacted()
    try:
        base, what, keep = Path(arguments[0]), arguments[1], float(arguments[2])
    except (IndexError, ValueError):
        print(
            "usage: python3 -m tiercheck_sidecar.node_memory BASE (JOB_UID | --watch) KEEP_SECONDS",
            file=sys.stderr,
        )
        return 2
    if what != "--watch":
        try:
            prepare(base, what)
        except OSError as error:
            log.error("the node's memory cannot be used: %s", error)
            return 1
    while True:
        removed = sweep(base, keep, time.time())
        if removed:
            log.info("removed %d folders and files that no pod needs any more", removed)
        if what != "--watch":
            return 0
        time.sleep(min(_WATCH_EVERY, max(1.0, keep)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
