"""A world whose sidecars live in this process, whole, so that a test can reach into their threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from tests.sidecar.world import DEADLINE, World, until
from tiercheck_sidecar.app import Sidecar
from tiercheck_sidecar.model.config import SidecarConfig


class Resident:
    """One sidecar, with what `World` uses of a process."""

    def __init__(self, config: SidecarConfig) -> None:
        self.sidecar = Sidecar(config)
        self._loop = asyncio.new_event_loop()
        self._ends: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._live, name=f"sidecar-{config.worker}")
        self._thread.start()

    def _live(self) -> None:
        # Signals reach the main thread only.
        self._loop.add_signal_handler = lambda _, end: self._ends.append(end)  # type: ignore[method-assign, assignment, misc]
        self._loop.run_until_complete(self.sidecar.run())
        self._loop.close()

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def send_signal(self, number: int) -> None:
        """None is heard."""

    def kill(self) -> None:
        self._loop.call_soon_threadsafe(self._ends[0])

    def wait(self, timeout: float = DEADLINE) -> int:
        self._thread.join(timeout)
        assert not self._thread.is_alive()
        return 0


class Indoors(World):
    """`kill` ends a sidecar in good order."""

    def start(self, *workers: int) -> None:
        for worker in workers or range(self.workers):
            self._life += 1
            resident: Any = Resident(SidecarConfig.from_env(self.env(worker)))
            self._processes[worker] = resident
            until(lambda worker=worker: self.is_ready(worker), f"sidecar {worker} is ready")

    def logs(self, worker: int) -> str:
        return "in this process"

    def resident(self, worker: int) -> Resident:
        found: Any = self._processes[worker]
        assert isinstance(found, Resident)
        return found
