"""Runs the training command: what it starts ends with it, what it writes is kept, a hang is located.

Else the next attempt would meet its ghosts. A process that hangs is asked for its stacks before it is
stopped, since it will not be asked again. Its last lines go into the message about its end, and the
container's cgroup tells whether the kernel sent a SIGKILL for want of memory.
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
"""Bytes of output that are kept: the report that torchrun ends with has some 3000 of them."""
_LINES, _CHARACTERS = 5, 600
"""Of the output that are told."""
_PIECE, _PIECES = 4096, 64
"""Bytes that a pipe with room takes at once (PIPE_BUF), and how many such pieces are passed on in a turn."""
_TORCHRUN = re.compile(
    rb"^.*elastic/multiprocessing/api\.py:\d+\] (?:failed \(exitcode|Sending process)", re.M
)
"""Where the words of a rank end and torchrun's report about them begins."""


class RelayedOutput:
    """A pipe whose content goes on to the launcher's own stderr."""

    def __init__(self) -> None:
        reading, self.writing = os.pipe()
        os.set_blocking(reading, False)
        self._reading = open(reading, "rb", buffering=0)  # noqa: SIM115
        self._ended = False
        self.blocked = False
        """Whether nobody took what was last written to stderr: then the command waits, as it would without
        us, and `relay` is to be called again in a moment."""
        self._said = b""

    @property
    def channel(self) -> FileIO | None:
        """For a selector; None: nothing can be passed on now, or no more comes."""
        return None if self._ended or self.blocked else self._reading

    def relay(self) -> None:
        """Passes on what was written, without waiting for anything."""
        for _ in range(_PIECES):
            self.blocked = _is_full(_STDERR)
            if (channel := self.channel) is None or (piece := channel.read(_PIECE)) is None:
                return
            self._ended = not piece
            self._said = (self._said + piece)[-_KEPT:]
            with contextlib.suppress(OSError, ValueError):
                os.write(_STDERR, piece)

    def forget(self) -> None:
        """Another command begins to write."""
        self._said = b""

    def last_lines(self) -> str:
        """What was written last, in one line; empty: nothing."""
        self.relay()
        report = _TORCHRUN.search(self._said)
        said = (self._said[: report.start()].strip() if report else b"") or self._said
        lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
        return " / ".join(lines[-_LINES:])[-_CHARACTERS:]

    def close_writing(self) -> None:
        """Once the command has it; so that its end is seen."""
        os.close(self.writing)

    def close(self) -> None:
        """Passes on what was written last, and takes no more."""
        self.relay()
        self._reading.close()


def _is_full(descriptor: int) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return not select.select([], [descriptor], [], 0)[1]
    return False  # it is closed


CGROUP = "/sys/fs/cgroup"
"""Where a container sees its own cgroup."""
_KILLS = (("memory.events", "oom_kill"), ("memory/memory.oom_control", "oom_kill"))
"""File and key, of cgroup v2 and v1."""
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
_PEAKS = ("memory.peak", "memory/memory.max_usage_in_bytes")
_UNLIMITED = 1 << 60
"""cgroup v1 spells "no limit" as a number of about this size."""


class OutOfMemory:
    """Of the cgroup at `folder`. What cannot be read counts as nothing seen: then the kubelet's word is all
    there is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = self._kills()

    def begin(self) -> None:
        """A command starts: earlier kills are not its own."""
        self._before = self._kills()

    def verdict(self) -> str:
        """A sentence with numbers if the kernel has killed for want of memory since `begin`; empty if not."""
        number = self._kills() - self._before
        if number <= 0:
            return ""
        limit, peak = self._first(_LIMITS), self._first(_PEAKS)
        told = [f"the limit is {_gib(limit)}"] if limit is not None and limit < _UNLIMITED else []
        told += [f"the most that was used is {_gib(peak)}"] if peak is not None else []
        numbers = f"; {', '.join(told)}" if told else ""
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
            try:
                return int((self._folder / name).read_text())
            except (OSError, ValueError):  # not there, or "max"
                continue
        return None


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_NAMED = 4
"""Processes that a sentence names."""
_STATES = {
    "D": "which waits for a driver or a file system (state D)",
    "Z": "whose first thread has ended and another one has not",
}


def adopt_orphans() -> None:
    """Make this process the parent of whatever its descendants leave behind, as PID 1 is anyway."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    descriptors: Sequence[int] = (),
    output: int | None = None,
    errors: int | None = None,
) -> int:
    """Start `command` in a session of its own and return its pid; it inherits `descriptors`, and writes to
    `output` and `errors` if given.

    Raises OSError if it cannot be executed.
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
    process.returncode = 0  # the launcher's own loop waits for it; this keeps Popen from trying
    return process.pid


def send_signal(pid: int, number: int) -> None:
    """To the command's whole process group."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


def kill_descendants(spared: Collection[int] = ()) -> set[int]:
    """SIGKILL to everything below this process, as torchrun puts its workers into sessions of their own.

    Not to the children `spared`, and to nothing below them. Returns what was there.
    """
    parent_of = {pid: parent for pid, parent in parents().items() if pid not in spared}
    found = descendants(os.getpid(), parent_of)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return found


def parents() -> dict[int, int]:
    """Parent of every process that can be seen, those left out of which nothing lives any more."""
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
    """Name of the signal that ended a command with this exit code; empty: it ended by itself."""
    return signal.Signals(code - 128).name if code > 128 and code - 128 in set(signal.Signals) else ""


def describe_stuck(pids: Collection[int]) -> str:
    """Which processes do not end, and in which state they are, as a clause."""
    told = []
    for pid in sorted(pids)[:_NAMED]:
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        state = rest.split()[0]
        told.append(f"{pid} ({name}), {_STATES.get(state, f'in state {state}')}")
    more = f", and {len(pids) - _NAMED} more" if len(pids) > _NAMED else ""
    return f"SIGKILL does not end process {', '.join(told)}{more}"


def _has_living_thread(process: Path) -> bool:
    """Of one whose first thread has ended. Another one may be stuck in a driver, and holds on to all memory,
    also the GPU's."""
    try:
        states = [
            (thread / "stat").read_text().rpartition(")")[2].split()[0]
            for thread in (process / "task").iterdir()
        ]
    except (OSError, IndexError):
        return False
    return any(state not in "ZX" for state in states)


def descendants(root: int, parent_of: Mapping[int, int]) -> set[int]:
    """Every process below `root`."""
    below: set[int] = set()
    edge = {root}
    while edge:
        edge = {pid for pid, parent in parent_of.items() if parent in edge} - below
        below |= edge
    return below


def reap() -> dict[int, int]:
    """Collect every child that has ended: pid -> exit code as the shell counts (128 + signal)."""
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
"""The trainer library answers it with the stack of every Python thread
(`tiercheck.trainer.process`)."""


def dump_stacks() -> list[int]:
    """Ask every process below this one that catches the signal: any other would end by it. Their pids."""
    asked = [pid for pid in sorted(descendants(os.getpid(), parents())) if _catches(pid)]
    print(
        f"tiercheck: no step for long; asking processes {asked} for their stacks", file=sys.stderr, flush=True
    )
    for pid in asked:
        try:
            os.kill(pid, ASK)
        except ProcessLookupError:
            continue
    return asked


def _catches(pid: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    mask = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (ASK - 1) & 1)
