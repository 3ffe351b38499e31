"""Defines what a control plane is; has the embedded one."""

from __future__ import annotations

import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tiercheck_local.controlplane import lifetime


class ControlPlaneFailed(RuntimeError):
    """The control plane did not start; the message holds the end of its log."""


class ControlPlane(ABC):
    """An API server that can be started and stopped. Also a context manager that does both."""

    kubeconfig: Path
    """Valid between `start` and `stop`."""

    @abstractmethod
    def start(self) -> None:
        """Returns when the API answers. Raises ControlPlaneFailed."""

    @abstractmethod
    def stop(self) -> None:
        """Ends every process that `start` made. May be called twice."""

    def __enter__(self) -> ControlPlane:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def wait_until(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, what: str, seconds: float = 60.0
) -> None:
    """Raises ControlPlaneFailed if the process ends first or `seconds` pass. The process is then stopped."""
    deadline = time.monotonic() + seconds
    while not ready():
        ended = process.poll()
        if ended is not None or time.monotonic() > deadline:
            lifetime.stop(process)
            why = f"ended with {ended}" if ended is not None else f"was not ready after {seconds:.0f} s"
            raise ControlPlaneFailed(f"{what} {why}. Its log ends with:\n{lifetime.tail(log)}")
        time.sleep(0.02)


class EmbeddedControlPlane(ControlPlane):
    """`history` is the number of changes that watches can resume over."""

    def __init__(self, directory: Path, port: int = 0, history: int = 10_000) -> None:
        self._directory = directory.absolute()
        self._arguments = ["--port", str(port), "--history", str(history)]
        self._process: subprocess.Popen[bytes] | None = None
        self.kubeconfig = self._directory / "kubeconfig"

    def start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self.kubeconfig.unlink(missing_ok=True)
        log = self._directory / "apiserver.log"
        command = [sys.executable, "-m", "tiercheck_local.apiserver", "--directory", str(self._directory)]
        process = self._process = lifetime.start([*command, *self._arguments], log)
        wait_until(self.kubeconfig.exists, process, log, "the embedded API server")

    def stop(self) -> None:
        if self._process is not None:
            lifetime.stop(self._process)
            self._process = None
