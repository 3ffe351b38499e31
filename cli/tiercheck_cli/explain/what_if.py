"""Answers what would happen if something died now, by the code with which the operator decides it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Branch, History, Share, Version
from tiercheck_cli.events.recoveries import PastRecovery
from tiercheck_cli.explain.estimate import AssumedFailure, Estimate, estimate
from tiercheck_cli.explain.losses import LostMemory
from tiercheck_cli.layout import JobLayout
from tiercheck_cli.simulate.assumptions import PEER_BANDWIDTH, REMOTE_BANDWIDTH
from tiercheck_cli.simulate.scenario import Saving
from tiercheck_operator.planning.placement.placement import Placement
from tiercheck_operator.planning.recovery.inventory import Artifacts, JobInventory, RemoteInventory
from tiercheck_operator.planning.recovery.recovery import (
    Recover,
    RecoveryProblem,
    StartFresh,
    decide_recovery,
)

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
class WhatIf:
    """The answer to one question."""

    loss: LostMemory
    state: HeldSteps
    comeback: Comeback
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
    loss: LostMemory, layout: JobLayout, state: HeldSteps, past: tuple[PastRecovery, ...] = ()
) -> WhatIf:
    """`past`: the job's recoveries, newest first."""
    found, spec = find_comeback(layout.placement, state, loss.workers), layout.spec
    spare = 0 < len(loss.workers) <= spec.spares
    size = (spec.state_size or 0) * spec.procs_per_worker
    carry = size / _BANDWIDTH[found.farthest] if found.farthest in _BANDWIDTH else 0.0
    return WhatIf(
        loss=loss,
        state=state,
        comeback=found,
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
    needed = {worker: stock.tier_of(worker, decision.version) for worker in workers}
    by_tier = {tier: tuple(w for w in workers if needed[w] is tier) for tier in Tier}
    return Comeback(decision.version.step, {tier: those for tier, those in by_tier.items() if those})


def _artifacts(*steps: int) -> Artifacts:
    """What a complete chain leads to counts as a snapshot: the decision asks for nothing else."""
    return Artifacts(snapshots=frozenset(Version(step, 1) for step in steps if step))
