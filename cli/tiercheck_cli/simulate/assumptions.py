"""Defines a simulation's assumptions, by default or by file: failure rates with sources, and times."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from tiercheck.protocol.artifacts.sizing import auto_cadence
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.encoding import Malformed, from_builtins
from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_cli.layout import JobLayout, compute_placement, documents, policy_of
from tiercheck_cli.simulate.play import exact_ettr
from tiercheck_cli.simulate.scenario import (
    NO_STATE,
    FailureRates,
    RecoveryTimes,
    Saving,
    Scenario,
    describe_restore,
    times_of,
)
from tiercheck_operator.model.serialization import parse_quantity
from tiercheck_operator.model.spec import JobSpec
from tiercheck_operator.planning.placement.problem import WorkerSite
from tiercheck_operator.planning.topology import Topology

PEER_BANDWIDTH = 2 * 2**30
"""Bytes per second and worker, if the job does not limit it."""
REMOTE_BANDWIDTH = 200 * 2**20
STEP_SECONDS = 5.0


@dataclass(frozen=True)
class CountedFailures:
    """Published failures, per 1,000 days of one node."""

    node: float
    process: float
    domain_share: float
    """The share of all failures that take a whole domain of the spread level along."""
    source: str


@functools.cache
def published_failures() -> Mapping[str, CountedFailures]:
    """Returns the records of records.yaml, by name."""
    (contents,) = documents(str(Path(__file__).with_name("records.yaml")))
    return {name: CountedFailures(**each) for name, each in contents.items()}


@dataclass(frozen=True)
class AssumedByFile:
    """The keys of an `--assume` file, in camel case there. None: the file does not set it."""

    failures: str = "rsc-1"
    node_failures: float | None = None
    """Failures per 1,000 days of a node, the unit of the next field too."""
    process_failures: float | None = None
    domain_failures: dict[str, float] | None = None
    """Failures per 1,000 days of a domain, by level."""
    moves_per_day: float = 0.0
    """The number of the job's pods that are moved or evicted in a day."""
    step_seconds: float | None = None
    state_size: str | None = None
    peer_bandwidth: str | None = None
    remote_bandwidth: str | None = None
    detect_seconds: float | None = None
    restart_seconds: float | None = None
    replace_seconds: float | None = None

    def bytes_of(self, key: str, otherwise: object) -> int:
        """Returns the bytes of that key, or of `otherwise`. Raises CannotDo."""
        try:
            found = parse_quantity(getattr(self, key) or str(otherwise))
        except ValueError as error:
            raise CannotDo(f"{_camel(key)}: {error}; say it as 24Gi or 200Mi", USAGE) from error
        if found <= 0:
            raise CannotDo(f"{_camel(key)} must be above zero", USAGE)
        return found

    @property
    def of_every_recovery(self) -> dict[str, float]:
        """Returns the parts of a recovery that the file sets, by their names in RecoveryTimes."""
        overrides = {name: getattr(self, f"{name}_seconds") for name in ("detect", "restart", "replace")}
        return {name: value for name, value in overrides.items() if value is not None}


def read_assumed(path: str | None) -> AssumedByFile:
    """Reads a YAML or JSON file of assumptions; "-" is standard input. Raises CannotDo."""
    if path is None:
        return AssumedByFile()
    contents = list(documents(path))
    if len(contents) != 1:
        raise CannotDo(f"{path} is not one list of assumptions, such as stepSeconds: 5", USAGE)
    kinds = get_type_hints(AssumedByFile)
    names = {_camel(field.name): field.name for field in fields(AssumedByFile)}
    overrides: dict[str, Any] = {}
    for key, value in contents[0].items():
        if key not in names:
            raise CannotDo(f'{path}: "{key}" cannot be assumed; what can be is {", ".join(names)}', USAGE)
        kind = kinds[names[key]]
        plain = str(value) if kind == str | None and type(value) is int else value
        try:
            found = overrides[names[key]] = from_builtins(plain, kind)
        except Malformed as error:
            raise CannotDo(f"{path}: {key}{str(error).removeprefix('$')}", USAGE) from error
        numbers = list(found.values()) if isinstance(found, dict) else [found]
        least = 0.001 if key == "stepSeconds" else 0.0
        if any(isinstance(each, float) and not least <= each < math.inf for each in numbers):
            raise CannotDo(f"{path}: {key} must be {least:g} or more, and finite", USAGE)
    return AssumedByFile(**overrides)


def _camel(name: str) -> str:
    return re.sub("_(.)", lambda match: match[1].upper(), name)


@dataclass(frozen=True)
class Assumptions:
    """The assumptions of one simulation. Rates are per 1,000 days of a node, or of a domain."""

    node: float
    process: float
    domains: Mapping[str, float]
    times: RecoveryTimes
    step_seconds: float
    sources: tuple[str, ...]
    moves: float = 0.0
    """The number of the job's pods that are moved or evicted in a day."""
    measured: tuple[str, ...] = ()

    def rates(self, sites: Sequence[WorkerSite], topology: Topology) -> FailureRates:
        """Returns the rates per hour, for a scenario; those of processes are per worker."""
        nodes = len({site.node for site in sites})
        host = topology.level_names[-1]
        return FailureRates(
            process=self.process * nodes / len(sites) / 24_000.0,
            pod=self.moves / 24.0 / len(sites),
            domains={host: self.node / 24_000.0}
            | {level: rate / 24_000.0 for level, rate in self.domains.items()},
        )

    def failures_per_day(self, sites: Sequence[WorkerSite], topology: Topology) -> float:
        """Returns the failures of the whole job per day."""
        rates = self.rates(sites, topology)
        total = (rates.process + rates.pod) * len(sites)
        for level, rate in rates.domains.items():
            total += rate * len({topology.domain(site.node, level) for site in sites} - {None})
        return total * 24.0


def assume(
    layout: JobLayout, job: Mapping[str, Any], overrides: AssumedByFile, jobs: Sequence[Mapping[str, Any]]
) -> Assumptions:
    """Combines assumptions, by precedence from the file, recoveries of `jobs`, and `job`. Raises CannotDo."""
    counted, spec = _record(overrides.failures), layout.spec
    node = counted.node if overrides.node_failures is None else overrides.node_failures
    process = counted.process if overrides.process_failures is None else overrides.process_failures
    domains = overrides.domain_failures
    if domains is None:
        shared = shared_domain_rate(replace(counted, node=node, process=process), layout)
        domains = {layout.spread: shared} if shared else {}
    levels = layout.topology.level_names[:-1]
    if unknown := [level for level in domains if level not in levels]:
        raise CannotDo(
            f'domainFailures: "{unknown[0]}" is no level of the job, as {", ".join(levels)} are', USAGE
        )
    tiers = job["spec"].get("tiers") or {}
    peer, remote = (
        overrides.bytes_of(f"{tier}_bandwidth", (tiers.get(tier) or {}).get("bandwidth") or usual)
        for tier, usual in (("peer", PEER_BANDWIDTH), ("remote", REMOTE_BANDWIDTH))
    )
    usual = RecoveryTimes()
    if spec.state_size is not None:
        usual = NO_STATE.carrying(spec.state_size * spec.procs_per_worker, peer, remote)
    times, measured = times_of(jobs, usual, overrides.of_every_recovery, layout.topology)
    pace = ((job.get("status") or {}).get("progress") or {}).get("stepSeconds")
    step_seconds = overrides.step_seconds or pace or STEP_SECONDS
    rates = {"node": node, "process": process, **domains}
    return Assumptions(
        node=node,
        process=process,
        domains=domains,
        times=times,
        step_seconds=step_seconds,
        moves=overrides.moves_per_day,
        sources=(
            "failures per 1,000 days of a node or domain: "
            + ", ".join(f"{name} {rate:.3g}" for name, rate in rates.items()),
            *(
                (counted.source,)
                if overrides.node_failures is None and overrides.process_failures is None
                else ()
            ),
            *(
                (f"{overrides.moves_per_day:g} pods a day are moved or evicted",)
                if overrides.moves_per_day
                else ()
            ),
            f"a step takes {step_seconds:g} s",
            *(() if measured else _describe_unmeasured(times, guessed=not spec.state_size)),
        ),
        measured=measured,
    )


def _record(name: str) -> CountedFailures:
    known = published_failures()
    if name not in known:
        raise CannotDo(f'no failures are on record as "{name}"; known are {", ".join(known)}', USAGE)
    return known[name]


def shared_domain_rate(counted: CountedFailures, layout: JobLayout) -> float:
    """Returns failures per 1,000 days of a domain that make up the record's share of all failures."""
    sites, topology, level = layout.sites, layout.topology, layout.spread
    domains = {topology.domain(site.node, level) for site in sites} - {None}
    if len(domains) < 2 or level == topology.level_names[-1]:
        return 0.0
    others = (counted.node + counted.process) * len({site.node for site in sites})
    return others * counted.domain_share / (1.0 - counted.domain_share) / len(domains)


def _describe_unmeasured(times: RecoveryTimes, *, guessed: bool) -> tuple[str, ...]:
    return (
        f"a failure is acted on after {times.detect:g} s, a pod is elsewhere after {times.replace:g} s "
        f"({times.spare:g} s with a spare), the first step comes {times.restart:g} s after the state",
        describe_restore(times.restore)
        + (" (guesses: checkpoint.stateSize is not given)" if guessed else ""),
    )


_PARITY = re.compile(r"([0-9]+)\+([0-9]+)")
_KEYS = "copies=0,1,2 parity=4+1 spares=0,2 snapshot=10,100 remote=500,none deltas=on,off level=rack,host"
_DELTA_PART = 3
"""The number of dense deltas that are about as large as a snapshot."""
_SNAPSHOT_WITHOUT_DELTAS = 50
_SNAPSHOT_UNKNOWN = 10


def settings(base: JobSpec, compare: Sequence[str], levels: Sequence[str] = ()) -> dict[str, JobSpec]:
    """Returns the settings by name of the row, first the job as it is. Raises CannotDo.

    `compare`: "copies=0,1,2 parity=4+1", in one word or several. `levels`: of its topology."""
    same: list[str] = []
    changes: dict[str, JobSpec] = {}
    for entry in " ".join(compare).split():
        key, equals, values = entry.partition("=")
        if not equals or not values:
            raise CannotDo(f'"{entry}" compares nothing; say what to change, such as {_KEYS}', USAGE)
        for value in values.split(","):
            changed = _changed(base, key, value, levels)
            if changed == base:
                same.append(f"{key}={value}")
            else:
                changes[f"{key}={value}"] = changed
    return {f"as it is{': ' if same else ''}{', '.join(same)}": base, **changes}


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


def snapshot_steps(spec: JobSpec, deltas: bool) -> int:
    """Returns the steps between snapshots: the spec's, else by the size if it is known."""
    if spec.snapshot_every is None and not deltas:
        return _SNAPSHOT_WITHOUT_DELTAS
    size = spec.state_size or 0
    return spec.snapshot_every or auto_cadence(size, size // _DELTA_PART) or _SNAPSHOT_UNKNOWN


def saving(spec: JobSpec, assumed: Assumptions) -> Saving:
    """Returns the intervals and delays of saves, by the sizes if they are known."""
    size = (spec.state_size or 0) * spec.procs_per_worker
    way = assumed.times.restore.peer - assumed.times.restore.local
    # A delta is sent while the next step is trained; a snapshot takes as long as a copy.
    lag = way / _DELTA_PART if spec.deltas else way
    upload = assumed.times.restore.remote - assumed.times.restore.local if size else 0.0
    return Saving(
        snapshot_every=snapshot_steps(spec, spec.deltas),
        deltas=spec.deltas,
        peer_lag=max(1, math.ceil(lag / assumed.step_seconds)) if size else 1,
        remote_every=spec.remote_every,
        remote_lag=math.ceil(upload / assumed.step_seconds),
    )


def scenario(layout: JobLayout, spec: JobSpec, assumed: Assumptions) -> Scenario:
    """Returns a scenario, with a new placement if the setting asks for another one. Raises CannotDo."""
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
    """Returns the ETTR of a job without memory tiers, by Daly's formula.

    Each failure goes back to a store with a version every `every` steps, which costs nothing to write."""
    times = assumed.times
    per_day = assumed.failures_per_day(layout.sites, layout.topology)
    rates = assumed.rates(layout.sites, layout.topology)
    losing_pods = 1.0 - rates.process * len(layout.sites) * 24.0 / per_day if per_day else 0.0
    overhead = times.detect + times.restore.remote + times.restart + losing_pods * times.replace
    return exact_ettr(per_day / 86400.0, every * assumed.step_seconds, overhead)
