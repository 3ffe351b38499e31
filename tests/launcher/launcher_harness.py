"""A real launcher process over a socket that the test serves, as the sidecar would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.scripted_sidecar import DEADLINE, ScriptedSidecar
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.local import Order


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def order(attempt: int, phase: Phase, **changes: object) -> Order:
    values = {
        "worker": 1,
        "workers": 2,
        "procs_per_worker": 1,
        "master_host": "127.0.0.9",
        "master_port": 29400,
    }
    return Order(attempt, phase, **{**values, **changes})  # type: ignore[arg-type]


Launch = Callable[..., "Launched"]
SLEEP = 'echo $$ "attempt $TIERCHECK_ATTEMPT"; exec sleep 600'


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def released(launch: Launch, script: str, attempt: int = 1, **options: object) -> Launched:
    """A launcher that was told at once to run this script."""
    launched = launch(shell(script), **options)
    launched.sidecar.say(order(attempt, Phase.RELEASE))
    return launched


class Launched:
    """`python -m tiercheck.launcher -- COMMAND` with its sidecar's end."""

    def __init__(
        self,
        run_dir: Path,
        command: Sequence[str],
        *,
        listen: bool = True,
        merge_errors: bool = False,
        cleared: str = "",
        program: Sequence[str] = ("-m", "tiercheck.launcher"),
        **environment: str,
    ) -> None:
        self.sidecar = ScriptedSidecar(run_dir, once=True, listen=listen)
        self.process = subprocess.Popen(
            [sys.executable, *program, "--", *command],
            env={name: value for name, value in os.environ.items() if name != cleared}
            | {"TIERCHECK_RUN_DIR": str(run_dir), "TIERCHECK_STOP_SECONDS": "5", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merge_errors else None,
            text=True,
        )

    def line(self) -> str:
        """Next line of the command's output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def exit_code(self) -> int:
        return self.process.wait(DEADLINE)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.sidecar.stop()
