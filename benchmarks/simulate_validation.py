"""Checks whether the simulator foretells what a job's failures cost.

On the laptop cluster a job with the real operator is struck again and again, by seed. Every other recovery
of each kind gives its parts, as its status tells them; from these the simulator foretells the time that the
others cost, which the trainers' own lines tell. Real kubelets: the same with the two runs of their page.
"""

from __future__ import annotations

import itertools
import random
import re
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Figure, Outcome, Scale
from tiercheck_cli.simulate.play import JobLife, Run
from tiercheck_cli.simulate.scenario import (
    ALL,
    DOMAIN,
    NODE,
    POD,
    PROCESS,
    RecoveryTimes,
    Saving,
    Scenario,
    measure,
    measured_recoveries,
)
from tiercheck_local.stage import tier_step
from tiercheck_operator.model.conditions import Cause
from tiercheck_operator.planning.placement.placement import Placement, PlacementPolicy, WorkerSite, place
from tiercheck_operator.planning.topology import Topology, levels_from_spec

WITHIN = 0.2
WORKERS, PACE, SEED = 3, 0.2, 0
REMOTE_EVERY = 20
"""Steps, as the job of the chaos campaign has it."""
FAULTS = {"crash": PROCESS, "force delete": POD, "evict": POD, "node": NODE, "rack": DOMAIN, "every pod": ALL}
TIMES_EACH = {"crash": 6, "force delete": 4, "evict": 4, "node": 6, "rack": 4, "every pod": 4}
PATIENCE = 240.0
PAGE = ROOT / "docs" / "benchmarks" / "real-cluster.md"


@dataclass(frozen=True)
class Struck:
    """One failure of the run, and what it cost. Moments are Unix seconds."""

    fault: str
    at: float
    victims: tuple[int, ...]
    began: float
    """When training had begun to go on after the failure before."""
    before: float
    """The last new step before it."""
    after: float
    """The first new one after it."""
    steps: int
    """New ones since `began`."""
    told: Mapping[str, Any]
    """Of the status, about this recovery."""
    remote_behind: int
    """Steps that the remote tier was behind."""

    def lost(self, pace: float) -> float:
        """Seconds that trained nothing new."""
        return self.after - self.before - pace


@dataclass
class Record:
    """Of the whole run."""

    struck: list[Struck] = field(default_factory=list)
    pace: float = PACE
    """Seconds of a step where nothing happens."""
    deltas: bool = True
    snapshot_every: int = 5


def run(scale: Scale) -> Outcome:
    """The laptop's and the real cluster's rows."""
    return outcome(strike(1 if scale.quick else None))


def outcome(record: Record) -> Outcome:
    """Of a run that is over."""
    found = foretell(record)
    share = [each["foretold"] / each["measured"] for each in found["by kind"].values() if each["measured"]]
    held = found["held out"]
    held["note"] += f"; by fault {min(share):.2f} to {max(share):.2f} x" if share else ""
    real = real_rows(PAGE.read_text())
    differ = statistics.median(abs(row["next"][0] / row["next"][1] - 1) for row in real)
    shares = [foretell_rows(every_other(real, first)) for first in (0, 1)]
    worst = max(shares, key=lambda each: abs(each["foretold"] / each["measured"] - 1))
    figures = [
        _figure("laptop: time lost, foretold from other recoveries", **held),
        _figure(
            "real kubelets: time lost, the worse of two halves", note=f"rows differ by {differ:.0%}", **worst
        ),
    ]
    data = {
        "laptop": [asdict(each) | {"lost": each.lost(record.pace)} for each in record.struck],
        "found": found,
        "halves": shares,
        "pace": record.pace,
        "kubelets": real,
    }
    return Outcome(figures, data)


def _figure(name: str, *, foretold: float, measured: float, note: str = "") -> Figure:
    ratio = foretold / measured if measured else None
    away = None if ratio is None else abs(ratio - 1.0)
    return Figure(
        name,
        f"{foretold:.0f} s",
        f"{measured:.0f} s measured",
        away,
        WITHIN,
        unit="%",
        note=note,
    )


# The laptop cluster


def strike(each: int | None = None) -> Record:
    """Plays the run. `each`: that many pairs of each fault, for a quick one."""
    # The whole cluster is what the chaos campaign uses; torch is only imported by its trainers.
    from tests.chaos.stage import staged

    rng = random.Random(SEED)
    order = [fault for fault, count in TIMES_EACH.items() for _ in range(2 * each if each else count)]
    rng.shuffle(order)
    record = Record()
    with (
        tempfile.TemporaryDirectory(prefix="tcb-") as folder,
        staged(Path(folder), WORKERS, SEED, PACE) as stage,
    ):
        _well(stage, 0)
        began = time.time()
        strikes = []
        for number, fault in enumerate(order):
            stage.rest(rng.uniform(4.0, 8.0))
            strikes.append(_strike_once(stage, fault, number % WORKERS))
            print(f"{fault}: told {strikes[-1].told.get('totalSeconds')}", flush=True)
        stage.rest(5.0)
        status = stage.status
        stage.reached()
        news = new_steps(stage.recorder.steps)
    record.struck = costs(strikes, news, began)
    record.deltas = (status.get("checkpoint") or {}).get("deltas") == "EveryStep"
    record.pace = _pace(news, record.struck)
    return record


def _well(stage: Any, beyond: int) -> None:
    tiers = ("local", "peer", "remote")
    if not stage.comes(lambda: not stage.lacks(beyond, tiers), PATIENCE):
        raise TimeoutError(f"the job is not well again: {stage.lacks(beyond, tiers)}")


def _strike_once(stage: Any, fault: str, worker: int) -> Struck:
    """Without what it cost: that is read when the last line is there."""
    attempt, reached, remote = stage.attempt, stage.reached(), tier_step(stage.status, "remote")
    racks = [stage.rack_of(each) for each in range(WORKERS)]
    gone = {
        PROCESS: (),
        POD: (worker,),
        NODE: (worker,),
        DOMAIN: tuple(each for each, rack in enumerate(racks) if rack == racks[worker]),
        ALL: tuple(range(WORKERS)),
    }[FAULTS[fault]]
    at = time.time()
    stage.inject_fault(fault, worker)
    stage.comes(lambda: stage.attempt > attempt, PATIENCE)
    stage.undo()
    _well(stage, reached)
    told = next(
        (dict(entry) for entry in stage.status.get("recoveries") or () if entry["attempt"] > attempt), {}
    )
    known = {key: told[key] for key in _TOLD if key in told}
    return Struck(fault, at, gone, at, at, at, 0, known, max(0, reached - remote))


def costs(strikes: Sequence[Struck], news: Mapping[int, float], began: float) -> list[Struck]:
    """The same with the gap that each made: the longest between two new steps until the next strike."""
    moments = sorted(news.values())
    found = []
    for number, each in enumerate(strikes):
        end = strikes[number + 1].at if number + 1 < len(strikes) else moments[-1]
        before = max(moment for moment in moments if moment <= each.at)
        # What is under way when a pod is killed may still be printed.
        later = [moment for moment in moments if before <= moment <= end]
        gap = max(range(1, len(later)), key=lambda index: later[index] - later[index - 1])
        steps = sum(1 for moment in moments if began < moment <= later[gap])
        found.append(replace(each, began=began, before=later[gap - 1], after=later[gap], steps=steps))
        began = later[gap]
    return found


_TOLD = ("attempt", "cause", "tiers", "lostSteps", "detectSeconds", "restoreSeconds", "totalSeconds")


def new_steps(made: Mapping[int, Sequence[tuple[float, int, int]]]) -> dict[int, float]:
    """By step: when any rank had made it first, in the order of steps."""
    first: dict[int, float] = {}
    for lines in made.values():
        for at, step, _ in lines:
            first[step] = min(at, first.get(step, at))
    found: dict[int, float] = {}
    latest = 0.0
    for step in sorted(first):
        latest = found[step] = max(latest, first[step])
    return found


def _pace(news: Mapping[int, float], struck: Sequence[Struck]) -> float:
    """Mean seconds of a step where nothing happens: all but the gaps."""
    gaps = {each.after for each in struck}
    moments = list(news.values())
    usual = [later - earlier for earlier, later in itertools.pairwise(moments) if later not in gaps]
    return statistics.fmean(usual)


# What the simulator makes of it


def foretell(record: Record) -> dict[str, Any]:
    """Foretold and measured seconds lost of the failures that gave no part: of all, and by fault."""
    first, second = halves(record.struck)
    times = _times([each.told for each in first], record.pace)
    behind = [each.remote_behind for each in first]
    lag = max(0, round(statistics.fmean(behind) - REMOTE_EVERY / 2)) if behind else 0

    def lost(struck: Sequence[Struck]) -> dict[str, Any]:
        life, wall = virtual_life(struck)
        ran = replay(scenario(times, record, lag), life, wall)
        measured = sum(each.lost(record.pace) for each in struck)
        note = f"{len(struck)} failures, ETTR {ran.ettr:.2f}, measured {1.0 - measured / wall:.2f}"
        return {"foretold": (1.0 - ran.ettr) * wall, "measured": measured, "note": note}

    faults = dict.fromkeys(each.fault for each in second)
    by_kind = {fault: lost([each for each in second if each.fault == fault]) for fault in faults}
    return {"held out": lost(second), "by kind": by_kind}


def halves(struck: Sequence[Struck]) -> tuple[list[Struck], list[Struck]]:
    """Every other one of each fault: both halves met the same machine."""
    seen: dict[str, int] = {}
    found: tuple[list[Struck], list[Struck]] = [], []
    for each in struck:
        number = seen[each.fault] = seen.get(each.fault, -1) + 1
        found[number % 2].append(each)
    return found


@dataclass(frozen=True)
class KnownFailure:
    """One of a life that is known beforehand."""

    at: float
    """Seconds since the beginning."""
    kind: str
    victims: tuple[int, ...] = ()
    """The workers whose memory goes."""


def replay(described: Scenario, failures: Sequence[KnownFailure], seconds: float) -> Run:
    """The one life in which exactly this happens."""
    life = JobLife(described)
    for failure in sorted(failures, key=lambda each: each.at):
        life.fail(failure.at, failure.kind, failure.victims)
    return life.ended(seconds)


def virtual_life(struck: Sequence[Struck]) -> tuple[list[KnownFailure], float]:
    """These failures alone, each after as much training as it came after."""
    life, now = [], 0.0
    for each in struck:
        life.append(KnownFailure(now + each.at - each.began, _LEVEL[FAULTS[each.fault]], each.victims))
        now += each.after - each.began
    return life, now


_LEVEL = {PROCESS: PROCESS, POD: POD, NODE: "host", DOMAIN: "rack", ALL: ALL}


def _times(
    told: Sequence[Mapping[str, Any]], pace: float, usual: RecoveryTimes | None = None
) -> RecoveryTimes:
    job = {"status": {"recoveries": list(told), "progress": {"stepSeconds": pace}}}
    # Each failure came when all copies were complete again.
    found = measure(measured_recoveries([job]), usual or RecoveryTimes(protect=0.0))
    return found.for_levels(("zone", "rack", "host"))


def scenario(times: RecoveryTimes, record: Record, lag: int) -> Scenario:
    """The laptop cluster's job."""
    labels = {
        f"node-{number}": {
            "topology.kubernetes.io/zone": "z", "topology.kubernetes.io/rack": f"rack-{number}",
            "kubernetes.io/hostname": f"node-{number}",
        }
        for number in range(WORKERS)
    }  # fmt: skip
    sites = [WorkerSite(worker, f"node-{worker}") for worker in range(WORKERS)]
    topology = Topology.build(labels, levels_from_spec("generic", None))
    placement = place(sites, topology, PlacementPolicy(1, "host", required=False))
    assert isinstance(placement, Placement)
    return Scenario(
        sites,
        topology,
        placement,
        step_seconds=record.pace,
        saving=Saving(record.snapshot_every, record.deltas, remote_every=REMOTE_EVERY, remote_lag=lag),
        times=times,
    )


# Real kubelets

_ROW = re.compile(r"\| (?P<what>[^|]+) \| (?P<told>\w+) \| [^|]+ \| (?P<ours>[^|]+) \| (?P<next>[^|]+) \|")
_APART = ("operators away", "suspend", "attach")
"""Rows whose time is the test's own, or another controller's."""


def real_rows(page: str) -> list[dict[str, Any]]:
    """The first two runs, of the same commit, of each fault that `docs/benchmarks/real-cluster.md` tells
    seconds of."""
    found = []
    for match in _ROW.finditer(page):
        if match["told"] not in {cause.value for cause in Cause} or any(
            word in match["what"] for word in _APART
        ):
            continue
        ours, after = (
            [float(word.strip(" *")) for word in match[name].split(";")[:2]] for name in ("ours", "next")
        )
        if len(after) == 2:
            found.append(
                {"what": match["what"], "cause": match["told"], "ours": ours * (3 - len(ours)), "next": after}
            )
    return found


def told_of(rows: Sequence[Mapping[str, Any]], run: int) -> list[dict[str, Any]]:
    """One run of each row, as a status tells of it. The page tells two spans, from the fault to the release
    and to the next step; the first stands for noticing and restoring together.
    """
    return [
        {
            "attempt": number, "cause": row["cause"], "tiers": {_tier(row["cause"]): 1}, "detectSeconds": 0.0,
            "restoreSeconds": row["ours"][run], "totalSeconds": row["next"][run],
        }
        for number, row in enumerate(rows, 1)
    ]  # fmt: skip


def page_times(rows: Sequence[Mapping[str, Any]], usual: RecoveryTimes) -> RecoveryTimes:
    """By all that the page tells."""
    told = [*told_of(rows, 0), *({**each, "attempt": -each["attempt"]} for each in told_of(rows, 1))]
    return _times(told, 0.0, usual)


def foretell_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The second time of each row by the parts of the first times."""
    told = told_of(rows, 0)
    kinds = [measured_recoveries([{"status": {"recoveries": [each]}}])[0].kind for each in told]
    hour = 3600.0
    described = scenario(_times(told, 0.0), Record(pace=1.0), 0)
    workers = {PROCESS: 0, POD: 1, NODE: 1, DOMAIN: 1, ALL: WORKERS}
    life = [
        KnownFailure(number * hour, _LEVEL[kind], tuple(range(workers[kind])))
        for number, kind in enumerate(kinds, 1)
    ]
    ran = replay(described, life, (len(life) + 1) * hour)
    return {"foretold": ran.down_seconds, "measured": sum(row["next"][1] for row in rows)}


def every_other(rows: Sequence[Mapping[str, Any]], first: int) -> list[dict[str, Any]]:
    """The same with the runs of every other row changed for each other: both halves met both runs."""
    return [
        {**row, "ours": row["ours"][::-1], "next": row["next"][::-1]} if (number + first) % 2 else {**row}
        for number, row in enumerate(rows)
    ]


def _tier(cause: str) -> str:
    return {"AllPodsLost": "remote", "TrainerCrash": "local", "OOMKilled": "local"}.get(cause, "peer")
