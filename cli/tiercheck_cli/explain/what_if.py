"""Answers what would happen if something died now, by the code with which the operator decides it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Branch, History, Share, Version
from tiercheck_cli.events import PastRecovery, recoveries
from tiercheck_cli.failure import USAGE, CannotDo, program
from tiercheck_cli.layout import JobLayout, workers_by_domain
from tiercheck_cli.simulate.assumptions import PEER_BANDWIDTH, REMOTE_BANDWIDTH
from tiercheck_cli.simulate.scenario import Saving
from tiercheck_operator.model.conditions import IN_PROCESS, Cause, plural
from tiercheck_operator.model.spec import JobSpec
from tiercheck_operator.planning.placement.placement import Placement
from tiercheck_operator.planning.recovery.availability import Artifacts, JobInventory, RemoteInventory
from tiercheck_operator.planning.recovery.recovery import (
    Recover,
    RecoveryProblem,
    StartFresh,
    decide_recovery,
)
from tiercheck_operator.planning.topology import short_name

_IN_PLACE = {cause.value for cause in Cause if cause.in_place}
_PLANNED = {cause.value for cause in Cause if cause.planned}

# Medians of small jobs on a real cluster whose nodes had the images (docs/benchmarks): 18 s after a crash, 37
# s after the loss of a pod, 56 s after that of all.
_DETECT = 1.0
_RESTORE = {Tier.LOCAL: 2.0, Tier.PEER: 10.0, Tier.REMOTE: 25.0}
_SPARE = 3.0
"""From a peer, where a spare stands in."""
_START_IN_PLACE, _START_ANEW = 15.0, 26.0
"""From the state's being there to the first step. A new pod has to import torch first."""


@dataclass(frozen=True)
class Estimate:
    seconds: float
    measured: bool
    """The job has come back from such a loss before."""
    source: str
    """Where the seconds are from, as a clause."""


@dataclass(frozen=True)
class AssumedFailure:
    """What it would be like."""

    farthest: Tier | None
    """The tier that the worst-off rank needs; None: training would begin from scratch."""
    pods_lost: bool
    spare: bool = False
    """Spares wait for all that are lost."""
    carry_seconds: float = 0.0
    """For a worker's state on its way from that tier, by its size."""


def estimate(past: Sequence[PastRecovery], failure: AssumedFailure) -> Estimate:
    """`past`: newest first."""
    farthest, pods_lost = failure.farthest, failure.pods_lost
    failures = [entry for entry in past if entry.cause not in _PLANNED]
    kind = [entry for entry in failures if (entry.cause not in _IN_PLACE) is pods_lost]
    alike = [entry for entry in kind if entry.farthest is farthest]
    if alike:
        first = f"as after {alike[0].cause} in attempt {alike[0].attempt}"
        source = first if len(alike) == 1 else f"the median of its last {len(alike)} recoveries like that"
        return Estimate(median(entry.total for entry in alike), True, source)
    restored = [entry for entry in past if entry.farthest is farthest and farthest is not None]
    detect = _usual((entry.detect for entry in kind), _DETECT)
    restore = _usual((entry.restore for entry in restored), _guessed_restore(failure))
    start = _usual((entry.start for entry in past), _START_ANEW if pods_lost else _START_IN_PLACE)
    if past:
        those = (
            "its only recovery, which was not"
            if len(past) == 1
            else f"its last {len(past)} recoveries, none of which was"
        )
        source = f"an estimate from the parts of {those} like that"
    else:
        source = (
            "a guess: it has not come back from anything yet; small jobs took so long on a cluster with "
            "the images at hand"
        )
    return Estimate(detect + restore + start, False, source)


def _usual(measured: Iterable[float], otherwise: float) -> float:
    found = list(measured)
    return median(found) if found else otherwise


def _guessed_restore(failure: AssumedFailure) -> float:
    tier = failure.farthest or Tier.LOCAL
    if failure.spare and tier is not Tier.REMOTE:
        usual = _SPARE
    else:
        usual = max(
            _RESTORE[tier], _RESTORE[Tier.PEER] if failure.pods_lost else 0.0
        )  # new pods take their time
    return usual + failure.carry_seconds


@dataclass(frozen=True)
class LostMemory:
    """`name`: what would be lost, for a sentence. `workers`: whose memory goes with it; none: a crash."""

    name: str
    workers: frozenset[int]


def losses(
    asked: Sequence[str], layout: JobLayout, pods: Mapping[str, int] | None = None
) -> tuple[LostMemory, ...]:
    """What `--if` says, all of it at once; or, for the bare name of a level, each of its domains by itself.
    `pods`: worker by name of the pod. Raises CannotDo.
    """
    if len(asked) == 1 and asked[0] in layout.topology.level_names:
        return _each_domain(asked[0], layout)
    parts = [_loss(entry, layout, pods or {}) for entry in asked]
    return (
        LostMemory(
            " and ".join(part.name for part in parts), frozenset().union(*(part.workers for part in parts))
        ),
    )


def _each_domain(level: str, layout: JobLayout) -> tuple[LostMemory, ...]:
    found = workers_by_domain(layout.sites, layout.topology, level)
    if not found:
        raise CannotDo(f"the labels of the nodes do not say which {level} they are in")
    shared = len({short_name(domain) for domain in found}) < len(found)
    return tuple(
        LostMemory(f"{level} {domain if shared else short_name(domain)}", frozenset(workers))
        for domain, workers in found.items()
    )


def _loss(asked: str, layout: JobLayout, pods: Mapping[str, int]) -> LostMemory:
    kind, equals, name = asked.partition("=")
    workers = [site.worker for site in layout.sites]
    if not equals:
        if kind == "crash":
            return LostMemory("one training process", frozenset())
        if kind == "all":
            return LostMemory("every pod", frozenset(workers))
        raise CannotDo(_usage(asked, layout), USAGE)
    if kind == "worker":
        if not name.isdigit() or int(name) not in workers:
            raise CannotDo(f"there is no worker {name}: workers are 0 to {len(workers) - 1}", USAGE)
        return LostMemory(f"worker {int(name)}", frozenset({int(name)}))
    if kind == "pod":
        if name not in pods:
            raise CannotDo(
                f'the job has no pod "{name}"; see: {program()} status {layout.name} --wide', USAGE
            )
        return LostMemory(f"pod {name}", frozenset({pods[name]}))
    if kind == "node":
        found = frozenset(site.worker for site in layout.sites if site.node == name)
        if not found:
            raise CannotDo(f'no worker is on a node "{name}"; see: {program()} plan {layout.name}', USAGE)
        return LostMemory(f"node {name}", found)
    if kind in layout.topology.level_names:
        return _domain(kind, name, layout)
    raise CannotDo(_usage(asked, layout), USAGE)


def _domain(level: str, name: str, layout: JobLayout) -> LostMemory:
    """By the whole path or by its last part, if that is only one's."""
    domains = workers_by_domain(layout.sites, layout.topology, level)
    found = [path for path in domains if name in (path, short_name(path))]
    if len(found) > 1:
        raise CannotDo(f"there are several of the name {name}: say which of {', '.join(found)}", USAGE)
    if not found:
        known = sorted({short_name(path) for path in domains})
        there = (
            f"there are {', '.join(known[:8])}{' ...' if len(known) > 8 else ''}"
            if known
            else "the labels name none"
        )
        raise CannotDo(f'no worker is in a {level} "{name}": {there}', USAGE)
    return LostMemory(f"{level} {name}", frozenset(domains[found[0]]))


def _usage(asked: str, layout: JobLayout) -> str:
    levels = ", ".join(f"{level}=NAME" for level in layout.topology.level_names)
    return f'"{asked}" is nothing that can be lost: say node=NAME, pod=NAME, worker=N, {levels}, all or crash'


def hit(loss: LostMemory, layout: JobLayout) -> str:
    """How much that is: "2 nodes, 2 workers, 16 ranks"."""
    if not loss.workers:
        return "no pod, no memory"
    nodes = {site.node for site in layout.sites if site.worker in loss.workers}
    ranks = len(loss.workers) * layout.spec.procs_per_worker
    parts = [plural(len(nodes), "node"), plural(len(loss.workers), "worker")]
    return ", ".join([*parts, plural(ranks, "rank")] if ranks != len(loss.workers) else parts)


_BANDWIDTH = {Tier.PEER: PEER_BANDWIDTH, Tier.REMOTE: REMOTE_BANDWIDTH}
"""Bytes per second and worker."""
_NO_DELTAS_EVERY, _DELTAS_EVERY = 50, 10
"""Steps between snapshots where neither the spec nor the status says."""


@dataclass(frozen=True)
class HeldSteps:
    """What a job holds when something dies."""

    newest: int
    """The newest step trained."""
    held: Mapping[Tier, int]
    """The newest step that is complete in each tier; 0: none is. A tier that the job lacks is not in it."""
    step_seconds: float
    planned: bool = False
    """The job is only a plan, so its steps are made up, from the midst of its life."""


@dataclass(frozen=True)
class Comeback:
    """What training comes back to."""

    step: int
    """0: from scratch."""
    workers: Mapping[Tier, tuple[int, ...]]
    """By the farthest tier that each needs; from scratch nothing is in here."""

    @property
    def farthest(self) -> Tier | None:
        """The tier that the worst-off rank needs; None: training begins from scratch."""
        return list(self.workers)[-1] if self.workers else None


@dataclass(frozen=True)
class ProcessForecast:
    """How many training processes outlive a failure."""

    stay: int
    restart: int
    why: str = ""
    """Why more than the lost ones start anew, as a clause; empty: they do not."""

    def __str__(self) -> str:
        if self.stay:
            return f"{self.stay} stay, {self.restart} {'starts' if self.restart == 1 else 'start'} anew"
        return f"all {self.restart} start anew{f': {self.why}' if self.why else ''}"


def forecast_processes(
    spec: JobSpec, workers: int, lost: int, job: Mapping[str, Any] | None, from_scratch: bool = False
) -> ProcessForecast:
    """`workers`: as many as the job has now. `lost`: so many pods; 0: one process ends. `job`: None if it is
    only a plan, whose loop is taken to be `checkpointer.steps`."""
    ranks, known = workers * spec.procs_per_worker, ((job or {}).get("status") or {}).get("conditions") or ()
    found = next((each for each in known if each["type"] == IN_PROCESS), None)
    # A health check is for a place where nothing else runs, so it leaves none of a pod.
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
    """The answer to one question."""

    loss: LostMemory
    state: HeldSteps
    comeback: Comeback
    processes: ProcessForecast
    ranks: Mapping[Tier, int]
    """By the farthest tier that each needs."""
    without_training: Estimate
    from_whom: Mapping[int, tuple[int, ...]]
    """By worker that needs a peer: who would be left to give it its state."""

    @property
    def lost_steps(self) -> int:
        return self.state.newest - self.comeback.step

    @property
    def lost_seconds(self) -> float | None:
        """Training that has to be done again; None: not known."""
        return None if self.state.planned else self.lost_steps * self.state.step_seconds


def held_steps(layout: JobLayout, job: Mapping[str, Any] | None) -> HeldSteps:
    """The job as it is now. One that does not run is taken half-way between two versions of its slowest tier,
    long after the start."""
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
    usual = spec.snapshot_every or (_DELTAS_EVERY if deltas else _NO_DELTAS_EVERY)
    every = checkpoint.get("snapshotEverySteps") or usual
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
    """`job`: None if it is only a plan."""
    past = recoveries(job) if job is not None else ()
    found, spec = find_comeback(layout.placement, state, loss.workers), layout.spec
    spare = 0 < len(loss.workers) <= spec.spares
    size = (spec.state_size or 0) * spec.procs_per_worker
    carry = size / _BANDWIDTH[found.farthest] if found.farthest in _BANDWIDTH else 0.0
    return WhatIf(
        loss=loss,
        state=state,
        comeback=found,
        processes=forecast_processes(
            spec, len(layout.sites), len(loss.workers), job, from_scratch=found.farthest is None
        ),
        ranks={tier: len(those) * spec.procs_per_worker for tier, those in found.workers.items()},
        without_training=estimate(past, AssumedFailure(found.farthest, bool(loss.workers), spare, carry)),
        from_whom={worker: _left(worker, loss, layout) for worker in found.workers.get(Tier.PEER, ())},
    )


def _left(worker: int, loss: LostMemory, layout: JobLayout) -> tuple[int, ...]:
    for group in layout.placement.groups:
        if worker in group.members:
            return tuple(other for other in group.workers if other != worker and other not in loss.workers)
    return tuple(holder for holder in layout.placement.holders[worker] if holder not in loss.workers)


def find_comeback(placement: Placement, state: HeldSteps, lost: Collection[int]) -> Comeback:
    """`lost` are the workers that vanish with their memory; none of them: the training command crashes."""
    copy = _artifacts(state.held[Tier.PEER])
    own = _artifacts(state.held[Tier.LOCAL], state.held[Tier.PEER])
    hosted: dict[int, dict[int, Artifacts]] = {}
    for worker, holders in enumerate(placement.holders):
        for holder in holders:
            hosted.setdefault(holder, {})[worker] = copy
    blocks: dict[int, dict[Share, Artifacts]] = {}
    for group in placement.groups:
        for index, holder in enumerate(group.holders):
            blocks.setdefault(holder, {})[Share(index, group.members)] = copy
    workers = range(len(placement.holders))
    stored = state.held.get(Tier.REMOTE)
    problem = RecoveryProblem(
        ranks=len(workers),
        ranks_per_worker=1,  # the ranks of a worker share its fate and its holders
        history=History((Branch(1, 0),)),
        inventories=[
            JobInventory(worker, {worker: own}, hosted.get(worker, {}), blocks.get(worker, {}))
            for worker in workers
            if worker not in lost
        ],
        remote=RemoteInventory(
            configured=stored is not None,
            reachable=True,
            versions=frozenset({Version(stored, 1)} if stored else ()),
        ),
        step_seconds=state.step_seconds,
        last_step=state.newest,
        groups=placement.groups,
    )
    decision = decide_recovery(problem)
    if isinstance(decision, StartFresh):
        return Comeback(0, {})
    assert isinstance(decision, Recover)
    stock = problem.stock
    needed = {worker: stock.of(decision.version).tier_of(worker, decision.version) for worker in workers}
    by_tier = {tier: tuple(w for w in workers if needed[w] is tier) for tier in Tier}
    return Comeback(decision.version.step, {tier: those for tier, those in by_tier.items() if those})


def _artifacts(*steps: int) -> Artifacts:
    """What a complete chain leads to counts as a snapshot: the decision asks for nothing else."""
    return Artifacts(snapshots=frozenset(Version(step, 1) for step in steps if step))
