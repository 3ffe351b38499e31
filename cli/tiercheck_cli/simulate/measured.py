"""Takes the times of a simulation from recoveries that jobs have been through, and says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tiercheck.protocol import names
from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_cli.files import documents
from tiercheck_operator.planning.simulation.measured import measure, measured_recoveries
from tiercheck_operator.planning.simulation.scenario import RecoveryTimes
from tiercheck_operator.planning.simulation.simulation import PROCESS
from tiercheck_operator.planning.topology import Topology


@dataclass(frozen=True)
class Told:
    """What the command line says of every recovery; None: nothing."""

    detect: float | None = None
    restart: float | None = None
    replace: float | None = None

    def over(self, times: RecoveryTimes) -> RecoveryTimes:
        """The same of every kind of failure."""
        said = {key: value for key, value in self.__dict__.items() if value is not None}
        return times.changed(lambda each: replace(each, **said))


def jobs_in(paths: Sequence[str]) -> list[Mapping[str, Any]]:
    """Of `kubectl get tcj -o json` (or yaml), one job or a list in each file. Raises CannotDo."""
    found: list[Mapping[str, Any]] = []
    for path in paths:
        before = len(found)
        for document in documents(path):
            items = document.get("items")
            entries = items if isinstance(items, list) else [document]
            found += [each for each in entries if isinstance(each, dict) and each.get("kind") == names.KIND]
        if len(found) == before:
            raise CannotDo(f"{path} holds no {names.KIND}; make it with: kubectl get tcj -o json", USAGE)
    return found


def times_of(
    jobs: Sequence[Mapping[str, Any]], usual: RecoveryTimes, told: Told, topology: Topology
) -> tuple[RecoveryTimes, tuple[str, ...]]:
    """(the times, where they are from, as sentences). No sentence: no job tells of a recovery, and they are
    the usual ones.
    """
    recoveries = measured_recoveries(jobs)
    if not recoveries:
        return told.over(usual), ()
    found = measure(recoveries, usual)
    times = told.over(found.for_levels(topology.level_names))
    whose = ", ".join(dict.fromkeys(str((job.get("metadata") or {}).get("name") or "a job") for job in jobs))
    count = len(recoveries)
    lines = [
        f"{count} recover{'y' if count == 1 else 'ies'} of {whose} (means; all of it stands for this size)"
    ]
    for kind, number in found.counts.items():
        own = found.times.kinds[kind]
        wait = "" if kind == PROCESS else f", a successor after {own.replace:.1f} s"
        lines.append(
            f"{number} x {kind}: noticed after {own.detect:.1f} s{wait}, the first step {own.restart:.1f} s "
            "after the state"
        )
    restore = times.restore
    lines.append(
        f"restores take {restore.local:.3g} s from own memory, {restore.peer:.3g} s from a peer, "
        f"{restore.remote:.3g} s from the remote tier"
    )
    said = [f"{key} {value:g} s" for key, value in told.__dict__.items() if value is not None]
    return times, (*lines, *found.derived, *([f"as told: {', '.join(said)}"] if said else []))
