"""Starts, signals and kills the training command's processes, and collects the reasons for their end.

All descendants end with the command, so that none is left to disturb the next attempt. The stacks of a hung
process are requested before it is stopped. The command's last lines go into the message about its end, and
the container's cgroup shows whether the kernel's OOM killer sent a SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from io import FileIO
from pathlib import Path

_STDERR = 2
_KEPT = 16384
"""Bytes of output that are kept. torchrun's final report has about 3000."""
_LINES, _CHARACTERS = 5, 600
"""The number of lines and of characters of output that are reported."""
_PIECE, _PIECES = 4096, 64
"""Bytes that a pipe with room accepts at once (PIPE_BUF), and the most such pieces relayed per turn."""
_TORCHRUN = re.compile(
    rb"^.*elastic/multiprocessing/api\.py:\d+\] (?:failed \(exitcode|Sending process)", re.M
)
"""Matches the beginning of torchrun's report, which follows the output of the ranks."""


class RelayedOutput:
    """A pipe to the launcher's own stderr, which keeps the last output."""

    def __init__(self) -> None:
        reading, self.writing = os.pipe()
        os.set_blocking(reading, False)
        self._reading = open(reading, "rb", buffering=0)  # noqa: SIM115
        self._ended = False
        self.blocked = False
        """True while stderr is full. The command then waits, as without the launcher; call `relay` again."""
        self._said = b""

    @property
    def channel(self) -> FileIO | None:
        """Returns the pipe for a selector; None while stderr is full, or after the pipe's end."""
        return None if self._ended or self.blocked else self._reading

    def relay(self) -> None:
        """Copies available output to stderr without blocking."""
        for _ in range(_PIECES):
            self.blocked = _is_full(_STDERR)
            if (channel := self.channel) is None or (piece := channel.read(_PIECE)) is None:
                return
            self._ended = not piece
            self._said = (self._said + piece)[-_KEPT:]
            with contextlib.suppress(OSError, ValueError):
                os.write(_STDERR, piece)

    def forget(self) -> None:
        self._said = b""

    def last_lines(self) -> str:
        """Returns the last lines of output joined into one; empty if there is none but TierCheck's own."""
        self.relay()
        report = _TORCHRUN.search(self._said)
        said = (self._said[: report.start()].strip() if report else b"") or self._said
        lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
        lines = [line for line in lines if not line.startswith("tiercheck: ")]
        return " / ".join(lines[-_LINES:])[-_CHARACTERS:]

    def close_writing(self) -> None:
        """Closes the writing end once the command has inherited it, so that end of file is seen."""
        os.close(self.writing)

    def close(self) -> None:
        self.relay()
        self._reading.close()


def _is_full(descriptor: int) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return not select.select([], [descriptor], [], 0)[1]
    return False  # it is closed


CGROUP = "/sys/fs/cgroup"
"""The folder at which a container sees its own cgroup."""
_KILLS = (("memory.events", "oom_kill"), ("memory/memory.oom_control", "oom_kill"))
"""Files and keys that count OOM kills, in cgroup v2 and v1."""
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
_PEAKS = ("memory.peak", "memory/memory.max_usage_in_bytes")
_UNLIMITED = 1 << 60
"""A number of bytes. cgroup v1 represents "no limit" by a number of about this size."""


class OutOfMemory:
    """Detects kernel OOM kills in the cgroup at `folder`.

    Unreadable files count as no kill; then only the kubelet's report is available."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = self._kills()

    def begin(self) -> None:
        """Records the count at a command's start, because earlier kills are not of that command."""
        self._before = self._kills()

    def verdict(self) -> str:
        """Returns a sentence with numbers if the OOM killer has acted since `begin`; empty if not."""
        number = self._kills() - self._before
        if number <= 0:
            return ""
        limit, peak = self._first(_LIMITS), self._first(_PEAKS)
        limits = [f"the limit is {_gib(limit)}"] if limit is not None and limit < _UNLIMITED else []
        limits += [f"the most that was used is {_gib(peak)}"] if peak is not None else []
        numbers = f"; {', '.join(limits)}" if limits else ""
        return f"The kernel's OOM killer ended {number} of its processes{numbers}."

    def _kills(self) -> int:
        for name, key in _KILLS:
            try:
                lines = (self._folder / name).read_text().splitlines()
            except OSError:
                continue
            for line in lines:
                words = line.split()
                if len(words) == 2 and words[0] == key and words[1].isdigit():
                    return int(words[1])
        return 0

    def _first(self, names: tuple[str, ...]) -> int | None:
        for name in names:
            with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                return int((self._folder / name).read_text())
        return None


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_NAMED = 4
"""The most processes that a message names."""
_STATES = {
    "D": "which waits for a driver or a file system (state D)",
    "Z": "whose first thread has ended and another one has not",
}


def adopt_orphans() -> None:
    """Makes this process the parent of orphaned descendants, as PID 1 is in any case."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    descriptors: Sequence[int] = (),
    output: int | None = None,
    errors: int | None = None,
) -> int:
    """Starts `command` in its own session, and returns its pid. Raises OSError if it cannot be executed.

    It inherits `descriptors`, and writes to `output` and `errors` if given.
    """

    def die_with_launcher() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    process = subprocess.Popen(
        list(command),
        env=dict(environment),
        start_new_session=True,
        pass_fds=descriptors,
        stdout=output,
        stderr=errors,
        preexec_fn=die_with_launcher,  # noqa: PLW1509  (the launcher has one thread)
    )
    process.returncode = 0  # the launcher's own loop reaps it; this keeps Popen from trying
    return process.pid


def send_signal(pid: int, number: int) -> None:
    """Sends a signal to the command's whole process group, if that still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def kill_descendants(spared: Collection[int] = ()) -> set[int]:
    """Kills all descendants except `spared` children and those below them; returns the pids found.

    Process groups would not suffice, because torchrun puts its workers into sessions of their own.
    """
    parent_of = {pid: parent for pid, parent in parents().items() if pid not in spared}
    found = descendants(os.getpid(), parent_of)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def parents() -> dict[int, int]:
    """Returns the parent of every visible process that has a living thread, by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it has just ended
        if state not in "ZX" or _has_living_thread(entry):
            found[int(entry.name)] = int(parent)
    return found


def signal_of(code: int) -> str:
    """Returns the name of the signal that ended a command with this exit code; empty if none did."""
    return signal.Signals(code - 128).name if code > 128 and code - 128 in set(signal.Signals) else ""


def describe_stuck(pids: Collection[int]) -> str:
    """Returns a clause that names processes that do not end, and their states."""
    named = []
    for pid in sorted(pids)[:_NAMED]:
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        state = rest.split()[0]
        named.append(f"{pid} ({name}), {_STATES.get(state, f'in state {state}')}")
    more = f", and {len(pids) - _NAMED} more" if len(pids) > _NAMED else ""
    return f"SIGKILL does not end process {', '.join(named)}{more}"


def _has_living_thread(process: Path) -> bool:
    """Returns whether a process has a living thread, although its first one has ended.

    Such a thread may be stuck in a driver, and keeps all memory, including GPU memory."""
    try:
        states = [
            (thread / "stat").read_text().rpartition(")")[2].split()[0]
            for thread in (process / "task").iterdir()
        ]
    except (OSError, IndexError):
        return False
    return any(state not in "ZX" for state in states)


def descendants(root: int, parent_of: Mapping[int, int]) -> set[int]:
    below: set[int] = set()
    edge = {root}
    while edge:
        edge = {pid for pid, parent in parent_of.items() if parent in edge} - below
        below |= edge
    return below


def reap() -> dict[int, int]:
    """Reaps every child that has ended; returns its exit code (128 + signal, as in a shell) by pid."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        code = os.waitstatus_to_exitcode(status)
        ended[pid] = code if code >= 0 else 128 - code


ASK = signal.SIGUSR2
"""The signal that requests the stacks of all Python threads.

`tiercheck.trainer.process` handles it."""


def dump_stacks() -> list[int]:
    """Signals all descendants that catch the signal, as it would end others; returns their pids."""
    asked = [pid for pid in sorted(descendants(os.getpid(), parents())) if _catches(pid)]
    print(
        f"tiercheck: no step for long; asking processes {asked} for their stacks", file=sys.stderr, flush=True
    )
    for pid in asked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, ASK)
    return asked


def _catches(pid: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    mask = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (ASK - 1) & 1)
