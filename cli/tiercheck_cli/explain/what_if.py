"""Says what a job would come back to if workers vanished now, by the code that decides it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Branch, History, Share, Version
from tiercheck_cli.simulate.scenario import Scenario
from tiercheck_operator.planning.recovery.inventory import Artifacts, JobInventory, RemoteInventory
from tiercheck_operator.planning.recovery.recovery import (
    Recover,
    RecoveryProblem,
    StartFresh,
    decide_recovery,
)

_HISTORY = History((Branch(1, 0),))


@dataclass(frozen=True)
class Consequence:
    """What follows from a loss."""

    lost_workers: tuple[int, ...]
    """Whose memory is gone."""
    tiers: Mapping[Tier, int]
    """Ranks by the farthest tier that each needs; tiers without ranks are left out, and nothing is in here
    from scratch."""
    workers: Mapping[Tier, tuple[int, ...]]
    """The same by worker."""
    step: int
    """What training comes back to; 0: from scratch."""
    lost_steps: int
    seconds: float
    """Without training, up to the first step; the lost steps are to be trained again on top of that."""
    reason: str
    """The recovery's own sentence."""

    @property
    def farthest(self) -> Tier | None:
        """The tier that the worst-off rank needs; None: training begins from scratch."""
        order = [tier for tier in (Tier.REMOTE, Tier.PEER, Tier.LOCAL) if tier in self.tiers]
        return order[0] if order else None


def what_if(scenario: Scenario, lost: Collection[int] = (), step: int | None = None) -> Consequence:
    """`lost` are the workers that vanish with their memory; none of them: the training command crashes.
    `step` is the newest one trained; default: one from which half a remote interval would be lost. Raises
    ValueError as `Scenario.placed` does.
    """
    at = _typical_step(scenario) if step is None else step
    gone = frozenset(lost)
    placement, saving = scenario.placed, scenario.saving
    own = _artifacts(saving.local(at), saving.peer(at))
    copy = _artifacts(saving.peer(at))
    hosted: dict[int, dict[int, Artifacts]] = {}
    for worker, holders in enumerate(placement.holders):
        for holder in holders:
            hosted.setdefault(holder, {})[worker] = copy
    blocks: dict[int, dict[Share, Artifacts]] = {}
    for group in placement.groups:
        for index, holder in enumerate(group.holders):
            blocks.setdefault(holder, {})[Share(index, group.members)] = copy
    situation = RecoveryProblem(
        ranks=len(scenario.sites),
        ranks_per_worker=1,  # the ranks of a worker share its fate and its holders
        history=_HISTORY,
        inventories=[
            JobInventory(worker, {worker: own}, hosted.get(worker, {}), blocks.get(worker, {}))
            for worker in range(len(scenario.sites))
            if worker not in gone
        ],
        remote=_remote_inventory(scenario, at),
        step_seconds=scenario.step_seconds,
        last_step=at,
        restore_seconds=scenario.times.restore,
        groups=placement.groups,
    )
    decision = decide_recovery(situation)
    times = scenario.times
    down = times.detect + times.restart
    if gone:
        down += times.spare if len(gone) <= scenario.spares else times.replace
    if isinstance(decision, StartFresh):
        return Consequence(tuple(sorted(gone)), {}, {}, 0, at, down, decision.reason)
    assert isinstance(decision, Recover)
    stock = situation.stock
    workers: dict[Tier, list[int]] = {}
    for worker in range(situation.ranks):
        tier = stock.tier_of(worker, decision.version)
        assert tier is not None
        workers.setdefault(tier, []).append(worker)
    found = {tier: tuple(workers[tier]) for tier in Tier if tier in workers}
    farthest = list(found)[-1]
    restore = {
        Tier.LOCAL: times.restore.local,
        Tier.PEER: times.restore.peer,
        Tier.REMOTE: times.restore.remote,
    }
    return Consequence(
        lost_workers=tuple(sorted(gone)),
        tiers={tier: len(those) * scenario.procs_per_worker for tier, those in found.items()},
        workers=found,
        step=decision.version.step,
        lost_steps=decision.lost_steps,
        seconds=down + restore[farthest],
        reason=decision.reason,
    )


def _typical_step(scenario: Scenario) -> int:
    """Half-way between two versions of the slowest tier, long after the start."""
    saving = scenario.saving
    if saving.remote_every is not None:
        return 10 * saving.remote_every + saving.remote_every // 2 + saving.remote_lag
    return 100 * saving.snapshot_every + saving.snapshot_every // 2 + saving.peer_lag


def _remote_inventory(scenario: Scenario, step: int) -> RemoteInventory:
    stored = scenario.saving.remote(step)
    return RemoteInventory(
        configured=scenario.saving.remote_every is not None,
        reachable=True,
        versions=frozenset({Version(stored, 1)} if stored else ()),
    )


def _artifacts(*steps: int) -> Artifacts:
    """What a complete chain leads to counts as a snapshot: the decision asks for nothing else."""
    return Artifacts(snapshots=frozenset(Version(step, 1) for step in steps if step))
