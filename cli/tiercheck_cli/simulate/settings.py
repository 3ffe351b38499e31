"""The settings that are compared: the job as it is, and the job with one thing changed at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiercheck.protocol.artifacts.sizing import auto_cadence
from tiercheck.protocol.directive import DeltaMode
from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_cli.layout import JobLayout, compute_placement, policy_of
from tiercheck_cli.simulate.assumptions import Assumptions
from tiercheck_cli.simulate.play import exact_ettr
from tiercheck_cli.simulate.scenario import Saving, Scenario
from tiercheck_operator.model.spec import JobSpec

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
    spec: JobSpec


def settings(base: JobSpec, compare: Sequence[str], levels: Sequence[str] = ()) -> tuple[Setting, ...]:
    """The job as it is first. `compare`: "copies=0,1,2 parity=4+1", in one word or several. `levels`:
    of its topology. Raises CannotDo."""
    rows = [Setting("as it is", base)]
    for entry in " ".join(compare).split():
        key, equals, values = entry.partition("=")
        if not equals or not values:
            raise CannotDo(f'"{entry}" compares nothing; say what to change, such as {_KEYS}', USAGE)
        for value in values.split(","):
            changed = _changed(base, key, value, levels)
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


def _changed(base: JobSpec, key: str, value: str, levels: Sequence[str]) -> JobSpec:
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
        every = None if value == "none" else _count(key, value, least=1)
        remote = None if every is None else {**(base.remote or {}), "everySteps": every}
        return base if every == base.remote_every else replace(base, remote=remote)
    if key == "deltas" and value in ("on", "off"):
        mode = DeltaMode.AUTO if value == "on" else DeltaMode.NONE
        return base if base.deltas == (value == "on") else replace(base, delta=mode)
    if key == "level" and value in levels:
        return replace(base, spread_level=value)
    raise CannotDo(f'"{key}={value}" cannot be compared; what can be is {_KEYS}', USAGE)


def _count(key: str, value: str, least: int = 0) -> int:
    if not value.isdigit() or int(value) < least:
        raise CannotDo(f'"{key}={value}" must be a whole number, {least} or more', USAGE)
    return int(value)


def saving(spec: JobSpec, assumed: Assumptions) -> Saving:
    """What is saved when, by the sizes where they are known."""
    delta = (spec.state_size or 0) // _DELTA_PART
    every = spec.snapshot_every
    if every is None and not spec.deltas:
        every = _SNAPSHOT_WITHOUT_DELTAS
    every = every or auto_cadence(spec.state_size or 0, delta) or _SNAPSHOT_UNKNOWN
    size = (spec.state_size or 0) * spec.procs_per_worker
    way = assumed.times.restore.peer - assumed.times.restore.local
    # A delta is underway while the next step is trained; a snapshot as long as a copy takes.
    lag = way / _DELTA_PART if spec.deltas else way
    upload = assumed.times.restore.remote - assumed.times.restore.local if size else 0.0
    return Saving(
        snapshot_every=every,
        deltas=spec.deltas,
        peer_lag=max(1, math.ceil(lag / assumed.step_seconds)) if size else 1,
        remote_every=spec.remote_every,
        remote_lag=math.ceil(upload / assumed.step_seconds),
    )


def scenario(layout: JobLayout, spec: JobSpec, assumed: Assumptions) -> Scenario:
    """The placement is made anew where the setting asks for another one. Raises CannotDo."""
    policy = policy_of(spec)
    same = policy == policy_of(layout.spec)
    placement = layout.placement if same else compute_placement(layout.sites, layout.topology, policy)
    return Scenario(
        sites=layout.sites,
        topology=layout.topology,
        placement=placement,
        spares=spec.spares,
        step_seconds=assumed.step_seconds,
        saving=saving(spec, assumed),
        times=assumed.times,
        rates=assumed.rates(layout.sites, layout.topology),
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
