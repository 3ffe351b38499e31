"""Measures how long training waits for a snapshot, against a plain copy and against others.

What counts is the time that the training thread spends in the saving call and in hooks around the update.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Figure, Outcome, Scale, Sense, bytes_text, scratch, seconds_text
from benchmarks.job import Job, until
from benchmarks.peers.environment import DLROVER, NVRX, OURS, CannotInstall, Environment

THREADS = 1
"""Cores that a step computes on. One is left for what happens beside it, as on a host whose devices do the
computing."""
LONG_STEP_TOKENS = 96


@dataclass(frozen=True)
class System:
    """One contestant."""

    name: str
    module: str
    environment: Environment = OURS
    mode: str = ""
    long_step: bool = True


TIERCHECK = System("TierCheck", "ours")
WORST = System("TierCheck, step shorter than the copy", "ours", long_step=False)
DCP = (
    System("torch DCP async_save, thread", "dcp", mode="thread"),
    System("torch DCP async_save, process", "dcp", mode="process"),
    System("torch DCP async_save, DefaultStager", "dcp", mode="stager"),
    System("torch_checkpointing (experimental)", "dcp", mode="experimental"),
)
OTHERS = (
    System("DLRover 0.6.1 flash checkpoint", "dlrover", DLROVER),
    System("NVRx 0.4.1 local, synchronous", "nvrx", NVRX, mode="sync"),
    System("NVRx 0.4.1 local, asynchronous", "nvrx", NVRX, mode="async"),
)
PEERS = DCP + OTHERS


def run(scale: Scale) -> Outcome:
    """Rounds over all systems at the first size; one round at the others."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    problems: dict[str, str] = {}
    for size in scale.states:
        for _ in range(scale.rounds if size == scale.judged else 1):
            for system in (TIERCHECK, WORST, *PEERS):
                if system.name in problems:
                    continue
                print(f"  {system.name}, {bytes_text(size)}", file=sys.stderr, flush=True)
                try:
                    result = measure(system, size, scale)
                except (CannotInstall, RuntimeError) as error:
                    problems[system.name] = str(error)
                    continue
                found.setdefault(system.name, {}).setdefault(str(size), []).append(result)
    return Outcome(figures(found, problems, scale), {"systems": found, "problems": problems})


def measure(
    system: System, size: int, scale: Scale, look: Callable[[Job], object] = lambda _: None, slots: int = 3
) -> dict[str, Any]:
    """One process: train with `system` saving a state of `size` bytes. Raises CannotInstall, or RuntimeError
    if it fails.

    If it is ours, the sidecar has room for `slots` snapshots, and `look` sees it afterwards.
    """
    with scratch() as folder:
        if system.module != "ours":
            return _process(system, size, scale, folder, {})
        # And some room for headers.
        with Job(limit=slots * size + size // 4 + (64 << 20), every=2 * _half(system)) as job:
            job.begin()
            found = _process(system, size, scale, folder, job.trainer_env(0))
            taken = until(lambda: job.report(0).counters.captured, "a snapshot is sealed")
            if taken < scale.cycles:
                raise RuntimeError(f"only {taken} snapshots were taken, so nothing else was blocked for them")
            look(job)
            return found


def _half(system: System) -> int:
    return 2 if system.long_step else 4


def _process(system: System, size: int, scale: Scale, folder: Path, env: dict[str, str]) -> dict[str, Any]:
    answer = folder / "answer.json"
    arguments = ["--state-bytes", size, "--tokens", LONG_STEP_TOKENS if system.long_step else 0]
    arguments += ["--cycles", scale.cycles, "--half", _half(system), "--threads", THREADS]
    arguments += ["--folder", folder, "--mode", system.mode, "--answer", answer]
    return system.environment.run(f"benchmarks.peers.{system.module}", arguments, answer, env)


def spread(results: list[dict[str, Any]], key: str) -> tuple[float, float]:
    """(least, median) over all cycles of all rounds. What else runs on the machine only ever adds, so the
    least is judged, of everybody."""
    values = [cycle[key] for result in results for cycle in result["cycles"]]
    return min(values), statistics.median(values)


def figures(
    found: dict[str, dict[str, list[dict[str, Any]]]], problems: dict[str, str], scale: Scale
) -> list[Figure]:
    """Rows: ours against the copy, then against each peer, at the judged size."""
    size = str(scale.judged)
    rows: list[Figure] = []

    def of(system: System) -> list[dict[str, Any]]:
        return found.get(system.name, {}).get(size, [])

    for system, name, bound in (
        (TIERCHECK, "training blocked per snapshot, step longer than the copy", 0.1),
        (WORST, "training blocked per snapshot, step shorter than the copy", 1.1),
    ):
        results = of(system)
        if not results:
            rows.append(Figure(name, bound=bound, note=problems.get(system.name, "no result")))
            continue
        copy = min(result["copy_seconds"] for result in results)
        blocked, usual = spread(results, "blocked")
        step, _ = spread(results, "step")
        against = f"copy of {bytes_text(results[0]['state_bytes'])}: {seconds_text(copy)}"
        rows.append(
            Figure(
                name,
                seconds_text(blocked),
                against,
                blocked / copy,
                bound,
                note=f"median {seconds_text(usual)}; a step without a snapshot takes {seconds_text(step)}",
            )
        )
    ours = of(TIERCHECK)
    for system in PEERS:
        name, bound = f"training blocked, against {system.name}", 5.0 if system in DCP else 1.0
        theirs = of(system)
        if not (theirs and ours):
            note = problems.get(system.name) or problems.get(TIERCHECK.name, "no result")
            rows.append(Figure(name, bound=bound, sense=Sense.AT_LEAST, note=note))
            continue
        (mine, my_usual), (other, usual) = spread(ours, "blocked"), spread(theirs, "blocked")
        rows.append(
            Figure(
                name,
                seconds_text(mine),
                seconds_text(other),
                other / mine,
                bound,
                Sense.AT_LEAST,
                note=f"medians {seconds_text(my_usual)} and {seconds_text(usual)}",
            )
        )
    return rows
