"""Reads every line that a trainer printed from the nodes' disks, where it outlives the pod."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from testbed.node import Node


@dataclass(frozen=True)
class Step:
    """One line of rank 0."""

    step: int
    loss: str
    """In hexadecimal, so that equal means every bit."""
    attempt: int
    time: float


@dataclass
class _File:
    stream: IO[str]
    job: str
    rest: str = ""


@dataclass
class LossReader:
    """Follows the trainers' logs of all nodes until it is stopped."""

    nodes: Sequence[Node]
    _files: dict[Path, _File] = field(default_factory=dict)
    _steps: dict[str, list[Step]] = field(default_factory=dict)
    _digests: dict[str, str] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        threading.Thread(target=self._run, name="losses", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def steps(self, job: str) -> list[Step]:
        """In the order in which they were trained. `job`: namespace/name."""
        return list(self._steps.get(job, ()))

    def digest(self, job: str) -> str:
        return self._digests.get(job, "")

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            self._look()

    def _look(self) -> None:
        for node in self.nodes:
            for path in node.logs.glob("*/trainer/*.log"):
                if path not in self._files:
                    namespace, pod, _ = path.parents[1].name.split("_")
                    job = pod.rsplit("-", 2)[0]
                    try:
                        # Stays open: what was written before the kubelet removes the file can still be read.
                        self._files[path] = _File(open(path, errors="replace"), f"{namespace}/{job}")  # noqa: SIM115
                    except OSError:
                        continue
        for file in self._files.values():
            text = file.rest + file.stream.read()
            *lines, file.rest = text.split("\n")
            for line in lines:
                self._take(file.job, line)

    def _take(self, job: str, line: str) -> None:
        _, _, text = line.partition("{")
        try:
            found = json.loads("{" + text)
        except ValueError:
            return
        if "loss_hex" in found:
            step = Step(found["step"], found["loss_hex"], found["attempt"], found["time"])
            self._steps.setdefault(job, []).append(step)
        elif "digest" in found:
            self._digests[job] = found["digest"]


def gap_around(steps: Sequence[Step], since: float) -> float:
    """Seconds of the longest pause between two steps that ended after `since`; counts on until now."""
    times = [entry.time for entry in steps if entry.time >= since - 5]
    times.append(time.time())
    return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)
