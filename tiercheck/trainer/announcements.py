"""Reports from which version a training starts, and the progress of a rank at each step."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from tiercheck.protocol.local import ReportResume
from tiercheck.protocol.report import Exact
from tiercheck.trainer.backends.backend import Backend, Offer, log
from tiercheck.trainer.proof.resume import PAGE
from tiercheck.trainer.save.saver import Saver

SECOND = (
    "another training of this process has been saved by its sidecar before, and a job keeps one: this one is "
    "not saved, and begins anew after a failure; make it a job of its own"
)


class Announcements:
    """Reports starts and resumes of one Checkpointer: rank 0 prints to stderr, any rank logs problems."""

    def __init__(self, backend: Backend, saver: Saver, rank: int) -> None:
        self._backend, self._saver, self._rank = backend, saver, rank
        self._where = ""

    def print_start(
        self,
        offer: Offer | None,
        verdict: ReportResume | None,
        *,
        left_out: str,
        ended: int,
        changes: Sequence[str],
    ) -> None:
        """Prints where training starts or continues.

        `verdict`: why nothing will be compared; `left_out`: what was found but is not taken; `ended`: the
        step at which the script had nothing left to do; `changes`: what the script was given that differs
        from the previous run.
        """
        if offer is None:
            self._print(f"starts at step 0: no version in {self._backend.place}")
        else:
            step = offer.version.step
            deltas = len(offer.deltas)
            chain = f" ({deltas} delta{'s' * (deltas != 1)})" if deltas else ""
            self._where = f"step {step} from {offer.source}{chain}"
            had = "; the training had ended there" if ended == step else ""
            why = f"; nothing to compare: {verdict.message}" if verdict is not None else ""
            self._print(f"continues after {self._where}{had}{why}")
        if self._rank == 0 and left_out:
            log.warning("%s", left_out)
        if self._rank == 0 and changes:
            log.warning(
                "goes on with what the version has: %s; to go on with new values, set them after restore()",
                "; ".join(changes),
            )
        if verdict is not None:
            self._saver.report(verdict)

    def report_verdict(self, verdict: ReportResume, is_suspicious: bool = False) -> None:
        """Prints and reports how the steps that were trained again compare with the previous run.

        `is_suspicious`: nothing could be compared, and there is evidence against the resume."""
        again = f"{verdict.steps} step{'s' * (verdict.steps != 1)} trained again"
        begin = f"resumed at {self._where}"
        if verdict.exact is Exact.PROVEN:
            self._print(f"{begin}; {again}, bitwise equal")
        elif verdict.exact is Exact.DIFFERS or is_suspicious:
            log.warning("%s: %s; see %s", begin, verdict.message, PAGE)
        else:
            self._print(f"{begin}; not comparable: {verdict.message}")
        self._saver.report(verdict)

    def _print(self, line: str) -> None:
        if self._rank == 0:
            print(f"tiercheck: {line}", file=sys.stderr, flush=True)


class StepProgress:
    """Reports the progress of one Checkpointer, in the training thread."""

    def __init__(self, backend: Backend, saver: Saver) -> None:
        self._backend, self._saver = backend, saver
        self._last_at: float | None = None
        self._seconds: float | None = None

    def begin(self) -> None:
        self._last_at = time.monotonic()

    def read_loss(self, loss: Any) -> float | None:
        """Returns the loss as a number, or None if it is not one. Waits for a tensor on a device."""
        try:
            return None if loss is None else float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        except Exception as error:  # invariant: no failure of ours stops training
            self._saver.warn(
                "Loss", f"the loss given to step is no number, and not looked at: {error!r}"[:300]
            )
            return None

    def step(self, step: int, loss: float | None) -> None:
        now = time.monotonic()
        if self._last_at is not None:
            seconds = now - self._last_at
            self._seconds = seconds if self._seconds is None else 0.9 * self._seconds + 0.1 * seconds
        self._last_at = now
        self.report_again(step, loss if loss is not None and math.isfinite(loss) else None)

    def report_again(self, step: int, loss: float | None = None) -> None:
        self._backend.progress(step, loss, self._seconds, self._saver.sanity.in_a_row)
