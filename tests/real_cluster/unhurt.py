"""Trains the same job without any fault, to compare every loss with its."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from losses import LossReader, Step
from stage import TRAINING, job, wait_until_gone
from testbed.cluster import Testbed
from training import Training

_MORE = 100
"""Steps beyond those asked for, which the next one to ask may need."""


@dataclass
class UnhurtRun:
    """One worker with as many processes as the other job has, made when its losses are wanted."""

    testbed: Testbed
    reader: LossReader
    _losses: dict[int, dict[int, str]] = field(default_factory=dict)

    def compare(self, trained: Sequence[Step], ranks: int) -> tuple[list[Step], set[int]]:
        """The steps whose loss differs in any bit, and those that are missing."""
        last = max(entry.step for entry in trained)
        right = self._up_to(last, ranks)
        wrong = [entry for entry in trained if entry.loss != right[entry.step]]
        return wrong, set(range(1, last + 1)) - {entry.step for entry in trained}

    def assert_same(self, training: Training, ranks: int) -> None:
        """Deletes the job first."""
        self.testbed.kubectl("-n", training.namespace, "delete", "tcj", training.name, "--ignore-not-found")
        wait_until_gone(self.testbed, training.namespace, "tcj,pods")
        wrong, missing = self.compare(training.steps, ranks)
        assert not wrong, f"{len(wrong)} losses differ from those of an unhurt run, first {wrong[0]}"
        assert not missing, f"{len(missing)} steps are missing, first {min(missing)}"

    def _up_to(self, last: int, ranks: int) -> dict[int, str]:
        known = self._losses.setdefault(ranks, {})
        if last not in known:
            manifest = job(f"unhurt-{ranks}-{last}", workers=1, procsPerWorker=ranks)
            manifest["spec"]["tiers"]["peer"] = {"copies": 0}
            reference = Training(self.testbed, self.reader, TRAINING, manifest["metadata"]["name"])
            reference.apply(manifest)
            try:
                reference.wait_for_step(last + _MORE, seconds=3000)
            finally:
                self.testbed.kubectl("-n", TRAINING, "delete", "tcj", reference.name, "--wait=false")
                reference.stop_watching()
                wait_until_gone(self.testbed, TRAINING, "pods")
            known |= {entry.step: entry.loss for entry in reference.steps}
        return known
