"""Records what happened in a run, as plain data from which every view is drawn."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiercheck.protocol.encoding import from_builtins
from tiercheck.protocol.plain_json import MOST_BYTES, Malformed, parse_json

TIERS = ("local", "peer", "remote")
"""Nearest first."""


class RecordError(ValueError):
    """The file does not hold a run's record; the message says what is wrong with it."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as the training command reported it. A step trained again appears once per
    attempt."""

    time: float
    """Unix seconds."""
    attempt: int
    step: int
    loss: float


@dataclass(frozen=True)
class FaultRecord:
    """One fault and the way back from it. Times are Unix seconds."""

    name: str
    """One or two words: process, pod, node, rack, all pods."""
    what: str
    """A sentence for people: "a node dies"."""
    target: str
    """What was hit."""
    injected_at: float
    detected_at: float
    restored_at: float
    """When every rank held the version that was decided on."""
    resumed_at: float
    """When the first step of the new attempt ended."""
    attempt: int
    """The attempt that this recovery led to."""
    restored_step: int
    lost_steps: int
    tiers: dict[str, int] = field(default_factory=dict)
    """How many ranks came back from "local", "peer", "parity" (rebuilt from what peers hold) and "remote"."""
    rank_sources: list[str] = field(default_factory=list)
    """For each rank, in order, where it came back from: "own memory", "worker 2 (rack b)", "S3"."""
    reason: str = ""
    """Why this version was chosen, as the controller said it."""
    cause: str = ""
    exact: str = ""
    """What the comparison of the steps trained again found, as in status.lastRecovery; empty: not known."""
    exact_message: str = ""

    @property
    def detect_seconds(self) -> float:
        """From the fault until the controller noticed it; never negative, although two clocks are
        compared."""
        return max(0.0, self.detected_at - self.injected_at)

    @property
    def restore_seconds(self) -> float:
        """From then until every rank held the version."""
        return max(0.0, self.restored_at - max(self.detected_at, self.injected_at))

    @property
    def start_seconds(self) -> float:
        """From then until the first new step: starting processes, rendezvous, loading, one step."""
        return max(0.0, self.resumed_at - max(self.restored_at, self.detected_at, self.injected_at))

    @property
    def total_seconds(self) -> float:
        """The sum of the three: from the fault until the first new step."""
        return self.detect_seconds + self.restore_seconds + self.start_seconds


@dataclass(frozen=True)
class WatermarkSample:
    """At `time` (Unix seconds) the newest version complete in `tier` was that of `step`."""

    time: float
    tier: str
    step: int


@dataclass(frozen=True)
class RunRecord:
    """A whole run and the uninterrupted run that it is compared with."""

    title: str
    machine: str
    """What it ran on, in words."""
    started: float
    """Unix seconds."""
    ended: float
    workers: int
    procs_per_worker: int
    nodes: dict[str, str]
    """Node name to rack name."""
    steps: list[StepRecord]
    """In the order in which they were trained."""
    faults: list[FaultRecord]
    """In the order in which they were injected."""
    reference_losses: dict[int, str]
    """Step to the loss of the uninterrupted run, exact (`float.hex`)."""
    run_losses: dict[int, str]
    """Step to the loss of this run, exact; of the last attempt that trained the step."""
    digests: dict[str, str]
    """Digest of the final parameters: "run" and "reference"."""
    bitwise_equal: bool
    first_difference: int | None = None
    """The first step whose loss differs."""
    verdict: str = ""
    """The comparison as a sentence; made from the other fields if empty."""
    samples: list[WatermarkSample] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return self.workers * self.procs_per_worker

    @property
    def trained_again(self) -> int:
        """Steps that were trained more than once."""
        return len(self.steps) - len({step.step for step in self.steps})

    @property
    def sentence(self) -> str:
        """The verdict for people."""
        if self.verdict:
            return self.verdict
        if self.bitwise_equal:
            return (
                f"All {len(self.reference_losses)} losses and the final parameters are bitwise equal "
                "to those of an uninterrupted run."
            )
        if self.first_difference is not None:
            return (
                f"The loss of step {self.first_difference} is the first that differs from the "
                "uninterrupted run."
            )
        return "The final parameters differ from those of the uninterrupted run."

    def write(self, path: Path) -> None:
        """Save as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def read(path: Path) -> RunRecord:
        """Load what `write` saved. Raises RecordError, OSError."""
        try:
            with open(path, "rb") as file:
                return RunRecord.from_builtins(parse_json(file.read(MOST_BYTES + 1)))
        except ValueError as error:
            raise RecordError(f"{path}: {error}") from error

    @staticmethod
    def from_builtins(raw: Any) -> RunRecord:
        """From what `parse_json` gave. Raises RecordError."""
        try:
            return from_builtins(raw, RunRecord)
        except Malformed as error:
            raise RecordError(f"not a run's record: {error}") from error
