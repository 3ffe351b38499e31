"""Answers what would happen if something failed now, with the code by which the operator decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiercheck.protocol.directive import Tier
from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_cli.layout import JobLayout, workers_by_domain
from tiercheck_cli.simulate.assumptions import PEER_BANDWIDTH, REMOTE_BANDWIDTH, snapshot_steps
from tiercheck_cli.simulate.play import HeldSteps, ResumePoint, find_resume_point
from tiercheck_cli.simulate.scenario import (
    ALL,
    DOMAIN,
    KINDS,
    NODE,
    POD,
    PROCESS,
    MeasuredRecovery,
    RecoveryTimes,
    Saving,
    measure,
    measured_recoveries,
)
from tiercheck_operator.model.conditions import IN_PROCESS, plural
from tiercheck_operator.model.spec import JobSpec
from tiercheck_operator.planning.recovery.recovery import RestoreSeconds
from tiercheck_operator.planning.topology import short_name

# Medians of small jobs on a real cluster with the images on its nodes (docs/benchmarks): 18 s after a crash,
# 37 s after the loss of a pod, 56 s after that of all. A new pod has to import torch first, a spare's too.
_SMALL_JOBS = RecoveryTimes(1.0, RestoreSeconds(2.0, 3.0, 22.0), restart=15.0, spare=11.0, replace=18.0)


@dataclass(frozen=True)
class Estimate:
    seconds: float
    measured: bool
    """True if the job has recovered from such a loss before."""
    source: str
    """The source of the seconds, as a clause."""


def estimate(
    past: Sequence[MeasuredRecovery], usual: RecoveryTimes, kind: str, farthest: Tier | None, spared: bool
) -> Estimate:
    """Estimates the seconds without training, from `past` recoveries, newest first.

    `farthest`: the farthest tier needed; None: from scratch. `spared`: spares wait for all that are lost."""
    times = measure(past, usual).times.of(kind)
    alike = [
        each.recovery
        for each in past
        if (each.kind == PROCESS) is (kind == PROCESS) and each.recovery.farthest is farthest
    ]
    if len(alike) == 1:
        source = f"as after {alike[0].cause} in attempt {alike[0].attempt}"
    elif alike:
        source = f"by the means of its last {len(alike)} recoveries like that"
    elif past:
        those = "recovery, which was not" if len(past) == 1 else f"{len(past)} recoveries, none of which was"
        source = f"an estimate from the parts of its last {those} like that"
    else:
        source = (
            "a guess: it has not come back from a failure yet; small jobs took so long on a cluster with "
            "the images at hand"
        )
    wait = 0.0 if kind == PROCESS else times.spare if spared else times.replace
    restore = getattr(times.restore, farthest.value) if farthest is not None else 0.0
    return Estimate(times.detect + wait + restore + times.restart, bool(alike), source)


@dataclass(frozen=True)
class LostMemory:
    """A loss: its `name` for a sentence, the `workers` that lose memory (none: a crash), its `kind`."""

    name: str
    workers: frozenset[int]
    kind: str


def losses(
    asked: Sequence[str], layout: JobLayout, pods: Mapping[str, int] | None = None
) -> tuple[LostMemory, ...]:
    """Returns the combined loss that `--if` names; for a bare level name, the loss of each of its domains.

    `pods`: worker by name of the pod. Raises CannotDo."""
    domains = _domain_losses(layout)
    if len(asked) == 1 and asked[0] in domains:
        if not domains[asked[0]]:
            raise CannotDo(f"the labels of the nodes do not say which {asked[0]} they are in")
        return tuple(domains[asked[0]].values())
    named = domains | _single_losses(layout, pods or {})
    parts = [_loss(entry, layout, named) for entry in asked]
    return (
        LostMemory(
            " and ".join(part.name for part in parts),
            frozenset().union(*(part.workers for part in parts)),
            max((part.kind for part in parts), key=KINDS.index),
        ),
    )


def _domain_losses(layout: JobLayout) -> dict[str, dict[str, LostMemory]]:
    """Returns losses by level, then by the path of the domain."""
    host = layout.topology.level_names[-1]
    return {
        level: _losses_of(
            level, NODE if level == host else DOMAIN, workers_by_domain(layout.sites, layout.topology, level)
        )
        for level in layout.topology.level_names
    }


def _single_losses(layout: JobLayout, pods: Mapping[str, int]) -> dict[str, dict[str, LostMemory]]:
    """Returns losses by the word before "=", then by the name after it."""
    nodes: dict[str, list[int]] = {}
    for site in layout.sites:
        nodes.setdefault(site.node, []).append(site.worker)
    return {
        "node": _losses_of("node", NODE, nodes),
        "pod": _losses_of("pod", POD, {pod: [worker] for pod, worker in pods.items()}),
        "worker": _losses_of("worker", POD, {str(site.worker): [site.worker] for site in layout.sites}),
    }


def _losses_of(word: str, kind: str, found: Mapping[str, Sequence[int]]) -> dict[str, LostMemory]:
    shared = len(set(map(short_name, found))) < len(found)
    return {
        path: LostMemory(f"{word} {path if shared else short_name(path)}", frozenset(workers), kind)
        for path, workers in found.items()
    }


def _loss(asked: str, layout: JobLayout, named: Mapping[str, Mapping[str, LostMemory]]) -> LostMemory:
    if asked == "crash":
        return LostMemory("one training process", frozenset(), PROCESS)
    if asked == "all":
        return LostMemory("every pod", frozenset(site.worker for site in layout.sites), ALL)
    word, equals, name = asked.partition("=")
    if not equals or word not in named:
        known = ", ".join(f"{each}=NAME" for each in named)
        raise CannotDo(f'"{asked}" is nothing that can be lost: say {known}, all or crash', USAGE)
    found = [path for path in named[word] if name in (path, short_name(path))]
    if len(found) != 1:
        others = found or list(dict.fromkeys(map(short_name, named[word])))
        known = ", ".join(others[:8]) + (" ..." if len(others) > 8 else "")
        wrong = "there are several of the name" if found else "the job has no"
        raise CannotDo(f'{wrong} {word} "{name}": {known or "none is known"}', USAGE)
    return named[word][found[0]]


def hit(loss: LostMemory, layout: JobLayout) -> str:
    """Returns the extent of the loss: "2 nodes, 2 workers, 16 ranks"."""
    if not loss.workers:
        return "no pod, no memory"
    nodes = {site.node for site in layout.sites if site.worker in loss.workers}
    ranks = len(loss.workers) * layout.spec.procs_per_worker
    parts = [plural(len(nodes), "node"), plural(len(loss.workers), "worker")]
    return ", ".join([*parts, plural(ranks, "rank")] if ranks != len(loss.workers) else parts)


@dataclass(frozen=True)
class ProcessForecast:
    """The number of training processes that stay and that restart after a failure."""

    stay: int
    restart: int
    why: str = ""
    """The reason why more than the lost ones restart, as a clause; empty: they do not."""

    def __str__(self) -> str:
        if self.stay:
            return f"{self.stay} stay, {self.restart} {'starts' if self.restart == 1 else 'start'} anew"
        return f"all {self.restart} start anew{f': {self.why}' if self.why else ''}"


def forecast_processes(
    spec: JobSpec, workers: int, lost: int, job: Mapping[str, Any] | None, from_scratch: bool = False
) -> ProcessForecast:
    """Forecasts how many processes stay after the loss of `lost` pods; 0: one process ends.

    `workers`: the current number. `job`: None for a plan, assumed to loop by `checkpointer.steps`."""
    ranks, known = workers * spec.procs_per_worker, ((job or {}).get("status") or {}).get("conditions") or ()
    found = next((each for each in known if each["type"] == IN_PROCESS), None)
    # A health check has to run alone in its pod, so none of the pod's processes stay.
    gone = lost * spec.procs_per_worker or (1 if spec.health_check is None else spec.procs_per_worker)
    if gone >= ranks:
        return ProcessForecast(0, ranks)
    why = ""
    if from_scratch:
        why = "there is no version to go on from"
    elif not spec.interrupt_seconds:
        why = "spec.recovery.inProcess is Never"
    elif job is not None and found is None:
        why = "not every rank has made a step yet"
    elif found is not None and found["status"] != "True":
        why = str(found.get("message") or found.get("reason"))
    return ProcessForecast(0, ranks, why) if why else ProcessForecast(ranks - gone, gone)


@dataclass(frozen=True)
class WhatIf:
    """The answer to one what-if question."""

    loss: LostMemory
    state: HeldSteps
    resume_point: ResumePoint
    processes: ProcessForecast
    ranks: Mapping[Tier, int]
    """The number of ranks by the farthest tier that each needs."""
    without_training: Estimate
    peers: Mapping[int, tuple[int, ...]]
    """The remaining peers with its state, by worker that needs one."""

    @property
    def lost_steps(self) -> int:
        return self.state.newest - self.resume_point.step

    @property
    def lost_seconds(self) -> float | None:
        """Returns the seconds of training to repeat; None: not known."""
        return None if self.state.planned else self.lost_steps * self.state.step_seconds


def held_steps(layout: JobLayout, job: Mapping[str, Any] | None) -> HeldSteps:
    """Returns the steps that the job holds now.

    One that does not run is assumed half-way between versions of its slowest tier, long after the start."""
    status, spec = (job or {}).get("status") or {}, layout.spec
    progress, checkpoint = status.get("progress") or {}, status.get("checkpoint") or {}
    step_seconds = float(progress.get("stepSeconds") or 1.0)
    if (step := progress.get("step")) is not None:
        tiers = status.get("tiers") or {}
        held = {tier: min(step, int(tiers.get(tier.value, {}).get("step") or 0)) for tier in Tier}
        if spec.remote_every is None:
            del held[Tier.REMOTE]
        return HeldSteps(int(step), held, step_seconds)
    deltas = checkpoint.get("deltas") == "EveryStep" if checkpoint.get("deltas") else spec.deltas
    every = checkpoint.get("snapshotEverySteps") or snapshot_steps(spec, deltas)
    saving = Saving(every, deltas, remote_every=spec.remote_every)
    newest = 100 * every + every // 2 + saving.peer_lag
    if spec.remote_every is not None:
        newest = 10 * spec.remote_every + spec.remote_every // 2
    held = {Tier.LOCAL: saving.local(newest), Tier.PEER: saving.peer(newest)}
    if spec.remote_every is not None:
        held[Tier.REMOTE] = saving.remote(newest)
    return HeldSteps(newest, held, step_seconds, planned=True)


def answer(
    loss: LostMemory, layout: JobLayout, state: HeldSteps, job: Mapping[str, Any] | None = None
) -> WhatIf:
    """Answers what the loss would cost. `job`: None if it is only a plan."""
    found, spec = find_resume_point(layout.placement, state, loss.workers), layout.spec
    past = measured_recoveries([job] if job is not None else [])
    size = (spec.state_size or 0) * spec.procs_per_worker
    usual = _SMALL_JOBS.carrying(size, PEER_BANDWIDTH, REMOTE_BANDWIDTH)
    spared = len(loss.workers) <= spec.spares
    return WhatIf(
        loss=loss,
        state=state,
        resume_point=found,
        processes=forecast_processes(
            spec, len(layout.sites), len(loss.workers), job, from_scratch=found.farthest is None
        ),
        ranks={tier: len(those) * spec.procs_per_worker for tier, those in found.workers.items()},
        without_training=estimate(past, usual, loss.kind, found.farthest, spared),
        peers={worker: _left(worker, loss, layout) for worker in found.workers.get(Tier.PEER, ())},
    )


def _left(worker: int, loss: LostMemory, layout: JobLayout) -> tuple[int, ...]:
    for group in layout.placement.groups:
        if worker in group.members:
            return tuple(other for other in group.workers if other != worker and other not in loss.workers)
    return tuple(holder for holder in layout.placement.holders[worker] if holder not in loss.workers)
