"""Simulates the settings with the operator's own planning, in portions that show progress.

The same seed gives the same result.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from tiercheck.protocol.artifacts.sizing import auto_cadence
from tiercheck_cli.layout import JobLayout, compute_placement
from tiercheck_cli.simulate.assumptions import Assumptions
from tiercheck_cli.simulate.settings import Setting
from tiercheck_operator.planning.placement.placement import Placement
from tiercheck_operator.planning.simulation.scenario import Saving, Scenario
from tiercheck_operator.planning.simulation.simulation import Run, Simulation, exact_ettr
from tiercheck_operator.planning.simulation.simulation import simulate as play
from tiercheck_operator.planning.wanted import Wanted

_PORTION = 5
_DELTA_PART = 3
"""A snapshot is about three dense deltas."""
_SNAPSHOT_WITHOUT_DELTAS = 50
_SNAPSHOT_UNKNOWN = 10


@dataclass(frozen=True)
class Result:
    """Of one setting."""

    setting: Setting
    placement: Placement
    simulation: Simulation


def saving(wanted: Wanted, assumed: Assumptions) -> Saving:
    """What is saved when, by the sizes where they are known."""
    delta = (wanted.state_size or 0) // _DELTA_PART
    every = wanted.snapshot_every
    if every is None and not wanted.deltas:
        every = _SNAPSHOT_WITHOUT_DELTAS
    every = every or auto_cadence(wanted.state_size or 0, delta) or _SNAPSHOT_UNKNOWN
    size = (wanted.state_size or 0) * wanted.procs_per_worker
    way = assumed.times.restore.peer - assumed.times.restore.local
    # A delta is underway while the next step is trained; a snapshot as long as a copy takes.
    lag = way / _DELTA_PART if wanted.deltas else way
    upload = assumed.times.restore.remote - assumed.times.restore.local if size else 0.0
    return Saving(
        snapshot_every=every,
        deltas=wanted.deltas,
        peer_lag=max(1, math.ceil(lag / assumed.step_seconds)) if size else 1,
        remote_every=wanted.remote_every,
        remote_lag=math.ceil(upload / assumed.step_seconds),
    )


def scenario(layout: JobLayout, wanted: Wanted, assumed: Assumptions) -> Scenario:
    """The placement is made anew where the setting asks for another one. Raises CannotDo."""
    same = wanted.policy == layout.wanted.policy
    existing = layout.placement if same else compute_placement(layout.sites, layout.topology, wanted.policy)
    return Scenario(
        sites=layout.sites,
        topology=layout.topology,
        policy=wanted.policy,
        procs_per_worker=wanted.procs_per_worker,
        spares=wanted.spares,
        step_seconds=assumed.step_seconds,
        saving=saving(wanted, assumed),
        times=assumed.times,
        rates=assumed.rates(layout.sites, layout.topology),
        existing=existing,
    )


def simulate_lives(
    described: Scenario, *, days: float, runs: int, seed: int, tick: Callable[[int], None] | None = None
) -> Simulation:
    """`tick` is told how many more runs are done. Every setting meets the same chance, so that they can be
    compared."""
    found: list[Run] = []
    for first in range(0, runs, _PORTION):
        count = min(_PORTION, runs - first)
        found += play(described, days=days, runs=count, chance=_Dice(seed, first)).runs
        if tick is not None:
            tick(count)
    return Simulation(days, tuple(found))


@dataclass(frozen=True)
class _Dice:
    """Chance for each run by its number, whatever portion it is played in."""

    seed: int
    first: int

    def __call__(self, run: int) -> random.Random:
        return random.Random(f"{self.seed}/{self.first + run}")


def store_only(layout: JobLayout, assumed: Assumptions, every: int) -> float:
    """ETTR by Daly's formula of a job without memory tiers: each failure of any kind goes back to a store
    that has a version every `every` steps, for which nothing is paid."""
    times = assumed.times
    per_day = assumed.failures_per_day(layout.sites, layout.topology)
    rates = assumed.rates(layout.sites, layout.topology)
    losing_pods = 1.0 - rates.process * len(layout.sites) * 24.0 / per_day if per_day else 0.0
    overhead = times.detect + times.restore.remote + times.restart + losing_pods * times.replace
    return exact_ettr(per_day / 86400.0, every * assumed.step_seconds, overhead)
