"""The settings that are compared: the job as it is, and the job with one thing changed at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiercheck.protocol.artifacts.sizing import auto_cadence
from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_cli.layout import JobLayout, compute_placement
from tiercheck_cli.simulate.assumptions import Assumptions
from tiercheck_cli.simulate.play import exact_ettr
from tiercheck_cli.simulate.scenario import Saving, Scenario
from tiercheck_operator.planning.wanted import Wanted

_PARITY = re.compile(r"([0-9]+)\+([0-9]+)")
_KEYS = "copies=0,1,2 parity=4+1 spares=0,2 snapshot=10,100 remote=500,none deltas=on,off level=rack,host"
_DELTA_PART = 3
"""A snapshot is about three dense deltas."""
_SNAPSHOT_WITHOUT_DELTAS = 50
_SNAPSHOT_UNKNOWN = 10


@dataclass(frozen=True)
class Setting:
    """One row."""

    name: str
    wanted: Wanted


def settings(base: Wanted, compare: Sequence[str]) -> tuple[Setting, ...]:
    """The job as it is first. `compare`: "copies=0,1,2 parity=4+1", in one word or several. Raises
    CannotDo."""
    rows = [Setting("as it is", base)]
    for entry in " ".join(compare).split():
        key, equals, values = entry.partition("=")
        if not equals or not values:
            raise CannotDo(f'"{entry}" compares nothing; say what to change, such as {_KEYS}', USAGE)
        for value in values.split(","):
            changed = _changed(base, key, value)
            if changed == base:
                rows[0] = Setting(
                    f"{rows[0].name}, {key}={value}"
                    if rows[0].name != "as it is"
                    else f"as it is: {key}={value}",
                    base,
                )
            else:
                rows.append(Setting(f"{key}={value}", changed))
    return tuple(rows)


def _changed(base: Wanted, key: str, value: str) -> Wanted:
    if key == "parity":
        match = _PARITY.fullmatch(value)
        if match is None or not int(match[1]) or not int(match[2]):
            raise CannotDo(f'"{value}" is no parity: say data+parity, such as 4+1', USAGE)
        return replace(base, copies=0, parity=(int(match[1]), int(match[2])))
    if key == "copies":
        count = _count(key, value)
        if count >= base.workers:
            raise CannotDo(f"copies={value} needs more than {value} workers", USAGE)
        return replace(base, copies=count, parity=None)
    if key == "spares":
        return replace(base, spares=_count(key, value))
    if key == "snapshot":
        return replace(base, snapshot_every=_count(key, value, least=1))
    if key == "remote":
        return replace(base, remote_every=None if value == "none" else _count(key, value, least=1))
    if key == "deltas" and value in ("on", "off"):
        return replace(base, deltas=value == "on")
    if key == "level" and value in {level.name for level in base.levels}:
        return replace(base, level=value)
    raise CannotDo(f'"{key}={value}" cannot be compared; what can be is {_KEYS}', USAGE)


def _count(key: str, value: str, least: int = 0) -> int:
    if not value.isdigit() or int(value) < least:
        raise CannotDo(f'"{key}={value}" must be a whole number, {least} or more', USAGE)
    return int(value)


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


def store_only(layout: JobLayout, assumed: Assumptions, every: int) -> float:
    """ETTR by Daly's formula of a job without memory tiers: each failure of any kind goes back to a store
    that has a version every `every` steps, for which nothing is paid."""
    times = assumed.times
    per_day = assumed.failures_per_day(layout.sites, layout.topology)
    rates = assumed.rates(layout.sites, layout.topology)
    losing_pods = 1.0 - rates.process * len(layout.sites) * 24.0 / per_day if per_day else 0.0
    overhead = times.detect + times.restore.remote + times.restart + losing_pods * times.replace
    return exact_ettr(per_day / 86400.0, every * assumed.step_seconds, overhead)
