"""Records a run (rank 0's output and the failures), and a run without failures.

The training script prints one JSON object per step. Other lines (warnings, tracebacks) are skipped, but stay
in the log files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Exact, RankRestore
from tiercheck_local import controlplane
from tiercheck_local.markers import free_ports
from tiercheck_local.running import WaitTimeout


@dataclass(frozen=True)
class Step:
    """One optimizer step as rank 0 printed it. `loss_hex` is exact (`float.hex`)."""

    step: int
    attempt: int
    loss: float
    loss_hex: str
    time: float


@dataclass(frozen=True)
class Digest:
    """Digest of the parameters of all ranks after the last step."""

    steps: int
    value: str


def parse(line: str) -> Step | Digest | None:
    """Parses a line of the training command's output; returns None for other lines."""
    if not line.startswith("{"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if "digest" in record:
        return Digest(steps=int(record["steps"]), value=str(record["digest"]))
    if "loss_hex" in record and record.get("rank", 0) == 0:
        return Step(
            step=int(record["step"]),
            attempt=int(record["attempt"]),
            loss=float(record["loss"]),
            loss_hex=str(record["loss_hex"]),
            time=float(record["time"]),
        )
    return None


@dataclass
class TrainingLog:
    """Everything rank 0 has printed so far, in the order it was written. `poll()` reads what is new."""

    files: Path
    """Folder with one folder per pod."""
    pattern: str
    """Glob of worker 0's trainer logs, below `files`."""
    steps: list[Step] = field(default_factory=list)
    digest: Digest | None = None
    _offsets: dict[Path, int] = field(default_factory=dict)

    def poll(self) -> list[Step]:
        """Reads new lines; returns the new steps."""
        fresh: list[Step] = []
        for path in sorted(self.files.glob(self.pattern)):
            for line in self._new_lines(path):
                record = parse(line)
                if isinstance(record, Step):
                    fresh.append(record)
                elif isinstance(record, Digest):
                    self.digest = record
        fresh.sort(key=lambda step: step.time)
        self.steps.extend(fresh)
        return fresh

    def _new_lines(self, path: Path) -> Iterator[str]:
        offset = self._offsets.get(path, 0)
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        whole, _, _rest = data.rpartition(b"\n")  # a half-written last line is read next time
        if whole:
            self._offsets[path] = offset + len(whole) + 1
            yield from whole.decode(errors="replace").splitlines()

    @property
    def last(self) -> Step | None:
        return self.steps[-1] if self.steps else None


@dataclass(frozen=True)
class RunVerdict:
    """The result of comparing a run with the reference.

    `equal` only if every step was trained, every loss ever printed for a step (steps trained again included)
    has the reference's bits, and the final parameters have the same digest."""

    equal: bool
    sentence: str


def compare(
    run: Sequence[Step], run_digest: Digest | None, reference: Sequence[Step], wanted: Digest | None
) -> RunVerdict:
    """Returns the verdict on `run`. Missing evidence is never equality."""
    expected = {step.step: step.loss_hex for step in reference}
    seen = {step.step for step in run}
    if not expected or wanted is None:
        return RunVerdict(False, "the uninterrupted run did not finish, so there is nothing to compare with")
    missing = sorted(set(expected) - seen)
    if missing:
        return RunVerdict(
            False, f"step {missing[0]} was never trained ({len(missing)} of {len(expected)} missing)"
        )
    for step in sorted(run, key=lambda step: step.step):
        if step.loss_hex != expected.get(step.step):
            return RunVerdict(
                False,
                f"the loss of step {step.step} (attempt {step.attempt}) is {step.loss_hex}, "
                f"the uninterrupted run had {expected.get(step.step)}",
            )
    if run_digest is None:
        return RunVerdict(False, "the run printed no digest of its final parameters")
    if run_digest != wanted:
        return RunVerdict(
            False,
            f"all losses agree, but the final parameters have digest {run_digest.value[:16]}, not "
            f"{wanted.value[:16]}",
        )
    return RunVerdict(
        True,
        f"all {len(expected)} losses and the digest of the final parameters are bitwise equal to an "
        "uninterrupted run",
    )


def run_uninterrupted(
    command: Sequence[str], ranks: int, deadline: float, on_step: Callable[[Step], None] = lambda step: None
) -> tuple[list[Step], Digest | None]:
    """Returns all steps and the final digest of `command` on `ranks` processes.

    `deadline` is in seconds. Raises WaitTimeout with the end of the output of a rank that failed.
    """
    with tempfile.TemporaryDirectory(prefix="tiercheck-reference-") as folder:
        logs = Path(folder)
        (port,) = free_ports(1)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                directory = logs / f"rank-{rank}"
                directory.mkdir()
                # A folder of its own: no other process finds what the command saves.
                environment = _environment(rank, ranks, port)
                processes.append(
                    controlplane.start_child(command, directory / "out.log", environment, folder=directory)
                )
            log = TrainingLog(logs, "rank-0/out.log")
            end = time.monotonic() + deadline
            while not all(process.poll() == 0 for process in processes):
                for step in log.poll():
                    on_step(step)
                failed = next((rank for rank, process in enumerate(processes) if process.poll()), None)
                if failed is not None or time.monotonic() > end:
                    why = "it took too long"
                    if failed is not None:
                        why = f"rank {failed} exited with {processes[failed].returncode}"
                    tail = controlplane.tail_of(logs / f"rank-{failed or 0}" / "out.log")
                    raise WaitTimeout(f"the uninterrupted run failed: {why}\n{tail}")
                time.sleep(0.2)
            for step in log.poll():
                on_step(step)
            return log.steps, log.digest
        finally:
            for process in processes:
                controlplane.stop_child(process)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TIERCHECK_")}
    return {
        **inherited,
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


# The failures on the way, and what the comparison found.


@dataclass(frozen=True)
class FaultRecord:
    """One failure and the recovery from it. Times are Unix seconds."""

    name: str
    """One or two words: process, pod, node, rack, all pods."""
    what: str
    """A sentence for users: "a node dies"."""
    target: str
    injected_at: float
    detected_at: float
    restored_at: float
    """The time when every rank held the version that was chosen."""
    resumed_at: float
    """The time when the first step of the new attempt ended."""
    attempt: int
    restarted: int
    restored_step: int
    lost_steps: int
    tiers: Mapping[str, int]
    """The number of ranks restored from "local", "peer", "parity" (rebuilt from peers) and "remote"."""
    rank_sources: Sequence[str] = ()
    """The source of each rank, in order: "own memory", "worker 2 (rack b)", "S3"."""
    reason: str = ""
    cause: str = ""
    exact: str = ""
    """The result of comparing the steps trained again, as in status.lastRecovery; empty: not known."""
    exact_message: str = ""

    @property
    def detect_seconds(self) -> float:
        """Returns the time from fault to detection; never negative, though two clocks are compared."""
        return max(0.0, self.detected_at - self.injected_at)

    @property
    def restore_seconds(self) -> float:
        """Returns the time from the detection until every rank held the version."""
        return max(0.0, self.restored_at - max(self.detected_at, self.injected_at))

    @property
    def start_seconds(self) -> float:
        """Returns the time from then to the first new step: process start, rendezvous, loading, one step."""
        return max(0.0, self.resumed_at - max(self.restored_at, self.detected_at, self.injected_at))

    @property
    def total_seconds(self) -> float:
        """Returns the sum of the three: the time from the fault to the first new step."""
        return self.detect_seconds + self.restore_seconds + self.start_seconds


@dataclass(frozen=True)
class RunRecord:
    """A whole run and the uninterrupted run that it is compared with."""

    title: str
    machine: str
    started: float
    """Unix seconds."""
    ended: float
    nodes: Mapping[str, str]
    """Node name to rack name."""
    steps: Sequence[Step]
    """The steps in the order in which they were trained."""
    faults: Sequence[FaultRecord]
    reference: Sequence[Step]
    digest: Digest | None
    reference_digest: Digest | None
    verdict: RunVerdict


def count_tiers(ranks: Mapping[int, RankRestore]) -> dict[str, int]:
    """Returns the number of ranks per tier that they were restored from."""
    known = [rank for rank in ranks.values() if rank.rebuilt or rank.tier is not None]
    return dict(Counter("parity" if rank.rebuilt else str(rank.tier and rank.tier.value) for rank in known))


def rank_source(restore: RankRestore, rank: int, racks: Mapping[int, str]) -> str:
    """Describes where one rank was restored from. `racks`: the rack of each worker after the recovery."""
    if restore.rebuilt:
        return "parity"
    if restore.tier is Tier.LOCAL:
        return "own memory"
    if restore.tier is Tier.PEER:
        return f"worker {restore.worker} ({racks.get(restore.worker or 0, 'unknown rack')})"
    if restore.tier is Tier.REMOTE:
        return "S3"
    return f"rank {rank}: from scratch"


def with_resumes(faults: Sequence[FaultRecord], ended: Mapping[int, Mapping[str, Any]]) -> list[FaultRecord]:
    """Returns `faults` with what the comparison after each found. `ended`: their recoveries, by attempt.

    It is known some steps after a recovery has ended, so not when the fault is recorded.
    """
    found = [ended.get(fault.attempt, {}) for fault in faults]
    return [
        replace(fault, exact=str(entry.get("exact", "")), exact_message=str(entry.get("exactMessage", "")))
        for fault, entry in zip(faults, found, strict=True)
    ]


def add_resumes(verdict: RunVerdict, faults: Sequence[FaultRecord]) -> RunVerdict:
    """Returns `verdict`, but not equal if a resume differs."""
    for fault in faults:
        if fault.exact == Exact.DIFFERS.value:
            return replace(verdict, equal=False, sentence=f"a resume differs: {fault.exact_message}")
    return verdict
