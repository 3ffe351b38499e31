"""The training command as a process: what it starts ends with it, and says where it hangs.

Else the next attempt would meet its ghosts. A process that hangs is asked for its stacks before it is
stopped, since it will not be asked again.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

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


def kill_descendants(spared: int | None = None) -> set[int]:
    """SIGKILL to everything below this process, as torchrun puts its workers into sessions of their own.

    Not to the child `spared`. Returns what was there.
    """
    found = descendants(os.getpid(), parents()) - {spared}
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
(`tiercheck.trainer.process.process_end`)."""


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
