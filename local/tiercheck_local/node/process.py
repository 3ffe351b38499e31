"""Runs one process on the host that cannot outlive its agent's main thread.

That bond is per thread and is not inherited, so processes are started from the main thread only, and
descendants are found by their markers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tiercheck_local import markers
from tiercheck_local.controlplane import die_with_parent

_INHERITED = (
    "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "USER", "LOGNAME", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip
_POLITENESS = 5  # agents and control plane must answer in time while the training takes every core


class CannotStart(OSError):
    """The command does not exist or is not executable."""


def base_environment() -> dict[str, str]:
    """Returns the variables that precede a manifest's own; the agent's interpreter is first on PATH."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    interpreter = os.path.dirname(sys.executable)
    return {
        **kept,
        "PATH": interpreter + os.pathsep + os.environ.get("PATH", os.defpath),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # output is a file that users follow
    }


class HostProcess:
    """A running child. `exited` gives its exit code as a container runtime reports it (128 + signal)."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, log: Path) -> None:
        """Starts it in the main thread, in a running loop; appends output to `log`. Raises CannotStart."""
        path = (
            sys.executable
            if argv[0] in {"python", "python3"}
            else shutil.which(argv[0], path=env.get("PATH"))
        )
        if path is None:
            raise CannotStart(f"exec: {argv[0]!r}: executable file not found in $PATH")
        bound = partial(die_with_parent, os.getpid(), signal.SIGKILL)
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            try:
                self._child = subprocess.Popen(
                    [path, *argv[1:]],
                    env=dict(env),
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=bound,  # noqa: PLW1509 - only system calls, no lock to inherit
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise CannotStart(str(error)) from error
        # Not before exec: until then the agent waits for the child.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._child.pid, _POLITENESS)
        self._marker = env[markers.POD]
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self._watch = os.pidfd_open(self._child.pid)
        self._loop.add_reader(self._watch, self._reap)

    @property
    def pid(self) -> int:
        return self._child.pid

    def _reap(self) -> None:
        self._loop.remove_reader(self._watch)
        os.close(self._watch)
        code = self._child.wait()
        self.kill_rest()
        if not self.exited.done():
            self.exited.set_result(code if code >= 0 else 128 - code)

    def signal(self, number: int) -> None:
        """Signals the first process only, as a container runtime does."""
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL to everything in the container."""
        self.signal(signal.SIGKILL)
        self.kill_rest()

    def kill_rest(self) -> None:
        """Kills what the first process left behind: a container ends with its first process."""
        markers.send(markers.POD, self._marker, signal.SIGKILL)

    async def stop(self, grace: float) -> None:
        """Sends SIGTERM, then SIGKILL when `grace` seconds have passed."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await asyncio.shield(self.exited)
        self.kill()
        await asyncio.shield(self.exited)


FIRST_BACK_OFF = 10.0
_MOST, _FORGOTTEN = 30, 60
"""Multiples of the first wait: the longest wait, and the run time that resets the waits."""


class BackOff:
    """Computes how long a kubelet waits before it starts a container again.

    All times follow from `first`, in seconds. By default: at once after the first end, then 10 s, 20 s, 40 s
    and so on up to five minutes; after a run of ten minutes, the next end counts as the first again.
    """

    def __init__(self, first: float = FIRST_BACK_OFF) -> None:
        self._first, self._next = first, 0.0

    def after(self, life: float) -> float:
        """Returns the seconds to wait after an end, if the container had run for `life` seconds."""
        wait = 0.0 if life > _FORGOTTEN * self._first else self._next
        self._next = min(_MOST * self._first, max(self._first, 2 * wait))
        return wait


def go_duration(seconds: float) -> str:
    """Formats a duration as kubelets do: 500ms, 40s, 2m40s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{f'{minutes:.0f}m' if minutes else ''}{rest:g}s"
