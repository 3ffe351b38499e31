"""What a control plane is to the rest of the laptop cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType


class ControlPlaneFailed(RuntimeError):
    """The control plane did not start; the message holds the end of its log."""


class ControlPlane(ABC):
    """An API server that can be started and stopped. Also a context manager that does both."""

    kubeconfig: Path
    """Valid between `start` and `stop`."""
    needs_controllers: bool
    """Whether scheduler, node life-cycle and garbage collection have to be brought along."""

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
