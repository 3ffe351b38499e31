"""What a rank says of itself at each step: how far it is, its loss, and how long a step takes."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from tiercheck.trainer.backends.backend import Backend
from tiercheck.trainer.save.saver import Saver


class StepProgress:
    """Of one Checkpointer, in the training thread."""

    def __init__(self, backend: Backend, saver: Saver) -> None:
        self._backend, self._saver = backend, saver
        self._last_at: float | None = None
        self._seconds: float | None = None

    def begin(self) -> None:
        """The first step begins now."""
        self._last_at = time.monotonic()

    def read_loss(self, loss: Any) -> float | None:
        """As a number, if it is one. That of a device is waited for."""
        try:
            return None if loss is None else float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        except Exception as error:  # invariant: no failure of ours stops training
            self._saver.warn(
                "Loss", f"the loss given to step is no number, and not looked at: {error!r}"[:300]
            )
            return None

    def step(self, step: int, loss: float | None) -> None:
        """It has ended."""
        now = time.monotonic()
        if self._last_at is not None:
            seconds = now - self._last_at
            self._seconds = seconds if self._seconds is None else 0.9 * self._seconds + 0.1 * seconds
        self._last_at = now
        self.tell(step, loss if loss is not None and math.isfinite(loss) else None)

    def tell(self, step: int, loss: float | None = None) -> None:
        """Say again where it is."""
        self._backend.progress(step, loss, self._seconds, self._saver.sanity.in_a_row)
