"""The control plane for a bare machine: our own API server as one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tiercheck_local.controlplane import lifetime
from tiercheck_local.controlplane.interface import ControlPlane
from tiercheck_local.controlplane.waiting import wait_until


class EmbeddedControlPlane(ControlPlane):
    """`history` is the number of changes that watches can resume over."""

    needs_controllers = True

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
