"""A real launcher process over a socket that the test serves, as the sidecar would."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tiercheck.protocol.directive import Phase
from tiercheck.protocol.encoding import from_json, to_json
from tiercheck.protocol.local import Hello, LauncherEvent, Order

DEADLINE = 90.0


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for `condition`; fail after the deadline."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.01)


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


class SidecarEnd:
    """Accepts the launcher, records what it says."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "sidecar.sock"
        self.hellos: list[Hello] = []
        self.events: list[LauncherEvent] = []
        self._connection: socket.socket | None = None
        self._listener: socket.socket | None = None

    def listen(self) -> None:
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._listener.settimeout(DEADLINE)
        self._thread = threading.Thread(target=self._serve, args=(self._listener,), daemon=True)
        self._thread.start()

    def say(self, message: Order) -> None:
        until(lambda: self._connection is not None, "the launcher connects")
        assert self._connection is not None
        self._connection.sendall(to_json(message) + b"\n")

    def hears(self, event: str, attempt: int) -> LauncherEvent:
        def found() -> list[LauncherEvent]:
            return [heard for heard in list(self.events) if (heard.event, heard.attempt) == (event, attempt)]

        until(lambda: bool(found()), f"{event} of attempt {attempt}; heard {self.events}")
        return found()[-1]

    def has_heard_all(self) -> bool:
        """Whether the launcher has hung up."""
        return not self._thread.is_alive()

    def vanish(self) -> None:
        for opened in (self._connection, self._listener):
            if opened is not None:
                with contextlib.suppress(OSError):
                    opened.shutdown(socket.SHUT_RDWR)
        self._thread.join(DEADLINE)
        for opened in (self._connection, self._listener):
            if opened is not None:
                opened.close()
        self._connection = self._listener = None
        self.path.unlink(missing_ok=True)

    def restart(self) -> None:
        """What was heard before is forgotten."""
        self.vanish()
        self.events.clear()
        self.listen()

    def _serve(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        try:
            with connection.makefile("rb") as lines:
                self.hellos.append(from_json(lines.readline(), Hello))
                self._connection = connection
                for line in lines:
                    self.events.append(from_json(line, LauncherEvent))
        except (OSError, ValueError):
            return


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
        self.sidecar = SidecarEnd(run_dir)
        if listen:
            self.sidecar.listen()
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
        self.sidecar.vanish()
